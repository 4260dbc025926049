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
from tests.support.lora import LORA, Tensors, adapter, base_of, expected, merge

EXPERTS, WIDTH, INNER = 3, 6, 5
NAME = "model.layers.0.mlp.experts"


def copied(folder: Path, kind: str, **settings: Any) -> Path:
    """An adapter of the fixtures with other settings."""
    shutil.copytree(LORA / kind, folder)
    config = json.loads((folder / "adapter_config.json").read_text()) | settings
    (folder / "adapter_config.json").write_text(json.dumps({key: value for key, value in config.items() if value is not None}))
    return folder


def split(gate_up: torch.Tensor, down: torch.Tensor, parent: str, *names: str) -> Tensors:
    """A weight for each expert, of parameters of all experts."""
    parts = zip(names, (*gate_up.chunk(2, dim=1), down), strict=True)
    return {f"{parent}.experts.{n}.{name}.weight": value[n].contiguous() for name, value in parts for n in range(EXPERTS)}


@pytest.mark.parametrize("names", [("block_sparse_moe", "w1", "w3", "w2"), ("mlp", "gate_proj", "up_proj", "down_proj")])
def test_a_base_with_a_weight_for_each_expert(names: tuple[str, ...], tmp_path: Path) -> None:
    """transformers 5 stacks experts when it loads, and writes them one by one; gate and up are one parameter there."""
    base, wanted = (
        split(tensors["experts.gate_up_proj"], tensors["experts.down_proj"], f"layers.0.{names[0]}", *names[1:])
        for tensors in (base_of("experts"), expected("experts"))
    )
    given = copied(tmp_path / "a", "experts")
    parts = load_file(given / "adapter_model.safetensors").items()
    factors = {name.replace("model.experts", f"model.{NAME[6:]}"): value for name, value in parts if ".q." not in name}
    save_file(factors, given / "adapter_model.safetensors")
    made, _ = merge(tmp_path, base, given)
    for name, value in wanted.items():
        torch.testing.assert_close(made[name], value, rtol=0, atol=1e-6)


@pytest.mark.parametrize(("kind", "ranks"), [("experts", {"2": 3}), ("experts-patterns", {"2": 2, "3": 1})])
def test_what_inspect_tells(kind: str, ranks: dict[str, int]) -> None:
    told = ckpt_tools.inspect(LORA / kind / "adapter_model.safetensors").adapter
    assert told is not None
    assert (told["ranks"], told["experts"], told["modules"], told["problem"]) == (ranks, [3], 3, None)


@pytest.mark.parametrize(
    ("kind", "settings", "message"),
    [
        ("experts", {"rank_pattern": {"experts.*": 4}}, r"factors of 'experts', .* fit none of .*gate_up_proj' \[3, 8, 6\]"),
        ("experts", {"target_parameters": ["experts.down_proj"]}, "factors of 2 parameters of 'experts'; .* has 1"),
        ("experts", {"target_parameters": ["experts.down_proj", "experts.other"]}, "factors of 2 parameters"),
        ("experts-018-square", {"peft_version": None}, "'experts.square', .* is unknown"),
        ("experts-018-square", {"peft_version": "0.21.2"}, "'experts.square', .* is unknown"),
        ("experts", {"target_parameters": "experts"}, "target_parameters in .* is not a list of names"),
        ("experts", {"width": 7}, r"fit none of|not in "),
    ],
)
def test_what_is_refused(kind: str, settings: dict[str, Any], message: str, tmp_path: Path) -> None:
    """Another rank, another number of parameters, a layout that nothing tells, a base of another width."""
    base = base_of(kind)
    if width := (settings := {**settings}).pop("width", None):
        base["experts.gate_up_proj"] = torch.zeros(3, 8, width)
    with pytest.raises(ConvertError, match=message):
        merge(tmp_path, base, copied(tmp_path / "a", kind, **settings))


def grouped(folder: Path, **settings: Any) -> Tensors:
    """An adapter with NeMo Automodel's factors [experts, in, rank] and [experts, rank, out] of all experts of a layer."""
    torch.manual_seed(4)
    sizes = {"gate_and_up_A": (WIDTH, 2), "gate_and_up_B": (2, 2 * INNER), "down_A": (INNER, 2), "down_B": (2, WIDTH)}
    factors = {name: torch.randn(EXPERTS, *size) for name, size in sizes.items()}
    names = {f"{NAME}.lora_{name}": value for name, value in factors.items()}
    adapter(folder, names, **{"lora_alpha": 6, **settings})
    return factors


def stacked() -> tuple[torch.Tensor, torch.Tensor]:
    """The parameters of all experts, gate and up in one."""
    return torch.randn(EXPERTS, 2 * INNER, WIDTH), torch.randn(EXPERTS, WIDTH, INNER)


@pytest.mark.parametrize("layout", ["stacked", "turned", "split"])
def test_grouped_factors(layout: str, tmp_path: Path) -> None:
    """Into a parameter of all experts [out, in] or [in, out], and into a weight for each expert: gate first, then up."""
    factors, base = grouped(tmp_path / "a"), stacked()
    changed = [
        value + 3 * (factors[f"{own}_A"] @ factors[f"{own}_B"]).mT
        for value, own in zip(base, ("gate_and_up", "down"), strict=True)
    ]

    def laid_out(gate_up: torch.Tensor, down: torch.Tensor) -> Tensors:
        if layout == "split":
            return split(gate_up, down, NAME.removesuffix(".experts"), "gate_proj", "up_proj", "down_proj")
        own = {f"{NAME}.gate_up_proj": gate_up, f"{NAME}.down_proj": down}
        return {name: (value.mT if layout == "turned" else value).contiguous() for name, value in own.items()}

    made, report = merge(tmp_path, laid_out(*base), tmp_path / "a")
    for name, value in laid_out(*changed).items():
        torch.testing.assert_close(made[name], value, rtol=0, atol=2e-6)
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
    grouped(tmp_path / "a", **settings)
    path = tmp_path / "a" / "adapter_model.safetensors"
    count = {"half": 1, "empty": 0}.get(gone, EXPERTS)  # of fewer experts than the base has
    tensors = {name: value[:count].clone() for name, value in load_file(path).items() if not gone or not name.endswith(gone)}
    save_file(tensors, path)
    if gone.endswith("json"):
        (tmp_path / "a" / gone).unlink()
    ckpt_tools.inspect(path)
    gate_up, down = stacked()
    with pytest.raises(ConvertError, match=message):
        merge(tmp_path, {f"{NAME}.gate_up_proj": gate_up, f"{NAME}.down_proj": down}, tmp_path / "a")
