"""The load code: live tensors as torch.load gives them, names as the plain model has them, files whole or not there."""

import os
import stat
import threading
from argparse import Namespace
from collections import OrderedDict
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, cast

import pytest
import torch
from safetensors.torch import load_file
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode

import ckpt_tools.torch as ckpt
from ckpt_tools.errors import ConvertError, NothingMatchedError, ObjectsError, UsageError
from fixtures.make import TiedNetwork, Wrapped, network, training_state
from tests.support import classes
from tests.support.graphs import assert_same, element_bytes
from tests.support.samples import FIXTURES, PTH, SAFETENSORS, by_name, shown

NETWORKS = [
    "compiled", "compiled_parallel", "parallel_compiled", "fsdp", "data_parallel", "ddp", "single", "cuda", "no_byteorder",
]  # fmt: skip
WRAPS: dict[str, Callable[[nn.Module], Any]] = {
    "plain": lambda model: model, "parallel": nn.DataParallel, "compiled": lambda model: torch.compile(model, backend="eager"),
    "compiled-parallel": lambda model: torch.compile(nn.DataParallel(model), backend="eager"),
    "parallel-compiled": lambda model: nn.DataParallel(cast("Any", torch.compile(model, backend="eager"))),
    "fsdp": lambda model: Wrapped("_fsdp_wrapped_module", model),
}  # fmt: skip


def bits(state_dict: Mapping[str, torch.Tensor]) -> dict[str, bytes]:
    return {name: element_bytes(value) for name, value in state_dict.items()}


def assert_is_network(state_dict: Any) -> None:
    """The plain network's state dict: names in order, bits, `_metadata`."""
    expected: Any = network().state_dict()
    assert list(state_dict) == list(expected)
    assert all(element_bytes(state_dict[name]) == element_bytes(value) for name, value in expected.items())
    assert list(state_dict._metadata.items()) == list(expected._metadata.items())


# --- load


@pytest.mark.parametrize("path", [path for path in PTH if path.stem not in ("namespace", "numpy", "whole_module")], ids=by_name)
def test_load_is_torch_load(path: Path) -> None:
    """Values, views, ties, Parameters and their attributes are torch.load's, without running a pickle."""
    assert_same(ckpt.load(path), torch.load(path, map_location="cpu", weights_only=False))


@pytest.mark.parametrize("path", SAFETENSORS, ids=by_name)
def test_load_reads_safetensors(path: Path) -> None:
    loaded, expected = ckpt.load(path), load_file(path)
    assert bits(loaded) == bits(expected)


@pytest.mark.parametrize("value", [classes.Colour.RED, classes.Plain, [classes.Plain()]], ids=shown)
def test_load_refuses_unknown_objects(tmp_path: Path, value: Any) -> None:
    """What is no plain data is refused with its place, and with the command that helps."""
    torch.save({"a": value}, tmp_path / "in.pth")
    with pytest.raises(ObjectsError, match=r"tests\.support\.classes") as caught:
        ckpt.load(tmp_path / "in.pth")
    assert "--objects plain" in caught.value.fix


def test_load_keeps_sets_and_cycles(tmp_path: Path) -> None:
    """Sets, complex numbers, bytearrays, sizes, devices and a list that holds itself."""
    data: dict[str, Any] = {"set": {1, "a"}, "c": 1 + 2j, "b": bytearray(b"x"), "s": torch.Size([2]), "d": torch.device("cpu")}
    data["dtype"], data["self"] = torch.float16, [(data,)]
    torch.save(data, tmp_path / "in.pth")
    assert_same(ckpt.load(tmp_path / "in.pth"), torch.load(tmp_path / "in.pth"))


@pytest.mark.parametrize("map_location", ["cpu", torch.device("cpu"), {"cuda:0": "cpu"}])
def test_map_location(map_location: ckpt.MapLocation) -> None:
    """A device or a mapping from tags places tensors as torch.load does."""
    loaded = ckpt.load(FIXTURES / "cuda.pth", map_location=map_location)
    assert_same(loaded, torch.load(FIXTURES / "cuda.pth", map_location=cast("Any", map_location)))
    assert {value.device.type for value in loaded.values()} == {"cpu"}


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is CUDA here")
@pytest.mark.parametrize("map_location", [None, {"cuda:3": "cpu"}, "cuda"])
def test_a_device_that_is_not_there(map_location: ckpt.MapLocation) -> None:
    """The error names the tag and says what to do, in place of torch's traceback."""
    with pytest.raises(UsageError, match=r"tagged 'cuda:0'") as caught:
        ckpt.load(FIXTURES / "cuda.pth", map_location=map_location)
    assert "map_location" in caught.value.fix


# --- load_state_dict


@pytest.mark.parametrize("name", NETWORKS)
def test_load_state_dict_is_ready_for_the_plain_model(name: str) -> None:
    """Whatever wrapped the network: names, order, bits and `_metadata` of the plain one."""
    loaded = ckpt.load_state_dict(FIXTURES / f"{name}.pth")
    assert_is_network(loaded)
    network().load_state_dict(loaded)


def test_load_state_dict_from_a_training_checkpoint() -> None:
    """The only state dict is found wherever it is; the optimizer is none."""
    assert_is_network_after_a_step(ckpt.load_state_dict(FIXTURES / "training.pth"))
    assert_is_network_after_a_step(ckpt.load_state_dict(FIXTURES / "training.pth", select="model"))


def assert_is_network_after_a_step(state_dict: Any) -> None:
    expected = torch.load(FIXTURES / "training.pth")["model"]
    assert bits({f"module.{name}": value for name, value in state_dict.items()}) == bits(expected)


def test_which_state_dict_is_meant() -> None:
    """With several the error names them, and select chooses; what is no state dict is refused."""
    with pytest.raises(NothingMatchedError, match="2 state dicts: 'model', 'ema'"):
        ckpt.load_state_dict(FIXTURES / "mixed_devices.pth")
    assert "n_averaged" in ckpt.load_state_dict(FIXTURES / "mixed_devices.pth", select="ema")
    for select in ("epoch", "config", "nowhere"):
        with pytest.raises(NothingMatchedError):
            ckpt.load_state_dict(FIXTURES / "training.pth", select=select)


def test_load_state_dict_leaves_values_out(tmp_path: Path) -> None:
    """An epoch beside the tensors is not for the model; a module's extra state is; two names that become one are an error."""
    data = {"module.w": torch.ones(1), "epoch": 3, "args": Namespace(a=1), "module._extra_state": {"n": 1}}
    torch.save(data, tmp_path / "in.pth")
    assert list(ckpt.load_state_dict(tmp_path / "in.pth")) == ["w", "_extra_state"]
    torch.save({"module.w": torch.ones(1), "w": torch.ones(1)}, tmp_path / "in.pth")
    with pytest.raises(ConvertError):
        ckpt.load_state_dict(tmp_path / "in.pth")
    assert list(ckpt.load_state_dict(tmp_path / "in.pth", unwrap=False)) == ["module.w", "w"]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float64, torch.float8_e4m3fn])
def test_load_state_dict_with_a_dtype(dtype: torch.dtype) -> None:
    loaded = ckpt.load_state_dict(FIXTURES / "tied.pth", dtype=dtype)
    expected = torch.load(FIXTURES / "tied.pth")
    assert bits(loaded) == bits({name: value.to(dtype) for name, value in expected.items()})
    assert loaded["decoder.weight"].data_ptr() == loaded["embedding.weight"].data_ptr()
    assert ckpt.load_state_dict(FIXTURES / "single.pth", dtype=dtype)["features.1.num_batches_tracked"].dtype is torch.int64


def test_strip_prefix() -> None:
    """The kind, order and `_metadata` stay; the tensors are the same objects; the original is not touched."""
    wrapped = nn.DataParallel(network()).state_dict()
    names = list(wrapped)
    stripped = ckpt.strip_prefix(wrapped)
    assert type(stripped) is OrderedDict
    assert_is_network(stripped)
    assert list(wrapped) == names
    assert stripped["fc1.weight"] is wrapped["module.fc1.weight"]
    assert list(ckpt.strip_prefix(wrapped, "")) == names
    inner = Wrapped("_fsdp_wrapped_module", nn.DataParallel(network()))  # unwrap: every wrapper, in any order
    assert_is_network(ckpt.unwrap(cast("Any", torch.compile(inner, backend="eager")).state_dict()))


# --- save


@pytest.mark.parametrize("suffix", ["pth", "safetensors"])
@pytest.mark.parametrize("wrap", WRAPS)
def test_save_a_model(tmp_path: Path, wrap: str, suffix: str) -> None:
    """A wrapped model is saved under the plain model's names, `_metadata` included; torch and safetensors read it."""
    path = tmp_path / f"model.{suffix}"
    ckpt.save(WRAPS[wrap](network()), path)
    loaded = load_file(path) if suffix == "safetensors" else torch.load(path, weights_only=True)
    assert bits(loaded) == bits(network().state_dict())
    assert_is_network(ckpt.load_state_dict(path))


def test_save_a_mapping(tmp_path: Path) -> None:
    ckpt.save(training_state(), tmp_path / "m.pth")
    torch.save(training_state(), tmp_path / "t.pth")
    assert_same(*(torch.load(tmp_path / name) for name in ("m.pth", "t.pth")))


def test_save_modules_in_a_mapping(tmp_path: Path) -> None:
    """A module in a mapping becomes its state dict, unwrapped as if saved alone; the rest stays as it is."""
    optimizer = torch.optim.SGD(network().parameters(), lr=0.1)
    state = {"model": nn.DataParallel(network()), "nets": [network(), 3], "optimizer": optimizer.state_dict(), "epoch": 2}
    ckpt.save(state, tmp_path / "m.pth")
    loaded = torch.load(tmp_path / "m.pth", weights_only=True)
    assert_is_network(loaded["model"])
    assert_is_network(loaded["nets"][0])
    assert (loaded["nets"][1], loaded["epoch"], loaded["optimizer"]) == (3, 2, optimizer.state_dict())
    assert type(state["model"]) is nn.DataParallel
    ckpt.save(state, tmp_path / "w.pth", wrapped=True)
    assert next(iter(torch.load(tmp_path / "w.pth")["model"])).startswith("module.")


@pytest.mark.parametrize("name", ["m.pth", "m.safetensors"])
def test_save_keeps_ties(tmp_path: Path, name: str) -> None:
    """Tied weights are written once and tied again, also through safetensors, which by itself refuses them."""
    torch.manual_seed(0)
    model = TiedNetwork()
    ckpt.save(model, tmp_path / name)
    loaded = ckpt.load_state_dict(tmp_path / name)
    assert list(loaded) == list(model.state_dict())
    assert loaded["decoder.weight"].data_ptr() == loaded["embedding.weight"].data_ptr()
    assert torch.equal(loaded["decoder.weight"], model.decoder.weight)


def test_save_awkward_tensors_as_safetensors(tmp_path: Path) -> None:
    """Strided, conjugate, overlapping, empty and 0-d tensors are written row-major with their values."""
    base, wave = torch.arange(12.0).reshape(3, 4), torch.tensor([1 + 2j])
    data = {"a.t": base.t(), "b.s": base[1:, ::2], "c.c": wave.conj(), "d.w": wave, "e.e": torch.empty(0, 2), "f.s": base[0, 1]}
    ckpt.save(data, tmp_path / "m.safetensors")
    loaded = load_file(tmp_path / "m.safetensors")
    assert bits(loaded) == bits(data)


@pytest.mark.parametrize(
    "data",
    [
        {"a.w": torch.eye(2).to_sparse()}, {"a.w": torch.ones(1), "o": object()}, {"a.w": torch.empty(1, device="meta")},
        training_state(),
    ],
    ids=["sparse", "object", "meta", "training"],
)  # fmt: skip
def test_what_safetensors_cannot_hold(tmp_path: Path, data: Any) -> None:
    with pytest.raises(ConvertError):
        ckpt.save(data, tmp_path / "m.safetensors")
    assert os.listdir(tmp_path) == []


class Broken:
    """Fails when it is pickled."""

    def __reduce__(self) -> Any:
        raise RuntimeError("cannot be pickled")


@pytest.mark.parametrize("name", ["m.pth", "m.safetensors"])
def test_a_failed_save_leaves_the_old_file(tmp_path: Path, name: str) -> None:
    """An exception on the way leaves the file that was there, and no other."""
    ckpt.save(network(), tmp_path / name)
    before = (tmp_path / name).read_bytes()
    with pytest.raises((RuntimeError, ConvertError)):
        ckpt.save({"w": torch.ones(10_000), "b": Broken()}, tmp_path / name)
    assert os.listdir(tmp_path) == [name]
    assert (tmp_path / name).read_bytes() == before


@pytest.mark.parametrize("name", ["m.pth", "old.pth", "m.safetensors", "m.gguf"])
def test_what_has_no_memory_is_not_saved(tmp_path: Path, name: str) -> None:
    """torch.save writes a file of a freed tensor that torch.load cannot read."""
    model = network()
    next(model.parameters()).untyped_storage().resize_(0)
    with pytest.raises(ConvertError, match="has been freed"):
        ckpt.save(model, tmp_path / name, format="pth-legacy" if name == "old.pth" else None)
    assert os.listdir(tmp_path) == []


@pytest.mark.parametrize("value", [lambda: 0, threading.Lock(), FakeTensorMode().from_tensor(torch.ones(1))], ids=type)
def test_what_cannot_be_pickled(tmp_path: Path, value: object) -> None:
    with pytest.raises(ConvertError, match=r"m\.pth would hold what cannot be pickled"):
        ckpt.save({"w": torch.ones(1), "x": value}, tmp_path / "m.pth")


@pytest.mark.parametrize("name", ["m.pth", "m.safetensors"])
def test_the_mode_is_that_of_open(tmp_path: Path, name: str) -> None:
    """A new file has the mode that the umask gives; a replaced one keeps its own."""
    before = os.umask(0o027)
    try:
        ckpt.save(network(), tmp_path / name)
    finally:
        os.umask(before)
    assert stat.S_IMODE((tmp_path / name).stat().st_mode) == 0o640
    (tmp_path / name).chmod(0o604)
    ckpt.save(network(), tmp_path / name)
    assert stat.S_IMODE((tmp_path / name).stat().st_mode) == 0o604


def test_save_follows_a_link(tmp_path: Path) -> None:
    (tmp_path / "latest.pth").symlink_to(tmp_path / "epoch3.pth")
    ckpt.save(network(), tmp_path / "latest.pth")
    assert (tmp_path / "latest.pth").is_symlink()
    assert_is_network(torch.load(tmp_path / "epoch3.pth"))


def test_a_file_is_mapped_only_where_it_is_aligned(tmp_path: Path) -> None:
    """A header of an odd length puts every tensor at an odd address: those are read, not mapped."""
    values = torch.arange(1 << 19, dtype=torch.float32)
    header = b'{"a.w":{"dtype":"F32","shape":[524288],"data_offsets":[0,2097152]}}'
    header += b" " * (1 - len(header) % 2)
    (tmp_path / "odd.safetensors").write_bytes(len(header).to_bytes(8, "little") + header + element_bytes(values))
    loaded = ckpt.load_state_dict(tmp_path / "odd.safetensors")["a.w"]
    assert len(header) % 2 == 1
    assert loaded.data_ptr() % 4 == 0
    assert torch.equal(loaded, values)


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled:UserWarning")  # one process is what is wanted
def test_save_as_a_distributed_checkpoint(tmp_path: Path) -> None:
    """format="dcp" writes a folder that torch's own reader loads: nested, tied, beside plain values; again over itself."""
    from torch.distributed.checkpoint import FileSystemReader
    from torch.distributed.checkpoint.state_dict_loader import load as load_dcp

    model = network()
    for _ in range(2):
        ckpt.save({"model": nn.DataParallel(model), "epoch": 3}, tmp_path / "out", format="dcp")
    wanted = {"model": {name: torch.zeros_like(value) for name, value in model.state_dict().items()}, "epoch": 0}
    load_dcp(wanted, storage_reader=FileSystemReader(tmp_path / "out"), no_dist=True)
    assert wanted["epoch"] == 3
    assert_same(wanted["model"], dict(model.state_dict()))
    assert_same(dict(ckpt.load_state_dict(tmp_path / "out", mmap=False)), dict(model.state_dict()))


@pytest.mark.parametrize("format_", ["safetensors", "dcp"])
def test_a_mapping_inside_itself_is_refused(tmp_path: Path, format_: Any) -> None:
    """What contains itself is an error of ours, in containers that hold no references."""
    data: dict[str, Any] = {"weight": torch.ones(1)}
    data["self"] = data
    with pytest.raises(ConvertError, match="nested in itself"):
        ckpt.save(data, tmp_path / "out", format=format_)
    assert list(tmp_path.iterdir()) == []


def test_save_of_a_model_under_opacus(tmp_path: Path) -> None:
    """The `_module.` of Opacus' GradSampleModule goes, as those of other wrappers do; a user's own `_module` stays."""

    class GradSampleModule(nn.Module):
        def __init__(self, inner: nn.Module) -> None:
            super().__init__()
            self._module = inner

    wrapped = GradSampleModule(network())
    ckpt.save(wrapped, tmp_path / "own.pth")
    assert next(iter(torch.load(tmp_path / "own.pth"))).startswith("_module.")
    GradSampleModule.__module__ = "opacus.grad_sample.grad_sample_module"
    ckpt.save(nn.DataParallel(wrapped), tmp_path / "out.pth")
    assert_is_network(torch.load(tmp_path / "out.pth"))
