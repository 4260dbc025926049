"""Load hooks of a model: load_into names those that it does not run."""

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import ckpt_tools.torch as ckpt
from ckpt_tools.errors import MatchError
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


def test_hooks_that_were_not_run_are_said(tmp_path: Path) -> None:
    """The report names them, also where their work would have made the file fit."""
    torch.save(Net().state_dict(), tmp_path / "new.pth")
    torch.save(OLD, tmp_path / "old.pth")
    report = ckpt.load_into(Net(), tmp_path / "new.pth")
    assert report.notes == [f"load hooks that were not run: {HOOKS}. model.load_state_dict(load_state_dict(path)) runs them."]
    with pytest.raises(MatchError, match="which were not run: Net's pre-hook rename_old"):
        ckpt.load_into(Net(), tmp_path / "old.pth")


@pytest.mark.parametrize("wrap", WRAPS)
def test_models_without_hooks_have_no_note(wrap: str, tmp_path: Path) -> None:
    """What torch registers by itself, for batch norms and wrappers, is no hook of the model."""
    model = nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2))
    torch.save(model.state_dict(), tmp_path / "a.pth")
    assert ckpt.load_into(WRAPS[wrap](model), tmp_path / "a.pth").notes == []


class OwnLoading(nn.Linear):
    """A model whose load_state_dict is its own, and gives nothing back."""

    def load_state_dict(self, state_dict: Any, strict: bool = True) -> None:  # type: ignore[override]
        super().load_state_dict({name.removeprefix("net."): tensor for name, tensor in state_dict.items()}, strict)


def test_a_load_state_dict_of_its_own(tmp_path: Path) -> None:
    """It is named."""
    torch.save({"weight": torch.ones(1, 1), "bias": torch.ones(1)}, tmp_path / "a.pth")
    (note,) = ckpt.load_into(OwnLoading(1, 1), tmp_path / "a.pth").notes
    assert note.startswith("load hooks that were not run: OwnLoading.load_state_dict. ")
