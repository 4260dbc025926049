"""`convert --fill-from`: what a checkpoint lacks comes from another one."""

import zipfile
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from ckpt_tools import convert
from ckpt_tools.errors import ConvertError, UsageError

ORIGINAL = {"head.weight": torch.rand(4, 3), "tower.weight": torch.rand(5, 2).half(), "tower.steps": torch.arange(3)}


def test_missing_tensors_come_from_the_original(tmp_path: Path) -> None:
    """The input's own stay, with its edited names; the rest is the original's, in its dtype, or cast with all."""
    save_file(ORIGINAL, tmp_path / "original.safetensors")
    tuned = {"module.head.weight": torch.rand(4, 3), "module.new.weight": torch.rand(2)}
    torch.save(tuned, tmp_path / "tuned.pth")
    for name in ("out.pth", "out.safetensors"):
        report = convert(
            tmp_path / "tuned.pth", tmp_path / name, strip_module=True, fill_from=tmp_path / "original.safetensors"
        )
        assert report.filled.keys() == {"tower.weight", "tower.steps"}
        assert any(note.code == "only-in-input" and "new.weight" in note.text for note in report.notes)
        made = load_file(tmp_path / name) if name.endswith("s") else torch.load(tmp_path / name)
        wanted = {**ORIGINAL, "head.weight": tuned["module.head.weight"], "new.weight": tuned["module.new.weight"]}
        assert made.keys() == wanted.keys()
        assert all(torch.equal(made[key], wanted[key]) and made[key].dtype is wanted[key].dtype for key in wanted)
    cast = tmp_path / "cast.pth"
    convert(tmp_path / "tuned.pth", cast, strip_module=True, fill_from=tmp_path / "original.safetensors", dtype="bf16")
    assert torch.load(cast)["tower.weight"].dtype is torch.bfloat16


def test_a_tie_of_the_original_is_one_with_the_inputs_tensor(tmp_path: Path) -> None:
    """A head that is tied in the original becomes the input's embedding, not the original's."""
    embedding = torch.rand(4, 3)
    torch.save({"embed.weight": embedding, "head.weight": embedding}, tmp_path / "original.pth")
    torch.save({"embed.weight": embedding + 1}, tmp_path / "tuned.pth")
    convert(tmp_path / "tuned.pth", tmp_path / "out.pth", fill_from=tmp_path / "original.pth")
    made = torch.load(tmp_path / "out.pth")
    assert torch.equal(made["head.weight"], embedding + 1)
    assert made["head.weight"].data_ptr() == made["embed.weight"].data_ptr()


def test_what_cannot_be_filled_is_refused(tmp_path: Path) -> None:
    """Another shape, no common name, a target as well: nothing is written."""
    torch.save(ORIGINAL, tmp_path / "original.pth")
    torch.save({"head.weight": torch.rand(5, 3)}, tmp_path / "shape.pth")
    torch.save({"module.head.weight": torch.rand(4, 3)}, tmp_path / "wrapped.pth")
    out, original = tmp_path / "out.pth", tmp_path / "original.pth"
    with pytest.raises(ConvertError, match=r"'head.weight' has the shape 4x3 .* 5x3 in IN"):
        convert(tmp_path / "shape.pth", out, fill_from=original)
    with pytest.raises(ConvertError, match="no name in common"):
        convert(tmp_path / "wrapped.pth", out, fill_from=original)
    with pytest.raises(UsageError, match="does not go with"):
        convert(tmp_path / "shape.pth", out, fill_from=original, like=original)
    assert not out.exists()


def test_records_without_a_checksum_get_one(tmp_path: Path) -> None:
    """An original that torch wrote without CRC-32 gives an archive with all of them."""
    torch.serialization.set_crc32_options(False)
    try:
        torch.save(ORIGINAL, tmp_path / "original.pth")
    finally:
        torch.serialization.set_crc32_options(True)
    torch.save({"head.weight": torch.rand(4, 3)}, tmp_path / "tuned.pth")
    convert(tmp_path / "tuned.pth", tmp_path / "out.pth", fill_from=tmp_path / "original.pth")
    with zipfile.ZipFile(tmp_path / "out.pth") as archive:
        assert archive.testzip() is None
