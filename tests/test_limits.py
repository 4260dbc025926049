"""Limits: one table, documented, named by the errors, and raised in one way."""

from __future__ import annotations

import errno
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from click.testing import CliRunner

import ckpt_tools
from ckpt_tools import limits
from ckpt_tools.errors import LimitError, UsageError
from tests.support.commands import main

ROOT = Path(__file__).parents[1]


@pytest.fixture
def many_globals(tmp_path: Path) -> Path:
    """A checkpoint with some dtypes in it, each a global of its own."""
    torch.save({"a.w": torch.ones(2), "types": [torch.float32, torch.int8, torch.bool]}, tmp_path / "in.pth")
    return tmp_path / "in.pth"


def run(*arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
    """`ckpt` with these arguments."""
    command = [sys.executable, "-m", "ckpt_tools", *arguments]
    return subprocess.run(command, capture_output=True, text=True, cwd=ROOT, check=False, env={**os.environ, **environment})


def test_every_limit_is_documented_with_its_value() -> None:
    """docs/limits.md lists the limits in the order of the module, with their true values."""
    page = (ROOT / "docs" / "limits.md").read_text()
    rows = re.findall(r"^\| `(\w+)` \| ([0-9,]+) \|", page, re.MULTILINE)
    assert rows == [(limit.name, f"{limit.default:,}") for limit in limits.LIMITS.values()]


def test_no_limit_lies_elsewhere() -> None:
    """A LimitError comes from the table, so that it names the limit and how to raise it; but for what no number would help."""
    others = {
        str(path.relative_to(ROOT / "ckpt_tools")): path.read_text().count("raise LimitError(")
        for path in (ROOT / "ckpt_tools").rglob("*.py")
    }
    # a worker that was killed; what overlaps or lies in itself without end, which no real file has
    fixed = {"io/processes.py": 1, "operations/compare/sides.py": 1, "tree/exchange.py": 1, "formats/legacy/stream.py": 1}
    fixed |= {"formats/zip/bundle.py": 1, "formats/packed/compressed.py": 1}  # no room for temporary files
    assert {name: count for name, count in others.items() if count} == fixed


def test_the_error_names_the_limit(many_globals: Path) -> None:
    """What was too much, what the limit is, and the option that raises it."""
    with limits.raised(globals=3), pytest.raises(LimitError, match="more globals") as caught:
        ckpt_tools.inspect(many_globals)
    assert "The limit is 3 different globals." in str(caught.value)
    assert caught.value.fix == "Where the file is to be trusted, raise the limit: `limits.raised(globals=6)`"


def test_raised_ends_with_its_block(many_globals: Path) -> None:
    """Inside the block one value holds, outside the other, also after an error."""
    with pytest.raises(LimitError), limits.raised(globals=3):
        ckpt_tools.inspect(many_globals)
    assert limits.GLOBALS.value == limits.GLOBALS.default
    assert ckpt_tools.inspect(many_globals).totals["tensors"] == 1


@pytest.mark.parametrize(
    "text", ["nothing=1", "globals", "globals=", "globals=0", "globals=-1", "globals=1.5", "globals=" + "9" * 30]
)
def test_what_is_no_limit(text: str) -> None:
    """Unknown names and values that are not a number above 0 are refused as usage errors."""
    with pytest.raises(UsageError, match=r"no limit|not a whole number"):
        limits.parse(text)
    assert run("inspect", "fixtures/ddp.pth", "--limit", text).returncode == 2


def test_the_option_and_the_variable(many_globals: Path) -> None:
    """--limit for one command, CKPT_LIMITS for all, the option before the variable."""
    path = str(many_globals)
    assert run("inspect", path, "--limit", "globals=3").returncode == 3
    refused = run("check", path, CKPT_LIMITS="globals=3 depth=50")
    assert (refused.returncode, "--limit globals=6" in refused.stdout) == (3, True), refused
    assert run("inspect", path, "--limit", "globals=30", CKPT_LIMITS="globals=3").returncode == 0


def test_processes_have_the_same_limits(many_globals: Path) -> None:
    """Files that are read in other processes are held to the limits of this one."""
    refused = run("inspect", "--jobs", "2", str(many_globals), str(many_globals), "--limit", "globals=3")
    assert (refused.returncode, refused.stderr.count("--limit globals=6")) == (3, 2), refused


def test_a_command_leaves_the_limits_as_they_were(many_globals: Path) -> None:
    """A program that calls the command line again gets the defaults again."""
    from ckpt_tools.cli import main

    with pytest.raises(SystemExit):
        main(["inspect", str(many_globals), "--limit", "globals=30"], prog_name="ckpt")
    assert limits.changed() == []


def test_parts_of_one_file_share_a_budget() -> None:
    """All parts of one file may not make or take in more than one of its size; another file has its own budget."""
    with limits.of_file(3200):
        limits.budget(100).make(limits.CONTAINERS.value, "too many")
        assert limits.budget(100).containers == 100
        with pytest.raises(LimitError, match="too many"):
            limits.budget(100).make(101, "too many")
        limits.budget(100).take(limits.TEXT_BYTES, limits.TEXT_BYTES.value, "too long")
        assert limits.budget(100).room(limits.TEXT_BYTES) == 6400
        with pytest.raises(LimitError, match="too long"):
            limits.budget(100).take(limits.TEXT_BYTES, 6401, "too long")
        with limits.of_file(64):
            assert limits.budget(100).containers == limits.CONTAINERS.value + 2
            assert limits.budget(100).room(limits.TEXT_BYTES) == limits.TEXT_BYTES.value + 128
    assert limits.budget(320).containers == limits.CONTAINERS.value + 10


def test_an_index_of_other_files_has_a_budget_of_its_own() -> None:
    """It is nothing but objects: 140 bytes for a chunk."""
    with limits.of_file(3200, ".metadata"):
        assert limits.budget(3200).containers == limits.CONTAINERS.value + 1600
        assert limits.budget(3200).cost_of_global < limits.Budget(3200).cost_of_global


@pytest.mark.parametrize("name", ["code_bytes", "index_bytes", "filled", "archives"])
def test_a_limit_that_is_a_part_of_another_now(name: str) -> None:
    """Who raises a limit of an earlier version is told which one it is now."""
    with pytest.raises(UsageError, match="there is no limit") as caught:
        limits.parse(f"{name}=5")
    assert caught.value.fix.split("'")[1] in limits.LIMITS


def test_a_large_file_may_list_many_small_tensors() -> None:
    """200,000 tensors of a few bytes each, names of twenty letters, are a checkpoint; in a small file crowds are refused."""
    entry = '"' + 20 * "n" + '":{"dtype":"F32","shape":[1],"data_offsets":[1000000,1000004]},'
    assert limits.TENSORS.most(200_000 * (len(entry) + 4)) > 200_000
    assert limits.TENSORS.most(limits.SMALL_FILE) < limits.SMALL_FILE // len(entry)


@pytest.mark.parametrize(
    "error",
    [ImportError("array.so: failed to map segment from shared object"), OSError(errno.ENOMEM, os.strerror(errno.ENOMEM))],
)
def test_a_module_that_finds_no_memory(error: Exception, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What was a MemoryError while a file was read may be another error where a module is loaded: no traceback either."""

    def fail(*_: object) -> None:
        raise error

    torch.save({"a.w": torch.ones(2)}, tmp_path / "in.pth")
    for place in ("ckpt_tools.formats.open._decode", "ckpt_tools.render.description.print_description"):
        monkeypatch.setattr(place, fail)
        result = CliRunner().invoke(main, ["inspect", str(tmp_path / "in.pth")])
        assert (result.exit_code, "not enough memory" in result.output) == (3, True), result.output
        monkeypatch.undo()
    with pytest.raises(ImportError, match="no such module"), limits.out_of_memory():
        raise ImportError("no such module")
