"""What every command and public function says and writes is what is kept in kept/ (`make golden` writes it anew)."""

from collections.abc import Iterator
from typing import Any

import pytest

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
