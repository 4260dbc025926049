"""Matching by name: rules, exact names, wrappers, prefixes, position. Every name gets one fate."""

from unittest import mock

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ckpt_tools.errors import (
    CollisionError,
    MatchError,
    NothingMatchedError,
    UsageError,
)
from ckpt_tools.matching import Matching, Stages, by_name, match
from ckpt_tools.matching.params import Param


def params(*names: str, **shapes: tuple[int, ...]) -> list[Param]:
    """Tensors of shape (2,), or of the shape given for the last part of their name."""
    return [Param(name, shapes.get(name.rpartition(".")[2], (2,))) for name in names]


def pairs(matching: Matching) -> dict[str, tuple[str, str]]:
    """New name -> old name and reason."""
    return {row.new: (row.old, row.reason) for row in matching.matched}


def test_exact_names_come_first() -> None:
    """A name that both have is its own partner; what is left is missing or unexpected."""
    found = match(params("a.weight", "b.weight"), params("b.weight", "c.weight"))
    assert pairs(found) == {"b.weight": ("b.weight", "exact")}
    assert (found.missing, found.unexpected, found.complete) == (("c.weight",), ("a.weight",), False)


def test_other_shapes_are_mismatched() -> None:
    """Same name, other shape: both shapes are told, and the name is in no other list."""
    found = match(params("fc.weight", weight=(10, 4)), params("fc.weight", weight=(200, 4)))
    (row,) = found.mismatched
    assert (row.source_shape, row.target_shape) == ((10, 4), (200, 4))
    assert [found.missing, found.unexpected, found.matched, found.complete] == [(), (), (), False]


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ("module.fc.weight", "fc.weight"),
        ("fc.weight", "module.fc.weight"),
        ("_orig_mod.module.fc.weight", "module._orig_mod.fc.weight"),
        ("module.fc.weight", "_orig_mod.fc.weight"),
        ("layer._fsdp_wrapped_module.fc.weight", "layer.fc.weight"),
        ("encoder.module.fc.weight", "encoder.fc.weight"),
        ("encoder.fc.weight", "module.encoder.module.fc.weight"),
    ],
)
def test_wrappers_in_either_direction(old: str, new: str) -> None:
    """Wrappers in any order, on either side, also a `module.` in the middle, where the other side has none."""
    assert pairs(match(params(old), params(new))) == {new: (old, "wrapper")}


@pytest.mark.parametrize("wrapper", ["module.", "module.module.", "module._orig_mod.", "_orig_mod.module."])
def test_a_module_of_the_authors_own_is_not_the_wrapper(wrapper: str) -> None:
    """Where a wrapped `weight` has the name of the model's own `module.weight`, the wrapper that is around all of it counts."""
    names = ("weight", "bias", "module.weight", "module.bias")
    wrapped = tuple(f"{wrapper}{name}" for name in names)
    assert {row.new: row.old for row in match(params(*wrapped), params(*names)).matched} == dict(
        zip(names, wrapped, strict=True)
    )
    assert {row.new: row.old for row in match(params(*names), params(*wrapped)).matched} == dict(
        zip(wrapped, names, strict=True)
    )
    averaged = match(params("n_averaged", *wrapped), params(*names))
    assert {row.new: row.old for row in averaged.matched} == dict(zip(names, wrapped, strict=True))


def test_a_name_of_nothing_but_wrappers() -> None:
    """A stranger's name costs no more than a few looks; eight wrappers are told from a model's own module."""
    long = params("module." * 100_000 + "w")
    with mock.patch.object(by_name, "_meet", wraps=by_name._meet) as looks:
        assert match(long, long).complete
    assert looks.call_count < 20
    wrapped = "module." * 8
    found = match(params(f"{wrapped}w", f"{wrapped}module.w"), params("w", "module.w"))
    assert {row.new: row.old for row in found.matched} == {"w": f"{wrapped}w", "module.w": f"{wrapped}module.w"}


def test_a_module_of_the_authors_own_stays() -> None:
    """`norm.module.weight` goes to its own name, not to `norm.weight`, when the target has both."""
    names = ("norm.module.weight", "norm.weight")
    found = match(params(*(f"module.{name}" for name in names)), params(*names))
    assert {row.new: row.old for row in found.matched} == {name: f"module.{name}" for name in names}


def test_names_that_meet_without_wrappers_are_ambiguous() -> None:
    """Two tensors whose names become one without wrappers: none is chosen."""
    found = match(params("module.fc.weight", "_orig_mod.fc.weight"), params("fc.weight"))
    (row,) = found.ambiguous
    assert (row.new, set(row.candidates)) == ("fc.weight", {"module.fc.weight", "_orig_mod.fc.weight"})
    assert not found.matched
    assert not found.missing


def test_rules_win_over_exact_names() -> None:
    """A name that the user's rule changes is no longer its own partner."""
    found = match(params("a.weight"), params("a.weight", "b.weight"), rename=["^a=b"])
    assert pairs(found) == {"b.weight": ("a.weight", "rule")}
    assert found.missing == ("a.weight",)


def test_bad_rules_are_refused() -> None:
    """A rule that changes nothing, joins two names, or is no rule."""
    source = params("a.weight", "b.weight")
    for rule, error in (("^c=d", NothingMatchedError), ("^[ab]=c", CollisionError), ("nothing", UsageError)):
        with pytest.raises(error):
            match(source, source, rename=[rule])
    with pytest.raises(UsageError):
        match(source, source, stages="best")  # type: ignore[arg-type]


def test_a_prefix_is_taken_or_added_only_when_asked() -> None:
    """`backbone.` before every name, on either side; not part of the default stages."""
    plain, prefixed = params("a.weight", "b.weight"), params("backbone.a.weight", "backbone.b.weight", "head.bias")
    assert not match(plain, prefixed).matched
    found = match(plain, prefixed, stages="names")
    assert pairs(found) == {f"backbone.{x}.weight": (f"{x}.weight", "prefix") for x in "ab"}
    assert match(prefixed, plain, stages="names").unexpected == ("head.bias",)
    assert len(match(params("w_orig", "v_orig"), params("w", "v"), stages="names").matched) == 2


LAYERS = [f"layer{n}.{kind}.{leaf}" for n in range(3) for kind in ("conv", "norm") for leaf in ("weight", "bias")]


@pytest.mark.parametrize("stages", ["names", "structure"])
@pytest.mark.parametrize(("before", "after"), [("model.", "net."), ("a.b.", "c.d.e."), ("model.net.", "net."), ("", "x.y.")])
def test_the_same_names_under_another_prefix_are_never_ambiguous(before: str, after: str, stages: Stages) -> None:
    """Layers of one shape, a head that the target lacks in front: names prove it, whatever stands before them."""
    old = params(*(f"{before}{name}" for name in ["aux.conv.weight", "aux.conv.bias", *LAYERS]))
    new = params(*(f"{after}{name}" for name in LAYERS))
    found = match(old, new, stages=stages)
    assert pairs(found) == {f"{after}{name}": (f"{before}{name}", "prefix") for name in LAYERS}
    assert found.unexpected == (f"{before}aux.conv.weight", f"{before}aux.conv.bias")


@pytest.mark.parametrize(
    ("before", "after"),
    [("text.", "vision."), ("m.encoder.", "m.decoder."), ("blocks.0.", "blocks.1."), ("m.aux.", "m.head.")],
)
def test_prefixes_that_say_two_things_are_not_exchanged(before: str, after: str) -> None:
    """One encoder's names are not another's, one block's not the next one's, an auxiliary head's not the head's."""
    old, new = (params(*(f"{prefix}{name}" for name in LAYERS)) for prefix in (before, after))
    assert not match(old, new, stages="names").matched


def test_two_prefixes_that_fit_equally_are_ambiguous() -> None:
    """A target with two encoders: which one the checkpoint's names mean cannot be told."""
    found = match(params("a.weight"), params("query.a.weight", "key.a.weight"), stages="names")
    assert not found.matched
    assert {row.new for row in found.ambiguous} == {"query.a.weight", "key.a.weight"}


def test_reshape_only_when_allowed() -> None:
    """`[out, in, 1, 1]` against `[out, in]` is a mismatch, and with allow_reshape a match that says so."""
    source, target = params("fc.weight", weight=(4, 3, 1, 1)), params("fc.weight", weight=(4, 3))
    assert match(source, target).mismatched
    (row,) = match(source, target, allow_reshape=True).matched
    assert row.step == "reshape"


def test_position_zips_or_names_the_first_disagreement() -> None:
    """All shapes agree in order, or nothing is matched and the first pair that disagrees is named."""
    source = params("a.weight", "a.bias", weight=(3, 2), bias=(3,))
    found = match(source, params("x.weight", "x.bias", weight=(3, 2), bias=(3,)), stages="position")
    assert pairs(found) == {"x.weight": ("a.weight", "position"), "x.bias": ("a.bias", "position")}
    with pytest.raises(MatchError, match="tensor 2 of 2"):
        match(source, params("x.weight", "x.bias", weight=(3, 2), bias=(4,)), stages="position")
    with pytest.raises(MatchError, match="tensor 2 of 2"):
        match(source, params("x.weight", weight=(3, 2)), stages="position")


BODY = {"a.weight": (4, 3), "a.bias": (4,), "head.weight": (10, 4), "head.bias": (10,)}
OTHER = {"x.weight": (4, 3), "x.bias": (4,), "fc.weight": (3, 4), "fc.bias": (3,)}


def test_position_with_another_head() -> None:
    """The last module may have another number of outputs: its tensors are mismatched, and the rest is matched."""
    found = match([Param(*row) for row in BODY.items()], [Param(*row) for row in OTHER.items()], stages="position")
    assert pairs(found) == {"x.weight": ("a.weight", "position"), "x.bias": ("a.bias", "position")}
    assert [(row.old, row.new) for row in found.mismatched] == [("head.weight", "fc.weight"), ("head.bias", "fc.bias")]
    assert (found.missing, found.unexpected, found.ambiguous) == ((), (), ())


@pytest.mark.parametrize(
    "shapes",
    [
        {"fc.weight": (3, 5)},
        {"fc.bias": (10,)},
        {"fc.weight": (10, 4)},
        {"x.weight": (5, 3)},
        {"x.weight": (5, 3), "x.bias": (5,)},
    ],
    ids=["other inputs", "the weight alone", "the bias alone", "the body", "all of an earlier module"],
)
def test_position_is_no_guess(shapes: dict[str, tuple[int, ...]]) -> None:
    """Anything else that disagrees is refused as before."""
    with pytest.raises(MatchError, match="By position, tensor"):
        match([Param(*row) for row in BODY.items()], [Param(*row) for row in (OTHER | shapes).items()], stages="position")


PARTS = st.lists(st.sampled_from(["module", "a", "b", "_orig_mod", "fc"]), min_size=1, max_size=4)
NAMES = st.lists(PARTS.map(".".join), unique=True, max_size=8)


@given(NAMES, NAMES, st.sampled_from(["exact+wrappers", "names"]))
def test_every_name_has_one_fate(old: list[str], new: list[str], stages: str) -> None:
    """Each target name is in one list, each source name is used at most once, and what is unused is unexpected."""
    found = match(params(*old), params(*new), stages=stages)  # type: ignore[arg-type]
    fates = [*(row.new for row in found.matched), *found.missing, *(row.new for row in found.mismatched)]
    fates += [row.new for row in found.ambiguous]
    assert sorted(fates) == sorted(new)
    used = [*(row.old for row in found.matched), *(row.old for row in found.mismatched)]
    assert sorted([*used, *found.unexpected]) == sorted(old)
