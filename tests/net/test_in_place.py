"""Edits in place: what a copy gives, edit after edit; tests/faults has what is killed at any call, or on a full disk."""

import os
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

import ckpt_tools
import ckpt_tools.torch
from ckpt_tools.errors import CkptError
from tests.support.graphs import assert_same

CONTAINERS = ("model.pth", "old.pth", "model.safetensors")
EDITS: list[dict[str, Any]] = [
    {"add_prefix": "some.longer.prefix.of.many.letters."}, {"strip_prefix": "some.longer.prefix.of.many.letters."},
    {"strip_module": True}, {"rename": r"^layer\.(\d+)=l\1"}, {"add_module": True}, {"unwrap": True}, {"rename": r"^l=layer."},
]  # fmt: skip


def made(folder: Path, name: str) -> Path:
    """A wrapped state dict with a tie and a view where the container has them, and room for longer names."""
    state = {f"module.layer.{index}.w": torch.full((30, 7), float(index)) for index in range(8)}
    if name == "model.safetensors":
        save_file(state, folder / "source.safetensors")
        return (folder / "source.safetensors").rename(folder / name)
    state |= {"module.tied.w": state["module.layer.0.w"], "module.view.w": torch.arange(40.0)[3:30:3]}
    value = {"model": state, "epoch": 3} if name == "model.pth" else state
    torch.save(value, folder / name, _use_new_zipfile_serialization=name != "old.pth")
    return folder / name


@pytest.mark.parametrize("name", CONTAINERS)
def test_an_edit_of_an_edited_file(name: str, tmp_path: Path) -> None:
    """After each of seven edits the file loads as the copy that got the same edits, and nothing lies beside it."""
    path, copy = made(tmp_path, name), tmp_path / f"copy.{name}"
    copy.write_bytes(path.read_bytes())
    beside = set(os.listdir(tmp_path))
    edits = EDITS if name != "old.pth" else EDITS[2:]
    for number, edit in enumerate(edits):
        form: Any = "pth-legacy" if name == "old.pth" else None
        ckpt_tools.convert(copy, tmp_path / f"next{number}.{name}", format=form, **edit)
        (tmp_path / f"next{number}.{name}").replace(copy)
        ckpt_tools.edit_in_place(path, **edit)
        assert set(os.listdir(tmp_path)) == beside
        assert_same(ckpt_tools.torch.load(copy), ckpt_tools.torch.load(path))
        if name != "model.safetensors":
            assert_same(torch.load(copy, weights_only=True), torch.load(path, weights_only=True))
        assert ckpt_tools.check(path, values=True).verdict in ("healthy", "findings")
        assert not [row for row in ckpt_tools.check(path).findings if row.severity == "problem"]
    names = [row["name"] for row in ckpt_tools.inspect(path).tensors]
    assert names[:2] == ["layer.0.w", "layer.1.w"]


def test_what_cannot_be_edited_is_left_alone(tmp_path: Path) -> None:
    """Two names that become one, no name at all, no file."""
    path = made(tmp_path, "model.pth")
    rows: list[tuple[Path, dict[str, Any]]] = [
        (path, {"rename": r"\d+=1"}),
        (path, {"rename": r".*="}),
        (tmp_path / "none.pth", {"strip_module": True}),
    ]
    for place, options in rows:
        before = place.read_bytes() if place.exists() else b""
        with pytest.raises(CkptError):
            ckpt_tools.edit_in_place(place, **options)
        assert (place.read_bytes() if place.exists() else b"") == before
    assert sorted(os.listdir(tmp_path)) == ["model.pth"]
