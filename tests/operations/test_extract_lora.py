"""`extract-lora`: what a tuned model changed as an adapter, and how much of it the adapter leaves."""

import json
import os
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import nn

from ckpt_tools import extract_lora
from ckpt_tools.errors import ChecksumError, ConvertError, NothingMatchedError, OutputExistsError, UsageError
from tests.support.damage import flip_bit
from tests.support.files import save
from tests.support.lora import Tensors, merge


def weights(*changed: str) -> Tensors:
    """Layers of every kind that becomes factors, and a norm, which does not; some of them with 1 more."""
    torch.manual_seed(3)
    net = nn.ModuleDict({
        "embed": nn.Embedding(7, 6), "first": nn.Linear(6, 9), "second": nn.Linear(9, 5), "conv": nn.Conv2d(2, 3, 3),
        "depth": nn.Conv2d(4, 4, 3, groups=4), "norm": nn.LayerNorm(5),
    })  # fmt: skip
    return {name: torch.randn_like(value) + (name in changed) for name, value in net.state_dict().items()}


def extracted(folder: Path, base: Any, tuned: Any, *, suffix: str = ".safetensors", rank: int = 1, **options: Any) -> Any:
    paths = [save(folder / f"{name}{suffix}", state) for name, state in (("base", base), ("tuned", tuned))]
    return extract_lora(paths, folder / "out", rank=rank, **options)


def merged(folder: Path, suffix: str = ".safetensors") -> Any:
    return merge(folder, folder / f"base{suffix}", folder / "out", f"merged{suffix}")[0]


def config(folder: Path) -> Any:
    return json.loads((folder / "out" / "adapter_config.json").read_text())


def test_a_change_of_the_rank_comes_back(tmp_path: Path) -> None:
    """Of a change of rank 2 nothing is left by rank 2: linear, embedding, convolution, bias, and a norm held whole."""
    base, tuned = weights(), weights("norm.weight", "depth.weight")
    for name in ("embed.weight", "first.weight", "second.weight", "conv.weight"):
        flat = tuned[name].flatten(1)
        tuned[name] += (torch.randn(len(flat), 2) @ torch.randn(2, flat.shape[1])).reshape(tuned[name].shape)
    report = extracted(tmp_path, base, tuned, rank=2)
    assert {row.name: row.rank for row in report.modules} == {"embed": 2, "first": 2, "second": 2, "conv": 2}
    assert sorted(report.saved) == ["depth", "norm"]
    assert max(report.error, *(row.error for row in report.modules)) < 1e-6
    torch.testing.assert_close(merged(tmp_path), tuned, rtol=0, atol=1e-5)
    adapter = load_file(tmp_path / "out" / "adapter_model.safetensors")
    assert adapter["base_model.model.embed.lora_embedding_A"].shape == (2, 7)
    assert adapter["base_model.model.conv.lora_A.weight"].shape == (2, 2, 3, 3)
    assert adapter["base_model.model.conv.lora_B.weight"].shape == (3, 2, 1, 1)
    assert config(tmp_path)["target_modules"] == ["conv", "embed", "first", "second"]


def test_the_error_is_the_best_of_the_rank(tmp_path: Path) -> None:
    """A change of full rank leaves what the singular values beyond the rank are, of each module and in all."""
    base = {"a.weight": torch.zeros(8, 6), "b.weight": torch.zeros(6, 5)}
    tuned = {name: torch.randn_like(value) for name, value in base.items()}
    report = extracted(tmp_path, base, tuned, rank=3)
    left = size = 0.0
    for row in report.modules:
        values = torch.linalg.svdvals(tuned[f"{row.name}.weight"].double())
        assert row.error == pytest.approx(float(values[3:].norm() / values.norm()), rel=1e-5)
        assert row.size == pytest.approx(float(values.norm()), rel=1e-6)
        left, size = left + float(values[3:].square().sum()), size + float(values.square().sum())
    assert report.error == pytest.approx((left / size) ** 0.5, rel=1e-5)


@pytest.mark.parametrize("decay", [1.0, 0.99, 0.8], ids=["none", "slow", "quick"])
def test_the_error_of_a_large_change(tmp_path: Path, decay: float) -> None:
    """Of more than a million numbers it is found from twice as many directions as the rank, and at most 1.002 of the least."""
    torch.manual_seed(1)
    left, right = (torch.linalg.qr(torch.randn(rows, 500))[0] for rows in (2100, 500))
    tuned = torch.randn(2100, 500) if decay == 1.0 else (left * decay ** torch.arange(500)) @ right.T
    report = extracted(tmp_path, {"a.weight": torch.zeros(2100, 500)}, {"a.weight": tuned}, rank=8)
    values = torch.linalg.svdvals(tuned.double())
    assert report.error <= 1.002 * float(values[8:].norm() / values.norm())


def test_biases(tmp_path: Path) -> None:
    """Changed biases of linear layers are `lora_bias`, where every layer that is changed has one."""
    tuned = weights("first.weight", "second.weight", "first.bias")
    assert extracted(tmp_path, weights(), tuned).biases == 2
    assert config(tmp_path)["lora_bias"] is True
    torch.testing.assert_close(merged(tmp_path), tuned)


def test_a_bias_among_layers_without(tmp_path: Path) -> None:
    """PEFT has `lora_bias` for all layers or none: else a layer whose bias changed is held whole."""
    base = {"a.weight": torch.zeros(3, 4), "a.bias": torch.zeros(3), "b.weight": torch.zeros(3, 4)}
    tuned = {name: value + 1 for name, value in base.items()}
    report = extracted(tmp_path, base, tuned)
    assert (report.saved, [row.name for row in report.modules]) == (["a"], ["b"])
    assert "lora_bias is for all layers or none" in report.why["a"]
    torch.testing.assert_close(merged(tmp_path), tuned)


def test_names_that_end_alike(tmp_path: Path) -> None:
    """PEFT takes every module whose name ends as one that is saved whole for such a one, so all of them are there."""
    base = {"out.weight": torch.zeros(3, 2), **{f"{at}norm.weight": torch.ones(2) for at in ("", "blocks.0.", "pre")}}
    tuned = {**base, "out.weight": torch.ones(3, 2), "norm.weight": torch.zeros(2)}
    assert extracted(tmp_path, base, tuned).saved == ["norm", "blocks.0.norm", "prenorm"]
    assert torch.equal(merged(tmp_path)["norm.weight"], torch.zeros(2))


def test_smaller_sides_have_smaller_ranks(tmp_path: Path) -> None:
    """A weight whose smaller side is below the rank has that for its rank, and the configuration says so."""
    base = {"x.a.weight": torch.zeros(2, 9), "x.b.weight": torch.zeros(9, 8), "y.b.weight": torch.zeros(3, 3)}
    tuned = {name: torch.randn_like(value) for name, value in base.items()} | {"y.b.weight": torch.zeros(3, 3)}
    extracted(tmp_path, base, tuned, rank=8)
    said = config(tmp_path)
    assert said["rank_pattern"] == said["alpha_pattern"] == {r"^x\.a": 2}
    assert said["target_modules"] == r"x\.a|x\.b"
    torch.testing.assert_close(merged(tmp_path), tuned, rtol=0, atol=1e-5)


def test_conv1d(tmp_path: Path) -> None:
    """Weights that are stored as [in, out], told by their biases, give factors for that."""
    base = {"c.weight": torch.zeros(4, 6), "c.bias": torch.zeros(6)}
    tuned = base | {"c.weight": torch.ones(4, 6) * torch.arange(6)}
    extracted(tmp_path, base, tuned)
    assert config(tmp_path)["fan_in_fan_out"] is True
    assert load_file(tmp_path / "out" / "adapter_model.safetensors")["base_model.model.c.lora_A.weight"].shape == (1, 4)
    torch.testing.assert_close(merged(tmp_path), tuned)


def test_only_some_and_what_is_left(tmp_path: Path) -> None:
    """What `only` does not match is left, and counts as error; so does a tensor of a module with modules inside."""
    base = {"a.weight": torch.zeros(3, 4), "b.weight": torch.zeros(3, 4), "scale": torch.zeros(2)}
    tuned = {name: value + 1 for name, value in base.items()}
    report = extracted(tmp_path, base, tuned, only=["a.*", "scale"])
    assert report.left == ["b.weight", "scale"]
    assert report.error == pytest.approx((14 / 26) ** 0.5)
    with pytest.raises(NothingMatchedError, match="only='c'"):
        extracted(tmp_path, base, tuned, only="c", overwrite=True)


def test_tied_weights(tmp_path: Path) -> None:
    """A tensor under two names gives one change, also where they are tied in the base alone; two changes are refused."""
    base, one = torch.zeros(4, 3), torch.full((4, 3), 2.0)
    tied, copies = {"tok.weight": base, "out.weight": base}, {"tok.weight": one, "out.weight": one.clone()}
    for tuned in ({"tok.weight": one, "out.weight": one}, copies):
        assert [row.name for row in extracted(tmp_path, tied, tuned, suffix=".pth", overwrite=True).modules] == ["tok"]
        torch.testing.assert_close(merged(tmp_path, ".pth"), copies)
    with pytest.raises(ConvertError, match="are tied in the base, and differ in the tuned model"):
        extracted(tmp_path, tied, copies | {"out.weight": one + 1}, suffix=".pth", overwrite=True)


def test_containers_and_wrappers(tmp_path: Path) -> None:
    """The two may be of different containers and dtypes, wrapped, and in a training checkpoint; a dry run writes nothing."""
    base = save(tmp_path / "base.safetensors", {"a.weight": torch.zeros(3, 4, dtype=torch.bfloat16)})
    tuned = save(tmp_path / "tuned.pth", {"model": {"module.a.weight": torch.ones(3, 4)}})
    report = extract_lora([base, tuned], tmp_path / "out", rank=1, dry_run=True)
    assert report.modules[0].error < 1e-6
    assert not (tmp_path / "out").exists()


def test_refusals(tmp_path: Path) -> None:
    """Other names, equal models, NaN, no rank, a folder that is there: each is told, and nothing is written."""
    zeros = torch.zeros(3, 4)
    states = {"one": {"a.weight": zeros}, "other": {"b.weight": zeros}, "nan": {"a.weight": zeros + float("nan")}}
    one, other, nan = (save(tmp_path / f"{name}.safetensors", state) for name, state in states.items())
    out = tmp_path / "out"
    for paths, rank, error, message in (
        ([one, other], 1, ConvertError, "have different names"), ([one, one], 1, NothingMatchedError, "differ in no weight"),
        ([one, nan], 1, ConvertError, "NaN or infinite"), ([one, one], None, UsageError, "rank"),
        ([one, one], 0, UsageError, "rank"), ([one], 1, UsageError, "two checkpoints"),
    ):  # fmt: skip
        with pytest.raises(error, match=message):
            extract_lora(paths, out, rank=rank)
    assert not out.exists()
    out.mkdir()
    (out / "notes.txt").write_text("mine")
    with pytest.raises(OutputExistsError):
        extract_lora([one, one], out, rank=1)
    save(tmp_path / "tuned.safetensors", {"a.weight": zeros + 1})
    extract_lora([one, tmp_path / "tuned.safetensors"], out, rank=1, overwrite=True)
    assert sorted(os.listdir(out)) == ["adapter_config.json", "adapter_model.safetensors", "notes.txt"]


@pytest.mark.parametrize("damaged", [0, 1])
def test_damage_becomes_no_adapter(damaged: int, tmp_path: Path) -> None:
    """A record that does not match its CRC-32 is refused, in the base and in the tuned model."""
    states = weights(), weights("first.weight")
    paths = [save(tmp_path / f"{number}.pth", state) for number, state in enumerate(states)]
    flip_bit(paths[damaged], states[damaged]["first.weight"].numpy().tobytes())
    with pytest.raises(ChecksumError):
        extract_lora(paths, tmp_path / "out", rank=1)
    assert not (tmp_path / "out").exists()
