"""torch-tar: what `torch.save` wrote before 0.2. A tar of four members; read in place, never extracted.

    sys_info   MAY    a pickled dict about the machine that wrote it
    storages   MUST   a pickled count; for each a pickled (key, location, class), its number of elements in 8 bytes, the
                      elements, little-endian; then MAY a pickled list of views on them, read if empty
    tensors    MAY    a pickled count; for each a pickled (key, storage key, class), its number of dimensions
                      in 4 bytes and 4 unused ones, sizes, strides and offset in 8 bytes each
    pickle     MUST   the object; tensors and storages are persistent ids; classes come as (class, file, source)

Source: torch/serialization.py (`legacy_load` in `_legacy_load`); POSIX.1-2001, pax, "ustar Interchange Format".
"""

from __future__ import annotations

import contextlib
import struct
import tarfile
from collections.abc import Iterator
from functools import partial

from ckpt_tools import limits
from ckpt_tools.errors import TWO_FILES, CkptError, DamagedFileError, PickleError, TensorError, UnsupportedContainerError
from ckpt_tools.formats.base import TAR_BLOCK, Warned, is_tar, trailing, validate_tree
from ckpt_tools.formats.checkpoint import Checkpoint
from ckpt_tools.formats.torch_legacy import saved_as_view
from ckpt_tools.io.source import Source
from ckpt_tools.io.sources import Reader
from ckpt_tools.pickling.machine import Machine, Maker
from ckpt_tools.pickling.old_tensors import modernise
from ckpt_tools.pickling.stream import Part, Pickles
from ckpt_tools.pickling.torch_objects import MAKERS, META, on_meta, rebuild_tensor, storage_dtype
from ckpt_tools.text import some
from ckpt_tools.tree.dtypes import UINT8
from ckpt_tools.tree.nodes import MAX_DIMENSIONS, Entry, Global, List, Node, Storage

_LOOKED_AT = 64  # members, of which torch writes four
NEEDED = ("storages", "pickle")
_NAMES = ("sys_info", "storages", "tensors", "pickle")
_REBUILDS = (Global("torch._utils", "_rebuild_tensor"), Global("torch._utils", "_rebuild_tensor_v2"))
_SMALL_WINDOW = 4096


def sniff(head: bytes) -> bool:
    return is_tar(head) or head[257:262] == b"ustar"


def is_torchs(source: Source) -> bool:
    """Whether a tar has a member that torch wrote, as far as it can be read; any other is for `formats/packed.py`."""
    with contextlib.suppress(DamagedFileError):
        return any(is_file(info) and info.name in _NAMES for info in entries(source, _LOOKED_AT))
    return False


def decode(source: Source) -> Checkpoint:
    members, unread = _members(source)
    described = {name: Pickles(part, _SMALL_WINDOW) for name, part in members.items() if name != "pickle"}
    objects = _Objects()
    objects.read_storages(described["storages"])
    if "tensors" in described:
        objects.read_tensors(described["tensors"])
    if "sys_info" in described:  # about the machine, which only torch 0.1 read: for what it names
        with contextlib.suppress(CkptError):
            described["sys_info"].description()
    pickles = Pickles(members["pickle"])
    machine, root = pickles.load(lambda data, offset: Machine(data, objects.makers(), objects.load, offset))
    for others in described.values():
        others.tell(machine)
    root = modernise(root, machine.globals)
    warnings = [*validate_tree(root), *trailing(pickles.left, "the pickle", "trailing-pickle-bytes")]
    if unread:
        shown = ", ".join(map(repr, unread[:5]))
        warnings.append(Warned("other-members", f"{len(unread)} members that torch does not read ({shown})", "none"))
    unusual = ["the tar format, which weights_only does not take", *machine.unusual]
    size = sum(storage.nbytes for storage in objects.storages.values())
    return Checkpoint("torch-tar", root, source, list(machine.globals), unusual, warnings=warnings, storage_bytes=size)


def _members(source: Source) -> tuple[dict[str, Part], list[str]]:
    members: dict[str, Part] = {}
    others = []
    for info in entries(source, limits.RECORDS.value):
        if info.name not in _NAMES:
            others.append(info.name)
        elif info.name in members or not is_file(info):
            raise odd(f"two members {info.name!r}, or one that is not a file")
        else:
            members[info.name] = Part(source, info.offset_data, info.offset_data + info.size)
    if not members.keys() >= {*NEEDED}:
        what, why = (
            "This is a tar archive, but not one that torch 0.1 wrote.",
            f"It holds {some([*members, *others]) or 'nothing'}.",
        )
        raise UnsupportedContainerError(what, why=why, fix="Unpack it, and give ckpt the file in it.")
    return members, others


# --- what the members say


class _Objects:
    """Tensors and storages by their keys."""

    def __init__(self) -> None:
        self.storages: dict[int, Storage] = {}
        self.tensors: dict[int, Entry] = {}

    def load(self, pid: Node) -> Node:
        if type(pid) is tuple and len(pid) == 3 and type(pid[0]) is Global:
            return pid[0]
        return self.tensors.get(_key(pid)) or self.storage(pid)

    def storage(self, named: Node) -> Storage:
        if _key(named) not in self.storages:
            raise PickleError("The tar refers to a storage or tensor that is not in it.")
        return self.storages[_key(named)]

    def makers(self) -> dict[Global, Maker]:
        """The usual makers; files from elsewhere, which have no `tensors`, build them on a tuple that names the storage."""
        return {**MAKERS, **{name: partial(self._on_tuple, MAKERS[name]) for name in _REBUILDS}}

    def _on_tuple(self, maker: Maker, args: tuple[Node, ...]) -> Node:
        named = args[0] if args else None
        if type(named) is not tuple or len(named) != 5 or named[0] != "storage":
            return maker(args)
        storage = self.storage(named[2])
        if storage_dtype(named[1]) is not storage.dtype or named[4] != storage.nbytes // (storage.dtype or UINT8).itemsize:
            raise TensorError(f"Storage {storage.key!r} is used with two types or sizes.")
        return maker((storage, *args[1:]))

    def read_storages(self, pickles: Pickles) -> None:
        for named, location, kind in _records(pickles):
            key, dtype, (numel,) = _key(named), storage_dtype(kind), struct.unpack("<q", pickles.take(8))
            nbytes = numel * (dtype or UINT8).itemsize
            if location == META:
                raise on_meta(str(key))
            if not 0 <= nbytes <= pickles.left:
                raise TensorError(f"A storage claims {numel} elements, where {pickles.left} bytes are left.")
            if key in self.storages or (location is not None and type(location) is not str):
                raise _malformed()
            content = pickles.part.content(pickles.position, nbytes)
            self.storages[key] = Storage(str(key), dtype, nbytes, location, content)
            pickles.position += nbytes
        views = pickles.description() if pickles.left else List()
        if type(views) is not List:
            raise _malformed()
        if views.items:
            raise saved_as_view(_key(_parts(views.items[0], 4)[0]))

    def read_tensors(self, pickles: Pickles) -> None:
        for named, storage_key, _ in _records(pickles):
            (ndim,) = struct.unpack("<i", pickles.take(8)[:4])  # the format has 8 bytes, of which 4 count
            if not 0 <= ndim <= MAX_DIMENSIONS:
                raise TensorError(f"The tar has a tensor of {ndim} dimensions.")
            numbers = struct.unpack(f"<{2 * ndim + 1}q", pickles.take(8 * (2 * ndim + 1)))
            shape, stride = numbers[:ndim], numbers[ndim : 2 * ndim]
            storage = self.storage(storage_key)
            if not ndim and not storage.nbytes:
                shape, stride = (0,), (1,)  # without dimensions a tensor was empty then
            entry = rebuild_tensor((storage, numbers[-1], shape, stride))
            if _key(named) in self.tensors or type(entry) is not Entry:
                raise _malformed()
            self.tensors[_key(named)] = entry


def _malformed() -> PickleError:
    return PickleError("The tar describes a storage or tensor otherwise than torch writes it.")


def _key(node: Node) -> int:
    if type(node) is int and node.bit_length() <= 64:
        return node
    if type(node) is str and node.isascii() and node.isdecimal() and len(node) <= 20:
        return int(node)
    raise _malformed()


def _parts(node: Node, count: int) -> tuple[Node, ...]:
    parts = tuple(node.items) if type(node) is List else node
    if type(parts) is not tuple or len(parts) != count:
        raise _malformed()
    return parts


def _records(pickles: Pickles) -> Iterator[tuple[Node, ...]]:
    """The pickles of three parts of which a count comes first; behind each whoever asks reads on."""
    count = pickles.description()
    if type(count) is not int or not 0 <= count <= pickles.left // 8:
        raise _malformed()
    for _ in range(count):
        yield _parts(pickles.description(), 3)


# --- the members of a tar, as Python's tarfile, and so `torch.load`, reads its headers; none is extracted

_LONGEST = 1 << 16  # bytes of a header of names
_BYTES_PER_NODE = 16  # tarfile keeps a kilobyte for each header
_FILES = (tarfile.REGTYPE, tarfile.AREGTYPE)
_WITHOUT_BYTES = (
    *_FILES, tarfile.LNKTYPE, tarfile.SYMTYPE, tarfile.CHRTYPE, tarfile.BLKTYPE, tarfile.DIRTYPE, tarfile.FIFOTYPE,
)  # fmt: skip
_IDLE = ("mtime", "atime", "ctime", "uid", "gid", "uname", "gname", "comment", "linkpath")
_IDLE_STARTS = ("LIBARCHIVE.", "SCHILY.xattr.", "SCHILY.fflags", "RHT.security.", "MSWINDOWS.")


def odd(found: str) -> DamagedFileError:
    """The error for what readers of tars take in different ways."""
    fix = "Unpack it where that does no harm, and give ckpt the file in it."
    return DamagedFileError(f"The tar has {found}.", why=TWO_FILES, fix=fix)


class Headers(Reader):
    """What tarfile reads of a tar: headers, and what headers say. All of it is counted."""

    def __init__(self, source: Source, longest: int | None = None) -> None:
        super().__init__(source)
        self.budget, self.longest = limits.budget(source.size), longest

    def read(self, size: int | None = -1, /) -> bytes:
        if size == 1:  # whether the member before is whole
            self.at += 1
            return b"\0"[: self.source.size - self.at + 1]
        if self.longest is not None and (size is None or not 0 <= size <= self.longest):
            raise odd(f"a header of {size} bytes")
        data, what = super().read(size), "The tar has more headers than a file of its size can hold."
        self.budget.take(limits.NODES, len(data) // _BYTES_PER_NODE, what)
        return data


def is_file(info: tarfile.TarInfo) -> bool:
    """Whether a member is a regular file; the oldest tars mark a folder by its name alone."""
    return info.type in _FILES and not info.name.endswith("/")


def entries(source: Source, most: int) -> Iterator[tarfile.TarInfo]:
    """Each member, in file order, up to the first empty block."""
    try:
        archive = tarfile.open(  # noqa: SIM115  the source stays open
            fileobj=Headers(source, _LONGEST), mode="r:", encoding="utf-8", errors="surrogateescape"
        )
        for count, info in enumerate(archive):
            if count == most:
                raise odd(f"more than {most} members")
            _check(source, archive, info)
            yield info
    except tarfile.TarError as error:
        raise DamagedFileError("The headers of the tar are damaged.", why=f"{error}.") from None
    at = archive.offset
    if at + TAR_BLOCK <= source.size and any(source.read(at, TAR_BLOCK)):
        raise DamagedFileError(f"The tar header at byte {at} is damaged.", why="Its checksum does not match.")


def _check(source: Source, archive: tarfile.TarFile, info: tarfile.TarInfo) -> None:
    """Refuse what is cut off, and what other readers of tars take in another way than tarfile."""
    end = info.offset_data + info.size
    if info.size < 0 or info.sparse is not None or (not is_file(info) and (info.type not in _WITHOUT_BYTES or info.size)):
        raise odd(f"a member of kind {info.type!r} with {info.size} bytes")
    if end > source.size:
        raise DamagedFileError(
            f"The tar is cut off in its member {info.name!r}.",
            why=f"It ends after {source.size} bytes; the member goes up to byte {end}.",
            fix="An interrupted download or a full disk does that: get it again.",
        )
    for key in info.pax_headers:
        said_of_all = key in archive.pax_headers
        if not (key in _IDLE or key.startswith(_IDLE_STARTS) or (key in ("path", "size") and not said_of_all)):
            raise odd(f"a pax header with {key[:40]!r}")
    at, names = info.offset, 0  # headers in front of the member's own may name it, one of them
    while at + TAR_BLOCK < info.offset_data:
        header = source.read(at, TAR_BLOCK)
        names += header[156:157] in b"xXL"
        at += TAR_BLOCK + -(-tarfile.TarInfo.frombuf(header, "utf-8", "surrogateescape").size // TAR_BLOCK) * TAR_BLOCK
    if names > 1:
        raise odd("two names for one member")
