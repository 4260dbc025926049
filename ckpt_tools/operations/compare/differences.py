"""What differs between two checkpoints: names, shapes, dtypes, devices, values, objects, and the tensors themselves."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

from ckpt_tools.errors import NothingMatchedError
from ckpt_tools.formats.checkpoint import Checkpoint
from ckpt_tools.formats.contents import StateDict, Tensor
from ckpt_tools.formats.single import collector_paused
from ckpt_tools.io.source import File
from ckpt_tools.io.writer import Progress
from ckpt_tools.operations.compare.report import (
    MOST_FOR_STRUCTURE,
    Change,
    Difference,
    Only,
    Renaming,
    TensorChange,
    ValueChange,
    conclude,
    is_large,
    pair_names,
)
from ckpt_tools.operations.compare.sides import Array, Plain, Side, as_texts, check_effort, open_side
from ckpt_tools.operations.inspect import value_text
from ckpt_tools.parts.open import open_whole
from ckpt_tools.text import did_you_mean, dotted
from ckpt_tools.tree.globs import Globs
from ckpt_tools.tree.nodes import Dict, Entry, Where
from ckpt_tools.tree.options import natural
from ckpt_tools.values.numeric import has_numbers, numbers, one_thread, row_major, same_bytes, same_unusual, view_of
from ckpt_tools.values.pytorch import need_torch
from ckpt_tools.values.statistics import Gap


@natural
def diff(
    left: File, right: File, *, values: bool = False, contents: bool = True, select: str | None = None,
    filter: str | None = None, progress: Progress | None = None,
) -> Difference:  # fmt: skip
    """Compare two checkpoints, whatever their containers.

    The bytes of tensors that have one shape and dtype are compared as they lie in the files, in constant memory.

    Args:
        left, right: the two files.
        values: measure how far tensors are apart, also where their dtypes differ. contents: False compares no tensor bytes.
        select: the dotted path of what is compared; `LEFT=RIGHT` where it differs, "." for the whole file.
        filter: a glob: tensors are compared whose name or path matches, on either side; values and objects are not.
        progress: called with (bytes compared, bytes in total).

    Returns:
        The report. Not compared are strides, ties, `requires_grad` and `_metadata`.

    Raises:
        CkptError: one of the two cannot be read. NothingMatchedError: select or filter matches nothing.
    """
    where_left, equals, where_right = (None, "", None) if select is None else select.partition("=")
    with collector_paused(), open_whole(left) as one, open_whole(right) as other:
        plain: Plain | None = "instead" if values else None
        try:
            sides = open_side(one, where_left, plain), open_side(other, where_right if equals else where_left, plain)
        except NothingMatchedError as error:
            error.fix += "" if equals else " Where the two have it in different places: `select='A_PATH=B_PATH'`."
            raise
        report = Difference(_file(one), _file(other))
        report.notes += [note for side in sides for note in side.notes]
        pairs = _pair_tensors(*sides, report)
        if filter is not None:
            pairs = _filtered(pairs, sides, report, filter)
        _compare_facts(pairs, report)
        if filter is None:
            for where in sides[0].modules.keys() & sides[1].modules.keys():  # else the module is one difference
                for side in sides:
                    module = side.modules[where]
                    side.values |= {(*where, *below): value for below, value in module.values.items()}
                    side.objects |= {(*where, *below): name for below, name in module.objects.items()}
            of_texts = sides[0].texts != sides[1].texts  # one of the containers knows nothing else
            values_of = [as_texts(side.values) if of_texts else side.values for side in sides]
            report.values = [*_compare_kinds(*sides), *_compare_values(*values_of)]
            report.objects = list(_compare_values(sides[0].objects, sides[1].objects))
        if contents:
            _compare_contents(pairs, report, progress, measure=values)
        for checkpoint in (one, other):
            checkpoint.source.check_unchanged()
    conclude(report, [pair.names for pair in pairs if pair.names is not None], contents=contents, pattern=filter)
    return report


def _file(checkpoint: Checkpoint) -> dict[str, Any]:
    return {"path": str(checkpoint.path), "container": checkpoint.container, "bytes": checkpoint.file_bytes}


# --- pairing


@dataclass(frozen=True, slots=True)
class _Paired:
    left: Tensor
    right: Tensor
    names: Renaming | None = None

    @property
    def where(self) -> str:
        return _path(self.left)


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
    for where in left.tensors:
        if where in right.tensors and where not in done[0] and where not in done[1]:
            pairs.append(_Paired(left.tensors[where], right.tensors[where]))
            done[0].add(where)
            done[1].add(where)
    report.removed = [_only(found) for where, found in left.tensors.items() if where not in done[0]]
    report.added = [_only(found) for where, found in right.tensors.items() if where not in done[1]]
    return pairs


def _in_state_dicts(
    left: Side, right: Side, one: StateDict, other: StateDict, names: Sequence[Renaming], report: Difference
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


def _pair_state_dicts(left: Sequence[StateDict], right: Sequence[StateDict]) -> list[tuple[StateDict | None, StateDict | None]]:
    """State dicts by path; those that have no partner with each other, where each side has one of them."""
    others, here = {found.where: found for found in right}, {found.where for found in left}
    pairs = [(found, others.get(found.where)) for found in left]
    rest = [found for found in right if found.where not in here]
    if len(rest) == 1 and sum(other is None for _, other in pairs) == 1:
        return [(found, other or rest[0]) for found, other in pairs]
    return [*pairs, *((None, found) for found in rest)]


def _only(tensor: Tensor) -> Only:
    dtype, shape = _dtype(tensor), _shape(tensor)
    return Only(dotted(tensor.where) or "(root)", dtype, shape, tensor.node.nbytes if type(tensor.node) is Entry else 0)


def _dtype(tensor: Tensor) -> str | None:
    return tensor.scheme or (tensor.dtype.name if tensor.dtype is not None else None)


def _shape(tensor: Tensor) -> list[int] | None:
    return None if tensor.shape is None else list(tensor.shape)


def _filtered(pairs: list[_Paired], sides: tuple[Side, Side], report: Difference, pattern: str) -> list[_Paired]:
    """The pairs of which either side matches; what the report says of names is of them alone too."""
    globs = Globs([pattern])
    left, right = (
        {_path(tensor) for tensor in side.tensors.values() if globs.matching(dotted(tensor.where), tensor.name)}
        for side in sides
    )
    if not left and not right:
        why = did_you_mean(pattern, map(_path, sides[0].tensors.values()))
        raise NothingMatchedError(f"`filter={pattern!r}` matches no tensor of either.", why=why)
    kept = [pair for pair in pairs if _path(pair.left) in left or _path(pair.right) in right]
    names = {(_path(pair.left), _path(pair.right)) for pair in kept}
    report.renamed = [row for row in report.renamed if (row.left, row.right) in names]
    report.removed = [row for row in report.removed if row.where in left]
    report.added = [row for row in report.added if row.where in right]
    report.notes.append("Values and objects were not compared.")
    return kept


def _path(tensor: Tensor) -> str:
    return dotted(tensor.where) or "(root)"


# --- comparing


def _compare_facts(pairs: Sequence[_Paired], report: Difference) -> None:
    for pair in pairs:
        left, right = pair.left, pair.right
        tags = [tensor.node.storage.device if type(tensor.node) is Entry else None for tensor in (left, right)]
        one, other = tags if None not in tags else (None, None)  # safetensors has none
        facts = ((report.shapes, _shape(left), _shape(right)), (report.dtypes, _kind(left), _kind(right)))
        for found, old, new in (*facts, (report.devices, one, other)):
            if old != new:
                found.append(Change(pair.where, old, new))


def _kind(tensor: Tensor) -> str:
    """The dtype, and what kind of unusual tensor it is."""
    return f"{_dtype(tensor) or '?'}{f' {tensor.unusual.kind}' if tensor.unusual else ''}"


def _compare_kinds(left: Side, right: Side) -> Iterator[ValueChange]:
    """A dict, list or tuple where the other side has another one of them."""
    for where, kind in left.containers.items() if left.texts == right.texts else ():
        if (other := right.containers.get(where, kind)) != kind:
            yield ValueChange(dotted(where) or "(root)", "changed", f"a {kind}", f"a {other}")


def _compare_values(left: dict[Where, Any], right: dict[Where, Any]) -> Iterator[ValueChange]:
    texts = Counter(map(dotted, left.keys() | right.keys()))

    def path(where: Where) -> str:
        return (dotted(where) if texts[dotted(where)] == 1 else ".".join(map(repr, where))) or "(root)"

    for where, old in left.items():
        if where not in right:
            yield ValueChange(path(where), "removed", left=_text(old))
        elif type(old) is not type(right[where]) or (old != right[where] and repr(old) != repr(right[where])):
            yield ValueChange(path(where), "changed", _text(old), _text(right[where]))
    for where, new in right.items():
        if where not in left:
            yield ValueChange(path(where), "added", right=_text(new))


def _text(value: Any) -> Any:
    if type(value) is Dict:
        return "an empty dict"
    return str(value) if type(value) is Array else value_text(value)


def _compare_contents(pairs: Sequence[_Paired], report: Difference, progress: Progress | None, *, measure: bool) -> None:
    """The tensors themselves; tied ones, which are the same bytes under several names, once."""
    for side in ("left", "right"):
        check_effort(node for pair in pairs if type(node := getattr(pair, side).node) is Entry)
    counts = Counter(compared=0, equal=0, different=0, skipped=0)
    known: dict[Any, tuple[TensorChange | None, Gap | None]] = {}
    equal: list[Entry] = []
    total, done = sum(pair.left.node.nbytes for pair in pairs if type(pair.left.node) is Entry), 0
    for pair in pairs:
        if _shape(pair.left) != _shape(pair.right) or (_kind(pair.left) != _kind(pair.right) and not measure):
            counts["skipped"] += 1
            continue
        left, right = pair.left.node, pair.right.node
        key = (view_of(left), view_of(right)) if type(left) is Entry and type(right) is Entry else id(pair)
        if key not in known:
            known[key] = _compare_tensor(pair, measure=measure)
            if known[key] == (None, None) and type(left) is Entry and has_numbers(left.dtype):
                equal.append(left)
        change = known[key][0]
        counts["compared"] += 1
        counts["different" if change else "equal"] += 1
        if change:
            report.changed.append(replace(change, where=pair.where, right=_path(pair.right)))
        done += left.nbytes if type(left) is Entry else 0
        if progress is not None:
            progress(done, total)
    report.tensors = dict(counts)
    if gaps := [gap for _, gap in known.values() if gap is not None]:  # all tensors together, as if they were one
        gaps += [_gap(entry, None) for entry in equal]
        together = type(gaps[0])()
        for gap in gaps:
            together.merge(gap)
        told = together.to_json()
        report.distance = {"tensors": len(gaps)} | {
            name: told[name] for name in ("elements", "nonfinite", "relative_l2", "cosine")
        }


def _compare_tensor(pair: _Paired, *, measure: bool) -> tuple[TensorChange | None, Gap | None]:
    """What differs in one tensor, None for equal bytes or numbers; how far the sides are apart, where that is asked for."""
    left, right = pair.left.node, pair.right.node
    change = TensorChange(pair.where, "", _dtype(pair.left), _shape(pair.left))
    if type(left) is not Entry or type(right) is not Entry:
        kinds = {tensor.unusual.kind for tensor in (pair.left, pair.right) if tensor.unusual}
        reason = f"{', '.join(sorted(kinds))}: bytes compared only"
        return None if same_unusual(left, right) else replace(change, reason=reason), None
    if left.dtype is right.dtype and same_bytes(left, right):
        return None, None
    if not measure:
        return change, None
    if not (has_numbers(left.dtype) and has_numbers(right.dtype)):
        return replace(change, reason=f"torch has no numbers for {left.dtype.name}"), None
    if left.nbytes // left.dtype.itemsize * left.dtype.packed != right.nbytes // right.dtype.itemsize * right.dtype.packed:
        return replace(change, reason="another number of values"), None
    gap = _gap(left, right)
    told = gap.to_json()
    if left.dtype is not right.dtype and left.dtype.family == right.dtype.family and not told["changed"]:
        return None, gap  # the same numbers: only the dtype differs, which is told
    return replace(change, gap=told), gap


def _gap(left: Entry, right: Entry | None) -> Gap:
    """How far two tensors are apart; without a right one, the same bytes, how long they are."""
    need_torch("How far numbers are apart is worked out with it.")
    from ckpt_tools.values.statistics import Gap

    gap = Gap()
    with one_thread():
        if right is None:
            for block in numbers(row_major(left), left.dtype):
                gap.add_equal(block)
            return gap
        whole = left.dtype.family == right.dtype.family == "int"  # those beyond 2**53 are not what they are as floats
        sides = (numbers(row_major(side), side.dtype, as_floats=not whole) for side in (left, right))
        for one, other in zip(*sides, strict=True):
            gap.add(one, other)
    return gap
