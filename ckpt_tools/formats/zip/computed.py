"""Where torch computes the bytes of storages to be, where a program asks it not to look (`calculate_storage_offsets`, meta).

Source: torch/serialization.py (`_load`, `_get_offset`), caffe2/serialize/inline_container.cc (`getPadding`).
"""

from __future__ import annotations

from collections.abc import Iterable

from ckpt_tools.formats.base import Warned
from ckpt_tools.formats.zip.directory import RecordRange
from ckpt_tools.formats.zip.headers import DESCRIPTOR, LOCAL
from ckpt_tools.tree.nodes import Storage

_FB_HEADER = 4  # bytes of the extra field that pads, before its padding
_WIDE = 2**32 - 1  # from here on the sizes of headers change


def misplaced(storages: Iterable[tuple[str, Storage]], folder: str, version: bytes, alignment: bytes) -> list[Warned]:
    """The warning for a record of a storage that is not where torch computes it to be.

    Args:
        storages: by key, in the order in which the pickle uses them. folder: the root of the records.
        version, alignment: what `.format_version` and `.storage_alignment` say; torch computes from version 1 on.
    """
    if version < b"1" or not alignment.isdigit() or not 0 < int(alignment[:9]) < _WIDE:
        return []
    step, position, data = int(alignment), -1, f"{folder}/data/"
    header = LOCAL.size + len(data.encode()) + _FB_HEADER
    for key, storage in storages:
        content, nbytes = storage.content, storage.nbytes
        if type(content) is not RecordRange or content.offset >= _WIDE or nbytes >= _WIDE or (position < 0 and key != "0"):
            return []  # torch refuses, or computes in another way
        if position < 0:
            place = content.offset
        else:
            start = position + header + (len(key) if key.isascii() else len(key.encode()))
            place = -(-start // step) * step
        if place != content.offset:
            at = f"the bytes of {data + key!r} are at {content.offset}"
            found = f"{at}, torch with calculate_storage_offsets takes those at {place}"
            expected = "records where .format_version and .storage_alignment have them"
            return [Warned("odd-storage-alignment", found, expected, "info")]
        position = place + nbytes + (DESCRIPTOR if nbytes else 0)
    return []
