"""Storages cut down to what their tensors use: a view holds on to its whole storage, and torch.save writes all of it."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import partial

from ckpt_tools.io.content import Computed, chunks
from ckpt_tools.tree import exchange, nodes, visit
from ckpt_tools.tree.nodes import Entry, Node, Storage, contiguous_stride
from ckpt_tools.values.numeric import part, row_major, view_of


@dataclass(frozen=True, slots=True)
class Compacted:
    storages: int = 0
    saved: int = 0


@dataclass(frozen=True, slots=True)
class _Piece:
    """The bytes [start, end) of a storage, and the entries that view them."""

    start: int
    end: int
    entries: tuple[Entry, ...]


def compact(root: Node, *, verify: bool = False) -> tuple[Node, Compacted]:
    views: dict[int, list[Entry]] = {}
    pinned: set[int] = set()
    for node in visit.reachable(root):
        if type(node) is Entry:
            views.setdefault(id(node.storage), []).append(node)
        elif type(node) in nodes.CONTAINERS:
            pinned.update(id(below) for below in visit.parts(node) if type(below) is Storage)
    moved: dict[int, Entry] = {}
    count = saved = 0
    for entries in views.values():
        storage = entries[0].storage
        if id(storage) in pinned:
            continue
        made = dict(_cut(storage, entries, verify))
        if made:
            kept = {id(entry.storage): entry.storage.nbytes for entry in made.values()}
            moved.update(made)
            count, saved = count + 1, saved + storage.nbytes - sum(kept.values())
    if not moved:
        return root, Compacted()
    root = exchange.replace(root, lambda node: moved.get(id(node), node) if type(node) is Entry else node)
    return root, Compacted(count, saved)


def _cut(storage: Storage, entries: list[Entry], verify: bool) -> Iterator[tuple[int, Entry]]:
    """The entries of a storage on smaller ones, by their old identity; nothing when nothing is saved."""
    if any(entry.dtype.bits % 8 or entry.dtype.itemsize != entries[0].dtype.itemsize for entry in entries):
        return
    pieces = _pieces(entries)
    gathered = set()
    for index, piece in enumerate(pieces):  # of one view with gaps in it the elements alone are enough
        lazy = any(one.extras is not None and one.extras.metadata is not None for one in piece.entries)
        if not lazy and len(set(map(view_of, piece.entries))) == 1 and piece.entries[0].nbytes < piece.end - piece.start:
            gathered.add(index)
    sizes = [piece.entries[0].nbytes if index in gathered else piece.end - piece.start for index, piece in enumerate(pieces)]
    if sum(sizes) >= storage.nbytes:
        return
    for index, piece in enumerate(pieces):
        first = piece.entries[0]
        whole = part(storage.content, piece.start, piece.end - piece.start)
        content = row_major(first) if index in gathered else whole
        if verify:
            content = Computed(content.length, partial(chunks, content), of=storage.content)
        key = storage.key if index == 0 else f"{storage.key}_{index}"
        own = Storage(key, storage.dtype, content.length, storage.device, content)
        for entry in piece.entries:
            if index in gathered:
                yield id(entry), replace(entry, storage=own, offset=0, stride=contiguous_stride(entry.shape))
            else:
                start = entry.offset - piece.start // entry.dtype.itemsize if entry.nbytes else 0
                yield id(entry), replace(entry, storage=own, offset=start)


def _pieces(entries: list[Entry]) -> list[_Piece]:
    """Entries together with those that they overlap, in order of their bytes; an empty one is at the start."""
    item = entries[0].dtype.itemsize
    spans = ((entry.offset * item, (entry.offset + entry.span) * item) if entry.nbytes else (0, 0) for entry in entries)
    pieces: list[_Piece] = []
    for (start, end), entry in sorted(zip(spans, entries, strict=True), key=lambda row: row[0]):
        last = pieces[-1] if pieces else None
        if last is not None and (start < last.end or start == end):
            pieces[-1] = _Piece(last.start, max(last.end, end), (*last.entries, entry))
        else:
            pieces.append(_Piece(start, end, (entry,)))
    return pieces
