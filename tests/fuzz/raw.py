"""Mutations that know nothing of a format, of one file or of two, and the values at which parsers break."""

from __future__ import annotations

import struct
from collections.abc import Callable
from random import Random

from tests.support.tars import checksummed

NUMBERS = (
    0, 1, 2, 3, 7, 8, 15, 16, 63, 64, 127, 128, 255, 256, 4095, 32767, 65535, 65536, 2**24, 2**31 - 1, 2**31, 2**32 - 1,
    2**32, 2**59, 2**62, 2**63 - 1, 2**63, 2**64 - 1, 2**64,
)  # fmt: skip
TEXTS = (
    "", "0", "1", "a", "a.b", "module.", "module.module.a", "..", "../x", "/etc/passwd", "C:\\x", "a\0b", "\x1b[31m", "\u202e",
    "\x9b1m", "__metadata__", "__proto__", "_metadata", "storage", "cpu", "cuda:0", "meta", "mps:99", "weight", "e\u0301",
    "\ud800", "\u2028", "\U0001f600", "x" * 300, "param_groups", "state", "=", "%s{0}$x", "<b>", "[red]", "latin1", "A", "-1",
)  # fmt: skip
BLOCK = 512  # of a tar


def number(rng: Random, near: int = 0) -> int:
    """A number at a limit, or one beside what was there."""
    pick = rng.random()
    if pick < 0.3:
        return near + rng.choice((-1, 1, 8, -8))
    if pick < 0.4:
        return near * rng.choice((2, -1, 256))
    return rng.choice(NUMBERS) * (1 if rng.random() < 0.85 else -1)


def text(rng: Random) -> str:
    """A name that means something to somebody."""
    return rng.choice(TEXTS)


def some_bytes(rng: Random) -> bytes:
    """A few bytes, of one kind or of many."""
    if rng.random() < 0.3:
        return bytes((rng.choice(b"\0\xff\x80.(P}"),)) * rng.randrange(1, 40) if rng.random() < 0.9 else b""
    return rng.randbytes(rng.choice((1, 1, 2, 4, 8, 30)))


def put(rng: Random, data: bytes, token: bytes, over: tuple[int, ...] = (0, 1)) -> bytes:
    """These bytes somewhere, in the place of so many others."""
    at = rng.randrange(len(data) + 1)
    return data[:at] + token + data[at + rng.choice(over) :]


def put_number(rng: Random, data: bytes, at: int, width: int, order: str = "little") -> bytes:
    """Another number of so many bytes at a place."""
    here = slice(at, at + width)
    found = number(rng, int.from_bytes(data[here], order)) % (1 << 8 * width)  # type: ignore[arg-type]
    return data[:at] + found.to_bytes(width, order)[: max(0, len(data) - at)] + data[at + width :]  # type: ignore[arg-type]


def places(data: bytes, signature: bytes) -> list[int]:
    """Where these bytes stand."""
    found, at = [], -1
    while (at := data.find(signature, at + 1)) >= 0:
        found.append(at)
    return found


def mutate(rng: Random, data: bytes, other: bytes) -> bytes:
    """One mutation of any file; `other` is a second one to take bytes from."""
    return rng.choice(_MUTATIONS)(rng, data, other)


def splice(rng: Random, data: bytes, other: bytes) -> bytes:
    """One file of two: one behind the other, one over the other, one in the other, any as a tar."""
    return rng.choice(_SPLICES)(rng, data, other)


def _flip(rng: Random, data: bytes, other: bytes) -> bytes:
    out = bytearray(data)
    for _ in range(rng.choice((1, 1, 2, 8)) if data else 0):
        out[rng.randrange(len(out))] ^= 1 << rng.randrange(8)
    return bytes(out)


def _number(rng: Random, data: bytes, other: bytes) -> bytes:
    width = rng.choice((2, 4, 8))
    at = rng.randrange(max(1, len(data) - width + 1))
    return data[:at] + (rng.choice(NUMBERS) % (1 << (8 * width))).to_bytes(width, "little") + data[at + width :]


def _span(rng: Random, data: bytes) -> tuple[int, int]:
    at = rng.randrange(len(data) + 1)
    return at, min(len(data), at + rng.choice((1, 4, 16, 64, 512, 4096)))


def _span_becomes(make: Callable[[Random, bytes, bytes], bytes]) -> Mutation:
    def mutated(rng: Random, data: bytes, other: bytes) -> bytes:
        at, end = _span(rng, data)
        return data[:at] + make(rng, data[at:end], other) + data[end:]

    return mutated


def _surround(rng: Random, data: bytes, other: bytes) -> bytes:
    return some_bytes(rng) + data if rng.random() < 0.5 else data + (other if rng.random() < 0.3 else some_bytes(rng))


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
    whole = data if rng.random() < 0.5 else data[:BLOCK] + other
    return checksummed(whole[:BLOCK].ljust(BLOCK, b"\0")) + whole[BLOCK:]


def _relative_end(rng: Random, data: bytes, other: bytes) -> bytes:
    """An end of an archive whose places lead somewhere else."""
    at, count = rng.randrange(len(data) + 1), rng.randrange(1, 9)
    told = (count, count, rng.randrange(400), rng.randrange(len(data) + 1))
    wide = struct.pack("<4sQ2H2I4Q", b"PK\6\6", 44, 45, 45, 0, 0, *told)
    return data[:at] + wide + data[at + len(wide) * rng.randrange(2) :] + other


Mutation = Callable[[Random, bytes, bytes], bytes]
_MUTATIONS: tuple[Mutation, ...] = (
    _flip, _flip, _number, _number, _surround,
    lambda rng, data, other: put(rng, data, bytes((rng.choice(b"\0\x01\x7f\x80\xff.()R\n"),)), (1,)),  # another byte
    lambda rng, data, other: put(rng, data, some_bytes(rng), (0,)),
    lambda rng, data, other: data[: rng.randrange(len(data) + 1)],  # cut
    lambda rng, data, other: data[rng.randrange(1, 40) :],  # without its start
    lambda rng, data, other: data.replace(*rng.choice(((b"\n", b"\r\n"), (b"\r\n", b"\n")))),
    _span_becomes(lambda rng, span, other: b""), _span_becomes(lambda rng, span, other: span * 2),
    _span_becomes(lambda rng, span, other: bytes(len(span))),
    _span_becomes(lambda rng, span, other: other[slice(*_span(rng, other))]),
)  # fmt: skip
_SPLICES: tuple[Mutation, ...] = (
    lambda rng, data, other: data + bytes(-len(data) % rng.choice((1, 64, BLOCK))) + other,
    lambda rng, data, other: b"".join(rng.choice((data, other)) for _ in range(3)),
    _head_over, _tail_over, _inside, _tar, _relative_end,
)  # fmt: skip
