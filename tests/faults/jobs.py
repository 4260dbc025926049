"""What is done while calls fail: every command that writes, and `ckpt_tools.torch.save`."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch


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


def _ahead(folder: Path) -> None:
    """So large that the kernel copies it ahead, in a thread."""
    _input(folder, 9 << 20)


def _safetensors(folder: Path) -> None:
    from safetensors.torch import save_file

    save_file({"module.a.w": torch.rand(1000), "module.b.w": torch.rand(3, 5)}, folder / "in.safetensors", {"format": "pt"})


def _save() -> None:
    from ckpt_tools.torch import save

    save({"a.w": torch.ones(500)}, "out.pth")


def _save_safetensors() -> None:
    from ckpt_tools.torch import save

    save({"a.w": torch.ones(500)}, "out.safetensors")


def _strip(*more: str) -> tuple[str, ...]:
    return ("convert", "in.pth", "out.pth", "--strip-module", *more)


def _damaged(folder: Path) -> None:
    """The last tensor is cut off."""
    _input(folder)
    data = (folder / "in.pth").read_bytes()
    (folder / "in.pth").write_bytes(data[: data.index(b"data/2")])


def _old_folder(folder: Path) -> None:
    """An older checkpoint in the folder, of another number of shards, and a file that is no part of it."""
    from safetensors.torch import save_file

    _input(folder)
    out = folder / "out"
    out.mkdir()
    (out / "README").write_text("mine")
    save_file({"old.w": torch.ones(100)}, out / _SHARD.format(1, 1))
    names = {"metadata": {"total_size": 400}, "weight_map": {"old.w": _SHARD.format(1, 1)}}
    (out / _INDEX).write_text(json.dumps(names))


def _old_dcp(folder: Path) -> None:
    from torch.distributed import checkpoint

    _input(folder)
    checkpoint.save({"old.w": torch.ones(100)}, checkpoint_id=folder / "out", no_dist=True)


def _sharded(*more: str) -> tuple[str, ...]:
    return ("convert", "in.pth", "out", "--strip-module", "--shard-size", "11KB", *more)


def _dcp(*more: str) -> tuple[str, ...]:
    return ("convert", "in.pth", "out", "--strip-module", "--format", "dcp", *more)


_SHARD, _INDEX = "model-{:05}-of-{:05}.safetensors", "model.safetensors.index.json"


JOBS = (
    Job("convert to a new file", _input, _strip()),
    Job("convert over an old file", _input_and_old, _strip("--overwrite")),
    Job("convert onto itself", _input, ("convert", "in.pth", "in.pth", "--strip-module", "--overwrite")),
    Job("convert with a cast", _large, _strip("--dtype", "fp16")),
    Job("convert in the kernel", _large, _strip()),
    Job("convert to safetensors", _input, ("convert", "in.pth", "out.safetensors")),
    Job("convert from safetensors", _safetensors, ("convert", "in.safetensors", "out.pth")),
    Job("edit in place", _input, ("convert", "--in-place", "in.pth", "--strip-module")),
    Job("edit a header in place", _safetensors, ("convert", "--in-place", "in.safetensors", "--strip-module")),
    Job("repair", _damaged, ("repair", "in.pth", "out.pth"), code=1),
    Job("convert to a new folder", _input, _sharded()),
    Job("convert over a folder", _old_folder, _sharded("--overwrite"), index=_INDEX),
    Job("convert to a new dcp", _input, _dcp()),
    Job("convert over a dcp", _old_dcp, _dcp("--overwrite"), index=".metadata"),
    Job("torch.save", _input_and_old, work=_save),
    Job("torch.save to safetensors", _input, work=_save_safetensors),
)  # fmt: skip
AHEAD = Job("convert with a copy ahead", _ahead, _strip())
