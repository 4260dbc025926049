"""The file as a whole: rows 1 to 13."""

import io
import os
import tarfile
from pathlib import Path

import pytest
import torch

import ckpt_tools
from ckpt_tools.errors import (
    DamagedFileError,
    MissingFileError,
    NotACheckpointError,
    ObjectsError,
)
from tests.hostile.refusals import expect_convert_refused, expect_refused, info, safetensors, write
from tests.hostile.zips import Rec, build

TENSORS = {"a.weight": torch.arange(6.0).reshape(2, 3)}


def saved(**options: bool) -> bytes:
    """A checkpoint by torch."""
    buffer = io.BytesIO()
    torch.save(TENSORS, buffer, **options)
    return buffer.getvalue()


@pytest.mark.parametrize("name", ["bad.pth", "bad.safetensors"])
def test_05_lfs_pointer(name: str, tmp_path: Path) -> None:
    """A git-LFS pointer, with the real size."""
    pointer = b"version https://git-lfs.github.com/spec/v1\noid sha256:0123\nsize 46827520\n"
    expect_refused(write(tmp_path, pointer, name), NotACheckpointError, "git-LFS pointer", "46827520 bytes", "git lfs pull")


@pytest.mark.parametrize("size", [1, 8, 512, 4096, 3_000_000])
@pytest.mark.parametrize("name", ["bad.pth", "bad.safetensors"])
def test_06_zeros(name: str, size: int, tmp_path: Path) -> None:
    """Nothing but zeros, which torch takes for a tar."""
    expect_refused(write(tmp_path, bytes(size), name), NotACheckpointError, f"{size} zero bytes", "never written")


def test_09_directory(tmp_path: Path) -> None:
    """A folder."""
    folder = tmp_path / "folder.pth"
    folder.mkdir()
    expect_refused(folder, NotACheckpointError, "is a directory")


def test_09_fifo(tmp_path: Path) -> None:
    """A pipe without a writer is not waited for."""
    os.mkfifo(tmp_path / "pipe.pth")
    expect_refused(tmp_path / "pipe.pth", NotACheckpointError, "not a regular file")


def test_09_dangling_link(tmp_path: Path) -> None:
    """A link to nothing, and nothing at all."""
    (tmp_path / "link.pth").symlink_to(tmp_path / "gone.pth")
    expect_refused(tmp_path / "link.pth", MissingFileError, "link to a file that is not there")
    with pytest.raises(MissingFileError) as caught:
        ckpt_tools.inspect(tmp_path / "link.pth")
    assert caught.value.fix == ""  # its own name is no suggestion
    expect_refused(tmp_path / "gone.pth", MissingFileError, "There is no such file")


def test_09_link_to_itself(tmp_path: Path) -> None:
    """A link that leads in a circle."""
    (tmp_path / "loop.pth").symlink_to("loop.pth")
    expect_refused(tmp_path / "loop.pth", NotACheckpointError, "cannot be read")


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
    path = write(tmp_path, saved())
    path.chmod(0)
    expect_refused(path, NotACheckpointError, "Permission denied")


@pytest.mark.parametrize("name", ["zip.safetensors", "zip.tar", "zip.dat", "no_suffix"])
def test_10_wrong_extension(name: str, tmp_path: Path) -> None:
    """A torch-zip is one under any name, and a safetensors file too."""
    found = ckpt_tools.inspect(write(tmp_path, saved(), name))
    assert (found.container, [row["name"] for row in found.tensors]) == ("torch-zip", ["a.weight"])
    plain = write(tmp_path, safetensors({"a": info()}, bytes(8)), "really.pth")
    assert ckpt_tools.inspect(plain).container == "safetensors"


def test_11_torchscript(tmp_path: Path) -> None:
    """A TorchScript program is shown as one; convert says how to take its state dict out, and runs nothing."""
    records = {"archive/data.pkl": b"\x80\x02}.", "archive/constants.pkl": b"\x80\x02).", "archive/version": b"3\n"}
    data = build([Rec(name.encode(), content) for name, content in records.items()])
    path = write(tmp_path, data)
    assert ckpt_tools.inspect(path).container == "torchscript"
    expect_convert_refused(path, ObjectsError, "TorchScript program", "objects='plain'")


def test_12_tar(tmp_path: Path) -> None:
    """A tar is named and never unpacked; a zip that is called .pth.tar is a zip."""
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w") as tar:
        member = tarfile.TarInfo("../escape")
        member.size = 4
        tar.addfile(member, io.BytesIO(b"evil"))
    expect_refused(write(tmp_path, buffer.getvalue(), "old.tar"), DamagedFileError, "not a name inside a folder")
    assert not (tmp_path.parent / "escape").exists()
    assert ckpt_tools.inspect(write(tmp_path, saved(), "model.pth.tar")).totals["tensors"] == 1


def test_13_two_zips(tmp_path: Path) -> None:
    """Two archives, one behind the other, as in a .distcp shard: both are shown, and the warning says what the file is."""
    buffer = io.BytesIO()
    torch.save({"b": torch.zeros(100)}, buffer)
    for second in (saved(), buffer.getvalue()):
        found = ckpt_tools.inspect(write(tmp_path, saved() + second))
        assert found.container == "dcp-part"
        assert {row["where"][0] for row in found.tensors} == {0, 1}
        assert [finding.code for finding in found.findings if finding.severity == "warning"] == ["several-archives"]


def test_13_two_zips_and_more(tmp_path: Path) -> None:
    """Bytes between or before them, and the file is damaged as ever: which archive is meant is not guessed."""
    for data in (saved() + b"x" + saved(), b"x" + saved() + saved(), saved()[100:] + saved()):
        with pytest.raises(ckpt_tools.CkptError):
            ckpt_tools.inspect(write(tmp_path, data))
