"""Folders of many files: parts of ranks, DeepSpeed, Megatron, distributed checkpoints. One or two files of them are mutated."""

from __future__ import annotations

import contextlib
import tempfile
from collections.abc import Callable
from functools import lru_cache
from pathlib import Path
from random import Random

import ckpt_tools
from tests.formats import test_megatron as megatron
from tests.fuzz import raw, zips
from tests.fuzz.raw import some_bytes, text
from tests.support import containers

Files = dict[str, bytes]
_FIXTURES = Path(__file__).parents[2] / "fixtures" / "deepspeed"


@lru_cache(maxsize=1)
def samples() -> list[Files]:
    """Good folders, each as its files' bytes by path."""
    found = [_files(path) for path in sorted(_FIXTURES.iterdir())]
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        for kind in ("rank-files", "dcp", "dcp-safetensors"):
            found.append(_files(containers.MAKERS[kind](folder)))
        megatron.save(folder / "megatron", 2, 2)
        found.append(_files(folder / "megatron"))
    return found


def folder(rng: Random, place: Path) -> Callable[[], object]:
    """A folder with something else in it, looked at, checked or merged."""
    files = dict(rng.choice(samples()))
    for _ in range(rng.choice((1, 1, 2))):
        rng.choice(_CHANGES)(rng, files)
    top = place / "folder"
    for name, data in files.items():
        path = top / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(data)
    one = top / rng.choice(list(files)) if files and rng.random() < 0.2 else top
    return rng.choice(
        (
            lambda: ckpt_tools.inspect(one),
            lambda: ckpt_tools.check(one, values=True),
            lambda: ckpt_tools.convert(one, place / "out.pth", objects="plain"),
        )
    )


def _files(top: Path) -> Files:
    return {str(path.relative_to(top)): path.read_bytes() for path in sorted(top.rglob("*")) if path.is_file()}


def _content(rng: Random, files: Files) -> None:
    name, other = rng.choice(list(files)), rng.choice(list(files.values()))
    data = files[name]
    if data.startswith(b"PK") and rng.random() < 0.8:
        with contextlib.suppress(Exception):  # it was mutated before, and is no zip any more
            data = zips.mutate(rng, data, other if other.startswith(b"PK") else data)
    files[name] = raw.mutate(rng, data, other) if data is files[name] else data


def _lost(rng: Random, files: Files) -> None:
    if len(files) > 1:
        del files[rng.choice(list(files))]


def _renamed(rng: Random, files: Files) -> None:
    name = rng.choice(list(files))
    digits = [at for at, character in enumerate(name) if character.isdigit()]
    at = rng.choice(digits) if digits else 0
    files[name[:at] + rng.choice(("0", "1", "7", "99999", "x", "-1")) + name[at + 1 :]] = files.pop(name)


def _again(rng: Random, files: Files) -> None:
    files[rng.choice(list(files))] = rng.choice(list(files.values()))


def _more(rng: Random, files: Files) -> None:
    content = rng.choice((some_bytes(rng), text(rng).encode("utf-8", "replace"), rng.choice(list(files.values()))))
    files[rng.choice(_NAMES)] = content


_NAMES = (
    "latest", "x.pt", "model.safetensors.index.json", ".metadata", "metadata.json", "mp_rank_07/model_optim_rng.pt",
)  # fmt: skip
_CHANGES = (_content, _content, _content, _lost, _renamed, _again, _more)
