"""`--lora` where the adapter holds the weights that it was trained on beside its factors, and heads that are tied."""

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

import ckpt_tools
from ckpt_tools.errors import ConvertError
from tests.support.commands import ckpt

EMBED, HEAD, PEFT = "model.embed_tokens", "lm_head", "base_model.model."


def adapter(folder: Path, tensors: dict[str, torch.Tensor], **config: object) -> Path:
    """An adapter as PEFT's `save_pretrained` lays it out."""
    folder.mkdir()
    save_file({PEFT + name: value for name, value in tensors.items()}, folder / "adapter_model.safetensors")
    said = {"peft_type": "LORA", "r": 2, "lora_alpha": 4, **config}
    (folder / "adapter_config.json").write_text(json.dumps(said))
    return folder


def of_embedding(rows: int = 7) -> tuple[dict[str, torch.Tensor], torch.Tensor]:
    """The factors of an embedding of a width of 5, and what they add."""
    down, up = torch.randn(2, rows), torch.randn(5, 2)
    return {f"{EMBED}.lora_embedding_A": down, f"{EMBED}.lora_embedding_B": up}, 2 * (up @ down).T


def of_head(rows: int = 7) -> tuple[dict[str, torch.Tensor], torch.Tensor]:
    """The factors of a head, and what they add."""
    down, up = torch.randn(2, 5), torch.randn(rows, 2)
    return {f"{HEAD}.lora_A.weight": down, f"{HEAD}.lora_B.weight": up}, 2 * up @ down


def base(tmp_path: Path, *names: str) -> dict[str, torch.Tensor]:
    """The base's file."""
    tensors = {f"{name}.weight": torch.randn(7, 5) for name in names}
    save_file(tensors, tmp_path / "base.safetensors")
    return tensors


@pytest.mark.parametrize("rows", [7, 9])
@pytest.mark.parametrize("kind", ["embedding", "head", "both"])
def test_a_base_layer_is_what_the_change_is_added_to(kind: str, rows: int, tmp_path: Path) -> None:
    """The weight that PEFT saves beside the factors gets them; a resized one comes in the base's place, which is said."""
    tensors = base(tmp_path, EMBED, HEAD)
    parts: dict[str, torch.Tensor] = {}
    expected = dict(tensors)
    for module, (factors, delta) in ((EMBED, of_embedding(rows)), (HEAD, of_head(rows))):
        if kind in ("both", "embedding" if module == EMBED else "head"):
            before = tensors[f"{module}.weight"] if rows == 7 else torch.randn(rows, 5)
            parts |= {**factors, f"{module}.base_layer.weight": before}
            expected[f"{module}.weight"] = before + delta
    out = tmp_path / "out.safetensors"
    report = ckpt_tools.convert(tmp_path / "base.safetensors", out, lora=adapter(tmp_path / "a", parts))
    torch.testing.assert_close(load_file(out), expected)
    assert [note.code for note in report.notes] == ["adapters-base"] * (len(parts) // 3) * (rows != 7)


@pytest.mark.parametrize("other", [False, True])
def test_other_numbers_in_the_base_are_said(other: bool, tmp_path: Path) -> None:
    """An adapter that was trained on other numbers brings its own, and the report says so; its rounded copy is no other."""
    tensors = base(tmp_path, EMBED)
    save_file({f"{EMBED}.weight": tensors[f"{EMBED}.weight"].bfloat16()}, tmp_path / "base.safetensors")
    before = tensors[f"{EMBED}.weight"].bfloat16().float() + float(other)
    factors, delta = of_embedding()
    folder = adapter(tmp_path / "a", factors | {f"{EMBED}.base_layer.weight": before})
    said = ckpt("convert", tmp_path / "base.safetensors", tmp_path / "out.pth", "--lora", folder).output
    made = torch.load(tmp_path / "out.pth")[f"{EMBED}.weight"]
    torch.testing.assert_close(made, (before.bfloat16() + delta).bfloat16(), rtol=0.01, atol=0.05)
    assert ("that it was trained on" in " ".join(said.split())) is other


@pytest.mark.parametrize("targets", ["head", "both"])
@pytest.mark.parametrize("holds", [True, False])
def test_a_head_that_is_tied_and_not_in_the_file(targets: str, holds: bool, tmp_path: Path) -> None:
    """A file leaves a tied head out: its change goes to the embedding, as PEFT's merge puts it, and that is said."""
    tensors = base(tmp_path, EMBED)
    (parts, delta), (more, added) = of_head(), of_embedding()
    if targets == "both":
        parts, delta = parts | more, delta + added
    if holds:
        parts[f"{HEAD}.base_layer.weight"] = tensors[f"{EMBED}.weight"]
    folder = adapter(tmp_path / "a", parts, ensure_weight_tying=targets == "both")
    report = ckpt_tools.convert(tmp_path / "base.safetensors", tmp_path / "out.pth", lora=folder)
    torch.testing.assert_close(torch.load(tmp_path / "out.pth"), {f"{EMBED}.weight": tensors[f"{EMBED}.weight"] + delta})
    assert [note.code for note in report.notes] == ["tied-target"]


def test_a_head_held_whole_beside_a_changed_embedding(tmp_path: Path) -> None:
    """`modules_to_save` beside factors and their base: the head is the adapter's, the embedding the base's with its change."""
    tensors = base(tmp_path, EMBED, HEAD)
    factors, delta = of_embedding()
    before, head = tensors[f"{EMBED}.weight"], torch.randn(7, 5)
    parts = {**factors, f"{EMBED}.base_layer.weight": before, f"{HEAD}.weight": head}
    folder = adapter(tmp_path / "a", parts, modules_to_save=[HEAD])
    ckpt_tools.convert(tmp_path / "base.safetensors", tmp_path / "out.pth", lora=folder)
    expected = {f"{EMBED}.weight": before + delta, f"{HEAD}.weight": head}
    torch.testing.assert_close(torch.load(tmp_path / "out.pth"), expected)


def test_a_change_of_what_another_adapter_holds_whole_is_refused(tmp_path: Path) -> None:
    """Neither of two adapters wins in silence: one changes what the other exchanges, or both bring another base."""
    base(tmp_path, EMBED, HEAD)
    one = adapter(tmp_path / "one", of_head()[0] | {f"{HEAD}.base_layer.weight": torch.randn(7, 5)})
    whole = adapter(tmp_path / "whole", of_embedding()[0] | {f"{HEAD}.weight": torch.randn(7, 5)}, modules_to_save=[HEAD])
    two = adapter(tmp_path / "two", of_head()[0] | {f"{HEAD}.base_layer.weight": torch.randn(7, 5)})
    with pytest.raises(ConvertError, match=r"changes 'lm_head\.weight', which .*whole holds whole"):
        ckpt_tools.convert(tmp_path / "base.safetensors", tmp_path / "out.pth", lora=[one, whole])
    with pytest.raises(ConvertError, match="trained on different weights"):
        ckpt_tools.convert(tmp_path / "base.safetensors", tmp_path / "out.pth", lora=[one, two])
