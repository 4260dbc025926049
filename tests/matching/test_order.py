"""The order of entries in a file is no evidence: sorted in any way, both sides have the same partners, doubts and questions."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from random import Random
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ckpt_tools.errors import CkptError
from ckpt_tools.fit.targets import read_target
from ckpt_tools.matching import Framework, Matching, Stages, match
from ckpt_tools.matching.left_over.advice import advise
from ckpt_tools.matching.params import Param
from tests.matching.test_match_graphs import PAIRS, graphs_of, network

ANY_ORDER: list[Stages] = ["exact+wrappers", "names", "structure", "values"]  # "position" is the order
SAMPLES = [tuple(draw.random() for _ in range(64)) for draw in map(Random, range(12))]
_TEXT = """
    q k v query key value qkv kv in_proj out_proj proj w1 w2 w3 wq q_proj gate up down gate_up norm bn ln norm1 norm2
    conv1 conv2 conv 0 1 2 10 layers blocks layer1 layer2 head fc classifier stem patch embed pos cls token a b c x y z
    alpha beta module _orig_mod downsample shortcut attn mlp self_attn encoder decoder backbone model net pwl pw dw aux
"""
WORDS = _TEXT.split()
PREFIXES = ["", "module.", "model.", "net.backbone.", "encoder.", "_orig_mod."]
SHAPES = [
    (4, 4), (12, 4), (8, 4), (4, 8), (4,), (4, 3, 1, 1), (4, 3), (4, 4, 1, 1), (4, 4, 4, 4), (4, 64), (4, 8, 4, 4), (4, 128),
    (), (1, 4), (2, 4, 4),
]  # fmt: skip
NORM = {"weight": (4,), "bias": (4,), "running_mean": (4,), "running_var": (4,), "num_batches_tracked": ()}
LONE = ["gamma", "in_proj_weight", "in_proj_bias", "weight_g", "kernel", "scale", "tensor", "weight_ih_l0", "embedding"]


def leaves(draw: Random) -> dict[str, tuple[int, ...]]:
    """The tensors of one layer."""
    shape = draw.choice(SHAPES)
    return draw.choice([{"weight": shape, "bias": shape[:1]}, {"weight": shape}, NORM, {draw.choice(LONE): shape}])


def words(draw: Random) -> list[Param]:
    """Layers under any words that libraries use, some in blocks, some tied, some with numbers to compare."""
    paths = [".".join(draw.choices(WORDS, k=draw.randrange(1, 4))) for _ in range(draw.randrange(1, 12))]
    if draw.random() < 0.5:
        paths = [f"layers.{number}.{path}" for path in paths[:4] for number in range(draw.randrange(1, 4))]
    prefix = draw.choice(PREFIXES)
    made = {}
    for path in paths:
        for leaf, shape in leaves(draw).items():
            sample = draw.choice(SAMPLES) if draw.random() < 0.4 else None
            name = f"{prefix}{path}.{leaf}"
            made[name] = Param(name, shape, tie=draw.choice([None, None, None, 1, 2]), sample=sample)
    return list(made.values())


def by_another(draw: Random, params: Sequence[Param]) -> list[Param]:
    """What another author would write: some words are others throughout, some tensors are gone."""
    others = {word: draw.choice(WORDS) for word in WORDS if draw.random() < 0.4}
    made = {}
    for param in params:
        name = ".".join(others.get(part, part) for part in param.name.split("."))
        if draw.random() > 0.05:
            made[name] = replace(param, name=name)
    return list(made.values())


def said(olds: Sequence[Param], news: Sequence[Param], stages: Stages, **options: Any) -> object:
    """All that is said of two sides, in no order; the order of candidates is said too."""
    reshape = options.pop("allow_reshape", False)

    def again(stages: Stages, allow_reshape: bool, pairs: Sequence[str] = ()) -> Matching:
        return match(olds, news, stages=stages, allow_reshape=allow_reshape, pairs=pairs, **options)

    try:
        found = again(stages, reshape)
        advice = advise(olds, news, found, again, stages, reshape)
    except CkptError as error:
        return str(error)
    further = None if advice.further is None else (*advice.further.options, advice.further.pairs)
    lists = (found.matched, found.missing, found.unexpected, found.mismatched, found.ambiguous, found.offers)
    globs = [(extra.glob, sorted(extra.names)) for extra in advice.extras]
    return [sorted(map(repr, each)) for each in (*lists, globs, advice.questions)], further


def mixed(draw: Random, params: Sequence[Param]) -> list[Param]:
    """The same in another order."""
    return draw.sample(list(params), len(params))


@pytest.mark.parametrize("stages", ANY_ORDER)
@settings(max_examples=60)
@given(st.integers(0, 2**32))
def test_no_word_no_tie_and_no_number_makes_order_count(stages: Stages, seed: int) -> None:
    """Any names, ties, shapes and samples, also of Flax and Keras: the same is said of every name, and asked."""
    draw = Random(seed)
    olds = words(draw)
    news = by_another(draw, olds) if draw.random() < 0.8 else words(draw)
    framework: Framework | None = draw.choice([None, None, None, "flax", "keras"])
    options = {"allow_reshape": draw.random() < 0.5, "framework": framework}
    expected = said(olds, news, stages, **options)
    assert said(mixed(draw, olds), mixed(draw, news), stages, **options) == expected
    assert said(sorted(olds, key=repr), sorted(news, key=repr), stages, **options) == expected


@pytest.mark.parametrize("stages", ANY_ORDER)
@settings(max_examples=8)
@given(st.integers(0, 2**32))
def test_no_computation_makes_order_count(stages: Stages, seed: int) -> None:
    """Random networks of equal layers, whose graphs are known: the same is said, however both sides are sorted."""
    draw = Random(seed)
    old, new = (network(seed, draw.sample(letters, 8), other=letters > "s") for letters in ("abcdefgh", "stuvwxyz"))
    olds, news = list(read_target(old).params), [replace(param, module=None) for param in read_target(new).params]
    graphs = graphs_of(old, new, ["3x6"])
    expected = said(olds, news, stages, graphs=graphs)
    assert said(mixed(draw, olds), mixed(draw, news), stages, graphs=graphs) == expected


@pytest.mark.parametrize("name", PAIRS)
def test_no_pair_of_models_is_matched_by_order(name: str) -> None:
    """Models that their computations tell apart: sorted by name and in a random order, by structure and by numbers."""
    make_old, make_new, inputs = PAIRS[name]
    old, new = make_old(), make_new()
    graphs = graphs_of(old, new, inputs)
    olds, news = list(read_target(old).params), list(read_target(new).params)
    for stages in ANY_ORDER:
        expected = said(olds, news, stages, graphs=graphs, allow_reshape=True)
        assert said(mixed(Random(1), olds), mixed(Random(2), news), stages, graphs=graphs, allow_reshape=True) == expected


def test_tied_tensors_are_paired_by_name() -> None:
    """Three names for one tensor on each side: each has its partner, the same in any order."""
    olds = [Param(name, (4,), tie=1) for name in ("a", "f", "g")]
    news = [Param(name, (4,), tie=2) for name in ("a", "x", "y")]
    for draw in map(Random, range(4)):
        found = match(mixed(draw, olds), mixed(draw, news))
        assert {row.new: row.old for row in found.matched} == {"a": "a", "x": "f", "y": "g"}
        assert found.complete


def test_a_flatten_is_not_ruled_out_by_the_order_of_a_file() -> None:
    """A dense layer of Flax: that another layer with as many outputs stands before it in the target's file says nothing."""
    kernel = Param("params.head.kernel", (64, 3))
    olds = [Param("params.conv.kernel", (3, 3, 3, 16)), kernel, Param("params.body.kernel", (8, 64))]
    news = [Param("conv.weight", (16, 3, 3, 3)), Param("body.weight", (64, 8)), Param("head.weight", (3, 64))]
    expected = said(olds, news, "names", framework="flax")
    for draw in map(Random, range(6)):
        assert said(olds, mixed(draw, news), "names", framework="flax") == expected
