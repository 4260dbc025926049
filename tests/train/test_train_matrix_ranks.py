"""Every network in several processes: trained on digits, saved, resumed; close to a single process after unwrapping."""

from collections.abc import Callable
from functools import cache
from pathlib import Path

import pytest

from ckpt_tools.torch import load_state_dict
from tests.train.runs import NETWORKS, close, last, ranks, run, same

pytestmark = pytest.mark.matrix

# Three ranks are slow on two cores: of the networks without batch statistics one, of those with them the only one.
TRAINED = [(2, model) for model in NETWORKS] + [(3, "lenet"), (3, "resnet18")]


@pytest.fixture(scope="module")
def several(tmp_path_factory: pytest.TempPathFactory) -> Callable[[int], Path]:
    """What so many ranks leave behind of every network, trained once."""
    return cache(lambda size: trained(size, tmp_path_factory.mktemp("several")))


def trained(size: int, out: Path) -> Path:
    """Of every network a run, and one that goes on from its first epoch."""
    runs = []
    for model in [model for number, model in TRAINED if number == size]:
        options = {"model": model, **NETWORKS[model], "batch_size": 96}
        spelled = [part for key, value in options.items() for part in (f"--{key.replace('_', '-')}", str(value))]
        runs.append([*spelled, "--epochs", "2", "--save", "wrapped", "--out", f"{out}/{model}/whole"])
        runs.append(["--resume", f"{out}/{model}/whole/epoch_001.pth", "--out", f"{out}/{model}/resumed"])
        if size == 2:
            fsdp = ["--parallel", "fsdp", "--out", f"{out}/{model}/fsdp", "--save"]
            runs.append([*fsdp, "dcp", "--resume", f"{out}/{model}/whole/epoch_001.pth"])
            runs.append([*fsdp, "ranks", "--resume", "latest", "--epochs", "3"])
    ranks(size, *runs)
    return out


@pytest.mark.parametrize(("size", "model"), TRAINED)
def test_several_ranks_train_resume_exactly_and_agree(
    size: int, model: str, several: Callable[[int], Path], tmp_path: Path
) -> None:
    """Batch normalisation takes the statistics of a rank's own samples, so that weights differ from a single run's."""
    out = several(size) / model
    whole = last(out / "whole")
    assert same(whole, last(out / "resumed"))
    if model != "resnet18":
        single = run(tmp_path / "single", model=model, epochs=2, **NETWORKS[model] | {"batch_size": 96})
        assert close(single, whole, tolerance=1e-3)
    assert run(tmp_path / "one", parallel="single", resume=str(out / "whole" / "epoch_001.pth"))["epoch"] == 2
    if (out / "fsdp").exists():
        assert close(whole, {"model": load_state_dict(out / "fsdp" / "epoch_002", select="model")}, tolerance=1e-3)
        assert run(tmp_path / "parts", parallel="single", resume=str(out / "fsdp" / "epoch_003"), epochs=4)["epoch"] == 4
