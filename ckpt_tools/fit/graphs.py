"""The computation graphs of both sides of a matching: those of models that the user named are seen while they run
once, those of exported programs are read in their files.

Nothing runs that the user did not name: the model of IN is run where `from_` names it, the target's where its graph can be
compared with one.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from ckpt_tools.errors import ConvertError, UsageError
from ckpt_tools.fit.targets import Target, read_target
from ckpt_tools.formats.checkpoint import Checkpoint
from ckpt_tools.formats.program_graph import graph_in
from ckpt_tools.matching import match
from ckpt_tools.matching.flow import FlowTooLargeError, flow_of
from ckpt_tools.matching.records import Param
from ckpt_tools.parts.open import open_whole
from ckpt_tools.tree.graphs import Graph, Input, parse

_IMAGE_DIMENSIONS = 4
_MOST_WIDTHS = 3
_TOKENS = 16


@dataclass(frozen=True, slots=True)
class Seen:
    """What was seen of the computations of both sides.

    Attributes:
        ran: the models that ran. read: the programs whose graph was read in their file. inputs: what the models were given,
            as text. problem: why nothing was compared; else the empty text.
    """

    ran: tuple[str, ...] = ()
    read: tuple[str, ...] = ()
    inputs: tuple[str, ...] = ()
    problem: str = ""


@dataclass(frozen=True, slots=True)
class Compared:
    """The graphs of both sides, with the names that they are matched by; None where there are not two."""

    graphs: tuple[Graph, Graph] | None = None
    seen: Seen | None = None


@dataclass(frozen=True, slots=True)
class Question:
    """What the user asked for: the model of IN, and what both models are given."""

    model: Any = None
    inputs: str | Sequence[str] = ()


@dataclass(frozen=True, slots=True)
class _Side:
    """One side: a graph that was read, or a model that can run."""

    label: str
    graph: Graph | None = None
    target: Target | None = None


def compare_graphs(
    params: Sequence[Param], checkpoint: Checkpoint | None, question: Question, target: Target
) -> Compared:  # fmt: skip
    """The graphs of IN and of the target, if IN has one: a program's in its file, or that of the model that the user named."""
    own = _own_side(params, checkpoint, question)
    if own is None:
        return Compared()
    other = _Side(target.label, target=target) if target.module is not None else _read_side(target)
    if other is None and question.model is None:
        return Compared()
    for side, option in ((own, "from_"), (other, "like")):
        if side is None or (side.graph is None and (side.target is None or side.target.module is None)):
            label = target.label if side is None else side.label
            raise UsageError(f"`{option}` does not make a model.", why=f"{label} holds tensors only.",
                             fix="Both `like` and `from_` are package.module:callable, to be compared.")  # fmt: skip
    assert other is not None
    return _compare(params, own, other, question)


def _compare(params: Sequence[Param], own: _Side, other: _Side, question: Question) -> Compared:
    asked = [parse(spec) for spec in ([question.inputs] if isinstance(question.inputs, str) else question.inputs)]
    names = {param.name: param.name for param in params} if own.target is None else _names_in_checkpoint(params, own.target)
    problem = ""
    for tried in [asked] if asked else _tries(own, other):
        graphs, problem = _both(own, other, tried)
        if graphs is not None and not asked and (problem := _depends_on_input(own, other, tried, graphs)):
            return Compared(seen=Seen(problem=problem))
        if graphs is not None:
            ran = tuple(side.label for side in (own, other) if side.graph is None)
            read = tuple(side.label for side in (own, other) if side.graph is not None)
            seen = Seen(ran, read, tuple(map(str, tried)) if ran else ())
            return Compared((graphs[0].renamed(names), graphs[1]), seen)
    if asked:
        raise ConvertError("A model raised when it ran.", why=problem,
                          fix="Give the inputs that both take: NAME=SHAPE by name, SHAPE:N for integers below N.")  # fmt: skip
    return Compared(seen=Seen(problem=problem))


def _own_side(params: Sequence[Param], checkpoint: Checkpoint | None, question: Question) -> _Side | None:
    if question.model is not None:
        own = read_target(question.model)
        return _Side(own.label, target=own)
    if checkpoint is None or (graph := graph_in(checkpoint.decoded)) is None:
        return None
    known = {param.name for param in params}
    return _Side(str(checkpoint.path), graph) if known & graph.weights.keys() else None


def _read_side(target: Target) -> _Side | None:
    """The graph of a program that is the target."""
    if target.tensors is not None:
        return None
    with open_whole(target.label) as checkpoint:
        graph = graph_in(checkpoint.decoded)
    return None if graph is None else _Side(target.label, graph)


def _names_in_checkpoint(params: Sequence[Param], own: Target) -> dict[str, str]:
    """The model's names -> those of the checkpoint, which may have wrappers."""
    matching = match(params, own.params, stages="names")
    if not matching.matched or matching.mismatched:
        matched, other = len(matching.matched), len(matching.mismatched)
        why = f"{matched} of its {len(params)} tensors are the model's, {other} have other shapes."
        raise ConvertError(f"{own.label} is not the model of the checkpoint.", why=why)
    return {row.new: row.old for row in matching.matched}


def _both(own: _Side, other: _Side, inputs: Sequence[Input]) -> tuple[tuple[Graph, Graph] | None, str]:
    graphs = []
    for side in (own, other):
        try:
            graphs.append(_graph(side, inputs))
        except Exception as error:  # whatever the user's model raises
            return None, f"{side.label} raised {type(error).__name__}: {error}".splitlines()[0]
    return (graphs[0], graphs[1]), ""


def _depends_on_input(own: _Side, other: _Side, tried: Sequence[Input], graphs: tuple[Graph, Graph]) -> str:
    """Why one vector cannot stand for what the models are made for: they take several, too, and do something else with them."""
    if len(tried) != 1 or tried[0].below is not None or len(tried[0].shape) != 2:
        return ""
    several = [Input(None, (1, _TOKENS, tried[0].shape[1]), None)]
    others, _ = _both(own, other, several)
    if others is None or all(map(_flow_alike, graphs, others)):
        return ""
    return f"both run on {tried[0]} and on {several[0]}, and compute different things: `--input` says which"


def _flow_alike(one: Graph, other: Graph) -> bool:
    """Whether the same layers feed the same ones in the same way."""
    try:
        return _flow(one) == _flow(other)
    except FlowTooLargeError:  # then nothing is decided by it either
        return True


def _flow(graph: Graph) -> list[tuple[object, ...]]:
    return [(each.feeds, each.into, each.rows) for each in flow_of(graph, {name: name for name in graph.weights})]


def _graph(side: _Side, inputs: Sequence[Input]) -> Graph:
    if side.graph is not None:
        return side.graph
    from ckpt_tools.values.running import graph_of

    assert side.target is not None
    return graph_of(side.target.module, inputs, side.target.build)


# --- the usual inputs


def _tries(own: _Side, other: _Side) -> Iterator[list[Input]]:
    """A program's own inputs, where their sizes are known; else those that models of such weights often take."""
    graphs = [side.graph for side in (own, other) if side.graph is not None]
    if len(graphs) == 2:
        yield []
        return
    for graph in graphs:
        if graph.inputs and all(value.shape is not None for value in graph.inputs):
            yield [Input(None, value.shape or (), 2 if value.integers else None) for value in graph.inputs]
    yield from _usual(*(side.target for side in (own, other) if side.target is not None))


def _usual(*sides: Target) -> Iterator[list[Input]]:
    """Inputs that models of such weights often take."""
    shapes = [param.shape for param in sides[0].params if param.shape]
    kinds = {param.module for side in sides for param in side.params}
    for shape in _usual_shapes(shapes):
        yield [Input(None, shape, None)]
    if "Embedding" in kinds:
        yield [Input(None, (1, 16), 2)]
        yield [Input("input_ids", (1, 16), 2)]


def _usual_shapes(shapes: Sequence[tuple[int, ...]]) -> Iterator[tuple[int, ...]]:
    channels = _first(shape[1] for shape in shapes if len(shape) == _IMAGE_DIMENSIONS)
    for count in channels:
        for size in (224, 32, 28, 64):
            yield 1, count, size, size
    if not channels:
        for width in _first(shape[1] for shape in shapes if len(shape) == 2):
            yield 1, width
            yield 1, _TOKENS, width


def _first(sizes: Iterable[int]) -> list[int]:
    """The first few that are different, the usual channels of images before others."""
    found = [*dict.fromkeys(sizes)]
    return sorted(found, key=lambda size: size not in (3, 1))[:_MOST_WIDTHS]
