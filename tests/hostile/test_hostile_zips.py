"""The zip around a checkpoint: rows 14 to 45."""

import struct
import zipfile
import zlib
from pathlib import Path
from typing import Any

import pytest
import torch

import ckpt_tools.torch
from ckpt_tools.errors import ChecksumError, CkptError, DamagedFileError, TensorError
from tests.hostile import pickles as p
from tests.hostile.refusals import expect_convert_refused, expect_warned, listing, write
from tests.hostile.zips import Rec, build, deflated, torch_records, torch_zip
from tests.support.legacy import saved
from tests.support.zips import called_big, rewrite

FLOATS = {"0": struct.pack("<6f", *range(6))}
PICKLE = p.pickle(p.dict_of(**{"a.w": p.tensor()}))


def records(**changes: Any) -> list[Rec]:
    """The records of a good file, with the storage's changed."""
    rows = torch_records(PICKLE, FLOATS)
    for key, value in changes.items():
        setattr(rows[2], key, value)
    return rows


def names(path: Path) -> list[str]:
    """The tensors that `inspect` lists."""
    return [row["name"] for row in ckpt_tools.inspect(path).tensors]


BIG = [Rec(b"archive/byteorder", b"big"), Rec(b"archive/data/0", struct.pack(">6f", *range(6)))]
GOOD = {
    "as torch writes it": torch_zip(PICKLE, FLOATS),
    "19 a comment": torch_zip(PICKLE, FLOATS, comment=b"made by PK and me"),
    "31 empty folders": build([Rec(b"archive/"), *records(), Rec(b"archive/data/")]),
    "34 deflated": build([deflated(rec.name, rec.data) for rec in records()]),
    "44 no byteorder, as before torch 2.1": build([rec for rec in records() if rec.name != b"archive/byteorder"]),
    "44 big-endian": build([records()[0], *BIG, records()[3]]),
    "45 a zip64 end record": torch_zip(PICKLE, FLOATS, wide_disks=1),
}


@pytest.mark.parametrize("name", GOOD)
def test_what_is_no_reason_to_refuse(name: str, tmp_path: Path) -> None:
    """The good files, of which all bad ones are variations: torch loads them, and so what we list and write of them."""
    path = write(tmp_path, GOOD[name])
    assert names(path) == ["a.w"]
    assert ("big-endian" in [row.code for row in ckpt_tools.inspect(path).findings]) == name.endswith("big-endian")
    ckpt_tools.convert(path, tmp_path / "out.pth")
    for file in (path, tmp_path / "out.pth"):
        assert torch.equal(torch.load(file)["a.w"], torch.arange(6.0).reshape(2, 3))


# --- 14 to 16: what is missing


def test_14_truncated_anywhere(tmp_path: Path) -> None:
    """No length of a cut file gives anything but an error of ours, and the count only grows."""
    data, counts = saved({f"layer.{index}": torch.arange(2.0) for index in range(3)}), []
    for length in range(4, len(data), 7):
        with pytest.raises(CkptError) as caught:
            ckpt_tools.inspect(write(tmp_path, data[:length]))
        told = str(caught.value).partition("missing: ")[2].partition(" of 3 ")[0]
        counts += [int(told)] if told else []
    assert counts == sorted(counts)
    assert set(counts) == {0, 1, 2, 3}


# --- 17 to 23: the end record


@pytest.mark.parametrize("after", [b"\0", b"\n" * 5, b"PK\x05\x06", b"x" * 60_000])
def test_22_bytes_after_the_end(after: bytes, tmp_path: Path) -> None:
    """They are mentioned, and not written."""
    path = write(tmp_path, torch_zip(PICKLE, FLOATS, after=after))
    found = expect_warned(path, "trailing-bytes")
    assert f"{len(after)} bytes after the archive" in [row.found for row in found.findings]


# --- 34 to 42: packing, sizes, checksums


@pytest.mark.parametrize(("size", "said"), [(23, "holds more bytes than the zip directory says"), (25, "1 bytes are missing")])
def test_35_size_lie(size: int, said: str, tmp_path: Path) -> None:
    """A deflated record that holds more or less than it says; the pickle is made to agree with the lie."""
    lie = p.pickle(p.dict_of(w=p.tensor(p.sizes(size), p.sizes(1), on=p.storage("0", size, "ByteStorage"))))
    rows = torch_records(lie, FLOATS)
    rows[2] = deflated(b"archive/data/0", FLOATS["0"], size=size)
    expect_convert_refused(write(tmp_path, build(rows)), DamagedFileError, said)


def unended() -> Rec:
    """All bytes come out, and the stream is cut before it says that it ends."""
    packer = zlib.compressobj(9, zlib.DEFLATED, -15)
    packed = packer.compress(FLOATS["0"]) + packer.flush(zlib.Z_SYNC_FLUSH)
    return Rec(b"archive/data/0", packed, method=8, crc=zlib.crc32(FLOATS["0"]), size=24, compressed=len(packed))


@pytest.mark.parametrize(("storage", "said"), [
    (deflated(b"archive/data/0", bytes(100 << 20), size=24), "holds more bytes"),  # of which nothing is kept
    (unended(), "A deflated record is cut off"),
    (Rec(b"archive/data/0", b"\xff" * 24, method=8, size=24), "cannot be inflated"),
], ids=["bomb", "without an end", "broken"])  # fmt: skip
def test_35_streams(storage: Rec, said: str, tmp_path: Path) -> None:
    """More than the declared size, no end, bytes that do not inflate."""
    rows = torch_records(PICKLE, FLOATS)
    rows[2] = storage
    expect_convert_refused(write(tmp_path, build(rows)), DamagedFileError, said)


def test_41_crc_of_a_storage(tmp_path: Path) -> None:
    """A storage that changed: `inspect` reads no tensors, a copy copies, another container is refused with its name."""
    path = write(tmp_path, build(records(crc=0x1234, local={"crc": 0x1234})))
    assert names(path) == ["a.w"]
    ckpt_tools.convert(path, tmp_path / "copy.pth")
    before = listing(tmp_path)
    for target, dtype in (("out.safetensors", None), ("out.safetensors", "bf16"), ("out.pth", "bf16")):
        with pytest.raises(ChecksumError, match=r"archive/data/0"):
            ckpt_tools.convert(path, tmp_path / target, dtype=dtype)
    assert listing(tmp_path) == before


def test_42_no_checksums(tmp_path: Path) -> None:
    """CRC 0 in all records: the writer had checksums off, which is fine."""
    rows = records()
    for rec in rows:
        rec.crc = 0
    path = write(tmp_path, build(rows))
    assert names(path) == ["a.w"]
    ckpt_tools.convert(path, tmp_path / "out.pth")
    assert torch.equal(torch.load(tmp_path / "out.pth")["a.w"], torch.arange(6.0).reshape(2, 3))


# --- 43 to 45: the small records


@pytest.mark.parametrize("text", [None, b"", b"1\n", b"99", b"\xff\xff", b"3\n" * 40])
def test_43_odd_version(text: bytes | None, tmp_path: Path) -> None:
    """`version` missing or strange; where torch does not take it, that is said too."""
    rows = [rec for rec in records() if not rec.name.endswith(b"version")]
    rows += [] if text is None else [Rec(b"archive/version", text)]
    path = write(tmp_path, build(rows))
    expect_warned(path, "odd-version")
    assert loads_as_said(path) is (text is not None and text.startswith((b"1", b"3")))


@pytest.mark.parametrize("text", [b"3\n", b"10\n", b"3x", b"11", b"0", b"x3"])
def test_43_the_version_that_torch_takes(text: bytes, tmp_path: Path) -> None:
    """It looks at `.data/version` first, and reads a number as C does."""
    rows = [*records(), Rec(b"archive/.data/version", text)]
    loads_as_said(write(tmp_path, build(rows)))


def loads_as_said(path: Path) -> bool:
    """Whether torch loads a file, which `inspect` says too."""
    try:
        loads = bool(torch.load(path))
    except (RuntimeError, ValueError):
        loads = False
    assert ckpt_tools.inspect(path).weights_only["loads"] is loads
    return loads


def test_44_big_endian_viewed_twice(tmp_path: Path) -> None:
    """Which bytes to swap is not guessed."""
    as_bytes = p.call(
        "torch._utils", "_rebuild_tensor_v3", p.storage(), b"K\x00", p.sizes(3), p.sizes(1), p.FALSE, p.ORDERED_DICT,
        p.glob("torch", "int16"),
    )  # fmt: skip
    rows = torch_records(p.pickle(p.dict_of(a=p.tensor(), b=as_bytes)), FLOATS)
    rows[1].data = b"big"
    expect_convert_refused(write(tmp_path, build(rows)), TensorError, "viewed with elements of another size than its own")


@pytest.mark.parametrize("name", ["uint16", "uint32", "uint64"])
def test_44_big_endian_without_a_type(tmp_path: Path, name: str) -> None:
    """torch saves these on a storage without a type, and swaps nothing when it loads them: 256 for 1, or 1 for 1?"""
    torch.save({"a": torch.arange(4).to(getattr(torch, name)), "b": torch.ones(2)}, tmp_path / "little.pth")
    called_big(tmp_path / "little.pth", tmp_path / "in.pth")
    loaded = torch.load(tmp_path / "in.pth")
    assert loaded["a"].tolist() == [0, 1, 2, 3]
    assert loaded["b"].tolist() != [1, 1]
    for read in (ckpt_tools.torch.load, ckpt_tools.stats):
        with pytest.raises(TensorError, match="of another size than its own"):
            read(tmp_path / "in.pth")
    assert ckpt_tools.check(tmp_path / "in.pth", values=True).exit_code
    expect_convert_refused(tmp_path / "in.pth", TensorError, "viewed with elements of another size than its own")


@pytest.mark.parametrize("name", ["format-version", "storage-alignment"])
@pytest.mark.parametrize("text", [b"", b"junk", b"-1", b"\xff", b"9" * 100])
def test_45_odd_small_records(name: str, text: bytes, tmp_path: Path) -> None:
    """Junk in what describes the file only."""
    record = Rec(f"archive/.{name.replace('-', '_')}".encode(), text)
    expect_warned(write(tmp_path, build([*records(), record])), f"odd-{name}")


def test_deflated_zeros_come_out_whole(tmp_path: Path) -> None:
    """A byte of zeros that the inflater holds back when it has taken all of its input is not said to be missing."""
    size = (4 << 20) + 1
    torch.save({"a": torch.zeros(size, dtype=torch.uint8)}, tmp_path / "stored.pth")
    rewrite(tmp_path / "stored.pth", tmp_path / "a.pth", method=zipfile.ZIP_DEFLATED)
    assert ckpt_tools.check(tmp_path / "a.pth").verdict == "healthy"
