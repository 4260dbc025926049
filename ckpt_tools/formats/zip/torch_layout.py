"""Lay out a torch-zip: the tree as a pickle, storages copied in runs, where they were if they can stay there."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

from ckpt_tools.errors import TensorError
from ckpt_tools.formats.base import repeated
from ckpt_tools.formats.zip.directory import Record, RecordRange, is_record_name
from ckpt_tools.formats.zip.headers import ALIGNMENT
from ckpt_tools.formats.zip.layout import ZipLayout
from ckpt_tools.io.content import Content, Literal, Piece
from ckpt_tools.pickling.survey import Survey
from ckpt_tools.pickling.writer import write_pickle
from ckpt_tools.tree.nodes import Node, Storage

# Storages keep their offsets when that leaves a gap before them of at most this many bytes, or a 64th of all.
_SMALL_GAP = 4096


def lay_out(root: Node, *, folder: str = "archive", byteorder: str = "little", trust_crc: bool = True) -> list[Piece]:
    """The pieces of a torch-zip with this tree."""
    survey = Survey(root)
    storages = _in_source_order(_unique(survey.storages))
    whole = dict(_whole_records(storages, folder)) if trust_crc else {}
    head, tail = _small_records(root, survey, byteorder)
    layout = ZipLayout(folder)
    anchor = whole[storages[0].key].header if storages and storages[0].key in whole else 0
    if layout.room(head) > anchor >= layout.room(head[1:]):
        tail.insert(0, head.pop(0))  # the pickle has grown: it goes behind the storages, which stay
    _add_small(layout, head)
    gap_limit = max(_SMALL_GAP, sum(storage.nbytes for storage in storages) // 64)
    if 0 <= anchor - layout.position <= gap_limit:
        layout.pad(anchor - layout.position)
    for run in _runs(storages, whole):
        first = run[0].content
        if run[0].key in whole and type(first) is RecordRange:
            layout.copy(first.source, [whole[storage.key] for storage in run])
        else:
            _add_storage(layout, run[0], trust_crc=trust_crc)
    _add_small(layout, tail)
    return layout.finish()


_Small = list[tuple[str, Content]]


def _small_records(root: Node, survey: Survey, byteorder: str) -> tuple[_Small, _Small]:
    """What stands before the storages, and what behind them."""
    pickle = Literal(write_pickle(root, survey))
    return [("data.pkl", pickle), ("byteorder", Literal(byteorder.encode()))], [("version", Literal(b"3\n"))]


def _add_small(layout: ZipLayout, records: _Small) -> None:
    for name, content in records:
        layout.add(name, content, align=name == "data.pkl")


def _runs(storages: Sequence[Storage], whole: Mapping[str, Record]) -> Iterator[Sequence[Storage]]:
    """Storages in runs whose records lie one after another; one by one those that cannot be copied whole."""
    start, following, source = 0, None, None
    for index, storage in enumerate(storages):
        record = whole.get(storage.key)
        of = storage.content.source if type(storage.content) is RecordRange else None
        if index > start and (record is None or record.header != following or of is not source):
            yield storages[start:index]
            start = index
        following, source = (record.following, of) if record is not None and not record.dead else (None, None)
    if storages:
        yield storages[start:]


def _add_storage(layout: ZipLayout, storage: Storage, *, trust_crc: bool) -> None:
    content = storage.content
    if isinstance(content, RecordRange) and trust_crc:
        layout.add(f"data/{storage.key}", content, align=True, crc=content.record.crc)
    else:
        layout.add(f"data/{storage.key}", content, align=True)


def _unique(storages: list[Storage]) -> list[Storage]:
    for storage in storages:
        if not storage.key.isalnum() and not is_record_name(f"data/{storage.key}"):
            raise TensorError(f"A storage has the key {storage.key!r}, which cannot name a record.")
    if (twice := repeated((storage.key, storage) for storage in storages)) is not None:
        raise TensorError(f"Two storages have the key {twice!r}.")
    return storages


def _in_source_order(storages: list[Storage]) -> list[Storage]:
    """Records file by file as they lie there; then the others by their keys."""
    sources: dict[int, int] = {}

    def place(storage: Storage) -> tuple[int, int, int, str]:
        if isinstance(storage.content, RecordRange):
            source = sources.setdefault(id(storage.content.source), len(sources))
            return 0, source, storage.content.record.header, ""
        return 1, 0, int(storage.key) if storage.key.isdecimal() and len(storage.key) < 20 else 0, storage.key

    return sorted(storages, key=place)


def _whole_records(storages: Sequence[Storage], folder: str) -> Iterator[tuple[str, Record]]:
    """The storages that can be copied with their zip headers and descriptors: same name, aligned."""
    for storage in storages:
        if isinstance(storage.content, RecordRange):
            record = storage.content.record
            if record.name == f"{folder}/data/{storage.key}" and record.data % ALIGNMENT == 0:
                yield storage.key, record
