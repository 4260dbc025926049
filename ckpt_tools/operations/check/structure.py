"""Whether the records, storages and headers of a checkpoint are what the formats promise, once its bytes were read."""

from __future__ import annotations

import re
from bisect import bisect_right
from collections.abc import Iterable, Iterator, Sequence
from math import prod

from ckpt_tools.edit.casts import to_little_endian
from ckpt_tools.formats.base import PROGRAMS, Decoded
from ckpt_tools.formats.folders import INDEX_SUFFIX
from ckpt_tools.formats.open import Checkpoint
from ckpt_tools.formats.zip.directory import Record
from ckpt_tools.formats.zip.headers import ALIGNMENT, DESCRIPTOR_64
from ckpt_tools.io.content import Content, Deflated, Range, chunks
from ckpt_tools.io.sources import Files, Window
from ckpt_tools.operations.check.reading import DamagedRecord, in_file, storages_of
from ckpt_tools.operations.in_folders import indexed_files
from ckpt_tools.pickling.torch_objects import SPARSE, SparseParts, sparse_parts, unwrapped
from ckpt_tools.text import dotted, listed
from ckpt_tools.tree.findings import Finding, mending
from ckpt_tools.tree.nodes import Entry, Object, Storage
from ckpt_tools.tree.visit import reachable
from ckpt_tools.values.numeric import row_major

_SHARD = re.compile(r"(?:-\d{5}-of-\d{5}\.(?:safetensors|bin)|\.distcp)$")
_GAP_FROM = 1 << 20


def disorder(checkpoint: Checkpoint) -> Iterator[Finding]:
    """What the directory, the header or the folder tells, worst first."""
    if checkpoint.decoded.records:
        yield from _zip(checkpoint)
    if isinstance(checkpoint.decoded.source, Files):
        yield from _sharded(checkpoint)
    if checkpoint.decoded.misplaced is not None and (found := list(checkpoint.decoded.misplaced())):
        text = f"{len(found)} archives do not lie where .metadata says: {listed(found)}"
        fix = "Get the files again, or take an earlier checkpoint."
        yield Finding("misplaced-chunk", "problem", [], text, "archives as .metadata says: torch loads no others", fix)
    if checkpoint.container == "safetensors":
        yield from _safetensors(checkpoint)


def damage(checkpoint: Checkpoint, mismatches: Sequence[DamagedRecord]) -> Iterator[Finding]:
    """Records whose bytes do not match their CRC-32, with the tensors on them."""
    users = _users(checkpoint, mismatches)
    written_twice = [row for row in mismatches if row.other_writer]
    for row in mismatches:
        record, names = row.record, users.get(id(row.record), [])
        on = f" holds {listed(names)}, and" if names else ""
        given = "they cannot be inflated" if row.found is None else f"the bytes give {row.found:08x}"
        of = f" of {row.source.path.name}" if row.source is not checkpoint.decoded.source else ""
        text = f"the record {record.name!r}{of}{on} does not match its CRC-32: the file says {record.crc:08x}, {given}"
        part = f"Get {row.source.path.name} again, or take an earlier checkpoint."
        no_repair = isinstance(row.source, Window) or checkpoint.container in (*PROGRAMS, "npz")
        fix = part if no_repair else mending("repair", str(row.source.path))
        yield Finding("damaged-record", "problem", [], text, "the bytes that were saved; torch.load does not notice", fix)
    if written_twice:
        text = (
            f"{len(written_twice)} damaged records match the CRC-32 right behind them, and not the one in the directory: "
            "two processes wrote to this file at once"
        )
        fix = "Save on rank 0 only: if torch.distributed.get_rank() == 0: torch.save(...)"
        yield Finding("mixed-writers", "problem", [], text, "one writer", fix)


def sparse(checkpoint: Checkpoint) -> Iterator[Finding]:
    """Sparse tensors with an index that is none: torch 2.13 loads them as they are."""
    for tensor in checkpoint.tensors:
        node = unwrapped(tensor.node) if type(tensor.node) is Object else None
        if node is None or node.name not in SPARSE:
            continue
        parts, order = sparse_parts(node.args), checkpoint.decoded.byteorder
        if any(_is_outside(entry, most, order) for entry, most in zip(parts.indices, _bounds(parts), strict=True)):
            text = f"the sparse tensor {dotted(tensor.where)} has an index outside its shape {list(parts.shape)}"
            expected = "indices within the shape: torch 2.13 loads the file, 2.14 refuses it"
            fix = "Take an earlier checkpoint, or save the tensor again with indices that are right."
            yield Finding("sparse-indices", "problem", list(tensor.where), text, expected, fix)


def _bounds(parts: SparseParts) -> list[Sequence[int]]:
    """What the indices of each entry stay below; one number for each row of an entry."""
    if parts.layout == "sparse_coo":
        return [parts.shape[: parts.indices[0].shape[0]]]
    columns = parts.layout in ("sparse_csr", "sparse_bsr")
    block = parts.values.shape[-1 if columns else -2] if parts.layout in ("sparse_bsr", "sparse_bsc") else 1
    return [[parts.indices[1].shape[-1] + 1], [parts.shape[-1 if columns else -2] // max(1, block)]]


def _is_outside(entry: Entry, most: Sequence[int], byteorder: str) -> bool:
    """Whether a number of these, whose rows have a bound each, is negative or not below it."""
    little = to_little_endian(entry, byteorder)
    assert type(little) is Entry
    run, at = prod(entry.shape) // max(1, len(most)), 0
    for chunk in chunks(row_major(little)):
        numbers = memoryview(chunk).cast("B").cast("q" if entry.dtype.itemsize == 8 else "i")
        while len(numbers):
            row = numbers[: run - at % run]
            if min(row) < 0 or max(row) >= most[at // run]:
                return True
            at, numbers = at + len(row), numbers[len(row) :]
    return False


def _users(checkpoint: Checkpoint, damaged: Sequence[DamagedRecord]) -> dict[int, list[str]]:
    """The id of a damaged record -> dotted paths of the tensors in it."""
    if not damaged:
        return {}
    places, users = _Places(damaged), dict[int, list[str]]()
    for tensor in checkpoint.tensors:
        below = {id(node): node.content for node in reachable(tensor.node) if type(node) is Storage}
        for content in below.values():
            if (record := places.record_at(content)) is not None:
                users.setdefault(id(record), []).append(dotted(tensor.where))
    return users


class _Places:
    """Where damaged records lie, in order, so that the one at a place is found at once."""

    def __init__(self, damaged: Sequence[DamagedRecord]) -> None:
        found = [(*in_file(row.source, row.record.data), row.record) for row in damaged]
        ordered = sorted(((id(file), start, record) for file, start, record in found), key=lambda place: place[:2])
        self.starts, self.records = [place[:2] for place in ordered], [place[2] for place in ordered]

    def record_at(self, content: Content) -> Record | None:
        """The damaged record in which bytes lie; None where they are in none."""
        if not isinstance(content, Range | Deflated):
            return None
        file, start = in_file(content.source, content.offset)
        at = bisect_right(self.starts, (id(file), start)) - 1
        if at < 0 or self.starts[at][0] != id(file):
            return None
        record = self.records[at]
        return record if start < self.starts[at][1] + max(1, record.compressed) else None


def _zip(checkpoint: Checkpoint) -> Iterator[Finding]:
    decoded, path = checkpoint.decoded, str(checkpoint.path)
    records = decoded.records if decoded.container in ("torch-zip", "torchscript") else ()  # others name storages otherwise
    unused = _unused(decoded, (storage.key for storage in storages_of(checkpoint)), records)
    if unused:  # by tensors; a storage may also stand in the tree by itself
        every = (node.key for node in reachable(checkpoint.root, dicts=False) if type(node) is Storage)
        unused = _unused(decoded, every, unused)
    if unused:
        size = sum(record.compressed for record in unused)
        text = f"{len(unused)} storages ({size} bytes) that no tensor uses: {listed([record.name for record in unused])}"
        yield Finding("unused-storage", "info", [], text, "", mending("convert", path))
    gaps = sum(max(0, record.following - record.end - DESCRIPTOR_64 - ALIGNMENT) for record in decoded.records)
    if gaps >= _GAP_FROM:
        yield Finding("unused-bytes", "info", [], f"{gaps} bytes between the records", "", mending("convert", path))
    if not decoded.has_checksums:
        text = "the file carries no checksums (every CRC-32 is 0): damage to tensors cannot be seen"
        yield Finding("no-checksums", "info", [], text, "", mending("convert", path))


def _safetensors(checkpoint: Checkpoint) -> Iterator[Finding]:
    source, path = checkpoint.decoded.source, str(checkpoint.path)
    if checkpoint.decoded.metadata.get("format") is None:
        text = "the header's metadata has no format"
        yield Finding(
            "no-format", "info", [], text, "format: pt, as safetensors.torch and transformers write it", mending("repair", path)
        )
    if int.from_bytes(source.read(0, 8), "little") % 8:
        text = "the tensors do not begin at a multiple of 8 bytes"
        yield Finding(
            "unaligned", "info", [], text, "a header padded with spaces, as safetensors writes it", mending("repair", path)
        )


def _unused(decoded: Decoded, keys: Iterable[str], records: Sequence[Record]) -> list[Record]:
    """The records of storages whose keys are not among these."""
    folder = f"{decoded.root_folder}/data/"
    used = {f"{folder}{key}" for key in keys}
    return [record for record in records if record.name.startswith(folder) and record.name not in used]


def _sharded(checkpoint: Checkpoint) -> Iterator[Finding]:
    """Files that look like shards and that no index names; what this one names was found, or the file did not open."""
    files = checkpoint.decoded.source
    if not isinstance(files, Files):
        return
    there = sorted(files.names())
    indexes = [files.folder / name for name in there if name.endswith(INDEX_SUFFIX) and name not in files.members]
    named = {name for path in indexes for name in indexed_files(path) or ()}
    stray = [name for name in there if _SHARD.search(name) and name not in files.members and name not in named]
    if stray:
        text = f"{len(stray)} shards that the index does not name: {listed(stray)}"
        yield Finding("stray-shard", "warning", [], text, "the shards of one checkpoint", "Remove what an earlier save left.")
