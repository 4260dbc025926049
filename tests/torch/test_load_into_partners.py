"""`load_into` finds partners by all that `ckpt match` knows: shapes, numbers, pairs that are named, what models compute."""

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from ckpt_tools.errors import MatchError, UsageError
from ckpt_tools.torch import load_into


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
    """A file of its state dict."""
    path = folder / "old.pth"
    torch.save(model.state_dict(), path)
    return path


def expect_same(old: nn.Module, new: nn.Module, shape: tuple[int, ...] = (2, 8)) -> None:
    """Both compute the same of some numbers."""
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
    """The model's own load_state_dict knows none of it."""
    with pytest.raises(UsageError, match=told):
        load_into(New(), saved(Old(), tmp_path), hooks=True, **options)
