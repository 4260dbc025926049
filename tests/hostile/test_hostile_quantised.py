"""Quantised weights whose parts lie about one another: refused by name, nothing written; inspect and stats go on."""

import contextlib
import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

import ckpt_tools
from ckpt_tools.errors import CkptError
from tests.support.samples import FIXTURES

QUANTISED = FIXTURES / "quantised"
NF4 = "nf4.0.weight"
STATE = f"{NF4}.quant_state.bitsandbytes__nf4"


def of(file: str, name: str) -> dict[str, torch.Tensor]:
    """The parts of one weight of a fixture."""
    return {key: value for key, value in load_file(QUANTISED / f"{file}.safetensors").items() if key.startswith(f"{name}.")}


def check_refused(tmp_path: Path, tensors: dict[str, torch.Tensor]) -> None:
    """Making plain is refused; inspect and stats say what they can, or refuse."""
    save_file({key: value.contiguous() for key, value in tensors.items()}, tmp_path / "in.safetensors")
    with pytest.raises(CkptError):
        ckpt_tools.convert(tmp_path / "in.safetensors", tmp_path / "out.safetensors", dequantize="bf16")
    assert not (tmp_path / "out.safetensors").exists()
    assert ckpt_tools.inspect(tmp_path / "in.safetensors").totals["tensors"] == len(tensors)
    with contextlib.suppress(CkptError):
        ckpt_tools.stats(tmp_path / "in.safetensors")


@pytest.mark.parametrize(
    "lie",
    [
        {"blocksize": 0}, {"blocksize": -64}, {"blocksize": True}, {"blocksize": 2**70}, {"blocksize": 63.5},
        {"blocksize": "64"}, {"shape": [2**62, 2**62]}, {"shape": [-33, -65]}, {"shape": []}, {"shape": [33.0, 65]},
        {"shape": None}, {"shape": [1] * 100}, {"shape": [0, 65]}, {"shape": [33, 66]}, {"quant_type": "fp4"},
        {"quant_type": None}, {"blocksize": 128},
    ],
    ids=str,
)  # fmt: skip
def test_a_state_that_lies(tmp_path: Path, lie: dict[str, Any]) -> None:
    """The JSON of a bitsandbytes weight: each value that is not what it should be."""
    tensors = of("bitsandbytes", NF4)
    state = json.loads(bytes(tensors[STATE].tolist())) | lie
    check_refused(tmp_path, tensors | {STATE: torch.tensor(list(json.dumps(state).encode()), dtype=torch.uint8)})


BROKEN = [b"", b"{", b"[1]", b"null", b"\xff\xfe", b'{"a":' * 5000, b" " * 100_000]


@pytest.mark.parametrize("data", BROKEN, ids=lambda data: repr(data[:8]))
def test_a_state_that_is_not_json(tmp_path: Path, data: bytes) -> None:
    """What is no object of JSON, nested too deep, or larger than any state."""
    check_refused(tmp_path, of("bitsandbytes", NF4) | {STATE: torch.tensor(list(data), dtype=torch.uint8)})


@pytest.mark.parametrize(
    ("file", "name", "lie"),
    [
        ("bitsandbytes", NF4, {f"{NF4}.absmax": torch.ones(3)}),
        ("bitsandbytes", NF4, {f"{NF4}.absmax": torch.ones(0)}),
        ("bitsandbytes", NF4, {f"{NF4}.quant_map": torch.ones(15)}),
        ("bitsandbytes", NF4, {f"{NF4}.nested_absmax": torch.ones(1)}),
        ("bitsandbytes", NF4, {NF4: torch.ones(3, dtype=torch.uint8)}),
        ("compressed_tensors", "pack-quantized.0", {"pack-quantized.0.weight_shape": torch.tensor([33, 2**40])}),
        ("compressed_tensors", "pack-quantized.0", {"pack-quantized.0.weight_shape": torch.tensor([33, 0])}),
        ("compressed_tensors", "pack-quantized.0", {"pack-quantized.0.weight_shape": torch.tensor([1, 2, 3])}),
        ("compressed_tensors", "pack-quantized.0", {"pack-quantized.0.weight_scale": torch.ones(33, 65)}),
        ("compressed_tensors", "pack-quantized.0", {"pack-quantized.0.weight_scale": torch.ones(0)}),
        ("compressed_tensors", "pack-quantized.0", {"pack-quantized.0.weight_g_idx": torch.full((64,), 9, dtype=torch.int32)}),
        ("compressed_tensors", "pack-quantized.0", {"pack-quantized.0.weight_zero_point": torch.ones(1, dtype=torch.int32)}),
        ("gptq", "layers.1", {"layers.1.g_idx": torch.full((128,), -7, dtype=torch.int32)}),
        ("gptq", "layers.1", {"layers.1.g_idx": torch.full((128,), 99, dtype=torch.int32)}),
        ("gptq", "layers.1", {"layers.1.g_idx": torch.zeros(5, dtype=torch.int32)}),
        ("gptq", "layers.0", {"layers.0.scales": torch.ones(0, 32)}),
        ("gptq", "layers.0", {"layers.0.qzeros": torch.ones(2, 0, dtype=torch.int32)}),
        ("awq", "layers.0", {"layers.0.qzeros": torch.ones(3, 4, dtype=torch.int32)}),
        ("mxfp4", "block.0.mlp.mlp1_weight", {"block.0.mlp.mlp1_weight.scales": torch.ones(2, 24, 2, dtype=torch.uint8)}),
        ("mxfp4", "block.0.mlp.mlp1_weight", {"block.0.mlp.mlp1_weight.blocks": torch.ones(16, dtype=torch.uint8)}),
    ],
)  # fmt: skip
def test_parts_of_other_shapes(tmp_path: Path, file: str, name: str, lie: dict[str, torch.Tensor]) -> None:
    """Scales, zero points, groups and codes that do not belong together, none at all, and groups that there are not."""
    tensors = {key: value for key, value in load_file(QUANTISED / f"{file}.safetensors").items() if key.startswith(name)}
    check_refused(tmp_path, tensors | lie)


@pytest.mark.parametrize("shape", [(0,), (0, 0), (5, 4), (4, 5), (2, 2, 2), (3,), (1, 1, 4)], ids=str)
def test_scales_of_other_shapes(tmp_path: Path, shape: tuple[int, ...]) -> None:
    """FP8 with more scales than elements, none, of too many dimensions, or of a row that is not there."""
    check_refused(tmp_path, {"a.weight": torch.ones(4, 4).to(torch.float8_e4m3fn), "a.weight_scale": torch.ones(shape)})


@pytest.mark.parametrize("shape", [(0, 4), (4, 0), (0,)], ids=str)
def test_empty_weights(tmp_path: Path, shape: tuple[int, ...]) -> None:
    """A weight without elements and with one scale is an empty one."""
    tensors = {"a.weight": torch.ones(shape).to(torch.float8_e4m3fn), "a.weight_scale": torch.ones(1)}
    save_file(tensors, tmp_path / "in.safetensors")
    ckpt_tools.convert(tmp_path / "in.safetensors", tmp_path / "out.safetensors", dequantize="bf16")
    assert load_file(tmp_path / "out.safetensors")["a.weight"].shape == shape


def test_a_single_row_of_words(tmp_path: Path) -> None:
    """A GPTQ weight of eight inputs has one row of words, which stands on its side while it is unpacked."""
    parts = {
        "l.qweight": torch.zeros(1, 8, dtype=torch.int32), "l.qzeros": torch.zeros(1, 1, dtype=torch.int32),
        "l.scales": torch.ones(1, 8, dtype=torch.float16), "l.g_idx": torch.zeros(8, dtype=torch.int32),
    }  # fmt: skip
    save_file(parts, tmp_path / "in.safetensors")
    ckpt_tools.convert(tmp_path / "in.safetensors", tmp_path / "out.safetensors", dequantize="bf16")
    assert load_file(tmp_path / "out.safetensors")["l.weight"].shape == (8, 8)


ODD: list[Any] = [
    None, True, -1, 2**70, 1e308, float("nan"), "4", "\ud800", [], [None], [[1]], {}, {"": None}, [128, -1], [2**40, 2**40],
]  # fmt: skip


@pytest.mark.parametrize("key", ["quant_method", "bits", "group_size", "weight_block_size", "config_groups", "version", None])
def test_a_config_of_other_types(tmp_path: Path, key: str | None) -> None:
    """config.json whose values are of other types says nothing, or is refused; the numbers are never others by it."""
    save_file(of("gptq", "layers.6"), tmp_path / "in.safetensors")
    outputs = set()
    for value in [*ODD, *([{"config_groups": {"a": {"weights": odd}}} for odd in ODD] if key is None else [])]:
        said = value if key is None else {"quant_method": "gptq", "bits": 4, key: value}
        (tmp_path / "config.json").write_text(json.dumps({"quantization_config": said}))
        with contextlib.suppress(CkptError):
            ckpt_tools.convert(tmp_path / "in.safetensors", tmp_path / "out.safetensors", dequantize="bf16", overwrite=True)
            outputs.add((tmp_path / "out.safetensors").read_bytes())
        ckpt_tools.inspect(tmp_path / "in.safetensors")
    assert len(outputs) == 1
