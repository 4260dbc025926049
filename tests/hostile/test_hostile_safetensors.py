"""safetensors headers: rows 81 to 88, and every refusal compared with safetensors' own."""

import json
import struct
from pathlib import Path
from typing import Any

import pytest

import ckpt_tools
from ckpt_tools.errors import DamagedFileError, LimitError
from ckpt_tools.limits import raised
from tests.hostile.refusals import expect_refused, expect_warned, info, safetensors, write

BYTES = struct.pack("<2f", 1, 2)


def test_82_more_metadata_than_any_file_has(tmp_path: Path) -> None:
    """A map of three hundred thousand texts is refused, whatever else is in the file; the limit can be raised."""
    bad = safetensors({"__metadata__": {f"{index}": "" for index in range(300_000)}, "a": info("U8", [0], [0, 0])})
    (tmp_path / "bad.safetensors").write_bytes(bad)
    expect_refused(tmp_path / "bad.safetensors", LimitError, "300000 entries of metadata", "`limits.raised(nodes=2400000)`")
    with raised(nodes=2_400_000):
        assert len(ckpt_tools.inspect(tmp_path / "bad.safetensors").metadata) == 300_000


def test_81_header_over_the_limit(tmp_path: Path) -> None:
    """A header that is there, and longer than safetensors reads, is refused before it is parsed; the limit can be raised."""
    with open(write(tmp_path, safetensors("{}", length=100_000_001), "bad.safetensors"), "r+b") as file:
        file.truncate(100_000_009)
    expect_refused(tmp_path / "bad.safetensors", LimitError, "has 100000001 bytes", "`limits.raised(header=200000000)`")
    with raised(header=200_000_000):
        expect_refused(tmp_path / "bad.safetensors", DamagedFileError, "is not JSON")


@pytest.mark.parametrize(
    ("header", "code"), [({"__metadata__": None, "a": info()}, "null-metadata"), ({"a": info(comment="hello")}, "extra-field")]
)
def test_88_odd_fields(header: dict[str, Any], code: str, tmp_path: Path) -> None:
    """Metadata of null, which safetensors takes, and a field that nobody knows."""
    expect_warned(write(tmp_path, safetensors(header, BYTES), "odd.safetensors"), code)


@pytest.mark.parametrize("text", ["", "x", "[]", "1", "[" * 5000, '{"a":' * 5000, "null"])
@pytest.mark.parametrize("key", ["aliases", "state_dict_metadata"])
def test_88_our_own_metadata_of_others(key: str, text: str, tmp_path: Path) -> None:
    """Text under our keys that is nothing of ours is text."""
    path = write(tmp_path, safetensors({"__metadata__": {f"ckpt_tools.{key}": text}, "a": info()}, BYTES), "odd.safetensors")
    assert ckpt_tools.inspect(path).metadata[f"ckpt_tools.{key}"] == text


@pytest.mark.parametrize("index", [0, 1, 2, -1, 99, "x", None, True])
def test_88_alias_places(index: Any, tmp_path: Path) -> None:
    """Tied names come back at their places; a place that is none means the end."""
    aliases = json.dumps({"t": {"of": "a", "index": index}})
    tensors = {"a": info("U8", [4], [0, 4]), "b": info("U8", [4], [4, 8])}
    rows = {"__metadata__": {f"{ckpt_tools.__name__}.aliases": aliases}} | tensors
    path = write(tmp_path, safetensors(rows, BYTES), "tied.safetensors")
    expected = ["a", "b"]
    expected.insert(index if type(index) is int and 0 <= index < 3 else 2, "t")
    assert [row["name"] for row in ckpt_tools.inspect(path).tensors] == expected
