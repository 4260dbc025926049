"""Objects made plain: data that `torch.load(weights_only=True)` accepts, without their classes and without running them."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable
from dataclasses import replace
from itertools import count

from ckpt_tools import limits
from ckpt_tools.edit.objects.known import WITH_OUTER, ObjectFate, is_known
from ckpt_tools.edit.objects.values import (
    Key,
    as_array,
    is_array,
    is_of_numbers,
    key_for_2_4,
    plain_for_2_4,
    plain_object,
    plain_subclass,
)
from ckpt_tools.pickling.arrays_behind import WRAPPER
from ckpt_tools.pickling.old_tensors import VARIABLE
from ckpt_tools.pickling.torch_objects import LOAD_FROM_BYTES, unusual_tensor
from ckpt_tools.pickling.weights_only import ALLOWED, ALLOWED_2_4
from ckpt_tools.tree import exchange, visit
from ckpt_tools.tree import nodes as tree
from ckpt_tools.tree.dtypes import DTYPES
from ckpt_tools.tree.exchange import DROP, Drop, Swap
from ckpt_tools.tree.nodes import ByteString, Dict, Entry, Global, List, Node, Object, Pair, SetItems, Where

_SETS = ("builtins.set", "builtins.frozenset")
_SIMPLE = frozenset((type(None), bool, int, float, str, bytes))
_HASHABLE = ("builtins.complex", "torch.Size", "torch.device")
_MAX_DEPTH = 100
_BYTES_OF_PART = 128  # each is made plain, compared and hashed


class _Keys:
    """The keys of dicts and the elements of sets made plain, in place: `changed` has those that were exchanged."""

    def __init__(self, root: Node, plain: Swap, simple: frozenset[type]) -> None:
        self.plain, self.simple = plain, simple
        self.changed: list[tuple[Node, Node]] = []
        self.parts = 0
        for node in list(visit.reachable(root)):
            if type(node) is Dict:
                self.edit(node.items)
            elif type(node) is Object:
                for step in node.steps:
                    if type(step) is SetItems:
                        self.edit(step.pairs)
                if node.name in _SETS:
                    pairs: list[Pair] = [(item, None) for item in _elements(node)]
                    self.edit(pairs)
                    node.args = (List([key for key, _ in pairs]),)

    def edit(self, pairs: list[Pair]) -> None:
        """The keys of one dict. Simple keys stay; whatever comes to be beside them has to differ."""
        if self.simple.issuperset(type(key) for key, _ in pairs):
            return
        taken = {_identity(key) for key, _ in pairs if type(key) in self.simple}
        numbers: dict[str, int] = {}
        for index, (key, value) in enumerate(pairs):
            if type(key) in self.simple:
                continue
            new = self.key(key, 0)
            if new is DROP or _identity(new) in taken:
                new = _free_name(key, taken, numbers)
                self.changed.append((key, new))
            taken.add(_identity(new))
            pairs[index] = (new, value)

    def key(self, node: Node, depth: int) -> Node | Drop:
        """The plain form of a key; DROP where none can be hashed."""
        if type(node) is tuple:
            return self.tuple(node, depth)
        if type(node) not in (Object, Global, bytes):
            return DROP if type(node) in (Dict, List) else node
        new = _elements(node) if type(node) is Object and node.name == "builtins.frozenset" else self.plain(node)
        new = self.tuple(new, depth) if type(new) is tuple else new
        if new is DROP or type(new) in (Dict, List) or (type(new) is Object and new.name not in _HASHABLE):
            return DROP
        if new is not node:
            self.changed.append((node, new))
        return new

    def tuple(self, node: tuple[Node, ...], depth: int) -> Node | Drop:
        if depth > _MAX_DEPTH:
            return DROP
        self.parts += len(node)  # of a set in sets that each hold the next one twice there is no end
        limits.MEMORY.check(self.parts * _BYTES_OF_PART, "The checkpoint has dict keys of more parts than any other.")
        parts = [self.key(part, depth + 1) for part in node]
        hashable = tuple(part for part in parts if part is not DROP)
        return hashable if len(hashable) == len(parts) else DROP


def _elements(node: Object) -> tuple[Node, ...]:
    args = node.args
    return tuple(args[0].items) if type(args) is tuple and args and type(args[0]) is List else ()


def _free_name(key: Node, taken: set[Hashable], numbers: dict[str, int]) -> str:
    name = key.decode("latin1") if type(key) is bytes else _name(key) if type(key) in (Object, Global) else "tuple"
    text = name
    while text in taken:
        numbers[name] = numbers.get(name, 1) + 1
        text = f"{name} {numbers[name]}"
    return text


def _identity(key: Node) -> Hashable:
    """Equal for keys that Python holds equal. Numbers as text: a file could choose numbers whose hashes collide."""
    if type(key) is tuple:
        return tuple(map(_identity, key))
    if type(key) is bool or type(key) is int or (type(key) is float and key.is_integer()):
        return "n", hex(int(key))
    return key if type(key) in _SIMPLE else id(key)


def is_resolved(name: Global) -> bool:
    """Whether nothing is lost where no object names a global: known data, and what readers make entries of."""
    return is_known(name) or name in (LOAD_FROM_BYTES, VARIABLE) or name.name == WRAPPER


_INSIDE: Where = ("<inside an object>",)


def find_unknown(root: Node, places: dict[int, Where] | None = None) -> list[tuple[Where, str]]:
    """Every object and global below `root` that is not known plain data, with its path and its global's name."""
    nodes = [(node, name) for node in visit.reachable(root) if (name := _unknown_name(node)) is not None]
    if not nodes:
        return []
    places = _places(root) if places is None else places
    found = [(places.get(id(node), _INSIDE), name) for node, name in nodes]
    named = {name for where, name in found if where is not _INSIDE}
    found = [(where, name) for where, name in found if where is not _INSIDE or name not in named]
    return sorted(set(found), key=lambda item: (tuple(map(str, item[0])), item[1]))


def _unknown_name(node: Node) -> str | None:
    if type(node) is Object:
        if type(node.function) is not Global:
            return "<a computed function>"
        on_itself = node.call == "none"  # what happens to a class itself has no plain form
        return None if is_known(node.function) and not on_itself else str(node.function)
    return str(node) if type(node) is Global and not is_known(node) else None


def _places(root: Node, *, values: bool = False, made: Callable[[], object] = lambda: None) -> dict[int, Where]:
    """Where each container and record is met first; with `values`, bytes too: `made` is called for each of their places."""
    places: dict[int, Where] = {}
    for where, node in visit.walk(root, plain=False, values=_BYTES if values else frozenset()):
        if type(node) in tree.PLAIN and type(node) is not bytes:
            continue
        if type(node) is bytes:
            made()
        places.setdefault(id(node), where)
        if type(node) is Dict:
            for key in [key for key, _ in node.items if type(key) in (Object, Global, bytes)]:
                places.setdefault(id(key), (*where, visit.component(key)))
    return places


def drop_unknown(root: Node) -> tuple[Node, list[ObjectFate]]:
    """Leave out every object and global that is not known plain data; a tensor of such a class becomes a plain tensor."""

    def swap(node: Node) -> Node | Drop:
        if type(node) is Entry:  # without an unknown class, and without attributes of unknown classes
            extras = node.extras
            parts = () if extras is None else (extras.python_type, extras.state, extras.hooks)
            if extras is None or all(_unknown_name(below) is None for part in parts for below in visit.reachable(part)):
                return node
            return replace(node, extras=replace(extras, python_type=None, state=None, hooks=None) if extras.metadata else None)
        if type(node) is Object and unusual_tensor(node) is not None and node.name == "torch._tensor._rebuild_from_type_v2":
            made = plain_subclass(node)
            node = made if type(made) is Object else node
        return DROP if _unknown_name(node) is not None or (type(node) is Object and _needs_unknown(node)) else node

    return _exchange(root, swap, _places(root), [])


def _needs_unknown(node: Object) -> bool:
    """Whether an object would be called with something unknown, and could not be made without it."""
    parts = node.args if type(node.args) is tuple else (node.args,)
    inner = [below for part in parts if type(part) is tuple for below in part]
    return node.name != "collections.defaultdict" and any(_unknown_name(part) is not None for part in (*parts, *inner))


_BYTES = frozenset((bytes,))
_KEYS = frozenset((type(None), bool, int, float, str))


def make_plain(
    root: Node, *, oldest: bool = False, file_bytes: int = 0, unknown: Iterable[tuple[Where, str]] | None = None
) -> tuple[Node, list[ObjectFate]]:
    """Exchange every object for plain data; what has no plain form is dropped."""
    new, found = _New(file_bytes), _New(file_bytes)
    places = _places(root, values=oldest, made=found.name)
    unknown = find_unknown(root, places) if unknown is None else unknown

    def swap(node: Node) -> Node | Drop:
        return _plain(node, new.name)

    def swap_older(node: Node) -> Node | Drop:
        return plain_for_2_4(swap(node), new.name)

    changed = _Keys(root, *((key_for_2_4(swap), _KEYS) if oldest else (swap, _SIMPLE))).changed
    fates = [ObjectFate([*places.get(id(node), _INSIDE)], _name(node), _kind(new)) for node, new in changed]
    root, fates = _exchange(root, swap_older if oldest else swap, places, fates, _BYTES if oldest else frozenset())
    told = {(where, fate.name) for fate in fates for where in (tuple(fate.where), _INSIDE)}
    fates += [ObjectFate([*where], name, WITH_OUTER) for where, name in unknown if (where, name) not in told]
    return root, fates


class _New:
    """Names the tensors that bytes, numbers and arrays become: no more than a file of this size may have."""

    def __init__(self, file_bytes: int) -> None:
        self.count, self.most = 0, limits.NODES.most(file_bytes) // limits.LISTED

    def name(self) -> str:
        self.count += 1
        if self.count > self.most:
            raise limits.NODES.error(f"Bytes, numbers and arrays would become more than {self.most} tensors.")
        return f"plain{self.count - 1}"


def _exchange(
    root: Node, swap: Swap, places: dict[int, Where], fates: list[ObjectFate], values: frozenset[type] = frozenset()
) -> tuple[Node, list[ObjectFate]]:
    def noting(node: Node) -> Node | Drop:
        new = swap(node)
        if new is not node:
            fates.append(ObjectFate([*places.get(id(node), _INSIDE)], _name(node), _kind(new)))
        return new

    return exchange.replace(root, noting, values=values), fates


def _name(node: Node) -> str:
    if type(node) is Entry:
        return str(node.extras.python_type or "attributes of a tensor") if node.extras is not None else "tensor"
    if type(node) is tuple:
        return "tuple"
    return node.name if type(node) is Object else "bytes" if type(node) in (ByteString, bytes) else str(node)


_KINDS: dict[type, str] = {
    Dict: "dict", List: "list", Entry: "tensor", Object: "set", bool: "number", int: "number", float: "number", str: "text",
    bytes: "bytes", tuple: "tuple",
}  # fmt: skip


def _kind(node: Node | Drop) -> str:
    if type(node) is Object and node.name != "builtins.set":
        return "number" if node.name == "builtins.complex" else "tensor"
    return "dropped" if node is DROP else _KINDS.get(type(node), "None")


_PARAMETER, _TENSOR = Global("torch.nn.parameter", "Parameter"), Global("torch", "Tensor")


def _plain(node: Node, key: Key) -> Node | Drop:
    if type(node) is Global:
        return node if node in ALLOWED else str(node)
    if type(node) is ByteString:
        return node.data.decode("latin1")
    if type(node) is Entry:
        if node.extras is None or node.extras.python_type is None or node.extras.python_type in ALLOWED:
            return node
        kind = _PARAMETER if node.kind == "parameter" else _TENSOR  # its attributes, made plain, stay
        return replace(node, extras=replace(node.extras, python_type=kind))
    if type(node) is not Object:
        return node
    return plain_object(node, key)


def lost_numbers(fates: Iterable[ObjectFate]) -> list[Where]:
    """Where NumPy's arrays and numbers were that have no plain form: dates, structures, numbers that torch does not have."""
    dropped = (fate for fate in fates if fate.became == "dropped")
    return [tuple(fate.where) for fate in dropped if is_of_numbers(Global(*fate.name.rpartition(".")[::2]))]


def newer_dtypes(root: Node) -> list[str]:
    """The dtypes of tensors below `root` that torch 2.4's weights_only does not know."""
    found = dict.fromkeys(node.dtype.name for node in visit.reachable(root, bare=False) if type(node) is Entry)
    return [name for name in found if name in DTYPES and Global("torch", name) not in ALLOWED_2_4]


def arrays_as_tensors(root: Node) -> tuple[Node, list[ObjectFate]]:
    """Exchange pickled NumPy arrays of numbers for tensors, and nothing else."""
    found = (node for _, node in visit.walk(root, plain=False, entries=False))
    if not any(type(node) is Object and type(node.function) is Global and is_array(node.function) for node in found):
        return root, []
    numbers = count()
    return _exchange(root, lambda node: as_array(node, lambda: f"array{next(numbers)}") or node, _places(root), [])
