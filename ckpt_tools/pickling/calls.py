"""Every call that a pickle would make, told without making one: also of pickles that break, and that no checkpoint has.

Whatever Python's own unpickler would go on with goes on (CPython's Modules/_pickle.c), so that no call behind it is missed.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Literal

from ckpt_tools.errors import CkptError, LimitError, PickleError
from ckpt_tools.pickling import verdict
from ckpt_tools.pickling.arrays_behind import array_behind
from ckpt_tools.pickling.machine import Machine, Malformed
from ckpt_tools.pickling.stream import WINDOW, Part, Pickles
from ckpt_tools.pickling.torch_objects import LOAD_FROM_BYTES, MAKERS, storage_dtype
from ckpt_tools.pickling.verdict import GETATTR, QUIET
from ckpt_tools.pickling.weights_only import named
from ckpt_tools.tree.dtypes import UINT8
from ckpt_tools.tree.nodes import PLAIN, ByteString, Dict, Global, List, Node, Object
from ckpt_tools.tree.visit import parts

_MOST_CALLS = 100  # of one pickle that are kept; a real payload is the first of its calls
_MOST_TOLD = 10_000  # the same ones counted each time
_WINDOW, _SHORT = 10_000_000, 4096  # of a part that is no longer: a pickle of it is read once; of one with small pickles

_MAKERS = {name: MAKERS[name] for name in named("collections:OrderedDict _codecs:encode builtins:bytes")}
# Opcodes that take nothing from the stack: a pickle begins with one.
_STARTS = frozenset(b"\x80\x95(])}NcPKMJIGFLSTUVXBC\x82\x83\x84\x88\x89\x8a\x8b\x8c\x8d\x8e\x8f\x96\x97")
_BYTEARRAY, _STR = Global("builtins", "bytearray"), Global("builtins", "str")
_STORAGE = Global("torch.storage", "UntypedStorage")
_MAY_HOLD_BYTES = frozenset((Dict, List, tuple, bytes, ByteString, Object))
_MODULE = ("module", b"module")
_KINDS = (*_MODULE, "storage", b"storage")
_CHARACTERS = 64  # of a name that count as a node
_COMPUTED, _PERSISTENT = Global("", "<a computed name>"), Global("", "<a persistent id>")


@dataclass(frozen=True, slots=True)
class Call:
    """One call that is to be treated as dangerous.

    Attributes:
        text: as Python would write it, literal arguments as decoded, escaped. function: what is called, `module.name`.
        offset: of the end of its opcode in the pickle. rating: "harmful" or "unknown". does: "runs", "changes" or "names".
    """

    text: str
    function: str
    offset: int
    rating: Literal["harmful", "unknown"]
    does: str = "runs"


@dataclass(slots=True)
class Pickle:
    """One pickle of a file, and what it would run."""

    start: int
    end: int = 0
    where: str = ""
    calls: list[Call] = field(default_factory=list)
    names: list[Global] = field(default_factory=list)
    nested: list[bytes] = field(default_factory=list)
    error: CkptError | None = None
    unread: str = ""
    two_ways: bool = False
    makes: bool = False
    has_arrays: bool = False


class Lister(Machine):
    """A reading of one pickle stream that lists calls. It makes no tensors, and goes on where Python's unpickler does."""

    strict = False

    def __init__(self, data: bytes, offset: int = 0, *, arrays: bool = True) -> None:
        super().__init__(data, _MAKERS, self._stand_in, offset, arrays=array_behind if arrays else None)
        self.kinds: dict[str, Node] = {}  # of storages, by their keys
        self.calls: dict[tuple[str, str], Call] = {}
        self.held: list[Node] = []  # by instances, whose classes may load it, and by torch
        self.told, self.makes = 0, False

    def name(self, module: Node, name: Node) -> Node:
        if type(name) is str and type(module) is str:
            return super().name(module, name)
        if self.arrays is None and not (_may_be_text(module) and _may_be_text(name)):  # numbers by chance
            raise Malformed("names a global by something that is not text")
        self.tell("runs", _COMPUTED, (module, name))
        return Object("none", _COMPUTED, (module, name))

    def note(self, does: str, what: Node, given: tuple[Node, ...]) -> Node:
        """Judge a call, an instance that is made or a change; getattr of a name gives the dotted name."""
        if does == "changes":
            if verdict.by_change(what, *given):
                self.tell(does, what.function if type(what) is Object else what, ())
            self._hold(verdict.made_of(what) if type(what) is Object else None, given)
            return None
        self.makes = True
        if does == "makes":
            self._hold(what, given)
            if verdict.by_instance(what):
                self.tell("runs", what, given)
            return None
        if type(what) is Global and what in QUIET:
            return None
        if verdict.by_call(what, given):
            self.tell(does, what, given)
        if what == LOAD_FROM_BYTES:
            self.held += given
        match given:
            case (Global(module, owner), str(name)) if what == GETATTR:
                self.left -= (len(owner) + len(name)) // _CHARACTERS
                return Global(module, f"{owner}.{name}")
        return None

    def _hold(self, cls: Node, given: Node) -> None:
        if type(cls) is Global and given and not verdict.is_data(cls):
            self.held.append(given)

    def _stand_in(self, pid: Node) -> Node:
        """What the program that loads the pickle keeps under an id: a storage, or the class of a model as it is given."""
        kind, *rest = pid if type(pid) is tuple and pid else (None,)
        if kind in _MODULE and rest:
            return rest[0]
        if type(kind) is Global or type(kind) is Object:
            return kind
        if type(pid) not in PLAIN and kind not in _KINDS:
            self.tell("runs", _PERSISTENT, (pid,))
        if len(rest) > 1 and type(rest[1]) is str:
            self.kinds[rest[1]] = rest[0]
        return Object("none", _STORAGE, ())

    # --- what was found

    def tell(self, does: str, what: Node, given: tuple[Node, ...]) -> None:
        if len(self.calls) < _MOST_CALLS and self.told < _MOST_TOLD:
            self.told += 1
            name = verdict.function_text(what)
            text = verdict.call_text(what, given) if does == "runs" else name
            is_known = any(type(part) is Global and verdict.does_harm(part) for part in (what, *given))
            self.calls.setdefault((does, text), Call(text, name, self.position, "harmful" if is_known else "unknown", does))

    def listed(self) -> list[Call]:
        """The calls, and globals that nothing harmless names."""
        called = {call.function for call in self.calls.values()}
        for name in self.globals:
            if verdict.by_name(name) and verdict.function_text(name) not in called:
                self.tell("names", name, ())
        return list(self.calls.values())

    def nested(self) -> list[bytes]:
        """The bytes in what instances and torch were given that may be pickles of their own."""
        found, seen, todo = dict[int, bytes](), set[int](), self.held[::-1]
        while todo:
            node = todo.pop()
            data = node.data if type(node) is ByteString else node
            if type(data) is bytes:
                if data and data[0] in _STARTS:
                    found[id(data)] = data
            elif id(node) not in seen and (type(node) is not Object or node.function == _BYTEARRAY):
                seen.add(id(node))
                todo += [part for part in reversed(parts(node)) if type(part) in _MAY_HOLD_BYTES]
        return list(found.values())


def _may_be_text(node: Node) -> bool:
    return type(node) is str or (type(node) is Object and (node.call != "new" or node.function == _STR))


# --- the pickles of a part


def list_pickles(part: Part, member: str = "", *, arrays: bool = True) -> Iterator[Pickle]:
    """The pickles of a part, one behind another from its start, and behind the raw bytes between them; `member` of a tar."""
    between, first = _Between(member), True
    window = _WINDOW if part.end - part.start <= _WINDOW else _SHORT if between.in_tar else WINDOW
    pickles = Pickles(part, window)
    while pickles.left:
        found, value, kinds = list_one(pickles, arrays)
        # whether it names something, or can be read, or loaders may come further than this reading did
        if not (first or found.names or found.error is None or found.two_ways or isinstance(found.error, LimitError)):
            return
        first = False
        if found.error is None:
            try:
                found.unread = "" if between.pass_over(pickles, value, kinds) else _IS_COMPUTED
            except CkptError as error:
                pickles.position = part.end  # it was cut off, or no loader comes so far
                found.unread = "" if isinstance(error, PickleError) else error.what
        yield found
        if found.error is not None or found.unread:
            return


def list_one(pickles: Pickles, arrays: bool = True) -> tuple[Pickle, Node, dict[str, Node]]:
    """The next pickle, its value, and the classes of the storages that it names."""
    found, value = Pickle(pickles.position), None
    try:
        _, value = pickles.load(lambda data, offset: Lister(data, offset, arrays=arrays))
    except CkptError as error:
        if pickles.machine is None:  # the file cannot be read any more
            raise
        found.error = error.with_traceback(None)
        error.__context__ = None  # the frames of either hold the machine, and this frame: a circle
    lister = pickles.machine
    assert isinstance(lister, Lister)
    found.end = pickles.position if found.error is None else pickles.anchor + lister.position
    found.calls, found.nested, found.names = lister.listed(), lister.nested(), list(lister.globals)
    found.two_ways, found.makes, found.has_arrays = lister.two_ways, lister.makes, lister.has_arrays
    return found, value, lister.kinds


# --- the raw bytes that torch reads between pickles: storages and the shapes of tensors. The next pickle stands behind them.
# Source: torch/serialization.py (`_legacy_load`), torch/csrc/serialization.cpp (`readFileRaw`).

MAGIC_NUMBER = 0x1950A86A20F9469CFC6C
_OBJECT, _KEYS = 3, 4  # which pickles of a torch-legacy stream those are, behind magic number, protocol, sys_info
_IS_COMPUTED = "a storage or tensor is described by something that is computed"


class _Between:
    """What stands between the pickles of a torch-legacy stream, or of the members `storages` and `tensors` of a torch-tar.

    In torch-legacy it is behind the list of keys: a magic number starts a stream, or a call that may give it. In a torch-tar a
    count comes first, and then for each a pickle of three parts: behind that of a storage, (key, location, class), stand its
    elements; behind that of a tensor, (key, storage, class), its sizes, strides and offset.
    """

    def __init__(self, member: str) -> None:
        self.are_storages, self.in_tar = member == "storages", member in ("storages", "tensors")
        self.number, self.computed, self.kinds = -1, False, dict[str, Node]()

    def pass_over(self, pickles: Pickles, value: Node, kinds: dict[str, Node]) -> bool:
        """Go on to the next pickle, behind one that held `value` and named storages; False where it is computed how far."""
        if value == MAGIC_NUMBER or (self.number < 0 and (self.in_tar or type(value) is Object)):
            self.number, self.computed = 0, type(value) is Object
            return True
        if self.in_tar:
            return self._pass_record(pickles, value)
        self.number += self.number >= 0
        if self.number == _OBJECT:
            self.kinds = kinds
        if self.number < _KEYS:
            return True
        self.number = -1
        for key in value.items if type(value) is List else [None]:
            if type(key) is not str or key not in self.kinds:
                return self.computed
            _skip_storage(pickles, self.kinds[key])
        return True

    def _pass_record(self, pickles: Pickles, value: Node) -> bool:
        record = tuple(value.items) if type(value) is List else value
        if self.are_storages and type(value) is List and all(type(part) is tuple for part in value.items):
            return True  # the views, at the end
        if type(record) is not tuple or len(record) != 3:
            return False
        if self.are_storages:
            _skip_storage(pickles, record[2])
        else:
            pickles.skip(8 * (2 * struct.unpack("<i", pickles.take(8)[:4])[0] + 1))
        return True


def _skip_storage(pickles: Pickles, kind: Node) -> None:
    pickles.skip(struct.unpack("<q", pickles.take(8))[0] * (storage_dtype(kind) or UINT8).itemsize)
