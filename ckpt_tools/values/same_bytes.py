"""Whether two tensors hold the same bytes, told by reading both side by side. No torch, unless one has to be gathered."""

from __future__ import annotations

from ckpt_tools.io.content import Content, equal_chunks
from ckpt_tools.tree.nodes import PLAIN, Entry, Global, Node, Object, Storage
from ckpt_tools.tree.visit import reachable, walk
from ckpt_tools.values.numeric import part, row_major


def same_bytes(left: Entry, right: Entry) -> bool:
    """Whether two entries of one dtype and shape hold the same bytes, row-major."""
    if (left.stride, left.lazy_bits) == (right.stride, right.lazy_bits) and same_content(_span(left), _span(right)):
        return True
    return same_content(row_major(left), row_major(right))


def _span(entry: Entry) -> Content:
    # a contiguous one by bytes: an element may be less than one
    length = entry.nbytes if entry.is_contiguous else entry.span * entry.dtype.itemsize
    return part(entry.storage.content, entry.offset * entry.dtype.itemsize if length else 0, length)


def same_content(left: Content, right: Content) -> bool:
    """Whether two contents are the same bytes; reading stops at the first that are not."""
    if left.length != right.length:
        return False
    return all(one == other for one, other in zip(equal_chunks(left), equal_chunks(right), strict=True))


def same_unusual(left: Node, right: Node) -> bool:
    """Whether two sparse, quantised or nested tensors are rebuilt from the same bytes with the same arguments."""
    if type(left) is not Object or type(right) is not Object or _arguments(left) != _arguments(right):
        return False
    storages = [[node for node in reachable(tensor) if type(node) is Storage] for tensor in (left, right)]
    if len(storages[0]) != len(storages[1]):
        return False
    return all(same_content(one.content, other.content) for one, other in zip(*storages, strict=True))


def _arguments(node: Node) -> list[str]:
    """Everything but the storages that a tensor is rebuilt from, as text."""
    found = []
    for where, part_ in walk(node):
        if type(part_) is Entry:
            found.append(f"{where} {part_.dtype.name} {part_.shape} {part_.stride} {part_.offset}")
        elif type(part_) in PLAIN or type(part_) is Global:
            found.append(f"{where} {part_!r}" if type(part_) is not int or part_.bit_length() < 64 else f"{where} int")
        elif type(part_) is Storage:
            found.append(f"{where} {part_.dtype.name if part_.dtype else None} {part_.nbytes}")
    return found
