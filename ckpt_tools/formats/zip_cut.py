"""A torch-zip whose end is missing: what the records' own headers still tell. It counts what is whole, and saves nothing.

`torch.save` writes local headers without sizes; they follow the bytes in a data descriptor. The length of `data.pkl`, the
first record, is where a descriptor names the distance to its start; that of a storage is what the pickle says.

Source: PKWARE's APPNOTE 6.3.10, sections 4.3.7 (local header) and 4.3.9 (data descriptor).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from ckpt_tools.errors import CkptError, DamagedFileError
from ckpt_tools.formats.zip_directory import LOCAL, SIGNATURE_DESCRIPTOR, SIGNATURE_LOCAL, LocalHeader, signatures
from ckpt_tools.io.content import Literal
from ckpt_tools.io.output import Source
from ckpt_tools.io.sources import Window
from ckpt_tools.pickling.checks import validate
from ckpt_tools.pickling.machine import Machine
from ckpt_tools.pickling.torch_objects import MAKERS, Storages
from ckpt_tools.tree.nodes import Entry
from ckpt_tools.tree.visit import walk

_HAS_DESCRIPTOR = 8
_LONGEST_PICKLE, _LONGEST_SMALL = 1 << 30, 4096  # bytes of records that only a descriptor tells the size of
_Found = tuple[str, int, int | None]  # name, where the bytes begin, where they end; None: behind the end of the file


def describe_cut(source: Source) -> DamagedFileError:
    """The error for a torch-zip without a directory, with how many of its tensors are complete."""
    what = "The zip directory at the end of the file is missing"
    ends = f"The file ends after {source.size} bytes"
    try:
        whole, count, last = _count(source)
    except CkptError as error:
        why = f"{ends}. {error.what}"
        return DamagedFileError(f"{what}; no tensor can be told from what is left.", why=why, whole=0)
    why = f"{ends}, in the record {last!r}." if last else f"{ends}."
    return DamagedFileError(f"{what}: {whole} of {count} tensors complete.", why=why, whole=whole)


def _count(source: Source) -> tuple[int, int, str]:
    """How many tensors are whole, how many there are, and the record that is cut ("" when none is)."""
    name, start, end = next(_records(source, {}, _LONGEST_PICKLE), ("", 0, None))
    if end is None or not name.endswith("/data.pkl"):
        raise DamagedFileError("The pickle that lists them is cut off or missing.")
    data = name.removesuffix(".pkl")
    storages = Storages(lambda _key, _nbytes: Literal(b""))
    root = Machine(source.read(start, end - start), MAKERS, storages.storage).load()
    validate(root)
    sizes = {f"{data}/{key}": storage.nbytes for key, (_, storage) in storages.by_key.items()}
    ends = {found: stop for found, _, stop in _records(source, {name: end - start, **sizes}, _LONGEST_SMALL)}
    tensors = [node for _, node in walk(root, plain=False) if type(node) is Entry]
    whole = sum(ends.get(f"{data}/{entry.storage.key}") is not None for entry in tensors)
    return whole, len(tensors), next((found for found, stop in ends.items() if stop is None), "")


def _records(source: Source, sizes: Mapping[str, int], longest: int) -> Iterator[_Found]:
    """The records from the start of the file on, until the bytes are not a local header any more."""
    at = 0
    while at + LOCAL.size <= source.size:
        header = LocalHeader.at(source, at)
        data = at + header.length
        if header.signature != SIGNATURE_LOCAL or data > source.size:
            return
        name = source.read(at + LOCAL.size, header.name_length).decode("utf-8", "replace")
        size = header.compressed
        if header.flags & _HAS_DESCRIPTOR and not size:
            size = sizes[name] if name in sizes else _described(source, data, longest)
        at = data + size
        yield name, data, at if at <= source.size else None
        if header.flags & _HAS_DESCRIPTOR:
            at += _length_of_descriptor(source, at, size)


def _described(source: Source, data: int, longest: int) -> int:
    """The size that the first descriptor says which names its own distance from the data; more than there is if none does."""
    for _, size in signatures(Window(source, data, min(longest, source.size - data)), SIGNATURE_DESCRIPTOR):
        at = data + size + 8
        if source.read(at, min(4, max(0, source.size - at))) == size.to_bytes(4, "little"):
            return size
    return source.size


def _length_of_descriptor(source: Source, at: int, size: int) -> int:
    """With sizes of 32 or of 64 bits; where there is none, up to the end."""
    head = source.read(at, min(24, max(0, source.size - at)))
    if not head.startswith(SIGNATURE_DESCRIPTOR):
        return source.size
    return 16 if head[8:12] == size.to_bytes(8, "little")[:4] and head[16:18] == b"PK" else 24
