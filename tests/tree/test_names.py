"""Names under wrappers: what real wrappers do is undone exactly, `_metadata` included, and nothing else is touched."""

import itertools
from collections import OrderedDict
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import nn

from fixtures.make import UsersModule, Wrapped, network
from tests.support.samples import converted


def parallel(model: nn.Module) -> nn.Module:
    """Under nn.DataParallel."""
    return nn.DataParallel(model)


def compiled(model: nn.Module) -> nn.Module:
    """Under torch.compile; nothing is compiled before the first call."""
    return torch.compile(model, backend="eager")  # type: ignore[return-value]


def sharded(model: nn.Module) -> nn.Module:
    """Named as FSDP1 names it."""
    return Wrapped("_fsdp_wrapped_module", model)


def checkpointed(model: nn.Module) -> nn.Module:
    """Named as activation checkpointing names it."""
    return Wrapped("_checkpoint_wrapped_module", model)


WRAPPERS = (parallel, compiled, sharded, checkpointed)
ORDERS = [
    order
    for count in (1, 2, 3)
    for order in [*itertools.product(WRAPPERS, repeat=count)][:: 1 if count < 3 else 7]
    if (compiled, compiled) not in itertools.pairwise(order)  # torch.compile refuses its own result
]


def assert_is(found: Any, expected: Any, *, ordered: bool = True) -> None:
    """The same names in the same order, and the same rows of `_metadata`."""
    assert list(found) == list(expected)
    rows = [list(one._metadata.items()) for one in (found, expected)]
    assert (rows[0] == rows[1]) if ordered else (sorted(rows[0]) == sorted(rows[1]))


def test_unwrap_undoes_wrappers_in_any_order(tmp_path: Path) -> None:
    """Names, their order and `_metadata` become those of the plain model's own state dict."""
    for order in ORDERS:
        model: nn.Module = network()
        for wrap in order:
            model = wrap(model)
        assert_is(converted(model.state_dict(), tmp_path, unwrap=True), network().state_dict())


@pytest.mark.parametrize("wrap", WRAPPERS)
def test_unwrap_undoes_wrappers_inside_the_model(wrap: Callable[[nn.Module], nn.Module], tmp_path: Path) -> None:
    """Wrapped sub-modules too, where the wrapper's name is one that no user gives; `module` inside is the user's own."""
    model: Any = network()
    model.features = wrap(model.features)
    expected = model.state_dict() if wrap is parallel else network().state_dict()
    assert_is(converted(nn.DataParallel(model).state_dict(), tmp_path, unwrap=True), expected, ordered=False)


@pytest.mark.parametrize("option", ["strip_module", "unwrap"])
def test_a_module_of_the_user_is_left_alone(option: str, tmp_path: Path) -> None:
    """`norm.module.weight` keeps its `module`; only what leads is removed."""
    wrapped = nn.DataParallel(Wrapped("encoder", UsersModule())).state_dict()
    found = converted(wrapped, tmp_path, **{option: True})
    assert list(found) == list(Wrapped("encoder", UsersModule()).state_dict())


def test_metadata_there_and_back(tmp_path: Path) -> None:
    """Adding `module.` gives what nn.DataParallel has, stripping it what was; a renamed module takes its row along."""
    plain = network().state_dict()
    there = converted(plain, tmp_path, add_module=True)
    assert_is(there, nn.DataParallel(network()).state_dict())
    assert_is(converted(there, tmp_path, strip_module=True), plain)
    renamed: Any = converted(plain, tmp_path, rename=[r"^fc1\.=head.", r"^fc2\.weight=fc2.kernel"])
    assert list(renamed._metadata) == [path.replace("fc1", "head") for path in plain._metadata]  # type: ignore[attr-defined]


def test_the_deeper_of_two_rows_keeps_the_place(tmp_path: Path) -> None:
    """Where a wrapper goes and something stays beside it, the row of the root is the wrapped model's."""
    state: Any = OrderedDict([("n_averaged", torch.ones(1)), ("module.fc.weight", torch.ones(1))])
    state._metadata = OrderedDict([("", {"version": 1}), ("module", {"version": 2}), ("module.fc", {"version": 3})])
    found = converted(state, tmp_path, unwrap=True)
    assert dict(found._metadata) == {"": {"version": 2}, "fc": {"version": 3}}


@settings(max_examples=20, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(parts=st.lists(st.sampled_from(["module", "_orig_mod", "conv", "0", "_fsdp_wrapped_module", "weight"]), min_size=1))
def test_renamings_keep_the_last_part(parts: list[str], tmp_path: Path) -> None:
    """Unwrapping is done after one time, keeps the tensor's own name, and only takes parts away."""
    (short,) = converted({".".join(parts): torch.ones(1)}, tmp_path, unwrap=True)
    assert list(converted({short: torch.ones(1)}, tmp_path, unwrap=True)) == [short]
    assert short.split(".")[-1] == parts[-1]
    left: Iterable[str] = iter(parts)
    assert all(part in left for part in short.split("."))
