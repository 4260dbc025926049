"""Structural matching: independent implementations of one network, run side by side; and random changes to one network.

What is matched must be right: both models give equal outputs. What cannot be known must be left over, never guessed.
"""

import sys
from collections.abc import Callable, Sequence
from itertools import combinations, product
from random import Random
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from ckpt_tools.fit.plans import Plan, plan_of
from ckpt_tools.fit.targets import read_target
from ckpt_tools.matching import Framework, Matching, Stages, match, structure
from ckpt_tools.matching.params import Param
from ckpt_tools.matching.resolve import How, UnitPair
from ckpt_tools.matching.units import Unit
from ckpt_tools.matching.verify import doubtful
from ckpt_tools.tree.graphs import Graph
from tests.support import networks as nets

# --- pairs of implementations


def randomise(model: nn.Module, seed: int) -> nn.Module:
    """Give every parameter and buffer values of its own: constant ones would hide a wrong partner."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, value in model.state_dict(keep_vars=True).items():
            if value.is_floating_point():
                noise = torch.rand(value.shape, generator=generator)
                value.copy_(noise + 0.5 if "var" in name or "norm" in name else noise - 0.5)
    return model.eval()


def moved(plan: Plan, state: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """What a plan makes of live tensors, worked out by torch itself."""
    made: dict[str, torch.Tensor] = {}
    for step in plan.steps:
        tensors = [state[name] for name in step.old]
        if step.step == "split":
            made.update(zip(step.new, tensors[0].split([shape[0] for shape in step.new_shapes]), strict=True))
        elif step.step == "concat":
            made[step.new[0]] = torch.cat(tensors)
        else:
            tensor = tensors[0].T if step.step == "transpose" else tensors[0]
            made[step.new[0]] = tensor.reshape(step.new_shapes[0])
    return made


def compared(old: nn.Module, new: nn.Module, *, allow_reshape: bool = True) -> Matching:
    """Match two live models by structure."""
    return match(read_target(old).params, read_target(new).params, stages="structure", allow_reshape=allow_reshape)


def assert_same_function(old: nn.Module, new: nn.Module, sample: torch.Tensor) -> Matching:
    """Match two implementations completely, move the weights, and find equal outputs."""
    randomise(old, 1)
    randomise(new, 2)
    found = compared(old, new)
    assert found.complete_with_offers, (found.left_over, found.mismatched, found.ambiguous)
    with torch.no_grad():
        before = new(sample)
        new.load_state_dict(moved(plan_of(found), old.state_dict()))
        expected, actual = old(sample), new(sample)
    assert not torch.allclose(before, expected, rtol=1e-3, atol=1e-3)
    torch.testing.assert_close(actual, expected, rtol=1e-4, atol=1e-4)
    return found


EIGHT = torch.randn(2, 8, 8)
IMAGE, TOKENS, TEXT = torch.randn(2, 3, 16, 16), torch.randn(2, 5, 8), torch.arange(10).reshape(2, 5)
PAIRS: dict[str, tuple[Callable[[], nn.Module], Callable[[], nn.Module], torch.Tensor]] = {
    "residual network, shortcut last or first": (nets.ResNetA, nets.ResNetB, IMAGE),
    "residual network, convolutions in one Sequential": (nets.ResNetA, nets.ResNetC, IMAGE),
    "flat features or numbered names": (nets.PlainA, nets.PlainB, IMAGE),
    "inverted residuals, nested or flat": (nets.MobileA, nets.MobileB, IMAGE),
    "encoder layers of torch or with q, k, v apart": (nets.EncoderA, nets.EncoderB, TOKENS),
    "q, k, v registered in another order": (nets.EncoderB, nets.EncoderC, TOKENS),
    "convolutions of size 1 or linear layers": (nets.MixerA, nets.MixerB, TOKENS),
    "gated layers with w1, w3 or gate_up": (nets.GatedA, nets.GatedB, TOKENS),
    "matrices kept as [in, out]": (nets.TransposedA, nets.TransposedB, TOKENS),
    "tied embeddings": (nets.LanguageA, nets.LanguageB, TEXT),
    "a flatten or a convolution over the whole map": (nets.MapA, nets.MapB, IMAGE),
    "downsampling at the end or the start of a stage": (nets.StagesA, nets.StagesB, EIGHT),
    "window before grid attention, by name": (nets.WindowsA, nets.WindowsB, EIGHT),
    "one network under two prefixes": (nets.PrefixedA, nets.PrefixedB, IMAGE),
}


@pytest.mark.parametrize("name", PAIRS)
@pytest.mark.parametrize("reverse", [False, True], ids=["", "back"])
def test_two_implementations_become_one_function(name: str, reverse: bool) -> None:
    """The plan of a complete matching makes both models give equal outputs, in both directions."""
    one, other, sample = PAIRS[name]
    assert_same_function(*((other(), one()) if reverse else (one(), other())), sample)


def test_fused_layers_are_offers_in_a_stated_order() -> None:
    """`in_proj_weight` against q, k, v: a split, listed as missing and unexpected too, since only a plan does it."""
    found = compared(nets.EncoderA(), nets.EncoderB())
    offer = next(offer for offer in found.offers if offer.old[0].endswith("in_proj_weight"))
    assert (offer.step, offer.parts) == ("split", ("query", "key", "value"))
    assert [name.split(".")[-2] for name in offer.new] == ["to_q", "to_k", "to_v"]
    assert set(offer.new) <= set(found.missing)
    assert not found.complete


def test_reshapes_are_asked_for() -> None:
    """Without allow_reshape `[out, in, 1]` against `[out, in]` is a mismatch with both shapes."""
    found = compared(nets.MixerA(), nets.MixerB(), allow_reshape=False)
    assert {abs(len(row.source_shape) - len(row.target_shape)) for row in found.mismatched} == {1}


@pytest.mark.parametrize("framework", ["keras", "flax"])
def test_a_map_with_its_channels_last_is_no_map_of_torch(framework: Framework) -> None:
    """A dense layer behind a flatten of Keras or Flax has its numbers as height, width, channels: never a convolution's."""
    source = [
        Param("conv2d.kernel", (4, 4, 3, 6)),
        Param("conv2d.bias", (6,)),
        Param("dense.kernel", (96, 10)),
        Param("dense.bias", (10,)),
    ]
    target = [Param("a.weight", (6, 3, 4, 4)), Param("a.bias", (6,)), Param("b.weight", (10, 6, 4, 4)), Param("b.bias", (10,))]
    found = match(source, target, stages="structure", allow_reshape=True, framework=framework)
    assert "b.weight" not in {row.new for row in found.matched}
    assert not found.complete_with_offers


def test_a_map_is_flattened_only_when_asked() -> None:
    """Without allow_reshape both shapes are told as a mismatch; kernels of 3x3 are no map."""
    found = compared(nets.MapA(), nets.MapB(), allow_reshape=False)
    assert [(row.source_shape, row.target_shape) for row in found.mismatched] == [((10, 96), (10, 6, 4, 4))]
    small = match([Param("a.weight", (8, 72))], [Param("a.weight", (8, 8, 3, 3))], allow_reshape=True)
    assert small.mismatched


@pytest.mark.parametrize(
    ("old", "new", "channels", "size"),
    [("proj", "proj", 8, 16), ("to_patch_embedding.1", "patch_embed.proj", 32, 4), ("x.patchify", "x.patchify", 32, 4)],
)
def test_a_patch_embedding_is_no_flattened_map(old: str, new: str, channels: int, size: int) -> None:
    """As a linear layer it may have its numbers as height, width, channels, however many channels an image has."""
    linear = [Param(f"{old}.weight", (64, channels * size * size)), Param(f"{old}.bias", (64,))]
    convolution = [Param(f"{new}.weight", (64, channels, size, size)), Param(f"{new}.bias", (64,))]
    for sides in ((linear, convolution), (convolution, linear)):
        found = match(*sides, stages="structure", allow_reshape=True)
        assert not [row for row in found.matched if row.step != "copy"]
        assert not found.complete_with_offers


@pytest.mark.parametrize("name", ["attn.sr", "down.reduction", "stem.conv"])
@pytest.mark.parametrize("stages", ["names", "structure", "position"])
def test_a_convolution_that_makes_a_map_smaller_is_no_head(name: str, stages: Any) -> None:
    """As a linear layer over patches it has its numbers in any order: as many numbers are no reason to reshape."""
    linear, convolution = [Param(f"{name}.weight", (64, 4096))], [Param(f"{name}.weight", (64, 64, 8, 8))]
    for sides in ((linear, convolution), (convolution, linear)):
        found = match(*sides, stages=stages, allow_reshape=True)
        assert [(row.old, row.new) for row in found.mismatched] == [(f"{name}.weight", f"{name}.weight")]


# --- pairs that are not one network, or cannot be told


REFUSED: dict[str, tuple[Callable[[], nn.Module], Callable[[], nn.Module]]] = {
    "patches through a matrix or a convolution": (nets.PatchesA, nets.PatchesB),
    "another width": (nets.ResNetA, lambda: nets.ResNetB(width=6)),
    "another depth": (nets.EncoderA, lambda: nets.EncoderB(depth=3)),
    "q, k, v without names": (nets.EncoderB, nets.EncoderD),
    "layers without meaning in their names": (lambda: nets.named("one", "two"), lambda: nets.named("red", "blue")),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_is_not_one_network_is_not_matched(name: str) -> None:
    """Other sizes, or equal shapes that neither names nor order tell apart: something is left over."""
    one, other = REFUSED[name]
    for old, new in ((one(), other()), (other(), one())):
        found = compared(old, new)
        assert not found.complete_with_offers
        assert found.ambiguous or any(found.left_over)


def fates(found: Matching) -> list[object]:
    """What a matching says of every name, in no order."""
    return [
        {(row.old, row.new, row.reason, row.step) for row in found.matched}, set(found.missing), set(found.unexpected),
        {(row.old, row.new) for row in found.mismatched}, {(row.new, frozenset(row.candidates)) for row in found.ambiguous},
        {(offer.step, offer.old, offer.new) for offer in found.offers},
    ]  # fmt: skip


@pytest.mark.parametrize("name", PAIRS)
def test_the_order_in_the_file_means_nothing(name: str) -> None:
    """Sorted as text (as safetensors has it) and in two random orders: the same partners, the same left over."""
    old, new = (read_target(build()).params for build in PAIRS[name][:2])
    expected = fates(match(old, new, stages="structure", allow_reshape=True))
    for seed in range(3):
        shuffled = [sorted(side, key=lambda param: param.name) for side in (old, new)]
        for side in shuffled if seed else ():
            Random(seed).shuffle(side)
        assert fates(match(*shuffled, stages="structure", allow_reshape=True)) == expected


def test_numbers_count_in_any_order() -> None:
    """Twelve layers of one shape, `10` sorted before `2`; and two that are registered against their numbers."""
    old = [Param(f"layers.{n}.lin.weight", (4, 4)) for n in sorted(map(str, range(12)))]
    new = [Param(f"blocks.{n}.fc.weight", (4, 4)) for n in range(12)]
    found = match(old, new, stages="structure")
    assert {row.new: row.old for row in found.matched} == {f"blocks.{n}.fc.weight": f"layers.{n}.lin.weight" for n in range(12)}
    found = compared(nets.named("l1", "l2"), nets.named("m2", "m1"))
    assert {(row.old, row.new) for row in found.matched} >= {("l1.weight", "m1.weight"), ("l2.weight", "m2.weight")}


def test_names_that_agree_by_chance_are_doubted() -> None:
    """A layer more in front shifts the numbers: `layers.1` of the one is `layers.2` of the other, of the same shape."""
    old = nn.Sequential(*(nn.Linear(4, 4) for _ in range(3)), nn.Linear(4, 2))
    new = nn.Sequential(nn.Identity(), *(nn.Linear(4, 4) for _ in range(3)), nn.Linear(4, 2))
    found = compared(old, new)
    assert not [row for row in found.matched if row.old == row.new]
    assert found.ambiguous


@pytest.mark.parametrize(("depth", "doubted"), [(0, ["neck"]), (1, [])])
def test_a_lone_shape_outside_of_blocks_is_doubted(depth: int, doubted: list[str]) -> None:
    """Out of order, without a word in common, and something is left over: only the block that it is in speaks for it."""
    places: list[tuple[int, int, str, str, How]] = [
        (5, 0, "neck", "bridge", "unique"),
        (0, 1, "a", "b", "names"),
        (1, 2, "c", "d", "names"),
    ]
    pairs = [
        UnitPair(Unit(old, (name,)), Unit(new, (other,)), how, depth, frozenset()) for old, new, name, other, how in places
    ]
    olds, news = [*(pair.old for pair in pairs), Unit(7, ("rest",))], [pair.new for pair in pairs]
    assert [pair.old.path[0] for pair in doubtful(pairs, olds, news)] == doubted
    assert not doubtful(pairs, olds[:-1], news)


def test_heads_of_other_sizes_are_mismatched_not_lost() -> None:
    """The same names, another number of classes: the two shapes are told."""
    found = compared(nn.Sequential(nn.Linear(4, 10)), nn.Sequential(nn.Linear(4, 20)))
    assert [(row.source_shape, row.target_shape) for row in found.mismatched] == [((10, 4), (20, 4)), ((10,), (20,))]


def test_a_head_under_another_name_is_mismatched_too() -> None:
    """Other names throughout and another number of classes: the heads are told as partners of different shapes."""
    new = nets.ResNetB()
    new.classifier[1] = nn.Linear(20, 9)
    found = compared(nets.ResNetA(), new)
    assert [(row.old, row.new) for row in found.mismatched] == [
        ("fc.weight", "classifier.1.weight"), ("fc.bias", "classifier.1.bias")
    ]  # fmt: skip
    assert found.left_over == ((), ())


SQUARE, TALL = (4, 4), (6, 4)
HIDDEN: dict[str, Any] = {
    "a square parameter of its own": ({"proj": SQUARE}, {"head.weight": SQUARE}),
    "and under one name": ({"text_projection": SQUARE, "a.w": TALL}, {"text_projection.weight": SQUARE, "b.w": TALL}),
    "a square matrix beside transposed ones and others": (
        {"a.weight": (4, 6), "a.bias": (6,), "b.weight": TALL, "b.bias": (6,), "c.weight": SQUARE, "c.bias": (4,)},
        {"a.weight": TALL, "a.bias": (6,), "b.weight": TALL, "b.bias": (6,), "c.weight": SQUARE, "c.bias": (4,)},
    ),
    "q and k of the first Llama": (
        {f"layers.0.{name}.weight": SQUARE for name in ("wq", "wk", "wv", "wo")},
        {f"model.0.{name}_proj.weight": SQUARE for name in ("q", "k", "v", "o")},
    ),
    "parts that alternate by head": (
        {"attn.query_key_value.weight": (12, 4), "attn.dense.weight": SQUARE},
        {f"attn.{name}_proj.weight": SQUARE for name in ("q", "k", "v", "o")},
    ),
    "an LSTM's two biases": (
        {"rnn.b1.value": (8,), "rnn.b2.other": (8,)},
        {"lstm.bias_ih_l0": (8,), "lstm.bias_hh_l0": (8,)},
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", HIDDEN)
def test_equal_shapes_that_may_hide_a_difference_are_no_partners(name: str) -> None:
    """Where libraries are known to keep the same numbers in other places, equal shapes are not enough."""
    one, other = ([Param(*row) for row in side.items()] for side in HIDDEN[name])
    for old, new in ((one, other), (other, one)):
        found = match(old, new, stages="structure", allow_reshape=True)
        assert not found.complete_with_offers


def test_a_block_may_hold_another_of_its_kind() -> None:
    """Equal blocks around one convolution, a linear layer more elsewhere: which of them is in the block is not proved."""
    linear, convolution = (4, 4), (4, 3, 1, 1)
    old = [Param("a.x.weight", linear), Param("a.y.weight", convolution), Param("b.weight", linear)]
    new = [Param("c.u.weight", convolution), Param("c.v.weight", linear)]
    found = match(old, new, stages="structure")
    assert [(row.old, row.new) for row in found.matched] == [("a.y.weight", "c.u.weight")]
    assert [row.new for row in found.ambiguous] == ["c.v.weight"]


def test_recurrent_layers_keep_their_own_words() -> None:
    """`weight_ih_l0` and `bias_hh_l0` are the same tensors in any LSTM of torch, whatever it is called."""
    found = compared(nn.ModuleDict({"rnn": nn.LSTM(3, 4, 2)}), nn.ModuleDict({"lstm": nn.LSTM(3, 4, 2)}))
    assert found.complete
    assert all(row.old.removeprefix("rnn.") == row.new.removeprefix("lstm.") for row in found.matched)


def test_missing_and_extra_modules_leave_the_rest_matched() -> None:
    """An extra head on one side and a norm more on the other: everything else has its partner."""
    old, new = nets.ResNetA(), nets.ResNetB()
    old.aux = nn.Linear(5, 7)
    new.last = nn.LayerNorm(11)
    found = compared(old, new)
    assert found.left_over == (("last.weight", "last.bias"), ("aux.weight", "aux.bias"))
    assert len(found.matched) == len(nets.ResNetA().state_dict())


def test_two_thousand_tensors_take_no_time() -> None:
    """2,000 tensors in blocks, and flat: under two seconds of CPU."""
    import time

    blocks = [Param(f"layers.{n}.{leaf}.{part}", (64, 64) if part == "weight" else (64,))
              for n in range(125) for leaf in ("q_proj", "k_proj", "v_proj", "o_proj", "fc1", "fc2", "norm1", "norm2")
              for part in ("weight", "bias")]  # fmt: skip
    renamed = [Param(f"encoder.block_{row.name[7:]}".replace("_proj", "_lin"), row.shape) for row in blocks]
    flat = [Param(f"features.{n}.weight", (8, 8)) for n in range(2000)]
    other = [Param(f"net.{2 * n}.weight", (8, 8)) for n in range(2000)]
    for old, new in ((blocks, renamed), (flat, other)):
        started = time.process_time()
        assert len(match(old, new, stages="structure").matched) == len(old)
        assert time.process_time() - started < 2


# --- random changes

WORDS = ["alpha", "beta", "gamma", "delta", "omega", "sigma", "tau", "rho", "phi", "psi"]
KINDS: list[dict[str, tuple[int, ...]]] = [
    {"weight": (4, 4), "bias": (4,)}, {"weight": (4, 4)}, {"weight": (4, 3, 1, 1)}, {"weight": (4, 3)}, {"weight": (8, 4)},
    {"weight": (4,), "bias": (4,)},
    {"weight": (4,), "bias": (4,), "running_mean": (4,), "running_var": (4,), "num_batches_tracked": ()},
]  # fmt: skip
Tree = int | list["Tree"]  # a leaf module of a kind, or a module with children in the order in which they are used
TREES = st.recursive(st.integers(0, len(KINDS) - 1), lambda below: st.lists(below, min_size=1, max_size=4), max_leaves=14)


def implementation(draw: st.DrawFn, tree: Tree, words: list[str], stems: list[str]) -> list[tuple[str, tuple[int, ...], int]]:
    """The leaf modules as one author registers them: (name, place in the tree, kind).

    Children are numbered in the order of use, or have words for names, then in any order; words mean nothing. A level may be
    left out (its children stand in the module above) or put in.
    """
    found: list[tuple[str, tuple[int, ...], int]] = []

    def register(node: Tree, name: str, place: tuple[int, ...]) -> None:
        if isinstance(node, int):
            found.append((name, place, node))
            return
        numbers = list(range(len(node)))
        if draw(st.booleans()):
            stem = draw(st.sampled_from(stems))
            names = [f"{stem}{number}" for number in numbers]
        else:
            names = list(draw(st.permutations(words))[: len(node)])
            numbers = list(draw(st.permutations(numbers)))
        # For all of its children: half of a level beside the level is another model, and nothing could tell which half.
        joint = "_" if name and draw(st.integers(0, 4)) == 0 else "."
        for number in numbers:
            register(node[number], f"{name}{joint}{names[number]}".strip("."), (*place, number))

    register(tree, "", ())
    return found


def tensors(leaves: list[tuple[str, tuple[int, ...], int]]) -> list[Param]:
    """The tensors of leaf modules, in order."""
    return [Param(f"{name}.{leaf}".strip("."), shape) for name, _, kind in leaves for leaf, shape in KINDS[kind].items()]


def wrong(found: Matching, places: dict[str, object]) -> list[str]:
    """Matches whose names stand for different modules. The stage of exact names is not in question here."""
    return [
        f"{row.old} -> {row.new}"
        for row in found.matched
        if row.reason == "structure" and places[f"old {row.old}"] != places[f"new {row.new}"]
    ]


@settings(max_examples=150)
@given(st.data(), TREES)
def test_what_is_matched_is_never_wrong(data: st.DataObject, tree: Tree) -> None:
    """Whatever was renamed, nested, reordered, dropped or added: a pair that is reported is one module on both sides.

    A module that is dropped on one side is not replaced by one of its shape on the other: nothing could tell.
    """
    manners = (WORDS[:5], ["", "block"]), (WORDS[5:], ["layer", "conv"])
    sides = [data.draw(st.composite(implementation)(tree, *manner)) for manner in manners]
    gone = data.draw(st.sets(st.sampled_from(sorted(place for _, place, _ in sides[0])), max_size=2))
    side = data.draw(st.integers(0, 1))
    sides[side] = [leaf for leaf in sides[side] if leaf[1] not in gone]
    if data.draw(st.booleans()) and not gone:
        extra = ("extra.more", (-1,), data.draw(st.integers(0, len(KINDS) - 1)))
        sides[side].insert(data.draw(st.integers(0, len(sides[side]))), extra)
    places: dict[str, object] = {}
    for label, leaves in zip(("old", "new"), sides, strict=True):
        for leaf in leaves:
            places |= {f"{label} {param.name}": (leaf[1], param.name.rpartition(".")[2]) for param in tensors([leaf])}
    found = match(tensors(sides[0]), tensors(sides[1]), stages="structure", allow_reshape=True)
    assert not wrong(found, places), (sides, found.matched)


@settings(max_examples=60)
@given(st.data(), TREES, st.sampled_from(["exact+wrappers", "names", "structure"]))
def test_no_matching_depends_on_the_order(data: st.DataObject, tree: Tree, stages: Stages) -> None:
    """Whatever two authors wrote, and however both files are sorted: every name has the same fate."""
    manners = (WORDS[:5], ["", "block"]), (WORDS[3:8], ["layer", "conv"])
    one, other = (tensors(data.draw(st.composite(implementation)(tree, *manner))) for manner in manners)
    other = [*other[: data.draw(st.integers(0, len(other)))], Param("extra.weight", (4, 4))]
    mixed = [list(data.draw(st.permutations(side))) for side in (one, other)]
    assert fates(match(*mixed, stages=stages)) == fates(match(one, other, stages=stages))


@settings(max_examples=60)
@given(st.data())
def test_equal_shapes_that_change_places_are_never_swapped(data: st.DataObject) -> None:
    """Blocks of layers of one shape, with and without telling names, registered in any order inside the block."""
    styles = [["q", "k", "v", "out"], ["query", "key", "value", "dense"], ["conv1", "conv2", "conv3", "shortcut"], WORDS[:4]]
    one, other = data.draw(st.sampled_from(styles)), data.draw(st.sampled_from([*styles, WORDS[4:8]]))
    order = [data.draw(st.permutations(range(4))) for _ in range(2)]
    old = [Param(f"layers.{block}.{one[n]}.weight", (4, 4)) for block in range(2) for n in order[0]]
    new = [Param(f"blocks.{block}.{other[n]}.weight", (4, 4)) for block in range(2) for n in order[1]]
    places: dict[str, object] = {f"old layers.{b}.{one[n]}.weight": (b, n) for b in range(2) for n in range(4)}
    places |= {f"new blocks.{b}.{other[n]}.weight": (b, n) for b in range(2) for n in range(4)}
    found = match(old, new, stages="structure")
    if not {("q", "conv1"), ("query", "conv1")} & {(one[0], other[0]), (other[0], one[0])}:  # no truth between those
        assert not wrong(found, places), found.matched


@settings(max_examples=80)
@given(st.data())
def test_every_tensor_has_one_fate(data: st.DataObject) -> None:
    """Any names and shapes: each target name in one list, each source name matched once at most."""
    names = st.lists(st.lists(st.sampled_from(["a", "b", "0", "1", "qkv", "q", "weight", "bias"]), min_size=1, max_size=4)
                     .map(".".join), unique=True, max_size=12)  # fmt: skip
    shapes = st.sampled_from([(2, 2), (6, 2), (2,), (6,), (2, 2, 1), ()])
    sides: list[list[Param]] = [
        [Param(name, data.draw(shapes), tie=data.draw(st.sampled_from([None, None, 1]))) for name in data.draw(names)]
        for _ in range(2)
    ]
    found: Any = match(*sides, stages="structure", allow_reshape=data.draw(st.booleans()))
    fates = [*(row.new for row in found.matched), *found.missing, *(row.new for row in found.mismatched)]
    fates += [row.new for row in found.ambiguous]
    assert sorted(fates) == sorted(row.name for row in sides[1])
    used = [row.old for row in (*found.matched, *found.mismatched) if row.reason != "tied"]
    assert len(set(used)) == len(used)
    tied = [row.old for row in found.matched if row.reason == "tied"]
    assert {*used, *tied, *found.unexpected} == {row.name for row in sides[0]}


# --- as many as there are


def layers(prefix: str, parts: str, count: int) -> list[Param]:
    """Numbered blocks of parts of one shape."""
    return [
        Param(f"{prefix}.{index // 8}.{index % 8}.{part}.weight", (4, 6)) for index in range(count) for part in parts.split()
    ]


def shapes(prefix: str, count: int, shape: Callable[[int], tuple[int, int]]) -> list[Param]:
    """Numbered tensors, each of its own shape."""
    return [Param(f"{prefix}{index}", shape(index)) for index in range(count)]


MANY: dict[str, Callable[[int], tuple[list[Param], list[Param]]]] = {
    "blocks": lambda n: (layers("layers", "w1 w2", n), layers("h", "up down", n)),
    "words without meaning": lambda n: (layers("a", "x y", n), layers("b", "u v", n)),
    "other shapes": lambda n: (shapes("a.l", n, lambda i: (i, 2)), shapes("b.m", n, lambda i: (3, i))),
    "no modules": lambda n: (shapes("p", n, lambda i: (2, 2)), shapes("q", n, lambda i: (2, 2))),
}


def steps(olds: Sequence[Param], news: Sequence[Param], graphs: tuple[Graph, Graph] | None = None) -> int:
    """How many lines of Python a matching takes, and turns of its loops."""
    count = 0

    def trace(*_: Any) -> Any:
        nonlocal count
        count += 1
        return trace

    before = sys.gettrace()
    sys.settrace(trace)
    try:
        match(olds, news, stages="structure", graphs=graphs)
    finally:
        sys.settrace(before)
    return count


@pytest.mark.parametrize("name", MANY)
def test_the_work_grows_as_the_names_do(name: str) -> None:
    """Four times as many tensors take four times the steps, about, and not sixteen."""
    small, large = (steps(*MANY[name](count)) for count in (150, 600))
    assert large < 6 * small


def test_of_many_candidates_the_first_are_listed() -> None:
    """Hundreds of layers that nothing tells apart are ambiguous, each with 100 of the others."""
    words = ["".join(letters) for letters in product("bfgjz", repeat=4)]
    sides = [[Param(f"{prefix}.{word}{prefix}.weight", (4, 6)) for word in words] for prefix in ("a", "b")]
    found = match(*sides, stages="structure")
    assert len(found.ambiguous) == len(found.unexpected) == len(words)
    assert {len(row.candidates) for row in found.ambiguous} == {100}


def test_names_that_mean_too_many_things_are_left_undecided() -> None:
    """More meanings than any model's names have are not compared each with each; nothing is guessed."""
    words = [
        "query",
        "attention",
        "mlp",
        "gate",
        "se",
        "cls",
        "mask",
        "pos",
        "head",
        "stem",
        "pre",
        "norm",
        "conv",
        "dw",
        "skip",
    ]
    names = list(combinations(words, 2))
    sides = [[Param(f"{joint.join(name)}.weight", (4, 4)) for name in names] for joint in (".", "_")]
    found = match(*sides, stages="structure")
    assert not found.matched
    assert len(found.ambiguous) == len(names)


def test_blocks_of_very_many_kinds(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where the search for blocks ends early, what is left is compared unit by unit, by the same rules."""
    monkeypatch.setattr("ckpt_tools.matching.structure._MOST_UNITS", 200)
    monkeypatch.setattr("ckpt_tools.matching.structure._MOST_ROUNDS", 1)
    rounds: list[int] = []
    search = structure._next_blocks

    def next_blocks(*given: Any) -> Any:
        rounds.append(1)
        return search(*given)

    monkeypatch.setattr(structure, "_next_blocks", next_blocks)
    sides = [
        [Param(f"{block}{index}.{part}.weight", (index + 3, size)) for index in range(40) for size, part in enumerate(parts, 1)]
        for block, parts in (("b", "wx"), ("c", "qr"))
    ]
    found = match(*sides, stages="structure")
    assert len(found.matched) == 80
    assert all(row.source_shape == row.target_shape for row in found.matched)
    assert len(rounds) < 10
