"""torch-legacy: what `torch.save` wrote before 1.6, and still does with `_use_new_zipfile_serialization=False`.

Pickles one behind another: the magic number 0x1950a86a20f9469cfc6c; the protocol version 1001; a dict `sys_info`; the object,
whose tensors are persistent ids ("storage", class, key, location, elements, None) and whose classes may be ("module", class,
source file, source); the keys of the storages in the order of their bytes. Then for each the number of elements in 8 bytes,
and the elements, little-endian. A pickle may hold such a stream in a string of bytes: so a storage pickles itself.

Source: torch/serialization.py (`_legacy_save`, `_legacy_load`), torch/csrc/serialization.cpp (`writeFileRaw`)
and torch/storage.py.
"""

from __future__ import annotations

import itertools
import re
import struct

from ckpt_tools.errors import ConvertError, DamagedFileError, LimitError, PickleError, TensorError, UnsupportedContainerError
from ckpt_tools.formats.base import Warned, trailing, validate_tree
from ckpt_tools.formats.checkpoint import Checkpoint
from ckpt_tools.io.content import Literal, Piece, Range
from ckpt_tools.io.source import Source
from ckpt_tools.pickling.machine import Behind, Machine, PersistentLoad
from ckpt_tools.pickling.old_tensors import modernise
from ckpt_tools.pickling.stream import Part, Pickles
from ckpt_tools.pickling.torch_objects import LOAD_FROM_BYTES, MAKERS, Storages
from ckpt_tools.pickling.writer import Survey, write_pickle
from ckpt_tools.tree import visit
from ckpt_tools.tree.dtypes import UINT8
from ckpt_tools.tree.nodes import Dict, Entry, Global, List, Node, Object

MAGIC_NUMBER = 0x1950A86A20F9469CFC6C
PROTOCOL_VERSION = 1001
_MAX_BLOBS_IN_BLOBS = 8
_BYTES_PER_NODE = 4  # as many as the file has for each of its bytes
_KEY = re.compile(r"[0-9]{1,40}")
_NOWHERE = Literal(b"")
NESTED = Global("torch._utils", "_rebuild_nested_tensor")


class Blobs:
    """Makes machines that read `torch.storage._load_from_bytes`: bytes that hold a stream of their own, often one storage."""

    def __init__(self, part: Part | None = None, depth: int = 0, prefix: str = "") -> None:
        self.part, self.depth, self.prefix = part, depth, prefix
        self.storage_bytes = self.count = 0
        self._machine, self._anchor = Machine(b"", {}, _refuse), 0

    def machine(
        self, data: bytes, load: PersistentLoad, offset: int = 0, anchor: int = 0, arrays: Behind | None = None
    ) -> Machine:
        """The machine for bytes that lie in the file from `anchor` on; what one before has found is forgotten."""
        self.storage_bytes = self.count = 0
        self._anchor = anchor
        self._machine = Machine(data, {**MAKERS, LOAD_FROM_BYTES: self._load}, load, offset, arrays=arrays)
        return self._machine

    def _load(self, args: tuple[Node, ...]) -> Node:
        """What the bytes hold; None, which leaves an object, where that is not a torch-legacy stream."""
        data = args[0] if len(args) == 1 else None
        if type(data) is not bytes or not is_stream(data):
            return None
        if self.depth == _MAX_BLOBS_IN_BLOBS:
            raise LimitError(f"The pickle holds pickled storages inside one another, more than {_MAX_BLOBS_IN_BLOBS} deep.")
        self._machine.left -= len(data) // _BYTES_PER_NODE  # one string of bytes can be given again and again
        pickles, storages = Pickles(self.part_of(data)), _LegacyStorages(f"{self.prefix}{self.count}.")
        machine, root = _read_stream(pickles, storages, self.depth + 1)
        self.count += 1
        self.storage_bytes += storages.storage_bytes
        self._machine.globals.update(machine.globals)
        self._machine.unusual.update(machine.unusual)
        return root

    def part_of(self, data: bytes) -> Part:
        """The bytes, and where they lie in the file if they lie there as they are."""
        place = self._machine.places.get(id(data))
        if place is None or self.part is None or self.part.source is None:
            return Part.of_bytes(data)
        return Part.of_bytes(data, self.part.source, self.part.at + self._anchor + place[0])


def load_with_blobs(pickles: Pickles, *, prefix: str = "", arrays: Behind | None = None) -> tuple[Machine, Node, Blobs]:
    blobs = Blobs(pickles.part, prefix=prefix)
    machine, root = pickles.load(lambda data, offset: blobs.machine(data, _refuse, offset, pickles.anchor, arrays))
    return machine, root, blobs


def _refuse(pid: Node) -> Node:
    raise PickleError("The pickle refers to something outside it: it is a part of another file.")


def is_stream(head: bytes) -> bool:
    """Whether bytes begin with the pickled magic number, in any protocol that torch.save takes."""
    return _MAGIC.match(head) is not None


_MAGIC = re.compile(
    rb"\x80[\x02-\x05](?:\x95.{8})?\x8a\x0a" + re.escape(MAGIC_NUMBER.to_bytes(10, "little")) + rb"\.|L%dL\n\." % MAGIC_NUMBER,
    re.DOTALL,
)


sniff = is_stream


def _read_stream(
    pickles: Pickles, storages: _LegacyStorages, depth: int = 0, available_bytes: dict[int, int] | None = None
) -> tuple[Machine, Node]:
    begin, version, info = pickles.description(), pickles.description(), pickles.description()
    if begin != MAGIC_NUMBER or version != PROTOCOL_VERSION or type(info) is not Dict:
        raise PickleError(f"The stream does not begin with torch's magic number, protocol {PROTOCOL_VERSION} and sys_info.")
    blobs = Blobs(pickles.part, depth, storages.prefix)

    def make(data: bytes, offset: int) -> Machine:
        storages.forget()
        return blobs.machine(data, storages.load, offset, pickles.anchor)

    try:
        machine, root = pickles.load(make)
    except PickleError as error:
        if not pickles.cut:
            raise
        what = "The file ends within the pickle that lists its tensors."
        raise DamagedFileError(what, why=error.what, fix="It was cut off: get it again.") from None
    if any(storage.dtype is None for _, storage in storages.by_key.values()):
        machine.unusual["an UntypedStorage in torch-legacy, which torch saves and cannot load"] = None
    if NESTED in machine.globals:
        machine.unusual["a nested tensor in torch-legacy, which torch saves and cannot load"] = None
    keys = _read_keys(pickles, storages)
    pickles.tell(machine)
    _place(pickles, keys, storages, root, little=info.get("little_endian") is not False, available_bytes=available_bytes)
    storages.storage_bytes = sum(storage.nbytes for _, storage in storages.by_key.values()) + blobs.storage_bytes
    return machine, modernise(root, machine.globals)


class _LegacyStorages(Storages):
    """Turns the persistent ids of a legacy pickle into storages and classes. Where the bytes lie is known only later."""

    def __init__(self, prefix: str = "") -> None:
        super().__init__(lambda key, nbytes: _NOWHERE, prefix)
        self.forget()

    def forget(self) -> None:
        self.by_key.clear()
        self.classes: list[str] = []
        self.storage_bytes = 0

    def load(self, pid: Node) -> Node:
        """The storage of ("storage", class, key, location, elements, None), the class of ("module", class, file, source)."""
        if type(pid) is tuple and len(pid) == 4 and pid[0] == "module" and type(pid[1]) is Global:
            if type(pid[3]) is str:
                self.classes.append(str(pid[1]))
            return pid[1]
        if type(pid) is not tuple or len(pid) != 6 or pid[0] != "storage":
            why = "Expected ('storage', class, key, location, size, view)."
            raise PickleError("The pickle refers to something outside it that is not a storage.", why=why)
        key, view = pid[2], pid[5]
        if type(key) is not str or not _KEY.fullmatch(key):
            raise PickleError("The pickle refers to a storage by a malformed id: its key is not a number.")
        if view is not None:
            raise saved_as_view(key)
        return self.storage(pid[:5])


def saved_as_view(key: object) -> UnsupportedContainerError:
    what = f"Storage {str(key)!r} is saved as a view of another, which only PyTorch up to 0.3 wrote."
    return UnsupportedContainerError(what, fix="Load it with torch.load, and save what that gives.")


def _read_keys(pickles: Pickles, storages: _LegacyStorages) -> list[str]:
    try:
        node = pickles.description()
    except PickleError as error:
        raise DamagedFileError("The list of storages is malformed, or the file ends before it.", why=error.what) from None
    items = node.items if type(node) is List else [node]
    keys = [key for key in items if type(key) is str]
    if len(keys) != len(items) or sorted(keys) != sorted(storages.by_key):
        others = ", ".join(sorted(map(repr, {*keys} ^ {*storages.by_key}))[:5])[:300] or "one is there twice, or is not text"
        raise DamagedFileError(f"The list of storages is not that of the tensors' storages: {others}.")
    return keys


def _place(
    pickles: Pickles, keys: list[str], storages: _LegacyStorages, root: Node, *,
    little: bool, available_bytes: dict[int, int] | None,
) -> None:  # fmt: skip
    if pickles.part.source is not None and pickles.part.data is None:
        starts = itertools.accumulate((8 + storages.by_key[key][1].nbytes for key in keys), initial=pickles.position)
        pickles.part.source.prefetch([(start, 8) for start in starts][:-1])
    for index, key in enumerate(keys):
        storage = storages.by_key[key][1]
        nbytes, numel = storage.nbytes, storage.nbytes // (storage.dtype or UINT8).itemsize
        if (left := pickles.left - 8) >= 0:
            # a big-endian machine wrote the count either way, depending on the version; elements are little-endian
            data = pickles.take(8)
            counts = [int.from_bytes(data, "little", signed=True), *([] if little else [int.from_bytes(data, "big")])]
            if numel not in counts:
                raise TensorError(f"Storage {key!r} should have {numel} elements; the file says {counts[0]}.")
        if left < nbytes:
            if available_bytes is None:
                raise _cut(pickles, root, storages, keys[:index], len(keys))
            nbytes = available_bytes[id(storage)] = max(left, 0)
        # its reader alone may set this, who learns it last: nothing else has seen the storage yet
        object.__setattr__(storage, "content", pickles.part.content(pickles.position, nbytes))
        pickles.position += nbytes if left >= 0 else pickles.left


def _cut(pickles: Pickles, root: Node, storages: _LegacyStorages, whole: list[str], count: int) -> DamagedFileError:
    complete = {id(storages.by_key[key][1]) for key in whole}
    entries = [node for node in visit.reachable(root) if type(node) is Entry]
    good = sum(id(entry.storage) in complete or not entry.storage.nbytes for entry in entries)
    return DamagedFileError(
        f"The file is cut off: {good} of {len(entries)} tensors complete.",
        why=f"It ends after {pickles.part.end} bytes, within storage {len(whole) + 1} of {count}.",
        whole=good,
    )


def decode(source: Source, available_bytes: dict[int, int] | None = None) -> Checkpoint:
    pickles, storages = Pickles(Part(source, 0, source.size)), _LegacyStorages()
    machine, root = _read_stream(pickles, storages, available_bytes=available_bytes)
    warnings = [*validate_tree(root), *trailing(pickles.left, "the last storage")]
    if storages.classes:
        shown = ", ".join(storages.classes[:5]) + (" ..." if len(storages.classes) > 5 else "")
        found = f"the source code of {len(storages.classes)} classes ({shown})"
        warnings.append(Warned("embedded-source", found, "none; it is not kept"))
    return Checkpoint(
        "torch-legacy", root, source, list(machine.globals), list(machine.unusual), warnings=warnings,
        storage_bytes=storages.storage_bytes,
    )  # fmt: skip


# --- laying out

_SIZES = Dict([("short", 2), ("int", 4), ("long", 4)])
_SYS_INFO = Dict([("protocol_version", PROTOCOL_VERSION), ("little_endian", True), ("type_sizes", _SIZES)])


def lay_out(root: Node) -> list[Piece]:
    """The pieces of a torch-legacy file with this tree. Storages get new keys, and lie in the order of the source file."""
    if any(type(node) is Object and node.function == NESTED for node in visit.reachable(root)):
        what = "The checkpoint holds a nested tensor, which torch saves in torch-legacy and cannot load."
        raise ConvertError(what, fix="Write another container.")
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
