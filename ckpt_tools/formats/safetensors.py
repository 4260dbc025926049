"""safetensors: an 8-byte little-endian length N, N bytes of JSON, then the tensors' bytes without holes.

Source: the safetensors README ("Format") and its `tensor.rs` (`Metadata::validate`). Two keys of our own in `__metadata__`
carry what the format has no place for, as JSON: tied tensors (name -> the name that holds the bytes), a `_metadata`.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from math import prod
from typing import Any, NoReturn

from ckpt_tools import limits
from ckpt_tools.errors import ConvertError, DamagedFileError
from ckpt_tools.formats.base import Warned, check_text, unique
from ckpt_tools.formats.checkpoint import Checkpoint
from ckpt_tools.io.content import Content, Literal, Piece, Range
from ckpt_tools.io.parsers import brief, load_json
from ckpt_tools.io.source import Source
from ckpt_tools.tree.dtypes import BY_SAFETENSORS, UINT8, DType
from ckpt_tools.tree.nodes import MAX_DIMENSIONS, MAX_ELEMENTS, Dict, Entry, Storage, as_dict, check, contiguous_stride

MAX_HEADER = 100_000_000  # what safetensors itself reads
MAX_WARNINGS = 20  # as many unknown fields are told; the first ones say what there is to say
ALIASES = "ckpt_tools.aliases"
STATE_DICT_METADATA = "ckpt_tools.state_dict_metadata"
GGUF_TYPES = "ckpt_tools.gguf_types"  # of what came from a GGUF: the type of each value that is not text


def sniff(head: bytes) -> bool:
    if head[8:9] != b"{" or head.startswith(b"GGUF") or (head[:8].isascii() and head[:8].decode().isprintable()):
        return False
    if not any(head[4:8]):
        return True
    from ckpt_tools.formats.frameworks import flax  # whose maps may have a brace there

    return not flax.sniff(head)


# --- reading


def decode(source: Source, unread: dict[str, str] | None = None) -> Checkpoint:
    header, data_start = _read_header(source)
    warnings: list[Warned] = []
    metadata = _metadata(header, warnings)
    size = source.size - data_start
    for count, what in ((len(metadata), "entries of metadata"), (len(header), "tensors")):
        limits.NODES.check(limits.LISTED * count, f"The file lists {count} {what} in {source.size} bytes.", source.size)
    spans: list[tuple[int, int, str]] = []
    items: list[tuple[Any, Any]] = []
    for index, (name, info) in enumerate(header.items()):
        try:
            dtype, shape, begin, end = _tensor_info(name, info, warnings)
        except DamagedFileError as error:
            offsets: Any = info.get("data_offsets") if isinstance(info, dict) else None
            if unread is None or not (_are_counts(offsets) and len(offsets) == 2 and offsets[0] <= offsets[1]):
                raise
            unread[name], (begin, end) = error.what, offsets
            dtype, shape = UINT8, (end - begin,)
        spans.append((begin, end, name))
        storage = Storage(str(index), dtype, end - begin, None, Range(source, data_start + begin, end - begin))
        entry = Entry(storage, dtype, shape, contiguous_stride(shape), 0)
        check(entry, repr(name))
        items.append((name, entry))
    _check_spans(spans, size)
    root = Dict(restore_aliases(items, metadata), ordered=True)
    root.attributes = restore_state_dict_metadata(metadata)
    return Checkpoint("safetensors", root, source, metadata=metadata, warnings=warnings, storage_bytes=size)


def entries_of(decoded: Checkpoint) -> dict[str, Entry]:
    return {name: entry for name, entry in as_dict(decoded.root).named.items() if type(entry) is Entry}


def _read_header(source: Source) -> tuple[dict[str, Any], int]:
    if source.size < 8:
        raise DamagedFileError(f"The file has {source.size} bytes; a safetensors file starts with a length of 8 bytes.")
    length = int.from_bytes(source.read(0, 8), "little")
    if length < 2 or 8 + length > source.size:
        raise DamagedFileError(f"The safetensors header claims {length} bytes; {source.size - 8} follow.")
    limits.HEADER.check(length, f"The safetensors header has {length} bytes.")
    raw = source.read(8, length)
    if not raw.startswith(b"{"):
        raise DamagedFileError("The safetensors header does not begin with '{'.", why=f"It begins with {raw[:8]!r}.")

    def no_value(text: str) -> NoReturn:
        raise ValueError(f"{text} is not a value or size that safetensors has")

    # "-0" is a whole number to Python and none to safetensors; a hook for each number takes time, so only where it matters
    whole = (lambda text: no_value(text) if text == "-0" else int(text)) if b"-0" in raw else None
    try:
        header: dict[str, Any] = load_json(raw.decode("utf-8"), pairs=unique, constant=no_value, whole=whole)
    except ValueError as error:  # one of Unicode too
        raise DamagedFileError("The safetensors header is not JSON in UTF-8.", why=f"{error}.") from None
    return header, 8 + length


def _metadata(header: dict[str, Any], warnings: list[Warned]) -> dict[str, str]:
    found = header.pop("__metadata__", {})
    if found is None:
        warnings.append(Warned("null-metadata", "__metadata__ is null", "a map of strings"))
        return {}
    try:
        check_text(found.values())
    except (AttributeError, TypeError, ValueError):
        raise DamagedFileError("The safetensors metadata is not a map of texts.") from None
    metadata: dict[str, str] = found
    return metadata


def _tensor_info(name: str, info: Any, warnings: list[Warned]) -> tuple[DType, tuple[int, ...], int, int]:
    if not isinstance(info, dict) or not info.keys() >= _FIELDS:
        raise DamagedFileError(f"Tensor {name!r} in the safetensors header lacks dtype, shape or data_offsets.")
    for extra in info.keys() - _FIELDS if len(info) > len(_FIELDS) else ():
        if isinstance(info[extra], dict | list):  # how deep safetensors reads is another matter
            raise DamagedFileError(f"Tensor {name!r} has the unknown field {extra!r}, a list or a map.")
        if len(warnings) < MAX_WARNINGS:
            warnings.append(Warned("extra-field", f"tensor {name!r} has the unknown field {extra!r}"))
    shape, offsets = info["shape"], info["data_offsets"]
    dtype = BY_SAFETENSORS.get(info["dtype"]) if isinstance(info["dtype"], str) else None
    if dtype is None:
        raise DamagedFileError(f"Tensor {name!r} has the unknown dtype {brief(info['dtype'])}.")
    if not _are_counts(offsets) or len(offsets) != 2:
        raise DamagedFileError(f"Tensor {name!r} has the malformed data_offsets {brief(offsets)}.")
    if not _are_counts(shape) or len(shape) > MAX_DIMENSIONS or prod(size or 1 for size in shape) > MAX_ELEMENTS:
        raise DamagedFileError(f"Tensor {name!r} has the impossible shape {brief(shape)}.")
    begin, end = offsets
    bits = prod(shape) * dtype.bits // dtype.packed
    if 8 * (end - begin) != bits:
        needed = bits / 8 if bits % 8 else bits // 8
        raise DamagedFileError(f"Tensor {name!r} needs {needed} bytes and has the offsets {begin} to {end}.")
    return dtype, _torch_shape(name, shape, dtype), begin, end


def _torch_shape(name: str, shape: list[int], dtype: DType) -> tuple[int, ...]:
    if dtype.packed > 1 and shape:  # torch counts float4 in pairs, safetensors one by one
        if shape[-1] % dtype.packed:
            raise DamagedFileError(f"Tensor {name!r} of {dtype.safetensors} has an odd last size.")
        shape[-1] //= dtype.packed
    return tuple(shape)


_FIELDS, _INTS = frozenset(("dtype", "shape", "data_offsets")), frozenset((int,))


def _are_counts(values: Any) -> bool:
    return isinstance(values, list) and _INTS.issuperset(map(type, values)) and min(values, default=0) >= 0


def _check_spans(spans: list[tuple[int, int, str]], size: int) -> None:
    at = 0
    for begin, end, name in sorted(spans):
        if begin != at:
            what = "overlaps another" if begin < at else "leaves a hole before it"
            raise DamagedFileError(f"Tensor {name!r} {what}: it begins at {begin}, where {at} is expected.")
        at = end
    if at != size:
        whole = sum(end <= size for _, end, _ in spans)
        what = "has bytes that no tensor claims" if at < size else f"is cut off: {whole} of {len(spans)} tensors complete"
        raise DamagedFileError(f"The file {what}: its tensors end at {at}, its data at {size}.", whole=whole)


def aliases_in(metadata: Mapping[str, str]) -> dict[str, Any]:
    """Tied name -> {"of": the name that holds the bytes, "index": its place}."""
    return _json_map(metadata.get(ALIASES)) or {}


def restore_aliases(items: list[tuple[Any, Any]], metadata: Mapping[str, str]) -> list[tuple[Any, Any]]:
    """The items with tied tensors put back at their places: an alias is an entry on the storage of another."""
    aliases = aliases_in(metadata)
    if not aliases:
        return items
    entries = dict(items)
    places: dict[int, tuple[Any, Any]] = {}
    unplaced = []
    for name, target in aliases.items():
        of = target.get("of") if isinstance(target, dict) else None
        if not isinstance(of, str) or of not in entries or name in entries or name.encode(errors="ignore").decode() != name:
            raise DamagedFileError(f"The tied tensor {name!r} refers to a tensor that is not there, or is not text.")
        place = target.get("index")
        if type(place) is not int or place in places or not 0 <= place < len(items) + len(aliases):
            unplaced.append((name, entries[of]))
        else:
            places[place] = (name, entries[of])
    others = iter([*items, *unplaced])
    return [places.get(index) or next(others) for index in range(len(items) + len(aliases))]


def restore_state_dict_metadata(metadata: Mapping[str, str]) -> Dict | None:
    paths = _json_map(metadata.get(STATE_DICT_METADATA))
    if not paths:
        return None
    rows: list[tuple[Any, Any]] = []
    for path, row in paths.items():
        if not isinstance(row, dict) or any(isinstance(value, dict | list) for value in row.values()):
            return None
        rows.append((path, Dict(list(row.items()))))
    return Dict([("_metadata", Dict(rows, ordered=True))])


def _json_map(text: str | None) -> dict[str, Any] | None:
    try:
        found = load_json(text) if text else None
    except ValueError:
        return None
    return found if isinstance(found, dict) else None


# --- laying out


def lay_out(tensors: Mapping[str, tuple[Entry, Content]], metadata: Mapping[str, str], *, reserve: int = 0) -> list[Piece]:
    offsets: dict[str, tuple[int, int]] = {}
    contents: list[Content] = []
    at = 0
    for name, (_, content) in sorted(tensors.items(), key=lambda item: -item[1][0].dtype.itemsize):
        offsets[name] = at, at + content.length
        at += content.length
        contents.append(content)
    if "__metadata__" in tensors:
        raise ConvertError("safetensors reserves the name '__metadata__'; a tensor has it.", fix="Use `rename`.")
    fields = [f'"__metadata__":{_json(dict(metadata))}'] if metadata else []
    fields += [_field(name, entry, *offsets[name]) for name, (entry, _) in tensors.items()]
    try:
        raw = f"{{{','.join(fields)}}}".encode()
    except UnicodeEncodeError:
        raise ConvertError("A tensor's name holds a lone surrogate, which a safetensors header cannot.") from None
    raw += b" " * (reserve + -(len(raw) + reserve) % 8)
    if len(raw) > MAX_HEADER:
        raise ConvertError(f"The safetensors header would take {len(raw)} bytes; {MAX_HEADER} is the limit.")
    return [Piece(Literal(len(raw).to_bytes(8, "little") + raw)), *map(Piece, contents)]


def _field(name: str, entry: Entry, begin: int, end: int) -> str:
    dtype, sizes = entry.dtype, [*entry.shape]
    if dtype.safetensors is None or (dtype.packed > 1 and not sizes):
        what = f"{name!r} is {dtype.name}, which safetensors has no type for."
        raise ConvertError(what, fix="Write a .pth, which holds any tensor.")
    if sizes:
        sizes[-1] *= dtype.packed
    shape = ",".join(map(str, sizes))
    return f'{_json(name)}:{{"dtype":"{dtype.safetensors}","shape":[{shape}],"data_offsets":[{begin},{end}]}}'


_json = json.JSONEncoder(separators=(",", ":"), ensure_ascii=False).encode
