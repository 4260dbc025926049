"""Mutations of a torch-tar: its members, the fields of its headers, the pickles in it."""

from __future__ import annotations

import io
import tarfile
from random import Random

from tests.fuzz import pickles, raw
from tests.fuzz.values import number
from tests.support import tars
from tests.support.legacy import floats

_NAMES = ("pickle", "storages", "tensors", "sys_info", "pickle/", "./pickle", "x", "p" * 120, "a" * 90 + "/pickle")
_KINDS = (b"0", b"\0", b"1", b"2", b"5", b"7", b"x", b"g", b"L", b"S", b"X", b"9")


def sample() -> bytes:
    """A good one."""
    stored = tars.storages((1, "FloatStorage", floats(0, 1, 2, 3, 4, 5)))
    described = tars.tensors((2, 1, (2, 3), (3, 1), 0), (3, 1, (3,), (2,), 1))
    from tests.hostile.pickles import dict_of

    return tars.torch_tar(dict_of(a=tars.persistent(2), b=tars.persistent(3), s=tars.persistent(1)), stored, described)


def mutate(rng: Random, data: bytes, other: bytes) -> bytes:
    """A mutation of a tar."""
    if rng.random() < 0.4:
        return _field(rng, data)
    with tarfile.open(fileobj=io.BytesIO(data)) as archive:
        members = [(info, archive.extractfile(info).read()) for info in archive if info.isreg()]  # type: ignore[union-attr]
    rng.choice(_MUTATIONS)(rng, members)
    out = io.BytesIO()
    with tarfile.open(fileobj=out, mode="w:", format=rng.choice((tarfile.PAX_FORMAT, tarfile.GNU_FORMAT))) as archive:
        for info, content in members:
            info.size = len(content)
            archive.addfile(info, io.BytesIO(content))
    return out.getvalue()


Members = list[tuple[tarfile.TarInfo, bytes]]


def _content(rng: Random, members: Members) -> None:
    at = rng.randrange(len(members))
    info, content = members[at]
    change = pickles.mutate if rng.random() < 0.7 else raw.mutate
    members[at] = info, change(rng, content, rng.choice(members)[1])


def _again(rng: Random, members: Members) -> None:
    """One more member, under a name by one of the ways that there are."""
    for _ in range(rng.choice((0, 0, 0, 70))):
        members.append((tarfile.TarInfo("filler"), b""))
    info = tarfile.TarInfo(rng.choice(_NAMES))
    if rng.random() < 0.4:
        info.pax_headers = {rng.choice(("path", "size", "mtime", "GNU.sparse.name")): rng.choice((*_NAMES, "0", "1024"))}
    members.insert(rng.randrange(len(members) + 1), (info, rng.choice(members)[1]))


def _order(rng: Random, members: Members) -> None:
    rng.shuffle(members)


_MUTATIONS = (_content, _content, _again, _again, _order)


def _field(rng: Random, data: bytes) -> bytes:
    """A field of a header, and the checksum that goes with it."""
    places = [at for at in range(0, len(data), 512) if data[at + 257 : at + 262] == b"ustar"]
    at = rng.choice(places)
    block = bytearray(data[at : at + 512])
    pick = rng.random()
    if pick < 0.3:
        block[156:157] = rng.choice(_KINDS)
    elif pick < 0.5:
        block[124:136] = b"%011o\0" % (number(rng, 512) % 8**11)
    elif pick < 0.7:
        block[345:355] = rng.choice((b"folder", b"/", b"a/b")).ljust(10, b"\0")
    elif pick < 0.9:
        block[:20] = rng.choice(_NAMES).encode()[:20].ljust(20, b"\0")
    else:
        block[257:265] = bytes(8)
    block[148:156] = b" " * 8
    block[148:156] = b"%06o\0 " % sum(block)
    return data[:at] + bytes(block) + data[at + 512 :]
