"""Run an old and a new model on the same inputs, and compare what comes out."""

from __future__ import annotations

import contextlib
import copy
import json
import math
import os
import platform
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import torch

import ckpt_tools
from ckpt_tools.errors import ConvertError, MatchError, UsageError
from ckpt_tools.fit.targets import read_target
from ckpt_tools.io.writer import write_document
from ckpt_tools.operations.check.digests import of_all
from ckpt_tools.operations.check.run import load_digests
from ckpt_tools.operations.proved import Proved, Run, Setting
from ckpt_tools.torch import load_into
from ckpt_tools.torch.proving.fault import Search, in_both, pair_modules, pair_tensors
from ckpt_tools.torch.proving.reasons import different_settings
from ckpt_tools.torch.proving.running import Given, digest, make, seeded
from ckpt_tools.torch.proving.trial import Trial
from ckpt_tools.torch.proving.unproved import tensors_of, unproved
from ckpt_tools.tree.arguments import Arguments
from ckpt_tools.tree.graphs import parse
from ckpt_tools.tree.options import natural
from ckpt_tools.tree.output_names import check_document

_MOST_RUNS = 1000  # sets of inputs, which are all held in memory


@natural
def prove(
    old: str | os.PathLike[str], new: str | os.PathLike[str], *, model: Any, inputs: str | Sequence[str],
    model_args: Arguments | Sequence[Arguments | None] | None = None,
    select: str | None = None, seed: int = 0, runs: int = 2, tolerance: float | None = None,
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
        select: the dotted path of the state dict in `old`, if it has several; `OLD=NEW` for both.
        seed, runs: of the inputs, and how many sets of them, from 1 to 1000.
        tolerance: the largest difference, by the largest output, that counts as equal; else 1e-9 in float64, and
            1e-6 in float32.
        certificate: a JSON file to write: the report, with digests of both checkpoints.
        overwrite: replace the certificate if it exists.

    Raises:
        ConvertError: a model cannot be made, or raises when it runs; its outputs prove nothing. MatchError: a checkpoint does
            not fit its model.
        UsageError: an input that cannot be read. CkptError: a file cannot be read or written.
    """
    specs = [inputs] if isinstance(inputs, str) else list(inputs)
    if not specs:
        raise UsageError("No `input`.", fix="1x3x224x224, or 1x16:30522 for integers below 30522.")
    if not 1 <= runs <= _MOST_RUNS:
        raise UsageError(f"`runs={runs}` is not a number of sets of inputs from 1 to {_MOST_RUNS}.")
    if tolerance is not None and not tolerance >= 0:
        raise UsageError(f"`tolerance={tolerance}` is not a number from 0 up.")
    if not -(1 << 63) <= seed < 1 << 63:
        raise UsageError(f"`seed={seed}` is beyond the 64 bits that torch takes.")
    if certificate is not None:
        check_document(certificate, "a certificate", ".json", (old, new))
    sets = make([parse(spec) for spec in specs], seed, runs)
    sides = zip((os.fspath(old), os.fspath(new)), _two(model), _two(model_args), _places(select), strict=True)
    wanted = [Wanted(*row) for row in sides]
    report = Proved(Run(wanted[0].path, wanted[0].label), Run(wanted[1].path, wanted[1].label))
    report.inputs, report.seed, report.runs, report.input_digest = specs, seed, runs, digest(sets)
    report.versions = {"python": platform.python_version(), "torch": torch.__version__, "ckpt_tools": ckpt_tools.__version__}
    _compare(_trial(wanted, sets, seed, tolerance), report)
    if certificate is not None:
        report.old, report.new = (
            Run(run.path, run.model, of_all(load_digests(run.path)[1])) for run in (report.old, report.new)
        )
        text = json.dumps(report.to_json(), indent=1, allow_nan=False) + "\n"
        write_document(certificate, text, overwrite=overwrite)
    return report


def _places(select: str | None) -> tuple[str | None, str | None]:
    old, _, new = (select or "").partition("=")
    return old or None, new or None


def _two(value: Any) -> tuple[Any, Any]:
    if isinstance(value, tuple | list):
        if len(value) not in (1, 2):
            raise UsageError(f"One model for both, or two; these are {len(value)}.")
        return value[0], value[-1]
    return value, value


_ROUNDING = 1e-4  # what is less may be float32 in the code of one of the models


def _trial(wanted: Sequence[Wanted], sets: Sequence[Given], seed: int, tolerance: float | None) -> Trial:
    """In float64; in float32 where a model does not run in that, or no tolerance is given and a small difference vanishes."""
    models = _make_both(wanted[0], wanted[1], seed)
    try:
        exact = Trial.run(models, sets, torch.float64, seed, tolerance)
    except ConvertError:
        return Trial.run(models, sets, torch.float32, seed, tolerance)
    if exact.is_equal or tolerance is not None or exact.relative > _ROUNDING:
        return exact
    try:
        rounded = Trial.run(_make_both(wanted[0], wanted[1], seed), sets, torch.float32, seed, tolerance)
    except ConvertError:
        return exact
    return rounded if rounded.relative < exact.relative / 8 else exact


def _compare(trial: Trial, report: Proved) -> None:
    old, new = trial.models
    report.dtype, report.tolerance, report.equal = str(trial.dtype).removeprefix("torch."), trial.tolerance, trial.is_equal
    report.outputs, report.left_out = len(trial.paired.pairs), trial.paired.left_out
    if math.isfinite(trial.relative):
        report.largest, report.relative = max(gap.largest for gap in trial.gaps), trial.relative
    partners = pair_tensors(old, new)
    found = pair_modules(old, new, partners)
    roots = trial.done[trial.worst][0].root, trial.done[trial.worst][1].root
    search = Search(in_both(found, *roots), tensors_of(old), trial.tolerance)
    report.modules, report.calls = len(search.pairs), search.count(*roots)
    report.settings = list(_settings(old, new, found))
    if report.equal:
        trial.refuse_nothing()
        report.unproved = unproved(trial, {other: name for name, other in partners.items()})
    else:
        report.fault = search.find(*roots)
        trial.refuse_random(report.fault)


def _settings(old: torch.nn.Module, new: torch.nn.Module, pairs: Mapping[str, str]) -> Iterator[Setting]:
    left, right = dict(old.named_modules()), dict(new.named_modules())
    for path, other in pairs.items():
        if path in left and other in right and type(left[path]).__name__ == type(right[other]).__name__:
            for name, values in different_settings(left[path], right[other]).items():
                yield Setting(path, name, *values)


class Wanted(NamedTuple):
    """One side: its checkpoint, what makes its model, the arguments of that, which state dict of the checkpoint."""

    path: str
    spec: Any
    arguments: Any
    select: str | None

    @property
    def label(self) -> str:
        return self.spec if isinstance(self.spec, str) else getattr(self.spec, "__qualname__", type(self.spec).__qualname__)


def _make_both(old: Wanted, new: Wanted, seed: int) -> tuple[torch.nn.Module, torch.nn.Module]:
    """Both models with the numbers of their checkpoints, ready to be run."""
    first = _filled(_made(old, seed), old)
    second = _made(new, seed)
    tensors = [{id(tensor) for tensor in (*model.parameters(), *model.buffers())} for model in (first, second)]
    return first, _filled(copy.deepcopy(second) if tensors[0] & tensors[1] else second, new)


def _made(wanted: Wanted, seed: int) -> torch.nn.Module:
    with seeded(seed):
        if isinstance(wanted.spec, torch.nn.Module):
            return copy.deepcopy(wanted.spec)
        made = _called(wanted)
    if not isinstance(made, torch.nn.Module):
        raise ConvertError(f"{wanted.label} gives a {type(made).__name__}.", why="A torch.nn.Module is wanted.")
    return made


def _called(wanted: Wanted) -> Any:
    if not callable(wanted.spec):
        if (build := read_target(wanted.spec, args=wanted.arguments).build) is None:
            raise UsageError(f"{wanted.spec} does not make a model.", fix="Give package.module:callable or ./models.py:Net.")
        return build()
    if isinstance(wanted.arguments, str):
        raise UsageError("`model_args` of a callable are a mapping.")
    try:
        return wanted.spec(**(wanted.arguments or {}))
    except Exception as error:  # whatever the user's function raises
        raise ConvertError(f"{wanted.label} raised {type(error).__name__} when it was called.", why=f"{error}") from error


def _filled(model: torch.nn.Module, wanted: Wanted) -> torch.nn.Module:
    with contextlib.suppress(Exception):  # a model that cannot be wider says so when it runs
        model.double()  # it takes all digits of the checkpoint
    try:
        load_into(model, wanted.path, select=wanted.select)
    except MatchError as error:
        error.fix = "If it is a checkpoint of another model, give `model` twice: for the old one and for the new one."
        raise
    model.eval()
    for module in model.modules():
        module.training = False  # whatever an eval() of its own does
    return model
