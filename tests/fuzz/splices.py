"""Mutations that make one file of two: one behind the other, one over the other, one in the other, any as a tar."""

from __future__ import annotations

import struct
from random import Random

from tests.hostile.zips import Rec, build

BLOCK = 512


def mutate(rng: Random, data: bytes, other: bytes) -> bytes:
    """One mutation of two files."""
    return rng.choice(_MUTATIONS)(rng, data, other)


def as_tar(data: bytes) -> bytes:
    """The bytes with the checksum of a tar header in its place."""
    block = bytearray(data[:BLOCK].ljust(BLOCK, b"\0"))
    block[148:156] = b" " * 8
    block[148:156] = b"%06o\0 " % sum(block)
    return bytes(block) + data[BLOCK:]


def _behind(rng: Random, data: bytes, other: bytes) -> bytes:
    return data + bytes(-len(data) % rng.choice((1, 64, BLOCK))) + other


def _thrice(rng: Random, data: bytes, other: bytes) -> bytes:
    return b"".join(rng.choice((data, other)) for _ in range(3))


def _head_over(rng: Random, data: bytes, other: bytes) -> bytes:
    length = rng.choice((4, 8, 9, 16, 64, BLOCK))
    return other[:length] + data[length:]


def _tail_over(rng: Random, data: bytes, other: bytes) -> bytes:
    length = rng.choice((22, 42, 98, 98, 200, len(other) // 2))
    return data[: max(0, len(data) - length * rng.randrange(2))] + other[-length:]


def _inside(rng: Random, data: bytes, other: bytes) -> bytes:
    at = rng.choice((rng.randrange(len(data) + 1), BLOCK, 64, max(0, len(data) - 98)))
    return data[:at] + other + data[at + len(other) * rng.randrange(2) :]


def _tar(rng: Random, data: bytes, other: bytes) -> bytes:
    return as_tar(data if rng.random() < 0.5 else data[:BLOCK] + other)


def _roots(rng: Random, data: bytes, other: bytes) -> bytes:
    """Two archives unpacked into one, under one root or two."""
    from tests.fuzz.zips import records

    if not data.startswith(b"PK") or not other.startswith(b"PK"):
        return _behind(rng, data, other)
    root = rng.choice((b"archive", b"b", b"ARCHIVE"))
    mixed = [Rec(row.name, row.data) for row in records(data)]
    mixed += [Rec(root + b"/" + row.name.partition(b"/")[2], row.data) for row in records(other)]
    if rng.random() < 0.5:
        rng.shuffle(mixed)
    names: dict[bytes, Rec] = {}
    return build(list({**names, **{row.name: row for row in mixed}}.values()))


def _relative_end(rng: Random, data: bytes, other: bytes) -> bytes:
    """An end of an archive whose places lead somewhere else."""
    at, count = rng.randrange(len(data) + 1), rng.randrange(1, 9)
    wide = struct.pack(
        "<4sQ2H2I4Q", b"PK\6\6", 44, 45, 45, 0, 0, count, count, rng.randrange(400), rng.randrange(len(data) + 1)
    )
    return data[:at] + wide + data[at + len(wide) * rng.randrange(2) :] + other


_MUTATIONS = (_behind, _thrice, _head_over, _tail_over, _inside, _tar, _roots, _relative_end)
