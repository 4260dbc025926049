"""What is known of both sides before partners are found: names and shapes always, numbers and computations where asked."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterator, Mapping, Sequence, Set
from contextlib import contextmanager
from dataclasses import dataclass, replace
from hashlib import sha256
from math import prod
from typing import Any, TypeAlias

from ckpt_tools.edit.casts import to_little_endian
from ckpt_tools.errors import UsageError
from ckpt_tools.fit.graphs import Compared, Question, compare_graphs
from ckpt_tools.fit.options import COMPARING, PartnerOptions
from ckpt_tools.fit.targets import Target, choose_state_dict, framework_of, params_of
from ckpt_tools.formats.checkpoint import Checkpoint
from ckpt_tools.formats.contents import tensors_by_name
from ckpt_tools.io.content import Computed, Content, Deflated, Literal, chunks, read
from ckpt_tools.matching import Matching, Stages, match
from ckpt_tools.matching.order import places_of
from ckpt_tools.matching.records import Framework, Param
from ckpt_tools.parts.open import open_whole
from ckpt_tools.tree.arguments import Renames
from ckpt_tools.tree.nodes import Dict, Entry, Node, as_dict
from ckpt_tools.values.numeric import has_numbers, live_content, numbers, part, row_major
from ckpt_tools.values.pytorch import need_torch


@dataclass(frozen=True, slots=True)
class Sides:
    """Both sides."""

    old: Sequence[Param]
    new: Sequence[Param]
    compared: Compared
    framework: Framework | None

    def match(
        self, options: PartnerOptions, stages: Stages, *, rename: Renames = (), allow_reshape: bool, pairs: Sequence[str] = ()
    ) -> Matching:
        """The fate of every name, by `stages`; `pairs` are said beside those of the options."""
        return match(
            self.old, self.new, stages=stages, rename=list(rename), framework=self.framework, allow_reshape=allow_reshape,
            graphs=self.compared.graphs, pairs=[*options.pair, *pairs],
        )  # fmt: skip


def look_at(node: Dict, checkpoint: Checkpoint | None, target: Target, options: PartnerOptions) -> Sides:
    """What the options want known of a state dict and of a target."""
    old, new, compared = params_of(node), target.params, Compared()
    if options.stages in COMPARING:
        compared = compare_graphs(old, checkpoint, Question(*options.run), target)
    elif options.stages == "values":
        old, new = sampled_sides(old, node, target)
    return Sides(old, new, compared, None if checkpoint is None else framework_of(checkpoint))


_BLOCK = 1 << 16  # bytes: places so near to each other are read at once


Tensors: TypeAlias = Mapping[str, Any]  # by name: nodes of a file, or live ones


def sampled_sides(params: Sequence[Param], node: Dict, target: Target) -> tuple[tuple[Param, ...], tuple[Param, ...]]:
    """The tensors of a state dict node and those of a target, with samples."""
    own: Tensors = tensors_by_name(node)
    with _tensors_of(target) as theirs:
        old, new = _sampled(params, own), _sampled(target.params, theirs)
        if not any(param.sample for param in new):
            raise UsageError(f"`match='values'`: {target.label} has no values.", fix="`match='structure'` does without.")
        both = {param.sample for param in old} & {param.sample for param in new}
        return _digested(old, own, both), _digested(new, theirs, both)


@contextmanager
def _tensors_of(target: Target) -> Iterator[Tensors]:
    """A target's tensors: of a checkpoint, of a live model, or of what the callable makes."""
    if target.tensors is None:
        with open_whole(target.label) as checkpoint:
            checkpoint.locate()
            node = choose_state_dict(checkpoint, of_target=True).node
            yield tensors_by_name(as_dict(to_little_endian(node, checkpoint.decoded.byteorder)))
        return
    tensors: Tensors = target.tensors
    if target.on_meta and target.build is not None:
        made = target.build()
        tensors = made if isinstance(made, Mapping) else made.state_dict()
    yield tensors


def _sampled(params: Sequence[Param], tensors: Tensors) -> list[Param]:
    return [replace(param, sample=_sample(tensors[param.name])) for param in params]


def _digested(params: Sequence[Param], tensors: Tensors, wanted: Set[object]) -> tuple[Param, ...]:
    """The tensors, with digests of those whose sample is wanted and not all of them."""
    return tuple(
        replace(param, digest=_digest(tensors[param.name]))
        if param.sample and param.sample in wanted and len(param.sample) < prod(param.shape)
        else param
        for param in params
    )


def _sample(value: Any) -> tuple[float, ...] | None:
    need_torch("Numbers are compared with it (`match='values'`).")
    import torch

    found = _of_live(value) if isinstance(value, torch.Tensor) else _of_entry(value)
    return tuple(found) or None


def _digest(value: Any) -> bytes:
    """The SHA-256 of the dtype and of all elements."""
    is_entry = isinstance(value, Entry)
    found = sha256((value.dtype.name if is_entry else str(value.dtype).removeprefix("torch.")).encode() + b"\n")
    for chunk in chunks(row_major(value) if is_entry else live_content(value)):
        found.update(chunk)
    return found.digest()


def _of_entry(node: Node) -> list[float]:
    if type(node) is not Entry or not has_numbers(node.dtype) or node.dtype.packed != 1 or node.dtype.family == "complex":
        return []
    content, size = row_major(node), node.dtype.itemsize
    if isinstance(content, Deflated) or (isinstance(content, Computed) and content.part is None):
        content = Literal(read(content))  # else it would be worked out again for each of the places
    data = b"".join(_elements(content, places_of(node.shape), size))
    return [value for block in numbers(Literal(data), node.dtype) for value in block.tolist()]


def _elements(content: Content, places: Sequence[int], size: int) -> Iterator[bytes]:
    """The elements at these places, which go up."""
    start, block = 0, b""
    for index, place in enumerate(places):
        at = place * size
        if at + size > start + len(block):
            near = bisect_left(places, place + _BLOCK // size, index)
            start, block = at, read(part(content, at, (places[near - 1] - place + 1) * size))
        yield block[at - start : at - start + size]


def _of_live(value: Any) -> list[float]:
    import torch

    if value.is_meta or value.is_complex() or value.is_sparse or value.is_quantized:
        return []
    flat = value.detach().resolve_neg().reshape(-1)
    places = flat.new_tensor(places_of(tuple(value.shape)), dtype=torch.int64)
    bits = flat.view(torch.uint8) if flat.itemsize == 1 else flat  # torch takes from no float8
    found: list[float] = bits[places].view(flat.dtype).double().tolist()
    return found
