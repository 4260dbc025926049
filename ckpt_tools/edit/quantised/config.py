"""What config.json says of the quantised weights beside it: `quantization_config`, as transformers and others write it.

It settles what shapes leave open, the size of a block above all. Sources: transformers/utils/quantization_config.py,
compressed_tensors/quantization/quant_config.py.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass, field, replace
from typing import Any

from ckpt_tools import limits
from ckpt_tools.errors import ConvertError, NotACheckpointError
from ckpt_tools.formats.checkpoint import Checkpoint
from ckpt_tools.io.parsers import load_json
from ckpt_tools.io.source import Address, Source
from ckpt_tools.io.sources import Files
from ckpt_tools.parts.open import open_source

CONFIG = "config.json"
OF_QUANTISED = frozenset(("quantize_config.json", "quant_config.json", "hf_quant_config.json"))  # GPTQ's, AWQ's, ModelOpt's
# MLX's, which may have another meaning elsewhere; transformers'; what compressed-tensors called it before
KEYS = ("quantization", "quantization_config", "compression_config")
COMFY_LAYERS = "_quantization_metadata"


@dataclass(frozen=True, slots=True)
class Config:
    """What is said; None or empty for what is not."""

    block: tuple[int, int] | None = None
    bits: int | None = None
    group: int | None = None
    zeros_as_they_are: bool | None = None
    variant: str = ""
    metadata: Mapping[str, str] = field(default_factory=dict)  # of a safetensors file
    mode: str = ""  # MLX's
    layers: Mapping[str, Config] = field(default_factory=dict)  # MLX's, by the path of the module


def read_config(checkpoint: Checkpoint) -> Config:
    """The config beside a checkpoint; one that says nothing where there is none."""
    source, said = None, Config()
    with suppress(NotACheckpointError):
        source = _beside(checkpoint)
    if source is not None:
        try:
            said = config_of(_read(source))
        finally:
            if not isinstance(checkpoint.source, Files):
                source.close()
    return replace(said, metadata=checkpoint.metadata)


def plain_config(source: Source) -> bytes | None:
    """A config.json without what it says of quantised weights; None where it says nothing."""
    content = _read(source)
    places = list(_places(content))
    if not places:
        return None
    for holder, key in places:
        del holder[key]
    return (json.dumps(content, indent=2, ensure_ascii=False) + "\n").encode("utf-8", "surrogatepass")


def plain_metadata(metadata: Mapping[str, str]) -> dict[str, str]:
    """A header's metadata without what it says of quantised weights: ComfyUI's layers, torchao's names with a text for each."""
    names = metadata.get("tensor_names", "") if any('"_type"' in text for text in metadata.values()) else ""
    gone = (COMFY_LAYERS, "tensor_names") if names else (COMFY_LAYERS,)
    return {key: text for key, text in metadata.items() if key not in gone and f'"{key}"' not in names}


def _places(content: Any) -> Iterator[tuple[dict[str, Any], str]]:
    """Where weights are described: dicts with a key in each, also in the configs of a model's parts."""
    if isinstance(content, dict):
        for key in KEYS:
            if key in content and (key != KEYS[0] or (isinstance(content[key], dict) and "bits" in content[key])):
                yield content, key
        for inner in content.values():
            yield from _places(inner)


def _read(source: Source) -> Any:
    limits.HEADER.check(source.size, f"{source.path} has {source.size} bytes.")
    try:
        return load_json(source.read(0, source.size))
    except ValueError as error:
        why = f"{error}."
        raise ConvertError(f"{source.path} is not JSON, and would say how the weights are quantised.", why=why) from None


def _beside(checkpoint: Checkpoint) -> Source | None:
    """config.json in the checkpoint's folder, or beside its file."""
    source = checkpoint.source if checkpoint.packed is None else checkpoint.packed.folder
    if isinstance(checkpoint.path, Address):
        return open_source(checkpoint.path.beside(CONFIG))
    if isinstance(source, Files):
        return source.open(CONFIG) if CONFIG in source.names() else None
    if checkpoint.packed is not None:
        return None
    path = checkpoint.path.parent / CONFIG
    return Source(path) if path.is_file() else None


def config_of(content: Any) -> Config:
    """What the content of a config.json says; one that contradicts itself says nothing about that."""
    found = next((holder[key] for holder, key in _places(content) if isinstance(holder[key], dict)), None)
    if found is None:
        return Config()
    weights = list(_weights(found))
    method = str(found.get("quant_method") or "")
    layout = found.get("checkpoint_format") or (found.get("format") if method in ("gptq", "awq") else None)  # GPTQModel's words
    version = str(found.get("version") or "") if method == "awq" else ""  # elsewhere it is that of the library
    layers = {path: config_of({KEYS[1]: said}) for path, said in found.items() if isinstance(said, dict) and "bits" in said}
    return Config(
        block=_pair(found.get("weight_block_size")) or _one([_pair(row.get("block_structure")) for row in weights]),
        bits=_whole(found.get("bits")) or _one([_whole(row.get("num_bits")) for row in weights]),
        group=_whole(found.get("group_size")) or _one([_whole(row.get("group_size")) for row in weights]),
        zeros_as_they_are=layout == "gptq_v2" if layout else None, variant=str(layout or version).lower(),
        mode=str(found.get("mode") or ""), layers=layers,
    )  # fmt: skip


def _weights(found: dict[str, Any]) -> Iterator[dict[str, Any]]:
    groups = found.get("config_groups")
    for group in groups.values() if isinstance(groups, dict) else ():
        if isinstance(group, dict) and isinstance(group.get("weights"), dict):
            yield group["weights"]


def _one(found: list[Any]) -> Any:
    return found[0] if found and all(value == found[0] for value in found) else None


def _whole(value: Any) -> int | None:
    return value if type(value) is int and value > 0 else None


def _pair(value: Any) -> tuple[int, int] | None:
    return tuple(value) if isinstance(value, list) and len(value) == 2 and all(map(_whole, value)) else None
