"""What check and inspect say that torch and safetensors do is what they do: each sentence beside the call itself."""

import collections
import os
import pickle
import subprocess
import sys
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file

import ckpt_tools
from ckpt_tools import check

pytestmark = pytest.mark.filterwarnings(
    "ignore:Detected pickle protocol:UserWarning", "ignore:.*torch.jit.*:DeprecationWarning",
    "ignore:.*torch.jit.*:UserWarning", "ignore:.*torch.jit.*:FutureWarning",
)  # fmt: skip
WEIGHTS = {"a.weight": torch.ones(3), "b.weight": torch.zeros(3)}


@pytest.fixture(autouse=True)
def _nothing_allowed(monkeypatch: pytest.MonkeyPatch) -> None:
    """As in a process that has allowed no class: importing torch.distributed.tensor allows some."""
    monkeypatch.setattr("torch._weights_only_unpickler._marked_safe_globals_set", set())


class Call:
    """Pickled as a call."""

    def __init__(self, function: Callable[..., Any], *arguments: Any) -> None:
        self.function, self.arguments = function, arguments

    def __reduce__(self) -> tuple[Callable[..., Any], tuple[Any, ...]]:
        return self.function, self.arguments


class OfAUser:
    """A class that torch does not know."""


def said(path: Path, *, weights_only: bool = True) -> str:
    """What torch.load says, with the kind of error; "" when it loads."""
    try:
        torch.load(path, map_location="cpu", weights_only=weights_only)
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return ""


def findings(path: Path) -> dict[str, Any]:
    return {finding.code: finding for finding in check(path).findings}


def jit_program(path: Path) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        torch.jit.save(torch.jit.script(torch.nn.Linear(2, 2)), path)


def exported_program(path: Path) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        torch.export.save(torch.export.export(torch.nn.Linear(2, 2), (torch.ones(1, 2),)), path)


def pickled(value: Any, protocol: int) -> Callable[[Path], object]:
    return lambda path: path.write_bytes(pickle.dumps(value, protocol))


def saved(value: Any, **options: Any) -> Callable[[Path], object]:
    return lambda path: torch.save(value, path, **options)


def holding(value: Any, **options: Any) -> Callable[[Path], object]:
    return saved({"w": torch.ones(2), "x": value}, **options)


MAKERS: dict[str, Callable[[Path], object]] = {
    "zip.pth": saved(WEIGHTS), "zip.safetensors": saved(WEIGHTS),
    "legacy.pth": saved(WEIGHTS, _use_new_zipfile_serialization=False),
    "legacy.safetensors": saved(WEIGHTS, _use_new_zipfile_serialization=False),
    "right.safetensors": lambda path: save_file(WEIGHTS, path), "wrong.pth": lambda path: save_file(WEIGHTS, path),
    "CAPITALS.SAFETENSORS": lambda path: save_file(WEIGHTS, path), "noname": lambda path: save_file(WEIGHTS, path),
    "jit.pt": jit_program, "exported.pt2": exported_program,
    "arrays.npz": lambda path: np.savez(path, a=np.ones(3)), "array.npy": lambda path: np.save(path, np.ones(3)),
    "plain.pkl": pickled({"a": [1, 2]}, 2), "arrays.pkl": pickled({"a": np.ones(3)}, 4),
    "tensors2.pkl": pickled(WEIGHTS, 2), "tensors4.pkl": pickled(WEIGHTS, 4),
    "system.pth": holding(Call(os.system, "true")),
    "system_legacy.pth": holding(Call(os.system, "true"), _use_new_zipfile_serialization=False),
    "system4.pth": holding(Call(os.system, "true"), pickle_protocol=4), "sys.pth": holding(Call(sys.getsizeof, 1)),
    "eval.pth": holding(Call(eval, "1")), "popen.pth": holding(Call(subprocess.Popen, "true")),
    "value_error.pth": holding(ValueError("x")), "class.pth": holding(OfAUser()),
    "class4.pth": holding(OfAUser(), pickle_protocol=4), "default_dict.pth": holding(collections.defaultdict(list)),
    "set.pth": holding({1, 2}), "long.pth": holding(1 << 3000), "protocol5.pth": saved(WEIGHTS, pickle_protocol=5),
}  # fmt: skip


@pytest.fixture(params=MAKERS)
def sample(request: pytest.FixtureRequest, tmp_path: Path) -> Path:
    """A file of each kind, written by its own library."""
    path: Path = tmp_path / request.param
    MAKERS[request.param](path)
    return path


def test_weights_only_is_what_torch_does(sample: Path) -> None:
    """`weights_only.loads` of every container, name and pickle is whether torch.load takes it, and the reason is given."""
    found = ckpt_tools.inspect(sample).weights_only
    assert found["loads"] is (said(sample) == "")
    assert found["loads"] is not bool(found["refused"] or found["reasons"])


@pytest.mark.parametrize(
    ("name", "call"),
    [
        ("zip.pth", "torch.load"), ("legacy.pth", "torch.load"), ("right.safetensors", "safetensors.torch.load_file"),
        ("jit.pt", "torch.jit.load"), ("exported.pt2", "torch.export.load"), ("plain.pkl", "pickle.load"),
        ("arrays.npz", "numpy.load"), ("array.npy", "numpy.load"),
    ],
)  # fmt: skip
def test_the_call_that_is_named_loads_it(tmp_path: Path, name: str, call: str) -> None:
    path = tmp_path / name
    MAKERS[name](path)
    assert ckpt_tools.inspect(path).weights_only["call"] == call
    calls: dict[str, Callable[[Path], object]] = {
        "torch.load": torch.load, "safetensors.torch.load_file": load_file, "torch.jit.load": torch.jit.load,
        "torch.export.load": torch.export.load, "pickle.load": lambda path: pickle.loads(path.read_bytes()),
        "numpy.load": np.load,
    }  # fmt: skip
    loaded = calls[call](path)
    if hasattr(loaded, "close"):
        loaded.close()


def test_torchscript_loads_without_weights_only(tmp_path: Path) -> None:
    """torch.load hands a program to torch.jit.load, which imports no class that it names: nothing is said of them."""
    path = tmp_path / "jit.pt"
    jit_program(path)
    assert said(path, weights_only=False) == ""
    assert {"not-importable", "script-class"}.isdisjoint(findings(path))
    assert "weights-only-refused" in findings(path)


def test_a_torch_zip_named_safetensors(tmp_path: Path) -> None:
    """safetensors refuses it, and so does torch.load by this name; both are said, and what convert makes of it loads."""
    path = tmp_path / "model.safetensors"
    torch.save(WEIGHTS, path)
    finding = findings(path)["misnamed"]
    assert finding.found.startswith("a torch-zip by content, but named .safetensors: safetensors refuses it")
    with pytest.raises(SafetensorError) as caught:
        load_file(path)
    assert said(path) == f"SafetensorError: {caught.value}"
    ckpt_tools.convert(path, tmp_path / "model.fixed.safetensors")
    assert list(load_file(tmp_path / "model.fixed.safetensors")) == list(WEIGHTS)
    path.rename(tmp_path / "model.pth")
    assert "misnamed" not in findings(tmp_path / "model.pth")
    path = tmp_path / "pytorch_model.bin"  # and the other way round: safetensors takes it by any name
    save_file(WEIGHTS, path)
    assert findings(path)["misnamed"].found == "a safetensors file by content, but named .bin: torch.load refuses it"
    assert list(load_file(path)) == list(WEIGHTS)
    assert said(path)
