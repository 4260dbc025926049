"""What a terminal shows of work that takes over a second: rich's bar. Nothing in a pipe."""

from __future__ import annotations

import contextlib
import sys
import threading
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from ckpt_tools.io.writer import Progress

_AFTER = 1.0  # seconds


@contextlib.contextmanager
def show_progress(*, quiet: bool = False) -> Iterator[Progress]:
    """A bar for the work inside, which may call it with bytes done and in all; where it does not, the bar only moves."""
    if quiet or not sys.stderr.isatty():
        yield lambda done, size: None
        return
    shown = _Bar()
    timer = threading.Timer(_AFTER, shown.start)
    timer.daemon = True
    timer.start()
    try:
        yield shown.update
    finally:
        timer.cancel()
        timer.join()
        shown.stop()


class _Bar:
    """rich's bar, which is imported when it is needed."""

    def __init__(self) -> None:
        self.done, self.size, self.bar = 0, 0, None

    def start(self) -> None:
        """Show it."""
        from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn

        from ckpt_tools.render.text import console

        columns = (BarColumn(), TextColumn("{task.description}"), TimeRemainingColumn())
        bar: Any = Progress(
            *columns, console=console(stderr=True), transient=True, redirect_stdout=False, redirect_stderr=False
        )
        bar.add_task("working ...", total=None)
        bar.start()
        self.bar = bar

    def update(self, done: int, size: int) -> None:
        """So many bytes are done of so many."""
        if self.bar is not None:
            from ckpt_tools.render.text import size_text

            speed = size_text(int(self.bar.tasks[0].speed or 0))
            self.bar.update(0, completed=done, total=size, description=f"{size_text(done)} of {size_text(size)}  {speed}/s")

    def stop(self) -> None:
        """Take it away."""
        if self.bar is not None:
            self.bar.stop()
