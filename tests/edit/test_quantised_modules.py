"""Quantised layers in pickled models and in classes of torchao; quantised weights measured as the numbers that they mean."""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any
from zipfile import ZipFile

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file

import ckpt_tools
from ckpt_tools.errors import CkptError, ConvertError, ObjectsError
from tests.edit.test_quantised import codes
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


def same_as_theirs(found: dict[str, torch.Tensor]) -> None:
    wanted = load_file(QUANTISED / "torchao.plain.safetensors")
    assert found.keys() == wanted.keys()
    for name, tensor in wanted.items():
        assert torch.equal(found[name], tensor.to(found[name].dtype)), name


@pytest.mark.parametrize("word", ["bf16", "fp32"])
@pytest.mark.parametrize("ending", ["pth", "safetensors"])
def test_torchao_as_its_authors(tmp_path: Path, ending: str, word: Any) -> None:
    """Int8 by row, group and tensor, with dynamic activations, 3 and 4 bits, zero points, FP8."""
    report = ckpt_tools.convert(QUANTISED / f"torchao.{ending}", tmp_path / "out.safetensors", dequantize=word)
    found = load_file(tmp_path / "out.safetensors")
    same_as_theirs(found)
    assert sum(report.dequantised.values()) == 8
    assert {found[name].dtype for name in found if name.endswith("weight")} == {
        torch.bfloat16 if word == "bf16" else torch.float32
    }


def test_inspect_tells_scheme_and_elements() -> None:
    """The bits that a class says, and the elements of the plain weights."""
    rows = {row["scheme"]: row for row in ckpt_tools.inspect(QUANTISED / "torchao.pth").quantised["schemes"]}  # type: ignore[index]
    assert {scheme: row["tensors"] for scheme, row in rows.items()} == {
        "torchao int8": 4, "torchao int3": 1, "torchao int4": 2, "torchao fp8": 1,
    }  # fmt: skip
    assert {row["elements"] / row["tensors"] for row in rows.values()} == {24 * 96}


def test_without_dequantize_the_error_names_it(tmp_path: Path) -> None:
    with pytest.raises(ObjectsError) as caught:
        ckpt_tools.convert(QUANTISED / "torchao.pth", tmp_path / "out.safetensors")
    assert "dequantize='bf16'" in caught.value.fix
    with pytest.raises(ConvertError, match="`objects` comes before `dequantize`"):
        ckpt_tools.convert(QUANTISED / "torchao.pth", tmp_path / "out.safetensors", objects="plain", dequantize="fp32")


def changed(tmp_path: Path, name: str, edit: Any) -> Path:
    """The flat file with what its metadata says of one weight edited, and tensors left out or added."""
    tensors = load_file(QUANTISED / "torchao.safetensors")
    with safe_open(QUANTISED / "torchao.safetensors", "pt") as file:
        metadata = dict(file.metadata())
    said = json.loads(metadata[name])
    edit(said, tensors)
    save_file(tensors, tmp_path / "in.safetensors", metadata | {name: json.dumps(said)})
    return tmp_path / "in.safetensors"


@pytest.mark.parametrize(
    ("edit", "match"),
    [
        (lambda said, _: said.update(_type="Int8RowsTensor"), r"'int8\.weight' .* torchao's Int8RowsTensor"),
        (lambda said, _: said["_data"].update(block_size=[1, 48]), "do not fit each other"),
        (lambda said, _: said["_data"].update(block_size=[1, 0]), "do not fit each other"),
        (lambda _, tensors: tensors.pop("int8._weight_scale"), r"'int8\._weight_qdata' is int8"),
        (lambda _, tensors: tensors.pop("int8._weight_qdata"), r"'int8\._weight_scale' is part of"),
        (lambda _, tensors: tensors.update({"int8._weight_act_pre_scale": torch.ones(96)}), "act_pre_scale"),
    ],
)
def test_what_is_not_known_is_refused(tmp_path: Path, edit: Any, match: str) -> None:
    """A class of another version, blocks that do not fit, a part that is missing or unknown: nothing is guessed."""
    with pytest.raises(ConvertError, match=match):
        ckpt_tools.convert(changed(tmp_path, "int8.weight", edit), tmp_path / "out.safetensors", dequantize="fp32")
    assert not (tmp_path / "out.safetensors").exists()


def test_a_class_of_another_version_is_refused(tmp_path: Path) -> None:
    with ZipFile(QUANTISED / "torchao.pth") as theirs, ZipFile(tmp_path / "in.pth", "w") as other:
        for name in theirs.namelist():
            other.writestr(name, theirs.read(name).replace(b"Float8Tensor", b"Float9Tensor"))
    with pytest.raises(ConvertError, match=r"'fp8\.weight' is quantised as torchao's Float9Tensor"):
        ckpt_tools.convert(tmp_path / "in.pth", tmp_path / "out.pth", dequantize="fp32")


# --- torch's own


def test_torch_as_it_dequantises(tmp_path: Path) -> None:
    """Tensors by tensor and by channel, and linear layers with dynamic activations, whose bias lies with the weight."""
    report = ckpt_tools.convert(QUANTISED / "torch.pth", tmp_path / "out.safetensors", dequantize="fp32")
    wanted, found = load_file(QUANTISED / "torch.plain.safetensors"), load_file(tmp_path / "out.safetensors")
    assert found.keys() == wanted.keys()
    for name, tensor in wanted.items():
        assert torch.equal(found[name], tensor), name
    assert ("a.zero_point", "of quantised activations") in report.dropped
    assert sum(report.dequantised.values()) == 5


def test_torch_without_dequantize(tmp_path: Path) -> None:
    """safetensors has no quantised tensors: the error says how to make them plain."""
    with pytest.raises(ConvertError) as caught:
        ckpt_tools.convert(QUANTISED / "torch.pth", tmp_path / "out.safetensors")
    assert "dequantize='bf16'" in caught.value.fix


@pytest.mark.filterwarnings("ignore:TypedStorage is deprecated", "ignore:torch.quantize_per_tensor")
def test_packed_weights_of_other_layers_are_refused(tmp_path: Path) -> None:
    """An LSTM's are a script object; and what a weight would become may be there already."""
    with pytest.raises(ConvertError, match=r"'lstm\._all_weight_values\.0\.param' has packed weights"):
        ckpt_tools.convert(QUANTISED / "torch_lstm.pth", tmp_path / "out.pth", dequantize="fp32", objects="keep")
    state = torch.load(QUANTISED / "torch.pth", weights_only=False)
    torch.save(state | {"a.weight": torch.ones(2)}, tmp_path / "in.pth")
    with pytest.raises(ConvertError, match=r"would become 'a\.weight'"):
        ckpt_tools.convert(tmp_path / "in.pth", tmp_path / "out.pth", dequantize="fp32")


def test_inspect(tmp_path: Path) -> None:
    """The schemes with their sizes, and what is not whole; a parameter that is called scale is none."""
    tensors = {"a.weight": codes(256, 256), "a.weight_scale_inv": torch.ones(2, 2), "b.weight": codes(2, 2)}
    save_file(tensors, tmp_path / "in.safetensors")
    found = ckpt_tools.inspect(tmp_path / "in.safetensors").quantised
    assert found is not None
    sizes = {"tensors": 1, "elements": 65536, "bytes": 65536 + 16, "bf16_bytes": 131072}
    assert found["schemes"] == [{"scheme": "fp8, a scale a block", **sizes}]
    assert "'b.weight'" in found["problems"][0]
    save_file({"logit_scale": torch.ones(1), "norm.scale": torch.ones(3)}, tmp_path / "none.safetensors")
    assert ckpt_tools.inspect(tmp_path / "none.safetensors").quantised is None


def test_stats_measure_what_is_meant(tmp_path: Path) -> None:
    """The plain weights are measured, each under its scheme, and no scales; what is not whole as it lies, which is said."""
    report = ckpt_tools.stats(QUANTISED / "gptq.safetensors")
    wanted = load_file(QUANTISED / "gptq.plain.safetensors")
    assert {row.name for row in report.tensors} == set(wanted)
    for row in report.tensors:
        assert row.numbers is not None
        assert row.dtype in {f"gptq, {bits} bits" for bits in (2, 3, 4, 8)}
        assert row.numbers["mean"] == pytest.approx(float(wanted[row.name].double().mean()), abs=1e-9)
        assert row.numbers["max"] == float(wanted[row.name].max())
    assert any("gptq, 3 bits: 3 tensors" in note for note in report.notes)
    save_file({"a.weight": codes(4, 4), "a.weight_scale": torch.ones(1), "b.weight": codes(2, 2)}, tmp_path / "in.safetensors")
    report = ckpt_tools.stats(tmp_path / "in.safetensors")
    assert {row.name: row.dtype for row in report.tensors} == {"a.weight": "fp8, a scale a tensor", "b.weight": "float8_e4m3fn"}
    assert any("'b.weight'" in note for note in report.notes)


def test_diff_measures_what_is_meant(tmp_path: Path) -> None:
    """With `values` a quantised checkpoint is compared by its numbers; without, by its tensors as they lie."""
    left, right = QUANTISED / "mxfp4.safetensors", QUANTISED / "mxfp4.plain.safetensors"
    report = ckpt_tools.diff(left, right, values=True)
    assert not report.changed
    assert not report.added
    assert not report.removed
    assert {row.left for row in report.dtypes} == {"mxfp4", "mxfp4, rows and columns exchanged"}
    assert any("taken as the numbers" in note for note in report.notes)
    assert ckpt_tools.diff(left, right).removed
    ckpt_tools.convert(QUANTISED / "bitsandbytes.safetensors", tmp_path / "half.safetensors", dequantize="bf16")
    report = ckpt_tools.diff(tmp_path / "half.safetensors", QUANTISED / "bitsandbytes.safetensors", values=True)
    assert max(row.gap["max_rel"] for row in report.changed if row.gap) < 2**-8


def test_show_tells_what_is_meant() -> None:
    """A plain name gives the numbers, a part's own name the part as it lies."""
    path = QUANTISED / "bitsandbytes.safetensors"
    wanted = load_file(QUANTISED / "bitsandbytes.plain.safetensors")["nf4.0.weight"]
    shown = ckpt_tools.show(path, "nf4.0.weight[1:3, 60:]")
    assert shown.dtype == "bnb nf4"
    assert shown.values == wanted[1:3, 60:].tolist()
    assert ckpt_tools.show(path, "nf4.0.weight.absmax").dtype == "float32"


def test_an_average_of_codes_is_refused(tmp_path: Path) -> None:
    """The mean of FP8 codes is not that of what they stand for: refused, with the command that makes them plain."""
    for name in ("a", "b"):
        save_file({"a.weight": codes(4, 4), "a.weight_scale": torch.ones(1)}, tmp_path / f"{name}.safetensors")
    with pytest.raises(ConvertError, match="quantised weights") as caught:
        ckpt_tools.average([tmp_path / "a.safetensors", tmp_path / "b.safetensors"], tmp_path / "out.safetensors")
    assert "--dequantize" in caught.value.fix
