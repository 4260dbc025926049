"""The files of DeepSpeed's ZeRO 1, 2 and 3, cut from whole tensors by its own rules of layout; torch writes them.

Source: deepspeed/runtime/engine.py (`_save_checkpoint`); `state_dict` in deepspeed/runtime/zero/stage_1_and_2.py and stage3.py.
The genuine folders in fixtures/deepspeed (made by fixtures/makers/zero.py) have the same keys.
"""

from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

Groups = list[dict[str, torch.Tensor]]
TAG = "global_step2"


@dataclass
class Trained:
    """What a job has in its memory, before it is cut.

    Attributes:
        groups: fp32 weights by the optimizer's group, in the order in which they are flattened. order: the model's names.
        frozen, buffers: as the model has them. shared: a tied name -> the name that is stored. dtype: of the model.
    """

    groups: Groups
    order: Sequence[str]
    frozen: dict[str, torch.Tensor] = field(default_factory=dict)
    buffers: dict[str, torch.Tensor] = field(default_factory=dict)
    shared: dict[str, str] = field(default_factory=dict)
    dtype: torch.dtype = torch.float32

    @property
    def whole(self) -> dict[str, torch.Tensor]:
        """The state dict that is to come out: fp32 weights, the rest as it is."""
        found = {**self.frozen, **self.buffers, **{name: value for group in self.groups for name, value in group.items()}}
        return {name: found[self.shared.get(name, name)] for name in self.order}

    def state(self, key: str) -> Groups:
        """A state of the optimizer: other numbers of the same shapes."""
        factor = {"exp_avg": 0.5, "exp_avg_sq": 0.25}[key]
        return [{name: value * factor for name, value in group.items()} for group in self.groups]


def trained(dtype: torch.dtype = torch.float32) -> Trained:
    """Sizes that do not divide, two groups, a scalar, frozen weights, buffers of two dtypes, tied weights."""
    generator = torch.Generator().manual_seed(0)

    def values(*shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=generator)

    return Trained(
        [{"b.weight": values(5, 3), "emb.weight": values(13, 7)}, {"b.bias": values(5), "scale": values(), "one": values(1)}],
        ["steps", "emb.weight", "frozen.weight", "b.weight", "b.bias", "mean", "scale", "one", "frozen.bias", "head.weight"],
        {"frozen.weight": values(7, 3).to(dtype), "frozen.bias": values(2).to(dtype)},
        {"steps": torch.tensor(5), "mean": values(3)}, {"head.weight": "emb.weight"}, dtype,
    )  # fmt: skip


def save_zero(folder: Path, model: Trained, stage: int, world: int, *, padded: bool = False, aligned: int = 0) -> Path:
    """Write the files of all ranks, and `latest`; returns the folder with the tag.

    Args:
        padded: stages 1 and 2 keep the filling behind the last weight, as older versions do.
        aligned: every parameter begins at a multiple of so many elements (`param_alignment_paddings`).
    """
    (folder / TAG).mkdir(parents=True)
    (folder / "latest").write_text(TAG)
    cut = _Rows3(model, world) if stage == 3 else _Rows2(model, world, padded, aligned)
    bf16 = "bf16_" if model.dtype == torch.bfloat16 else ""
    for rank in range(world):
        state = {"zero_stage": stage, "ds_version": "0.19.8", "overflow": False, **cut.optimizer(rank)}
        name = f"{bf16}zero_pp_rank_{rank}_mp_rank_00_optim_states.pt"
        torch.save({"optimizer_state_dict": state, "ds_config": {}, "ds_version": "0.19.8"}, folder / TAG / name)
        if stage == 3:
            torch.save(model_file(model, 3, rank, world), folder / TAG / f"zero_pp_rank_{rank}_mp_rank_00_model_states.pt")
    if stage < 3:
        torch.save(model_file(model, stage, 0, world), folder / TAG / "mp_rank_00_model_states.pt")
    return folder / TAG


def model_file(model: Trained, stage: int, rank: int, world: int) -> dict[str, Any]:
    """What a model file holds."""
    module: dict[str, torch.Tensor] = OrderedDict()
    for name, value in model.whole.items():
        holder = model.shared.get(name)
        module[name] = module[holder] if holder in module else value if name in model.buffers else value.to(model.dtype)
        if stage == 3 and name not in model.buffers and holder is None:
            module[name] = torch.empty(0, dtype=model.dtype)
    fragments = {name: part(value, rank, world) if stage == 3 else value for name, value in model.frozen.items()}
    return {
        "module": module, "buffer_names": list(model.buffers), "optimizer": None,
        "param_shapes": [OrderedDict((name, value.shape) for name, value in group.items()) for group in model.groups],
        "frozen_param_shapes": None if stage == 1 else OrderedDict((name, value.shape) for name, value in model.frozen.items()),
        "frozen_param_fragments": None if stage == 1 else OrderedDict(fragments),
        "shared_params": model.shared if rank == 0 else {}, "lr_scheduler": None, "global_steps": 2, "skipped_steps": 0,
        "dp_world_size": world, "mp_world_size": 1, "ds_config": {}, "ds_version": "0.19.8", "epoch": 3,
    }  # fmt: skip


def part(value: torch.Tensor, rank: int, world: int) -> torch.Tensor:
    """A rank's part of one tensor under stage 3, filled up with numbers that are nobody's."""
    count = -(-value.numel() // world)
    row = torch.cat([value.flatten(), torch.full((count * world - value.numel(),), 99.0, dtype=value.dtype)])
    return row[rank * count : (rank + 1) * count].clone()


class _Rows3:
    """Stage 3: every parameter is cut by itself."""

    def __init__(self, model: Trained, world: int) -> None:
        self.model, self.world = model, world

    def rows(self, groups: Groups, rank: int) -> list[torch.Tensor]:
        return [torch.cat([part(value, rank, self.world) for value in group.values()]) for group in groups]

    def optimizer(self, rank: int) -> dict[str, Any]:
        inner = _inner({key: self.rows(self.model.state(key), rank) for key in ("exp_avg", "exp_avg_sq")})
        flat = self.rows(self.model.groups, rank)
        return {"partition_count": self.world, "fp32_flat_groups": flat, "optimizer_state_dict": inner}


class _Rows2:
    """Stages 1 and 2: a group in one row, filled up to two elements a rank, and cut into equal parts."""

    def __init__(self, model: Trained, world: int, padded: bool, aligned: int) -> None:
        self.model, self.world, self.padded = model, world, padded
        self.paddings = [[-value.numel() % aligned if aligned else 0 for value in group.values()] for group in model.groups]
        self.lengths = [sum(value.numel() for value in group.values()) + sum(paddings)
                        for group, paddings in zip(model.groups, self.paddings, strict=True)]  # fmt: skip

    def rows(self, groups: Groups, rank: int) -> list[torch.Tensor]:
        found = []
        for group, paddings, length in zip(groups, self.paddings, self.lengths, strict=True):
            pieces = [piece for value, padding in zip(group.values(), paddings, strict=True)
                      for piece in (value.flatten(), torch.full((padding,), 99.0))]  # fmt: skip
            step = 2 * self.world
            row = torch.cat([*pieces, torch.full((-length % step,), 99.0)])
            found.append(row[rank * len(row) // self.world : (rank + 1) * len(row) // self.world].clone())
        return found

    def fillings(self, rank: int) -> list[int]:
        return [-length % (2 * self.world) if rank == self.world - 1 else 0 for length in self.lengths]

    def optimizer(self, rank: int) -> dict[str, Any]:
        flat, fillings = self.rows(self.model.groups, rank), self.fillings(rank)
        if not self.padded:
            flat = [row[: row.numel() - filling] for row, filling in zip(flat, fillings, strict=True)]
        inner = _inner({key: self.rows(self.model.state(key), rank) for key in ("exp_avg", "exp_avg_sq")})
        told = {} if self.padded else {"param_alignment_paddings": self.paddings}
        counts = [self.world] * len(flat)
        return {"partition_count": counts, "single_partition_of_fp32_groups": flat, "group_paddings": fillings,
                "base_optimizer_state": inner, **told}  # fmt: skip


def _inner(rows: dict[str, list[torch.Tensor]]) -> dict[str, Any]:
    count = len(rows["exp_avg"])
    state = {number: {"step": torch.tensor(2.0), **{key: rows[key][number] for key in rows}} for number in range(count)}
    return {"state": state, "param_groups": [{"lr": 0.1, "betas": (0.9, 0.999), "params": [number]} for number in range(count)]}
