"""What every form has in common: the files, and of each what was found, in the words of the command line."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field

from ckpt_tools.operations.check.report import Checked
from ckpt_tools.operations.safety import sentence
from ckpt_tools.operations.scan import Scanned
from ckpt_tools.render.text import path_text, quoted
from ckpt_tools.render.wording import as_options, found_in
from ckpt_tools.text import printable
from ckpt_tools.tree.findings import Finding

_SCANNED = {"dangerous": "problem", "unexamined": "warning", "needs-code": "info"}


@dataclass(frozen=True, slots=True)
class Row:
    """One thing that was found in a file; all text is safe to print.

    Attributes:
        code, severity: of the finding. text: what was found, and what mends it.
        place: what in the file it is about, as text: a tensor's path, a member of an archive; empty for the whole.
    """

    code: str
    severity: str
    text: str
    place: str = ""


@dataclass(frozen=True, slots=True)
class Logged:
    """One file.

    Attributes:
        path: as it was named. verdict: in the command's words. rows: what was found.
        failed: whether the exit code says so. unreadable: whether it could not be judged at all. seconds: how long it took.
    """

    path: str
    verdict: str
    rows: list[Row] = field(default_factory=list)
    failed: bool = False
    unreadable: bool = False
    seconds: float = 0.0


def of_checked(report: Checked) -> Logged:
    """A report of `ckpt check`."""
    rows = [Row(one.code, one.severity, _words(one), path_text(one.where) if one.where else "") for one in report.findings]
    return Logged(report.path, report.verdict, rows, report.exit_code > 0, report.container is None, report.seconds)


def of_scanned(report: Scanned) -> Logged:
    """A report of `ckpt scan`."""
    rows = [Row(code, _SCANNED[code], text, printable(where)) for code, text, where in _in_scanned(report)]
    return Logged(report.path, report.verdict, rows, report.failed, report.verdict == "unexamined")


def _in_scanned(report: Scanned) -> Iterator[tuple[str, str, str]]:
    safety = report.safety
    for where, call in safety.calls:
        yield "dangerous", sentence(where, call), where
    for where, why in safety.unexamined:
        yield "unexamined", f"not examined: {printable(why)}", where
    if report.verdict == "needs-code":
        yield "needs-code", safety.text, ""


def _words(finding: Finding) -> str:
    """A finding in lines."""
    expected = f" (expected {as_options(finding.expected)})" if finding.expected else ""
    parts = [f"{found_in(finding)}{expected}", quoted(finding.says), as_options(finding.fix)]
    return "\n".join(printable(part) for part in parts if part)
