"""Which call loads a checkpoint, and what `torch.load(weights_only=True)` of torch 2.13 does with it.

Told from the container, the name of the file, the globals and the opcodes: nothing is loaded to find out.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from ckpt_tools.formats.base import PART_CONTAINERS, PROGRAMS
from ckpt_tools.formats.checkpoint import Checkpoint
from ckpt_tools.pickling.arrays_behind import WRAPPER
from ckpt_tools.tree.nodes import Entry

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
