"""Pickles in texts: in JSON and other texts as base64, as hexadecimal digits, or a character for each byte.

stable-baselines3 keeps them under `:serialized:` in the member `data`; Keras the code of a Lambda layer, by marshal.
"""

from __future__ import annotations

import binascii
import codecs
import contextlib
import json
import re
from collections.abc import Generator, Iterator

from ckpt_tools.formats import safetensors
from ckpt_tools.io.source import Source
from ckpt_tools.io.sources import Window

_BLOCK = 4 << 20
_IN_HDF5 = 16 << 20  # bytes of such a file that are looked through: attributes come first
_SMALL = 1 << 20  # bytes of any other file, which are looked through whatever they are
_HDF5 = b"\x89HDF\r\n\x1a\n"
_SHORTEST = 16  # characters of base64 that a pickle with a call takes
_LONGEST = 16 << 20  # bytes of one text
_CONTROL = re.compile(rb"[\x00-\x08\x0b\x0e-\x1f]")
_WORD = rb"[\w+/-]"  # characters of base64, of either alphabet
_ALPHABET = bytes(range(48, 58)) + bytes(range(65, 91)) + bytes(range(97, 123)) + b"+/-_="
# A run of base64, which may go on behind white space.
_IN_RUN = rb"%s{%d,}+=*+(?:\s++%s++=*+){,65536}+" % (_WORD, _SHORTEST, _WORD)
_RUN = re.compile(rb"(?P<text>%s)(?P<open>(?!))?" % _IN_RUN, re.ASCII)
# Behind what is too short: a text in quotes, a run, a quote without an end.
_SHORT = rb'(?:"[^"\\]{,13}+"|[^"\w+/-]++|%s{1,%d}+(?!%s)){,4096}+' % (_WORD, _SHORTEST - 1, _WORD)
_QUOTED = rb'"[^"\\]*+(?:\\.[^"\\]*+)*+"'
_TEXT = re.compile(_SHORT + rb'(?:(?P<text>%s|%s)|(?P<open>"))?' % (_QUOTED, _IN_RUN), re.DOTALL | re.ASCII)
_PART = re.compile(rf"[\w+/-]{{{_SHORTEST},}}=*", re.ASCII)
_LETTER = re.compile(rb"[A-Za-z_]")  # in whatever a pickle is in; a table has long numbers
_HEX = re.compile(r"[0-9a-fA-F\s]+")
_PLAIN = re.compile(r"[\w+/=\s-]*", re.ASCII)
_URL_SAFE = str.maketrans("-_", "+/")
CODE = re.compile(rb"[\xe3c](?:.\0\0\0){3}", re.DOTALL)  # of marshal: how many arguments a function has, of three kinds


def is_text(head: bytes) -> bool:
    with contextlib.suppress(UnicodeDecodeError):
        codecs.getincrementaldecoder("utf-8")().decode(head)  # it may end within a letter
        return bool(head) and _CONTROL.search(head) is None
    return False


def text_in(source: Source, head: bytes) -> Source | None:
    """The part of a file that may hold text: all of it, its header, its beginning; None where there is none."""
    if safetensors.sniff(head):
        return Window(source, 8, min(int.from_bytes(head[:8], "little"), source.size - 8))
    if head.startswith(_HDF5):
        return Window(source, 0, min(source.size, _IN_HDF5))
    return source if source.size <= _SMALL or is_text(head) else None


def bytes_in(source: Source) -> Iterator[tuple[int, bytes]]:
    """What may be meant by each text in a source that is long enough, and where the text stands."""
    for at, text in _texts(source):
        for made in _readings(text):
            yield at, made
        if not _PLAIN.fullmatch(text):  # what is base64 alone is no pickle by its characters
            with contextlib.suppress(UnicodeEncodeError):
                yield at, text.encode("latin-1")


def _texts(source: Source) -> Iterator[tuple[int, str]]:
    """The texts, in blocks of the source; one that goes on in the next is read there."""
    start, data, is_last = 0, b"", False
    while not is_last:
        at = start + len(data)
        data += source.read(at, min(max(_BLOCK, len(data)), source.size - at))
        is_last = start + len(data) >= source.size
        done = yield from _whole(data, start, _TEXT if b'"' in data and len(data) < _LONGEST else _RUN, is_last)
        if len(data) - done >= _LONGEST:
            raise ValueError("a text in it is longer than any real one")
        start, data = start + done, data[done:]


def _whole(data: bytes, start: int, form: re.Pattern[bytes], is_last: bool) -> Generator[tuple[int, str], None, int]:
    """The texts that are whole in a block, and where the rest of it begins."""
    done, end = 0, len(data.rstrip())
    for found in form.finditer(data):
        text, at = found["text"], found.start("text")
        if found["open"] is not None:
            at = found.start("open")
            if is_last:
                yield from ((start + run.start(), run[0].decode("ascii")) for run in _RUN.finditer(data, at + 1))
            return at
        if text is None:
            continue
        done = found.end()
        if done >= end and not is_last and text[:1] != b'"':
            return at
        if _LETTER.search(text):
            yield start + at, _unescaped(text)
    return max(done, len(data.rstrip(_ALPHABET)))


def _unescaped(found: bytes) -> str:
    text = found.decode(errors="replace")
    if not text.startswith('"'):
        return text
    with contextlib.suppress(ValueError):  # no JSON
        return str(json.loads(text, strict=False)) if "\\" in text else text[1:-1]
    return text[1:-1]


def _readings(text: str) -> Iterator[bytes]:
    """The bytes that a text may stand for. Python decodes base64 whatever else stands between its characters."""
    for part in (text, *(run for run in _PART.findall(text) if len(run) < len(text))):
        for written in dict.fromkeys((part, part.translate(_URL_SAFE))):
            with contextlib.suppress(binascii.Error):
                yield binascii.a2b_base64(written.encode("ascii", "ignore") + b"==")
        if _HEX.fullmatch(part):
            with contextlib.suppress(ValueError):  # half a byte
                yield bytes.fromhex(part)
