"""Fused against split layers: `qkv` against `q`, `k`, `v`. A fused unit is compared part by part; the result is an offer."""

from __future__ import annotations

import re
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import product
from typing import TypeAlias

from ckpt_tools.matching.lexicon import concepts
from ckpt_tools.matching.records import Shape
from ckpt_tools.matching.units import Path, Signature, Unit

# What a fused layer's name says about its parts, in the order in which they lie along the first dimension: torch's
# MultiheadAttention, timm and transformers put q, k, v (and k, v) in this order, and the gate before what it gates. A
# `query_key_value` (GPT-NeoX, BLOOM, Falcon) is not here: its parts alternate by head. Of a `wqkv` with fewer keys than
# queries some libraries make groups, so parts of different sizes are taken from a `qkv_proj` only.
_LETTERS = re.compile(r"[^a-z0-9]")
_QKV = dict.fromkeys(
    ("qkv", "inproj", "cattn", "wqkv", "qkvproj", "toqkv", "projqkv", "qkvlinear", "linearqkv", "attnqkv"),
    ("query", "key", "value"),
)
_KV = dict.fromkeys(("kv", "tokv", "kvproj", "wkv", "projkv", "kvlinear", "linearkv"), ("key", "value"))
_GATED = dict.fromkeys(("gateup", "gateupproj", "w12"), ("gate", "up"))
_UNEQUAL = "qkvproj"
_PARTS = {**_QKV, **_KV, **_GATED}
_GROUP = {"query": "attention part", "key": "attention part", "value": "attention part", "gate": "gated", "up": "gated"}


Cuts: TypeAlias = Mapping[Path, Sequence[tuple[str, int]]]  # what a layer is seen to be divided into: names and rows


def split_fused(units: Sequence[Unit], others: Sequence[Unit], cuts: Cuts | None = None) -> list[Unit]:
    """The units with each fused one that the other side has split exchanged for its parts; numbered again in order."""
    counts, theirs = (Counter(unit.signature for unit in side) for side in (units, others))
    sizes = _part_shapes(others)
    lone = {(unit.path[:-1], part): unit for unit in units if [*unit.roles] == ["bias"] for part in named_parts(unit)}
    found: list[Unit] = []
    given: set[Path] = set()
    for unit in units:
        more = counts[unit.signature] > theirs[unit.signature]
        parts = list(_parts(unit, sizes)) if more else []
        if more and not parts and cuts:
            parts = _cut(unit, cuts.get(unit.path, ()), theirs - counts)
        biases = {} if "bias" in unit.roles else _biases(parts, lone)
        given.update(bias.path for bias in biases.values())
        found += [_with_bias(part, biases.get(part.path)) for part in parts] or [unit]
    return [replace(unit, index=index) for index, unit in enumerate(unit for unit in found if unit.path not in given)]


def _part_shapes(units: Iterable[Unit]) -> dict[str, set[Shape]]:
    """The weight shapes of the units that are named as a part: "query", "key" ..."""
    found: dict[str, set[Shape]] = defaultdict(set)
    for unit in units:
        if "weight" in unit.shapes and unit.path:
            for part in named_parts(unit):
                found[part].add(unit.shapes["weight"])
    return found


def named_parts(unit: Unit) -> set[str]:
    """Which parts of a fused layer a unit is named as; by the last part of its name, or the one before (`query.linear`)."""
    for component in reversed(unit.path[-2:]):
        found = {concept for group, concept in concepts(component) if _GROUP.get(concept) == group}
        if found:
            return found
    return set()


def _parts(unit: Unit, sizes: dict[str, set[Shape]]) -> Iterator[Unit]:
    """The parts of a fused unit, where the other side's shapes add up to it in one way only."""
    fused = _LETTERS.sub("", unit.path[-1].lower()) if unit.path else ""
    names = _PARTS.get(fused, ())
    weight = unit.shapes.get("weight", ())
    if not names or not weight or set(unit.roles) - {"weight", "bias"}:
        return
    ways = [rows for rows in product(*(_rows(sizes[name], weight) for name in names)) if sum(rows) == weight[0]]
    if len(ways) != 1 or (len(set(ways[0])) > 1 and fused != _UNEQUAL):
        return
    for number, (name, rows) in enumerate(zip(names, ways[0], strict=True)):
        yield _part(unit, number, name, rows)


def _part(unit: Unit, number: int, name: str, rows: int) -> Unit:
    shapes = {role: (rows, *shape[1:]) for role, shape in unit.shapes.items()}
    return replace(unit, path=(*unit.path[:-1], name), shapes=shapes, counter=None, fused=(unit, number))


def _cut(unit: Unit, rows: Sequence[tuple[str, int]], more: Counter[Signature]) -> list[Unit]:
    """The parts that a layer is seen to be divided into, where the other side has more layers like each of them."""
    if set(unit.roles) - {"weight", "bias"} or "weight" not in unit.shapes:
        return []
    parts = [_part(unit, number, name, count) for number, (name, count) in enumerate(rows)]
    wanted = Counter(part.signature for part in parts)
    return parts if all(more[signature] >= count for signature, count in wanted.items()) else []


def _biases(parts: Sequence[Unit], lone: Mapping[tuple[Path, str], Unit]) -> dict[Path, Unit]:
    """Biases of parts that are parameters of their own beside a fused weight: `q_bias` and `v_bias` of BEiT and Swin V2."""
    beside = ((part, lone.get((part.path[:-1], part.path[-1]))) for part in parts)
    return {part.path: bias for part, bias in beside if bias and bias.shapes["bias"] == part.shapes["weight"][:1]}


def _with_bias(part: Unit, bias: Unit | None) -> Unit:
    """A part with the bias that is its own."""
    if bias is None:
        return part
    return replace(part, roles={**part.roles, **bias.roles}, shapes={**part.shapes, **bias.shapes},
                   integers={**part.integers, **bias.integers})  # fmt: skip


def _rows(shapes: set[Shape], weight: Shape) -> list[int]:
    return sorted(shape[0] for shape in shapes if shape and shape[1:] == weight[1:])
