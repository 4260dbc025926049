"""Edits in place: what they refuse, and links."""

import shutil
from pathlib import Path

import pytest
import torch
from torch.distributed import checkpoint as dcp

import ckpt_tools
from ckpt_tools.errors import ChangedFileError, ConvertError
from tests.support.commands import ckpt

FIXTURES = Path(__file__).parents[2] / "fixtures"


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


@pytest.mark.parametrize("options", [["out.pth"], ["--shard-size", "1GB"], ["--overwrite"], ["--format", "pth"]])
def test_what_does_not_go_in_place(pth: Path, options: list[str], tmp_path: Path) -> None:
    """An OUT, and options about one, are refused before anything is read."""
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


@pytest.mark.parametrize("part", [
    "parts/fsdp2/model_world_size_4_rank_1.pt", "parts/consolidated/consolidated.01.pth",
    "megatron/tp3/iter_0000002/mp_rank_01/model_optim_rng.pt", "frameworks/types.gguf",
])  # fmt: skip
def test_what_is_refused(part: str, tmp_path: Path) -> None:
    """A rank's part would become the whole model, and the blocks of a GGUF floats."""
    shutil.copytree(FIXTURES / part.rpartition("/")[0], tmp_path / "in")
    path = tmp_path / "in" / part.rpartition("/")[2]
    old = path.read_bytes()
    with pytest.raises(ConvertError):
        ckpt_tools.edit_in_place(path, add_prefix="q.")
    assert path.read_bytes() == old


def test_a_file_that_is_replaced_meanwhile_stays(pth: Path) -> None:
    """Another program put a newer file in its place: that is not overwritten."""

    def progress(done: int, total: int) -> None:
        if done == total:
            torch.save({"newer": torch.ones(2)}, pth.with_name("new"))
            pth.with_name("new").replace(pth)

    with pytest.raises(ChangedFileError, match="was replaced"):
        ckpt_tools.edit_in_place(pth, strip_module=True, progress=progress)
    assert list(torch.load(pth)) == ["newer"]
