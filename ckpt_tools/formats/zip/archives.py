"""What kind of zip a file is, by its names: what torch.save wrote, a program, NumPy arrays, or an archive of such files."""

from __future__ import annotations

from collections.abc import Sequence

from ckpt_tools import limits
from ckpt_tools.errors import UnsupportedContainerError
from ckpt_tools.formats import torch_zip
from ckpt_tools.formats.base import Decoded
from ckpt_tools.formats.zip.directory import Directory, MissingDirectoryError, Record, read_directory
from ckpt_tools.formats.zip.inner import refuse_two_readings, single_folder
from ckpt_tools.io.output import Source
from ckpt_tools.text import some
from ckpt_tools.tree.nodes import as_dict

_COST = 8  # of a record, in containers: it takes as much memory; torch's own are longer than 190 bytes, a made one 100


def decode(source: Source) -> Decoded:
    """Read the directory of a zip, and what the zip is in turn."""
    try:
        directory = read_directory(source)
    except MissingDirectoryError:
        from ckpt_tools.formats.zip.truncated import describe_cut

        raise describe_cut(source) from None
    what = f"{source.path} holds more records than a file of its size may have."
    limits.budget(source.size).take(limits.NODES, _COST * len(directory.records), what)
    refuse_two_readings(directory.records)
    names = {record.name for record in directory.records}
    folder = single_folder(directory.records)
    if f"{folder}/data.pkl" in names and f"{folder}/constants.pkl" not in names:
        return torch_zip.decode(source, directory, folder or "")
    return _decode_rarer(source, directory, folder, names)


def _decode_rarer(source: Source, directory: Directory, folder: str | None, names: set[str]) -> Decoded:
    """Anything but what torch.save wrote; read by modules that are imported only then."""
    from ckpt_tools.formats import exported_program, numpy_files, torchscript

    if numpy_files.is_npz(names):
        return numpy_files.decode_npz(source, directory)
    if folder is not None and torchscript.sniff(names, folder):
        return torchscript.decode(source, directory, folder)
    if folder is not None and exported_program.sniff(names, folder):
        return exported_program.decode(source, directory, folder)
    from ckpt_tools.formats.zip import bundle

    if bundle.sniff(source, directory):
        if bundle.is_npz(source, directory):
            return numpy_files.decode_npz(source, directory)
        decoded = bundle.decode(source, directory)
        if len(members := as_dict(decoded.root).items) == len(directory.records) == 1:  # around one file: that itself
            decoded.root = members[0][1]
        return decoded
    raise _unknown(directory.records)


def _unknown(records: Sequence[Record]) -> UnsupportedContainerError:
    names = sorted(record.name for record in records)
    return UnsupportedContainerError(
        "This is a zip file, but not one that torch.save wrote.", why=f"It holds {some(names) or 'nothing'}."
    )
