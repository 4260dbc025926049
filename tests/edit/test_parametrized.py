"""Weights in parts: weight norm, spectral norm, pruning, orthogonal; folded, renamed, or refused, and never taken apart."""

import warnings
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.nn.utils import parametrizations, parametrize, prune, spectral_norm, weight_norm

import ckpt_tools
from ckpt_tools.errors import ConvertError, MatchError
from ckpt_tools.torch import load_into
from tests.support.commands import ckpt

WHOLE: Any = None  # which torch's types do not have


class Net(torch.nn.Module):
    """A convolution, its transpose of as many channels in as out, and a linear layer."""

    def __init__(self) -> None:
        super().__init__()
        self.conv, self.up, self.fc = torch.nn.Conv1d(3, 4, 2), torch.nn.ConvTranspose1d(4, 4, 3), torch.nn.Linear(4, 4)
        self.wide = torch.nn.Linear(6, 4)


def _prune(layer: torch.nn.Module) -> None:
    prune.l1_unstructured(layer, "weight", amount=0.4)


KINDS: dict[str, Callable[[torch.nn.Module], object]] = {
    "weight norm, old": lambda layer: weight_norm(layer, dim=1 if isinstance(layer, torch.nn.Linear) else 0),
    "weight norm, new": parametrizations.weight_norm,
    "weight norm of the whole": partial(parametrizations.weight_norm, dim=WHOLE),
    "spectral norm, old": spectral_norm,
    "spectral norm, new": parametrizations.spectral_norm,
    "pruning": _prune,
    "orthogonal": lambda layer: parametrizations.orthogonal(layer) if isinstance(layer, torch.nn.Linear) else None,
}


def trained(kind: str) -> tuple[dict[str, torch.Tensor], dict[str, torch.Tensor]]:
    """A state dict of parts that have moved since, and the plain one that the model computes with."""
    torch.manual_seed(3)
    net = Net()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # the old forms are deprecated
        for layer in net.children():
            KINDS[kind](layer)
    for step in range(20):  # which lets spectral norm's vectors settle
        for name, parameter in net.named_parameters() if step == 0 else ():
            moves = "original" not in name or "original0" in name or kind != "orthogonal"
            parameter.data += torch.randn_like(parameter).tril(-1) * 0.3 if not moves else torch.rand_like(parameter)
        net.fc(torch.randn(1, 4)), net.wide(torch.randn(1, 6)), net.up(net.conv(torch.randn(1, 3, 9)))
    net.eval()
    parts = {name: value.clone() for name, value in net.state_dict().items()}
    net.fc(torch.randn(1, 4)), net.wide(torch.randn(1, 6)), net.up(net.conv(torch.randn(1, 3, 9)))
    plain = {
        f"{name}.{part}": getattr(layer, part).detach() for name, layer in net.named_children() for part in ("weight", "bias")
    }
    return parts, plain


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("way", ["fold", "like", "load_into"])
def test_parts_become_the_weight_that_the_model_computes(kind: str, way: str, tmp_path: Path) -> None:
    """`--fold`, a target that has the weights whole, and load_into give what torch computes in eval mode, and say so."""
    parts, plain = trained(kind)
    torch.save(parts, tmp_path / "in.pth")
    torch.save(plain, tmp_path / "plain.pth")
    options = ["--fold"] if way == "fold" else ["--like", tmp_path / "plain.pth"]
    if way == "load_into":
        net = Net()
        said = " ".join(load_into(net, tmp_path / "in.pth").notes)
        made = net.state_dict()
    else:
        said = ckpt("convert", tmp_path / "in.pth", tmp_path / "out.pth", *options).output
        made = torch.load(tmp_path / "out.pth")
    assert kind.partition(",")[0].removesuffix(" of the whole").capitalize() in said
    assert made.keys() == plain.keys()
    for name, value in plain.items():
        torch.testing.assert_close(made[name], value)


@pytest.mark.parametrize("kind", KINDS)
def test_inspect_names_them(kind: str, tmp_path: Path) -> None:
    """inspect says what was done to how many weights, and the command that folds them works."""
    torch.save(trained(kind)[0], tmp_path / "in.pth")
    count = 2 if kind == "orthogonal" else 4
    said = ckpt("inspect", tmp_path / "in.pth").output
    assert f"[parametrized]: {kind.partition(',')[0].removesuffix(' of the whole')} of {count} weights" in said
    assert "--fold" in said


@pytest.mark.parametrize("norm", ["weight norm", "spectral norm"])
@pytest.mark.parametrize("order", [("old", "new"), ("new", "old")])
def test_old_and_new_form_are_each_others_names(norm: str, order: tuple[str, str], tmp_path: Path) -> None:
    """A checkpoint of one form fits a target of the other by default, as torch's own load hooks rename."""
    make: dict[str, Any] = {"old": spectral_norm, "new": parametrizations.spectral_norm}
    if norm == "weight norm":
        make = {"old": weight_norm, "new": parametrizations.weight_norm}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        source, target = (make[form](torch.nn.Conv1d(3, 4, 2)) for form in order)
    state = {f"module.{name}": value for name, value in source.state_dict().items()}
    torch.save(state, tmp_path / "in.pth")
    torch.save(target.state_dict(), tmp_path / "like.pth")
    ckpt("convert", tmp_path / "in.pth", tmp_path / "out.pth", "--like", tmp_path / "like.pth")
    target.load_state_dict(torch.load(tmp_path / "out.pth"))
    x = torch.randn(1, 3, 5)
    torch.testing.assert_close(target.eval()(x), source.eval()(x))


@pytest.mark.parametrize("stage", ["names", "structure", "position"])
@pytest.mark.parametrize("kind", ["weight norm, old", "weight norm, new", "pruning", "spectral norm, old"])
def test_a_part_alone_is_never_the_weight(kind: str, stage: Any, tmp_path: Path) -> None:
    """With its norm or mask dropped, what is left is no weight: refused at every stage, and no hint says to drop anything."""
    parts, plain = trained(kind)
    torch.save(parts, tmp_path / "in.pth")
    torch.save(plain, tmp_path / "plain.pth")
    for drop in ("*_g", "*.original0", "*_mask", "*_u"):
        if any(name.endswith(drop[1:]) for name in parts):
            with pytest.raises(MatchError) as caught:
                ckpt_tools.convert(tmp_path / "in.pth", tmp_path / "out.pth", like=plain, drop=drop, match=stage)
            assert "drop" not in caught.value.fix
    for source, target in ((parts, {"w": torch.ones(4, 4)}), (plain, parts)):
        torch.save(source, tmp_path / "in.pth")
        with pytest.raises(MatchError) as caught:
            ckpt_tools.convert(tmp_path / "in.pth", tmp_path / "out.pth", like=target, match="structure")
        assert not (source is plain and "drop" in caught.value.fix)


def test_scales_of_quantised_weights_are_not_advised_away(tmp_path: Path) -> None:
    """Codes beside a scale that a plain model lacks: the error says dequantize, and never to drop the scale."""
    codes = {
        "fc.weight": torch.ones(2, 2).to(torch.float8_e4m3fn), "fc.weight_scale": torch.ones(2, 1), "fc.bias": torch.ones(2),
    }  # fmt: skip
    torch.save(codes, tmp_path / "in.pth")
    with pytest.raises(MatchError) as caught:
        ckpt_tools.convert(
            tmp_path / "in.pth", tmp_path / "out.pth", like={"fc.weight": torch.ones(2, 2), "fc.bias": torch.ones(2)}
        )
    assert "dequantize" in caught.value.fix
    assert "drop" not in caught.value.fix


def test_a_hint_to_drop_takes_nothing_else(tmp_path: Path) -> None:
    """What the target lacks is named by globs that match that alone; beside something that is missing nothing is named."""
    torch.save({"fc.weight": torch.ones(2, 2), "fc.bias": torch.ones(2), "aux.weight": torch.ones(5)}, tmp_path / "in.pth")
    with pytest.raises(MatchError) as caught:
        ckpt_tools.convert(
            tmp_path / "in.pth", tmp_path / "out.pth", like={"fc.weight": torch.ones(2, 2), "fc.bias": torch.ones(2)}
        )
    assert "`drop='aux.*'`" in caught.value.fix
    torch.save({"a.qkv.weight": torch.ones(6, 2), "a.out.weight": torch.ones(2, 2)}, tmp_path / "in.pth")
    like = {"a.out.weight": torch.ones(2, 2), "a.q.weight": torch.ones(3, 2), "a.kv.weight": torch.ones(3, 2)}
    with pytest.raises(MatchError) as caught:
        ckpt_tools.convert(tmp_path / "in.pth", tmp_path / "out.pth", like=like)
    assert "drop" not in caught.value.fix


def test_what_cannot_be_folded_is_refused(tmp_path: Path) -> None:
    """A parametrization of one's own is named and refused; a file without any too."""

    class Doubled(torch.nn.Module):
        def forward(self, weight: torch.Tensor) -> torch.Tensor:
            return 2 * weight

    layer = torch.nn.Linear(2, 2)
    parametrize.register_parametrization(layer, "weight", Doubled())
    both = parametrizations.weight_norm(torch.nn.Linear(2, 2))  # a second one that has no tensors: its names are those of one
    parametrize.register_parametrization(both, "weight", Doubled())
    for made in (layer, both):
        torch.save(made.state_dict(), tmp_path / "in.pth")
        with pytest.raises(ConvertError, match=r"'weight' is in parts by a parametrization that is not known"):
            ckpt_tools.convert(tmp_path / "in.pth", tmp_path / "out.pth", fold=True)
        with pytest.raises(MatchError):
            load_into(torch.nn.Linear(2, 2), tmp_path / "in.pth")
        assert "--fold" not in ckpt("inspect", tmp_path / "in.pth").output
    torch.save(torch.nn.Linear(2, 2).state_dict(), tmp_path / "in.pth")
    assert "no weight in parts" in ckpt("convert", tmp_path / "in.pth", tmp_path / "out.pth", "--fold", code=3).output
