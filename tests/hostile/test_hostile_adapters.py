"""Adapters that mean harm or nothing: refused by name, in little time and memory, and nothing is written."""

import json
import os
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

import ckpt_tools
from ckpt_tools.errors import CkptError

P = "base_model.model."
GOOD = {f"{P}q.lora_A.weight": torch.ones(2, 6), f"{P}q.lora_B.weight": torch.ones(6, 2)}
CONFIG: dict[str, Any] = {"peft_type": "LORA", "r": 2, "lora_alpha": 2}


def refused(
    folder: Path, tensors: dict[str, torch.Tensor], config: dict[str, Any] | str, base: tuple[int, ...] = (6, 6)
) -> str:
    """What is said of an adapter, by convert; inspect describes it, or refuses it likewise."""
    save_file({"q.weight": torch.zeros(base), "q.bias": torch.zeros(base[0])}, folder / "base.safetensors")
    save_file(tensors, folder / "adapter_model.safetensors")
    text = config if isinstance(config, str) else json.dumps(config)
    (folder / "adapter_config.json").write_text(text)
    before = sorted(os.listdir(folder))
    with pytest.raises(CkptError) as caught:
        ckpt_tools.convert(folder / "base.safetensors", folder / "out.safetensors", lora=folder)
    assert sorted(os.listdir(folder)) == before
    ckpt_tools.inspect(folder / "adapter_model.safetensors")
    return str(caught.value)


@pytest.mark.parametrize(
    ("tensors", "message"),
    [
        ({f"{P}q.lora_A.weight": torch.ones(0, 6), f"{P}q.lora_B.weight": torch.ones(6, 0)}, "do not multiply"),
        ({f"{P}q.lora_A.weight": torch.ones(2, 6), f"{P}q.lora_B.weight": torch.ones(6, 3)}, "do not multiply"),
        ({f"{P}q.lora_A.weight": torch.ones(12), f"{P}q.lora_B.weight": torch.ones(6, 2)}, "do not multiply"),
        ({f"{P}q.lora_A.weight": torch.ones(2, 6)}, "one factor of 'q' and not the other"),
        ({f"{P}q.lora_A.weight": torch.ones(2, 6), f"{P}q.lora_B.weight": torch.ones(6, 2, 3)}, "has a kernel"),
        ({f"{P}q.lora_A.weight": torch.ones(2, 7), f"{P}q.lora_B.weight": torch.ones(6, 2)}, r"make [6, 7]"),
        (GOOD | {f"{P}q.lora_A.default.weight": torch.ones(2, 6)}, "two tensors for one part"),
        (GOOD | {f"{P}q.lora_magnitude_vector": torch.ones(5)}, "5 magnitudes for 6 outputs"),
        (GOOD | {f"{P}q.lora_B.bias": torch.ones(5)}, "the bias of 'q' is [5]"),
        (GOOD | {f"{P}q.alpha": torch.tensor(float("nan"))}, "not one finite number"),
        (GOOD | {f"{P}q.alpha": torch.ones(3)}, "not one finite number"),
        (GOOD | {f"{P}q.lora_A.weight": torch.full((2, 6), float("nan"))}, "NaN or infinite"),
        (GOOD | {f"{P}q.lora_A.weight": torch.ones(2, 6, dtype=torch.int8)}, "is int8"),
        (GOOD | {f"{P}q.lora_A.weight": torch.ones(2, 6).to(torch.float8_e4m3fn)}, "is float8_e4m3fn"),
        (GOOD | {f"{P}q.lora_B.weight": torch.full((6, 2), 3e38)}, "36 values beyond what float32"),
        (GOOD | {f"{P}q.weight": torch.ones(5, 5)}, "the adapter is for another model"),
        (GOOD | {f"{P}other.weight": torch.ones(5, 5)}, "no partner"),
    ],
)  # fmt: skip
def test_tensors_that_are_no_adapter(tensors: dict[str, torch.Tensor], message: str, tmp_path: Path) -> None:
    """Rank 0, shapes that do not multiply, halves, doubles, NaN, other dtypes, overflow."""
    assert message.lower() in refused(tmp_path, tensors, CONFIG).lower()


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ("", "not JSON"), ("[1]", "no JSON object"), ('{"peft_type": "LORA", "lora_alpha": NaN, "r": 2}', "lora_alpha"),
        ('{"peft_type": "LORA", "lora_alpha": 1e999, "r": 2}', "lora_alpha"),
        (CONFIG | {"r": -1}, "not a whole number above 0"), (CONFIG | {"r": 1 << 40}, "not a whole number above 0"),
        (CONFIG | {"r": True}, "not a whole number above 0"), (CONFIG | {"lora_alpha": 10**400}, "lora_alpha"),
        (CONFIG | {"alpha_pattern": [1]}, "alpha_pattern"), (CONFIG | {"alpha_pattern": {"q": "1"}}, "alpha_pattern"),
        (CONFIG | {"modules_to_save": "head"}, "modules_to_save"),
        (CONFIG | {"use_rslora": "false"}, "use_rslora in adapter_config.json is neither true nor false"),
        (CONFIG | {"use_dora": 0}, "use_dora"), (CONFIG | {"fan_in_fan_out": [True]}, "fan_in_fan_out"),
        (CONFIG | {"lora_bias": "none"}, "lora_bias"), (CONFIG | {"alpha_pattern": {"(a+)+b": 1}}, "could take forever"),
        (CONFIG | {"alpha_pattern": {"(.*a){9}": 1}}, "could take forever"),
        (CONFIG | {"alpha_pattern": {"a*" * 30: 1}}, "could take forever"),
        (CONFIG | {"alpha_pattern": {"a?" * 60 + "a" * 60: 1}}, "could take forever"),
        (CONFIG | {"alpha_pattern": {"(x+x+)\\1*y": 1}}, "could take forever"),
        (CONFIG | {"alpha_pattern": {"a{99999999999}": 1}}, "alpha_pattern"),
        (CONFIG | {"alpha_pattern": {"[" * 1_000_000: 1}}, "could take forever"),
        (CONFIG | {"alpha_pattern": {"[\u0100-\uffff]" * 300: 1}}, "could take forever"),
        (CONFIG | {"alpha_pattern": {"(?i:[!-~])" * 190: 1}}, "could take forever"),
        (CONFIG | {"alpha_pattern": {"(?i)q": 1}}, "not a regular expression"),
        (CONFIG | {"peft_type": {"a": [1] * 1000}}, "only LoRA"), ("[" * 100_000, "adapter_config.json"),
    ],
)  # fmt: skip
def test_configurations_that_mean_nothing(config: dict[str, Any] | str, message: str, tmp_path: Path) -> None:
    """Numbers that are none, patterns that would run for ever, text that is not JSON."""
    names = {f"{P}{'a' * 60}.lora_{side}.weight": value for side, value in (("A", torch.ones(2, 6)), ("B", torch.ones(6, 2)))}
    assert message in refused(tmp_path, names, config)


def test_a_crowd_of_patterns(tmp_path: Path) -> None:
    """Megabytes of short patterns took a minute to compile: what that takes counts."""
    started = time.process_time()
    said = refused(tmp_path, GOOD, CONFIG | {"alpha_pattern": {f"m{number}.(a|b)[cd]+": 1 for number in range(250_000)}})
    assert time.process_time() - started < 5
    assert "50000 patterns are held against 1 modules" in said


def test_as_many_patterns_as_an_adapter_has(tmp_path: Path) -> None:
    """PEFT writes one for each module."""
    names = [f"model.layers.{number}.mlp.down_proj" for number in range(300)]
    save_file({f"{name}.weight": torch.zeros(1, 1) for name in names}, tmp_path / "base.safetensors")
    factors = {f"{P}{name}.lora_{side}.weight": torch.ones(1, 1) for name in names for side in "AB"}
    save_file(factors, tmp_path / "adapter_model.safetensors")
    config = CONFIG | {"r": 1, "alpha_pattern": {name: number + 1 for number, name in enumerate(names)}}
    (tmp_path / "adapter_config.json").write_text(json.dumps(config))
    ckpt_tools.convert(tmp_path / "base.safetensors", tmp_path / "out.safetensors", lora=tmp_path)
    merged = load_file(tmp_path / "out.safetensors")
    assert [merged[f"{name}.weight"].item() for name in names] == list(range(1, 301))


def test_names_that_answer_to_each_other(tmp_path: Path) -> None:
    """Many modules whose names end alike, in the adapter and in the base: tried within bounds, and told."""
    base = {f"{'a.' * n}b.weight": torch.zeros(1, 1) for n in range(1, 300)}
    factors = {f"{P}{'a.' * n}c.b.lora_{side}.weight": torch.ones(1, 1) for n in range(300) for side in "AB"}
    save_file(base, tmp_path / "base.safetensors")
    save_file(factors, tmp_path / "adapter_model.safetensors")
    (tmp_path / "adapter_config.json").write_text(json.dumps(CONFIG | {"r": 1}))
    with pytest.raises(CkptError, match="are not in"):
        ckpt_tools.convert(tmp_path / "base.safetensors", tmp_path / "out.safetensors", lora=tmp_path)


def test_a_pickled_adapter_runs_nothing(tmp_path: Path) -> None:
    """A `.bin` that would run code when torch loads it gives its tensors, and runs nothing."""

    class Harm:
        def __reduce__(self) -> tuple[Any, ...]:
            return os.mkdir, (str(tmp_path / "harmed"),)

    save_file({"q.weight": torch.zeros(6, 6)}, tmp_path / "base.safetensors")
    torch.save(GOOD | {"note": Harm()}, tmp_path / "adapter_model.bin")
    (tmp_path / "adapter_config.json").write_text(json.dumps(CONFIG))
    ckpt_tools.convert(tmp_path / "base.safetensors", tmp_path / "out.safetensors", lora=tmp_path)
    assert not (tmp_path / "harmed").exists()
