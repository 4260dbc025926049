"""rank-files: a file for each rank of a job, with its parts of the tensors; FSDP1, FSDP2, HSDP, tensor parallelism.

    model_world_size_4_rank_0.pt ... _rank_3.pt     MUST  one pickle a rank, alike but for the parts: DTensors or ShardedTensors
    optim_world_size_4_rank_0.pt ...                a checkpoint of its own, beside it
    model.rank_0.pth ...                            the same under another name: one number is the rank

Source: verl's `utils/checkpoint/fsdp_checkpoint_manager.py` (names), dinov2's `fsdp/__init__.py`; torch.save of what
`model.state_dict()` or `get_model_state_dict` gives. A plain tensor in such a file is replicated, never a part.
"""

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
from ckpt_tools.parts.rank_parts import Part, PartReader
from ckpt_tools.parts.sharded import partly
from ckpt_tools.text import dotted, some, these_ranks
from ckpt_tools.tree import exchange
from ckpt_tools.tree.exchange import DROP
from ckpt_tools.tree.nodes import PLAIN, Entry, Global, Node, Object, Where
from ckpt_tools.tree.visit import reachable, walk
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
    taken = set(group.names.values())
    if doubled := [name for name in group.every if name not in taken]:
        raise PartError(f"{some(doubled)} are parts of ranks that have a file already.", fix="Remove one of the two.")
    world = group.world or max(group.names) + 1
    check_world(f"{next(iter(group.names.values()))} is one of {world} parts", group.names, world, partial=merger.partial)
    ranks = sorted(group.names)
    parts = {rank: decode_file(files.open(group.names[rank])) for rank in ranks}
    roots = {rank: decoded.root for rank, decoded in parts.items()}
    roots[ranks[0]] = merger.keys.renew(roots[ranks[0]])
    merging = _Merging(group, roots, merger, places, world, inside)
    root = merger.leave_out(merging.run(), inside)
    made = merged(CONTAINER, root, files, list(parts.values()), merger)
    gone = _globals(tuple(merging.objects)) - _globals(root)  # what parts alone name, which are whole tensors now
    made.globals = [name for name in made.globals if name not in gone]
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
        for where in tensors[self.ranks[0]]:
            if where and str(where[-1]).rpartition(".")[2] in _FLAT:
                what = "all parameters of a module in one row, without their names: FSDP1's LOCAL_STATE_DICT"
                raise PartError(
                    f"{dotted(where)!r} is {what}.",
                    fix="Load it where it was saved, and save it again with SHARDED_STATE_DICT or FULL_STATE_DICT.",
                )
        uneven = self._check_names(tensors)
        self._check_values()
        new = dict[int, Node]()
        for where, node in tensors[self.ranks[0]].items():
            if where not in uneven:
                make = functools.partial(self._merged, where, [tensors[rank][where] for rank in self.ranks])
                whole = self.merger.unless_lost(self._name(where), make)
                new[id(node)] = node if whole is DROP else whole
        return exchange.replace(self.roots[self.ranks[0]], lambda node: new.get(id(node), node))

    def _name(self, where: Where) -> str:
        return dotted((*self.inside, *where))

    def _check_names(self, tensors: Mapping[int, Mapping[Where, Node]]) -> set[Where]:
        """The tensors that not every rank has, where they may be left out."""
        every, uneven = dict.fromkeys(where for found in tensors.values() for where in found), set[Where]()
        for rank, found in tensors.items():
            missing = [where for where in every if where not in found]
            if missing and not (self.merger.partial and all(map(is_named, missing))):
                raise PartError(
                    f"Rank {rank} does not have {some(list(map(self._name, missing)))}.",
                    why="The files of other ranks have it.",
                    fix="Are these files of one job? Stages of a pipeline are not parts of one another.", rest=True,
                )  # fmt: skip
            self.merger.lost.update((self._name(where), f"not on rank {rank}") for where in missing)
            uneven.update(missing)
        return uneven

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

    def _merged(self, where: Where, nodes: Sequence[Node]) -> Node:
        name = self._name(where)
        entries = [(rank, node) for rank, node in zip(self.ranks, nodes, strict=True) if type(node) is Entry]
        if len(entries) == len(nodes):
            first = entries[0][1]
            if any(type(key) is str and _OWN_STATE.search(key) for key in where):
                return first  # every rank's random numbers are its own
            placed = self.places(where, entries) if self.places else None
            if placed is not None:
                return self.merger.tensor(name, first.dtype, *placed, requires_grad=first.requires_grad)
            return self.merger.replicated(name, entries)
        self.objects += [node for node in nodes if type(node) is Object]
        parts = {rank: self._part(name, rank, node) for rank, node in zip(self.ranks, nodes, strict=True)}
        self._check_alike(name, parts)
        pieces = [replace(box, rank=rank) for rank, part in parts.items() for box in part.held]
        one = parts[self.ranks[0]]
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
        return part

    def _check_alike(self, name: str, parts: Mapping[int, Part]) -> None:
        first = parts[self.ranks[0]]
        for rank, part in parts.items():
            if (part.kind, part.shape, part.dtype.name) != (first.kind, first.shape, first.dtype.name):
                raise PartError(f"{name!r} is another tensor on rank {rank} than on rank {self.ranks[0]}.", rest=True)
            if part.is_partial:
                raise PartError(f"{name!r} is a sum that the ranks have not added up (Partial).", rest=True)
            last = max(part.mesh.ranks if part.mesh is not None else (part.world - 1,), default=0)
            if last >= self.world:
                other = max(part.world, last + 1)
                rest = self.group.world is None and other <= MOST_MISSING  # of names that do not tell how many there were
                if not (rest and self.merger.partial):
                    text = f"{name!r} on rank {rank} is of a job of {other} ranks; here are files of {self.world}."
                    raise PartError(text, rest=rest)
                self.world = other


def _globals(root: Node) -> set[Global]:
    return {node for node in reachable(root) if type(node) is Global}


def _values(root: Node) -> Iterator[tuple[Where, Node]]:
    """Plain values by their paths, those inside objects left out."""
    for where, node in walk(root, stop=lambda node: type(node) in (Object, Entry)):
        if type(node) in PLAIN:
            yield where, node


def _same(one: Node, other: Node) -> bool:
    return type(one) is type(other) and (one == other or one != one)
