"""Tensors that do not fit their storages, and unusual ones: rows 69 to 76."""

import json
import struct
from pathlib import Path
from pickle import UnpicklingError

import pytest
import torch

import ckpt_tools
from ckpt_tools.errors import CkptError, ObjectsError, OutputError, PickleError, TensorError
from tests.hostile import pickles as p
from tests.hostile.refusals import expect_convert_refused, expect_refused, write
from tests.hostile.test_hostile_readings import listed
from tests.hostile.zips import torch_zip

FLOATS = {"0": struct.pack("<6f", *range(6))}


def one(opcodes: bytes, storages: dict[str, bytes] | None = None) -> bytes:
    """A state dict with this tensor as `a.w`."""
    return torch_zip(p.pickle(p.dict_of(**{"a.w": opcodes})), FLOATS if storages is None else storages)


def test_71_empty_views_reach_nowhere(tmp_path: Path) -> None:
    """A tensor without elements may lie anywhere, as in torch."""
    path = write(tmp_path, one(p.tensor(p.sizes(0, 3), p.sizes(3, 1), p.integer(1000))))
    assert ckpt_tools.inspect(path).tensors[0]["shape"] == list(torch.load(path)["a.w"].shape) == [0, 3]


def test_a_size_that_torch_has_no_number_for(tmp_path: Path) -> None:
    """Beside a size of 0 too, where there are no elements."""
    path = write(tmp_path, one(p.tensor(p.sizes(0, 2**64 - 1), p.sizes(1, 1))))
    expect_refused(path, TensorError, "size over 2**63")
    with pytest.raises(TypeError, match="Overflow"):
        torch.load(path)


@pytest.mark.parametrize("state", [p.tuple_of(p.dict_of(a=b"K\x01")), b"K\x01", p.tuple_of(b"N", b"K\x01")])
def test_attributes_that_torch_does_not_set(state: bytes, tmp_path: Path) -> None:
    """A tensor's state is a dict, or a pair of dicts."""
    arguments = p.tuple_of(p.storage(), b"K\x00", p.sizes(2, 3), p.sizes(3, 1), p.FALSE, p.ORDERED_DICT)
    made = p.call("torch._tensor", "_rebuild_from_type_v2",
                  p.glob("torch._utils", "_rebuild_tensor_v2"), p.glob("torch", "Tensor"), arguments, state)  # fmt: skip
    path = write(tmp_path, one(made))
    expect_refused(path, TensorError, "attributes of its own")
    with pytest.raises((RuntimeError, AttributeError)):
        torch.load(path)


@pytest.mark.parametrize("shape", [(1, 2**34), (2**34,), (2, 3, 2**32)])
def test_71_expanded_beyond_memory(shape: tuple[int, ...], tmp_path: Path) -> None:
    """One number, expanded to terabytes: a .pth keeps the view; safetensors, which cannot, says what it would take."""
    wide = tuple(size << 8 for size in shape)
    path = write(tmp_path, one(p.tensor(p.sizes(*wide), p.sizes(*[0] * len(wide)))))
    ckpt_tools.convert(path, tmp_path / "out.pth")
    assert torch.load(tmp_path / "out.pth")["a.w"].shape == wide
    expect_convert_refused(path, OutputError, "no space", "It needs", target="out.safetensors")


def test_73_key_with_a_slash_that_is_there(tmp_path: Path) -> None:
    """The literal name, where the record exists: torch finds it, and so do we."""
    path = write(tmp_path, one(p.tensor(on=p.storage("a/b")), {"a/b": FLOATS["0"]}))
    ckpt_tools.convert(path, tmp_path / "out.pth")
    assert torch.equal(torch.load(tmp_path / "out.pth")["a.w"], torch.load(path)["a.w"])


@pytest.mark.parametrize("device", ["", "cuda:99999", "tpu", "x y", "\u2603"])
def test_74_odd_device(device: str, tmp_path: Path) -> None:
    """A device tag is text, and stays as it is."""
    path = write(tmp_path, one(p.tensor(on=p.storage(device=device))))
    assert ckpt_tools.inspect(path).tensors[0]["device"] == device
    ckpt_tools.convert(path, tmp_path / "same.pth")
    expected = device or "cpu"
    assert ckpt_tools.inspect(tmp_path / "same.pth").tensors[0]["device"] == expected
    ckpt_tools.convert(path, tmp_path / "out.pth", map_location="cpu")
    assert torch.load(tmp_path / "out.pth")["a.w"].shape == (2, 3)


def test_76_parameters_in_parameters(tmp_path: Path) -> None:
    """Thousands of parameters around each other: no recursion."""
    meta = p.call(
        "torch._utils", "_rebuild_meta_tensor_no_storage", p.glob("torch", "float32"), p.sizes(1), p.sizes(1), p.FALSE
    )
    head = p.MARK.join([p.glob("torch._utils", "_rebuild_parameter")] * 2000)
    body = head + p.MARK + meta + (p.FALSE + p.NONE + p.TUPLE + p.REDUCE) * 2000
    expect_refused(write(tmp_path, one(body)), TensorError, "malformed arguments")


def test_76_deep_state_of_a_tensor(tmp_path: Path) -> None:
    """Tensors in the attributes of tensors, a thousand deep."""
    function, cls = p.glob("torch._utils", "_rebuild_tensor_v2"), p.glob("torch.nn.parameter", "Parameter")
    inner = p.tuple_of(p.storage(), b"K\x00", p.sizes(2, 3), p.sizes(3, 1), p.FALSE, p.ORDERED_DICT)
    start = p.glob("torch._tensor", "_rebuild_from_type_v2") + p.MARK + function + cls + inner
    body = (start + p.EMPTY_DICT + p.text("x")) * 1000 + p.NONE + (p.SETITEM + p.TUPLE + p.REDUCE) * 1000
    path = write(tmp_path, one(body))
    assert json.dumps(ckpt_tools.inspect(path).to_json())
    with pytest.raises(ckpt_tools.CkptError):
        ckpt_tools.convert(path, tmp_path / "out.pth", objects="plain", select="nothing")


# --- what torch makes of a pickle by other ways than from a storage


ORDERED = p.glob("collections", "OrderedDict")


@pytest.mark.parametrize(
    "body",
    [
        p.call("collections", "OrderedDict", p.dict_of(a=p.tensor())),
        p.call("collections", "OrderedDict", p.tuple_of(p.tuple_of(p.text("a"), p.tensor()))),
        ORDERED + p.EMPTY_TUPLE + b"\x81" + p.text("a") + p.tensor() + p.SETITEM,
        ORDERED + p.tuple_of(p.dict_of(b=p.tensor())) + b"\x81" + p.text("a") + p.tensor() + p.SETITEM,
    ],
    ids=["of a dict", "of a tuple", "new", "new, of a dict"],
)  # fmt: skip
def test_ordered_dicts_made_of_something(body: bytes, tmp_path: Path) -> None:
    """`OrderedDict({...})` hid its tensors; one made by `__new__` was no state dict."""
    assert [row["name"] for row in listed(body, tmp_path)] == ["a"]


def test_a_copy_of_a_dict_is_made_at_once(tmp_path: Path) -> None:
    """What the dict is given later is not in the OrderedDict that was made of it."""
    first, second = p.text("a") + p.tensor() + p.SETITEM, p.text("b") + p.tensor() + p.SETITEM
    body = p.tuple_of(p.EMPTY_DICT + p.put(0) + first, ORDERED + p.get(0) + p.TUPLE1 + p.REDUCE, p.get(0) + second)
    assert [row["where"] for row in listed(body, tmp_path)] == [[0, "a"], [0, "b"], [1, "a"], [2, "a"], [2, "b"]]


OTHER = p.tensor(p.sizes(3), p.sizes(1))


def test_a_state_with_other_attributes_is_kept(tmp_path: Path) -> None:
    """What torch's tensors have no use for stays an attribute."""
    opcodes = p.call(
        "torch._utils", "_rebuild_parameter_with_state", p.tensor(), p.TRUE, p.ORDERED_DICT, p.dict_of(partition_dim=b"K\x01")
    )
    rows = listed(p.dict_of(**{"a.w": opcodes}), tmp_path)
    assert (rows[0]["kind"], rows[0]["requires_grad"]) == ("parameter", True)


COMPLEX = p.call("builtins", "complex", b"G\x3f\xf0" + bytes(6), b"G" + bytes(8))
DEVICE = p.call("torch", "device", p.text("cpu"))


@pytest.mark.parametrize(
    ("one_key", "other"),
    [
        (p.call("torch", "Size", p.list_of(b"K\x01")), p.tuple_of(b"K\x01")), (COMPLEX, b"K\x01"), (DEVICE, DEVICE),
        (p.call("torch", "Size", p.sizes(1)), p.call("torch", "Size", p.list_of(p.TRUE))),
    ],
)  # fmt: skip
def test_keys_that_calls_make_equal(one_key: bytes, other: bytes, tmp_path: Path) -> None:
    """`torch.Size([1])` is `(1,)` and `complex(1, 0)` is 1 to Python: the later value wins, and we listed both."""
    rows = listed(p.EMPTY_DICT + p.pairs([(one_key, p.tensor()), (other, OTHER)]), tmp_path)
    assert [row["shape"] for row in rows] == [[3]]


def test_a_counter_of_tensors(tmp_path: Path) -> None:
    """`Counter({...})` holds what the dict holds; one of numbers is as it was."""
    counters = [p.call("collections", "Counter", p.dict_of(a=value)) for value in (p.tensor(), p.list_of(p.tensor()), b"K\x02")]
    copied = p.call("collections", "Counter", p.call("collections", "Counter", p.dict_of(a=p.tensor())))
    for body in (*counters[:2], copied):
        expect_refused(write(tmp_path, torch_zip(p.pickle(body), FLOATS)), PickleError, "A Counter is made of")
    assert [row["where"] for row in listed(p.dict_of(a=p.tensor(), b=counters[2]), tmp_path)] == [["a"]]


def test_what_makes_no_tensor_is_not_made_plain(tmp_path: Path) -> None:
    """Of a known class, but made by a function that is not: its name became text, and the output could not be read."""
    made = p.call(
        "torch._tensor", "_rebuild_from_type_v2",
        p.glob("builtins", "object"), p.glob("torch", "Size"), p.tuple_of(p.tensor()), p.EMPTY_DICT,
    )  # fmt: skip
    path = write(tmp_path, one(made))
    with pytest.raises(ObjectsError, match="would be lost"):
        ckpt_tools.convert(path, tmp_path / "out.pth", objects="plain")


def test_a_state_that_grows_after_it_was_set(tmp_path: Path) -> None:
    """Python copies a state into its object at once: what the dict is given later, as Borg's do, the object does not have."""
    state = p.EMPTY_DICT + p.put(9) + p.text("a") + p.tensor() + p.SETITEM
    made = p.call("types", "SimpleNamespace") + state + p.BUILD
    body = p.pickle(p.dict_of(x=made, z=p.get(9) + p.text("b") + OTHER + p.SETITEM))
    path = write(tmp_path, torch_zip(body, FLOATS))
    assert vars(torch.load(path, weights_only=False)["x"]).keys() == {"a"}
    assert [row["where"] for row in ckpt_tools.inspect(path).tensors] == [["x", "a"], ["z", "a"], ["z", "b"]]


@pytest.mark.parametrize(
    ("made", "error"),
    [(b"ctorch\nSize\nK\x01\x85\x81", TensorError), (b"c__builtin__\ncomplex\n(]t\x81", PickleError),
     (b"ctorch\ndevice\n)\x81", TensorError)],
)  # fmt: skip
def test_instances_that_torch_cannot_make(made: bytes, error: type[CkptError], tmp_path: Path) -> None:
    """What `__new__` refuses is refused however the pickle makes it."""
    path = write(tmp_path, torch_zip(p.pickle(p.dict_of(a=made)), {}))
    expect_refused(path, error, "malformed arguments")
    with pytest.raises((TypeError, RuntimeError, UnpicklingError)):
        torch.load(path)
