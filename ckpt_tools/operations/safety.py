"""Is a file safe to load? What loading it without weights_only would run, and one word for it. docs/scan.md has the rule.

The answer goes by the bytes alone: not by what is installed here, nor by what could be imported.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, Literal, TypeAlias

from ckpt_tools.errors import CkptError, MissingFileError, RemoteError
from ckpt_tools.formats.checkpoint import Checkpoint
from ckpt_tools.io.source import Source, archive_and_member
from ckpt_tools.io.sources import Files
from ckpt_tools.parts.open import open_source
from ckpt_tools.pickling.weights_only import ALLOWED, ALLOWED_NESTED, is_newer_dtype
from ckpt_tools.text import listed, printable, shortened
from ckpt_tools.tree.findings import Finding, mending
from ckpt_tools.tree.nodes import Global, Node, Object
from ckpt_tools.tree.visit import walk

if TYPE_CHECKING:
    from ckpt_tools.formats.pickles import Pickles
    from ckpt_tools.pickling.calls import Call

Verdict: TypeAlias = Literal["nothing", "plain", "needs-code", "unexamined", "dangerous"]
_PLAIN = ALLOWED | ALLOWED_NESTED
_SHOWN = 110  # characters of a call, of a list of names, or of a reason, that stand in a line
_SHOWN_CALLS = 20  # of a file, as findings; JSON has them all


@dataclass(slots=True, unsafe_hash=True)
class Safety:
    """What loading a file without weights_only would run.

    Attributes:
        verdict: "dangerous", "unexamined" (a part of it could not be examined), "needs-code" (classes that are not in the
            documented list of data, none known to do harm), "plain", or "nothing" (no pickle, and no program, is in it).
        calls: (where, call), in the order of the file. names: every global that the pickles name.
        unexamined: (where, why). program: whether it is a program of torch's.
        pickles: how many pickles were examined.
    """

    verdict: Verdict
    calls: Sequence[tuple[str, Call]] = ()
    names: Sequence[Global] = ()
    unexamined: Sequence[tuple[str, str]] = ()
    program: bool = False
    pickles: int = 0

    @property
    def classes(self) -> list[str]:
        """The globals that weights_only does not allow, as `module.name`."""
        return [str(name) for name in self.names if not _is_plain(name)]

    @property
    def text(self) -> str:
        """The verdict in one line, safe to show: what a pickle calls or names is cut."""
        if self.verdict == "dangerous":
            more = f", and {len(self.calls) - 1} more" if len(self.calls) > 1 else ""
            return f"dangerous: it {_does(self.calls[0][1], _SHOWN)}{more}"
        if self.verdict == "needs-code":
            if not self.classes:
                return "needs code: it is a program; load it only if you trust who made it"
            return f"needs code: loading it runs {_some(self.classes)}; load it only if you trust these packages"
        if self.verdict == "unexamined":
            where, why = self.unexamined[0]
            return shortened(printable(f"could not be examined: {where + ': ' if where else ''}{why}"), _SHOWN + 70)
        return "safe: no code in it" if self.verdict == "plain" else "nothing to run"

    def to_json(self) -> dict[str, Any]:
        """As plain data: the contract of docs/json.md."""
        calls = [
            {"where": where, "offset": call.offset, "does": call.does, "call": call.text, "function": call.function,
             "known": call.rating == "harmful"} for where, call in self.calls
        ]  # fmt: skip
        unexamined = [{"where": where, "why": why} for where, why in self.unexamined]
        return {"verdict": self.verdict, "calls": calls, "classes": self.classes, "unexamined": unexamined}

    def findings(self, path: str, *, opens: bool = True) -> list[Finding]:
        """The dangers of the file at a path as findings; what to do about them stands once, at the first.

        Args:
            opens: whether its tensors can be had.
        """
        shown = [sentence(where, call, _SHOWN) for where, call in self.calls[:_SHOWN_CALLS]]
        if len(self.calls) > _SHOWN_CALLS:
            shown.append(f"... and {len(self.calls) - _SHOWN_CALLS} more calls")
        found = [Finding("dangerous", "problem", [], text) for text in shown]
        if found:
            taken = f" This takes its tensors alone: {mending('convert', path, '--objects plain')}" if opens else ""
            expected = "data, and calls that make data (docs/scan.md)"
            found[0] = replace(found[0], expected=expected, fix=f"Do not load it.{taken}")
        if self.unexamined:
            reasons = listed([f"{printable(where) or 'the file'}: {printable(why)}" for where, why in self.unexamined])
            text = f"not all of it could be examined: {shortened(reasons, 4 * _SHOWN)}"
            found.append(Finding("unexamined", "warning", [], text))
        return found


def sentence(where: str, call: Call, most: int | None = None) -> str:
    """What one call does, for people; the call and its place are cut to so many characters."""
    place = f" ({printable(where) if most is None else shortened(printable(where), most // 3)})" if where else ""
    return f"{'this' if call.does == 'names' else 'loading this without weights_only'} {_does(call, most)}{place}"


def _some(names: Sequence[str]) -> str:
    """Up to three names that fit a line, and how many more there are."""
    shown = [shortened(printable(name), _SHOWN) for name in names[:3]]
    while len(", ".join(shown)) > _SHOWN:
        shown.pop()
    return listed(shown, rest=len(names) - len(shown))


def _does(call: Call, most: int | None = None) -> str:
    """What a call does, the call itself cut."""
    shown = call.text if most is None else shortened(call.text, most)
    if call.does == "names" and call.rating == "harmful":
        return f"names {shown}, which can run code"
    return f"{call.does} {shown}{'' if call.rating == 'harmful' else ', which is not known: treat it as dangerous'}"


def of_pickles(found: Pickles) -> Safety:
    """The answer for what was found in a file."""
    calls = [(pickle.where, call) for pickle in found.pickles for call in pickle.calls]
    names = list(dict.fromkeys(name for pickle in found.pickles for name in pickle.names))
    verdict: Verdict = "plain" if found.pickles else "nothing"
    if found.program or not all(map(_is_plain, names)):
        verdict = "needs-code"
    if found.unexamined:
        verdict = "unexamined"
    return Safety("dangerous" if calls else verdict, calls, names, found.unexamined, found.program, len(found.pickles))


def examine(source: Source, known: Mapping[Source, Sequence[Global]] | None = None) -> Safety:
    """Look a file through; of a folder every file that is open, but for those that are known:"""
    from ckpt_tools.formats.pickles import Pickles  # few files need it
    from ckpt_tools.pickling.calls import Pickle

    found = Pickles()
    for name, member in list(source.members.items()) if isinstance(source, Files) else [("", source)]:
        if known is not None and member in known:
            found.pickles.append(Pickle(0, where=name, names=list(known[member])))
        else:
            found.look_through(member, name)
    return of_pickles(found)


def of_unreadable(path: str | os.PathLike[str], error: CkptError) -> Safety | None:
    """The answer for a file that is not a checkpoint or breaks: what stands before the break would already have run."""
    if isinstance(error, (RemoteError, MissingFileError)):
        return None
    error.__traceback__ = error.__context__ = None  # whose frames hold what was read, and here it is read once more
    with contextlib.suppress(CkptError), contextlib.closing(open_source(archive_and_member(path)[0])) as source:
        return examine(source)
    return None


def _is_plain(name: Global) -> bool:
    return name in _PLAIN or is_newer_dtype(name)


def danger_in(checkpoint: Checkpoint, path: str) -> str:
    """That the checkpoint at a path is dangerous, and what it calls, in a sentence; empty where it is not."""
    found = of_checkpoint(checkpoint)
    return f"{printable(path)} is {found.text}." if found.calls else ""


def danger_note(danger: str, written: Node, *, keeps_objects: bool) -> tuple[str, str]:
    """A code and the sentence about what is written of a dangerous checkpoint: with its objects, it is dangerous too."""
    if keeps_objects and any(type(node) is Object for _, node in walk(written, plain=False)):
        return "dangerous", f"{danger} What is written keeps its objects: treat it as dangerous too."
    return "dangerous-input", f"{danger} What is written is data alone."


def of_checkpoint(checkpoint: Checkpoint) -> Safety:
    """The answer for an open checkpoint; not read again where its reader has seen every pickle and none names a class."""
    if checkpoint.packed is None and checkpoint.is_examined:
        return Safety("plain")
    whole = None if checkpoint.packed is None else checkpoint.packed.whole  # whatever else is in there is unpacked with it
    found = examine(checkpoint.source, checkpoint.examined) if whole is None else examine(whole)
    if found.verdict != "nothing":
        return found
    if all(map(_is_plain, checkpoint.globals)):
        return replace(found, verdict="plain")
    missed = "its reader found a pickle that could not be told from other bytes"
    return replace(found, verdict="unexamined", unexamined=[("", missed)])
