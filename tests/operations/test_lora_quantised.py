"""`--lora` with `--dequantize`: an adapter that was trained on a quantised base (QLoRA)."""

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

import ckpt_tools
from ckpt_tools.errors import ConvertError
from tests.support.samples import FIXTURES

BASE = FIXTURES / "quantised" / "bitsandbytes.safetensors"


def adapter(folder: Path, modules: dict[str, torch.Size]) -> Path:
    """An adapter of some modules, by the shapes of their weights."""
    torch.manual_seed(0)
    folder.mkdir()
    tensors = {}
    for module, (outputs, inputs) in modules.items():
        tensors[f"base_model.model.{module}.lora_A.weight"] = torch.randn(2, inputs)
        tensors[f"base_model.model.{module}.lora_B.weight"] = torch.randn(outputs, 2)
    save_file(tensors, folder / "adapter_model.safetensors")
    (folder / "adapter_config.json").write_text(json.dumps({"peft_type": "LORA", "r": 2, "lora_alpha": 4}))
    return folder


def test_it_is_dequantised_first(tmp_path: Path) -> None:
    """In one command as in two, to the bit; and without `dequantize` it is refused."""
    ckpt_tools.convert(BASE, tmp_path / "plain.safetensors", dequantize="bf16")
    plain = load_file(tmp_path / "plain.safetensors")
    shapes = {name.removesuffix(".weight"): value.shape for name, value in plain.items() if value.dim() == 2}
    given = adapter(tmp_path / "a", shapes)
    ckpt_tools.convert(tmp_path / "plain.safetensors", tmp_path / "two.safetensors", lora=given)
    report = ckpt_tools.convert(BASE, tmp_path / "one.safetensors", lora=given, dequantize="bf16")
    one, two = load_file(tmp_path / "one.safetensors"), load_file(tmp_path / "two.safetensors")
    assert one.keys() == two.keys()
    assert all(torch.equal(one[name], two[name]) for name in two)
    assert not any(torch.equal(one[f"{module}.weight"], plain[f"{module}.weight"]) for module in shapes)
    assert report.merged[0].modules == len(shapes)
    with pytest.raises(ConvertError, match="is quantised"):
        ckpt_tools.convert(BASE, tmp_path / "three.safetensors", lora=given)


def test_quantised_experts_are_refused_as_such(tmp_path: Path) -> None:
    """MXFP4 experts, as gpt-oss has them, are plain first."""
    given = adapter(tmp_path / "a", {"model.layers.0.mlp.experts": torch.Size((96, 24))})
    config = json.loads((given / "adapter_config.json").read_text()) | {"r": 1, "target_parameters": ["experts.gate_up_proj"]}
    (given / "adapter_config.json").write_text(json.dumps(config))
    base = FIXTURES / "quantised" / "mxfp4.safetensors"
    with pytest.raises(ConvertError, match=r"is quantised: it has .*gate_up_proj_blocks"):
        ckpt_tools.convert(base, tmp_path / "out.safetensors", lora=given)
    report = ckpt_tools.convert(base, tmp_path / "out.safetensors", lora=given, dequantize="fp32")
    assert report.merged[0].ranks == {1: 1}
