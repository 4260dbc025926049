"""What kind of zip a file is, by its names: what torch.save wrote, a program, NumPy arrays, or an archive of such files.

Several torch-zips one after another in one file are one rank's part of a distributed checkpoint, shown as a list.
"""

from __future__ import annotations

from ckpt_tools import limits
from ckpt_tools.errors import TWO_FILES, CkptError, DamagedFileError, PickleError, UnsupportedContainerError
from ckpt_tools.formats import torch_zip
from ckpt_tools.formats import zip_directory as zips
from ckpt_tools.formats.base import Keys, Warned, is_zip
from ckpt_tools.formats.checkpoint import Checkpoint
from ckpt_tools.formats.zip_directory import LocalHeader, MissingDirectoryError, read_directory
from ckpt_tools.io.content import Literal
from ckpt_tools.io.output import Source
from ckpt_tools.io.sources import Window
from ckpt_tools.pickling.checks import validate
from ckpt_tools.pickling.machine import Machine
from ckpt_tools.pickling.torch_objects import MAKERS, Storages
from ckpt_tools.text import some
from ckpt_tools.tree.nodes import Entry, Global, List
from ckpt_tools.tree.visit import walk

sniff = is_zip
_COST, _COST_OF_ARCHIVE = 8, 32  # nodes, of a record and of an archive beside its records


def decode_one(source: Source) -> Checkpoint:
    try:
        directory = read_directory(source)
    except MissingDirectoryError:
        raise describe_cut(source) from None
    records = directory.records
    what = f"{source.path} holds more records than a file of its size may have."
    limits.budget(source.size).take(limits.NODES, _COST * len(records), what)
    torch_zip.refuse_two_readings(records)
    names, folder = {record.name for record in records}, torch_zip.single_folder(records)
    if f"{folder}/data.pkl" in names and f"{folder}/constants.pkl" not in names:
        return torch_zip.decode(source, directory, folder or "")
    from ckpt_tools.formats import exported_program, numpy_files, torchscript, zip_bundle  # few files are anything else

    if torch_zip.is_npz(names):
        return numpy_files.decode_npz(source, directory)
    if folder is not None and torch_zip.is_torchscript(names, folder):
        return torchscript.decode(source, directory, folder)
    if folder is not None and exported_program.sniff(names, folder):
        return exported_program.decode(source, directory, folder)
    if zip_bundle.sniff(source, directory):
        return zip_bundle.decode(source, directory)
    raise UnsupportedContainerError(
        "This is a zip file, but not one that torch.save wrote.", why=f"It holds {some(sorted(names)) or 'nothing'}."
    )


def decode(source: Source) -> Checkpoint:
    try:
        return decode_one(source)
    except DamagedFileError:
        if not (spans := split(source)):
            raise
        return _decode_several(source, spans)


_ENDS = zips.END64.size + zips.LOCATOR64.size + zips.END.size  # as torch ends every archive, without a comment


def split(source: Source) -> list[tuple[int, int]]:
    """Start and size of each archive, when the file is several of torch's one after another and nothing else; else none."""
    found: list[tuple[int, int]] = []
    end = source.size
    while end >= _ENDS:
        ends = source.read(end - _ENDS, _ENDS)
        signature, *_, size, start = zips.END64.unpack_from(ends)
        begin = end - _ENDS - start - size
        if signature != b"PK\x06\x06" or ends[-zips.END.size :][:4] != b"PK\x05\x06" or begin < 0:
            break
        found.append((begin, end - begin))
        limits.RECORDS.check(len(found), f"{source.path} holds more archives than any checkpoint.")
        end = begin
    return found[::-1] if len(found) > 1 and end == 0 else []


def _decode_several(source: Source, spans: list[tuple[int, int]]) -> Checkpoint:
    first = "; torch.load gives the first of them alone" if _torch_reads_the_first(source, spans[0][1]) else ""
    found = f"{len(spans)} archives one after another: one rank's part of a distributed checkpoint, without names{first}"
    decoded, keys, roots = Checkpoint("dcp-part", List(), source, has_checksums=True), Keys(), List()
    names, uses = dict[Global, None](), dict[str, None]()
    for start, size in spans:
        limits.budget(source.size).take(limits.NODES, _COST_OF_ARCHIVE, f"{source.path} holds too many archives.")
        part = decode_one(Window(source, start, size))
        if roots.items and part.byteorder != decoded.byteorder:
            raise UnsupportedContainerError("Some archives of the file are big-endian, others little-endian.")
        names |= dict.fromkeys(part.globals)
        uses |= dict.fromkeys(part.unusual)
        roots.items.append(keys.renew(part.root))
        decoded.byteorder = part.byteorder
        decoded.storage_bytes += part.storage_bytes
        decoded.has_checksums &= part.has_checksums
    decoded.root, decoded.globals, decoded.unusual = roots, [*names], [*uses]
    decoded.warnings = [Warned("several-archives", found, "the folder that it is from, with its .metadata")]
    return decoded


def _torch_reads_the_first(source: Source, first: int) -> bool:
    """Whether torch opens the file, as the first archive, which is so long; mostly it opens none."""
    _, _, at, _ = zips.LOCATOR64.unpack(source.read(source.size - zips.LOCATOR64.size - zips.END.size, zips.LOCATOR64.size))
    *_, plain, _ = zips.END.unpack(source.read(source.size - zips.END.size, zips.END.size))
    wide = zips.END64.unpack(source.read(at, zips.END64.size)) if at + zips.END64.size <= source.size else (b"", plain)
    start = wide[-1] if wide[0] == b"PK\x06\x06" else plain
    if start + 4 > source.size or source.read(start, 4) != zips.SIGNATURE_CENTRAL:
        return False
    if at != first - _ENDS:
        what = f"{source.path} is several archives one after another, and torch.load would find another one in it."
        raise DamagedFileError(what, why=TWO_FILES)
    return True


# --- a torch-zip whose end is missing: sizes stand in the pickle, since `torch.save` writes none in the headers before records

_SMALL = 4096  # bytes between what is known of a record and the header of the next: descriptor, small records


def describe_cut(source: Source) -> DamagedFileError:
    what, ends = "The zip directory at the end of the file is missing", f"The file ends after {source.size} bytes"
    try:
        whole, count, last = _count(source)
    except CkptError as error:
        why = f"{ends}. {error.what}"
        return DamagedFileError(f"{what}; no tensor can be told from what is left.", why=why, whole=0)
    why = f"{ends}, in the record {last!r}." if last else f"{ends}."
    return DamagedFileError(f"{what}: {whole} of {count} tensors complete.", why=why, whole=whole)


def _count(source: Source) -> tuple[int, int, str]:
    """How many tensors are whole, how many there are, and the record that is cut ("" when none is)."""
    from ckpt_tools.pickling.stream import Part, Pickles  # few files need it

    entries: list[str] | None = None
    sizes: dict[str, int] = {}
    storages = Storages(lambda _key, _nbytes: Literal(b""))
    whole: set[str] = set()
    at, name, end = 0, "", 0
    while 0 <= at <= source.size - zips.LOCAL.size:
        header = LocalHeader.at(source, at)
        start, data = at + zips.LOCAL.size, at + header.length
        name = source.read(start, min(header.name_length, source.size - start)).decode("utf-8", "replace")
        if entries is None:
            if data > source.size or not name.endswith("/data.pkl"):
                break
            pickles = Pickles(Part(source, data, source.size))
            try:
                root = pickles.load(lambda stream, offset: Machine(stream, MAKERS, storages.storage, offset))[1]
            except PickleError:
                break
            validate(root)
            folder = name.removesuffix(".pkl")
            entries = [f"{folder}/{node.storage.key}" for _, node in walk(root, plain=False) if type(node) is Entry]
            sizes = {f"{folder}/{key}": storage.nbytes for key, (_, storage) in storages.by_key.items()}
            sizes[name] = pickles.position - data
        end = data + sizes.get(name, header.compressed)
        if end > source.size:
            break
        whole.add(name)
        found = source.read(end, min(_SMALL, source.size - end)).find(zips.SIGNATURE_LOCAL)
        at = end + found if found >= 0 else -1
    if entries is None:
        raise DamagedFileError("The pickle that lists them is cut off or missing.")
    return sum(entry in whole for entry in entries), len(entries), name if end > source.size else ""
