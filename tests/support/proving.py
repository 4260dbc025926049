"""Networks that compute the same in two ways of writing, and faults that are planted in one of them."""

import math

import torch
from torch import nn
from torch.nn import functional


class Attention(nn.Module):
    """Self-attention with rotary positions and a linear layer for each of q, k, v and the output."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.q_proj = nn.Linear(width, width)
        self.k_proj = nn.Linear(width, width)
        self.v_proj = nn.Linear(width, width)
        self.out_proj = nn.Linear(width, width)
        self.heads = heads
        self.scale = 1 / math.sqrt(width // heads)
        self.base = 100.0
        self.flipped = False

    def split(self, x: torch.Tensor) -> torch.Tensor:
        return x.unflatten(-1, (self.heads, -1)).transpose(1, 2)

    def rotated(self, x: torch.Tensor) -> torch.Tensor:
        half = x.shape[-1] // 2
        positions = torch.arange(x.shape[-2], dtype=x.dtype)
        positions = positions.flip(0) if self.flipped else positions
        angles = positions[:, None] * self.base ** (-torch.arange(half, dtype=x.dtype) / half)
        left, right = x[..., :half], x[..., half:]
        return torch.cat([left * angles.cos() - right * angles.sin(), right * angles.cos() + left * angles.sin()], -1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        q, k, v = (self.split(layer(x)) for layer in (self.q_proj, self.k_proj, self.v_proj))
        weights = (self.rotated(q) @ self.rotated(k).transpose(-1, -2) * self.scale).softmax(-1)
        return self.out_proj((weights @ v).transpose(1, 2).flatten(2))


class Block(nn.Module):
    """A transformer's block; the activation between the two linear layers is a function."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.norm1 = nn.LayerNorm(width)
        self.attn = Attention(width, heads)
        self.norm2 = nn.LayerNorm(width)
        self.fc1 = nn.Linear(width, 2 * width)
        self.fc2 = nn.Linear(2 * width, width)
        self.tanh = False

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x + self.attn(self.norm1(x))
        return x + self.fc2(functional.gelu(self.fc1(self.norm2(x)), approximate="tanh" if self.tanh else "none"))


class Text(nn.Module):
    """Tokens and learned positions, two blocks, a head."""

    def __init__(self, width: int = 16, heads: int = 4) -> None:
        super().__init__()
        self.tokens = nn.Embedding(50, width)
        self.positions = nn.Parameter(torch.randn(8, width))
        self.blocks = nn.Sequential(Block(width, heads), Block(width, heads))
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, 50)
        self.reversed = False

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        positions = self.positions.flip(0) if self.reversed else self.positions
        return self.head(self.norm(self.blocks(self.tokens(ids) + positions[: ids.shape[1]])))


class RenamedBlock(nn.Module):
    """The same block: q, k and v are rows of one layer, the activation is a module, names are others."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.ln_1, self.ln_2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.attention = Attention(width, heads)
        self.mlp = nn.Sequential(nn.Linear(width, 2 * width), nn.GELU(), nn.Linear(2 * width, width))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x + self.attention(self.ln_1(x))
        return x + self.mlp(self.ln_2(x))


class RenamedText(nn.Module):
    """The same network under other names, in other modules."""

    def __init__(self, width: int = 16, heads: int = 4) -> None:
        super().__init__()
        self.wte = nn.Embedding(50, width)
        self.wpe = nn.Parameter(torch.randn(8, width))
        self.h = nn.ModuleList(RenamedBlock(width, heads) for _ in range(2))
        self.ln_f = nn.LayerNorm(width)
        self.lm_head = nn.Linear(width, 50)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        x = self.wte(ids) + self.wpe[: ids.shape[1]]
        for block in self.h:
            x = block(x)
        return self.lm_head(self.ln_f(x))


class Image(nn.Module):
    """Two convolutions with norms, a shortcut, a head."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Sequential(nn.Conv2d(3, 8, 3, padding=1), nn.BatchNorm2d(8), nn.ReLU())
        self.body = nn.Sequential(nn.Conv2d(8, 8, 3, padding=1), nn.BatchNorm2d(8), nn.ReLU())
        self.mix = nn.Linear(8, 8)
        self.head = nn.Linear(8, 5)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.stem(x)
        x = x + self.body(x)
        return self.head(functional.relu(self.mix(x.mean((2, 3)))))


def text_with_another_eps() -> Text:
    """The text network with a fault in its last norm."""
    model = Text()
    model.norm.eps = 1e-3
    return model


def trained(model: nn.Module) -> nn.Module:
    """With numbers as training leaves them: norms that do something."""
    generator = torch.Generator().manual_seed(3)
    with torch.no_grad():
        for name, tensor in model.state_dict().items():
            if tensor.is_floating_point():
                noise = torch.randn(tensor.shape, generator=generator) * 0.3
                tensor.copy_(
                    noise.abs() + 0.5
                    if "norm" in name or "var" in name or (tensor.dim() == 1 and "mean" not in name)
                    else noise
                )
    return model


class WithAux(nn.Module):
    """A linear layer, and a second output."""

    def __init__(self) -> None:
        super().__init__()
        self.fc, self.aux = nn.Linear(4, 4), nn.Linear(4, 4)

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return self.fc(x), self.aux(x)


class WithoutAux(WithAux):
    """The same without the second output."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:  # type: ignore[override]
        return self.fc(x)
