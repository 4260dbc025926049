"""Every option of `convert`, checked on what torch loads from the result."""

from __future__ import annotations

import json
import os
import warnings
import zipfile
from collections import OrderedDict
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from torch import nn
from torch.optim.swa_utils import AveragedModel

import ckpt_tools
from ckpt_tools.errors import (
    ChecksumError,
    CkptError,
    CollisionError,
    ContainerLimitError,
    ConvertError,
    NothingMatchedError,
    ObjectsError,
    OutputError,
    OutputExistsError,
    UsageError,
)
from ckpt_tools.operations.convert.report import Converted
from fixtures.make import UsersModule, network, tagged, training_state
from tests.support.graphs import assert_same, element_bytes, load_with_tags
from tests.support.samples import FIXTURES
from tests.support.zips import big_endian, flip_byte, rewrite


def run(tmp_path: Path, data: Any, **options: Any) -> tuple[Any, Converted]:
    """Save with torch, convert, load with torch (weights_only); the report beside it."""
    source, target = tmp_path / "in.pth", tmp_path / "out.pth"
    torch.save(data, source)
    report = ckpt_tools.convert(source, target, overwrite=True, **options)
    return torch.load(target, map_location="cpu", weights_only=True), report


def expect_refused(tmp_path: Path, data: Any, kind: type[CkptError], match: str = ".", **options: Any) -> CkptError:
    """Save with torch; convert must refuse, and write nothing."""
    source, target = tmp_path / "in.pth", tmp_path / options.pop("name", "out.pth")
    torch.save(data, source)
    with pytest.raises(kind, match=match) as caught:
        ckpt_tools.convert(source, target, **options)
    assert sorted(os.listdir(tmp_path)) == ["in.pth"]
    return caught.value


def codes(report: Converted) -> list[str]:
    """The codes of a report's notes."""
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


# --- names


@pytest.mark.parametrize("wraps", [1, 2])
def test_strip_module(tmp_path: Path, wraps: int) -> None:
    """A wrapped state dict becomes the plain model's, repeated wrappers too."""
    model: nn.Module = network()
    for _ in range(wraps):
        model = nn.DataParallel(model)
    loaded, report = run(tmp_path, model.state_dict(), strip_module=True)
    assert_is(loaded, network())
    assert [(row.tensors, row.renamed, row.examples[0]) for row in report.state_dicts] == [
        (11, 11, ("module." * wraps + "features.0.weight", "features.0.weight"))
    ]
    assert codes(report) == []


def test_add_module(tmp_path: Path) -> None:
    """A plain state dict becomes what nn.DataParallel's own is."""
    loaded, _ = run(tmp_path, network().state_dict(), add_module=True)
    assert_is(loaded, nn.DataParallel(network()))


@pytest.mark.parametrize(
    "name", ["compiled", "compiled_parallel", "parallel_compiled", "fsdp", "data_parallel", "ddp", "single", "cuda"]
)
def test_unwrap(name: str, tmp_path: Path) -> None:
    """Whatever wrapped the network, the plain network loads the result."""
    ckpt_tools.convert(FIXTURES / f"{name}.pth", tmp_path / "out.pth", unwrap=True)
    assert_is(torch.load(tmp_path / "out.pth", map_location="cpu", weights_only=True), network())


def test_averaged_model(tmp_path: Path) -> None:
    """`n_averaged` stands beside the names: it keeps its own, and the others are stripped all the same."""
    model = AveragedModel(nn.DataParallel(network()))
    loaded, report = run(tmp_path, model.state_dict(), strip_module=True)
    assert list(loaded) == ["n_averaged", *network().state_dict()]
    assert report.state_dicts[0].renamed == 11
    assert codes(report) == []


def test_users_own_module_is_untouched(tmp_path: Path) -> None:
    """`norm.module.weight` stays; `module.module.weight` is ambiguous, and the report says so."""
    model = UsersModule()
    loaded, report = run(tmp_path, nn.DataParallel(model).state_dict(), unwrap=True)
    assert list(loaded) == ["norm.module.weight", "norm.module.bias", "weight", "bias"]
    assert codes(report) == ["uneven-prefix"]
    loaded, report = run(tmp_path, nn.DataParallel(model).state_dict(), rename=[r"^module\.="])
    assert_is(loaded, model)
    assert codes(report) == []


def test_values_beside_tensors_keep_their_names(tmp_path: Path) -> None:
    """In a mixed dict only tensors and their modules' extra state are names."""
    data = {"module.w": torch.ones(1), "epoch": 3, "module._extra_state": {"a": 1}, "meta": {"x": 1}, 7: "seven"}
    loaded, _ = run(tmp_path, data, strip_module=True)
    assert list(loaded) == ["w", "epoch", "_extra_state", "meta", 7]
    loaded, _ = run(tmp_path, data, add_prefix="a.")
    assert list(loaded) == ["a.module.w", "epoch", "a.module._extra_state", "meta", 7]


def test_prefixes(tmp_path: Path) -> None:
    """Any literal prefix can be removed and put in front."""
    data = OrderedDict((f"encoder.{name}", value) for name, value in network().state_dict().items())
    loaded, _ = run(tmp_path, data, strip_prefix="encoder.", add_prefix="backbone.")
    assert list(loaded) == [f"backbone.{name}" for name in network().state_dict()]


def test_renames_in_order(tmp_path: Path) -> None:
    """Regular expressions with groups, one after another."""
    loaded, report = run(tmp_path, network().state_dict(), rename=[r"^fc(\d)\.=head.\1.", r"head\.1=first", "features=f"])
    assert list(loaded)[-4:] == ["first.weight", "first.bias", "head.2.weight", "head.2.bias"]
    assert list(loaded._metadata) == ["", "f", "f.0", "f.1", "f.2", "first", "head.2"]
    assert report.state_dicts[0].renamed == 11


def test_names_in_every_state_dict_and_optimizer(tmp_path: Path) -> None:
    """All state dicts of a checkpoint are renamed, and the optimizer's `param_names` with them."""
    state = training_state(named=True)
    state["nets"] = [nn.DataParallel(network()).state_dict(), {"ema": nn.DataParallel(network()).state_dict()}]
    loaded, report = run(tmp_path, state, strip_module=True)
    for state_dict in (loaded["model"], loaded["nets"][0], loaded["nets"][1]["ema"]):
        assert list(state_dict) == list(network().state_dict())
    names = [name for name, _ in network().named_parameters()]
    assert loaded["optimizer"]["param_groups"][0]["param_names"] == names
    assert report.optimizer_names == len(names)
    assert [row.where for row in report.state_dicts] == [["model"], ["nets", 0], ["nets", 1, "ema"]]


def test_optimizer_loads_after_renaming(tmp_path: Path) -> None:
    """A plain model and its named optimizer take up the training of the wrapped one."""
    loaded, _ = run(tmp_path, training_state(named=True), strip_module=True)
    model = network()
    model.load_state_dict(loaded["model"])
    optimizer = torch.optim.AdamW(model.named_parameters())
    optimizer.load_state_dict(loaded["optimizer"])
    assert optimizer.state[model.fc2.bias]["step"] == 1


def test_collisions_are_errors(tmp_path: Path) -> None:
    """Two tensors for one name: the error names both, and nothing is written."""
    data = {"module.w": torch.ones(1), "w": torch.zeros(1)}
    error = expect_refused(tmp_path, data, CollisionError, r"'module\.w' and 'w'", strip_module=True)
    assert "`rename=" in error.fix
    expect_refused(tmp_path, {"module.epoch": torch.ones(1), "epoch": 3}, CollisionError, strip_module=True)


@pytest.mark.parametrize("option", ["strip_module", "unwrap"])
def test_a_wrapper_around_a_part_is_said_with_the_option_that_works(tmp_path: Path, option: str) -> None:
    """DataParallel on `features` alone, as in PyTorch's ImageNet example; it may also be the model's own name."""
    parts = torch.nn.Sequential()
    parts.add_module("features", torch.nn.DataParallel(torch.nn.Sequential(torch.nn.Linear(2, 2))))
    _, report = run(tmp_path, parts.state_dict(), **{option: True})
    (note,) = report.notes
    assert "'features.module.0.weight' has it inside" in note.text
    rule = note.text.split("`rename='")[1].split("'`")[0]
    loaded, _ = run(tmp_path, parts.state_dict(), rename=[rule])
    assert list(loaded) == ["features.0.weight", "features.0.bias"]


def test_a_model_saved_whole_in_its_wrapper_names_the_command_that_works(tmp_path: Path) -> None:
    """As `inspect` does."""
    path = tmp_path / "whole.pth"
    torch.save(torch.nn.DataParallel(torch.nn.Linear(2, 2)), path)
    with pytest.raises(ObjectsError, match="--strip-module --objects plain"):
        ckpt_tools.convert(path, tmp_path / "out.pth", strip_module=True)
    ckpt_tools.convert(path, tmp_path / "out.pth", strip_module=True, objects="plain")
    assert list(torch.load(tmp_path / "out.pth", weights_only=True)) == ["weight", "bias"]


@pytest.mark.parametrize("option", [{"strip_module": True}, {"unwrap": True}, {"strip_prefix": "x."}])
def test_a_prefix_that_is_not_there_is_noted(tmp_path: Path, option: dict[str, Any]) -> None:
    """Stripping nothing is a finding; the file is written all the same."""
    loaded, report = run(tmp_path, network().state_dict(), **option)
    assert_is(loaded, network())
    assert codes(report) == ["no-prefix"]


@pytest.mark.parametrize(
    ("prefixes", "option"),
    [(["module."], "`strip_module`"), (["_orig_mod."], "`unwrap`"), (["module._orig_mod."], "`unwrap`"), (["", ""], None)],
)
def test_a_copy_tells_that_names_are_still_wrapped(tmp_path: Path, prefixes: list[str], option: str | None) -> None:
    """Without an option of names the wrapper stays, and one note says which option removes it, not one a state dict."""
    states = {f"net{i}": {f"{prefix}fc.{name}": torch.ones(1) for name in "ab"} for i, prefix in enumerate(prefixes * 2)}
    _, report = run(tmp_path, states)
    notes = [note.text for note in report.notes if note.code == "still-wrapped"]
    assert notes == ([] if option is None else [note for note in notes[:1] if f"{option} removes it" in note])
    assert bool(notes) == (option is not None)
    assert "still-wrapped" not in codes(run(tmp_path, states, add_module=True)[1])


def test_a_prefix_that_is_not_there_is_told_with_the_one_that_is(tmp_path: Path) -> None:
    """Lightning's `model.` is another word in another project: what all names begin with stands in the note."""
    named = {f"net.{name}": value for name, value in network().state_dict().items()}
    _, report = run(tmp_path, named, strip_prefix="model.")
    assert "no name has the prefix; all begin with 'net.'" in report.notes[0].text


@pytest.mark.parametrize(
    ("options", "match"),
    [
        ({"rename": ["nowhere=x"]}, "changes no name"),
        ({"keep": ["nowhere*"]}, "`keep='nowhere"),
        ({"drop": ["nowhere*"]}, "`drop='nowhere"),
        ({"select": "modle"}, "`select='modle'`"),
        ({"drop": ["*"]}, "No tensor would be left"),
        ({"dtype": "bf16", "dtype_only": ["nowhere*"]}, "`dtype_only="),
        ({"select": "epoch"}, "No tensor would be left"),
        ({"select": "config"}, "No tensor would be left"),
    ],
)
def test_what_matches_nothing_is_refused(tmp_path: Path, options: dict[str, Any], match: str) -> None:
    """An option without effect and an empty result are errors with exit code 3."""
    error = expect_refused(tmp_path, training_state(), NothingMatchedError, match, **options)
    assert error.exit_code == 3


def test_a_near_miss_is_suggested(tmp_path: Path) -> None:
    """A misspelt --select gets the name that was meant."""
    assert "'model'" in expect_refused(tmp_path, training_state(), NothingMatchedError, select="modle").why


@pytest.mark.parametrize(
    "options",
    [
        {"strip_module": True, "add_module": True},
        {"strip_prefix": ""},
        {"add_prefix": ""},
        {"rename": ["no separator"]},
        {"rename": ["=x"]},
        {"rename": ["(=x"]},
        {"rename": [r"a=\1"]},
        {"map_location": "gpu"},
        {"map_location": "meta"},
        {"map_location": "cuda:0=cpu,cpu"},
        {"map_location": "cuda:0=cpu,cuda=cpu"},
        {"map_location": ""},
        {"dtype": "int8"},
        {"dtype_only": ["*"]},
        {"objects": "pickle"},
        {"format": "onnx"},
    ],
)
def test_options_that_cannot_be_read(tmp_path: Path, options: dict[str, Any]) -> None:
    """A malformed or contradictory option is a usage error with exit code 2."""
    assert expect_refused(tmp_path, training_state(), UsageError, **options).exit_code == 2


def test_nobody_is_left_without_a_name(tmp_path: Path) -> None:
    """A rename that takes the whole name away is refused."""
    expect_refused(tmp_path, {"weight": torch.ones(1)}, ConvertError, "without a name", rename=["weight="])


def test_no_state_dict_to_rename_in(tmp_path: Path) -> None:
    """A lone tensor has no names."""
    expect_refused(tmp_path, torch.ones(2), NothingMatchedError, "no state dict", strip_module=True)


# --- selection


@pytest.mark.parametrize(
    ("where", "pick"),
    [
        ("model", lambda state: state["model"]),
        ("nets.1", lambda state: state["nets"][1]),
        ("nets.0.ema", lambda state: state["nets"][0]["ema"]),
        ("optimizer.state.0.exp_avg", lambda state: state["optimizer"]["state"][0]["exp_avg"]),
    ],
)
def test_select(tmp_path: Path, where: str, pick: Any) -> None:
    """A subtree by its dotted path becomes the whole output: a state dict, an element of a list, one tensor."""
    state = training_state()
    state["nets"] = [{"ema": network().state_dict()}, network().state_dict()]
    loaded, _ = run(tmp_path, state, select=where)
    assert_same(pick(torch.load(tmp_path / "in.pth", weights_only=True)), loaded)


def test_keep_and_drop(tmp_path: Path) -> None:
    """Globs on names and on dotted paths; order stays, values stay with keep, and the report lists what went."""
    loaded, report = run(tmp_path, training_state(), keep=["*.weight"], drop=["optimizer", "*fc2*", "history"])
    assert list(loaded) == ["model", "scheduler", "epoch", "best_acc", "config"]
    assert list(loaded["model"]) == ["module.features.0.weight", "module.features.1.weight", "module.fc1.weight"]
    assert ("optimizer", "`keep` / `drop`") in report.dropped
    assert ("model.module.fc2.weight", "`keep` / `drop`") in report.dropped
    assert [note.code for note in report.notes] == ["still-wrapped"]
    loaded, report = run(tmp_path, {**training_state(), "mean": torch.ones(2)}, keep=["*.weight"], drop=["optimizer"])
    assert "mean" in loaded
    text = "`keep`: what lies outside state dicts stays, mean; `drop` takes it by path."
    assert [note.text for note in report.notes if note.code != "still-wrapped"] == [text]


# --- one dict under several paths


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


def test_globs_that_would_take_from_a_shared_dict(tmp_path: Path) -> None:
    """What is dropped at one path never goes from another; a key may go whole, and names at all paths alike."""
    weights = {"a.w": torch.ones(1), "b.w": torch.ones(2)}
    data = {"model": weights, "model_best": weights, "nets": [weights]}
    loaded, report = run(tmp_path, data, drop=["model_best*"])
    assert list(loaded) == ["model", "nets"]
    assert list(loaded["model"]) == ["a.w", "b.w"]
    assert report.dropped == [("model_best", "`keep` / `drop`")]
    loaded, report = run(tmp_path, data, drop=["a.*"])
    assert [list(value) for value in (loaded["model"], loaded["model_best"], loaded["nets"][0])] == [["b.w"]] * 3
    assert [path for path, _ in report.dropped] == ["model.a.w", "model_best.a.w", "nets.0.a.w"]
    (tmp_path / "out.pth").unlink()
    error = expect_refused(tmp_path, data, ConvertError, "one and the same dict or list", drop=["model.a.w"])
    assert "`drop='model_best'`" in error.fix


def test_dtype_only_by_name_in_a_shared_dict(tmp_path: Path) -> None:
    """A name counts at every path of the dict."""
    weights = {"a.w": torch.ones(1), "b.w": torch.ones(2)}
    loaded, _ = run(tmp_path, {"model": weights, "best": weights}, dtype="bf16", dtype_only="a.*")
    assert [tensor.dtype for tensor in loaded["best"].values()] == [torch.bfloat16, torch.float32]


# --- devices


def tags_of(path: Path) -> list[str]:
    """The device tags that torch meets in a file, in the order of the storages."""
    return list(load_with_tags(path)[1].values())


@pytest.mark.parametrize("target", ["cpu", "cuda", "cuda:1", "mps", "xpu:1"])
def test_map_location_for_all(target: str, tmp_path: Path) -> None:
    """One device for every storage; cpu makes the file load on a machine without CUDA."""
    report = ckpt_tools.convert(FIXTURES / "mixed_devices.pth", tmp_path / "out.pth", map_location=target)
    assert set(tags_of(tmp_path / "out.pth")) == {target}
    assert sum(report.devices.values()) == sum(tag != target for tag in tags_of(FIXTURES / "mixed_devices.pth"))
    if target == "cpu":
        torch.load(tmp_path / "out.pth", weights_only=True)


def test_map_location_places_as_torch_load_does(tmp_path: Path) -> None:
    """Pairs change the tags that torch.load(map_location=dict) would change, and no others."""
    pairs = {"cuda:0": "cuda:5", "cuda:3": "cpu"}
    spec = ",".join(f"{old}={new}" for old, new in pairs.items())
    report = ckpt_tools.convert(FIXTURES / "mixed_devices.pth", tmp_path / "out.pth", map_location=spec)
    expected = [pairs.get(tag, tag) for tag in tags_of(FIXTURES / "mixed_devices.pth")]
    assert tags_of(tmp_path / "out.pth") == expected
    assert set(report.devices) == {"cuda:0 -> cuda:5", "cuda:3 -> cpu"}


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


def test_map_location_means_nothing_for_safetensors(tmp_path: Path) -> None:
    """safetensors has no tags: said, not refused."""
    report = ckpt_tools.convert(FIXTURES / "cuda.pth", tmp_path / "out.safetensors", map_location="cpu")
    assert "no-device-tags" in codes(report)
    report = ckpt_tools.convert(FIXTURES / "single.safetensors", tmp_path / "out.pth", map_location="cuda")
    assert "no-device-tags" in codes(report)
    assert set(tags_of(tmp_path / "out.pth")) == {"cpu"}


def test_map_location_without_effect_is_noted(tmp_path: Path) -> None:
    """No storage with that tag: the file is written, and the report says so."""
    _, report = run(tmp_path, network().state_dict(), map_location="cuda:0=cpu")
    assert codes(report) == ["devices-unchanged"]


# --- dtypes


@pytest.mark.parametrize(("word", "dtype"), [("bf16", torch.bfloat16), ("fp16", torch.half), ("fp64", torch.double)])
def test_dtype(tmp_path: Path, word: str, dtype: torch.dtype) -> None:
    """Float tensors are cast as torch casts them; integers, bools and complex numbers stay."""
    data = {"a.w": torch.randn(50), "b.w": torch.arange(3), "c.w": torch.tensor([True]), "d.w": torch.ones(2).half()}
    data["e.w"] = torch.ones(2, dtype=torch.complex64)
    loaded, report = run(tmp_path, data, dtype=word)
    assert_same({name: value.to(dtype) if value.is_floating_point() else value for name, value in data.items()}, loaded)
    assert sum(report.casts.values()) == (1 if dtype is torch.half else 2)


@pytest.mark.parametrize("word", ["bf16", "fp16", "fp32"])
@pytest.mark.parametrize("source", [torch.float8_e4m3fn, torch.float8_e5m2, torch.float8_e8m0fnu, torch.bfloat16])
def test_dtype_of_small_floats(tmp_path: Path, source: torch.dtype, word: str) -> None:
    """fp8 has no storage class of its own: what it becomes has one, and loads with torch's values."""
    target = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}[word]
    values = torch.tensor([0.5, 2.0, 1024.0]).to(source)
    loaded, _ = run(tmp_path, {"a.w": values, "b.w": values[1:]}, dtype=word)
    cast = values.to(target)
    assert_same({"a.w": cast, "b.w": cast[1:]}, loaded)


@pytest.mark.parametrize("source", [torch.float64, torch.float32, torch.bfloat16, torch.float8_e8m0fnu])
def test_overflow_is_counted(tmp_path: Path, source: torch.dtype) -> None:
    """Finite values that become infinite are counted per tensor, between types of one size too; infinities are not."""
    values = torch.tensor([2.0**20, 2.0**30, 1.0]).to(source)
    data = {"model": {"a.w": values, "b.w": torch.ones(2)}, "ema": {"a.w": values[:1].clone()}}
    if source is not torch.float8_e8m0fnu:
        data["model"]["c.w"] = torch.tensor([float("inf"), float("nan")]).to(source)
    loaded, report = run(tmp_path, data, dtype="fp16")
    assert report.overflowed == {"model.a.w": 2, "ema.a.w": 1}
    assert loaded["model"]["a.w"].isinf().tolist() == [True, True, False]


def test_dtype_only(tmp_path: Path) -> None:
    """Only tensors whose name or path matches are cast."""
    loaded, report = run(tmp_path, training_state(), dtype="bf16", dtype_only=["module.fc*", "optimizer.*.exp_avg"])
    cast = {name for name, value in loaded["model"].items() if value.dtype is torch.bfloat16}
    assert cast == {f"module.fc{number}.{leaf}" for number in (1, 2) for leaf in ("weight", "bias")}
    state = loaded["optimizer"]["state"][0]
    assert (state["exp_avg"].dtype, state["exp_avg_sq"].dtype) == (torch.bfloat16, torch.float32)
    assert report.casts == {"float32 -> bfloat16": 12}


@pytest.mark.parametrize("word", ["bfloat16", "float16", "float32", "float64", "float8_e4m3fn", "float8_e5m2"])
def test_dtype_by_torchs_name(tmp_path: Path, word: str) -> None:
    """torch's own names do as well as the short ones."""
    loaded, _ = run(tmp_path, {"a.w": torch.ones(3).double() if word == "float32" else torch.ones(3)}, dtype=word)
    assert loaded["a.w"].dtype is getattr(torch, word)


@pytest.mark.parametrize("source", [torch.float32, torch.float64, torch.bfloat16, torch.float8_e5m2], ids=str)
@pytest.mark.parametrize(("word", "dtype"), [("fp8_e4m3", torch.float8_e4m3fn), ("fp8_e5m2", torch.float8_e5m2)])
def test_dtype_fp8(tmp_path: Path, source: torch.dtype, word: str, dtype: torch.dtype) -> None:
    """What is beyond the largest number becomes it, and is counted; all else is rounded as torch rounds it; views stay."""
    inside = torch.randn(1000, generator=torch.Generator().manual_seed(0)).mul(20).to(source)
    beyond = torch.tensor([449.0, -1e4, 57344.0, 57345.0, 1e5, float("inf"), -float("inf"), float("nan"), 1e-9, 0.0])
    beyond = beyond.to(source)
    loaded, report = run(tmp_path, {"a.w": inside, "b.w": inside[::2], "c.w": beyond}, dtype=word)
    assert torch.equal(loaded["a.w"].view(torch.uint8), inside.to(dtype).view(torch.uint8))
    assert torch.equal(loaded["b.w"].view(torch.uint8), inside[::2].to(dtype).view(torch.uint8))
    largest, wide = torch.finfo(dtype).max, beyond.float()
    found = loaded["c.w"].float()
    finite = ~(wide.isinf() | wide.isnan())
    assert torch.equal(found[finite], wide[finite].clamp(-largest, largest).to(dtype).float())
    assert found[7].isnan()
    assert found[5] == (largest if dtype is torch.float8_e4m3fn else float("inf"))
    if source is not dtype:
        counted = (wide.abs() > largest) & (finite if dtype is torch.float8_e5m2 else ~wide.isnan())
        assert report.saturated == ({"c.w": int(counted.sum())} if counted.any() else {})
        assert not report.overflowed


def test_dtype_by_glob(tmp_path: Path) -> None:
    """A type for what a glob matches, another for the rest; the last glob that matches counts, a mapping says the same."""
    data = {"model": {"a.w": torch.ones(2), "a.norm.w": torch.ones(2), "b.w": torch.ones(2), "n": torch.tensor(1)}}
    for dtype in (["bf16", "a.*=fp16", "*.norm.*=fp64"], {"": "bf16", "a.*": torch.float16, "model.*.norm.*": "fp64"}):
        loaded, report = run(tmp_path, data, dtype=dtype)
        found = {name: str(value.dtype).removeprefix("torch.") for name, value in loaded["model"].items()}
        assert found == {"a.w": "float16", "a.norm.w": "float64", "b.w": "bfloat16", "n": "int64"}
        assert sum(report.casts.values()) == 3
    loaded, _ = run(tmp_path, data, dtype="*.norm.*=fp16")
    assert [value.dtype for value in loaded["model"].values()][:3] == [torch.float32, torch.float16, torch.float32]
    loaded, _ = run(tmp_path, data, dtype=["fp16", "b.*=fp64"], dtype_only="a.w")
    assert [value.dtype for value in loaded["model"].values()][:3] == [torch.float16, torch.float32, torch.float64]


def test_dtype_by_glob_is_refused(tmp_path: Path) -> None:
    """A glob that matches nothing, two types for all or for one glob, a type that there is not, a shared storage in two."""
    weight = torch.ones(4)
    data = {"a.w": weight, "b.w": weight[1:]}
    expect_refused(tmp_path, data, NothingMatchedError, "`dtype='x\\*'` matches no float", dtype="x*=bf16")
    expect_refused(tmp_path, data, UsageError, "given twice", dtype=["bf16", "fp16"])
    expect_refused(tmp_path, data, UsageError, "given twice", dtype=["a=bf16", "a=fp16"])
    expect_refused(tmp_path, data, UsageError, "is not one of", dtype="a.w=int8")
    expect_refused(tmp_path, data, UsageError, "`dtype` is missing", dtype="a.w=bf16", dtype_only="b.w")
    expect_refused(tmp_path, data, ConvertError, "share one storage", dtype=["bf16", "a.w=fp16"])


def test_dtype_leaves_parts_of_quantised_weights(tmp_path: Path) -> None:
    """Codes and scales mean nothing in another dtype: they stay, which is noted, unless a glob names them."""
    data = {"a.weight": torch.ones(2, 2).to(torch.float8_e4m3fn), "a.weight_scale": torch.ones(1), "norm.weight": torch.ones(2)}
    loaded, report = run(tmp_path, data, dtype="bf16")
    assert [value.dtype for value in loaded.values()] == [torch.float8_e4m3fn, torch.float32, torch.bfloat16]
    assert "quantised-kept" in codes(report)
    loaded, report = run(tmp_path, data, dtype="*_scale=bf16")
    assert [value.dtype for value in loaded.values()] == [torch.float8_e4m3fn, torch.bfloat16, torch.float32]


def test_step_counters_keep_their_dtype(tmp_path: Path) -> None:
    """An optimizer counts in float32, where bf16 would stop at 256; naming the counters casts them."""
    loaded, report = run(tmp_path, training_state(), dtype="bf16")
    assert {row["step"].dtype for row in loaded["optimizer"]["state"].values()} == {torch.float32}
    assert loaded["optimizer"]["state"][0]["exp_avg"].dtype is torch.bfloat16
    assert codes(report) == ["still-wrapped", "steps-kept"]
    loaded, report = run(tmp_path, training_state(), dtype="bf16", dtype_only=["*.step"])
    assert {row["step"].dtype for row in loaded["optimizer"]["state"].values()} == {torch.bfloat16}


def test_dtype_keeps_ties_and_views(tmp_path: Path) -> None:
    """Tied weights stay tied, strided and offset views stay views, Parameters stay Parameters."""
    base = torch.arange(24.0).reshape(4, 6)
    tied = nn.Parameter(torch.ones(3))
    loaded, _ = run(tmp_path, {"a.w": base[1:, ::2], "b.w": base.t(), "c.w": tied, "d.w": tied}, dtype="fp16")
    half = base.half()
    parameter = nn.Parameter(torch.ones(3).half())
    assert_same({"a.w": half[1:, ::2], "b.w": half.t(), "c.w": parameter, "d.w": parameter}, loaded)


def test_dtype_of_a_part_of_a_storage_is_refused(tmp_path: Path) -> None:
    """Tied tensors cannot be cast one without the other."""
    weight = torch.ones(3)
    expect_refused(
        tmp_path, {"a.w": weight, "b.w": weight[1:]}, ConvertError, "share one storage", dtype="bf16", dtype_only=["a.*"]
    )


def test_dtype_through_safetensors(tmp_path: Path) -> None:
    """Casts and the change of container go together."""
    source, target = tmp_path / "in.pth", tmp_path / "out.safetensors"
    torch.save(network().state_dict(), source)
    ckpt_tools.convert(source, target, dtype="bf16")
    for name, value in load_file(target).items():
        expected = network().state_dict()[name]
        assert torch.equal(value, expected.bfloat16() if expected.is_floating_point() else expected)


# --- containers


def test_format_by_extension_and_by_option(tmp_path: Path) -> None:
    """`.safetensors` means safetensors; --format decides otherwise."""
    source = FIXTURES / "single.pth"
    for name, format, container in (
        ("a.safetensors", None, "safetensors"), ("b.bin", None, "torch-zip"), ("c.bin", "safetensors", "safetensors"),
        ("d.safetensors", "pth", "torch-zip"), ("E.SAFETENSORS", None, "safetensors"),
    ):  # fmt: skip
        report = ckpt_tools.convert(source, tmp_path / name, format=format)  # type: ignore[arg-type]
        assert report.container == container == ckpt_tools.inspect(tmp_path / name).container


def test_safetensors_needs_one_flat_state_dict(tmp_path: Path) -> None:
    """With several state dicts or an optimizer the error names the option that helps, and that option helps."""
    state = training_state()
    state["ema"] = network().state_dict()
    error = expect_refused(tmp_path, state, ContainerLimitError, "has 2: 'model', 'ema'", name="o.safetensors")
    assert "`select='model'`" in error.fix
    del state["ema"]
    error = expect_refused(tmp_path, state, ContainerLimitError, "outside one", name="o.safetensors")
    assert "`select='model'`" in error.fix
    assert "`drop=['optimizer']`" in error.fix
    for options in ({"select": "model"}, {"drop": ["optimizer"]}):
        ckpt_tools.convert(tmp_path / "in.pth", tmp_path / "o.safetensors", overwrite=True, **options)
        assert set(load_file(tmp_path / "o.safetensors")) == set(state["model"])


def test_safetensors_refuses_tensors_without_a_name(tmp_path: Path) -> None:
    """A tensor under a key that is no text is never left behind as a value without text; the advice leads to a file."""
    state = {"m": {0: torch.ones(2), (1,): torch.ones(1), "a": torch.ones(3)}, "rng": torch.ones(4)}
    error = expect_refused(tmp_path, state, ContainerLimitError, "in 'rng', 'm.0', 'm.<tuple key>'", name="o.safetensors")
    assert error.fix.endswith("`drop=['rng', 'm.0', 'm.<tuple key>']`")
    report = ckpt_tools.convert(tmp_path / "in.pth", tmp_path / "o.safetensors", drop=["m.0", "m.<tuple key>", "rng"])
    assert report.tensors == len(load_file(tmp_path / "o.safetensors")) == 1


def test_safetensors_advice_for_extra_states(tmp_path: Path) -> None:
    """Tensors in a module's extra state are to be left out, and not to be chosen in place of the model."""
    state = {"l.w": torch.ones(2), "l._extra_state": {"t": torch.ones(1)}}
    error = expect_refused(tmp_path, state, ContainerLimitError, "outside one, in 'l._extra_state'", name="o.safetensors")
    assert error.fix == "Leave them out: `drop=['l._extra_state']`"
    ckpt_tools.convert(tmp_path / "in.pth", tmp_path / "o.safetensors", drop="l._extra_state")
    assert set(load_file(tmp_path / "o.safetensors")) == {"l.w"}


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


def test_safetensors_tells_what_has_no_text(tmp_path: Path) -> None:
    """Two keys that are one in JSON, and `_metadata` that holds more than versions, are told about; other rows come back."""
    state = OrderedDict([("a.w", torch.ones(1)), ("b.w", torch.ones(2)), ("cfg", {1: "a", "1": "b"}), ("n", {1: 2})])
    state._metadata = {"a": {"version": 1}, "b": {"sizes": [1, 2]}}  # type: ignore[attr-defined]
    torch.save(state, tmp_path / "in.pth")
    report = ckpt_tools.convert(tmp_path / "in.pth", tmp_path / "o.safetensors")
    assert codes(report) == ["value-dropped", "metadata-dropped"]
    with safe_open(tmp_path / "o.safetensors", "pt") as file:
        assert "cfg" not in file.metadata()
        assert file.metadata()["n"] == '{"1": 2}'
    ckpt_tools.convert(tmp_path / "o.safetensors", tmp_path / "back.pth")
    assert torch.load(tmp_path / "back.pth")._metadata == {"a": {"version": 1}}


def test_safetensors_ties(tmp_path: Path) -> None:
    """A tied weight is written once; the way back ties it again, at its place."""
    first, second = tmp_path / "a.safetensors", tmp_path / "b.pth"
    report = ckpt_tools.convert(FIXTURES / "tied.pth", first)
    assert report.aliases == {"decoder.weight": "embedding.weight"}
    assert "decoder.weight" not in load_file(first)
    ckpt_tools.convert(first, second)
    loaded = torch.load(second, weights_only=True)
    assert list(loaded) == list(torch.load(FIXTURES / "tied.pth", weights_only=True))
    assert loaded["decoder.weight"].data_ptr() == loaded["embedding.weight"].data_ptr()


def test_ties_survive_renaming_in_safetensors(tmp_path: Path) -> None:
    """Aliases follow the names, dropped originals leave their bytes to the alias."""
    middle = tmp_path / "m.safetensors"
    ckpt_tools.convert(FIXTURES / "tied.pth", middle)
    report = ckpt_tools.convert(middle, tmp_path / "r.safetensors", add_prefix="net.")
    assert report.aliases == {"net.decoder.weight": "net.embedding.weight"}
    ckpt_tools.convert(middle, tmp_path / "d.safetensors", drop=["embedding.*"])
    expected = torch.load(FIXTURES / "tied.pth", weights_only=True)["decoder.weight"]
    assert torch.equal(load_file(tmp_path / "d.safetensors")["decoder.weight"], expected)


def test_safetensors_metadata_of_the_input(tmp_path: Path) -> None:
    """safetensors keeps its metadata; a .pth has no place for it, which is reported."""
    save_file({"w.w": torch.ones(1)}, tmp_path / "in.safetensors", metadata={"format": "pt", "author": "me"})
    ckpt_tools.convert(tmp_path / "in.safetensors", tmp_path / "same.safetensors")
    with safe_open(tmp_path / "same.safetensors", "pt") as file:
        assert file.metadata() == {"format": "pt", "author": "me"}
    report = ckpt_tools.convert(tmp_path / "in.safetensors", tmp_path / "out.pth")
    assert [key for key, _ in report.dropped] == ["author"]


@pytest.mark.parametrize("name", ["sparse", "complex128", "quantized"])
def test_what_safetensors_cannot_hold(tmp_path: Path, name: str) -> None:
    """Sparse, quantised and complex128 tensors are refused by name, with a container that holds them."""
    tensors = {"sparse": torch.eye(2).to_sparse(), "complex128": torch.ones(2, dtype=torch.complex128)}
    if name == "quantized":
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", "torch.quantize", UserWarning)  # torch says once a process that it will go
            tensors["quantized"] = torch.quantize_per_tensor(torch.ones(2), 0.1, 0, torch.qint8)
    data = {"a.w": torch.ones(1), f"{name}.w": tensors[name]}
    error = expect_refused(tmp_path, data, ContainerLimitError, rf"'{name}\.w'", name="out.safetensors")
    assert ".pth" in error.fix


@pytest.mark.parametrize("data", [{}, {"epoch": 3}, [], None], ids=repr)
def test_files_without_tensors(tmp_path: Path, data: Any) -> None:
    """A checkpoint without tensors is one all the same."""
    loaded, report = run(tmp_path, data)
    assert_same(loaded, data)
    assert report.tensors == 0


def test_empty_state_dict_to_safetensors_and_back(tmp_path: Path) -> None:
    """No tensor at all goes both ways."""
    torch.save({}, tmp_path / "in.pth")
    ckpt_tools.convert(tmp_path / "in.pth", tmp_path / "m.safetensors")
    ckpt_tools.convert(tmp_path / "m.safetensors", tmp_path / "out.pth")
    assert torch.load(tmp_path / "out.pth", weights_only=True) == {}


def test_deflated_zip(tmp_path: Path) -> None:
    """Deflated records, which torch reads, are written as torch writes: stored."""
    rewrite(FIXTURES / "training.pth", tmp_path / "in.pth", method=zipfile.ZIP_DEFLATED)
    expected = torch.load(tmp_path / "in.pth", weights_only=True)
    for options in ({}, {"verify": True}, {"dtype": "fp64"}):
        ckpt_tools.convert(tmp_path / "in.pth", tmp_path / "out.pth", overwrite=True, **options)
        if not options.get("dtype"):
            assert_same(expected, torch.load(tmp_path / "out.pth", weights_only=True, mmap=True))


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


def test_big_endian_with_a_cast(tmp_path: Path) -> None:
    """The swap comes before the cast."""
    torch.save({"a.w": torch.arange(5.0)}, tmp_path / "little.pth")
    big_endian(tmp_path / "little.pth", tmp_path / "in.pth", {"0": 4})
    ckpt_tools.convert(tmp_path / "in.pth", tmp_path / "out.pth", dtype="bf16")
    assert torch.equal(torch.load(tmp_path / "out.pth")["a.w"], torch.arange(5.0).bfloat16())


@pytest.mark.parametrize("mmap", [False, True])
def test_output_is_mapped_and_aligned(tmp_path: Path, mmap: bool) -> None:
    """torch.load reads the result with and without mmap."""
    ckpt_tools.convert(FIXTURES / "training.pth", tmp_path / "out.pth", strip_module=True)
    loaded = torch.load(tmp_path / "out.pth", mmap=mmap, weights_only=True)
    assert torch.equal(loaded["model"]["fc1.weight"], torch.load(FIXTURES / "training.pth")["model"]["module.fc1.weight"])


# --- checks, dry runs, existing outputs


@pytest.mark.parametrize("target", ["out.pth", "out.safetensors"])
@pytest.mark.parametrize("options", [{}, {"dtype": "fp16"}, {"drop": ["b.w"]}], ids=str)
def test_verify_finds_a_flipped_bit(tmp_path: Path, target: str, options: dict[str, Any]) -> None:
    """torch loads a damaged tensor without a word; --verify refuses it, whatever else is asked for."""
    torch.save({"a.w": torch.full((100,), 7.5), "b.w": torch.ones(3)}, tmp_path / "in.pth")
    ckpt_tools.convert(tmp_path / "in.pth", tmp_path / target, verify=True, **options)
    os.remove(tmp_path / target)
    flip_byte(tmp_path / "in.pth", torch.full((100,), 7.5).numpy().tobytes())
    torch.load(tmp_path / "in.pth", weights_only=True)
    with pytest.raises(ChecksumError, match="data/0"):
        ckpt_tools.convert(tmp_path / "in.pth", tmp_path / target, verify=True, **options)
    assert os.listdir(tmp_path) == ["in.pth"]
    ckpt_tools.convert(tmp_path / "in.pth", tmp_path / target, **options)


def test_verify_without_checksums_is_noted(tmp_path: Path) -> None:
    """safetensors carries none."""
    report = ckpt_tools.convert(FIXTURES / "single.safetensors", tmp_path / "out.pth", verify=True)
    assert codes(report) == ["no-checksums"]


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


def test_an_existing_output_needs_overwrite(tmp_path: Path) -> None:
    """Without --overwrite the old file stays; with it, it is replaced whole."""
    target = tmp_path / "out.pth"
    target.write_text("old")
    with pytest.raises(OutputExistsError, match="already exists"):
        ckpt_tools.convert(FIXTURES / "single.pth", target)
    assert target.read_text() == "old"
    ckpt_tools.convert(FIXTURES / "single.pth", target, overwrite=True)
    assert_is(torch.load(target, weights_only=True), network())


@pytest.mark.parametrize("link", [None, os.symlink, os.link])
def test_output_may_be_the_input(tmp_path: Path, link: Any) -> None:
    """IN and OUT can be one file, by name, symlink or hard link."""
    path, target = tmp_path / "in.pth", tmp_path / "alias.pth"
    path.write_bytes((FIXTURES / "data_parallel.pth").read_bytes())
    if link is None:
        target = path
    else:
        link(path, target)
    ckpt_tools.convert(path, target, strip_module=True, overwrite=True)
    assert_is(torch.load(target, weights_only=True), network())


def test_output_that_cannot_be_written(tmp_path: Path) -> None:
    """A folder as output, or one that is not there, is refused before work starts."""
    for target in (tmp_path, tmp_path / "nowhere" / "out.pth"):
        with pytest.raises(OutputError):
            ckpt_tools.convert(FIXTURES / "single.pth", target)


def test_report_is_json(tmp_path: Path) -> None:
    """The report goes to JSON and back, and says what was done."""
    _, report = run(tmp_path, training_state(), strip_module=True, dtype="bf16", drop=["scheduler"])
    data = json.loads(json.dumps(report.to_json()))
    assert data["state_dicts"][0]["examples"][0] == ["module.features.0.weight", "features.0.weight"]
    assert data["casts"] == {"float32 -> bfloat16": 26}
    assert data["dropped"] == [["scheduler", "`keep` / `drop`"]]
    assert data["tensors"] == 35
    assert data["seconds"] > 0
    section = (FIXTURES.parent / "docs" / "json.md").read_text().partition("# `ckpt convert --json`")[2].partition("\n# ")[0]
    assert [field for field in data if f"`{field}`" not in section.replace("[]`", "`")] == []


def test_oddities_of_the_input_are_sentences(tmp_path: Path) -> None:
    """What is odd about the input stands behind a colon: some oddities have a verb of their own, others have none."""
    header = b'{"__metadata__":null,"a.w":{"dtype":"F32","shape":[1],"data_offsets":[0,4]}}'
    (tmp_path / "in.safetensors").write_bytes(len(header).to_bytes(8, "little") + header + bytes(4))
    report = ckpt_tools.convert(tmp_path / "in.safetensors", tmp_path / "o.pth")
    assert [note.text for note in report.notes] == ["The input: __metadata__ is null."]


def test_progress_reaches_the_end(tmp_path: Path) -> None:
    """The callback counts up to the size of the output."""
    seen: list[tuple[int, int]] = []
    report = ckpt_tools.convert(
        FIXTURES / "single.pth", tmp_path / "o.pth", strip_module=True, progress=lambda *counts: seen.append(counts)
    )
    assert seen[-1] == (report.bytes, report.bytes)
    assert seen == sorted(seen)


def test_tensors_that_go_with_their_object_are_reported(tmp_path: Path) -> None:
    """A pickled module's state dict leaves out what is neither parameter nor persistent buffer: named, and in the report."""
    module = nn.Linear(2, 2)
    module.loss_weight = torch.ones(3)
    module.register_buffer("cache", torch.ones(1), persistent=False)
    torch.save(module, tmp_path / "module.pth")
    report = ckpt_tools.convert(tmp_path / "module.pth", tmp_path / "plain.pth", objects="plain", drop="loss_weight")
    assert [path for path, _ in report.dropped] == ["_buffers.cache", "loss_weight"]


def test_underflow_is_counted(tmp_path: Path) -> None:
    """Values that become zero in fp16 are in the report."""
    torch.save({"a.w": torch.tensor([1e-8, 1e-8, 1.0, 0.0])}, tmp_path / "in.pth")
    assert ckpt_tools.convert(tmp_path / "in.pth", tmp_path / "out.pth", dtype="fp16").underflowed == {"a.w": 2}


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


def test_a_single_text_is_one_pattern(tmp_path: Path) -> None:
    """`drop="netD"` means one pattern, not four letters."""
    torch.save({"netG": {"a.w": torch.ones(1)}, "netD": {"a.w": torch.ones(1)}}, tmp_path / "in.pth")
    ckpt_tools.convert(tmp_path / "in.pth", tmp_path / "out.pth", drop="netD")
    assert list(torch.load(tmp_path / "out.pth")) == ["netG"]
