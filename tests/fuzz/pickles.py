"""Mutations of pickles, opcode by opcode."""

from __future__ import annotations

import pickletools
import struct
from collections.abc import Callable
from functools import lru_cache
from itertools import pairwise
from random import Random

from tests.fuzz.raw import number, some_bytes, text
from tests.hostile import pickles as opcode

GLOBALS = (
    "collections OrderedDict", "collections Counter", "collections defaultdict", "collections deque", "builtins set",
    "builtins bytearray", "builtins list", "builtins dict", "builtins getattr", "builtins complex", "builtins bytes",
    "__builtin__ object", "_codecs encode", "copyreg _reconstructor", "copyreg __newobj_ex__", "os system", "torch Size",
    "torch device", "torch float32", "torch bfloat16", "torch float8_e5m2", "torch FloatStorage", "torch ByteStorage",
    "torch HalfStorage", "torch.storage UntypedStorage", "torch.nn.parameter Parameter", "torch.nn.modules.linear Linear",
    "torch._utils _rebuild_tensor", "torch._utils _rebuild_tensor_v2", "torch._utils _rebuild_tensor_v3",
    "torch._utils _rebuild_parameter", "torch._utils _rebuild_parameter_with_state", "torch._utils _rebuild_sparse_tensor",
    "torch._utils _rebuild_qtensor", "torch._utils _rebuild_nested_tensor", "torch._utils _rebuild_meta_tensor_no_storage",
    "torch._utils _rebuild_wrapper_subclass", "torch._tensor _rebuild_from_type_v2", "torch serialization _get_layout",
    "numpy._core.multiarray scalar", "numpy.core.multiarray _reconstruct", "numpy dtype", "numpy ndarray",
    "argparse Namespace", "pathlib PosixPath", "datetime datetime", "datetime timedelta", "decimal Decimal", "uuid UUID",
    "UserDict OrderedDict", "__builtin__ set", "torch._utils _rebuild_device_tensor_from_cpu_tensor",
    "fractions Fraction", "types SimpleNamespace", "omegaconf.dictconfig DictConfig", "enum Enum", "functools partial",
)  # fmt: skip
_SNIPPETS = (
    b"N", b"\x88", b"\x89", b")", b"}", b"]", b"(", b"t", b"R", b"b", b"s", b"u", b"a", b"e", b"0", b"1", b"2", b"Q",
    b"\x81", b"\x85", b"\x86", b"\x87", b"\x8f", b"\x90", b"\x91", b"\x92", b"\x93", b"\x94", b"\x97", b"\x98", b"o", b"l",
    b"\x82\x01", b"\x83\x01\x00", b"\x84\x01\x00\x00\x00", b"q\x00", b"h\x00", b"r\xff\xff\xff\x7f", b"j\x05\x00\x00\x00",
    b"I01\n", b"I-5\n", b"L99999999999999999999L\n", b"Fnan\n", b"G\x7f\xf8\0\0\0\0\0\0", b"V\\u202ex\n", b"S'a\\x00'\n",
    b"U\x02\xff\xfe", b"C\x03abc", b"\x8c\x01k", b"\x8a\x00", b"\x8a\x09\0\0\0\0\0\0\0\0\x01", b"\x80\x04", b"\x80\x05",
    b"\x95\x05\0\0\0\0\0\0\0", b"\x96\x02\0\0\0\0\0\0\0ab", b"Pstorage\n", b"ios\nsystem\n", b"(ccollections\nOrderedDict\no",
    b"(}}s", b"}]Ns", b"}G\x7f\xf8\0\0\0\0\0\0Ns", b"}(K\x01NG?\xf0\0\0\0\0\0\0Nu", b"\x85\x85\x85", b"]2a", b"}NN2s", b"(((((",
)  # fmt: skip


@lru_cache(maxsize=512)
def opcodes(data: bytes) -> tuple[tuple[bytes, ...], bytes]:
    """The opcodes of a stream, as slices of it, and what follows; of several streams one after another all opcodes."""
    found: list[bytes] = []
    start = 0
    while start < len(data) and (start == 0 or data[start : start + 1] == b"\x80"):
        try:
            places = [start + (at or 0) for _, _, at in pickletools.genops(data[start:])]
        except Exception:
            break
        places.append(data.index(b".", places[-1]) + 1)
        found += [data[one:two] for one, two in pairwise(places)]
        start = places[-1]
    return tuple(found), data[start:]


def mutate(rng: Random, data: bytes, other: bytes) -> bytes:
    """A few mutations of a stream; `other` is a second one to take opcodes from."""
    found, tail = opcodes(data)
    ops = list(found)
    if not ops:
        return data
    for _ in range(rng.choice((1, 1, 1, 2, 2, 4))):
        kind = rng.choice(_MUTATIONS)
        if isinstance(kind, str):
            _mutate_opcodes(rng, kind, ops, opcodes(other)[0] or found)
        else:
            kind(rng, ops)
        ops = ops or [b"."]
    return b"".join(ops) + tail


def _mutate_opcodes(rng: Random, kind: str, ops: list[bytes], other: tuple[bytes, ...]) -> None:
    at = _place(rng, ops)
    if kind == "delete":
        del ops[at : at + rng.choice((1, 1, 1, 2, 5, 30))]
    elif kind == "duplicate":
        ops[at:at] = ops[at : at + rng.choice((1, 1, 2, 10, 33))] * rng.choice((1, 1, 1, 5))
    elif kind == "swap":
        two = min(len(ops) - 1, at + 1) if rng.random() < 0.6 else _place(rng, ops)
        ops[at], ops[two] = ops[two], ops[at]
    elif kind in ("replace", "insert"):
        ops[at : at + (kind == "replace")] = [rng.choice(_SNIPPETS)]
    elif kind == "splice":
        begin = rng.randrange(len(other))
        ops[at : at + rng.choice((0, 0, 1, 5))] = other[begin : begin + rng.choice((1, 3, 10, 40))]
    elif kind == "cut":
        ops[at:] = [b"."] if rng.random() < 0.7 else []
    elif kind == "argument":
        while at < len(ops) and (changed := changed_argument(rng, ops[at])) is None:
            at += 1
        ops[at : at + 1] = [changed] if at < len(ops) and changed is not None else []


def _place(rng: Random, ops: list[bytes]) -> int:
    """Where: near the front or the end, or where something rare is; the middle is all tensors."""
    pick = rng.random()
    if pick < 0.3:
        return rng.randrange(min(len(ops), 60))
    return rng.randrange(max(0, len(ops) - 30), len(ops)) if pick < 0.5 else rng.randrange(len(ops))


def _numbers(rng: Random, ops: list[bytes]) -> None:
    """Sizes, strides, offsets: the numbers of one tensor."""
    places = [at for at, op in enumerate(ops) if op[:1] in (b"K", b"M", b"J", b"\x8a")]
    for at in rng.sample(places, min(len(places), rng.choice((1, 1, 2, 4)))):
        ops[at] = _integer(rng.randrange(8)) if rng.random() < 0.6 else _integer(number(rng))


def _texts(rng: Random, ops: list[bytes]) -> None:
    """Names, storage keys, device tags: of one text, or the same text in the place of two."""
    places = [at for at, op in enumerate(ops) if op[:1] in (b"X", b"\x8c")]
    if places:
        at = rng.choice(places)
        ops[at] = ops[rng.choice(places)] if rng.random() < 0.4 else opcode.text(text(rng))


def _globals(rng: Random, ops: list[bytes]) -> None:
    places = [at for at, op in enumerate(ops) if op[:1] == b"c"]
    new = rng.choice(GLOBALS).encode().replace(b" ", b"\n")
    if places and rng.random() < 0.15:  # the same text, cut elsewhere
        at = rng.choice(places)
        parts = ops[at][1:-1].replace(b"\n", b".").split(b".")
        cut = rng.randrange(len(parts))
        ops[at] = b"c" + b".".join(parts[:cut]) + b"\n" + b".".join(parts[cut:]) + b"\n"
    elif places:
        ops[rng.choice(places)] = b"c" + new + b"\n"
    else:
        ops.insert(_place(rng, ops), b"c" + new + b"\n")


def _wrap(rng: Random, ops: list[bytes]) -> None:
    """A value becomes the argument of a call, or the state of an object."""
    module, name = rng.choice(GLOBALS).encode().split(b" ", 1)
    at = _place(rng, ops)
    ways = ((b"", b"\x85R"), (b"", b"\x85\x81"), (b")\x81", b"b"), (b")R", b"b"), (b"(", b"tR"), (b"", b"b"))
    before, after = rng.choice(ways)
    ops[at:at] = [b"c" + module + b"\n" + name + b"\n" + before]
    ops.insert(min(len(ops), at + 1 + rng.randrange(4)), after)


_SIZE = b"ctorch\nSize\n"
_KEYS = (
    _SIZE + b"((K\x02ttR", _SIZE + b"(" + _SIZE + b"((K\x02ttRtR", b"K\x02\x85", b"\x88", b"K\x01", b"G?\xf0\0\0\0\0\0\0",
    b"ctorch\ndevice\nX\x03\0\0\0cpu\x85R", b"ctorch\nfloat32\n", b"c_codecs\nencode\nX\x01\0\0\0aX\x06\0\0\0latin1\x86R",
)  # fmt: skip


def _keys(rng: Random, ops: list[bytes]) -> None:
    """Names become keys that may be equal to one another."""
    places = [at for at, op in enumerate(ops) if op[:1] in (b"X", b"\x8c")]
    for at in rng.sample(places, min(len(places), rng.choice((1, 2, 2, 4)))):
        ops[at] = rng.choice(_KEYS)


def _memo(rng: Random, ops: list[bytes]) -> None:
    places = [at for at, op in enumerate(ops) if op[:1] in (b"q", b"r", b"h", b"j")]
    if places:
        at = rng.choice(places)
        index = rng.choice((number(rng) % 2**32, rng.randrange(len(places) + 1), int.from_bytes(ops[at][1:], "little") + 1))
        code = ops[at][:1] if rng.random() < 0.8 else rng.choice((b"q", b"r", b"h", b"j"))
        wide = code in (b"r", b"j")
        ops[at] = code + (struct.pack("<I", index % 2**32) if wide else bytes((index % 256,)))


def changed_argument(rng: Random, op: bytes) -> bytes | None:
    """The opcode with another argument, None when it has none."""
    code = op[:1]
    if code in (b"K", b"M", b"J", b"\x8a"):
        return _integer(number(rng, int.from_bytes(op[1:3], "little")))
    if code in (b"X", b"\x8c"):
        return opcode.text(text(rng)) if rng.random() < 0.8 else code + some_bytes(rng) + op[2:]
    if code == b"c":
        return b"c" + rng.choice(GLOBALS).encode().replace(b" ", b"\n") + b"\n"
    if code == b"G":
        return b"G" + rng.choice((b"\x7f\xf8", b"\xff\xf0", b"\x80\x00", b"\x00\x00")) + op[3:]
    if len(op) > 1:
        return code + rng.randbytes(len(op) - 1)
    return None


def _integer(value: int) -> bytes:
    if 0 <= value < 256:
        return bytes((0x4B, value))
    return b"J" + struct.pack("<i", value) if -(2**31) <= value < 2**31 else opcode.integer(value)


_MUTATIONS: tuple[str | Callable[[Random, list[bytes]], None], ...] = (
    "delete", "duplicate", "swap", "replace", "insert", "splice", "cut", "argument", "argument", _numbers, _numbers, _texts,
    _texts, _globals, _globals, _wrap, _memo, _keys,
)  # fmt: skip
