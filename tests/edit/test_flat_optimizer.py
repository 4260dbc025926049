"""An optimizer that torch flattened: `state.fc.weight.exp_avg` is an optimizer's, no model's."""

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_optimizer_state_dict

import ckpt_tools
from ckpt_tools import inspect
from ckpt_tools.torch import load_state_dict
from tests.support.terminal import run as ckpt

STEPS = 1001  # which bfloat16 does not have


@pytest.fixture
def path(tmp_path: Path) -> Path:
    """A model, and its optimizer flattened."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 1))
    optimizer = torch.optim.AdamW(model.parameters())
    model(torch.ones(1, 2)).sum().backward()
    optimizer.step()
    for state in optimizer.state.values():
        state["step"].fill_(STEPS)
    flat = get_optimizer_state_dict(model, optimizer, options=StateDictOptions(flatten_optimizer_state_dict=True))
    torch.save({"model": model.state_dict(), "optimizer": flat}, tmp_path / "in.pth")
    return tmp_path / "in.pth"


def converted(path: Path, **options: Any) -> Any:
    ckpt_tools.convert(path, path.with_name("out.pth"), **options)
    return torch.load(path.with_name("out.pth"))


def test_it_is_no_state_dict(path: Path) -> None:
    """It is shown as an optimizer; load code takes the model; --slim leaves it out."""
    assert [row["where"] for row in inspect(path).state_dicts] == [["model"]]
    assert "optimizer: 12 states (step, exp_avg, exp_avg_sq)" in ckpt("inspect", path).output
    assert list(load_state_dict(path)) == ["0.weight", "0.bias", "1.weight", "1.bias"]
    assert ckpt_tools.convert(path, path.with_name("slim.pth"), slim=True).dropped == [("optimizer", "optimizer")]
    assert list(torch.load(path.with_name("slim.pth"))) == ["model"]


def test_steps_are_not_cast(path: Path, tmp_path: Path) -> None:
    """As those of any optimizer, from a folder of torch.distributed.checkpoint too."""
    ckpt_tools.convert(path, tmp_path / "folder", format="dcp")
    for source in (path, tmp_path / "folder"):
        ckpt_tools.convert(source, tmp_path / "out.pth", dtype="bf16", overwrite=True)
        state = torch.load(tmp_path / "out.pth")["optimizer"]
        assert state["state.0.weight.step"] == STEPS
        assert state["state.0.weight.exp_avg"].dtype == torch.bfloat16


def test_its_names_follow_the_model_s(path: Path) -> None:
    """What is renamed is the parameter's name inside of each key."""
    found = converted(path, rename=r"^0\.=enc.")
    assert list(found["model"]) == ["enc.weight", "enc.bias", "1.weight", "1.bias"]
    kept = list(torch.load(path)["optimizer"])
    assert list(found["optimizer"]) == [key.replace(".0.", ".enc.", 1) for key in kept]


def test_an_average_takes_the_first_file_s(path: Path, tmp_path: Path) -> None:
    """Optimizers are not averaged."""
    other = torch.load(path)
    other["optimizer"] = {key: value * 3 for key, value in other["optimizer"].items() if isinstance(value, torch.Tensor)}
    torch.save(torch.load(path) | {"optimizer": torch.load(path)["optimizer"] | other["optimizer"]}, tmp_path / "other.pth")
    ckpt_tools.average([path, tmp_path / "other.pth"], tmp_path / "mean.pth")
    assert torch.load(tmp_path / "mean.pth")["optimizer"]["state.0.weight.step"] == STEPS
