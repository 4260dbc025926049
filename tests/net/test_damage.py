"""Damage does not pass on: where bytes leave their CRC-32 it is checked."""

from __future__ import annotations

import io
import pickle
import zipfile
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.distributed.checkpoint as dcp
from safetensors.torch import save

import ckpt_tools
from ckpt_tools.errors import ChecksumError
from tests.support.commands import ckpt
from tests.support.damage import flip_bit


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
    "out.gguf", "out.gguf --dtype q8_0", "out --format dcp", "out.pth --format pth-legacy",
    "out --format pth --shard-size 4KB --dtype bf16",
]  # fmt: skip


@pytest.mark.parametrize("way", WAYS)
def test_no_output_of_damaged_bytes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, way: str) -> None:
    """Every way out of the records, copied, cast or in shards: an error, and no output; --no-verify takes them as they are."""
    monkeypatch.chdir(tmp_path)
    flipped(STATE, Path("in.pth"))
    ckpt("convert", "in.pth", *way.split(), code=3)
    assert not Path(way.split()[0]).exists()
    ckpt("convert", "in.pth", *way.split(), "--no-verify")


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


STORED = STATE["a.bias"][5:9].numpy().tobytes()  # bytes that every container below has as they are


def _saved(**options: bool) -> bytes:
    data = io.BytesIO()
    torch.save(STATE, data, **options)
    return data.getvalue()


def _npz(file: Path | io.BytesIO) -> None:
    np.savez(file, **{name: tensor.numpy() for name, tensor in STATE.items()})  # type: ignore[arg-type]


def _zip_of(path: Path, name: str, data: bytes) -> Path:
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr(name, data)
        archive.writestr("data", "{}")
    return path


def _dcp(path: Path) -> Path:
    dcp.save(dict(STATE), storage_writer=dcp.FileSystemWriter(path), no_dist=True)
    return path / "__0_0.distcp"


def _arrays(path: Path) -> Path:
    _npz(path.with_suffix(".npz"))
    return path.with_suffix(".npz")


def _zipped_arrays(path: Path) -> Path:
    data = io.BytesIO()
    _npz(data)
    return _zip_of(path, "arrays.npz", data.getvalue())


def _in_bytes(path: Path) -> Path:
    path.write_bytes(pickle.dumps({"module": _saved()}))
    return path


NESTED: dict[str, Callable[[Path], Path]] = {
    "dcp": _dcp, "npz": _arrays, "npz in a zip": _zipped_arrays, "torch.save in bytes": _in_bytes,
    "safetensors in a zip": lambda path: _zip_of(path, "model.safetensors", save(STATE)),
    "legacy in a zip": lambda path: _zip_of(path, "policy.pth", _saved(_use_new_zipfile_serialization=False)),
}  # fmt: skip


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
@pytest.mark.parametrize("kind", NESTED)
def test_checksums_inside_other_containers(tmp_path: Path, kind: str) -> None:
    """A CRC-32 that a container keeps of its members or chunks is compared on every way out, .pth too; whole ones pass."""
    file = NESTED[kind](tmp_path / "in")
    place = file.parent if file.suffix == ".distcp" else file
    ways = [("out.pth", {}), ("out.safetensors", {}), ("cast.safetensors", {"dtype": "bf16"}), ("parts", {"format": "dcp"})]
    for name, options in ways:
        ckpt_tools.convert(place, tmp_path / f"good-{name}", **options)  # type: ignore[arg-type]
    flip_bit(file, STORED)
    for name, options in ways:
        with pytest.raises(ChecksumError):
            ckpt_tools.convert(place, tmp_path / name, **options)  # type: ignore[arg-type]
        assert not (tmp_path / name).exists()
