"""The command line as a user types it: what it prints, its exit codes, its answers to mistakes."""

import ast
import json
import os
import re
import subprocess
import sys
from pathlib import Path

import click
import pytest
import torch

from tests.support.commands import ckpt, main
from tests.support.keys import write_keys
from tests.support.samples import FIXTURES
from tests.support.terminal import COMMANDS, ROOT, run, shell

# --- inspect


def test_empty_folder_is_refused(tmp_path: Path) -> None:
    result = run("inspect", tmp_path)
    assert result.exit_code == 3
    assert "folder without checkpoints" in result.stderr


def test_pipes_get_no_colour_and_no_blanks(training_file: Path) -> None:
    """In a pipe there are no escape codes and no blanks at the ends of lines."""
    shown = shell("inspect", training_file).stdout
    assert "\x1b" not in shown
    assert all(line == line.rstrip() for line in shown.splitlines())
    assert "\x1b[" in shell("inspect", training_file, FORCE_COLOR="1").stdout
    assert "\x1b[3" not in shell("inspect", training_file, FORCE_COLOR="1", NO_COLOR="1").stdout


def test_the_learning_rate_is_a_value(training_file: Path) -> None:
    """Of the first group, and of each that has another than the one before; what else an optimizer holds is left out."""
    values = json.loads(ckpt("inspect", "--json", training_file).stdout)["values"]
    assert {name: value for name, value in values.items() if name.startswith("optimizer")} == {
        "optimizer.param_groups.0.lr": 0.001
    }


# --- convert


def test_help_has_an_example_and_every_option() -> None:
    short, whole = run("convert", "--help").output, run("convert", "--help-all").output
    command = main.get_command(click.Context(main), "convert")
    assert command is not None
    for option in (name for parameter in command.params for name in parameter.opts if name.startswith("--")):
        assert f" {option}" in whole
    assert all(option in short for option in ("--strip-module", "--select", "--map-location", "--like", "--help-all"))
    assert "--plan-value" not in short
    assert [line for line in whole.splitlines() if line.endswith(":") and not line.startswith(" ")] == [
        "Names:", "What to keep:", "Values and devices:", "Target model:", "Objects:", "Output:", "Other:",
    ]  # fmt: skip


def test_topics_are_complete() -> None:
    """The topics name every container and every variable that there is, and no other; a wrong topic names the topics."""
    table = (ROOT / "docs" / "containers.md").read_text().partition("\n\nEach of these")[0]
    containers = {name for row in re.findall(r"^\| ([a-z][^|]*) \| ", table, re.MULTILINE) for name in row.split(", ")}
    listed = run("help", "formats").output.partition("Each may be packed")[0]
    found = {name for row in re.findall(r"^(\S.*?)  ", listed, re.MULTILINE) for name in row.split(", ")}
    assert found == containers - {"container"}
    page, said = (ROOT / "docs" / "commands.md").read_text(), run("help", "environment").output
    assert set(re.findall(r"CKPT_\w+", said)) - set(re.findall(r"CKPT_\w+", page)) == {"CKPT_CHECK_FORMAT"}
    assert "environment" in run("help", "nonsense").output


def test_a_file_alone_is_inspected(training_file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """`ckpt FILE` is `ckpt inspect FILE`, of a folder, an address and with options too; what is nowhere is said so."""
    for given in ([training_file], [training_file, "--json"], [training_file.parent, "--all"]):
        assert run(*given).output == run("inspect", *given).output != ""
    assert (told := run("nowhere://bucket/model.pth")).exit_code == 3
    assert told.output == run("inspect", "nowhere://bucket/model.pth").output
    monkeypatch.chdir(training_file.parent)
    assert (told := run("inspekt")).exit_code == 2
    assert "No command and no file is called 'inspekt'. Did you mean 'inspect'?" in told.output


def test_a_file_called_like_a_command_stays_the_command(training_file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """`ckpt check` is the command where a file `check` lies about; `ckpt ./check` is the file."""
    training_file.rename(training_file.with_name("check"))
    monkeypatch.chdir(training_file.parent)
    assert run("check").exit_code == 2
    assert run("./check").output.startswith("check\ncontainer ")


@pytest.mark.parametrize("name", COMMANDS)
def test_the_documentation_lists_every_option(name: str) -> None:
    """The README or a page of docs/ names every option that --help names; docs/commands.md names every command."""
    readme = (ROOT / "README.md").read_text()
    pages = readme + "".join(page.read_text() for page in (ROOT / "docs").glob("*.md"))
    assert f"ckpt {name}" in (ROOT / "docs" / "commands.md").read_text()
    command = main.get_command(click.Context(main), name)
    assert command is not None
    for parameter in command.params:
        for option in parameter.opts:
            if option.startswith("--") and option != "--help":
                assert option in pages, f"{option} of ckpt {name} is documented nowhere"


def test_every_command_of_a_finding_works(tmp_path: Path) -> None:
    """Of several wrappers the stronger option alone is in the last command; a file of objects gets --objects with each."""
    path = tmp_path / "file.pth"
    networks = {"a": {"module.w.x": torch.ones(2)}, "b": {"_orig_mod.module.y.x": torch.ones(2)}}
    torch.save({**networks, "args": ast.Constant(1)}, path)
    lines = [line for line in run("inspect", path).output.splitlines() if line.startswith("  ckpt ")]
    assert [line.partition(".fixed.pth ")[2] for line in lines] == [
        "--strip-module --objects plain", "--unwrap --objects plain", "--objects plain", "--unwrap --objects plain",
    ]  # fmt: skip
    assert [run(*line.split()[1:], "--overwrite").exit_code for line in lines] == [0] * 4


def test_long_names_are_not_broken_in_a_pipe(tmp_path: Path) -> None:
    """A name of 500 characters stays on one line, so that grep finds it."""
    name = "layer." * 83 + "weight"
    torch.save({name: torch.ones(1)}, tmp_path / "long.pth")
    assert any(name in line for line in run("inspect", tmp_path / "long.pth").stdout.splitlines())


def test_jobs_change_nothing_but_the_time(tmp_path: Path) -> None:
    """Several processes give the same documents in the same order, and a bad file in between is an error document."""
    for index in range(6):
        torch.save({"a.w": torch.ones(index + 1)}, tmp_path / f"{index}.pth")
    (tmp_path / "3.pth").write_bytes(b"nothing")
    one, several = (run("inspect", "--json", "--jobs", jobs, tmp_path) for jobs in ("1", "3"))
    assert one.exit_code == several.exit_code == 3
    assert one.stdout == several.stdout
    documents = [json.loads(line) for line in several.stdout.splitlines()]
    assert [document.get("error") for document in documents] == [None, None, None, "NotACheckpointError", None, None]


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="Linux has a device that is always full")
def test_a_message_that_cannot_be_printed_leaves_the_exit_code(tmp_path: Path) -> None:
    """Where standard error fails too, the exit code is that of the error, not of a traceback."""
    with open("/dev/full", "w") as full:
        command = [sys.executable, "-m", "ckpt_tools", "inspect", str(tmp_path / "none.pth")]
        assert subprocess.run(command, stderr=full, stdout=subprocess.PIPE, check=False).returncode == 3


def test_without_numpy_torch_is_quiet(tmp_path: Path) -> None:
    """torch warns at import where NumPy is missing; a command that imports torch does not show it.

    The network of the fixtures, which README's load code takes from there, needs no NumPy either.
    """
    code = "import atexit, sys; sys.modules['numpy'] = None; from tests.support.commands import main\n"
    code += "atexit.register(lambda: __import__('fixtures.make').make.network()); main()"
    command = [sys.executable, "-c", code, "convert", str(FIXTURES / "ddp.pth"), str(tmp_path / "out.pth"), "--dtype", "bf16"]
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONWARNINGS"}
    done = subprocess.run(command, capture_output=True, text=True, check=True, env=environment)
    assert done.stderr == ""


DDP, SINGLE = FIXTURES / "ddp.pth", FIXTURES / "single.pth"


@pytest.mark.parametrize("name", COMMANDS)
def test_short_and_long_go_together(name: str) -> None:
    """Wherever a command has --quiet, --dry-run or --output, it has -q, -n or -o for it, and for nothing else."""
    command = main.get_command(click.Context(main), name)
    assert command is not None
    for param in command.params:
        for long, short in (("--quiet", "-q"), ("--dry-run", "-n"), ("--output", "-o")):
            assert (long in param.opts) == (short in param.opts), param.opts


@pytest.mark.parametrize("command", ["convert", "repair"])
def test_out_is_an_option_too(command: str, tmp_path: Path) -> None:
    """`-o OUT` writes what OUT in its place writes; both together are refused, and -n writes nothing."""
    ckpt(command, DDP, tmp_path / "a.pth")
    ckpt(command, "-n", DDP, "-o", tmp_path / "b.pth")
    assert not (tmp_path / "b.pth").exists()
    done = run(command, "-q", "-o", tmp_path / "b.pth", DDP)
    assert (done.exit_code, done.output) == (0, "")
    assert (tmp_path / "a.pth").read_bytes() == (tmp_path / "b.pth").read_bytes()
    twice = ckpt(command, DDP, tmp_path / "c.pth", "-o", tmp_path / "d.pth", code=2)
    assert "OUT is given twice" in twice.output


@pytest.mark.parametrize(
    "arguments",
    [
        "sign model.pth --key own.pem -o own.pem", "sign weights --key own.pem -o weights",
        "match weights --like model.pth -o weights", "match model.pth --like weights -o weights",
        "report model.pth weights -o weights", "show weights a -o weights", "check --digest weights -o weights",
        "extract-lora folder model.pth folder --rank 1",
    ],
)  # fmt: skip
def test_no_input_is_replaced_by_what_is_written_about_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, arguments: str
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "folder").mkdir()
    for name in ("model.pth", "weights", "folder/pytorch_model.bin"):
        torch.save({"a": torch.ones(3, 4)}, name)
    write_keys(tmp_path, "own")
    before = {path: path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()}
    result = run(*arguments.split(), "--overwrite")
    assert (result.exit_code, "is an input" in result.output) == (2, True), result.output
    assert {path: path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()} == before


def test_an_empty_value_of_an_option_is_refused(training_file: Path) -> None:
    """`--select "$WHERE"` of a variable that is not set is not the whole file."""
    result = run("convert", training_file, training_file.with_name("out.pth"), "--select", "")
    assert (result.exit_code, "--select is empty" in result.output) == (2, True)
