"""Edits on a tree: names, selection, devices. Each edits in place and returns what it did; none touches a tensor's bytes."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from fnmatch import translate

from ckpt_tools import tree
from ckpt_tools.checkpoint import StateDict, find_state_dicts, find_tensors, is_optimizer, is_tensor
from ckpt_tools.errors import ConvertError, NothingMatchedError, UsageError
from ckpt_tools.names import check_unique, did_you_mean, move_metadata
from ckpt_tools.tree import Dict, Entry, List, Node, Storage, Where, walk

Rename = Callable[[str], str]


def dotted(where: Where) -> str:
    """A path as text: `model.ema`, `nets.0`; the root is the empty text."""
    return ".".join(map(str, where))


# --- names


@dataclass(frozen=True, slots=True)
class Renamed:
    """The names that changed in one state dict: old -> new, in order."""

    where: Where
    tensors: int
    changes: dict[str, str]


def rename_state_dict(state_dict: StateDict, rename: Rename) -> Renamed:
    """Give every name in a state dict its new name; `_metadata` goes with them, order is kept.

    Raises:
        CollisionError: two would get one name; nothing is changed. ConvertError: one would have none.
    """
    node = state_dict.node
    renamed = {key: rename(key) if _is_name(key, value) else key for key, value in node.items if type(key) is str}
    check_unique(renamed)
    if nameless := [old for old, new in renamed.items() if old and not new]:
        raise ConvertError(f"{nameless[0]!r} would be left without a name.", fix="Give it another with --rename.")
    tensors = len(state_dict.names)
    changes = {old: new for old, new in renamed.items() if old != new}
    if changes:
        node.items[:] = [(renamed[key] if type(key) is str else key, value) for key, value in node.items]
        _rename_metadata(node, renamed)
    return Renamed(state_dict.where, tensors, changes)


def _is_name(key: str, value: Node) -> bool:
    """Whether a key of a state dict names part of the model; `epoch` beside the tensors does not."""
    return is_tensor(value) or key.endswith("_extra_state") or "." in key


def _rename_metadata(node: Dict, renamed: dict[str, str]) -> None:
    metadata = node.attributes.get("_metadata") if node.attributes is not None else None
    if type(metadata) is not Dict:
        return
    rows = [(path, row) for path, row in metadata.items if type(path) is str]
    metadata.items[:] = move_metadata(renamed, rows, lambda: Dict([("version", 1)]))


def rename_optimizers(root: Node, rename: Rename) -> int:
    """Rename the `param_names` of every optimizer below `root`; returns how many changed."""
    changed = 0
    for _, node in walk(root, stop=is_tensor, plain=False):
        if not is_optimizer(node):
            continue
        for group in node.get("param_groups").items:
            names = group.get("param_names") if type(group) is Dict else None
            if type(names) is List:
                new = [rename(name) if type(name) is str else name for name in names.items]
                changed += sum(old != name for old, name in zip(names.items, new, strict=True))
                names.items[:] = new
    return changed


def parse_rename(text: str) -> tuple[re.Pattern[str], str]:
    """`REGEX=REPLACEMENT`, split at the last `=` that leaves a regular expression before it."""
    pattern, separator, replacement = text.rpartition("=")
    if not separator or not pattern:
        raise UsageError(f"--rename {text!r} is not REGEX=REPLACEMENT.", fix=r"For example: --rename '^encoder\.=backbone.'")
    try:
        compiled = re.compile(pattern)
        re.sub(f"{pattern}|", replacement, "")  # matches nothing at least, so that the replacement is read
    except (re.error, IndexError) as error:
        raise UsageError(f"--rename {text!r} is no regular expression with its replacement.", why=f"{error}.") from None
    return compiled, replacement


def restore_named_ties(node: Node, metadata: Mapping[str, str]) -> dict[str, str]:
    """Put back the tied names that `safetensors.torch.save_model` left to the metadata: name -> the name that holds the bytes.

    Returns:
        The names that were put back.
    """
    entries = {key: value for key, value in node.items if type(value) is Entry} if type(node) is Dict else {}
    ties = {name: kept for name, kept in metadata.items() if kept in entries and name not in entries and name != "format"}
    if ties:
        node.items.extend((name, entries[kept]) for name, kept in ties.items())
    return ties


# --- selection


def select(root: Node, path: str) -> Node:
    """The node at a dotted path.

    Raises:
        NothingMatchedError: there is none; the message names what is near.
    """
    places: list[str] = []
    for where, node in walk(root, stop=is_tensor):
        text = dotted(where)
        if text == path:
            return node
        if where and type(node) in (Dict, List):
            places.append(text)
    there = [dotted(found.where) for found in find_state_dicts(root) if found.where][:5]
    why = did_you_mean(path, places) or (f"State dicts are at {', '.join(map(repr, there))}." if there else "")
    raise NothingMatchedError(f"--select {path!r} matches nothing.", why=why)


def filter_tensors(root: Node, keep: Sequence[str], drop: Sequence[str]) -> list[Where]:
    """Drop what `drop` names, and with `keep` every other tensor of a state dict; returns the paths that went.

    A glob is matched against a tensor's name in its state dict and against the dotted path from the root, so that
    `--drop optimizer` takes the whole optimizer.

    Raises:
        NothingMatchedError: a glob that matches nothing, or no tensor is left.
    """
    patterns = {glob: re.compile(translate(glob)) for glob in (*keep, *drop)}
    unused = dict.fromkeys(patterns)
    names = {id(found.node): set(found.names) for found in find_state_dicts(root)}

    def matches(globs: Iterable[str], texts: Sequence[str]) -> bool:
        hits = [glob for glob in globs if any(patterns[glob].match(text) for text in texts)]
        for glob in hits:
            unused.pop(glob, None)
        return bool(hits)

    gone: list[Where] = []
    dicts = [(where, node) for where, node in walk(root, stop=is_tensor) if type(node) is Dict]
    for where, node in dicts:
        own, kept = names.get(id(node), set()), []
        for key, value in node.items:
            path = (*where, tree.component(key))
            texts = [dotted(path), key] if key in own else [dotted(path)]
            unwanted = key in own and bool(keep) and not matches(keep, texts)
            if matches(drop, texts) or unwanted:
                gone.append(path)
            else:
                kept.append((key, value))
        node.items[:] = kept
    if unused:
        raise NothingMatchedError(
            f"{'--keep' if next(iter(unused)) in keep else '--drop'} {next(iter(unused))!r} matches nothing.",
            why=did_you_mean(next(iter(unused)), (name for own in names.values() for name in sorted(own))),
            fix="ckpt inspect --all FILE lists the names.",
        )
    if gone and next(find_tensors(root), None) is None:
        raise NothingMatchedError("No tensor would be left.", why=f"--keep and --drop take away all {len(gone)}.")
    return gone


# --- devices

_DEVICE = re.compile(r"(cpu|cuda|mps|xpu|hpu|npu|mtia|maia|xla|meta|privateuseone)(:\d+)?")


def parse_map_location(spec: str) -> Callable[[str], str]:
    """What `--map-location` does to a device tag: one device for all, or `from=to` pairs separated by commas."""
    pairs = [part.strip().partition("=") for part in spec.split(",")]
    for source, equals, target in pairs:
        for device in (source, target) if equals else (source,):
            if not _DEVICE.fullmatch(device):
                raise UsageError(
                    f"--map-location {spec!r}: {device!r} is no device.", fix="For example: cpu, cuda:1, cuda:0=cpu."
                )
    if len(pairs) == 1 and not pairs[0][1]:
        return lambda tag: spec.strip()
    if not all(equals for _, equals, _ in pairs):
        raise UsageError(
            f"--map-location {spec!r} mixes a single device with pairs.", fix="For example: cuda:0=cuda:1,cuda:7=cpu."
        )
    table = {_full(source): target for source, _, target in pairs}
    if len(table) != len(pairs):
        raise UsageError(f"--map-location {spec!r} names a device twice.")
    return lambda tag: table.get(_full(tag), tag)


def _full(device: str) -> str:
    return "cuda:0" if device == "cuda" else device


def map_storages(root: Node, change: Callable[[Storage], Storage]) -> Node:
    """Exchange storages everywhere, each once; entries on one storage stay tied. Returns the root."""
    changed: dict[int, Storage] = {}

    def new(storage: Storage) -> Storage:
        if id(storage) not in changed:
            changed[id(storage)] = change(storage)
        return changed[id(storage)]

    def swap(node: Node) -> Node:
        if type(node) is Storage:
            return new(node)
        if type(node) is Entry and new(node.storage) is not node.storage:
            storage = new(node.storage)
            moved = storage.dtype is not node.storage.dtype and node.storage.dtype is not None
            return replace(node, storage=storage, dtype=storage.dtype if moved and storage.dtype else node.dtype)
        return node

    return tree.replace(root, swap)


def map_devices(root: Node, change: Callable[[str], str]) -> tuple[Node, dict[str, int]]:
    """Rewrite device tags; returns the root, and how many storages went `from -> to`."""
    counts: dict[str, int] = {}

    def retag(storage: Storage) -> Storage:
        if storage.device is None or (target := change(storage.device)) == storage.device:
            return storage
        move = f"{storage.device} -> {target}"
        counts[move] = counts.get(move, 0) + 1
        return replace(storage, device=target)

    return map_storages(root, retag), counts
