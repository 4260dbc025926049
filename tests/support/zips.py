"""torch-zips written again by hand: deflated, big-endian, damaged. Every byte of content is torch's own."""

import zipfile
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import IO


def rewrite(
    source: Path | IO[bytes], target: Path | IO[bytes], *, method: int = zipfile.ZIP_STORED,
    change: Callable[[str, bytes], bytes | None] | None = None, more: Mapping[str, bytes] | None = None,
) -> None:  # fmt: skip
    """Copy a torch-zip record by record with Python's zipfile.

    Args:
        source, target: the files.
        method: how the records are packed.
        change: (name without the root folder, bytes) -> bytes, or None for a record that is left out.
        more: further records, by names without the root folder.
    """
    with zipfile.ZipFile(source) as before, zipfile.ZipFile(target, "w", method) as after:
        for name in before.namelist():
            root, _, inner = name.partition("/")
            data = before.read(name) if change is None else change(inner, before.read(name))
            if data is not None:
                after.writestr(name, data)
        for name, data in (more or {}).items():
            after.writestr(f"{root}/{name}", data)


def called_big(source: Path | IO[bytes], target: Path | IO[bytes]) -> None:
    """A torch-zip whose record `byteorder` says `big`; its elements are as they were."""
    rewrite(source, target, change=lambda name, data: b"big" if name == "byteorder" else data)


def swapped(data: bytes, width: int) -> bytes:
    """Every number of `width` bytes the other way round."""
    return b"".join(data[at : at + width][::-1] for at in range(0, len(data), width))


def big_endian(source: Path | IO[bytes], target: Path | IO[bytes], widths: dict[str, int]) -> None:
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
