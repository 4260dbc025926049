"""Every network in several processes: trained on digits, saved, resumed; close to a single process after unwrapping."""

from pathlib import Path

import pytest

from ckpt_tools.torch import load_state_dict
from tests.train.runs import NETWORKS, close, last, ranks, run, same

pytestmark = pytest.mark.matrix

# Three ranks are slow on two cores: of the networks without batch statistics one, of those with them the only one.
TRAINED = [(2, model) for model in NETWORKS] + [(3, "lenet"), (3, "resnet18")]


@pytest.fixture(scope="module")
def several(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What several ranks leave behind of every network: a run, and one that goes on from its first epoch."""
    out = tmp_path_factory.mktemp("several")
    runs = []
    for model in [model for size, model in TRAINED if size == request.param]:
        options = {"model": model, **NETWORKS[model], "batch_size": 96}
        spelled = [part for key, value in options.items() for part in (f"--{key.replace('_', '-')}", str(value))]
        runs.append([*spelled, "--epochs", "2", "--save", "wrapped", "--out", f"{out}/{model}/whole"])
        runs.append(["--resume", f"{out}/{model}/whole/epoch_001.pth", "--out", f"{out}/{model}/resumed"])
        if request.param == 2:
            fsdp = ["--parallel", "fsdp", "--out", f"{out}/{model}/fsdp", "--save"]
            runs.append([*fsdp, "dcp", "--resume", f"{out}/{model}/whole/epoch_001.pth"])
            runs.append([*fsdp, "ranks", "--resume", "latest", "--epochs", "3"])
    ranks(request.param, *runs)
    return out


@pytest.mark.parametrize(("several", "model"), TRAINED, indirect=["several"])
def test_several_ranks_train_resume_exactly_and_agree(model: str, several: Path, tmp_path: Path) -> None:
    """Batch normalisation takes the statistics of a rank's own samples, so that weights differ from a single run's."""
    whole = last(several / model / "whole")
    assert same(whole, last(several / model / "resumed"))
    if model != "resnet18":
        single = run(tmp_path / "single", model=model, epochs=2, **NETWORKS[model] | {"batch_size": 96})
        assert close(single, whole, tolerance=1e-3)
    assert run(tmp_path / "one", parallel="single", resume=str(several / model / "whole" / "epoch_001.pth"))["epoch"] == 2
    if (several / model / "fsdp").exists():
        assert close(whole, {"model": load_state_dict(several / model / "fsdp" / "epoch_002", select="model")}, tolerance=1e-3)
        assert (
            run(tmp_path / "parts", parallel="single", resume=str(several / model / "fsdp" / "epoch_003"), epochs=4)["epoch"]
            == 4
        )
