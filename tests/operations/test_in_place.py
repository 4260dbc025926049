"""Edits in place: the same result as a copy, tensors untouched, and a kill at any moment leaves the old file or the new one."""

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

import ckpt_tools
from ckpt_tools.cli import main
from ckpt_tools.errors import ChangedFileError, ContainerLimitError, OutputError
from ckpt_tools.io import journal


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
    assert not journal.journal_path(pth).exists()


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
    with pytest.raises(ckpt_tools.CkptError, match="--reserve"):
        ckpt_tools.convert(pth, tmp_path / "out.pth", reserve=10)


@pytest.mark.parametrize("options", [["out.pth"], ["--keep", "*"], ["--dtype", "bf16"], ["--overwrite"], ["--format", "pth"]])
def test_what_does_not_go_in_place(pth: Path, options: list[str], tmp_path: Path) -> None:
    """Options that move tensors, and an OUT, are refused before anything is read."""
    from click.testing import CliRunner

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

CUT = """
import os, sys
from ckpt_tools import inplace
calls = 0
def counted(function):
    def call(*arguments):
        global calls
        calls += 1
        if calls == int(sys.argv[2]):
            if sys.argv[3] == "kill":
                if function is os.write and len(arguments[1]) > 1:
                    function(arguments[0], arguments[1][: len(arguments[1]) // 2])
                os.kill(os.getpid(), 9)
            if sys.argv[3] != "broken":
                raise OSError(int(sys.argv[3]), os.strerror(int(sys.argv[3])))
        if sys.argv[3] == "broken" and calls >= int(sys.argv[2]) and function is not real["unlink"]:
            raise OSError(5, os.strerror(5))
        return function(*arguments)
    return call
real = {name: getattr(os, name) for name in ("write", "fsync", "ftruncate", "unlink", "lseek")}
for name, function in real.items():
    setattr(os, name, counted(function))
try:
    inplace.edit_in_place(sys.argv[1], strip_module=True)
finally:
    print(calls)
"""


def cut(path: Path, at: int, how: str) -> subprocess.CompletedProcess[str]:
    """Edit in a process that is killed, or whose system call fails, at call number `at`; "broken": all from then on."""
    environment = {**os.environ, "PYTHONPATH": str(Path(__file__).parents[2])}
    return subprocess.run([sys.executable, "-c", CUT, str(path), str(at), how], capture_output=True, text=True, env=environment)


@pytest.mark.skipif(os.name != "posix", reason="signals")
@pytest.mark.parametrize("how", ["kill", "5", "28", "broken"])
def test_cut_at_every_call(pth: Path, how: str) -> None:
    """Killed or failing at any call, the file is the old one or the new one after the next open, and no journal is left."""
    old = pth.read_bytes()
    done = cut(pth, 10_000, how)
    new, calls = pth.read_bytes(), int(done.stdout.split()[-1])
    assert calls > 8
    assert new != old
    seen = set()
    for at in range(1, calls + 1):
        pth.write_bytes(old)
        result = cut(pth, at, how)
        assert result.returncode != 0
        with ckpt_tools.open_checkpoint(pth) as checkpoint:
            assert len(checkpoint.tensors) == 14
        assert pth.read_bytes() in (old, new), f"torn at call {at}"
        assert not journal.journal_path(pth).exists()
        seen.add(pth.read_bytes() == new)
    assert False in seen


def interrupted(path: Path) -> bytes:
    """Leave the file as a kill in the middle leaves it, with its journal; returns the old bytes."""
    old = path.read_bytes()
    for at in range(1, 60):
        path.write_bytes(old)
        cut(path, at, "kill")
        if path.read_bytes() != old and journal.journal_path(path).exists():
            return old
        journal.journal_path(path).unlink(missing_ok=True)
    raise AssertionError("no kill left a torn file")


@pytest.mark.skipif(os.name != "posix", reason="signals")
def test_a_torn_journal_and_a_foreign_one(pth: Path) -> None:
    """A journal that is not whole is dropped; one for another inode is refused and nothing is written."""
    old = interrupted(pth)
    place = journal.journal_path(pth)
    whole = place.read_bytes()
    torn = pth.read_bytes()
    copy = pth.with_name("copy.pth")
    copy.write_bytes(torn)
    journal.journal_path(copy).write_bytes(whole)
    with pytest.raises(OutputError, match="another file"):
        ckpt_tools.open_checkpoint(copy)
    assert copy.read_bytes() == torn
    ckpt_tools.open_checkpoint(pth).close()
    assert pth.read_bytes() == old
    place.write_bytes(whole[:-1])
    ckpt_tools.open_checkpoint(pth).close()
    assert pth.read_bytes() == old
    assert not place.exists()


@pytest.mark.skipif(os.name != "posix", reason="signals")
def test_a_disk_that_breaks_is_told_as_it_is(pth: Path) -> None:
    """Where the edit fails and putting the old bytes back too, the error names the journal that has them."""
    old, said = pth.read_bytes(), []
    for at in range(1, 30):
        said.append(cut(pth, at, "broken").stderr)
        ckpt_tools.open_checkpoint(pth).close()
        assert pth.read_bytes() == old or not said[-1] or "is edited, and the edit may be undone" in said[-1]
        pth.write_bytes(old)
    assert any("half edited" in text and str(journal.journal_path(pth)) in text for text in said)


@pytest.mark.skipif(os.name != "posix", reason="signals")
def test_a_shard_is_rolled_back_too(pth: Path, tmp_path: Path) -> None:
    """Whoever reads a folder of shards puts the old bytes of one back whose edit was killed."""
    folder = tmp_path / "shards"
    ckpt_tools.convert(pth, folder, select="model", shard_size=20_000, format="pth")
    shard = folder / "pytorch_model-00001-of-00003.bin"
    old = interrupted(shard)
    with ckpt_tools.open_checkpoint(folder) as checkpoint:
        assert len(checkpoint.tensors) == 14
    assert shard.read_bytes() == old
    assert not journal.journal_path(shard).exists()


@pytest.mark.skipif(os.name != "posix", reason="locks")
def test_a_journal_that_a_reader_took_away_is_made_again(pth: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A reader that comes between the making of a journal and its lock removes it: the edit has one all the same."""
    lock, write, locked = journal._lock, journal._write, list[int]()

    def late(fd: int) -> None:
        if not locked:
            journal.journal_path(pth).unlink()
        locked.append(fd)
        lock(fd)

    def watched(fd: int, offset: int, data: bytes) -> None:
        assert journal.journal_path(pth).exists()
        write(fd, offset, data)

    monkeypatch.setattr(journal, "_lock", late)
    monkeypatch.setattr(journal, "_write", watched)
    ckpt_tools.edit_in_place(pth, strip_module=True)
    assert len(locked) == 2
    assert "layer.0.weight" in torch.load(pth)["model"]


@pytest.mark.skipif(os.name != "posix", reason="owners")
def test_the_journal_of_another_user_is_refused(pth: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whoever may put a file into a folder must not be able to make somebody else write."""
    old = interrupted(pth)
    torn = pth.read_bytes()
    with monkeypatch.context() as patched:
        patched.setattr(os, "geteuid", lambda: os.getuid() + 1)
        with pytest.raises(OutputError, match="an edit by another user"):
            ckpt_tools.open_checkpoint(pth)
    assert pth.read_bytes() == torn
    ckpt_tools.open_checkpoint(pth).close()
    assert pth.read_bytes() == old


@pytest.mark.skipif(os.name != "posix", reason="locks")
def test_an_edit_that_ends_while_a_reader_looks(pth: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A journal that is removed between a reader's look and its lock is of an edit that is done: the new bytes stay."""
    old = interrupted(pth)
    torn, lock = pth.read_bytes(), journal._lock

    def late(fd: int) -> None:
        journal.journal_path(pth).unlink()
        lock(fd)

    monkeypatch.setattr(journal, "_lock", late)
    journal.recover(pth)
    assert pth.read_bytes() == torn != old


@pytest.mark.skipif(os.name != "posix", reason="locks")
def test_an_edit_under_way_is_waited_for_by_nobody(pth: Path) -> None:
    """While the journal is locked, a reader says so and touches nothing."""
    import fcntl

    old = interrupted(pth)
    with journal.journal_path(pth).open("r+b") as held:
        fcntl.flock(held, fcntl.LOCK_EX)
        with pytest.raises(OutputError, match="edited by another process"):
            ckpt_tools.open_checkpoint(pth)
    ckpt_tools.open_checkpoint(pth).close()
    assert pth.read_bytes() == old


def test_a_file_that_changed_is_left_alone(pth: Path) -> None:
    """What was planned for other bytes is not written."""
    status = pth.stat()
    identity = (status.st_dev, status.st_ino, status.st_size, status.st_mtime_ns - 1)
    with pytest.raises(ChangedFileError):
        journal.patch(pth, [(0, b"x")], status.st_size, identity)
    assert not journal.journal_path(pth).exists()


@pytest.mark.skipif(os.name != "posix" or os.geteuid() == 0, reason="root may write everything")
def test_a_read_only_file_is_refused(pth: Path) -> None:
    """No write permission: said before anything is done."""
    pth.chmod(0o400)
    with pytest.raises(OutputError, match="in place"):
        ckpt_tools.edit_in_place(pth, strip_module=True)
