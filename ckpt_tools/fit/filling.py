"""What a converted model lacks: tensors that come from another checkpoint (`--fill-from`), tied heads (`--tie`)."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from itertools import zip_longest

from ckpt_tools.errors import ConvertError, NothingMatchedError
from ckpt_tools.fit.fit import NewStorages
from ckpt_tools.fit.initialisers import Blank
from ckpt_tools.fit.targets import open_state_dict
from ckpt_tools.fit.values import Config
from ckpt_tools.formats.contents import tensors_by_name
from ckpt_tools.io.content import equal_chunks
from ckpt_tools.matching.records import Shape
from ckpt_tools.text import shape_text, some
from ckpt_tools.tree.nodes import Dict, Entry, Node
from ckpt_tools.tree.visit import reachable
from ckpt_tools.values.numeric import row_major, view_of


@dataclass(slots=True, eq=False)
class Filling:
    """The checkpoint that fills, open, and what came from it: name -> where it is from."""

    path: str
    node: Dict
    storages: NewStorages
    made: dict[object, Node] = field(default_factory=dict)
    filled: dict[str, str] = field(default_factory=dict)
    taken: dict[str, Node] = field(default_factory=dict)

    def fill(self, node: Dict) -> list[str]:
        """Put what a state dict lacks into it; the names that only it has, which stay."""
        there, all_names = tensors_by_name(node), tensors_by_name(self.node)
        if there and not there.keys() & all_names.keys():
            raise ConvertError(
                f"IN and {self.path} have no name in common: {next(iter(there))!r} and {next(iter(all_names), '')!r}.",
                fix="Give IN the names of the other: `strip_module`, `unwrap`, `rename` are done before the filling.",
            )
        for name, tensor in there.items():
            if name in all_names and _shape(tensor) != _shape(all_names[name]):
                own_shape, shape = shape_text(_shape(all_names[name])), shape_text(_shape(tensor))
                raise ConvertError(
                    f"{name!r} has the shape {own_shape} in {self.path}, and {shape} in IN.",
                    fix=f"Leave IN's out, and it is filled: `drop={name!r}`.",
                )
        own: dict[object, str] = {}
        for name, entry in all_names.items():
            if name in there and type(entry) is Entry and entry.nbytes:
                own.setdefault(view_of(entry), name)
        node.items.extend((name, self.take(name, all_names[name], own, there)) for name in all_names if name not in there)
        return [name for name in there if name not in all_names]

    def take(self, name: str, entry: Node, own: Mapping[object, str], there: Mapping[str, Node]) -> Node:
        """One tensor. What is tied to one that IN has (`own`) is tied to that, since it would be another model else."""
        if type(entry) is not Entry:
            raise ConvertError(
                f"{self.path}: {name!r} is a sparse, quantised, nested or meta tensor, which cannot be filled in."
            )
        view: object = view_of(entry) if entry.nbytes else name
        tied = own.get(view)
        self.filled[name] = self.path if tied is None else f"tied to {tied!r}, as in {self.path}"
        if tied is not None:
            return there[tied]
        if view not in self.made:
            blank = Blank(name, entry.shape, entry.dtype)
            self.made[view] = self.storages.entry(row_major(entry), blank, entry)
        self.taken[name] = self.made[view]
        return self.made[view]


@contextmanager
def opened(path: str | os.PathLike[str], root: Node) -> Iterator[Filling]:
    """The checkpoint that fills what is missing below `root`, open while its tensors are read."""
    with open_state_dict(path) as (checkpoint, node):
        yield Filling(str(path), node, NewStorages(reachable(root)))
        checkpoint.source.check_unchanged()


def said_to_stay(names: Sequence[str], path: str) -> str:
    """The sentence for tensors that only IN has."""
    return f"{len(names)} tensors are not in {path}, and stay: {some(names)}." if len(names) > 1 else (
        f"{names[0]!r} is not in {path}, and stays."
    )  # fmt: skip


def _shape(node: Node) -> Shape:
    return node.shape if type(node) is Entry else ()


# --- a head that config.json says is tied to its embedding, and that lies in the file as a copy, becomes one with it

_SAYS = ("tie_word_embeddings", "text_config.tie_word_embeddings", "decoder.tie_word_embeddings")
_EMBEDDINGS = (
    "model.embed_tokens.weight", "model.language_model.embed_tokens.weight", "language_model.model.embed_tokens.weight",
    "model.text_model.embed_tokens.weight", "model.shared.weight", "shared.weight", "model.decoder.embed_tokens.weight",
    "transformer.wte.weight", "gpt_neox.embed_in.weight", "backbone.embeddings.weight",
    "bert.embeddings.word_embeddings.weight", "roberta.embeddings.word_embeddings.weight",
)  # fmt: skip
_HEADS = (
    "lm_head.weight", "language_model.lm_head.weight", "proj_out.weight", "embed_out.weight", "cls.predictions.decoder.weight",
    "lm_head.decoder.weight",
)  # fmt: skip
_OF_SHARED = ("encoder.embed_tokens.weight", "decoder.embed_tokens.weight")  # behind what `shared.weight` has before it


def tie(node: Dict, config: Config) -> Sequence[tuple[str, str, Node]]:
    """Tie in place; of each pair the name that is tied, the one that it is tied to, and the copy that goes.

    The names are those of transformers' `_tied_weights_keys`.
    """
    if not any(config.says(key) for key in _SAYS):
        what = f"{config.label} does not say that this model's head is tied to its embedding."
        raise ConvertError(what, why="It needs `tie_word_embeddings: true` in the config.json beside IN.")
    there = tensors_by_name(node)
    embedding = next((name for name in _EMBEDDINGS if name in there), None)
    before, is_shared, _ = (embedding or "").rpartition("shared.weight")
    names = (*_HEADS, *(before + name for name in _OF_SHARED if is_shared))
    heads = [name for name in names if name in there]
    if embedding is None or not heads:
        missing = "a head" if embedding is not None else "an embedding"
        raise NothingMatchedError(f"There is nothing to tie: transformers' name of {missing} is not in the file.")
    gone = [(name, embedding, there[name]) for name in heads if not _is_one(name, there[name], embedding, there[embedding])]
    copies = {name for name, _, _ in gone}
    node.items[:] = [(key, there[embedding] if key in copies else value) for key, value in node.items]
    return gone


def _is_one(name: str, head: Node, embedding: str, other: Node) -> bool:
    """Whether two tensors are one already; an error where they are not equal."""
    if type(head) is not Entry or type(other) is not Entry:
        raise ConvertError(f"{name!r} and {embedding!r} are not both plain tensors.")
    if view_of(head) == view_of(other):
        return True
    if head.shape != other.shape or head.dtype is not other.dtype:
        found = f"{shape_text(head.shape)} {head.dtype} and {shape_text(other.shape)} {other.dtype}"
        raise ConvertError(f"{name!r} and {embedding!r} are not equal: {found}.", why="The config says that they are tied.")
    blocks = zip_longest(equal_chunks(row_major(head)), equal_chunks(row_major(other)))
    if any(one != two for one, two in blocks):
        what = f"{name!r} and {embedding!r} are not equal, bit for bit."
        raise ConvertError(what, why="The config says that they are tied.", fix=f"Leave one out: `drop={name!r}`.")
    return False
