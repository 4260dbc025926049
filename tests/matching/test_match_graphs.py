"""Matching by what models compute: pairs that names and shapes leave open are decided, and none is wrong."""

import random
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from tests.support import opaque
from tests.support.matching import assert_same_function, fates, matched


def compared(old: nn.Module, new: nn.Module, inputs: Sequence[str], state: dict[str, Tensor] | None = None) -> Any:
    """Match two models by structure and by what they compute."""
    return matched(state or old, new, from_=old, input=list(inputs))


def samples(inputs: Sequence[str]) -> list[Tensor]:
    """Numbers of the shapes of inputs."""
    generator = torch.Generator().manual_seed(5)
    return [torch.randn([int(size) for size in spec.split("x")], generator=generator) for spec in inputs]


def modules(found: Any) -> dict[str, str]:
    """Old module -> new module."""
    return {row.old.partition(".")[0]: row.new.partition(".")[0] for row in found.matched}


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
    old, new = make_old(), make_new()
    assert not matched(old, new.state_dict()).complete_with_offers
    found = assert_same_function(old, new, samples(inputs), from_=old, input=inputs)
    assert "graph" in {row.reason for row in (*found.matched, *found.offers)}
    state = list(old.state_dict().items())
    mixed = compared(old, new, inputs, state=dict(random.Random(1).sample(state, len(state))))
    assert fates(mixed) == fates(compared(old, new, inputs))  # the order in the file means nothing


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
    assert matched(old, new, None).complete
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

    sides = attention(["l_key", "l_query", "l_value", "l_out"]), attention(["to_q", "to_k", "to_v", "to_out"])
    assert not {*modules(compared(*sides, ["2x5x8"])).values()} & {"to_q", "to_k"}


def test_a_layer_that_is_not_called_is_not_decided() -> None:
    """Layers that do not run here, as of a head for training, have no place among those that do."""
    old = opaque.Layers(opaque.linear("a b unused"), lambda net, x: net.a(net.b(x)))
    new = opaque.Layers(opaque.linear("spare p q"), lambda net, x: net.p(net.q(x)))
    assert modules(compared(old, new, ["2x8"])) == {"a": "p", "b": "q"}


def test_a_layer_that_the_checkpoint_lacks_is_a_layer_all_the_same() -> None:
    """The model has one more layer than the checkpoint: what it computes is not mistaken for a network without it."""
    old = opaque.Layers(opaque.linear("a b c"), lambda net, x: net.c(net.b(net.a(x))))
    new = opaque.Layers(opaque.linear("p q"), lambda net, x: net.q(net.p(x)))
    state = {name: value for name, value in old.state_dict().items() if not name.startswith("b")}
    assert modules(compared(old, new, ["2x8"], state=state)).items() <= {("a", "p"), ("c", "q")}


# --- chains, streams, random networks


def test_every_layer_along_a_residual_stream_is_decided() -> None:
    """What is added to a stream feeds everything behind it: each layer gets the partner at its depth, none another."""
    old, new = opaque.stream_a(12), opaque.stream_b(12)
    found = compared(old, new, ["2x5x8"])
    assert found.complete, (found.left_over, found.ambiguous)
    names = ([name for name, _ in model.named_children()] for model in (old, new))
    assert modules(found) == dict(zip(next(names), next(names)[::-1], strict=True))


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


@pytest.mark.parametrize("seed", range(20))
def test_random_networks_are_never_paired_wrongly(seed: int) -> None:
    """Layers of one shape in a random computation, under shuffled names: each pair is the true one."""
    olds, news = list("abcdefgh"), list("stuvwxyz")
    random.Random(seed).shuffle(olds)
    random.Random(seed + 100).shuffle(news)
    truth = dict(zip(olds, news, strict=True))
    found = modules(compared(network(seed, olds, other=False), network(seed, news, other=True), ["3x6"]))
    assert found.items() <= truth.items()
    assert len(found) >= 6
