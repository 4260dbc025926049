"""`inspect` of adapters: what they are and what they change, told without reading a tensor."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

import ckpt_tools
from tests.support.commands import main
from tests.support.samples import FIXTURES

LORA = FIXTURES / "lora"


def described(path: Path) -> dict[str, object]:
    """What is said of an adapter."""
    found = ckpt_tools.inspect(path).adapter
    assert found is not None
    return found


def test_the_page_and_the_command(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    """A folder is inspected as its adapter; the page says what it is, and the command that it shows merges it."""
    shutil.copytree(LORA / "plain", tmp_path / "adapter", ignore=shutil.ignore_patterns("merged*"))
    with pytest.raises(SystemExit) as ended:
        main(["inspect", str(tmp_path / "adapter")])
    shown = capsys.readouterr().out
    assert ended.value.code == 0
    assert "adapter     LoRA, PEFT's names, 4 modules: q x 2, v x 2\n            rank 2, alpha 4" in shown
    assert "not a checkpoint: merged" not in shown
    assert "adapter_config.json" not in shown
    (finding,) = [
        row for row in ckpt_tools.inspect(LORA / "plain" / "adapter_model.safetensors").findings if row.code == "adapter"
    ]
    base, merged = LORA / "base.safetensors", tmp_path / "merged.safetensors"
    command = finding.fix.replace("BASE", str(base)).replace("MERGED.safetensors", str(merged)).split()[1:]
    with pytest.raises(SystemExit) as ended:
        main(command)
    assert ended.value.code == 0
    torch.testing.assert_close(
        load_file(merged)["blocks.0.q.weight"], load_file(LORA / "plain" / "merged.safetensors")["blocks.0.q.weight"]
    )


def test_kohya_and_diffusers(tmp_path: Path) -> None:
    """Whose names they are; of names with underscores the last words stand for the module."""
    factors = {"down": torch.ones(2, 6), "up": torch.ones(4, 2)}
    save_file(
        {f"lora_unet_down_blocks_0_attn1_to_q.lora_{k}.weight": v for k, v in factors.items()}, tmp_path / "k.safetensors"
    )
    save_file({f"unet.mid.to_k.lora.{k}.weight": v for k, v in factors.items()}, tmp_path / "d.safetensors")
    assert described(tmp_path / "k.safetensors") | {
        "names": "kohya", "targets": {"attn1_to_q": 1}, "elements": 24,
    } == described(tmp_path / "k.safetensors")  # fmt: skip
    found = described(tmp_path / "d.safetensors")
    assert (found["names"], found["targets"], found["problem"]) == ("diffusers", {"to_k": 1}, None)


@pytest.mark.parametrize(
    ("config", "kind", "problem"),
    [
        ({"peft_type": "LOHA"}, "LoHa", "only LoRA"),
        ({"peft_type": "LORA", "init_lora_weights": "pissa"}, "LoRA", "changes the base before training"),
        ("{", "LoRA", "not JSON"),
        (None, "LoRA", "adapter_config.json, which is not beside it"),
    ],
)
def test_what_cannot_be_merged(config: object, kind: str, problem: str, tmp_path: Path) -> None:
    """An adapter that `convert` would refuse is described all the same, with the reason."""
    shutil.copy(LORA / "plain" / "adapter_model.safetensors", tmp_path)
    if config is not None:
        (tmp_path / "adapter_config.json").write_text(config if isinstance(config, str) else json.dumps(config))
    found = described(tmp_path / "adapter_model.safetensors")
    assert found["kind"] == kind
    assert problem in str(found["problem"])
    assert [row.severity for row in ckpt_tools.inspect(tmp_path / "adapter_model.safetensors").findings] == ["warning"]


def test_a_model_is_no_adapter(tmp_path: Path) -> None:
    """A state dict without factors has no such row, whatever its names."""
    save_file({"base_model.model.a.weight": torch.ones(2), "explorations.weight": torch.ones(2)}, tmp_path / "x.safetensors")
    assert ckpt_tools.inspect(tmp_path / "x.safetensors").adapter is None
