"""Paths that name a member of an archive: `model.tar.gz!run/model.pth`."""

from __future__ import annotations

import os
from typing import TypeAlias

MARK = "!"
AnyPath: TypeAlias = str | os.PathLike[str]


def archive_and_member(path: AnyPath) -> tuple[AnyPath, str]:
    """The path of an archive, and the member of it that a path names; "" where it names a file or a folder itself."""
    text = os.fspath(path)
    if not isinstance(text, str) or MARK not in text or os.path.lexists(text):
        return path, ""
    at = text.find(MARK)
    while at >= 0:
        if os.path.isfile(text[:at]):
            return text[:at], text[at + 1 :].rstrip("/")
        at = text.find(MARK, at + 1)
    return path, ""
