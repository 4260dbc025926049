"""Watch any loading code, and say of every tensor of the model where its numbers are from."""

from __future__ import annotations

import os
import sys
import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache, wraps
from typing import Any, Literal, NamedTuple, ParamSpec, Self, TypeAlias, TypeVar

import torch

from ckpt_tools.errors import MatchError, UsageError
from ckpt_tools.formats.single import collector_paused
from ckpt_tools.text import Report, did_you_mean, listed, printable
from ckpt_tools.torch.copying import is_freed
from ckpt_tools.torch.origins import Library, Live, Tracer, as_bytes, cast, ends, sample
from ckpt_tools.tree.dtypes import DTYPES
from ckpt_tools.tree.globs import Globs
from ckpt_tools.tree.names import unwrap
from ckpt_tools.tree.options import natural

Word: TypeAlias = Literal["loaded", "tied", "untouched", "changed", "swapped", "unsaved", "unexamined"]
_ORDER: tuple[Word, ...] = ("loaded", "tied", "unsaved", "unexamined", "swapped", "changed", "untouched")
_WRONG = {
    "untouched": "still as made", "changed": "changed, and not as any file that was opened has them",
    "swapped": "from one another's names in the file",
}  # fmt: skip
_SHOWN = 6


@dataclass(slots=True, unsafe_hash=True)
class Fate:
    """What became of one tensor.

    Attributes:
        name: its name in the model. kind: "parameter" or "buffer".
        fate: "loaded" (its numbers are a file's), "tied" (it is another tensor of the model, which is loaded), "untouched" (as
            it was made), "changed" (its numbers are not those of any file that was opened: by other means, or in part only),
            "swapped" (it has another name's numbers, which has its own), "unsaved" (a buffer that no state dict holds, or one
            without elements; a counter that files from before torch 0.4.1 lack), "unexamined" (written to, and its elements
            cannot be looked at).
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

    def __str__(self) -> str:
        return f"{self.name} ({self.how})" if self.how else self.name


class Before(NamedTuple):
    """A tensor as it was: where it lay and how often it had been written to, and its sample."""

    written: tuple[int, int]
    sample: torch.Tensor | None


class Held(NamedTuple):
    """A parameter or a buffer of a module, under one of its names: whether a state dict holds it and it can be looked at."""

    name: str
    tensor: torch.Tensor
    kind: str
    saved: bool
    plain: bool

    @property
    def written(self) -> tuple[int, int]:
        """Its place in memory, and autograd's counter: one of them is another once something is written to it."""
        place = self.tensor.data_ptr() if self.plain else id(self.tensor)
        return place, -1 if self.tensor.is_inference() else self.tensor._version


def _held(model: torch.nn.Module) -> list[Held]:
    return [
        Held(f"{path}.{own}" if path else own, tensor, kind, own not in module._non_persistent_buffers_set, _is_plain(tensor))
        for path, module in model.named_modules(remove_duplicate=False)
        for kind, tensors in (("parameter", module._parameters), ("buffer", module._buffers))
        for own, tensor in tensors.items()
        if tensor is not None
    ]


def _is_plain(tensor: torch.Tensor) -> bool:
    """Whether a tensor has elements that can be looked at here: not meta, not lazy, not cut among ranks, not freed."""
    known = tensor.layout is torch.strided and not tensor.is_quantized and str(tensor.dtype).removeprefix("torch.") in DTYPES
    if tensor.is_meta or not known or _is_lazy(tensor):
        return False
    return type(tensor.data) is torch.Tensor and not is_freed(tensor)


def _is_lazy(tensor: torch.Tensor) -> bool:
    return isinstance(tensor, torch.nn.UninitializedParameter | torch.nn.UninitializedBuffer)


class Judge:
    """Says what became of each tensor of a model. Names are looked for first: numbers that are found so are taken."""

    def __init__(self, model: torch.nn.Module, before: Mapping[str, Before], library: Library) -> None:
        self.before, self.library, self.tracer = before, library, Tracer(library)
        self.held = _held(model)
        self.groups: dict[object, list[Held]] = {}  # those that are the same elements in memory, together
        for held in self.held:
            tensor = held.tensor
            place = (tensor.data_ptr(), tensor.shape, tensor.stride()) if held.plain and tensor.numel() else id(tensor)
            self.groups.setdefault(place, []).append(held)
        self.lives = {
            group[0].name: Live([held.name for held in group], group[0].tensor, as_bytes(sample(group[0].tensor)))
            for group in self.groups.values()
            if group[0].plain
        }
        self.origins = {first: self.tracer.by_name(live) for first, live in self.lives.items()}

    def fates(self) -> list[Fate]:
        """A fate for every name, in the model's order."""
        judged: dict[str, Fate] = {}
        for first, *others in self.groups.values():
            fate = self._fate(first)
            right = fate.is_right and fate.fate != "unsaved"
            tied = Fate(first.name, first.kind, "tied", how=f"to {first.name}") if right else fate
            judged |= {first.name: fate} | {held.name: replace(tied, name=held.name) for held in others}
        found = [judged[held.name] for held in self.held]
        crossed = _swapped(found)
        return [replace(fate, fate="swapped", how=f"from {fate.source}") if fate.name in crossed else fate for fate in found]

    def _fate(self, held: Held) -> Fate:
        name, tensor, kind = held.name, held.tensor, held.kind
        old = self.before.get(name)
        written = old is None or old.written != held.written
        live = self.lives.get(name)
        if live is None:
            return self._unsampled(held, written=written)
        origin, initial = self.origins[name], False
        if origin is None:
            initial = old is not None and old.sample is not None and cast(old.sample, tensor.dtype) == live.sample
            changed = written or not initial  # `.data` is written to without a trace
            origin = self.tracer.by_numbers(live, written=changed)
        if origin is not None:
            return Fate(name, kind, "loaded", origin.path, origin.name, origin.how)
        named, counter = self.library.named, "num_batches_tracked"  # before torch 0.4.1 there was no such buffer
        young = name.endswith(counter) and not named(name) and named(name.removesuffix(counter) + "running_mean")
        if young or not held.saved or not tensor.numel():
            return Fate(name, kind, "unsaved")
        return Fate(name, kind, "untouched" if initial else "changed")

    @staticmethod
    def _unsampled(held: Held, *, written: bool) -> Fate:
        if _is_lazy(held.tensor) or held.tensor.is_meta:
            how = "lazy, without a shape" if _is_lazy(held.tensor) else "on the meta device"
            return Fate(held.name, held.kind, "untouched", how=how)
        how = "its memory has been freed" if is_freed(held.tensor) else f"a {type(held.tensor).__name__}"
        return Fate(held.name, held.kind, "unexamined" if written else "untouched", how=how)


def _swapped(fates: Sequence[Fate]) -> set[str]:
    """Names that were loaded from one another's, in a ring."""
    names = {unwrap(fate.name): fate.name for fate in fates}
    taken: dict[str, str] = {}  # a name, and the one that has its numbers in the file
    for fate in fates:
        if fate.fate == "loaded" and not f".{fate.source}".endswith(f".{fate.name}"):
            other = next((names[end] for end in ends(unwrap(fate.source)) if end in names), None)
            if other is not None:
                taken[fate.name] = other
    rings: set[str] = set()
    for name in taken:
        ring = [name]
        while (following := taken.get(ring[-1])) is not None and following not in ring:
            ring.append(following)
        if following == name and len(ring) > 1:
            rings.update(ring)
    return rings


P = ParamSpec("P")
R = TypeVar("R")
Model = TypeVar("Model", bound=torch.nn.Module)


@dataclass(init=False, repr=False, eq=False)
class Guard(Report):
    """What `guard` gives. After its block it is true when every tensor of the model is from a file; it prints as a table.

    Attributes:
        fates: one for every name of a parameter and of a buffer, in the model's order.
        files: the checkpoints that were opened. notes: those that could not be read, and why.
    """

    fates: list[Fate]
    files: list[str]
    notes: list[str]

    def __init__(self, model: torch.nn.Module | None, files: Sequence[str | os.PathLike[str]]) -> None:
        self.fates, self.files, self.notes = [], [], []
        self._model, self._named = model, [os.fspath(path) for path in files]
        self._before: dict[str, Before] = {}
        self._opened: dict[str, None] = {}

    def __enter__(self) -> Self:
        with collector_paused():
            for held in () if self._model is None else _held(self._model):
                self._before[held.name] = Before(held.written, sample(held.tensor) if held.plain else None)
        _listen(self._opened)
        return self

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        _listen_no_more(self._opened)
        if error is None and self._model is not None:
            with collector_paused(), Library() as library:
                library.add(self._opened, self._named)
                self.fates = Judge(self._model, self._before, library).fates()
                self.files, self.notes = library.paths, library.notes

    def __bool__(self) -> bool:
        return bool(self.fates) and all(fate.is_right for fate in self.fates)

    def watch(self, model: Model) -> Model:
        """Watch a model that the block itself made, by the files alone: what it held before is not known. Returns the model."""
        self._model = model
        return model

    def wrong(self, *, allow: Sequence[str] = ()) -> list[Fate]:
        """Tensors that are untouched, swapped or changed otherwise, but for what a glob of `allow` matches: each must match."""
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
        if wrong := self.wrong(allow=allow):
            groups = {word: [fate for fate in wrong if fate.fate == word] for word in _WRONG}
            told = [f"{len(fates)} {_WRONG[word]}: {listed(fates, 40)}" for word, fates in groups.items() if fates]
            files = listed(list(map(_from_here, self.files)), 8)
            told.append(f"opened: {files}" if files else "no checkpoint was opened meanwhile")
            raise MatchError(
                f"{len(wrong)} of {len(self.fates)} tensors of the model are not what a file has for them.",
                why=printable("; ".join([*told, *self.notes])) + ".",
                fix="What is meant: check(allow=['head.*']). A file that was read before: guard(model, files=[...]).",
            )

    def __str__(self) -> str:
        groups: dict[str, list[Fate]] = {}  # those of one way together, what is wrong last
        for fate in sorted(self.fates, key=lambda fate: _ORDER.index(fate.fate)):
            groups.setdefault(_title(fate), []).append(fate)
        rows = [("fate", "tensors", "from")]
        for title, fates in groups.items():
            files = list(dict.fromkeys(_from_here(fate.path) for fate in fates if fate.fate == "loaded"))
            rows.append((title, str(len(fates)), listed(files) if files else listed(fates, _SHOWN)))
        widths = [max(len(row[column]) for row in rows) for column in (0, 1)]
        lines = [f"{title:{widths[0]}}  {count:>{widths[1]}}  {what}".rstrip() for title, count, what in rows]
        return "\n".join(map(printable, [*lines, *(f"note: {note}" for note in self.notes)]))


def _from_here(path: str) -> str:
    """A path below the working folder as it is called from there."""
    return path.removeprefix(os.path.join(os.getcwd(), ""))


def _title(fate: Fate) -> str:
    if fate.fate != "loaded":
        return fate.fate
    name, source = unwrap(fate.name), unwrap(fate.source)
    renamed = "" if source.endswith(name) or name.endswith(source) else "renamed"
    how = fate.how if "->" in fate.how else fate.how.partition(" ")[0]  # which rows, and of what, would be a line for each
    return ", ".join(part for part in (fate.fate, renamed, how) if part)


@natural
def guard(
    model: torch.nn.Module | None = None, *, files: str | os.PathLike[str] | Sequence[str | os.PathLike[str]] = ()
) -> Guard:
    """Watch somebody else's loading code: what did it load, from where, and which tensors are still as they were made?

    A few elements of every tensor are compared with the files that are opened inside the block, which are read without running
    anything in them. There is no copy of the model.

    Args:
        model: the model that the code loads into; None where the code makes it: give it to `watch` inside the block.
        files: checkpoints that were read before the block, or are not opened by Python or torch; they count as opened.

    Raises:
        UsageError: the model is not a `torch.nn.Module`.
    """
    if model is not None and not isinstance(model, torch.nn.Module):
        raise UsageError(f"guard takes a torch.nn.Module, not a {type(model).__name__}.")
    return Guard(model, [files] if isinstance(files, str | os.PathLike) else files)


@natural
def guarded(*, allow: Sequence[str] = ()) -> Callable[[Callable[P, R]], Callable[P, R]]:
    """Decorate a loading function: after each call the model is checked, and what is not from a file raises.

    The model is the first argument that is a module; where there is none, what the function returns.

    Args:
        allow: globs on names that need not be from a file.

    Raises:
        MatchError: (from the decorated function) tensors are not from a file.
    """

    def decorate(load: Callable[P, R]) -> Callable[P, R]:
        @wraps(load)
        def watched(*arguments: P.args, **named: P.kwargs) -> R:
            given = [*arguments, *named.values()]
            with guard(next((value for value in given if isinstance(value, torch.nn.Module)), None)) as seen:
                made = load(*arguments, **named)
                if seen._model is None and isinstance(made, torch.nn.Module):
                    seen.watch(made)
            seen.check(allow=allow)
            return made

        return watched

    return decorate


# --- which files are opened meanwhile, by any thread


_LISTENING: list[dict[str, None]] = []  # the paths that each guard has heard of, in order
_LOCK = threading.Lock()
_PYTHON = (".py", ".pyc", ".so", ".pyd", ".dll")


def _listen(paths: dict[str, None]) -> None:
    with _LOCK:
        _hook()
        if not _LISTENING:
            heard = _telling(torch.UntypedStorage.from_file)  # it opens without Python
            torch.UntypedStorage.from_file = heard  # type: ignore[method-assign]
        _LISTENING.append(paths)


def _listen_no_more(paths: dict[str, None]) -> None:
    with _LOCK:
        _LISTENING[:] = [one for one in _LISTENING if one is not paths]
        if not _LISTENING:
            del torch.UntypedStorage.from_file  # the inherited one is there again


@cache
def _hook() -> None:
    sys.addaudithook(_hear)


def _hear(event: str, arguments: tuple[Any, ...]) -> None:
    if _LISTENING and event == "open" and isinstance(arguments[0], str | bytes):
        path, mode, flags = arguments
        if not (set(mode) & set("wxa") if isinstance(mode, str) else (flags or 0) & (os.O_WRONLY | os.O_CREAT)):
            _note(path)


def _note(path: Any) -> None:
    text = os.path.abspath(os.fsdecode(path))
    if not text.endswith(_PYTHON) and os.path.lexists(text):  # Python tells before it tries
        for paths in _LISTENING:
            paths[text] = None


def _telling(call: Callable[..., Any]) -> Callable[..., Any]:
    @wraps(call)
    def told(path: Any, *arguments: Any, **named: Any) -> Any:
        if isinstance(path, str | bytes | os.PathLike):
            _note(path)
        return call(path, *arguments, **named)

    return told
