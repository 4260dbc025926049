"""The files beside the weights of a folder that go with them into another: configuration and tokenizer, a training's state."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

from ckpt_tools.errors import NotACheckpointError
from ckpt_tools.formats.checkpoint import Checkpoint
from ckpt_tools.formats.single import container_of
from ckpt_tools.io import temporaries
from ckpt_tools.io.content import Content, Literal, Piece, Range
from ckpt_tools.io.output import Staging
from ckpt_tools.io.source import Source, is_address
from ckpt_tools.io.sources import Files, is_plain_name
from ckpt_tools.io.writer import write
from ckpt_tools.operations.convert.report import Converted
from ckpt_tools.parts.names import INDEX_SUFFIX
from ckpt_tools.parts.packed import Folder
from ckpt_tools.parts.rank_files import CONTAINER as RANK_FILES
from ckpt_tools.parts.training import is_state, is_training

_HEAD = 4096
_DANGEROUS = ("dangerous", "unexamined")
_TAKEN = re.compile(
    r".+\.(?:json|txt|model|jinja|tiktoken|bpe|spm|vocab|md|ya?ml)|(?:LICEN[CS]E|NOTICE|USE_POLICY)(?:\..*)?", re.IGNORECASE
)
_CODE = re.compile(r".+\.(?:pyc?|pyd|so|dll|dylib|sh|ipynb)", re.IGNORECASE)
_WEIGHTS = re.compile(
    r".+\.(?:pth|pt|pt2|bin|ckpt|th|tar|safetensors|distcp|npz|npy|h5|msgpack|onnx|gguf|ggml|pkl|nemo)", re.IGNORECASE
)
_OF_PARTS = {"fsdp_config.json": "about the parts"}  # verl's: FSDP's version and the world size, which are no longer true


@dataclass(slots=True)
class Companions:
    taken: dict[str, Source] = field(default_factory=dict)
    names: list[str] = field(default_factory=list)
    stayed: list[tuple[str, str]] = field(default_factory=list)
    edited: dict[str, bytes] = field(default_factory=dict)

    @property
    def bytes(self) -> int:
        return sum(content.length for content in map(self.content, self.taken))

    def content(self, name: str) -> Content:
        source = self.taken[name]
        return Literal(self.edited[name]) if name in self.edited else Range(source, 0, source.size)


def find(checkpoint: Checkpoint, named: str | os.PathLike[str], target: str | os.PathLike[str], *, changed: bool) -> Companions:
    """The files beside the weights of a checkpoint that is a folder; none where the output is that very folder. A training's
    state is among them unless the tensors `changed`."""
    found, files = Companions(), _folder_of(checkpoint, named)
    if files is None or _is_one_place(str(files.folder), os.fspath(target)):
        return found
    told = {f"{name}.pt" for name in checkpoint.beside} | {"config.json"}  # read, and no part of the tree
    own, listed = set(files.members) - told, _beside(files, checkpoint.container)
    own |= {checkpoint.name} if checkpoint.packed is not None else set()
    own |= {source.folder.name} if isinstance(source := checkpoint.source, Files) and source is not files else set()
    of_training = is_training(files.folder)
    for name, kind in listed:
        if name in own:
            continue
        state = of_training and is_state(name)
        plain = name.rpartition("/")[2]
        why = kind or (_why_state_stays(files.open(name), changed=changed) if state else _why_it_stays(plain))
        why = why or (f"{plain} is there already" if plain in found.taken else "")
        if not (why or state):
            member = files.open(name)
            why = "another checkpoint" if container_of(member.read(0, min(_HEAD, member.size))) else ""
        if why:
            found.stayed.append((name, why))
            continue
        found.taken[plain] = files.open(name)
        found.names.append(name)
    return found


def _is_one_place(one: str, two: str) -> bool:
    if is_address(one) or is_address(two):
        return one.rstrip("/") == two.rstrip("/")
    return os.path.realpath(one) == os.path.realpath(two)


def _folder_of(checkpoint: Checkpoint, named: str | os.PathLike[str]) -> Files | None:
    """The folder that a checkpoint is, that its one file was found in, or that it is in within an archive."""
    if checkpoint.packed is not None:
        return checkpoint.packed.folder
    source = checkpoint.source
    if is_address(named) or not os.path.isdir(named):
        return source if isinstance(source, Files) else None
    if not isinstance(source, Files):
        folder = Files(source.path.parent, source.path.parent)
        folder.adopt(source)
        return folder
    around = source.folder != source.path and is_training(source.path)  # a step's, whose model is a folder in it
    return Files(source.path, source.path) if around else source


def copy(companions: Companions, staging: Staging) -> None:
    """Write the files that come along into the output's folder."""
    for name, source in companions.taken.items():
        with staging.output(name) as output:
            temporaries.narrow(output.fd, (source.path,))
            write([Piece(companions.content(name))], output)


def _beside(files: Files, container: str) -> list[tuple[str, str]]:
    """Every name in the folder, and why it stays whatever it is called: "" for regular files."""
    if is_address(str(files.folder)):
        return [(name, "") for name in sorted(set(files.names())) if is_plain_name(name)]
    if isinstance(files, Folder):
        return [(name, "" if name in files.files else "a folder") for name in sorted(files.names())]
    inner = "huggingface" if container == RANK_FILES else ""
    found = []
    for name, kind in _listed(files.folder):
        if name == inner and kind == "a folder":
            found += [(f"{name}/{other}", other_kind) for other, other_kind in _listed(files.folder / name)]
        else:
            found.append((name, kind))
    return sorted(found, key=lambda row: ("/" in row[0], row[0]))


def _listed(folder: Path) -> Iterator[tuple[str, str]]:
    try:
        with os.scandir(folder) as rows:
            yield from ((row.name, _kind(row, folder)) for row in rows)
    except OSError as error:
        raise NotACheckpointError(f"{folder} cannot be read.", why=f"{error.strerror or error}.") from None


def _kind(row: os.DirEntry[str], folder: Path) -> str:
    if row.is_symlink():  # one of Hugging Face's cache leads to its bytes
        snapshot, blob = Path(os.path.realpath(folder)), Path(os.path.realpath(row.path))
        blobs = snapshot.parent.parent / "blobs"
        if snapshot.parent.name != "snapshots" or blob.parent != blobs or not os.path.isfile(row.path):
            return "a link"
    if row.is_dir():
        return "a folder"
    if not row.is_file():
        return "not a regular file"
    return "" if is_plain_name(row.name) else "a name that is not a file's everywhere"


def _why_it_stays(name: str) -> str:
    """By the name of a regular file; "" for one that may come along."""
    if _CODE.fullmatch(name):
        return "code"
    if name.endswith(INDEX_SUFFIX) or _WEIGHTS.fullmatch(name):
        return "another checkpoint"
    return _OF_PARTS.get(name, "") or ("" if _TAKEN.fullmatch(name) else "neither configuration nor tokenizer")


def _why_state_stays(source: Source, *, changed: bool) -> str:
    """Of a file of a training's state, which is of these very tensors; "" for one that may come along."""
    if changed:
        return "about the tensors as they were"
    from ckpt_tools.operations.safety import examine

    return "ckpt scan calls it dangerous, or could not examine it" if examine(source).verdict in _DANGEROUS else ""


def say_plain(found: Companions, report: Converted) -> None:
    """What comes along no longer says that the weights are quantised."""
    from ckpt_tools.edit.quantised.config import CONFIG, OF_QUANTISED, plain_config

    for name in OF_QUANTISED & found.taken.keys():
        found.names.pop([*found.taken].index(name))
        del found.taken[name]
        found.stayed.append((name, "about the quantised weights"))
    if CONFIG in found.taken and (edited := plain_config(found.taken[CONFIG])) is not None:
        found.edited[CONFIG] = edited
        report.note("config-quantization", "config.json is copied without its quantization_config, which is no longer true.")
