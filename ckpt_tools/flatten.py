"""A tree as one flat state dict: what a safetensors file can hold, with the rest as text in its metadata."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from ckpt_tools import plain
from ckpt_tools.checkpoint import StateDict, find_state_dicts, find_tensors, is_optimizer, is_tensor
from ckpt_tools.containers.safetensors import ALIASES, STATE_DICT_METADATA
from ckpt_tools.errors import ContainerLimitError
from ckpt_tools.numeric import lazy_bits, row_major
from ckpt_tools.plan import Content
from ckpt_tools.transforms import dotted
from ckpt_tools.tree import DROP, Dict, Entry, List, Node, Object, children, component, walk


@dataclass(slots=True)
class Flat:
    """One flat state dict.

    Attributes:
        tensors: name -> (entry, its bytes row-major), without the aliases.
        metadata: text for the header.
        aliases: tied name -> {"of": the name that holds the bytes, "index": its place in the order of names}.
        notes: (code, sentence) for the report. fates: objects that were made plain on the way.
    """

    tensors: dict[str, tuple[Entry, Content]] = field(default_factory=dict)
    metadata: dict[str, str] = field(default_factory=dict)
    aliases: dict[str, dict[str, Any]] = field(default_factory=dict)
    notes: list[tuple[str, str]] = field(default_factory=list)
    fates: list[plain.Fate] = field(default_factory=list)


def flatten(root: Node, *, objects: str | None = None, metadata: Mapping[str, str] | None = None) -> Flat:
    """Make a tree flat, or say what stands in the way.

    Args:
        root: the tree. objects: what `--objects` says; "keep" cannot be done.
        metadata: text of a safetensors input, which the output keeps.

    Raises:
        ContainerLimitError: several state dicts, tensors outside of one, an unusual tensor, objects that are to be kept.
    """
    if objects == "keep" and plain.find_unknown(root):
        raise ContainerLimitError(
            "safetensors holds no Python objects, so it cannot keep them.", fix="Use --objects plain or drop."
        )
    state_dict = _only_state_dict(root)
    own = (ALIASES, STATE_DICT_METADATA)
    flat = Flat(metadata={key: text for key, text in (metadata or {}).items() if key not in own})
    _collect(state_dict, flat)
    _values(root, state_dict, flat)
    flat.metadata.setdefault("format", "pt")
    if flat.aliases:
        flat.metadata[ALIASES] = json.dumps(flat.aliases, separators=(",", ":"))
    if (paths := _state_dict_metadata(state_dict.node)) is not None:
        flat.metadata[STATE_DICT_METADATA] = paths
    return flat


def _only_state_dict(root: Node) -> StateDict:
    found = find_state_dicts(root)
    if not found and type(root) is Dict and next(find_tensors(root), None) is None:
        return StateDict((), root)
    wheres = [dotted(state_dict.where) for state_dict in found]
    if len(found) > 1:
        raise ContainerLimitError(
            f"safetensors holds one flat state dict; this checkpoint has {len(found)}: {', '.join(map(repr, wheres))}.",
            fix=f"Choose one: --select {wheres[0] or wheres[1]}",
        )
    outside = [tensor.where for tensor in find_tensors(root) if not found or tensor.where[:-1] != found[0].where]
    optimizers = [dotted(where) for where, node in walk(root, stop=is_tensor, plain=False) if is_optimizer(node)]
    if outside or not found:
        parts = list(dict.fromkeys(str(where[0]) if where else "the root" for where in outside))
        fix = f"Take the state dict alone: --select {wheres[0]}" if wheres and wheres[0] else ""
        drops = " ".join(f"--drop {part}" for part in (optimizers or parts)[:4])
        raise ContainerLimitError(
            f"safetensors holds one flat state dict; here are tensors outside of one, in {', '.join(map(repr, parts[:4]))}.",
            fix=f"{fix}{', or leave them out: ' if fix else 'Leave them out: '}{drops}",
        )
    return found[0]


def _collect(state_dict: StateDict, flat: Flat) -> None:
    """The tensors: ties become aliases, views that merely overlap are written in full."""
    first: dict[tuple[Any, ...], str] = {}
    storages: dict[int, list[str]] = {}
    index = 0
    for name, node in state_dict.node.items:
        if type(name) is not str or not is_tensor(node):
            continue
        if type(node) is Object:
            raise ContainerLimitError(f"{name!r} is a sparse, quantised, nested or meta tensor, which safetensors cannot hold.",
                                      fix=f"Leave it out: --drop '{name}'.")  # fmt: skip
        view = (id(node.storage), node.dtype, node.shape, node.stride, node.offset, *sorted(lazy_bits(node)))
        if node.nbytes and view in first:
            flat.aliases[name] = {"of": first[view], "index": index}
        else:
            first[view] = name
            storages.setdefault(id(node.storage), []).append(name)
            flat.tensors[name] = (node, row_major(node))
        index += 1
    shared = [names for names in storages.values() if len(names) > 1]
    if shared:
        count = sum(map(len, shared))
        text = f"{count} tensors are different views on shared storages; each is written in full: {_some(shared[0])}."
        flat.notes.append(("views-separated", text))


def _some(names: Sequence[str]) -> str:
    return ", ".join(map(repr, names[:4])) + (" ..." if len(names) > 4 else "")


def _values(root: Node, state_dict: StateDict, flat: Flat) -> None:
    """Plain values beside the tensors, as text under their dotted paths: those next to the state dict, and those in it."""
    node = root
    for depth, step in enumerate(state_dict.where):
        below = dict(children(node))
        for key, value in below.items():
            if key != step:
                _value((*state_dict.where[:depth], key), value, flat)
        node = below[step]
    for key, value in node.items:
        if not (type(key) is str and is_tensor(value)):
            _value((component(key),), value, flat)


def _value(where: tuple[Any, ...], node: Node, flat: Flat) -> None:
    node, fates = plain.make_plain(node)
    flat.fates += [plain.Fate((*where, *fate.where), fate.name, fate.became) for fate in fates]
    key = dotted(where)
    if node is DROP:
        return
    if key in flat.metadata and flat.metadata[key] != node:
        raise ContainerLimitError(
            f"The value {key!r} would overwrite metadata of that name.", fix=f"Leave it out: --drop '{key}'."
        )
    text = node if type(node) is str else _json(node)
    if text is None:
        flat.notes.append(("value-dropped", f"{key!r} has no text form and is left out."))
    else:
        flat.metadata[key] = text


def _json(node: Node) -> str | None:
    try:
        return json.dumps(_plain_json(node, 0))
    except (TypeError, ValueError):
        return None


def _plain_json(node: Node, depth: int) -> Any:
    """A plain node as JSON data; TypeError for what JSON cannot say."""
    if depth > 50 or (type(node) is int and node.bit_length() > 4096):
        raise TypeError
    if type(node) is Dict:
        return {
            key if type(key) is str else str(_plain_json(key, depth + 1)): _plain_json(value, depth + 1)
            for key, value in node.items
        }
    if type(node) in (List, tuple):
        return [_plain_json(item, depth + 1) for item in (node.items if type(node) is List else node)]
    if node is None or type(node) in (str, int, float, bool):
        return node
    raise TypeError


def _state_dict_metadata(node: Dict) -> str | None:
    """`_metadata` as JSON, where it is what torch writes: path -> {"version": number}."""
    metadata = node.attributes.get("_metadata") if node.attributes is not None else None
    return _json(metadata) if type(metadata) is Dict and metadata.items else None
