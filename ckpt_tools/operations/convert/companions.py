"""The files beside the weights of a folder that go with them into another: configuration, tokenizer, licence.

They are told by their names, and copied as they are; of links only those of Hugging Face's cache, with what they lead to. What
stays is said: other links (they may lead anywhere), folders, hidden files, code, other checkpoints. verl keeps them in
`huggingface/` beside the files of the ranks (verl's `utils/checkpoint/fsdp_checkpoint_manager.py`).
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

from ckpt_tools.errors import NotACheckpointError
from ckpt_tools.formats.folders import INDEX_SUFFIX
from ckpt_tools.formats.open import Checkpoint, begins_as_checkpoint
from ckpt_tools.formats.packed.members import Folder
from ckpt_tools.formats.parts.rank_files import CONTAINER as RANK_FILES
from ckpt_tools.io import attributes
from ckpt_tools.io.content import Content, Literal, Piece, Range
from ckpt_tools.io.output import Source, is_address
from ckpt_tools.io.output_folder import Staging
from ckpt_tools.io.sources import Files, is_plain_name
from ckpt_tools.io.writer import write

_HEAD = 4096
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
    """What is beside the weights of a folder."""

    taken: dict[str, Source] = field(default_factory=dict)
    names: list[str] = field(default_factory=list)
    stayed: list[tuple[str, str]] = field(default_factory=list)
    edited: dict[str, bytes] = field(default_factory=dict)

    @property
    def bytes(self) -> int:
        """Of the files that come along."""
        return sum(content.length for content in map(self.content, self.taken))

    def content(self, name: str) -> Content:
        """What a file that comes along holds."""
        source = self.taken[name]
        return Literal(self.edited[name]) if name in self.edited else Range(source, 0, source.size)

    def leave(self, name: str, why: str) -> None:
        """One of them stays after all."""
        self.names.pop([*self.taken].index(name))
        del self.taken[name]
        self.stayed.append((name, why))


def find(checkpoint: Checkpoint, named: str | os.PathLike[str], target: str | os.PathLike[str]) -> Companions:
    """The files beside the weights of a checkpoint that is a folder; none where the output is that very folder."""
    found, files = Companions(), _folder_of(checkpoint, named)
    if files is None or _same_folder(files, target):
        return found
    told = {f"{name}.pt" for name in checkpoint.decoded.beside} | {"config.json"}  # read, and no part of the tree
    own, listed = set(files.members) - told, _beside(files, checkpoint.container)
    own |= {checkpoint.name} if checkpoint.packed is not None else set()
    for name, kind in listed:
        if name in own:
            continue
        why = kind or _why_it_stays(name.rpartition("/")[2]) or _take(name, files, found)
        if why:
            found.stayed.append((name, why))
    return found


def _folder_of(checkpoint: Checkpoint, named: str | os.PathLike[str]) -> Files | None:
    """The folder that a checkpoint is, that its one file was found in, or that it is in within an archive."""
    if checkpoint.packed is not None:
        return checkpoint.packed.folder
    source = checkpoint.decoded.source
    if not isinstance(source, Files) and not is_address(named) and os.path.isdir(named):
        folder = Files(Path(named), Path(named))
        folder.adopt(source)
        return folder
    return source if isinstance(source, Files) else None


def copy(companions: Companions, staging: Staging) -> None:
    """Write the files that come along into the output's folder."""
    for name, source in companions.taken.items():
        with staging.output(name) as output:
            if output.path is not None:
                attributes.narrow(output.fd, (source.path,))
            write([Piece(companions.content(name))], output)


def _same_folder(files: Files, target: str | os.PathLike[str]) -> bool:
    one, other = str(files.folder), os.fspath(target)
    if is_address(one) or is_address(other):
        return one.rstrip("/") == other.rstrip("/")
    return os.path.realpath(one) == os.path.realpath(other)


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
    if row.is_symlink() and not _leads_into_its_cache(row.path, folder):
        return "a link"
    if row.is_dir():
        return "a folder"
    if not row.is_file():
        return "not a regular file"
    return "" if is_plain_name(row.name) else "a name that is not a file's everywhere"


def _leads_into_its_cache(path: str, folder: Path) -> bool:
    """Whether a link is one of Hugging Face's cache:"""
    snapshot = Path(os.path.realpath(folder))
    if snapshot.parent.name != "snapshots":
        return False
    return Path(os.path.realpath(path)).parent == snapshot.parent.parent / "blobs" and os.path.isfile(path)


def _why_it_stays(name: str) -> str:
    """By the name of a regular file; "" for one that may come along."""
    if name.startswith("."):
        return "a hidden file"
    if _CODE.fullmatch(name):
        return "code"
    if name.endswith(INDEX_SUFFIX) or _WEIGHTS.fullmatch(name):
        return "another checkpoint"
    return _OF_PARTS.get(name, "") or ("" if _TAKEN.fullmatch(name) else "neither configuration nor tokenizer")


def _take(name: str, files: Files, found: Companions) -> str:
    """Take a file in; why not, where it cannot be."""
    plain = name.rpartition("/")[2]
    if plain in found.taken:
        return f"{plain} is there already"
    source = files.open(name)
    if begins_as_checkpoint(source.read(0, min(_HEAD, source.size))):
        return "another checkpoint"
    found.taken[plain] = source
    found.names.append(name)
    return ""
