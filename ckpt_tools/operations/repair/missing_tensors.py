"""Fill in missing tensors: what a target has and the saved state dict lacks gets initial values, so that the result loads."""

from __future__ import annotations

from collections.abc import Sequence

from ckpt_tools.errors import UsageError
from ckpt_tools.fit.choices import Choices
from ckpt_tools.fit.fit import Wanted, fit
from ckpt_tools.fit.initialisers import Rules, blank_for
from ckpt_tools.fit.plans import plan_of
from ckpt_tools.fit.targets import params_of, read_target
from ckpt_tools.formats.open import StateDict, find_state_dicts
from ckpt_tools.matching import match
from ckpt_tools.text import dotted
from ckpt_tools.tree.names import unwrap
from ckpt_tools.tree.nodes import Node


class MissingTensors:
    """`--like` and `--reinit`, read and checked before any work.

    Raises:
        UsageError: an unknown scheme, or one that needs the target's own values. TargetError: no such target.
    """

    def __init__(self, like: str, reinit: Sequence[str], seed: int) -> None:
        if any(text.rpartition("=")[2] == "target" for text in reinit):
            raise UsageError("`reinit='target'` is for ckpt convert; repair fills in missing tensors with initial values.")
        self.target = read_target(like)
        self.choices = Choices(Rules(reinit), seed=seed, allow_unexpected=("*",))

    def fill(self, root: Node) -> dict[str, str]:
        """Fill the state dict that the target is about, in place; its tensors come in the target's order.

        Returns:
            The names that got initial values, with the scheme.

        Raises:
            UsageError: no state dict shares a name with the target, or several do. MatchError: shapes differ, or a name that no
            rule of --reinit covers.
        """
        params = {param.name: param for param in self.target.params}
        found = [state_dict for state_dict in find_state_dicts(root) if set(map(unwrap, state_dict.names)) & set(params)]
        if len(found) != 1:
            raise UsageError(
                f"{len(found)} state dicts share names with {self.target.label}: {_listed(found)}.",
                fix="Take one out after the repair: ckpt convert --select WHERE --like TARGET --reinit default."
                if found
                else "",
            )
        node = found[0].node
        wanted = Wanted(
            self.target.names, lambda name: blank_for(self.target, params[name]), None, self.target.ties,
            f"What was saved does not fit {self.target.label}",
        )  # fmt: skip
        fitted = fit(node, plan_of(match(params_of(node), self.target.params)), wanted, self.choices)
        return {row.name: row.scheme for row in fitted.initialised}


def _listed(found: Sequence[StateDict]) -> str:
    return ", ".join(dotted(state_dict.where) or "(root)" for state_dict in found) or "none"
