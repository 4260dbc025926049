"""`convert --fill-from` and `--tie`: what a checkpoint lacks, or lies in it twice; `--set-metadata`: the text in a header."""

import json
import zipfile
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open

from ckpt_tools import CkptError, convert
from ckpt_tools.errors import ConvertError, UsageError
from tests.support.files import load, save
from tests.support.samples import metadata

ORIGINAL = {"head.weight": torch.rand(4, 3), "tower.weight": torch.rand(5, 2).half(), "tower.steps": torch.arange(3)}


def test_missing_tensors_come_from_the_original(tmp_path: Path) -> None:
    """The input's own stay, with its edited names; the rest is the original's, in its dtype, or cast with all."""
    original = save(tmp_path / "original.safetensors", ORIGINAL)
    tuned = {"module.head.weight": torch.rand(4, 3), "module.new.weight": torch.rand(2)}
    options: dict[str, Any] = {"strip_module": True, "fill_from": original}
    save(tmp_path / "tuned.pth", tuned)
    for name in ("out.pth", "out.safetensors"):
        report = convert(tmp_path / "tuned.pth", tmp_path / name, **options)
        assert report.filled.keys() == {"tower.weight", "tower.steps"}
        assert any(note.code == "only-in-input" and "new.weight" in note.text for note in report.notes)
        made = load(tmp_path / name)
        wanted = {**ORIGINAL, "head.weight": tuned["module.head.weight"], "new.weight": tuned["module.new.weight"]}
        assert made.keys() == wanted.keys()
        assert all(torch.equal(made[key], wanted[key]) and made[key].dtype is wanted[key].dtype for key in wanted)
    convert(tmp_path / "tuned.pth", tmp_path / "cast.pth", dtype="bf16", **options)
    assert load(tmp_path / "cast.pth")["tower.weight"].dtype is torch.bfloat16


def test_a_tie_of_the_original_is_one_with_the_inputs_tensor(tmp_path: Path) -> None:
    """A head that is tied in the original becomes the input's embedding, not the original's."""
    embedding = torch.rand(4, 3)
    save(tmp_path / "original.pth", {"embed.weight": embedding, "head.weight": embedding})
    save(tmp_path / "tuned.pth", {"embed.weight": embedding + 1})
    convert(tmp_path / "tuned.pth", tmp_path / "out.pth", fill_from=tmp_path / "original.pth")
    made = load(tmp_path / "out.pth")
    assert torch.equal(made["head.weight"], embedding + 1)
    assert made["head.weight"].data_ptr() == made["embed.weight"].data_ptr()


def test_what_cannot_be_filled_is_refused(tmp_path: Path) -> None:
    """Another shape, no common name, a target as well: nothing is written."""
    original, out = save(tmp_path / "original.pth", ORIGINAL), tmp_path / "out.pth"
    shape = save(tmp_path / "shape.pth", {"head.weight": torch.rand(5, 3)})
    wrapped = save(tmp_path / "wrapped.pth", {"module.head.weight": torch.rand(4, 3)})
    with pytest.raises(ConvertError, match=r"'head.weight' has the shape 4x3 .* 5x3 in IN"):
        convert(shape, out, fill_from=original)
    with pytest.raises(ConvertError, match="no name in common"):
        convert(wrapped, out, fill_from=original)
    with pytest.raises(UsageError, match="does not go with"):
        convert(shape, out, fill_from=original, like=original)
    assert not out.exists()


def test_records_without_a_checksum_get_one(tmp_path: Path) -> None:
    """An original that torch wrote without CRC-32 gives an archive with all of them."""
    torch.serialization.set_crc32_options(False)
    try:
        save(tmp_path / "original.pth", ORIGINAL)
    finally:
        torch.serialization.set_crc32_options(True)
    save(tmp_path / "tuned.pth", {"head.weight": torch.rand(4, 3)})
    convert(tmp_path / "tuned.pth", tmp_path / "out.pth", fill_from=tmp_path / "original.pth")
    with zipfile.ZipFile(tmp_path / "out.pth") as archive:
        assert archive.testzip() is None


# --- a head that lies in the file as a copy of the embedding becomes one with it, where config.json says so

TABLE = torch.rand(5, 3)
OTHER = TABLE.clone()
OTHER[4, 2] = torch.nextafter(OTHER[4, 2], torch.tensor(2.0))
TIED = {"tie_word_embeddings": True}


def copied(folder: Path, said: object, **changed: torch.Tensor) -> Path:
    if said is not None:
        (folder / "config.json").write_text(json.dumps(said))
    tensors = {"model.embed_tokens.weight": TABLE, "lm_head.weight": TABLE.clone()} | changed
    return save(folder / "model.safetensors", tensors)


@pytest.mark.parametrize("said", [TIED, {"text_config": TIED}])
def test_they_are_one(tmp_path: Path, said: object) -> None:
    """In a .pth they share their bytes, in safetensors one is there; the report names both."""
    path = copied(tmp_path, said)
    report = convert(path, tmp_path / "out.pth", tie=True)
    assert any("lm_head.weight" in note.text and "embed_tokens" in note.text for note in report.notes)
    made = load(tmp_path / "out.pth")
    assert made["lm_head.weight"].data_ptr() == made["model.embed_tokens.weight"].data_ptr()
    assert torch.equal(made["lm_head.weight"], TABLE)
    convert(path, tmp_path / "out.safetensors", tie=True)
    with safe_open(tmp_path / "out.safetensors", "pt") as file:
        assert len(list(file.keys())) == 1
    convert(tmp_path / "out.pth", tmp_path / "again.pth", tie=True)  # what is one already stays so
    assert load(tmp_path / "again.pth").keys() == made.keys()


def test_encoder_and_decoder_of_shared(tmp_path: Path) -> None:
    names = ["shared.weight", "encoder.embed_tokens.weight", "decoder.embed_tokens.weight", "lm_head.weight"]
    save(tmp_path / "in.pth", {name: TABLE.clone() for name in names})
    (tmp_path / "config.json").write_text(json.dumps(TIED))
    convert(tmp_path / "in.pth", tmp_path / "out.pth", tie=True)
    made = load(tmp_path / "out.pth")
    assert made.keys() == set(names)
    assert len({tensor.data_ptr() for tensor in made.values()}) == 1


@pytest.mark.parametrize(
    ("said", "changed", "word"),
    [
        (None, {}, "config.json"), ({}, {}, "config.json"), ({"tie_word_embeddings": False}, {}, "config.json"),
        (TIED, {"lm_head.weight": OTHER}, "bit for bit"), (TIED, {"lm_head.weight": TABLE[:3].clone()}, "not equal"),
        (TIED, {"lm_head.weight": TABLE.half()}, "not equal"),
    ],
)  # fmt: skip
def test_it_is_refused(tmp_path: Path, said: object, changed: dict[str, torch.Tensor], word: str) -> None:
    with pytest.raises(CkptError, match=word):
        convert(copied(tmp_path, said, **changed), tmp_path / "out.pth", tie=True)
    assert not (tmp_path / "out.pth").exists()


def test_texts_are_set_and_dropped(tmp_path: Path) -> None:
    """A text is replaced, one comes, one goes, the rest stays, and the report says so."""
    weights, out = {"a.weight": torch.arange(6.0).reshape(2, 3), "a.bias": torch.ones(3)}, tmp_path / "out.safetensors"
    save(tmp_path / "in.safetensors", weights, metadata={"format": "pt", "title": "old", "note": "keep = me"})
    report = convert(tmp_path / "in.safetensors", out, set_metadata=["title=a=b", "author=x", "note="])
    assert metadata(out) == {"format": "pt", "title": "a=b", "author": "x"}
    assert all(torch.equal(load(out)[name], value) for name, value in weights.items())
    assert report.dropped == [("note", "`set_metadata='note='`")]
    assert [note.text for note in report.notes if note.code == "metadata-set"] == ["Metadata: 'title', 'author' set."]
