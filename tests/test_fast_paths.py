"""Every fast path gives what the slow one gives: fused tensors, the clone, the kernel's copy."""

import dataclasses
import json
import os
import shutil
import struct
import subprocess
import sys
import tempfile
import zipfile
from contextlib import closing, nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

import ckpt_tools
from ckpt_tools.edit.selection import select
from ckpt_tools.errors import ChecksumError, CkptError, NotACheckpointError
from ckpt_tools.formats.safetensors import lay_out
from ckpt_tools.io import cloning, writer
from ckpt_tools.io.content import (
    Checksum,
    Literal,
    Piece,
    Range,
)
from ckpt_tools.io.content import read as read_content
from ckpt_tools.io.output import Source, replacing, reserve
from ckpt_tools.pickling import fused
from ckpt_tools.pickling.reader import Machine
from ckpt_tools.pickling.torch_objects import MAKERS, Storages
from ckpt_tools.pickling.writer import write_pickle
from ckpt_tools.text import dotted
from ckpt_tools.tree.dtypes import DTYPES as ALL_DTYPES
from ckpt_tools.tree.nodes import (
    Dict,
    Entry,
    List,
    Storage,
)
from ckpt_tools.tree.visit import walk

DTYPES = (torch.float32, torch.bfloat16, torch.int64, torch.bool, torch.float8_e5m2)


@pytest.mark.parametrize(("elements", "most"), [(4, 40), (8192, 1100)])
def test_local_headers_are_read_many_at_once(
    elements: int, most: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:  # fmt: skip
    """The headers of a thousand small tensors take a few reads, of large ones a read each; the bytes found are the same."""
    real, count = Source.read, 0

    def read(self: Source, offset: int, length: int) -> bytes:
        nonlocal count
        count += 1
        return real(self, offset, length)

    torch.save({f"{index}": torch.full((elements,), float(index)) for index in range(1000)}, tmp_path / "t.pth")
    monkeypatch.setattr(Source, "read", read)
    with ckpt_tools.open_checkpoint(tmp_path / "t.pth") as checkpoint:
        assert count < most
        for index, tensor in enumerate(checkpoint.tensors):
            assert isinstance(tensor.node, Entry)
            assert read_content(tensor.node.storage.content)[:4] == struct.pack("<f", index)


def many_tensors(count: int = 120) -> dict[str, object]:
    """A checkpoint large enough that memo indices pass 256, with shapes of 0 to 6 dimensions, views, ties and Parameters."""
    base = torch.arange(720.0)
    shapes = [(), (3,), (300, 2), (2, 3, 4), (70000, 1), (1, 2, 3, 4), (1, 2, 1, 2, 1), (1, 2, 1, 2, 1, 2), (0, 3)]
    tensors: dict[str, object] = {}
    for index in range(count):
        shape = shapes[index % len(shapes)]
        tensor = torch.zeros(shape, dtype=DTYPES[index % len(DTYPES)])
        tensors[f"layer.{index}.weight"] = nn.Parameter(tensor, requires_grad=False) if index % 7 == 0 else tensor
        tensors[f"layer.{index}.view"] = base[index : index + 20 : 2].view(2, 5).t()
        tensors[f"layer.{index}.grad"] = torch.ones(index % 5 + 1, requires_grad=True)
    return tensors


def pickle_of(path: Path) -> bytes:
    """The pickle in a torch file."""
    with zipfile.ZipFile(path) as archive:
        return archive.read(next(name for name in archive.namelist() if name.endswith("/data.pkl")))


def machine(data: bytes, *, fast: bool) -> Machine:
    """A machine over a pickle whose storages are all there."""
    return Machine(data, MAKERS, Storages(lambda key, size: Literal(b"")).storage, fast=fast)


def outcome(data: bytes, *, fast: bool) -> object:
    """All that a reading shows: the tree as rewritten bytes, memo kinds, budget; or the error."""
    reader = machine(data, fast=fast)
    try:
        root = reader.load()
    except CkptError as error:
        return type(error), str(error)
    memo = [type(node).__name__ for node in reader.memo]
    return (
        write_pickle(root),
        memo,
        reader.budget,
        reader.position,
        [str(name) for name in reader.globals],
        list(reader.unusual),
    )


def test_fused_tensors_equal_the_general_path(tmp_path: Path) -> None:
    """The fused path reads the same tree, memo and budget as opcode by opcode, and it is really taken."""
    torch.save(many_tensors(), tmp_path / "many.pth")
    data = pickle_of(tmp_path / "many.pth")
    assert outcome(data, fast=True) == outcome(data, fast=False)
    taken = sum(1 for _ in filter(None, _fused_positions(data)))
    assert taken > 100


def _fused_positions(data: bytes) -> list[bool]:
    taken = []
    original = fused._tensor

    def counting(*arguments: Any) -> bool:
        taken.append(original(*arguments))
        return taken[-1]

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(fused, "_tensor", counting)
        machine(data, fast=True).load()
    return taken


@pytest.fixture(scope="module")
def many_pickle(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A file with the pickle of many tensors."""
    path = tmp_path_factory.mktemp("many") / "many.pth"
    torch.save(many_tensors(60), path)
    path.write_bytes(pickle_of(path))
    return path


@settings(max_examples=300)
@given(at=st.floats(0, 1, exclude_max=True), byte=st.integers(0, 255))
def test_fused_tensors_equal_the_general_path_on_damaged_streams(many_pickle: Path, at: float, byte: int) -> None:
    """Whatever byte is changed, both paths give the same tree or the same kind of error."""
    damaged = bytearray(many_pickle.read_bytes())
    damaged[int(at * len(damaged))] = byte
    fast, slow = outcome(bytes(damaged), fast=True), outcome(bytes(damaged), fast=False)
    if isinstance(slow, tuple) and isinstance(slow[0], type):
        assert isinstance(fast, tuple)
        assert fast[0] is slow[0]
    else:
        assert fast == slow


@pytest.fixture
def wrapped(tmp_path: Path) -> Path:
    """A checkpoint with wrapped names and a few hundred kilobytes of tensors."""
    model = {f"module.layer.{index}.weight": torch.full((40, 50), float(index)) for index in range(60)}
    torch.save({"model": model, "epoch": 1}, tmp_path / "wrapped.pth")
    return tmp_path / "wrapped.pth"


OPTIONS: list[dict[str, object]] = [
    {"strip_module": True},
    {"add_module": True},
    {"add_prefix": "a.very.long.prefix.that.makes.the.pickle.grow.beyond.the.room.it.had."},
    {"map_location": "cuda:1"},
    {},
]


@pytest.mark.skipif(not hasattr(os, "copy_file_range"), reason="needs copy_file_range")
@pytest.mark.parametrize("options", OPTIONS, ids=[str(sorted(options)) for options in OPTIONS])
def test_the_clone_changes_nothing(
    wrapped: Path, tmp_path: Path, options: dict[str, object], monkeypatch: pytest.MonkeyPatch
) -> None:
    """With a copy running ahead the output is the same, byte for byte; and the clone is really used."""
    ckpt_tools.convert(wrapped, tmp_path / "slow.pth", **options)  # type: ignore[arg-type]
    monkeypatch.setattr(cloning, "_FROM", 0)
    passed: list[bool] = []
    original = writer._Loop.pass_over

    def pass_over(loop: Any, content: Any) -> bool:
        passed.append(original(loop, content))
        return passed[-1]

    monkeypatch.setattr(writer._Loop, "pass_over", pass_over)
    ckpt_tools.convert(wrapped, tmp_path / "fast.pth", **options)  # type: ignore[arg-type]
    assert (tmp_path / "fast.pth").read_bytes() == (tmp_path / "slow.pth").read_bytes()
    assert any(passed)
    loaded = torch.load(tmp_path / "fast.pth", map_location="cpu")["model"]
    assert all(torch.equal(tensor, torch.full((40, 50), float(index))) for index, tensor in enumerate(loaded.values()))


@pytest.mark.parametrize("kind", ["btrfs", "xfs"])
def test_blocks_are_shared_where_the_file_system_can(
    wrapped: Path, tmp_path: Path, kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On btrfs and xfs the tensors of the output take no room: their blocks are those of the input."""
    if shutil.which(f"mkfs.{kind}") is None or os.geteuid():
        pytest.skip(f"needs mkfs.{kind} and the right to mount")
    image, folder = tmp_path / "image", tmp_path / "mounted"
    folder.mkdir()
    with image.open("wb") as file:
        file.truncate(512 << 20)
    subprocess.run([f"mkfs.{kind}", "-q", image], check=True, capture_output=True)
    if subprocess.run(["mount", "-o", "loop", image, folder], check=False, capture_output=True).returncode:
        pytest.skip("needs the right to mount")
    try:
        torch.save({"model": {"module.x": torch.rand(5_000_000)}}, folder / "in.pth")
        monkeypatch.setattr(cloning, "_FROM", 0)
        os.sync()
        before = os.statvfs(folder)
        ckpt_tools.convert(folder / "in.pth", folder / "out.pth", strip_module=True)
        os.sync()
        after = os.statvfs(folder)
        assert (before.f_bfree - after.f_bfree) * before.f_frsize < 2_000_000
        ckpt_tools.convert(folder / "in.pth", tmp_path / "out.pth", strip_module=True)
        assert (folder / "out.pth").read_bytes() == (tmp_path / "out.pth").read_bytes()
    finally:
        subprocess.run(["umount", folder], check=True)


def test_a_clone_of_another_file_is_not_trusted(wrapped: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """When the input was exchanged between the clone's opening and the reader's, the clone's bytes are not used."""
    monkeypatch.setattr(cloning, "_FROM", 0)
    other = tmp_path / "other.pth"
    torch.save({"model": {"module.x": torch.zeros(90_000)}}, other)
    with replacing(tmp_path / "out.pth") as output, cloning.Clone(other, output) as clone:  # noqa: SIM117
        with ckpt_tools.open_checkpoint(wrapped) as checkpoint:
            entry = next(node for _, node in walk(checkpoint.root) if type(node) is Entry)
            content: Any = entry.storage.content
            while clone.is_running(1):
                pass
            assert clone.done == other.stat().st_size
            assert not clone.holds(content.source, 0, 10)
            writer.write([Piece(Range(content.source, 0, checkpoint.file_bytes))], output, None, clone)
    assert (tmp_path / "out.pth").read_bytes() == wrapped.read_bytes()


def test_an_input_that_cannot_be_read_is_left_to_its_reader(
    wrapped: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The clone holds nothing then, and leaves nothing open."""

    def refuse(source: Source, offset: int, length: int) -> bytes:
        raise NotACheckpointError("It cannot be read.")

    monkeypatch.setattr(cloning, "_FROM", 0)
    with replacing(tmp_path / "out.pth") as output:
        monkeypatch.setattr(Source, "read", refuse)
        with cloning.Clone(wrapped, output) as clone:
            source = clone.source
            assert source is not None
            assert not clone.holds(source, 0, 1)
        assert source.fd == -1


def _blocks(path: Path) -> int:
    """Bytes on the disk that a file takes."""
    return path.stat().st_blocks * 512


@pytest.mark.skipif(sys.platform != "linux", reason="asks Linux for the blocks")
def test_blocks_are_reserved_ahead_and_given_back(wrapped: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The room for the bytes is there before them, the length is not; what an output does not need is free again."""
    size = 40 << 20
    with (tmp_path / "room").open("wb") as file:
        reserve(file.fileno(), size)
    if not _blocks(tmp_path / "room"):
        pytest.skip("this file system allocates when bytes are written")
    assert (tmp_path / "room").stat().st_size == 0
    assert _blocks(tmp_path / "room") >= size

    monkeypatch.setattr(cloning, "_FROM", 0)
    large = tmp_path / "large.pth"
    torch.save(torch.zeros(size // 4), large)
    with replacing(tmp_path / "out.pth") as output, cloning.Clone(large, output) as clone:
        while clone.is_running(1):
            pass
        writer.write([Piece(Literal(wrapped.read_bytes()))], output, None, clone)
    assert (tmp_path / "out.pth").read_bytes() == wrapped.read_bytes()
    assert _blocks(tmp_path / "out.pth") < 1 << 20


@pytest.mark.skipif(not os.path.isdir("/dev/shm"), reason="looks for a file system in memory")
def test_a_file_system_in_memory_is_left_alone() -> None:
    """There, blocks reserved are pages touched once more."""
    with tempfile.TemporaryFile(dir="/dev/shm") as file:
        reserve(file.fileno(), 40 << 20)
        assert os.fstat(file.fileno()).st_blocks == 0


def test_where_no_block_can_be_reserved_nothing_happens() -> None:
    """A pipe has no blocks."""
    reading, writing = os.pipe()
    try:
        reserve(writing, 40 << 20)
        os.write(writing, b"as ever")
        assert os.read(reading, 100) == b"as ever"
    finally:
        os.close(reading)
        os.close(writing)


@pytest.mark.parametrize("kernel", [True, False])
def test_kernel_copy_and_buffer_agree(wrapped: Path, tmp_path: Path, kernel: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """A range moved by the kernel and one moved through the buffer are the same bytes."""
    monkeypatch.setattr(writer, "KERNEL_COPY", 1 if kernel else 1 << 60)
    monkeypatch.setattr(writer, "CONGRUENT", 1)
    ckpt_tools.convert(wrapped, tmp_path / "out.safetensors", strip_module=True)
    with ckpt_tools.open_checkpoint(tmp_path / "out.safetensors") as checkpoint:
        assert len(checkpoint.tensors) == 60
    from safetensors.torch import load_file

    assert all(
        torch.equal(load_file(tmp_path / "out.safetensors")[f"layer.{i}.weight"], torch.full((40, 50), float(i)))
        for i in (0, 59)
    )


def test_without_kernel_copies_the_result_is_the_same(wrapped: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where the system has neither copy_file_range nor preadv nor pread (macOS, Windows), the fallbacks give the same file."""
    ckpt_tools.convert(wrapped, tmp_path / "a.pth", strip_module=True)
    for name in ("copy_file_range", "preadv", "pread", "statvfs", "fchmod"):
        monkeypatch.delattr(os, name, raising=False)
    ckpt_tools.convert(wrapped, tmp_path / "b.pth", strip_module=True)
    assert (tmp_path / "a.pth").read_bytes() == (tmp_path / "b.pth").read_bytes()


# --- walks that do less

_keys = st.one_of(st.sampled_from(["a", "b", "a.b", "", "."]), st.sampled_from([0, 1, True, None]))


def _entry() -> Entry:
    return Entry(Storage("0", ALL_DTYPES["float32"], 4, "cpu", Literal(bytes(4))), ALL_DTYPES["float32"], (1,), (1,), 0)


_trees = st.recursive(
    st.one_of(st.builds(_entry), st.just(3), st.just("text")),
    lambda inner: st.one_of(
        st.lists(inner, max_size=4).map(List),
        st.lists(inner, max_size=3).map(tuple),
        st.dictionaries(_keys, inner, max_size=4).map(lambda items: Dict(list(items.items()))),
    ),
    max_leaves=12,
)


@given(_trees, st.lists(st.sampled_from(["a", "b", "0", "1", "", "True"]), max_size=4).map(".".join))
def test_a_selection_finds_what_a_walk_over_everything_finds(root: Any, path: str) -> None:
    """`--select` goes along its path only, and gives the node, or the error, that looking at every path gives."""
    found = {id(node): (where, node) for where, node in walk(root) if dotted(where) == path}
    if len(found) == 1:
        ((where, node),) = found.values()
        assert select(root, path) is node
        assert select(root, json.dumps(list(where))) is node
    else:
        with pytest.raises(CkptError, match="fits" if found else "matches nothing"):
            select(root, path)


@given(_trees)
def test_a_walk_without_entries_only_leaves_them_out(root: Any) -> None:
    """Who wants containers gets them in the same order under the same paths."""
    every = [(where, node) for where, node in walk(root, plain=False) if type(node) is not Entry or not where]
    assert [(where, id(node)) for where, node in walk(root, plain=False, entries=False)] == [(w, id(n)) for w, n in every]


@given(st.dictionaries(st.text(st.characters(codec="utf-8")), st.lists(st.just(1), max_size=6), max_size=6))
def test_a_header_is_the_text_that_json_writes(shapes: dict[str, list[int]]) -> None:
    """The header of a safetensors file, written as text, is what json makes of the same fields."""
    entry = _entry()
    tensors = {
        name: (dataclasses.replace(entry, shape=tuple(shape), stride=tuple(shape)), entry.storage.content)
        for name, shape in shapes.items()
        if name != "__metadata__"
    }
    (first, *_) = lay_out(tensors, {"a": 'b"\n\u2028'})
    assert type(first.content) is Literal
    raw = first.content.data[8:].rstrip(b" ").decode()
    assert raw == json.dumps(json.loads(raw), separators=(",", ":"), ensure_ascii=False)
    assert {name: row["shape"] for name, row in json.loads(raw).items() if name != "__metadata__"} == {
        name: shape for name, shape in shapes.items() if name != "__metadata__"
    }


@pytest.mark.parametrize("installed", [True, False])
def test_crcs_are_zlibs_with_isal_and_without(wrapped: Path, tmp_path: Path, installed: bool) -> None:
    """The extra `fast` brings another CRC-32: used where it is installed, and the same number either way."""
    counting = "import zlib\ncalls = 0\ndef crc32(*args):\n    global calls\n    calls += 1\n    return zlib.crc32(*args)\n"
    (tmp_path / "isal").mkdir()
    (tmp_path / "isal" / "__init__.py").write_text("")
    (tmp_path / "isal" / "isal_zlib.py").write_text(counting if installed else "raise ImportError")
    code = (
        "import sys; sys.path.insert(0, sys.argv[1])\n"
        "import ckpt_tools\n"
        "ckpt_tools.convert(sys.argv[2], sys.argv[3], verify=True)\n"
        "print(getattr(sys.modules.get('isal.isal_zlib'), 'calls', 0) > 0)"
    )
    made = subprocess.run(
        [sys.executable, "-c", code, str(tmp_path), str(wrapped), str(tmp_path / "out.pth")],
        check=True, capture_output=True, text=True,
    )  # fmt: skip
    assert made.stdout == f"{installed}\n"
    with zipfile.ZipFile(tmp_path / "out.pth") as archive:
        assert archive.testzip() is None


def test_what_is_to_be_checked_is_read(tmp_path: Path) -> None:
    """A range that a clone has put in its place already is read all the same where its CRC-32 is wanted."""
    (tmp_path / "in").write_bytes(b"x" * 1000)
    for checksum in (Checksum(1000, 1, "it"), None):
        with closing(Source(tmp_path / "in")) as source, replacing(tmp_path / "out", overwrite=True) as output:
            clone = cloning.Clone(tmp_path / "in", output)
            clone.source, clone.done = source, 1000
            os.pwrite(output.fd, b"x" * 1000, 0)
            expected: Any = pytest.raises(ChecksumError) if checksum is not None else nullcontext()
            with expected:
                assert writer.write([Piece(Range(source, 0, 1000), checksum)], output, None, clone) == 1000
