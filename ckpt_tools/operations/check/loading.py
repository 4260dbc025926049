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

from ckpt_tools.formats.open import Checkpoint
from ckpt_tools.operations.check import torch_errors
from ckpt_tools.pickling.weights_only import ALLOWED
from ckpt_tools.text import listed
from ckpt_tools.tree.findings import Finding, mending
from ckpt_tools.tree.names import unwrap
from ckpt_tools.tree.nodes import Global

_OBJECTS = "--objects plain"
_LONGEST_TAG = 20  # "cuda:" and more digits than any machine has devices


def explained(finding: Finding, checkpoint: Checkpoint) -> Finding:
    """A finding of `inspect` with PyTorch's own error."""
    if finding.code == "wrapper-prefix":
        names = next(found.names for found in checkpoint.state_dicts if list(found.where) == finding.where)
        shown = [name for name in names if unwrap(name) != name][:1]
        return replace(finding, says=torch_errors.unexpected_keys(shown, [unwrap(name) for name in shown]))
    if finding.code == "weights-only-refused" and checkpoint.refused_globals:
        return replace(finding, says=torch_errors.unsupported_global(checkpoint.refused_globals[0]))
    return finding


def findings(checkpoint: Checkpoint) -> Iterator[Finding]:
    """What stands in the way of loading on this machine, in this Python."""
    path, names = str(checkpoint.path), checkpoint.decoded.globals
    yield from _devices(checkpoint)
    yield from _classes(path, [name for name in names if name not in ALLOWED])
    yield from _numpy(path, names)
    yield from _paths(path, names)


def _devices(checkpoint: Checkpoint) -> Iterator[Finding]:
    tags = dict.fromkeys(tensor.node.storage.device for tensor in checkpoint.tensors if hasattr(tensor.node, "storage"))
    cuda = [tag for tag in tags if tag is not None and tag.partition(":")[0] == "cuda"]
    if not cuda:
        return
    present = _cuda_devices()
    beyond = [tag for tag in cuda if int(tag.partition(":")[2] or 0) >= present] if _are_indices(cuda) else cuda
    if not beyond:
        return
    says = torch_errors.NO_CUDA if not present else _no_such_device(beyond[0], present)
    here = "this machine has no cuda device" if not present else f"this machine has {present} cuda devices"
    found = f"storages tagged {listed(beyond)}: {here}"
    fix = mending("convert", str(checkpoint.path), "--map-location cpu")
    yield Finding("no-such-device", "warning", [], found, "cpu, or map_location='cpu' in torch.load", fix, says)


def _are_indices(tags: Sequence[str]) -> bool:
    return all(tag == "cuda" or (tag.partition(":")[2].isdecimal() and len(tag) < _LONGEST_TAG) for tag in tags)


def _no_such_device(tag: str, present: int) -> str:
    return (
        f"RuntimeError: Attempting to deserialize object on CUDA device {tag.partition(':')[2]} but torch.cuda.device_count() "
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


def _classes(path: str, names: Sequence[Global]) -> Iterator[Finding]:
    """Classes whose package is not installed, or that were defined in a script."""
    fix = mending("convert", path, _OBJECTS)
    missing = [name for name in names if not _importable(name.module)]
    if missing:
        package = missing[0].module.partition(".")[0]
        found = f"{listed(missing)}: not importable here, so torch.load(weights_only=False) fails"
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
    present = _major("numpy") if new or old else None
    fix = mending("convert", path, _OBJECTS)
    if new and present == 1:
        found = f"{listed(new)}: written with NumPy 2, and NumPy 1 is installed"
        yield Finding("numpy-2", "warning", [], found, "NumPy 2", fix, torch_errors.no_module("numpy._core"))
    if old and present is not None and present > 1:
        found = f"{listed(old)}: written with NumPy 1; NumPy 2 finds it under its old name and warns"
        yield Finding("numpy-1", "info", [], found, "", fix, "DeprecationWarning: numpy.core is deprecated")


def _major(package: str) -> int | None:
    """The major version of an installed package, from its metadata."""
    from importlib.metadata import PackageNotFoundError, version

    try:
        return int(version(package).partition(".")[0])
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
