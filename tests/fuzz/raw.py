"""Mutations that know nothing of a format: bits, ranges, cuts, line ends."""

from __future__ import annotations

from random import Random

from tests.fuzz.values import NUMBERS, some_bytes


def mutate(rng: Random, data: bytes, other: bytes) -> bytes:
    """One mutation of any file; `other` is a second sample to take bytes from."""
    return rng.choice(_MUTATIONS)(rng, data, other)


def _flip(rng: Random, data: bytes, other: bytes) -> bytes:
    out = bytearray(data)
    for _ in range(rng.choice((1, 1, 2, 8))):
        if out:
            out[rng.randrange(len(out))] ^= 1 << rng.randrange(8)
    return bytes(out)


def _set(rng: Random, data: bytes, other: bytes) -> bytes:
    out = bytearray(data)
    if out:
        out[rng.randrange(len(out))] = rng.choice(b"\0\x01\x7f\x80\xff.()R\n")
    return bytes(out)


def _number(rng: Random, data: bytes, other: bytes) -> bytes:
    width = rng.choice((2, 4, 8))
    at = rng.randrange(max(1, len(data) - width + 1))
    value = rng.choice(NUMBERS) % (1 << (8 * width))
    return data[:at] + value.to_bytes(width, "little") + data[at + width :]


def _span(rng: Random, data: bytes) -> tuple[int, int]:
    at = rng.randrange(len(data) + 1)
    return at, min(len(data), at + rng.choice((1, 4, 16, 64, 512, 4096)))


def _delete(rng: Random, data: bytes, other: bytes) -> bytes:
    at, end = _span(rng, data)
    return data[:at] + data[end:]


def _duplicate(rng: Random, data: bytes, other: bytes) -> bytes:
    at, end = _span(rng, data)
    return data[:end] + data[at:]


def _insert(rng: Random, data: bytes, other: bytes) -> bytes:
    at, _ = _span(rng, data)
    return data[:at] + some_bytes(rng) + data[at:]


def _zeros(rng: Random, data: bytes, other: bytes) -> bytes:
    at, end = _span(rng, data)
    return data[:at] + bytes(end - at) + data[end:]


def _splice(rng: Random, data: bytes, other: bytes) -> bytes:
    (at, end), (begin, stop) = _span(rng, data), _span(rng, other)
    return data[:at] + other[begin:stop] + data[end:]


def _cut(rng: Random, data: bytes, other: bytes) -> bytes:
    return data[: rng.randrange(len(data) + 1)]


def _lose_the_start(rng: Random, data: bytes, other: bytes) -> bytes:
    return data[rng.randrange(1, 40) :]


def _surround(rng: Random, data: bytes, other: bytes) -> bytes:
    return some_bytes(rng) + data if rng.random() < 0.5 else data + (other if rng.random() < 0.3 else some_bytes(rng))


def _line_ends(rng: Random, data: bytes, other: bytes) -> bytes:
    return data.replace(b"\n", b"\r\n") if rng.random() < 0.5 else data.replace(b"\r\n", b"\n")


_MUTATIONS = (
    _flip, _flip, _set, _number, _number, _delete, _duplicate, _insert, _zeros, _splice, _cut, _lose_the_start, _surround,
    _line_ends,
)  # fmt: skip
