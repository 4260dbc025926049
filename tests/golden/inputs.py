"""Inputs that fixtures/ has not, made by torch, NumPy and the standard library: other containers, pairs of models, adapters."""

import bz2
import gzip
import io
import json
import lzma
import pickle
import subprocess
import sys
import warnings
import zipfile
from pathlib import Path

import numpy as np
import torch
from torch import nn
from torch.nn.utils import parametrizations

from fixtures.make import network
from tests.support import networks, proving
from tests.support.families import SIDES
from tests.support.samples import FIXTURES
from tests.support.tars import tar

PAIRS = (
    "ResNetA ResNetB", "ResNetA ResNetC", "MobileA MobileB", "EncoderA EncoderB", "EncoderA EncoderC",
    "EncoderA EncoderD", "MixerA MixerB",
    "GatedA GatedB", "TransposedA TransposedB", "LanguageA LanguageB", "MapA MapB", "StagesA StagesB",
    "WindowsA WindowsB", "PrefixedA PrefixedB",
    "PatchesA PatchesB",
)  # fmt: skip


def make(folder: Path) -> None:
    """Write all of them."""
    warnings.simplefilter("ignore")  # whole modules, old formats and dtypes make torch warn
    torch.manual_seed(0)
    folder.mkdir()
    data = (FIXTURES / "ddp.pth").read_bytes()
    _packed(folder, data)
    _containers(folder)
    _pickles(folder)
    _models(folder)


def _packed(folder: Path, data: bytes) -> None:
    (folder / "ddp.pth.gz").write_bytes(gzip.compress(data, mtime=0))
    (folder / "ddp.pth.bz2").write_bytes(bz2.compress(data))
    (folder / "ddp.pth.xz").write_bytes(lzma.compress(data))
    (folder / "ddp.tar").write_bytes(tar({"ddp.pth": data}))
    (folder / "two.tar").write_bytes(tar({"ddp.pth": data, "single.pth": (FIXTURES / "single.pth").read_bytes()}))
    packed = tar({"model.safetensors": (FIXTURES / "single.safetensors").read_bytes()})
    (folder / "model.tar.gz").write_bytes(gzip.compress(packed, mtime=0))
    with zipfile.ZipFile(folder / "bundle.zip", "w") as bundle:
        bundle.writestr("weights/best.pth", data)
    (folder / "empty.pth").write_bytes(b"")
    (folder / "notes.txt").write_text("no checkpoint\n")
    (folder / "page.pth").write_text("<!doctype html><html>404</html>")
    (folder / "pointer.pth").write_text("version https://git-lfs.github.com/spec/v1\noid sha256:00\nsize 12\n")
    (folder / "cut.safetensors").write_bytes((FIXTURES / "single.safetensors").read_bytes()[:-40])


def _containers(folder: Path) -> None:
    torch.save(network().state_dict(), folder / "legacy.pth", _use_new_zipfile_serialization=False)
    np.savez(folder / "arrays.npz", weight=np.arange(6.0).reshape(2, 3), bias=np.zeros(2, "f4"))
    np.savez_compressed(folder / "deflated.npz", weight=np.arange(6.0))
    np.save(folder / "array.npy", np.arange(6, dtype="i4").reshape(2, 3))
    # in another process: a class that this one has scripted before would get another name
    command = [sys.executable, "-m", "tests.golden.inputs", str(folder.absolute())]
    subprocess.run(command, check=True, cwd=Path(__file__).parents[2])


def _programs(folder: Path) -> None:
    """One network as three kinds of programs."""
    warnings.simplefilter("ignore")
    torch.manual_seed(0)
    model = nn.Sequential(nn.Conv2d(1, 4, 3), nn.Flatten(), nn.Linear(144, 3)).eval()
    _program(torch.jit.script(model), folder / "scripted.pt")
    _program(torch.jit.freeze(torch.jit.script(model)), folder / "frozen.pt")
    exported = torch.export.export(model, (torch.zeros(1, 1, 8, 8),))
    for node in exported.graph.nodes:
        node.meta.pop("stack_trace", None)  # it has the paths of this machine
    torch.export.save(exported, folder / "exported.pt2")


def _program(model: torch.jit.ScriptModule, path: Path) -> None:
    """Without the records that tell where on this machine the source lies."""
    whole = io.BytesIO()
    torch.jit.save(model, whole)
    reader, writer = torch._C.PyTorchFileReader(io.BytesIO(whole.getvalue())), torch._C.PyTorchFileWriter(str(path))
    for name in reader.get_all_records():
        if not name.endswith(".debug_pkl") and name not in ("version", ".data/serialization_id"):
            data = reader.get_record(name)
            writer.write_record(name, data, len(data))
    writer.write_end_of_file()


def _pickles(folder: Path) -> None:
    arrays = {"weight": np.arange(4.0), "bias": np.float32(2)}
    for protocol in range(6):
        (folder / f"arrays{protocol}.pkl").write_bytes(pickle.dumps(arrays, protocol))
    (folder / "evil.pkl").write_bytes(b"cos\nsystem\n(S'true'\ntR.")
    torch.save(
        {"model": network().state_dict(), "run": complex(1, 2), "tags": {"a"}, "when": Path("x/y")}, folder / "values.pth"
    )
    torch.save(
        {"a": torch.eye(3).to_sparse(), "b": torch.eye(4).to_sparse_csr(), "c": torch.ones(2).to("meta")}, folder / "sparse.pth"
    )
    quantised = torch.quantize_per_tensor(torch.ones(2, 2), 0.1, 0, torch.qint8)
    torch.save({"weight": quantised, "nested": {"deep": [torch.ones(1), {"x": torch.zeros(2)}]}}, folder / "quantised.pth")


def _models(folder: Path) -> None:
    """Pairs of models for matching, networks with other heads and channels, weight norm, an optimizer, values of every kind."""
    for name in dict.fromkeys(" ".join(PAIRS).split()):
        torch.save(getattr(networks, name)().state_dict(), folder / f"{name}.pth")
    for name, model in (("text", proving.Text()), ("renamed", proving.RenamedText()), ("image", proving.Image())):
        torch.save(proving.trained(model).state_dict(), folder / f"{name}.pth")
    wide = {
        "conv.weight": torch.randn(8, 4, 3, 3), "fc.weight": torch.randn(200, 8), "fc.bias": torch.randn(200),
        "pos.weight": torch.randn(17, 6), "norm.weight": torch.ones(8),
    }  # fmt: skip
    small = {
        "conv.weight": torch.randn(8, 3, 3, 3), "fc.weight": torch.randn(10, 8), "fc.bias": torch.randn(10),
        "pos.weight": torch.randn(10, 6), "norm.weight": torch.ones(8),
    }  # fmt: skip
    torch.save(wide, folder / "wide.pth")
    torch.save(small, folder / "small.pth")
    torch.save(parametrizations.weight_norm(nn.Linear(3, 2)).state_dict(), folder / "normed.pth")
    trained = network()
    adam = torch.optim.AdamW(trained.parameters())
    for parameter in trained.parameters():
        parameter.grad = torch.ones_like(parameter)
    adam.step()
    torch.save({"state_dict": trained.state_dict(), "optimizer": adam.state_dict(), "step": 1}, folder / "adam.pth")
    numbers = torch.tensor([0.0, 1e-9, 1e-5, 65504.0, 1e6, float("inf"), float("nan"), -3.0])
    torch.save({"a.weight": numbers, "b.weight": numbers.double()}, folder / "numbers.pth")
    torch.save({"a.weight": torch.zeros(4), "b.weight": torch.full((3,), float("nan"))}, folder / "nans.pth")
    (folder / "config.json").write_text(json.dumps({"num_hidden_layers": 2}))
    for plan, (old, _, _) in SIDES.items():
        torch.save(old(), folder / f"{plan}.pth")


if __name__ == "__main__":
    _programs(Path(sys.argv[1]))
