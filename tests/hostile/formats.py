"""Bombs in the other containers: zips of many or deflated records, headers, legacy streams, tars, programs, arrays, indexes."""

from __future__ import annotations

import json
import struct
import zlib
from dataclasses import replace

from tests.hostile import bombs
from tests.hostile import pickles as p
from tests.hostile.bombs import FLOATS, bomb
from tests.hostile.headers import info, safetensors
from tests.hostile.zips import (
    Rec,
    build,
    deflated,
    torch_records,
    torch_zip,
)
from tests.support.legacy import (
    HEAD,
    floats,
    persistent,
    stream,
)
from tests.support.tars import storages, torch_tar

REBUILD = p.glob("torch._utils", "_rebuild_tensor_v2")


def _whole(records: list[Rec]) -> bytes:
    """A zip with the count in its zip64 end record."""
    return build(records, count=min(0xFFFF, len(records)), wide_count=len(records))


@bomb
def row_39_storages() -> bytes:
    """As many storages as fit, each an empty record with a tensor on it."""
    count = bombs.SIZE // 190
    unit = (p.storage(f"{index:x}", 0).replace(b"FloatStorage", b"ByteStorage") for index in range(count))
    head = REBUILD + p.put(0) + b"0" + p.ORDERED_DICT + p.put(1) + b"0" + p.EMPTY_LIST + p.MARK
    rows = b"".join(p.get(0) + p.MARK + pid + b"K\x00K\x00\x85K\x01\x85" + p.FALSE + p.get(1) + b"tR" for pid in unit)
    return _whole(torch_records(p.pickle(head, rows, p.APPENDS), {f"{index:x}": b"" for index in range(count)}))


@bomb
def row_34_storage_that_inflates() -> bytes:
    """A storage of four gigabytes that was deflated to four megabytes."""
    count = min(255, bombs.SIZE // len(_zeros(1 << 24)))
    numel = (count << 24) // 4
    body = p.pickle(p.dict_of(**{"a.w": p.tensor(p.sizes(numel), p.sizes(1), on=p.storage("0", numel))}))
    records = torch_records(body, {"0": b""})
    packed = _zeros(count << 24)
    records[2] = Rec(b"archive/data/0", packed, method=8, crc=1, size=count << 24, compressed=len(packed))
    return build(records)


def _zeros(size: int) -> bytes:
    """Zeros, deflated: blocks that end on a byte, again and again."""
    packer = zlib.compressobj(9, zlib.DEFLATED, -15)
    one = packer.compress(bytes(1 << 24)) + packer.flush(zlib.Z_FULL_FLUSH)
    return one * (size >> 24) + packer.flush()


@bomb
def row_34_many_storages_that_inflate() -> bytes:
    """A thousand storages of ten megabytes, ten kilobytes each."""
    one = _zeros(1 << 24)
    count = bombs.SIZE // (len(one) + 600)
    unit = (p.storage(f"{index:x}", 1 << 22) for index in range(count))
    head = REBUILD + p.put(0) + b"0" + p.ORDERED_DICT + p.put(1) + b"0" + p.EMPTY_LIST + p.MARK
    sizes = p.sizes(1 << 22) + p.sizes(1)
    rows = b"".join(p.get(0) + p.MARK + pid + b"K\x00" + sizes + p.FALSE + p.get(1) + b"tR" for pid in unit)
    records = torch_records(p.pickle(head, rows, p.APPENDS))
    for index in range(count):
        name = b"archive/data/%x" % index
        records.insert(2, Rec(name, one, method=8, crc=1, size=1 << 24, compressed=len(one)))
    return build(records)


@bomb
def row_34_expanded_tensor() -> bytes:
    """A tensor of a terabyte on four bytes: a stride of 0."""
    wide = p.tensor(p.sizes(1 << 38), p.sizes(0), on=p.storage("0", 1))
    return torch_zip(p.pickle(p.dict_of(**{"a.w": wide})), {"0": bytes(4)})


@bomb
def row_34_many_expanded_tensors() -> bytes:
    """A thousand views of ten megabytes on one storage."""
    wide = b"".join(
        p.text(f"a.{index}") + p.tensor(p.sizes(1 << 21), p.sizes(0), on=p.storage("0", 1)) for index in range(5000)
    )
    return torch_zip(p.pickle(p.EMPTY_DICT, p.MARK, wide, p.SETITEMS), {"0": bytes(4)})


@bomb
def row_13_archives() -> bytes:
    """Whole archives one after another."""
    one = torch_zip(p.pickle(p.dict_of(w=p.tensor())), FLOATS, wide_count=4)
    return one * (bombs.SIZE // len(one))


@bomb
def row_13_archives_of_lists() -> bytes:
    """Archives one after another, each full of empty lists."""
    one = torch_zip(p.pickle(p.list_of(p.EMPTY_LIST * 300_000)), FLOATS, wide_count=4)
    return one * (bombs.SIZE // len(one))


@bomb
def row_13_zip_of_zips() -> bytes:
    """An archive of checkpoints, each full of empty lists."""
    one = torch_zip(p.pickle(p.list_of(p.EMPTY_LIST * 300_000)), FLOATS)
    return build([Rec(b"%d.pth" % index, one) for index in range(bombs.SIZE // len(one))])


@bomb
def row_13_zip_with_json() -> bytes:
    """An archive of a checkpoint and of JSON that is full of empty lists."""
    one = torch_zip(p.pickle(p.dict_of(w=p.tensor())), FLOATS)
    return build([Rec(b"a.pth", one), Rec(b"b.json", b"[" + b"[]," * (bombs.SIZE // 3) + b"1]")])


@bomb
def row_13_zip_with_deflated_json() -> bytes:
    """The same JSON, deflated, a hundred times."""
    one = torch_zip(p.pickle(p.dict_of(w=p.tensor())), FLOATS)
    lists = deflated(b"", b"[" + b"[]," * 1_000_000 + b"1]")
    return build([Rec(b"a.pth", one), *(replace(lists, name=b"%d.json" % index) for index in range(100))])


@bomb
def row_11_code() -> bytes:
    """A program with a long class."""
    code = "class A(Module):\n  __parameters__ = [" + '"a", ' * (bombs.SIZE // 5) + "]\n"
    module = p.glob("__torch__", "A") + b")\x81" + p.dict_of(a=p.tensor()) + p.BUILD
    records = torch_records(p.pickle(module), FLOATS)
    return build([*records, Rec(b"archive/constants.pkl", p.pickle(b")")), Rec(b"archive/code/__torch__.py", code.encode())])


@bomb
def row_11_many_classes() -> bytes:
    """A program with many classes."""
    code = "".join(f"class A{index}(Module):\n  __parameters__ = []\n" for index in range(bombs.SIZE // 45))
    module = p.glob("__torch__", "A1") + b")\x81" + p.dict_of(a=p.tensor()) + p.BUILD
    records = torch_records(p.pickle(module), FLOATS)
    return build([*records, Rec(b"archive/constants.pkl", p.pickle(b")")), Rec(b"archive/code/__torch__.py", code.encode())])


@bomb
def row_11_deflated_code() -> bytes:
    """Code of many megabytes, deflated."""
    module = p.glob("__torch__", "A1") + b")\x81" + p.dict_of(a=p.tensor()) + p.BUILD
    records = torch_records(p.pickle(module), FLOATS)
    constants = Rec(b"archive/constants.pkl", p.pickle(b")"))
    return build([*records, constants, deflated(b"archive/code/__torch__.py", b"class A(Module):\n" * 900_000)])


@bomb
def row_11_model_json() -> bytes:
    """A program of version 1.0 with many modules."""
    modules = ",".join('{"name":"a"}' for _ in range(bombs.SIZE // 13))
    return build([Rec(b"a/model.json", b'{"mainModule":{"submodules":[' + modules.encode() + b"]}}"), Rec(b"a/version", b"1")])


@bomb
def row_11_deep_model_json() -> bytes:
    """The same, nested."""
    return build([Rec(b"a/model.json", b'{"mainModule":' * (bombs.SIZE // 15)), Rec(b"a/version", b"1")])


@bomb
def row_76_arrays() -> bytes:
    """As many arrays as fit in a zip."""
    body = b"{'descr': '<f4', 'fortran_order': False, 'shape': (1,), }\n"
    array = b"\x93NUMPY\x01\x00" + struct.pack("<H", len(body)) + body + bytes(4)
    return _whole([Rec(b"%x.npy" % index, array) for index in range(bombs.SIZE // 180)])


@bomb
def row_76_array_of_objects() -> bytes:
    """An array of lists."""
    count = bombs.SIZE // 2
    body = b"{'descr': '|O', 'fortran_order': False, 'shape': (%d,), }\n" % count
    kind = p.call("numpy", "dtype", p.text("O8"), p.FALSE, p.TRUE)
    state = p.tuple_of(b"K\x01", p.sizes(count), kind, p.FALSE, p.list_of(p.EMPTY_LIST * count))
    array = p.call("numpy.core.multiarray", "_reconstruct", p.glob("numpy", "ndarray"), p.sizes(0), b"C\x01b") + state + p.BUILD
    return b"\x93NUMPY\x01\x00" + struct.pack("<H", len(body)) + body + p.pickle(array)


@bomb
def row_76_arrays_of_objects() -> bytes:
    """Arrays of lists in a zip."""
    count = 300_000
    body = b"{'descr': '|O', 'fortran_order': False, 'shape': (%d,), }\n" % count
    kind = p.call("numpy", "dtype", p.text("O8"), p.FALSE, p.TRUE)
    state = p.tuple_of(b"K\x01", p.sizes(count), kind, p.FALSE, p.list_of(p.EMPTY_LIST * count))
    array = p.call("numpy.core.multiarray", "_reconstruct", p.glob("numpy", "ndarray"), p.sizes(0), b"C\x01b") + state + p.BUILD
    whole = b"\x93NUMPY\x01\x00" + struct.pack("<H", len(body)) + body + p.pickle(array)
    return build([Rec(b"%x.npy" % index, whole) for index in range(bombs.SIZE // len(whole))])


@bomb
def row_76_array_of_text() -> bytes:
    """An array of many short texts."""
    count = bombs.SIZE // 5
    body = b"{'descr': '|S1', 'fortran_order': False, 'shape': (%d,), }\n" % count
    return b"\x93NUMPY\x01\x00" + struct.pack("<H", len(body)) + body + b"a" * count


@bomb
def row_80_legacy_storages() -> bytes:
    """A legacy stream of many storages."""
    count = bombs.SIZE // 110
    head = REBUILD + p.put(0) + b"0" + p.ORDERED_DICT + p.put(1) + b"0" + p.EMPTY_LIST + p.MARK
    sizes = b"K\x00K\x01\x85K\x01\x85"
    rows = b"".join(
        p.get(0) + p.MARK + persistent(str(index), 1) + sizes + p.FALSE + p.get(1) + b"tR" for index in range(count)
    )
    return stream(head + rows + p.APPENDS, *((str(index), floats(1)) for index in range(count)))


@bomb
def row_80_legacy_lists() -> bytes:
    """A legacy stream of empty lists, in each of its pickles."""
    lists = p.pickle(p.list_of(p.EMPTY_LIST * (bombs.SIZE // 2)))
    return HEAD[: -len(p.pickle(b"}"))] + p.pickle(p.dict_of(a=p.list_of(p.EMPTY_LIST * (bombs.SIZE // 2)))) + lists


@bomb
def row_80_legacy_keys() -> bytes:
    """A legacy stream with far more keys than storages."""
    keys = p.pickle(p.list_of(p.text("1") * (bombs.SIZE // 6)))
    return stream(p.dict_of(**{"a.w": p.tensor(on=persistent())}), keys=keys)


@bomb
def row_12_tar_storages() -> bytes:
    """A tar of many storages."""
    count = bombs.SIZE // 60
    stored = storages(*((index, "FloatStorage", struct.pack("<q", 0)) for index in range(count)))
    return torch_tar(p.dict_of(), stored, None)


@bomb
def row_12_pickle_of_lists() -> bytes:
    """A plain pickle of empty lists."""
    return p.pickle(p.dict_of(a=p.list_of(p.EMPTY_LIST * bombs.SIZE)))


@bomb
def row_10_index_of_tensors() -> bytes:
    """An index of shards with many names."""
    names = ",".join(f'"{index:x}":"a-00001-of-00002.safetensors"' for index in range(bombs.SIZE // 40))
    return ('{"metadata":{},"weight_map":{' + names + "}}").encode()


@bomb
def row_10_index_of_shards() -> bytes:
    """An index of shards with many files."""
    names = ",".join(f'"{index:x}":"{index:x}.safetensors"' for index in range(bombs.SIZE // 30))
    return ('{"metadata":{},"weight_map":{' + names + "}}").encode()


@bomb
def row_10_index_of_lists() -> bytes:
    """An index of shards that is something else."""
    return b'{"weight_map":[' + b"[]," * (bombs.SIZE // 3) + b"1]}"


@bomb
def row_82_header_with_fields() -> bytes:
    """An unknown field full of lists."""
    return safetensors('{"a":{"dtype":"U8","shape":[0],"data_offsets":[0,0],"x":[' + "[]," * (bombs.SIZE // 3) + "1]}}")


@bomb
def row_82_header_of_metadata() -> bytes:
    """Metadata with many keys."""
    rows = {f"{index:x}": "" for index in range(bombs.SIZE // 12)}
    return safetensors(json.dumps({"__metadata__": rows, "a": info("U8", [0], [0, 0])}, separators=(",", ":")))


@bomb
def row_82_header_of_long_names() -> bytes:
    """Names of many parts."""
    rows = {f"{index}." * 1000: info("U8", [0], [0, 0]) for index in range(10, bombs.SIZE // 4000)}
    return safetensors(json.dumps(rows, separators=(",", ":")))


@bomb
def row_75_metadata_of_modules() -> bytes:
    """Our own metadata of modules, with a row for everything."""
    paths = json.dumps({f"{index:x}": {"version": 1} for index in range(bombs.SIZE // 40)}, separators=(",", ":"))
    return safetensors({"__metadata__": {"ckpt_tools.state_dict_metadata": paths}, "w": info("U8", [1], [0, 1])}, b"\0")
