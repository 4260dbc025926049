"""Processes and devices: who this process is, what it runs on, and the few words that ranks exchange.

`single` and `dp` are one process. `ddp` and `fsdp` are one process a device, started by torchrun, which sets RANK,
WORLD_SIZE, LOCAL_RANK and MASTER_ADDR. Gradients, and under fsdp weights, travel inside DistributedDataParallel or
FSDP2 (nccl on cuda, gloo on cpu); everything else that ranks tell each other is small and goes over gloo, without
touching a GPU: over `control`, or where that is None over the one group there is.
"""

import gc
import os
import signal
import time
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta
from types import FrameType
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from click import UsageError
from torch import Tensor

from train.config import Config, refuse

NAMES = ("SIGINT", "SIGTERM", "SIGHUP", "SIGUSR1", "SIGUSR2", "SIGXCPU")
SIGNALS = [getattr(signal, name) for name in NAMES if hasattr(signal, name)]  # Windows has the first two
TIMEOUT = timedelta(minutes=30)  # after which a process stops waiting for the others
TOGETHER = 4  # steps, after which ranks tell each other of signals


class World(NamedTuple):
    """This process among all. `devices` are its own: one, or with DataParallel as many as it splits a batch over."""

    devices: tuple[torch.device, ...]
    rank: int = 0
    size: int = 1
    control: dist.ProcessGroup | None = None

    @property
    def device(self) -> torch.device:
        """Where the model and the batches live."""
        return self.devices[0]

    def sum(self, values: Tensor, how: Any = dist.ReduceOp.SUM) -> Tensor:
        """`values` added up over all ranks, on the CPU."""
        total = values.detach().cpu().clone()
        if self.size > 1:
            dist.all_reduce(total, how, group=self.control)
        return total

    def largest(self, value: int) -> int:
        """The largest value that any rank has."""
        return int(self.sum(torch.tensor(value), dist.ReduceOp.MAX)) if self.size > 1 else value

    def gather(self, value: Any) -> list[Any]:
        """Each rank's value, in the order of ranks, once all have come."""
        values = [value] * self.size
        if self.size > 1:
            dist.all_gather_object(values, value, group=self.control)
        return values

    @contextmanager
    def together(self) -> Iterator[None]:
        """A user's mistake that one rank finds inside is raised on every rank at the end, so that none waits for ever."""
        mistake = ""
        try:
            yield
        except UsageError as error:
            mistake = error.message
        for each in self.gather(mistake):
            refuse(each != "", each)


def launched() -> bool:
    """Whether torchrun, or a launcher like it, started this process."""
    return {"RANK", "WORLD_SIZE", "MASTER_ADDR"} <= os.environ.keys()


@contextmanager
def joined(config: Config) -> Iterator[World]:
    """This process among all, left when the run is over or was refused on all ranks.

    After any other failure a rank just exits: the others wait for it, and torchrun ends them once it is gone.
    """
    world = World(devices(config))
    if launched():
        world = world._replace(rank=int(os.environ["RANK"]), size=int(os.environ["WORLD_SIZE"]))
        gpu = world.device if world.device.type == "cuda" else None
        # torchrun keeps one store, with the addresses of ranks that it has restarted since: each attempt has its own part.
        store, attempt = next(dist.rendezvous("env://"))[0], os.environ.get("TORCHELASTIC_RESTART_COUNT", 0)
        dist.init_process_group(
            "nccl" if gpu else "gloo", device_id=gpu, store=dist.PrefixStore(f"attempt_{attempt}", store),
            rank=world.rank, world_size=world.size, timeout=TIMEOUT,
        )  # fmt: skip
        if gpu:
            torch.cuda.set_device(gpu)
            world = world._replace(control=dist.new_group(backend="gloo", timeout=TIMEOUT))
    try:
        yield world
    except UsageError:
        leave()
        raise
    leave()


def leave() -> None:
    """Ends the exchange between ranks."""
    if dist.is_initialized():
        # A DistributedDataParallel that waits for the garbage collector keeps gloo's threads alive until the process
        # ends, and a thread that lets go of a tensor then aborts it: 2 of 25 runs did, on the rank that is done first.
        gc.collect()
        dist.destroy_process_group()


def placed(world: World, config: Config) -> World:
    """This process in the mode of the run, with its devices. Raises UsageError where it was started for another."""
    mode, ranks = config.parallel, config.parallel in ("ddp", "fsdp")
    more = f"; or leave the checkpoint's mode with --parallel {'single' if ranks else 'ddp'}" if config.resume else ""
    refuse(ranks and not launched(), f"start it with torchrun --nproc-per-node 2 -m train --parallel {mode}{more}")
    refuse(launched() and not ranks, f"torchrun starts --parallel ddp and fsdp; python -m train --parallel {mode}{more}")
    refuse(config.sync_bn and world.device.type == "cpu", "PyTorch's SyncBatchNorm works on GPUs only")
    return world._replace(devices=devices(config))


def devices(config: Config) -> tuple[torch.device, ...]:
    """Those of this process: the CPU, or a GPU, under torchrun that of its LOCAL_RANK, with DataParallel all of them.

    Raises UsageError for a GPU that is not there.
    """
    gpus, split = torch.cuda.device_count() if torch.cuda.is_available() else 0, config.parallel == "dp"
    refuse(config.device == "cuda" and not gpus, f"--device cuda: PyTorch {torch.__version__} sees no GPU here; take cpu")
    refuse(config.device == "cpu" and split and gpus > 0, "DataParallel takes GPUs: CUDA_VISIBLE_DEVICES= hides them from it")
    if config.device == "cpu" or not gpus:
        return (torch.device("cpu"),)
    here = int(os.environ.get("LOCAL_WORLD_SIZE", 1))
    refuse(here > gpus, f"{here} processes were started here and there are {gpus} GPUs: one each, or --device cpu")
    first = int(os.environ.get("LOCAL_RANK", config.local_rank))
    return tuple(torch.device("cuda", number) for number in (range(gpus) if split else [first]))


class Stop:
    """When to leave the loop and save: after a signal, after `--save-every`. A second Ctrl-C is a KeyboardInterrupt.

    What is ignored stays so: under `nohup python -m train` SIGHUP is, and under `nohup torchrun` torchrun hears it all the
    same, and hands it on.
    """

    def __init__(self, world: World, config: Config) -> None:
        self.world, self.signal, self.saved, self.parent = world, 0, time.monotonic(), launched() and os.getppid()
        number, minutes, _ = (config.save_every or "0").partition("m")
        self.steps, self.seconds = (0, 60 * int(number)) if minutes else (int(number), 0)

    def __enter__(self) -> "Stop":
        heard = [number for number in SIGNALS if signal.getsignal(number) is not signal.SIG_IGN]
        self.before = {number: signal.signal(number, self._remember) for number in heard}
        return self

    def __exit__(self, *exception: object) -> None:
        for number, handler in self.before.items():
            signal.signal(number, handler)

    def _remember(self, number: int, frame: FrameType | None) -> None:
        if number == self.signal == signal.SIGINT:
            raise KeyboardInterrupt
        self.signal = number

    def due(self, step: int) -> bool:
        """Whether to save after this step, counted from the run's first. All ranks decide alike."""
        due = self.steps > 0 and step % self.steps == 0
        if due or (self.world.size > 1 and step % TOGETHER):
            return due  # the ranks ask each other only every few steps: it makes them wait
        if self.parent and os.getppid() != self.parent:
            self.signal = signal.SIGTERM  # the launcher is gone, and would leave the ranks to themselves
        late = self.seconds > 0 and time.monotonic() - self.saved > self.seconds
        return self.world.largest(max(self.signal, int(late))) > 0

    def agreed(self) -> int:
        """After a save: the largest signal number over all ranks, 0 while there was none. They stop together or not at all."""
        self.saved = time.monotonic()
        return self.world.largest(self.signal)
