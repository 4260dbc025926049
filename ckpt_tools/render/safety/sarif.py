"""What `ckpt scan` found as SARIF 2.1.0, which code hosts show beside a change.

Source: OASIS, Static Analysis Results Interchange Format (SARIF) Version 2.1.0, sections 3.13 to 3.34.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path, PurePath
from typing import Any
from urllib.parse import quote

from ckpt_tools._version import __version__
from ckpt_tools.operations.safety import sentence
from ckpt_tools.operations.scan import Scanned
from ckpt_tools.text import printable

_SCHEMA = "https://json.schemastore.org/sarif-2.1.0.json"
_RULES = (
    ("dangerous", "error", "Loading the file without weights_only runs code"),
    ("unexamined", "warning", "Not all of the file could be examined"),
    ("needs-code", "note", "Loading the file needs classes that weights_only does not allow"),
)


def sarif(reports: Sequence[Scanned]) -> dict[str, Any]:
    """The whole log: one run, with a result for every call, part that was not examined, and file that needs classes."""
    rules = [
        {"id": code, "shortDescription": {"text": text}, "defaultConfiguration": {"level": level}}
        for code, level, text in _RULES
    ]
    driver = {"name": "ckpt", "version": __version__, "rules": rules}
    results = [row for report in reports for row in _results(report)]
    run = {"tool": {"driver": driver}, "columnKind": "unicodeCodePoints", "results": results}
    return {"$schema": _SCHEMA, "version": "2.1.0", "runs": [run]}


def _results(report: Scanned) -> Iterator[dict[str, Any]]:
    safety = report.safety
    for where, call in safety.calls:
        yield _result(report, "dangerous", sentence(where, call), where)
    for where, why in safety.unexamined:
        yield _result(report, "unexamined", f"not examined: {printable(why)}", where)
    if report.verdict == "needs-code":
        yield _result(report, "needs-code", safety.text, "")


def _result(report: Scanned, code: str, text: str, where: str) -> dict[str, Any]:
    index, (_, level, _) = next((index, rule) for index, rule in enumerate(_RULES) if rule[0] == code)
    location: dict[str, Any] = {"physicalLocation": {"artifactLocation": {"uri": _uri(report.path)}}}
    if where:
        location["logicalLocations"] = [{"fullyQualifiedName": printable(where), "kind": "member"}]
    return {"ruleId": code, "ruleIndex": index, "level": level, "message": {"text": text}, "locations": [location]}


def _uri(path: str) -> str:
    """A path as a reference: relative ones as they are, so that a code host finds the file."""
    if "://" in path:
        return path
    given = PurePath(path)
    return Path(path).as_uri() if given.is_absolute() else quote(given.as_posix())
