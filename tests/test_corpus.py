"""The whole collection of real files: every one is read, or refused as what it is."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

import ckpt_tools
from ckpt_tools.checkpoint import open_checkpoint
from ckpt_tools.errors import NotACheckpointError
from ckpt_tools.numeric import row_major
from ckpt_tools.plan import read
from ckpt_tools.tree import Entry
from tests.graphs import element_bytes, live_tensors
from tests.samples import corpus
from tests.test_oracle import described

EVERY = corpus("torch-zip", "torch-legacy", "torch-tar", "torchscript", "safetensors", "other")


@pytest.mark.parametrize("row", EVERY)
def test_read_or_refused(row: dict[str, Any], tmp_path: Path) -> None:
    """A checkpoint is read as the catalogue says; anything else is no checkpoint, and the message shows how it begins."""
    if row["container"] == "other" and not row["file"].endswith(".zip"):
        with pytest.raises(NotACheckpointError, match="is not a checkpoint"):
            ckpt_tools.inspect(row["path"])
        return
    found = described(row["path"])
    known = {"other": "zip-bundle"}.get(row["container"], row["container"])
    assert found["container"] == ("dcp-part" if row["file"].endswith(".distcp") else known)


@pytest.mark.parametrize("row", corpus("torch-zip", "torch-legacy", "torch-tar"))
def test_plain_data_with_the_same_tensors(row: dict[str, Any], tmp_path: Path) -> None:
    """With objects='plain' torch.load(weights_only=True) takes every one; its tensors are the file's, bit for bit."""
    if row["file"].endswith(".distcp"):
        pytest.skip("a part of a checkpoint")
    plain = tmp_path / "plain.pth"
    ckpt_tools.convert(row["path"], plain, objects="plain")
    loaded = torch.load(plain, map_location="cpu", weights_only=True)
    with open_checkpoint(row["path"]) as checkpoint:
        entries = [tensor.node for tensor in checkpoint.tensors if type(tensor.node) is Entry]
        before = sorted(read(row_major(entry)) for entry in entries)
    assert len(before) == row["n_tensors"]
    assert sorted(element_bytes(tensor) for _, tensor in live_tensors(loaded)) == before
    if row["loads_weights_only"] is True:
        theirs = torch.load(row["path"], map_location="cpu", weights_only=True)
        assert sorted(element_bytes(tensor) for _, tensor in live_tensors(theirs)) == before
