"""Matching by what models compute: pairs that names and shapes leave open are decided, and none is wrong."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from ckpt_tools.fit.plans import plan_of
from ckpt_tools.fit.targets import read_target
from ckpt_tools.matching import Matching, match
from ckpt_tools.matching.evidence.gathered import Gathered, united
from ckpt_tools.matching.evidence.network import LEVELS, Followed, Layers
from ckpt_tools.matching.params import Param
from ckpt_tools.matching.units import units_of
from ckpt_tools.tree.graphs import Graph, parse
from ckpt_tools.values.running import graph_of
from tests.matching import test_match_structure
from tests.matching.test_match_structure import moved, randomise
from tests.support import opaque


def graphs_of(old: nn.Module, new: nn.Module, inputs: Sequence[str]) -> tuple[Graph, Graph]:
    """What both compute."""
    rows = [parse(spec) for spec in inputs]
    return graph_of(old, rows, None), graph_of(new, rows, None)


def compared(old: nn.Module, new: nn.Module, inputs: Sequence[str]) -> Matching:
    """Match two models by structure and by what they compute."""
    graphs = graphs_of(old, new, inputs)
    return match(read_target(old).params, read_target(new).params, stages="structure", graphs=graphs)


def samples(inputs: Sequence[str]) -> list[Tensor]:
    """Numbers of the shapes of inputs."""
    generator = torch.Generator().manual_seed(5)
    return [torch.randn(parse(spec).shape, generator=generator) for spec in inputs]


def outputs(model: nn.Module, inputs: Sequence[str]) -> Tensor:
    """What a model makes of the samples."""
    with torch.no_grad():
        made: Tensor = model(*samples(inputs))
    return made


PAIRS: dict[str, tuple[Callable[[], nn.Module], Callable[[], nn.Module], list[str]]] = {
    "called in another order": (opaque.chain_a, opaque.chain_b, ["2x8"]),
    "attention as one operation and written out": (opaque.attention_a, opaque.attention_b, ["2x5x8"]),
    "separate to fused": (opaque.attention_b, opaque.attention_c, ["2x5x8"]),
    "fused to separate": (opaque.attention_d, opaque.attention_a, ["2x5x8"]),
    "a gate and what it gates": (opaque.branches_a, opaque.branches_b, ["2x8"]),
    "a shortcut like the other convolutions": (opaque.residual_a, opaque.residual_b, ["2x4x6x6"]),
    "a tower for each input": (opaque.towers_a, opaque.towers_b, ["2x8", "2x8"]),
    "attention to itself and to a memory": (opaque.block_a, opaque.block_b, ["2x5x8", "2x5x8"]),
    "recurrent layers": (opaque.recurrent_a, opaque.recurrent_b, ["2x5x8"]),
}


@pytest.mark.parametrize("name", PAIRS)
def test_what_names_leave_open_is_decided(name: str) -> None:
    """Two ways of writing one network, of layers that names and shapes do not tell apart: equal outputs after the move."""
    make_old, make_new, inputs = PAIRS[name]
    old, new = randomise(make_old(), 1), randomise(make_new(), 2)
    alone = match(read_target(old).params, read_target(new).params, stages="structure")
    assert not alone.complete_with_offers
    found = compared(old, new, inputs)
    assert found.complete_with_offers, (found.left_over, found.ambiguous)
    assert "graph" in {row.reason for row in found.matched} | {row.reason for row in found.offers}
    new.load_state_dict(moved(plan_of(found), old.state_dict()))
    torch.testing.assert_close(outputs(new, inputs), outputs(old, inputs), rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("name", PAIRS)
def test_the_order_of_entries_does_not_matter(name: str) -> None:
    """The tensors of both sides in any order: the same pairs."""
    make_old, make_new, inputs = PAIRS[name]
    old, new = make_old(), make_new()
    graphs = graphs_of(old, new, inputs)
    sides = [list(read_target(model).params) for model in (old, new)]
    first = match(*sides, stages="structure", graphs=graphs)
    for seed in range(3):
        for side in sides:
            random.Random(seed).shuffle(side)
        found = match(*sides, stages="structure", graphs=graphs)
        assert {(row.old, row.new) for row in found.matched} == {(row.old, row.new) for row in first.matched}
        assert {(row.old, row.new) for row in found.offers} == {(row.old, row.new) for row in first.offers}


# --- refused


def test_layers_that_are_alike_stay_open() -> None:
    """Two layers whose sum is the output: nothing tells them apart, and nothing is chosen."""
    old = opaque.Layers(opaque.linear("a b"), lambda net, x: net.a(x) + net.b(x))
    new = opaque.Layers(opaque.linear("p q"), lambda net, x: net.q(x) + net.p(x))
    found = compared(old, new, ["2x8"])
    assert not found.matched
    assert len(found.ambiguous) == 4


def test_another_network_is_not_laid_on_this_one() -> None:
    """Three layers in a row against two in a row beside one: what has no partner for certain stays open."""
    old = opaque.Layers(opaque.linear("a b c"), lambda net, x: net.c(net.b(net.a(x))))
    new = opaque.Layers(opaque.linear("p q r"), lambda net, x: net.r(x) + net.q(net.p(x)))
    assert not compared(old, new, ["2x8"]).matched


def test_equal_names_that_are_called_the_other_way_round_are_doubted() -> None:
    """Two layers with the same names, called in the other order: refused, not swapped and not loaded."""
    old = opaque.Layers(opaque.linear("first second"), lambda net, x: net.second(net.first(x).relu()))
    new = opaque.Layers(opaque.linear("first second"), lambda net, x: net.first(net.second(x).relu()))
    assert match(read_target(old).params, read_target(new).params).complete
    found = compared(old, new, ["2x8"])
    assert not found.matched
    assert {row.why for row in found.ambiguous} == {"its name, and what feeds it when the models run, say different things"}


def test_crossed_layers_of_different_networks_are_doubted() -> None:
    """The networks differ elsewhere; two layers of one kind that come the other way round are doubted all the same."""
    sides = [opaque.linear("first second") | {"more": nn.Linear(8, size)} for size in (4, 5)]
    old = opaque.Layers(sides[0], lambda net, x: net.more(net.second(net.first(x))))
    new = opaque.Layers(sides[1], lambda net, x: net.more(net.first(net.second(x))))
    assert {row.new for row in compared(old, new, ["2x8"]).ambiguous} == {
        f"{name}.{role}" for name in ("first", "second") for role in ("weight", "bias")
    }


def test_names_that_speak_against_it_are_not_overruled() -> None:
    """What one calls `key` is used as the query by the other: left to the user."""

    def attention(names: Sequence[str]) -> nn.Module:
        def computed(net: Any, x: Tensor) -> Tensor:
            q, k, v, out = (getattr(net, name) for name in names)
            return out(F.scaled_dot_product_attention(q(x), k(x), v(x)))

        return opaque.Layers(opaque.linear(" ".join(sorted(names))), computed)

    found = compared(
        attention(["l_key", "l_query", "l_value", "l_out"]), attention(["to_q", "to_k", "to_v", "to_out"]), ["2x5x8"]
    )
    assert not {row.new.partition(".")[0] for row in found.matched} & {"to_q", "to_k"}


def test_a_layer_that_is_not_called_is_not_decided() -> None:
    """Layers that do not run here, as of a head for training, have no place among those that do."""
    old = opaque.Layers(opaque.linear("a b unused"), lambda net, x: net.a(net.b(x)))
    new = opaque.Layers(opaque.linear("spare p q"), lambda net, x: net.p(net.q(x)))
    found = compared(old, new, ["2x8"])
    assert {(row.old, row.new) for row in found.matched if row.old.endswith("weight")} == {
        ("a.weight", "p.weight"), ("b.weight", "q.weight"),
    }  # fmt: skip


# --- random networks


def network(seed: int, names: Sequence[str], *, other: bool) -> nn.Module:
    """A random computation on eight layers; `other` writes the same with other operations."""

    def computed(net: Any, x: Tensor) -> Tensor:
        draw = random.Random(seed)
        values = [x]
        for name in names:
            value, more = draw.choice(values[-3:]), draw.choice(values)
            kind = draw.randrange(5)
            made = getattr(net, name)(value)
            if kind == 0:
                made = made.relu() if other else F.relu(made)
            elif kind == 1:
                made = more + made if other else made + more
            elif kind == 2:
                made = more * torch.sigmoid(made) if other else made.sigmoid() * more
            elif kind == 3:
                made = F.layer_norm(made, (6,))
            values.append(made.clone() if other else made)
        return torch.stack(values).sum(0) if seed % 2 else values[-1]

    order = sorted(names) if other else sorted(names, reverse=True)
    return opaque.Layers(opaque.linear(" ".join(order), 6), computed)


@pytest.mark.parametrize("seed", range(40))
def test_random_networks_are_never_paired_wrongly(seed: int) -> None:
    """Layers of one shape in a random computation, under shuffled names: each pair is the true one."""
    olds, news = list("abcdefgh"), list("stuvwxyz")
    random.Random(seed).shuffle(olds)
    random.Random(seed + 100).shuffle(news)
    truth = dict(zip(olds, news, strict=True))
    found = compared(network(seed, olds, other=False), network(seed, news, other=True), ["3x6"])
    pairs = {row.old.partition(".")[0]: row.new.partition(".")[0] for row in found.matched}
    assert pairs == {old: truth[old] for old in pairs}
    assert len(pairs) >= 6


# --- residual streams


def test_every_layer_along_a_residual_stream_is_decided() -> None:
    """What is added to a stream feeds everything behind it: each layer gets the partner at its depth, none another."""
    depth = 12
    old, new = opaque.stream_a(depth), opaque.stream_b(depth)
    found = compared(old, new, ["2x5x8"])
    assert found.complete, (found.left_over, found.ambiguous)
    truth = dict(zip([name for name, _ in old.named_children()], [name for name, _ in new.named_children()][::-1], strict=True))
    assert {row.old.partition(".")[0]: row.new.partition(".")[0] for row in found.matched} == truth


@pytest.mark.parametrize("make", [opaque.stream_a, opaque.stream_b])
def test_a_network_grows_with_the_depth_of_a_stream_and_not_with_its_square(make: Callable[[int], nn.Module]) -> None:
    """Twice the depth: twice as much to look at, on every level."""
    sizes = []
    for depth in (8, 16, 24):
        model = make(depth)
        units = units_of(read_target(model).params, lambda name: name)
        networks = Layers(Followed.through(graph_of(model, [parse("2x5x8")], None), units), units).networks
        sizes.append([sum(1 + len(each.more) for each in networks[level].sets.values()) for level in LEVELS])
    assert [two - one for one, two in zip(*sizes[:2], strict=True)] == [two - one for one, two in zip(*sizes[1:], strict=True)]


@pytest.mark.parametrize("seed", range(20))
def test_gathered_sets_are_the_sets_that_they_stand_for(seed: int) -> None:
    """Unions and changes in any order: the items are those of plain sets, and each is in one place of a chain only."""
    draw = random.Random(seed)
    sets: list[tuple[Gathered[int], frozenset[int]]] = [(Gathered(), frozenset())]
    for _ in range(60):
        (one, plain), (other, beside) = draw.choice(sets), draw.choice(sets)
        step = draw.randrange(3)
        if step == 0:
            items = frozenset(draw.sample(range(30), 3))
            sets.append((one.with_more(items), plain | items))
        elif step == 1:
            sets.append((united([one, other]), plain | beside))
        else:
            halved = one.changed("halves", lambda item: [item // 2, item] if item % 3 else [])
            sets.append((halved, frozenset(each for item in plain if item % 3 for each in (item // 2, item))))
    for found, plain in sets:
        chain = [found]
        while chain[-1].base is not None:
            chain.append(chain[-1].base)
        assert found.items == plain
        assert sum(len(each.more) for each in chain) == len(plain)


# --- implementations whose names were taken away


def without_names(model: nn.Module, inputs: Sequence[str], seed: int) -> tuple[Graph, list[Param], dict[str, str]]:
    """A model's graph and tensors under names that say nothing, in another order; and what the names stand for."""
    params = list(read_target(model).params)
    modules = list(dict.fromkeys(param.name.rpartition(".")[0] for param in params))
    random.Random(seed).shuffle(modules)
    digits = str.maketrans("0123456789", "jkxyfghwqr" if seed else "bcdmnprstz")
    code = {module: f"{'uv'[seed]}{number:03d}".translate(digits) for number, module in enumerate(modules)}
    names = {param.name: f"{code[param.name.rpartition('.')[0]]}.{param.name.rpartition('.')[2]}" for param in params}
    random.Random(seed + 2).shuffle(params)
    graph = graph_of(model, [parse(spec) for spec in inputs], None).renamed(names)
    return graph, [replace(param, name=names[param.name]) for param in params], {new: old for old, new in names.items()}


IMPLEMENTATIONS = {
    name: pair for name, pair in test_match_structure.PAIRS.items() if pair[2].is_floating_point() and pair[2].dim() in (3, 4)
}


@pytest.mark.parametrize("name", IMPLEMENTATIONS)
def test_without_any_names_the_graph_is_enough_or_nothing_is_wrong(name: str) -> None:
    """Two implementations, all names and the order taken away: what is complete computes the same, after the move."""
    make_old, make_new, sample = IMPLEMENTATIONS[name]
    old, new = randomise(make_old(), 1), randomise(make_new(), 2)
    inputs = ["x".join(map(str, sample.shape))]
    graph, params, names = without_names(old, inputs, 0)
    other, others, known = without_names(new, inputs, 1)
    found = match(params, others, stages="structure", graphs=(graph, other), allow_reshape=True)
    if not found.complete_with_offers:
        assert name in OPEN
        return
    state = {code: old.state_dict()[own] for code, own in names.items()}
    new.load_state_dict({known[code]: value for code, value in moved(plan_of(found), state).items()})
    torch.testing.assert_close(outputs(new, inputs), outputs(old, inputs), rtol=1e-4, atol=1e-4)


OPEN = {
    "matrices kept as [in, out]",  # whether a square one is transposed cannot be told
    "a flatten or a convolution over the whole map",  # nor, where no name says `head`, whether channels come first
}


def test_a_layer_that_the_checkpoint_lacks_is_a_layer_all_the_same() -> None:
    """The model has one more layer than the checkpoint: what it computes is not mistaken for a network without it."""
    old = opaque.Layers(opaque.linear("a b c"), lambda net, x: net.c(net.b(net.a(x))))
    new = opaque.Layers(opaque.linear("p q"), lambda net, x: net.q(net.p(x)))
    graphs = graphs_of(old, new, ["2x8"])
    names = {name: name for name in old.state_dict() if not name.startswith("b")}
    params = [param for param in read_target(old).params if param.name in names]
    found = match(params, read_target(new).params, stages="structure", graphs=(graphs[0].renamed(names), graphs[1]))
    assert {(row.old[0], row.new[0]) for row in found.matched} <= {("a", "p"), ("c", "q")}
