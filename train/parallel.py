"""One process or many: who this process is, which devices it uses, and the few words that ranks exchange.

`single` and `dp` are one process. `ddp` and `fsdp` are one process a device, started by torchrun, which sets RANK,
WORLD_SIZE, LOCAL_RANK and MASTER_ADDR. Gradients, and under fsdp weights, travel inside DistributedDataParallel or
FSDP2 (nccl on cuda, gloo on cpu); everything else that ranks tell each other is small and goes over gloo, without
touching a GPU: over `control`, or where that is None over the one group there is.
"""

import gc
import os
import re
import signal
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, replace
from types import FrameType
from typing import Any

import torch
import torch.distributed as dist
from click import UsageError
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from train.config import Config, refuse

SIGNALS = [getattr(signal, name) for name in ("SIGINT", "SIGTERM", "SIGHUP") if hasattr(signal, name)]  # Windows: no SIGHUP


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

    def gather(self, value: Any) -> list[Any]:
        """Each rank's value, in the order of ranks."""
        values = [value] * self.size
        if self.size > 1:
            dist.all_gather_object(values, value, group=self.control)
        return values

    def from_first(self, task: Callable[[], Any]) -> Any:
        """What `task` returns on rank 0, given to all; tensors follow one by one, so that memory holds them once.

        A user's mistake that `task` finds on rank 0 is raised on every rank, so that none waits for ever.
        """
        if self.size == 1:
            return task()
        result, mistake = attempted(task) if self.rank == 0 else (None, None)
        message = [mapped(result, lambda tensor: tensor.to("meta")), mistake]
        dist.broadcast_object_list(message, src=0, group=self.control)
        if message[1] is not None:
            raise UsageError(message[1])
        return mapped(result if self.rank == 0 else message[0], self._broadcast)

    def on_all(self, task: Callable[[], Any]) -> Any:
        """Each rank's own result of `task`; a user's mistake that any rank finds is raised on every rank."""
        result, mistake = attempted(task)
        mistakes = [each for each in self.gather(mistake) if each is not None]
        if mistakes:
            raise UsageError(mistakes[0])
        return result

    def _broadcast(self, tensor: Tensor) -> Tensor:
        """Rank 0's tensor everywhere; the other ranks come with one that has its shape but no data."""
        sent = tensor.contiguous() if self.rank == 0 else torch.empty(tensor.shape, dtype=tensor.dtype)
        dist.broadcast(sent, src=0, group=self.control)
        return sent


def attempted(task: Callable[[], Any]) -> tuple[Any, str | None]:
    """The result of `task` and None, or None and the sentence with which it refused."""
    try:
        return task(), None
    except UsageError as error:
        return None, error.message


def mapped(tree: Any, change: Callable[[Tensor], Tensor]) -> Any:
    """A copy of `tree` (dicts, lists, tuples, plain values) with every tensor changed, always in the same order."""
    if isinstance(tree, Tensor):
        return change(tree)
    if isinstance(tree, dict):
        return {key: mapped(value, change) for key, value in tree.items()}
    if isinstance(tree, list | tuple):
        return type(tree)(mapped(value, change) for value in tree)
    return tree


def placed(world: World, config: Config) -> World:
    """This process in the mode of the run, with its devices. Raises UsageError where the two do not fit."""
    check_start(config)
    refuse(config.sync_bn and world.device.type == "cpu", "PyTorch's SyncBatchNorm works on GPUs only")
    return replace(world, mode=config.parallel, devices=world.devices if launched() else devices(config))


def launched() -> bool:
    """Whether torchrun, or a launcher like it, started this process."""
    return {"RANK", "WORLD_SIZE", "MASTER_ADDR"} <= os.environ.keys()


def check_start(config: Config) -> None:
    """Raises UsageError where the way this process was started does not fit `--parallel`."""
    mode, ranks, more = config.parallel, config.parallel in ("ddp", "fsdp"), ""
    if config.resume:
        more = f"; or leave the checkpoint's mode with --parallel {'single' if ranks else 'ddp'}"
    refuse(ranks and not launched(), f"start it with torchrun --nproc-per-node 2 -m train --parallel {mode}{more}")
    refuse(launched() and not ranks, f"torchrun starts --parallel ddp and fsdp; python -m train --parallel {mode}{more}")


def join_ranks(config: Config) -> World:
    """One of the processes that torchrun started, on a device of its own."""
    device, rank, size = rank_device(config), int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    if device.type == "cpu":
        dist.init_process_group("gloo", store=own_store(), rank=rank, world_size=size)
        return World(config.parallel, (device,), rank, size)
    torch.cuda.set_device(device)
    dist.init_process_group("nccl", device_id=device, store=own_store(), rank=rank, world_size=size)
    return World(config.parallel, (device,), rank, size, dist.new_group(backend="gloo"))


def own_store() -> dist.Store:
    """Where this attempt's ranks find each other: torchrun keeps one store, with the addresses of ranks that it restarted."""
    store, _, _ = next(dist.rendezvous("env://"))
    return dist.PrefixStore(f"attempt_{os.environ.get('TORCHELASTIC_RESTART_COUNT', 0)}", store)


def check_division(config: Config, world: World) -> None:
    """Raises UsageError unless the global batch divides into equal parts for every process or device, and pass."""
    processors, passes, size = world.size * len(world.devices), config.grad_accum, config.batch_size
    parts = f"{processors * passes} equal parts: {processors} processes or devices times --grad-accum {passes}"
    refuse(size % (processors * passes) != 0, f"--batch-size {size} does not divide into {parts}")


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


def leave() -> None:
    """Ends the exchange between ranks."""
    if dist.is_initialized():
        # A DistributedDataParallel that waits for the garbage collector keeps gloo's threads alive until the process
        # ends, and a thread that lets go of a tensor then aborts it: 2 of 25 runs did, on the rank that is done first.
        gc.collect()
        dist.destroy_process_group()


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


def wrap(model: nn.Module, world: World, shape: tuple[int, int, int], config: Config) -> nn.Module:
    """`model` as the mode calls for it: as it is, inside DataParallel or DistributedDataParallel, or sharded.

    `shape` is that of one input image (channels, height, width).
    """
    if config.sync_bn:
        model = nn.SyncBatchNorm.convert_sync_batchnorm(model)
    ids = [device.index for device in world.devices if device.type == "cuda"] or None
    if world.mode == "dp":
        return nn.DataParallel(model, device_ids=ids)
    if world.mode == "ddp":
        # torch 2.13 warns of the word, and says to keep it where buffers shall be left alone.
        buffers: dict[str, Any] = {} if config.broadcast_buffers else {"broadcast_buffers": False}
        ranked = DistributedDataParallel(model, ids, find_unused_parameters=config.find_unused_parameters, **buffers)
        return settled(ranked, torch.zeros(1, *shape, device=world.device))
    if world.mode == "fsdp":
        from train import fsdp

        return fsdp.sharded(model, world)
    return model


def share_buffers(model: nn.Module, world: World) -> None:
    """Gives rank 0's batch-norm statistics to all ranks; DistributedDataParallel may have done so before the last pass."""
    if world.size > 1 or world.mode == "fsdp":
        firsts = world.from_first(lambda: [buffer.cpu() for buffer in model.buffers()])
        for buffer, first in zip(model.buffers(), firsts, strict=True):
            buffer.copy_(first)


def local(tensor: Tensor) -> Tensor:
    """This rank's part of a tensor that FSDP2 cut, and any other tensor as it is."""
    part: Tensor = tensor.to_local() if hasattr(tensor, "to_local") else tensor
    return part


def settled(model: DistributedDataParallel, image: Tensor) -> DistributedDataParallel:
    """`model` after one backward pass that changes nothing.

    DistributedDataParallel groups gradients anew after its first one, and with three ranks or more the grouping decides
    in which order gloo adds up: without this, the first step after a resume would round differently from the same
    step of a run that never stopped.
    """
    model.eval()
    torch.autograd.backward(model(image).sum())
    model.zero_grad(set_to_none=True)
    return model


def no_sync(model: nn.Module) -> AbstractContextManager[None]:
    """Inside, DistributedDataParallel leaves gradients on their rank: for all passes of a batch but the last."""
    inner = getattr(model, "_orig_mod", model)  # under torch.compile
    return inner.no_sync() if isinstance(inner, DistributedDataParallel) else nullcontext()


class Stop:
    """Ctrl-C, SIGTERM or SIGHUP, remembered until the step is done; a second Ctrl-C is a KeyboardInterrupt.

    `agreed` is the signal's number, 0 while there was none. What is ignored stays so: under `nohup python -m train` SIGHUP
    is, and under `nohup torchrun` torchrun hears it all the same, and hands it on.
    """

    def __init__(self, world: World) -> None:
        self.world, self.signal = world, 0

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

    def agreed(self) -> int:
        """The largest signal number over all ranks: they stop after the same step or not at all."""
        if self.world.size == 1:
            return self.signal
        heard = torch.tensor(self.signal)
        dist.all_reduce(heard, dist.ReduceOp.MAX, group=self.world.control)
        return int(heard)
