"""safetensors headers: rows 81 to 88, and every refusal compared with safetensors' own."""

from __future__ import annotations

import json
import struct
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import SafetensorError, safe_open

import ckpt_tools
from ckpt_tools.errors import LimitError, SafetensorsError
from ckpt_tools.limits import raised
from tests.hostile.headers import info, safetensors
from tests.hostile.refusals import expect_refused, expect_warned, write

BYTES = struct.pack("<2f", 1, 2)
GOOD = {"a": info()}


def expect_bad_file(folder: Path, data: bytes, *said: str, ours_only: bool = False, error: Any = SafetensorsError) -> None:
    """Refused by us with these words; and by safetensors too, unless we are the stricter one."""
    path = write(folder, data, "bad.safetensors")
    expect_refused(path, error, *said)
    if not ours_only:
        with pytest.raises(SafetensorError), safe_open(path, "pt") as opened:
            opened.keys()


def expect_bad_header(folder: Path, rows: Any, *said: str, data: bytes = BYTES, ours_only: bool = False) -> None:
    """The same for a file with this header."""
    expect_bad_file(folder, safetensors(rows, data), *said, ours_only=ours_only)


def test_80_the_builder_makes_what_safetensors_reads(tmp_path: Path) -> None:
    """The good file, of which all bad ones are variations, is good."""
    path = write(tmp_path, safetensors(GOOD, BYTES), "good.safetensors")
    with safe_open(path, "pt") as opened:
        assert torch.equal(opened.get_tensor("a"), torch.tensor([1.0, 2.0]))
    assert [row["name"] for row in ckpt_tools.inspect(path).tensors] == ["a"]


@pytest.mark.parametrize("size", [1, 4, 7])
def test_81_under_eight_bytes(size: int, tmp_path: Path) -> None:
    """Too short for a length."""
    expect_bad_file(tmp_path, b"\x10" * size, f"has {size} bytes", "a length of 8 bytes")


@pytest.mark.parametrize("length", [0, 1])
def test_81_no_length(length: int, tmp_path: Path) -> None:
    """A header of no bytes, or of one."""
    expect_bad_file(tmp_path, safetensors("{}", length=length), f"claims {length} bytes")


@pytest.mark.parametrize("length", [3, 1000, 99_999_999])
def test_81_length_past_the_end(length: int, tmp_path: Path) -> None:
    """A header that goes on after the file."""
    expect_bad_file(tmp_path, safetensors("{}", length=length), f"claims {length} bytes; 2 follow")


@pytest.mark.parametrize("length", [100_000_001, 2**32, 2**63, 2**64 - 1])
def test_81_length_over_the_limit(length: int, tmp_path: Path) -> None:
    """A header over 100 MB, or of 2**64 - 1 bytes: nothing is allocated."""
    expect_bad_file(tmp_path, safetensors("{}", length=length), f"claims {length} bytes; 2 follow")


def test_82_more_metadata_than_any_file_has(tmp_path: Path) -> None:
    """A map of a hundred thousand texts is refused, whatever else is in the file; the limit can be raised."""
    bad = safetensors({"__metadata__": {f"{index}": "" for index in range(100_000)}, "a": info("U8", [0], [0, 0])})
    (tmp_path / "bad.safetensors").write_bytes(bad)
    expect_refused(tmp_path / "bad.safetensors", LimitError, "metadata has 100000 entries", "`limits.raised(tensors=120000)`")
    with raised(tensors=100_000):
        assert len(ckpt_tools.inspect(tmp_path / "bad.safetensors").metadata) == 100_000


def test_81_header_over_the_limit(tmp_path: Path) -> None:
    """A header that is there, and longer than safetensors reads, is refused before it is parsed; the limit can be raised."""
    with open(write(tmp_path, safetensors("{}", length=100_000_001), "bad.safetensors"), "r+b") as file:
        file.truncate(100_000_009)
    expect_refused(tmp_path / "bad.safetensors", LimitError, "has 100000001 bytes", "`limits.raised(header_bytes=200000000)`")
    with raised(header_bytes=200_000_000):
        expect_refused(tmp_path / "bad.safetensors", SafetensorsError, "is not JSON")


@pytest.mark.parametrize(
    ("raw", "said"),
    [
        (b'{"a\xff":1}', "is not UTF-8"),
        (b"{'a':1}", "is not JSON"),
        (b'{"a":}', "is not JSON"),
        (b'{"a":1', "is not JSON"),
        (b'{"a":NaN}', "NaN is not a JSON value"),
        (b'{"a":-Infinity}', "is not JSON"),
        (b"{}\0\0\0\0", "is not JSON"),
        (b"{} x", "is not JSON"),
        (b"{}{}", "is not JSON"),
        (b'{"a":1,}', "is not JSON"),
        (b'{"a\n":1}', "is not JSON"),
        (b'{"a":"\\x"}', "is not JSON"),
        (b'{"a":' + b"9" * 5000 + b"}", "is not JSON"),
        (b"{" * 5000, "is not JSON"),
    ],
)
def test_82_not_json(raw: bytes, said: str, tmp_path: Path) -> None:
    """Bytes that are not a JSON object, NUL padding and trailing text included."""
    expect_bad_file(tmp_path, safetensors(raw), said)


@pytest.mark.parametrize("raw", [b"[1]", b"null", b'"text"', b"1234", b"\xef\xbb\xbf{}", b" {}", b"\n{}"])
def test_82_not_an_object(raw: bytes, tmp_path: Path) -> None:
    """Something else than an object, a byte order mark, or a blank in front."""
    expect_bad_file(tmp_path, safetensors(raw), "does not begin with '{'", ours_only=raw.strip() == b"{}")


def test_82_padding_with_blanks(tmp_path: Path) -> None:
    """Blanks behind the object are how headers are aligned."""
    path = write(tmp_path, safetensors(json.dumps(GOOD) + "     ", BYTES), "good.safetensors")
    assert ckpt_tools.inspect(path).totals["tensors"] == 1


def test_82_deep(tmp_path: Path) -> None:
    """Nested over 128 in a field that nobody reads, and over what Python's parser takes."""
    deep = "[" * 500 + "]" * 500
    raw = json.dumps({"a": info(x="DEEP")}).replace('"DEEP"', deep)
    expect_bad_file(
        tmp_path, safetensors(raw, BYTES), "nested too deep at tensor 'a'", "`limits.raised(json_depth=500)`", error=LimitError
    )
    expect_bad_file(tmp_path, safetensors(raw.replace(deep, "[" * 100_000 + "]" * 100_000), BYTES), "is not JSON")


@pytest.mark.parametrize("field", ["dtype", "shape", "data_offsets"])
@pytest.mark.parametrize("depth", [1, 200, 700, 900, 960, 980])
def test_82_deep_where_it_is_read(field: str, depth: int, tmp_path: Path) -> None:
    """The same in the fields that are read: a message must not print them in full, nor recurse."""
    raw = json.dumps({"a": info() | {field: "DEEP"}}).replace('"DEEP"', "[" * depth + "]" * depth)
    expect_bad_file(tmp_path, safetensors(raw, BYTES))


@pytest.mark.parametrize("place", ["name", "key", "value"])
def test_82_lone_surrogate(place: str, tmp_path: Path) -> None:
    """Text that is not text, escaped in JSON."""
    lone = r'"x\ud800"'
    rows = {
        "name": f"{{{lone}: ROW}}",
        "key": f'{{"__metadata__":{{{lone}:"v"}},"a":ROW}}',
        "value": f'{{"__metadata__":{{"k":{lone}}},"a":ROW}}',
    }
    expect_bad_file(tmp_path, safetensors(rows[place].replace("ROW", json.dumps(info())), BYTES), "lone surrogate")


def two(first: tuple[int, int], second: tuple[int, int]) -> dict[str, Any]:
    """Two tensors of bytes at these offsets."""
    return {"a": info("U8", [first[1] - first[0]], first), "b": info("U8", [second[1] - second[0]], second)}


@pytest.mark.parametrize(
    ("rows", "said"),
    [
        (two((0, 3), (4, 8)), "'b' leaves a hole before it"),
        (two((0, 5), (4, 8)), "'b' overlaps another"),
        (two((0, 4), (0, 4)), "overlaps another"),
        (two((1, 4), (4, 8)), "'a' leaves a hole before it"),
        (two((0, 4), (2, 2)), "'b' overlaps another"),
        ({"a": info("U8", [8], (8, 0))}, "needs 8 bytes and has the offsets 8 to 0"),
        ({"a": info(offsets=(0, -8))}, "'a' has the malformed data_offsets [0, -8]"),
        ({"a": info(offsets=(-8, 0))}, "malformed data_offsets"),
        ({"a": info(offsets=(0, 8.0))}, "malformed data_offsets [0, 8.0]"),
        ({"a": info(offsets=(0, 1e400))}, "not JSON"),
        ({"a": info(offsets=(0, "8"))}, "malformed data_offsets [0, '8']"),
        ({"a": info(offsets=(0, True))}, "malformed data_offsets [0, True]"),
        ({"a": info(offsets=(0, None))}, "malformed data_offsets"),
        ({"a": info(offsets=(0,))}, "malformed data_offsets [0]"),
        ({"a": info(offsets=(0, 8, 8))}, "malformed data_offsets [0, 8, 8]"),
        ({"a": info(offsets={})}, "malformed data_offsets a map"),
        ({"a": info(offsets=8)}, "malformed data_offsets 8"),
        ({"a": info(offsets=(0, 2**64))}, "has the offsets 0 to 18446744073709551616"),
    ],
)
def test_83_offsets(rows: dict[str, Any], said: str, tmp_path: Path) -> None:
    """Holes, overlaps, not from 0, reversed, negative, no whole numbers, too few and too many."""
    raw = json.dumps(rows).replace("Infinity", "1e400") if said != "not JSON" else json.dumps(rows)
    expect_bad_header(tmp_path, raw, said)


def test_83_minus_zero(tmp_path: Path) -> None:
    """Python reads "-0" as a whole number, safetensors does not."""
    raw = json.dumps(GOOD)
    expect_bad_header(tmp_path, raw.replace("[0, 8]", "[-0, 8]"), "is not JSON", "-0")
    expect_bad_header(tmp_path, raw.replace("[0, 8]", "[-0.0, 8]"), "malformed data_offsets")
    path = write(tmp_path, safetensors({"a-0": info(), "b": info(x=-1, offsets=[8, 16])}, BYTES * 2), "good.safetensors")
    assert ckpt_tools.inspect(path).totals["tensors"] == 2


def test_83_order_in_the_header_is_free(tmp_path: Path) -> None:
    """The names may stand in another order than the bytes, and empty tensors between others."""
    rows = {"z": info("U8", [4], (4, 8)), "e": info("U8", [0], (4, 4)), "a": info("U8", [4], (0, 4))}
    path = write(tmp_path, safetensors(rows, BYTES), "good.safetensors")
    assert [row["name"] for row in ckpt_tools.inspect(path).tensors] == ["z", "e", "a"]
    ckpt_tools.convert(path, tmp_path / "out.pth")
    assert bytes(torch.load(tmp_path / "out.pth")["z"].tolist()) == BYTES[4:]


@pytest.mark.parametrize(
    ("shape", "said"),
    [
        ([-2], "malformed shape [-2]"),
        ([2.0], "malformed shape [2.0]"),
        (["2"], "malformed shape ['2']"),
        ([True, 2], "malformed shape [True, 2]"),
        ([None], "malformed shape"),
        ("2", "malformed shape '2'"),
        (2, "malformed shape 2"),
        ({}, "malformed shape a map"),
        ([2**63], "impossible shape"),
        ([2**32, 2**32], "impossible shape"),
        ([2**62, 2**62, 0], "impossible shape"),
        ([0, 2**64], "impossible shape"),
        ([3], "needs 12 bytes and has the offsets 0 to 8"),
        ([], "needs 4 bytes and has the offsets 0 to 8"),
        ([0], "needs 0 bytes and has the offsets 0 to 8"),
    ],
)
def test_84_shape(shape: Any, said: str, tmp_path: Path) -> None:
    """Negative, no whole number, overflowing, not what the offsets say."""
    expect_bad_header(tmp_path, {"a": info(shape=shape)}, said, ours_only=shape == [2**62, 2**62, 0])


def test_84_too_many_dimensions(tmp_path: Path) -> None:
    """Two thousand dimensions of size 1: the message shows a few."""
    expect_bad_header(tmp_path, {"a": info("F64", [1] * 2000)}, "malformed shape [1, 1, 1, 1, 1, 1, 1, 1, ...]", ours_only=True)


@pytest.mark.parametrize(
    ("dtype", "shape", "size", "said"),
    [
        ("F4", [3], 1, "does not end on a whole byte"),
        ("F4", [], 0, "does not end on a whole byte"),
        ("F6_E2M3", [3], 2, "does not end on a whole byte"),
        ("F6_E3M2", [1], 1, "does not end on a whole byte"),
    ],
)
def test_84_sub_byte(dtype: str, shape: list[int], size: int, said: str, tmp_path: Path) -> None:
    """Types of four and six bits that stop inside a byte."""
    expect_bad_header(tmp_path, {"a": info(dtype, shape, (0, size))}, said, data=bytes(size))


def test_84_odd_last_size_of_f4(tmp_path: Path) -> None:
    """torch counts float4 in pairs: an odd last size has no place there."""
    expect_bad_header(tmp_path, {"a": info("F4", [2, 3], (0, 3))}, "odd last size", data=bytes(3), ours_only=True)


def test_85_longer_than_the_last_offset(tmp_path: Path) -> None:
    """Bytes that no tensor claims."""
    expect_bad_header(tmp_path, GOOD, "bytes that no tensor claims", "end at 8, its data at 9", data=BYTES + b"\0")
    expect_bad_header(tmp_path, {}, "no tensor claims", data=b"\0")


@pytest.mark.parametrize("left", [0, 1, 7])
def test_85_shorter(left: int, tmp_path: Path) -> None:
    """A file that was cut."""
    expect_bad_header(tmp_path, GOOD, "is cut off", f"end at 8, its data at {left}", data=BYTES[:left])


@pytest.mark.parametrize("dtype", ["F31", "f32", "", "F32 ", None, 32, ["F32"], {"F32": None}])
def test_86_dtype(dtype: Any, tmp_path: Path) -> None:
    """A type that is none."""
    expect_bad_header(tmp_path, {"a": info(dtype)}, "'a' has the unknown dtype", ours_only=isinstance(dtype, dict))


ROW = json.dumps(info())
TWICE = {
    "tensor": (f'{{"a":{ROW},"a":{ROW}}}', "'a' twice"),
    "field": (f'{{"a":{ROW[:-1]},"dtype":"F32"}}}}', "'dtype' twice"),
    "metadata": (f'{{"__metadata__":{{"k":"1","k":"2"}},"a":{ROW}}}', "'k' twice"),
    "metadata_itself": (f'{{"__metadata__":{{}},"__metadata__":{{}},"a":{ROW}}}', "'__metadata__' twice"),
    "escaped": (f'{{"a":{ROW},"\\u0061":{ROW}}}', "'a' twice"),
}


@pytest.mark.parametrize("case", TWICE)
def test_87_duplicate_keys(case: str, tmp_path: Path) -> None:
    """Readers differ in which of two they take; safetensors itself takes one silently in some places."""
    raw, said = TWICE[case]
    expect_bad_header(tmp_path, raw, "has the key", said, ours_only=True)


@pytest.mark.parametrize("missing", ["dtype", "shape", "data_offsets"])
def test_87_missing_field(missing: str, tmp_path: Path) -> None:
    """A tensor without one of its three fields."""
    expect_bad_header(
        tmp_path, {"a": {key: value for key, value in info().items() if key != missing}}, "lacks dtype, shape or data_offsets"
    )


@pytest.mark.parametrize("row", [None, [], "x", 3])
def test_87_row_is_no_object(row: Any, tmp_path: Path) -> None:
    """A tensor that is not a map."""
    expect_bad_header(tmp_path, {"a": row}, "lacks dtype, shape or data_offsets")


METADATA = [
    ({"k": 1}, "'k' is not text"), ({"k": None}, "'k' is not text"), ({"k": {}}, "'k' is not text"), (["k"], "is not a map"),
    ("k", "is not a map"),
]  # fmt: skip


@pytest.mark.parametrize(("metadata", "said"), METADATA)
def test_88_metadata(metadata: Any, said: str, tmp_path: Path) -> None:
    """Metadata that is not a map of texts."""
    expect_bad_header(tmp_path, {"__metadata__": metadata, "a": info()}, said)


def test_88_null_metadata(tmp_path: Path) -> None:
    """Metadata of null, which safetensors takes."""
    expect_warned(write(tmp_path, safetensors({"__metadata__": None, "a": info()}, BYTES), "odd.safetensors"), "null-metadata")


def test_88_extra_field(tmp_path: Path) -> None:
    """A field that nobody knows."""
    expect_warned(write(tmp_path, safetensors({"a": info(comment="hello")}, BYTES), "odd.safetensors"), "extra-field")


ALIASES = {
    "no_map": {"b": "a"},
    "no_target": {"b": {}},
    "target_not_there": {"b": {"of": "c"}},
    "target_is_a_list": {"b": {"of": []}},
    "target_is_itself": {"b": {"of": "b"}},
    "name_taken": {"a": {"of": "a"}},
}


@pytest.mark.parametrize("case", ALIASES)
def test_88_our_own_metadata(case: str, tmp_path: Path) -> None:
    """The aliases that we write ourselves are as untrusted as the rest."""
    rows = {"__metadata__": {"ckpt_tools.aliases": json.dumps(ALIASES[case])}, "a": info()}
    expect_bad_header(tmp_path, rows, "refers to a tensor that is not there", ours_only=True)


@pytest.mark.parametrize("text", ["", "x", "[]", "1", "[" * 5000, '{"a":' * 5000, "null"])
@pytest.mark.parametrize("key", ["ckpt_tools.aliases", "ckpt_tools.state_dict_metadata"])
def test_88_our_own_metadata_of_others(key: str, text: str, tmp_path: Path) -> None:
    """Text under our keys that is nothing of ours is text."""
    path = write(tmp_path, safetensors({"__metadata__": {key: text}, "a": info()}, BYTES), "odd.safetensors")
    assert ckpt_tools.inspect(path).metadata[key] == text


def test_88_alias_names_are_text(tmp_path: Path) -> None:
    """A lone surrogate may not come in by the aliases either."""
    rows = {"__metadata__": {"ckpt_tools.aliases": r'{"b\ud800":{"of":"a"}}'}, "a": info()}
    expect_bad_header(tmp_path, rows, "lone surrogate", ours_only=True)


@pytest.mark.parametrize("index", [0, 1, 2, -1, 99, "x", None, True])
def test_88_alias_places(index: Any, tmp_path: Path) -> None:
    """Tied names come back at their places; a place that is none means the end."""
    aliases = json.dumps({"t": {"of": "a", "index": index}})
    tensors = {"a": info("U8", [4], [0, 4]), "b": info("U8", [4], [4, 8])}
    rows = {"__metadata__": {"ckpt_tools.aliases": aliases}} | tensors
    path = write(tmp_path, safetensors(rows, BYTES), "tied.safetensors")
    expected = ["a", "b"]
    expected.insert(index if type(index) is int and 0 <= index < 3 else 2, "t")
    assert [row["name"] for row in ckpt_tools.inspect(path).tensors] == expected
