"""Pickles that torch's weights_only reads otherwise than their words say: names, states, keys, sets, bits."""

from __future__ import annotations

import hashlib
import struct
from pathlib import Path

import pytest
import torch

import ckpt_tools
from ckpt_tools.errors import PickleError, TensorError
from tests.fuzz import oracle
from tests.hostile import pickles as p
from tests.hostile.refusals import expect_refused, write
from tests.hostile.zips import torch_zip

FLOATS = {"0": struct.pack("<6f", *range(6)), "1": struct.pack("<q", 2)}
OTHER = p.tensor(p.sizes(3, 2), p.sizes(2, 1))
ARGUMENTS = p.tuple_of(p.storage(), b"K\x00", p.sizes(2, 3), p.sizes(3, 1), p.FALSE, p.ORDERED_DICT)
FROM_TYPE = p.glob("torch._tensor", "_rebuild_from_type_v2")


def file_of(body: bytes, folder: Path, protocol: int = 2) -> Path:
    """A torch zip of this pickle."""
    return write(folder, torch_zip(b"\x80" + bytes([protocol]) + body + p.STOP, FLOATS))


def listed(body: bytes, folder: Path, protocol: int = 2) -> list[oracle.Row]:
    """What `inspect` lists of a pickle, which is what torch loads."""
    path = file_of(body, folder, protocol)
    rows, theirs = ckpt_tools.inspect(path).tensors, oracle.torch_rows(path)
    assert not isinstance(theirs, str), theirs
    assert oracle.difference(rows, theirs) is None
    return rows


@pytest.mark.filterwarnings("ignore:Detected pickle protocol:UserWarning")
@pytest.mark.parametrize(
    ("module", "name", "protocol"),
    [
        ("UserDict", "OrderedDict", 3), ("UserDict", "OrderedDict", 4), ("__builtin__", "set", 5),
        ("torch", "_utils._rebuild_tensor_v2", 2), ("torch.nn", "parameter.Parameter", 4),
        ("torch", "nn.parameter.Parameter", 2),
    ],
)  # fmt: skip
def test_a_name_that_weights_only_takes_for_another(module: str, name: str, protocol: int, tmp_path: Path) -> None:
    """torch maps names of Python 2 in every protocol, and does not see where a module's name ends: Python does."""
    path = file_of(p.dict_of(w=p.tensor(), x=p.glob(module, name)), tmp_path, protocol)
    assert torch.load(path, weights_only=True)["x"] is not None
    expect_refused(path, PickleError, f"names '{name}' of '{module}'", "Two programs would read two files.")


def test_a_name_of_python_2_in_its_protocol(tmp_path: Path) -> None:
    """There both map it."""
    made = p.call("UserDict", "OrderedDict")
    assert [row["name"] for row in listed(made + p.text("w") + p.tensor() + p.SETITEM, tmp_path)] == ["w"]


def test_a_name_of_python_2_that_weights_only_refuses(tmp_path: Path) -> None:
    """There is one reading of it: a class of the user's own in a newer protocol."""
    path = file_of(p.dict_of(w=p.tensor(), x=p.glob("commands", "Net")), tmp_path, 4)

    assert "commands.Net" in ckpt_tools.inspect(path).weights_only["refused"]


@pytest.mark.parametrize("cls", [None, p.glob("torch", "Tensor"), p.glob("torch.nn.parameter", "Parameter")])
def test_an_object_as_the_state_of_a_tensor(cls: bytes | None, tmp_path: Path) -> None:
    """Its `items` may tell anything, `data` too."""
    state = p.call("models", "State", p.list_of(p.tuple_of(p.text("data"), OTHER)))
    if cls is None:
        made = p.call("torch._utils", "_rebuild_parameter_with_state", p.tensor(), p.TRUE, p.ORDERED_DICT, state)
    else:
        made = FROM_TYPE + p.tuple_of(p.glob("torch._utils", "_rebuild_tensor_v2"), cls, ARGUMENTS, state) + p.REDUCE
    expect_refused(file_of(p.dict_of(w=made), tmp_path), TensorError, "The state of a tensor is an object")


def test_a_subclass_takes_a_state_in_its_own_way(tmp_path: Path) -> None:
    """Its own class is needed, and named."""
    state = p.call("models", "State")
    cls = p.glob("models", "Quantized")
    made = FROM_TYPE + p.tuple_of(p.glob("torch._utils", "_rebuild_tensor_v2"), cls, ARGUMENTS, state) + p.REDUCE
    assert "models.Quantized" in ckpt_tools.inspect(file_of(p.dict_of(w=made), tmp_path)).weights_only["refused"]


SIZE = p.call("torch", "Size", p.call("torch", "Size", p.sizes(2)))


@pytest.mark.parametrize(
    "given",
    [
        p.call("torch", "Size", p.sizes(2)),
        p.call("_codecs", "encode", p.text("\x02"), p.text("latin1")),
        p.tuple_of(p.tensor(p.sizes(), p.sizes(), on=p.storage("1", 1, "LongStorage"))),
    ],
    ids=["size", "bytes", "tensor"],
)
def test_a_size_of_something_else_as_a_key(given: bytes, tmp_path: Path) -> None:
    """It may be equal to another key: torch kept one tensor of two."""
    key = p.call("torch", "Size", given)
    for first in (key, p.tuple_of(key)):
        second = p.tuple_of(b"K\x02") if first is key else p.tuple_of(p.tuple_of(b"K\x02"))
        body = p.EMPTY_DICT + p.pairs([(first, p.tensor()), (second, OTHER)])
        assert len(torch.load(file_of(body, tmp_path), weights_only=True)) == 1
        expect_refused(file_of(body, tmp_path), PickleError, "torch.Size as a dict key")


def test_a_size_as_a_key(tmp_path: Path) -> None:
    """A plain one is known by its numbers."""
    body = p.EMPTY_DICT + p.pairs([(p.call("torch", "Size", p.sizes(2)), p.tensor()), (p.call("torch", "Size"), p.tensor())])
    assert len(listed(body, tmp_path)) == 2


SET = p.glob("builtins", "set")
TWICE = p.tensor() + p.put(7)


@pytest.mark.parametrize(
    ("given", "said"),
    [
        (p.tuple_of(p.tensor()), "not a list"),
        (p.tuple_of(p.EMPTY_DICT + p.tensor() + b"K\x01" + p.SETITEM), "not a list"),
        (p.tuple_of(p.text("abc")), "not a list"),
        (p.tuple_of(p.list_of(TWICE, p.get(7))), "twice"),
        (p.tuple_of(p.list_of(b"K\x01", p.TRUE)), "twice"),
        (p.tuple_of(p.list_of(p.EMPTY_LIST)), "cannot hash"),
    ],
)  # fmt: skip
def test_a_set_of_something_else(given: bytes, said: str, tmp_path: Path) -> None:
    """A set of a tensor holds its rows, of a dict its keys; of two equal elements it holds one."""
    expect_refused(file_of(p.dict_of(w=p.tensor(), x=SET + given + p.REDUCE), tmp_path), PickleError, said)


def test_a_set_of_tensors(tmp_path: Path) -> None:
    """Of a list or a tuple it is what they hold."""
    body = p.tuple_of(
        *(p.call("builtins", "set", elements) for elements in (p.list_of(p.tensor()), p.tuple_of(p.tensor()), p.EMPTY_LIST)),
        p.call("builtins", "set"),
    )
    assert len(ckpt_tools.inspect(file_of(body, tmp_path)).tensors) == 2
    assert len(torch.load(file_of(body, tmp_path), weights_only=True)[0]) == 1


@pytest.mark.parametrize("name", ["items", "keys", "values", "get", "update"])
def test_an_attribute_that_hides_a_method(name: str, tmp_path: Path) -> None:
    """An OrderedDict whose `items` is another: `load_state_dict` found nothing in it."""
    body = p.call("collections", "OrderedDict") + p.text("w") + p.tensor() + p.SETITEM
    body += p.EMPTY_DICT + p.text(name) + p.glob("torch", "Size") + p.SETITEM + p.BUILD
    assert getattr(torch.load(file_of(body, tmp_path), weights_only=True), name)() == ()
    expect_refused(file_of(body, tmp_path), PickleError, f"an attribute '{name}'", "hides its method")


@pytest.mark.parametrize(
    ("shape", "stride", "known"),
    [((2, 3), (3, 1), True), ((2, 2), (3, 1), False), ((4, 4), (0, 1), False), ((3, 2), (1, 3), False)],
)
def test_a_tensor_of_another_device_may_lie_otherwise(
    shape: tuple[int, ...], stride: tuple[int, ...], known: bool, tmp_path: Path
) -> None:
    """`to` lays out anew what has gaps; the strides of the copy are told where they are known."""
    source = p.tensor(p.sizes(*shape), p.sizes(*stride))
    function = "_rebuild_device_tensor_from_cpu_tensor"
    made = p.call("torch._utils", function, source, p.glob("torch", "float16"), p.text("cpu"), p.FALSE)
    path = file_of(p.dict_of(w=made), tmp_path)
    theirs = torch.load(path, weights_only=True)["w"].stride()
    (row,) = ckpt_tools.inspect(path).tensors
    assert row["stride"] == (list(theirs) if known else None)


def test_a_parameter_made_a_tensor(tmp_path: Path) -> None:
    """`as_subclass(torch.Tensor)` takes the class off."""
    function = p.glob("torch._utils", "_rebuild_parameter")
    given = p.tuple_of(function, p.glob("torch", "Tensor"), p.tuple_of(p.tensor(), p.FALSE, p.ORDERED_DICT), p.NONE)
    assert [row["kind"] for row in listed(p.dict_of(w=FROM_TYPE + given + p.REDUCE), tmp_path)] == ["tensor"]


@pytest.mark.parametrize(
    ("bit", "kind", "count"), [("neg", "BoolStorage", 24), ("conj", "FloatStorage", 6), ("conj", "BoolStorage", 24)]
)
def test_a_bit_that_no_number_has(bit: str, kind: str, count: int, tmp_path: Path) -> None:
    """torch loads it and fails when its values are asked for, in one case with a crash."""
    given = p.tuple_of(
        p.storage("0", count, kind), b"K\x00", p.sizes(2, 3), p.sizes(3, 1), p.FALSE, p.ORDERED_DICT,
        p.EMPTY_DICT + p.text(bit) + p.TRUE + p.SETITEM,
    )  # fmt: skip
    made = p.glob("torch._utils", "_rebuild_tensor_v2") + given + p.REDUCE
    expect_refused(file_of(p.dict_of(w=made), tmp_path), TensorError, "bit")


def test_a_counter_of_a_list(tmp_path: Path) -> None:
    """torch keeps the order of the list, which is not that of what the Counter is given later."""
    made = p.call("collections", "Counter", p.list_of(p.text("b"), p.text("a")))
    body = made + p.pairs([(p.text("a"), p.tensor()), (p.text("b"), OTHER)])
    assert list(torch.load(file_of(body, tmp_path), weights_only=True)) == ["b", "a"]
    expect_refused(file_of(body, tmp_path), PickleError, "A Counter is made of something that is not a dict of numbers")


@pytest.mark.parametrize("dtype", ["qint8", "quint8", "int4", "uint2", "bits8", "float8_e8m0fnu"])
def test_bytes_of_a_dtype_that_torch_does_not_copy(dtype: str, tmp_path: Path) -> None:
    """A view that is not contiguous is gathered by its width: quantised ones crashed the interpreter."""
    storage = p.storage(
        "0", 24, "QInt8Storage" if dtype == "qint8" else "QUInt8Storage" if dtype == "quint8" else "ByteStorage"
    )
    given = [storage, b"K\x00", p.sizes(2, 3), p.sizes(1, 2), p.FALSE, p.ORDERED_DICT]
    kind = "_rebuild_tensor_v2" if dtype.startswith(("qint", "quint")) else "_rebuild_tensor_v3"
    given += [p.glob("torch", dtype)] if kind.endswith("v3") else []
    path = file_of(p.dict_of(w=p.call("torch._utils", kind, *given)), tmp_path)
    (digest,) = ckpt_tools.check(path, digest=True).digests
    data = FLOATS["0"]
    rows = bytes(data[row + 2 * column] for row in range(2) for column in range(3))
    assert digest.sha256 == hashlib.sha256(f"{dtype} [2,3]\n".encode() + rows).hexdigest()
