"""Why a checkpoint does not load here: PyTorch's own error, the sentence that explains it, the command that mends it.

Nothing that a file names is imported to find out. Whether a class could be imported is asked of Python's finders, and for
the first part of its module's name only: looking for `a.b` would import `a`.
"""

from __future__ import annotations

import glob
import os
import sys
from collections.abc import Iterator, Sequence
from dataclasses import replace
from importlib.util import find_spec

from ckpt_tools.formats.base import PROGRAMS
from ckpt_tools.formats.open import Checkpoint
from ckpt_tools.operations.check import torch_errors
from ckpt_tools.operations.loaders import TORCH_LOAD, how_it_loads, is_first_torchscript
from ckpt_tools.pickling.weights_only import ALLOWED
from ckpt_tools.text import listed
from ckpt_tools.tree.findings import Finding, mending
from ckpt_tools.tree.names import unwrap
from ckpt_tools.tree.nodes import Global

_OBJECTS = "--objects plain"
_LONGEST_INDEX = 16  # more digits than any machine has devices


def explained(finding: Finding, checkpoint: Checkpoint) -> Finding:
    """A finding of `inspect` with PyTorch's own error."""
    if finding.code == "wrapper-prefix":
        names = next(found.names for found in checkpoint.state_dicts if list(found.where) == finding.where)
        shown = [name for name in names if unwrap(name) != name][:1]
        return replace(finding, says=torch_errors.unexpected_keys(shown, [unwrap(name) for name in shown]))
    if finding.code == "weights-only-refused":
        return replace(finding, says=_refusal(checkpoint))
    if finding.code == "misnamed":
        source = checkpoint.decoded.source
        return replace(finding, says=torch_errors.of_bytes(checkpoint.path, source.read(0, min(8, source.size)), source.size))
    return finding


def _refusal(checkpoint: Checkpoint) -> str:
    """What torch.load(weights_only=True) says; "" where that is not known."""
    container, unusual = checkpoint.container, checkpoint.decoded.unusual
    if container == "pickle":
        unusual = unusual[1:]  # the first is that it is one
        if not unusual and not checkpoint.refused_globals:
            return torch_errors.NO_MAGIC_NUMBER
    if container in ("torch-zip", "torch-legacy", "pickle"):
        return torch_errors.refusal(checkpoint.refused_globals, unusual)
    if container == "torchscript" and not is_first_torchscript(checkpoint):
        return torch_errors.TORCHSCRIPT
    if container in PROGRAMS:
        return torch_errors.NO_PICKLE
    return torch_errors.TAR if container == "torch-tar" else ""


def findings(checkpoint: Checkpoint, device: str | None = None) -> Iterator[Finding]:
    """What stands in the way of loading on this machine, in this Python; with `device`, on a machine that has this one."""
    path, names = str(checkpoint.path), checkpoint.decoded.globals
    yield from _devices(checkpoint, device)
    if checkpoint.container in PROGRAMS:
        return  # torch's own loaders import none of the classes that a program names
    yield from _classes(path, [name for name in names if name not in ALLOWED], how_it_loads(checkpoint).call)
    yield from _numpy(path, names)
    yield from _paths(path, names)


def is_device(text: str) -> bool:
    """Whether this is a device that `--device` takes: a kind, or a kind and a number."""
    kind, colon, index = text.partition(":")
    return kind.isidentifier() and (not colon or (index.isdecimal() and len(index) < _LONGEST_INDEX))


def _devices(checkpoint: Checkpoint, device: str | None) -> Iterator[Finding]:
    """Storages of devices that are not there: a problem where it was said which is, else a note about this machine."""
    found = dict.fromkeys(tensor.node.storage.device for tensor in checkpoint.tensors if hasattr(tensor.node, "storage"))
    tags = [tag for tag in found if tag not in (None, "cpu", "meta")]
    if device is not None:
        present = int(device.partition(":")[2] or 0) + 1 if device.partition(":")[0] == "cuda" else 0
        beyond, here = [tag for tag in tags if not _is_there(tag, device)], f"not there on a machine with {device}"
    else:
        tags = [tag for tag in tags if tag.partition(":")[0] == "cuda"]
        present = _cuda_devices() if tags else 0
        beyond = [tag for tag in tags if not present or not _is_there(tag, f"cuda:{present - 1}")]
        here = f"this machine has {present or 'no'} cuda device{'s' if present > 1 else ''}"
    if not beyond:
        return
    fix = mending("convert", str(checkpoint.path), "--map-location cpu")
    yield Finding(
        "no-such-device", "info" if device is None else "problem", [], f"storages tagged {listed(beyond)}: {here}",
        "cpu, or map_location='cpu' in torch.load", fix, _no_such_device(beyond[0], present),
    )  # fmt: skip


def _is_there(tag: str, device: str) -> bool:
    """Whether a machine whose last device of its kind is this one has the device of a tag."""
    (kind, _, index), (own, _, last) = tag.partition(":"), device.partition(":")
    if kind != own or (index and not (index.isdecimal() and len(index) < _LONGEST_INDEX)):
        return False
    return int(index or 0) <= int(last or 0)


def _no_such_device(tag: str, present: int) -> str:
    """What torch says about a storage of a cuda device; other kinds have texts of their own."""
    kind, _, index = tag.partition(":")
    if kind != "cuda":
        return ""
    if not present:
        return torch_errors.NO_CUDA
    return (
        f"RuntimeError: Attempting to deserialize object on CUDA device {index} but torch.cuda.device_count() "
        f"is {present}. Please use torch.load with map_location to map your storages to an existing device."
    )


def _cuda_devices() -> int:
    """How many cuda devices torch sees; it is asked only where a driver is."""
    drivers = (
        "/dev/nvidiactl",
        "/dev/dxg",
        "/dev/kfd",
        os.path.join(os.environ.get("SYSTEMROOT", ""), "System32", "nvcuda.dll"),
    )
    if not any(map(os.path.exists, drivers)) and not glob.glob("/dev/nvidia[0-9]*"):
        return 0
    from ckpt_tools.values.counting import cuda_devices

    return cuda_devices()


def _classes(path: str, names: Sequence[Global], call: str) -> Iterator[Finding]:
    """Classes whose package is not installed, or that were defined in a script."""
    fix = mending("convert", path, _OBJECTS)
    missing = [name for name in names if not _importable(name.module)]
    if missing:
        package = missing[0].module.partition(".")[0]
        fails = "torch.load(weights_only=False)" if call.startswith(TORCH_LOAD + ",") or call == TORCH_LOAD else "unpickling it"
        found = f"{listed(missing)}: not importable here, so {fails} fails"
        yield Finding("not-importable", "warning", [], found, f"the package {package!r}", fix, torch_errors.no_module(package))
    scripts = [name for name in names if name.module == "__main__"]
    if scripts:
        found = f"{listed(scripts)}: defined in the script that saved the file; no other program has it"
        yield Finding("script-class", "warning", [], found, "data, or a class in a module", fix,
                      torch_errors.no_attribute(scripts[0].name))  # fmt: skip


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
        missing = "numpy._core" if present < _NUMPY_WITH_STUBS else new[0].module
        found = f"{listed(new)}: written with NumPy 2, and NumPy {present[0]}.{present[1]} is installed"
        yield Finding("numpy-2", "warning", [], found, "NumPy 2", fix, torch_errors.no_module(missing))
    if old and present >= (2, 0):
        warned = [name for name in old if str(name) not in _NUMPY_KEPT]
        says = f"DeprecationWarning: {warned[0].module} is deprecated" if warned else ""
        found = f"{listed(old)}: written with NumPy 1; NumPy 2 finds it under its old name"
        yield Finding("numpy-1", "info", [], found, "", fix, says)


_NUMPY_WITH_STUBS = (1, 26)  # which reads most of what NumPy 2 writes
_NUMPY_STUBS = frozenset(
    f"numpy._core.{name}" for name in ("_dtype", "_dtype_ctypes", "_internal", "_multiarray_umath", "multiarray", "umath")
)
_NUMPY_KEPT = frozenset(("numpy.core.multiarray._reconstruct", "numpy.core.multiarray.scalar"))  # without a warning


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
        kind = "UnsupportedOperation" if sys.version_info >= (3, 13) else "NotImplementedError"
        says = f"{kind}: cannot instantiate {other!r} on your system"
        yield Finding("foreign-path", "warning", [], f"{listed(foreign)}: a path of another system", "text", fix, says)
    local = [name for name in names if name.module == "pathlib._local"]
    if local and sys.version_info < (3, 13):
        says = "ModuleNotFoundError: No module named 'pathlib._local'; 'pathlib' is not a package"
        yield Finding("newer-path", "warning", [], f"{listed(local)}: written by Python 3.13", "text", fix, says)
