"""Which elements of a weight one scale is for: by the two shapes, and by config.json where these leave it open."""

from __future__ import annotations

from math import prod

from ckpt_tools.edit.quantised.config import Config
from ckpt_tools.edit.quantised.parts import Part, mismatch
from ckpt_tools.errors import ConvertError

Sizes = tuple[int, ...]


def granularity(shape: Sizes, scale: Sizes) -> str:
    """What one scale is for, in words."""
    if prod(scale) == 1:
        return "a scale a tensor"
    whole = scale + (1,) * (len(shape) - len(scale))
    if whole[: len(shape) - 1] == shape[:-1]:
        return "a scale a row" if whole[-1:] == (1,) else "a scale a group"
    return "a scale a block"


def lay_out(weight: Part, shape: Sizes, scale: Part, config: Config) -> tuple[Sizes, Sizes]:
    """How many scales there are along every dimension of the plain weight, and how many elements each is for."""
    grid = _grid(weight, shape, scale)
    rows = grid[:-1] == shape[:-1] and prod(shape[:-1]) > 1  # groups of columns in each row
    said = (0,) * len(shape)
    if rows and config.group:
        said = (*said[1:], config.group)
    elif config.block and len(shape) > 1:
        said = (*said[2:], *config.block)
    return grid, tuple(
        _box(weight, scale, size, cells, one, even=rows) for size, cells, one in zip(shape, grid, said, strict=True)
    )


def _grid(weight: Part, shape: Sizes, scale: Part) -> Sizes:
    found = scale.shape
    if prod(found) == 1:
        return (1,) * len(shape)
    if len(found) < len(shape) and found == shape[: len(found)]:
        return found + (1,) * (len(shape) - len(found))
    if len(found) != len(shape) or any(not 0 < cells <= max(size, 1) for cells, size in zip(found, shape, strict=True)):
        raise mismatch(weight, scale, "There is one scale for the tensor, for each row, or for each block.")
    return found


def _box(weight: Part, scale: Part, size: int, cells: int, said: int, *, even: bool) -> int:
    """How many of `size` elements each of so many scales is for; `said` by config.json, 0 where it says nothing."""
    if cells in (1, size):
        return size if cells == 1 else 1
    least, most = -(-size // cells), -(-size // (cells - 1)) - 1
    if said:
        if least <= said <= most:
            return said
        why = f"config.json says {said} to a scale; {cells} scales for {size} elements are {least} to {most}."
        raise mismatch(weight, scale, why)
    if even and size % cells == 0:
        return size // cells
    power = 1 << (most.bit_length() - 1)
    if power >= least:
        return power
    if size % cells == 0:
        return size // cells
    raise ConvertError(
        f"{weight}, and {scale}: the size of a block is not known.",
        why=f"{cells} scales for {size} elements are for {least} to {most} each.",
        fix='config.json beside the weights says it: {"quantization_config": {"weight_block_size": [ROWS, COLUMNS]}}.',
    )
