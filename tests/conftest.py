"""What several test files share: small checkpoints, made by torch itself."""

import os
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import fsspec
import pytest
import torch
from hypothesis import settings
from torch import nn

from tests.support.servers import Server

# No test is about time: the machine may be busy. The same examples in every run, unless HYPOTHESIS_PROFILE=explore.
settings.register_profile("steady", deadline=None, derandomize=True)
settings.register_profile("explore", deadline=None)
settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE", "steady"))


# Files that take ten seconds or more, the longest first, so that all workers end at about the same time.
LONG = (
    "test_bombs", "test_golden", "test_train_ranks", "test_hostile_folder", "test_without_torch", "test_train_restarts",
    "test_properties", "test_docs", "test_train_checkpoints", "test_frameworks", "test_train_more",
    "test_fuzz", "test_match_structure", "test_dcp", "test_hostile_writing", "test_train_folder",
    "test_writer", "test_faults", "test_parts", "test_hostile_processes", "test_honest_files", "test_processes", "test_hop",
)  # fmt: skip


def pytest_configure(config: pytest.Config) -> None:
    """pytest-xdist begins with the files of the most tests unless it is told not to."""
    config.option.loadscopereorder = False


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    places = {name: place for place, name in enumerate(LONG)}
    items.sort(key=lambda item: places.get(item.path.stem, len(LONG)))


def small_model() -> nn.Module:
    """A convolution, a batch norm (with buffers) and a linear layer."""
    torch.manual_seed(0)
    return nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.Flatten(), nn.Linear(4, 2))


@pytest.fixture
def training_file(tmp_path: Path) -> Path:
    """A training checkpoint: wrapped model, optimizer with state, epoch."""
    path = tmp_path / "training.pth"
    model: Any = nn.DataParallel(small_model())
    optimizer = torch.optim.Adam(model.parameters())
    model.module[3](torch.ones(1, 4)).sum().backward()
    optimizer.step()
    torch.save({"model": model.state_dict(), "optimizer": optimizer.state_dict(), "epoch": 3, "best_acc": 0.5}, path)
    return path


@pytest.fixture
def server(tmp_path: Path) -> Iterator[Server]:
    """A server on the test's folder."""
    served = Server(tmp_path)
    thread = threading.Thread(target=served.serve_forever, args=(0.01,), daemon=True)
    thread.start()
    yield served
    served.shutdown()
    served.server_close()
    thread.join()


@pytest.fixture
def memory() -> Iterator[Any]:
    """fsspec's file system in memory, empty before and after."""
    found = fsspec.filesystem("memory")
    found.store.clear()
    found.pseudo_dirs[:] = [""]
    yield found
    found.store.clear()
    found.pseudo_dirs[:] = [""]
