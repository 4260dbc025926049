"""The CRC-32 of records whose bytes leave them: into another container, or through a computation.

A record that is read from its start to its end is checked on the way (`io/content.py`); what is left is read for it.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from ckpt_tools.formats.zip.directory import Recorded, RecordRange
from ckpt_tools.io.content import Checksum, Piece, Range, chunks, made_of
from ckpt_tools.tree.nodes import Node, Storage
from ckpt_tools.tree.visit import reachable

_Key = tuple[int, int, int]


class Leaving:
    """Records that a conversion takes bytes out of. Records without a CRC-32 are not among them."""

    def __init__(self, root: Node, *, keeps: bool) -> None:
        """Of a tree that is about to be written; `keeps`: as a torch zip, where a whole record keeps its CRC-32."""
        self.records: dict[_Key, Recorded] = {}
        self.passed: set[_Key] = set()
        for content in _sources(root, whole=not keeps):
            if content.length and content.record.crc:
                self.records[_key(content)] = content
                content.source.expected[content.offset, content.length] = content.record.crc, content.record.name

    def pieces(self, pieces: Iterable[Piece]) -> list[Piece]:
        """The pieces, those that are whole records with their checksum."""
        return [self._piece(piece) for piece in pieces]

    def _piece(self, piece: Piece) -> Piece:
        content, checksum = piece.content, piece.checksum
        if not isinstance(content, Range) or _key(content) not in self.records:
            return piece
        self.passed.add(_key(content))
        record = self.records[_key(content)].record
        if checksum is None:
            return Piece(content, Checksum(content.length, record.crc, record.name))
        checksum.expected, checksum.label = record.crc, record.name
        return piece

    def check_rest(self, rank: int = 0, world: int = 1) -> None:
        """Read the records of which only parts were read, once all is written; of several processes each its share."""
        rest = [content for key, content in self.records.items() if key not in self.passed]
        for content in rest[rank::world]:
            if (content.offset, content.length) in content.source.expected:
                for _ in chunks(content):
                    pass


def _key(content: Range) -> _Key:
    return id(content.source), content.offset, content.length


def _sources(root: Node, *, whole: bool) -> Iterator[Recorded]:
    """The records that the tree's storages are worked out of, and with `whole` those that they are."""
    for node in reachable(root, dicts=False):
        if type(node) is Storage and (whole or not isinstance(node.content, RecordRange)):
            yield from (content for content in made_of(node.content) if isinstance(content, Recorded))
