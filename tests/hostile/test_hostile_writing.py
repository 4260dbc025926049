"""Writing: rows 89 to 95. Whatever happens, the target is the whole new file or what it was before."""

import errno
import os
import signal
import subprocess
import sys
import textwrap
from pathlib import Path
from typing import Any

import pytest
import torch

import ckpt_tools
from ckpt_tools.errors import ChangedFileError, ChecksumError, CkptError, ConvertError, OutputError, OutputExistsError
from tests.hostile.refusals import INTERRUPTIBLE, expect_convert_refused, listing
from tests.support.terminal import wait_for

SMALL, KERNEL, LARGE = 1000, 3 << 20, 40 << 20  # bytes: through the buffer, by copy_file_range, from where blocks are shared


def save(path: Path, size: int = SMALL, **more: torch.Tensor) -> Path:
    """A checkpoint of about this size, by torch."""
    torch.save({"module.a.w": torch.ones(size // 4)} | more, path)
    return path


@pytest.fixture
def source(tmp_path: Path) -> Path:
    """A small input."""
    return save(tmp_path / "in.pth")


def names(path: Path) -> list[str]:
    """The tensors in a .pth, as torch sees them."""
    return list(torch.load(path))


# --- 89: what the output cannot hold


@pytest.mark.parametrize(("name", "said"), [("__metadata__", "'__metadata__'"), ("a\ud800.w", "lone surrogate")])
def test_89_names_that_safetensors_cannot_hold(name: str, said: str, tmp_path: Path) -> None:
    """The one that it reserves, and text that JSON in UTF-8 cannot hold."""
    path = tmp_path / "in.pth"
    torch.save({name: torch.zeros(2), "a.w": torch.zeros(1)}, path)
    expect_convert_refused(path, ConvertError, said, target="out.safetensors")
    ckpt_tools.convert(path, tmp_path / "out.pth")


# --- 90: out is in, and out exists


@pytest.mark.parametrize("size", [SMALL, KERNEL, LARGE])
def test_90_out_is_in(size: int, tmp_path: Path) -> None:
    """A file may be replaced by its own conversion."""
    path = save(tmp_path / "in.pth", size)
    ckpt_tools.convert(path, path, strip_module=True, overwrite=True)
    assert names(path) == ["a.w"]
    assert list(tmp_path.iterdir()) == [path]


def test_90_out_is_a_hard_link_to_in(source: Path) -> None:
    """The other name keeps the old bytes."""
    link = source.with_name("link.pth")
    os.link(source, link)
    ckpt_tools.convert(source, link, strip_module=True, overwrite=True)
    assert (names(source), names(link)) == (["module.a.w"], ["a.w"])


def test_90_out_is_a_symlink_to_in(source: Path) -> None:
    """The link stays a link, what it points to is replaced."""
    link = source.with_name("link.pth")
    link.symlink_to("in.pth")
    ckpt_tools.convert(source, link, strip_module=True, overwrite=True)
    assert link.is_symlink()
    assert names(source) == ["a.w"]


def test_90_out_is_a_dangling_symlink(source: Path, tmp_path: Path) -> None:
    """What the link names is made; into a folder that is not there it is not."""
    link = source.with_name("link.pth")
    link.symlink_to("new.pth")
    ckpt_tools.convert(source, link, strip_module=True)
    assert names(tmp_path / "new.pth") == ["a.w"]
    lost = source.with_name("lost.pth")
    lost.symlink_to("nowhere/new.pth")
    expect_convert_refused(source, OutputError, "There is no folder", target="lost.pth")


@pytest.mark.parametrize("spelling", ["in.pth", "./in.pth", "../{}/in.pth"])
def test_90_out_exists(spelling: str, source: Path, tmp_path: Path) -> None:
    """Never without being told to, the input itself included."""
    expect_convert_refused(
        source, OutputExistsError, "already exists", "`overwrite=True`", target=spelling.format(tmp_path.name)
    )


def test_90_out_appears_meanwhile(tmp_path: Path) -> None:
    """Somebody else's file that came while we wrote stays."""
    source, target = save(tmp_path / "in.pth", KERNEL), tmp_path / "out.pth"

    def progress(done: int, size: int) -> None:
        target.write_bytes(b"theirs")

    with pytest.raises(OutputExistsError, match="already exists"):
        ckpt_tools.convert(source, target, dtype="fp64", progress=progress)
    assert target.read_bytes() == b"theirs"
    assert sorted(path.name for path in tmp_path.iterdir()) == ["in.pth", "out.pth"]


@pytest.mark.parametrize("name", ["\u5b57" * 83 + ".pth", "x" * 251 + ".pth", "out.pth", "a b.pth", "-.pth"])
def test_90_every_name_that_the_system_takes(name: str, source: Path) -> None:
    """The temporary beside it must not need a longer name."""
    ckpt_tools.convert(source, source.with_name(name))
    assert names(source.with_name(name)) == ["module.a.w"]


# --- 91: targets that cannot be


def test_91_impossible_targets(source: Path, tmp_path: Path) -> None:
    """A folder, a missing one, a file as a folder, a pipe, names that the system refuses."""
    (tmp_path / "folder.pth").mkdir()
    (tmp_path / "loop").symlink_to("loop")
    os.mkfifo(tmp_path / "pipe.pth")
    for target, (error, said) in {
        "folder.pth": (OutputError, "is a directory"), "missing/out.pth": (OutputError, "There is no folder"),
        "in.pth/out.pth": (OutputError, "There is no folder"), "loop/out.pth": (OutputError, "There is no folder"),
        "pipe.pth": (OutputError, "not a regular file"), "x" * 300 + ".pth": (OutputError, "cannot be written"),
        "a\0b.pth": (OutputError, "cannot be written"),
    }.items():  # fmt: skip
        expect_convert_refused(source, error, said, target=target)
        expect_convert_refused(source, error, said, target=target, overwrite=True)
        expect_convert_refused(source, error, said, target=target, dry_run=True)


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write anywhere")
def test_91_read_only_folder(source: Path, tmp_path: Path) -> None:
    """A folder in which nothing may be made."""
    folder = tmp_path / "closed"
    folder.mkdir(mode=0o555)
    expect_convert_refused(source, OutputError, "is read-only", target="closed/out.pth")


# --- 92 and 93: disks that are full or fail


def failing(monkeypatch: pytest.MonkeyPatch, name: str, number: int, after: int = 0) -> list[str]:
    """Make a function of `os` fail with this errno, after some calls that work; returns the list of failed calls."""
    real, failed, left = getattr(os, name), [], [after]

    def fail(*args: Any, **options: Any) -> Any:
        left[0] -= 1
        if left[0] >= 0:
            return real(*args, **options)
        failed.append(name)
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr(os, name, fail)
    return failed


@pytest.mark.parametrize(
    ("function", "size", "options", "number", "replaced"),
    [
        ("write", SMALL, {}, errno.ENOSPC, True), ("write", KERNEL, {"dtype": "fp64"}, errno.EFBIG, False),
        ("write", LARGE, {"strip_module": True}, errno.ENOSPC, False), ("copy_file_range", KERNEL, {}, errno.ENOSPC, False),
        ("copy_file_range", LARGE, {}, errno.EFBIG, True),
    ],
)  # fmt: skip
def test_92_disk_full(
    function: str, size: int, options: dict[str, Any], number: int, replaced: bool, tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    """What is needed and what there is; the old file as it was; the temporary gone."""
    source, target = save(tmp_path / "in.pth", size), tmp_path / "out.pth"
    if replaced:
        target.write_bytes(b"old")
    before = listing(tmp_path)
    failed = failing(monkeypatch, function, number)
    with pytest.raises(OutputError, match="no space") as caught:
        ckpt_tools.convert(source, target, overwrite=replaced, **options)
    monkeypatch.undo()
    assert failed
    assert "It needs " in str(caught.value)
    assert " bytes left" in str(caught.value)
    assert listing(tmp_path) == before
    assert not replaced or target.read_bytes() == b"old"


def test_92_file_size_limit(tmp_path: Path) -> None:
    """A real EFBIG: the process may write files of a megabyte only."""
    save(tmp_path / "in.pth", KERNEL)
    before = listing(tmp_path)
    limit = "import resource; resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 20, 1 << 20))"
    done = command(tmp_path, ["convert", "in.pth", "out.pth"], first=limit)
    assert (done.returncode, b"no space" in done.stderr) == (3, True), done.stderr
    assert listing(tmp_path) == before


def test_93_no_hard_links(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A file system without them: the file is renamed, and one that is there still counts."""
    source = save(tmp_path / "in.pth")
    failing(monkeypatch, "link", errno.EPERM)
    ckpt_tools.convert(source, tmp_path / "out.pth")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["in.pth", "out.pth"]

    def progress(*_: int) -> None:
        (tmp_path / "late.pth").write_bytes(b"theirs")

    with pytest.raises(OutputExistsError):
        ckpt_tools.convert(source, tmp_path / "late.pth", progress=progress)
    assert (tmp_path / "late.pth").read_bytes() == b"theirs"


@pytest.mark.parametrize("error", [KeyboardInterrupt, SystemExit, MemoryError, ValueError, CkptError])
@pytest.mark.parametrize("replaced", [False, True])
def test_93_any_exception(error: type[BaseException], replaced: bool, tmp_path: Path) -> None:
    """Whatever is raised while the bytes move, nothing is left of them."""
    source, target = save(tmp_path / "in.pth", KERNEL), tmp_path / "out.pth"
    if replaced:
        target.write_bytes(b"old")
    before = listing(tmp_path)

    def progress(done: int, size: int) -> None:
        raise error("stop")

    with pytest.raises(error):
        ckpt_tools.convert(source, target, overwrite=replaced, progress=progress)
    assert listing(tmp_path) == before


# --- 94: signals


def environment() -> dict[str, str]:
    """A small environment in which this package is found."""
    return {"PYTHONPATH": str(Path(ckpt_tools.__file__).parent.parent), "PATH": os.environ["PATH"]}


def script(first: str, arguments: list[str]) -> list[str]:
    """The command line in a fresh interpreter, after a statement of ours."""
    code = f"{INTERRUPTIBLE}\n{first}\nfrom ckpt_tools.cli import main\nmain(prog_name='ckpt')"
    return [sys.executable, "-c", code, *arguments]


def command(folder: Path, arguments: list[str], first: str = "") -> subprocess.CompletedProcess[bytes]:
    """Its result."""
    return subprocess.run(script(first, arguments), cwd=folder, env=environment(), capture_output=True, check=False)


SLOW = textwrap.dedent("""
    import os, time
    def slowly(real):
        def call(*arguments):
            done = real(*arguments)
            if len(arguments) == 2 and isinstance(arguments[1], int) or len(arguments[1]) > 100:
                time.sleep(0.3)
            return done
        return call
    os.write = slowly(os.write)
    kernel = os.copy_file_range
    def few(source, target, count, *offsets):
        time.sleep(0.3)
        return kernel(source, target, min(count, 1 << 20), *offsets)
    os.copy_file_range = few
""")


@pytest.mark.parametrize(
    ("number", "code", "size", "started"),
    [
        (signal.SIGINT, 130, 8 << 20, 0), (signal.SIGINT, 130, LARGE, 2 << 20), (signal.SIGTERM, 143, 8 << 20, 1 << 20),
        (signal.SIGKILL, -9, 8 << 20, 1 << 20), (signal.SIGKILL, -9, LARGE, 2 << 20),
    ],
)  # fmt: skip
def test_94_signals(number: signal.Signals, code: int, size: int, started: int, tmp_path: Path) -> None:
    """Interrupted, terminated or killed: the old file. Only a kill leaves the temporary, which the next run removes."""
    save(tmp_path / "in.pth", size)
    (tmp_path / "out.pth").write_bytes(b"old")
    arguments = ["convert", "in.pth", "out.pth", "--strip-module", "--overwrite"]
    running = subprocess.Popen(
        script(SLOW, arguments), cwd=tmp_path, env=environment(), stdout=subprocess.PIPE, stderr=subprocess.PIPE
    )
    wait_for(lambda: any(path.stat().st_size >= started for path in tmp_path.glob(".out.pth.*.ckpt-tmp")))
    running.send_signal(number)
    _, told = running.communicate(timeout=20)
    assert running.returncode == code, told
    assert b"Traceback" not in told
    assert (tmp_path / "out.pth").read_bytes() == b"old"
    left = list(tmp_path.glob(".*"))
    assert bool(left) is (number == signal.SIGKILL)
    assert command(tmp_path, arguments).returncode == 0
    assert names(tmp_path / "out.pth") == ["a.w"]
    assert not list(tmp_path.glob(".*"))


# --- 95: the input changes


@pytest.mark.parametrize("options", [{"dtype": "fp64"}, {"strip_module": True}])
@pytest.mark.parametrize("change", ["shrinks", "grows", "is written to"])
def test_95_input_changes(change: str, options: dict[str, Any], tmp_path: Path) -> None:
    """An input that shrinks, grows or is written to while it is read: refused, and no crash."""
    source = save(tmp_path / "in.pth", 20 << 20)
    size = source.stat().st_size

    def progress(done: int, total: int) -> None:
        if change == "is written to":
            with source.open("r+b") as file:
                file.seek(size // 2)
                file.write(b"other")
        else:
            os.truncate(source, size // 2 if change == "shrinks" else size + 1)

    with pytest.raises((ChangedFileError, ChecksumError), match=r"changed (while it was read|after they were saved)"):
        ckpt_tools.convert(source, tmp_path / "out.pth", progress=progress, **options)
    assert list(tmp_path.iterdir()) == [source]


def test_95_input_is_replaced(tmp_path: Path) -> None:
    """Another file that takes the input's name is another file: what was opened is read to its end."""
    source, other = save(tmp_path / "in.pth", KERNEL), save(tmp_path / "other.pth")

    def progress(done: int, total: int) -> None:
        if other.exists():
            other.replace(source)

    ckpt_tools.convert(source, tmp_path / "out.pth", dtype="fp64", progress=progress)
    assert torch.load(tmp_path / "out.pth")["module.a.w"].numel() == KERNEL // 4
