"""`--lora`: adapters merged into a base, as PEFT merges them; fixtures/lora is its own."""

import json
import shutil
from collections.abc import Mapping
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

import ckpt_tools
from ckpt_tools.errors import ConvertError
from tests.support.samples import FIXTURES

LORA = FIXTURES / "lora"
KINDS = sorted(path.name for path in LORA.iterdir() if path.is_dir())
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


def same(one: Mapping[str, torch.Tensor], other: Mapping[str, torch.Tensor], atol: float = 0.0) -> None:
    """The same names, dtypes and values."""
    assert one.keys() == other.keys()
    for name, value in other.items():
        assert one[name].dtype == value.dtype
        torch.testing.assert_close(one[name], value, rtol=0, atol=atol)


@pytest.mark.parametrize("kind", KINDS)
def test_every_kind_as_peft_merges_it(kind: str, tmp_path: Path) -> None:
    """Every kind of LoRA gives what `merge_and_unload` gives: float32 within 1e-6, bfloat16 with the same roundings."""
    save_file(base_of(kind), tmp_path / "base.safetensors")
    report = ckpt_tools.convert(tmp_path / "base.safetensors", tmp_path / "out.safetensors", lora=LORA / kind)
    same(load_file(tmp_path / "out.safetensors"), expected(kind), atol=0.0 if kind.startswith("bf16") else 1e-6)
    assert [row.adapter for row in report.merged] == [str(LORA / kind)]
    assert report.merged[0].modules > 0


@pytest.mark.parametrize("prefix", ["module.", "_orig_mod.module.", "net.", "model.encoder."])
def test_a_base_under_another_prefix(prefix: str, tmp_path: Path) -> None:
    """Wrappers and prefixes in the base do not keep its modules from being found, and stay."""
    torch.save({f"{prefix}{name}": value for name, value in base_of("plain").items()}, tmp_path / "base.pth")
    ckpt_tools.convert(tmp_path / "base.pth", tmp_path / "out.pth", lora=LORA / "plain")
    same(torch.load(tmp_path / "out.pth"), {f"{prefix}{name}": value for name, value in expected("plain").items()}, 1e-6)


def test_names_are_edited_after_the_merge(tmp_path: Path) -> None:
    """The adapter knows the names of IN; --unwrap, --keep, --rename and --dtype work on what was merged."""
    save_file({f"module.{name}": value for name, value in base_of("plain").items()}, tmp_path / "base.safetensors")
    ckpt_tools.convert(
        tmp_path / "base.safetensors", tmp_path / "out.safetensors", lora=LORA / "plain", unwrap=True, keep="module.blocks.*",
        rename="^blocks=h", dtype="bf16",
    )  # fmt: skip
    wanted = {name.replace("blocks", "h"): value.bfloat16() for name, value in expected("plain").items() if "blocks" in name}
    same(load_file(tmp_path / "out.safetensors"), wanted)


@pytest.mark.parametrize("form", ["file", "bin", "bin-file", "strided"])
def test_an_adapter_by_its_file(form: str, tmp_path: Path) -> None:
    """An adapter is its folder or its file, in safetensors or a pickle; the configuration is looked for beside it."""
    folder = tmp_path / "adapter"
    shutil.copytree(LORA / "plain", folder)
    tensors = load_file(folder / "adapter_model.safetensors")
    given = folder / "adapter_model.safetensors"
    if form != "file":
        given.unlink()
        given = folder / ("mine.pt" if form == "bin-file" else "adapter_model.bin")
        torch.save({name: value.t().contiguous().t() if form == "strided" else value for name, value in tensors.items()}, given)
    ckpt_tools.convert(LORA / "base.safetensors", tmp_path / "out.safetensors", lora=given if form.endswith("file") else folder)
    same(load_file(tmp_path / "out.safetensors"), expected("plain"), 1e-6)


def test_a_path_with_an_equals_sign(tmp_path: Path) -> None:
    """A folder that is there is meant as it is called."""
    shutil.copytree(LORA / "plain", tmp_path / "rank=2")
    ckpt_tools.convert(LORA / "base.safetensors", tmp_path / "out.safetensors", lora=str(tmp_path / "rank=2"))
    same(load_file(tmp_path / "out.safetensors"), expected("plain"), 1e-6)


def test_tied_weights_stay_tied(tmp_path: Path) -> None:
    """What is one tensor under two names is one afterwards, with what the adapter adds to either, as in PEFT."""
    base = base_of("embedding")
    torch.save({**base, "out.weight": base["emb.weight"]}, tmp_path / "base.pth")
    ckpt_tools.convert(tmp_path / "base.pth", tmp_path / "out.pth", lora=LORA / "embedding")
    made = torch.load(tmp_path / "out.pth")
    assert made["out.weight"].data_ptr() == made["emb.weight"].data_ptr()
    torch.testing.assert_close(made["out.weight"], expected("embedding")["emb.weight"], rtol=0, atol=1e-6)


def write_adapter(folder: Path, tensors: Tensors, **config: object) -> Path:
    """An adapter of one's own, as PEFT lays it out."""
    folder.mkdir(exist_ok=True)
    save_file(tensors, folder / "adapter_model.safetensors")
    (folder / "adapter_config.json").write_text(json.dumps({"peft_type": "LORA", **config}))
    return folder


def pair(module: str, rank: int = 2, outputs: int = 6, inputs: int = 6) -> Tensors:
    """The two factors of a module."""
    return {
        f"base_model.model.{module}.lora_A.weight": torch.ones(rank, inputs),
        f"base_model.model.{module}.lora_B.weight": torch.ones(outputs, rank),
    }


# --- refusals


def test_two_partners_are_refused(tmp_path: Path) -> None:
    """Two modules that could be meant are told, and none is taken."""
    base = {f"{side}.blocks.0.q.weight": torch.ones(6, 6) for side in ("encoder", "decoder")}
    save_file(base, tmp_path / "base.safetensors")
    adapter = write_adapter(tmp_path / "a", pair("blocks.0.q"), r=2, lora_alpha=2)
    with pytest.raises(ConvertError, match=r"several partners .* 'encoder\.', 'decoder\.'|'decoder\.', 'encoder\.'"):
        ckpt_tools.convert(tmp_path / "base.safetensors", tmp_path / "out.safetensors", lora=adapter)


def test_changes_inside_one_another_are_refused(tmp_path: Path) -> None:
    """An attention and its output, both targeted, as PEFT nests them: the reason is told as it is."""
    save_file({"mha.in_proj_weight": torch.ones(18, 6), "mha.out_proj.weight": torch.ones(6, 6)}, tmp_path / "base.safetensors")
    nested = {**pair("mha.base_layer.out_proj"), **pair("mha.out_proj"), **pair("mha", outputs=18)}
    adapter = write_adapter(tmp_path / "a", nested, r=2, lora_alpha=2)
    with pytest.raises(ConvertError, match=r"2 changes of 'mha\.out_proj', one inside the other"):
        ckpt_tools.convert(tmp_path / "base.safetensors", tmp_path / "out.safetensors", lora=adapter)


def test_a_head_that_the_base_lacks_is_added(tmp_path: Path) -> None:
    """A head that PEFT trained whole (`modules_to_save`) belongs to the merged model, also where the base has none."""
    base = {name: value for name, value in base_of("saved").items() if not name.startswith("head.")}
    save_file(base, tmp_path / "base.safetensors")
    report = ckpt_tools.convert(tmp_path / "base.safetensors", tmp_path / "out.safetensors", lora=LORA / "saved")
    same(load_file(tmp_path / "out.safetensors"), expected("saved"), 1e-6)
    assert report.merged[0].added == ["head.bias", "head.weight"]
