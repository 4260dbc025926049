"""What became of every tensor of a guarded model."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from typing import Any, Literal, TypeAlias

from ckpt_tools.errors import MatchError, UsageError
from ckpt_tools.text import brief, did_you_mean, listed, notebook, printable
from ckpt_tools.torch.guarding.stored import Library
from ckpt_tools.tree.globs import Globs
from ckpt_tools.tree.names import unwrap

Word: TypeAlias = Literal["loaded", "tied", "untouched", "partly", "changed", "swapped", "unsaved", "unexamined"]
_ORDER: tuple[Word, ...] = ("loaded", "tied", "unsaved", "unexamined", "swapped", "partly", "changed", "untouched")
_WRONG = ("untouched", "partly", "changed", "swapped")
_SHOWN = 6
_SAYS = {
    "untouched": "still as made", "partly": "partly from a file", "changed": "changed, and in no file that was opened",
    "swapped": "from one another's names in the file",
}  # fmt: skip


@dataclass(slots=True, unsafe_hash=True)
class Fate:
    """What became of one tensor.

    Attributes:
        name: its name in the model. kind: "parameter" or "buffer".
        fate: "loaded" (its numbers are a file's), "tied" (it is another tensor of the model, which is loaded), "untouched" (as
            it was made), "partly" (some of its rows are a file's), "changed" (by other means: its numbers are in no file that
            was opened), "swapped" (it has another name's numbers, which has its own), "unsaved" (a buffer that no state dict
            holds, or one without elements; a counter that files from before torch 0.4.1 lack), "unexamined" (written to, and
            its elements cannot be looked at).
        path: the file. source: the tensor's path in there.
        how: what was done to it on the way: "float32 -> float16", "transposed", "rows 0 to 63"; or why it has this fate.
    """

    name: str
    kind: str
    fate: Word
    path: str = ""
    source: str = ""
    how: str = ""

    @property
    def is_right(self) -> bool:
        """Whether it has what a file says, or what no file should say."""
        return self.fate not in _WRONG


@dataclass(slots=True)
class Fates:
    """The fates of a model's tensors; true when each is from a file, is tied to one that is, or is in no state dict.

    Attributes:
        fates: one for every name of a parameter and of a buffer, in the model's order.
        files: the checkpoints that were opened. notes: those that could not be read, and why.
    """

    fates: list[Fate] = field(default_factory=list)
    files: list[str] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)

    def _fill(self, fates: list[Fate], library: Library) -> None:
        self.fates, self.files, self.notes = fates, library.paths, library.notes

    def __bool__(self) -> bool:
        return bool(self.fates) and all(fate.is_right for fate in self.fates)

    def wrong(self, *, allow: Sequence[str] = ()) -> list[Fate]:
        """Tensors that are untouched, partly loaded, swapped or changed otherwise, but for what a glob of `allow` matches.

        Raises:
            UsageError: a glob matches no tensor of the model.
        """
        globs = Globs([allow] if isinstance(allow, str) else allow)
        allowed = {fate.name for fate in self.fates if globs.matching(fate.name)}
        if globs.unused:
            glob = next(iter(globs.unused))
            fix = did_you_mean(glob, [fate.name for fate in self.fates])
            raise UsageError(f"`allow={glob!r}` matches no tensor of the model.", fix=fix)
        return [fate for fate in self.fates if not fate.is_right and fate.name not in allowed]

    def check(self, *, allow: Sequence[str] = ()) -> None:
        """Raise when a tensor is not from a file.

        Args:
            allow: globs on names that need not be: a head that is random on purpose, what the code computes.

        Raises:
            MatchError: some are not; all are listed. UsageError: a glob matches no tensor, or nothing was watched.
        """
        if not self.fates:
            raise UsageError("No model was watched.", fix="guard(model), or seen.watch(model) inside the block.")
        wrong = self.wrong(allow=allow)
        if wrong:
            groups = {word: [_named(fate) for fate in wrong if fate.fate == word] for word in _WRONG}
            told = [f"{len(names)} {_SAYS[word]}: {listed(names, 40)}" for word, names in groups.items() if names]
            raise MatchError(
                f"{len(wrong)} of {len(self.fates)} tensors of the model are not what a file has for them.",
                why=printable("; ".join([*told, self._opened(), *self.notes])) + ".",
                fix="What is meant: check(allow=['head.*']). A file that was read before: guard(model, files=[...]).",
            )

    def _opened(self) -> str:
        return f"opened: {listed(list(map(_from_here, self.files)), 8)}" if self.files else "no checkpoint was opened meanwhile"

    def __str__(self) -> str:
        rows = [(title, str(len(names)), self._what(title, names)) for title, names in self._grouped().items()]
        widths = [max(len(row[column]) for row in [("fate", "tensors", ""), *rows]) for column in (0, 1)]
        lines = [f"{title:{widths[0]}}  {count:>{widths[1]}}  {what}".rstrip() for title, count, what in
                 [("fate", "tensors", "from"), *rows]]  # fmt: skip
        return "\n".join(map(printable, [*lines, *(f"note: {note}" for note in self.notes)]))

    def _grouped(self) -> dict[str, list[Fate]]:
        """The fates by what the table calls them: those of one file and one way together, what is wrong last."""
        found: dict[str, list[Fate]] = {}
        for fate in sorted(self.fates, key=lambda fate: _ORDER.index(fate.fate)):
            found.setdefault(_title(fate), []).append(fate)
        return found

    @staticmethod
    def _what(title: str, fates: list[Fate]) -> str:
        if fates[0].fate == "loaded":
            return listed(list(dict.fromkeys(_from_here(fate.path) for fate in fates)))
        return listed([_named(fate) for fate in fates], _SHOWN)

    __repr__ = brief
    _repr_html_ = notebook

    def to_json(self) -> dict[str, Any]:
        """The report as plain data."""
        return {"fates": [asdict(fate) for fate in self.fates], "files": self.files, "notes": self.notes}


def _from_here(path: str) -> str:
    """A path below the working folder as it is called from there."""
    here = os.path.join(os.getcwd(), "")
    return path.removeprefix(here)


def _named(fate: Fate) -> str:
    return f"{fate.name} ({fate.how})" if fate.how else fate.name


def _title(fate: Fate) -> str:
    if fate.fate != "loaded":
        return fate.fate
    name, source = unwrap(fate.name), unwrap(fate.source)
    renamed = "" if source.endswith(name) or name.endswith(source) else "renamed"
    how = fate.how if "->" in fate.how else fate.how.partition(" ")[0]  # which rows, and of what, would be a line for each
    return ", ".join(part for part in (fate.fate, renamed, how) if part)
