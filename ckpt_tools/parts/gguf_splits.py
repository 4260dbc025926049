"""A model in several GGUF files, `NAME-00001-of-00003.gguf`, each of which says its number and their count."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence

from ckpt_tools import limits
from ckpt_tools.errors import PartError
from ckpt_tools.formats.base import Decoded
from ckpt_tools.formats.frameworks import gguf
from ckpt_tools.formats.safetensors import GGUF_TYPES
from ckpt_tools.io.output import Source
from ckpt_tools.io.sources import Files
from ckpt_tools.parts import loose_shards
from ckpt_tools.parts.sharded import joined, own_metadata, partly, places_of, read_shard, renewed
from ckpt_tools.tree.nodes import Dict, as_dict


def is_split(source: Source) -> bool:
    """Whether a GGUF says that there are others of its model."""
    with limits.of_file(source.size):
        return _count(gguf.decode(source)) > 1


def _count(decoded: Decoded) -> int:
    """How many files the model is in, as one of them says."""
    text = decoded.metadata.get("split.count", "1")
    return int(text) if text.isascii() and text.isdecimal() and len(text) < 7 else 1


def decode(names: Sequence[str], files: Files, *, partial: bool = False) -> Decoded:
    """The files of one model as one checkpoint, in their order."""
    found = {name: read_shard(name, files) for name in loose_shards.complete(names, partial=partial)}
    missing = loose_shards.missing_shards([*found])
    for number, (name, decoded) in enumerate(found.items()):
        said = decoded.metadata.get("split.no", str(number))
        if decoded.container != "gguf" or (not missing and (said != str(number) or _count(decoded) != len(found))):
            raise PartError(
                f"{name} is not number {number + 1} of {len(found)}, as its name says.",
                why=f"It calls itself number {said[:9]}, counted from 0, of {_count(decoded)}.",
            )
    places_of(found)
    parts = renewed(found.values())
    root = Dict([item for part in parts for item in as_dict(part.root).items], ordered=True)
    texts = _without_splits(own_metadata(parts, {}))
    made = joined("gguf", root, files, parts, texts)
    made.encodings = {name: kind for part in parts for name, kind in part.encodings.items()}
    made.warnings = [row for row in made.warnings if "quantised" not in row.found] + gguf.stored_types(made.encodings)
    if missing:
        made.warnings.append(partly(f"{len(missing)} of {len(missing) + len(found)} files are", missing))
    return made


def _without_splits(metadata: Mapping[str, str]) -> dict[str, str]:
    """The keys of a model that is whole."""
    kept = {key: kind for key, kind in gguf.types_in(metadata).items() if not key.startswith("split.")}
    texts = {key: text for key, text in metadata.items() if not key.startswith("split.") and key != GGUF_TYPES}
    return texts | ({GGUF_TYPES: json.dumps(kept, separators=(",", ":"))} if kept else {})
