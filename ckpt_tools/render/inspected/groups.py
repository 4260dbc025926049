"""The tensors of a page in groups: the state dicts first, other tensors, and what optimizers keep last."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from ckpt_tools.render.inspected.lines import Line, folded, line_of
from ckpt_tools.render.inspected.optimizers import Where, optimizer_of
from ckpt_tools.render.text import counted

Rows = list[dict[str, Any]]
_INDENT = "  "
_FEW = 3  # lines that are not worth a reference to others that are alike


@dataclass(slots=True)
class Groups:
    """The tensors of a checkpoint by what they belong to, each in the order in which they come.

    Attributes:
        state_dicts: by where each is. others: what is in none. optimizers: by where each is.
    """

    state_dicts: dict[Where, Rows] = field(default_factory=dict)
    others: Rows = field(default_factory=list)
    optimizers: dict[Where, Rows] = field(default_factory=dict)


def grouped(rows: Rows) -> Groups:
    """Tensors by what they belong to."""
    groups = Groups()
    for row in rows:
        if row["name"] is not None:
            groups.state_dicts.setdefault(tuple(row["where"][:-1]), []).append(row)
        elif (where := optimizer_of(row)) is not None:
            groups.optimizers.setdefault(where, []).append(row)
        else:
            groups.others.append(row)
    return groups


def lines_of(groups: Groups, *, optimizers: bool) -> list[Line]:
    """The lines of the table: a heading for what all names of a group begin with, and the names behind it.

    Args:
        optimizers: their states too, as lines like any others.
    """
    lines: list[Line] = []
    alike: dict[tuple[Any, ...], str] = {}
    for rows in groups.state_dicts.values():
        own = list(map(line_of, rows))
        names = [line.name for line in own]
        prefix = shared_prefix(names)
        own = _headed(prefix, folded(own))
        if len(groups.state_dicts) > 1:
            what = tuple(_told(name.removeprefix(prefix), row) for name, row in zip(names, rows, strict=True))
            if (before := alike.setdefault(what, prefix)) is not prefix and len(own) > _FEW:
                own = [_reference(prefix, before, rows)]
        lines += own
    lines += folded(list(map(line_of, groups.others)))
    for rows in groups.optimizers.values() if optimizers else ():
        lines += folded(list(map(line_of, rows)))
    return lines


def _told(name: str, row: dict[str, Any]) -> tuple[Any, ...]:
    """What a table tells of a tensor but its size."""
    return name, tuple(row["shape"] or ()), row["dtype"], row["device"]


def shared_prefix(names: Sequence[str]) -> str:
    """What all dotted names begin with, up to a dot.

    >>> shared_prefix(["model.a.weight", "model.a.bias", "model.b"])
    'model.'
    """
    first, last = min(names), max(names)  # what these two share, all in between them share
    same = next((place for place, (a, b) in enumerate(zip(first, last, strict=False)) if a != b), min(len(first), len(last)))
    return first[: first.rfind(".", 0, same) + 1]


def _headed(prefix: str, lines: list[Line]) -> list[Line]:
    """The lines below their prefix, which stands once; a single line has its whole name."""
    if not prefix or len(lines) < 2:
        return lines
    for line in lines:
        line.name = _INDENT + line.name.removeprefix(prefix)
    return [Line(prefix, [], "", "", 0, count=0), *lines]


def _reference(prefix: str, before: str, rows: Rows) -> Line:
    """One line for a state dict whose tensors are named and shaped as those of an earlier one."""
    first = line_of(rows[0])
    dtype, device = (
        value if all(getattr(line_of(row), key) == value for row in rows) else "mixed"
        for key, value in (("dtype", first.dtype), ("device", first.device))
    )
    name = f"{prefix}* ({counted(len(rows), 'tensor')}, named and shaped as {before}*)"
    return Line(name, ["-"], dtype, device, sum(row["bytes"] for row in rows), len(rows))
