"""Keras's HDF5: as h5py reads it, and what is said where h5py is missing."""

import sys
from pathlib import Path

import numpy as np
import pytest

import ckpt_tools
import ckpt_tools.torch
from ckpt_tools.errors import DamagedFileError, UnsupportedContainerError
from tests.support.samples import FIXTURES

HERE = FIXTURES / "frameworks"


@pytest.mark.parametrize("name", ["tiny.weights.h5", "tiny.keras"])
def test_without_h5py(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The error names the extra."""
    monkeypatch.setitem(sys.modules, "h5py", None)
    with pytest.raises(UnsupportedContainerError, match=r"pip install h5py"):
        ckpt_tools.inspect(HERE / name)


def test_weights() -> None:
    """Every array is what h5py reads, under its path with dots."""
    h5py = pytest.importorskip("h5py")
    made = ckpt_tools.torch.load(HERE / "tiny.weights.h5")
    assert "layers.conv2d.vars.0" in made
    with h5py.File(HERE / "tiny.weights.h5") as file:
        assert all(np.array_equal(file[name.replace(".", "/")][()], tensor.numpy()) for name, tensor in made.items())


def test_a_whole_model(tmp_path: Path) -> None:
    """The weights in a `.keras` are selected by their member."""
    pytest.importorskip("h5py")
    ckpt_tools.convert(HERE / "tiny.keras", tmp_path / "out.safetensors", select="model.weights.h5")
    assert ckpt_tools.inspect(tmp_path / "out.safetensors").totals["tensors"] == 8


def test_chunks_and_byte_orders(tmp_path: Path) -> None:
    """Compressed chunks, big-endian numbers, scalars, nothing at all; text is left out."""
    h5py = pytest.importorskip("h5py")
    with h5py.File(tmp_path / "x.h5", "w") as file:
        file.create_dataset("chunked", data=np.arange(1000.0).reshape(50, 20), chunks=(10, 20), compression="gzip")
        file.create_dataset("big", data=np.arange(6, dtype=">f4").reshape(2, 3))
        file.create_dataset("scalar", data=np.float32(2))
        file.create_dataset("none", data=np.ones((0, 3)))
        file.create_dataset("text", data="hello")
    made = ckpt_tools.torch.load(tmp_path / "x.h5")
    assert made["chunked"].flatten().tolist() == list(range(1000))
    assert (made["big"].tolist(), made["scalar"].item(), made["none"].shape) == ([[0, 1, 2], [3, 4, 5]], 2.0, (0, 3))
    assert [finding.code for finding in ckpt_tools.inspect(tmp_path / "x.h5").findings] == ["left-out"]


def test_a_cut_file(tmp_path: Path) -> None:
    """HDF5's own error becomes ours."""
    pytest.importorskip("h5py")
    (tmp_path / "x.h5").write_bytes((HERE / "tiny.weights.h5").read_bytes()[:3000])
    with pytest.raises(DamagedFileError, match="HDF5 cannot read"):
        ckpt_tools.inspect(tmp_path / "x.h5")
