"""What every command and public function says and writes is what is kept in kept/ (`make golden` writes it anew)."""

import os
import shutil
from collections.abc import Iterator
from typing import Any

import pytest

from tests.golden.printed import printed
from tests.golden.rows import command, groups, kept
from tests.golden.running import run
from tests.golden.workplace import prepared

GROUPS = groups()


@pytest.fixture(scope="module")
def names(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, Any]]:
    """A workplace for all rows."""
    with prepared(tmp_path_factory.mktemp("golden")) as given:
        yield given


@pytest.mark.parametrize(("group", "row"), [(group, row) for group, rows in GROUPS.items() for row in rows])
def test_row(group: str, row: str, names: dict[str, Any]) -> None:
    """The exit code, the page, the JSON and the tensors of a row are those that are kept."""
    assert run(row, names) == kept(group).get(row), f"`{command(group)}`, and read the diff"


@pytest.mark.parametrize("group", GROUPS)
def test_what_is_kept_is_run(group: str) -> None:
    """No file is missing or empty, and none keeps a row that is no longer run."""
    assert list(kept(group)) == GROUPS[group] != [], f"`{command(group)}`, and read the diff"


@pytest.mark.parametrize("line", printed())
def test_a_printed_command_runs(line: str, names: dict[str, Any]) -> None:
    """It is no wrong usage and no traceback; a conversion or repair that succeeds has written its output."""
    before = {place: set(os.listdir(place)) for place in (".", "fixtures", "made")}
    said = run(line, names).splitlines()
    made = [text for text in said if text.startswith("wrote ")]
    for place, there in before.items():
        for name in set(os.listdir(place)) - there:
            made.append(name)
            path = os.path.join(place, name)
            shutil.rmtree(path) if os.path.isdir(path) else os.remove(path)
    code = next(text for text in reversed(said) if text.startswith("exit "))
    assert code != "exit 2", said
    assert made or code != "exit 0" or line.split()[1] not in ("convert", "repair"), said
