"""What every test of `train/` may ask for."""

import signal
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.train.runs import meeting_place, run
from train import metrics


@pytest.fixture(scope="package", autouse=True)
def one_thread() -> Iterator[None]:
    """Sums are split by threads: runs are compared bit by bit, so all have one, as torchrun's processes do."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(autouse=True)
def heard() -> Iterator[None]:
    """What starts the tests in the background may have had signals ignored, which a run then leaves so."""
    numbers = [getattr(signal, name) for name in ("SIGINT", "SIGHUP") if hasattr(signal, name)]
    before = [signal.signal(number, signal.SIG_DFL) for number in numbers]
    signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    for number, handler in zip(numbers, before, strict=True):
        signal.signal(number, handler)


@pytest.fixture(scope="package", autouse=True)
def undrawn() -> Iterator[Callable[..., None]]:
    """Drawing the curves takes longer than training: only tests that ask for `curves` have them."""
    draw, metrics.draw = metrics.draw, lambda rows, path: None
    yield draw
    metrics.draw = draw


@pytest.fixture
def curves(undrawn: Callable[..., None], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(metrics, "draw", undrawn)


@pytest.fixture(scope="package")
def whole(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, Any]]:
    """A run of two epochs that was never stopped, and its last checkpoint."""
    folder = tmp_path_factory.mktemp("whole")
    return folder, run(folder, epochs=2)


@pytest.fixture
def only_rank(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[], None]]:
    """Makes this process the only one of a process group, as `torchrun --nproc-per-node 1` would."""
    store, meet = meeting_place()

    def enter() -> None:
        for name, value in {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1", **meet}.items():
            monkeypatch.setenv(name, value)

    yield enter
    del store  # nobody meets any more
