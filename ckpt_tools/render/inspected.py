"""Tensors as lines of a table: one a tensor, or one for several that repeat."""

from __future__ import annotations

import itertools
import re
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any, TypeAlias

from ckpt_tools.text import shape_text

_MOST_LEAVES = 48  # characters that the leaves of one parent, or their shapes, may take in a folded line
_KEPT_LEAVES = 3
_NUMBER = re.compile(r"(?<![^.])([0-9]{1,9})(?=\.)")
_NUMBERS = 3  # of a name that are tried
_SHOWN_RANGES = 8
_Numbered: TypeAlias = "list[tuple[str, Line]]"  # with the text of the number in its name


@dataclass(slots=True)
class Line:
    """One line of the tensor table: one tensor, or several that repeat."""

    name: str
    shapes: list[str]
    dtype: str
    device: str
    bytes: int
    count: int = 1
    repeats: int = 1
    named: bool = True

    @property
    def shape(self) -> str:
        """The shapes as the table shows them: `4x3, 4`, repeated ones as `12 x [64, 64]`, however many names they are."""
        if not self.count:
            return ""
        if not self.shapes:
            return f"{self.count} tensor{'' if self.count == 1 else 's'}"
        if self.repeats == 1:
            return _some(self.shapes)
        if len(set(self.shapes)) == 1:
            return f"{self.count} x {_bracketed(self.shapes[0])}"
        return f"{self.repeats} x ({_some(list(map(_bracketed, self.shapes)))})"

    @property
    def title(self) -> str:
        """The name; of a folded one with very many leaves the first of those, and how many more."""
        match = re.search(r"\{([^{}]*, [^{}]*)\}\Z", self.name) if self.count > 1 else None
        return self.name if match is None else f"{self.name[: match.start(1)]}{_some(match[1].split(', '))}}}"


def _some(texts: list[str]) -> str:
    whole = ", ".join(texts)
    short = len(whole) <= _MOST_LEAVES or len(texts) <= _KEPT_LEAVES
    return whole if short else f"{', '.join(texts[:_KEPT_LEAVES])}, ... {len(texts) - _KEPT_LEAVES} more"


def _bracketed(shape: str) -> str:
    return f"[{shape.replace('x', ', ')}]" if re.fullmatch(r"\d[\dx]*", shape) else shape


def name_of(row: dict[str, Any]) -> str:
    """A tensor's dotted path, as the table names it."""
    return ".".join(map(str, row["where"])) or ('""' if row["where"] else "(the whole file)")


def line_of(row: dict[str, Any]) -> Line:
    """The line of one tensor."""
    shape = shape_text(row["shape"])
    if part := row.get("part"):
        held = [shape_text(box["shape"]) for box in part["held"]] or ["none"]
        shape = shape if held == [shape] else f"{' + '.join(held)} of {shape}"
    kind = "" if row["kind"] in ("tensor", "parameter") else f" {row['kind']}"
    named = row["name"] is not None
    return Line(name_of(row), [shape], (row["dtype"] or "?") + kind, row["device"] or "-", row["bytes"], named=named)


def by_depth(rows: list[dict[str, Any]], depth: int) -> list[Line]:
    """Tensors summed up by the first `depth` parts of their dotted paths."""
    sums: dict[str, Line] = {}
    for row in rows:
        line = line_of(row)
        parts = line.name.split(".")
        key = ".".join(parts[:depth]) + (".*" if len(parts) > depth else "")
        known = sums.get(key)
        if known is None:
            sums[key] = line if len(parts) <= depth else Line(key, [], line.dtype, line.device, line.bytes)
            continue
        known.count, known.bytes = known.count + 1, known.bytes + line.bytes
        known.shapes = []
        known.dtype = known.dtype if known.dtype == line.dtype else "mixed"
        known.device = known.device if known.device == line.device else "mixed"
    return list(sums.values())


def folded(lines: list[Line]) -> list[Line]:
    """Lines in which siblings, and blocks that repeat by their numbers, are one."""
    lines = _fold_siblings(lines)
    for place in range(_NUMBERS):
        while len(fewer := _fold_blocks(lines, place)) < len(lines):  # experts in layers: a number at a time
            lines = fewer
    return lines


def _fold_siblings(lines: list[Line]) -> list[Line]:
    """`conv1.weight`, `conv1.bias` in a row become `conv1.{weight, bias}`."""
    result: list[Line] = []
    for (parent, _, _), group in itertools.groupby(lines, lambda line: (_split(line)[0], line.dtype, line.device)):
        first, *others = group
        if parent and others:
            siblings = [first, *others]
            first.name = f"{parent}.{{{', '.join(_split(line)[1] for line in siblings)}}}"
            first.shapes = [shape for line in siblings for shape in line.shapes]
            first.bytes, first.count = sum(line.bytes for line in siblings), len(siblings)
            others = []
        result += [first, *others]
    return result


def _split(line: Line) -> tuple[str, str]:
    """A name's parent, "" where it has none, and what it is called there."""
    parent, _, leaf = line.name.rpartition(".")
    return parent, leaf


def _fold_blocks(lines: list[Line], place: int) -> list[Line]:
    """Lines that repeat but for a counted number become one: `layers.{0-11}.attn.{weight, bias}`."""
    groups: dict[tuple[str, tuple[str, ...], str, str, int], _Numbered] = {}
    at = 2 * place + 1
    for line in lines:
        parts, number = _NUMBER.split(line.name, place + 1), ""
        if len(parts) > at:
            number, parts[at] = parts[at], "\0"
        shapes = tuple(line.shapes) if line.named or not number else ()
        groups.setdefault(("".join(parts), shapes, line.dtype, line.device, line.repeats), []).append((number, line))
    return [_one_of(pattern, *part) for (pattern, *_), group in groups.items() for part in _by_width(group)]


def _by_width(group: _Numbered) -> list[tuple[_Numbered, int]]:
    """Numbers that are padded alike: `01` and `1` are two names. With each part the digits that all of it has at least."""
    widths = sorted({len(number) for number, _ in group if number[:1] == "0" and len(number) > 1})
    if not widths:
        return [(group, 1)]
    parts: dict[int, _Numbered] = {}
    for number, line in group:
        width = next((width for width in widths if number == str(int(number)).zfill(width)), 1)
        parts.setdefault(width, []).append((number, line))
    return [(part, width) for width, part in parts.items()]


def _one_of(pattern: str, group: _Numbered, width: int) -> Line:
    first = group[0][1]
    if len(group) == 1:
        return first
    lines = [line for _, line in group]
    name = pattern.replace("\0", f"{{{ranges([int(number) for number, _ in group], width)}}}")
    same = all(line.shapes == first.shapes for line in lines)
    return Line(
        name, first.shapes if same else [], first.dtype, first.device, sum(line.bytes for line in lines),
        sum(line.count for line in lines), first.repeats * len(lines), first.named,
    )  # fmt: skip


def ranges(numbers: Iterable[int], width: int = 1) -> str:
    """Numbers in their order, runs of them as `first-last`, the first eight of those; of at least so many digits."""
    runs: list[list[int]] = []
    for number in sorted(set(numbers)):
        if runs and number == runs[-1][1] + 1:
            runs[-1][1] = number
        else:
            runs.append([number, number])
    bounds = [(str(first).zfill(width), str(last).zfill(width)) for first, last in runs[:_SHOWN_RANGES]]
    texts = [first if first == last else f"{first}-{last}" for first, last in bounds]
    return ",".join([*texts, "..."] if len(runs) > _SHOWN_RANGES else texts)
