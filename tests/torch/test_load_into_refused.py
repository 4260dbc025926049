"""What load_into refuses is named before anything of the model changes."""

import os
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

import ckpt_tools.torch as ckpt
from ckpt_tools.errors import CkptError, ConvertError, DamagedFileError, MatchError, UsageError
from fixtures.make import TiedNetwork, network
from tests.support.graphs import element_bytes
from tests.support.samples import FIXTURES
from tests.support.zips import rewrite
from tests.torch.test_load_into import LENET, blank_network, with_head


def _seen(value: Any) -> Any:
    """What tells whether a tensor, or extra state, has changed."""
    return (id(value), element_bytes(value)) if isinstance(value, torch.Tensor) else value


def expect_refused(model: nn.Module, path: Path, error: type[CkptError], saying: str, **options: Any) -> CkptError:
    """load_into raises, and every tensor of the model is what it was."""
    before = {name: _seen(value) for name, value in model.state_dict(keep_vars=True).items()}
    with pytest.raises(error, match=saying) as caught:
        ckpt.load_into(model, path, **options)
    after = {name: _seen(value) for name, value in model.state_dict(keep_vars=True).items()}
    assert after == before
    return caught.value


def test_what_does_not_fit_is_listed() -> None:
    """Missing, unexpected and mismatched tensors are all named, with the arguments that settle them."""
    model = with_head(20)
    model.extra = nn.Linear(2, 2)
    del model.fc1
    error = expect_refused(model, FIXTURES / "ddp.pth", MatchError, "does not fit the model")
    for text in ("2 missing: extra.weight, extra.bias", "2 unexpected: module.fc1.weight", "fc2.weight (10x8, wanted 20x8)"):
        assert text in error.why
    for text in ("reinit=", "allow_missing", "allow_unexpected", "on_mismatch"):
        assert text in error.fix


def test_damage_is_found_first(tmp_path: Path) -> None:
    """A deflated record that cannot be inflated is met before the model changes."""
    torch.save(network().state_dict(), tmp_path / "stored.pth")
    rewrite(tmp_path / "stored.pth", tmp_path / "in.pth", method=zipfile.ZIP_DEFLATED)
    with zipfile.ZipFile(tmp_path / "in.pth") as out:
        last = next(info for info in out.infolist() if info.filename.endswith("data/9"))
    model = blank_network()
    assert ckpt.load_into(model, tmp_path / "in.pth")
    data = bytearray((tmp_path / "in.pth").read_bytes())
    start = last.header_offset + 30 + len(last.filename) + 5
    data[start : start + 8] = b"\xff" * 8
    (tmp_path / "in.pth").write_bytes(data)
    expect_refused(blank_network(), tmp_path / "in.pth", DamagedFileError, ".")


def test_a_value_that_would_be_lost(tmp_path: Path) -> None:
    """Floats into integers and complex numbers into floats are refused; integers into floats are not."""
    torch.save({"m.a": torch.ones(2), "m.b": torch.ones(2)}, tmp_path / "m.pth")
    model = nn.Module()
    model.m = nn.Module()
    model.m.register_buffer("a", torch.zeros(2))
    model.m.register_buffer("b", torch.zeros(2, dtype=torch.int64))
    expect_refused(model, tmp_path / "m.pth", ConvertError, "lose part of its values")
    torch.save({"m.a": torch.ones(2, dtype=torch.complex64), "m.b": torch.ones(2, dtype=torch.int64)}, tmp_path / "m.pth")
    expect_refused(model, tmp_path / "m.pth", ConvertError, "lose part of its values")
    torch.save({"m.a": torch.tensor([3, 4]), "m.b": torch.tensor([5, 6])}, tmp_path / "m.pth")
    assert ckpt.load_into(model, tmp_path / "m.pth")
    assert [buffer.tolist() for buffer in model.buffers()] == [[3.0, 4.0], [5, 6]]


def test_tied_in_the_model_and_not_in_the_file(tmp_path: Path) -> None:
    """Two names that are one tensor here take one value: equal ones are fine, different ones are refused."""
    state = {name: value.clone() for name, value in TiedNetwork().state_dict().items()}
    torch.save(state, tmp_path / "equal.pth")
    assert ckpt.load_into(TiedNetwork(), tmp_path / "equal.pth")
    state["decoder.weight"] += 1
    torch.save(state, tmp_path / "other.pth")
    expect_refused(TiedNetwork(), tmp_path / "other.pth", ConvertError, "one tensor in it, and two different ones")


class Packed(nn.Module):
    """A module that makes its state when asked, as quantised layers do."""

    def _save_to_state_dict(self, destination: Any, prefix: str, keep_vars: bool) -> None:
        destination[prefix + "packed"] = (torch.ones(2), None)


UNUSUAL: dict[str, Callable[[], nn.Module]] = {
    "packed": Packed, "lazy": lambda: nn.LazyLinear(3),
    "quantised": lambda: holder(torch.quantize_per_tensor(torch.ones(2), 0.1, 0, torch.qint8)),
    "expanded": lambda: holder(torch.ones(1).expand(4)), "sparse": lambda: holder(torch.eye(2).to_sparse()),
    "freed": lambda: holder(freed(torch.ones(4))), "partly freed": lambda: holder(freed(torch.ones(4), 8)),
}  # fmt: skip


def holder(tensor: torch.Tensor) -> nn.Module:
    module = nn.Module()
    module.register_buffer("b", tensor)
    return module


def freed(tensor: torch.Tensor, left: int = 0) -> torch.Tensor:
    """The tensor after its memory was given back, as FSDP does, but for some bytes."""
    tensor.untyped_storage().resize_(left)
    return tensor


@pytest.mark.skipif(not hasattr(os, "preadv"), reason="the system does not read into memory")
@pytest.mark.filterwarnings("ignore:The given NumPy array is not writable")
def test_memory_that_is_read_only(tmp_path: Path) -> None:
    """A tensor over a file that is mapped for reading is the model's fault, not the checkpoint's."""
    (tmp_path / "raw").write_bytes(bytes(400))
    model = holder(torch.from_numpy(np.memmap(tmp_path / "raw", np.float32, "r")))
    ckpt.save({"b": torch.ones(100)}, tmp_path / "m.pth")
    with pytest.raises(ConvertError, match=r"m\.pth cannot be read into a tensor whose memory is read-only"):
        ckpt.load_into(model, tmp_path / "m.pth")


@pytest.mark.parametrize("kind", UNUSUAL)
@pytest.mark.filterwarnings("ignore")
def test_unusual_parameters_are_named(kind: str) -> None:
    model = blank_network()
    model.odd = UNUSUAL[kind]()
    with pytest.raises(ConvertError, match=r"'odd\."):
        ckpt.load_into(model, FIXTURES / "ddp.pth", allow_missing=["odd.*"])
    assert element_bytes(model.fc1.weight) != LENET["fc1.weight"]


@pytest.mark.parametrize(
    "options",
    [
        {"match": "guess"}, {"on_mismatch": "ignore"}, {"reinit": "glorot"}, {"seed": -1}, {"select": 0},
    ],
    ids=str,
)  # fmt: skip
def test_bad_arguments(options: dict[str, Any]) -> None:
    expect_refused(blank_network(), FIXTURES / "ddp.pth", UsageError, ".", **options)


def test_what_torch_would_say_otherwise(tmp_path: Path) -> None:
    """A function for a device, which torch.load takes, and tensors made under inference_mode, which nothing may write into."""
    for location in (lambda storage, tag: storage, 3):
        with pytest.raises(UsageError, match="`map_location` is"):
            ckpt.load(FIXTURES / "single.pth", map_location=location)  # type: ignore[arg-type]
    torch.save(nn.Linear(3, 2).state_dict(), tmp_path / "in.pth")
    with torch.inference_mode():
        model = nn.Linear(3, 2)
    with pytest.raises(ConvertError, match=r"made under torch\.inference_mode"):
        ckpt.load_into(model, tmp_path / "in.pth")


@pytest.mark.parametrize("assign", [True, False])
def test_integers_for_a_parameter_that_needs_a_gradient(tmp_path: Path, assign: bool) -> None:
    """assign refuses what no Parameter can be before anything changes, and takes it where no gradient is needed."""
    model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
    path = tmp_path / "in.pth"
    torch.save({name: torch.ones_like(value, dtype=torch.int8) for name, value in model.state_dict().items()}, path)
    if assign:
        model[0].requires_grad_(False)
        expect_refused(model, path, ConvertError, "'1.weight' is int8, and a parameter in the model", assign=True)
        model.requires_grad_(False)
    assert ckpt.load_into(model, path, assign=assign)
    assert model[1].weight.dtype is (torch.int8 if assign else torch.float32)


class Picky(nn.Linear):
    """A layer that refuses some extra state."""

    state = 0

    def get_extra_state(self) -> int:
        return self.state

    def set_extra_state(self, state: int) -> None:
        self.state = state
        if state > 1:
            raise ValueError("not this one")


def test_extra_state_that_is_refused(tmp_path: Path) -> None:
    """When a module does not take its extra state, neither tensors nor extra state of any module have changed."""
    path, model = tmp_path / "in.pth", nn.Sequential(Picky(2, 2), Picky(2, 2))
    torch.save(nn.Sequential(Picky(2, 2), Picky(2, 2)).state_dict() | {"0._extra_state": 1, "1._extra_state": 2}, path)
    error = expect_refused(model, path, ConvertError, "does not take its extra state")
    assert "ValueError: not this one" in error.why
    assert [layer.state for layer in model] == [0, 0]
