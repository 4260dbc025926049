"""The training loop, to be read once from top to bottom, and copied.

`train` is the whole story: join the other processes, build the data, the network and its optimizer, go on from a
checkpoint if there is one, then epoch by epoch train, evaluate, save. What a first reading can skip lies beside it:
config.py (options, and what a resumed run may change), models.py, data.py, wrap.py (what stands around a network),
parallel.py (processes, signals), checkpoint.py (files), metrics.py (records).
"""

import math
import signal
import time
from contextlib import nullcontext
from pathlib import Path
from typing import Any, cast

import torch
import torch.nn.functional as F
from click import UsageError
from torch import Tensor, nn
from torch.nn.utils import clip_grad_norm_

from train import checkpoint, data, models, parallel, wrap
from train.config import Config, changed, continued, measuring
from train.metrics import Log, header, parameters
from train.parallel import Stop, World


class Run:
    """All that training works with. `epoch` counts whole epochs, `step` the steps done in the one under way."""

    def __init__(self, config: Config, world: World, log: Log) -> None:
        self.config, self.world = config, world
        with world.together():  # what is wrong on one rank ends the run on all
            train_set, test_set = data.load(config.data, config.data_dir, shape=config.shape, samples=config.samples)
            data.seed("weights", config.seed)  # the same in all: DistributedDataParallel would see to it, FSDP2 not
            self.network, fit = models.build_for(config, train_set)  # its names are in every file
            data.check_shares(self.network, len(train_set), config, world)
            if config.init_from:
                log.say(checkpoint.load_weights(self.network, config.init_from, config))
        self.train = data.Batches(train_set, fit, config, world, train=True)
        self.test = data.Batches(test_set, fit, config, world, train=False)
        image = self.train[0, 0][0][:1].to(world.device)  # of epoch 0, step 0, for a trial pass: wrap.settled
        wrapped = wrap.wrap(self.network.to(world.device), image, config, world)
        self.model = cast(nn.Module, torch.compile(wrapped)) if config.compile else wrapped  # what is called
        self.optimizer = models.optimizer(self.network, config)
        self.scaler = torch.amp.GradScaler(world.device.type, enabled=config.amp == "fp16")
        kind = {"off": None, "bf16": torch.bfloat16, "fp16": torch.float16}[config.amp]
        self.precision = torch.autocast(world.device.type, kind) if kind else nullcontext()
        self.average = {name: tensor.clone() for name, tensor in wrap.floats(self.network).items() if config.ema}
        # Summed over the steps of the epoch under way, of this rank's shares.
        self.loss = torch.zeros((), dtype=torch.float64, device=world.device)
        self.epoch, self.step, self.seconds = 0, 0, 0.0  # seconds of training, in the epoch under way

    @property
    def done(self) -> int:
        """Steps, from the run's first."""
        return self.epoch * len(self.train) + self.step


def train(config: Config, given: frozenset[str] = frozenset()) -> int:
    """Trains as `config` says; `given` names the options that the user spelled out, see `continued`.

    Returns the exit code: 0; 1 where the loss was no longer finite; or 128 + the number of the signal that stopped the run
    (130 Ctrl-C, 143 SIGTERM).
    Raises click.UsageError, with one sentence, where the run cannot be what it was asked to be.
    """
    with parallel.joined(config) as world, checkpoint.owned(config.out, world):
        saved = checkpoint.opened(config, world)
        config = continued(config, saved["config"], given) if saved else config
        log = Log(config, world)
        run = Run(config, parallel.placed(world, config), log)
        if saved:
            restore(run, saved, log)
        try:
            with Stop(world, config) as stop:
                code = train_epochs(run, log, stop)
        finally:
            run.train.loader = run.test.loader = None  # workers end at once: at the exit, Python waits five seconds for each
        log.end()
        return code


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
        if run.step == len(run.train):
            log.add(finish_epoch(run))
        save(run, log)
        if number := stop.agreed():
            log.say(f"stopped by {signal.Signals(number).name}, saved; --resume latest goes on from there")
            return 128 + number
    return 0


def train_epoch(run: Run, log: Log, stop: Stop) -> None:
    """Trains from `run.step` to the end of the epoch, or until the run is to be saved, or a printed loss is not finite."""
    began, first, every, loss = time.perf_counter(), run.step, run.config.log_every, 0.0
    run.model.train()
    for images, labels in run.train.of(run.epoch, first):  # without the steps that a resumed epoch has behind it
        train_step(run, images, labels)
        run.step += 1
        if every and run.step % every == 0:
            loss, pace = mean_loss(run), (time.perf_counter() - began) / (run.step - first)
            count = f"epoch {run.epoch + 1:3d}/{run.config.epochs}  step {run.step}/{len(run.train)}"
            log.say(f"{count}  loss {loss:.4f}  {pace:.3f} s a step")
        if stop.due(run.done) or not math.isfinite(loss):
            break
    if run.world.device.type == "cuda":
        torch.cuda.synchronize(run.world.device)  # the steps are queued: the clock waits until they are done
    run.seconds += time.perf_counter() - began


def train_step(run: Run, images: Tensor, labels: Tensor) -> None:
    """One optimizer step on this rank's share of a batch, in `--grad-accum` passes."""
    if ":" in run.config.model:  # one's own may draw, as dropout does; ours do not
        data.seed("step", run.config.seed, run.world.rank, run.done, devices=run.world.devices)
    for group in run.optimizer.param_groups:
        group["lr"] = models.rate(run.config, run.done, len(run.train))
    passes = run.config.grad_accum
    images, labels = (each.to(run.world.device, non_blocking=True) for each in (images, labels))
    parts = zip(images.chunk(passes), labels.chunk(passes), strict=True) if passes > 1 else [(images, labels)]
    for number, (some_images, some_labels) in enumerate(parts, start=1):
        if passes > 1:
            wrap.sync_gradients(run.model, number == passes)  # only the last backward exchanges them
        loss = F.cross_entropy(forward(run, some_images), some_labels)
        loss = loss / passes if passes > 1 else loss
        run.scaler.scale(loss).backward()
        run.loss += loss.detach()
    if run.config.clip_norm:
        run.scaler.unscale_(run.optimizer)
        clip_grad_norm_(run.network.parameters(), run.config.clip_norm)
    run.scaler.step(run.optimizer)
    run.scaler.update()
    run.optimizer.zero_grad()
    if run.average:
        for mean, weight in zip(run.average.values(), wrap.floats(run.network).values(), strict=True):
            wrap.local(mean).lerp_(wrap.local(weight), 1 - run.config.ema)


def forward(run: Run, images: Tensor) -> Any:
    """The logits, in float32."""
    with run.precision:
        return run.model(images).float()


def mean_loss(run: Run) -> float:
    """Of the steps of the epoch under way, over all ranks."""
    return run.world.sum(run.loss).item() / (run.world.size * run.step)


@torch.no_grad()
def evaluate(run: Run) -> Any:
    """Mean loss and accuracy (0 to 1) over the test images, each counted once, whatever the number of ranks."""
    wrap.copy_from_rank_0(run.network.buffers(), run.world)  # each rank has statistics of its own: rank 0's are saved
    run.model.eval()
    totals = torch.zeros(2, dtype=torch.float64, device=run.world.device)
    for images, labels in run.test.of(0):
        logits, labels = forward(run, images.to(run.world.device, non_blocking=True)), labels.to(run.world.device)
        totals[0] += F.cross_entropy(logits, labels, reduction="sum")
        totals[1] += (logits.argmax(1) == labels).sum()
    return (run.world.sum(totals) / run.test.total).tolist()


def finite(run: Run) -> bool:
    """Whether the losses of this epoch and the weights after it are, on every rank: what is not shall not be saved."""
    own = [run.loss, *map(wrap.local, wrap.floats(run.network).values())]
    return not run.world.largest(int(any(not tensor.isfinite().all() for tensor in own)))


def finish_epoch(run: Run) -> dict[str, Any]:
    """Counts the epoch as done and evaluates it. Returns its line of metrics.jsonl."""
    loss, (test_loss, accuracy), seconds = mean_loss(run), evaluate(run), run.seconds
    run.epoch, run.step, run.seconds = run.epoch + 1, 0, 0.0
    run.loss.zero_()
    return {
        "epoch": run.epoch, "loss": loss, "test_loss": test_loss, "test_accuracy": accuracy,
        "lr": models.rate(run.config, run.done, len(run.train)),
        "seconds": seconds, "samples_per_second": len(run.train) * run.config.batch_size / seconds,
    }  # fmt: skip


def save(run: Run, log: Log) -> None:
    """Writes a checkpoint: plain data and tensors, so that it loads anywhere; under fsdp each rank has its part of them."""
    wrap.copy_from_rank_0([*run.network.buffers(), *run.average.values()], run.world)
    model = run.model if run.config.save == "wrapped" else run.network
    state = {
        "model": model.state_dict(), "optimizer": run.optimizer.state_dict(), "scaler": run.scaler.state_dict(),
        "epoch": run.epoch, "step": run.step, "totals": [run.world.sum(run.loss).item() / run.world.size],
        "seconds": run.seconds, "config": run.config.plain(), "metrics": log.rows, "torch": str(torch.__version__),
    }  # fmt: skip
    if run.average:
        state["ema"] = run.network.state_dict() | run.average
    best = max(log.rows, key=lambda row: row["test_accuracy"], default={"epoch": 0})["epoch"]
    checkpoint.write(run, state, best)


def restore(run: Run, saved: dict[str, Any], log: Log) -> None:
    """Puts a checkpoint into a run, whichever mode made it. Raises UsageError where its parts do not fit."""
    with run.world.together():
        checkpoint.put_into(run, saved)
        log.rows = saved["metrics"]
    log.say(f"resumed from step {run.done}: {run.epoch} epochs and {run.step} steps are done")
    for name, value in map(changed, run.config.change):
        log.say(f"changed: {name} {saved['config'].get(name)} -> {value}")


def measure(config: Config, path: Path, given: frozenset[str]) -> int:
    """`--evaluate`: the accuracy of a checkpoint of any mode and container on the test images, in one process.

    Network and images are those of the run that wrote it; for a file of another's making those of the command line.
    """
    if parallel.launched():
        raise UsageError("--evaluate runs in one process: leave torchrun out.")
    path = checkpoint.meant(path)
    config = measuring(config, checkpoint.described(path)[1], given)
    with parallel.joined(config) as world:
        log = Log(config, world)
        run = Run(config, parallel.placed(world, config), log)
    checkpoint.load_weights(run.network, path, config)
    loss, accuracy = evaluate(run)
    images = f"{run.test.total} test images of {config.data}, on {run.world.device}"
    log.say(f"{path}: {config.model}, {parameters(run.network):,} parameters; {images}")
    log.say(f"test loss {loss:.4f}  test accuracy {accuracy:.2%}")
    return 0
