"""The computation graphs of both sides of a matching: of models that the user named, seen while they run once.

Nothing runs that the user did not name: the model of IN is run where `from_` names it, the target's where its graph can be
compared with one.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from ckpt_tools.errors import TargetError, UsageError
from ckpt_tools.fit.targets import Target, read_target
from ckpt_tools.matching import match
from ckpt_tools.matching.params import Param
from ckpt_tools.tree.graphs import Graph
from ckpt_tools.tree.inputs import Input, parse

if TYPE_CHECKING:
    from collections.abc import Mapping

_IMAGE_DIMENSIONS = 4
_MOST_WIDTHS = 3


@dataclass(frozen=True, slots=True)
class Compared:
    """Both graphs, or why there are none.

    Attributes:
        graphs: of IN and of the target, with the names that both are matched by; None where a model does not run.
        inputs: what they were given, as text. problem: why they were not compared; else the empty text.
    """

    graphs: tuple[Graph, Graph] | None
    inputs: tuple[str, ...] = ()
    problem: str = ""


def compare_graphs(
    params: Sequence[Param], model: Any, arguments: str | Mapping[str, Any] | None, target: Target, inputs: Sequence[str]
) -> Compared:
    """Run the model of IN and the target on the same inputs: those given, else the first of the usual ones that both take.

    Args:
        params: the tensors of IN. model, arguments: what makes its model, and with what. target: the target, a model.
        inputs: as `ckpt prove` takes them.

    Raises:
        TargetError: a model cannot be made, is not that of IN, or raises on the inputs that were given.
        UsageError: the target is not a model; an input that cannot be read.
    """
    own = read_target(model, args=arguments, option="from")
    for side, option in ((own, "from_"), (target, "like")):
        if side.module is None:
            raise UsageError(f"`{option}` does not make a model.", why=f"{side.label} holds tensors only.",
                             fix="Both `like` and `from_` are package.module:callable, to be compared.")  # fmt: skip
    names = _names_in_checkpoint(params, own)
    asked = [parse(spec) for spec in inputs]
    problem = ""
    for tried in [asked] if asked else _usual(own, target):
        graphs, problem = _run_both(own, target, tried)
        if graphs is not None:
            return Compared((graphs[0].renamed(names), graphs[1]), tuple(map(str, tried)))
    if asked:
        raise TargetError("A model raised when it ran.", why=problem,
                          fix="Give the inputs that both take: NAME=SHAPE by name, SHAPE:N for integers below N.")  # fmt: skip
    return Compared(None, problem=problem)


def _names_in_checkpoint(params: Sequence[Param], own: Target) -> dict[str, str]:
    """The model's names -> those of the checkpoint, which may have wrappers."""
    matching = match(params, own.params, stages="names")
    if not matching.matched or matching.mismatched:
        matched, other = len(matching.matched), len(matching.mismatched)
        why = f"{matched} of its {len(params)} tensors are the model's, {other} have other shapes."
        raise TargetError(f"{own.label} is not the model of the checkpoint.", why=why)
    return {row.new: row.old for row in matching.matched}


def _run_both(own: Target, target: Target, inputs: Sequence[Input]) -> tuple[tuple[Graph, Graph] | None, str]:
    from ckpt_tools.values.running import graph_of

    graphs = []
    for side in (own, target):
        try:
            graphs.append(graph_of(side.module, inputs, side.build))
        except Exception as error:  # whatever the user's model raises
            return None, f"{side.label} raised {type(error).__name__}: {error}".splitlines()[0]
    return (graphs[0], graphs[1]), ""


# --- the usual inputs


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
            yield 1, 16, width


def _first(sizes: Iterable[int]) -> list[int]:
    """The first few that are different, the usual channels of images before others."""
    found = [*dict.fromkeys(sizes)]
    return sorted(found, key=lambda size: size not in (3, 1))[:_MOST_WIDTHS]
