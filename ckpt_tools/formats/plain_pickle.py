"""pickle: what `pickle.dump` wrote without torch's help. One pickle; tensors carry their storages inside as bytes.

Tensors are built on calls of `torch.storage._load_from_bytes(bytes)`, whose bytes are a torch-legacy stream; arrays of NumPy
and of joblib are tensors too. Source: torch/storage.py, CPython's Lib/pickle.py.
"""

from __future__ import annotations

import re

from ckpt_tools.errors import CkptError, DamagedFileError, LimitError
from ckpt_tools.formats import torch_legacy
from ckpt_tools.formats.base import trailing, validate_tree
from ckpt_tools.formats.checkpoint import Checkpoint
from ckpt_tools.formats.numpy_files import Arrays
from ckpt_tools.formats.torch_legacy import MAGIC_NUMBER, PROTOCOL_VERSION, Blobs, load_with_blobs
from ckpt_tools.formats.zip_archives import decode_inside
from ckpt_tools.io.source import Source
from ckpt_tools.pickling.arrays_behind import array_behind
from ckpt_tools.pickling.machine import Machine
from ckpt_tools.pickling.old_tensors import modernise
from ckpt_tools.pickling.stream import Part, Pickles
from ckpt_tools.tree import exchange
from ckpt_tools.tree.nodes import Node, Object
from ckpt_tools.tree.visit import walk

# Protocols 2 to 5 say so. 0 and 1 do not: their pickles of a dict or list, or of a call of something well known.
_START = re.compile(
    rb"\x80[\x02-\x05]|\([dl]p?\d*\n|[}\]]q\x00\(|c(?:__builtin__|builtins|collections|copy_reg|copyreg|numpy|torch)[\w.]*\n\w+\n"
)
_ZIP, _BYTES = b"PK\3\4", frozenset((bytes,))
_PICKLE, _JOBLIB = "a pickle that torch.save did not write", "a joblib dump"
_DAMAGED_MAGIC = b"l\xfc\x9cF\xf9 j\xa8P\x19."  # of torch-legacy; what stands before it may have lost a line feed


def sniff(head: bytes) -> bool:
    return _START.match(head) is not None and _DAMAGED_MAGIC not in head[:32]


def decode(source: Source) -> Checkpoint:
    pickles = Pickles(Part(source, 0, source.size))
    machine, root, blobs = load_with_blobs(pickles, arrays=array_behind)
    left = pickles.left
    if type(root) is int and root == MAGIC_NUMBER:  # torch-legacy, in opcodes that torch does not write and reads
        return torch_legacy.decode(source)
    if left and type(root) is Object and _goes_on(pickles):
        why = "torch.load would run it, and go on."
        raise DamagedFileError("This is a torch-legacy stream whose magic number is what a call gives.", why=why)
    arrays = Arrays(source)
    root, inner = _with_archives(modernise(arrays.as_tensors(root, blobs), machine.globals), blobs)
    names = dict.fromkeys([*machine.globals, *(name for decoded in inner for name in decoded.globals)])
    return Checkpoint(
        "pickle", root, source, list(names), [_JOBLIB if machine.has_arrays else _PICKLE, *machine.unusual],
        warnings=[*validate_tree(root), *trailing(left, "the pickle")],
        storage_bytes=blobs.storage_bytes + arrays.storage_bytes + sum(decoded.storage_bytes for decoded in inner),
    )  # fmt: skip


def _with_archives(root: Node, blobs: Blobs) -> tuple[Node, list[Checkpoint]]:
    """The tree with what torch.save wrote into bytes, as skorch has it, in their place; what cannot be read stays."""
    found: list[Checkpoint] = []

    def swap(node: Node) -> Node:
        part = blobs.part_of(node) if type(node) is bytes and node.startswith(_ZIP) else None
        if part is None or part.source is None:
            return node
        try:
            decoded = decode_inside(part.source, (part.at, part.end), f"bytes{len(found)}")
        except CkptError:
            return node
        if decoded.byteorder != "little":
            return node
        found.append(decoded)
        return decoded.root

    if not any(type(node) is bytes and node.startswith(_ZIP) for _, node in walk(root, plain=False, values=_BYTES)):
        return root, found
    return exchange.replace(root, swap, values=_BYTES), found


def _goes_on(pickles: Pickles) -> bool:
    """Whether the pickles may be those behind a magic number: protocol version, sys_info, object, keys."""
    try:
        for position in range(4):
            node = pickles.load(lambda data, offset: Machine(data, {}, lambda _: None, offset))[1]
            if position == 0 and type(node) is not Object:  # what a call gives may be the version
                return type(node) is int and node == PROTOCOL_VERSION
    except CkptError as error:
        return isinstance(error, LimitError)
    return True
