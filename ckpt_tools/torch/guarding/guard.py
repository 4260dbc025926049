"""Watch any loading code, and say of every tensor of the model where its numbers are from."""

from __future__ import annotations

import os
import sys
import threading
from collections.abc import Callable, Sequence
from functools import cache, wraps
from types import TracebackType
from typing import Any, ParamSpec, Self, TypeVar

import torch

from ckpt_tools.errors import UsageError
from ckpt_tools.formats.open import collector_paused
from ckpt_tools.torch.guarding.fates import Fates
from ckpt_tools.torch.guarding.files import Library
from ckpt_tools.torch.guarding.judging import Before, Judge, as_they_are
from ckpt_tools.tree.options import natural

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
                self.fates = Judge(self._model, self._before, library).fates()
                self.files, self.notes = library.paths, library.notes

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
