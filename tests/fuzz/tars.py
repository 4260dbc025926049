"""Mutations of a torch-tar: its members, the fields of its headers, the pickles in it."""

from __future__ import annotations

import io
import tarfile
from random import Random

from tests.fuzz import pickles, raw
from tests.fuzz.raw import BLOCK, number
from tests.support.tars import checksummed

_NAMES = ("pickle", "storages", "tensors", "sys_info", "pickle/", "./pickle", "x", "p" * 120, "a" * 90 + "/pickle")
_KINDS = (b"0", b"\0", b"1", b"2", b"5", b"7", b"x", b"g", b"L", b"S", b"X", b"9")


def mutate(rng: Random, data: bytes, other: bytes) -> bytes:
    """A mutation of a tar."""
    if rng.random() < 0.4:
        return _field(rng, data)
    with tarfile.open(fileobj=io.BytesIO(data)) as archive:
        members = [(info, archive.extractfile(info).read()) for info in archive if info.isreg()]  # type: ignore[union-attr]
    pick = rng.random()
    if pick < 0.4:
        at, change = rng.randrange(len(members)), pickles.mutate if rng.random() < 0.7 else raw.mutate
        members[at] = members[at][0], change(rng, members[at][1], rng.choice(members)[1])
    elif pick < 0.8:  # one more member, under a name by one of the ways that there are
        members += [(tarfile.TarInfo("filler"), b"")] * rng.choice((0, 0, 0, 70))
        info = tarfile.TarInfo(rng.choice(_NAMES))
        if rng.random() < 0.4:
            info.pax_headers = {rng.choice(("path", "size", "mtime", "GNU.sparse.name")): rng.choice((*_NAMES, "0", "1024"))}
        members.insert(rng.randrange(len(members) + 1), (info, rng.choice(members)[1]))
    else:
        rng.shuffle(members)
    out = io.BytesIO()
    with tarfile.open(fileobj=out, mode="w:", format=rng.choice((tarfile.PAX_FORMAT, tarfile.GNU_FORMAT))) as archive:
        for info, content in members:
            info.size = len(content)
            archive.addfile(info, io.BytesIO(content))
    return out.getvalue()


def _field(rng: Random, data: bytes) -> bytes:
    """A field of a header, and the checksum that goes with it."""
    start = rng.choice([at for at in range(0, len(data), BLOCK) if data[at + 257 : at + 262] == b"ustar"])
    at, field = rng.choice(
        (
            (156, rng.choice(_KINDS)), (156, rng.choice(_KINDS)), (124, b"%011o\0" % (number(rng, 512) % 8**11)),
            (345, rng.choice((b"folder", b"/", b"a/b")).ljust(10, b"\0")), (257, bytes(8)),
            (0, rng.choice(_NAMES).encode()[:20].ljust(20, b"\0")),
        )
    )  # fmt: skip
    block = data[start : start + at] + field + data[start + at + len(field) : start + BLOCK]
    return data[:start] + checksummed(block) + data[start + BLOCK :]
