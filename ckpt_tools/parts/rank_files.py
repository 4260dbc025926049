"""rank-files: a pickle for each rank of a job, with its parts of the tensors; FSDP1, FSDP2, HSDP, tensor parallelism.

A plain tensor in one is replicated. Source of the names: verl's fsdp_checkpoint_manager.py, dinov2's fsdp/__init__.py."""

from __future__ import annotations

import functools
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import TypeAlias

from ckpt_tools.errors import PartError, TensorError
from ckpt_tools.formats.base import Keys, Warned
from ckpt_tools.formats.checkpoint import Checkpoint
from ckpt_tools.formats.contents import find_tensors
from ckpt_tools.formats.single import decode_file
from ckpt_tools.io.sources import Files
from ckpt_tools.parts.merge import MOST_MISSING, Merger, Piece, check_world, is_named, merged
from ckpt_tools.parts.names import Group, group_of, item_group_of
from ckpt_tools.parts.rank_parts import Part, PartReader, forget_globals
from ckpt_tools.parts.sharded import partly
from ckpt_tools.text import dotted, some, these_ranks
from ckpt_tools.tree import exchange
from ckpt_tools.tree.exchange import DROP
from ckpt_tools.tree.nodes import PLAIN, Entry, Node, Object, Where
from ckpt_tools.tree.visit import walk
from ckpt_tools.values.boxes import Sizes

CONTAINER = "rank-files"
_STEPS = frozenset(("step", "steps", "epoch", "iteration", "iter", "global_step", "global_steps"))
_FLAT = ("_flat_param", "flat_param")  # torch/distributed/fsdp/_flat_param.py
_OWN_STATE = re.compile(r"rng|random", re.IGNORECASE)


# What something beside the files says of plain tensors at a place: the whole shape and the boxes; None for what all have whole
Places: TypeAlias = Callable[[Where, Sequence[tuple[int, Entry]]], tuple[Sizes, list[Piece]] | None]


def decode(names: Sequence[str], files: Files, *, partial: bool = False) -> Checkpoint:
    group = group_of(names[0], names) or item_group_of(names[0], names)
    assert group is not None, "they were found by their ranks"
    return merge(group, files, Merger(Keys(), partial=partial))


def merge(group: Group, files: Files, merger: Merger, places: Places | None = None, inside: Where = ()) -> Checkpoint:
    """Read the structure of every rank's file and put the tensors together; no tensor bytes. `inside`: where they will be."""
    if doubled := sorted({*group.every} - {*group.names.values()}):
        raise PartError(f"{some(doubled)} are parts of ranks that have a file already.", fix="Remove one of the two.")
    world, ranks = group.world or max(group.names) + 1, sorted(group.names)
    check_world(f"{group.names[ranks[0]]} is one of {world} parts", group.names, world, partial=merger.partial)
    parts = {rank: decode_file(files.open(group.names[rank])) for rank in ranks}
    parts[ranks[0]].root = merger.keys.renew(parts[ranks[0]].root)
    merging = _Merging(group, {rank: decoded.root for rank, decoded in parts.items()}, merger, places, world, inside)
    root = merger.leave_out(merging.run(), inside)
    made = merged(CONTAINER, root, files, list(parts.values()), merger)
    forget_globals(made, merging.objects)
    if merging.differing:
        text = f"values differ between ranks, the first rank's are taken: {some(merging.differing)}"
        made.warnings.append(Warned("parts-differ", text))
    if missing := [rank for rank in range(merging.world) if rank not in parts]:
        made.warnings.append(partly(f"of {merging.world} ranks' files are", [these_ranks(missing)]))
    return made


class _Merging:
    """The trees of all ranks on their way into one: the first rank's, with whole tensors in it."""

    def __init__(
        self, group: Group, roots: Mapping[int, Node], merger: Merger, places: Places | None, world: int, inside: Where
    ) -> None:
        self.group, self.roots, self.ranks, self.world, self.inside = group, roots, sorted(roots), world, inside
        self.merger, self.places, self.reader = merger, places, PartReader()
        self.objects: list[Object] = []
        self.differing: list[str] = []

    def run(self) -> Node:
        tensors = {rank: {found.where: found.node for found in find_tensors(root)} for rank, root in self.roots.items()}
        if flat := [where for where in tensors[self.ranks[0]] if where and str(where[-1]).rpartition(".")[2] in _FLAT]:
            raise PartError(
                f"{dotted(flat[0])!r} is all parameters of a module in one row, without their names: FSDP1's LOCAL_STATE_DICT.",
                fix="Load it where it was saved, and save it again with SHARDED_STATE_DICT or FULL_STATE_DICT.",
            )
        self._check_values()
        new = dict[int, Node]()
        for where in dict.fromkeys(where for rank in self.ranks for where in tensors[rank]):
            held = {rank: tensors[rank][where] for rank in self.ranks if where in tensors[rank]}
            whole = self.merger.unless_lost(dotted((*self.inside, *where)), functools.partial(self._merged, where, held))
            if whole is not DROP:
                new[id(held[self.ranks[0]])] = whole
        return exchange.replace(self.roots[self.ranks[0]], lambda node: new.get(id(node), node))

    def _check_values(self) -> None:
        """Values that count steps must agree; of others the first rank's are taken, with a word."""
        values = {rank: dict(_values(root)) for rank, root in self.roots.items()}
        for where, value in values[self.ranks[0]].items():
            ranks = [rank for rank in self.ranks if where not in values[rank] or not _same(values[rank][where], value)]
            if ranks and where and where[-1] in _STEPS:
                raise PartError(
                    f"{dotted(where)!r} is {value!r} on rank {self.ranks[0]}, and another on {these_ranks(ranks)}.",
                    why="They were saved at different steps.",
                )
            self.differing += [dotted(where)] if ranks else []

    def _merged(self, where: Where, held: Mapping[int, Node]) -> Node:
        """The tensor that ranks hold at one place."""
        name = dotted((*self.inside, *where))
        if missing := [rank for rank in self.ranks if rank not in held]:
            fix = "Are these files of one job? Stages of a pipeline are not parts of one another."
            raise PartError(f"{name!r} is not on {these_ranks(missing)}.", fix=fix, rest=is_named(where))
        entries = [(rank, node) for rank, node in held.items() if type(node) is Entry]
        if len(entries) == len(held):
            first = entries[0][1]
            if any(type(key) is str and _OWN_STATE.search(key) for key in where):
                return first  # every rank's random numbers are its own
            placed = self.places(where, entries) if self.places else None
            if placed is not None:
                return self.merger.tensor(name, first.dtype, *placed, requires_grad=first.requires_grad)
            return self.merger.replicated(name, entries)
        self.objects += [node for node in held.values() if type(node) is Object]
        parts = {rank: self._part(name, rank, node) for rank, node in held.items()}
        one = parts[self.ranks[0]]
        for rank, part in parts.items():
            if (part.kind, part.shape) != (one.kind, one.shape):
                raise PartError(f"{name!r} is another tensor on rank {rank} than on rank {self.ranks[0]}.", rest=True)
            self._check_world(name, rank, part)
        pieces = [replace(box, rank=rank) for rank, part in parts.items() for box in part.held]
        return self.merger.tensor(name, one.dtype, one.shape, pieces, requires_grad=one.requires_grad)

    def _part(self, name: str, rank: int, node: Node) -> Part:
        file = self.group.names[rank]
        try:
            part = self.reader.read(node)
        except TensorError as error:
            raise PartError(f"{name!r} in {file} cannot be placed.", why=str(error), rest=True) from None
        if part is None:
            raise PartError(f"{name!r} is a part on some ranks, and something else in {file}.", rest=True)
        if part.rank is not None and part.rank != rank:
            raise PartError(f"{file} says by its name that it is rank {rank}'s, and holds the part of rank {part.rank}.")
        if part.is_partial:
            raise PartError(f"{name!r} is a sum that the ranks have not added up (Partial).", rest=True)
        return part

    def _check_world(self, name: str, rank: int, part: Part) -> None:
        last = max(part.mesh.ranks if part.mesh is not None else (part.world - 1,), default=0)
        if last < self.world:
            return
        other = max(part.world, last + 1)
        rest = self.group.world is None and other <= MOST_MISSING  # of names that do not tell how many there were
        if not (rest and self.merger.partial):
            raise PartError(f"{name!r} on rank {rank} is of a job of {other} ranks; here are files of {self.world}.", rest=rest)
        self.world = other


def _values(root: Node) -> Iterator[tuple[Where, Node]]:
    """Plain values by their paths, those inside objects left out."""
    for where, node in walk(root, stop=lambda node: type(node) in (Object, Entry)):
        if type(node) in PLAIN:
            yield where, node


def _same(one: Node, other: Node) -> bool:
    return type(one) is type(other) and (one == other or one != one)
