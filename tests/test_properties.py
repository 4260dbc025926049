"""Random object graphs and random tensors: what we write, torch loads as it loads the original."""

import collections
import json
import math
from argparse import Namespace
from pathlib import Path, PurePosixPath
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from safetensors import safe_open

import ckpt_tools
from ckpt_tools.errors import NothingMatchedError
from tests.formats.test_oracle import assert_lists, loads_weights_only
from tests.support import classes
from tests.support.graphs import assert_same, element_bytes, load_with_tags

pytestmark = pytest.mark.filterwarnings("ignore:Detected pickle protocol:UserWarning")
quick = settings(max_examples=60, suppress_health_check=[HealthCheck.function_scoped_fixture])

# --- object graphs

hashable = st.one_of(
    st.none(), st.booleans(), st.integers(-(2**70), 2**70), st.text(st.characters(), max_size=8), st.binary(max_size=6),
    st.floats(allow_nan=False), st.just(float("inf")), st.sampled_from([classes.Colour.RED, classes.Mode.FAST]),
)  # fmt: skip
leaves = st.one_of(
    hashable,
    st.floats(),
    st.complex_numbers(),
    st.integers(-(2**3000), 2**3000),
    st.binary(max_size=300).map(bytearray),
    st.frozensets(hashable, max_size=4),
    st.sets(hashable, max_size=4),
    st.sampled_from(
        [
            torch.float16, torch.device("cuda", 1), torch.Size([2, 3]), classes.Plain, classes.Outer.Inner, classes.function,
            classes.Label("a"), classes.Count(3), classes.Bits.ONE | classes.Bits.TWO, PurePosixPath("/a/b"), range(3),
        ]
    ),
    st.builds(lambda: torch.arange(4.0)),
    st.builds(lambda: torch.nn.Parameter(torch.ones(2, 2))),
)  # fmt: skip
EMPTY: dict[str, Any] = {
    "list": list, "dict": dict, "ordered": collections.OrderedDict, "default": lambda: collections.defaultdict(list),
    "deque": collections.deque, "counter": collections.Counter, "namespace": Namespace, "plain": classes.Plain,
    "inner": classes.Outer.Inner, "slotted": classes.Slotted, "both": classes.Both, "stateful": classes.Stateful,
    "mapping": classes.Mapping, "sequence": classes.Sequence,
}  # fmt: skip
CLOSED = ("tuple", "pair", "reduced", "keyword")


def fill(draw: Any, node: Any, parts: list[Any]) -> None:
    """Put parts into an empty container, whatever kind it is."""
    if isinstance(node, list | collections.deque):
        node.extend(parts)
    elif isinstance(node, classes.Slotted):
        for name, part in zip(("left", "right"), parts, strict=False):
            setattr(node, name, part)
    elif isinstance(node, classes.Stateful):
        node.data.extend(parts)
    elif isinstance(node, collections.Counter):
        node.update({draw(hashable): number for number, _ in enumerate(parts)})
    elif isinstance(node, dict):
        for part in parts:
            node[part if type(part) in (classes.Plain, classes.Stateful) else draw(hashable)] = part
    if hasattr(node, "__dict__"):
        vars(node).update((draw(st.sampled_from("abc")), part) for part in parts[:2] if not isinstance(node, classes.Stateful))


def closed(kind: str, parts: list[Any]) -> Any:
    """An object that is complete when it is made."""
    if kind == "tuple":
        return tuple(parts)
    if kind == "pair":
        return classes.Pair(*[*parts, None, None][:2])
    return classes.Reduced(*parts) if kind == "reduced" else classes.Keyword(value=parts[0] if parts else None)


@st.composite
def graphs(draw: Any, protocol: int) -> Any:
    """A graph of containers and objects that refer to each other at will; only what a call is given has no cycles."""
    finished = draw(st.lists(leaves, min_size=1, max_size=4))
    if protocol == 0:  # where torch can write no tensors
        finished = [leaf for leaf in finished if not isinstance(leaf, torch.Tensor)] + [None]
    for kind in draw(st.lists(st.sampled_from(CLOSED), max_size=3)):
        finished.append(closed(kind, draw(st.lists(st.sampled_from(finished), max_size=5))))
    kinds = sorted(EMPTY if protocol >= 2 else set(EMPTY) - {"slotted", "both", "mapping", "sequence"})
    growing = [EMPTY[kind]() for kind in draw(st.lists(st.sampled_from(kinds), min_size=1, max_size=7))]
    nodes = [*finished, *growing, (growing[0], finished[-1], growing[-1], growing[0])]
    for node in growing:
        fill(draw, node, draw(st.lists(st.sampled_from(nodes), max_size=5)))
    return draw(st.sampled_from([growing, {"model": nodes}, growing[0]]))


@pytest.mark.parametrize("protocol", range(6))
@quick
@given(data=st.data())
def test_any_graph_comes_out_as_it_went_in(protocol: int, data: st.DataObject, tmp_path: Path) -> None:
    """torch.load of a rewritten file equals torch.load of the original: values, types, order, sharing, cycles."""
    source, target = tmp_path / "in.pth", tmp_path / "out.pth"
    graph = data.draw(graphs(protocol))
    torch.save(graph, source, pickle_protocol=protocol)
    ckpt_tools.convert(source, target, objects="keep", allow_dangerous=True, overwrite=True)
    assert_same(*(torch.load(path, weights_only=False) for path in (source, target)))


@pytest.mark.parametrize("protocol", [2, 5])
@quick
@given(data=st.data())
def test_any_graph_can_be_made_plain(protocol: int, data: st.DataObject, tmp_path: Path) -> None:
    """With objects='plain' torch.load(weights_only=True) takes the result of any graph, and inspect foretells it.

    But for a tuple that holds itself, and for a number of more than 2039 bits: weights_only has no opcode for either.
    """
    source, target = tmp_path / "in.pth", tmp_path / "out.pth"
    graph = data.draw(graphs(protocol))
    torch.save({"graph": graph, "w": torch.ones(1)}, source, pickle_protocol=protocol)
    ckpt_tools.convert(source, target, objects="plain", overwrite=True)
    verdict = ckpt_tools.inspect(target).weights_only
    if not set(verdict["reasons"]) & {"it uses opcode POP", "it uses opcode LONG4"}:
        assert verdict["loads"]
        torch.load(target, weights_only=True)


plain_data = st.recursive(
    leaves,
    lambda inner: st.one_of(
        st.lists(inner, max_size=3),
        st.lists(inner, max_size=3).map(tuple),
        st.dictionaries(hashable, inner, max_size=3),
        st.dictionaries(hashable, inner, max_size=3).map(collections.OrderedDict),
        st.lists(hashable, max_size=3).map(collections.Counter),
    ),
    max_leaves=4,
)


@pytest.mark.parametrize("protocol", [1, 2, 3, 4, 5])
@quick
@given(data=plain_data)
def test_any_verdict_is_torchs(protocol: int, data: Any, tmp_path: Path) -> None:
    """Whether torch.load(weights_only=True) takes a file is foretold, for any data and protocol."""
    path = tmp_path / "in.pth"
    torch.save(data, path, pickle_protocol=protocol)
    assert ckpt_tools.inspect(path).weights_only["loads"] is loads_weights_only(path)


@pytest.mark.parametrize("protocol", [2, 4])
@quick
@given(data=st.data())
def test_any_graph_without_its_objects_loads(protocol: int, data: st.DataObject, tmp_path: Path) -> None:
    """With objects='drop' the result loads, without the classes of the graph."""
    source, target = tmp_path / "in.pth", tmp_path / "out.pth"
    graph = data.draw(graphs(protocol))
    torch.save({"graph": graph, "w": torch.ones(1)}, source, pickle_protocol=protocol)
    ckpt_tools.convert(source, target, objects="drop", overwrite=True)
    torch.load(target, weights_only=False)
    assert not [name for name in ckpt_tools.inspect(target).globals if name.startswith("tests.")]


# --- tensors

DTYPES = [
    torch.float64, torch.float32, torch.float16, torch.bfloat16, torch.float8_e4m3fn, torch.float8_e5m2, torch.int64,
    torch.int32, torch.int16, torch.int8, torch.uint8, torch.uint16, torch.uint32, torch.uint64, torch.bool, torch.complex64,
]  # fmt: skip


@st.composite
def tensors(draw: Any) -> dict[str, torch.Tensor]:
    """A state dict of views on a few storages: strided, offset, expanded, 0-d, empty, tied, Parameters."""
    made = {"layer.weight": torch.ones(1)}  # single numbers alone, under odd names, are scores
    for base in range(draw(st.integers(1, 3))):
        dtype, size = draw(st.sampled_from(DTYPES)), draw(st.integers(0, 40))
        raw = draw(st.binary(min_size=size * dtype.itemsize, max_size=size * dtype.itemsize))
        raw = bytes(byte & 1 for byte in raw) if dtype is torch.bool else raw
        storage = torch.frombuffer(bytearray(raw), dtype=dtype) if raw else torch.empty(0, dtype=dtype)
        for index in range(draw(st.integers(1, 4))):
            made[f"layer{base}.{draw(st.text(st.characters(exclude_categories=['Cs']), max_size=3))}{index}"] = view(
                draw, storage
            )
    for number, name in enumerate(draw(st.lists(st.sampled_from(sorted(made)), max_size=2))):
        made[f"tied{number}.weight"] = made[name]
    return made


def view(draw: Any, storage: torch.Tensor) -> torch.Tensor:
    shape = draw(st.lists(st.integers(0, 4), max_size=3))
    stride = draw(st.lists(st.integers(0, 6), min_size=len(shape), max_size=len(shape)))
    offset = draw(st.integers(0, storage.numel()))
    span = sum((size - 1) * step for size, step in zip(shape, stride, strict=True))
    fits = math.prod(shape) == 0 or offset + span < storage.numel()
    result = torch.as_strided(storage, shape, stride, offset) if fits else storage[: draw(st.integers(0, 40))]
    if result.is_floating_point() and draw(st.booleans()):
        return torch.nn.Parameter(result, requires_grad=draw(st.booleans()))
    return result


@quick
@given(state_dict=tensors())
def test_any_tensors_are_listed_and_kept(state_dict: dict[str, torch.Tensor], tmp_path: Path) -> None:
    """inspect lists any views as torch loads them, and convert keeps them."""
    source, target = tmp_path / "in.pth", tmp_path / "out.pth"
    torch.save(state_dict, source)
    loaded, tags = load_with_tags(source)
    assert_lists(source, loaded, tags)
    ckpt_tools.convert(source, target, overwrite=True)
    assert_same(loaded, torch.load(target, weights_only=True))


@quick
@given(state_dict=tensors())
def test_any_tensors_go_through_safetensors(state_dict: dict[str, torch.Tensor], tmp_path: Path) -> None:
    """pth -> safetensors -> pth keeps names, order, bits and ties; safetensors reads the middle."""
    source, middle, target = tmp_path / "in.pth", tmp_path / "middle.safetensors", tmp_path / "out.pth"
    torch.save(state_dict, source)
    ckpt_tools.convert(source, middle, overwrite=True)
    ckpt_tools.convert(middle, target, overwrite=True)
    before, after = (torch.load(path, weights_only=True) for path in (source, target))
    assert [(key, element_bytes(tensor)) for key, tensor in before.items()] == [
        (key, element_bytes(tensor)) for key, tensor in after.items()
    ]
    with safe_open(middle, "pt") as file:
        assert all(element_bytes(file.get_tensor(key)) == element_bytes(before[key]) for key in file.keys())  # noqa: SIM118
    for name in state_dict:
        if name.startswith("tied") and before[name].numel():
            original = next(key for key in before if before[key] is before[name])
            assert after[name].data_ptr() == after[original].data_ptr()


VALUES = st.recursive(
    st.one_of(st.none(), st.booleans(), st.integers(), st.floats(allow_nan=False, allow_infinity=False)),
    lambda inner: st.one_of(st.lists(inner, max_size=3), st.dictionaries(st.text(max_size=3), inner, max_size=3)),
    max_leaves=6,
)


@quick
@given(config=VALUES)
def test_any_values_stand_in_the_metadata(config: Any, tmp_path: Path) -> None:
    """Plain values beside a flat state dict are text in the safetensors metadata, and valid JSON where they were not text."""
    source, target = tmp_path / "in.pth", tmp_path / "out.safetensors"
    torch.save({"state_dict": {"a.w": torch.ones(2)}, "config": config}, source)
    ckpt_tools.convert(source, target, overwrite=True)
    with safe_open(target, "pt") as file:
        assert json.loads(file.metadata()["config"]) == config


def test_an_object_in_its_own_set_comes_back(tmp_path: Path) -> None:
    """A set that holds an object that refers to the set: a cycle that protocol 2 closes through a call."""
    owner = classes.Plain()
    owner.peers = {owner}  # type: ignore[attr-defined]
    for number, root in enumerate((owner, owner.peers, [owner.peers, owner])):  # type: ignore[attr-defined]
        source, target = tmp_path / f"{number}.pth", tmp_path / f"{number}.out.pth"
        torch.save(root, source, pickle_protocol=4)
        ckpt_tools.convert(source, target, objects="keep", allow_dangerous=True)
        after = torch.load(target, weights_only=False)
        loaded: Any = after[1] if isinstance(after, list) else after if isinstance(after, classes.Plain) else next(iter(after))
        assert loaded.peers == {loaded}
        assert not isinstance(after, list) or after[0] is loaded.peers


def test_nothing_left_is_refused(tmp_path: Path) -> None:
    """A checkpoint that is one object without plain form gives an error, not an empty file."""
    torch.save(classes.function, tmp_path / "in.pth")
    with pytest.raises(NothingMatchedError):
        ckpt_tools.convert(tmp_path / "in.pth", tmp_path / "out.pth", objects="drop")
    assert not (tmp_path / "out.pth").exists()
