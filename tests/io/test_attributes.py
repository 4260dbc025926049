"""Who may read an output: no more than may read what it is made of; what replaces a file keeps what that one had."""

import errno
import os
import stat
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

import ckpt_tools
from ckpt_tools.errors import NotACheckpointError, OutputError
from tests.support.terminal import run

pytestmark = pytest.mark.skipif(os.name != "posix", reason="modes")
KERNEL = 1 << 20


@pytest.fixture(autouse=True)
def plain_umask() -> Iterator[None]:
    old = os.umask(0o022)
    yield
    os.umask(old)


@pytest.fixture
def private(tmp_path: Path) -> Path:
    path = tmp_path / "in.pth"
    torch.save({"a.w": torch.rand(600), "b.w": torch.rand(600)}, path)
    path.chmod(0o600)
    return path


def mode(path: Path) -> int:
    return stat.S_IMODE(path.stat().st_mode)


COMMANDS = {
    "convert": lambda path, out: ckpt_tools.convert(path, out),
    "cast": lambda path, out: ckpt_tools.convert(path, out, dtype="fp16"),
    "average": lambda path, out: ckpt_tools.average([path, path], out),
    "repair": lambda path, out: ckpt_tools.repair(path, out),
    "report": lambda path, out: run("report", path, "-o", out),
}


@pytest.mark.parametrize("bits", [0o600, 0o640, 0o644, 0o400])
@pytest.mark.parametrize("command", COMMANDS)
def test_an_output_is_no_more_open_than_its_input(command: str, bits: int, private: Path) -> None:
    """A new file may be read by those who may read its input; its owner may write it."""
    private.chmod(bits)
    out = private.with_name("out.html" if command == "report" else "out.pth")
    COMMANDS[command](private, out)  # type: ignore[no-untyped-call]
    assert mode(out) == bits & 0o644 | 0o600
    if command == "average":  # is as private as the most private of its inputs
        public = private.with_name("public.pth")
        public.write_bytes(private.read_bytes())
        ckpt_tools.average([public, private], private.with_name("both.pth"))
        assert mode(private.with_name("both.pth")) == mode(out)


@pytest.mark.parametrize("format", ["safetensors", "dcp"])
@pytest.mark.filterwarnings("ignore:.*")
def test_folders(format: str, private: Path, tmp_path: Path) -> None:
    """Shards, the files of a dcp, and what is made of them again; an old folder's files keep their modes."""
    folder, again = tmp_path / "shards", tmp_path / "again.pth"
    options = {"shard_size": 1000} if format == "safetensors" else {"format": format}
    ckpt_tools.convert(private, folder, **options)
    files = list(folder.iterdir())
    assert {mode(path) for path in files} == {0o600}
    ckpt_tools.convert(folder, again)
    assert mode(again) == 0o600
    for path in files:
        path.chmod(0o640)
    ckpt_tools.convert(private, folder, overwrite=True, **options)
    assert {mode(path) for path in files} == {0o640}


@pytest.mark.parametrize("bits", [0o600, 0o664, 0o640])
def test_what_is_replaced_hands_on_what_it_had(bits: int, private: Path) -> None:
    """--overwrite keeps mode, group and extended attributes of the old file, wherever the system lets it."""
    out = private.with_name("out.pth")
    out.write_bytes(b"old")
    out.chmod(bits)
    groups = [group for group in os.getgroups() if group != out.stat().st_gid]
    if groups or os.geteuid() == 0:
        os.chown(out, -1, groups[0] if groups else 12345)
    try:
        os.setxattr(out, "user.note", b"mine")
        kept = [b"mine"]
    except OSError:
        kept = []
    group = out.stat().st_gid
    ckpt_tools.convert(private, out, overwrite=True)
    assert (mode(out), out.stat().st_gid) == (bits, group)
    assert [os.getxattr(out, "user.note") for _ in kept] == kept


@pytest.mark.skipif(not hasattr(os, "geteuid") or os.geteuid() != 0, reason="only root gives files away")
def test_the_owner_stays(private: Path) -> None:
    out = private.with_name("out.pth")
    out.write_bytes(b"old")
    os.chown(out, 12345, 12346)
    ckpt_tools.convert(private, out, overwrite=True)
    assert (out.stat().st_uid, out.stat().st_gid) == (12345, 12346)


@pytest.mark.parametrize("broken", ["input", "output"])
def test_a_disk_that_fails_under_a_kernel_copy(broken: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """copy_file_range says EIO for either file: the error names the one that cannot be read, or cannot be written."""
    path = tmp_path / "in.pth"
    torch.save({"a.w": torch.rand(KERNEL), "b.w": torch.rand(KERNEL)}, path)

    def copy(*_: object) -> int:
        if broken == "input":
            monkeypatch.setattr(os, "pread", fail)
        return fail()

    def fail(*_: object) -> int:
        raise OSError(errno.EIO, os.strerror(errno.EIO))

    monkeypatch.setattr(os, "copy_file_range", copy, raising=False)
    with pytest.raises(NotACheckpointError if broken == "input" else OutputError) as caught:
        ckpt_tools.convert(path, tmp_path / "out.pth", drop="b.w")
    assert ("in.pth cannot be read" if broken == "input" else "out.pth cannot be written") in caught.value.what
    assert not (tmp_path / "out.pth").exists()
