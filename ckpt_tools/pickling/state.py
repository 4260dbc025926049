"""The state of a pickle machine: stack, memo, budget, and the steps that opcodes are made of. `reader.Machine` runs them."""

from __future__ import annotations

import _compat_pickle
from collections.abc import Callable, Mapping
from struct import Struct
from typing import Any, TypeAlias

from ckpt_tools import limits
from ckpt_tools.errors import TWO_FILES, PickleError
from ckpt_tools.pickling.weights_only import ALLOWED, BUILT, READS_AT_ONCE
from ckpt_tools.tree.nodes import Build, ByteString, Dict, Entry, Global, List, Node, Object

Maker: TypeAlias = Callable[[tuple[Node, ...]], Node]
PersistentLoad: TypeAlias = Callable[[Node], Node]

REBUILD = Global("torch._utils", "_rebuild_tensor_v2")
ORDERED_DICT = Global("collections", "OrderedDict")
COST_OF_GLOBAL, BYTES_PER_NODE, LONG_TEXT, BYTES_OF_SHARED_TEXT, FREE_LIGHT = 6, 6, 1024, 16, 700_000
_UNNAMED = Global("", "")  # by identity nothing on the stack
_BY_TEXT = {str(name): name for name in ALLOWED}  # as torch's weights_only looks them up
_NUMBER = frozenset(Global(f"numpy.{core}.multiarray", "scalar") for core in ("core", "_core"))
_ARRAY = frozenset(Global(f"numpy.{core}.multiarray", "_reconstruct") for core in ("core", "_core"))
_SHORT = frozenset((type(None), bool, int, float))  # what costs nothing when it is used again
COST_OF_BYTES, COST_OF_BYTE_STRING = 2, 3  # containers; as much as what is written for them
# What one more place costs: a tensor has a row in every report.
_COST_OF_PLACES = {Entry: 4, Object: 2, Dict: 4, bytes: COST_OF_BYTES, ByteString: COST_OF_BYTE_STRING}
_MOST_ARGUMENTS = 16  # more than anything takes that reads its arguments at once


class State:
    """Where one reading of one pickle stream stands: its stack, memo and budget, and what opcodes do to them."""

    def __init__(
        self,
        data: bytes,
        makers: Mapping[Global, Maker],
        persistent_load: PersistentLoad,
        offset: int = 0,
        *,
        fast: bool = True,
    ) -> None:
        self.data, self.position, self.end = data, offset, len(data)
        self.limit: int = self.end
        self.frame = 0
        self.makers, self.persistent_load, self.fused = makers, persistent_load, fast
        self.stack: list[Node] = []
        self.marks: list[list[Node]] = []
        self.memo: list[Node] = []
        self.sizes: dict[bytes, tuple[int, ...]] = {}
        self.far_memo: dict[int, Node] = {}
        # what EMPTY_SET made, by id, kept so that the id stays its own, with its elements
        self.sets: dict[int, tuple[Node, List]] = {}
        # lists and dicts that were read at once by a call, with their lengths then; states of objects likewise
        self.given: list[tuple[List | Dict, int]] = []
        self.states: list[tuple[Build, Dict, int]] = []
        # the records of two globals that every tensor names, as the fused path knows them again
        self.rebuild = self.ordered_dict = _UNNAMED
        self.protocol = self.light = 0
        self.globals: dict[Global, None] = {}
        self.unusual: dict[str, None] = {}
        self.places: dict[int, tuple[int, bytes]] = {}
        self.cut, self.needed, self.two_ways = False, 0, False
        self.two_names: Global | None = None
        self.start, self.shared = offset, limits.budget(self.end - offset)
        self.budget = self.shared.room(limits.NODES)
        self.encoded = 0  # bytes that were pickled as text

    def error(self, what: str) -> PickleError:
        """A PickleError at the current position."""
        at = min(self.position, self.end)
        return PickleError(f"The pickle is malformed: the opcode before offset {at} {what}.")

    def short(self, what: str, needed: int = 0) -> PickleError:
        """A PickleError where bytes are missing: those of the frame, or those behind `data`."""
        self.cut, self.needed = self.limit == self.end, needed
        return self.error(what)

    def go_beyond(self, what: str, needed: int) -> None:
        """Whether an opcode may end behind its frame: never, since readers differ in what they take then."""
        raise self.short(what, needed)

    def spend(self, count: int = 1) -> None:
        """Count containers against the budget."""
        self.budget -= count
        if self.budget < 0:
            raise limits.NODES.error("The pickle makes more objects than a checkpoint of its size can hold.")

    def spend_lightly(self, count: int = 1) -> None:
        """Count texts, and what is taken from the memo by an opcode of its own: 700,000 of a file are free."""
        light = self.light = self.light + count
        if light > FREE_LIGHT:
            self.spend(min(count, light - FREE_LIGHT))

    def take(self, length: int) -> bytes:
        """The next `length` bytes of the stream."""
        start = self.position
        if length < 0 or length > self.limit - start:
            self.go_beyond(f"claims {length} bytes where {self.limit - start} are left", start + length)
        self.position = start + length
        return self.data[start : start + length]

    def number(self, form: Struct) -> Any:
        """The next number in this form."""
        (value,) = form.unpack_from(self.data, self.position)
        self.position += form.size
        return value

    def line(self) -> bytes:
        """Bytes up to the next newline, which is taken too."""
        stop = self.data.find(b"\n", self.position, self.limit)
        if stop < 0:
            raise self.short("needs a line that does not end")
        line = self.data[self.position : stop]
        self.position = stop + 1
        return line

    def text_line(self) -> str:
        """A line as text."""
        return self.text(self.line())

    def text(self, data: bytes) -> str:
        """UTF-8 with lone surrogates, as pickle writes it."""
        self.spend_lightly()
        try:
            return data.decode("utf-8", "surrogatepass")
        except UnicodeDecodeError:
            raise self.error("holds text that is not UTF-8") from None

    def pop_mark(self) -> list[Node]:
        """What was pushed since the last MARK."""
        items, self.stack = self.stack, self.marks.pop()
        return items

    def remember(self, index: int) -> None:
        """Memoize the top of the stack. Real streams count up; any other index costs one dict slot, never a list."""
        top = self.stack[-1]
        if index == len(self.memo):
            self.memo.append(top)
            if self.far_memo:
                self.far_memo.pop(index, None)  # written there before, when the memo was shorter
        elif 0 <= index < len(self.memo):
            self.memo[index] = top
        elif index < 0:
            raise self.error("memoizes under a negative index")
        else:
            self.spend()
            self.far_memo[index] = top

    def recall(self, index: int) -> None:
        """Push a memoized value."""
        value = self.memo[index] if 0 <= index < len(self.memo) else self.memoized(index)
        light = self.light = self.light + 1  # as `spend_lightly`, in line: pickles are full of these
        if light > FREE_LIGHT:
            self.spend()
        if type(value) not in _SHORT and (type(value) is not str or len(value) > LONG_TEXT):
            self.spend_on_sharing(value)
        self.stack.append(value)

    def recall_row(self, indices: bytes) -> None:
        """Push memoized values, one for each index: a row of them takes little time, and costs only what sharing them does."""
        values = {index: self.memoized(index) for index in set(indices)}
        for index, value in values.items():
            if type(value) not in _SHORT:
                self.spend_on_sharing(value, indices.count(index))
        self.stack.extend(map(values.__getitem__, indices))

    def memoized(self, index: int) -> Node:
        """What is in the memo."""
        if 0 <= index < len(self.memo):
            return self.memo[index]
        if index in self.far_memo:
            return self.far_memo[index]
        raise self.error(f"reads memo {index}, which was never written")

    def spend_on_sharing(self, value: Node, times: int = 1) -> None:
        """Count what is used again: whoever looks for tensors and objects looks at every place, and writes it down."""
        length = 0
        if type(value) is str:
            length = len(value)
        elif type(value) is Global:
            length = len(value.name) + len(value.module)
            self.spend(COST_OF_GLOBAL * times)
        else:
            self.spend(_COST_OF_PLACES.get(type(value), 1) * times)
            if type(value) is tuple and any(type(part) is Global for part in value[:2]):
                self.spend(COST_OF_GLOBAL * times)
        if length > LONG_TEXT:
            self.spend(length // BYTES_OF_SHARED_TEXT * times)

    def give_back(self, part: int = 1) -> None:
        """Count less for a global that a tensor named, or half for a number: real checkpoints have many of those."""
        self.budget += COST_OF_GLOBAL // part

    def _cost_of_bytes(self, made: bytes) -> int:
        """What bytes that were pickled as text cost beyond their tuple and their call, which is COST_OF_BYTES."""
        self.encoded += len(made)
        again = max(0, self.encoded - (self.position - self.start))
        self.encoded -= again
        return again // BYTES_PER_NODE

    def name_global(self, module: str, name: str) -> None:
        """Push the inert record of a global."""
        taken = Global(*python3_name(module, name))
        found = taken if self.protocol < 3 else Global(module, name)
        if _BY_TEXT.get(str(taken), found) != found:
            self.two_names = found
        self.spend(COST_OF_GLOBAL)
        if found == REBUILD and found in self.makers:
            self.rebuild = found
        elif found == ORDERED_DICT:
            self.ordered_dict = found
        self.globals[found] = None
        self.stack.append(found)

    def check_callable(self, function: Node) -> None:
        """Raise PickleError where what is called is data: Python goes no further than to say so."""
        if type(function) is not Global and type(function) is not Object:
            raise self.error("calls a value, which cannot be called")

    def make(self, function: Node, args: tuple[Node, ...]) -> None:
        """Push what `function(*args)` would make: by a maker where the global is known, else an inert Object."""
        self.spend()
        self.check_callable(function)
        if type(function) is not Global:
            self.unusual["call of something that is not a global"] = None
        elif maker := self.makers.get(function):
            made = maker(args)
            if made is not None:
                self.give_back()
                self.spend(_cost(made) if type(made) is not bytes else self._cost_of_bytes(made))
                self.stack.append(made)
                if type(made) is Entry and made.extras is not None:
                    self.note_given(args)
                return
        self.stack.append(Object("reduce", function, args))
        if type(function) is Global:
            if function in READS_AT_ONCE:
                self.note_given(args)
            if function in _NUMBER or (function in _ARRAY and args and type(args[0]) is Global):
                self.give_back(2)

    def note_given(self, args: tuple[Node, ...]) -> None:
        """Remember the lists and dicts in the arguments of what reads them at once: its result has nothing that comes later."""
        for arg in args if len(args) <= _MOST_ARGUMENTS else ():
            if type(arg) is List or type(arg) is Dict:
                self.spend()
                self.given.append((arg, len(arg.items)))
            elif type(arg) is tuple:
                self.note_given(arg)

    def build(self, target: Object, state: Node) -> None:
        """Set the state of an object. Python reads it at once: a dict that is given more later gives the object no more."""
        step = Build(state)
        target.steps.append(step)
        if type(state) is Dict:
            self.states.append((step, state, len(state.items)))
        elif type(state) is tuple and (_is_pair_of_dicts(state) or _is_of(target, BUILT)):
            self.note_given(state)

    def settle(self) -> None:
        """At the end, leave out of states what came later."""
        if self.two_names is not None:
            raise PickleError(
                f"The pickle names {self.two_names.name!r} of {self.two_names.module!r}: weights_only takes it for another.",
                why=TWO_FILES,
            )
        if self.stack:
            raise PickleError("The pickle ends with more than one value on its stack, and gives the last.")
        if any(len(node.items) != length for node, length in self.given):
            raise PickleError("The pickle changes a list or dict after a call has read it.")
        for step, state, length in self.states:
            if len(state.items) != length:
                self.spend(length)
                step.state = Dict(state.items[:length], ordered=state.ordered)


def _is_of(node: Object, functions: frozenset[Global]) -> bool:
    return type(node.function) is Global and node.function in functions


def _is_pair_of_dicts(state: tuple[Node, ...]) -> bool:
    """Whether a state is that of an object with slots."""
    return len(state) == 2 and {type(part) for part in state} <= {Dict, type(None)}


def _cost(made: Node) -> int:
    """What a maker's result costs beyond one container. The same arguments, memoized, can be given again and again."""
    if type(made) is Entry:
        return len(made.shape) if len(made.shape) > 16 else 1
    return len(made.items) // 2 if type(made) is Dict else 0


def python3_name(module: str, name: str) -> tuple[str, str]:
    """The Python 3 name of a Python 2 global, as pickle and torch map it for protocols below 3."""
    if (module, name) in _compat_pickle.NAME_MAPPING:
        return _compat_pickle.NAME_MAPPING[module, name]
    return _compat_pickle.IMPORT_MAPPING.get(module, module), name


class Stop(Exception):  # noqa: N818  not an error: how the loop ends
    def __init__(self, value: Node) -> None:
        self.value = value


Handler: TypeAlias = Callable[[State], None]


class Opcodes:
    """Collects what the opcodes of one kind do, by decorating: byte -> handler."""

    def __init__(self) -> None:
        self.handlers: dict[int, Handler] = {}

    def __call__(self, code: bytes, *, unusual: str = "") -> Callable[[Handler], Handler]:
        """Enter a handler; `unusual` names an opcode that weights_only refuses."""

        def enter(handler: Handler) -> Handler:
            def noting(machine: State) -> None:
                machine.unusual[f"opcode {unusual}"] = None
                handler(machine)

            self.handlers[code[0]] = noting if unusual else handler
            return handler

        return enter
