"""In the shell: what it offers to complete, standard input as a checkpoint, a pager for what is longer than the screen."""

import contextlib
import json
import os
import pty
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from click.testing import CliRunner

from tests.support.commands import main
from tests.support.samples import FIXTURES
from tests.support.terminal import installed, run


def offered(words: str, folder: Path = FIXTURES, shell: str = "bash") -> list[str]:
    number = len(words.split(" ")) - 1
    last = words.split(" ")[-1]
    environment = {
        "_CKPT_COMPLETE": f"{shell}_complete", "COMP_WORDS": words, "COMP_CWORD": last if shell == "fish" else str(number),
    }  # fmt: skip
    with contextlib.chdir(folder):
        done = CliRunner().invoke(main, [], prog_name="ckpt", env=environment)
    assert done.stderr == ""
    lines = done.stdout.split()
    return [line.partition(",")[2] for line in lines] if shell == "bash" else lines


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        ("ckpt dif", ["diff"]), ("ckpt help dif", ["diff"]), ("ckpt sing", ["sing"]),
        ("ckpt single.pth --filter fc1", ["fc1.weight", "fc1.bias"]),
        ("ckpt convert training.pth out.pth --select mo", ["model"]),
        ("ckpt convert --strip-module training.pth out.pth --drop opt", ["optimizer", "optimizer.state"]),
        ("ckpt inspect single.pth --filter fc1", ["fc1.weight", "fc1.bias"]),
        ("ckpt stats single.safetensors --filter fc2.", ["fc2.weight", "fc2.bias"]),
        ("ckpt convert single.pth out.pth --keep features.0.w", ["features.0.weight"]),
        ("ckpt diff training.pth single.pth --select mod", ["model"]),
    ],
    ids=str,
)  # fmt: skip
def test_names_and_paths_come_from_the_file(words: str, expected: list[str]) -> None:
    """Commands, tensor names and paths of state dicts, whatever comes before the option."""
    found = offered(words)
    assert set(expected) <= set(found)
    assert all(text.startswith(words.split(" ")[-1]) for text in found)


@pytest.mark.parametrize("shell", ["zsh", "fish"])
def test_the_other_shells(shell: str) -> None:
    assert any("fc1.weight" in line for line in offered("ckpt inspect single.pth --filter fc1", shell=shell))


def test_silence_when_there_is_nothing_to_offer(tmp_path: Path) -> None:
    """No file, a file that is none, a damaged one, a folder: no completion, and not a word."""
    (tmp_path / "text.pth").write_text("hello")
    (tmp_path / "cut.pth").write_bytes((FIXTURES / "single.pth").read_bytes()[:999])
    for name in ("none.pth", "text.pth", "cut.pth", "."):
        assert offered(f"ckpt inspect {name} --filter f", tmp_path) == []


def test_names_that_a_shell_would_run_are_not_offered(tmp_path: Path) -> None:
    """A completion goes onto the command line as it is: only plain characters do."""
    names = ["a.$(touch evil).w", "a.`id`.w", "a.b;rm.w", "a.'q'.w", "a.\nplain,x.w", "a.fine.w", "-rf.w"]
    torch.save({name: torch.ones(1) for name in names}, tmp_path / "a.pth")
    assert offered("ckpt inspect a.pth --filter ", tmp_path) == ["a.fine.w"]


SHELLS = {
    "bash": "COMP_WORDS=(ckpt stats training.pth --select mo) COMP_CWORD=4; _ckpt_completion ckpt; echo ${COMPREPLY[@]}",
    "zsh": "echo $_comps[ckpt]; whence -w _ckpt_completion",
    "fish": "complete -C 'ckpt stats training.pth --select mo'",
}
EXPECTED = {"bash": ["model"], "zsh": ["_ckpt_completion", "_ckpt_completion:", "function"], "fish": ["model"]}


def line_of(shell: str) -> str:
    """The line of docs/commands.md for this shell."""
    page = (FIXTURES.parent / "docs" / "commands.md").read_text()
    (line,) = re.findall(rf"^(.*ckpt completion {shell}.*?)  +# ~/", page, re.MULTILINE)
    return str(line)


@pytest.mark.parametrize("shell", SHELLS)
def test_the_line_for_a_start_up_file_works(shell: str, tmp_path: Path) -> None:
    """In the shell itself, where it is installed: bash and fish complete `--select mo` from the file, zsh knows whom to ask."""
    if not shutil.which(shell):
        pytest.skip(f"{shell} is not installed")
    before = "autoload -Uz compinit; compinit -D -u; " if shell == "zsh" else ""
    environment = installed(tmp_path) | {"HOME": str(tmp_path)}
    script = f"{before}{line_of(shell)}\n{SHELLS[shell]}"
    done = subprocess.run([shell, "-c", script], capture_output=True, text=True, cwd=FIXTURES, env=environment, check=False)
    assert done.stdout.split() == EXPECTED[shell], done.stderr


DDP = FIXTURES / "ddp.pth"


def test_standard_input_is_inspected_as_a_file() -> None:
    """`ckpt inspect -` shows the page of the file, and commands that say FILE for what has no name; `ckpt -` does the same."""
    shown = run("inspect", "-", data=DDP.read_bytes())
    assert shown.exit_code == 0
    page = run("inspect", DDP).output.replace(str(DDP.with_suffix("")), "FILE").replace("FILE.pth\n", "<stdin>\n", 1)
    assert shown.output == page
    assert "ckpt convert FILE.pth FILE.fixed.pth --strip-module" in shown.output
    assert run("-", data=DDP.read_bytes()).output == shown.output


def test_standard_input_beside_files() -> None:
    """It is one of several inputs, in its place, of `--json` too, however many processes were asked for."""
    result = run("inspect", "--json", "-j", 2, FIXTURES / "single.pth", "-", data=DDP.read_bytes())
    documents = list(map(json.loads, result.stdout.splitlines()))
    assert [document["path"] for document in documents] == [str(FIXTURES / "single.pth"), "<stdin>"]
    assert documents[1]["tensors"] == json.loads(run("inspect", "--json", DDP).stdout)["tensors"]


def test_standard_input_is_checked_and_scanned() -> None:
    """`ckpt check -` reads every byte of it, `ckpt scan -` says what it would run."""
    checked = json.loads(run("check", "--json", "-", data=DDP.read_bytes()).stdout)
    assert (checked["path"], checked["records"]) == ("<stdin>", 17)
    evil = b"\x80\x02cposix\nsystem\nX\x02\x00\x00\x00id\x85R."
    result = run("scan", "-", data=evil)
    assert result.exit_code == 1
    assert result.output.startswith("<stdin>: dangerous")


def test_digests_of_standard_input(tmp_path: Path) -> None:
    """`ckpt check --digest -o FILE -` writes what it writes for the file."""
    assert run("check", "--digest", "-o", tmp_path / "a.digest", "-", data=DDP.read_bytes()).exit_code == 1
    run("check", "--digest", "-o", tmp_path / "b.digest", DDP)
    tensors = [[line for line in path.read_text().splitlines() if line[:1] != "#"] for path in sorted(tmp_path.iterdir())]
    assert len(tensors[0]) == 11
    assert tensors[0] == tensors[1]


@pytest.mark.parametrize("command", ["inspect", "check", "scan"])
def test_what_is_cut_off_is_refused(command: str) -> None:
    """A download that broke off in the pipe is told as a cut file is; nothing at all as an empty file."""
    for data in (DDP.read_bytes()[:3000], b""):
        result = run(command, "-", data=data)
        assert "<stdin>" in result.output
        assert "Traceback" not in result.output
        assert result.exit_code == (3 if command != "scan" else 0 if not data else 1)


def test_a_file_called_minus_has_a_path(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "-").write_bytes(DDP.read_bytes())
    monkeypatch.chdir(tmp_path)
    assert run("inspect", "./-").exit_code == 0


def test_pipes_of_the_shell() -> None:
    """`<(...)` and `/dev/stdin` are read where they are pipes, and a redirected file where it lies."""
    run = [sys.executable, "-m", "ckpt_tools", "inspect"]
    read, write = os.pipe()
    os.write(write, DDP.read_bytes())
    os.close(write)
    done = subprocess.run([*run, f"/dev/fd/{read}"], capture_output=True, text=True, pass_fds=[read])
    os.close(read)
    assert done.stdout.startswith(f"</dev/fd/{read}>\ncontainer     torch-zip")
    with DDP.open("rb") as file:
        done = subprocess.run([*run, "-"], capture_output=True, text=True, stdin=file)
    assert "wrapped in 'module.'" in done.stdout


def on_terminal(*arguments: object, rows: int = 5, **environment: str) -> str:
    """What a command prints on a terminal with so many lines."""
    ours, theirs = pty.openpty()
    settings = {**os.environ, "TERM": "dumb", "LINES": str(rows), "COLUMNS": "100", **environment}
    process = subprocess.Popen(
        [sys.executable, "-m", "ckpt_tools", *map(str, arguments)], stdout=theirs, stderr=theirs, stdin=theirs, env=settings
    )
    os.close(theirs)
    shown = b""
    while True:
        try:
            block = os.read(ours, 4096)
        except OSError:  # the other end is closed
            break
        if not block:
            break
        shown += block
    os.close(ours)
    assert process.wait() == 0
    return shown.decode()


def test_a_long_page_goes_through_the_pager(tmp_path: Path) -> None:
    """On a terminal with fewer lines $PAGER gets the page; not where it fits, is not wanted, or cannot be started."""
    kept = tmp_path / "kept.txt"
    pager = f"{sys.executable} -c \"import sys; open({str(kept)!r}, 'w').write(sys.stdin.read())\""
    assert "container" not in on_terminal("inspect", DDP, PAGER=pager)
    assert "features.0.{weight, bias}" in kept.read_text()
    kept.unlink()
    for options, rows, environment in (
        ([], 100, {"PAGER": pager}), (["--no-pager"], 5, {"PAGER": pager}), ([], 5, {"PAGER": pager, "NO_PAGER": "1"}),
        ([], 5, {"PAGER": "cat"}), ([], 5, {"PAGER": ""}), ([], 5, {"PAGER": str(tmp_path / "none")}),
        ([], 5, {"PAGER": "less \""}),
    ):  # fmt: skip
        assert "features.0.{weight, bias}" in on_terminal("inspect", *options, DDP, rows=rows, **environment)
    assert not kept.exists()


def test_a_pipe_has_no_pager(tmp_path: Path) -> None:
    """Where standard output is no terminal PAGER is not looked at, colours asked for or not."""
    environment = {**os.environ, "PAGER": str(tmp_path / "none"), "LINES": "3", "FORCE_COLOR": "1"}
    run = [sys.executable, "-m", "ckpt_tools", "inspect", str(DDP)]
    assert "num_batches_tracked" in subprocess.run(run, capture_output=True, text=True, env=environment, check=True).stdout


@pytest.mark.parametrize("arguments", ["inspect {}", "check --json {}", "--help", "--version"])
@pytest.mark.parametrize("place", [">&-", ">/dev/full"])
def test_a_report_that_cannot_be_printed(arguments: str, place: str) -> None:
    """A standard output that is closed or full is an error in words, whatever should have been printed."""
    command = f"{sys.executable} -m ckpt_tools {arguments.format(DDP)} {place}"
    result = subprocess.run(["sh", "-c", command], capture_output=True, text=True, check=False)
    assert (result.returncode, result.stderr[:36]) == (3, "Error: The report cannot be printed:")


def test_closed_streams_are_no_files(tmp_path: Path) -> None:
    """Without standard error a command does its work, and no file that it opens takes the number of a closed stream."""
    out = tmp_path / "out.pth"
    command = f"{sys.executable} -m ckpt_tools convert {DDP} {out} <&- 2>&-"
    result = subprocess.run(["sh", "-c", command], stdout=subprocess.PIPE, text=True, check=False)
    assert (result.returncode, result.stdout[:5]) == (0, "wrote")
    assert run("inspect", out).exit_code == 0
