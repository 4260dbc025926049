"""How a step of a plan is said (`Form`), and what it is for tensors of given shapes (`solve`)."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from math import prod
from typing import TypeAlias

from ckpt_tools.errors import MatchError
from ckpt_tools.fit.axes import Layout, MissingSizesError, Side, Sizes, names_in, read_arrow, read_side, size_of
from ckpt_tools.matching.records import Shape


@dataclass(frozen=True, slots=True)
class Form:
    """What the fields of a step say, sizes still by name."""

    axes: str | tuple[int, ...] | None = None
    axis: int | str = 0
    sizes: tuple[str, ...] | None = None
    to: tuple[str, ...] | None = None
    dims: tuple[int, int] | None = None
    size: str | None = None
    was: str | None = None
    fill: float = 0


FIELDS: dict[str, tuple[str, ...]] = {
    "copy": (), "drop": (), "transpose": (), "reshape": ("to",), "flatten": ("dims",), "permute": ("axes",),
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

    def dim(self, count: int, at: int | str | None = None) -> int:
        """A dimension by its number, from the end where it is negative; that of `axis` where none is given."""
        at = self.form.axis if at is None else at
        if isinstance(at, str):
            raise self.error("'axis' is the number of a dimension here; a name needs 'axes', which a split or a concat has.")
        if not -count <= at < count:
            raise self.error(f"There is no dimension {at} among {count}.")
        return at % count

    def side(self, shape: Shape) -> tuple[Side, str]:
        """The dimensions by name, and the name of the one that is cut; of plain dimensions where none are named."""
        axes, axis = self.form.axes, self.form.axis
        if axes is None:
            return Side(tuple((f"_{dim}",) for dim in range(len(shape)))), f"_{self.dim(len(shape))}"
        if not isinstance(axes, str) or "->" in axes:
            raise self.error("'axes' names the dimensions of the whole here: '(groups part head) ...'.")
        side = read_side(axes)
        if not isinstance(axis, str) or axis not in side.axes or names_in(axis) != {axis}:
            raise self.error(f"'axis' must be one of the names in {axes!r}.")
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
        raise task.error("'to' is missing: the new shape.")
    sizes = [-1 if text == "-1" else task.size(text) for text in task.form.to]
    known = prod(size for size in sizes if size != -1)
    if sizes.count(-1) == 1 and known:
        sizes[sizes.index(-1)] = prod(shape) // known
    if -1 in sizes or prod(sizes) != prod(shape):
        raise task.error(f"{list(shape)} cannot be reshaped to [{', '.join(task.form.to)}].")
    return Layout(shape), (tuple(sizes),)


def _flatten(task: Task, shape: Shape) -> Solution:
    if not shape:
        return Layout(shape), ((1,),)
    first, last = (task.dim(len(shape), at) for at in task.form.dims or (0, -1))
    if first > last:
        raise task.error(f"'dims' are the first and the last dimension to flatten, not {first} and {last}.")
    return Layout(shape), ((*shape[:first], prod(shape[first : last + 1]), *shape[last + 1 :]),)


def _permute(task: Task, shape: Shape) -> Solution:
    axes = task.form.axes
    if axes is None:
        raise task.error("'axes' is missing: 'a b -> b a', or the dimensions' numbers in their new order.")
    if not isinstance(axes, str):
        if sorted(axes) != list(range(len(shape))):
            raise task.error(f"{list(axes)} is not an order of the {len(shape)} dimensions of {list(shape)}.")
        return Layout(shape, axes), (tuple(shape[dim] for dim in axes),)
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
        raise task.error(f"'sizes' has {len(given)} sizes for {count} tensors.")
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
        raise task.error(f"'sizes' has {len(form.sizes)} sizes for {len(task.shapes)} tensors.")
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
        raise task.error(f"Its parts differ ({', '.join(map(str, sizes))}): 'sizes' must say so.")
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
        raise task.error("'size' is missing: the new size of the axis.")
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
    "transpose": _transpose, "reshape": _reshape, "flatten": _flatten, "permute": _permute, "split": _split,
    "concat": _concat, "stack": _stack, "unstack": _unstack, "pad": partial(_resize, larger=True),
    "crop": partial(_resize, larger=False),
}  # fmt: skip
