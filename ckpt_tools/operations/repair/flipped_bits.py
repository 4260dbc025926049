"""Find the one bit whose flip explains why a record does not match its CRC-32.

A CRC-32 is linear: flipping the bit that is followed by p others (the 32 of the checksum among them) changes it by x^p modulo
its polynomial, and x^p is another value for every p below 2^32 - 1. So there is at most one such bit, and its place is a
discrete logarithm: found with the square root of the record's bits in steps. Other damage looks the same by chance, once in
2^32 cases for every bit of the record; so only short records are mended, and the odds are told.

Source: Shanks, "Class number, a theory of factorization, and genera" (1971), for the steps.
"""

from __future__ import annotations

import math

from ckpt_tools.io.content import Content, Joined, Literal, Range

_POLYNOMIAL = 0xEDB88320  # of CRC-32, the lowest bit standing for the highest power
_ONE = 1 << 31
_CRC_BITS = 32
MOST = 16  # records of one file that are looked at: of more than that none has a single bit flipped
LONGEST = 1 << 20  # bytes of a record; of other damage to one of these, one case in 512 looks like a flipped bit


def flipped_bit(found: int, wanted: int, size: int) -> int | None:
    """Which bit of a record explains its CRC-32: 8 times the byte's offset, plus the bit's number from the lowest."""
    difference = found ^ wanted
    if not difference or size > LONGEST:
        return None
    power = _logarithm(difference, 8 * size + _CRC_BITS)
    if power is None:
        return None
    if power < _CRC_BITS:
        return -1
    behind = power - _CRC_BITS  # CRC-32 takes in each byte from its lowest bit on
    return 8 * (size - 1 - behind // 8) + 7 - behind % 8


def odds(size: int) -> int:
    """Of how many cases of other damage to a record of this size one looks like a flipped bit."""
    return (1 << 32) // (8 * size + _CRC_BITS)


def _logarithm(value: int, below: int) -> int | None:
    """The power of x that is a value, if it is below a bound."""
    step = math.isqrt(below) + 1
    powers: dict[int, int] = {}
    element = _ONE
    for power in range(step):
        powers.setdefault(element, power)
        element = _times_x(element)
    back = _inverse_power(step)
    for giant in range(step + 1):
        if value in powers:
            power = giant * step + powers[value]
            return power if power < below else None
        value = _times(value, back)
    return None


def _times_x(value: int) -> int:
    return value >> 1 ^ (_POLYNOMIAL if value & 1 else 0)


def _times(one: int, two: int) -> int:
    """The product of two polynomials modulo that of CRC-32."""
    product = 0
    for _ in range(32):
        if two & _ONE:
            product ^= one
        two = two << 1 & 0xFFFFFFFF
        one = _times_x(one)
    return product


def _inverse_power(power: int) -> int:
    """x to the power of -power: x has the order 2^32 - 1."""
    left, square, result = 0xFFFFFFFF - power, _ONE >> 1, _ONE
    while left:
        if left & 1:
            result = _times(result, square)
        square = _times(square, square)
        left >>= 1
    return result


def flipped_back(content: Range, bit: int) -> Content:
    """A record's bytes with one bit as it was; -1 leaves them as they are."""
    if bit < 0:
        return Range(content.source, content.offset, content.length)
    at = content.offset + bit // 8
    behind = content.offset + content.length - at - 1
    byte = bytes([content.source.read(at, 1)[0] ^ 1 << bit % 8])
    parts = Range(content.source, content.offset, bit // 8), Literal(byte), Range(content.source, at + 1, behind)
    return Joined(tuple(part for part in parts if part.length))


def reported(name: str, bit: int, size: int) -> tuple[str, str]:
    """The report's note."""
    where = f"bit {bit % 8} of byte {bit // 8} was" if bit >= 0 else "a bit of the checksum was"
    sure = f"other damage looks the same in one case of {odds(size):,}"
    text = f"{name}: {where} flipped, and is flipped back; its CRC-32 matches again ({sure})."
    return "flipped-bit", text
