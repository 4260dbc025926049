"""`set_metadata` and `drop_metadata`: the text in a safetensors header, of one file, in place, of shards and their index."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file

import ckpt_tools
from ckpt_tools.errors import ContainerLimitError

WEIGHTS = {"a.weight": torch.arange(6.0).reshape(2, 3), "a.bias": torch.ones(3)}


@pytest.fixture
def path(tmp_path: Path) -> Path:
    """A file of safetensors' own with two texts beside the format."""
    save_file(WEIGHTS, tmp_path / "in.safetensors", metadata={"format": "pt", "title": "old", "note": "keep = me"})
    return tmp_path / "in.safetensors"


def texts(path: Path) -> dict[str, str]:
    """The metadata as safetensors reads it."""
    with safe_open(path, "pt") as file:
        return dict(file.metadata() or {})


def test_set_and_drop(path: Path, tmp_path: Path) -> None:
    """A text is replaced, one comes, one goes, the rest stays, and the report says so."""
    out = tmp_path / "out.safetensors"
    report = ckpt_tools.convert(path, out, set_metadata=["title=a=b", "author="], drop_metadata="note")
    assert texts(out) == {"format": "pt", "title": "a=b", "author": ""}
    assert all(torch.equal(load_file(out)[name], value) for name, value in WEIGHTS.items())
    assert report.dropped == [("note", "`drop_metadata`")]
    assert [note.text for note in report.notes if note.code == "metadata-set"] == ["Metadata: 'title', 'author' set."]


@pytest.mark.parametrize("given", [{"k": "v"}, [("k", "v")], "k=v", ["k=v"]])
def test_what_says_a_text(path: Path, tmp_path: Path, given: Any) -> None:
    """A text, pairs and a mapping say the same."""
    ckpt_tools.convert(path, tmp_path / "out.safetensors", set_metadata=given)
    assert texts(tmp_path / "out.safetensors")["k"] == "v"


def test_in_place(path: Path) -> None:
    """The header changes where it stands; the size and every tensor stay; what is shorter leaves blanks."""
    size = path.stat().st_size
    ckpt_tools.edit_in_place(path, set_metadata={"t": "new"}, drop_metadata=["title", "note"])
    assert (texts(path), path.stat().st_size) == ({"format": "pt", "t": "new"}, size)
    assert all(torch.equal(load_file(path)[name], value) for name, value in WEIGHTS.items())


def test_in_place_without_room(path: Path) -> None:
    """A text that does not fit is refused, and the file stays as it is."""
    before = path.read_bytes()
    with pytest.raises(ContainerLimitError, match="is the room that it has"):
        ckpt_tools.edit_in_place(path, set_metadata={"t": "x" * 5000})
    assert path.read_bytes() == before


@pytest.mark.parametrize("sharded_first", [False, True])
def test_shards_and_their_index(path: Path, tmp_path: Path, sharded_first: bool) -> None:
    """Every shard and the index have a text that was set, and none one that was dropped."""
    source, out = path, tmp_path / "out"
    if sharded_first:
        ckpt_tools.convert(path, tmp_path / "before", shard_size=20, set_metadata="note=in every shard")
        source = tmp_path / "before"
    ckpt_tools.convert(source, out, shard_size=20, set_metadata="author=me", drop_metadata=["note", "format"])
    index = json.loads((out / "model.safetensors.index.json").read_text())["metadata"]
    shards = sorted(out.glob("*.safetensors"))
    assert [texts(shard) for shard in shards] == [{"author": "me"}] * 2
    assert (index["author"], index["title"], index["total_size"], "note" in index) == ("me", "old", 36, False)


def test_an_index_of_torch_shards(path: Path, tmp_path: Path) -> None:
    """An index has metadata, whatever its shards are."""
    ckpt_tools.convert(path, tmp_path / "out", shard_size=20, format="pth", set_metadata="author=me", drop_metadata="note")
    index = json.loads((tmp_path / "out" / "pytorch_model.bin.index.json").read_text())["metadata"]
    assert (index["author"], index["title"], "note" in index) == ("me", "old", False)


def test_values_of_a_pth(tmp_path: Path) -> None:
    """What a .pth keeps beside its tensors becomes text, which can be set and dropped by its path."""
    torch.save({"model": WEIGHTS, "epoch": 3, "loss": 0.5}, tmp_path / "in.pth")
    out = tmp_path / "out.safetensors"
    ckpt_tools.convert(tmp_path / "in.pth", out, set_metadata="epoch=4", drop_metadata="loss")
    assert texts(out) == {"format": "pt", "epoch": "4"}
