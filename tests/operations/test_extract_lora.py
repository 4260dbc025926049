"""`extract-lora`: what a tuned model changed as an adapter, and how much of it the adapter leaves."""

import json
import os
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import nn

import ckpt_tools
from ckpt_tools.errors import ChecksumError, ConvertError, NothingMatchedError, OutputExistsError, UsageError
from tests.support.damage import flip_bit

Tensors = dict[str, torch.Tensor]


class Net(nn.Module):
    """Layers of every kind that becomes factors, and a norm, which does not."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(7, 6)
        self.first = nn.Linear(6, 9)
        self.second = nn.Linear(9, 5)
        self.conv = nn.Conv2d(2, 3, 3)
        self.depth = nn.Conv2d(4, 4, 3, groups=4)
        self.norm = nn.LayerNorm(5)


def saved(folder: Path, base: Tensors, tuned: Tensors) -> list[Path]:
    """Two files."""
    save_file(base, folder / "base.safetensors")
    save_file(tuned, folder / "tuned.safetensors")
    return [folder / "base.safetensors", folder / "tuned.safetensors"]


def weights() -> Tensors:
    """A base with values of its own."""
    torch.manual_seed(3)
    return {name: torch.randn_like(value) for name, value in Net().state_dict().items()}


def merged(paths: list[Path], folder: Path) -> Tensors:
    """The base with the extracted adapter."""
    ckpt_tools.convert(paths[0], folder / "merged.safetensors", lora=folder / "out", overwrite=True)
    return load_file(folder / "merged.safetensors")


def config(folder: Path) -> dict[str, object]:
    """The adapter's configuration."""
    said: dict[str, object] = json.loads((folder / "out" / "adapter_config.json").read_text())
    return said


def test_a_change_of_the_rank_comes_back(tmp_path: Path) -> None:
    """Of a change of rank 2 nothing is left by rank 2: linear, embedding, convolution, bias, and a norm held whole."""
    base, tuned = weights(), weights()
    for name in ("embed.weight", "first.weight", "second.weight", "conv.weight"):
        flat = tuned[name].flatten(1)
        tuned[name] += (torch.randn(len(flat), 2) @ torch.randn(2, flat.shape[1])).reshape(tuned[name].shape)
    tuned["norm.weight"] += 1
    tuned["depth.weight"] += 1
    paths = saved(tmp_path, base, tuned)
    report = ckpt_tools.extract_lora(paths, tmp_path / "out", rank=2)
    assert {row.name: row.rank for row in report.modules} == {"embed": 2, "first": 2, "second": 2, "conv": 2}
    assert sorted(report.saved) == ["depth", "norm"]
    assert report.error < 1e-6
    assert all(row.error < 1e-6 for row in report.modules)
    back = merged(paths, tmp_path)
    for name, value in tuned.items():
        torch.testing.assert_close(back[name], value, rtol=0, atol=1e-5)
    adapter = load_file(tmp_path / "out" / "adapter_model.safetensors")
    assert adapter["base_model.model.embed.lora_embedding_A"].shape == (2, 7)
    assert adapter["base_model.model.conv.lora_A.weight"].shape == (2, 2, 3, 3)
    assert adapter["base_model.model.conv.lora_B.weight"].shape == (3, 2, 1, 1)
    assert config(tmp_path)["target_modules"] == ["conv", "embed", "first", "second"]


def test_the_error_is_the_best_of_the_rank(tmp_path: Path) -> None:
    """A change of full rank leaves what the singular values beyond the rank are, of each module and in all."""
    base = {"a.weight": torch.zeros(8, 6), "b.weight": torch.zeros(6, 5)}
    torch.manual_seed(5)
    tuned = {name: torch.randn_like(value) for name, value in base.items()}
    report = ckpt_tools.extract_lora(saved(tmp_path, base, tuned), tmp_path / "out", rank=3)
    left = size = 0.0
    for row in report.modules:
        values = torch.linalg.svdvals(tuned[f"{row.name}.weight"].double())
        assert row.error == pytest.approx(float(values[3:].norm() / values.norm()), rel=1e-5)
        assert row.size == pytest.approx(float(values.norm()), rel=1e-6)
        left, size = left + float(values[3:].square().sum()), size + float(values.square().sum())
    assert report.error == pytest.approx((left / size) ** 0.5, rel=1e-5)


@pytest.mark.parametrize("decay", [1.0, 0.99, 0.8], ids=["none", "slow", "quick"])
def test_the_error_of_a_large_change(tmp_path: Path, decay: float) -> None:
    """It is found from twice as many directions as the rank, and is at most 1.002 of the least."""
    torch.manual_seed(1)
    sizes = decay ** torch.arange(1000)
    left, right = (torch.linalg.qr(torch.randn(rows, 1000))[0] for rows in (1100, 1000))
    tuned = {"a.weight": (torch.randn(1100, 1000) if decay == 1.0 else (left * sizes) @ right.T)}
    report = ckpt_tools.extract_lora(saved(tmp_path, {"a.weight": torch.zeros(1100, 1000)}, tuned), tmp_path / "out", rank=8)
    values = torch.linalg.svdvals(tuned["a.weight"].double())
    assert report.error <= 1.002 * float(values[8:].norm() / values.norm())


def test_biases(tmp_path: Path) -> None:
    """Changed biases of linear layers are `lora_bias`, where every layer that is changed has one."""
    base, tuned = weights(), weights()
    for name in ("first.weight", "second.weight", "first.bias"):
        tuned[name] += 1
    paths = saved(tmp_path, base, tuned)
    report = ckpt_tools.extract_lora(paths, tmp_path / "out", rank=1)
    assert report.biases == 2
    assert config(tmp_path)["lora_bias"] is True
    torch.testing.assert_close(merged(paths, tmp_path), tuned)


def test_a_bias_among_layers_without(tmp_path: Path) -> None:
    """PEFT has `lora_bias` for all layers or none: else a layer whose bias changed is held whole."""
    base = {"a.weight": torch.zeros(3, 4), "a.bias": torch.zeros(3), "b.weight": torch.zeros(3, 4)}
    tuned = {name: value + 1 for name, value in base.items()}
    paths = saved(tmp_path, base, tuned)
    report = ckpt_tools.extract_lora(paths, tmp_path / "out", rank=1)
    assert (report.saved, [row.name for row in report.modules]) == (["a"], ["b"])
    assert "lora_bias is for all layers or none" in report.why["a"]
    torch.testing.assert_close(merged(paths, tmp_path), tuned)


def test_names_that_end_alike(tmp_path: Path) -> None:
    """PEFT takes every module whose name ends as one that is saved whole for such a one, so all of them are there."""
    base = {"out.weight": torch.zeros(3, 2), **{f"{at}norm.weight": torch.ones(2) for at in ("", "blocks.0.", "pre")}}
    tuned = {**base, "out.weight": torch.ones(3, 2), "norm.weight": torch.zeros(2)}
    paths = saved(tmp_path, base, tuned)
    assert ckpt_tools.extract_lora(paths, tmp_path / "out", rank=1).saved == ["norm", "blocks.0.norm", "prenorm"]
    assert torch.equal(merged(paths, tmp_path)["norm.weight"], torch.zeros(2))


def test_smaller_sides_have_smaller_ranks(tmp_path: Path) -> None:
    """A weight whose smaller side is below the rank has that for its rank, and the configuration says so."""
    base = {"x.a.weight": torch.zeros(2, 9), "x.b.weight": torch.zeros(9, 8), "y.b.weight": torch.zeros(3, 3)}
    torch.manual_seed(7)
    tuned = {name: torch.randn_like(value) for name, value in base.items()} | {"y.b.weight": torch.zeros(3, 3)}
    paths = saved(tmp_path, base, tuned)
    ckpt_tools.extract_lora(paths, tmp_path / "out", rank=8)
    said = config(tmp_path)
    assert said["rank_pattern"] == said["alpha_pattern"] == {r"^x\.a": 2}
    assert said["target_modules"] == r"x\.a|x\.b"
    torch.testing.assert_close(merged(paths, tmp_path), tuned, rtol=0, atol=1e-5)


def test_conv1d(tmp_path: Path) -> None:
    """Weights that are stored as [in, out], told by their biases, give factors for that."""
    base = {"c.weight": torch.zeros(4, 6), "c.bias": torch.zeros(6)}
    tuned = {"c.weight": torch.ones(4, 6) * torch.arange(6), "c.bias": torch.zeros(6)}
    paths = saved(tmp_path, base, tuned)
    ckpt_tools.extract_lora(paths, tmp_path / "out", rank=1)
    assert config(tmp_path)["fan_in_fan_out"] is True
    assert load_file(tmp_path / "out" / "adapter_model.safetensors")["base_model.model.c.lora_A.weight"].shape == (1, 4)
    torch.testing.assert_close(merged(paths, tmp_path), tuned)


def test_only_some_and_what_is_left(tmp_path: Path) -> None:
    """What `only` does not match is left, and counts as error; so does a tensor of a module with modules inside."""
    base = {"a.weight": torch.zeros(3, 4), "b.weight": torch.zeros(3, 4), "scale": torch.zeros(2)}
    paths = saved(tmp_path, base, {name: value + 1 for name, value in base.items()})
    report = ckpt_tools.extract_lora(paths, tmp_path / "out", rank=1, only=["a.*", "scale"])
    assert report.left == ["b.weight", "scale"]
    assert report.error == pytest.approx((14 / 26) ** 0.5)
    with pytest.raises(NothingMatchedError, match="only='c'"):
        ckpt_tools.extract_lora(paths, tmp_path / "other", rank=1, only="c")


def test_tied_weights_once(tmp_path: Path) -> None:
    """A tensor under two names gives one change: two would be added."""
    base = torch.zeros(4, 3)
    tuned = base + 1
    torch.save({"tok.weight": base, "out.weight": base}, tmp_path / "base.pth")
    torch.save({"tok.weight": tuned, "out.weight": tuned}, tmp_path / "tuned.pth")
    report = ckpt_tools.extract_lora([tmp_path / "base.pth", tmp_path / "tuned.pth"], tmp_path / "out", rank=1)
    assert [row.name for row in report.modules] == ["tok"]


def test_tied_in_the_base_alone(tmp_path: Path) -> None:
    """Copies in the tuned model are one change; two tensors there are refused, since a merge would add both changes to both."""
    base, one, other = torch.zeros(4, 3), torch.full((4, 3), 2.0), torch.full((4, 3), 3.0)
    torch.save({"tok.weight": base, "out.weight": base}, tmp_path / "base.pth")
    save_file({"tok.weight": one, "out.weight": one.clone()}, tmp_path / "copies.safetensors")
    save_file({"tok.weight": one, "out.weight": other}, tmp_path / "two.safetensors")
    ckpt_tools.extract_lora([tmp_path / "base.pth", tmp_path / "copies.safetensors"], tmp_path / "out", rank=1)
    ckpt_tools.convert(tmp_path / "base.pth", tmp_path / "merged.pth", lora=tmp_path / "out")
    merged = torch.load(tmp_path / "merged.pth")
    torch.testing.assert_close(merged, {"tok.weight": one, "out.weight": one})
    with pytest.raises(ConvertError, match="are tied in the base, and differ in the tuned model"):
        ckpt_tools.extract_lora([tmp_path / "base.pth", tmp_path / "two.safetensors"], tmp_path / "two", rank=1)


def test_containers_and_wrappers(tmp_path: Path) -> None:
    """The two may be of different containers and dtypes, wrapped, and in a training checkpoint."""
    base = {"a.weight": torch.zeros(3, 4, dtype=torch.bfloat16)}
    save_file(base, tmp_path / "base.safetensors")
    torch.save({"model": {"module.a.weight": torch.ones(3, 4)}}, tmp_path / "tuned.pth")
    report = ckpt_tools.extract_lora([tmp_path / "base.safetensors", tmp_path / "tuned.pth"], tmp_path / "out", rank=1)
    assert report.error < 1e-6


def test_refusals(tmp_path: Path) -> None:
    """Other names, equal models, NaN, no rank, a folder that is there: each is told, and nothing is written."""
    base = {"a.weight": torch.zeros(3, 4)}
    save_file({"b.weight": torch.zeros(3, 4)}, tmp_path / "other.safetensors")
    save_file({"a.weight": torch.full((3, 4), float("nan"))}, tmp_path / "nan.safetensors")
    one, same = saved(tmp_path, base, base)
    out = tmp_path / "out"
    with pytest.raises(ConvertError, match="have different names"):
        ckpt_tools.extract_lora([one, tmp_path / "other.safetensors"], out, rank=1)
    with pytest.raises(NothingMatchedError, match=r"differ in no weight"):
        ckpt_tools.extract_lora([one, same], out, rank=1)
    with pytest.raises(ConvertError, match="NaN or infinite"):
        ckpt_tools.extract_lora([one, tmp_path / "nan.safetensors"], out, rank=1)
    for rank in (None, 0):
        with pytest.raises(UsageError, match="rank"):
            ckpt_tools.extract_lora([one, same], out, rank=rank)
    with pytest.raises(UsageError, match="two checkpoints"):
        ckpt_tools.extract_lora([one], out, rank=1)
    assert not out.exists()
    out.mkdir()
    (out / "notes.txt").write_text("mine")
    with pytest.raises(OutputExistsError):
        ckpt_tools.extract_lora([one, same], out, rank=1)
    save_file({"a.weight": torch.ones(3, 4)}, tmp_path / "tuned.safetensors")
    ckpt_tools.extract_lora([one, tmp_path / "tuned.safetensors"], out, rank=1, overwrite=True)
    assert sorted(os.listdir(out)) == ["adapter_config.json", "adapter_model.safetensors", "notes.txt"]


def test_a_dry_run_writes_nothing(tmp_path: Path) -> None:
    """It tells the error all the same."""
    base, tuned = weights(), weights()
    tuned["first.weight"] += 1
    report = ckpt_tools.extract_lora(saved(tmp_path, base, tuned), tmp_path / "out", rank=1, dry_run=True)
    assert report.modules[0].error < 1e-6
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("damaged", [0, 1])
def test_damage_becomes_no_adapter(damaged: int, tmp_path: Path) -> None:
    """A record that does not match its CRC-32 is refused, in the base and in the tuned model."""
    base, tuned = weights(), weights()
    tuned["first.weight"] += 1
    paths = [tmp_path / "base.pth", tmp_path / "tuned.pth"]
    for path, state in zip(paths, (base, tuned), strict=True):
        torch.save(state, path)
    flip_bit(paths[damaged], (base, tuned)[damaged]["first.weight"].numpy().tobytes())
    with pytest.raises(ChecksumError):
        ckpt_tools.extract_lora(paths, tmp_path / "out", rank=1)
    assert not (tmp_path / "out").exists()
