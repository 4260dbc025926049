"""What is done while calls fail: every command that writes, and `ckpt_tools.torch.save`."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors.torch import save_file
from torch.distributed import checkpoint

from ckpt_tools.torch import save


@dataclass(frozen=True, slots=True)
class Job:
    """One piece of work in a folder.

    Attributes:
        name: how it is called. prepare: makes the files that are there before.
        arguments: of `ckpt`, run in the folder; or `work`, a function that is called there.
        code: how it exits when nothing fails.
        index: of a job that replaces a folder: the file that goes first and comes last. Killed in between, the folder has none.
    """

    name: str
    prepare: Callable[[Path], None]
    arguments: tuple[str, ...] = ()
    work: Callable[[], None] | None = None
    code: int = 0
    index: str = ""


def _input(folder: Path, size: int = 3000) -> None:
    torch.manual_seed(0)
    data = {"module.a.w": torch.rand(size), "module.a.b": torch.zeros(7), "module.b.w": torch.rand(11, 3)}
    torch.save(data, folder / "in.pth")


def _input_and_old(folder: Path) -> None:
    _input(folder)
    torch.save({"old.w": torch.ones(100)}, folder / "out.pth")


def _large(folder: Path) -> None:
    _input(folder, 600_000)


def _safetensors(folder: Path) -> None:
    save_file({"module.a.w": torch.rand(1000), "module.b.w": torch.rand(3, 5)}, folder / "in.safetensors", {"format": "pt"})


def _legacy(folder: Path) -> None:
    """With a tie and a view."""
    state = {f"module.layer.{number}.w": torch.full((30, 7), float(number)) for number in range(4)}
    state |= {"module.tied.w": state["module.layer.0.w"], "module.view.w": torch.arange(40.0)[3:30:3]}
    torch.save(state, folder / "in.pth", _use_new_zipfile_serialization=False)


def _saved(name: str) -> Callable[[], None]:
    return lambda: save({"a.w": torch.ones(500)}, name)


def _damaged(folder: Path) -> None:
    """The last tensor is cut off."""
    _input(folder)
    data = (folder / "in.pth").read_bytes()
    (folder / "in.pth").write_bytes(data[: data.index(b"data/2")])


def _old_folder(folder: Path) -> None:
    """An older checkpoint in the folder, of another number of shards, and a file that is no part of it."""
    _input(folder)
    out = folder / "out"
    out.mkdir()
    (out / "README").write_text("mine")
    save_file({"old.w": torch.ones(100)}, out / _SHARD)
    (out / _INDEX).write_text(json.dumps({"metadata": {"total_size": 400}, "weight_map": {"old.w": _SHARD}}))


def _old_dcp(folder: Path) -> None:
    _input(folder)
    checkpoint.save({"old.w": torch.ones(100)}, checkpoint_id=folder / "out", no_dist=True)


def _convert(words: str) -> tuple[str, ...]:
    return ("convert", *words.split(), "--strip-module")


_SHARD, _INDEX = "model-00001-of-00001.safetensors", "model.safetensors.index.json"


JOBS = (
    Job("convert to a new file", _input, _convert("in.pth out.pth")),
    Job("convert over an old file", _input_and_old, _convert("in.pth out.pth --overwrite")),
    Job("convert onto itself", _input, _convert("in.pth in.pth --overwrite")),
    Job("convert with a cast", _large, _convert("in.pth out.pth --dtype fp16")),
    Job("convert in the kernel", _large, _convert("in.pth out.pth")),
    Job("convert to safetensors", _input, ("convert", "in.pth", "out.safetensors")),
    Job("convert from safetensors", _safetensors, ("convert", "in.safetensors", "out.pth")),
    Job("edit in place", _input, _convert("--in-place in.pth")),
    Job("edit a header in place", _safetensors, _convert("--in-place in.safetensors")),
    Job("edit an old file in place", _legacy, _convert("--in-place in.pth")),
    Job("repair", _damaged, ("repair", "in.pth", "out.pth"), code=1),
    Job("convert to a new folder", _input, _convert("in.pth out --shard-size 11KB")),
    Job("convert over a folder", _old_folder, _convert("in.pth out --shard-size 11KB --overwrite"), index=_INDEX),
    Job("convert to a new dcp", _input, _convert("in.pth out --format dcp")),
    Job("convert over a dcp", _old_dcp, _convert("in.pth out --format dcp --overwrite"), index=".metadata"),
    Job("torch.save", _input_and_old, work=_saved("out.pth")),
    Job("torch.save to safetensors", _input, work=_saved("out.safetensors")),
)  # fmt: skip
# so large that the kernel copies it ahead, in a thread
AHEAD = Job("convert with a copy ahead", lambda folder: _input(folder, 9 << 20), _convert("in.pth out.pth"))
