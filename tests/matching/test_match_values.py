"""Two copies of one network under other names: what holds the same numbers, or was trained on from them, is one tensor."""

from pathlib import Path
from random import Random

import numpy as np
import pytest
import torch
from torch import nn

import ckpt_tools
from ckpt_tools.errors import CkptError, UsageError
from tests.support.matching import matched
from tests.support.zips import big_endian


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


@pytest.mark.parametrize("spoiled", ["constant", "twice", "short", "nan"])
def test_what_says_nothing_pairs_nothing(spoiled: str) -> None:
    """Ones, a tensor that is there twice, three numbers, NaN: no pair by value."""
    numbers = {"constant": torch.ones(64), "short": torch.tensor([1.0, 2.0, 4.0]), "nan": torch.arange(64.0).log() * torch.nan}
    sample = numbers.get(spoiled, torch.arange(64.0).sin())
    old = {name: sample.clone() for name in (["a", "b"] if spoiled == "twice" else ["a"])}
    found = matched(old, {"x": sample.clone()}, "values")
    assert not [row for row in found.matched if row.reason == "values"]
    assert not found.ambiguous or spoiled == "twice"


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


def values_of(tmp_path: Path, old: dict[str, torch.Tensor], new: dict[str, torch.Tensor]) -> dict[str, tuple[str, float]]:
    """What `--match values` pairs by numbers: new name -> old name and confidence."""
    for name, state in (("old", old), ("new", new)):
        torch.save(state, tmp_path / f"{name}.pth")
    found = ckpt_tools.match(tmp_path / "old.pth", like=tmp_path / "new.pth", match="values").matching
    return {row.new: (row.old, row.confidence) for row in found.matched if row.reason == "values"}


def test_the_whole_tensor_decides(tmp_path: Path) -> None:
    """Two that begin with the same 256 numbers, and two that differ in one number behind them, are told apart."""
    torch.manual_seed(0)
    one, other, *swapped = torch.randn(4, 64, 64)
    for part in (slice(256), slice(4095)):
        other.view(-1)[part] = one.view(-1)[part]
        sides = {"pa.weight": one, "pb.weight": other}, {"qx.weight": other, "qy.weight": one}
        assert values_of(tmp_path, *sides) == {"qx.weight": ("pb.weight", 0.99), "qy.weight": ("pa.weight", 0.99)}
        alone = {"q.weight": ("p.weight", 0.95)} if part.stop == 4095 else {}  # the whole differs, nothing else is like it
        assert values_of(tmp_path, {"p.weight": one}, {"q.weight": other}) == alone
    moved = [part.clone() for part in swapped]
    for part, begin in zip(moved, swapped[::-1], strict=True):
        part.view(-1)[:256] = begin.view(-1)[:256]
    old, new = ({f"{side}{number}.weight": part for number, part in enumerate(parts)} for side, parts in
                (("p", swapped), ("q", moved)))  # fmt: skip
    assert values_of(tmp_path, old, new) == {"q0.weight": ("p0.weight", 0.95), "q1.weight": ("p1.weight", 0.95)}


def test_counters_and_masks_decide_nothing(tmp_path: Path) -> None:
    """Positions that count up and a triangle of ones are the same in any model; the biases beside them are not theirs."""
    ids, mask = torch.arange(64), torch.ones(8, 8).tril()
    for buffer in (ids, mask, ids.reshape(1, 64).float(), ids * 3 + 5):
        old = {"fc.ids": buffer, "fc.bias": torch.zeros(64), "fd.bias": torch.ones(64)}
        new = {"x.ids": buffer, "x.bias": torch.ones(64), "y.bias": torch.zeros(64)}
        assert values_of(tmp_path, old, new) == {}


@pytest.mark.parametrize("shape", [(8, 8), (300, 300), (12, 40)])
@pytest.mark.parametrize("name", ["fc.weight", "lin.weight"])
@pytest.mark.parametrize("noise", [0.0, 0.01], ids=["copied", "trained on"])
def test_a_transposed_copy_is_an_offer(tmp_path: Path, shape: tuple[int, int], name: str, noise: float) -> None:
    """A square matrix under its own name whose numbers are transposed is never copied as it is; a plan transposes it."""
    torch.manual_seed(0)
    weight = torch.randn(shape)
    wanted = (weight.T + noise * torch.randn(shape).T).contiguous()
    torch.save({"fc.weight": weight}, tmp_path / "old.pth")
    torch.save({name: wanted}, tmp_path / "new.pth")
    found = ckpt_tools.match(tmp_path / "old.pth", like=tmp_path / "new.pth", match="values", output=tmp_path / "plan.toml")
    assert [(row.step, row.reason, row.confidence) for row in found.matching.offers] == [("transpose", "values", 0.95)]
    assert not found.matching.matched
    with pytest.raises(CkptError, match="does not fit"):
        ckpt_tools.convert(tmp_path / "old.pth", tmp_path / "out.pth", like=tmp_path / "new.pth", match="values")
    ckpt_tools.convert(tmp_path / "old.pth", tmp_path / "out.pth", plan=tmp_path / "plan.toml")
    torch.testing.assert_close(torch.load(tmp_path / "out.pth"), {name: weight.T}, rtol=0, atol=0)


@pytest.mark.parametrize("container", ["dcp", "shards", "fp16", "bf16", "big", "strided", "compressed"])
def test_every_container_has_the_same_numbers(tmp_path: Path, container: str) -> None:
    """A folder of chunks, shards, halves, a big-endian file, views, a compressed file: each layer finds its copy."""
    torch.manual_seed(0)
    old = {f"p{number}.weight": torch.randn(96, 80) for number in range(4)}
    new = {f"q{(number * 3 + 1) % 4}.weight": value for number, value in enumerate(old.values())}
    truth = {f"q{(number * 3 + 1) % 4}.weight": name for number, name in enumerate(old)}
    torch.save(old, tmp_path / "old.pth")
    torch.save({name: value.T.contiguous().T if container == "strided" else value for name, value in new.items()},
               tmp_path / "new.pth")  # fmt: skip
    path = tmp_path / "new.pth"
    if container == "big":
        big_endian(tmp_path / "new.pth", path := tmp_path / "big.pth", {str(number): 4 for number in range(4)})
    elif container == "compressed":
        np.savez_compressed(path := tmp_path / "made.npz", **{name: value.numpy() for name, value in new.items()})  # type: ignore[arg-type]
    elif container == "shards":
        ckpt_tools.convert(tmp_path / "new.pth", path := tmp_path / "made", shard_size="40KB")
    elif container != "strided":
        path = tmp_path / ("made" if container == "dcp" else "made.pth")
        if container == "dcp":
            ckpt_tools.convert(tmp_path / "new.pth", path, format="dcp")
        else:
            ckpt_tools.convert(tmp_path / "new.pth", path, dtype=container)
    back = {name: new_name for new_name, name in truth.items()}
    for one, other, known in ((tmp_path / "old.pth", path, truth), (path, tmp_path / "old.pth", back)):
        found = ckpt_tools.match(one, like=other, match="values").matching
        assert {row.new: row.old for row in found.matched} == known
        assert {row.confidence for row in found.matched} == {0.95 if container in ("fp16", "bf16") else 0.99}
