"""Watch any loading code, and say of every tensor of the model where its numbers are from."""

from __future__ import annotations

import os
import sys
import threading
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache, wraps
from types import TracebackType
from typing import Any, NamedTuple, ParamSpec, Self, TypeVar

import torch

from ckpt_tools.errors import UsageError
from ckpt_tools.formats.single import collector_paused
from ckpt_tools.text import listed
from ckpt_tools.torch.copying import is_freed
from ckpt_tools.torch.guarding import samples
from ckpt_tools.torch.guarding.fates import Fate, Fates
from ckpt_tools.torch.guarding.stored import Library, Stored
from ckpt_tools.torch.proving.relations import permuted
from ckpt_tools.tree.dtypes import DTYPES, DType
from ckpt_tools.tree.names import unwrap
from ckpt_tools.tree.options import natural

# --- the fate of every tensor of a model


_COUNTER = "num_batches_tracked"


class Before(NamedTuple):
    """A tensor as it was: where it lay, how often it had been written to, its dtype and the ends of its sample."""

    place: int
    version: int
    dtype: DType | None
    ends: bytes | None


def as_they_are(model: torch.nn.Module) -> dict[str, Before]:
    """What is to be remembered of a model's tensors, by name."""
    tensors = {held.name: held.tensor for held in _held(model)}
    plain = {name: tensor for name, tensor in tensors.items() if samples.is_plain(tensor)}
    ends = dict(zip(plain, samples.of_all_live(list(plain.values()), samples.ends_of), strict=True))
    return {
        name: Before(
            tensor.data_ptr() if name in ends else id(tensor), _version(tensor), samples.dtype_of(tensor.dtype), ends.get(name)
        )
        for name, tensor in tensors.items()
    }


class Held(NamedTuple):
    """What a module holds: a parameter or a buffer, under one of its names; and whether a state dict holds it."""

    name: str
    tensor: torch.Tensor
    kind: str
    saved: bool


def _held(model: torch.nn.Module) -> Iterator[Held]:
    for path, module in model.named_modules(remove_duplicate=False):
        prefix = f"{path}." if path else ""
        for own, parameter in module._parameters.items():
            if parameter is not None:
                yield Held(prefix + own, parameter, "parameter", True)
        unsaved = module._non_persistent_buffers_set
        for own, buffer in module._buffers.items():
            if buffer is not None:
                yield Held(prefix + own, buffer, "buffer", own not in unsaved)


def _version(tensor: torch.Tensor) -> int:
    return -1 if tensor.is_inference() else tensor._version


class Judge:
    """Says what became of each tensor of a model. Names are looked for first: numbers that are found so are taken."""

    def __init__(self, model: torch.nn.Module, before: Mapping[str, Before], library: Library) -> None:
        self.before, self.library, self.tracer = before, library, Tracer(library)
        self.held = list(_held(model))
        plain = [held for held in self.held if samples.is_plain(held.tensor)]
        places = {held.name: held.tensor.data_ptr() for held in plain}
        self.groups = _tied(self.held, places)
        taken = dict(zip(places, samples.of_all_live([held.tensor for held in plain]), strict=True))
        self.lives = {
            first.name: Live([held.name for held in group], first.tensor, taken[first.name])
            for group in self.groups
            if (first := group[0]).name in taken
        }
        self.origins = {first: self.tracer.by_name(live) for first, live in self.lives.items()}

    def fates(self) -> list[Fate]:
        """A fate for every name, in the model's order."""
        judged: dict[str, Fate] = {}
        for first, *others in self.groups:
            fate = judged[first.name] = self._fate(first)
            for held in others:
                right = fate.is_right and fate.fate != "unsaved"
                judged[held.name] = (
                    Fate(held.name, fate.kind, "tied", how=f"to {first.name}") if right else replace(fate, name=held.name)
                )
        fates = [judged[held.name] for held in self.held]
        crossed = swapped(fates)
        return [replace(fate, fate="swapped", how=f"from {fate.source}") if fate.name in crossed else fate for fate in fates]

    def _is_written(self, name: str, tensor: torch.Tensor) -> bool:
        """Whether anything was written to it, told by autograd's counter and by its place in memory."""
        place = tensor.data_ptr() if name in self.lives else id(tensor)
        old = self.before.get(name)
        return old is None or (old.place, old.version) != (place, _version(tensor))

    def _fate(self, held: Held) -> Fate:
        name, tensor, kind, saved = held
        live = self.lives.get(name)
        if live is None:
            return self._unsampled(held)
        origin = self.origins[name] or self.tracer.by_numbers(live, written=self._is_changed(live))
        if origin is not None:
            return Fate(name, kind, "loaded", origin.path, origin.name, origin.how)
        if not saved or not tensor.numel() or self._is_young(name):
            return Fate(name, kind, "unsaved")
        if self._is_changed(live) and (origin := self.tracer.reordered(live)) is not None:
            return Fate(name, kind, "loaded", origin.path, origin.name, origin.how)
        partly = self.tracer.partly(live)
        if partly is not None:
            return Fate(name, kind, "partly", partly.path, partly.name, partly.how)
        return Fate(name, kind, "untouched" if self._is_initial(live) else "changed")

    def _is_changed(self, live: Live) -> bool:
        """Whether anything was written to it, told by what it holds too: `.data` is written to without a trace."""
        return self._is_written(live.names[0], live.tensor) or not self._is_initial(live)

    def _is_initial(self, live: Live) -> bool:
        """Whether it has the numbers that it was made with, moved or cast or not."""
        old = self.before.get(live.names[0])
        if old is None or old.ends is None or old.dtype is None:
            return False
        return samples.cast(old.ends, old.dtype, live.dtype) == samples.ends(live.sample, live.tensor.numel(), live.dtype)

    def _is_young(self, name: str) -> bool:
        """Whether it counts batches of a norm that is in the files without it: before torch 0.4.1 there was no such buffer."""
        named = self.library.named
        return name.endswith(_COUNTER) and not named(name) and bool(named(name.removesuffix(_COUNTER) + "running_mean"))

    def _unsampled(self, held: Held) -> Fate:
        """The fate of a tensor whose elements cannot be looked at."""
        name, tensor, kind, _ = held
        if samples.is_lazy(tensor):
            return Fate(name, kind, "untouched", how="lazy, without a shape")
        if tensor.is_meta:
            return Fate(name, kind, "untouched", how="on the meta device")
        written = self._is_written(name, tensor)
        how = "its memory has been freed" if is_freed(tensor) else f"a {type(tensor).__name__}"
        return Fate(name, kind, "unexamined" if written else "untouched", how=how)


def swapped(fates: Sequence[Fate]) -> set[str]:
    """Names that were loaded from one another's:"""
    moved = [fate for fate in fates if fate.fate == "loaded" and not f".{fate.source}".endswith(f".{fate.name}")]
    if not moved:
        return set()
    names = {unwrap(fate.name): fate.name for fate in fates}
    steps: dict[tuple[str, str], dict[str, str]] = defaultdict(dict)  # by file and by prefix in it: name -> name in the file
    for fate in moved:
        pieces = unwrap(fate.source).split(".")
        for start in range(len(pieces)):
            if (other := names.get(".".join(pieces[start:]))) is not None:
                steps[fate.path, ".".join(pieces[:start])][fate.name] = other
    found: set[str] = set()
    for taken in steps.values():
        seen: set[str] = set()
        for name in taken:
            path: list[str] = []
            while name in taken and name not in seen:
                seen.add(name)
                path.append(name)
                name = taken[name]
            ring = path[path.index(name) :] if name in path else []
            found.update(ring if len(ring) > 1 else [])
    return found


def _tied(all_held: Sequence[Held], places: Mapping[str, int]) -> list[list[Held]]:
    """Those that are the same elements in memory, together."""
    alone = {place for place, count in Counter(places.values()).items() if count == 1}
    groups: dict[object, list[Held]] = {}
    for held in all_held:
        place, tensor = places.get(held.name), held.tensor
        shared = place and place not in alone and tensor.numel()
        key = (place, tensor.shape, tensor.stride(), tensor.device) if shared else id(tensor)
        groups.setdefault(key, []).append(held)
    return list(groups.values())


_MOST_OFFSETS, _MOST_PARTS, _SHOWN = 64, 1024, 4
_MOST_COMPARED = 1 << 26  # elements of a tensor of which all rows are compared
_HALVES = ("bfloat16", "float16")


@dataclass(slots=True, unsafe_hash=True)
class Origin:
    """Where a tensor's numbers are from: the file, the name in there, and what was done to them on the way."""

    path: str
    name: str
    how: str = ""


class Live(NamedTuple):
    """A live tensor, under all its names."""

    names: Sequence[str]
    tensor: torch.Tensor
    sample: bytes

    @property
    def dtype(self) -> DType:
        """Its dtype."""
        found = samples.dtype_of(self.tensor.dtype)
        assert found is not None, "it is plain"
        return found


class Tracer:
    """Finds the origins of one model's tensors in the files' tensors."""

    def __init__(self, library: Library) -> None:
        self.library = library
        self._claimed: set[int] = set()

    def by_name(self, live: Live) -> Origin | None:
        """The tensor in a file under one of the live tensor's names, if its numbers are the same."""
        for name in live.names:
            for stored in self.library.named(name):
                how = _how(stored, live)
                if how is not None:
                    self._claimed.add(id(stored))
                    return Origin(stored.path, stored.where, how)
        return None

    def by_numbers(self, live: Live, *, written: bool) -> Origin | None:
        """A tensor under any other name with the same numbers; rows of one, or several one below the other."""
        found = self.library.same(live.sample, live.dtype, live.tensor.numel())
        if not samples.is_telling(live.sample, live.dtype):
            found = [stored for stored in found if written and id(stored) not in self._claimed]
        if found:
            self._claimed.add(id(found[0]))
            return Origin(found[0].path, found[0].where, _how(found[0], live) or "")
        if not written or not live.tensor.dim() or not samples.is_telling(live.sample, live.dtype):
            return None
        return self._in_rows(live) or self._of_rows(live)

    def reordered(self, live: Live) -> Origin | None:
        """The tensor of one of its names with the same rows in another order, as other rotary embeddings want them."""
        shape = tuple(live.tensor.shape)
        if len(shape) < 2 or live.tensor.numel() > _MOST_COMPARED or not samples.is_telling(live.sample, live.dtype):
            return None
        for stored in (stored for name in live.names for stored in self.library.named(name)):
            if stored.entry.shape == shape and stored.entry.dtype.family == live.dtype.family == "float":
                data = samples.cast(stored.at(((0, live.tensor.numel()),)), stored.entry.dtype, live.dtype)
                there = torch.frombuffer(bytearray(data or b""), dtype=live.tensor.dtype)
                if len(there) and permuted(there.reshape(shape).double(), live.tensor.detach().cpu().double(), 0, 0):
                    return Origin(stored.path, stored.where, "reordered rows")
        return None

    def partly(self, live: Live) -> Origin | None:
        """The tensor of one of its names that has some of the same numbers at the same places of its rows."""
        for stored in (stored for name in live.names for stored in self.library.named(name)):
            if stored.entry.shape[1:] == tuple(live.tensor.shape[1:]) and live.tensor.dim():
                runs = samples.runs_of(live.tensor.numel())
                inside = [run for run in runs if sum(run) <= stored.entry.numel]
                equal = sum(self._equal(stored, live, run) for run in inside)
                if equal:
                    return Origin(stored.path, stored.where, f"{equal} of {len(runs)} samples are the file's")
        return None

    @staticmethod
    def _equal(stored: Stored, live: Live, run: tuple[int, int]) -> bool:
        data = samples.cast(stored.at((run,)), stored.entry.dtype, live.dtype)
        return data == samples.of_live(live.tensor, (run,)) and samples.is_telling(data, live.dtype)

    def _in_rows(self, live: Live) -> Origin | None:
        """Rows of a larger tensor: a fused one that was split."""
        rows, size = len(live.tensor), live.tensor[0].numel() if len(live.tensor) else 0
        runs = samples.runs_of(live.tensor.numel())
        for stored in self.library.by_row.get(tuple(live.tensor.shape[1:]), ()):
            over = stored.entry.shape[0] - rows
            if over <= 0 or stored.entry.dtype.family != live.dtype.family:
                continue
            for at in [*range(0, over, rows)[:_MOST_OFFSETS], over]:
                data = stored.at(samples.shifted(runs, at * size))
                if samples.cast(data, stored.entry.dtype, live.dtype) == live.sample:
                    return Origin(stored.path, stored.where, f"rows {at} to {at + rows - 1}")
        return None

    def _of_rows(self, live: Live) -> Origin | None:
        """Several tensors one behind the other: parts that were fused, experts that were stacked."""
        shape = tuple(live.tensor.shape)
        for depth in range(1, len(shape) + 1):
            if parts := self._parts(live, shape[depth:]):
                return Origin(
                    parts[0].path, parts[0].where, f"joined with {listed([part.where for part in parts[1:]], _SHOWN)}"
                )
        return None

    def _parts(self, live: Live, row: tuple[int, ...]) -> list[Stored]:
        """Tensors with rows of this shape that are the live one, one behind the other; none where some of it is not theirs."""
        starts, total = self.library.starts(row, live.dtype), live.tensor.numel()
        parts: list[Stored] = []
        at = 0
        while at < total and len(parts) < _MOST_PARTS:
            begin = samples.of_live(live.tensor, ((at, min(samples.START, total - at)),))
            fitting = (stored for stored in starts.get(begin, ()) if stored.entry.numel <= total - at)
            part = next((stored for stored in fitting if _lies_at(stored, live, at)), None)
            if part is None:
                return []
            parts.append(part)
            at += part.entry.numel
        return parts if at == total else []


def _lies_at(stored: Stored, live: Live, first: int) -> bool:
    data = samples.cast(stored.sample, stored.entry.dtype, live.dtype)
    if not data:
        return False
    return data == samples.of_live(live.tensor, samples.shifted(samples.runs_of(stored.entry.numel), first))


def _how(stored: Stored, live: Live) -> str | None:
    """What was done to a file's tensor to make the live one; the empty text where they are equal, None where they are not."""
    entry, shape = stored.entry, tuple(live.tensor.shape)
    if entry.shape == shape and entry.dtype is live.dtype and stored.sample == live.sample:
        return ""  # as most
    if entry.numel != live.tensor.numel():
        return None
    moves = [f"{len(entry.shape)} -> {len(shape)} dimensions"] if entry.shape != shape else []
    if entry.dtype is not live.dtype:
        moves.append(f"{entry.dtype.name} -> {live.dtype.name}")
    if samples.cast(stored.sample, entry.dtype, live.dtype) == live.sample:
        return ", ".join(moves)
    for half in _HALVES if entry.dtype.family == live.dtype.family == "float" else ():
        rounded = samples.cast(stored.sample, entry.dtype, DTYPES[half])
        if rounded is not None and samples.cast(rounded, DTYPES[half], live.dtype) == live.sample:
            return f"{entry.dtype.name} -> {half} -> {live.dtype.name}"
    if len(shape) == 2 and entry.shape == shape[::-1] and _transposed(stored, live) == live.sample:
        return "transposed"
    return None


def _transposed(stored: Stored, live: Live) -> bytes | None:
    """The live tensor's sample, taken from the transposed tensor in the file."""
    rows, columns = live.tensor.shape
    places = [place for start, length in samples.runs_of(live.tensor.numel()) for place in range(start, start + length)]
    runs = tuple(((place % columns) * rows + place // columns, 1) for place in places)
    return samples.cast(stored.at(runs), stored.entry.dtype, live.dtype)


P = ParamSpec("P")
R = TypeVar("R")
Model = TypeVar("Model", bound=torch.nn.Module)


class Guard(Fates):
    """What `guard` gives. After its block it is true when every tensor of the model is from a file; it prints as a table.

    Attributes:
        fates: one for every name of a parameter and of a buffer, in the model's order.
        files: the checkpoints that were opened. notes: those that could not be read, and why.
    """

    def __init__(self, model: torch.nn.Module | None, files: Sequence[str | os.PathLike[str]]) -> None:
        super().__init__()
        self._model, self._named = model, [os.fspath(path) for path in files]
        self._before: dict[str, Before] = {}
        self._heard = Opened()

    def __enter__(self) -> Self:
        with collector_paused():
            self._before = {} if self._model is None else as_they_are(self._model)
        self._heard.__enter__()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self._heard.__exit__(kind, error, trace)
        if error is None and self._model is not None:
            with collector_paused(), Library() as library:
                library.add(self._heard.paths, self._named)
                self._fill(Judge(self._model, self._before, library).fates(), library)

    def watch(self, model: Model) -> Model:
        """Watch a model that the block itself made, by the files alone: what it held before is not known. Returns the model."""
        self._model = model
        return model


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


_ACTIVE: list[Opened] = []
_WRAPPED = ((torch.UntypedStorage, "from_file"), (torch.jit, "load"), (torch.export, "load"))
_LOCK = threading.Lock()
_PYTHON = (".py", ".pyc", ".so", ".pyd", ".dll")


class Opened:
    """The paths that were opened for reading inside the block, by any thread, in order."""

    def __init__(self) -> None:
        self.paths: dict[str, None] = {}

    def __enter__(self) -> Self:
        with _LOCK:
            _install()
            if not _ACTIVE:
                _wrap()
            _ACTIVE.append(self)
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        with _LOCK:
            _ACTIVE.remove(self)
            if not _ACTIVE:
                _unwrap()


@cache
def _install() -> None:
    sys.addaudithook(_hear)


def _hear(event: str, arguments: tuple[Any, ...]) -> None:
    if _ACTIVE and event == "open" and isinstance(arguments[0], str | bytes):
        path, mode, flags = arguments
        if not (set(mode) & set("wxa") if isinstance(mode, str) else (flags or 0) & (os.O_WRONLY | os.O_CREAT)):
            _note(path)


def _note(path: Any) -> None:
    text = os.path.abspath(os.fsdecode(path))
    if not text.endswith(_PYTHON) and os.path.lexists(text):  # Python tells before it tries
        for opened in _ACTIVE:
            opened.paths[text] = None


_originals: list[Any] = []


def _wrap() -> None:
    for owner, name in _WRAPPED:
        _originals.append(vars(owner).get(name))
        setattr(owner, name, _telling(getattr(owner, name)))


def _unwrap() -> None:
    for (owner, name), original in zip(_WRAPPED, _originals, strict=True):
        if original is None:  # it was inherited
            delattr(owner, name)
        else:
            setattr(owner, name, original)
    _originals.clear()


def _telling(call: Callable[..., Any]) -> Callable[..., Any]:
    @wraps(call)
    def told(path: Any, *arguments: Any, **named: Any) -> Any:
        if isinstance(path, str | bytes | os.PathLike):
            _note(path)
        return call(path, *arguments, **named)

    return told
