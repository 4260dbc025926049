"""The weighted mean of several checkpoints of one model: tensors streamed, everything else from the first."""

from __future__ import annotations

import math
import shlex
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from typing import Any, Literal, TypeAlias

from ckpt_tools.edit.casts import to_little_endian
from ckpt_tools.edit.objects.losses import check_lost, packed_tensors
from ckpt_tools.edit.renaming import restore_named_ties
from ckpt_tools.edit.selection import select_in
from ckpt_tools.errors import ConvertError, UsageError
from ckpt_tools.formats.checkpoint import Checkpoint
from ckpt_tools.formats.contents import StateDict, find_state_dicts, find_tensors, is_tensor, names_quantised, tensors_outside
from ckpt_tools.formats.single import collector_paused, naming
from ckpt_tools.io.content import Content
from ckpt_tools.io.source import File, as_path
from ckpt_tools.io.writer import Progress
from ckpt_tools.operations.compare.sides import check_effort, check_names
from ckpt_tools.operations.convert.conversion import CONTAINERS, write_one
from ckpt_tools.operations.convert.edits import Edits
from ckpt_tools.operations.convert.folder import FolderTarget, run_dcp
from ckpt_tools.operations.convert.object_policy import modules_first
from ckpt_tools.operations.convert.options import (
    ConvertOptions,
    DryRunOption,
    NameOptions,
    ObjectOptions,
    OutputOptions,
    Selection,
    WriteOptions,
)
from ckpt_tools.operations.convert.report import Converted, Note
from ckpt_tools.operations.convert.run import open_output
from ckpt_tools.operations.safety import danger_in
from ckpt_tools.parts.open import open_whole
from ckpt_tools.text import Report, dotted, listed
from ckpt_tools.tree.dtypes import DType
from ckpt_tools.tree.findings import mending
from ckpt_tools.tree.modules import is_module
from ckpt_tools.tree.names import unwrap as unwrap_name
from ckpt_tools.tree.nodes import PLAIN, Entry, List, Node, Object, Storage, Where, contiguous_stride
from ckpt_tools.tree.options import as_in, as_keywords, option, record
from ckpt_tools.tree.output_names import Format, check_one_file, output_format
from ckpt_tools.tree.visit import walk
from ckpt_tools.values.numeric import CastCount, has_numbers, row_major, same_bytes, same_unusual, view_of
from ckpt_tools.values.pytorch import need_torch
from ckpt_tools.values.statistics import largest, weighted_mean, widest

COUNTER = "num_batches_tracked"
Integers: TypeAlias = Literal["first", "max"]


@record
class AverageOptions(ObjectOptions, DryRunOption):
    """All that `average` takes."""

    weights: Sequence[float] | None = option(
        "Weight of each IN, divided by their sum [all equal].", metavar="W,W,...", in_code="Numbers."
    )
    unwrap: bool = as_in(NameOptions, "unwrap", "Remove wrappers from all names first.")
    integers: Integers | None = option(
        "Which value to take for integers that differ; otherwise they are refused.", choices=["first", "max"]
    )
    select: str | None = as_in(Selection, "select", "Use only this state dict or subtree of every IN.")
    format: Format | None = as_in(OutputOptions, "format", "Format of OUT [by its name].")
    overwrite: bool = as_in(OutputOptions, "overwrite")
    progress: Progress | None = as_in(WriteOptions, "progress")


@dataclass(slots=True, repr=False)
class Averaged(Report):
    """The report of an average.

    Attributes:
        sources: the files, in order. weights: what each counted for; they sum to 1.
        averaged: tensors that are a mean. kept: those that were equal everywhere and no floats.
        largest, first: integer tensors that differed, and what was taken of them.
        output: what was written, as `convert` reports it.
    """

    sources: list[str]
    weights: list[float]
    averaged: int = 0
    kept: int = 0
    largest: list[str] = field(default_factory=list)
    first: list[str] = field(default_factory=list)
    output: Converted = field(default_factory=lambda: Converted("", ""))


@as_keywords(AverageOptions)
def average(sources: Sequence[File], target: File, options: AverageOptions) -> Averaged:
    """Write the mean of several checkpoints of one model: the whole new file, or nothing.

    The tensors of state dicts are averaged in float64 (complex128), a chunk at a time, and rounded once, to the smallest dtype
    that holds what the files have. What else there is (optimizer, epoch) comes from the first file. Integer and bool tensors
    that are equal everywhere stay; of `num_batches_tracked` the largest is taken, the count of the run that went furthest.

    Args:
        sources: two checkpoints or more, in any container. target: the file to write.
        options: those of `AverageOptions`, as keywords. With objects="plain" pickled models and programs have a mean.

    Raises:
        UsageError: weights that do not fit. ConvertError: names, shapes or integers that disagree. CkptError: see `convert`.
    """
    parts = _weights(options.weights, len(sources))
    need_torch("A mean is worked out with it.")
    paths, target = [as_path(source) for source in sources], as_path(target)
    kind = output_format(target, options.format)
    to_folder = kind == "dcp"
    for source in paths:
        check_one_file(source, target, options.format)
    shared = {name: option for name, option in options.asked().items() if name in ConvertOptions.options}
    edits = Edits(ConvertOptions(**shared), kind)
    report = Averaged(list(map(str, sources)), parts)
    report.output = Converted(str(paths[0]), str(target), CONTAINERS[kind], options.dry_run)
    folder = FolderTarget(target, kind, edits.options, inputs=paths)
    with ExitStack() as stack:
        output = None
        if to_folder:
            folder.check()
        else:
            output = open_output(stack, target, paths, edits.options)
        stack.enter_context(collector_paused())
        checkpoints = [stack.enter_context(open_whole(path)) for path in paths]
        if options.objects == "plain":
            _take_state_dicts(checkpoints, report.output)
        mean = _Mean(checkpoints, parts, options, report)
        mean.apply()
        dangers = [danger_in(checkpoint, str(path)) for path, checkpoint in zip(paths[1:], checkpoints[1:], strict=True)]
        report.output.notes += [Note("dangerous-input", f"{danger} Only its tensors are read.") for danger in dangers if danger]
        if to_folder:
            run_dcp(checkpoints[0], folder, edits, report.output, stack)
        else:
            write_one(checkpoints[0], edits, report.output, stack, output)
        for checkpoint in checkpoints:
            checkpoint.source.check_unchanged()
    report.output.notes[:] = [note for note in report.output.notes if note.code != "no-prefix"]  # said of the first file alone
    for note in report.output.notes:
        note.text = note.text.replace("`strip_module`", "`unwrap`")  # what average has
    if beyond := [name for name, count in mean.counts if count.overflowed or count.saturated]:
        report.output.note("overflowed", f"Values of the mean are too large for their dtype: {listed(beyond, 3)}.")
    return report


def _weights(given: Sequence[float] | None, count: int) -> list[float]:
    """What each source counts for; the sum is 1."""
    if count < 2:
        raise UsageError("An average takes two checkpoints or more, and the file to write.")
    weights = [1.0] * count if given is None else list(given)
    if len(weights) != count:
        numbers = f"{len(weights)} number{'s' * (len(weights) != 1)}"
        raise UsageError(f"`weights` has {numbers} for {count} checkpoints.", fix="One for each, in one word: 0.7,0.3")
    whole = sum(weights) if all(map(math.isfinite, weights)) else math.nan
    if not math.isfinite(whole) or whole == 0:
        raise UsageError("`weights` must be finite numbers that do not sum to zero.")
    return [weight / whole for weight in weights]


def _take_state_dicts(checkpoints: Sequence[Checkpoint], report: Converted) -> None:
    """Pickled modules and programs become their state dicts, which have a mean."""
    for number, checkpoint in enumerate(checkpoints):
        told = report if number == 0 else Converted("", "")  # what is not averaged comes from the first
        root = checkpoint.locate()
        check_lost(checkpoint.path, packed_tensors(root))
        checkpoint.root = modules_first(root, told)


class _Mean:
    """Puts the means into the state dicts of the first checkpoint's tree."""

    def __init__(
        self, checkpoints: Sequence[Checkpoint], weights: list[float], options: AverageOptions, report: Averaged
    ) -> None:
        self.weights, self.integers, self.report = weights, options.integers, report
        self.name = unwrap_name if options.unwrap else str
        select = options.select
        self.roots = []
        for checkpoint in checkpoints:
            ties = restore_named_ties(checkpoint.root, checkpoint.metadata)
            checkpoint.metadata = {k: text for k, text in checkpoint.metadata.items() if k not in ties}
            checkpoint.root = to_little_endian(checkpoint.root, checkpoint.byteorder)
            checkpoint.byteorder = "little"
            with naming(checkpoint.source):
                self.roots.append(checkpoint.root if select is None else select_in(checkpoint, select))
            check_effort(tensor.node for tensor in find_tensors(checkpoint.root) if type(tensor.node) is Entry)
        self.paths = [str(checkpoint.path) for checkpoint in checkpoints]
        self.made: dict[Any, Entry] = {}
        self.counts: list[tuple[str, CastCount]] = []
        self.widened: list[str] = []

    def apply(self) -> None:
        found = [find_state_dicts(root) for root in self.roots]
        for state_dicts, path, root in zip(found, self.paths, self.roots, strict=True):
            if not state_dicts:
                fix = f"ckpt inspect {path} shows what is in it."
                if any(is_module(node) for _, node in walk(root, plain=False)):
                    fix = "The state dict of a pickled model is taken out with `objects='plain'`."
                raise ConvertError(f"{path} holds no state dict.", why="Only the tensors of state dicts are averaged.", fix=fix)
            if any(map(names_quantised, state_dicts)):
                _check_plain(state_dicts, path)
        self.count = len(found[0])
        used: list[list[StateDict]] = [[] for _ in found]
        for base in found[0]:
            others = [self.counterpart(base, state_dicts, path) for state_dicts, path in zip(found, self.paths, strict=True)]
            for state_dicts, other in zip(used, others, strict=True):
                state_dicts.append(other)
            sides = [self.named(state_dict, path) for state_dict, path in zip(others, self.paths, strict=True)]
            for path, side in zip(self.paths[1:], sides[1:], strict=True):
                alike = set(map(unwrap_name, sides[0])) == set(map(unwrap_name, side))
                fix = f"ckpt diff {self.paths[0]} {path} shows all of it."
                fix = "They agree without wrappers: `unwrap=True`." if alike else fix
                check_names((self.paths[0], sides[0]), (path, side), fix)
            for index, (key, node) in enumerate(base.node.items):
                if type(key) is str and is_tensor(node):
                    name = self.name(key)
                    base.node.items[index] = key, self.mean(name, [side[name] for side in sides])
        self.note_rest(used)

    def counterpart(self, base: StateDict, found: list[StateDict], path: str) -> StateDict:
        """The state dict of another source at the same path; its only one, where both have one and one of them is the root."""
        same = [state_dict for state_dict in found if state_dict.where == base.where]
        if not same and len(found) == self.count == 1 and not (found[0].where and base.where):
            same = found
        if not same:
            wheres, own = [dotted(state_dict.where) for state_dict in found], dotted(base.where)
            deeper, where = (self.paths[0], own) if wheres == [""] else (path, wheres[0] if len(wheres) == 1 else "WHERE")
            raise ConvertError(
                f"{path} has no state dict at {own or 'the root'}.",
                why=f"It has {', '.join(where or '(root)' for where in wheres) or 'none'}.",
                fix="Choose one that all have (`select=WHERE`), or take it out first: "
                + mending("convert", deeper, f"--select {shlex.quote(where)}"),
            )  # fmt: skip
        return same[0]

    def named(self, state_dict: StateDict, path: str) -> dict[str, Node]:
        nodes: dict[str, Node] = {}
        for key, node in state_dict.node.items:
            if type(key) is str and is_tensor(node):
                if (name := self.name(key)) in nodes:
                    raise ConvertError(f"{path}: two tensors are named {name!r} once unwrapped.")
                nodes[name] = node
        return nodes

    def mean(self, name: str, nodes: Sequence[Node]) -> Node:
        entries = [node for node in nodes if type(node) is Entry]
        if len(entries) != len(nodes):
            return self.unusual(name, nodes)
        first = entries[0]
        for entry, path in zip(entries, self.paths, strict=True):
            if entry.shape != first.shape:
                shapes = f"{list(first.shape)} in {self.paths[0]}, {list(entry.shape)} in {path}"
                raise ConvertError(
                    f"{name!r} has two shapes.", why=f"{shapes}.", fix="Only one model's checkpoints have a mean."
                )
            if entry.dtype.family != first.dtype.family or entry.dtype.packed != first.dtype.packed:
                dtypes = f"{first.dtype.name} in {self.paths[0]}, {entry.dtype.name} in {path}"
                raise ConvertError(f"{name!r} is not the same kind of number everywhere.", why=f"{dtypes}.")
        kinds = {entry.dtype for entry in entries}
        if not all(dtype.family in ("float", "complex") and has_numbers(dtype) and dtype.packed == 1 for dtype in kinds):
            return self.integer(name, entries)
        self.report.averaged += 1
        parts = [(row_major(entry), entry.dtype, weight) for entry, weight in zip(entries, self.weights, strict=True)]
        dtype = self.widest(name, entries)
        count = CastCount() if min(self.weights) < 0 else None  # else the mean is within what they have
        if count is not None:
            self.counts.append((name, count))
        return self.entry(entries, weighted_mean(parts, dtype, count), dtype)

    def unusual(self, name: str, nodes: Sequence[Node]) -> Node:
        """A sparse, quantised or nested tensor: kept where it is equal everywhere."""
        if all(type(node) is Object and same_unusual(nodes[0], node) for node in nodes[1:]):
            return nodes[0]
        raise ConvertError(
            f"{name!r} is a sparse, quantised or nested tensor and differs between {self.paths[0]} and the others.",
            why="Only dense tensors have a mean.",
            fix=f"Leave it out first: {mending('convert', self.paths[0], f'--drop {shlex.quote(name)}')}",
        )

    def integer(self, name: str, entries: Sequence[Entry]) -> Entry:
        """An integer, bool or quantised tensor: kept where it is equal everywhere."""
        first = entries[0]
        if all(first.dtype is entry.dtype and same_bytes(first, entry) for entry in entries[1:]):
            self.report.kept += 1
            return first
        choice = "max" if name.rpartition(".")[2] == COUNTER else self.integers
        if choice == "first":
            self.report.first.append(name)
            return first
        if choice is None or not _has_largest(first.dtype):
            raise ConvertError(
                f"{name!r} is {first.dtype.name} and differs between {self.paths[0]} and the others.",
                why="Float and complex tensors have a mean; one of integers would have to be rounded.",
                fix=f"Say what is taken: `integers='first'`{' or max' if _has_largest(first.dtype) else ''}.",
            )
        self.report.largest.append(name)
        dtype = self.widest(name, entries)
        return self.entry(entries, largest([(row_major(entry), entry.dtype) for entry in entries], dtype), dtype)

    def widest(self, name: str, entries: Sequence[Entry]) -> DType:
        dtype = widest([entry.dtype for entry in entries])
        if dtype is not entries[0].dtype:
            self.widened.append(f"{name} ({dtype.name})")
        return dtype

    def entry(self, entries: Sequence[Entry], content: Content, dtype: DType) -> Entry:
        """A new entry with this content; names that are tied in every source stay tied."""
        key = tuple(view_of(entry) for entry in entries)
        if key not in self.made:
            first = entries[0]
            typed = dtype if first.storage.dtype and dtype.storage else None
            storage = Storage(f"mean{len(self.made)}", typed, content.length, first.storage.device, content)
            extras = replace(first.extras, metadata=None) if first.extras else None  # the conj and neg bits are worked in
            stride = contiguous_stride(first.shape)
            self.made[key] = replace(first, dtype=dtype, storage=storage, stride=stride, offset=0, extras=extras)
        return replace(self.made[key], kind=entries[0].kind, requires_grad=entries[0].requires_grad)

    def note_rest(self, used: Sequence[Sequence[StateDict]]) -> None:
        """Say which tensors have another dtype than in the first file, and what was not averaged."""
        if self.widened:
            text = f"In OUT as wide as in the file that has it widest: {listed(self.widened, 3)}."
            self.report.output.note("widest-dtype", text)
        rest = [{tensor.where for tensor in tensors_outside(*row)} for row in zip(self.roots, used, strict=True)]
        if rest[0]:
            what = f"{len(rest[0])} tensors outside state dicts (optimizer state)"
            text = f"{what} are those of {self.paths[0]}; `select` drops them."
            self.report.output.note("rest-from-first", text)
        first, *others = map(_values, self.roots)
        if differing := [where for where, value in first.items() if any(other.get(where) != value for other in others)]:
            text = f"Values that differ are those of {self.paths[0]}: {listed([dotted(where) for where in differing], 3)}."
            self.report.output.note("values-from-first", text)
        for path, wheres in zip(self.paths[1:], rest[1:], strict=True):
            if more := [dotted(where) for where in wheres - rest[0]]:
                text = f"{path} has {len(more)} more tensors, which are in no mean and left out: {listed(sorted(more), 3)}."
                self.report.output.note("rest-left-out", text)


def _values(root: Node) -> dict[Where, str]:
    """The plain values of a tree, but those in lists."""
    found = walk(root, stop=lambda node: type(node) is List or is_tensor(node))
    return {where: repr(node) for where, node in found if type(node) in PLAIN}


def _check_plain(state_dicts: Sequence[StateDict], path: str) -> None:
    """Refuse codes, whose mean is not that of the numbers which they stand for."""
    from ckpt_tools.edit.quantised.finding import find

    for state_dict in state_dicts:
        if quantised := list(find(state_dict.node).quantised.values()):
            raise ConvertError(
                f"{path} has quantised weights ({quantised[0].name!r}: {quantised[0].scheme}).",
                why="The mean of codes is not that of the numbers which they stand for.",
                fix=f"Convert them first: {mending('convert', path, '--dequantize')}",
            )


def _has_largest(dtype: DType) -> bool:
    return dtype.family in ("int", "bool") and has_numbers(dtype) and dtype.name != "uint64"  # compared as int64
