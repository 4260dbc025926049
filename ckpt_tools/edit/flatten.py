"""A tree as one flat state dict: what a safetensors file can hold, with the rest as text in its metadata."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import islice, takewhile
from typing import Any

from ckpt_tools.edit.objects import plain
from ckpt_tools.edit.objects.known import ObjectFate
from ckpt_tools.errors import ConvertError, NothingMatchedError
from ckpt_tools.formats.contents import StateDict, find_optimizers, find_state_dicts, find_tensors, is_extra, is_tensor
from ckpt_tools.formats.safetensors import ALIASES, MAX_HEADER, STATE_DICT_METADATA
from ckpt_tools.io.content import Content
from ckpt_tools.text import did_you_mean, dotted, listed, some
from ckpt_tools.tree.nodes import Dict, Entry, List, Node, Where
from ckpt_tools.tree.visit import children, component, walk
from ckpt_tools.values.numeric import row_major, view_of


@dataclass(slots=True)
class Flat:
    tensors: dict[str, tuple[Entry, Content]] = field(default_factory=dict)
    metadata: dict[str, str] = field(default_factory=dict)
    aliases: dict[str, dict[str, Any]] = field(default_factory=dict)
    notes: list[tuple[str, str]] = field(default_factory=list)
    fates: list[ObjectFate] = field(default_factory=list)


def set_texts(metadata: dict[str, str], texts: Sequence[tuple[str, str]]) -> None:
    """Set texts by key in the metadata that the output would have; with an empty one the key is dropped."""
    for key in (key for key, text in texts if not text):
        if key not in metadata:
            there = f"There are {some(list(metadata))}." if metadata else "It has none."
            why = did_you_mean(key, metadata) or there
            raise NothingMatchedError(f"`set_metadata={f'{key}='!r}`: {key!r} is not in the metadata.", why=why)
        del metadata[key]
    metadata.update((key, text) for key, text in texts if text)


def flatten(
    root: Node, *, objects: str | None = None, metadata: Mapping[str, str] | None = None,
    texts: Sequence[tuple[str, str]] = (), holder: str = "safetensors", shards: bool = False,
) -> Flat:  # fmt: skip
    """Make a tree flat, or say what stands in the way. In shards a tied name is a tensor of its own, as an index lists it."""
    state_dict, flat = one_state_dict(root, objects=objects, metadata=metadata, holder=holder)
    _collect(state_dict, flat)
    if shards and flat.aliases:
        _separate(state_dict, flat)
    if holder == "safetensors":
        flat.metadata.setdefault("format", "pt")
    set_texts(flat.metadata, texts)
    if flat.aliases:
        flat.metadata[ALIASES] = json.dumps(flat.aliases, separators=(",", ":"))
    return flat


def one_state_dict(
    root: Node, *, objects: str | None, metadata: Mapping[str, str] | None, holder: str = "safetensors"
) -> tuple[StateDict, Flat]:
    """The one state dict of a tree, and what lies beside its tensors as text; the tensors are left to the caller."""
    if objects == "keep" and plain.find_unknown(root):
        raise ConvertError(f"{holder} holds no Python objects, so it cannot keep them.", fix="Use `objects='plain'` or drop.")
    root, fates = plain.arrays_as_tensors(root)
    state_dict = _only_state_dict(root, holder)
    own = (ALIASES, STATE_DICT_METADATA)
    flat = Flat(metadata={key: text for key, text in (metadata or {}).items() if key not in own}, fates=fates)
    _values(root, state_dict, flat)
    _state_dict_metadata(state_dict.node, flat)
    return state_dict, flat


def _only_state_dict(root: Node, holder: str) -> StateDict:
    found = find_state_dicts(root)
    if not found and type(root) is Dict and next(find_tensors(root), None) is None:
        if root.items:
            raise ConvertError(
                f"There is no tensor in the checkpoint, and {holder} would hold the values as text alone.",
                fix="Write a .pth, which holds anything.",
            )
        return StateDict((), root)
    if len(found) > 1:
        wheres = [dotted(state_dict.where) for state_dict in found]
        others = _drops([where for where in wheres if where])
        raise ConvertError(
            f"{holder} holds one flat state dict; this checkpoint has {len(found)}: {', '.join(map(repr, wheres))}.",
            fix=f"Choose one: `select={wheres[0]!r}`." if wheres[0] else f"Leave out what lies in another: {others}",
        )
    own = found[0] if found else StateDict((), Dict())
    outside = list(islice(_outside(root, own), 1000))
    if found and not outside:
        return own
    parts, fixes = _parts(root, own, outside), []
    if own.node.items and any(where[: len(own.where)] != own.where for where in outside):
        fixes.append(f"take the state dict alone: `select={dotted(own.where)!r}`")
    if own.node.items and parts:
        fixes.append(f"leave them out: {_drops(parts)}")
    if any(part.endswith("_packed_params") for part in parts):
        fixes.append("make plain weights of torch's quantised layers: `dequantize='bf16'`")
    fix = ", or ".join(fixes) or "write a .pth, which holds anything"
    places = f", in {', '.join(map(repr, parts[:4]))}" if parts else ""
    what = f"{holder} holds one flat state dict; here are tensors outside one{places}."
    raise ConvertError(what, fix=fix[:1].upper() + fix[1:])


def _parts(root: Node, state_dict: StateDict, outside: Sequence[Where]) -> list[str]:
    """What is to be left out for tensors outside the state dict to go: whole optimizers, else all that is beside it."""
    optimizers = [where for where, _ in find_optimizers(root) if where]
    parts = []
    for where in outside:
        whole = next((optimizer for optimizer in optimizers if where[: len(optimizer)] == optimizer), None)
        shared = sum(1 for _ in takewhile(lambda steps: steps[0] == steps[1], zip(where, state_dict.where, strict=False)))
        parts.append(dotted(whole or where[: shared + 1]))
    return list(dict.fromkeys(filter(None, parts)))


def _drops(paths: Sequence[str]) -> str:
    return f"`drop={list(paths[:4])!r}`" if paths else ""


def _outside(root: Node, state_dict: StateDict) -> Iterator[Where]:
    """Where there are tensors that are not a direct part of the state dict, or have no text as their name."""
    for where, node in walk(root, stop=lambda node: is_tensor(node) or node is state_dict.node, plain=False):
        if is_tensor(node):
            yield where
    for key, value in state_dict.node.items:
        if not (type(key) is str and is_tensor(value)):
            yield from ((*state_dict.where, component(key), *tensor.where) for tensor in find_tensors(value))


def _collect(state_dict: StateDict, flat: Flat) -> None:
    """The tensors: ties become aliases, views that merely overlap are written in full."""
    named = {key: node for key, node in state_dict.node.named.items() if is_tensor(node)}
    users = Counter(id(node.storage) for node in named.values() if type(node) is Entry)
    first: dict[tuple[int, str], str] = {}
    storages: dict[int, list[str]] = {}
    for index, (name, node) in enumerate(named.items()):
        if type(node) is not Entry:
            raise ConvertError(
                f"{name!r} is a sparse, quantised, nested or meta tensor, which safetensors cannot hold.",
                fix="Write a .pth, which holds any tensor; `dequantize='bf16'` makes quantised ones plain.",
            )
        if users[id(node.storage)] > 1:
            view = view_of(node)
            if node.nbytes and view in first:
                flat.aliases[name] = {"of": first[view], "index": index}
                continue
            first[view] = name
            storages.setdefault(id(node.storage), []).append(name)
        flat.tensors[name] = (node, row_major(node))
    shared = [names for names in storages.values() if len(names) > 1]
    if shared:
        count = sum(map(len, shared))
        text = f"{count} tensors share memory; each is written in full: {some(shared[0])}."
        flat.notes.append(("views-separated", text))


def _separate(state_dict: StateDict, flat: Flat) -> None:
    own = flat.tensors | {name: flat.tensors[row["of"]] for name, row in flat.aliases.items()}
    flat.tensors = {name: own[name] for name in state_dict.names}
    names = list(flat.aliases)
    said = "1 tied name is a tensor of its own" if len(names) == 1 else f"{len(names)} tied names are tensors of their own"
    flat.notes.append(("ties-separated", f"{said} in the shards, so that every loader finds it under its name: {some(names)}."))
    flat.aliases = {}


def _values(root: Node, state_dict: StateDict, flat: Flat) -> None:
    """Plain values beside the tensors, as text under their dotted paths: those next to the state dict, and those in it."""
    found = list(_beside(root, state_dict))
    # All at once: what several of them share is made plain once.
    values = Dict(list(enumerate(node for _, node in found)))
    _, fates = plain.make_plain(values)
    if lost := [dotted((*found[at][0], *below)) for at, *below in plain.lost_numbers(fates) if type(at) is int]:
        raise ConvertError(
            f"{lost[0]!r} is a value of NumPy's that has no plain form.",
            fix=f"Write a .pth, which holds it as it is, or leave it out: `drop={lost[0]!r}`",
        )
    for fate in fates:
        index, *below = fate.where
        fate.where = [*found[index][0], *below] if type(index) is int else fate.where
    flat.fates += fates
    texts = _Json()
    for number, node in values.items:  # what was dropped is not there, and told as such
        assert type(number) is int
        _value(found[number][0], node, texts, flat)
    if extra := [dotted(where) for where, _ in found if where and is_extra(where[-1])]:
        text = f"Extra state of modules is kept as text in the metadata, and no module gets it back: {listed(extra, 3)}."
        flat.notes.append(("extra-state", text))


def _beside(root: Node, state_dict: StateDict) -> Iterator[tuple[Where, Node]]:
    """What lies beside the path to the state dict, and what is in it but no tensor."""
    node = root  # the last one is the state dict
    for depth, step in enumerate(state_dict.where):
        below = list(children(node))
        yield from (((*state_dict.where[:depth], key), value) for key, value in below if key != step)
        inner = [value for key, value in below if key == step]
        if len(inner) > 1:  # keys that are not text can look alike as text
            path = dotted(state_dict.where[: depth + 1])
            raise ConvertError(f"Two keys of the checkpoint are written {path!r}, and one of them holds the state dict.")
        node = inner[0]
    for key, value in state_dict.node.items:
        if not (type(key) is str and is_tensor(value)):
            yield (component(key),), value


def _value(where: Where, node: Node, texts: _Json, flat: Flat) -> None:
    key = dotted(where)
    if key in flat.metadata and flat.metadata[key] != node:
        raise ConvertError(f"The value {key!r} would overwrite metadata of that name.", fix=f"Leave it out: `drop={key!r}`.")
    text = node if type(node) is str else texts.dump(node)
    if text is None:
        flat.notes.append(("value-dropped", f"{key!r} has no text form and is left out."))
    else:
        flat.metadata[key] = text


_JSON_LIMIT = MAX_HEADER // 4
_JSON_NODE = 50  # characters that are charged for a value, so that time is bounded too
_SCALARS = frozenset((type(None), bool, int, float, str))


class _Json:
    """Plain nodes as JSON text, until they come to more than a header may hold: a shared value is written out each time."""

    def __init__(self) -> None:
        self.left = _JSON_LIMIT

    def dump(self, node: Node) -> str | None:
        try:
            return json.dumps(self._plain(node, 0))
        except (TypeError, ValueError):
            return None

    def _plain(self, node: Node, depth: int) -> Any:
        items = node.items if type(node) is List else node if type(node) is tuple else ()
        self.left -= len(node) if type(node) is str else _JSON_NODE
        if depth > 50 or self.left < len(items) * _JSON_NODE or (type(node) is int and node.bit_length() > 4096):
            raise TypeError
        if type(node) is Dict:
            found = {str(self._plain(key, depth + 1)): self._plain(value, depth + 1) for key, value in node.items}
            if len(found) < len(node.items):  # 1 and "1"
                raise TypeError
            return found
        if type(node) in (List, tuple):
            return [self._plain(item, depth + 1) for item in items]
        if type(node) in _SCALARS:
            return node
        raise TypeError


def _state_dict_metadata(node: Dict, flat: Flat) -> None:
    """`_metadata` as JSON: of each module what torch writes, {"version": number} and the like; other rows are told about."""
    kept: list[tuple[Node, Node]] = []
    odd: list[tuple[Node, Node]] = []
    for path, row in node.metadata.items if node.metadata is not None else ():
        pairs = row.items if type(path) is str and type(row) is Dict else [(None, None)]
        is_plain = all(type(key) is str and type(value) in _SCALARS for key, value in pairs)
        (kept if is_plain else odd).append((path, row))
    if odd:
        count, first = len(odd) + len(kept), component(odd[0][0])
        text = f"_metadata: {len(odd)} of {count} rows hold more than numbers and text, and are left out: {first!r}."
        flat.notes.append(("metadata-dropped", text))
    if kept and (text_of := _Json().dump(Dict(kept))) is not None:
        flat.metadata[STATE_DICT_METADATA] = text_of
