"""Pickled modules, tensors of other classes, unusual tensors, arrays of NumPy: what `--objects` makes of them."""

import io
import pickle
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any, cast

import numpy as np
import pytest
import torch
from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.nn.utils import prune
from torch.optim.swa_utils import AveragedModel

import ckpt_tools
from ckpt_tools import limits
from ckpt_tools.errors import CkptError, ConvertError, LimitError, NothingMatchedError, ObjectsError
from tests.edit.test_objects import filled, plain, saved
from tests.support import classes
from tests.support.commands import ckpt
from tests.support.graphs import assert_same, element_bytes


class Odd(nn.Module):
    """Tables with empty places, a hidden buffer, a module in a list, a name that is no identifier."""

    def __init__(self) -> None:
        super().__init__()
        self.last = nn.Linear(2, 2)
        self.first = nn.Parameter(torch.ones(2))
        self.register_parameter("absent", None)
        self.register_buffer("none", None)
        self.register_buffer("hidden", torch.ones(3), persistent=False)
        self.register_module("nothing", None)
        self.unregistered = [nn.Linear(1, 1)]
        self.add_module("odd name-0", nn.LayerNorm(2))


def pruned() -> nn.Module:
    """A layer whose weight is a mask and an original."""
    layer = nn.Linear(3, 4)
    prune.l1_unstructured(layer, "weight", 0.5)
    return layer


def strided() -> nn.Module:
    layer = nn.Linear(4, 3)
    layer.weight = nn.Parameter(torch.randn(4, 3).t())
    return layer


MODULES: dict[str, Callable[[], nn.Module]] = {
    "nested": lambda: nn.Sequential(nn.Sequential(nn.Linear(2, 3)), nn.Sequential(nn.Conv2d(1, 2, 3), nn.BatchNorm2d(2))),
    "odd": Odd,
    "dict of lists": lambda: nn.ModuleDict({"x": nn.ModuleList([nn.Linear(1, 2)]), "y": nn.ModuleDict({"q": nn.PReLU()})}),
    "parameter list": lambda: nn.ParameterList([nn.Parameter(torch.ones(2)), torch.zeros(3)]),
    "parameter dict": lambda: nn.ParameterDict({"b": nn.Parameter(torch.ones(2)), "a": torch.ones(1)}),
    "lstm": lambda: nn.LSTM(3, 4, num_layers=2, bidirectional=True, proj_size=2),
    "weight norm": lambda: nn.utils.weight_norm(nn.Linear(3, 4)),
    "spectral norm": lambda: nn.utils.spectral_norm(nn.Linear(3, 4)),
    "pruned": pruned,
    "strided": strided,
    "channels last": lambda: cast("Any", nn.Conv2d(3, 4, 3)).to(memory_format=torch.channels_last),
    "transformer": lambda: nn.Transformer(8, 2, 1, 1, 16),
    "attention": lambda: nn.MultiheadAttention(4, 2, kdim=3, vdim=5, add_bias_kv=True),
    "averaged": lambda: AveragedModel(nn.Linear(2, 2)),
    "frozen half": lambda: nn.Sequential(nn.Linear(2, 2)).half().requires_grad_(False),
    "instance norm": lambda: nn.InstanceNorm2d(3, affine=True, track_running_stats=True),
    "compiled": lambda: cast("nn.Module", torch.compile(nn.Linear(2, 2), backend="eager")),
    "traced": lambda: torch.fx.symbolic_trace(nn.Sequential(nn.Sequential(nn.Linear(2, 3)), nn.BatchNorm1d(3))),
    "checkpointed": lambda: nn.Sequential(checkpoint_wrapper(nn.Linear(2, 2))),
    "with buffers": lambda: nn.BatchNorm2d(2, affine=False),
}


@pytest.mark.filterwarnings("ignore:.*weight_norm.*", "ignore:.*torch.jit.*", "ignore:enable_nested_tensor")
@pytest.mark.parametrize("container", ["torch-zip", "torch-legacy"])
@pytest.mark.parametrize("name", MODULES)
def test_the_names_of_every_kind_of_module(tmp_path: Path, name: str, container: str) -> None:
    """What is listed, loaded and written of a pickled module is what state_dict() gives: names, order, bits, ties."""
    torch.manual_seed(0)
    path = tmp_path / "in.pth"
    torch.save(MODULES[name](), path, _use_new_zipfile_serialization=container == "torch-zip")
    expected = torch.load(path, weights_only=False).state_dict()
    with ckpt_tools.open_checkpoint(path) as checkpoint:
        assert checkpoint.container == container
        assert [found.names for found in checkpoint.state_dicts] == [list(expected)]
    ckpt_tools.convert(path, tmp_path / "out.pth", objects="plain", drop="unregistered" if name == "odd" else ())
    loaded = torch.load(tmp_path / "out.pth", weights_only=True)
    assert list(loaded) == list(expected)
    assert_same(dict(loaded), dict(expected))


def test_modules_that_hold_one_another_end(tmp_path: Path) -> None:
    """A module inside itself has endless names: refused, not waited for."""
    model = nn.Module()
    model._modules["self"] = model
    model.w = nn.Parameter(torch.ones(1))
    torch.save(model, tmp_path / "in.pth")
    with pytest.raises(LimitError, match="hold one another"):
        ckpt_tools.convert(tmp_path / "in.pth", tmp_path / "out.pth", objects="plain")


def test_subclasses_and_attributes_of_tensors(tmp_path: Path) -> None:
    """A tensor of a class of one's own becomes a plain tensor; plain attributes stay, on Parameters too."""
    labelled = nn.Parameter(torch.ones(2))
    labelled.label, labelled.kind = "head", classes.Colour.RED  # type: ignore[attr-defined]
    data = {"a.w": torch.ones(2).as_subclass(classes.OwnTensor), "b.w": labelled}
    torch.save(data, tmp_path / "in.pth")
    report = ckpt_tools.convert(tmp_path / "in.pth", tmp_path / "out.pth", objects="plain")
    loaded = torch.load(tmp_path / "out.pth", weights_only=True)
    assert type(loaded["a.w"]) is torch.Tensor
    assert vars(loaded["b.w"]) == {"label": "head", "kind": 1}
    assert ("tests.support.classes.OwnTensor", "tensor") in [(fate.name, fate.became) for fate in report.objects]
    ckpt_tools.convert(tmp_path / "in.pth", tmp_path / "drop.pth", objects="drop")
    dropped = torch.load(tmp_path / "drop.pth", weights_only=True)
    assert [element_bytes(value) for value in dropped.values()] == [element_bytes(value) for value in loaded.values()]


class Wrapped(torch.Tensor):
    """A tensor around another, with no storage of its own, as torchao's are."""

    inner: torch.Tensor  # type: ignore[assignment]

    @staticmethod
    def __new__(cls, inner: torch.Tensor) -> "Wrapped":
        made: Wrapped = torch.Tensor._make_wrapper_subclass(cls, inner.shape, dtype=torch.float32)
        made.inner, made.scale = inner, 0.5  # type: ignore[attr-defined]
        return made

    @classmethod
    def __torch_dispatch__(cls, function: Any, kinds: Any, args: Any = (), kwargs: Any = None) -> Any:  # type: ignore[override]
        """Nothing can be done with it but to detach it."""
        return args[0]


def test_tensors_that_need_their_class(tmp_path: Path) -> None:
    """Of a tensor around others the others are left with plain, nothing with drop; a jagged nested one likewise."""
    inner = torch.arange(6, dtype=torch.int8).view(2, 3)
    jagged = torch.nested.nested_tensor([torch.ones(2, 3), torch.zeros(1, 3)], layout=torch.jagged)
    data = {"a.w": Wrapped(inner), "b.w": nn.Parameter(Wrapped(inner), requires_grad=False), "j": jagged, "c.w": torch.ones(1)}
    torch.save(data, tmp_path / "in.pth")
    found = ckpt_tools.inspect(tmp_path / "in.pth")
    assert [(row["kind"], row["shape"], row["dtype"]) for row in found.tensors[:2]] == [("subclass", [2, 3], "float32")] * 2
    assert found.totals["dtypes"] == {"float32": 3, "unknown": 1}  # only its class knows what a jagged one is
    ckpt_tools.convert(tmp_path / "in.pth", tmp_path / "out.pth", objects="plain")
    loaded = torch.load(tmp_path / "out.pth", weights_only=True)
    assert list(loaded) == list(data)
    assert torch.equal(loaded["a.w"]["inner"], inner)
    assert loaded["a.w"]["scale"] == 0.5
    assert torch.equal(loaded["j"]["_values"], jagged.values())
    ckpt_tools.convert(tmp_path / "in.pth", tmp_path / "drop.pth", objects="drop")
    assert list(torch.load(tmp_path / "drop.pth", weights_only=True)) == ["c.w"]
    ckpt_tools.convert(tmp_path / "in.pth", tmp_path / "keep.pth", objects="keep")
    assert torch.equal(torch.load(tmp_path / "keep.pth", weights_only=False)["b.w"].inner, inner)


def test_nested_tensors_and_torch_legacy(tmp_path: Path) -> None:
    """torch cannot load a nested tensor from torch-legacy, whoever wrote it: refused there, and said of its own files."""
    data = {"n": torch.nested.nested_tensor([torch.zeros(2), torch.ones(3)])}
    torch.save(data, tmp_path / "in.pth")
    with pytest.raises(ConvertError, match="nested tensor, which torch saves in torch-legacy and cannot load"):
        ckpt_tools.convert(tmp_path / "in.pth", tmp_path / "out.pth", format="pth-legacy")
    torch.save(data, tmp_path / "old.pth", _use_new_zipfile_serialization=False)
    assert not ckpt_tools.inspect(tmp_path / "old.pth").weights_only["loads"]
    ckpt_tools.convert(tmp_path / "old.pth", tmp_path / "new.pth", objects="plain")
    assert torch.load(tmp_path / "new.pth", weights_only=True)["n"].unbind()[1].tolist() == [1, 1, 1]


def test_nothing_with_a_plain_form_is_left(tmp_path: Path) -> None:
    """An object alone, without any content, gives an error and no file."""
    torch.save(classes.Plain(), tmp_path / "in.pth")
    with pytest.raises(NothingMatchedError):
        ckpt_tools.convert(tmp_path / "in.pth", tmp_path / "out.pth", objects="plain")


def test_nothing_is_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """No class of the file is made, no state set, no module of it imported."""
    path = saved(tmp_path, [filled(classes.Stateful, data=[1]), classes.Reduced(1)])

    def boom(*args: Any) -> Any:
        raise AssertionError("run")

    monkeypatch.setattr(classes.Stateful, "__setstate__", boom)
    monkeypatch.setattr(classes.Reduced, "__init__", boom)
    for policy in ("plain", "drop", "keep"):
        ckpt_tools.convert(path, tmp_path / "out.pth", objects=policy, allow_dangerous=True, overwrite=True)
    with pytest.raises(CkptError):
        ckpt_tools.convert(path, tmp_path / "out.pth", overwrite=True)


def unusual() -> dict[str, torch.Tensor]:
    dense = torch.eye(3)
    with warnings.catch_warnings():  # torch calls some of these a beta or a prototype
        warnings.simplefilter("ignore")
        return {
            "sparse": dense.to_sparse(),
            "sparse_csr": dense.to_sparse_csr(),
            "sparse_csc": dense.to_sparse_csc(),
            "quantized": torch.quantize_per_tensor(dense, 0.1, 0, torch.qint8),
            "per_channel": torch.quantize_per_channel(dense, torch.tensor([0.1, 0.2, 0.3]), torch.zeros(3), 0, torch.quint8),
            "quantized_4_bits": torch.quantize_per_channel(dense, torch.ones(3), torch.zeros(3), 0, torch.quint4x2),
            "nested": torch.nested.nested_tensor([torch.zeros(2), torch.ones(3)]),
            "complex32": torch.ones(2, dtype=torch.complex32),
        }


@pytest.mark.filterwarnings("ignore:.*(beta|prototype|Sparse|ComplexHalf|TypedStorage).*:UserWarning")
@pytest.mark.parametrize("kind", list(unusual()))
def test_unusual_tensors_stay(tmp_path: Path, kind: str) -> None:
    """Sparse, quantised, nested and complex32 tensors stay as they are, are listed, and refused for safetensors by name."""
    tensor = unusual()[kind]
    loaded, _ = plain(tmp_path, {"m.w": tensor})
    assert_equal_unusual(loaded["m.w"], tensor)
    row = next(row for row in ckpt_tools.inspect(tmp_path / "in.pth").tensors if row["where"][-1] == "m.w")
    assert row["kind"] == kind.partition("_")[0].replace("per", "quantized").replace("complex32", "tensor")
    with pytest.raises(ConvertError, match=r"'?m\.w'?"):
        ckpt_tools.convert(tmp_path / "in.pth", tmp_path / "out.safetensors", select="value", overwrite=True)


@pytest.mark.filterwarnings("ignore:.*Sparse.*:UserWarning")
def test_what_is_not_cast_is_said(tmp_path: Path) -> None:
    """Floats that are sparse or on the meta device keep their dtype: a note names them."""
    tensors = {"a": torch.eye(2).to_sparse(), "b": torch.ones(2), "c": torch.ones(2, device="meta")}
    torch.save(tensors, tmp_path / "in.pth")
    report = ckpt_tools.convert(tmp_path / "in.pth", tmp_path / "out.pth", dtype="bf16")
    notes = {note.code: note.text for note in report.notes}
    assert notes["unusual-kept"] == "a, c: sparse, nested, meta and subclassed tensors keep their dtype."


def assert_equal_unusual(one: torch.Tensor, two: torch.Tensor) -> None:
    assert (one.layout, one.dtype, one.is_quantized, one.is_nested) == (two.layout, two.dtype, two.is_quantized, two.is_nested)
    if two.is_nested:
        assert [part.tolist() for part in one.unbind()] == [part.tolist() for part in two.unbind()]
    elif two.is_quantized:
        assert one.int_repr().tolist() == two.int_repr().tolist()
        assert one.qscheme() == two.qscheme()
    else:
        assert one.to_dense().to(torch.complex64).tolist() == two.to_dense().to(torch.complex64).tolist()


def test_bytes_become_no_more_tensors_than_a_file_has(tmp_path: Path) -> None:
    """Each becomes a tensor with a record of its own where torch 2.4 is to read them, one that is used again in every place."""
    rows = [b"%d" % number for number in range(4000)]
    for name, values in {"several": rows, "one": [rows[0]] * 4000}.items():
        torch.save({"a.w": torch.zeros(2), "x": values}, tmp_path / f"{name}.pth", pickle_protocol=4)
        ckpt_tools.convert(tmp_path / f"{name}.pth", tmp_path / f"{name}.out.pth", objects="plain")
        with limits.raised(nodes=9000), pytest.raises(LimitError, match="tensors") as caught:
            ckpt_tools.convert(tmp_path / f"{name}.pth", tmp_path / "out.pth", objects="plain")
        assert "raise the limit: `limits.raised(nodes=" in caught.value.fix


def test_a_parameter_without_values_is_dropped_and_told(tmp_path: Path) -> None:
    """A lazy layer's has no shape yet; what it is made from is a flag, and no number of the model."""
    torch.save(nn.Sequential(nn.LazyLinear(3), nn.Linear(2, 2)).state_dict(), tmp_path / "lazy.pth")
    report = ckpt_tools.convert(tmp_path / "lazy.pth", tmp_path / "out.pth", objects="plain")
    assert {".".join(map(str, row.where)): row.became for row in report.objects} == {"0.weight": "dropped", "0.bias": "dropped"}
    assert list(torch.load(tmp_path / "out.pth", weights_only=True)) == ["1.weight", "1.bias"]


class Holder:
    """An instance of a class that the file names."""

    def __init__(self, **values: object) -> None:
        self.__dict__.update(values)


def of_python_2(array: np.ndarray[Any, Any]) -> bytes:
    """A dict with an array as Python 2 pickled it: its bytes are a str, by the opcodes U and T."""

    def text(data: bytes) -> bytes:
        return b"U" + bytes([len(data)]) + data if len(data) < 256 else b"T" + len(data).to_bytes(4, "little") + data

    shape = b"(" + b"".join(b"K" + bytes([size]) for size in array.shape) + b"t"
    dtype = b"cnumpy\ndtype\n" + text(array.dtype.str[1:].encode()) + b"K\0K\1\x87R"
    dtype += b"(K\3" + text(array.dtype.str[:1].encode()) + b"NNNJ\xff\xff\xff\xffJ\xff\xff\xff\xffK\0tb"
    made = b"cnumpy.core.multiarray\n_reconstruct\ncnumpy\nndarray\nK\0\x85" + text(b"b") + b"\x87R"
    return b"\x80\2}" + text(b"w") + made + b"(K\1" + shape + dtype + b"\x89" + text(array.tobytes()) + b"tbs."


@pytest.mark.parametrize("kind", ["<f4", ">f4", "<f8", "<i8", "|u1", "|b1", "<f2"])
@pytest.mark.parametrize("first", [0, 200])
def test_arrays_of_python_2(kind: str, first: int, tmp_path: Path) -> None:
    """Whether their bytes can be read as text or not, they are tensors: in inspect, and written with and without --objects."""
    array = np.array([[first, 1, 2], [3, 4, 5]]).astype(kind)
    (tmp_path / "in.pkl").write_bytes(of_python_2(array))
    for name, options in (("a.pth", ()), ("b.pth", ("--objects", "plain")), ("c.safetensors", ())):
        ckpt("convert", tmp_path / "in.pkl", tmp_path / name, *options)
        assert ckpt_tools.inspect(tmp_path / name).totals["tensors"] == 1
    torch.testing.assert_close(
        torch.load(tmp_path / "b.pth")["w"], torch.from_numpy(array.astype(array.dtype.newbyteorder("=")))
    )
    assert "2x3" in ckpt("inspect", tmp_path / "in.pkl").output


@pytest.mark.parametrize("kind", ["M8[s]", "g", [("a", "<f4"), ("b", "<i4")]], ids=str)
@pytest.mark.parametrize("is_array", [True, False])
def test_numpys_values_without_a_plain_form_are_an_error(kind: Any, is_array: bool, tmp_path: Path) -> None:
    """Dates, numbers wider than torch's and structures are named; alone where --drop names them they are left out."""
    odd = np.zeros(2, kind)
    (tmp_path / "in.pkl").write_bytes(pickle.dumps({"w": np.ones(2), "odd": odd if is_array else odd[0]}, 4))
    with pytest.raises(ObjectsError, match=r"would be lost: odd\.\n.*no dates, structures"):
        ckpt_tools.convert(tmp_path / "in.pkl", tmp_path / "out.pth", objects="plain")
    with pytest.raises(ConvertError, match="'odd' is a value of NumPy's"):
        ckpt_tools.convert(tmp_path / "in.pkl", tmp_path / "out.safetensors")
    assert ckpt_tools.convert(tmp_path / "in.pkl", tmp_path / "out.pth", objects="plain", drop="odd").dropped


def test_arrays_with_a_plain_form(tmp_path: Path) -> None:
    """Text becomes lists, a masked array its numbers with their mask; inside an instance inspect counts them."""
    masked = np.ma.array([1.0, 2.0], mask=[False, True])
    text, raw = np.array([["a", "bc"], ["d", ""]]), np.array([b"xy", b"z"])
    held = Holder(w=np.arange(6.0).reshape(2, 3), text=text, raw=raw, masked=masked)
    (tmp_path / "in.pkl").write_bytes(pickle.dumps(held, 4))
    assert "1 array of numbers, 6 elements, inside objects" in ckpt("inspect", tmp_path / "in.pkl").output
    ckpt_tools.convert(tmp_path / "in.pkl", tmp_path / "out.pth", objects="plain")
    made = torch.load(tmp_path / "out.pth")
    assert made["text"] == [["a", "bc"], ["d", ""]]
    assert made["raw"] == ["xy", "z"]
    torch.testing.assert_close(made["w"], torch.arange(6.0, dtype=torch.float64).reshape(2, 3))
    assert made["masked"]["data"].tolist() == [1, 2]
    assert made["masked"]["mask"].tolist() == [False, True]


def test_arrays_of_dill(tmp_path: Path) -> None:
    """dill calls a function of its own around NumPy's: the array is the same tensor."""
    reduced: Any = np.arange(4, dtype="<f4").__reduce__()
    inner = pickle.dumps((*reduced, None), 2)[2:-1]
    (tmp_path / "in.pkl").write_bytes(b"\x80\2cdill._dill\n_create_array\n" + inner + b"R.")
    ckpt_tools.convert(tmp_path / "in.pkl", tmp_path / "out.pth", objects="plain")
    assert torch.load(tmp_path / "out.pth").tolist() == [0, 1, 2, 3]


def test_weights_that_torch_saved_into_bytes(tmp_path: Path) -> None:
    """skorch pickles a file of torch.save as bytes: its tensors are shown, and written as tensors; other bytes stay bytes."""
    file = io.BytesIO()
    torch.save({"module_": {"w": torch.arange(6.0).reshape(2, 3)}}, file)
    held = Holder(lr=0.1, cuda=file.getvalue(), cut=file.getvalue()[:-30], text=b"PK")
    (tmp_path / "in.pkl").write_bytes(pickle.dumps(held))
    assert "2x3" in ckpt("inspect", tmp_path / "in.pkl").output
    ckpt_tools.convert(tmp_path / "in.pkl", tmp_path / "out.pth", objects="plain")
    made = torch.load(tmp_path / "out.pth")
    torch.testing.assert_close(made["cuda"]["module_"]["w"], torch.arange(6.0).reshape(2, 3))
    assert made["text"].tolist() == list(b"PK")
    assert bytes(made["cut"].tolist()) == held.__dict__["cut"]
