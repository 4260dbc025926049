"""The training core beside a plain loop over the same network and images: samples a second, epochs in turns."""

import time

import torch
import torch.nn.functional as F

from train import models
from train import train as core
from train.config import Config
from train.data import load
from train.metrics import Log
from train.parallel import Stop, World

TITLE = "training: --model mlp --data synthetic, one process, seconds an epoch"


def plain_epoch(model: torch.nn.Module, optimizer: torch.optim.Optimizer, pixels: torch.Tensor, labels: torch.Tensor) -> float:
    """What everybody writes, on batches of 32 that are cut at once."""
    began, total = time.perf_counter(), 0.0
    for batch in torch.randperm(len(labels)).split(32):
        loss = F.cross_entropy(model(pixels[batch].float() / 127.5 - 1), labels[batch])
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        total += loss.item()
    return time.perf_counter() - began


def compare(rounds: int) -> None:
    """Prints the best of both, and the speed of ours by that of the plain loop."""
    config, world = Config(data="synthetic"), World((torch.device("cpu"),))
    log = Log(config, world)
    run = core.Run(config, world, log)
    samples, _ = load("synthetic")
    model = models.MLP(1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    ours, plain = [], []
    for _ in range(rounds):
        plain.append(plain_epoch(model, optimizer, *samples.tensors))
        core.train_epoch(run, log, Stop(world, config))
        ours.append(run.seconds)
        run.epoch, run.step, run.seconds = run.epoch + 1, 0, 0.0
    one, other = min(ours), min(plain)  # what else the machine does takes time from both, and never gives any
    print(f"ours {one:.3f} s, plain {other:.3f} s: {other / one:.0%} of its speed")
