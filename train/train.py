"""The training loop, to be read once from top to bottom, and copied.

`train` is the whole story: join the other processes, build the data, the network and its optimizer, go on from a
checkpoint if there is one, then epoch by epoch train, evaluate, save. What a first reading can skip lies beside it:
models.py, data.py, wrap.py (what stands around a network), parallel.py (processes, signals), checkpoint.py (files,
and what a resumed run may change), metrics.py (records).
"""

import math
import signal
import time
from contextlib import nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

import click
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.utils import clip_grad_norm_
from torch.optim.lr_scheduler import LambdaLR

from train import checkpoint, data, models, parallel, wrap
from train.config import Config
from train.metrics import Log, header, parameters
from train.parallel import Stop, World

AMP = {"off": None, "bf16": torch.bfloat16, "fp16": torch.float16}


@dataclass
class Run:
    """All that training works with. `epoch` counts whole epochs, `step` the steps done in the one under way."""

    config: Config
    world: World
    network: nn.Module  # the network itself: its names are in every file
    model: nn.Module  # what is called: the network in its wrapper, compiled; the network again where there is neither
    optimizer: torch.optim.Optimizer
    scheduler: LambdaLR
    scaler: torch.amp.GradScaler
    average: wrap.Average
    train: data.Split
    test: data.Split
    loss: Tensor  # in float64, summed over the samples that this rank has had in the epoch under way
    epoch: int = 0
    step: int = 0
    seconds: float = 0.0  # of training, in the epoch under way


def train(config: Config, given: frozenset[str] = frozenset()) -> int:
    """Trains as `config` says; `given` names the options that the user spelled out, see `checkpoint.continued`.

    Returns the exit code: 0; 1 where the loss was no longer finite; or 128 + the number of the signal that stopped the run
    (130 Ctrl-C, 143 SIGTERM).
    Raises click.UsageError, with one sentence, where the run cannot be what it was asked to be.
    """
    if config.evaluate:
        return measure(config, config.evaluate, given)
    if config.resume is None or "parallel" in given:
        parallel.check_start(config)  # before anybody is waited for; otherwise the checkpoint says the mode
    with parallel.joined(config) as world, checkpoint.owned(config.out, world):
        saved = checkpoint.opened(config, world)
        config = checkpoint.continued(config, saved["config"], given) if saved else config
        with Log(config, world) as log:
            run = prepare(config, parallel.placed(world, config), log, new=saved is None)
            if saved:
                restore(run, saved, log)
            log.begin(run.epoch)
            with Stop(world, config) as stop:
                return train_epochs(run, log, stop)


def prepare(config: Config, world: World, log: Log | None = None, *, new: bool = True) -> Run:
    """Data, network, optimizer: everything before the first step."""
    with world.together():  # what is wrong on one rank ends the run on all
        train_set, test_set = data.load(config.data, config.data_dir, shape=config.shape, samples=config.samples)
        checkpoint.seed_everything(config.seed)  # the same weights in all: DistributedDataParallel would see to it, FSDP2 not
        network, fit, darkest = models.build_for(config, train_set)
        data.refuse_lone_samples(network, len(train_set), config, world)
        if config.init_from and new and log:
            log.say(checkpoint.load_weights(network, config))
    train_split = data.split(train_set, fit, darkest, config, world, shuffle=True)
    test_split = data.split(test_set, fit, darkest, config, world, shuffle=False)
    checkpoint.seed_everything(config.seed + world.rank)
    model = wrap.wrap(network.to(world.device), world, train_split.first.to(world.device), config)
    called = cast(nn.Module, torch.compile(model)) if config.compile else model

    optimizer = models.optimizer(network, config)
    scheduler = LambdaLR(optimizer, models.schedule(config, len(train_split.batches)))
    optimizer.register_step_post_hook(lambda *_: scheduler.step())  # not called for a step that fp16 leaves out
    scaler = torch.amp.GradScaler(world.device.type, enabled=config.amp == "fp16")
    average, loss = wrap.Average(network, config.ema), torch.zeros((), dtype=torch.float64, device=world.device)
    return Run(config, world, network, called, optimizer, scheduler, scaler, average, train_split, test_split, loss)


def train_epochs(run: Run, log: Log, stop: Stop) -> int:
    """Trains until `--epochs` or a signal, with a checkpoint after every epoch. Returns the exit code."""
    log.say(header(run.config, run.world, run.network))
    if run.config.epochs == 0:
        save(run, log)
    elif run.epoch >= run.config.epochs:
        log.say(f"nothing to do: {run.epoch} epochs are done; --epochs {run.epoch + 1} would go on")
    while run.epoch < run.config.epochs:
        train_epoch(run, log, stop)  # all of it, or up to where the run is to be saved: the next turn goes on from there
        if not finite(run):
            log.say(f"the loss is not finite, {run.step} steps into epoch {run.epoch + 1}: stopped, without saving it")
            return 1
        if run.step == len(run.train.batches):
            log.add(finish_epoch(run))
        save(run, log)
        if number := stop.agreed():
            log.say(f"stopped by {signal.Signals(number).name}, saved; --resume latest goes on from there")
            return 128 + number
    return 0


def train_epoch(run: Run, log: Log, stop: Stop) -> None:
    """Trains from `run.step` to the end of the epoch, or to the step after which the run is to be saved."""
    began, first, steps = time.perf_counter(), run.step, len(run.train.batches)
    run.train.batches.begin(run.epoch, run.step)  # without the steps that a resumed epoch has behind it
    run.model.train()
    for images, labels in log.shown(run.train.loader, steps - run.step):
        train_step(run, images, labels)
        run.step += 1
        if run.config.log_every and run.step % run.config.log_every == 0:
            loss = mean_loss(run)
            log.step(run.epoch, run.step, steps, loss, (time.perf_counter() - began) / (run.step - first))
            if not math.isfinite(loss):
                break
        if stop.due(run.epoch * steps + run.step):
            break
    if run.world.device.type == "cuda":
        torch.cuda.synchronize(run.world.device)  # the steps are queued: the clock waits until they are done
    run.seconds += time.perf_counter() - began


def train_step(run: Run, images: Tensor, labels: Tensor) -> None:
    """One optimizer step on this rank's share of a batch, in `--grad-accum` passes."""
    size, passes = run.train.batches.size(run.step), run.train.batches.passes(run.step)
    images, labels = (each.to(run.world.device, non_blocking=True) for each in (images, labels))
    parts = zip(images.tensor_split(passes), labels.tensor_split(passes), strict=True) if passes > 1 else [(images, labels)]
    for number, (some_images, some_labels) in enumerate(parts, start=1):
        with wrap.no_sync(run.model) if number < passes else nullcontext():
            loss = F.cross_entropy(forward(run, some_images), some_labels, reduction="sum")
            # The mean over the whole batch: the sum of this share, by the size of the batch; and times the number of ranks,
            # by which DistributedDataParallel and FSDP2 divide. So ranks may have shares of different sizes.
            torch.autograd.backward(run.scaler.scale(loss), loss.new_full((), run.world.size / size))
        run.loss += loss.detach()
    if run.config.clip_norm:
        run.scaler.unscale_(run.optimizer)
        clip_grad_norm_(run.network.parameters(), run.config.clip_norm)
    run.scaler.step(run.optimizer)  # and the schedule, see `prepare`
    run.scaler.update()
    run.optimizer.zero_grad(set_to_none=True)
    run.average.update(run.network)


def forward(run: Run, images: Tensor) -> Tensor:
    """The logits, in float32."""
    with torch.autocast(run.world.device.type, kind) if (kind := AMP[run.config.amp]) else nullcontext():
        logits: Tensor = run.model(images)
    return logits.float()


def mean_loss(run: Run) -> float:
    """Of the samples that all ranks have had in the epoch under way."""
    return run.world.sum(run.loss).item() / min(run.step * run.config.batch_size, run.train.batches.total)


@torch.no_grad()
def evaluate(run: Run) -> tuple[float, float]:
    """Mean loss and accuracy (0 to 1) over the test images, each counted once, whatever the number of ranks."""
    wrap.share_buffers(run.network.buffers(), run.world)  # what is measured is what is saved
    run.model.eval()
    totals = torch.zeros(2, dtype=torch.float64, device=run.world.device)
    for images, labels in run.test.loader:
        logits, labels = forward(run, images.to(run.world.device, non_blocking=True)), labels.to(run.world.device)
        totals[0] += F.cross_entropy(logits, labels, reduction="sum")
        totals[1] += (logits.argmax(1) == labels).sum()
    loss, right = (run.world.sum(totals) / run.test.batches.total).tolist()
    return loss, right


def finite(run: Run) -> bool:
    """Whether the losses of this epoch and the weights after it are, on every rank: what is not shall not be saved."""
    own = [run.loss, *(wrap.local(parameter) for parameter in run.network.parameters())]
    return not run.world.largest(int(any(not tensor.isfinite().all() for tensor in own)))


def finish_epoch(run: Run) -> dict[str, Any]:
    """Counts the epoch as done and evaluates it. Returns its line of metrics.jsonl."""
    loss, (test_loss, accuracy), samples = mean_loss(run), evaluate(run), run.train.batches.total
    row = {
        "epoch": run.epoch + 1, "loss": loss, "test_loss": test_loss, "test_accuracy": accuracy,
        "lr": run.scheduler.get_last_lr()[0], "seconds": run.seconds, "samples_per_second": samples / run.seconds,
    }  # fmt: skip
    run.epoch, run.step, run.seconds = run.epoch + 1, 0, 0.0
    run.loss.zero_()
    return row


def save(run: Run, log: Log) -> None:
    """Writes a checkpoint: plain data and tensors, so that it loads anywhere; under fsdp each rank has its part of them.

    None goes on, or ends, before the file is whole.
    """
    wrap.share_buffers([*run.network.buffers(), *run.average.weights.values()], run.world)
    model = run.model if run.config.save == "wrapped" else run.network
    state = {
        "model": model.state_dict(), "optimizer": run.optimizer.state_dict(), "scheduler": run.scheduler.state_dict(),
        "scaler": run.scaler.state_dict(), "epoch": run.epoch, "step": run.step,
        "totals": [run.world.sum(run.loss).item()], "seconds": run.seconds, "config": run.config.plain(),
        "rng": run.world.gather(checkpoint.random_states(run.world.devices)), "torch": str(torch.__version__),
    }  # fmt: skip
    state |= {"ema": run.average.weights} if run.average.weights else {}
    weights = {"plain": run.network, "wrapped": run.model, "none": None}[run.config.weights]
    run.world.barrier()
    checkpoint.write(state, run.network, weights, run.config, run.world, log.best)
    run.world.barrier()


def restore(run: Run, saved: dict[str, Any], log: Log) -> None:
    """Puts a checkpoint into a run, whichever mode made it. Raises UsageError where its parts do not fit."""
    with run.world.together():
        checkpoint.put_into(run, saved)
    done = run.epoch * len(run.train.batches) + run.step
    log.say(f"resumed from step {done}: {run.epoch} epochs and {run.step} steps are done")
    for line in checkpoint.changes(run.config, saved["config"]):
        log.say(line)


def measure(config: Config, path: Path, given: frozenset[str]) -> int:
    """`--evaluate`: the accuracy of a checkpoint of any mode and container on the test images, in one process.

    Network and images are those of the run that wrote it; for a file of another's making those of the command line.
    """
    path = checkpoint.meant(path)
    where, saved = checkpoint.described(path)
    config = checkpoint.measuring(config, saved, given)
    with parallel.joined(config) as world:
        run = prepare(config, parallel.placed(world, config))
    checkpoint.load_measured(run.network, path, where, config, named=bool(saved))
    loss, accuracy = evaluate(run)
    images = f"{run.test.batches.total} test images of {config.data}"
    click.echo(f"{path}: {config.model}, {parameters(run.network):,} parameters; {images}, on {run.world.device}")
    click.echo(f"test loss {loss:.4f}  test accuracy {accuracy:.2%}")
    return 0
