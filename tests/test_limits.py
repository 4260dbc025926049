"""Limits: one table, documented, named by the errors, and raised in one way."""

import re
from pathlib import Path

import pytest
import torch

import ckpt_tools
from ckpt_tools import limits
from ckpt_tools.errors import LimitError
from tests.support.terminal import ROOT, shell


@pytest.fixture
def many_records(tmp_path: Path) -> Path:
    """A checkpoint of seven records."""
    torch.save({"a.w": torch.ones(2)}, tmp_path / "in.pth")
    return tmp_path / "in.pth"


def test_every_limit_is_documented_with_its_value() -> None:
    """docs/limits.md lists the limits in the order of the module, with their true values."""
    page = (ROOT / "docs" / "limits.md").read_text()
    rows = re.findall(r"^\| `(\w+)` \| ([0-9,]+) \|", page, re.MULTILINE)
    assert rows == [(limit.name, f"{limit.value:,}") for limit in limits.LIMITS.values()]


def test_the_error_names_the_limit(many_records: Path) -> None:
    """What was too much, what the limit is, and the option that raises it."""
    with limits.raised(records=3), pytest.raises(LimitError, match="records") as caught:
        ckpt_tools.inspect(many_records)
    assert "The limit is 3 records of a zip" in str(caught.value)
    assert caught.value.fix == "Where the file is to be trusted, raise the limit: `limits.raised(records=7)`"


def test_raised_ends_with_its_block(many_records: Path) -> None:
    """Inside the block one value holds, outside the other, also after an error."""
    with pytest.raises(LimitError), limits.raised(records=3):
        ckpt_tools.inspect(many_records)
    assert limits.RECORDS.value == 1_000_000
    assert ckpt_tools.inspect(many_records).totals["tensors"] == 1


def test_processes_have_the_same_limits(many_records: Path) -> None:
    """Files that are read in other processes are held to the limits of this one."""
    refused = shell("inspect", "--jobs", "2", many_records, many_records, "--limit", "records=3")
    assert (refused.returncode, refused.stderr.count("--limit records=7")) == (3, 2), refused
