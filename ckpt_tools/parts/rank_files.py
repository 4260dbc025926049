"""rank-files: a file for each rank of a job, with its parts of the tensors; FSDP1, FSDP2, HSDP, tensor parallelism.

    model_world_size_4_rank_0.pt ... _rank_3.pt     MUST  one pickle a rank, alike but for the parts: DTensors or ShardedTensors
    optim_world_size_4_rank_0.pt ...                a checkpoint of its own, beside it
    model.rank_0.pth ...                            the same under another name: one number is the rank

Source: verl's `utils/checkpoint/fsdp_checkpoint_manager.py` (names), dinov2's `fsdp/__init__.py`; torch.save of what
`model.state_dict()` or `get_model_state_dict` gives. A plain tensor in such a file is replicated, never a part.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Protocol

from ckpt_tools.errors import PartError, TensorError
from ckpt_tools.formats.base import Decoded, Keys, Warned
from ckpt_tools.formats.contents import is_tensor
from ckpt_tools.formats.single import decode_file
from ckpt_tools.io.sources import Files
from ckpt_tools.parts.flat_rows import Names, Splitting, is_flat
from ckpt_tools.parts.merge import Merger, Piece, wrong_ranks
from ckpt_tools.parts.names import Group, group_of, item_group_of
from ckpt_tools.parts.rank_parts import Part, PartReader
from ckpt_tools.parts.sharded import joined
from ckpt_tools.text import dotted, some, these_ranks
from ckpt_tools.tree import exchange
from ckpt_tools.tree.exchange import Drop
from ckpt_tools.tree.nodes import PLAIN, Entry, Global, Node, Object, Where
from ckpt_tools.tree.visit import reachable, walk
from ckpt_tools.values.boxes import Sizes

CONTAINER = "rank-files"
_STEPS = frozenset(("step", "steps", "epoch", "iteration", "iter", "global_step", "global_steps"))
_OWN_STATE = re.compile(r"rng|random", re.IGNORECASE)


class Places(Protocol):
    """What something beside the files says of plain tensors in them."""

    def shares(self, where: Where, entries: Sequence[tuple[int, Entry]]) -> tuple[Sizes, list[Piece]] | None:
        """The whole shape and the boxes of what is a part; None for what every rank has whole."""
        ...


def decode(names: Sequence[str], files: Files, *, partial: bool = False) -> Decoded:
    """Read files that differ in the rank alone."""
    group = group_of(names[0], names) or item_group_of(names[0], names)
    assert group is not None, "they were found by their ranks"
    return merge(group, files, partial=partial)


def merge(
    group: Group, files: Files, *, partial: bool = False, places: Places | None = None, names: Names | None = None
) -> Decoded:
    """Read the structure of every rank's file and put the tensors together; no tensor bytes."""
    taken = set(group.names.values())
    if doubled := [name for name in group.every if name not in taken]:
        raise PartError(f"{some(doubled)} are parts of ranks that have a file already.", fix="Remove one of the two.")
    _check_world(group, group.world or max(group.names) + 1, partial=partial)
    keys, ranks = Keys(), sorted(group.names)
    parts = {rank: decode_file(files.open(group.names[rank])) for rank in ranks}
    base = parts[ranks[0]]
    base.root = keys.renew(base.root)
    merging = _Merging(group, {rank: decoded.root for rank, decoded in parts.items()}, keys, places, names, partial=partial)
    made = joined(CONTAINER, merging.run(), files, list(parts.values()), {})
    gone = merging.globals_of_parts()
    made.globals = [name for name in made.globals if name not in gone]
    made.has_checksums = False  # those of the ranks' records are not looked at
    made.warnings += merging.warnings
    made.lost = merging.lost
    made.locate = merging.locate
    return made


def _check_world(group: Group, world: int, *, partial: bool) -> None:
    if what := wrong_ranks(group.names, world, partial=partial):
        there = next(iter(group.names.values()))
        raise PartError(
            f"{there} is one of {world} parts; {what}.", why=f"{len(group.names)} of {world} files are there.",
            fix="Get the others too: a model needs the parts of all ranks.", rest=max(group.names) < world,
        )  # fmt: skip


class _Merging:
    """The trees of all ranks on their way into one: the first rank's, with whole tensors in it."""

    def __init__(
        self, group: Group, roots: Mapping[int, Node], keys: Keys, places: Places | None, names: Names | None, *, partial: bool
    ) -> None:  # fmt: skip
        self.places, self.names = places, names
        self.group, self.roots, self.ranks = group, roots, sorted(roots)
        self.merger = Merger(keys)
        self.reader = PartReader()
        self.warnings: list[Warned] = []
        self.objects: list[Object] = []
        self.gone: list[Node] = []
        self.partial, self.lost = partial, list[tuple[str, str]]()
        self.world = group.world or max(group.names) + 1

    def run(self) -> Node:
        """The merged tree."""
        tensors = {rank: dict(_tensors(root)) for rank, root in self.roots.items()}
        splitting = self._split(tensors)
        uneven = self._check_names(tensors)
        self._check_values()
        first = tensors[self.ranks[0]]
        new: dict[int, Node | Drop] = {id(node): exchange.DROP for where, node in first.items() if where in uneven}
        for where, node in first.items():
            if where not in uneven:
                new[id(node)] = self._merged_or_lost(where, [tensors[rank][where] for rank in self.ranks])
        new.update((id(node), exchange.DROP) for node in self.gone)
        self.root = exchange.replace(self.roots[self.ranks[0]], lambda node: new.get(id(node), node))
        if splitting is not None:
            splitting.put(self.root)
        self._check_rest()
        return self.root

    def _split(self, tensors: Mapping[int, dict[Where, Node]]) -> Splitting | None:
        """Cut rows of parameters into tensors; what is in their place is no longer among `tensors`."""
        places = [where for where in tensors[self.ranks[0]] if is_flat(where)]
        if places and self.names is None and not self.partial:
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

    def locate(self, root: Node) -> Node:
        """Compare what several ranks hold; the bytes are where they are. What differs goes, if what is whole is wanted."""
        if not self.partial:
            self.merger.check_replicas()
            return root
        wrong = self.merger.differing()
        gone = {id(node): dotted(where) for where, node in _tensors(root) if dotted(where) in wrong}
        self.lost += [(name, f"different values on {these_ranks(sorted(ranks))}") for name, ranks in wrong.items()]
        self.root = exchange.replace(root, lambda node: exchange.DROP if id(node) in gone else node)
        self._check_rest()
        return self.root

    def _check_rest(self) -> None:
        """With `partial`: say which ranks are missing; something must be left."""
        if not self.partial:
            return
        missing = [rank for rank in range(self.world) if rank not in self.roots]
        if missing and not any(warned.code == "parts-missing" for warned in self.warnings):
            text = f"of {self.world} ranks' files are missing: {these_ranks(missing)}; what is whole without them is taken"
            self.warnings.append(Warned("parts-missing", text))
        if self.lost and next(_tensors(self.root), None) is None:
            raise PartError(f"No tensor is whole in the files of {these_ranks(self.ranks)}: {_first(self.lost)}.")

    def _merged_or_lost(self, where: Where, nodes: Sequence[Node]) -> Node | Drop:
        """The whole tensor; DROP, with a word in `lost`, for one that is not whole where that is not an error."""
        try:
            return self._merged(where, nodes)
        except PartError as error:
            if not (self.partial and error.rest and _is_named(where)):  # lists would close up
                raise
            self.lost.append((dotted(where), error.what.removeprefix(f"{dotted(where)!r} ").rstrip(".")))
            return exchange.DROP

    def globals_of_parts(self) -> set[Global]:
        """The globals that only parts name, which are whole tensors now."""
        left = {node for node in reachable(self.root) if type(node) is Global}
        return {node for node in reachable(tuple(self.objects)) if type(node) is Global} - left

    def _check_names(self, tensors: Mapping[int, Mapping[Where, Node]]) -> set[Where]:
        """The tensors that not every rank has, where they may be left out."""
        every = {where: None for found in tensors.values() for where in found}
        uneven: dict[Where, list[int]] = {}
        for rank, found in tensors.items():
            lacks = [where for where in every if where not in found]
            if self.partial and all(map(_is_named, lacks)):
                for where in lacks:
                    uneven.setdefault(where, []).append(rank)
            elif missing := [dotted(where) for where in lacks]:
                raise PartError(
                    f"Rank {rank} does not have {some(missing)}.", why="The files of other ranks have it.",
                    fix="Are these files of one job? Stages of a pipeline are not parts of one another.", rest=True,
                )  # fmt: skip

        self.lost += [(dotted(where), f"not on {these_ranks(ranks)}") for where, ranks in uneven.items()]
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
        entries = [node for node in nodes if type(node) is Entry]
        if len(entries) == len(nodes):
            if any(type(key) is str and _OWN_STATE.search(key) for key in where):
                return entries[0]  # every rank's random numbers are its own
            placed = self.places.shares(where, list(zip(self.ranks, entries, strict=True))) if self.places else None
            if placed is not None:
                return self.merger.tensor(name, entries[0].dtype, *placed, requires_grad=entries[0].requires_grad)
            return self.merger.replicated(name, list(zip(self.ranks, entries, strict=True)))
        self.objects += [node for node in nodes if type(node) is Object]
        parts = [self._part(name, rank, node) for rank, node in zip(self.ranks, nodes, strict=True)]
        self._check_alike(name, parts)
        shares = [replace(box, rank=rank) for rank, part in zip(self.ranks, parts, strict=True)
                  for box in part.held]  # fmt: skip
        return self.merger.tensor(name, parts[0].dtype, parts[0].shape, shares, requires_grad=parts[0].requires_grad)

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

    def _check_alike(self, name: str, parts: Sequence[Part]) -> None:
        for rank, part in zip(self.ranks, parts, strict=True):
            if (part.kind, part.shape, part.dtype.name) != (parts[0].kind, parts[0].shape, parts[0].dtype.name):
                raise PartError(f"{name!r} is another tensor on rank {rank} than on rank {self.ranks[0]}.", rest=True)
            if part.is_partial:
                raise PartError(f"{name!r} is a sum that the ranks have not added up (Partial).", rest=True)
            ranks = part.mesh.ranks if part.mesh is not None else (part.world - 1,)
            if max(ranks, default=0) < self.world:
                continue
            other = max(part.world, max(ranks) + 1)
            if not self.partial or self.group.world is not None:
                text = f"{name!r} on rank {rank} is of a job of {other} ranks; here are files of {self.world}."
                raise PartError(text, rest=self.group.world is None)
            self.world = other  # names that say nothing of it: the others are missing


def _unnamed(name: str) -> PartError:
    return PartError(
        f"{name!r} is all parameters of a module in one row, without their names: FSDP1's LOCAL_STATE_DICT.",
        fix="A target tells names and shapes: `like=TARGET`, which is a file of the model, or package.module:callable.",
        rest=True, unnamed=True,
    )  # fmt: skip


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


def _first(lost: Sequence[tuple[str, str]]) -> str:
    name, why = lost[0]
    return f"{name!r} {why}" if len(lost) == 1 else f"{name!r} {why}, and {len(lost) - 1} more"
