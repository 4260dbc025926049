"""Mutations of a .npy: its header's text, the header's length, the bytes behind it."""

from __future__ import annotations

import re
from random import Random

from tests.fuzz import pickles, raw
from tests.fuzz.values import number, some_bytes

_SHAPES = (
    b"()", b"(0,)", b"(2000000,1,1)", b"(1," * 40 + b")", b"(" + b"1," * 3000 + b")", b"(-1,)", b"(True,)", b"(2**9,)", b"(3",
    b"[3]", b"(4611686018427387904,4)", b"(1e3,)", b"(0x10,)", b"(1_0,)", b"(3L,)", b"(65536,65536,0)",
)  # fmt: skip
_TYPES = (b"<f4", b">f4", b"|O", b"|b1", b"<f16", b"<U9", b"|S3", b"<c8", b"<M8[s]", b"V8", b"<i8", b"|u1", b"<f2", b"", b"=f4")


def mutate(rng: Random, data: bytes, other: bytes) -> bytes:
    """A mutation of a .npy."""
    pick = rng.random()
    length = int.from_bytes(data[8:10], "little")
    header, body = data[10 : 10 + length], data[10 + length :]
    if pick < 0.4:
        shape = rng.choice(_SHAPES) if rng.random() < 0.7 else b"(%d, %d)" % (number(rng, 3), number(rng, 2))
        header = re.sub(rb"\([^)]*\)", lambda _: shape, header, count=1)
    elif pick < 0.6:
        header = re.sub(rb"'[<>|=][\w]+'", lambda _: b"'" + rng.choice(_TYPES) + b"'", header, count=1)
    elif pick < 0.8:
        at = rng.randrange(len(header) + 1)
        header = (
            header[:at]
            + rng.choice((b"'", b"{", b"}", b",", b":", b"(", b"#", some_bytes(rng)))
            + header[at + rng.randrange(2) :]
        )
    elif pick < 0.9 and body[:1] == b"\x80":
        body = pickles.mutate(rng, body, body)
    else:
        return raw.mutate(rng, data, other)
    return data[:8] + (len(header) % 65536).to_bytes(2, "little") + header + body
