"""The values of one tensor, or of a box of it: shown, or written as a .npy. Only what they need is read."""

from __future__ import annotations

import itertools
import math
import os
from collections.abc import Collection, Sequence
from dataclasses import dataclass, field
from typing import Any

from ckpt_tools.edit.renaming import restore_named_ties
from ckpt_tools.errors import ConvertError, NothingMatchedError, UsageError
from ckpt_tools.formats.checkpoint import Checkpoint
from ckpt_tools.formats.contents import Tensor
from ckpt_tools.io.source import File
from ckpt_tools.io.writer import Progress
from ckpt_tools.operations.compare.sides import check_effort, place_in, tensors_in
from ckpt_tools.parts.open import open_whole
from ckpt_tools.text import Report, did_you_mean, dotted, listed, some
from ckpt_tools.tree.nodes import Entry
from ckpt_tools.tree.options import natural
from ckpt_tools.values import windows
from ckpt_tools.values.numeric import has_numbers
from ckpt_tools.values.pytorch import need_torch

ALL = 1000  # so many values are shown without leaving any out
_MOST = 1_000_000  # so many fit a report
_EDGE = 3  # values at either end of a dimension, where not all are shown


@dataclass(slots=True, repr=False)
class Shown(Report):
    """What `ckpt show` tells of one tensor.

    Attributes:
        path, container: of the checkpoint. where: its path. name: the same, dotted. dtype, shape: of the whole tensor.
        index: what was asked for. selected: the shape of that; a dimension of which a number was named is gone.
        ranges: of each dimension whether it is still there.
        axes: of each dimension of the tensor the places whose values follow; all that was asked for, or the first and last.
        values: nested lists, a number where every dimension was named; complex values are complex.
        texts: each value in the fewest digits that tell it apart in its dtype, in order.
        output, written: the array that was written in their place, and its dtype there.
    """

    path: str
    container: str
    where: list[str | int]
    name: str
    dtype: str
    shape: list[int]
    index: str
    selected: list[int]
    ranges: list[bool] = field(default_factory=list)
    axes: list[list[int]] = field(default_factory=list)
    values: Any = None
    texts: list[str] = field(default_factory=list)
    output: str | None = None
    written: str | None = None

    def to_json(self) -> dict[str, Any]:
        """The report as plain data; a complex number is a pair, what is not finite is text."""
        return Report.to_json(self) | {"values": _plain(self.values)}


def _plain(value: Any) -> Any:
    if isinstance(value, list):
        return [_plain(one) for one in value]
    if isinstance(value, complex):
        return [_plain(value.real), _plain(value.imag)]
    return str(value) if isinstance(value, float) and not math.isfinite(value) else value


@natural
def show(
    path: File, name: str, *, index: str | None = None, select: str | None = None, whole: bool = False,
    output: str | os.PathLike[str] | None = None, overwrite: bool = False, progress: Progress | None = None,
) -> Shown:  # fmt: skip
    """Show the values of one tensor of a checkpoint, exactly; of more than 1,000 the first and last of every dimension.

    Args:
        path: the checkpoint. name: of the tensor, in its state dict or as a dotted path; `name[0:3, :5]` names a box of it.
        index: the box, where it is not in the name: numbers and ranges as in Python, from 0 up or from the end.
        select: the state dict or subtree that has it, where several do.
        whole: every value, up to a million.
        output: a .npy to write them to, all of them; what NumPy has no type for (bfloat16, fp8) becomes float32, exactly.
        overwrite: replace it if it exists. progress: called with (bytes written, bytes in total).

    Raises:
        NothingMatchedError: no tensor has the name. UsageError: the index cannot be read, or more than a million values.
        ConvertError: sparse, quantised, without values. CkptError: it cannot be read, or the output not be written.
    """
    need_torch("The values of a tensor are read with it.")
    with open_whole(path) as checkpoint:
        restore_named_ties(checkpoint.root, checkpoint.metadata)
        tensors, _ = tensors_in(place_in(checkpoint, select), "beside")
        tensor, index = _chosen(checkpoint, tensors.values(), name, index)
        del tensors
        checkpoint.let_go()
        entry = _entry(tensor)
        if checkpoint.locator is not None:
            located = checkpoint.locator(entry)
            assert type(located) is Entry
            entry = located
        axes = windows.read_index(index, entry.shape)
        report = Shown(
            str(path), checkpoint.container, [*tensor.where], dotted(tensor.where) or "(root)",
            tensor.scheme or entry.dtype.name, [*entry.shape], index, [len(axis) for axis in axes if isinstance(axis, range)],
            [isinstance(axis, range) for axis in axes],
        )  # fmt: skip
        if output is not None:
            _write(entry, axes, report, output, overwrite=overwrite, progress=progress)
        else:
            _read(entry, axes, report, whole=whole)
        checkpoint.source.check_unchanged()
    return report


def _chosen(checkpoint: Checkpoint, tensors: Collection[Tensor], name: str, index: str | None) -> tuple[Tensor, str]:
    """The tensor and the index: a name may end in one, and a tensor's own name may look as if it did."""
    bare, bracket, rest = name.rpartition("[")
    wanted = bare if bracket and rest.endswith("]") else name
    if found := _named(tensors, name):
        return found, index or ""
    if index is None and wanted is not name and (found := _named(tensors, bare)):
        return found, rest[:-1]
    names = [dotted(tensor.where) for tensor in tensors]
    last = [str(tensor.where[-1]) for tensor in tensors if tensor.where]
    why = did_you_mean(wanted, dict.fromkeys([*last, *names]))
    below = [name for name in dict.fromkeys([*last, *names]) if name.startswith(f"{wanted}.")]
    if below:
        why = f"Below it are {some(below)}."
    fix = f"ckpt inspect --all {checkpoint.path} lists the names."
    raise NothingMatchedError(f"{checkpoint.path} has no tensor {wanted!r}.", why=why, fix=fix)


_WHOLE = ("(root)", "(the whole file)")  # as reports call what has no name


def _named(tensors: Collection[Tensor], name: str) -> Tensor | None:
    found = [tensor for tensor in tensors if dotted(tensor.where) == name or (not tensor.where and name in _WHOLE)]
    found = found or [tensor for tensor in tensors if tensor.where and tensor.name == name]
    if len(found) > 1:
        paths = [dotted(tensor.where) for tensor in found]
        raise NothingMatchedError(
            f"{len(found)} tensors are called {name!r}: {listed(paths)}.", fix="Name one by its path, or use `select`."
        )
    return found[0] if found else None


def _entry(tensor: Tensor) -> Entry:
    node, what = tensor.node, f"The values of {dotted(tensor.where)!r} cannot be shown."
    if type(node) is not Entry:
        why = f"A {tensor.unusual.kind if tensor.unusual else 'unusual'} tensor has no plain numbers to show."
        raise ConvertError(what, why=why, fix="ckpt_tools.torch.load gives it as torch has it.")
    if not has_numbers(node.dtype):
        raise ConvertError(what, why=f"It is {node.dtype.name}, for which torch has no numbers.")
    return node


def _read(entry: Entry, axes: Sequence[windows.Axis], report: Shown, *, whole: bool) -> None:
    import torch

    count = math.prod(report.selected)
    if whole and count > _MOST:
        raise UsageError(
            f"`whole`: {count} values are more than fit a report.", fix="Name fewer, or write them: `output=t.npy`."
        )
    parts = _parts(axes, everything=whole or count <= ALL)
    report.axes = [[place for one in part for place in one] for part in parts]
    check_effort([windows.narrowed(entry, [*box]) for box in itertools.product(*parts)])
    blocks = [windows.values(windows.narrowed(entry, [*box])) for box in itertools.product(*parts)]
    for dim in reversed(range(len(parts))):  # boxes side by side, the last dimension first
        several = len(parts[dim])
        blocks = [
            torch.cat(blocks[at : at + several], dim) if several > 1 else blocks[at] for at in range(0, len(blocks), several)
        ]
    found = blocks[0]
    report.texts = windows.texts(found, entry.dtype)
    for dim in reversed([dim for dim, axis in enumerate(axes) if isinstance(axis, int)]):  # of which one place was named
        found = found.squeeze(dim) if found.shape[dim] == 1 else found
    report.values = found.tolist()


def _parts(axes: Sequence[windows.Axis], *, everything: bool) -> list[list[range]]:
    """What is read of each dimension: all that was named, or its two ends."""
    ranges = [range(axis, axis + 1) if isinstance(axis, int) else axis for axis in axes]
    if everything:
        return [[one] for one in ranges]
    for edge in range(_EDGE, 0, -1):
        parts = [[one[part.start : part.stop] for part in windows.elided(len(one), edge)] for one in ranges]
        if math.prod(sum(map(len, part)) for part in parts) <= 10 * ALL:
            return parts
    fix = "Name a box of it, for example NAME[0, ..., :5]."
    raise UsageError(f"A tensor of {len(axes)} dimensions does not fit a page.", fix=fix)


def _write(
    entry: Entry, axes: Sequence[windows.Axis], report: Shown, output: str | os.PathLike[str], *,
    overwrite: bool, progress: Progress | None,
) -> None:  # fmt: skip
    from ckpt_tools.formats.numpy_files import lay_out
    from ckpt_tools.io.content import total
    from ckpt_tools.io.output import check_space, replacing
    from ckpt_tools.io.writer import write
    from ckpt_tools.tree.output_names import check_document

    check_document(output, "an array", ".npy", (report.path,))
    box = windows.narrowed(entry, axes)
    check_effort([box])
    content, dtype, shape = windows.as_array(box)
    kept = [size for size, axis in zip(shape, axes, strict=False) if isinstance(axis, range) or size > 1]
    pieces = lay_out(content, dtype, (*kept, *shape[len(axes) :]))
    with replacing(output, overwrite=overwrite, inputs=(report.path,)) as made:
        check_space(made.target.parent, made.target, total(pieces), fd=made.fd)
        write(pieces, made, progress)
    report.output, report.written = os.fspath(output), dtype.name
