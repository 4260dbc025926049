"""A tree as the files of a sharded checkpoint: which tensor goes into which file, the files' pieces, the index."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from ckpt_tools.edit import flatten
from ckpt_tools.edit.flatten import Flat
from ckpt_tools.edit.metadata import UNEDITED, MetadataEdit
from ckpt_tools.formats import safetensors, sharded
from ckpt_tools.formats.open import tensors_by_name
from ckpt_tools.formats.zip import torch_layout
from ckpt_tools.io.content import Piece
from ckpt_tools.tree.nodes import Dict, Node


@dataclass(frozen=True, slots=True)
class Shards:
    """The files in order, the index's name and text, and what became of ties and values (as when one file is written)."""

    files: list[tuple[str, list[Piece]]]
    index_name: str
    index: bytes
    flat: Flat


def safetensors_shards(
    root: Node, limit: int, *, objects: str | None, metadata: Mapping[str, str], edit: MetadataEdit = UNEDITED
) -> Shards:
    """Lay a tree out in safetensors shards of at most `limit` bytes of tensors each.

    Raises:
        ContainerLimitError: as for one safetensors file.
    """
    flat = flatten.flatten(root, objects=objects, metadata=metadata, edit=edit)
    shards = sharded.split([(name, content.length) for name, (_, content) in flat.tensors.items()], limit)
    names, files = sharded.SAFETENSORS, []
    weight_map: dict[str, str] = {}
    order = _with_aliases(list(flat.tensors), flat.aliases)
    homes = {name: number for number, shard in enumerate(shards) for name in shard}
    homes |= {name: homes[row["of"]] for name, row in flat.aliases.items()}
    members: list[list[str]] = [[] for _ in shards]
    for name in order:
        members[homes[name]].append(name)
    said = {key: flat.metadata[key] for key in ("format", *dict(edit.texts)) if key in flat.metadata}
    for number, shard in enumerate(shards):
        file = names.shard(number + 1, len(shards))
        own = {name: {"of": flat.aliases[name]["of"], "index": place}
               for place, name in enumerate(members[number]) if name in flat.aliases}  # fmt: skip
        text = said | ({safetensors.ALIASES: json.dumps(own, separators=(",", ":"))} if own else {})
        files.append((file, safetensors.lay_out({name: flat.tensors[name] for name in shard}, text)))
        weight_map |= dict.fromkeys(shard, file)
    total = sum(content.length for _, content in flat.tensors.values())
    return Shards(files, names.index, sharded.index_text(weight_map, total, _index_metadata(flat)), flat)


def torch_shards(
    root: Node,
    limit: int,
    *,
    objects: str | None,
    metadata: Mapping[str, str],
    trust_crc: bool,
    verify: bool,
    edit: MetadataEdit = UNEDITED,
) -> Shards:
    """Lay a tree out in torch-zip shards; tensors that share a storage stay together, as views on it.

    Raises:
        ContainerLimitError: several state dicts, tensors outside one, objects that are to be kept.
    """
    state_dict, flat = flatten.one_state_dict(root, objects=objects, metadata=metadata, holder="A sharded checkpoint")
    edit.apply(flat.metadata)
    items: list[tuple[str, Node]] = [*tensors_by_name(state_dict.node).items()]
    groups = sharded.storage_groups(items)
    names, homes = sharded.TORCH, _homes(groups, limit)
    trees: dict[str, Dict] = {file: Dict(ordered=True) for file in homes.values()} or {names.shard(1, 1): Dict(ordered=True)}
    for name, node in items:
        trees[homes[name]].items.append((name, node))
    files = [(file, torch_layout.lay_out(tree, trust_crc=trust_crc, verify=verify)) for file, tree in trees.items()]
    weight_map = {name: homes[name] for name, _ in items}
    total = sum(size for _, size in groups)
    return Shards(files, names.index, sharded.index_text(weight_map, total, _index_metadata(flat)), flat)


def _homes(groups: Sequence[tuple[Sequence[str], int]], limit: int) -> dict[str, str]:
    """The shard of every name; groups of names stay together."""
    shards = sharded.split([(str(number), size) for number, (_, size) in enumerate(groups)], limit)
    files = ((sharded.TORCH.shard(number + 1, len(shards)), shard) for number, shard in enumerate(shards))
    return {name: file for file, shard in files for group in shard for name in groups[int(group)][0]}


def _with_aliases(names: list[str], aliases: Mapping[str, Mapping[str, Any]]) -> list[str]:
    """The names of tensors and aliases in the state dict's order."""
    for name, row in sorted(aliases.items(), key=lambda item: int(item[1]["index"])):
        names.insert(int(row["index"]), name)
    return names


def _index_metadata(flat: Flat) -> dict[str, str]:
    """What the index says beside the map: values of the checkpoint as text, ties. `format` stands in each shard."""
    return {key: text for key, text in flat.metadata.items() if (key, text) != ("format", "pt")}
