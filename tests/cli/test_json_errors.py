"""Under --json every error is a document on standard output, whatever the command and whatever went wrong."""

import io
import json
import os
import re
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jsonschema
import pytest
import torch
from click.testing import CliRunner, Result

from tests.support.commands import ckpt, main
from tests.support.terminal import ROOT, run

SCHEMA = json.loads((ROOT / "docs" / "error.schema.json").read_text())


def failure(result: Result) -> dict[str, Any]:
    """The one document of a command that failed; standard error has the words, and the exit code is the same."""
    document: dict[str, Any] = json.loads(result.stdout)
    jsonschema.validate(document, SCHEMA)
    assert document["exit_code"] == result.exit_code
    assert result.stderr
    return document


@pytest.fixture(autouse=True)
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A folder with one checkpoint and a page that is none."""
    torch.save({"a.weight": torch.ones(2)}, tmp_path / "in.pth")
    (tmp_path / "page.pth").write_text("<html>")
    monkeypatch.chdir(tmp_path)


def test_scan_has_a_format() -> None:
    assert failure(run("scan", "--format", "json", "gone.pth")) == failure(run("scan", "--json", "gone.pth"))


class Stops(io.BytesIO):
    """Standard input that is read when something else happens."""

    def __init__(self, happens: Callable[[], None]) -> None:
        super().__init__()
        self.happens = happens

    def read(self, size: int | None = -1) -> bytes:
        """Let it happen; click reads nothing to see whether this is binary."""
        if size != 0:
            self.happens()
        return b""


def interrupted() -> None:
    raise KeyboardInterrupt


def terminated() -> None:
    os.kill(os.getpid(), signal.SIGTERM)


def while_a_class_is_made() -> None:
    """Python 3.11 makes a RuntimeError of what is raised while a class is made, as in an import: it was a traceback."""

    class Named:
        def __set_name__(self, owner: type, name: str) -> None:
            signal.raise_signal(signal.SIGTERM)

    type("Made", (), {"name": Named()})


STOPS = [(interrupted, "Interrupted", 130), (terminated, "Terminated", 143), (while_a_class_is_made, "Terminated", 143)]


@pytest.mark.parametrize(("happens", "said", "code"), STOPS)
def test_signals(happens: Callable[[], None], said: str, code: int) -> None:
    """A command that is interrupted, or told to end, says so in JSON, and exits with the code of the signal."""
    result = CliRunner().invoke(main, ["inspect", "-", "--json"], input=Stops(happens))
    document = json.loads(result.stdout)
    jsonschema.validate(document, SCHEMA)
    assert (document["error"], document["exit_code"], result.exit_code) == (said, code, code)


@pytest.mark.parametrize(("rank", "documents"), [("0", 1), ("1", 0)])
def test_of_several_processes_one_speaks(rank: str, documents: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of the processes of a job only the first writes the document; each says its own error in words."""
    monkeypatch.setenv("RANK", rank)
    monkeypatch.setenv("WORLD_SIZE", "2")
    result = run("inspect", "--json")
    assert (len(result.stdout.splitlines()), result.exit_code) == (documents, 2)
    assert "Missing argument" in result.stderr


def test_without_json_nothing_changes() -> None:
    """Standard output stays empty where no JSON was asked for, also where a value reads so behind `--`."""
    assert run("convert", "gone.pth", "out.pth").stdout == ""
    assert run("convert", "gone.pth", "--", "--json").stdout == ""


def test_one_of_several_has_its_path() -> None:
    """A file of several that cannot be read keeps its place among the documents."""
    lines = run("inspect", "--json", "page.pth", "in.pth").stdout.splitlines()
    document = json.loads(lines[0])
    jsonschema.validate(document, SCHEMA)
    assert document["path"] == "page.pth"
    assert json.loads(lines[1])["container"] == "torch-zip"


def test_codes_are_printed_where_ignore_takes_them() -> None:
    """The code in brackets before a finding of `check` is what --ignore takes."""
    torch.save({"module.a.weight": torch.ones(2)}, "wrapped.pth")
    result = ckpt("check", "wrapped.pth", code=1)
    codes = re.findall(r"^\w+ \[([\w-]+)\]", result.stdout, re.MULTILINE)
    assert "wrapper-prefix" in codes
    options = [option for code in codes for option in ("--ignore", code)]
    ckpt("check", *options, "wrapped.pth")
