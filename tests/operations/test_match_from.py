"""`--from`: the model that the checkpoint was made by runs beside the target, and nothing else does."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from click.testing import CliRunner
from torch import Tensor, nn

from ckpt_tools import convert, match
from ckpt_tools.cli import main
from ckpt_tools.errors import CkptError, TargetError, UsageError
from ckpt_tools.torch import load_state_dict
from tests.support import attention

OLD, NEW = "tests.support.attention:Old", "tests.support.attention:New"


@pytest.fixture
def alpha(tmp_path: Path) -> Path:
    """A checkpoint of the old model, from DataParallel."""
    path = tmp_path / "alpha.pth"
    torch.save({f"module.{name}": value for name, value in attention.Old().state_dict().items()}, path)
    return path


@pytest.mark.parametrize("model", [OLD, attention.Old(), f"{Path(attention.__file__)}:Old"])
def test_both_models_are_run(alpha: Path, model: Any) -> None:
    """The report says what they ran on; wrappers in the file do not matter, nor whether the model is named or live."""
    report = match(alpha, like=NEW, from_=model)
    assert report.matching.complete
    assert report.ran is not None
    assert (report.ran.inputs, report.ran.problem) == (("1x16x8",), "")
    assert {row.reason for row in report.matching.matched} == {"graph"}


def test_convert_writes_what_computes_the_same(alpha: Path, tmp_path: Path) -> None:
    """Converted with --from, the new model gives the old one's outputs."""
    convert(alpha, tmp_path / "new.pth", like=NEW, from_=OLD, input="2x5x8")
    new = attention.New()
    new.load_state_dict(load_state_dict(tmp_path / "new.pth"))
    old = attention.Old()
    old.load_state_dict({name.removeprefix("module."): value for name, value in load_state_dict(alpha).items()})
    sample = torch.randn(2, 5, 8)
    torch.testing.assert_close(new(sample), old(sample))


def test_prove_takes_the_model_of_from(alpha: Path, tmp_path: Path) -> None:
    """`--prove` runs IN in the model of --from."""
    command = ["convert", str(alpha), str(tmp_path / "new.pth"), "--like", NEW, "--from", OLD, "--prove", "2x5x8"]
    done = CliRunner().invoke(main, command)
    assert done.exit_code == 0, done.output
    assert "equal: the largest difference" in done.output


class Picky(nn.Module):
    """A model that takes no usual input, and one that depends on values."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(8, 8), nn.Linear(8, 8)

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        if float(y.sum()) < 0:
            return self.a(x)
        return self.b(self.a(x))


class Plain(nn.Module):
    """The same in another order, with other names."""

    def __init__(self) -> None:
        super().__init__()
        self.p, self.q = nn.Linear(8, 8), nn.Linear(8, 8)

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        return self.p(self.q(x)) + 0 * y.sum()


PICKY, PLAIN = f"{__name__}:Picky", f"{__name__}:Plain"


@pytest.fixture
def picky(tmp_path: Path) -> Path:
    """A checkpoint of it."""
    path = tmp_path / "picky.pth"
    torch.save(Picky().state_dict(), path)
    return path


def test_where_no_usual_input_will_do_names_decide(picky: Path) -> None:
    """The report says why the models were not compared; with `--input` they are, on the CPU where values are asked for."""
    report = match(picky, like=PLAIN, from_=PICKY)
    assert report.ran is not None
    assert report.ran.problem.startswith(f"{PICKY} raised TypeError")
    assert not report.matching.matched
    report = match(picky, like=PLAIN, from_=PICKY, input=["3x8", "2x2"])
    assert [(row.old, row.new) for row in report.matching.matched if row.new.endswith("weight")] == [
        ("b.weight", "p.weight"), ("a.weight", "q.weight"),
    ]  # fmt: skip


def test_a_live_model_stays_as_it_is(picky: Path) -> None:
    """Running a live model changes neither its mode nor its numbers."""
    model, target = Plain().train(), Plain()
    model.p.eval()
    before = {name: value.clone() for name, value in model.state_dict().items()}
    torch.save(before, picky)
    match(picky, like=target, from_=model, input=["3x8", "2x2"])
    assert (model.training, model.p.training, model.q.training) == (True, False, True)
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())


REFUSED: list[tuple[dict[str, Any], type[CkptError], str]] = [
    ({"input": "1x8"}, UsageError, "`input` is about the model of IN; `from_` is missing"),
    ({"from_args": "{}"}, UsageError, "`from_args` is about the model of IN; `from_` is missing"),
    ({"from_": OLD, "match": "position"}, UsageError, "leaves nothing to it"),
    ({"from_": OLD, "input": "8x"}, UsageError, "`input='8x'` is not an input"),
    ({"from_": OLD, "input": "3x3"}, TargetError, "raised when it ran"),
    ({"from_": PLAIN}, TargetError, "is not the model of the checkpoint"),
    ({"from_": "single.pth"}, UsageError, "`from_` does not make a model"),
    ({"from_": OLD, "from_args": "[]"}, UsageError, "`from_args` is not a JSON object"),
    ({"from_": OLD, "from_args": {"x": 1}}, TargetError, "raised TypeError when it was called"),
]


@pytest.mark.parametrize(("options", "error", "message"), REFUSED, ids=[message for _, _, message in REFUSED])
def test_refused(alpha: Path, options: dict[str, Any], error: type[CkptError], message: str) -> None:
    """Options that say nothing, models that are not the checkpoint's, inputs that do not run."""
    if options.get("from_") == "single.pth":
        options = {"from_": str(alpha)}
    with pytest.raises(error) as raised:
        match(alpha, like=NEW, **options)
    assert message in f"{raised.value}"


def test_the_command_line_says_it_in_its_words(alpha: Path) -> None:
    """`from_` in Python is `--from` on the command line, in messages too."""
    done = CliRunner().invoke(main, ["match", str(alpha), "--like", NEW, "--input", "1x8"])
    assert done.exit_code == 3 or done.exit_code == 2
    assert "--input is about the model of IN; --from is missing" in done.output
