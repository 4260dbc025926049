"""Work on many files in processes of their own, with the results in the order of the files."""

from __future__ import annotations

import contextlib
import os
import signal
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from types import FrameType
from typing import TYPE_CHECKING, TypeVar

from ckpt_tools import limits
from ckpt_tools.errors import LimitError, UsageError

if TYPE_CHECKING:
    from multiprocessing.process import BaseProcess

_PATIENCE = 10.0  # seconds that a process has to end, once it was asked to
_Item = TypeVar("_Item")
_Result = TypeVar("_Result")


def in_processes(
    function: Callable[[_Item], _Result], items: Sequence[_Item], jobs: int, *, batch: int = 1
) -> Iterator[_Result]:
    """What `function` gives for each item, in order; worked out by `jobs` fresh processes."""
    from concurrent.futures import ProcessPoolExecutor
    from concurrent.futures.process import BrokenProcessPool
    from multiprocessing import active_children, get_context

    if sys.flags.ignore_environment and not sys.flags.safe_path:  # `python -E`: nothing would tell them to keep to safe paths
        yield from map(function, items)
        return
    with _safe_paths():  # its first lock starts the resource tracker
        pool = ProcessPoolExecutor(jobs, get_context("spawn"), _begin, (limits.as_set(),))
    others = active_children()
    try:
        # `Executor.map` would cancel what is left when it is interrupted, and 3.11 then prints a traceback
        with _safe_paths(), _interrupts_held():
            futures = [pool.submit(_all_of, function, items[at : at + batch]) for at in range(0, len(items), batch)][::-1]
        workers = [child for child in active_children() if child not in others]
        while futures:
            yield from futures.pop().result()
    except BrokenProcessPool:
        pool.shutdown()  # all have ended then
        if any(worker.exitcode is not None and worker.exitcode > 0 for worker in workers):  # a signal's is below zero
            raise UsageError(
                "The processes that should work on the files could not begin.",
                why="Each first imports the program that was started, and that ended with an error there; a script does where "
                "it calls this as it is imported.",
                fix="Put the script's own work below `if __name__ == '__main__':`, or try `jobs=1`.",
            ) from None
        raise LimitError(
            "A process that worked on the files was killed.",
            why="The system does so when memory runs out.",
            fix="Try `jobs=1`.",
        ) from None
    except BaseException:
        _end_all([child for child in active_children() if child not in others])
        pool.shutdown()
        raise
    pool.shutdown()


def _end_all(children: list[BaseProcess]) -> None:
    """End processes, which remove what they were writing; one that does not in time is killed: the pool would wait for ever."""
    from multiprocessing.connection import wait

    for child in children:
        child.terminate()
    stop = time.monotonic() + _PATIENCE
    for child in children:
        if not wait([child.sentinel], max(0.0, stop - time.monotonic())):
            child.kill()


@contextlib.contextmanager
def _safe_paths() -> Iterator[None]:
    """Pythons that are started in the block do not begin with the current folder on their path: it may be a stranger's."""
    before = os.environ.get("PYTHONSAFEPATH")
    os.environ["PYTHONSAFEPATH"] = "1"
    try:
        yield
    finally:
        del os.environ["PYTHONSAFEPATH"]
        if before is not None:
            os.environ["PYTHONSAFEPATH"] = before


@contextlib.contextmanager
def _interrupts_held() -> Iterator[None]:
    """Processes that are started in the block never take Ctrl-C: Python would print where it stood. Their parent ends them."""
    if not hasattr(signal, "pthread_sigmask"):
        yield
        return
    from multiprocessing import resource_tracker

    resource_tracker.ensure_running()  # as it starts it lets them through again
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def _begin(raised: list[str]) -> None:
    """In a worker: the end of its parent ends it, Ctrl-C does not, and the parent's limits hold."""
    import threading

    signal.signal(signal.SIGINT, signal.SIG_IGN)
    threading.Thread(target=_end_with_the_parent, daemon=True).start()
    limits.set_limits(raised)


def _end_with_the_parent() -> None:
    """A parent that is killed says nothing: its workers would wait for ever for more to do."""
    from multiprocessing import parent_process

    parent = parent_process()
    if parent is not None:
        parent.join()
        os.kill(os.getpid(), signal.SIGTERM)


def _all_of(function: Callable[[_Item], _Result], items: Sequence[_Item]) -> list[_Result]:
    """In a worker: the results of some items. Told to end, it does so when what it is writing has been removed."""

    def leave(number: int, frame: FrameType | None) -> None:
        signal.signal(number, signal.SIG_IGN)
        raise SystemExit(number)

    signal.signal(signal.SIGTERM, leave)
    try:
        return [function(item) for item in items]
    except SystemExit:  # the pool would take it for a result, and the parent for a program that could not begin
        os.kill(os.getpid(), getattr(signal, "SIGKILL", signal.SIGTERM))
        raise
    finally:
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
