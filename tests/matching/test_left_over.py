"""What a matching leaves over: what may be left out, what goes further, and the fewest questions with their answers."""

import json
from pathlib import Path

import pytest
import torch
from click.testing import CliRunner, Result
from torch import nn

import ckpt_tools
from ckpt_tools.cli import match as command
from ckpt_tools.errors import MatchError, NothingMatchedError, UsageError
from ckpt_tools.matching import match
from ckpt_tools.matching.left_over.extras import extras
from ckpt_tools.matching.left_over.questions import questions
from ckpt_tools.matching.params import Param
from tests.support.commands import main


class Net(nn.Module):
    """An auxiliary head, as Inception has it, or none."""

    def __init__(self, *, aux: bool) -> None:
        super().__init__()
        self.first = nn.Conv2d(3, 4, 1)
        if aux:
            self.AuxLogits = nn.Sequential(nn.Conv2d(4, 5, 1), nn.BatchNorm2d(5), nn.Linear(5, 2))
        self.last = nn.Linear(4, 2)


def ckpt(*arguments: str | Path) -> Result:
    """Run the command."""
    return CliRunner().invoke(main, [str(argument) for argument in arguments])


@pytest.fixture
def files(tmp_path: Path) -> tuple[Path, Path]:
    """A checkpoint with an auxiliary head, and one without."""
    paths = tmp_path / "aux.pth", tmp_path / "plain.pth"
    for path, aux in zip(paths, (True, False), strict=True):
        torch.save(Net(aux=aux).state_dict(), path)
    return paths


# --- what the target lacks


def test_a_head_that_the_target_lacks_is_one_glob(files: tuple[Path, Path], tmp_path: Path) -> None:
    """match and convert say it in one sentence; with the drop it says the conversion is done, without it nothing is written."""
    said = "'AuxLogits.*', 9 tensors: not in the target"
    shown = ckpt("match", files[0], "--like", files[1])
    assert (shown.exit_code, f"{said}; ckpt convert --drop 'AuxLogits.*'" in shown.output) == (1, True), shown.output
    out = tmp_path / "out.pth"
    with pytest.raises(MatchError) as caught:
        ckpt_tools.convert(files[0], out, like=files[1])
    assert caught.value.why.endswith(f"{said}.")
    assert "`drop='AuxLogits.*'`" in caught.value.fix
    assert not out.exists()
    ckpt_tools.convert(files[0], out, like=files[1], drop="AuxLogits.*")
    assert list(torch.load(out)) == list(torch.load(files[1]))


def test_globs_take_what_is_left_over_and_nothing_else() -> None:
    """The highest module of which nothing is used; else a last name that nothing else has; else the name itself."""
    used = ["a.0.weight", "a.1.weight", "b.weight"]
    spare = ["aux.x.weight", "aux.y.bias", "a.0.index", "a.1.index", "b.odd[0]"]
    source = dict.fromkeys([*used, *spare], (2,))
    found = extras(spare, source)
    assert [(extra.glob, len(extra.names)) for extra in found] == [("aux.*", 2), ("*.index", 2), ("b.odd[[]0]", 1)]


def test_what_may_be_a_missing_tensor_is_not_said_to_be_left_out() -> None:
    """A tensor of a shape, or with a last name, that the target misses may be just that."""
    source = {"a.weight": (2,), "aux.weight": (3,), "a.table": (4,), "b.table": (4,)}
    spare = ["aux.weight", "a.table", "b.table"]
    assert [extra.glob for extra in extras(spare, source)] == ["aux.*", "*.table", "b.*"]
    assert not extras(spare[:1], source, {"head.weight": (3,)})
    assert not [extra for extra in extras(spare, source, {"c.table": (5,)}) if extra.glob == "*.table"]


# --- questions and answers


def unclear(depth: int) -> tuple[list[Param], list[Param]]:
    """Layers of two modules of one shape, whose names mean nothing."""
    one = [Param(f"layers.{n}.{name}.{leaf}", shape) for n in range(depth) for name in ("one", "two")
           for leaf, shape in (("weight", (4, 4)), ("bias", (4,)))]  # fmt: skip
    other = [Param(f"blocks.{n}.{name}.{leaf}", shape) for n in range(depth) for name in ("red", "sea")
             for leaf, shape in (("weight", (4, 4)), ("bias", (4,)))]  # fmt: skip
    return one, other


def test_one_question_settles_all_layers() -> None:
    """Two modules a layer, 14 layers: one question with two answers; either answer leaves nothing over, and is obeyed."""
    old, new = unclear(14)
    (question,) = questions(match(old, new, stages="structure").ambiguous)
    assert (question.new, question.candidates) == ("blocks.{i}.red", ("layers.{i}.one", "layers.{i}.two"))
    for candidate in question.candidates:
        found = match(old, new, stages="structure", pairs=[question.answer(candidate)])
        assert found.complete
        assert all((row.old.split(".")[2] == candidate[-3:]) == (".red." in row.new) for row in found.matched)
        assert all(row.old.split(".")[1] == row.new.split(".")[1] for row in found.matched)


@pytest.mark.parametrize(
    ("pair", "expected"),
    [
        ("a.0.w.weight=x.0.w.weight", {"x.0.w.weight": "a.0.w.weight"}),
        ("a.1=x.0", {"x.0.w.weight": "a.1.w.weight"}),
        ("a.{i}.w=x.{i}.w", {"x.0.w.weight": "a.0.w.weight", "x.1.w.weight": "a.1.w.weight"}),
        ("a.*.weight=x.*.weight", {"x.0.w.weight": "a.0.w.weight", "x.1.w.weight": "a.1.w.weight"}),
        (("a", "x"), {"x.0.w.weight": "a.0.w.weight", "x.1.w.weight": "a.1.w.weight"}),
    ],
)
def test_pairs_name_tensors_modules_globs_and_numbers(pair: str | tuple[str, str], expected: dict[str, str]) -> None:
    """What the user names comes first; numbers in braces are the same on both sides."""
    old, new = ([Param(f"{side}.{n}.w.weight", (2, 2)) for n in range(2)] for side in "ax")
    found = match(old, new, pairs=[pair])
    assert {row.new: row.old for row in found.matched if row.reason == "pair"} == expected


def test_pairs_win_over_names_and_are_not_doubted() -> None:
    """Two tensors whose names say otherwise: the user's word stands, in every stage; another shape is a mismatch."""
    old, new = ([Param("a.weight", (2, 2)), Param("b.weight", (2, 2)), Param("c.weight", (3,))] for _ in range(2))
    for stages in ("exact+wrappers", "names", "structure"):
        found = match(old, new, stages=stages, pairs=["a=b", "b=a"])
        assert {row.new: row.old for row in found.matched} == {
            "b.weight": "a.weight",
            "a.weight": "b.weight",
            "c.weight": "c.weight",
        }
    assert [(row.old, row.new) for row in match(old, new, pairs=["c=a"]).mismatched] == [("c.weight", "a.weight")]


@pytest.mark.parametrize(
    ("pairs", "error"),
    [(["a"], UsageError), (["a.{i}=b"], UsageError), (["a.*=b"], UsageError), (["zzz=a"], NothingMatchedError),
     (["a=b", "a=a"], UsageError), (["a=b", "b=b"], UsageError)],
)  # fmt: skip
def test_answers_that_cannot_be_meant(pairs: list[str], error: type[Exception]) -> None:
    """No two sides, places on one side only, names that are not there, one tensor in two pairs."""
    side = [Param("a.weight", (2, 2)), Param("b.weight", (2, 2))]
    with pytest.raises(error, match="pair"):
        match(side, side, pairs=pairs)


# --- what the user sees


def test_the_option_that_goes_further_was_tried(tmp_path: Path) -> None:
    """Other names: `--match structure` is named, with sizes of 1 `--allow-reshape` too; then nothing more."""
    torch.save({"a.weight": torch.ones(4, 3, 1, 1), "b.bias": torch.ones(7)}, tmp_path / "a.pth")
    torch.save({"x.weight": torch.ones(4, 3), "y.bias": torch.ones(7)}, tmp_path / "b.pth")
    arguments = ["match", str(tmp_path / "a.pth"), "--like", str(tmp_path / "b.pth")]
    assert "--match structure --allow-reshape finds 2 partners more" in ckpt(*arguments).output
    advice = json.loads(ckpt(*arguments, "--match", "structure", "--json").output)["advice"]
    assert advice["further"] == ["--allow-reshape"]
    done = json.loads(ckpt(*arguments, "--match", "structure", "--allow-reshape", "--json").output)
    assert (done["complete"], done["advice"]) == (True, {"further": [], "extras": [], "questions": []})


def test_answers_on_the_command_line_and_in_convert(tmp_path: Path) -> None:
    """`ckpt match` prints the answers as they are typed; with one of them `convert --like` does it too."""
    old, new = unclear(2)
    for path, side in ((tmp_path / "old.pth", old), (tmp_path / "new.pth", new)):
        torch.save({param.name: torch.randn(param.shape) for param in side}, path)
    shown = ckpt("match", tmp_path / "old.pth", "--like", tmp_path / "new.pth", "--match", "structure").output
    assert "which is blocks.{i}.red (4 tensors)?" in shown
    assert "    --pair 'layers.{i}.two=blocks.{i}.red'" in shown
    options = ["--like", str(tmp_path / "new.pth"), "--match", "structure", "--pair", "layers.{i}.two=blocks.{i}.red"]
    assert ckpt("match", tmp_path / "old.pth", *options).exit_code == 0
    assert ckpt("convert", tmp_path / "old.pth", tmp_path / "out.pth", *options).exit_code == 0
    before, after = torch.load(tmp_path / "old.pth"), torch.load(tmp_path / "out.pth")
    torch.testing.assert_close(after["blocks.1.red.weight"], before["layers.1.two.weight"])
    assert ckpt("match", tmp_path / "old.pth", *options[:4], "--ask").exit_code == 2  # not a terminal


def test_asking_goes_on_until_nothing_is_open(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """On a terminal each answer is a pair, and what it settles is not asked; the pairs are printed to be used again."""
    old, new = unclear(3)
    for path, side in ((tmp_path / "old.pth", old), (tmp_path / "new.pth", new)):
        torch.save({param.name: torch.randn(param.shape) for param in side}, path)
    monkeypatch.setattr(command, "_on_terminal", lambda: True)
    arguments = ["match", tmp_path / "old.pth", "--like", tmp_path / "new.pth", "--match", "structure", "--ask"]
    done = CliRunner().invoke(main, [str(argument) for argument in arguments], input="2\n")
    assert done.exit_code == 0, done.output
    assert "--pair 'layers.{i}.two=blocks.{i}.red'" in done.stderr
    assert "every tensor has its partner" in done.stdout
