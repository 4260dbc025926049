"""A folder: every file that is a checkpoint by content is examined, and `check --latest-good` finds the newest good one."""

import io
import json
import os
import pickle
import shutil
import tarfile
import zipfile
from pathlib import Path
from typing import Any

import jsonschema
import numpy as np
import pytest
import torch
from safetensors.torch import save_file

import ckpt_tools
from ckpt_tools import convert, latest_good
from tests.support.commands import ckpt
from tests.support.samples import FIXTURES
from tests.support.terminal import ROOT, run
from tests.support.zips import flip_byte

WEIGHTS = {"a.weight": torch.ones(4), "b.weight": torch.zeros(4)}


class Hostile:
    """What runs when it is loaded."""

    def __reduce__(self) -> tuple[object, tuple[str]]:
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


def saved(path: Path, value: float = 1.0, *, time: int = 0, **facts: Any) -> Path:
    """A training checkpoint with these facts beside the weights, written at a time of ours."""
    path.parent.mkdir(parents=True, exist_ok=True)
    torch.save({"model": {"module.a.weight": torch.full((64, 4), value)}, **facts}, path)
    os.utime(path, (10**9 + time,) * 2)
    return path


def printed(*arguments: object) -> tuple[int, str]:
    """The exit code and what goes to standard output."""
    result = run("check", "--latest-good", *arguments)
    return result.exit_code, result.stdout


def test_damaged_and_not_finite_ones_are_passed_over(tmp_path: Path) -> None:
    """A flipped byte, a cut file and NaN: each is told on standard error, and the one before them is taken."""
    good = saved(tmp_path / "epoch_1.pth", epoch=1)
    saved(tmp_path / "epoch_2.pth", 2.0, epoch=2)
    flip_byte(tmp_path / "epoch_2.pth", b"\0\0\0\x40" * 8)
    saved(tmp_path / "epoch_3.pth", float("nan"), epoch=3)
    cut = saved(tmp_path / "epoch_4.pth", epoch=4)
    cut.write_bytes(cut.read_bytes()[:-300])
    result = run("check", "--latest-good", tmp_path)
    assert (result.exit_code, result.stdout) == (0, f"{good}\n")
    told = result.stderr.splitlines()
    assert [line.split(": ")[:2] for line in told] == [["not good", str(tmp_path / f"epoch_{n}.pth")] for n in (4, 3, 2)]
    assert "NaN" in told[1]
    quiet = run("check", "--latest-good", "--quiet", tmp_path)
    assert (quiet.stdout, quiet.stderr) == (f"{good}\n", "")
    assert latest_good(tmp_path, ignore=["not-finite"]) == tmp_path / "epoch_3.pth"


def test_a_damaged_one_without_a_step_is_told_too(tmp_path: Path) -> None:
    """A file that was cut says no step: it is told where it was written after the one that is taken."""
    saved(tmp_path / "a.pth", epoch=1, time=1)
    for name, time in (("last.pth", 2), ("first.pth", 0)):
        cut = saved(tmp_path / name, epoch=2)
        cut.write_bytes(cut.read_bytes()[:-300])
        os.utime(cut, (10**9 + time,) * 2)
    assert [line.split(": ")[1] for line in run("check", "--latest-good", tmp_path).stderr.splitlines()] == [
        str(tmp_path / "last.pth")
    ]


def test_what_is_being_written_is_not_taken(tmp_path: Path) -> None:
    """A file that changes while it is read, and names of files that are not finished."""
    good = saved(tmp_path / "epoch_1.pth", epoch=1)
    growing = saved(tmp_path / "epoch_2.pth", epoch=2, notes="x" * 1000)
    shutil.copy(growing, tmp_path / "epoch_3.pth.tmp")
    shutil.copy(growing, tmp_path / ".epoch_4.pth")
    times = iter(range(10**9 + 5, 10**9 + 50))

    def write(done: int, size: int) -> None:
        if size == growing.stat().st_size:
            os.utime(growing, (next(times),) * 2)

    assert latest_good(tmp_path) == growing
    assert latest_good(tmp_path, progress=write) == good
    assert "still being written" in run("check", "--latest-good", tmp_path).stderr


@pytest.mark.skipif(not hasattr(os, "mkfifo"), reason="has no named pipes")
def test_pipes_beside_a_checkpoint_are_not_read(tmp_path: Path) -> None:
    """A pipe that is called as the Trainer's state, or as an index of shards, would never end."""
    path = saved(tmp_path / "a.pth")
    for name in ("trainer_state.json", "model.safetensors.index.json"):
        os.mkfifo(tmp_path / name)
    assert latest_good(tmp_path) == path


def test_folders_of_parts(tmp_path: Path) -> None:
    """The parts of many ranks are one checkpoint; one rank's file alone is not taken, nor parts of which one is missing."""
    shutil.copytree(FIXTURES / "deepspeed" / "hop", tmp_path / "ds")
    assert printed(tmp_path / "ds") == (0, f"{tmp_path / 'ds' / 'global_step4'}\n")
    shutil.copytree(tmp_path / "ds" / "global_step4", tmp_path / "ds" / "global_step6")
    assert latest_good(tmp_path / "ds") == tmp_path / "ds" / "global_step6"
    next((tmp_path / "ds" / "global_step6").glob("*rank_1*optim*")).unlink()
    assert latest_good(tmp_path / "ds") == tmp_path / "ds" / "global_step4"
    fsdp = FIXTURES / "parts" / "fsdp2"
    alone = tmp_path / "alone"
    alone.mkdir()
    shutil.copy(next(fsdp.glob("*rank_0*")), alone)
    assert printed(alone)[0] == 1
    assert latest_good(FIXTURES / "megatron" / "dist") == FIXTURES / "megatron" / "dist" / "iter_0000002"


def test_transformers_trainer(tmp_path: Path) -> None:
    """The step is in trainer_state.json, the weights in a file or in shards; optimizer and random states are no candidates."""
    for step in (500, 1000):
        folder = tmp_path / f"checkpoint-{step}"
        folder.mkdir()
        save_file({"a.weight": torch.ones(64)}, folder / "model.safetensors")
        torch.save({"state": {0: {"exp_avg": torch.ones(4)}}, "param_groups": [{"params": [0]}]}, folder / "optimizer.pt")
        rng = {"python": (3, (1, 2), None), "cpu": torch.get_rng_state(), "cuda": torch.get_rng_state()}
        torch.save(rng, folder / "rng_state.pth")
        (folder / "trainer_state.json").write_text(json.dumps({"global_step": 2000 - step, "epoch": 1.5, "log_history": []}))
    assert latest_good(tmp_path) == tmp_path / "checkpoint-500" / "model.safetensors"
    shutil.rmtree(tmp_path / "checkpoint-500")
    convert(tmp_path / "checkpoint-1000" / "model.safetensors", tmp_path / "checkpoint-1500", shard_size=200)
    assert latest_good(tmp_path) == tmp_path / "checkpoint-1000" / "model.safetensors"  # which says its epoch
    (tmp_path / "checkpoint-1000" / "trainer_state.json").write_text("{")
    assert latest_good(tmp_path) == tmp_path / "checkpoint-1500"


def test_none_is_good(tmp_path: Path) -> None:
    """One sentence, exit code 1, nothing on standard output; in Python None; under --json an error that follows its schema."""
    saved(tmp_path / "a.pth", float("inf"))
    result = run("check", "--latest-good", tmp_path)
    assert (result.exit_code, result.stdout) == (1, "")
    assert f"No checkpoint below {tmp_path} is good." in result.stderr
    assert latest_good(tmp_path) is None
    document = json.loads(run("check", "--latest-good", "--json", tmp_path).stdout)
    jsonschema.validate(document, json.loads((ROOT / "docs" / "error.schema.json").read_text()))
    (tmp_path / "a.pth").unlink()
    assert "There is none with weights." in run("check", "--latest-good", tmp_path).stderr
    with pytest.raises(FileNotFoundError):
        latest_good(tmp_path / "nowhere")
