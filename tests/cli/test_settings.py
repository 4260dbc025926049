"""Settings: pyproject.toml and variables give defaults, say so, and a file never lowers safety."""

from __future__ import annotations

import json
import os
import re
import shutil
from pathlib import Path

import pytest
import torch

import ckpt_tools
from ckpt_tools import limits
from ckpt_tools.cli.shell.settings import load
from ckpt_tools.errors import UsageError
from tests.cli.test_cli import ROOT, ckpt
from tests.support.samples import FIXTURES


@pytest.fixture
def project(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder two levels below a project's, where the commands run; the wrapped model in it."""
    below = tmp_path / "a" / "b"
    below.mkdir(parents=True)
    monkeypatch.chdir(below)
    for name in ("CKPT_IGNORE", "CKPT_OBJECTS", "CKPT_LIMITS"):
        monkeypatch.delenv(name, raising=False)
    shutil.copy(FIXTURES / "ddp.pth", below)
    return tmp_path


def write(folder: Path, table: str) -> Path:
    """A pyproject.toml with other tools' settings around ours."""
    path = folder / "pyproject.toml"
    path.write_text(f'[project]\nname = "x"\n\n[tool.ckpt]\n{table}\n\n[tool.ruff]\nline-length = 100\n')
    return path


def test_the_nearest_file_upward(project: Path) -> None:
    """The first one with [tool.ckpt] counts; one without is passed over; what was set is said last, on standard error."""
    assert ckpt("check", "ddp.pth").exit_code == 1
    far = write(project, 'ignore = ["wrapper-prefix"]')
    (project / "a" / "pyproject.toml").write_text("[tool.other]\n# not tool.ckpt\n")
    result = ckpt("check", "ddp.pth")
    assert result.exit_code == 1  # the nearer one has the words, in a comment
    (project / "a" / "pyproject.toml").write_text("[tool.other]\n")
    result = ckpt("check", "ddp.pth")
    assert (result.exit_code, result.stderr) == (0, f"--ignore wrapper-prefix is set by {far}\n")
    write(project / "a", 'ignore = ["device-tags"]')
    assert ckpt("check", "ddp.pth").exit_code == 1


def test_precedence(project: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Option, variable, file: each replaces the next."""
    write(project, 'ignore = ["wrapper-prefix"]')
    monkeypatch.setenv("CKPT_IGNORE", "device-tags no-checksums")
    result = ckpt("check", "ddp.pth")
    assert (result.exit_code, result.stderr) == (1, "--ignore device-tags no-checksums is set by CKPT_IGNORE\n")
    result = ckpt("check", "ddp.pth", "--ignore", "wrapper-prefix")
    assert (result.exit_code, result.stderr) == (0, "")


def test_quiet_and_json(project: Path) -> None:
    """--quiet leaves the line out; under --json it stays on standard error."""
    write(project, 'ignore = ["wrapper-prefix"]')
    assert ckpt("check", "--quiet", "ddp.pth").stderr == ""
    result = ckpt("check", "--json", "ddp.pth")
    assert json.loads(result.stdout)["findings"] == []
    assert "is set by" in result.stderr


def test_objects(project: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """convert takes it where none is given; --in-place and --slim, which have no use for it, go on without."""
    torch.save({"w": torch.ones(2), "net": torch.load(FIXTURES / "whole_module.pth", weights_only=False)}, "in.pth")
    assert ckpt("convert", "in.pth", "a.pth").exit_code == 3
    write(project, 'objects = "drop"')
    result = ckpt("convert", "in.pth", "a.pth")
    assert (result.exit_code, list(torch.load("a.pth"))) == (0, ["w"])
    assert result.stderr.startswith("--objects drop is set by ")
    monkeypatch.setenv("CKPT_OBJECTS", "keep")
    assert ckpt("convert", "in.pth", "b.pth").exit_code == 0
    assert ckpt("inspect", "b.pth", "--json").stdout.count("Sequential") > 0
    assert ckpt("convert", "in.pth", "c.pth", "--slim").exit_code == 0
    assert ckpt("convert", "ddp.pth", "--in-place", "--strip-module").exit_code == 0


def test_limits(project: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A file lowers a limit, for one command; the variable and the option go before it."""
    write(project, "limits = { records = 5 }")
    result = ckpt("inspect", "ddp.pth")
    assert (result.exit_code, "The limit is 5 records" in result.stderr) == (3, True)
    assert limits.RECORDS.value == limits.RECORDS.default
    assert ckpt("inspect", "ddp.pth", "--limit", "records=50").exit_code == 0
    monkeypatch.setenv("CKPT_LIMITS", "records=51")
    assert ckpt("inspect", "ddp.pth").exit_code == 0


@pytest.mark.parametrize(
    ("table", "says"),
    [
        ('ignroe = ["wrapper-prefix"]', "has no setting 'ignroe'. Did you mean 'ignore'?"),
        ('ignore = "wrapper-prefix"', "'ignore' is not a list of codes"),
        ('ignore = ["wrapper"]', "no finding has the code 'wrapper'. Did you mean 'wrapper-prefix'"),
        ('ignore = ["dangerous"]', "'dangerous' is not for a file"),
        ('ignore = ["unexamined"]', "'unexamined' is not for a file"),
        ('ignore = ["not-finite"]', "'not-finite' is not for a file"),
        ('ignore = ["damaged-record"]', "'damaged-record' is not for a file"),
        ('objects = "keep"', "'keep' is not for a file"),
        ('objects = "plane"', "'objects' is 'plane'"),
        ("limits = 5", "'limits' is not a table"),
        ("limits = { record = 5 }", "there is no limit 'record'"),
        ("limits = { records = 2000000 }", "records = 2000000 raises the limit"),
        ('limits = { records = "many" }', "not a whole number above 0"),
    ],
)
def test_what_a_file_may_not_say(project: Path, table: str, says: str) -> None:
    """Unknown keys and values, and whatever would lower safety, are one error with the file's name; exit code 2."""
    path = write(project, table)
    result = ckpt("check", "ddp.pth")
    assert result.exit_code == 2
    assert says in result.stderr.replace("\n", " ")
    assert str(path) in result.stderr


def test_a_file_that_is_no_toml(project: Path) -> None:
    """It is named where it speaks of us, and left alone else; help needs no settings."""
    (project / "pyproject.toml").write_text("[tool.ckpt\n")
    result = ckpt("check", "ddp.pth")
    assert (result.exit_code, "pyproject.toml is not TOML" in result.stderr) == (2, True)
    assert ckpt("help", "check").exit_code == 0
    (project / "pyproject.toml").write_text("[tool.black\n")
    assert ckpt("check", "ddp.pth").exit_code == 1
    (project / "pyproject.toml").write_text("tool = 3 # tool.ckpt\n")
    assert ckpt("check", "ddp.pth").exit_code == 2


def test_never_beside_an_input(project: Path) -> None:
    """What lies beside a file elsewhere sets nothing; nor is the library set by any file."""
    stranger = project / "downloads"
    stranger.mkdir()
    shutil.copy(FIXTURES / "ddp.pth", stranger)
    write(stranger, 'ignore = ["wrapper-prefix"]')
    result = ckpt("check", stranger / "ddp.pth")
    assert (result.exit_code, result.stderr) == (1, "")
    write(project, 'ignore = ["wrapper-prefix"]')
    assert [finding.code for finding in ckpt_tools.check("ddp.pth").findings] == ["wrapper-prefix"]


@pytest.mark.skipif(not hasattr(os, "mkfifo"), reason="has no named pipes")
def test_a_pipe_has_no_settings(project: Path) -> None:
    """A pipe that is called pyproject.toml would never end; one above it is read."""
    write(project, 'objects = "drop"')
    folder = project / "below"
    folder.mkdir()
    os.mkfifo(folder / "pyproject.toml")
    assert load(folder).path == project / "pyproject.toml"


def test_a_folder_that_is_gone_has_no_settings(project: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Commands run where the current folder has been removed."""
    source, gone = FIXTURES / "ddp.pth", project / "gone"
    gone.mkdir()
    monkeypatch.chdir(gone)
    gone.rmdir()
    done = ckpt("inspect", source)
    assert done.exit_code == 0, done.stderr


def test_the_version_shows_each_setting(project: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where it comes from, what it runs on; --verbose is for nothing else; a mistake is told."""
    path = write(project, 'ignore = ["wrapper-prefix"]\nlimits = { records = 9 }')
    monkeypatch.setenv("CKPT_LIMITS", "depth=50000")
    for order in (("--version", "--verbose"), ("--verbose", "--version")):
        result = ckpt(*order)
        assert result.exit_code == 0
        rows = [re.split(r"  +", line) for line in result.stdout.partition("\n\n")[2].splitlines()]
        assert rows == [
            ["setting", "value", "from"],
            ["ignore", "wrapper-prefix", str(path)],
            ["objects", "none", "default"],
            ["limits.records", "9", str(path)],
            ["limits.depth", "50000", "CKPT_LIMITS"],
        ]
        assert f"torch {torch.__version__}" in result.stdout
    assert ckpt("--version").stdout == f"ckpt, version {ckpt_tools.__version__} (ckpt_tools)\n"
    assert ckpt("--verbose", "check", "ddp.pth").exit_code == 2
    write(project, "ignroe = []")
    assert "ignroe" in ckpt("--version", "--verbose").stderr


def test_the_page_says_what_is_true(project: Path) -> None:
    """The table of docs/settings.md is one that may be set."""
    page = (ROOT / "docs" / "settings.md").read_text()
    (block,) = re.findall(r"```toml\n(.*?)```", page, re.DOTALL)
    (project / "pyproject.toml").write_text(block)
    settings = load()
    assert (settings.ignore, settings.objects, settings.limits) == (
        ["wrapper-prefix", "device-tags"],
        "plain",
        {"records": 10000},
    )
    (project / "pyproject.toml").write_text(block.replace("wrapper-prefix", "unreadable"))
    with pytest.raises(UsageError, match="'unreadable' is not for a file"):
        load()
