"""Matching by name: rules, exact names, wrappers, prefixes, position. Every name gets one fate."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ckpt_tools.errors import CkptError, CollisionError, MatchError, NothingMatchedError, UsageError
from tests.support.matching import by_names, matched, pairs


def test_other_shapes_are_mismatched() -> None:
    """Same name, other shape: both shapes are told, and the name is in no other list."""
    found = matched({"fc.weight": (10, 4)}, {"fc.weight": (200, 4)}, None)
    (row,) = found.mismatched
    assert (row.source_shape, row.target_shape) == ((10, 4), (200, 4))
    assert [found.missing, found.unexpected, found.matched, found.complete] == [(), (), (), False]


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ("module.fc.weight", "fc.weight"), ("fc.weight", "module.fc.weight"),
        ("_orig_mod.module.fc.weight", "module._orig_mod.fc.weight"), ("module.fc.weight", "_orig_mod.fc.weight"),
        ("layer._fsdp_wrapped_module.fc.weight", "layer.fc.weight"), ("encoder.module.fc.weight", "encoder.fc.weight"),
        ("encoder.fc.weight", "module.encoder.module.fc.weight"),
    ],
)  # fmt: skip
def test_wrappers_in_either_direction(old: str, new: str) -> None:
    """Wrappers in any order, on either side, also a `module.` in the middle, where the other side has none."""
    found = by_names([old], [new])
    assert (pairs(found), found.matched[0].reason) == ({new: old}, "wrapper")


@pytest.mark.parametrize("wrapper", ["module.", "module.module.", "module._orig_mod.", "_orig_mod.module.", "module." * 8])
def test_a_module_of_the_authors_own_is_not_the_wrapper(wrapper: str) -> None:
    """Where a wrapped `weight` has the name of the model's own `module.weight`, the wrapper that is around all of it counts."""
    names = ["weight", "bias", "module.weight", "module.bias", "norm.module.weight", "norm.weight"]
    wrapped = [f"{wrapper}{name}" for name in names]
    assert pairs(by_names(wrapped, names)) == dict(zip(names, wrapped, strict=True))
    assert pairs(by_names(names, wrapped)) == dict(zip(wrapped, names, strict=True))
    assert pairs(by_names(["n_averaged", *wrapped], names)) == dict(zip(names, wrapped, strict=True))


def test_names_that_meet_without_wrappers_are_ambiguous() -> None:
    """Two tensors whose names become one without wrappers: none is chosen."""
    found = by_names(["module.fc.weight", "_orig_mod.fc.weight"], ["fc.weight"])
    (row,) = found.ambiguous
    assert (row.new, set(row.candidates)) == ("fc.weight", {"module.fc.weight", "_orig_mod.fc.weight"})
    assert (found.matched, found.missing) == ((), ())


def test_rules_win_over_exact_names() -> None:
    """A name that the user's rule changes is no longer its own partner; rules that mean nothing are refused."""
    found = by_names(["a.weight"], ["a.weight", "b.weight"], rename=["^a=b"])
    assert [(row.old, row.new, row.reason) for row in found.matched] == [("a.weight", "b.weight", "rule")]
    assert found.missing == ("a.weight",)
    rules: list[tuple[str, type[CkptError]]] = [
        ("^c=d", NothingMatchedError), ("^[ab]=c", CollisionError), ("nothing", UsageError),
    ]  # fmt: skip
    for rule, error in rules:
        with pytest.raises(error):
            by_names(["a.weight", "b.weight"], ["a.weight"], rename=[rule])


def test_a_prefix_is_taken_or_added_only_when_asked() -> None:
    """`backbone.` before every name, on either side; with wrappers alone it is not looked for."""
    plain, prefixed = ["a.weight", "b.weight"], ["backbone.a.weight", "backbone.b.weight", "head.bias"]
    assert not by_names(plain, prefixed).matched
    found = by_names(plain, prefixed, "names")
    assert pairs(found) == {f"backbone.{x}.weight": f"{x}.weight" for x in "ab"}
    assert {row.reason for row in found.matched} == {"prefix"}
    assert by_names(prefixed, plain, "names").unexpected == ("head.bias",)
    assert len(by_names(["w_orig", "v_orig"], ["w", "v"], "names").matched) == 2


LAYERS = [f"layer{n}.{kind}.{leaf}" for n in range(3) for kind in ("conv", "norm") for leaf in ("weight", "bias")]


@pytest.mark.parametrize("stages", ["names", "structure"])
@pytest.mark.parametrize(("before", "after"), [("model.", "net."), ("a.b.", "c.d.e."), ("model.net.", "net."), ("", "x.y.")])
def test_the_same_names_under_another_prefix_are_never_ambiguous(before: str, after: str, stages: str) -> None:
    """Layers of one shape, a head that the target lacks in front: names prove it, whatever stands before them."""
    old = [f"{before}{name}" for name in ["aux.conv.weight", "aux.conv.bias", *LAYERS]]
    found = by_names(old, [f"{after}{name}" for name in LAYERS], stages)
    assert pairs(found) == {f"{after}{name}": f"{before}{name}" for name in LAYERS}
    assert found.unexpected == (f"{before}aux.conv.weight", f"{before}aux.conv.bias")


@pytest.mark.parametrize(
    ("before", "after"), [("text.", "vision."), ("m.encoder.", "m.decoder."), ("blocks.0.", "blocks.1."), ("m.aux.", "m.head.")]
)
def test_prefixes_that_say_two_things_are_not_exchanged(before: str, after: str) -> None:
    """One encoder's names are not another's, one block's not the next one's, an auxiliary head's not the head's."""
    assert not by_names([f"{before}{name}" for name in LAYERS], [f"{after}{name}" for name in LAYERS], "names").matched


def test_two_prefixes_that_fit_equally_are_ambiguous() -> None:
    """A target with two encoders: which one the checkpoint's names mean cannot be told."""
    found = by_names(["a.weight"], ["query.a.weight", "key.a.weight"], "names")
    assert not found.matched
    assert {row.new for row in found.ambiguous} == {"query.a.weight", "key.a.weight"}


BODY = {"a.weight": (4, 3), "a.bias": (4,), "head.weight": (10, 4), "head.bias": (10,)}
OTHER = {"x.weight": (4, 3), "x.bias": (4,), "fc.weight": (3, 4), "fc.bias": (3,)}


@pytest.mark.parametrize(
    "shapes",
    [{"fc.weight": (3, 5)}, {"fc.bias": (10,)}, {"fc.weight": (10, 4)}, {"x.weight": (5, 3)},
     {"x.weight": (5, 3), "x.bias": (5,)}, {"more.weight": (2,)}],
    ids=["other inputs", "the weight alone", "the bias alone", "the body", "all of an earlier module", "one tensor more"],
)  # fmt: skip
def test_position_is_no_guess(shapes: dict[str, tuple[int, ...]]) -> None:
    """Anything else that disagrees is refused; the first pair that does is named."""
    with pytest.raises(MatchError, match=r"By position, tensor \d of"):
        matched(BODY, OTHER | shapes, "position")


PARTS = st.lists(st.sampled_from(["module", "a", "b", "_orig_mod", "fc"]), min_size=1, max_size=4)
NAMES = st.lists(PARTS.map(".".join), unique=True, min_size=1, max_size=8)


@given(NAMES, NAMES, st.sampled_from(["exact+wrappers", "names"]))
def test_every_name_has_one_fate(old: list[str], new: list[str], stages: str) -> None:
    """Each target name is in one list, each source name is used at most once, and what is unused is unexpected."""
    found = by_names(old, new, stages)
    fates = [*pairs(found), *found.missing, *(row.new for row in (*found.mismatched, *found.ambiguous))]
    assert sorted(fates) == sorted(new)
    used = [row.old for row in (*found.matched, *found.mismatched)]
    assert sorted([*used, *found.unexpected]) == sorted(old)
