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
        ("experts", {"target_parameters": ["experts.down_proj"]}, "factors of 2 parameters of 'experts'; .* names 1"),
        ("experts", {"target_parameters": ["experts.down_proj", "experts.other"]}, "factors of 2 parameters"),
        ("experts-018-square", {"peft_version": None}, "'experts.square', .* cannot be told"),
        ("experts-018-square", {"peft_version": "0.21.2"}, "'experts.square', .* cannot be told"),
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


def test_grouped_experts_are_refused(tmp_path: Path) -> None:
    """NeMo Automodel's factors, by their name."""
    given = adapter(tmp_path / "a", "experts")
    name = "base_model.model.experts.lora_gate_and_up_A"
    save_file(load_file(given / "adapter_model.safetensors") | {name: torch.ones(3, 6, 2)}, given / "adapter_model.safetensors")
    with pytest.raises(ConvertError, match=r"lora_gate_and_up_A' is a factor of grouped experts"):
        ckpt_tools.convert(LORA / "experts" / "base.safetensors", tmp_path / "out.safetensors", lora=given)
