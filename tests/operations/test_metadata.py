"""`set_metadata` and `drop_metadata`: the text in a safetensors header, of one file, in place, of shards and their index."""

from pathlib import Path

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file

import ckpt_tools

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
    report = ckpt_tools.convert(path, out, set_metadata=["title=a=b", "author=x", "note="])
    assert texts(out) == {"format": "pt", "title": "a=b", "author": "x"}
    assert all(torch.equal(load_file(out)[name], value) for name, value in WEIGHTS.items())
    assert report.dropped == [("note", "`set_metadata='note='`")]
    assert [note.text for note in report.notes if note.code == "metadata-set"] == ["Metadata: 'title', 'author' set."]
