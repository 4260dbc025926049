"""Names under wrappers are those of the plain model again, `_metadata` included; dtypes are those of torch and safetensors."""

import itertools
import re
import struct
from collections import OrderedDict
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import pytest
import safetensors.torch
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import nn
from torch._weights_only_unpickler import _get_allowed_globals

import ckpt_tools
from fixtures.make import Wrapped, network
from tests.hostile.zips import torch_zip
from tests.support.samples import converted


def named(name: str) -> Callable[[nn.Module], nn.Module]:
    """A wrapper whose module has this name, as those of torch do."""
    return lambda model: Wrapped(name, model)


parallel: Callable[[nn.Module], nn.Module] = nn.DataParallel
WRAPPERS = (parallel, *map(named, ("_orig_mod", "_fsdp_wrapped_module", "_checkpoint_wrapped_module")))
ORDERS = [
    order for count in (1, 2, 3) for order in [*itertools.product(WRAPPERS, repeat=count)][:: 1 if count < 3 else 7]
]  # fmt: skip


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


TORCH = {str(value).removeprefix("torch."): value for value in vars(torch).values() if isinstance(value, torch.dtype)}


def codes_of_safetensors() -> set[str]:
    """All type codes, from the error that safetensors gives for an unknown one."""
    header = b'{"a":{"dtype":"X","shape":[0],"data_offsets":[0,0]}}'
    with pytest.raises(safetensors.SafetensorError) as caught:
        safetensors.deserialize(struct.pack("<Q", len(header)) + header)
    return set(re.findall(r"`(\w+)`", str(caught.value))) - {"X"}


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("name", sorted(TORCH))
def test_every_dtype_of_torch(name: str, tmp_path: Path) -> None:
    """What torch can save in a dtype is listed with its name and size, and loads as it was."""
    try:
        torch.save({"a.w": torch.zeros(16, dtype=torch.uint8).view(TORCH[name])}, tmp_path / "in.pth")
    except (RuntimeError, KeyError, NotImplementedError):
        pytest.skip("torch cannot make or save it")
    (row,) = ckpt_tools.inspect(tmp_path / "in.pth").tensors
    assert (row["dtype"], row["bytes"]) == (name, 16)
    ckpt_tools.convert(tmp_path / "in.pth", tmp_path / "out.pth")
    assert torch.load(tmp_path / "out.pth")["a.w"].dtype is TORCH[name]


@pytest.mark.parametrize("code", sorted(codes_of_safetensors()))
def test_every_type_of_safetensors(code: str, tmp_path: Path) -> None:
    """Its name is torch's where its torch binding has it, its size is what safetensors itself takes."""
    for bits in (4, 6, 8, 16, 32, 64, 128):
        header = f'{{"a":{{"dtype":"{code}","shape":[8],"data_offsets":[0,{bits}]}}}}'.encode()
        data = struct.pack("<Q", len(header)) + header + bytes(bits)
        try:
            safetensors.deserialize(data)
        except safetensors.SafetensorError:
            continue
        (tmp_path / "in.safetensors").write_bytes(data)
        (row,) = ckpt_tools.inspect(tmp_path / "in.safetensors").tensors
        known = safetensors.torch._TYPES.get(code)
        assert row["bytes"] == bits
        assert known is None or row["dtype"] == str(known).removeprefix("torch.")
        return
    pytest.fail("safetensors takes no size of it")


def test_what_weights_only_allows(tmp_path: Path) -> None:
    """Every global that torch allows is one that loads, and its neighbours are not."""
    path = tmp_path / "in.pth"
    newer = {"torch.bcomplex32"}  # of torch 2.14
    for name in sorted(_get_allowed_globals().keys() - newer):
        for called, loads in ((name, True), (f"{name}_no", False)):
            module, _, last = called.rpartition(".")
            path.write_bytes(torch_zip(b"\x80\x02c%s\n%s\n." % (module.encode(), last.encode())))
            assert ckpt_tools.inspect(path).weights_only["loads"] is loads, called
