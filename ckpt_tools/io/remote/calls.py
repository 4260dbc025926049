"""Calls of servers and drivers, which are waited for so long and no longer, with their errors as ours."""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable
from typing import Any, TypeVar, cast

from ckpt_tools.errors import CkptError, RemoteError, RemoteMissingError, RemoteTimeoutError

SECONDS = 60
T = TypeVar("T")


class ForeignError(RemoteError):
    """An error of a driver, kept."""

    def __init__(self, url: str, error: BaseException) -> None:
        text = f"{type(error).__name__}: {error}"[:300]
        super().__init__(f"{url} cannot be reached.", why=text)
        self.error = error

    def __reduce__(self) -> tuple[Any, ...]:
        """For another process: without what the driver raised, which need not be known there."""
        return RemoteError, (self.what,), {"what": self.what, "why": self.why, "fix": self.fix}


def bounded(url: str, call: Callable[[], T], seconds: float = SECONDS) -> T:
    """What a call of a driver gives, its errors as ours, and not waited for longer than a minute, or than is said."""
    done: queue.SimpleQueue[tuple[bool, Any]] = queue.SimpleQueue()

    def work() -> None:
        try:
            done.put((True, call()))
        except Exception as error:  # drivers raise what their libraries do
            done.put((False, error))

    threading.Thread(target=work, daemon=True).start()
    try:
        good, value = done.get(timeout=seconds)
    except queue.Empty:
        raise RemoteTimeoutError(f"{url} cannot be read.", why=f"No whole answer within {seconds:.0f} seconds.") from None
    if not good and isinstance(value, FileNotFoundError) and not isinstance(value, CkptError):
        raise RemoteMissingError(f"{url} cannot be reached.", why="There is no such file.") from None
    if not good:
        raise value if isinstance(value, CkptError) else ForeignError(url, value) from None
    return cast("T", value)


def unreachable(url: str, why: str) -> RemoteError:
    return RemoteError(f"{url} cannot be read.", why=why)
