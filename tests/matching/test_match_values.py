"""Two copies of one network under other names are paired by their numbers, and two ways of writing it by what they compute."""

import random
from collections.abc import Callable, Sequence
from pathlib import Path
from random import Random
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import ckpt_tools
from ckpt_tools.errors import CkptError, UsageError
from tests.support import opaque
from tests.support.matching import assert_same_function, fates, matched
from tests.support.zips import big_endian


def layers(names: list[str], seed: int = 0) -> nn.ModuleDict:
    """Square layers that only their numbers tell apart, with norms of ones and zeros beside each."""
    torch.manual_seed(seed)
    return nn.ModuleDict({name: nn.Sequential(nn.Linear(8, 8), nn.BatchNorm1d(8)) for name in names})


OLD, NEW = [f"a{word}" for word in "qwertz"], [f"b{word}" for word in "uiopsd"]


def saved(path: Path, model: nn.Module, names: list[str], order: list[int], noise: float = 0.0) -> dict[str, str]:
    """Write the numbers of a model under other names, in another order; returns new name -> old name."""
    state, truth = {}, {}
    for name, number in zip(names, order, strict=True):
        old = list(dict.fromkeys(key.split(".")[0] for key in model.state_dict()))[number]
        for key, value in model.state_dict().items():
            if key.split(".")[0] == old:
                moved = value + noise * torch.randn_like(value) if value.is_floating_point() else value.clone()
                state[key.replace(old, name)], truth[key.replace(old, name)] = moved, key
    torch.save(state, path)
    return truth


@pytest.mark.parametrize("noise", [0.0, 0.01], ids=["copied", "trained on"])
def test_copies_are_found_by_their_numbers(tmp_path: Path, noise: float) -> None:
    """Layers of one shape in a random order, names without meaning: all are right, what is constant goes with its neighbour."""
    model, order = layers(OLD), Random(3).sample(range(6), 6)
    torch.save(model.state_dict(), tmp_path / "old.pth")
    truth = saved(tmp_path / "new.pth", model, NEW, order, noise)
    assert not ckpt_tools.match(tmp_path / "old.pth", like=tmp_path / "new.pth", match="structure").matching.complete
    found = ckpt_tools.match(tmp_path / "old.pth", like=tmp_path / "new.pth", match="values").matching
    assert {row.new: row.old for row in found.matched if ".0." in row.new} == {k: v for k, v in truth.items() if ".0." in k}
    assert all(truth[row.new] == row.old for row in found.matched)
    assert {row.reason for row in found.matched if row.new.endswith("0.weight")} == {"values"}


def test_networks_that_were_trained_apart_are_not_paired(tmp_path: Path) -> None:
    """Other seeds: no tensor goes with another by its numbers; a model without values is refused."""
    for name, names, seed in (("old", OLD, 1), ("new", NEW, 2)):
        torch.save(layers(names, seed).state_dict(), tmp_path / f"{name}.pth")
    found = ckpt_tools.match(tmp_path / "old.pth", like=tmp_path / "new.pth", match="values").matching
    assert not [row for row in found.matched if row.reason == "values"]
    with torch.device("meta"):
        empty = nn.Linear(2, 2)
    with pytest.raises(UsageError, match="no values"):
        ckpt_tools.match(tmp_path / "old.pth", like=empty, match="values")


@pytest.mark.parametrize("spoiled", ["constant", "twice", "short", "nan"])
def test_what_says_nothing_pairs_nothing(spoiled: str) -> None:
    """Ones, a tensor that is there twice, three numbers, NaN: no pair by value."""
    numbers = {"constant": torch.ones(64), "short": torch.tensor([1.0, 2.0, 4.0]), "nan": torch.arange(64.0).log() * torch.nan}
    sample = numbers.get(spoiled, torch.arange(64.0).sin())
    old = {name: sample.clone() for name in (["a", "b"] if spoiled == "twice" else ["a"])}
    found = matched(old, {"x": sample.clone()}, "values")
    assert not [row for row in found.matched if row.reason == "values"]
    assert not found.ambiguous or spoiled == "twice"


@pytest.mark.parametrize("size", [4, 16])
@pytest.mark.parametrize("order", ["channel first", "channel last"])
def test_a_patch_embedding_is_reshaped_where_its_numbers_say_so(tmp_path: Path, size: int, order: str) -> None:
    """A convolution and a linear layer over patches: the same numbers in the same order are partners, all else is left over."""
    kernel = torch.randn(24, 3, size, size, generator=torch.Generator().manual_seed(size))
    moved = kernel if order == "channel first" else kernel.permute(0, 2, 3, 1)
    sides = {"patch_embed.proj.weight": kernel}, {"embed.patch.weight": moved.reshape(24, -1)}
    paths = tmp_path / "kernel.pth", tmp_path / "linear.pth"
    for path, state in zip(paths, sides, strict=True):
        torch.save(state, path)
    for (old, new), state in ((paths, sides[1]), (paths[::-1], sides[0])):
        assert not ckpt_tools.match(old, like=new, match="values").matching.matched
        report = ckpt_tools.match(old, like=new, match="values", allow_reshape=True)
        assert [row.step for row in report.matching.matched] == (["reshape"] if order == "channel first" else [])
        if order == "channel first":
            advice = ckpt_tools.match(old, like=new, match="values").advice.further
            assert advice is not None
            assert advice.options == ["--allow-reshape"]
            ckpt_tools.convert(old, tmp_path / "out.pth", like=new, match="values", allow_reshape=True, overwrite=True)
            torch.testing.assert_close(torch.load(tmp_path / "out.pth"), state, rtol=0, atol=0)


def values_of(tmp_path: Path, old: dict[str, torch.Tensor], new: dict[str, torch.Tensor]) -> dict[str, tuple[str, float]]:
    """What `--match values` pairs by numbers: new name -> old name and confidence."""
    for name, state in (("old", old), ("new", new)):
        torch.save(state, tmp_path / f"{name}.pth")
    found = ckpt_tools.match(tmp_path / "old.pth", like=tmp_path / "new.pth", match="values").matching
    return {row.new: (row.old, row.confidence) for row in found.matched if row.reason == "values"}


def test_the_whole_tensor_decides(tmp_path: Path) -> None:
    """Two that begin with the same 256 numbers, and two that differ in one number behind them, are told apart."""
    torch.manual_seed(0)
    one, other, *swapped = torch.randn(4, 64, 64)
    for part in (slice(256), slice(4095)):
        other.view(-1)[part] = one.view(-1)[part]
        sides = {"pa.weight": one, "pb.weight": other}, {"qx.weight": other, "qy.weight": one}
        assert values_of(tmp_path, *sides) == {"qx.weight": ("pb.weight", 0.99), "qy.weight": ("pa.weight", 0.99)}
        alone = {"q.weight": ("p.weight", 0.95)} if part.stop == 4095 else {}  # the whole differs, nothing else is like it
        assert values_of(tmp_path, {"p.weight": one}, {"q.weight": other}) == alone
    moved = [part.clone() for part in swapped]
    for part, begin in zip(moved, swapped[::-1], strict=True):
        part.view(-1)[:256] = begin.view(-1)[:256]
    old, new = ({f"{side}{number}.weight": part for number, part in enumerate(parts)} for side, parts in
                (("p", swapped), ("q", moved)))  # fmt: skip
    assert values_of(tmp_path, old, new) == {"q0.weight": ("p0.weight", 0.95), "q1.weight": ("p1.weight", 0.95)}


def test_counters_and_masks_decide_nothing(tmp_path: Path) -> None:
    """Positions that count up and a triangle of ones are the same in any model; the biases beside them are not theirs."""
    ids, mask = torch.arange(64), torch.ones(8, 8).tril()
    for buffer in (ids, mask, ids.reshape(1, 64).float(), ids * 3 + 5):
        old = {"fc.ids": buffer, "fc.bias": torch.zeros(64), "fd.bias": torch.ones(64)}
        new = {"x.ids": buffer, "x.bias": torch.ones(64), "y.bias": torch.zeros(64)}
        assert values_of(tmp_path, old, new) == {}


@pytest.mark.parametrize("shape", [(8, 8), (300, 300), (12, 40)])
@pytest.mark.parametrize("name", ["fc.weight", "lin.weight"])
@pytest.mark.parametrize("noise", [0.0, 0.01], ids=["copied", "trained on"])
def test_a_transposed_copy_is_an_offer(tmp_path: Path, shape: tuple[int, int], name: str, noise: float) -> None:
    """A square matrix under its own name whose numbers are transposed is never copied as it is; a plan transposes it."""
    torch.manual_seed(0)
    weight = torch.randn(shape)
    wanted = (weight.T + noise * torch.randn(shape).T).contiguous()
    torch.save({"fc.weight": weight}, tmp_path / "old.pth")
    torch.save({name: wanted}, tmp_path / "new.pth")
    found = ckpt_tools.match(tmp_path / "old.pth", like=tmp_path / "new.pth", match="values", output=tmp_path / "plan.toml")
    assert [(row.step, row.reason, row.confidence) for row in found.matching.offers] == [("transpose", "values", 0.95)]
    assert not found.matching.matched
    with pytest.raises(CkptError, match="does not fit"):
        ckpt_tools.convert(tmp_path / "old.pth", tmp_path / "out.pth", like=tmp_path / "new.pth", match="values")
    ckpt_tools.convert(tmp_path / "old.pth", tmp_path / "out.pth", plan=tmp_path / "plan.toml")
    torch.testing.assert_close(torch.load(tmp_path / "out.pth"), {name: weight.T}, rtol=0, atol=0)


@pytest.mark.parametrize("container", ["dcp", "shards", "fp16", "bf16", "big", "strided", "compressed"])
def test_every_container_has_the_same_numbers(tmp_path: Path, container: str) -> None:
    """A folder of chunks, shards, halves, a big-endian file, views, a compressed file: each layer finds its copy."""
    torch.manual_seed(0)
    old = {f"p{number}.weight": torch.randn(96, 80) for number in range(4)}
    new = {f"q{(number * 3 + 1) % 4}.weight": value for number, value in enumerate(old.values())}
    truth = {f"q{(number * 3 + 1) % 4}.weight": name for number, name in enumerate(old)}
    torch.save(old, tmp_path / "old.pth")
    torch.save({name: value.T.contiguous().T if container == "strided" else value for name, value in new.items()},
               tmp_path / "new.pth")  # fmt: skip
    path = tmp_path / "new.pth"
    if container == "big":
        big_endian(tmp_path / "new.pth", path := tmp_path / "big.pth", {str(number): 4 for number in range(4)})
    elif container == "compressed":
        np.savez_compressed(path := tmp_path / "made.npz", **{name: value.numpy() for name, value in new.items()})  # type: ignore[arg-type]
    elif container == "shards":
        ckpt_tools.convert(tmp_path / "new.pth", path := tmp_path / "made", shard_size="40KB")
    elif container != "strided":
        path = tmp_path / ("made" if container == "dcp" else "made.pth")
        if container == "dcp":
            ckpt_tools.convert(tmp_path / "new.pth", path, format="dcp")
        else:
            ckpt_tools.convert(tmp_path / "new.pth", path, dtype=container)
    back = {name: new_name for new_name, name in truth.items()}
    for one, other, known in ((tmp_path / "old.pth", path, truth), (path, tmp_path / "old.pth", back)):
        found = ckpt_tools.match(one, like=other, match="values").matching
        assert {row.new: row.old for row in found.matched} == known
        assert {row.confidence for row in found.matched} == {0.95 if container in ("fp16", "bf16") else 0.99}


def compared(old: nn.Module, new: nn.Module, inputs: Sequence[str], state: dict[str, Tensor] | None = None) -> Any:
    """Match two models by structure and by what they compute."""
    return matched(state or old, new, from_=old, input=list(inputs))


def samples(inputs: Sequence[str]) -> list[Tensor]:
    generator = torch.Generator().manual_seed(5)
    return [torch.randn([int(size) for size in spec.split("x")], generator=generator) for spec in inputs]


def modules(found: Any) -> dict[str, str]:
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
