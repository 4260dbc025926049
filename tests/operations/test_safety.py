"""What a file would run is told without running it: by its bytes alone, wherever in it the pickle stands."""

from __future__ import annotations

import builtins
import bz2
import gzip
import importlib
import io
import json
import lzma
import os
import pickle
import struct
import subprocess
import sys
import tarfile
import zipfile
import zlib
from collections import OrderedDict, defaultdict
from pathlib import Path
from types import ModuleType
from typing import Any

import jsonschema
import numpy as np
import pytest
import torch
from click.testing import CliRunner

import ckpt_tools
from ckpt_tools import limits
from ckpt_tools.errors import LimitError
from ckpt_tools.formats import pickles
from ckpt_tools.formats.open import open_source
from ckpt_tools.io.output import Source
from ckpt_tools.operations.check.run import check
from ckpt_tools.operations.inspect import inspect
from ckpt_tools.operations.safety import Safety, examine
from tests.cli.test_cli import ckpt
from tests.hostile import pickles as p
from tests.support import tars
from tests.support.commands import main
from tests.support.legacy import MAGIC, floats, legacy
from tests.support.samples import (
    FIXTURES,
    PTH,
    SAFETENSORS,
    by_name,
    corpus,
)
from tests.support.servers import Server
from tests.support.zero_files import save_zero, trained


class Payload:
    """Pickled as a call of whatever it is given."""

    def __init__(self, function: Any, *args: Any) -> None:
        self.call = (function, args)

    def __reduce__(self) -> Any:
        return self.call


SYSTEM = Payload(os.system, "echo owned")
RUNS = "posix.system('echo owned')" if os.name == "posix" else "nt.system('echo owned')"


def examined(path: Path, data: bytes) -> Safety:
    """The answer for a file of these bytes."""
    path.write_bytes(data)
    source = open_source(path)
    try:
        return examine(source)
    finally:
        source.close()


def ran(safety: Safety) -> list[str]:
    """The calls of a dangerous file."""
    assert safety.verdict == "dangerous", safety
    return [call.text for _, call in safety.calls]


@pytest.mark.parametrize("protocol", range(6))
def test_every_protocol(protocol: int, tmp_path: Path) -> None:
    """A call of os.system is named with its argument in every protocol of pickle."""
    assert ran(examined(tmp_path / "a.pkl", pickle.dumps({"a": [SYSTEM]}, protocol))) == [RUNS]


@pytest.mark.parametrize(
    ("function", "args", "shown"),
    [
        (builtins.eval, ("1+1",), "builtins.eval('1+1')"),
        (builtins.exec, ("import os\x1b[31m",), "builtins.exec('import os\\x1b[31m')"),
        (subprocess.check_output, (["ls", "-l"],), "subprocess.check_output(['ls', '-l'])"),
        (importlib.import_module, ("this",), "importlib.import_module('this')"),
        (builtins.getattr, (os, "system"), None),
        (torch.load, ("other.pth",), "torch.serialization.load('other.pth')"),
        (torch.hub.load, ("evil/repo", "model"), "torch.hub.load('evil/repo', 'model')"),
        (np.load, ("other.npy",), None),
        (map, (os.system, ["id"]), None),
    ],
    ids=lambda value: getattr(value, "__qualname__", None),  # the same in every process
)
def test_known_harm_is_named(function: Any, args: tuple[Any, ...], shown: str | None, tmp_path: Path) -> None:
    """Functions that run code, open files or load more are told with what they are given."""
    try:
        data = pickle.dumps(Payload(function, *args))
    except TypeError:  # a module cannot be pickled by itself
        data = b"\x80\x04cbuiltins\ngetattr\n(cos\n__dict__\nX\x06\0\0\0systemtR."
    safety = examined(tmp_path / "a.pkl", data)
    assert shown is None or ran(safety) == [shown]
    assert any(call.rating == "harmful" for _, call in safety.calls)


# What joblib writes for an array of one element, which follows where no opcode is.
JOBLIB = (
    b"\x80\x03N0cjoblib.numpy_pickle\nNumpyArrayWrapper\nq\0)\x81}(X\x05\0\0\0dtypecnumpy\ndtype\nX\x02\0\0\0%bK\0K\1\x87R"
    b"X\x05\0\0\0shapeK\1\x85X\x1b\0\0\0numpy_array_alignment_bytesK\x10ub%b"
)
# By hand: how a pickle calls without saying so. One opcode a line would be a page; see CPython's Lib/pickletools.py.
BY_HAND = {
    "inst": b"(S'id'\nios\nsystem\n.",
    "obj": b"(cos\nsystem\nS'id'\no.",
    "popped": b"\x80\x02cos\nsystem\nX\x02\0\0\0id\x85R0N.",
    "popped mark": b"\x80\x02(cos\nsystem\nX\x02\0\0\0id\x85R1N.",
    "newobj_ex": b"\x80\x04csubprocess\nPopen\nX\x02\0\0\0id\x85}\x92.",
    "newobj": b"\x80\x02csubprocess\nPopen\nX\x02\0\0\0id\x85\x81.",
    "stack global": b"\x80\x04\x8c\x02os\x8c\x06system\x93\x8c\x02id\x85R.",
    "stack global by the memo": b"\x80\x04\x8c\x02os\x94\x8c\x06system\x94h\0h\1\x93\x8c\x02id\x85R.",
    "dotted name": b"\x80\x04\x8c\x09importlib\x8c\x09os.system\x93\x8c\x02id\x85R.",
    "python 2 name": b"c__builtin__\neval\n(S'1'\ntR.",
    "python 2 name in protocol 4": b"\x80\x04c__builtin__\neval\n(S'1'\ntR.",
    "reconstructor with a base": b"ccopy_reg\n_reconstructor\n(csubprocess\nPopen\ncsubprocess\nPopen\nS'id'\ntR.",
    "newobj by a call": b"ccopyreg\n__newobj__\n(csubprocess\nPopen\nS'id'\ntR.",
    "state of a module": b"\x80\x02cos\npath\nN}X\x04\0\0\0joinK\x01s\x86b.",
    "item of sys.modules": b"\x80\x02csys\nmodules\nX\x02\0\0\0osK\x01s.",
    "append to sys.path": b"\x80\x02csys\npath\nX\x02\0\0\0/xa.",
    "setstate in the instance": b"\x80\x02cm\nA\n)\x81}X\x0c\0\0\0__setstate__cos\nsystem\nsbX\x02\0\0\0idb.",
    "append in the instance": b"\x80\x02cm\nA\n)\x81}X\x06\0\0\0appendcos\nsystem\nsbX\x02\0\0\0ida.",
    "called by numpy": b"\x80\x02cnumpy.random._pickle\n__generator_ctor\nX\x02\0\0\0idcos\nsystem\n\x86R.",
    "called by torch": b"\x80\x02ctorch._tensor\n_rebuild_from_type_v2\n(cos\nsystem\nctorch\nTensor\n(X\x02\0\0\0idtNtR.",
    "partial that is called": b"\x80\x02cfunctools\npartial\ncm\nf\n\x85R)R.",
    "partial of harm": b"\x80\x02cfunctools\npartial\ncos\nsystem\nX\x02\0\0\0id\x86R.",
    "default factory": b"\x80\x02ccollections\ndefaultdict\ncos\nabort\n\x85R.",
    "computed name": b"\x80\x04\x8c\x02oscm\nf\n)R\x93\x8c\x02id\x85R.",
    "computed arguments": b"\x80\x04cos\nsystem\ncm\nT\n)\x81R.",
    "harm that is only named": b"\x80\x02}X\x01\0\0\0acos\nsystem\ns.",
    "decoded by a codec": b"\x80\x02c_codecs\nencode\nX\x02\0\0\0idX\x05\0\0\0rot13\x86R.",
    "code of a graph module": b"\x80\x02ctorch.fx.graph_module\nreduce_graph_module\n}X\x09\0\0\0import os\x86R.",
    "temporary file that removes": b"\x80\x02ctempfile\n_TemporaryFileCloser\n)\x81}X\x04\0\0\0nameX\x02\0\0\0/xsb.",
    "numpy map of a file": b"\x80\x02cnumpy\nmemmap\nX\x02\0\0\0/xX\x02\0\0\0w+\x86\x81.",
    "ufunc by import": b"\x80\x02cnumpy.core\n_ufunc_reconstruct\nX\x02\0\0\0osX\x06\0\0\0system\x86R.",
    "unknown function": b"\x80\x02cevil\nrun\nX\x02\0\0\0id\x85R.",
    "unknown function without arguments": b"(ievil\nrun\n.",
    "type with a body": b"\x80\x02cbuiltins\ntype\n(X\x01\0\0\0A)}tR.",
    "items of a type by operator": b"\x80\x02coperator\ngetitem\ncm\nd\nK\0\x86R.",
    "second call": b"\x80\x02cbuiltins\nprint\n)R0cos\nsystem\nX\x02\0\0\0id\x85R.",
    "nested frames": b"\x80\x04\x95\x20\0\0\0\0\0\0\0\x95\x08\0\0\0\0\0\0\0cos\nsystem\n\x8c\x02id\x85R." + b"." * 8,
    "item of a list": b"\x80\x02]K\1aK\0K\2scos\nsystem\nX\x02\0\0\0id\x85R.",
    "behind many pickles": b"\x80\x02N." * 2000 + b"cos\nsystem\n(S'id'\ntR.",
    "a name that is none behind the call": b"cos\nsystem\n(S'id'\ntR0c)\n!\n.",
    "behind joblib's array": JOBLIB % (b"f8", b"\x01" + bytes(9)) + b"0cos\nsystem\nX\x02\0\0\0id\x85R.",
    "in joblib's array of objects": JOBLIB % (b"O8", b"\x80\x03cos\nsystem\nX\x02\0\0\0id\x85R.") + b".",
    "behind joblib's array of objects": JOBLIB % (b"O8", b"\x80\x03]q\0.") + b"q\1h\0cos\nsystem\nX\x02\0\0\0id\x85R.",
    "second pickle": pickle.dumps({"a": 1}) + pickle.dumps(SYSTEM),
    "breaks after the call": b"\x80\x02cos\nsystem\nX\x02\0\0\0id\x85R\xff",
    "cut after the call": b"cos\nsystem\n(S'id'\ntR",
    "extension after the call": b"\x80\x02cos\nsystem\nX\x02\0\0\0id\x85R\x82\x01.",
    "text before": b"(dp0\nS'a'\np1\ncos\nsystem\np2\n(S'id'\np3\ntp4\nRp5\ns.",
    "memo that is missing after the call": b"\x80\x02cos\nsystem\nX\x02\0\0\0id\x85Rh\x63.",
    "behind an odd OrderedDict": b"\x80\x02ccollections\nOrderedDict\n](X\x02\0\0\0abe\x85R0cos\nsystem\nX\x02\0\0\0id\x85R.",
    "persistent id after the call": b"\x80\x02cos\nsystem\nX\x02\0\0\0id\x85RX\x01\0\0\0aQ.",
}  # fmt: skip


@pytest.mark.parametrize("data", BY_HAND.values(), ids=BY_HAND.keys())
def test_calls_by_hand(data: bytes, tmp_path: Path) -> None:
    """Every way in which a pickle calls or changes something is dangerous, and the call is named."""
    calls = ran(examined(tmp_path / "a.pkl", data))
    assert calls
    assert all(calls)


HARMLESS = {
    "nothing": {"a": [1, 2.5, "b", None, True, (1,)]},
    "containers": {"a": OrderedDict(b=1), "c": {1, 2}, "d": frozenset((1,)), "e": defaultdict(list), "f": bytearray(b"1")},
    "numpy": {"a": np.arange(3), "b": np.float64(1.5), "c": np.random.default_rng(1), "d": np.random.RandomState(1)},
    "path": {"a": Path("x/y")},
    "tensor": {"a": torch.ones(2)},
}


@pytest.mark.parametrize("protocol", range(2, 6))
@pytest.mark.parametrize("name", HARMLESS)
def test_data_is_not_dangerous(name: str, protocol: int, tmp_path: Path) -> None:
    """Pickles of data are plain, or name classes of which none is known to do harm."""
    safety = examined(tmp_path / "a.pkl", pickle.dumps(HARMLESS[name], protocol))
    assert safety.verdict == ("plain" if name in ("nothing",) else "needs-code"), safety


def test_whole_model_needs_code(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A pickled model of a class of the user's own names its classes, and is not called dangerous."""
    net = type("Net", (torch.nn.Sequential,), {"__module__": "models"})
    monkeypatch.setitem(sys.modules, "models", ModuleType("models"))
    monkeypatch.setattr(sys.modules["models"], "Net", net, raising=False)
    torch.save(net(torch.nn.Linear(2, 2), torch.nn.BatchNorm1d(2)), tmp_path / "net.pth")
    safety = inspect(tmp_path / "net.pth").safety
    assert safety.verdict == "needs-code"
    assert safety.classes[0] == "models.Net"
    assert safety.text.startswith("needs code: models.Net, ")


# --- containers


def zipped(**members: bytes) -> bytes:
    """A zip of these members."""
    file = io.BytesIO()
    with zipfile.ZipFile(file, "w", zipfile.ZIP_DEFLATED) as archive:
        for name, data in members.items():
            archive.writestr(name, data)
    return file.getvalue()


def tarred(data: bytes, kind: int = tarfile.PAX_FORMAT) -> bytes:
    """A tar with one member."""
    file = io.BytesIO()
    with tarfile.open(fileobj=file, mode="w", format=kind) as archive:
        info = tarfile.TarInfo("é" * 120)
        info.size = len(data)
        archive.addfile(info, io.BytesIO(data))
    return file.getvalue()


def object_array() -> bytes:
    """A .npy of objects."""
    file = io.BytesIO()
    np.save(file, np.array([SYSTEM, None], dtype=object), allow_pickle=True)
    return file.getvalue()


def torch_saved(*, zipfile_format: bool = True) -> bytes:
    """What torch.save makes of a payload."""
    file = io.BytesIO()
    torch.save({"w": torch.ones(2), "a": SYSTEM}, file, _use_new_zipfile_serialization=zipfile_format)
    return file.getvalue()


def beside(name: str) -> bytes:
    """A harmless torch-zip with a pickle of a payload beside its own."""
    file = io.BytesIO()
    torch.save({"w": torch.ones(2)}, file)
    with zipfile.ZipFile(file, "a") as archive:
        archive.writestr(f"{archive.namelist()[0].partition('/')[0]}/{name}", pickle.dumps(SYSTEM))
    return file.getvalue()


def with_flag(flag: int) -> bytes:
    """A zip whose records say that they are encrypted, patched or masked, and are not."""
    data = bytearray(zipped(evil=pickle.dumps(SYSTEM)))
    data[6] |= flag
    data[data.index(b"PK\x01\x02") + 8] |= flag
    return bytes(data)


def misnamed() -> bytes:
    """A zip whose local header has another name than its directory."""
    return zipped(data=pickle.dumps(SYSTEM)).replace(b"data", b"date", 1)


def numbered(name: str, kind: int = zipfile.ZIP_STORED) -> bytes:
    """An empty torch-zip with an array of objects where the numbers of a tensor are."""
    file = io.BytesIO()
    with zipfile.ZipFile(file, "w", kind) as archive:
        for member, data in (("a/data.pkl", b"\x80\x02}."), ("a/constants.pkl", b"\x80\x02}."), ("a/version", b"3")):
            if member.startswith((name[:6], "a/v")):
                archive.writestr(member, data)
        archive.writestr(name, object_array() + bytes(5000))
    return file.getvalue()


PAYLOAD = pickle.dumps(SYSTEM)
CONTAINERS = {
    "torch-zip": torch_saved(),
    "torch-legacy": torch_saved(zipfile_format=False),
    "member beside data.pkl": beside("evil.pkl"),
    "member with another extension": beside("notes.txt"),
    "zip of pickles": zipped(**{"a/model.bin": PAYLOAD}),
    "zip in a zip": zipped(inner=zipped(evil=PAYLOAD)),
    "zip of a torch-zip": zipped(**{"policy.pth": torch_saved()}),
    "npz": zipped(**{"arr_0.npy": object_array()}),
    "npy": object_array(),
    "npy as a tensor": numbered("a/data/0"),
    "npy as a tensor, deflated": numbered("a/data/0", zipfile.ZIP_DEFLATED),
    "npy as a constant": numbered("a/constants/0"),
    "tar": tarred(PAYLOAD),
    "GNU tar": tarred(PAYLOAD, tarfile.GNU_FORMAT),
    "tar of a zip": tarred(zipped(evil=PAYLOAD)),
    "gzip": gzip.compress(PAYLOAD),
    "bzip2": bz2.compress(PAYLOAD),
    "xz": lzma.compress(PAYLOAD),
    "zlib, as joblib": zlib.compress(PAYLOAD),
    "tar.gz": gzip.compress(tarred(PAYLOAD)),
    "exported program": zipped(**{"m/archive_format": b"pt2", "m/data/sample_inputs/model.pt": torch_saved()}),
    "encrypted flag": with_flag(1),
    "patched flag": with_flag(1 << 5),
    "strong encryption flag": with_flag(1 << 6),
    "two names": misnamed(),
    "no directory": zipped(evil=PAYLOAD)[:-22],
    "bytes in front of a zip": b"#!" + zipped(evil=PAYLOAD),
    "bytes of a pickle": pickle.dumps(Payload(torch.storage._load_from_bytes, torch_saved(zipfile_format=False))),
    "small pickle of torch-legacy": PAYLOAD + torch_saved(zipfile_format=False),
    "two archives": torch_saved() + torch_saved(),
}  # fmt: skip


def array() -> bytes:
    """A .npy of numbers."""
    buffer = io.BytesIO()
    np.save(buffer, np.arange(5.0))
    return buffer.getvalue()


def old_tar(where: str) -> bytes:
    """A torch-tar with two storages and tensors, and the payload in the pickle of one of them, popped from the stack."""
    call = {where: p.call(os.system.__module__, "system", p.text("echo owned")) + b"0"}
    kind = p.glob("torch", "FloatStorage")
    stored = [p.pickle(call.get(f"storage {key}", b""), p.tuple_of(p.integer(key), p.text("cpu"), kind)) + floats(1, 2)
              for key in (1, 2)]  # fmt: skip
    described = [p.pickle(call.get(f"tensor {key}", b""), p.tuple_of(p.integer(key), p.integer(1), kind))
                 + struct.pack("<ii3q", 1, 0, 2, 1, 0) for key in (3, 4)]  # fmt: skip
    two, views = p.pickle(p.integer(2)), p.pickle(call.get("views", b""), b"]")
    root = p.dict_of(a=tars.persistent(3), b=tars.persistent(4))
    return tars.torch_tar(root, b"".join([two, *stored, views]), b"".join([two, *described]))


LEGACY = legacy({"a.w": torch.arange(6.0), "n": 3, "tied": torch.arange(300).half()})
COMPUTED_MAGIC = p.pickle(p.call("builtins", "int", p.text(str(0x1950A86A20F9469CFC6C))))
BEHIND = {
    "torch-legacy, then a pickle": LEGACY + PAYLOAD,
    "two of torch-legacy": LEGACY + torch_saved(zipfile_format=False),
    "three of torch-legacy": LEGACY + LEGACY + torch_saved(zipfile_format=False),
    "torch-legacy without storages": legacy({"n": 3}) + PAYLOAD,
    "torch-legacy with a computed magic number": COMPUTED_MAGIC + LEGACY[len(MAGIC):] + PAYLOAD,
    **{f"torch-tar, {where}": old_tar(where) for where in ("storage 1", "storage 2", "views", "tensor 3", "tensor 4")},
    "numbers of NumPy, then a pickle": array() + PAYLOAD,
    "numbers of NumPy, then objects": array() + array() + object_array(),
    "objects of NumPy, then objects": object_array() + object_array(),
}  # fmt: skip


@pytest.mark.parametrize("data", BEHIND.values(), ids=BEHIND.keys())
def test_behind_raw_bytes(data: bytes, tmp_path: Path) -> None:
    """A pickle behind storages, shapes or numbers counts: torch itself, or a loader that reads on in the file, would run it."""
    assert set(ran(examined(tmp_path / "file", data))) == {RUNS}


def reached(kind: bytes, name: str = "storages", target: bytes = PAYLOAD) -> bytes:
    """A torch-tar of which one member is of another kind than a file: a link to `blob`, or with holes."""
    file = io.BytesIO()
    with tarfile.open(fileobj=file, mode="w", format=tarfile.GNU_FORMAT) as archive:
        for member in ("blob", "sys_info", "storages", "tensors", "pickle"):
            info = tarfile.TarInfo(member)
            data = p.pickle(p.integer(1)) if member != "blob" else target
            info.type, info.linkname = (kind, "blob") if member == name else (tarfile.REGTYPE, "")
            info.size = len(data) if kind == tarfile.GNUTYPE_SPARSE or member != name else 0
            archive.addfile(info, io.BytesIO(data))
    return file.getvalue()


@pytest.mark.parametrize("name", ["sys_info", "storages", "tensors", "pickle"])
@pytest.mark.parametrize("kind", [tarfile.LNKTYPE, tarfile.SYMTYPE, tarfile.GNUTYPE_SPARSE])
def test_a_member_of_torch_tar_that_is_no_plain_file(kind: bytes, name: str, tmp_path: Path) -> None:
    """torch reads what a link leads to as what the link is called, and a file with holes as a longer one: not plain."""
    path = tmp_path / "a.tar"
    found = examined(path, reached(kind, name, p.pickle(b"N")))
    assert found.verdict == "unexamined"
    assert name in found.text


def test_a_member_of_a_kind_that_python_does_not_know(tmp_path: Path) -> None:
    """It is unpacked as a file, so it is looked at as one."""
    data = tarred(PAYLOAD, tarfile.GNU_FORMAT)
    block = bytearray(data)
    at = next(at for at in range(len(block) - 512, -1, -512) if block[at + 257 : at + 262] == b"ustar")
    block[at + 156 : at + 157] = b"9"
    block[at + 148 : at + 156] = b" " * 8
    block[at + 148 : at + 156] = b"%06o\0 " % sum(block[at : at + 512])
    assert ran(examined(tmp_path / "a.tar", bytes(block))) == [RUNS]


def test_what_stands_behind_a_computed_storage_is_not_known(tmp_path: Path) -> None:
    """Where the bytes between two pickles cannot be counted, the file could not be examined; a cut one has no more."""
    stored = p.pickle(p.integer(1)) + p.pickle(p.call("builtins", "int", p.text("3"))) + floats(1, 2)
    found = examined(tmp_path / "file", tars.torch_tar(p.dict_of(n=p.NONE), stored, None))
    assert (found.verdict, found.unexamined[0][0]) == ("unexamined", "storages")
    assert "computed" in found.unexamined[0][1]
    assert examined(tmp_path / "cut", LEGACY[:-1]).verdict == "plain"


@pytest.mark.parametrize("data", CONTAINERS.values(), ids=CONTAINERS.keys())
def test_every_container(data: bytes, tmp_path: Path) -> None:
    """A pickle is found by its content wherever it lies, also in archives that no reader takes, and its call is named."""
    assert set(ran(examined(tmp_path / "file", data))) == {RUNS}


@pytest.mark.parametrize("kind", [zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED])
def test_inspect_tells_of_an_array_among_tensors(kind: int, tmp_path: Path) -> None:
    """`numpy.load` reads it from a checkpoint of torch, whose own reader takes it for the numbers of a tensor, or leaves it."""
    path = tmp_path / "a.pth"
    path.write_bytes(numbered("a/data/0", kind))
    assert inspect(path).safety.verdict == "dangerous"


@pytest.mark.parametrize("magic", [b"7z\xbc\xaf\x27\x1c", b"Rar!\x1a\x07", b"\x28\xb5\x2f\xfd"])
def test_what_cannot_be_looked_through_is_told(magic: bytes, tmp_path: Path) -> None:
    """Archives that Python cannot unpack are neither plain nor nothing."""
    assert examined(tmp_path / "file", magic + bytes(100)).verdict == "unexamined"


def test_no_limit_hides_a_call(tmp_path: Path) -> None:
    """A file with more pickles or levels, or a longer pickle, than is examined is not called plain."""
    call = b"cos\nsystem\n(S'id'\ntR."
    assert examined(tmp_path / "a", b"\x80\x02N." * 10_001 + call).verdict == "unexamined"
    deep = zipped(a=call)
    for _ in range(9):
        deep = zipped(a=deep)
    assert examined(tmp_path / "b", deep).verdict == "unexamined"
    long = b"\x80\x02B" + (80 << 20).to_bytes(4, "little") + bytes(80 << 20) + b"0" + call
    assert examined(tmp_path / "c", gzip.compress(long, 1)).verdict == "unexamined"


# --- the commands


def run(*arguments: str) -> tuple[int, str]:
    """Exit code and output of a command."""
    result = CliRunner().invoke(main, list(arguments))
    return result.exit_code, result.output


def test_inspect_tells(tmp_path: Path) -> None:
    """inspect shows the verdict, and the call as a problem; JSON has both."""
    path = tmp_path / "a.pth"
    path.write_bytes(torch_saved())
    code, shown = run("inspect", str(path))
    assert code == 0
    assert f"safety        dangerous: it runs {RUNS}\n" in shown
    assert f"problem [dangerous]: loading this without weights_only runs {RUNS} (archive/data.pkl)\n" in shown.replace(
        "a/data", "archive/data"
    )
    safety = json.loads(run("inspect", "--json", str(path))[1])["safety"]
    assert safety["verdict"] == "dangerous"
    assert safety["calls"][0]["call"] == RUNS


def test_names_do_not_steer_a_terminal(tmp_path: Path) -> None:
    """The names of classes in a verdict are escaped, in every command that tells it."""
    path = tmp_path / "a.pth"
    path.write_bytes(b"\x80\x02ctorch.distributed.tensor\nD\x1b[31m\n)\x81.")
    for command in ("inspect", "scan"):
        shown = run(command, str(path))[1]
        assert "\x1b" not in shown
        assert r"torch.distributed.tensor.D\x1b[31m" in shown


def test_inspect_tells_of_what_it_cannot_read(tmp_path: Path) -> None:
    """A file that breaks behind a call, or is not a checkpoint, is refused, and the call is told all the same."""
    path = tmp_path / "a.pth"
    path.write_bytes(BY_HAND["breaks after the call"])
    code, shown = run("inspect", str(path))
    assert code == 3
    assert "runs os.system('id')" in shown.replace("posix", "os")
    path.write_bytes(b"cos\nsystem\n(S'id'\ntR.")
    assert "dangerous" in [finding.code for finding in check(path).findings]


def test_every_pickle_counts(tmp_path: Path) -> None:
    """A pickle beside the checkpoint's own counts for globals, verdict and weights_only."""
    path = tmp_path / "a.pth"
    path.write_bytes(beside("evil.pkl"))
    found = inspect(path)
    assert found.safety.verdict == "dangerous"
    assert RUNS.partition("(")[0] in found.globals
    assert not found.weights_only["loads"]


def test_what_to_do_stands_once(tmp_path: Path) -> None:
    """Of many dangerous calls twenty are told and the others counted; what to do about them is said at the first."""
    calls = [Payload(os.system, f"echo {number}") for number in range(23)]
    safety = examined(tmp_path / "many.pkl", pickle.dumps(calls))
    told = [finding for finding in safety.findings("in.pth") if finding.code == "dangerous"]
    assert len(told) == 21
    assert told[-1].found == "... and 3 more calls"
    assert [bool(finding.fix and finding.expected) for finding in told] == [True] + [False] * 20


def test_what_to_do_names_the_file(tmp_path: Path) -> None:
    """The command in the advice takes the file's own name, and takes its tensors."""
    path = tmp_path / "evil.pth"
    torch.save({"a.weight": torch.ones(2), "run": Payload(os.system, "echo hi")}, path)
    fix = next(finding.fix for finding in ckpt_tools.inspect(path).findings if finding.code == "dangerous")
    command = fix.partition(": ckpt ")[2].split()
    assert command[1] == str(path)
    assert CliRunner().invoke(main, command).exit_code == 0
    assert torch.load(command[2], weights_only=True)["a.weight"].tolist() == [1, 1]


def test_a_misplaced_directory_with_nothing_before_it(tmp_path: Path) -> None:
    """A zip without a single record, whose directory is misplaced, is unexamined for that; Python's own error was told."""
    entry = zipped(evil=PAYLOAD)
    path = tmp_path / "a.zip"
    path.write_bytes(b"\0" + entry[entry.index(b"PK\x01\x02") :])
    told = CliRunner().invoke(main, ["scan", str(path)])
    assert "could not be examined: The zip directory is not where the file says" in told.stdout
    assert "zip()" not in CliRunner().invoke(main, ["scan", "--json", str(path)]).stdout


def test_a_missing_path_is_worded_as_elsewhere(tmp_path: Path) -> None:
    """`ckpt scan` says of a path that is not there what every other command says, with names that are near."""
    torch.save({"a.weight": torch.ones(2)}, tmp_path / "model.pth")
    gone = str(tmp_path / "modle.pth")
    told = {command: CliRunner().invoke(main, [command, gone]).stderr for command in ("scan", "inspect", "stats")}
    assert set(told.values()) == {f"Error: {gone} cannot be read.\nThere is no such file.\nDid you mean 'model.pth'?\n"}


def test_check_says_dangerous(tmp_path: Path) -> None:
    """check has a finding of its own for a dangerous file, a problem."""
    path = tmp_path / "a.pth"
    path.write_bytes(torch_saved())
    report = check(path)
    assert report.verdict == "findings"
    assert (report.findings[0].code, report.findings[0].severity) == ("dangerous", "problem")
    assert report.safety is not None
    assert report.to_json()["safety"]["verdict"] == "dangerous"


@pytest.mark.parametrize("path", [*PTH, *SAFETENSORS], ids=by_name)
def test_fixtures_are_not_dangerous(path: Path) -> None:
    """No checkpoint that torch made of real training is called dangerous, by inspect or when its bytes are examined."""
    source = open_source(path)
    found = examine(source)
    source.close()
    shown = inspect(path)
    assert found.verdict in ("plain", "needs-code", "nothing")
    assert shown.safety.verdict == ("plain" if found.verdict == "nothing" else found.verdict)
    assert shown.safety.verdict == "plain" or not shown.weights_only["loads"]


@pytest.mark.parametrize("row", corpus("torch-zip", "torch-legacy", "torch-tar", "torchscript", "safetensors", "zip-bundle"))
def test_corpus_is_not_dangerous(row: dict[str, Any]) -> None:
    """No real file of others is called dangerous."""
    source = open_source(row["path"])
    assert examine(source).verdict != "dangerous"
    source.close()


# --- scan


def folder(top: Path) -> Path:
    """A folder with one file of each verdict."""
    (top / "deep").mkdir()
    (top / "deep" / "evil.bin").write_bytes(torch_saved())
    (top / "notes.txt").write_text("Nothing here.\nclass A:\n    import os\n")
    (top / "packed.7z").write_bytes(b"7z\xbc\xaf\x27\x1c" + bytes(100))
    (top / "numbers.npy").write_bytes(b"\x93NUMPY\x01\x00" + bytes(100))
    (top / "plain.pkl").write_bytes(pickle.dumps({"a": [1]}))
    (top / "numpy.pkl").write_bytes(pickle.dumps(np.arange(3)))
    (top / "own.pth").write_bytes(b"\x80\x02cmodels\nNet\n)\x81}b.")
    return top


def test_each_rank_is_read_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A file of ranks whose reader has seen all of it is not read again to be rated; one with more in it is."""
    folder = save_zero(tmp_path / "z3", trained(), 3, 2)
    looked: list[str] = []
    real = pickles.find_pickles

    def find(source: Source) -> pickles.Pickles:
        looked.append(source.path.name)
        return real(source)

    monkeypatch.setattr(pickles, "find_pickles", find)
    description = inspect(folder.parent)
    assert (description.safety.verdict, looked) == ("plain", [])
    assert {"torch._utils._rebuild_tensor_v2", "torch.Size"} <= set(description.globals)

    one = folder / "zero_pp_rank_1_mp_rank_00_optim_states.pt"
    with zipfile.ZipFile(one, "a") as archive:
        archive.writestr(f"{one.stem}/more", pickle.dumps(SYSTEM))
    found = inspect(folder.parent).safety
    assert (found.verdict, looked) == ("dangerous", [one.name])
    assert found.calls[0][0].startswith(f"{one.name}: ")


def test_scan_of_a_folder(tmp_path: Path) -> None:
    """A line for every file with something to say, the others counted; exit code 1, since one is dangerous."""
    top = folder(tmp_path)
    code, shown = run("scan", str(top))
    assert code == 1
    assert f"{top / 'deep' / 'evil.bin'}: dangerous: it runs {RUNS}\n" in shown
    assert f"{top / 'own.pth'}: needs code: models.Net; none known to do harm\n" in shown
    assert f"{top / 'packed.7z'}: could not be examined: a 7z archive" in shown
    assert "notes.txt" not in shown
    last = "7 files: 1 dangerous, 1 could not be examined, 2 needs code, 1 plain, 2 nothing to run\n"
    assert shown.endswith(last)
    assert "notes.txt: nothing to run" in run("scan", "--all", str(top))[1]


def test_scan_exits_0_where_nothing_is_dangerous(tmp_path: Path) -> None:
    """Files that are plain or need code do not fail; one that is not there is refused, an empty folder too."""
    (tmp_path / "a").mkdir()
    assert run("scan", str(tmp_path / "a"))[0] == 3
    assert run("scan", str(tmp_path / "b"))[0] == 3
    (tmp_path / "a" / "own.pth").write_bytes(b"\x80\x02cmodels\nNet\n)\x81}b.")
    line = f"{tmp_path / 'a' / 'own.pth'}: needs code: models.Net; none known to do harm\n"
    assert run("scan", str(tmp_path / "a")) == (0, line)


def test_scan_as_json(tmp_path: Path) -> None:
    """One document a line, as the schema has it."""
    lines = [json.loads(line) for line in run("scan", "--json", str(folder(tmp_path)))[1].splitlines()]
    schema = json.loads(Path(__file__).parents[2].joinpath("docs", "scan.schema.json").read_text())
    for line in lines:
        jsonschema.validate(line, schema)
    verdicts = {Path(line["path"]).name: line["verdict"] for line in lines}
    assert verdicts == {
        "evil.bin": "dangerous", "notes.txt": "nothing", "packed.7z": "unexamined", "numbers.npy": "nothing",
        "plain.pkl": "plain", "numpy.pkl": "needs-code", "own.pth": "needs-code",
    }  # fmt: skip


def test_scan_as_sarif(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """One log of SARIF 2.1.0 with a result for each call, with rules that exist, levels and places."""
    folder(tmp_path)
    monkeypatch.chdir(tmp_path)
    log = json.loads(run("scan", "--format", "sarif", "deep", "packed.7z", "own.pth")[1])
    assert (log["version"], len(log["runs"])) == ("2.1.0", 1)
    rules = log["runs"][0]["tool"]["driver"]["rules"]
    results = log["runs"][0]["results"]
    for row in results:
        assert rules[row["ruleIndex"]]["id"] == row["ruleId"]
        assert rules[row["ruleIndex"]]["defaultConfiguration"]["level"] == row["level"]
    places = [row["locations"][0]["physicalLocation"]["artifactLocation"]["uri"] for row in results]
    assert list(zip([row["ruleId"] for row in results], places, strict=True)) == [
        ("dangerous", "deep/evil.bin"), ("unexamined", "packed.7z"), ("needs-code", "own.pth"),
    ]  # fmt: skip
    assert results[0]["message"]["text"] == f"loading this without weights_only runs {RUNS} (archive/data.pkl)"
    assert results[0]["locations"][0]["logicalLocations"] == [{"fullyQualifiedName": "archive/data.pkl", "kind": "member"}]


def test_scan_from_python(tmp_path: Path) -> None:
    """The library returns a report for every file, in the order of their names."""
    reports = ckpt_tools.scan(folder(tmp_path))
    assert [Path(report.path).name for report in reports if report.failed] == ["evil.bin", "packed.7z"]
    assert [report.path for report in reports] == sorted(report.path for report in reports)


def test_scan_of_an_address(tmp_path: Path, server: Server) -> None:
    """A file behind an address is examined by ranges."""
    (tmp_path / "evil.pth").write_bytes(torch_saved())
    code, shown = run("scan", server.url("evil.pth"))
    assert code == 1
    assert f"dangerous: it runs {RUNS}" in shown


RUNS_OF: dict[str, Any] = {"gzip": gzip.compress, "bz2": bz2.compress, "xz": lzma.compress}


@pytest.mark.parametrize("kind", RUNS_OF)
def test_compressed_runs_one_behind_another(kind: str, tmp_path: Path) -> None:
    """Python reads compressed runs one behind another as one file, so a pickle may be cut anywhere."""
    data, compress = pickle.dumps(SYSTEM), RUNS_OF[kind]
    assert ran(examined(tmp_path / "a.pkl", compress(b"") + compress(data))) == [RUNS]
    assert ran(examined(tmp_path / "b.pkl", compress(data[:9]) + b"\0" * 8 + compress(data[9:]))) == [RUNS]


def test_old_files_of_joblib(tmp_path: Path) -> None:
    """`joblib.load` also inflates what it wrote in 2013: a length in hexadecimal, then zlib."""
    data = pickle.dumps(SYSTEM)
    head = b"ZF" + hex(len(data)).encode().ljust(len(hex(2**64)))
    for number, space in enumerate((b"", b" ")):
        assert ran(examined(tmp_path / f"{number}.pkl", head + space + zlib.compress(data))) == [RUNS]


def test_pickles_in_a_folder_called_data(tmp_path: Path) -> None:
    """Beside `data.pkl` only the storages, which have numbers for names, are passed over."""
    with zipfile.ZipFile(tmp_path / "a.zip", "w") as archive:
        archive.writestr("data.pkl", pickle.dumps({}))
        archive.writestr("data/train.pkl", pickle.dumps(SYSTEM))
    assert ran(examined(tmp_path / "a.zip", (tmp_path / "a.zip").read_bytes())) == [RUNS]


@pytest.mark.parametrize("padding", [b"I1\na" * 2000, b"](" * 500, b"]0" * 2000], ids=["numbers", "lists", "popped"])
def test_a_call_behind_a_limit(padding: bytes, tmp_path: Path) -> None:
    """What is too much to read is told, also where nothing has yet said that it is a pickle."""
    data = b"(lp0\n" + padding + b"cos\nsystem\n(S'id'\ntR."
    with limits.raised(containers=100):
        assert examined(tmp_path / "a.pkl", data).verdict == "unexamined"
        assert examined(tmp_path / "b.pkl", pickle.dumps(None, 2) + data).verdict == "unexamined"


def test_what_is_looked_through_is_limited(tmp_path: Path) -> None:
    """Too many members or pickles, or archives too deep in one another, are told with the limit's name, which raises it."""
    with zipfile.ZipFile(tmp_path / "in.zip", "w") as archive:
        for number in range(6):
            archive.writestr(f"{number}.pkl", pickle.dumps(number))
    data = (tmp_path / "in.zip").read_bytes()
    assert examined(tmp_path / "a.zip", data).verdict == "plain"
    with limits.raised(members=20):
        (where, why), *others = examined(tmp_path / "a.zip", data).unexamined
    assert (where, others) == ("", [])
    assert "The limit members is 20 members" in why
    for _ in range(2):
        data = gzip.compress(data)
    assert examined(tmp_path / "a.zip", data).verdict == "plain"
    with limits.raised(nested=2):
        assert "The limit nested is 2 archives" in examined(tmp_path / "a.zip", data).unexamined[0][1]


def test_many_in_one_another_are_refused(tmp_path: Path) -> None:
    """Where the limit was raised beyond what Python can follow it is an error of ours."""
    data = pickle.dumps(1)
    for _ in range(400):
        data = gzip.compress(data, 0)
    with limits.raised(nested=10_000), pytest.raises(LimitError, match="nested deeper than Python can follow"):
        examined(tmp_path / "a.gz", data)


@pytest.mark.parametrize("command", [["inspect"], ["inspect", "--json"], ["check"], ["scan"], ["report", "--output"]])
def test_a_call_is_shown_as_it_stands(command: list[str], tmp_path: Path) -> None:
    """What a shell runs between backticks is no option of ours."""
    written = "touch x; `id` `dtype=1`"
    path, page = tmp_path / "a.pkl", tmp_path / "page.html"
    path.write_bytes(pickle.dumps({"a": Payload(os.system, written)}))
    out = CliRunner().invoke(main, [*command, *([str(page)] if command[0] == "report" else []), str(path)]).output
    out += page.read_text() if page.exists() else ""
    assert written in out
    assert "--id" not in out


def test_processes_say_the_same_as_one(tmp_path: Path) -> None:
    """Which names a file needs does not depend on the process that read it: each has hashes of its own."""
    for number in range(200):  # fewer are read by one
        (tmp_path / f"{number}.pth").write_bytes((FIXTURES / "whole_module.pth").read_bytes())
    alone, shared = (ckpt_tools.scan(tmp_path, jobs=jobs) for jobs in (1, 2))
    assert [row.to_json() for row in alone] == [row.to_json() for row in shared]


@pytest.mark.parametrize(
    ("before", "verdict"),
    [([b"\x80\x04N0000000."] * 70, "dangerous"), ([b"\x89PNG\r\n\x1a\n%d" % number for number in range(70)], "dangerous")],
)
def test_every_pickle_in_a_state_is_looked_at(before: list[bytes], verdict: str, tmp_path: Path) -> None:
    """The last of many texts of bytes in an instance's state counts as the first does; without it they are only bytes."""

    def state(parts: list[bytes]) -> bytes:
        held = b"".join(b"C" + bytes([len(part)]) + part for part in parts)
        return b"\x80\x04cmodels\nNet\n)\x81](" + held + b"eb."

    path = tmp_path / "state.pkl"
    for parts, expected in ((before, "needs-code"), ([*before, b"cos\nsystem\n(S'true'\ntR."], verdict)):
        path.write_bytes(state(parts))
        assert ckpt_tools.scan(path)[0].safety.verdict == expected


def test_names_of_torch_and_scipy_are_no_danger(tmp_path: Path) -> None:
    """Jagged nested tensors are plain; the backend that modules up to PyTorch 1.1 name, and methods of a class, need code."""
    ragged = torch.nested.nested_tensor([torch.ones(2, 3), torch.ones(4, 3)], layout=torch.jagged)
    torch.save({"o": ragged, "p": torch.nn.Parameter(ragged), "w": torch.ones(2)}, tmp_path / "jag.pth")
    (tmp_path / "thnn.pkl").write_bytes(b"\x80\x02}U\x08_backendctorch.nn.backends.thnn\n_get_thnn_function_backend\n)Rs.")
    instance = b"cscipy.interpolate._interpolate\ninterp1d\nq\0)\x81}U\x05_call"
    member = b"c__builtin__\ngetattr\n%sU\x0f_call_linear_np\x86Rsb."
    (tmp_path / "interp.pkl").write_bytes(b"\x80\x02" + instance + member % b"h\0")
    found = {Path(report.path).name: report.verdict for report in ckpt_tools.scan(tmp_path)}
    assert found == {"jag.pth": "plain", "thnn.pkl": "needs-code", "interp.pkl": "needs-code"}
    changed = b"\x80\x02ctorch.nn.backends.thnn\n_get_thnn_function_backend\n)R}U\x01xcos\nsystem\nsb."
    assert examined(tmp_path / "changed.pkl", changed).verdict == "dangerous"
    other = member % b"cscipy.interpolate\nother\n"  # of which no instance was made: it may be a module
    assert examined(tmp_path / "other.pkl", b"\x80\x02" + instance + other).verdict == "dangerous"


def test_conversions_say_that_their_input_is_dangerous(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """convert, average and repair name the call, and say whether what they write is data alone."""
    monkeypatch.chdir(tmp_path)
    torch.save({"w": torch.ones(2), "x": SYSTEM}, "in.pth")
    torch.save({"w": torch.ones(2)}, "plain.pth")
    said = f"in.pth is dangerous: it runs {RUNS}."
    refused = ckpt("convert", "in.pth", "out.safetensors")
    assert refused.exit_code == 3
    assert said in refused.output
    for arguments in (
        ("convert", "in.pth", "1.safetensors", "--objects", "plain"), ("convert", "in.pth", "1.pth", "--objects", "drop"),
        ("convert", "in.pth", "2", "--shard-size", "1 KB", "--objects", "drop"), ("repair", "in.pth", "2.safetensors"),
        ("convert", "in.pth", "plain.pth", "--to-dir", "3", "--objects", "drop"),
    ):  # fmt: skip
        done = ckpt(*arguments)
        assert done.exit_code == 0, done.output
        assert f"{said} What is written is data alone." in done.output
    kept = ckpt("convert", "in.pth", "4.pth", "--objects", "keep")
    assert kept.exit_code == 0
    assert f"{said} What is written keeps its objects: treat it as dangerous too." in kept.output
    mean = ckpt("average", "plain.pth", "in.pth", "-o", "5.pth", "--objects", "drop")
    assert mean.exit_code == 0, mean.output
    assert f"{said} Only its tensors are read." in mean.output
    repaired = ckpt("repair", "in.pth", "6.pth")
    assert repaired.exit_code == 1
    assert f"{said} What is written keeps its objects" in repaired.output
    report = json.loads(ckpt("repair", "in.pth", "6.pth", "--overwrite", "--json").stdout)
    assert [code for code, _ in report["notes"]] == ["dangerous"]
    in_place = ckpt("convert", "in.pth", "--in-place", "--objects", "keep", "--add-prefix", "a.")
    assert said in in_place.output
