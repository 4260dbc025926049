"""Every command that a golden row prints is one that runs, on the file that it was printed for."""

from __future__ import annotations

import os
import re
import shutil
from collections.abc import Iterator
from typing import Any

import pytest

from tests.golden.rows import groups, kept
from tests.golden.running import run
from tests.golden.workplace import prepared

_COMMANDS = "convert|repair|inspect|check|scan|stats|diff|match|show"
_PRINTED = re.compile(  # what comes first behind the command is an option or has a dot or a slash in it: it is no word of prose
    rf"(?:^(?:2> )? *|: |  )(ckpt (?:{_COMMANDS}) (?:-|[^ ]*[./])\S.*?)(?:\.?$|; | \(| takes | lists |</| &&)"
)
_STANDS_FOR = re.compile(r"\b[A-Z]{2,}\b|<here>|<port>|\.\.\.|[`|…]|\[")  # a word for a name, and what is cut
_HELP = re.compile(r"--help|-h\b|explain|completion")


def printed() -> list[str]:
    """The commands in what is kept, once each, without those whose names stand for others."""
    found: dict[str, None] = {}
    for group in groups():
        for row, block in kept(group).items():
            if not row.startswith("ckpt ") or _HELP.search(row) or "--json" in row:
                continue
            for line in block.splitlines()[1:]:
                match = _PRINTED.search(line)
                if match is not None and not _STANDS_FOR.search(match[1]):
                    found.setdefault(match[1].strip())
    return list(found)


@pytest.fixture(scope="module")
def names(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, Any]]:
    """A workplace for all commands."""
    with prepared(tmp_path_factory.mktemp("printed")) as given:
        yield given


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
