"""SARIF 2.1.0, which code hosts show beside a change.

Source: OASIS, Static Analysis Results Interchange Format (SARIF) Version 2.1.0, sections 3.13 to 3.34.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path, PurePath
from typing import Any
from urllib.parse import quote

from ckpt_tools._version import __version__
from ckpt_tools.render.logs.rows import Logged, Row

_SCHEMA = "https://json.schemastore.org/sarif-2.1.0.json"
_LEVELS = {"problem": "error", "warning": "warning", "info": "note"}
# Of `ckpt scan`; what the codes of `ckpt check` mean, `ckpt explain` knows.
SCANNED = {
    "dangerous": "Loading the file without weights_only runs code",
    "unexamined": "Not all of the file could be examined",
    "needs-code": "Loading the file needs classes that weights_only does not allow",
}


def sarif(files: Sequence[Logged], meanings: Mapping[str, str]) -> dict[str, Any]:
    """The whole log: one run, with a rule for every code that was found, and a result for everything that was."""
    found = {row.code: row.severity for file in files for row in file.rows}
    rules = [_rule(code, severity, meanings.get(code, code)) for code, severity in found.items()]
    places = {code: index for index, code in enumerate(found)}
    driver = {"name": "ckpt", "version": __version__, "rules": rules}
    results = [_result(file.path, row, places[row.code]) for file in files for row in file.rows]
    run = {"tool": {"driver": driver}, "columnKind": "unicodeCodePoints", "results": results}
    return {"$schema": _SCHEMA, "version": "2.1.0", "runs": [run]}


def _rule(code: str, severity: str, text: str) -> dict[str, Any]:
    level = _LEVELS[severity]
    return {"id": code, "shortDescription": {"text": text}, "defaultConfiguration": {"level": level}}


def _result(path: str, row: Row, index: int) -> dict[str, Any]:
    location: dict[str, Any] = {"physicalLocation": {"artifactLocation": {"uri": _uri(path)}}}
    if row.place:
        location["logicalLocations"] = [{"fullyQualifiedName": row.place, "kind": "member"}]
    level = _LEVELS[row.severity]
    return {"ruleId": row.code, "ruleIndex": index, "level": level, "message": {"text": row.text}, "locations": [location]}


def _uri(path: str) -> str:
    """A path as a reference: relative ones as they are, so that a code host finds the file."""
    if "://" in path:
        return path
    given = PurePath(path)
    return Path(path).as_uri() if given.is_absolute() else quote(given.as_posix(), errors="surrogateescape")
