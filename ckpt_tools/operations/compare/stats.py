"""What the numbers in a checkpoint look like: mean, spread, extremes, zeros, NaN and a histogram, per tensor and module."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

from ckpt_tools.edit.renaming import restore_named_ties
from ckpt_tools.errors import NothingMatchedError
from ckpt_tools.formats.contents import Tensor
from ckpt_tools.formats.single import collector_paused
from ckpt_tools.io.source import File
from ckpt_tools.io.writer import Advance, Progress, advancing
from ckpt_tools.operations.compare.sides import check_effort, place_in, tensors_in
from ckpt_tools.parts.open import open_whole
from ckpt_tools.text import Report, dotted
from ckpt_tools.tree.globs import Globs, meant_by
from ckpt_tools.tree.nodes import Entry
from ckpt_tools.tree.options import natural
from ckpt_tools.values.numeric import ELEMENTS, has_numbers, numbers, one_thread, row_major, view_of
from ckpt_tools.values.pytorch import need_torch
from ckpt_tools.values.statistics import Moments, histogram


@dataclass(frozen=True, slots=True)
class TensorStats:
    """One tensor: `where` it is, its dotted `name`, dtype and shape.

    `numbers` is null where torch cannot tell its values, and `reason` says why; it holds elements, mean, std, min, max, zeros,
    nan, inf. `histogram` counts finite values in equal parts from min to max.
    """

    where: list[str | int]
    name: str
    dtype: str | None
    shape: list[int] | None
    numbers: dict[str, Any] | None
    histogram: list[int]
    reason: str = ""


@dataclass(frozen=True, slots=True)
class ModuleStats:
    """The tensors below one path together: those with numbers, and how many they are."""

    path: str
    tensors: int
    numbers: dict[str, Any]


@dataclass(slots=True, repr=False)
class Stats(Report):
    """What `ckpt stats` tells.

    Attributes:
        path, container: of the checkpoint.
        tensors: every tensor. modules: those below one path together. total: all of them, and how many have no numbers.
        notes: that quantised weights are measured as what their numbers mean; their dtype is the scheme then.
    """

    path: str
    container: str
    tensors: list[TensorStats] = field(default_factory=list)
    modules: list[ModuleStats] = field(default_factory=list)
    total: dict[str, Any] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)


@natural
def stats(
    path: File, *, select: str | None = None, filter: str | None = None, depth: int | None = None,
    progress: Progress | None = None,
) -> Stats:  # fmt: skip
    """Measure the tensors of a checkpoint, in constant memory. Values are float64; std divides by n - 1, as `torch.std`.

    Tensors of more than 32,704 elements are read twice: the histogram's ends are the extremes. Tied tensors are read once, and
    count under every name. NaN and infinite values are counted and left out of the rest; of complex values the modulus counts.

    Args:
        path: the checkpoint. select: the dotted path of a state dict or subtree. filter: a glob on names or paths.
        depth: modules are the first so many parts of the paths; else the modules that hold the tensors.
        progress: called with (bytes measured, bytes in total).

    Raises:
        CkptError: it cannot be read. NothingMatchedError: select or filter matches nothing.
    """
    need_torch("Statistics of tensors are worked out with it.")
    with collector_paused(), open_whole(path) as checkpoint:
        restore_named_ties(checkpoint.root, checkpoint.metadata)
        listed, notes = tensors_in(place_in(checkpoint, select), "instead")
        checkpoint.let_go()
        tensors = _chosen(list(listed.values()), filter)
        entries = [tensor.node for tensor in tensors if type(tensor.node) is Entry]
        check_effort(entries)
        report = Stats(str(path), checkpoint.container, notes=notes)
        advance = advancing(progress, sum(entry.nbytes for entry in entries))
        known: dict[Any, tuple[Moments, list[int]]] = {}  # tied tensors are read once
        modules: dict[str, list[Moments]] = {}
        with one_thread():
            for tensor in tensors:
                node = tensor.node
                if type(node) is Entry and has_numbers(node.dtype):
                    key = view_of(node)
                    if key not in known:
                        known[key] = measure(node, advance)
                    modules.setdefault(module_path(tensor.where, depth), []).append(known[key][0])
                    report.tensors.append(_row(tensor, *known[key]))
                else:
                    report.tensors.append(_row(tensor))
        checkpoint.source.check_unchanged()
    report.modules = [ModuleStats(name, len(found), _merged(found).to_json()) for name, found in modules.items()]
    report.total = _merged(moments for found in modules.values() for moments in found).to_json()
    report.total["unmeasured"] = sum(row.numbers is None for row in report.tensors)
    return report


def _row(tensor: Tensor, moments: Moments | None = None, counts: Sequence[int] = ()) -> TensorStats:
    dtype, reason = tensor.scheme or (tensor.dtype.name if tensor.dtype else None), ""
    if moments is None:  # sparse, quantised, nested: what it is, without numbers
        reason = "no numbers in torch" if type(tensor.node) is Entry else tensor.unusual.kind if tensor.unusual else ""
    shape = None if tensor.shape is None else list(tensor.shape)
    told = None if moments is None else moments.to_json()
    return TensorStats([*tensor.where], dotted(tensor.where) or "(root)", dtype, shape, told, list(counts), reason)


def _chosen(tensors: list[Tensor], pattern: str | None) -> list[Tensor]:
    if pattern is None:
        return tensors
    globs = Globs([pattern])
    found = [tensor for tensor in tensors if globs.matching(dotted(tensor.where), tensor.name)]
    if not found:
        why = meant_by(pattern, [dotted(tensor.where) for tensor in tensors])
        fix = "ckpt inspect --all FILE lists the names."
        raise NothingMatchedError(f"`filter={pattern!r}` matches no tensor.", why=why, fix=fix)
    return found


def module_path(where: Sequence[str | int], depth: int | None) -> str:
    """The module that a tensor counts for: what is before its last part, or its first `depth` parts."""
    path = dotted(tuple(where))
    if depth is None:
        return path.rpartition(".")[0] or "(root)"
    parts = path.split(".", min(depth, len(path)))  # no further: a name may be made of a million
    return ".".join(parts[:depth] if len(parts) > depth else parts[: max(1, len(parts) - 1)]) or "(root)"


def _merged(found: Iterable[Moments]) -> Moments:
    together = Moments()
    for moments in found:
        together.merge(moments)
    return together


def measure(entry: Entry, advance: Advance) -> tuple[Moments, list[int]]:
    """The moments and the histogram of one tensor; `advance` is called with the bytes that are done."""
    moments, content = Moments(), row_major(entry)
    kept = None
    for values in numbers(content, entry.dtype):
        moments.add(values)
        kept = values
        advance(values.numel() * entry.dtype.itemsize // entry.dtype.packed)
    again = [kept] if kept is not None and moments.elements <= ELEMENTS else numbers(content, entry.dtype)
    return moments, histogram(again, moments)
