"""`convert --tie`: a head that lies in the file as a copy of the embedding becomes one with it, where config.json says so."""

import json
from pathlib import Path

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import save_file

from ckpt_tools import CkptError, convert

TABLE = torch.rand(5, 3)


def saved(folder: Path, said: object, **changed: torch.Tensor) -> Path:
    """A model's folder."""
    save_file({"model.embed_tokens.weight": TABLE, "lm_head.weight": TABLE.clone()} | changed, folder / "model.safetensors")
    if said is not None:
        (folder / "config.json").write_text(json.dumps(said))
    return folder / "model.safetensors"


@pytest.mark.parametrize("said", [{"tie_word_embeddings": True}, {"text_config": {"tie_word_embeddings": True}}])
def test_they_are_one(tmp_path: Path, said: object) -> None:
    """In a .pth they share their bytes, in safetensors one is there; the report names both."""
    path = saved(tmp_path, said)
    report = convert(path, tmp_path / "out.pth", tie=True)
    assert any("lm_head.weight" in note.text and "embed_tokens" in note.text for note in report.notes)
    made = torch.load(tmp_path / "out.pth")
    assert made["lm_head.weight"].data_ptr() == made["model.embed_tokens.weight"].data_ptr()
    assert torch.equal(made["lm_head.weight"], TABLE)
    convert(path, tmp_path / "out.safetensors", tie=True)
    with safe_open(tmp_path / "out.safetensors", "pt") as file:
        assert len(list(file.keys())) == 1
    convert(tmp_path / "out.pth", tmp_path / "again.pth", tie=True)  # what is one already stays so
    assert torch.load(tmp_path / "again.pth").keys() == made.keys()


def test_encoder_and_decoder_of_shared(tmp_path: Path) -> None:
    """T5's."""
    names = ["shared.weight", "encoder.embed_tokens.weight", "decoder.embed_tokens.weight", "lm_head.weight"]
    torch.save({name: TABLE.clone() for name in names}, tmp_path / "in.pth")
    (tmp_path / "config.json").write_text('{"tie_word_embeddings": true}')
    convert(tmp_path / "in.pth", tmp_path / "out.pth", tie=True)
    made = torch.load(tmp_path / "out.pth")
    assert made.keys() == set(names)
    assert len({tensor.data_ptr() for tensor in made.values()}) == 1


OTHER = TABLE.clone()
OTHER[4, 2] = torch.nextafter(OTHER[4, 2], torch.tensor(2.0))
TIED = {"tie_word_embeddings": True}


@pytest.mark.parametrize(
    ("said", "changed", "word"),
    [
        (None, {}, "config.json"), ({}, {}, "config.json"), ({"tie_word_embeddings": False}, {}, "config.json"),
        (TIED, {"lm_head.weight": OTHER}, "bit for bit"), (TIED, {"lm_head.weight": TABLE[:3].clone()}, "not equal"),
        (TIED, {"lm_head.weight": TABLE.half()}, "not equal"),
    ],
)  # fmt: skip
def test_it_is_refused(tmp_path: Path, said: object, changed: dict[str, torch.Tensor], word: str) -> None:
    """Where nothing says so, or one bit differs."""
    with pytest.raises(CkptError, match=word):
        convert(saved(tmp_path, said, **changed), tmp_path / "out.pth", tie=True)
    assert not (tmp_path / "out.pth").exists()
