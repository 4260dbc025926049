"""HDF5 that lies about its names, its numbers and its sizes: refused by name, or read as h5py reads it."""

import contextlib
from collections.abc import Callable
from pathlib import Path
from random import Random
from typing import Any

import numpy as np
import pytest

import ckpt_tools
import ckpt_tools.torch
from ckpt_tools.errors import CkptError, DamagedFileError, LimitError, UnsupportedContainerError
from tests.hostile.refusals import write
from tests.support.samples import FIXTURES

h5py: Any = pytest.importorskip("h5py")


def bfloat16() -> Any:
    """A type that NumPy has none for."""
    kind = h5py.h5t.IEEE_F16LE.copy()
    kind.set_fields(15, 7, 8, 0, 7)
    kind.set_ebias(127)
    return kind


def twelve_bits() -> Any:
    """Whole numbers of 12 bits, four bits up in 16."""
    kind = h5py.h5t.STD_I16LE.copy()
    kind.set_precision(12)
    kind.set_offset(4)
    return kind


@pytest.mark.parametrize(("make", "dtype"), [(bfloat16, "f4"), (twelve_bits, "i2")])
def test_types_with_other_fields(make: Any, dtype: str, tmp_path: Path) -> None:
    """Numbers whose bytes are not NumPy's are read as h5py reads them."""
    with h5py.File(tmp_path / "x.h5", "w") as file:
        data = h5py.h5d.create(file.id, b"w", make(), h5py.h5s.create_simple((8,)))
        data.write(h5py.h5s.ALL, h5py.h5s.ALL, np.arange(8, dtype=dtype))
        file["behind"] = np.ones(100)
    assert ckpt_tools.torch.load(tmp_path / "x.h5")["w"].tolist() == list(range(8))


@pytest.mark.parametrize(
    ("shape", "chunks"), [((1, 1, 3000), (1, 1, 70)), ((500, 7, 900), (130, 7, 100)), ((1, 5), None), ((2, 3_000_000, 1), None)]
)
def test_boxes_of_every_layout(shape: tuple[int, ...], chunks: tuple[int, ...] | None, tmp_path: Path) -> None:
    """Whatever is read at once, the elements come in their order."""
    with h5py.File(tmp_path / "x.h5", "w") as file:
        data = file.create_dataset("w", shape, twelve_bits(), chunks=chunks)
        data[...] = wanted = np.arange(np.prod(shape), dtype="i2").reshape(shape) % 2000
    assert np.array_equal(ckpt_tools.torch.load(tmp_path / "x.h5")["w"].numpy(), wanted)


def many(file: Any, count: int, **options: Any) -> None:
    """So many arrays."""
    for number in range(count):
        file.create_dataset(f"w{number}", dtype="f4", **options)


OUTSIDE = {"external": [("/etc/passwd", 0, 10)]}
REFUSED: dict[str, tuple[Callable[[Any], object], type[CkptError], str]] = {
    "two arrays of one name": (
        lambda file: file.update({"a/b": np.ones(2), "a.b": np.zeros(2)}), DamagedFileError, r"called 'a\.b'"),
    "a chunk of 400 MB, which is inflated whole": (
        lambda file: many(file, 1, shape=(1, 10**8), chunks=(1, 10**8), compression="gzip"), UnsupportedContainerError,
        "larger chunks than fit in memory"),
    "arrays that were never written": (lambda file: many(file, 20, shape=(10**7,)), LimitError, "are too large"),
    "a long name above many": (lambda file: many(file.create_group("g" * 60_000), 600, shape=()), LimitError, "longer names"),
    "a link to another file": (
        lambda file: file.update(l=h5py.ExternalLink("/etc/passwd", "/x")), UnsupportedContainerError, "not followed"),
    "data in another file": (
        lambda file: file.create_dataset("d", (10,), "u1", **OUTSIDE), UnsupportedContainerError, "in other files"),
    "a group in itself": (lambda file: file.create_group("a").update(b=file["/"]), DamagedFileError, "holds itself"),
}  # fmt: skip


@pytest.mark.parametrize("name", REFUSED)
def test_what_is_refused(name: str, tmp_path: Path) -> None:
    """None is lost, nothing but the file itself is opened, and no more memory taken than a file may have."""
    make, error, said = REFUSED[name]
    with h5py.File(tmp_path / "x.h5", "w") as file:
        make(file)
    with pytest.raises(error, match=said):
        ckpt_tools.inspect(tmp_path / "x.h5")


def test_a_type_with_a_name(tmp_path: Path) -> None:
    """It is no array; those beside it are read."""
    with h5py.File(tmp_path / "x.h5", "w") as file:
        file["type"], file["w"] = np.dtype("f4"), np.ones(2)
    assert [row["name"] for row in ckpt_tools.inspect(tmp_path / "x.h5").tensors] == ["w"]


def test_flipped_bits_are_our_errors(tmp_path: Path) -> None:
    """Whatever bit is flipped, also one that makes an address larger than any file, the file is read or refused."""
    data, random = bytearray((FIXTURES / "frameworks" / "tiny.weights.h5").read_bytes()), Random(5)
    for at, bit in [(49, 1), *((random.randrange(8, len(data)), 1 << random.randrange(8)) for _ in range(100))]:
        data[at] ^= bit
        with contextlib.suppress(CkptError):
            ckpt_tools.inspect(write(tmp_path, bytes(data), "x.h5"))
        data[at] ^= bit
