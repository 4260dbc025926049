"""Run an old and a new model on the same inputs, and compare what comes out."""

from __future__ import annotations

import copy
import json
import math
import os
import platform
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch

import ckpt_tools
from ckpt_tools.errors import ConvertError, MatchError, UsageError
from ckpt_tools.fit.targets import read_target
from ckpt_tools.io.content import Literal, Piece
from ckpt_tools.io.output import replacing
from ckpt_tools.io.writer import write
from ckpt_tools.operations.check.digests import of_all
from ckpt_tools.operations.check.run import load_digests
from ckpt_tools.operations.proved import Fault, Proved, Run, Setting, Unproved
from ckpt_tools.torch import load_into
from ckpt_tools.torch.proving.inputs import (
    Done,
    Given,
    RaisedError,
    cast,
    computing_in,
    digest,
    make,
    run,
    run_alone,
    seeded,
)  # fmt: skip
from ckpt_tools.torch.proving.pairing import in_both, pair_calls, pair_modules, pair_tensors
from ckpt_tools.torch.proving.reasons import Reasons, different_settings, equal, same_in_another_order
from ckpt_tools.torch.proving.recording import CallPair, Gap, ModuleCall, Named, Paired, gap, pair, walk
from ckpt_tools.tree.arguments import Arguments
from ckpt_tools.tree.graphs import parse
from ckpt_tools.tree.options import natural
from ckpt_tools.tree.output_names import check_document_name

# --- which tensors of the new model are proved


Tensors = Mapping[str, torch.Tensor]


class Reach:
    """Looks for tensors of the new model that the outputs do not depend on."""

    def __init__(self, trial: Trial) -> None:
        self.model, self.sets, self.dtype, self.seed = trial.models[1], trial.sets, trial.dtype, trial.seed
        self.paths = {new for _, new in trial.paired.pairs}

    def unproved(self, old: Tensors, partners: Mapping[str, str]) -> list[Unproved]:
        """Tensors with other numbers than the old model's, on which nothing depends; embeddings of which some rows are so."""
        others = {name: tensor for name, tensor in tensors_of(self.model).items()
                  if tensor.is_floating_point() and not _is_among(tensor, old)}  # fmt: skip
        if not others:
            return []
        reached = self._by_gradients(others)
        silent = [name for name in others if not reached[name].any()]
        for name in silent if silent and self._changes([others[name] for name in silent]) else ():
            reached[name].fill_(self._changes([others[name]]))
        found = (self._row(name, tensor, reached[name], old.get(partners.get(name, name))) for name, tensor in others.items())
        return [row for row in found if row is not None]

    def _row(self, name: str, tensor: torch.Tensor, reached: torch.Tensor, old: torch.Tensor | None) -> Unproved | None:
        open_elements = ~reached
        module = self.model.get_submodule(name.rpartition(".")[0])
        if isinstance(module, torch.nn.Embedding | torch.nn.EmbeddingBag) and old is not None and old.dim() == 2:
            rows = min(len(old), len(tensor))  # those beyond are for inputs that the old model does not take
            open_elements[rows:] = False
            if old.shape[1] == tensor.shape[1]:
                open_elements[:rows] &= old[:rows] != tensor[:rows]
        elif reached.any():
            return None
        return Unproved(name, int(reached.sum()), tensor.numel()) if open_elements.any() else None

    def _by_gradients(self, others: Tensors) -> dict[str, torch.Tensor]:
        """Which elements have a gradient; where the model's code has none, no element has."""
        found = {name: torch.zeros(tensor.shape, dtype=torch.bool) for name, tensor in others.items()}
        leaves = {name: tensor.detach().clone().requires_grad_() for name, tensor in others.items()}
        for given in self.sets:
            try:
                gradients = self._gradients(leaves, given)
            except Exception:  # whatever the user's model raises: its code may write into what now has a gradient
                return found
            for name, gradient in zip(leaves, gradients, strict=True):
                if gradient is not None:
                    found[name] |= gradient != 0
        return found

    def _gradients(self, leaves: Tensors, given: Given) -> Sequence[torch.Tensor | None]:
        own = given.to(self.dtype)
        with torch.enable_grad(), seeded(self.seed), computing_in(self.dtype):
            made = torch.func.functional_call(self.model, dict(leaves), own.by_position, own.by_name)
            found = [tensor for path, tensor in walk(made) if path in self.paths and tensor.requires_grad]
            weights = [torch.randn_like(tensor) for tensor in found]
            if not found:
                return [None] * len(leaves)
            return torch.autograd.grad(found, list(leaves.values()), weights, allow_unused=True)

    def _changes(self, tensors: Sequence[torch.Tensor]) -> bool:
        """Whether an output changes with these tensors."""
        before = self._outputs()
        kept = [tensor.detach().clone() for tensor in tensors]
        try:
            for tensor in tensors:
                tensor.data.mul_(1.25).add_(torch.linspace(0.01, 0.1, tensor.numel()).reshape(tensor.shape))
            after = self._outputs()
        except Exception:  # whatever the user's model raises: it looks at the numbers
            return True
        finally:
            for tensor, values in zip(tensors, kept, strict=True):
                tensor.data.copy_(values)
        runs = list(zip(before, after, strict=True))
        return any(not torch.equal(left[path], right[path]) for left, right in runs for path in self.paths)

    def _outputs(self) -> list[Named]:
        return [run_alone(self.model, given, self.dtype, self.seed) for given in self.sets]


def tensors_of(model: torch.nn.Module) -> dict[str, torch.Tensor]:
    """Parameters and buffers that a state dict holds, each once."""
    found: dict[int, tuple[str, torch.Tensor]] = {}
    for name, tensor in model.state_dict(keep_vars=True).items():
        if isinstance(tensor, torch.Tensor):
            found.setdefault(id(tensor), (name, tensor))
    return dict(found.values())


def _is_among(tensor: torch.Tensor, others: Tensors) -> bool:
    """Whether one of these has the same numbers, in this or in the transposed order."""
    alike = [other for other in others.values() if other.numel() == tensor.numel()]
    return any(_same(other, tensor) or (other.dim() == 2 and _same(other.t(), tensor)) for other in alike)


def _same(left: torch.Tensor, right: torch.Tensor) -> bool:
    """Row-major; the first numbers decide, mostly."""
    few = [value[:1] if value.dim() > 1 else value for value in (left, right)]
    first = [value.reshape(-1)[:64] for value in few]
    room = min(map(len, first))
    return torch.equal(first[0][:room], first[1][:room]) and torch.equal(left.reshape(-1), right.reshape(-1))


# --- the first place where two runs part


class Search:
    """Looks for the fault; `calls` counts the pairs of calls that were compared."""

    def __init__(self, pairs: Mapping[str, str], reasons: Reasons, tolerance: float) -> None:
        self.pairs, self.reasons, self.tolerance = pairs, reasons, tolerance

    def find(self, old: ModuleCall, new: ModuleCall) -> Fault:
        """Where two calls with equal inputs and other outputs part."""
        last: CallPair | None = None
        moved: CallPair | None = None
        for both in pair_calls(old, new, self.pairs):
            left, right = both
            if not equal(left.inputs, right.inputs, self.tolerance):
                if not self._is_moved(left, right):
                    return self._in_code(old, new, last, moved or both)
                moved = moved or both
            elif not equal(left.outputs, right.outputs, self.tolerance):
                return self.find(left, right)
            else:
                last = both
        if last is None and moved is None:
            return Fault(*_both(old, new), "module", reasons=tuple(self.reasons.of_modules(old, new)))
        return self._in_code(old, new, last, moved)

    def _is_moved(self, left: ModuleCall, right: ModuleCall) -> bool:
        pairs = zip(left.inputs, right.inputs, strict=False)
        return any(same_in_another_order(*pair, self.tolerance) for pair in pairs)

    def _in_code(self, old: ModuleCall, new: ModuleCall, after: CallPair | None, before: CallPair | None) -> Fault:
        reasons = tuple(self.reasons.of_code(old, new, after, before))
        return Fault(*_both(old, new), "code", after[0].path if after else "", before[0].path if before else "", reasons)


def _both(old: ModuleCall, new: ModuleCall) -> tuple[str, str, str, str]:
    return old.path, new.path, type(old.module).__name__, type(new.module).__name__


def count(old: ModuleCall, new: ModuleCall, pairs: Mapping[str, str]) -> int:
    return 1 + sum(count(*pair, pairs) for pair in pair_calls(old, new, pairs))


def first_apart(one: ModuleCall, other: ModuleCall) -> tuple[str, str]:
    """Where two runs of one model part: the module's path and class."""
    for left, right in zip(one.calls, other.calls, strict=False):
        if left.path != right.path or not equal(left.inputs, right.inputs, 0):
            break
        if not equal(left.outputs, right.outputs, 0):
            return first_apart(left, right)
    return one.path, type(one.module).__name__


# --- both models on all sets of inputs, in one precision


_TOLERANCE = 1e-9  # in float64: sums in another order, with room
_LEAST, _MOST, _ROOM = 1e-6, 1e-4, 8  # in float32: so many times what rounding every weight does to the outputs
_SIDES = ("OLD", "NEW")


@dataclass(frozen=True, slots=True)
class Trial:
    models: tuple[torch.nn.Module, torch.nn.Module]
    sets: Sequence[Given]
    dtype: torch.dtype
    seed: int
    done: list[tuple[Done, Done]]
    paired: Paired
    gaps: list[Gap]
    tolerance: float

    @classmethod
    def run(
        cls, old: torch.nn.Module, new: torch.nn.Module, sets: Sequence[Given], dtype: torch.dtype, seed: int,
        tolerance: float | None,
    ) -> Trial:  # fmt: skip
        for model in (old, new):
            try:
                cast(model, dtype)
            except Exception as error:  # a class of weights that has no such dtype
                raise RaisedError(model, None) from error
        done = [(run(old, given, dtype, seed), run(new, given, dtype, seed)) for given in sets]
        paired = pair(done[0][0].outputs, done[0][1].outputs)
        gaps = [gap(left.outputs, right.outputs, paired) for left, right in done]
        if tolerance is None:
            tolerance = _TOLERANCE if dtype is torch.float64 else _rounding(old, sets[0], done[0][0], seed)
        return cls((old, new), sets, dtype, seed, done, paired, gaps, tolerance)

    @property
    def largest(self) -> float:
        return max(gap.largest for gap in self.gaps)

    @property
    def relative(self) -> float:
        return max(gap.relative for gap in self.gaps)

    @property
    def is_equal(self) -> bool:
        return self.relative <= self.tolerance

    @property
    def worst(self) -> int:
        return max(range(len(self.gaps)), key=lambda index: self.gaps[index].relative)

    def refuse_nothing(self) -> None:
        """Raise where equal outputs prove nothing: they are NaN, or have nothing to do with the inputs. Raises ConvertError."""
        if nan := sum(gap.nan for gap in self.gaps):
            total = sum(gap.numbers for gap in self.gaps)
            raise ConvertError(
                f"Nothing is proved: {nan} of {total} numbers are NaN in the outputs of both models.",
                fix="Other inputs; or the numbers in the checkpoints are damaged: `ckpt check` tells.",
            )
        first, *others = [old.outputs for old, _ in self.done]
        floats = [path for path, _ in self.paired.pairs if first[path].is_floating_point()]
        given = [(*one.by_position, *one.by_name.values()) for one in self.sets]
        varied = others and any(not torch.equal(*pair) for one in given[1:] for pair in zip(given[0], one, strict=True))
        if varied and floats and all(torch.equal(first[path], other[path]) for path in floats for other in others):
            raise ConvertError(
                "Nothing is proved: the outputs are the same for all sets of inputs.",
                why="What is before them does not show: weights that are zero, an input that is not used.",
            )

    def refuse_random(self, fault: Fault) -> None:
        """Raise where models differ in random numbers, and perhaps in nothing else. Raises ConvertError."""
        given = self.sets[self.worst]
        for side, model, before, where in zip(
            _SIDES, self.models, self.done[self.worst], (fault.where, fault.new_where), strict=True
        ):
            again = run(model, given, self.dtype, self.seed)
            if not _is_same(before, again):
                raise ConvertError(
                    f"{side} gives other numbers when it runs again on the same inputs, from {_where(before, again)} on.",
                    why="What it draws or remembers follows no seed of torch, Python or numpy; it cannot be compared.",
                )
            other = run(model, given, self.dtype, self.seed + 1)
            if not _is_same(before, other) and first_apart(before.root, other.root)[0] == where:
                raise ConvertError(
                    f"{side} is random in {_where(before, other)}: with another seed it gives other numbers.",
                    why="The models draw different random numbers, so that their outputs tell nothing of their weights.",
                    fix="Dropout as a function needs training=self.training.",
                )


def _is_same(one: Done, other: Done) -> bool:
    """Whether two runs of a model gave the same numbers; NaN is the same as NaN."""
    left, right = one.outputs, other.outputs
    return left.keys() == right.keys() and all(
        left[path].shape == right[path].shape
        and bool(((left[path] == right[path]) | (left[path].isnan() & right[path].isnan())).all())
        for path in left
    )


def _where(one: Done, other: Done) -> str:
    path, kind = first_apart(one.root, other.root)
    return f"{path or '(the model)'} ({kind})"


def _rounding(model: torch.nn.Module, given: Given, before: Done, seed: int) -> float:
    """How far float32's rounding may move the outputs, as that of the weights does."""
    floats = [tensor for tensor in (*model.parameters(), *model.buffers()) if tensor.is_floating_point()]
    kept = [tensor.detach().clone() for tensor in floats]
    try:
        for index, tensor in enumerate(floats):
            noise = torch.rand(tensor.shape, generator=torch.Generator().manual_seed(index)) * 2 - 1
            tensor.data.mul_(1 + noise * torch.finfo(torch.float32).eps)
        after = run_alone(model, given, torch.float32, seed)
    finally:
        for tensor, values in zip(floats, kept, strict=True):
            tensor.data.copy_(values)
    paired = pair(before.outputs, after)
    return min(max(_ROOM * gap(before.outputs, after, paired).relative, _LEAST), _MOST)


_MOST_RUNS = 1000  # sets of inputs, which are all held in memory
_ROUNDING = 1e-4  # what is less may be float32 in the code of one of the models


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
        tolerance: the largest difference, by the largest output, that counts as equal; else 1e-9 in float64, and in
            float32 some times what rounding every weight does.
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
        check_document_name(certificate, "a certificate", ".json")
    sets = make([parse(spec) for spec in specs], seed, runs)
    sides = zip((os.fspath(old), os.fspath(new)), _two(model), _two(model_args), _places(select), strict=True)
    wanted = [Wanted(*row) for row in sides]
    report = Proved(Run(wanted[0].path, wanted[0].label), Run(wanted[1].path, wanted[1].label))
    report.inputs, report.seed, report.runs, report.input_digest = specs, seed, runs, digest(sets)
    report.versions = {"python": platform.python_version(), "torch": torch.__version__, "ckpt_tools": ckpt_tools.__version__}
    models = make_both(wanted[0], wanted[1], seed)
    _compare(_trial(models, sets, seed, tolerance), report)
    if certificate is not None:
        report.old, report.new = (
            Run(run.path, run.model, of_all(load_digests(run.path)[1])) for run in (report.old, report.new)
        )
        text = json.dumps(report.to_json(), indent=1, allow_nan=False) + "\n"
        with replacing(certificate, overwrite=overwrite) as output:
            write([Piece(Literal(text.encode()))], output)
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


def _compare(trial: Trial, report: Proved) -> None:
    old, new = trial.models
    report.dtype, report.tolerance, report.equal = str(trial.dtype).removeprefix("torch."), trial.tolerance, trial.is_equal
    report.outputs, report.left_out = len(trial.paired.pairs), trial.paired.left_out
    if math.isfinite(trial.relative):
        report.largest, report.relative = trial.largest, trial.relative
    partners = pair_tensors(old, new)
    found = pair_modules(old, new, partners)
    roots = trial.done[0][0].root, trial.done[0][1].root
    pairs = in_both(found, *roots)
    report.modules, report.calls = len(pairs), count(*roots, pairs)
    report.settings = list(_settings(old, new, found))
    if report.equal:
        trial.refuse_nothing()
        report.unproved = Reach(trial).unproved(tensors_of(old), {other: name for name, other in partners.items()})
    else:
        search = Search(pairs, Reasons(old, new, pairs, trial.tolerance), trial.tolerance)
        report.fault = search.find(*(run.root for run in trial.done[trial.worst]))
        trial.refuse_random(report.fault)


def _trial(models: tuple[torch.nn.Module, torch.nn.Module], sets: Sequence[Given], seed: int, tolerance: float | None) -> Trial:
    """In the precision that both run in; where a small difference may be rounding, in the one in which it is least."""
    try:
        best = Trial.run(*models, sets, torch.float64, seed, tolerance)
    except RaisedError:
        best = None
    if best is not None and (best.is_equal or best.relative > _ROUNDING):
        return best
    try:
        # copies, since the numbers of the models are rounded
        other = Trial.run(*(models if best is None else _copied(models)), sets, torch.float32, seed, tolerance)
    except RaisedError as problem:
        if best is not None:
            return best
        raise _raised(problem, "OLD" if problem.model is models[0] else "NEW") from problem.__cause__
    return other if best is None or other.relative < best.relative / 8 else best


def _copied(models: tuple[torch.nn.Module, torch.nn.Module]) -> tuple[torch.nn.Module, torch.nn.Module]:
    try:
        return copy.deepcopy(models)
    except Exception as error:  # whatever a model holds
        raise RaisedError(models[0], None) from error


def _raised(problem: RaisedError, side: str) -> ConvertError:
    call, cause = problem.inside, problem.__cause__
    where = f", in {call.path} ({type(call.module).__name__})" if call is not None and call.path else ""
    return ConvertError(
        f"{side} raised {type(cause).__name__} when it ran{where}.", why=f"{cause}",
        fix="Give the inputs that its forward takes: NAME=SHAPE by name, SHAPE:N for integers below N.",
    )  # fmt: skip


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


def make_both(old: Wanted, new: Wanted, seed: int) -> tuple[torch.nn.Module, torch.nn.Module]:
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
    try:
        load_into(model, wanted.path, select=wanted.select)
    except MatchError as error:
        error.fix = "If it is a checkpoint of another model, give `model` twice: for the old one and for the new one."
        raise
    model.eval()
    for module in model.modules():
        module.training = False  # whatever an eval() of its own does
    return model
