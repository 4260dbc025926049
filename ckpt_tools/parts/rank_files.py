"""rank-files: a pickle for each rank of a job, with its parts of the tensors; FSDP1, FSDP2, HSDP, tensor parallelism.

A plain tensor in one is replicated. Source of the names: verl's fsdp_checkpoint_manager.py, dinov2's fsdp/__init__.py."""

from __future__ import annotations

import contextlib
import functools
import json
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from math import prod
from pathlib import Path
from typing import Any, TypeAlias

from ckpt_tools.errors import DamagedFileError, PartError, TensorError, UnsupportedContainerError
from ckpt_tools.formats.base import Keys, Warned
from ckpt_tools.formats.checkpoint import Checkpoint
from ckpt_tools.formats.contents import find_tensors
from ckpt_tools.formats.single import HEAD, decode_file
from ckpt_tools.io.sources import Files
from ckpt_tools.parts import names as by_name
from ckpt_tools.parts.merge import Merger, Piece, is_named, merged
from ckpt_tools.parts.names import ITEM_METADATA, Group, by_rank, check_world
from ckpt_tools.parts.rank_parts import MOST_RANKS, Part, PartReader, Placement, box_at, forget_globals, row_of
from ckpt_tools.text import dotted, some, these_ranks
from ckpt_tools.tree import exchange
from ckpt_tools.tree.dtypes import DTYPES
from ckpt_tools.tree.exchange import DROP
from ckpt_tools.tree.nodes import MAX_ELEMENTS, PLAIN, Dict, Entry, List, Node, Object, Where
from ckpt_tools.tree.visit import walk
from ckpt_tools.values.boxes import Sizes

CONTAINER = "rank-files"
_STEPS = frozenset(("step", "steps", "epoch", "iteration", "iter", "global_step", "global_steps"))
_FLAT = ("_flat_param", "flat_param")  # torch/distributed/fsdp/_flat_param.py
_OWN_STATE = re.compile(r"rng|random", re.IGNORECASE)
_CALLED = "rank {}".format

# What something beside the files says of plain tensors at a place: the whole shape and the boxes; None for what all have whole
Places: TypeAlias = Callable[[Where, Sequence[tuple[int, Entry]]], tuple[Sizes, list[Piece]] | None]


def decode(names: Sequence[str], files: Files, *, partial: bool = False) -> Checkpoint:
    group = by_name.group_of(names[0], names) or by_name.group_of(names[0], names, items=True)
    assert group is not None, "they were found by their ranks"
    return merge(group, files, Merger(partial=partial))


def merge(group: Group, files: Files, merger: Merger, places: Places | None = None, inside: Where = ()) -> Checkpoint:
    """Read the structure of every rank's file and put the tensors together; no tensor bytes. `inside`: where they will be."""
    merging = _Merging(group, files, merger, places, inside)
    root = merger.leave_out(merging.run(), inside)
    missing = [_CALLED(rank) for rank in range(merging.world) if rank not in merging.names]
    made = merged(CONTAINER, root, files, merging.parts, merger, missing)
    forget_globals(made, merging.objects)
    if merging.differing:
        text = f"values differ between ranks, the first rank's are taken: {some(merging.differing)}"
        made.warnings.append(Warned("parts-differ", text))
    return made


class _Merging:
    """The trees of all ranks on their way into one: the first rank's, with whole tensors in it."""

    def __init__(self, group: Group, files: Files, merger: Merger, places: Places | None, inside: Where) -> None:
        self.names = dict(sorted(by_rank(group.rows).items()))
        self.named_world, self.world, self.inside = group.world is not None, group.world or max(self.names) + 1, inside
        check_world(self.names, self.world, _CALLED, partial=merger.partial)
        self.merger, self.places, self.reader = merger, places, PartReader()
        self.parts = [decode_file(files.open(name)) for name in self.names.values()]
        self.parts[0].root = merger.keys.renew(self.parts[0].root)
        self.roots = {rank: part.root for rank, part in zip(self.names, self.parts, strict=True)}
        self.first = next(iter(self.names))
        self.objects: list[Object] = []
        self.differing: list[str] = []

    def run(self) -> Node:
        self._check_values()
        tensors = {rank: {found.where: found.node for found in find_tensors(root)} for rank, root in self.roots.items()}
        if flat := [where for where in tensors[self.first] if where and str(where[-1]).rpartition(".")[2] in _FLAT]:
            what = "all parameters of a module in one row, without their names: FSDP1's LOCAL_STATE_DICT"
            fix = "Load it where it was saved, and save it again with SHARDED_STATE_DICT or FULL_STATE_DICT."
            raise PartError(f"{dotted(flat[0])!r} is {what}.", fix=fix)
        new = dict[int, Node]()
        for where in dict.fromkeys(where for own in tensors.values() for where in own):
            name = dotted((*self.inside, *where))
            held = {rank: own[where] for rank, own in tensors.items() if where in own}
            whole = self.merger.unless_lost(name, functools.partial(self._merged, where, name, held))
            if whole is not DROP:
                new[id(held[self.first])] = whole
        return exchange.replace(self.roots[self.first], lambda node: new.get(id(node), node))

    def _check_values(self) -> None:
        """Values that count steps must agree; of others the first rank's are taken, with a word."""
        values: dict[int, dict[Where, Any]] = {rank: _values(root) for rank, root in self.roots.items()}
        first = values[self.first]
        for where in dict.fromkeys(where for own in values.values() for where in own):
            ranks = [rank for rank, own in values.items() if not _same(own.get(where, DROP), first.get(where, DROP))]
            if ranks and where in first and where and where[-1] in _STEPS:
                raise PartError(
                    f"{dotted(where)!r} is {first[where]!r} on rank {self.first}, and another on {these_ranks(ranks)}."
                )
            self.differing += [dotted(where)] if ranks else []

    def _merged(self, where: Where, name: str, held: Mapping[int, Node]) -> Node:
        """The tensor that ranks hold at one place."""
        if missing := [rank for rank in self.names if rank not in held]:
            fix = "Are these files of one job?"
            raise PartError(f"{name!r} is not on {these_ranks(missing)}.", fix=fix, rest=is_named(where))
        entries = [(rank, node) for rank, node in held.items() if type(node) is Entry]
        if len(entries) == len(held):
            first = entries[0][1]
            if any(type(key) is str and _OWN_STATE.search(key) for key in where):
                return first  # every rank's random numbers are its own
            placed = self.places(where, entries) if self.places else None
            if placed is not None:
                return self.merger.tensor(name, first.dtype, *placed, requires_grad=first.requires_grad)
            return self.merger.replicated(name, entries)
        self.objects += [node for node in held.values() if type(node) is Object]
        parts = {rank: self._part(name, rank, node) for rank, node in held.items()}
        one = parts[self.first]
        for rank, part in parts.items():
            if (part.kind, part.shape) != (one.kind, one.shape):
                raise PartError(f"{name!r} is another tensor on rank {rank} than on rank {self.first}.", rest=True)
        pieces = [replace(box, rank=rank) for rank, part in parts.items() for box in part.held]
        return self.merger.tensor(name, one.dtype, one.shape, pieces, requires_grad=one.requires_grad)

    def _part(self, name: str, rank: int, node: Node) -> Part:
        file = self.names[rank]
        try:
            part = self.reader.read(node)
        except TensorError as error:
            raise PartError(f"{name!r} in {file} cannot be placed.", why=str(error), rest=True) from None
        if part is None:
            raise PartError(f"{name!r} is a part on some ranks, and something else in {file}.", rest=True)
        if part.rank is not None and part.rank != rank:
            raise PartError(f"{file} says by its name that it is rank {rank}'s, and holds the part of rank {part.rank}.")
        if part.is_partial:
            raise PartError(f"{name!r} is a sum that the ranks have not added up (Partial).", rest=True)
        last = max(part.mesh.ranks if part.mesh is not None else (part.world - 1,), default=0)
        if last >= self.world:
            world = max(part.world, last + 1)
            rest = not self.named_world and world <= by_name.MOST_MISSING  # of names that do not tell how many there were
            if not (rest and self.merger.partial):
                raise PartError(f"{name!r} is of a job of {world} ranks in {file}; here are files of {self.world}.", rest=rest)
            self.world = world
        return part


def _values(root: Node) -> dict[Where, Node]:
    """Plain values by their paths, those inside objects left out."""
    return {where: node for where, node in walk(root, stop=lambda node: type(node) in (Object, Entry)) if type(node) in PLAIN}


def _same(one: Node, other: Node) -> bool:
    return type(one) is type(other) and (one == other or one != one)


# --- torch_checkpointing: a file for each item and rank, and metadata.pkl, which says where plain tensors lie in the whole
#
# Source: torch_checkpointing 0.1 (distributed_metadata.py, dtensor_metadata.py, default_metadata.py, checkpoint_layout.py).

_VERSION = "2.0"
_LEVELS = 12
_KINDS: dict[str, Any] = {"Shard": "shard", "StridedShard": "strided", "Replicate": "replicate"}
_READ = ("TorchSerialization", "SafetensorsSerialization")
_PATH = re.compile(r"\[.*\]", re.DOTALL)
Row = Mapping[str, Any]


def decode_items(names: Sequence[str], files: Files, *, partial: bool = False) -> Checkpoint:
    """Read every item's files and put its tensors together; where one of the files is named, its item is the whole tree."""
    (described, groups), merger = _items_of(files), Merger(partial=partial)
    if files.path != files.folder:
        only = next(name for name, group in groups.items() if files.path.name in group.every)
        return merge(groups[only], files, merger, _places(described.get(only)))
    parts = [merge(group, files, merger, _places(described.get(name)), (name,)) for name, group in groups.items()]
    keys = Keys()
    root = Dict([(name, keys.renew(part.root)) for name, part in zip(groups, parts, strict=True)])
    return merged(CONTAINER, root, files, parts, merger)


def describes(path: Path, group: Group) -> bool:
    with contextlib.closing(Files(path, path.parent)) as files:
        about = files.open(ITEM_METADATA)
        if not by_name.describes_items(about.read(0, min(HEAD, about.size))):
            return False
        _, groups = _items_of(files)
    return group.stem == next((own.stem for own in groups.values() if path.name in own.every), None)


def _items_of(files: Files) -> tuple[dict[str, Row], dict[str, Group]]:
    """What metadata.pkl says of each item, and the files of each: where it says, else by the item's name."""
    content = _python(decode_file(files.open(ITEM_METADATA)).root, _LEVELS, {})  # no more levels are asked for
    names, found = files.names(), dict[str, Group]()
    try:
        if content["version"] != _VERSION:
            raise UnsupportedContainerError(f"{ITEM_METADATA} is of version {content['version']!r}; {_VERSION!r} is read.")
        described, world = content["metadata"], content["world_size"]
        for name, item in described.items():
            layouts, _ = item["rank_to_layout_info"], item["nested_path_to_metadata"].items()
            if not 0 < world <= MOST_RANKS or set(layouts) != set(range(world)):
                raise ValueError("another number of ranks")
            wanted = [(rank, _file(name, rank, layouts[rank])) for rank in range(world)]
            found[name] = Group(name + "_", [row for row in wanted if "/" in row[1] or row[1] in names], world)
            if not found[name].rows:
                raise PartError(f"No file of the item {name!r} is there; {ITEM_METADATA} describes {world} of them.")
    except (AttributeError, KeyError, TypeError, ValueError):
        raise DamagedFileError(f"{ITEM_METADATA} does not describe its items as torch_checkpointing does.") from None
    for group in by_name.item_groups(names):
        if len(group.ranks) == world:
            found.setdefault(group.stem.removesuffix("_"), Group(group.stem, group.rows, world))
    return described, found


def _python(node: Node, levels: int, known: dict[int, Any]) -> Any:
    """Dicts, lists and tuples of the tree as Python's own; what is referred to again and again is made once."""
    if levels < 0:
        raise DamagedFileError(f"{ITEM_METADATA} is nested deeper than what it describes.")
    if type(node) is Dict and id(node) not in known:
        known[id(node)] = {key: _python(value, levels - 1, known) for key, value in node.items if type(key) in (str, int)}
    elif type(node) in (List, tuple) and id(node) not in known:
        known[id(node)] = tuple(_python(value, levels - 1, known) for value in row_of(node))
    return known.get(id(node), node)


def _file(name: str, rank: int, row: Any) -> str:
    if row is None:
        return f"{name}_{rank}.pt"
    if (written := row["serialization_format"]["type"]) not in _READ:
        raise UnsupportedContainerError(f"The item {name!r} is written as {written}; {', '.join(_READ)} are read.")
    path: str = row["file_path"]
    return path


def _places(item: Row | None) -> Places:
    """What metadata.pkl says of the tensors of one item; nothing of an item that it does not describe."""
    every: dict[Where, Sequence[Row]] = {}
    for text, rows in (item or {}).get("nested_path_to_metadata", {}).items():
        try:
            path = json.loads(text) if isinstance(text, str) and _PATH.fullmatch(text) else None
        except (ValueError, RecursionError):
            path = None
        if not isinstance(path, list) or not path or not all(type(part) in (str, int) for part in path):
            raise DamagedFileError(f"{ITEM_METADATA} has a path that cannot be read.")
        every[tuple(path)] = rows
        every.setdefault((".".join(map(str, path)),), rows)  # as safetensors has it

    def shares(where: Where, entries: Sequence[tuple[int, Entry]]) -> tuple[Sizes, list[Piece]] | None:
        if (rows := every.get(where)) is None:
            return None
        pieces, shapes = list[Piece](), set[Sizes]()
        for rank, entry in entries:
            try:
                shape, found = _boxes(rows, rank, entry)
            except (AttributeError, KeyError, IndexError, TypeError, ValueError, TensorError):
                raise PartError(f"{dotted(where)!r} of rank {rank} is not what {ITEM_METADATA} says of it.") from None
            shapes.add(shape)
            pieces += found
        if len(shapes) > 1:
            raise PartError(f"{ITEM_METADATA} gives {dotted(where)!r} several shapes.")
        alike = [(piece.rank, piece.entry) for piece in pieces] == entries and all(piece.sizes == shape for piece in pieces)
        return None if alike else (shape, pieces)

    return shares


def _boxes(rows: Sequence[Row], rank: int, entry: Entry) -> tuple[Sizes, list[Piece]]:
    """The whole shape, and the boxes that one rank holds."""
    packed, *_ = (row["sharding_metadata"] for row in rows if rank in row["ranks"])
    kind, data = packed["type"], packed["data"]
    shape = _sizes(data["global_shape"])
    if prod(shape) > MAX_ELEMENTS or DTYPES[data["dtype"].removeprefix("torch.")] is not entry.dtype:
        raise ValueError("another dtype or an impossible shape")
    if kind == "default_tensor_v1":
        boxes = zip(data["global_offsets"], data["local_offsets"], data["local_sizes"], strict=True)
        return shape, [_view(rank, entry, _sizes(at), _sizes(local), _sizes(sizes)) for at, local, sizes in boxes]
    if kind != "DTensorShardingMetadata":
        raise ValueError(kind)
    mesh = data["mesh_spec"]
    sizes, ranks = _sizes(mesh["mesh_shape"]), _sizes(mesh["mesh_data"])
    placements = [Placement(_KINDS[row["type"]], row.get("dim", 0), row.get("split_factor", 1)) for row in data["placements"]]
    if len(placements) != len(sizes) or prod(sizes) != len(ranks):
        raise ValueError("placements that the mesh does not have")
    position = ranks.index(rank)
    coordinate = tuple(position // prod(sizes[dim + 1 :]) % size for dim, size in enumerate(sizes))
    at, box = box_at(shape, sizes, placements, coordinate)
    if box != entry.shape:
        raise ValueError("another shape")
    return shape, [_view(rank, entry, at, (0,) * len(shape), box)]


def _view(rank: int, entry: Entry, at: Sizes, local: Sizes, sizes: Sizes) -> Piece:
    """A box of the whole that is a box of what one rank holds."""
    inside = all(start + size <= there for start, size, there in zip(local, sizes, entry.shape, strict=True))
    if len(at) != len(entry.shape) or not inside:
        raise ValueError("another shape, or more than is there")
    offset = entry.offset + sum(start * step for start, step in zip(local, entry.stride, strict=True))
    return Piece(at, entry if sizes == entry.shape else replace(entry, shape=sizes, offset=offset), rank)


def _sizes(row: Any) -> Sizes:
    if not isinstance(row, tuple) or not all(type(size) is int and 0 <= size < 1 << 62 for size in row):
        raise ValueError("no sizes")
    return row
