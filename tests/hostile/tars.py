"""Bombs in tars: deep paths, headers that say the same again and again, crowds of members and of folders."""

from __future__ import annotations

import gzip

from tests.hostile import bombs
from tests.hostile import pickles as p
from tests.hostile.bombs import FLOATS, bomb
from tests.hostile.zips import torch_zip


def member(name: bytes, data: bytes = b"", kind: bytes = b"0") -> bytes:
    """A header, and what is behind it."""
    head = bytearray(512)
    head[: len(name)], head[124:136], head[156:157], head[257:265] = name, b"%011o\0" % len(data), kind, b"ustar\x0000"
    head[148:156] = b"%06o\0 " % (sum(head) + 8 * 32)
    return bytes(head) + data + bytes(-len(data) % 512)


def beside_a_checkpoint(*members: bytes) -> bytes:
    """A tar with a small checkpoint as its last member."""
    checkpoint = torch_zip(p.pickle(p.dict_of(**{"a.w": p.tensor()})), FLOATS)
    return b"".join(members) + member(b"a.pth", checkpoint) + bytes(1024)


@bomb
def tar_of_a_deep_path() -> bytes:
    """One member in thirty thousand folders in one another."""
    return gzip.compress(beside_a_checkpoint(member(b"x", b"a/" * 32_000 + b"b\0", b"L"), member(b"y", b"1")))


@bomb
def tar_of_idle_records() -> bytes:
    """Pax headers with thousands of records each that say nothing."""
    return gzip.compress(beside_a_checkpoint(member(b"x", b"7 uid=\n" * 9300, b"x") * 300))


@bomb
def tar_of_empty_members() -> bytes:
    """As many members as compress into a file."""
    return gzip.compress(beside_a_checkpoint(*(member(b"%x" % index) for index in range(bombs.SIZE // 15))))


@bomb
def tar_of_folders() -> bytes:
    """Nine thousand folders, each with one file."""
    return beside_a_checkpoint(*(member(b"%x/a" % index) for index in range(9000)))


@bomb
def tar_of_numbers() -> bytes:
    """A sparse file of GNU's, of two bytes for each of its ranges."""
    said = b"22 GNU.sparse.major=1\n22 GNU.sparse.minor=0\n"
    ranges = b"20000000\n" + b"1\n" * 40_000_000
    return gzip.compress(beside_a_checkpoint(member(b"x", said, b"x"), member(b"y", ranges)))


@bomb
def tar_of_several_crowds() -> bytes:
    """Twenty checkpoints without a tensor, each with as many lists as one file may have: which is the one with tensors?"""
    crowd = torch_zip(p.pickle(p.list_of(*[p.EMPTY_LIST * 390_000])), {})
    return gzip.compress(beside_a_checkpoint(*(member(b"%d.pth" % index, crowd) for index in range(20))))
