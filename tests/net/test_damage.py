"""Damage does not pass on: where bytes leave their CRC-32 it is checked."""

from __future__ import annotations

import warnings
import zipfile
from pathlib import Path

import pytest
import torch
import torch.distributed.checkpoint as dcp

import ckpt_tools
from ckpt_tools.errors import ChecksumError
from tests.support.commands import ckpt


def flipped(state: object, path: Path) -> None:
    """A file of which one bit of the last storage's last byte is another."""
    torch.save(state, path)
    with zipfile.ZipFile(path) as archive:
        record = [info for info in archive.infolist() if "/data/" in info.filename][-1]
    data = bytearray(path.read_bytes())
    start = record.header_offset + 30 + int.from_bytes(data[record.header_offset + 26 : record.header_offset + 28], "little")
    start += int.from_bytes(data[record.header_offset + 28 : record.header_offset + 30], "little")
    data[start + record.file_size - 1] ^= 1
    path.write_bytes(data)


STATE = {"a.weight": torch.ones(300, 7), "a.bias": torch.arange(3000.0)}
WAYS = [
    "out.safetensors", "out.safetensors --dtype bf16", "out --format safetensors --shard-size 4KB", "out.pth --dtype fp16",
    "out.gguf", "out.gguf --quantize q8_0", "out --format dcp", "out.pth --format pth-legacy", "out.pth --verify",
    "out --format pth --shard-size 4KB --dtype bf16", "out --format pth --shard-size 4KB --verify",
]  # fmt: skip


@pytest.mark.parametrize("way", WAYS)
def test_no_output_of_damaged_bytes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, way: str) -> None:
    """Every way out of the records, copied, cast or in shards: an error, and no output; --no-verify takes them as they are."""
    monkeypatch.chdir(tmp_path)
    flipped(STATE, Path("in.pth"))
    ckpt("convert", "in.pth", *way.split(), code=3)
    assert not Path(way.split()[0]).exists()
    if "--verify" not in way:
        ckpt("convert", "in.pth", *way.split(), "--no-verify")
    torch.save(STATE, "good.pth")
    ckpt("convert", "good.pth", *way.replace("out", "well", 1).split())


def test_parts_of_a_damaged_record(tmp_path: Path) -> None:
    """A strided view, a part of a storage, a merge and a mean read the record that they are of to its end."""
    base = torch.arange(4000.0)
    for name, view in (("strided", base.reshape(40, 100).t()), ("part", base[:100]), ("halved", base[::2])):
        flipped({"a.weight": view}, tmp_path / f"{name}.pth")
        for slim in (False, True):
            with pytest.raises(ChecksumError):
                ckpt_tools.convert(tmp_path / f"{name}.pth", tmp_path / f"{name}.safetensors", slim=slim)
    flipped(STATE, tmp_path / "a.pth")
    torch.save(STATE, tmp_path / "b.pth")
    for pair in (("a.pth", "b.pth"), ("b.pth", "a.pth")):
        with pytest.raises(ChecksumError):
            ckpt_tools.average([tmp_path / name for name in pair], tmp_path / "mean.pth")


def test_what_keeps_its_checksum_is_copied(tmp_path: Path) -> None:
    """From .pth to .pth the CRC-32 goes with the bytes: the damage can be seen in OUT as in IN."""
    flipped(STATE, tmp_path / "in.pth")
    ckpt_tools.convert(tmp_path / "in.pth", tmp_path / "out.pth", rename="^a=b")
    assert [finding.code for finding in ckpt_tools.check(tmp_path / "out.pth").findings] == ["damaged-record"]


@pytest.mark.parametrize("way", WAYS)
def test_no_output_of_a_damaged_distributed_checkpoint(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, way: str) -> None:
    """The archives in a .distcp have checksums too."""
    monkeypatch.chdir(tmp_path)
    with warnings.catch_warnings(action="ignore"):  # that it is one process
        dcp.save(dict(STATE), checkpoint_id="in", no_dist=True)
    if "--verify" not in way:  # which compares nothing of a distributed checkpoint
        ckpt("convert", "in", *way.replace("out", "well", 1).split())
    [path] = Path("in").glob("*.distcp")
    data = bytearray(path.read_bytes())
    data[data.index(torch.arange(3000.0)[-4:].numpy().tobytes())] ^= 1
    path.write_bytes(data)
    ckpt("convert", "in", *way.split(), code=3)
    assert not Path(way.split()[0]).exists()
    if "--verify" not in way:
        ckpt("convert", "in", *way.split(), "--no-verify")
