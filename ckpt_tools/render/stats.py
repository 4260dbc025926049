"""The page of `ckpt stats`."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

from ckpt_tools.operations.compare.stats import Stats
from ckpt_tools.render.text import Page, can_print, counted, print_names, print_title, room_for_names
from ckpt_tools.text import listed, natural, printable

StatsSort = Literal["file", "name", "size", "mean", "std", "min", "max", "zeros", "nan"]
_SHOWN = 40
_NAME_WIDTH = 24  # what names should have of a line
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
    bad = [row for row in report.tensors if row.numbers and (row.numbers["nan"] or row.numbers["inf"])]
    if bad:
        out.print()
        names = listed([row.name for row in bad])
        out.print(("warning: ", "yellow"), printable(f"not finite: {names}"))


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
    """On a narrow terminal histograms are drawn with half as many bars, then what there is no room for is left out."""
    everything = [*rows, total]
    names = [printable(row.name) for row in everything]
    cells = _cells(everything, out, wanted=min(_NAME_WIDTH, max(map(len, names))), modules=modules)
    right = [name for name in cells if name in _NUMBERS]
    styles = ["bold" if row is total else "red" if _is_odd(row) else "" for row in everything]
    print_names("module" if modules else "tensor", names, cells, out, right=right, styles=styles)


def _cells(rows: Sequence[_Row], out: Page, *, wanted: int, modules: bool) -> dict[str, list[str]]:
    """The columns: the first choice that leaves the names the room that is wanted."""
    odd = any(map(_is_odd, rows))
    numbers = {name: [_cell(row.numbers, name) for row in rows] for name in _NUMBERS if odd or name not in ("NaN", "inf")}
    few = {name: numbers[name] for name in numbers if name not in ("mean", "min")}
    notes = {"": [printable(row.note) for row in rows]}
    bars = _BLOCKS if can_print(_BLOCKS, out) else _ASCII
    choices = [numbers | notes, few | notes]
    if not modules:
        drawn = ({"min to max": [_drawing(row, bars, every) for row in rows]} for every in (1, 2))
        choices = [*(numbers | histograms for histograms in drawn), *choices]
    return next((cells for cells in choices if room_for_names(cells, out) >= wanted), choices[-1])


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
