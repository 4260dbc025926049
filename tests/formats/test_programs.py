"""TorchScript programs: torch.jit is the oracle."""

import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Final

import pytest
import torch
from torch import nn

import ckpt_tools
from ckpt_tools import open_checkpoint
from ckpt_tools.errors import DamagedFileError, ObjectsError, TensorError, UnsupportedContainerError
from ckpt_tools.torch import load_state_dict
from tests.support.graphs import assert_same, element_bytes
from tests.support.zips import called_big, rewrite

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
    torch.jit.save(torch.jit.script(model), path)
    return path


def jit_state_dict(path: Path) -> dict[str, torch.Tensor]:
    """What torch itself takes out of a program."""
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


@pytest.mark.filterwarnings("ignore::torch.jit.TracerWarning")
def test_constants_of_the_code_are_counted(tmp_path: Path) -> None:
    """Tensors that tracing baked into the code belong to the program, not to its state."""
    torch.jit.save(torch.jit.trace(lambda x: x + torch.tensor([1.5, 2.5]), torch.ones(2)), str(tmp_path / "add.pt"))
    found = ckpt_tools.inspect(tmp_path / "add.pt")
    assert (found.tensors, found.state_dicts) == ([], [])
    assert "1 constants of 8 bytes" in next(row.found for row in found.findings if row.code == "torchscript-program")


def test_a_traced_program(tmp_path: Path) -> None:
    """Tracing writes mangled class names; they change nothing."""
    model = nn.Sequential(nn.Linear(2, 3), nn.Sequential(nn.Linear(3, 3), nn.BatchNorm1d(3)), nn.Linear(3, 1)).eval()
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

    def edited(name: str, content: bytes) -> bytes:
        return content.replace(old, new) if name.endswith("batchnorm.py") else content

    rewrite(program(tmp_path / "whole.pt", Net().features), tmp_path / "other.pt", change=edited)
    with pytest.raises(DamagedFileError, match=r"not written as torch writes|is not in the program's code|not in its"):
        open_checkpoint(tmp_path / "other.pt")


class Optionals(nn.Module):
    """A buffer that may be absent, which torch.jit.load leaves out of the state dict, and a constant."""

    mean: torch.Tensor | None
    text: Final[str]

    def __init__(self) -> None:
        super().__init__()
        self.text = "(\n"
        self.register_buffer("mean", torch.ones(2))
        self.layers = nn.Sequential(nn.Linear(2, 2))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.layers(x)


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


def test_a_program_of_torch_1_0_is_refused(tmp_path: Path) -> None:
    """The layout with model.json, which torch no longer reads either."""
    with zipfile.ZipFile(tmp_path / "old.pt", "w") as archive:
        archive.writestr("net/version", "1\n")
        archive.writestr("net/model.json", '{"protoVersion": "2", "mainModule": {"name": "Net"}, "tensors": []}')
    with pytest.raises(UnsupportedContainerError, match=r"not one that torch\.save wrote"):
        ckpt_tools.inspect(tmp_path / "old.pt")


def test_a_program_without_its_modules_is_refused(tmp_path: Path) -> None:
    """`constants.pkl` without `data.pkl` is half a program."""
    path, half = program(tmp_path / "net.pt", nn.Linear(2, 2)), tmp_path / "half.pt"
    rewrite(path, half, change=lambda name, data: None if name.endswith("data.pkl") else data)
    with pytest.raises(DamagedFileError, match=r"no data\.pkl"):
        ckpt_tools.inspect(half)


def test_a_program_has_no_byte_order(tmp_path: Path) -> None:
    """torch.jit.load takes the elements as they lie, whatever the record `byteorder` says."""
    path, other = program(tmp_path / "program.pt", nn.Linear(3, 2)), tmp_path / "big.pt"
    called_big(path, other)
    loaded = jit_state_dict(other)
    assert all(torch.equal(tensor, loaded[name]) for name, tensor in load_state_dict(other).items())
    assert torch.equal(loaded["weight"], jit_state_dict(path)["weight"])


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
    "float8": lambda: numbers(torch.float8_e8m0fnu), "float8, transposed": lambda: numbers(torch.float8_e5m2).t(),
    "uint16": lambda: numbers(torch.uint16), "uint64": lambda: numbers(torch.uint64),
    "bits8": lambda: numbers(torch.uint8).view(torch.bits8), "complex32": lambda: numbers(torch.complex32),
}  # fmt: skip


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.filterwarnings("ignore:ComplexHalf:UserWarning")
def test_buffers_of_every_kind(kind: str, tmp_path: Path) -> None:
    """C++ has a class of storages for each dtype."""
    value, path, target = KINDS[kind](), tmp_path / "in.pt", tmp_path / "out.pth"
    theirs = jit_state_dict(program(path, Held(value)))["w"]
    (row,) = ckpt_tools.inspect(path).tensors
    assert (row["name"], row["dtype"], row["shape"]) == ("w", str(value.dtype)[6:], list(value.shape))
    assert row["stride"] == list(theirs.stride())
    ckpt_tools.convert(path, target, objects="plain")
    ours = torch.load(target)["w"]
    assert (ours.dtype, ours.shape) == (theirs.dtype, theirs.shape)
    assert element_bytes(ours) == element_bytes(theirs)


RARE: dict[str, Callable[[], torch.Tensor]] = {
    "conjugate": lambda: numbers(torch.complex64).conj(), "negative": lambda: numbers(torch.complex64).conj().imag,
    "sparse": lambda: numbers().to_sparse(), "meta": lambda: torch.empty(2, 3, device="meta"),
}  # fmt: skip


@pytest.mark.parametrize("kind", RARE)
def test_rare_buffers_are_refused(kind: str, tmp_path: Path) -> None:
    """What C++ writes in a form of its own, or without values."""
    with pytest.raises(TensorError):
        ckpt_tools.inspect(program(tmp_path / "in.pt", Held(RARE[kind]())))


def test_ids_of_six_parts(tmp_path: Path) -> None:
    """Of PyTorch 1.2 and 1.3: a None, the metadata of a view, behind the size of every storage."""
    made = program(tmp_path / "new.pt", nn.Linear(3, 2))

    def older(name: str, data: bytes) -> bytes:
        if not name.endswith("data.pkl"):
            return data
        assert data.count(b"tQ") == 2
        return data.replace(b"tQ", b"NtQ")

    rewrite(made, tmp_path / "old.pt", change=older)
    assert_programs_state_dict(tmp_path / "old.pt", jit_state_dict(tmp_path / "old.pt"), tmp_path)
