"""Keras: `.weights.h5`, whole models in `.h5`, and the `model.weights.h5` in a `.keras`; any HDF5 file of plain arrays.

`layers/dense/vars/0` becomes `layers.dense.vars.0`. What lies in one run stays a range of the file; what is in chunks is read
by h5py, a few rows at a time. Source: keras/src/saving/saving_lib.py (`H5IOStore`), h5py's low-level API.
"""

from __future__ import annotations

import functools
import re
import types
import weakref
from collections.abc import Iterator
from math import prod
from typing import Any

from ckpt_tools import limits
from ckpt_tools.errors import DamagedFileError, UnsupportedContainerError
from ckpt_tools.formats.base import Warned, row_major
from ckpt_tools.formats.checkpoint import Checkpoint, state_dict
from ckpt_tools.io.content import CHUNK, Computed, Content, Range
from ckpt_tools.io.source import Source
from ckpt_tools.io.sources import Reader
from ckpt_tools.tree.dtypes import BY_NUMPY, DType
from ckpt_tools.tree.nodes import Entry
from ckpt_tools.values.numeric import swapped

_MAGIC = b"\x89HDF\r\n\x1a\n"
_OWN_FILTERS = frozenset((1, 2, 3))  # deflate, shuffle, fletcher32: others are libraries that HDF5 would load
_MAX_DEPTH, _MOST_WARNINGS = 100, 20
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


def decode(source: Source) -> Checkpoint:
    reader = _Reader(source)
    try:
        with reader.open() as file:
            items = list(reader.entries(file))
            of_keras = not _MARKS.isdisjoint((*file.attrs, *file)) or any(_NAMED.search(str(name)) for name, _ in items)
    except _ERRORS as error:
        raise _unread("the file", error) from None
    made = state_dict("keras" if of_keras else "hdf5", source, items)
    made.warnings = reader.warnings
    return made


def _unread(what: str, error: Exception) -> DamagedFileError:
    return DamagedFileError(f"HDF5 cannot read {what}.", why=f"{str(error)[:200]}.")


class _Reader:
    def __init__(self, source: Source) -> None:
        try:
            import h5py
        except ImportError:
            what = "This is an HDF5 file, as Keras writes, and h5py, which reads those, is not installed."
            raise UnsupportedContainerError(what, fix="pip install h5py (the extra 'keras')") from None
        self.h5py: types.ModuleType = h5py
        self.source, self.warnings, self.budget = source, list[Warned](), limits.budget(source.size)

    def open(self) -> Any:
        return self.h5py.File(_Stream(self.source), "r")

    @functools.cached_property  # once for all arrays that h5py reads: opening takes longer than reading most of them
    def kept_open(self) -> Any:
        file = self.open()
        weakref.finalize(self, file.close)  # at the exit too: HDF5 crashes where Python goes first
        return file

    def entries(self, file: Any) -> Iterator[tuple[str, Entry]]:
        """Every array under its dotted path; only what hard links lead to, each group once."""
        pending: list[tuple[tuple[str, ...], Any]] = [((), file)]
        seen: set[Any] = set()
        while pending:
            path, parent = pending.pop()
            self.budget.take(limits.MEMORY, sum(map(len, path)), "The HDF5 file has longer names than any has.")
            node = parent[path[-1]] if path else parent  # opened only now: HDF5 keeps the whole name of what is open
            if isinstance(node, self.h5py.Dataset) and (entry := self.entry("/".join(path), node)) is not None:
                yield ".".join(path), entry
            if not isinstance(node, self.h5py.Group):  # an array, or a type with a name
                continue
            address, where = self.h5py.h5o.get_info(node.id).addr, "/".join(path)[:100]
            if address in seen or len(path) > _MAX_DEPTH:
                raise DamagedFileError(f"The group {where!r} of the HDF5 file holds itself, or is nested too deep.")
            seen.add(address)
            names = list(node)
            self.budget.take(limits.NODES, len(names) + 1, "The HDF5 file has more groups than one of its size can hold.")
            for name in reversed(names):
                if not isinstance(node.get(name, getlink=True), self.h5py.HardLink):
                    where = "/".join((*path, name))[:100]
                    raise UnsupportedContainerError(f"{where!r} is a link in the HDF5 file, which is not followed.")
                pending.append(((*path, name), node))

    def entry(self, where: str, data: Any) -> Entry | None:
        dtype = BY_NUMPY.get(f"{data.dtype.kind}{data.dtype.itemsize}")
        if dtype is None or data.shape is None:
            if len(self.warnings) < _MOST_WARNINGS:
                self.warnings.append(Warned("left-out", f"{where!r} is {str(data.dtype)[:40]}, and is left out", "numbers"))
            return None
        settings = data.id.get_create_plist()
        filters = {settings.get_filter(number)[0] for number in range(settings.get_nfilters())}
        if data.is_virtual or settings.get_external_count() or not filters <= _OWN_FILTERS:
            raise UnsupportedContainerError(f"{where!r} of the HDF5 file is in other files, or needs a library to be read.")
        return row_major(where, dtype, tuple(data.shape), self.content(where, data, dtype), repr(where))

    def content(self, where: str, data: Any, dtype: DType) -> Content:
        """A range of the file where the elements lie in one run, as they are; else what h5py reads."""
        offset, nbytes = data.id.get_offset(), int(data.size) * dtype.itemsize
        # NumPy's type is the next larger one where HDF5's has other fields: bfloat16, numbers of 12 bits in 16
        as_it_is = data.id.get_type() == self.h5py.h5t.py_create(data.dtype, logical=True)
        if offset is not None and data.chunks is None and as_it_is and offset + nbytes <= self.source.size:
            whole = Range(self.source, offset, nbytes)
            return swapped(whole, dtype.swap_width) if data.dtype.byteorder == ">" else whole
        self.budget.take(limits.NODES, _CHUNKED, "The HDF5 file has too many arrays in chunks.")
        too_large = f"The arrays of the HDF5 file up to {where[:100]!r} are too large."
        self.budget.take(limits.MEMORY, nbytes // limits.STREAMED, too_large)
        at_once = _rows_at_once(data) * prod(data.shape[1:]) * dtype.itemsize
        if at_once > max(_MOST_AT_ONCE, limits.MEMORY.most(self.source.size)):
            what = f"{where!r} of the HDF5 file is in larger chunks than fit in memory."
            raise UnsupportedContainerError(what, fix="Write it without: h5repack -l CONTI IN.h5 OUT.h5")
        return Computed(nbytes, lambda: self.rows(where))

    def rows(self, path: str) -> Iterator[bytes]:
        import numpy as np

        try:
            data = self.kept_open[path]
            kind, step = data.dtype.newbyteorder("<"), _rows_at_once(data)
            for start in range(0, data.shape[0] if data.shape else 1, step) if data.size else ():
                rows = data[start : start + step] if data.shape else data[()]
                yield np.asarray(rows).astype(kind, copy=False).tobytes()
        except _ERRORS as error:
            raise _unread(repr(path), error) from None


def _rows_at_once(data: Any) -> int:
    """How many rows are read together: about a megabyte, whole chunks where there are some, so that each is inflated once."""
    chunk = data.chunks[0] if data.chunks else 1
    row: int = prod(data.shape[1:]) * data.dtype.itemsize
    return int(min(max(1, CHUNK // max(row, 1) // chunk) * chunk, data.shape[0])) if data.shape else 1
