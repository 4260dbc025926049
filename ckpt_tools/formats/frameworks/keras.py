"""Keras: `.weights.h5`, whole models in `.h5`, and the `model.weights.h5` in a `.keras`; any HDF5 file of plain arrays.

`layers/dense/vars/0` becomes `layers.dense.vars.0`. What lies in one run stays a range of the file; what is in chunks is read
by h5py, a few rows at a time. Source: keras/src/saving/saving_lib.py (`H5IOStore`), h5py's low-level API.
"""

from __future__ import annotations

import functools
import re
import types
import weakref
from collections.abc import Callable, Iterator
from math import prod
from typing import Any

from ckpt_tools import limits
from ckpt_tools.errors import DamagedFileError, UnsupportedContainerError
from ckpt_tools.formats.base import Warned, row_major
from ckpt_tools.formats.checkpoint import Checkpoint, state_dict
from ckpt_tools.io.content import CHUNK, Computed, Content, Range
from ckpt_tools.io.output import Source
from ckpt_tools.io.sources import Reader
from ckpt_tools.tree.dtypes import BY_NUMPY, DType
from ckpt_tools.tree.nodes import Entry
from ckpt_tools.values.numeric import swapped

_MAGIC = b"\x89HDF\r\n\x1a\n"
_OWN_FILTERS = frozenset((1, 2, 3))  # deflate, shuffle, fletcher32: others are libraries that HDF5 would load
_MAX_DEPTH = 100
_CHUNKED = 500  # containers for an array that h5py reads, which takes a millisecond
_MOST_AT_ONCE = 32 << 20  # bytes of an array that HDF5 is asked for in one go, in a file that has not more itself
_ERRORS = (OSError, RuntimeError, ValueError, KeyError, TypeError, OverflowError)  # what h5py makes of damaged bytes


def sniff(head: bytes) -> bool:
    return head.startswith(_MAGIC)


# Attributes and groups of the root by which Keras's files are known: those of old and of new ones.
_MARKS = frozenset((
    "keras_version", "layer_names", "model_config", "model_weights", "layers", "_layer_checkpoint_dependencies", "vars",
    "top_level_model_weights",
))  # fmt: skip
_NAMED = re.compile(r"(?:^|\.)vars\.\d+$|:0$")  # a variable of Keras 3, and of older ones


class _Stream(Reader):
    def readinto(self, buffer: Any, /) -> int:
        data = self.read(len(buffer))
        buffer[: len(data)] = data
        return len(data)


def _h5py() -> types.ModuleType:
    try:
        import h5py
    except ImportError:
        raise UnsupportedContainerError(
            "This is an HDF5 file, as Keras writes, and h5py, which reads those, is not installed.",
            fix="pip install h5py (the extra 'keras')",
        ) from None
    module: types.ModuleType = h5py
    return module


def decode(source: Source) -> Checkpoint:
    h5py = _h5py()
    warnings: list[Warned] = []

    @functools.cache  # once for all arrays that h5py reads: opening takes longer than reading most of them
    def opened() -> Any:
        file = h5py.File(_Stream(source), "r")
        weakref.finalize(opened, file.close)  # at the exit too: HDF5 crashes where Python goes first
        return file

    try:
        with h5py.File(_Stream(source), "r") as file:
            items = list(_entries(h5py, file, opened, source, warnings))
            of_keras = not _MARKS.isdisjoint((*file.attrs, *file)) or any(_NAMED.search(str(name)) for name, _ in items)
    except _ERRORS as error:
        raise DamagedFileError("HDF5 cannot read the file.", why=f"{str(error)[:200]}.") from None
    made = state_dict("keras" if of_keras else "hdf5", source, items)
    made.warnings = warnings
    return made


def _entries(
    h5py: Any, file: Any, opened: Callable[[], Any], source: Source, warnings: list[Warned]
) -> Iterator[tuple[str, Entry]]:
    """Every array under its dotted path; only what hard links lead to, each group once."""
    pending: list[tuple[tuple[str, ...], Any]] = [((), file)]
    seen: set[Any] = set()
    budget = limits.budget(source.size)
    while pending:
        path, parent = pending.pop()
        budget.take(limits.MEMORY, sum(map(len, path)), "The HDF5 file has longer names than any has.")
        node = parent[path[-1]] if path else parent  # opened only now: HDF5 keeps the whole name of what is open
        if isinstance(node, h5py.Dataset):
            if (entry := _entry(h5py, path, node, opened, source, warnings)) is not None:
                yield ".".join(path), entry
            continue
        if not isinstance(node, h5py.Group):  # a type with a name
            continue
        address = h5py.h5o.get_info(node.id).addr
        if address in seen or len(path) > _MAX_DEPTH:
            raise DamagedFileError(f"The group {'/'.join(path)[:100]!r} of the HDF5 file holds itself, or is nested too deep.")
        seen.add(address)
        names = list(node)
        budget.take(limits.NODES, len(names) + 1, "The HDF5 file has more groups than one of its size can hold.")
        for name in reversed(names):
            if not isinstance(node.get(name, getlink=True), h5py.HardLink):
                where = "/".join((*path, name))[:100]
                raise UnsupportedContainerError(f"{where!r} is a link in the HDF5 file, which is not followed.")
            pending.append(((*path, name), node))


def _entry(
    h5py: Any, path: tuple[str, ...], data: Any, opened: Callable[[], Any], source: Source, warnings: list[Warned]
) -> Entry | None:
    where = "/".join(path)
    kind = data.dtype
    dtype = BY_NUMPY.get(f"{kind.kind}{kind.itemsize}")
    if dtype is None or data.shape is None:
        if len(warnings) < _MOST_WARNINGS:
            warnings.append(Warned("left-out", f"{where!r} is {str(kind)[:40]}, and is left out", "numbers"))
        return None
    settings = data.id.get_create_plist()
    filters = {settings.get_filter(number)[0] for number in range(settings.get_nfilters())}
    if data.is_virtual or settings.get_external_count() or not filters <= _OWN_FILTERS:
        raise UnsupportedContainerError(f"{where!r} of the HDF5 file is in other files, or needs a library to be read.")
    return row_major(where, dtype, tuple(data.shape), _content(h5py, data, where, opened, source, dtype), repr(where))


_MOST_WARNINGS = 20


def _content(h5py: Any, data: Any, where: str, opened: Callable[[], Any], source: Source, dtype: DType) -> Content:
    """A range of the file where the elements lie in one run, as they are; else what h5py reads."""
    offset, nbytes = data.id.get_offset(), int(data.size) * dtype.itemsize
    # NumPy's type is the next larger one where HDF5's has other fields: bfloat16, numbers of 12 bits in 16
    as_it_is = data.id.get_type() == h5py.h5t.py_create(data.dtype, logical=True)
    if offset is not None and data.chunks is None and as_it_is and offset + nbytes <= source.size:
        whole = Range(source, offset, nbytes)
        return swapped(whole, dtype.swap_width) if data.dtype.byteorder == ">" else whole
    what = f"{where!r} of the HDF5 file"
    budget, too_large = limits.budget(source.size), f"The arrays of the HDF5 file up to {what[:100]} are too large."
    budget.take(limits.NODES, _CHUNKED, "The HDF5 file has too many arrays in chunks.")
    budget.take(limits.MEMORY, nbytes // limits.STREAMED, too_large)
    if _rows_at_once(data) * prod(data.shape[1:]) * dtype.itemsize > max(_MOST_AT_ONCE, limits.MEMORY.most(source.size)):
        fix = "Write it without: h5repack -l CONTI IN.h5 OUT.h5"
        raise UnsupportedContainerError(f"{what} is in larger chunks than fit in memory.", fix=fix)
    return Computed(nbytes, lambda: _rows(where, opened))


def _rows_at_once(data: Any) -> int:
    """How many rows are read together: about a megabyte, whole chunks where there are some, so that each is inflated once."""
    chunk = data.chunks[0] if data.chunks else 1
    row: int = prod(data.shape[1:]) * data.dtype.itemsize
    return int(min(max(1, CHUNK // max(row, 1) // chunk) * chunk, data.shape[0])) if data.shape else 1


def _rows(path: str, opened: Callable[[], Any]) -> Iterator[bytes]:
    import numpy as np

    try:
        data = opened()[path]
        kind, step = data.dtype.newbyteorder("<"), _rows_at_once(data)
        for start in range(0, data.shape[0] if data.shape else 1, step) if data.size else ():
            rows = data[start : start + step] if data.shape else data[()]
            yield np.asarray(rows).astype(kind, copy=False).tobytes()
    except _ERRORS as error:
        raise DamagedFileError(f"HDF5 cannot read {path!r}.", why=f"{str(error)[:200]}.") from None
