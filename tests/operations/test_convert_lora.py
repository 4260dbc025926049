"""`--lora`: adapters merged into a base, as PEFT merges them; fixtures/lora is its own."""

import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

import ckpt_tools
from ckpt_tools.errors import ConvertError
from tests.support.commands import ckpt
from tests.support.files import save
from tests.support.lora import LORA, Tensors, adapter, base_of, expected, merge, same
from tests.support.samples import FIXTURES

KINDS = sorted(path.name for path in LORA.iterdir() if path.is_dir())
EMBED, HEAD = "model.embed_tokens", "lm_head"


@pytest.mark.parametrize("kind", KINDS)
def test_every_kind_as_peft_merges_it(kind: str, tmp_path: Path) -> None:
    """Every kind of LoRA gives what `merge_and_unload` gives: float32 within 1e-6, bfloat16 with the same roundings."""
    made, report = merge(tmp_path, base_of(kind), LORA / kind)
    same(made, expected(kind), atol=0.0 if kind.startswith("bf16") else 1e-6)
    assert [row.adapter for row in report.merged] == [str(LORA / kind)]
    assert report.merged[0].modules > 0


@pytest.mark.parametrize("prefix", ["module.", "_orig_mod.module.", "net.", "model.encoder."])
def test_a_base_under_another_prefix(prefix: str, tmp_path: Path) -> None:
    """Wrappers and prefixes in the base do not keep its modules from being found, and stay."""
    base = save(tmp_path / "base.pth", {f"{prefix}{name}": value for name, value in base_of("plain").items()})
    made, _ = merge(tmp_path, base, LORA / "plain")
    same(made, {f"{prefix}{name}": value for name, value in expected("plain").items()}, 1e-6)


def test_names_are_edited_after_the_merge(tmp_path: Path) -> None:
    """The adapter knows the names of IN; --unwrap, --keep, --rename and --dtype work on what was merged."""
    base = {f"module.{name}": value for name, value in base_of("plain").items()}
    edits: dict[str, Any] = {"unwrap": True, "keep": "module.blocks.*", "rename": "^blocks=h", "dtype": "bf16"}
    made, _ = merge(tmp_path, base, LORA / "plain", **edits)
    same(made, {name.replace("blocks", "h"): value.bfloat16() for name, value in expected("plain").items() if "blocks" in name})


@pytest.mark.parametrize("form", ["file", "bin", "bin-file", "strided", "rank=2"])
def test_an_adapter_by_its_file(form: str, tmp_path: Path) -> None:
    """A folder, also with a `=` in its name, or a file, in safetensors or a pickle; the configuration lies beside it."""
    folder = tmp_path / form
    shutil.copytree(LORA / "plain", folder)
    given = folder / "adapter_model.safetensors"
    if form not in ("file", "rank=2"):
        tensors = load_file(given)
        given.unlink()
        given = folder / ("mine.pt" if form == "bin-file" else "adapter_model.bin")
        save(given, {name: value.t().contiguous().t() if form == "strided" else value for name, value in tensors.items()})
    made, _ = merge(tmp_path, LORA / "base.safetensors", given if form.endswith("file") else str(folder))
    same(made, expected("plain"), 1e-6)


def test_tied_weights_stay_tied(tmp_path: Path) -> None:
    """What is one tensor under two names is one afterwards, with what the adapter adds to either, as in PEFT."""
    base = base_of("embedding")
    save(tmp_path / "base.pth", {**base, "out.weight": base["emb.weight"]})
    made, _ = merge(tmp_path, tmp_path / "base.pth", LORA / "embedding", "out.pth")
    assert made["out.weight"].data_ptr() == made["emb.weight"].data_ptr()
    torch.testing.assert_close(made["out.weight"], expected("embedding")["emb.weight"], rtol=0, atol=1e-6)


def test_a_head_that_the_base_lacks_is_added(tmp_path: Path) -> None:
    """A head that PEFT trained whole (`modules_to_save`) belongs to the merged model, also where the base has none."""
    base = {name: value for name, value in base_of("saved").items() if not name.startswith("head.")}
    made, report = merge(tmp_path, base, LORA / "saved")
    same(made, expected("saved"), 1e-6)
    assert report.merged[0].added == ["head.bias", "head.weight"]


# --- the weights that an adapter was trained on beside its factors, and heads that are tied


def factors(module: str, outputs: int = 7, inputs: int = 5) -> tuple[Tensors, torch.Tensor]:
    """Of an embedding or a linear layer, and what they add to its weight."""
    if module == EMBED:
        down, up = torch.randn(2, outputs), torch.randn(inputs, 2)
        return {f"{module}.lora_embedding_A": down, f"{module}.lora_embedding_B": up}, 2 * (up @ down).T
    down, up = torch.randn(2, inputs), torch.randn(outputs, 2)
    return {f"{module}.lora_A.weight": down, f"{module}.lora_B.weight": up}, 2 * up @ down


def weights(*names: str) -> Tensors:
    return {f"{name}.weight": torch.randn(7, 5) for name in names}


@pytest.mark.parametrize("rows", [7, 9])
@pytest.mark.parametrize("kind", [(EMBED,), (HEAD,), (EMBED, HEAD)])
def test_a_base_layer_is_what_the_change_is_added_to(kind: tuple[str, ...], rows: int, tmp_path: Path) -> None:
    """The weight that PEFT saves beside the factors gets them; a resized one comes in the base's place, which is said."""
    base = weights(EMBED, HEAD)
    parts: Tensors = {}
    wanted = dict(base)
    for module in kind:
        own, delta = factors(module, rows)
        before = base[f"{module}.weight"] if rows == 7 else torch.randn(rows, 5)
        parts |= {**own, f"{module}.base_layer.weight": before}
        wanted[f"{module}.weight"] = before + delta
    made, report = merge(tmp_path, base, adapter(tmp_path / "a", parts))
    torch.testing.assert_close(made, wanted)
    assert [note.code for note in report.notes] == ["adapters-base"] * len(kind) * (rows != 7)


@pytest.mark.parametrize("other", [False, True])
def test_other_numbers_in_the_base_are_said(other: bool, tmp_path: Path) -> None:
    """An adapter that was trained on other numbers brings its own, and the report says so; its rounded copy is no other."""
    held = weights(EMBED)[f"{EMBED}.weight"].bfloat16()
    save(tmp_path / "base.safetensors", {f"{EMBED}.weight": held})
    before, (parts, delta) = held.float() + float(other), factors(EMBED)
    folder = adapter(tmp_path / "a", parts | {f"{EMBED}.base_layer.weight": before})
    said = ckpt("convert", tmp_path / "base.safetensors", tmp_path / "out.pth", "--lora", folder).output
    made = torch.load(tmp_path / "out.pth")[f"{EMBED}.weight"]
    torch.testing.assert_close(made, (before.bfloat16() + delta).bfloat16(), rtol=0.01, atol=0.05)
    assert ("that it was trained on" in " ".join(said.split())) is other


@pytest.mark.parametrize("targets", ["head", "both"])
@pytest.mark.parametrize("holds", [True, False])
def test_a_head_that_is_tied_and_not_in_the_file(targets: str, holds: bool, tmp_path: Path) -> None:
    """A file leaves a tied head out: its change goes to the embedding, as PEFT's merge puts it, and that is said."""
    base = weights(EMBED)
    (parts, delta), (more, added) = factors(HEAD), factors(EMBED)
    if targets == "both":
        parts, delta = parts | more, delta + added
    if holds:
        parts[f"{HEAD}.base_layer.weight"] = base[f"{EMBED}.weight"]
    made, report = merge(tmp_path, base, adapter(tmp_path / "a", parts, ensure_weight_tying=targets == "both"))
    torch.testing.assert_close(made, {f"{EMBED}.weight": base[f"{EMBED}.weight"] + delta})
    assert [note.code for note in report.notes] == ["tied-target"]


def test_a_head_held_whole_beside_a_changed_embedding(tmp_path: Path) -> None:
    """`modules_to_save` beside factors and their base: the head is the adapter's, the embedding the base's with its change."""
    base, head, (own, delta) = weights(EMBED, HEAD), torch.randn(7, 5), factors(EMBED)
    parts = {**own, f"{EMBED}.base_layer.weight": base[f"{EMBED}.weight"], f"{HEAD}.weight": head}
    made, _ = merge(tmp_path, base, adapter(tmp_path / "a", parts, modules_to_save=[HEAD]))
    torch.testing.assert_close(made, {f"{EMBED}.weight": base[f"{EMBED}.weight"] + delta, f"{HEAD}.weight": head})


def test_it_is_dequantised_first(tmp_path: Path) -> None:
    """In one command as in two, to the bit; and without `dequantize` it is refused."""
    base = FIXTURES / "quantised" / "bitsandbytes.safetensors"
    ckpt_tools.convert(base, tmp_path / "plain.safetensors", dequantize="bf16")
    plain = load_file(tmp_path / "plain.safetensors")
    shapes = {name.removesuffix(".weight"): value.shape for name, value in plain.items() if value.dim() == 2}
    parts: Tensors = {}
    for module, shape in shapes.items():
        parts |= factors(module, *shape)[0]
    given = adapter(tmp_path / "a", parts)
    two, _ = merge(tmp_path, tmp_path / "plain.safetensors", given)
    one, report = merge(tmp_path, base, given, dequantize="bf16")
    same(one, two)
    assert not any(torch.equal(one[f"{module}.weight"], plain[f"{module}.weight"]) for module in shapes)
    assert report.merged[0].modules == len(shapes)
    with pytest.raises(ConvertError, match="is quantised"):
        merge(tmp_path, base, given)


def test_quantised_experts_are_refused_as_such(tmp_path: Path) -> None:
    parts, _ = factors("model.layers.0.mlp.experts", 96, 24)
    given = adapter(tmp_path / "a", parts, r=1, target_parameters=["experts.gate_up_proj"])
    base = FIXTURES / "quantised" / "mxfp4.safetensors"
    with pytest.raises(ConvertError, match=r"is quantised: it has .*gate_up_proj_blocks"):
        merge(tmp_path, base, given)
    assert merge(tmp_path, base, given, dequantize="fp32")[1].merged[0].ranks == {1: 1}


def pair(module: str, outputs: int = 6) -> Tensors:
    return factors(module, outputs, 6)[0]


REFUSED: dict[str, tuple[dict[str, tuple[int, int]], list[Tensors], str]] = {
    "two partners": (
        {"encoder.blocks.0.q.weight": (6, 6), "decoder.blocks.0.q.weight": (6, 6)}, [pair("blocks.0.q")],
        r"several partners .* 'encoder\.', 'decoder\.'|'decoder\.', 'encoder\.'"),
    "an attention and its output, as PEFT nests them": (
        {"mha.in_proj_weight": (18, 6), "mha.out_proj.weight": (6, 6)},
        [pair("mha.base_layer.out_proj") | pair("mha.out_proj") | pair("mha", 18)],
        r"2 changes of 'mha\.out_proj', one inside the other"),
    "one changes what the other exchanges": (
        {f"{EMBED}.weight": (7, 6), f"{HEAD}.weight": (7, 6)},
        [pair(HEAD, 7) | {f"{HEAD}.base_layer.weight": torch.randn(7, 6)},
         {f"{HEAD}.weight": torch.randn(7, 6), f"{EMBED}.lora_embedding_A": torch.randn(2, 7),
          f"{EMBED}.lora_embedding_B": torch.randn(6, 2)}],
        r"changes 'lm_head\.weight', which .*1 holds whole"),
    "both bring another base": (
        {f"{EMBED}.weight": (7, 6), f"{HEAD}.weight": (7, 6)},
        [pair(HEAD, 7) | {f"{HEAD}.base_layer.weight": torch.randn(7, 6)} for _ in range(2)],
        "trained on different weights"),
}  # fmt: skip


@pytest.mark.parametrize("name", REFUSED)
def test_what_could_mean_two_things_is_refused(name: str, tmp_path: Path) -> None:
    """Neither of two partners is taken, and neither of two adapters wins in silence."""
    base, given, message = REFUSED[name]
    adapters = [
        adapter(tmp_path / str(number), parts, modules_to_save=[HEAD] if f"{HEAD}.weight" in parts else None)
        for number, parts in enumerate(given)
    ]
    with pytest.raises(ConvertError, match=message):
        merge(tmp_path, {name: torch.ones(shape) for name, shape in base.items()}, adapters)
