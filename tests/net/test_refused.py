"""Broken and ambiguous files that are refused by name; the rows are in tests/net/payloads/refused.txt."""

from pathlib import Path

import pytest
from safetensors import SafetensorError, safe_open

from ckpt_tools import limits
from tests.hostile.refusals import expect_refused, write
from tests.net.payloads import Refused, refused

GROUPS: dict[str, list[Refused]] = {}
for row in refused():
    GROUPS.setdefault(row.name.partition(",")[0], []).append(row)


@pytest.mark.parametrize("group", GROUPS)
def test_refused(group: str, tmp_path: Path) -> None:
    """`inspect` and `convert` refuse each with the same error, which says why; nothing is written. So does safetensors."""
    for row in GROUPS[group]:
        path = write(tmp_path, row.data, row.file)
        with limits.raised(nodes=100_000):  # a tenth of the default, so that what is over it is quickly read
            expect_refused(path, row.error, *row.words)
        if row.reference:
            with pytest.raises(SafetensorError), safe_open(path, "pt") as opened:
                opened.keys()
        path.unlink()
