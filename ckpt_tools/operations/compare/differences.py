"""What differs between two checkpoints: names, shapes, dtypes, devices, values, objects, and the tensors themselves."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from ckpt_tools.formats.open import (
    Checkpoint,
    StateDict,
    Tensor,
    collector_paused,
)
from ckpt_tools.formats.parts.named import open_whole
from ckpt_tools.io.member_paths import File
from ckpt_tools.operations.compare.renames import (
    MOST_FOR_STRUCTURE,
    NamePair,
    is_large,
    pair_names,
)
from ckpt_tools.operations.compare.report import (
    Change,
    Difference,
    Only,
    Renaming,
    TensorChange,
    ValueChange,
    conclude,
)
from ckpt_tools.operations.compare.sides import (
    Array,
    Plain,
    Side,
    as_texts,
    check_effort,
    open_side,
)
from ckpt_tools.operations.inspect import value_text
from ckpt_tools.text import dotted
from ckpt_tools.tree.arguments import natural
from ckpt_tools.tree.nodes import Entry
from ckpt_tools.values.numeric import (
    has_numbers,
    numbers,
    one_thread,
    row_major,
    view_of,
)
from ckpt_tools.values.same_bytes import same_bytes, same_unusual

if TYPE_CHECKING:
    from ckpt_tools.io.writer import Progress
    from ckpt_tools.values.measures import Gap


@natural
def diff(
    left: File,
    right: File,
    *,
    values: bool = False,
    contents: bool = True,
    select: str | None = None,
    progress: Progress | None = None,
) -> Difference:
    """Compare two checkpoints, whatever their containers.

    The bytes of tensors that have one shape and dtype are compared as they lie in the files, in constant memory.

    Args:
        left, right: the two files.
        values: measure how far tensors are apart, also where their dtypes differ. contents: False compares no tensor bytes.
        select: the dotted path of what is compared; `LEFT=RIGHT` where it differs, "." for the whole file.
        progress: called with (bytes compared, bytes in total).

    Returns:
        The report. Not compared are strides, ties, `requires_grad` and `_metadata`.

    Raises:
        CkptError: one of the two cannot be read.
    """
    where_left, where_right = _places(select)
    with collector_paused(), open_whole(left) as one, open_whole(right) as other:
        plain: Plain | None = "instead" if values else None
        sides = open_side(one, where_left, plain), open_side(other, where_right, plain)
        report = Difference(_file(one), _file(other))
        report.notes += [note for side in sides for note in side.notes]
        pairs = _pair_tensors(*sides, report)
        _compare_facts(pairs, report)
        _join_modules(*sides)
        report.values = list(_compare_values(*_values(*sides)))
        report.objects = list(_compare_values(sides[0].objects, sides[1].objects))
        if contents:
            _compare_contents(pairs, report, progress, measure=values)
        for checkpoint in (one, other):
            checkpoint.decoded.source.check_unchanged()
    conclude(report, [pair.names for pair in pairs if pair.names is not None], sides, contents=contents)
    return report


def _file(checkpoint: Checkpoint) -> dict[str, Any]:
    return {"path": str(checkpoint.path), "container": checkpoint.container, "bytes": checkpoint.file_bytes}


def _places(select: str | None) -> tuple[str | None, str | None]:
    left, equals, right = (select or "").partition("=")
    return (left, right) if equals else (select, select)


# --- pairing


@dataclass(frozen=True, slots=True)
class _Paired:
    """A tensor on both sides."""

    left: Tensor
    right: Tensor
    names: NamePair | None = None

    @property
    def where(self) -> str:
        return dotted(self.left.where) or "(root)"


def _pair_tensors(left: Side, right: Side, report: Difference) -> list[_Paired]:
    """Tensors of paired state dicts by name, all others by path; what has no partner goes into the report."""
    pairs: list[_Paired] = []
    for one, other in _pair_state_dicts(left.state_dicts, right.state_dicts):
        names = pair_names(one, other) if one and other else []
        ends = (list(found.where) if found else None for found in (one, other))
        moved = one is not None and other is not None and one.where != other.where
        report.state_dicts.append(dict(zip(("left", "right"), ends, strict=True)) | {"shared": len(names), "moved": moved})
        if one and other:
            pairs += _in_state_dicts(left, right, one, other, names, report)
    done = {pair.left.where for pair in pairs}, {pair.right.where for pair in pairs}
    both = [where for where in left.tensors if where in right.tensors and where not in done[0] and where not in done[1]]
    for where in both:
        pairs.append(_Paired(left.tensors[where], right.tensors[where]))
        done[0].add(where)
        done[1].add(where)
    report.removed = [_only(found) for where, found in left.tensors.items() if where not in done[0]]
    report.added = [_only(found) for where, found in right.tensors.items() if where not in done[1]]
    return pairs


def _in_state_dicts(
    left: Side, right: Side, one: StateDict, other: StateDict, names: Sequence[NamePair], report: Difference
) -> Iterator[_Paired]:
    for pair in names:
        old, new = (*one.where, pair.left), (*other.where, pair.right)
        if pair.left != pair.right:
            report.renamed.append(Renaming(dotted(old), dotted(new), pair.reason))
        yield _Paired(left.tensors[old], right.tensors[new], pair)
    if is_large(one, other) and len(names) < max(len(one.names), len(other.names)):
        report.notes.append(f"More than {MOST_FOR_STRUCTURE:,} names differ: they were not paired by structure.")
    partners = {pair.right for pair in names}
    if [pair.right for pair in names] != [name for name in other.names if name in partners]:
        report.notes.append(f"{dotted(one.where) or '(root)'}: the names come in another order.")


def _pair_state_dicts(
    left: Sequence[StateDict], right: Sequence[StateDict]
) -> Iterator[tuple[StateDict | None, StateDict | None]]:
    """State dicts by path; those left over with each other, where each side has one of them."""
    others = {found.where: found for found in right}
    here = {found.where for found in left}
    rest_left = [found for found in left if found.where not in others]
    rest_right = [found for found in right if found.where not in here]
    single = len(rest_left) == len(rest_right) == 1
    for found in left:
        yield found, others.get(found.where, rest_right[0] if single else None)
    for found in () if single else rest_right:
        yield None, found


def _only(tensor: Tensor) -> Only:
    dtype, shape = _dtype(tensor), _shape(tensor)
    return Only(dotted(tensor.where) or "(root)", dtype, shape, tensor.node.nbytes if type(tensor.node) is Entry else 0)


def _dtype(tensor: Tensor) -> str | None:
    if tensor.scheme:
        return tensor.scheme
    found = tensor.node.dtype if type(tensor.node) is Entry else tensor.unusual.dtype if tensor.unusual else None
    return found.name if found is not None else None


def _shape(tensor: Tensor) -> list[int] | None:
    found = tensor.node.shape if type(tensor.node) is Entry else tensor.unusual.shape if tensor.unusual else None
    return list(found) if found is not None else None


# --- comparing


def _compare_facts(pairs: Sequence[_Paired], report: Difference) -> None:
    for pair in pairs:
        left, right = pair.left, pair.right
        for found, old, new in (
            (report.shapes, _shape(left), _shape(right)),
            (report.dtypes, _kind(left), _kind(right)),
            (report.devices, *_devices(left, right)),
        ):
            if old != new:
                found.append(Change(pair.where, old, new))


def _kind(tensor: Tensor) -> str:
    """The dtype, and what kind of unusual tensor it is."""
    return f"{_dtype(tensor) or '?'}{f' {tensor.unusual.kind}' if tensor.unusual else ''}"


def _devices(left: Tensor, right: Tensor) -> tuple[str | None, str | None]:
    """The device tags, where both have one: safetensors has none."""
    tags = [tensor.node.storage.device if type(tensor.node) is Entry else None for tensor in (left, right)]
    return (None, None) if None in tags else (tags[0], tags[1])


def _join_modules(left: Side, right: Side) -> None:
    """What is in a pickled module counts where the other side has one too; else the module is one difference."""
    for where in left.modules.keys() & right.modules.keys():
        for side in (left, right):
            module, prefix = side.modules[where], f"{where}." if where else ""
            side.values |= {f"{prefix}{below}": value for below, value in module.values.items()}
            side.objects |= {f"{prefix}{below}": name for below, name in module.objects.items()}


def _values(left: Side, right: Side) -> tuple[dict[str, Any], dict[str, Any]]:
    """The values of both, as text where one of the containers knows nothing else."""
    if left.texts == right.texts:
        return left.values, right.values
    return as_texts(left.values), as_texts(right.values)


def _compare_values(left: dict[str, Any], right: dict[str, Any]) -> Iterator[ValueChange]:
    for where, old in left.items():
        if where not in right:
            yield ValueChange(where or "(root)", "removed", left=_text(old))
        elif type(old) is not type(right[where]) or (old != right[where] and repr(old) != repr(right[where])):
            yield ValueChange(where or "(root)", "changed", _text(old), _text(right[where]))
    for where, new in right.items():
        if where not in left:
            yield ValueChange(where or "(root)", "added", right=_text(new))


def _text(value: Any) -> Any:
    return str(value) if type(value) is Array else value_text(value)


def _compare_contents(pairs: Sequence[_Paired], report: Difference, progress: Progress | None, *, measure: bool) -> None:
    """The tensors themselves; tied ones, which are the same bytes under several names, once."""
    for side in ("left", "right"):
        check_effort(node for pair in pairs if type(node := getattr(pair, side).node) is Entry)
    counts = Counter(compared=0, equal=0, different=0, skipped=0)
    known: dict[Any, TensorChange | None] = {}
    total = sum(pair.left.node.nbytes for pair in pairs if type(pair.left.node) is Entry)
    done = 0
    for pair in pairs:
        if _shape(pair.left) != _shape(pair.right) or (_kind(pair.left) != _kind(pair.right) and not measure):
            counts["skipped"] += 1
            continue
        left, right = pair.left.node, pair.right.node
        key = (view_of(left), view_of(right)) if type(left) is Entry and type(right) is Entry else id(pair)
        if key not in known:
            known[key] = _compare_tensor(pair, measure=measure)
        change = known[key]
        counts["compared"] += 1
        counts["different" if change else "equal"] += 1
        if change:
            there = dotted(pair.right.where) or "(root)"
            report.changed.append(TensorChange(pair.where, there, change.dtype, change.shape, change.gap, change.reason))
        done += left.nbytes if type(left) is Entry else 0
        if progress is not None:
            progress(done, total)
    report.tensors = dict(counts)


def _compare_tensor(pair: _Paired, *, measure: bool) -> TensorChange | None:
    """None for equal bytes; how far the values are apart, where that is asked for."""
    left, right = pair.left.node, pair.right.node
    change = TensorChange(pair.where, "", _dtype(pair.left), _shape(pair.left))
    if type(left) is not Entry or type(right) is not Entry:
        kinds = {tensor.unusual.kind for tensor in (pair.left, pair.right) if tensor.unusual}
        reason = f"{', '.join(sorted(kinds))}: bytes compared only"
        return None if same_unusual(left, right) else _with(change, reason=reason)
    if left.dtype is right.dtype and same_bytes(left, right):
        return None
    if not measure:
        return change
    if not (has_numbers(left.dtype) and has_numbers(right.dtype)):
        return _with(change, reason=f"torch has no numbers for {left.dtype.name}")
    if left.nbytes // left.dtype.itemsize * left.dtype.packed != right.nbytes // right.dtype.itemsize * right.dtype.packed:
        return _with(change, reason="another number of values")
    return _with(change, gap=_gap(left, right).to_json())


def _with(change: TensorChange, gap: dict[str, Any] | None = None, reason: str = "") -> TensorChange:
    return TensorChange(change.where, change.right, change.dtype, change.shape, gap, reason)


def _gap(left: Entry, right: Entry) -> Gap:
    from ckpt_tools.values.measures import Gap

    gap = Gap()
    with one_thread():
        for one, other in zip(numbers(row_major(left), left.dtype), numbers(row_major(right), right.dtype), strict=True):
            gap.add(one, other)
    return gap
