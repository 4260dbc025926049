"""The files that are opened while a guard is active.

Python tells its audit hooks of every file that it opens, also by a name that was imported long before, which a wrapper around
`open` would miss. A hook cannot be removed: there is one for all guards, and while none is active it looks at an empty list.
safetensors and torch's own readers open files without Python; they ask for the functions of torch that are wrapped meanwhile.
"""

from __future__ import annotations

import os
import sys
import threading
from collections.abc import Callable
from functools import cache, wraps
from types import TracebackType
from typing import Any, Self

import torch

_ACTIVE: list[Opened] = []
_WRAPPED = ((torch.UntypedStorage, "from_file"), (torch.jit, "load"), (torch.export, "load"))
_LOCK = threading.Lock()
_PYTHON = (".py", ".pyc", ".so", ".pyd", ".dll")


class Opened:
    """The paths that were opened for reading inside the block, by any thread, in order.

    Attributes:
        paths: absolute paths, each once.
    """

    def __init__(self) -> None:
        self.paths: dict[str, None] = {}

    def __enter__(self) -> Self:
        with _LOCK:
            _install()
            if not _ACTIVE:
                _wrap()
            _ACTIVE.append(self)
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        with _LOCK:
            _ACTIVE.remove(self)
            if not _ACTIVE:
                _unwrap()


@cache
def _install() -> None:
    sys.addaudithook(_hear)


def _hear(event: str, arguments: tuple[Any, ...]) -> None:
    if _ACTIVE and event == "open" and isinstance(arguments[0], str | bytes):
        path, mode, flags = arguments
        if not (set(mode) & set("wxa") if isinstance(mode, str) else (flags or 0) & (os.O_WRONLY | os.O_CREAT)):
            _note(path)


def _note(path: Any) -> None:
    text = os.path.abspath(os.fsdecode(path))
    if not text.endswith(_PYTHON) and os.path.lexists(text):  # Python tells before it tries
        for opened in _ACTIVE:
            opened.paths[text] = None


_originals: list[Any] = []


def _wrap() -> None:
    for owner, name in _WRAPPED:
        _originals.append(vars(owner).get(name))
        setattr(owner, name, _telling(getattr(owner, name)))


def _unwrap() -> None:
    for (owner, name), original in zip(_WRAPPED, _originals, strict=True):
        if original is None:  # it was inherited
            delattr(owner, name)
        else:
            setattr(owner, name, original)
    _originals.clear()


def _telling(call: Callable[..., Any]) -> Callable[..., Any]:
    @wraps(call)
    def told(path: Any, *arguments: Any, **named: Any) -> Any:
        if isinstance(path, str | bytes | os.PathLike):
            _note(path)
        return call(path, *arguments, **named)

    return told
