"""Pickles as opcodes, by hand, and what they can call."""

import struct

PROTO2, STOP = b"\x80\x02", b"."
EMPTY_DICT, EMPTY_LIST, EMPTY_TUPLE, MARK = b"}", b"]", b")", b"("
NONE, TRUE, FALSE = b"N", b"\x88", b"\x89"
TUPLE, TUPLE1, REDUCE, BUILD = b"t", b"\x85", b"R", b"b"
SETITEM, SETITEMS, APPEND, APPENDS = b"s", b"u", b"a", b"e"
PERSID = b"Q"
ORDERED_DICT = b"ccollections\nOrderedDict\n)R"


def pickle(*parts: bytes) -> bytes:
    """A protocol 2 stream."""
    return PROTO2 + b"".join(parts) + STOP


def text(value: str | bytes) -> bytes:
    """A text."""
    data = value.encode("utf-8", "surrogatepass") if isinstance(value, str) else value
    return b"X" + struct.pack("<I", len(data)) + data


def integer(value: int) -> bytes:
    """A whole number of any size."""
    data = value.to_bytes(value.bit_length() // 8 + 1, "little", signed=True)
    return b"\x8a" + bytes([len(data)]) + data if len(data) < 256 else b"\x8b" + struct.pack("<i", len(data)) + data


def put(index: int) -> bytes:
    """Memoize the top of the stack."""
    return b"r" + struct.pack("<I", index)


def get(index: int) -> bytes:
    """Push what was memoized."""
    return b"h" + bytes([index]) if index < 256 else b"j" + struct.pack("<I", index)


def glob(module: str, name: str) -> bytes:
    """A global."""
    return f"c{module}\n{name}\n".encode()


def call(module: str, name: str, *args: bytes) -> bytes:
    """A call of a global."""
    return glob(module, name) + tuple_of(*args) + REDUCE


def tuple_of(*items: bytes) -> bytes:
    """A tuple."""
    return MARK + b"".join(items) + TUPLE


def list_of(*items: bytes) -> bytes:
    """A list."""
    return EMPTY_LIST + MARK + b"".join(items) + APPENDS


def dict_of(**items: bytes) -> bytes:
    """A dict with text keys."""
    return EMPTY_DICT + pairs((text(key), value) for key, value in items.items())


def pairs(items: object) -> bytes:
    """SETITEMS with these (key, value) opcodes."""
    return MARK + b"".join(key + value for key, value in items) + SETITEMS  # type: ignore[attr-defined]


def sizes(*values: int) -> bytes:
    """A tuple of whole numbers."""
    return tuple_of(*map(integer, values))


def storage(key: str | bytes = "0", numel: int | bytes = 6, kind: str = "FloatStorage", device: str = "cpu") -> bytes:
    """The persistent id of a storage, loaded."""
    count = integer(numel) if isinstance(numel, int) else numel
    return tuple_of(text("storage"), glob("torch", kind), text(key), text(device), count) + PERSID


def tensor(
    shape: bytes | None = None, stride: bytes | None = None, offset: bytes = b"K\x00", *, on: bytes | None = None,
    grad: bytes = FALSE,
) -> bytes:  # fmt: skip
    """`_rebuild_tensor_v2` of, unless told otherwise, a 2 x 3 tensor on storage "0" of six floats."""
    shape, stride = shape or sizes(2, 3), stride or sizes(3, 1)
    return call("torch._utils", "_rebuild_tensor_v2", on or storage(), offset, shape, stride, grad, ORDERED_DICT)


SYSTEM = glob("os", "system")
COMMAND = tuple_of(text("touch /tmp/evil"))

# Ways to name and call something: name of the case -> (opcodes, the global that must be listed).
CALLS = {
    "46_reduce": (SYSTEM + COMMAND + REDUCE, "os.system"),
    "46_eval": (call("builtins", "eval", text("1")), "builtins.eval"),
    "46_python2_name": (call("__builtin__", "eval", text("1")), "builtins.eval"),
    "46_torch_load": (call("torch.serialization", "load", text("x")), "torch.serialization.load"),
    "46_only_named": (SYSTEM, "os.system"),
    "46_newobj": (glob("subprocess", "Popen") + COMMAND + b"\x81", "subprocess.Popen"),
    "46_newobj_ex": (glob("subprocess", "Popen") + COMMAND + EMPTY_DICT + b"\x92", "subprocess.Popen"),
    "46_in_a_key": (EMPTY_DICT + MARK + SYSTEM + b"K\x01" + SETITEMS, "os.system"),
    "46_in_a_tuple": (tuple_of(SYSTEM + COMMAND + REDUCE), "os.system"),
    "46_in_the_state_of_a_known_class": (
        glob("argparse", "Namespace") + b")\x81" + dict_of(x=SYSTEM) + BUILD, "os.system"),
    "46_called_with_a_call": (call("builtins", "getattr", glob("os", "sys"), text("x")), "builtins.getattr"),
    "47_stack_global": (text("os") + text("system") + b"\x93" + COMMAND + REDUCE, "os.system"),
    "47_stack_global_from_the_memo": (
        text("system") + put(7) + text("os") + put(8) + b"00" + get(8) + get(7) + b"\x93" + COMMAND + REDUCE,
        "os.system"),
    "47_stack_global_from_two_strings": (b"U\x02os" + b"S'system'\n" + b"\x93" + COMMAND + REDUCE, "os.system"),
    "50_inst": (MARK + text("touch /tmp/evil") + b"ios\nsystem\n", "os.system"),
    "50_inst_without_arguments": (MARK + b"icollections\nUserDict\n", "collections.UserDict"),
    "50_obj": (MARK + SYSTEM + text("touch /tmp/evil") + b"o", "os.system"),
    "50_call_hidden_by_pop": (SYSTEM + COMMAND + REDUCE + b"0" + NONE, "os.system"),
    "50_call_hidden_by_pop_mark": (MARK + SYSTEM + COMMAND + REDUCE + b"1" + NONE, "os.system"),
    "50_call_hidden_by_a_later_value": (
        EMPTY_DICT + text("k") + SYSTEM + COMMAND + REDUCE + SETITEM + text("k") + NONE + SETITEM, "os.system"),
    "50_call_hidden_in_the_memo": (SYSTEM + COMMAND + REDUCE + put(300) + b"0" + NONE, "os.system"),
    "52_build_on_a_global": (glob("os", "environ") + dict_of(x=NONE) + BUILD, "os.environ"),
    "52_build_on_a_call": (SYSTEM + COMMAND + REDUCE + dict_of(x=NONE) + BUILD, "os.system"),
    "52_build_with_slots": (
        glob("os", "system") + EMPTY_TUPLE + b"\x81" + tuple_of(NONE, dict_of(a=NONE)) + BUILD, "os.system"),
    "46_append_to_an_object": (SYSTEM + COMMAND + REDUCE + NONE + APPEND, "os.system"),
    "46_setitem_on_an_object": (SYSTEM + COMMAND + REDUCE + NONE + NONE + SETITEM, "os.system"),
}  # fmt: skip
