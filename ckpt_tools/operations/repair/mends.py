"""Mend what is not damage and hurts all the same: names, `_metadata`, batch norms without a counter, lost ties.

Each mend needs evidence in the file itself; where there is none it is left alone, and said.
"""

from __future__ import annotations

import itertools
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace

from ckpt_tools import limits
from ckpt_tools.edit import renaming
from ckpt_tools.formats.contents import StateDict, find_state_dicts
from ckpt_tools.io.content import Literal
from ckpt_tools.text import Report
from ckpt_tools.tree.dtypes import DTYPES
from ckpt_tools.tree.names import INNER_WRAPPERS, MODULE, MOST_DOTS, split_by_module, strip_inner, strip_module, unwrap
from ckpt_tools.tree.nodes import Dict, Entry, Node, Storage, Where
from ckpt_tools.tree.visit import reachable

# torch.nn.modules.batchnorm._NormBase: version 2 knows num_batches_tracked, and load_state_dict asks for it from then on.
# (detectron2's FrozenBatchNorm2d, which has running statistics and no counter, is version 3.)
_COUNTS_BATCHES = 2


@dataclass(frozen=True, slots=True)
class Mended:
    """One thing that was mended: its stable `code`, `where` it is, and a sentence, `text`.

    It is `left` as it is where the file does not tell what is right.
    """

    code: str
    where: list[str | int]
    text: str
    left: bool = False


# --- the report: its fields are the contract of `ckpt repair --json`, see docs/json.md


# Notes about what could not be saved, or what was written and is not to be loaded.
_UNSAVED = (
    "assumed-byteorder", "damaged-names", "damaged-pickle", "damaged-values", "dangerous", "enclosed",
    "mixed-writers", "several-archives", "unproved-places",
)  # fmt: skip


@dataclass(frozen=True, slots=True)
class Missing:
    """A tensor that could not be saved whole: `where` it is, its bytes, why, and whether what there is of it was kept."""

    where: list[str | int]
    bytes: int
    why: str
    kept: bool = False


@dataclass(slots=True, repr=False)
class Repaired(Report):
    """The report of a repair.

    Attributes:
        source, target: the files. container: the output's. dry_run: whether nothing was written.
        was: what was wrong with the file as a whole; empty where it opened.
        tensors, saved: how many there are, and how many of them are whole. tensor_bytes, saved_bytes: the same in bytes, a
            storage counted once.
        missing: those that are not.
        mended: what was mended, and what was left because the file does not tell. notes: what else there is to know.
        bytes: size of the output. seconds: how long it took.
    """

    source: str
    target: str
    container: str = ""
    dry_run: bool = False
    was: str = ""
    tensors: int = 0
    saved: int = 0
    tensor_bytes: int = 0
    saved_bytes: int = 0
    missing: list[Missing] = field(default_factory=list)
    mended: list[Mended] = field(default_factory=list)
    notes: list[tuple[str, str]] = field(default_factory=list)
    bytes: int = 0
    seconds: float = 0.0

    def __bool__(self) -> bool:
        """Whether all was saved: what exit code 0 means."""
        return self.exit_code == 0

    @property
    def exit_code(self) -> int:
        """0 all saved, 1 something could not be, or what was written is dangerous."""
        return 1 if self.missing or any(code in _UNSAVED for code, _ in self.notes) else 0


# --- the mends


def mend(root: Node, lost: Collection[Where] = ()) -> Iterator[Mended]:
    """Mend every state dict below `root`, in place."""
    for state_dict in find_state_dicts(root):
        yield from _mend_prefixes(state_dict)
        yield from _mend_metadata(state_dict)
        yield from _mend_counters(state_dict, root, frozenset(lost))


# --- prefixes


def _mend_prefixes(state_dict: StateDict) -> Iterator[Mended]:
    """Wrappers on a part of the names, or twice."""
    names, where = state_dict.names, list(state_dict.where)
    inner = [name for name in names if any(f".{wrapper}" in f".{name}" for wrapper in INNER_WRAPPERS)]
    if inner and len(inner) < len(names) and _would_not_collide(names, strip_inner):
        renaming.rename_state_dict(state_dict, strip_inner)
        text = f"{len(inner)} of {len(names)} names were wrapped ({inner[0]}); the wrappers are removed"
        yield Mended("mixed-prefix", where, text)
        names = state_dict.names
    wrapped = [name for name in names if name.startswith(MODULE)]
    if not any("." in name and not name.startswith(MODULE) for name in names):  # `n_averaged` of an AveragedModel has no dot
        if wrapped and all(name.startswith(MODULE * 2) for name in wrapped):
            renaming.rename_state_dict(state_dict, strip_module)
            yield Mended("double-prefix", where, f"{len(wrapped)} names began with module.module.; both are removed")
    elif wrapped:  # a wrapper's where both parts are halves of one module, else perhaps the model's own
        shown, halved = f"{len(wrapped)} of {len(names)} names begin with 'module.'", split_by_module(names)
        if halved is None:
            text = f"{shown}, which may be the model's own; if not: ckpt convert --strip-module"
            yield Mended("mixed-prefix", where, text, left=True)
        elif not _would_not_collide(names, strip_module):
            yield Mended("mixed-prefix", where, f"{shown}, and some names are there with and without it", left=True)
        else:
            renaming.rename_state_dict(state_dict, strip_module)
            yield Mended("mixed-prefix", where, f"{shown}, which splits {halved}; it is removed")


def _would_not_collide(names: Sequence[str], rename: renaming.Rename) -> bool:
    return len({rename(name) for name in names}) == len(set(names))


def _parent(name: str) -> str:
    return name.rpartition(".")[0]


# --- _metadata


def _mend_metadata(state_dict: StateDict) -> Iterator[Mended]:
    """`_metadata` that names modules under a wrapper which the names do not have, or the reverse."""
    metadata = state_dict.node.metadata
    if metadata is None:
        return
    modules = _modules(state_dict.names)
    taken = {path for path, _ in metadata.items}
    rows: list[tuple[Node, Node]] = []
    moved = 0
    for path, row in metadata.items:
        target = _home(path, modules) if type(path) is str else path
        if target != path:
            moved += 1
            if target is None or target in taken:
                continue
            taken.add(target)
        rows.append((target, row))
    if moved:
        renaming.replace_metadata(state_dict.node, metadata, rows)
        text = f"rows of _metadata that were about names no longer there now follow the names: {moved}"
        yield Mended("stale-metadata", list(state_dict.where), text)


def _modules(names: Sequence[str]) -> set[str]:
    """Every module path above a tensor, the root included."""
    found = {""}
    for name in names:
        limits.check_depth(name.count("."), f"A tensor's name has {name.count('.')} dots.", MOST_DOTS)
        path = _parent(name)
        while path and path not in found:
            found.add(path)
            path = _parent(path)
    return found


def _home(path: str, modules: set[str]) -> str | None:
    """Where a row of `_metadata` belongs: its own path, its path with or without wrappers, or nowhere (None)."""
    if path in modules:
        return path
    plain = unwrap(f"{path}.x")[:-2] if path else ""
    if plain != path:  # it is about a wrapped module, and no tensor is under that name
        return plain or None
    wrapped = f"{MODULE}{path}"
    return wrapped if wrapped in modules else path


# --- batch norms


def _mend_counters(state_dict: StateDict, root: Node, lost: frozenset[Where]) -> Iterator[Mended]:
    """Batch norms of version 2 without num_batches_tracked, which a strict `load_state_dict` asks for."""
    metadata, names = state_dict.node.metadata, set(state_dict.names)
    rows = metadata.items if metadata is not None else ()
    versions = {path: row.get("version") for path, row in rows if type(path) is str and type(row) is Dict}
    after: dict[str, str] = {}
    for name in state_dict.names:
        parent, _, leaf = name.rpartition(".")
        counter = f"{parent}.num_batches_tracked".lstrip(".")
        there = counter in names or (*state_dict.where, counter) in lost
        if leaf == "running_var" and versions.get(parent) == _COUNTS_BATCHES and not there:
            after[name] = counter
    if not after:
        return
    used, int64 = {node.key for node in reachable(root) if type(node) is Storage}, DTYPES["int64"]
    keys = (key for key in map(str, itertools.count()) if key not in used)
    items: list[tuple[Node, Node]] = []
    for key, value in state_dict.node.items:
        items.append((key, value))
        if type(key) is str and key in after:
            device = value.storage.device if type(value) is Entry else "cpu"
            zero = Storage(next(keys), int64, 8, device, Literal(bytes(8)))
            items.append((after[key], Entry(zero, int64, (), (), 0)))
    state_dict.node.items[:] = items
    first = _parent(next(iter(after)))
    text = f"{len(after)} batch norms lacked num_batches_tracked ({first}); it is 0 there"
    yield Mended("num-batches-tracked", list(state_dict.where), text)


# --- ties


def tie(root: Node, digests: Mapping[Where, str]) -> Iterator[Mended]:
    """Tie matrices of a state dict that are equal byte for byte: those after the first become views on its storage."""
    for state_dict in find_state_dicts(root):
        first: dict[str, tuple[str, Entry]] = {}
        tied: list[tuple[str, str]] = []
        for index, (name, entry) in enumerate(state_dict.node.items):
            if type(name) is not str or type(entry) is not Entry:
                continue
            digest = digests.get((*state_dict.where, name))
            if digest is None:
                continue
            other, model = first.setdefault(digest, (name, entry))
            if model.storage is not entry.storage:
                view = replace(model, requires_grad=entry.requires_grad, kind=entry.kind, extras=entry.extras)
                state_dict.node.items[index] = (name, view)
                tied.append((other, name))
        if tied:
            text = f"{len(tied)} tensors are equal to others and share their bytes now: {tied[0][1]} = {tied[0][0]}"
            yield Mended("tied", list(state_dict.where), text)
