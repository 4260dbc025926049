"""What a mutation puts in the place of a number, a text or some bytes: the values at which parsers break."""

from __future__ import annotations

from random import Random

NUMBERS = (
    0, 1, 2, 3, 7, 8, 15, 16, 63, 64, 127, 128, 255, 256, 4095, 32767, 65535, 65536, 2**24, 2**31 - 1, 2**31, 2**32 - 1,
    2**32, 2**59, 2**62, 2**63 - 1, 2**63, 2**64 - 1, 2**64,
)  # fmt: skip
TEXTS = (
    "", "0", "1", "a", "a.b", "module.", "module.module.a", "..", "../x", "/etc/passwd", "C:\\x", "a\0b", "\x1b[31m", "\u202e",
    "\x9b1m", "__metadata__", "__proto__", "_metadata", "storage", "cpu", "cuda:0", "meta", "mps:99", "weight", "e\u0301",
    "\ud800", "\u2028", "\U0001f600", "x" * 300, "param_groups", "state", "=", "%s{0}$x", "<b>", "[red]", "latin1", "A", "-1",
)  # fmt: skip


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
