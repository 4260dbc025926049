"""What cannot be read, or is not followed, is named and fails; it is never passed over in silence."""

import ctypes
import json
import os
import re
import shutil
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support.commands import ckpt
from tests.support.samples import FIXTURES
from tests.support.terminal import ROOT, run
from tests.support.without import Done
from tests.support.without import run as many

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="modes, pipes and links as Linux has them")
SINGLE = FIXTURES / "single.pth"
EVIL = b"cos\nsystem\n(S'true'\ntR."
_DROP_FROM_BOUNDING_SET, _DAC_OVERRIDE, _DAC_READ_SEARCH = 24, 1, 2


def held_to_modes() -> None:
    """In a child that has not begun yet: modes of files hold for root too, as for everyone else."""
    libc = ctypes.CDLL(None)
    for capability in (_DAC_OVERRIDE, _DAC_READ_SEARCH):
        libc.prctl(_DROP_FROM_BOUNDING_SET, capability, 0, 0, 0)


def limited(*lines: str) -> list[Done]:
    """These commands one after another, by someone who may not read everything."""
    environment = {**os.environ, "COLUMNS": "200", "PYTHONPATH": str(ROOT)}
    return many([line.split() for line in lines], Path.cwd(), environment, before=held_to_modes)


@pytest.fixture
def top(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A folder with a good checkpoint, what may not be read, what is no file, and links."""
    monkeypatch.chdir(tmp_path)
    top, elsewhere = tmp_path / "top", tmp_path / "elsewhere"
    for folder in (top / "unlisted", top / "unsearched", top / "own", elsewhere):
        folder.mkdir(parents=True)
        shutil.copy(SINGLE, folder / "model.pth")
    shutil.copy(SINGLE, top / "good.pth")
    (top / "unreadable.pth").write_bytes(EVIL)
    (top / "outside").symlink_to(elsewhere)
    (top / "up").symlink_to("..")
    (top / "inside").symlink_to("own")
    (top / "own" / "again").symlink_to(top)
    (top / "loop.pth").symlink_to("loop.pth")
    (top / "gone.pth").symlink_to("nothing")
    (top / "linked.pth").symlink_to(elsewhere / "model.pth")
    os.mkfifo(top / "pipe.pth")
    (top / "device").symlink_to("/dev/null")
    with socket.socket(socket.AF_UNIX) as server:
        server.bind("top/socket")
    modes = {"top/unlisted": 0, "top/unsearched": 0o600, "top/unreadable.pth": 0}
    for name, mode in modes.items():
        os.chmod(name, mode)
    unlisted = "import os; os.listdir('top/unlisted')"
    if not subprocess.run([sys.executable, "-c", unlisted], preexec_fn=held_to_modes, stderr=subprocess.DEVNULL).returncode:
        pytest.skip("modes do not hold here")
    yield Path("top")
    for name in (*modes, *(f"alone/{os.path.basename(name)}/{os.path.basename(name)}" for name in modes)):
        if os.path.lexists(name):  # so that pytest can remove them
            os.chmod(name, 0o700)


def test_scan_names_all_of_it(top: Path) -> None:
    """Each is "could not be examined" by name, with the reason, and fails; what links inside lead to is looked through once."""
    (done,) = limited("scan --json top")
    found = {row["path"]: row for row in map(json.loads, done.out.splitlines())}
    assert done.code == 1
    assert {path for path, row in found.items() if row["verdict"] == "plain"} == {
        "top/good.pth", "top/own/model.pth", "top/linked.pth",
    }  # fmt: skip
    reasons = {path: row["unexamined"][0]["why"] for path, row in found.items() if row["verdict"] == "unexamined"}
    special = "is not a regular file (a pipe, socket or device)."
    assert reasons == {
        "top/unlisted": "The folder cannot be listed. Permission denied.",
        "top/unsearched/model.pth": "Permission denied.",
        "top/unreadable.pth": "Permission denied.",
        "top/outside": "a link to a folder elsewhere, which is not followed",
        "top/up": "a link to a folder elsewhere, which is not followed",
        "top/loop.pth": "Too many levels of symbolic links.",
        "top/gone.pth": "It is a link to a file that is not there.",
        "top/pipe.pth": f"top/pipe.pth {special}", "top/device": f"top/device {special}", "top/socket": f"top/socket {special}",
    }  # fmt: skip
    assert len(found) == 3 + len(reasons)


def test_each_alone_fails(top: Path) -> None:
    """One of them is enough for exit code 1, in a folder where all else is good."""
    names = ("unlisted", "unsearched", "unreadable.pth", "outside", "pipe.pth", "socket", "gone.pth")
    for name in names:
        alone = Path("alone", name)
        alone.mkdir(parents=True)
        (top / name).rename(alone / name)
        shutil.copy(SINGLE, alone / "good.pth")
    for name, done in zip(names, limited(*(f"scan alone/{name}" for name in names)), strict=True):
        assert done.code == 1, name
        assert f"alone/{name}/{name}" in done.out
        assert "could not be examined" in done.out


def test_what_is_named_on_the_command_line(top: Path) -> None:
    """A link that the user names is followed; what may not be read is said so, and the others are examined all the same."""
    codes = {"scan": 1, "check": 3, "inspect": 3}
    names = ("top/unreadable.pth", "top/unlisted/model.pth", "top/unlisted")
    beside = [f"{command} top/good.pth {name}" for command in codes for name in names]
    alone = ["top/unlisted/model.pth", "show top/unlisted/model.pth w", "convert top/unreadable.pth out.pth",
             "check --latest-good top/unlisted/model.pth", "check --latest-good top"]  # fmt: skip
    linked, *others = limited("scan top/outside", *beside, *alone)
    assert (linked.code, linked.out) == (0, "top/outside/model.pth: safe: no code in it\n")
    for line, done in zip(beside, others, strict=False):
        said = done.out + done.err
        assert (done.code, "top/good.pth" in said, "Permission denied" in said) == (codes[line.split()[0]], True, True), done
        assert "no such file" not in said.lower()
    for line, done in zip(alone, others[len(beside) :], strict=True):
        assert done.code in (1, 3), (line, done)
        assert "ermission denied" in done.err or "cannot be listed" in done.err, (line, done)
        assert "no such file" not in done.err.lower()


@pytest.mark.parametrize("command", ["check", "inspect"])
def test_check_and_inspect_of_a_folder(command: str, top: Path) -> None:
    """What cannot be read is an error of its own and stops nothing else; what is no checkpoint, or not followed, is named."""
    (done,) = limited(f"{command} --json top")
    *rows, others = map(json.loads, done.out.splitlines())
    unreadable = {row["path"] for row in rows if "error" in row or row.get("verdict") == "unreadable"}
    assert done.code == 3
    assert unreadable == {"top/unlisted", "top/unsearched/model.pth", "top/unreadable.pth", "top/loop.pth", "top/gone.pth"}
    assert {row["path"] for row in rows} - unreadable == {"top/good.pth", "top/own/model.pth", "top/linked.pth"}
    assert set(others["no_checkpoints"]) == {"top/outside", "top/up", "top/pipe.pth", "top/device", "top/socket"}


def hook(name: str) -> tuple[list[str], re.Pattern[str]]:
    """What pre-commit runs, and which files it hands over, as .pre-commit-hooks.yaml says."""
    (text,) = re.findall(rf"- id: {name}\n((?:  .*\n)*)", (ROOT / ".pre-commit-hooks.yaml").read_text())
    said = dict(re.findall(r"  (\w+): (.*)\n", text))
    return [*said["entry"].split()[1:], *re.findall(r"[^\[\], ]+", said.get("args", ""))], re.compile(said.get("files", ""))


EVIL_NAMES = ("a.pkl.gz", "a.PTH", "a.mar", "weights", "a.txt", "-x.pth", "--all", "a.py", "deep/a.model", "a.dill", "a b.bin")


@pytest.mark.parametrize("name", EVIL_NAMES)
def test_the_hook_goes_by_content(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever a file that runs code is called, pre-commit hands it to ckpt scan, which fails."""
    import gzip

    monkeypatch.chdir(tmp_path)
    arguments, wanted = hook("ckpt-scan")
    Path(name).parent.mkdir(exist_ok=True)
    Path(name).write_bytes(gzip.compress(EVIL) if name.endswith(".gz") else EVIL)
    shutil.copy(SINGLE, "good.pth")
    assert wanted.search(name)
    done = run(*arguments, "good.pth", name)
    assert (done.exit_code, "dangerous" in done.output) == (1, True), done.output


def test_the_hook_on_source_files(monkeypatch: pytest.MonkeyPatch) -> None:
    """A repository's texts hold nothing to run: not one is named, and the exit code is 0. (Tests of ours hold payloads.)"""
    monkeypatch.chdir(ROOT)
    arguments, _ = hook("ckpt-scan")
    places = [path for folder in ("ckpt_tools", "train", "docs") for path in Path(folder).rglob("*.*")]
    files = [str(path) for path in places if path.suffix != ".pyc"]
    done = ckpt(*arguments, *files)
    assert done.output == f"{len(files):,} files: {len(files):,} nothing to run\n"


@pytest.mark.parametrize("name", ["-x.pth", "a.PTH", "a.pth.gz", "a.pth.tar", "a.Safetensors"])
def test_the_hook_for_whole_files(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """ckpt check gets what is called a checkpoint, in any case and compressed, and nothing else; -x.pth is a name."""
    monkeypatch.chdir(tmp_path)
    arguments, wanted = hook("ckpt-check")
    shutil.copy(SINGLE, "good.pth")
    Path(name).write_bytes(SINGLE.read_bytes()[:3000])
    assert wanted.search(name)
    ckpt(*arguments, "good.pth")
    ckpt(*arguments, "good.pth", name, code=3)
    assert not any(map(wanted.search, ("a.py", "README.md", "pth", "a.pth.md", "data.bin", "a.gz")))
