"""`--objects`: what becomes of everything in a checkpoint that is neither plain data nor a tensor."""

from __future__ import annotations

import argparse
import collections
import datetime
import decimal
import fractions
import pickletools
import types
import uuid
import warnings
import zipfile
from collections.abc import Callable, Set
from pathlib import Path, PurePosixPath, PureWindowsPath
from typing import Any, cast

import numpy as np
import pytest
import torch
from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.nn.utils import prune
from torch.optim.swa_utils import AveragedModel

import ckpt_tools
from ckpt_tools import limits
from ckpt_tools.errors import (
    CkptError,
    ContainerLimitError,
    LimitError,
    NothingMatchedError,
    ObjectsError,
)
from ckpt_tools.operations.convert.report import Converted
from ckpt_tools.pickling.weights_only import ALLOWED_2_4
from ckpt_tools.tree.nodes import Global
from fixtures.make import network
from tests.support import classes
from tests.support.graphs import assert_same, element_bytes
from tests.support.samples import shown

UTC2 = datetime.timezone(datetime.timedelta(hours=2))


def saved(tmp_path: Path, value: Any, protocol: int = 2) -> Path:
    """A checkpoint with a value beside a tensor."""
    path = tmp_path / "in.pth"
    torch.save({"value": value, "w": torch.ones(1)}, path, pickle_protocol=protocol)
    return path


def plain(tmp_path: Path, value: Any, protocol: int = 2) -> tuple[Any, Converted]:
    """The value with --objects plain, as weights_only loads it; and the report."""
    target = tmp_path / "out.pth"
    report = ckpt_tools.convert(saved(tmp_path, value, protocol), target, objects="plain", overwrite=True)
    newer = (
        {"torch uint16", "torch uint32", "torch uint64"} if "newer-dtypes" in [note.code for note in report.notes] else set()
    )
    assert_torch_2_4_takes(target, newer)
    return torch.load(target, weights_only=True).get("value", "dropped"), report


# The opcodes of torch 2.4's weights_only unpickler (torch/_weights_only_unpickler.py, `Unpickler.load`).
OPCODES_2_4 = frozenset(
    [
        "GLOBAL",
        "NEWOBJ",
        "REDUCE",
        "BUILD",
        "APPEND",
        "APPENDS",
        "SETITEM",
        "SETITEMS",
        "MARK",
        "TUPLE",
        "TUPLE1",
        "TUPLE2",
        "TUPLE3",
        "NONE",
        "NEWFALSE",
        "NEWTRUE",
        "EMPTY_TUPLE",
        "EMPTY_LIST",
        "EMPTY_DICT",
        "EMPTY_SET",
        "BININT",
        "BININT1",
        "BININT2",
        "BINFLOAT",
        "BINUNICODE",
        "SHORT_BINSTRING",
        "BINPERSID",
        "BINGET",
        "LONG_BINGET",
        "BINPUT",
        "LONG_BINPUT",
        "LONG1",
        "PROTO",
        "STOP",
    ]
)


def assert_torch_2_4_takes(path: Path, newer: Set[str] = frozenset()) -> None:
    """A file uses only the globals and opcodes that torch 2.4 allows: each later version allows them too."""
    with zipfile.ZipFile(path) as archive:
        stream = archive.read(next(name for name in archive.namelist() if name.endswith("/data.pkl")))
    for opcode, argument, _ in pickletools.genops(stream):
        assert opcode.name in OPCODES_2_4
        if opcode.name == "GLOBAL" and argument not in newer:
            assert Global(*str(argument).split(" ")) in ALLOWED_2_4


def filled(kind: type, **attributes: Any) -> Any:
    """An instance with attributes."""
    made = kind()
    for name, value in attributes.items():
        setattr(made, name, value)
    return made


def defaults(**items: Any) -> Any:
    """A defaultdict."""
    return collections.defaultdict(list, items)


def mapping(items: dict[str, Any], **attributes: Any) -> classes.Mapping:
    """A dict subclass with attributes."""
    made = classes.Mapping(items)
    vars(made).update(attributes)
    return made


KNOWN: list[tuple[Any, Any, str]] = [
    (argparse.Namespace(lr=0.1, more=[1]), {"lr": 0.1, "more": [1]}, "dict"),
    (types.SimpleNamespace(a=1), {"a": 1}, "dict"),
    (defaults(a=[1]), {"a": [1]}, "dict"),
    (collections.deque([1, 2], maxlen=3), [1, 2], "list"),
    (frozenset([1, 2]), [1, 2], "list"),
    ({1, 2}, [1, 2], "list"),
    (set(), [], "list"),
    (collections.Counter("aab"), collections.Counter("aab"), ""),
    (torch.float16, torch.float16, ""),
    (torch.Size([1, 2]), torch.Size([1, 2]), ""),
    (torch.device("cuda:1"), torch.device("cuda:1"), ""),
    (1 + 2j, torch.tensor(1 + 2j, dtype=torch.complex128), "tensor"),
    (b"raw\xff", torch.tensor([114, 97, 119, 255], dtype=torch.uint8), "tensor"),
    (b"", torch.empty(0, dtype=torch.uint8), "tensor"),
    (bytearray(b"ab"), torch.tensor([97, 98], dtype=torch.uint8), "tensor"),
    ([b"a", (b"c", 1)], [torch.tensor([97], dtype=torch.uint8), (torch.tensor([99], dtype=torch.uint8), 1)], "nested"),
    (Path("/runs/best.pth"), "/runs/best.pth", "text"),
    (PurePosixPath("runs/best.pth"), "runs/best.pth", "text"),
    (PurePosixPath("."), ".", "text"),
    (PurePosixPath("/"), "/", "text"),
    (PureWindowsPath(r"C:\runs\best.pth"), r"C:\runs\best.pth", "text"),
    (datetime.datetime(2026, 11, 20, 12, 30, 1, 5), "2026-11-20T12:30:01.000005", "text"),
    (datetime.datetime(2026, 11, 20, tzinfo=datetime.timezone.utc), "2026-11-20T00:00:00+00:00", "text"),  # noqa: UP017
    (datetime.datetime(2026, 11, 20, tzinfo=UTC2), "2026-11-20T00:00:00+02:00", "text"),
    (datetime.date(2026, 11, 20), "2026-11-20", "text"),
    (datetime.time(1, 2, tzinfo=UTC2), "01:02:00+02:00", "text"),
    (datetime.timedelta(days=1, seconds=2), 86402.0, "number"),
    (UTC2, "UTC+02:00", "text"),
    (decimal.Decimal("1.10"), "1.10", "text"),
    (fractions.Fraction(1, 3), "1/3", "text"),
    (uuid.UUID(int=5), "00000000-0000-0000-0000-000000000005", "text"),
    (range(1, 7, 2), "range(1, 7, 2)", "text"),
    (slice(None, 3), "slice(None, 3, None)", "text"),
    (np.dtype("float32"), "float32", "text"),
    (len, "builtins.len", "text"),
]
UNKNOWN: list[tuple[Any, Any, str]] = [
    (classes.Colour.GREEN, 2, "number"),
    (classes.Mode.FAST, "fast", "text"),
    (classes.Bits.ONE | classes.Bits.TWO, 3, "number"),
    (filled(classes.Plain, a=1, b=[2]), {"a": 1, "b": [2]}, "dict"),
    (filled(classes.Outer.Inner, a=1), {"a": 1}, "dict"),
    (filled(classes.Slotted, left=1, right=(2,)), {"left": 1, "right": (2,)}, "dict"),
    (filled(classes.Both, left=1, other=2), {"other": 2, "left": 1}, "dict"),
    (mapping({"a": 1}, b=2), {"a": 1, "b": 2}, "dict"),
    (classes.Sequence([1, 2]), [1, 2], "list"),
    (classes.Label("name"), "name", "text"),
    (classes.Count(4), 4, "number"),
    (classes.Pair(1, "b"), (1, "b"), "tuple"),
    (classes.Pair(1, [2]), [1, [2]], "list"),
    (classes.Reduced(1, [2]), [1, [2]], "list"),
    (classes.Keyword(value=3), {"value": 3}, "dict"),
    (filled(classes.Stateful, data=[1]), ["state", [1]], "list"),
    (classes.Plain, "tests.support.classes.Plain", "text"),
    (classes.function, "tests.support.classes.function", "text"),
    (ValueError("why"), "why", "text"),
]


@pytest.mark.parametrize("protocol", [2, 4])
@pytest.mark.parametrize(("value", "expected", "became"), [*KNOWN, *UNKNOWN], ids=shown)
def test_plain_form(tmp_path: Path, value: Any, expected: Any, became: str, protocol: int) -> None:
    """Every kind of object has its plain form, which weights_only loads; the report says what became of it."""
    loaded, report = plain(tmp_path, value, protocol)
    assert_same(loaded, expected, storages=False)
    if became != "nested":
        assert [fate.became for fate in report.objects if fate.where == ["value"]] == ([became] if became else [])


@pytest.mark.parametrize("value", [row[0] for row in KNOWN], ids=shown)
def test_known_objects_are_kept_unasked(tmp_path: Path, value: Any) -> None:
    """Plain-data classes of Python and NumPy need no word: they come out as they are."""
    if value is len:
        pytest.skip("a function is not plain data")
    ckpt_tools.convert(saved(tmp_path, value), tmp_path / "out.pth")
    loaded = torch.load(tmp_path / "out.pth", weights_only=False)["value"]
    assert type(loaded) is type(value)
    assert loaded == value


@pytest.mark.parametrize("value", [row[0] for row in UNKNOWN], ids=shown)
def test_unknown_objects_are_refused_unasked(tmp_path: Path, value: Any) -> None:
    """Without a word on it the file is refused, with the class and its place, and all three ways out."""
    with pytest.raises(ObjectsError) as caught:
        ckpt_tools.convert(saved(tmp_path, value), tmp_path / "out.pth")
    assert "value" in caught.value.why
    assert "tests.support.classes" in caught.value.why or "builtins.ValueError" in caught.value.why
    assert all(word in caught.value.fix for word in ("plain", "drop", "keep"))
    assert caught.value.exit_code == 3
    assert not (tmp_path / "out.pth").exists()


@pytest.mark.parametrize("value", [row[0] for row in UNKNOWN], ids=shown)
def test_unknown_objects_are_dropped(tmp_path: Path, value: Any) -> None:
    """With drop they are left out and reported; known objects stay."""
    torch.save({"value": value, "args": argparse.Namespace(a=1), "w": torch.ones(1)}, tmp_path / "in.pth")
    report = ckpt_tools.convert(tmp_path / "in.pth", tmp_path / "out.pth", objects="drop")
    assert set(torch.load(tmp_path / "out.pth", weights_only=False)) == {"args", "w"}
    assert ["value"] in [fate.where for fate in report.objects if fate.became == "dropped"]


def test_all_unknown_objects_are_listed(tmp_path: Path) -> None:
    """Not only the first: every place with its class."""
    value = [classes.Colour.RED, {"a": classes.Label("x")}, classes.Plain]
    with pytest.raises(ObjectsError) as caught:
        ckpt_tools.convert(saved(tmp_path, value), tmp_path / "out.pth")
    for line in (
        "value.0: tests.support.classes.Colour",
        "value.1.a: tests.support.classes.Label",
        "value.2: tests.support.classes.Plain",
    ):
        assert line in caught.value.why


def test_drop_leaves_nothing_broken(tmp_path: Path) -> None:
    """A known object that could not be made without what is dropped is dropped with it."""
    class_of_default: Any = collections.defaultdict(classes.Plain, {"a": 1})
    value = {
        "default": class_of_default,
        "list": [1, classes.Plain(), 2],
        "tuple": (1, classes.Plain(), 2),
        "set": {1, classes.Mode.FAST},
        "matrix": np.ones(2).view(classes.Array),
        "key": {classes.Colour.RED: 1, "b": 2},
    }
    path = saved(tmp_path, value)
    ckpt_tools.convert(path, tmp_path / "out.pth", objects="drop")
    loaded = torch.load(tmp_path / "out.pth", weights_only=False)["value"]
    assert loaded == {"default": {"a": 1}, "list": [1, 2], "tuple": (1, None, 2), "set": {1}, "key": {"b": 2}}


def test_keep_keeps(tmp_path: Path) -> None:
    """With keep even classes come out as they went in."""
    value = [row[0] for row in UNKNOWN if type(row[0]) is not ValueError]
    path = saved(tmp_path, value)
    ckpt_tools.convert(path, tmp_path / "out.pth", objects="keep")
    assert_same(*(torch.load(file, weights_only=False) for file in (path, tmp_path / "out.pth")))


# --- keys and elements


@pytest.mark.parametrize(
    ("value", "expected"),
    [
        ({classes.Plain: 1, classes.Slotted: 2}, {"tests.support.classes.Plain": 1, "tests.support.classes.Slotted": 2}),
        ({PurePosixPath("a"): 1, "a": 2}, {"pathlib.PurePosixPath": 1, "a": 2}),
        ({classes.Colour.RED: 1, classes.Colour.GREEN: 2}, {1: 1, 2: 2}),
        ({1: 0, classes.Colour.RED: 1}, {1: 0, "tests.support.classes.Colour": 1}),
        ({True: 0, classes.Count(1): 2}, {True: 2}),
        ({frozenset([1]): "a"}, {(1,): "a"}),
        ({(classes.Mode.FAST, 1): "a"}, {("fast", 1): "a"}),
        ({classes.Pair(1, 2): "a"}, {(1, 2): "a"}),
        ({np.int64(3): "a"}, {3: "a"}),
        ({frozenset([frozenset([1])]): "a"}, {((1,),): "a"}),
        ({classes.Mode.FAST, "slow"}, ["fast", "slow"]),
        ({frozenset([1]), 5}, [(1,), 5]),
        (frozenset([PurePosixPath("a")]), ["a"]),
        ({b"a": 1, "a": 2}, {"a 2": 1, "a": 2}),
        ({1 + 2j: 1}, {"(1+2j)": 1}),
    ],
    ids=shown,
)
def test_keys_stay_keys(tmp_path: Path, value: Any, expected: Any) -> None:
    """What a key becomes can be a key, and no two become one."""
    loaded = plain(tmp_path, value)[0]
    assert type(loaded) is type(expected)
    assert loaded == expected if type(expected) is dict else sorted(map(repr, loaded)) == sorted(map(repr, expected))


def test_objects_as_keys_do_not_lose_their_values(tmp_path: Path) -> None:
    """An object that has no hashable form is named after its class, each with its own number."""
    loaded, report = plain(
        tmp_path, {filled(classes.Plain, a=1): "x", filled(classes.Plain, a=2): "y", "tests.support.classes.Plain": 0}
    )
    assert loaded == {
        "tests.support.classes.Plain 2": "x",
        "tests.support.classes.Plain 3": "y",
        "tests.support.classes.Plain": 0,
    }
    assert [fate.became for fate in report.objects] == ["text", "text"]


def test_no_two_objects_become_one_key(tmp_path: Path) -> None:
    """Keys that only their objects told apart stay apart, in sets as well."""
    twins = [filled(classes.Plain, a=1), filled(classes.Plain, a=1)]
    assert plain(tmp_path, dict.fromkeys(twins, 0))[0] == {"tests.support.classes.Plain": 0, "tests.support.classes.Plain 2": 0}
    assert plain(tmp_path, set(twins))[0] == ["tests.support.classes.Plain", "tests.support.classes.Plain 2"]
    assert plain(tmp_path, {classes.Colour.RED: 0, classes.Bits.ONE: 1})[0] == {1: 0, "tests.support.classes.Bits": 1}


def test_an_object_that_is_key_and_value(tmp_path: Path) -> None:
    """As a value it keeps its attributes."""
    node = filled(classes.Plain, a=1)
    assert plain(tmp_path, {node: node})[0] == {"tests.support.classes.Plain": {"a": 1}}


# --- NumPy

NUMBERS = ["?", "i1", "i2", "i4", "i8", "u1", "u2", "u4", "u8", "f2", "f4", "f8", "c8", "c16"]


@pytest.mark.parametrize("module", ["numpy._core", "numpy.core"])
@pytest.mark.parametrize("code", NUMBERS)
@pytest.mark.parametrize("order", ["<", ">"])
def test_numpy_scalars(tmp_path: Path, code: str, order: str, module: str) -> None:
    """A NumPy scalar becomes Python's, whatever its type, byte order, and NumPy's name for its own module."""
    value = np.array([1], dtype=order + code)[0]
    path = saved(tmp_path, value)
    if module == "numpy.core":
        rename_module(path, tmp_path)
    ckpt_tools.convert(path, tmp_path / "out.pth", objects="plain")
    loaded = torch.load(tmp_path / "out.pth", weights_only=True)["value"]
    assert type(loaded) in (bool, int, float) or loaded.dtype is torch.complex128  # torch 2.4 takes no complex number
    assert complex(loaded) == complex(value)


def rename_module(path: Path, tmp_path: Path) -> None:
    """The same file as NumPy 1 writes it: its module was `numpy.core`."""
    from tests.support.zips import rewrite

    rewrite(path, tmp_path / "old.pth", change=lambda name, data: data.replace(b"numpy._core.", b"numpy.core."))
    (tmp_path / "old.pth").replace(path)


@pytest.mark.parametrize("protocol", [2, 4, 5])
@pytest.mark.parametrize("code", NUMBERS)
@pytest.mark.parametrize("order", ["<", ">"])
@pytest.mark.parametrize("layout", ["C", "F"])
def test_numpy_arrays(tmp_path: Path, code: str, order: str, layout: str, protocol: int) -> None:
    """An array becomes a tensor of the same values, shape and type; Fortran order becomes its strides."""
    value = np.array([[0, 1, 2], [3, 4, 5]], dtype=order + code, order=layout)  # type: ignore[call-overload]
    loaded, report = plain(tmp_path, value, protocol)
    assert isinstance(loaded, torch.Tensor)
    assert loaded.numpy().dtype == value.dtype.newbyteorder("=")
    assert np.array_equal(loaded.numpy(), value)
    assert loaded.stride() == ((3, 1) if layout == "C" else (1, 2))
    assert [fate.became for fate in report.objects if fate.where == ["value"]] == ["tensor"]


@pytest.mark.parametrize("value", [np.zeros((0, 3)), np.array(2.5), np.ones((2, 1, 1), dtype=np.float32)], ids=shown)
def test_numpy_shapes(tmp_path: Path, value: Any) -> None:
    """Empty, 0-d and thin arrays."""
    loaded, _ = plain(tmp_path, value)
    assert loaded.shape == value.shape
    assert np.array_equal(loaded.numpy(), value)


def test_numpy_text(tmp_path: Path) -> None:
    """Text scalars become text, an array of objects a list."""
    assert plain(tmp_path, np.str_("café"))[0] == "café"
    assert plain(tmp_path, np.bytes_(b"raw"))[0] == "raw"
    assert plain(tmp_path, np.array([1, "a", None], dtype=object))[0] == [1, "a", None]


@pytest.mark.parametrize("value", [np.float64(0.5), np.arange(3), np.array(["a"])], ids=shown)
def test_numpy_is_kept_unasked(tmp_path: Path, value: Any) -> None:
    """Without a word NumPy stays NumPy."""
    ckpt_tools.convert(saved(tmp_path, value), tmp_path / "out.pth")
    assert_same(torch.load(tmp_path / "out.pth", weights_only=False)["value"], value)


def test_a_metric_of_numpy_no_longer_stands_in_the_way(tmp_path: Path) -> None:
    """One numpy.float64 makes torch refuse the whole file; made plain it loads, with the same tensors."""
    path = saved(tmp_path, np.float64(0.875))
    assert ckpt_tools.inspect(path).weights_only["refused"] == ["numpy._core.multiarray.scalar", "numpy.dtype"]
    assert plain(tmp_path, np.float64(0.875))[0] == 0.875


# --- whole modules


def module() -> nn.Module:
    """A module with a hidden buffer, a None parameter, a shared layer and a hook-free state."""
    torch.manual_seed(0)
    shared = nn.Linear(2, 2)
    model = nn.Sequential(nn.Linear(3, 2, bias=False), nn.BatchNorm1d(2), shared, nn.ModuleDict({"again": shared}))
    model[0].register_buffer("scratch", torch.arange(2.0), persistent=False)
    model[0].register_buffer("kept", torch.arange(2.0))
    model.register_parameter("scale", nn.Parameter(torch.ones(2)))
    return model


@pytest.mark.parametrize("wrap", [lambda model: model, nn.DataParallel], ids=["plain", "wrapped"])
def test_a_pickled_module_becomes_its_state_dict(tmp_path: Path, wrap: Any) -> None:
    """Names, order, bits, ties as its own state_dict() gives; hidden buffers left out; each class in the report."""
    model = wrap(module())
    torch.save(model, tmp_path / "in.pth")
    report = ckpt_tools.convert(tmp_path / "in.pth", tmp_path / "out.pth", objects="plain")
    loaded = torch.load(tmp_path / "out.pth", weights_only=True)
    expected = model.state_dict()
    assert list(loaded) == list(expected)
    assert_same(dict(loaded), dict(expected))
    wrap(module()).load_state_dict(loaded)
    told = {fate.name: fate.became for fate in report.objects}
    assert told["torch.nn.modules.container.Sequential"] in ("dict", "part of the object around it")
    assert told["torch.nn.modules.linear.Linear"] == "part of the object around it"


class Odd(nn.Module):
    """Tables with empty places, a hidden buffer, a module in a list, a name that is no identifier."""

    def __init__(self) -> None:
        super().__init__()
        self.last = nn.Linear(2, 2)
        self.first = nn.Parameter(torch.ones(2))
        self.register_parameter("absent", None)
        self.register_buffer("none", None)
        self.register_buffer("hidden", torch.ones(3), persistent=False)
        self.register_module("nothing", None)
        self.unregistered = [nn.Linear(1, 1)]
        self.add_module("odd name-0", nn.LayerNorm(2))


def pruned() -> nn.Module:
    """A layer whose weight is a mask and an original."""
    layer = nn.Linear(3, 4)
    prune.l1_unstructured(layer, "weight", 0.5)
    return layer


def strided() -> nn.Module:
    """A weight that is a view on another order."""
    layer = nn.Linear(4, 3)
    layer.weight = nn.Parameter(torch.randn(4, 3).t())
    return layer


MODULES: dict[str, Callable[[], nn.Module]] = {
    "nested": lambda: nn.Sequential(nn.Sequential(nn.Linear(2, 3)), nn.Sequential(nn.Conv2d(1, 2, 3), nn.BatchNorm2d(2))),
    "odd": Odd,
    "dict of lists": lambda: nn.ModuleDict({"x": nn.ModuleList([nn.Linear(1, 2)]), "y": nn.ModuleDict({"q": nn.PReLU()})}),
    "parameter list": lambda: nn.ParameterList([nn.Parameter(torch.ones(2)), torch.zeros(3)]),
    "parameter dict": lambda: nn.ParameterDict({"b": nn.Parameter(torch.ones(2)), "a": torch.ones(1)}),
    "lstm": lambda: nn.LSTM(3, 4, num_layers=2, bidirectional=True, proj_size=2),
    "weight norm": lambda: nn.utils.weight_norm(nn.Linear(3, 4)),
    "spectral norm": lambda: nn.utils.spectral_norm(nn.Linear(3, 4)),
    "pruned": pruned,
    "strided": strided,
    "channels last": lambda: cast("Any", nn.Conv2d(3, 4, 3)).to(memory_format=torch.channels_last),
    "transformer": lambda: nn.Transformer(8, 2, 1, 1, 16),
    "attention": lambda: nn.MultiheadAttention(4, 2, kdim=3, vdim=5, add_bias_kv=True),
    "averaged": lambda: AveragedModel(nn.Linear(2, 2)),
    "frozen half": lambda: nn.Sequential(nn.Linear(2, 2)).half().requires_grad_(False),
    "instance norm": lambda: nn.InstanceNorm2d(3, affine=True, track_running_stats=True),
    "compiled": lambda: cast("nn.Module", torch.compile(nn.Linear(2, 2))),
    "traced": lambda: torch.fx.symbolic_trace(nn.Sequential(nn.Sequential(nn.Linear(2, 3)), nn.BatchNorm1d(3))),
    "checkpointed": lambda: nn.Sequential(checkpoint_wrapper(nn.Linear(2, 2))),
    "with buffers": lambda: nn.BatchNorm2d(2, affine=False),
}


@pytest.mark.filterwarnings("ignore:.*weight_norm.*", "ignore:.*torch.jit.*", "ignore:enable_nested_tensor")
@pytest.mark.parametrize("container", ["torch-zip", "torch-legacy"])
@pytest.mark.parametrize("name", MODULES)
def test_the_names_of_every_kind_of_module(tmp_path: Path, name: str, container: str) -> None:
    """What is listed, loaded and written of a pickled module is what state_dict() gives: names, order, bits, ties."""
    torch.manual_seed(0)
    path = tmp_path / "in.pth"
    torch.save(MODULES[name](), path, _use_new_zipfile_serialization=container == "torch-zip")
    expected = torch.load(path, weights_only=False).state_dict()
    with ckpt_tools.open_checkpoint(path) as checkpoint:
        assert checkpoint.container == container
        assert [found.names for found in checkpoint.state_dicts] == [list(expected)]
    ckpt_tools.convert(path, tmp_path / "out.pth", objects="plain", drop="unregistered" if name == "odd" else ())
    loaded = torch.load(tmp_path / "out.pth", weights_only=True)
    assert list(loaded) == list(expected)
    assert_same(dict(loaded), dict(expected))


def test_a_pickled_module_is_stripped_too(tmp_path: Path) -> None:
    """A whole wrapped model in, a plain state dict out, in one step; in a dict as well."""
    torch.save({"net": nn.DataParallel(network()), "epoch": 1}, tmp_path / "in.pth")
    ckpt_tools.convert(tmp_path / "in.pth", tmp_path / "out.pth", objects="plain", strip_module=True)
    loaded = torch.load(tmp_path / "out.pth", weights_only=True)
    network().load_state_dict(loaded["net"])
    ckpt_tools.convert(tmp_path / "in.pth", tmp_path / "w.safetensors", objects="plain", unwrap=True)
    middle = ckpt_tools.inspect(tmp_path / "w.safetensors")
    assert [row["name"] for row in middle.tensors] == list(network().state_dict())


def test_modules_that_hold_one_another_end(tmp_path: Path) -> None:
    """A module inside itself has endless names: refused, not waited for."""
    model = nn.Module()
    model._modules["self"] = model
    model.w = nn.Parameter(torch.ones(1))
    torch.save(model, tmp_path / "in.pth")
    with pytest.raises(LimitError, match="hold one another"):
        ckpt_tools.convert(tmp_path / "in.pth", tmp_path / "out.pth", objects="plain")


def test_subclasses_and_attributes_of_tensors(tmp_path: Path) -> None:
    """A tensor of a class of one's own becomes a plain tensor; plain attributes stay, on Parameters too."""
    labelled = nn.Parameter(torch.ones(2))
    labelled.label, labelled.kind = "head", classes.Colour.RED  # type: ignore[attr-defined]
    data = {"a.w": torch.ones(2).as_subclass(classes.OwnTensor), "b.w": labelled}
    torch.save(data, tmp_path / "in.pth")
    report = ckpt_tools.convert(tmp_path / "in.pth", tmp_path / "out.pth", objects="plain")
    loaded = torch.load(tmp_path / "out.pth", weights_only=True)
    assert type(loaded["a.w"]) is torch.Tensor
    assert vars(loaded["b.w"]) == {"label": "head", "kind": 1}
    assert ("tests.support.classes.OwnTensor", "tensor") in [(fate.name, fate.became) for fate in report.objects]
    ckpt_tools.convert(tmp_path / "in.pth", tmp_path / "drop.pth", objects="drop")
    dropped = torch.load(tmp_path / "drop.pth", weights_only=True)
    assert [element_bytes(value) for value in dropped.values()] == [element_bytes(value) for value in loaded.values()]


class Wrapped(torch.Tensor):
    """A tensor around another, with no storage of its own, as torchao's are."""

    inner: torch.Tensor  # type: ignore[assignment]

    @staticmethod
    def __new__(cls, inner: torch.Tensor) -> Wrapped:
        """A float32 tensor on the outside."""
        made: Wrapped = torch.Tensor._make_wrapper_subclass(cls, inner.shape, dtype=torch.float32)
        made.inner, made.scale = inner, 0.5  # type: ignore[attr-defined]
        return made

    @classmethod
    def __torch_dispatch__(cls, function: Any, kinds: Any, args: Any = (), kwargs: Any = None) -> Any:  # type: ignore[override]
        """Nothing can be done with it but to detach it."""
        return args[0]


def test_tensors_that_need_their_class(tmp_path: Path) -> None:
    """Of a tensor around others the others are left with plain, nothing with drop; a jagged nested one likewise."""
    inner = torch.arange(6, dtype=torch.int8).view(2, 3)
    jagged = torch.nested.nested_tensor([torch.ones(2, 3), torch.zeros(1, 3)], layout=torch.jagged)
    data = {"a.w": Wrapped(inner), "b.w": nn.Parameter(Wrapped(inner), requires_grad=False), "j": jagged, "c.w": torch.ones(1)}
    torch.save(data, tmp_path / "in.pth")
    found = ckpt_tools.inspect(tmp_path / "in.pth")
    assert [(row["kind"], row["shape"], row["dtype"]) for row in found.tensors[:2]] == [("subclass", [2, 3], "float32")] * 2
    assert found.totals["dtypes"] == {"float32": 3, "unknown": 1}  # only its class knows what a jagged one is
    ckpt_tools.convert(tmp_path / "in.pth", tmp_path / "out.pth", objects="plain")
    loaded = torch.load(tmp_path / "out.pth", weights_only=True)
    assert list(loaded) == list(data)
    assert torch.equal(loaded["a.w"]["inner"], inner)
    assert loaded["a.w"]["scale"] == 0.5
    assert torch.equal(loaded["j"]["_values"], jagged.values())
    ckpt_tools.convert(tmp_path / "in.pth", tmp_path / "drop.pth", objects="drop")
    assert list(torch.load(tmp_path / "drop.pth", weights_only=True)) == ["c.w"]
    ckpt_tools.convert(tmp_path / "in.pth", tmp_path / "keep.pth", objects="keep")
    assert torch.equal(torch.load(tmp_path / "keep.pth", weights_only=False)["b.w"].inner, inner)


def test_nested_tensors_and_torch_legacy(tmp_path: Path) -> None:
    """torch cannot load a nested tensor from torch-legacy, whoever wrote it: refused there, and said of its own files."""
    data = {"n": torch.nested.nested_tensor([torch.zeros(2), torch.ones(3)])}
    torch.save(data, tmp_path / "in.pth")
    with pytest.raises(ContainerLimitError, match="nested tensor, which torch saves in torch-legacy and cannot load"):
        ckpt_tools.convert(tmp_path / "in.pth", tmp_path / "out.pth", format="pth-legacy")
    torch.save(data, tmp_path / "old.pth", _use_new_zipfile_serialization=False)
    assert not ckpt_tools.inspect(tmp_path / "old.pth").weights_only["loads"]
    ckpt_tools.convert(tmp_path / "old.pth", tmp_path / "new.pth", objects="plain")
    assert torch.load(tmp_path / "new.pth", weights_only=True)["n"].unbind()[1].tolist() == [1, 1, 1]


def test_nothing_with_a_plain_form_is_left(tmp_path: Path) -> None:
    """An object alone, without any content, gives an error and no file."""
    torch.save(classes.Plain(), tmp_path / "in.pth")
    with pytest.raises(NothingMatchedError):
        ckpt_tools.convert(tmp_path / "in.pth", tmp_path / "out.pth", objects="plain")


def test_nothing_is_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """No class of the file is made, no state set, no module of it imported."""
    path = saved(tmp_path, [filled(classes.Stateful, data=[1]), classes.Reduced(1)])

    def boom(*args: Any) -> Any:
        raise AssertionError("run")

    monkeypatch.setattr(classes.Stateful, "__setstate__", boom)
    monkeypatch.setattr(classes.Reduced, "__init__", boom)
    for policy in ("plain", "drop", "keep"):
        ckpt_tools.convert(path, tmp_path / "out.pth", objects=policy, overwrite=True)
    with pytest.raises(CkptError):
        ckpt_tools.convert(path, tmp_path / "out.pth", overwrite=True)


# --- tensors that are no plain views


def unusual() -> dict[str, torch.Tensor]:
    """One of each kind."""
    dense = torch.eye(3)
    with warnings.catch_warnings():  # torch calls some of these a beta or a prototype
        warnings.simplefilter("ignore")
        return {
            "sparse": dense.to_sparse(),
            "sparse_csr": dense.to_sparse_csr(),
            "sparse_csc": dense.to_sparse_csc(),
            "quantized": torch.quantize_per_tensor(dense, 0.1, 0, torch.qint8),
            "per_channel": torch.quantize_per_channel(dense, torch.tensor([0.1, 0.2, 0.3]), torch.zeros(3), 0, torch.quint8),
            "nested": torch.nested.nested_tensor([torch.zeros(2), torch.ones(3)]),
            "complex32": torch.ones(2, dtype=torch.complex32),
        }


@pytest.mark.filterwarnings("ignore:.*(beta|prototype|Sparse|ComplexHalf|TypedStorage).*:UserWarning")
@pytest.mark.parametrize("kind", list(unusual()))
def test_unusual_tensors_stay(tmp_path: Path, kind: str) -> None:
    """Sparse, quantised, nested and complex32 tensors stay as they are, are listed, and refused for safetensors by name."""
    tensor = unusual()[kind]
    loaded, _ = plain(tmp_path, {"m.w": tensor})
    assert_equal_unusual(loaded["m.w"], tensor)
    row = next(row for row in ckpt_tools.inspect(tmp_path / "in.pth").tensors if row["where"][-1] == "m.w")
    assert row["kind"] == kind.partition("_")[0].replace("per", "quantized").replace("complex32", "tensor")
    with pytest.raises(ContainerLimitError, match=r"'?m\.w'?"):
        ckpt_tools.convert(tmp_path / "in.pth", tmp_path / "out.safetensors", select="value", overwrite=True)


def assert_equal_unusual(one: torch.Tensor, two: torch.Tensor) -> None:
    """The same layout, dtype, shape and numbers."""
    assert (one.layout, one.dtype, one.is_quantized, one.is_nested) == (two.layout, two.dtype, two.is_quantized, two.is_nested)
    if two.is_nested:
        assert [part.tolist() for part in one.unbind()] == [part.tolist() for part in two.unbind()]
    elif two.is_quantized:
        assert one.int_repr().tolist() == two.int_repr().tolist()
        assert one.qscheme() == two.qscheme()
    else:
        assert one.to_dense().to(torch.complex64).tolist() == two.to_dense().to(torch.complex64).tolist()


@pytest.mark.parametrize("wrap", [lambda model: model, nn.DataParallel], ids=["plain", "wrapped"])
def test_inspect_names_a_module_as_its_state_dict(tmp_path: Path, wrap: Any) -> None:
    """inspect shows the names of `state_dict()` in its order, at the module's path; what it hides and its settings too."""
    model = wrap(module())
    torch.save({"nets": [model], "epoch": 1}, tmp_path / "in.pth")
    found = ckpt_tools.inspect(tmp_path / "in.pth")
    assert [row["name"] for row in found.tensors if row["name"]] == list(model.state_dict())
    assert [row["where"][:2] for row in found.state_dicts] == [["nets", 0]]
    assert found.state_dicts[0]["wrappers"] == (["module."] if isinstance(model, nn.DataParallel) else [])
    assert [row["where"][-1] for row in found.tensors if row["name"] is None] == ["scratch"]
    prefix = "nets.0.module" if isinstance(model, nn.DataParallel) else "nets.0"
    assert (found.values["epoch"], found.values[f"{prefix}.1.eps"]) == (1, 1e-05)
    assert all("--objects plain" in finding.fix for finding in found.findings)


def test_many_short_bytes_in_a_row(tmp_path: Path) -> None:
    """They are written without asking for each what it is; what torch reads is the same, long ones between them too."""
    rows = [bytes([number % 256, number // 256]) for number in range(1000)]
    state = {
        "a.w": torch.zeros(2),
        "many": rows,
        "long": [*rows[:300], b"x" * 100, *rows[300:600]],
        "mixed": [*rows[:300], None, "a"],
    }
    torch.save(state, tmp_path / "in.pth", pickle_protocol=4)
    ckpt_tools.convert(tmp_path / "in.pth", tmp_path / "out.pth")
    found = torch.load(tmp_path / "out.pth", weights_only=False)
    assert [found[key] for key in ("many", "long", "mixed")] == [state[key] for key in ("many", "long", "mixed")]


def test_bytes_become_no_more_tensors_than_a_file_has(tmp_path: Path) -> None:
    """Each becomes a tensor with a record of its own where torch 2.4 is to read them, one that is used again in every place."""
    rows = [b"ab" * (number + 1) for number in range(50)]
    for name, values in {"several": rows, "one": [rows[0]] * 50}.items():
        torch.save({"a.w": torch.zeros(2), "x": values}, tmp_path / f"{name}.pth", pickle_protocol=4)
        ckpt_tools.convert(tmp_path / f"{name}.pth", tmp_path / f"{name}.out.pth", objects="plain")
        with limits.raised(tensors=1), pytest.raises(LimitError, match="tensors") as caught:
            ckpt_tools.convert(tmp_path / f"{name}.pth", tmp_path / "out.pth", objects="plain")
        assert "raise the limit: `limits.raised(tensors=" in caught.value.fix
