"""What a matching leaves over: what may be left out, what goes further, and the fewest questions with their answers."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from ckpt_tools.errors import NothingMatchedError, UsageError
from tests.support.matching import Shapes, by_names, matched, reported

# --- what the target lacks


def globs(old: Shapes, new: Shapes) -> list[tuple[str, int]]:
    """What the target lacks, as globs, and how many tensors each takes."""
    return [(extra.glob, len(extra.names)) for extra in reported(old, new, None).advice.extras]


def test_globs_take_what_is_left_over_and_nothing_else() -> None:
    """The highest module of which nothing is used; else a last name that nothing else has; else the name itself."""
    used = ["a.0.weight", "a.1.weight", "b.weight"]
    spare = ["aux.x.weight", "aux.y.bias", "a.0.index", "a.1.index", "b.odd[0]"]
    found = globs(dict.fromkeys([*used, *spare], (2,)), dict.fromkeys(used, (2,)))
    assert found == [("aux.*", 2), ("*.index", 2), ("b.odd[[]0]", 1)]


def test_what_may_be_a_missing_tensor_is_not_said_to_be_left_out() -> None:
    """A tensor of a shape, or with a last name, that the target misses may be just that."""
    old = {"a.weight": (2,), "aux.weight": (3,), "a.table": (4,), "b.table": (4,)}
    assert globs(old, {"a.weight": (2,)}) == [("aux.*", 1), ("*.table", 1), ("b.*", 1)]
    assert ("aux.*", 1) not in globs(old, {"a.weight": (2,), "head.weight": (3,)})
    assert ("*.table", 1) not in globs(old, {"a.weight": (2,), "c.table": (5,)})


# --- questions and answers


def unclear(depth: int) -> tuple[Shapes, Shapes]:
    """Layers of two modules of one shape, whose names mean nothing."""
    one, other = (
        {f"{block}.{n}.{name}.{leaf}": shape for n in range(depth) for name in names
         for leaf, shape in (("weight", (4, 4)), ("bias", (4,)))}
        for block, names in (("layers", ("one", "two")), ("blocks", ("red", "sea")))
    )  # fmt: skip
    return one, other


def test_one_question_settles_all_layers() -> None:
    """Two modules a layer, 14 layers: one question with two answers; either answer leaves nothing over, and is obeyed."""
    old, new = unclear(14)
    (question,) = reported(old, new).advice.questions
    assert (question.new, question.candidates) == ("blocks.{i}.red", ("layers.{i}.one", "layers.{i}.two"))
    for candidate in question.candidates:
        found = matched(old, new, pair=[question.answer(candidate)])
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
    old, new = ([f"{side}.{n}.w.weight" for n in range(2)] for side in "ax")
    found = by_names(old, new, pair=[pair])
    assert {row.new: row.old for row in found.matched if row.reason == "pair"} == expected


def test_pairs_win_over_names_and_are_not_doubted() -> None:
    """Two tensors whose names say otherwise: the user's word stands, in every stage; another shape is a mismatch."""
    side = {"a.weight": (2, 2), "b.weight": (2, 2), "c.weight": (3,)}
    for stages in ("exact+wrappers", "names", "structure"):
        found = matched(side, side, stages, pair=["a=b", "b=a"])
        expected = {("a.weight", "b.weight"), ("b.weight", "a.weight"), ("c.weight", "c.weight")}
        assert {(row.old, row.new) for row in found.matched} == expected
    assert [(row.old, row.new) for row in matched(side, side, None, pair=["c=a"]).mismatched] == [("c.weight", "a.weight")]


@pytest.mark.parametrize(
    ("pairs", "error"),
    [(["a"], UsageError), (["a.{i}=b"], UsageError), (["a.*=b"], UsageError), (["zzz=a"], NothingMatchedError),
     (["a=b", "a=a"], UsageError), (["a=b", "b=b"], UsageError)],
)  # fmt: skip
def test_answers_that_cannot_be_meant(pairs: list[str], error: type[Exception]) -> None:
    """No two sides, places on one side only, names that are not there, one tensor in two pairs."""
    with pytest.raises(error, match="pair"):
        by_names(["a.weight", "b.weight"], ["a.weight", "b.weight"], pair=pairs)


# --- what the user sees


@pytest.mark.skipif(os.name == "nt", reason="there are no pseudo-terminals")
def test_asking_goes_on_until_nothing_is_open(tmp_path: Path) -> None:
    """On a terminal each answer is a pair, and what it settles is not asked; the pairs are printed to be used again."""
    old, new = unclear(3)
    for path, side in ((tmp_path / "old.pth", old), (tmp_path / "new.pth", new)):
        torch.save({name: torch.randn(shape) for name, shape in side.items()}, path)
    command = [sys.executable, "-m", "ckpt_tools", "match", "old.pth", "--like", "new.pth", "--match", "structure", "--ask"]
    ours, theirs = os.openpty()
    os.write(ours, b"2\n")
    done = subprocess.run(command, stdin=theirs, stderr=theirs, stdout=subprocess.PIPE, cwd=tmp_path, check=False, timeout=60)
    told = os.read(ours, 1 << 16).decode()
    for end in (ours, theirs):
        os.close(end)
    assert (done.returncode, "--pair 'layers.{i}.two=blocks.{i}.red'" in told) == (0, True), told
    assert b"every tensor has its partner" in done.stdout
