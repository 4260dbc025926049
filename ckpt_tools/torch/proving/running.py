"""One run of one model: what its modules did, and what it gave."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Iterator
from contextlib import redirect_stdout
from typing import Any, NamedTuple

import torch

from ckpt_tools.errors import CkptError
from ckpt_tools.torch.proving import outputs
from ckpt_tools.torch.proving.inputs import Given, seeded
from ckpt_tools.torch.proving.outputs import Named
from ckpt_tools.torch.proving.precision import Precision, computing_in
from ckpt_tools.torch.proving.recording import ModuleCall, Recorder


class Done(NamedTuple):
    """One run: what its modules did, and its outputs."""

    root: ModuleCall
    outputs: Named


class RaisedError(Exception):
    """A model raised when it ran: which one, and the module that it was in; the cause is what it raised."""

    def __init__(self, model: torch.nn.Module, inside: ModuleCall | None) -> None:
        super().__init__()
        self.model, self.inside = model, inside


def run(model: torch.nn.Module, given: Given, precision: Precision, seed: int) -> Done:
    """Run a model, and write down what its modules are given and give.

    Raises:
        RaisedError: the model raises.
    """
    recorder = Recorder(model)
    try:
        made = run_alone(model, given, precision, seed)
    except CkptError:
        raise
    except Exception as error:  # whatever the user's model raises
        raise RaisedError(model, recorder.inside) from error
    finally:
        recorder.close()
    assert recorder.root is not None, "the model's own hooks ran"
    return Done(recorder.root, made)


def run_alone(model: torch.nn.Module, given: Given, precision: Precision, seed: int) -> Named:
    """What a model gives. The inputs are its own: it may write into them."""
    own = given.to(precision.dtype)
    with torch.no_grad(), seeded(seed), computing_in(precision), _as_written(), redirect_stdout(sys.stderr):
        return outputs.named(model(*own.by_position, **own.by_name))


@contextlib.contextmanager
def _as_written() -> Iterator[None]:
    """Module by module: torch's transformer layers pass theirs by when they are evaluated, and compiled code has none."""
    before = torch.backends.mha.get_fastpath_enabled()
    torch.backends.mha.set_fastpath_enabled(False)
    try:
        with _not_compiled():
            yield
    finally:
        torch.backends.mha.set_fastpath_enabled(before)


def _not_compiled() -> contextlib.AbstractContextManager[Any]:
    """Asking torch's compiler for anything imports it, which takes seconds: it is asked where the model has imported it."""
    set_stance = getattr(torch.compiler, "set_stance", None) if "torch._dynamo" in sys.modules else None
    return contextlib.nullcontext() if set_stance is None else set_stance("force_eager")
