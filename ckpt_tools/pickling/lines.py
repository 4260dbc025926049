"""Values that a pickle has as lines of text, as protocol 0 writes them all, and the error for what no reader goes on with."""

from __future__ import annotations

import codecs
import re
import warnings


class Malformed(Exception):  # noqa: N818  it becomes a PickleError that tells where
    """Why no reader goes on; where the position is behind the end, the pickle is cut off."""


class LongNumber(Malformed):
    """A whole number of more digits than Python converts by default: before 3.11 it read them."""


_LONG_NUMBER = rb"\s*[+-]?[\d_]{4301}"
_OCTAL = rb"\s*([+-]?)0+([0-7]{1,21})\s*"  # to C's strtol, which pickle asks first


def whole(text: bytes, base: int = 0) -> int:
    """A whole number, which ends at a NUL."""
    try:
        return int(text.partition(b"\0")[0], base)
    except ValueError:
        kind = LongNumber if re.match(_LONG_NUMBER, text) else Malformed
        raise kind("holds a whole number that cannot be read") from None


def value(op: int, line: bytes) -> int | float | str | bytes:
    if op == 0x49:  # INT
        text = b"0" if line.startswith(b"\0") else line.partition(b"\0")[0]
        octal = re.fullmatch(_OCTAL, text)
        number = int(octal[1] + octal[2], 8) if octal else whole(text)
        return bool(number) if len(line) == 2 and 0 <= number <= 1 else number  # 01 and 00, to C also +1 and -0
    if op == 0x4C:  # LONG
        return whole(line.removesuffix(b"L"))
    try:
        if op == 0x46:  # FLOAT
            return float(line.partition(b"\0")[0])
        if op == 0x56:  # UNICODE
            return codecs.raw_unicode_escape_decode(line)[0]  # the codec by name would be imported
        if len(line) < 2 or line[:1] != line[-1:] or line[:1] not in (b"'", b'"'):
            raise Malformed("holds a string without its quotes")
        return _unescape(line[1:-1])
    except ValueError:
        raise Malformed("holds text that cannot be read") from None


def _unescape(data: bytes) -> bytes:
    """A Python bytes literal's inside."""
    with warnings.catch_warnings():  # of escapes that are none, and warnings can be errors
        warnings.simplefilter("ignore")
        return codecs.escape_decode(data)[0] if b"\\" in data else data
