"""Every network in every mode: trained on digits, saved, resumed; the saves equal after unwrapping."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.train.runs import close, last, ranks, run, same

NETWORKS: dict[str, dict[str, Any]] = {
    "mlp": {},
    "lenet": {"lr": 0.01},
    "cnn": {"width": 0.03, "batch_size": 128, "lr": 0.01},
    "resnet18": {"width": 0.2, "batch_size": 128},
}

pytestmark = pytest.mark.matrix


@pytest.mark.parametrize("model", NETWORKS)
def test_single_dp_and_one_rank_are_equal_and_resume_each_other(
    model: str, tmp_path: Path, only_rank: Callable[[], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    options = {"model": model, **NETWORKS[model]}
    single = run(tmp_path / "single", epochs=2, **options)
    wrapped = run(tmp_path / "dp", epochs=2, parallel="dp", save="wrapped", **options)
    assert same(single, run(tmp_path / "a", resume=str(tmp_path / "dp" / "epoch_001.pth")))
    assert same(single, run(tmp_path / "b", resume=str(tmp_path / "single" / "epoch_001.pth"), parallel="dp"))
    only_rank()
    ranked = run(tmp_path / "ddp", epochs=2, parallel="ddp", save="wrapped", **options)
    assert same(single, wrapped)
    assert same(single, ranked)
    only_rank()
    assert same(single, run(tmp_path / "c", resume=str(tmp_path / "dp" / "epoch_001.pth"), parallel="ddp"))


@pytest.mark.parametrize("size", [2, 3])
@pytest.mark.parametrize("model", NETWORKS)
def test_several_ranks_train_resume_exactly_and_agree(model: str, size: int, tmp_path: Path) -> None:
    """Batch normalisation takes the statistics of a rank's own samples, so that weights differ from a single run's."""
    options = {"model": model, **NETWORKS[model], "batch_size": 96}
    spelled = [part for key, value in options.items() for part in (f"--{key.replace('_', '-')}", str(value))]
    ranks(
        size,
        [*spelled, "--epochs", "2", "--save", "wrapped", "--out", f"{tmp_path}/whole"],
        ["--resume", f"{tmp_path}/whole/epoch_001.pth", "--out", f"{tmp_path}/resumed"],
    )
    whole = last(tmp_path / "whole")
    assert same(whole, last(tmp_path / "resumed"))
    if model != "resnet18":
        assert close(run(tmp_path / "single", epochs=2, **options), whole, tolerance=1e-3)
    assert run(tmp_path / "one", resume=str(tmp_path / "whole" / "epoch_001.pth"))["epoch"] == 2
