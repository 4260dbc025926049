"""The four networks, with the layers and the parameter counts of the articles that they come from.

| name       | input                  | parameters at width 1                                      |
|------------|------------------------|------------------------------------------------------------|
| `mlp`      | 1 x 28 x 28            | 101,770                                                    |
| `lenet`    | 1 or 3 x 32 x 32       | 62,006 with 3 channels                                     |
| `cnn`      | 3 x 32 x 32            | 800,940,490 with `hidden=8000`, 604,137,490 with 5000      |
| `resnet18` | any channels, any size | 11,175,818 with 1 channel                                  |

`cnn` has a ReLU after every layer and takes pixels in [-1, 1], as the others do; `cnn-published` is as its article has it,
without ReLUs and on pixels in [0, 1].

`width` multiplies every inner channel count, so that a small machine can train the same shape of network.

`--model MODULE:CALLABLE` names a function or a class without arguments that gives an nn.Module: a batch of samples in,
logits (N, classes) out. It is called on every rank after the seed was set, and trained, wrapped and saved as the four are.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from itertools import pairwise
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from train.config import Config, called, refuse, refusing
from train.data import CLASSES, fitted


def scaled(channels: int, width: float) -> int:
    """`channels * width`, at least 8: with fewer, nothing is learned. Width 1 changes nothing, even below 8."""
    return channels if width == 1 else max(8, round(channels * width))


class MLP(nn.Module):
    """Images (N, 1, 28, 28) to logits (N, classes)."""

    def __init__(self, channels: int, classes: int, width: float) -> None:
        super().__init__()
        inner = scaled(128, width)
        self.fc1 = nn.Linear(channels * 28 * 28, inner)
        self.fc2 = nn.Linear(inner, classes)

    def forward(self, x: Tensor) -> Tensor:
        logits: Tensor = self.fc2(F.relu(self.fc1(x.flatten(1))))
        return logits


class LeNet(nn.Module):
    """Images (N, channels, 32, 32) to logits (N, classes)."""

    def __init__(self, channels: int, classes: int, width: float) -> None:
        super().__init__()
        a, b, c, d = (scaled(n, width) for n in (6, 16, 120, 84))
        self.conv1 = nn.Conv2d(channels, a, 5)
        self.conv2 = nn.Conv2d(a, b, 5)
        self.fc1 = nn.Linear(b * 5 * 5, c)
        self.fc2 = nn.Linear(c, d)
        self.fc3 = nn.Linear(d, classes)

    def forward(self, x: Tensor) -> Tensor:
        x = F.max_pool2d(F.relu(self.conv1(x)), 2)
        x = F.max_pool2d(F.relu(self.conv2(x)), 2)
        x = F.relu(self.fc1(x.flatten(1)))
        logits: Tensor = self.fc3(F.relu(self.fc2(x)))
        return logits


class CNN(nn.Module):
    """Images (N, 3, 32, 32) to logits (N, classes). At width 1 the weights take 3.2 GB, 2.4 GB with hidden=5000."""

    def __init__(self, channels: int, classes: int, width: float, hidden: int, *, published: bool = False) -> None:
        super().__init__()
        self.published = published
        sizes = [channels, *(scaled(n, width) for n in (32, 64, 512, 1024, 2048, 4096))]
        for i, (before, after) in enumerate(pairwise(sizes), start=1):
            self.add_module(f"conv{i}", nn.Conv2d(before, after, 5, padding=2))
        inner, narrow = scaled(hidden, width), scaled(64, width)
        self.fc1 = nn.Linear(sizes[-1] * 4 * 4, inner)
        self.fc2 = nn.Linear(inner, narrow)
        self.fc3 = nn.Linear(narrow, classes)

    def relu(self, x: Tensor) -> Tensor:
        """What follows every layer but the last; nothing as published."""
        return x if self.published else F.relu(x)

    def forward(self, x: Tensor) -> Tensor:
        for i in range(1, 7):
            x = self.relu(self.get_submodule(f"conv{i}")(x))
            x = F.max_pool2d(x, 2) if i in (3, 4, 6) else x
        x = self.relu(self.fc1(x.flatten(1)))
        logits: Tensor = self.fc3(self.relu(self.fc2(x)))
        return logits


class Residual(nn.Module):
    """Two 3x3 convolutions around a shortcut: (N, before, H, W) to (N, after, H / stride, W / stride)."""

    def __init__(self, before: int, after: int, stride: int) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(before, after, 3, padding=1, stride=stride)
        self.conv2 = nn.Conv2d(after, after, 3, padding=1)
        self.conv3 = None if stride == 1 else nn.Conv2d(before, after, 1, stride=stride)
        self.bn1 = nn.BatchNorm2d(after)
        self.bn2 = nn.BatchNorm2d(after)

    def forward(self, x: Tensor) -> Tensor:
        y = self.bn2(self.conv2(F.relu(self.bn1(self.conv1(x)))))
        return F.relu(y + (x if self.conv3 is None else self.conv3(x)))


class ResNet18(nn.Module):
    """Images (N, channels, H, W) to logits (N, classes); a 3x3 stem without max-pool, all convolutions with bias."""

    def __init__(self, channels: int, classes: int, width: float) -> None:
        super().__init__()
        a, b, c, d = (scaled(n, width) for n in (64, 128, 256, 512))
        self.stem = nn.Sequential(nn.Conv2d(channels, a, 3, padding=1), nn.BatchNorm2d(a), nn.ReLU())
        self.block1 = nn.Sequential(Residual(a, a, 1), Residual(a, a, 1))
        self.block2 = nn.Sequential(Residual(a, b, 2), Residual(b, b, 1))
        self.block3 = nn.Sequential(Residual(b, c, 2), Residual(c, c, 1))
        self.block4 = nn.Sequential(Residual(c, d, 2), Residual(d, d, 1))
        self.fc = nn.Linear(d, classes)
        self.apply(normal_weights)

    def forward(self, x: Tensor) -> Tensor:
        x = self.block4(self.block3(self.block2(self.block1(self.stem(x)))))
        logits: Tensor = self.fc(F.adaptive_avg_pool2d(x, 1).flatten(1))
        return logits


def normal_weights(module: nn.Module) -> None:
    """The article's initialisation: N(0, 0.01) for the weights of Linear and Conv."""
    if isinstance(module, nn.Linear | nn.Conv2d):
        nn.init.normal_(module.weight, std=0.01)


@dataclass(frozen=True)
class Network:
    """One row of the table above. `channels` are those it takes; `size` is None where any image size will do; pixels are in
    [`darkest`, 1].
    """

    build: Callable[..., nn.Module]
    channels: tuple[int, ...]
    size: int | None
    darkest: int = -1


NETWORKS = {
    "mlp": Network(MLP, (1,), 28),
    "lenet": Network(LeNet, (1, 3), 32),
    "cnn": Network(CNN, (3,), 32),
    "cnn-published": Network(partial(CNN, published=True), (3,), 32, darkest=0),
    "resnet18": Network(ResNet18, (1, 3), None),
}


def input_shape(name: str, image: tuple[int, int, int]) -> tuple[int, int, int]:
    """What the network takes for images of shape (channels, height, width): their own shape, where it can."""
    network = NETWORKS[name]
    channels = image[0] if image[0] in network.channels else network.channels[-1]
    height, width = (network.size, network.size) if network.size else image[1:]
    return channels, height, width


def build(name: str, channels: int, classes: int = 10, *, width: float = 1.0, hidden: int = 8000) -> nn.Module:
    """The network `name` with fresh weights. `hidden` is the first linear layer of `cnn`: 8000 or 5000 as published."""
    extra = {"hidden": hidden} if name.startswith("cnn") else {}
    return NETWORKS[name].build(channels, classes, width, **extra)


def build_for(config: Config, samples: Any) -> tuple[nn.Module, tuple[int, ...] | None, int]:
    """The network of a run on these samples; the shape that it wants them in, None for their own; its darkest pixel.

    Raises UsageError where it cannot be had, or does not take them.
    """
    first = fitted(torch.as_tensor(samples[0][0]).unsqueeze(0), None)
    if ":" not in config.model:
        refuse(first.dim() != 4, f"{config.model} takes images, and --data {config.data} has none: name a --model of your own")
        fit = input_shape(config.model, (first.shape[1], first.shape[2], first.shape[3]))
        classes = config.classes or len(getattr(samples, "classes", ())) or CLASSES
        network = build(config.model, fit[0], classes, width=config.width, hidden=config.hidden)
        return network, fit, NETWORKS[config.model].darkest
    network = called("--model", config.model)
    refuse(not isinstance(network, nn.Module), f"--model {config.model} returns no nn.Module")
    with refusing(f"--model {config.model} does not take the samples of --data {config.data}", Exception), torch.no_grad():
        shape = network.eval()(first).shape
    refuse(len(shape) != 2, f"--model {config.model} returns {tuple(shape)} for one sample, and not (1, classes)")
    return network, None, -1


def optimizer(network: nn.Module, config: Config) -> torch.optim.Optimizer:
    """What makes the steps."""
    rate, decay = config.learning_rate, config.weight_decay
    if config.optimizer == "adamw":
        return torch.optim.AdamW(network.parameters(), lr=rate, weight_decay=decay)
    return torch.optim.SGD(network.parameters(), lr=rate, momentum=config.momentum, weight_decay=decay)


def schedule(config: Config, steps: int) -> Callable[[int], float]:
    """The factor on the learning rate after so many steps, `steps` of them an epoch."""

    def factor(done: int) -> float:
        rising = min(1.0, (done + 1) / (config.warmup + 1))
        falling = (1 + math.cos(math.pi * min(1.0, done / max(1, config.epochs * steps)))) / 2
        return rising * falling if config.schedule == "cosine" else rising

    return factor
