"""A torch-zip whose end is missing: what the records' own headers still tell. It counts what is whole, and saves nothing.

`torch.save` writes local headers without sizes; they follow the bytes in a data descriptor. The length of `data.pkl`, the
first record, is where a descriptor names the distance to its start; that of a storage is what the pickle says.

Source: PKWARE's APPNOTE 6.3.10, sections 4.3.7 (local header) and 4.3.9 (data descriptor).
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from ckpt_tools.errors import CkptError, DamagedFileError
from ckpt_tools.formats.zip_directory import LOCAL, SIGNATURE_LOCAL, LocalHeader
from ckpt_tools.io.content import Content, Literal
from ckpt_tools.io.output import Source
from ckpt_tools.pickling.checks import validate
from ckpt_tools.pickling.machine import Machine
from ckpt_tools.pickling.torch_objects import MAKERS, Storages
from ckpt_tools.tree.nodes import Entry, Node
from ckpt_tools.tree.visit import walk

_HAS_DESCRIPTOR = 8
_FIRST_WINDOW, _WINDOW = 64, 1 << 20  # small first: a file may be thousands of tiny records
_NAMED_SIZE = 12  # signature, CRC-32 and the size, at the beginning of a descriptor
_LONGEST_SMALL = 1 << 30


@dataclass(slots=True, unsafe_hash=True)
class Found:
    """A record, as its local header tells: `end` is None when the file ends before its bytes do."""

    name: str
    data: int
    end: int | None


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
    first = next(_records(source, {}), None)
    if first is None or first.end is None or not first.name.endswith("/data.pkl"):
        raise DamagedFileError("The pickle that lists them is cut off or missing.")
    folder = first.name.removesuffix("data.pkl")
    storages = Storages(_nowhere)
    root = Machine(source.read(first.data, first.end - first.data), MAKERS, storages.storage).load()
    validate(root)
    sizes = {f"{folder}data/{key}": storage.nbytes for key, (_, storage) in storages.by_key.items()}
    whole: set[str] = set()
    cut = ""
    for found in _records(source, sizes):
        if found.end is None:
            cut = found.name
        else:
            whole.add(found.name)
    tensors = list(_tensors(root))
    return sum(f"{folder}data/{entry.storage.key}" in whole for entry in tensors), len(tensors), cut


def _nowhere(key: str, nbytes: int) -> Content:
    return Literal(b"")


def _tensors(root: Node) -> Iterator[Entry]:
    return (node for _, node in walk(root, plain=False) if type(node) is Entry)


def _records(source: Source, sizes: dict[str, int]) -> Iterator[Found]:
    """The records from the start of the file on, until the bytes are not a local header any more."""
    at = 0
    while at + LOCAL.size <= source.size:
        header = LocalHeader.at(source, at)
        data = at + header.length
        if header.signature != SIGNATURE_LOCAL or data > source.size:
            return
        name = source.read(at + LOCAL.size, header.name_length).decode("utf-8", "replace")
        size = header.compressed or sizes.get(name)
        if header.flags & _HAS_DESCRIPTOR:
            end, at = _with_descriptor(source, data, size)
        else:
            end = at = data + header.compressed
        yield Found(name, data, end if end is not None and end <= source.size else None)


def _with_descriptor(source: Source, data: int, size: int | None) -> tuple[int | None, int]:
    """Where the bytes of a record end (None: nowhere) and where its descriptor does."""
    if size is None:
        size = _search_descriptor(source, data)
        if size is None:
            return None, source.size
    end = data + size
    head = source.read(end, min(24, max(0, source.size - end)))
    if head[:4] != b"PK\x07\x08":
        return end, source.size
    return end, end + (16 if int.from_bytes(head[8:12], "little") == size and head[16:18] == b"PK" else 24)


def _search_descriptor(source: Source, data: int) -> int | None:
    """The size of a record that only its descriptor tells: the first that names its own distance from `data`."""
    stop = min(source.size, data + _LONGEST_SMALL)
    start, width = data, _FIRST_WINDOW
    while start < stop:
        window = source.read(start, min(width + _NAMED_SIZE, source.size - start))
        at = -1
        while 0 <= (at := window.find(b"PK\x07\x08", at + 1)) < width:
            size = start + at - data
            if window[at + 8 : at + _NAMED_SIZE] == size.to_bytes(4, "little"):
                return size
        start, width = start + width, min(4 * width, _WINDOW)
    return None
