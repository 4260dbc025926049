"""What PyTorch and safetensors themselves say about a file: their errors, word for word, as users paste them into search boxes.

Taken from torch 2.13 and safetensors 0.8; tests load the same files with both and compare. `torch.load` has two texts for
most files, one with `weights_only=True` (the default since 2.6) and one without.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

MINIZ = "PytorchStreamReader failed reading zip archive: "
CUT = f"RuntimeError: {MINIZ}failed finding central directory"
EMPTY = "EOFError: Ran out of input"
TAR = "RuntimeError: Cannot use ``weights_only=True`` with files saved in the legacy .tar format."
NO_CUDA = (
    "RuntimeError: Attempting to deserialize object on a CUDA device but torch.cuda.is_available() is False. If you are "
    "running on a CPU-only machine, please use torch.load with map_location=torch.device('cpu') to map your storages to the "
    "CPU."
)
_OPCODES = frozenset(b"(.012FIJKLMNPQRSTUVXabcdeghijlopqrstu}]\x80")
_WEIGHTS_ONLY = "UnpicklingError: Weights only load failed. ..."
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


def of_zip(*, cut: bool) -> str:
    """What torch.load says about a damaged zip; with `cut`, one without an end record."""
    return CUT if cut else f"RuntimeError: {MINIZ}..."


def _of_safetensors(head: bytes, size: int) -> str:
    if size < 8:
        return f"{_HEADER}header too small"
    length = int.from_bytes(head[:8], "little")
    if length > 100_000_000:
        return f"{_HEADER}header too large"
    if length + 8 > size:
        return f"{_HEADER}invalid header length"
    return f"{_HEADER}..."


def unsupported_global(name: str) -> str:
    """torch.load with weights_only=True, about a global that is not on its list."""
    return f"{_WEIGHTS_ONLY} Unsupported global: GLOBAL {name} was not an allowed global by default."


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
