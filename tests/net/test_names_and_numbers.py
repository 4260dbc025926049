"""Names and numbers that came out wrong once, with exit code 0."""

from __future__ import annotations

from pathlib import Path

import torch

from tests.support.commands import ckpt


def test_a_prefix_goes_once_and_comes_back(tmp_path: Path) -> None:
    """`model.model.layers.0.w` loses one `model.`; --add-prefix and then --strip-prefix give the file again."""
    names = ["model.model.layers.0.w", "model.model.norm.weight", "model.lm_head.weight", "model.module.module.w"]
    old = {name: torch.full((2,), float(number)) for number, name in enumerate(names)}
    torch.save(old, tmp_path / "lit.pth")
    ckpt("convert", tmp_path / "lit.pth", tmp_path / "without.pth", "--strip-prefix", "model.")
    ckpt("convert", tmp_path / "without.pth", tmp_path / "again.pth", "--add-prefix", "model.")
    ckpt("convert", tmp_path / "without.pth", tmp_path / "plain.pth", "--strip-module")
    without, again = torch.load(tmp_path / "without.pth"), torch.load(tmp_path / "again.pth")
    assert list(without) == [name.removeprefix("model.") for name in names]
    assert list(again) == names
    assert all(torch.equal(again[name], old[name]) for name in names)
    assert list(torch.load(tmp_path / "plain.pth"))[-1] == "w", "wrappers are no names of a model: all of them go"
