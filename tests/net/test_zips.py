"""The zip around a checkpoint: what torch and zipfile read in one way is read so, and what has two readings is refused."""

import io
import struct
import zipfile
import zlib
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch

import ckpt_tools
import ckpt_tools.torch
from ckpt_tools.errors import CkptError
from tests.hostile import pickles as p
from tests.hostile.zips import Rec, build, deflated, end_record, torch_records
from tests.support.zips import rewrite

FLOATS = struct.pack("<6f", *range(6))
PICKLE = p.pickle(p.dict_of(**{"a.w": p.tensor()}))
OTHER = p.pickle(p.dict_of(**{"b.w": p.tensor()}))
WANTED = torch.arange(6.0).reshape(2, 3)
LONG = "layer." * 12_000 + "weight"


def rows(**storage: object) -> list[Rec]:
    """The records of a good file, with changes to the storage's."""
    made = torch_records(PICKLE, {"0": FLOATS})
    for name, value in storage.items():
        setattr(made[2], name, value)
    return made


def wide(*, local: bool, listed: bool) -> list[Rec]:
    """The sizes of the storage in zip64 fields."""
    field = struct.pack("<2H2Q", 1, 16, len(FLOATS), len(FLOATS))
    most = 0xFFFFFFFF
    made = rows(**({"size": most, "compressed": most, "extra": field} if listed else {}))
    truth = {"crc": zlib.crc32(FLOATS), "size": len(FLOATS), "compressed": len(FLOATS), "extra": b""}
    made[2].local = {"size": most, "compressed": most, "extra": field} if local else truth
    return made


def all_deflated() -> bytes:
    """Every record packed."""
    return build([deflated(rec.name, rec.data) for rec in rows()])


def moved(extra: bytes) -> bytes:
    """Bytes in front, and every offset told with them."""
    return build([Rec(b"archive/old", extra, listed=False), *rows()])


def by_zipfile(method: int) -> bytes:
    """Written by Python, as zip tools do."""
    out = io.BytesIO()
    with zipfile.ZipFile(out, "w", method) as made:
        for rec in rows():
            made.writestr(rec.name.decode(), rec.data)
    return out.getvalue()


def keyed(length: int) -> bytes:
    """The storage under a key of so many characters."""
    return build(torch_records(PICKLE.replace(p.text("0"), p.text("k" * length)), {"k" * length: FLOATS}))


READ: dict[str, Callable[[], bytes]] = {
    "plain": lambda: build(rows()),
    "zip64-end": lambda: build(rows(), wide_count=4),
    "zip64-all": lambda: build(rows(), wide_count=4, count=0xFFFF, size=0xFFFFFFFF, start=0xFFFFFFFF),
    "zip64-both": lambda: build(wide(local=True, listed=True)), "zip64-listed": lambda: build(wide(local=False, listed=True)),
    "deflated": all_deflated,
    "deflated-storage": lambda: build([*rows()[:2], deflated(b"archive/data/0", FLOATS), rows()[3]]),
    "zipfile-stored": lambda: by_zipfile(zipfile.ZIP_STORED), "zipfile-deflated": lambda: by_zipfile(zipfile.ZIP_DEFLATED),
    "dead-bytes": lambda: moved(bytes(5000)), "comment": lambda: build(rows(), comment=b"x" * 65_000),
    "long-root": lambda: build(torch_records(PICKLE, {"0": FLOATS}, folder="x" * 500)), "long-key": lambda: keyed(490),
}  # fmt: skip


@pytest.mark.parametrize("name", READ)
def test_one_reading(name: str, tmp_path: Path) -> None:
    """Torch's tensors come from every command and function, and out again; Python's zipfile finds the archive whole."""
    path, out = tmp_path / "in.pth", tmp_path / "out.pth"
    path.write_bytes(READ[name]())
    assert zipfile.ZipFile(path).testzip() is None
    assert torch.equal(torch.load(path)["a.w"], WANTED)
    ckpt_tools.convert(path, out)
    for found in (ckpt_tools.torch.load(path), torch.load(out), torch.load(out, mmap=True)):
        assert torch.equal(found["a.w"], WANTED)
    assert not problems(path)
    with zipfile.ZipFile(out) as made:
        assert made.testzip() is None
        assert {row.compress_type for row in made.infolist()} == {zipfile.ZIP_STORED}
        starts = [row.header_offset + 30 + len(row.filename) for row in made.infolist() if "/data/" in row.filename]
    assert all(out.read_bytes().count(FLOATS, start) == 1 for start in starts)


def problems(path: Path) -> list[str]:
    """The codes of what `check` finds wrong."""
    return [row.code for row in ckpt_tools.check(path, values=True).findings if row.severity == "problem"]


def second(**lies: object) -> list[Rec]:
    """Two records of the pickle's name."""
    return [Rec(b"archive/data.pkl", OTHER, **lies), *rows()]  # type: ignore[arg-type]


def with_second_end() -> bytes:
    """The directory of another archive, found first by who looks from the front of the comment."""
    inner = build(torch_records(OTHER, {"0": FLOATS}))
    outer = build(rows())
    return outer[:-2] + struct.pack("<H", len(inner)) + inner


def claims(**lies: int) -> bytes:
    """An end record, or its zip64 form, that says other things."""
    return build(rows(), comment=b"", after=b"", **lies)


TWICE: dict[str, Callable[[], bytes]] = {
    "two-pickles": lambda: build(second()),
    "two-pickles-last": lambda: build([*rows(), Rec(b"archive/data.pkl", OTHER)]),
    "two-storages": lambda: build([*rows(), Rec(b"archive/data/0", FLOATS[::-1])]),
    "other-case": lambda: build([*rows(), Rec(b"archive/DATA.pkl", OTHER)]),
    "two-roots": lambda: build([*torch_records(OTHER, {"0": FLOATS}, folder="other"), *rows()]),
    "other-local-name": lambda: build(rows(local={"name": b"archive/data/1"})),
    "other-local-size": lambda: build(rows(local={"size": 20, "compressed": 20})),
    "other-local-method": lambda: build(rows(local={"method": 8})),
    "other-local-crc": lambda: build(rows(local={"crc": 1})),
    "end-in-comment": with_second_end,
    "bytes-in-front": lambda: bytes(100) + build(rows()),
    "archive-in-front": lambda: build(torch_records(OTHER, {"0": FLOATS})) + build(rows()),
    "count": lambda: claims(count=3), "start": lambda: claims(start=7), "size": lambda: claims(size=9),
    "wide-count": lambda: claims(wide_count=2), "wide-start": lambda: claims(wide_start=3),
    "wide-elsewhere": lambda: claims(wide_count=4, wide_at=1),
    "overlap": lambda: build([*rows(), Rec(b"archive/data/1", FLOATS, header=0)]),
    "sizes-differ": lambda: build(rows(size=48)),
    "encrypted": lambda: build(rows(flags=1)), "packed-otherwise": lambda: build(rows(method=12)),
    "inflates-to-more": lambda: build([*rows()[:2], deflated(b"archive/data/0", FLOATS + b"x", size=24), rows()[3]]),
    "inflates-to-less": lambda: build([*rows()[:2], deflated(b"archive/data/0", FLOATS[:-4], size=24), rows()[3]]),
    "storage-missing": lambda: build([*rows()[:2], rows()[3]]), "storage-short": lambda: build(rows(data=FLOATS[:-1])),
    "key-of-64-kib": lambda: keyed(60_000), "after-the-end": lambda: build(rows(), after=end_record(0, 0, 0)),
}  # fmt: skip


@pytest.mark.parametrize("name", TWICE)
def test_two_readings_or_none(name: str, tmp_path: Path) -> None:
    """Nothing is shown, loaded or written of a file that two readers could read differently."""
    path = tmp_path / "in.pth"
    path.write_bytes(TWICE[name]())
    works: list[Callable[[], Any]] = [
        lambda: ckpt_tools.inspect(path), lambda: ckpt_tools.convert(path, tmp_path / "out.pth"),
        lambda: ckpt_tools.torch.load(path), lambda: ckpt_tools.stats(path),
    ]  # fmt: skip
    for work in works[name.startswith("inflates") :]:  # `inspect` reads no tensors
        with pytest.raises(CkptError):
            work()
    assert problems(path)
    assert sorted(tmp_path.iterdir()) == [path]


@pytest.mark.parametrize("place", [0, -1])
def test_a_crc_that_is_not_the_bytes(place: int, tmp_path: Path) -> None:
    """`check` and what leaves the container compare every checksum, the last one's too."""
    torch.save({"a": torch.arange(4.0), "b": torch.arange(4.0) + 9}, tmp_path / "in.pth")
    data = bytearray((tmp_path / "in.pth").read_bytes())
    data[data.index(struct.pack("<f", [1.0, 12.0][place])) + 2] ^= 0x41
    (tmp_path / "in.pth").write_bytes(data)
    assert problems(tmp_path / "in.pth")
    with pytest.raises(CkptError, match=f"data/{[0, 1][place]}"):
        ckpt_tools.convert(tmp_path / "in.pth", tmp_path / "out.safetensors")


@pytest.mark.parametrize("method", [zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED])
def test_names_beyond_64_kib(method: int, tmp_path: Path) -> None:
    """A name of a tensor that no record could have goes from container to container, and back."""
    torch.save({LONG: torch.arange(3.0), LONG + "2": torch.ones(2)}, tmp_path / "saved.pth")
    rewrite(tmp_path / "saved.pth", tmp_path / "in.pth", method=method)
    steps = ["in.pth", "out.safetensors", "back.pth", "old.pth"]
    for source, target in pairwise(steps):
        ckpt_tools.convert(tmp_path / source, tmp_path / target, format="pth-legacy" if target == "old.pth" else None)
    found = torch.load(tmp_path / "old.pth")
    assert {name: value.tolist() for name, value in found.items()} == {LONG: [0, 1, 2], LONG + "2": [1, 1]}
    assert [row["name"] for row in ckpt_tools.inspect(tmp_path / "in.pth").tensors] == [LONG, LONG + "2"]


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
