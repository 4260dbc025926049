"""What kind of zip a file is, by its names: what torch.save wrote, a program, NumPy arrays, or an archive of such files.

Several torch-zips one after another in one file are one rank's part of a distributed checkpoint, shown as a list.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from ckpt_tools import limits
from ckpt_tools.errors import TWO_FILES, CkptError, DamagedFileError, PickleError, UnsupportedContainerError
from ckpt_tools.formats import torch_zip
from ckpt_tools.formats import zip_directory as zips
from ckpt_tools.formats.base import Keys, Warned, is_zip
from ckpt_tools.formats.checkpoint import Checkpoint
from ckpt_tools.io.content import Literal
from ckpt_tools.io.output import Source
from ckpt_tools.io.sources import Window
from ckpt_tools.pickling.checks import validate
from ckpt_tools.pickling.machine import Machine
from ckpt_tools.pickling.torch_objects import MAKERS, Storages
from ckpt_tools.text import some
from ckpt_tools.tree.nodes import Entry, List
from ckpt_tools.tree.visit import walk

_COST, _COST_OF_ARCHIVE = 8, 32  # nodes, of a record and of an archive beside its records

sniff = is_zip


def decode(source: Source) -> Checkpoint:
    try:
        return decode_one(source)
    except DamagedFileError:
        if not (places := split(source)):
            raise
        return _decode_several(source, places)


def decode_inside(source: Source, place: zips.Place, name: str) -> Checkpoint:
    """An archive in a file, whose records are called by this name."""
    decoded = decode_one(source, place)
    for record in decoded.records:
        record.name = f"{name}!{record.name}"
    return decoded


def decode_one(source: Source, place: zips.Place | None = None) -> Checkpoint:
    try:
        directory = zips.read_directory(source, place)
    except zips.MissingDirectoryError:
        raise _cut_off(source if place is None else Window(source, *place)) from None
    what = f"{source.path} holds more records than a file of its size may have."
    limits.budget(source.size).take(limits.NODES, _COST * len(directory.records), what)
    names, folder = torch_zip.names_of(directory.records)
    if f"{folder}/{torch_zip.PICKLE}" in names and f"{folder}/{torch_zip.CONSTANTS}" not in names:
        return torch_zip.decode(source, directory, folder or "")
    from ckpt_tools.formats import exported_program, numpy_files, torchscript, zip_bundle  # few files are anything else

    if torch_zip.is_npz(names):
        return numpy_files.decode_npz(source, directory)
    if folder is not None and torch_zip.is_program(names, folder):
        return torchscript.decode(source, directory, folder)
    if folder is not None and exported_program.sniff(names, folder):
        return exported_program.decode(source, directory, folder)
    if zip_bundle.sniff(source, directory):
        return zip_bundle.decode(source, directory)
    raise UnsupportedContainerError(
        "This is a zip file, but not one that torch.save wrote.", why=f"It holds {some(sorted(names)) or 'nothing'}."
    )


# --- several archives one after another

_ENDS = zips.END64.size + zips.LOCATOR64.size + zips.END.size  # as torch ends every archive, without a comment


def split(source: Source) -> list[zips.Place]:
    """The place of each archive, when the file is several of torch's one after another and nothing else; else none."""
    found: list[zips.Place] = []
    end = source.size
    while end >= _ENDS:
        ends = source.read(end - _ENDS, _ENDS)
        signature, *_, size, start = zips.END64.unpack_from(ends)
        begin = end - _ENDS - start - size
        if signature != zips.SIGNATURE_END64 or ends[-zips.END.size :][:4] != zips.SIGNATURE_END or begin < 0:
            break
        found.append((begin, end - begin))
        limits.RECORDS.check(len(found), f"{source.path} holds more archives than any checkpoint.")
        end = begin
    return found[::-1] if len(found) > 1 and end == 0 else []


def _decode_several(source: Source, places: Sequence[zips.Place]) -> Checkpoint:
    first = "; torch.load gives the first of them alone" if _torch_reads_the_first(source, places[0][1]) else ""
    found = f"{len(places)} archives one after another: one rank's part of a distributed checkpoint, without names{first}"
    roots, keys = List(), Keys()
    decoded = Checkpoint("dcp-part", roots, source, has_checksums=True)

    def parts() -> Iterator[tuple[str, Checkpoint]]:
        for index, place in enumerate(places):
            limits.budget(source.size).take(limits.NODES, _COST_OF_ARCHIVE, f"{source.path} holds too many archives.")
            part = decode_inside(source, place, str(index))
            roots.items.append(keys.renew(part.root))
            yield str(index), part

    decoded.merge(parts())
    decoded.warnings = [Warned("several-archives", found, "the folder that it is from, with its .metadata")]
    return decoded


def _torch_reads_the_first(source: Source, first: int) -> bool:
    """Whether torch opens the file, as the first archive, which is so long; mostly it opens none."""
    ends = source.size - _ENDS
    _, _, at, _ = zips.LOCATOR64.unpack(source.read(ends + zips.END64.size, zips.LOCATOR64.size))
    *_, start, _ = zips.END.unpack(source.read(source.size - zips.END.size, zips.END.size))
    if at + zips.END64.size <= source.size and source.read(at, 4) == zips.SIGNATURE_END64:
        *_, start = zips.END64.unpack(source.read(at, zips.END64.size))
    if start + 4 > source.size or source.read(start, 4) != zips.SIGNATURE_CENTRAL:
        return False
    if at != first - _ENDS:
        what = f"{source.path} is several archives one after another, and torch.load would find another one in it."
        raise DamagedFileError(what, why=TWO_FILES)
    return True


# --- a torch-zip whose end is missing: sizes stand in the pickle, since `torch.save` writes none in the headers before records

_BETWEEN = 4096  # bytes between what is known of a record and the header of the next: descriptor, small records


def _cut_off(source: Source) -> DamagedFileError:
    what, ends = "The zip directory at the end of the file is missing", f"The file ends after {source.size} bytes"
    try:
        whole, count, last = _count_whole(source)
    except CkptError as error:
        why = f"{ends}. {error.what}"
        return DamagedFileError(f"{what}; no tensor can be told from what is left.", why=why, whole=0)
    why = f"{ends}, in the record {last!r}." if last else f"{ends}."
    return DamagedFileError(f"{what}: {whole} of {count} tensors complete.", why=why, whole=whole)


def _count_whole(source: Source) -> tuple[int, int, str]:
    """How many tensors are whole, how many there are, and the record that is cut ("" when none is)."""
    from ckpt_tools.pickling.stream import Part, Pickles  # few files need it

    header = zips.LocalHeader.at(source, 0) if source.size >= zips.LOCAL.size else None
    name, data = ("", 0) if header is None else (header.name.decode("utf-8", "replace"), header.data)
    pickles, storages = Pickles(Part(source, data, source.size)), Storages(lambda _key, _nbytes: Literal(b""))
    try:
        if data > source.size or not name.endswith(f"/{torch_zip.PICKLE}"):
            raise PickleError("There is none.")
        root = pickles.load(lambda stream, offset: Machine(stream, MAKERS, storages.storage, offset))[1]
    except PickleError:
        raise DamagedFileError("The pickle that lists them is cut off or missing.") from None
    validate(root)
    folder = f"{name.removesuffix('.pkl')}/"
    entries = [folder + node.storage.key for _, node in walk(root, plain=False) if type(node) is Entry]
    sizes = {folder + key: storage.nbytes for key, (_, storage) in storages.by_key.items()}
    whole, end = set[str](), pickles.position
    while (found := source.read(end, min(_BETWEEN, source.size - end)).find(zips.SIGNATURE_LOCAL)) >= 0:
        if (at := end + found) + zips.LOCAL.size > source.size:
            break
        header = zips.LocalHeader.at(source, at)
        name = header.name.decode("utf-8", "replace")
        if (end := header.data + sizes.get(name, header.compressed)) > source.size:
            return sum(entry in whole for entry in entries), len(entries), name
        whole.add(name)
    return sum(entry in whole for entry in entries), len(entries), ""
