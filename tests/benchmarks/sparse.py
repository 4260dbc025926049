"""A checkpoint of any size that takes no room on disk, tensors as holes: python -m tests.benchmarks.sparse PATH TENSORS GB"""

from __future__ import annotations

import os
import sys
import zlib
from collections.abc import Iterator
from pathlib import Path

from ckpt_tools.formats.zip_writer import lay_out
from ckpt_tools.io.content import Computed, Late, Literal, Piece
from ckpt_tools.tree.dtypes import DTYPES
from ckpt_tools.tree.nodes import Dict, Entry, Storage

_FLOAT = DTYPES["float32"]


def make_sparse(path: Path, tensors: int, gigabytes: float) -> Path:
    """Write a torch-zip of `tensors` zero matrices, `gigabytes` in all."""
    rows = max(1, int(gigabytes * 1e9 / tensors / 4 / 256))
    content = Computed(rows * 1024, _no_bytes)
    crc = _crc_of_zeros(content.length)
    pairs = []
    for index in range(tensors):
        storage = Storage(str(index), _FLOAT, content.length, "cpu", content)
        pairs.append((f"module.layers.{index}.weight", Entry(storage, _FLOAT, (rows, 256), (256, 1), 0)))
    pieces = lay_out(Dict([("model", Dict(list(pairs), ordered=True)), ("epoch", 1)]), folder=path.stem)
    with path.open("wb") as file:
        for piece in pieces:
            _put(piece, file.fileno(), crc)
    return path


def _put(piece: Piece, fd: int, crc: int) -> None:
    content = piece.content
    if isinstance(content, Computed):
        os.lseek(fd, content.length, os.SEEK_CUR)
        if piece.checksum is not None:
            piece.checksum.value = crc
        return
    assert isinstance(content, Literal | Late)
    data = content.data if isinstance(content, Literal) else content.make()
    if piece.checksum is not None:
        piece.checksum.update(data)
    os.write(fd, data)


def _no_bytes() -> Iterator[bytes]:
    raise AssertionError("holes are not written")


def _crc_of_zeros(length: int) -> int:
    crc, block = 0, bytes(1 << 24)
    for start in range(0, length, len(block)):
        crc = zlib.crc32(block[: length - start], crc)
    return crc


if __name__ == "__main__":
    make_sparse(Path(sys.argv[1]), int(sys.argv[2]), float(sys.argv[3]))
