"""Files that are made to cost a reader much, one of each class; `python -m tests.hostile.bombs` prints what each costs.

A row is a builder, the arguments of `ckpt` (IN is the file) and the exit code; costs are CPU seconds and MB of a process.
"""

import gzip
import io
import json
import os
import struct
import subprocess
import sys
import tempfile
import zlib
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path

from tests.hostile import pickles as p
from tests.hostile.refusals import safetensors
from tests.hostile.zips import Rec, build, deflated, torch_records, torch_zip
from tests.support.legacy import floats, persistent, stream
from tests.support.samples import FIXTURES

SIZE = int(os.environ.get("CKPT_BOMB_BYTES", "1000000"))  # of a file whose builder repeats a unit
SECONDS, MEGABYTES = 15, 1000
FLOATS = {"0": bytes(24)}
_CHILD = """
import json, resource, sys
resource.setrlimit(resource.RLIMIT_AS, (4 << 30, 4 << 30))
resource.setrlimit(resource.RLIMIT_CPU, (60, 60))
from tests.support.commands import main
try:
    main(sys.argv[2:], prog_name="ckpt")
except SystemExit as stop:
    code = stop.code
used = resource.getrusage(resource.RUSAGE_SELF)
with open(sys.argv[1], "w") as file:
    json.dump([code, used.ru_utime + used.ru_stime, used.ru_maxrss >> 10], file)
"""


@dataclass(frozen=True)
class Bomb:
    """A file, what is done with it, and the exit code of that."""

    build: Callable[[], bytes]
    command: str
    code: int  # where SIZE is what it is unless told otherwise


@dataclass(frozen=True)
class Cost:
    """What a command took: its exit code (None where it was killed), CPU seconds, MB of memory, its last words."""

    code: int | None
    seconds: float
    megabytes: int
    told: str


BOMBS: dict[str, Bomb] = {}


def bomb(command: str, code: int = 3) -> Callable[[Callable[[], bytes]], Callable[[], bytes]]:
    """Enter a builder in the table."""

    def enter(build: Callable[[], bytes]) -> Callable[[], bytes]:
        BOMBS[build.__name__] = Bomb(build, command, code)
        return build

    return enter


def cost(bomb: Bomb) -> Cost:
    """Build the file and run the command, in a process and a folder of its own."""
    with tempfile.TemporaryDirectory() as folder:
        Path(folder, "IN").write_bytes(bomb.build())
        # By way of a shell: a child's largest size begins with that of the process that it was forked from.
        line = ["sh", "-c", '"$@"; true', "sh", sys.executable, "-c", _CHILD, "cost", *bomb.command.split()]
        environment = dict(os.environ, PYTHONPATH=str(FIXTURES.parent), OMP_NUM_THREADS="1")
        done = subprocess.run(line, cwd=folder, env=environment, capture_output=True, text=True, errors="replace", check=True)
        told = " ".join((done.stdout[-2000:] + done.stderr[-2000:]).split())[-90:]
        found = Path(folder, "cost")
        code, seconds, megabytes = json.loads(found.read_text()) if found.exists() else (None, 60.0, 0)
        return Cost(code, seconds, megabytes, told)


def repeated(before: bytes, unit: bytes, after: bytes) -> bytes:
    """A torch-zip with a tensor `a.w` and beside it a value: a pickle of SIZE bytes, most of them the same again and again."""
    head = p.EMPTY_DICT + p.MARK + p.text("a.w") + p.tensor() + p.put(0) + p.text("x") + before
    return torch_zip(p.pickle(head + unit * (max(0, SIZE - len(head)) // len(unit)) + after, p.SETITEMS), FLOATS)


def some(count: int) -> int:
    """So many where SIZE is four megabytes."""
    return max(1, count * SIZE // 4_000_000)


def beside(value: bytes) -> bytes:
    """A torch-zip with a tensor and this value."""
    return torch_zip(p.pickle(p.dict_of(**{"a.w": p.tensor(), "x": value})), FLOATS)


def laughs(unit: int) -> bytes:
    """A tuple of sixty levels, each holding the one below so many times; memo 100 is the last."""
    levels = b"".join(p.MARK + p.get(level + 1) * unit + p.TUPLE + p.put(level + 2) for level in range(60))
    return p.EMPTY_TUPLE + p.put(1) + levels + p.put(100)


# --- pickles


@bomb("inspect IN", 0)
def a_list_of_itself() -> bytes:
    """One list that stands in itself at every second byte."""
    return b"\x80\x02]q\x00(" + b"h\x00" * (SIZE // 2) + b"e."


@bomb("inspect IN", 0)
def empty_dicts() -> bytes:
    """Millions of containers."""
    return repeated(p.EMPTY_LIST + p.MARK, p.EMPTY_DICT, p.APPENDS)


@bomb("convert IN out.pth --objects plain", 0)
def short_texts_and_numbers() -> bytes:
    """Millions of values that Python does not share."""
    return repeated(p.EMPTY_LIST + p.MARK, b"\x8c\x02abM\x01\x77", p.APPENDS)


@bomb("convert IN out.safetensors --objects plain")
def state_dicts_in_state_dicts() -> bytes:
    """A chain of dicts, each with the next one first and a tensor last, again and again."""
    names = p.text("c") + p.put(1) + b"0" + p.text("t") + p.put(2) + b"0"
    chain = (p.EMPTY_DICT + p.MARK + p.get(1)) * 900 + p.EMPTY_DICT + (p.get(2) + p.get(0) + p.SETITEMS) * 900
    return repeated(names + p.EMPTY_LIST + p.MARK, chain, p.APPENDS)


@bomb("convert IN out.safetensors --objects plain")
def billion_laughs() -> bytes:
    """10**60 values in a kilobyte."""
    return beside(laughs(10))


@bomb("scan IN", 1)
def calls_of_laughs() -> bytes:
    """Objects that are made by a call of a tuple which would take 2**60 parts to write or to hash."""
    again, eight = p.get(101), b"C\x08" + bytes(8)
    made = p.glob("m", "f") + laughs(2) + p.TUPLE1 + p.REDUCE + p.put(101)
    scalar = p.call("numpy.core.multiarray", "scalar", again, eight)
    return beside(p.list_of(made, scalar, p.call("torch.nn.parameter", "Parameter", again), b"}" + p.get(100) + b"Ns"))


@bomb("inspect IN", 0)
def a_class_of_laughs() -> bytes:
    """What rebuilds a tensor with attributes is made an instance of, and its class is such a tuple."""
    given = p.tuple_of(p.NONE, laughs(2), p.NONE, p.NONE)
    return beside(p.glob("torch._tensor", "_rebuild_from_type_v2") + given + b"\x81")


@bomb("inspect IN")
def a_scheme_of_laughs() -> bytes:
    """A quantised tensor that says by such a tuple how it is quantised."""
    scheme = p.tuple_of(laughs(2), p.integer(1), p.integer(0), p.integer(0))
    given = (p.storage(numel=24, kind="QUInt8Storage"), p.integer(0), p.sizes(24), p.sizes(1), scheme, p.FALSE, p.ORDERED_DICT)
    return torch_zip(p.pickle(p.dict_of(w=p.call("torch._utils", "_rebuild_qtensor", *given))), FLOATS)


@bomb("inspect IN", 0)
def keys_that_collide() -> bytes:
    """Numbers that all have Python's hash 0."""
    step = 2**61 - 1
    keys = b"".join(b"\x8a\x0b" + (step * index).to_bytes(11, "little") + p.NONE for index in range(1, SIZE // 14))
    return beside(p.EMPTY_DICT + p.MARK + keys + p.SETITEMS)


@bomb("inspect IN")
def one_list_in_many_calls() -> bytes:
    """A long list of pairs, made into an OrderedDict a million times."""
    pairs = p.list_of(p.list_of(b"K\x01K\x02") + p.put(9), p.get(9) * (SIZE // 20)) + p.TUPLE1 + p.put(2) + b"0"
    before = p.glob("collections", "OrderedDict") + p.put(1) + b"0" + pairs + p.EMPTY_LIST + p.MARK
    return repeated(before, p.get(1) + p.get(2) + p.REDUCE, p.APPENDS)


@bomb("scan IN", 0)
def one_instance_changed_again_and_again() -> bytes:
    """An instance with four hundred attributes, to which things are appended."""
    state = b"}(" + b"".join(p.text(f"a{number}") + b"]" for number in range(400)) + b"ub"
    return beside(p.glob("models", "Thing") + b")\x81" + state + b"K\x01a" * 8_000)


@bomb("scan IN", 0)
def names_of_classes() -> bytes:
    """Hundreds of thousands of different globals."""
    return p.pickle(b"".join(b"cq%x\nx\n0" % index for index in range(SIZE // 10)), b"}")


@bomb("inspect IN")
def long_key_in_many_dicts() -> bytes:
    """One long text, the key of many dicts."""
    before = p.text("k" * (SIZE // 2)) + p.put(1) + b"0" + p.EMPTY_LIST + p.MARK
    return repeated(before, p.EMPTY_DICT + p.get(1) + b"K\x01s", p.APPENDS)


@bomb("repair IN out.pth")
def name_of_many_parts() -> bytes:
    """A name with a million dots, and metadata of modules."""
    state = p.ORDERED_DICT + p.MARK + p.text("a." * (SIZE // 4)) + p.put(0) + p.tensor() + p.SETITEMS
    metadata = p.ORDERED_DICT + p.MARK + p.text("") + p.dict_of(version=b"K\x01") + p.get(0) + b"}" + p.SETITEMS
    return torch_zip(p.pickle(state, p.dict_of(_metadata=metadata), p.BUILD), FLOATS)


@bomb("inspect IN", 0)
def memo_far_apart() -> bytes:
    """As many memo entries as fit, far from each other."""
    return torch_zip(p.pickle(b"N", *(p.put(1000 * index + 7) for index in range(SIZE // 5))), FLOATS)


# --- zips, tars, other files of torch


@bomb("inspect IN --limit memory=2000000")
def pickle_that_inflates() -> bytes:
    """A pickle of twenty megabytes, deflated to twenty kilobytes; the limit is an eighth of the default."""
    records = torch_records(b"", FLOATS)
    records[0] = deflated(b"archive/data.pkl", p.pickle(p.list_of(p.NONE * 20_000_000)))
    return build(records)


@bomb("stats IN", 0)
def storage_that_inflates() -> bytes:
    """A storage of 96 MB, deflated to 100 KB."""
    blocks, numel = some(6), some(6) << 22
    packer = zlib.compressobj(9, zlib.DEFLATED, -15)
    packed = (packer.compress(bytes(1 << 24)) + packer.flush(zlib.Z_FULL_FLUSH)) * blocks + packer.flush()
    wide = p.tensor(p.sizes(numel), p.sizes(1), on=p.storage("0", numel))
    rows = torch_records(p.pickle(p.dict_of(**{"a.w": wide})), {"0": b""})
    crc = zlib.crc32(bytes(blocks << 24))
    rows[2] = Rec(b"archive/data/0", packed, method=8, crc=crc, size=blocks << 24, compressed=len(packed))
    return build(rows)


@bomb("check IN", 0)
def records() -> bytes:
    """A directory of many empty records."""
    rows = [*torch_records(p.pickle(p.dict_of(w=p.tensor())), FLOATS), *(Rec(b"archive/%x" % i) for i in range(SIZE // 100))]
    return build(rows, count=min(0xFFFF, len(rows)), wide_count=len(rows))


@bomb("scan IN", 1)
def archives_in_an_archive() -> bytes:
    """Checkpoints, each with a deflated pickle of a megabyte, in an archive."""
    inner = torch_records(b"", FLOATS)
    inner[0] = deflated(b"archive/data.pkl", p.pickle(p.list_of(p.NONE * 1_000_000)))
    one = Rec(b"", build(inner))
    return build([replace(one, name=b"%d.pth" % index) for index in range(some(100))])


@bomb("inspect IN", 0)
def torch_legacy_storages() -> bytes:
    """A legacy stream of many storages."""
    count = SIZE // 110
    head = p.glob("torch._utils", "_rebuild_tensor_v2") + p.put(0) + b"0" + p.ORDERED_DICT + p.put(1) + b"0"
    tensor = b"K\x00K\x01\x85K\x01\x85" + p.FALSE + p.get(1) + b"tR"
    rows = b"".join(p.get(0) + p.MARK + persistent(str(index), 1) + tensor for index in range(count))
    return stream(head + p.list_of(rows), *((str(index), floats(1)) for index in range(count)))


def member(name: bytes, data: bytes = b"", kind: bytes = b"0") -> bytes:
    """A member of a tar: its header, and what is behind it."""
    head = bytearray(512)
    head[: len(name)], head[124:136], head[156:157], head[257:265] = name, b"%011o\0" % len(data), kind, b"ustar\x0000"
    head[148:156] = b"%06o\0 " % (sum(head) + 8 * 32)
    return bytes(head) + data + bytes(-len(data) % 512)


@bomb("inspect IN")
def tar_of_idle_records() -> bytes:
    """Pax headers with thousands of records each that say nothing, and a checkpoint."""
    idle = member(b"x", b"7 uid=\n" * 9300, b"x") * some(150)
    return gzip.compress(idle + member(b"a.pth", beside(p.NONE)) + bytes(1024))


@bomb("inspect IN")
def code_of_a_program() -> bytes:
    """TorchScript: a list of names that begin and never end."""
    module = p.glob("__torch__", "A") + b")\x81" + p.dict_of(a=p.tensor()) + p.BUILD
    code = b'class A(Module):\n  __parameters__ = ["' + b'\\"' * some(4_000_000) + b"]\n"
    more = [Rec(b"archive/constants.pkl", p.pickle(b")")), deflated(b"archive/code/__torch__.py", code)]
    return build([*torch_records(p.pickle(module), FLOATS), *more])


# --- headers, JSON, other frameworks


@bomb("inspect IN")
def header_of_dicts() -> bytes:
    """A safetensors header with a field full of dicts."""
    field = '{"":0},' * (max(SIZE, 2_000_000) // 7)
    return safetensors('{"a":{"dtype":"U8","shape":[0],"data_offsets":[0,0],"x":[' + field + "0]}}")


@bomb("inspect IN")
def json_that_inflates() -> bytes:
    """A model.json of dozens of megabytes of dicts, deflated."""
    text = b'{"mainModule":{"name":"a"},"x":[' + b'{"":0},' * some(2_000_000) + b"0]}"
    return build([deflated(b"a/model.json", text), Rec(b"a/version", b"1")])


@bomb("inspect IN")
def arrays_of_objects() -> bytes:
    """NumPy arrays of lists, deflated."""
    kind = p.call("numpy", "dtype", p.text("O8"), p.FALSE, p.TRUE)
    empty = p.call("numpy.core.multiarray", "_reconstruct", p.glob("numpy", "ndarray"), p.sizes(0), b"C\x01b")
    many = p.tuple_of(b"K\x01", p.sizes(300_000), kind, p.FALSE, p.list_of(p.EMPTY_LIST * 300_000)) + p.BUILD
    body = b"{'descr': '|O', 'fortran_order': False, 'shape': (300000,), }\n"
    one = deflated(b"", b"\x93NUMPY\x01\x00" + struct.pack("<H", len(body)) + body + p.pickle(empty + many))
    return build([replace(one, name=b"%d.npy" % index) for index in range(some(20))])


@bomb("inspect IN", 0)
def onnx_of_metadata() -> bytes:
    """Protobuf: a model of one number and hundreds of thousands of pairs of text."""

    def field(number: int, value: bytes) -> bytes:
        return bytes([number << 3 | 2, len(value)]) + value

    tensor = b"\x08\x02\x10\x01\x42\x03a.w\x4a\x08" + bytes(8)
    return (
        b"\x08\x07"
        + field(7, field(5, tensor))
        + b"".join(field(14, field(1, b"%x" % index)) for index in range(some(100_000)))
    )


@bomb("check --values IN", 0)
def gguf_of_keys() -> bytes:
    """A model of one number and hundreds of thousands of keys, each with a number of one byte."""
    names = [b"%x" % index for index in range(some(50_000))]
    keys = b"".join(struct.pack("<Q", len(name)) + name + struct.pack("<IB", 0, 1) for name in names)
    head = b"GGUF" + struct.pack("<IQQ", 3, 1, len(names)) + keys + struct.pack("<Q", 3) + b"a.w"
    head += struct.pack("<IQIQ", 1, 1, 0, 0)
    return head + bytes(-len(head) % 32) + bytes(4)


@bomb("inspect IN")
def msgpack_of_maps() -> bytes:
    """Flax: an array of maps."""
    return b"\x81\xa6params\xdd" + struct.pack(">I", SIZE // 3) + b"\x81\xa0\x00" * (SIZE // 3)


@bomb("inspect IN")
def hdf5_of_arrays_in_chunks() -> bytes:
    """Keras: thousands of arrays that lie in chunks."""
    import h5py

    made = io.BytesIO()
    with h5py.File(made, "w", libver="latest") as file:
        for number in range(5000):
            file.create_dataset(f"{number}", shape=(1,), dtype="i1", chunks=(1,), maxshape=(1,))
    return made.getvalue()


@bomb(f"convert {FIXTURES}/single.pth out.pth --plan IN")
def plan_of_arrays() -> bytes:
    """TOML: arrays in arrays."""
    return b'format = "ckpt-plan-1"\nx = ' + b"[" * (SIZE // 2) + b"]" * (SIZE // 2)


def main() -> None:
    """Print a line for each bomb of nearly ten megabytes, or for those that are named; `!` marks what is over the bound."""
    globals()["SIZE"] = int(os.environ.get("CKPT_BOMB_BYTES", "9900000"))
    for name, row in BOMBS.items():
        if not sys.argv[1:] or name in sys.argv[1:]:
            found = cost(row)
            over = found.code not in (0, 1, 3) or found.seconds > SECONDS or found.megabytes > MEGABYTES
            command = row.command.replace(f"{FIXTURES}/", "")
            line = f"{found.seconds:5.1f} s {found.megabytes:5} MB {found.code} {found.told}"
            print(f"{'!' if over else ' '} {name:38} {command:45} {line}", flush=True)


if __name__ == "__main__":
    main()
