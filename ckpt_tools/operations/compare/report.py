"""What `ckpt diff` tells, as records, and the sentence that it comes down to."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from ckpt_tools.formats.contents import StateDict, tensors_by_name
from ckpt_tools.matching import match
from ckpt_tools.matching.records import Param
from ckpt_tools.operations.compare.sides import Side
from ckpt_tools.pickling.torch_objects import unusual_tensor
from ckpt_tools.text import Report, dotted
from ckpt_tools.tree.names import wrappers_in
from ckpt_tools.tree.nodes import Entry, Node


@dataclass(frozen=True, slots=True)
class Only:
    """A tensor that only one side has: `where`, its dotted path; dtype, shape and bytes."""

    where: str
    dtype: str | None
    shape: list[int] | None
    bytes: int


@dataclass(frozen=True, slots=True)
class Renaming:
    """A tensor with one name on the left and another on the right; `reason` is "wrapper", "prefix" or "structure"."""

    left: str
    right: str
    reason: str


@dataclass(frozen=True, slots=True)
class Change:
    """Something that is not the same on the left and on the right; `where` is the dotted path on the left."""

    where: str
    left: Any
    right: Any


@dataclass(frozen=True, slots=True)
class ValueChange:
    """A plain value or an object that differs (left, right); `where` is its path, `kind` "added", "removed" or "changed"."""

    where: str
    kind: str
    left: Any = None
    right: Any = None


@dataclass(frozen=True, slots=True)
class TensorChange:
    """A tensor whose bytes differ: `where` on the left, its path on the `right`, dtype and shape of the left one.

    `gap` says how far, where that was asked for and can be told, else `reason` why not.
    """

    where: str
    right: str
    dtype: str | None
    shape: list[int] | None
    gap: dict[str, Any] | None = None
    reason: str = ""


@dataclass(slots=True, repr=False)
class Difference(Report):
    """What `ckpt diff` tells. `same` is false when anything below differs but the notes.

    Attributes:
        left, right: `path`, `container` and `bytes` of the two files. summary: one sentence.
        state_dicts: which state dict is compared with which (`left`, `right`; null for none), how many names they share, and
            whether it `moved` to another path.
        added, removed: tensors that only the right, only the left side has. renamed: those under another name.
        shapes, dtypes, devices: of the tensors that both sides have.
        values, objects: plain values and Python objects by dotted path.
        tensors: how many are `compared`, `equal`, `different`, and `skipped` for want of one shape and dtype.
        distance: (with values) of all tensors that were measured, as if they were one, tied ones once: how many `tensors` and
            `elements`, places where one is `nonfinite`, `relative_l2` (the length of the difference by that of the left one),
            `cosine`; null where none was measured.
        changed: those that are different. notes: what is not counted as a difference.
    """

    left: dict[str, Any]
    right: dict[str, Any]
    same: bool = True
    summary: str = ""
    state_dicts: list[dict[str, Any]] = field(default_factory=list)
    added: list[Only] = field(default_factory=list)
    removed: list[Only] = field(default_factory=list)
    renamed: list[Renaming] = field(default_factory=list)
    shapes: list[Change] = field(default_factory=list)
    dtypes: list[Change] = field(default_factory=list)
    devices: list[Change] = field(default_factory=list)
    values: list[ValueChange] = field(default_factory=list)
    objects: list[ValueChange] = field(default_factory=list)
    tensors: dict[str, int] = field(default_factory=dict)
    distance: dict[str, Any] | None = None
    changed: list[TensorChange] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)

    def __bool__(self) -> bool:
        """Whether the two are the same: what exit code 0 means."""
        return self.same


# --- the sentence


def conclude(
    report: Difference, names: Sequence[NamePair], sides: tuple[Side, Side], *, contents: bool, pattern: str | None
) -> None:
    """Fill in `same`, the summary and what it leaves to say:"""
    counts = {
        "moved": sum(row["moved"] for row in report.state_dicts),
        "added": len(report.added), "removed": len(report.removed), "renamed": len(report.renamed),
        "shape": len(report.shapes), "dtype": len(report.dtypes), "device": len(report.devices),
        "value": len(report.values), "object": len(report.objects), "tensor": len(report.changed),
    }  # fmt: skip
    found = [kind for kind, count in counts.items() if count]
    report.same = not found
    if not found and contents:
        values = "settings, " if pattern is None else ""
        report.summary = f"They are the same: names, shapes, dtypes, {values}and every byte of the tensors."
    elif not found:
        facts = "names, shapes, dtypes and settings" if pattern is None else "names, shapes and dtypes"
        report.summary = f"They have the same {facts}; the numbers of the tensors were not compared."
    elif len(found) == 1 and (only := _only_difference(found[0], report, names, sides)):
        report.summary = f"The only difference is {only}."
    else:
        told = (f"{counts[kind]:,} {_WORDS[kind][counts[kind] != 1]}" for kind in found)
        report.summary = f"They differ: {', '.join(told)}."
    if pattern is not None:
        report.summary = f"Of the tensors that match {pattern!r}: {report.summary[:1].lower()}{report.summary[1:]}"
    _note_unpaired(report, sides)


_WORDS = {
    "moved": ("state dict at another path", "state dicts at other paths"),
    "added": ("tensor added", "tensors added"), "removed": ("tensor removed", "tensors removed"),
    "renamed": ("name changed", "names changed"), "shape": ("shape changed", "shapes changed"),
    "dtype": ("dtype changed", "dtypes changed"), "device": ("device tag changed", "device tags changed"),
    "value": ("setting changed", "settings changed"), "object": ("object changed", "objects changed"),
    "tensor": ("tensor with different numbers", "tensors with different numbers"),
}  # fmt: skip


def _only_difference(kind: str, report: Difference, names: Sequence[NamePair], sides: tuple[Side, Side]) -> str | None:
    """What the only kind of difference comes down to, where one phrase says it."""
    if kind == "renamed":
        if (prefix := removed_prefix(names)) is not None:
            return f"the prefix `{prefix}`"
        if any(pair.reason != "wrapper" for pair in names if pair.left != pair.right):
            return None
        left, right = ({*wrappers_in(name for found in side.state_dicts for name in found.names)} for side in sides)
        wrappers = ", ".join(f"`{wrapper}`" for wrapper in sorted(left ^ right))
        return f"in the names: the wrappers {wrappers}" if wrappers else None
    if kind == "moved":
        (row,) = (row for row in report.state_dicts if row["moved"])  # there is at most one
        return f"the path of the state dict: {dotted(row['left']) or '(root)'} -> {dotted(row['right']) or '(root)'}"
    if kind in ("value", "object") and len(changes := report.values or report.objects) == 1:
        (change,) = changes
        if change.kind == "changed":
            return f"{change.where}: {change.left} -> {change.right}"
        return f"{change.where}, which only the {'left' if change.kind == 'removed' else 'right'} one has"
    rows = {"dtype": report.dtypes, "device": report.devices}.get(kind)
    moves = {(row.left, row.right) for row in rows} if rows else set()
    if rows and len(moves) == 1:
        (old, new), tensors = moves.pop(), "1 tensor" if len(rows) == 1 else f"{len(rows)} tensors"
        return f"the {'dtype' if kind == 'dtype' else 'device tag'} of {tensors}: {old} -> {new}"
    return None


def _note_unpaired(report: Difference, sides: tuple[Side, Side]) -> None:
    """One state dict here and several there: which is meant is the user's to say."""
    left, right = ([dotted(found.where) or "." for found in side.state_dicts] for side in sides)
    paired = any(row["left"] is not None and row["right"] is not None for row in report.state_dicts)
    if left and right and not paired:
        report.notes.append(
            f"No state dict has the path of another. To say which are meant: `select={f'{left[0]}={right[0]}'!r}`"
        )
    if report.left["container"] != report.right["container"]:
        report.notes.append(f"The containers differ: {report.left['container']} and {report.right['container']}.")


MOST_FOR_STRUCTURE = 20_000  # names on both sides together


@dataclass(frozen=True, slots=True)
class NamePair:
    """One tensor on both sides: its two names, and the stage of `match` that took them for the same."""

    left: str
    right: str
    reason: str


def pair_names(left: StateDict, right: StateDict) -> list[NamePair]:
    """Pair the names of two state dicts, in the order of the left one. What is in doubt, or has no partner, is left out."""
    found = match(_params(left), _params(right), stages="names" if is_large(left, right) else "structure")
    partners = {row.old: NamePair(row.old, row.new, row.reason) for row in found.matched}
    partners |= {row.old: NamePair(row.old, row.new, row.reason) for row in found.mismatched}
    return [partners[name] for name in left.names if name in partners]


def is_large(left: StateDict, right: StateDict) -> bool:
    """Whether so many names differ that pairing them by structure would take longer than comparing their bytes."""
    return len(set(left.names) ^ set(right.names)) > MOST_FOR_STRUCTURE


def _params(state_dict: StateDict) -> list[Param]:
    return [_param(name, node) for name, node in tensors_by_name(state_dict.node).items()]


def _param(name: str, node: Node) -> Param:
    if type(node) is Entry:
        return Param(name, node.shape, node.dtype.name)
    unusual = unusual_tensor(node)
    assert unusual is not None
    return Param(name, unusual.shape or (), unusual.dtype.name if unusual.dtype else None, kind=unusual.kind)


def removed_prefix(pairs: Sequence[NamePair]) -> str | None:
    """The one prefix that all renamed pairs have on one side and not on the other; None when there is no such."""
    renamed = [(pair.left, pair.right) for pair in pairs if pair.left != pair.right]
    for ends in (renamed, [(right, left) for left, right in renamed]):
        prefixes = {long[: -len(short)] if long.endswith(short) else "" for long, short in ends}
        if len(prefixes) == 1 and (prefix := prefixes.pop()):
            return prefix
    return None
