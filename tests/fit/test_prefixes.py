"""A plain prefix (`model.` of Lightning, `backbone.`, `net.`) is found, and named with the option that takes it off."""

from __future__ import annotations

import shlex
from pathlib import Path

import pytest
import torch
from torch import nn

import ckpt_tools
from ckpt_tools.errors import MatchError
from ckpt_tools.torch import load_into
from tests.support.commands import ckpt


def network() -> nn.Module:
    """A model as its author wrote it."""
    return nn.Sequential(nn.Linear(3, 4), nn.ReLU(), nn.Linear(4, 2))


def held(attribute: str, **others: nn.Module) -> nn.Module:
    """A training module that holds the model, and others."""
    module = nn.Module()
    module.add_module(attribute, network())
    for name, other in others.items():
        module.add_module(name, other)
    return module


def saved(model: nn.Module, path: Path) -> Path:
    """Its state dict in a file."""
    torch.save(model.state_dict(), path)
    return path


@pytest.mark.parametrize("attribute", ["model", "backbone", "net", "odd_name"])
def test_convert_names_the_prefix(tmp_path: Path, attribute: str) -> None:
    """The error of --like says that every name is the prefix plus yours; the option that it names makes a file that loads."""
    source, like = saved(held(attribute), tmp_path / "in.pth"), saved(network(), tmp_path / "like.pth")
    command = ["convert", str(source), str(tmp_path / "out.pth"), "--like", str(like)]
    done = ckpt(*command, code=3)
    assert f"Every name in the checkpoint is '{attribute}.' plus yours." in done.stderr
    assert f"--strip-prefix {attribute}." in done.stderr
    assert "--drop" not in done.stderr
    ckpt(*command, "--strip-prefix", f"{attribute}.")
    network().load_state_dict(torch.load(tmp_path / "out.pth"))


def test_others_beside_the_model(tmp_path: Path) -> None:
    """A loss with weights of its own: the advice leaves that out, never the model."""
    source, like = saved(held("model", loss=nn.Linear(2, 2)), tmp_path / "in.pth"), saved(network(), tmp_path / "like.pth")
    with pytest.raises(MatchError, match=r"4 names in the checkpoint are 'model\.' plus yours.*loss\.weight") as caught:
        ckpt_tools.convert(source, tmp_path / "out.pth", like=like)
    assert "`strip_prefix='model.'`" in caught.value.fix
    assert "`drop='loss.*'`" in caught.value.fix
    ckpt_tools.convert(source, tmp_path / "out.pth", like=like, strip_prefix="model.", drop="loss.*")
    network().load_state_dict(torch.load(tmp_path / "out.pth"))


def test_a_prefix_to_add(tmp_path: Path) -> None:
    """The other way round: the target has the prefix."""
    source, like = saved(network(), tmp_path / "in.pth"), saved(held("model"), tmp_path / "like.pth")
    with pytest.raises(MatchError, match=r"Every name of yours is 'model\.' plus the checkpoint's") as caught:
        ckpt_tools.convert(source, tmp_path / "out.pth", like=like)
    assert "`add_prefix='model.'`" in caught.value.fix
    ckpt_tools.convert(source, tmp_path / "out.pth", like=like, add_prefix="model.")
    held("model").load_state_dict(torch.load(tmp_path / "out.pth"))


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


def test_load_into_names_the_prefix(tmp_path: Path) -> None:
    """load_into says the same, with the argument that takes the prefix off."""
    source = saved(held("net"), tmp_path / "in.pth")
    with pytest.raises(MatchError, match=r"Every name in the checkpoint is 'net\.' plus yours") as caught:
        load_into(network(), source)
    assert 'match="names"' in caught.value.fix
    assert load_into(network(), source, match="names")


@pytest.mark.parametrize("command", ["inspect", "check"])
def test_a_prefix_of_all_names_is_a_note(tmp_path: Path, command: str) -> None:
    """inspect and check find it, the exit code stays 0, and the command that is shown mends it."""
    source = saved(held("backbone"), tmp_path / "in.pth")
    done = ckpt(command, source)
    assert "info [common-prefix]: every name starts with backbone." in done.stdout
    fix = next(line.strip() for line in done.stdout.splitlines() if "--strip-prefix" in line)
    ckpt(*shlex.split(fix)[1:])
    network().load_state_dict(torch.load(tmp_path / "in.fixed.pth"))


def test_lightnings_own_attribute(tmp_path: Path) -> None:
    """In a file of Lightning's any attribute counts, and the command takes the state dict out."""
    state = {"state_dict": held("my_encoder").state_dict(), "epoch": 1, "pytorch-lightning_version": "2.5.0"}
    torch.save(state, tmp_path / "in.ckpt")
    (finding,) = [row for row in ckpt_tools.inspect(tmp_path / "in.ckpt").findings if row.code == "common-prefix"]
    ckpt(*shlex.split(finding.fix)[1:])
    network().load_state_dict(torch.load(tmp_path / "in.fixed.ckpt"))


def test_what_is_no_prefix(tmp_path: Path) -> None:
    """Parts that a model has anyway, wrappers, and names that meet by chance are not called one."""
    for names in (["layers.0.w", "layers.1.w"], ["model.w"], ["model.a", "head.b"], ["odd.a", "odd.b"]):
        torch.save(dict.fromkeys(names, torch.ones(2)), tmp_path / "in.pth")
        assert "common-prefix" not in [row.code for row in ckpt_tools.inspect(tmp_path / "in.pth").findings]
    torch.save(dict.fromkeys(["x.a", "y.b", "z.c"], torch.ones(2)), tmp_path / "in.pth")
    with pytest.raises(MatchError) as caught:
        ckpt_tools.convert(tmp_path / "in.pth", tmp_path / "out.pth", like=dict.fromkeys("abc", torch.ones(2)))
    assert "plus yours" not in caught.value.why
    source = saved(nn.DataParallel(held("model")), tmp_path / "in.pth")
    assert "common-prefix" not in [row.code for row in ckpt_tools.inspect(source).findings]
