"""How a step of a plan is said (`Form`), what it is for tensors of given shapes (`solve`), and its doing.

Dimensions by name are written as einops writes them: `(heads half 2) ... -> (heads 2 half) ...`. A side lists the dimensions;
those in parentheses are one dimension of the tensor, cut up, the slowest first. A name is a size: one of the plan's values, or
one that the shape settles. `head_size/2` and `groups*4` are worked out; `...` is all others.

Nothing is computed: every element of a result is an element of the input, or what padding holds. So all of it streams.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache, partial
from itertools import accumulate
from math import prod
from typing import TypeAlias

from ckpt_tools.errors import MatchError
from ckpt_tools.io.content import CHUNK, Computed, Content, Literal, chunks
from ckpt_tools.matching.records import Shape
from ckpt_tools.tree.dtypes import DType
from ckpt_tools.tree.nodes import MAX_ELEMENTS, Entry, Storage, contiguous_stride
from ckpt_tools.values.boxes import assemble
from ckpt_tools.values.numeric import View, by_position, gathered, is_by_position, part, row_major, torch_dtype
from ckpt_tools.values.pytorch import need_torch, torch

# --- sizes and dimensions by name

Sizes: TypeAlias = Mapping[str, int]
REST = "..."
_WORD = re.compile(r"\.\.\.|[()]|[A-Za-z0-9_*/-]+|\S")
_FACTOR = re.compile(r"[A-Za-z_][A-Za-z0-9_]*|[1-9][0-9]{0,17}")
_MOST_AXES = 64  # in a text


class MissingSizesError(MatchError):
    """A size that neither the plan nor the shape says."""

    def __init__(self, what: str, names: set[str]) -> None:
        super().__init__(what)
        self.names = names


def size_of(text: str, sizes: Sizes) -> int | None:
    """What `heads`, `12`, `head_size/2` or `groups*4` is; None where a name in it has no size."""
    parts = re.split(r"([*/])", text)
    if not all(_FACTOR.fullmatch(part) for part in parts[::2]):
        raise MatchError(f"{text!r} is not a size.", why="A size is a name, a whole number, or such with * and / between.")
    factors = [int(part) if part.isdigit() else sizes.get(part) for part in parts[::2]]
    result = factors[0]
    for sign, factor in zip(parts[1::2], factors[1:], strict=True):
        if result is None or factor is None:
            return None
        if sign == "/" and (factor == 0 or result % factor):
            raise MatchError(f"{text} leaves a rest: {result} / {factor}.")
        result = result * factor if sign == "*" else result // factor
    if result is not None and result > MAX_ELEMENTS:
        raise MatchError(f"{text} is larger than any tensor.")
    return result


def names_in(text: str) -> set[str]:
    """The names in a size."""
    return {part for part in re.split(r"[*/]", text) if not part.isdigit()}


@dataclass(frozen=True, slots=True)
class Side:
    """The dimensions of a tensor, each one or several axes; `("...",)` for the rest of them."""

    dims: tuple[tuple[str, ...], ...]

    @property
    def axes(self) -> list[str]:
        return [axis for dim in self.dims for axis in dim]

    def solve(self, shape: Shape, sizes: Sizes, label: str) -> Solved:
        """The size of every axis for a tensor of this shape."""
        rest = len(shape) - len(self.dims) + 1 if (REST,) in self.dims else None
        if (rest is None and len(shape) != len(self.dims)) or (rest is not None and rest < 0):
            count = f"{len(self.dims) - (rest is not None)}{' or more' if rest is not None else ''}"
            raise MatchError(f"{label}: {list(shape)} has {len(shape)} dimensions; {self} has {count}.")
        found, at = dict(sizes), 0
        left: Shape = ()
        for dim in self.dims:
            if dim == (REST,):
                left = shape[at : at + (rest or 0)]
                at += rest or 0
            else:
                _settle(dim, shape[at], found, f"{label}: {list(shape)} as {self}")
                at += 1
        return Solved(found, left)

    def __str__(self) -> str:
        return " ".join(f"({' '.join(dim)})" if len(dim) > 1 else dim[0] for dim in self.dims)


@dataclass(frozen=True, slots=True)
class Solved:
    """Sizes by axis, and the shape of the rest."""

    sizes: Sizes
    rest: Shape

    def of(self, *axes: str) -> Shape:
        """The sizes that axes stand for, in their order, the rest where it stands."""
        found: list[int] = []
        for axis in axes:
            size = None if axis == REST else size_of(axis, self.sizes)
            found += self.rest if size is None else (size,)
        return tuple(found)

    def shape(self, side: Side) -> Shape:
        return tuple(size for dim in side.dims for size in (self.rest if dim == (REST,) else (prod(self.of(*dim)),)))

    def cut(self, side: Side, axis: str, sizes: Sequence[int]) -> Layout:
        """The geometry of parts of these sizes along one axis, which is as large as they all."""
        whole = replace(self, sizes={**self.sizes, axis: sum(sizes)})
        before = side.axes[: side.axes.index(axis)]
        return Layout(whole.of(*side.axes), axis=len(whole.of(*before)), sizes=tuple(sizes))


def _settle(dim: Sequence[str], whole: int, found: dict[str, int], label: str) -> None:
    """Find the one size of a dimension that is not known yet."""
    known = {axis: size_of(axis, found) for axis in dim}
    open_axes = [axis for axis, size in known.items() if size is None]
    product = prod(size for size in known.values() if size is not None)
    if len(open_axes) > 1 or (open_axes and names_in(open_axes[0]) != {open_axes[0]}):
        names = {name for axis in open_axes for name in names_in(axis)}
        raise MissingSizesError(f"{label}: {whole} cannot be cut without knowing {' or '.join(sorted(names))}.", names)
    if not open_axes and product != whole:
        shown = " x ".join(f"{axis} {size}" if axis != str(size) else axis for axis, size in known.items())
        raise MatchError(f"{label}: {whole} is not {shown}.")
    if open_axes:
        if product == 0 or whole % product:
            raise MatchError(f"{label}: {whole} cannot be divided by {product}.")
        found[open_axes[0]] = whole // product


@cache
def read_side(text: str) -> Side:
    """The dimensions that a text lists."""
    side = Side(tuple(_dims(text)))
    if not 0 < len(side.axes) <= _MOST_AXES:
        raise MatchError(f"{text[:80]!r} lists {len(side.axes)} axes; there may be 1 to {_MOST_AXES}.")
    if twice := next((axis for axis in side.axes if side.axes.count(axis) > 1), None):
        raise MatchError(f"{text!r} has the axis {twice!r} twice.", fix="Give each a name of its own.")
    for axis in side.axes:
        if axis != REST:
            size_of(axis, {})
    return side


def _dims(text: str) -> Iterator[tuple[str, ...]]:
    group: list[str] | None = None
    for word in _WORD.findall(text[:2000]):
        if word == "(" and group is None:
            group = []
        elif word == ")" and group:
            yield tuple(group)
            group = None
        elif word in "()" or (word == REST and group is not None):
            raise MatchError(f"{text[:80]!r}: {word!r} is not allowed here.")
        elif group is None:
            yield (word,)
        else:
            group.append(word)
    if group is not None or len(text) > 2000:
        raise MatchError(f"{text[:80]!r}: a parenthesis is not closed.")


@cache
def read_arrow(text: str) -> tuple[Side, Side]:
    """Two sides with an arrow between them, of the same axes."""
    before, arrow, after = text.partition("->")
    if not arrow:
        raise MatchError(f"{text[:80]!r} has no arrow: `axes` of a permute is 'a b -> b a'.")
    left, right = read_side(before.strip()), read_side(after.strip())
    if lone := set(left.axes) ^ set(right.axes):
        raise MatchError(f"{text!r} has {min(lone)!r} on one side only.")
    return left, right


# --- forms


@dataclass(frozen=True, slots=True)
class Layout:
    """The geometry of one step, all sizes known."""

    view: Shape
    order: tuple[int, ...] = ()
    axis: int = 0
    sizes: tuple[int, ...] = ()
    fill: float = 0


@dataclass(frozen=True, slots=True)
class Form:
    """What the fields of a step say, sizes still by name."""

    axes: str | None = None
    axis: int | str = 0
    sizes: tuple[str, ...] | None = None
    to: tuple[str, ...] | None = None
    size: str | None = None
    was: str | None = None
    fill: float = 0


FIELDS: dict[str, tuple[str, ...]] = {
    "copy": (), "drop": (), "transpose": (), "reshape": ("to",), "permute": ("axes",),
    "split": ("axes", "axis", "sizes"), "concat": ("axes", "axis", "sizes"), "stack": ("axis",), "unstack": ("axis",),
    "pad": ("axis", "size", "was", "fill"), "crop": ("axis", "size", "was", "fill"),
}  # fmt: skip
SEVERAL_OLD = ("concat", "stack")
SEVERAL_NEW = ("split", "unstack")
_MOST_PARTS = 100_000  # that one tensor is unstacked to: a dimension of a tensor without elements can be of any size


@dataclass(frozen=True, slots=True)
class Task:
    """A form for tensors of these shapes."""

    form: Form
    shapes: Sequence[Shape]
    parts: int | None
    sizes: Sizes
    label: str
    uneven: bool = False

    def error(self, why: str) -> MatchError:
        return MatchError(f"{self.label}: {why}")

    def size(self, text: str) -> int:
        size = size_of(text, self.sizes)
        if size is None:
            names = {name for name in names_in(text) if name not in self.sizes}
            raise MissingSizesError(f"{self.label}: the size {text} is not known.", names)
        return size

    def dim(self, count: int) -> int:
        """The dimension that `axis` says by its number, from the end where it is negative."""
        at = self.form.axis
        if isinstance(at, str):
            raise self.error("`axis` is the number of a dimension here; a name needs `axes`, which a split or a concat has.")
        if not -count <= at < count:
            raise self.error(f"There is no dimension {at} among {count}.")
        return at % count

    def side(self, shape: Shape) -> tuple[Side, str]:
        """The dimensions by name, and the name of the one that is cut; of plain dimensions where none are named."""
        axes, axis = self.form.axes, self.form.axis
        if axes is None:
            return Side(tuple((f"_{dim}",) for dim in range(len(shape)))), f"_{self.dim(len(shape))}"
        if "->" in axes:
            raise self.error("`axes` names the dimensions of the whole here: '(groups part head) ...'.")
        side = read_side(axes)
        if not isinstance(axis, str) or axis not in side.axes or names_in(axis) != {axis}:
            raise self.error(f"`axis` must be one of the names in {axes!r}.")
        return side, axis


Solution: TypeAlias = tuple[Layout, tuple[Shape, ...]]


def solve(step: str, task: Task) -> Solution:
    """The geometry of a step for tensors of given shapes, and the shapes that it makes."""
    return _SOLVERS[step](task, task.shapes[0])


def _transpose(task: Task, shape: Shape) -> Solution:
    if len(shape) != 2:
        raise task.error(f"{list(shape)} is not a matrix: a transpose exchanges two dimensions, a permute any.")
    return Layout(shape, (1, 0)), (shape[::-1],)


def _reshape(task: Task, shape: Shape) -> Solution:
    if task.form.to is None:
        raise task.error("`to` is missing: the new shape.")
    sizes = [-1 if text == "-1" else task.size(text) for text in task.form.to]
    known = prod(size for size in sizes if size != -1)
    if sizes.count(-1) == 1 and known:
        sizes[sizes.index(-1)] = prod(shape) // known
    if -1 in sizes or prod(sizes) != prod(shape):
        raise task.error(f"{list(shape)} cannot be reshaped to [{', '.join(task.form.to)}].")
    return Layout(shape), (tuple(sizes),)


def _permute(task: Task, shape: Shape) -> Solution:
    axes = task.form.axes
    if axes is None:
        raise task.error("`axes` is missing: 'a b -> b a'.")
    before, after = read_arrow(axes)
    solved = before.solve(shape, task.sizes, task.label)
    places, at = {}, 0
    for axis in before.axes:
        places[axis] = range(at, at + len(solved.of(axis)))
        at += len(solved.of(axis))
    order = tuple(place for axis in after.axes for place in places[axis])
    return Layout(solved.of(*before.axes), order), (solved.shape(after),)


def _split(task: Task, shape: Shape) -> Solution:
    side, axis = task.side(shape)
    given = None if task.form.sizes is None else [size_of(text, task.sizes) for text in task.form.sizes]
    known = {name: size for name, size in task.sizes.items() if name != axis}
    if task.form.axes is not None and given is not None and None not in given:
        known[axis] = sum(size for size in given if size is not None)
    solved = side.solve(shape, known, task.label)
    sizes = _parts(task, solved.of(axis)[0], given)
    made = tuple(replace(solved, sizes={**solved.sizes, axis: size}).shape(side) for size in sizes)
    return solved.cut(side, axis, sizes), made


def _parts(task: Task, whole: int, given: list[int | None] | None) -> tuple[int, ...]:
    """The sizes of parts that make a whole."""
    count = task.parts or 0
    if given is None:
        if not count or whole % count:
            raise task.error(f"{whole} cannot be cut into {count} equal parts.")
        return (whole // count,) * count
    if len(given) != count:
        raise task.error(f"`sizes` has {len(given)} sizes for {count} tensors.")
    if given.count(None) > 1:
        names = {name for text in task.form.sizes or () for name in names_in(text) if name not in task.sizes}
        raise MissingSizesError(f"{task.label}: its sizes are not known.", names)
    known = sum(size for size in given if size is not None)
    sizes = tuple(whole - known if size is None else size for size in given)
    if sum(sizes) != whole or min(sizes) < 0:
        raise task.error(f"The sizes {', '.join(map(str, sizes))} do not add up to {whole}.")
    return sizes


def _concat(task: Task, first: Shape) -> Solution:
    form, sizes, wholes = task.form, [], []
    if form.sizes is not None and len(form.sizes) != len(task.shapes):
        raise task.error(f"`sizes` has {len(form.sizes)} sizes for {len(task.shapes)} tensors.")
    for number, shape in enumerate(task.shapes):
        side, axis = task.side(shape)
        wanted = None if form.sizes is None else size_of(form.sizes[number], task.sizes)
        known = {name: size for name, size in task.sizes.items() if name != axis}
        solved = side.solve(shape, known if wanted is None else {**known, axis: wanted}, task.label)
        sizes.append(solved.of(axis)[0])
        wholes.append((replace(solved, sizes={**solved.sizes, axis: 0}).of(*side.axes), solved.rest))
        if wholes[0] != wholes[-1]:
            raise task.error(f"{list(first)} and {list(shape)} cannot be put together along {axis}.")
    if form.sizes is None and not task.uneven and len(set(sizes)) > 1:
        raise task.error(f"Its parts differ ({', '.join(map(str, sizes))}): `sizes` must say so.")
    made = replace(solved, sizes={**solved.sizes, axis: sum(sizes)}).shape(side)
    return solved.cut(side, axis, sizes), (made,)


def _stack(task: Task, shape: Shape) -> Solution:
    if other := next((one for one in task.shapes if one != shape), None):
        raise task.error(f"{list(shape)} and {list(other)} cannot be stacked.")
    at, count = task.dim(len(shape) + 1), len(task.shapes)
    whole = (*shape[:at], count, *shape[at:])
    return Layout(whole, axis=at, sizes=(1,) * count), (whole,)


def _unstack(task: Task, shape: Shape) -> Solution:
    at = task.dim(len(shape))
    count = shape[at]
    if count > _MOST_PARTS:
        raise task.error(f"{list(shape)} would be {count} tensors; {_MOST_PARTS} are the most.")
    if task.parts not in (None, count):
        raise task.error(f"{list(shape)} has {count} to unstack, and there are {task.parts} names.")
    return Layout(shape, axis=at, sizes=(1,) * count), ((*shape[:at], *shape[at + 1 :]),) * count


def _resize(task: Task, shape: Shape, *, larger: bool) -> Solution:
    form, at = task.form, task.dim(len(shape))
    if form.size is None:
        raise task.error("`size` is missing: the new size of the axis.")
    if form.was is not None and (was := size_of(form.was, task.sizes)) not in (None, shape[at]):
        raise task.error(f"Its size is {shape[at]}, not {form.was} = {was}.")
    size, old = task.size(form.size), shape[at]
    made = (*shape[:at], size, *shape[at + 1 :])
    if size != old and (size > old) != larger:
        raise task.error(f"It cannot be {'padded' if larger else 'cropped'} from {old} to {size}.")
    if larger:
        return Layout(made, axis=at, sizes=(old, size - old), fill=form.fill), (made,)
    return Layout(shape, axis=at, sizes=(size, old - size)), (made,)


_SOLVERS: dict[str, Callable[[Task, Shape], Solution]] = {
    "copy": lambda _, shape: (Layout(shape), (shape,)),
    "transpose": _transpose, "reshape": _reshape, "permute": _permute, "split": _split,
    "concat": _concat, "stack": _stack, "unstack": _unstack, "pad": partial(_resize, larger=True),
    "crop": partial(_resize, larger=False),
}  # fmt: skip


# --- tensors


def rearranged(entry: Entry, layout: Layout, shape: Shape) -> Entry:
    """The same elements with their dimensions in another order."""
    view = _viewed(entry, layout)
    sizes, steps = (tuple(field[dim] for dim in layout.order) for field in (view.sizes, view.steps))
    return own(entry, gathered(row_major(entry), entry.dtype.itemsize, View(view.offset, sizes, steps)), shape)


def reshaped(entry: Entry, shape: Shape) -> Entry:
    """The same elements in the same row-major order under another shape. A contiguous entry stays a view on its storage."""
    if not entry.is_contiguous:
        entry = own(entry, row_major(entry), entry.shape)
    return replace(entry, shape=shape, stride=contiguous_stride(shape))


def cut(entry: Entry, layout: Layout, shapes: Sequence[Shape]) -> Iterator[Entry]:
    """The parts of a tensor along one of its dimensions, from its start; each with a storage of its own."""
    view, content = _viewed(entry, layout), row_major(entry)
    for start, size, shape in zip(_starts(layout.sizes), layout.sizes, shapes, strict=False):
        yield own(entry, gathered(content, entry.dtype.itemsize, view.narrowed(layout.axis, start, size)), shape)


def _viewed(entry: Entry, layout: Layout) -> View:
    _check_whole_bytes(entry)
    return View(0, layout.view, contiguous_stride(layout.view))


def _check_whole_bytes(entry: Entry) -> None:
    if entry.dtype.packed > 1:
        raise MatchError(f"A tensor of {entry.dtype.name} has several numbers in a byte: it can only be copied or reshaped.")


def _starts(sizes: Sequence[int]) -> list[int]:
    return [0, *accumulate(sizes)][:-1]


def joined(entries: Sequence[Entry], layout: Layout, shape: Shape) -> Entry:
    """Tensors of one dtype put together along one dimension, with padding behind them."""
    first, view, axis = entries[0], layout.view, layout.axis
    for entry in entries:
        _check_whole_bytes(entry)
    if other := next((entry for entry in entries if entry.dtype is not first.dtype), None):
        text = f"{first.dtype.name} and {other.dtype.name} cannot be put together."
        raise MatchError(text, fix="Cast one first: `dtype`.")
    contents = [row_major(entry) for entry in entries]
    if len(layout.sizes) > len(entries):
        count = layout.sizes[len(entries)] * prod(view[:axis]) * prod(view[axis + 1 :])
        contents.append(_filled(_element(layout.fill, first.dtype), count * first.dtype.itemsize))

    def put(contents: Sequence[Content]) -> Content:
        parts = []
        for start, size, content in zip(_starts(layout.sizes), layout.sizes, contents, strict=True):
            offsets = tuple(start if dim == axis else 0 for dim in range(len(view)))
            parts.append((offsets, (*view[:axis], size, *view[axis + 1 :]), content))
        return assemble("a part", view, first.dtype.itemsize, parts)

    def work() -> Iterator[bytes | memoryview]:
        yield from chunks(put([by_position(content) for content in contents]))

    of = tuple(entry.storage.content for entry in entries)
    plain = put(contents)
    cut_anywhere = None if isinstance(plain, Computed) or not is_by_position(plain) else partial(part, plain)
    return own(first, Computed(plain.length, work, of, cut_anywhere), shape)


def _filled(element: bytes, length: int) -> Content:
    """The same element again and again; a part that begins with an element is such, too."""

    def work() -> Iterator[bytes]:
        block = element * (CHUNK // len(element))
        for start in range(0, length, len(block)):
            yield block[: length - start]

    if length <= CHUNK:
        return Literal(element * (length // len(element)))
    return Computed(length, work, part=lambda _, size: _filled(element, size))


def _element(value: float, dtype: DType) -> bytes:
    if not value:
        return bytes(dtype.itemsize)
    need_torch("Padding with a number is made with it.")
    made = torch.tensor([value], dtype=torch.float64).to(torch_dtype(dtype))
    if made.to(torch.float64).item() != value:
        raise MatchError(f"{dtype.name} cannot hold the fill {value}.", fix="Give one that it can: `fill = 0`.")
    return bytes(made.view(torch.uint8).tolist())


def own(entry: Entry, content: Content, shape: Shape) -> Entry:
    """A row-major entry with a storage of its own for these bytes, worked out of the old entry's."""

    def work() -> Iterator[bytes | memoryview]:
        yield from chunks(content)

    derived = isinstance(content, Computed) and content.of is not None
    cut_anywhere = partial(part, content) if is_by_position(content) else None
    made = content if derived else Computed(content.length, work, entry.storage.content, cut_anywhere)
    storage = Storage(entry.storage.key, entry.dtype, made.length, entry.storage.device, made)
    extras = None if entry.extras is None or entry.lazy_bits else entry.extras
    return replace(entry, storage=storage, shape=shape, stride=contiguous_stride(shape), offset=0, extras=extras)
