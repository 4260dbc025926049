"""Names under wrappers: what real wrappers do is undone exactly, `_metadata` included, and nothing else is touched."""

from __future__ import annotations

import doctest
import itertools
from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from ckpt_tools.errors import CollisionError
from ckpt_tools.tree import names
from fixtures.make import UsersModule, Wrapped, network


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
    for order in itertools.product(WRAPPERS, repeat=count)
    if (compiled, compiled) not in itertools.pairwise(order)  # torch.compile refuses its own result
]


def rows_of(state_dict: Any) -> list[tuple[str, Any]]:
    """The rows of `_metadata`."""
    return list(state_dict._metadata.items())


def moved(state_dict: Any, rename: Callable[[str], str]) -> list[tuple[str, Any]]:
    """`_metadata` after a renaming."""
    renamed = {name: rename(name) for name in state_dict}
    return names.move_metadata(renamed, rows_of(state_dict), lambda: {"version": 1})


@pytest.mark.parametrize("order", ORDERS, ids=lambda order: "-".join(wrap.__name__ for wrap in order))
def test_unwrap_undoes_wrappers_in_any_order(order: tuple[Callable[[nn.Module], nn.Module], ...]) -> None:
    """Names, their order and `_metadata` become those of the plain model's own state dict."""
    plain = network().state_dict()
    model: nn.Module = network()
    for wrap in order:
        model = wrap(model)
    wrapped = model.state_dict()
    assert [names.unwrap(name) for name in wrapped] == list(plain)
    assert moved(wrapped, names.unwrap) == rows_of(plain)


@pytest.mark.parametrize("wrap", WRAPPERS)
def test_unwrap_undoes_wrappers_inside_the_model(wrap: Callable[[nn.Module], nn.Module]) -> None:
    """Wrapped sub-modules too, where the wrapper's name is one that no user gives; `module` inside is the user's own."""
    model: Any = network()
    model.features = wrap(model.features)
    wrapped = nn.DataParallel(model).state_dict()
    expected = model.state_dict() if wrap is parallel else network().state_dict()
    assert [names.unwrap(name) for name in wrapped] == list(expected)
    assert sorted(moved(wrapped, names.unwrap)) == sorted(rows_of(expected))


def test_a_module_of_the_user_is_left_alone() -> None:
    """`norm.module.weight` keeps its `module`; only what leads is removed."""
    wrapped = nn.DataParallel(Wrapped("encoder", UsersModule())).state_dict()
    plain = Wrapped("encoder", UsersModule()).state_dict()
    assert [names.strip_module(name) for name in wrapped] == list(plain)
    assert [names.unwrap(name) for name in wrapped] == list(plain)


def test_metadata_of_an_added_prefix_is_data_parallels() -> None:
    """Adding `module.` gives the `_metadata` of the model under nn.DataParallel, the wrapper's own row first."""
    plain, wrapped = network().state_dict(), nn.DataParallel(network()).state_dict()
    assert moved(plain, lambda name: f"module.{name}") == rows_of(wrapped)


def test_metadata_survives_there_and_back() -> None:
    """Adding and stripping a prefix is no change, modules without tensors included."""
    plain = network().state_dict()
    there = moved(plain, lambda name: f"module.{name}")
    renamed = {f"module.{name}": name for name in plain}
    assert names.move_metadata(renamed, there, dict) == rows_of(plain)
    assert "features.2" in dict(there) or "module.features.2" in dict(there)


def test_metadata_follows_a_renamed_module() -> None:
    """A renamed sub-module takes its row along; a tensor that only changes its last part leaves the rows."""
    plain = network().state_dict()
    rows = dict(moved(plain, lambda name: name.replace("fc1.", "head.").replace("fc2.weight", "fc2.kernel")))
    assert list(rows) == [path.replace("fc1", "head") for path, _ in rows_of(plain)]


@pytest.mark.parametrize(
    ("name", "plain"),
    [
        ("module.conv1.weight", "conv1.weight"),
        ("module.module.conv1.weight", "conv1.weight"),
        ("model.norm1.module.weight", "model.norm1.module.weight"),
        ("module.model.norm1.module.weight", "model.norm1.module.weight"),
        ("modules.weight", "modules.weight"),
        ("module", "module"),
        ("module.", "module."),
        ("modulelist.0.weight", "modulelist.0.weight"),
        ("n_averaged", "n_averaged"),
        ("", ""),
    ],
)
def test_strip_module(name: str, plain: str) -> None:
    """Only whole leading `module.` go, repeated ones too, and a name is never left empty."""
    assert names.strip_module(name) == plain


@pytest.mark.parametrize(
    ("name", "plain"),
    [
        ("_orig_mod.module.w", "w"),
        ("module._orig_mod.w", "w"),
        ("module._orig_mod.module.w", "w"),
        ("layers.0._orig_mod.w", "layers.0.w"),
        ("_fsdp_wrapped_module.layers.0._fsdp_wrapped_module._checkpoint_wrapped_module.w", "layers.0.w"),
        ("_orig_module.w", "_orig_module.w"),
        ("my_orig_mod.w", "my_orig_mod.w"),
        ("encoder.module.w", "encoder.module.w"),
        ("layer._orig_mod", "layer._orig_mod"),
        ("n_averaged", "n_averaged"),
    ],
)
def test_unwrap(name: str, plain: str) -> None:
    """Known wrappers go in any order and depth; what merely looks like one stays, and so does a tensor's own name."""
    assert names.unwrap(name) == plain


@settings(max_examples=200)
@given(
    st.lists(st.sampled_from(["module", "_orig_mod", "conv", "0", "_fsdp_wrapped_module", "weight"]), min_size=1, max_size=6)
)
def test_renamings_keep_the_last_part(parts: list[str]) -> None:
    """Stripping is done after one time, keeps the tensor's own name, and only takes parts away."""
    name = ".".join(parts)
    for strip in (names.strip_module, names.strip_inner, names.unwrap):
        short = strip(name)
        assert strip(short) == short
        assert name.endswith(short.rpartition(".")[2])
        assert short


def test_collisions_name_both() -> None:
    """The error names the two that would meet, and the name."""
    with pytest.raises(CollisionError, match=r"'module\.w' and 'w' would both be named 'w'"):
        names.check_unique({"module.w": "w", "w": "w"})


def test_the_deeper_of_two_rows_keeps_the_place() -> None:
    """Where a wrapper goes and something stays beside it, the row of the root is the wrapped model's."""
    renamed = {"n_averaged": "n_averaged", "module.fc.weight": "fc.weight"}
    assert names.module_paths(renamed, ["", "module", "module.fc"]) == {"module.fc": "fc", "module": ""}


def test_uneven_prefixes() -> None:
    """A wrapper stands before all names: where some have two, the second may be the user's."""
    assert names.uneven(nn.DataParallel(UsersModule()).state_dict()) is not None
    assert names.uneven(nn.DataParallel(nn.DataParallel(network())).state_dict()) is None
    assert names.uneven(["n_averaged", "module.a", "module.b"]) is None
    assert names.uneven(["module.", "module.module.a"]) is None


def test_wrappers_found() -> None:
    """The wrappers that unwrap would remove are found in names, each once."""
    assert names.wrappers_in(["module.a._orig_mod.w", "module.module.b"]) == ("module.", "_orig_mod.")
    assert names.wrappers_in(["encoder.module.w", "w"]) == ()
    assert names.leading_wrappers("module._orig_mod.module.w") == ("module.", "_orig_mod.", "module.")


def test_examples_in_docstrings() -> None:
    """The examples in names.py are right."""
    assert doctest.testmod(names).failed == 0


def test_wrappers_of_lightning_and_opacus() -> None:
    """`_forward_module.` goes at any depth, Opacus' `_module.` only where it leads: AllenNLP's own modules are called so."""
    assert names.unwrap("_forward_module.module._module.model.weight") == "model.weight"
    assert names.unwrap("embedder._module.weight") == "embedder._module.weight"
    assert names.unwrap("_module.weight") == "weight"
    assert names.wrappers_in(["_module.a.weight", "_module.b.weight", "epoch"]) == ("_module.",)
    assert names.wrappers_in(["_module.a.weight", "b.weight"]) == ()
    assert names.wrappers_in(["_fsdp_wrapped_module.a.weight", "module.b.weight"]) == ("_fsdp_wrapped_module.",)
