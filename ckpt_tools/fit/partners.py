"""What is known of both sides before partners are found: names and shapes always, numbers and computations where asked.

Computations are seen while models run once, which the user named: that of IN by `from_`, and the target's.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence, Set
from contextlib import ExitStack
from dataclasses import dataclass, replace
from hashlib import sha256
from math import prod
from typing import Any, TypeAlias

from ckpt_tools.errors import ConvertError, UsageError
from ckpt_tools.fit.options import COMPARING, PartnerOptions, RunOptions
from ckpt_tools.fit.targets import Target, framework_of, params_of, read_target, tensors_of
from ckpt_tools.formats.checkpoint import Checkpoint
from ckpt_tools.formats.contents import tensors_by_name
from ckpt_tools.io.content import Literal, chunks, read
from ckpt_tools.matching import Matching, Stages, match
from ckpt_tools.matching.flow import FlowTooLargeError, flow_of
from ckpt_tools.matching.order import places_of
from ckpt_tools.matching.records import Framework, Param
from ckpt_tools.tree.arguments import Renames
from ckpt_tools.tree.graphs import Graph, Input, parse
from ckpt_tools.tree.nodes import Dict, Entry, Node
from ckpt_tools.values.numeric import by_position, has_numbers, live_content, numbers, part, row_major
from ckpt_tools.values.pytorch import need_torch, torch

Tensors: TypeAlias = Mapping[str, Any]  # by name: nodes of a file, or live ones


@dataclass(frozen=True, slots=True)
class Seen:
    """What was seen of the computations of both sides.

    Attributes:
        ran: the models that ran. inputs: what they were given, as text. problem: why nothing was compared; else the empty text.
    """

    ran: tuple[str, ...] = ()
    inputs: tuple[str, ...] = ()
    problem: str = ""


@dataclass(frozen=True, slots=True)
class Sides:
    """Both sides; the graphs of both, with the names that they are matched by, where there are two."""

    old: Sequence[Param]
    new: Sequence[Param]
    framework: Framework | None
    graphs: tuple[Graph, Graph] | None = None
    seen: Seen | None = None

    def match(
        self, options: PartnerOptions, stages: Stages, *, rename: Renames = (), allow_reshape: bool, pairs: Sequence[str] = ()
    ) -> Matching:
        """The fate of every name, by `stages`; `pairs` are said beside those of the options."""
        return match(
            self.old, self.new, stages=stages, rename=list(rename), framework=self.framework, allow_reshape=allow_reshape,
            graphs=self.graphs, pairs=[*options.pair, *pairs],
        )  # fmt: skip


def look_at(node: Dict, checkpoint: Checkpoint | None, target: Target, options: PartnerOptions) -> Sides:
    """What the options want known of a state dict and of a target."""
    old, new, graphs, seen = params_of(node), target.params, None, None
    model, inputs = (options.from_, options.input) if isinstance(options, RunOptions) else (None, ())
    if options.stages in COMPARING and model is not None:
        graphs, seen = _compare(old, model, [inputs] if isinstance(inputs, str) else inputs, target)
    elif options.stages == "values":
        own: Tensors = tensors_by_name(node)
        with ExitStack() as stack:
            theirs = tensors_of(target, stack)
            old, new = _sampled(old, own), _sampled(new, theirs)
            if not any(param.sample for param in new):
                raise UsageError(f"`match='values'`: {target.label} has no values.", fix="`match='structure'` does without.")
            both = {param.sample for param in old} & {param.sample for param in new}
            old, new = _digested(old, own, both), _digested(new, theirs, both)
    return Sides(old, new, None if checkpoint is None else framework_of(checkpoint), graphs, seen)


# --- numbers


_BLOCK = 1 << 16  # bytes: a tensor of no more is read at once


def _sampled(params: Sequence[Param], tensors: Tensors) -> tuple[Param, ...]:
    need_torch("Numbers are compared with it (`match='values'`).")
    values = ((param, tensors[param.name]) for param in params)
    return tuple(
        replace(param, sample=tuple(_of_live(value) if isinstance(value, torch.Tensor) else _of_entry(value)) or None)
        for param, value in values
    )


def _digested(params: Sequence[Param], tensors: Tensors, wanted: Set[object]) -> tuple[Param, ...]:
    """The tensors, with digests of the bytes of those whose sample is wanted and not all of them."""
    found = []
    for param in params:
        if param.sample and param.sample in wanted and len(param.sample) < prod(param.shape):
            value = tensors[param.name]
            is_entry = isinstance(value, Entry)
            digest = sha256((value.dtype.name if is_entry else str(value.dtype).removeprefix("torch.")).encode() + b"\n")
            for chunk in chunks(row_major(value) if is_entry else live_content(value)):
                digest.update(chunk)
            param = replace(param, digest=digest.digest())
        found.append(param)
    return tuple(found)


def _of_entry(node: Node) -> list[float]:
    if type(node) is not Entry or not has_numbers(node.dtype) or node.dtype.packed != 1 or node.dtype.family == "complex":
        return []
    content, size = by_position(row_major(node)), node.dtype.itemsize
    content = Literal(read(content)) if content.length <= _BLOCK else content
    data = b"".join(read(part(content, place * size, size)) for place in places_of(node.shape))
    return [value for block in numbers(Literal(data), node.dtype) for value in block.tolist()]


def _of_live(value: Any) -> list[float]:
    if value.is_meta or value.is_complex() or value.is_sparse or value.is_quantized:
        return []
    flat = value.detach().resolve_neg().reshape(-1)
    places = flat.new_tensor(places_of(tuple(value.shape)), dtype=torch.int64)
    bits = flat.view(torch.uint8) if flat.itemsize == 1 else flat  # torch takes from no float8
    found: list[float] = bits[places].view(flat.dtype).double().tolist()
    return found


# --- computations


_MOST_WIDTHS = 3
_TOKENS = 16


def _compare(
    params: Sequence[Param], model: Any, inputs: Sequence[str], other: Target
) -> tuple[tuple[Graph, Graph] | None, Seen]:
    """The graphs of the model of IN and of the target, and what was seen of them."""
    own = read_target(model)
    for side, option in ((own, "from_"), (other, "like")):
        if side.module is None:
            raise UsageError(f"`{option}` does not make a model.", why=f"{side.label} holds tensors only.",
                             fix="Both `like` and `from_` are package.module:callable, to be compared.")  # fmt: skip
    asked = list(map(parse, inputs))
    matching = match(params, own.params, stages="names")  # the checkpoint's names may have wrappers
    if not matching.matched or matching.mismatched:
        matched, different = len(matching.matched), len(matching.mismatched)
        why = f"{matched} of its {len(params)} tensors are the model's, {different} have other shapes."
        raise ConvertError(f"{own.label} is not the model of the checkpoint.", why=why)
    problem = ""
    for tried in [asked] if asked else _usual(own, other):
        graphs, problem = _both(own, other, tried)
        if graphs is not None and not asked and (problem := _depends_on_input(own, other, tried, graphs)):
            break
        if graphs is not None:
            names = {row.new: row.old for row in matching.matched}
            return (graphs[0].renamed(names), graphs[1]), Seen((own.label, other.label), tuple(map(str, tried)))
    if asked:
        raise ConvertError("A model raised when it ran.", why=problem,
                          fix="Give the inputs that both take: NAME=SHAPE by name, SHAPE:N for integers below N.")  # fmt: skip
    return None, Seen(problem=problem)


def _both(own: Target, other: Target, inputs: Sequence[Input]) -> tuple[tuple[Graph, Graph] | None, str]:
    from ckpt_tools.values.running import graph_of

    graphs = []
    for side in (own, other):
        try:
            graphs.append(graph_of(side.module, inputs, side.build))
        except Exception as error:  # whatever the user's model raises
            return None, f"{side.label} raised {type(error).__name__}: {error}".splitlines()[0]
    return (graphs[0], graphs[1]), ""


def _depends_on_input(own: Target, other: Target, tried: Sequence[Input], graphs: tuple[Graph, Graph]) -> str:
    """Why one vector cannot stand for what the models are made for: they take several, too, and do something else with them."""
    if len(tried) != 1 or tried[0].below is not None or len(tried[0].shape) != 2:
        return ""
    several = [Input(None, (1, _TOKENS, tried[0].shape[1]), None)]
    others, _ = _both(own, other, several)
    try:
        flows = [
            [flow_of(graph, {name: name for name in graph.weights}) for graph in each] for each in (graphs, others or graphs)
        ]
    except FlowTooLargeError:  # then nothing is decided by it either
        return ""
    if flows[0] == flows[1]:
        return ""
    return f"both run on {tried[0]} and on {several[0]}, and compute different things: `--input` says which"


def _usual(own: Target, other: Target) -> Iterator[list[Input]]:
    """The inputs that models of such weights often take."""
    shapes = [param.shape for param in own.params]
    images, vectors = (list(dict.fromkeys(shape[1] for shape in shapes if len(shape) == count)) for count in (4, 2))
    for channels in sorted(images, key=lambda size: size not in (3, 1))[:_MOST_WIDTHS]:  # the usual ones of images first
        yield from ([Input(None, (1, channels, size, size), None)] for size in (224, 32, 28, 64))
    for width in [] if images else sorted(vectors, key=lambda size: size not in (3, 1))[:_MOST_WIDTHS]:
        yield from ([Input(None, shape, None)] for shape in ((1, width), (1, _TOKENS, width)))
    if any(param.module == "Embedding" for target in (own, other) for param in target.params):
        yield from ([Input(name, (1, _TOKENS), 2)] for name in (None, "input_ids"))
