"""A fixture for tests of loading code: `pytest_plugins = ["ckpt_tools.torch.pytest_plugin"]` in conftest.py.

def test_our_loader(guard_load):
    model = Net()
    with guard_load(model, allow=["head.*"]):
        our_loader(model, "weights.pth")
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from typing import Any

import pytest


@pytest.fixture
def guard_load() -> Callable[..., AbstractContextManager[Any]]:
    """A block that fails the test where a tensor of the model is not from a file; see `ckpt_tools.torch.guard`."""
    from ckpt_tools.torch.guarding import Guard, guard

    @contextmanager
    def load(model: Any = None, *, files: Sequence[str] = (), allow: Sequence[str] = ()) -> Iterator[Guard]:
        with guard(model, files=files) as seen:
            yield seen
        seen.check(allow=allow)

    return load
