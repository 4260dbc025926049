"""The same random numbers for whoever draws some, and the caller's own afterwards."""

from __future__ import annotations

import contextlib
import random
import sys
from collections.abc import Iterator

import torch


@contextlib.contextmanager
def seeded(seed: int) -> Iterator[None]:
    """torch, Python and numpy draw from this seed in here; afterwards they go on as if nothing had been."""
    numpy = sys.modules.get("numpy")
    of_python, of_numpy = random.getstate(), numpy.random.get_state() if numpy else None
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        random.seed(seed)
        if numpy:
            numpy.random.seed(seed % 2**32)
        try:
            yield
        finally:
            random.setstate(of_python)
            if numpy and of_numpy is not None:
                numpy.random.set_state(of_numpy)
