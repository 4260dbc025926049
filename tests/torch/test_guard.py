"""The guard: known mistakes of loading code are caught, right loads raise no alarm, and every tensor has its origin."""

import contextlib
import copy
import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file, save_model
from torch import nn

import ckpt_tools.torch as ckpt
from ckpt_tools.errors import MatchError, UsageError

State = dict[str, torch.Tensor]


class Net(nn.Module):
    """A body with a norm and its buffers, a linear layer, a head that is tied where that is asked for, a buffer of its own."""

    def __init__(self, *, tied: bool = False) -> None:
        super().__init__()
        self.embed = nn.Embedding(16, 32)
        self.conv = nn.Conv1d(8, 16, 3)
        self.norm = nn.BatchNorm1d(16)
        self.mix = nn.Linear(32, 32)
        self.head = nn.Linear(32, 16, bias=not tied)
        if tied:
            self.head.weight = self.embed.weight
        self.register_buffer("mask", torch.ones(4), persistent=False)


def trained(*, tied: bool = False) -> Net:
    """The network with numbers that no other has."""
    model = Net(tied=tied)
    generator = torch.Generator().manual_seed(7)
    with torch.no_grad():
        for tensor in model.state_dict().values():
            tensor.copy_(torch.rand(tensor.shape, generator=generator) if tensor.is_floating_point() else torch.tensor(5))
    return model


def wrong(seen: ckpt.Guard) -> dict[str, str]:
    """The names that are not from a file, and why."""
    return {fate.name: fate.fate for fate in seen.wrong()}


@pytest.fixture
def path(tmp_path: Path) -> str:
    torch.save(trained().state_dict(), tmp_path / "net.pth")
    return str(tmp_path / "net.pth")


# --- mistakes


def without_buffers(model: nn.Module, path: str) -> None:
    state = torch.load(path)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            parameter.copy_(state[name])


def then(change: Callable[[Any], object]) -> Callable[[Any, str], object]:
    return lambda model, path: (model.load_state_dict(torch.load(path)), change(model))


def a_copy(model: nn.Module, path: str) -> None:
    """Into the copies that `.to` of another dtype makes."""
    state = torch.load(path)
    for name, parameter in model.named_parameters():
        parameter.double().data.copy_(state[name])
    for name, buffer in model.named_buffers():
        if name in state:
            buffer.copy_(state[name])


def averaged(model: Any, path: str) -> None:
    state = torch.load(path)
    model.load_state_dict(state | {"mix.weight": (state["mix.weight"] + model.mix.weight.data) / 2})


def some_rows(name: str, rows: int) -> Callable[[Any, str], None]:
    """All of the file, but of one tensor some rows."""

    def load(model: Any, path: str) -> None:
        state = torch.load(path)
        value = state.pop(name)
        model.load_state_dict(state, strict=False)
        model.get_parameter(name).data[:rows] = value[:rows]

    return load


def edited(edit: Callable[[State], State]) -> Callable[[Any, str], None]:
    """What `strict=False` takes of an edited state dict."""
    return lambda model, path: model.load_state_dict(edit(torch.load(path)), strict=False) and None


def with_mix(change: Callable[[torch.Tensor], torch.Tensor]) -> Callable[[Any, str], None]:
    return edited(lambda state: state | {"mix.weight": change(state["mix.weight"])})


ALL, STATISTICS = set(trained().state_dict()), {"norm.running_mean", "norm.running_var", "norm.num_batches_tracked"}
MISTAKES: dict[str, tuple[Callable[[Any, str], object], set[str]]] = {
    "prefixed": (edited(lambda state: {f"module.{name}": value for name, value in state.items()}), ALL),
    "renamed attribute": (
        edited(lambda state: {name.replace("mix.", "mixer."): value for name, value in state.items()}),
        {"mix.weight", "mix.bias"},
    ),
    "by shape": (
        edited(lambda state: {name: value for name, value in state.items() if not name.startswith("conv")}),
        {"conv.weight", "conv.bias"},
    ),
    "without buffers": (without_buffers, STATISTICS),
    "initialised again": (then(lambda model: nn.init.normal_(model.mix.weight)), {"mix.weight"}),
    "a copy": (a_copy, {name for name, _ in trained().named_parameters()}),
    "some rows": (some_rows("embed.weight", 10), {"embed.weight"}),
    "the last rows forgotten": (some_rows("mix.weight", 30), {"mix.weight"}),
    "into another": (lambda model, path: copy.deepcopy(model).load_state_dict(torch.load(path)), ALL),
    "scaled": (then(lambda model: model.mix.weight.data.mul_(0.5)), {"mix.weight"}),
    "statistics reset": (then(lambda model: model.norm.reset_running_stats()), STATISTICS),
    "averaged": (averaged, {"mix.weight"}),
    "integers": (with_mix(lambda value: (value * 9).int()), {"mix.weight"}),
    "clamped": (with_mix(lambda value: value.clamp(0.2, 0.8)), {"mix.weight"}),
    "one row for all": (with_mix(lambda value: value[0].expand(32, 32)), {"mix.weight"}),
    "columns in another order": (with_mix(lambda value: value.flip(1)), {"mix.weight"}),
}


@pytest.mark.parametrize("name", MISTAKES)
def test_mistakes_are_caught(name: str, path: str) -> None:
    """A loader with a mistake that torch does not tell of is an error that names the tensors, and no others."""
    load, expected = MISTAKES[name]
    model = Net()
    with ckpt.guard(model) as seen:
        load(model, path)
    assert set(wrong(seen)) == expected
    with pytest.raises(MatchError, match="tensors of the model are not what a file has for them") as caught:
        seen.check()
    assert all(name in str(caught.value) for name in expected)
    assert path in str(caught.value)


def test_a_head_that_is_random_on_purpose(path: str) -> None:
    """What a glob allows is no error; a glob that matches nothing is one."""
    model = Net()
    with ckpt.guard(model) as seen:
        state = torch.load(path)
        model.load_state_dict({name: value for name, value in state.items() if not name.startswith("head.")}, strict=False)
    assert wrong(seen) == {"head.weight": "untouched", "head.bias": "untouched"}
    seen.check(allow=["head.*"])
    seen.check(allow="head.*")
    with pytest.raises(UsageError, match=r"head\.wieght"):
        seen.check(allow=["head.*", "head.wieght"])


def test_half_of_the_shards(tmp_path: Path) -> None:
    """A loader that takes the first shard only: what is in the other one is untouched."""
    state = trained().state_dict()
    names = list(state)
    for number, part in enumerate((names[:4], names[4:]), 1):
        save_file({name: state[name] for name in part}, tmp_path / f"model-0000{number}-of-00002.safetensors")
    index = {name: f"model-0000{1 + (name in names[4:])}-of-00002.safetensors" for name in names}
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": index}))
    model = Net()
    with ckpt.guard(model) as seen:
        json.loads((tmp_path / "model.safetensors.index.json").read_text())
        model.load_state_dict(load_file(tmp_path / "model-00001-of-00002.safetensors"), strict=False)
    assert set(wrong(seen)) == set(names[4:])
    assert seen.files == [str(tmp_path / "model-00001-of-00002.safetensors")]


def test_an_untied_head(tmp_path: Path) -> None:
    """A head that is tied when it is saved, and not in the model that is loaded: its name is in no file."""
    tied = trained(tied=True)
    save_model(tied, str(tmp_path / "tied.safetensors"))
    model = Net()
    with ckpt.guard(model) as seen:
        model.load_state_dict(load_file(tmp_path / "tied.safetensors"), strict=False)
    assert {name.partition(".")[0] for name in wrong(seen)} <= {"head", "embed"}
    assert len(wrong(seen)) == 2


def test_meta_tensors_that_stay(path: str) -> None:
    with torch.device("meta"):
        model = Net()
    with ckpt.guard(model) as seen:
        state = torch.load(path)
        del state["mix.bias"]
        model.load_state_dict(state, strict=False, assign=True)
    assert wrong(seen) == {"mix.bias": "untouched", "mask": "untouched"}
    assert "on the meta device" in str(seen)


# --- right loads


class Three(nn.Module):
    """Three layers that only their names tell apart."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b, self.c = nn.Linear(16, 16), nn.Linear(16, 16), nn.Linear(16, 16)


@pytest.mark.parametrize("prefix", ["", "module.", "net."])
@pytest.mark.parametrize("order", ["bac", "bca", "abc", "bcd", "bbc"])
def test_swapped_layers(tmp_path: Path, prefix: str, order: str) -> None:
    """Layers in a ring of each other's numbers are told; those that take the next one's of a deeper network are meant."""
    deep = {f"{prefix}{layer}.{key}": value for layer in "abcd" for key, value in nn.Linear(16, 16).state_dict().items()}
    torch.save({"state_dict": deep, "epoch": 3}, tmp_path / "deep.pth")
    model = Three()
    with ckpt.guard(model) as seen:
        state = torch.load(tmp_path / "deep.pth")["state_dict"]
        taken = {
            f"{new}.{key}": state[f"{prefix}{old}.{key}"]
            for new, old in zip("abc", order, strict=True)
            for key in ("weight", "bias")
        }
        model.load_state_dict(taken)
    ring = {"bac": "ab", "bca": "abc"}.get(order, "")
    assert {name.partition(".")[0]: fate for name, fate in wrong(seen).items()} == dict.fromkeys(ring, "swapped")
    if ring:
        with pytest.raises(MatchError, match=r"from one another's names in the file: a\.weight \(from state_dict\."):
            seen.check()
        seen.check(allow=["[abc].*"])


@pytest.mark.parametrize("left", [0, 8])
def test_memory_that_is_freed(path: str, left: int) -> None:
    """What has no memory any more, as under FSDP, is not looked at: before the load, after it, at both."""
    model: Any = trained()
    memory = model.mix.weight.untyped_storage()
    whole = memory.nbytes()

    def fate_after(load: Callable[[], object]) -> tuple[str, str]:
        with ckpt.guard(model) as seen:
            load()
        (fate,) = (fate for fate in seen.fates if fate.name == "mix.weight")
        return fate.fate, fate.how

    memory.resize_(left)
    assert fate_after(lambda: None) == ("untouched", "its memory has been freed")

    def load() -> None:
        memory.resize_(whole)
        model.load_state_dict(torch.load(path))

    assert fate_after(load) == ("loaded", "")
    assert fate_after(lambda: memory.resize_(left)) == ("unexamined", "its memory has been freed")


def test_a_model_that_the_block_makes(path: str) -> None:
    with ckpt.guard() as seen:
        model = seen.watch(Net())
        model.load_state_dict(torch.load(path))
        nn.init.normal_(model.head.weight)
    assert wrong(seen) == {"head.weight": "changed"}


def test_a_file_that_was_read_before(path: str) -> None:
    """Numbers of a file that was opened before the block are unknown, until the file is named."""
    state = torch.load(path)
    model = Net()
    with ckpt.guard(model) as seen:
        model.load_state_dict(state)
    with pytest.raises(MatchError, match="no checkpoint was opened meanwhile"):
        seen.check()
    with ckpt.guard(model, files=[path]) as seen:
        model.load_state_dict(state)
    seen.check()


def test_a_decorated_loader(path: str) -> None:
    """A decorated function is checked after each call: the module that it is given, or the one that it returns."""

    @ckpt.guarded(allow=["head.*"])
    def into(path: str, model: nn.Module) -> None:
        state = torch.load(path)
        model.load_state_dict({name: value for name, value in state.items() if not name.startswith("head.")}, strict=False)

    @ckpt.guarded()
    def made(path: str) -> Net:
        model = Net()
        MISTAKES["prefixed"][0](model, path)
        return model

    into(path, Net())
    with pytest.raises(MatchError):
        made(path)
    assert into.__name__ == "into"


FIXTURE = """
import pytest, torch
from ckpt_tools.errors import MatchError

def test_loader(guard_load):
    torch.save(torch.nn.Linear(9, 9).state_dict(), "net.pth")
    model = torch.nn.Linear(9, 9)
    with guard_load(model):
        model.load_state_dict(torch.load("net.pth"))
    with pytest.raises(MatchError), guard_load(model, allow=["bias"]):
        torch.load("net.pth")
        torch.nn.init.normal_(model.weight)
        torch.nn.init.normal_(model.bias)
"""


def test_the_fixture(tmp_path: Path) -> None:
    """The fixture's block raises where a tensor is not from a file, and knows what is allowed."""
    (tmp_path / "test_it.py").write_text(FIXTURE)
    command = [sys.executable, "-m", "pytest", "-q", "-p", "ckpt_tools.torch.pytest_plugin", "test_it.py"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=False, timeout=120)
    assert (done.returncode, "1 passed" in done.stdout) == (0, True), done.stdout + done.stderr


def test_the_loaders_own_error_comes_through(path: str) -> None:
    """An exception in the block is not hidden, nothing is judged, and torch's function is its own again."""
    before = torch.UntypedStorage.from_file
    model = Net()
    with pytest.raises(RuntimeError, match="Missing key"), ckpt.guard(model) as seen:
        model.load_state_dict({})
    assert torch.UntypedStorage.from_file == before
    with pytest.raises(UsageError, match="No model was watched"):
        seen.check()


def test_guards_inside_guards(path: str) -> None:
    """Two guards at once each see every file that is opened while they are active."""
    outer, inner = Net(), Net()
    with ckpt.guard(outer) as first:
        with ckpt.guard(inner) as second:
            inner.load_state_dict(torch.load(path))
        outer.load_state_dict(load_file_of(path))
    first.check()
    second.check()


def load_file_of(path: str) -> State:
    save_file(torch.load(path), f"{path}.safetensors")
    return load_file(f"{path}.safetensors")


def test_the_table(path: str) -> None:
    """The report prints as one short table: what is right first, one line for each way, long lists cut."""
    model = Net()
    with ckpt.guard(model) as seen:
        MISTAKES["renamed attribute"][0](model.half(), path)
    assert str(seen).splitlines() == [
        "fate                        tensors  from", f"loaded, float32 -> float16        9  {path}",
        f"loaded                            1  {path}", "unsaved                           1  mask",
        "untouched                         2  mix.weight, mix.bias",
    ]  # fmt: skip
    assert repr(seen).startswith("Guard(fates=<13>")
    assert seen.to_json()["fates"][1]["source"] == "embed.weight"


def test_a_file_that_is_gone(path: str) -> None:
    """A file that the loader removes cannot be looked at, which is told; one that was not there when it was tried is not."""
    model = Net()
    with ckpt.guard(model) as seen:
        with contextlib.suppress(FileNotFoundError):
            torch.load(path + ".none")
        model.load_state_dict(torch.load(path))
        Path(path).unlink()
    assert seen.notes == [f"{path} was opened, and is gone"]
    with pytest.raises(MatchError, match="and is gone"):
        seen.check()
