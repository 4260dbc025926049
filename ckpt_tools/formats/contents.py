"""What a tree holds: tensors, state dicts, optimizers, pickled modules; found by structure, with their paths."""

from __future__ import annotations

import functools
import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple, TypeGuard, cast

from ckpt_tools.errors import LimitError
from ckpt_tools.pickling.torch_objects import UnusualTensor, unusual_tensor
from ckpt_tools.tree.dtypes import DType
from ckpt_tools.tree.modules import is_module, module_state_dict, named_tensors
from ckpt_tools.tree.nodes import CONTAINERS, Dict, Entry, List, Node, Object, Where
from ckpt_tools.tree.visit import children, is_hollow, reachable, walk


@dataclass(slots=True, eq=False, repr=False)
class Tensor:
    """One tensor of a tree and where it is."""

    where: Where
    node: Entry | Object
    scheme: str = ""

    @property
    def name(self) -> str:
        """What it is called in the dict that it is in."""
        return str(self.where[-1]) if self.where else ""

    @property
    def unusual(self) -> UnusualTensor | None:
        """What its call tells of one that is not a plain view on a storage."""
        return unusual_tensor(self.node)

    @property
    def dtype(self) -> DType | None:
        return (self.unusual or cast(Entry, self.node)).dtype

    @property
    def shape(self) -> tuple[int, ...] | None:
        return (self.unusual or cast(Entry, self.node)).shape


@dataclass(slots=True, eq=False, repr=False)
class StateDict:
    where: Where
    node: Dict

    @property
    def names(self) -> list[str]:
        return list(tensors_by_name(self.node))


def names_quantised(state_dict: StateDict) -> bool:
    return any(
        type(key) is str
        and (
            key.endswith(_OF_QUANTISED)
            or (type(value) is Object and (unusual := unusual_tensor(value)) is not None and unusual.kind == "subclass")
        )
        for key, value in state_dict.node.items
    )


_OF_QUANTISED = (
    "_scale", "_scale_inv", ".scale_weight", ".scale", "SCB", ".absmax", ".quant_map", "qweight", "qzeros", "_packed",
    "_blocks", ".blocks", "_scales", "_qdata", ".scales", "._data", "._packed_params",
)  # fmt: skip


def is_tensor(node: Node) -> TypeGuard[Entry | Object]:
    return type(node) is Entry or (type(node) is Object and unusual_tensor(node) is not None)


def tensors_by_name(node: Dict) -> dict[str, Entry | Object]:
    return {name: value for name, value in node.items if type(name) is str and (type(value) is Entry or is_tensor(value))}


def find_tensors(root: Node) -> Iterator[Tensor]:
    for where, node in walk(root, stop=is_tensor, plain=False, bare=False):
        if is_tensor(node):
            yield Tensor(where, node)


def tensors_outside(root: Node, state_dicts: Sequence[StateDict]) -> list[Tensor]:
    inside = {state_dict.where for state_dict in state_dicts}
    return [tensor for tensor in find_tensors(root) if tensor.where[:-1] not in inside]


def count_tensors(root: Node) -> int:
    if type(root) is Dict and not root.attributes and all(type(value) is Entry for _, value in root.items):
        return len(root.items)  # most files
    return sum(1 for _ in find_tensors(root))


class Modules:
    """The pickled modules of a tree, each read once however often it is referred to."""

    def __init__(self) -> None:
        self.known: dict[int, Dict | None] = {}

    def state_dict(self, node: Node) -> Dict | None:
        """The names and values of a module; None for anything else, and for modules that hold one another for ever."""
        if id(node) not in self.known:
            if not is_module(node):
                return None
            try:
                self.known[id(node)] = Dict(list(named_tensors(node)), ordered=True)
            except LimitError:
                self.known[id(node)] = None
        return self.known[id(node)]

    def stop(self, node: Node) -> bool:
        return is_tensor(node) or self.state_dict(node) is not None


def list_tensors(root: Node, modules: Modules) -> Iterator[Tensor]:
    """Every tensor; those of modules by name, then what else the module holds (hidden buffers, attributes) by its path."""
    for where, node in walk(root, stop=modules.stop, plain=False, bare=False):
        if type(node) is not Entry and (state_dict := modules.state_dict(node)) is not None:
            named = tensors_by_name(state_dict)
            yield from (Tensor((*where, name), value) for name, value in named.items())
            shown = {id(value) for value in named.values()}
            rest = (tensor for tensor in find_tensors(node) if id(tensor.node) not in shown)
            yield from (Tensor((*where, *tensor.where), tensor.node) for tensor in rest)
        elif type(node) is Entry or is_tensor(node):
            yield Tensor(where, node)


def list_state_dicts(root: Node, modules: Modules) -> list[StateDict]:
    """Every state dict below `root`, and what pickled modules would give: a Dict of its own, editing it edits no module."""
    found = {state_dict.where for state_dict in find_state_dicts(root)}
    listed = []
    made: dict[int, Dict] = {}
    for where, node in walk(root, stop=modules.stop, plain=False):
        if type(node) is Dict and where in found:
            listed.append(StateDict(where, node))
        elif type(node) is Object and modules.state_dict(node) is not None:
            if id(node) not in made:
                made[id(node)] = module_state_dict(node)
            if made[id(node)].items:
                listed.append(StateDict(where, made[id(node)]))
    return listed


def find_state_dicts(root: Node) -> list[StateDict]:
    found = []
    holders = functools.cache(lambda: _holders(root))  # only few dicts ask
    for where, node in walk(root, stop=lambda node: type(node) is Object or is_optimizer(node), plain=False, entries=False):
        if type(node) is Dict and not is_optimizer(node) and _is_state_dict(node, holders) and not any(map(is_extra, where)):
            found.append(StateDict(where, node))
    return found


class Optimizer(NamedTuple):
    """An optimizer's state dict; `flat` is the dict of a flattened one, whose `state` is worked out of its keys."""

    state: Dict
    groups: List
    flat: Dict | None = None


def find_optimizers(root: Node) -> Iterator[tuple[Where, Optimizer]]:
    for where, node in walk(root, stop=is_tensor, plain=False, entries=False):
        if optimizer := as_optimizer(node):
            yield where, optimizer


def parameter_numbers(optimizer: Optimizer) -> dict[str, int]:
    """The whole numbers by which an optimizer's groups name their parameters, by their text."""
    lists = [group.get("params") for group in optimizer.groups.items if type(group) is Dict]
    numbers = [number for each in lists if type(each) is List for number in each.items if type(number) is int]
    return {str(number): number for number in numbers}


def restore_state_numbers(root: Node) -> None:
    """Give the states of optimizers their parameters' whole numbers: a distributed checkpoint has all keys as text."""
    for _, optimizer in find_optimizers(root):
        numbers = parameter_numbers(optimizer)
        if not any(type(key) is int for key, _ in optimizer.state.items):
            optimizer.state.items[:] = [
                (numbers.get(key, key) if type(key) is str else key, value) for key, value in optimizer.state.items
            ]


def is_extra(key: object) -> bool:
    """Whether a key of a state dict is that of what `get_extra_state` gave; dicts of tensors in there are no state dicts."""
    return isinstance(key, str) and key.rpartition(".")[2] == "_extra_state"


def is_optimizer(node: Node) -> bool:
    return type(node) is Dict and (_is_flattened(node) or _nested(node) is not None)


def as_optimizer(node: Node) -> Optimizer | None:
    if type(node) is not Dict:
        return None
    return _unflattened(node) if _is_flattened(node) else _nested(node)


def _nested(node: Dict) -> Optimizer | None:
    groups, state = node.get("param_groups"), node.get("state")
    return Optimizer(state, groups) if type(groups) is List and type(state) is Dict else None


def _unflattened(node: Dict) -> Optimizer:
    states: dict[str, Dict] = {}
    for key, value in node.named.items():
        kind, name, field = split_flat(key)
        if kind == "state":
            states.setdefault(name, Dict()).items.append((field, value))
    return Optimizer(Dict([*states.items()]), List(), node)


_FLAT = ("state.", "param_groups.")


def _is_flattened(node: Dict) -> bool:
    """Whether it is an optimizer as torch's `flatten_optimizer_state_dict` has it: `state.fc.weight.exp_avg` and the like."""
    kinds = set[str]()
    for key, _ in node.items:  # the first one decides, mostly
        if type(key) is not str or not key.startswith(_FLAT):
            return False
        kinds.add(key.partition(".")[0])
    return len(kinds) == len(_FLAT)


def split_flat(key: str) -> tuple[str, str, str]:
    """`state.fc.weight.exp_avg` of a flattened optimizer as its three parts: `state`, `fc.weight`, `exp_avg`."""
    kind, _, rest = key.partition(".")
    name, _, field = rest.rpartition(".")
    return kind, name, field


def _is_state_dict(node: Dict, holders: Callable[[], set[int]]) -> bool:
    tensors = list(tensors_by_name(node))
    if not tensors or _are_scores(node, tensors):
        return False
    if any("." in name for name in tensors):
        return True
    others = [value for key, value in node.items if not is_tensor(value) and not is_extra(key)]
    return len(others) <= len(tensors) and not any(id(value) in holders() for value in others)


_NAME = re.compile(r"[\w.-]+")


def _are_scores(node: Dict, names: list[str]) -> bool:
    """Whether these are single numbers, under what is not a parameter's name, or among other values."""
    values = [value for _, value in node.items if is_tensor(value)]
    if not all(type(value) is Entry and not value.shape for value in values):
        return False
    others = [key for key, value in node.items if not (is_tensor(value) or is_extra(key))]
    beside_others = bool(others) and not any("." in name for name in names)
    return beside_others or not all(map(_NAME.fullmatch, names))


def _holders(root: Node) -> set[int]:
    above: dict[int, list[int]] = {}
    found: set[int] = set()
    todo: list[int] = []
    for node in reachable(root, bare=False):
        for _, part in children(node) if type(node) in CONTAINERS and not is_hollow(node) else ():
            if is_tensor(part):
                todo.append(id(node))
            elif type(part) in CONTAINERS:
                above.setdefault(id(part), []).append(id(node))
    while todo:
        if (holder := todo.pop()) not in found:
            found.add(holder)
            todo += above.get(holder, ())
    return found
