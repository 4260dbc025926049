"""`--partial` writes what is whole of the files of ranks, lists the rest, and refuses files that do not belong together."""

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch

import ckpt_tools
from ckpt_tools.errors import PartError
from tests.support.commands import ckpt
from tests.support.rank_files import Cut, fsdp1, fsdp2, hsdp, save_ranks, tp
from tests.support.samples import edit
from tests.support.zero_files import save_zero, trained

ROOT = Path(__file__).parents[2]


def change(path: Path, **values: Any) -> None:
    """One rank's file with other values under some names."""
    edit(path, lambda state: state.update(values))


def written(folder: Path) -> tuple[dict[str, torch.Tensor], ckpt_tools.Converted]:
    """What `partial` makes of a folder, as torch loads it, and the report."""
    target = folder.parent / "out.pth"
    report = ckpt_tools.convert(folder, target, partial=True)
    return torch.load(target, weights_only=True), report


def missing(report: ckpt_tools.Converted) -> str:
    """What is said of the parts that are not there."""
    return next(row.text for row in report.notes if row.code == "parts-missing")


def rank_file(folder: Path, rank: int, world: int = 3) -> Path:
    """A rank's file."""
    return folder / f"model_world_size_{world}_rank_{rank}.pt"


@pytest.mark.parametrize(("cut", "replicated"), [
    (fsdp1, {"bn.running_mean", "bn.running_var", "bn.num_batches_tracked"}),
    (fsdp2, {"bn.running_mean", "bn.running_var", "bn.num_batches_tracked"}),
    (tp, {"emb.weight", "bn.weight", "bn.bias", "head.weight", "b.bias", "bn.running_mean",
          "bn.running_var", "bn.num_batches_tracked"}),
])  # fmt: skip
@pytest.mark.parametrize("gone", [0, 1])
def test_a_missing_rank(cut: Cut, replicated: set[str], gone: int, tmp_path: Path) -> None:
    """What the other ranks have whole equals the model; every other tensor is listed, and the ranks that are missing."""
    expected = save_ranks(tmp_path / "in", cut, 3)
    rank_file(tmp_path / "in", gone).unlink()
    with pytest.raises(PartError, match=rf"(?s)missing: rank {gone}\..*`partial=True`"):
        ckpt_tools.convert(tmp_path / "in", tmp_path / "out.pth")
    found, report = written(tmp_path / "in")
    assert set(found) == replicated
    assert all(torch.equal(value, expected[name]) for name, value in found.items())
    assert {name for name, _ in report.dropped} == set(expected) - replicated
    assert all("elements are on rank" in why for _, why in report.dropped)
    assert f"part is missing: rank {gone};" in missing(report)


def test_a_missing_replica(tmp_path: Path) -> None:
    """HSDP without one of its groups is whole, bit for bit."""
    expected = save_ranks(tmp_path / "in", hsdp, 4)
    for rank in (2, 3):
        rank_file(tmp_path / "in", rank, 4).unlink()
    found, report = written(tmp_path / "in")
    assert list(found) == list(expected)
    assert all(torch.equal(value, expected[name]) for name, value in found.items())
    assert report.dropped == []
    assert missing(report)


def test_buffers_that_every_rank_counts_by_itself(tmp_path: Path) -> None:
    """A batch norm that was not synchronised: its buffers are left out by name, with the ranks; all else is there."""
    expected = save_ranks(tmp_path / "in", fsdp2, 3)
    change(rank_file(tmp_path / "in", 2), **{"bn.running_mean": torch.ones(5), "bn.running_var": torch.zeros(5)})
    with pytest.raises(PartError, match=r"(?s)bn.running_mean.*`partial=True`"):
        ckpt_tools.convert(tmp_path / "in", tmp_path / "out.pth")
    found, report = written(tmp_path / "in")
    assert dict(report.dropped) == dict.fromkeys(("bn.running_mean", "bn.running_var"), "different values on ranks 0, 2")
    assert set(found) == set(expected) - {"bn.running_mean", "bn.running_var"}


@pytest.mark.parametrize("lacking", [0, 2])
def test_a_name_that_one_rank_lacks(lacking: int, tmp_path: Path) -> None:
    """Is left out, also where the first rank is the one without it; so is one with another shape."""
    save_ranks(tmp_path / "in", fsdp2, 3)
    edit(rank_file(tmp_path / "in", lacking), lambda state: state.pop("a.bias"))
    change(rank_file(tmp_path / "in", 1), **{"bn.running_var": torch.zeros(4)})
    found, report = written(tmp_path / "in")
    assert ("a.bias", f"is not on rank {lacking}") in report.dropped
    assert {name for name, _ in report.dropped} == {"a.bias", "bn.running_var"}
    assert not {"a.bias", "bn.running_var"} & set(found)


def test_two_names_of_one_tensor(tmp_path: Path) -> None:
    """They are one on the first rank; the ranks differ in the second, and both are listed: none goes without a word."""
    save_ranks(tmp_path / "in", fsdp2, 2)
    one = torch.ones(4)
    change(rank_file(tmp_path / "in", 0, 2), x=one, y=one)
    change(rank_file(tmp_path / "in", 1, 2), x=torch.ones(4), y=torch.zeros(4))
    found, report = written(tmp_path / "in")
    assert {name for name, _ in report.dropped} == {"x", "y"}
    assert not {"x", "y"} & {*found}


def test_a_list_is_never_shorter(tmp_path: Path) -> None:
    """Of a list nothing can be left out: the others would move up."""
    save_ranks(tmp_path / "in", fsdp2, 2)
    for rank in (0, 1):
        change(rank_file(tmp_path / "in", rank, 2), more=[torch.full((2,), float(rank)), torch.ones(3)])
    with pytest.raises(PartError, match=r"'more\.0' cannot be left out of its list: different values on ranks 0, 1"):
        ckpt_tools.convert(tmp_path / "in", tmp_path / "out.pth", partial=True)


def test_names_that_tell_no_world(tmp_path: Path) -> None:
    """The last ranks are missing, and only the meshes inside say that there were more."""
    expected = save_ranks(tmp_path / "in", fsdp2, 3, name="model.rank_{rank}.pth")
    (tmp_path / "in" / "model.rank_2.pth").unlink()
    with pytest.raises(PartError, match=r"(?s)a job of 3 ranks.*`partial=True`"):
        ckpt_tools.convert(tmp_path / "in", tmp_path / "out.pth")
    found, report = written(tmp_path / "in")
    assert set(found) == {name for name in expected if name.startswith("bn.") and name[3:] not in ("weight", "bias")}
    assert "part is missing: rank 2;" in missing(report)


def test_what_does_not_belong_together_is_refused(tmp_path: Path) -> None:
    """A rank's file under another's name, and values of other steps: mixing them is never whole."""
    save_ranks(tmp_path / "in", fsdp2, 3)
    rank_file(tmp_path / "in", 1).write_bytes(rank_file(tmp_path / "in", 0).read_bytes())
    with pytest.raises(PartError, match="holds the part of rank 0") as caught:
        ckpt_tools.convert(tmp_path / "in", tmp_path / "out.pth", partial=True)
    assert "partial" not in str(caught.value)
    save_ranks(tmp_path / "steps", fsdp2, 2)
    for rank in (0, 1):
        change(rank_file(tmp_path / "steps", rank, 2), step=rank)
    with pytest.raises(PartError, match="'step' is 0 on rank 0"):
        ckpt_tools.convert(tmp_path / "steps", tmp_path / "out.pth", partial=True)
    assert not (tmp_path / "out.pth").exists()


def test_on_the_command_line(tmp_path: Path) -> None:
    """Exit code 0 comes with the list, as text and as JSON; into a folder too; a whole folder has none."""
    save_ranks(tmp_path / "in", tp, 3)
    rank_file(tmp_path / "in", 2).unlink()
    assert "--partial" in ckpt("convert", tmp_path / "in", tmp_path / "a.pth", code=3).output
    shown = ckpt("convert", tmp_path / "in", tmp_path / "a.pth", "--partial")
    assert "a.weight (is not whole: 28 of its 35 elements are on ranks 0, 1)" in shown.output
    shown = ckpt("convert", tmp_path / "in", tmp_path / "b", "--partial", "--shard-size", "1GB", "--json")
    assert [row[0] for row in json.loads(shown.output)["dropped"]] == ["a.weight", "a.bias", "b.weight"]
    save_ranks(tmp_path / "whole", tp, 2)
    assert ckpt_tools.convert(tmp_path / "whole", tmp_path / "c.pth", partial=True).dropped == []


# --- other families


@pytest.mark.parametrize("stage", [1, 2, 3])
@pytest.mark.parametrize("gone", [0, 1, 2])
def test_zero_without_a_rank(stage: int, gone: int, tmp_path: Path) -> None:
    """DeepSpeed: what the other ranks' rows hold, buffers, what is frozen and whole: equal to the model; the rest is listed."""
    tag = save_zero(tmp_path / "in", trained(), stage, 3)
    for path in tag.glob(f"zero_pp_rank_{gone}_*"):
        path.unlink()
    with pytest.raises(PartError, match=rf"(?s)missing: zero_pp_rank_{gone}_\S+\..*`partial=True`"):
        ckpt_tools.convert(tmp_path / "in", tmp_path / "out.pth")
    found, report = written(tmp_path / "in")
    expected = trained().whole
    assert {*found} | {name for name, _ in report.dropped} == {*expected}
    assert not {*found} & {name for name, _ in report.dropped}
    assert all(torch.equal(value, expected[name]) for name, value in found.items())
    own = {"steps", "mean"} | ({"frozen.weight", "frozen.bias"} if stage < 3 else set())
    assert own <= {*found}
    assert "emb.weight" in dict(report.dropped)
    assert "head.weight" in dict(report.dropped)
    assert f"zero_pp_rank_{gone}_mp_rank_00_*" in missing(report)
    one = next(path for path in tag.iterdir() if "optim" in path.name)
    assert ckpt_tools.convert(one, tmp_path / "one.pth", partial=True).dropped == report.dropped
    if stage < 3:  # whose 16-bit weights are whole in one file
        assert ckpt_tools.convert(tmp_path / "in", tmp_path / "m.pth", select="module", partial=True).dropped == []
    with pytest.raises(PartError, match="The optimizer's state needs the files of all ranks"):
        ckpt_tools.convert(tmp_path / "in", tmp_path / "o.pth", select="optimizer", partial=True)


@pytest.mark.parametrize(("gone", "whole", "said"), [
    # Its trained weights are in the optimizer's files; what is frozen has no name, so that the note names the file.
    (("layer_01-*",), None, "layer_01-model_states.pt"),
    # The other stages' layers are whole, and so are the 16-bit weights of layers that nobody trains.
    (("*mp_rank_01_*", "layer_02-*", "layer_03-*"), {"tied_modules.emb.weight", "1.weight", "1.bias"}, "mp_rank_01_*"),
])  # fmt: skip
def test_a_pipeline_without_files(gone: tuple[str, ...], whole: set[str] | None, said: str, tmp_path: Path) -> None:
    """A layer's, or all of a stage."""
    shutil.copytree(ROOT / "fixtures" / "deepspeed" / "pipeline-z1-bf16", tmp_path / "in")
    expected = torch.load(tmp_path / "in" / "reference.pth", weights_only=True)
    (tmp_path / "in" / "reference.pth").unlink()
    for path in [path for pattern in gone for path in (tmp_path / "in" / "global_step2").glob(pattern)]:
        path.unlink()
    found, report = written(tmp_path / "in")
    assert whole is None or {*found} == whole
    assert all(torch.equal(value, expected[name]) for name, value in found.items())
    assert said in missing(report)


@pytest.mark.parametrize("gone", [0, 1, 2])
def test_consolidated_without_a_rank(gone: int, tmp_path: Path) -> None:
    """Meta: norms and frequencies are whole on every rank; the last rank's absence shows in the columns of `wo` alone."""
    norms = {"norm.weight": torch.ones(6), "rope.freqs": torch.arange(3.0)}
    for rank in range(3):
        part = {"layers.0.attention.wo.weight": torch.ones(6, 2), "output.weight": torch.ones(4, 6)}
        if rank != gone:
            (tmp_path / "in").mkdir(exist_ok=True)
            torch.save({**norms, **part}, tmp_path / "in" / f"consolidated.{rank:02d}.pth")
    with pytest.raises(PartError, match=r"(?s)`partial=True`"):
        ckpt_tools.convert(tmp_path / "in", tmp_path / "out.pth")
    found, report = written(tmp_path / "in")
    assert {*found} == {*norms}
    assert {name for name, _ in report.dropped} == {"layers.0.attention.wo.weight", "output.weight"}


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
    assert "00002-of-00003" in missing(report)


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
