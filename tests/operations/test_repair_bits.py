"""`ckpt repair` of a single flipped bit: a CRC-32 tells which one it was."""

import io
import zipfile
import zlib
from pathlib import Path

import pytest
import torch

from ckpt_tools import repair
from ckpt_tools.errors import CkptError


@pytest.fixture
def saved(tmp_path: Path) -> tuple[Path, dict[str, torch.Tensor]]:
    """A small checkpoint."""
    made = {f"layer{index}.weight": torch.arange(60.0) + 100 * index for index in range(3)}
    torch.save(made, tmp_path / "in.pth")
    return tmp_path / "in.pth", made


def equal(path: Path, made: dict[str, torch.Tensor]) -> bool:
    """Whether a file holds exactly these tensors."""
    found = torch.load(path, weights_only=True)
    return list(found) == list(made) and all(torch.equal(found[name], tensor) for name, tensor in made.items())


def test_flips_anywhere(saved: tuple[Path, dict[str, torch.Tensor]]) -> None:
    """Any bit in the pickle or a tensor: all is saved, exactly, and the report says which bit it was."""
    path, made = saved
    data, out = path.read_bytes(), path.with_name("out.pth")
    pickle, last = data.index(b"\x80\x02"), data.index(made["layer2.weight"].numpy().tobytes())
    spots = [
        *range(pickle, pickle + 90, 13), *(data.index(tensor.numpy().tobytes()) + 77 for tensor in made.values()), last + 239,
    ]  # fmt: skip
    for spot in spots:
        path.write_bytes(data[:spot] + bytes([data[spot] ^ 32]) + data[spot + 1 :])
        report = repair(path, out, overwrite=True)
        assert (report.exit_code, report.saved, equal(out, made)) == (0, 3, True), spot
        assert [text for code, text in report.notes if code == "flipped-bit" and "bit 5 of byte" in text]


def test_a_flip_in_the_checksum(saved: tuple[Path, dict[str, torch.Tensor]]) -> None:
    """The directory's CRC-32 of a tensor: its bytes are right."""
    path, made = saved
    data = bytearray(path.read_bytes())
    crc = zlib.crc32(made["layer1.weight"].numpy().tobytes()).to_bytes(4, "little")
    data[data.rindex(crc) + 2] ^= 4
    path.write_bytes(data)
    report = repair(path, path.with_name("out.pth"))
    assert (report.exit_code, equal(path.with_name("out.pth"), made)) == (0, True)
    assert any("a bit of the checksum" in text for _, text in report.notes)


def test_more_than_a_bit_is_lost(saved: tuple[Path, dict[str, torch.Tensor]]) -> None:
    """Two bits of one tensor: it is left out, as before; a pickle with two is refused."""
    path, made = saved
    data = bytearray(path.read_bytes())
    at = data.index(made["layer1.weight"].numpy().tobytes())
    data[at] ^= 1
    data[at + 50] ^= 1
    path.write_bytes(data)
    report = repair(path, path.with_name("out.pth"))
    assert (report.exit_code, report.saved) == (1, 2)
    pickle = data.index(b"\x80\x02")
    data[pickle + 30] ^= 1
    data[pickle + 40] ^= 1
    path.write_bytes(data)
    with pytest.raises(CkptError, match="Nothing can be saved"):
        repair(path, path.with_name("other.pth"))


def records_of(data: bytes) -> dict[str, int]:
    """Where the local header of each record is."""
    starts = [at for at in range(len(data)) if data.startswith(b"PK\x03\x04", at)]
    return {data[at + 30 : at + 30 + data[at + 26]].decode(): at for at in starts}


def test_flips_in_any_local_header(saved: tuple[Path, dict[str, torch.Tensor]]) -> None:
    """Signature, flags, method, lengths, name, the folder's too: the directory has it all, so that nothing is lost."""
    path, made = saved
    data, out = path.read_bytes(), path.with_name("out.pth")
    for name, start in records_of(data).items():
        for at in [*range(4), 6, 7, 8, 9, 26, 27, 28, 29, *range(30, 30 + len(name))]:
            flipped = bytearray(data)
            flipped[start + at] ^= 1 << at % 8
            path.write_bytes(flipped)
            report = repair(path, out, overwrite=True)
            assert (report.exit_code, report.saved, equal(out, made)) == (0, 3, True), (name, at)


def test_flips_in_any_name_of_the_directory(saved: tuple[Path, dict[str, torch.Tensor]]) -> None:
    """The local headers and what stands behind the bytes have it all."""
    path, made = saved
    data, out = path.read_bytes(), path.with_name("out.pth")
    for start in (at for at in range(len(data)) if data.startswith(b"PK\x01\x02", at)):
        for at in range(46, 46 + data[start + 28]):
            flipped = bytearray(data)
            flipped[start + at] ^= 2
            path.write_bytes(flipped)
            report = repair(path, out, overwrite=True)
            assert (report.exit_code, report.saved, equal(out, made)) == (0, 3, True), (start, at)


@pytest.fixture(scope="module")
def ten() -> bytes:
    """A checkpoint of ten tensors, each of which says its number."""
    file = io.BytesIO()
    torch.save({f"l{index}": torch.full((100,), float(index)) for index in range(10)}, file)
    return file.getvalue()


def with_names(data: bytes, *pairs: tuple[int, int]) -> bytes:
    """The same with a storage's number changed in its local header."""
    changed = bytearray(data)
    for number, other in pairs:
        changed[data.index(f"archive/data/{number}".encode()) + 13] = ord(str(other))
    return bytes(changed)


def right(path: Path, data: bytes) -> tuple[int, int]:
    """Exit code of the repair, and how many tensors there are, each of which is right."""
    path.write_bytes(data)
    try:
        report = repair(path, path.with_name("out.pth"), overwrite=True)
    except CkptError:
        return 3, 0
    found = torch.load(path.with_name("out.pth"), weights_only=True)
    assert all(tensor.equal(torch.full((100,), float(name[1:]))) for name, tensor in found.items())
    return report.exit_code, len(found)


@pytest.mark.parametrize("number", [0, 4, 9])
@pytest.mark.parametrize("other", [0, 1, 5, 9])
def test_a_flipped_name_gives_no_tensor_another_ones_bytes(ten: bytes, tmp_path: Path, number: int, other: int) -> None:
    """A storage with the number of another: with its directory nothing is lost, without at most these two are."""
    damaged = with_names(ten, (number, other))
    assert right(tmp_path / "in.pth", damaged) == (0, 10)
    code, count = right(tmp_path / "in.pth", damaged[: ten.index(b"PK\x01\x02")])
    assert (code, count) == (0, 10) if number == other else (code == 1 and count >= 8)
    for whole in range(1, 10):
        code, count = right(tmp_path / "in.pth", damaged[: ten.index(f"archive/data/{whole}".encode()) - 30])
        assert code in (1, 3)
        assert count >= whole - 2


def test_a_name_that_the_pickle_does_not_know(ten: bytes, tmp_path: Path) -> None:
    """Its storage is lost, and no other one."""
    damaged = ten[: ten.index(b"PK\x01\x02")].replace(b"archive/data/4", b"archive/data/t")
    assert right(tmp_path / "in.pth", damaged) == (1, 9)


def test_keys_in_the_order_of_text(tmp_path: Path) -> None:
    """As older versions wrote them: 0, 1, 10, 11, 2 ... A cut costs what is behind it."""
    made = {f"l{index}": torch.full((100,), float(index)) for index in range(12)}
    torch.save(made, tmp_path / "new.pth")
    with zipfile.ZipFile(tmp_path / "new.pth") as new:
        records = {name.partition("/")[2]: new.read(name) for name in new.namelist()}
    writer = torch._C.PyTorchFileWriter(str(tmp_path / "in.pth"))
    for name in ("data.pkl", *(f"data/{key}" for key in sorted(map(str, range(12))))):
        writer.write_record(name, records[name], len(records[name]))
    writer.write_end_of_file()
    data = (tmp_path / "in.pth").read_bytes()
    for count, key in enumerate(sorted(map(str, range(12)))):
        code, found = right(tmp_path / "in.pth", data[: data.index(f"in/data/{key}".encode() + b"FB") - 30])
        assert (code, found) == ((1, count) if count else (3, 0))
    assert right(tmp_path / "in.pth", data[: data.index(b"PK\x01\x02")]) == (0, 12)
