"""Structural matching: independent implementations of one network, run side by side; and random changes to one network.

What is matched must be right: both models give equal outputs. What cannot be known must be left over, never guessed.
"""

from collections.abc import Callable
from itertools import combinations, product
from random import Random
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from tests.support import networks as nets
from tests.support.matching import assert_same_function, fates, matched, pairs

# --- pairs of implementations


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
    assert_same_function(*((other(), one()) if reverse else (one(), other())), [sample])


def test_fused_layers_are_offers_in_a_stated_order() -> None:
    """`in_proj_weight` against q, k, v: a split, listed as missing and unexpected too, since only a plan does it."""
    found = matched(nets.EncoderA(), nets.EncoderB())
    offer = next(offer for offer in found.offers if offer.old[0].endswith("in_proj_weight"))
    assert (offer.step, offer.parts) == ("split", ("query", "key", "value"))
    assert [name.split(".")[-2] for name in offer.new] == ["to_q", "to_k", "to_v"]
    assert set(offer.new) <= set(found.missing)
    assert not found.complete


def test_reshapes_are_asked_for() -> None:
    """Without allow_reshape `[out, in, 1]` against `[out, in]`, and a flattened map, are mismatches; 3x3 kernels are no map."""
    found = matched(nets.MixerA(), nets.MixerB())
    assert {abs(len(row.source_shape) - len(row.target_shape)) for row in found.mismatched} == {1}
    found = matched(nets.MapA(), nets.MapB())
    assert [(row.source_shape, row.target_shape) for row in found.mismatched] == [((10, 96), (10, 6, 4, 4))]
    assert matched({"a.weight": (8, 72)}, {"a.weight": (8, 8, 3, 3)}, None, allow_reshape=True).mismatched


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
    """Other sizes, or equal shapes that neither names nor order tell apart: some tensors are unmatched."""
    one, other = REFUSED[name]
    for old, new in ((one(), other()), (other(), one())):
        found = matched(old, new, allow_reshape=True)
        assert not found.complete_with_offers
        assert found.ambiguous or any(found.left_over)


def test_numbers_count_in_any_order() -> None:
    """Twelve layers of one shape, `10` sorted before `2`; and two that are registered against their numbers."""
    old = {f"layers.{n}.lin.weight": (4, 4) for n in sorted(map(str, range(12)))}
    found = matched(old, {f"blocks.{n}.fc.weight": (4, 4) for n in range(12)})
    assert pairs(found) == {f"blocks.{n}.fc.weight": f"layers.{n}.lin.weight" for n in range(12)}
    found = matched(nets.named("l1", "l2"), nets.named("m2", "m1"))
    assert {(row.old, row.new) for row in found.matched} >= {("l1.weight", "m1.weight"), ("l2.weight", "m2.weight")}


def test_equal_names_of_other_layers_are_doubted() -> None:
    """Convolutions of one shape in a row, with norms between them on one side: `6` is another layer there, by its place."""

    def network(step: int) -> dict[str, tuple[int, ...]]:
        found: dict[str, tuple[int, ...]] = {"0.weight": (64, 3, 3, 3), f"{2 + 6 * step}.weight": (3, 64, 3, 3)}
        for at in range(2, 2 + 6 * step, step):
            found[f"{at}.weight"] = (64, 64, 3, 3)
            found |= {f"{at + 1}.{leaf}": (64,) for leaf in ("weight", "bias", "running_mean", "running_var") if step == 3}
        return {f"net.{name}": shape for name, shape in found.items()}

    for old, new in ((2, 3), (3, 2)):
        assert all((int(a.split(".")[1]) - 2) * new == (int(b.split(".")[1]) - 2) * old
                   for b, a in pairs(matched(network(old), network(new))).items() if a != "net.0.weight")  # fmt: skip


def test_levels_that_count_backwards_are_not_paired_by_their_numbers() -> None:
    """The decoder of Stable Diffusion: `up.3` of its authors is `up_blocks.0` of diffusers, and levels 2 and 3 are alike."""

    def decoder(levels: dict[str, int], block: str, time: str) -> dict[str, tuple[int, ...]]:
        return {
            name: shape
            for level, depth in levels.items()
            for name, shape in (
                (f"{level}.{block}.weight", ((32, 32, 16, 8)[depth],) * 2 + (3, 3)), (f"{level}.{time}.weight", (64,)),
            )
        }  # fmt: skip

    old = decoder({f"up.{level}": 3 - level for level in range(4)}, "block.0", "t")
    new = decoder({f"up_blocks.{level}": level for level in range(4)}, "resnets.0", "time")
    found = pairs(matched(old, new))
    assert found == {
        "up_blocks.2.resnets.0.weight": "up.1.block.0.weight",
        "up_blocks.3.resnets.0.weight": "up.0.block.0.weight",
    }


def test_heads_of_other_sizes_are_mismatched_not_lost() -> None:
    """Another number of classes, under the same names or others throughout: the heads are partners of different shapes."""
    found = matched(nn.Sequential(nn.Linear(4, 10)), nn.Sequential(nn.Linear(4, 20)))
    assert [(row.source_shape, row.target_shape) for row in found.mismatched] == [((10, 4), (20, 4)), ((10,), (20,))]
    new = nets.ResNetB()
    new.classifier[1] = nn.Linear(20, 9)
    found = matched(nets.ResNetA(), new, allow_reshape=True)
    heads = [("fc.weight", "classifier.1.weight"), ("fc.bias", "classifier.1.bias")]
    assert ([(row.old, row.new) for row in found.mismatched], found.left_over) == (heads, ((), ()))


def test_missing_and_extra_modules_leave_the_rest_matched() -> None:
    """An extra head on one side and a norm more on the other: everything else has its partner."""
    old, new = nets.ResNetA(), nets.ResNetB()
    old.aux = nn.Linear(5, 7)
    new.last = nn.LayerNorm(11)
    found = matched(old, new, allow_reshape=True)
    assert found.left_over == (("last.weight", "last.bias"), ("aux.weight", "aux.bias"))
    assert len(found.matched) == len(nets.ResNetA().state_dict())


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


def tensors(leaves: list[tuple[str, tuple[int, ...], int]]) -> dict[str, tuple[int, ...]]:
    return {f"{name}.{leaf}".strip("."): shape for name, _, kind in leaves for leaf, shape in KINDS[kind].items()}


def wrong(found: Any, places: dict[str, object]) -> list[str]:
    """Matches whose names stand for different modules. The stage of exact names is not in question here."""
    return [
        f"{row.old} -> {row.new}"
        for row in found.matched
        if row.reason == "structure" and places[f"old {row.old}"] != places[f"new {row.new}"]
    ]


@settings(max_examples=40, deadline=None)
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
    if not all(sides):
        return
    places: dict[str, object] = {}
    for label, leaves in zip(("old", "new"), sides, strict=True):
        for leaf in leaves:
            places |= {f"{label} {name}": (leaf[1], name.rpartition(".")[2]) for name in tensors([leaf])}
    found = matched(tensors(sides[0]), tensors(sides[1]), allow_reshape=True)
    assert not wrong(found, places), (sides, found.matched)


@settings(max_examples=25, deadline=None)
@given(st.data(), TREES, st.sampled_from(["exact+wrappers", "names", "structure", "values"]))
def test_no_matching_depends_on_the_order(data: st.DataObject, tree: Tree, stages: str) -> None:
    """Whatever two authors wrote, tied or not, and however both files are sorted: every name has the same fate."""
    manners = (WORDS[:5], ["", "block"]), (WORDS[3:8], ["layer", "conv"])
    ones, others = (tensors(data.draw(st.composite(implementation)(tree, *manner))) for manner in manners)
    ends = list(others.items())[: data.draw(st.integers(0, len(others)))]
    tied = data.draw(st.sampled_from([(), (4,), (4, 4)]))
    shared = torch.arange(16.0)[: torch.Size(tied).numel()].view(tied)
    sides = [
        {name: shared if tied and shape == tied else torch.rand(shape) for name, shape in side.items()}
        for side in (ones, dict(ends) | {"extra.weight": (4, 4)})
    ]
    old, new = (dict(data.draw(st.permutations(list(side.items())))) for side in sides)
    assert fates(matched(old, new, stages)) == fates(matched(sides[0], sides[1], stages))


def test_tied_tensors_are_paired_by_name() -> None:
    """Three names for one tensor on each side: each has its partner, the same in any order."""
    for seed in range(4):
        olds, news = (dict.fromkeys(Random(seed).sample(names, 3), torch.ones(4)) for names in ("afg", "axy"))
        found = matched(olds, news, None)
        assert pairs(found) == {"a": "a", "x": "f", "y": "g"}
        assert found.complete


@settings(max_examples=40, deadline=None)
@given(st.data())
def test_equal_shapes_that_change_places_are_never_swapped(data: st.DataObject) -> None:
    """Blocks of layers of one shape, with and without telling names, registered in any order inside the block."""
    styles = [["q", "k", "v", "out"], ["query", "key", "value", "dense"], ["conv1", "conv2", "conv3", "shortcut"], WORDS[:4]]
    one, other = data.draw(st.sampled_from(styles)), data.draw(st.sampled_from([*styles, WORDS[4:8]]))
    order = [data.draw(st.permutations(range(4))) for _ in range(2)]
    old = {f"layers.{block}.{one[n]}.weight": (4, 4) for block in range(2) for n in order[0]}
    new = {f"blocks.{block}.{other[n]}.weight": (4, 4) for block in range(2) for n in order[1]}
    places: dict[str, object] = {f"old layers.{b}.{one[n]}.weight": (b, n) for b in range(2) for n in range(4)}
    places |= {f"new blocks.{b}.{other[n]}.weight": (b, n) for b in range(2) for n in range(4)}
    found = matched(old, new)
    if not {("q", "conv1"), ("query", "conv1")} & {(one[0], other[0]), (other[0], one[0])}:  # no truth between those
        assert not wrong(found, places), found.matched


@settings(max_examples=50, deadline=None)
@given(st.data(), st.sampled_from(["exact+wrappers", "names", "structure"]))
def test_every_tensor_has_one_fate(data: st.DataObject, stages: str) -> None:
    """Any names and shapes: each target name in one list, each source name matched once at most."""
    names = st.lists(st.lists(st.sampled_from(["a", "0", "qkv", "q", "weight", "bias", "module"]), min_size=1, max_size=4)
                     .map(".".join), unique=True, min_size=1, max_size=12)  # fmt: skip
    shapes = st.sampled_from([(2, 2), (6, 2), (2,), (6,), (2, 2, 1), ()])
    tied = torch.ones(2, 2)
    sides = [
        {name: tied if data.draw(st.integers(0, 3)) == 0 else torch.zeros(data.draw(shapes)) for name in data.draw(names)}
        for _ in range(2)
    ]
    found = matched(sides[0], sides[1], stages, allow_reshape=data.draw(st.booleans()))
    listed = [*pairs(found), *found.missing, *(row.new for row in (*found.mismatched, *found.ambiguous))]
    assert sorted(listed) == sorted(sides[1])
    used = [row.old for row in (*found.matched, *found.mismatched) if row.reason != "tied"]
    assert len(set(used)) == len(used)
    assert {*used, *(row.old for row in found.matched if row.reason == "tied"), *found.unexpected} == set(sides[0])


def test_of_many_candidates_the_first_are_listed() -> None:
    """Hundreds of layers that nothing tells apart are ambiguous, each with 100 of the others."""
    words = ["".join(letters) for letters in product("bfgjz", repeat=3)]
    found = matched(*({f"{prefix}.{word}{prefix}.weight": (4, 6) for word in words} for prefix in "ab"))
    assert len(found.ambiguous) == len(found.unexpected) == len(words)
    assert {len(row.candidates) for row in found.ambiguous} == {100}


def test_names_that_mean_too_many_things_are_left_undecided() -> None:
    """More meanings than any model's names have are not compared each with each; nothing is guessed."""
    words = ["query", "attn", "mlp", "gate", "grid", "cls", "mask", "pos", "head", "stem", "word", "norm", "conv", "dw", "skip"]
    names = list(combinations(words, 2))
    found = matched(*({f"{joint.join(name)}.weight": (4, 4) for name in names} for joint in "._"))
    assert not found.matched
    assert len(found.ambiguous) == len(names)
