"""Small networks in pairs: one computation, names that say nothing, layers of one shape, another order of definition."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from tests.support import attention


class Layers(nn.Module):
    """A network of layers by name, in an order of its author's; `computed` is what it does with them."""

    def __init__(self, layers: dict[str, nn.Module], computed: Callable[..., object]) -> None:
        super().__init__()
        for name, layer in layers.items():
            setattr(self, name, layer)
        self.computed = computed

    def forward(self, *inputs: Tensor) -> object:
        return self.computed(self, *inputs)


def linear(names: str, size: int = 8) -> dict[str, nn.Module]:
    """Square layers of one shape."""
    return {name: nn.Linear(size, size) for name in names.split()}


def _heads(x: Tensor, heads: int = 2) -> Tensor:
    return x.view(*x.shape[:2], heads, -1).transpose(1, 2)


def _joined(x: Tensor) -> Tensor:
    return x.transpose(1, 2).flatten(2)


# --- a chain, called in another order than defined


def chain_a() -> nn.Module:
    """Called c, a, b."""
    return Layers(linear("a b c"), lambda net, x: net.b(F.relu(net.a(F.gelu(net.c(x))))))


def chain_b() -> nn.Module:
    """Called one, two, three."""
    return Layers(linear("three one two"), lambda net, x: net.three(torch.relu(net.two(F.gelu(net.one(x))))))


# --- attention: four square matrices


def attention_a() -> nn.Module:
    """As one operation."""
    return attention.Old()


def attention_b() -> nn.Module:
    """Written out, the keys first and the scores turned around."""
    return attention.New()


def attention_c() -> nn.Module:
    """One layer for three: rows of q, k and v in another order."""

    def computed(net: Any, x: Tensor) -> Tensor:
        v, q, k = map(_heads, net.inner(x).chunk(3, dim=-1))
        return net.outer((((q * 0.5) @ k.mT).softmax(-1) @ v).transpose(1, 2).reshape(x.shape))

    return Layers({"outer": nn.Linear(8, 8), "inner": nn.Linear(8, 24)}, computed)


def attention_d() -> nn.Module:
    """One layer for three, cut by a dimension for the three."""

    def computed(net: Any, x: Tensor) -> Tensor:
        q, k, v = net.first(x).view(*x.shape[:2], 3, 2, 4).permute(2, 0, 3, 1, 4)
        return net.second(_joined(F.scaled_dot_product_attention(q, k, v)))

    return Layers({"first": nn.Linear(8, 24), "second": nn.Linear(8, 8)}, computed)


# --- two branches of equal shapes


def branches_a() -> nn.Module:
    """A gate and what it gates."""
    return Layers(linear("l1 l2 l3"), lambda net, x: net.l1(F.silu(net.l2(x)) * net.l3(x)))


def branches_b() -> nn.Module:
    """The same with the factors exchanged."""
    return Layers(linear("p q r"), lambda net, x: net.q(net.p(x) * F.silu(net.r(x))))


# --- a residual block whose shortcut has the shape of the others


def _convolutions(names: str) -> dict[str, nn.Module]:
    layers: dict[str, nn.Module] = {}
    for name in names.split():
        layers[name] = nn.Conv2d(4, 4, 3, padding=1, bias=False)
        layers[f"{name}n"] = nn.BatchNorm2d(4)
    return layers


def residual_a() -> nn.Module:
    """The shortcut is `b`."""

    def computed(net: Any, x: Tensor) -> Tensor:
        y = net.cn(net.c(F.relu(net.an(net.a(x)))))
        return F.relu(y + net.bn(net.b(x)))

    return Layers(_convolutions("a b c"), computed)


def residual_b() -> nn.Module:
    """The shortcut is `u`; the activations are in place."""

    def computed(net: Any, x: Tensor) -> Tensor:
        short = net.un(net.u(x))
        y = F.relu(net.vn(net.v(x)), inplace=True)
        return (short + net.wn(net.w(y))).relu_()

    return Layers(_convolutions("u v w"), computed)


# --- two towers


def towers_a() -> nn.Module:
    """One tower for each input."""
    return Layers(linear("a b c d"), lambda net, x, y: F.cosine_similarity(net.b(net.a(x).relu()), net.c(net.d(y).relu())))


def towers_b() -> nn.Module:
    """The towers defined the other way round."""

    def computed(net: Any, x: Tensor, y: Tensor) -> Tensor:
        other = net.g(net.h(y).relu())
        return F.cosine_similarity(net.f(net.e(x).relu()), other)

    return Layers(linear("g h f e"), computed)


# --- a block with two norms, before attention and before the rest


def _block(names: str, norms: str) -> dict[str, nn.Module]:
    return {**linear(names), **{name: nn.LayerNorm(8) for name in norms.split()}}


def block_a() -> nn.Module:
    """Norms first; a decoder's attention to itself and to a memory."""

    def attend(net: Any, names: str, x: Tensor, y: Tensor) -> Tensor:
        q, k, v, out = (getattr(net, name) for name in names)
        return out(_joined(F.scaled_dot_product_attention(_heads(q(x)), _heads(k(y)), _heads(v(y)))))

    def computed(net: Any, x: Tensor, memory: Tensor) -> Tensor:
        own = net.n1(x)
        x = x + attend(net, "abcd", own, own)
        return x + attend(net, "efgh", net.n2(x), memory)

    return Layers(_block("a b c d e f g h", "n1 n2"), computed)


def block_b() -> nn.Module:
    """The same by torch's own attention, which has one matrix for three."""

    def computed(net: Any, x: Tensor, memory: Tensor) -> Tensor:
        own = net.r(x)
        x = x + net.s(own, own, own, need_weights=False)[0]
        return x + net.t(net.p(x), memory, memory, need_weights=False)[0]

    attentions = {name: nn.MultiheadAttention(8, 2, batch_first=True) for name in "ts"}
    return Layers({**attentions, "p": nn.LayerNorm(8), "r": nn.LayerNorm(8)}, computed)


# --- recurrent layers


def recurrent_a() -> nn.Module:
    """Two of one size, the first called second."""
    return Layers(
        {"a": nn.GRU(8, 8, batch_first=True), "b": nn.GRU(8, 8, batch_first=True)}, lambda net, x: net.a(net.b(x)[0])[0]
    )


def recurrent_b() -> nn.Module:
    """Two of one size in order."""
    return Layers(
        {"x": nn.GRU(8, 8, batch_first=True), "y": nn.GRU(8, 8, batch_first=True)}, lambda net, x: net.y(net.x(x)[0])[0]
    )


# --- a residual stream


class Scaled(nn.Module):
    """A norm by the root of the mean square, written out."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(8))

    def forward(self, x: Tensor) -> Tensor:
        """Numbers of a stream go two ways here."""
        return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-6) * self.weight


def stream_a(depth: int) -> nn.Module:
    """A norm and two layers add to the stream, `depth` times."""

    def computed(net: Any, x: Tensor) -> Tensor:
        layers = [*net.children()]
        for norm, up, down in zip(layers[::3], layers[1::3], layers[2::3], strict=True):
            x = x + down(F.gelu(up(norm(x))))
        return x

    names = [code for block in range(depth) for code in ("n" + letters(block), "u" + letters(block), "d" + letters(block))]
    return Layers({name: Scaled() if name[0] == "n" else nn.Linear(8, 8) for name in names}, computed)


def stream_b(depth: int) -> nn.Module:
    """The same, all layers in the opposite order, and the sum too."""

    def computed(net: Any, x: Tensor) -> Tensor:
        layers = [*net.children()][::-1]
        for norm, up, down in zip(layers[::3], layers[1::3], layers[2::3], strict=True):
            x = down(F.gelu(up(norm(x)))) + x
        return x

    kinds: list[Callable[[], nn.Module]] = [lambda: nn.Linear(8, 8), lambda: nn.Linear(8, 8), Scaled]
    return Layers({f"x{letters(number)}": kinds[number % 3]() for number in range(3 * depth)}, computed)


def letters(number: int) -> str:
    """A number in letters that no order can be read from."""
    return "".join("qzjxkvbpyg"[int(digit)] for digit in f"{number:03d}")
