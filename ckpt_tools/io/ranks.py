"""The processes of one job, as PyTorch's launcher (torchrun) starts them; or this one alone."""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, TypeVar

from ckpt_tools.errors import ChangedFileError, CkptError, OutputError

_MINUTES = 60  # how long one process may take longer than another before the job is given up
# Before a group is left: in PyTorch 2.4 its threads still let go of what was exchanged, and rank 0 waited for them for ever.
_LET_GO_SECONDS = 0.05
T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Ranks:
    """This process's number among all that work on one output."""

    rank: int = 0
    world: int = 1

    def agree(self, work: Callable[[], T]) -> list[T]:
        """Do `work` in every process and return what each made, by rank; when one fails, all fail with its error."""
        if self.world == 1:
            return [work()]
        import torch.distributed as dist

        made: tuple[Any, CkptError | None]
        try:
            made = (work(), None)
        except CkptError as error:
            made = (None, error)
        results: list[Any] = [None] * self.world
        with self.connected():
            dist.all_gather_object(results, made)
        for rank, (_, failure) in enumerate(results):
            if failure is not None:
                raise self.blamed(rank, failure)
        return [value for value, _ in results]

    def make_same(self, make: Callable[[], T], digest: Callable[[T], object]) -> T:
        """Make a thing in every process; refuse when its digest is not the same in all."""
        made: list[T] = []

        def work() -> object:
            made.append(make())
            return digest(made[0])

        if len(set(self.agree(work))) > 1:
            raise ChangedFileError(
                "The processes of the job read different inputs.", why="The input changed, or is not shared."
            )
        return made[0]

    def blamed(self, rank: int, failure: CkptError) -> CkptError:
        """An error, which says whose it is where it is another process's."""
        if rank != self.rank:
            failure.what = f"Process {rank} of the job failed: {failure.what}"
            failure.rank = rank
        return failure

    @contextlib.contextmanager
    def connected(self) -> Iterator[None]:
        """What the processes say to one another inside the block; a connection that breaks is told as an error of ours."""
        try:
            yield
        except RuntimeError as error:
            if self.world == 1:
                raise
            raise OutputError(
                "Another process of the job ended before the work was done; nothing has been written.", why=f"{error}"[:300]
            ) from None


@contextlib.contextmanager
def launched() -> Iterator[Ranks]:
    """This process's place in the job that torchrun started, over gloo; alone where none did."""
    world = os.environ.get("WORLD_SIZE", "")
    if not {"RANK", "MASTER_ADDR", "MASTER_PORT"} <= os.environ.keys() or not world.isdecimal() or int(world) < 2:
        yield Ranks()
        return
    import torch.distributed as dist

    dist.init_process_group("gloo", timeout=timedelta(minutes=_MINUTES))
    try:
        yield Ranks(dist.get_rank(), dist.get_world_size())
    finally:
        time.sleep(_LET_GO_SECONDS)
        dist.destroy_process_group()
