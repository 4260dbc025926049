"""Weights that torchao has quantised: pickled as classes of its own, and flat in safetensors."""

import json
from pathlib import Path
from typing import Any
from zipfile import ZipFile

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file

import ckpt_tools
from ckpt_tools.errors import ConvertError, ObjectsError
from tests.support.samples import FIXTURES

QUANTISED = FIXTURES / "quantised"


def same_as_theirs(found: dict[str, torch.Tensor]) -> None:
    """Each is what `dequantize()` gave."""
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
    """safetensors has no place for torchao's classes."""
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
    """In a pickle the class itself says which it is."""
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
