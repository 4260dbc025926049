"""Edits in place: the same result as a copy, tensors untouched, and a kill at any moment leaves the old file or the new one."""

import contextlib
import os
import pickle
import signal
import tempfile
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal, TextIO

import pytest
import torch
from click.testing import CliRunner
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch.distributed import checkpoint as dcp

import ckpt_tools
from ckpt_tools.errors import (
    ChangedFileError,
    ContainerLimitError,
    DamagedFileError,
    OutputError,
)
from ckpt_tools.io.in_place import journal, marks, rollback
from ckpt_tools.io.output import Source
from ckpt_tools.io.temporaries import sync_folder
from ckpt_tools.torch import load_state_dict, save
from tests.support.commands import main


def weights(count: int = 12) -> dict[str, torch.Tensor]:
    """Wrapped names with a tie and a view."""
    made = {f"module.layer.{index}.weight": torch.full((30, 40), float(index)) for index in range(count)}
    made["module.head.weight"] = made["module.layer.0.weight"]
    made["module.view.weight"] = torch.arange(100.0)[10:90:2]
    return made


@pytest.fixture
def pth(tmp_path: Path) -> Path:
    """A wrapped training checkpoint."""
    path = tmp_path / "model.pth"
    torch.save({"model": weights(), "epoch": 3}, path)
    return path


def storage_bytes(path: Path) -> dict[str, tuple[int, int]]:
    """Where each storage lies."""
    with ckpt_tools.open_checkpoint(path) as checkpoint:
        entries = {tensor.node.storage for tensor in checkpoint.tensors}  # type: ignore[union-attr]
        return {storage.key: (storage.content.offset, storage.nbytes) for storage in entries}  # type: ignore[union-attr]


EDITS: list[dict[str, Any]] = [
    {"strip_module": True},
    {"unwrap": True, "map_location": "cuda:1"},
    {"add_prefix": "a.very.long.prefix.that.makes.the.pickle.grow.by.more.than.the.room.that.it.has." * 3},
    {"rename": r"layer\.(\d+)=block.\1.conv", "map_location": "cpu"},
    {"add_module": True},
]


@pytest.mark.parametrize("edit", EDITS, ids=[str(sorted(edit)) for edit in EDITS])
def test_the_result_is_that_of_a_copy(pth: Path, tmp_path: Path, edit: dict[str, Any]) -> None:
    """Edited in place, a file loads equal to one converted with the same options, and no storage has moved."""
    ckpt_tools.convert(pth, tmp_path / "copy.pth", **edit)
    before = storage_bytes(pth)
    report = ckpt_tools.edit_in_place(pth, **edit)
    assert storage_bytes(pth) == before
    assert report.bytes == pth.stat().st_size
    ours, other = (torch.load(path, map_location="cpu", weights_only=True) for path in (pth, tmp_path / "copy.pth"))
    assert list(ours["model"]) == list(other["model"])
    assert all(torch.equal(ours["model"][name], tensor) for name, tensor in other["model"].items())
    assert ours["epoch"] == 3
    devices = [ckpt_tools.inspect(path).totals["devices"] for path in (pth, tmp_path / "copy.pth")]
    assert devices[0] == devices[1]
    assert not marks.journal_path(pth).exists()


def test_edits_follow_each_other(pth: Path, tmp_path: Path) -> None:
    """Grow, shrink, grow: the pickle moves behind the tensors and back, torch loads with and without mmap, ties hold."""
    for edit in (EDITS[2], {"strip_prefix": EDITS[2]["add_prefix"]}, {"add_module": True}, {"strip_module": True}):
        ckpt_tools.edit_in_place(pth, **edit)
        for mmap in (False, True):
            loaded = torch.load(pth, weights_only=True, mmap=mmap)["model"]
            assert len(loaded) == 14
    assert loaded["head.weight"].data_ptr() == loaded["layer.0.weight"].data_ptr()
    ckpt_tools.convert(pth, tmp_path / "compact.pth", compact=True)
    assert (tmp_path / "compact.pth").stat().st_size <= pth.stat().st_size
    assert ckpt_tools.open_checkpoint(tmp_path / "compact.pth").decoded.dead_bytes() == 0


def test_dead_bytes_are_reported_and_removed(tmp_path: Path) -> None:
    """What an edit leaves behind is a finding whose command removes it."""
    path = tmp_path / "names.pth"
    torch.save({f"module.{'x' * 200}.{index}.weight": torch.ones(1) for index in range(300)}, path)
    ckpt_tools.edit_in_place(path, rename=r"x+\.=")
    findings = {finding.code: finding for finding in ckpt_tools.inspect(path).findings}
    assert "--compact" in findings["dead-bytes"].fix
    ckpt_tools.convert(path, tmp_path / "small.pth", compact=True)
    assert "dead-bytes" not in {finding.code for finding in ckpt_tools.inspect(tmp_path / "small.pth").findings}


def test_safetensors_in_the_room_that_the_header_has(tmp_path: Path) -> None:
    """Shorter names fit always; longer ones where --reserve has left room; else the file is left alone."""
    path = tmp_path / "model.safetensors"
    save_file({name: tensor.clone() for name, tensor in weights().items()}, path, metadata={"format": "pt", "note": "kept"})
    old = path.read_bytes()
    with pytest.raises(ContainerLimitError, match="room"):
        ckpt_tools.edit_in_place(path, add_prefix="a.long.prefix.")
    assert path.read_bytes() == old
    ckpt_tools.edit_in_place(path, strip_module=True)
    assert path.stat().st_size == len(old)
    assert list(load_file(path)) == [name.removeprefix("module.") for name in load_file_names(old, tmp_path)]
    ckpt_tools.convert(path, tmp_path / "roomy.safetensors")
    ckpt_tools.edit_in_place(tmp_path / "roomy.safetensors", add_prefix="a.long.prefix.")
    assert load_file(tmp_path / "roomy.safetensors")["a.long.prefix.layer.3.weight"].equal(torch.full((30, 40), 3.0))
    with ckpt_tools.open_checkpoint(tmp_path / "roomy.safetensors") as checkpoint:
        assert checkpoint.decoded.metadata["note"] == "kept"


@pytest.mark.parametrize("length", range(9))
def test_legacy_in_the_room_of_its_pickle(tmp_path: Path, length: int) -> None:
    """torch-legacy: names of any length that fit leave every storage where it was, and torch loads what a copy gives."""
    path = tmp_path / "legacy.pth"
    torch.save({"model": weights(), "epoch": 3}, path, _use_new_zipfile_serialization=False)
    ckpt_tools.convert(path, tmp_path / "copy.pth", rename=rf"^module\.={'x' * length}", map_location="cuda:1")
    before, size = places(path), path.stat().st_size
    ckpt_tools.edit_in_place(path, rename=rf"^module\.={'x' * length}", map_location="cuda:1")
    assert (places(path), path.stat().st_size) == (before, size)
    ours, other = (torch.load(file, map_location="cpu", weights_only=True) for file in (path, tmp_path / "copy.pth"))
    assert list(ours["model"]) == list(other["model"])
    assert all(torch.equal(ours["model"][name], tensor) for name, tensor in other["model"].items())
    assert ours["model"][f"{'x' * length}head.weight"].data_ptr() == ours["model"][f"{'x' * length}layer.0.weight"].data_ptr()
    assert ckpt_tools.inspect(path).totals["devices"] == {"cuda:1": 14}


def places(path: Path) -> list[tuple[int, int]]:
    """Where the storages lie; in torch-legacy an edit gives them other keys."""
    return sorted(storage_bytes(path).values())


def test_legacy_back_and_forth(tmp_path: Path) -> None:
    """The room stays: what was stripped can be added again, and again."""
    path = tmp_path / "legacy.pth"
    torch.save(weights(), path, _use_new_zipfile_serialization=False)
    for _ in range(2):
        ckpt_tools.edit_in_place(path, strip_module=True)
        assert "layer.3.weight" in torch.load(path, weights_only=True)
        ckpt_tools.edit_in_place(path, add_module=True)
        assert list(torch.load(path, weights_only=True)) == list(weights())


def test_legacy_without_room(tmp_path: Path) -> None:
    """Names that do not fit, and edits that leave storages out, are refused; the file is left alone."""
    path = tmp_path / "legacy.pth"
    torch.save({"model": weights(2), "odd": Odd()}, path, _use_new_zipfile_serialization=False)
    old = path.read_bytes()
    with pytest.raises(ContainerLimitError, match=r"would grow \d+ bytes beyond its room"):
        ckpt_tools.edit_in_place(path, add_prefix="a.very.long.prefix." * 40, objects="keep")
    with pytest.raises(ContainerLimitError, match="changes tensor bytes"):
        ckpt_tools.edit_in_place(path, strip_module=True, objects="drop")
    assert path.read_bytes() == old


def test_legacy_to_the_last_byte(tmp_path: Path) -> None:
    """Room for one name of exactly so many characters: it fits, and so do those that are a few bytes shorter."""
    path = tmp_path / "legacy.pth"
    torch.save(weights(2), path, _use_new_zipfile_serialization=False)
    old = path.read_bytes()
    with pytest.raises(ContainerLimitError) as error:
        ckpt_tools.edit_in_place(path, rename=rf"view={'v' * 5000}")
    fits = 5000 - int(error.value.what.split()[4])
    for length in range(fits - 8, fits + 1):
        path.write_bytes(old)
        ckpt_tools.edit_in_place(path, rename=rf"view={'v' * length}")
        assert torch.equal(
            torch.load(path, weights_only=True)[f"module.{'v' * length}.weight"], weights()["module.view.weight"]
        )
    with pytest.raises(ContainerLimitError, match="grow 1 bytes"):
        ckpt_tools.edit_in_place(path, rename=rf"{'v' * length}={'v' * (length + 1)}")


class Odd:
    """An object that holds a tensor of its own."""

    def __init__(self) -> None:
        self.tensor = torch.zeros(3)


def load_file_names(data: bytes, folder: Path) -> list[str]:
    """The names that safetensors reads from these bytes."""
    (folder / "old.safetensors").write_bytes(data)
    return list(load_file(folder / "old.safetensors"))


def test_reserve_is_for_safetensors(pth: Path, tmp_path: Path) -> None:
    """--reserve 0 gives the smallest header; a .pth has none."""
    for reserve in (0, 100_000):
        ckpt_tools.convert(pth, tmp_path / f"{reserve}.safetensors", select="model", reserve=reserve)
    sizes = [(tmp_path / f"{reserve}.safetensors").stat().st_size for reserve in (0, 100_000)]
    assert sizes[1] - sizes[0] == 100_000
    for reserve in range(8):  # whatever the room, the tensors begin at a multiple of eight bytes
        path = tmp_path / "room.safetensors"
        ckpt_tools.convert(pth, path, select="model", reserve=reserve, add_prefix="x" * (reserve + 1), overwrite=True)
        assert int.from_bytes(path.read_bytes()[:8], "little") % 8 == 0
    with pytest.raises(ckpt_tools.CkptError, match="`reserve`"):
        ckpt_tools.convert(pth, tmp_path / "out.pth", reserve=10)


@pytest.mark.parametrize("options", [["out.pth"], ["--keep", "*"], ["--dtype", "bf16"], ["--overwrite"], ["--format", "pth"]])
def test_what_does_not_go_in_place(pth: Path, options: list[str], tmp_path: Path) -> None:
    """Options that move tensors, and an OUT, are refused before anything is read."""
    old = pth.read_bytes()
    result = CliRunner().invoke(main, ["convert", str(pth), "--in-place", "--strip-module", *options])
    assert result.exit_code == 2
    assert pth.read_bytes() == old


def test_dry_run_changes_nothing(pth: Path) -> None:
    """The report comes, the file stays."""
    old = pth.read_bytes()
    assert ckpt_tools.edit_in_place(pth, strip_module=True, dry_run=True).state_dicts[0].renamed == 14
    assert pth.read_bytes() == old


def test_links_are_followed(pth: Path, tmp_path: Path) -> None:
    """A symlink stays a link; the file behind it is edited."""
    link = tmp_path / "link.pth"
    link.symlink_to(pth)
    ckpt_tools.edit_in_place(link, strip_module=True)
    assert link.is_symlink()
    assert "layer.0.weight" in torch.load(pth)["model"]


# --- kills and failures

CALLS = ("write", "fsync", "ftruncate", "unlink", "lseek")
Work = Callable[[Path], object]


@dataclass(frozen=True, slots=True)
class Cut:
    """How a process ended: its exit code, -9 for a kill; what it said; how many calls it made."""

    code: int
    said: str
    calls: int


def strip(path: Path) -> None:
    """The edit that is cut."""
    ckpt_tools.edit_in_place(path, strip_module=True)


def cut(path: Path, at: int, how: str, work: Work = strip) -> Cut:
    """Edit in a process that is killed, or whose system call fails, at call number `at`; "broken": all from then on."""
    with tempfile.TemporaryFile("w+") as said:
        pid = os.fork()
        if pid == 0:
            _live(path, at, how, work, said)
        _, status = os.waitpid(pid, 0)
        said.seek(0)
        text, _, calls = said.read().rpartition(" ")
        return Cut(os.waitstatus_to_exitcode(status), text, int(calls or 0))


def _live(path: Path, at: int, how: str, work: Work, said: TextIO) -> None:
    """The life of the forked process."""
    calls, real, leave = 0, {name: getattr(os, name) for name in CALLS}, os._exit

    def counted(name: str, function: Callable[..., Any]) -> Callable[..., Any]:
        def call(*arguments: Any) -> Any:
            nonlocal calls
            calls += 1
            if calls == at and how == "kill":
                if name == "write" and len(arguments[1]) > 1:
                    function(arguments[0], arguments[1][: len(arguments[1]) // 2])
                os.kill(os.getpid(), signal.SIGKILL)
            if (calls == at and how.isdigit()) or (calls >= at and how == "broken" and name != "unlink"):
                raise OSError(int(how) if how.isdigit() else 5, "injected")
            return function(*arguments)

        return call

    code = 1
    try:
        for name, function in real.items():
            setattr(os, name, counted(name, function))
        work(path)
        code = 0
    except BaseException as error:
        said.write(str(error))
    finally:
        os.write = real["write"]
        said.write(f" {calls}")
        said.flush()
        leave(code)


@pytest.mark.skipif(os.name != "posix", reason="signals")
@pytest.mark.parametrize("how", ["kill", "5", "28", "broken"])
def test_cut_at_every_call(pth: Path, how: str) -> None:
    """Killed or failing at any call, what is read is the old file or the new one; the next edit leaves no journal."""
    old = pth.read_bytes()
    done = cut(pth, 10_000, how)
    new, calls = pth.read_bytes(), done.calls
    assert calls > 8
    assert new != old
    seen = set()
    for at in range(1, calls + 1):
        pth.write_bytes(old)
        result = cut(pth, at, how)
        assert result.code != 0
        torn = pth.read_bytes()
        read = as_read_or_refused(pth, old)
        assert read in (old, new), f"torn at call {at}"
        assert pth.read_bytes() == torn
        assert torn in (old, new) or torn[:8] not in (old[:8], new[:8]), "half edited without a mark"
        journal.recover(pth)
        assert pth.read_bytes() == read
        assert not list(pth.parent.glob(".*ckpt-journal"))
        seen.add((read == new, torn == read))
    assert seen >= ({(False, True), (False, False)} if how in ("kill", "broken") else {(False, True)})


def as_read_or_refused(path: Path, old: bytes) -> bytes:
    """The bytes as read; the old ones where the file was left amid its first eight bytes: it is refused until rolled back."""
    with contextlib.suppress(DamagedFileError):
        return as_read(path)
    return old


def as_read(path: Path) -> bytes:
    """The bytes of a file as every command reads them."""
    with contextlib.closing(Source(path)) as source:
        buffer = bytearray(source.size)
        source.read_into(0, memoryview(buffer))
        assert source.read(source.size // 3, source.size // 2) == buffer[source.size // 3 :][: source.size // 2]
        return bytes(buffer)


def interrupted(path: Path, **edit: Any) -> bytes:
    """Leave the file as a kill leaves it, with its journal: the mark, and half of the first patch. Returns the old bytes."""
    old = path.read_bytes()
    pid = os.fork()
    if pid == 0:
        _die_after_half_a_patch(path, edit)
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 9
    assert path.read_bytes().startswith(marks.MARK)
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


@pytest.mark.skipif(os.name != "posix", reason="signals")
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
    result = CliRunner().invoke(main, ["repair", str(path)])
    assert (result.exit_code, "as it was before the edit" in result.output) == (0, True), result.output
    assert path.read_bytes() == old
    assert not marks.journal_path(path).exists()
    assert CliRunner().invoke(main, ["repair", str(path)]).exit_code == 2


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


@pytest.mark.skipif(os.name != "posix", reason="signals")
@pytest.mark.parametrize("writer", WRITERS, ids=lambda writer: writer.__name__)
def test_a_file_that_was_written_since_is_left_as_it_is(pth: Path, writer: Callable[[Path], None]) -> None:
    """Another checkpoint under the name of a half-edited one: every command takes it as it is, and says that a journal lies
    beside it; edits, killed or not, work on it."""
    interrupted(pth)
    stray = marks.journal_path(pth).read_bytes()
    writer(pth)
    new = pth.read_bytes()
    loaded = torch.load(pth, weights_only=True)["model"]
    assert codes(pth)["stray-journal"] == "warning"
    assert ckpt_tools.check(pth).verdict == "findings"
    assert as_read(pth) == new == pth.read_bytes()
    assert marks.journal_path(pth).read_bytes() == stray
    interrupted(pth, add_prefix="again.")
    assert list(load_state_dict(pth, select="model", unwrap=False)) == list(loaded)
    ckpt_tools.edit_in_place(pth, add_prefix="x.")
    assert list(torch.load(pth, weights_only=True)["model"]) == [f"x.{name}" for name in loaded]
    assert [path.read_bytes() for path in pth.parent.glob(".*ckpt-journal")] == [stray]


@pytest.mark.skipif(os.name != "posix", reason="signals")
def test_kills_over_kills(pth: Path, tmp_path: Path) -> None:
    """An edit that is killed, a rollback that is killed at every call, and again: what is read stays the old file."""
    old = interrupted(pth)
    torn, whole = pth.read_bytes(), marks.journal_path(pth).read_bytes()
    for at in range(1, 40):
        result = cut(pth, at, "kill", journal.recover)
        assert as_read_or_refused(pth, old) == old
        if result.code == 0:
            break
        if not marks.journal_path(pth).exists():
            pth.write_bytes(torn)
            marks.journal_path(pth).write_bytes(whole)
    assert result.code == 0
    assert at > 8
    assert pth.read_bytes() == old


@pytest.mark.skipif(os.name != "posix", reason="signals")
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
    assert CliRunner().invoke(main, ["repair", str(moved)]).exit_code == 0
    assert moved.read_bytes() == old
    assert "stray-journal" not in codes(pth)
    assert not list(pth.parent.glob(".*ckpt-journal"))


@pytest.mark.skipif(os.name != "posix", reason="signals")
def test_half_edited_and_without_its_journal(pth: Path) -> None:
    """Copied away without its journal, or with one that is another's or damaged: refused by every reader, and by torch."""
    interrupted(pth)
    whole, torn = marks.journal_path(pth).read_bytes(), pth.read_bytes()
    copy = pth.parent / "elsewhere" / "copy.pth"
    copy.parent.mkdir()
    for body in (None, whole, whole[:-1], b"anything"):
        copy.write_bytes(torn)
        if body is not None:
            marks.journal_path(copy).write_bytes(body)
        for work in (ckpt_tools.inspect, ckpt_tools.open_checkpoint, load_state_dict, journal.recover):
            with pytest.raises(DamagedFileError, match="is half edited"):
                work(copy)
        with pytest.raises(DamagedFileError, match="is half edited"):
            ckpt_tools.repair(copy, copy.with_name("out.pth"))
        assert copy.read_bytes() == torn
        assert body is None or marks.journal_path(copy).read_bytes() == body
        with pytest.raises(pickle.UnpicklingError):
            torch.load(copy, weights_only=True)


@pytest.mark.parametrize("at", [1, 4, 7])
def test_a_copy_whose_first_bytes_are_half_written(at: int, tmp_path: Path) -> None:
    """Found by an attack: copied with its journal amid its first eight bytes, it was shown as the pickle of a number."""
    torch.save(weights(), tmp_path / "in.pth", _use_new_zipfile_serialization=False)
    old = (tmp_path / "in.pth").read_bytes()
    mark = rollback.new_mark()
    cut = (rollback.Region(600, old[600:608], old[600:608]), rollback.Region(len(old), b"", b""))
    regions = (rollback.Region(0, old[:8], old[:8]), *cut)
    record = rollback.Record(0, 1, len(old), len(old), mark, regions)
    marks.journal_path(tmp_path / "in.pth").write_bytes(record.pack())
    assert ckpt_tools.inspect(tmp_path / "in.pth").container == "torch-legacy"  # a journal of another file, and a whole one
    (tmp_path / "in.pth").write_bytes(old[:at] + mark[at:8] + old[8:])
    for work in (ckpt_tools.inspect, ckpt_tools.edit_in_place):
        with pytest.raises(DamagedFileError, match="is half edited"):
            work(tmp_path / "in.pth")


@pytest.mark.skipif(os.name != "posix", reason="signals")
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
    assert marks.journal_path(pth).exists()


@pytest.mark.skipif(os.name != "posix", reason="signals")
def test_a_journal_of_bytes_that_nobody_has(pth: Path) -> None:
    """Found by the fuzzer: a forged journal made a small file gigabytes of zeros; what an edit cuts off is in its journal."""
    interrupted(pth)
    record = rollback.unpack(marks.journal_path(pth).read_bytes())
    assert record is not None
    marks.journal_path(pth).write_bytes(replace(record, size=1 << 40).pack())
    with pytest.raises(DamagedFileError, match="is half edited"):
        ckpt_tools.inspect(pth)


@pytest.mark.skipif(os.name != "posix", reason="signals")
def test_a_journal_that_was_never_whole(pth: Path) -> None:
    """Killed while it wrote the journal: the file is untouched; readers leave the rest, the next edit removes it."""
    old = interrupted(pth)
    whole = marks.journal_path(pth).read_bytes()
    pth.write_bytes(old)
    for length in (0, 5, 40, len(whole) - 1):
        marks.journal_path(pth).write_bytes(whole[:length])
        assert not codes(pth).keys() & {"half-edited", "stray-journal"}
        assert marks.journal_path(pth).exists()
    ckpt_tools.edit_in_place(pth, unwrap=True)
    assert not marks.journal_path(pth).exists()


@pytest.mark.skipif(os.name != "posix", reason="signals")
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
    assert not marks.journal_path(pth).exists()
    assert not codes(pth).keys() & {"half-edited", "stray-journal"}


@pytest.mark.skipif(os.name != "posix", reason="signals")
def test_a_disk_that_breaks_is_told_as_it_is(pth: Path) -> None:
    """Where the edit fails and putting the old bytes back too, the error names the journal that has them."""
    old, said = pth.read_bytes(), []
    for at in range(1, 30):
        said.append(cut(pth, at, "broken").said)
        journal.recover(pth)
        assert pth.read_bytes() == old or not said[-1] or "journal" in said[-1]
        pth.write_bytes(old)
    assert any("may be half edited" in text and str(marks.journal_path(pth)) in text for text in said)


@pytest.mark.skipif(os.name != "posix", reason="signals")
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
    assert "ckpt-journal" not in CliRunner().invoke(main, ["inspect", str(folder)]).output
    loaded = load_state_dict(folder, unwrap=False)
    assert all(torch.equal(loaded[name], tensor) for name, tensor in weights().items())
    assert states(folder) == before
    assert as_read(shard) == old
    ckpt_tools.convert(pth, folder, select="model", shard_size=20_000, format="pth", overwrite=True)
    assert not marks.journal_path(shard).exists()


@pytest.mark.skipif(os.name != "posix" or os.geteuid() == 0, reason="root may write everything")
def test_a_folder_that_cannot_be_written(pth: Path) -> None:
    """Read-only: a half-edited file is read; rolling it back is refused."""
    old = interrupted(pth)
    pth.chmod(0o400)
    pth.parent.chmod(0o500)
    try:
        assert as_read(pth) == old
        with pytest.raises(OutputError, match="cannot be rolled back"):
            journal.recover(pth)
    finally:
        pth.parent.chmod(0o700)


@pytest.mark.skipif(os.name != "posix", reason="owners")
def test_the_journal_of_another_user(pth: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whoever may put a file into a folder must not be able to change what somebody else reads or writes."""
    old = interrupted(pth)
    torn, place = pth.read_bytes(), marks.journal_path(pth)
    real = os.fstat

    def foreign(fd: int) -> os.stat_result:
        status = real(fd)
        if status.st_ino != place.stat().st_ino:
            return status
        return os.stat_result((*status[:4], 12345, *status[5:]), {"st_mtime_ns": status.st_mtime_ns})

    with monkeypatch.context() as patched:
        patched.setattr(os, "fstat", foreign)
        with pytest.raises(DamagedFileError, match=r"another user's\n.*owner, or root, puts the old bytes back"):
            ckpt_tools.open_checkpoint(pth)
        with pytest.raises(DamagedFileError, match="another user's"):
            journal.recover(pth)
    assert pth.read_bytes() == torn
    assert as_read(pth) == old


@pytest.mark.skipif(os.name != "posix", reason="modes")
@pytest.mark.parametrize("mode", [0o600, 0o640, 0o644])
def test_who_may_read_a_file_may_read_its_journal(pth: Path, mode: int) -> None:
    """The journal has the file's owner and mode: else a file that root edited would be closed to its owner after a kill."""
    pth.chmod(mode)
    interrupted(pth)
    assert marks.journal_path(pth).stat().st_mode == pth.stat().st_mode
    assert marks.journal_path(pth).stat().st_uid == pth.stat().st_uid


@pytest.mark.skipif(os.name != "posix", reason="signals")
def test_a_device_that_has_another_number_after_a_crash(pth: Path) -> None:
    """Some file systems number devices anew with every mount: the journal is this file's all the same."""
    old, place = interrupted(pth), marks.journal_path(pth)
    record = rollback.unpack(place.read_bytes())
    assert record is not None
    place.write_bytes(replace(record, device=record.device + 1).pack())
    assert as_read(pth) == old
    assert CliRunner().invoke(main, ["repair", str(pth)]).exit_code == 0
    assert (pth.read_bytes(), place.exists()) == (old, False)


@pytest.mark.skipif(os.name != "posix", reason="signals")
def test_a_journal_that_cannot_be_removed(pth: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A folder that takes no changes: the old bytes are put back, and it is said that they are."""
    old = interrupted(pth)

    def refuse(place: Path) -> None:
        raise PermissionError(13, "Permission denied", place)

    with monkeypatch.context() as patched:
        patched.setattr(os, "unlink", refuse)
        with pytest.raises(OutputError, match=r"is whole, but the journal .* cannot be removed"):
            journal.recover(pth)
    assert pth.read_bytes() == old
    assert marks.journal_path(pth).exists()
    assert journal.recover(pth) is False
    assert not marks.journal_path(pth).exists()


@pytest.mark.skipif(os.name != "posix", reason="locks")
def test_an_edit_that_ends_while_a_reader_looks(pth: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A journal that is removed between a reader's look and its lock is of an edit that is done."""
    new = pth.read_bytes()
    old = interrupted(pth)
    real = rollback._is_locked

    def late(fd: int) -> bool:
        marks.journal_path(pth).unlink()
        pth.write_bytes(new)
        return real(fd)

    monkeypatch.setattr(rollback, "_is_locked", late)
    assert as_read(pth) == new == old


@pytest.mark.skipif(os.name != "posix", reason="locks")
def test_an_edit_under_way_is_waited_for_by_nobody(pth: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """While an editor holds the journal a reader says so; while one holds the file another does; nothing is touched."""
    import fcntl

    monkeypatch.setattr(journal, "_PATIENCE", 0.05)
    old = interrupted(pth)
    torn = pth.read_bytes()
    with marks.journal_path(pth).open("r+b") as held:
        fcntl.flock(held, fcntl.LOCK_EX)
        with pytest.raises(OutputError, match="edited by another process"):
            ckpt_tools.open_checkpoint(pth)
    with pth.open("r+b") as held:
        fcntl.flock(held, fcntl.LOCK_EX)
        with pytest.raises(OutputError, match="edited by another process"):
            ckpt_tools.edit_in_place(pth, strip_module=True)
    assert pth.read_bytes() == torn
    assert as_read(pth) == old


@pytest.mark.skipif(os.name != "posix", reason="locks")
def test_readers_beside_an_edit(pth: Path) -> None:
    """A reader that looks at the journal in the moment before the editor locks it does not keep the edit from being made."""
    import fcntl

    old = interrupted(pth)
    with marks.journal_path(pth).open("rb") as held:
        fcntl.flock(held, fcntl.LOCK_SH)
        assert as_read(pth) == old
        journal.recover(pth)
    assert pth.read_bytes() == old


def test_a_file_that_changed_is_left_alone(pth: Path) -> None:
    """What was planned for other bytes is not written."""
    status = pth.stat()
    identity = (status.st_dev, status.st_ino, status.st_size, status.st_mtime_ns - 1)
    with pytest.raises(ChangedFileError):
        journal.patch(pth, [(0, b"x")], status.st_size, identity)
    assert not marks.journal_path(pth).exists()


@pytest.mark.skipif(os.name != "posix" or os.geteuid() == 0, reason="root may write everything")
def test_a_read_only_file_is_refused(pth: Path) -> None:
    """No write permission: said before anything is done."""
    pth.chmod(0o400)
    with pytest.raises(OutputError, match="in place"):
        ckpt_tools.edit_in_place(pth, strip_module=True)


@pytest.mark.skipif(os.name != "posix", reason="signals")
def test_a_verdict_is_about_the_bytes_that_lie_there(pth: Path) -> None:
    """A half-edited file is read as it was, which is not what other programs read: scan says so, and does not pass it."""
    interrupted(pth)
    report = ckpt_tools.scan(pth)[0]
    assert (report.verdict, "half-edited" in report.safety.text) == ("unexamined", True)
    assert CliRunner().invoke(main, ["scan", str(pth)]).exit_code == 1
    assert ckpt_tools.inspect(pth).safety.verdict == "unexamined"


@pytest.mark.skipif(os.name != "posix", reason="signals")
def test_first_bytes_that_are_written_in_part(pth: Path) -> None:
    """A disk may leave a part of the mark and a part of the first bytes: refused, with the command that rolls it back."""
    old = interrupted(pth)
    torn = pth.read_bytes()
    for start in (old[:4] + torn[4:8], torn[:5] + old[5:8], torn[:2] + old[2:8]):
        pth.write_bytes(start + torn[8:])
        with pytest.raises(DamagedFileError, match=r"(?s)is half edited.*ckpt repair "):
            ckpt_tools.inspect(pth)
        assert CliRunner().invoke(main, ["repair", "--dry-run", str(pth)]).exit_code == 3
        place = marks.journal_path(pth)
        kept = place.read_bytes()
        assert CliRunner().invoke(main, ["repair", str(pth)]).exit_code == 0
        assert pth.read_bytes() == old
        place.write_bytes(kept)


@pytest.mark.skipif(os.name != "posix", reason="locks")
@pytest.mark.parametrize("name", ["model", "model.pth.1"])
def test_the_journal_of_another_file_whose_name_begins_alike(pth: Path, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Found by an attack: an edit of `model` removed the new journal of `model.pth`, which left nothing to roll back."""
    other, real = pth.with_name(name), os.open
    torch.save(weights(), other)
    first, second = (pth, other) if name == "model" else (other, pth)
    made = marks.journal_path(first)  # `.model.pth.1.ckpt-journal` may be one of `model.pth` too

    def opened(place: Path, flags: int, mode: int = 0o777) -> int:
        fd = real(place, flags, mode)
        if place == made and flags & os.O_CREAT:
            monkeypatch.setattr(os, "open", real)
            ckpt_tools.edit_in_place(second, strip_module=True)
            assert made.exists()
        return fd

    monkeypatch.setattr(os, "open", opened)
    ckpt_tools.edit_in_place(first, strip_module=True)
    assert not list(pth.parent.glob(".*ckpt-journal"))


@pytest.mark.skipif(os.name != "posix", reason="locks")
def test_an_edit_beside_one_under_way(pth: Path) -> None:
    """`model` is edited while the journal of `model.pth` is locked, and not written yet."""
    import fcntl

    marks.journal_path(pth).touch()
    torch.save(weights(), pth.with_name("model"))
    with marks.journal_path(pth).open("r+b") as held:
        fcntl.flock(held, fcntl.LOCK_EX)
        ckpt_tools.edit_in_place(pth.with_name("model"), strip_module=True)


@pytest.mark.skipif(os.name != "posix", reason="links")
@pytest.mark.parametrize("what", ["journal", "file", "another journal"])
def test_a_journal_that_goes_before_the_file_changes(pth: Path, what: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing is written without a journal in its place: a kill would leave bytes that are not the old ones nor the new."""
    old, place, real = pth.read_bytes(), marks.journal_path(pth), sync_folder

    def late(folder: Path) -> None:
        real(folder)
        monkeypatch.setattr(journal, "sync_folder", real)
        (pth if what == "file" else place).rename(pth.with_name("gone"))
        if what == "another journal":
            place.write_bytes(b"x")

    monkeypatch.setattr(journal, "sync_folder", late)
    with pytest.raises(ChangedFileError, match="renamed, or its journal removed"):
        ckpt_tools.edit_in_place(pth, strip_module=True)
    assert (pth.with_name("gone") if what == "file" else pth).read_bytes() == old
    assert place.exists() == (what == "another journal")


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
def test_a_part_of_a_distributed_checkpoint(tmp_path: Path) -> None:
    """Found by an attack: torch found no archive any more where .metadata says that it lies, and check found nothing."""
    folder, link = tmp_path / "saved", tmp_path / "link.pth"
    dcp.save({"module.a": torch.ones(10)}, checkpoint_id=folder, no_dist=True)
    part = folder / "__0_0.distcp"
    link.symlink_to(part)
    old = part.read_bytes()
    assert ckpt_tools.check(folder, ignore=["wrapper-prefix"]).verdict == "healthy"
    for path in (part, link):
        with pytest.raises(ContainerLimitError, match=r"ckpt convert \S*saved OUT"):
            ckpt_tools.edit_in_place(path, map_location="cuda")
    assert part.read_bytes() == old
    for changed in (old[:-100], old[:-22] + b"x" * 22, b"PK\3\4", b""):
        part.write_bytes(changed)
        report = ckpt_tools.check(folder)
        assert report.exit_code
        assert report.container is None or "misplaced-chunk" in {row.code for row in report.findings}
    part.write_bytes(old)
    part.rename(tmp_path / "alone.distcp")
    ckpt_tools.edit_in_place(tmp_path / "alone.distcp", map_location="cuda")


@pytest.mark.parametrize("kind", ["safetensors", "pth"])
def test_a_shard_beside_its_index(pth: Path, tmp_path: Path, kind: Literal["safetensors", "pth"]) -> None:
    """Names in a shard stand in the index too: they stay as they are, and what is in no index changes."""
    folder = tmp_path / "shards"
    ckpt_tools.convert(pth, folder, select="model", shard_size=20_000, format=kind)
    for shard in sorted(folder.glob("*-of-*")):
        old = shard.read_bytes()
        with pytest.raises(ContainerLimitError, match=r"\.index\.json too.*\n.*ckpt convert \S*shards OUT"):
            ckpt_tools.edit_in_place(shard, strip_module=True)
        assert shard.read_bytes() == old
        other: dict[str, Any] = {"map_location": "cuda"} if kind == "pth" else {"drop_metadata": "format"}
        ckpt_tools.edit_in_place(shard, **other)
        assert shard.read_bytes() != old
    assert len(load_state_dict(folder, unwrap=False)) == 14
