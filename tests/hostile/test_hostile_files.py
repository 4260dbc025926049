"""The file as a whole: rows 1 to 13."""

import os
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

import ckpt_tools
from ckpt_tools.errors import CkptError, MissingFileError, NotACheckpointError
from tests.hostile.refusals import expect_refused, info, safetensors, write
from tests.support.legacy import saved

TENSORS = {"a.weight": torch.arange(6.0).reshape(2, 3)}


SAVED = saved(TENSORS)


@pytest.mark.parametrize(("make", "error", "said"), [
    (os.mkdir, NotACheckpointError, "is a directory"), (os.mkfifo, NotACheckpointError, "not a regular file"),
    (lambda path: path.symlink_to("bad.pth"), NotACheckpointError, "cannot be read"),
    (lambda path: path.symlink_to("gone.pth"), MissingFileError, "link to a file that is not there"),
    (lambda path: None, MissingFileError, "There is no such file"),
])  # fmt: skip
def test_09_what_is_no_file(make: Callable[[Path], object], error: type[CkptError], said: str, tmp_path: Path) -> None:
    """A folder, a pipe without a writer, a link to itself or to nothing, and nothing at all."""
    make(tmp_path / "bad.pth")
    expect_refused(tmp_path / "bad.pth", error, said)
    with pytest.raises(error) as caught:
        ckpt_tools.inspect(tmp_path / "bad.pth")
    assert error is not MissingFileError or caught.value.fix == ""  # its own name is no suggestion


@pytest.mark.parametrize("name", ["x" * 300, "nul\0nul", "file.pth/below.pth"])
def test_09_impossible_paths(name: str, tmp_path: Path) -> None:
    """Paths that the system refuses."""
    write(tmp_path, b"", "file.pth")
    with pytest.raises(NotACheckpointError, match="cannot be read"):
        ckpt_tools.inspect(tmp_path / name)
    with pytest.raises(NotACheckpointError, match="cannot be read"):
        ckpt_tools.convert(tmp_path / name, tmp_path / "out.pth")


@pytest.mark.skipif(os.geteuid() == 0, reason="root may read anything")
def test_09_no_permission(tmp_path: Path) -> None:
    """A file that may not be read."""
    path = write(tmp_path, SAVED)
    path.chmod(0)
    expect_refused(path, NotACheckpointError, "Permission denied")


@pytest.mark.parametrize("name", ["zip.safetensors", "zip.tar", "zip.dat", "no_suffix", "model.pth.tar"])
def test_10_wrong_extension(name: str, tmp_path: Path) -> None:
    """A torch-zip is one under any name, and a safetensors file too."""
    found = ckpt_tools.inspect(write(tmp_path, SAVED, name))
    assert (found.container, [row["name"] for row in found.tensors]) == ("torch-zip", ["a.weight"])
    plain = write(tmp_path, safetensors({"a": info()}, bytes(8)), "really.pth")
    assert ckpt_tools.inspect(plain).container == "safetensors"


def test_13_two_zips_and_more(tmp_path: Path) -> None:
    """Bytes between or before them, and the file is damaged as ever: which archive is meant is not guessed."""
    for data in (SAVED + b"x" + SAVED, b"x" + SAVED + SAVED, SAVED[100:] + SAVED):
        with pytest.raises(CkptError):
            ckpt_tools.inspect(write(tmp_path, data))
