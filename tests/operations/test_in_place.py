"""Edits in place: the same result as a copy, tensors untouched, and a kill at any moment leaves the old file or the new one."""

from pathlib import Path
from typing import Any, Literal

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch.distributed import checkpoint as dcp

import ckpt_tools
from ckpt_tools.errors import ConvertError
from ckpt_tools.torch import load_state_dict
from tests.support.commands import ckpt


def weights(count: int = 12) -> dict[str, torch.Tensor]:
    """Wrapped names with a tie and a view."""
    made = {f"module.layer.{index}.weight": torch.full((30, 40), float(index)) for index in range(count)}
    made["module.head.weight"] = made["module.layer.0.weight"]
    made["module.view.weight"] = torch.arange(100.0)[10:90:2]
    return made


@pytest.fixture
def pth(tmp_path: Path) -> Path:
    """A wrapped training checkpoint."""
    path = tmp_path / "model.pth"
    torch.save({"model": weights(), "epoch": 3}, path)
    return path


def test_dead_bytes_are_reported_and_removed(tmp_path: Path) -> None:
    """What an edit leaves behind is a finding whose command removes it."""
    path = tmp_path / "names.pth"
    torch.save({f"module.{'x' * 200}.{index}.weight": torch.ones(1) for index in range(300)}, path)
    ckpt_tools.edit_in_place(path, rename=r"x+\.=")
    findings = {finding.code: finding for finding in ckpt_tools.inspect(path).findings}
    assert findings["dead-bytes"].fix.startswith("ckpt convert ")
    ckpt_tools.convert(path, tmp_path / "small.pth")
    assert "dead-bytes" not in {finding.code for finding in ckpt_tools.inspect(tmp_path / "small.pth").findings}


def test_safetensors_in_the_room_that_the_header_has(tmp_path: Path) -> None:
    """Shorter names fit always; longer ones where convert has left room; else the file is left alone."""
    path = tmp_path / "model.safetensors"
    save_file({name: tensor.clone() for name, tensor in weights().items()}, path, metadata={"format": "pt", "note": "kept"})
    old, names = path.read_bytes(), list(load_file(path))
    with pytest.raises(ConvertError, match="room"):
        ckpt_tools.edit_in_place(path, add_prefix="a.long.prefix.")
    assert path.read_bytes() == old
    ckpt_tools.edit_in_place(path, strip_module=True)
    assert path.stat().st_size == len(old)
    assert list(load_file(path)) == [name.removeprefix("module.") for name in names]
    ckpt_tools.convert(path, tmp_path / "roomy.safetensors")
    ckpt_tools.edit_in_place(tmp_path / "roomy.safetensors", add_prefix="a.long.prefix.")
    assert load_file(tmp_path / "roomy.safetensors")["a.long.prefix.layer.3.weight"].equal(torch.full((30, 40), 3.0))
    with ckpt_tools.open_checkpoint(tmp_path / "roomy.safetensors") as checkpoint:
        assert checkpoint.decoded.metadata["note"] == "kept"


def test_legacy_without_room(tmp_path: Path) -> None:
    """Names that do not fit, and edits that leave storages out, are refused; the file is left alone."""
    path = tmp_path / "legacy.pth"
    torch.save({"model": weights(2), "odd": Odd()}, path, _use_new_zipfile_serialization=False)
    old = path.read_bytes()
    with pytest.raises(ConvertError, match=r"would grow \d+ bytes beyond its room"):
        ckpt_tools.edit_in_place(path, add_prefix="a.very.long.prefix." * 40, objects="keep")
    with pytest.raises(ConvertError, match="changes tensor bytes"):
        ckpt_tools.edit_in_place(path, strip_module=True, objects="drop")
    assert path.read_bytes() == old


def test_legacy_to_the_last_byte(tmp_path: Path) -> None:
    """Room for one name of exactly so many characters: it fits, and so do those that are a few bytes shorter."""
    path = tmp_path / "legacy.pth"
    torch.save(weights(2), path, _use_new_zipfile_serialization=False)
    old = path.read_bytes()
    with pytest.raises(ConvertError) as error:
        ckpt_tools.edit_in_place(path, rename=rf"view={'v' * 5000}")
    fits = 5000 - int(error.value.what.split()[4])
    for length in range(fits - 8, fits + 1):
        path.write_bytes(old)
        ckpt_tools.edit_in_place(path, rename=rf"view={'v' * length}")
        assert torch.equal(
            torch.load(path, weights_only=True)[f"module.{'v' * length}.weight"], weights()["module.view.weight"]
        )
    with pytest.raises(ConvertError, match="grow 1 bytes"):
        ckpt_tools.edit_in_place(path, rename=rf"{'v' * length}={'v' * (length + 1)}")


class Odd:
    """An object that holds a tensor of its own."""

    def __init__(self) -> None:
        self.tensor = torch.zeros(3)


def test_tensors_begin_at_a_multiple_of_eight(pth: Path, tmp_path: Path) -> None:
    """Whatever the names, the header of a safetensors file ends at a multiple of eight bytes, with the room in it."""
    for length in range(1, 9):
        path = tmp_path / "room.safetensors"
        ckpt_tools.convert(pth, path, select="model", add_prefix="x" * length, overwrite=True)
        size = int.from_bytes(path.read_bytes()[:8], "little")
        assert size % 8 == 0
        assert size > 4096


@pytest.mark.parametrize("options", [["out.pth"], ["--keep", "*"], ["--dtype", "bf16"], ["--overwrite"], ["--format", "pth"]])
def test_what_does_not_go_in_place(pth: Path, options: list[str], tmp_path: Path) -> None:
    """Options that move tensors, and an OUT, are refused before anything is read."""
    old = pth.read_bytes()
    ckpt("convert", pth, "--in-place", "--strip-module", *options, code=2)
    assert pth.read_bytes() == old


def test_links_are_followed(pth: Path, tmp_path: Path) -> None:
    """A symlink stays a link; the file behind it is edited."""
    link = tmp_path / "link.pth"
    link.symlink_to(pth)
    ckpt_tools.edit_in_place(link, strip_module=True)
    assert link.is_symlink()
    assert "layer.0.weight" in torch.load(pth)["model"]


# --- kills and failures


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
def test_a_part_of_a_distributed_checkpoint(tmp_path: Path) -> None:
    """Found by an attack: torch found no archive any more where .metadata says that it lies, and check found nothing."""
    folder, link = tmp_path / "saved", tmp_path / "link.pth"
    dcp.save({"module.a": torch.ones(10)}, checkpoint_id=folder, no_dist=True)
    part = folder / "__0_0.distcp"
    link.symlink_to(part)
    old = part.read_bytes()
    assert ckpt_tools.check(folder, ignore=["wrapper-prefix"]).verdict == "healthy"
    for path in (part, link):
        with pytest.raises(ConvertError, match=r"ckpt convert \S*saved OUT"):
            ckpt_tools.edit_in_place(path, map_location="cuda")
    assert part.read_bytes() == old
    for changed in (old[:-100], old[:-22] + b"x" * 22, b"PK\3\4", b""):
        part.write_bytes(changed)
        report = ckpt_tools.check(folder)
        assert report.exit_code
        assert report.container is None or "misplaced-chunk" in {row.code for row in report.findings}
    part.write_bytes(old)
    part.rename(tmp_path / "alone.distcp")
    ckpt_tools.edit_in_place(tmp_path / "alone.distcp", map_location="cuda")


@pytest.mark.parametrize("kind", ["safetensors", "pth"])
def test_a_shard_beside_its_index(pth: Path, tmp_path: Path, kind: Literal["safetensors", "pth"]) -> None:
    """Names in a shard stand in the index too: they stay as they are, and what is in no index changes."""
    folder = tmp_path / "shards"
    ckpt_tools.convert(pth, folder, select="model", shard_size=20_000, format=kind)
    for shard in sorted(folder.glob("*-of-*")):
        old = shard.read_bytes()
        with pytest.raises(ConvertError, match=r"\.index\.json too.*\n.*ckpt convert \S*shards OUT"):
            ckpt_tools.edit_in_place(shard, strip_module=True)
        assert shard.read_bytes() == old
        other: dict[str, Any] = {"map_location": "cuda"} if kind == "pth" else {"set_metadata": "format="}
        ckpt_tools.edit_in_place(shard, **other)
        assert shard.read_bytes() != old
    assert len(load_state_dict(folder, unwrap=False)) == 14
