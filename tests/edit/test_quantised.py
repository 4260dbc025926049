"""Quantised weights made plain, compared with what torch makes of the same codes and scales."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

import ckpt_tools
from ckpt_tools.errors import ConvertError
from tests.support.samples import FIXTURES
from tests.support.servers import Server
from tests.support.zips import big_endian

Tensors = dict[str, torch.Tensor]
FP8 = torch.float8_e4m3fn
QUANTISED = FIXTURES / "quantised"


def plain(tmp_path: Path, tensors: Tensors, config: Any = None, **options: Any) -> tuple[Tensors, ckpt_tools.Converted]:
    """Save with safetensors, make plain, load; `config` is quantization_config in the config.json beside it."""
    save_file({name: tensor.contiguous() for name, tensor in tensors.items()}, tmp_path / "in.safetensors")
    if config is not None:
        (tmp_path / "config.json").write_text(json.dumps({"quantization_config": config}))
    options = {"dequantize": "fp32", **options}
    report = ckpt_tools.convert(tmp_path / "in.safetensors", tmp_path / "out.safetensors", overwrite=True, **options)
    return load_file(tmp_path / "out.safetensors"), report


def expect(found: Tensors, wanted: Tensors) -> None:
    """The same names, in any order, and the same values to the bit."""
    assert found.keys() == wanted.keys()
    for name, tensor in wanted.items():
        assert found[name].dtype is tensor.dtype, name
        assert torch.equal(found[name], tensor), name


def refused(tmp_path: Path, tensors: Tensors, match: str, config: Any = None, **options: Any) -> ConvertError:
    """Making plain is refused, and nothing is written."""
    (tmp_path / "out.safetensors").unlink(missing_ok=True)
    with pytest.raises(ConvertError, match=match) as caught:
        plain(tmp_path, tensors, config, **options)
    assert not (tmp_path / "out.safetensors").exists()
    return caught.value


def in_blocks(weight: torch.Tensor, scale: torch.Tensor, rows: int, columns: int) -> torch.Tensor:
    """Codes times the scales of their blocks, along the last two dimensions."""
    spread = scale.float().repeat_interleave(rows, -2)[..., : weight.shape[-2], :]
    return weight.float() * spread.repeat_interleave(columns, -1)[..., : weight.shape[-1]]


def codes(*shape: int, dtype: torch.dtype = FP8) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(sum(shape))).to(dtype)


# --- a scale a tensor, a row, a block


@pytest.mark.parametrize("shape", [(256, 384), (200, 130), (1, 300), (576, 129), (3, 130, 260)], ids=str)
def test_fp8_in_blocks(tmp_path: Path, shape: tuple[int, ...]) -> None:
    """Blocks of 128 x 128, as DeepSeek has them: of sizes that do not divide, and of experts in one tensor."""
    weight = codes(*shape)
    scale = torch.rand(*shape[:-2], -(-shape[-2] // 128), -(-shape[-1] // 128)) + 0.1
    found, report = plain(tmp_path, {"a.weight": weight, "a.weight_scale_inv": scale, "norm.weight": torch.ones(3)})
    expect(found, {"a.weight": in_blocks(weight, scale, 128, 128), "norm.weight": torch.ones(3)})
    assert sum(report.dequantised.values()) == 1


@pytest.mark.parametrize("dtype", [FP8, torch.float8_e5m2, torch.int8])
@pytest.mark.parametrize("suffix", ["weight_scale", "weight_scale_inv", "scale_weight", "scale"])
@pytest.mark.parametrize("shape", [(), (1,), (70, 1), (70,)], ids=str)
def test_a_scale_a_tensor_or_a_row(tmp_path: Path, dtype: torch.dtype, suffix: str, shape: tuple[int, ...]) -> None:
    """One scale of any shape, or one a row, under each name that is in use."""
    weight = (codes(70, 33).float() * 20).to(dtype) if dtype is torch.int8 else codes(70, 33, dtype=dtype)
    scale = torch.rand(shape).add(0.1).to(torch.bfloat16)
    spread = scale.float().reshape(-1, 1)
    expect(
        plain(tmp_path, {"a.weight": weight, f"a.{suffix}": scale})[0],
        {"a.weight": weight.float() * (spread if scale.numel() > 1 else spread.reshape(()))},
    )


def test_scales_that_are_exponents(tmp_path: Path) -> None:
    """MXFP8: bytes are exponents of 2 with a bias of 127, one for 32 columns; so is float8_e8m0fnu."""
    weight, exponents = codes(6, 64), torch.tensor([[120, 127], [130, 127], [0, 1], [127, 127], [140, 100], [127, 128]])
    scale = torch.ldexp(torch.ones(6, 2), exponents - 127)
    wanted = {"a.weight": in_blocks(weight, scale, 1, 32)}
    expect(plain(tmp_path, {"a.weight": weight, "a.weight_scale": exponents.to(torch.uint8)})[0], wanted)
    e8m0 = exponents.to(torch.uint8).view(torch.float8_e8m0fnu)
    expect(plain(tmp_path, {"a.weight": weight, "a.weight_scale": e8m0})[0], wanted)


def test_int8_with_zero_points(tmp_path: Path) -> None:
    """compressed-tensors' asymmetric int8: (code - zero point) * scale."""
    weight = torch.randint(-128, 128, (5, 12), dtype=torch.int8)
    scale, zero = torch.rand(5, 3), torch.randint(-128, 128, (5, 3), dtype=torch.int8)
    tensors = {"a.weight": weight, "a.weight_scale": scale, "a.weight_zero_point": zero}
    wanted = (weight.float() - zero.float().repeat_interleave(4, 1)) * scale.repeat_interleave(4, 1)
    expect(plain(tmp_path, tensors, {"config_groups": {"g": {"weights": {"group_size": 4}}}})[0], {"a.weight": wanted})


def test_bitsandbytes_int8(tmp_path: Path) -> None:
    """code * SCB / 127, by the factor that bitsandbytes multiplies with."""
    weight, scale = torch.randint(-127, 128, (50, 41), dtype=torch.int8), torch.rand(50) * 3
    tensors = {"a.weight": weight, "a.SCB": scale, "a.weight_format": torch.tensor(0, dtype=torch.uint8)}
    expect(plain(tmp_path, tensors)[0], {"a.weight": weight.float() * scale[:, None] * 7.874015718698502e-3})
    tensors["a.weight_format"] = torch.tensor(1, dtype=torch.uint8)
    refused(tmp_path, tensors, "tiled layout")


def test_the_block_size_of_config_json(tmp_path: Path) -> None:
    """Where shapes fit several sizes, config.json decides; one that the shapes contradict is refused."""
    weight, scale = codes(300, 300), torch.rand(3, 3) + 0.1
    tensors = {"a.weight": weight, "a.weight_scale_inv": scale}
    expect(plain(tmp_path, tensors)[0], {"a.weight": in_blocks(weight, scale, 128, 128)})
    said = {"quant_method": "fp8", "weight_block_size": [100, 140]}
    expect(plain(tmp_path, tensors, said)[0], {"a.weight": in_blocks(weight, scale, 100, 140)})
    assert "config.json says 64" in refused(tmp_path, tensors, "do not fit", {"weight_block_size": [64, 128]}).why
    tensors["a.weight_scale_inv"] = torch.rand(299, 3)
    refused(tmp_path, tensors, "the size of a block is not known|do not fit", {})


# --- what is refused


def test_a_weight_without_its_scale(tmp_path: Path) -> None:
    """One byte a weight and no scale beside it, in a checkpoint where others have one: refused, by name."""
    tensors = {"a.weight": codes(4, 4), "a.weight_scale_inv": torch.ones(1, 1), "b.weight": codes(4, 4)}
    assert "dtype='bf16'" in refused(tmp_path, tensors, r"'b\.weight' is float8_e4m3fn and has no scale").fix
    tensors["b.weight"] = torch.ones(4, 4, dtype=torch.int8)
    refused(tmp_path, tensors, r"'b\.weight' is int8 .*no scale")
    tensors["b.weight"] = torch.ones(4, 4)
    expect(plain(tmp_path, tensors)[0], {"a.weight": tensors["a.weight"].float(), "b.weight": torch.ones(4, 4)})


@pytest.mark.parametrize(
    "name", ["b.weight_scale_inv", "b.weight_scale", "b.SCB", "b.scale_weight", "b.weight.absmax", "b.qzeros"]
)
def test_a_scale_without_its_weight(tmp_path: Path, name: str) -> None:
    """What is part of a quantised weight by its name, and lies alone or beside a plain one, is refused."""
    tensors = {"a.weight": codes(4, 4), "a.weight_scale_inv": torch.ones(1, 1), name: torch.ones(1)}
    refused(tmp_path, tensors, f"'{name}' is part of a quantised weight")
    refused(tmp_path, tensors | {"b.weight": torch.ones(2, 2)}, f"'{name}' is part of a quantised weight")
    assert "a.weight" in plain(tmp_path, tensors, drop=name)[0]


def test_a_scale_may_be_a_parameter(tmp_path: Path) -> None:
    tensors = {"a.weight": codes(4, 4), "a.weight_scale": torch.ones(1)}
    others = {"logit_scale": torch.tensor(2.5), "norm.scale": torch.ones(4), "x.scales": torch.ones(2)}
    expect(plain(tmp_path, tensors | others)[0], {"a.weight": tensors["a.weight"].float()} | others)


def test_two_schemes_that_fit(tmp_path: Path) -> None:
    """Nothing is chosen: the error says what fits, and leaving one out settles it."""
    tensors = {"a.weight": torch.ones(2, 2, dtype=torch.int8), "a.SCB": torch.ones(2), "a.weight_scale": torch.ones(2, 1)}
    assert "bnb int8" in refused(tmp_path, tensors, "not clear").why
    assert plain(tmp_path, tensors, drop="*.SCB")[1].dequantised == {"int8, a scale a row -> float32": 1}
    tensors = {"a.weight": codes(2, 2), "a.weight_scale_inv": torch.ones(1, 1), "a.scale_weight": torch.ones(1)}
    assert "could be its scale" in refused(tmp_path, tensors, "not clear").why


# --- with everything else


def test_activations_are_left_out(tmp_path: Path) -> None:
    """Scales of activations and of the cache, and ComfyUI's mark: a plain model has no place for them; the report says so."""
    tensors = {"a.weight": codes(4, 4), "a.weight_scale": torch.ones(()), "scaled_fp8": torch.zeros(2, dtype=FP8)}
    tensors |= {"a.input_scale": torch.ones(()), "attn.k_scale": torch.ones(1)}
    found, report = plain(tmp_path, tensors)
    assert found.keys() == {"a.weight"}
    assert {path for path, _ in report.dropped} == {"a.input_scale", "attn.k_scale", "scaled_fp8"}


@pytest.mark.parametrize(("word", "dtype"), [("bf16", torch.bfloat16), ("fp16", torch.float16), ("fp32", torch.float32)])
def test_the_dtype(tmp_path: Path, word: str, dtype: torch.dtype) -> None:
    """Each number is rounded once; what becomes infinite or zero in halves is counted."""
    weight, scale = codes(8, 16), torch.tensor([[1e5], [1e-9], *[[0.3]] * 6])
    found, report = plain(tmp_path, {"a.weight": weight, "a.weight_scale": scale}, dequantize=word)
    wanted = (weight.float() * scale).to(dtype)
    expect(found, {"a.weight": wanted})
    infinite, zero = int(wanted.isinf().sum()), int((wanted == 0).sum() - (weight.float() == 0).sum())
    assert report.overflowed == ({"a.weight": infinite} if word == "fp16" else {})
    assert report.underflowed == ({"a.weight": zero} if word == "fp16" else {})


def test_names_ties_and_casts(tmp_path: Path) -> None:
    """In a torch checkpoint: nested, tied, wrapped, cast afterwards; the plain weight keeps its place."""
    weight, scale = codes(4, 4), torch.full((1, 1), 2.0)
    model = {
        "module.n": torch.ones(2), "module.a.weight": weight, "module.a.weight_scale_inv": scale, "module.z": torch.ones(1),
    }  # fmt: skip
    model |= {"module.b.weight": weight, "module.b.weight_scale_inv": scale}
    torch.save({"model": model, "epoch": 3}, tmp_path / "in.pth")
    report = ckpt_tools.convert(tmp_path / "in.pth", tmp_path / "out.pth", dequantize="fp32", strip_module=True, dtype="bf16")
    loaded = torch.load(tmp_path / "out.pth")
    assert list(loaded["model"]) == ["n", "a.weight", "z", "b.weight"]
    assert loaded["epoch"] == 3
    assert torch.equal(loaded["model"]["a.weight"], (weight.float() * 2).to(torch.bfloat16))
    assert loaded["model"]["a.weight"].data_ptr() == loaded["model"]["b.weight"].data_ptr()
    assert report.casts == {"float32 -> bfloat16": 4}


def test_strided_and_big_endian(tmp_path: Path) -> None:
    base, scale = codes(8, 6), torch.tensor([[3.0], [5.0], [7.0]])
    torch.save({"a.weight": base[1:7:2].t().contiguous().t(), "a.weight_scale": scale}, tmp_path / "in.pth")
    big_endian(tmp_path / "in.pth", tmp_path / "big.pth", {"0": 1, "1": 4})
    for name in ("in.pth", "big.pth"):
        ckpt_tools.convert(tmp_path / name, tmp_path / "out.pth", dequantize="fp32", overwrite=True)
        assert torch.equal(torch.load(tmp_path / "out.pth")["a.weight"], base[1:7:2].float() * scale)


@pytest.mark.parametrize("name", ["bitsandbytes", "compressed_tensors", "gptq", "awq", "mxfp4"])
def test_as_its_authors(tmp_path: Path, name: str) -> None:
    """Every weight of fixtures/quantised is what the scheme's own code makes of it, to the bit."""
    report = ckpt_tools.convert(QUANTISED / f"{name}.safetensors", tmp_path / "out.safetensors", dequantize="fp32")
    wanted, found = load_file(QUANTISED / f"{name}.plain.safetensors"), load_file(tmp_path / "out.safetensors")
    assert found.keys() == wanted.keys()
    for key, tensor in wanted.items():
        assert found[key].shape == tensor.shape, key
        assert torch.equal(found[key].to(tensor.dtype), tensor), key
    assert sum(report.dequantised.values()) == sum(not key.endswith("_bias") for key in wanted)


def gptq() -> tuple[Tensors, dict[str, Any]]:
    """A layer of 4 bits, and what config.json says of it."""
    tensors = load_file(QUANTISED / "gptq.safetensors").items()
    return {key: value for key, value in tensors if key.startswith("layers.6.")}, {"quant_method": "gptq", "bits": 4}


def test_gptq_zero_points_as_they_are(tmp_path: Path) -> None:
    """`gptq_v2` stores them as they are, which config.json says; GPTQModel calls `checkpoint_format` `format`, too.

    Another layout of these names is refused.
    """
    tensors, said = gptq()
    first, _ = plain(tmp_path, tensors)
    second, _ = plain(tmp_path, tensors, said | {"checkpoint_format": "gptq_v2"})
    groups = tensors["layers.6.scales"].float().t().repeat_interleave(32, 1)
    assert torch.allclose(second["layers.6.weight"] - first["layers.6.weight"], groups)
    expect(plain(tmp_path, tensors, said | {"format": "gptq_v2"})[0], second)
    refused(tmp_path, tensors, "layout 'marlin'", {"checkpoint_format": "marlin"})
    refused(tmp_path, tensors, "layout 'gptq_p'", said | {"format": "gptq_p"})
    refused(tmp_path, tensors, "4 bits by the shapes, and 8", {"bits": 8})


def quantised_folder(tmp_path: Path) -> Path:
    """Two shards of FP8 with their index, a config.json that says so, GPTQ's own file, a tokenizer."""
    folder = tmp_path / "in"
    folder.mkdir()
    shards = [
        {"a.weight": codes(300, 300), "a.weight_scale_inv": torch.rand(3, 2)},
        {"b.weight": codes(70, 30), "norm.weight": torch.ones(3)},
    ]
    shards[0]["b.weight_scale_inv"] = torch.rand(1, 1)  # in another shard than its weight
    names = [f"model-0000{number}-of-00002.safetensors" for number in (1, 2)]
    for name, tensors in zip(names, shards, strict=True):
        save_file(tensors, folder / name)
    weight_map = {key: name for name, tensors in zip(names, shards, strict=True) for key in tensors}
    (folder / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))
    said = {"quantization_config": {"quant_method": "fp8", "weight_block_size": [128, 160]}, "eps": 1e-05, "dtype": "bfloat16"}
    (folder / "config.json").write_text(json.dumps(said | {"text_config": {"compression_config": {}, "layers": 2}}))
    (folder / "quantize_config.json").write_text("{}")
    (folder / "tokenizer.json").write_text('{"a": 1}')
    return folder


def test_a_folder(tmp_path: Path) -> None:
    """config.json gives the size of a block, and comes along without what is no longer true; the index has no scales."""
    folder = quantised_folder(tmp_path)
    first = load_file(folder / "model-00001-of-00002.safetensors")
    wanted = in_blocks(first["a.weight"], first["a.weight_scale_inv"], 128, 160)
    report = ckpt_tools.convert(folder, tmp_path / "out", shard_size="200KB", dequantize="fp32", rename="^b=c")
    index = json.loads((tmp_path / "out" / "model.safetensors.index.json").read_text())
    assert set(index["weight_map"]) == {"a.weight", "c.weight", "norm.weight"}
    assert torch.equal(load_file(tmp_path / "out" / index["weight_map"]["a.weight"])["a.weight"], wanted)
    config = json.loads((tmp_path / "out" / "config.json").read_text())
    assert config == {"eps": 1e-05, "dtype": "bfloat16", "text_config": {"layers": 2}}
    assert sorted(report.companions) == ["config.json", "tokenizer.json"]
    assert ("quantize_config.json", "about the quantised weights") in report.stayed
    assert {"config-quantization", "config-dtype"} <= {note.code for note in report.notes}
    assert (tmp_path / "out" / "tokenizer.json").read_text() == '{"a": 1}'


def test_a_config_that_is_not_json(tmp_path: Path) -> None:
    (quantised_folder(tmp_path) / "config.json").write_text("{")
    with pytest.raises(ConvertError, match="not JSON"):
        ckpt_tools.convert(tmp_path / "in", tmp_path / "out.safetensors", dequantize="fp32")


# --- measured and shown as what they mean


@pytest.mark.parametrize("part", ["a.weight_scale_2", "a.weight_global_scale", "a.weight_g_idx"])
def test_a_part_that_the_scheme_has_no_use_for_is_refused(part: str, tmp_path: Path) -> None:
    """FP8 with a second scale, or an order of columns, is some other layout: its numbers would be wrong."""
    save_file({"a.weight": codes(4, 4), "a.weight_scale": torch.ones(1), part: torch.ones(1)}, tmp_path / "in.safetensors")
    with pytest.raises(ConvertError, match=r"part of 'a\.weight' by its name, and does not count"):
        ckpt_tools.convert(tmp_path / "in.safetensors", tmp_path / "out.safetensors", dequantize="bf16")


@pytest.mark.parametrize(("scale", "infinite"), [(1e37, 1), (float("inf"), 2)])
def test_what_becomes_infinite_in_fp32_is_counted(tmp_path: Path, scale: float, infinite: int) -> None:
    """A product beyond float32, and what an infinite scale makes, are in the report whatever the output's dtype."""
    weight = torch.tensor([[448.0, 1.0]]).to(FP8)
    for word in ("bf16", "fp32"):
        report = plain(tmp_path, {"a.weight": weight, "a.weight_scale": torch.tensor([scale])}, dequantize=word)[1]
        assert report.overflowed == {"a.weight": infinite}


@pytest.mark.parametrize("bits", [2, 4, 8])
def test_a_zero_point_of_zero_less_one(tmp_path: Path, bits: int) -> None:
    """GPTQModel takes the 1 off whole words of its first format: a zero point of 0 borrows from the next, and comes back."""
    per_word = 32 // bits
    zeros = torch.arange(64).reshape(2, 32) * 7 % 2**bits
    assert (zeros == 0).any()
    shifts, ones = torch.arange(per_word) * bits, sum(1 << bits * place for place in range(per_word))
    words = ((zeros.view(2, -1, per_word) << shifts).sum(-1) - ones) & 0xFFFFFFFF
    stored = torch.where(words >= 1 << 31, words - (1 << 32), words).int()
    scales = torch.rand(2, 32).half()
    weight = torch.zeros(2 * 32 // per_word, 32, dtype=torch.int32)
    parts = {"a.qweight": weight, "a.qzeros": stored, "a.scales": scales}
    found, _ = plain(tmp_path, parts, {"quant_method": "gptq", "bits": bits, "group_size": 32, "checkpoint_format": "gptq"})
    expect(found, {"a.weight": (-zeros.float() * scales.float()).t().repeat_interleave(32, 1)})


def test_nan_is_counted(tmp_path: Path) -> None:
    """What a scale that is NaN makes of a block, what an infinite one makes of 0, and codes of FP8 that are NaN."""
    weight = torch.tensor([[1.0, 2.0], [0.0, 3.0], [float("nan"), 4.0]]).to(FP8)
    for scale, infinite, nan in (([1.0, 1.0, 1.0], 0, 1), ([float("nan"), float("inf"), 1.0], 1, 4)):
        tensors = {"a.weight": weight, "a.weight_scale": torch.tensor(scale)[:, None]}
        for word in ("bf16", "fp16", "fp32"):
            report = plain(tmp_path, tensors, dequantize=word)[1]
            assert report.nan == {"a.weight": nan}
            assert report.overflowed == ({"a.weight": infinite} if infinite else {})


def test_the_config_of_a_folder_and_of_an_address(server: Server, tmp_path: Path) -> None:
    """config.json is read beside the one file of a folder, and over HTTP; without it GPTQ's zero points would be another."""
    tensors, said = gptq()
    wanted, _ = plain(tmp_path, tensors, said | {"checkpoint_format": "gptq_v2"})
    folder = tmp_path / "model"
    folder.mkdir()
    (tmp_path / "in.safetensors").rename(folder / "model.safetensors")
    (tmp_path / "config.json").rename(folder / "config.json")
    for number, source in enumerate((str(folder), server.url("model/model.safetensors"))):
        ckpt_tools.convert(source, tmp_path / f"{number}.safetensors", dequantize="fp32")
        expect(load_file(tmp_path / f"{number}.safetensors"), wanted)
    ckpt_tools.convert(folder, tmp_path / "out", shard_size="1GB", dequantize="fp32")
    assert "quantization_config" not in json.loads((tmp_path / "out" / "config.json").read_text())


# --- MLX

MLX = QUANTISED / "mlx"


def test_mlx_as_its_authors(tmp_path: Path) -> None:
    """2 to 8 bits, groups of three sizes, MXFP4, NVFP4 and MXFP8, each layer as config.json says; and what inspect tells."""
    ckpt_tools.convert(MLX / "model.safetensors", tmp_path / "out.safetensors", dequantize="fp32")
    expect(load_file(tmp_path / "out.safetensors"), load_file(MLX / "plain.safetensors"))
    rows = ckpt_tools.inspect(MLX / "model.safetensors").quantised["schemes"]  # type: ignore[index]
    assert {row["scheme"]: row["tensors"] for row in rows} == {
        "mlx affine, 2 bits": 1, "mlx affine, 3 bits": 1, "mlx affine, 4 bits": 2, "mlx affine, 5 bits": 1,
        "mlx affine, 6 bits": 1, "mlx affine, 8 bits": 1, "mlx mxfp4": 1, "mlx mxfp8": 1, "mlx nvfp4": 1,
    }  # fmt: skip
    assert sum(row["elements"] for row in rows) == 9 * 6 * 128 + 2 * 6 * 128


def test_the_config_of_mlx_stays_behind(tmp_path: Path) -> None:
    """What comes along no longer says that the weights are quantised; another `quantization` than of weights stays."""
    folder = tmp_path / "in"
    folder.mkdir()
    (folder / "model.safetensors").write_bytes((MLX / "model.safetensors").read_bytes())
    said = json.loads((MLX / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(said | {"codec": {"quantization": {"levels": 8}}}))
    ckpt_tools.convert(folder, tmp_path / "out", shard_size="1GB", dequantize="fp32")
    assert json.loads((tmp_path / "out" / "config.json").read_text()) == {
        "model_type": "llama", "codec": {"quantization": {"levels": 8}},
    }  # fmt: skip


def test_mlx_that_is_not_clear(tmp_path: Path) -> None:
    """Shapes that fit several numbers of bits, a config that contradicts them, a part that is missing: refused."""
    tensors = load_file(MLX / "model.safetensors")
    one = {f"a.{key}": tensors[f"layers.affine_4_64.{key}"] for key in ("weight", "scales", "biases")}
    error = refused(tmp_path, one, "the bits of a code are not clear")
    assert error.why == "These shapes fit 2 bits in groups of 128 or 4 bits in groups of 64 or 8 bits in groups of 32."
    refused(tmp_path, one, "the bits of a code are not clear", {"bits": 6, "group_size": 64})
    refused(tmp_path, one, "config.json says its mode is 'mxfp4'", {"bits": 4, "group_size": 32, "mode": "mxfp4"})
    refused(tmp_path, one | {"a.biases": torch.zeros(6, 4)}, "A bias for each scale", {"bits": 4, "group_size": 64})
    for missing in ("a.scales", "a.biases"):
        refused(tmp_path, {key: value for key, value in one.items() if key != missing}, r"'a\.weight' is uint32")
    (tmp_path / "config.json").unlink()
    found, _ = plain(tmp_path, {f"a.{key}": tensors[f"layers.affine_5_64.{key}"] for key in ("weight", "scales", "biases")})
    assert torch.equal(found["a.weight"], load_file(MLX / "plain.safetensors")["layers.affine_5_64.weight"])


def test_quanto_as_its_authors(tmp_path: Path) -> None:
    """Int8, FP8, 4 and 2 bits, of matrices with several groups a row and with one, odd numbers of rows."""
    report = ckpt_tools.convert(QUANTISED / "quanto.pth", tmp_path / "out.safetensors", dequantize="fp32")
    expect(load_file(tmp_path / "out.safetensors"), load_file(QUANTISED / "quanto.plain.safetensors"))
    assert report.dequantised == {
        "quanto int8 -> float32": 1, "quanto fp8 -> float32": 1, "quanto, 4 bits, as a matrix -> float32": 2,
        "quanto, 2 bits, as a matrix -> float32": 2,
    }  # fmt: skip


def test_quanto_that_is_not_whole(tmp_path: Path) -> None:
    """Without the bias nothing says how many groups are a row; a part that is missing is named."""
    tensors = {key: value for key, value in torch.load(QUANTISED / "quanto.pth").items() if key.startswith("int4.")}
    without = {key: value for key, value in tensors.items() if key != "int4.bias"}
    refused(tmp_path, without, r"'int4\.weight\._data\._data' has 12 groups of 128 codes, and how many are a row")
    for missing in ("_scale", "_shift", "_data._data"):
        others = {key: value for key, value in tensors.items() if not key.endswith(f"weight.{missing}")}
        refused(tmp_path, others, r"'int4\.weight\._\w+(\._data)?' is part of a quantised weight that is not whole")


# --- ComfyUI's marks


@pytest.mark.parametrize(
    "said", [{"format": "mxfp8"}, {"format": "int8_tensorwise", "convrot": True, "convrot_groupsize": 256}]
)
def test_a_mark_of_comfyui_is_believed(tmp_path: Path, said: dict[str, Any]) -> None:
    """MXFP8 in tiles and int8 that is rotated have other numbers: refused by a tensor's mark or the header's."""
    tensors = {"a.weight": torch.ones(4, 16, dtype=torch.int8), "a.weight_scale": torch.ones(4, 1)}
    if said["format"] == "mxfp8":
        tensors = {"a.weight": codes(4, 32), "a.weight_scale": torch.ones(4, 1, dtype=torch.uint8)}
    mark = torch.tensor(list(json.dumps(said).encode()), dtype=torch.uint8)
    refused(tmp_path, tensors | {"a.comfy_quant": mark}, r"'a\.weight' is in ComfyUI's layout")
    refused(tmp_path, tensors | {"a.comfy_quant": mark[1:].clone()}, "is not JSON")
    header = {"_quantization_metadata": json.dumps({"format_version": "1.0", "layers": {"a": said}})}
    save_file(tensors, tmp_path / "header.safetensors", header)
    with pytest.raises(ConvertError, match=r"'a\.weight' is in ComfyUI's layout"):
        ckpt_tools.convert(tmp_path / "header.safetensors", tmp_path / "out.safetensors", dequantize="fp32")


def test_nvfp4_of_comfyui_as_its_authors(tmp_path: Path) -> None:
    """Marked by a tensor or the header; of several tiles, of a part of one. Scales that are too few for tiles are refused."""
    ckpt_tools.convert(QUANTISED / "comfy.safetensors", tmp_path / "out.safetensors", dequantize="fp32")
    expect(load_file(tmp_path / "out.safetensors"), load_file(QUANTISED / "comfy.plain.safetensors"))
    tensors = {key: value for key, value in load_file(QUANTISED / "comfy.safetensors").items() if key.startswith("part.")}
    refused(tmp_path, tensors | {"part.weight_scale": tensors["part.weight_scale"].flatten()[:240]}, "in tiles|fit each other")


def test_a_mark_of_comfyui_that_changes_nothing(tmp_path: Path) -> None:
    mark = torch.tensor(list(b'{"format": "float8_e4m3fn"}'), dtype=torch.uint8)
    tensors = {"a.weight": codes(4, 4), "a.weight_scale": torch.full((), 2.0), "a.comfy_quant": mark}
    expect(plain(tmp_path, tensors)[0], {"a.weight": tensors["a.weight"].float() * 2})


def test_groups_of_layers_in_one_file(tmp_path: Path) -> None:
    """FP8, NVFP4 and 4 bits beside each other, as `config_groups` says: each layer by its own names."""
    kinds = ("float-quantized.", "nvfp4-pack-quantized.", "pack-quantized.16.")
    tensors = {
        key: value for key, value in load_file(QUANTISED / "compressed_tensors.safetensors").items() if key.startswith(kinds)
    }
    wanted = {
        key: value
        for key, value in load_file(QUANTISED / "compressed_tensors.plain.safetensors").items()
        if key.startswith(kinds)
    }
    groups = [{"num_bits": 8, "type": "float", "group_size": None}, {"num_bits": 4, "type": "float", "group_size": 16}]
    said = {
        "group_" + str(number): {"weights": weights} for number, weights in enumerate([*groups, {"num_bits": 4, "type": "int"}])
    }
    found, report = plain(tmp_path, tensors, {"quant_method": "compressed-tensors", "config_groups": said})
    assert found.keys() == wanted.keys()
    for key, tensor in wanted.items():
        assert torch.equal(found[key].to(tensor.dtype), tensor), key
    assert len(report.dequantised) > 2


@pytest.mark.parametrize("name", ["comfy.safetensors", "torchao.safetensors"])
def test_the_header_of_plain_weights_says_nothing_of_codes(name: str, tmp_path: Path) -> None:
    """What ComfyUI and torchao read there would make quantised layers of plain weights."""
    report = ckpt_tools.convert(QUANTISED / name, tmp_path / "out.safetensors", dequantize="bf16")
    assert ckpt_tools.inspect(tmp_path / "out.safetensors").metadata == {"format": "pt"}
    assert "config-quantization" in {note.code for note in report.notes}
