"""Errors are of the classes of Python where there are some, and say what is so now; limits: one table, named by the errors."""

from __future__ import annotations

import errno
import pickle
import re
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

import ckpt_tools
import ckpt_tools.torch
from ckpt_tools import errors, limits
from ckpt_tools.errors import CkptError, LimitError, UsageError
from tests.support.commands import ckpt
from tests.support.samples import FIXTURES
from tests.support.terminal import ROOT, shell

SINGLE = FIXTURES / "single.pth"
ALL = [kind for kind in vars(errors).values() if isinstance(kind, type) and issubclass(kind, CkptError)]


@pytest.mark.parametrize("kind", ALL)
def test_an_error_shows_what_it_says_now(kind: type[CkptError]) -> None:
    """What is set after an error was made is in its repr, its text and its copy in another process."""
    error = kind("before", why="because", fix="do that")
    error.what = "after"
    assert repr(error) == f"{kind.__name__}('after')"
    copy = pickle.loads(pickle.dumps(error))
    assert (str(copy), type(copy), copy.exit_code) == ("after\nbecause\ndo that", kind, error.exit_code)


def test_an_output_that_cannot_be_written_is_an_os_error(tmp_path: Path) -> None:
    """`except OSError` gets every error of outputs and of remote paths, with the system's number where it is known."""
    assert issubclass(errors.OutputError, OSError)
    assert issubclass(errors.RemoteError, OSError)
    assert (errors.OutputError("x").errno, errors.OutputError("x").filename) == (None, None)
    with pytest.raises(OSError, match="regular file") as caught:
        ckpt_tools.convert(SINGLE, "/dev/full", overwrite=True)
    assert type(caught.value) is errors.OutputError


READING: list[Callable[[Path], object]] = [
    ckpt_tools.inspect, ckpt_tools.open_checkpoint, ckpt_tools.torch.load, ckpt_tools.torch.load_state_dict,
    ckpt_tools.stats, lambda path: ckpt_tools.show(path, "weight"),
    lambda path: ckpt_tools.torch.load_into(torch.nn.Linear(1, 1), path),
    lambda path: ckpt_tools.convert(path, path.parent / "out.pth"),
    lambda path: ckpt_tools.average([path, path], path.parent / "out.pth"),
    lambda path: ckpt_tools.repair(path, path.parent / "out.pth"), lambda path: ckpt_tools.diff(SINGLE, path),
    lambda path: ckpt_tools.edit_in_place(path, unwrap=True),
]  # fmt: skip


@pytest.mark.parametrize("call", READING)
def test_a_missing_file_is_a_file_not_found_error(tmp_path: Path, call: Callable[[Path], object]) -> None:
    """Every call says that a file is not there as Python does, with exit code 3."""
    with pytest.raises(FileNotFoundError, match="There is no such file") as caught:
        call(tmp_path / "nowhere.pth")
    assert isinstance(caught.value, CkptError)
    assert (caught.value.exit_code, caught.value.errno) == (3, 2)


def test_outputs_that_cannot_be(tmp_path: Path) -> None:
    """An output that exists, is a folder, or has none is refused as OutputError, with the system's number for it."""
    there = tmp_path / "there.pth"
    there.write_bytes(b"x")
    for target, number in ((there, errno.EEXIST), (tmp_path, errno.EISDIR), (tmp_path / "no" / "o.pth", errno.ENOENT)):
        with pytest.raises(errors.OutputError) as caught:
            ckpt_tools.convert(SINGLE, target)
        assert caught.value.errno == number
    assert there.read_bytes() == b"x"
    with pytest.raises(FileExistsError):
        ckpt_tools.convert(SINGLE, there)


def test_arguments_are_called_as_their_reader_knows_them(tmp_path: Path) -> None:
    """The library says `plan_value`, with the fact beside it; the command line's words for the same are its option."""
    with pytest.raises(UsageError, match="`plan_value` is about a plan; `plan=PLAN` is missing") as caught:
        ckpt_tools.convert(SINGLE, tmp_path / "out.pth", plan_value="n=1")
    assert caught.value.option == "plan_value"
    assert "--" not in str(caught.value)
    said = ckpt("convert", SINGLE, tmp_path / "out.pth", "--plan-value", "n=1", code=2).stderr
    assert "--plan-value is about a plan; --plan PLAN is missing." in said
    assert UsageError("nothing about any").option == ""


def test_reports_call_arguments_as_their_reader_knows_them(tmp_path: Path) -> None:
    """Notes and reasons of a report say `drop`; the page and the JSON of the same conversion say --drop."""
    source = tmp_path / "in.pth"
    torch.save({"model": {"a.w": torch.ones(1), "b.w": torch.ones(1)}, "mean": torch.ones(1), "epoch": 1}, source)
    options = {"keep": "a.*", "map_location": "cpu", "dry_run": True}
    report = ckpt_tools.convert(source, tmp_path / "out.pth", **options)  # type: ignore[arg-type]
    said = [note.text for note in report.notes] + [why for _, why in report.dropped]
    assert len(said) == 3
    assert not any("--" in text for text in said)
    assert all("`" in text for text in said)
    command = ["convert", source, tmp_path / "out.pth", "--keep", "a.*", "--map-location", "cpu", "--dry-run"]
    page, document = (ckpt(*command, *more).stdout for more in ((), ("--json",)))
    assert "`" not in page + document
    for words in ("--keep / --drop", "--map-location cpu"):
        assert words in page
        assert words in document


def test_reports_are_short_to_look_at(tmp_path: Path) -> None:
    """The repr of a report names its class and counts what is long; it fits a few lines, whatever the file holds."""
    big = tmp_path / "big.pth"
    torch.save({f"layer{number}.weight": torch.ones(1) for number in range(500)}, big)
    model = torch.nn.ModuleDict({f"layer{number}": torch.nn.PReLU() for number in range(500)})
    for report in (
        ckpt_tools.inspect(big), ckpt_tools.check(big, digest=True), ckpt_tools.stats(big), ckpt_tools.diff(big, SINGLE),
        ckpt_tools.show(big, "layer0.weight"),
        ckpt_tools.convert(big, tmp_path / "a.pth", add_module=True), ckpt_tools.average([big, big], tmp_path / "b.pth"),
        ckpt_tools.repair(big, tmp_path / "c.pth"), ckpt_tools.scan(big)[0], ckpt_tools.torch.load_into(model, big),
    ):  # fmt: skip
        assert repr(report).startswith(f"{type(report).__name__}(")
        assert len(repr(report)) < 1000


def test_errors_are_pythons_own_kinds_too(tmp_path: Path) -> None:
    """Code that catches Python's own errors, or torch's RuntimeError, catches ours."""
    torch.save({"weight": torch.ones(1)}, tmp_path / "a.pth")
    with pytest.raises(ValueError, match="dtype"):
        ckpt_tools.convert(tmp_path / "a.pth", tmp_path / "b.pth", dtype="nonsense")
    with pytest.raises(LookupError, match="nowhere"):
        ckpt_tools.show(tmp_path / "a.pth", "nowhere")
    with pytest.raises(RuntimeError, match="does not fit the model"):
        ckpt_tools.torch.load_into(torch.nn.Linear(1, 1), tmp_path / "a.pth")
    with pytest.raises(FileNotFoundError, match="no such file"):
        ckpt_tools.inspect(tmp_path / "none.pth")


@pytest.fixture
def many_records(tmp_path: Path) -> Path:
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
