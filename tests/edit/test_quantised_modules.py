"""Whole models of quantised layers, by `torch.save(model)`: what their own code puts into a state dict is read off them."""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

import ckpt_tools
from ckpt_tools.errors import CkptError
from tests.hostile import pickles as p
from tests.hostile.zips import torch_zip
from tests.support.samples import FIXTURES
from tests.support.zips import rewrite

QUANTISED = FIXTURES / "quantised"
KINDS = ["nf4", "fp4", "int8", "dynamic"]


def told(value: Any) -> Any:
    """A value of a state dict, so that it can be compared."""
    if isinstance(value, tuple):
        return [told(part) for part in value]
    if isinstance(value, torch.Tensor) and value.is_quantized:
        by_channel = value.qscheme() is torch.per_channel_affine
        scale = value.q_per_channel_scales().tolist() if by_channel else (value.q_scale(), value.q_zero_point())
        return value.int_repr().tolist(), scale
    return (value.dtype, value.tolist()) if isinstance(value, torch.Tensor) else value


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("kind", KINDS)
def test_the_plain_form_is_the_models_own_state_dict(kind: str, tmp_path: Path) -> None:
    """Name by name in its order, bit by bit."""
    ckpt_tools.convert(QUANTISED / f"module_{kind}.pth", tmp_path / "out.pth", objects="plain")
    made, own = (
        torch.load(path, weights_only=False) for path in (tmp_path / "out.pth", QUANTISED / f"module_{kind}.state.pth")
    )
    assert [*made] == [*own]
    assert {name: told(value) for name, value in made.items()} == {name: told(value) for name, value in own.items()}


@pytest.mark.parametrize("kind", KINDS)
def test_plain_weights_are_those_of_the_state_dict(kind: str, tmp_path: Path) -> None:
    """Inspect names the scheme; --dequantize makes the same of the model and of its state dict."""
    model, state = QUANTISED / f"module_{kind}.pth", QUANTISED / f"module_{kind}.state.pth"
    schemes = [ckpt_tools.inspect(path).quantised for path in (model, state)]
    assert schemes[0] is not None
    assert schemes[0]["schemes"] == (schemes[1] or {})["schemes"]
    for number, path in enumerate((model, state)):
        ckpt_tools.convert(path, tmp_path / f"{number}.safetensors", dequantize="fp32", objects="plain")
    one, two = (load_file(tmp_path / f"{number}.safetensors") for number in range(2))
    assert one.keys() == two.keys() == {"0.weight", "0.bias"}
    assert all(torch.equal(one[name], two[name]) for name in one)


@pytest.mark.filterwarnings("ignore")
def test_a_convolution_and_an_embedding(tmp_path: Path) -> None:
    """The scale of a convolution's output is no part of its weight; an embedding's packed weight gets its own name."""
    from torch import nn
    from torch.ao import quantization

    torch.manual_seed(0)
    conv: Any = nn.Sequential(quantization.QuantStub(), nn.Conv2d(3, 4, 3)).eval()
    embedding: Any = nn.Sequential(nn.EmbeddingBag(5, 4))
    conv.qconfig, embedding[0].qconfig = (
        quantization.get_default_qconfig("fbgemm"),
        quantization.float_qparams_weight_only_qconfig,
    )
    quantization.prepare(conv, inplace=True)(torch.randn(2, 3, 8, 8))
    quantization.prepare(embedding, inplace=True)
    for model, name in ((conv, "1.weight"), (embedding, "0.weight")):
        made = quantization.convert(model)  # the memory of its weights is the model's
        state = made.state_dict()
        torch.save(state, tmp_path / "in.pth")
        ckpt_tools.convert(tmp_path / "in.pth", tmp_path / "out.safetensors", dequantize="fp32", overwrite=True)
        weight = next(value for value in state.values() if isinstance(value, torch.Tensor) and value.is_quantized)
        assert torch.equal(load_file(tmp_path / "out.safetensors")[name], weight.dequantize())


@pytest.mark.filterwarnings("ignore")
def test_several_layers_and_fused_ones(tmp_path: Path) -> None:
    """Two linear layers, one of them under two names, and a fused one: the plain form is the model's own state dict."""
    from torch import nn
    from torch.ao import quantization

    torch.manual_seed(0)
    shared = nn.Linear(4, 4)
    dynamic = quantization.quantize_dynamic(nn.Sequential(shared, nn.Linear(4, 4), shared), {nn.Linear})
    fused = quantization.fuse_modules(nn.Sequential(quantization.QuantStub(), nn.Linear(8, 4), nn.ReLU()).eval(), [["1", "2"]])
    fused.qconfig = quantization.get_default_qconfig("fbgemm")
    prepared = quantization.prepare(fused)
    prepared(torch.randn(4, 8))
    for model in (dynamic, quantization.convert(prepared)):
        torch.save(model, tmp_path / "model.pth")
        ckpt_tools.convert(tmp_path / "model.pth", tmp_path / "out.pth", objects="plain", overwrite=True)
        made, own = torch.load(tmp_path / "out.pth", weights_only=False), model.state_dict()
        assert [*made] == [*own]
        assert {name: told(value) for name, value in made.items()} == {name: told(value) for name, value in own.items()}


@pytest.mark.parametrize("kind", KINDS)
def test_numbers_of_a_model_are_those_of_its_state_dict(kind: str) -> None:
    """`diff --values` and `stats` take both as the numbers that the codes stand for."""
    model, state = QUANTISED / f"module_{kind}.pth", QUANTISED / f"module_{kind}.state.pth"
    assert not ckpt_tools.diff(model, state, values=True).changed
    one, two = ({row.name: row.numbers for row in ckpt_tools.stats(path).tensors} for path in (model, state))
    assert one["0.weight"] == two["0.weight"] is not None


def test_a_tensor_that_is_given_other_data_is_refused(tmp_path: Path) -> None:
    """The state of a parameter sets `data` once more: the same is read, another would be what torch loads."""
    for key, reads in (("0", True), ("1", False)):
        state = p.dict_of(data=p.tensor(on=p.storage(key)), requires_grad=b"\x89")
        made = p.call(
            "torch._utils", "_rebuild_parameter_with_state", p.tensor(), b"\x89", p.call("collections", "OrderedDict"), state
        )
        (tmp_path / "model.pth").write_bytes(torch_zip(p.pickle(p.dict_of(weight=made)), {"0": bytes(24), "1": bytes(24)}))
        if reads:
            assert ckpt_tools.inspect(tmp_path / "model.pth").totals["tensors"] >= 1
        else:
            with pytest.raises(CkptError, match="sets more than attributes"):
                ckpt_tools.inspect(tmp_path / "model.pth")


@pytest.mark.slow
def test_memory_does_not_grow_with_the_weights(tmp_path: Path) -> None:
    """Four matrices of 256 MB of FP8, which are holes in the file: no more than 40 MB beyond what importing torch takes."""
    rows, size = {}, 1 << 28
    for number in range(4):
        start = number * (size + 4)
        rows[f"{number}.weight"] = {"dtype": "F8_E4M3", "shape": [1 << 14, 1 << 14], "data_offsets": [start, start + size]}
        rows[f"{number}.weight_scale"] = {"dtype": "F32", "shape": [1], "data_offsets": [start + size, start + size + 4]}
    head = json.dumps(rows).encode()
    with (tmp_path / "in.safetensors").open("wb") as file:
        file.write(len(head).to_bytes(8, "little") + head)
        file.truncate(8 + len(head) + 4 * (size + 4))
    peak = "import resource; print(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss // 1024)"
    source, target = str(tmp_path / "in.safetensors"), str(tmp_path / "out.safetensors")
    convert = f"import ckpt_tools; ckpt_tools.convert({source!r}, {target!r}, dequantize='bf16')"
    alone, whole = (
        int(subprocess.run([sys.executable, "-c", f"{code}; {peak}"], check=True, capture_output=True).stdout)
        for code in ("import torch", convert)
    )
    assert whole < alone + 40


@pytest.mark.parametrize(
    ("kind", "old", "new"),
    [("dynamic", b"zero_pointquK\0", b"zero_pointqu\x8a\x09" + bytes(8) + b"\x40"),
     ("nf4", b"X\3\0\0\0nf4q>", b"ctorch\nfloat16\nq>")],
)  # fmt: skip
def test_settings_that_no_layer_has(kind: str, old: bytes, new: bytes, tmp_path: Path) -> None:
    """A zero point of 70 bits and a name in the place of text: the file is shown, and nothing is made of them."""

    def change(name: str, data: bytes) -> bytes:
        return data.replace(old, new) if name == "data.pkl" else data

    rewrite(QUANTISED / f"module_{kind}.pth", tmp_path / "odd.pth", change=change)
    assert (tmp_path / "odd.pth").read_bytes() != (QUANTISED / f"module_{kind}.pth").read_bytes()
    names = [row["name"] for row in ckpt_tools.inspect(tmp_path / "odd.pth").tensors]
    assert not any(part in str(name) for name in names for part in ("zero_point", "quant_state"))
