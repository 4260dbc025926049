"""Match a checkpoint with a target: everything `ckpt match` shows, as plain data."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

from ckpt_tools.edit.casts import to_little_endian
from ckpt_tools.edit.parametrized import fold_for
from ckpt_tools.errors import UsageError
from ckpt_tools.fit.options import LikeOptions, RunOptions
from ckpt_tools.fit.partners import Seen, look_at
from ckpt_tools.fit.targets import choose_state_dict, read_target
from ckpt_tools.io.source import File
from ckpt_tools.matching import Matching, Stages
from ckpt_tools.matching.advice import Advice, advise
from ckpt_tools.operations.convert.options import NameOptions, Selection
from ckpt_tools.parts.open import open_whole
from ckpt_tools.text import Report
from ckpt_tools.tree.arguments import Renames
from ckpt_tools.tree.nodes import as_dict
from ckpt_tools.tree.options import as_in, as_keywords, flag, option, record


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


@dataclass(frozen=True, slots=True, repr=False)
class Matched(Report):
    """A matching, with what was matched.

    Attributes:
        source: the checkpoint's path. target: what the user called the target. matching: the fate of every name.
        advice: what to do about what is left over.
        graphs: what was seen of the computations of both sides, where both could be seen.
    """

    source: str
    target: str
    matching: Matching
    advice: Advice
    graphs: Seen | None = None

    def __bool__(self) -> bool:
        """Whether nothing is left over: what exit code 0 means."""
        return self.matching.complete_with_offers

    def to_json(self) -> dict[str, Any]:
        """The report as plain data; `complete` is true when nothing is left over."""
        graphs, advice = None if self.graphs is None else asdict(self.graphs), self.advice.to_json()
        return {"source": self.source, "target": self.target, "graphs": graphs, **self.matching.to_json(), "advice": advice}


@as_keywords(MatchOptions)
def match(path: File, options: MatchOptions) -> Matched:
    """Find for every tensor of a checkpoint its partner in a target.

    Reads no tensor bytes unless values are compared, and runs nothing in a file.

    Args:
        path: the checkpoint, IN. Without `match` names decide, a common prefix or suffix too.
        options: those of `MatchOptions`, as keywords.

    Returns:
        The report; `report.matching.complete_with_offers` says whether a plan leaves nothing over.

    Raises:
        CkptError: a file that cannot be read, a target that cannot be built, options that do not fit.
    """
    target = read_target(options.like, args=options.like_args)
    with open_whole(path) as checkpoint:
        if options.stages == "values":
            checkpoint.locate()
        root = to_little_endian(choose_state_dict(checkpoint, options.select).node, checkpoint.byteorder)
        folded = {row.name for row in fold_for(as_dict(root), target.names)}
        sides = look_at(as_dict(root), checkpoint, target, options)

    def matched(stages: Stages, allow_reshape: bool, pairs: Sequence[str]) -> Matching:
        return sides.match(options, stages, rename=options.rename, allow_reshape=allow_reshape, pairs=pairs)

    stages: Stages = options.stages or "names"
    matching = matched(stages, options.allow_reshape, ())
    advice = advise(sides.old, target.params, matching, matched, stages, options.allow_reshape)
    advice = replace(advice, extras=tuple(row for row in advice.extras if folded.isdisjoint(row.names)))  # IN has their parts
    if options.output is not None:
        from ckpt_tools.fit.plan_files import write_plan
        from ckpt_tools.fit.plans import plan_of

        write_plan(plan_of(matching), options.output, overwrite=options.overwrite, inputs=(path, options.like))
    return Matched(str(path), target.label, matching, advice, sides.seen)
