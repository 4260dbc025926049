"""Globals whose names are damaged: a legacy file has no checksum, so that a flipped bit makes a class that nobody has."""

from __future__ import annotations

from collections.abc import Iterable

from ckpt_tools.errors import RepairError
from ckpt_tools.pickling.weights_only import ALLOWED
from ckpt_tools.tree.nodes import Global


def damaged_names(names: Iterable[Global]) -> list[tuple[str, str]]:
    """Each name that is none of what torch allows, but differs from one of those in one letter; and that one."""
    known: dict[int, list[str]] = {}
    for allowed in map(str, ALLOWED):
        known.setdefault(len(allowed), []).append(allowed)
    found = []
    for name in (str(name) for name in names if name not in ALLOWED):
        near = (allowed for allowed in known.get(len(name), ()) if _one_differs(name, allowed))
        found += [(name, allowed) for allowed in [next(near, None)] if allowed is not None]
    return found


def _one_differs(one: str, other: str) -> bool:
    return sum(a != b for a, b in zip(one, other, strict=True)) == 1


def damaged_names_error(path: str, found: list[tuple[str, str]]) -> RepairError:
    """The error for a pickle with damaged names: what it makes would be loaded by nobody."""
    name, near = found[0]
    return RepairError(
        f"The pickle of {path} is damaged: it names {name!r}, where {near!r} is meant.",
        why="The file has no checksum by which the damage could be found, and nothing says what else has changed.",
        fix="Get the file again; `keep_damaged` writes it as it is.",
    )
