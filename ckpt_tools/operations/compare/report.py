"""What `ckpt diff` tells, as records, and the sentence that it comes down to."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from ckpt_tools.formats.contents import StateDict, tensors_by_name
from ckpt_tools.matching import match
from ckpt_tools.matching.records import Param
from ckpt_tools.pickling.torch_objects import unusual_tensor
from ckpt_tools.text import Report, dotted
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
    """A tensor with its name on the left and on the right, and the stage of `match` that took them for the same.

    Of a name that is not the same `reason` is "wrapper", "prefix" or "structure".
    """

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


def conclude(report: Difference, names: Sequence[Renaming], *, contents: bool, pattern: str | None) -> None:
    """Fill in `same`, the summary and what it leaves to say."""
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
    elif found == ["renamed"] and (prefix := removed_prefix(names)) is not None:
        report.summary = f"The only difference is the prefix `{prefix}`."
    else:
        told = (f"{counts[kind]:,} {_WORDS[kind][counts[kind] != 1]}" for kind in found)
        report.summary = f"They differ: {', '.join(told)}."
    if pattern is not None:
        report.summary = f"Of the tensors that match {pattern!r}: {report.summary[:1].lower()}{report.summary[1:]}"
    _note_unpaired(report)


_WORDS = {
    "moved": ("state dict at another path", "state dicts at other paths"),
    "added": ("tensor added", "tensors added"), "removed": ("tensor removed", "tensors removed"),
    "renamed": ("name changed", "names changed"), "shape": ("shape changed", "shapes changed"),
    "dtype": ("dtype changed", "dtypes changed"), "device": ("device tag changed", "device tags changed"),
    "value": ("setting changed", "settings changed"), "object": ("object changed", "objects changed"),
    "tensor": ("tensor with different numbers", "tensors with different numbers"),
}  # fmt: skip


def _note_unpaired(report: Difference) -> None:
    """One state dict here and several there: which is meant is the user's to say."""
    left, right = ([row[side] for row in report.state_dicts if row[side] is not None] for side in ("left", "right"))
    if left and right and len(left) + len(right) == len(report.state_dicts):
        meant = f"{dotted(left[0]) or '.'}={dotted(right[0]) or '.'}"
        report.notes.append(f"No state dict has the path of another. To say which are meant: `select={meant!r}`")
    if report.left["container"] != report.right["container"]:
        report.notes.append(f"The containers differ: {report.left['container']} and {report.right['container']}.")


MOST_FOR_STRUCTURE = 20_000  # names on both sides together


def pair_names(left: StateDict, right: StateDict) -> list[Renaming]:
    """Pair the names of two state dicts, in the order of the left one. What is in doubt, or has no partner, is left out."""
    found = match(_params(left), _params(right), stages="names" if is_large(left, right) else "structure")
    partners = {row.old: Renaming(row.old, row.new, row.reason) for row in found.matched}
    partners |= {row.old: Renaming(row.old, row.new, row.reason) for row in found.mismatched}
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


def removed_prefix(pairs: Sequence[Renaming]) -> str | None:
    """The one prefix that all renamed pairs have on one side and not on the other; None when there is no such."""
    renamed = [(pair.left, pair.right) for pair in pairs if pair.left != pair.right]
    for ends in (renamed, [(right, left) for left, right in renamed]):
        prefixes = {long[: -len(short)] if long.endswith(short) else "" for long, short in ends}
        if len(prefixes) == 1 and (prefix := prefixes.pop()):
            return prefix
    return None
