"""The one door to torch for work on values: casts, gathers, numbers to measure. torch is imported inside the functions."""

from __future__ import annotations

import array
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace

from ckpt_tools.errors import ConvertError
from ckpt_tools.io.content import (
    CHUNK,
    Computed,
    Content,
    Deflated,
    Joined,
    Literal,
    Part,
    Range,
    chunks,
    equal_chunks,
    read,
    read_into,
)
from ckpt_tools.tree.dtypes import DTYPES, DType
from ckpt_tools.tree.nodes import PLAIN, Entry, Global, Node, Object, Storage
from ckpt_tools.tree.visit import reachable, walk
from ckpt_tools.values.pytorch import need_torch, torch

# Elements that are worked on at once: fewer than torch shares among threads (at::internal::GRAIN_SIZE, 32768). They fit a
# cache, and threads that wait for each other on a busy machine take a hundred times as long.
ELEMENTS = 32_704
GATHERING = "Elements that are not stored one after another (of a transposed tensor, say) are put in order with it."
_ARRAY_TYPES = {2: "H", 4: "I", 8: "Q"}
# Dtypes of so many bytes that torch can copy: quantised ones and others have no copy of their own.
_SAME_WIDTH = {1: "uint8", 2: "int16", 4: "int32", 8: "int64", 16: "complex128"}


@dataclass(slots=True)
class CastCount:
    overflowed: int = 0
    underflowed: int = 0
    saturated: int = 0
    nan: int = 0

    @property
    def told(self) -> str:
        """What a cast lost, in words; "" for nothing."""
        became = ((self.overflowed, "infinite"), (self.underflowed, "zero"), (self.saturated, "the largest of the dtype"))
        return ", ".join(f"{count} {'value' if count == 1 else 'values'} became {what}" for count, what in became if count)


def cast(content: Content, source: DType, target: DType, count: CastCount) -> Computed:
    """The content cast from one float dtype to another, a chunk at a time."""

    def work(content: Content) -> Iterator[memoryview]:
        dtype = torch_dtype(source)
        for block in equal_chunks(content, ELEMENTS * source.itemsize):
            yield as_bytes(torch.frombuffer(bytearray(block), dtype=dtype), target, count)

    return elementwise(content, source.itemsize, target.itemsize, work)


def narrow(old: torch.Tensor, new: torch.Tensor, count: CastCount) -> None:
    """Write values into a tensor of another float dtype, and count those that do not survive it."""
    before, after = torch.finfo(old.dtype), torch.finfo(new.dtype)
    new.copy_(_saturated(old, new.dtype, count) if new.itemsize == 1 and before.max > after.max else old)
    wide, narrowed = (part if part.itemsize > 1 else part.float() for part in (old, new))  # fp8 has no isfinite
    if before.max > after.max:  # bf16 -> fp16 too, of the same size
        count.overflowed += 0 if is_finite(narrowed) else int((wide.isfinite() & ~narrowed.isfinite()).sum())
    fewer = before.smallest_normal < after.smallest_normal or new.itemsize < old.itemsize  # bf16 has fp32's exponents
    if fewer and not narrowed.abs().amin() > 0:  # NaN is not
        count.underflowed += int(torch.count_nonzero(wide)) - int(torch.count_nonzero(narrowed))


def is_finite(values: torch.Tensor) -> bool:
    """Whether all values are finite, of which there are some, by their extremes: masks take 50 times as long."""
    return all(extreme.isfinite() for extreme in torch.aminmax(values))  # NaN where there is one


def _saturated(values: torch.Tensor, dtype: torch.dtype, count: CastCount) -> torch.Tensor:
    """The values within the range of an fp8 dtype; an infinity stays one where the dtype has them."""
    largest = torch.finfo(dtype).max
    wide = values.float() if values.itemsize == 1 else values  # a float64 beyond float32 is finite too
    beyond = wide.abs() > largest
    if dtype is torch.float8_e5m2:
        beyond &= ~wide.isinf()
    count.saturated += int(beyond.sum())
    return values.float().clamp(-largest, largest).where(beyond, values.float()) if bool(beyond.any()) else values


def torch_dtype(dtype: DType) -> torch.dtype:
    found = getattr(torch, dtype.name, None)
    if not isinstance(found, torch.dtype):
        raise ConvertError(f"PyTorch {torch.__version__} has no {dtype.name}.", fix="A newer one may have it.")
    return found


def swapped(content: Content, width: int) -> Content:
    """The content with the bytes of every `width`-byte number reversed."""

    def work(content: Content) -> Iterator[bytes]:
        for chunk in equal_chunks(content):
            numbers = array.array(_ARRAY_TYPES[width], chunk)
            numbers.byteswap()
            yield numbers.tobytes()

    return content if width == 1 else elementwise(content, width, width, work)


def elementwise(content: Content, before: int, after: int, work: Callable[[Content], Iterator[bytes | memoryview]]) -> Computed:
    """Worked out of a content, `after` bytes of each `before`: a range of it needs the elements that it touches alone."""

    def inside(start: int, length: int) -> Content:
        first, last = start // after, -(-(start + length) // after)
        elements = part(content, first * before, (last - first) * before)
        return trimmed(elementwise(elements, before, after, work), start - first * after, length)

    return Computed(content.length // before * after, lambda: work(content), content, inside)


def part(content: Content, start: int, length: int) -> Content:
    if start == 0 and length == content.length:
        return content
    if type(content) is Range:
        return Range(content.source, content.offset + start, length)
    if isinstance(content, Range):
        return Part(content.source, content.offset + start, length, content.of if isinstance(content, Part) else content)
    if isinstance(content, Literal):
        return Literal(content.data[start : start + length])
    if isinstance(content, Joined):
        return Joined(tuple(_parts(content, start, length)))
    if isinstance(content, Computed) and content.part is not None:
        return content.part(start, length)
    return trimmed(content, start, length)


def trimmed(content: Content, start: int, length: int) -> Content:
    """A range of a content, of which all that is before is worked out and passed over."""
    if start == 0 and length == content.length:
        return content

    def work() -> Iterator[memoryview]:
        at = 0
        for chunk in chunks(content):
            view = memoryview(chunk)[max(0, start - at) : max(0, start + length - at)]
            at += len(chunk)
            if len(view):
                yield view
            if at >= start + length:
                return

    return Computed(length, work, content)


def _parts(content: Joined, start: int, length: int) -> Iterator[Content]:
    """What of each of the joined contents is in a range of all of them."""
    for one in content.parts:
        first, end = max(0, start), min(one.length, start + length)
        if first < end:
            yield part(one, first, end - first)
        start -= one.length


def row_major(entry: Entry) -> Content:
    """The bytes of an entry, row-major: a range of its storage where it is contiguous, else gathered."""
    item = entry.dtype.itemsize
    if not entry.nbytes or (entry.is_contiguous and not entry.lazy_bits):
        return part(entry.storage.content, entry.offset * item if entry.nbytes else 0, entry.nbytes)
    content = _gathered(entry)
    if not entry.lazy_bits:
        return content
    need_torch(GATHERING)

    def work() -> Iterator[memoryview]:
        for chunk in equal_chunks(content):
            values = torch.frombuffer(bytearray(chunk), dtype=torch_dtype(entry.dtype))
            values = values.conj() if "conj" in entry.lazy_bits else values
            yield tensor_bytes(-values if "neg" in entry.lazy_bits else values)

    return Computed(entry.nbytes, work, entry.storage.content)


def cut_along(entry: Entry, dim: int, first: int, size: int) -> Entry:
    shape = (*entry.shape[:dim], size, *entry.shape[dim + 1 :])
    return replace(entry, shape=shape, offset=entry.offset + first * entry.stride[dim])


_GAP = 64 << 10  # bytes that are read along with what is wanted, in the place of another read
_AT_ONCE = 4 * CHUNK  # bytes of a view without large gaps that are read at once, where the order of the file is the view's


def _gathered(entry: Entry) -> Content:
    """The bytes of a view with elements, row-major. A view without gaps stays a part of the content."""
    content, item = entry.storage.content, entry.dtype.itemsize
    if entry.is_contiguous:
        return part(content, entry.offset * item, entry.numel * item)
    need_torch(GATHERING)
    dims = [dim for dim, size in enumerate(entry.shape) if size > 1]
    shape, stride = (tuple(field[dim] for dim in dims) for field in (entry.shape, entry.stride))
    view = replace(entry, shape=shape, stride=stride)

    def work() -> Iterator[memoryview]:
        source = by_position(content)
        for piece in _pieces(view):
            data = bytearray(piece.span * item)
            read_into(part(source, piece.offset * item, len(data)), memoryview(data))
            values = torch.frombuffer(data, dtype=getattr(torch, _SAME_WIDTH[item]))
            yield from map(tensor_bytes, blocks(values.as_strided(piece.shape, piece.stride)))

    def some(start: int, length: int) -> Content:
        """A range: the rows that it touches, gathered, without what is too much at both ends."""
        row = view.numel // shape[0] * item
        first, last = start // row, max(start // row, (start + length - 1) // row)
        return trimmed(_gathered(cut_along(view, 0, first, last - first + 1)), start - first * row, length)

    return Computed(view.numel * item, work, content, part=some if is_by_position(content) else None)


def _pieces(view: Entry) -> Iterator[Entry]:
    """A view in parts, one behind the other, each read at once; one part alone where its first dimension is an inner one."""
    dim = next((dim for dim, size in enumerate(view.shape) if size > 1), 0)
    limit = (_AT_ONCE if view.span <= 4 * view.numel else _GAP) // view.dtype.itemsize
    if view.span <= limit or view.stride[dim] < max(view.stride[dim:]):
        yield view
        return
    rows = max(1, (limit - cut_along(view, dim, 0, 1).span) // view.stride[dim])
    for first in range(0, view.shape[dim], rows):
        yield from _pieces(cut_along(view, dim, first, min(rows, view.shape[dim] - first)))


def by_position(content: Content) -> Content:
    """A content whose parts can be read in any order; one that is worked out or inflated is held in memory."""
    if isinstance(content, Joined):
        return Joined(tuple(by_position(one) for one in content.parts))
    return content if is_by_position(content) else Literal(read(content))


def is_by_position(content: Content) -> bool:
    """Whether a part of a content can be had without what is before it."""
    if isinstance(content, Joined):
        return all(map(is_by_position, content.parts))
    return not isinstance(content, Deflated) and (not isinstance(content, Computed) or content.part is not None)


def live_content(tensor: torch.Tensor) -> Computed:
    return Computed(tensor.nbytes, lambda: map(tensor_bytes, blocks(tensor.detach())))


def tensor_bytes(values: torch.Tensor) -> memoryview:
    out = bytearray(values.nbytes)
    if out:
        torch.frombuffer(out, dtype=values.dtype).copy_(values.resolve_conj().reshape(-1))
    return memoryview(out)


def blocks(values: torch.Tensor) -> Iterator[torch.Tensor]:
    """A tensor in row-major blocks of a few megabytes. An expanded one can be far larger than its storage and the memory."""
    values = values.squeeze()
    if values.nbytes <= CHUNK:
        yield values
    elif rows := CHUNK // (values.nbytes // len(values)):
        for start in range(0, len(values), rows):
            yield values[start : start + rows]
    else:
        for row in range(len(values)):
            yield from blocks(values[row])


def view_of(entry: Entry) -> tuple[int, str]:
    """What two entries have in common that are one and the same view."""
    return id(entry.storage), str((entry.dtype.name, entry.shape, entry.stride, entry.offset, *sorted(entry.lazy_bits)))


# --- whether two tensors hold the same bytes, told by reading both side by side


def same_bytes(left: Entry, right: Entry) -> bool:
    """Whether two entries of one dtype and shape hold the same bytes, row-major."""
    if (left.stride, left.lazy_bits) == (right.stride, right.lazy_bits) and same_content(_span(left), _span(right)):
        return True
    return same_content(row_major(left), row_major(right))


def _span(entry: Entry) -> Content:
    # a contiguous one by bytes: an element may be less than one
    length = entry.nbytes if entry.is_contiguous else entry.span * entry.dtype.itemsize
    return part(entry.storage.content, entry.offset * entry.dtype.itemsize if length else 0, length)


def same_content(left: Content, right: Content) -> bool:
    """Whether two contents are the same bytes; reading stops at the first that are not."""
    if left.length != right.length:
        return False
    return all(one == other for one, other in zip(equal_chunks(left), equal_chunks(right), strict=True))


def same_unusual(left: Node, right: Node) -> bool:
    """Whether two sparse, quantised or nested tensors are rebuilt from the same bytes with the same arguments."""
    if type(left) is not Object or type(right) is not Object or _arguments(left) != _arguments(right):
        return False
    storages = [[node for node in reachable(tensor) if type(node) is Storage] for tensor in (left, right)]
    if len(storages[0]) != len(storages[1]):
        return False
    return all(same_content(one.content, other.content) for one, other in zip(*storages, strict=True))


def _arguments(root: Node) -> list[str]:
    """Everything but the storages that a tensor is rebuilt from, as text."""
    found = []
    for where, node in walk(root):
        if type(node) is Entry:
            found.append(f"{where} {node.dtype.name} {node.shape} {node.stride} {node.offset}")
        elif type(node) in PLAIN or type(node) is Global:
            found.append(f"{where} {node!r}" if type(node) is not int or node.bit_length() < 64 else f"{where} int")
        elif type(node) is Storage:
            found.append(f"{where} {node.dtype.name if node.dtype else None} {node.nbytes}")
    return found


# --- values


HALVES = {"complex32": "float16", "complex64": "float32", "complex128": "float64"}
# The values of float4_e2m1fn: 1 bit of sign, 2 of exponent, 1 of mantissa (OCP Microscaling Formats, section 5.3.3).
E2M1 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0, -0.0, -0.5, -1.0, -1.5, -2.0, -3.0, -4.0, -6.0)


def has_numbers(dtype: DType) -> bool:
    """Whether torch can tell the values of a dtype: not of quantised ones without their scale, bits, and ints below a byte."""
    if dtype.family in ("quantized", "bits") or not dtype.in_torch:
        return False
    return dtype.family != "int" or dtype.safetensors is not None  # those below a byte have no name there


def numbers(content: Content, dtype: DType, *, as_floats: bool = True) -> Iterator[torch.Tensor]:
    """The values of a content as float64 (complex128 for complex ones), `ELEMENTS` at a time."""
    for block in equal_chunks(content, ELEMENTS * dtype.itemsize // dtype.packed):
        yield exact(bytearray(block), dtype, as_floats=as_floats)


def exact(data: bytearray, dtype: DType, *, as_floats: bool = False) -> torch.Tensor:
    """The values of some bytes: integers and booleans as they are, floats as float64, complex ones as complex128."""
    if not data:
        return torch.empty(0, dtype=torch.float64)
    if dtype.family == "complex":  # by their halves: torch has few kernels for complex32, and warns
        halves = torch.frombuffer(data, dtype=getattr(torch, HALVES[dtype.name])).to(torch.float64)
        return torch.view_as_complex(halves.reshape(-1, 2))
    if dtype.packed == 2:
        raw = torch.frombuffer(data, dtype=torch.uint8).to(torch.int64)
        return torch.tensor(E2M1, dtype=torch.float64)[torch.stack((raw & 15, raw >> 4), dim=1).reshape(-1)]
    is_bool = dtype.family == "bool"
    values = torch.frombuffer(data, dtype=torch.uint8) != 0 if is_bool else torch.frombuffer(data, dtype=torch_dtype(dtype))
    return values.to(torch.float64) if as_floats or dtype.family == "float" else values


@contextmanager
def one_thread() -> Iterator[None]:
    """torch works with one thread inside: it shares histograms among threads however small they are (see `ELEMENTS`)."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def as_bytes(values: torch.Tensor, dtype: DType, count: CastCount | None = None) -> memoryview:
    if dtype.family == "complex":
        values = torch.view_as_real(values).reshape(-1)
    own = torch_dtype(DTYPES[HALVES.get(dtype.name, dtype.name)])
    out = bytearray(values.numel() * own.itemsize)
    result = torch.frombuffer(out, dtype=own)
    if count is None:
        result.copy_(values)
    else:
        narrow(values, result, count)
    return memoryview(out)
