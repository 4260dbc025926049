"""The four networks, with the layers and the parameter counts of the articles that they come from.

| name       | input                  | parameters at width 1                                      |
|------------|------------------------|------------------------------------------------------------|
| `mlp`      | 1 x 28 x 28            | 101,770                                                    |
| `lenet`    | 1 or 3 x 32 x 32       | 62,006 with 3 channels                                     |
| `cnn`      | 3 x 32 x 32            | 800,940,490, 604,137,490 with `hidden=5000`                |
| `resnet18` | any channels, any size | 11,175,818 with 1 channel                                  |

`cnn` has a ReLU after every layer and takes pixels in [-1, 1], as the others do; `cnn-published` is as its article has it,
without ReLUs and on pixels in [0, 1].

`width` multiplies every inner channel count, so that a small machine can train the same shape of network.

`--model MODULE:CALLABLE` names a function or a class without arguments that gives an nn.Module: a batch of samples in,
logits (N, classes) out. It is called on every rank after the seed was set, and trained, wrapped and saved as the four are.
"""

import math
from collections import OrderedDict
from collections.abc import Callable
from functools import partial
from itertools import pairwise
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from train.config import Config, called, refuse
from train.data import CLASSES, fitted


def scaled(width: float, *channels: int) -> list[int]:
    """`channels` times `width`, each at least 8: with fewer, nothing is learned. Width 1 changes nothing, even below 8."""
    return [each if width == 1 else max(8, round(each * width)) for each in channels]


class Network(nn.Sequential):
    """Layers by name, one after the other; and the images that they take."""

    channels: tuple[int, ...] = (1, 3)
    size: int | None = 32  # None: any
    darkest = -1  # pixels are from there to 1

    def __init__(self, **layers: nn.Module) -> None:
        super().__init__(OrderedDict(layers))


class MLP(Network):
    """Images (N, 1, 28, 28) to logits (N, classes)."""

    channels, size = (1,), 28

    def __init__(self, channels: int, classes: int = 10, width: float = 1.0) -> None:
        (inner,) = scaled(width, 128)
        layers = {"fc1": nn.Linear(channels * 28 * 28, inner), "relu": nn.ReLU(), "fc2": nn.Linear(inner, classes)}
        super().__init__(flat=nn.Flatten(), **layers)


class LeNet(Network):
    """Images (N, channels, 32, 32) to logits (N, classes)."""

    def __init__(self, channels: int, classes: int = 10, width: float = 1.0) -> None:
        a, b, c, d = scaled(width, 6, 16, 120, 84)
        super().__init__(
            conv1=nn.Conv2d(channels, a, 5), relu1=nn.ReLU(), pool1=nn.MaxPool2d(2),
            conv2=nn.Conv2d(a, b, 5), relu2=nn.ReLU(), pool2=nn.MaxPool2d(2), flat=nn.Flatten(),
            fc1=nn.Linear(b * 5 * 5, c), relu3=nn.ReLU(),
            fc2=nn.Linear(c, d), relu4=nn.ReLU(),
            fc3=nn.Linear(d, classes),
        )  # fmt: skip


class CNN(Network):
    """Images (N, 3, 32, 32) to logits (N, classes). At width 1 the weights take 3.2 GB, 2.4 GB with hidden=5000."""

    channels = (3,)
    between: type[nn.Module] = nn.ReLU

    def __init__(self, channels: int, classes: int = 10, width: float = 1.0, hidden: int = 8000) -> None:
        sizes = [channels, *scaled(width, 32, 64, 512, 1024, 2048, 4096)]
        layers: dict[str, nn.Module] = {}
        for i, (before, after) in enumerate(pairwise(sizes), start=1):
            layers |= {f"conv{i}": nn.Conv2d(before, after, 5, padding=2), f"relu{i}": self.between()}
            layers |= {f"pool{i}": nn.MaxPool2d(2)} if i in (3, 4, 6) else {}
        inner, narrow = scaled(width, hidden, 64)
        super().__init__(
            **layers, flat=nn.Flatten(),
            fc1=nn.Linear(sizes[-1] * 4 * 4, inner), relu7=self.between(),
            fc2=nn.Linear(inner, narrow), relu8=self.between(),
            fc3=nn.Linear(narrow, classes),
        )  # fmt: skip


class PublishedCNN(CNN):
    """As the article has it: without ReLUs, on pixels of 0 to 1."""

    between, darkest = nn.Identity, 0


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


class ResNet18(Network):
    """Images (N, channels, H, W) to logits (N, classes); a 3x3 stem without max-pool, all convolutions with bias."""

    size = None

    def __init__(self, channels: int, classes: int = 10, width: float = 1.0) -> None:
        a, b, c, d = scaled(width, 64, 128, 256, 512)
        super().__init__(
            stem=nn.Sequential(nn.Conv2d(channels, a, 3, padding=1), nn.BatchNorm2d(a), nn.ReLU()),
            block1=nn.Sequential(Residual(a, a, 1), Residual(a, a, 1)),
            block2=nn.Sequential(Residual(a, b, 2), Residual(b, b, 1)),
            block3=nn.Sequential(Residual(b, c, 2), Residual(c, c, 1)),
            block4=nn.Sequential(Residual(c, d, 2), Residual(d, d, 1)),
            pool=nn.AdaptiveAvgPool2d(1), flat=nn.Flatten(), fc=nn.Linear(d, classes),
        )  # fmt: skip
        for module in self.modules():
            if isinstance(module, nn.Linear | nn.Conv2d):  # the article's weights
                nn.init.normal_(module.weight, std=0.01)


NETWORKS: dict[str, Any] = {"mlp": MLP, "lenet": LeNet, "cnn": CNN, "cnn-published": PublishedCNN, "resnet18": ResNet18}


def build_for(config: Config, samples: Any) -> tuple[nn.Module, Callable[[Tensor], Tensor]]:
    """The network of a run on these samples, and what makes them as it wants them.

    Raises UsageError where it cannot be had, or does not take them.
    """
    if ":" in config.model:
        return called("--model", config.model), fitted
    first = torch.as_tensor(samples[0][0])
    refuse(first.dim() != 3, f"{config.model} takes images, and --data {config.data} has none: name a --model of your own")
    network, (channels, height, width) = NETWORKS[config.model], first.shape
    # Images keep their own shape where the network takes it.
    depth = channels if channels in network.channels else network.channels[-1]
    shape = (depth, network.size or height, network.size or width)
    classes = config.classes or len(getattr(samples, "classes", ())) or CLASSES
    return network(shape[0], classes, config.width), partial(fitted, shape=shape, darkest=network.darkest)


def optimizer(network: nn.Module, config: Config) -> torch.optim.Optimizer:
    """What makes the steps."""
    if config.optimizer == "adamw":
        return torch.optim.AdamW(network.parameters(), config.lr, weight_decay=config.weight_decay)
    return torch.optim.SGD(network.parameters(), config.lr, config.momentum, weight_decay=config.weight_decay)


def rate(config: Config, done: int, steps: int) -> float:
    """The learning rate after so many steps of the run, `steps` of them an epoch."""
    rising = min(1.0, (done + 1) / (config.warmup + 1))
    falling = (1 + math.cos(math.pi * min(1.0, done / max(1, config.epochs * steps)))) / 2
    return config.lr * rising * (falling if config.schedule == "cosine" else 1)
