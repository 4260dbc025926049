"""One rank's part of a tensor: what a pickled DTensor or ShardedTensor says of the whole, and the boxes of it that are here.

Source: torch/distributed: tensor/_dtensor_spec.py, placement_types.py, device_mesh.py (up to torch 2.8 and later), _shard."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import product
from math import prod
from operator import mul
from typing import Any, Literal, TypeAlias, cast

from ckpt_tools.errors import TensorError
from ckpt_tools.formats.checkpoint import Checkpoint
from ckpt_tools.parts.merge import Piece
from ckpt_tools.pickling.torch_objects import sizes_of, unusual_tensor, unwrapped
from ckpt_tools.tree.dtypes import DType
from ckpt_tools.tree.nodes import Dict, Entry, Global, List, Node, Object, contiguous_stride
from ckpt_tools.tree.visit import reachable

Sizes: TypeAlias = tuple[int, ...]
_MOST_DIMENSIONS = 16  # of a mesh; torch's own have up to five
MOST_RANKS = 1 << 20
PART_KINDS = ("dtensor", "sharded")


@dataclass(frozen=True, slots=True)
class Mesh:
    """The ranks that share a tensor, row-major in `shape`; `names` of its dimensions, where they have some.

    `rank` is this one, at `coordinate`, None where it is not in the mesh, of `world` in all.
    """

    shape: Sizes
    ranks: Sizes
    names: tuple[str, ...] = ()
    rank: int | None = None
    coordinate: Sizes | None = None
    world: int = 0


@dataclass(frozen=True, slots=True)
class Placement:
    """What one dimension of the mesh does to the tensor. `factor`, of a strided one: into how many it had been cut before."""

    kind: Literal["shard", "strided", "replicate", "partial"]
    dim: int = 0
    factor: int = 1

    def __str__(self) -> str:
        cut = {"shard": f"Shard({self.dim})", "strided": f"_StridedShard({self.dim}, sf={self.factor})"}
        return cut.get(self.kind, self.kind.capitalize())


@dataclass(frozen=True, slots=True, eq=False)
class Part:
    kind: Literal["dtensor", "sharded"]
    dtype: DType
    shape: Sizes
    held: tuple[Piece, ...]
    rank: int | None
    world: int
    mesh: Mesh | None = None
    placements: tuple[Placement, ...] = ()
    requires_grad: bool = False

    @property
    def is_whole(self) -> bool:
        """Whether this rank holds all of the tensor, and not as a summand."""
        return not self.is_partial and any(box.sizes == self.shape for box in self.held)

    @property
    def is_partial(self) -> bool:
        sizes = self.mesh.shape if self.mesh is not None else ()
        return any(place.kind == "partial" and size > 1 for place, size in zip(self.placements, sizes, strict=False))

    @property
    def shares(self) -> int:
        if self.mesh is None:
            return self.world
        cut = zip(self.placements, self.mesh.shape, strict=True)
        return prod(size for place, size in cut if place.kind in ("shard", "strided"))


class PartReader:
    """Reads parts; a mesh that many tensors share is read once."""

    def __init__(self) -> None:
        self.meshes: dict[int, Mesh] = {}

    def read(self, node: Node) -> Part | None:
        """The part of a tensor that an Object rebuilds; None for anything else."""
        unusual = unusual_tensor(node)
        if type(node) is not Object or unusual is None or unusual.kind not in PART_KINDS:
            return None
        read: Callable[..., Part] = self._dtensor if unusual.kind == "dtensor" else _sharded
        try:
            _need(unusual.dtype is not None and unusual.shape is not None)
            return read(unwrapped(node).args, unusual.dtype, unusual.shape)
        except (AttributeError, IndexError, KeyError, TypeError, ValueError):
            raise TensorError("A distributed tensor does not say where its part lies in the whole.") from None

    def _dtensor(self, args: Any, dtype: DType, shape: Sizes) -> Part:
        _, _, rebuilt_from, own_state = args
        state = _state(own_state)
        entry, spec = _entry(state["_local_tensor"]), _record(state["_spec"], "DTensorSpec")
        if id(spec["mesh"]) not in self.meshes:
            self.meshes[id(spec["mesh"])] = _mesh(_record(spec["mesh"], "DeviceMesh"))
        mesh = self.meshes[id(spec["mesh"])]
        placements = tuple(_placement(place, len(shape)) for place in row_of(spec["placements"]))
        _need(len(placements) == len(mesh.shape))
        held: tuple[Piece, ...] = ()
        if mesh.coordinate is not None:
            order = _shard_order(spec.get("shard_order"), placements)
            offsets, sizes = box_at(shape, mesh.shape, placements, mesh.coordinate, order)
            if entry.shape != sizes:
                raise TensorError(f"A DTensor holds {list(entry.shape)} on rank {mesh.rank}, whose place is for {list(sizes)}.")
            held = (Piece(offsets, entry),)
        return Part("dtensor", dtype, shape, held, mesh.rank, mesh.world, mesh, placements, rebuilt_from[6] is True)


def forget_globals(checkpoint: Checkpoint, objects: Sequence[Object]) -> None:
    """Take out of the list of globals what parts alone named, which are whole tensors now."""
    left = {node for node in reachable(checkpoint.root) if type(node) is Global}
    gone = {node for node in reachable(tuple(objects)) if type(node) is Global} - left
    checkpoint.globals = [name for name in checkpoint.globals if name not in gone]


# --- DTensor


def box_at(
    shape: Sizes, mesh: Sizes, placements: Sequence[Placement], coordinate: Sizes, order: Sequence[int] | None = None
) -> tuple[Sizes, Sizes]:
    """Where the box of one rank begins in the whole tensor, and its sizes: what `torch.chunk` gives, cut by cut."""
    offsets, sizes = [0] * len(shape), list(shape)
    for number in _cut_order(mesh, placements) if order is None else order:
        dim, parts = placements[number].dim, mesh[number]
        chunk = -(-sizes[dim] // parts)
        start = min(coordinate[number] * chunk, sizes[dim])
        offsets[dim], sizes[dim] = offsets[dim] + start, min(chunk, sizes[dim] - start)
    return tuple(offsets), tuple(sizes)


def _cut_order(mesh: Sizes, placements: Sequence[Placement]) -> list[int]:
    """In which order the dimensions of a mesh cut a tensor: from left to right, but for strided ones."""
    cuts: dict[int, list[int]] = {}
    for number, place in reversed([*enumerate(placements)]):
        if place.kind not in ("shard", "strided"):
            continue
        later = cuts.setdefault(place.dim, [])
        first, shares = 0, 1
        while place.kind == "strided" and shares < place.factor and first < len(later):
            shares *= mesh[later[first]]
            first += 1
        if place.kind == "strided" and shares != place.factor:
            raise TensorError(f"A DTensor is cut in a way that ckpt does not read: {', '.join(map(str, placements))}.")
        later.insert(first, number)
    return [number for numbers in cuts.values() for number in numbers]


def _shard_order(node: Node, placements: Sequence[Placement]) -> list[int] | None:
    """The order that a spec of torch 2.10 and later says; None where the placements say it."""
    if node is None or any(place.kind == "strided" for place in placements):
        return None
    cuts = [number for entry in row_of(node) for number in sizes_of(cast(Any, entry).args[1]) or ()]
    _need(sorted(cuts) == [number for number, place in enumerate(placements) if place.kind == "shard"])
    return cuts


def _placement(node: Node, dimensions: int) -> Placement:
    record = _record(node, "Shard", "_StridedShard", "Replicate", "Partial", "_Partial", "_MaskPartial")
    name = _class_name(node)
    if name == "Replicate" or "Partial" in name:
        return Placement("replicate" if name == "Replicate" else "partial")
    dim: Any = record["dim"]
    factor: Any = record.get("split_factor", 1)
    _need(type(dim) is type(factor) is int and -dimensions <= dim < dimensions and factor > 0)
    return Placement("strided" if name == "_StridedShard" else "shard", dim % dimensions, factor)


def _mesh(state: dict[str, Node]) -> Mesh:
    names = tuple(map(str, row_of(state.get("mesh_dim_names", state.get("_mesh_dim_names")) or ())))
    said = state.get("_coordinate_on_dim")
    coordinate, rank = None if said is None else _ints(said), None
    if "_layout" in state:
        shape, ranks, rank, world = _by_layout(state, coordinate)
    else:
        ranks, shape = _ints(state["_flatten_mesh_list"]), _entry(state["mesh"]).shape
        world = len(ranks)
    _need(len(shape) <= _MOST_DIMENSIONS and min(shape, default=1) > 0 and prod(shape) == len(ranks) == len(set(ranks)))
    _need(min(ranks) >= 0)
    if coordinate is not None:
        _need(all(0 <= at < size for at, size in zip(coordinate, shape, strict=True)))
        own = ranks[sum(map(mul, coordinate, contiguous_stride(shape)))]
        _need(rank in (None, own))
        rank = own
    return Mesh(shape, ranks, names, rank, coordinate, world)


def _by_layout(state: dict[str, Node], coordinate: Sizes | None) -> tuple[Sizes, Sizes, int | None, int]:
    """A mesh as torch 2.9 and later pickle it: sizes and strides over the ranks of the mesh that it is a part of."""
    everyone = _ints(state["_flatten_rank_map"])
    layout = _record(state["_layout"], "_MeshLayout")
    if "axes" in layout:  # torch 2.13: each dimension has sizes and strides of its own
        pairs = [_record(axis, "_FlatLayout") for axis in row_of(layout["axes"])]
        rows = [(_ints(pair["shape"]), _ints(pair["stride"])) for pair in pairs]
    else:  # torch 2.9
        rows = [((size,), (step,)) for size, step in zip(_ints(layout["shape"]), _ints(layout["stride"]), strict=True)]
    shape, rank = tuple(prod(sizes) for sizes, _ in rows), state.get("_rank")
    _need(len(shape) <= _MOST_DIMENSIONS and all(min(sizes, default=1) > 0 for sizes, _ in rows) and prod(shape) <= MOST_RANKS)
    if type(rank) is not int or coordinate is None:
        return shape, everyone[: prod(shape)], None, len(everyone)
    _need(prod(shape) <= len(everyone) and len(coordinate) == len(rows))
    axes = [_offsets(*row) for row in rows]
    first = everyone.index(rank) - sum(axis[at] for axis, at in zip(axes, coordinate, strict=True))
    places = [first + sum(steps) for steps in product(*axes)]
    _need(min(places) >= 0)
    return shape, tuple(everyone[place] for place in places), rank, len(everyone)


def _offsets(shape: Sizes, stride: Sizes) -> list[int]:
    """Where each element lies, in row-major order."""
    steps = [range(0, size * step, step) if step else (0,) * size for size, step in zip(shape, stride, strict=True)]
    return [sum(at) for at in product(*steps)]


# --- ShardedTensor


def _sharded(args: Any, dtype: DType, shape: Sizes) -> Part:
    shards, metadata, process_group, *_ = args[3]
    rows: Any = _record(metadata, "ShardedTensorMetadata")["shards_metadata"]
    listed = tuple(_box(row, shape) for row in rows.items)
    known = _state(process_group.state) if type(process_group) is Object and process_group.state is not None else {}
    held = []
    for shard in shards.items:
        record = _record(shard, "Shard")
        entry, (offsets, sizes) = _entry(record["tensor"]), _box(record["metadata"], shape)
        _need(entry.shape == sizes and (offsets, sizes) in listed)
        held.append(Piece(offsets, entry))
    rank, world = known.get("global_rank"), known.get("global_world_size")
    world = world if type(world) is int else len(listed)
    return Part("sharded", dtype, shape, tuple(held), rank if type(rank) is int else None, world)


def _box(node: Node, shape: Sizes) -> tuple[Sizes, Sizes]:
    record = _record(node, "ShardMetadata")
    offsets, sizes = _ints(record["shard_offsets"]), _ints(record["shard_sizes"])
    _need(all(0 <= at <= at + size <= whole for at, size, whole in zip(offsets, sizes, shape, strict=True)))
    return offsets, sizes


# --- records; `PartReader.read` tells of those that are not as torch makes them


def _need(holds: object) -> None:
    if not holds:
        raise ValueError


def _record(node: Node, *names: str) -> dict[str, Node]:
    """The attributes of an object of one of torch.distributed's classes."""
    _need(_class_name(node) in names)
    return _state(cast(Object, node).state)


def _class_name(node: Node) -> str:
    function = node.function if type(node) is Object else None
    return function.name if type(function) is Global and function.module.startswith("torch.distributed.") else ""


def _state(node: Node) -> dict[str, Node]:
    """What a state sets: a dict, or a pair of dict and slots."""
    parts = node if type(node) is tuple else (node,)
    return {key: value for part in parts if type(part) is Dict for key, value in part.named.items()}


def _entry(node: Node) -> Entry:
    _need(type(node) is Entry)
    return cast(Entry, node)


def row_of(node: Node) -> Sequence[Node]:
    """The items of a tuple or a list: which of them it is has changed between versions."""
    return node.items if type(node) is List else node if type(node) is tuple else ()


def _ints(node: Node) -> Sizes:
    found = (node,) if type(node) is int else sizes_of(node)
    _need(found is not None and all(number.bit_length() <= 62 for number in found))
    return found or ()
