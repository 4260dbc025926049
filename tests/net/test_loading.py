"""What a model is given: large tensors, attributes of parameters, extra state that it has no place for; names of optimizers."""

from pathlib import Path
from typing import Any

import torch
from torch import nn

import ckpt_tools
import ckpt_tools.torch


def test_a_tensor_of_several_reads(tmp_path: Path) -> None:
    """A tensor of more than one step of 16 MiB has each of its bytes at its place."""
    weight = torch.arange(10_000_000.0)
    torch.save({"weight": weight}, tmp_path / "in.pth")
    model = nn.Module()
    model.weight = nn.Parameter(torch.zeros_like(weight))
    assert ckpt_tools.torch.load_into(model, tmp_path / "in.pth")
    assert torch.equal(model.weight, weight)


def test_an_exchanged_parameter_keeps_its_attributes(tmp_path: Path) -> None:
    """With `assign` the new parameter has what was put on the old one."""
    torch.save(nn.Linear(2, 3).state_dict(), tmp_path / "in.pth")
    model: Any = nn.Linear(2, 3)
    model.weight.decays = False
    old = model.weight
    ckpt_tools.torch.load_into(model, tmp_path / "in.pth", assign=True)
    assert model.weight is not old
    assert model.weight.decays is False


class _Counting(nn.Linear):
    """A layer with extra state."""

    def get_extra_state(self) -> dict[str, int]:
        return {"seen": 3}

    def set_extra_state(self, state: dict[str, int]) -> None:
        self.seen = state["seen"]


def test_extra_state_without_a_place_is_unexpected(tmp_path: Path) -> None:
    """What no module of the model takes is told, and the report is not true."""
    torch.save(_Counting(2, 3).state_dict(), tmp_path / "in.pth")
    report = ckpt_tools.torch.load_into(nn.Linear(2, 3), tmp_path / "in.pth")
    assert report.unexpected == ["_extra_state"]
    assert not report
    assert ckpt_tools.torch.load_into(_Counting(2, 3), tmp_path / "in.pth").unexpected == []


def test_an_optimizer_has_the_names_of_adapted_tensors(tmp_path: Path) -> None:
    """`param_names` are renamed with tensors that get another shape too."""
    model = nn.DataParallel(nn.Linear(2, 3))
    state = torch.optim.SGD(model.named_parameters()).state_dict()
    torch.save({"model": model.state_dict(), "optimizer": state}, tmp_path / "in.pth")
    torch.save(nn.Linear(2, 5).state_dict(), tmp_path / "like.pth")
    ckpt_tools.convert(
        tmp_path / "in.pth", tmp_path / "out.pth", like=tmp_path / "like.pth", on_mismatch="overlap", reinit="zeros"
    )
    found = torch.load(tmp_path / "out.pth")
    assert found["optimizer"]["param_groups"][0]["param_names"] == ["weight", "bias"] == list(found["model"])


def test_the_halves_of_a_weight_norm(tmp_path: Path) -> None:
    """`original0` is the magnitude `weight_g`, and `original1` the direction `weight_v`."""
    names = {"weight_g": "parametrizations.weight.original0", "weight_v": "parametrizations.weight.original1", "bias": "bias"}
    shapes = {"weight_g": (3, 1), "weight_v": (3, 4), "bias": (3,)}
    old = {f"conv.{name}": torch.rand(shape) for name, shape in shapes.items()}
    torch.save(old, tmp_path / "in.pth")
    torch.save({f"body.{names[name]}": torch.rand(shape) for name, shape in shapes.items()}, tmp_path / "like.pth")
    found = ckpt_tools.match(tmp_path / "in.pth", like=tmp_path / "like.pth", match="structure")
    assert {row.new: row.old for row in found.matching.matched} == {
        f"body.{new}": f"conv.{name}" for name, new in names.items()
    }


def test_norms_before_and_after(tmp_path: Path) -> None:
    """`pre_attention_norm` comes before `post_attention_norm`, as `norm1` before `norm2`."""
    parts = {"pre_attention_norm": "norm1", "attention.qkv": "attn.qkv", "post_attention_norm": "norm2"}
    for side, file in ((0, "in.pth"), (1, "like.pth")):
        torch.save(
            {
                f"{('layers', 'blocks')[side]}.{number}.{pair[side]}.weight": torch.rand((12, 4) if "qkv" in pair[0] else 4)
                for number in range(2) for pair in parts.items()
            },
            tmp_path / file,
        )  # fmt: skip
    found = ckpt_tools.match(tmp_path / "in.pth", like=tmp_path / "like.pth", match="structure")
    assert {row.old: row.new for row in found.matching.matched} == {
        f"layers.{number}.{old}.weight": f"blocks.{number}.{new}.weight" for number in range(2) for old, new in parts.items()
    }
