"""What is known of both sides before partners are found: names and shapes always, numbers and computations where asked."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from ckpt_tools.fit.options import COMPARING, PartnerOptions
from ckpt_tools.fit.partners.graphs import Compared, Question, compare_graphs
from ckpt_tools.fit.targets import Target, framework_of, params_of
from ckpt_tools.formats.open import Checkpoint
from ckpt_tools.matching import Matching, Stages, match
from ckpt_tools.matching.params import Framework, Param
from ckpt_tools.tree.arguments import Renames
from ckpt_tools.tree.nodes import Dict


@dataclass(frozen=True, slots=True)
class Sides:
    """Both sides.

    Attributes:
        old: the checkpoint's tensors. new: the target's. compared: the computations of both, where they were asked for.
        framework: whose layers the checkpoint has, where its container says so.
    """

    old: Sequence[Param]
    new: Sequence[Param]
    compared: Compared
    framework: Framework | None

    def match(
        self, options: PartnerOptions, stages: Stages, *, rename: Renames = (), allow_reshape: bool, pairs: Sequence[str] = ()
    ) -> Matching:
        """The fate of every name, by `stages`; `pairs` are said beside those of the options."""
        return match(
            self.old, self.new, stages=stages, rename=list(rename), framework=self.framework, allow_reshape=allow_reshape,
            graphs=self.compared.graphs, pairs=[*options.pair, *pairs],
        )  # fmt: skip


def look_at(
    node: Dict, checkpoint: Checkpoint | None, target: Target, options: PartnerOptions, like_select: str | None = None
) -> Sides:
    """What the options want known of a state dict and of a target.

    Args:
        node: the state dict; where values decide, its bytes must be at hand (`Checkpoint.locate`).
        checkpoint: where it is from, which may say more of it.
        target: what it is compared with. like_select: which state dict of it, where it is a file that holds several.
        options: how partners are found.

    Raises:
        TargetError, UsageError: a side that cannot be asked; see `compare_graphs` and `sampled_sides`.
    """
    old, new, compared = params_of(node), target.params, Compared()
    if options.stages in COMPARING:
        compared = compare_graphs(old, checkpoint, Question(options.from_, options.from_args, options.input), target)
    elif options.stages == "values":
        from ckpt_tools.fit.partners.samples import sampled_sides

        old, new = sampled_sides(old, node, target, like_select)
    return Sides(old, new, compared, None if checkpoint is None else framework_of(checkpoint))
