"""Nothing is lost: what a conversion opens it writes, leaves out by the user's word, or refuses by name."""

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

import ckpt_tools
import ckpt_tools.torch
from tests.support.commands import ckpt


def training() -> dict[str, Any]:
    """Ties, views on one storage, a sparse tensor, an optimizer, tensors outside state dicts."""
    whole = torch.randn(6, 4)
    weights = {"a.weight": whole[:3], "b.weight": whole[3:], "tied.weight": whole[:3], "s.weight": torch.eye(3).to_sparse()}
    state = {0: {"exp_avg": torch.ones(3, 4)}}
    optimizer = {"state": state, "param_groups": [{"params": [0, 1, 2, 3]}]}
    return {"model": weights, "optimizer": optimizer, "queue": torch.ones(2), "rows": (torch.zeros(1),), "epoch": 3}


OPTIONS: list[dict[str, Any]] = [
    {}, {"select": "model"}, {"drop": ["optimizer", "queue", "b.*"]}, {"keep": "a.*", "drop": "optimizer"},
    {"dtype": "bf16", "rename": "^a\\.=z."}, {"slim": True, "dtype": "fp16"}, {"map_location": "cuda"},
    {"objects": "plain", "add_prefix": "net."}, {"format": "pth-legacy"},
    {"drop": "s.*", "format": "dcp"},
    {"select": "model", "drop": "s.*", "format": "safetensors"}, {"select": "model", "drop": "s.*", "shard_size": "1KB"},
]  # fmt: skip


@pytest.mark.parametrize("options", OPTIONS, ids=str)
def test_honest_conversions_come_out_even(options: dict[str, Any], tmp_path: Path) -> None:
    """The number of tensors in the report is that of the output, whatever was asked for."""
    torch.save(training(), tmp_path / "in.pth")
    report = ckpt_tools.convert(tmp_path / "in.pth", tmp_path / "out", **{"format": "pth", **options})
    assert report.tensors == ckpt_tools.inspect(tmp_path / "out").totals["tensors"]


def test_renamed_names_are_tensors(tmp_path: Path) -> None:
    """Extra state that moves with its module is no tensor: two of two are renamed, never three."""
    state = {"module.a.weight": torch.ones(2, 2), "module.a.bias": torch.ones(2), "module.a._extra_state": {"k": 1}}
    torch.save({"model": state}, tmp_path / "in.pth")
    report = ckpt_tools.convert(tmp_path / "in.pth", tmp_path / "out.pth", strip_module=True)
    assert [(row.tensors, row.renamed) for row in report.state_dicts] == [(2, 2)]
    assert list(torch.load(tmp_path / "out.pth")["model"]) == ["a.weight", "a.bias", "a._extra_state"]
    assert "2 of 2" in ckpt("convert", tmp_path / "in.pth", tmp_path / "again.pth", "--strip-module").output


def test_a_module_of_one_number_and_extra_state(tmp_path: Path) -> None:
    """A single number beside what `get_extra_state` gave is a parameter, and no score; the extra state is said."""
    torch.save({"param": torch.tensor(3.0), "_extra_state": {"custom_key": 123}}, tmp_path / "in.pth")
    report = ckpt_tools.convert(tmp_path / "in.pth", tmp_path / "out.safetensors")
    assert {name: tensor.item() for name, tensor in load_file(tmp_path / "out.safetensors").items()} == {"param": 3.0}
    assert [note.code for note in report.notes] == ["extra-state"]


def test_load_into_says_what_lies_beside(tmp_path: Path) -> None:
    """Tensors of the file outside the state dict that is loaded are named."""
    model = torch.nn.Linear(3, 2)
    torch.save({"model": model.state_dict(), "queue": torch.ones(5)}, tmp_path / "in.pth")
    assert ckpt_tools.torch.load_into(model, tmp_path / "in.pth").notes == ["beside 'model', and not loaded: 'queue'"]
    torch.save(model.state_dict(), tmp_path / "alone.pth")
    assert not ckpt_tools.torch.load_into(model, tmp_path / "alone.pth").notes
