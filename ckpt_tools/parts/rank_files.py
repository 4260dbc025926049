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
from dataclasses import dataclass, field, replace
from math import prod
from typing import TypeAlias

from ckpt_tools.errors import PartError, TensorError
from ckpt_tools.formats.base import Keys, Warned
from ckpt_tools.formats.checkpoint import Checkpoint
from ckpt_tools.formats.contents import is_tensor
from ckpt_tools.formats.single import decode_file
from ckpt_tools.io.sources import Files
from ckpt_tools.parts.merge import Merger, Piece, Row, check_world, merged
from ckpt_tools.parts.names import Group, group_of, item_group_of
from ckpt_tools.parts.rank_parts import Part, PartReader
from ckpt_tools.text import dotted, some, these_ranks
from ckpt_tools.tree import exchange
from ckpt_tools.tree.exchange import DROP, Drop
from ckpt_tools.tree.nodes import PLAIN, Dict, Entry, Global, Node, Object, Where
from ckpt_tools.tree.visit import reachable, walk
from ckpt_tools.values.boxes import Sizes

CONTAINER = "rank-files"
_STEPS = frozenset(("step", "steps", "epoch", "iteration", "iter", "global_step", "global_steps"))
_OWN_STATE = re.compile(r"rng|random", re.IGNORECASE)


# What something beside the files says of plain tensors at a place: the whole shape and the boxes; None for what all have whole
Places: TypeAlias = Callable[[Where, Sequence[tuple[int, Entry]]], tuple[Sizes, list[Piece]] | None]


def decode(names: Sequence[str], files: Files, *, partial: bool = False) -> Checkpoint:
    group = group_of(names[0], names) or item_group_of(names[0], names)
    assert group is not None, "they were found by their ranks"
    return merge(group, files, partial=partial)


def merge(
    group: Group, files: Files, *, partial: bool = False, places: Places | None = None, names: Names | None = None
) -> Checkpoint:
    """Read the structure of every rank's file and put the tensors together; no tensor bytes."""
    taken = set(group.names.values())
    if doubled := [name for name in group.every if name not in taken]:
        raise PartError(f"{some(doubled)} are parts of ranks that have a file already.", fix="Remove one of the two.")
    world = group.world or max(group.names) + 1
    there = next(iter(group.names.values()))
    check_world(f"{there} is one of {world} parts", group.names, world, partial=partial)
    keys, ranks = Keys(), sorted(group.names)
    parts = {rank: decode_file(files.open(group.names[rank])) for rank in ranks}
    roots = {rank: decoded.root for rank, decoded in parts.items()}
    roots[ranks[0]] = keys.renew(roots[ranks[0]])
    merging = _Merging(group, roots, Merger(keys, partial=partial), places, names, world)
    made = merged(CONTAINER, merging.run(), files, list(parts.values()))
    gone = _globals(tuple(merging.objects)) - _globals(merging.root)  # what parts alone name, which are whole tensors now
    made.globals = [name for name in made.globals if name not in gone]
    made.warnings += merging.warnings

    def locate(root: Node) -> Node:
        root = merging.compared(root)
        made.lost = list(merging.merger.lost.items())
        return root

    made.lost, made.locator = list(merging.merger.lost.items()), locate
    return made


class _Merging:
    """The trees of all ranks on their way into one: the first rank's, with whole tensors in it."""

    def __init__(
        self, group: Group, roots: Mapping[int, Node], merger: Merger, places: Places | None, names: Names | None, world: int
    ) -> None:
        self.group, self.roots, self.ranks, self.world = group, roots, sorted(roots), world
        self.merger, self.places, self.names, self.reader = merger, places, names, PartReader()
        self.warnings: list[Warned] = []
        self.objects: list[Object] = []
        self.gone: list[Node] = []

    def run(self) -> Node:
        tensors = {rank: dict(_tensors(root)) for rank, root in self.roots.items()}
        splitting = self._split(tensors)
        uneven = self._check_names(tensors)
        self._check_values()
        new: dict[int, Node | Drop] = {}
        for where, node in tensors[self.ranks[0]].items():
            if where in uneven:
                new[id(node)] = DROP
                continue
            make = functools.partial(self._merged, where, [tensors[rank][where] for rank in self.ranks])
            # Of a list, which would close up, none may be lost.
            new[id(node)] = self.merger.unless_lost(dotted(where), make) if _is_named(where) else make()
        new.update((id(node), DROP) for node in self.gone)
        self.root = exchange.replace(self.roots[self.ranks[0]], lambda node: new.get(id(node), node))
        if splitting is not None:
            splitting.put(self.root)
        self._check_rest()
        return self.root

    def _split(self, tensors: Mapping[int, dict[Where, Node]]) -> Splitting | None:
        """Cut rows of parameters into tensors; what is in their place is no longer among `tensors`."""
        places = [where for where in tensors[self.ranks[0]] if is_flat(where)]
        if places and self.names is None and not self.merger.partial:
            raise _unnamed(dotted(places[0]))
        if not places or self.names is None:
            return None
        splitting = Splitting(self.names, self.merger, self.world)
        rows = {where: {rank: self._part(dotted(where), rank, own[where]) for rank, own in tensors.items() if where in own}
                for where in places}  # fmt: skip
        for where in splitting.split(rows, tensors):
            for rank, own in tensors.items():
                node = own.pop(where, None)
                if node is not None and rank == self.ranks[0]:
                    self.gone.append(node)
                self.objects += [node] if type(node) is Object else []
        return splitting

    def compared(self, root: Node) -> Node:
        """The tree, once what several ranks hold was compared. What differs goes, if what is whole is wanted."""
        if not self.merger.partial:
            self.merger.check_replicas()
            return root
        wrong = self.merger.differing()
        self.merger.lost |= {name: f"different values on {these_ranks(sorted(ranks))}" for name, ranks in wrong.items()}
        gone = {id(node) for where, node in _tensors(root) if dotted(where) in wrong}
        self.root = exchange.replace(root, lambda node: DROP if id(node) in gone else node)
        self._check_rest()
        return self.root

    def _check_rest(self) -> None:
        """With `partial`: say which ranks are missing; something must be left."""
        if not self.merger.partial:
            return
        missing = [rank for rank in range(self.world) if rank not in self.roots]
        if missing and not any(warned.code == "parts-missing" for warned in self.warnings):
            text = f"of {self.world} ranks' files are missing: {these_ranks(missing)}; what is whole without them is taken"
            self.warnings.append(Warned("parts-missing", text))
        if self.merger.lost and next(_tensors(self.root), None) is None:
            (name, why), *more = self.merger.lost.items()
            others = f", and {len(more)} more" if more else ""
            raise PartError(f"No tensor is whole in the files of {these_ranks(self.ranks)}: {name!r} {why}{others}.")

    def _check_names(self, tensors: Mapping[int, Mapping[Where, Node]]) -> set[Where]:
        """The tensors that not every rank has, where they may be left out."""
        uneven: dict[Where, list[int]] = {}
        for where in dict.fromkeys(where for found in tensors.values() for where in found):
            if lacking := [rank for rank, found in tensors.items() if where not in found]:
                uneven[where] = lacking
        if wrong := [where for where in uneven if not (self.merger.partial and _is_named(where))]:
            rank = min(uneven[where][0] for where in wrong)
            missing = [dotted(where) for where, ranks in uneven.items() if rank in ranks]
            raise PartError(
                f"Rank {rank} does not have {some(missing)}.", why="The files of other ranks have it.",
                fix="Are these files of one job? Stages of a pipeline are not parts of one another.", rest=True,
            )  # fmt: skip
        self.merger.lost |= {dotted(where): f"not on {these_ranks(ranks)}" for where, ranks in uneven.items()}
        return set(uneven)

    def _check_values(self) -> None:
        """Values that count steps must agree; of others the first rank's are taken, with a word."""
        values = {rank: dict(_values(root)) for rank, root in self.roots.items()}
        first, own = values[self.ranks[0]], list[str]()
        for where, value in first.items():
            ranks = [rank for rank in self.ranks if where not in values[rank] or not _same(values[rank][where], value)]
            if ranks and where and where[-1] in _STEPS:
                raise PartError(
                    f"{dotted(where)!r} is {value!r} on rank {self.ranks[0]}, and another on {these_ranks(ranks)}.",
                    why="They were saved at different steps.",
                )
            own += [dotted(where)] if ranks else []
        if own:
            self.warnings.append(
                Warned("parts-differ", f"values differ between ranks, the first rank's are taken: {some(own)}")
            )

    def _merged(self, where: Where, nodes: Sequence[Node]) -> Node:
        name = dotted(where)
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
        if self.names is None and is_flat((name,)):
            raise _unnamed(name)
        return part

    def _check_alike(self, name: str, parts: Mapping[int, Part]) -> None:
        first = parts[self.ranks[0]]
        for rank, part in parts.items():
            if (part.kind, part.shape, part.dtype.name) != (first.kind, first.shape, first.dtype.name):
                raise PartError(f"{name!r} is another tensor on rank {rank} than on rank {self.ranks[0]}.", rest=True)
            if part.is_partial:
                raise PartError(f"{name!r} is a sum that the ranks have not added up (Partial).", rest=True)
            ranks = part.mesh.ranks if part.mesh is not None else (part.world - 1,)
            if max(ranks, default=0) < self.world:
                continue
            other = max(part.world, max(ranks) + 1)
            if not self.merger.partial or self.group.world is not None:
                text = f"{name!r} on rank {rank} is of a job of {other} ranks; here are files of {self.world}."
                raise PartError(text, rest=self.group.world is None)
            self.world = other  # names that say nothing of it: the others are missing


def _unnamed(name: str) -> PartError:
    return PartError(
        f"{name!r} is all parameters of a module in one row, without their names: FSDP1's LOCAL_STATE_DICT.",
        fix="A target tells names and shapes: `like=TARGET`, which is a file of the model, or package.module:callable.",
        rest=True, unnamed=True,
    )  # fmt: skip


def _globals(root: Node) -> set[Global]:
    return {node for node in reachable(root) if type(node) is Global}


def _tensors(root: Node) -> Iterator[tuple[Where, Node]]:
    return ((where, node) for where, node in walk(root, stop=is_tensor, plain=False) if is_tensor(node))


def _values(root: Node) -> Iterator[tuple[Where, Node]]:
    """Plain values by their paths, those inside objects left out."""
    for where, node in walk(root, stop=lambda node: type(node) in (Object, Entry)):
        if type(node) in PLAIN:
            yield where, node


def _same(one: Node, other: Node) -> bool:
    return type(one) is type(other) and (one == other or one != one)


def _is_named(where: Where) -> bool:
    """Whether a tensor is in a dict: one of a list cannot be left out, nor one that is all that there is."""
    return bool(where) and type(where[-1]) is str


# --- FSDP1's LOCAL_STATE_DICT: the parameters of a wrapped module in one row (`_flat_param`), without names or shapes
#
# A target has both, in the order in which FSDP puts parameters into a row. With `use_orig_params=True` every parameter begins
# at a multiple of 16 bytes, the row is filled up to equal parts, and what each rank has of every parameter stands beside it,
# as runs under its name. Buffers are whole on every rank.
#
# Source: torch/distributed/fsdp/_flat_param.py (`_init_flat_param_and_metadata`), _state_dict_utils.py
# (`_local_post_state_dict_hook`).


FLAT = "_flat_param"
_ALIGNMENT = 16  # bytes


def is_flat(where: Where) -> bool:
    """Whether a tensor is a row of parameters, by its name."""
    return bool(where) and str(where[-1]).rpartition(".")[2] in (FLAT, "flat_param")


@dataclass(frozen=True, slots=True)
class Names:
    """What a target tells: the shapes of its tensors by name, in order, and of tied ones the first name of each."""

    shapes: Mapping[str, Sizes]
    first: Mapping[str, str]


@dataclass(slots=True)
class Splitting:
    """The rows of one checkpoint on their way into tensors."""

    names: Names
    merger: Merger
    world: int
    made: dict[Where, dict[str, Entry]] = field(default_factory=dict)

    def split(self, rows: Mapping[Where, Mapping[int, Part]], tensors: Mapping[int, Mapping[Where, Node]]) -> set[Where]:
        """Cut rows into tensors; returns the places of what the files have in their place."""
        gone = set(rows)
        for where, parts in rows.items():
            holder, prefix = where[:-1], str(where[-1]).rpartition(".")[0]
            deeper = [_below(str(other[-1]).rpartition(".")[0]) for other in rows if other[:-1] == holder and other != where]
            inside = [head for head in deeper if head.startswith(_below(prefix)) and head != _below(prefix)]
            names = [
                name for name in self.names.shapes
                if name.startswith(_below(prefix)) and not name.startswith(tuple(inside)) and self.names.first[name] == name
                and not self._is_buffer((*holder, name), tensors)
            ]  # fmt: skip
            made = self.made.setdefault(holder, {})
            made.update(self._cut(where, names, parts))
            made.update({name: made[first] for name, first in self.names.first.items() if first in made})
            gone |= {(*holder, name) for name in made}
        return gone

    def put(self, root: Node) -> None:
        """Put the tensors into their mappings, in the target's order."""
        for holder, made in self.made.items():
            node = root
            for key in holder:
                node = node.named[str(key)] if type(node) is Dict else None
            if type(node) is not Dict:
                raise PartError(f"{dotted(holder)!r} is not a mapping of names to tensors.")
            rest = node.named
            order = [name for name in self.names.shapes if name in made or name in rest]
            others = [(key, value) for key, value in node.items if key not in order]
            node.items[:] = [*((name, made[name] if name in made else rest[name]) for name in order), *others]

    def _is_buffer(self, where: Where, tensors: Mapping[int, Mapping[Where, Node]]) -> bool:
        """Whether every rank has it whole."""
        shape = self.names.shapes[str(where[-1])]
        return all(type(entry := own.get(where)) is Entry and entry.shape == shape for own in tensors.values())

    def _cut(self, where: Where, names: Sequence[str], parts: Mapping[int, Part]) -> dict[str, Entry]:
        first = next(iter(parts.values()))
        boxes = sorted(
            (box.offsets[0], rank, box.entry) for rank, part in parts.items() for box in part.held if box.entry.numel
        )
        pieces = [Piece((at,), entry, rank) for at, rank, entry in boxes]
        self.merger.tensor(dotted(where), first.dtype, first.shape, pieces)  # which sees to it that all of it is here, once
        starts = self._starts(where, names, first)
        row = Row([(rank, entry.numel, entry) for _, rank, entry in boxes])
        made = {}
        for name, start in zip(names, starts, strict=True):
            shape = self.names.shapes[name]
            found = list(row.cut(start, prod(shape)))
            made[name] = self.merger.tensor(name, first.dtype, shape, found, measured=(prod(shape),))
        return made

    def _starts(self, where: Where, names: Sequence[str], part: Part) -> list[int]:
        """Where in a row each parameter begins."""
        counts = [prod(self.names.shapes[name]) for name in names]
        ends = list[int]()
        for aligned in (1, _ALIGNMENT // part.dtype.itemsize):
            starts, at = list[int](), 0
            for count in counts:
                at += -at % aligned
                starts.append(at)
                at += count
            at += -at % self.world if aligned > 1 else 0
            if at == part.shape[0]:
                return starts
            ends.append(at)
        raise PartError(
            f"{dotted(where)!r} has {part.shape[0]} elements, and the {len(names)} parameters of the target that belong into "
            f"it have {sum(counts)}.", why=f"Filled up as FSDP does with use_orig_params they have {ends[-1]}.",
            fix="Is the target the model that was saved?",
        )  # fmt: skip


def _below(prefix: str) -> str:
    return f"{prefix}." if prefix else ""
