"""The page of `ckpt prove`."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ckpt_tools.operations.proved import Fault, Proved, Setting
from ckpt_tools.render.text import counted
from ckpt_tools.text import listed, printable

if TYPE_CHECKING:
    from rich.console import Console

_SHOWN = 4


def print_proved(report: Proved, out: Console) -> None:
    """The verdict, what ran, and where the models part."""
    rows = [
        ("", _verdict(report)),
        ("old", f"{report.old.path} in {report.old.model}"),
        ("new", f"{report.new.path} in {report.new.model}"),
        ("inputs", f"{', '.join(report.inputs)}; seed {report.seed}, {counted(report.runs, 'set')}, {report.dtype}"),
        ("compared", f"{counted(report.calls, 'call')} of {counted(report.modules, 'module')} with a partner"),
        *([] if report.fault is None else _fault(report.fault)),
        *([] if not report.settings else [("settings", listed([_setting(row) for row in report.settings], _SHOWN))]),
    ]
    for label, text in rows:
        style = ("green" if report else "red") if not label else None
        out.print(f"{label:10}{printable(text)}" if label else printable(text), style=style, soft_wrap=True)


def _verdict(report: Proved) -> str:
    if report.largest is None or report.relative is None:
        return "different: outputs of other shapes, or not finite"
    word, room = "equal" if report else "different", f"(tolerance {report.tolerance:g})"
    return f"{word}: the largest difference is {report.largest:.3g}, {report.relative:.3g} of the largest output {room}"


def _fault(fault: Fault) -> list[tuple[str, str]]:
    """Where, and why."""
    kind = fault.kind if fault.kind == fault.new_kind else f"{fault.kind}, {fault.new_kind} in the new one"
    name = fault.where or "(the model)"
    partner = "" if fault.where == fault.new_where else f" = {fault.new_where or '(the model)'}"
    where = f"{name}{partner} ({kind})"
    if fault.place == "code":
        sides = [f"after {fault.after}" if fault.after else "", f"before {fault.before}" if fault.before else ""]
        where += f", in its own code {', '.join(filter(None, sides))}".rstrip()
    return [("part at", where), *[("why", reason) for reason in fault.reasons]]


def _setting(row: Setting) -> str:
    return f"{row.where or '(the model)'}.{row.name} {row.old}, {row.new}"
