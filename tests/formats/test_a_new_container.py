"""A container is a module with `sniff` and `decode`, and a row: this one is made up."""

import sys
from pathlib import Path
from types import ModuleType

import pytest
import torch

import ckpt_tools
from ckpt_tools.errors import DamagedFileError
from ckpt_tools.formats import base, single
from ckpt_tools.formats.checkpoint import Checkpoint, state_dict
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
    assert [finding.code for finding in ckpt_tools.check(path).findings] == ["weights-only-refused"]  # it is not torch's


def test_a_new_reader_is_held_to_the_size_of_its_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A tensor that reaches beyond the file is refused where tensors are made; torch.load is not said to load a new format."""

    def decode(source: Source) -> Checkpoint:
        return state_dict("made-up", source, [("w", base.row_major("0", DTYPES["uint8"], (4,), Range(source, 4, 4), "'w'"))])

    module = ModuleType("made_up")
    vars(module).update(sniff=lambda head: head.startswith(b"MADE"), decode=decode)
    monkeypatch.setitem(sys.modules, "made_up", module)
    monkeypatch.setitem(single.ROWS, "made-up", "made_up")
    loads = ckpt_tools.inspect(write(tmp_path, b"MADEabcd", "whole.made")).weights_only
    assert (loads["loads"], loads["call"]) == (False, "the library that wrote it")
    with pytest.raises(DamagedFileError, match="'w' reaches beyond the end of the file"):
        ckpt_tools.inspect(write(tmp_path, b"MADEabc", "cut.made"))
