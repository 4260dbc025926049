"""`--slim`, `--ema`, and what goes with a tensor that is dropped or renamed. Samples in the layouts of timm and Lightning."""

import argparse
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn
from torch.optim.swa_utils import AveragedModel

import ckpt_tools
from ckpt_tools.errors import ConvertError, NothingMatchedError
from ckpt_tools.torch import load_state_dict
from tests.conftest import small_model
from tests.support import classes
from tests.support.commands import ckpt
from tests.support.graphs import assert_same, element_bytes


def saved(tmp_path: Path, value: Any) -> Path:
    torch.save(value, tmp_path / "in.pth")
    return tmp_path / "in.pth"


def converted(path: Path, **options: Any) -> tuple[Any, ckpt_tools.Converted]:
    """What convert makes of it, as weights_only loads it; and the report."""
    target = path.with_name("out.pth")
    report = ckpt_tools.convert(path, target, overwrite=True, **options)
    return torch.load(target, weights_only=True), report


def training() -> dict[str, Any]:
    """A training checkpoint with everything that trainers keep."""
    model: Any = small_model()
    optimizer = torch.optim.AdamW(model.parameters())
    model[3](torch.ones(1, 4)).sum().backward()
    optimizer.step()
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1)
    return {
        "model": model.state_dict(), "optimizer": optimizer.state_dict(), "lr_scheduler": scheduler.state_dict(),
        "optimizer_states": [optimizer.state_dict()], "scaler": torch.amp.GradScaler("cpu").state_dict(),
        "rng_state": torch.get_rng_state(), "rng": {"torch": torch.get_rng_state(), "python": (3, (1, 2), None)},
        "epoch": 3, "metrics": {"loss": 0.5}, "args": argparse.Namespace(lr=0.1), "trainer": classes.Plain(),
        "extra": [torch.ones(2), "note"],
    }  # fmt: skip


def test_slim_keeps_the_weights_and_the_values(tmp_path: Path) -> None:
    """Optimizer, scheduler, random states, objects and stray tensors go, each with a line in the report."""
    value = training()
    loaded, report = converted(saved(tmp_path, value), slim=True)
    assert loaded == {**loaded, "epoch": 3, "metrics": {"loss": 0.5}, "args": {"lr": 0.1}, "extra": ["note"]}
    assert set(loaded) == {"model", "epoch", "metrics", "args", "extra"}
    assert_same(dict(loaded["model"]), dict(value["model"]))
    told = dict(report.dropped)
    assert told["optimizer"] == told["optimizer_states.0"] == "optimizer"
    assert told["scaler"] == "gradient scaler"
    assert told["lr_scheduler"] == "scheduler"
    assert told["rng_state"] == told["rng"] == "random state"
    assert told["extra.0"] == "a tensor outside state dicts"
    assert [(row.where, row.became) for row in report.objects if row.name == "tests.support.classes.Plain"] == [
        (["trainer"], "dropped")
    ]


def test_views_on_a_large_storage_are_compacted(tmp_path: Path) -> None:
    """A slice no longer drags its storage along; overlapping views stay views, ties ties; the bytes saved are reported."""
    big, other = torch.arange(1_000_000.0), torch.arange(4.0)
    value = {
        "a.w": big[10:20], "a.tied": big[10:20], "b.over": big[15:25], "c.far": big[900:904], "d.all": other, "e.none": big[:0],
    }  # fmt: skip
    path = saved(tmp_path, value)
    found = [row for row in ckpt_tools.inspect(path).findings if row.code == "oversized-storage"]
    assert [row.fix.endswith("--slim") for row in found] == [True]
    loaded, report = converted(path, slim=True)
    assert {name: tensor.tolist() for name, tensor in loaded.items()} == {
        name: tensor.tolist() for name, tensor in value.items()
    }
    assert loaded["a.w"].data_ptr() == loaded["a.tied"].data_ptr() == loaded["b.over"].data_ptr() - 5 * 4
    assert (report.compacted, report.saved) == (1, (1_000_000 - 15 - 4) * 4)
    assert path.with_name("out.pth").stat().st_size < 5000
    assert not [row for row in ckpt_tools.inspect(path.with_name("out.pth")).findings if row.code == "oversized-storage"]


@settings(max_examples=40)
@given(st.lists(st.tuples(st.integers(0, 40), st.integers(0, 6), st.integers(1, 3), st.integers(1, 4)), min_size=1, max_size=5),
       st.sampled_from([torch.float32, torch.int64, torch.bool, torch.bfloat16]))  # fmt: skip
def test_compaction_changes_no_value_and_no_overlap(
    tmp_path_factory: Any, views: list[tuple[int, ...]], dtype: torch.dtype
) -> None:
    """Whatever the views: elements stay, no storage grows, and two that shared an element still share it."""
    base = torch.arange(128).to(dtype)
    value = {f"v.{i}": base.as_strided((a, c), (b * 2, b), at) for i, (at, a, b, c) in enumerate(views)}
    value["whole.w"] = torch.ones(2)
    loaded, _ = converted(saved(tmp_path_factory.mktemp("c"), value), slim=True)
    assert {name: element_bytes(tensor) for name, tensor in loaded.items()} == {n: element_bytes(t) for n, t in value.items()}
    for one in value:
        for two in value:
            assert overlap(value[one], value[two]) == overlap(loaded[one], loaded[two])


def overlap(one: torch.Tensor, two: torch.Tensor) -> bool:
    """Whether two tensors have an element in common."""
    places = [set((tensor.data_ptr() + offsets(tensor)).flatten().tolist()) for tensor in (one, two)]
    return bool(places[0] & places[1])


def offsets(tensor: torch.Tensor) -> torch.Tensor:
    """Where each element of a 1-d or 2-d tensor lies, in bytes from the first."""
    steps = [torch.arange(size) * step for size, step in zip(tensor.shape, tensor.stride(), strict=True)]
    total = steps[0][:, None] + steps[1][None, :] if len(steps) == 2 else steps[0]
    return total * tensor.element_size()


# --- averaged weights

MODEL = {"conv.weight": torch.ones(2), "conv.bias": torch.ones(1)}
EMA = {"conv.weight": torch.full((2,), 2.0), "conv.bias": torch.full((1,), 2.0)}


@pytest.mark.parametrize(
    "value",
    [
        {"model": MODEL, "model_ema": EMA}, {"state_dict": MODEL, "state_dict_ema": EMA, "epoch": 1},
        {"state_dict": MODEL, "callbacks": {"EMACallback": {"ema_state_dict": EMA, "decay": 0.99}}},
        {"model": MODEL, "extra_state": {"ema": EMA}}, {"model": MODEL, "ema": {"decay": 0.9, "shadow": EMA}},
        {"state_dict": EMA, "current_model_state": MODEL, "averaging_state": {"n_averaged": torch.tensor(3)}},
    ],
    ids=["model_ema", "timm", "callback", "fairseq", "nested", "lightning"],
)  # fmt: skip
def test_ema_is_found(tmp_path: Path, value: Any) -> None:
    """Each layout: the averaged weights become the whole output, and the report says where they were."""
    loaded, report = converted(saved(tmp_path, value), ema=True)
    assert_same(dict(loaded), EMA)
    assert [note.code for note in report.notes] == ["ema"]


def test_ema_of_latent_diffusion(tmp_path: Path) -> None:
    """Names without their dots, beside the trained ones: each average takes the place of its own tensor."""
    names = {"model.net.conv.weight": torch.ones(2), "first.stage": torch.zeros(1)}
    value = {"state_dict": {**names, "model_ema.decay": torch.tensor(0.9), "model_ema.num_updates": torch.tensor(5),
                            "model_ema.netconvweight": torch.full((2,), 2.0)}}  # fmt: skip
    loaded, _ = converted(saved(tmp_path, value), ema=True)
    assert list(loaded) == list(names)
    assert loaded["model.net.conv.weight"].tolist() == [2, 2]
    value["state_dict"]["model_ema.other"] = torch.ones(1)
    with pytest.raises(ConvertError, match=r"model_ema\.other"):
        converted(saved(tmp_path, value), ema=True)


def test_ema_of_parameters_alone(tmp_path: Path) -> None:
    """Averages without the running statistics of the model: a note names what OUT lacks."""
    model = {"module.w": torch.ones(2), "module.bn.running_mean": torch.ones(2)}
    loaded, report = converted(saved(tmp_path, {"model": model, "ema": {"w": torch.zeros(2)}}), ema=True)
    assert list(loaded) == ["w"]
    assert [note.text for note in report.notes if note.code == "ema-lacks"] == [
        "Tensors of 'model' that were not averaged, and are not in OUT: 'bn.running_mean'."
    ]


def test_ema_refuses_what_is_not_clear(tmp_path: Path) -> None:
    with pytest.raises(NothingMatchedError, match="no averaged weights"):
        converted(saved(tmp_path, {"model": MODEL}), ema=True)
    with pytest.raises(ConvertError, match="3 places") as caught:
        converted(saved(tmp_path, {"netG_ema": MODEL, "g_ema": EMA, "ema": EMA}), ema=True)
    assert "'g_ema'" in caught.value.what
    loaded, _ = converted(saved(tmp_path, {"a": {"ema": EMA}, "b": {"ema": MODEL}}), ema=True, select="a")
    assert_same(dict(loaded), EMA)


# --- optimizers, paths


def test_states_keyed_by_name_follow(tmp_path: Path) -> None:
    """Optimizer states that are keyed by parameter names, as FSDP keeps them, are renamed with the parameters."""
    state = {"module.w.x": {"exp_avg": torch.ones(1)}, "module.b.x": {"exp_avg": torch.zeros(1)}}
    groups = [{"lr": 0.1, "params": list(state), "param_names": list(state)}]
    value = {"model": {name: torch.ones(1) for name in state}, "optimizer": {"state": state, "param_groups": groups}}
    loaded, report = converted(saved(tmp_path, value), strip_module=True)
    assert list(loaded["optimizer"]["state"]) == ["w.x", "b.x"]
    assert loaded["optimizer"]["param_groups"][0]["params"] == ["w.x", "b.x"]
    assert loaded["optimizer"]["param_groups"][0]["param_names"] == ["w.x", "b.x"]
    assert report.optimizer_names == 6
    state["w.x"] = {"exp_avg": torch.ones(1)}
    with pytest.raises(ConvertError):
        converted(saved(tmp_path, {**value, "model": {"module.w.x": torch.ones(1)}}), strip_module=True)


@pytest.mark.parametrize("named", [False, True])
def test_a_tensor_with_optimizer_state_does_not_go_alone(tmp_path: Path, named: bool) -> None:
    """State is kept by place: dropping a parameter would give it to another. With the optimizer it goes; buffers go alone.

    So does a whole other state dict of the same names.
    """
    model = small_model()
    optimizer = torch.optim.Adam(list(model.named_parameters()) if named else model.parameters())
    sum(parameter.sum() for parameter in model.parameters()).backward()  # type: ignore[union-attr]
    optimizer.step()
    path = saved(tmp_path, {"model": model.state_dict(), "optimizer": optimizer.state_dict()})
    with pytest.raises(ConvertError, match="refers to it by place") as caught:
        converted(path, drop="3.*")
    assert caught.value.fix.endswith("`drop='optimizer'`.")
    loaded, _ = converted(path, drop=["3.*", "optimizer"])
    assert set(loaded) == {"model"}
    loaded, _ = converted(path, drop="*.num_batches_tracked")
    assert "optimizer" in loaded
    path = saved(tmp_path, {"model": model.state_dict(), "ema": model.state_dict(), "optimizer": optimizer.state_dict()})
    loaded, _ = converted(path, drop="ema.*")
    assert (set(loaded), len(loaded["ema"])) == ({"model", "ema", "optimizer"}, 0)
    with pytest.raises(ConvertError, match="refers to it by place"):
        converted(path, drop=["ema.*", "model.3.*"])


def test_elements_of_lists_go_by_their_path(tmp_path: Path) -> None:
    """`--drop nets.0` takes the first of a list; a glob takes no elements; a tuple keeps its length."""
    path = saved(tmp_path, {"nets": [dict(MODEL), dict(EMA)], "pair": ({"a.w": torch.ones(1)}, 2)})
    loaded, report = converted(path, drop="nets.0")
    assert_same(loaded["nets"], [EMA])
    assert ("nets.0", "`keep` / `drop`") in report.dropped
    with pytest.raises(NothingMatchedError):
        converted(path, drop="nets.?")
    with pytest.raises(ConvertError, match="tuple"):
        converted(path, drop="pair.0")


def test_select_never_guesses(tmp_path: Path) -> None:
    """Keys with dots can make two places read alike: both are named, and JSON tells them apart."""
    path = saved(tmp_path, {"a.b": {"x.w": torch.ones(1)}, "a": {"b": {"x.w": torch.zeros(1)}}})
    with pytest.raises(ConvertError, match="fits 2 places") as caught:
        converted(path, select="a.b")
    assert '["a.b"]' in caught.value.what
    assert '["a", "b"]' in caught.value.what
    assert converted(path, select='["a", "b"]')[0]["x.w"].item() == 0
    assert converted(path, select='["a.b"]')[0]["x.w"].item() == 1
    with pytest.raises(ConvertError, match="fits 2 places"):
        load_state_dict(path, select="a.b")


def test_state_dicts_are_found_wherever_they_are(tmp_path: Path) -> None:
    """Lists of state dicts, as AgileRL keeps agents; each is reached by its path."""
    value = {
        "actors": [dict(MODEL), dict(EMA)], "critic": {"nets": (dict(MODEL),)}, "agent": classes.Mapping({"net": dict(EMA)}),
    }  # fmt: skip
    path = saved(tmp_path, value)
    loaded, _ = converted(path, select="actors.1")
    assert_same(loaded, EMA)
    assert_same(converted(path, select="critic.nets.0")[0], MODEL)
    assert_same(converted(path, select="agent.net")[0], EMA)
    wheres = [row["where"] for row in ckpt_tools.inspect(path).state_dicts]
    assert wheres[:3] == [["actors", 0], ["actors", 1], ["critic", "nets", 0]]


def test_what_became_of_modules_is_told(tmp_path: Path) -> None:
    """With --slim a pickled model is no dropped object; with --ema, objects elsewhere do not stand in the way."""
    path = saved(tmp_path, {"net": nn.DataParallel(small_model()), "ema": dict(EMA), "trainer": classes.Plain()})
    _, report = converted(path, slim=True)
    told = {row.name: (row.where, row.became) for row in report.objects}
    assert told["torch.nn.parallel.data_parallel.DataParallel"] == (["net"], "dict")
    assert told["torch.nn.modules.linear.Linear"][1] == "part of the object around it"
    assert told["tests.support.classes.Plain"] == (["trainer"], "dropped")
    assert_same(converted(path, ema=True)[0], EMA)
    assert_same(converted(path, ema=True, objects="plain")[0], EMA)


def test_a_storage_that_stands_in_the_tree_stays_whole(tmp_path: Path) -> None:
    """A tensor uses a part of a storage that is saved by itself too: cut down, the two would no longer be one."""
    whole = torch.arange(1000.0)
    torch.save({"model": {"a.w": whole[:10]}, "raw": whole._typed_storage()}, tmp_path / "in.pth")
    report = ckpt_tools.convert(tmp_path / "in.pth", tmp_path / "out.pth", slim=True)
    assert report.compacted == 0
    found = torch.load(tmp_path / "out.pth", weights_only=False)
    assert found["raw"]._size() == 1000
    assert found["model"]["a.w"].data_ptr() == found["raw"]._data_ptr()


def test_conjugate_views_with_gaps(tmp_path: Path) -> None:
    """A column of a complex matrix, conjugated on reading, is the same numbers after its storage was cut down."""
    matrix = torch.randn(50, 4, dtype=torch.complex64)
    loaded, _ = converted(saved(tmp_path, {"a.w": matrix[:, 1].conj()}), slim=True)
    assert loaded["a.w"].tolist() == matrix[:, 1].conj().tolist()


def net() -> torch.nn.Sequential:
    return torch.nn.Sequential(torch.nn.Linear(3, 2), torch.nn.BatchNorm1d(2))


def averaged(wrap: Callable[[torch.nn.Module], torch.nn.Module] = lambda model: model) -> AveragedModel:
    """torch's average of a model that has moved, and of what is around it."""
    model = AveragedModel(wrap(net()))
    model.update_parameters(wrap(net()))
    model.update_parameters(wrap(net()))
    return model


def plain(state: dict[str, torch.Tensor], lead: str) -> dict[str, torch.Tensor]:
    return {name.removeprefix(lead): value for name, value in state.items() if name.startswith(lead)}


def ema_pytorch(trained: dict[str, torch.Tensor], average: dict[str, torch.Tensor], *, online: bool) -> dict[str, torch.Tensor]:
    """What ema-pytorch's EMA has: two flags, the averaged model, and the trained one unless it was asked to leave that out."""
    both = {f"ema_model.{name}": value for name, value in average.items()}
    both |= {f"online_model.{name}": value for name, value in trained.items()} if online else {}
    return {"initted": torch.tensor(True), "step": torch.tensor(3), **both}


def cases() -> dict[str, tuple[Any, dict[str, torch.Tensor]]]:
    """Files by what wrote them, and the state dict that is right."""
    trained, average = net().state_dict(), net().state_dict()
    alone, parallel = averaged().state_dict(), averaged(torch.nn.DataParallel).state_dict()
    around = torch.nn.DataParallel(averaged()).state_dict()
    by_mmcv = {f"ema_{name.replace('.', '_')}": average[name] for name, _ in net().named_parameters()}
    in_mmcv = {**trained, **{name: average[name] for name, _ in net().named_parameters()}}
    both = ema_pytorch(trained, average, online=True)
    lightning = {"state_dict": average, "current_model_state": trained, "averaging_state": {"n_averaged": torch.tensor(2)}}
    return {
        "AveragedModel": (alone, plain(alone, "module.")),
        "AveragedModel of DataParallel": (parallel, plain(parallel, "module.module.")),
        "DataParallel of AveragedModel": (around, plain(around, "module.module.")),
        "AveragedModel beside the model": ({"model": trained, "swa": alone, "epoch": 3}, plain(alone, "module.")),
        "ema-pytorch": (both, average),
        "ema-pytorch beside the model": ({"step": 1, "model": trained, "ema": both}, average),
        "ema-pytorch without the trained": ({"model": trained, "ema": ema_pytorch(trained, average, online=False)}, average),
        "timm": ({"state_dict": trained, "state_dict_ema": average}, average),
        "timm, wrapped": ({"state_dict": trained, "state_dict_ema": {f"module.{k}": v for k, v in average.items()}}, average),
        "mmcv": ({"meta": {"epoch": 3}, "state_dict": {**trained, **by_mmcv}}, in_mmcv),
        "Lightning": ({"pytorch-lightning_version": "2.6.0", "epoch": 1, **lightning}, average),
    }  # fmt: skip


@pytest.mark.parametrize("kind", cases())
def test_averaged_weights_have_the_models_names(kind: str, tmp_path: Path) -> None:
    """Names, order and values are those of the plain model, which loads them strictly; one copy alone is written."""
    file, expected = cases()[kind]
    torch.manual_seed(0)
    torch.save(file, tmp_path / "in.pth")
    for name in ("out.pth", "out.safetensors"):
        ckpt("convert", tmp_path / "in.pth", tmp_path / name, "--ema")
    made = torch.load(tmp_path / "out.pth")
    assert list(made) == list(expected)
    torch.testing.assert_close(dict(made), dict(expected), rtol=0, atol=0)
    net().load_state_dict(made)


def test_msgpack_that_is_no_checkpoint(tmp_path: Path) -> None:
    """Messages in msgpack, one or a stream of them, are no checkpoint of Flax: nothing is written."""
    message = b"\x82\xa2id\xa3set\xa4data\xc4\x04\0\0\x80?"
    for data in (message, message * 3, b"\x81\xa1a\x81\xa1b\x93\1\2\3"):
        (tmp_path / "in.msgpack").write_bytes(data)
        assert "not a checkpoint" in ckpt("convert", tmp_path / "in.msgpack", tmp_path / "out.pth", code=3).output
        assert not (tmp_path / "out.pth").exists()
