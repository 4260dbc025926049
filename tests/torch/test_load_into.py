"""load_into: any file into any model, straight into its memory; everything is checked before anything changes."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import ckpt_tools.torch as ckpt
from ckpt_tools.errors import MatchError, UsageError
from fixtures.make import Network, network
from tests.support.graphs import element_bytes
from tests.support.samples import FIXTURES
from tests.torch.test_torch import NETWORKS, WRAPS
from tests.torch.test_torch import bits as bits_of


def blank_network() -> Network:
    """The network of the fixtures with other values."""
    model = Network()
    with torch.no_grad():
        for tensor in model.state_dict().values():
            tensor.fill_(7)
    return model


def bits(model: nn.Module) -> dict[str, bytes]:
    """The plain names and bytes of a model's tensors."""
    return bits_of(ckpt.unwrap(model.state_dict()))


LENET = bits(network())


@pytest.mark.parametrize(
    ("name", "wrap"), [*((name, "plain") for name in NETWORKS), *(("compiled_parallel", wrap) for wrap in WRAPS)]
)
def test_any_wrapper_into_any_wrapper(name: str, wrap: str) -> None:
    """Whatever wrapped the network in the file goes into whatever wraps it here, buffers included, in place."""
    model = WRAPS[wrap](blank_network())
    places = [tensor.data_ptr() for tensor in model.state_dict().values()]
    report = ckpt.load_into(model, FIXTURES / f"{name}.pth")
    assert report
    assert report.loaded == list(model.state_dict())
    assert bits(model) == LENET
    assert [tensor.data_ptr() for tensor in model.state_dict().values()] == places


def test_ddp_and_the_reverse(tmp_path: Path) -> None:
    """Into DistributedDataParallel, and from what it saves into the plain model and on the meta device."""
    torch.distributed.init_process_group("gloo", store=torch.distributed.HashStore(), rank=0, world_size=1)
    try:
        model = nn.parallel.DistributedDataParallel(blank_network())
        assert ckpt.load_into(model, FIXTURES / "compiled.pth")
        assert bits(model) == LENET
        torch.save(model.state_dict(), tmp_path / "ddp.pth")
        with pytest.raises(UsageError, match="before wrapping"):
            ckpt.load_into(model, tmp_path / "ddp.pth", assign=True)
    finally:
        torch.distributed.destroy_process_group()
    plain = blank_network()
    assert ckpt.load_into(plain, tmp_path / "ddp.pth")
    assert bits(plain) == LENET


# --- meta, assign


@pytest.mark.parametrize("wrap", ["plain", "compiled", "parallel"])
def test_a_model_on_the_meta_device(wrap: str) -> None:
    with torch.device("meta"):
        model = WRAPS[wrap](Network())
    next(iter(model.parameters())).requires_grad_(False)
    assert ckpt.load_into(model, FIXTURES / "ddp.pth")
    assert bits(model) == LENET
    parameters = list(model.parameters())
    assert [parameter.requires_grad for parameter in parameters] == [False] + [True] * (len(parameters) - 1)
    assert all(type(parameter) is nn.Parameter and parameter.is_leaf for parameter in parameters)


def test_what_stays_on_the_meta_device_is_said() -> None:
    """A buffer that no checkpoint holds cannot be filled; the report names it."""
    with torch.device("meta"):
        model = Network()
        model.register_buffer("table", torch.zeros(3), persistent=False)
    assert "table" in str(ckpt.load_into(model, FIXTURES / "ddp.pth"))


def test_assign_takes_the_files_dtype(tmp_path: Path) -> None:
    """assign=True puts new tensors in place; without it values are cast into the old ones."""
    torch.save({name: value.to(torch.bfloat16) for name, value in network().state_dict().items() if value.is_floating_point()},
               tmp_path / "m.pth")  # fmt: skip
    model, other = blank_network(), blank_network()
    old = model.fc1.weight
    report = ckpt.load_into(model, tmp_path / "m.pth", allow_missing=["*num_batches_tracked"])
    assert model.fc1.weight is old
    assert report.cast == {"bfloat16 -> float32": 10}
    assert torch.equal(old, network().fc1.weight.bfloat16().float())
    ckpt.load_into(other, tmp_path / "m.pth", assign=True, allow_missing=["*num_batches_tracked"])
    assert other.fc1.weight.dtype is torch.bfloat16


def test_what_a_cast_loses_is_told(tmp_path: Path) -> None:
    """Values beyond the model's dtype become what torch makes of them, and the report says how many of which tensor."""
    torch.save({"weight": torch.tensor([[1e30, 1e-30, 1.0]]), "bias": torch.ones(1)}, tmp_path / "m.pth")
    report = ckpt.load_into(model := nn.Linear(3, 1).half(), tmp_path / "m.pth")
    assert report.lost == {"weight": "1 value became infinite, 1 value became zero"}
    assert model.weight.tolist() == [[float("inf"), 0.0, 1.0]]
    assert ckpt.load_into(nn.Linear(3, 1).bfloat16(), tmp_path / "m.pth").lost == {}


def test_memory_formats_and_dtypes(tmp_path: Path) -> None:
    """Channels last, transposed and strided parameters, other dtypes and tensors larger than a buffer get their values."""
    torch.manual_seed(0)
    values = {
        "big": torch.randn(3, 1025, 700), "conv": torch.randn(5, 4, 3, 3), "matrix": torch.randn(6, 8), "short": torch.randn(9),
        "scalar": torch.tensor(2.5), "none": torch.empty(0, 3), "wave": torch.randn(3, dtype=torch.complex64),
    }  # fmt: skip
    torch.save({f"m.{name}": value for name, value in values.items()}, tmp_path / "m.pth")
    empty = {
        "big": torch.zeros(700, 1025, 3).permute(2, 1, 0),
        "conv": torch.zeros(5, 4, 3, 3).to(memory_format=torch.channels_last), "matrix": torch.zeros(12, 16)[::2, ::2],
        "short": torch.zeros(9, dtype=torch.float16), "scalar": torch.zeros((), dtype=torch.float64), "none": torch.zeros(0, 3),
        "wave": torch.zeros(3, dtype=torch.complex128),
    }  # fmt: skip
    model = nn.Module()
    model.m = nn.Module()
    for name, made in empty.items():
        model.m.register_parameter(name, nn.Parameter(made))
    strides = [parameter.stride() for parameter in model.parameters()]
    report = ckpt.load_into(model, tmp_path / "m.pth")
    assert report
    assert report.cast == {"float32 -> float16": 1, "float32 -> float64": 1, "complex64 -> complex128": 1}
    for name, parameter in model.m.named_parameters():
        assert torch.equal(parameter, values[name].to(parameter.dtype)), name
    assert [parameter.stride() for parameter in model.parameters()] == strides


def with_head(classes: int) -> Network:
    """The network with another number of classes."""
    model = blank_network()
    model.fc2 = nn.Linear(8, classes)
    return model


# --- choices


def test_another_head() -> None:
    """Ten classes to twenty: reinitialised, overlapped, picked by row, skipped; each is in the report."""
    old = network().state_dict()
    model = with_head(20)
    report = ckpt.load_into(model, FIXTURES / "ddp.pth", on_mismatch="reinit", reinit={"*": "normal:0.02", "*.bias": "zeros"})
    assert not report
    assert report.reinitialised == {"fc2.weight": "normal:0.02 (seed 0)", "fc2.bias": "zeros (seed 0)"}
    assert not model.fc2.bias.any()
    assert 0.01 < float(model.fc2.weight.detach().std()) < 0.03
    with pytest.raises(MatchError, match="not loaded whole"):
        report.raise_if_incomplete()

    model = with_head(20)
    report = ckpt.load_into(model, FIXTURES / "ddp.pth", on_mismatch="overlap", reinit="ones")
    assert torch.equal(model.fc2.weight[:10], old["fc2.weight"])
    assert torch.equal(model.fc2.bias[:10], old["fc2.bias"])
    assert model.fc2.weight[10:].eq(1).all()
    assert set(report.adapted) == {"fc2.weight", "fc2.bias"}

    model = with_head(3)
    before = element_bytes(model.fc2.weight)
    report = ckpt.load_into(model, FIXTURES / "ddp.pth", on_mismatch="skip")
    assert element_bytes(model.fc2.weight) == before
    assert report.mismatched == {"fc2.weight": ((10, 8), (3, 8)), "fc2.bias": ((10,), (3,))}


def test_missing_and_unexpected_by_choice() -> None:
    """Globs allow what is left over; `target` keeps the model's own value; `default` is the layer's reset."""
    model = blank_network()
    model.extra = nn.Linear(2, 2)
    del model.fc1
    own = element_bytes(model.extra.weight)
    report = ckpt.load_into(model, FIXTURES / "ddp.pth", allow_missing=["extra.*"], allow_unexpected=["module.fc1.*"])
    assert (report.missing, report.unexpected) == (["extra.weight", "extra.bias"], ["module.fc1.weight", "module.fc1.bias"])
    assert not report
    report = ckpt.load_into(
        model, FIXTURES / "ddp.pth", allow_unexpected=["*fc1*"], reinit={"*.weight": "target", "*.bias": "default"}
    )
    assert element_bytes(model.extra.weight) == own
    assert report.reinitialised == {"extra.weight": "the model's own value", "extra.bias": "uniform:0.707107 (seed 0)"}


class Counting(nn.Linear):
    """A layer with extra state."""

    count = 3

    def get_extra_state(self) -> int:
        return self.count

    def set_extra_state(self, state: int) -> None:
        self.count = state


def test_extra_state(tmp_path: Path) -> None:
    """What a module keeps beside tensors is given back to it; a file without it is refused or allowed."""
    model: Any = nn.Sequential(Counting(2, 2))
    model[0].count = 9
    torch.save(nn.DataParallel(model).state_dict(), tmp_path / "m.pth")
    fresh = nn.Sequential(Counting(2, 2))
    report = ckpt.load_into(fresh, tmp_path / "m.pth")
    assert fresh[0].count == 9
    assert "0._extra_state" in report.loaded
    torch.save(nn.Sequential(nn.Linear(2, 2)).state_dict(), tmp_path / "old.pth")
    with pytest.raises(MatchError, match="does not fit"):
        ckpt.load_into(fresh, tmp_path / "old.pth")
    assert ckpt.load_into(fresh, tmp_path / "old.pth", allow_missing=["*_extra_state"]).missing == ["0._extra_state"]


class Remembering(nn.Module):
    """A layer with a `module` of its own, whose extra state holds tensors, or is one."""

    def __init__(self, inner: nn.Module | None, state: Any) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.full((2,), 1.0 if inner else 2.0))
        self.module, self.state = inner, state

    def get_extra_state(self) -> Any:
        return self.state

    def set_extra_state(self, state: Any) -> None:
        self.state = state


@pytest.mark.parametrize("wrap", [nn.Sequential, nn.DataParallel])
def test_extra_state_that_holds_tensors(wrap: Callable[[nn.Module], nn.Module], tmp_path: Path) -> None:
    """A dict of tensors in extra state is not a state dict to choose from, and each module gets its own, as its tensors."""
    model = Remembering(Remembering(None, torch.arange(3)), {"scale": torch.ones(2)})
    torch.save(wrap(model).state_dict(), tmp_path / "m.pth")
    fresh = Remembering(Remembering(None, 0), 0)
    for tensor in fresh.parameters():
        tensor.data.zero_()
    report = ckpt.load_into(wrap(fresh) if wrap is nn.Sequential else fresh, tmp_path / "m.pth")
    assert report
    assert torch.equal(fresh.state["scale"], torch.ones(2))
    inner: Any = fresh.module
    assert torch.equal(inner.state, torch.arange(3))
    assert fresh.weight.tolist() == [1.0, 1.0]
    assert inner.weight.tolist() == [2.0, 2.0]


def test_files_from_before_batch_counters(tmp_path: Path) -> None:
    """num_batches_tracked came with torch 0.4.1; a file without any loads, as in torch, and the report says so."""
    state = {name: value for name, value in network().state_dict().items() if "tracked" not in name}
    torch.save(state, tmp_path / "old.pth")
    model = network()
    report = ckpt.load_into(model, tmp_path / "old.pth")
    assert report
    assert "num_batches_tracked" in str(report)


# --- load_state_dict maps files


def test_a_mapped_file_is_private_and_lazy(tmp_path: Path) -> None:
    """Writing to a loaded tensor does not reach the file; a replaced or removed file does not reach the tensors."""
    torch.save({"a.w": torch.ones(1 << 19)}, tmp_path / "m.pth")
    before = (tmp_path / "m.pth").read_bytes()
    loaded = ckpt.load_state_dict(tmp_path / "m.pth")["a.w"]
    loaded[0] = 5
    assert (tmp_path / "m.pth").read_bytes() == before
    ckpt.save({"a.w": torch.zeros(1 << 19)}, tmp_path / "m.pth")
    (tmp_path / "m.pth").unlink()
    assert float(loaded.sum()) == (1 << 19) + 4


def test_a_model_under_activation_checkpointing(tmp_path: Path) -> None:
    """torch's checkpoint_wrapper takes its name out of the state dict; what it wraps is found, also under two of them."""
    from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper

    def model(value: float) -> nn.Module:
        counting = Counting(2, 2)
        counting.count = int(value)
        inner = checkpoint_wrapper(checkpoint_wrapper(nn.Sequential(counting, nn.BatchNorm1d(2))))
        made = nn.DataParallel(nn.Sequential(inner, checkpoint_wrapper(nn.Linear(2, 2))))
        with torch.no_grad():
            for tensor in made.state_dict().values():
                if isinstance(tensor, torch.Tensor):
                    tensor.fill_(value)
        return made

    path, target = tmp_path / "in.pth", model(0)
    torch.save(model(5).state_dict(), path)
    assert ckpt.load_into(target, path)
    for name, value in target.state_dict().items():
        assert value == 5 if name.endswith("_extra_state") else bool((value == 5).all()), name


def test_by_position_with_a_new_head(tmp_path: Path) -> None:
    """Another author's network for other classes: all but the head by position, the head as PyTorch makes it, and said."""
    old = nn.ModuleDict({"conv": nn.Conv2d(1, 4, 3), "norm": nn.BatchNorm2d(4), "out": nn.Linear(8, 10)})
    torch.save(nn.DataParallel(old).state_dict(), tmp_path / "old.pth")
    model = nn.ModuleDict({"c1": nn.Conv2d(1, 4, 3), "bn": nn.BatchNorm2d(4), "head": nn.Linear(8, 3)})
    with pytest.raises(MatchError, match="2 mismatched: head"):
        ckpt.load_into(model, tmp_path / "old.pth", match="position")
    report = ckpt.load_into(model, tmp_path / "old.pth", match="position", on_mismatch="reinit", reinit="default")
    assert list(report.reinitialised) == ["head.weight", "head.bias"]
    assert [element_bytes(value) for value in model.state_dict().values()][:-2] == [
        element_bytes(value) for value in old.state_dict().values()
    ][:-2]
