"""Processes and devices: who this process is, what it runs on, and the few words that ranks exchange.

`single` and `dp` are one process. `ddp` and `fsdp` are one process a device, started by torchrun, which sets RANK,
WORLD_SIZE, LOCAL_RANK and MASTER_ADDR. Gradients, and under fsdp weights, travel inside DistributedDataParallel or
FSDP2 (nccl on cuda, gloo on cpu); everything else that ranks tell each other is small and goes over gloo, without
touching a GPU: over `control`, or where that is None over the one group there is.
"""

import gc
import os
import re
import signal
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from datetime import timedelta
from types import FrameType
from typing import Any

import torch
import torch.distributed as dist
from click import UsageError
from torch import Tensor

from train.config import Config, refuse

SIGNALS = [
    getattr(signal, name)  # Windows has the first two
    for name in ("SIGINT", "SIGTERM", "SIGHUP", "SIGUSR1", "SIGUSR2", "SIGXCPU")
    if hasattr(signal, name)
]


@dataclass(frozen=True)
class World:
    """This process among all. `devices` are its own: one, or with DataParallel as many as it splits a batch over."""

    mode: str
    devices: tuple[torch.device, ...]
    rank: int = 0
    size: int = 1
    control: dist.ProcessGroup | None = None

    @property
    def device(self) -> torch.device:
        """Where the model and the batches live."""
        return self.devices[0]

    def barrier(self) -> None:
        """Waits for every rank."""
        if self.size > 1:
            dist.barrier(group=self.control)

    def sum(self, values: Tensor) -> Tensor:
        """`values` added up over all ranks, on the CPU."""
        total = values.detach().cpu().clone()
        if self.size > 1:
            dist.all_reduce(total, group=self.control)
        return total

    def largest(self, value: int) -> int:
        """The largest value that any rank has."""
        if self.size == 1:
            return value
        most = torch.tensor(value)
        dist.all_reduce(most, dist.ReduceOp.MAX, group=self.control)
        return int(most)

    def gather(self, value: Any) -> list[Any]:
        """Each rank's value, in the order of ranks."""
        values = [value] * self.size
        if self.size > 1:
            dist.all_gather_object(values, value, group=self.control)
        return values

    @contextmanager
    def together(self) -> Iterator[None]:
        """A user's mistake that one rank finds inside is raised on every rank at the end, so that none waits for ever."""
        mistake = None
        try:
            yield
        except UsageError as error:
            mistake = error.message
        mistakes = [each for each in self.gather(mistake) if each is not None]
        refuse(bool(mistakes), "".join(mistakes[:1]))


def launched() -> bool:
    """Whether torchrun, or a launcher like it, started this process."""
    return {"RANK", "WORLD_SIZE", "MASTER_ADDR"} <= os.environ.keys()


@contextmanager
def joined(config: Config) -> Iterator[World]:
    """This process among all, left when the run is over or was refused on all ranks.

    After any other failure a rank just exits: the others wait for it, and torchrun ends them once it is gone.
    """
    world = join_ranks(config) if launched() else World(config.parallel, (torch.device("cpu"),))
    try:
        yield world
    except UsageError:
        leave()
        raise
    leave()


def join_ranks(config: Config) -> World:
    """One of the processes that torchrun started, on a device of its own."""
    device, rank, size = rank_device(config), int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    # torchrun keeps one store, with the addresses of ranks that it has restarted since: each attempt has its own part of it.
    store = dist.PrefixStore(f"attempt_{os.environ.get('TORCHELASTIC_RESTART_COUNT', 0)}", next(dist.rendezvous("env://"))[0])
    shared: dict[str, Any] = {"store": store, "rank": rank, "world_size": size, "timeout": timedelta(minutes=config.timeout)}
    if device.type == "cpu":
        dist.init_process_group("gloo", **shared)
        return World(config.parallel, (device,), rank, size)
    torch.cuda.set_device(device)
    dist.init_process_group("nccl", device_id=device, **shared)
    return World(config.parallel, (device,), rank, size, dist.new_group(backend="gloo", timeout=shared["timeout"]))


def leave() -> None:
    """Ends the exchange between ranks."""
    if dist.is_initialized():
        # A DistributedDataParallel that waits for the garbage collector keeps gloo's threads alive until the process
        # ends, and a thread that lets go of a tensor then aborts it: 2 of 25 runs did, on the rank that is done first.
        gc.collect()
        dist.destroy_process_group()


def placed(world: World, config: Config) -> World:
    """This process in the mode of the run, with its devices. Raises UsageError where the two do not fit."""
    check_start(config)
    refuse(config.sync_bn and world.device.type == "cpu", "PyTorch's SyncBatchNorm works on GPUs only")
    world = replace(world, mode=config.parallel, devices=world.devices if launched() else devices(config))
    processors, passes, size = world.size * len(world.devices), config.grad_accum, config.batch_size
    parts = f"{processors * passes} equal parts: {processors} processes or devices times --grad-accum {passes}"
    refuse(size % (processors * passes) != 0, f"--batch-size {size} does not divide into {parts}")
    return world


def check_start(config: Config) -> None:
    """Raises UsageError where the way this process was started does not fit `--parallel`."""
    mode, ranks, more = config.parallel, config.parallel in ("ddp", "fsdp"), ""
    if config.resume:
        more = f"; or leave the checkpoint's mode with --parallel {'single' if ranks else 'ddp'}"
    refuse(ranks and not launched(), f"start it with torchrun --nproc-per-node 2 -m train --parallel {mode}{more}")
    refuse(launched() and not ranks, f"torchrun starts --parallel ddp and fsdp; python -m train --parallel {mode}{more}")


def devices(config: Config) -> tuple[torch.device, ...]:
    """The devices of a run in one process: that of `--device`, and with DataParallel those of `--device-ids`."""
    device, split = wanted(config.device), config.parallel == "dp"
    if device.type == "cpu":
        refuse(config.device_ids is not None, "--device-ids are GPUs, and this run is on the CPU")
        there = split and torch.cuda.is_available()
        refuse(there, "DataParallel takes GPUs wherever there are any: set CUDA_VISIBLE_DEVICES= to run it on the CPU")
    if device.type == "cpu" or device.index is not None:
        refuse(config.device_ids is not None, "--device-ids goes with --device cuda, without a number")
        return (device,)
    ids = config.device_ids or ",".join(map(str, range(torch.cuda.device_count() if split else 1)))
    refuse(not re.fullmatch(r"\d+(,\d+)*", ids), f"{ids} is not a list of GPU numbers such as 0,1")
    return tuple(wanted(f"cuda:{each}") for each in ids.split(","))


def rank_device(config: Config) -> torch.device:
    """The one device of this rank: its own GPU, or the CPU."""
    device = wanted(config.device)
    refuse(device.index is not None, "under ddp and fsdp each process takes the GPU of its LOCAL_RANK: write --device cuda")
    if device.type == "cpu":
        return device
    here, gpus = int(os.environ.get("LOCAL_WORLD_SIZE", 1)), torch.cuda.device_count()
    refuse(here > gpus, f"{here} processes were started here and there are {gpus} GPUs: one each, or --device cpu")
    return torch.device("cuda", int(os.environ.get("LOCAL_RANK", config.local_rank)))


def wanted(name: str) -> torch.device:
    """`--device`; auto is the GPU where there is one. Raises UsageError for a GPU that is not there."""
    refuse(not re.fullmatch(r"auto|cpu|cuda(:\d+)?", name), f"--device is auto, cpu, cuda or cuda:N, not {name}")
    gpus = torch.cuda.device_count() if torch.cuda.is_available() else 0
    device = torch.device(name if name != "auto" else "cuda" if gpus else "cpu")
    missing = f"--device {name}: PyTorch {torch.__version__} sees no GPU here; --device cpu works now"
    refuse(device.type == "cuda" and not gpus, missing)
    refuse((device.index or 0) > max(0, gpus - 1), f"--device {name}: the GPUs here are numbered 0 to {gpus - 1}")
    return device


class Stop:
    """When to leave the loop and save: after a signal, after `--save-every`. A second Ctrl-C is a KeyboardInterrupt.

    What is ignored stays so: under `nohup python -m train` SIGHUP is, and under `nohup torchrun` torchrun hears it all the
    same, and hands it on.
    """

    def __init__(self, world: World, config: Config) -> None:
        self.world, self.together, self.signal, self.saved = world, config.stop_every, 0, time.monotonic()
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
        if self.steps and step % self.steps == 0:
            return True
        if self.world.size > 1 and step % self.together:
            return False  # the ranks ask each other only every few steps: it makes them wait
        late = self.seconds > 0 and time.monotonic() - self.saved > self.seconds
        return self.world.largest(max(self.signal, int(late))) > 0

    def agreed(self) -> int:
        """After a save: the largest signal number over all ranks, 0 while there was none. They stop together or not at all."""
        self.saved = time.monotonic()
        return self.world.largest(self.signal)
