"""What PyTorch and safetensors themselves say about a file: their errors, word for word, as users paste them into search boxes.

Taken from torch 2.13 and safetensors 0.8; tests load the same files with both and compare. `torch.load` has two texts for
most files, one with `weights_only=True` (the default since 2.6) and one without.
"""

from __future__ import annotations

import pickle
from _compat_pickle import REVERSE_IMPORT_MAPPING, REVERSE_NAME_MAPPING
from collections.abc import Sequence
from pathlib import Path

_READER = "PytorchStreamReader failed "
EMPTY = "EOFError: Ran out of input"
TAR = "RuntimeError: Cannot use ``weights_only=True`` with files saved in the legacy .tar format."
TORCHSCRIPT = (  # since torch 2.6; before, weights_only=True too handed the file to torch.jit.load
    "RuntimeError: Cannot use ``weights_only=True`` with TorchScript archives passed to ``torch.load``."
)
NO_MAGIC_NUMBER = "RuntimeError: Invalid magic number; corrupt file?"
NO_PICKLE = f"RuntimeError: {_READER}locating file data.pkl: file not found"
NO_CUDA = (
    "RuntimeError: Attempting to deserialize object on a CUDA device but torch.cuda.is_available() is False. If you are "
    "running on a CPU-only machine, please use torch.load with map_location=torch.device('cpu') to map your storages to the "
    "CPU."
)
_OPCODES = frozenset(b"(.012FIJKLMNPQRSTUVXabcdeghijlopqrstu}]\x80")
_WEIGHTS_ONLY = "UnpicklingError: Weights only load failed. ..."
_BLOCKED_MODULES = frozenset(("sys", "os", "posix", "nt"))
_DTENSOR = frozenset((
    "torch.distributed.device_mesh.DeviceMesh", "torch.distributed.tensor._dtensor_spec.DTensorSpec",
    "torch.distributed.tensor._dtensor_spec.TensorMeta", "torch.distributed.tensor.DTensor",
    "torch.distributed.tensor.placement_types.Partial", "torch.distributed.tensor.placement_types.Replicate",
    "torch.distributed.tensor.placement_types.Shard",
))  # fmt: skip
_NESTED = frozenset((
    "torch.nested._internal.nested_tensor.NestedTensor", "torch.nested._internal.nested_tensor._rebuild_njt",
    "torch._dynamo.decorators._DimRange",
))  # fmt: skip
_HEADER = "SafetensorError: Error while deserializing header: "


def of_bytes(path: Path, head: bytes, size: int) -> str:
    """What a loader says about a file that begins so, where that can be told from its beginning."""
    if path.suffix == ".safetensors":
        return _of_safetensors(head, size)
    if not head:
        return EMPTY
    if not any(head):
        return TAR
    if head[0] in _OPCODES:
        return ""
    return (
        f"{_WEIGHTS_ONLY} Unsupported operand {head[0]} "
        f"(with weights_only=False: UnpicklingError: invalid load key, {chr(head[0])!r}.)"
    )


def _of_safetensors(head: bytes, size: int) -> str:
    if size < 8:
        return f"{_HEADER}header too small"
    length = int.from_bytes(head[:8], "little")
    if length > 100_000_000:
        return f"{_HEADER}header too large"
    if length + 8 > size:
        return f"{_HEADER}invalid header length"
    return f"{_HEADER}..."


def refusal(refused: Sequence[str], unusual: Sequence[str]) -> str:
    """torch.load with weights_only=True, about the first thing in a pickle that it does not take; "" where order decides."""
    if refused and not unusual:
        return unsupported_global(refused[0])
    if unusual and (not refused or unusual[0] == "opcode FRAME") and unusual[0].startswith("opcode "):
        code = getattr(pickle, unusual[0].removeprefix("opcode "))  # FRAME comes before any global
        return f"{_WEIGHTS_ONLY} Unsupported operand {code[0]}"
    return ""


def unsupported_global(name: str) -> str:
    """torch.load with weights_only=True, about a global that is not on its list."""
    module = name.rpartition(".")[0]
    if module in _BLOCKED_MODULES:
        return f"{_WEIGHTS_ONLY} Trying to load unsupported GLOBAL {name} whose module {module} is blocked."
    if name in _DTENSOR:
        return "UnpicklingError: Weights only load failed. ``torch.distributed.tensor`` must be imported to load DTensors"
    if name in _NESTED:
        return (
            "UnpicklingError: Weights only load failed. ``torch.nested`` and ``torch._dynamo`` must be imported to load "
            "nested jagged tensors (NJTs)"
        )
    shown = "..." if _is_renamed(name) else name.removeprefix("builtins.")  # torch 2.4 keeps the module
    return f"{_WEIGHTS_ONLY} Unsupported global: GLOBAL {shown} was not an allowed global by default."


def _is_renamed(name: str) -> bool:
    """Whether pickles of protocol 2 may have a Python 2 name for it that weights_only does not translate (`commands.Popen`)."""
    module, _, own = name.rpartition(".")
    return (module, own) in REVERSE_NAME_MAPPING or (module in REVERSE_IMPORT_MAPPING and module not in ("builtins", "copyreg"))


def no_module(name: str) -> str:
    """Python, about a module that is not installed."""
    return f"ModuleNotFoundError: No module named {name!r}"


def no_attribute(name: str) -> str:
    """Python's unpickler, about a class of a script."""
    return f"AttributeError: Can't get attribute {name!r} on <module '__main__'>"


def unexpected_keys(names: Sequence[str], plain: Sequence[str]) -> str:
    """`load_state_dict`, about names in a wrapper."""
    return (
        f"RuntimeError: Error(s) in loading state_dict ... Missing key(s) in state_dict: {_quoted(plain)} ... "
        f"Unexpected key(s) in state_dict: {_quoted(names)} ..."
    )


def _quoted(names: Sequence[str]) -> str:
    return ", ".join(f'"{name}"' for name in names)
