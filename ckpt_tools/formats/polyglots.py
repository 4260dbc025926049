r"""Files that are two containers at once: which one a program reads depends on what it looks for first. They are refused.

`torch.load` takes a file that begins with PK\3\4 for a zip, any other first for a tar (by the checksum of its first block),
then for pickles one behind another; one called `.safetensors` for that. Python's own modules, and torch with bytes in memory,
ask in another order.

Source: torch/serialization.py (`load`, `_is_zipfile`, `_legacy_load`), CPython's Lib/tarfile.py (`frombuf`), pickletools.py.
"""

from __future__ import annotations

import re
from collections.abc import Iterator

from ckpt_tools.errors import TWO_FILES, DamagedFileError
from ckpt_tools.formats.base import is_tar, is_zip
from ckpt_tools.io.output import Source

_TAR, _SAFETENSORS, _GGUF, _MSGPACK = "a tar archive", "a safetensors file", "a GGUF file", "a msgpack file"


_MAPS = frozenset(bytes([byte]) for byte in (*range(0x81, 0x90), 0xDE, 0xDF))  # with which msgpack of a map begins


def refuse_polyglot(source: Source, head: bytes) -> None:
    """Raise DamagedFileError for a file whose bytes, which start with `head`, are more than one container."""
    kinds = list(_kinds(head))
    if not head or head[0] not in _FIRST:
        pass
    elif kinds == [_TAR] and _pickle_in(source, harmless=True):
        kinds.append("a pickle")
    elif kinds in ([_SAFETENSORS], [_GGUF], [_MSGPACK]) and _pickle_in(source, harmless=False):
        kinds.append("a pickle that torch.load would run")
    if len(kinds) > 1:
        raise DamagedFileError(f"{source.path} is {kinds[0]}, and {kinds[1]} as well.", why=TWO_FILES)


def _kinds(head: bytes) -> Iterator[str]:
    """What a file with these first bytes may be, pickles apart, which no first byte tells."""
    if is_zip(head):
        yield "a zip archive"
    if is_tar(head):
        yield _TAR
    if head.startswith(b"GGUF"):
        yield _GGUF
    elif head[8:9] == b"{" and _is_safetensors(head):
        yield _SAFETENSORS
    elif head.lstrip().startswith(b"{"):
        yield "JSON"
    if head.startswith(b"\x93NUMPY"):
        yield "a .npy file"
    if head[:1] in _MAPS:
        from ckpt_tools.formats.frameworks import flax

        if flax.sniff(head):
            yield _MSGPACK


def _is_safetensors(head: bytes) -> bool:
    from ckpt_tools.formats import safetensors  # few other files have a brace there

    return safetensors.sniff(head)


# --- pickles that something else begins with

_MAGIC_NUMBER = 0x1950A86A20F9469CFC6C  # of torch-legacy
_MOST_OPCODES, _LONGEST_LINE, _LONGEST_NUMBER = 250_000, 1 << 20, 1 << 13  # Python reads numbers of 4300 digits
_FIRST = frozenset(b"()BCFGIJKLMNSTUVX]cghjpqr}\x80\x88\x89\x8a\x8b\x8c\x8d\x8e\x8f\x95\x96\x97")  # need nothing below them
_NAMES_A_GLOBAL = frozenset(b"ci\x93")
_ENDS = b"P\x82\x83\x84"  # persistent ids, of which torch takes none here, and extensions, of which there are none
_NUMBER = re.compile(rb"[\s\w.+-]*")
_MODULE = re.compile(rb"[\w.\x80-\xff]+")  # what can be imported; in JSON there would be quotation marks


def _pickle_in(source: Source, *, harmless: bool) -> bool:
    """Whether the file begins with a pickle that names a global or is torch's magic number; with `harmless`, with any."""
    try:
        for code, argument in _opcodes(source):
            if code in _NAMES_A_GLOBAL:
                return code not in b"ci" or _MODULE.fullmatch(argument.partition(b"\n")[0]) is not None
            if code in b"LI\x8a\x8b" and _number(code, argument) == _MAGIC_NUMBER:
                return True
            if code == ord("."):
                return harmless
    except _NoPickleError:
        return False
    except _TooLongError:
        return True
    return True  # more opcodes than any accident


class _NoPickleError(Exception):
    """The bytes are not an opcode, or what is left of a cut one."""


class _TooLongError(Exception):
    """A line has no end where the end of an accident would be."""


def _number(code: int, argument: bytes) -> int | None:
    if code in b"\x8a\x8b":
        return int.from_bytes(argument, "little", signed=True)
    try:
        return int(argument.strip().rstrip(b"L"), 0)  # C's pickle takes 0x too
    except ValueError:
        return None


def _opcodes(source: Source) -> Iterator[tuple[int, bytes]]:
    """The opcodes from the file's start on, with their arguments as far as they are short; long ones are passed over unread."""
    from pickletools import opcodes

    sizes = {ord(opcode.code): opcode.arg.n if opcode.arg else 0 for opcode in opcodes}
    position = 0
    for _ in range(_MOST_OPCODES):
        head = source.read(position, min(256, source.size - position))
        if not head or head[0] not in sizes or head[0] in _ENDS:
            raise _NoPickleError
        start, length = _argument(source, position + 1, head, sizes[head[0]])
        if start + length > source.size:
            raise _NoPickleError
        yield head[0], source.read(start, min(length, _LONGEST_NUMBER))
        position = start + length


def _argument(source: Source, at: int, head: bytes, size: int) -> tuple[int, int]:
    """Where an opcode's argument starts and how long it is. `size` is pickletools': negative where the file tells."""
    if size >= 0:
        return at, size
    if size == -1:
        return at, _lines(source, at, head[0])
    width = {-2: 1, -3: 4, -4: 4, -5: 8}[size]
    return at + width, int.from_bytes(head[1 : 1 + width], "little")


def _lines(source: Source, at: int, code: int) -> int:
    """The length of the lines that an opcode takes."""
    data = source.read(at, min(256, source.size - at))
    if data.count(b"\n") < 2:
        data = source.read(at, min(_LONGEST_LINE, source.size - at))
    length = 0
    for _ in range(2 if code in b"ci" else 1):
        length = data.find(b"\n", length) + 1
        if not length:
            raise _TooLongError if code in b"VS" and len(data) == _LONGEST_LINE else _NoPickleError
    if code in b"FILgp" and not _NUMBER.fullmatch(data, 0, length):
        raise _NoPickleError
    return length
