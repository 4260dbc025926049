"""`--partial` writes what is whole of shards and of a distributed checkpoint, and lists the rest."""

import json
import shutil
from pathlib import Path

import pytest
import torch

import ckpt_tools
from ckpt_tools.errors import PartError
from tests.support.commands import ckpt
from tests.support.rank_files import fsdp2, save_ranks

ROOT = Path(__file__).parents[2]


def written(folder: Path) -> tuple[dict[str, torch.Tensor], ckpt_tools.Converted]:
    """What `partial` makes of a folder, as torch loads it, and the report."""
    target = folder.parent / "out.pth"
    report = ckpt_tools.convert(folder, target, partial=True)
    return torch.load(target, weights_only=True), report


def test_a_missing_rank(tmp_path: Path) -> None:
    """Files of ranks are read all or not at all; nothing offers what would not help. A whole folder is as ever."""
    save_ranks(tmp_path / "in", fsdp2, 3)
    assert ckpt_tools.convert(tmp_path / "in", tmp_path / "whole.pth", partial=True).dropped == []
    (tmp_path / "in" / "model_world_size_3_rank_1.pt").unlink()
    for partial in (False, True):
        with pytest.raises(PartError, match=r"missing: rank 1\.") as caught:
            ckpt_tools.convert(tmp_path / "in", tmp_path / "out.pth", partial=partial)
        assert "partial" not in str(caught.value)
    assert not (tmp_path / "out.pth").exists()


def test_on_the_command_line(tmp_path: Path) -> None:
    """Exit code 0 comes with the list, as text and as JSON; into a folder too."""
    torch.save({f"layer{number}.weight": torch.ones(5) for number in range(3)}, tmp_path / "one.pth")
    ckpt_tools.convert(tmp_path / "one.pth", tmp_path / "in", shard_size="20B")
    next((tmp_path / "in").glob("*00002-of-00003*")).unlink()
    shown = ckpt("convert", tmp_path / "in", tmp_path / "a.pth", "--partial")
    assert "layer1.weight (in model-00002-of-00003.safetensors, which is missing)" in shown.output
    shown = ckpt("convert", tmp_path / "in", tmp_path / "b", "--partial", "--shard-size", "1GB", "--json")
    assert [row[0] for row in json.loads(shown.output)["dropped"]] == ["layer1.weight"]


@pytest.mark.parametrize("index", [True, False])
def test_shards_of_which_one_is_missing(index: bool, tmp_path: Path) -> None:
    """What is in the others; with an index the tensors of the missing one are listed by name."""
    state = {f"layer{number}.weight": torch.full((5,), float(number)) for number in range(3)}
    torch.save(state, tmp_path / "one.pth")
    ckpt_tools.convert(tmp_path / "one.pth", tmp_path / "in", shard_size="20B")
    if not index:
        next((tmp_path / "in").glob("*.json")).unlink()
    next((tmp_path / "in").glob("*00002-of-00003*")).unlink()
    found, report = written(tmp_path / "in")
    assert {*found} == {"layer0.weight", "layer2.weight"}
    assert [name for name, _ in report.dropped] == (["layer1.weight"] if index else [])
    assert "00002-of-00003" in next(row.text for row in report.notes if row.code == "parts-missing")


def test_a_distributed_checkpoint_without_a_file(tmp_path: Path) -> None:
    """dcp: tensors and values that lie in the files that are there; those with a box in the missing one are listed."""
    folder = ROOT / "fixtures" / "parts" / "dcp"
    expected = torch.load(folder / "reference.pth", weights_only=True)
    shutil.copytree(folder, tmp_path / "in", ignore=shutil.ignore_patterns("reference.pth"))
    assert written(tmp_path / "in")[1].dropped == []
    (tmp_path / "in" / "__2_0.distcp").unlink()
    (tmp_path / "out.pth").unlink()
    found, report = written(tmp_path / "in")
    lost = [name for name, why in report.dropped if why == "in __2_0.distcp, which is missing"]
    assert lost
    assert len(lost) == len(report.dropped)
    flat = {name: value for name, value in found.items() if isinstance(value, torch.Tensor)}
    assert {*flat} | {*lost} == {*expected}
    assert all(torch.equal(value, expected[name]) for name, value in flat.items())
