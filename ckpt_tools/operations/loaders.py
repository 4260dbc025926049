"""Which call loads a checkpoint, what `torch.load(weights_only=True)` of 2.13 does with it, and why it does not load here.

Told from the container, the name of the file, the globals and the opcodes: nothing is loaded, nothing that a file names is
imported. Whether a class could be imported is asked of Python's finders, and for the first part of its module's name only.
"""

from __future__ import annotations

import contextlib
import os
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from importlib.util import find_spec
from typing import Literal

from ckpt_tools.formats.base import PART_CONTAINERS, PROGRAMS
from ckpt_tools.formats.checkpoint import Checkpoint
from ckpt_tools.pickling.arrays_behind import WRAPPER
from ckpt_tools.pickling.torch_objects import is_device
from ckpt_tools.pickling.weights_only import ALLOWED
from ckpt_tools.text import listed
from ckpt_tools.tree.findings import Finding, mending
from ckpt_tools.tree.nodes import Entry, Global

TORCH_LOAD = "torch.load"
_SAFETENSORS = "safetensors.torch.load_file"
_JOBLIB = "joblib.load"
_DCP = "torch.distributed.checkpoint.load"
_RANK_FILES = f"{TORCH_LOAD}, one rank's part each"
_DEEPSPEED = "DeepSpeed's load_checkpoint, on as many processes"
_ITS_LIBRARY = "the library that wrote it"
_UNPACKED = "once it is unpacked"
# Calls of files that are not for torch.load.
_ELSEWHERE = (_DCP, _SAFETENSORS, _RANK_FILES, _DEEPSPEED, "gguf.", "onnx.", "flax.", "h5py.")
_PARTS = "it is a file for each rank, each with that rank's parts of the tensors"
_CUT_PART = "it is one rank's part of a distributed checkpoint: torch.load finds no archive in it, or the last one only"
# What loads each container, and why torch.load with weights_only does not give what it holds, whatever its pickles say.
_LOADED: dict[str, tuple[str, str]] = {
    **dict.fromkeys(("torch-zip", "torch-legacy", "sharded"), (TORCH_LOAD, "")),
    "torchscript": ("torch.jit.load", "it is a TorchScript program, which torch.jit.load loads"),
    "torch-export": ("torch.export.load", "it is an exported program, which torch.export.load loads"),
    "pickle": ("pickle.load", "it is a pickle that torch.save did not write"),
    "torch-tar": (TORCH_LOAD, "it is in the tar format, which weights_only does not take"),
    "zip-bundle": (_ITS_LIBRARY, "it is an archive around checkpoints"),
    **dict.fromkeys(("npz", "npy"), ("numpy.load", "it is a NumPy file")),
    **dict.fromkeys(("keras", "hdf5"), ("h5py.File", "it is an HDF5 file")),
    "safetensors": (_SAFETENSORS, ""),
    "onnx": ("onnx.load", "it is an ONNX model"),
    "flax": ("flax.serialization.msgpack_restore", "it is a file of Flax's"),
    "gguf": ("gguf.GGUFReader", "it is a GGUF file, which llama.cpp loads"),
    "dcp": (_DCP, f"it is a folder of torch.distributed.checkpoint, which {_DCP} loads"),
    "dcp-part": (f"{_DCP}, from its folder with .metadata", _CUT_PART),
    **dict.fromkeys(PART_CONTAINERS, (_RANK_FILES, _PARTS)),
    "deepspeed": (_DEEPSPEED, _PARTS),
}
_UNKNOWN = (_ITS_LIBRARY, "torch.load does not read its format")
_TORCH_NAMES = frozenset((".pth", ".pt", ".bin", ".ckpt", ".th"))  # that people give to torch.load


@dataclass(slots=True, unsafe_hash=True)
class Loads:
    """How a checkpoint is loaded."""

    call: str
    refused: list[str]
    reasons: list[str]
    misnamed: str = ""

    @property
    def weights_only(self) -> bool:
        """Whether `torch.load(path, weights_only=True)` gives what the file holds."""
        return not self.refused and not self.reasons

    @property
    def is_refused(self) -> bool:
        """Whether weights_only refuses what is in the file; a name or a folder that is not for torch.load is something else."""
        elsewhere = self.call.startswith(_ELSEWHERE) or self.call.endswith(_UNPACKED)
        for_torch_load = not self.misnamed and not elsewhere
        return bool(self.refused) or (for_torch_load and bool(self.reasons))


def how_it_loads(checkpoint: Checkpoint, elsewhere: Sequence[str] = ()) -> Loads:
    """What loads a checkpoint, and what of it weights_only refuses; `elsewhere` are globals of any pickle in the file."""
    container, misnamed = checkpoint.container, misnaming(checkpoint)
    call, refused = _call(checkpoint), checkpoint.refused_globals
    own = _LOADED.get(container, _UNKNOWN)[1]
    if checkpoint.packed is not None:
        reason = f"it is in a file of {checkpoint.packed.kind}, which has to be unpacked first"
        return Loads(call if call == _JOBLIB else f"{call}, {_UNPACKED}", refused, [reason])
    if container in PROGRAMS:  # torch.load looks at none of their globals
        return Loads(call, [], [own], misnamed)
    reasons: list[str] = []
    if not refused:
        reasons += [f"it is {misnamed}"] if misnamed else []
        reasons += [own] if own else [f"it uses {reason}" for reason in checkpoint.unusual]
        reasons += [f"another pickle in the file names {name}" for name in elsewhere]
        if container == "safetensors" and checkpoint.path.suffix != ".safetensors" and not misnamed:
            reasons.append("it is a safetensors file, which torch.load takes under a name that ends in .safetensors only")
    return Loads(call, refused, reasons, misnamed)


def _call(checkpoint: Checkpoint) -> str:
    if checkpoint.container == "pickle" and any(name.name == WRAPPER for name in checkpoint.globals):
        return _JOBLIB
    if checkpoint.container != "sharded":
        return _LOADED.get(checkpoint.container, _UNKNOWN)[0]
    plain = (tensor.node.storage.device for tensor in checkpoint.tensors if type(tensor.node) is Entry)
    return f"{TORCH_LOAD if any(plain) else _SAFETENSORS}, shard by shard"


def misnaming(checkpoint: Checkpoint) -> str:
    """What loaders that go by the name of this file will say; "" where name and content agree."""
    container, suffix = checkpoint.container, checkpoint.path.suffix
    if container in ("dcp", "sharded", *PART_CONTAINERS) or checkpoint.packed is not None:
        return ""
    if suffix == ".safetensors" and container != "safetensors":
        return f"a {container} by content, but named .safetensors: safetensors refuses it, and so does torch.load of 2.13"
    if container == "safetensors" and suffix in _TORCH_NAMES:
        return f"a safetensors file by content, but named {suffix}: torch.load refuses it"
    return ""


# --- what stands in the way of loading on this machine


def obstacles(checkpoint: Checkpoint, device: str | None = None) -> Iterator[Finding]:
    """What stands in the way of loading on this machine, in this Python; with `device`, on a machine that has this one."""
    yield from _devices(checkpoint, device) if device is not None else ()
    if checkpoint.container in PROGRAMS:
        return  # torch's own loaders import none of the classes that a program names
    yield from _names(str(checkpoint.path), checkpoint.globals, how_it_loads(checkpoint).call)


def _devices(checkpoint: Checkpoint, device: str) -> Iterator[Finding]:
    """Storages of devices that a machine lacks which has this one and those before it."""
    found = dict.fromkeys(tensor.node.storage.device for tensor in checkpoint.tensors if hasattr(tensor.node, "storage"))
    own, _, last = device.partition(":")
    beyond = []
    for tag in found:
        kind, _, number = (tag or "cpu").partition(":")
        if tag not in (None, "cpu", "meta") and not (is_device(tag) and kind == own and int(number or 0) <= int(last or 0)):
            beyond.append(tag)
    if beyond:
        fix = mending("convert", str(checkpoint.path), "--map-location cpu")
        expected = "cpu, or map_location='cpu' in torch.load"
        text = f"tensors are on {listed(beyond)}: a machine with {device} lacks them"
        yield Finding("no-such-device", "problem", [], text, expected, fix)


def _names(path: str, names: Sequence[Global], call: str) -> Iterator[Finding]:
    """What names say: classes whose package is not here or that a script defined, another NumPy, paths of other systems."""
    missing = [name for name in names if name not in ALLOWED and not _importable(name.module)]
    fails = "torch.load(weights_only=False)" if call.startswith(TORCH_LOAD + ",") or call == TORCH_LOAD else "unpickling it"
    package = missing[0].module.partition(".")[0] if missing else ""
    numpy = _numpy() if any(name.module.startswith(("numpy._core", "numpy.core")) for name in names) else None
    major, minor = numpy or (0, 0)
    has_stubs = (major, minor) >= _NUMPY_WITH_STUBS
    new = [name for name in names if name.module.startswith("numpy._core") and not (has_stubs and name.module in _NUMPY_STUBS)]
    old = [name for name in names if name.module.startswith("numpy.core")]
    other = "PosixPath" if os.name == "nt" else "WindowsPath"
    foreign = [name for name in names if name.module.partition(".")[0] == "pathlib" and name.name == other]
    local = [name for name in names if name.module == "pathlib._local"] if sys.version_info < (3, 13) else []
    scripts = [name for name in names if name.module == "__main__"]
    rows: tuple[tuple[str, Sequence[Global], str, str], ...] = (
        ("not-importable", missing, f"not importable here, so {fails} fails", f"the package {package!r}"),
        (
            "script-class",
            scripts,
            "defined in the script that saved the file; no other program has it",
            "data, or a class in a module",
        ),
        ("numpy-2", new if major == 1 else (), f"written with NumPy 2, and NumPy {major}.{minor} is installed", "NumPy 2"),
        ("numpy-1", old if major > 1 else (), "written with NumPy 1; NumPy 2 finds it under its old name", ""),
        ("foreign-path", foreign, "a path of another system", "text"),
        ("newer-path", local, "written by Python 3.13", "text"),
    )
    for code, found, said, expected in rows:
        if found:
            severity: Literal["info", "warning"] = "warning" if expected else "info"
            fix = mending("convert", path, "--objects plain")
            yield Finding(code, severity, [], f"{listed(found)}: {said}", expected, fix)


_NUMPY_WITH_STUBS = (1, 26)  # which reads most of what NumPy 2 writes
_NUMPY_STUBS = frozenset(
    f"numpy._core.{name}" for name in ("_dtype", "_dtype_ctypes", "_internal", "_multiarray_umath", "multiarray", "umath")
)


def _importable(module: str) -> bool:
    """Whether a module's top-level package is there. Runs nothing of it."""
    package = module.partition(".")[0]
    with contextlib.suppress(ImportError, ValueError):
        is_known = package in sys.modules or package in sys.stdlib_module_names
        return is_known or (package.isidentifier() and find_spec(package) is not None)
    return False


def _numpy() -> tuple[int, int] | None:
    """The version of NumPy that is installed, major and minor, from its metadata."""
    from importlib.metadata import PackageNotFoundError, version

    try:
        major, minor, *_ = version("numpy").split(".")
        return int(major), int(minor)
    except (PackageNotFoundError, ValueError):
        return None
