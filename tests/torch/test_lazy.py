"""`ckpt_tools.open`: tensors one by one, as they are asked for."""

import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

import ckpt_tools
from ckpt_tools.errors import NothingMatchedError, UsageError

STATE = {"a.weight": torch.rand(3, 4), "b": torch.arange(5), "half": torch.rand(2).bfloat16()}


def save_in(folder: Path, kind: str) -> Path:
    """The tensors in a container."""
    path = folder / f"m.{kind}"
    if kind == "safetensors":
        save_file(STATE, path)
    else:
        torch.save({"epoch": 1, "model": STATE}, path, _use_new_zipfile_serialization=kind == "pth")
    return path


@pytest.mark.parametrize("kind", ["pth", "pt", "safetensors"])
def test_a_tensor_at_a_time(kind: str, tmp_path: Path) -> None:
    """It is a mapping of the names in the file; shapes and dtypes are told, and what was read stays."""
    with ckpt_tools.open(save_in(tmp_path, kind)) as file:
        assert list(file) == list(file.keys())
        assert set(file) == set(STATE)
        assert (len(file), "b" in file, "c" in file) == (3, True, False)
        assert [(file.shape(name), file.dtype(name)) for name in STATE] == [
            ((3, 4), "float32"), ((5,), "int64"), ((2,), "bfloat16"),
        ]  # fmt: skip
        found = dict(file.items())
    assert all(torch.equal(found[name], value) and found[name].dtype is value.dtype for name, value in STATE.items())
    with pytest.raises(UsageError, match="is closed"):
        file["b"]
    assert file.shape("b") == (5,)
    with pytest.raises(KeyError):
        file["c"]


def test_one_of_several(tmp_path: Path) -> None:
    """Where there are several state dicts one is chosen, and is to be."""
    torch.save({"model": STATE, "ema": {"b": torch.zeros(2)}}, tmp_path / "two.pth")
    with pytest.raises(NothingMatchedError):
        ckpt_tools.open(tmp_path / "two.pth")
    with ckpt_tools.open(tmp_path / "two.pth", select="ema") as file:
        assert {name: value.tolist() for name, value in file.items()} == {"b": [0.0, 0.0]}


def test_names_need_no_torch(tmp_path: Path) -> None:
    """Names, shapes and dtypes do not import torch."""
    path = save_in(tmp_path, "pth")
    code = f"import sys, ckpt_tools; f = ckpt_tools.open({str(path)!r}); print(f.shape('b'), 'torch' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout == "(5,) False\n"
