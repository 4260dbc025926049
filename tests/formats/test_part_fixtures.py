"""Genuine folders of parts, made by four ranks of torch itself (fixtures/makers/parts.py), are the model before it was cut."""

from pathlib import Path

import pytest
import torch

import ckpt_tools
from ckpt_tools.torch import load_state_dict

FOLDERS = sorted(path for path in (Path(__file__).parents[2] / "fixtures" / "parts").iterdir() if path.is_dir())
CONTAINERS = {"consolidated": "consolidated", "dcp": "dcp", "loose": "sharded"}


@pytest.mark.parametrize("folder", FOLDERS, ids=lambda folder: folder.name)
def test_the_merged_model_is_the_model_before_it_was_cut(folder: Path, tmp_path: Path) -> None:
    """Bit for bit, written and loaded; and the container is told."""
    reference = torch.load(folder / "reference.pth", weights_only=True)
    assert ckpt_tools.inspect(folder).container == CONTAINERS.get(folder.name, "rank-files")
    ckpt_tools.convert(folder, tmp_path / "out.pth")
    for found in (torch.load(tmp_path / "out.pth", weights_only=True), load_state_dict(folder)):
        assert set(found) == set(reference)
        assert all(torch.equal(found[name], value) and found[name].dtype == value.dtype for name, value in reference.items())
