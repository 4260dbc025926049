"""Adapters: laid out as PEFT does, merged by `convert`; fixtures/lora is PEFT's own."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file

import ckpt_tools
from tests.support.files import load, save
from tests.support.samples import FIXTURES

LORA = FIXTURES / "lora"
Tensors = dict[str, torch.Tensor]


def base_of(kind: str) -> Tensors:
    """The base that an adapter of the fixtures was made for."""
    if "experts" in kind:
        return load_file(LORA / kind / "base.safetensors")
    tensors = load_file(LORA / "base.safetensors")
    return {name: value.bfloat16() for name, value in tensors.items()} if kind.startswith("bf16") else tensors


def expected(kind: str) -> Tensors:
    """What PEFT makes of it."""
    return base_of(kind) | load_file(LORA / kind / "merged.safetensors")


def adapter(folder: Path, tensors: Tensors, prefix: str = "base_model.model.", **config: Any) -> Path:
    """A folder as PEFT's `save_pretrained` writes it."""
    save(folder / "adapter_model.safetensors", {prefix + name: value for name, value in tensors.items()})
    (folder / "adapter_config.json").write_text(json.dumps({"peft_type": "LORA", "r": 2, "lora_alpha": 4} | config))
    return folder


def merge(folder: Path, base: Tensors | Path, lora: Any, out: str = "out.safetensors", **options: Any) -> tuple[Any, Any]:
    """What a base becomes with an adapter, a path or the tensors of a file; and the report."""
    base = save(folder / "base.safetensors", base) if isinstance(base, dict) else base
    lora = save(folder / "lora.safetensors", lora) if isinstance(lora, dict) else lora
    report = ckpt_tools.convert(base, folder / out, lora=lora, overwrite=True, **options)
    return load(folder / out), report


def same(one: Mapping[str, torch.Tensor], other: Mapping[str, torch.Tensor], atol: float = 0.0) -> None:
    """The same names, dtypes and values."""
    assert {name: value.dtype for name, value in one.items()} == {name: value.dtype for name, value in other.items()}
    for name, value in other.items():
        torch.testing.assert_close(one[name], value, rtol=0, atol=atol)
