"""`--objects`: what becomes of everything in a checkpoint that is neither plain data nor a tensor."""

import argparse
import collections
import datetime
import decimal
import fractions
import pickletools
import re
import types
import uuid
import zipfile
from collections.abc import Set
from pathlib import Path, PurePosixPath, PureWindowsPath
from typing import Any

import numpy as np
import pytest
import torch

import ckpt_tools
from ckpt_tools.errors import ObjectsError
from tests.support import classes
from tests.support.graphs import assert_same
from tests.support.samples import shown
from tests.support.zips import rewrite

UTC2 = datetime.timezone(datetime.timedelta(hours=2))


def saved(tmp_path: Path, value: Any, protocol: int = 2) -> Path:
    path = tmp_path / "in.pth"
    torch.save({"value": value, "w": torch.ones(1)}, path, pickle_protocol=protocol)
    return path


def plain(tmp_path: Path, value: Any, protocol: int = 2) -> tuple[Any, ckpt_tools.Converted]:
    """The value with --objects plain, as weights_only loads it; and the report."""
    target = tmp_path / "out.pth"
    report = ckpt_tools.convert(saved(tmp_path, value, protocol), target, objects="plain", overwrite=True)
    newer = (
        {"torch uint16", "torch uint32", "torch uint64"} if "newer-dtypes" in [note.code for note in report.notes] else set()
    )
    assert_torch_2_4_takes(target, newer)
    return torch.load(target, weights_only=True).get("value", "dropped"), report


# What torch 2.4's weights_only unpickler takes (torch/_weights_only_unpickler.py): opcodes, and globals that we write.
OPCODES_2_4 = re.compile(
    "GLOBAL|NEWOBJ|REDUCE|BUILD|APPENDS?|SETITEMS?|MARK|TUPLE[123]?|NONE|NEWFALSE|NEWTRUE|EMPTY_(TUPLE|LIST|DICT|SET)|BININT[12]?"
    "|BINFLOAT|BINUNICODE|SHORT_BINSTRING|BINPERSID|(LONG_)?BIN(GET|PUT)|LONG1|PROTO|STOP"
)
GLOBALS_2_4 = re.compile(
    r"torch(\.storage)? \w+Storage|torch (Size|Tensor|device|(bfloat|float|int)\d+|uint8|bool|complex\d+|q?u?int\d+|quint\dx\d"
    r"|float8_e[45]m[23]fn|sparse_\w+|strided|per_\w+|float8_\w+)|torch\.nn\.parameter Parameter|torch\._utils _rebuild_\w+"
    r"|torch\._tensor _rebuild_from_type_v2|torch\.serialization _get_layout|collections (OrderedDict|Counter)"
)


def assert_torch_2_4_takes(path: Path, newer: Set[str] = frozenset()) -> None:
    """A file uses only the globals and opcodes that torch 2.4 allows: each later version allows them too."""
    with zipfile.ZipFile(path) as archive:
        stream = archive.read(next(name for name in archive.namelist() if name.endswith("/data.pkl")))
    for opcode, argument, _ in pickletools.genops(stream):
        assert OPCODES_2_4.fullmatch(opcode.name)
        if opcode.name == "GLOBAL" and argument not in newer:
            assert GLOBALS_2_4.fullmatch(str(argument)), argument
            assert argument not in ("torch uint16", "torch uint32", "torch uint64")


def filled(kind: type, **attributes: Any) -> Any:
    made = kind()
    for name, value in attributes.items():
        setattr(made, name, value)
    return made


def defaults(**items: Any) -> Any:
    return collections.defaultdict(list, items)


def mapping(items: dict[str, Any], **attributes: Any) -> classes.Mapping:
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
    (classes.Colour.GREEN, 2, "number"), (classes.Mode.FAST, "fast", "text"),
    (classes.Bits.ONE | classes.Bits.TWO, 3, "number"), (filled(classes.Plain, a=1, b=[2]), {"a": 1, "b": [2]}, "dict"),
    (filled(classes.Outer.Inner, a=1), {"a": 1}, "dict"),
    (filled(classes.Slotted, left=1, right=(2,)), {"left": 1, "right": (2,)}, "dict"),
    (filled(classes.Both, left=1, other=2), {"other": 2, "left": 1}, "dict"),
    (mapping({"a": 1}, b=2), {"a": 1, "b": 2}, "dict"), (classes.Sequence([1, 2]), [1, 2], "list"),
    (classes.Label("name"), "name", "text"), (classes.Count(4), 4, "number"), (classes.Pair(1, "b"), (1, "b"), "tuple"),
    (classes.Pair(1, [2]), [1, [2]], "list"), (classes.Reduced(1, [2]), [1, [2]], "list"),
    (classes.Keyword(value=3), {"value": 3}, "dict"), (filled(classes.Stateful, data=[1]), ["state", [1]], "list"),
    (classes.Plain, "tests.support.classes.Plain", "text"), (classes.function, "tests.support.classes.function", "text"),
    (ValueError("why"), "why", "text"),
]  # fmt: skip


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
    torch.save({"value": value, "args": argparse.Namespace(a=1), "w": torch.ones(1)}, tmp_path / "in.pth")
    report = ckpt_tools.convert(tmp_path / "in.pth", tmp_path / "out.pth", objects="drop")
    assert set(torch.load(tmp_path / "out.pth", weights_only=False)) == {"args", "w"}
    assert ["value"] in [fate.where for fate in report.objects if fate.became == "dropped"]


def test_all_unknown_objects_are_listed(tmp_path: Path) -> None:
    with pytest.raises(ObjectsError) as caught:
        ckpt_tools.convert(
            saved(tmp_path, [classes.Colour.RED, {"a": classes.Label("x")}, classes.Plain]), tmp_path / "out.pth"
        )
    for line in ("value.0: {}.Colour", "value.1.a: {}.Label", "value.2: {}.Plain"):
        assert line.format("tests.support.classes") in caught.value.why


def test_drop_leaves_nothing_broken(tmp_path: Path) -> None:
    """A known object that could not be made without what is dropped is dropped with it."""
    class_of_default: Any = collections.defaultdict(classes.Plain, {"a": 1})
    value = {
        "default": class_of_default, "list": [1, classes.Plain(), 2], "tuple": (1, classes.Plain(), 2),
        "set": {1, classes.Mode.FAST}, "matrix": np.ones(2).view(classes.Array), "key": {classes.Colour.RED: 1, "b": 2},
    }  # fmt: skip
    path = saved(tmp_path, value)
    ckpt_tools.convert(path, tmp_path / "out.pth", objects="drop")
    loaded = torch.load(tmp_path / "out.pth", weights_only=False)["value"]
    assert loaded == {"default": {"a": 1}, "list": [1, 2], "tuple": (1, None, 2), "set": {1}, "key": {"b": 2}}


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
    loaded = plain(tmp_path, value)[0]
    assert type(loaded) is type(expected)
    assert loaded == expected if type(expected) is dict else sorted(map(repr, loaded)) == sorted(map(repr, expected))


def test_objects_as_keys_do_not_lose_their_values(tmp_path: Path) -> None:
    """An object that has no hashable form is named after its class, each with its own number."""
    loaded, report = plain(
        tmp_path, {filled(classes.Plain, a=1): "x", filled(classes.Plain, a=2): "y", "tests.support.classes.Plain": 0}
    )
    assert loaded == {
        "tests.support.classes.Plain 2": "x", "tests.support.classes.Plain 3": "y", "tests.support.classes.Plain": 0,
    }  # fmt: skip
    assert [fate.became for fate in report.objects] == ["text", "text"]


def test_no_two_objects_become_one_key(tmp_path: Path) -> None:
    """Keys that only their objects told apart stay apart, in sets as well."""
    twins = [filled(classes.Plain, a=1), filled(classes.Plain, a=1)]
    assert plain(tmp_path, dict.fromkeys(twins, 0))[0] == {"tests.support.classes.Plain": 0, "tests.support.classes.Plain 2": 0}
    assert plain(tmp_path, set(twins))[0] == ["tests.support.classes.Plain", "tests.support.classes.Plain 2"]
    assert plain(tmp_path, {classes.Colour.RED: 0, classes.Bits.ONE: 1})[0] == {1: 0, "tests.support.classes.Bits": 1}


# --- NumPy

NUMBERS = ["?", "i1", "i2", "i4", "i8", "u1", "u2", "u4", "u8", "f2", "f4", "f8", "c8", "c16"]


@pytest.mark.parametrize("order", ["<", ">"])
@pytest.mark.parametrize("module", [b"numpy._core.", b"numpy.core."])
def test_numpy_scalars(tmp_path: Path, module: bytes, order: str) -> None:
    """A NumPy scalar becomes Python's, whatever its type, byte order, and NumPy's name for its own module."""
    values = {code: np.array([1], dtype=order + code)[0] for code in NUMBERS}
    rewrite(saved(tmp_path, values), tmp_path / "old.pth", change=lambda name, data: data.replace(b"numpy._core.", module))
    ckpt_tools.convert(tmp_path / "old.pth", tmp_path / "out.pth", objects="plain")
    for code, loaded in torch.load(tmp_path / "out.pth", weights_only=True)["value"].items():
        assert type(loaded) in (bool, int, float) or loaded.dtype is torch.complex128  # torch 2.4 takes no complex number
        assert complex(loaded) == complex(values[code])


@pytest.mark.parametrize("protocol", [2, 4, 5])
@pytest.mark.parametrize("order", ["<", ">"])
@pytest.mark.parametrize("layout", ["C", "F"])
def test_numpy_arrays(tmp_path: Path, order: str, layout: str, protocol: int) -> None:
    """An array becomes a tensor of the same values, shape and type; Fortran order becomes its strides."""
    values: dict[str, Any] = {
        code: np.array([[0, 1, 2], [3, 4, 5]], dtype=order + code, order=layout)  # type: ignore[call-overload]
        for code in NUMBERS
    }
    values |= {"empty": np.zeros((0, 3)), "scalar": np.array(2.5), "thin": np.ones((2, 1, 1), dtype=np.float32)}
    loaded, report = plain(tmp_path, values, protocol)
    for name, value in values.items():
        assert loaded[name].numpy().dtype == value.dtype.newbyteorder("=")
        assert np.array_equal(loaded[name].numpy(), value)
        assert name not in NUMBERS or loaded[name].stride() == ((3, 1) if layout == "C" else (1, 2))
    assert {fate.became for fate in report.objects} == {"tensor"}


def test_numpy_text(tmp_path: Path) -> None:
    assert plain(tmp_path, np.str_("café"))[0] == "café"
    assert plain(tmp_path, np.bytes_(b"raw"))[0] == "raw"
    assert plain(tmp_path, np.array([1, "a", None], dtype=object))[0] == [1, "a", None]
