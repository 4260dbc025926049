"""Lines that GitHub Actions shows as annotations: `::error file=model.pth,title=not-finite::2 values are NaN`.

Source: GitHub's documentation, "Workflow commands for GitHub Actions"; the escapes are those of actions/toolkit.
"""

from __future__ import annotations

from collections.abc import Iterator

from ckpt_tools.render.logs.rows import Logged
from ckpt_tools.text import printable

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
