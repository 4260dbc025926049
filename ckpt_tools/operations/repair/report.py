"""What `ckpt repair` did. The fields are the contract of `ckpt repair --json`, see docs/json.md."""

from __future__ import annotations

from dataclasses import dataclass, field

from ckpt_tools.operations.repair.mends import Mended
from ckpt_tools.text import Report

# Notes about what could not be saved, or what was written and is not to be loaded.
_UNSAVED = (
    "assumed-byteorder", "damaged-names", "damaged-pickle", "damaged-values", "dangerous", "enclosed",
    "mixed-writers", "several-archives", "unproved-places",
)  # fmt: skip


@dataclass(frozen=True, slots=True)
class Missing:
    """A tensor that could not be saved whole: `where` it is, its bytes, why, and whether what there is of it was kept."""

    where: list[str | int]
    bytes: int
    why: str
    kept: bool = False


@dataclass(slots=True, repr=False)
class Repaired(Report):
    """The report of a repair.

    Attributes:
        source, target: the files. container: the output's. dry_run: whether nothing was written.
        was: what was wrong with the file as a whole; empty where it opened.
        tensors, saved: how many there are, and how many of them are whole. tensor_bytes, saved_bytes: the same in bytes, a
            storage counted once.
        missing: those that are not.
        mended: what was mended, and what was left because the file does not tell. notes: what else there is to know.
        bytes: size of the output. seconds: how long it took.
    """

    source: str
    target: str
    container: str = ""
    dry_run: bool = False
    was: str = ""
    tensors: int = 0
    saved: int = 0
    tensor_bytes: int = 0
    saved_bytes: int = 0
    missing: list[Missing] = field(default_factory=list)
    mended: list[Mended] = field(default_factory=list)
    notes: list[tuple[str, str]] = field(default_factory=list)
    bytes: int = 0
    seconds: float = 0.0

    def __bool__(self) -> bool:
        """Whether all was saved: what exit code 0 means."""
        return self.exit_code == 0

    @property
    def exit_code(self) -> int:
        """0 all saved, 1 something could not be, or what was written is dangerous."""
        return 1 if self.missing or any(code in _UNSAVED for code, _ in self.notes) else 0
