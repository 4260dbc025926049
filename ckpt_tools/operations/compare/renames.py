"""Which names of two state dicts are one tensor under another name, as `match` finds them: by wrapper, prefix, structure."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from ckpt_tools.formats.open import StateDict, tensors_by_name
from ckpt_tools.matching import match
from ckpt_tools.matching.params import Param
from ckpt_tools.pickling.torch_objects import unusual_tensor
from ckpt_tools.tree.nodes import Entry, Node

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
    """The one prefix that all renamed pairs have on one side and not on the other; None when there is no such.

    >>> removed_prefix([NamePair("module.conv.weight", "conv.weight", "wrapper"), NamePair("n", "n", "exact")])
    'module.'
    """
    renamed = [(pair.left, pair.right) for pair in pairs if pair.left != pair.right]
    for ends in (renamed, [(right, left) for left, right in renamed]):
        prefixes = {long[: -len(short)] if long.endswith(short) else "" for long, short in ends}
        if len(prefixes) == 1 and (prefix := prefixes.pop()):
            return prefix
    return None
