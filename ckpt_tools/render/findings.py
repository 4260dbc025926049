"""What every form has in common: the files, and of each what was found, in the words of the command line."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path, PurePath
from typing import Any, TypeVar
from urllib.parse import quote
from xml.sax.saxutils import escape, quoteattr

from ckpt_tools._version import __version__
from ckpt_tools.operations.check.report import Checked
from ckpt_tools.operations.safety import sentence
from ckpt_tools.operations.scan import Scanned
from ckpt_tools.render.text import path_text
from ckpt_tools.render.wording import as_options, found_in
from ckpt_tools.text import printable
from ckpt_tools.tree.findings import Finding

_SCANNED = {"dangerous": "problem", "unexamined": "warning", "needs-code": "info"}


@dataclass(frozen=True, slots=True)
class Row:
    """One thing that was found in a file; all text is safe to print."""

    code: str
    severity: str
    text: str
    place: str = ""


@dataclass(frozen=True, slots=True)
class Logged:
    """One file."""

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
    safety = report.safety
    found = [("dangerous", sentence(where, call), where) for where, call in safety.calls]
    found += [("unexamined", f"not examined: {printable(why)}", where) for where, why in safety.unexamined]
    found += [("needs-code", safety.text, "")] if report.verdict == "needs-code" else []
    rows = [Row(code, _SCANNED[code], text, printable(where)) for code, text, where in found]
    return Logged(report.path, report.verdict, rows, report.failed, report.verdict == "unexamined")


def _words(finding: Finding) -> str:
    """A finding in lines."""
    expected = f" (expected: {as_options(finding.expected)})" if finding.expected else ""
    parts = [f"{found_in(finding)}{expected}", as_options(finding.fix)]
    return "\n".join(printable(part) for part in parts if part)


_LEVELS = {"problem": "error", "warning": "warning", "info": "notice"}


def workflow_commands(file: Logged) -> Iterator[str]:
    """A line for each thing that was found in a file."""
    for row in file.rows:
        title = f"{row.code} in {row.place}" if row.place else row.code
        path = _value(printable(file.path))
        yield f"::{_LEVELS[row.severity]} file={path},title={_value(title)}::{_text(row.text)}"


def _text(text: str) -> str:
    return text.replace("%", "%25").replace("\r", "%0D").replace("\n", "%0A")


def _value(text: str) -> str:
    return _text(text).replace(":", "%3A").replace(",", "%2C")


def junit(files: Sequence[Logged], command: str) -> str:
    """The whole document. A file that fails is a failure, one that cannot be read an error; notes are its output."""
    failures = sum(file.failed and not file.unreadable for file in files)
    errors = sum(file.unreadable for file in files)
    counts = f'tests="{len(files)}" failures="{failures}" errors="{errors}" time="{sum(file.seconds for file in files):.3f}"'
    lines = ['<?xml version="1.0" encoding="UTF-8"?>', f"<testsuites {counts}>"]
    lines.append(f'<testsuite name={quoteattr(command)} {counts} skipped="0">')
    for file in files:
        lines += _case(file, command)
    return "\n".join([*lines, "</testsuite>", "</testsuites>", ""])


def _case(file: Logged, command: str) -> Iterator[str]:
    name = f"name={quoteattr(printable(file.path))} classname={quoteattr(command)}"
    yield f'<testcase {name} time="{file.seconds:.3f}">'
    counted = [row for row in file.rows if row.severity != "info"] if file.failed else []
    if file.failed:
        tag = "error" if file.unreadable else "failure"
        first = counted[0] if counted else Row(file.verdict, "problem", file.verdict)  # --ignore may leave no other word
        yield f"<{tag} type={quoteattr(first.code)} message={quoteattr(first.text)}>{_body(counted)}</{tag}>"
    if notes := [row for row in file.rows if row not in counted]:
        yield f"<system-out>{_body(notes)}</system-out>"
    yield "</testcase>"


def _body(rows: Sequence[Row]) -> str:
    return escape("\n".join(f"[{row.code}]{f' in {row.place}' if row.place else ''}: {row.text}" for row in rows))


_SCHEMA = "https://json.schemastore.org/sarif-2.1.0.json"
_SARIF_LEVELS = {"problem": "error", "warning": "warning", "info": "note"}
# Of `ckpt scan`; what the codes of `ckpt check` mean, `ckpt explain` knows.
_MEANINGS = {
    "dangerous": "Loading the file without weights_only runs code",
    "unexamined": "Not all of the file could be examined",
    "needs-code": "Loading the file needs classes that weights_only does not allow",
}


def sarif(files: Sequence[Logged], meanings: Mapping[str, str]) -> dict[str, Any]:
    """The whole log: one run, with a rule for every code that was found, and a result for everything that was."""
    found = {row.code: row.severity for file in files for row in file.rows}
    rules = [
        {"id": code, "shortDescription": {"text": meanings.get(code, code)},
         "defaultConfiguration": {"level": _SARIF_LEVELS[severity]}}
        for code, severity in found.items()
    ]  # fmt: skip
    places = {code: index for index, code in enumerate(found)}
    driver = {"name": "ckpt", "version": __version__, "rules": rules}
    results = [_result(file.path, row, places[row.code]) for file in files for row in file.rows]
    run = {"tool": {"driver": driver}, "columnKind": "unicodeCodePoints", "results": results}
    return {"$schema": _SCHEMA, "version": "2.1.0", "runs": [run]}


def _result(path: str, row: Row, index: int) -> dict[str, Any]:
    location: dict[str, Any] = {"physicalLocation": {"artifactLocation": {"uri": _uri(path)}}}
    if row.place:
        location["logicalLocations"] = [{"fullyQualifiedName": row.place, "kind": "member"}]
    level = _SARIF_LEVELS[row.severity]
    return {"ruleId": row.code, "ruleIndex": index, "level": level, "message": {"text": row.text}, "locations": [location]}


def _uri(path: str) -> str:
    """A path as a reference: relative ones as they are, so that a code host finds the file."""
    if "://" in path:
        return path
    given = PurePath(path)
    return Path(path).as_uri() if given.is_absolute() else quote(given.as_posix(), errors="surrogateescape")


_Report = TypeVar("_Report", "Checked", "Scanned")


def print_in_form(
    form: str, found: Iterable[_Report], logged: Callable[[_Report], Logged], command: str,
    as_text: Callable[[_Report], None] = lambda _: None,
) -> list[_Report]:  # fmt: skip
    """Print each report when it is known, or one document of all of them; the reports."""
    from ckpt_tools.render.json import print_document

    reports = []
    for report in found:
        reports.append(report)
        if form == "json":
            print_document(report.to_json())
        elif form == "github":
            sys.stdout.write("".join(f"{line}\n" for line in workflow_commands(logged(report))))
            sys.stdout.flush()
        elif form == "text":
            as_text(report)
    if form == "junit":
        sys.stdout.write(junit(list(map(logged, reports)), command))
    elif form == "sarif":
        from ckpt_tools.operations.explain import meanings

        print_document(sarif(list(map(logged, reports)), meanings() | _MEANINGS))
    return reports
