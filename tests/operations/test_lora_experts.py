"""`--lora` with adapters of experts (`target_parameters`); fixtures/lora/experts* are PEFT's own."""

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

import ckpt_tools
from ckpt_tools.errors import ConvertError
from tests.support.samples import FIXTURES

LORA = FIXTURES / "lora"


def adapter(folder: Path, kind: str, **settings: Any) -> Path:
    """A copy of an adapter, with other settings."""
    shutil.copytree(LORA / kind, folder)
    config = json.loads((folder / "adapter_config.json").read_text())
    config = {key: value for key, value in (config | settings).items() if value is not None}
    (folder / "adapter_config.json").write_text(json.dumps(config))
    return folder


@pytest.mark.parametrize(
    ("path", "names", "parent"),
    [("mlp", ("w1", "w3", "w2"), "block_sparse_moe"), ("mlp", ("gate_proj", "up_proj", "down_proj"), "mlp")],
)
def test_a_base_with_a_weight_for_each_expert(path: str, names: tuple[str, str, str], parent: str, tmp_path: Path) -> None:
    """transformers 5 stacks experts when it loads, and writes them one by one; gate and up are one parameter there."""
    base, merged = load_file(LORA / "experts" / "base.safetensors"), load_file(LORA / "experts" / "merged.safetensors")

    def split(tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        gate, up = tensors["experts.gate_up_proj"].chunk(2, dim=1)
        return {
            f"layers.0.{parent}.experts.{number}.{name}.weight": value[number].contiguous()
            for name, value in zip(names, (gate, up, tensors["experts.down_proj"]), strict=True) for number in range(3)
        }  # fmt: skip

    save_file(split(base), tmp_path / "base.safetensors")
    given = adapter(tmp_path / "a", "experts")
    factors = {
        name.replace("model.experts", f"model.layers.0.{path}.experts"): value
        for name, value in load_file(given / "adapter_model.safetensors").items() if ".q." not in name
    }  # fmt: skip
    save_file(factors, given / "adapter_model.safetensors")
    ckpt_tools.convert(tmp_path / "base.safetensors", tmp_path / "out.safetensors", lora=given)
    for name, value in split(merged).items():
        torch.testing.assert_close(load_file(tmp_path / "out.safetensors")[name], value, rtol=0, atol=1e-6)


@pytest.mark.parametrize(("kind", "ranks"), [("experts", {"2": 3}), ("experts-patterns", {"2": 2, "3": 1})])
def test_what_inspect_tells(kind: str, ranks: dict[str, int]) -> None:
    """The rank is that of one expert, of each parameter its own."""
    told = ckpt_tools.inspect(LORA / kind / "adapter_model.safetensors").adapter
    assert told is not None
    assert (told["ranks"], told["experts"], told["modules"], told["problem"]) == (ranks, [3], 3, None)


@pytest.mark.parametrize(
    ("kind", "settings", "message"),
    [
        (
            "experts",
            {"rank_pattern": {"experts.*": 4}},
            r"the factors of 'experts', .* fit none of .*gate_up_proj' \[3, 8, 6\]",
        ),
        ("experts", {"target_parameters": ["experts.down_proj"]}, "factors of 2 parameters of 'experts'; .* has 1"),
        ("experts", {"target_parameters": ["experts.down_proj", "experts.other"]}, "factors of 2 parameters"),
        ("experts-018-square", {"peft_version": None}, "'experts.square', .* is unknown"),
        ("experts-018-square", {"peft_version": "0.21.2"}, "'experts.square', .* is unknown"),
        ("experts", {"target_parameters": "experts"}, "target_parameters in .* is not a list of names"),
    ],
)
def test_what_is_refused(kind: str, settings: dict[str, Any], message: str, tmp_path: Path) -> None:
    """Another rank, another number of parameters, a layout that nothing tells."""
    given = adapter(tmp_path / "a", kind, **settings)
    with pytest.raises(ConvertError, match=message):
        ckpt_tools.convert(LORA / kind / "base.safetensors", tmp_path / "out.safetensors", lora=given)


def test_an_adapter_of_another_base(tmp_path: Path) -> None:
    """A base of another width has no parameter that fits."""
    base = load_file(LORA / "experts" / "base.safetensors")
    base["experts.gate_up_proj"] = torch.zeros(3, 8, 7)
    save_file(base, tmp_path / "base.safetensors")
    with pytest.raises(ConvertError, match=r"fit none of|not in "):
        ckpt_tools.convert(tmp_path / "base.safetensors", tmp_path / "out.safetensors", lora=LORA / "experts")


EXPERTS, WIDTH, INNER = 3, 6, 5


def grouped(folder: Path, **settings: Any) -> dict[str, torch.Tensor]:
    """An adapter with NeMo Automodel's factors [experts, in, rank] and [experts, rank, out] of all experts of a layer."""
    torch.manual_seed(4)
    sizes = {
        "lora_gate_and_up_A": (WIDTH, 2),
        "lora_gate_and_up_B": (2, 2 * INNER),
        "lora_down_A": (INNER, 2),
        "lora_down_B": (2, WIDTH),
    }
    factors = {name: torch.randn(EXPERTS, *size) for name, size in sizes.items()}
    folder.mkdir()
    names = {f"base_model.model.model.layers.0.mlp.experts.{name}": value for name, value in factors.items()}
    save_file(names, folder / "adapter_model.safetensors")
    (folder / "adapter_config.json").write_text(json.dumps({"peft_type": "LORA", "r": 2, "lora_alpha": 6, **settings}))
    return factors


@pytest.mark.parametrize("layout", ["stacked", "turned", "split"])
def test_grouped_factors(layout: str, tmp_path: Path) -> None:
    """Into a parameter of all experts [out, in] or [in, out], and into a weight for each expert: gate first, then up."""
    factors = grouped(tmp_path / "a")
    name = "model.layers.0.mlp.experts"
    base = {"gate_up_proj": torch.randn(EXPERTS, 2 * INNER, WIDTH), "down_proj": torch.randn(EXPERTS, WIDTH, INNER)}
    changed = {
        last: value + 3 * (factors[f"lora_{own}_A"] @ factors[f"lora_{own}_B"]).mT
        for (last, value), own in zip(base.items(), ("gate_and_up", "down"), strict=True)
    }

    def laid_out(tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        if layout != "split":
            return {
                f"{name}.{last}": (value.mT if layout == "turned" else value).contiguous() for last, value in tensors.items()
            }
        gate, up = tensors["gate_up_proj"].chunk(2, dim=1)
        kinds = {"gate_proj": gate, "up_proj": up, "down_proj": tensors["down_proj"]}
        return {
            f"{name}.{number}.{kind}.weight": value[number].clone()
            for kind, value in kinds.items()
            for number in range(EXPERTS)
        }

    save_file(laid_out(base), tmp_path / "base.safetensors")
    report = ckpt_tools.convert(tmp_path / "base.safetensors", tmp_path / "out.safetensors", lora=tmp_path / "a")
    made = load_file(tmp_path / "out.safetensors")
    for wanted, value in laid_out(changed).items():
        torch.testing.assert_close(made[wanted], value, rtol=0, atol=2e-6)
    assert report.merged[0].ranks == {2: 2}
    told = ckpt_tools.inspect(tmp_path / "a" / "adapter_model.safetensors").adapter
    assert told is not None
    assert (told["ranks"], told["experts"], told["targets"]) == ({"2": 2}, [3], {"gate_up_proj": 1, "down_proj": 1})


@pytest.mark.parametrize(
    ("gone", "settings", "message"),
    [
        ("lora_down_B", {}, "one factor of"), ("", {"use_dora": True}, "use_dora is true"),
        ("", {"r": 3}, "fit none of"), ("half", {}, "fit none of"),
        ("empty", {}, "do not multiply"), ("adapter_config.json", {}, "has no adapter_config.json"),
    ],
)  # fmt: skip
def test_grouped_factors_that_are_not_whole(gone: str, settings: dict[str, Any], message: str, tmp_path: Path) -> None:
    """Refused with the factors, or with what the configuration says."""
    grouped(tmp_path / "a", **settings)
    path = tmp_path / "a" / "adapter_model.safetensors"
    save_file({name: value for name, value in load_file(path).items() if not gone or not name.endswith(gone)}, path)
    if gone.endswith("json"):
        (tmp_path / "a" / gone).unlink()
    if gone in ("half", "empty"):  # of fewer experts than the base has
        count = {"half": 1, "empty": 0}[gone]
        save_file({name: value[:count].clone() for name, value in load_file(path).items()}, path)
        ckpt_tools.inspect(path)
    name = "model.layers.0.mlp.experts"
    base = {
        f"{name}.gate_up_proj": torch.randn(EXPERTS, 2 * INNER, WIDTH),
        f"{name}.down_proj": torch.randn(EXPERTS, WIDTH, INNER),
    }
    save_file(base, tmp_path / "base.safetensors")
    with pytest.raises(ConvertError, match=message):
        ckpt_tools.convert(tmp_path / "base.safetensors", tmp_path / "out.safetensors", lora=tmp_path / "a")
