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
from ckpt_tools.io.source import Handed

if TYPE_CHECKING:
    from multiprocessing.process import BaseProcess

_PATIENCE = 10.0  # seconds that a process has to end, once it was asked to
_Item = TypeVar("_Item")
_Result = TypeVar("_Result")


def in_processes(
    function: Callable[[_Item], _Result], items: Sequence[_Item], jobs: int, *, batch: int = 1
) -> Iterator[_Result]:
    """What `function` gives for each item, in order; worked out by `jobs` fresh processes, of one job or pipes by this one."""
    jobs = min(jobs, len(items))
    is_unsafe = sys.flags.ignore_environment and not sys.flags.safe_path  # `python -E`: nothing tells others of safe paths
    if jobs < 2 or is_unsafe or any(isinstance(item, Handed) for item in items):
        yield from map(function, items)
        return
    from concurrent.futures import ProcessPoolExecutor
    from concurrent.futures.process import BrokenProcessPool
    from multiprocessing import active_children, get_context

    with _beginning():  # its first lock starts the resource tracker
        pool = ProcessPoolExecutor(jobs, get_context("spawn"), _begin, (limits.as_set(),))
    others = active_children()
    try:
        # `Executor.map` would cancel what is left when it is interrupted, and 3.11 then prints a traceback
        with _beginning():
            futures = [pool.submit(_all_of, function, items[at : at + batch]) for at in range(0, len(items), batch)][::-1]
        workers = [child for child in active_children() if child not in others]
        while futures:
            yield from futures.pop().result()
    except BrokenProcessPool:
        pool.shutdown()  # all have ended then
        if any(worker.exitcode is not None and worker.exitcode > 0 for worker in workers):  # a signal's is below zero
            what = "The processes that should work on the files could not begin."
            raise UsageError(what, fix="Put a script's work below `if __name__ == '__main__':`, or try `jobs=1`.") from None
        what = "A process that worked on the files was killed, as the system does when memory runs out."
        raise LimitError(what, fix="Try `jobs=1`.") from None
    except BaseException:
        _end_all([child for child in active_children() if child not in others])
        raise
    finally:
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
def _beginning() -> Iterator[None]:
    """Pythons that are started in the block do not begin with the current folder on their path, which may be a stranger's.

    Nor do they ever take Ctrl-C, where Python would print where it stood: their parent ends them.
    """
    before, mask = os.environ.get("PYTHONSAFEPATH"), None
    os.environ["PYTHONSAFEPATH"] = "1"
    try:
        if hasattr(signal, "pthread_sigmask"):
            from multiprocessing import resource_tracker

            resource_tracker.ensure_running()  # as it starts it lets them through again
            mask = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
        yield
    finally:
        if mask is not None:
            signal.pthread_sigmask(signal.SIG_SETMASK, mask)
        del os.environ["PYTHONSAFEPATH"]
        if before is not None:
            os.environ["PYTHONSAFEPATH"] = before


def _begin(raised: list[str]) -> None:
    """In a worker: the end of its parent ends it, Ctrl-C does not, and the parent's limits hold."""
    import threading
    from multiprocessing import parent_process

    def end_with(parent: BaseProcess) -> None:
        parent.join()
        os.kill(os.getpid(), signal.SIGTERM)

    signal.signal(signal.SIGINT, signal.SIG_IGN)
    if (parent := parent_process()) is not None:  # which says nothing when it is killed: we would wait for ever for more to do
        threading.Thread(target=end_with, args=(parent,), daemon=True).start()
    limits.set_limits(raised)


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
