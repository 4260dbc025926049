"""What a tuned model changed, as a low-rank adapter: which tensors become factors, which are held whole, which are left."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from ckpt_tools.edit.lora.shapes import is_embedding, is_oblong, last_name, turned_by_biases
from ckpt_tools.errors import ConvertError
from ckpt_tools.tree.globs import Globs
from ckpt_tools.tree.nodes import Entry, Node
from ckpt_tools.values.numeric import view_of
from ckpt_tools.values.same_bytes import same_bytes

_FLOATS = ("float32", "float16", "bfloat16", "float64")


@dataclass(frozen=True, slots=True, eq=False)
class Changed:
    name: str
    base: Entry
    tuned: Entry


@dataclass(slots=True)
class Extraction:
    factored: dict[str, Changed] = field(default_factory=dict)
    biases: dict[str, Changed] = field(default_factory=dict)
    saved: dict[str, list[Changed]] = field(default_factory=dict)
    left: list[Changed] = field(default_factory=list)
    unchanged: int = 0


def sort(base: Mapping[str, Node], tuned: Mapping[str, Node], only: Globs | None) -> Extraction:
    found = Extraction()
    changed = _changed(base, tuned, found)
    by_module = _Modules(base, tuned)
    biases = []
    for name, row in changed.items():
        module, _, last = name.rpartition(".")
        if only is not None and not only.matching(name):
            found.left.append(row)
        elif _is_factored(row, last):
            found.factored[module] = row
        elif last == "bias" and f"{module}.weight" in changed and _is_factored(changed[f"{module}.weight"], "weight"):
            biases.append(module)
        else:
            by_module.hold(found, module, row)
    for module, row in found.factored.items():  # a square one may be stored as [in, out], where others of the model are
        if len(row.base.shape) == 2 and not is_oblong(row.base.shape) and not is_embedding(module, base):
            known = by_module.turned
            if len(known.get(last_name(module), ())) != 1 and any(True in turned for turned in known.values()):
                by_module.hold(found, module, row)
    found.factored = {module: row for module, row in found.factored.items() if module not in found.saved}
    by_module.take_biases(found, [module for module in biases if module in found.factored])
    return found


def _changed(base: Mapping[str, Node], tuned: Mapping[str, Node], found: Extraction) -> dict[str, Changed]:
    """The tensors that differ; of tied ones the first name, since a merge adds to all what it adds to one."""
    changed: dict[str, Changed] = {}
    seen: dict[object, tuple[str, Entry]] = {}
    for name, one in base.items():
        other = tuned[name]
        if type(one) is not Entry or type(other) is not Entry:
            continue
        first, own = seen.setdefault(view_of(one), (name, other))
        if first == name:
            if _same(one, other):
                found.unchanged += 1
            else:
                changed[name] = Changed(name, one, other)
        elif view_of(own) != view_of(other) and not _same(own, other):
            raise ConvertError(
                f"{first!r} and {name!r} are tied in the base, and differ in the tuned model.",
                why="Merged, the change of each would be added to both.",
            )
    return changed


def _same(one: Entry, other: Entry) -> bool:
    return one.shape == other.shape and one.dtype is other.dtype and same_bytes(one, other)


def _is_factored(row: Changed, last: str) -> bool:
    shape = row.base.shape
    if last != "weight" or shape != row.tuned.shape or not 2 <= len(shape) <= 5 or 0 in shape:
        return False
    grouped = len(shape) > 2 and shape[1] == 1  # a convolution for each channel
    return not grouped and {row.base.dtype.name, row.tuned.dtype.name} <= set(_FLOATS)


class _Modules:
    """The tensors of both models by their modules."""

    def __init__(self, base: Mapping[str, Node], tuned: Mapping[str, Node]) -> None:
        self.base, self.tuned = base, tuned
        self.names: dict[str, list[str]] = {}
        for name in base:
            self.names.setdefault(name.rpartition(".")[0], []).append(name)
        self.outer = {path.rpartition(".")[0] for path in self.names if path} | {""}
        self.turned = turned_by_biases(base)

    def hold(self, found: Extraction, module: str, row: Changed) -> None:
        """Hold a module whole, where it is one that holds tensors alone; else a tensor of it is left."""
        if module in self.outer:
            found.left.append(row)
            return
        rows = [self.pair(name) for name in self.names[module]]
        found.saved[module] = [row for row in rows if row is not None]

    def pair(self, name: str) -> Changed | None:
        one, other = self.base.get(name), self.tuned.get(name)
        return Changed(name, one, other) if type(one) is Entry and type(other) is Entry else None

    def take_biases(self, found: Extraction, modules: list[str]) -> None:
        """Changed biases of factored modules: PEFT's `lora_bias` is for all of them or none, so else those are held whole."""
        if not modules:
            return
        rows = {module: self.pair(f"{module}.bias") for module in found.factored}
        if all(row is not None and row.base.shape == row.tuned.shape for row in rows.values()):
            found.biases = {module: row for module, row in rows.items() if row is not None}
            return
        for module in modules:
            self.hold(found, module, found.factored.pop(module))
