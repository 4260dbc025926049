"""Match a checkpoint with a target: everything `ckpt match` shows, as plain data."""

from __future__ import annotations

import os
from dataclasses import dataclass
from typing import Any

from ckpt_tools.errors import UsageError
from ckpt_tools.fit.options import TargetOptions
from ckpt_tools.fit.targets import choose_state_dict, params_of, read_target
from ckpt_tools.formats.parts.named import open_whole
from ckpt_tools.matching import Matching
from ckpt_tools.matching import match as find_partners
from ckpt_tools.operations.convert.options import NameOptions, Selection
from ckpt_tools.text import brief
from ckpt_tools.tree.arguments import Renames, natural, read_path
from ckpt_tools.tree.options import as_in, as_keywords, flag, value


@dataclass(frozen=True, slots=True)
class Matched:
    """A matching, with what was matched.

    Attributes:
        source: the checkpoint's path. target: what the user called the target. matching: the fate of every name.
    """

    source: str
    target: str
    matching: Matching

    __repr__ = brief

    def to_json(self) -> dict[str, Any]:
        """The report as plain data; `complete` is true when nothing is left over."""
        return {"source": self.source, "target": self.target, **self.matching.to_json()}


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


@as_keywords(MatchOptions)
@natural
def match(path: str | os.PathLike[str], options: MatchOptions) -> Matched:
    """Find for every tensor of a checkpoint its partner in a target. Reads no tensor bytes, and runs nothing in a file.

    Args:
        path: the checkpoint, IN. Without `match` names decide, a common prefix or suffix too.
        options: those of `MatchOptions`, as keywords.

    Returns:
        The report; `report.matching.complete_with_offers` says whether a plan leaves nothing over.

    Raises:
        CkptError: a file that cannot be read, a target that cannot be built, options that do not fit.
    """
    target = read_target(options.like, args=options.like_args, select=options.like_select)
    with open_whole(path) as checkpoint:
        params = params_of(choose_state_dict(checkpoint, options.select).node)
    matching = find_partners(
        params, target.params, stages=options.match or "names", rename=list(options.rename), allow_reshape=options.allow_reshape
    )
    if options.output is not None:
        from ckpt_tools.fit.plan_files import write_plan
        from ckpt_tools.fit.plans import plan_of

        write_plan(plan_of(matching), options.output, overwrite=options.overwrite)
    return Matched(str(path), target.label, matching)
