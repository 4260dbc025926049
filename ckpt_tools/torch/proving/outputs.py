"""What a model gives: its tensors and numbers by their paths, and how far those of two models are apart."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

import torch

from ckpt_tools.errors import ConvertError

Named = dict[str, torch.Tensor]
_DEEPEST = 8


def named(value: Any) -> Named:
    """The tensors and numbers in what a model gives, each by the path to it: `logits`, `[0]`, `states[2]`."""
    return {path: plain(tensor).clone() for path, tensor in walk(value)}


def walk(value: Any, path: str = "", depth: int = 0) -> Iterator[tuple[str, torch.Tensor]]:
    """Path and tensor of everything in what a model gives, as they are."""
    if isinstance(value, torch.Tensor):
        yield path, value
    elif isinstance(value, bool | int | float | complex):
        yield path, torch.tensor(value, dtype=torch.float64 if isinstance(value, float) else None)
    elif hasattr(value, "__array_interface__"):
        yield path, torch.as_tensor(value)
    elif depth < _DEEPEST:
        for step, item in _items(value):
            yield from walk(item, f"{path}{step}".removeprefix("."), depth + 1)


def _items(value: Any) -> Iterator[tuple[str, Any]]:
    if hasattr(value, "_asdict"):  # a named tuple
        value = value._asdict()
    if isinstance(value, Mapping):
        yield from ((f".{key}", item) for key, item in value.items())
    elif isinstance(value, list | tuple):
        yield from ((f"[{index}]", item) for index, item in enumerate(value))
    elif not isinstance(value, type | torch.nn.Module):
        names = getattr(value, "__dict__", getattr(value, "__slots__", ()))
        yield from ((f".{name}", getattr(value, name)) for name in names if not name.startswith("_"))


def plain(tensor: torch.Tensor) -> torch.Tensor:
    """Numbers that can be subtracted."""
    held = tensor.detach()
    held = held if held.layout == torch.strided else held.to_dense()
    return torch.view_as_real(held.resolve_conj()) if held.is_complex() else held


class Paired(NamedTuple):
    """The outputs of two models that are the same thing: pairs of their paths; and those that only one of them has."""

    pairs: list[tuple[str, str]]
    left_out: list[str]


def pair(old: Named, new: Named) -> Paired:
    """Outputs by their paths; by their order, where none is called alike; one alone is the first of several."""
    for side, found in (("OLD", old), ("NEW", new)):
        if not found:
            raise ConvertError(f"The model of {side} gives no numbers.", why="There is nothing to compare.")
    pairs = [(path, path) for path in old if path in new]
    if not pairs and len(old) != len(new) and 1 not in (len(old), len(new)):
        raise ConvertError(
            f"The models have no output in common: {len(old)} of OLD ({', '.join(old)}), {len(new)} of NEW ({', '.join(new)}).",
            why="They are paired by their names, or by their order where there are equally many.",
        )
    pairs = pairs or list(zip(old, new, strict=False))
    taken = [set(column) for column in zip(*pairs, strict=True)]
    sides = (("old", old, taken[0]), ("new", new, taken[1]))
    left = [f"{path or 'the output'} of the {side} model" for side, found, seen in sides for path in found if path not in seen]
    return Paired(pairs, left)


class Gap(NamedTuple):
    """How far two runs are apart."""

    largest: float
    relative: float
    numbers: int = 0
    nan: int = 0


def gap(old: Named, new: Named, paired: Paired) -> Gap:
    found = [_gap(old[left], new[right]) for left, right in paired.pairs]
    return Gap(
        max(one.largest for one in found), max(one.relative for one in found),
        sum(one.numbers for one in found), sum(one.nan for one in found),
    )  # fmt: skip


def _gap(left: torch.Tensor, right: torch.Tensor) -> Gap:
    """Numbers that are NaN or infinite alike do not differ; integers that differ do so by themselves, not by the largest."""
    if left.shape != right.shape:
        return Gap(float("inf"), float("inf"))
    if not left.numel():
        return Gap(0.0, 0.0)
    nan = left.isnan() & right.isnan()
    old, new = left.double(), right.double()
    apart = (old - new).abs().nan_to_num(torch.inf, torch.inf)
    is_whole = not (left.is_floating_point() or right.is_floating_point())
    apart = apart.clamp(min=1.0) if is_whole else apart  # float64 cannot tell all integers apart
    largest = float(torch.where((left == right) | nan, 0.0, apart).max())
    scale = 1.0 if is_whole else float(old.abs().nan_to_num(0, 0, 0).max()) or 1e-300
    return Gap(largest, largest / scale, left.numel(), int(nan.sum()))
