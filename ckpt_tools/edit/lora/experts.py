"""Parameters that hold all experts of a layer: PEFT's `target_parameters` (ParamWrapper in its lora/layer.py).

One pair of factors is for all experts: lora_A is [rank * experts, in], an expert's rows together; lora_B is
[out, rank * experts], each rank's columns together. Which side of a parameter [experts, rows, columns] is `in` depends on the
version: up to 0.18 the rows, since 0.19.1 the columns, but for modules that say `is_transposed`. Several parameters of a
module are wrapped one in the other. transformers 5 holds all experts of a layer in one parameter, and writes most models as
before: with a weight for each expert.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from ckpt_tools.edit.lora.adapter import Adapter, Change
from ckpt_tools.edit.lora.config import CONFIG
from ckpt_tools.errors import ConvertError
from ckpt_tools.text import listed
from ckpt_tools.tree.nodes import Entry, Node

# The weights of one expert that make a row of a parameter, one below the other (transformers' conversion_mapping.py)
_WEIGHTS = {"gate_up_proj": (("gate_proj", "up_proj"), ("w1", "w3")), "down_proj": (("down_proj",), ("w2",))}
_EXPERT = re.compile(r"(.+)\.(\d{1,4})\.(\w{1,40})\.weight")
_TURNED, _BY_MODULE = (0, 18), (0, 20)  # the last version that has rows as `in`, the first that asks the module


@dataclass(frozen=True, slots=True)
class Parameter:
    """A parameter of a base: [experts, rows, columns], or a matrix; and the tensors it is in, with their first rows."""

    name: str
    shape: tuple[int, ...]
    pieces: Sequence[tuple[str, int]]

    @property
    def experts(self) -> int:
        return self.shape[0] if len(self.shape) == 3 else 1


class Experts:
    """The parameters of the modules of a base, and its weights of single experts by their module."""

    def __init__(self, tensors: Mapping[str, Node]) -> None:
        self.tensors = tensors
        self.split: dict[str, dict[str, dict[int, str]]] = {}
        for name in tensors:
            if found := _EXPERT.fullmatch(name):
                self.split.setdefault(found[1], {}).setdefault(found[3], {})[int(found[2])] = name

    def modules(self, parameters: set[str]) -> set[str]:
        parts = parameters | {one for name in parameters for names in _WEIGHTS.get(name, ()) for one in names}
        own = {path for name in self.tensors for path, _, last in (name.rpartition("."),) if last in parameters and path}
        return own | {path for path, weights in self.split.items() if not parts.isdisjoint(weights)}

    def find(self, module: str, parameter: str) -> Parameter | None:
        name = f"{module}.{parameter}"
        node = self.tensors.get(name)
        if type(node) is Entry:
            return Parameter(name, node.shape, [(name, 0)]) if len(node.shape) in (2, 3) else None
        weights = self.split.get(module, {})
        for names in (*_WEIGHTS.get(parameter, ()), (parameter,)):
            if all(map(weights.get, names)):
                return self._stacked(name, [weights[one] for one in names])
        return None

    def _stacked(self, name: str, columns: Sequence[Mapping[int, str]]) -> Parameter | None:
        """A parameter of which each expert has its own weights; None where they do not make one."""
        rows = [column.get(expert) for expert in range(len(columns[0])) for column in columns]
        nodes = [self.tensors[row] for row in rows if row is not None]
        entries = [node for node in nodes if type(node) is Entry and len(node.shape) == 2]
        if len(entries) != len(rows) or len({entry.shape for entry in entries}) != 1:
            return None
        height, width = entries[0].shape
        pieces = [(row, height * number) for number, row in enumerate(rows) if row is not None]
        return Parameter(name, (len(columns[0]), height * len(columns), width), pieces)


def assigned(
    changes: Sequence[Change], parameters: Sequence[Parameter], adapter: Adapter, base: str
) -> list[tuple[Change, Parameter, bool]]:
    """The changes of one module with their parameters, and whether the rows are `in`: each fits one alone, or it is refused."""
    module = changes[0].module
    shown = listed([f"{one.name!r} {list(one.shape)}" for one in parameters])
    if len(changes) != len(parameters):
        raise ConvertError(
            f"{adapter.path} has factors of {len(changes)} parameters of {module!r}; of those that target_parameters in "
            f"{CONFIG} names {base} has {len(parameters)}{f': {shown}' if shown else ''}."
        )
    pairs: list[tuple[Change, Parameter, set[bool]]] = []
    for change in changes:
        fitting = [(made, one, ways) for one in parameters for made, ways in [_fitted(change, one)] if ways]
        if len(fitting) != 1:
            factors = f"{list(change.down.shape)} and {list(change.up.shape)}"
            ranks = {change.config.rank_of(f"{module}.{one}") for one in change.parameters} - {None}
            raise ConvertError(
                f"{adapter.path}: the factors of {module!r}, {factors}, fit {'several' if fitting else 'none'} of {shown}.",
                why=f"They are [rank * experts, in] and [out, rank * experts]; the rank is {listed(sorted(map(str, ranks)))}."
                if not fitting else "Only the order in the model decides which is which, and files do not keep it.",
            )  # fmt: skip
        pairs += fitting
    if len({one.name for _, one, _ in pairs}) != len(pairs):
        raise ConvertError(f"{adapter.path} has factors twice for one parameter of {module!r}: {shown}.")
    sure = {way for _, _, ways in pairs if len(ways) == 1 for way in ways}
    return [(change, one, _turned(change, one, ways, sure, adapter)) for change, one, ways in pairs]


def _fitted(change: Change, one: Parameter) -> tuple[Change, set[bool]]:
    """A change as one of a parameter, and by which layouts it fits: whether the rows are `in`."""
    (down, into), (out, _) = change.down.shape, change.up.shape
    rows, columns = one.shape[-2:]
    key = f"{change.module}.{one.name.rpartition('.')[2]}"
    rank = change.config.rank_of(key) or down // max(1, one.experts)
    ways = {False} if (out, into) == (rows, columns) else set()
    if (into, out) == (rows, columns) and one.experts > 1:  # of one alone PEFT makes [out, in] in any case
        ways.add(True)
    if not ways or rank * one.experts != down or (change.grouped and change.experts != one.experts):
        return change, set()
    return replace(change, experts=one.experts, scale=change.config.scale(key, rank)), ways


def _turned(change: Change, one: Parameter, ways: set[bool], sure: set[bool], adapter: Adapter) -> bool:
    """Whether the rows are `in`: by the shape, or of a square one by the module's others, or by the version."""
    known = ways if len(ways) == 1 else sure
    if len(known) == 1:
        return next(iter(known))
    if change.grouped and len(one.pieces) > 1:  # a weight of one expert is [out, in]
        return False
    version = (0, 0) if change.grouped else adapter.config.version
    if (0, 0) < version <= _TURNED:
        return True
    if version >= _BY_MODULE and len(one.pieces) > 1:  # transformers' modules that say `is_transposed` are not written so
        return False
    said = "no peft_version" if version == (0, 0) else f"PEFT {version[0]}.{version[1]}"
    raise ConvertError(
        f"{adapter.path}: whether the changes of {one.name!r}, {list(one.shape)}, are [out, in] or [in, out] is unknown.",
        why=f"It is square, and {CONFIG} has {said}: up to 0.18 they are [in, out], since 0.19 the model's code says it.",
        fix="Merge this adapter with PEFT.",
    )
