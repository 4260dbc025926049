"""`ckpt repair`: what is whole comes back bit for bit, what is not is listed, and the input is never touched."""

import pickle
import shlex
import struct
from pathlib import Path

import numpy
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file
from torch import nn

from ckpt_tools import Repaired, check, convert, repair
from ckpt_tools.errors import CkptError, OutputExistsError, RepairError, UnsupportedContainerError, UsageError
from tests.hostile import pickles as p
from tests.hostile.zips import torch_zip
from tests.support.commands import ckpt
from tests.support.samples import PTH

Tensors = dict[str, torch.Tensor]


def model(path: Path, *, tensors: int = 20, rows: int = 30) -> Tensors:
    """A state dict of random matrices, saved by torch."""
    made = {f"layer{i}.weight": torch.randn(rows, 20) for i in range(tensors)}
    torch.save(made, path)
    return made


def equal(found: Tensors, expected: Tensors) -> bool:
    """Whether every tensor found is the one expected, bit for bit."""
    return all(found[name].equal(expected[name]) and found[name].dtype == expected[name].dtype for name in found)


def repaired(data: bytes, tmp_path: Path, *, suffix: str = ".pth", **options: object) -> tuple[Repaired, Tensors]:
    """Repair these bytes; the report, and what torch (or safetensors) loads from the output."""
    source, target = tmp_path / f"damaged{suffix}", tmp_path / f"repaired{suffix}"
    source.write_bytes(data)
    report = repair(source, target, overwrite=True, **options)  # type: ignore[arg-type]
    assert source.read_bytes() == data
    assert not [finding for finding in check(target).findings if finding.severity == "problem"]
    return report, load_file(target) if suffix == ".safetensors" else torch.load(target)


@pytest.fixture
def whole(tmp_path: Path) -> tuple[bytes, Tensors]:
    tensors = model(tmp_path / "model.pth")
    return (tmp_path / "model.pth").read_bytes(), tensors


# --- cut, and without a directory


@settings(max_examples=30, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(share=st.floats(0, 1))
def test_cut_anywhere(whole: tuple[bytes, Tensors], tmp_path: Path, share: float) -> None:
    """Wherever the cut is: what comes back is right, in order, and is every tensor whose bytes and checksum are there."""
    data, tensors = whole
    cut = int(len(data) * share)
    places = {name: data.index(tensor.numpy().tobytes()) for name, tensor in tensors.items()}
    there = [name for name, at in places.items() if at + 30 * 20 * 4 + 16 <= cut]
    if not there:
        with pytest.raises(CkptError):
            repaired(data[:cut], tmp_path)
        return
    report, found = repaired(data[:cut], tmp_path)
    assert list(found) == there
    assert equal(found, tensors)
    assert [".".join(map(str, row.where)) for row in report.missing] == [name for name in tensors if name not in there]


def test_keep_damaged_keeps_what_there_is_of_a_cut_tensor(whole: tuple[bytes, Tensors], tmp_path: Path) -> None:
    """The tensor under the cut begins as it did, and ends in zeros; those behind the cut are zeros."""
    data, tensors = whole
    at = data.index(tensors["layer9.weight"].numpy().tobytes())
    report, found = repaired(data[: at + 400], tmp_path, keep_damaged=True)
    assert found["layer9.weight"].flatten()[:100].equal(tensors["layer9.weight"].flatten()[:100])
    assert not found["layer9.weight"].flatten()[100:].any()
    assert not found["layer10.weight"].any()
    assert (report.saved, report.exit_code, all(row.kept for row in report.missing)) == (9, 1, True)


def test_a_file_with_the_pickle_at_its_end(tmp_path: Path) -> None:
    """convert puts a pickle that has grown behind the storages; without a directory all is saved still."""
    tensors = model(tmp_path / "model.pth")
    convert(tmp_path / "model.pth", tmp_path / "long.pth", add_prefix="a_very_long_name_so_that_the_pickle_grows." * 20)
    data = (tmp_path / "long.pth").read_bytes()
    assert data.index(b"data.pkl") > data.index(tensors["layer5.weight"].numpy().tobytes())
    report, found = repaired(data[: data.index(b"PK\x01\x02")], tmp_path)
    assert (report.saved, report.tensors, len(found)) == (20, 20, 20)


@pytest.mark.parametrize("path", PTH, ids=lambda path: path.name)
def test_fixtures_without_their_directory(path: Path, tmp_path: Path) -> None:
    """Views, ties, every dtype, objects: the directory lost, all is saved, and every tensor has its old digest."""
    data = path.read_bytes()
    source, target = tmp_path / "damaged.pth", tmp_path / "repaired.pth"
    source.write_bytes(data[: data.index(b"PK\x01\x02")])
    report = repair(source, target)
    compared = check(target, against=path).against
    assert report.exit_code == 0
    assert compared is not None
    assert not compared.different
    assert not compared.missing
    assert not compared.unexpected


@pytest.mark.parametrize("count", [-4096, -37, 37, 64])
@pytest.mark.parametrize("has_directory", [True, False])
def test_bytes_missing_or_added_without_checksums(tmp_path: Path, count: int, has_directory: bool) -> None:
    """What is behind a record no longer stands where its size says: its tensor is lost, and those behind have moved."""
    torch.serialization.set_crc32_options(False)
    try:
        tensors = model(tmp_path / "model.pth", tensors=6, rows=100)
    finally:
        torch.serialization.set_crc32_options(True)
    data = (tmp_path / "model.pth").read_bytes()
    at = data.index(tensors["layer2.weight"].numpy().tobytes()) + 1500
    changed = data[:at] + bytes(count) + data[at:] if count > 0 else data[:at] + data[at - count :]
    report, found = repaired(changed if has_directory else changed[: changed.index(b"PK\x01\x02")], tmp_path)
    assert report.exit_code == 1
    assert equal(found, tensors)
    assert set(found) == set(tensors) - {"layer2.weight"}


# --- damage in the middle


def test_flipped_bits(whole: tuple[bytes, Tensors], tmp_path: Path) -> None:
    """A storage that does not match its CRC-32 is left out; --keep-damaged keeps it, under the CRC-32 that it has now."""
    data, tensors = whole
    damaged = bytearray(data)
    damaged[data.index(tensors["layer3.weight"].numpy().tobytes()) + 100] ^= 5
    report, found = repaired(bytes(damaged), tmp_path)
    assert "layer3.weight" not in found
    assert (len(found), report.exit_code) == (19, 1)
    report, found = repaired(bytes(damaged), tmp_path, keep_damaged=True)
    assert int((found["layer3.weight"] != tensors["layer3.weight"]).sum()) == 1
    assert report.missing[0].kept


@pytest.mark.parametrize("signature", [b"PK\x03\x04", b"PK\x01\x02", b"PK\x07\x08"])
@pytest.mark.parametrize("number", [0, 10, 25])
def test_any_header_may_be_gone(whole: tuple[bytes, Tensors], tmp_path: Path, signature: bytes, number: int) -> None:
    """One local header, directory entry or descriptor overwritten: every tensor is saved by what the other places say."""
    data, tensors = whole
    places = [at for at in range(len(data)) if data.startswith(signature, at)]
    damaged = bytearray(data)
    damaged[places[number] : places[number] + 30] = bytes(30)
    report, found = repaired(bytes(damaged), tmp_path)
    assert equal(found, tensors)
    lost = len(tensors) - len(found)
    assert lost == 0 if signature != b"PK\x07\x08" else lost <= 1  # 30 bytes from a descriptor on reach into the next header
    assert report.saved == len(found)


@pytest.mark.parametrize("count", [-777, -64, -1, 1, 100, 4096])
def test_bytes_missing_or_added_in_the_middle(whole: tuple[bytes, Tensors], tmp_path: Path, count: int) -> None:
    """A hole or garbage inside one storage costs this storage only; everything behind it has moved, and is found."""
    data, tensors = whole
    at = data.index(tensors["layer7.weight"].numpy().tobytes()) + 1000
    damaged = data[:at] + bytes(count) + data[at:] if count > 0 else data[:at] + data[at - count :]
    report, found = repaired(damaged, tmp_path)
    assert set(tensors) - set(found) == {"layer7.weight"}
    assert equal(found, tensors)
    assert [row.where for row in report.missing] == [["layer7.weight"]]


@pytest.mark.parametrize("before", [0, 3, 70_000])
@pytest.mark.parametrize("behind", [0, 10, 200_000])
def test_garbage_around(whole: tuple[bytes, Tensors], tmp_path: Path, before: int, behind: int) -> None:
    """Bytes before and behind the archive, more than a zip comment may have too."""
    data, tensors = whole
    report, found = repaired(b"\x01" * before + data + b"\x02" * behind, tmp_path)
    assert report.exit_code == 0
    assert equal(found, tensors)
    assert len(found) == 20


def test_a_zip_in_a_tensor(tmp_path: Path) -> None:
    """A tensor that holds a whole other checkpoint: its records are its own bytes, not the file's."""
    model(tmp_path / "inner.pth")
    inner = torch.frombuffer(bytearray((tmp_path / "inner.pth").read_bytes()), dtype=torch.uint8)
    torch.save({"archive.bytes": inner, "b.weight": torch.ones(5)}, tmp_path / "model.pth")
    data = (tmp_path / "model.pth").read_bytes()
    _, found = repaired(data[: data.rindex(b"data/1") - 46], tmp_path)
    assert list(found) == ["archive.bytes", "b.weight"]
    assert found["archive.bytes"].equal(inner)


def test_two_writers(tmp_path: Path) -> None:
    """A record of another rank is whole by the checksum behind it: it is taken, and said."""
    ones, twos = torch.full((300,), 1.0), torch.full((300,), 2.0)
    (tmp_path / "sub").mkdir()
    torch.save({"a.weight": ones, "b.weight": ones.clone()}, tmp_path / "model.pth")
    torch.save({"a.weight": twos, "b.weight": twos.clone()}, tmp_path / "sub" / "model.pth")
    first, second = (tmp_path / "model.pth").read_bytes(), (tmp_path / "sub" / "model.pth").read_bytes()
    at = first.index(ones.numpy().tobytes())
    report, found = repaired(first[:at] + second[at : at + 1216] + first[at + 1216 :], tmp_path)
    assert found["a.weight"].equal(twos)
    assert found["b.weight"].equal(ones)
    assert "mixed-writers" in dict(report.notes)
    assert report.exit_code == 1  # the tensors may be of two moments


def test_a_damaged_pickle(whole: tuple[bytes, Tensors], tmp_path: Path) -> None:
    """Names and shapes that no checksum proves are taken only with --keep-damaged."""
    data, tensors = whole
    damaged = data.replace(b"layer3.weight", b"layerX.weight", 1)
    with pytest.raises(RepairError, match="Nothing can be saved") as caught:
        repaired(damaged, tmp_path)
    assert "`keep_damaged=True`" in caught.value.fix
    report, found = repaired(damaged, tmp_path, keep_damaged=True)
    assert (report.exit_code, "damaged-pickle" in dict(report.notes)) == (1, True)
    assert found["layerX.weight"].equal(tensors["layer3.weight"])


@pytest.mark.parametrize("keep_damaged", [False, True])
def test_a_cut_pickle(whole: tuple[bytes, Tensors], tmp_path: Path, keep_damaged: bool) -> None:
    """Where the pickle itself is cut nothing helps but another copy: no option that cannot is advised."""
    (tmp_path / "in.pth").write_bytes(whole[0][:600])
    with pytest.raises(RepairError, match="cannot be read to its end") as caught:
        repair(tmp_path / "in.pth", tmp_path / "out.pth", keep_damaged=keep_damaged)
    assert "get the file again" in caught.value.fix
    assert not (tmp_path / "out.pth").exists()


@pytest.mark.parametrize("name", [b"byteordeq", b"byt\0order"])
def test_the_order_of_bytes_is_lost(tmp_path: Path, name: bytes) -> None:
    """Without its record and the directory the order is assumed, which is not all that was asked for; it may be wrong."""
    tensors = model(tmp_path / "model.pth")
    data = (tmp_path / "model.pth").read_bytes()
    cut = data[: data.index(b"PK\x01\x02")]
    report, found = repaired(cut.replace(b"byteorder", name), tmp_path)
    assert (report.exit_code, "assumed-byteorder" in dict(report.notes)) == (1, True)
    assert equal(found, tensors)
    assert repaired(data.replace(b"byteorder", name, 1), tmp_path)[0].exit_code == 0


def test_text_mode(whole: tuple[bytes, Tensors], tmp_path: Path) -> None:
    """Every LF made CR LF, and undone exactly; a cut on top costs what it costs."""
    data, tensors = whole
    assert b"\r\n" in data.replace(b"\n", b"\r\n")
    report, found = repaired(data.replace(b"\n", b"\r\n"), tmp_path)
    assert (report.exit_code, equal(found, tensors), len(found)) == (0, True, 20)
    assert "text-mode" in dict(report.notes)
    half = data.replace(b"\n", b"\r\n")[: len(data) // 2]
    report, found = repaired(half, tmp_path)
    assert report.exit_code == 1
    assert len(found) > 5
    assert equal(found, tensors)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["damaged.pth", "model.pth", "repaired.pth"]


def test_a_whole_record_of_another_size(tmp_path: Path) -> None:
    """A record that matches its CRC-32 and is shorter than the pickle says is not taken for the tensor."""
    floats = {"0": bytes(range(1, 25)), "1": bytes(20)}
    tensors = {f"{key}.w": p.tensor(on=p.storage(key)) for key in floats}
    data = torch_zip(p.pickle(p.dict_of(**tensors)), floats)
    report, found = repaired(data[: data.index(b"PK\x01\x02") + 60], tmp_path)
    assert [(row.where, row.why) for row in report.missing] == [(["1.w"], "its record has 20 bytes, and the pickle says 24")]
    assert list(found) == ["0.w"]


# --- the command


@pytest.mark.parametrize(
    "data", [b"", b"PK\x03\x04", b"PK\x03\x04" * 200, b"\x80\x02}.", b"version https://git-lfs", bytes(5000)]
)
def test_nothing_to_save(tmp_path: Path, data: bytes) -> None:
    """Files without a whole tensor are refused with our own error, and nothing is written."""
    (tmp_path / "in.pth").write_bytes(data)
    with pytest.raises(CkptError):
        repair(tmp_path / "in.pth", tmp_path / "out.pth", keep_damaged=True)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["in.pth"]


def test_out_is_never_in(whole: tuple[bytes, Tensors], tmp_path: Path) -> None:
    """By name or by link: repair has to leave its input alone, with --overwrite too."""
    data, _ = whole
    (tmp_path / "link.pth").symlink_to(tmp_path / "model.pth")
    (tmp_path / "hard.pth").hardlink_to(tmp_path / "model.pth")
    for name in ("model.pth", "link.pth", "hard.pth"):
        with pytest.raises(UsageError, match="is an input"):
            repair(tmp_path / "model.pth", tmp_path / name, overwrite=True)
    with pytest.raises(OutputExistsError):
        repair(tmp_path / "hard.pth", tmp_path / "model.pth")
    assert (tmp_path / "model.pth").read_bytes() == data


def test_several_files(tmp_path: Path) -> None:
    """A folder, its index, whole or damaged: refused, with the sentence that says what is damaged and what to do."""
    torch.save({f"a.{index}": torch.ones(1000) for index in range(4)}, tmp_path / "model.pth")
    convert(tmp_path / "model.pth", tmp_path / "shards", shard_size="8KB")
    folder, index = tmp_path / "shards", tmp_path / "shards" / "model.safetensors.index.json"
    for path in (folder, index):
        with pytest.raises(UnsupportedContainerError, match="several files; ckpt repair takes one file") as caught:
            repair(path, tmp_path / "out.pth")
        assert (caught.value.why, "ckpt check" in caught.value.fix) == ("Its structure is whole.", True)
    damaged = folder / "model-00002-of-00002.safetensors"
    damaged.write_bytes(damaged.read_bytes()[:6000])
    for path in (folder, index):
        with pytest.raises(UnsupportedContainerError, match="several files") as caught:
            repair(path, tmp_path / "out.pth")
        assert f"{damaged}: The file is cut off" in caught.value.why
    assert repair(damaged, tmp_path / "fixed.safetensors").saved == 1


@pytest.mark.filterwarnings("ignore:.*deprecated:DeprecationWarning")
@pytest.mark.parametrize("kind", ["torchscript", "npz", "pickle"])
def test_containers_that_are_not_mended(kind: str, tmp_path: Path) -> None:
    """What opens and is not written by repair: the command that takes its tensors out, which works."""
    path = tmp_path / "in.bin"
    if kind == "torchscript":
        torch.jit.save(torch.jit.script(nn.Linear(2, 3)), path)
    elif kind == "npz":
        with path.open("wb") as file:
            numpy.savez(file, **{"a.w": numpy.ones(3, "f4")})  # type: ignore[arg-type]
    else:
        path.write_bytes(pickle.dumps({"a.w": torch.ones(3)}))
    with pytest.raises(UnsupportedContainerError, match="ckpt repair does not take") as caught:
        repair(path, tmp_path / "out.pth")
    _, _, command = caught.value.fix.partition(": ckpt ")
    ckpt(*shlex.split(command))
    assert not (tmp_path / "out.pth").exists()


def test_headers_without_end(tmp_path: Path) -> None:
    """Headers that each claim all that follows, and a million signatures: proving stops at a few times the file."""
    header = struct.pack("<4s5H3I2H", b"PK\x03\x04", 20, 0, 0, 0, 0, 1, 0, 0, 5, 0) + b"a/b/c"
    data = bytearray(header * (3_000_000 // len(header)))
    for at in range(0, len(data) - len(header) + 1, len(header)):
        struct.pack_into("<2I", data, at + 18, *(len(data) - at - len(header),) * 2)
    for content in (data, b"PK\x07\x08" * 1_000_100):
        (tmp_path / "in.pth").write_bytes(content)
        with pytest.raises(RepairError):
            repair(tmp_path / "in.pth", tmp_path / "out.pth")
