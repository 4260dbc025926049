"""Behaviour that no other file of the net holds: each test was written for a bug that was planted and stayed unseen."""

import os
import re
from collections import OrderedDict
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor
from torch.optim.swa_utils import AveragedModel

import ckpt_tools
import ckpt_tools.torch
from ckpt_tools.errors import ConvertError
from tests.support.commands import ckpt
from tests.support.rank_files import rank_of

Calls = list[tuple[str, int, int]]


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> Calls:
    """What is done to open files: the call, the file's inode, where it stands."""
    seen: Calls = []

    def watched(name: str, real: Callable[..., Any]) -> Callable[..., Any]:
        def call(fd: int, *args: Any) -> Any:
            seen.append((name, os.fstat(fd).st_ino, args[1] if name == "pwrite" else os.lseek(fd, 0, os.SEEK_CUR)))
            return real(fd, *args)

        return call

    for name in ("write", "pwrite", "fsync", "ftruncate"):
        monkeypatch.setattr(os, name, watched(name, getattr(os, name)))
    return seen


def test_a_file_that_is_replaced_is_durable_first(tmp_path: Path, calls: Calls) -> None:
    """What takes the place of another file lies on the disk before it has the name; a new file need not."""
    torch.save({"w": torch.ones(9)}, tmp_path / "in.pth")
    for count in (0, 1):
        ckpt_tools.convert(tmp_path / "in.pth", tmp_path / "out.pth", overwrite=True)
        synced = [inode for name, inode, _ in calls if name == "fsync"]
        assert synced.count((tmp_path / "out.pth").stat().st_ino) == count


def test_tensors_that_differ_in_strides_alone(tmp_path: Path) -> None:
    """Whole squares and turned ones, in turn, each on a storage of its own."""
    value = {
        f"{index}.w": torch.arange(9.0).reshape(3, 3).add(index).t().clone(memory_format=torch.preserve_format)
        if index % 2 else torch.arange(9.0).reshape(3, 3).add(index)
        for index in range(40)
    }  # fmt: skip
    torch.save(value, tmp_path / "in.pth")
    ckpt_tools.convert(tmp_path / "in.pth", tmp_path / "out.pth", add_prefix="x.")
    found = torch.load(tmp_path / "out.pth")
    for name, tensor in value.items():
        assert torch.equal(found[f"x.{name}"], tensor)
        assert found[f"x.{name}"].stride() == tensor.stride()


def test_hundreds_of_texts_that_come_again(tmp_path: Path) -> None:
    """Texts are written once and then named by a number, of which those up to 255 take one byte."""
    value = {f"key {number}": [f"text {number}"] * 4 for number in range(300)}
    torch.save({"w": torch.ones(1), "texts": value}, tmp_path / "in.pth")
    ckpt_tools.convert(tmp_path / "in.pth", tmp_path / "out.pth")
    assert torch.load(tmp_path / "out.pth")["texts"] == value


class Old(nn.Linear):
    """A layer of a version of its own."""

    _version = 7


def test_the_version_of_the_wrapped_model_is_kept(tmp_path: Path) -> None:
    """Without `module.` the model has its own row of `_metadata`, not the wrapper's, of which a counter is left."""
    torch.save(AveragedModel(Old(2, 2)).state_dict(), tmp_path / "in.pth")
    ckpt_tools.convert(tmp_path / "in.pth", tmp_path / "out.pth", rename=r"^module\.=")
    assert torch.load(tmp_path / "out.pth")._metadata[""] == {"version": 7}


def test_a_list_of_names_that_groups_share_is_renamed_once(tmp_path: Path) -> None:
    """Two groups of an optimizer with one list of `param_names`."""
    names = ["w"]
    groups = [{"params": [0], "param_names": names}, {"params": [1], "param_names": names}]
    torch.save({"model": {"w": torch.ones(1)}, "optimizer": {"state": {}, "param_groups": groups}}, tmp_path / "in.pth")
    ckpt_tools.convert(tmp_path / "in.pth", tmp_path / "out.pth", add_prefix="x.")
    found = torch.load(tmp_path / "out.pth")["optimizer"]["param_groups"]
    assert [group["param_names"] for group in found] == [["x.w"], ["x.w"]]


@pytest.mark.parametrize("keys", [("last_epoch", "_step_count"), ("last_epoch", "base_lrs")])
def test_slim_drops_each_scheduler(keys: tuple[str, ...], tmp_path: Path) -> None:
    """A scheduler with rates, and one without."""
    torch.save({"model": {"w": torch.ones(1)}, "lr": dict.fromkeys(keys, 3)}, tmp_path / "in.pth")
    ckpt_tools.convert(tmp_path / "in.pth", tmp_path / "out.pth", slim=True)
    assert "lr" not in torch.load(tmp_path / "out.pth")


class Outer:
    """What has a class inside."""

    class Inner(torch.Tensor):
        """A tensor of a class that torch does not know."""


def test_a_nested_class_of_a_tensor(tmp_path: Path) -> None:
    """A name with a dot in it is found by pickles of protocol 4 only, and that is what is written."""
    torch.save({"w": torch.ones(3).as_subclass(Outer.Inner)}, tmp_path / "in.pth", pickle_protocol=4)
    ckpt_tools.convert(tmp_path / "in.pth", tmp_path / "out.pth", objects="keep", add_prefix="x.")
    found = torch.load(tmp_path / "out.pth", weights_only=False)
    assert type(found["x.w"]) is Outer.Inner


def test_averages_keep_the_versions(tmp_path: Path) -> None:
    """The model with LitEma's averages in place of its tensors has its own `_metadata`."""
    value: Any = OrderedDict({"model.net.w": torch.ones(2), "model_ema.netw": torch.full((2,), 2.0)})
    value |= {"model_ema.decay": torch.tensor(0.9), "model_ema.num_updates": torch.tensor(5)}
    value._metadata = OrderedDict({"": {"version": 1}, "model.net": {"version": 2}})
    torch.save({"state_dict": value}, tmp_path / "in.ckpt")
    ckpt_tools.convert(tmp_path / "in.ckpt", tmp_path / "out.pth", ema=True)
    found: Any = torch.load(tmp_path / "out.pth")
    found = found.get("state_dict", found)
    assert found["model.net.w"].tolist() == [2, 2]
    assert found._metadata["model.net"] == {"version": 2}


def test_module_in_the_middle_of_names(tmp_path: Path) -> None:
    """`module.` of a part that was wrapped by itself, among parts that only their names tell apart."""
    names = ("encoder", "decoder", "head")
    torch.save(
        {f"{name}.module.norm.weight": torch.full((3,), float(at)) for at, name in enumerate(names)}, tmp_path / "in.pth"
    )
    torch.save({f"{name}.norm.weight": torch.zeros(3) for name in reversed(names)}, tmp_path / "like.pth")
    ckpt_tools.convert(tmp_path / "in.pth", tmp_path / "out.pth", like=tmp_path / "like.pth")
    found = torch.load(tmp_path / "out.pth")
    assert {name: value[0].item() for name, value in found.items()} == {
        f"{name}.norm.weight": at for at, name in enumerate(names)
    }


class Three(nn.Module):
    """Three layers that only their names tell apart."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b, self.c = nn.Linear(16, 16), nn.Linear(16, 16), nn.Linear(16, 16)


@pytest.mark.parametrize(("order", "swapped"), [("bac", "ab"), ("bca", "abc"), ("abc", "")])
def test_the_guard_tells_swapped_layers(order: str, swapped: str, tmp_path: Path) -> None:
    """Two layers or three that were loaded from one another's names."""
    torch.save(Three().state_dict(), tmp_path / "in.pth")
    with ckpt_tools.torch.guard(model := Three()) as seen:
        state = torch.load(tmp_path / "in.pth")
        keys = ("weight", "bias")
        model.load_state_dict(
            {f"{new}.{key}": state[f"{old}.{key}"] for new, old in zip("abc", order, strict=True) for key in keys}
        )
    assert {fate.name.partition(".")[0] for fate in seen.wrong() if fate.fate == "swapped"} == set(swapped)


def test_diff_by_cosine_shows_the_furthest_first(tmp_path: Path) -> None:
    """The smallest cosine stands first."""
    base = torch.tensor([1.0, 0.0])
    others = {"near": torch.tensor([1.0, 0.1]), "far": torch.tensor([-1.0, 0.1]), "middle": torch.tensor([0.1, 1.0])}
    torch.save(dict.fromkeys(others, base), tmp_path / "a.pth")
    torch.save(others, tmp_path / "b.pth")
    text = ckpt("diff", tmp_path / "a.pth", tmp_path / "b.pth", "--values", "--sort", "cosine", code=1).output
    places = [text.index(f"\n{name}") for name in ("far", "middle", "near")]
    assert places == sorted(places)


@pytest.mark.parametrize("command", ["check", "scan"])
def test_standard_input_is_given_once(command: str) -> None:
    """Two files from one standard input are refused before it is read."""
    assert "Standard input was given twice" in ckpt(command, "-", "-", code=2).output


def test_tied_names_keep_their_places_in_each_shard(tmp_path: Path) -> None:
    """Names in shards come back in the model's order, tied ones too, from all shards together and from each."""
    one, two = torch.ones(400), torch.zeros(100)
    torch.save({"a": one, "b": two, "c": two, "d": torch.zeros(101), "e": torch.zeros(102)}, tmp_path / "in.pth")
    ckpt_tools.convert(tmp_path / "in.pth", tmp_path / "out", shard_size="1700B", format="safetensors")
    shards = [ckpt_tools.inspect(path).tensors for path in sorted((tmp_path / "out").glob("*.safetensors"))]
    assert [[row["name"] for row in rows] for rows in shards] == [["a"], ["b", "c", "d", "e"]]
    assert [row["name"] for row in ckpt_tools.inspect(tmp_path / "out").tensors] == list("abcde")


def test_a_shard_of_an_index_is_not_renamed(tmp_path: Path) -> None:
    """In place: its names stand in the index too."""
    torch.save({f"module.{name}": torch.ones(300) for name in "abcd"}, tmp_path / "in.pth")
    ckpt_tools.convert(tmp_path / "in.pth", tmp_path / "out", shard_size="1300B", format="safetensors")
    shard = min((tmp_path / "out").glob("*.safetensors"))
    before = shard.read_bytes()
    with pytest.raises(ConvertError, match="is a shard of a model"):
        ckpt_tools.edit_in_place(shard, strip_module=True)
    assert shard.read_bytes() == before


@pytest.mark.filterwarnings("ignore:Sparse")
@pytest.mark.parametrize("layout", ["coo", "csr", "csc", "bsr", "bsc", "parameter"])
def test_sparse_indices_outside_the_shape(layout: str, tmp_path: Path) -> None:
    """Torch 2.13 loads such a tensor, 2.14 does not: a problem. One that is right is healthy."""
    plain = torch.tensor([[0.0, 1, 2, 0], [3, 0, 0, 4]])
    number = 4 if layout in ("coo", "csr", "parameter") else 2  # one more than the last that there is
    blocks = {"blocksize": (1, 2)} if layout.startswith("bs") else {}
    made: Any = plain.to_sparse() if layout in ("coo", "parameter") else getattr(plain, f"to_sparse_{layout}")(**blocks)
    made = nn.Parameter(made) if layout == "parameter" else made
    torch.save({"s": made, "t": torch.ones(2)}, tmp_path / "good.pth")
    assert ckpt_tools.check(tmp_path / "good.pth").exit_code == 0
    by_rows = layout in ("csr", "bsr")
    indices = made.col_indices() if by_rows else made.row_indices() if layout in ("csc", "bsc") else made._indices()
    indices.view(-1)[-1] = number
    torch.save({"s": made, "t": torch.ones(2)}, tmp_path / "bad.pth")
    report = ckpt_tools.check(tmp_path / "bad.pth")
    assert [finding.code for finding in report.findings if finding.severity == "problem"] == ["sparse-indices"]
    assert "2.14" in report.findings[0].expected


def test_wrappers_inside_a_name(tmp_path: Path) -> None:
    """What is around a wrapper stays."""
    torch.save({"net._orig_mod.layer._fsdp_wrapped_module.w": torch.ones(1)}, tmp_path / "in.pth")
    ckpt_tools.convert(tmp_path / "in.pth", tmp_path / "out.pth", unwrap=True)
    assert list(torch.load(tmp_path / "out.pth")) == ["net.layer.w"]


def test_a_gguf_that_ends_with_a_tensor(tmp_path: Path) -> None:
    """Of a file that was cut behind the first tensor, one is complete."""
    torch.save({"a": torch.ones(8), "b": torch.ones(8)}, tmp_path / "in.pth")
    ckpt_tools.convert(tmp_path / "in.pth", tmp_path / "out.gguf")
    (tmp_path / "cut.gguf").write_bytes((tmp_path / "out.gguf").read_bytes()[:-32])
    assert "1 of 2 tensors complete" in ckpt("inspect", tmp_path / "cut.gguf", code=3).output


def test_checksums_over_several_blocks(tmp_path: Path) -> None:
    """A whole record that is longer than a block matches its CRC-32 where it is copied and cast."""
    torch.save({"w": torch.arange(2_500_000.0)}, tmp_path / "in.pth")
    ckpt_tools.convert(tmp_path / "in.pth", tmp_path / "out.safetensors")
    ckpt_tools.convert(tmp_path / "in.pth", tmp_path / "out.pth", dtype="bf16")
    assert torch.load(tmp_path / "out.pth")["w"][-1] == torch.tensor(2_499_999.0).bfloat16()


@pytest.mark.parametrize("order", [("bad.pth", "good.pth"), ("good.pth", "bad.pth")])
def test_the_worst_file_decides(order: tuple[str, str], tmp_path: Path) -> None:
    """The exit code of `check` is that of the worst file, wherever it stands."""
    torch.save({"w": torch.ones(1)}, tmp_path / "good.pth")
    torch.save({"module.w": torch.full((2,), float("nan"))}, tmp_path / "bad.pth")
    ckpt("check", "--values", *(tmp_path / name for name in order), code=1)


@pytest.mark.parametrize("name", ["in.pth", "in.safetensors"])
def test_files_are_closed(name: str, tmp_path: Path) -> None:
    """After each command the process has as many open files as before."""
    torch.save({"w": torch.ones(3)}, tmp_path / "in.pth")
    save_file({"w": torch.ones(3)}, tmp_path / "in.safetensors")
    counts = []
    for _ in range(3):
        ckpt_tools.inspect(tmp_path / name)
        ckpt_tools.check(tmp_path / name)
        ckpt_tools.convert(tmp_path / name, tmp_path / "out.pth", overwrite=True)
        free = os.dup(0)  # the lowest number that no open file has
        os.close(free)
        counts.append(free)
    assert len(set(counts)) == 1


def test_a_rank_loads_its_part_of_a_turned_tensor(tmp_path: Path) -> None:
    """Columns of a tensor whose elements do not lie row by row in the file."""
    whole = torch.arange(48.0).reshape(8, 6).t()
    torch.save({"weight": whole, "bias": torch.zeros(6)}, tmp_path / "in.pth")
    with rank_of(1, 2):
        model = nn.Linear(8, 6)
        mesh = init_device_mesh("cpu", (2,))
        part = distribute_tensor(torch.zeros(6, 8), mesh, [Shard(1)], src_data_rank=None)
        model.weight = nn.Parameter(part)
        ckpt_tools.torch.load_into(model, tmp_path / "in.pth")
        found: Any = model.weight
        assert torch.equal(found.to_local(), whole[:, 4:])


def test_the_ends_of_a_large_tensor(tmp_path: Path) -> None:
    """As many values from its end as from its beginning."""
    torch.save({"w": torch.arange(5000)}, tmp_path / "in.pth")
    shown = [int(number) for number in re.findall(r"\b\d+\b", ckpt("show", tmp_path / "in.pth", "w").output.partition("[")[2])]
    first = [number for number in shown if number < 2500]
    assert shown == [*first, *(4999 - number for number in reversed(first))]
