"""The injectable layer: the functions of `os` that touch files, counted, and one call of one of them made to fail."""

from __future__ import annotations

import errno
import os
import signal
import threading
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

_WRITES = (
    "write", "pwrite", "writev", "copy_file_range", "sendfile", "fsync", "fdatasync", "ftruncate", "truncate", "fchmod",
    "chmod", "replace", "rename", "link", "mkdir", "rmdir",
)  # fmt: skip
_READS = ("read", "pread", "preadv", "fstat", "stat", "lstat", "lseek", "statvfs", "scandir", "listdir")
_BOTH = ("open", "close", "unlink", "remove", "dup")
_SHORT = ("write", "pwrite", "copy_file_range", "pread", "preadv")
FUNCTIONS = tuple(name for name in (*_WRITES, *_READS, *_BOTH) if hasattr(os, name))


@dataclass(frozen=True, slots=True)
class Fault:
    """The `count`-th call of a function (from 1) and what happens to it.

    `kind` is "kill" (SIGKILL before it), "killed" (after it), "interrupt" (Ctrl-C before it), "eio", "enospc", or "short" (only
    a part of the bytes).
    """

    function: str
    count: int
    kind: str

    def __str__(self) -> str:
        return f"{self.kind} at {self.function} {self.count}"


def kinds(function: str) -> tuple[str, ...]:
    """What can happen to a call of this function."""
    found = ["kill", "interrupt", "eio"]
    if function in (*_WRITES, *_BOTH):
        found += ["killed", "enospc"]
    if function in _SHORT:
        found.append("short")
    return tuple(found)


class Layer:
    """Counts calls, and lets one fail. Installed in a process that ends soon: nothing is put back.

    Args:
        fault: which call fails; None only counts.
    """

    def __init__(self, fault: Fault | None = None) -> None:
        self.fault = fault
        self.counts: dict[str, int] = {}
        self.lock = threading.Lock()
        for name in FUNCTIONS:
            setattr(os, name, self._counted(name, getattr(os, name)))

    def _counted(self, name: str, real: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any, **options: Any) -> Any:
            with self.lock:
                self.counts[name] = count = self.counts.get(name, 0) + 1
            fault = self.fault
            if fault is None or (fault.function, fault.count) != (name, count):
                return real(*args, **options)
            return _fail(fault, real, args, options)

        return call


def _fail(fault: Fault, real: Callable[..., Any], args: tuple[Any, ...], options: dict[str, Any]) -> Any:
    if fault.kind in ("kill", "interrupt"):
        os.kill(os.getpid(), signal.SIGKILL if fault.kind == "kill" else signal.SIGINT)
        return real(*args, **options)
    if fault.kind == "killed":
        try:
            real(*args, **options)
        finally:
            os.kill(os.getpid(), signal.SIGKILL)
    if fault.kind == "short":
        return real(*_shortened(fault.function, args), **options)
    if fault.function == "close":  # it says that it failed, and has closed the file nevertheless
        real(*args, **options)
    number = errno.EIO if fault.kind == "eio" else errno.ENOSPC
    raise OSError(number, os.strerror(number))


def _shortened(function: str, args: tuple[Any, ...]) -> tuple[Any, ...]:
    """The arguments of a call for a third of the bytes, at least one."""
    if function in ("write", "pwrite"):
        return args[0], args[1][: max(1, len(args[1]) // 3)], *args[2:]
    if function == "copy_file_range":
        return *args[:2], max(1, args[2] // 3), *args[3:]
    if function == "pread":
        return args[0], max(1, args[1] // 3), *args[2:]
    buffer = args[1][0]
    return args[0], [buffer[: max(1, len(buffer) // 3)]], *args[2:]
