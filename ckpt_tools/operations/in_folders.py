"""The checkpoints in a folder, told by what they are; and every other file, so that nothing is passed over in silence.

A name of a checkpoint is enough to be examined: a `.pth` that is damaged is to be told about. A file of any other name is one
by its first bytes, whatever it is called. Files are not read further, but for the directory of a zip and an index of shards.
"""

from __future__ import annotations

import contextlib
import os
import re
import shlex
import stat
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

from ckpt_tools import limits
from ckpt_tools.errors import CkptError, NotACheckpointError
from ckpt_tools.formats.base import is_zip
from ckpt_tools.formats.checkpoint import Checkpoint
from ckpt_tools.io.parsers import load_json
from ckpt_tools.io.source import Handed, Source, is_address, leads_out
from ckpt_tools.io.sources import Files
from ckpt_tools.parts.families import layout_of
from ckpt_tools.parts.names import COMMON, DCP_METADATA, INDEX_SUFFIX, MP_RANK, describes_items, shard_name
from ckpt_tools.text import printable
from ckpt_tools.tree.findings import Finding

_HEAD = 512
_ALWAYS = frozenset((".pth", ".pt", ".pt2", ".ckpt", ".bin", ".safetensors", ".th", ".t7", ".gguf"))
_TARRED = (".pth.tar", ".pt.tar", ".ckpt.tar")
# What is packed is not inflated to see what it is: SageMaker's name, NeMo's, and checkpoints' own with one more extension.
_PACKED = re.compile(
    r"model\.(?:tar\.gz|tgz)|.+\.nemo|.+\.(?:pth|pt|ckpt|bin|safetensors|th)\.(?:gz|bz2|xz|zst)", re.IGNORECASE
)
# Names that tokenizers and data sets have too: examined where the bytes are a checkpoint's, or were never written.
_MAYBE = frozenset(
    (".tar", ".model", ".pkl", ".pickle", ".dat", ".zip", ".jit", ".ptl", ".npz", ".npy", ".distcp", ".msgpack", ".onnx")
)
_NO_CONTENT = re.compile(rb"\0+\Z|version https://git-lfs|\s*<(?:!doctype|html)|\Z", re.IGNORECASE)
_TORCH_RECORDS = ("/data.pkl", "/constants.pkl", "/archive_format", "/byteorder", ".data/serialization_id", ".npy")
_TORCH_TAR = frozenset((b"sys_info", b"pickle", b"storages", b"tensors"))
_SAFETENSORS_HEADER = re.compile(rb'\{\s*["}]')
_FILES = frozenset(("torch-zip", "torch-legacy", "torch-tar", "pickle", "safetensors"))  # which shards are in
_DISTRIBUTED = ".distcp"
_SKIPPED = frozenset((".git",))  # which may hold every file a second time


@dataclass(slots=True)
class FolderContent:
    """What is below a folder."""

    checkpoints: list[Path] = field(default_factory=list)
    others: list[Path] = field(default_factory=list)
    unlisted: list[Path] = field(default_factory=list)


def find_checkpoints(top: Path) -> FolderContent:
    """Every checkpoint below a folder, the folder itself among them where it is one, and every other file."""
    found, linked = FolderContent(), set()
    for folder, folders, names in os.walk(top, onerror=lambda error: found.unlisted.append(Path(error.filename))):
        links = (Path(folder, name) for name in folders if os.path.islink(os.path.join(folder, name)))
        found.others += [link for link in links if leads_out(link, top)]
        folders[:] = sorted(name for name in folders if name not in _SKIPPED)
        ranks = [name for name in folders if re.fullmatch(MP_RANK, name)]
        wholes, parts = _wholes(Path(folder), sorted([*names, *ranks]))
        if Path(folder) in wholes:
            folders[:] = [name for name in folders if name not in ranks]
        found.checkpoints += wholes
        for path in (Path(folder, name) for name in names if name not in parts):
            if os.path.islink(path):
                linked.add(_led_to(path))
            (found.checkpoints if _is_checkpoint(path) else found.others).append(path)
        linked |= {_led_to(Path(folder, name)) for name in parts if os.path.islink(os.path.join(folder, name))}
    found.checkpoints = sorted(path for path in found.checkpoints if os.path.islink(path) or str(path.absolute()) not in linked)
    found.others.sort()
    return found


def _led_to(link: Path) -> str:
    try:
        return os.path.realpath(link)
    except OSError:  # another user's `/proc/PID/cwd`, which may not be followed
        return ""


def _wholes(folder: Path, names: Sequence[str]) -> tuple[list[Path], set[str]]:
    """What in a folder is a checkpoint of several files, by the folder or an index; and the names of those files."""
    indexes = {
        name: files for name in names if name.endswith(INDEX_SUFFIX) and (files := indexed_files(folder / name)) is not None
    }
    try:
        layout = layout_of(folder, list(names))
    except NotACheckpointError:  # several: each index by itself, the rest by what it is
        layout = None
    parts = {name for files in indexes.values() for name in files} | set(indexes)
    if any(name.startswith("adapter_model.") for name in names):  # read with the tensors of a PEFT adapter
        parts.add("adapter_config.json")
    family = layout.family if layout is not None else ""
    several = (family == "sharded" and not indexes) or family == "training"  # its files are checkpoints of their own
    if layout is None or several or (family == "items" and not _describes_items(folder / layout.names[0])):
        return [folder / name for name in indexes], parts
    distributed = DCP_METADATA in layout.names  # whose files no index names
    own = {name for name in names if distributed and (name.endswith(".distcp") or name == COMMON)}
    return [folder], parts | own | set(layout.names)


def _describes_items(path: Path) -> bool:
    """Whether a metadata.pkl is that of torch_checkpointing; many things are called so."""
    try:
        with path.open("rb") as file:
            return describes_items(file.read(_HEAD))
    except OSError:  # told about when it is opened
        return True


def indexed_files(path: Path) -> list[str] | None:
    """The files that an index of shards names; None for any other JSON."""
    with contextlib.suppress(OSError, ValueError, CkptError):
        if path.is_file() and path.stat().st_size <= limits.HEADER.value:
            content = load_json(path.read_bytes())
            if isinstance(content, dict) and isinstance(weight_map := content.get("weight_map"), dict):
                return list(dict.fromkeys(name for name in weight_map.values() if isinstance(name, str)))
    return None


def _is_checkpoint(path: Path) -> bool:
    suffix, name = path.suffix.lower(), path.name.lower()
    try:
        if not stat.S_ISREG(path.stat().st_mode):  # a socket, a pipe
            return False
    except PermissionError:  # told about when it is opened
        return True
    except OSError:  # a dangling link is told about where a checkpoint is missing
        return suffix in _ALWAYS | _MAYBE
    if suffix in _ALWAYS or name.endswith(_TARRED) or _PACKED.fullmatch(name):
        return True
    try:
        with path.open("rb") as file:
            head = file.read(_HEAD)
    except OSError:  # told about when it is opened
        return True
    begins = _is_torch_zip(path) if is_zip(head) else _begins(head)  # whatever it is called
    return begins or (suffix in _MAYBE and _NO_CONTENT.match(head) is not None)


def _begins(head: bytes) -> bool:
    """Whether a file that starts with these bytes, which are not a zip's, is a checkpoint."""
    if 2 <= int.from_bytes(head[:8], "little") <= limits.HEADER.value and _SAFETENSORS_HEADER.match(head, 8) is not None:
        return True
    if head[257:262] == b"ustar" and head[:100].rstrip(b"\0").removeprefix(b"./").rstrip(b"/") in _TORCH_TAR:
        return True
    from ckpt_tools.formats import numpy_files, plain_pickle
    from ckpt_tools.formats.torch_legacy import is_stream

    return is_stream(head) or plain_pickle.sniff(head) or numpy_files.sniff(head)


def _is_torch_zip(path: Path) -> bool:
    """Whether a zip has the records of a checkpoint, or of an archive of some; one that cannot be read is told about."""
    from ckpt_tools.formats.zip_directory import read_directory

    try:
        with contextlib.closing(Source(path)) as source:
            names = [record.name for record in read_directory(source).records]
    except CkptError:
        return True
    suffixes = tuple(_ALWAYS)
    return any(name.endswith(_TORCH_RECORDS) or name.lower().endswith(suffixes) for name in names)


# --- one file of several, named alone


def alone(checkpoint: Checkpoint) -> Finding | None:
    """What a file says by its name that is one of several, and how all of them are named; None for any other."""
    path, said = checkpoint.path, shard_name(checkpoint.path.name)
    if checkpoint.container not in _FILES or isinstance(path, Handed) or type(checkpoint.source) is Files:
        return None
    if path.suffix == _DISTRIBUTED:
        found = "one rank's part of a distributed checkpoint, without names"
        return Finding("alone", "warning", [], found, "the folder that it is from", whole_folder(path))
    if said is None or said.count < 2:
        return None
    found, expected = f"shard {said.number} of {said.count}: not all of the model", "all of them, by their folder or index"
    if is_address(str(path)):
        return Finding("alone", "info", [], found, expected, "Name the folder, or the index.")
    with contextlib.suppress(OSError):
        every = filter(None, map(shard_name, os.listdir(path.parent)))
        wanted = (said.stem, said.count, said.suffix)
        if len({one.number for one in every if (one.stem, one.count, one.suffix) == wanted}) == said.count:
            index = path.parent / f"{said.stem}{said.suffix}{INDEX_SUFFIX}"
            whole = shlex.quote(str(index if index.exists() else path.parent))
            fix = printable(f"All {said.count} are here; they are one: ckpt inspect {whole}")
            return Finding("alone", "info", [], found, expected, fix)
    fix = "Others are not beside it: get them and the index, and name their folder."
    return Finding("alone", "warning", [], found, expected, fix)


def whole_folder(path: Path) -> str:
    """What to do with one file of a distributed checkpoint."""
    if (path.parent / DCP_METADATA).exists():
        return printable(f"Its folder is the whole: ckpt convert {shlex.quote(str(path.parent))} OUT.pth")
    return "Get the other files of its folder, .metadata among them, and name the folder."
