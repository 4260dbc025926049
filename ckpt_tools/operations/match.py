"""Match a checkpoint with a target: everything `ckpt match` shows, as plain data."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from ckpt_tools.fit.targets import choose_state_dict, params_of, read_target
from ckpt_tools.formats.parts.named import open_whole
from ckpt_tools.matching import Matching, Stages, match
from ckpt_tools.text import brief


@dataclass(frozen=True, slots=True)
class MatchReport:
    """A matching, with what was matched: the checkpoint's path and what the user called the target."""

    source: str
    target: str
    matching: Matching

    __repr__ = brief

    def to_json(self) -> dict[str, Any]:
        """The report as plain data; `complete` is true when nothing is left over."""
        return {"source": self.source, "target": self.target, **self.matching.to_json()}


def match_checkpoint(
    source: str | os.PathLike[str],
    like: Any,
    *,
    like_args: str | Mapping[str, Any] | None = None,
    like_select: str | None = None,
    stages: Stages = "names",
    rename: Sequence[str] = (),
    select: str | None = None,
    allow_reshape: bool = False,
) -> MatchReport:
    """Find for every tensor of a checkpoint its partner in a target. Reads no tensor bytes, and runs nothing in a file.

    Args:
        source: the checkpoint. select: the dotted path of its state dict, where it holds several.
        like: the target; like_args, like_select: see `targets.read_target`.
        stages, rename, allow_reshape: see `match.match`.

    Raises:
        CkptError: a file that cannot be read, a target that cannot be built, options that do not fit; see `match.match`.
    """
    target = read_target(like, args=like_args, select=like_select)
    with open_whole(source) as checkpoint:
        state_dict = choose_state_dict(checkpoint, select)
        params = params_of(state_dict.node)
    matching = match(params, target.params, stages=stages, rename=rename, allow_reshape=allow_reshape)
    return MatchReport(str(source), target.label, matching)
