"""Right loads raise no alarm: however the numbers of a file get into the model, in whatever container they were."""

import gzip
import io
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from safetensors import safe_open
from safetensors.torch import load_file, load_model, save_file
from torch import nn

import ckpt_tools
import ckpt_tools.torch as ckpt
from tests.torch.test_guard import Net, State, trained, with_mix, wrong


@pytest.fixture
def path(tmp_path: Path) -> str:
    torch.save(trained().state_dict(), tmp_path / "net.pth")
    return str(tmp_path / "net.pth")


def _from_stream(model: nn.Module, path: str) -> None:
    with Path(path).open("rb") as file:
        model.load_state_dict(torch.load(io.BytesIO(file.read())))


def _from_thread(model: nn.Module, path: str) -> None:
    with ThreadPoolExecutor(1) as pool:
        model.load_state_dict(pool.submit(torch.load, path).result())


def _by_hand(model: nn.Module, path: str, *, replace: bool = False) -> None:
    state = torch.load(path)
    for name, tensor in (*model.named_parameters(), *model.named_buffers()):
        if name in state and replace:
            tensor.data = state[name]
        elif name in state:
            tensor.data.copy_(state[name])


def _half_afterwards(model: nn.Module, path: str) -> None:
    model.load_state_dict(torch.load(path))
    model.bfloat16()


def _through_half(model: nn.Module, path: str) -> None:
    state = torch.load(path)
    model.load_state_dict({n: v.half().float() if v.is_floating_point() else v for n, v in state.items()})


def _reshaped(model: Any, path: str) -> None:
    state = torch.load(path)
    state["conv.weight"] = state["conv.weight"].reshape(16, -1)
    model.conv.weight = nn.Parameter(model.conv.weight.reshape(16, -1))
    model.load_state_dict(state)


def _inference(model: nn.Module, path: str) -> None:
    with torch.inference_mode():
        model.load_state_dict(torch.load(path), assign=True)


IN_ONE_FILE: dict[str, Callable[[Any, str], Any]] = {
    "load_state_dict": lambda model, path: model.load_state_dict(torch.load(path)),
    "assigned": lambda model, path: model.load_state_dict(torch.load(path), assign=True),
    "mapped": lambda model, path: model.load_state_dict(torch.load(path, mmap=True), assign=True),
    "from a stream": _from_stream,
    "from a thread": _from_thread,
    "by hand": _by_hand,
    "new data": lambda model, path: _by_hand(model, path, replace=True),
    "half": lambda model, path: model.half().load_state_dict(torch.load(path)),
    "half afterwards": _half_afterwards,
    "through half": _through_half,
    "into": ckpt.load_into,
    "ours": lambda model, path: model.load_state_dict(ckpt.load_state_dict(path)),
    "transposed": with_mix(torch.t),
    "reshaped": _reshaped,
    "wrapped": lambda model, path: nn.DataParallel(model).load_state_dict(
        {f"module.{name}": value for name, value in torch.load(path).items()}
    ),
    "inference": _inference,
}


@pytest.mark.parametrize("name", IN_ONE_FILE)
def test_right_loads_of_one_file(name: str, path: str) -> None:
    """However the numbers of the file get into the model, each of its tensors is from it, and nothing is wrong."""
    model = Net()
    with ckpt.guard(model) as seen:
        IN_ONE_FILE[name](model, path)
    seen.check()
    assert seen
    assert seen.files == [path]
    fates = {fate.name: fate for fate in seen.fates}
    assert all(fate.fate == ("unsaved" if name == "mask" else "loaded") for name, fate in fates.items())
    assert all(fate.source == name for name, fate in fates.items() if name != "mask")


def _safe_open(path: Path) -> State:
    with safe_open(path, "pt") as file:
        return {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118 - it is no mapping


def _gzipped(path: Path) -> State:
    with gzip.open(path) as file:
        state: State = torch.load(io.BytesIO(file.read()))
    return state


def _gzip(state: State, path: Path) -> None:
    torch.save(state, buffer := io.BytesIO())
    path.write_bytes(gzip.compress(buffer.getvalue()))


def _dcp(model: nn.Module, path: Path) -> None:
    own = model.state_dict()
    dcp.load(own, checkpoint_id=path, no_dist=True)
    model.load_state_dict(own)


def _sharded(state: State, path: Path) -> None:
    torch.save(state, path.with_name("m.pth"))
    ckpt_tools.convert(path.with_name("m.pth"), path, shard_size="2 KB")


def _a_list(model: nn.Module, path: Path) -> None:
    """Numbers without names, through .data, which tells nobody; the counter among them is one number."""
    for own, value in zip(model.state_dict().values(), torch.load(path), strict=True):
        own.data.copy_(value)


def _loading(read: Callable[[Path], Any]) -> Callable[[Any, Path], Any]:
    return lambda model, path: model.load_state_dict(read(path))


ZEROS = {"norm.bias": torch.zeros(16), "norm.weight": torch.ones(16)}
# How the state dict is written, and how a model takes it from there.
ELSEWHERE: dict[str, tuple[Callable[[State, Path], Any], Callable[[Any, Path], Any]]] = {
    "a list": (lambda state, path: torch.save(list(state.values()), path), _a_list),
    "legacy": (lambda state, path: torch.save(state, path, _use_new_zipfile_serialization=False), _loading(torch.load)),
    "whole module": (lambda _, path: torch.save(trained(), path),
                     _loading(lambda path: torch.load(path, weights_only=False).state_dict())),
    "safetensors": (save_file, lambda model, path: load_model(model, str(path))),
    "safe_open": (save_file, _loading(_safe_open)),
    "dcp": (lambda state, path: dcp.save(dict(state), checkpoint_id=path, no_dist=True), _dcp),
    "gzipped": (_gzip, _loading(_gzipped)),
    "halves in the file": (lambda state, path: save_file({name: value.bfloat16() if value.is_floating_point() else value
                                                          for name, value in state.items()}, path), _loading(load_file)),
    # Before torch 0.4.1 there was no num_batches_tracked; load_state_dict knows by the missing version.
    "old norms": (lambda state, path: torch.save({name: value for name, value in state.items() if not name.endswith("tracked")},
                                                 path), _loading(torch.load)),
    # Zeros into zeros, through .data, which tells nobody.
    "zeros": (lambda state, path: torch.save(state | ZEROS, path), lambda model, path: _by_hand(model, str(path))),
    "sharded": (_sharded, ckpt.load_into),
}  # fmt: skip


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
@pytest.mark.parametrize("name", ELSEWHERE)
def test_right_loads_of_other_files(name: str, tmp_path: Path) -> None:
    """Whatever container the numbers are in, and however old: nothing is wrong."""
    write, load = ELSEWHERE[name]
    write(trained().state_dict(), tmp_path / "made")
    model = Net()
    with ckpt.guard(model) as seen:
        load(model, tmp_path / "made")
    seen.check()
    assert seen.files
    assert not seen.notes


def test_tied_weights(tmp_path: Path) -> None:
    """A tied head is the tensor that was loaded, under whichever of its names the file has it."""
    for number, keep in enumerate(("embed.weight", "head.weight")):
        state = trained(tied=True).state_dict()
        saved = {
            name: value for name, value in state.items() if not name.endswith(("embed.weight", "head.weight")) or name == keep
        }
        torch.save(saved, tmp_path / f"{number}.pth")
        model = Net(tied=True)
        with ckpt.guard(model) as seen:
            model.load_state_dict(torch.load(tmp_path / f"{number}.pth"), strict=False)
        seen.check()
        fates = {fate.name: (fate.fate, fate.how) for fate in seen.fates}
        assert fates["head.weight"] == ("tied", "to embed.weight")


def test_a_fused_tensor_is_split_and_joined(tmp_path: Path) -> None:
    """Rows of a larger tensor, and tensors one below the other, are from the file, and said to be."""
    q, k, v = (torch.rand(rows, 32) for rows in (16, 8, 8))
    torch.save({"qkv.weight": torch.cat([q, k, v])}, tmp_path / "fused.pth")
    torch.save({"q.weight": q, "k.weight": k, "v.weight": v}, tmp_path / "parts.pth")
    parts = nn.ModuleDict({name: nn.Linear(32, rows, bias=False) for name, rows in (("q", 16), ("k", 8), ("v", 8))})
    with ckpt.guard(parts) as seen:
        rows = torch.load(tmp_path / "fused.pth")["qkv.weight"].split([16, 8, 8])
        parts.load_state_dict({f"{name}.weight": part for name, part in zip("qkv", rows, strict=True)})
    seen.check()
    assert [fate.how for fate in seen.fates] == ["rows 0 to 15", "rows 16 to 23", "rows 24 to 31"]
    fused = nn.ModuleDict({"qkv": nn.Linear(32, 32, bias=False)})
    with ckpt.guard(fused) as seen:
        fused.load_state_dict({"qkv.weight": torch.cat(list(torch.load(tmp_path / "parts.pth").values()))})
    seen.check()
    assert [fate.how for fate in seen.fates] == ["joined with k.weight, v.weight"]


@pytest.mark.parametrize("ending", ["pth", "safetensors"])
def test_small_tensors_by_the_hundred(ending: str, tmp_path: Path) -> None:
    """Tensors that are read many at a time, across the edges of what is read at once, are each their own."""
    model = nn.ParameterList([nn.Parameter(torch.rand(131 + number % 7)) for number in range(300)])
    state = {name: torch.rand_like(value) for name, value in model.state_dict().items()}
    file = tmp_path / f"m.{ending}"
    (torch.save if ending == "pth" else save_file)(state, file)
    with ckpt.guard(model) as seen:
        model.load_state_dict(torch.load(file) if ending == "pth" else load_file(file))
        with torch.no_grad():
            model[150][-1] += 1
    assert wrong(seen) == {"150": "changed"}


def test_experts_that_are_stacked(tmp_path: Path) -> None:
    """Matrices of many experts, two and two fused and all stacked, as transformers keeps them: each part is from the file."""
    experts = {f"experts.{i}.{part}.weight": torch.rand(6, 5) for i in range(12) for part in ("gate", "up")}
    torch.save(experts, tmp_path / "experts.pth")
    model = nn.ParameterDict({"gate_up": nn.Parameter(torch.rand(12, 12, 5))})
    with ckpt.guard(model) as seen:
        found = list(torch.load(tmp_path / "experts.pth").values())
        model.load_state_dict({"gate_up": torch.stack([torch.cat(found[at : at + 2]) for at in range(0, 24, 2)])})
    seen.check()
    assert seen.fates[0].how.startswith("joined with experts.0.up.weight, experts.1.gate.weight")
    with ckpt.guard(model) as seen:
        torch.load(tmp_path / "experts.pth")
        model["gate_up"].data[7, 3] += 1
    assert not seen
