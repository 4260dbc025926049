"""Tensors that do not fit their storages, and unusual ones: rows 69 to 76."""

from __future__ import annotations

import json
import struct
from pathlib import Path

import pytest
import torch

import ckpt_tools
from ckpt_tools.errors import (
    ContainerLimitError,
    ObjectsError,
    OutputError,
    PickleError,
    TensorError,
    ZipError,
)
from tests.fuzz import oracle
from tests.hostile import pickles as p
from tests.hostile.refusals import expect_convert_refused, expect_refused, write
from tests.hostile.zips import (
    Rec,
    build,
    torch_records,
    torch_zip,
)
from tests.support.legacy import floats, persistent, stream

FLOATS = {"0": struct.pack("<6f", *range(6))}


def one(opcodes: bytes, storages: dict[str, bytes] | None = None) -> bytes:
    """A state dict with this tensor as `a.w`."""
    return torch_zip(p.pickle(p.dict_of(**{"a.w": opcodes})), FLOATS if storages is None else storages)


VIEWS = {
    "size": ((7,), (1,), 0, "reaches outside"),
    "sizes": ((3, 3), (3, 1), 0, "reaches outside"),
    "stride": ((2, 3), (4, 1), 0, "reaches outside"),
    "offset": ((2, 3), (3, 1), 1, "reaches outside"),
    "scalar_offset": ((), (), 6, "reaches outside"),
    "negative_size": ((-1,), (1,), 0, "negative"),
    "two_negative_sizes": ((-2, -3), (3, 1), 0, "negative"),
    "negative_stride": ((2, 3), (-3, 1), 3, "negative"),
    "negative_offset": ((2,), (1,), -1, "negative"),
    "size_overflow": ((2**32, 2**32), (0, 0), 0, "2**59 elements"),
    "sizes_that_wrap_to_six": ((2**63, 2**63, 6), (1, 1, 1), 0, "2**59 elements"),
    "stride_overflow": ((2, 3), (2**63, 1), 0, "2**63"),
    "stride_that_wraps": ((3,), (2**62,), 0, "reaches outside"),
    "offset_overflow": ((1,), (1,), 2**64, "2**63"),
    "fewer_strides": ((2, 3), (1,), 0, "2 sizes and 1 strides"),
    "more_strides": ((2,), (3, 1), 0, "1 sizes and 2 strides"),
    "many_dimensions": ((1,) * 2000, (1,) * 2000, 0, "2000 sizes"),
}


@pytest.mark.parametrize("case", VIEWS)
def test_71_view_outside(case: str, tmp_path: Path) -> None:
    """Size, stride or offset outside the storage, negative, or so large that they overflow."""
    shape, stride, offset, said = VIEWS[case]
    opcodes = p.tensor(p.sizes(*shape), p.sizes(*stride), p.integer(offset))
    expect_refused(write(tmp_path, one(opcodes)), TensorError, said)


@pytest.mark.parametrize("part", [p.NONE, p.TRUE, p.text("2"), b"G" + bytes(8), p.EMPTY_TUPLE])
@pytest.mark.parametrize("place", ["shape", "stride", "offset", "grad"])
def test_71_wrong_types(place: str, part: bytes, tmp_path: Path) -> None:
    """Something else than whole numbers, also bools, which Python counts as such."""
    if place in ("shape", "stride"):
        opcodes = p.tensor(**{place: p.tuple_of(part, b"K\x01")})
    else:
        opcodes = p.tensor(**{place: part if part != p.TRUE or place == "offset" else p.NONE})
    expect_refused(write(tmp_path, one(opcodes)), TensorError, "of the wrong type")


@pytest.mark.parametrize("count", [0, 3, 5, 8])
def test_71_wrong_number_of_arguments(count: int, tmp_path: Path) -> None:
    """A rebuild function with too many or too few."""
    args = [p.storage(), b"K\x00", p.sizes(2), p.sizes(1), p.FALSE, p.ORDERED_DICT, p.NONE, p.NONE][:count]
    opcodes = p.call("torch._utils", "_rebuild_tensor_v2", *args)
    expect_refused(write(tmp_path, one(opcodes)), TensorError, f"called with {count} arguments")


def test_71_empty_views_reach_nowhere(tmp_path: Path) -> None:
    """A tensor without elements may lie anywhere, as in torch."""
    path = write(tmp_path, one(p.tensor(p.sizes(0, 3), p.sizes(3, 1), p.integer(1000))))
    assert ckpt_tools.inspect(path).tensors[0]["shape"] == list(torch.load(path)["a.w"].shape) == [0, 3]


@pytest.mark.parametrize("shape", [(1, 2**34), (2**34,), (2, 3, 2**32)])
def test_71_expanded_beyond_memory(shape: tuple[int, ...], tmp_path: Path) -> None:
    """One number, expanded to terabytes: a .pth keeps the view; safetensors, which cannot, says what it would take."""
    wide = tuple(size << 8 for size in shape)
    path = write(tmp_path, one(p.tensor(p.sizes(*wide), p.sizes(*[0] * len(wide)))))
    ckpt_tools.convert(path, tmp_path / "out.pth")
    assert torch.load(tmp_path / "out.pth")["a.w"].shape == wide
    expect_convert_refused(path, OutputError, "no space", "It needs", target="out.safetensors")


def test_72_one_storage_two_types(tmp_path: Path) -> None:
    """One key with two dtypes, sizes or devices."""
    for other in (p.storage("0", 6, "IntStorage"), p.storage("0", 5), p.storage("0", 6, device="cuda:0")):
        body = p.dict_of(a=p.tensor(), b=p.tensor(p.sizes(1), p.sizes(1), on=other))
        expect_refused(
            write(tmp_path, torch_zip(p.pickle(body), FLOATS)), TensorError, "'0' is used with two types, sizes or devices"
        )


def test_72_a_storage_on_the_meta_device(tmp_path: Path) -> None:
    """torch.load makes a tensor without values of it, and with `map_location` one of the bytes."""
    path = write(tmp_path, one(p.tensor(on=p.storage(device="meta"))))
    assert torch.load(path)["a.w"].is_meta
    assert torch.load(path, map_location="cpu")["a.w"].tolist() == [[0, 1, 2], [3, 4, 5]]
    expect_refused(path, TensorError, "'0' is said to be on the meta device")
    old = write(tmp_path, stream(p.dict_of(w=p.tensor(on=persistent(device="meta"))), ("0", floats(*range(6)))), "old.pth")
    expect_refused(old, TensorError, "'0' is said to be on the meta device")


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


def test_75_tied_and_overlapping(tmp_path: Path) -> None:
    """Tensors on one storage: its bytes are stored once, and loaded as one storage."""
    base = torch.arange(1000.0)
    torch.save({"a.w": base, "b.w": base, "c.w": base[100:300], "d.w": base[200:400].reshape(10, 20).t()}, tmp_path / "in.pth")
    found = ckpt_tools.inspect(tmp_path / "in.pth")
    assert (found.tied, found.shared) == ([["a.w", "b.w"]], [["a.w", "b.w", "c.w", "d.w"]])
    ckpt_tools.convert(tmp_path / "in.pth", tmp_path / "out.pth")
    loaded = torch.load(tmp_path / "out.pth")
    assert len({tensor.untyped_storage().data_ptr() for tensor in loaded.values()}) == 1
    assert loaded["d.w"].stride() == (1, 20)
    assert (tmp_path / "out.pth").stat().st_size < 7000
    report = ckpt_tools.convert(tmp_path / "in.pth", tmp_path / "out.safetensors")
    assert report.aliases == {"b.w": "a.w"}


def unusual() -> dict[str, torch.Tensor]:
    """Tensors that are no plain view on a storage."""
    import warnings

    dense = torch.eye(3)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return {
            "sparse": dense.to_sparse(),
            "sparse_csr": dense.to_sparse_csr(),
            "quantized": torch.quantize_per_tensor(dense, 0.1, 0, torch.qint8),
            "nested": torch.nested.nested_tensor([torch.zeros(2), torch.zeros(3)]),
            "meta": torch.empty(3, device="meta"),
        }


@pytest.mark.filterwarnings("ignore:TypedStorage is deprecated")
@pytest.mark.parametrize("kind", ["sparse", "sparse_csr", "quantized", "nested", "meta"])
def test_76_unusual_tensors(kind: str, tmp_path: Path) -> None:
    """Kept in a .pth; refused by name where safetensors is to hold them."""
    path = tmp_path / "in.pth"
    torch.save({"a.w": torch.zeros(2), "odd.w": unusual()[kind]}, path)
    rows = {row["name"]: row["kind"] for row in ckpt_tools.inspect(path).tensors}
    assert rows == {"a.w": "tensor", "odd.w": kind.removesuffix("_csr")}
    expect_convert_refused(path, ContainerLimitError, "'odd.w' is a", target="out.safetensors")
    ckpt_tools.convert(path, tmp_path / "out.pth")
    loaded = torch.load(tmp_path / "out.pth")["odd.w"]
    assert (loaded.layout, loaded.is_quantized, loaded.is_meta) == (
        unusual()[kind].layout, unusual()[kind].is_quantized, unusual()[kind].is_meta)  # fmt: skip


UNUSUAL = {
    "_rebuild_qtensor": (p.storage(), b"K\x00"),
    "_rebuild_sparse_tensor": (p.NONE, p.NONE),
    "_rebuild_sparse_csr_tensor": (p.NONE, p.tuple_of(p.NONE)),
    "_rebuild_nested_tensor": (),
    "_rebuild_meta_tensor_no_storage": (p.glob("torch", "float7"), p.sizes(1), p.sizes(1), p.FALSE),
    "_rebuild_wrapper_subclass": (p.NONE, p.NONE, p.sizes(1)),
    "_rebuild_device_tensor_from_cpu_tensor": (p.NONE, p.NONE),
}


@pytest.mark.parametrize("function", UNUSUAL)
def test_76_malformed_unusual_tensors(function: str, tmp_path: Path) -> None:
    """Their arguments are as untrusted as any."""
    path = write(tmp_path, one(p.call("torch._utils", function, *UNUSUAL[function])))
    said = f"torch._utils.{function} is called with malformed arguments"
    with pytest.raises(TensorError, match=said):
        ckpt_tools.inspect(path)
    expect_convert_refused(path, TensorError, said, objects="keep")


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


def test_69_deflated_record_of_another_size(tmp_path: Path) -> None:
    """The size that counts is the one after inflating."""
    rows = torch_records(p.pickle(p.dict_of(w=p.tensor())), {})
    rows.insert(1, Rec(b"archive/data/0", b"\x03\x00", method=8, size=0, crc=0))
    expect_refused(write(tmp_path, build(rows)), TensorError, "should have 24 bytes; its record has 0")


# --- what torch makes of a pickle by other ways than from a storage


def listed(body: bytes, folder: Path) -> list[oracle.Row]:
    """What `inspect` lists of a pickle, which is what torch loads."""
    path = write(folder, torch_zip(p.pickle(body), FLOATS))
    rows, theirs = ckpt_tools.inspect(path).tensors, oracle.torch_rows(path)
    assert not isinstance(theirs, str), theirs
    assert oracle.difference(rows, theirs) is None
    return rows


ORDERED = p.glob("collections", "OrderedDict")
NUMBERS = p.list_of(b"G\x3f\xf0" + bytes(6), b"K\x02")


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
V2_CALL = p.glob("torch._utils", "_rebuild_tensor_v2") + p.glob("torch", "Tensor")
META = p.call("torch._utils", "_rebuild_meta_tensor_no_storage", p.glob("torch", "float32"), p.sizes(1), p.sizes(1), p.FALSE)
INNER = p.tuple_of(p.storage(), b"K\x00", p.sizes(2, 3), p.sizes(3, 1), p.FALSE, p.ORDERED_DICT)


@pytest.mark.parametrize(
    "state",
    [
        p.dict_of(data=OTHER), p.tuple_of(p.NONE, p.dict_of(data=OTHER)), p.dict_of(requires_grad=p.FALSE),
        p.call("collections", "Counter") + p.text("data") + OTHER + p.SETITEM,
        p.call("collections", "Counter", p.dict_of(data=OTHER)), p.dict_of(__class__=p.glob("torch", "Tensor")),
    ],
)  # fmt: skip
def test_a_state_that_makes_another_tensor(state: bytes, tmp_path: Path) -> None:
    """torch sets each item of the state as an attribute, `data` too, and we showed the tensor as it was before."""
    for opcodes in (
        p.call("torch._utils", "_rebuild_parameter_with_state", p.tensor(), p.TRUE, p.ORDERED_DICT, state),
        p.glob("torch._tensor", "_rebuild_from_type_v2") + p.MARK + V2_CALL + INNER + state + p.TUPLE + p.REDUCE,
        p.call(
            "torch._utils", "_rebuild_parameter_with_state",
            META, p.TRUE, p.ORDERED_DICT, state,
        ),
    ):  # fmt: skip
        expect_refused(write(tmp_path, one(opcodes)), TensorError, "which makes another tensor of it")


def test_a_state_with_other_attributes_is_kept(tmp_path: Path) -> None:
    """What torch's tensors have no use for stays an attribute."""
    opcodes = p.call(
        "torch._utils", "_rebuild_parameter_with_state", p.tensor(), p.TRUE, p.ORDERED_DICT, p.dict_of(partition_dim=b"K\x01")
    )
    rows = listed(p.dict_of(**{"a.w": opcodes}), tmp_path)
    assert (rows[0]["kind"], rows[0]["requires_grad"]) == ("parameter", True)


def test_an_unusual_tensor_that_is_set_anew(tmp_path: Path) -> None:
    """torch's BUILD gives any tensor another storage and size."""
    made = p.call(
        "torch._utils", "_rebuild_device_tensor_from_cpu_tensor", p.tensor(), p.glob("torch", "float32"), p.text("cpu"), p.TRUE
    )
    body = made + p.tuple_of(p.storage(), b"K\x01", p.sizes(2), p.sizes(1)) + p.BUILD
    expect_refused(write(tmp_path, one(body)), TensorError, "other contents afterwards")


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


def test_keys_that_may_be_equal(tmp_path: Path) -> None:
    """What a call makes that is not known is refused beside other keys."""
    key = p.call("_codecs", "encode", p.text("a"), p.text("utf-8"))
    body = p.pickle(
        p.EMPTY_DICT + p.pairs([(key, p.tensor()), (p.call("_codecs", "encode", p.text("a"), p.text("ascii")), OTHER)])
    )
    expect_refused(write(tmp_path, torch_zip(body, FLOATS)), PickleError, "may be equal to another one")


def test_a_counter_of_tensors(tmp_path: Path) -> None:
    """`Counter({...})` holds what the dict holds; one of numbers is as it was."""
    counters = [p.call("collections", "Counter", p.dict_of(a=value)) for value in (p.tensor(), p.list_of(p.tensor()), b"K\x02")]
    copied = p.call("collections", "Counter", p.call("collections", "Counter", p.dict_of(a=p.tensor())))
    for body in (*counters[:2], copied):
        expect_refused(write(tmp_path, torch_zip(p.pickle(body), FLOATS)), PickleError, "A Counter is made of")
    assert [row["where"] for row in listed(p.dict_of(a=p.tensor(), b=counters[2]), tmp_path)] == [["a"]]


PARAMETER = p.glob("torch.nn.parameter", "Parameter") + p.tuple_of(p.tensor(), p.FALSE) + b"\x81"
PLAIN_STATE = p.tuple_of(p.TRUE, p.FALSE, p.ORDERED_DICT) + p.BUILD


LATER = p.get(9) + b"K\x07" + p.APPEND
GROWING = p.EMPTY_LIST + p.put(9) + b"K\x02" + p.APPEND
FLOAT32 = p.glob("torch", "float32")
LAYOUT = p.call("torch.serialization", "_get_layout", p.text("torch.sparse_coo"))
INDICES = p.tensor(p.sizes(1, 2), p.sizes(2, 1), on=p.storage("1", 2, "LongStorage"))
VALUES = p.tensor(p.sizes(2), p.sizes(1))


@pytest.mark.parametrize(
    "opcodes",
    [
        p.call("torch._utils", "_rebuild_meta_tensor_no_storage", FLOAT32, GROWING, p.list_of(b"K\x01"), p.FALSE),
        p.call("torch._utils", "_rebuild_sparse_tensor", LAYOUT, p.tuple_of(INDICES, VALUES, GROWING, p.TRUE)),
        p.call("torch", "FloatTensor") + p.tuple_of(p.storage(), b"K\x00", GROWING, p.list_of(b"K\x01")) + p.BUILD,
        p.EMPTY_DICT + p.pairs([(p.call("torch", "Size", GROWING), p.tensor()), (p.sizes(2, 7), OTHER)]),
        p.EMPTY_DICT + p.pairs([(p.glob("torch", "Size") + p.tuple_of(GROWING) + b"\x81", p.tensor())]),
        p.call("builtins", "set", GROWING),
    ],
    ids=["meta", "sparse", "old", "a key", "a key, new", "a set"],
)  # fmt: skip
def test_a_list_that_grows_after_a_call_has_read_it(opcodes: bytes, tmp_path: Path) -> None:
    """torch has read its size, and we listed the later one; and two keys where torch has one."""
    records = FLOATS | {"1": struct.pack("<2q", 0, 1)}
    whole = p.pickle(p.dict_of(a=opcodes, b=p.tensor(), z=LATER))
    expect_refused(write(tmp_path, torch_zip(whole, records)), PickleError, "after a call has read it")


@pytest.mark.parametrize("first", [p.EMPTY_DICT, p.dict_of(neg=p.TRUE)], ids=["none", "one"])
def test_bits_of_a_tensor_that_are_set_later(first: bytes, tmp_path: Path) -> None:
    """torch takes `neg` when the tensor is made: we showed the numbers with the other sign."""
    made = p.glob("torch._utils", "_rebuild_tensor_v2") + INNER[:-1] + first + p.put(9) + p.TUPLE + p.REDUCE
    body = p.pickle(p.dict_of(a=made, z=p.get(9) + p.text("neg") + p.TRUE + p.SETITEM))
    expect_refused(write(tmp_path, torch_zip(body, FLOATS)), PickleError, "after a call has read it")


def test_what_makes_no_tensor_is_not_made_plain(tmp_path: Path) -> None:
    """Of a known class, but made by a function that is not: its name became text, and the output could not be read."""
    made = p.call(
        "torch._tensor", "_rebuild_from_type_v2",
        p.glob("builtins", "object"), p.glob("torch", "Size"), p.tuple_of(p.tensor()), p.EMPTY_DICT,
    )  # fmt: skip
    path = write(tmp_path, one(made))
    assert ckpt_tools.inspect(path).safety.verdict == "dangerous"
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


# fmt: off
REFUSED = {
    **{f"69 record of another size {at}": (one(p.tensor(p.sizes(1), p.sizes(1), on=p.storage("0", numel, kind))), TensorError,
        "Storage '0' should have", "its record has 24")
       for at, (numel, kind) in enumerate([(5, "FloatStorage"), (7, "FloatStorage"), (6, "DoubleStorage"), (6,
        "ByteStorage")])},
    **{f"70 impossible size {at}": (one(p.tensor(on=p.storage("0", numel))), PickleError, "malformed id")
       for at, numel in enumerate([-1, -(2**63), 2**60, 2**63, 2**64, 2**200])},
    **{f"70 large size {at}": (one(p.tensor(on=p.storage("0", numel))), TensorError, f"should have {numel * 4} bytes")
       for at, numel in enumerate([2**40, 2**58])},
    **{f"73 odd storage keys {at}": (one(p.tensor(on=p.storage(key))), ZipError, "1 of 1 storages are not in the file")
       for at, key in enumerate(["../../etc/passwd", "/etc/passwd", "a/b", "..", "0\0", "\n", "0/", "00"])},
    "73 empty storage key": (one(p.tensor(on=p.storage(""))), PickleError, "malformed id"),
    **{f"74 unknown storage {at}": (one(p.tensor(on=p.storage("0", 6, kind))), TensorError, "unknown kind of storage",
        f"torch.{kind}")
       for at, kind in enumerate(["Float7Storage", "Storage", "Tensor", "", "load"])},
    **{f"74 unknown dtype {at}": (one(p.call("torch._utils", "_rebuild_tensor_v3", *(p.storage(), b"K\x00", p.sizes(2),
        p.sizes(1), p.FALSE, p.ORDERED_DICT, dtype))), TensorError, "unknown dtype")
       for at, dtype in enumerate([p.glob("torch", "float7"), p.glob("os", "float32"), p.NONE, p.text("float32")])},
    **{f"tensors of values in the pickle {at}": (torch_zip(p.pickle(p.dict_of(a=p.tensor(), b=opcodes)), FLOATS), TensorError,
        "without a storage")
       for at, opcodes in enumerate([p.call("torch", "Tensor", NUMBERS), p.call("torch", "FloatTensor", NUMBERS),
        p.call("torch", "LongTensor"), p.glob("torch", "Tensor") + p.sizes(2, 3) + b"\x81", p.call("torch.sparse",
        "FloatTensor", p.sizes(2))])},
    **{f"parameters that are set anew {at}": (one(opcodes), TensorError, "Parameter is ")
       for at, opcodes in enumerate([PARAMETER + p.tuple_of(p.storage(), b"K\x01", p.sizes(2), p.sizes(1)) + p.BUILD,
        PARAMETER + PLAIN_STATE + p.tuple_of(OTHER, p.NONE, p.ORDERED_DICT, p.FALSE, p.FALSE) + p.BUILD,
        p.call("torch.nn.parameter", "Parameter", META), PARAMETER + p.dict_of(data=OTHER) + p.BUILD,
        p.call("torch.nn.parameter", "Parameter", p.tensor(), p.FALSE, p.TRUE)])},
    **{f"a bit of a tensor that is not true {at}": (one(p.glob("torch._utils",
        "_rebuild_tensor_v2") + INNER[:-1] + p.dict_of(neg=value) + p.TUPLE + p.REDUCE), TensorError, "a bit that is not True")
       for at, value in enumerate([p.FALSE, b"K\x00", p.NONE])},
    **{f"a tensor that is no tensor {at}": (one(p.call("torch._tensor", "_rebuild_from_type_v2", p.glob("collections", kind),
        p.glob("collections", kind), p.tuple_of(p.dict_of(hidden=p.tensor())), p.EMPTY_DICT)), TensorError, "which makes none")
       for at, kind in enumerate(["OrderedDict", "Counter"])},
    "a counter with a state": (
        torch_zip(p.pickle(p.call("collections",
        "Counter") + p.dict_of(hidden=p.tensor()) + p.BUILD + p.text("a") + p.tensor() + p.SETITEM),
        FLOATS), PickleError, "A Counter is given a state"),
    "a class of storages as two keys": (
        torch_zip(p.pickle(p.EMPTY_DICT + p.pairs([(p.glob("torch", "FloatStorage"), p.tensor()), (p.glob("torch",
        "FloatStorage"), OTHER)])),
        FLOATS), PickleError, "one key or two"),
}
# fmt: on


@pytest.mark.parametrize("name", REFUSED)
def test_refused(name: str, tmp_path: Path) -> None:
    """`inspect` and `convert` refuse each with the same error and say why; nothing is written."""
    data, error, *said = REFUSED[name]
    expect_refused(write(tmp_path, data), error, *said)
