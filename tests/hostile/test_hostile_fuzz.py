"""What the fuzzer once found (`make fuzz`)."""

import zipfile
from pathlib import Path
from typing import Any

import pytest
import torch

import ckpt_tools
from ckpt_tools.errors import LimitError, TensorError
from tests.hostile import pickles as p
from tests.hostile.refusals import write
from tests.hostile.zips import build, deflated, torch_records, torch_zip


def test_what_cannot_be_inflated_has_no_digest(tmp_path: Path) -> None:
    """Found by the fuzzer: the digest was that of no bytes, or of some; torch gives what memory held."""
    rows = torch_records(p.pickle(p.dict_of(w=p.tensor())), {"0": bytes(24)})
    at = next(number for number, row in enumerate(rows) if row.name.endswith(b"data/0"))
    rows[at] = deflated(b"archive/data/0", bytes(24))
    rows[at].data = b"\xff" * len(rows[at].data)
    report = ckpt_tools.check(write(tmp_path, build(rows)), digest=True)
    assert (report.digests, report.skipped) == ([], [["w"]])
    assert report.findings[0].code == "damaged-record"


def test_empty_tensor_cast(tmp_path: Path) -> None:
    """Found by the fuzzer: a cast of no elements at all."""
    torch.save({"a.w": torch.zeros(0), "b.w": torch.ones(2)}, tmp_path / "in.pth")
    ckpt_tools.convert(tmp_path / "in.pth", tmp_path / "out.pth", dtype="fp16")
    loaded = torch.load(tmp_path / "out.pth")
    assert (loaded["a.w"].dtype, loaded["a.w"].shape, loaded["b.w"].tolist()) == (torch.float16, (0,), [1, 1])


@pytest.mark.parametrize("key", ["a\0b", "..", "a\\b", "a//b", "\ud800"])
def test_repair_writes_no_record_that_cannot_be_read(key: str, tmp_path: Path) -> None:
    """Found by the fuzzer: storages that are missing may have keys that name no record, and repair wrote zeros under them."""
    lost = p.tensor(on=p.storage(key))
    path = write(tmp_path, torch_zip(p.pickle(p.dict_of(**{"a.w": p.tensor(), "b.w": lost})), {"0": bytes(24)}))
    with pytest.raises(TensorError, match="cannot name a record"):
        ckpt_tools.repair(path, tmp_path / "out.pth", keep_damaged=True)
    ckpt_tools.repair(path, tmp_path / "out.pth")
    assert list(torch.load(tmp_path / "out.pth")) == ["a.w"]


def test_text_mode_damage_leaves_no_copy(tmp_path: Path) -> None:
    """Found by the fuzzer: the copy without carriage returns was in a folder that nobody would have removed after a kill."""
    torch.save({"a.w": torch.arange(600.0)}, tmp_path / "good.pth")
    path = write(tmp_path, (tmp_path / "good.pth").read_bytes().replace(b"\n", b"\r\n"))
    (tmp_path / ".out.pth.0123456789ab.ckpt-tmp").write_bytes(b"of a killed process")
    ckpt_tools.repair(path, tmp_path / "out.pth")
    assert sorted(row.name for row in tmp_path.iterdir()) == ["bad.pth", "good.pth", "out.pth"]
    assert torch.equal(torch.load(tmp_path / "out.pth")["a.w"], torch.arange(600.0))


@pytest.mark.parametrize("options", [{"dtype": "fp16"}, {}])
def test_an_empty_record_has_the_checksum_of_nothing(tmp_path: Path, options: dict[str, Any]) -> None:
    """Found by the fuzzer (--seed 601 --first 117360): the wrong CRC-32 of an empty record went into the directory alone."""
    body = p.pickle(p.dict_of(**{"a.w": p.tensor(), "b.w": p.tensor(p.sizes(0), p.sizes(1), on=p.storage("1", 0))}))
    records = torch_records(body, {"0": bytes(24), "1": b""})
    records[3].crc = 3
    path = write(tmp_path, build(records))
    ckpt_tools.convert(path, tmp_path / "out.pth", **options)
    assert [row["shape"] for row in ckpt_tools.inspect(tmp_path / "out.pth").tensors] == [[2, 3], [0]]
    with zipfile.ZipFile(tmp_path / "out.pth") as archive:
        assert {row.CRC for row in archive.infolist() if not row.file_size} == {0}


def test_a_damaged_size_is_not_filled_up(tmp_path: Path) -> None:
    """Found by the fuzzer (--seed 21 --first 269904): one flipped bit in a size, and repair wrote 16 GiB of zeros."""
    large = p.tensor(p.sizes(1 << 32), p.sizes(1), on=p.storage("1", 1 << 32))
    body = p.pickle(p.dict_of(**{"a.w": p.tensor(), "b.w": large}))
    path = write(tmp_path, torch_zip(body, {"0": bytes(24), "1": bytes(8)}))
    with pytest.raises(LimitError, match="comes to 17179869184 bytes") as caught:
        ckpt_tools.repair(path, tmp_path / "out.pth", keep_damaged=True)
    assert "`limits.raised(memory=536870912)`" in caught.value.fix
    assert ckpt_tools.repair(path, tmp_path / "out.pth").saved == 1


def test_nothing_of_a_conjugate_is_gathered(tmp_path: Path) -> None:
    """Found by the fuzzer (--seed 17003 --first 18876): a conjugate without elements ended in a traceback."""
    torch.save({"a.w": torch.ones(4, dtype=torch.complex64).conj()[:0], "b.w": torch.ones(2)}, tmp_path / "in.pth")
    found = ckpt_tools.check(tmp_path / "in.pth", digest=True)
    assert [digest.where for digest in found.digests] == [("a.w",), ("b.w",)]
