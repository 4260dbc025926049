"""Where torch computes the bytes of storages to be, where a program asks it not to look (`calculate_storage_offsets`, meta).

Source: torch/serialization.py (`_load`, `_get_offset`), caffe2/serialize/inline_container.cc (`getPadding`).
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from ckpt_tools.formats.base import Warned
from ckpt_tools.formats.zip.directory import Record
from ckpt_tools.formats.zip.headers import DESCRIPTOR, LOCAL

_FB_HEADER = 4  # bytes of the extra field that pads, before its padding
_WIDE = 2**32 - 1  # from here on the sizes of headers change


def misplaced(
    records: Mapping[str, Record], folder: str, sizes: Iterable[tuple[str, int]], version: bytes, alignment: bytes
) -> list[Warned]:
    """The warning for a record of a storage that is not where torch computes it to be.

    Args:
        records: by name. folder: their root. sizes: key and bytes of each storage, in the order in which the pickle uses them.
        version, alignment: what `.format_version` and `.storage_alignment` say; torch computes from version 1 on.
    """
    if version < b"1" or not alignment.isdigit() or not 0 < int(alignment[:9]) < _WIDE:
        return []
    step, position, data = int(alignment), -1, f"{folder}/data/"
    header = LOCAL.size + len(data.encode()) + _FB_HEADER
    for key, nbytes in sizes:
        record = records.get(data + key)
        if record is None or record.deflated or (position < 0 and key != "0") or record.data >= _WIDE or nbytes >= _WIDE:
            return []  # torch refuses, or computes in another way
        if position < 0:
            place = record.data
        else:
            start = position + header + (len(key) if key.isascii() else len(key.encode()))
            place = -(-start // step) * step
        if place != record.data:
            found = (
                f"the bytes of {data + key!r} are at {record.data}, torch with calculate_storage_offsets takes those at {place}"
            )
            expected = "records where .format_version and .storage_alignment have them"
            return [Warned("odd-storage-alignment", found, expected, "info")]
        position = place + nbytes + (DESCRIPTOR if nbytes else 0)
    return []
