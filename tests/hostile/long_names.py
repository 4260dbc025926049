"""Bombs that are made of text: long names that many places share, names of a million parts, records without an end."""

from __future__ import annotations

import json
import struct
import zlib

from tests.hostile import bombs
from tests.hostile import pickles as p
from tests.hostile.bombs import FLOATS, bomb, repeated
from tests.hostile.headers import info, safetensors
from tests.hostile.zips import torch_zip


def _long(share: int = 2) -> bytes:
    """A text that takes a part of the file."""
    return p.text("k" * (bombs.SIZE // share))


@bomb
def row_65_long_key_in_many_dicts() -> bytes:
    """One long key, in each of many dicts, above a value."""
    before = _long() + p.put(0) + b"0" + p.EMPTY_LIST + p.MARK
    return repeated(before, p.EMPTY_DICT + p.get(0) + b"K\x01s", p.APPENDS)


@bomb
def row_65_long_name_in_many_state_dicts() -> bytes:
    """One long name of one tensor, in each of many state dicts."""
    before = _long() + p.put(0) + b"0" + p.tensor() + p.put(1) + b"0" + p.EMPTY_LIST + p.MARK
    return repeated(before, p.EMPTY_DICT + p.get(0) + p.get(1) + p.SETITEM, p.APPENDS)


@bomb
def row_46_long_global_of_many_objects() -> bytes:
    """Many objects of one class with a long name."""
    before = p.glob("m", "C" * (bombs.SIZE // 2)) + p.put(0) + b"0" + p.tensor() + b"0" + p.EMPTY_LIST + p.MARK
    return repeated(before, p.get(0) + b")R", p.APPENDS)


@bomb
def row_46_long_global_everywhere() -> bytes:
    """The same class, not called."""
    before = p.glob("m", "C" * (bombs.SIZE // 2)) + p.put(0) + b"0" + p.tensor() + b"0" + p.EMPTY_LIST + p.MARK
    return repeated(before, p.get(0), p.APPENDS)


@bomb
def row_74_long_device_tag() -> bytes:
    """Many storages on one device with a long name."""
    before = _long() + p.put(0) + b"0" + p.glob("torch", "FloatStorage") + p.put(1) + b"0" + p.text("storage") + p.put(2) + b"0"
    before += p.glob("torch._utils", "_rebuild_tensor_v2") + p.put(3) + b"0" + p.EMPTY_LIST + p.MARK
    unit = (
        p.get(3) + p.MARK + p.MARK + p.get(2) + p.get(1) + p.text("0") + p.get(0) + b"K\x06tQK\x00" + p.sizes(2) + p.sizes(1)
        + p.FALSE + p.ORDERED_DICT + b"tR"
    )  # fmt: skip
    return repeated(before, unit, p.APPENDS)


@bomb
def row_66_name_of_many_parts() -> bytes:
    """A name with a million dots, and metadata of modules."""
    name = p.text("a." * (bombs.SIZE // 4))
    state = p.ORDERED_DICT + p.MARK + name + p.put(0) + p.tensor() + p.SETITEMS
    rows = p.dict_of(
        _metadata=p.ORDERED_DICT + p.MARK + p.text("") + p.dict_of(version=b"K\x01") + p.get(0) + b"}" + p.SETITEMS
    )
    return torch_zip(p.pickle(state, rows, p.BUILD), FLOATS)


@bomb
def row_66_name_of_many_wrappers() -> bytes:
    """A name that is `module.` again and again."""
    name = p.text("module." * (bombs.SIZE // 8) + "w")
    return torch_zip(p.pickle(p.EMPTY_DICT + p.MARK + name + p.tensor() + p.SETITEMS), FLOATS)


@bomb
def row_66_name_of_many_inner_wrappers() -> bytes:
    """The same with all wrappers in turn."""
    name = p.text("module._orig_mod._fsdp_wrapped_module." * (bombs.SIZE // 40) + "w")
    return torch_zip(p.pickle(p.EMPTY_DICT + p.MARK + name + p.tensor() + p.SETITEMS), FLOATS)


@bomb
def row_63_decimal_number() -> bytes:
    """A number of millions of digits, written as text."""
    return torch_zip(p.pickle(p.dict_of(w=p.tensor(), x=b"L" + b"9" * (bombs.SIZE // 2) + b"L\n")), FLOATS)


@bomb
def row_66_escapes() -> bytes:
    """A string literal of nothing but escapes."""
    return torch_zip(p.pickle(p.dict_of(w=p.tensor(), x=b"S'" + b"\\a" * (bombs.SIZE // 2) + b"'\n")), FLOATS)


@bomb
def row_56_far_memo() -> bytes:
    """As many memo entries as fit, all far apart."""
    units = b"".join(b"r" + struct.pack("<I", 1000 * index + 7) for index in range(bombs.SIZE // 5))
    return torch_zip(p.pickle(b"N" + units), FLOATS)


@bomb
def row_61_set_of_colliding_numbers() -> bytes:
    """A set of numbers that all have one hash."""
    step = 2**61 - 1
    items = b"".join(b"\x8a\x0b" + (step * index).to_bytes(11, "little") for index in range(1, bombs.SIZE // 13))
    value = p.glob("builtins", "set") + p.list_of(items) + p.TUPLE1 + p.REDUCE
    return torch_zip(p.pickle(p.dict_of(w=p.tensor(), x=value)), FLOATS)


@bomb
def row_61_frozensets_of_frozensets() -> bytes:
    """Frozen sets in frozen sets as keys: hashing them would take for ever."""
    before = p.glob("builtins", "frozenset") + p.put(0) + b"0" + p.EMPTY_LIST + p.put(1) + b"0"
    level = p.get(0) + p.EMPTY_LIST + p.MARK + p.get(1) + p.get(1) + p.APPENDS + p.TUPLE1 + p.REDUCE + p.put(1) + b"0"
    return torch_zip(p.pickle(before, level * 60, p.EMPTY_DICT, p.get(1), p.NONE, p.SETITEM), FLOATS)


@bomb
def row_15_many_local_headers() -> bytes:
    """Records without a directory, each with a descriptor."""
    pickle = p.pickle(p.dict_of(w=p.tensor()))
    out = [_local(b"archive/data.pkl", pickle)]
    one = _local(b"a", b"")
    return b"".join([*out, one * (bombs.SIZE // len(one))])


def _local(name: bytes, data: bytes) -> bytes:
    """A record as torch writes it: no sizes in its header, but in the descriptor behind it."""
    header = struct.pack("<4s5H3I2H", b"PK\x03\x04", 20, 8, 0, 0, 0, 0, 0, 0, len(name), 0) + name
    return header + data + struct.pack("<4s3I", b"PK\x07\x08", zlib.crc32(data), len(data), len(data))


@bomb
def row_15_descriptor_signatures() -> bytes:
    """Nothing but descriptors that do not fit."""
    return _local(b"archive/data.pkl", b"")[:46] + b"PK\x07\x08" * (bombs.SIZE // 4)


@bomb
def row_19_end_signatures() -> bytes:
    """The end of the file full of end records."""
    return torch_zip(p.pickle(p.dict_of(w=p.tensor())), FLOATS) + b"PK\x05\x06" * 16_000


@bomb
def row_88_extra_fields() -> bytes:
    """An unknown field for every tensor."""
    rows = {f"{index:x}": info("U8", [0], [0, 0], x=0) for index in range(bombs.SIZE // 72)}
    return safetensors(json.dumps(rows, separators=(",", ":")))


@bomb
def row_87_long_key_twice() -> bytes:
    """A long key that is there twice."""
    key = "k" * (bombs.SIZE // 2 - 100)
    row = f'"{key}":{{"dtype":"U8","shape":[0],"data_offsets":[0,0]}}'
    return safetensors("{" + row + "," + row + "}")


@bomb
def row_87_key_of_an_index_twice() -> bytes:
    """An index of many names, of which the last is there twice."""
    names = [f'"{index:x}":"a"' for index in range(bombs.SIZE // 11)]
    return f'{{"weight_map":{{{",".join([*names, names[-1]])}}}}}'.encode()


@bomb
def row_82_metadata_that_is_json() -> bytes:
    """Metadata of ours that is deep inside."""
    return safetensors({"__metadata__": {"ckpt_tools.state_dict_metadata": "[" * (bombs.SIZE // 2)}})


@bomb
def row_50_calls_in_calls() -> bytes:
    """A call of a call of a call."""
    return torch_zip(p.pickle(p.dict_of(w=p.tensor(), x=p.glob("m", "f") + b")R" * (bombs.SIZE // 3))), FLOATS)


@bomb
def row_52_states_in_states() -> bytes:
    """An object built again and again with itself."""
    return torch_zip(p.pickle(p.dict_of(w=p.tensor(), x=p.glob("m", "f") + b")R" + b"2b" * (bombs.SIZE // 3))), FLOATS)


@bomb
def row_60_one_object_appended_to() -> bytes:
    """An object that is given ten thousand lists of steps, in a million places."""
    before = p.glob("m", "C") + b")R" + b"Na" * (bombs.SIZE // 20) + p.put(0) + b"0" + p.EMPTY_LIST + p.MARK
    return repeated(before, p.get(0), p.APPENDS)


@bomb
def row_60_one_object_in_a_list() -> bytes:
    """Millions of references to one object."""
    return repeated(p.glob("m", "C") + b")R" + p.put(0) + b"0" + p.EMPTY_LIST + p.MARK, p.get(0), p.APPENDS)
