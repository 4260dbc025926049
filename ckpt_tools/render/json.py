"""Reports as JSON, one document a line: for scripts."""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from ckpt_tools.errors import CkptError
from ckpt_tools.render.wording import as_options, worded


def line(document: dict[str, Any]) -> str:
    """A document as one line. ASCII, so that lone surrogates and control characters in names survive any pipe."""
    return json.dumps(worded(document), allow_nan=False, separators=(",", ":"))


def print_document(document: dict[str, Any]) -> None:
    """A document as one line of standard output."""
    sys.stdout.write(line(document) + "\n")
    sys.stdout.flush()


def folder_document(folder: Path, others: Sequence[Path]) -> dict[str, Any]:
    """What follows the documents of the checkpoints in a folder: its other files."""
    return {"folder": str(folder), "no_checkpoints": [str(path) for path in others]}


def error_document(path: str | None, error: CkptError) -> dict[str, Any]:
    """What stands in the place of a report that could not be made; of one file among several with its path."""
    kind = type(error).__name__
    what, why, fix = map(as_options, (error.what, error.why, error.fix))
    return failure_document(kind, what, why=why, fix=fix, exit_code=error.exit_code, path=path)


def failure_document(
    kind: str, what: str, *, exit_code: int, why: str = "", fix: str = "", path: str | None = None
) -> dict[str, Any]:
    """The contract of docs/error.schema.json."""
    return {"path": path, "error": kind, "what": what, "why": why, "fix": fix, "exit_code": exit_code}
