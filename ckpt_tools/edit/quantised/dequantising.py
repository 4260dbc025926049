"""Quantised tensors of a tree exchanged for plain ones, whose bytes are worked out while they are written."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field

from ckpt_tools.edit.quantised.config import Config
from ckpt_tools.edit.quantised.finding import find
from ckpt_tools.edit.quantised.parts import Quantised
from ckpt_tools.errors import ConvertError, NothingMatchedError
from ckpt_tools.formats.contents import find_state_dicts
from ckpt_tools.text import dotted
from ckpt_tools.tree.dtypes import DTYPES, DType
from ckpt_tools.tree.nodes import Dict, Entry, Node, Pair, Where, stored
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


def as_meant(
    root: Node, config: Config, target: DType = DTYPES["float32"], *, strict: bool = False, parts: bool = False
) -> Dequantised:
    """Exchange every quantised tensor for what its numbers mean, in place.

    What is not whole stays as it is, and is told; with `strict` it is an error, and what is beside quantised weights goes. With
    `parts` those stay too.
    """
    done, made = Dequantised(), dict[tuple[object, ...], tuple[Entry, CastCount]]()

    def plain(tensor: Quantised) -> tuple[Entry, CastCount]:
        """Of the same parts the same entry, so that what was tied stays tied."""
        key = tuple(view_of(part.entry) for part in tensor.parts)
        if key not in made:
            one, count = tensor.settle(config), CastCount()
            of = tuple(part.entry.storage.content for part in tensor.parts)
            content = plain_content(one.make, one.shape, target, count, of)
            device = tensor.parts[0].entry.storage.device
            made[key] = stored(f"plain{len(made)}", target, one.shape, content, device), count
        return made[key]

    for state_dict in {id(state_dict.node): state_dict for state_dict in find_state_dicts(root)}.values():
        where, node, found = state_dict.where, state_dict.node, find(state_dict.node)
        if strict and found.problems:
            raise found.problems[0]
        done.problems += [problem.what for problem in found.problems]
        if strict and found.quantised:
            need_torch("`dequantize` works numbers out with it.")
        new, gone = dict[str, list[Pair]](), set(found.beside if strict else ())
        done.left_out += [((*where, name), found.beside[name]) for name in found.beside if strict]
        for name, tensor in found.quantised.items():
            try:
                entry, count = plain(tensor)
            except ConvertError as error:
                if strict:
                    raise
                done.problems.append(error.what)
                continue
            new[tensor.parts[0].name] = [(name, entry), *([tensor.bias] if tensor.bias else [])]
            gone.update(part.name for part in tensor.parts)
            done.tensors[*where, name] = tensor.scheme
            done.counts[dotted((*where, name))] = count
        _put(node, new, gone, parts=parts)
    return done


def _put(node: Dict, new: Mapping[str, Sequence[Pair]], gone: Collection[str], *, parts: bool) -> None:
    items: list[Pair] = []
    for key, value in node.items:
        if type(key) is str and key in new:
            items += new[key]
        elif type(key) is not str or key not in gone:
            items.append((key, value))
    if parts:
        there = {name for name, _ in items}
        items += [pair for pair in node.items if pair[0] not in there]
    node.items[:] = items
