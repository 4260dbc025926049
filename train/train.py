"""The training loop, to be read once from top to bottom.

`train` is the whole story: join the other processes, build the data, the network and its optimizer, go on from a
checkpoint if there is one, then epoch by epoch train, evaluate, save. The parts that a first reading can skip lie
beside it: models.py, data.py, parallel.py (processes and devices), checkpoint.py (files), metrics.py (records).
"""

import math
import signal
import time
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, cast

import click
import torch
import torch.nn.functional as F
from click import UsageError
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim.lr_scheduler import LambdaLR

from ckpt_tools.errors import CkptError
from ckpt_tools.torch import load_into, unwrap
from train import checkpoint, data, folder, metrics, models, parallel
from train.config import Config, one_line, refuse
from train.metrics import Log
from train.parallel import Stop, World

AMP = {"off": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}


@dataclass
class Run:
    """All that training works with. `epoch` counts whole epochs, `step` the steps done in the one under way."""

    config: Config
    world: World
    raw: nn.Module  # the network itself
    model: nn.Module  # the network as it is called: wrapped, compiled, or `raw` again
    optimizer: torch.optim.Optimizer
    scheduler: LambdaLR
    scaler: torch.amp.GradScaler
    train: data.Split
    test: data.Split
    totals: Tensor  # of the epoch under way on this rank, see `forward`
    epoch: int = 0
    step: int = 0
    seconds: float = 0.0  # of training, in the epoch under way


def train(config: Config, given: frozenset[str] = frozenset()) -> int:
    """Trains as `config` says; `given` names the options that the user spelled out, see `Config.continued`.

    Returns the exit code: 0; 1 where the loss was no longer finite; or 128 + the number of the signal that stopped the run
    (130 Ctrl-C, 143 SIGTERM).
    Raises click.UsageError, with one sentence, where the run cannot be what it was asked to be.
    """
    if config.evaluate:
        return measure(config, config.evaluate, given)
    if config.resume is None or "parallel" in given:
        parallel.check_start(config)  # before anybody is waited for; otherwise the checkpoint says the mode
    with parallel.joined(config) as world, folder.owned(config.out, world):
        reading = world.on_all if config.read == "all" else world.from_first
        saved = reading(lambda: opened(config, world))
        config = config.continued(saved["config"], given) if saved else config
        run = prepare(config, parallel.placed(world, config))
        if saved:
            world.on_all(lambda: restore(run, saved))
        rows = world.from_first(lambda: metrics.read(config.out / "metrics.jsonl"))
        with Stop(world) as stop, Log(config, run.epoch, rows, silent=world.rank > 0) as log:
            return train_epochs(run, log, stop)


def measure(config: Config, path: Path, given: frozenset[str]) -> int:
    """`--evaluate`: the accuracy of a checkpoint of any mode and container on the test images, in one process.

    Network and images are those of the run that wrote it; for a file of another's making those of the command line.
    Raises UsageError where it does not fit the network.
    """
    path = folder.meant(path)
    where, saved = checkpoint.described(path)
    config = config.measuring(saved, given)
    with parallel.joined(config) as world:
        run = prepare(config, parallel.placed(world, config))
    try:
        load_into(run.raw, path, select=where)
    except CkptError as error:
        tried = "" if saved else f"\nIt does not say its network, which --model names: {config.model} was tried."
        raise UsageError(f"--evaluate {path}: {error}{tried}") from error
    loss, accuracy = evaluate(run)
    images = f"{len(run.test.images)} test images of {config.data}"
    click.echo(f"{path}: {config.model}, {parameters(run):,} parameters; {images}, on {run.world.device}")
    click.echo(f"test loss {loss:.4f}  test accuracy {accuracy:.2%}")
    return 0


def opened(config: Config, world: World) -> dict[str, Any] | None:
    """The checkpoint that the run goes on from; None for a new run, which needs a folder without checkpoints."""
    there = bool(folder.checkpoints(config.out))
    if config.resume == "latest" or (config.resume == "auto" and there):
        return checkpoint.newest(config.out, partial(click.echo, err=True) if world.rank == 0 else lambda line: None)
    if config.resume not in (None, "auto"):
        folder.refuse_another_run(Path(config.resume), config.out)
        return checkpoint.read(Path(config.resume))
    refuse(there, f"{config.out} holds checkpoints: go on from them with --resume latest, or choose another --out")
    return None


def prepare(config: Config, world: World) -> Run:
    """Data, network, optimizer: everything before the first step."""
    parallel.check_division(config, world)
    source = partial(data.load, config.data, config.data_dir, shape=config.shape, samples=config.samples)
    train_set, test_set = world.on_all(source)
    train_set.fit = test_set.fit = models.input_shape(config.model, train_set.fit)
    train_set.darkest = test_set.darkest = models.NETWORKS[config.model].darkest
    train_split = data.split(train_set, config, world, shuffle=True)
    test_split = data.split(test_set, config, world, shuffle=False)

    checkpoint.seed_everything(config.seed)  # the same weights in all: DistributedDataParallel would see to it, FSDP2 not
    network = models.build(config.model, train_set.fit[0], data.CLASSES, width=config.width, hidden=config.hidden)
    data.refuse_lone_samples(network, len(train_set), config, world)
    checkpoint.seed_everything(config.seed + world.rank)
    model = parallel.wrap(network.to(world.device), world, train_set.fit, config)
    raw = model.module if isinstance(model, nn.DataParallel | DistributedDataParallel) else model
    called = cast(nn.Module, torch.compile(model)) if config.compile else model

    optimizer = torch.optim.SGD(raw.parameters(), lr=config.learning_rate, momentum=config.momentum)
    scheduler = LambdaLR(optimizer, schedule(config, len(train_split.loader)))
    scaler = torch.amp.GradScaler(world.device.type, enabled=config.amp == "fp16")
    totals = torch.zeros(3, dtype=torch.float64, device=world.device)
    return Run(config, world, raw, called, optimizer, scheduler, scaler, train_split, test_split, totals)


def schedule(config: Config, steps: int) -> Callable[[int], float]:
    """The factor on the learning rate after so many steps, `steps` of them an epoch."""
    if config.schedule == "constant":
        return lambda done: 1.0
    return lambda done: (1 + math.cos(math.pi * min(1.0, done / max(1, config.epochs * steps)))) / 2


def train_epochs(run: Run, log: Log, stop: Stop) -> int:
    """Trains until `--epochs` or a signal, with a checkpoint after every epoch. Returns the exit code."""
    log.say(header(run))
    if run.config.epochs == 0:
        save(run)
    elif run.epoch >= run.config.epochs:
        log.say(f"nothing to do: {run.epoch} epochs are done; --epochs {run.epoch + 1} would go on")
    while run.epoch < run.config.epochs:
        train_epoch(run, log, stop)
        if not finite(run):
            log.say(f"the loss is not finite, {run.step} steps into epoch {run.epoch + 1}: stopped, without saving it")
            return 1
        if run.step == len(run.train.loader):
            log.add(finish_epoch(run))
        save(run)
        if number := stop.agreed():
            log.say(f"stopped by {signal.Signals(number).name}, saved; --resume latest goes on from there")
            return 128 + number
    return 0


def header(run: Run) -> str:
    """What trains where: network, parameters, ranks and devices, and how much of a batch each has."""
    size, devices = run.config.batch_size, ", ".join(str(device) for device in run.world.devices)
    share = size // (run.world.size * len(run.world.devices))
    where = f"{run.world.size} ranks, this one on {devices}" if run.world.size > 1 else devices
    return (
        f"{run.config.model}, {parameters(run):,} parameters; {run.world.mode} on {where}; batches of {size}, {share} on each"
    )


def parameters(run: Run) -> int:
    """How many numbers are trained."""
    return sum(parameter.numel() for parameter in run.raw.parameters())


def train_epoch(run: Run, log: Log, stop: Stop) -> None:
    """Trains from `run.step` to the end of the epoch, or to the end of the step in which a signal came."""
    began, first = time.perf_counter(), run.step
    run.train.batches.begin(run.epoch, run.step)  # without the steps that a resumed epoch has behind it
    run.model.train()
    for images, labels in log.shown(run.train.loader, len(run.train.loader) - run.step):
        run.totals += train_step(run, images, labels)
        run.step += 1
        told = run.config.log_every and run.step % run.config.log_every == 0
        if told and not report_step(run, log, (time.perf_counter() - began) / (run.step - first)):
            break
        if stop.agreed():
            break
    if run.world.device.type == "cuda":
        torch.cuda.synchronize(run.world.device)  # the steps are queued: the clock waits until they are done
    run.seconds += time.perf_counter() - began


def report_step(run: Run, log: Log, seconds: float) -> bool:
    """The line of `--log-every`, with what a step took. Returns whether the loss is still finite."""
    loss, _, samples = run.world.sum(run.totals).tolist()
    epoch, step = f"epoch {run.epoch + 1:3d}/{run.config.epochs}", f"step {run.step}/{len(run.train.loader)}"
    log.say(f"{epoch}  {step}  loss {loss / samples:.4f}  {seconds:.3f} s a step")
    return math.isfinite(loss)


def train_step(run: Run, images: Tensor, labels: Tensor) -> Tensor:
    """One optimizer step on this rank's share of a global batch, in `--grad-accum` passes. Returns its `totals`."""
    config, world = run.config, run.world
    real, size = data.real_samples(run.step, len(labels), len(run.train.images), config, world)
    shares = [part.to(world.device, non_blocking=True).chunk(config.grad_accum) for part in (images, labels, real)]
    passes = list(zip(*shares, strict=True))
    totals = torch.zeros_like(run.totals)
    for number, share in enumerate(passes, start=1):
        with parallel.no_sync(run.model) if number < len(passes) else nullcontext():
            loss, counts = forward(run, *share)
            # A mean over all real samples of the batch: DistributedDataParallel divides by the number of ranks.
            torch.autograd.backward(run.scaler.scale(loss * world.size / size))
        totals += counts
    update(run)
    return totals


def forward(run: Run, images: Tensor, labels: Tensor, real: Tensor) -> tuple[Tensor, Tensor]:
    """The loss summed over the samples that are `real`; and the totals [loss, right answers, samples], in float64."""
    with torch.autocast(run.world.device.type, AMP[run.config.amp], enabled=run.config.amp != "off"):
        logits = run.model(images)
    losses = F.cross_entropy(logits.float(), labels, reduction="none") * real
    right = (logits.argmax(1) == labels) * real
    return losses.sum(), torch.stack([losses.detach(), right, real]).double().sum(1)


def update(run: Run) -> None:
    """The optimizer's step, and the schedule's unless fp16 gradients overflowed and the scaler left the step out."""
    scale = run.scaler.get_scale()
    run.scaler.step(run.optimizer)
    run.scaler.update()
    run.optimizer.zero_grad(set_to_none=True)
    if run.scaler.get_scale() >= scale:
        run.scheduler.step()


@torch.no_grad()
def evaluate(run: Run) -> tuple[float, float]:
    """Mean loss and accuracy (0 to 1) over the test images, every one counted once, whatever the number of ranks.

    Through the wrapper, since DistributedDataParallel first gives rank 0's batch-norm statistics to every rank: what
    is measured is what is saved.
    """
    parallel.share_buffers(run.raw, run.world)
    run.model.eval()
    totals = torch.zeros_like(run.totals)
    for step, (images, labels) in enumerate(run.test.loader):
        real, _ = data.real_samples(step, len(labels), len(run.test.images), run.config, run.world)
        totals += forward(run, *(part.to(run.world.device, non_blocking=True) for part in (images, labels, real)))[1]
    loss, right, samples = run.world.sum(totals).tolist()
    return loss / samples, right / samples


def finite(run: Run) -> bool:
    """Whether the losses of this epoch and the weights after it are, on every rank: what is not shall not be saved."""
    own = [run.totals, *(parallel.local(parameter) for parameter in run.raw.parameters())]
    strange = sum(not bool(tensor.isfinite().all()) for tensor in own)
    return not run.world.sum(torch.tensor(strange))


def finish_epoch(run: Run) -> dict[str, Any]:
    """Counts the epoch as done and evaluates it. Returns its line of metrics.jsonl."""
    loss, _, samples = run.world.sum(run.totals).tolist()
    test_loss, accuracy = evaluate(run)
    row = {
        "epoch": run.epoch + 1,
        "loss": loss / samples,
        "test_loss": test_loss,
        "test_accuracy": accuracy,
        "lr": run.scheduler.get_last_lr()[0],
        "seconds": run.seconds,
        "samples_per_second": samples / run.seconds,
    }
    run.epoch, run.step, run.seconds = run.epoch + 1, 0, 0.0
    run.totals.zero_()
    return row


def snapshot(run: Run) -> dict[str, Any]:
    """The checkpoint. Plain data and tensors, so that it loads anywhere; under fsdp each rank has its part of the tensors."""
    parallel.share_buffers(run.raw, run.world)
    kept = run.model if run.config.save == "wrapped" else run.raw
    return {
        "model": kept.state_dict(),
        "optimizer": run.optimizer.state_dict(),
        "scheduler": run.scheduler.state_dict(),
        "scaler": run.scaler.state_dict(),
        "epoch": run.epoch,
        "step": run.step,
        "totals": run.world.sum(run.totals).tolist(),
        "seconds": run.seconds,
        "config": run.config.plain(),
        "rng": run.world.gather(checkpoint.random_states(run.world.devices)),
        "torch": str(torch.__version__),
    }


def save(run: Run) -> None:
    """Writes when every rank is there; none goes on, or ends, before the file is whole."""
    state = snapshot(run)
    run.world.barrier()
    checkpoint.write(state, run.raw, run.config, run.world)
    run.world.barrier()


def restore(run: Run, saved: dict[str, Any]) -> None:
    """Puts a checkpoint into a run. Raises UsageError where its parts do not fit the network, the data, or each other."""
    epoch, step, steps = saved["epoch"], saved["step"], len(run.train.loader)
    possible = isinstance(epoch, int) and isinstance(step, int) and epoch >= 0 and 0 <= step < steps
    refuse(not possible, f"cannot resume: epoch {epoch}, step {step} is nowhere in epochs of {steps} steps of these images")
    try:
        put_into(run, saved)
    except (LookupError, TypeError, ValueError, AttributeError, RuntimeError) as error:
        raise UsageError(f"cannot resume: the checkpoint does not fit its own config: {one_line(error)}") from error


def put_into(run: Run, saved: dict[str, Any]) -> None:
    """`restore`, whichever mode made the checkpoint: names are unwrapped, tensors go to this rank's device.

    Under fsdp it keeps its part of each.
    """
    saved = {**saved, "model": unwrap(saved["model"])}
    if run.world.mode == "fsdp":
        from train import fsdp

        saved = fsdp.own_parts(saved, run.raw)
    run.raw.load_state_dict(saved["model"])
    run.optimizer.load_state_dict(saved["optimizer"])
    run.scheduler.load_state_dict(saved["scheduler"])
    run.scaler.load_state_dict(saved["scaler"])
    run.epoch, run.step, run.seconds = saved["epoch"], saved["step"], saved["seconds"]
    if run.world.rank == 0:
        run.totals += torch.tensor(saved["totals"], dtype=torch.float64, device=run.totals.device)
    if run.world.rank < len(saved["rng"]):  # a rank that the earlier run did not have keeps its fresh seed
        checkpoint.set_random_states(saved["rng"][run.world.rank], run.world.devices)
