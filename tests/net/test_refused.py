"""Broken and ambiguous files that are refused by name, and odd ones that are read; the rows are in tests/net/payloads/."""

from pathlib import Path

import pytest

import ckpt_tools
from ckpt_tools import limits
from tests.fuzz import oracle
from tests.hostile.refusals import expect_refused, write
from tests.net.payloads import Refused, read, refused

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
            assert isinstance((oracle.torch_rows if row.reference == "torch" else oracle.safetensors_rows)(path), str)
        path.unlink()


@pytest.mark.parametrize("row", read(), ids=lambda row: row[0])
def test_read(row: tuple[str, str, list[str], bytes], tmp_path: Path) -> None:
    """What torch or safetensors loads of it is listed, and comes out."""
    _, name, wanted, data = row
    path = write(tmp_path, data, name)
    theirs, found = oracle.loaders(data)[0](path), ckpt_tools.inspect(path).tensors
    assert not isinstance(theirs, str), theirs
    if path.suffix == ".safetensors":  # whose order is its own
        theirs.sort(key=lambda one: wanted.index(one["where"][0]))
    assert oracle.difference(found, theirs) is None
    assert [".".join(map(str, one["where"])) for one in found] == wanted
    ckpt_tools.convert(path, tmp_path / "out.pth", objects="keep")
    assert oracle.difference(ckpt_tools.inspect(tmp_path / "out.pth").tensors, theirs) is None
