"""Journals that somebody made: a file that torch opens is never read through one, and none takes more than the file may."""

import contextlib
import io
import os
import pickle
import tarfile
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch

import ckpt_tools
from ckpt_tools.errors import DamagedFileError
from ckpt_tools.io.in_place import marks, rollback
from tests.operations.test_in_place import as_read


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
    mark: bytes = marks.MARK + b"aaaa"

    def write(self, start: bytes, old: bytes, new: bytes, evil: bytes = b"") -> None:
        """The evil file with these first bytes, beside a journal that calls `old` and `new` its first bytes."""
        body = evil or self.evil
        self.path.write_bytes(start + body[8:])
        tail = (rollback.Region(8, self.good[8 : len(body)], body[8:]), rollback.Region(len(body), self.good[len(body) :], b""))
        regions = (rollback.Region(0, old, new), *tail)
        record = rollback.Record(0, self.path.stat().st_ino, len(self.good), len(body), self.mark, regions)
        assert rollback.unpack(record.pack()) is not None
        marks.journal_path(self.path).write_bytes(record.pack())


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
    with contextlib.suppress(DamagedFileError):
        assert as_read(forged.path) == forged.path.read_bytes()


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
        as_read(forged.path)
    assert ckpt_tools.scan(forged.path)[0].verdict == "unexamined"
