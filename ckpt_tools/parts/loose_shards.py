"""Shards whose index is gone. Their names say how many there are: all of them, with names of their own, are the checkpoint.

    model-00001-of-00003.safetensors    MUST  every number up to the count; .bin, .pth and .pt likewise

Reading never writes: `missing_index` makes the index that `ckpt repair FOLDER` puts beside them.
"""

from __future__ import annotations

import json
import shlex
from collections.abc import Mapping, Sequence

from ckpt_tools.errors import PartError
from ckpt_tools.formats import safetensors
from ckpt_tools.formats.base import Decoded, Warned
from ckpt_tools.io.sources import Files
from ckpt_tools.io.temporaries import SUFFIX
from ckpt_tools.parts.names import ShardName, shard_name
from ckpt_tools.parts.sharded import Names, index_text, joined, own_metadata, partly, places_of, read_shard, renewed
from ckpt_tools.text import listed, printable
from ckpt_tools.tree.nodes import Dict, as_dict


def read(names: Sequence[str], files: Files, *, partial: bool = False) -> dict[str, Decoded]:
    """The structure of every shard, in order; no tensor bytes."""
    if any(name.endswith(SUFFIX) for name in files.names()):
        raise PartError(
            f"{files.folder} has shards without an index, and what a write of it left that was interrupted.",
            why="The shards may be those of two checkpoints.", fix="Write it again.",
        )  # fmt: skip
    return {name: read_shard(name, files) for name in complete(names, partial=partial)}


def complete(names: Sequence[str], *, partial: bool) -> list[str]:
    """The shards in order, every number once; with `partial` those that are there."""
    said = [(found.number, name, found) for name in names if (found := shard_name(name)) is not None]
    numbers = {number: name for number, name, _ in said}
    any_one = said[0][2]
    if doubled := [name for number, name, _ in said if numbers[number] != name]:
        raise PartError(f"The shard {doubled[0]} is there twice, under another name.", fix="Remove one of the two.")
    if beyond := [name for number, name, _ in said if not 1 <= number <= any_one.count]:
        raise PartError(f"{listed(beyond)}: a shard of {any_one.count} has another number.", fix="Give it its name back.")
    if (missing := missing_shards(names)) and not partial:
        shown = listed(missing)
        raise PartError(
            f"{len(missing)} of {any_one.count} shards are missing: {shown}.",
            why="There is no index, and the names of the others say so.", fix="Get them again, and the index.", rest=True,
        )  # fmt: skip
    return [numbers[number] for number in sorted(numbers)]


def missing_shards(names: Sequence[str]) -> list[str]:
    """The shards that should be beside these."""
    said = [found for name in names if (found := shard_name(name)) is not None]
    numbers, count = {found.number for found in said}, said[0].count
    return [_names(said[0]).shard(number, count) for number in range(1, count + 1) if number not in numbers]


def _names(said: ShardName) -> Names:
    return Names(said.stem, said.suffix)


def index_name(shard: str) -> str:
    """The name of the index that a shard's siblings should have beside them."""
    said = shard_name(shard)
    assert said is not None, "callers have checked that it is one"
    return _names(said).index


def decode(names: Sequence[str], files: Files, *, partial: bool = False) -> Decoded:
    """The shards as one checkpoint, in the order of their numbers."""
    shards = read(names, files, partial=partial)
    places_of(shards)
    found = renewed(shards.values())
    root = Dict([item for decoded in found for item in as_dict(decoded.root).items], ordered=True)
    made = joined("sharded", root, files, found, own_metadata(found, {}))
    if missing := missing_shards([*shards]):
        made.warnings.append(partly(f"{len(missing)} of {len(missing) + len(shards)} shards are", missing))
        return made
    fix = printable(f"ckpt repair {shlex.quote(str(files.folder))}")
    text = f"the index of the {len(shards)} shards is missing; all of them are here"
    made.warnings.append(Warned("no-index", text, index_name(next(iter(shards))), fix=fix))
    return made


def missing_index(shards: Mapping[str, Decoded]) -> bytes:
    """The index of the shards, as JSON."""
    places = places_of(shards)
    numbers = {name: number for number, name in enumerate(places)}
    rows = (row for decoded in shards.values() for row in safetensors.aliases_in(decoded.metadata).items())
    aliases = {name: {"of": row["of"], "index": numbers[name]} for name, row in rows}
    metadata = {safetensors.ALIASES: json.dumps(aliases, separators=(",", ":"))} if aliases else {}
    total = sum(decoded.storage_bytes for decoded in shards.values())
    return index_text({name: file for name, file in places.items() if name not in aliases}, total, metadata)
