"""What the numbers in the tensors say: NaN, infinities, nothing but zeros, garbage, weights that were never trained.

How "fresh" is judged. A head (the last matrix of a state dict, and every one whose module is called fc, head, classifier,
score, lm_head ...) of at least 100 weights counts as fresh where its values are what an initialiser gives, to within five
standard errors: `nn.Linear`'s own (uniform within 1/sqrt(inputs): mean 0, that spread, and the largest value closer to the
bound than one in n/10 draws leaves it), or normal with deviation 0.02 (BERT, GPT) where the bias is all zero.

How "garbage" is judged. More than one finite value in a thousand is larger than 1e18: memory that was allocated and never
written reads so; no training gives it.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from ckpt_tools.formats.contents import StateDict
from ckpt_tools.tree.findings import Finding
from ckpt_tools.tree.nodes import Entry, Where
from ckpt_tools.values.statistics import ValueCount

HEADS = frozenset(("fc", "head", "heads", "classifier", "score", "lm_head", "logits", "linear", "output", "output_layer"))
_FEWEST = 100
_GARBAGE = 1000
_ERRORS = 5


@dataclass(slots=True, unsafe_hash=True)
class Counted:
    """A tensor with its counts."""

    where: Where
    entry: Entry
    count: ValueCount


def head_names(state_dict: StateDict) -> set[str]:
    """The names of weights that may belong to a head."""
    matrices = [
        name
        for name, entry in state_dict.node.items
        if type(name) is str and type(entry) is Entry and len(entry.shape) == 2 and entry.dtype.family == "float"
    ]
    return {name for name in matrices if name == matrices[-1] or _module(name).rpartition(".")[2] in HEADS}


def _module(name: str) -> str:
    return name.rpartition(".")[0]


def findings(counted: Sequence[Counted], heads: frozenset[Where]) -> Iterator[Finding]:
    """What is worth knowing about the values."""
    by_where = {row.where: row for row in counted}
    for row in counted:
        where, count, numel = list(row.where), row.count, row.entry.numel
        if count.nan or count.inf:
            found = " and ".join(f"{n} {what}" for n, what in ((count.nan, "NaN"), (count.inf, "infinite")) if n)
            yield Finding("not-finite", "problem", where, f"{found} of {numel} values", "finite numbers", _EARLIER)
        if count.huge * _GARBAGE > numel:
            found = f"{count.huge} of {numel} values are larger than 1e18: memory that was never written"
            yield Finding("uninitialised", "problem", where, found, "weights", _EARLIER)
        elif numel and not count.nonzero and len(row.entry.shape) > 1 and row.entry.dtype.family == "float":
            yield Finding("all-zero", "warning", where, f"all {numel} values are zero", "weights", _EARLIER)
        elif row.where in heads and (how := _fresh(row, by_where)):
            found = f"looks as if it was never trained: its values are those of {how}"
            fix = "Train it, or take it from another checkpoint."
            yield Finding("fresh-head", "warning", where, found, "trained weights", fix)


_EARLIER = "Take an earlier checkpoint of the run, or this tensor from one."


def _fresh(row: Counted, rows: Mapping[Where, Counted]) -> str:
    """Which initialiser a weight may come from; empty when from none."""
    n, inputs = row.entry.numel, row.entry.shape[1]
    if n < _FEWEST or not row.count.squares:
        return ""
    mean, variance = row.count.total / n, row.count.squares / n - (row.count.total / n) ** 2
    bound = 1 / math.sqrt(inputs)
    near_bound = bound * (1 - 10 / n) <= row.count.largest <= bound * 1.004  # bfloat16 rounds by up to 2**-8
    expected = bound * bound / 3
    spread = abs(variance / expected - 1) <= _ERRORS * math.sqrt(0.8 / n)
    if near_bound and spread and abs(mean) <= _ERRORS * math.sqrt(expected / n):
        return f"nn.Linear's initialiser (uniform within {bound:.4g})"
    name = str(row.where[-1])
    bias = rows.get((*row.where[:-1], f"{_module(name)}.bias" if "." in name else "bias"))
    if bias is not None and not bias.count.nonzero and _is_normal(n, mean, variance, row.count.largest):
        return "a normal initialiser with deviation 0.02, and its bias is zero"
    return ""


def _is_normal(n: int, mean: float, variance: float, largest: float) -> bool:
    deviation = 0.02
    spread = abs(math.sqrt(max(variance, 0)) / deviation - 1) <= _ERRORS / math.sqrt(2 * n)
    return spread and abs(mean) <= _ERRORS * deviation / math.sqrt(n) and largest <= 8 * deviation
