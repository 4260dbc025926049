"""Tensors of another shape than the target wants: the overlap kept, a first convolution or a table of positions fitted."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterator, Set
from dataclasses import dataclass

from ckpt_tools.fit.initialisers import Blank, Scheme, draw
from ckpt_tools.io.content import Computed, Content, Literal, Range, read
from ckpt_tools.matching.records import Shape
from ckpt_tools.text import shape_text
from ckpt_tools.tree.nodes import Entry
from ckpt_tools.values.numeric import part, row_major, tensor_bytes, torch_dtype
from ckpt_tools.values.pytorch import need_torch, torch


@dataclass(frozen=True, slots=True)
class Adapted:
    """The bytes of a tensor in its new shape, in the dtype that it had, and what was done in words."""

    content: Content
    what: str


def overlap(entry: Entry, blank: Blank, kept: Shape, scheme: Scheme | None, seed: int) -> Adapted:
    """The rows and columns that a tensor and a shape both have (`kept`); the rest initialised."""
    need_torch("Tensors are fitted to another shape with it.")
    zeros, below = Scheme("zeros"), entry.shape[1:]
    rest = "" if kept == blank.shape else f", the rest {scheme} (seed {seed})"

    def work() -> Iterator[memoryview]:
        source = row_major(entry)
        if not isinstance(source, Range | Literal):  # row by row: what must be worked out is worked out once
            source = Literal(read(source))
        values = draw(zeros if kept == blank.shape else scheme or zeros, blank, seed)
        inside = tuple(slice(size) for size in kept[1:])
        size = math.prod(below) * values.dtype.itemsize
        for row in range(kept[0] if size else 0):
            data = bytearray(read(part(source, row * size, size)))
            values[row][inside] = torch.frombuffer(data, dtype=values.dtype).reshape(below)[inside]
        yield tensor_bytes(values)

    made = Computed(math.prod(blank.shape) * blank.dtype.itemsize, work, entry.storage.content)
    return Adapted(made, f"{shape_text(entry.shape)} -> {shape_text(blank.shape)}: the first {shape_text(kept)} kept{rest}")


_POSITIONS = re.compile(r"(.*_)?pos(ition|itional)?(_.*)?")  # pos_embed, position_embeddings; not post, decompose


def adapt(name: str, entry: Entry, shape: Shape, *, first: bool, patches: Set[int]) -> Adapted | None:
    """A tensor in another shape by the rule for its layer, or None where there is no rule.

    `patches`: how many channels the model's convolutions give. Where none has a table's width, as one that makes patches of an
    image, and there is no class token, the places may be those of a text, which lie in a row.
    """
    if entry.dtype.family != "float" or entry.dtype.packed > 1 or not entry.dtype.in_torch:
        return None
    old = entry.shape
    in_channels = is_convolution(old) and len(old) == len(shape) and old[:1] + old[2:] == shape[:1] + shape[2:]
    if first and in_channels and old[1] == 3 and shape[1] > 0:
        return _input_channels(entry, shape)
    *_, module, leaf = ("", *name.split("."))
    is_table = _POSITIONS.fullmatch(leaf) or (leaf == "weight" and _POSITIONS.fullmatch(module))
    return _positions(entry, shape, is_image=not patches.isdisjoint(old[-1:])) if is_table else None


def is_convolution(shape: Shape) -> bool:
    """Whether a weight of this shape may be a convolution's."""
    return len(shape) in (3, 4, 5) and math.prod(shape[2:]) > 1


def _input_channels(entry: Entry, shape: Shape) -> Adapted:
    channels = shape[1]

    def change(weight: torch.Tensor) -> torch.Tensor:
        if channels == 1:
            return weight.sum(dim=1, keepdim=True)
        repeated = weight.repeat(1, -(-channels // 3), *(1 for _ in shape[2:]))[:, :channels]
        return repeated * (3 / channels)

    how = "the sum over the 3 channels" if channels == 1 else f"the 3 channels repeated to {channels}, times 3/{channels}"
    return Adapted(
        _changed(entry, shape, change), f"first convolution, {shape_text(entry.shape)} -> {shape_text(shape)}: {how}"
    )


def _positions(entry: Entry, shape: Shape, *, is_image: bool) -> Adapted | None:
    old, new = entry.shape, shape
    if len(old) != len(new) or len(old) not in (2, 3) or old[-1] != new[-1] or (len(old) == 3 and (old[0], new[0]) != (1, 1)):
        return None
    sides = {tokens: [math.isqrt(max(0, size - tokens)) for size in (old[-2], new[-2])] for tokens in (0, 1, 2)}
    fits = [
        tokens for tokens, both in sides.items()
        if all(side and side * side == size - tokens for side, size in zip(both, (old[-2], new[-2]), strict=True))
    ]  # fmt: skip
    if len(fits) != 1 or (fits[0] != 1 and not is_image):
        return None
    tokens, width = fits[0], old[-1]
    before, after = sides[tokens]

    def change(table: torch.Tensor) -> torch.Tensor:
        rows = table.reshape(-1, width)
        grid = rows[tokens:].reshape(1, before, before, width).permute(0, 3, 1, 2)
        resized = torch.nn.functional.interpolate(grid, size=(after, after), mode="bicubic", align_corners=False)
        resized = resized.permute(0, 2, 3, 1).reshape(-1, width)
        return torch.cat([rows[:tokens], resized]).reshape(shape)

    grids = f"{before}x{before} -> {after}x{after}, bicubic"
    return Adapted(_changed(entry, shape, change), f"position embeddings, {grids}, {tokens} tokens without a place kept")


def _changed(entry: Entry, shape: Shape, change: Callable[[torch.Tensor], torch.Tensor]) -> Computed:
    """The tensor through a function on float32 (float64 stays), back in its dtype."""
    need_torch("Tensors are fitted to another shape with it.")
    dtype = torch_dtype(entry.dtype)

    def work() -> Iterator[memoryview]:
        values = torch.frombuffer(bytearray(read(row_major(entry))), dtype=dtype).reshape(entry.shape)
        yield tensor_bytes(change(values if dtype is torch.float64 else values.float()).to(dtype))

    return Computed(math.prod(shape) * dtype.itemsize, work, entry.storage.content)
