"""One attention by two authors: the same four square matrices, under names that do not say which is the query."""

import torch
from torch import Tensor, nn
from torch.nn import functional as F


class Old(nn.Module):
    """An attention in one call."""

    def __init__(self) -> None:
        super().__init__()
        self.alpha, self.beta, self.gamma, self.delta = (nn.Linear(8, 8) for _ in range(4))

    def forward(self, x: Tensor) -> Tensor:
        rows, length, _ = x.shape
        q, k, v = (layer(x).view(rows, length, 2, 4).transpose(1, 2) for layer in (self.gamma, self.alpha, self.delta))
        found: Tensor = self.beta(F.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2))
        return found


class New(nn.Module):
    """The same, written out."""

    def __init__(self) -> None:
        super().__init__()
        self.w, self.x, self.y, self.z = (nn.Linear(8, 8) for _ in range(4))

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (layer(x).reshape(*x.shape[:2], 2, 4) for layer in (self.w, self.x, self.y))
        scores = torch.einsum("bjhd,bihd->bhij", k, q) / 2
        found: Tensor = self.z(torch.einsum("bhij,bjhd->bihd", scores.softmax(-1), v).flatten(2))
        return found
