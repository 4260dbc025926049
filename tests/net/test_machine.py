"""Pickles of every protocol: what we write of one is what torch and pickle load of it, shared and recursive parts included."""

import collections
import pickle
import struct
from argparse import Namespace
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

import ckpt_tools
import ckpt_tools.torch
from tests.hostile import pickles as p
from tests.hostile.zips import torch_zip
from tests.support import classes
from tests.support.graphs import assert_same

pytestmark = pytest.mark.filterwarnings("ignore:Detected pickle protocol:UserWarning")
NAN = float("nan")


def with_itself(empty: Any) -> Any:
    """A container that holds itself, twice."""
    put = empty.append if hasattr(empty, "append") else lambda part: empty.update({len(empty): part})
    put(empty)
    put([empty])
    return empty


def ring() -> Any:
    """A tuple in a list in that tuple; a dict in its own attribute."""
    inner: list[Any] = []
    inner.append((inner, 1))
    owner = Namespace(parts={})
    owner.parts["owner"] = owner
    return [inner[0], inner, owner]


def shared() -> Any:
    """Containers and texts that stand in several places, beside equal ones that are others."""
    part, text, long = [1], "some text", 2**80
    return {"a": part, "b": [part, [1], (part,)], "t": [text, text], "n": (long, long), "e": [(), ()], "d": {"x": part}}


def built(make: Any, **state: Any) -> Any:
    """An object with this state."""
    made = make.__new__(make)
    for name, value in state.items():
        setattr(made, name, value)
    return made


def ordered() -> Any:
    """An OrderedDict with an attribute, as a state dict has its `_metadata`."""
    made: Any = collections.OrderedDict(b=1, a=2)
    made._metadata = {"": {"version": 1}}
    return made


VALUES: dict[str, Callable[[], Any]] = {
    "shared": shared,
    "list-in-itself": lambda: with_itself([]), "dict-in-itself": lambda: with_itself({}),
    "deque-in-itself": lambda: with_itself(collections.deque()), "ring": ring,
    "build-dict": lambda: classes_of(classes.Plain, left=1, right=[2]),
    "build-slots": lambda: built(classes.Slotted, left=1, right={"x": 2}),
    "build-both": lambda: built(classes.Both, left=1, other=[3]),
    "build-nothing": classes.Plain,
    "build-ordered": ordered,
    "build-default": lambda: collections.defaultdict(list, {"a": [1]}),
    "build-counter": lambda: collections.Counter("abca"),
    "build-mapping": lambda: filled(classes.Mapping(), "m"), "build-parameter": lambda: parameter(),
    "tuples": lambda: [(), (1,), (1, 2), (1, 2, 3), (1, 2, 3, 4), ((((),),),)],
    "numbers": lambda: [0, 255, 256, 65535, 65536, 2**31 - 1, 2**31, -1, -(2**31), -(2**31) - 1, 2**2040, -(2**70), True],
    "floats": lambda: [0.0, -0.0, 1e-310, 1.5, float("inf"), -float("inf"), NAN, 1 / 3, complex(-0.0, NAN)],
    "texts": lambda: ["", "a", "é\n\\u0041\r\t\x1a", "\ud800", "x" * 255, "x" * 256, "x" * 70_000, "名"],
    "bytes": lambda: [b"", b"\x00\xff", b"x" * 256, bytearray(b"ab"), bytearray()],
    "sets": lambda: [set(), {1, "a"}, frozenset(), frozenset([(1, 2)])],
    "batches": lambda: [list(range(2001)), dict.fromkeys(range(2001)), set(range(1001))],
    "keys": lambda: {1: "i", 1.5: "f", "1": "t", b"1": "b", None: "n", (1, "a"): "p", 2**70: "l", NAN: "q"},
}  # fmt: skip


def classes_of(kind: Any, **state: Any) -> Any:
    """An instance with attributes, twice in a list."""
    made = built(kind, **state)
    return [made, made]


def filled(mapping: Any, name: str) -> Any:
    """A subclass of dict with items and an attribute."""
    mapping[name] = 1
    mapping.attribute = [name]
    return mapping


def parameter() -> Any:
    """A Parameter with an attribute, and one without a gradient."""
    made: Any = torch.nn.Parameter(torch.ones(2))
    made.tag = "kept"
    return [made, torch.nn.Parameter(torch.zeros(1), requires_grad=False)]


@pytest.mark.parametrize("protocol", range(6))
@pytest.mark.parametrize("name", VALUES)
def test_what_pickle_writes(name: str, protocol: int, tmp_path: Path) -> None:
    """As a bare pickle and inside a torch-zip: what comes out loads as what went in, and no object is two or one."""
    if protocol < 2 and name in ("build-slots", "build-both"):
        pytest.skip("pickle writes no slots there")
    value = {"w": torch.arange(3.0), "value": VALUES[name]()}
    (tmp_path / "in.pkl").write_bytes(pickle.dumps(value, protocol))
    sources = [tmp_path / "in.pkl"]
    if protocol:  # torch.save cannot write tensors in protocol 0
        torch.save(value, tmp_path / "in.pth", pickle_protocol=protocol)
        sources.append(tmp_path / "in.pth")
    for source in sources:
        out = tmp_path / f"of-{source.suffix[1:]}.pth"
        ckpt_tools.convert(source, out, objects="keep")
        before = pickle.loads(source.read_bytes()) if source.suffix == ".pkl" else torch.load(source, weights_only=False)
        assert_same(before, torch.load(out, weights_only=False))
        assert ckpt_tools.inspect(source).tensors[0]["where"] == ["w"]


def zipped(folder: Path, *opcodes: bytes) -> Path:
    """A torch-zip with a pickle of these opcodes and one storage of six floats."""
    path = folder / "hand.pth"
    path.write_bytes(torch_zip(p.pickle(*opcodes), {"0": struct.pack("<6f", *range(6))}))
    return path


def at(offset: int) -> bytes:
    """A tensor of one element, which says which it is."""
    return p.tensor(p.sizes(1), p.sizes(1), p.integer(offset))


def number(value: float) -> bytes:
    """BINFLOAT."""
    return b"G" + struct.pack(">d", value)


ONE, ZERO, PAIR = p.integer(1), p.integer(0), p.tuple_of(p.integer(1), p.text("a"))
KEYS: dict[str, list[bytes]] = {
    "one": [ONE, p.TRUE, number(1.0)], "true-first": [p.TRUE, ONE], "float-first": [number(1.0), ONE, p.TRUE],
    "zero": [ZERO, p.FALSE, number(-0.0), number(0.0)], "two-nans": [number(NAN), number(NAN)],
    "one-nan": [number(NAN) + p.put(7), p.get(7), number(NAN)],
    "texts": [p.text("1"), ONE, p.text("1")], "bytes": [b"C\x011", p.text("1"), b"C\x011"],
    "none": [p.NONE, p.text("None"), p.NONE],
    "pairs": [PAIR, p.tuple_of(p.TRUE, p.text("a")), p.tuple_of(number(1.0), p.text("a"))],
    "long": [p.integer(2**70), number(2.0**70), p.integer(2**70 + 1)],
    "mixed": [p.text("a"), ONE, number(1.5), p.NONE, p.text("a"), p.TRUE],
}  # fmt: skip
SETTERS: dict[str, Callable[[list[tuple[bytes, bytes]]], bytes]] = {
    "setitem": lambda items: p.EMPTY_DICT + b"".join(key + value + p.SETITEM for key, value in items),
    "setitems": lambda items: p.EMPTY_DICT + p.pairs(items),
    "dict": lambda items: p.MARK + b"".join(key + value for key, value in items) + b"d",
    "two-batches": lambda items: p.EMPTY_DICT + p.pairs(items[:1]) + p.pairs(items[1:]),
    "ordered": lambda items: p.ORDERED_DICT + p.pairs(items),
    "ordered-of-pairs": lambda items: (
        p.glob("collections", "OrderedDict")
        + p.tuple_of(p.list_of(*(p.list_of(key, value) for key, value in items)))
        + p.REDUCE
    ),
}


@pytest.mark.parametrize("setter", SETTERS)
@pytest.mark.parametrize("name", KEYS)
def test_repeated_and_mixed_keys(name: str, setter: str, tmp_path: Path) -> None:
    """Which keys a dict has, of what type, in which order, and whose value counts, is what torch makes of the same bytes."""
    path = zipped(tmp_path, SETTERS[setter]([(key, at(place)) for place, key in enumerate(KEYS[name])]))
    wanted = torch.load(path, weights_only=False)
    ckpt_tools.convert(path, tmp_path / "out.pth")
    for found in (ckpt_tools.torch.load(path), torch.load(tmp_path / "out.pth", weights_only=False)):
        assert [(repr(key), value.tolist()) for key, value in found.items()] == [
            (repr(key), value.tolist()) for key, value in wanted.items()
        ]
    assert len(ckpt_tools.inspect(path).tensors) == len(wanted)


STATE = p.dict_of(x=ONE)
REBUILD = p.glob("torch._utils", "_rebuild_tensor_v2")
ARGUMENTS = p.tensor().removeprefix(REBUILD)
PLAIN, NS = p.call("argparse", "Namespace"), p.glob("argparse", "Namespace")
BUILDS: dict[str, bytes] = {
    "dict": PLAIN + STATE + p.BUILD, "twice": PLAIN + STATE + p.BUILD + p.dict_of(y=p.text("b"), x=ZERO) + p.BUILD,
    "pair": PLAIN + p.tuple_of(STATE, p.EMPTY_DICT) + p.BUILD, "slots": PLAIN + p.tuple_of(p.NONE, STATE) + p.BUILD,
    "both": PLAIN + p.tuple_of(STATE, p.dict_of(y=ZERO)) + p.BUILD, "empty": PLAIN + p.EMPTY_DICT + p.BUILD,
    "newobj": NS + p.EMPTY_TUPLE + b"\x81" + STATE + p.BUILD,
    "newobj-ex": NS + p.EMPTY_TUPLE + p.EMPTY_DICT + b"\x92" + STATE + p.BUILD,
    "inst": p.MARK + b"iargparse\nNamespace\n" + STATE + p.BUILD, "obj": p.MARK + NS + b"o" + STATE + p.BUILD,
    "itself": PLAIN + p.put(5) + p.EMPTY_DICT + p.text("me") + p.get(5) + p.SETITEM + p.BUILD,
    "state-shared": p.list_of(STATE + p.put(5), PLAIN + p.get(5) + p.BUILD, p.get(5)),
    "ordered": p.ORDERED_DICT + p.pairs([(ONE, ZERO)]) + STATE + p.BUILD,
}  # fmt: skip


@pytest.mark.parametrize("name", BUILDS)
def test_build_of_every_kind(name: str, tmp_path: Path) -> None:
    """A state of every form becomes the attributes that torch gives."""
    path = zipped(tmp_path, p.dict_of(w=p.tensor(), x=BUILDS[name]))
    wanted = torch.load(path, weights_only=False)
    ckpt_tools.convert(path, tmp_path / "out.pth", objects="keep")
    assert_same(wanted, torch.load(tmp_path / "out.pth", weights_only=False))


@pytest.mark.parametrize("state", [p.EMPTY_DICT, p.ORDERED_DICT, p.NONE], ids=["dict", "ordered", "none"])
def test_an_empty_state_changes_nothing(state: bytes, tmp_path: Path) -> None:
    """A rebuild function that is given a state of nothing is still itself: the tensors that it makes are listed, in order."""
    path = zipped(tmp_path, p.dict_of(w=REBUILD + state + p.BUILD + ARGUMENTS, b=p.tensor()))
    wanted = torch.load(path, weights_only=False)
    assert [row["where"] for row in ckpt_tools.inspect(path).tensors] == [["w"], ["b"]]
    ckpt_tools.convert(path, tmp_path / "out.pth")
    assert_same(wanted, torch.load(tmp_path / "out.pth", weights_only=True), storages=False)
    assert ckpt_tools.scan(path)[0].verdict == "dangerous"


def test_a_state_of_something_changes_a_function(tmp_path: Path) -> None:
    """What a function with other attributes would make is not known: no tensor is listed."""
    path = zipped(tmp_path, p.dict_of(w=REBUILD + STATE + p.BUILD + ARGUMENTS))
    assert ckpt_tools.inspect(path).tensors == []


@pytest.mark.parametrize("protocol", [2, 3, 4])
def test_many_tensors(protocol: int, tmp_path: Path) -> None:
    """Tensors of all kinds in a file of hundreds, most of which are read in one step: they come out as torch loads them."""
    base, made = torch.arange(1000.0), {}
    for i in range(120):
        shape = [(), (3,), (2, 3), (7_000,), (1, 2, 1, 2), (300, 2)][i % 6]
        made[f"plain.{i}"] = torch.arange(0, torch.Size(shape).numel()).reshape(shape).to([torch.float32, torch.int64][i % 2])
        made[f"view.{i}"] = base[i : i + 300].reshape(2, 150).t()
        made[f"parameter.{i}"] = torch.nn.Parameter(torch.ones(2))
        made[f"grad.{i}"] = torch.ones(1, requires_grad=True)
        made[f"untyped.{i}"] = torch.ones(2).to(torch.float8_e5m2)
    torch.save(made, tmp_path / "in.pth", pickle_protocol=protocol)
    ckpt_tools.convert(tmp_path / "in.pth", tmp_path / "out.pth")
    before, after = torch.load(tmp_path / "in.pth", weights_only=False), torch.load(tmp_path / "out.pth")
    assert list(after) == list(before)
    for name, tensor in before.items():
        other = after[name]
        assert (other.dtype, other.stride(), other.storage_offset()) == (tensor.dtype, tensor.stride(), tensor.storage_offset())
        assert (type(other), other.requires_grad) == (type(tensor), tensor.requires_grad)
        assert torch.equal(other.float(), tensor.float()), name
