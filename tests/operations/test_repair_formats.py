"""`ckpt repair` of safetensors files and of torch-legacy."""

import struct
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from ckpt_tools import repair
from ckpt_tools.errors import RepairError
from tests.operations.test_repair import Tensors, equal, repaired


def test_text_mode_safetensors(tmp_path: Path) -> None:
    """The same for safetensors, where the header proves the size."""
    tensors = {"a.weight": torch.arange(10_000, dtype=torch.int32)}
    save_file(tensors, tmp_path / "model.safetensors", {"format": "pt"})
    data = (tmp_path / "model.safetensors").read_bytes()
    _, found = repaired(data.replace(b"\n", b"\r\n"), tmp_path, suffix=".safetensors")
    assert equal(found, tensors)


@pytest.fixture
def whole_safetensors(tmp_path: Path) -> tuple[bytes, Tensors]:
    """A safetensors file's bytes and its tensors."""
    tensors = {f"layer{i}.weight": torch.randn(30, 20) for i in range(20)}
    save_file(tensors, tmp_path / "model.safetensors", {"format": "pt", "epoch": "3"})
    return (tmp_path / "model.safetensors").read_bytes(), tensors


@pytest.mark.parametrize("share", [0.1, 0.5, 0.77, 0.999])
def test_safetensors_without_its_tail(whole_safetensors: tuple[bytes, Tensors], tmp_path: Path, share: float) -> None:
    """Every tensor that ends before the cut is saved, with the metadata."""
    data, tensors = whole_safetensors
    start = 8 + int.from_bytes(data[:8], "little")
    cut = start + int((len(data) - start) * share)
    report, found = repaired(data[:cut], tmp_path, suffix=".safetensors")
    assert len(found) == (cut - start) // 2400
    assert equal(found, tensors)
    assert report.exit_code == 1
    _, kept = repaired(data[:cut], tmp_path, suffix=".safetensors", keep_damaged=True)
    assert len(kept) == 20
    assert equal({name: kept[name] for name in found}, tensors)


@pytest.mark.parametrize(("before", "behind"), [(b"", b"x" * 1000), (b"HTTP/1.1 200 OK\r\n\r\n", b""), (b"{" * 9, b"}")])
def test_garbage_around_safetensors(
    whole_safetensors: tuple[bytes, Tensors], tmp_path: Path, before: bytes, behind: bytes
) -> None:
    """Bytes that do not belong to the file are left out; of those behind it nothing proves that they were added there."""
    data, tensors = whole_safetensors
    report, found = repaired(before + data + behind, tmp_path, suffix=".safetensors")
    assert (report.exit_code, len(found), equal(found, tensors)) == (1 if behind else 0, 20, True)
    assert ("unproved-places" in dict(report.notes)) is bool(behind)


@pytest.mark.parametrize("damaged", [b'"dtype":"X32"', b'"dtypf":"F32"'])
def test_an_empty_tensor_whose_description_is_damaged_is_missing(tmp_path: Path, damaged: bytes) -> None:
    """None of its bytes is lost, and its dtype is."""
    save_file({"a": torch.ones(3), "empty": torch.zeros(0, 4)}, tmp_path / "model.safetensors", {"format": "pt"})
    data = (tmp_path / "model.safetensors").read_bytes().replace(b'"empty":{"dtype":"F32"', b'"empty":{' + damaged)
    report, found = repaired(data, tmp_path, suffix=".safetensors")
    assert (report.exit_code, [row.where for row in report.missing], list(found)) == (1, [["empty"]], ["a"])


def test_bytes_amid_safetensors_are_not_all_saved(whole_safetensors: tuple[bytes, Tensors], tmp_path: Path) -> None:
    """Bytes that were put in between the tensors move those behind them: exit code 0 is not said."""
    data, tensors = whole_safetensors
    report, found = repaired(data[:-300] + b"\0" * 16 + data[-300:], tmp_path, suffix=".safetensors")
    assert not equal(found, tensors)
    assert report.exit_code == 1


def test_safetensors_headers_are_written_anew(tmp_path: Path) -> None:
    """format: pt and alignment, which transformers and mmap ask for."""
    header = b'{"a":{"dtype":"F32","shape":[1],"data_offsets":[0,4]}}'
    data = len(header).to_bytes(8, "little") + header + struct.pack("<f", 2.5)
    report, found = repaired(data, tmp_path, suffix=".safetensors")
    assert [row.code for row in report.mended] == ["no-format", "unaligned"]
    assert found["a"].item() == 2.5


@pytest.fixture
def whole_legacy(tmp_path: Path) -> tuple[bytes, Tensors]:
    """A torch-legacy file's bytes and its tensors, two of them views on one storage."""
    table = torch.randn(30, 20)
    tensors = {f"layer{i}.weight": torch.randn(30, 20) for i in range(18)} | {"a.weight": table[:10], "b.weight": table[5:]}
    torch.save(tensors, tmp_path / "model.pth", _use_new_zipfile_serialization=False)
    return (tmp_path / "model.pth").read_bytes(), tensors


@pytest.mark.parametrize("share", [0.3, 0.5, 0.9, 0.999])
def test_legacy_up_to_the_last_whole_storage(whole_legacy: tuple[bytes, Tensors], tmp_path: Path, share: float) -> None:
    """Storages lie one behind another: what comes before the cut is saved, as torch-zip."""
    data, tensors = whole_legacy
    cut = data[: int(len(data) * share)]
    table = torch.cat((tensors["a.weight"][:5], tensors["b.weight"]))  # the storage of both
    bytes_of = {name: tensor.numpy().tobytes() for name, tensor in tensors.items()}
    bytes_of |= dict.fromkeys(("a.weight", "b.weight"), table.numpy().tobytes())
    report, found = repaired(cut, tmp_path)
    assert set(found) == {name for name, data in bytes_of.items() if data in cut}
    assert equal(found, tensors)
    assert report.exit_code == 1
    _, kept = repaired(cut, tmp_path, keep_damaged=True)
    assert len(kept) == 20
    assert equal({name: kept[name] for name in found}, tensors)


@pytest.mark.parametrize(("before", "behind"), [(b"abc", b""), (b"\x80\x02", b"xyz"), (b"", b"x")])
def test_garbage_around_legacy(whole_legacy: tuple[bytes, Tensors], tmp_path: Path, before: bytes, behind: bytes) -> None:
    """Bytes before and behind the stream are left out; of those behind it nothing proves that they were added there."""
    data, tensors = whole_legacy
    report, found = repaired(before + data + behind, tmp_path)
    assert (report.exit_code, len(found), equal(found, tensors)) == (1 if behind else 0, 20, True)


def test_bytes_amid_legacy_are_not_all_saved(whole_legacy: tuple[bytes, Tensors], tmp_path: Path) -> None:
    """Bytes that were put into the last storage leave as many behind it: exit code 0 is not said."""
    data, tensors = whole_legacy
    report, found = repaired(data[:-300] + b"\0" * 16 + data[-300:], tmp_path)
    assert not equal(found, tensors)
    assert report.exit_code == 1


DAMAGED = {
    "name": (b"torch._utils\n", b"torch._utilr\n", "names 'torch._utilr._rebuild_tensor_v2', where 'torch._utils._rebuild"),
    "module": (b"ctorch._utils\n", b"ch._utils\n", "'h._utils._rebuild_tensor_v2', where 'torch._utils._rebuild_tensor_v2'"),
    "function": (b"\n_rebuild_tensor_v2\n", b"\n_reb_tensor_v2\n", "it names storages, and makes no tensor of them"),
    "device": (b"X\3\0\0\0cpu", b"X\3\0\0\0cpt", "lies on 'cpt', which is not a device"),
    "number": (b"X\3\0\0\0cpu", b"X\6\0\0\0cuda:x", "lies on 'cuda:x', which is not a device"),
}


@pytest.mark.parametrize("damage", DAMAGED)
def test_damage_in_a_legacy_pickle_is_not_written_as_whole(tmp_path: Path, damage: str) -> None:
    """What torch would refuse in the output comes of damage: there is no output, but with keep_damaged."""
    old, new, said = DAMAGED[damage]
    torch.save({"w": torch.arange(3)}, tmp_path / "in.pth", _use_new_zipfile_serialization=False)
    whole = (tmp_path / "in.pth").read_bytes()
    assert old in whole
    (tmp_path / "in.pth").write_bytes(whole.replace(old, new, 1))
    with pytest.raises(RepairError) as caught:
        repair(tmp_path / "in.pth", tmp_path / "out.pth")
    assert said in str(caught.value)
    assert not (tmp_path / "out.pth").exists()
    assert repair(tmp_path / "in.pth", tmp_path / "out.pth", keep_damaged=True).exit_code == 1
