"""Bombs just below the limits of what a pickle may hold: as many containers, objects, tensors and values as are let pass."""

from __future__ import annotations

from collections.abc import Callable

from ckpt_tools import limits
from ckpt_tools.io.content import Literal
from ckpt_tools.pickling.reader import Machine
from ckpt_tools.pickling.torch_objects import MAKERS, Storages
from tests.hostile import bombs
from tests.hostile import pickles as p
from tests.hostile.bombs import FLOATS, bomb
from tests.hostile.zips import torch_zip

KNOWN = p.glob("collections", "Counter")  # an object, and plain data


def crowd(unit: bytes, before: bytes = p.EMPTY_LIST + p.MARK, after: bytes = p.APPENDS) -> bytes:
    """A torch-zip of SIZE bytes in which `unit` is repeated as often as it fits in, and as its reader's budget lets pass.

    Memo 0 is a tensor, 1 an object, 2 a known global, 3 an unknown one, 4 a short text.
    """
    memo = p.tensor() + p.put(0) + b"0" + KNOWN + p.put(2) + b")R" + p.put(1) + b"0" + p.glob("m", "C") + p.put(3) + b"0"
    memo += p.text("key") + p.put(4) + b"0"
    head = memo + p.EMPTY_DICT + p.MARK + p.text("a.w") + p.get(0) + p.text("x") + before

    def stream(count: int, filler: int = 0) -> bytes:
        rest = b"B" + filler.to_bytes(4, "little") + bytes(filler)
        return p.pickle(head, unit * count, after, p.text("filler"), rest, p.SETITEMS)

    room = bombs.SIZE - len(head) - 1000
    count = int(min(_affordable(stream), room / len(unit))) if unit else 0
    return torch_zip(stream(count, room - count * len(unit)), FLOATS)


def _affordable(stream: Callable[[int], bytes]) -> float:
    """How many units the budget of a file of SIZE bytes pays for, by what some hundreds of them cost."""
    few, many = _left(stream(200)), _left(stream(1000))
    cost, light = (few.containers - many.containers) / 800, (many.light - few.light) / 800
    most = limits.Budget(bombs.SIZE).containers - 1000
    return min(most / (cost or 1e-9), (most + limits.FREE_LIGHT) / (cost + light or 1e-9))


def _left(stream: bytes) -> limits.Budget:
    """What reading a pickle leaves of a large budget."""
    with limits.of_file(1 << 30):
        machine = Machine(stream, MAKERS, Storages(lambda key, nbytes: Literal(bytes(nbytes))).storage)
        machine.load()
        return machine.shared


@bomb
def row_62_most_empty_lists() -> bytes:
    """Empty lists."""
    return crowd(p.EMPTY_LIST)


@bomb
def row_62_most_empty_dicts() -> bytes:
    """Empty dicts."""
    return crowd(p.EMPTY_DICT)


@bomb
def row_62_most_tuples() -> bytes:
    """Tuples of one number."""
    return crowd(b"M\x01\x77\x85")


@bomb
def row_62_most_lists_of_a_tensor() -> bytes:
    """Lists that hold the one tensor."""
    return crowd(p.EMPTY_LIST + p.get(0) + p.APPEND)


@bomb
def row_62_most_lists_of_a_global() -> bytes:
    """Lists that hold a class that is known to be harmless."""
    return crowd(p.EMPTY_LIST + p.get(2) + p.APPEND)


@bomb
def row_62_most_tuples_of_a_global() -> bytes:
    """Tuples of it."""
    return crowd(p.get(2) + p.TUPLE1)


@bomb
def row_62_most_tuples_of_a_tensor() -> bytes:
    """Tuples of the one tensor."""
    return crowd(p.get(0) + p.TUPLE1)


@bomb
def row_62_most_tuples_of_a_storage_class() -> bytes:
    """Tuples of a class that every tensor names."""
    return crowd(p.get(5) + p.TUPLE1, p.glob("torch", "FloatStorage") + p.put(5) + b"0" + p.EMPTY_LIST + p.MARK)


@bomb
def row_62_most_instances_of_storages() -> bytes:
    """Instances of it, which no pickle of torch makes."""
    return crowd(p.get(5) + b")\x81", p.glob("torch", "FloatStorage") + p.put(5) + b"0" + p.EMPTY_LIST + p.MARK)


@bomb
def row_62_most_empty_numpy_numbers() -> bytes:
    """Numbers of NumPy that are called with nothing."""
    before = p.glob("numpy.core.multiarray", "scalar") + p.put(5) + b"0" + p.EMPTY_LIST + p.MARK
    return crowd(p.get(5) + b")R", before)


@bomb
def row_62_most_tuples_in_lists() -> bytes:
    """Lists of an empty list."""
    return crowd(p.EMPTY_LIST + p.TUPLE1)


@bomb
def row_62_most_tuples_in_tuples_in_lists() -> bytes:
    """Lists of an empty list, one level further down."""
    return crowd(p.EMPTY_LIST + p.TUPLE1 + p.TUPLE1)


@bomb
def row_62_most_state_dicts() -> bytes:
    """Dicts with one tensor."""
    return crowd(p.EMPTY_DICT + p.get(4) + p.get(0) + p.SETITEM)


@bomb
def row_62_most_pairs() -> bytes:
    """One dict with as many keys as it may have."""
    count = (limits.Budget(bombs.SIZE).containers - 1000) * 4 // 3
    keys = b"".join(b"J" + index.to_bytes(4, "little") + p.NONE for index in range(min(count, (bombs.SIZE - 2000) // 6)))
    return crowd(b"", p.EMPTY_DICT + p.MARK + keys, p.SETITEMS)


@bomb
def row_62_most_known_objects() -> bytes:
    """Counters."""
    return crowd(p.get(2) + b")R")


@bomb
def row_62_most_unknown_objects() -> bytes:
    """Objects of a class that nobody knows."""
    return crowd(p.get(3) + b")R")


@bomb
def row_62_most_objects_with_a_state() -> bytes:
    """Objects with a dict of attributes."""
    return crowd(p.get(3) + b")\x81" + p.EMPTY_DICT + p.get(4) + p.get(4) + p.SETITEM + p.BUILD)


@bomb
def row_62_most_named_tuples() -> bytes:
    """Namespaces with a dict of attributes."""
    before = p.glob("argparse", "Namespace") + p.put(2) + b"0" + p.EMPTY_LIST + p.MARK
    return crowd(p.get(2) + b")\x81" + p.EMPTY_DICT + p.get(4) + p.get(4) + p.SETITEM + p.BUILD, before)


@bomb
def row_62_most_sets() -> bytes:
    """Sets of a number."""
    before = p.glob("builtins", "set") + p.put(2) + b"0" + p.EMPTY_LIST + p.MARK
    return crowd(p.get(2) + p.EMPTY_LIST + b"K\x01a" + p.TUPLE1 + p.REDUCE, before)


@bomb
def row_62_most_numpy_numbers() -> bytes:
    """NumPy scalars on one dtype."""
    dtype = p.glob("numpy", "dtype") + p.text("f8") + b"K\x00K\x01" + p.TUPLE3 + p.REDUCE + p.put(3) + b"0"
    before = dtype + p.glob("numpy.core.multiarray", "scalar") + p.put(2) + b"0" + p.EMPTY_LIST + p.MARK
    return crowd(p.get(2) + p.get(3) + b"C\x08" + bytes(8) + p.TUPLE2 + p.REDUCE, before)


@bomb
def row_62_most_numpy_arrays() -> bytes:
    """NumPy arrays of one number."""
    dtype = p.glob("numpy", "dtype") + p.text("f8") + b"K\x00K\x01" + p.TUPLE3 + p.REDUCE + p.put(3) + b"0"
    empty = p.glob("numpy", "ndarray") + p.put(5) + b"0K\x00" + p.TUPLE1 + p.put(6) + b"0"
    before = dtype + empty + p.glob("numpy.core.multiarray", "_reconstruct") + p.put(2) + b"0" + p.EMPTY_LIST + p.MARK
    made = p.get(2) + p.get(5) + p.get(6) + b"C\x01b" + p.TUPLE3 + p.REDUCE
    state = p.MARK + b"K\x01K\x01" + p.TUPLE1 + p.get(3) + p.FALSE + b"C\x08" + bytes(8) + p.TUPLE
    return crowd(made + state + p.BUILD, before)


@bomb
def row_62_most_complex_numbers() -> bytes:
    """Complex numbers, which an old torch takes only as tensors."""
    before = p.glob("builtins", "complex") + p.put(2) + b"0" + p.EMPTY_LIST + p.MARK
    return crowd(p.get(2) + b"G" + bytes(8) + b"G" + bytes(8) + p.TUPLE2 + p.REDUCE, before)


@bomb
def row_62_most_ordered_dicts() -> bytes:
    """OrderedDicts with an attribute."""
    before = p.glob("collections", "OrderedDict") + p.put(2) + b"0" + p.EMPTY_DICT + p.get(4) + p.get(4) + p.SETITEM + p.put(3)
    return crowd(p.get(2) + b")R" + p.get(3) + p.BUILD, before + b"0" + p.EMPTY_LIST + p.MARK)


@bomb
def row_62_most_tensors() -> bytes:
    """Tensors of their own on one storage."""
    args = p.storage() + p.put(2) + b"0" + p.ORDERED_DICT + p.put(3) + b"0" + p.glob("torch._utils", "_rebuild_tensor_v2")
    before = args + p.put(5) + b"0" + p.EMPTY_LIST + p.MARK
    return crowd(p.get(5) + p.MARK + p.get(2) + b"K\x00)" + b")" + p.FALSE + p.get(3) + p.TUPLE + p.REDUCE, before)


@bomb
def row_62_most_modules() -> bytes:
    """Modules without parameters."""
    tables = p.EMPTY_DICT + p.MARK + b"".join(p.text(name) + p.EMPTY_DICT for name in ("_parameters", "_buffers", "_modules"))
    before = tables + p.SETITEMS + p.put(2) + b"0" + p.EMPTY_LIST + p.MARK
    return crowd(p.get(3) + b")\x81" + p.get(2) + p.BUILD, before)


@bomb
def row_62_most_calls_with_lists() -> bytes:
    """Objects made of lists of a tensor."""
    return crowd(p.get(3) + p.EMPTY_LIST + p.get(0) + p.APPEND + p.TUPLE1 + p.REDUCE)


@bomb
def row_62_most_texts() -> bytes:
    """Short texts."""
    return crowd(b"\x8c\x02ab")


@bomb
def row_62_most_bytes() -> bytes:
    """Short strings of bytes, which an old torch takes only as tensors."""
    return crowd(b"C\x02ab")


@bomb
def row_62_most_byte_strings() -> bytes:
    """Python 2's strings that are not text."""
    return crowd(b"U\x02\xff\xfe")


@bomb
def row_62_most_numbers() -> bytes:
    """Whole numbers of five bytes."""
    return crowd(b"J\x01\x00\x01\x01")


@bomb
def row_62_most_small_numbers() -> bytes:
    """Whole numbers of one byte."""
    return crowd(b"K\x01")


@bomb
def row_62_most_references() -> bytes:
    """The same text again and again."""
    return crowd(p.get(4))


@bomb
def row_62_most_references_to_a_long_text() -> bytes:
    """A text just short enough to be written each time, again and again: thirty times as long where it is."""
    return crowd(p.get(5), p.text("k" * 64) + p.put(5) + b"0" + p.EMPTY_LIST + p.MARK)


@bomb
def row_62_most_references_between_constants() -> bytes:
    """The same text again and again, never twice in a row."""
    return crowd(p.get(4) + p.NONE)


@bomb
def row_62_most_texts_of_python_2() -> bytes:
    """Short texts as Python 2 writes them."""
    return crowd(b"U\x02ab")


@bomb
def row_62_most_decimal_fractions() -> bytes:
    """Numbers as lines of text, each three bytes and an object of Python's."""
    return crowd(b"F1\n")


@bomb
def row_62_most_references_to_an_object() -> bytes:
    """The same Counter again and again."""
    return crowd(p.get(1))


@bomb
def row_62_most_memo_entries() -> bytes:
    """One value, memoized again and again."""
    return crowd(b"q\x05", p.NONE, b"")


@bomb
def row_62_most_globals() -> bytes:
    """Globals that are popped."""
    return crowd(b"cm\nC\n")


@bomb
def row_62_most_pops() -> bytes:
    """Values that are thrown away."""
    return crowd(b"N0", p.NONE, b"")


@bomb
def row_62_most_empty_batches() -> bytes:
    """APPENDS of nothing."""
    return crowd(p.MARK + p.APPENDS, p.EMPTY_LIST, b"")


@bomb
def row_62_most_lists_in_lists() -> bytes:
    """Chains of a hundred lists."""
    return crowd(p.EMPTY_LIST * 100 + p.APPEND * 99)


@bomb
def row_62_most_keys() -> bytes:
    """Tuples as keys of dicts."""
    count = min((limits.Budget(bombs.SIZE).containers - 1000) // 3, bombs.SIZE // 8)
    keys = b"".join(b"J" + index.to_bytes(4, "little") + p.TUPLE1 + p.NONE for index in range(count))
    return crowd(b"", p.EMPTY_DICT + p.MARK + keys, p.SETITEMS)


@bomb
def row_62_most_byte_keys() -> bytes:
    """Strings of bytes as keys, which an old torch does not take."""
    keys = b"".join(b"C\x04" + index.to_bytes(4, "little") + p.NONE for index in range(bombs.SIZE // 16))
    return crowd(b"", p.EMPTY_DICT + p.MARK + keys, p.SETITEMS)
