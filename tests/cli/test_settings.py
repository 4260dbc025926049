"""Variables set options; no file does."""

import json
import os
import shutil
from importlib.metadata import version
from pathlib import Path

import click
import pytest
import torch

import ckpt_tools
from tests.support.commands import ckpt, main
from tests.support.samples import FIXTURES
from tests.support.terminal import COMMANDS, run


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The current folder, with the wrapped model in it; no variable is set."""
    for name in os.environ:
        if name.startswith("CKPT_"):
            monkeypatch.delenv(name)
    monkeypatch.chdir(tmp_path)
    shutil.copy(FIXTURES / "ddp.pth", tmp_path)
    return tmp_path


STRANGERS = """
[tool.ckpt]
ignore = ["wrapper-prefix", "dangerous", "not-finite"]
objects = "drop"
limits = { records = 5 }
"""


def test_no_file_sets_anything(folder: Path) -> None:
    """A stranger's pyproject.toml, whole or not, in the folder, above it or beside the file, changes no answer."""
    below = folder / "below"
    below.mkdir()
    shutil.copy(FIXTURES / "ddp.pth", below)
    torch.save({"w": torch.ones(2), "net": torch.load(FIXTURES / "whole_module.pth", weights_only=False)}, "in.pth")
    lines = ("check ddp.pth", "check below/ddp.pth", "inspect ddp.pth", "convert in.pth out.pth", "--version --verbose")
    before = [(done.exit_code, done.output) for done in (run(*line.split()) for line in lines)]
    assert [code for code, _ in before] == [1, 1, 0, 3, 0]
    for text in (STRANGERS, "[tool.ckpt\n"):
        for place in (folder, below):
            (place / "pyproject.toml").write_text(text)
        assert [(done.exit_code, done.output) for done in (run(*line.split()) for line in lines)] == before


@pytest.mark.parametrize("variable", ["CKPT_CHECK_IGNORE", "CKPT_IGNORE"])
def test_a_variable_sets_an_option(variable: str, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It is said at the end, on standard error, but with --quiet; an option that is given replaces it; an empty one is none."""
    ckpt("check", "ddp.pth", code=1)
    monkeypatch.setenv(variable, "wrapper-prefix device-tags")
    done = run("check", "--json", "ddp.pth")
    assert (done.exit_code, json.loads(done.stdout)["findings"]) == (0, [])
    assert done.stderr == f"--ignore is set by {variable}=wrapper-prefix device-tags\n"
    assert run("check", "--quiet", "ddp.pth").stderr == ""
    done = run("check", "ddp.pth", "--ignore", "device-tags")
    assert (done.exit_code, done.stderr) == (1, "")
    monkeypatch.setenv(variable, "")
    done = run("check", "ddp.pth")
    assert (done.exit_code, done.stderr) == (1, "")


def test_kinds_of_options(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """One without a value is 1 or 0, one that is given once keeps its spaces, JSON is JSON also where a file cannot be read."""
    monkeypatch.setenv("CKPT_CONVERT_STRIP_MODULE", "1")
    monkeypatch.setenv("CKPT_CONVERT_OUTPUT", "an output.pth")
    done = ckpt("convert", "ddp.pth")
    assert "is set by CKPT_CONVERT_STRIP_MODULE=1" in done.stderr
    assert "module." not in "".join(torch.load("an output.pth"))
    monkeypatch.setenv("CKPT_CONVERT_STRIP_MODULE", "0")
    monkeypatch.setenv("CKPT_CONVERT_JSON", "1")
    assert json.loads(run("convert", "ddp.pth", "--overwrite").stdout)["container"]
    assert json.loads(run("convert", "ddp.pth").stdout)["error"] == "OutputExistsError"
    assert "module." in "".join(torch.load("an output.pth"))
    monkeypatch.setenv("CKPT_CHECK_FORMAT", "json")
    assert json.loads(run("check", "ddp.pth").stdout)["verdict"] == "findings"


def test_a_variable_that_is_wrong(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CKPT_SCAN_JOBS", "many")
    done = run("scan", "ddp.pth")
    assert (done.exit_code, "Invalid value for CKPT_SCAN_JOBS: 'many'" in done.stderr) == (2, True), done.stderr
    ckpt("scan", "ddp.pth", "--jobs", "1")


def test_objects(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """convert takes it where none is given; --in-place and --slim, which have no use for it, go on without."""
    torch.save({"w": torch.ones(2), "net": torch.load(FIXTURES / "whole_module.pth", weights_only=False)}, "in.pth")
    for variable in ("CKPT_OBJECTS", "CKPT_CONVERT_OBJECTS"):
        ckpt("convert", "in.pth", "a.pth", "--overwrite", code=3)
        with monkeypatch.context() as patch:
            patch.setenv(variable, "drop")
            done = run("convert", "in.pth", "a.pth", "--overwrite")
            assert (done.exit_code, list(torch.load("a.pth"))) == (0, ["w"])
            ckpt("convert", "in.pth", "b.pth", "--slim", "--overwrite")
            ckpt("convert", "ddp.pth", "--in-place", "--map-location", "cpu")


def test_limits(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CKPT_LIMITS", "records=5 nested=50")
    done = run("inspect", "ddp.pth")
    assert (done.exit_code, "The limit is 5 records" in done.stderr) == (3, True)
    ckpt("inspect", "ddp.pth", "--limit", "records=50")
    monkeypatch.setenv("CKPT_LIMITS", "")
    ckpt("inspect", "ddp.pth")


def test_variables_are_called_as_options_are(folder: Path) -> None:
    """The variable of --out-dir of a command ends in OUT_DIR; of two options that have one more it is another."""
    context, more = click.Context(main), []
    for name in COMMANDS:
        command = main.get_command(context, name)
        assert command is not None
        for option in command.params:
            if isinstance(option, click.Option) and option.expose_value:
                assert f"--{option.name}".replace("_", "-") in option.opts, (name, option.opts)
                more += [option.envvar] if option.envvar is not None else []
    assert more == ["CKPT_OBJECTS", "CKPT_IGNORE"]


def test_a_folder_that_is_gone(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    gone = folder / "gone"
    gone.mkdir()
    monkeypatch.chdir(gone)
    gone.rmdir()
    ckpt("inspect", FIXTURES / "ddp.pth")


def test_the_version_lists_what_is_set(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Every variable that begins so; and what it runs on; --verbose is for nothing else."""
    for name, value in (("CKPT_LIMITS", "nested=50"), ("CKPT_CHECK_IGNORE", "device-tags"), ("CKPT_NOTHING", "")):
        monkeypatch.setenv(name, value)
    for order in (("--version", "--verbose"), ("--verbose", "--version"), ("--version", "-v")):
        done = ckpt(*order)
        assert {line for line in done.stdout.splitlines() if line.startswith("CKPT_")} == {
            "CKPT_LIMITS=nested=50", "CKPT_CHECK_IGNORE=device-tags",
        }  # fmt: skip
        assert f"torch {version('torch')}" in done.stdout
    assert run("--version").stdout == f"ckpt, version {ckpt_tools.__version__} (ckpt_tools)\n"
    ckpt("--verbose", "check", "ddp.pth", code=2)
    ckpt("-v", code=2)
