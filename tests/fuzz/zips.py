"""Mutations of a zip: whole records, the fields of its headers, the pickle and the small records inside."""

from __future__ import annotations

import io
import struct
import zipfile
import zlib
from dataclasses import replace
from functools import lru_cache
from random import Random
from typing import Any

from tests.fuzz import arrays, headers, pickles, raw
from tests.fuzz.values import NUMBERS, number, some_bytes
from tests.hostile.zips import Rec, build

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
        return _field(rng, data)
    rows = [replace(row) for row in records(data)]
    if pick < 0.7:
        _mutate_contents(rng, rows, records(other))
    else:
        for _ in range(rng.choice((1, 1, 2))):
            rng.choice(_RECORDS)(rng, rows, records(other))
    return build(rows, **(_lies(rng) if rng.random() < 0.08 else {}))


def _mutate_contents(rng: Random, rows: list[Rec], others: tuple[Rec, ...]) -> None:
    for row in rows:
        if row.name.endswith(b".pkl"):
            other = next((record.data for record in others if record.name.endswith(b".pkl")), row.data)
            row.data = pickles.mutate(rng, row.data, other) if rng.random() < 0.95 else raw.mutate(rng, row.data, other)
        elif row.name.endswith((b"_weights_config.json", b"/model.json", b"_constants_config.json")):
            row.data = headers.mutate_json(rng, row.data)
        elif row.name.endswith(b".py"):
            row.data = _code(rng, row.data)
        elif row.name.endswith(b".npy"):
            row.data = arrays.mutate(rng, row.data, row.data)


_TOKENS = (
    b'"', b"\\", b"[", b"]", b"__parameters__ = [", b"__buffers__ = [", b"class X(Module):\n", b'"weight", ', b'\\"', b"\n",
    b"\xff", b'"' * 40, b'\\"' * 40, b"  __parameters__ = []\n" * 3, b"\x1b[1m", b"  evil : Tensor\n", b": Tensor", b": int",
    b"  def __setstate__(self: __torch__.M,\n    state: Dict[str, Tensor]) -> NoneType:\n    return None\n",
)  # fmt: skip


def _code(rng: Random, data: bytes) -> bytes:
    """The code of a program with something else in it."""
    for _ in range(rng.choice((1, 1, 2, 5))):
        at = rng.choice([data.find(b"__") + 1, data.find(b'"') + 1, rng.randrange(len(data) + 1)])
        data = data[:at] + rng.choice(_TOKENS) + data[at + rng.choice((0, 1, 8)) :]
    return data


def _field(rng: Random, data: bytes) -> bytes:
    """Numbers in the headers as they stand in the file."""
    out = bytearray(data)
    for _ in range(rng.choice((1, 1, 1, 2, 3))):
        signature = rng.choice(list(_FIELDS))
        places = []
        at = -1
        while (at := data.find(signature, at + 1)) >= 0:
            places.append(at)
        if places:
            offset, width = rng.choice(_FIELDS[signature])
            at = rng.choice(places) + offset
            value = number(rng, int.from_bytes(out[at : at + width], "little")) % (1 << 8 * width)
            out[at : at + width] = value.to_bytes(width, "little")[: max(0, len(out) - at)]
    return bytes(out)


def _lies(rng: Random) -> dict[str, Any]:
    kind = rng.choice(("count", "size", "start", "wide_count", "wide_size", "wide_start", "wide_at", "wide_disks", "disk"))
    value = rng.choice(NUMBERS)
    limit = 2**64 if kind.startswith("wide") and kind != "wide_disks" else 2**16 if kind in ("count", "disk") else 2**32
    return {kind: value % limit}


def _shuffle(rng: Random, rows: list[Rec], others: tuple[Rec, ...]) -> None:
    rng.shuffle(rows)


def _drop(rng: Random, rows: list[Rec], others: tuple[Rec, ...]) -> None:
    if rows:
        del rows[rng.randrange(len(rows))]


def _twice(rng: Random, rows: list[Rec], others: tuple[Rec, ...]) -> None:
    if rows:
        rows.insert(rng.randrange(len(rows) + 1), replace(rng.choice(rows)))


def _foreign(rng: Random, rows: list[Rec], others: tuple[Rec, ...]) -> None:
    if others:
        rows.insert(rng.randrange(len(rows) + 1), replace(rng.choice(others)))


def _rename(rng: Random, rows: list[Rec], others: tuple[Rec, ...]) -> None:
    if rows:
        row = rng.choice(rows)
        row.name = rng.choice((*_NAMES, row.name.upper(), row.name + b"/", row.name[:-1], b"x/" + row.name))


def _local(rng: Random, rows: list[Rec], others: tuple[Rec, ...]) -> None:
    if rows:
        key = rng.choice(("name", "method", "flags", "crc", "size", "compressed", "extra", "magic"))
        values = {"name": rng.choice(_NAMES), "extra": some_bytes(rng), "magic": b"PK\x03\x05"}
        limit = 2**16 if key in ("method", "flags") else 2**32
        rng.choice(rows).local = {key: values.get(key, rng.choice(NUMBERS) % limit)}


def _central(rng: Random, rows: list[Rec], others: tuple[Rec, ...]) -> None:
    if rows:
        row = rng.choice(rows)
        key = rng.choice(("method", "flags", "crc", "size", "compressed", "attributes", "header", "disk"))
        setattr(row, key, rng.choice(NUMBERS) % (2**16 if key in ("method", "flags", "disk") else 2**32))


def _extra(rng: Random, rows: list[Rec], others: tuple[Rec, ...]) -> None:
    if rows:
        body = b"".join(struct.pack("<Q", rng.choice(NUMBERS) % 2**64) for _ in range(rng.randrange(5)))
        rng.choice(rows).extra = struct.pack("<2H", rng.choice((1, 0x4246, 0x7075)), len(body) + rng.choice((0, 0, 1))) + body


def _deflate(rng: Random, rows: list[Rec], others: tuple[Rec, ...]) -> None:
    if rows:
        row = rng.choice(rows)
        packer = zlib.compressobj(6, zlib.DEFLATED, -15)
        row.crc, row.size, row.method = zlib.crc32(row.data), len(row.data), 8
        row.data = packer.compress(row.data) + packer.flush()
        if rng.random() < 0.4:
            row.data = raw.mutate(rng, row.data, row.data)


def _content(rng: Random, rows: list[Rec], others: tuple[Rec, ...]) -> None:
    if rows:
        row = rng.choice(rows)
        row.data = rng.choice(_SMALL) if len(row.data) < 41 else raw.mutate(rng, row.data, row.data)


def _unlisted(rng: Random, rows: list[Rec], others: tuple[Rec, ...]) -> None:
    if rows:
        rng.choice(rows).listed = False


_RECORDS = (
    _shuffle, _drop, _twice, _foreign, _rename, _local, _central, _extra, _deflate, _content, _content, _unlisted,
)  # fmt: skip
