"""Limits: one table, documented, named by the errors, and raised in one way."""

import re
from pathlib import Path

import pytest
import torch

import ckpt_tools
from ckpt_tools import limits
from ckpt_tools.errors import LimitError, UsageError
from tests.support.terminal import ROOT, shell


@pytest.fixture
def many_globals(tmp_path: Path) -> Path:
    """A checkpoint with some dtypes in it, each a global of its own."""
    torch.save({"a.w": torch.ones(2), "types": [torch.float32, torch.int8, torch.bool]}, tmp_path / "in.pth")
    return tmp_path / "in.pth"


def test_every_limit_is_documented_with_its_value() -> None:
    """docs/limits.md lists the limits in the order of the module, with their true values."""
    page = (ROOT / "docs" / "limits.md").read_text()
    rows = re.findall(r"^\| `(\w+)` \| ([0-9,]+) \|", page, re.MULTILINE)
    assert rows == [(limit.name, f"{limit.default:,}") for limit in limits.LIMITS.values()]


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


def test_the_option_and_the_variable(many_globals: Path) -> None:
    """--limit for one command, CKPT_LIMITS for all, the option before the variable."""
    assert shell("inspect", many_globals, "--limit", "globals=3").returncode == 3
    refused = shell("check", many_globals, CKPT_LIMITS="globals=3 depth=50")
    assert (refused.returncode, "--limit globals=6" in refused.stdout) == (3, True), refused
    assert shell("inspect", many_globals, "--limit", "globals=30", CKPT_LIMITS="globals=3").returncode == 0


def test_processes_have_the_same_limits(many_globals: Path) -> None:
    """Files that are read in other processes are held to the limits of this one."""
    refused = shell("inspect", "--jobs", "2", many_globals, many_globals, "--limit", "globals=3")
    assert (refused.returncode, refused.stderr.count("--limit globals=6")) == (3, 2), refused


@pytest.mark.parametrize("name", ["code_bytes", "index_bytes", "filled", "archives"])
def test_a_limit_that_is_a_part_of_another_now(name: str) -> None:
    """Who raises a limit of an earlier version is told which one it is now."""
    with pytest.raises(UsageError, match="there is no limit") as caught:
        limits.parse(f"{name}=5")
    assert caught.value.fix.split("'")[1] in limits.LIMITS
