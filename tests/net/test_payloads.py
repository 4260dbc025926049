"""What `scan` says of a thousand payloads and of hundreds of honest objects; the rows are in tests/net/payloads/."""

from pathlib import Path

import pytest

from tests.net.payloads import Row, judged, rows

GROUPS: dict[tuple[str, str], list[Row]] = {}
for table in ("payloads", "honest"):
    for row in rows(table):
        GROUPS.setdefault((table, row.name.partition(":")[0]), []).append(row)


@pytest.mark.parametrize("group", GROUPS, ids=":".join)
def test_what_scan_says(group: tuple[str, str], tmp_path: Path) -> None:
    """The verdict of each file is the kept one, and what is told first of a dangerous one; an honest one gets no stricter."""
    wrong = [said for number, row in enumerate(GROUPS[group]) if (said := difference(row, tmp_path / f"file{number}"))]
    assert wrong == []


def difference(row: Row, path: Path) -> str:
    """How what is said of a file differs from what its row says."""
    path.write_bytes(row.data)
    found = judged(path)
    if found.verdict not in row.verdict.split("/"):
        return f"{row.name}: {found.verdict}, not {row.verdict}"
    if found.told != row.told and "/" not in row.verdict:
        return f"{row.name}: {found.told}, not {row.told}"
    return ""


def test_rows_are_written_in_one_way() -> None:
    """Each has a name of its own and stands as `python -m tests.net.payloads` prints it."""
    every = [*rows("payloads"), *rows("honest")]
    lines = [
        line
        for table in ("payloads", "honest")
        for line in Path(__file__).with_name("payloads").joinpath(f"{table}.txt").read_text("utf-8").splitlines()
    ]
    assert [row.line for row in every] == lines
    assert len({row.name for row in every}) == len(every)
