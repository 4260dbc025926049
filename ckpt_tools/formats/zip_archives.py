"""What kind of zip a file is, by its names: what torch.save wrote, a program, NumPy arrays, or an archive of such files."""

from __future__ import annotations

from ckpt_tools import limits
from ckpt_tools.errors import DamagedFileError, UnsupportedContainerError
from ckpt_tools.formats import torch_zip
from ckpt_tools.formats.base import is_zip
from ckpt_tools.formats.checkpoint import Checkpoint
from ckpt_tools.formats.registry import Container
from ckpt_tools.formats.zip_directory import END, END64, LOCATOR64, Directory, read_directory
from ckpt_tools.formats.zip_inner import is_npz, is_torchscript, refuse_two_readings, single_folder
from ckpt_tools.io.output import Source
from ckpt_tools.text import some
from ckpt_tools.tree.nodes import as_dict

_COST = 8  # nodes, of a record


def decode(source: Source) -> Checkpoint:
    """Read the directory of a zip, and what the zip is in turn."""
    directory = read_directory(source)
    what = f"{source.path} holds more records than a file of its size may have."
    limits.budget(source.size).take(limits.NODES, _COST * len(directory.records), what)
    refuse_two_readings(directory.records)
    names = {record.name for record in directory.records}
    folder = single_folder(directory.records)
    if f"{folder}/data.pkl" in names and f"{folder}/constants.pkl" not in names:
        return torch_zip.decode(source, directory, folder or "")
    return _decode_rarer(source, directory, folder, names)


def _decode_rarer(source: Source, directory: Directory, folder: str | None, names: set[str]) -> Checkpoint:
    """Anything but what torch.save wrote; read by modules that are imported only then."""
    from ckpt_tools.formats import exported_program, numpy_files, torchscript, zip_bundle

    if is_npz(names):
        return numpy_files.decode_npz(source, directory)
    if folder is not None and is_torchscript(names, folder):
        return torchscript.decode(source, directory, folder)
    if folder is not None and exported_program.sniff(names, folder):
        return exported_program.decode(source, directory, folder)
    if zip_bundle.sniff(source, directory):
        if zip_bundle.is_npz(source, directory):
            return numpy_files.decode_npz(source, directory)
        decoded = zip_bundle.decode(source, directory)
        if len(members := as_dict(decoded.root).items) == len(directory.records) == 1:  # around one file: that itself
            decoded.root = members[0][1]
        return decoded
    raise UnsupportedContainerError(
        "This is a zip file, but not one that torch.save wrote.", why=f"It holds {some(sorted(names)) or 'nothing'}."
    )


def _decode_one(source: Source) -> Checkpoint:
    try:
        return decode(source)
    except DamagedFileError:
        if not (spans := split(source)):
            raise
        raise UnsupportedContainerError(
            f"{source.path} is {len(spans)} archives one after another.",
            why="It is one rank's part of a distributed checkpoint, without the names of its tensors.",
            fix="Give ckpt the folder that it is from, with its .metadata.",
        ) from None


CONTAINER = Container(is_zip, _decode_one)

_ENDS = END64.size + LOCATOR64.size + END.size  # as torch ends every archive, without a comment


def split(source: Source) -> list[tuple[int, int]]:
    """Start and size of each archive, when the file is several of torch's one after another and nothing else; else none."""
    found: list[tuple[int, int]] = []
    end = source.size
    while end >= _ENDS:
        ends = source.read(end - _ENDS, _ENDS)
        signature, *_, size, start = END64.unpack_from(ends)
        begin = end - _ENDS - start - size
        if signature != b"PK\x06\x06" or ends[-END.size :][:4] != b"PK\x05\x06" or begin < 0:
            break
        found.append((begin, end - begin))
        limits.RECORDS.check(len(found), f"{source.path} holds more archives than any checkpoint.")
        end = begin
    return found[::-1] if len(found) > 1 and end == 0 else []
