"""Several checkpoints of `ckpt inspect FOLDER` as one table, a line each."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich.text import Text

from ckpt_tools.errors import CkptError
from ckpt_tools.render.plain import Page
from ckpt_tools.render.rows import name_table, print_title, wrapped
from ckpt_tools.render.text import counted, size_text
from ckpt_tools.text import printable

if TYPE_CHECKING:
    from ckpt_tools.operations.inspect import Description

# What training scripts call how far they have come, and what the table calls it.
_STEPS = {
    "epoch": "epoch", "current_epoch": "epoch", "step": "step", "global_step": "step", "iteration": "step", "iter": "step",
    "iter_num": "step", "steps": "step", "num_updates": "step", "common.iteration": "step",
}  # fmt: skip
_NARROW, _VERDICT = 100, 20  # columns of a terminal where several codes do not stand in one line; those of the longest code
_DANGEROUS = ("dangerous", "unexamined")
_IN_THE_WAY = "device-tags"  # an info where the device is there; elsewhere the file does not load as it is


@dataclass(frozen=True, slots=True)
class OverviewRow:
    """One checkpoint of the table; its texts are as they are shown but for what a terminal must not see."""

    container: str
    tensors: int
    bytes: int
    verdict: str
    step: str


def row_of(description: Description) -> OverviewRow:
    """What the table says of a checkpoint."""
    step = step_text({**description.metadata, **description.values})
    tensors = description.totals["tensors"]
    return OverviewRow(description.container, tensors, description.file_bytes, _verdict(description), step)


def _verdict(description: Description) -> str:
    """The codes of what stands in somebody's way, what is dangerous first; `loads` where nothing does."""
    told = (finding for finding in description.findings if finding.severity != "info" or finding.code == _IN_THE_WAY)
    codes = dict.fromkeys(finding.code for finding in told)
    return ", ".join(sorted(codes, key=lambda code: code not in _DANGEROUS)) or "loads"


def step_text(values: Mapping[str, Any]) -> str:
    """How far training had come, where the checkpoint says it.

    >>> step_text({"epoch": 3, "global_step": 120, "lr": 0.1})
    'epoch 3, step 120'
    """
    told: dict[str, str] = {}
    for name, word in _STEPS.items():
        value = values.get(name)
        if type(value) is int or (isinstance(value, str) and value.isdecimal() and len(value) < 20):
            told.setdefault(word, f"{word} {value}")
    return ", ".join(told.values())


def print_overview(paths: Sequence[Path], rows: Sequence[OverviewRow | CkptError], top: Path | None, out: Page) -> None:
    """A line for each checkpoint below a folder; `top` is that folder, None where there are several."""
    known = [row for row in rows if isinstance(row, OverviewRow)]
    lost = len(rows) - len(known)
    unread = f"; {lost} cannot be read" if lost else ""
    size = size_text(sum(row.bytes for row in known))
    where = f"{top}: " if top is not None else ""
    print_title(f"{where}{counted(len(rows), 'checkpoint')}, {size}{unread}", out)
    out.print()
    names = [printable(str(path if top is None else path.relative_to(top))) for path in paths]
    out.print(name_table("file", names, _columns(rows, out), out, right=("tensors", "size"), whole=("verdict",)))
    out.print(Text("\nckpt inspect FILE shows one of them, --all every one"), soft_wrap=True)


def _columns(rows: Sequence[OverviewRow | CkptError], out: Page) -> dict[str, list[str]]:
    unread = OverviewRow("", 0, 0, "unreadable", "")
    shown = [row if isinstance(row, OverviewRow) else unread for row in rows]
    room = _VERDICT if out.width < _NARROW else out.width
    return {
        "container": [row.container for row in shown],
        "tensors": ["" if row is unread else f"{row.tensors:,}" for row in shown],
        "size": ["" if row is unread else size_text(row.bytes) for row in shown],
        "verdict": [wrapped(row.verdict, room) for row in shown],
        "step": [row.step for row in shown],
    }
