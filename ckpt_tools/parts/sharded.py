"""sharded: one flat state dict in several files, and an index that says which tensor is where. Hugging Face's layout.

    model.safetensors.index.json        MUST  {"metadata": {...}, "weight_map": {NAME: FILE}}
    model-00001-of-00003.safetensors    MUST  the files that weight_map names, in the index's folder
    pytorch_model.bin.index.json, pytorch_model-00001-of-00003.bin    the same with torch-zip files

Source: huggingface_hub's `serialization/_base.py` and `_torch.py` (`split_torch_state_dict_into_shards`), transformers'
`load_sharded_checkpoint`. A tied name of a safetensors shard stands in that shard's metadata, not in weight_map: other
loaders look for a tensor of its own under every name of weight_map. The index repeats it, with its place among all names.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from ckpt_tools import limits
from ckpt_tools.errors import ConvertError, DamagedFileError, NotACheckpointError, PartError, UnsupportedContainerError
from ckpt_tools.formats import safetensors
from ckpt_tools.formats.base import Decoded, Keys, Warned, repeated
from ckpt_tools.formats.single import decode_file
from ckpt_tools.io.output import Source
from ckpt_tools.io.parsers import load_json
from ckpt_tools.io.sources import Files
from ckpt_tools.parts.names import taken_before
from ckpt_tools.pickling.torch_objects import unusual_tensor
from ckpt_tools.text import listed
from ckpt_tools.tree.nodes import Dict, Entry, Node, Object, Pair, Storage, as_dict
from ckpt_tools.tree.visit import reachable

ORDER = "ckpt_tools.order"  # in the index's metadata: weight_map is in the state dict's order


# --- reading


def decode(names: Sequence[str], files: Files, *, partial: bool = False) -> Decoded:
    """Read an index and the structure of every file that it names, as one checkpoint; no tensor bytes."""
    index = files.open(names[0])
    before = taken_before(names[0], files.names()) if files.path == files.folder else []
    weight_map, metadata = _read_index(index)
    if others := sorted({*before} - {*weight_map.values()}):
        raise NotACheckpointError(
            f"{files.path} holds several checkpoints: {index.path.name}, and {listed(others)} beside its shards.",
            why="transformers and diffusers take the one file before an index.",
            fix=f"Name one of them: {index.path}",
        )
    missing = sorted({*weight_map.values()} - {*files.names()}) if partial else []
    lost = [(name, f"in {file}, which is missing") for name, file in weight_map.items() if file in missing]
    weight_map = {name: file for name, file in weight_map.items() if file not in missing}
    if lost and not weight_map:
        raise PartError(f"All shards that {index.path.name} names are missing.", fix="Get them again.")
    shards = {name: read_shard(name, files) for name in sorted({*weight_map.values()})}
    places = places_of(shards)
    _check_map(weight_map, places, shards, index)
    found = renewed(shards.values())
    root = Dict(_ordered(weight_map, found, metadata), ordered=True)
    root.attributes = safetensors.restore_state_dict_metadata(metadata)
    made = joined("sharded", root, files, found, own_metadata(found, metadata))
    if missing:
        made.lost, made.warnings = lost, [*made.warnings, partly(f"{len(missing)} shards are", missing)]
    return made


def partly(what: str, missing: Sequence[str]) -> Warned:
    """That not all files of a checkpoint are there, and what is whole is taken."""
    return Warned("parts-missing", f"{what} missing: {listed(missing)}; what is whole without them is taken")


def renewed(parts: Iterable[Decoded], keys: Keys | None = None) -> list[Decoded]:
    """The parts, each storage under a key that no other part's has."""
    keys, found = keys or Keys(), list(parts)
    for decoded in found:
        decoded.root = keys.renew(decoded.root)
    return found


def joined(container: str, root: Node, files: Files, parts: Sequence[Decoded], metadata: Mapping[str, str]) -> Decoded:
    """One Decoded of several files."""
    orders = {part.byteorder for part in parts}
    if len(orders) > 1:
        raise UnsupportedContainerError("Some files of the checkpoint are big-endian, others little-endian.")
    return Decoded(
        container, root, files,
        list(dict.fromkeys(name for part in parts for name in part.globals)),
        list(dict.fromkeys(use for part in parts for use in part.unusual)), metadata, _warnings(parts),
        sum(part.storage_bytes for part in parts), orders.pop() if orders else "little",
        bool(parts) and all(part.has_checksums for part in parts),
        examined={part.source: part.globals for part in parts if part.is_examined},
    )  # fmt: skip


def _warnings(parts: Sequence[Decoded]) -> list[Warned]:
    """Warnings with the file that each is about, twenty at most: a thousand shards may share an oddity."""
    found = [replace(row, found=f"{part.source.path.name}: {row.found}") for part in parts for row in part.warnings]
    return found[:20]


def _read_index(index: Source) -> tuple[dict[str, str], dict[str, str]]:
    """weight_map, and the metadata as text."""
    limits.HEADER.check(index.size, f"The index has {index.size} bytes.")
    try:
        content = load_json(index.read(0, index.size), pairs=_unique)
    except ValueError as error:
        raise DamagedFileError(f"{index.path} is not an index: it is not JSON.", why=f"{error}.") from None
    weight_map = content.get("weight_map") if isinstance(content, dict) else None
    if not isinstance(weight_map, dict) or not all(isinstance(name, str) for name in weight_map.values()):
        raise DamagedFileError(f"{index.path} is not an index: it has no weight_map of names to files.")
    metadata = content.get("metadata") or {}
    if not isinstance(metadata, dict):
        raise DamagedFileError(f"{index.path} has metadata that is not a map.")
    known = ("total_size", "total_parameters")
    texts = {key: value if isinstance(value, str) else json.dumps(value) for key, value in metadata.items() if key not in known}
    for text in (*weight_map, *weight_map.values(), *texts, *texts.values()):
        safetensors.no_surrogates(text)
    return weight_map, texts


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) != len(pairs):
        raise DamagedFileError(f"The index has {repeated(pairs)!r} twice.", why="Two programs would read two different files.")
    return found


def read_shard(name: str, files: Files) -> Decoded:
    """One shard: a file with a flat state dict."""
    try:
        decoded = decode_file(files.open(name))
    except NotACheckpointError as error:
        error.fix = f"{files.path} names it: get the missing file again."
        raise
    root = decoded.root
    if type(root) is not Dict or any(type(key) is not str for key, _ in root.items):
        raise DamagedFileError(
            f"{decoded.source.path} is not a shard: it holds something else than one mapping of names to tensors."
        )
    return decoded


def places_of(shards: Mapping[str, Decoded]) -> dict[str, str]:
    """Name -> the shard that holds it."""
    places: dict[str, str] = {}
    for file, decoded in shards.items():
        for name in as_dict(decoded.root).named:
            if name in places:
                raise DamagedFileError(
                    f"The tensor {name!r} is in two shards, {places[name]} and {file}.",
                    why="They could differ, and another program would take the other one.",
                )
            places[name] = file
    return places


def _check_map(weight_map: Mapping[str, str], places: Mapping[str, str], shards: Mapping[str, Decoded], index: Source) -> None:
    """weight_map says of every tensor where it is, and nothing else. A tied name of a shard need not be in it."""
    for name, file in weight_map.items():
        if name not in places:
            raise DamagedFileError(f"The tensor {name!r} is not in {file}, where {index.path.name} says it is, nor elsewhere.")
        if places[name] != file:
            raise DamagedFileError(f"The tensor {name!r} is in {places[name]}; {index.path.name} says {file}.")
    tied = {file: safetensors.aliases_in(decoded.metadata) for file, decoded in shards.items()}
    for name, file in places.items():
        if name not in weight_map and name not in tied[file]:
            raise DamagedFileError(
                f"{file} holds {name!r}, which {index.path.name} does not list.", why="The index belongs to another checkpoint."
            )


def _ordered(weight_map: Mapping[str, str], shards: Sequence[Decoded], metadata: Mapping[str, str]) -> list[Pair]:
    """The items in the index's order. transformers sorts its index, so that one which is sorted and not ours tells no order."""
    items = {name: value for decoded in shards for name, value in as_dict(decoded.root).named.items()}
    names = list(weight_map)
    if names == sorted(names) and ORDER not in metadata:
        return [*items.items()]
    aliases = safetensors.aliases_in(metadata)
    in_order = [(name, items[name]) for name in names if name not in aliases]
    rest = [(name, value) for name, value in items.items() if name not in weight_map and name not in aliases]
    return safetensors.restore_aliases([*in_order, *rest], metadata) if aliases else [*in_order, *rest]


def own_metadata(shards: Sequence[Decoded], metadata: Mapping[str, str]) -> dict[str, str]:
    """The texts of the index and of the shards; where they differ, the index's."""
    own = (safetensors.ALIASES, safetensors.STATE_DICT_METADATA, ORDER)
    found: dict[str, str] = {}
    for texts in (metadata, *(decoded.metadata for decoded in shards)):
        for key, text in texts.items():
            if key not in own:
                found.setdefault(key, text)
    return found


# --- laying out


@dataclass(slots=True, unsafe_hash=True)
class Names:
    """How the ecosystem calls the files of one kind of shard."""

    stem: str
    suffix: str

    def shard(self, number: int, count: int) -> str:
        """The file of a shard; `number` counts from 1."""
        return f"{self.stem}-{number:05d}-of-{count:05d}{self.suffix}"

    @property
    def index(self) -> str:
        """The file of the index."""
        return f"{self.stem}{self.suffix}.index.json"


SAFETENSORS, TORCH = Names("model", ".safetensors"), Names("pytorch_model", ".bin")


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
    """The index as JSON."""
    content = {"metadata": {"total_size": total_size, ORDER: "weight_map", **metadata}, "weight_map": dict(weight_map)}
    try:
        text = (json.dumps(content, indent=2, ensure_ascii=False) + "\n").encode("utf-8")
    except UnicodeEncodeError:
        raise ConvertError("A tensor's name holds a lone surrogate, which an index cannot.") from None
    if len(text) > limits.HEADER.value:
        raise ConvertError(f"The index would take {len(text)} bytes; {limits.HEADER.value} is the limit.")
    return text


def tensor_bytes(node: Entry | Object) -> int:
    """Bytes of a tensor as an index counts them."""
    if type(node) is Entry:
        return node.nbytes
    unusual = unusual_tensor(node)
    if unusual is not None and unusual.kind == "meta":
        return 0
    return sum({id(part): part.nbytes for part in reachable(node) if type(part) is Storage}.values())


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
