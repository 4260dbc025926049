"""Files of at most ten megabytes that are made to cost a reader much more: each returns the bytes of a file."""

from __future__ import annotations

import json
import struct
from collections.abc import Callable

from tests.hostile import pickles as p
from tests.hostile.headers import info, safetensors
from tests.hostile.zips import (
    Rec,
    build,
    deflated,
    torch_records,
    torch_zip,
)

SIZE = 9_900_000  # of the pickle, where a unit is repeated; tests set it lower
FLOATS = {"0": bytes(24)}
BOMBS: dict[str, Callable[[], bytes]] = {}


def bomb(make: Callable[[], bytes]) -> Callable[[], bytes]:
    """Enter a builder in the table."""
    BOMBS[make.__name__] = make
    return make


def repeated(before: bytes, unit: bytes, after: bytes) -> bytes:
    """A torch-zip with a pickle of SIZE bytes, most of them the same again and again."""
    return torch_zip(p.pickle(before + unit * (max(0, SIZE - len(before)) // len(unit)) + after), FLOATS)


def keyed(before: bytes, unit: bytes, after: bytes) -> bytes:
    """The same as a dict beside one tensor, so that a conversion has something to do."""
    return repeated(p.EMPTY_DICT + p.MARK + p.text("a.w") + p.tensor() + p.text("x") + before, unit, after + p.SETITEMS)


@bomb
def row_62_empty_dicts() -> bytes:
    """Nothing but EMPTY_DICT."""
    return repeated(b"", p.EMPTY_DICT, b"")


@bomb
def row_62_empty_lists_in_a_list() -> bytes:
    """As many empty lists as the budget lets pass."""
    return keyed(p.EMPTY_LIST + p.MARK, p.EMPTY_LIST + b"\x8a\x04\x00\x00\x00\x01", p.APPENDS)


@bomb
def row_62_nones_in_a_list() -> bytes:
    """A list of ten million times None."""
    return keyed(p.EMPTY_LIST + p.MARK, p.NONE, p.APPENDS)


@bomb
def row_62_nones_in_a_tuple() -> bytes:
    """A tuple of ten million times None."""
    return keyed(p.MARK, p.NONE, p.TUPLE)


@bomb
def row_62_pairs() -> bytes:
    """A dict with one key, set five million times."""
    return keyed(p.EMPTY_DICT + p.MARK, p.NONE + p.NONE, p.SETITEMS)


@bomb
def row_62_numbers_of_three_bytes() -> bytes:
    """Three million ints that Python does not share."""
    return keyed(p.EMPTY_LIST + p.MARK, b"M\x01\x77", p.APPENDS)


@bomb
def row_62_globals() -> bytes:
    """A million different globals."""
    names = b"".join(b"c%x\nx\n0" % index for index in range(SIZE // 9))
    return torch_zip(p.pickle(names + p.dict_of(w=p.tensor())), FLOATS)


@bomb
def row_58_marks() -> bytes:
    """Nothing but MARK."""
    return repeated(b"", p.MARK, b"")


@bomb
def row_58_nested_lists() -> bytes:
    """A million lists, each in the next."""
    return torch_zip(p.pickle(p.EMPTY_LIST * 1_000_000 + p.APPEND * 999_999))


@bomb
def row_58_deep_by_one_path_only() -> bytes:
    """Every list is near the root by one path and very deep by another, the first that a walk takes."""
    count = SIZE // 25
    chain = b"".join(p.EMPTY_LIST + p.get(index - 1) + p.APPEND + p.put(index) + b"0" for index in range(1, count))
    refs = b"".join(p.get(index) for index in range(count - 1, 0, -1))
    return torch_zip(p.pickle(p.EMPTY_LIST, p.put(0), b"0", chain, p.list_of(refs)))


@bomb
def row_58_leaves_far_down() -> bytes:
    """Five million values below a thousand lists: every path is a thousand long."""
    return repeated(p.EMPTY_LIST * 900 + p.MARK, b"K\x01", p.APPENDS + p.APPEND * 899)


@bomb
def row_58_tensors_far_down() -> bytes:
    """The same with one tensor, five million times."""
    before = p.tensor() + p.put(0) + b"0" + p.EMPTY_LIST * 900 + p.MARK
    return repeated(before, p.get(0), p.APPENDS + p.APPEND * 899)


@bomb
def row_58_state_dicts_in_state_dicts() -> bytes:
    """A chain of dicts, each with the next one first and a tensor last."""
    before = p.tensor() + p.put(0) + b"0" + p.text("c") + p.put(1) + b"0" + p.text("t") + p.put(2) + b"0"
    chain = (p.EMPTY_DICT + p.MARK + p.get(1)) * 900 + p.EMPTY_DICT + (p.get(2) + p.get(0) + p.SETITEMS) * 900
    return repeated(before + p.EMPTY_LIST + p.MARK, chain, p.APPENDS)


@bomb
def row_60_one_tensor_in_a_list() -> bytes:
    """Five million references to one tensor."""
    return repeated(p.tensor() + p.put(0) + b"0" + p.EMPTY_LIST + p.MARK, p.get(0), p.APPENDS)


@bomb
def row_60_one_list_in_a_list() -> bytes:
    """Five million references to one empty list."""
    return repeated(p.EMPTY_LIST + p.put(0) + b"0" + p.EMPTY_LIST + p.MARK, p.get(0), p.APPENDS)


@bomb
def row_60_wide_list_shared() -> bytes:
    """A long list, a million times in another."""
    wide = p.list_of(p.NONE * (SIZE // 10)) + p.put(0) + b"0"
    return repeated(wide + p.EMPTY_LIST + p.MARK, p.get(0), p.APPENDS)


@bomb
def row_60_laughs() -> bytes:
    """Sixty levels, each holding the one below ten times: 10**60 values, a kilobyte."""
    levels = b"".join(p.list_of(p.get(level) * 10) + p.put(level + 1) for level in range(60))
    return torch_zip(p.pickle(p.dict_of(w=p.tensor(), x=p.EMPTY_LIST + p.put(0) + levels + p.TUPLE2 * 60)), FLOATS)


def calls_of_laughs() -> bytes:
    """What Python looks at by its class, as a call of a tuple of sixty levels, each holding the one below twice."""
    levels = b"".join(p.get(level) * 2 + p.TUPLE2 + p.put(level + 1) for level in range(60))
    made = p.EMPTY_TUPLE + p.put(0) + levels + p.EMPTY_TUPLE + p.REDUCE + p.put(100)
    eight, again = b"C\x08" + bytes(8), p.get(100)
    array = p.call("numpy.core.multiarray", "_reconstruct", p.glob("numpy", "ndarray"), p.sizes(0), b"C\x01b")
    return p.list_of(
        made,
        p.call("numpy.core.multiarray", "scalar", again, eight),
        array + p.tuple_of(b"K\x01", p.sizes(1), again, p.FALSE, eight) + p.BUILD,
        p.call("numpy.core.numeric", "_frombuffer", again, again, p.sizes(1), p.text("C")),
        p.call("torch.nn.parameter", "Parameter", again),
        p.call("datetime", "datetime", b"C\x0a\x07\xe8" + b"\1" * 8, again),
    )


@bomb
def row_60_calls_of_laughs() -> bytes:
    """Objects whose class is looked at, made by a call of a tuple that would take 2**60 parts to write or to hash."""
    return torch_zip(p.pickle(p.dict_of(w=p.tensor(), x=calls_of_laughs())), FLOATS)


@bomb
def row_60_calls_of_laughs_in_a_pickle() -> bytes:
    """The same without torch around it, where arrays are tensors."""
    return p.pickle(p.dict_of(x=calls_of_laughs()))


@bomb
def row_60_bytes_made_again_and_again() -> bytes:
    """A long text, encoded a million times by calls that share their arguments."""
    before = p.glob("_codecs", "encode") + p.put(0) + p.text("x" * (SIZE // 10)) + p.text("latin1") + p.TUPLE2 + p.put(1)
    return repeated(before + b"00" + p.EMPTY_LIST + p.MARK, p.get(0) + p.get(1) + p.REDUCE, p.APPENDS)


@bomb
def row_60_ordered_dicts_made_again_and_again() -> bytes:
    """A list of pairs, made into an OrderedDict a million times."""
    items = p.list_of(p.list_of(b"K\x01K\x02") + p.put(9), p.get(9) * (SIZE // 20))
    before = p.glob("collections", "OrderedDict") + p.put(0) + items + p.TUPLE1 + p.put(1) + b"00"
    return repeated(before + p.EMPTY_LIST + p.MARK, p.get(0) + p.get(1) + p.REDUCE, p.APPENDS)


@bomb
def row_60_attributes_set_again_and_again() -> bytes:
    """One state, set a million times as the attributes of an OrderedDict."""
    state = p.EMPTY_DICT + p.MARK + p.NONE * (SIZE // 10) + p.SETITEMS + p.put(0) + b"0"
    return repeated(state + p.ORDERED_DICT, p.get(0) + p.BUILD, b"")


@bomb
def row_60_tensor_of_many_dimensions() -> bytes:
    """A tensor of a thousand dimensions, rebuilt a million times from one tuple of arguments."""
    ones = p.sizes(*[1] * 1000)
    args = p.tuple_of(p.storage(), b"K\x00", ones, ones, p.FALSE, p.ORDERED_DICT)
    before = p.glob("torch._utils", "_rebuild_tensor_v2") + p.put(0) + args + p.put(1) + b"00"
    return repeated(before + p.EMPTY_LIST + p.MARK, p.get(0) + p.get(1) + p.REDUCE, p.APPENDS)


@bomb
def row_60_parameters_in_parameters() -> bytes:
    """An unusual tensor in a parameter in a parameter, thousands deep, a million times."""
    inner = p.call(
        "torch._utils", "_rebuild_meta_tensor_no_storage", p.glob("torch", "float32"), p.sizes(1), p.sizes(1), p.FALSE
    )
    head = p.glob("torch._utils", "_rebuild_parameter")
    chain = inner + (b"1" + p.FALSE + p.NONE + p.TUPLE3 + p.REDUCE).replace(b"1", b"") * 9000
    return repeated(head * 9000 + chain + p.put(0) + b"0" + p.EMPTY_LIST + p.MARK, p.get(0), p.APPENDS)


@bomb
def row_61_colliding_keys() -> bytes:
    """Keys that all have Python's hash 0."""
    step = 2**61 - 1
    keys = b"".join(b"\x8a\x0b" + (step * index).to_bytes(11, "little") + p.NONE for index in range(1, SIZE // 14))
    return torch_zip(p.pickle(p.dict_of(w=p.tensor(), x=p.EMPTY_DICT + p.MARK + keys + p.SETITEMS)), FLOATS)


@bomb
def row_61_colliding_paths() -> bytes:
    """State dicts under such keys."""
    step = 2**61 - 1
    value = p.EMPTY_DICT + p.get(1) + p.get(0) + p.SETITEM
    keys = b"".join(b"\x8a\x0b" + (step * index).to_bytes(11, "little") + value for index in range(1, SIZE // 100))
    before = p.tensor() + p.put(0) + b"0" + p.text("a.w") + p.put(1) + b"0"
    return torch_zip(p.pickle(before, p.EMPTY_DICT, p.MARK, keys, p.SETITEMS), FLOATS)


@bomb
def row_59_wide_tuple_as_every_key() -> bytes:
    """A long tuple, as the key of a million dicts."""
    before = p.MARK + p.NONE * (SIZE // 10) + p.TUPLE + p.put(0) + b"0"
    return repeated(before + p.EMPTY_LIST + p.MARK, p.EMPTY_DICT + p.get(0) + p.NONE + p.SETITEM, p.APPENDS)


@bomb
def row_59_wide_tuple_in_a_key() -> bytes:
    """A long tuple, a million times in a tuple that is a key."""
    before = p.EMPTY_DICT + p.MARK + p.NONE * (SIZE // 10) + p.TUPLE + p.put(0) + b"0" + p.MARK
    return repeated(before, p.get(0), p.TUPLE + p.NONE + p.SETITEM)


@bomb
def row_63_long_number() -> bytes:
    """A whole number of megabytes, as a value and as a key."""
    number = b"\x8b" + struct.pack("<i", 3_000_000) + b"\x7f" * 3_000_000
    return torch_zip(
        p.pickle(p.EMPTY_DICT + p.MARK + p.text("w") + p.tensor() + p.text("n") + number + number + p.NONE + b"u"), FLOATS
    )


@bomb
def row_65_long_key_above_many() -> bytes:
    """A key of megabytes above many values."""
    before = p.EMPTY_DICT + p.MARK + p.text("w") + p.tensor() + p.put(0) + p.text("k" * (SIZE // 2)) + p.EMPTY_LIST + p.MARK
    return repeated(before, p.get(0) + p.list_of(), p.APPENDS + p.SETITEMS)


@bomb
def row_34_pickle_that_inflates() -> bytes:
    """A pickle of fifty megabytes that was deflated to fifty kilobytes."""
    records = torch_records(b"", FLOATS)
    data = p.pickle(p.NONE * 50_000_000)
    records[0] = deflated(b"archive/data.pkl", data)
    return build(records)


@bomb
def row_39_records() -> bytes:
    """Many empty records."""
    more = [Rec(b"archive/%x" % index) for index in range(SIZE // 100)]
    rows = [*torch_records(p.pickle(p.dict_of(w=p.tensor())), FLOATS), *more]
    return build(rows, count=min(0xFFFF, len(rows)), wide_count=len(rows))


@bomb
def row_82_header_of_many_tensors() -> bytes:
    """Many empty tensors."""
    rows = {f"{index:x}": info("U8", [0], [0, 0]) for index in range(SIZE // 66)}
    return safetensors(json.dumps(rows, separators=(",", ":")))


@bomb
def row_82_header_of_digits() -> bytes:
    """A shape of millions of sizes."""
    return safetensors('{"a":{"dtype":"F32","shape":[' + "1," * (SIZE // 2) + '1],"data_offsets":[0,4]}}', bytes(4))


@bomb
def row_82_nested_brackets() -> bytes:
    """Brackets in brackets."""
    return safetensors('{"a":' + "[" * (SIZE // 2) + "]" * (SIZE // 2) + "}")


@bomb
def row_75_aliases() -> bytes:
    """Many tied names, each to be put in front."""
    aliases = json.dumps({f"{index:x}": {"of": "w", "index": 0} for index in range(SIZE // 66)}, separators=(",", ":"))
    return safetensors({"__metadata__": {"ckpt_tools.aliases": aliases}, "w": info("U8", [1], [0, 1])}, b"\0")
