"""What a user chose for tensors without a partner, or of another shape; checked before anything is read."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from ckpt_tools.errors import UsageError
from ckpt_tools.fit.initialisers import Rules
from ckpt_tools.fit.options import OnMismatch

_CHOICES = ("error", "reinit", "overlap", "skip")


@dataclass(slots=True)
class Choices:
    """What is to happen to tensors without a partner, checked."""

    reinit: Rules
    on_mismatch: OnMismatch = "error"
    adapt: bool = False
    seed: int = 0
    allow_missing: Sequence[str] = ()
    allow_unexpected: Sequence[str] = ()
    in_code: bool = False

    def __post_init__(self) -> None:
        if self.on_mismatch not in _CHOICES:
            raise UsageError(f"`on_mismatch={self.on_mismatch!r}` is not one of {', '.join(_CHOICES)}.")
        if isinstance(self.seed, bool) or not isinstance(self.seed, int) or self.seed < 0:
            raise UsageError(f"`seed={self.seed!r}` is not a whole number from 0 up.")
        if isinstance(self.allow_missing, str) or isinstance(self.allow_unexpected, str):
            raise UsageError("allow_missing and allow_unexpected take a list of globs.", fix='For example: ["fc.*"]')
