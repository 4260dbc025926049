"""Encoders and parts of language models, each written twice or more as different authors would; more in networks.py."""

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from tests.support.opaque import Layers


def net(computed: Any, **layers: nn.Module) -> Any:
    """A network of layers by name; `computed(net, x)` is what it does."""
    return Layers(layers, computed)


def listed(make: Any, count: int = 2) -> nn.ModuleList:
    """So many of a module."""
    return nn.ModuleList(make() for _ in range(count))


def named(*names: str) -> nn.ModuleDict:
    """Square linear layers of one shape under these names, in this order."""
    return nn.ModuleDict({name: nn.Linear(4, 4) for name in names})


def plain(**sizes: tuple[int, int]) -> nn.ModuleDict:
    """Linear layers without a bias."""
    return nn.ModuleDict({name: nn.Linear(*size, bias=False) for name, size in sizes.items()})


# --- encoders of transformers, dimension 8


def EncoderA(depth: int = 2) -> Any:
    """torch's own layer: q, k, v in one matrix; norms registered at the end."""

    def computed(net: Any, x: Tensor) -> Tensor:
        for layer in net.layers:
            x = layer(x)
        return net.norm(x)

    layers = listed(lambda: nn.TransformerEncoderLayer(8, 1, 24, dropout=0.0, batch_first=True), depth)
    return net(computed, layers=layers, norm=nn.LayerNorm(8))


def _attention(q: str, k: str, v: str, out: str, order: str) -> Any:
    def computed(attention: Any, x: Tensor) -> Tensor:
        one, two, three, four = (attention.get_submodule(name) for name in (q, k, v, out))
        return four(F.scaled_dot_product_attention(one(x), two(x), three(x)))

    return net(computed, **{name: nn.Linear(8, 8) for name in order.split()})


def _layer(attention: nn.Module) -> Any:
    def computed(layer: Any, x: Tensor) -> Tensor:
        x = layer.ln_1(x + layer.attn(x))
        return layer.ln_2(x + layer.mlp(x))

    mlp = nn.Sequential(nn.Linear(8, 24), nn.ReLU(), nn.Linear(24, 8))
    return net(computed, ln_1=nn.LayerNorm(8), attn=attention, ln_2=nn.LayerNorm(8), mlp=mlp)


def _attention_b() -> Any:
    return _attention("to_q", "to_k", "to_v", "to_out", "to_q to_k to_v to_out")


def EncoderB(depth: int = 2, attention: Any = _attention_b) -> Any:
    """q, k, v apart, the last norm registered first."""
    block = nn.Sequential(*(_layer(attention()) for _ in range(depth)))
    return net(lambda net, x: net.final_norm(net.block(x)), final_norm=nn.LayerNorm(8), block=block)


def EncoderC() -> Any:
    """Registered as k, v, q, out, as fairseq does."""
    return EncoderB(attention=lambda: _attention("q_proj", "k_proj", "v_proj", "out_proj", "k_proj v_proj q_proj out_proj"))


def EncoderD() -> Any:
    """q, k, v, out in a list: which is which only the code says."""
    return EncoderB(attention=lambda: nn.ModuleDict({"linears": listed(lambda: nn.Linear(8, 8), 4)}))


# --- gated layers


def GatedA() -> Any:
    """Two blocks with w1 (gate), w2 (down), w3 (up), as in the first Llama."""

    def computed(net: Any, x: Tensor) -> Tensor:
        for layer in net.layers:
            x = x + layer["w2"](F.silu(layer["w1"](x)) * layer["w3"](x))
        return x

    return net(computed, layers=listed(lambda: plain(w1=(8, 12), w2=(12, 8), w3=(8, 12))))


def GatedB() -> Any:
    """Gate and up in one matrix."""

    def computed(net: Any, x: Tensor) -> Tensor:
        for block in net.blocks:
            gate, up = block["gate_up_proj"](x).chunk(2, -1)
            x = x + block["down_proj"](F.silu(gate) * up)
        return x

    return net(computed, blocks=listed(lambda: plain(gate_up_proj=(8, 24), down_proj=(12, 8))))


# --- matrices as [in, out]


class _Conv1D(nn.Module):
    """GPT-2's linear layer."""

    def __init__(self, inputs: int, outputs: int) -> None:
        super().__init__()
        self.weight, self.bias = nn.Parameter(torch.zeros(inputs, outputs)), nn.Parameter(torch.zeros(outputs))

    def forward(self, x: Tensor) -> Tensor:
        return x @ self.weight + self.bias


def TransposedA(linear: Any = _Conv1D) -> Any:
    """The names of GPT-2; c_proj is square, so that nothing shows how it is kept."""

    def computed(net: Any, x: Tensor) -> Tensor:
        for layer in net.h:
            x = x + layer["c_out"](F.gelu(layer["c_fc"](layer["c_proj"](x))))
        return x

    sizes = {"c_proj": (8, 8), "c_fc": (8, 20), "c_out": (20, 8)}
    return net(computed, h=listed(lambda: nn.ModuleDict({name: linear(*size) for name, size in sizes.items()})))


def TransposedB() -> Any:
    """The same, even in its names, with `nn.Linear`."""
    return TransposedA(nn.Linear)


# --- tied embeddings


def LanguageA() -> Any:
    """The output layer is tied to the embedding."""
    made = net(
        lambda net, x: net.lm_head(net.ln_f(net.wte(x))), wte=nn.Embedding(12, 8), ln_f=nn.LayerNorm(8),
        lm_head=nn.Linear(8, 12, bias=False),
    )  # fmt: skip
    made.lm_head.weight = made.wte.weight
    return made


def LanguageB() -> Any:
    """Under other names, the output layer first."""
    made = net(
        lambda net, x: net.output(net.norm(net.tokens(x))), output=nn.Linear(8, 12, bias=False), norm=nn.LayerNorm(8),
        tokens=nn.Embedding(12, 8),
    )  # fmt: skip
    made.output.weight = made.tokens.weight
    return made


# --- two kinds of attention


def _part(*, grid: bool) -> Any:
    """Attention inside groups of tokens: those beside each other, or those at equal distances."""

    def computed(part: Any, x: Tensor) -> Tensor:
        y = part.norm(x).reshape(x.shape[0], 2, -1, 8)
        y = y.transpose(1, 2) if grid else y
        y = torch.stack([part.attn(group) for group in y.unbind(1)], 1)
        return x + (y.transpose(1, 2) if grid else y).reshape(x.shape)

    return net(computed, norm=nn.LayerNorm(8), attn=_attention_b())


def _windows(place: str, called: str, **grids: bool) -> Any:
    def computed(net: Any, x: Tensor) -> Tensor:
        for block in net.get_submodule(place):
            for name in called.split():
                x = block[name](x)
        return x

    return net(computed, **{place: listed(lambda: nn.ModuleDict({name: _part(grid=grid) for name, grid in grids.items()}))})


def WindowsA() -> Any:
    """Window before grid attention, named so."""
    return _windows("blocks", "window_attention grid_attention", window_attention=False, grid_attention=True)


def WindowsB() -> Any:
    """Grid attention registered first, and words of its own."""
    return _windows("stages", "attn_block attn_grid", attn_grid=True, attn_block=False)
