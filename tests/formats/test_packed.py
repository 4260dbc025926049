"""A checkpoint in a compressed file or a tar is read as what it is; what could mean two things is refused."""

import bz2
import gzip
import io
import json
import lzma
import os
import shutil
import sys
import tarfile
import zipfile
from collections.abc import Callable
from pathlib import Path
from types import ModuleType

import pytest
import torch
from safetensors.torch import save_file

import ckpt_tools
from ckpt_tools import errors, limits
from ckpt_tools.errors import CkptError, DamagedFileError, NotACheckpointError, PartError, UnsupportedContainerError
from ckpt_tools.torch import load_state_dict
from tests.hostile.refusals import expect_refused, write
from tests.support.commands import ckpt
from tests.support.containers import state
from tests.support.legacy import saved
from tests.support.rank_files import fsdp2, save_ranks
from tests.support.samples import FIXTURES
from tests.support.tars import tar

CONFIG = b'{"hidden_size": 3}'
PAYLOAD = b"cos\nsystem\n(S'true'\ntR."


def folder_tar(folder: Path, mode: str = "w:gz") -> bytes:
    """A folder as `tar czf OUT -C FOLDER .` packs it."""
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode=mode) as archive:  # type: ignore[call-overload]
        archive.add(folder, ".")
    return buffer.getvalue()


SAVED = saved(state())
SAGEMAKER = {"./config.json": CONFIG, "./code/inference.py": b"import os", "./model.pth": SAVED}
PACKED: dict[str, tuple[bytes, str, str]] = {
    "model.pth.gz": (gzip.compress(SAVED), "gzip", "model.pth"),
    "model.pth.bz2": (bz2.compress(SAVED), "bzip2", "model.pth"),
    "model.pth.xz": (lzma.compress(SAVED), "xz", "model.pth"),
    "two runs.gz": (gzip.compress(SAVED[:700]) + gzip.compress(SAVED[700:]), "gzip", "two runs"),
    "model.tar": (tar(SAGEMAKER), "tar", "model.pth"),
    "gnu.tar": (tar({"long" * 40 + "/model.pth": SAVED}, tarfile.GNU_FORMAT), "tar", "long" * 40 + "/model.pth"),
    "pax.tar": (tar({"lóng" * 40 + "/model.pth": SAVED}), "tar", "lóng" * 40 + "/model.pth"),
    "model.tar.gz": (gzip.compress(tar(SAGEMAKER)), "tar.gz", "model.pth"),
    "model": (lzma.compress(tar(SAGEMAKER)), "tar.xz", "model.pth"),
    "model.nemo": (tar({"./model_config.yaml": b"a: 1", "./model_weights.ckpt": SAVED}), "tar", "model_weights.ckpt"),
    "old.nemo": (gzip.compress(tar({"model_weights.ckpt": SAVED})), "tar.gz", "model_weights.ckpt"),
}


@pytest.mark.parametrize("name", PACKED)
def test_reads_what_is_packed(name: str, tmp_path: Path) -> None:
    """By content: inspect says what lies in what, check proves its records, load code gets the tensors that torch saved."""
    data, kind, member = PACKED[name]
    path = write(tmp_path, data, name)
    found = ckpt_tools.inspect(path)
    assert (found.container, found.packed, found.file_bytes) == ("torch-zip", {"kind": kind, "member": member}, len(data))
    checked = ckpt_tools.check(path, digest=True)
    assert (checked.verdict, checked.tensors, checked.records) == ("healthy", 3, 9)
    loaded = load_state_dict(path)
    assert all(torch.equal(loaded[key], value) for key, value in state().items())
    assert found.weights_only["loads"] is False
    assert "unpacked" in found.weights_only["reasons"][0]


# --- folders in a tar


@pytest.mark.parametrize("mode", ["w:", "w:gz"])
def test_a_folder_of_shards(mode: str, tmp_path: Path) -> None:
    """A sharded checkpoint in a folder of a tar is one, and its configuration comes along into another folder."""
    folder = tmp_path / "in" / "run"
    folder.mkdir(parents=True)
    for number, (name, value) in enumerate(state().items(), 1):
        save_file({name: value}, folder / f"model-{number:05}-of-00003.safetensors")
    files = {name: f"model-{number:05}-of-00003.safetensors" for number, name in enumerate(state(), 1)}
    (folder / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": files}))
    (folder / "config.json").write_bytes(CONFIG)
    path = write(tmp_path, folder_tar(tmp_path / "in", mode), "run.tar")
    found = ckpt_tools.inspect(path)
    assert (found.container, (found.packed or {})["member"]) == ("sharded", "run")
    assert ckpt_tools.check(path).verdict == "healthy"
    report = ckpt_tools.convert(path, tmp_path / "out", shard_size="1KB")
    assert report.companions == ["config.json"]
    assert (tmp_path / "out" / "config.json").read_bytes() == CONFIG
    assert ckpt_tools.diff(path, tmp_path / "out", values=True).same


def test_rank_files_in_a_tar(tmp_path: Path) -> None:
    """The files of all ranks become one model; one of them alone is refused as a part."""
    folder = tmp_path / "ranks"
    whole = save_ranks(folder, fsdp2, 2)
    path = write(tmp_path, folder_tar(folder, "w:"), "ranks.tar")
    loaded = load_state_dict(path)
    assert all(torch.equal(loaded[name], value) for name, value in whole.items())
    alone = f"{path}!{sorted(item.name for item in folder.iterdir())[0]}"
    with pytest.raises(PartError, match="rank 0 of 2"):
        load_state_dict(alone)


# --- which of several


def test_several_are_listed_and_one_is_named(tmp_path: Path) -> None:
    """Two checkpoints are an error that lists them; a `!` names one, in every command."""
    other = saved({"w": torch.ones(2)})
    path = write(tmp_path, tar({"a/model.pth": SAVED, "b.safetensors": b"", "c.pth": other}), "two.tar")
    expect_refused(path, NotACheckpointError, "holds 2 checkpoints: a/model.pth, c.pth", f"'{path}!a/model.pth'")
    assert [row["name"] for row in ckpt_tools.inspect(f"{path}!c.pth").tensors] == ["w"]
    assert ckpt_tools.inspect(f"{path}!c.pth").path == f"{path}!c.pth"
    ckpt_tools.convert(f"{path}!c.pth", tmp_path / "c.pth")
    assert torch.load(tmp_path / "c.pth")["w"].tolist() == [1, 1]
    expect_refused(Path(f"{path}!d.pth"), NotACheckpointError, "has no member 'd.pth'")
    expect_refused(Path(f"{write(tmp_path, SAVED, 'plain.pth')}!d.pth"), NotACheckpointError, "is not an archive")
    expect_refused(Path(f"{write(tmp_path, gzip.compress(SAVED), 'm.gz')}!d"), NotACheckpointError, "has no member 'd'")


# --- safety


@pytest.mark.parametrize("pack", [bytes, gzip.compress, lzma.compress])
def test_every_member_counts(pack: Callable[[bytes], bytes], tmp_path: Path) -> None:
    """A pickle beside the checkpoint is rated too, by inspect, check and scan."""
    path = write(tmp_path, pack(tar(SAGEMAKER | {"extra.pkl": PAYLOAD})), "m.tar")
    assert ckpt_tools.scan(path)[0].verdict == "dangerous"
    assert ckpt_tools.inspect(path).safety.verdict == "dangerous"
    assert "dangerous" in {row.code for row in ckpt_tools.check(path).findings}
    clean = write(tmp_path, pack(tar(SAGEMAKER)), "clean.tar")
    assert ckpt_tools.scan(clean)[0].verdict == ckpt_tools.inspect(clean).safety.verdict == "plain"


def test_a_zip_behind_a_tar_is_looked_through(tmp_path: Path) -> None:
    """What other programs find behind the members of a tar is no member, and rated nevertheless."""
    zipped = io.BytesIO()
    with zipfile.ZipFile(zipped, "w") as archive:
        archive.writestr("x.pkl", PAYLOAD)
    assert ckpt_tools.scan(write(tmp_path, tar({"a.txt": b"a"}) + zipped.getvalue(), "a.tar"))[0].failed


def linked(kind: bytes, name: str = "model.pth", target: str = "/etc/passwd") -> bytes:
    """A tar with a link, or what else has no bytes, behind the state."""
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w:") as archive:
        for info, data in ((tarfile.TarInfo("state.pth"), SAVED), (tarfile.TarInfo(name), b"")):
            info.size = len(data)
            if not data:
                info.type, info.linkname = kind, target
            archive.addfile(info, io.BytesIO(data))
    return buffer.getvalue()


OUTSIDE = "which is not a name inside a folder"
REFUSED: dict[str, tuple[bytes, type[CkptError], str]] = {
    "absolute": (tar({"/tmp/model.pth": SAVED}), DamagedFileError, OUTSIDE),
    "parent": (tar({"../model.pth": SAVED}), DamagedFileError, OUTSIDE),
    "backslash": (tar({"a\\model.pth": SAVED}), DamagedFileError, OUTSIDE),
    "empty part": (tar({"a//model.pth": SAVED}), DamagedFileError, OUTSIDE),
    "twice": (tar({"model.pth": SAVED, "./model.pth": SAVED}), DamagedFileError, "two members 'model.pth'"),
    "symbolic link": (linked(tarfile.SYMTYPE), DamagedFileError, "the link 'model.pth'"),
    "hard link": (linked(tarfile.LNKTYPE, target="state.pth"), DamagedFileError, "the link 'model.pth'"),
    "sparse": (linked(b"S"), DamagedFileError, "of kind b'S'"),
    "torch's names": (tar({"./storages": b"1", "./pickle": b"2"}), DamagedFileError, "torch 0.1"),
    "a link in gzip": (gzip.compress(linked(tarfile.SYMTYPE)), DamagedFileError, "the link 'model.pth'"),
    "cut gzip": (gzip.compress(SAVED)[:-20], DamagedFileError, "cut off"),
    "cut xz": (lzma.compress(SAVED)[:-20], DamagedFileError, "cut off"),
    "gzip with a wrong sum": (gzip.compress(SAVED)[:-8] + bytes(8), DamagedFileError, "incorrect data check"),
    "damaged bzip2": (bz2.compress(SAVED)[:20] + bytes(40), DamagedFileError, "cannot be inflated (bzip2)"),
    "bytes behind": (gzip.compress(SAVED) + b"more", DamagedFileError, "4 bytes of something else stand behind"),
    "cut tar": (tar(SAGEMAKER)[:3000], DamagedFileError, "The tar is cut off in its member './model.pth'"),
    "tar with a damaged header": (tar(SAGEMAKER)[:1024].ljust(2048, b"x"), DamagedFileError, "The tar header at byte 1024"),
    "gzip in gzip": (gzip.compress(gzip.compress(SAVED)), NotACheckpointError, "of something that is not a checkpoint"),
    "gzip of text": (gzip.compress(b"hello"), NotACheckpointError, "a gzip archive of something that is not a checkpoint"),
    "empty gzip": (gzip.compress(b""), NotACheckpointError, "a gzip archive"),
    "empty tar": (tar({"a.txt": b"x"}), NotACheckpointError, "It holds a.txt"),
    "a member that is damaged": (tar({"m.pth": SAVED[:-100]}), DamagedFileError, "m.bin!m.pth"),
}  # fmt: skip


@pytest.mark.parametrize("name", REFUSED)
def test_what_is_refused_by_name(name: str, tmp_path: Path) -> None:
    """Links, names that lead out, two members of one name: never followed, never chosen between. And what is damaged."""
    data, error, said = REFUSED[name]
    expect_refused(write(tmp_path, data, "m.bin"), error, said)


def test_a_bomb_meets_the_limit(tmp_path: Path) -> None:
    """What inflates to more than any real file stops there, whatever the layers; the limit can be raised."""
    path = write(tmp_path, gzip.compress(tar({"zeros.bin": bytes(3 << 20), "model.pth": SAVED})), "bomb.tar.gz")
    with limits.raised(memory=1 << 14), pytest.raises(errors.LimitError, match="inflates to more") as caught:
        ckpt_tools.inspect(path)
    assert "limits.raised(memory=" in caught.value.fix
    assert ckpt_tools.inspect(path).totals["tensors"] == 3


def test_repair_and_edits_in_place_say_the_way_out(tmp_path: Path) -> None:
    """What is packed is not mended and not edited where it lies: the error says to unpack it."""
    for name in ("model.tar.gz", "model.tar", "model.pth.gz"):
        path = write(tmp_path, PACKED[name][0], name)
        for broken in (PACKED[name][0], PACKED[name][0][:-30]):
            path.write_bytes(broken)
            with pytest.raises(UnsupportedContainerError) as caught:
                ckpt_tools.repair(path, tmp_path / "out.pth")
            assert "Unpack it first" in caught.value.fix
        path.write_bytes(PACKED[name][0])
        with pytest.raises(errors.ConvertError, match="cannot be edited in place"):
            ckpt_tools.edit_in_place(path, add_module=True)
        assert path.read_bytes() == PACKED[name][0]


def test_an_output_is_as_private_as_the_archive(tmp_path: Path) -> None:
    """The file of one member may be read by those who may read the archive."""
    path = write(tmp_path, tar(SAGEMAKER), "m.tar")
    path.chmod(0o600)
    ckpt_tools.convert(f"{path}!model.pth", tmp_path / "out.pth")
    assert os.stat(tmp_path / "out.pth").st_mode & 0o777 == 0o600


# --- zstd


class Zstd(ModuleType):
    """A stand-in for the package zstandard, which undoes gzip: it is there that a stream comes from."""

    class ZstdError(Exception):
        """What zstandard raises."""

    class ZstdDecompressor:
        """What opens a stream."""

        def stream_reader(self, file: io.RawIOBase, *, read_across_frames: bool) -> gzip.GzipFile:
            assert read_across_frames
            file.seek(4)
            return gzip.GzipFile(fileobj=io.BytesIO(file.read()))


def test_zstd_where_something_inflates_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """With the package zstandard it is read and scanned as the others are; without it the error says what is missing."""
    path = write(tmp_path, b"\x28\xb5\x2f\xfd" + gzip.compress(SAVED), "model.pth.zst")
    monkeypatch.setitem(sys.modules, "compression", None)
    monkeypatch.setitem(sys.modules, "zstandard", None)
    expect_refused(path, UnsupportedContainerError, "is a zstd archive", "pip install zstandard")
    assert ckpt_tools.scan(path)[0].verdict == "unexamined"
    monkeypatch.setitem(sys.modules, "zstandard", Zstd("zstandard"))
    assert ckpt_tools.inspect(path).packed == {"kind": "zstd", "member": "model.pth"}
    assert ckpt_tools.scan(path)[0].verdict == "plain"


def test_zstd_itself(tmp_path: Path) -> None:
    """What the package zstandard writes is read, where it is installed."""
    zstandard = pytest.importorskip("zstandard")
    path = write(tmp_path, zstandard.ZstdCompressor().compress(tar(SAGEMAKER)), "model.tar.zst")
    assert ckpt_tools.inspect(path).packed == {"kind": "tar.zst", "member": "model.pth"}


# --- in folders


def test_a_folder_lists_what_is_packed(tmp_path: Path) -> None:
    """`ckpt check FOLDER` takes model.tar.gz, .nemo and compressed checkpoints by their names; other archives are listed."""
    for name in ("model.tar.gz", "model.nemo", "model.pth.xz"):
        write(tmp_path, PACKED[name][0], name)
    write(tmp_path, gzip.compress(b"words"), "data.txt.gz")
    shutil.copy(FIXTURES / "ddp.pth", tmp_path)
    rows = [json.loads(line) for line in ckpt("inspect", "--json", tmp_path).output.splitlines()]
    assert sorted(Path(row["path"]).name for row in rows if "path" in row) == [
        "ddp.pth", "model.nemo", "model.pth.xz", "model.tar.gz"
    ]  # fmt: skip
    assert any("data.txt.gz" in str(row) for row in rows if "no_checkpoints" in row or "folder" in row)
