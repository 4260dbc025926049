"""Small networks, each written twice or more as different authors would: other names, nesting, order, fused layers."""

from __future__ import annotations

from collections import OrderedDict
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

# --- a residual network


def _conv(inputs: int, outputs: int, size: int = 3) -> nn.Conv2d:
    return nn.Conv2d(inputs, outputs, size, padding=size // 2, bias=False)


class _BottleneckA(nn.Module):
    """Names of torchvision; the shortcut is registered last."""

    def __init__(self, inputs: int, width: int) -> None:
        super().__init__()
        self.conv1, self.bn1 = _conv(inputs, width, 1), nn.BatchNorm2d(width)
        self.conv2, self.bn2 = _conv(width, width), nn.BatchNorm2d(width)
        self.conv3, self.bn3 = _conv(width, 2 * width, 1), nn.BatchNorm2d(2 * width)
        self.downsample = None
        if inputs != 2 * width:
            self.downsample = nn.Sequential(_conv(inputs, 2 * width, 1), nn.BatchNorm2d(2 * width))

    def forward(self, x: Tensor) -> Tensor:
        y = F.relu(self.bn1(self.conv1(x)))
        y = F.relu(self.bn2(self.conv2(y)))
        y = self.bn3(self.conv3(y))
        return F.relu(y + (x if self.downsample is None else self.downsample(x)))


class ResNetA(nn.Module):
    """Two stages of two bottlenecks; in the first the shortcut and the last convolution have one shape."""

    def __init__(self, width: int = 5) -> None:
        super().__init__()
        self.conv1, self.bn1 = _conv(3, width), nn.BatchNorm2d(width)
        self.layer1 = nn.Sequential(_BottleneckA(width, width), _BottleneckA(2 * width, width))
        self.layer2 = nn.Sequential(_BottleneckA(2 * width, 2 * width), _BottleneckA(4 * width, 2 * width))
        self.fc = nn.Linear(4 * width, 4)

    def forward(self, x: Tensor) -> Tensor:
        x = self.layer2(self.layer1(F.relu(self.bn1(self.conv1(x)))))
        return self.fc(x.mean((2, 3)))


class _UnitB(nn.Module):
    def __init__(self, inputs: int, outputs: int, size: int, active: bool = True) -> None:
        super().__init__()
        self.convolution, self.normalization = _conv(inputs, outputs, size), nn.BatchNorm2d(outputs)
        self.active = active

    def forward(self, x: Tensor) -> Tensor:
        x = self.normalization(self.convolution(x))
        return F.relu(x) if self.active else x


class _BottleneckB(nn.Module):
    """The shortcut is registered first, and every convolution has a module of its own around it."""

    def __init__(self, inputs: int, width: int) -> None:
        super().__init__()
        self.shortcut = _UnitB(inputs, 2 * width, 1, False) if inputs != 2 * width else nn.Identity()
        self.layer = nn.Sequential(
            _UnitB(inputs, width, 1), _UnitB(width, width, 3), _UnitB(width, 2 * width, 1, False)
        )  # fmt: skip

    def forward(self, x: Tensor) -> Tensor:
        return F.relu(self.layer(x) + self.shortcut(x))


class ResNetB(nn.Module):
    """The same as `ResNetA`."""

    def __init__(self, width: int = 5) -> None:
        super().__init__()
        self.embedder = _UnitB(3, width, 3)
        stages = []
        for inputs, inner in ((width, width), (2 * width, 2 * width)):
            layers = nn.Sequential(_BottleneckB(inputs, inner), _BottleneckB(2 * inner, inner))
            stages.append(nn.ModuleDict({"layers": layers}))
        self.encoder = nn.ModuleDict({"stages": nn.ModuleList(stages)})
        self.classifier = nn.Sequential(nn.Flatten(), nn.Linear(4 * width, 4))

    def forward(self, x: Tensor) -> Tensor:
        x = self.embedder(x)
        stages: Any = self.encoder["stages"]
        for stage in stages:
            x = stage["layers"](x)
        return self.classifier(x.mean((2, 3)))


class _BottleneckC(nn.Module):
    def __init__(self, inputs: int, width: int) -> None:
        super().__init__()
        self.residual_function = nn.Sequential(
            _conv(inputs, width, 1), nn.BatchNorm2d(width), nn.ReLU(), _conv(width, width), nn.BatchNorm2d(width), nn.ReLU(),
            _conv(width, 2 * width, 1), nn.BatchNorm2d(2 * width),
        )  # fmt: skip
        self.shortcut = nn.Sequential()
        if inputs != 2 * width:
            self.shortcut = nn.Sequential(_conv(inputs, 2 * width, 1), nn.BatchNorm2d(2 * width))

    def forward(self, x: Tensor) -> Tensor:
        return F.relu(self.residual_function(x) + self.shortcut(x))


class ResNetC(nn.Module):
    """The same as `ResNetA`, with one Sequential for the convolutions of a block."""

    def __init__(self, width: int = 5) -> None:
        super().__init__()
        self.conv1 = nn.Sequential(_conv(3, width), nn.BatchNorm2d(width), nn.ReLU())
        self.conv2_x = nn.Sequential(_BottleneckC(width, width), _BottleneckC(2 * width, width))
        self.conv3_x = nn.Sequential(_BottleneckC(2 * width, 2 * width), _BottleneckC(4 * width, 2 * width))
        self.fc = nn.Linear(4 * width, 4)

    def forward(self, x: Tensor) -> Tensor:
        return self.fc(self.conv3_x(self.conv2_x(self.conv1(x))).mean((2, 3)))


# --- a plain convolutional network: convolutions of one shape in a row

PlainA = lambda: nn.Sequential(OrderedDict(  # noqa: E731
    features=nn.Sequential(
        nn.Conv2d(3, 6, 3), nn.ReLU(), nn.Conv2d(6, 6, 3), nn.ReLU(), nn.MaxPool2d(2),
        nn.Conv2d(6, 6, 3), nn.ReLU(), nn.Conv2d(6, 6, 3), nn.ReLU(),
    ),
    pool=nn.AdaptiveAvgPool2d(1), flat=nn.Flatten(),
    classifier=nn.Sequential(nn.Linear(6, 6), nn.ReLU(), nn.Dropout(), nn.Linear(6, 6), nn.ReLU(), nn.Linear(6, 4)),
))  # fmt: skip


class PlainB(nn.Module):
    """The same as `PlainA`, numbered by block, the linear layers registered in front."""

    def __init__(self) -> None:
        super().__init__()
        self.fc1, self.fc2, self.fc3 = nn.Linear(6, 6), nn.Linear(6, 6), nn.Linear(6, 4)
        self.conv1_1, self.conv1_2 = nn.Conv2d(3, 6, 3), nn.Conv2d(6, 6, 3)
        self.conv2_1, self.conv2_2 = nn.Conv2d(6, 6, 3), nn.Conv2d(6, 6, 3)

    def forward(self, x: Tensor) -> Tensor:
        x = F.max_pool2d(F.relu(self.conv1_2(F.relu(self.conv1_1(x)))), 2)
        x = F.relu(self.conv2_2(F.relu(self.conv2_1(x)))).mean((2, 3))
        return self.fc3(F.relu(self.fc2(F.relu(self.fc1(x)))))


# --- inverted residuals


def _conv_norm(inputs: int, outputs: int, size: int, groups: int = 1) -> nn.Sequential:
    conv = nn.Conv2d(inputs, outputs, size, padding=size // 2, groups=groups, bias=False)
    return nn.Sequential(conv, nn.BatchNorm2d(outputs), nn.ReLU6())


class _InvertedA(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        inner = 3 * width
        self.conv = nn.Sequential(
            _conv_norm(width, inner, 1), _conv_norm(inner, inner, 3, inner), nn.Conv2d(inner, width, 1, bias=False),
            nn.BatchNorm2d(width),
        )  # fmt: skip

    def forward(self, x: Tensor) -> Tensor:
        return x + self.conv(x)


class MobileA(nn.Module):
    """Everything in one list of features."""

    def __init__(self) -> None:
        super().__init__()
        self.features = nn.Sequential(_conv_norm(3, 6, 3), _InvertedA(6), _InvertedA(6), _conv_norm(6, 6, 1))
        self.classifier = nn.Sequential(nn.Dropout(), nn.Linear(6, 4))

    def forward(self, x: Tensor) -> Tensor:
        return self.classifier(self.features(x).mean((2, 3)))


class _InvertedB(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        inner = 3 * width
        self.conv_pw, self.bn1 = nn.Conv2d(width, inner, 1, bias=False), nn.BatchNorm2d(inner)
        self.conv_dw, self.bn2 = nn.Conv2d(inner, inner, 3, padding=1, groups=inner, bias=False), nn.BatchNorm2d(inner)
        self.conv_pwl, self.bn3 = nn.Conv2d(inner, width, 1, bias=False), nn.BatchNorm2d(width)

    def forward(self, x: Tensor) -> Tensor:
        y = F.relu6(self.bn2(self.conv_dw(F.relu6(self.bn1(self.conv_pw(x))))))
        return x + self.bn3(self.conv_pwl(y))


class MobileB(nn.Module):
    """The same as `MobileA`, in stages of blocks, flat inside."""

    def __init__(self) -> None:
        super().__init__()
        self.conv_stem, self.bn1 = nn.Conv2d(3, 6, 3, padding=1, bias=False), nn.BatchNorm2d(6)
        self.blocks = nn.ModuleList([nn.Sequential(_InvertedB(6), _InvertedB(6))])
        self.conv_head, self.bn2 = nn.Conv2d(6, 6, 1, bias=False), nn.BatchNorm2d(6)
        self.head = nn.Linear(6, 4)

    def forward(self, x: Tensor) -> Tensor:
        x = self.blocks[0](F.relu6(self.bn1(self.conv_stem(x))))
        return self.head(F.relu6(self.bn2(self.conv_head(x))).mean((2, 3)))


# --- encoders of transformers, dimension 8


class EncoderA(nn.Module):
    """torch's own layer: q, k, v in one matrix; norms registered at the end."""

    def __init__(self, depth: int = 2) -> None:
        super().__init__()
        self.layers = nn.ModuleList(
            nn.TransformerEncoderLayer(8, 1, 24, dropout=0.0, batch_first=True) for _ in range(depth)
        )  # fmt: skip
        self.norm = nn.LayerNorm(8)

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x)
        return self.norm(x)


class _AttentionB(nn.Module):
    order = ("to_q", "to_k", "to_v", "to_out")

    def __init__(self) -> None:
        super().__init__()
        for name in self.order:
            self.add_module(name, nn.Linear(8, 8))

    def forward(self, x: Tensor) -> Tensor:
        q, k, v, out = (self.get_submodule(name) for name in ("to_q", "to_k", "to_v", "to_out"))
        return out(F.scaled_dot_product_attention(q(x), k(x), v(x)))


class _LayerB(nn.Module):
    attention: type[nn.Module] = _AttentionB

    def __init__(self) -> None:
        super().__init__()
        self.ln_1, self.attn = nn.LayerNorm(8), self.attention()
        self.ln_2, self.mlp = nn.LayerNorm(8), nn.Sequential(nn.Linear(8, 24), nn.ReLU(), nn.Linear(24, 8))

    def forward(self, x: Tensor) -> Tensor:
        x = self.ln_1(x + self.attn(x))
        return self.ln_2(x + self.mlp(x))


class EncoderB(nn.Module):
    """The same as `EncoderA`, q, k and v apart, the last norm registered first."""

    layer: type[nn.Module] = _LayerB

    def __init__(self, depth: int = 2) -> None:
        super().__init__()
        self.final_norm = nn.LayerNorm(8)
        self.block = nn.Sequential(*(self.layer() for _ in range(depth)))

    def forward(self, x: Tensor) -> Tensor:
        return self.final_norm(self.block(x))


class _AttentionC(nn.Module):
    """Registered as k, v, q, out, as fairseq does."""

    def __init__(self) -> None:
        super().__init__()
        self.k_proj, self.v_proj = nn.Linear(8, 8), nn.Linear(8, 8)
        self.q_proj, self.out_proj = nn.Linear(8, 8), nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        return self.out_proj(F.scaled_dot_product_attention(self.q_proj(x), self.k_proj(x), self.v_proj(x)))


class _LayerC(_LayerB):
    attention = _AttentionC


class EncoderC(EncoderB):
    """The same as `EncoderB`, with q, k, v in another order."""

    layer = _LayerC


class _AttentionD(nn.Module):
    """q, k, v, out in a list: which is which only the code says."""

    def __init__(self) -> None:
        super().__init__()
        self.linears = nn.ModuleList(nn.Linear(8, 8) for _ in range(4))


class _LayerD(_LayerB):
    attention = _AttentionD


class EncoderD(EncoderB):
    """Like `EncoderB`, without names for q, k, v."""

    layer = _LayerD


# --- convolutions of size 1, or linear layers


class MixerA(nn.Module):
    """Linear layers on the last dimension."""

    def __init__(self) -> None:
        super().__init__()
        self.proj_in, self.norm, self.proj_out = nn.Linear(8, 12), nn.LayerNorm(12), nn.Linear(12, 8)
        self.pos_embed = nn.Parameter(torch.zeros(1, 5, 8))

    def forward(self, x: Tensor) -> Tensor:
        return self.proj_out(self.norm(self.proj_in(x + self.pos_embed)))


class MixerB(nn.Module):
    """The same as `MixerA` with convolutions of size 1, and positions without a batch dimension."""

    def __init__(self) -> None:
        super().__init__()
        self.position_embedding = nn.Parameter(torch.zeros(5, 8))
        self.expand, self.layernorm, self.reduce = nn.Conv1d(8, 12, 1), nn.LayerNorm(12), nn.Conv1d(12, 8, 1)

    def forward(self, x: Tensor) -> Tensor:
        y = self.expand((x + self.position_embedding).transpose(1, 2)).transpose(1, 2)
        return self.reduce(self.layernorm(y).transpose(1, 2)).transpose(1, 2)


# --- gated layers


class GatedA(nn.Module):
    """Two blocks with w1 (gate), w2 (down), w3 (up), as in the first Llama."""

    def __init__(self) -> None:
        super().__init__()
        names = {"w1": (8, 12), "w2": (12, 8), "w3": (8, 12)}
        self.layers = nn.ModuleList(
            nn.ModuleDict({name: nn.Linear(*sizes, bias=False) for name, sizes in names.items()}) for _ in range(2)
        )

    def forward(self, x: Tensor) -> Tensor:
        layers: Any = self.layers
        for layer in layers:
            x = x + layer["w2"](F.silu(layer["w1"](x)) * layer["w3"](x))
        return x


class GatedB(nn.Module):
    """The same as `GatedA` with gate and up in one matrix."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(
            nn.ModuleDict({"gate_up_proj": nn.Linear(8, 24, bias=False), "down_proj": nn.Linear(12, 8, bias=False)})
            for _ in range(2)
        )

    def forward(self, x: Tensor) -> Tensor:
        blocks: Any = self.blocks
        for block in blocks:
            gate, up = block["gate_up_proj"](x).chunk(2, -1)
            x = x + block["down_proj"](F.silu(gate) * up)
        return x


# --- matrices as [in, out]


class _Conv1D(nn.Module):
    """GPT-2's linear layer."""

    def __init__(self, outputs: int, inputs: int) -> None:
        super().__init__()
        self.weight, self.bias = nn.Parameter(torch.zeros(inputs, outputs)), nn.Parameter(torch.zeros(outputs))

    def forward(self, x: Tensor) -> Tensor:
        return x @ self.weight + self.bias


class TransposedA(nn.Module):
    """The names of GPT-2; c_proj is square, so that nothing shows how it is kept."""

    linear = staticmethod(lambda inputs, outputs: _Conv1D(outputs, inputs))

    def __init__(self) -> None:
        super().__init__()
        self.h = nn.ModuleList(
            nn.ModuleDict({"c_proj": self.linear(8, 8), "c_fc": self.linear(8, 20), "c_out": self.linear(20, 8)})
            for _ in range(2)
        )

    def forward(self, x: Tensor) -> Tensor:
        layers: Any = self.h
        for layer in layers:
            x = x + layer["c_out"](F.gelu(layer["c_fc"](layer["c_proj"](x))))
        return x


class TransposedB(TransposedA):
    """The same as `TransposedA`, even in its names, with `nn.Linear`."""

    linear = staticmethod(nn.Linear)  # type: ignore[assignment]


# --- tied embeddings


class LanguageA(nn.Module):
    """The output layer is tied to the embedding."""

    def __init__(self) -> None:
        super().__init__()
        self.wte, self.ln_f, self.lm_head = nn.Embedding(12, 8), nn.LayerNorm(8), nn.Linear(8, 12, bias=False)
        self.lm_head.weight = self.wte.weight

    def forward(self, x: Tensor) -> Tensor:
        return self.lm_head(self.ln_f(self.wte(x)))


class LanguageB(nn.Module):
    """The same as `LanguageA` under other names, the output layer first."""

    def __init__(self) -> None:
        super().__init__()
        self.output, self.norm = nn.Linear(8, 12, bias=False), nn.LayerNorm(8)
        self.tokens = nn.Embedding(12, 8)
        self.output.weight = self.tokens.weight

    def forward(self, x: Tensor) -> Tensor:
        return self.output(self.norm(self.tokens(x)))


# --- layers of one shape


def named(*names: str) -> nn.ModuleDict:
    """Square linear layers under these names, in this order."""
    return nn.ModuleDict({name: nn.Linear(4, 4) for name in names})


# --- the same numbers in other shapes, stages cut elsewhere, two kinds of attention


class MapA(nn.Module):
    """A linear layer behind a flatten, as VGG has it."""

    def __init__(self) -> None:
        super().__init__()
        self.features = nn.Sequential(nn.Conv2d(3, 6, 4, 4), nn.ReLU())
        self.classifier = nn.Sequential(nn.Linear(6 * 4 * 4, 10), nn.ReLU(), nn.Linear(10, 4))

    def forward(self, x: Tensor) -> Tensor:
        return self.classifier(self.features(x).flatten(1))


class MapB(nn.Module):
    """The same as `MapA`, with a convolution over the whole map."""

    def __init__(self) -> None:
        super().__init__()
        self.features = nn.Sequential(nn.Conv2d(3, 6, 4, 4), nn.ReLU())
        self.pre_logits, self.head = nn.ModuleDict({"fc1": nn.Conv2d(6, 10, 4)}), nn.Linear(10, 4)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(F.relu(self.pre_logits["fc1"](self.features(x))).flatten(1))


class _MixB(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm, self.fc1, self.fc2 = nn.LayerNorm(width), nn.Linear(width, 2 * width), nn.Linear(2 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.fc2(F.gelu(self.fc1(self.norm(x))))


class _HalveA(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.reduction, self.norm = nn.Linear(2 * width, 2 * width, bias=False), nn.LayerNorm(2 * width)

    def forward(self, x: Tensor) -> Tensor:
        return self.reduction(self.norm(x.reshape(x.shape[0], x.shape[1] // 2, -1)))


class StagesA(nn.Module):
    """Each stage but the last ends with the downsampling."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList()
        for stage in range(3):
            width = 8 * 2**stage
            blocks = nn.ModuleList(_MixB(width) for _ in range(2))
            self.layers.append(nn.ModuleDict({"blocks": blocks} | ({"downsample": _HalveA(width)} if stage < 2 else {})))
        self.norm, self.head = nn.LayerNorm(32), nn.Linear(32, 5)

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            assert isinstance(layer, nn.ModuleDict)
            for block in layer.get_submodule("blocks").children():
                x = block(x)
            x = layer["downsample"](x) if "downsample" in layer else x
        return self.head(self.norm(x).mean(1))


class StagesB(nn.Module):
    """The same as `StagesA`; each stage but the first begins with the downsampling, under other names."""

    def __init__(self) -> None:
        super().__init__()
        self.stages = nn.ModuleList()
        for stage in range(3):
            width = 8 * 2**stage
            first = {"downsample": _HalveA(width // 2)} if stage else {}
            self.stages.append(nn.ModuleDict(first | {"blocks": nn.ModuleList(_MixB(width) for _ in range(2))}))
        self.final_norm, self.classifier = nn.LayerNorm(32), nn.Linear(32, 5)

    def forward(self, x: Tensor) -> Tensor:
        for stage in self.stages:
            assert isinstance(stage, nn.ModuleDict)
            x = stage["downsample"](x) if "downsample" in stage else x
            for block in stage.get_submodule("blocks").children():
                x = block(x)
        return self.classifier(self.final_norm(x).mean(1))


class _PartB(nn.Module):
    """Attention inside groups of tokens: those beside each other, or those at equal distances."""

    def __init__(self, *, grid: bool) -> None:
        super().__init__()
        self.norm, self.attn, self.grid = nn.LayerNorm(8), _AttentionB(), grid

    def forward(self, x: Tensor) -> Tensor:
        y = self.norm(x).reshape(x.shape[0], 2, -1, 8)
        y = y.transpose(1, 2) if self.grid else y
        y = torch.stack([self.attn(group) for group in y.unbind(1)], 1)
        return x + (y.transpose(1, 2) if self.grid else y).reshape(x.shape)


class WindowsA(nn.Module):
    """Window before grid attention, named so."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(
            nn.ModuleDict({"window_attention": _PartB(grid=False), "grid_attention": _PartB(grid=True)}) for _ in range(2)
        )

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            for name in ("window_attention", "grid_attention"):
                x = block.get_submodule(name)(x)
        return x


class WindowsB(nn.Module):
    """The same as `WindowsA`, with grid attention registered first and words of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.stages = nn.ModuleList(
            nn.ModuleDict({"attn_grid": _PartB(grid=True), "attn_block": _PartB(grid=False)}) for _ in range(2)
        )

    def forward(self, x: Tensor) -> Tensor:
        for stage in self.stages:
            for name in ("attn_block", "attn_grid"):
                x = stage.get_submodule(name)(x)
        return x


class PrefixedA(nn.Module):
    """A residual network under `model.`."""

    def __init__(self) -> None:
        super().__init__()
        self.model = ResNetA()

    def forward(self, x: Tensor) -> Tensor:
        return self.model(x)


class PrefixedB(nn.Module):
    """The same as `PrefixedA` under another name."""

    def __init__(self) -> None:
        super().__init__()
        self.backbone = nn.ModuleDict({"net": ResNetA()})

    def forward(self, x: Tensor) -> Tensor:
        return self.backbone["net"](x)


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
