"""load_into: load hooks are named, and run as load_state_dict runs them; partners by all that `ckpt match` knows."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import ckpt_tools.torch as ckpt
from ckpt_tools.errors import ConvertError, MatchError, UsageError
from ckpt_tools.torch import load_into
from tests.torch.test_load_into import bits
from tests.torch.test_torch import WRAPS


class Overriding(nn.Module):
    """A module that doubles its weight while it is loaded, as older files had half of it."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(3))

    def _load_from_state_dict(self, state_dict: Any, prefix: str, local_metadata: Any, *rest: Any) -> None:
        if local_metadata.get("version", 1) == 1:
            state_dict[f"{prefix}weight"] = state_dict[f"{prefix}weight"] * 2
        super()._load_from_state_dict(state_dict, prefix, local_metadata, *rest)


def rename_old(_module: nn.Module, state_dict: Any, prefix: str, *_: Any) -> None:
    for name in [name for name in state_dict if name.startswith(f"{prefix}fc.")]:
        state_dict[name.replace("fc.", "head.")] = state_dict.pop(name)


def forget(_module: nn.Module, keys: Any) -> None:
    keys.missing_keys[:] = [name for name in keys.missing_keys if not name.endswith("counter")]


class Net(nn.Module):
    """All three kinds of hooks."""

    def __init__(self) -> None:
        super().__init__()
        self.head, self.scaled = nn.Linear(3, 2), Overriding()
        self.register_buffer("counter", torch.zeros(()))
        self.register_load_state_dict_pre_hook(rename_old)  # type: ignore[no-untyped-call]
        self.register_load_state_dict_post_hook(forget)  # type: ignore[no-untyped-call]


OLD = {"fc.weight": torch.ones(2, 3), "fc.bias": torch.arange(2.0), "scaled.weight": torch.arange(3.0)}
HOOKS = "Net's pre-hook rename_old, Net's post-hook forget, Overriding._load_from_state_dict"


@pytest.mark.parametrize("lead", ["", "module.", "_orig_mod.module."])
@pytest.mark.parametrize("wrap", WRAPS)
def test_hooks_are_run_as_load_state_dict_runs_them(wrap: str, lead: str, tmp_path: Path) -> None:
    """With hooks=True any wrapper's file in any wrapped model gives what load_state_dict gives the plain one."""
    torch.save({lead + name: tensor for name, tensor in OLD.items()}, tmp_path / "old.pth")
    plain = Net()
    plain.load_state_dict(OLD)
    model = Net()
    report = ckpt.load_into(WRAPS[wrap](model), tmp_path / "old.pth", hooks=True)
    assert report
    assert bits(model) == bits(plain)
    assert report.notes == [f"load hooks that were run: {HOOKS}"]


def test_versions_reach_the_hooks(tmp_path: Path) -> None:
    saved = nn.DataParallel(nn.Sequential(Overriding()))
    state_dict: Any = saved.state_dict()
    state_dict["module.0.weight"].fill_(3)
    state_dict._metadata["module.0"]["version"] = 2
    torch.save(state_dict, tmp_path / "new.pth")
    model: Any = nn.Sequential(Overriding())
    assert ckpt.load_into(model, tmp_path / "new.pth", hooks=True)
    assert model[0].weight.tolist() == [3, 3, 3]


def test_hooks_that_were_not_run_are_said(tmp_path: Path) -> None:
    """Without hooks=True the report names them, also where their work would have made the file fit."""
    torch.save(Net().state_dict(), tmp_path / "new.pth")
    torch.save(OLD, tmp_path / "old.pth")
    report = ckpt.load_into(Net(), tmp_path / "new.pth")
    assert report.notes == [f"load hooks that were not run: {HOOKS}; hooks=True runs them"]
    with pytest.raises(MatchError, match="which were not run: Net's pre-hook rename_old"):
        ckpt.load_into(Net(), tmp_path / "old.pth")


@pytest.mark.parametrize("wrap", WRAPS)
def test_models_without_hooks_have_no_note(wrap: str, tmp_path: Path) -> None:
    """What torch registers by itself, for batch norms and wrappers, is no hook of the model."""
    model = nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2))
    torch.save(model.state_dict(), tmp_path / "a.pth")
    assert ckpt.load_into(WRAPS[wrap](model), tmp_path / "a.pth").notes == []


def test_a_weight_norm_in_its_old_form(tmp_path: Path) -> None:
    """torch's own hook for weights saved before parametrizations is one that matters."""
    with pytest.warns(FutureWarning):
        old: Any = nn.utils.weight_norm(nn.Linear(3, 2))
    torch.save(old.state_dict(), tmp_path / "old.pth")
    model: Any = nn.utils.parametrizations.weight_norm(nn.Linear(3, 2))
    assert ckpt.load_into(model, tmp_path / "old.pth", hooks=True)
    assert torch.equal(model.parametrizations.weight.original1, old.weight_v)


class OwnLoading(nn.Linear):
    """A model whose load_state_dict is its own, and gives nothing back."""

    def load_state_dict(self, state_dict: Any, strict: bool = True) -> None:  # type: ignore[override]
        super().load_state_dict({name.removeprefix("net."): tensor for name, tensor in state_dict.items()}, strict)


def test_a_load_state_dict_of_its_own(tmp_path: Path) -> None:
    torch.save({"net.weight": torch.ones(1, 1), "net.bias": torch.ones(1)}, tmp_path / "a.pth")
    model = OwnLoading(1, 1)
    assert ckpt.load_into(model, tmp_path / "a.pth", hooks=True).notes == [
        "load hooks that were run: OwnLoading.load_state_dict"
    ]
    assert model.weight.item() == 1


def raising(*_: Any) -> None:
    raise KeyError("what")


def hooked(hook: Callable[..., Any]) -> nn.Module:
    model = nn.Linear(2, 2)
    model.register_load_state_dict_pre_hook(hook)
    return model


REFUSED: dict[str, tuple[Callable[[], nn.Module], dict[str, Any], type[Exception], str]] = {
    "shape": (lambda: nn.Linear(2, 3), {}, MatchError, "size mismatch for weight"),
    "missing": (lambda: nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2)), {}, MatchError, "4 missing: 0.weight"),
    "a hook that raises": (lambda: hooked(raising), {}, ConvertError, "KeyError: 'what'"),
    "meta": (lambda: nn.Linear(2, 2, device="meta"), {}, UsageError, "`assign=True`"),
    "another way to match": (lambda: nn.Linear(2, 2), {"match": "position"}, UsageError, "`match` does not go"),
    "a scheme": (lambda: nn.Linear(2, 2), {"reinit": "zeros"}, UsageError, "`reinit` does not go"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_what_does_not_load(case: str, tmp_path: Path) -> None:
    """What load_state_dict says, what is left over, and what hooks=True does not go with are errors of ours."""
    make, options, error, text = REFUSED[case]
    torch.save(nn.Linear(2, 2).state_dict(), tmp_path / "a.pth")
    with pytest.raises(error, match=text):
        ckpt.load_into(make(), tmp_path / "a.pth", hooks=True, **options)


def test_what_may_be_left_over_with_hooks(tmp_path: Path) -> None:
    """The globs of allow_missing and allow_unexpected count, and the report says what was left."""
    torch.save({"weight": torch.ones(2, 2), "extra": torch.ones(1)}, tmp_path / "a.pth")
    report = ckpt.load_into(nn.Linear(2, 2), tmp_path / "a.pth", hooks=True, allow_missing="bias", allow_unexpected="ex*")
    assert (report.loaded, report.missing, report.unexpected) == (["weight"], ["bias"], ["extra"])


def test_new_tensors_with_hooks(tmp_path: Path) -> None:
    torch.save(nn.Linear(2, 2).state_dict(), tmp_path / "a.pth")
    model = nn.Linear(2, 2, device="meta")
    assert ckpt.load_into(model, tmp_path / "a.pth", hooks=True, assign=True)
    assert not model.weight.is_meta


class Old(nn.Module):
    """Three square layers whose names say nothing; they are made in another order than they run."""

    def __init__(self) -> None:
        super().__init__()
        self.c, self.a, self.b = nn.Linear(8, 8), nn.Linear(8, 8), nn.Linear(8, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        made: torch.Tensor = self.c(self.b(self.a(x).relu()).tanh())
        return made


class New(nn.Module):
    """The same network under other names, made in the order in which it runs."""

    def __init__(self) -> None:
        super().__init__()
        self.one, self.two, self.three = nn.Linear(8, 8), nn.Linear(8, 8), nn.Linear(8, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        made: torch.Tensor = self.three(self.two(self.one(x).relu()).tanh())
        return made


def saved(model: nn.Module, folder: Path) -> Path:
    path = folder / "old.pth"
    torch.save(model.state_dict(), path)
    return path


def expect_same(old: nn.Module, new: nn.Module, shape: tuple[int, ...] = (2, 8)) -> None:
    given = torch.rand(shape)
    assert torch.equal(old(given), new(given))


def test_by_pairs(tmp_path: Path) -> None:
    """Modules that the caller pairs are partners, whatever they are called."""
    old, new = Old(), New()
    path = saved(old, tmp_path)
    with pytest.raises(MatchError):
        load_into(new, path)
    assert load_into(new, path, pair={"a": "one", "b": "two", "c": "three"})
    expect_same(old, new)


@pytest.mark.parametrize("options", [{}, {"input": "2x8"}], ids=["usual inputs", "given input"])
def test_by_what_the_models_compute(tmp_path: Path, options: dict[str, Any]) -> None:
    """With a model of the file both run, and what feeds what decides where names and shapes leave it open."""
    old, new = Old(), New()
    with pytest.raises(MatchError):
        load_into(new, saved(old, tmp_path), match="structure")
    assert load_into(new, saved(old, tmp_path), from_=Old(), **options)
    expect_same(old, new)
    assert new.training
    assert old.training


def test_by_values(tmp_path: Path) -> None:
    """A copy under other names is found by its numbers; the numbers of the file come in."""
    old, new = Old(), New()
    for name, other in {"one": "a", "two": "b", "three": "c"}.items():
        new.get_submodule(name).load_state_dict(old.get_submodule(other).state_dict())
    with torch.no_grad():
        old.a.weight[7, 7] += 1
    assert load_into(new, saved(old, tmp_path), match="values")
    expect_same(old, new)


def test_other_shapes(tmp_path: Path) -> None:
    """A convolution of one pixel takes a linear layer's numbers where that is allowed."""
    old, new = nn.Sequential(nn.Linear(4, 3)), nn.Sequential(nn.Conv2d(4, 3, 1))
    path = saved(old, tmp_path)
    with pytest.raises(MatchError):
        load_into(new, path)
    assert load_into(new, path, match="structure", allow_reshape=True)
    given = torch.rand(2, 4)
    assert torch.allclose(old(given), new(given[:, :, None, None]).flatten(1))


@pytest.mark.parametrize(
    ("options", "told"),
    [
        ({"pair": {"a": "one"}}, "`pair`"), ({"match": "names"}, "`match`"), ({"from_": Old}, "`from_`"),
        ({"allow_reshape": True}, "`allow_reshape`"),
    ],
)  # fmt: skip
def test_with_hooks(tmp_path: Path, options: dict[str, Any], told: str) -> None:
    with pytest.raises(UsageError, match=told):
        load_into(New(), saved(Old(), tmp_path), hooks=True, **options)
