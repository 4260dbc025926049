"""A zip that torch.save wrote inside another file: in a zip, or in bytes of a pickle."""

from __future__ import annotations

from dataclasses import replace

from ckpt_tools.errors import UnsupportedContainerError
from ckpt_tools.formats import numpy_files, torch_zip, torchscript
from ckpt_tools.formats.base import Decoded
from ckpt_tools.formats.zip.directory import Directory, read_directory
from ckpt_tools.formats.zip.names import refuse_two_readings, single_folder
from ckpt_tools.io.output import Source
from ckpt_tools.io.sources import Window


def decode_inner(source: Source, start: int, size: int, name: str) -> Decoded:
    """A zip inside a file, as a checkpoint of its own; its records are placed where they are in the source.

    Raises:
        ZipError, PickleError, TensorError: it breaks a promise. UnsupportedContainerError: it is another kind of zip.
    """
    window = Window(source, start, size)
    inner = read_directory(window)
    refuse_two_readings(inner.records)
    member = f"{name}!"
    placed = [
        replace(row, name=member + row.name, header=row.header + start, data=row.data + start,
                following=row.following + start) for row in inner.records
    ]  # fmt: skip
    names = {row.name for row in inner.records}
    folder = single_folder(inner.records) or ""
    if numpy_files.is_npz(names):
        return numpy_files.decode_npz(window, inner)
    if f"{folder}/data.pkl" not in names or torchscript.sniff(names, folder):
        raise UnsupportedContainerError(
            f"{name!r} is a zip, but not one that torch.save wrote.",
            fix="Unpack the archive and convert its members one by one.",
        )
    return torch_zip.decode(source, Directory(placed, inner.start + start, inner.trailing), folder, member)
