"""Quantised tensors of a tree exchanged for plain ones, whose bytes are worked out while they are written."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from ckpt_tools.edit.quantised.config import Config
from ckpt_tools.edit.quantised.finding import find
from ckpt_tools.edit.quantised.parts import Quantised
from ckpt_tools.errors import ConvertError, NothingMatchedError
from ckpt_tools.formats.contents import StateDict, find_state_dicts
from ckpt_tools.text import dotted
from ckpt_tools.tree.dtypes import DTYPES, DType
from ckpt_tools.tree.nodes import Entry, Node, Where, stored
from ckpt_tools.values.numeric import CastCount, view_of
from ckpt_tools.values.pytorch import need_torch
from ckpt_tools.values.quantised import plain_content


@dataclass(slots=True)
class Dequantised:
    tensors: dict[Where, str] = field(default_factory=dict)
    counts: dict[str, CastCount] = field(default_factory=dict)
    left_out: list[tuple[Where, str]] = field(default_factory=list)
    problems: list[str] = field(default_factory=list)


def dequantise(root: Node, target: DType, config: Config) -> Dequantised:
    """Exchange every quantised tensor of every state dict for a plain one of this dtype, in place."""
    done = as_meant(root, config, target, strict=True)
    if not done.tensors:
        raise NothingMatchedError(
            "There is no quantised weight.", why="No tensor has codes with a scale beside them.",
            fix="ckpt inspect --all FILE lists the names; leave `dequantize` out for plain weights.",
        )  # fmt: skip
    return done


def _exchange(
    state_dict: StateDict, tensors: Sequence[Quantised], entries: dict[str, Entry], beside: dict[str, str], maker: _Maker,
    done: Dequantised,
) -> None:  # fmt: skip
    where, node = state_dict.where, state_dict.node
    places = {tensor.parts[0].name: tensor for tensor in tensors}
    gone = {part.name for tensor in tensors for part in tensor.parts} | beside.keys()
    items: list[tuple[Node, Node]] = []
    for key, value in node.items:
        tensor = places.get(key) if type(key) is str else None
        if tensor is not None:
            items += [(tensor.name, entries[tensor.name]), *([tensor.bias] if tensor.bias else [])]
        elif type(key) is not str or key not in gone:
            items.append((key, value))
    node.items[:] = items
    done.tensors |= {(*where, tensor.name): tensor.scheme for tensor in tensors}
    done.counts |= {dotted((*where, tensor.name)): maker.counts[id(entries[tensor.name].storage)] for tensor in tensors}
    done.left_out += [((*where, name), why) for name, why in beside.items()]


def as_meant(
    root: Node, config: Config, target: DType = DTYPES["float32"], *, strict: bool = False, parts: bool = False
) -> Dequantised:
    """Exchange every quantised tensor for what its numbers mean, in place.

    What is not whole stays as it is, and is told; with `strict` it is an error, and what is beside quantised weights goes. With
    `parts` those stay too.
    """
    done, maker = Dequantised(), _Maker(target, config)
    for state_dict in {id(state_dict.node): state_dict for state_dict in find_state_dicts(root)}.values():
        one, entries = find(state_dict.node), dict[str, Entry]()
        if strict and one.problems:
            raise one.problems[0]
        done.problems += [problem.what for problem in one.problems]
        if strict and one.quantised:
            need_torch("`dequantize` works numbers out with it.")
        for name, tensor in one.quantised.items():
            try:
                entries[name] = maker.entry(tensor)
            except ConvertError as error:
                if strict:
                    raise
                done.problems.append(error.what)
        kept = [(name, node) for name, node in state_dict.node.items if parts and name not in entries]
        tensors = [one.quantised[name] for name in entries]
        _exchange(state_dict, tensors, entries, one.beside if strict else {}, maker, done)
        there = {name for name, _ in state_dict.node.items}
        state_dict.node.items += [pair for pair in kept if pair[0] not in there]
    return done


class _Maker:
    """Makes plain entries; those of the same parts are one storage, so that what was tied stays tied."""

    def __init__(self, target: DType, config: Config) -> None:
        self.target, self.config = target, config
        self.known: dict[tuple[object, ...], Entry] = {}
        self.counts: dict[int, CastCount] = {}

    def entry(self, tensor: Quantised) -> Entry:
        key = tuple(view_of(part.entry) for part in tensor.parts)
        if key not in self.known:
            plain, count = tensor.settle(self.config), CastCount()
            of = tuple(part.entry.storage.content for part in tensor.parts)
            content = plain_content(plain.make, plain.shape, self.target, count, of)
            device = tensor.parts[0].entry.storage.device
            made = self.known[key] = stored(f"plain{len(self.known)}", self.target, plain.shape, content, device)
            self.counts[id(made.storage)] = count
        return self.known[key]
