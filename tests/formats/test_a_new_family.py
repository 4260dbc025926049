"""A family of parts is a module with `decode` and a row: this one is made up."""

import sys
from collections.abc import Sequence
from pathlib import Path
from types import ModuleType

import pytest
import torch

import ckpt_tools
from ckpt_tools.formats.checkpoint import Checkpoint
from ckpt_tools.formats.single import decode_file
from ckpt_tools.io.sources import Files
from ckpt_tools.parts import families
from ckpt_tools.parts.families import Family
from ckpt_tools.parts.partition import Partition
from ckpt_tools.parts.sharded import joined, renewed
from ckpt_tools.tree.nodes import Dict, as_dict


def decode(names: Sequence[str], files: Files) -> Checkpoint:
    """The tensors of all files, one after another."""
    parts = renewed([decode_file(files.open(name)) for name in names])
    return joined("made-up", Dict([item for part in parts for item in as_dict(part.root).items]), files, parts, {})


def own(names: Sequence[str]) -> list[str]:
    """The files of the family."""
    return sorted(name for name in names if name.endswith(".slice"))


def test_a_new_family_is_a_module_and_a_row(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its folder is one checkpoint, and a file of it is named as the part that it is, and stands for all."""
    module = ModuleType("made_up_family")
    vars(module)["decode"] = decode
    monkeypatch.setitem(sys.modules, "made_up_family", module)
    row = Family(
        "made_up_family",
        find=lambda _, names: own(names),
        beside=lambda path, names, _: (path.parent, tuple(own(names))) if path.suffix == ".slice" else None,
        part=lambda checkpoint, files: (
            Partition("a slice", "Get all.", "Slices", None, files()) if checkpoint.path.suffix == ".slice" else None
        ),
    )
    monkeypatch.setitem(families.ROWS, "made-up", row)
    for name in "ab":
        torch.save({name: torch.arange(3)}, tmp_path / f"{name}.slice")
    assert ckpt_tools.inspect(tmp_path).container == "made-up"
    part = ckpt_tools.inspect(tmp_path / "a.slice").part
    assert part is not None
    assert part["family"] == "Slices"
    for source in (tmp_path, tmp_path / "b.slice"):
        ckpt_tools.convert(source, tmp_path / "out.pth", overwrite=True)
        assert list(torch.load(tmp_path / "out.pth")) == ["a", "b"]
