"""A plain prefix (`model.` of Lightning, `backbone.`, `net.`) is found, and named with the option that takes it off."""

import shlex
from pathlib import Path

import torch
from torch import nn

import ckpt_tools
from tests.support.commands import ckpt


def network() -> nn.Module:
    """A model as its author wrote it."""
    return nn.Sequential(nn.Linear(3, 4), nn.ReLU(), nn.Linear(4, 2))


def saved(model: nn.Module, path: Path) -> Path:
    """Its state dict in a file."""
    torch.save(model.state_dict(), path)
    return path


def test_a_prefix_that_is_in_the_names_too(tmp_path: Path) -> None:
    """Where the model has an attribute of that name itself, the advice takes one off and not both."""
    inner = nn.ModuleDict({"model": network(), "head": nn.Linear(2, 2)})
    source, like = saved(nn.ModuleDict({"model": inner}), tmp_path / "in.pth"), saved(inner, tmp_path / "like.pth")
    command = ["convert", str(source), str(tmp_path / "out.pth"), "--like", str(like)]
    said = ckpt(*command, code=3).stderr
    option = said[said.index("--strip-prefix") :].partition(" too")[0]
    ckpt(*command, *shlex.split(option))
    inner.load_state_dict(torch.load(tmp_path / "out.pth"))
    (finding,) = [row for row in ckpt_tools.inspect(source).findings if row.code == "common-prefix"]
    ckpt(*shlex.split(finding.fix)[1:])
    inner.load_state_dict(torch.load(tmp_path / "in.fixed.pth"))
