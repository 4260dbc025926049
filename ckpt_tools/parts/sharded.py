"""sharded: one flat state dict in several files, and an index, *.index.json, that says which tensor is where; or without it.

Source: huggingface_hub's `serialization/_base.py`, `_torch.py`, transformers' `load_sharded_checkpoint`."""

from __future__ import annotations

import json
import math
import re
import shlex
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import replace

from ckpt_tools import limits
from ckpt_tools.errors import (
    ConvertError,
    DamagedFileError,
    MissingFileError,
    NotACheckpointError,
    PartError,
    UnsupportedContainerError,
)
from ckpt_tools.formats import safetensors
from ckpt_tools.formats.base import Keys, Warned, check_text, unique
from ckpt_tools.formats.checkpoint import Checkpoint
from ckpt_tools.formats.single import decode_file
from ckpt_tools.io.parsers import load_json
from ckpt_tools.io.source import Source
from ckpt_tools.io.sources import Files
from ckpt_tools.io.temporaries import SUFFIX
from ckpt_tools.parts.names import ONE_FILE, ShardName, by_rank, check_world, shard_name
from ckpt_tools.text import listed, printable
from ckpt_tools.tree.nodes import Dict, Node, Pair, Storage, as_dict
from ckpt_tools.tree.visit import reachable

ORDER = "ckpt_tools.order"  # in the index's metadata: weight_map is in the state dict's order


# --- reading


def decode(names: Sequence[str], files: Files, *, partial: bool = False) -> Checkpoint:
    """Read an index and the structure of every file that it names, as one checkpoint; no tensor bytes."""
    index = files.open(names[0])
    weight_map, metadata = _read_index(index)
    if files.path == files.folder:
        # the whole models that transformers and diffusers take before an index beside them
        before = {one for one in ONE_FILE if ".safetensors" in one or ".safetensors" not in names[0]} & {*files.names()}
        if others := sorted(before - {*weight_map.values()}):
            what = f"{files.path} holds several checkpoints: {index.path.name}, and {listed(others)} beside its shards."
            raise NotACheckpointError(what, fix=f"Name one of them: {index.path}")
    missing = sorted({*weight_map.values()} - {*files.names()}) if partial else []
    lost = {name: f"in {file}, which is missing" for name, file in weight_map.items() if file in missing}
    weight_map = {name: file for name, file in weight_map.items() if name not in lost}
    if lost and not weight_map:
        raise PartError(f"All shards that {index.path.name} names are missing.", fix="Get them again.")
    shards = {name: _read_shard(name, files) for name in sorted({*weight_map.values()})}
    _check_map(weight_map, _places(shards), shards, index)
    made = _as_one("sharded", shards, files, list(weight_map), metadata)
    made.lost = lost
    return partly(made, missing)


def partly(made: Checkpoint, missing: Collection[str]) -> Checkpoint:
    """A checkpoint of which not all files are there: it says so."""
    if missing:
        count = "1 part is" if len(missing) == 1 else f"{len(missing)} parts are"
        text = f"{count} missing: {listed(list(missing))}; what is whole without them is taken"
        made.warnings.append(Warned("parts-missing", text))
    return made


def renewed(parts: Iterable[Checkpoint], keys: Keys | None = None) -> list[Checkpoint]:
    keys, found = keys or Keys(), list(parts)
    for decoded in found:
        decoded.root = keys.renew(decoded.root)
    return found


def joined(container: str, root: Node, files: Files, parts: Sequence[Checkpoint], metadata: Mapping[str, str]) -> Checkpoint:
    """One Checkpoint of several files. Each warning names its file; twenty at most: a thousand shards may share an oddity."""
    orders = {part.byteorder for part in parts}
    if len(orders) > 1:
        raise UnsupportedContainerError("Some files of the checkpoint are big-endian, others little-endian.")
    warnings = [replace(row, found=f"{part.source.path.name}: {row.found}") for part in parts for row in part.warnings]
    return Checkpoint(
        container, root, files,
        list(dict.fromkeys(name for part in parts for name in part.globals)),
        list(dict.fromkeys(use for part in parts for use in part.unusual)), metadata, warnings[:20],
        sum(part.storage_bytes for part in parts), orders.pop() if orders else "little",
        bool(parts) and all(part.has_checksums for part in parts),
        examined={part.source: part.globals for part in parts if part.is_examined},
    )  # fmt: skip


def _read_index(index: Source) -> tuple[dict[str, str], dict[str, str]]:
    limits.HEADER.check(index.size, f"{index.path} has {index.size} bytes.")
    try:
        content = load_json(index.read(0, index.size), pairs=unique)
        weight_map, metadata = content["weight_map"], content.get("metadata") or {}
        texts = {key: value if isinstance(value, str) else json.dumps(value) for key, value in metadata.items()}
        check_text((*weight_map.values(), *texts.values()))
    except ValueError as error:
        raise DamagedFileError(f"{index.path} cannot be read as JSON.", why=f"{error}.") from None
    except (AttributeError, KeyError, TypeError):
        what = f"{index.path} is not an index: it has no weight_map of names to files, or metadata that is not a map."
        raise DamagedFileError(what) from None
    return weight_map, {key: text for key, text in texts.items() if key not in ("total_size", "total_parameters")}


def _read_shard(name: str, files: Files) -> Checkpoint:
    try:
        decoded = decode_file(files.open(name))
    except MissingFileError as error:
        error.fix = "The index names it: get the missing file again."
        raise
    root = decoded.root
    if type(root) is not Dict or any(type(key) is not str for key, _ in root.items):
        raise DamagedFileError(f"{decoded.source.path} is not a shard: it is not a mapping of names to tensors.")
    return decoded


def _places(shards: Mapping[str, Checkpoint]) -> dict[str, str]:
    places: dict[str, str] = {}
    for file, decoded in shards.items():
        for name in as_dict(decoded.root).named:
            if places.setdefault(name, file) != file:
                raise DamagedFileError(f"The tensor {name!r} is in two shards, {places[name]} and {file}.")
    return places


def _check_map(
    weight_map: Mapping[str, str], places: Mapping[str, str], shards: Mapping[str, Checkpoint], index: Source
) -> None:
    """weight_map says of every tensor where it is, and nothing else. A tied name of a shard need not be in it."""
    for name, file in weight_map.items():
        if (there := places.get(name)) != file:
            raise DamagedFileError(f"The tensor {name!r} is in {there or 'no shard'}; {index.path.name} says {file}.")
    tied = {file: safetensors.aliases_in(decoded.metadata) for file, decoded in shards.items()}
    for name, file in places.items():
        if name not in weight_map and name not in tied[file]:
            raise DamagedFileError(f"{file} holds {name!r}, which {index.path.name} does not list.")


def _as_one(
    container: str, shards: Mapping[str, Checkpoint], files: Files, names: Sequence[str] = (), metadata: Mapping[str, str] = {}
) -> Checkpoint:
    """The shards as one checkpoint; `names` and `metadata` are those of its index."""
    found = renewed(shards.values())
    root = Dict(_ordered(names, found, metadata), ordered=True)
    root.attributes = safetensors.restore_state_dict_metadata(metadata)
    return joined(container, root, files, found, _own_metadata(found, metadata))


def _ordered(names: Sequence[str], shards: Sequence[Checkpoint], metadata: Mapping[str, str]) -> list[Pair]:
    """The items in the index's order. transformers sorts its index, so that one which is sorted and not ours tells no order."""
    items = {name: value for decoded in shards for name, value in as_dict(decoded.root).named.items()}
    if list(names) == sorted(names) and ORDER not in metadata:
        return [*items.items()]
    aliases = safetensors.aliases_in(metadata)
    in_order = dict.fromkeys((*names, *items))
    return safetensors.restore_aliases([(name, items[name]) for name in in_order if name not in aliases], metadata)


def _own_metadata(shards: Sequence[Checkpoint], metadata: Mapping[str, str]) -> dict[str, str]:
    own = (safetensors.ALIASES, safetensors.STATE_DICT_METADATA, ORDER)
    found: dict[str, str] = {}
    for texts in (metadata, *(decoded.metadata for decoded in shards)):
        found |= {key: text for key, text in texts.items() if key not in (*own, *found)}
    return found


# --- shards whose index is gone: their names say how many there are


def read_loose(
    names: Sequence[str], files: Files, *, partial: bool = False, splits: bool = False
) -> tuple[dict[str, Checkpoint], list[str]]:
    """The structure of every shard, in the order of their numbers, and the names of those that are missing."""
    if not splits and any(name.endswith(SUFFIX) for name in files.names()):
        raise PartError(f"{files.folder} has shards without an index, and what an interrupted write left: write it again.")
    said = {name: found for name in names if (found := shard_name(name)) is not None}
    kind = said[names[0]]
    there = by_rank((found.number - 1, name) for name, found in said.items())
    missing = check_world(there, kind.count, lambda rank: kind.shard(rank + 1, kind.count), partial=partial)
    return {there[number]: _read_shard(there[number], files) for number in sorted(there)}, missing


def decode_loose(names: Sequence[str], files: Files, *, partial: bool = False) -> Checkpoint:
    """The shards as one checkpoint, in the order of their numbers."""
    shards, missing = read_loose(names, files, partial=partial)
    _places(shards)
    made = _as_one("sharded", shards, files)
    if not missing:
        fix = printable(f"ckpt repair {shlex.quote(str(files.folder))}")
        text = f"the index of the {len(shards)} shards is missing; all of them are here"
        made.warnings.append(Warned("no-index", text, index_name(names[0]), fix=fix))
    return partly(made, missing)


def index_name(shard: str) -> str:
    said = shard_name(shard)
    assert said is not None, "callers have checked that it is one"
    return said.index


def missing_index(shards: Mapping[str, Checkpoint]) -> bytes:
    """The index of the shards, as JSON: `ckpt repair FOLDER` puts it beside them."""
    places = _places(shards)
    numbers = {name: number for number, name in enumerate(places)}
    rows = (row for decoded in shards.values() for row in safetensors.aliases_in(decoded.metadata).items())
    aliases = {name: {"of": row["of"], "index": numbers[name]} for name, row in rows}
    metadata = {safetensors.ALIASES: json.dumps(aliases, separators=(",", ":"))} if aliases else {}
    total = sum(decoded.storage_bytes for decoded in shards.values())
    return index_text({name: file for name, file in places.items() if name not in aliases}, total, metadata)


# --- a model in several GGUF files, each of which says its number and their count


def decode_splits(names: Sequence[str], files: Files) -> Checkpoint:
    from ckpt_tools.formats.frameworks import gguf

    found, _ = read_loose(names, files, splits=True)
    for number, (name, decoded) in enumerate(found.items()):
        said = [decoded.metadata.get(key, "?")[:9] for key in ("split.no", "split.count")]
        if decoded.container != "gguf" or said != [str(number), str(len(found))]:
            raise PartError(
                f"{name} is not number {number + 1} of {len(found)}: it calls itself {said[0]} (from 0) of {said[1]}."
            )
    _places(found)
    made = _as_one("gguf", found, files)
    types = {key: kind for key, kind in gguf.types_in(made.metadata).items() if not key.startswith("split.")}
    texts = {key: text for key, text in made.metadata.items() if not key.startswith("split.") and key != safetensors.GGUF_TYPES}
    made.metadata = texts | ({safetensors.GGUF_TYPES: json.dumps(types, separators=(",", ":"))} if types else {})
    made.encodings = {name: kind for part in found.values() for name, kind in part.encodings.items()}
    made.warnings = [row for row in made.warnings if "quantised" not in row.found] + gguf.stored_types(made.encodings)
    return made


# --- laying out


SAFETENSORS, TORCH = ShardName("model", ".safetensors"), ShardName("pytorch_model", ".bin")


def split(sizes: Iterable[tuple[str, int]], limit: int) -> list[list[str]]:
    """Names in order, as many to a shard as fit; one that is larger than the limit alone has a shard to itself."""
    shards: list[list[str]] = []
    room = -1
    for name, size in sizes:
        if size > room:
            shards.append([])
            room = limit
        shards[-1].append(name)
        room -= size
    return shards or [[]]


def index_text(weight_map: Mapping[str, str], total_size: int, metadata: Mapping[str, str]) -> bytes:
    content = {"metadata": {"total_size": total_size, ORDER: "weight_map", **metadata}, "weight_map": dict(weight_map)}
    try:
        text = (json.dumps(content, indent=2, ensure_ascii=False) + "\n").encode("utf-8")
    except UnicodeEncodeError:
        raise ConvertError("A tensor's name holds a lone surrogate, which an index cannot.") from None
    if len(text) > limits.HEADER.value:
        raise ConvertError(f"The index would take {len(text)} bytes; {limits.HEADER.value} is the limit.")
    return text


def storage_groups(items: Sequence[tuple[str, Node]]) -> list[tuple[list[str], int]]:
    """Names that share storages, directly or through others, with the bytes of those: torch shards keep them together."""
    owner: dict[int, int] = {}
    groups: dict[int, tuple[list[str], dict[int, int]]] = {}
    for number, (name, node) in enumerate(items):
        storages = {id(part): part.nbytes for part in reachable(node) if type(part) is Storage}
        into = min((owner[key] for key in storages if key in owner), default=number)
        names, sizes = groups.setdefault(into, ([], {}))
        for other in sorted({owner[key] for key in storages if key in owner} - {into}):
            more_names, more_sizes = groups.pop(other)
            names += more_names
            storages |= more_sizes
        names.append(name)
        sizes |= storages
        owner.update(dict.fromkeys(storages, into))
    return [(names, sum(sizes.values())) for names, sizes in groups.values()]


def parse_size(text: str | int) -> int:
    """A size such as "5GB" (of 1000s, as Hugging Face counts) or "5GiB" (of 1024s), or a number of bytes."""
    size: float = math.nan
    if isinstance(text, int):
        size = text
    elif found := re.fullmatch(r"(\d+(?:\.\d*)?|\.\d+) *(?:([KMGT])(I?))?B?", text.strip().upper(), re.ASCII):
        number, prefix, binary = found.groups()
        size = float(number) * (1024 if binary else 1000) ** (" KMGT".index(prefix or " "))
    if not 1 <= size < 1 << 63:
        raise ValueError(text)
    return int(size)
