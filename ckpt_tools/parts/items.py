"""items: a folder of torch_checkpointing: a file for each item and rank, and metadata.pkl, which says how tensors were cut.

Source: torch_checkpointing 0.1 (distributed_metadata.py, dtensor_metadata.py, default_metadata.py, checkpoint_layout.py)."""

from __future__ import annotations

import contextlib
import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import replace
from math import prod
from pathlib import Path
from typing import Any

from ckpt_tools.errors import DamagedFileError, PartError, TensorError, UnsupportedContainerError
from ckpt_tools.formats.base import Keys
from ckpt_tools.formats.checkpoint import Checkpoint
from ckpt_tools.formats.single import HEAD, decode_file
from ckpt_tools.io.sources import Files
from ckpt_tools.parts import rank_files
from ckpt_tools.parts.merge import Merger, Piece, merged
from ckpt_tools.parts.names import ITEM_METADATA, Group, describes_items, item_groups
from ckpt_tools.parts.rank_parts import MOST_RANKS, Placement, box_at, row_of
from ckpt_tools.tree.dtypes import DTYPES
from ckpt_tools.tree.nodes import MAX_ELEMENTS, Dict, Entry, List, Node, Where

_VERSION = "2.0"
_LEVELS = 12
_KINDS: dict[str, Any] = {"Shard": "shard", "StridedShard": "strided", "Replicate": "replicate"}
_READ = ("TorchSerialization", "SafetensorsSerialization")
Sizes = tuple[int, ...]
Row = Mapping[str, Any]


def decode(names: Sequence[str], files: Files, *, partial: bool = False) -> Checkpoint:
    """Read every item's files and put its tensors together; where one of the files is named, its item is the whole tree."""
    (described, groups), merger, keys = _items_of(files), Merger(Keys(), partial=partial), Keys()
    if files.path != files.folder:
        only = next(name for name, group in groups.items() if files.path.name in group.every)
        return rank_files.merge(groups[only], files, merger, _places(described.get(only)))
    parts = [rank_files.merge(group, files, merger, _places(described.get(name)), (name,)) for name, group in groups.items()]
    root = Dict([(name, keys.renew(part.root)) for name, part in zip(groups, parts, strict=True)])
    return merged(rank_files.CONTAINER, root, files, parts, merger)


def describes(path: Path, group: Group) -> bool:
    with contextlib.closing(Files(path, path.parent)) as files:
        about = files.open(ITEM_METADATA)
        if not describes_items(about.read(0, min(HEAD, about.size))):
            return False
        _, groups = _items_of(files)
    return group.stem == next((own.stem for own in groups.values() if path.name in own.every), None)


# --- metadata.pkl


def _items_of(files: Files) -> tuple[dict[str, Row], dict[str, Group]]:
    """What metadata.pkl says of each item, and the files of each: where it says, else by the item's name."""
    content = _python(decode_file(files.open(ITEM_METADATA)).root, _LEVELS, {})  # no more levels are asked for
    if not isinstance(content, dict) or not isinstance(content.get("metadata"), dict):
        raise DamagedFileError(f"{ITEM_METADATA} does not describe items.")
    if content.get("version") != _VERSION:
        raise UnsupportedContainerError(
            f"{ITEM_METADATA} is of version {content.get('version')!r}; {_VERSION!r} is read.",
            fix="Load it with torch_checkpointing, and save it again.",
        )
    described, names = content["metadata"], files.names()
    world: Any = content.get("world_size")
    good, found = type(world) is int and 0 < world <= MOST_RANKS, dict[str, dict[int, str]]()
    for name, item in described.items():
        layouts = item.get("rank_to_layout_info") if isinstance(item, dict) else None
        good = good and type(name) is str and isinstance(layouts, dict) and set(layouts) == set(range(world))
        if not good or layouts is None or not isinstance(item.get("nested_path_to_metadata"), dict):
            raise DamagedFileError(f"{ITEM_METADATA} has an item whose ranks or tensors are not described.")
        wanted = {rank: _file(name, rank, layouts[rank]) for rank in range(world)}
        found[name] = {rank: file for rank, file in wanted.items() if "/" in file or file in names}
        if not found[name]:
            raise PartError(f"No file of the item {name!r} is there.", why=f"{ITEM_METADATA} describes {world} of them.")
    if not good:
        raise DamagedFileError(f"{ITEM_METADATA} does not say how many ranks there were.")
    others = {stem: group for stem, group in item_groups(names).items() if stem not in found and len(group) == world}
    groups = {name: Group(f"{name}_", own, world, tuple(own.values())) for name, own in (found | others).items()}
    return described, groups


def _python(node: Node, levels: int, known: dict[int, Any]) -> Any:
    """Dicts, lists and tuples of the tree as Python's own; what is referred to again and again is made once."""
    if levels < 0:
        raise DamagedFileError(f"{ITEM_METADATA} is nested deeper than what it describes.")
    if id(node) in known:
        return known[id(node)]
    if type(node) is Dict:
        known[id(node)] = {key: _python(value, levels - 1, known) for key, value in node.items if type(key) in (str, int)}
    elif type(node) in (List, tuple):
        known[id(node)] = tuple(_python(value, levels - 1, known) for value in row_of(node))
    return known.get(id(node), node)


def _file(name: str, rank: int, row: Any) -> str:
    if row is None:
        return f"{name}_{rank}.pt"
    path, kind = row.get("file_path"), row.get("serialization_format")
    written = kind.get("type") if isinstance(kind, dict) else None
    if type(path) is not str:
        raise DamagedFileError(f"{ITEM_METADATA} does not say where the item {name!r} of rank {rank} is.")
    if written not in _READ:
        raise UnsupportedContainerError(f"The item {name!r} is written as {written}; {', '.join(_READ)} are read.")
    return path


# --- where plain tensors lie


def _places(item: Row | None) -> rank_files.Places:
    """What metadata.pkl says of the tensors of one item; nothing of an item that it does not describe."""
    every: dict[Where, Sequence[Row]] = {}
    for text, rows in (item or {}).get("nested_path_to_metadata", {}).items():
        where = _where(text)
        every[where] = rows
        every.setdefault((".".join(map(str, where)),), rows)  # as safetensors has it

    def shares(where: Where, entries: Sequence[tuple[int, Entry]]) -> tuple[Sizes, list[Piece]] | None:
        rows, name = every.get(where), ".".join(map(str, where))
        if rows is None:
            return None
        pieces, shapes = list[Piece](), list[Sizes]()
        for rank, entry in entries:
            try:
                shape, found = _boxes(rows, rank, entry)
            except (AttributeError, KeyError, IndexError, TypeError, ValueError, TensorError):
                raise PartError(f"{name!r} of rank {rank} is not what {ITEM_METADATA} says of it.") from None
            shapes.append(shape)
            pieces += found
        if len(set(shapes)) > 1:
            raise PartError(f"{ITEM_METADATA} gives {name!r} several shapes.")
        alike = [(piece.rank, piece.entry) for piece in pieces] == entries and all(piece.sizes == shapes[0] for piece in pieces)
        return None if alike else (shapes[0], pieces)

    return shares


_PATH = re.compile(r"\[.*\]", re.DOTALL)


def _where(text: object) -> Where:
    try:
        path = json.loads(text) if isinstance(text, str) and _PATH.fullmatch(text) else None
    except (ValueError, RecursionError):
        path = None
    if not isinstance(path, list) or not path or not all(type(part) in (str, int) for part in path):
        raise DamagedFileError(f"{ITEM_METADATA} has a path that cannot be read.")
    return tuple(path)


def _boxes(rows: Sequence[Row], rank: int, entry: Entry) -> tuple[Sizes, list[Piece]]:
    """The whole shape, and the boxes that one rank holds."""
    packed = [row["sharding_metadata"] for row in rows if rank in row["ranks"]][0]  # noqa: RUF015  an IndexError is meant
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
    return shape, [_view(rank, entry, at, (0,) * len(shape), box, whole=True)]


def _view(rank: int, entry: Entry, at: Sizes, local: Sizes, sizes: Sizes, *, whole: bool = False) -> Piece:
    if len(at) != len(entry.shape) or (whole and sizes != entry.shape):
        raise ValueError("another shape")
    if any(start + size > there for start, size, there in zip(local, sizes, entry.shape, strict=True)):
        raise ValueError("more than is there")
    offset = entry.offset + sum(start * step for start, step in zip(local, entry.stride, strict=True))
    return Piece(at, entry if sizes == entry.shape else replace(entry, shape=sizes, offset=offset), rank)


def _sizes(row: Any) -> Sizes:
    if not isinstance(row, tuple) or not all(type(size) is int and 0 <= size < 1 << 62 for size in row):
        raise ValueError("no sizes")
    return row
