"""Fused against split layers: `qkv` against `q`, `k`, `v`. A fused unit is compared part by part; the result is an offer."""

from __future__ import annotations

import re
from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
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
_PARTS = {
    **dict.fromkeys(
        ("qkv", "inproj", "cattn", "wqkv", "qkvproj", "toqkv", "projqkv", "qkvlinear", "linearqkv", "attnqkv"),
        ("query", "key", "value"),
    ),
    **dict.fromkeys(("kv", "tokv", "kvproj", "wkv", "projkv", "kvlinear", "linearkv"), ("key", "value")),
    **dict.fromkeys(("gateup", "gateupproj", "w12"), ("gate", "up")),
}
_UNEQUAL = "qkvproj"
_GROUP = {"query": "attention part", "key": "attention part", "value": "attention part", "gate": "gated", "up": "gated"}
Cuts: TypeAlias = Mapping[Path, Sequence[tuple[str, int]]]  # what a layer is seen to be divided into: names and rows


def split_fused(units: Sequence[Unit], others: Sequence[Unit], cuts: Cuts | None = None) -> list[Unit]:
    """The units with each fused one that the other side has split exchanged for its parts; numbered again in order."""
    counts, theirs = (Counter(unit.signature for unit in side) for side in (units, others))
    sizes: dict[str, set[Shape]] = defaultdict(set)
    for unit in others:
        for word in _named_parts(unit) if "weight" in unit.shapes else ():
            sizes[word].add(unit.shapes["weight"])
    # biases of parts that are parameters of their own beside a fused weight: `q_bias` and `v_bias` of BEiT and Swin V2
    lone = {(unit.path[:-1], word): unit for unit in units if [*unit.roles] == ["bias"] for word in _named_parts(unit)}
    found: list[Unit] = []
    given: set[Path] = set()
    for unit in units:
        more = counts[unit.signature] > theirs[unit.signature]
        parts = _parts(unit, sizes) if more else []
        if more and not parts and cuts:
            parts = _cut(unit, cuts.get(unit.path, ()), theirs - counts)
        for part in parts or [unit]:
            bias = lone.get((part.path[:-1], part.path[-1])) if parts and "bias" not in unit.roles else None
            if bias is not None and bias.shapes["bias"] == part.shapes["weight"][:1]:
                given.add(bias.path)
                part.roles = {**part.roles, **bias.roles}
                part.shapes, part.integers = {**part.shapes, **bias.shapes}, {**part.integers, **bias.integers}
            found.append(part)
    return [replace(unit, index=index) for index, unit in enumerate(unit for unit in found if unit.path not in given)]


def _named_parts(unit: Unit) -> set[str]:
    """Which parts of a fused layer a unit is named as."""
    said = concepts(unit.path[-1]) if unit.path else ()
    return {concept for group, concept in said if _GROUP.get(concept) == group}


def _parts(unit: Unit, sizes: Mapping[str, set[Shape]]) -> list[Unit]:
    """The parts of a fused unit, where the other side's shapes add up to it in one way only."""
    fused = re.sub(r"[^a-z0-9]", "", unit.path[-1].lower()) if unit.path else ""
    names = _PARTS.get(fused, ())
    weight = unit.shapes.get("weight", ())
    if not names or not weight or set(unit.roles) - {"weight", "bias"}:
        return []
    rows = [sorted(shape[0] for shape in sizes.get(name, ()) if shape and shape[1:] == weight[1:]) for name in names]
    ways = [way for way in product(*rows) if sum(way) == weight[0]]
    if len(ways) != 1 or (len(set(ways[0])) > 1 and fused != _UNEQUAL):
        return []
    return [_part(unit, number, name, count) for number, (name, count) in enumerate(zip(names, ways[0], strict=True))]


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
