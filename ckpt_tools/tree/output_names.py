"""What the name of an output says about its container: extensions of checkpoints, of other formats, slips in typing."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterable
from pathlib import PurePath
from typing import Literal, TypeAlias, cast

from ckpt_tools.errors import UsageError
from ckpt_tools.io.source import Handed

Format: TypeAlias = Literal["pth", "pth-legacy", "safetensors", "dcp", "gguf"]
_SAFETENSORS = ".safetensors"
EXTENSIONS: dict[Format, str] = {"pth": ".pth", "pth-legacy": ".pth", "safetensors": _SAFETENSORS, "dcp": "", "gguf": ".gguf"}
FORMATS: tuple[Format, ...] = tuple(EXTENSIONS)
FLAT: tuple[Format, ...] = ("safetensors", "gguf")  # which hold one state dict, and text beside it
_OWN = {suffix: format for format, suffix in EXTENSIONS.items() if suffix not in ("", ".pth")}
# What torch.save is given as a name: the first that is near is suggested for a slip.
_TORCH = (
    ".pth", ".pt", ".ckpt", ".bin", ".th", ".tar", ".t7", ".dat", ".model", ".pkl", ".pickle", ".checkpoint", ".weights",
    ".params", ".state", ".mdl", ".net", ".pyt", ".pytorch", ".torch",
)  # fmt: skip
_KINDS = {
    "a llama.cpp model": ".ggml", "an ONNX model": ".onnx .ort", "an HDF5 file": ".h5 .hdf5", "a Keras model": ".keras",
    "NumPy arrays": ".npz .npy", "a TensorFlow Lite model": ".tflite", "a TensorFlow graph": ".pb", "Flax weights": ".msgpack",
    "a joblib pickle": ".joblib", "a Core ML model": ".mlmodel .mlpackage", "a TensorRT engine": ".engine .plan",
    "an ExecuTorch program": ".pte", "an exported program": ".pt2", "a TorchScript program": ".ptl .jit .torchscript",
    "a TorchServe archive": ".mar", "a NeMo archive": ".nemo", "Paddle weights": ".pdparams", "MATLAB arrays": ".mat",
    "a table": ".csv .parquet .arrow", "a part of a distributed checkpoint": ".distcp",
    "an archive": ".zip .gz .tgz .xz .bz2 .zst .7z .rar", "a settings file": ".json .jsonl .yaml .yml .toml",
    "text files": ".txt .md .html .htm .py .pdf", "a picture": ".png .jpg", "a digest file": ".digest",
}  # fmt: skip
_OTHERS = {suffix: kind for kind, suffixes in _KINDS.items() for suffix in suffixes.split()}
_OF_COPIES = (".bak", ".old", ".orig", ".backup", ".new", ".tmp", "~")
_SHORT_FOR_SAFETENSORS = (".st", ".sft", ".safe")


def extension(path: str | os.PathLike[str]) -> str:
    """The extension of a path or an address, in small letters; of a copy that of the original."""
    name = PurePath(path.called if isinstance(path, Handed) else os.fspath(path)).name.lower()
    for suffix in _OF_COPIES:
        name = name.removesuffix(suffix)
    return PurePath(f"_{name}").suffix


def output_format(target: str | os.PathLike[str], format: Format | None) -> Format:
    """The container of an output: as said, else by its extension; a torch-zip by any that means nothing else."""
    check_format(format)
    if format != "dcp" and os.fspath(target).endswith(("/", os.sep)):
        raise UsageError(
            f"{target} is a folder; OUT must be one file.",
            fix="Shards: `shard_size='5GB'`. For torch.distributed.checkpoint: `format='dcp'`.",
        )
    if format is not None:
        return format
    found = extension(target)
    if found in _OWN:
        return _OWN[found]
    if other := _OTHERS.get(found):
        raise UsageError(
            f"{target}: ckpt cannot write {other}.",
            fix="Name OUT .pth or .safetensors; `format='pth'` writes a .pth under any name.",
        )
    if meant := _meant(found):
        raise UsageError(
            f"{target}: {found} is not a checkpoint's extension.", fix=f"Did you mean {meant}? `format` decides too."
        )
    return "pth"


def writes(suffix: str) -> bool:
    """Whether a checkpoint is written under a name with this extension unasked."""
    return suffix.lower() not in _OTHERS and not _meant(suffix.lower())


def names_file(path: str | os.PathLike[str]) -> bool:
    """Whether a path looks like a file's, not a folder's: its extension is a checkpoint's, another format's, or near one."""
    found = extension(path)
    return found in (*_OWN, *_TORCH, *_OTHERS) or bool(_meant(found))


def check_format(format: str | None) -> None:
    """Raise UsageError for an unknown format."""
    if format is not None and format not in FORMATS:
        raise UsageError(f"`format={format!r}` is not one of {', '.join(FORMATS)}.")


def check_one_file(source: str | os.PathLike[str], target: str | os.PathLike[str], format: Format | None) -> None:
    """Make sure that a folder becomes one file only where that was said: by the name, or by the format."""
    if format is None and not names_file(target) and _may_be_folder(source):
        raise UsageError(
            f"Is {target} to be a file or a folder? {source} is a folder.",
            fix=f"One file: name it {target}.safetensors or .pth, or give `format`. Shards: `shard_size='5GB'`. "
            "For torch.distributed.checkpoint: `format='dcp'`.",
        )  # fmt: skip


def _may_be_folder(source: str | os.PathLike[str]) -> bool:
    text = os.fspath(source)
    if "://" in text:
        return text.endswith(".index.json") or not names_file(text)
    return text.endswith(".index.json") or os.path.isdir(text)


def refuse_input(path: str | os.PathLike[str], inputs: Iterable[object]) -> None:
    """Raise where an output is one of the files that it is made from, under whatever name."""
    for given in inputs:
        is_input = False
        with contextlib.suppress(OSError, ValueError, TypeError):  # an address, a callable, a file that is not there
            is_input = os.path.samefile(cast("str", given), path)
        if is_input:
            raise UsageError(f"{path} is an input, which is never replaced here.", fix="Give the output another name.")


def check_document(path: str | os.PathLike[str], what: str, own: str, inputs: Iterable[object]) -> None:
    """Make sure that a page, plan or digest is not called a checkpoint, nor is one of the files that it is about."""
    if extension(path) in (*_OWN, *_TORCH):
        raise UsageError(f"{path} is a checkpoint's name; this writes {what}.", fix=f"For example: {PurePath(path).stem}{own}")
    refuse_input(path, inputs)


def _meant(found: str) -> str:
    """The extension that was meant by one that is near it; empty where none is."""
    if not found or found in (*_OWN, *_TORCH):
        return ""
    import difflib

    if found in _SHORT_FOR_SAFETENSORS or difflib.SequenceMatcher(None, found, _SAFETENSORS).ratio() > _NEAR:
        return _SAFETENSORS
    near = (known for known in _TORCH if set(known) == set(found) and abs(len(known) - len(found)) < 2)
    return next(near, "")


_NEAR = 0.8
