"""The order in which an author would register tensors, worked out from their names alone.

The order in a file says little: safetensors sorts names as text (`layers.10` before `layers.2`), others as they please. So one
order is made of the names, and a matching is the same however a file is sorted.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from itertools import count
from math import prod
from typing import TypeAlias, TypeVar

from ckpt_tools.matching.lexicon import concepts, end_of, numbers, rank, stem, words
from ckpt_tools.matching.records import Param, Shape
from ckpt_tools.tree.names import unwrap

Key: TypeAlias = tuple[object, ...]
_ENDS = {"before": 0, None: 1, "behind": 2}
_BLOCKS = frozenset({"blocks", "layers"})
_DOWNSAMPLING = frozenset({"downsample", "downsampling", "downsampler"})
_HEADS = frozenset({("end", "head"), ("end", "pooler"), ("last", "last")})
_NO_NUMBER = (10**18,)
_NO_RANK = 100
_MOST_PARTS = 64  # of a name; what is deeper counts as one part
_LEAVES = {name: place for place, name in enumerate(("weight", "bias", "running_mean", "running_var", "num_batches_tracked"))}
_NARROW, _DEPTHWISE, _WIDE = 5, 10, 40  # the ranks of `pw`, `dw`, `pwl`


@dataclass(slots=True)
class _Module:
    """What stands below one part of the names: tensors of its own, and modules."""

    tensors: list[tuple[str, Param]] = field(default_factory=list)
    modules: dict[str, _Module] = field(default_factory=dict)


def in_order_of_names(params: Iterable[Param], known: Callable[[str], str]) -> list[Param]:
    """The tensors in the order that their names say: the same for any order in which they come."""
    root = _Module()
    for param in sorted(params, key=lambda param: param.name):
        *path, leaf = unwrap(known(param.name)).split(".", _MOST_PARTS)
        module = root
        for part in path:
            module = module.modules.setdefault(part, _Module())
        module.tensors.append((leaf, param))
    return list(_walk(root))


def _walk(module: _Module) -> Iterator[Param]:
    """Tensors of a module's own stand in front of the modules in it."""
    rows = [(_LEAVES.get(leaf, len(_LEAVES)), numbers(leaf), leaf, param) for leaf, param in module.tensors]
    yield from (param for *_, param in sorted(rows, key=lambda row: row[:3]))
    for part in _in_order(module.modules):
        yield from _walk(module.modules[part])


def _in_order(modules: Mapping[str, _Module]) -> list[str]:
    """The modules in one: what names put in front, what they number, blocks, what they put behind."""
    single = {part for part, module in modules.items() if not module.modules}
    beside_layers = any(not _is_norm(part) and not numbers(part) and end_of((part,)) is None for part in single)
    stages = not _BLOCKS.isdisjoint(modules)

    def key(part: str) -> Key:
        end = 2 if concepts(part) & _HEADS else _ENDS[end_of((part,))]
        said = numbers(part) or _NO_NUMBER
        if _is_norm(part):
            place = 1 if beside_layers or said != _NO_NUMBER else 3  # behind its layer; with none there, behind all blocks
        else:
            place = 0 if part in single or (stages and not _DOWNSAMPLING.isdisjoint(words(part))) else 2
        return (end, said, place, _rank(part), stem(part), part)

    return _norms_behind_layers(sorted(modules, key=key), single)


def _norms_behind_layers(parts: list[str], single: set[str]) -> list[str]:
    """`bn1`, `bn2` each behind its convolution, where those have words in place of numbers: `conv_stem`, `conv_head`."""
    layers = [part for part in parts if part in single and ("kind", "convolution") in concepts(part) and not _is_norm(part)]
    norms = [part for part in parts if part in single and _is_norm(part) and numbers(part)]
    ends, ranks = [end_of((part,)) for part in layers], [_rank(part) for part in layers]
    counted = [numbers(part) for part in norms] == [(number,) for number, _ in zip(count(1), norms)]
    if not layers or len(layers) != len(norms) or not counted or any(map(numbers, layers)):
        return parts
    # whether words say an order; a `pw` beside a `dw` comes before it or behind, as there is a `pwl` or not
    is_sequence = len(set(ranks)) == len(ranks) and _NO_RANK not in ranks
    is_sequence = is_sequence and (not {_NARROW, _DEPTHWISE} <= set(ranks) or _WIDE in ranks)
    if len(set(ends)) < len(ends) and not is_sequence:
        return parts
    behind = dict(zip(layers, norms, strict=True))
    return [each for part in parts if part not in norms for each in ([part, behind[part]] if part in behind else [part])]


@lru_cache(maxsize=65536)
def _is_norm(part: str) -> bool:
    return ("kind", "norm") in concepts(part)


def _rank(part: str) -> int:
    found = rank(part)
    return _NO_RANK if found is None else found


MOST = 256
_SIDE = 16
T = TypeVar("T")


def _matrix(shape: Shape) -> tuple[int, int]:
    """A shape as one of rows; of one dimension it is one row."""
    return (shape[0], prod(shape[1:])) if len(shape) > 1 else (1, prod(shape))


def _taken(rows: int, columns: int) -> tuple[int, int]:
    if rows <= _SIDE or rows * columns <= MOST:
        return rows, min(columns, MOST // max(rows, 1))
    return (MOST // columns, columns) if columns <= _SIDE else (_SIDE, _SIDE)


def _spread(size: int, count: int) -> list[int]:
    """So many of the numbers below `size`, the first and the last among them."""
    return [number * (size - 1) // max(count - 1, 1) for number in range(count)]


@lru_cache(maxsize=1024)
def places_of(shape: Shape) -> tuple[int, ...]:
    """The elements of a sample, counted row-major."""
    rows, columns = _matrix(shape)
    many = _taken(rows, columns)
    return tuple(row * columns + column for row in _spread(rows, many[0]) for column in _spread(columns, many[1]))


def turned(sample: Sequence[T], shape: Shape) -> tuple[T, ...]:
    """The sample of a matrix's transpose."""
    columns = _taken(*_matrix(shape))[1]
    return tuple(value for column in range(columns) for value in sample[column::columns])
