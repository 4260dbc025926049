"""Write a tree as a pickle of protocol 2, the one that `torch.save` writes, with the opcodes that weights_only reads.

What is shared goes through the memo, containers before their contents, so that cycles close. One through a tuple or a call's
arguments closes as in pickle: the inner round makes the value, the outer drops its own. No recursion: a stack of what is left.
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Mapping
from typing import Any, TypeAlias, final

from ckpt_tools.errors import ConvertError, PickleError
from ckpt_tools.pickling.machine import ORDERED_DICT, python3_name
from ckpt_tools.tree.nodes import PLAIN, Append, ByteString, Dict, Entry, Extras, Global, List, Node, Object, SetItems, Storage
from ckpt_tools.tree.visit import parts

_SEVERAL = frozenset((Dict, List, Object, tuple, Entry))  # what may stand in several places
_MOST_TEXTS = 65_536  # that may come again, remembered at a time
_SETS = (Global("builtins", "set"), Global("builtins", "frozenset"))
_UNTYPED_STORAGE = Global("torch.storage", "UntypedStorage")
_BYTE_STORAGE = Global("torch", "ByteStorage")
_ENCODE = Global("_codecs", "encode")
_REBUILD_V2 = Global("torch._utils", "_rebuild_tensor_v2")
_REBUILD_V3 = Global("torch._utils", "_rebuild_tensor_v3")
_REBUILD_PARAMETER = Global("torch._utils", "_rebuild_parameter")
_REBUILD_PARAMETER_STATE = Global("torch._utils", "_rebuild_parameter_with_state")
_REBUILD_FROM_TYPE = Global("torch._tensor", "_rebuild_from_type_v2")
_NO_EXTRAS = Extras()
_LONG = 64  # bytes, or characters, of a value that goes through the memo
_KEY = "the key of a storage"  # which stands nowhere else in a template


def write_pickle(root: Node, survey: Survey | None = None, *, keys: Mapping[int, str] | None = None) -> bytes:
    """The pickle of a tree. Protocol 2; 4 only where a name needs it (a nested class, a module that 2 would rename)."""
    survey = Survey(root) if survey is None else survey
    try:
        return _Writer(survey.shared, survey.protocol, keys=keys).write(root)
    except _ComesRound:
        return _Writer(survey.seen | survey.shared, survey.protocol, rounds=2, keys=keys).write(root)


class _ComesRound(Exception):  # noqa: N818  not an error: everything has to go through the memo
    """A tuple or a call is needed while its own parts are written."""


@final
class _Done:
    """What remains to be emitted once the parts of a node are written: opcodes, then the memo."""

    __slots__ = ("node", "opcodes")

    def __init__(self, opcodes: bytes, node: Node = None) -> None:
        self.opcodes, self.node = opcodes, node


_Todo: TypeAlias = Node | _Done


class _Writer:
    def __init__(self, shared: set[int], protocol: int, rounds: int = 1, *, keys: Mapping[int, str] | None = None) -> None:
        self.keys = keys
        self.fixed_key: str | None = None  # of every storage, while a template is written
        self.persid = b"tQ" if keys is None else b"NtQ"  # torch-legacy: no view
        self.out = bytearray()
        self.templates: dict[Any, tuple[bytes, bytes]] = {}
        self.memo: dict[Any, int] = {}
        self.texts: set[str] = set()  # that have been written once
        self.shared, self.protocol, self.rounds = shared, protocol, rounds
        self.opened: dict[int, int] = {}

    def write(self, root: Node) -> bytes:
        self.out += bytes((0x80, self.protocol))
        self.write_all([root])
        self.out += b"."
        return bytes(self.out)

    def write_all(self, todo: list[_Todo]) -> None:
        while todo:
            node = todo.pop()
            encode = _ENCODERS.get(type(node))
            if encode is not None and id(node) not in self.shared:
                self.out += encode(node)
            elif type(node) is _Done:
                self.finish(node)
            elif type(node) is tuple and not node:
                self.out += b")"
            elif id(node) not in self.shared or not self.recall(id(node)):
                todo.extend(reversed(self.begin(node)))
                if id(node) in self.shared and not self.opened.get(id(node)):
                    self.remember(id(node))

    # --- the memo

    def remember(self, key: Any) -> None:
        if key not in self.memo:
            index = self.memo[key] = len(self.memo)
            self.out += b"q%c" % index if index < 256 else b"r" + U32(index)

    def recall(self, key: Any) -> bool:
        index = self.memo.get(key)
        if index is not None:
            self.out += b"h%c" % index if index < 256 else b"j" + U32(index)
        return index is not None

    def open(self, node: Node) -> None:
        """A node goes into the memo only once its parts are written, which may lead back to it."""
        self.opened[id(node)] = rounds = self.opened.get(id(node), 0) + 1
        if rounds > self.rounds:
            if self.rounds == 1:
                raise _ComesRound
            raise PickleError("The pickle holds an object that is made from itself; it cannot be written.")

    def finish(self, done: _Done) -> None:
        node = done.node
        self.out += done.opcodes
        if node is None:
            return
        self.opened[id(node)] -= 1
        if id(node) in self.memo:  # a cycle led back here, and the inner writing has built it: drop this one, as pickle does
            self.out += b"0"
            self.recall(id(node))
        elif id(node) in self.shared:
            self.remember(id(node))

    # --- what is written of a node at once; returned is what is to be written next, in order

    def begin(self, node: Node) -> list[_Todo]:
        if type(node) is Dict:
            return self.dict(node)
        if type(node) is Object:
            return self.object(node)
        if type(node) is Entry:
            return self.entry(node)
        if type(node) is List:
            self.out += b"]"
            return self.elements(node.items)
        if type(node) is tuple:
            self.open(node)
            self.out += b"" if len(node) < 4 else b"("
            return [*node, _Done(_TUPLES.get(len(node), b"t"), node)]
        self.leaf(node)
        return []

    def dict(self, node: Dict) -> list[_Todo]:
        if node.ordered:
            self.global_(ORDERED_DICT)
        self.out += b")R" if node.ordered else b"}"
        if id(node) in self.shared:
            self.remember(id(node))
        attributes: list[_Todo] = [] if node.attributes is None else [node.attributes, _Done(b"b")]
        if not node.items:
            return attributes
        self.out += b"("
        rest = node.items[self.names_and_entries(node.items) :]
        return [*(part for pair in rest for part in pair), _Done(b"u"), *attributes]

    def names_and_entries(self, pairs: list[tuple[Node, Node]]) -> int:
        """Write the first pairs at once, as long as they are names and plain entries; how many they are."""
        shared = self.shared
        for count, (name, entry) in enumerate(pairs):
            if type(name) is not str or type(entry) is not Entry or id(name) in shared or id(entry) in shared:
                return count
            if entry.extras is not None or not entry.dtype.in_torch:
                return count
            self.out += text_of(name)
            self.plain_entry(entry)
        return len(pairs)

    def object(self, node: Object) -> list[_Todo]:
        self.open(node)
        todo: list[_Todo] = [node.function]
        given = node.args[0] if type(node.args) is tuple and len(node.args) == 1 else None
        if node.call == "reduce" and node.function in _SETS and type(given) is List:  # which nothing but the set sees
            todo += [_Done(b"]"), *self.elements(given.items), _Done(b"\x85R", node)]
        elif node.call == "new":
            todo += [node.args, _Done(b"\x81", node)]
        elif node.call == "new_ex":
            # protocol 2 has no NEWOBJ_EX; copyreg's function does the same
            todo = [Global("copyreg", "__newobj_ex__"), (node.function, node.args, node.kwargs), _Done(b"R", node)]
        elif node.call == "reduce":
            todo += [node.args, _Done(b"R", node)]
        for step in node.steps:
            if type(step) is SetItems:
                todo += [_Done(b"("), *(part for pair in step.pairs for part in pair), _Done(b"u")]
            elif type(step) is Append:
                todo += self.elements(step.items)
            else:
                todo += [step.state, _Done(b"b")]
        return todo if node.call != "none" else [*todo, _Done(b"", node)]

    def entry(self, entry: Entry) -> list[_Todo]:
        if not entry.dtype.in_torch:
            raise ConvertError(f"torch has no dtype for {entry.dtype.name}, so a .pth cannot hold it.")
        if entry.extras is None:
            self.plain_entry(entry)
            return []
        self.open(entry)
        return [*self.calls(entry, entry.extras), _Done(b"", entry)]

    def plain_entry(self, entry: Entry) -> None:
        """A tensor or parameter without extras, emitted at once: checkpoints hold thousands, which differ in their keys."""
        storage = entry.storage
        like = (
            entry.dtype.name, entry.shape, entry.stride, entry.offset, entry.requires_grad, entry.kind,
            storage.dtype and storage.dtype.name, storage.device, storage.nbytes,
        )  # fmt: skip
        known = self.templates.get(like)
        if known is not None:
            key = self.key_of(storage).encode("utf-8", "surrogatepass")
            self.out += b"%bX%b%b%b" % (known[0], U32(len(key)), key, known[1])
            return
        self.write_all(self.calls(entry, _NO_EXTRAS)[::-1])
        # From now on its constants come from the memo: the next entry like this one is the same bytes, but for the key.
        out, self.out, self.fixed_key = self.out, bytearray(), _KEY
        self.write_all(self.calls(entry, _NO_EXTRAS)[::-1])
        before, _, after = bytes(self.out).partition(text_of(_KEY))
        self.out, self.fixed_key = out, None
        self.templates[like] = (before, after)

    def calls(self, entry: Entry, extras: Extras) -> list[_Todo]:
        """The calls that torch writes for a tensor, and for hooks, conj bits, subclasses and Python attributes."""
        parameter = entry.kind == "parameter"
        # whether the dtype has to be said beside the storage, as torch does for the dtypes without a storage class
        untyped = entry.dtype.storage is None or entry.storage.dtype is not entry.dtype
        hooks = Dict(ordered=True) if extras.hooks is None else extras.hooks
        grad = entry.requires_grad and not parameter
        own_hooks = Dict(ordered=True) if parameter else hooks
        args: list[_Todo] = [entry.storage, entry.offset, entry.shape, entry.stride, grad, own_hooks]
        args += [Global("torch", entry.dtype.name)] if untyped else []
        args += [extras.metadata] if extras.metadata is not None else []
        function, arguments = _REBUILD_V3 if untyped else _REBUILD_V2, [_Done(b"("), *args, _Done(b"t")]
        if parameter:
            inner: list[_Todo] = [function, *arguments, _Done(b"R"), entry.requires_grad, hooks]
            with_state = extras.state is not None and extras.python_type is None
            function = _REBUILD_PARAMETER_STATE if with_state else _REBUILD_PARAMETER
            arguments = [_Done(b"("), *inner, extras.state, _Done(b"t")] if with_state else [*inner, _Done(b"\x87")]
        if extras.python_type is None:
            return [function, *arguments, _Done(b"R")]
        return [_REBUILD_FROM_TYPE, _Done(b"("), function, extras.python_type, *arguments, extras.state, _Done(b"tR")]

    def elements(self, items: list[Node]) -> list[_Todo]:
        return [_Done(b"("), *items, _Done(b"e")] if items else []

    # --- nodes without parts

    def leaf(self, node: Node) -> None:
        if type(node) is str:
            self.text(node)
        elif type(node) in _ENCODERS:
            self.out += _ENCODERS[type(node)](node)
        elif type(node) is Global:
            self.global_(node)
        elif type(node) is Storage:
            self.storage(node)
        elif type(node) is bytes:
            self.global_(_ENCODE)
            self.out += text_of(node.decode("latin1"))
            self.constant("latin1")
            self.out += b"\x86R"
        elif type(node) is ByteString:
            self.out += b"T" + struct.pack("<i", len(node.data)) + node.data
        else:
            raise PickleError(f"A value of type {type(node).__name__} cannot be written.")

    def text(self, text: str) -> None:
        """A text as it is, from the third time on from the memo: what refers to one text a million times stays small."""
        if self.recall(text):
            return
        self.out += text_of(text)
        if text in self.texts:
            self.remember(text)
            return
        if len(self.texts) > _MOST_TEXTS:
            self.texts.clear()
        self.texts.add(text)

    def constant(self, text: str) -> None:
        """A text that is written many times: once in full, then from the memo."""
        if not self.recall(text):
            self.out += text_of(text)
            self.remember(text)

    def global_(self, node: Global) -> None:
        if self.recall(node):
            return
        if "." in node.name or self.protocol > 2:
            self.out += text_of(node.module) + text_of(node.name) + b"\x93"
        else:
            self.out += b"c" + f"{node.module}\n{node.name}\n".encode("utf-8", "surrogatepass")
        self.remember(node)

    def storage(self, storage: Storage) -> None:
        self.out += b"("
        self.constant("storage")
        dtype = storage.dtype if storage.dtype is not None and storage.dtype.storage is not None else None
        # torch saves an UntypedStorage in torch-legacy, and cannot load it; a ByteStorage holds the same bytes
        untyped = _UNTYPED_STORAGE if self.keys is None else _BYTE_STORAGE
        self.global_(Global("torch", f"{dtype.storage}") if dtype else untyped)
        self.out += text_of(self.key_of(storage) if self.fixed_key is None else self.fixed_key)
        self.constant(storage.device or "cpu")
        self.out += integer(storage.nbytes // (dtype.itemsize if dtype else 1)) + self.persid

    def key_of(self, storage: Storage) -> str:
        return storage.key if self.keys is None else self.keys[id(storage)]


# --- what has to be known of a tree before it is written


class Survey:
    def __init__(self, root: Node) -> None:
        self.seen: set[int] = set()
        self.shared: set[int] = set()
        self.protocol = 2
        found: dict[int, Storage] = {}
        seen, shared, todo = self.seen, self.shared, [root]
        while todo:
            node = todo.pop()
            if type(node) is Global:
                name = node.module, node.name
                if "." in node.name or "\n" in node.module + node.name or python3_name(*name) != name:
                    self.protocol = 4
            elif type(node) is Storage:
                found[id(node)] = node
            elif type(node) in _SEVERAL or is_long(node):
                if id(node) in seen:
                    shared.add(id(node))
                    continue
                seen.add(id(node))
                if type(node) is Entry and node.extras is None:  # the many
                    found[id(node.storage)] = node.storage
                else:
                    todo += [part for part in parts(node) if type(part) not in PLAIN or is_long(part)]
        self.storages = list(found.values())


def is_long(node: Node) -> bool:
    """Whether a value is so long that writing it twice would matter: a file may use one text a million times."""
    if type(node) is str or type(node) is bytes:
        return len(node) > _LONG
    return (type(node) is int and node.bit_length() > 8 * _LONG) or (type(node) is ByteString and len(node.data) > _LONG)


# --- values without parts

_TUPLES = {1: b"\x85", 2: b"\x86", 3: b"\x87"}
U32 = struct.Struct("<I").pack


def integer(value: int) -> bytes:
    if 0 <= value < 256:
        return b"K%c" % value
    if 0 <= value < 65536:
        return b"M" + struct.pack("<H", value)
    if -(2**31) <= value < 2**31:
        return b"J" + struct.pack("<i", value)
    data = value.to_bytes(value.bit_length() // 8 + 1, "little", signed=True)
    return (b"\x8a" + bytes((len(data),)) if len(data) < 256 else b"\x8b" + struct.pack("<i", len(data))) + data


def text_of(text: str) -> bytes:
    """Text, lone surrogates too."""
    data = text.encode("utf-8", "surrogatepass")
    return b"X%b%b" % (U32(len(data)), data)


_ENCODERS: dict[type, Callable[[Any], bytes]] = {
    int: integer,
    float: lambda number: b"G" + struct.pack(">d", number),
    bool: lambda value: b"\x88" if value else b"\x89",
    type(None): lambda _: b"N",
}
