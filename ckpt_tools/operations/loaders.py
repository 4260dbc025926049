"""Which call loads a checkpoint, what `torch.load(weights_only=True)` of 2.13 does with it, and why it does not load here.

Told from the container, the name of the file, the globals and the opcodes: nothing is loaded, nothing that a file names is
imported. Whether a class could be imported is asked of Python's finders, and for the first part of its module's name only.
"""

from __future__ import annotations

import glob
import os
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from importlib.util import find_spec
from typing import Literal

from ckpt_tools.formats.base import PART_CONTAINERS, PROGRAMS
from ckpt_tools.formats.checkpoint import Checkpoint
from ckpt_tools.pickling.arrays_behind import WRAPPER
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
_UNPACKED = "once it is unpacked"
# Calls of files that are not for torch.load.
_ELSEWHERE = (_DCP, _SAFETENSORS, _RANK_FILES, _DEEPSPEED, "gguf.", "onnx.", "flax.", "h5py.")
_CALLS = {
    "torchscript": "torch.jit.load", "torch-export": "torch.export.load", "pickle": "pickle.load", "npz": "numpy.load",
    "npy": "numpy.load", "safetensors": _SAFETENSORS, "dcp": _DCP, "dcp-part": f"{_DCP}, from its folder with .metadata",
    "zip-bundle": "the library that wrote it", **dict.fromkeys(PART_CONTAINERS, _RANK_FILES),
    "deepspeed": _DEEPSPEED, "gguf": "gguf.GGUFReader", "onnx": "onnx.load", "keras": "h5py.File", "hdf5": "h5py.File",
    "flax": "flax.serialization.msgpack_restore",
}  # fmt: skip
# Why torch.load with weights_only does not give what the file holds, whatever its pickles say.
_REFUSED = {container: f"it is {what}, which {_CALLS[container]} loads" for container, (_, what) in PROGRAMS.items()} | {
    "pickle": "it is a pickle that torch.save did not write",
    "zip-bundle": "it is an archive around checkpoints",
    **dict.fromkeys(("npz", "npy"), "it is a file of NumPy's"),
    "onnx": "it is an ONNX model",
    **dict.fromkeys(("keras", "hdf5"), "it is an HDF5 file"),
    "flax": "it is a file of Flax's",
    "gguf": "it is a GGUF file, which llama.cpp loads",
    "torch-tar": "it is in the tar format, which weights_only does not take",
    "dcp": f"it is a folder of torch.distributed.checkpoint, which {_DCP} loads",
    **dict.fromkeys(PART_CONTAINERS, "it is a file for each rank, each with that rank's parts of the tensors"),
    "dcp-part": "it is one rank's part of a distributed checkpoint: torch.load finds no archive in it, or the last one only",
}
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
    if checkpoint.packed is not None:
        reason = f"it is in a file of {checkpoint.packed.kind}, which has to be unpacked first"
        call = _call(checkpoint)
        return Loads(call if call == _JOBLIB else f"{call}, {_UNPACKED}", checkpoint.refused_globals, [reason])
    if container in PROGRAMS:  # torch.load looks at none of their globals
        return Loads(_call(checkpoint), [], [_REFUSED[container]], misnamed)
    refused = checkpoint.refused_globals
    reasons: list[str] = []
    if not refused:
        own = [_REFUSED[container]] if container in _REFUSED else [f"it uses {reason}" for reason in checkpoint.unusual]
        reasons = own + [f"another pickle in the file names {name}" for name in elsewhere]
    if misnamed and not refused:
        reasons.insert(0, f"it is {misnamed}")
    elif container == "safetensors" and checkpoint.path.suffix != ".safetensors":
        reasons.append("it is a safetensors file, which torch.load takes under a name that ends in .safetensors only")
    return Loads(_call(checkpoint), refused, reasons, misnamed)


def _call(checkpoint: Checkpoint) -> str:
    if checkpoint.container == "pickle" and any(name.name == WRAPPER for name in checkpoint.globals):
        return _JOBLIB
    if checkpoint.container != "sharded":
        return _CALLS.get(checkpoint.container, TORCH_LOAD)
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


_OBJECTS = "--objects plain"
_LONGEST_INDEX = 16  # more digits than any machine has devices


def obstacles(checkpoint: Checkpoint, device: str | None = None) -> Iterator[Finding]:
    """What stands in the way of loading on this machine, in this Python; with `device`, on a machine that has this one."""
    path, names = str(checkpoint.path), checkpoint.globals
    yield from _devices(checkpoint, device)
    if checkpoint.container in PROGRAMS:
        return  # torch's own loaders import none of the classes that a program names
    yield from _classes(path, [name for name in names if name not in ALLOWED], how_it_loads(checkpoint).call)
    yield from _numpy(path, names)
    yield from _paths(path, names)


def is_device(text: str) -> bool:
    """Whether this is a device that `--device` takes: a kind, or a kind and a number."""
    return _parsed(text) is not None


def _parsed(tag: str) -> tuple[str, int] | None:
    """A device's kind and number; None for other text."""
    kind, colon, index = tag.partition(":")
    if not kind.isidentifier() or (colon and not (index.isdecimal() and len(index) < _LONGEST_INDEX)):
        return None
    return kind, int(index or 0)


def _devices(checkpoint: Checkpoint, device: str | None) -> Iterator[Finding]:
    """Storages of devices that are not there: a problem where it was said which is, else a note about this machine."""
    found = dict.fromkeys(tensor.node.storage.device for tensor in checkpoint.tensors if hasattr(tensor.node, "storage"))
    tags = {tag: _parsed(tag) for tag in found if tag not in (None, "cpu", "meta")}
    if device is not None:
        kind, last = _parsed(device) or (device, 0)
        here = f"a machine with {device} lacks them"
    else:
        tags = {tag: parsed for tag, parsed in tags.items() if tag.partition(":")[0] == "cuda"}
        present = _cuda_devices() if tags else 0
        kind, last = "cuda", present - 1
        here = f"this machine has {present or 'no'} cuda device{'s' if present > 1 else ''}"
    beyond = [tag for tag, parsed in tags.items() if parsed is None or parsed[0] != kind or parsed[1] > last]
    if beyond:
        fix = mending("convert", str(checkpoint.path), "--map-location cpu")
        severity: Literal["info", "problem"] = "info" if device is None else "problem"
        expected = "cpu, or map_location='cpu' in torch.load"
        yield Finding("no-such-device", severity, [], f"tensors are on {listed(beyond)}: {here}", expected, fix)


def _cuda_devices() -> int:
    """How many cuda devices torch sees; it is asked only where a driver is."""
    windows = os.path.join(os.environ.get("SYSTEMROOT", ""), "System32", "nvcuda.dll")
    drivers = ("/dev/nvidiactl", "/dev/dxg", "/dev/kfd", windows)
    if not any(map(os.path.exists, drivers)) and not glob.glob("/dev/nvidia[0-9]*"):
        return 0
    from ckpt_tools.values.measures import cuda_devices

    return cuda_devices()


def _classes(path: str, names: Sequence[Global], call: str) -> Iterator[Finding]:
    """Classes whose package is not installed, or that were defined in a script."""
    fix = mending("convert", path, _OBJECTS)
    missing = [name for name in names if not _importable(name.module)]
    if missing:
        package = missing[0].module.partition(".")[0]
        fails = "torch.load(weights_only=False)" if call.startswith(TORCH_LOAD + ",") or call == TORCH_LOAD else "unpickling it"
        found = f"{listed(missing)}: not importable here, so {fails} fails"
        yield Finding("not-importable", "warning", [], found, f"the package {package!r}", fix)
    scripts = [name for name in names if name.module == "__main__"]
    if scripts:
        found = f"{listed(scripts)}: defined in the script that saved the file; no other program has it"
        yield Finding("script-class", "warning", [], found, "data, or a class in a module", fix)


def _importable(module: str) -> bool:
    """Whether a module's top-level package is there. Runs nothing of it."""
    package = module.partition(".")[0]
    if package in sys.modules or package in sys.stdlib_module_names:
        return True
    if not package.isidentifier():
        return False
    try:
        return find_spec(package) is not None
    except (ImportError, ValueError):
        return False


def _numpy(path: str, names: Sequence[Global]) -> Iterator[Finding]:
    """Module paths of the other NumPy: 2.0 renamed `numpy.core` to `numpy._core`."""
    new = [name for name in names if name.module.startswith("numpy._core")]
    old = [name for name in names if name.module.startswith("numpy.core")]
    present = _version("numpy") if new or old else None
    if present is None:
        return
    fix = mending("convert", path, _OBJECTS)
    if present >= _NUMPY_WITH_STUBS:
        new = [name for name in new if name.module not in _NUMPY_STUBS]
    if new and present < (2, 0):
        found = f"{listed(new)}: written with NumPy 2, and NumPy {present[0]}.{present[1]} is installed"
        yield Finding("numpy-2", "warning", [], found, "NumPy 2", fix)
    if old and present >= (2, 0):
        found = f"{listed(old)}: written with NumPy 1; NumPy 2 finds it under its old name"
        yield Finding("numpy-1", "info", [], found, "", fix)


_NUMPY_WITH_STUBS = (1, 26)  # which reads most of what NumPy 2 writes
_NUMPY_STUBS = frozenset(
    f"numpy._core.{name}" for name in ("_dtype", "_dtype_ctypes", "_internal", "_multiarray_umath", "multiarray", "umath")
)


def _version(package: str) -> tuple[int, int] | None:
    """The version of an installed package, major and minor, from its metadata."""
    from importlib.metadata import PackageNotFoundError, version

    try:
        major, minor, *_ = version(package).split(".")
        return int(major), int(minor)
    except (PackageNotFoundError, ValueError):
        return None


def _paths(path: str, names: Sequence[Global]) -> Iterator[Finding]:
    """Paths of the other system, and of another Python."""
    other = "PosixPath" if os.name == "nt" else "WindowsPath"
    fix = mending("convert", path, _OBJECTS)
    foreign = [name for name in names if name.module.partition(".")[0] == "pathlib" and name.name == other]
    if foreign:
        yield Finding("foreign-path", "warning", [], f"{listed(foreign)}: a path of another system", "text", fix)
    local = [name for name in names if name.module == "pathlib._local"]
    if local and sys.version_info < (3, 13):
        yield Finding("newer-path", "warning", [], f"{listed(local)}: written by Python 3.13", "text", fix)
