"""npy and npz: what `numpy.save`, `numpy.savez` and `numpy.savez_compressed` write. An array is a tensor, one of text a list.

An array of objects holds a pickle of the array; `numpy.save(file, {"name": array})` gives one of one object, and then the dict
is the tree, with tensors in it. Big-endian arrays are swapped on the way.

Source: numpy/lib/_format_impl.py (its docstring is the specification), numpy/lib/_npyio_impl.py.
"""

from __future__ import annotations

import itertools
import operator
import re
from math import prod
from typing import NamedTuple

from ckpt_tools import limits
from ckpt_tools.errors import TWO_FILES, DamagedFileError, PickleError, TensorError, UnsupportedContainerError
from ckpt_tools.formats.base import trailing, validate_tree
from ckpt_tools.formats.checkpoint import Checkpoint
from ckpt_tools.formats.torch_legacy import Blobs, load_with_blobs
from ckpt_tools.formats.zip_directory import Directory, record_content, record_head
from ckpt_tools.io.content import Content, Literal, Piece, Range, read
from ckpt_tools.io.source import Source
from ckpt_tools.pickling.old_tensors import modernise
from ckpt_tools.pickling.stream import Part, Pickles
from ckpt_tools.pickling.torch_objects import sizes_of
from ckpt_tools.tree import exchange, nodes, visit
from ckpt_tools.tree.dtypes import BY_NUMPY, DType
from ckpt_tools.tree.nodes import MAX_DIMENSIONS, Dict, Entry, Global, List, Node, Object, Storage, array_bytes
from ckpt_tools.values.numeric import part, swapped

_MAGIC = b"\x93NUMPY"
_MAX_HEADER = 10_000  # numpy's own limit for what it evaluates
_DESCR = re.compile(r"([<>=|]?)([a-zA-Z])([0-9]{0,9})")
_RECONSTRUCT = (Global("numpy.core.multiarray", "_reconstruct"), Global("numpy._core.multiarray", "_reconstruct"))
_FROMBUFFER = (Global("numpy.core.numeric", "_frombuffer"), Global("numpy._core.numeric", "_frombuffer"))


_UTF_8 = 1 << 11  # of a record's flags


class Header(NamedTuple):
    """What a header says, with the kind and size of an element ("f4"), and its own length."""

    code: str
    big: bool
    fortran: bool
    shape: tuple[int, ...]
    length: int


def sniff(head: bytes) -> bool:
    return head.startswith(_MAGIC)


def decode(source: Source) -> Checkpoint:
    arrays = Arrays(source)
    header = parse_header(source.read(0, min(source.size, _MAX_HEADER + 12)))
    root = arrays.node(header, Range(source, 0, source.size), "the array")
    decoded = arrays.decoded("npy", root, source)
    decoded.warnings += trailing(arrays.left, "the array")
    return decoded


def decode_npz(source: Source, directory: Directory) -> Checkpoint:
    arrays = Arrays(source)
    items: list[tuple[Node, Node]] = []
    names = {record.name for record in directory.records}
    for record in directory.records:
        name = record.name.removesuffix(".npy")
        if name != record.name and name in names:
            raise DamagedFileError(f"Two arrays may be called {name!r}: {record.name!r} is there too.", why=TWO_FILES)
        if not (name.isascii() or record.flags & _UTF_8):  # numpy.load would read it as cp437
            raise DamagedFileError(f"The zip record {record.name!r} does not say that its name is UTF-8.", why=TWO_FILES)
        header = parse_header(record_head(source, record, _MAX_HEADER + 12), name)
        node = arrays.node(header, record_content(source, record), f"the array {name!r}")
        if arrays.left:
            raise TensorError(f"The array {name!r} has {arrays.left} bytes more than its shape.")
        items.append((name, node))
    decoded = arrays.decoded("npz", Dict(items), source)
    decoded.warnings += trailing(directory.trailing, "the archive")
    decoded.records, decoded.has_checksums = directory.records, any(record.crc for record in directory.records)
    return decoded


# The text of a Python dict, its fields in any order; Python 2 wrote sizes as 3L. `ast.literal_eval` would compile it.
_HEADER = re.compile(
    r"""\s*\{(?:\s*(['"])(?:
        descr\1\s*:\s*(?:(['"])(?P<descr>[^'"\\]*)\2|(?P<fields>\[[^:{}]*\]))
        |fortran_order\1\s*:\s*(?P<order>True|False)
        |shape\1\s*:\s*\((?P<shape>(?:\s*+\d{1,19}L?\s*+(?:,|(?=\))))*+)\s*+\)
    )\s*(?:,|(?=\}))){3}\s*\}\s*""",
    re.DOTALL | re.VERBOSE | re.ASCII,
)


def parse_header(head: bytes, name: str = "") -> Header:
    """The header of a .npy, from its first bytes. Its text is a literal and read as one: nothing in it is called."""
    what = f"The array {name!r}" if name else "The array"
    start = 10 if head[6:7] == b"\1" else 12
    length = int.from_bytes(head[8:start], "little")
    if not head.startswith(_MAGIC) or head[6:7] not in (b"\1", b"\2", b"\3") or length > _MAX_HEADER:
        raise DamagedFileError(f"{what} does not begin with a header of NumPy's.", why=f"It begins with {head[:16]!r}.")
    if start + length > len(head):
        raise DamagedFileError(f"{what} is cut off in its header.")
    found = _HEADER.fullmatch(head[start : start + length].decode("latin-1"))
    said = found.groupdict() if found else {}
    descr = said.get("descr") or said.get("fields") or ""
    shape = tuple(map(int, re.findall(r"\d+", said.get("shape") or "")))
    is_whole = descr and said["order"] and said["shape"] is not None
    if not is_whole or max(shape, default=0) >= 1 << 63 or len(shape) > MAX_DIMENSIONS:
        raise DamagedFileError(f"{what} has a malformed header.", why="Expected descr, fortran_order and shape.")
    kind = _DESCR.fullmatch(descr)
    code = "" if not kind else "O" if kind[2] == "O" else kind[2] + kind[3]  # NumPy wrote "|O8" before 1.7
    if not kind or not (code in BY_NUMPY or kind[2] in "OSU"):
        raise UnsupportedContainerError(f"{what} has the NumPy dtype {descr[:100]!r}, which torch does not have.")
    return Header(code, kind[1] == ">", said["order"] == "True", shape, start + length)


class Arrays:
    """The arrays of one file, as they become nodes: of .npy and .npz, and in a pickle."""

    def __init__(self, source: Source) -> None:
        self.budget = limits.budget(source.size)
        self.globals: dict[Global, None] = {}
        self.unusual: dict[str, None] = {}
        self.count = self.storage_bytes = self.left = 0

    def node(self, header: Header, content: Content, what: str) -> Node:
        """A tensor; a list or text of an array of text; what is in an array of objects."""
        if header.code == "O":
            return self._objects(header, content)
        dtype = BY_NUMPY.get(header.code)
        if dtype is None:
            return self._text(header, content, what)
        self.budget.take(limits.NODES, _COST, _TOO_MANY)
        nbytes = _elements(header.shape) * dtype.itemsize
        self._take(header, nbytes, content.length, what)
        own = part(content, header.length, nbytes)
        return self._entry(dtype, header.shape, own, fortran=header.fortran, big=header.big)

    def _entry(self, dtype: DType, shape: tuple[int, ...], content: Content, *, fortran: bool, big: bool) -> Entry:
        stride = tuple(reversed(nodes.contiguous_stride(shape[::-1]))) if fortran else nodes.contiguous_stride(shape)
        made = swapped(content, dtype.swap_width) if big else content
        storage = Storage(str(self.count), dtype if dtype.storage else None, content.length, None, made)
        entry = Entry(storage, dtype, shape, stride, 0)
        nodes.check(entry)
        self.count += 1
        self.storage_bytes += storage.nbytes
        return entry

    def _take(self, header: Header, nbytes: int, length: int, what: str) -> None:
        self.left = length - header.length - nbytes
        if self.left < 0:
            why = f"It has {length - header.length} of {nbytes} bytes."
            raise DamagedFileError(f"The file is cut off in {what}.", why=why, fix="Get it again.")

    def _text(self, header: Header, content: Content, what: str) -> Node:
        width = int(header.code[1:] or 0) * (4 if header.code[0] == "U" else 1)
        count = _elements(header.shape)
        if header.fortran or not width:
            raise UnsupportedContainerError(f"{what.capitalize()} holds text in an order that no checkpoint has, or none.")
        self._take(header, count * width, content.length, what)
        self.budget.take(limits.MEMORY, count * width, f"{what.capitalize()} brings the file's text to more than any has.")
        self.budget.take(limits.NODES, _lists(header.shape) + count // _TEXTS_PER_CONTAINER, _TOO_MANY)
        data = read(part(content, header.length, count * width))
        codec = "latin1" if header.code[0] == "S" else f"utf-32-{'be' if header.big else 'le'}"
        cells: list[Node] = [data[at : at + width].decode(codec, "replace").rstrip("\0") for at in range(0, len(data), width)]
        return _nested(cells, header.shape)

    def _objects(self, header: Header, content: Content) -> Node:
        """What the pickle of an array of objects holds: the object of an array without dimensions, else a list."""
        if isinstance(content, Range):
            pickles = Pickles(Part(content.source, content.offset + header.length, content.offset + content.length))
        elif content.length > self.budget.room(limits.MEMORY):  # whoever reads what is in it counts it
            raise limits.MEMORY.error(f"A record claims {content.length} bytes, deflated; the file has fewer.", content.length)
        else:
            pickles = Pickles(Part.of_bytes(read(content)[header.length :]))
        machine, root, blobs = load_with_blobs(pickles, prefix=f"{self.count}.")
        self.left = pickles.left
        self.count += 1
        self.storage_bytes += blobs.storage_bytes
        self.globals.update(machine.globals)
        self.unusual.update(machine.unusual)
        state = root.state if type(root) is Object and root.function in _RECONSTRUCT else None
        items = state[4] if type(state) is tuple and len(state) == 5 else None
        if type(items) is not List or len(items.items) != _elements(header.shape):
            raise PickleError("An array of objects is not pickled as NumPy pickles it.")
        self.budget.take(limits.NODES, _lists(header.shape), _TOO_MANY)
        held = items.items[0] if header.shape == () else _nested(items.items, header.shape)
        return modernise(self.as_tensors(held, blobs), machine.globals)

    def as_tensors(self, root: Node, blobs: Blobs) -> Node:
        """A tree from a pickle, with tensors in the places of arrays of numbers; what objects hold stays as it is."""
        loose = {id(node) for _, node in visit.walk(root, stop=lambda node: type(node) is Object, plain=False)}
        return exchange.replace(root, lambda node: self._array(node, blobs) if id(node) in loose else node)

    def _array(self, node: Node, blobs: Blobs) -> Node:
        """A pickled array of numbers as a tensor; anything else as it is."""
        shape, kind, fortran, data = (_array_state(node) if type(node) is Object else None) or (None, None, None, None)
        shape = sizes_of(shape) if type(shape) is tuple else None
        dtype, big = _numbers(kind)
        if dtype is None or shape is None or min(shape, default=0) < 0:
            return node
        nbytes = _elements(shape) * dtype.itemsize
        if (data := array_bytes(data, nbytes)) is None:
            return node
        if nbytes != len(data):
            raise TensorError("A pickled array has more or fewer bytes than its shape.")
        held = blobs.part_of(data)
        return self._entry(dtype, shape, held.content(0, held.end), fortran=fortran is True, big=big)

    def decoded(self, container: str, root: Node, source: Source) -> Checkpoint:
        made = Checkpoint(container, root, source, list(self.globals), ["a file of NumPy's", *self.unusual])
        made.warnings, made.storage_bytes = validate_tree(root), self.storage_bytes
        return made


def _numbers(kind: Node) -> tuple[DType | None, bool]:
    if type(kind) is not Object or kind.name != "numpy.dtype" or type(kind.args) is not tuple or not kind.args:
        return None, False
    if len(kind.steps) > 1:
        raise TensorError("The dtype of a pickled array is set twice.", why="NumPy takes the first for the array.")
    code, state = kind.args[0], kind.state
    big = type(state) is tuple and len(state) > 1 and state[1] == ">"
    return BY_NUMPY.get(code) if type(code) is str else None, big


def _array_state(node: Object) -> tuple[Node, Node, Node, Node] | None:
    """Shape, dtype, whether in Fortran order, and bytes of a pickled array: from its state; in protocol 5 from arguments."""
    if node.function in _RECONSTRUCT and len(node.steps) == 1 and type(node.state) is tuple and len(node.state) == 5:
        return node.state[1:]
    if node.function in _FROMBUFFER and type(node.args) is tuple and len(node.args) == 4 and not node.steps:
        buffer, kind, shape, order = node.args
        if type(buffer) is Object and buffer.name == "builtins.bytearray" and type(buffer.args) is tuple and buffer.args:
            buffer = buffer.args[0]
        return shape, kind, order == "F", buffer
    return None


def _elements(shape: tuple[int, ...]) -> int:
    count = prod(shape)
    if count.bit_length() > 63:
        raise TensorError("An array claims more than 2**63 elements.")
    return count


_COST = 8  # of an array of numbers, in containers, beside its record: NumPy writes 244 bytes for one number
_TEXTS_PER_CONTAINER = 4
_TOO_MANY = "The arrays make more lists, or texts, than a file of its size can hold."


def _lists(shape: tuple[int, ...]) -> int:
    return sum(itertools.accumulate(shape[:-1], operator.mul, initial=1)) if shape else 0


def _nested(cells: list[Node], shape: tuple[int, ...]) -> Node:
    """Cells in row-major order as nested lists; the cell itself without dimensions."""
    if not shape:
        return cells[0]
    for size in reversed(shape[1:]):
        cells = [List(cells[at : at + size]) for at in range(0, len(cells), size)] if size else []
    return List(cells)


# --- laying out


def lay_out(content: Content, dtype: DType, shape: tuple[int, ...]) -> list[Piece]:
    code = next(code for code, known in BY_NUMPY.items() if known is dtype)
    descr = f"{'|' if dtype.itemsize == 1 else '<'}{code}"
    text = f"{{'descr': '{descr}', 'fortran_order': False, 'shape': {shape}, }}"
    header = text.encode().ljust(-(-(len(text) + 11) // 64) * 64 - 11) + b"\n"
    return [Piece(Literal(_MAGIC + b"\1\0" + len(header).to_bytes(2, "little") + header)), Piece(content)]
