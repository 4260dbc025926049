"""Experts of a mixture under DeepSpeed: files of their own for the 16-bit weights, and rows on some of the ranks.

    layer_0_expert_3_mp_rank_00_model_states.pt     a state dict of one expert, under the number that it has in the whole layer

In the model file and in the rows of the optimizer an expert has the number that it has among those of its rank.

Source: deepspeed/runtime/engine.py (`_save_moe_checkpoint`), deepspeed/utils/groups.py (`_create_expert_and_data_parallel`).
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from collections.abc import Set as AbstractSet

from ckpt_tools.errors import PartError
from ckpt_tools.parts.zero_states import ModelState
from ckpt_tools.text import listed, some
from ckpt_tools.tree.nodes import Dict, Entry, List, Node
from ckpt_tools.values.boxes import Sizes

_EXPERT = re.compile(r"(?P<layer>.*?)deepspeed_moe\.experts\.deepspeed_experts\.(?P<number>\d{1,6})\.(?P<rest>.*)")


def holders(
    model: ModelState, shapes: Mapping[str, Sizes], count: int, world: int
) -> Iterator[tuple[Sequence[int], Mapping[str, Sizes]]]:
    """The ranks among which a group is cut, and its names in the whole model; experts of several ranks are several groups."""
    if count == world:
        yield range(world), shapes
        return
    numbers = _numbers_by_layer(shapes)
    if numbers is None or world % count:
        raise PartError(f"{some(list(shapes))} are cut among {count} of {world} ranks, and not all are experts of a mixture.")
    if world // count * sum(map(len, numbers.values())) > _MOST_EXPERTS:
        raise PartError(f"{model.file} says that {world} ranks have {count} parts of experts, which is impossible.")
    times = world // count
    for own in range(times):
        ranks = range(own * count, (own + 1) * count) if _data_first(model) else range(own, world, times)
        yield ranks, {_renumbered(name, own, numbers): shape for name, shape in shapes.items()}


_MOST_EXPERTS = 1 << 16


def _numbers_by_layer(names: Mapping[str, Sizes]) -> dict[str, set[int]] | None:
    """The experts of each layer among these names; None where something else is among them."""
    found: dict[str, set[int]] = {}
    for name in names:
        match = _EXPERT.fullmatch(name)
        if match is None:
            return None
        found.setdefault(match["layer"], set()).add(int(match["number"]))
    return found


def _renumbered(name: str, own: int, numbers: Mapping[str, set[int]]) -> str:
    """The name of an expert in the whole model; `own` counts the ranks that share them."""
    match = _EXPERT.fullmatch(name)
    assert match is not None, "callers have checked that it is one"
    start, end = match.span("number")
    return f"{name[:start]}{own * len(numbers[match['layer']]) + int(match['number'])}{name[end:]}"


def _data_first(model: ModelState) -> bool:
    """Whether the ranks of one expert stand beside each other, which the job's configuration says."""
    config = model.root.get("ds_config")
    return type(config) is Dict and config.get("use_data_before_expert_parallelism") is True


def check_complete(model: ModelState, there: AbstractSet[tuple[int, int]]) -> None:
    """Every layer has the files of all its experts, as many as the model file says."""
    counts = model.root.get("num_experts")
    rows = [count for count in (counts.items if type(counts) is List else [counts]) if type(count) is int]
    expected = [
        (layer, expert) for layer, count in enumerate(rows[:_MOST_LAYERS]) for expert in range(min(count, _MOST_LAYERS))
    ]
    if missing := [f"layer_{layer}_expert_{expert}_*" for layer, expert in expected if (layer, expert) not in there]:
        raise PartError(f"Experts are missing: {listed(missing)}.", fix="Get the files of all experts.")


_MOST_LAYERS = 4096


def with_experts(module: Dict, found: Sequence[tuple[str, Node]]) -> Dict:
    """The 16-bit weights with those of the experts, each behind what else its layer has."""
    last: dict[str, list[tuple[str, Entry]]] = {}
    names = {name for name, _ in module.items if type(name) is str}
    for file, root in found:
        for name, value in root.items if type(root) is Dict else [(None, None)]:
            match = _EXPERT.fullmatch(name) if isinstance(name, str) else None
            if match is None or type(value) is not Entry:
                raise PartError(f"{file} holds something else than an expert's tensors.")
            name = match.string
            if name in names:
                raise PartError(f"{file} holds {name!r}, which another file holds too.")
            names.add(name)
            last.setdefault(f"{match['layer']}deepspeed_moe.", []).append((name, value))
    made, places = list[tuple[Node, Node]](), _places(module, last)
    for number, item in enumerate(module.items):
        made.append(item)
        for layer in places.pop(number, ()):
            made += last.pop(layer)
    made += [item for rest in last.values() for item in rest]
    root = Dict(made, ordered=True)
    root.attributes = module.attributes
    return root


def _places(module: Dict, layers: Mapping[str, object]) -> dict[int, list[str]]:
    """Behind which item of the module the experts of each layer come: the last of the same mixture."""
    at: dict[str, int] = {}
    for number, (name, _) in enumerate(module.items):
        layer, found, _ = str(name).partition("deepspeed_moe.")
        if found and f"{layer}deepspeed_moe." in layers:
            at[f"{layer}deepspeed_moe."] = number
    places: dict[int, list[str]] = {}
    for layer, number in at.items():
        places.setdefault(number, []).append(layer)
    return places
