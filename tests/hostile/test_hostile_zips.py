"""The zip around a checkpoint: rows 14 to 45."""

import io
import struct
import zipfile
import zlib
from dataclasses import replace
from itertools import pairwise
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


def wide(*, local: bool) -> bytes:
    """The sizes of the storage in zip64 fields, of the directory alone or of the local header too."""
    field, most = struct.pack("<2H2Q", 1, 16, 24, 24), 0xFFFFFFFF
    truth = {"crc": zlib.crc32(FLOATS["0"]), "size": 24, "compressed": 24, "extra": b""}
    told = {"size": most, "compressed": most, "extra": field}
    return build(records(**told, local=told if local else truth))


def by_zipfile(method: int) -> bytes:
    """Written by Python, as zip tools do."""
    with zipfile.ZipFile(out := io.BytesIO(), "w", method) as made:
        for rec in records():
            made.writestr(rec.name.decode(), rec.data)
    return out.getvalue()


KEY = "k" * 490
BIG = [Rec(b"archive/byteorder", b"big"), Rec(b"archive/data/0", struct.pack(">6f", *range(6)))]
GOOD = {
    "as torch writes it": torch_zip(PICKLE, FLOATS),
    "19 a comment": torch_zip(PICKLE, FLOATS, comment=b"made by PK and me"),
    "19 a long comment": torch_zip(PICKLE, FLOATS, comment=b"x" * 65_000),
    "31 empty folders": build([Rec(b"archive/"), *records(), Rec(b"archive/data/")]),
    "34 deflated": build([deflated(rec.name, rec.data) for rec in records()]),
    "34 a deflated storage": build([*records()[:2], deflated(b"archive/data/0", FLOATS["0"]), records()[3]]),
    "44 no byteorder, as before torch 2.1": build([rec for rec in records() if rec.name != b"archive/byteorder"]),
    "44 big-endian": build([records()[0], *BIG, records()[3]]),
    "45 a zip64 end record": torch_zip(PICKLE, FLOATS, wide_disks=1),
    "45 with every number": torch_zip(PICKLE, FLOATS, wide_count=4, count=0xFFFF, size=0xFFFFFFFF, start=0xFFFFFFFF),
    "45 zip64 sizes": wide(local=True), "45 zip64 sizes in the directory": wide(local=False),
    "stored by zipfile": by_zipfile(zipfile.ZIP_STORED), "deflated by zipfile": by_zipfile(zipfile.ZIP_DEFLATED),
    "42 without checksums": build([replace(rec, crc=0) for rec in records()]),
    "bytes in front that are told": build([Rec(b"archive/old", bytes(5000), listed=False), *records()]),
    "a long root": build(torch_records(PICKLE, FLOATS, folder="x" * 500)),
    "a long key": torch_zip(PICKLE.replace(p.text("0"), p.text(KEY)), {KEY: FLOATS["0"]}),
}  # fmt: skip


@pytest.mark.parametrize("name", GOOD)
def test_what_is_no_reason_to_refuse(name: str, tmp_path: Path) -> None:
    """The good files, of which all bad ones are variations: torch's tensors come out, and zipfile finds archives whole."""
    path, out = write(tmp_path, GOOD[name]), tmp_path / "out.pth"
    assert names(path) == ["a.w"]
    assert ("big-endian" in [row.code for row in ckpt_tools.inspect(path).findings]) == name.endswith("big-endian")
    assert not [row for row in ckpt_tools.check(path, values=True).findings if row.severity == "problem"]
    ckpt_tools.convert(path, out)
    for found in (torch.load(path), ckpt_tools.torch.load(path), torch.load(out), torch.load(out, mmap=True)):
        assert torch.equal(found["a.w"], torch.arange(6.0).reshape(2, 3))
    for file in (path, out):
        with zipfile.ZipFile(file) as made:
            assert made.testzip() is None or name == "42 without checksums"
    assert {row.compress_type for row in made.infolist()} == {zipfile.ZIP_STORED}


@pytest.mark.parametrize("method", [zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED])
def test_names_beyond_64_kib(method: int, tmp_path: Path) -> None:
    """A name of a tensor that no record could have goes from container to container, and back."""
    long = "layer." * 12_000 + "weight"
    torch.save({long: torch.arange(3.0), long + "2": torch.ones(2)}, tmp_path / "saved.pth")
    rewrite(tmp_path / "saved.pth", tmp_path / "in.pth", method=method)
    for source, target in pairwise(["in.pth", "out.safetensors", "back.pth", "old.pth"]):
        ckpt_tools.convert(tmp_path / source, tmp_path / target, format="pth-legacy" if target == "old.pth" else None)
    found = torch.load(tmp_path / "old.pth")
    assert {name: value.tolist() for name, value in found.items()} == {long: [0, 1, 2], long + "2": [1, 1]}
    assert names(tmp_path / "in.pth") == [long, long + "2"]


def test_values_that_look_like_an_end_record(tmp_path: Path) -> None:
    """A tensor may hold the bytes of an end record whose comment ends within the real one: no program takes it for that."""
    path, record = tmp_path / "in.pth", torch.zeros(22, dtype=torch.uint8)
    record[:4] = torch.frombuffer(bytearray(b"PK\5\6"), dtype=torch.uint8)
    torch.save({"w": record}, path)
    data = path.read_bytes()
    first, last = data.find(b"PK\5\6"), data.rfind(b"PK\5\6")
    record[20:] = torch.frombuffer(bytearray((last - first - 17).to_bytes(2, "little")), dtype=torch.uint8)
    torch.save({"w": record}, path)
    ckpt_tools.convert(path, tmp_path / "out.pth")
    assert torch.equal(torch.load(tmp_path / "out.pth")["w"], record)
    assert ckpt_tools.check(tmp_path / "out.pth").verdict == "healthy"


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
