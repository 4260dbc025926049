"""What a tree read from a pickle must satisfy before anyone uses it: depth, hashable keys, each key once."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Hashable, Sequence
from typing import cast

from ckpt_tools import limits
from ckpt_tools.errors import PickleError, TensorError
from ckpt_tools.pickling.weights_only import ALLOWED
from ckpt_tools.tree.nodes import PLAIN, Build, Dict, Entry, Global, List, Node, Object, Pair, SetItems
from ckpt_tools.tree.visit import parts

_WITH_STATE = (
    "torch._utils._rebuild_parameter_with_state", "torch._tensor._rebuild_from_type_v2", "torch.tensor._rebuild_from_type_v2",
)  # fmt: skip
_CLASS, _STATE = 1, 3  # of their arguments; the first has no class among them
_SETS = ("builtins.set", "builtins.frozenset")
_MAKES_ANOTHER = frozenset(("data", "requires_grad", "real", "imag", "__class__", "_grad_fn"))
_VALUES = ("torch.Size", "torch.device", "torch.serialization._get_layout", "builtins.complex", "_codecs.encode")
UNHASHABLE = ("builtins.bytearray", "builtins.set", "collections.OrderedDict", "collections.Counter", "collections.defaultdict")


def validate(root: Node) -> list[str]:
    """Check the tree and merge keys that are set twice (the last value wins, as in Python)."""
    keys = _Keys()
    seen: set[int] = set()
    level: Sequence[Node] = [root]
    depth = 0
    while level:
        depth += 1
        limits.check_depth(depth, "The pickle is nested too deep.", limits.DEPTH)
        below: list[Node] = []
        for node in level:
            if type(node) in PLAIN or (type(node) is Entry and node.extras is None) or id(node) in seen:
                continue
            seen.add(id(node))
            keys.check(node)
            inner = parts(node)
            if not PLAIN.issuperset(map(type, inner)):
                below.extend(inner)
        level = below
    return keys.repeated


class _Keys:
    """The keys of all dicts of one tree, as stand-ins that are equal when Python holds the keys equal."""

    def __init__(self) -> None:
        self.repeated: list[str] = []
        self.numbers: dict[tuple[Hashable, ...], int] = {}  # the parts of a tuple -> a number that stands for it
        self.tuples: dict[int, tuple[Hashable, int, int]] = {}  # by id: stand-in, parts that Python would hash, depth
        self.parts = 0
        self.states: dict[int, Node] = {}  # by id

    def check(self, node: Node) -> None:
        if type(node) is Dict:
            node.items = self.merge(node.items)
            for name, _ in node.attributes.items if node.attributes is not None else ():
                if type(name) is str and not name.startswith("__") and hasattr(OrderedDict, name):
                    raise PickleError(f"An OrderedDict is given an attribute {name!r}, which hides its method.")
        elif type(node) is Entry and node.extras is not None:
            self.check_state(node.extras.state, node.extras.python_type, node)
        elif type(node) is Object:
            self.check_object(node, node.args if type(node.args) is tuple else (node.args,))

    def check_object(self, node: Object, args: tuple[Node, ...]) -> None:
        if node.name in _WITH_STATE and len(args) == _STATE + 1:
            self.check_state(args[_STATE], None if node.name == _WITH_STATE[0] else args[_CLASS])
        elif node.name == "collections.Counter":
            _check_counter(node, args)
        elif node.name in _SETS and node.call == "reduce":
            self.check_elements(args)
        for step in node.steps:
            if type(step) is SetItems:
                step.pairs = self.merge(step.pairs)

    def check_state(self, state: Node, cls: Node, entry: Entry | None = None) -> None:
        """Refuse what sets more of a tensor than attributes that torch has none of (`torch._utils._set_obj_state`)."""
        is_known = cls is None or cls in ALLOWED
        for part in state if type(state) is tuple and len(state) == 2 else (state,):
            names = [] if id(part) in self.states else [key for key in _keys_of(part) if not _says_the_same(part, key, entry)]
            self.states[id(part)] = part
            is_dict = part is None or type(part) is Dict or (type(part) is Object and part.name == "collections.Counter")
            is_odd = is_known and not (is_dict and all(type(key) is str for key in names))
            if is_odd or any(type(key) is str and key in _MAKES_ANOTHER for key in names):
                raise TensorError("The state of a tensor sets more than attributes of its own, or is not known.")

    def check_elements(self, args: tuple[Node, ...]) -> None:
        """Refuse a set of anything but different elements in a list or tuple: of a tensor or a dict it would hold the parts."""
        given = args[0] if args else ()
        if len(args) > 1 or type(given) not in (List, tuple):
            raise PickleError("A set is made of something that is not a list.")
        elements = given.items if type(given) is List else cast("tuple[Node, ...]", given)
        if len(set(map(self.identity, elements))) < len(elements):
            raise PickleError("A set is given an element twice.")

    def merge(self, pairs: list[Pair]) -> list[Pair]:
        """The pairs with each key once, at its first place with its last value."""
        if len(pairs) == 1 and type(pairs[0][0]) is Object and pairs[0][0].name in _VALUES:
            return pairs  # nothing that it could be equal to
        keys = [key for key, _ in pairs]
        kinds = set(map(type, keys))
        is_short = kinds == {int} and max(map(int.bit_length, cast("list[int]", keys))) < _SHORT
        identities = keys if is_short or kinds == {str} else list(map(self.identity, keys))
        if len(set(identities)) == len(pairs):
            return pairs
        last: dict[Hashable, Pair] = {}
        for identity, (key, value) in zip(identities, pairs, strict=True):
            if identity in last:
                if type(key) is Global and "Storage" in key.name:
                    raise PickleError("The pickle uses a class of storages as a dict key twice: one key or two.")
                if len(self.repeated) < 1000:
                    self.repeated.append(str(key) if type(key) is str else type(key).__name__)
                key = last[identity][0]
            last[identity] = (key, value)
        return list(last.values())

    def identity(self, key: Node, depth: int = 0) -> Hashable:
        """The stand-in of a key; never a long number, of which Python's hash lets a file choose collisions."""
        if type(key) is tuple:
            return self._tuple(key, depth)
        if type(key) in (Dict, List) or (type(key) is Object and key.name in UNHASHABLE):
            raise PickleError("The pickle uses a value as a dict key that Python cannot hash.")
        if type(key) is float:
            if key != key:
                return "id", id(key)
            if not key.is_integer():
                return "f", key.hex()
            key = int(key)
        if type(key) is int or type(key) is bool:
            if key.bit_length() < _SHORT and not depth:
                return int(key)
            return "n", int(key).to_bytes(key.bit_length() // 8 + 1, "little", signed=True)
        if type(key) is Object and key.name in _VALUES:
            return self._value(key, depth)
        return ("id", id(key)) if type(key) in (Object, Entry) else key

    def _tuple(self, key: tuple[Node, ...], depth: int) -> Hashable:
        """A number for the stand-ins of all parts: tuples may hold one another a million times."""
        stand_in, parts, levels = self.tuples.get(id(key), (None, len(key), 0))
        limits.check_depth(depth + levels, "The pickle uses tuples nested too deep as a dict key.")
        before = self.parts
        self.parts += parts
        limits.NODES.check(self.parts // 4, "The pickle has dict keys of more parts than any checkpoint.")
        if stand_in is None:
            inner = tuple([self.identity(part, depth + 1) for part in key])
            stand_in = ("t", self.numbers.setdefault(inner, len(self.numbers)))
            levels = 1 + max([self.tuples[id(part)][2] for part in key if type(part) is tuple], default=0)
            self.tuples[id(key)] = stand_in, self.parts - before, levels
        return stand_in

    def _value(self, key: Object, depth: int) -> Hashable:
        """The stand-in of what a call makes, where Python compares that by value."""
        args = key.args if type(key.args) is tuple else ()
        only = args[0] if len(args) == 1 else None
        if key.call == "reduce" and not key.steps:
            sizes = only if type(only) is tuple else tuple(only.items) if type(only) is List else args
            if key.name == "torch.Size" and all(type(size) in (int, bool) for size in sizes):
                return self.identity(sizes, depth + 1)
            if key.name in ("torch.device", "torch.serialization._get_layout") and type(only) is str:
                return key.name, only
            if key.name == "builtins.complex" and len(args) == 2 and all(type(arg) is float for arg in args):
                real, imaginary = cast("tuple[float, float]", args)
                return ("c", (real + 0.0).hex(), imaginary.hex()) if imaginary else self.identity(real, depth)
        raise PickleError(f"The pickle uses a {key.name} as a dict key, which may be equal to another one.")


_SHORT = 32  # bits: of a longer number Python's hash lets a file choose collisions


def _says_the_same(state: Node, name: Node, entry: Entry | None) -> bool:
    """Whether an attribute that torch has is what it was before: bitsandbytes' weights set their own data once more."""
    value = state.get(name) if type(state) is Dict and type(name) is str else None
    if entry is None or name not in ("data", "requires_grad"):
        return False
    if type(value) is not Entry:
        return name == "requires_grad" and value is entry.requires_grad
    same = (value.storage.key, value.dtype, value.shape, value.stride, value.offset)
    return name == "data" and same == (entry.storage.key, entry.dtype, entry.shape, entry.stride, entry.offset)


def _check_counter(node: Object, given: tuple[Node, ...]) -> None:
    """Refuse a Counter that is made of anything but a dict of plain values: what it holds, and no arguments, or their order."""
    if any(type(step) is Build for step in node.steps):
        raise PickleError("A Counter is given a state.")
    made = given[0] if len(given) == 1 else None
    if given and not (type(made) is Dict and PLAIN.issuperset(type(value) for _, value in made.items)):
        raise PickleError("A Counter is made of something that is not a dict of numbers.")


def _keys_of(made: Node) -> list[Node]:
    if type(made) is Dict:
        return [key for key, _ in made.items]
    if type(made) is not Object:
        return []
    args = made.args if type(made.args) is tuple else ()
    return [key for key, _ in made.pairs] + [key for arg in args if type(arg) is Dict for key, _ in arg.items]
