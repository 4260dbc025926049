"""`--ema` gives the averaged weights by exactly the names of the plain model, whoever averaged them."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.optim.swa_utils import AveragedModel

from tests.support.commands import ckpt


def net() -> torch.nn.Sequential:
    """A model with buffers."""
    return torch.nn.Sequential(torch.nn.Linear(3, 2), torch.nn.BatchNorm1d(2))


def averaged(wrap: Callable[[torch.nn.Module], torch.nn.Module] = lambda model: model) -> AveragedModel:
    """torch's average of a model that has moved, and of what is around it."""
    model = AveragedModel(wrap(net()))
    model.update_parameters(wrap(net()))
    model.update_parameters(wrap(net()))
    return model


def plain(state: dict[str, torch.Tensor], lead: str) -> dict[str, torch.Tensor]:
    """The model's own part of a state dict."""
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
