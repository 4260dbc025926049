"""What a user may ask of `match`, `load_into`, `average` and `extract_lora`; what they share with `convert` is said there."""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import Literal, TypeAlias

from ckpt_tools.errors import UsageError
from ckpt_tools.fit.options import LeftOverOptions, LikeOptions, RunOptions
from ckpt_tools.io.writer import Progress
from ckpt_tools.operations.convert.options import (
    DryRunOption,
    NameOptions,
    ObjectOptions,
    OutputOptions,
    Selection,
    WriteOptions,
)
from ckpt_tools.tree.arguments import Renames
from ckpt_tools.tree.options import as_in, flag, option, record, several
from ckpt_tools.tree.output_names import Format

Integers: TypeAlias = Literal["first", "max"]


@record
class MatchOptions(LikeOptions, RunOptions):
    """All that `match` takes."""

    rename: Renames = as_in(NameOptions, "rename", "Rename tensors of IN first, as in convert.")
    select: str | None = as_in(Selection, "select", "Which state dict of IN, if it has several.")
    output: str | os.PathLike[str] | None = option("Write a plan (TOML) for convert.", metavar="PLAN", alias="-o")
    overwrite: bool = flag("Replace PLAN if it exists.")

    def check(self) -> None:
        """Raise UsageError where no target is named, or a plan is to be replaced and none written."""
        super().check()
        if self.like is None:
            raise UsageError("`like` is missing: the target.")
        if self.overwrite and self.output is None:
            raise UsageError("`overwrite` needs `output=PLAN`.")


@record
class LoadOptions(RunOptions, LeftOverOptions):
    """All that `load_into` takes."""

    rename: Renames = as_in(NameOptions, "rename", "Rename tensors of the file first.")
    allow_missing: str | Sequence[str] = several("Names of the model that may be missing in the file.", metavar="GLOB")
    allow_unexpected: str | Sequence[str] = several("Names of the file that the model may lack.", metavar="GLOB")
    assign: bool = flag("Replace the parameters by new tensors with the file's dtypes, as `assign=True` of PyTorch does.")
    select: str | None = as_in(Selection, "select", "Which state dict of the file, if it has several.")
    hooks: bool = flag(
        "Run the model's own load hooks: its load_state_dict then loads the file's tensors under the model's names. If it "
        "raises, what a hook has changed stays changed."
    )

    def check(self) -> None:
        """Raise UsageError for what the model's own `load_state_dict` decides, where its hooks run."""
        super().check()
        with_hooks = ("hooks", "select", "assign", "allow_missing", "allow_unexpected")
        others = [name for name in self.asked() if name not in with_hooks]
        if self.match == "exact+wrappers":  # the default, said
            others.remove("match")
        if self.hooks and others:
            raise UsageError(
                f"`{others[0]}` does not go with `hooks=True`: the model's own load_state_dict decides then.",
                fix=f"With hooks go {', '.join(with_hooks[1:])}.",
            )


@record
class AverageOptions(ObjectOptions, DryRunOption):
    """All that `average` takes."""

    weights: Sequence[float] | None = option(
        "Weight of each IN, divided by their sum [all equal].", metavar="W,W,...", in_code="Numbers."
    )
    unwrap: bool = as_in(NameOptions, "unwrap", "Remove wrappers from all names first.")
    integers: Integers | None = option(
        "Which value to take for integers that differ; otherwise they are refused.", choices=["first", "max"]
    )
    select: str | None = as_in(Selection, "select", "Use only this state dict or subtree of every IN.")
    format: Format | None = as_in(OutputOptions, "format", "Format of OUT [by its name].")
    overwrite: bool = as_in(OutputOptions, "overwrite")
    progress: Progress | None = as_in(WriteOptions, "progress")


@record
class ExtractOptions(DryRunOption):
    """All that `extract_lora` takes."""

    rank: int | None = option("Rank of the adapter's matrices, or the smaller side of a weight if that is less.", metavar="R")
    only: str | Sequence[str] = several("Only tensors whose name matches.", metavar="GLOB")
    dtype: Literal["fp32", "bf16", "fp16"] = option(
        "Dtype of the adapter's matrices [fp32].", choices=["fp32", "bf16", "fp16"], default="fp32"
    )
    select: str | None = as_in(Selection, "select", "The state dict or subtree of both to compare.")
    overwrite: bool = as_in(OutputOptions, "overwrite", "Replace the adapter in OUT.")
    progress: Progress | None = as_in(WriteOptions, "progress", "Called with (modules done, modules in all).")

    def check(self) -> None:
        """Raise UsageError without a rank."""
        super().check()
        if not self.rank:
            raise UsageError("`rank` is missing: a whole number from 1 up.", fix="For example: `rank=16`.")
