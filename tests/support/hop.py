"""A run of eight steps that moves between frameworks half-way: the network, its batches, and a step, the same for each."""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

STEPS = 8
SAMPLES = 8  # of a step, over all ranks


class Net(nn.Module):
    """Sizes that two and four ranks do not divide."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(6, 13)
        self.norm = nn.LayerNorm(13)
        self.last = nn.Linear(13, 5)

    def forward(self, x: Tensor) -> Tensor:
        logits: Tensor = self.last(F.relu(self.norm(self.first(x))))
        return logits


def net() -> Net:
    """The network as every run begins."""
    torch.manual_seed(0)
    return Net()


def adamw(model: nn.Module) -> torch.optim.AdamW:
    """Its optimizer, whose steps are large enough to tell a lost state from a kept one."""
    return torch.optim.AdamW(model.parameters(), lr=3e-2)


def batch(step: int, rank: int, world: int) -> tuple[Tensor, Tensor]:
    """This rank's images and labels of one step."""
    generator = torch.Generator().manual_seed(step)
    images = torch.randn(SAMPLES, 6, generator=generator)
    labels = torch.randint(5, (SAMPLES,), generator=generator)
    return images.chunk(world)[rank], labels.chunk(world)[rank]
