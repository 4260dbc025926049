"""The decoded structure of a checkpoint: plain values, containers, entries, inert objects. No tensor data.

A node is None, bool, int, float, str, bytes or a tuple of nodes, or one of the records below, and nothing else: a union of
final classes, so that mypy knows after `type(node) is Dict` what it is, and else what it is not. `Storage`, `Entry`, `Global`
and `ByteString` are frozen. `Dict`, `List` and `Object` have identity (they may be shared, and may contain themselves); a
tree belongs to whoever read it, and transforms edit those three in place.
"""

from __future__ import annotations

from collections.abc import Set
from dataclasses import dataclass
from functools import lru_cache
from math import prod
from typing import Final, Literal, TypeAlias, final

from ckpt_tools.errors import TensorError
from ckpt_tools.io.content import Content
from ckpt_tools.tree.dtypes import DType

Where: TypeAlias = tuple["str | int", ...]
Pair: TypeAlias = "tuple[Node, Node]"


@final
@dataclass(slots=True, eq=False, repr=False)
class Storage:
    """One run of bytes that entries view. Entries that are the same elements of it are tied."""

    key: str
    dtype: DType | None
    nbytes: int
    device: str | None
    content: Content

    @property
    def swap_width(self) -> int:
        """Bytes that are reversed together between byte orders: torch goes by the dtype that it was saved with."""
        return self.dtype.swap_width if self.dtype else 1


@final
@dataclass(slots=True, eq=False, repr=False)
class Extras:
    """What a few tensors carry beyond their data."""

    hooks: Node = None
    metadata: Node = None
    python_type: Global | None = None
    state: Node = None


@final
@dataclass(slots=True, eq=False, repr=False)
class Entry:
    """One tensor: a view on a storage. Stride and offset count elements, as in torch."""

    storage: Storage
    dtype: DType
    shape: tuple[int, ...]
    stride: tuple[int, ...]
    offset: int
    requires_grad: bool = False
    kind: Literal["tensor", "parameter"] = "tensor"
    extras: Extras | None = None

    @property
    def numel(self) -> int:
        """Number of elements."""
        return prod(self.shape)

    @property
    def nbytes(self) -> int:
        """Bytes that the elements need, row-major."""
        return prod(self.shape) * self.dtype.bits // 8

    @property
    def span(self) -> int:
        """Elements of its storage from the first to the last, those between them included; 0 for an empty tensor."""
        span = _span(self.shape, self.stride)
        return span if isinstance(span, int) else 0

    @property
    def is_contiguous(self) -> bool:
        """Whether the elements lie row-major without gaps (strides of dimensions of size 1 do not matter)."""
        return is_contiguous(self.shape, self.stride)

    @property
    def lazy_bits(self) -> Set[str]:
        """The math bits that torch applies on reading: "conj", "neg"."""
        metadata = None if self.extras is None else self.extras.metadata
        if type(metadata) is not Dict:
            return _NO_BITS
        return {key for key, value in metadata.items if value is True and type(key) is str}


_NO_BITS: Set[str] = frozenset()


@final
class Global:
    """A class or function that the file names: module and name; never imported. Python 2 module names are already mapped."""

    __match_args__ = ("module", "name")
    __slots__ = ("_hash", "_text", "module", "name")

    def __init__(self, module: str, name: str) -> None:
        self.module: Final = module
        self.name: Final = name
        self._text = f"{module}.{name}"
        self._hash = hash((module, name))

    def __str__(self) -> str:
        return self._text

    def __repr__(self) -> str:
        return f"Global(module={self.module!r}, name={self.name!r})"

    def __reduce__(self) -> tuple[type[Global], tuple[str, str]]:  # from a worker: a hash is one process's own
        return Global, (self.module, self.name)

    def __eq__(self, other: object) -> bool:
        return self is other or (type(other) is Global and self.name == other.name and self.module == other.module)

    def __hash__(self) -> int:
        return self._hash


@final
@dataclass(slots=True, unsafe_hash=True)
class ByteString:
    """A Python 2 byte string whose bytes are not UTF-8 text."""

    data: bytes


@final
class Dict:
    """A dict or an OrderedDict. `items` are (key, value) pairs in order, keys unique; `attributes` its `__dict__`."""

    __slots__ = ("attributes", "items", "ordered")

    def __init__(self, items: list[Pair] | None = None, *, ordered: bool = False) -> None:
        self.items: list[Pair] = [] if items is None else items
        self.ordered = ordered
        self.attributes: Dict | None = None

    def get(self, key: str) -> Node:
        """The value under `key`, or None."""
        for name, value in self.items:
            if name == key and type(name) is str:
                return value
        return None

    @property
    def named(self) -> dict[str, Node]:
        """The values whose keys are text."""
        return {name: value for name, value in self.items if type(name) is str}

    @property
    def metadata(self) -> Dict | None:
        """`_metadata` of a state dict, a row for each module; None where it has none."""
        found = self.attributes.get("_metadata") if self.attributes is not None else None
        return found if type(found) is Dict else None

    def __contains__(self, key: str) -> bool:
        return any(name == key and type(name) is str for name, _ in self.items)


@final
class List:
    """A list."""

    __slots__ = ("items",)

    def __init__(self, items: list[Node] | None = None) -> None:
        self.items: list[Node] = [] if items is None else items


@final
@dataclass(slots=True, eq=False, repr=False)
class Append:
    """A step of an object: items that a pickle appends to it."""

    items: list[Node]


@final
@dataclass(slots=True, eq=False, repr=False)
class SetItems:
    """A step of an object: pairs that a pickle sets in it."""

    pairs: list[Pair]


@final
@dataclass(slots=True, eq=False, repr=False)
class Build:
    """A step of an object: the state that a pickle gives it."""

    state: Node


Step: TypeAlias = Append | SetItems | Build
Call: TypeAlias = Literal["reduce", "new", "new_ex", "none"]


@final
class Object:
    """A Python object that is not plain data, as an inert record of how a pickle would build it."""

    __slots__ = ("args", "call", "function", "kwargs", "steps")

    def __init__(self, call: Call, function: Node, args: Node, kwargs: Node = None) -> None:
        self.call, self.function, self.args, self.kwargs = call, function, args, kwargs
        self.steps: list[Step] = []

    def append(self, items: list[Node]) -> None:
        """Append items: to those of its last step, or in a step of their own."""
        if self.steps and type(last := self.steps[-1]) is Append:
            last.items.extend(items)
        else:
            self.steps.append(Append(items))

    def set(self, pairs: list[Pair]) -> None:
        """Set pairs: with those of its last step, or in a step of their own."""
        if self.steps and type(last := self.steps[-1]) is SetItems:
            last.pairs.extend(pairs)
        else:
            self.steps.append(SetItems(pairs))

    @property
    def name(self) -> str:
        """The name of its function; one that is computed has none, and its text could be as long as the file likes."""
        return str(self.function) if type(self.function) is Global else "<a computed function>"

    @property
    def state(self) -> Node:
        """What its last `Build` gives it, or None."""
        for step in reversed(self.steps):
            if type(step) is Build:
                return step.state
        return None

    @property
    def appended(self) -> list[Node]:
        """What is appended to it, in all steps."""
        return [item for step in self.steps if type(step) is Append for item in step.items]

    @property
    def pairs(self) -> list[Pair]:
        """What is set in it, in all steps."""
        return [pair for step in self.steps if type(step) is SetItems for pair in step.pairs]


Node: TypeAlias = (
    bool | int | float | str | bytes | tuple["Node", ...] | Dict | List | Object | Entry | Storage | Global | ByteString | None
)


def as_dict(node: Node) -> Dict:
    """A node that whoever asks has seen to be a Dict, or made as one."""
    assert type(node) is Dict
    return node


@lru_cache(maxsize=4096)
def array_bytes(data: Node, length: int) -> bytes | None:
    """The bytes of a pickled array; Python 2's are those of a str, which was read as text where that could be."""
    if type(data) is str:
        encoded = data.encode("utf-8", "surrogatepass")
        return encoded if len(encoded) == length else data.encode("latin1") if data.isascii() or max(data) <= "\xff" else None
    return data.data if type(data) is ByteString else data if type(data) is bytes else None


def contiguous_stride(shape: tuple[int, ...]) -> tuple[int, ...]:
    """Strides of a row-major tensor of this shape, as torch counts them (a size of 0 counts as 1)."""
    strides, step = [], 1
    for size in reversed(shape):
        strides.append(step)
        step *= max(size, 1)
    return tuple(reversed(strides))


def stored(key: str, dtype: DType, shape: tuple[int, ...], content: Content, device: str | None = "cpu") -> Entry:
    """The tensor whose elements are all of a content, on a storage of its own."""
    storage = Storage(key, dtype if dtype.storage else None, content.length, device, content)
    return Entry(storage, dtype, shape, contiguous_stride(shape), 0)


@lru_cache(maxsize=4096)
def is_contiguous(shape: tuple[int, ...], stride: tuple[int, ...]) -> bool:
    """Whether this stride is row-major for this shape."""
    if 0 in shape:
        return True
    expected = 1
    for size, step in zip(reversed(shape), reversed(stride), strict=True):
        if size != 1:
            if step != expected:
                return False
            expected *= size
    return True


MAX_ELEMENTS = 2**59
MAX_DIMENSIONS = 1024


def check(entry: Entry, name: str = "a tensor") -> None:
    """Raise TensorError unless the view lies inside its storage. Every reader's result and writer's input passes here."""
    offset, storage = entry.offset, entry.storage
    span = _span(entry.shape, entry.stride)
    if isinstance(span, str):
        raise TensorError(f"{name} {span}.")
    if not 0 <= offset < 1 << 63:
        raise TensorError(f"{name} {'claims an offset over 2**63' if offset > 0 else _NEGATIVE}.")
    end = (offset + span) * entry.dtype.bits
    if span and end > storage.nbytes * 8:
        raise TensorError(
            f"{name} reaches outside its storage.",
            why=f"Its last element ends at byte {end // 8}; storage {storage.key!r} has {storage.nbytes} bytes.",
        )


_NEGATIVE = "has a negative size, stride or offset"


@lru_cache(maxsize=4096)
def _span(shape: tuple[int, ...], stride: tuple[int, ...]) -> int | str:
    """Elements from the first to the last, 0 for none; as text, why no tensor has these. Models repeat few shapes."""
    if len(shape) != len(stride) or len(shape) > MAX_DIMENSIONS:
        return f"has {len(shape)} sizes and {len(stride)} strides"
    if shape and min(*shape, *stride) < 0:
        return _NEGATIVE
    last, numel = 0, 1
    for size, step in zip(shape, stride, strict=True):
        numel *= size
        last += (size - 1) * step
        if numel > MAX_ELEMENTS or step.bit_length() > 63 or size.bit_length() > 63:
            return f"claims {len(shape)} dimensions with more than 2**59 elements, or a stride or size over 2**63"
    return last + 1 if numel else 0


CONTAINERS = (Dict, List, Object, tuple)
PLAIN = frozenset((type(None), bool, int, float, str, bytes))
RECORDS = (Entry, Object, Storage, Global, ByteString)
