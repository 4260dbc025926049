"""Write a tree as a pickle of protocol 2, the one that `torch.save` writes, with the opcodes that weights_only reads.

What the tree shares stays shared: whatever is referenced more than once goes through the memo, containers before their
contents, so that cycles close. No recursion: a stack of things still to write.
"""

from __future__ import annotations

import struct
from collections import Counter
from typing import Any

from ckpt_tools.dtypes import UINT8
from ckpt_tools.errors import ContainerLimitError, PickleError
from ckpt_tools.pickling.reader import python3_name
from ckpt_tools.pickling.torch_objects import ORDERED_DICT
from ckpt_tools.tree import CONTAINERS, ByteString, Dict, Entry, Extras, Global, List, Node, Object, Storage, parts

_TUPLES = {0: b")", 1: b"\x85", 2: b"\x86", 3: b"\x87"}
_REBUILD_V2 = Global("torch._utils", "_rebuild_tensor_v2")
_REBUILD_V3 = Global("torch._utils", "_rebuild_tensor_v3")
_REBUILD_PARAMETER = Global("torch._utils", "_rebuild_parameter")
_REBUILD_PARAMETER_STATE = Global("torch._utils", "_rebuild_parameter_with_state")
_REBUILD_FROM_TYPE = Global("torch._tensor", "_rebuild_from_type_v2")


def write_pickle(root: Node) -> bytes:
    """The pickle of a tree. Protocol 2; 4 only where a name needs it (a nested class, a module that 2 would rename).

    Raises:
        ContainerLimitError: an entry with a dtype that torch lacks.
    """
    writer = _Writer(root)
    return writer.write(root)


class _Done:
    """What remains to be emitted once the parts of a node are written: opcodes, then the memo."""

    __slots__ = ("node", "opcodes")

    def __init__(self, opcodes: bytes, node: Node = None) -> None:
        self.opcodes, self.node = opcodes, node


class _Writer:
    def __init__(self, root: Node) -> None:
        self.out = bytearray()
        self.memo: dict[Any, int] = {}
        references, protocol = _survey(root)
        self.shared = {key for key, count in references.items() if count > 1}
        self.protocol = protocol

    def write(self, root: Node) -> bytes:
        self.out += bytes((0x80, self.protocol))
        todo: list[Node] = [root]
        while todo:
            node = todo.pop()
            kind = type(node)
            if kind is _Done:
                self.finish(node)
            elif kind in CONTAINERS:
                todo.extend(reversed(self.open(node)))
            elif kind is Entry:
                todo.extend(reversed(self.entry(node)))
            else:
                self.leaf(node)
        self.out += b"."
        return bytes(self.out)

    # --- the memo

    def remember(self, key: Any) -> None:
        index = self.memo[key] = len(self.memo)
        self.out += b"q" + bytes((index,)) if index < 256 else b"r" + struct.pack("<I", index)

    def recall(self, key: Any) -> bool:
        index = self.memo.get(key)
        if index is None:
            return False
        self.out += b"h" + bytes((index,)) if index < 256 else b"j" + struct.pack("<I", index)
        return True

    def finish(self, done: _Done) -> None:
        node = done.node
        if node is not None and id(node) in self.memo:
            # A cycle led back here, and the inner writing has built it already: drop this one, as pickle does.
            self.out += done.opcodes + b"0"
            self.recall(id(node))
            return
        self.out += done.opcodes
        if node is not None and id(node) in self.shared:
            self.remember(id(node))

    # --- nodes with parts: each returns what is to be written next, in order

    def open(self, node: Node) -> list[Node]:
        if id(node) in self.shared and self.recall(id(node)):
            return []
        if type(node) is Dict:
            return self.dict(node)
        if type(node) is List:
            self.out += b"]"
            if id(node) in self.shared:
                self.remember(id(node))
            return [_Done(b"("), *node.items, _Done(b"e")] if node.items else []
        if type(node) is tuple:
            if len(node) < 4:
                return [*node, _Done(_TUPLES[len(node)], node or None)]
            self.out += b"("
            return [*node, _Done(b"t", node)]
        return self.object(node)

    def dict(self, node: Dict) -> list[Node]:
        if node.ordered:
            self.leaf(ORDERED_DICT)
        self.out += b")R" if node.ordered else b"}"
        if id(node) in self.shared:
            self.remember(id(node))
        attributes = [] if node.attributes is None else [node.attributes, _Done(b"b")]
        return [*_items(node.items), *attributes]

    def object(self, node: Object) -> list[Node]:
        todo: list[Node] = [node.function]
        if node.call == "new":
            todo += [node.args, _Done(b"\x81", node)]
        elif node.call == "new_ex":
            # protocol 2 has no NEWOBJ_EX; copyreg's function does the same
            todo = [Global("copyreg", "__newobj_ex__"), (node.function, node.args, node.kwargs), _Done(b"R", node)]
        elif node.call == "reduce":
            todo += [node.args, _Done(b"R", node)]
        for step, value in node.steps:
            if step == "set":
                todo += _items(value)
            elif step == "append":
                todo += [_Done(b"("), *value, _Done(b"e")]
            else:
                todo += [value, _Done(b"b")]
        return todo

    def entry(self, entry: Entry) -> list[Node]:
        if id(entry) in self.shared and self.recall(id(entry)):
            return []
        if not entry.dtype.in_torch:
            raise ContainerLimitError(f"torch has no dtype for {entry.dtype.name}, so a .pth cannot hold it.")
        if entry.extras is not None:
            return self.entry_with_extras(entry, entry.extras)
        self.plain_entry(entry)
        if id(entry) in self.shared:
            self.remember(id(entry))
        return []

    def plain_entry(self, entry: Entry) -> None:
        """A tensor or parameter without extras, emitted at once: checkpoints hold thousands."""
        parameter = entry.kind == "parameter"
        if parameter:
            self.global_(_REBUILD_PARAMETER)
        untyped = _untyped(entry)
        self.global_(_REBUILD_V3 if untyped else _REBUILD_V2)
        self.out += b"("
        self.storage(entry.storage)
        self.out += _integer(entry.offset) + _sizes(entry.shape) + _sizes(entry.stride)
        self.out += b"\x88" if entry.requires_grad and not parameter else b"\x89"
        self.no_hooks()
        if untyped:
            self.global_(Global("torch", entry.dtype.name))
        self.out += b"tR"
        if parameter:
            self.out += b"\x88" if entry.requires_grad else b"\x89"
            self.no_hooks()
            self.out += b"\x87R"

    def no_hooks(self) -> None:
        self.global_(ORDERED_DICT)
        self.out += b")R"

    def entry_with_extras(self, entry: Entry, extras: Extras) -> list[Node]:
        """The calls that torch writes for hooks, conj bits, subclasses and Python attributes."""
        parameter, untyped = entry.kind == "parameter", _untyped(entry)
        hooks = Dict(ordered=True) if extras.hooks is None else extras.hooks
        grad = entry.requires_grad and not parameter
        args = [entry.storage, entry.offset, entry.shape, entry.stride, grad, Dict(ordered=True) if parameter else hooks]
        args += [Global("torch", entry.dtype.name)] if untyped else []
        args += [extras.metadata] if extras.metadata is not None else []
        function: Node = _REBUILD_V3 if untyped else _REBUILD_V2
        arguments: list[Node] = [_Done(b"("), *args, _Done(b"t")]
        if parameter:
            inner = [function, *arguments, _Done(b"R"), entry.requires_grad, hooks]
            with_state = extras.state is not None and extras.python_type is None
            function = _REBUILD_PARAMETER_STATE if with_state else _REBUILD_PARAMETER
            arguments = [_Done(b"("), *inner, *([extras.state] if with_state else []), _Done(b"t")]
        if extras.python_type is None:
            return [function, *arguments, _Done(b"R", entry)]
        return [_REBUILD_FROM_TYPE, _Done(b"("), function, extras.python_type, *arguments, extras.state, _Done(b"tR", entry)]

    # --- nodes without parts

    def leaf(self, node: Node) -> None:
        kind = type(node)
        if kind is str:
            self.text(node)
        elif kind is int:
            self.out += _integer(node)
        elif node is None or kind is bool:
            self.out += {None: b"N", True: b"\x88", False: b"\x89"}[node]
        elif kind is float:
            self.out += b"G" + struct.pack(">d", node)
        elif kind is Global:
            self.global_(node)
        elif kind is Storage:
            self.storage(node)
        elif kind is bytes:
            self.bytes(node)
        elif kind is ByteString:
            self.out += b"T" + struct.pack("<i", len(node.data)) + node.data
        else:
            raise PickleError(f"A value of type {kind.__name__} cannot be written.")

    def text(self, text: str) -> None:
        data = text.encode("utf-8", "surrogatepass")
        self.out += b"X" + struct.pack("<I", len(data)) + data

    def constant(self, text: str) -> None:
        """A text that is written many times: once in full, then from the memo."""
        if not self.recall(text):
            self.text(text)
            self.remember(text)

    def global_(self, node: Global) -> None:
        if self.recall(node):
            return
        if "." in node.name or self.protocol > 2:
            self.text(node.module)
            self.text(node.name)
            self.out += b"\x93"
        else:
            self.out += b"c" + f"{node.module}\n{node.name}\n".encode("utf-8", "surrogatepass")
        self.remember(node)

    def bytes(self, data: bytes) -> None:
        self.global_(Global("_codecs", "encode"))
        self.text(data.decode("latin1"))
        self.constant("latin1")
        self.out += b"\x86R"

    def storage(self, storage: Storage) -> None:
        """The persistent id ("storage", class, key, location, number of elements)."""
        typed = storage.dtype is not None and storage.dtype.storage is not None
        dtype = storage.dtype if typed and storage.dtype else UINT8
        self.out += b"("
        self.constant("storage")
        self.global_(Global("torch", str(dtype.storage)) if typed else Global("torch.storage", "UntypedStorage"))
        self.text(storage.key)
        self.constant(storage.device or "cpu")
        self.out += _integer(storage.nbytes // dtype.itemsize) + b"tQ"


def _items(pairs: list[tuple[Node, Node]]) -> list[Node]:
    return [_Done(b"("), *(part for pair in pairs for part in pair), _Done(b"u")] if pairs else []


def _integer(value: int) -> bytes:
    if 0 <= value < 256:
        return b"K" + bytes((value,))
    if 0 <= value < 65536:
        return b"M" + struct.pack("<H", value)
    if -(2**31) <= value < 2**31:
        return b"J" + struct.pack("<i", value)
    data = value.to_bytes(value.bit_length() // 8 + 1, "little", signed=True)
    return (b"\x8a" + bytes((len(data),)) if len(data) < 256 else b"\x8b" + struct.pack("<i", len(data))) + data


def _survey(root: Node) -> tuple[Counter[int], int]:
    """How often each container and entry is referenced, by id, and the protocol that the names need."""
    references: Counter[int] = Counter()
    protocol = 2
    seen: set[int] = set()
    todo: list[Node] = [root]
    while todo:
        node = todo.pop()
        kind = type(node)
        if kind is Global:
            if "." in node.name or "\n" in node.module + node.name or python3_name(*_pair(node)) != _pair(node):
                protocol = 4
            continue
        if kind not in CONTAINERS and kind is not Entry:
            continue
        references[id(node)] += 1
        if id(node) not in seen:
            seen.add(id(node))
            todo.extend(parts(node))
    return references, protocol


def _pair(node: Global) -> tuple[str, str]:
    return node.module, node.name


def _untyped(entry: Entry) -> bool:
    """Whether the dtype has to be said beside the storage, as torch does for the dtypes without a storage class."""
    return entry.dtype.storage is None or entry.storage.dtype is not entry.dtype


def _sizes(sizes: tuple[int, ...]) -> bytes:
    """A tuple of ints."""
    items = b"".join(map(_integer, sizes))
    return items + _TUPLES[len(sizes)] if len(sizes) < 4 else b"(" + items + b"t"
