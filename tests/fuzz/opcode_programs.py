"""Pickles that readers may read differently: random opcodes, genuine pickles, and frames, lines and ends put wrong in both."""

from __future__ import annotations

import pickle
import struct
from collections import OrderedDict
from collections.abc import Callable
from functools import cache
from random import Random
from typing import Any

from tests.fuzz import pickles
from tests.fuzz.raw import places, put
from tests.hostile import pickles as opcode

_MODULES = ("models", "torch", "collections", "builtins", "__builtin__", "os")
_NAMES = ("Net", "run", "Size", "OrderedDict", "set")
_PAIRS = (
    ("models", "Net"), ("models", "Net"), ("models", "run"), ("torch", "Size"), ("torch", "float32"), ("torch", "FloatStorage"),
    ("collections", "OrderedDict"), ("builtins", "set"), ("__builtin__", "set"), ("__builtin__", "str"), ("builtins", "list"),
    ("UserDict", "UserDict"), ("models.a", "Net.b"), ("copy_reg", "_reconstructor"), ("", ""), ("a b", "c"), ("os", "getcwd"),
)  # fmt: skip
_INDICES = ("0", "1", "2", "3", "5", "1_0", " 1", "+1", "01", "1 ", "-1", "-0", "1\0x", "1\r", "0x1", "", "256", "70000",
    "1L")  # fmt: skip
_WHOLE = (
    "0", "1", "00", "01", "+1", "-0", "010", "08", " 7", "7 ", "1_000", "0x10", "1\0x", "\0", "\0\0", "0\0",
    "000000000000000000000000012",
    "0777777777777777777777", "07777777777777777777777", "9" * 25, "9" * 5000, "", "1L", "L", "-", "0b1", "0o7", "1\r", "\x0b5",
)  # fmt: skip
_FLOATS = ("1.5", "nan", " 1", "1_0", "1\0x", "\0", "1e999", "inf", "", "0x1p3", "1.5\r", "-infinity", "1,5")
_TEXTS = (
    "'run'", '"Net"', "''", "'", "run", "'\\x72un'", "'\\162un'",
    "'a\\", "'\\x7'", "'\xff'", "'a'b'", " 'a'", "'a' ", "'mod\\\nels'",
    "'models'", "'\\q'", "'\\777'",
)  # fmt: skip
_UNICODE = ("models", "run", "\\u0072un", "\\U00110000", "\\ud800", "\xe9", "", "Net\r", "\\", "\\u12")
_IDS = ("storage", "\xe9", "", "1")
_BYTES = (
    b"models", b"run", b"Net", b"torch", b"Size", b"", b"\xff\xfe", b"\xed\xa0\x80", b"\xc3\xa9", b"a\nb", b"os", b"x" * 300,
)  # fmt: skip
_TAKE = ((b"0", -1), (b"2", 1), (b"\x85", 0), (b"Q", 0), (b"\x98", 0), (b")R", 0), (b")\x81", 0), (b"]R", 0), (b"}b", 0))
_TAKE_TWO = (
    (b"\x86", -1), (b"R", -1), (b"\x81", -1), (b"b", -1), (b"a", -1), (b"\x85R", -1), (b"\x93", -1), (b"\x85\x81", -1),
)  # fmt: skip
_TAKE_THREE = ((b"\x87", -2), (b"s", -2), (b"}\x92", -1), (b"R0", -2), (b"\x93)R", -1))


def make_case(seed: int, number: int) -> tuple[bytes, bool]:
    """The bytes of one or more pickles, and whether they are to lie in a torch-zip."""
    rng = Random(f"{seed}-{number}")
    data = b"".join(_pickle(rng) for _ in range(rng.choice((1, 1, 1, 2, 3, 5))))
    for _ in range(rng.choice((0, 0, 1, 1, 2, 3))):
        data = rng.choice(_DAMAGES)(rng, data)
    return data, rng.random() < 0.4


def _pickle(rng: Random) -> bytes:
    pick = rng.random()
    if pick < 0.65:
        return _Program(rng).data()
    found, other = (rng.choice(_genuine()) for _ in range(2))
    if pick < 0.9:
        return pickles.mutate(rng, found, other)
    return found


class _Program:
    """Opcodes of which most find on the stack what they take."""

    def __init__(self, rng: Random) -> None:
        self.rng, self.out = rng, list[bytes]()
        self.depth, self.marks, self.memo = 0, list[int](), 0

    def data(self) -> bytes:
        rng = self.rng
        head = rng.choice((b"", b"\x80\x02", b"\x80\x03", b"\x80\x04", b"\x80\x04", b"\x80\x05", b"\x80\x00", b"\x80\x06"))
        for _ in range(rng.choice((3, 8, 15, 25))):
            self.step()
        while self.marks:
            self.close()
        if not self.depth:
            self.out.append(b"N")
        ops = [*self.out, b"."]
        if rng.random() < (0.7 if head[1:] >= b"\x04" else 0.1):
            ops = _framed(rng, ops)
        return head + b"".join(ops)

    def push(self, code: bytes) -> None:
        self.out.append(code)
        self.depth += 1
        if self.rng.random() < 0.3:
            self.put()

    def put(self) -> None:
        rng, index = self.rng, self.memo if self.rng.random() < 0.7 else self.rng.choice((0, 1, 2, 3, 5, 255))
        far = struct.pack("<I", index if rng.random() < 0.9 else 70000)
        ways = (
            b"\x94",
            b"\x94",
            b"q%c" % (index % 256),
            b"r" + far,
            b"p%d\n" % index,
            b"p%b\n" % rng.choice(_INDICES).encode(),
        )
        self.out.append(rng.choice(ways))
        self.memo = max(self.memo, index + 1)
        if rng.random() < 0.2:
            self.out.append(b"0")
            self.depth -= 1

    def name(self) -> None:
        """A global in one of its ways."""
        rng = self.rng
        module, name = rng.choice(_PAIRS) if rng.random() < 0.7 else (rng.choice(_MODULES), rng.choice(_NAMES))
        pick = rng.random()
        if pick < 0.4:
            self.push(b"c%s\n%s\n" % (module.encode(), name.encode()))
        elif pick < 0.8:
            for text in (module, name):
                self.push(_text(rng, text))
            self.out.append(b"\x93")
            self.depth -= 1
        elif pick < 0.9 and self.marks:
            self.out.append(b"i%s\n%s\n" % (module.encode(), name.encode()))
            self.depth = self.marks.pop() + 1
        else:
            extensions = (b"\x82\x07", b"\x83\x07\0", b"\x84\x07\0\0\0", b"\x82\x01", b"\x82\0", b"\x84\xff\xff\xff\xff")
            self.push(rng.choice(extensions))

    def step(self) -> None:
        rng, pick = self.rng, self.rng.random()
        here = self.depth - (self.marks[-1] if self.marks else 0)
        if pick < 0.3:
            self.push(_value(rng))
        elif pick < 0.5:
            self.name()
        elif pick < 0.58:
            self.out.append(b"(")
            self.marks.append(self.depth)
        elif pick < 0.66 and self.marks:
            self.close()
        elif pick < 0.76 and self.memo:
            index = rng.randrange(self.memo)
            near, far, line = b"h%c" % (index % 256), b"j" + struct.pack("<I", index), b"g%b\n" % rng.choice(_INDICES).encode()
            self.push(rng.choice((near, far, b"g%d\n" % index, line)))
        elif pick < 0.78 and here >= 1:
            self.put()
        elif here >= 1 or pick > 0.99:
            self.combine(here)

    def combine(self, here: int) -> None:
        """An opcode that takes from the stack."""
        codes = _TAKE + (_TAKE_TWO if here >= 2 else ()) + (_TAKE_THREE if here >= 3 else ())
        code, change = self.rng.choice(codes)
        self.out.append(code)
        self.depth += change

    def close(self) -> None:
        """An opcode that takes everything up to a mark."""
        at = self.marks.pop()
        code = self.rng.choice((b"t", b"l", b"d", b"t", b"1", b"0", b"o", b"e", b"u", b"\x90", b"\x91", b"tR", b"t\x81"))
        self.out.append(code)
        self.depth = at if code in (b"1", b"0", b"e", b"u", b"\x90", b"tR", b"t\x81") else at + 1


def _text(rng: Random, text: str) -> bytes:
    data = text.encode()
    size, long = bytes((len(data),)), struct.pack("<I", len(data))
    heads = (b"\x8c" + size, b"X" + long, b"\x8d" + struct.pack("<Q", len(data)), b"U" + size, b"T" + long)
    return rng.choice((*(head + data for head in heads), b"V" + data + b"\n", b"S'" + data + b"'\n"))


def _value(rng: Random) -> bytes:
    line = rng.choice(((b"I", _WHOLE), (b"L", _WHOLE), (b"F", _FLOATS), (b"S", _TEXTS), (b"V", _UNICODE), (b"P", _IDS)))
    pick, data = rng.random(), rng.choice(_BYTES)
    if pick < 0.3:
        return line[0] + rng.choice(line[1]).encode("latin-1") + b"\n"
    if pick < 0.5:
        return _text(rng, rng.choice(_MODULES + _NAMES))
    if pick < 0.6:
        return rng.choice((b"C%c", b"U%c", b"\x8c%c")) % min(len(data), 255) + data[:255]
    if pick < 0.7:
        return rng.choice((b"B%b", b"T%b", b"X%b")) % struct.pack("<I", len(data)) + data
    if pick < 0.75:
        return rng.choice((b"\x8d%b", b"\x8e%b", b"\x96%b")) % struct.pack("<Q", len(data)) + data
    return rng.choice(
        (b"N", b")", b"]", b"}", b"\x8f", b"\x88", b"\x89", b"K\x01", b"M\0\1", b"J\xff\xff\xff\xff", b"\x8a\0", b"\x8a\1\x05",
         b"\x8b\0\0\0\0", b"\x8b\xff\xff\xff\xff", b"G?\xf8\0\0\0\0\0\0", b"\x97", b"\x97\x98", b"NNNNN", b"K\1K\2K\3")
    )  # fmt: skip


def _frame(length: int) -> bytes:
    return b"\x95" + struct.pack("<Q", max(0, length))


def _framed(rng: Random, ops: list[bytes]) -> list[bytes]:
    """Opcodes in frames of several, most of which end where they should."""
    framed, at = [], 0
    while at < len(ops):
        run = ops[at : at + rng.randint(1, len(ops))]
        off = 0 if rng.random() < 0.9 else rng.choice((-1, 1, 2, 5, 9, 30, 10**6, 2**63))
        framed += [_frame(sum(map(len, run)) + off), *run]
        at += len(run)
    return framed


# --- what is put wrong


def _frame_somewhere(rng: Random, data: bytes) -> bytes:
    lengths = (0, 1, 2, 4, 9, rng.randrange(60), rng.randrange(len(data) + 20), 2**40, 2**64 - 1)
    return put(rng, data, _frame(rng.choice(lengths)), (0,))


def _frame_between(rng: Random, data: bytes) -> bytes:
    """A frame that begins between two opcodes."""
    ops, tail = pickles.opcodes(data)
    if not ops:
        return data
    at = rng.randrange(len(ops))
    rest = b"".join(ops[at:]) + tail
    some = len(b"".join(ops[at : at + rng.randint(1, 8)])) + rng.choice((0, 0, -1, 1, -3))
    return b"".join(ops[:at]) + _frame(rng.choice((rng.randrange(30), some, len(rest), len(rest) + 9))) + rest


def _drop_line_feed(rng: Random, data: bytes) -> bytes:
    found = places(data, b"\n")
    at = rng.choice(found) if found else len(data)
    return data[:at] + rng.choice((b"", b"\r", b"\r\n", b" ")) + data[at + 1 :]


_CUT_LINES = (
    b"(imodels\nrunx", b"(imodels\n", b"(imodels", b"cmodels\nNetx", b"(S'a'\nios\nsystem.", b"Pax", b"V", b"cmodels\nNet",
)  # fmt: skip
_BEHIND = (b".", b"N.", b"\n", bytes(9), b"cmodels\nrun\n)R.", b"garbage", _frame(3) + b"N..", b"h\0.")
_DAMAGES: tuple[Callable[[Random, bytes], bytes], ...] = (
    _frame_somewhere, _frame_between, _frame_between, _drop_line_feed,
    lambda rng, data: data[: rng.randrange(len(data) + 1)], lambda rng, data: data + rng.choice(_CUT_LINES),
    lambda rng, data: data + rng.choice(_BEHIND), lambda rng, data: put(rng, data, bytes((rng.randrange(256),))),
    lambda rng, data: data[2:] if data[:1] == b"\x80" else data,
)  # fmt: skip


class _Net:
    """An instance that is pickled as one of `models.Net`."""

    def __init__(self, state: Any) -> None:
        self.state = state


@cache
def _genuine() -> list[bytes]:
    """Pickles as they are written, of every protocol."""
    net, name = _Net([1, "a", b"b" * 70]), "layer.weight"
    values = (
        {"a": [1, 2.5, None, True, (1, 2)], name: {name: (name, name)}},
        OrderedDict([("w", net), ("v", [net, net])]),
        [{1, 2}, frozenset((3, "x")), bytearray(b"abc"), b"\0\xff", "é\ud800", 2**70, -5, float("nan")],
        ["".join(map(chr, range(65, 90))) * 20, [OrderedDict(), net.state] * 30],
    )
    written = [pickle.dumps(value, protocol) for value in values for protocol in range(6)]
    found = [data.replace(b"ctests.fuzz.opcode_programs\n_Net\n", b"cmodels\nNet\n") for data in written]
    return [*(data for data in found if b"_Net" not in data), opcode.pickle(opcode.dict_of(w=opcode.tensor()))]
