"""`ckpt repair` of single flipped bits, which a CRC-32 tells; of several archives in one file, and of programs, it refuses."""

import io
import tarfile
import warnings
import zipfile
import zlib
from collections.abc import Iterator
from pathlib import Path

import numpy
import pytest
import torch
from torch import nn
from torch.distributed import checkpoint as dcp

from ckpt_tools import check, inspect, repair
from ckpt_tools.errors import CkptError, DamagedFileError
from tests.hostile import pickles as p
from tests.hostile.zips import torch_zip
from tests.support.terminal import run


@pytest.fixture
def saved(tmp_path: Path) -> tuple[Path, dict[str, torch.Tensor]]:
    made = {f"layer{index}.weight": torch.arange(60.0) + 100 * index for index in range(3)}
    torch.save(made, tmp_path / "in.pth")
    return tmp_path / "in.pth", made


def equal(path: Path, made: dict[str, torch.Tensor]) -> bool:
    """Whether a file holds exactly these tensors."""
    found = torch.load(path, weights_only=True)
    return list(found) == list(made) and all(torch.equal(found[name], tensor) for name, tensor in made.items())


def test_flips_anywhere(saved: tuple[Path, dict[str, torch.Tensor]]) -> None:
    """All is saved, exactly, wherever one bit is another.

    In the pickle or a tensor the report says which. In a local header (signature, flags, method, lengths, name, the folder's
    too) the directory has it all; of a name in the directory the local headers and what stands behind the bytes have it.
    """
    path, made = saved
    data, out = path.read_bytes(), path.with_name("out.pth")
    pickle, last = data.index(b"\x80\x02"), data.index(made["layer2.weight"].numpy().tobytes())
    tensors = (data.index(tensor.numpy().tobytes()) + 77 for tensor in made.values())
    said = [(at, 5) for at in (*range(pickle, pickle + 90, 13), *tensors, last + 239)]
    spots = list(said)
    for start in (at for at in range(len(data)) if data.startswith(b"PK\x03\x04", at)):
        spots += [(start + at, at % 8) for at in (*range(4), 6, 7, 8, 9, 26, 27, 28, 29, *range(30, 30 + data[start + 26]))]
    for start in (at for at in range(len(data)) if data.startswith(b"PK\x01\x02", at)):
        spots += [(start + at, 1) for at in range(46, 46 + data[start + 28])]
    for at, bit in spots:
        path.write_bytes(data[:at] + bytes([data[at] ^ 1 << bit]) + data[at + 1 :])
        report = repair(path, out, overwrite=True)
        assert (report.exit_code, report.saved, equal(out, made)) == (0, 3, True), (at, bit)
        told = [text for code, text in report.notes if code == "flipped-bit" and "bit 5 of byte" in text]
        assert told or (at, bit) not in said


def test_a_flip_in_the_checksum(saved: tuple[Path, dict[str, torch.Tensor]]) -> None:
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


STATE = {f"layer{index}.weight": torch.arange(210.0).reshape(21, 10) + 1000 * index for index in range(4)}


@pytest.fixture(scope="module")
def part(tmp_path_factory: pytest.TempPathFactory) -> bytes:
    """What one rank wrote: four archives of one tensor each, with equal names and equal pickles."""
    folder = tmp_path_factory.mktemp("dcp")
    with warnings.catch_warnings(action="ignore"):
        dcp.save(STATE, checkpoint_id=folder, no_dist=True)
    return (folder / "__0_0.distcp").read_bytes()


def archives(data: bytes) -> list[int]:
    return [at + 22 for at in range(len(data)) if data.startswith(b"PK\x05\x06", at)]


def flips(data: bytes) -> Iterator[bytes]:
    """A bit flipped here and there, and at every signature."""
    for at in [*range(0, len(data), 611), *(at for at in range(len(data)) if data.startswith(b"PK", at))]:
        yield data[:at] + bytes([data[at] ^ 16]) + data[at + 1 :]


def repaired(path: Path, data: bytes) -> tuple[int, list[torch.Tensor]]:
    """Exit code and the tensors of the output; 3 and none where it is refused."""
    path.write_bytes(data)
    try:
        report = repair(path, path.with_name("out.pth"), overwrite=True)
    except CkptError:
        return 3, []
    loaded = torch.load(path.with_name("out.pth"), weights_only=True)
    tensors = [tensor for tensor in (loaded if isinstance(loaded, list) else [loaded]) if tensor is not None]
    assert report.saved == len(tensors)
    return report.exit_code, tensors


@pytest.mark.filterwarnings("ignore")
def test_a_part_is_refused(part: bytes, tmp_path: Path) -> None:
    """Whole, flipped, cut or with zeros in it: nothing tells which record is of which of its archives."""
    first = archives(part)[0]
    for data in [part, *flips(part), *(part[:at] for at in (*range(50, len(part), 797), first - 1, first, first + 3))]:
        assert repaired(tmp_path / "__0_0.distcp", data) == (3, [])
    with pytest.raises(CkptError, match="is a part of a distributed checkpoint"):
        repair(tmp_path / "__0_0.distcp", tmp_path / "out.pth")


def test_a_tensor_that_holds_a_file_is_cut(tmp_path: Path) -> None:
    """What was whole before it is saved, and that something follows is said."""
    blob = torch.frombuffer(bytearray(one(7.0)), dtype=torch.uint8)
    torch.save({"first": torch.ones(500), "blob": blob, "last": torch.ones(500)}, tmp_path / "in.pth")
    data = (tmp_path / "in.pth").read_bytes()
    (tmp_path / "in.pth").write_bytes(data[: data.rindex(b"archive/data/0")])
    report = repair(tmp_path / "in.pth", tmp_path / "out.pth")
    assert report.exit_code == 1
    assert torch.equal(torch.load(tmp_path / "out.pth")["first"], torch.ones(500))
    assert list(torch.load(tmp_path / "out.pth")) == ["first"]


def test_two_archives_are_not_joined(tmp_path: Path) -> None:
    """Whatever is zeros in a file of two: a tensor that is written is that of its own pickle."""
    for parts in ([one(1.0), one(2.0)], [one(1.0), one(2.0), one(3.0)]):
        data = b"".join(parts)
        for start in range(0, len(data), 311):
            for length in (170, 700, len(parts[0])):
                _, tensors = repaired(tmp_path / "two.pth", data[:start] + bytes(length) + data[start + length :])
                assert [tensor.unique().tolist() for tensor in tensors] in ([], [[1.0]], [[2.0]], [[3.0]])


def test_an_archive_that_begins_behind_another(part: bytes, tmp_path: Path) -> None:
    """A cut soon behind a whole archive is more than trailing bytes: the file is refused."""
    path, end = tmp_path / "__0_0.distcp", archives(part)[0]
    for more in (2, 60, 700):
        path.write_bytes(part[: end + more])
        with pytest.raises(DamagedFileError, match="Another archive begins behind the first"):
            inspect(path)
    path.write_bytes(part[:end] + b"\0" * 60)
    assert "trailing-bytes" in {finding.code for finding in inspect(path).findings}


@pytest.mark.filterwarnings("ignore:.*deprecated:DeprecationWarning")
def test_programs_are_refused_whatever_is_wrong(tmp_path: Path) -> None:
    path = tmp_path / "program.pt"
    torch.jit.save(torch.jit.script(nn.Linear(7, 3)), path)
    data = path.read_bytes()
    for broken in [data, *(data[:at] for at in range(100, len(data), 499)), *flips(data)]:
        assert repaired(path, broken) == (3, [])
        assert not (tmp_path / "out.pth").exists()


@pytest.mark.filterwarnings("ignore")
def test_exported_programs_are_refused_wherever_they_are_cut(tmp_path: Path) -> None:
    """The archive of its sample inputs, which stands in an exported program, is not taken for all that the file held."""
    path = tmp_path / "program.pt2"
    torch.export.save(torch.export.export(nn.Linear(7, 3), (torch.ones(1, 7),)), path)
    data = path.read_bytes()
    for at in range(100, len(data), 299):
        assert repaired(path, data[:at]) == (3, [])


def test_a_checkpoint_in_an_archive_that_is_cut(tmp_path: Path) -> None:
    """The first of two files in a zip is saved, and is not all that the zip held; a pickle cut in it is no changed file."""
    packed = io.BytesIO()
    with zipfile.ZipFile(packed, "w") as archive:
        archive.writestr("first.pth", one(1.0))
        archive.writestr("second.pth", one(2.0))
    data, path = packed.getvalue(), tmp_path / "models.zip"
    path.write_bytes(data[: data.index(b"second.pth") - 60])
    report = repair(path, tmp_path / "out.pth")
    assert (report.exit_code, report.saved) == (1, 1)
    assert "first.pth" in dict(report.notes)["enclosed"]
    second = data.index(b"archive/data.pkl", data.index(b"second.pth"))
    path.write_bytes(data[: second + 100])
    with pytest.raises(CkptError) as refused:
        repair(path, tmp_path / "out.pth", overwrite=True)
    assert "changed while" not in str(refused.value)


@pytest.mark.filterwarnings("ignore")
def test_repair_is_advised_where_it_may_help(tmp_path: Path) -> None:
    """Not for damaged programs, arrays, tars, legacy pickles and pickles with two readings; for a cut legacy stream it is."""
    for name, data in _damaged(tmp_path).items():
        path = tmp_path / name
        path.write_bytes(data)
        report = check(path)
        assert report.exit_code != 0, name
        advised = any("ckpt repair" in finding.fix for finding in report.findings)
        assert advised == name.startswith("helped"), (name, report.findings)
        assert advised == _saves(path), name


def test_no_tensors_are_taken_from_a_dangerous_file_that_does_not_open(tmp_path: Path) -> None:
    """check and inspect say not to load it, and no command that could not read it either."""
    evil = torch_zip(p.pickle(p.dict_of(a=p.call("os", "system", p.text("id")), b=p.tensor())), {"0": bytes(24)})
    path = tmp_path / "evil.pth"
    path.write_bytes(evil[:-30])
    assert "Do not load it." in [finding.fix for finding in check(path).findings if finding.code == "dangerous"]
    shown = run("inspect", path).output
    assert "Do not load it." in shown
    assert "ckpt convert" not in shown


def _saves(path: Path) -> bool:
    try:
        return repair(path, path.with_name("out.pth"), overwrite=True).saved > 0
    except CkptError:
        return False


def _damaged(folder: Path) -> dict[str, bytes]:
    linear, whole = nn.Linear(7, 3), folder / "whole"
    torch.jit.save(torch.jit.script(linear), whole)
    scripted = whole.read_bytes()
    torch.export.save(torch.export.export(linear, (torch.ones(1, 7),)), folder / "whole.pt2")
    exported = (folder / "whole.pt2").read_bytes()
    numpy.savez(whole.with_suffix(".npz"), a=numpy.ones(90))
    arrays = whole.with_suffix(".npz").read_bytes()
    torch.save(STATE, whole, _use_new_zipfile_serialization=False)
    legacy = whole.read_bytes()
    with tarfile.open(whole, "w") as tar:
        tar.add(folder / "whole.npz", "model.npz")
        tar.add(folder / "whole.pt2", "model.pt2")
    tarred = whole.read_bytes()
    second = tarred.index(b"model.pt2")
    twice = torch_zip(p.pickle(p.dict_of(a=p.tensor(), b=p.glob("torch", "_utils._rebuild_tensor_v2"))), {"0": bytes(24)})
    return {
        "cut.pt": scripted[:-200], "longer.pt": b"x" + scripted, "flipped.pt": scripted[:150] + b"\7\7" + scripted[152:],
        "longer.pt2": exported[:-700] + b"x" + exported[-700:], "short.npz": arrays[:300] + arrays[308:],
        "model.tar": tarred[: second + 148] + b"9" + tarred[second + 149 :],
        "legacy.pth": legacy.replace(b"layer0.weight", b"layer0.\xff\xfeight", 1), "twice.pth": twice,
        "helped.pth": legacy[:-100], "helped.two.pth": one(1.0)[:-500] + one(1.0)[-499:],
    }  # fmt: skip


def one(value: float) -> bytes:
    file = io.BytesIO()
    torch.save(torch.full((600,), value), file)
    return file.getvalue()


def test_one_half_is_another_writers(tmp_path: Path) -> None:
    """The pickle and the first records of one writer, the rest of another: said."""
    parts = []
    for names in ("abcd", "dcba"):
        torch.save({name: torch.full((99,), float(ord(name))) for name in names}, tmp_path / "last.pth")
        parts.append((tmp_path / "last.pth").read_bytes())
    half = len(parts[0]) // 2
    for data in (parts[1][:half] + parts[0][half:], without_directory(parts[1][:half] + parts[0][half:])):
        (tmp_path / "last.pth").write_bytes(data)
        report = repair(tmp_path / "last.pth", tmp_path / "out.pth", overwrite=True)
        assert "mixed-writers" in [code for code, _ in report.notes]
    (tmp_path / "last.pth").write_bytes(without_directory(parts[0]))
    assert not repair(tmp_path / "last.pth", tmp_path / "out.pth", overwrite=True).notes


def without_directory(data: bytes) -> bytes:
    """A zip that was cut off behind its last record."""
    return data[: data.index(b"PK\x01\x02")]
