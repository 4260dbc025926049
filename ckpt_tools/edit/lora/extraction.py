"""What a tuned model changed, as a low-rank adapter: which tensors become factors, which are held whole, which are left."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from ckpt_tools.edit.lora.adapter import DTYPES
from ckpt_tools.edit.lora.shapes import is_embedding, is_oblong, last_name, turned_by_biases
from ckpt_tools.errors import ConvertError
from ckpt_tools.text import listed
from ckpt_tools.tree.globs import Globs
from ckpt_tools.tree.nodes import Entry, Node
from ckpt_tools.values.numeric import same_bytes, view_of

# Why a module is held whole
_NO_MATRIX = "factors are for matrices and kernels of floats, of one shape in both models"
_SQUARE = "it is square, and the file does not tell whether it is stored as [out, in] or [in, out]"
_ALIKE = "its name ends as that of another module that is held whole: PEFT finds those by the ends of names"
_BIASES = "its bias differs, and other layers have none: PEFT's lora_bias is for all layers or none"


@dataclass(frozen=True, slots=True, eq=False)
class Changed:
    name: str
    base: Entry
    tuned: Entry

    def is_factored(self) -> bool:
        """Whether it becomes factors: a matrix or the kernel of a convolution, but not one for each channel."""
        shape = self.base.shape
        if self.name.rpartition(".")[2] != "weight" or shape != self.tuned.shape or not 2 <= len(shape) <= 5 or 0 in shape:
            return False
        return (len(shape) == 2 or shape[1] != 1) and {self.base.dtype.name, self.tuned.dtype.name} <= set(DTYPES)


class Extraction:
    def __init__(self, base: Mapping[str, Node], tuned: Mapping[str, Node], only: Globs | None) -> None:
        self.unchanged = 0
        entries = ((name, base[name], tuned.get(name)) for name in base)
        self.pairs = {
            name: Changed(name, one, other) for name, one, other in entries if type(one) is Entry and type(other) is Entry
        }
        self.factored: dict[str, Changed] = {}
        self.biases: dict[str, Changed] = {}
        self.saved: dict[str, list[Changed]] = {}
        self.why: dict[str, str] = {}
        self.left: list[Changed] = []
        self.names: dict[str, list[str]] = {}
        for name in base:
            self.names.setdefault(name.rpartition(".")[0], []).append(name)
        self.outer = {path.rpartition(".")[0] for path in self.names if path} | {""}
        changed, biases = self._changed(), []
        for name, row in changed.items():
            module, _, last = name.rpartition(".")
            weight = changed.get(f"{module}.weight")
            if only is not None and not only.matching(name):
                self.left.append(row)
            elif row.is_factored():
                self.factored[module] = row
            elif last == "bias" and weight is not None and weight.is_factored():
                biases.append(module)
            else:
                self._hold(module, row, _NO_MATRIX)
        known = turned_by_biases(base)
        some_turned = any(True in turned for turned in known.values())
        for module, row in self.factored.items():  # a square one may be stored as [in, out] then
            is_square = len(row.base.shape) == 2 and not is_oblong(row.base.shape) and not is_embedding(module, base)
            if is_square and some_turned and len(known.get(last_name(module), ())) != 1:
                self._hold(module, row, _SQUARE)
        self.factored = {module: row for module, row in self.factored.items() if module not in self.saved}
        self._take_biases([module for module in biases if module in self.factored])
        self._hold_alike()

    def _changed(self) -> dict[str, Changed]:
        """The tensors that differ; of tied ones the first name, since a merge adds to all what it adds to one."""
        changed: dict[str, Changed] = {}
        seen: dict[object, tuple[str, Entry]] = {}
        for name, row in self.pairs.items():
            first, own = seen.setdefault(view_of(row.base), (name, row.tuned))
            if first == name and _same(row.base, row.tuned):
                self.unchanged += 1
            elif first == name:
                changed[name] = row
            elif view_of(own) != view_of(row.tuned) and not _same(own, row.tuned):
                raise ConvertError(
                    f"{first!r} and {name!r} are tied in the base, and differ in the tuned model.",
                    why="Merged, the change of each would be added to both.",
                )
        return changed

    def _pairs_of(self, module: str) -> list[Changed]:
        return [self.pairs[name] for name in self.names[module] if name in self.pairs]

    def _hold(self, module: str, row: Changed, why: str) -> None:
        """Hold a module whole, where it is one that holds tensors alone; else a tensor of it is left."""
        if module in self.outer:
            self.left.append(row)
        else:
            self.why.setdefault(module, why)
            self.saved[module] = self._pairs_of(module)

    def _take_biases(self, modules: list[str]) -> None:
        """Changed biases of factored modules: PEFT's `lora_bias` is for all of them or none, so else those are held whole."""
        rows = {module: self.pairs.get(f"{module}.bias") for module in self.factored} if modules else {}
        if all(row is not None and row.base.shape == row.tuned.shape for row in rows.values()):
            self.biases = {module: row for module, row in rows.items() if row is not None}
        else:
            for module in modules:
                self._hold(module, self.factored.pop(module), _BIASES)

    def _hold_alike(self) -> None:
        """Hold modules whole that PEFT takes for one of `modules_to_save`, changed or not; it would ask for them."""
        ends = tuple(self.saved)
        for module in [name for name in self.names if name.endswith(ends) and name not in self.saved] if ends else ():
            if module in self.outer:
                raise ConvertError(
                    f"PEFT would take {module!r}, which has modules inside, for one that is to be saved whole.",
                    why=f"It finds those by the ends of their names: {listed(list(ends), 3)}.",
                    fix="Leave what differs there out: `only=GLOB`.",
                )
            self.factored.pop(module, None)
            self.biases.pop(module, None)
            self.why[module] = _ALIKE
            self.saved[module] = self._pairs_of(module)


def _same(one: Entry, other: Entry) -> bool:
    return one.shape == other.shape and one.dtype is other.dtype and same_bytes(one, other)
