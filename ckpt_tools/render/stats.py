"""The page of `ckpt stats`."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

from rich.console import Console
from rich.table import Table
from rich.text import Text

from ckpt_tools.names import listed, printable
from ckpt_tools.render.text import can_print, counted, name_table

if TYPE_CHECKING:
    from ckpt_tools.tensor_stats import Stats

StatsSort = Literal["file", "name", "size", "mean", "std", "max", "zeros"]
_SHOWN = 40
_BLOCKS, _ASCII = " ▁▂▃▄▅▆▇█", " .:-=+*#@"


@dataclass(frozen=True, slots=True)
class StatsView:
    """How the tensors are shown: all of them, summed up by module, in which order."""

    all: bool = False
    modules: bool = False
    sort: StatsSort = "file"


@dataclass(frozen=True, slots=True)
class _Row:
    name: str
    numbers: dict[str, Any] | None
    histogram: Sequence[int] = ()
    note: str = ""


def print_stats(report: Stats, view: StatsView, out: Console) -> None:
    """One line a tensor or module, then all together, then what is not finite."""
    out.print(Text(printable(report.path), style="bold"), soft_wrap=True)
    out.print()
    if not report.tensors:
        out.print("no tensors; ckpt inspect shows what it holds")
        return
    if view.modules:
        rows = [_Row(row.path, row.numbers, (), counted(row.tensors, "tensor")) for row in report.modules]
    else:
        rows = [_Row(row.name, row.numbers, row.histogram, row.reason) for row in report.tensors]
    rows = _sorted(rows, view.sort)
    shown = rows if view.all else rows[:_SHOWN]
    out.print(_table(shown, _Row(f"all {counted(len(report.tensors), 'tensor')}", report.total), out, modules=view.modules))
    if len(shown) < len(rows):
        out.print(f"... {len(rows) - len(shown)} more (--all)")
    bad = [row for row in report.tensors if row.numbers and (row.numbers["nan"] or row.numbers["inf"])]
    if bad:
        out.print()
        names = listed([row.name for row in bad])
        text = Text("warning: ", style="yellow") + Text(printable(f"not finite: {names}"), style="default")
        out.print(text, soft_wrap=True)


def _sorted(rows: list[_Row], sort: StatsSort) -> list[_Row]:
    if sort == "file":
        return rows
    if sort == "name":
        return sorted(rows, key=lambda row: row.name)
    if sort == "zeros":
        return sorted(rows, key=lambda row: -_share(row.numbers))
    key = {"size": "elements", "max": "max", "mean": "mean", "std": "std"}[sort]
    return sorted(rows, key=lambda row: -abs((row.numbers or {}).get(key) or 0.0))


def _share(numbers: dict[str, Any] | None) -> float:
    return numbers["zeros"] / numbers["elements"] if numbers and numbers["elements"] else 0.0


def _table(rows: Sequence[_Row], total: _Row, out: Console, *, modules: bool) -> Table:
    """Columns that a narrow terminal has no room for are left out, histograms first."""
    everything = [*rows, total]
    odd = any(map(_is_odd, everything))
    columns = ["mean", "std", "min", "max", "zeros", *(["NaN", "inf"] if odd else [])]
    drawn = not modules and out.width >= 75 + 10 * odd
    columns = columns if out.width >= 66 + 10 * odd else [name for name in columns if name not in ("mean", "min")]
    bars = _BLOCKS if can_print(_BLOCKS, out) else _ASCII
    cells = {name: [_cell(row.numbers, name) for row in everything] for name in columns}
    cells["min to max" if drawn else ""] = [
        draw(row.histogram, bars) if drawn and row.histogram else printable(row.note) for row in everything
    ]
    names = [printable(row.name) for row in everything]
    styles = ["bold" if row is total else "red" if _is_odd(row) else "" for row in everything]
    return name_table("module" if modules else "tensor", names, cells, out, right=columns, styles=styles)


def _is_odd(row: _Row) -> bool:
    return bool(row.numbers and (row.numbers["nan"] or row.numbers["inf"]))


def _cell(numbers: dict[str, Any] | None, name: str) -> str:
    if numbers is None:
        return "-"
    if name == "zeros":
        return f"{100 * _share(numbers):.3g}%"
    if name in ("NaN", "inf"):
        return f"{numbers[name.lower()]:,}"
    return "-" if numbers[name] is None else f"{numbers[name]:.3g}"


def draw(counts: Sequence[int], bars: str = _BLOCKS) -> str:
    """A histogram as one line of characters; a part that holds anything shows at least the lowest bar.

    >>> draw([0, 1, 8])
    ' ▁█'
    """
    most = max(counts, default=0)
    return "".join(bars[0] if not count else bars[max(1, round(count / most * (len(bars) - 1)))] for count in counts)
