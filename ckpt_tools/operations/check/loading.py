"""Why a checkpoint does not load here: the sentence that explains it, the command that mends it.

Nothing that a file names is imported to find out. Whether a class could be imported is asked of Python's finders, and for
the first part of its module's name only: looking for `a.b` would import `a`.
"""

from __future__ import annotations

import glob
import os
import sys
from collections.abc import Iterator, Sequence
from importlib.util import find_spec
from typing import Literal

from ckpt_tools.formats.base import PROGRAMS
from ckpt_tools.formats.checkpoint import Checkpoint
from ckpt_tools.operations.loaders import TORCH_LOAD, how_it_loads
from ckpt_tools.pickling.weights_only import ALLOWED
from ckpt_tools.text import listed
from ckpt_tools.tree.findings import Finding, mending
from ckpt_tools.tree.nodes import Global

_OBJECTS = "--objects plain"
_LONGEST_INDEX = 16  # more digits than any machine has devices


def findings(checkpoint: Checkpoint, device: str | None = None) -> Iterator[Finding]:
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
    """A device's kind and number; None for text that is no device."""
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
