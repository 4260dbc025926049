"""Shards whose index is gone are one checkpoint when all are there, and `ckpt repair FOLDER` writes the index."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file, save_model
from torch import nn

import ckpt_tools
from ckpt_tools.errors import CkptError, DamagedFileError, NotACheckpointError, PartError, UsageError
from ckpt_tools.torch import load_state_dict
from tests.support.commands import ckpt
from tests.support.graphs import equal

State = dict[str, torch.Tensor]
PARTS: list[State] = [{"b.w": torch.arange(6.0).view(2, 3)}, {"a.w": torch.ones(3), "c.w": torch.zeros(2)}]


def shards(folder: Path, suffix: str = ".safetensors", parts: list[State] = PARTS, stem: str = "model") -> State:
    """Shards as Hugging Face names them, without an index; returns what is in them."""
    folder.mkdir(exist_ok=True)
    for number, part in enumerate(parts, 1):
        path = folder / f"{stem}-{number:05d}-of-{len(parts):05d}{suffix}"
        if suffix == ".safetensors":
            save_file(part, path, {"format": "pt"})
        else:
            torch.save(part, path)
    return {name: value for part in parts for name, value in part.items()}


@pytest.mark.parametrize(("suffix", "stem"), [(".safetensors", "model"), (".bin", "pytorch_model")])
def test_repair_writes_the_index(suffix: str, stem: str, tmp_path: Path) -> None:
    """The index has the ecosystem's name and form; the shards stay; a dry run writes nothing; a second time is refused."""
    folder = tmp_path / "in"
    expected = shards(folder, suffix, stem=stem)
    before = {path.name: path.read_bytes() for path in folder.iterdir()}
    ckpt("repair", "--dry-run", folder)
    assert {path.name for path in folder.iterdir()} == set(before)
    assert json.loads(ckpt("repair", "--json", folder).output)["saved"] == 3
    index = json.loads((folder / f"{stem}{suffix}.index.json").read_text())
    assert index["metadata"]["total_size"] == 44
    one, two = (f"{stem}-{number:05d}-of-00002{suffix}" for number in (1, 2))
    assert index["weight_map"] == {"b.w": one, "a.w": two, "c.w": two}
    assert all((folder / name).read_bytes() == data for name, data in before.items())
    assert equal(load_state_dict(folder), expected)
    assert "no-index" not in [row.code for row in ckpt_tools.inspect(folder).findings]
    ckpt("repair", folder, code=UsageError.exit_code)


def test_tied_names_come_back(tmp_path: Path) -> None:
    """A tied name in a shard's metadata is a name of the checkpoint, before the index is written and after it."""
    model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
    model[1].weight = model[0].weight
    save_model(model, str(tmp_path / "model-00001-of-00002.safetensors"))
    save_file({"z.w": torch.ones(1)}, tmp_path / "model-00002-of-00002.safetensors")
    expected = [*load_state_dict(tmp_path)]
    assert set(expected) == {*model.state_dict(), "z.w"}
    ckpt("repair", tmp_path)
    assert {*load_state_dict(tmp_path)} == {*expected}
    weight_map = json.loads((tmp_path / "model.safetensors.index.json").read_text())["weight_map"]
    assert all(name in load_file(tmp_path / file) for name, file in weight_map.items())


def test_a_shard_is_missing(tmp_path: Path) -> None:
    """Missing shards are named, by every command, and no index is written."""
    shards(tmp_path / "in", parts=[*PARTS, {"d.w": torch.ones(1)}, {"e.w": torch.ones(1)}])
    for number in (1, 3):
        (tmp_path / "in" / f"model-{number:05d}-of-00004.safetensors").unlink()
    for call in (lambda: ckpt_tools.inspect(tmp_path / "in"), lambda: ckpt_tools.convert(tmp_path / "in", tmp_path / "o.pth")):
        with pytest.raises(PartError, match=r"2 of 4 .* model-00001-of-00004\.safetensors, model-00003-of-00004\.safetensors"):
            call()
    ckpt("repair", tmp_path / "in", code=3)
    assert len([*(tmp_path / "in").iterdir()]) == 2


TWO = "model-00002-of-00002.safetensors"
ONE = {"b.w": torch.ones(1)}


@pytest.mark.parametrize(
    ("spoil", "kind", "text"),
    [
        (lambda folder: shutil.copy(folder / TWO, folder / "model-000002-of-000002.safetensors"), PartError, "are one part"),
        (lambda folder: save_file(ONE, folder / "model-00003-of-00002.safetensors"), PartError, "beyond the 2 parts"),
        (lambda folder: save_file(ONE, folder / TWO), DamagedFileError, "'b.w' is in two shards"),
        (lambda folder: shards(folder, stem="other"), NotACheckpointError, "holds several checkpoints"),
        (lambda folder: (folder / ".0123456789ab.ckpt-tmp").mkdir(), PartError, "interrupted"),
    ],
)  # fmt: skip
def test_what_is_no_one_checkpoint(spoil: Callable[[Path], object], kind: type[CkptError], text: str, tmp_path: Path) -> None:
    """Shards of which two programs could make two checkpoints are refused."""
    shards(tmp_path)
    spoil(tmp_path)
    with pytest.raises(kind, match=text):
        load_state_dict(tmp_path)
