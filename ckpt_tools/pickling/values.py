"""Plain values: constants, numbers, text and bytes."""

from __future__ import annotations

import codecs
import re
from struct import Struct

from ckpt_tools.pickling.state import COST_OF_BYTE_STRING, COST_OF_BYTES, Opcodes, State
from ckpt_tools.tree.nodes import ByteString, Global, Node

opcode = Opcodes()
_U8, _U32, _U64, _I32 = Struct("<B"), Struct("<I"), Struct("<Q"), Struct("<i")


_CONSTANTS: dict[int, Node] = {ord("N"): None, 0x88: True, 0x89: False, ord(")"): ()}
_CONSTANT_CODES = bytes(_CONSTANTS)
_MANY_CONSTANTS = re.compile(rb"[N\x88\x89)]{2,}")


def _constant(machine: State) -> None:
    """None, True, False or an empty tuple; a row of them at once: a byte each, nothing is cheaper for a file."""
    start = machine.position - 1
    following = machine.data[start + 1 : start + 2]
    row = _MANY_CONSTANTS.match(machine.data, start, machine.limit) if following in _CONSTANT_CODES else None
    if row is None:
        machine.stack.append(_CONSTANTS[machine.data[start]])
    else:
        machine.stack.extend(map(_CONSTANTS.__getitem__, row[0]))
        machine.position = row.end()


for _constant_code in _CONSTANTS:
    opcode.handlers[_constant_code] = _constant


def _numbers(code: str, form: str) -> None:
    """An opcode with a number of a fixed width behind it; where many follow one another, all of them at once."""
    single, many = Struct(form), Struct(f"{form[0]}x{form[1]}")
    width, byte = single.size, ord(code)
    row_of_them = re.compile(rb"(?:%b.{%d}){2,4096}" % (code.encode(), width), re.DOTALL)  # more would take memory

    def push(machine: State) -> None:
        start = machine.position
        if machine.data[start + width : start + width + 1] == code.encode():
            row = row_of_them.match(machine.data, start - 1, machine.limit)
            if row is not None:
                machine.stack.extend([number for (number,) in many.iter_unpack(row[0])])
                machine.position = row.end()
                return
        machine.stack.append(machine.number(single))

    opcode.handlers[byte] = push


for _code_and_form in (("K", "<B"), ("M", "<H"), ("J", "<i"), ("G", ">d")):
    _numbers(*_code_and_form)


@opcode(b"\x8a")
def _long1(machine: State) -> None:
    length = machine.data[machine.position]
    machine.position += 1
    machine.stack.append(int.from_bytes(machine.take(length), "little", signed=True))


@opcode(b"\x8b", unusual="LONG4")
def _long4(machine: State) -> None:
    machine.stack.append(int.from_bytes(machine.take(machine.number(_I32)), "little", signed=True))


_OCTAL = re.compile(rb"\s*([+-]?)0+([0-7]{1,21})\s*")  # to C's strtol, which pickle asks first


@opcode(b"I", unusual="INT")
def _int(machine: State) -> None:
    line = machine.line()
    text = b"0" if line.startswith(b"\0") else line.partition(b"\0")[0]
    octal = _OCTAL.fullmatch(text)
    number = int(octal[1] + octal[2], 8) if octal else parse_decimal(machine, text)
    machine.stack.append(bool(number) if len(line) == 2 and 0 <= number <= 1 else number)  # 01 and 00, to C also +1 and -0


@opcode(b"L", unusual="LONG")
def _long(machine: State) -> None:
    machine.stack.append(parse_decimal(machine, machine.line().removesuffix(b"L")))


@opcode(b"F", unusual="FLOAT")
def _float(machine: State) -> None:
    machine.spend_lightly()
    try:
        machine.stack.append(float(machine.line().partition(b"\0")[0]))
    except ValueError:
        raise machine.error("holds a float that cannot be read") from None


@opcode(b"X")
def _binunicode(machine: State) -> None:
    machine.stack.append(machine.text(machine.take(machine.number(_U32))))


@opcode(b"\x8c", unusual="SHORT_BINUNICODE")
def _short_binunicode(machine: State) -> None:
    machine.stack.append(machine.text(machine.take(machine.number(_U8))))


@opcode(b"\x8d", unusual="BINUNICODE8")
def _binunicode8(machine: State) -> None:
    machine.stack.append(machine.text(machine.take(machine.number(_U64))))


@opcode(b"V", unusual="UNICODE")
def _unicode(machine: State) -> None:
    machine.spend_lightly()
    try:
        machine.stack.append(codecs.raw_unicode_escape_decode(machine.line())[0])  # the codec by name would be imported
    except UnicodeDecodeError:
        raise machine.error("holds text that cannot be read") from None


def _push_byte_string(machine: State, data: bytes) -> None:
    """Push a Python 2 str: text when it is UTF-8 (torch.load's default encoding), else its bytes."""
    machine.spend_lightly()
    try:
        machine.stack.append(data.decode("utf-8"))
    except UnicodeDecodeError:
        machine.spend(COST_OF_BYTE_STRING)
        machine.unusual["text of Python 2 that is not UTF-8"] = None
        machine.stack.append(ByteString(data))


@opcode(b"U")
def _short_binstring(machine: State) -> None:
    _push_byte_string(machine, machine.take(machine.number(_U8)))


@opcode(b"T", unusual="BINSTRING")
def _binstring(machine: State) -> None:
    _push_byte_string(machine, machine.take(machine.number(_U32)))


@opcode(b"S", unusual="STRING")
def _string(machine: State) -> None:
    line = machine.line()
    if len(line) < 2 or line[:1] != line[-1:] or line[:1] not in (b"'", b'"'):
        raise machine.error("holds a string without its quotes")
    try:
        _push_byte_string(machine, _unescape(line[1:-1]))
    except ValueError:
        raise machine.error("holds a string with a bad escape") from None


_ESCAPE = re.compile(rb"\\(?:([0-7]{1,3})|x([0-9a-fA-F]{2})|(.)?)", re.DOTALL)
_UNITS = re.compile(rb"(?:[^\\]++|\\(?:[0-7]{1,3}|x[0-9a-fA-F]{2}|.|\Z)){1,10000}", re.DOTALL)
_KNOWN_ESCAPES: dict[bytes, bytes] = {}  # a few hundred at most: they have four bytes at most, and most of those are alike
_ESCAPED = {b"\n": b"", b"a": b"\a", b"b": b"\b", b"f": b"\f", b"n": b"\n", b"r": b"\r", b"t": b"\t", b"v": b"\v"}


def _unescape(data: bytes) -> bytes:
    """A Python bytes literal's inside. Our own: `codecs.escape_decode` warns, and warnings can be errors."""
    # some thousand escapes at a time: `re.sub` keeps a list of all its pieces
    return b"".join([_ESCAPE.sub(_unescape_one, units[0]) for units in _UNITS.finditer(data)])


def _unescape_one(found: re.Match[bytes]) -> bytes:
    known = _KNOWN_ESCAPES.get(found[0])
    if known is None:
        known = _KNOWN_ESCAPES[found[0]] = _unescape_new(found)
    return known


def _unescape_new(found: re.Match[bytes]) -> bytes:
    octal, hexadecimal, other = found.groups()
    if octal is not None:
        return bytes((int(octal, 8) & 0xFF,))
    if hexadecimal is not None:
        return bytes.fromhex(hexadecimal.decode())
    if other is None or other == b"x":
        raise ValueError("an escape that ends early")
    return _ESCAPED.get(other, other if other in b"\\'\"" else b"\\" + other)


def _spend_on_bytes(machine: State) -> None:
    """Count bytes as the call by which protocol 2 has them: a tuple and a call, a text, and two values out of the memo."""
    machine.spend(COST_OF_BYTES)
    machine.spend_lightly(3)


@opcode(b"C", unusual="SHORT_BINBYTES")
def _short_binbytes(machine: State) -> None:
    _spend_on_bytes(machine)
    start = machine.position + 1
    end = start + machine.data[start - 1] if start <= machine.limit else start
    if end > machine.limit or start > machine.limit:
        machine.take(machine.number(_U8))
    machine.position = end
    machine.stack.append(machine.data[start:end])


@opcode(b"B", unusual="BINBYTES")
def _binbytes(machine: State) -> None:
    _long_bytes(machine, machine.number(_U32))


@opcode(b"\x8e", unusual="BINBYTES8")
def _binbytes8(machine: State) -> None:
    _long_bytes(machine, machine.number(_U64))


def _long_bytes(machine: State, length: int) -> None:
    _spend_on_bytes(machine)
    start, data = machine.position, machine.take(length)
    machine.places[id(data)] = (start, data)
    machine.stack.append(data)


@opcode(b"\x96", unusual="BYTEARRAY8")
def _bytearray8(machine: State) -> None:
    machine.make(Global("builtins", "bytearray"), (machine.take(machine.number(_U64)),))


_LONG_NUMBER = re.compile(rb"\s*[+-]?[\d_]{4301}")  # which Python before 3.11 reads


def parse_decimal(machine: State, line: bytes, base: int = 0) -> int:
    """A decimal number, which ends at a NUL; longer ones than Python converts by default (4300 digits) are refused: n² time."""
    try:
        return int(line.partition(b"\0")[0], base)
    except ValueError:
        machine.two_ways |= _LONG_NUMBER.match(line) is not None
        raise machine.error("holds a whole number that cannot be read") from None
