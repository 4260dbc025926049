"""The zip around a checkpoint: rows 14 to 45."""

from __future__ import annotations

import io
import struct
import zipfile
import zlib
from pathlib import Path
from typing import Any

import pytest
import torch

import ckpt_tools.torch
from ckpt_tools.errors import (
    ChecksumError,
    CkptError,
    LimitError,
    TensorError,
    UnsupportedContainerError,
    ZipError,
)
from tests.hostile import pickles as p
from tests.hostile.refusals import (
    expect_convert_refused,
    expect_refused,
    expect_warned,
    listing,
    write,
)
from tests.hostile.zips import (
    Rec,
    build,
    deflated,
    end_record,
    torch_records,
    torch_zip,
    wide_end,
)
from tests.support.zips import rewrite

FLOATS = {"0": struct.pack("<6f", *range(6))}
PICKLE = p.pickle(p.dict_of(**{"a.w": p.tensor()}))


def records(**changes: Any) -> list[Rec]:
    """The records of a good file, with the storage's changed."""
    rows = torch_records(PICKLE, FLOATS)
    for key, value in changes.items():
        setattr(rows[2], key, value)
    return rows


def saved(count: int = 4, *, size: int = 50) -> bytes:
    """A file by torch with this many tensors."""
    buffer = io.BytesIO()
    torch.save({f"layer.{index}": torch.arange(float(size)) for index in range(count)}, buffer)
    return buffer.getvalue()


def names(path: Path) -> list[str]:
    """The tensors that `inspect` lists."""
    return [row["name"] for row in ckpt_tools.inspect(path).tensors]


def test_bytes_before_the_first_record_are_dead(tmp_path: Path) -> None:
    """A record that the directory does not list, in front of all: an edit in place leaves such."""
    good = build(records())
    path = write(tmp_path, build([Rec(b"archive/old", bytes(5000), listed=False), *records()]))
    with ckpt_tools.open_checkpoint(path) as checkpoint:
        assert checkpoint.decoded.dead_bytes() == path.stat().st_size - len(good)


def test_00_the_builder_makes_what_torch_reads(tmp_path: Path) -> None:
    """The good file, of which all bad ones are variations, is good: torch loads it and we list the same."""
    path = write(tmp_path, torch_zip(PICKLE, FLOATS))
    assert torch.equal(torch.load(path)["a.w"], torch.arange(6.0).reshape(2, 3))
    assert names(path) == ["a.w"]


# --- 14 to 16: what is missing


def storage_ends(data: bytes) -> list[int]:
    """Where the bytes of each storage end, told from the descriptors behind them."""
    return [at for at in range(len(data)) if data[at : at + 4] == b"PK\x07\x08" and data[at + 8 : at + 12] == b"\xc8\0\0\0"]


def test_14_truncated(tmp_path: Path) -> None:
    """Wherever a file was cut, the message counts the tensors whose bytes are all there."""
    data = saved()
    ends = storage_ends(data)
    assert len(ends) == 4
    for whole, end in enumerate(ends):
        expect_refused(write(tmp_path, data[: end - 1]), ZipError, f"{whole} of 4 tensors complete", f"data/{whole}'")
        expect_refused(write(tmp_path, data[:end]), ZipError, f"{whole + 1} of 4 tensors complete")
        expect_refused(write(tmp_path, data[: end + 9]), ZipError, f"{whole + 1} of 4 tensors complete")


def test_14_truncated_anywhere(tmp_path: Path) -> None:
    """No length of a cut file gives anything but an error of ours, and the count only grows."""
    data, counts = saved(3, size=2), []
    for length in range(4, len(data), 7):
        with pytest.raises(CkptError) as caught:
            ckpt_tools.inspect(write(tmp_path, data[:length]))
        told = str(caught.value).partition("missing: ")[2].partition(" of 3 ")[0]
        counts += [int(told)] if told else []
    assert counts == sorted(counts)
    assert set(counts) == {0, 1, 2, 3}


def test_14_tied_and_empty_tensors_count(tmp_path: Path) -> None:
    """Two names for one storage are two tensors; an empty one is whole as soon as its record began."""
    buffer, shared = io.BytesIO(), torch.ones(50)
    torch.save({"a": shared, "b": shared.view(5, 10), "c": torch.zeros(0), "d": torch.ones(50)}, buffer)
    data = buffer.getvalue()
    expect_refused(write(tmp_path, data[: storage_ends(data)[1]]), ZipError, "4 of 4 tensors complete")
    expect_refused(write(tmp_path, data[: storage_ends(data)[1] - 1]), ZipError, "3 of 4 tensors complete")


def test_14_descriptor_of_24_bytes(tmp_path: Path) -> None:
    """Records of 4 GiB and more have wider descriptors; so may others."""
    wide = {"crc": 0, "size": 0, "compressed": 0, "flags": 0x808}
    rows = torch_records(PICKLE, FLOATS)
    for rec in rows:
        rec.local = dict(wide)
        rec.data += struct.pack("<4sI2Q", b"PK\x07\x08", zlib.crc32(rec.data), len(rec.data), len(rec.data))
    whole = build(rows)
    end = whole.index(b"PK\x01\x02")
    expect_refused(write(tmp_path, whole[:end]), ZipError, "1 of 1 tensors complete")
    expect_refused(write(tmp_path, whole[: whole.index(FLOATS["0"]) + 23]), ZipError, "0 of 1 tensors complete")


def test_15_directory_lost(tmp_path: Path) -> None:
    """All records, and no directory: everything is complete, and it is said so."""
    data = saved()
    expect_refused(write(tmp_path, data[: data.index(b"PK\x01\x02")]), ZipError, "directory", "4 of 4 tensors complete")


def test_16_storages_missing(tmp_path: Path) -> None:
    """Records that the pickle refers to and the directory does not have are listed."""
    many = p.pickle(p.dict_of(**{f"w{key}": p.tensor(on=p.storage(str(key))) for key in range(8)}))
    path = write(tmp_path, torch_zip(many, FLOATS))
    expect_refused(path, ZipError, "7 of 8 storages are not in the file", "'1', '2', '3', '4', '5' and 2 more")


# --- 17 to 23: the end record


def test_18_entry_past_the_directory(tmp_path: Path) -> None:
    """The last entry says that it is longer than the directory."""
    data = bytearray(torch_zip(PICKLE, FLOATS))
    last = data.rindex(b"PK\x01\x02")
    data[last + 32 : last + 34] = b"\xff\xff"  # the length of its comment
    expect_refused(write(tmp_path, bytes(data)), ZipError, "An entry runs past its end")


@pytest.mark.parametrize("wide", [False, True])
def test_19_end_record_in_a_comment(wide: bool, tmp_path: Path) -> None:
    """A second end record inside the comment of the first: which archive is it?"""
    rows = records()
    inner = build(rows)
    start, size = inner.index(b"PK\x01\x02"), inner.rindex(b"PK\x05\x06") - inner.index(b"PK\x01\x02")
    comment = end_record(4, size, start)
    data = torch_zip(PICKLE, FLOATS, comment=comment, **({"wide_disks": 1} if wide else {}))
    expect_refused(write(tmp_path, data), ZipError, "end record inside the comment of another")


def test_19_innocent_comment(tmp_path: Path) -> None:
    """A comment with other bytes is no reason to refuse."""
    assert names(write(tmp_path, torch_zip(PICKLE, FLOATS, comment=b"made by PK and me"))) == ["a.w"]


@pytest.mark.parametrize("after", [b"\0", b"\n" * 5, b"PK\x05\x06", b"x" * 60_000])
def test_22_bytes_after_the_end(after: bytes, tmp_path: Path) -> None:
    """They are mentioned, and not written."""
    path = write(tmp_path, torch_zip(PICKLE, FLOATS, after=after))
    found = expect_warned(path, "trailing-bytes")
    assert f"{len(after)} bytes after the archive" in [row.found for row in found.findings]


# --- 25 to 32: entries and names


def test_28_overlap(tmp_path: Path) -> None:
    """A record that claims the bytes of the next one too."""
    inner = Rec(b"archive/data/1", bytes(8))
    outer = Rec(b"archive/data/0", b"head", local={}, size=0, compressed=0)
    rows = torch_records(PICKLE)
    both = build([*rows[:2], outer, inner, rows[2]])
    length = both.index(b"PK\x03\x04", both.index(b"head") + 4) - both.index(b"head") + 20
    outer.size = outer.compressed = length
    expect_refused(
        write(tmp_path, build([*rows[:2], outer, inner, rows[2]])), ZipError, "'archive/data/0' overlaps 'archive/data/1'"
    )


def test_28_two_entries_on_one_record(tmp_path: Path) -> None:
    """Two names for the same bytes: a zip bomb without packing."""
    first = build(records()).index(b"PK\x03\x04", 10)
    shared = Rec(b"archive/byteorder", b"little", header=first)
    expect_refused(write(tmp_path, build([*records(), shared])), ZipError, "archive/byteorder")


def test_29_entry_points_into_the_directory(tmp_path: Path) -> None:
    """A record whose bytes would be the directory's."""
    lie = {"size": 10_000, "compressed": 10_000}
    expect_refused(write(tmp_path, build(records(**lie, local=lie))), ZipError, "reaches into the zip directory")


def test_31_empty_folders_are_skipped(tmp_path: Path) -> None:
    """Folder entries without data, as zip tools write them."""
    path = write(tmp_path, build([Rec(b"archive/"), *records(), Rec(b"archive/data/")]))
    assert names(path) == ["a.w"]


# --- 34 to 42: packing, sizes, checksums


def test_34_deflated(tmp_path: Path) -> None:
    """Records that a zip tool deflated: read, and written out as they were meant."""
    rows = [deflated(rec.name, rec.data) for rec in records()]
    path = write(tmp_path, build(rows))
    assert torch.equal(torch.load(path)["a.w"], torch.arange(6.0).reshape(2, 3))
    ckpt_tools.convert(path, tmp_path / "out.pth")
    assert torch.equal(torch.load(tmp_path / "out.pth")["a.w"], torch.arange(6.0).reshape(2, 3))


@pytest.mark.parametrize(("size", "said"), [(23, "more bytes"), (25, "fewer bytes")])
def test_35_size_lie(size: int, said: str, tmp_path: Path) -> None:
    """A deflated record that holds more or less than it says; the pickle is made to agree with the lie."""
    lie = p.pickle(p.dict_of(w=p.tensor(p.sizes(size), p.sizes(1), on=p.storage("0", size, "ByteStorage"))))
    rows = torch_records(lie, FLOATS)
    rows[2] = deflated(b"archive/data/0", FLOATS["0"], size=size)
    expect_convert_refused(write(tmp_path, build(rows)), ZipError, f"holds {said} than the zip directory says")


def test_35_size_lie_of_the_pickle(tmp_path: Path) -> None:
    """The same with the pickle's own record."""
    rows = records()
    rows[0] = deflated(b"archive/data.pkl", PICKLE, size=len(PICKLE) - 1)
    expect_refused(write(tmp_path, build(rows)), ZipError, "holds more bytes than the zip directory says")


def test_35_bomb_stops_at_the_declared_size(tmp_path: Path) -> None:
    """A hundred megabytes behind a declared size of 24: nothing of it is kept."""
    rows = torch_records(PICKLE, FLOATS)
    rows[2] = deflated(b"archive/data/0", bytes(100 << 20), size=24)
    expect_convert_refused(write(tmp_path, build(rows)), ZipError, "holds more bytes")


def test_35_deflate_stream_without_an_end(tmp_path: Path) -> None:
    """All bytes come out, and the stream is cut before it says that it ends."""
    packer = zlib.compressobj(9, zlib.DEFLATED, -15)
    packed = packer.compress(FLOATS["0"]) + packer.flush(zlib.Z_SYNC_FLUSH)
    rows = torch_records(PICKLE, FLOATS)
    rows[2] = Rec(b"archive/data/0", packed, method=8, crc=zlib.crc32(FLOATS["0"]), size=24, compressed=len(packed))
    expect_convert_refused(write(tmp_path, build(rows)), ZipError, "A deflated record is cut off")


def test_35_broken_deflate_stream(tmp_path: Path) -> None:
    """Bytes that do not inflate."""
    rows = torch_records(PICKLE, FLOATS)
    rows[2] = Rec(b"archive/data/0", b"\xff" * 24, method=8, size=24)
    expect_convert_refused(write(tmp_path, build(rows)), ZipError, "cannot be inflated")


@pytest.mark.parametrize("body", [b"", bytes(7), bytes(8)])
def test_38_short_zip64_field(body: bytes, tmp_path: Path) -> None:
    """A zip64 field without the numbers that the entry leaves to it."""
    extra = struct.pack("<2H", 1, len(body)) + body
    lie = {"size": 0xFFFFFFFF, "compressed": 0xFFFFFFFF}
    expect_refused(write(tmp_path, build(records(extra=extra, **lie))), ZipError, "zip64 field", "too short")


def test_38_zip64_field_lies(tmp_path: Path) -> None:
    """A zip64 field with a size that nothing could have."""
    extra = struct.pack("<2H2Q", 1, 16, 2**64 - 1, 2**64 - 1)
    lie = {"size": 0xFFFFFFFF, "compressed": 0xFFFFFFFF}
    expect_refused(write(tmp_path, build(records(extra=extra, **lie))), ZipError, "reaches into the zip directory")


def test_40_crc_of_the_pickle(tmp_path: Path) -> None:
    """A pickle that changed after it was saved."""
    rows = records()
    rows[0].crc = 1
    expect_refused(write(tmp_path, build(rows)), ChecksumError, "archive/data.pkl", "CRC-32")


def test_41_crc_of_a_storage(tmp_path: Path) -> None:
    """A storage that changed: `inspect` reads no tensors, a copy copies, `verify` refuses with the record's name."""
    path = write(tmp_path, build(records(crc=0x1234, local={"crc": 0x1234})))
    assert names(path) == ["a.w"]
    ckpt_tools.convert(path, tmp_path / "copy.pth")
    before = listing(tmp_path)
    for options in ({}, {"map_location": "cuda"}, {"dtype": "bf16"}):
        for target in ("out.pth", "out.safetensors"):
            with pytest.raises(ChecksumError, match=r"archive/data/0"):
                ckpt_tools.convert(path, tmp_path / target, verify=True, **options)  # type: ignore[arg-type]
    assert listing(tmp_path) == before


def test_42_no_checksums(tmp_path: Path) -> None:
    """CRC 0 in all records: the writer had checksums off, which is fine, and `verify` says that it checked nothing."""
    rows = records()
    for rec in rows:
        rec.crc = 0
    path = write(tmp_path, build(rows))
    assert names(path) == ["a.w"]
    notes = [note.code for note in ckpt_tools.convert(path, tmp_path / "out.pth", verify=True).notes]
    assert "no-checksums" in notes
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


@pytest.mark.parametrize("text", [b"", b"Little", b"middle", b"little\n", b"x" * 100])
def test_44_odd_byteorder(text: bytes, tmp_path: Path) -> None:
    """A byte order that is none."""
    rows = records()
    rows[1].data = text
    expect_refused(write(tmp_path, build(rows)), ZipError, "'byteorder' says", "'little' or 'big'")


def test_44_no_byteorder(tmp_path: Path) -> None:
    """Files before torch 2.1 have no such record: little."""
    rows = records()
    del rows[1]
    path = write(tmp_path, build(rows))
    assert "big-endian" not in [row.code for row in ckpt_tools.inspect(path).findings]
    ckpt_tools.convert(path, tmp_path / "out.pth")
    assert torch.equal(torch.load(tmp_path / "out.pth")["a.w"], torch.arange(6.0).reshape(2, 3))


def test_44_big_endian(tmp_path: Path) -> None:
    """A big-endian file is swapped on the way out."""
    rows = torch_records(PICKLE, {"0": struct.pack(">6f", *range(6))})
    rows[1].data = b"big"
    path = write(tmp_path, build(rows))
    assert "big-endian" in [row.code for row in ckpt_tools.inspect(path).findings]
    ckpt_tools.convert(path, tmp_path / "out.pth")
    assert torch.equal(torch.load(tmp_path / "out.pth")["a.w"], torch.arange(6.0).reshape(2, 3))


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
    rewrite(tmp_path / "little.pth", tmp_path / "in.pth", change=lambda name, data: b"big" if name == "byteorder" else data)
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


def test_45_wide_end_is_accepted(tmp_path: Path) -> None:
    """The zip64 end record that torch always writes, by hand."""
    assert names(write(tmp_path, torch_zip(PICKLE, FLOATS, wide_disks=1))) == ["a.w"]
    assert wide_end(1, 2, 3, 4)[:4] == b"PK\x06\x06"


def test_deflated_zeros_come_out_whole(tmp_path: Path) -> None:
    """A byte of zeros that the inflater holds back when it has taken all of its input is not said to be missing."""
    size = (4 << 20) + 1
    torch.save({"a": torch.zeros(size, dtype=torch.uint8)}, tmp_path / "stored.pth")
    rewrite(tmp_path / "stored.pth", tmp_path / "a.pth", method=zipfile.ZIP_DEFLATED)
    assert ckpt_tools.check(tmp_path / "a.pth").verdict == "healthy"


# fmt: off
REFUSED = {
    "14 truncated in the pickle": (saved()[:200], ZipError, "no tensor can be told", "pickle that lists them is cut off"),
    **{f"17 wrong count {at}": (torch_zip(PICKLE, FLOATS, **lie), ZipError, said)
       for at, (lie, said) in enumerate([({"count": 3}, "more than the 3 records"), ({"count": 5}, "damaged at offset")])},
    **{f"18 bad end record {at}": (torch_zip(PICKLE, FLOATS, **lie), ZipError, said)
       for at, (lie, said) in enumerate([({"start": 0}, "not where the file says"), ({"start": 2**31},
        "not where the file says"), ({"size": 1}, "not where the file says"), ({"size": 0xFFFFFFFF},
        "not where the file says"), ({"wide_start": 2**63, "start": 0xFFFFFFFF}, "not where the file says"),
        ({"wide_size": 2**64 - 1, "size": 0xFFFFFFFF}, "not where the file says"), ({"wide_at": 2**64 - 1},
        "zip64 end record is said to be at"), ({"wide_at": 0}, "no zip64 end record at 0")])},
    "18 bad signature": (
        torch_zip(PICKLE, FLOATS).replace(b"PK\x01\x02", b"PK\x01\x03", 1), ZipError, "directory is damaged at offset"),
    "19 comment longer than the file": (torch_zip(PICKLE, FLOATS)[:-2] + b"\x05\x00", ZipError, "comment longer than the file"),
    **{f"20 end records disagree {at}": (torch_zip(PICKLE, FLOATS, **lie), ZipError, "two end records disagree")
       for at, lie in enumerate([{"wide_count": 5}, {"wide_size": 1}, {"wide_start": 7}])},
    **{f"21 several disks {at}": (torch_zip(PICKLE, FLOATS, **lie), ZipError, "one part of several")
       for at, lie in enumerate([{"disk": 1}, {"wide_disks": 2}])},
    "21 record on another disk": (build(records(disk=3)), ZipError, "one part of several"),
    **{f"23 bytes before {at}": (before + torch_zip(PICKLE, FLOATS), ckpt_tools.errors.NotACheckpointError, "in front of a zip")
       for at, before in enumerate([b"junk", b"#!/bin/sh\n", bytes(100)])},
    "23 a zip before": (b"PK\x03\x04" + bytes(60) + torch_zip(PICKLE, FLOATS), ZipError, "not where the file says"),
    "25 duplicate names": (
        build([*records(), Rec(b"archive/data/0", bytes(24))]), ZipError, "two records named 'archive/data/0'"),
    "25 entry listed twice": (
        build([*records(), Rec(b"archive/data/0", FLOATS["0"], header=records()[2].header)]), ZipError, "two records named"),
    **{f"26 names equal but for case {at}": (build([*records(), Rec(one), Rec(two)]), ZipError, "differ only in case",
        "torch would mix")
       for at, (one, two) in enumerate([(b"archive/data/a", b"archive/data/A"), ("archive/ß".encode(), b"archive/SS")])},
    **{f"27 local name differs {at}": (build(records(local={"name": local})), ZipError, "another name in its local header")
       for at, local in enumerate([b"archive/data/1", b"archive/data/00", b"archive/data/"])},
    **{f"27 local sums differ {at}": (build(records(local=lie)), ZipError, "another size or CRC-32 in its local header")
       for at, lie in enumerate([{"crc": 1}, {"size": 25}, {"compressed": 23}])},
    **{f"27 local method differs {at}": (build(records(local=lie)), ZipError, "packed in another way")
       for at, lie in enumerate([{"method": 8}, {"flags": 1}])},
    **{f"29 entry points nowhere {at}": (build(records(header=header)), ZipError, "not where the directory says", str(header))
       for at, header in enumerate([1, 30, 10_000_000, 0xFFFFFFFE])},
    **{f"30 encrypted {at}": (build(records(flags=flag)), ZipError, "encrypted or a patch")
       for at, flag in enumerate([1, 1 << 5, 1 << 6, 1 << 13])},
    **{f"31 folder with data {at}": (build(records(**changes)), ZipError, "marked as a folder and has data")
       for at, changes in enumerate([{"name": b"archive/data/0/"}, {"attributes": 0x10}])},
    **{f"32 bad names {at}": (build([*records(), Rec(name, b"x")]), ZipError, "is not one that torch writes")
       for at, name in enumerate([b"archive/../evil", b"../evil", b"..", b"/etc/passwd", b"archive\\data\\0", b"archive/a\0b",
        b"", b"archive//0"])},
    "32 name not utf8": (build([*records(), Rec(b"archive/\xff\xfe")]), ZipError, "is not UTF-8"),
    "32 second root": (build([*records(), Rec(b"other/data.pkl", PICKLE)]), ZipError, "2 root folders", "'other'"),
    "32 no root": (
        build([Rec(b"word/document.xml", b"<x/>")]), UnsupportedContainerError, "not one that torch.save wrote",
        "word/document.xml"),
    "32 empty zip": (build([]), UnsupportedContainerError, "It holds nothing"),
    **{f"36 other methods {at}": (build(records(method=method)), ZipError, f"compressed with {name}")
       for at, (method, name) in enumerate([(12, "bzip2"), (14, "lzma"), (93, "zstd"), (9, "deflate64"), (77, "method 77")])},
    "37 stored with two sizes": (build(records(size=25)), ZipError, "stored with two sizes, 24 and 25"),
    **{f"38 malformed extra {at}": (build(records(extra=extra)), ZipError, "extra field", "malformed")
       for at, extra in enumerate([b"\x01", b"\x01\x00\xff\xff", b"\x01\x00\x10\x00" + bytes(15), b"FB\x02\x00Z"])},
    "39 a million records": (torch_zip(PICKLE, FLOATS, count=0xFFFF, wide_count=1_000_001), LimitError, "1000001 records"),
}
# fmt: on


@pytest.mark.parametrize("name", REFUSED)
def test_refused(name: str, tmp_path: Path) -> None:
    """`inspect` and `convert` refuse each with the same error and say why; nothing is written."""
    data, error, *said = REFUSED[name]
    expect_refused(write(tmp_path, data), error, *said)
