"""The report of a conversion."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from ckpt_tools.text import Report

if TYPE_CHECKING:
    from ckpt_tools.edit.lora.planning import Merged
    from ckpt_tools.edit.objects.known import ObjectFate
    from ckpt_tools.fit.retarget import FittedTo


@dataclass(slots=True, unsafe_hash=True)
class RenamedNames:
    """What happened to the names of one state dict: `where` it is, how many `tensors` it has, how many were `renamed`.

    `examples` are some of them, old name and new.
    """

    where: list[str | int]
    tensors: int
    renamed: int
    examples: list[tuple[str, str]]


@dataclass(slots=True, unsafe_hash=True)
class Note:
    """Something the user should know: `code` is stable, `text` a sentence."""

    code: str
    text: str


@dataclass(slots=True, repr=False)
class Converted(Report):
    """The report of a conversion.

    Attributes:
        source, target: the two paths. container: the output's. dry_run: whether nothing was written.
        state_dicts: what happened to the names, per state dict.
        dropped: paths of the tensors and values that were left out, with the reason.
        objects: every object that was exchanged or dropped.
        devices: "from -> to": number of storages.
        dequantised: number of plain tensors made of quantised ones, by "scheme -> dtype".
        casts: number of tensors cast, by "from -> to". overflowed, underflowed, saturated: path -> finite values that
            became infinite, values that became zero, values that became the largest number of an fp8 type.
        nan: path -> numbers of a weight made plain that are NaN.
        optimizer_names: how many `param_names` changed.
        aliases: tied names that the output keeps as aliases, name -> the name that holds the bytes.
        compacted: storages that were cut down to what their tensors use; saved: the bytes that this saves.
        merged: the adapters that were merged, in order.
        filled: what came from the checkpoint of `fill_from`, name -> where it is from.
        fitted: what was done to fit a target; None without one.
        companions: files of the input's folder that are not weights and came along: config.json, the tokenizer.
        stayed: what else is in that folder and did not, with the reason.
        notes: what else the user should know.
        tensors, files, bytes: tensors and files in the output, and its size. seconds: how long it took.
    """

    source: str
    target: str
    container: str = ""
    dry_run: bool = False
    state_dicts: list[RenamedNames] = field(default_factory=list)
    dropped: list[tuple[str, str]] = field(default_factory=list)
    objects: list[ObjectFate] = field(default_factory=list)
    devices: dict[str, int] = field(default_factory=dict)
    dequantised: dict[str, int] = field(default_factory=dict)
    casts: dict[str, int] = field(default_factory=dict)
    overflowed: dict[str, int] = field(default_factory=dict)
    underflowed: dict[str, int] = field(default_factory=dict)
    saturated: dict[str, int] = field(default_factory=dict)
    nan: dict[str, int] = field(default_factory=dict)
    optimizer_names: int = 0
    aliases: dict[str, str] = field(default_factory=dict)
    compacted: int = 0
    saved: int = 0
    merged: list[Merged] = field(default_factory=list)
    filled: dict[str, str] = field(default_factory=dict)
    fitted: FittedTo | None = None
    companions: list[str] = field(default_factory=list)
    stayed: list[tuple[str, str]] = field(default_factory=list)
    notes: list[Note] = field(default_factory=list)
    tensors: int = 0
    files: int = 1
    bytes: int = 0
    seconds: float = 0.0

    def note(self, code: str, text: str) -> None:
        """Add a note of this code and text."""
        self.notes.append(Note(code, text))
