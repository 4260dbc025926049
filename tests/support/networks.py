"""Small networks, each written twice or more as different authors would: other names, nesting, order, fused layers.

Modules are registered, and so made, in the order in which they are named here.
"""

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from tests.support import encoders
from tests.support.encoders import listed, net

EncoderA, EncoderB, EncoderC, EncoderD = encoders.EncoderA, encoders.EncoderB, encoders.EncoderC, encoders.EncoderD
GatedA, GatedB, LanguageA, LanguageB = encoders.GatedA, encoders.GatedB, encoders.LanguageA, encoders.LanguageB
TransposedA, TransposedB, named = encoders.TransposedA, encoders.TransposedB, encoders.named
WindowsA, WindowsB = encoders.WindowsA, encoders.WindowsB
Norm = nn.BatchNorm2d


# --- a residual network: two stages of two bottlenecks; in the first the shortcut and the last convolution have one shape


def _conv(inputs: int, outputs: int, size: int = 3) -> nn.Conv2d:
    return nn.Conv2d(inputs, outputs, size, padding=size // 2, bias=False)


def _bottleneck_a(inputs: int, width: int) -> Any:
    """Names of torchvision; the shortcut is registered last."""

    def computed(block: Any, x: Tensor) -> Tensor:
        y = F.relu(block.bn1(block.conv1(x)))
        y = F.relu(block.bn2(block.conv2(y)))
        y = block.bn3(block.conv3(y))
        return F.relu(y + (block.downsample(x) if hasattr(block, "downsample") else x))

    block = net(
        computed, conv1=_conv(inputs, width, 1), bn1=Norm(width), conv2=_conv(width, width), bn2=Norm(width),
        conv3=_conv(width, 2 * width, 1), bn3=Norm(2 * width),
    )  # fmt: skip
    if inputs != 2 * width:
        block.downsample = nn.Sequential(_conv(inputs, 2 * width, 1), Norm(2 * width))
    return block


def ResNetA(width: int = 5) -> Any:
    """As torchvision writes it."""
    return net(
        lambda net, x: net.fc(net.layer2(net.layer1(F.relu(net.bn1(net.conv1(x))))).mean((2, 3))),
        conv1=_conv(3, width), bn1=Norm(width),
        layer1=nn.Sequential(_bottleneck_a(width, width), _bottleneck_a(2 * width, width)),
        layer2=nn.Sequential(_bottleneck_a(2 * width, 2 * width), _bottleneck_a(4 * width, 2 * width)),
        fc=nn.Linear(4 * width, 4),
    )  # fmt: skip


def _unit_b(inputs: int, outputs: int, size: int, active: bool = True) -> Any:
    def computed(unit: Any, x: Tensor) -> Tensor:
        x = unit.normalization(unit.convolution(x))
        return F.relu(x) if active else x

    return net(computed, convolution=_conv(inputs, outputs, size), normalization=Norm(outputs))


def _bottleneck_b(inputs: int, width: int) -> Any:
    return net(
        lambda block, x: F.relu(block.layer(x) + block.shortcut(x)),
        shortcut=_unit_b(inputs, 2 * width, 1, False) if inputs != 2 * width else nn.Identity(),
        layer=nn.Sequential(_unit_b(inputs, width, 1), _unit_b(width, width, 3), _unit_b(width, 2 * width, 1, False)),
    )


def ResNetB(width: int = 5) -> Any:
    """The shortcut is registered first, and every convolution has a module of its own around it."""

    def computed(net: Any, x: Tensor) -> Tensor:
        x = net.embedder(x)
        for stage in net.encoder["stages"]:
            x = stage["layers"](x)
        return net.classifier(x.mean((2, 3)))

    embedder, stages = _unit_b(3, width, 3), nn.ModuleList()
    for inputs, inner in ((width, width), (2 * width, 2 * width)):
        layers = nn.Sequential(_bottleneck_b(inputs, inner), _bottleneck_b(2 * inner, inner))
        stages.append(nn.ModuleDict({"layers": layers}))
    classifier = nn.Sequential(nn.Flatten(), nn.Linear(4 * width, 4))
    return net(computed, embedder=embedder, encoder=nn.ModuleDict({"stages": stages}), classifier=classifier)


def _bottleneck_c(inputs: int, width: int) -> Any:
    residual = nn.Sequential(
        _conv(inputs, width, 1), Norm(width), nn.ReLU(), _conv(width, width), Norm(width), nn.ReLU(),
        _conv(width, 2 * width, 1), Norm(2 * width),
    )  # fmt: skip
    shortcut = nn.Sequential(_conv(inputs, 2 * width, 1), Norm(2 * width)) if inputs != 2 * width else nn.Sequential()
    return net(
        lambda block, x: F.relu(block.residual_function(x) + block.shortcut(x)), residual_function=residual, shortcut=shortcut
    )


def ResNetC(width: int = 5) -> Any:
    """One Sequential for the convolutions of a block."""
    return net(
        lambda net, x: net.fc(net.conv3_x(net.conv2_x(net.conv1(x))).mean((2, 3))),
        conv1=nn.Sequential(_conv(3, width), Norm(width), nn.ReLU()),
        conv2_x=nn.Sequential(_bottleneck_c(width, width), _bottleneck_c(2 * width, width)),
        conv3_x=nn.Sequential(_bottleneck_c(2 * width, 2 * width), _bottleneck_c(4 * width, 2 * width)),
        fc=nn.Linear(4 * width, 4),
    )


def PrefixedA() -> Any:
    """A residual network under `model.`."""
    return net(lambda net, x: net.model(x), model=ResNetA())


def PrefixedB() -> Any:
    """The same under another name."""
    return net(lambda net, x: net.backbone["net"](x), backbone=nn.ModuleDict({"net": ResNetA()}))


# --- a plain convolutional network: convolutions of one shape in a row


def PlainA() -> Any:
    """Flat features."""
    features = nn.Sequential(
        nn.Conv2d(3, 6, 3), nn.ReLU(), nn.Conv2d(6, 6, 3), nn.ReLU(), nn.MaxPool2d(2),
        nn.Conv2d(6, 6, 3), nn.ReLU(), nn.Conv2d(6, 6, 3), nn.ReLU(),
    )  # fmt: skip
    classifier = nn.Sequential(nn.Linear(6, 6), nn.ReLU(), nn.Dropout(), nn.Linear(6, 6), nn.ReLU(), nn.Linear(6, 4))
    return net(lambda net, x: net.classifier(net.features(x).mean((2, 3))), features=features, classifier=classifier)


def PlainB() -> Any:
    """Numbered by block, the linear layers registered in front."""

    def computed(net: Any, x: Tensor) -> Tensor:
        x = F.max_pool2d(F.relu(net.conv1_2(F.relu(net.conv1_1(x)))), 2)
        x = F.relu(net.conv2_2(F.relu(net.conv2_1(x)))).mean((2, 3))
        return net.fc3(F.relu(net.fc2(F.relu(net.fc1(x)))))

    return net(
        computed, fc1=nn.Linear(6, 6), fc2=nn.Linear(6, 6), fc3=nn.Linear(6, 4),
        conv1_1=nn.Conv2d(3, 6, 3), conv1_2=nn.Conv2d(6, 6, 3), conv2_1=nn.Conv2d(6, 6, 3), conv2_2=nn.Conv2d(6, 6, 3),
    )  # fmt: skip


# --- inverted residuals


def _conv_norm(inputs: int, outputs: int, size: int, groups: int = 1) -> nn.Sequential:
    conv = nn.Conv2d(inputs, outputs, size, padding=size // 2, groups=groups, bias=False)
    return nn.Sequential(conv, Norm(outputs), nn.ReLU6())


def _inverted_a() -> Any:
    conv = nn.Sequential(_conv_norm(6, 18, 1), _conv_norm(18, 18, 3, 18), nn.Conv2d(18, 6, 1, bias=False), Norm(6))
    return net(lambda block, x: x + block.conv(x), conv=conv)


def MobileA() -> Any:
    """Everything in one list of features."""
    return net(
        lambda net, x: net.classifier(net.features(x).mean((2, 3))),
        features=nn.Sequential(_conv_norm(3, 6, 3), _inverted_a(), _inverted_a(), _conv_norm(6, 6, 1)),
        classifier=nn.Sequential(nn.Dropout(), nn.Linear(6, 4)),
    )


def _inverted_b() -> Any:
    def computed(block: Any, x: Tensor) -> Tensor:
        y = F.relu6(block.bn2(block.conv_dw(F.relu6(block.bn1(block.conv_pw(x))))))
        return x + block.bn3(block.conv_pwl(y))

    return net(
        computed, conv_pw=nn.Conv2d(6, 18, 1, bias=False), bn1=Norm(18),
        conv_dw=nn.Conv2d(18, 18, 3, padding=1, groups=18, bias=False), bn2=Norm(18),
        conv_pwl=nn.Conv2d(18, 6, 1, bias=False), bn3=Norm(6),
    )  # fmt: skip


def MobileB() -> Any:
    """In stages of blocks, flat inside."""

    def computed(net: Any, x: Tensor) -> Tensor:
        x = net.blocks[0](F.relu6(net.bn1(net.conv_stem(x))))
        return net.head(F.relu6(net.bn2(net.conv_head(x))).mean((2, 3)))

    return net(
        computed, conv_stem=nn.Conv2d(3, 6, 3, padding=1, bias=False), bn1=Norm(6),
        blocks=nn.ModuleList([nn.Sequential(_inverted_b(), _inverted_b())]),
        conv_head=nn.Conv2d(6, 6, 1, bias=False), bn2=Norm(6), head=nn.Linear(6, 4),
    )  # fmt: skip


# --- convolutions of size 1, or linear layers


def MixerA() -> Any:
    """Linear layers on the last dimension."""
    made = net(
        lambda net, x: net.proj_out(net.norm(net.proj_in(x + net.pos_embed))),
        proj_in=nn.Linear(8, 12), norm=nn.LayerNorm(12), proj_out=nn.Linear(12, 8),
    )  # fmt: skip
    made.pos_embed = nn.Parameter(torch.zeros(1, 5, 8))
    return made


def MixerB() -> Any:
    """Convolutions of size 1, and positions without a batch dimension."""

    def computed(net: Any, x: Tensor) -> Tensor:
        y = net.expand((x + net.position_embedding).transpose(1, 2)).transpose(1, 2)
        return net.reduce(net.layernorm(y).transpose(1, 2)).transpose(1, 2)

    made = net(computed, expand=nn.Conv1d(8, 12, 1), layernorm=nn.LayerNorm(12), reduce=nn.Conv1d(12, 8, 1))
    made.position_embedding = nn.Parameter(torch.zeros(5, 8))
    return made


# --- the same numbers in other shapes, stages cut elsewhere, two kinds of attention


def MapA() -> Any:
    """A linear layer behind a flatten, as VGG has it."""
    return net(
        lambda net, x: net.classifier(net.features(x).flatten(1)), features=nn.Sequential(nn.Conv2d(3, 6, 4, 4), nn.ReLU()),
        classifier=nn.Sequential(nn.Linear(6 * 4 * 4, 10), nn.ReLU(), nn.Linear(10, 4)),
    )  # fmt: skip


def MapB() -> Any:
    """A convolution over the whole map."""
    return net(
        lambda net, x: net.head(F.relu(net.pre_logits["fc1"](net.features(x))).flatten(1)),
        features=nn.Sequential(nn.Conv2d(3, 6, 4, 4), nn.ReLU()),
        pre_logits=nn.ModuleDict({"fc1": nn.Conv2d(6, 10, 4)}), head=nn.Linear(10, 4),
    )  # fmt: skip


def _mix(width: int) -> Any:
    return net(
        lambda block, x: x + block.fc2(F.gelu(block.fc1(block.norm(x)))), norm=nn.LayerNorm(width),
        fc1=nn.Linear(width, 2 * width), fc2=nn.Linear(2 * width, width),
    )  # fmt: skip


def _halve(width: int) -> Any:
    return net(
        lambda part, x: part.reduction(part.norm(x.reshape(x.shape[0], x.shape[1] // 2, -1))),
        reduction=nn.Linear(2 * width, 2 * width, bias=False), norm=nn.LayerNorm(2 * width),
    )  # fmt: skip


def StagesA() -> Any:
    """Each stage but the last ends with the downsampling."""

    def computed(net: Any, x: Tensor) -> Tensor:
        for layer in net.layers:
            for block in layer["blocks"]:
                x = block(x)
            x = layer["downsample"](x) if "downsample" in layer else x
        return net.head(net.norm(x).mean(1))

    layers = nn.ModuleList()
    for stage in range(3):
        blocks = listed(lambda width=8 * 2**stage: _mix(width))
        layers.append(nn.ModuleDict({"blocks": blocks} | ({"downsample": _halve(8 * 2**stage)} if stage < 2 else {})))
    return net(computed, layers=layers, norm=nn.LayerNorm(32), head=nn.Linear(32, 5))


def StagesB() -> Any:
    """Each stage but the first begins with the downsampling, under other names."""

    def computed(net: Any, x: Tensor) -> Tensor:
        for stage in net.stages:
            x = stage["downsample"](x) if "downsample" in stage else x
            for block in stage["blocks"]:
                x = block(x)
        return net.classifier(net.final_norm(x).mean(1))

    stages = nn.ModuleList()
    for stage in range(3):
        first = {"downsample": _halve(4 * 2**stage)} if stage else {}
        stages.append(nn.ModuleDict(first | {"blocks": listed(lambda width=8 * 2**stage: _mix(width))}))
    return net(computed, stages=stages, final_norm=nn.LayerNorm(32), classifier=nn.Linear(32, 5))


class PatchesA(nn.Module):
    """Patches through one matrix, whose columns may come in any order."""

    def __init__(self) -> None:
        super().__init__()
        self.to_patch_embedding, self.head = nn.Linear(3 * 4 * 4, 8), nn.Linear(8, 4)


class PatchesB(nn.Module):
    """Patches through a convolution."""

    def __init__(self) -> None:
        super().__init__()
        self.patch_embed, self.head = nn.Conv2d(3, 8, 4, 4), nn.Linear(8, 4)
