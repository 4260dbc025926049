"""`ckpt repair` of what is whole and does not load: names, `_metadata`, counters, ties; and holes that are filled."""

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from ckpt_tools import repair
from tests.operations.test_repair import equal


def test_missing_counters(tmp_path: Path) -> None:
    """A strict load_state_dict asks for num_batches_tracked; afterwards it has them. Only batch norms of version 2 get one."""
    network = nn.Sequential(nn.Conv2d(1, 2, 1), nn.BatchNorm2d(2))
    state = network.state_dict()
    del state["1.num_batches_tracked"]
    torch.save(state, tmp_path / "model.pth")
    with pytest.raises(RuntimeError, match="num_batches_tracked"):
        network.load_state_dict(torch.load(tmp_path / "model.pth"))
    report = repair(tmp_path / "model.pth", tmp_path / "out.pth")
    assert [row.code for row in report.mended] == ["num-batches-tracked"]
    after = torch.load(tmp_path / "out.pth")
    network.load_state_dict(after)
    assert after["1.num_batches_tracked"].dtype == torch.int64
    state._metadata["1"]["version"] = 3  # type: ignore[attr-defined]
    torch.save(state, tmp_path / "frozen.pth")
    assert not repair(tmp_path / "frozen.pth", tmp_path / "out2.pth").mended


def test_double_prefix(tmp_path: Path) -> None:
    """module.module. is what DataParallel around DataParallel, or a script's mistake, leaves."""
    network = nn.Linear(2, 2)
    torch.save({f"module.module.fc.{name}": value for name, value in network.state_dict().items()}, tmp_path / "model.pth")
    report = repair(tmp_path / "model.pth", tmp_path / "out.pth")
    assert [row.code for row in report.mended] == ["double-prefix"]
    assert list(torch.load(tmp_path / "out.pth")) == ["fc.weight", "fc.bias"]
    torch.save({"module.fc.weight": torch.ones(1)}, tmp_path / "single.pth")
    assert not repair(tmp_path / "single.pth", tmp_path / "out2.pth").mended


def test_mixed_prefixes(tmp_path: Path) -> None:
    """`module.` on half of a module's tensors is a mistake; in front of a module of its own it may be the model's."""
    torch.save({"module.fc.weight": torch.ones(1), "fc.bias": torch.ones(1)}, tmp_path / "model.pth")
    report = repair(tmp_path / "model.pth", tmp_path / "out.pth")
    assert [(row.code, row.left) for row in report.mended] == [("mixed-prefix", False)]
    assert list(torch.load(tmp_path / "out.pth")) == ["fc.weight", "fc.bias"]
    torch.save({"module.fc.weight": torch.ones(1), "head.bias": torch.ones(1)}, tmp_path / "own.pth")
    report = repair(tmp_path / "own.pth", tmp_path / "out2.pth")
    assert [(row.code, row.left) for row in report.mended] == [("mixed-prefix", True)]
    assert list(torch.load(tmp_path / "out2.pth")) == ["module.fc.weight", "head.bias"]
    torch.save({"module.a.w": torch.ones(1), "a.b": torch.ones(1), "a.w": torch.zeros(1)}, tmp_path / "both.pth")
    assert [row.left for row in repair(tmp_path / "both.pth", tmp_path / "out3.pth").mended] == [True]
    torch.save({"_orig_mod.a.w": torch.ones(1), "b.w": torch.ones(1)}, tmp_path / "compiled.pth")
    repair(tmp_path / "compiled.pth", tmp_path / "out4.pth")
    assert list(torch.load(tmp_path / "out4.pth")) == ["a.w", "b.w"]


@pytest.mark.parametrize("wrapped", [True, False])
def test_stale_metadata(tmp_path: Path, wrapped: bool) -> None:
    """A script renamed the tensors and left `_metadata` behind: the versions reach their modules again."""
    network = nn.Sequential(nn.Conv2d(1, 2, 1), nn.BatchNorm2d(2))
    state = (nn.DataParallel(network) if wrapped else network).state_dict()
    for name in list(state):
        new = name.removeprefix("module.") if wrapped else f"module.{name}"
        state[new] = state.pop(name)
    torch.save(state, tmp_path / "model.pth")
    report = repair(tmp_path / "model.pth", tmp_path / "out.pth")
    assert [row.code for row in report.mended] == ["stale-metadata"]
    after = torch.load(tmp_path / "out.pth")._metadata
    assert after["1" if wrapped else "module.1"] == {"version": 2}
    assert not repair(tmp_path / "out.pth", tmp_path / "again.pth").mended


def test_stale_metadata_that_another_state_dict_shares(tmp_path: Path) -> None:
    """`clean._metadata = wrapped._metadata`: the rows of the clean one are mended, those of the wrapped one stay."""
    wrapped: Any = nn.DataParallel(nn.Sequential(nn.Linear(1, 1), nn.BatchNorm1d(1))).state_dict()
    clean = type(wrapped)((name.removeprefix("module."), tensor) for name, tensor in wrapped.items())
    clean._metadata = wrapped._metadata
    torch.save({"wrapped": wrapped, "clean": clean}, tmp_path / "in.pth")
    assert [row.where for row in repair(tmp_path / "in.pth", tmp_path / "out.pth").mended] == [["clean"]]
    loaded = torch.load(tmp_path / "out.pth")
    assert loaded["wrapped"]._metadata == wrapped._metadata
    assert list(loaded["clean"]._metadata) == ["", "0", "1"]


def test_ties_only_when_asked(tmp_path: Path) -> None:
    """Equal matrices share their bytes only with --tie-equal; vectors and zeros never do."""
    table = torch.randn(40, 8)
    tensors = {
        "embed.weight": table, "head.weight": table.clone(), "a.bias": torch.ones(8), "b.bias": torch.ones(8),
        "c.weight": torch.zeros(4, 4), "d.weight": torch.zeros(4, 4),
    }  # fmt: skip
    torch.save(tensors, tmp_path / "model.pth")
    assert not repair(tmp_path / "model.pth", tmp_path / "out.pth").mended
    report = repair(tmp_path / "model.pth", tmp_path / "tied.pth", tie_equal=True)
    assert [row.code for row in report.mended] == ["tied"]
    after = torch.load(tmp_path / "tied.pth")
    assert after["embed.weight"].data_ptr() == after["head.weight"].data_ptr()
    assert after["a.bias"].data_ptr() != after["b.bias"].data_ptr()
    assert after["c.weight"].data_ptr() != after["d.weight"].data_ptr()
    assert equal(after, tensors)
