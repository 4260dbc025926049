"""What a user may ask of `match` and `average`; what they share with `convert` is said there."""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import TYPE_CHECKING, Literal, TypeAlias

from ckpt_tools.errors import UsageError
from ckpt_tools.fit.options import TargetOptions
from ckpt_tools.operations.convert.options import (
    DryRunOption,
    NameOptions,
    ObjectOptions,
    OutputOptions,
    Selection,
    WriteOptions,
)
from ckpt_tools.tree.arguments import Renames, read_path, read_weights
from ckpt_tools.tree.options import as_in, choice, flag, value

if TYPE_CHECKING:
    from ckpt_tools.io.writer import Progress
    from ckpt_tools.tree.output_names import Format

Integers: TypeAlias = Literal["first", "max"]


class MatchOptions(TargetOptions):
    """All that `match` takes."""

    rename: Renames = as_in(NameOptions, "rename", "Rename tensors of IN first, as in convert.")
    select: str | None = as_in(Selection, "select", "Which state dict of IN, where it holds several.")
    output: str | os.PathLike[str] | None = value("Write a plan (TOML) for convert.", read_path, metavar="PLAN", alias="-o")
    overwrite: bool = flag("Replace PLAN if it exists.")

    def check(self) -> None:
        """Raise UsageError where no target is named, or a plan is to be replaced and none written."""
        super().check()
        if self.like is None:
            raise UsageError("`like` names the target; it is missing.")
        if self.overwrite and self.output is None:
            raise UsageError("`overwrite` is about a plan; `output=PLAN` is missing.")


class AverageOptions(ObjectOptions, DryRunOption):
    """All that `average` takes."""

    weights: Sequence[float] | None = value(
        "The weight of each IN, divided by their sum; else all equal.", read_weights, metavar="W,W,...", in_code="Numbers."
    )
    unwrap: bool = as_in(NameOptions, "unwrap", "Compare names without their wrappers, and write them so.")
    integers: Integers | None = choice("Which value is taken where integers differ; else they are refused.", ["first", "max"])
    select: str | None = as_in(Selection, "select", "One state dict or subtree, in every IN, becomes the whole output.")
    format: Format | None = as_in(OutputOptions, "format", "Container of OUT; else by its name.")
    overwrite: bool = as_in(OutputOptions, "overwrite")
    fsync: bool = as_in(WriteOptions, "fsync")
    progress: Progress | None = as_in(WriteOptions, "progress")
