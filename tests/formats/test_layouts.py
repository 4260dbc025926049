"""Checkpoints laid out as training frameworks lay them out, with their classes made up here and not importable when read."""

import argparse
import pickle
import random
import sys
import types
from collections import OrderedDict
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

import ckpt_tools
from ckpt_tools.errors import ConvertError, NotACheckpointError, ObjectsError
from ckpt_tools.torch import load_state_dict
from tests.support.graphs import assert_same
from tests.support.samples import FIXTURES


@pytest.fixture
def classes() -> Iterator[Callable[..., type]]:
    """Makes classes in modules that nobody has; they are gone after the test, and before, once `forget` is called."""
    made: list[str] = []

    def make(name: str, *bases: type) -> type:
        module, _, last = name.rpartition(".")
        for end in range(1, len(parts := module.split(".")) + 1):
            if (part := ".".join(parts[:end])) not in sys.modules:
                sys.modules[part] = types.ModuleType(part)
                made.append(part)
        found = type(last, bases or (object,), {"__module__": module})
        setattr(sys.modules[module], last, found)
        return found

    yield make
    for name in made:
        del sys.modules[name]


def instance(kind: Any, **attributes: Any) -> Any:
    """An instance with these attributes."""
    made = kind.__new__(kind)
    made.__dict__.update(attributes)
    return made


def model() -> nn.Module:
    """A small network."""
    torch.manual_seed(0)
    return nn.Sequential(OrderedDict(conv=nn.Conv2d(3, 4, 3), bn=nn.BatchNorm2d(4), fc=nn.Linear(4, 2)))


def weights(shift: float = 0, prefix: str = "") -> dict[str, torch.Tensor]:
    """Its state dict; with a shift, as if averaged."""
    return OrderedDict((prefix + name, tensor + shift) for name, tensor in model().state_dict().items())


def optimizer() -> dict[str, Any]:
    """The state of an optimizer that has made a step."""
    network = model()
    made = torch.optim.AdamW(network.parameters())
    for parameter in network.parameters():
        parameter.grad = torch.ones_like(parameter)
    made.step()
    return made.state_dict()


def write(path: Path, value: Any) -> Path:
    """A checkpoint by torch.save."""
    path.parent.mkdir(parents=True, exist_ok=True)
    torch.save(value, path)
    return path


def state_dicts(path: Path) -> list[str]:
    """The paths of the state dicts that are found."""
    return [".".join(map(str, row["where"])) for row in ckpt_tools.inspect(path).state_dicts]


def plain(path: Path, **options: Any) -> Any:
    """What convert makes of it, as weights_only loads it."""
    target = path.with_suffix(".out")
    ckpt_tools.convert(path, target, overwrite=True, **options)
    return torch.load(target, weights_only=True)


def test_lightning(tmp_path: Path, classes: Callable[..., type]) -> None:
    """The state dict is the only one, though callbacks keep scores by path; OmegaConf and classes as keys become plain."""
    node = classes("omegaconf.nodes.AnyNode")
    config = instance(classes("omegaconf.dictconfig.DictConfig"), _content={"lr": instance(node, _val=0.1)}, _parent=None)
    scores = {"best_model_score": torch.tensor(0.5), "best_k_models": {"/runs/a b/epoch=1.ckpt": torch.tensor(0.1)}}
    path = write(tmp_path / "last.ckpt", {
        "epoch": 3, "pytorch-lightning_version": "2.2.1", "state_dict": weights(prefix="model."),
        "callbacks": {"ModelCheckpoint{'monitor': 'val'}": scores, classes("lightning.callbacks.Timer"): {"time": 1.5}},
        "optimizer_states": [optimizer()], "hyper_parameters": config, "hparams": argparse.Namespace(lr=1),
    })  # fmt: skip
    assert state_dicts(path) == ["state_dict"]
    assert_same(dict(load_state_dict(path)), dict(weights(prefix="model.")))
    loaded = plain(path, objects="plain")
    assert loaded["hyper_parameters"]["_content"]["lr"]["_val"] == 0.1
    assert loaded["callbacks"]["lightning.callbacks.Timer"] == {"time": 1.5}
    slim = plain(path, slim=True)
    assert "optimizer_states" not in slim
    assert_same(dict(slim["state_dict"]), dict(weights(prefix="model.")))
    ckpt_tools.convert(path, tmp_path / "out.safetensors", slim=True, strip_prefix="model.")
    assert [row["name"] for row in ckpt_tools.inspect(tmp_path / "out.safetensors").tensors] == list(weights())


def test_mmengine_swaps_its_averages(tmp_path: Path, classes: Callable[..., type]) -> None:
    """MMEngine keeps the averaged weights in `state_dict` and the trained ones in `ema_state_dict`: --ema knows."""
    history = instance(classes("mmengine.logging.history_buffer.HistoryBuffer"), _log_history=np.array([1.0, 2.0]))
    path = write(tmp_path / "epoch_1.pth", {
        "meta": {"epoch": 1, "dataset_meta": {"classes": ("a",)}}, "state_dict": weights(1), "optimizer": optimizer(),
        "message_hub": {"log_scalars": {"train/loss": history}}, "param_schedulers": [{"step": np.int64(3)}],
        "ema_state_dict": {"steps": torch.tensor(5), **weights(prefix="module.")},
    })  # fmt: skip
    assert state_dicts(path) == ["state_dict", "ema_state_dict"]
    assert_same(dict(plain(path, ema=True)), dict(weights(1)))
    assert plain(path, objects="plain")["param_schedulers"] == [{"step": 3}]
    ckpt_tools.convert(path, tmp_path / "cleaned.pth", drop="message_hub", objects="plain")
    assert_same(dict(plain(tmp_path / "cleaned.pth", ema=True)), dict(weights(1)))


@pytest.mark.parametrize(
    ("key", "others"),
    [("state_dict_ema", {"state_dict": 0}), ("g_ema", {"g": 0, "d": 0}), ("params_ema", {"params": 0}), ("ema", {"model": 0})],
)
def test_averages_beside_the_weights(tmp_path: Path, key: str, others: dict[str, int]) -> None:
    """timm, StyleGAN2, Real-ESRGAN and others: --ema takes the averaged weights alone."""
    path = write(tmp_path / "in.pth", {**{name: weights() for name in others}, key: weights(1), "epoch": 1, "opt": optimizer()})
    assert_same(dict(plain(path, ema=True)), dict(weights(1)))


def test_ultralytics(tmp_path: Path, classes: Callable[..., type]) -> None:
    """Whole models of classes that are not there: their state dicts by name, --ema takes the second, settings stay behind."""
    conv, detection = (
        classes("ultralytics.nn.modules.Conv", nn.Module),
        classes("ultralytics.nn.tasks.DetectionModel", nn.Module),
    )

    def yolo(shift: float) -> nn.Module:
        inner, made = conv(), detection()
        torch.manual_seed(0)
        inner.conv, inner.bn, inner.act = nn.Conv2d(3, 4, 3, bias=False), nn.BatchNorm2d(4), nn.SiLU()
        made.model, made.names, made.stride = nn.Sequential(inner), {0: "person"}, torch.tensor([8.0])
        with torch.no_grad():
            for parameter in made.parameters():
                parameter += shift
        return made.half()

    path = write(tmp_path / "best.pt", {"epoch": 5, "best_fitness": np.float64(0.5), "model": yolo(0), "ema": yolo(1),
                                        "optimizer": optimizer(), "train_args": {"lr": 0.1}})  # fmt: skip
    assert state_dicts(path) == ["model", "ema"]
    assert_same(dict(plain(path, ema=True)), dict(yolo(1).state_dict()))
    assert_same(dict(plain(path, slim=True)["model"]), dict(yolo(0).state_dict()))
    with pytest.raises(ObjectsError, match=r"would be lost: model\.stride, ema\.stride"):
        ckpt_tools.convert(path, tmp_path / "plain.pth", objects="plain")
    report = ckpt_tools.convert(path, tmp_path / "plain.pth", objects="plain", drop="*.stride")
    assert ("model.stride", "`drop`") in report.dropped


def test_fairseq(tmp_path: Path, classes: Callable[..., type]) -> None:
    """The model, and the averaged one in extra_state; a dictionary of a class that is not there."""
    words = instance(classes("fairseq.data.Dictionary"), symbols=["a"], indices={"a": 0})
    path = write(tmp_path / "checkpoint_best.pt", {
        "args": argparse.Namespace(arch="hubert"), "model": weights(), "task_state": {"dictionaries": [words]},
        "extra_state": {"ema": weights(1), "metrics": [(10, "loss", {"sum": np.float64(2), "val": torch.tensor(1.0)})]},
        "last_optimizer_state": optimizer(),
    })  # fmt: skip
    assert state_dicts(path) == ["model", "extra_state.ema"]
    assert_same(dict(plain(path, ema=True)), dict(weights(1)))
    assert plain(path, objects="plain")["task_state"]["dictionaries"][0]["symbols"] == ["a"]


def test_the_files_of_a_hugging_face_trainer(tmp_path: Path, classes: Callable[..., type]) -> None:
    """training_args.bin, optimizer, scheduler and random states are read; a folder without an index names what to choose."""
    arguments = instance(classes("transformers.training_args.TrainingArguments"), lr=0.1, device=torch.device("cuda:0"))
    assert plain(write(tmp_path / "run" / "training_args.bin", arguments), objects="plain")["lr"] == 0.1
    states = {"python": random.getstate(), "numpy": np.random.default_rng(0).random(3), "cpu": torch.get_rng_state()}
    assert plain(write(tmp_path / "run" / "rng_state.pth", states), objects="plain")["cpu"].dtype == torch.uint8
    path = write(tmp_path / "run" / "optimizer.pt", optimizer())
    with pytest.raises(ConvertError, match="outside one, in 'state'") as caught:
        ckpt_tools.convert(path, tmp_path / "out.safetensors")
    assert caught.value.fix == "Write a .pth, which holds anything"
    write(tmp_path / "run" / "pytorch_model.bin", weights())
    assert ckpt_tools.inspect(tmp_path / "run").path == str(tmp_path / "run" / "pytorch_model.bin")
    write(tmp_path / "run" / "other.bin", weights())
    with pytest.raises(NotACheckpointError, match="not a checkpoint") as missing:
        ckpt_tools.inspect(tmp_path / "run")
    assert "Name a checkpoint in it: other.bin, pytorch_model.bin" in missing.value.fix
    with pytest.raises(NotACheckpointError) as above:
        ckpt_tools.inspect(FIXTURES / "parts")
    assert above.value.fix == "Name a checkpoint in it: consolidated, dcp, fsdp-tp, fsdp2."


@pytest.mark.parametrize("nested", [True, False])
@pytest.mark.parametrize("container", ["torch-zip", "pickle"])
def test_weights_of_numpy(tmp_path: Path, nested: bool, container: str) -> None:
    """detectron2's and others' arrays are renamed and written as tensors; none is ever left behind as a value without text."""
    arrays = {f"module.{name}": tensor.numpy() for name, tensor in weights().items()}
    value = {"model": arrays, "__author__": "me"} if nested else arrays
    path = tmp_path / "model.pkl"
    path.write_bytes(pickle.dumps(value)) if container == "pickle" else torch.save(value, path)
    report = ckpt_tools.convert(path, tmp_path / "out.safetensors", strip_module=True)
    assert report.tensors == len(arrays)
    assert not any(note.code == "value-dropped" for note in report.notes)
    assert_same(dict(load_state_dict(tmp_path / "out.safetensors")), {name: weights()[name] for name in weights()})
    mixed = write(tmp_path / "mixed.pth", {"a.w": torch.ones(2), "a.b": np.ones(3)})
    ckpt_tools.convert(mixed, tmp_path / "mixed.safetensors")
    assert [row["name"] for row in ckpt_tools.inspect(tmp_path / "mixed.safetensors").tensors] == ["a.w", "a.b"]
    beside = write(tmp_path / "beside.pth", {"model": {"a.w": torch.ones(2)}, "mean": np.ones(3)})
    with pytest.raises(ConvertError, match="outside one, in 'mean'"):
        ckpt_tools.convert(beside, tmp_path / "beside.safetensors")
    ckpt_tools.convert(beside, tmp_path / "beside.safetensors", drop="mean")


def test_a_tuple_of_states(tmp_path: Path) -> None:
    """`torch.save((model, optimizer))`, as Ray Tune's pages do it: --slim leaves None in the optimizer's place."""
    path = write(tmp_path / "in.pth", (weights(), optimizer(), 3))
    assert state_dicts(path) == ["0"]
    slim = plain(path, slim=True)
    assert slim[1:] == (None, 3)
    assert_same(dict(slim[0]), dict(weights()))
    nested = write(tmp_path / "nested.pth", {"pair": (weights(), weights(1)), "loose": (torch.ones(2), 3)})
    report = ckpt_tools.convert(nested, tmp_path / "nested.out", slim=True)
    assert report.dropped == [("loose", "tensors outside state dicts")]
    assert_same(dict(torch.load(tmp_path / "nested.out", weights_only=True)["pair"][1]), dict(weights(1)))
