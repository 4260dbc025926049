"""Edits on a tree: names, selection, devices. Each edits in place and returns what it did; none touches a tensor's bytes."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from fnmatch import translate
from shlex import quote

from ckpt_tools.errors import ConvertError, NothingMatchedError, UsageError
from ckpt_tools.formats.open import (
    StateDict,
    find_optimizers,
    find_state_dicts,
    find_tensors,
    is_tensor,
)
from ckpt_tools.text import did_you_mean, dotted
from ckpt_tools.tree import exchange, nodes, visit
from ckpt_tools.tree.names import check_unique, move_metadata
from ckpt_tools.tree.nodes import (
    Dict,
    Entry,
    List,
    Node,
    Storage,
    Where,
)
from ckpt_tools.tree.visit import walk

Rename = Callable[[str], str]


# --- names


@dataclass(frozen=True, slots=True)
class Renamed:
    """The names that changed in one state dict: old -> new, in order."""

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
        rename_metadata(node, renamed)
    return Renamed(tensors, changes)


def _is_name(key: str, value: Node) -> bool:
    """Whether a key of a state dict names part of the model; `epoch` beside the tensors does not."""
    return is_tensor(value) or key.endswith("_extra_state") or "." in key


def rename_metadata(node: Dict, renamed: Mapping[str, str]) -> None:
    """Give the rows of a state dict's `_metadata` their new module paths."""
    metadata = node.attributes.get("_metadata") if node.attributes is not None else None
    if type(metadata) is Dict:
        rows = [(path, row) for path, row in metadata.items if type(path) is str]
        replace_metadata(node, metadata, list(move_metadata(renamed, rows, lambda: Dict([("version", 1)]))))


def replace_metadata(node: Dict, metadata: Dict, rows: Sequence[tuple[Node, Node]]) -> None:
    """Give a state dict other rows of `_metadata`. Another state dict may hold the same record, which stays as it is."""
    attributes, moved = node.attributes, Dict(list(rows), ordered=metadata.ordered)
    assert attributes is not None
    pairs = [(name, moved if value is metadata else value) for name, value in attributes.items]
    node.attributes = Dict(pairs, ordered=attributes.ordered)


def rename_optimizers(root: Node, rename: Rename) -> int:
    """Rename what every optimizer below `root` calls by name: `param_names`, and parameters and states keyed by name.

    Returns:
        How many names changed.

    Raises:
        CollisionError: two states would get one name.
    """
    changed = 0
    done: set[int] = set()
    for _, node in find_optimizers(root):
        state = node.get("state")
        changed += _rename_states(state, rename, done)
        for group in node.get("param_groups").items:
            for key in ("param_names", "params") if type(group) is Dict else ():
                changed += _rename_list(group.get(key), rename, done)
    return changed


def _rename_states(state: Node, rename: Rename, done: set[int]) -> int:
    """States that are keyed by name; `done` has what was renamed before, under another path."""
    if type(state) is not Dict or id(state) in done:
        return 0
    done.add(id(state))
    renamed = {key: rename(key) for key, _ in state.items if type(key) is str}
    check_unique(renamed)
    state.items[:] = [(renamed[key] if type(key) is str else key, value) for key, value in state.items]
    return sum(old != new for old, new in renamed.items())


def _rename_list(names: Node, rename: Rename, done: set[int]) -> int:
    if type(names) is not List or id(names) in done:
        return 0
    done.add(id(names))
    new = [rename(name) if type(name) is str else name for name in names.items]
    changed = sum(1 for old, name in zip(names.items, new, strict=True) if old != name)
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
    """The node at a dotted path, or at a path as JSON (`["nets", 0, "a.b"]`), which tells keys with dots in them apart.

    Raises:
        NothingMatchedError: there is none; the message names what is near. ConvertError: the dotted path fits several.
    """
    found: dict[int, tuple[Where, Node]] = {}
    for where, node in _at(root, path):
        found.setdefault(id(node), (where, node))
    if len(found) > 1:
        wheres = [json.dumps(list(where)) for where, _ in found.values()]
        raise ConvertError(
            f"--select {path!r} fits {len(found)} places: {', '.join(wheres[:5])}.", why="Some keys have dots in them.",
            fix=f"Give one as JSON: --select '{wheres[0]}'",
        )  # fmt: skip
    if found:
        return next(iter(found.values()))[1]
    places = [dotted(where) for where, node in walk(root, stop=is_tensor) if where and type(node) in (Dict, List)]
    there = [dotted(state_dict.where) for state_dict in find_state_dicts(root) if state_dict.where][:5]
    why = did_you_mean(path, places) or (f"State dicts are at {', '.join(map(repr, there))}." if there else "")
    raise NothingMatchedError(f"--select {path!r} matches nothing.", why=why)


def _at(root: Node, path: str) -> Iterator[tuple[Where, Node]]:
    """Every node at a path: a dotted one may be cut at its dots in several ways."""
    exact = _json_path(path)
    pending: list[tuple[Where, Node]] = [((), root)]
    while pending:
        where, node = pending.pop()
        if where == exact if exact is not None else dotted(where) == path:
            yield where, node
            if where:
                continue
        for key, child in () if is_tensor(node) else visit.children(node):
            below = (*where, key)
            if below == exact[: len(below)] if exact is not None else f"{path}.".startswith(f"{dotted(below)}."):
                pending.append((below, child))


def _json_path(text: str) -> Where | None:
    """A path written as a JSON list of texts and numbers; None for any other text."""
    try:
        steps = json.loads(text) if text.startswith("[") else None
    except (ValueError, RecursionError):
        return None
    return tuple(steps) if type(steps) is list and all(type(step) in (str, int) for step in steps) else None


def filter_tensors(root: Node, keep: Sequence[str], drop: Sequence[str], used: Collection[str] = ()) -> list[Where]:
    """Drop what `drop` names, and with `keep` every other tensor of a state dict; returns the paths that went.

    A glob is matched against a tensor's name in its state dict and against the dotted path from the root, so that
    `--drop optimizer` takes the whole optimizer. Elements of a list go by their path alone (`--drop nets.0`): a glob over
    numbers would take parts of an optimizer's lists. `used`: globs that have matched something already.

    Raises:
        NothingMatchedError: a glob that matches nothing, or no tensor is left. ConvertError: an element of a tuple, or a
        tensor that optimizer state belongs to by its place.
    """
    globs = _Globs(keep, drop, used)
    names = {id(found.node): set(found.names) for found in find_state_dicts(root)}
    gone: dict[Where, None] = {}
    lost: dict[int, tuple[Where, Dict | List, list[int]]] = {}  # what each dict or list loses, and where it was met first
    inside: Where | None = None  # the walk goes depth first: what lies in a dropped place follows right behind it
    for where, node in walk(root, stop=is_tensor):
        if type(node) in nodes.CONTAINERS and where in gone:
            inside = where
        if type(node) not in (Dict, List, tuple):
            continue
        paths = globs.unwanted(where, node, names.get(id(node), set()))
        if inside is not None and where[: len(inside)] == inside:
            continue
        gone.update(dict.fromkeys(paths.values()))
        if type(node) is tuple:
            _refuse_elements(where, paths)
        elif lost.setdefault(id(node), (where, node, list(paths)))[2] != list(paths):
            raise _shared(where, lost[id(node)][0])
    globs.check_used(name for own in names.values() for name in sorted(own))
    tensors: list[tuple[str, Node]] = []  # the dropped ones of state dicts that keep others
    for _, node, indices in lost.values():
        tensors += _without(node, set(indices), names.get(id(node), set()))
    if gone and next(find_tensors(root), None) is None:
        raise NothingMatchedError("No tensor would be left.", why="--keep and --drop take away all there are.")
    _check_optimizers(root, tensors)
    return list(gone)


def _refuse_elements(where: Where, paths: Mapping[int, Where]) -> None:
    for path in paths.values():
        raise ConvertError(
            f"--drop {dotted(path)!r} is an element of a tuple, whose length its reader counts on.",
            fix=f"Drop the whole: --drop {dotted(where)}" if where else "Take what is wanted: --select WHERE",
        )


def _shared(where: Where, first: Where) -> ConvertError:
    here, there = dotted(where), dotted(first)
    return ConvertError(
        f"{here!r} is one and the same dict or list as {there!r}, and would lose other parts of it.",
        why="It is in the file once, under both paths.",
        fix=f"Drop one of them whole (--drop {quote(here)}), or give globs that take the same from both.",
    )


def _without(node: Dict | List, indices: set[int], own: set[str]) -> list[tuple[str, Node]]:
    """Take the items at these indices away; returns the tensors among them, where a state dict keeps others."""
    if type(node) is List:
        node.items[:] = [item for index, item in enumerate(node.items) if index not in indices]
        return []
    assert type(node) is Dict
    tensors = [pair for index, pair in enumerate(node.items) if index in indices and pair[0] in own]
    node.items[:] = [pair for index, pair in enumerate(node.items) if index not in indices]
    return [(str(key), value) for key, value in tensors] if any(key in own for key, _ in node.items) else []


class _Globs:
    """The globs of --keep and --drop, and which of them have matched nothing yet."""

    def __init__(self, keep: Sequence[str], drop: Sequence[str], used: Collection[str]) -> None:
        self.keep, self.drop = keep, drop
        self.patterns = {glob: re.compile(translate(glob)) for glob in (*keep, *drop)}
        self.unused = dict.fromkeys(glob for glob in self.patterns if glob not in used)

    def match(self, globs: Iterable[str], texts: Sequence[str]) -> bool:
        hits = [glob for glob in globs if any(self.patterns[glob].match(text) for text in texts)]
        for glob in hits:
            self.unused.pop(glob, None)
        return bool(hits)

    def unwanted(self, where: Where, node: Dict | List | tuple[Node, ...], own: set[str]) -> dict[int, Where]:
        """The items of a dict that are to go, or the elements of a list or tuple: index -> path. `own`: names of tensors."""
        if type(node) is not Dict:
            return self._elements(where, node)
        paths = {}
        for index, (key, _) in enumerate(node.items):
            path = (*where, visit.component(key))
            texts = [dotted(path), key] if key in own else [dotted(path)]
            unkept = key in own and bool(self.keep) and not self.match(self.keep, texts)
            if self.match(self.drop, texts) or unkept:
                paths[index] = path
        return paths

    def _elements(self, where: Where, node: Node) -> dict[int, Where]:
        """The elements of a list or tuple that --drop names exactly, by their paths."""
        prefix = dotted((*where, ""))
        wanted = {path for path in self.drop if path.startswith(prefix)}
        paths = {index: (*where, index) for index, _ in enumerate(visit.children(node))} if wanted else {}
        paths = {index: path for index, path in paths.items() if dotted(path) in wanted}
        for path in paths.values():
            self.unused.pop(dotted(path), None)
        return paths

    def check_used(self, names: Iterable[str]) -> None:
        for glob in self.unused:
            option = "--keep" if glob in self.keep else "--drop"
            why, fix = did_you_mean(glob, names), "ckpt inspect --all FILE lists the names."
            raise NothingMatchedError(f"{option} {glob!r} matches nothing.", why=why, fix=fix)


def _check_optimizers(root: Node, dropped: Sequence[tuple[str, Node]]) -> None:
    """Refuse to drop a tensor while an optimizer stays whose state belongs to it by its place among the parameters.

    Which parameter a place is, only the model knows; a tensor whose name the optimizer has not in its `param_names`, or whose
    shape none of its states has, is none of its parameters.
    """
    for where, node in find_optimizers(root) if dropped else ():
        if not any(type(key) is int for key, _ in node.get("state").items):
            continue
        names = {name for group in node.get("param_groups").items if type(group) is Dict
                 and type(group.get("param_names")) is List for name in group.get("param_names").items}  # fmt: skip
        shapes = {tensor.node.shape for tensor in find_tensors(node.get("state")) if type(tensor.node) is Entry}
        for name, value in dropped:
            if name in names if names else type(value) is Entry and value.shape and value.shape in shapes:
                raise ConvertError(
                    f"{name!r} cannot go alone: the state of the optimizer {dotted(where)!r} belongs to it by its place.",
                    why="All states behind it would belong to other parameters.",
                    fix=f"Leave the optimizer out too: --drop {dotted(where)}",
                )


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

    return exchange.replace(root, swap)


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
