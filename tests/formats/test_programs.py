"""TorchScript programs and archives of checkpoints: torch.jit is the oracle, its samples and those that 1.0 wrote by hand."""

from __future__ import annotations

import errno
import gc
import io
import json
import pickle
import tempfile
import warnings
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any, Final

import numpy as np
import pytest
import torch
from safetensors.torch import save as safetensors_bytes
from torch import nn

import ckpt_tools
from ckpt_tools import open_checkpoint
from ckpt_tools.errors import (
    CkptError,
    ContainerLimitError,
    DamagedFileError,
    LimitError,
    ObjectsError,
    RemoteTimeoutError,
    TensorError,
    UnsupportedContainerError,
    ZipError,
)
from ckpt_tools.limits import raised
from ckpt_tools.torch import load_state_dict
from tests.support.graphs import assert_same, element_bytes
from tests.support.legacy import legacy
from tests.support.trees import value_at
from tests.support.zips import big_endian

pytestmark = pytest.mark.filterwarnings("ignore:.*torch.jit.*:DeprecationWarning", "ignore:.*torch.jit.*:FutureWarning")


class Net(nn.Module):
    """Parameters, buffers, a hidden one, a shared layer, a tensor that is neither, a setting, a list of modules."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(2))
        self.register_buffer("mean", torch.arange(3.0))
        self.register_buffer("hidden", torch.ones(1), persistent=False)
        self.absent: torch.Tensor | None
        self.register_parameter("absent", None)
        self.features = nn.Sequential(nn.Conv2d(3, 2, 1), nn.BatchNorm2d(2))
        self.shared = nn.Linear(2, 2)
        self.again = self.shared
        self.layers = nn.ModuleList([nn.Linear(2, 2, bias=False), nn.Linear(2, 2)])
        self.size = 7
        self.table = {"a": 1}

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = layer(x)
        return self.again(self.shared(x)) * self.scale + self.size + torch.tensor([1.5, 2.5])


def program(path: Path, model: nn.Module) -> Path:
    """A module scripted and saved by torch."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        torch.jit.save(torch.jit.script(model), path)
    return path


def jit_state_dict(path: Path) -> dict[str, torch.Tensor]:
    """What torch itself takes out of a program."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        state_dict: dict[str, torch.Tensor] = torch.jit.load(path, map_location="cpu").state_dict()
    return state_dict


def assert_programs_state_dict(path: Path, expected: dict[str, torch.Tensor], tmp_path: Path) -> None:
    """inspect shows, and convert takes out, exactly this: names, order, bits, ties."""
    found = ckpt_tools.inspect(path)
    assert found.container == "torchscript"
    assert [row["name"] for row in found.tensors if row["name"] is not None] == list(expected)
    assert found.weights_only["loads"] is False
    assert "torchscript-program" in [finding.code for finding in found.findings]
    report = ckpt_tools.convert(path, tmp_path / "out.pth", objects="plain", overwrite=True)
    loaded = torch.load(tmp_path / "out.pth", weights_only=True)
    assert list(loaded) == list(expected)
    bits = [{name: element_bytes(tensor) for name, tensor in state.items()} for state in (loaded, expected)]
    assert bits[0] == bits[1]
    shared = [[a.data_ptr() == b.data_ptr() for a in d.values() for b in d.values()] for d in (loaded, expected)]
    assert shared[0] == shared[1]
    assert ("code", "a state dict holds no program") in report.dropped


def test_a_program_shows_its_parameters(tmp_path: Path) -> None:
    """A scripted module: attribute paths, order, shared layers, as torch.jit.load gives them."""
    path = program(tmp_path / "net.pt", Net())
    assert_programs_state_dict(path, jit_state_dict(path), tmp_path)
    assert ckpt_tools.inspect(path).values["size"] == 7


def test_constants_of_the_code_are_counted(tmp_path: Path) -> None:
    """Tensors that tracing baked into the code belong to the program, not to its state."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        torch.jit.save(torch.jit.trace(lambda x: x + torch.tensor([1.5, 2.5]), torch.ones(2)), str(tmp_path / "add.pt"))
    found = ckpt_tools.inspect(tmp_path / "add.pt")
    assert (found.tensors, found.state_dicts) == ([], [])
    assert "1 constants of 8 bytes" in next(row.found for row in found.findings if row.code == "torchscript-program")


def test_a_traced_program(tmp_path: Path) -> None:
    """Tracing writes mangled class names; they change nothing."""
    model = nn.Sequential(nn.Linear(2, 3), nn.Sequential(nn.Linear(3, 3), nn.BatchNorm1d(3)), nn.Linear(3, 1)).eval()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        torch.jit.save(torch.jit.trace(model, torch.ones(1, 2)), tmp_path / "traced.pt")
    expected = jit_state_dict(tmp_path / "traced.pt")
    assert_programs_state_dict(tmp_path / "traced.pt", expected, tmp_path)
    assert list(expected) == list(model.state_dict())
    assert_same(dict(load_state_dict(tmp_path / "traced.pt")), dict(torch.load(tmp_path / "out.pth", weights_only=True)))


@pytest.mark.parametrize(
    ("old", "new"),
    [
        (b"\n", b"\r\n"),
        (b"(Module):", b" (Module) :"),
        (b"(Module):", b"(Module):  # a comment"),
        (b"  __parameters__ = [", b"  training : bool\n  __parameters__ = ["),
        (b"  __parameters__ = [", b"  __parameters__ = []\n  __parameters__ = ["),
        (b"  __parameters__ = [", b"    __parameters__ = ["),
        (b'", ]\n', b'",\n  ]\n'),
        (b'__buffers__ = ["', b'__buffers__ = ["""'),
        (b"class ", b"class BatchNorm2d(Module):\n  training : bool\nclass "),
        (b"class ", b"class  BatchNorm2d(Module):\n  training : bool\nclass "),
        (b"  weight : Tensor", b"  weight: Tensor"),
        (b"  weight : Tensor\n", b"  weight : Tensor\n  weight : Tensor\n"),
        (b"  weight : Tensor", b"  # none\n  weight : Tensor"),
        (b"  weight : Tensor\n", b""),
        (b"  weight : Tensor\n", b"  weight : Tensor\n  more : Tensor\n"),
        (b"  def forward", b"  # none\n  def forward"),
        (b"  def forward", b"  def  forward"),
        (b"  def forward", b"    def forward"),
    ],
)
def test_code_in_another_hand_is_refused(tmp_path: Path, old: bytes, new: bytes) -> None:
    """torch reads code that it would not write, and finds parameters in it: what is not read as torch reads it is refused."""
    whole = program(tmp_path / "whole.pt", Net().features)
    other = tmp_path / "other.pt"
    with zipfile.ZipFile(whole) as archive, zipfile.ZipFile(other, "w") as edited:
        for name in archive.namelist():
            content = archive.read(name)
            edited.writestr(name, content.replace(old, new) if name.endswith("batchnorm.py") else content)
    with pytest.raises(ZipError, match=r"not written as torch writes|is not in the program's code|not in its"):
        open_checkpoint(other)


class Optionals(nn.Module):
    """A buffer that may be absent, which torch.jit.load leaves out of the state dict, and a constant."""

    def __init__(self) -> None:
        super().__init__()
        self.text = "(\n"
        self.register_buffer("mean", torch.ones(2))
        self.layers = nn.Sequential(nn.Linear(2, 2))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.layers(x)


Optionals.__annotations__ |= {"mean": torch.Tensor | None, "text": Final[str]}  # torch.jit reads no text here


def test_an_optional_buffer_is_no_part_of_the_state_dict(tmp_path: Path) -> None:
    """Its type is Optional[Tensor], and torch takes those that are tensors."""
    path = program(tmp_path / "net.pt", Optionals())
    expected = jit_state_dict(path)
    assert list(expected) == ["layers.0.weight", "layers.0.bias"]
    assert [row["name"] for row in ckpt_tools.inspect(path).tensors] == [*expected, None]


class Computed(nn.Module):
    """What is saved of it is half of its weight."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("weight", torch.arange(6.0))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x * self.weight

    @torch.jit.export
    def __getstate__(self):  # type: ignore[no-untyped-def]
        return {"weight": self.weight / 2}

    @torch.jit.export
    def __setstate__(self, state: dict[str, torch.Tensor]) -> None:
        self.weight = state["weight"] * 2
        self.training = True


def test_what_code_computes_is_not_shown_as_saved(tmp_path: Path) -> None:
    """A module with `__setstate__` beside a plain one: it stays an object, which is said, and no state dict is made of it."""
    path = program(tmp_path / "net.pt", nn.Sequential(nn.Linear(6, 6), Computed()))
    assert jit_state_dict(path)["1.weight"].tolist() == [0, 1, 2, 3, 4, 5]
    found = ckpt_tools.inspect(path)
    assert [row["name"] for row in found.tensors] == ["0.weight", "0.bias", None]
    assert "<saved>" in found.tensors[-1]["where"]
    assert "Computed' makes its tensors" in next(row.found for row in found.findings if row.code == "computed-tensors")
    with pytest.raises(ObjectsError, match="would be lost"):
        ckpt_tools.convert(path, tmp_path / "out.pth", objects="plain")


class SetAlone(nn.Module):
    """Without `__getstate__` torch saves and loads the attributes."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("weight", torch.arange(6.0))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x * self.weight

    @torch.jit.export
    def __setstate__(self, state: dict[str, torch.Tensor]) -> None:
        self.weight = state["weight"] * 2


def test_setstate_alone_computes_nothing(tmp_path: Path) -> None:
    """torch asks for both methods."""
    path = program(tmp_path / "net.pt", SetAlone())
    assert_programs_state_dict(path, jit_state_dict(path), tmp_path)


def test_a_program_under_data_parallel_is_stripped(tmp_path: Path) -> None:
    """`module.` in front of a program's names goes with --strip-module, into safetensors too."""
    path = program(tmp_path / "net.pt", Wrapper())
    ckpt_tools.convert(path, tmp_path / "w.safetensors", objects="plain", strip_module=True)
    assert [row["name"] for row in ckpt_tools.inspect(tmp_path / "w.safetensors").tensors] == ["weight", "bias"]


class Wrapper(nn.Module):
    """What nn.DataParallel leaves in names."""

    def __init__(self) -> None:
        super().__init__()
        self.module = nn.Linear(2, 2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.module(x)


@pytest.mark.parametrize("objects", [None, "keep", "drop"])
def test_a_program_is_not_converted_unasked(tmp_path: Path, objects: Any) -> None:
    """convert keeps no program: it says so, and what to ask for."""
    path = program(tmp_path / "net.pt", Wrapper())
    with pytest.raises(ObjectsError, match="TorchScript program") as caught:
        ckpt_tools.convert(path, tmp_path / "out.pth", objects=objects)
    assert "objects='plain'" in caught.value.fix
    assert not (tmp_path / "out.pth").exists()


# --- the layout of 1.0


def tensor_row(
    key: str, shape: list[int], *, kind: str = "FLOAT", stride: list[int] | None = None, **more: Any
) -> dict[str, Any]:
    """A TensorDef as protobuf writes it in JSON: numbers as text."""
    stride = stride if stride is not None else list(torch.empty(shape).stride())
    return {
        "dims": [str(size) for size in shape], "strides": [str(step) for step in stride], "offset": "0", "requiresGrad": False,
        "dataType": kind, "data": {"key": f"tensors/{key}"}, "device": "cpu", **more,
    }  # fmt: skip


def parameter(name: str, number: int, *, buffer: bool = False) -> dict[str, Any]:
    """A ParameterDef."""
    return {"isBuffer": buffer, "tensorId": str(number), "name": name}


MODEL = {
    "protoVersion": "2",
    "mainModule": {
        "torchscriptArena": {"key": "code/net.py"},
        "name": "Net",
        "optimize": True,
        "parameters": [parameter("count", 2, buffer=True), parameter("weight", 0), parameter("tied", 0)],
        "submodules": [{"name": "inner", "optimize": True, "parameters": [parameter("weight", 1)],
                        "torchscriptArena": {"key": "code/inner.py"}}],
    },
    "producerName": "pytorch",
    "producerVersion": "1.0",
    "tensors": [
        tensor_row("0", [2, 3], requiresGrad=True),
        tensor_row("1", [2, 2], strides=["1", "2"], requiresGrad=True, offset="1"),
        tensor_row("2", [], kind="INT64"),
    ],
}  # fmt: skip
RECORDS = {
    "tensors/0": torch.arange(6.0).numpy().tobytes(),
    "tensors/1": torch.arange(5.0).numpy().tobytes(),
    "tensors/2": torch.tensor(9).numpy().tobytes(),
}


def old_program(path: Path, model: Any = None, records: dict[str, bytes] | None = None) -> Path:
    """A program as torch 1.0 wrote it."""
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr("net/version", "1\n")
        archive.writestr("net/code/net.py", "op_version_set = 0\ndef forward(self, x: Tensor) -> Tensor:\n  return x\n")
        archive.writestr("net/code/inner.py", "op_version_set = 0\ndef forward(self, x: Tensor) -> Tensor:\n  return x\n")
        for name, data in (RECORDS if records is None else records).items():
            archive.writestr(f"net/{name}", data)
        text = model if isinstance(model, str) else json.dumps(MODEL if model is None else model)
        archive.writestr("net/model.json", text)
    return path


def test_a_program_of_torch_1_0(tmp_path: Path) -> None:
    """The layout with model.json, which torch no longer reads: parameters, buffers, sub-modules; strides, offsets, ties."""
    weight = torch.arange(6.0).reshape(2, 3)
    inner = torch.arange(5.0).as_strided((2, 2), (1, 2), 1)
    expected = {"weight": weight, "tied": weight, "count": torch.tensor(9), "inner.weight": inner}
    path = old_program(tmp_path / "old.pt")
    assert_programs_state_dict(path, expected, tmp_path)
    row = ckpt_tools.inspect(path).tensors[0]
    assert (row["requires_grad"], row["kind"], row["device"]) == (True, "parameter", "cpu")
    with pytest.raises(ObjectsError, match="TorchScript program"):
        ckpt_tools.convert(path, tmp_path / "kept.pth", objects="keep")


def changed(**rows: Any) -> dict[str, Any]:
    """The model with its first tensor changed."""
    return {**MODEL, "tensors": [{**MODEL["tensors"][0], **rows}, *MODEL["tensors"][1:]]}  # type: ignore[index]


@pytest.mark.parametrize(
    ("model", "error", "message"),
    [
        ("{", ZipError, "malformed"),
        ("[]", ZipError, "malformed"),
        ('{"tensors": []}', ZipError, "malformed"),
        ({**MODEL, "tensors": []}, ZipError, "malformed"),
        (changed(data={"key": "tensors/none"}), ZipError, "not in the file"),
        (changed(dataType="STRING"), TensorError, "unknown type 'STRING'"),
        (changed(dims=["2", "300"]), TensorError, "outside its storage"),
        (changed(offset="-1"), TensorError, "negative"),
        (changed(dims=["9" * 5000]), ZipError, "malformed"),
        (changed(offset=float("inf")), ZipError, "malformed"),
        ('{"tensors": [], "tensors": []}', ZipError, "'tensors' is there twice"),
        ('{"mainModule": ' + '{"submodules": [' * 5000 + "]}" * 5000 + "}", ZipError, "malformed"),
    ],
)
def test_a_damaged_model_json_is_refused(tmp_path: Path, model: Any, error: type[CkptError], message: str) -> None:
    """Whatever is wrong in model.json gives our own error."""
    with pytest.raises(error, match=message):
        ckpt_tools.inspect(old_program(tmp_path / "old.pt", model))


def test_a_program_without_its_modules_is_refused(tmp_path: Path) -> None:
    """`constants.pkl` without `data.pkl` is half a program."""
    path = program(tmp_path / "net.pt", Wrapper())
    with zipfile.ZipFile(path) as whole, zipfile.ZipFile(tmp_path / "half.pt", "w") as half:
        for name in whole.namelist():
            if not name.endswith("data.pkl"):
                half.writestr(name, whole.read(name))
    with pytest.raises(ZipError, match=r"no data\.pkl"):
        ckpt_tools.inspect(tmp_path / "half.pt")


# --- archives of checkpoints


def saved(value: Any) -> bytes:
    """What torch.save writes."""
    buffer = io.BytesIO()
    torch.save(value, buffer)
    return buffer.getvalue()


POLICY, OPTIMIZER = {"net.weight": torch.arange(4.0), "net.bias": torch.ones(1)}, {"state": {}, "param_groups": [{"lr": 0.1}]}


def bundle(path: Path, members: dict[str, bytes], compression: int = zipfile.ZIP_STORED) -> Path:
    """An archive as stable-baselines3 writes it."""
    with zipfile.ZipFile(path, "w", compression) as archive:
        for name, data in members.items():
            archive.writestr(name, data)
    return path


LEGACY = legacy(POLICY)
AGENT = {
    "data": json.dumps({"gamma": 0.99, "policy_class": {":serialized:": "gAWV"}, "shape": [1, 2]}).encode(),
    "policy.pth": saved(POLICY),
    "policy.optimizer.pth": saved(OPTIMIZER),
    "pytorch_variables.pth": saved({"log_std": torch.zeros(3)}),
    "_stable_baselines3_version": b"2.6.0",
    "blob": b"\xff\x00",
}


def test_an_agent_is_one_checkpoint(tmp_path: Path) -> None:
    """Each member is a subtree under its name, JSON plain values, a pickle inside it text; storages stay apart."""
    path = bundle(tmp_path / "agent.zip", AGENT)
    found = ckpt_tools.inspect(path)
    assert found.container == "zip-bundle"
    assert [row["where"] for row in found.state_dicts] == [["policy.pth"], ["pytorch_variables.pth"]]
    assert found.values["data.gamma"] == 0.99
    assert found.values["data.policy_class.:serialized:"] == "gAWV"
    assert found.weights_only["loads"] is False
    ckpt_tools.convert(path, tmp_path / "out.pth", verify=True)
    loaded = torch.load(tmp_path / "out.pth", weights_only=False)
    assert list(loaded) == list(AGENT)
    assert_same(loaded["policy.pth"], POLICY)
    assert_same(loaded["policy.optimizer.pth"], OPTIMIZER)
    assert loaded["pytorch_variables.pth"]["log_std"].tolist() == [0, 0, 0]
    assert loaded["blob"] == b"\xff\x00"


def test_a_member_is_selected_by_its_name(tmp_path: Path) -> None:
    """`--select policy.pth` takes the policy, though the name has a dot in it."""
    path = bundle(tmp_path / "agent.zip", AGENT)
    ckpt_tools.convert(path, tmp_path / "out.safetensors", select="policy.pth")
    assert [row["name"] for row in ckpt_tools.inspect(tmp_path / "out.safetensors").tensors] == list(POLICY)
    assert element_bytes(load_state_dict(path, select="policy.pth")["net.weight"]) == element_bytes(POLICY["net.weight"])


def test_damage_inside_a_member_is_found(tmp_path: Path) -> None:
    """A byte changed in a member's tensor fails --verify, by the member's own checksum."""
    data = bytearray(AGENT["policy.pth"])
    at = data.index(POLICY["net.weight"].numpy().tobytes())
    data[at] ^= 1
    path = bundle(tmp_path / "agent.zip", {**AGENT, "policy.pth": bytes(data)})
    with pytest.raises(CkptError, match="CRC-32"):
        ckpt_tools.convert(path, tmp_path / "out.pth", verify=True)


@pytest.mark.parametrize(
    ("members", "error", "message"),
    [
        ({"a.zip": b"PK\x03\x04 cut"}, ZipError, "directory at the end"),
        ({"policy.pth": AGENT["policy.pth"], "net.pth": LEGACY[:-3]}, DamagedFileError, r"The member 'net\.pth': .*cut off"),
    ],
)
def test_bundles_that_are_refused(tmp_path: Path, members: dict[str, bytes], error: type[CkptError], message: str) -> None:
    """Damaged members, which are named."""
    with pytest.raises(error, match=message):
        ckpt_tools.inspect(bundle(tmp_path / "agent.zip", members))


@pytest.mark.parametrize("compression", [zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED], ids=["stored", "deflated"])
def test_members_of_every_kind(tmp_path: Path, compression: int) -> None:
    """Checkpoints of every container in an archive are found, packed or not, in folders or not, with the same bits."""
    arrays = io.BytesIO()
    np.savez(arrays, w=np.arange(6.0).reshape(2, 3))
    members = {
        "new.pth": saved(POLICY), "old/old.pth": LEGACY, "old/m.safetensors": safetensors_bytes(POLICY),
        "a.npz": arrays.getvalue(), "p.pkl": pickle.dumps({"x": torch.ones(2)}),
        "config.json": b'{"a": [1]}', "odd.pkl": b"\x80\x04odd",
    }  # fmt: skip
    path = bundle(tmp_path / "all.zip", members, compression)
    found = ckpt_tools.inspect(path)
    assert found.container == "zip-bundle"
    assert [row["where"] for row in found.state_dicts] == [[name] for name in members][:5]
    assert any("odd.pkl" in finding.found for finding in found.findings)
    report = ckpt_tools.convert(path, tmp_path / "out.pth", objects="plain", verify=True)
    assert not any(note.code == "no-checksums" for note in report.notes)
    loaded = torch.load(tmp_path / "out.pth", weights_only=True)
    assert list(loaded) == list(members)
    for name in ("new.pth", "old/old.pth", "old/m.safetensors"):
        assert {key: element_bytes(tensor) for key, tensor in loaded[name].items()} == {
            key: element_bytes(tensor) for key, tensor in POLICY.items()
        }
    assert torch.equal(loaded["a.npz"]["w"], torch.arange(6.0, dtype=torch.float64).view(2, 3))
    assert loaded["config.json"] == {"a": [1]}
    assert ckpt_tools.check(path).records >= len(members)


def test_a_packed_folder_of_weights(tmp_path: Path) -> None:
    """One checkpoint in one folder of a deflated archive is fitted into a model, and becomes one safetensors file."""
    path = bundle(tmp_path / "weights.zip", {"w/model.pth": saved(POLICY), "w/readme.txt": b"hello"}, zipfile.ZIP_DEFLATED)
    assert_same(load_state_dict(path), POLICY)
    ckpt_tools.convert(path, tmp_path / "out.safetensors")
    assert [row["name"] for row in ckpt_tools.inspect(tmp_path / "out.safetensors").tensors] == list(POLICY)
    fixes = [finding.fix for finding in ckpt_tools.inspect(path).findings]
    assert any(fix.endswith("weights.fixed.pth --objects plain") for fix in fixes)


def test_what_is_no_checkpoint_and_large_is_left_out(tmp_path: Path) -> None:
    """A member that is too large to be a value is not kept, and that is said; so is what comes after too many of them."""
    members = {"policy.pth": AGENT["policy.pth"], "big": bytes(17 << 20)} | {f"{i}": bytes(15 << 20) for i in range(3)}
    found = ckpt_tools.inspect(bundle(tmp_path / "agent.zip", members, zipfile.ZIP_DEFLATED))
    left = [finding.found for finding in found.findings if finding.code == "left-out"]
    assert ["'big', 17825792 bytes" in text for text in left] == [True, False, False]
    assert "'1'" in left[1]


def test_a_json_of_many_nodes_stays_text(tmp_path: Path) -> None:
    """A JSON member that would make more nodes than its text is worth is kept as the text that it is."""
    text = "[" + "[]," * (1 << 20) + "[]]"
    path = bundle(tmp_path / "agent.zip", {"policy.pth": AGENT["policy.pth"], "data": text.encode()}, zipfile.ZIP_DEFLATED)
    with open_checkpoint(path) as checkpoint:
        assert value_at(checkpoint.root, "data") == text


def test_a_bomb_of_a_member_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A deflated member is inflated up to a multiple of the file and no further; a disk that is full is one sentence."""
    path = bundle(tmp_path / "bomb.zip", {"a.pth": saved({"w.w": torch.zeros(30 << 20)})}, zipfile.ZIP_DEFLATED)
    with raised(inflated=64 << 20), pytest.raises(LimitError, match=r"deflated records come to 1258\d+ bytes"):
        ckpt_tools.inspect(path)
    path = bundle(tmp_path / "fine.zip", {"a.pth": saved({"w.w": torch.zeros(1 << 20)})}, zipfile.ZIP_DEFLATED)
    assert len(ckpt_tools.inspect(path).tensors) == 1

    def full(*_: Any, **__: Any) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr("ckpt_tools.formats.zip.bundle.tempfile.TemporaryFile", full)
    with pytest.raises(LimitError, match="temporary file") as caught:
        ckpt_tools.inspect(path)
    assert "TMPDIR" in caught.value.fix


def test_a_server_that_fails_under_an_inflated_member_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A timeout is an OSError of Python's too, and no fault of the temporary file."""
    path = bundle(tmp_path / "fine.zip", {"a.pth": saved({"w.w": torch.zeros(1 << 20)})}, zipfile.ZIP_DEFLATED)

    def late(*_: Any) -> None:
        raise RemoteTimeoutError("No whole answer came in time.")

    monkeypatch.setattr("ckpt_tools.formats.zip.bundle.torch_zip.record_content", late)
    with pytest.raises(RemoteTimeoutError):
        ckpt_tools.inspect(path)


def test_the_temporary_file_goes_with_the_checkpoint(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The members of an archive share one file, which is closed when nothing refers to the checkpoint any more."""
    made: list[Any] = []
    make = tempfile.TemporaryFile

    def kept(**options: Any) -> Any:
        made.append(make(**options))
        return made[-1]

    monkeypatch.setattr("ckpt_tools.formats.zip.bundle.tempfile.TemporaryFile", kept)
    path = bundle(tmp_path / "a.zip", {"a.pth": saved(POLICY), "b.pth": LEGACY}, zipfile.ZIP_DEFLATED)
    checkpoint = open_checkpoint(path)
    assert [file.closed for file in made] == [False]
    checkpoint.close()
    del checkpoint
    gc.collect()
    assert made[0].closed


def test_a_zip_of_other_zips_is_refused(tmp_path: Path) -> None:
    """Members that are programs or no checkpoints at all are named."""
    inner = program(tmp_path / "net.pt", Wrapper()).read_bytes()
    with pytest.raises(UnsupportedContainerError, match=r"'net\.pt'"):
        ckpt_tools.inspect(bundle(tmp_path / "a.zip", {"net.pt": inner}))
    with pytest.raises(UnsupportedContainerError, match=r"not one that torch\.save wrote"):
        ckpt_tools.inspect(bundle(tmp_path / "b.zip", {"readme.txt": b"text"}))


def test_an_agent_goes_to_safetensors_one_part_at_a_time(tmp_path: Path) -> None:
    """Two state dicts are too many for safetensors; the error names them."""
    with pytest.raises(ContainerLimitError, match=r"policy\.pth"):
        ckpt_tools.convert(bundle(tmp_path / "agent.zip", AGENT), tmp_path / "out.safetensors")


def test_members_of_both_byte_orders_are_refused(tmp_path: Path) -> None:
    """Bytes of one member would have to be swapped and those of another not: said by name, not mixed."""
    torch.save({"a.w": torch.arange(3.0)}, tmp_path / "little.pth")
    big_endian(tmp_path / "little.pth", tmp_path / "big.pth", {"0": 4})
    members = {name: (tmp_path / name).read_bytes() for name in ("little.pth", "big.pth")}
    with pytest.raises(ZipError, match="of both byte orders"):
        ckpt_tools.inspect(bundle(tmp_path / "both.zip", members))
    found = ckpt_tools.convert(bundle(tmp_path / "one.zip", {"big.pth": members["big.pth"]}), tmp_path / "out.pth")
    assert found.tensors == 1
    assert torch.load(tmp_path / "out.pth", weights_only=True)["big.pth"]["a.w"].tolist() == [0, 1, 2]


def test_a_storage_of_odd_bytes_is_refused(tmp_path: Path) -> None:
    """A record that does not hold whole elements would be written with a count that is not its own."""
    path = old_program(tmp_path / "old.pt", records=RECORDS | {"tensors/0": RECORDS["tensors/0"] + b"12"})
    with pytest.raises(ZipError, match="whole elements"):
        ckpt_tools.inspect(path)


def test_a_program_has_no_byte_order(tmp_path: Path) -> None:
    """torch.jit.load takes the elements as they lie, whatever the record `byteorder` says."""
    path, other = tmp_path / "program.pt", tmp_path / "big.pt"
    torch.jit.script(nn.Linear(3, 2)).save(path)
    with zipfile.ZipFile(path) as old, zipfile.ZipFile(other, "w") as new:
        for name in old.namelist():
            new.writestr(name, b"big" if name.endswith("/byteorder") else old.read(name))
    loaded = torch.jit.load(other).state_dict()
    assert all(torch.equal(tensor, loaded[name]) for name, tensor in load_state_dict(other).items())
    assert torch.equal(loaded["weight"], torch.jit.load(path).state_dict()["weight"])


class Held(nn.Module):
    """One buffer."""

    def __init__(self, value: torch.Tensor) -> None:
        super().__init__()
        self.register_buffer("w", value)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x


def numbers(dtype: torch.dtype = torch.float32) -> torch.Tensor:
    """Six of them."""
    return torch.arange(6.0).reshape(2, 3).to(dtype)


KINDS: dict[str, Callable[[], torch.Tensor]] = {
    "float8": lambda: numbers(torch.float8_e8m0fnu),
    "float8, transposed": lambda: numbers(torch.float8_e5m2).t(),
    "uint16": lambda: numbers(torch.uint16),
    "uint64": lambda: numbers(torch.uint64),
    "bits8": lambda: numbers(torch.uint8).view(torch.bits8),
    "complex32": lambda: numbers(torch.complex32),
    "conjugate": lambda: numbers(torch.complex64).conj(),
    "negative": lambda: numbers(torch.complex64).conj().imag,
    "sparse": lambda: numbers().to_sparse(),
    "sparse rows": lambda: numbers().to_sparse_csr(),
}


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.filterwarnings("ignore:Sparse CSR:UserWarning", "ignore:ComplexHalf:UserWarning")
def test_buffers_of_every_kind(kind: str, tmp_path: Path) -> None:
    """C++ has a class of storages for each dtype, tags the dict of bits, and writes sparse tensors in a form of its own."""
    value, path, target = KINDS[kind](), tmp_path / "in.pt", tmp_path / "out.pth"
    torch.jit.save(torch.jit.script(Held(value)), path)
    theirs = torch.jit.load(path).state_dict()["w"]
    (row,) = ckpt_tools.inspect(path).tensors
    assert (row["name"], row["dtype"], row["shape"]) == ("w", str(value.dtype)[6:], list(value.shape))
    assert row["stride"] == (list(theirs.stride()) if theirs.layout is torch.strided else None)
    ckpt_tools.convert(path, target, objects="plain")
    ours = torch.load(target)["w"]
    assert (ours.dtype, ours.shape, ours.layout) == (theirs.dtype, theirs.shape, theirs.layout)
    one, other = (found.to_dense() if found.layout is not torch.strided else found for found in (ours, theirs))
    assert element_bytes(one) == element_bytes(other)


def test_a_buffer_on_the_meta_device(tmp_path: Path) -> None:
    """Its record is empty, and it has no values."""
    torch.jit.save(torch.jit.script(Held(torch.empty(2, 3, device="meta").t())), tmp_path / "in.pt")
    assert torch.jit.load(tmp_path / "in.pt").state_dict()["w"].is_meta
    (row,) = ckpt_tools.inspect(tmp_path / "in.pt").tensors
    assert (row["name"], row["kind"], row["shape"], row["stride"]) == ("w", "meta", [3, 2], [1, 3])
    assert ckpt_tools.check(tmp_path / "in.pt", digest=True).digests == []
