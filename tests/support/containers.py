"""One model's state in every container that `inspect` reads, each written by the library that it comes from."""

import gzip
import json
import pickle
import warnings
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed.checkpoint as dcp
from safetensors.torch import save_file
from torch import nn

from tests.hostile.pickles import dict_of
from tests.support.legacy import floats, legacy, saved
from tests.support.rank_files import rank_of, sharded
from tests.support.tars import persistent, storages, tar, tensors, torch_tar

State = dict[str, torch.Tensor]


class Net(nn.Module):
    """A layer and an integer buffer."""

    def __init__(self) -> None:
        super().__init__()
        self.fc = nn.Linear(3, 2)
        self.fc.weight.data = torch.arange(6.0).view(2, 3)
        self.fc.bias.data = torch.tensor([-1.0, 0.5])
        self.fc.register_buffer("steps", torch.tensor([7]))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.fc(x)


def state() -> State:
    """Two float tensors and an integer one."""
    return dict(Net().state_dict())


def _written(name: str, data: Callable[[], bytes]) -> Callable[[Path], Path]:
    def write(folder: Path) -> Path:
        path = folder / name
        path.write_bytes(data())
        return path

    return write


def _torch_tar() -> bytes:
    stored = storages(
        (1, "FloatStorage", floats(0, 1, 2, 3, 4, 5)), (2, "FloatStorage", floats(-1, 0.5)), (3, "LongStorage", _SEVEN)
    )
    made = tensors((4, 1, (2, 3), (3, 1), 0), (5, 2, (2,), (1,), 0), (6, 3, (1,), (1,), 0))
    return torch_tar(dict_of(**{"fc.weight": persistent(4), "fc.bias": persistent(5), "fc.steps": persistent(6)}), stored, made)


_SEVEN = (1).to_bytes(8, "little") + (7).to_bytes(8, "little")  # the count, then the number


def _program(folder: Path) -> Path:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch.jit is deprecated
        torch.jit.save(torch.jit.script(Net()), folder / "program.pt")
    return folder / "program.pt"


def _exported(folder: Path) -> Path:
    torch.export.save(torch.export.export(Net(), (torch.ones(1, 3),)), folder / "program.pt2")
    return folder / "program.pt2"


def _arrays() -> dict[str, Any]:
    return {name: tensor.numpy() for name, tensor in state().items()}


def _npz(folder: Path) -> Path:
    np.savez_compressed(folder / "arrays.npz", **_arrays())
    return folder / "arrays.npz"


def _npy(folder: Path) -> Path:
    np.save(folder / "arrays.npy", _arrays())  # type: ignore[arg-type]
    return folder / "arrays.npy"


def _safetensors(folder: Path) -> Path:
    save_file(state(), folder / "model.safetensors")
    return folder / "model.safetensors"


def _bundle(folder: Path) -> Path:
    with zipfile.ZipFile(folder / "agent.zip", "w") as archive:
        archive.writestr("policy.pth", saved(state()))
        archive.writestr("data", '{"gamma": 0.99}')
    return folder / "agent.zip"


def _shards(folder: Path) -> Path:
    names = list(state())
    files = {name: f"model-{number:05}-of-{len(names):05}.safetensors" for number, name in enumerate(names, 1)}
    folder = folder / "shards"
    folder.mkdir()
    for name, file in files.items():
        save_file({name: state()[name]}, folder / file)
    (folder / "model.safetensors.index.json").write_text(json.dumps({"metadata": {"total_size": 40}, "weight_map": files}))
    return folder


def _dcp(folder: Path) -> Path:
    dcp.save(state(), storage_writer=dcp.FileSystemWriter(folder / "dcp"), no_dist=True)
    return folder / "dcp"


def _dcp_safetensors(folder: Path) -> Path:
    writer = dcp.HuggingFaceStorageWriter(str(folder / "dcp-safetensors"), save_distributed=True)
    dcp.save(state(), storage_writer=writer, no_dist=True)
    return folder / "dcp-safetensors"


def _rank_files(folder: Path) -> Path:
    for rank in range(2):
        with rank_of(rank, 2):
            cut = {name: sharded(tensor, rank, 2) for name, tensor in state().items()}
            (folder / "ranks").mkdir(exist_ok=True)
            torch.save(cut, folder / "ranks" / f"model_world_size_2_rank_{rank}.pt")
    return folder / "ranks"


def _packed(folder: Path) -> Path:
    (folder / "model.tar.gz").write_bytes(gzip.compress(tar({"run/model.pth": saved(state())})))
    return folder / "model.tar.gz"


MAKERS: dict[str, Callable[[Path], Path]] = {
    "torch-zip": _written("model.pth", lambda: saved(state())), "torch-legacy": _written("legacy.pth", lambda: legacy(state())),
    "torch-tar": _written("old.tar", _torch_tar), "torchscript": _program, "torch-export": _exported,
    "pickled model": _written("module.pth", lambda: legacy(Net())),
    "pickle": _written("state.pkl", lambda: pickle.dumps(state())), "npz": _npz, "npy": _npy, "safetensors": _safetensors,
    "zip-bundle": _bundle, "index": lambda folder: _shards(folder) / "model.safetensors.index.json", "sharded": _shards,
    "dcp": _dcp, "rank-files": _rank_files, "dcp-safetensors": _dcp_safetensors, "packed": _packed,
    "dcp-part": lambda folder: _dcp(folder) / "__0_0.distcp",
}  # fmt: skip
