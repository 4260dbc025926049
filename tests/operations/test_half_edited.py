"""Half-edited files: every reader takes them as they were, through their journal, and the next edit or repair ends it."""

import fcntl
import os
import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import SafetensorError
from safetensors.torch import load_file

import ckpt_tools
from ckpt_tools.errors import DamagedFileError, OutputError
from ckpt_tools.torch import load_state_dict, save
from tests.faults.layer import Fault
from tests.net.test_in_place import WRITES, child
from tests.operations.test_in_place import weights
from tests.support.commands import ckpt
from tests.support.terminal import run


@pytest.fixture
def pth(tmp_path: Path) -> Path:
    """A wrapped training checkpoint."""
    torch.save({"model": weights(), "epoch": 3}, tmp_path / "model.pth")
    return tmp_path / "model.pth"


def journal_of(path: Path) -> Path:
    """Where the journal of a file lies while it is edited."""
    return path.with_name(f".{path.name}.ckpt-journal")


def as_read(path: Path) -> bytes:
    """The bytes of a file as every command reads them."""
    with ckpt_tools.open_checkpoint(path) as checkpoint:
        return bytes(checkpoint.decoded.source.read(0, checkpoint.file_bytes))


def interrupted(path: Path, **edit: Any) -> bytes:
    """Leave the file as a kill leaves it, with its journal: the mark, and half of the first patch. Returns the old bytes."""
    old = path.read_bytes()
    pid = os.fork()
    if pid == 0:
        _die_after_half_a_patch(path, edit)
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 9
    assert path.read_bytes()[:8] != old[:8]
    assert path.read_bytes()[8:] != old[8:]
    return old


def _die_after_half_a_patch(path: Path, edit: dict[str, Any]) -> None:
    """The life of a forked process; its locks go with it, as those of a killed one do."""
    real, calls, leave = os.write, list[int](), os._exit

    def write(fd: int, data: bytes) -> int:
        calls.append(fd)
        if len(calls) < 3:  # the journal, the mark
            return real(fd, data)
        leave(9 * real(fd, data[: (len(data) + 1) // 2]) // ((len(data) + 1) // 2))
        return 0

    try:
        os.write = write  # type: ignore[assignment]
        ckpt_tools.edit_in_place(path, **(edit or {"strip_module": True}))
    finally:
        leave(1)


def codes(path: Path) -> dict[str, str]:
    """Code and severity of what inspect finds."""
    return {finding.code: finding.severity for finding in ckpt_tools.inspect(path).findings}


@pytest.mark.parametrize("kind", ["pth", "pth-legacy", "safetensors"])
@pytest.mark.parametrize("edit", [{"strip_module": True}, {"rename": "layer=longer"}], ids=["less", "more"])
def test_reading_a_half_edited_file_writes_nothing(tmp_path: Path, kind: str, edit: dict[str, Any]) -> None:
    """Every command reads it as it was, through the journal; file, journal and folder stay; repair FILE rolls it back."""
    path, whole = tmp_path / "model.bin", tmp_path / "whole.bin"
    torch.save(weights(), path, _use_new_zipfile_serialization=kind != "pth-legacy")
    if kind == "safetensors":
        ckpt_tools.convert(path, path, format="safetensors", overwrite=True)
    whole.write_bytes(path.read_bytes())
    old = interrupted(path, **edit)
    with pytest.raises((pickle.UnpicklingError, SafetensorError)):
        load_file(path) if kind == "safetensors" else torch.load(path, weights_only=True)
    before = states(tmp_path)
    assert codes(path)["half-edited"] == "problem"
    assert ckpt_tools.check(path).exit_code == 1
    assert ckpt_tools.diff(path, whole).same
    assert ckpt_tools.stats(path).tensors == ckpt_tools.stats(whole).tensors
    state_dict = load_state_dict(path, unwrap=False)
    assert all(torch.equal(tensor, weights()[name]) for name, tensor in state_dict.items())
    assert states(tmp_path) == before
    ckpt_tools.convert(path, tmp_path / "out.pth")
    assert list(torch.load(tmp_path / "out.pth")) == list(weights())
    (tmp_path / "out.pth").unlink()
    assert states(tmp_path) == before
    result = run("repair", path)
    assert (result.exit_code, "as it was before the edit" in result.output) == (0, True), result.output
    assert path.read_bytes() == old
    assert not journal_of(path).exists()
    ckpt("repair", path, code=2)


def states(folder: Path) -> dict[str, tuple[bytes, int, int]]:
    """Every file with its bytes, inode and time of change."""
    return {path.name: (path.read_bytes(), path.stat().st_ino, path.stat().st_mtime_ns) for path in folder.iterdir()}


def saved_by_torch(path: Path) -> None:
    """The same inode."""
    torch.save({"model": {name: tensor + 1 for name, tensor in weights().items()}, "epoch": 4}, path)


def saved_with_the_new_names(path: Path) -> None:
    """What the edit would have made, with other values."""
    renamed = {name.removeprefix("module."): tensor + 1 for name, tensor in weights().items()}
    torch.save({"model": renamed, "epoch": 3}, path)


def copied_over(path: Path) -> None:
    """As cp does it."""
    saved_by_torch(path.with_name("other"))
    path.write_bytes(path.with_name("other").read_bytes())


def replaced(path: Path) -> None:
    """Another inode."""
    saved_by_torch(path.with_name("other"))
    os.replace(path.with_name("other"), path)


def cut_short(path: Path) -> None:
    """Half of the file that is there."""
    os.truncate(path, path.stat().st_size // 2)


WRITERS = (saved_by_torch, saved_with_the_new_names, copied_over, replaced)


@pytest.mark.parametrize("writer", WRITERS, ids=lambda writer: writer.__name__)
def test_a_file_that_was_written_since_is_left_as_it_is(pth: Path, writer: Callable[[Path], None]) -> None:
    """Another checkpoint under the name of a half-edited one: every command takes it as it is, and says that a journal lies
    beside it; edits, killed or not, work on it."""
    interrupted(pth)
    stray = journal_of(pth).read_bytes()
    writer(pth)
    new = pth.read_bytes()
    loaded = torch.load(pth, weights_only=True)["model"]
    assert codes(pth)["stray-journal"] == "warning"
    assert ckpt_tools.check(pth).verdict == "findings"
    assert as_read(pth) == new == pth.read_bytes()
    assert journal_of(pth).read_bytes() == stray
    interrupted(pth, add_prefix="again.")
    assert list(load_state_dict(pth, select="model", unwrap=False)) == list(loaded)
    ckpt_tools.edit_in_place(pth, add_prefix="x.")
    assert list(torch.load(pth, weights_only=True)["model"]) == [f"x.{name}" for name in loaded]
    assert [path.read_bytes() for path in pth.parent.glob(".*ckpt-journal")] == [stray]


def test_renamed_files_are_read_through_their_journal(pth: Path) -> None:
    """A half-edited file that was renamed, or that another saved under its old name: each is read as what it is."""
    old = interrupted(pth)
    moved = pth.with_name("moved.pth")
    pth.rename(moved)
    saved_by_torch(pth)
    new = pth.read_bytes()
    assert (as_read(moved), as_read(pth)) == (old, new)
    assert {"half-edited", "stray-journal"} == codes(moved).keys() & {"half-edited", "stray-journal"} | codes(pth).keys() & {
        "half-edited",
        "stray-journal",
    }
    ckpt_tools.edit_in_place(pth, strip_module=True)
    assert as_read(moved) == old
    ckpt("repair", moved)
    assert moved.read_bytes() == old
    assert "stray-journal" not in codes(pth)
    assert not list(pth.parent.glob(".*ckpt-journal"))


def test_half_edited_and_without_its_journal(pth: Path) -> None:
    """Copied away without its journal, or with one that is another's or damaged: refused by every reader, and by torch."""
    interrupted(pth)
    whole, torn = journal_of(pth).read_bytes(), pth.read_bytes()
    copy = pth.parent / "elsewhere" / "copy.pth"
    copy.parent.mkdir()
    for body in (None, whole, whole[:-1], b"anything"):
        copy.write_bytes(torn)
        if body is not None:
            journal_of(copy).write_bytes(body)
        for work in (ckpt_tools.inspect, ckpt_tools.open_checkpoint, load_state_dict):
            with pytest.raises(DamagedFileError, match="is half edited"):
                work(copy)
        with pytest.raises(DamagedFileError, match="is half edited"):
            ckpt_tools.repair(copy, copy.with_name("out.pth"))
        assert copy.read_bytes() == torn
        assert body is None or journal_of(copy).read_bytes() == body
        with pytest.raises(pickle.UnpicklingError):
            torch.load(copy, weights_only=True)


@pytest.mark.parametrize("writer", [cut_short, lambda path: path.write_bytes(path.read_bytes()[:-40] + b"x" * 40)])
def test_a_half_edited_file_with_other_bytes(pth: Path, writer: Callable[[Path], None]) -> None:
    """Something changed a half-edited file: its journal is no longer made for it, and is not acted upon."""
    interrupted(pth)
    writer(pth)
    torn = pth.read_bytes()
    with pytest.raises(DamagedFileError, match="other bytes than it was made for"):
        ckpt_tools.inspect(pth)
    with pytest.raises(DamagedFileError, match="other bytes than it was made for"):
        ckpt_tools.edit_in_place(pth, strip_module=True)
    assert pth.read_bytes() == torn
    assert journal_of(pth).exists()


@pytest.mark.parametrize("how", ["convert", "save"])
def test_what_replaces_a_half_edited_file_takes_its_journal_away(pth: Path, tmp_path: Path, how: str) -> None:
    """An output over it begins by rolling back: no journal is left, and where the output fails the old file is."""
    old = interrupted(pth)
    if how == "convert":
        with pytest.raises(ckpt_tools.CkptError):
            ckpt_tools.convert(tmp_path / "nothing.pth", pth, overwrite=True)
        assert pth.read_bytes() == old
        old = interrupted(pth)
        ckpt_tools.convert(pth, pth, overwrite=True, strip_module=True)
        assert "layer.0.weight" in torch.load(pth)["model"]
    else:
        save({"a": torch.ones(3)}, pth)
        assert list(torch.load(pth)) == ["a"]
    assert not journal_of(pth).exists()
    assert not codes(pth).keys() & {"half-edited", "stray-journal"}


def test_a_shard_is_read_through_its_journal_too(pth: Path, tmp_path: Path) -> None:
    """A folder with a half-edited shard is read as it was, and nothing written; a new checkpoint takes its journal away."""
    folder = tmp_path / "shards"
    ckpt_tools.convert(pth, folder, select="model", shard_size=20_000, format="pth")
    shard = folder / "pytorch_model-00001-of-00003.bin"
    old = interrupted(shard, map_location="cuda")
    before = states(folder)
    with ckpt_tools.open_checkpoint(folder) as checkpoint:
        assert len(checkpoint.tensors) == 14
    assert codes(folder)["half-edited"] == "problem"
    assert "ckpt-journal" not in ckpt("inspect", folder).output
    loaded = load_state_dict(folder, unwrap=False)
    assert all(torch.equal(loaded[name], tensor) for name, tensor in weights().items())
    assert states(folder) == before
    assert as_read(shard) == old
    ckpt_tools.convert(pth, folder, select="model", shard_size=20_000, format="pth", overwrite=True)
    assert not journal_of(shard).exists()


@pytest.mark.parametrize("mode", [0o600, 0o640, 0o644])
def test_who_may_read_a_file_may_read_its_journal(pth: Path, mode: int) -> None:
    """The journal has the file's owner and mode: else a file that root edited would be closed to its owner after a kill."""
    pth.chmod(mode)
    interrupted(pth)
    assert journal_of(pth).stat().st_mode == pth.stat().st_mode
    assert journal_of(pth).stat().st_uid == pth.stat().st_uid


def test_an_edit_under_way_is_waited_for_by_nobody(pth: Path) -> None:
    """While an editor holds the journal a reader says so; while one holds the file another does; nothing is touched."""
    old = interrupted(pth)
    torn = pth.read_bytes()
    with journal_of(pth).open("r+b") as held:
        fcntl.flock(held, fcntl.LOCK_EX)
        with pytest.raises(OutputError, match="edited by another process"):
            ckpt_tools.open_checkpoint(pth)
    with pth.open("r+b") as held:
        fcntl.flock(held, fcntl.LOCK_EX)
        with pytest.raises(OutputError, match="edited by another process"):
            ckpt_tools.edit_in_place(pth, strip_module=True)
    assert pth.read_bytes() == torn
    assert as_read(pth) == old


def test_a_verdict_is_about_the_bytes_that_lie_there(pth: Path) -> None:
    """A half-edited file is read as it was, which is not what other programs read: scan says so, and does not pass it."""
    interrupted(pth)
    report = ckpt_tools.scan(pth)[0]
    assert (report.verdict, "half-edited" in report.safety.text) == ("unexamined", True)
    ckpt("scan", pth, code=1)
    assert ckpt_tools.inspect(pth).safety.verdict == "unexamined"


def test_first_bytes_that_are_written_in_part(pth: Path) -> None:
    """A disk may leave a part of the mark and a part of the first bytes: refused, with the command that rolls it back."""
    old = interrupted(pth)
    torn = pth.read_bytes()
    for start in (old[:4] + torn[4:8], torn[:5] + old[5:8], torn[:2] + old[2:8]):
        pth.write_bytes(start + torn[8:])
        with pytest.raises(DamagedFileError, match=r"(?s)is half edited.*ckpt repair "):
            ckpt_tools.inspect(pth)
        ckpt("repair", "--dry-run", pth, code=3)
        place = journal_of(pth)
        kept = place.read_bytes()
        ckpt("repair", pth)
        assert pth.read_bytes() == old
        place.write_bytes(kept)


def test_a_rollback_that_is_killed_at_each_call(pth: Path) -> None:
    """What is read stays the old file, or is refused until it is rolled back; the next rollback ends."""
    old = interrupted(pth)
    torn, place = pth.read_bytes(), journal_of(pth)
    whole, (code, counts) = place.read_bytes(), child(lambda: ckpt("repair", pth), None)
    assert (code, pth.read_bytes()) == (0, old)
    for fault in (Fault(call, count, "kill") for call in WRITES for count in range(1, counts.get(call, 0) + 1)):
        pth.write_bytes(torn)
        place.write_bytes(whole)
        child(lambda: ckpt("repair", pth), fault)
        assert run("repair", pth).exit_code in (0, 2), fault  # 2: there is nothing left to roll back
        assert pth.read_bytes() == old, fault
        ckpt_tools.edit_in_place(pth, strip_module=True)
        assert not place.exists(), fault


@pytest.mark.skipif(os.name != "posix" or os.geteuid() != 0, reason="only root gives files away")
def test_the_journal_of_another_user(pth: Path) -> None:
    """Whoever may put a file into a folder must not be able to change what somebody else reads or writes."""
    old = interrupted(pth)
    torn = pth.read_bytes()
    os.chown(journal_of(pth), 12345, -1)
    with pytest.raises(DamagedFileError, match=r"another user's\n.*owner, or root, puts the old bytes back"):
        ckpt_tools.open_checkpoint(pth)
    ckpt("repair", pth, code=3)
    assert pth.read_bytes() == torn
    os.chown(journal_of(pth), os.getuid(), -1)
    assert as_read(pth) == old
