"""What `inspect` says of quantised weights: schemes, sizes, and what is not whole."""

from __future__ import annotations

from math import prod
from typing import Any

from ckpt_tools.edit.quantised.config import Config, read_config
from ckpt_tools.edit.quantised.finding import by_scheme, find
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
    rows = [_row(scheme, of_scheme, config) for scheme, of_scheme in by_scheme(tensors).items()]
    return {"schemes": rows, "problems": [problem.what for one in found for problem in one.problems][:_SHOWN]}


def _row(scheme: str, tensors: list[Quantised], config: Config | None) -> dict[str, Any]:
    counts = [_elements(tensor, config) for tensor in tensors]
    known = None if None in counts else sum(count or 0 for count in counts)
    plain = None if known is None else known * _PLAIN_BYTES
    nbytes = sum(tensor.nbytes for tensor in tensors)
    return {"scheme": scheme, "tensors": len(tensors), "elements": known, "bytes": nbytes, "bf16_bytes": plain}


def _elements(tensor: Quantised, config: Config | None) -> int | None:
    if tensor.elements is not None or config is None:
        return tensor.elements
    try:
        return prod(tensor.settle(config).shape)
    except CkptError:
        return None
