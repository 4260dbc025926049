"""Which tensors of a checkpoint are tied, and which merely lie on one storage.

Tied tensors are the same elements under several names, whatever their shapes: what is written to one is written to all. Views
on different parts of one storage (the flat buffers of ZeRO and FSDP, slices) share its bytes in the file, nothing else.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from ckpt_tools.formats.open import Checkpoint
from ckpt_tools.text import dotted
from ckpt_tools.tree.nodes import Entry, Where

_Elements = tuple[object, ...]


@dataclass(slots=True)
class Sharing:
    """Groups of names: within one state dict as they are, across several as dotted paths."""

    tied: list[list[str]] = field(default_factory=list)
    shared: list[list[str]] = field(default_factory=list)


def find_sharing(checkpoint: Checkpoint) -> Sharing:
    """The groups of a checkpoint, in order; tensors without bytes are in none."""
    entries = [(tensor.where, tensor.node) for tensor in checkpoint.tensors if type(tensor.node) is Entry]
    if len({id(entry.storage) for _, entry in entries}) == len(entries):  # as in most files
        return Sharing()
    groups: dict[int, list[tuple[Where, Entry]]] = {}
    for where, entry in entries:
        if entry.nbytes:
            groups.setdefault(id(entry.storage), []).append((where, entry))
    state_dicts = {state_dict.where: frozenset(state_dict.names) for state_dict in checkpoint.state_dicts}
    found = Sharing()
    for group in groups.values():
        if len(group) == 1:
            continue
        same: dict[_Elements, list[Where]] = {}
        for where, entry in group:
            same.setdefault(elements_of(entry), []).append(where)
        found.tied += [_names(wheres, state_dicts) for wheres in same.values() if len(wheres) > 1]
        if len(same) > 1:
            found.shared.append(_names([where for where, _ in group], state_dicts))
    return found


def elements_of(entry: Entry) -> _Elements:
    """What says which bytes of its storage a tensor is, in whatever order: equal for the same elements."""
    bits, dense = entry.dtype.bits, 1
    steps = sorted((stride, size) for stride, size in zip(entry.stride, entry.shape, strict=True) if size > 1)
    for stride, size in steps:
        if stride != dense:
            return entry.offset * bits, bits, tuple(steps)
        dense *= size
    return entry.offset * bits, entry.numel * bits  # a run of bytes, be it transposed or of another dtype


def _names(wheres: list[Where], state_dicts: dict[Where, frozenset[str]]) -> list[str]:
    inside = len({where[:-1] for where in wheres}) == 1 and wheres[0][:-1] in state_dicts
    return [str(where[-1]) if inside else dotted(where) for where in wheres]
