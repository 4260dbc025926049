"""`--from`: the model that the checkpoint was made by runs beside the target, and nothing else does."""

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from ckpt_tools import convert, match
from ckpt_tools.errors import CkptError, ConvertError, UsageError
from ckpt_tools.torch import load_state_dict
from tests.support import attention
from tests.support.terminal import run

pytestmark = pytest.mark.filterwarnings("ignore:.*torch.jit.*:DeprecationWarning", "ignore::torch.jit.TracerWarning")
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
    assert report.graphs is not None
    assert (len(report.graphs.ran), report.graphs.inputs, report.graphs.problem) == (2, ("1x16x8",), "")
    assert {row.reason for row in report.matching.matched} == {"graph"}


def test_convert_writes_what_computes_the_same(alpha: Path, tmp_path: Path) -> None:
    """Converted with the plan that --from gave, the new model gives the old one's outputs."""
    match(alpha, like=NEW, from_=OLD, input="2x5x8", output=tmp_path / "plan.toml")
    convert(alpha, tmp_path / "new.pth", plan=tmp_path / "plan.toml")
    new = attention.New()
    new.load_state_dict(load_state_dict(tmp_path / "new.pth"))
    old = attention.Old()
    old.load_state_dict({name.removeprefix("module."): value for name, value in load_state_dict(alpha).items()})
    sample = torch.randn(2, 5, 8)
    torch.testing.assert_close(new(sample), old(sample))


class Single(nn.Module):
    """An attention that takes one vector as well as a row of them."""

    def __init__(self) -> None:
        super().__init__()
        self.alpha, self.beta, self.gamma = (nn.Linear(8, 8) for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        scores: Tensor = self.alpha(x) @ self.beta(x).transpose(-1, -2)
        return scores.softmax(-1) @ self.gamma(x)


class Counted(nn.Module):
    """The same, with the keys first: of one vector its softmax is along the other dimension."""

    def __init__(self) -> None:
        super().__init__()
        self.w, self.x, self.y = (nn.Linear(8, 8) for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        scores: Tensor = self.w(x) @ self.x(x).transpose(-1, -2)
        return scores.softmax(1).transpose(-1, -2) @ self.y(x)


def test_an_input_that_would_decide_is_not_guessed(tmp_path: Path) -> None:
    """Where both take a vector and a row of vectors, and compute different things, --input says which."""
    path = tmp_path / "plain.pth"
    torch.save(Single().state_dict(), path)
    report = match(path, like=Counted(), from_=Single())
    assert report.graphs is not None
    assert report.graphs.problem.startswith("both run on 1x8 and on 1x16x8")
    assert not report.matching.matched
    told = match(path, like=Counted(), from_=Single(), input="1x16x8")
    assert {row.old.partition(".")[0]: row.new.partition(".")[0] for row in told.matching.matched} == {
        "alpha": "x",
        "beta": "w",
        "gamma": "y",
    }


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
    path = tmp_path / "picky.pth"
    torch.save(Picky().state_dict(), path)
    return path


def test_where_no_usual_input_will_do_names_decide(picky: Path) -> None:
    """The report says why the models were not compared; with `--input` they are, on the CPU where values are asked for."""
    report = match(picky, like=PLAIN, from_=PICKY)
    assert report.graphs is not None
    assert report.graphs.problem.startswith(f"{PICKY} raised TypeError")
    assert not report.matching.matched
    report = match(picky, like=PLAIN, from_=PICKY, input=["3x8", "2x2"])
    assert [(row.old, row.new) for row in report.matching.matched if row.new.endswith("weight")] == [
        ("b.weight", "p.weight"), ("a.weight", "q.weight"),
    ]  # fmt: skip


def test_a_live_model_stays_as_it_is(picky: Path) -> None:
    model, target = Plain().train(), Plain()
    model.p.eval()
    before = {name: value.clone() for name, value in model.state_dict().items()}
    torch.save(before, picky)
    match(picky, like=target, from_=model, input=["3x8", "2x2"])
    assert (model.training, model.p.training, model.q.training) == (True, False, True)
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())


REFUSED: list[tuple[dict[str, Any], type[CkptError], str]] = [
    ({"input": "1x8"}, UsageError, "`input` needs `from_`, the model of IN"),
    ({"from_": OLD, "match": "position"}, UsageError, "leaves nothing to it"),
    ({"from_": OLD, "input": "8x"}, UsageError, "`input='8x'` is not an input"),
    ({"from_": OLD, "input": "3x3"}, ConvertError, "raised when it ran"),
    ({"from_": PLAIN}, ConvertError, "is not the model of the checkpoint"),
    ({"from_": "single.pth"}, UsageError, "`from_` does not make a model"),
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
    done = run("match", alpha, "--like", NEW, "--input", "1x8")
    assert done.exit_code == 3 or done.exit_code == 2
    assert "--input needs --from, the model of IN" in done.output
