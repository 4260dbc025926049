"""torch-tar files, put together as torch 0.1 did; the torch of today reads them."""

import io
import struct
import tarfile
from collections.abc import Mapping, Sequence

from tests.hostile.pickles import glob, integer, list_of, pickle, text, tuple_of

Storage = tuple[int, str, bytes]  # key, class, bytes with their count
Tensor = tuple[int, int, Sequence[int], Sequence[int], int]  # key, storage, size, stride, offset


def storages(*rows: Storage, views: Sequence[Sequence[int]] = (), location: str = "cpu") -> bytes:
    """The member `storages`."""
    described = (pickle(tuple_of(integer(key), text(location), glob("torch", kind))) + data for key, kind, data in rows)
    listed = pickle(list_of(*(tuple_of(*map(integer, view)) for view in views)) if views else b"]")
    return pickle(integer(len(rows))) + b"".join(described) + listed


def tensors(*rows: Tensor) -> bytes:
    """The member `tensors`."""
    made = [pickle(integer(len(rows)))]
    for key, storage, size, stride, offset in rows:
        made.append(pickle(tuple_of(integer(key), integer(storage), glob("torch", "FloatTensor"))))
        made.append(struct.pack("<ii", len(size), 0) + struct.pack(f"<{2 * len(size) + 1}q", *size, *stride, offset))
    return b"".join(made)


def persistent(key: int) -> bytes:
    """A tensor or storage by its key."""
    return text(str(key)) + b"Q"


def tar(members: Mapping[str, bytes], kind: int = tarfile.PAX_FORMAT) -> bytes:
    """A tar of these members, in this order."""
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w:", format=kind) as archive:
        for name, data in members.items():
            info = tarfile.TarInfo(name)
            info.size = len(data)
            archive.addfile(info, io.BytesIO(data))
    return buffer.getvalue()


def torch_tar(root: bytes, stored: bytes, described: bytes | None) -> bytes:
    """A whole file."""
    members = {"sys_info": pickle(b"}"), "storages": stored, "pickle": pickle(root)}
    return tar(members | ({} if described is None else {"tensors": described}))


def checksummed(header: bytes) -> bytes:
    """A header of 512 bytes with the sum that makes it one."""
    block = header[:148] + b" " * 8 + header[156:]
    return block[:148] + b"%06o\0 " % sum(block) + block[156:]
