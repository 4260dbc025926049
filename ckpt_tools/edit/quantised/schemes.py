"""The table of schemes: each tells, by the parts of a weight, whether it is one of its own. A new one is a module and a row."""

from __future__ import annotations

from collections.abc import Callable

from ckpt_tools.edit.quantised.bitsandbytes import match_4bit, match_bnb_int8
from ckpt_tools.edit.quantised.fp4 import match_fp4, match_mxfp4
from ckpt_tools.edit.quantised.grouped import match_grouped
from ckpt_tools.edit.quantised.mlx import match_mlx
from ckpt_tools.edit.quantised.packed import match_packed
from ckpt_tools.edit.quantised.parts import Quantised, Roles
from ckpt_tools.edit.quantised.quanto import match_quanto
from ckpt_tools.edit.quantised.scaled import match_scaled
from ckpt_tools.edit.quantised.torchao import match_flat

SCHEMES: tuple[Callable[[str, Roles], Quantised | None], ...] = (
    match_scaled, match_bnb_int8, match_4bit, match_packed, match_fp4, match_grouped, match_mxfp4, match_flat,
    match_mlx, match_quanto,
)  # fmt: skip
