"""Exit codes, and what a report is as a truth value: the same."""

import os
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest
import torch

import ckpt_tools
import ckpt_tools.errors
import ckpt_tools.torch
from tests.support.commands import ckpt
from tests.support.samples import FIXTURES


@pytest.mark.parametrize("name", ["single.pth", "ddp.pth", "cut.pth", "objects.pth", "dangerous.pth"])
def test_a_report_is_true_where_its_command_ends_with_0(tmp_path: Path, name: str) -> None:
    """`if check(path):` holds for a healthy file alone; so for scan, diff and match."""
    good, path = tmp_path / "single.pth", tmp_path / name
    shutil.copy(FIXTURES / "single.pth", good)
    if name == "cut.pth":
        path.write_bytes(good.read_bytes()[:-30])
    elif name == "objects.pth":
        torch.save({"w.w": torch.ones(1), "o": Path("x")}, path)
    elif name == "dangerous.pth":
        path.write_bytes(b"cos\nsystem\n(S'true'\ntR.")
    else:
        shutil.copy(FIXTURES / name, path)
    for command, call in (("check", ckpt_tools.check), ("scan", ckpt_tools.scan)):
        assert bool(call(path)) == (ckpt(command, path, code=None).exit_code == 0)
    if name.endswith(("single.pth", "ddp.pth")):
        assert bool(ckpt_tools.diff(good, path)) == (ckpt("diff", good, path, code=None).exit_code == 0)
        assert bool(ckpt_tools.match(path, like=good)) == (ckpt("match", path, "--like", good, code=None).exit_code == 0)


def test_which_findings_fail(tmp_path: Path) -> None:
    """--fail-on says the least finding of which `check` ends with 1; a file that cannot be read is 3 whatever it says."""
    torch.save({"w.w": torch.ones(1), "p": Path("x")}, tmp_path / "objects.pth")  # a warning
    for word, code in (("problem", 0), ("warning", 1), ("note", 1)):
        ckpt("check", "--fail-on", word, tmp_path / "objects.pth", code=code)
    (tmp_path / "cut.pth").write_bytes((FIXTURES / "single.pth").read_bytes()[:-30])
    ckpt("check", "--fail-on", "problem", tmp_path / "cut.pth", code=3)


def test_a_quiet_scan(tmp_path: Path) -> None:
    """-q prints nothing; the exit code tells."""
    (tmp_path / "evil.pkl").write_bytes(b"cos\nsystem\n(S'true'\ntR.")
    assert ckpt("scan", "-q", tmp_path, code=1).output == ""
    assert ckpt("scan", "-q", FIXTURES / "single.pth").output == ""


@pytest.mark.parametrize("command", ["scan", "inspect", "check"])
def test_a_reader_that_goes_away(tmp_path: Path, command: str) -> None:
    """Where `head` has what it wants, the command ends with 141 and without a word."""
    folder = tmp_path / "many"
    folder.mkdir()
    for number in range(400):
        shutil.copy(FIXTURES / "single.pth", folder / f"a_rather_long_name_of_a_checkpoint_{number:04}.pth")
    words = [sys.executable, "-m", "ckpt_tools", command, "--json", str(folder)]
    with subprocess.Popen(words, stdout=subprocess.PIPE, stderr=subprocess.PIPE) as child:
        assert child.stdout is not None
        assert child.stderr is not None
        child.stdout.readline()
        child.stdout.close()
        assert child.stderr.read() == b""
    assert child.returncode == 141


def test_what_is_dangerous_is_kept_by_a_word_alone(tmp_path: Path) -> None:
    """--objects keep of a dangerous file is refused without --allow-dangerous, in place too; with it OUT is said to be so."""

    class Evil:
        def __reduce__(self) -> tuple[object, ...]:
            return os.system, ("true",)

    torch.save({"w.w": torch.ones(2), "x": Evil()}, tmp_path / "in.pth")
    refused = ckpt("convert", tmp_path / "in.pth", tmp_path / "out.pth", "--objects", "keep", code=3)
    assert "--allow-dangerous" in refused.stderr
    assert not (tmp_path / "out.pth").exists()
    ckpt("convert", tmp_path / "in.pth", "--in-place", "--objects", "keep", "--rename", "w=v", code=3)
    told = ckpt("convert", tmp_path / "in.pth", tmp_path / "out.pth", "--objects", "keep", "--allow-dangerous")
    assert "treat it as dangerous too" in told.stderr + told.stdout
    ckpt("convert", tmp_path / "in.pth", tmp_path / "out.safetensors", "--objects", "drop")


UNLOADABLE = [
    "ctorch\nSize\n((F2.5\nttR", "ctorch\nSize\n((S'a'\nttR", "ctorch\ndevice\n(S'nowhere:0'\ntR", "ctorch\ndevice\n(F1.5\ntR",
    "ctorch\ndevice\n(S'cuda:01'\ntR", "c__builtin__\ncomplex\n((ttR", "c_codecs\nencode\n(I1\nS'latin1'\ntR",
    "c_codecs\nencode\n(Va\nS'nonsense'\ntR", "c__builtin__\nbytearray\n(F1.5\ntR",
]  # fmt: skip


@pytest.mark.parametrize("made", UNLOADABLE)
def test_what_torch_cannot_make_is_no_healthy_file(tmp_path: Path, made: str) -> None:
    """Arguments of known functions are checked for number and kind: nothing healthy that torch.load refuses."""
    torch.save({"w.w": torch.ones(2)}, tmp_path / "good.pth")
    with zipfile.ZipFile(tmp_path / "good.pth") as good, zipfile.ZipFile(tmp_path / "bad.pth", "w") as bad:
        for info in good.infolist():
            data = good.read(info)
            if info.filename.endswith("data.pkl"):
                data = data[:-2] + b"X\x01\x00\x00\x00x" + made.encode() + b"s" + data[-2:]
            bad.writestr(info.filename, data)
    with pytest.raises(Exception):  # noqa: B017 -- of any kind
        torch.load(tmp_path / "bad.pth", weights_only=False)
    assert not ckpt_tools.check(tmp_path / "bad.pth")
    with pytest.raises(ckpt_tools.errors.CkptError):
        ckpt_tools.torch.load(tmp_path / "bad.pth")


def test_no_internal_object_comes_out(tmp_path: Path) -> None:
    """A dtype is torch's wherever it stands, in a set too."""
    state = {"s": {torch.float16, 1}, "k": {torch.float32: 1}, "t": (torch.int8, [torch.bool])}
    torch.save(state, tmp_path / "dtypes.pth")
    assert ckpt_tools.torch.load(tmp_path / "dtypes.pth") == state
