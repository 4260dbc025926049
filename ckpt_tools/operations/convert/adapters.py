"""`--lora` of a conversion: adapters merged into the one state dict of a tree."""

from __future__ import annotations

import os
from collections.abc import Sequence
from contextlib import ExitStack

from ckpt_tools.edit.account import Account
from ckpt_tools.edit.lora.adapter import opened
from ckpt_tools.edit.lora.merging import Merging
from ckpt_tools.errors import NothingMatchedError
from ckpt_tools.formats.open import find_optimizers, find_state_dicts
from ckpt_tools.operations.convert.report import Converted, Note
from ckpt_tools.text import dotted
from ckpt_tools.tree.nodes import Dict, Node


def merge(
    root: Node, adapters: Sequence[tuple[str | os.PathLike[str], float]], report: Converted, stack: ExitStack, account: Account
) -> Node:
    """Merge adapters one after the other, and tell; `stack` keeps them open until the bytes are written.

    Their tensors are opened in the account: scalars and equal bases count as taken in, what they replace as left out.

    Raises:
        NothingMatchedError: no state dict, or several. CkptError: see `opened` and `Merging`.
    """
    found = find_state_dicts(root)
    if len(found) != 1:
        wheres = ", ".join(dotted(state_dict.where) or "the root" for state_dict in found)
        raise NothingMatchedError(
            f"{report.source} holds {len(found)} state dicts{f': {wheres}' if wheres else ''}; an adapter is merged into one.",
            fix=f"Choose it: `select={dotted(found[0].where) or dotted(found[1].where)!r}`." if found else
            "A pickled model gives its state dict with `objects='plain'`.",
        )  # fmt: skip
    merging = Merging(root, found[0].node, report.source)
    for path, weight in adapters:
        adapter = stack.enter_context(opened(path))
        report.merged.append(merging.plan(adapter, str(path), weight))
        account.open(str(path), Dict([*adapter.tensors.items()]))
        account.leave_out(node for name, node in adapter.tensors.items() if name.endswith(".alpha"))
        if weight != 1 and (whole := report.merged[-1].saved + report.merged[-1].added):
            text = f"{path} holds {len(whole)} tensors whole; its weight of {weight:g} does not count for them."
            report.notes.append(Note("saved-whole", text))
    report.notes += [Note(code, text) for code, text in merging.notes]
    account.leave_out(merging.taken_in)
    root = merging.apply()
    if (state := next((dotted(where) for where, _ in find_optimizers(root)), None)) is not None:
        text = f"The state in {state} belongs to the weights as they were; leave it out: `drop={state!r}`"
        report.notes.append(Note("optimizer-of-old-tensors", text))
    return root
