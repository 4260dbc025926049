"""Every network in every mode of one process: trained on digits, saved, resumed; the saves equal after unwrapping."""

from collections.abc import Callable
from pathlib import Path

import pytest

from tests.train.runs import NETWORKS, run, same

pytestmark = pytest.mark.matrix


@pytest.mark.parametrize("model", NETWORKS)
def test_single_dp_and_one_rank_are_equal_and_resume_each_other(
    model: str, tmp_path: Path, only_rank: Callable[[], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    options = {"model": model, **NETWORKS[model]}
    single = run(tmp_path / "single", epochs=2, **options)
    wrapped = run(tmp_path / "dp", epochs=2, parallel="dp", save="wrapped", **options)
    assert same(single, run(tmp_path / "a", parallel="single", resume=str(tmp_path / "dp" / "epoch_001.pth")))
    assert same(single, run(tmp_path / "b", resume=str(tmp_path / "single" / "epoch_001.pth"), parallel="dp"))
    only_rank()
    ranked = run(tmp_path / "ddp", epochs=2, parallel="ddp", save="wrapped", **options)
    assert same(single, wrapped)
    assert same(single, ranked)
    only_rank()
    assert same(single, run(tmp_path / "c", resume=str(tmp_path / "dp" / "epoch_001.pth"), parallel="ddp"))
