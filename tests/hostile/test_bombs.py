"""Files that are made to cost much: each command answers, in seconds and in little memory."""

import pytest

from tests.hostile.bombs import BOMBS, MEGABYTES, SECONDS, cost


@pytest.mark.parametrize("name", BOMBS)
def test_bombs(name: str) -> None:
    """The exit code is the kept one, no command takes 15 CPU seconds or 1 GB; `pytest -s` prints what each took."""
    found = cost(BOMBS[name])
    print(f"{name:38} {BOMBS[name].command:45} {found.seconds:5.1f} s {found.megabytes:5} MB  exit {found.code}")
    assert found.code == BOMBS[name].code, found
    assert (found.seconds < SECONDS, found.megabytes < MEGABYTES) == (True, True), found
