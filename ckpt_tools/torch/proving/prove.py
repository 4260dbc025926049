"""Run an old and a new model on the same inputs, and compare what comes out."""

from __future__ import annotations

import contextlib
import copy
import json
import os
import platform
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import redirect_stdout
from typing import Any, NamedTuple

import torch

import ckpt_tools
from ckpt_tools.errors import TargetError, UsageError
from ckpt_tools.fit.targets import read_target
from ckpt_tools.io.content import Literal, Piece
from ckpt_tools.io.output import replacing
from ckpt_tools.io.writer import write
from ckpt_tools.operations.check.digests import of_all
from ckpt_tools.operations.check.run import load_digests
from ckpt_tools.operations.proved import Proved, Run, Setting
from ckpt_tools.torch import load_into
from ckpt_tools.torch.proving import inputs
from ckpt_tools.torch.proving.faults import Search, count
from ckpt_tools.torch.proving.inputs import Given
from ckpt_tools.torch.proving.pairing import in_both, pair_modules
from ckpt_tools.torch.proving.reasons import Reasons, different_settings
from ckpt_tools.torch.proving.recording import ModuleCall, Recorder
from ckpt_tools.tree.arguments import natural
from ckpt_tools.tree.inputs import parse
from ckpt_tools.tree.output_names import check_document_name
from ckpt_tools.values.running import tensors_in

# How far two implementations of one computation are apart, by the largest output: sums in another order, with room.
_TOLERANCES = {torch.float64: 1e-9, torch.float32: 1e-4}


class _Done(NamedTuple):
    """One run of one model: what its modules did, and its outputs."""

    root: ModuleCall
    outputs: list[torch.Tensor]


@natural
def prove(
    old: str | os.PathLike[str], new: str | os.PathLike[str], *, model: Any, inputs: str | Sequence[str],
    model_args: Any = None, select: str | None = None, seed: int = 0, runs: int = 2, tolerance: float | None = None,
    certificate: str | os.PathLike[str] | None = None, overwrite: bool = False,
) -> Proved:  # fmt: skip
    """Whether two checkpoints in their models compute the same; and the first module where they part, with the usual reason.

    Both models are made, filled by `load_into`, set to `eval()` and float64, and run on the same seeded inputs. That runs the
    code of the models, which you name; nothing in the files is run.

    Args:
        old, new: the checkpoints.
        model: what makes the models: "package.module:callable", "models.py:Net", a callable, or an `nn.Module`, which is
            copied; one for both, or a pair.
        inputs: "1x3x224x224" for normal numbers, "1x16:30522" for integers below 30522, "input_ids=1x16:30522" by name; several
            in a list.
        model_args: keyword arguments of the callable, as a mapping or JSON text; one for both, or a pair.
        select: the dotted path of the state dict in `old`, where it holds several.
        seed, runs: of the inputs, and how many sets of them.
        tolerance: the largest difference, by the largest output, that counts as equal; else 1e-9 in float64, 1e-4 in float32.
        certificate: a JSON file to write: the report, with digests of both checkpoints.
        overwrite: replace the certificate if it exists.

    Raises:
        TargetError: a model cannot be made, or raises when it runs. MatchError: a checkpoint does not fit its model.
        UsageError: an input that cannot be read. CkptError: a file cannot be read or written.
    """
    specs = [inputs] if isinstance(inputs, str) else list(inputs)
    return Prover(specs, seed, runs, tolerance).prove(
        (os.fspath(old), os.fspath(new)), _two(model), _two(model_args), select, certificate, overwrite
    )


def _two(value: Any) -> tuple[Any, Any]:
    if isinstance(value, tuple | list):
        if len(value) not in (1, 2):
            raise UsageError(f"One model for both, or two; these are {len(value)}.")
        return value[0], value[-1]
    return value, value


class Prover:
    """What is the same for both models: the inputs, and what counts as equal."""

    def __init__(self, specs: Sequence[str], seed: int, runs: int, tolerance: float | None) -> None:
        if not specs:
            raise UsageError("No `input`.", fix="1x3x224x224, or 1x16:30522 for integers below 30522.")
        if runs < 1:
            raise UsageError(f"`runs={runs}` is not a number of sets of inputs.")
        if tolerance is not None and not tolerance >= 0:
            raise UsageError(f"`tolerance={tolerance}` is not a number from 0 up.")
        self.specs, self.seed, self.tolerance = list(specs), seed, tolerance
        self.sets = inputs.make([parse(spec) for spec in specs], seed, runs)

    def prove(
        self, paths: tuple[str, str], models: tuple[Any, Any], arguments: tuple[Any, Any], select: str | None,
        certificate: str | os.PathLike[str] | None, overwrite: bool,
    ) -> Proved:  # fmt: skip
        """The report; see `prove`."""
        if certificate is not None:
            check_document_name(certificate, "a certificate", ".json")
        pair = [_load(path, spec, keywords, chosen) for path, spec, keywords, chosen in
                zip(paths, models, arguments, (select, None), strict=True)]  # fmt: skip
        report = Proved(Run(paths[0], _label(models[0])), Run(paths[1], _label(models[1])))
        self._compare(pair[0], pair[1], report)
        if certificate is not None:
            report.old, report.new = (
                Run(run.path, run.model, of_all(load_digests(run.path)[1])) for run in (report.old, report.new)
            )
            text = json.dumps(report.to_json(), indent=1, allow_nan=False) + "\n"
            with replacing(certificate, overwrite=overwrite) as output:
                write([Piece(Literal(text.encode()))], output)
        return report

    def _compare(self, old: torch.nn.Module, new: torch.nn.Module, report: Proved) -> None:
        dtype, done = self._run_both(old, new)
        found = pair_modules(old, new)
        pairs = in_both(found, done[0][0].root, done[0][1].root)
        report.inputs, report.seed, report.runs = self.specs, self.seed, len(self.sets)
        report.input_digest, report.dtype = inputs.digest(self.sets), str(dtype).removeprefix("torch.")
        report.tolerance = _TOLERANCES[dtype] if self.tolerance is None else self.tolerance
        report.modules, report.calls = len(pairs), count(done[0][0].root, done[0][1].root, pairs)
        report.settings = list(_settings(old, new, found))
        python, own = platform.python_version(), ckpt_tools.__version__
        report.versions = {"python": python, "torch": torch.__version__, "ckpt_tools": own}
        gaps = [_gap(left.outputs, right.outputs) for left, right in done]
        if None not in gaps:
            report.largest, report.relative = (max(column) for column in zip(*filter(None, gaps), strict=True))
            report.equal = report.relative <= report.tolerance
        if not report.equal:
            worst = max(range(len(gaps)), key=lambda index: float("inf") if (gap := gaps[index]) is None else gap[1])
            search = Search(pairs, Reasons(old, new, pairs, report.tolerance), report.tolerance)
            report.fault = search.find(*(run.root for run in done[worst]))

    def _run_both(self, old: torch.nn.Module, new: torch.nn.Module) -> tuple[torch.dtype, list[tuple[_Done, _Done]]]:
        """In float64, where neither model insists on another dtype."""
        problem: Exception | None = None
        for dtype in _TOLERANCES:
            for model in (old, new):
                model.double() if dtype is torch.float64 else model.float()
            try:
                sets = [given.to(dtype) for given in self.sets]
                return dtype, [(_run(old, given, self.seed), _run(new, given, self.seed)) for given in sets]
            except Exception as error:  # whatever the user's model raises
                problem = error
        raise TargetError(
            f"A model raised {type(problem).__name__} when it ran.", why=f"{problem}",
            fix="Give the inputs that its forward takes: NAME=SHAPE by name, SHAPE:N for integers below N.",
        ) from problem  # fmt: skip


def _label(spec: Any) -> str:
    return spec if isinstance(spec, str) else getattr(spec, "__qualname__", type(spec).__qualname__)


def _load(path: str, spec: Any, arguments: Any, select: str | None) -> torch.nn.Module:
    """A model with the numbers of a checkpoint, ready to be run."""
    if isinstance(spec, torch.nn.Module):
        made: Any = copy.deepcopy(spec)
    elif callable(spec):
        made = _called(spec, arguments)
    else:
        target = read_target(spec, args=arguments)
        if target.build is None:
            raise UsageError(f"{spec} does not make a model.", fix="Give package.module:callable or ./models.py:Net.")
        made = target.build()
    if not isinstance(made, torch.nn.Module):
        raise TargetError(f"{_label(spec)} gives a {type(made).__name__}.", why="A torch.nn.Module is wanted.")
    load_into(made, path, select=select)
    return made.eval()


def _called(make: Callable[..., Any], arguments: Any) -> Any:
    if isinstance(arguments, str):
        raise UsageError("`model_args` of a callable are a mapping.")
    try:
        return make(**(arguments or {}))
    except Exception as error:  # whatever the user's function raises
        raise TargetError(f"{_label(make)} raised {type(error).__name__} when it was called.", why=f"{error}") from error


def _run(model: torch.nn.Module, given: Given, seed: int) -> _Done:
    torch.manual_seed(seed)
    recorder = Recorder(model)
    try:
        with torch.no_grad(), _without_shortcuts(), redirect_stdout(sys.stderr):
            made = model(*given.by_position, **given.by_name)
    finally:
        recorder.close()
    assert recorder.root is not None, "the model's own hooks ran"
    return _Done(recorder.root, [tensor.detach() for tensor in tensors_in(made)])


@contextlib.contextmanager
def _without_shortcuts() -> Iterator[None]:
    """torch's transformer layers pass their modules by when they are evaluated; here the modules are what is compared."""
    before = torch.backends.mha.get_fastpath_enabled()
    torch.backends.mha.set_fastpath_enabled(False)
    try:
        yield
    finally:
        torch.backends.mha.set_fastpath_enabled(before)


def _gap(old: Sequence[torch.Tensor], new: Sequence[torch.Tensor]) -> tuple[float, float] | None:
    """The largest difference, and that by the largest output; None where they cannot be compared."""
    if len(old) != len(new):
        old, new = old[:1], new[:1]
    pairs = list(zip(old, new, strict=False))
    if not pairs or any(left.shape != right.shape for left, right in pairs):
        return None
    gaps = [_one_gap(left.double(), right.double()) for left, right in pairs if left.numel()]
    if any(gap is None for gap in gaps):
        return None
    return max((gap[0] for gap in gaps if gap), default=0.0), max((gap[0] / gap[1] for gap in gaps if gap), default=0.0)


def _one_gap(left: torch.Tensor, right: torch.Tensor) -> tuple[float, float] | None:
    """The largest difference, and the largest output. Numbers that are NaN or infinite alike do not differ."""
    same = (left == right) | (left.isnan() & right.isnan())
    apart = torch.where(same, 0.0, (left - right).abs())
    if not apart.isfinite().all():
        return None
    return float(apart.max()), float(left.abs().nan_to_num(0, 0, 0).max()) or 1e-300


def _settings(old: torch.nn.Module, new: torch.nn.Module, pairs: Mapping[str, str]) -> Iterator[Setting]:
    """Settings of partners of one class that differ."""
    left, right = dict(old.named_modules()), dict(new.named_modules())
    for path, other in pairs.items():
        if path in left and other in right and type(left[path]).__name__ == type(right[other]).__name__:
            for name, values in different_settings(left[path], right[other]).items():
                yield Setting(path, name, *values)
