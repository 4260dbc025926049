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
    select: str | None = as_in(Selection, "select", "Which state dict of IN, where it holds several.")
    output: str | os.PathLike[str] | None = option("Write a plan (TOML) for convert.", metavar="PLAN", alias="-o")
    overwrite: bool = flag("Replace PLAN if it exists.")

    def check(self) -> None:
        """Raise UsageError where no target is named, or a plan is to be replaced and none written."""
        super().check()
        if self.like is None:
            raise UsageError("`like` names the target; it is missing.")
        if self.overwrite and self.output is None:
            raise UsageError("`overwrite` is about a plan; `output=PLAN` is missing.")


@record
class LoadOptions(RunOptions, LeftOverOptions):
    """All that `load_into` takes."""

    rename: Renames = as_in(NameOptions, "rename", "Rename tensors of the file first.")
    allow_missing: str | Sequence[str] = several("Names of the model that need nothing.", metavar="GLOB")
    allow_unexpected: str | Sequence[str] = several("Names of the file that need no place.", metavar="GLOB")
    assign: bool = flag("Put new tensors with the file's dtypes in place of the parameters.")
    select: str | None = as_in(Selection, "select", "Which state dict of the file, where it holds several.")
    hooks: bool = flag(
        "Run the model's own load hooks: its load_state_dict does the loading then, with the file's tensors under the model's "
        "names. What a hook has changed before something raises stays changed."
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
        "The weight of each IN, divided by their sum; else all equal.", metavar="W,W,...", in_code="Numbers."
    )
    unwrap: bool = as_in(NameOptions, "unwrap", "Compare names without their wrappers, and write them so.")
    integers: Integers | None = option(
        "Which value is taken where integers differ; else they are refused.", choices=["first", "max"]
    )
    select: str | None = as_in(Selection, "select", "One state dict or subtree, in every IN, becomes the whole output.")
    format: Format | None = as_in(OutputOptions, "format", "Container of OUT; else by its name.")
    overwrite: bool = as_in(OutputOptions, "overwrite")
    progress: Progress | None = as_in(WriteOptions, "progress")


@record
class ExtractOptions(DryRunOption):
    """All that `extract_lora` takes."""

    rank: int | None = option("The rank of the factors; a weight with a smaller side has that for its rank.", metavar="R")
    only: str | Sequence[str] = several("Only tensors whose name matches; what else differs is left.", metavar="GLOB")
    dtype: Literal["fp32", "bf16", "fp16"] = option("Of the factors [fp32].", choices=["fp32", "bf16", "fp16"], default="fp32")
    select: str | None = as_in(Selection, "select", "The state dict or subtree, in both, that is compared.")
    overwrite: bool = as_in(OutputOptions, "overwrite", "Replace the adapter in OUT.")
    progress: Progress | None = as_in(WriteOptions, "progress", "Called with (modules done, modules in all).")

    def check(self) -> None:
        """Raise UsageError without a rank."""
        super().check()
        if not self.rank:
            raise UsageError("`rank` says how large the factors are, 1 or more; it is missing.", fix="For example: `rank=16`.")
