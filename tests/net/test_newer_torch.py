"""Files of a PyTorch that is newer than the one here."""

import io
import zipfile
from pathlib import Path

import pytest
import torch

import ckpt_tools
import ckpt_tools.torch
from tests.support.commands import ckpt

NUMBERS = torch.tensor([1, 2, 3, 4], dtype=torch.uint32)


@pytest.fixture
def newer(tmp_path: Path) -> Path:
    """What PyTorch 2.14 writes for a parameter of bcomplex32, which has 4 bytes an element: the name alone is new."""
    written, path = io.BytesIO(), tmp_path / "newer.pth"
    torch.save({"module.w": NUMBERS, "module.v": torch.ones(2)}, written)
    with zipfile.ZipFile(written) as old, zipfile.ZipFile(path, "w") as new:
        for name in old.namelist():
            new.writestr(name, old.read(name).replace(b"ctorch\nuint32\n", b"ctorch\nbcomplex32\n"))
    return path


def test_it_is_said_and_harmless(newer: Path) -> None:
    """The dtype is listed, and said to be of a newer PyTorch; nothing is called dangerous for it."""
    described = ckpt_tools.inspect(newer)
    assert [(row["name"], row["dtype"]) for row in described.tensors] == [("module.w", "bcomplex32"), ("module.v", "float32")]
    said = ckpt("check", newer, code=1).stdout
    assert "it needs a newer PyTorch, for torch.bcomplex32" in said
    assert "safe" in ckpt("scan", newer, code=0).stdout


def test_bytes_are_copied(newer: Path, tmp_path: Path) -> None:
    """Where only names change, its bytes stay, and so does its dtype."""
    ckpt("convert", newer, tmp_path / "out.pth", "--strip-module", code=0)
    with zipfile.ZipFile(tmp_path / "out.pth") as out:
        records = [out.read(name) for name in out.namelist() if "/data/" in name]
        assert any(b"bcomplex32" in out.read(name) for name in out.namelist() if name.endswith("data.pkl"))
    assert bytes(NUMBERS.numpy()) in records


def test_what_needs_its_numbers_says_so(newer: Path, tmp_path: Path) -> None:
    """A container without the type, and PyTorch of today, refuse with a sentence."""
    assert "has no type for" in ckpt("convert", newer, tmp_path / "out.safetensors", code=3).stderr
    assert not (tmp_path / "out.safetensors").exists()
    if not hasattr(torch, "bcomplex32"):
        with pytest.raises(ckpt_tools.CkptError, match="has no bcomplex32"):
            ckpt_tools.torch.load(newer)


def test_other_names_of_torch_stay_refused(newer: Path, tmp_path: Path) -> None:
    """What is no dtype by its name is none."""
    with zipfile.ZipFile(newer) as old, zipfile.ZipFile(tmp_path / "other.pth", "w") as new:
        for name in old.namelist():
            new.writestr(name, old.read(name).replace(b"ctorch\nbcomplex32\n", b"ctorch\nset_num_threads\n"))
    assert "unknown dtype" in ckpt("check", tmp_path / "other.pth", code=3).stdout
    assert "needs code" in ckpt("scan", tmp_path / "other.pth").stdout
