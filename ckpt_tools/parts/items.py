"""A folder of torch_checkpointing: a file for each item and rank, and a pickle of plain dicts that says how tensors were cut.

    metadata.pkl          MUST  version, world_size; of each item that was cut {path of a tensor: [{sharding_metadata, ranks}]}
    model_0.pt ...        MUST  the item `model` of rank 0: DTensors, which say their place themselves, or plain tensors, whose
                                place only metadata.pkl tells
    step_0.pt ...         MAY   items that metadata.pkl does not describe; every rank has the whole

Source: torch_checkpointing 0.1 (distributed_metadata.py, dtensor_metadata.py, default_metadata.py, checkpoint_layout.py).
"""

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
from ckpt_tools.parts.merge import Piece, merged
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


def decode(names: Sequence[str], files: Files) -> Checkpoint:
    """Read every item's files and put its tensors together; where one of the files is named, its item is the whole tree."""
    described, world = _described(decode_file(files.open(ITEM_METADATA)).root)
    found = _files_of(described, files.names(), world)
    groups = {name: Group(f"{name}_", names_of, world, tuple(names_of.values())) for name, names_of in found.items()}
    if files.path != files.folder:
        only = next(name for name, group in groups.items() if files.path.name in group.names.values())
        return rank_files.merge(groups[only], files, places=_places(described.get(only)))
    parts = {name: rank_files.merge(group, files, places=_places(described.get(name))) for name, group in groups.items()}
    keys = Keys()
    root = Dict([(name, keys.renew(part.root)) for name, part in parts.items()])

    def compare() -> None:
        for part in parts.values():
            part.locate()

    return merged(rank_files.CONTAINER, root, files, list(parts.values()), compare)


def describes(path: Path, group: Group) -> bool:
    """Whether the metadata.pkl beside a file describes the item that the file's name says it is a part of."""
    with contextlib.closing(Files(path, path.parent)) as files:
        about = files.open(ITEM_METADATA)
        if not describes_items(about.read(0, min(HEAD, about.size))):
            return False
        described, world = _described(decode_file(about).root)
        found = _files_of(described, files.names(), world)
    item = next((item for item, files_of in found.items() if path.name in files_of.values()), None)
    return f"{item}_" == group.stem


# --- metadata.pkl


def _described(root: Node) -> tuple[dict[str, Row], int]:
    """What metadata.pkl says of each item, and how many ranks there were."""
    content = _python(root, _LEVELS, {})  # a few levels, since that is all that is asked for
    if not isinstance(content, dict) or not isinstance(content.get("metadata"), dict):
        raise DamagedFileError(f"{ITEM_METADATA} does not describe items.")
    if content.get("version") != _VERSION:
        raise UnsupportedContainerError(
            f"{ITEM_METADATA} is of version {content.get('version')!r}; {_VERSION!r} is read.",
            fix="Load it with torch_checkpointing, and save it again.",
        )
    said, items = content.get("world_size"), content["metadata"]
    world = said if type(said) is int and 0 < said <= MOST_RANKS else 0
    good = world > 0
    for key, row in items.items():
        layouts = row.get("rank_to_layout_info") if isinstance(row, dict) else None
        good = good and type(key) is str and isinstance(layouts, dict) and set(layouts) == set(range(world))
        good = good and isinstance(row.get("nested_path_to_metadata"), dict)
    if not good:
        raise DamagedFileError(f"{ITEM_METADATA} has an item whose ranks or tensors are not described.")
    return items, world


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


def _files_of(described: Mapping[str, Row], names: Sequence[str], world: int) -> dict[str, dict[int, str]]:
    """The files of each item by rank: where metadata.pkl says, else by the item's name."""
    found = {}
    for name, item in described.items():
        rows = {rank: item["rank_to_layout_info"][rank] for rank in range(world)}
        wanted = {rank: _file(name, rank, row) for rank, row in rows.items()}
        found[name] = {rank: file for rank, file in wanted.items() if "/" in file or file in names}
        if not found[name]:
            raise PartError(f"No file of the item {name!r} is there.", why=f"{ITEM_METADATA} describes {world} of them.")
    for stem, group in item_groups(names).items():
        if stem not in found and len(group) == world:
            found[stem] = group
    return found


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
        shares, shapes = [], set()
        for rank, entry in entries:
            try:
                shape, found = _boxes(rows, rank, entry)
            except (AttributeError, KeyError, IndexError, TypeError, ValueError, TensorError):
                raise PartError(f"{name!r} of rank {rank} is not what {ITEM_METADATA} says of it.") from None
            shapes.add(shape)
            shares += found
        if len(shapes) != 1:
            raise PartError(f"{ITEM_METADATA} gives {name!r} several shapes.")
        whole = shapes.pop()
        own = [entry for _, entry in entries]
        alike = [share.entry for share in shares] == own and all(share.sizes == whole for share in shares)
        return None if alike else (whole, shares)

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
    """A box of what one rank holds."""
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
