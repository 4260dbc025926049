"""dcp: what `torch.distributed.checkpoint` saves: `.metadata`, a pickle that says what is where in the files of the ranks.

Source: torch/distributed/checkpoint: metadata.py, filesystem.py, _nested_dict.py, _traverse.py, _hf_utils.py."""

from __future__ import annotations

import re
import shlex
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import cache
from itertools import product
from math import prod
from operator import add
from typing import Any, NamedTuple, TypeAlias, cast

from ckpt_tools import limits
from ckpt_tools.errors import TWO_FILES, CkptError, DamagedFileError, PartError, TensorError, UnsupportedContainerError
from ckpt_tools.formats import safetensors, zip_archives
from ckpt_tools.formats.base import Keys, Warned, is_zip
from ckpt_tools.formats.checkpoint import Checkpoint
from ckpt_tools.formats.contents import restore_state_numbers
from ckpt_tools.formats.single import decode_file
from ckpt_tools.formats.zip_directory import RecordRange
from ckpt_tools.io.content import Computed, Content, Part, Range, chunks
from ckpt_tools.io.parsers import load_json
from ckpt_tools.io.sources import Files, Window
from ckpt_tools.parts.merge import Merger, Piece
from ckpt_tools.parts.names import COMMON
from ckpt_tools.parts.partition import arguments_of
from ckpt_tools.parts.sharded import joined, partly
from ckpt_tools.pickling.checks import validate
from ckpt_tools.pickling.machine import Machine
from ckpt_tools.pickling.torch_objects import MAKERS, dtype_of, sizes_of
from ckpt_tools.text import dotted
from ckpt_tools.tree import exchange, nodes
from ckpt_tools.tree.dtypes import DTYPES, DType
from ckpt_tools.tree.nodes import Dict, Entry, Global, List, Node, Object, Pair, Storage
from ckpt_tools.values.boxes import Sizes, assemble
from ckpt_tools.values.numeric import part as range_of
from ckpt_tools.values.numeric import row_major

_MODULE = "torch.distributed.checkpoint."
_END = 22  # bytes of the record that ends a zip
_EXPECTED = ("torch.Size", "torch.serialization._get_layout", "pathlib.PosixPath", "pathlib.WindowsPath", "pathlib.Path",
             "pathlib._local.PosixPath", "pathlib._local.WindowsPath", "pathlib._local.Path")  # fmt: skip


Path: TypeAlias = tuple[str | int, ...]


class _Place(NamedTuple):
    file: str
    offset: int
    length: int


# --- a folder with .metadata


def decode(names: Sequence[str], files: Files, *, partial: bool = False) -> Checkpoint:
    source = files.open(names[0])
    with limits.of_file(source.size):
        # it has no storages; it describes tensors only
        machine = Machine(source.read(0, source.size), MAKERS, lambda _: _need(None, "refers to a storage"))
        record = machine.load()
    validate(record)
    fields = _fields(record, "Metadata")
    reader, paths, lost = _Reader(files, _places(fields), partial), _paths(fields.get("planner_data")), {}
    for name, node in _pairs(fields, "state_dict_metadata"):
        _need(type(name) is str, "describes something that has no name")
        path = paths.get(name := str(name), (name,))
        try:
            reader.put(path, reader.value(name, node))
        except PartError as error:
            if type(path[-1]) is int:  # what stands behind it in the list would move up
                raise
            lost[name] = error.what.rstrip(".")
    root = reader.root
    if lost and not root.items:
        name, why = next(iter(lost.items()))
        raise PartError(f"Nothing is whole in the files that are there: {name!r} {why}.")
    restore_state_numbers(root)
    validate(root)
    decoded = joined("dcp", root, files, reader.blobs, {})
    decoded.has_checksums = False  # a chunk's record is not one to be copied with its header
    unexpected = [  # what torch's own metadata does not name
        name for name in machine.globals
        if not (name.module.startswith(_MODULE) or str(name) in _EXPECTED or (name.module == "torch" and name.name in DTYPES))
    ]  # fmt: skip
    decoded.globals = [*unexpected, *decoded.globals]
    decoded.storage_bytes = sum(content.length for content, _ in reader.waiting.values())
    decoded.locator, decoded.misplaced, decoded.lost = reader.locate, reader.misplaced, lost
    partly(decoded, sorted(reader.missing))
    return complete(decoded, files) if COMMON in files.names() else decoded


def _need(holds: object, what: str, why: str = "") -> None:
    if not holds:
        raise DamagedFileError(f"The metadata {what}.", why=why)


def _fields(node: Any, kind: str) -> dict[str, Node]:
    """The attributes of a record of torch's class `kind`."""
    function = node.function if type(node) is Object else None
    known = type(function) is Global and function.module.startswith(_MODULE) and function.name == kind
    _need(known and type(node.state) is Dict, f"has something else where a {kind} is expected")
    # Python keeps of the first what the second does not name
    _need(len(node.steps) == 1 and node.args == (), f"has a {kind} that is given attributes more than once", TWO_FILES)
    named: dict[str, Node] = node.state.named
    return named


def _pairs(fields: Mapping[str, Node], what: str) -> list[tuple[Node, Node]]:
    node = fields.get(what)
    _need(type(node) is Dict, f"has no {what}")
    return nodes.as_dict(node).items


def _sizes(node: Node) -> Sizes:
    found = sizes_of(node) or ()
    good = sizes_of(node) is not None and min(found, default=0) >= 0 and len(found) <= nodes.MAX_DIMENSIONS
    _need(good and prod(found) <= nodes.MAX_ELEMENTS, "has an impossible size")
    return found


def _places(fields: Mapping[str, Node]) -> dict[tuple[str, Sizes | None], _Place]:
    found = {}
    for key, value in _pairs(fields, "storage_data"):
        index, info = _fields(key, "MetadataIndex"), _fields(value, "_StorageInfo")
        name, offsets, *place = index.get("fqn"), index.get("offset"), *map(info.get, ("relative_path", "offset", "length"))
        _need([*map(type, (name, *place))] == [str, str, int, int], "has a place that cannot be read")
        if info.get("transform_descriptors") not in (None, ()):
            raise UnsupportedContainerError(f"{name!r} was transformed when it was saved.", fix="Save it without extensions.")
        found[str(name), None if offsets is None else _sizes(offsets)] = _Place._make(cast(list[Any], place))
    return found


def _paths(node: Node) -> dict[str, Path]:
    """Name -> its path in the nested dicts and lists that were saved; empty where they were flat."""
    found: dict[str, Path] = {}
    for name, path in node.items if type(node) is Dict else ():
        steps: Any = path if type(path) is tuple and {str, int}.issuperset(map(type, path)) else ()
        good = steps and type(steps[0]) is str and all(type(step) is str or 0 <= step <= limits.RECORDS.value for step in steps)
        # torch reads what is saved under the name
        if type(name) is not str or not good or dotted(steps) != name:
            raise DamagedFileError(f"The metadata has {name!r} under the path of another name, or a path that cannot be read.")
        found[name] = steps
    return found


class _Reader:
    """Turns what the metadata says of a name into an entry or a value. Names with the same places are tied."""

    def __init__(self, files: Files, places: Mapping[tuple[str, Sizes | None], _Place], partial: bool) -> None:
        self.files, self.places = files, places
        named = dict.fromkeys(place.file for place in places.values())
        self.missing = {*named} - {*files.names()} if partial else set[str]()
        for file in named:
            if file not in self.missing:
                files.open(file)
        self.blobs: list[Checkpoint] = []
        self.keys = Keys()
        self.tied: dict[Any, Entry] = {}
        self.waiting: dict[int, tuple[Content, Callable[[], Content]]] = {}  # by id: what finds the chunks of a content
        self.safetensors: dict[tuple[str, int], dict[str, Entry]] = {}  # the tensors of each file by name
        self.root, self.filler = Dict(), 0
        self.known: dict[Path, Node] = {(): self.root}

    def put(self, path: Path, value: Node) -> None:
        """Put a value into nested dicts and lists, as `set_element` of torch's `_traverse.py` does."""
        if path[:-1] not in self.known:
            self.put(path[:-1], List() if type(path[-1]) is int else Dict())
        holder, key = self.known[path[:-1]], path[-1]
        if path not in self.known and type(holder) is Dict and type(key) is str:
            holder.items.append((key, value))
        elif path not in self.known and type(holder) is List and type(key) is int:
            missing = max(0, key + 1 - len(holder.items))
            self.filler += missing
            limits.RECORDS.check(self.filler, "The metadata describes lists with more gaps than any real checkpoint has.")
            holder.items += [None] * missing
            holder.items[key] = value
        else:
            raise DamagedFileError(f"The metadata puts two things at {dotted(path)!r}.")
        self.known[path] = value

    def value(self, name: str, node: Node) -> Node:
        if type(node) is Object and type(node.function) is Global and node.function.name == "BytesStorageMetadata":
            decoded = self._archive(name, self._there(f"the value {name!r}", self.places.get((name, None))))
            self.blobs.append(decoded)
            return self.keys.renew(decoded.root)
        fields = _fields(node, "TensorStorageMetadata")
        dtype, requires_grad = _properties(fields.get("properties"))
        shape, listed = _sizes(fields.get("size")), fields.get("chunks")
        if type(listed) is not List:
            raise DamagedFileError(f"The metadata lists no chunks of {name!r}.")
        boxes = []
        for part in listed.items:
            chunk = _fields(part, "ChunkStorageMetadata")
            offsets, sizes = _sizes(chunk.get("offsets")), _sizes(chunk.get("sizes"))
            place = self.places.get((name, offsets)) or (self.places.get((name, None)) if len(listed.items) == 1 else None)
            boxes.append((offsets, sizes, self._there(f"the chunk of {name!r} at ({', '.join(map(str, offsets))})", place)))
        nbytes = prod(shape) * dtype.bits // 8
        same = (dtype.name, str(shape), str(boxes))
        if nbytes and (known := self.tied.get(same)) is not None:
            return known if known.requires_grad == requires_grad else replace(known, requires_grad=requires_grad)

        @cache
        def content() -> Content:
            found = [(at, sizes, self.content(name, dtype, sizes, place)) for at, sizes, place in boxes]
            return assemble(name, shape, dtype.itemsize, found)

        made = Computed(nbytes, lambda: chunks(content()), part=lambda start, length: range_of(content(), start, length))
        storage = Storage(self.keys.next(), dtype, nbytes, "cpu", made)
        entry = Entry(storage, dtype, shape, nodes.contiguous_stride(shape), 0, requires_grad)
        nodes.check(entry, repr(name))
        self.waiting[id(made)] = (made, content)
        self.tied[same] = entry
        return entry

    def _there(self, what: str, place: _Place | None) -> _Place:
        if place is None:
            raise DamagedFileError(f"The metadata does not say where {what} is.")
        if place.file in self.missing:
            raise PartError(f"in {place.file}, which is missing", rest=True)
        return place

    def _archive(self, name: str, place: _Place) -> Checkpoint:
        source = self.files.open(place.file)
        try:
            return zip_archives.decode_inside(source, (place.offset, place.length), name)
        except CkptError as error:
            error.what = f"{source.path}, at byte {place.offset}, {name!r}: {error.what}"
            raise

    def misplaced(self) -> Iterator[str]:
        """The archives that do not end where .metadata says, by the record at the end of a zip (torch writes no comment)."""
        for (name, _), place in self.places.items():
            if place.file in self.missing:
                continue
            source, end = self.files.open(place.file), place.offset + place.length
            if 0 <= place.offset <= source.size - 4 and not is_zip(source.read(place.offset, 4)):  # one safetensors a rank
                continue
            inside = 0 <= place.offset <= end - _END <= source.size - _END
            if not inside or source.read(end - _END, 4) != b"PK\5\6":
                yield f"{name} ({place.file}, at byte {place.offset})"

    def content(self, name: str, dtype: DType, sizes: Sizes, place: _Place) -> Content:
        """The bytes of one chunk, row-major; a range of its file where they lie so."""
        source = self.files.open(place.file)
        if not prod(sizes):
            return Range(source, 0, 0)
        what = f"{source.path}, at byte {place.offset}: the chunk of {name!r} is"
        if is_zip(source.read(place.offset, min(4, max(0, source.size - place.offset)))):
            decoded = self._archive(name, place)
            entry = decoded.root
            if decoded.byteorder == "big":
                raise UnsupportedContainerError(f"{what} big-endian.")
        else:  # FileSystemWriter wrote it with SerializationFormat.SAFETENSORS: by name, one file a rank
            key = place.file, place.offset
            if key not in self.safetensors:
                window = Window(source, place.offset, source.size - place.offset)
                self.safetensors[key] = safetensors.entries_of(safetensors.decode(window))
            entry = self.safetensors[key].get(name)
        if type(entry) is not Entry or entry.dtype is not dtype or entry.shape != sizes:
            raise TensorError(f"{what} not what .metadata says.")
        content = row_major(entry)
        of = content.of if isinstance(content, Part) else content
        if isinstance(of, RecordRange):
            of.record.name = f"a chunk of {name!r} in {source.path.name}"
        if isinstance(content, Range) and content.source is not source:  # as a range of the file, which the kernel copies
            return Range(source, place.offset + content.offset, content.length)
        return content

    def locate(self, root: Node) -> Node:
        """The tree with the chunks of every tensor found in their files: whole rows become ranges, which the kernel copies."""
        new: dict[int, Storage] = {}

        def swap(node: Node) -> Node:
            if type(node) is not Entry or (known := self.waiting.get(id(node.storage.content))) is None:
                return node
            if id(node.storage) not in new:
                new[id(node.storage)] = replace(node.storage, content=known[1]())
            return replace(node, storage=new[id(node.storage)])

        return exchange.replace(root, swap)


def _properties(node: Any) -> tuple[DType, bool]:
    """dtype and requires_grad of a TensorProperties, whose state is a tuple in that order with the layout between."""
    known = type(node) is Object and type(node.function) is Global and node.function.name == "TensorProperties"
    state = node.state if known and type(node.state) is tuple else ()
    _need(len(state) > 2 and type(state[2]) is bool, "has a tensor without properties")
    if type(state[1]) is Object and state[1].args not in ((), ("torch.strided",)):
        raise UnsupportedContainerError("The distributed checkpoint holds a sparse tensor, which ckpt does not read.")
    return dtype_of(state[0]), state[2]


# --- safetensors files that each hold a part


def decode_safetensors(names: Sequence[str], files: Files) -> Checkpoint:
    parts, found = [], dict[str, list[Piece]]()
    for file in names:
        decoded = safetensors.decode(files.open(file))
        parts.append(decoded)
        try:
            info = load_json(decoded.metadata.get("DCP_SHARDING_INFO", "{}"))
            offsets = {name: tuple(row["saved_offsets"]) for name, row in info.items()}
            if not all(type(at) is int for row in offsets.values() for at in row):
                raise TypeError
        except (ValueError, KeyError, TypeError, AttributeError):
            raise DamagedFileError(f"{decoded.source.path} has a DCP_SHARDING_INFO that cannot be read.") from None
        for name, entry in safetensors.entries_of(decoded).items():
            found.setdefault(name, []).append(Piece(offsets.get(name, (0,) * len(entry.shape)), entry, file))
    merger = Merger()
    items: list[Pair] = [(name, _whole(name, pieces, merger)) for name, pieces in found.items()]
    metadata = {key: text for part in parts for key, text in part.metadata.items() if not key.startswith("DCP_")}
    return joined("dcp", Dict(items), files, parts, metadata)


def _whole(name: str, pieces: Sequence[Piece], merger: Merger) -> Entry:
    shape = tuple(map(max, *(map(add, piece.offsets, piece.sizes) for piece in pieces), (0,) * len(pieces[0].sizes)))
    made = merger.tensor(name, pieces[0].entry.dtype, shape, pieces)
    if merger.replicas:
        raise TensorError(f"Two files hold the same part of {name!r}.")
    return made


# --- torch_dist: what Megatron-core adds, `common.pt` with `args` beside it, and layers that are one tensor
#
# The tree stays what `.metadata` says. `--select model` makes the model's own state dict of it: layers under their numbers,
# the halves of a gated matrix that were saved apart (`_w`, `_v`) as one, no optimizer and no `_extra_state`. How many layers
# there are is taken from `args` alone.
#
# Source: megatron/core/dist_checkpointing/strategies/common.py, megatron/core/transformer/transformer_block.py
# (`sharded_state_dict`), megatron/core/transformer/mlp.py (`apply_swiglu_sharded_factory`).

_STACKED = re.compile(r"(?P<head>(?:.+\.)?layers)\.(?!\d+\.)(?P<rest>.+)")
_HALF = re.compile(r"(?P<name>.+\.linear_fc1\.(?:weight|bias))_(?P<half>[wv])")
_NO_MODEL = ("optimizer", "rng_state", "opt_param_scheduler", "rerun_state_machine_state")
_EXTRA = "._extra_state"
_MOST_LAYERS = 100_000


def complete(decoded: Checkpoint, files: Files) -> Checkpoint:
    """A dcp with the `common.pt` beside it, if that tells of a job of Megatron-LM."""
    try:
        common = decode_file(files.open(COMMON)).root
    except CkptError as error:
        decoded.warnings.append(Warned("unread-member", f"{COMMON} is not read: {error.what.rstrip('.')}"))
        return decoded
    if type(common) is not Dict or not ("args" in common or "iteration" in common):
        return decoded
    decoded.beside = {"common": common}
    layers = state.get("num_layers") if (state := arguments_of(common)) is not None else None
    stacked = [key for key, _ in _tensors(decoded.root) if _STACKED.fullmatch(key)]
    if stacked and type(layers) is int and 0 < layers <= _MOST_LAYERS:
        decoded.others = {**decoded.others, "model": lambda: model_of(decoded.root, layers)}
        fix = f"ckpt convert {shlex.quote(str(files.path))} model.safetensors --select model"
        text = f"{len(stacked)} tensors each hold all {layers} layers; --select model numbers the layers"
        decoded.warnings.append(Warned("stacked-layers", text, "", "info", fix))
    return decoded


def _tensors(root: Node) -> Iterator[tuple[str, Entry]]:
    for key, value in root.items if type(root) is Dict else ():
        if type(key) is str and type(value) is Entry and key.partition(".")[0] not in _NO_MODEL and _EXTRA not in key:
            yield key, value


def model_of(root: Node, layers: int) -> Dict:
    """The model's state dict, in the order of its layers."""
    found: dict[str, dict[str, Entry]] = {}  # by where layers are, what each of them has; of others the tensor itself
    for key, entry in _tensors(root):
        match = _STACKED.fullmatch(key)
        if match is not None and (not entry.shape or entry.shape[0] != layers):
            raise PartError(f"{key!r} is of shape {list(entry.shape)}, and args say that there are {layers} layers.")
        found.setdefault(match["head"] if match else key, {})[match["rest"] if match else ""] = entry
    numbered: dict[str, Entry] = {}
    for name, rests in found.items():
        if "" in rests:
            numbered[name] = rests.pop("")
        for number, (rest, stack) in product(range(layers), rests.items()):
            offset = stack.offset + number * stack.stride[0]
            numbered[f"{name}.{number}.{rest}"] = replace(stack, shape=stack.shape[1:], stride=stack.stride[1:], offset=offset)
    return nodes.as_dict(Keys().renew(Dict(list(_gated(numbered)), ordered=True)))


def _gated(entries: dict[str, Entry]) -> Iterator[tuple[str, Node]]:
    """Every tensor; the two halves of a gated matrix as one, where the first of them stands."""
    merger = Merger()
    for key, entry in entries.items():
        match = _HALF.fullmatch(key)
        if match is None:
            yield key, entry
            continue
        first, second = (entries.get(f"{match['name']}_{half}") for half in "wv")
        if first is None or second is None or (second.shape, second.dtype.name) != (first.shape, first.dtype.name):
            raise PartError(f"{key!r} is one half of a matrix, and the other is missing or of another shape.")
        if entry is first:
            yield match["name"], merger.along(match["name"], 0, [[(0, first), (1, second)]])
