"""A folder: every file that is a checkpoint by content is examined, every other is counted and named."""

import io
import json
import os
import pickle
import tarfile
import zipfile
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import save_file

import ckpt_tools
from tests.support.commands import ckpt
from tests.support.terminal import run

WEIGHTS = {"a.weight": torch.ones(4), "b.weight": torch.zeros(4)}


class Hostile:
    """What runs when it is loaded."""

    def __reduce__(self) -> tuple[object, tuple[str]]:
        """A command."""
        return os.system, ("true",)


def names(top: Path) -> tuple[list[str], list[str]]:
    """What is found below a folder: the checkpoints, and the rest."""
    documents = [json.loads(line) for line in run("inspect", "--json", top).stdout.splitlines()]
    rest = [path for document in documents for path in document.get("no_checkpoints", [])]
    found = [document["path"] for document in documents if "path" in document]
    return [os.path.relpath(path, top) for path in found], [os.path.relpath(path, top) for path in rest]


@pytest.fixture
def sharded(tmp_path: Path) -> Path:
    """A training folder: shards with their index, what transformers saves beside them, and texts."""
    torch.save(WEIGHTS, tmp_path / "in.pth")
    folder = tmp_path / "checkpoint-10"
    ckpt_tools.convert(tmp_path / "in.pth", folder, shard_size=16)
    torch.save({"state": {}, "param_groups": []}, folder / "optimizer.pt")
    torch.save({"lr": 0.1}, folder / "training_args.bin")
    torch.save({"cpu": torch.get_rng_state()}, folder / "rng_state.pth")
    (folder / "config.json").write_text("{}")
    (folder / "tokenizer.model").write_bytes(b"\n\x0e\n\x05<unk>\x15\0\0\0\0\x18\x02")
    return folder


def test_what_lies_beside_shards_is_examined(sharded: Path) -> None:
    """A sharded checkpoint is one result; the files beside it are others, the hostile one among them told as it is."""
    torch.save({"state": Hostile()}, sharded / "optimizer.pt")
    assert names(sharded) == ([".", "optimizer.pt", "rng_state.pth", "training_args.bin"], ["config.json", "tokenizer.model"])
    result = run("check", "--json", sharded)
    documents = [json.loads(line) for line in result.stdout.splitlines()]
    verdicts = {Path(row["path"]).name: row["verdict"] for row in documents[:-1]}
    assert verdicts == {"checkpoint-10": "healthy", "optimizer.pt": "findings", "training_args.bin": "healthy",
                        "rng_state.pth": "healthy"}  # fmt: skip
    assert documents[-1] == {"folder": str(sharded), "no_checkpoints": [f"{sharded}/config.json", f"{sharded}/tokenizer.model"]}
    assert result.exit_code == 1


def test_several_indexes(sharded: Path) -> None:
    """Two kinds of shards in one folder, as repositories have them, are two checkpoints, each told by its index."""
    ckpt_tools.convert(sharded.parent / "in.pth", sharded.parent / "other", shard_size=16, format="pth")
    for path in (sharded.parent / "other").iterdir():
        path.rename(sharded / path.name)
    (sharded / "training_args.bin").unlink()
    indexes = ["model.safetensors.index.json", "optimizer.pt", "pytorch_model.bin.index.json"]
    assert names(sharded)[0] == [*indexes, "rng_state.pth"]
    ckpt("check", sharded)


def write_tar(path: Path, member: str) -> None:
    """A tar with one member."""
    with tarfile.open(path, "w", format=tarfile.USTAR_FORMAT) as archive:
        archive.addfile(tarfile.TarInfo(member), io.BytesIO())


@pytest.mark.filterwarnings("ignore:.*torch.jit.*")
def test_content_tells_whatever_the_name(tmp_path: Path) -> None:
    """Checkpoints of every kind under names that say nothing are found, and nothing else is."""
    torch.save(WEIGHTS, tmp_path / "zip")
    torch.save(WEIGHTS, tmp_path / "old.pickle", _use_new_zipfile_serialization=False)
    (tmp_path / "plain.data").write_bytes(pickle.dumps(WEIGHTS, protocol=2))
    save_file(WEIGHTS, tmp_path / "blob")
    torch.jit.save(torch.jit.script(torch.nn.Linear(1, 1)), str(tmp_path / "a.jit"))
    np.savez(tmp_path / "arrays.npz", a=np.ones(2))
    write_tar(tmp_path / "torch01", "sys_info")
    with zipfile.ZipFile(tmp_path / "agent.zip", "w") as archive:
        archive.write(tmp_path / "zip", "policy.pth")
    (tmp_path / "cut.zip").write_bytes((tmp_path / "zip").read_bytes()[:-30])
    checkpoints = sorted(path.name for path in tmp_path.iterdir())
    write_tar(tmp_path / "images.tar", "0001.jpg")
    with zipfile.ZipFile(tmp_path / "text.docx", "w") as archive:
        archive.writestr("word/document.xml", "<x/>")
    (tmp_path / "random").write_bytes(bytes(range(100, 108)) + b"{random bytes")
    (tmp_path / "empty.txt").write_bytes(b"")
    assert names(tmp_path) == (checkpoints, ["empty.txt", "images.tar", "random", "text.docx"])


def test_a_distributed_checkpoint_is_one(tmp_path: Path) -> None:
    """The parts of a distributed checkpoint go with its folder, files beside it do not."""
    torch.save(WEIGHTS, tmp_path / "in.pth")
    ckpt_tools.convert(tmp_path / "in.pth", tmp_path / "step_1", format="dcp")
    torch.save({"epoch": 1}, tmp_path / "step_1" / "meta.pt")
    assert names(tmp_path) == (["in.pth", "step_1", "step_1/meta.pt"], [])


def test_links_count_once(tmp_path: Path) -> None:
    """Hugging Face's cache: a blob that a link leads to is examined under the link's name alone."""
    (tmp_path / "blobs").mkdir()
    (tmp_path / "snapshots").mkdir()
    torch.save(WEIGHTS, tmp_path / "blobs" / "0123abc")
    (tmp_path / "snapshots" / "model.pth").symlink_to("../blobs/0123abc")
    assert names(tmp_path) == (["snapshots/model.pth"], [])
