"""Matching by `ckpt_tools.match`: sides are names with shapes, tensors, or models; and what a plan makes of them."""

import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import nn

import ckpt_tools

Shapes = Mapping[str, tuple[int, ...]]
Side = Shapes | Mapping[str, torch.Tensor] | nn.Module


def state_of(side: Side) -> dict[str, torch.Tensor]:
    """Tensors of a side; those of shapes are zeros."""
    if isinstance(side, nn.Module):
        return side.state_dict()
    return {name: value if isinstance(value, torch.Tensor) else torch.zeros(value) for name, value in side.items()}


def reported(old: Side, new: Side, match: str | None = "structure", **options: Any) -> ckpt_tools.Matched:
    """What is said of a file of `old` and of `new`; a model stays one."""
    with tempfile.TemporaryDirectory() as folder:
        torch.save(state_of(old), Path(folder, "old.pth"))
        like = new if isinstance(new, nn.Module) else state_of(new)
        return ckpt_tools.match(Path(folder, "old.pth"), like=like, match=match, **options)  # type: ignore[arg-type]


def matched(old: Any, new: Any, match: Any = "structure", **options: Any) -> Any:
    """The matching of it."""
    return reported(old, new, match, **options).matching


def pairs(found: Any) -> dict[str, str]:
    """New name -> old name."""
    return {row.new: row.old for row in found.matched}


def fates(found: Any) -> list[object]:
    """What a matching says of every name, in no order."""
    return [
        {(row.old, row.new, row.reason, row.step) for row in found.matched}, set(found.missing), set(found.unexpected),
        {(row.old, row.new) for row in found.mismatched}, {(row.new, frozenset(row.candidates)) for row in found.ambiguous},
        {(offer.step, offer.old, offer.new) for offer in found.offers},
    ]  # fmt: skip


def randomise(model: nn.Module, seed: int) -> nn.Module:
    """Give every parameter and buffer values of its own: constant ones would hide a wrong partner."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, value in model.state_dict(keep_vars=True).items():
            if value.is_floating_point():
                noise = torch.rand(value.shape, generator=generator)
                value.copy_(noise + 0.5 if "var" in name or "norm" in name else noise - 0.5)
    return model.eval()


def assert_same_function(old: nn.Module, new: nn.Module, samples: Sequence[torch.Tensor], **options: Any) -> Any:
    """All is matched; what the plan makes of `old` gives in `new` the outputs of `old`. Returns the matching."""
    randomise(old, 1)
    randomise(new, 2)
    with tempfile.TemporaryDirectory() as folder, torch.no_grad():
        source, plan, out = Path(folder, "old.pth"), Path(folder, "plan.toml"), Path(folder, "out.pth")
        torch.save(old.state_dict(), source)
        found = ckpt_tools.match(source, like=new, match="structure", allow_reshape=True, output=plan, **options).matching
        assert found.complete_with_offers, (found.left_over, found.mismatched, found.ambiguous)
        ckpt_tools.convert(source, out, plan=plan)
        before = new(*samples)
        new.load_state_dict(torch.load(out))
        expected, actual = old(*samples), new(*samples)
    assert not torch.allclose(before, expected, rtol=1e-3, atol=1e-3)
    torch.testing.assert_close(actual, expected, rtol=1e-4, atol=1e-4)
    return found
