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
_SETS = ("builtins.set", "builtins.frozenset")
_MAKES_ANOTHER = frozenset(("data", "requires_grad", "real", "imag", "__class__", "_grad_fn"))
_VALUES = ("torch.Size", "torch.device", "torch.serialization._get_layout", "builtins.complex", "_codecs.encode")
_UNHASHABLE = (
    "builtins.bytearray",
    "builtins.set",
    "collections.OrderedDict",
    "collections.Counter",
    "collections.defaultdict",
)
_SHORT = 32  # bits: of a longer number Python's hash lets a file choose collisions
_MOST_REPEATED = 1000


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
        self.parts = 0  # of keys that are tuples and of states, each as often as it is met

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
            for step in node.steps:
                if type(step) is SetItems:
                    step.pairs = self.merge(step.pairs)

    def check_object(self, node: Object, args: tuple[Node, ...]) -> None:
        """Refuse what would hold something else than it was given: the elements of a tensor, the keys of a dict."""
        given = args[0] if args else ()
        if node.name in _WITH_STATE and len(args) == 4:
            self.check_state(args[3], None if node.name == _WITH_STATE[0] else args[1])
        elif node.name == "collections.Counter":
            if any(type(step) is Build for step in node.steps):
                raise PickleError("A Counter is given a state.")
            is_of_numbers = type(given) is Dict and PLAIN.issuperset(type(value) for _, value in given.items)
            if args and not (is_of_numbers and len(args) == 1):
                raise PickleError("A Counter is made of something that is not a dict of numbers.")
        elif node.name in _SETS and node.call == "reduce":
            elements = given.items if type(given) is List else given
            if len(args) > 1 or not isinstance(elements, list | tuple):
                raise PickleError("A set is made of something that is not a list.")
            if len(set(map(self.identity, elements))) < len(elements):
                raise PickleError("A set is given an element twice.")

    def check_state(self, state: Node, cls: Node, entry: Entry | None = None) -> None:
        """Refuse what sets more of a tensor than attributes that torch has none of (`torch._utils._set_obj_state`)."""
        is_known = cls is None or (type(cls) is Global and cls in ALLOWED)
        for part in state if type(state) is tuple and len(state) == 2 else (state,):
            keys = _keys_of(part)
            self.count(len(keys))
            is_odd = is_known and not ((part is None or type(part) is Dict) and all(type(key) is str for key in keys))
            if is_odd or any(type(key) is str and key in _MAKES_ANOTHER and not _is_own(part, key, entry) for key in keys):
                raise TensorError("The state of a tensor sets more than attributes of its own, or is not known.")

    def count(self, parts: int) -> None:
        self.parts += parts
        limits.NODES.check(self.parts // 4, "The pickle has dict keys of more parts than any checkpoint.")

    def merge(self, pairs: list[Pair]) -> list[Pair]:
        """The pairs with each key once, at its first place with its last value."""
        keys = [key for key, _ in pairs]
        if len(keys) == 1 and type(keys[0]) is Object and keys[0].name in _VALUES:
            return pairs  # nothing that it could be equal to
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
                if len(self.repeated) < _MOST_REPEATED:
                    self.repeated.append(str(key) if type(key) is str else type(key).__name__)
                key = last[identity][0]
            last[identity] = (key, value)
        return list(last.values())

    def identity(self, key: Node, depth: int = 0) -> Hashable:
        """The stand-in of a key; of a number its digits, since Python's hash lets a file choose collisions of long ones."""
        if type(key) is tuple:
            limits.check_depth(depth, "The pickle uses tuples nested too deep as a dict key.")
            self.count(len(key))
            return ("t", *[self.identity(part, depth + 1) for part in key])
        if type(key) is int or type(key) is bool or type(key) is float:
            if key != key:
                return "id", id(key)
            return "n", key.hex() if type(key) is float and not key.is_integer() else hex(int(key))
        if type(key) is Object and key.name in _VALUES:
            return self.value(key, depth)
        if type(key) is Dict or type(key) is List or (type(key) is Object and key.name in _UNHASHABLE):
            raise PickleError("The pickle uses a value as a dict key that Python cannot hash.")
        return ("id", id(key)) if type(key) is Object or type(key) is Entry else key

    def value(self, key: Object, depth: int) -> Hashable:
        """The stand-in of what a call makes, where Python compares that by value."""
        args = key.args if type(key.args) is tuple and key.call == "reduce" and not key.steps else (None,)
        kinds, only = [type(arg) for arg in args], args[0] if args else ()
        if key.name == "torch.Size" and len(args) < 2:
            sizes = tuple(only.items) if type(only) is List else only
            if type(sizes) is tuple and all(type(size) in (int, bool) for size in sizes):
                return self.identity(sizes, depth + 1)
        if key.name in ("torch.device", "torch.serialization._get_layout") and kinds in ([str], [str, int]):
            return key.name, ":".join(map(str, args))
        if key.name == "builtins.complex" and kinds == [float, float]:
            real, imaginary = cast("tuple[float, float]", args)
            return ("c", (real + 0.0).hex(), imaginary.hex()) if imaginary else self.identity(real, depth)
        raise PickleError(f"The pickle uses a {key.name} as a dict key, which may be equal to another one.")


def _is_own(state: Node, name: str, entry: Entry | None) -> bool:
    """Whether an attribute that torch has is what it was before: bitsandbytes' weights set their own data once more."""
    value = state.get(name) if type(state) is Dict and entry is not None else None
    if name != "data" or type(value) is not Entry or entry is None:
        return name == "requires_grad" and entry is not None and value is entry.requires_grad
    own, other = ((view.storage.key, view.dtype, view.shape, view.stride, view.offset) for view in (entry, value))
    return own == other


def _keys_of(made: Node) -> list[Node]:
    if type(made) is Object:
        dicts = [arg for arg in made.args if type(arg) is Dict] if type(made.args) is tuple else []
        return [key for key, _ in made.pairs] + [key for arg in dicts for key, _ in arg.items]
    return [key for key, _ in made.items] if type(made) is Dict else []
