"""Work on many files in processes of their own, with the results in the order of the files."""

from __future__ import annotations

import signal
from collections.abc import Callable, Iterator, Sequence
from typing import TypeVar

from ckpt_tools import limits
from ckpt_tools.errors import LimitError, UsageError

_Item = TypeVar("_Item")
_Result = TypeVar("_Result")


def in_processes(
    function: Callable[[_Item], _Result], items: Sequence[_Item], jobs: int, *, batch: int = 1
) -> Iterator[_Result]:
    """What `function` gives for each item, in order; worked out by `jobs` fresh processes.

    Args:
        function: can be pickled, as can items and results; it must not raise.
        items: one after another. jobs: processes. batch: how many items a process takes at once.

    Raises:
        LimitError: a process was killed, by the system for want of memory as a rule. UsageError: none could begin.
    """
    from concurrent.futures import ProcessPoolExecutor
    from concurrent.futures.process import BrokenProcessPool
    from multiprocessing import active_children, get_context

    pool = ProcessPoolExecutor(jobs, get_context("spawn"), _begin, (limits.changed(),))
    others = active_children()
    try:
        results = pool.map(function, items, chunksize=batch)
        workers = [child for child in active_children() if child not in others]
        yield from results
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
        pool.shutdown(wait=False, cancel_futures=True)
        for child in active_children():
            child.terminate()
        raise
    pool.shutdown()


def _begin(raised: list[tuple[str, int]]) -> None:
    """In a worker: Ctrl-C ends it without a word, the parent says it; and the parent's limits hold."""
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    limits.set_limits(raised)
