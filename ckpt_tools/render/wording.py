"""The library's messages in the command line's words: `as_is` becomes --as-is, `objects='plain'` --objects plain."""

from __future__ import annotations

import re
import shlex
from collections.abc import Mapping
from typing import Any

from ckpt_tools.tree.findings import Finding

_RAISED = re.compile(r"`limits\.raised\((\w+)=(\d+)\)`")
_ARGUMENT = re.compile(r"`([a-z]\w*)(?:=([^`]*))?`")


def as_options(text: str) -> str:
    """A message in which every argument between backticks is the option of the same name."""
    return _ARGUMENT.sub(_option, _RAISED.sub(r"--limit \1=\2", text))


def worded(document: Mapping[str, Any]) -> dict[str, Any]:
    """A report as plain data with its notes, findings and reasons as the command line says them."""
    said = dict(document)
    for key in ("notes", "findings"):
        if isinstance(rows := said.get(key), list):
            said[key] = [_worded_row(row) for row in rows]
    for key in ("dropped", "stayed"):
        if isinstance(rows := said.get(key), list):
            said[key] = [(path, as_options(why)) for path, why in rows]
    if isinstance(output := said.get("output"), dict):
        said["output"] = worded(output)
    return said


_SENTENCES = frozenset(("text", "found", "expected", "fix"))
_QUOTING = frozenset(("dangerous", "unexamined"))


def _worded_row(row: Any) -> Any:
    if isinstance(row, str):
        return as_options(row)
    if not isinstance(row, dict):
        return row
    sentences = _SENTENCES - {"found"} if row.get("code") in _QUOTING else _SENTENCES
    return {key: as_options(value) if key in sentences and isinstance(value, str) else value for key, value in row.items()}


def found_in(finding: Finding) -> str:
    """What a finding says was found. What it quotes of a file stays as it is: a shell's `id` is not an option."""
    return finding.found if finding.code in _QUOTING else as_options(finding.found)


def _option(found: re.Match[str]) -> str:
    name, written = found.groups()
    option = f"--{name.rstrip('_').replace('_', '-')}"
    if written is None:
        return option
    from ast import literal_eval  # few messages have a value

    try:
        value = literal_eval(written)
    except (ValueError, SyntaxError, MemoryError, RecursionError):  # a word that stands for a value: WHERE
        return f"{option} {written}"
    if value is True:
        return option
    values = value if isinstance(value, list | tuple) and name in _REPEATED else [value]
    return " ".join(f"{option} {_shell(one)}" for one in values)


_REPEATED = ("drop", "keep", "rename", "reinit", "ignore")


def _shell(value: object) -> str:
    """A value as it is typed in a shell."""
    if isinstance(value, list | tuple):
        return ",".join(map(str, value))
    if isinstance(value, dict):
        import json

        return shlex.quote(json.dumps(value))
    return shlex.quote(str(value))
