"""ckpt prove tells the truth: what differs is never called equal, what is equal never different, the rest is refused."""

import functools
import itertools
import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import ckpt_tools
from ckpt_tools import Proved
from ckpt_tools.errors import ConvertError
from tests.support.terminal import ROOT
from tests.support.terminal import run as ckpt


class Net(nn.Module):
    """A linear layer; what is done to its output is given."""

    def __init__(self, after: Callable[[torch.Tensor], Any] = lambda x: x, before: nn.Module | None = None) -> None:
        super().__init__()
        self.before = before or nn.Identity()
        self.fc = nn.Linear(4, 4)
        self.after = after

    def forward(self, x: torch.Tensor) -> Any:
        return self.after(self.fc(self.before(x)))


@pytest.fixture
def path(tmp_path: Path) -> Path:
    torch.manual_seed(5)
    return saved(Net(), tmp_path / "net.pth")


def saved(model: nn.Module, path: Path) -> Path:
    torch.save(model.state_dict(), path)
    return path


def proved(path: Path, old: Any, new: Any, **named: Any) -> Proved:
    return ckpt_tools.prove(path, path, model=(old, new), **{"inputs": "3x4"} | named)


# --- what each of them is given, and what comes out


def test_a_model_that_changes_its_inputs(path: Path) -> None:
    """Each model gets inputs of its own: what the first one writes into them is not seen by the second."""
    assert proved(path, Net(before=nn.ReLU(inplace=True)), Net(before=nn.ReLU()))
    assert not proved(path, Net(before=nn.ReLU(inplace=True)), Net())


def test_outputs_that_the_next_run_overwrites(path: Path) -> None:
    """A model that gives the same memory each time has given other numbers before."""

    class Reused(Net):
        def forward(self, x: torch.Tensor) -> Any:
            self.memory: torch.Tensor = getattr(self, "memory", torch.zeros(3, 4))
            return self.memory.copy_(self.fc(x))

    assert proved(path, Net(), Reused())


@dataclass
class Record:
    second: torch.Tensor
    first: torch.Tensor


class Plain:
    def __init__(self, first: torch.Tensor, second: torch.Tensor) -> None:
        self.first, self.second = first, second


def test_outputs_are_compared_by_name(path: Path) -> None:
    """The order of a mapping or a record does not matter; a tuple is taken in its order."""
    mapping = Net(lambda x: {"first": x, "second": x * 2})
    for same in (
        lambda x: {"second": x * 2, "first": x}, lambda x: Record(x * 2, x), lambda x: Plain(x, x * 2), lambda x: (x, x * 2),
    ):  # fmt: skip
        report = proved(path, mapping, Net(same))
        assert (bool(report), report.outputs, report.left_out) == (True, 2, [])
    for other in (lambda x: {"second": x, "first": x * 2}, lambda x: (x * 2, x), lambda x: Plain(x * 2, x)):
        assert not proved(path, mapping, Net(other))


def test_outputs_that_one_of_them_lacks_are_told(path: Path) -> None:
    """What the other model does not give is not compared, and that is said."""
    report = proved(path, Net(lambda x: {"logits": x, "aux": x * 3}), Net(lambda x: {"logits": x}))
    assert (bool(report), report.outputs, report.left_out) == (True, 1, ["aux of the old model"])
    report = proved(path, Net(), Net(lambda x: (x, [x + 1])))
    assert (bool(report), report.outputs, report.left_out) == (True, 1, ["[1][0] of the new model"])
    with pytest.raises(ConvertError, match="no output in common"):
        proved(path, Net(lambda x: {"a": x, "b": x}), Net(lambda x: {"c": x, "d": x, "e": x}))


def test_outputs_that_are_numbers_complex_sparse_or_nothing(path: Path) -> None:
    """Plain numbers, imaginary parts and sparse tensors are compared; where there is nothing to compare, nothing is proved."""
    assert proved(path, Net(lambda x: float(x.sum())), Net(lambda x: x.sum().item()))
    assert not proved(path, Net(lambda x: float(x.sum())), Net(lambda x: x.sum().item() + 1))
    assert proved(path, Net(lambda x: torch.complex(x, x)), Net(lambda x: torch.complex(x, x)))
    assert not proved(path, Net(lambda x: torch.complex(x, x)), Net(lambda x: torch.complex(x, -x)))
    assert proved(path, Net(lambda x: x.relu().to_sparse()), Net(torch.relu))
    assert not proved(path, Net(lambda x: x.relu().to_sparse()), Net())
    with pytest.raises(ConvertError, match="gives no numbers"):
        proved(path, Net(lambda x: "text"), Net(lambda x: None))


# --- nothing is proved


def test_outputs_that_are_not_numbers(path: Path) -> None:
    """NaN is equal to nothing: a proof over it is refused; where only one model gives it, they differ."""
    broken = Net(lambda x: x * float("nan"))
    with pytest.raises(ConvertError, match="NaN"):
        proved(path, broken, broken)
    with pytest.raises(ConvertError, match="24 of 48 numbers are NaN"):
        proved(path, *[Net(lambda x: (x, x.sub(x).div(0)))] * 2)
    assert not proved(path, Net(), broken)
    masked = Net(lambda x: x.masked_fill(x < 0, -torch.inf))
    assert proved(path, masked, masked)


def test_outputs_that_do_not_depend_on_the_inputs(path: Path) -> None:
    """Outputs that are the same for every input prove nothing of what is before them."""
    for nothing in (torch.zeros_like, lambda x: x * 0 + 1):
        with pytest.raises(ConvertError, match="the same for all sets of inputs"):
            proved(path, Net(nothing), Net(nothing, before=nn.ReLU()))


def test_a_tensor_that_nothing_depends_on(path: Path) -> None:
    """A tensor with other numbers that the output does not show is not proved; with the same ones it is the old one's."""

    class Unused(Net):
        def __init__(self) -> None:
            super().__init__()
            self.aux = nn.Linear(4, 2)

    old, new = saved(Unused(), path.with_name("old.pth")), saved(Unused(), path.with_name("new.pth"))
    state = torch.load(old)
    torch.save(torch.load(new) | {name: state[name] for name in ("fc.weight", "fc.bias")}, new)
    report = ckpt_tools.prove(old, new, model=Unused, inputs="3x4")
    assert report.equal
    assert not report
    assert [(row.name, row.reached, row.numel) for row in report.unproved] == [("aux.weight", 0, 8), ("aux.bias", 0, 2)]
    assert ckpt_tools.prove(old, old, model=Unused, inputs="3x4").unproved == []


def test_rows_that_no_input_reaches(tmp_path: Path) -> None:
    """An embedding with other rows, of which the inputs reach a few, is not proved; with enough of them it is different."""
    model = nn.Embedding(1000, 4)
    old = saved(model, tmp_path / "old.pth")
    with torch.no_grad():
        model.weight[:] = torch.cat([model.weight[:900], model.weight[900:].flip(0)])
    new = saved(model, tmp_path / "new.pth")
    report = ckpt_tools.prove(old, new, model=lambda: nn.Embedding(1000, 4), inputs="1x4:900")
    assert report.equal
    assert not report
    (row,) = report.unproved
    assert (row.name, 4 <= row.reached <= 32) == ("weight", True)
    assert not ckpt_tools.prove(old, new, model=lambda: nn.Embedding(1000, 4), inputs="64x64:1000").equal


def test_fused_weights_that_are_reached_are_proved(tmp_path: Path) -> None:
    """Tensors without a partner of the same numbers are proved by what they do to the output, buffers too."""

    class Apart(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a, self.b, self.norm = nn.Linear(4, 4), nn.Linear(4, 4), nn.BatchNorm1d(8)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.norm(torch.cat([self.a(x), self.b(x)], 1))

    class Fused(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.ab, self.norm = nn.Linear(4, 8), nn.BatchNorm1d(8)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.norm(self.ab(x))

    model = Apart()
    old = saved(model, tmp_path / "old.pth")
    state = model.state_dict()
    for kind in ("weight", "bias"):
        state[f"ab.{kind}"] = torch.cat([state.pop(f"a.{kind}"), state.pop(f"b.{kind}")])
    torch.save(state, tmp_path / "new.pth")
    report = ckpt_tools.prove(old, tmp_path / "new.pth", model=(Apart, Fused), inputs="3x4")
    assert report, report


def test_one_module_for_both(path: Path) -> None:
    """A callable that gives the same module each time, or parts of it, is filled twice and compared with what it was."""
    only = functools.cache(Net)
    state = torch.load(path)
    torch.save(state | {"fc.bias": state["fc.bias"] + 1}, path.with_name("other.pth"))
    assert not ckpt_tools.prove(path, path.with_name("other.pth"), model=only, inputs="3x4")
    shared = nn.Linear(4, 4)

    def around() -> Net:
        model = Net()
        model.fc = shared
        return model

    assert not ckpt_tools.prove(path, path.with_name("other.pth"), model=around, inputs="3x4")


# --- randomness


def test_a_model_that_is_random(path: Path) -> None:
    """Numbers that no seed decides, and dropout that stays on in one of them, are no difference of the models: refused."""
    counter = itertools.count()
    with pytest.raises(ConvertError, match="when it runs again on the same inputs"):
        proved(path, *[Net(lambda x: x + next(counter))] * 2)
    for dropping in (
        lambda x: nn.functional.dropout(x, 0.5),
        lambda x: nn.functional.dropout(nn.functional.dropout(x, 0.3), 0.5),
    ):
        with pytest.raises(ConvertError, match="random"):
            proved(path, Net(), Net(dropping))


def test_one_seed_for_both(path: Path) -> None:
    """Models that draw the same numbers are equal, and a fault before the draw is found; the caller's seed is left alone."""
    noisy, other = Net(lambda x: x + torch.randn_like(x)), Net(lambda x: x + torch.randn_like(x), before=nn.ReLU())
    torch.manual_seed(11)
    wanted = torch.rand(3)
    torch.manual_seed(11)
    assert proved(path, noisy, noisy)
    report = proved(path, noisy, other)
    assert torch.equal(torch.rand(3), wanted)
    assert report.fault is not None
    assert (report.fault.where, report.fault.kind, report.fault.new_kind) == ("before", "Identity", "ReLU")


class Stubborn(Net):
    """A network that is never evaluated: train mode stays."""

    def train(self, mode: bool = True) -> "Stubborn":
        for module in self.modules():
            module.training = True
        return self


def test_a_model_that_stays_in_train_mode(path: Path) -> None:
    assert proved(path, Net(), Stubborn(before=nn.Dropout(0.5)))


# --- precision


class Norm(nn.Module):
    """A norm that insists on float32 inside, as language models' do."""

    def __init__(self, *, inside: bool, eps: float = 1e-6) -> None:
        super().__init__()
        self.fc, self.weight, self.inside, self.eps = nn.Linear(4, 4), nn.Parameter(torch.rand(4)), inside, eps

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.fc(x)
        given = x.dtype
        held = x.to(torch.float32) if self.inside else x
        table = torch.tensor([0.1, 0.3, 0.5, 0.7], dtype=torch.float32) if self.inside else torch.tensor([0.1, 0.3, 0.5, 0.7])
        held = held * torch.rsqrt(held.pow(2).mean(-1, keepdim=True) + self.eps) * table.float()
        return self.weight * held.to(given)


def test_float32_inside_a_model_is_no_difference(tmp_path: Path) -> None:
    """Both compute in float64 where one of them casts to float32 on the way; another epsilon still is a difference."""
    path = saved(Norm(inside=True), tmp_path / "n.pth")
    report = proved(path, lambda: Norm(inside=True), lambda: Norm(inside=False))
    assert (bool(report), report.dtype) == (True, "float64"), report
    assert not proved(path, lambda: Norm(inside=True), lambda: Norm(inside=False, eps=1e-5))


class Guarded(nn.Module):
    """A network that takes nothing but float32."""

    def __init__(self, eps: float = 1e-6) -> None:
        super().__init__()
        self.fc, self.norm = nn.Linear(8, 8), nn.LayerNorm(8, eps=eps)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if x.dtype != torch.float32:
            raise TypeError("float32 is wanted")
        return self.norm(self.fc(x))


def test_another_epsilon_in_float32(tmp_path: Path) -> None:
    """Where both run in float32, what counts as equal is what rounding would do, and not much more."""
    path = saved(Guarded(), tmp_path / "g.pth")
    report = proved(path, Guarded, Guarded, inputs="4x8")
    assert (bool(report), report.dtype) == (True, "float32")
    assert report.tolerance < 1e-5
    assert not proved(path, Guarded, lambda: Guarded(1e-5), inputs="4x8")


class Waves(nn.Module):
    """Positions by a formula: in the file, or computed when the model is made, or when it runs."""

    def __init__(self, place: str) -> None:
        super().__init__()
        self.fc = nn.Linear(8, 8)
        if place != "run":
            self.register_buffer("table", self.waves(), persistent=place == "file")

    @staticmethod
    def waves() -> torch.Tensor:
        return (torch.arange(16)[:, None] * 0.37 ** torch.arange(8)).sin()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.fc(x + getattr(self, "table", self.waves()))


def test_constants_that_are_computed_elsewhere(tmp_path: Path) -> None:
    """Numbers that one model has in its file, and the other computes as it is made or as it runs, are the same in float32."""
    model = Waves("file")
    old = saved(model, tmp_path / "old.pth")
    state = model.state_dict()
    table = state.pop("table")
    torch.save(state, tmp_path / "new.pth")
    for place in ("making", "run"):
        models = (lambda: Waves("file"), lambda place=place: Waves(place))
        report = ckpt_tools.prove(old, tmp_path / "new.pth", model=models, inputs="2x16x8")
        assert report, report
    torch.save(state | {"table": table * (1 + 1e-7)}, old)
    fault = ckpt_tools.prove(
        old, tmp_path / "new.pth", model=(lambda: Waves("file"), lambda: Waves("making")), inputs="2x16x8"
    ).fault
    assert fault is not None
    assert (fault.where, fault.reasons) == ("", ("table is the old one, but for float32's rounding",))


def test_complex_weights(tmp_path: Path) -> None:
    class Spectral(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.randn(5, 5, dtype=torch.cfloat))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return torch.fft.irfft(torch.fft.rfft(x) @ self.weight)

    path = saved(Spectral(), tmp_path / "s.pth")
    assert proved(path, Spectral, Spectral, inputs="3x8")


def test_the_page_of_what_is_not_proved(path: Path) -> None:
    """The command says which outputs were left out and which tensors are not proved, and its exit code is 1 for those."""
    models = ROOT / "tests" / "support" / "proving.py"
    torch.manual_seed(1)
    old, new = path.with_name("old.pth"), path.with_name("new.pth")
    state = {
        "fc.weight": torch.randn(4, 4), "fc.bias": torch.randn(4), "aux.weight": torch.randn(4, 4), "aux.bias": torch.randn(4),
    }  # fmt: skip
    torch.save(state, old)
    torch.save(state | {"aux.bias": torch.randn(4)}, new)
    command = ("prove", old, new, "--model", f"{models}:WithAux", "--model", f"{models}:WithoutAux", "--input", "3x4")
    result = ckpt(*command)
    assert result.exit_code == 1
    assert result.output.startswith("equal, but not fully checked: ")
    assert "unproved  aux.bias: no output is seen to depend on it, and its numbers are not the old model's" in result.output
    assert "left out  [1] of the old model" in result.output
    document = json.loads(ckpt(*command, "--json").stdout)
    assert (document["equal"], document["unproved"][0]["name"], document["outputs"]) == (True, "aux.bias", 1)


def test_a_cast_of_trained_batch_norms_is_equal_within_a_tolerance(tmp_path: Path) -> None:
    """Outputs depend on running statistics too, by which torch has no derivative."""
    torch.manual_seed(5)
    model = nn.Sequential(nn.Conv2d(3, 4, 3), nn.InstanceNorm2d(4, track_running_stats=True), nn.BatchNorm2d(4, affine=False))
    model(torch.randn(8, 3, 5, 5))
    old = saved(model, tmp_path / "old.pth")
    new = saved(model.bfloat16(), tmp_path / "new.pth")
    assert ckpt_tools.prove(old, new, model=model.float(), inputs="2x3x5x5", tolerance=0.05)
    model.get_buffer("2.running_mean").add_(9)
    assert not ckpt_tools.prove(old, saved(model, tmp_path / "other.pth"), model=model, inputs="2x3x5x5", tolerance=0.05)


def test_checkpoints_in_float64_keep_their_digits(tmp_path: Path) -> None:
    torch.manual_seed(5)
    model = nn.Linear(4, 4).double()
    with torch.no_grad():
        model.weight += 1e-9
    old = saved(model, tmp_path / "old.pth")
    new = saved(model.float(), tmp_path / "new.pth")
    report = ckpt_tools.prove(old, new, model=nn.Linear(4, 4), inputs="2x4", tolerance=1e-10)
    assert (bool(report), report.dtype) == (False, "float64")
