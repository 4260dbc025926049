"""The page of `ckpt stats`."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

from ckpt_tools.operations.compare.stats import Stats
from ckpt_tools.render.text import Page, can_print, counted, print_title
from ckpt_tools.text import listed, natural, printable

StatsSort = Literal["file", "name", "size", "mean", "std", "min", "max", "zeros", "nan"]
_SHOWN = 40
_WIDE = 100  # columns of a terminal from which histograms are drawn in full
_NUMBERS = ("mean", "std", "min", "max", "zeros", "NaN", "inf")
_BLOCKS, _ASCII = " ▁▂▃▄▅▆▇█", " .:-=+*#@"


@dataclass(frozen=True, slots=True)
class _Row:
    name: str
    numbers: dict[str, Any] | None
    histogram: Sequence[int] = ()
    note: str = ""


def print_stats(report: Stats, out: Page, *, show_all: bool, modules: bool, sort: StatsSort) -> None:
    """One line a tensor, or a module, then all together, then what is not finite."""
    print_title(report.path, out)
    out.print()
    if not report.tensors:
        out.print("no tensors; ckpt inspect shows what is in it")
        return
    if modules:
        rows = [_Row(row.path, row.numbers, (), counted(row.tensors, "tensor")) for row in report.modules]
    else:
        rows = [_Row(row.name, row.numbers, row.histogram, row.reason) for row in report.tensors]
    rows = _sorted(rows, sort)
    shown = rows if show_all else rows[:_SHOWN]
    _print_table(shown, _Row(f"all {counted(len(report.tensors), 'tensor')}", report.total), out, modules=modules)
    if len(shown) < len(rows):
        out.print(f"... {len(rows) - len(shown)} more (--all)")
    for note in report.notes:
        out.print(printable(f"note: {note}"))
    if odd := not_finite(report):
        out.print()
        out.print(("warning: ", "yellow"), printable(odd))


def not_finite(report: Stats) -> str:
    """Which tensors hold NaN or infinite values; empty where none does."""
    names = [row.name for row in report.tensors if row.numbers and (row.numbers["nan"] or row.numbers["inf"])]
    return f"not finite: {listed(names)}" if names else ""


def _sorted(rows: list[_Row], sort: StatsSort) -> list[_Row]:
    if sort == "file":
        return rows
    if sort == "name":
        return sorted(rows, key=lambda row: natural(row.name))
    if sort == "zeros":
        return sorted(rows, key=lambda row: -_share(row.numbers))
    if sort == "nan":
        return sorted(rows, key=lambda row: -_not_finite(row))
    key = "elements" if sort == "size" else sort
    return sorted(rows, key=lambda row: -abs((row.numbers or {}).get(key) or 0.0))


def _share(numbers: dict[str, Any] | None) -> float:
    return numbers["zeros"] / numbers["elements"] if numbers and numbers["elements"] else 0.0


def _print_table(rows: Sequence[_Row], total: _Row, out: Page, *, modules: bool) -> None:
    """On a narrow terminal histograms are drawn with half as many bars."""
    everything = [*rows, total]
    odd = any(map(_is_odd, everything))
    shown = [name for name in _NUMBERS if odd or name not in ("NaN", "inf")]
    columns = {"module" if modules else "tensor": [printable(row.name) for row in everything]}
    columns |= {name: [_cell(row.numbers, name) for row in everything] for name in shown}
    if modules:
        columns[""] = [printable(row.note) for row in everything]
    else:
        bars = _BLOCKS if can_print(_BLOCKS, out) else _ASCII
        columns["min to max"] = [_drawing(row, bars, 1 if out.width >= _WIDE else 2) for row in everything]
    styles = ["bold" if row is total else "red" if _is_odd(row) else "" for row in everything]
    out.table(columns, right=shown, styles=styles)


def _drawing(row: _Row, bars: str, every: int) -> str:
    """The histogram with that many parts to a bar, or why there is none."""
    counts = [sum(row.histogram[start : start + every]) for start in range(0, len(row.histogram), every)]
    return draw(counts, bars) if counts else printable(row.note)


def _not_finite(row: _Row) -> int:
    return row.numbers["nan"] + row.numbers["inf"] if row.numbers else 0


def _is_odd(row: _Row) -> bool:
    return _not_finite(row) > 0


def _cell(numbers: dict[str, Any] | None, name: str) -> str:
    if numbers is None:
        return "-"
    if name == "zeros":
        return f"{100 * _share(numbers):.3g}%"
    if name in ("NaN", "inf"):
        return f"{numbers[name.lower()]:,}"
    return "-" if numbers[name] is None else f"{numbers[name]:.3g}"


def draw(counts: Sequence[int], bars: str = _BLOCKS) -> str:
    """A histogram as one line of characters; a part that holds anything shows at least the lowest bar."""
    most = max(counts, default=0)
    return "".join(bars[0] if not count else bars[max(1, round(count / most * (len(bars) - 1)))] for count in counts)
