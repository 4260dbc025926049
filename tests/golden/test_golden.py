"""What every command and public function says and writes is what is kept in kept/ (`make golden` writes it anew)."""

import os
import shutil
from collections.abc import Iterator
from typing import Any

import pytest

from tests.golden.printed import printed
from tests.golden.rows import groups, kept
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
    assert run(row, names) == kept(group).get(row), "`make golden`, and read the diff"


@pytest.mark.parametrize("command", printed())
def test_a_printed_command_runs(command: str, names: dict[str, Any]) -> None:
    """It is no wrong usage and no traceback; a conversion or repair that succeeds has written its output."""
    before = {place: set(os.listdir(place)) for place in (".", "fixtures", "made")}
    said = run(command, names).splitlines()
    made = [line for line in said if line.startswith("wrote ")]
    for place, there in before.items():
        for name in set(os.listdir(place)) - there:
            made.append(name)
            path = os.path.join(place, name)
            shutil.rmtree(path) if os.path.isdir(path) else os.remove(path)
    code = next(line for line in reversed(said) if line.startswith("exit "))
    assert code != "exit 2", said
    assert made or code != "exit 0" or command.split()[1] not in ("convert", "repair"), said
