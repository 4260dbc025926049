"""torch-legacy: what `torch.save` wrote before 1.6, and still does with `_use_new_zipfile_serialization=False`.

    pickle   MUST   the magic number 0x1950a86a20f9469cfc6c
    pickle   MUST   the protocol version, 1001
    pickle   MUST   a dict `sys_info`; `little_endian` False MAY change the byte order of the counts below, not of elements
    pickle   MUST   the object; tensors are persistent ids ("storage", class, key, location, elements, view or None)
                    MAY ("module", class, source file, source) where a class of a pickled model comes first
    pickle   MUST   the keys of the storages, each once, in the order of their bytes
    storages MUST   for each key: the number of elements in 8 bytes, then the elements, little-endian, nothing between

Source: torch/serialization.py (`_legacy_save`, `_legacy_load`), torch/csrc/serialization.cpp (`writeFileRaw`).
"""

from __future__ import annotations

import struct

from ckpt_tools.errors import ConvertError
from ckpt_tools.formats.base import Decoded, Warned, trailing, validate_tree
from ckpt_tools.formats.legacy_stream import MAGIC_NUMBER, NESTED, PROTOCOL_VERSION, is_stream, read_stream
from ckpt_tools.formats.registry import Container
from ckpt_tools.io.content import Literal, Piece, Range
from ckpt_tools.io.output import Source
from ckpt_tools.pickling.stream import FilePart
from ckpt_tools.pickling.survey import Survey
from ckpt_tools.pickling.writer import write_pickle
from ckpt_tools.tree.dtypes import UINT8
from ckpt_tools.tree.nodes import Dict, List, Node, Object
from ckpt_tools.tree.visit import reachable

_SIZES = Dict([("short", 2), ("int", 4), ("long", 4)])
_SYS_INFO = Dict([("protocol_version", PROTOCOL_VERSION), ("little_endian", True), ("type_sizes", _SIZES)])


def decode(source: Source, available_bytes: dict[int, int] | None = None) -> Decoded:
    stream = read_stream(FilePart(source, 0, source.size), available_bytes=available_bytes)
    machine = stream.machine
    warnings = [*validate_tree(stream.root), *trailing(source.size - stream.end, "the last storage")]
    if stream.classes:
        shown = ", ".join(stream.classes[:5]) + (" ..." if len(stream.classes) > 5 else "")
        found = f"the source code of {len(stream.classes)} classes ({shown})"
        warnings.append(Warned("embedded-source", found, "none; it is not kept"))
    return Decoded(
        "torch-legacy", stream.root, source, list(machine.globals), list(machine.unusual), warnings=warnings,
        storage_bytes=stream.storage_bytes,
    )  # fmt: skip


def lay_out(root: Node) -> list[Piece]:
    """The pieces of a torch-legacy file with this tree. Storages get new keys, and lie in the order of the source file."""
    if any(type(node) is Object and node.function == NESTED for node in reachable(root)):
        raise ConvertError(
            "The checkpoint holds a nested tensor, which torch saves in torch-legacy and cannot load.",
            fix="Write another container.",
        )
    survey = Survey(root)
    storages = sorted(survey.storages, key=lambda one: one.content.offset if isinstance(one.content, Range) else 0)
    keys = {id(storage): str(index) for index, storage in enumerate(storages)}
    head = b"".join(write_pickle(node) for node in (MAGIC_NUMBER, PROTOCOL_VERSION, _SYS_INFO))
    head += write_pickle(root, survey, keys=keys) + write_pickle(List(list(keys.values())))
    pieces = [Piece(Literal(head))]
    for storage in storages:
        typed = storage.dtype if storage.dtype is not None and storage.dtype.storage is not None else UINT8
        pieces.append(Piece(Literal(struct.pack("<q", storage.nbytes // typed.itemsize))))
        pieces.append(Piece(storage.content))
    return pieces


CONTAINER = Container(is_stream, decode, in_zips=True)
