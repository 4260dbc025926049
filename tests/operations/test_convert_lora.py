"""`--lora`: adapters merged into a base, as PEFT merges them; fixtures/lora is its own."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Mapping
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

import ckpt_tools
from ckpt_tools.errors import ConvertError, FolderError, NothingMatchedError, UsageError
from tests.support.samples import FIXTURES

LORA = FIXTURES / "lora"
KINDS = sorted(path.name for path in LORA.iterdir() if path.is_dir())
Tensors = dict[str, torch.Tensor]


def base_of(kind: str) -> Tensors:
    """The base that an adapter of the fixtures was made for."""
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


@pytest.mark.parametrize("weight", ["nan", "inf", "much", ""])
def test_a_weight_is_a_finite_number(weight: str, tmp_path: Path) -> None:
    """Any other weight is refused before a file is looked at."""
    with pytest.raises(UsageError, match="lora"):
        ckpt_tools.convert(LORA / "base.safetensors", tmp_path / "out.safetensors", lora=f"{LORA / 'plain'}={weight}")


def test_tied_weights_stay_tied(tmp_path: Path) -> None:
    """What is one tensor under two names is one afterwards, with what the adapter adds to either, as in PEFT."""
    base = base_of("embedding")
    torch.save({**base, "out.weight": base["emb.weight"]}, tmp_path / "base.pth")
    ckpt_tools.convert(tmp_path / "base.pth", tmp_path / "out.pth", lora=LORA / "embedding")
    made = torch.load(tmp_path / "out.pth")
    assert made["out.weight"].data_ptr() == made["emb.weight"].data_ptr()
    torch.testing.assert_close(made["out.weight"], expected("embedding")["emb.weight"], rtol=0, atol=1e-6)


def test_memory_shared_in_part_is_refused(tmp_path: Path) -> None:
    """A weight that is a view on another tensor's memory cannot be changed alone."""
    base = base_of("plain")
    whole = torch.cat([base["blocks.0.q.weight"], torch.ones(2, 6)])
    torch.save({**base, "blocks.0.q.weight": whole[:6], "whole": whole}, tmp_path / "base.pth")
    with pytest.raises(ConvertError, match=r"'whole' lies on the memory of 'blocks\.0\.q\.weight'"):
        ckpt_tools.convert(tmp_path / "base.pth", tmp_path / "out.pth", lora=LORA / "plain")


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


def test_a_module_without_a_partner_is_refused(tmp_path: Path) -> None:
    """Nothing of an adapter is left out in silence."""
    adapter = write_adapter(tmp_path / "a", pair("blocks.0.q") | pair("blocks.7.q"), r=2, lora_alpha=2)
    with pytest.raises(ConvertError, match=r"changes 2 modules, and 1 of them are not in .*'blocks\.7\.q'"):
        ckpt_tools.convert(LORA / "base.safetensors", tmp_path / "out.safetensors", lora=adapter)
    assert not (tmp_path / "out.safetensors").exists()


def test_two_partners_are_refused(tmp_path: Path) -> None:
    """Two modules that could be meant are told, and none is taken."""
    base = {f"{side}.blocks.0.q.weight": torch.ones(6, 6) for side in ("encoder", "decoder")}
    save_file(base, tmp_path / "base.safetensors")
    adapter = write_adapter(tmp_path / "a", pair("blocks.0.q"), r=2, lora_alpha=2)
    with pytest.raises(ConvertError, match=r"several partners .* 'encoder\.', 'decoder\.'|'decoder\.', 'encoder\.'"):
        ckpt_tools.convert(tmp_path / "base.safetensors", tmp_path / "out.safetensors", lora=adapter)


def test_exact_names_are_no_ambiguity(tmp_path: Path) -> None:
    """Where a path is exactly there, one that ends so does not count."""
    base = {"q.weight": torch.zeros(6, 6), "deep.q.weight": torch.zeros(6, 6)}
    save_file(base, tmp_path / "base.safetensors")
    adapter = write_adapter(tmp_path / "a", pair("q"), r=2, lora_alpha=2)
    ckpt_tools.convert(tmp_path / "base.safetensors", tmp_path / "out.safetensors", lora=adapter)
    made = load_file(tmp_path / "out.safetensors")
    assert made["q.weight"].sum() == 72
    assert made["deep.q.weight"].sum() == 0


def test_another_size_of_model_is_refused(tmp_path: Path) -> None:
    """Factors that make another shape than the weight has are told with both."""
    adapter = write_adapter(tmp_path / "a", pair("blocks.0.q", outputs=8), r=2, lora_alpha=2)
    with pytest.raises(ConvertError, match=r"make \[8, 6\]; 'blocks\.0\.q\.weight' is \[6, 6\]"):
        ckpt_tools.convert(LORA / "base.safetensors", tmp_path / "out.safetensors", lora=adapter)


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ({"peft_type": "LOHA"}, "kind 'LOHA'"), ({"peft_type": None}, "only LoRA"),
        ({"init_lora_weights": "pissa_niter_4"}, "changes the base before training"),
        ({"init_lora_weights": "olora"}, "changes the base before training"),
        ({"alora_invocation_tokens": [1, 2]}, "no merged form"), ({"layer_replication": [[0, 2]]}, "layers are repeated"),
        ({"trainable_token_indices": [1]}, "rows of an embedding"),
        ({"use_dora": True}, "use_dora is true in adapter_config.json, and 'blocks.0.q' has no magnitudes"),
        ({"lora_bias": True}, "lora_bias is true in adapter_config.json, and 'blocks.0.q' has no bias"),
        ({"modules_to_save": ["head"]}, "should hold 'head' whole"), ({"r": 3}, "of rank 2; adapter_config.json says 3"),
        ({"r": 0}, "not a whole number above 0"), ({"lora_alpha": "8"}, "not a finite number"),
        ({"alpha_pattern": {"(": 1}}, "not a regular expression"),
    ],
)  # fmt: skip
def test_configurations_that_cannot_be_merged(config: dict[str, object], message: str, tmp_path: Path) -> None:
    """What PEFT does not merge, or what means something else than the tensors say, is refused by its name."""
    adapter = write_adapter(tmp_path / "a", pair("blocks.0.q"), **({"r": 2, "lora_alpha": 2} | config))
    with pytest.raises(ConvertError) as caught:
        ckpt_tools.convert(LORA / "base.safetensors", tmp_path / "out.safetensors", lora=adapter)
    assert message in str(caught.value)


def test_magnitudes_that_the_configuration_denies(tmp_path: Path) -> None:
    """PEFT would leave out DoRA's magnitudes where `use_dora` is false: the two do not belong together."""
    tensors = pair("blocks.0.q") | {"base_model.model.blocks.0.q.lora_magnitude_vector": torch.ones(6)}
    adapter = write_adapter(tmp_path / "a", tensors, r=2, lora_alpha=2, use_dora=False)
    with pytest.raises(ConvertError, match=r"use_dora is false in adapter_config.json, and 'blocks.0.q' has its magnitudes"):
        ckpt_tools.convert(LORA / "base.safetensors", tmp_path / "out.safetensors", lora=adapter)


def test_peft_names_without_a_configuration(tmp_path: Path) -> None:
    """The scale of PEFT's changes is in the configuration: without it nothing is guessed."""
    save_file(pair("blocks.0.q"), tmp_path / "adapter_model.safetensors")
    with pytest.raises(ConvertError, match=r"no adapter_config\.json beside it"):
        ckpt_tools.convert(LORA / "base.safetensors", tmp_path / "out.safetensors", lora=tmp_path / "adapter_model.safetensors")


def test_no_adapter_at_all(tmp_path: Path) -> None:
    """A checkpoint that holds no factors, and a folder without an adapter, are told as such."""
    save_file({"q.weight": torch.ones(2)}, tmp_path / "x.safetensors")
    with pytest.raises(ConvertError, match="holds no LoRA"):
        ckpt_tools.convert(LORA / "base.safetensors", tmp_path / "out.safetensors", lora=tmp_path / "x.safetensors")
    (tmp_path / "empty").mkdir()
    with pytest.raises(FolderError, match="a folder without an adapter"):
        ckpt_tools.convert(LORA / "base.safetensors", tmp_path / "out.safetensors", lora=tmp_path / "empty")


@pytest.mark.parametrize("name", ["q.hada_w1_a", "q.lokr_w1", "q.oft_r.weight"])
def test_other_adapters_are_refused(name: str, tmp_path: Path) -> None:
    """Tensors of LoHa, LoKr and OFT among the factors are not passed over."""
    adapter = write_adapter(tmp_path / "a", pair("blocks.0.q") | {f"base_model.model.{name}": torch.ones(2)}, r=2, lora_alpha=2)
    with pytest.raises(ConvertError, match="not a part of a LoRA"):
        ckpt_tools.convert(LORA / "base.safetensors", tmp_path / "out.safetensors", lora=adapter)


@pytest.mark.parametrize(
    "quantised",
    [
        {"blocks.0.q.weight": torch.ones(18, 1, dtype=torch.uint8), "blocks.0.q.weight.absmax": torch.ones(1)},
        {"blocks.0.q.weight": torch.ones(6, 6, dtype=torch.int8), "blocks.0.q.SCB": torch.ones(6)},
        {"blocks.0.q.qweight": torch.ones(1, 6, dtype=torch.int32), "blocks.0.q.scales": torch.ones(1, 6)},
        {"blocks.0.q.weight": torch.ones(6, 6).to(torch.float8_e4m3fn), "blocks.0.q.weight_scale_inv": torch.ones(1, 1)},
        {"blocks.0.q.weight": torch.ones(6, 6).to(torch.float8_e4m3fn)},
    ],
)
def test_quantised_bases_are_refused(quantised: Tensors, tmp_path: Path) -> None:
    """An adapter is merged into plain weights: the error says what to do first."""
    base = {name: value for name, value in base_of("plain").items() if name != "blocks.0.q.weight"}
    save_file(base | quantised, tmp_path / "base.safetensors")
    adapter = write_adapter(tmp_path / "a", pair("blocks.0.q"), r=2, lora_alpha=2)
    with pytest.raises(ConvertError) as caught:
        ckpt_tools.convert(tmp_path / "base.safetensors", tmp_path / "out.safetensors", lora=adapter)
    assert "`dequantize='bf16'`" in caught.value.fix


@pytest.mark.parametrize("dtype", [torch.float16, torch.float32])
def test_overflow_is_refused(dtype: torch.dtype, tmp_path: Path) -> None:
    """A sum that the base's dtype cannot hold is an error, and leaves nothing behind."""
    save_file({"q.weight": torch.full((6, 6), torch.finfo(dtype).max, dtype=dtype)}, tmp_path / "base.safetensors")
    factors = {name: value * 1e18 if dtype == torch.float32 else value * 100 for name, value in pair("q").items()}
    adapter = write_adapter(tmp_path / "a", factors, r=2, lora_alpha=200)
    with pytest.raises(ConvertError, match="36 values beyond what"):
        ckpt_tools.convert(tmp_path / "base.safetensors", tmp_path / "out.safetensors", lora=adapter)
    assert sorted(os.listdir(tmp_path)) == ["a", "base.safetensors"]


def test_what_was_infinite_before_stays(tmp_path: Path) -> None:
    """A base with NaN or infinities keeps them: the merge did not make them."""
    values = torch.zeros(6, 6)
    values[0, 0], values[1, 1] = float("nan"), float("inf")
    save_file({"q.weight": values}, tmp_path / "base.safetensors")
    adapter = write_adapter(tmp_path / "a", pair("q"), r=2, lora_alpha=2)
    ckpt_tools.convert(tmp_path / "base.safetensors", tmp_path / "out.safetensors", lora=adapter)
    torch.testing.assert_close(load_file(tmp_path / "out.safetensors")["q.weight"], values + 2, equal_nan=True)


def test_which_state_dict_is_asked(tmp_path: Path) -> None:
    """A base with several state dicts needs --select."""
    torch.save({"model": base_of("plain"), "ema": base_of("plain")}, tmp_path / "base.pth")
    with pytest.raises(NothingMatchedError, match="holds 2 state dicts"):
        ckpt_tools.convert(tmp_path / "base.pth", tmp_path / "out.pth", lora=LORA / "plain")


def test_two_adapters_with_one_head(tmp_path: Path) -> None:
    """Of two heads that are each an adapter's own, none wins in silence."""
    with pytest.raises(ConvertError, match=r"Two adapters have a 'head\.bias' of their own"):
        ckpt_tools.convert(LORA / "base.safetensors", tmp_path / "out.safetensors", lora=[LORA / "saved", LORA / "saved"])


def test_a_head_that_the_base_lacks_is_added(tmp_path: Path) -> None:
    """A head that PEFT trained whole (`modules_to_save`) belongs to the merged model, also where the base has none."""
    base = {name: value for name, value in base_of("saved").items() if not name.startswith("head.")}
    save_file(base, tmp_path / "base.safetensors")
    report = ckpt_tools.convert(tmp_path / "base.safetensors", tmp_path / "out.safetensors", lora=LORA / "saved")
    same(load_file(tmp_path / "out.safetensors"), expected("saved"), 1e-6)
    assert report.merged[0].added == ["head.bias", "head.weight"]
