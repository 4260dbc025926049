"""Payloads in the spirit of those that public scanners are tested with: each is dangerous, and what it calls is named."""

from __future__ import annotations

import bz2
import gzip
import io
import lzma
import random
import struct
import zipfile
import zlib
from collections import OrderedDict
from pathlib import Path

import numpy as np
import pytest

import ckpt_tools
from ckpt_tools import scan
from ckpt_tools.operations.safety import Safety, sentence
from ckpt_tools.pickling.raw_between import MAGIC_NUMBER
from tests.hostile import pickles as p

# What a stranger's pickle has been seen to call: runs code or programs, opens files, connects, loads more.
CALLED = """
builtins:eval builtins:exec builtins:compile builtins:__import__ builtins:getattr builtins:open builtins:breakpoint
pip:main pip._internal:main pip._internal.cli.main:main ensurepip:_run_pip ensurepip:bootstrap venv:create os:system
os:popen posix:system nt:system subprocess:Popen commands:getoutput pty:spawn platform:popen runpy:run_path
runpy:_run_code runpy:_run_module_code cProfile:run cProfile:runctx profile:Profile.run pdb:run bdb:Bdb.run
trace:Trace.run timeit:timeit doctest:debug_script code:InteractiveInterpreter.runcode idlelib.run:Executive.runcode
idlelib.pyshell:ModifiedInterpreter.runcode idlelib.autocomplete:AutoComplete.get_entity idlelib.calltip:get_entity
lib2to3.pgen2.grammar:Grammar.loads lib2to3.pgen2.pgen:ParserGenerator imaplib:IMAP4_stream
test.support.script_helper:assert_python_ok distutils.file_util:write_file _osx_support:_read_output
_aix_support:_read_cmd_output _pyrepl.pager:pipe_pager asyncio.unix_events:_UnixSubprocessTransport
uuid:_get_command_stdout ctypes:CDLL ctypes.util:_findLib_gcc pydoc:pipepager pydoc:locate pkgutil:resolve_name
mailcap:test tkinter:Tcl turtle:write_docstringdict py_compile:compile zipapp:create_archive zipimport:zipimporter
site:addpackage _xxsubinterpreters:run_string _testcapi:run_in_subinterp multiprocessing.util:spawnv_passfds
concurrent.futures.process:_process_worker threading:Timer atexit:register signal:signal weakref:finalize
operator:attrgetter operator:methodcaller _operator:attrgetter _operator:methodcaller
functools:reduce itertools:starmap types:FunctionType types:CodeType marshal:loads pickle:loads _pickle:loads dill:loads
dill._dill:_create_function cloudpickle.cloudpickle:_make_function cloudpickle.cloudpickle:_make_skeleton_class
joblib:load pandas:read_pickle pandas.core.frame:DataFrame.eval yaml:unsafe_load string:Formatter.format numpy:load
numpy:fromfile numpy.testing._private.utils:runstring numpy.f2py.crackfortran:getlincoef
numpy.f2py.crackfortran:param_eval numpy.f2py.diagnose:run_command torch:load torch.serialization:load torch.hub:load
torch.hub:_load_local torch.utils.cpp_extension:load_inline torch.utils.collect_env:run
torch.utils.bottleneck.__main__:run_cprofile torch.jit.unsupported_tensor_ops:execWrapper
torch._dynamo.guards:GuardBuilder.get torch.fx.graph_module:_forward_from_src torch._inductor.codecache:compile_file
torch.fx.experimental.symbolic_shapes:ShapeEnv.evaluate_guards_expression
torch.utils._config_module:ConfigModule.load_config keras.src.utils.python_utils:func_load
tensorflow.python.ops.gen_io_ops:read_file mlflow.projects.backend.local:_run_entry_point
transformers.dynamic_module_utils:get_class_from_dynamic_module socket:create_connection ssl:get_server_certificate
urllib.request:urlopen httplib:HTTPSConnection requests.api:get aiohttp.client:ClientSession smtplib:SMTP ftplib:FTP
webbrowser:open shutil:rmtree sys:exit linecache:getline dbm.dumb:open fileinput:input logging.config:listen
copyreg:add_extension _codecs:decode mypackage.helpers:run
"""


def said(path: Path, data: bytes) -> Safety:
    """What `scan` says of these bytes."""
    path.write_bytes(data)
    return scan(path)[0].safety


@pytest.mark.parametrize("protocol", [0, 2, 4])
@pytest.mark.parametrize("name", CALLED.split())
def test_what_it_calls_is_named(name: str, protocol: int, tmp_path: Path) -> None:
    """A call by a global of every protocol is dangerous, and said with its argument."""
    module, _, function = name.partition(":")
    named = {0: p.glob(module, function), 2: p.PROTO2 + p.glob(module, function),
             4: p.PROTO4 + p.text(module) + p.text(function) + b"\x93"}[protocol]  # fmt: skip
    found = said(tmp_path / "file", named + b"(S'x'\ntR.")
    assert found.verdict == "dangerous"
    assert any(call.text.endswith(f".{function}('x')") for _, call in found.calls)


SYSTEM, ID = p.glob("os", "system"), p.text("id")
CALL = p.call("os", "system", ID)
E = p.pickle(CALL)


def zipped(members: dict[str, bytes]) -> bytes:
    """A zip of these members."""
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w") as archive:
        for name, data in members.items():
            archive.writestr(name, data)
    return buffer.getvalue()


def objects() -> bytes:
    """A .npy of objects whose pickle is the payload."""
    buffer = io.BytesIO()
    np.save(buffer, np.empty(1, object), allow_pickle=True)
    return buffer.getvalue()[:128] + E


def objects_called(descr: str, spaces: int = 0) -> bytes:
    """The same, where the header says so in other words."""
    header = " " * spaces + f"{{'descr': {descr}, 'fortran_order': False, 'shape': (1,)}}\n"
    return b"\x93NUMPY\x01\0" + struct.pack("<H", len(header)) + header.encode() + E


def long_bytes(data: bytes) -> bytes:
    """Bytes of any length."""
    return b"B" + struct.pack("<I", len(data)) + data


def instance(**state: bytes) -> bytes:
    """An instance of a class of the user's whose state is set."""
    return p.glob("models", "Net") + b")\x81" + p.dict_of(**state) + p.BUILD


def computed(module: bytes, name: bytes) -> bytes:
    """A global whose module or name a call makes, called."""
    return p.PROTO4 + module + name + b"\x93" + p.tuple_of(ID) + b"R."


NOISE = random.Random(0).randbytes(3_000_000)  # which cannot be packed


def dtype(code: str, *state: bytes) -> bytes:
    """A dtype of NumPy's, with this state."""
    return p.call("numpy", "dtype", p.text(code)) + (p.tuple_of(*state) + p.BUILD if state else b"")


def wrapped(
    kind: bytes, count: int, made: bytes = p.glob("joblib.numpy_pickle", "NumpyArrayWrapper") + b")\x81", **more: bytes
) -> bytes:
    """What joblib writes before the bytes of an array."""
    return made + p.dict_of(dtype=kind, shape=p.tuple_of(p.integer(count)), **more) + p.BUILD


def framed(body: bytes) -> bytes:
    """A pickle of protocol 4 with a frame around these opcodes, and numbers behind it."""
    return p.PROTO4 + b"\x95" + struct.pack("<Q", len(body)) + body


IN_ARRAY = CALL + b"0"
RECONSTRUCTED = p.call(
    "copyreg", "_reconstructor", p.glob("joblib.numpy_pickle", "NumpyArrayWrapper"), p.glob("builtins", "object"), b"N"
)
FIELDS = p.dict_of(a=p.tuple_of(dtype("O8"), p.integer(0)))
OF_OBJECTS = dtype(
    "V8", p.integer(3), p.text("|"), b"N", p.tuple_of(p.text("a")), FIELDS, p.integer(8), p.integer(1), p.integer(27)
)

# fmt: off
EVIL_ZIP = zipped({"archive/data.pkl": E, "archive/version": b"3"})
BEFORE_A_BREAK = p.PROTO2 + CALL + b"0"
STORAGE = b"c!!\nFloatStorage\n0"  # which torch takes as a storage without an import of `!!`
# How a call of os.system is hidden.
HIDDEN = {
    "a result that is popped": p.pickle(CALL, b"0N"),
    "popped up to a mark": p.pickle(b"(", CALL, b"1N"),
    "the memo overwritten": p.pickle(p.ORDERED_DICT, p.put(0), b"0", SYSTEM, p.put(0), b"0", p.get(0), p.tuple_of(ID), b"R"),
    "a memo of text": b"cos\nsystem\np5\n0g5\n(S'id'\ntR.",
    "the top doubled": p.pickle(SYSTEM, b"2", p.tuple_of(ID), b"R"),
    "INST": b"(lp0\n(S'id'\nios\nsystem\na.",
    "OBJ": p.pickle(b"(", SYSTEM, ID, b"o"),
    "an argument in escapes": b"cos\nsystem\n(V\\u0069d\ntR.",
    "a second pickle": p.pickle(b"N") + E,
    "an end that is missing": BEFORE_A_BREAK + b"(",
    "an opcode that is none": BEFORE_A_BREAK + b"\xff\xff",
    "a text that is cut off": BEFORE_A_BREAK + b"X\xff\xff",
    "a 7z signature behind it": BEFORE_A_BREAK + b"N.7z\xbc\xaf\x27\x1c",
    "a protocol that is none": b"\x80\x09" + E[2:],
    "another protocol in the middle": p.pickle(b"\x80\x05", CALL),
    "no protocol, a value in front": b"N0" + CALL + b".",
    "a frame that lies": b"\x80\x04\x95\x03\0\0\0\0\0\0\0" + CALL + b".",
    "a buffer of the loader's in front": b"\x80\x05\x97\x980" + CALL + b".",
    "a persistent id": p.pickle(p.tuple_of(CALL), b"Q"),
    "a pickle in a state": p.pickle(instance(x=long_bytes(E))),
    "an archive in a pickle": p.pickle(p.call("torch.storage", "_load_from_bytes", long_bytes(EVIL_ZIP))),
    "a checksum that is wrong": EVIL_ZIP.replace(struct.pack("<I", zlib.crc32(E)), b"\1\2\3\4"),
    "two names of one record": EVIL_ZIP[:30] + b"Archive/data.pkl" + EVIL_ZIP[46:],
    "a flag of encryption": EVIL_ZIP[:6] + b"\1\0" + EVIL_ZIP[8:],
    "an archive that is cut off": EVIL_ZIP[:-30],
    "a text file in the archive": zipped({"a/data.pkl": p.pickle(b"}"), "a/extra/readme.txt": E, "a/version": b"3"}),
    "constants of a program": zipped({"a/constants.pkl": E, "a/data.pkl": p.pickle(b"}"), "a/version": b"3"}),
    "an archive in an archive": zipped({"inner": zipped({"x": E})}),
    "an archive behind another": zipped({"a/data.pkl": p.pickle(b"}"), "a/version": b"3"}) + EVIL_ZIP,
    "objects of NumPy": objects(),
    "objects of NumPy in an archive": zipped({"a.npy": objects()}),
    "objects of NumPy in escapes": objects_called(r"'\x4f'"),
    "objects of NumPy by their Python name": zipped({"a.npy": objects_called("'object'")}),
    "objects of NumPy in a structure": objects_called(r"[('a', '\x4f')]"),
    "objects of NumPy in two texts": objects_called("'ob' 'ject'"),
    "objects of NumPy behind a long header": objects_called("'O'", 4200),
    "objects of NumPy behind a header beyond our limit": zipped({"a.npy": objects_called("'O'", 60_000)}),
    "a number in the octal of C": b"I012\n0" + CALL + b".",
    "numbers that end at a NUL": b"I1\0x\n0F1.5\0x\n0L1\0x\n0" + CALL + b".",
    "a small pickle without a name in front": b"]." + CALL + b".",
    "three of them": b"K\1.N.]q\1." + CALL + b".",
    "a storage of no module in front": STORAGE + CALL + b".",
    "a storage of no module in front, in torch-zip": zipped({"a/data.pkl": STORAGE + CALL + b".", "a/version": b"3"}),
    "a storage of no module in front, in torch-legacy": p.pickle(p.integer(MAGIC_NUMBER)) + STORAGE + CALL + b".",
    "the bytes of joblib's array": p.pickle(wrapped(dtype("u1"), len(IN_ARRAY)), IN_ARRAY),
    "the bytes of an array of scikit-learn's own joblib": p.pickle(
        wrapped(dtype("u1"), len(IN_ARRAY), p.glob("sklearn.externals.joblib.numpy_pickle", "NumpyArrayWrapper") + b")\x81"),
        IN_ARRAY),
    "behind an array in another class's name": p.pickle(wrapped(dtype("u1"), 2, RECONSTRUCTED), b"\xff\xff", IN_ARRAY),
    "joblib's array of structures with objects": p.PROTO2 + wrapped(OF_OBJECTS, 9) + E + b".",
    "joblib's array, its dtype given twice":
        p.PROTO2 + wrapped(dtype("u1"), 99)[:-2] + p.text("dtype") + dtype("O8") + b"ub" + E + b".",
    "in a frame with joblib's array": framed(wrapped(dtype("u1"), len(IN_ARRAY)) + IN_ARRAY) + b"." * len(IN_ARRAY),
    "padding in front of joblib's array": p.pickle(
        wrapped(dtype("u1"), 1, numpy_array_alignment_bytes=p.TRUE), b"\x02\xff\xff.", IN_ARRAY),
    "a memo that is another's to joblib":
        p.PROTO4 + p.text("os") + b"\x94" + p.text("system") + b"\x94" + wrapped(dtype("O8"), 1)
        + p.PROTO4 + p.text("numpy") + b"\x94" + p.text("dtype") + b"\x94h\0h\1\x93" + p.tuple_of(ID) + b"R..",
    "gzip in gzip": gzip.compress(gzip.compress(E)),
    "xz": lzma.compress(E),
    "lzma alone": lzma.compress(E, lzma.FORMAT_ALONE),
    "lzma alone with a small dictionary": lzma.compress(
        E, lzma.FORMAT_ALONE, filters=[{"id": lzma.FILTER_LZMA1, "dict_size": 4096}]),
    "lzma alone behind xz": lzma.compress(b"\x80\x02") + lzma.compress(E[2:], lzma.FORMAT_ALONE),
    "zlib behind zlib of another level": zlib.compress(b"\x80\x02", 1) + zlib.compress(E[2:], 9),
    "zlib of joblib 0.8 without 0x": b"ZF" + b"%19x" % len(E) + zlib.compress(E),
    "zlib with a wrong checksum": zlib.compress(E)[:-4] + b"abcd",
    "zlib with a wrong checksum behind 3 MB": zlib.compress(E + NOISE, 1)[:-4] + b"abcd",
    "zlib with a wrong byte": zlib.compress(E + NOISE, 1)[:-400] + b"\xff" * 400,
    "lzma with a wrong byte": lzma.compress(E + NOISE, lzma.FORMAT_ALONE)[:-400] + b"\xff" * 400,
    "gzip with a wrong checksum": gzip.compress(E)[:-8] + b"abcdefgh",
    "bzip2": bz2.compress(E),
}
# Other ways to a call: (the bytes, what must be named).
PARTIAL = p.call("functools", "partial", p.glob("models", "f"))
LOADED = p.call("importlib", "import_module", p.text("os"))
OTHERS = {
    "an extension of one byte": (p.pickle(b"\x82\x07", p.tuple_of(ID), b"R"), "copyreg.<extension 7>('id')"),
    "an extension of two bytes": (p.pickle(b"\x83\x07\x01", p.tuple_of(ID), b"R"), "copyreg.<extension 263>('id')"),
    "an extension of four bytes": (p.pickle(b"\x84\x07\0\0\0", p.tuple_of(ID), b"R"), "copyreg.<extension 7>('id')"),
    "an extension that it adds": (
        p.pickle(p.call("copyreg", "add_extension", p.text("os"), p.text("system"), b"K\1"), b"0\x82\x01)R"),
        "copyreg.add_extension('os', 'system', 1)"),
    "a persistent id of text": (b"(Pa\nios\nsystem\n.", "os.system(torch.storage.UntypedStorage())"),
    "a computed module": (computed(p.call("builtins", "str", p.text("os")), p.text("system")), "<a computed name>"),
    "a joined module": (computed(p.call("operator", "concat", p.text("o"), p.text("s")), p.text("system")), "operator.concat"),
    "a module that is a list": (computed(b"]", p.text("system")), "<a computed name>"),
    "a name with dots": (computed(p.text("torch"), p.text("serialization.os.system")), "torch.serialization.os.system('id')"),
    "a name through a harmless module": (computed(p.text("argparse"), p.text("_os.system")), "argparse._os.system('id')"),
    "getattr of an import": (
        p.pickle(p.call("builtins", "getattr", LOADED, p.text("system")), p.tuple_of(ID), b"R"),
        "importlib.import_module('os')"),
    "a chain of operators": (
        p.pickle(p.call("operator", "attrgetter", p.text("system")), p.tuple_of(LOADED), b"R", p.tuple_of(ID), b"R"),
        "operator.attrgetter('system')"),
    "a partial that is called": (p.pickle(PARTIAL, b")R"), "functools.partial(models.f)"),
    "a partial that waits": (p.pickle(p.call("functools", "partial", SYSTEM, ID)), "functools.partial(os.system, 'id')"),
    "a partial that dict() finds": (
        p.pickle(p.call("builtins", "dict", p.call("types", "SimpleNamespace") + p.dict_of(keys=PARTIAL) + b"b")),
        "builtins.dict"),
    "a class that NumPy's generators call": (
        p.pickle(p.call("numpy.random._pickle", "__generator_ctor", p.text("rm -rf /"), p.glob("models", "Net"))),
        "__generator_ctor('rm -rf /', models.Net)"),
    "a default factory": (p.pickle(p.call("collections", "defaultdict", p.glob("os", "getcwd"))), "defaultdict(os.getcwd)"),
    "a state with __setstate__": (p.pickle(instance(__setstate__=SYSTEM), ID, b"b"), "models.Net"),
    "an element of a tensor": (
        p.pickle(p.glob("torch", "ShortTensor"), b"(K\1t\x81K\0", instance(__torch_function__=p.glob("models", "f")), b"s"),
        "torch.ShortTensor"),
    "an element of an array": (
        p.pickle(p.call("numpy._core.multiarray", "_reconstruct", p.glob("numpy", "ndarray"), b"(K\1t", b"U\1b"), b"K\0",
                 instance(__array__=p.glob("models", "f")), b"s"),
        "_reconstruct"),
    "a number of a list in a tuple": (
        p.pickle(p.call("numpy", "longlong", p.tuple_of(p.list_of(instance(__array__=p.glob("models", "f")))))),
        "numpy.longlong"),
    "a state of a class": (
        p.pickle(p.glob("argparse", "Namespace"), p.tuple_of(p.NONE, p.dict_of(__getattr__=SYSTEM)), b"b"),
        "argparse.Namespace"),
    "a state of a module": (p.pickle(p.glob("torch", "hub"), p.tuple_of(p.NONE, p.dict_of(load=SYSTEM)), b"b"), "torch.hub"),
    "items of sys.modules": (p.pickle(p.glob("sys", "modules"), p.text("os"), b"Ns"), "sys.modules"),
}
# fmt: on


def test_a_storage_of_no_module_is_not_nothing(tmp_path: Path) -> None:
    """What torch.load reads as a pickle is one, and a checkpoint whose pickle names more than data is not plain."""
    path = tmp_path / "a.pth"
    body = STORAGE + p.glob("models", "Net") + b")\x81."
    assert said(path, zipped({"a/data.pkl": body, "a/version": b"3"})).verdict == "needs-code"
    assert ckpt_tools.inspect(path).safety.verdict == "needs-code"


CASES = {name: (data, "os.system('id')") for name, data in HIDDEN.items()} | OTHERS


@pytest.mark.parametrize(("data", "named"), CASES.values(), ids=CASES.keys())
def test_what_it_hides_is_named(data: bytes, named: str, tmp_path: Path) -> None:
    """However a call is hidden, the file is dangerous and the call is named."""
    found = said(tmp_path / "file", data)
    assert found.verdict == "dangerous"
    assert any(named in call.text for _, call in found.calls), [call.text for _, call in found.calls]


UNKNOWN_ARRAYS = {
    "in a frame": framed(wrapped(dtype("u1"), 2) + b"N0") + b"..N.",
    "a shape that is computed": p.pickle(wrapped(dtype("u1"), 0)[:-2] + p.text("shape") + b"Nub", b"N."),
    "an alignment that is computed": p.pickle(wrapped(dtype("u1"), 1, numpy_array_alignment_bytes=instance()), b"N."),
    "flags of objects on numbers, in an old state": p.pickle(
        wrapped(dtype("f8", p.integer(3), p.text("<"), b"NNN", p.integer(-1), p.integer(-1)), 0), b"N."
    ),
    "no dtype": p.pickle(wrapped(instance(), 0), b"N."),
    "cut off": p.PROTO2 + wrapped(dtype("f8"), 9) + b".",
    "in another file": p.pickle(
        b"cjoblib.numpy_pickle_compat\nNDArrayWrapper\n)\x81", p.dict_of(filename=p.text("x_01.npy")), b"b"
    ),
}


@pytest.mark.parametrize("data", UNKNOWN_ARRAYS.values(), ids=UNKNOWN_ARRAYS.keys())
def test_an_array_whose_end_is_not_known(data: bytes, tmp_path: Path) -> None:
    """Where joblib would go on cannot be told: it could not be examined."""
    assert said(tmp_path / "file", data).verdict == "unexamined"


ARRAYS = {
    "text": np.array(["ab"]), "bytes": np.array([b"ab"]), "dates": np.array(["2020-01-01"], "M8[D]"),
    "spans": np.array([3], "m8[ns]"),
    "long": np.zeros(3, np.longdouble), "complex": np.zeros(3, np.clongdouble),
    "structures": np.zeros(2, [("a", "f4", (2, 3)), ("b", "i8")]),
    "structures with objects": np.array([(1, None)], dtype=[("a", "i4"), ("b", "O")]),
    "objects": np.array(["a", None, b"a" * 300], dtype=object),
    "arrays in an array": {
        "a": np.array([np.arange(3), np.array([None, 1]), [1.5]], dtype=object), "b": np.arange(3, dtype=">i4")},
    "a list": [np.arange(3), np.array([{"x": 1}, OrderedDict(a=1)], dtype=object), np.arange(9, dtype="u1")],
}  # fmt: skip


@pytest.mark.parametrize("protocol", [2, 4, 5])
@pytest.mark.parametrize("name", ARRAYS)
def test_arrays_of_joblib_are_not_dangerous(name: str, protocol: int, tmp_path: Path) -> None:
    """joblib's own files need its code, and nothing in them is dangerous or unknown."""
    joblib = pytest.importorskip("joblib")
    joblib.dump(ARRAYS[name], tmp_path / "file", protocol=protocol)
    found = scan(tmp_path / "file")[0].safety
    assert found.verdict == "needs-code", found.text


@pytest.mark.parametrize("body", [instance(x=p.text("os.system()")), p.glob("models", "Net") + b")\x81"])
def test_an_instance_before_a_break(body: bytes, tmp_path: Path) -> None:
    """Without a protocol in front too a pickle counts that makes an instance, whose class may do anything, and breaks then."""
    found = said(tmp_path / "file", body + b"\xff")
    assert found.verdict == "unexamined"
    assert found.classes == ["models.Net"]


@pytest.mark.parametrize("damaged", [
    zlib.compress(p.pickle(b"N") + NOISE, 1)[:-4] + b"abcd", zlib.compress(p.pickle(b"N"))[:-4] + b"abcd",
    b"ZF" + b"0x%-17x" % 9 + zlib.compress(NOISE)[:-4] + b"abcd", b"]\0\0\0\x40" + b"\xff" * 8 + bytes(50),
], ids=["checksum", "short", "joblib 0.8", "dictionary of 1 GB"])  # fmt: skip
def test_what_is_damaged_is_not_examined(damaged: bytes, tmp_path: Path) -> None:
    """Of zlib and lzma with an error loaders read what comes before it: the file is never plain, and not nothing to run."""
    assert said(tmp_path / "file", damaged).verdict == "unexamined"


@pytest.mark.parametrize(
    "text",
    [b"x^2 + y^2 = z^2, for whole numbers\n" * 9, b"x\x01yz" * 20, b"ZFS, a file system" * 20, b"]\0\1abc" * 9],
    ids=["formula", "control", "ZFS", "bracket"],
)
def test_what_only_begins_as_zlib_is_nothing(text: bytes, tmp_path: Path) -> None:
    """Two bytes make no compressed file."""
    assert said(tmp_path / "file", text).verdict == "nothing"


@pytest.mark.parametrize("module", ["antigravity", "idlelib.idle", "unittest.__main__", "venv.__main__", "test.autotest"])
def test_modules_that_run_when_they_are_imported(module: str, tmp_path: Path) -> None:
    """To name anything in them, by whatever name, imports them: a browser opens, or the tests of this folder run."""
    found = said(tmp_path / "file", p.pickle(p.glob(module, "Thing")))
    assert [sentence(*call) for call in found.calls] == [f"this names {module}.Thing, which can run code"]


def test_an_extension_that_is_only_named(tmp_path: Path) -> None:
    """It may be anything that the loading program has registered: code is needed, and it is never plain."""
    assert said(tmp_path / "file", p.pickle(b"\x82\x07")).verdict == "needs-code"
