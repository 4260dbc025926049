"""Journals that somebody made: a file that torch opens is never read through one, and none takes more than the file may."""

import io
import os
import pickle
import tarfile
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch

import ckpt_tools
import ckpt_tools.torch
from ckpt_tools.errors import ConvertError, DamagedFileError
from tests.hostile.refusals import journal
from tests.support.commands import ckpt


class Runs:
    """What a file that is loaded without weights_only would run."""

    def __reduce__(self) -> tuple[object, ...]:
        return os.getenv, ("HOME",)


@dataclass(frozen=True, slots=True)
class Forged:
    """Bytes that run something, beside a journal that reads them as harmless ones."""

    path: Path
    good: bytes
    evil: bytes
    mark: bytes = b"\xffCKPaaaa"

    def write(self, start: bytes, old: bytes, new: bytes, evil: bytes = b"") -> None:
        """The evil file with these first bytes, beside a journal that calls `old` and `new` its first bytes."""
        body = evil or self.evil
        self.path.write_bytes(start + body[8:])
        tail = [(8, self.good[8 : len(body)], body[8:]), (len(body), self.good[len(body) :], b"")]
        journal(self.path, [(0, old, new), *tail], len(self.good), len(body), self.mark)


@pytest.fixture
def forged(tmp_path: Path) -> Forged:
    """A pair of torch-zips."""
    torch.save({"w": torch.ones(3), "x": Runs()}, tmp_path / "m.pth")
    evil = (tmp_path / "m.pth").read_bytes()
    torch.save({"w": torch.ones(3)}, tmp_path / "m.pth")
    return Forged(tmp_path / "m.pth", (tmp_path / "m.pth").read_bytes(), evil)


def opened_by_torch(path: Path) -> bool:
    """Whether torch.load opens a file without weights_only."""
    try:
        return bool(torch.load(path, weights_only=False))
    except Exception:
        return False


@pytest.mark.parametrize("at", range(1, 8))
@pytest.mark.parametrize("way", ["new, then mark", "mark, then new", "old with another version"])
def test_a_file_that_torch_opens_is_not_read_through_a_journal(forged: Forged, at: int, way: str) -> None:
    """Found by an attack: torch does not look at bytes 4 to 8 of a zip: a journal said that they were the mark's."""
    good, evil, mark = forged.good[:8], forged.evil[:8], forged.mark
    if way == "old with another version":
        forged.write(evil, evil[:4] + b"\n" + evil[5:], b"XXXX" + evil[4:])
    else:
        forged.write(evil[:at] + mark[at:] if way.startswith("new") else mark[:at] + evil[at:], good, evil)
    report = ckpt_tools.scan(forged.path)[0]
    assert report.failed
    assert opened_by_torch(forged.path) == (way == "old with another version" or (way, at >= 4) == ("new, then mark", True))


def test_a_tar_whose_first_name_is_a_mark(forged: Forged) -> None:
    """torch opens tars that begin with any member, so that one that is called as a mark is no half-edited file."""
    made = io.BytesIO()
    with tarfile.open(fileobj=made, mode="w", format=tarfile.GNU_FORMAT, encoding="utf-8") as tar:
        tar.addfile(tarfile.TarInfo(forged.mark.decode("utf-8", "surrogateescape")))
        for name, value in (("storages", 0), ("tensors", 0), ("pickle", {"ran": True})):
            body = pickle.dumps(value) + pickle.dumps([]) * (name == "storages")
            info = tarfile.TarInfo(name)
            info.size = len(body)
            tar.addfile(info, io.BytesIO(body))
    forged.write(forged.mark, forged.good[:8], forged.good[:8], made.getvalue())
    assert opened_by_torch(forged.path)
    with pytest.raises(DamagedFileError, match="is half edited"):
        ckpt_tools.inspect(forged.path)
    assert ckpt_tools.scan(forged.path)[0].verdict == "unexamined"


Regions = list[tuple[int, bytes, bytes]]


def half(path: Path, regions: Regions, size: int, new_size: int) -> None:
    """A file with a mark for its first bytes, beside a journal with these regions, its checksum made right."""
    old, mark = path.read_bytes(), b"\xffCKPaaaa"
    path.write_bytes(mark + old[8:])
    journal(path, [(0, old[:8], old[:8]), *regions], size, new_size, mark)


@pytest.fixture
def small(tmp_path: Path) -> Path:
    """A file of some kilobytes."""
    torch.save({"w": torch.ones(3000)}, tmp_path / "m.pth")
    return tmp_path / "m.pth"


@pytest.mark.parametrize("head", [b"", b"ckpt journal 2\n"])
@pytest.mark.parametrize("size", [1 << 22, 1 << 40])
def test_a_journal_that_is_a_hole(small: Path, head: bytes, size: int) -> None:
    """A gigabyte of zeros took 16 s and 2 GB: what does not begin as a journal, or is far larger than the file, is not read."""
    with small.with_name(".m.pth.ckpt-journal").open("wb") as file:
        file.write(head)
        file.truncate(size)
    codes = {row.code for row in ckpt_tools.inspect(small).findings}
    assert ("stray-journal" in codes) == (size == 1 << 40 or not head)


CRAFTED: dict[str, Regions] = {
    "empty": [(100, b"", b"")] * 3000, "overlapping": [(100, b"abcd", b"abcd"), (102, b"abcd", b"abcd")],
    "not in order": [(200, b"abcd", b"abcd"), (100, b"abcd", b"abcd")], "old bytes that are not there": [(100, b"", b"abcd")],
    "in the first bytes": [(4, b"abcd", b"abcd")], "beyond the end": [(12_000_000, b"", b"abcd")],
    "too many": [(100 + at, b"a", b"a") for at in range(10_001)],
}  # fmt: skip


@pytest.mark.parametrize("name", CRAFTED)
def test_regions_that_no_edit_writes(small: Path, name: str) -> None:
    """300,000 empty regions took 46 s: a journal has what an edit writes, in order, or says nothing."""
    size = small.stat().st_size
    data = small.read_bytes()
    true = [(at, data[at : at + len(old)], data[at : at + len(new)] or new) for at, old, new in CRAFTED[name]]
    half(small, [*true, (size, b"", b"")], size, size)
    with pytest.raises(DamagedFileError, match="is half edited"):
        ckpt_tools.inspect(small)


def test_regions_in_order_are_read(small: Path) -> None:
    """As many as may be, each byte by itself: every read takes those that it is about."""
    data, size = small.read_bytes(), small.stat().st_size
    half(small, [*((100 + at, b"%c" % data[100 + at], b"x") for at in range(9_998)), (size, b"", b"")], size, size)
    assert torch.equal(ckpt_tools.torch.load(small)["w"], torch.ones(3000))


def test_a_size_that_the_journal_does_not_hold(small: Path) -> None:
    """One old byte at the far end had inspect tell 64 GiB, and repair make them: all that is cut off is in the journal."""
    size, far = small.stat().st_size, 1 << 36
    for last in [(far - 1, b"\0", b"")], [(size, b"\0" * 8, b""), (far - 1, b"\0", b"")], [(size, b"\0" * 8, b"")]:
        half(small, last, far, size)
        with pytest.raises(DamagedFileError, match="is half edited"):
            ckpt_tools.inspect(small)
        assert "is half edited" in ckpt("repair", small, code=3).output
    assert small.stat().st_size == size


def test_an_edit_whose_journal_would_be_too_large(small: Path) -> None:
    """What no reader would believe is not written: the command says what to do, and the file stays."""
    old = small.read_bytes()
    with pytest.raises(ConvertError, match="Convert it to another file"):
        ckpt_tools.edit_in_place(small, add_prefix="a" * (9 << 20))
    assert small.read_bytes() == old
