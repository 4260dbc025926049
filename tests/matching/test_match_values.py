"""Two copies of one network under other names: what holds the same numbers, or was trained on from them, is one tensor."""

import json
from pathlib import Path
from random import Random

import pytest
import torch
from click.testing import CliRunner
from torch import nn

import ckpt_tools
from ckpt_tools.cli import main
from ckpt_tools.errors import UsageError
from ckpt_tools.matching import match
from ckpt_tools.matching.params import Param


def layers(names: list[str], seed: int = 0) -> nn.ModuleDict:
    """Square layers that only their numbers tell apart, with norms of ones and zeros beside each."""
    torch.manual_seed(seed)
    return nn.ModuleDict({name: nn.Sequential(nn.Linear(8, 8), nn.BatchNorm1d(8)) for name in names})


OLD, NEW = [f"a{word}" for word in "qwertz"], [f"b{word}" for word in "uiopsd"]


def saved(path: Path, model: nn.Module, names: list[str], order: list[int], noise: float = 0.0) -> dict[str, str]:
    """Write the numbers of a model under other names, in another order; returns new name -> old name."""
    state, truth = {}, {}
    for name, number in zip(names, order, strict=True):
        old = list(dict.fromkeys(key.split(".")[0] for key in model.state_dict()))[number]
        for key, value in model.state_dict().items():
            if key.split(".")[0] == old:
                moved = value + noise * torch.randn_like(value) if value.is_floating_point() else value.clone()
                state[key.replace(old, name)], truth[key.replace(old, name)] = moved, key
    torch.save(state, path)
    return truth


@pytest.mark.parametrize("noise", [0.0, 0.01], ids=["copied", "trained on"])
def test_copies_are_found_by_their_numbers(tmp_path: Path, noise: float) -> None:
    """Layers of one shape in a random order, names without meaning: all are right, what is constant goes with its neighbour."""
    model, order = layers(OLD), Random(3).sample(range(6), 6)
    torch.save(model.state_dict(), tmp_path / "old.pth")
    truth = saved(tmp_path / "new.pth", model, NEW, order, noise)
    assert not ckpt_tools.match(tmp_path / "old.pth", like=tmp_path / "new.pth", match="structure").matching.complete
    found = ckpt_tools.match(tmp_path / "old.pth", like=tmp_path / "new.pth", match="values").matching
    assert {row.new: row.old for row in found.matched if ".0." in row.new} == {k: v for k, v in truth.items() if ".0." in k}
    assert all(truth[row.new] == row.old for row in found.matched)
    assert {row.reason for row in found.matched if row.new.endswith("0.weight")} == {"values"}


def test_convert_and_the_command_do_it(tmp_path: Path) -> None:
    """Linear layers alone: complete, and the converted file holds the target's own numbers."""
    model = nn.ModuleDict({name: nn.Linear(8, 8) for name in OLD})
    torch.save(model.state_dict(), tmp_path / "old.pth")
    saved(tmp_path / "new.pth", model, NEW, [2, 0, 1, 5, 3, 4])
    options = ["--like", str(tmp_path / "new.pth"), "--match", "values"]
    shown = CliRunner().invoke(main, ["match", str(tmp_path / "old.pth"), *options, "--json"])
    assert shown.exit_code == 0, shown.output
    assert {row["reason"] for row in json.loads(shown.output)["matched"]} == {"values"}
    done = CliRunner().invoke(main, ["convert", str(tmp_path / "old.pth"), str(tmp_path / "out.pth"), *options])
    assert done.exit_code == 0, done.output
    torch.testing.assert_close(torch.load(tmp_path / "out.pth"), torch.load(tmp_path / "new.pth"), rtol=0, atol=0)


def test_networks_that_were_trained_apart_are_not_paired(tmp_path: Path) -> None:
    """Other seeds: no tensor goes with another by its numbers; a model without values is refused."""
    for name, names, seed in (("old", OLD, 1), ("new", NEW, 2)):
        torch.save(layers(names, seed).state_dict(), tmp_path / f"{name}.pth")
    found = ckpt_tools.match(tmp_path / "old.pth", like=tmp_path / "new.pth", match="values").matching
    assert not [row for row in found.matched if row.reason == "values"]
    with torch.device("meta"):
        empty = nn.Linear(2, 2)
    with pytest.raises(UsageError, match="no values"):
        ckpt_tools.match(tmp_path / "old.pth", like=empty, match="values")


def test_numbers_are_from_all_of_a_tensor(tmp_path: Path) -> None:
    """Tables that begin alike and go on apart are two; tables that begin with zeros, for padding, are found by the rest."""
    torch.manual_seed(0)
    begun, words, types = torch.randn(8, 64), torch.randn(40, 64), torch.randn(40, 64)
    for table in (words, types):
        table[:8] = 0
    torch.save({"a": torch.cat([begun, torch.randn(32, 64)]), "w": words, "t": types}, tmp_path / "old.pth")
    torch.save({"x": torch.cat([begun, torch.randn(32, 64)]), "y": types, "z": words}, tmp_path / "new.pth")
    found = ckpt_tools.match(tmp_path / "old.pth", like=tmp_path / "new.pth", match="values").matching
    assert {(row.old, row.new) for row in found.matched if row.reason == "values"} == {("w", "z"), ("t", "y")}


@pytest.mark.parametrize("spoiled", ["constant", "twice", "short", "nan"])
def test_what_says_nothing_pairs_nothing(spoiled: str) -> None:
    """Ones, a tensor that is there twice, three numbers, NaN: no pair by value."""
    numbers = {"constant": (1.0,) * 64, "short": (1.0, 2.0, 4.0), "nan": (float("nan"), *range(63))}
    sample = numbers.get(spoiled, tuple(map(float, range(64))))
    old = [Param(name, (64,), sample=sample) for name in (["a", "b"] if spoiled == "twice" else ["a"])]
    assert not match(old, [Param("x", (64,), sample=sample)], stages="values").ambiguous or spoiled == "twice"
    assert not [
        row for row in match(old, [Param("x", (64,), sample=sample)], stages="values").matched if row.reason == "values"
    ]


@pytest.mark.parametrize("size", [4, 16])
@pytest.mark.parametrize("order", ["channel first", "channel last"])
def test_a_patch_embedding_is_reshaped_where_its_numbers_say_so(tmp_path: Path, size: int, order: str) -> None:
    """A convolution and a linear layer over patches: the same numbers in the same order are partners, all else is left over."""
    kernel = torch.randn(24, 3, size, size, generator=torch.Generator().manual_seed(size))
    moved = kernel if order == "channel first" else kernel.permute(0, 2, 3, 1)
    sides = {"patch_embed.proj.weight": kernel}, {"embed.patch.weight": moved.reshape(24, -1)}
    paths = tmp_path / "kernel.pth", tmp_path / "linear.pth"
    for path, state in zip(paths, sides, strict=True):
        torch.save(state, path)
    for (old, new), state in ((paths, sides[1]), (paths[::-1], sides[0])):
        assert not ckpt_tools.match(old, like=new, match="values").matching.matched
        report = ckpt_tools.match(old, like=new, match="values", allow_reshape=True)
        assert [row.step for row in report.matching.matched] == (["reshape"] if order == "channel first" else [])
        if order == "channel first":
            advice = ckpt_tools.match(old, like=new, match="values").advice.further
            assert advice is not None
            assert advice.options == ["--allow-reshape"]
            ckpt_tools.convert(old, tmp_path / "out.pth", like=new, match="values", allow_reshape=True, overwrite=True)
            torch.testing.assert_close(torch.load(tmp_path / "out.pth"), state, rtol=0, atol=0)
