"""Quantised weights are measured, compared, shown and averaged as the numbers that they stand for."""

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

import ckpt_tools
from ckpt_tools.errors import ConvertError
from tests.edit.test_quantised import QUANTISED, codes


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
