"""A tree as the items of a distributed checkpoint: flat names with their paths, tensors once each, values as archives.

Nested dicts and lists become dotted names as torch's `_traverse.py` makes them, so that a job finds what it would have saved.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field

from ckpt_tools import limits
from ckpt_tools.errors import ConvertError
from ckpt_tools.formats import zip_writer
from ckpt_tools.formats.contents import find_optimizers, is_tensor, parameter_numbers
from ckpt_tools.io.content import Content, to_bytes
from ckpt_tools.text import dotted
from ckpt_tools.tree.nodes import PLAIN, Dict, Entry, List, Node
from ckpt_tools.tree.visit import component
from ckpt_tools.values.numeric import row_major, view_of

Path = tuple[str | int, ...]


@dataclass(frozen=True, slots=True)
class Item:
    """One name: a tensor with its bytes row-major, or a value as a torch-zip."""

    name: str
    path: Path
    entry: Entry | None
    content: Content | None
    value: bytes = b""

    @property
    def nbytes(self) -> int:
        """Bytes of the tensor or of the value's archive."""
        return self.content.length if self.content is not None else len(self.value)


@dataclass(slots=True)
class Items:
    """The items in order; tied names -> the name whose chunks they share; how many keys became text."""

    items: list[Item] = field(default_factory=list)
    aliases: dict[str, str] = field(default_factory=dict)
    text_keys: int = 0
    states: int = 0
    attributes: bool = False


def collect(root: Node, file_bytes: int = 0) -> Items:
    """The items of a tree that was read from a file of this size."""
    if type(root) is not Dict:
        raise ConvertError(
            "A distributed checkpoint holds a mapping; this checkpoint is something else.", fix="Take one out of it: `select`."
        )
    found = Items()
    for where, optimizer in find_optimizers(root):
        numbers = {key for key, _ in optimizer.state.items if type(key) is int}
        if lost := numbers.difference(parameter_numbers(optimizer).values()):
            raise ConvertError(
                f"A distributed checkpoint has text for keys, and {dotted(where)!r} has states under whole numbers.",
                why=f"No group of the optimizer names {min(lost)}: nothing would find the state again.",
                fix="Write a .pth, which keeps the numbers.",
            )
        found.states += len(numbers)
    names: dict[str, Path] = {}
    first: dict[tuple[int, str], str] = {}
    for path, node in _leaves(root, found, limits.NODES.most(file_bytes) // limits.LISTED):
        name = dotted(path)
        if name in names:
            raise ConvertError(
                f"Two places of the checkpoint have the name {name!r} in a distributed one.", fix="Rename one: `rename`."
            )
        names[name] = path
        item = _item(name, path, node)
        if item.entry is not None and item.entry.nbytes:
            holder = first.setdefault(view_of(item.entry), name)
            if holder != name:
                found.aliases[name] = holder
        found.items.append(item)
    return found


def _item(name: str, path: Path, node: Node) -> Item:
    if type(node) is Entry:
        if not node.dtype.in_torch or node.dtype.packed > 1:
            raise ConvertError(f"{name!r} is {node.dtype.name}, which torch's writer does not take.")
        return Item(name, path, node, row_major(node))
    if is_tensor(node):
        raise ConvertError(
            f"{name!r} is a sparse, quantised, nested or meta tensor, which a distributed checkpoint cannot hold.",
            fix="Write a .pth, which holds any tensor.",
        )
    return Item(name, path, None, None, to_bytes(zip_writer.lay_out(node, trust_crc=False)))


def _leaves(root: Dict, found: Items, most: int) -> Iterator[tuple[Path, Node]]:
    """Tensors and values with their paths, depth first in order; a dict or list inside itself is refused."""
    holders = _holders(root)
    stack: list[tuple[Path, Iterator[tuple[str | int, Node]], int]] = [((), _children(root, found), id(root))]
    open_ids, seen = {id(root)}, {id(root)}
    while stack:
        path, children, holder = stack[-1]
        for key, node in children:
            where = (*path, key)
            if not (type(node) is Dict or (type(node) is List and id(node) in holders)) or not node.items:
                yield where, node
                continue
            if id(node) in open_ids:
                raise ConvertError(f"{dotted(where)!r} contains itself, which a distributed checkpoint cannot hold.")
            if id(node) in seen and (most := most - len(node.items)) < 0:
                what = "The checkpoint refers to its dicts too often: a distributed one holds what is in them each time."
                raise limits.NODES.error(what, fix="Write a .pth, which keeps them as they are.")
            open_ids.add(id(node))
            seen.add(id(node))
            stack.append((where, _children(node, found), id(node)))
            break
        else:
            open_ids.discard(holder)
            stack.pop()


def _children(node: Dict | List, found: Items) -> Iterator[tuple[str | int, Node]]:
    if type(node) is List:
        yield from enumerate(node.items)
        return
    found.attributes |= node.attributes is not None
    for key, value in node.items:
        found.text_keys += type(key) is not str
        yield _key_text(key), value


def _key_text(key: Node) -> str:
    """A key as torch's `_traverse.py` writes it: as Python does, where that is a short text that tells it apart."""
    if type(key) is tuple and all(type(part) in PLAIN and (type(part) is not int or part.bit_length() <= 128) for part in key):
        return str(key)
    return str(component(key))


def _holders(root: Dict) -> set[int]:
    """The lists that hold a dict or a tensor, in lists at any depth: those are taken apart, others are values."""
    found: set[int] = set()
    lists: list[tuple[List, ...]] = []
    seen: set[int] = set()
    stack: list[tuple[Dict | List, tuple[List, ...]]] = [(root, ())]
    while stack:
        node, above = stack.pop()
        if id(node) in seen:
            continue
        seen.add(id(node))
        inside = (*above, node) if type(node) is List else ()
        values = node.items if type(node) is List else [value for _, value in node.items]
        if inside and any(type(value) is Dict or is_tensor(value) for value in values):
            lists.append(inside)
        stack.extend((value, inside) for value in values if type(value) is Dict or type(value) is List)
    for chain in lists:
        found.update(map(id, chain))
    return found
