"""How the factors of an adapter fit the weight that they change: by its shape, and of square weights by what else is known."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping

from ckpt_tools.edit.lora.adapter import Adapter, Change
from ckpt_tools.errors import ConvertError
from ckpt_tools.tree.nodes import Entry, Node

_EMBEDDING = re.compile(r"emb|wte|wpe|^shared$")


def is_embedding(module: str, tensors: Mapping[str, Node]) -> bool:
    """Whether a module with a matrix is an embedding: by its name, since a state dict tells it by nothing else."""
    return _EMBEDDING.search(last_name(module).lower()) is not None and f"{module}.bias" not in tensors


def made_shape(change: Change) -> list[int]:
    return [change.up.shape[0], *change.down.shape[1:]]


def fits(change: Change, node: Node) -> bool | None:
    """Whether a weight is [in, out] by its shape; None where the factors do not make it. Of a square one: False."""
    if type(node) is not Entry or not node.shape:
        return None
    outputs, inputs = change.up.shape[0], change.down.numel // change.rank
    if change.mid is not None:
        inputs *= change.mid.numel // (change.rank * change.rank)
    if change.embedding:
        return True if node.shape == (inputs, outputs) else None
    if node.shape[0] == outputs and node.numel == outputs * inputs:
        return False
    return True if node.shape == (inputs, outputs) else None


def turned_by_biases(tensors: Mapping[str, Node]) -> dict[str, set[bool]]:
    """By the last names of modules, whether oblong weights are stored as [in, out]: the bias is as long as [out]."""
    known: dict[str, set[bool]] = {}
    for name, node in tensors.items():
        module = name.removesuffix(".weight")
        bias = tensors.get(f"{module}.bias") if module != name else None
        if type(node) is Entry and type(bias) is Entry and is_oblong(node.shape):
            turns = {turned for turned in (False, True) if bias.shape == (node.shape[turned],)}
            known.setdefault(last_name(module), set()).update(turns)
    return known


class Turned:
    """Which weights are stored as [in, out], as transformers' Conv1D has them: the shape says it, but of square ones."""

    def __init__(self, adapter: Adapter, tensors: Mapping[str, Node]) -> None:
        self.path, self.said = adapter.path, adapter.config.fan_in_fan_out
        self.own: set[bool] = set()
        self.known = turned_by_biases(tensors)

    def learn(self, pairs: Iterable[tuple[Change, Node]]) -> None:
        for change, node in pairs:
            fit = fits(change, node)
            if not change.embedding and fit is not None and type(node) is Entry and is_oblong(node.shape):
                self.known.setdefault(last_name(change.module), set()).add(fit)
                self.own.add(fit)

    def is_turned(self, change: Change, entry: Entry) -> bool:
        if change.embedding or len(entry.shape) != 2 or is_oblong(entry.shape):
            return bool(fits(change, entry))
        same = self.known.get(last_name(change.module), set())
        if len(same) == 1:
            return next(iter(same))
        if not self.own - {self.said}:
            return self.said
        if self.said and not any(True in known for known in self.known.values()):
            return False  # by `fan_in_fan_out`, which PEFT takes back for each nn.Linear
        raise ConvertError(
            f"{self.path}: whether {change.module!r}, which is square, is stored as [out, in] or [in, out] is unknown.",
            why=f"fan_in_fan_out is {str(self.said).lower()} in its configuration, and other modules are not stored so.",
            fix="Merge this adapter with PEFT.",
        )


def is_oblong(shape: tuple[int, ...]) -> bool:
    return len(shape) == 2 and shape[0] != shape[1]


def last_name(module: str) -> str:
    """The last part of a module's path; of one with underscores for dots its end is unknown."""
    return module.rpartition(".")[2]
