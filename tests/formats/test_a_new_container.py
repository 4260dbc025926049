"""A container is a module with `sniff` and `decode`, and a row: this one is made up."""

import sys
from pathlib import Path
from types import ModuleType

import pytest
import torch

import ckpt_tools
from ckpt_tools.formats import single
from ckpt_tools.formats.checkpoint import Checkpoint
from ckpt_tools.io.content import Range
from ckpt_tools.io.source import Source
from ckpt_tools.tree.dtypes import DTYPES
from ckpt_tools.tree.nodes import Dict, Entry, Storage
from tests.hostile.refusals import write


def decode(source: Source) -> Checkpoint:
    """One tensor of bytes, called `w`, behind four letters."""
    size = source.size - 4
    storage = Storage("0", DTYPES["uint8"], size, "cpu", Range(source, 4, size))
    return Checkpoint("made-up", Dict([("w", Entry(storage, DTYPES["uint8"], (size,), (1,), 0))]), source)


def test_a_new_container_is_a_module_and_a_row(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Commands read it as any other."""
    module = ModuleType("made_up")
    vars(module).update(sniff=lambda head: head.startswith(b"MADE"), decode=decode)
    monkeypatch.setitem(sys.modules, "made_up", module)
    monkeypatch.setitem(single.ROWS, "made-up", "made_up")
    path = write(tmp_path, b"MADE\1\2\3", "in.made")
    assert ckpt_tools.inspect(path).container == "made-up"
    ckpt_tools.convert(path, tmp_path / "out.pth")
    assert torch.load(tmp_path / "out.pth")["w"].tolist() == [1, 2, 3]
    assert ckpt_tools.check(path).verdict == "healthy"
