"""Work grows with the number of names, not with its square: four times the names are about four times the instructions."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from safetensors.torch import save_file
from torch import nn
from torch.distributed.checkpoint.filesystem import SerializationFormat

import ckpt_tools
import ckpt_tools.torch
from ckpt_tools.errors import CkptError, MatchError
from tests.support.counting import instructions

FEW, MANY = 40, 160
MOST = 4.6  # times the instructions; with the square it would be towards 16

Work = Callable[[], object]


def tensors(count: int, prefix: str = "") -> dict[str, torch.Tensor]:
    """A flat state dict of small tensors."""
    return {f"{prefix}blocks.{number}.weight": torch.full((2,), float(number)) for number in range(count)}


def saved(path: Path, value: Any) -> Path:
    """A file that torch wrote."""
    torch.save(value, path)
    return path


def _parameters(count: int, folder: Path) -> Work:
    model = nn.ParameterDict({f"p{number}": nn.Parameter(torch.zeros(2)) for number in range(count)})
    path = saved(folder / "in.pth", {"p0": torch.ones(2)})
    return lambda: ckpt_tools.torch.load_into(model, path, reinit="zeros")


def _like(count: int, folder: Path) -> Work:
    source = saved(folder / "in.pth", {"p0": torch.ones(2)})
    like = nn.ParameterDict({f"p{number}": nn.Parameter(torch.zeros(2)) for number in range(count)})
    return lambda: ckpt_tools.convert(source, folder / "out.pth", like=like, reinit="zeros", overwrite=True)


def _prefixed(count: int, folder: Path) -> Work:
    source = saved(folder / "in.pth", tensors(count, "model."))
    like = saved(folder / "like.pth", tensors(count))
    return lambda: expect_refused(lambda: ckpt_tools.convert(source, folder / "out.pth", like=like), MatchError)


def _shards(count: int, folder: Path) -> Work:
    path = saved(folder / "in.pth", tensors(count))
    return lambda: ckpt_tools.convert(path, folder / "out", shard_size=8, format="pth", overwrite=True)


def _dcp(count: int, folder: Path) -> Work:
    dcp.save(tensors(count), storage_writer=dcp.FileSystemWriter(folder / "dcp"), no_dist=True)
    return lambda: ckpt_tools.torch.load_state_dict(folder / "dcp")


def _dcp_safetensors(count: int, folder: Path) -> Work:
    writer = dcp.FileSystemWriter(folder / "dcp", serialization_format=SerializationFormat.SAFETENSORS)
    dcp.save(tensors(count), storage_writer=writer, no_dist=True)
    return lambda: ckpt_tools.torch.load_state_dict(folder / "dcp")


def _inspect(count: int, folder: Path) -> Work:
    path = saved(folder / "in.pth", {"model": tensors(count), "views": dict.fromkeys(tensors(count), torch.ones(2))})
    return lambda: ckpt_tools.inspect(path)


def _check(count: int, folder: Path) -> Work:
    path = folder / "in.safetensors"
    save_file(tensors(count), path)
    return lambda: ckpt_tools.check(path, values=True)


def _optimizer(count: int, folder: Path) -> Work:
    state = {number: {"step": torch.tensor(1.0), "m": torch.ones(2)} for number in range(count)}
    groups = [{"params": list(range(count)), "param_names": list(tensors(count, "module."))}]
    path = saved(folder / "in.pth", {"model": tensors(count, "module."), "optimizer": {"state": state, "param_groups": groups}})
    return lambda: ckpt_tools.convert(path, folder / "out.pth", strip_module=True, dtype="bf16", overwrite=True)


def _diff(count: int, folder: Path) -> Work:
    one, two = saved(folder / "one.pth", tensors(count, "module.")), saved(folder / "two.pth", tensors(count))
    return lambda: ckpt_tools.diff(one, two)


def expect_refused(call: Work, kind: type[CkptError]) -> None:
    """Call what is refused."""
    with pytest.raises(kind):
        call()


WORK = [_parameters, _like, _prefixed, _shards, _dcp, _dcp_safetensors, _inspect, _check, _optimizer, _diff]


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
@pytest.mark.parametrize("work", WORK, ids=lambda work: work.__name__.strip("_"))
def test_instructions_grow_with_the_names(work: Callable[[int, Path], Work], tmp_path: Path) -> None:
    """Four times the names take little more than four times the instructions."""
    counts: list[int] = []
    for count in (FEW, MANY):
        folder = tmp_path / str(count)
        folder.mkdir()
        call = work(count, folder)
        if not counts:
            call()  # caches and imports
        counts.append(instructions(call))
    assert counts[1] <= MOST * counts[0]
