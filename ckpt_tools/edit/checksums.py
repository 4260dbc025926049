"""The CRC-32 of records whose bytes leave them: into another container, or through a computation.

A record that is read from its start to its end is checked on the way (`io/content.py`, `io/writer.py`); what is left is read
for it.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from ckpt_tools.formats.zip_directory import RecordRange
from ckpt_tools.io.content import CHUNK, Content, Joined, Late, Literal, Part, Piece, Range, chunks, crc32, made_of
from ckpt_tools.io.sources import Window
from ckpt_tools.tree.nodes import Node, Storage
from ckpt_tools.tree.visit import reachable

_Key = tuple[int, int, int]


class Leaving:
    """Records that a conversion takes bytes out of. Records without a CRC-32 are not among them."""

    def __init__(self, contents: Iterable[Content | Late]) -> None:
        self.records: dict[_Key, Range] = {}
        self.passed: set[_Key] = set()
        for content, record in (found for whole in contents for one in made_of(whole) for found in _checked(one)):
            if content.length and _key(content) not in self.records:
                self.records[_key(content)] = content
                head = content.offset - record.offset
                before = crc32(record.source.read(record.offset, head)) if head else 0
                content.source.expected[content.offset, content.length] = record.record.crc, record.record.name, before

    def pieces(self, pieces: Iterable[Piece]) -> list[Piece]:
        """The pieces; the checksum of one that is a whole record is that of the record."""
        found = list(pieces)
        for piece in found:
            content, checksum = piece.content, piece.checksum
            if isinstance(content, Joined):
                self.passed.update(_key(part) for part in content.parts if isinstance(part, Range))
            elif isinstance(content, Range) and _key(content) in self.records:
                self.passed.add(_key(content))
                if checksum is not None and isinstance(content, RecordRange):
                    checksum.expected, checksum.label = content.record.crc, content.record.name
                    content.source.expected.pop((content.offset, content.length), None)
        return found

    def check_rest(self, rank: int = 0, world: int = 1) -> None:
        """Read the records of which only parts were read, once all is written; of several processes each its share."""
        rest = [content for key, content in self.records.items() if key not in self.passed]
        for content in rest[rank::world]:
            if (content.offset, content.length) in content.source.expected:
                for _ in chunks(content):
                    pass


def _key(content: Range) -> _Key:
    return id(content.source), content.offset, content.length


def leaving(root: Node, pieces: Iterable[Piece], *, keeps: bool) -> Leaving:
    """What leaves a tree that is laid out as these pieces; `keeps`: as a torch zip, where a whole record keeps its CRC-32."""
    if keeps:
        return Leaving(piece.content for piece in pieces if type(piece.content) not in (RecordRange, Literal))
    return Leaving(node.content for node in reachable(root) if type(node) is Storage)


def _checked(content: Content | Late) -> Iterator[tuple[Range, RecordRange]]:
    """The range that is to be read to know the CRC-32 of a record, and the record."""
    of = content.of if isinstance(content, Part) else content
    if isinstance(of, RecordRange) and of.record.crc:
        assert isinstance(content, Range)
        is_rest = content.offset + content.length == of.offset + of.length and of.length - content.length < CHUNK
        yield (content if is_rest else of), of  # the rest of a record behind a header is read once
    elif isinstance(of, Range) and isinstance(of.source, Window) and of.source.record is not None:
        record = of.source.record
        if isinstance(record, RecordRange) and record.record.crc:
            yield record, record
