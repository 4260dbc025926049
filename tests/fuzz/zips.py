"""Mutations of a zip: whole records, the fields of its headers, the pickle and the small records inside."""

from __future__ import annotations

import io
import struct
import zipfile
from dataclasses import replace
from functools import lru_cache
from random import Random
from typing import Any

from tests.fuzz import headers, pickles, raw
from tests.fuzz.raw import NUMBERS, places, put_number, some_bytes
from tests.hostile.zips import Rec, build, deflated

# signature -> where in the header its fields are, each (offset, bytes)
_FIELDS = {
    b"PK\x01\x02": ((4, 2), (6, 2), (8, 2), (10, 2), (16, 4), (20, 4), (24, 4), (28, 2), (30, 2), (32, 2), (34, 2),
                  (38, 4), (42, 4)),
    b"PK\x03\x04": ((6, 2), (8, 2), (14, 4), (18, 4), (22, 4), (26, 2), (28, 2)),
    b"PK\x05\x06": ((4, 2), (6, 2), (8, 2), (10, 2), (12, 4), (16, 4), (20, 2)),
    b"PK\x06\x06": ((4, 8), (16, 4), (20, 4), (24, 8), (32, 8), (40, 8), (48, 8)),
    b"PK\x06\x07": ((4, 4), (8, 8), (16, 4)),
    b"PK\x07\x08": ((4, 4), (8, 4), (12, 4)),
}  # fmt: skip
_NAMES = (
    b"", b"/", b"a\\b", b"..", b"../x", b"archive/", b"data.pkl", b"archive/data/0", b"archive/DATA.PKL", b"archive/data/../1",
    b"archive/data/0/", b"archive/byteorder", b"archive/version", b"archive/.data/serialization_id", b"\xff", b"a\0b",
    b"archive/.format_version", b"archive/.storage_alignment", b"archive/constants.pkl", b"archive/code/x.py",
)  # fmt: skip
_SMALL = (b"", b"little", b"big", b"3\n", b"1", b"64", b"0", b"-1", b"99999999999999999999", b"\xff\xfe", b"x" * 70)


@lru_cache(maxsize=256)
def records(data: bytes) -> tuple[Rec, ...]:
    """The records of a good zip."""
    with zipfile.ZipFile(io.BytesIO(data)) as file:
        return tuple(Rec(info.filename.encode(), file.read(info)) for info in file.infolist())


def mutate(rng: Random, data: bytes, other: bytes) -> bytes:
    """A mutation of a zip; `other` is a second one."""
    pick = rng.random()
    if pick < 0.2:
        return _fields(rng, data)
    rows = [replace(row) for row in records(data)]
    if pick < 0.65:
        _mutate_contents(rng, rows, records(other))
    elif pick < 0.7:
        rows = _together(rng, rows, records(other))
    else:
        for _ in range(rng.choice((1, 1, 2)) if rows else 0):
            _mutate_records(rng, rows, records(other))
    return build(rows, **(_lies(rng) if rng.random() < 0.08 else {}))


def _fields(rng: Random, data: bytes) -> bytes:
    """Numbers in the headers as they stand in the file."""
    for _ in range(rng.choice((1, 1, 1, 2, 3))):
        signature = rng.choice(list(_FIELDS))
        found, (offset, width) = places(data, signature), rng.choice(_FIELDS[signature])
        data = put_number(rng, data, rng.choice(found) + offset, width) if found else data
    return data


def _mutate_contents(rng: Random, rows: list[Rec], others: tuple[Rec, ...]) -> None:
    for row in rows:
        if row.name.endswith(b".pkl"):
            other = next((record.data for record in others if record.name.endswith(b".pkl")), row.data)
            row.data = pickles.mutate(rng, row.data, other) if rng.random() < 0.95 else raw.mutate(rng, row.data, other)
        elif row.name.endswith((b"_weights_config.json", b"/model.json", b"_constants_config.json")):
            row.data = headers.mutate_json(rng, row.data)
        elif row.name.endswith(b".py"):  # the code of a program with something else in it
            for _ in range(rng.choice((1, 1, 2, 5))):
                at = rng.choice([row.data.find(b"__") + 1, row.data.find(b'"') + 1, rng.randrange(len(row.data) + 1)])
                row.data = row.data[:at] + rng.choice(_TOKENS) + row.data[at + rng.choice((0, 1, 8)) :]
        elif row.name.endswith(b".npy"):
            row.data = headers.mutate_npy(rng, row.data)


def _together(rng: Random, rows: list[Rec], others: tuple[Rec, ...]) -> list[Rec]:
    """Two archives unpacked into one, under one root or two."""
    root = rng.choice((b"archive", b"b", b"ARCHIVE"))
    mixed = rows + [Rec(root + b"/" + row.name.partition(b"/")[2], row.data) for row in others]
    if rng.random() < 0.5:
        rng.shuffle(mixed)
    return list({row.name: row for row in mixed}.values())


_TOKENS = (
    b'"', b"\\", b"[", b"]", b"__parameters__ = [", b"__buffers__ = [", b"class X(Module):\n", b'"weight", ', b'\\"', b"\n",
    b"\xff", b'"' * 40, b'\\"' * 40, b"  __parameters__ = []\n" * 3, b"\x1b[1m", b"  evil : Tensor\n", b": Tensor", b": int",
    b"  def __setstate__(self: __torch__.M,\n    state: Dict[str, Tensor]) -> NoneType:\n    return None\n",
)  # fmt: skip
_KINDS = ("shuffle", "drop", "twice", "foreign", "rename", "local", "central", "extra", "deflate", "content", "content", "hide")


def _mutate_records(rng: Random, rows: list[Rec], others: tuple[Rec, ...]) -> None:
    kind, at, row = rng.choice(_KINDS), rng.randrange(len(rows) + 1), rng.choice(rows)
    if kind == "shuffle":
        rng.shuffle(rows)
    elif kind == "drop" and len(rows) > 1:
        rows.remove(row)
    elif kind in ("twice", "foreign"):
        rows.insert(at, replace(row if kind == "twice" or not others else rng.choice(others)))
    elif kind == "rename":
        row.name = rng.choice((*_NAMES, row.name.upper(), row.name + b"/", row.name[:-1], b"x/" + row.name))
    elif kind == "local":
        key = rng.choice(("name", "method", "flags", "crc", "size", "compressed", "extra", "magic"))
        values = {"name": rng.choice(_NAMES), "extra": some_bytes(rng), "magic": b"PK\x03\x05"}
        row.local = {key: values.get(key, rng.choice(NUMBERS) % (2**16 if key in ("method", "flags") else 2**32))}
    elif kind == "central":
        key = rng.choice(("method", "flags", "crc", "size", "compressed", "attributes", "header", "disk"))
        setattr(row, key, rng.choice(NUMBERS) % (2**16 if key in ("method", "flags", "disk") else 2**32))
    elif kind == "extra":
        body = b"".join(struct.pack("<Q", rng.choice(NUMBERS) % 2**64) for _ in range(rng.randrange(5)))
        row.extra = struct.pack("<2H", rng.choice((1, 0x4246, 0x7075)), len(body) + rng.choice((0, 0, 1))) + body
    elif kind == "deflate":
        packed = deflated(row.name, row.data)
        vars(row).update(vars(packed), data=packed.data if rng.random() < 0.6 else raw.mutate(rng, packed.data, row.data))
    elif kind == "content":
        row.data = rng.choice(_SMALL) if len(row.data) < 41 else raw.mutate(rng, row.data, row.data)
    elif kind == "hide":
        row.listed = False


def _lies(rng: Random) -> dict[str, Any]:
    kind = rng.choice(("count", "size", "start", "wide_count", "wide_size", "wide_start", "wide_at", "wide_disks", "disk"))
    limit = 2**64 if kind.startswith("wide") and kind != "wide_disks" else 2**16 if kind in ("count", "disk") else 2**32
    return {kind: rng.choice(NUMBERS) % limit}
