"""Files that two programs read as two: torch and we, torch in two ways, or two of torch's loaders. Ours is torch's, or none."""

from __future__ import annotations

import io
import re
import struct
import tarfile
import warnings
import zipfile
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save

import ckpt_tools
from ckpt_tools.errors import AmbiguousFileError, TensorError, ZipError
from ckpt_tools.torch import load_state_dict
from tests.hostile.calls import COMMAND, SYSTEM
from tests.hostile.pickles import (
    REDUCE,
    dict_of,
    integer,
    list_of,
    pickle,
    storage,
    tensor,
    text,
    tuple_of,
)
from tests.hostile.refusals import expect_refused, write
from tests.hostile.zips import (
    Rec,
    build,
    central_entry,
    local_header,
    torch_zip,
    wide_end,
)
from tests.support import tars
from tests.support.legacy import (
    MAGIC,
    PROTOCOL,
    SYS_INFO,
    floats,
    persistent,
    stream,
)

MAGIC_NUMBER = 0x1950A86A20F9469CFC6C
SIX = floats(0, 1, 2, 3, 4, 5)
CALL = SYSTEM + COMMAND + REDUCE
GOOD_TAR = tars.torch_tar(
    dict_of(w=tars.persistent(2)), tars.storages((1, "FloatStorage", SIX)), tars.tensors((2, 1, (6,), (1,), 0))
)


def saved(value: object) -> bytes:
    """What torch.save writes."""
    buffer = io.BytesIO()
    torch.save(value, buffer)
    return buffer.getvalue()


def records(data: bytes) -> list[Rec]:
    """The records of a zip, to be written anew."""
    with zipfile.ZipFile(io.BytesIO(data)) as file:
        return [Rec(info.filename.encode(), file.read(info)) for info in file.infolist()]


def named(path: Path) -> list[str]:
    """The names of a file's tensors."""
    return [row["where"][0] for row in ckpt_tools.inspect(path).tensors]


# --- one file, two formats


def as_tar(data: bytes) -> bytes:
    """The bytes with a checksum in the place where a tar header has it, which makes them one to Python."""
    block = bytearray(data[:512].ljust(512, b"\0"))
    block[148:156] = b" " * 8
    block[148:156] = b"%06o\0 " % sum(block)
    return bytes(block) + data[512:]


def roomy_pickle(protocol: int) -> bytes:
    """A pickle with a text over the place of the checksum."""
    filled = text("0" * 600) + b"0"
    return b"\x80" + bytes([protocol]) + filled + dict_of(a=integer(1)) + b"."


def roomy_header() -> bytes:
    """A safetensors file whose header has text over the place of the checksum."""
    return save({"w": torch.zeros(2)}, {"note": "0" * 700})


def roomy_npy() -> bytes:
    """A .npy whose header is padded over the place of the checksum."""
    shape = b"{'descr': '<f4', 'fortran_order': False, 'shape': (2,), }"
    return b"\x93NUMPY\x01\0" + struct.pack("<H", 600) + shape.ljust(599) + b"\n" + bytes(8)


def roomy_zip() -> bytes:
    """A zip whose first record goes over the place of the checksum."""
    return build([Rec(b"archive/0", b"0" * 900), *records(saved({"a.w": torch.ones(2)}))])


FIRST_BLOCKS = {
    "zip": roomy_zip(), "legacy": MAGIC + PROTOCOL + pickle(dict_of(note=text("0" * 600))), "pickle": roomy_pickle(2),
    "pickle4": roomy_pickle(4), "safetensors": roomy_header(), "npy": roomy_npy(),
    "index": b'{"metadata": {"note": "' + b"0" * 700 + b'"}, "weight_map": {"a": "a.safetensors"}}',
    "computed": pickle(text("0" * 600), b"0", CALL),
}  # fmt: skip


@pytest.mark.parametrize("kind", FIRST_BLOCKS)
def test_a_tar_that_is_another_container(kind: str, tmp_path: Path) -> None:
    """torch.load tries tar before pickles, and in memory not at all: a first block that is both is refused, whatever it is."""
    data = as_tar(FIRST_BLOCKS[kind])
    with tarfile.open(fileobj=io.BytesIO(data), mode="r:") as archive:
        assert len(archive.next().name)  # type: ignore[union-attr]
    expect_refused(write(tmp_path, data), AmbiguousFileError, "tar archive", "Two programs would read two files")


def test_legacy_and_tar_are_two_checkpoints(tmp_path: Path) -> None:
    """torch takes such a file for a tar where it has a name, for a legacy stream where it is in memory."""
    magic = pickle(text("0" * 600), b"0", integer(MAGIC_NUMBER))
    data = as_tar(stream(dict_of(w=tensor(on=persistent())), ("0", SIX), head=magic + PROTOCOL + SYS_INFO))
    assert torch.load(io.BytesIO(data), weights_only=False)["w"].shape == (2, 3)
    path = write(tmp_path, data)
    with pytest.raises(RuntimeError, match=r"legacy \.tar"):
        torch.load(path)
    expect_refused(path, AmbiguousFileError, "a tar archive, and a pickle as well")


def leaping(body: bytes) -> bytes:
    """A safetensors file with these bytes as its data, whose header is opcodes that lead there.

    Its length begins with X and 10: a text of ten bytes. It ends in the header's first key, which goes on with U and ~: texts
    of 126 bytes, the last of them over the end of the header.
    """
    size = 0x0A58
    end = b'":{"dtype":"U8","shape":[%d],"data_offsets":[0,%d]}}' % (len(body), len(body))
    texts = (b"U~" + b"a" * 126 + b"0") * 19 + b"U;" + b"a" * 59 + b"0"
    return struct.pack("<Q", size) + b'{"aaaaa' + texts + b"U~" + end.ljust(126) + body


def test_safetensors_that_are_a_legacy_stream_too(tmp_path: Path) -> None:
    """By the file's name torch reads the one or the other; we read none."""
    root, keys = dict_of(w=tensor(on=persistent())), pickle(list_of(text("0")))
    data = leaping(b"0" + integer(MAGIC_NUMBER) + b"." + PROTOCOL + SYS_INFO + pickle(root) + keys + SIX)
    path, other = write(tmp_path, data), write(tmp_path, data, "bad.safetensors")
    assert torch.load(path, weights_only=False)["w"].shape == (2, 3)
    assert next(iter(load_file(other).values())).dtype == torch.uint8
    for name in (path, other):
        expect_refused(name, AmbiguousFileError, "a safetensors file, and a pickle")


@pytest.mark.parametrize(
    "number", [b"%dL" % MAGIC_NUMBER, b"0x%xL" % MAGIC_NUMBER, b"0x" + b"0" * 4000 + b"%xL" % MAGIC_NUMBER]
)
def test_a_magic_number_in_text(number: bytes, tmp_path: Path) -> None:
    """Numbers may be text, of any base."""
    data = leaping(b"0L" + number + b"\n." + PROTOCOL + SYS_INFO + pickle(b"}") + pickle(b"]"))
    assert torch.load(io.BytesIO(data), weights_only=False) == {}
    expect_refused(write(tmp_path, data), AmbiguousFileError, "a pickle that torch.load would run")


@pytest.mark.parametrize("size", [0x2E4E, 0x2E5D, 0x0A58, 0x2860, 0x3000, 0x1070, 0x0850, 0x0984, 0x0963, 0x0956])
def test_lengths_that_look_like_opcodes(size: int, tmp_path: Path) -> None:
    """An honest header may have a length that begins a pickle by accident (N. is None): it is read."""
    header = b'{"conv.weight":{"dtype":"U8","shape":[2],"data_offsets":[0,2]}}'.ljust(size)
    path = write(tmp_path, struct.pack("<Q", size) + header + b"\n\n", "a.safetensors")
    assert named(path) == list(load_file(path))


def test_names_in_the_metadata(tmp_path: Path) -> None:
    """Tied names that our own files carry are put back, and it is said that safetensors knows nothing of them."""
    path = write(tmp_path, save({"w": torch.ones(2)}, {"ckpt_tools.aliases": '{"tied":{"of":"w"}}'}), "a.safetensors")
    found = ckpt_tools.inspect(path)
    assert ([*load_file(path)], named(path)) == (["w"], ["w", "tied"])
    assert [(row.code, row.severity) for row in found.findings] == [("tied-names", "info")]
    assert found.findings[0].found == "1 tied name stands in the metadata only; safetensors itself does not return them"
    plain = write(tmp_path, save({"w": torch.ones(2)}), "b.safetensors")
    assert ckpt_tools.inspect(plain).findings == []


def test_a_zip_that_is_safetensors_too(tmp_path: Path) -> None:
    """PK is a length of 67 MB to safetensors, where the header begins in the ninth byte."""
    data = saved({"a.w": torch.ones(2)})
    expect_refused(write(tmp_path, data[:8] + b"{" + data[9:]), AmbiguousFileError, "a zip archive, and a safetensors file")


@pytest.mark.parametrize(
    "more", [(), (PROTOCOL,), (pickle(CALL), SYS_INFO, pickle(dict_of(w=tensor(on=persistent()))), pickle(list_of(text("0"))))]
)
def test_computed_magic_and_version(more: tuple[bytes, ...], tmp_path: Path) -> None:
    """A call may give the magic number, and another one the version: no pickle of one object with bytes behind it."""
    data = pickle(CALL) + b"".join(more) + (SIX if more else b"")
    if more:
        expect_refused(write(tmp_path, data), AmbiguousFileError, "magic number is computed by a call")
    else:
        assert ckpt_tools.inspect(write(tmp_path, data)).container == "pickle"


# --- names and places in a zip


@pytest.mark.parametrize("name", ["data.pkl", "byteorder", "version", ".data/version", "constants.pkl", ".storage_alignment"])
def test_names_that_torch_reads_in_any_case(name: str, tmp_path: Path) -> None:
    """torch finds records without regard to case: BYTEORDER would swap every number."""
    rows = [row for row in records(saved({"a.w": torch.ones(2)})) if row.name != b"archive/" + name.encode()]
    pkl = [] if name != "data.pkl" else [Rec(b"archive/x.pth", saved({"c.w": torch.zeros(1)}))]
    path = write(tmp_path, build([*rows, Rec(b"archive/" + name.upper().encode(), b"big"), *pkl]))
    expect_refused(path, ZipError, f"takes it for {name!r}")


def test_byteorder_in_capitals_is_torchs(tmp_path: Path) -> None:
    """The premise: torch swaps."""
    rows = records(saved({"a.w": torch.ones(2)}))
    swapped = [Rec(b"archive/BYTEORDER", b"big") if row.name == b"archive/byteorder" else row for row in rows]
    assert torch.load(write(tmp_path, build(swapped)))["a.w"][0] != 1


def under(root: bytes, *more: bytes) -> bytes:
    """A checkpoint that says it is big-endian, under another root, with more records."""
    rows = records(saved({"a.w": torch.ones(2)}))
    for row in rows:
        row.data = b"big" if row.name.endswith(b"/byteorder") else row.data
        row.name = root + row.name.removeprefix(b"archive")
    return build([*rows, *(Rec(root + b"/" + name) for name in more)])


@pytest.mark.parametrize(("root", "name"), [(498, b"constants.pkl"), (497, b"constants.pklXX"), (505, b"data/1"), (503, b"")])
def test_names_that_torch_cuts(root: int, name: bytes, tmp_path: Path) -> None:
    """torch tells a program by a list of names that are cut after 511 bytes."""
    path = write(tmp_path, under(b"r" * root, *([name] if name else [])))
    if root == 498:
        assert torch.load(path)["a.w"][0] != 1
    elif name == b"constants.pklXX":
        with pytest.raises(UserWarning, match="looks like a TorchScript archive"):
            torch.load(path)
    expect_refused(path, ZipError, "names of more than 511 bytes")


def test_the_longest_names(tmp_path: Path) -> None:
    """Up to there torch reads them whole."""
    root = b"r" * (511 - len(b"/.data/serialization_id"))
    path = write(tmp_path, under(root))
    assert torch.equal(load_state_dict(path)["a.w"], torch.load(path)["a.w"])


@pytest.mark.parametrize("first", [True, False])
def test_two_roots(first: bool, tmp_path: Path) -> None:
    """A checkpoint unpacked beside another: torch goes by the first root, or refuses; no bundle of the other is made of it."""
    rows, other = records(saved({"a.w": torch.ones(2)})), Rec(b"b/x.pth", saved({"c.w": torch.zeros(1)}))
    expect_refused(write(tmp_path, build([*rows, other] if first else [other, *rows])), ZipError, "2 root folders")


def test_two_zip64_fields(tmp_path: Path) -> None:
    """The first counts for torch, the last for others."""
    field = struct.pack("<2HQ", 1, 8, 2**32 - 1)
    rows = records(saved({"a.w": torch.ones(2)}))
    rows[0].extra, rows[0].size = field + field, 2**32 - 1
    expect_refused(write(tmp_path, build(rows)), ZipError, "two zip64 fields")


def test_an_archive_hidden_in_a_tensor(tmp_path: Path) -> None:
    """torch takes the last archive's place of its zip64 end record for a place in the file: there may be another directory."""
    last, evil = saved({"a.w": torch.ones(2)}), records(saved({"evil.w": torch.zeros(1)}))
    room = saved({"a.w": torch.zeros(6000, dtype=torch.uint8)})
    tensor_at, end_at = room.index(bytes(6000)), len(last) - 98
    out, entries = bytearray(), bytearray()
    for row in evil:
        entries += central_entry(row, tensor_at + 2000 + len(out))
        out += local_header(row) + row.data
    body = bytearray(6000)
    body[2000 : 2000 + len(out) + len(entries)] = out + entries
    end = wide_end(len(evil), len(entries), tensor_at + 2000 + len(out), 0)[:56]
    body[end_at - tensor_at : end_at - tensor_at + 56] = end
    path = write(tmp_path, saved({"a.w": torch.frombuffer(body, dtype=torch.uint8)}) + last)
    assert list(torch.load(path)) == ["evil.w"]
    expect_refused(path, AmbiguousFileError, "torch.load would find another one")


def test_archives_of_one_length(tmp_path: Path) -> None:
    """In a part of a distributed checkpoint torch may find the first archive, as it happens: that is said, and it is read."""
    one = saved({"a.w": torch.ones(2)})
    path = write(tmp_path, one + saved({"bb.w": torch.zeros(70)}) + one)
    assert list(torch.load(path)) == ["a.w"]
    found = ckpt_tools.inspect(path)
    assert [row["where"] for row in found.tensors] == [[0, "a.w"], [1, "bb.w"], [2, "a.w"]]
    assert "torch.load gives the first of them alone" in found.findings[0].found


def test_records_that_torch_computes_to_be_elsewhere(tmp_path: Path) -> None:
    """With `calculate_storage_offsets` torch does not look where a record is: that it would read another is said."""
    rows = records(saved({"a.w": torch.ones(64), "b.w": torch.zeros(64)}))
    path = write(tmp_path, build([*rows[:5], Rec(b"archive/gap", b"x" * 300), *rows[5:]]))
    good = write(tmp_path, saved({"a.w": torch.ones(64), "b.w": torch.zeros(7), "e": torch.zeros(0)}), "good.pth")
    with torch.utils.serialization.config.patch({"load.calculate_storage_offsets": True}):  # type: ignore[attr-defined]
        assert torch.load(path, mmap=True)["b.w"].tolist() != [0] * 64
        assert torch.load(good, mmap=True)["b.w"].tolist() == [0] * 7
    assert "odd-storage-alignment" in [row.code for row in ckpt_tools.inspect(path).findings]
    assert ckpt_tools.inspect(good).findings == []


class Small(torch.nn.Module):
    """A buffer."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("w", torch.arange(6.0).reshape(2, 3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x


SETSTATE = b"""\
  def __setstate__(self: SELF,
    state: Dict[str, Tensor]) -> NoneType:
    self.w = torch.mul(state["w"], 100)
    self.training = True
    return None
  def __getstate__(self: SELF) -> Dict[str, Tensor]:
    return {"w": self.w}
"""
NEW = b"NEW)\x81"  # an object of the class, in a pickle


def scripted(tmp_path: Path, *, code: tuple[bytes, bytes] = (b"", b""), more: bytes = b"", state: bytes | None = None) -> Path:
    """The program of a module with its code changed, or with another state."""
    buffer = io.BytesIO()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        torch.jit.save(torch.jit.script(Small()), buffer)
    rows = records(buffer.getvalue())
    data = next(row for row in rows if row.name.endswith(b"/data.pkl"))
    found = re.search(rb"c(__torch__\S*)\n(\w+)\n", data.data)
    assert found is not None
    if state is not None:
        data.data = pickle(NEW, state, b"b").replace(b"NEW", found[0])
    for row in rows:
        if row.name.endswith(b"polyglots.py"):
            row.data = row.data.replace(*code) + more.replace(b"SELF", found[1] + b"." + found[2])
    return write(tmp_path, build(rows), "bad.pt")


def jit_loaded(path: Path) -> dict[str, torch.Tensor]:
    """The state dict that torch.jit.load gives."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        state: dict[str, torch.Tensor] = torch.jit.load(path).state_dict()
    return state


SHORT = storage(numel=b"K\6")  # torch.jit reads no other whole numbers of one byte
W, V = (tensor(tuple_of(*shape), tuple_of(*shape[1:], b"K\1"), on=SHORT) for shape in ((b"K\2", b"K\3"), (b"K\3",)))
FLAGS = {"training": b"\x88", "_is_full_backward_hook": b"N"}


def test_a_state_that_code_computes_from(tmp_path: Path) -> None:
    """A dict like a plain module's under a class that makes its own of it: it is not shown as the module's."""
    path = scripted(tmp_path, more=SETSTATE, state=dict_of(w=W))
    assert jit_loaded(path)["w"].flatten().tolist()[-1] == 500
    found = ckpt_tools.inspect(path)
    assert [row["name"] for row in found.tensors] == [None]
    assert "computed-tensors" in [row.code for row in found.findings]


def test_attributes_that_the_code_does_not_declare(tmp_path: Path) -> None:
    """torch.jit.load passes over them, and over the names of buffers that are no attributes."""
    path = scripted(tmp_path, state=dict_of(w=W, evil=W, **FLAGS))
    assert list(jit_loaded(path)) == ["w"]
    expect_refused(path, ZipError, "has the attribute 'evil' in its state, and not in its code")
    path = scripted(tmp_path, code=(b"  w : Tensor\n", b""))
    assert list(jit_loaded(path)) == []
    expect_refused(path, ZipError, "has the attribute 'w' in its state, and not in its code")
    expect_refused(scripted(tmp_path, state=dict_of(**FLAGS)), ZipError, "'w' in its code, and not in its state")


@pytest.mark.parametrize("names", [b"['w', ]", b'["\\167", ]', b'[] # "w", ]', b'["w" "x", ]'])
def test_a_list_of_buffers_by_another_hand(names: bytes, tmp_path: Path) -> None:
    """torch.jit.load reads other quotes and escapes, and comments: who looks for names in quotes reads another list."""
    path = scripted(tmp_path, code=(b'["w", ]', names))
    assert list(jit_loaded(path)) == ([] if b"#" in names or b"x" in names else ["w"])
    expect_refused(path, ZipError, "is not written as torch writes a program's code")


def test_a_storage_as_a_buffer(tmp_path: Path) -> None:
    """torch.jit.load makes a tensor of one dimension of it, where we listed nothing."""
    path = scripted(tmp_path, state=dict_of(w=SHORT, **FLAGS))
    assert jit_loaded(path)["w"].tolist() == [0, 1, 2, 3, 4, 5]
    expect_refused(path, TensorError, "a storage where a value is expected")


def test_attributes_in_another_order(tmp_path: Path) -> None:
    """The order of the code is the one that counts."""
    path = scripted(
        tmp_path,
        code=(b"  w : Tensor\n", b"  v : Tensor\n  w : Tensor\n"),
        state=dict_of(w=W, v=V, **FLAGS),
    )
    assert [row["name"] for row in ckpt_tools.inspect(path).tensors if row["name"]] == list(jit_loaded(path))


def test_a_module_that_is_declared_as_something_else(tmp_path: Path) -> None:
    """torch.jit.load goes by the type in the code."""
    inner = NEW + dict_of(w=W, **FLAGS) + b"b"
    path = scripted(tmp_path, code=(b"  training", b"  sub : Any\n  training"), state=dict_of(w=W, sub=inner, **FLAGS))
    expect_refused(path, ZipError, "has a module for 'sub', which is 'Any' in its code")


def exported(tmp_path: Path) -> list[Rec]:
    """The records of an exported program."""
    torch.export.save(torch.export.export(torch.nn.Linear(3, 2), (torch.ones(1, 3),)), tmp_path / "good.pt2")
    return records((tmp_path / "good.pt2").read_bytes())


def test_a_call_in_the_sample_inputs(tmp_path: Path) -> None:
    """torch.export.load loads them with weights_only=False where they do not load with it."""
    rows = exported(tmp_path)
    for row in rows:
        row.data = torch_zip(pickle(CALL)) if b"/sample_inputs/" in row.name else row.data
    found = ckpt_tools.inspect(write(tmp_path, build(rows), "bad.pt2"))
    assert "os.system" in found.to_json()["globals"]
    assert found.findings[0].code == "dangerous"


def test_weights_in_two_layouts(tmp_path: Path) -> None:
    """torch.export.load takes the older one, MODEL.pt."""
    rows = exported(tmp_path)
    root = rows[0].name.partition(b"/")[0]
    rows.append(Rec(root + b"/data/weights/model.pt", saved({"other": torch.ones(1)})))
    expect_refused(write(tmp_path, build(rows), "bad.pt2"), ZipError, "which torch.export.load would take")


# --- what the small pickles call


def weights_only_refuses(path: Path, name: str) -> None:
    """The global is listed, and the verdict is that weights_only does not load the file."""
    found = ckpt_tools.inspect(path)
    assert name in found.to_json()["globals"]
    assert found.to_json()["weights_only"]["loads"] is False


@pytest.mark.parametrize("place", range(4))
def test_a_call_in_a_small_pickle_of_a_stream(place: int, tmp_path: Path) -> None:
    """The magic number, the version, sys_info and the list of keys are pickles that torch runs."""
    small = [integer(MAGIC_NUMBER), integer(1001), b"}", list_of(text("0"))]
    small[place] = CALL + b"0" + small[place]
    *head, keys = map(pickle, small)
    data = stream(dict_of(w=tensor(on=persistent())), ("0", SIX), head=b"".join(head), keys=keys)
    path = write(tmp_path, data)
    if place:
        weights_only_refuses(path, "os.system")
    else:  # it does not begin as torch writes it
        assert "os.system" in ckpt_tools.inspect(path).to_json()["globals"]


@pytest.mark.parametrize("place", ["storages", "tensors", "sys_info", "views"])
def test_a_call_in_a_small_pickle_of_a_tar(place: str, tmp_path: Path) -> None:
    """Counts, descriptions and views are pickles that torch runs."""
    parts = {"storages": tars.storages((1, "FloatStorage", SIX)), "tensors": tars.tensors((2, 1, (6,), (1,), 0)),
             "sys_info": pickle(b"}")}  # fmt: skip
    if place == "views":
        parts["storages"] = parts["storages"].removesuffix(pickle(b"]")) + pickle(CALL, b"0]")
    else:
        parts[place] = b"\x80\x02" + CALL + b"0" + parts[place][2:]
    path = write(tmp_path, tars.tar(**parts, pickle=pickle(dict_of(w=tars.persistent(2)))))
    assert named(path) == ["w"]
    weights_only_refuses(path, "os.system")


# --- members of a tar


def tar_of(*members: tuple[str, bytes], **pax: str) -> bytes:
    """A tar of torch's members and more behind them, as Python writes it; pax headers go to the last."""
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w:", format=tarfile.PAX_FORMAT) as archive:
        with tarfile.open(fileobj=io.BytesIO(GOOD_TAR)) as good:
            for info in good.getmembers():
                archive.addfile(info, good.extractfile(info))
        for name, data in members:
            info = tarfile.TarInfo(name)
            info.size = len(data)
            info.pax_headers = pax if name == members[-1][0] else {}
            archive.addfile(info, io.BytesIO(data))
    return buffer.getvalue()


EVIL = pickle(dict_of(evil=tars.persistent(2)))
FILLERS = [(f"f{number}", b"") for number in range(64)]


def gnu_long_name() -> bytes:
    """A member whose name is in a GNU header before it: too long for the field, and then cut by a zero byte."""
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w:", format=tarfile.GNU_FORMAT) as archive:
        info = tarfile.TarInfo("p" * 200)
        info.size = len(EVIL)
        archive.addfile(info, io.BytesIO(EVIL))
    data = GOOD_TAR.rstrip(b"\0")
    return data + bytes(-len(data) % 512) + buffer.getvalue().replace(b"p" * 200, b"pickle".ljust(200, b"\0"))


def without_ends(data: bytes) -> bytes:
    """The tar without its empty blocks."""
    cut = data.rstrip(b"\0")
    return cut + bytes(-len(cut) % 512)


def prefixed(prefix: bytes) -> bytes:
    """A second pickle whose header has a prefix, which is a folder."""
    block = bytearray(tars.tar(pickle=EVIL)[:1024])
    block[345 : 345 + len(prefix)] = prefix
    block[148:156] = b" " * 8
    block[148:156] = b"%06o\0 " % sum(block[:512])
    return without_ends(GOOD_TAR) + bytes(block) + bytes(1024)


SECOND_PICKLES = {
    "twice": tar_of(("pickle", EVIL)), "behind the 64th": tar_of(*FILLERS, ("pickle", EVIL)),
    "by a pax path": tar_of(("other", EVIL), path="pickle"), "by a GNU long name": gnu_long_name(),
}  # fmt: skip


@pytest.mark.parametrize("kind", SECOND_PICKLES)
def test_a_second_pickle_in_a_tar(kind: str, tmp_path: Path) -> None:
    """Python's tarfile, and so torch, takes the last member of a name, however it is named."""
    path = write(tmp_path, SECOND_PICKLES[kind])
    assert list(torch.load(path, weights_only=False)) == ["evil"]
    expect_refused(path, AmbiguousFileError, "The tar has", "Two programs")


def test_a_member_in_a_folder_is_another(tmp_path: Path) -> None:
    """The prefix in a header is a part of the name."""
    path = write(tmp_path, prefixed(b"folder"))
    assert list(torch.load(path, weights_only=False)) == ["w"] == named(path)


def test_a_size_in_a_pax_header(tmp_path: Path) -> None:
    """What is larger than 8 GB says so there; it counts, as for torch."""
    whole = without_ends(GOOD_TAR)
    at = whole.index(b"pickle\0") // 512 * 512
    header = bytearray(whole[at : at + 512])
    header[124:136] = b"%011o\0" % 0
    header[148:156] = b" " * 8
    header[148:156] = b"%06o\0 " % sum(header)
    size = len(pickle(dict_of(w=tars.persistent(2))))
    info = tarfile.TarInfo("x")
    pax = bytearray(info.create_pax_global_header({"size": str(size)}))
    pax[156:157] = b"x"
    pax[148:156] = b" " * 8
    pax[148:156] = b"%06o\0 " % sum(pax[:512])
    path = write(tmp_path, whole[:at] + bytes(pax) + bytes(header) + whole[at + 512 :] + bytes(1024))
    assert list(torch.load(path, weights_only=False)) == ["w"] == named(path)


def test_a_folder_with_bytes(tmp_path: Path) -> None:
    """tarfile does not pass over the bytes of a folder or link: what looks like its content is the next header."""
    info = tarfile.TarInfo("d")
    info.type, info.size = tarfile.DIRTYPE, 1024
    data = without_ends(GOOD_TAR) + info.tobuf() + tars.tar(pickle=EVIL)
    path = write(tmp_path, data)
    assert list(torch.load(path, weights_only=False)) == ["evil"]
    expect_refused(path, AmbiguousFileError, "of kind b'5' with 1024 bytes")


def test_a_tar_without_its_magic_word(tmp_path: Path) -> None:
    """The oldest tars lack "ustar": the checksum makes it one to torch, and to us."""
    blocks = bytearray(GOOD_TAR)
    for at in range(0, len(blocks), 512):
        if blocks[at + 257 : at + 262] == b"ustar":
            blocks[at + 257 : at + 265] = bytes(8)
            blocks[at + 148 : at + 156] = b" " * 8
            blocks[at + 148 : at + 156] = b"%06o\0 " % sum(blocks[at : at + 512])
    path = write(tmp_path, bytes(blocks))
    assert list(torch.load(path, weights_only=False)) == ["w"] == named(path)


# fmt: off
REFUSED = {
    "safetensors whose start calls": (leaping(b"0" + CALL + b"."), AmbiguousFileError, "a pickle that torch.load would run"),
    "a tar that begins like an empty zip": (
        as_tar(b"PK\5\6".ljust(100, b"x").ljust(512, b"\0")) + GOOD_TAR, AmbiguousFileError,
        "a zip archive, and a tar archive"),
    "a member of an archive": (
        build([Rec(b"a.pth", saved({"w": torch.ones(1)})), Rec(b"b.safetensors", leaping(b"0" + CALL + b"."))]),
        AmbiguousFileError, "The member 'b.safetensors'", "a pickle that torch.load would run"),
    "two roots inside": (
        build([Rec(b"x.pth", build([*records(saved({"a.w": torch.ones(2)})), Rec(b"b/data.pkl", pickle(b"}"))]))]),
        ZipError, "The member 'x.pth'", "2 root folders"),
    **{f"two loaders {at}": (build([*records(saved({"a.w": torch.ones(2)})), *more]), ZipError, said)
       for at, (more, said) in enumerate([([Rec(b"archive/model.json", b"{}")], "torch.jit.load its model.json"),
        ([Rec(b"archive/archive_format", b"pt2")], "torch.export.load its exported program"), ([Rec(b"archive/constants.pkl",
        b"", attributes=0x10)], "marked as a folder and not named as one")])},
}
# fmt: on


@pytest.mark.parametrize("name", REFUSED)
def test_refused(name: str, tmp_path: Path) -> None:
    """`inspect` and `convert` refuse each with the same error and say why; nothing is written."""
    data, error, *said = REFUSED[name]
    expect_refused(write(tmp_path, data), error, *said)
