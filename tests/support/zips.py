"""torch-zips written again by hand: deflated, big-endian, damaged. Every byte of content is torch's own."""

import zipfile
from collections.abc import Callable
from pathlib import Path


def rewrite(
    source: Path, target: Path, *, method: int = zipfile.ZIP_STORED, change: Callable[[str, bytes], bytes] | None = None
) -> None:
    """Copy a torch-zip record by record with Python's zipfile.

    Args:
        source, target: the files.
        method: how the records are packed.
        change: (name without the root folder, bytes) -> bytes.
    """
    with zipfile.ZipFile(source) as before, zipfile.ZipFile(target, "w", method) as after:
        for name in before.namelist():
            data = before.read(name)
            after.writestr(name, data if change is None else change(name.partition("/")[2], data))


def swapped(data: bytes, width: int) -> bytes:
    """Every number of `width` bytes the other way round."""
    return b"".join(data[at : at + width][::-1] for at in range(0, len(data), width))


def big_endian(source: Path, target: Path, widths: dict[str, int]) -> None:
    """A torch-zip as a big-endian machine writes it; `widths` has the bytes that are swapped together, by storage key."""

    def change(name: str, data: bytes) -> bytes:
        if name == "byteorder":
            return b"big"
        return swapped(data, widths[name.removeprefix("data/")]) if name.startswith("data/") else data

    rewrite(source, target, change=change)


def flip_byte(path: Path, needle: bytes) -> None:
    """Flip two bits of the first occurrence of some bytes: no CRC-32 tells which."""
    data = bytearray(path.read_bytes())
    at = data.index(needle)
    data[at] ^= 3
    path.write_bytes(data)
