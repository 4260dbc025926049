"""A word on a terminal while nothing can be counted yet: torch is imported, a large pickle is read, a model runs."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Iterator

AFTER = 1.0  # seconds
_WORD, _ERASE = "working ...", "\r\x1b[K"


class Waiting:
    """Shows the word after a second, until it is stopped."""

    def __init__(self) -> None:
        import threading

        self._lock, self._over, self._shown = threading.Lock(), False, False
        self._timer = threading.Timer(AFTER, self._show)
        self._timer.daemon = True
        self._timer.start()

    def _show(self) -> None:
        with self._lock:
            if not self._over:
                self._shown = True
                _write(_WORD)

    def stop(self) -> None:
        """Take the word away, for good; twice does no harm."""
        self._timer.cancel()
        with self._lock:
            self._over = True
            if self._shown:
                self._shown = False
                _write(_ERASE)


@contextlib.contextmanager
def waiting(*, quiet: bool = False) -> Iterator[Waiting | None]:
    """The word around work that is not counted; none in a pipe, or where quiet was asked for."""
    if quiet or not sys.stderr.isatty():
        yield None
        return
    shown = Waiting()
    try:
        yield shown
    finally:
        shown.stop()


def _write(text: str) -> None:
    with contextlib.suppress(OSError, ValueError):
        sys.stderr.write(text)
        sys.stderr.flush()
