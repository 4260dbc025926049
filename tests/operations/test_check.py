"""`ckpt check`: what is whole is healthy, what is damaged is named, nothing is read twice or imported; and what numbers say."""

import json
import os
import pathlib
import sys
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch import nn

import ckpt_tools
from ckpt_tools import check
from ckpt_tools.errors import UsageError
from tests.support.commands import ckpt
from tests.support.samples import CODES, FIXTURES
from tests.support.terminal import run
from tests.support.zips import flip_byte, rewrite


def codes(path: Path, **options: object) -> list[str]:
    return [finding.code for finding in check(path, **options).findings]  # type: ignore[arg-type]


def saved(path: Path, *, tensors: int = 5, rows: int = 50) -> Path:
    """A state dict of random matrices, with plain names."""
    torch.save({f"layer{i}.weight": torch.randn(rows, 20) for i in range(tensors)}, path)
    return path


def test_every_code_can_be_ignored() -> None:
    assert check(FIXTURES / "ddp.pth", ignore=sorted(CODES)).verdict == "healthy"


def test_a_flipped_bit_names_its_tensor(tmp_path: Path) -> None:
    """torch.load takes a storage with a flipped bit; check names the record and the tensors on it."""
    path = tmp_path / "model.pth"
    values = torch.arange(1000.0)
    torch.save({"a.weight": torch.ones(10), "b.weight": values}, path)
    flip_byte(path, values[500:502].numpy().tobytes())
    torch.load(path)
    (finding,) = check(path).findings
    assert (finding.code, finding.severity) == ("damaged-record", "problem")
    assert "b.weight" in finding.found
    assert "a.weight" not in finding.found
    assert finding.fix.startswith("ckpt repair")


def test_two_writers(tmp_path: Path) -> None:
    """Bytes of two ranks in one file: a record agrees with the checksum behind it and not with the directory's."""
    one, two = tmp_path / "one.pth", tmp_path / "model.pth"
    values, others = torch.full((300,), 1.0), torch.full((300,), 2.0)
    torch.save({"a.weight": values}, one)
    Path(tmp_path / "sub").mkdir()
    torch.save({"a.weight": others}, tmp_path / "sub" / "one.pth")
    first, second = one.read_bytes(), (tmp_path / "sub" / "one.pth").read_bytes()
    at = first.index(values.numpy().tobytes())
    two.write_bytes(first[:at] + second[at : at + 1200 + 16] + first[at + 1216 :])
    assert codes(two) == ["damaged-record", "mixed-writers"]


def test_unused_storage(tmp_path: Path) -> None:
    path, more = saved(tmp_path / "model.pth"), tmp_path / "more.pth"
    import zipfile

    rewrite(path, more)
    with zipfile.ZipFile(more, "a") as archive:
        archive.writestr("model/data/99", b"left over")
    report = check(more)
    assert [finding.code for finding in report.findings] == ["unused-storage"]
    assert report.verdict == "healthy"


def test_a_storage_that_stands_in_the_tree_is_used(tmp_path: Path) -> None:
    torch.save({"a.w": torch.ones(3), "raw": torch.zeros(5)._typed_storage()}, tmp_path / "model.pth")
    assert "unused-storage" not in codes(tmp_path / "model.pth")


def test_shards_are_one_checkpoint(tmp_path: Path) -> None:
    """Every shard of a folder is read; one that the index does not name is said; a missing one makes it unreadable."""
    index = {"weight_map": {"a.weight": "model-00001-of-00002.safetensors", "b.weight": "model-00002-of-00002.safetensors"}}
    for name, file in index["weight_map"].items():
        save_file({name: torch.ones(3)}, tmp_path / file, {"format": "pt"})
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps(index))
    report = check(tmp_path, digest=True)
    assert (report.container, report.verdict, len(report.digests)) == ("sharded", "healthy", 2)
    assert report.bytes_read >= sum(path.stat().st_size for path in tmp_path.glob("*.safetensors"))
    shard, index_path = tmp_path / "model-00001-of-00002.safetensors", tmp_path / "model.safetensors.index.json"
    (told,) = check(shard).findings
    assert (told.code, told.severity, told.found) == ("alone", "info", "shard 1 of 2: not all of the model")
    assert told.fix.endswith(f"ckpt inspect {index_path}")
    assert ckpt_tools.inspect(index_path).totals["tensors"] == 2
    (tmp_path / "one").mkdir()
    (note,) = ckpt_tools.convert(shard, tmp_path / "one/x.pth").notes
    assert note.code == "alone"
    assert str(index_path) in note.text
    lone = tmp_path / "one" / shard.name
    lone.write_bytes(shard.read_bytes())
    assert [(told.code, told.severity) for told in check(lone).findings] == [("alone", "warning")]
    (tmp_path / "one" / "x.pth").unlink(missing_ok=True)
    assert ckpt_tools.latest_good(tmp_path / "one") is None
    save_file({"c": torch.ones(3)}, tmp_path / "model-00003-of-00003.safetensors")
    assert codes(tmp_path) == ["stray-shard"]
    (tmp_path / "model-00001-of-00002.safetensors").unlink()
    assert check(tmp_path).verdict == "unreadable"


def test_parts_of_a_distributed_checkpoint_are_compared(tmp_path: Path) -> None:
    """A .distcp is a row of zips, one a tensor: damage is named with its part, and a part that is left over is told."""
    import torch.distributed.checkpoint as dcp

    values = torch.full((40, 50), 3.0)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        dcp.save({"model": {"a.weight": torch.randn(40, 50), "b.weight": values}}, checkpoint_id=tmp_path, no_dist=True)
    assert codes(tmp_path, digest=True) == []
    part = tmp_path / "__0_0.distcp"
    (tmp_path / "__7_0.distcp").write_bytes(part.read_bytes())
    flip_byte(part, values.numpy().tobytes())
    found = check(tmp_path).findings
    assert [finding.code for finding in found] == ["damaged-record", "stray-shard"]
    assert "__0_0.distcp" in found[0].found


# --- what keeps a file from loading


OTHER_FILES = {
    "empty": b"", "page": b"<!DOCTYPE html><html><title>404</title></html>",
    "pointer": b"version https://git-lfs.github.com/spec/v1\noid sha256:ab\nsize 123\n",
    "json": b'{"error": "Entry not found"}', "gzip": b"\x1f\x8b\x08\x00" * 20, "7z": b"7z\xbc\xaf\x27\x1c" + bytes(90),
}  # fmt: skip


@pytest.mark.parametrize("data", [*OTHER_FILES.values(), bytes(5000)], ids=[*OTHER_FILES, "zeros"])
def test_other_files_are_unreadable(tmp_path: Path, data: bytes) -> None:
    path = tmp_path / "model.pth"
    path.write_bytes(data)
    (finding,) = check(path).findings
    assert (finding.code, finding.severity) == ("unreadable", "problem")


def _cut_in_the_tensors(path: Path, kept: float) -> None:
    """A file of two tensors with that part of the bytes behind its header or pickle."""
    state = {"a.weight": torch.ones(64, 64), "b.weight": torch.zeros(64, 64)}
    if path.suffix == ".safetensors":
        save_file(state, path)
    else:
        torch.save(state, path, _use_new_zipfile_serialization=path.suffix == ".pth")
    size = path.stat().st_size
    os.truncate(path, int(size - (1 - kept) * 2 * 64 * 64 * 4))


@pytest.mark.parametrize("name", ["zip.pth", "legacy.pt", "model.safetensors"])
@pytest.mark.parametrize("kept", [0.2, 0.8])
def test_repair_is_advised_where_it_saves_something(tmp_path: Path, name: str, kept: float) -> None:
    """Of a file that was cut off the advice names a repair, with the file's own name, just where a tensor is whole."""
    path = tmp_path / name
    _cut_in_the_tensors(path, kept)
    (finding,) = check(path).findings
    assert "get it again" in finding.fix
    _, advised, command = finding.fix.partition("ckpt repair ")
    assert bool(advised) is (kept > 0.5)
    if advised:
        given, target = command.split()
        assert given == str(path)
        assert run("repair", given, target).exit_code == 1  # one of two is saved
        assert Path(target).exists()
    else:
        ckpt("repair", path, path.with_name(f"saved{path.suffix}"), code=3)


@pytest.mark.parametrize("data", [b"\xfe" * 3000, (50).to_bytes(8, "little") + b'{"a": ' + b"\xff" * 60])
def test_no_repair_is_advised_where_nothing_begins(tmp_path: Path, data: bytes) -> None:
    """Bytes named .safetensors that are no header, or a damaged one: repair could save nothing, and is not advised."""
    path = tmp_path / "model.safetensors"
    path.write_bytes(data)
    (finding,) = check(path).findings
    assert finding.code == "unreadable"
    assert "repair" not in finding.fix
    ckpt("repair", path, tmp_path / "out.safetensors", code=3)


def test_repair_is_advised_for_what_lies_behind_garbage(tmp_path: Path) -> None:
    """A whole file behind a few other bytes does not open, and repair finds it: the advice stays."""
    save_file({"a.weight": torch.ones(4)}, tmp_path / "in.safetensors")
    path = tmp_path / "late.safetensors"
    path.write_bytes(b"\xfe" * 16 + (tmp_path / "in.safetensors").read_bytes())
    (finding,) = check(path).findings
    assert "ckpt repair" in finding.fix
    ckpt(*finding.fix.split()[1:])


def devices(path: Path, **options: object) -> list[tuple[str, str]]:
    """The severity and the text of what check says about devices."""
    found = check(path, **options).findings  # type: ignore[arg-type]
    return [(finding.severity, finding.found) for finding in found if finding.code == "no-such-device"]


def test_a_device_that_was_asked_for(tmp_path: Path) -> None:
    """Tags of other devices are a problem, those of the devices up to its number are none; no device is a usage error."""
    mixed = FIXTURES / "mixed_devices.pth"
    assert devices(mixed, device="cuda:3") == [("problem", "tensors are on mps: a machine with cuda:3 lacks them")]
    assert devices(mixed, device="cuda:2") == [("problem", "tensors are on mps, cuda:3: a machine with cuda:2 lacks them")]
    assert devices(mixed, device="mps") == [("problem", "tensors are on cuda:0, cuda:3: a machine with mps lacks them")]
    assert devices(FIXTURES / "cuda.pth", device="cuda:0") == []
    assert devices(FIXTURES / "cuda.pth", device="cpu")
    apple = tmp_path / "apple.pth"
    ckpt_tools.convert(FIXTURES / "cuda.pth", apple, map_location="mps")
    assert devices(apple) == devices(apple, device="mps") == []
    assert devices(apple, device="cpu") == [("problem", "tensors are on mps: a machine with cpu lacks them")]
    with pytest.raises(UsageError, match="is not a device"):
        check(mixed, device="cuda:x")


def renamed_global(path: Path, old: bytes, new: bytes) -> None:
    """Exchange a name in the pickle for one of the same length."""
    rewrite(path, path.with_suffix(".new"), change=lambda name, data: data.replace(old, new) if name == "data.pkl" else data)
    path.with_suffix(".new").rename(path)


class Config:
    """A class that a checkpoint may hold."""


def of_module(path: Path, name: str) -> Path:
    torch.save({"config": Config()}, path)
    renamed_global(path, b"c" + __name__.encode() + b"\n", b"c" + name.encode() + b"\n")
    return path


def test_a_class_that_is_not_there(tmp_path: Path) -> None:
    """The package is not installed; a class of __main__ is in no other program."""
    assert {"not-importable", "weights-only-refused"} <= set(codes(of_module(tmp_path / "model.pth", "no_such_package")))
    assert "script-class" in codes(of_module(tmp_path / "model.pth", "__main__"))


def test_only_the_top_level_package_is_looked_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """`find_spec("a.b")` would import `a`: a package that would say so if it were imported stays untouched."""
    (tmp_path / "noisy_package").mkdir()
    (tmp_path / "noisy_package" / "__init__.py").write_text("raise SystemExit('imported')")
    monkeypatch.syspath_prepend(tmp_path)
    assert "not-importable" not in codes(of_module(tmp_path / "model.pth", "noisy_package.models"))
    assert "noisy_package" not in sys.modules


@pytest.mark.skipif(sys.platform == "win32", reason="the other way round there")
def test_windows_paths(tmp_path: Path) -> None:
    class Windows:
        def __reduce__(self) -> tuple[Any, ...]:
            return pathlib.WindowsPath, ("C:\\runs",)

    path = tmp_path / "model.pth"
    torch.save({"path": Windows()}, path)
    assert "foreign-path" in codes(path)


def numpy_scalar(path: Path, module: bytes = b"numpy._core.multiarray", name: bytes = b"scalar") -> Path:
    """A file that names something of NumPy's core."""
    np = pytest.importorskip("numpy")
    torch.save({"loss": np.float64(1)}, path)
    renamed_global(path, b"cnumpy._core.multiarray\nscalar\n", b"c" + module + b"\n" + name + b"\n")
    return path


@pytest.mark.parametrize(("module", "name"), [("multiarray", "scalar"), ("multiarray", "array"), ("numeric", "_frombuffer")])
def test_numpy_1_seen_by_numpy_2(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, module: str, name: str) -> None:
    np = pytest.importorskip("numpy", "2.0")
    assert np.__version__ >= "2"
    path = numpy_scalar(tmp_path / "model.pth", f"numpy.core.{module}".encode(), name.encode())
    (finding,) = [finding for finding in check(path).findings if finding.code == "numpy-1"]
    assert finding.severity == "info"


def test_digests_are_what_the_documentation_says(tmp_path: Path) -> None:
    """The digest of a known tensor, computed by hand from the documented recipe."""
    import hashlib

    path = tmp_path / "model.pth"
    values = torch.arange(6.0).reshape(2, 3)
    torch.save({"w.weight": values.T.contiguous().T}, path)  # strided in the file, row-major in the digest
    (digest,) = check(path, digest=True).digests
    assert digest.sha256 == hashlib.sha256(b"float32 [2,3]\n" + values.numpy().tobytes()).hexdigest()


def test_overlapping_tensors_cannot_take_for_ever(tmp_path: Path) -> None:
    """Ten thousand different views of 100 MB on one number would be a terabyte of hashing: they are said to be skipped."""
    path = tmp_path / "views.pth"
    one = torch.ones(1)
    torch.save({f"v{i}.weight": one.expand(25_000_000 + i) for i in range(100)}, path)
    report = check(path, digest=True)
    assert len(report.skipped) + len(report.digests) == 100
    assert len(report.digests) < 10
    assert "skipped" in [finding.code for finding in report.findings]


def test_values_across_blocks(tmp_path: Path) -> None:
    """Elements that a block border cuts in two are counted once: a safetensors file may begin at any byte."""
    path, count = tmp_path / "model.safetensors", 1_100_000
    values = torch.zeros(count)
    values[::997] = float("nan")
    header = f'{{"a":{{"dtype":"F32","shape":[{count}],"data_offsets":[0,{4 * count}]}}}}'.encode()
    header += b" " * ((1 - len(header)) % 4)  # the bytes begin at an odd offset
    path.write_bytes(len(header).to_bytes(8, "little") + header + values.numpy().tobytes())
    (row,) = check(path, values=True).values
    assert row["nan"] == int(values.isnan().sum())


def test_what_values_say(tmp_path: Path) -> None:
    """Zeros, garbage and a fresh head are named; a trained head, zero biases and tiny moments are not."""
    torch.manual_seed(0)
    body, head = nn.Linear(64, 64), nn.Linear(64, 10)
    with torch.no_grad():
        body.weight.mul_(1.5)
    garbage = torch.randint(-(2**31), 2**31 - 1, (40, 40), dtype=torch.int32).view(torch.float32).nan_to_num(1.0, 1.0, 1.0)
    state = {
        "body.weight": body.weight, "body.bias": torch.zeros(64), "gone.weight": torch.zeros(8, 8), "lost.weight": garbage,
        "fc.weight": head.weight, "fc.bias": head.bias,
    }  # fmt: skip
    torch.save({name: tensor.detach().clone() for name, tensor in state.items()}, tmp_path / "model.pth")
    found = {
        (finding.code, finding.where[-1]) for finding in check(tmp_path / "model.pth", values=True).findings if finding.where
    }
    assert found == {("all-zero", "gone.weight"), ("uninitialised", "lost.weight"), ("fresh-head", "fc.weight")}
    with torch.no_grad():
        head.weight.add_(torch.randn_like(head.weight) * 0.02)
    torch.save({"fc.weight": head.weight.detach(), "fc.bias": head.bias.detach()}, tmp_path / "trained.pth")
    assert codes(tmp_path / "trained.pth", values=True) == []


def test_one_large_weight_is_no_fresh_head(tmp_path: Path) -> None:
    """Ten thousand normal numbers and one that no initialiser gives: the spread hardly tells, the largest does."""
    torch.manual_seed(0)
    state = {"classifier.weight": torch.randn(100, 100) * 0.02, "classifier.bias": torch.zeros(100)}
    torch.save(state, tmp_path / "fresh.pth")
    assert codes(tmp_path / "fresh.pth", values=True) == ["fresh-head"]
    state["classifier.weight"][3, 4] = 0.3
    torch.save(state, tmp_path / "trained.pth")
    assert codes(tmp_path / "trained.pth", values=True) == []
