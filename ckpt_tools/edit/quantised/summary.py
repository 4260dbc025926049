"""What `inspect` says of quantised weights: schemes, sizes, and what is not whole."""

from __future__ import annotations

from math import prod
from typing import Any

from ckpt_tools.edit.quantised.config import Config, read_config
from ckpt_tools.edit.quantised.finding import find
from ckpt_tools.edit.quantised.parts import Quantised
from ckpt_tools.errors import CkptError
from ckpt_tools.formats.checkpoint import Checkpoint
from ckpt_tools.io.output import is_address

_PLAIN_BYTES = 2  # of a number in bf16
_SHOWN = 20


def summary(checkpoint: Checkpoint) -> dict[str, Any] | None:
    """The schemes of the quantised weights with their sizes, and what looks quantised and is not whole; None without any."""
    found = [find(state_dict.node) for state_dict in checkpoint.state_dicts]
    tensors = [tensor for one in found for tensor in one.quantised.values()]
    if not tensors:  # a scale may be a parameter of its own
        return None
    unread = is_address(str(checkpoint.path)) or checkpoint.decoded.locate is not None
    config = None if unread else read_config(checkpoint)
    rows = dict[str, dict[str, Any]]()
    for tensor in tensors:
        scheme, elements = _told(tensor, config)
        row = rows.setdefault(scheme, {"scheme": scheme, "tensors": 0, "elements": 0, "bytes": 0, "bf16_bytes": 0})
        row["tensors"] += 1
        row["bytes"] += tensor.nbytes
        row["elements"] = None if elements is None or row["elements"] is None else row["elements"] + elements
        row["bf16_bytes"] = None if row["elements"] is None else row["elements"] * _PLAIN_BYTES
    return {"schemes": list(rows.values()), "problems": [problem.what for one in found for problem in one.problems][:_SHOWN]}


def _told(tensor: Quantised, config: Config | None) -> tuple[str, int | None]:
    """The scheme and the number of elements, as far as they are known."""
    if tensor.elements is not None or config is None:
        return tensor.scheme, tensor.elements
    try:
        plain = tensor.settle(config)
    except CkptError:
        return tensor.scheme, None
    return tensor.scheme + plain.detail, prod(plain.shape)
