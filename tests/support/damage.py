"""Damage to files: bits that flip."""

from __future__ import annotations

from pathlib import Path


def flip_bit(path: Path, data: bytes) -> None:
    """Flip one bit of these bytes, where they first stand in a file."""
    held = bytearray(path.read_bytes())
    held[held.index(data)] ^= 1
    path.write_bytes(held)
