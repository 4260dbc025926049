"""What an optimizer keeps for each parameter, told by its place in the file; it is one line of the page."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, TypeAlias

from ckpt_tools.render.text import counted, path_text, size_text
from ckpt_tools.text import listed

Where: TypeAlias = tuple[str | int, ...]

# Whose words the states have: of what torch.optim and its relatives save for a parameter, `step` left out.
_LIKE = {
    frozenset(("exp_avg", "exp_avg_sq")): "like Adam",
    frozenset(("exp_avg", "exp_avg_sq", "max_exp_avg_sq")): "like Adam with amsgrad",
    frozenset(("momentum_buffer",)): "like SGD with momentum",
    frozenset(("square_avg",)): "like RMSprop",
    frozenset(("sum",)): "like Adagrad",
    frozenset(("square_avg", "acc_delta")): "like Adadelta",
}
_WORDS = frozenset(word for words in _LIKE for word in words) | {"step"}


def optimizer_of(row: dict[str, Any]) -> Where | None:
    """Where the optimizer is whose state a tensor is: `optimizer` of `optimizer.state.3.exp_avg`; None for any other tensor."""
    where: Sequence[str | int] = row["where"]
    if row["name"] is not None or "state" not in where[:-2]:
        return None
    place = where.index("state")
    parameter = where[place + 1]
    numbered = type(parameter) is int or str(parameter).isdecimal()
    return tuple(where[:place]) if numbered or where[-1] in _WORDS else None


def optimizer_text(where: Where, rows: Sequence[dict[str, Any]]) -> str:
    """One line for all states: like whose they are, how many, by which words, and what they take.

    >>> row = {"where": ["state", 0, "momentum_buffer"], "name": None, "bytes": 16}
    >>> optimizer_text((), [row])
    '(root): like SGD with momentum, 1 state (momentum_buffer), 16 B; --all opens it'
    """
    words = list(dict.fromkeys(str(row["where"][-1]) for row in rows))
    like = _LIKE.get(frozenset(words) - {"step"})
    told = f"{like}, " if like else ""
    size = size_text(sum(row["bytes"] for row in rows))
    return f"{path_text(where)}: {told}{counted(len(rows), 'state')} ({listed(words, 6)}), {size}; --all opens it"
