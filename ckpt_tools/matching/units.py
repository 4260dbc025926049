"""Units: the tensors of one side that share a parent name, with the role that each plays there."""

from __future__ import annotations

import re
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import TypeAlias

from ckpt_tools.matching.pairing import flattened
from ckpt_tools.matching.records import Param, Shape
from ckpt_tools.tree.names import unwrap

Path: TypeAlias = tuple[str, ...]
Signature: TypeAlias = tuple[tuple[str, Shape, bool], ...]
_ROLES = {"weight": "weight", "bias": "bias", "running_mean": "mean", "running_var": "variance"}
_COUNTER = "num_batches_tracked"  # old checkpoints lack it; it never tells modules apart
_SUFFIXED = re.compile(r"(.+)_(weight|bias)")
_GATED = {"w1": "gate", "w2": "down", "w3": "up"}
_MAX_PARTS = 64  # of a name; what is deeper counts as one part


@dataclass(slots=True)
class Unit:
    """A leaf module of one side."""

    index: int
    path: Path
    roles: dict[str, str] = field(default_factory=dict)
    shapes: dict[str, Shape] = field(default_factory=dict)
    integers: dict[str, bool] = field(default_factory=dict)
    counter: str | None = None
    fused: tuple[Unit, int] | None = None
    kind: int = -1

    @property
    def signature(self) -> Signature:
        return tuple((role, self.shapes[role], self.integers[role]) for role in sorted(self.roles))

    @property
    def loose(self) -> Signature:
        """The signature in flattened shapes; a parameter that stands alone and the weight of a module are one thing."""
        names = {"weight": "tensor"} if len(self.roles) == 1 else {}
        return tuple((names.get(role, role), flattened(shape), integer) for role, shape, integer in self.signature)

    def partner_of(self, role: str, other: Unit) -> str | None:
        """The name of the tensor that plays this role of the other unit here."""
        if role not in self.roles and len(self.roles) == len(other.roles) == 1:
            return next(iter(self.roles.values()))
        return self.roles.get(role)


def units_of(params: Iterable[Param], known: Callable[[str], str]) -> list[Unit]:
    """The leaf modules of one side, in order of registration. `known` gives the name to read a tensor's place from."""
    rows = [(param, *unwrap(known(param.name)).rpartition(".")) for param in params if param.kind == "tensor"]
    leaves: dict[str, set[str]] = defaultdict(set)
    for _, parent, _, leaf in rows:
        leaves[parent].add(leaf)
    units: dict[Path, Unit] = {}
    for param, parent, _, leaf in rows:
        path, role = _place(parent, leaf, leaves[parent])
        unit = units.setdefault(path, Unit(len(units), path))
        if role == _COUNTER:
            unit.counter = param.name
        elif role not in unit.roles:
            unit.roles[role], unit.shapes[role] = param.name, param.shape
            unit.integers[role] = (param.dtype or "").startswith(("int", "uint", "bool"))
    for path in [path for path in units if path[-1:] == ("w1",)]:  # beside w2 and w3, as the first Llama has them
        gates = [gate for name in _GATED if (gate := units.get((*path[:-1], name))) is not None]
        shapes = [gate.shapes.get("weight", ()) for gate in gates]
        if len(gates) == len(_GATED) and len(shapes[0]) == 2 and shapes[0] == shapes[2] == shapes[1][::-1]:
            for gate, name in zip(gates, _GATED.values(), strict=True):
                gate.path = (*path[:-1], name)
    return [unit for unit in units.values() if unit.roles]


def _place(parent: str, leaf: str, siblings: set[str]) -> tuple[Path, str]:
    path = tuple(parent.split(".", _MAX_PARTS)) if parent else ()
    if leaf == _COUNTER or leaf in _ROLES:
        return path, _ROLES.get(leaf, _COUNTER)
    if leaf in ("gamma", "beta") and {"gamma", "beta"} <= siblings:  # as TensorFlow calls them in norms
        return path, "weight" if leaf == "gamma" else "bias"
    if path[-2:-1] == ("parametrizations",) and leaf in ("original0", "original1"):  # the newer form of weight_g, weight_v
        return path[:-2], f"{path[-1]}_{'gv'[int(leaf[-1])]}"
    if leaf.startswith(("weight_", "bias_")):  # weight_g of a weight norm, weight_ih_l0 of an LSTM: its module's own word
        return path, leaf
    if (match := _SUFFIXED.fullmatch(leaf)) is not None:  # in_proj_weight
        return (*path, match[1]), match[2]
    return (*path, leaf), "tensor"


def untied(source: Sequence[Param], target: Sequence[Param]) -> tuple[list[Param], list[Param]]:
    """Both sides with one tensor of each group of tied ones; but all of it where the other side holds as many apart."""
    groups: list[dict[object, list[Param]]] = [{}, {}]
    for side, params in enumerate((source, target)):
        for number, param in enumerate(params):
            groups[side].setdefault((number,) if param.tie is None else ("tie", param.tie), []).append(param)
    full = [Counter(param.shape for param in side) for side in (source, target)]
    distinct = [Counter(members[0].shape for members in side.values()) for side in groups]

    def one_side(own: int, other: int) -> list[Param]:
        kept: set[str] = set()
        for first, *rest in groups[own].values():
            apart = distinct[own][first.shape] != distinct[other][first.shape] == full[own][first.shape]
            kept.update(param.name for param in ([first, *rest] if apart else [first]))
        return [param for param in (source, target)[own] if param.name in kept]

    return one_side(0, 1), one_side(1, 0)
