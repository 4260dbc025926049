"""A training run moves between FSDP2, DDP and DeepSpeed half-way, and its losses are those of one that did not."""

import json

import pytest

from tests.support.job import ROOT, job

ZERO = ROOT / "fixtures" / "deepspeed" / "hop"  # four steps under ZeRO-3 on two ranks: fixtures/makers/zero_hop.py
WAYS = ("rank files -> dcp -> FSDP2", "rank files -> .pth -> DDP -> FSDP2", "ZeRO-3 -> dcp -> FSDP2")


@pytest.fixture(scope="module")
def losses(tmp_path_factory: pytest.TempPathFactory) -> dict[str, list[float]]:
    """Of eight steps each, as one job of four ranks over gloo trains them; see tests/support/hop_job.py."""
    out = tmp_path_factory.mktemp("hop")
    done = job(4, "tests/support/hop_job.py", ZERO, out)
    assert done.returncode == 0, done.stderr
    found: dict[str, list[float]] = json.loads((out / "losses.json").read_text())
    return found


@pytest.mark.parametrize("way", WAYS)
def test_losses_after_a_hop_are_those_of_the_unbroken_run(way: str, losses: dict[str, list[float]]) -> None:
    """From two ranks to four: sums of another order, so that the last digit of a float32 may differ, and no more."""
    assert losses["unbroken"][-1] != pytest.approx(losses["unbroken"][-2], abs=0.1)
    assert losses[way] == pytest.approx(losses["unbroken"][-len(losses[way]) :], abs=5e-7)
    assert len(losses[way]) == (4 if way.startswith("ZeRO") else 8)


def test_deepspeed_trained_the_same_run(losses: dict[str, list[float]]) -> None:
    """Its own losses, of all eight steps without a hop."""
    assert json.loads((ZERO / "losses.json").read_text()) == pytest.approx(losses["unbroken"], abs=5e-7)
