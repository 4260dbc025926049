"""Every option of `convert`, checked on what torch loads from the result."""

import os
from collections import OrderedDict
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file
from torch import nn
from torch.optim.swa_utils import AveragedModel

import ckpt_tools
from ckpt_tools import Converted
from ckpt_tools.errors import ConvertError, UsageError
from fixtures.make import UsersModule, network, tagged, training_state
from tests.support.graphs import assert_same, element_bytes, load_with_tags
from tests.support.samples import FIXTURES
from tests.support.zips import big_endian


def run(tmp_path: Path, data: Any, **options: Any) -> tuple[Any, Converted]:
    """Save with torch, convert, load with torch (weights_only); the report beside it."""
    source, target = tmp_path / "in.pth", tmp_path / "out.pth"
    torch.save(data, source)
    report = ckpt_tools.convert(source, target, overwrite=True, **options)
    return torch.load(target, map_location="cpu", weights_only=True), report


def codes(report: Converted) -> list[str]:
    return [note.code for note in report.notes]


def assert_is(state_dict: Any, model: nn.Module) -> None:
    """A loaded state dict is the model's own: names, order, bits, `_metadata`."""
    expected = model.state_dict()
    assert list(state_dict) == list(expected)
    assert {name: element_bytes(value) for name, value in state_dict.items()} == {
        name: element_bytes(value) for name, value in expected.items()
    }
    assert list(state_dict._metadata.items()) == list(expected._metadata.items())  # type: ignore[attr-defined]
    model.load_state_dict(state_dict)


def test_averaged_model(tmp_path: Path) -> None:
    """`n_averaged` stands beside the names: it keeps its own, and the others are stripped all the same."""
    model = AveragedModel(nn.DataParallel(network()))
    loaded, report = run(tmp_path, model.state_dict(), strip_module=True)
    assert list(loaded) == ["n_averaged", *network().state_dict()]
    assert report.state_dicts[0].renamed == 11
    assert codes(report) == []


@pytest.mark.parametrize("options", [{"unwrap": True}, {"strip_module": True}])
def test_users_own_module_is_untouched(tmp_path: Path, options: dict[str, Any]) -> None:
    """`norm.module.weight` stays; `module.module.weight` is ambiguous, and the report says so."""
    model = UsersModule()
    loaded, report = run(tmp_path, nn.DataParallel(model).state_dict(), **options)
    assert list(loaded) == ["norm.module.weight", "norm.module.bias", "weight", "bias"]
    assert codes(report) == ["uneven-prefix"]
    loaded, report = run(tmp_path, nn.DataParallel(model).state_dict(), rename=[r"^module\.="])
    assert_is(loaded, model)
    assert codes(report) == []


@pytest.mark.parametrize("options", [{"add_module": True}, {"rename": "m=mm"}, {"strip_module": True, "add_prefix": "p."}])
def test_a_dict_under_two_paths_is_renamed_once(tmp_path: Path, options: dict[str, Any]) -> None:
    """State dict, `_metadata` and optimizer that are saved under two keys get their new names once, and stay shared."""
    state = training_state(named=True)
    one, _ = run(tmp_path, state, **options)
    filtered = OrderedDict(state["model"])
    filtered._metadata = state["model"]._metadata  # type: ignore[attr-defined]
    twice, report = run(tmp_path, {**state, "best": state["model"], "filtered": filtered, "old": state["optimizer"]}, **options)
    assert list(twice["best"]) == list(twice["filtered"]) == list(one["model"])
    assert twice["best"] is twice["model"]
    assert twice["filtered"]._metadata == twice["model"]._metadata == one["model"]._metadata
    names = [twice[key]["param_groups"][0]["param_names"] for key in ("optimizer", "old")]
    assert names == [one["optimizer"]["param_groups"][0]["param_names"]] * 2
    assert [(row.where, row.renamed) for row in report.state_dicts] == [(["model"], 11), (["best"], 11), (["filtered"], 11)]
    assert report.state_dicts[0].examples == report.state_dicts[1].examples


# --- devices


def tags_of(path: Path) -> list[str]:
    """The device tags that torch meets in a file, in the order of the storages."""
    return list(load_with_tags(path)[1].values())


def test_map_location_places_as_torch_load_does(tmp_path: Path) -> None:
    """Pairs change the tags that torch.load(map_location=dict) would change, and no others."""
    pairs = {"cuda:0": "cuda:5", "cuda:3": "cpu"}
    spec = ",".join(f"{old}={new}" for old, new in pairs.items())
    report = ckpt_tools.convert(FIXTURES / "mixed_devices.pth", tmp_path / "out.pth", map_location=spec)
    expected = [pairs.get(tag, tag) for tag in tags_of(FIXTURES / "mixed_devices.pth")]
    assert tags_of(tmp_path / "out.pth") == expected
    assert set(report.devices) == {"cuda:0 -> cuda:5", "cuda:3 -> cpu"}


@pytest.mark.parametrize("device", ["cuda:128", "cuda:00", "cuda:999999999999", "meta"])
def test_map_location_takes_no_device_that_torch_cannot_name(tmp_path: Path, device: str) -> None:
    with pytest.raises(UsageError, match="is not a device"):
        ckpt_tools.convert(FIXTURES / "ddp.pth", tmp_path / "out.pth", map_location=device)


def test_a_negated_view_is_not_cast_to_what_torch_cannot_negate(tmp_path: Path) -> None:
    """The imaginary part of a conjugate: torch.load gives it back with its bit, which no 8-bit float has a function for."""
    view = torch.tensor([1 + 2j, 3 - 4j]).conj().imag
    torch.save({"w": view}, tmp_path / "in.pth")
    with pytest.raises(ConvertError, match="cannot negate float8_e4m3fn"):
        ckpt_tools.convert(tmp_path / "in.pth", tmp_path / "out.pth", dtype="fp8_e4m3")
    ckpt_tools.convert(tmp_path / "in.pth", tmp_path / "out.pth", dtype="bf16")
    assert torch.load(tmp_path / "out.pth")["w"].tolist() == view.tolist()


def test_map_location_swaps(tmp_path: Path) -> None:
    """Two devices change places: pairs apply at once, not one after another."""
    first, second = torch.ones(2), torch.zeros(2)
    with tagged(lambda storage: "cuda:0" if storage.data_ptr() == first.data_ptr() else "cuda:1"):
        torch.save({"a.w": first, "b.w": second}, tmp_path / "in.pth")
    ckpt_tools.convert(tmp_path / "in.pth", tmp_path / "out.pth", map_location="cuda:0=cuda:1,cuda:1=cuda:0")
    assert tags_of(tmp_path / "out.pth") == ["cuda:1", "cuda:0"]


def test_map_location_reaches_every_storage(tmp_path: Path) -> None:
    """Tensors in attributes of tensors, in sparse tensors and in tuples are retagged too."""
    parameter = nn.Parameter(torch.ones(1))
    parameter.scale = torch.ones(3)  # type: ignore[attr-defined]
    data = {"p.w": parameter, "s.w": torch.eye(2).to_sparse(), "t": (1, [torch.zeros(1)])}
    with tagged(lambda storage: "cuda:2"):
        torch.save(data, tmp_path / "in.pth")
    ckpt_tools.convert(tmp_path / "in.pth", tmp_path / "out.pth", map_location="cpu")
    assert_same(torch.load(tmp_path / "out.pth", weights_only=True), data)


def test_step_counters_keep_their_dtype(tmp_path: Path) -> None:
    """An optimizer counts in float32, where bf16 would stop at 256; naming the counters casts them."""
    loaded, report = run(tmp_path, training_state(), dtype="bf16")
    assert {row["step"].dtype for row in loaded["optimizer"]["state"].values()} == {torch.float32}
    assert loaded["optimizer"]["state"][0]["exp_avg"].dtype is torch.bfloat16
    assert codes(report) == ["still-wrapped", "steps-kept"]
    loaded, report = run(tmp_path, training_state(), dtype="*.step=bf16")
    assert {row["step"].dtype for row in loaded["optimizer"]["state"].values()} == {torch.bfloat16}


def test_safetensors_metadata(tmp_path: Path) -> None:
    """Plain values stand in the metadata as text, nested ones as JSON, objects in their plain form."""
    from argparse import Namespace

    data = {"state_dict": {"a.w": torch.ones(1), "note": "in"}, "epoch": 3, "name": "run", "cfg": {"lr": [0.1, None]}}
    data["args"] = Namespace(seed=1)
    torch.save(data, tmp_path / "in.pth")
    report = ckpt_tools.convert(tmp_path / "in.pth", tmp_path / "out.safetensors")
    with safe_open(tmp_path / "out.safetensors", "pt") as file:
        metadata = file.metadata()
    assert metadata == {"format": "pt", "epoch": "3", "name": "run", "cfg": '{"lr": [0.1, null]}', "note": "in",
                        "args": '{"seed": 1}'}  # fmt: skip
    assert [(fate.name, fate.became) for fate in report.objects] == [("argparse.Namespace", "dict")]


@pytest.mark.parametrize("target", ["out.pth", "out.safetensors"])
def test_big_endian(tmp_path: Path, target: str) -> None:
    """A file from a big-endian machine becomes little-endian, with the values that torch loads from it."""
    data = {
        "a.w": torch.arange(5.0), "b.w": torch.arange(4, dtype=torch.int16), "c.w": torch.tensor([1 + 2j]),
        "d.w": torch.tensor([1, 2], dtype=torch.uint8), "e.w": torch.tensor([True, False]), "f.w": torch.ones(3).double(),
    }  # fmt: skip
    torch.save(data, tmp_path / "little.pth")
    widths = {str(key): (4 if value.is_complex() else value.element_size()) for key, value in enumerate(data.values())}
    big_endian(tmp_path / "little.pth", tmp_path / "in.pth", widths)
    assert_same(torch.load(tmp_path / "in.pth", weights_only=True), data)
    ckpt_tools.convert(tmp_path / "in.pth", tmp_path / target)
    loaded = load_file(tmp_path / target) if target.endswith("s") else torch.load(tmp_path / target, weights_only=True)
    assert_same({name: loaded[name] for name in data}, data)
    assert "big-endian" in [finding.code for finding in ckpt_tools.inspect(tmp_path / "in.pth").findings]


# --- checks, dry runs, existing outputs


def test_dry_run_writes_nothing(tmp_path: Path) -> None:
    """The report of a dry run is that of the real one, but for the time; an existing output is no obstacle."""
    target = tmp_path / "out.pth"
    dry = ckpt_tools.convert(FIXTURES / "training.pth", target, strip_module=True, dry_run=True)
    assert os.listdir(tmp_path) == []
    real = ckpt_tools.convert(FIXTURES / "training.pth", target, strip_module=True)
    before = target.stat()
    ckpt_tools.convert(FIXTURES / "training.pth", target, dry_run=True)
    assert target.stat().st_mtime_ns == before.st_mtime_ns
    assert real.bytes == before.st_size
    reports = [report.to_json() | {"seconds": 0, "dry_run": None} for report in (dry, real)]
    assert reports[0] == reports[1]


def test_ties_of_save_model_are_put_back(tmp_path: Path) -> None:
    """The tied name that safetensors.torch.save_model left to the metadata is there again after a conversion, tied."""
    from safetensors.torch import save_model

    model = nn.Sequential(nn.Linear(2, 2, bias=False), nn.Linear(2, 2, bias=False))
    model[1].weight = model[0].weight
    save_model(model, str(tmp_path / "in.safetensors"))
    report = ckpt_tools.convert(tmp_path / "in.safetensors", tmp_path / "out.pth")
    loaded = torch.load(tmp_path / "out.pth")
    assert loaded["0.weight"].data_ptr() == loaded["1.weight"].data_ptr()
    assert report.dropped == []
    assert any(note.code == "ties-restored" for note in report.notes)


@pytest.mark.parametrize("name", ["out", "llama-3.1-8B"])
@pytest.mark.parametrize("index", [False, True])
def test_a_folder_asks(tmp_path: Path, name: str, index: bool) -> None:
    """A folder in, and out a name that a folder could have: asked, with both ways named; each of them works."""
    ckpt_tools.convert(FIXTURES / "single.pth", tmp_path / "shards", shard_size="1KB")
    source = tmp_path / "shards" / "model.safetensors.index.json" if index else tmp_path / "shards"
    with pytest.raises(UsageError, match=f"Is .*{name} to be a file or a folder") as caught:
        ckpt_tools.convert(source, tmp_path / name)
    assert "`shard_size='5GB'`" in caught.value.fix
    with pytest.raises(UsageError, match="to be a file or a folder"):
        ckpt_tools.average([source, source], tmp_path / name)
    ckpt_tools.convert(source, tmp_path / name, shard_size="5GB")
    ckpt_tools.convert(source, tmp_path / "one", format="pth")
    ckpt_tools.convert(source, tmp_path / "two.pth")
    assert (tmp_path / name).is_dir()
    assert (tmp_path / "one").is_file()


def test_a_prefix_without_its_dot(tmp_path: Path) -> None:
    """Stripped it would leave names that begin with a dot; added it runs into the name, which is noted."""
    torch.save({"net.a.weight": torch.ones(2)}, tmp_path / "in.pth")
    with pytest.raises(UsageError, match=r"leaves '\.a\.weight'") as caught:
        ckpt_tools.convert(tmp_path / "in.pth", tmp_path / "out.pth", strip_prefix="net")
    assert "'net.'" in caught.value.fix
    notes = ckpt_tools.convert(tmp_path / "in.pth", tmp_path / "out.pth", add_prefix="my").notes
    assert [note.code for note in notes] == ["no-dot"]


@pytest.mark.parametrize("device", ["cpu:0", "cuda:0=cpu:1"])
def test_a_cpu_with_a_number_is_the_cpu(tmp_path: Path, device: str) -> None:
    """torch.load knows no other tag of it; of devices that it restores nothing to it knows none."""
    with tagged(lambda storage: "cuda:0"):
        torch.save({"w": torch.ones(2)}, tmp_path / "in.pth")
    ckpt_tools.convert(tmp_path / "in.pth", tmp_path / "out.pth", map_location=device)
    assert torch.load(tmp_path / "out.pth", weights_only=True)["w"].tolist() == [1, 1]
    with pytest.raises(UsageError, match="restores nothing to vulkan"):
        ckpt_tools.convert(tmp_path / "in.pth", tmp_path / "no.pth", map_location="vulkan")


def test_slim_leaves_nothing_of_what_is_dropped(tmp_path: Path) -> None:
    """A view of a tensor that is dropped has a storage of its own size."""
    secret = torch.full((1000,), 7.0)
    torch.save({"secret": secret, "part": secret[:3]}, tmp_path / "in.pth")
    ckpt_tools.convert(tmp_path / "in.pth", tmp_path / "out.pth", drop="secret", slim=True)
    part = torch.load(tmp_path / "out.pth")["part"]
    assert (part.tolist(), part.untyped_storage().nbytes()) == ([7, 7, 7], 12)
