"""Two real processes (tests/support/fsdp_job.py): what they save and load of ours, and we of theirs."""

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from ckpt_tools import convert
from ckpt_tools.errors import ChecksumError
from ckpt_tools.torch import load_state_dict
from tests.support.damage import flip_bit
from tests.support.job import job
from tests.support.rank_files import net

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Where the job has run, with a dcp that we wrote before."""
    folder = tmp_path_factory.mktemp("job")
    torch.manual_seed(1)
    model = nn.Sequential(nn.Linear(6, 5), nn.Linear(5, 4, dtype=torch.float64)).state_dict()
    columns = torch.arange(21.0).view(3, 7)
    torch.save({"model": model, "columns": columns, "tied": model["0.weight"], "epoch": 7}, folder / "in.pth")
    assert convert(folder / "in.pth", folder / "ours", format="dcp").aliases == {"tied": "model.0.weight"}
    done = job(2, "tests/support/fsdp_job.py", folder)
    assert done.returncode == 0, done.stderr
    return folder


def test_folders_of_torchs_writer(folder: Path, tmp_path: Path) -> None:
    """FSDP2 and column-sharded tensors loaded what we wrote, resharded; what they saved we put together again."""
    model: dict[str, Any] = torch.load(folder / "in.pth")
    convert(folder / "theirs", tmp_path / "out.pth")
    back = torch.load(tmp_path / "out.pth", weights_only=True)
    assert list(back["model"]) == list(model["model"])
    assert all(torch.equal(back["model"][name], tensor) for name, tensor in model["model"].items())
    assert torch.equal(back["columns"], model["columns"])
    assert (back["nested"]["lr"], back["nested"]["list"][1]) == (0.5, {"x": [1, 2]})
    flip_bit(folder / "theirs" / "__1_0.distcp", model["columns"][-1, 4:].numpy().tobytes())
    for out, container in (("flipped.pth", "pth"), ("flipped", "dcp")):
        with pytest.raises(ChecksumError, match=r"of a chunk of 'columns' in __1_0\.distcp"):
            convert(folder / "theirs", tmp_path / out, format=container)  # type: ignore[arg-type]
        assert not (tmp_path / out).exists()


def test_a_job_saves_and_loads(folder: Path) -> None:
    """`save` wrote the whole model once, and `load_into` gave each rank of an FSDP2 model its part."""
    expected = net().state_dict()
    for name in ("model.pth", "model.safetensors"):
        saved = load_state_dict(folder / name)
        assert all(torch.equal(saved[key], value) for key, value in expected.items())
    assert saved["head.weight"].data_ptr() == saved["emb.weight"].data_ptr()
    optimizer = torch.load(folder / "training.pth", weights_only=True)["optimizer"]
    assert optimizer["state"][0]["exp_avg"].shape == (13, 7)
