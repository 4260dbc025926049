"""`--tie`: a head that config.json says is tied to its embedding, and that lies in the file as a copy, becomes one with it."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import zip_longest

from ckpt_tools.errors import ConvertError, NothingMatchedError
from ckpt_tools.fit.values import Config
from ckpt_tools.formats.contents import tensors_by_name
from ckpt_tools.io.content import equal_chunks
from ckpt_tools.text import shape_text
from ckpt_tools.tree.nodes import Dict, Entry, Node
from ckpt_tools.values.numeric import row_major, view_of

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
