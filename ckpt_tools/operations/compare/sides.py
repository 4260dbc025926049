"""A checkpoint as it is compared and measured: its tensors, plain values and objects by path, little-endian, after --select."""

from __future__ import annotations

import contextlib
import json
import typing
from collections import Counter
from collections.abc import Collection, Iterable, Iterator
from dataclasses import dataclass, field, replace
from typing import Any, TypeAlias

from ckpt_tools.edit.casts import to_little_endian
from ckpt_tools.edit.objects.values import as_array, as_value
from ckpt_tools.edit.renaming import restore_named_ties
from ckpt_tools.edit.selection import select_in
from ckpt_tools.errors import ConvertError, LimitError, NothingMatchedError
from ckpt_tools.formats.checkpoint import Checkpoint
from ckpt_tools.formats.contents import StateDict, Tensor, is_tensor, names_quantised
from ckpt_tools.formats.safetensors import ALIASES, GGUF_TYPES, STATE_DICT_METADATA
from ckpt_tools.formats.single import naming
from ckpt_tools.io.content import Literal, Range
from ckpt_tools.io.parsers import load_json
from ckpt_tools.text import dotted, listed
from ckpt_tools.tree.modules import classes, is_module, settings
from ckpt_tools.tree.nodes import PLAIN, ByteString, Dict, Entry, Global, List, Node, Object, Storage, Where
from ckpt_tools.tree.visit import is_hollow, walk
from ckpt_tools.values.numeric import view_of

WHOLE = "."
Plain: TypeAlias = typing.Literal["instead", "beside"]
# How many bytes the tensors may come to for each byte of storage before reading them all is refused: a stride of 0 makes
# a tensor of any size out of one number.
_MOST_READ, _SPARE_READ = 64, 1 << 30
# Not the user's: what the format or the files need. total_size and total_parameters are Hugging Face's, of shards.
_OWN_METADATA = frozenset((ALIASES, STATE_DICT_METADATA, GGUF_TYPES, "format", "total_size", "total_parameters"))


@dataclass(frozen=True, slots=True)
class Array:
    """A pickled NumPy array, which is a plain value."""

    dtype: str
    shape: tuple[int, ...]
    stride: tuple[int, ...]
    data: bytes

    def __str__(self) -> str:
        return f"array {'x'.join(map(str, self.shape)) or 'scalar'} {self.dtype}"


Value: TypeAlias = Node | Array
_KINDS: dict[type, str] = {Dict: "dict", List: "list", tuple: "tuple"}
_EMPTY = Dict([])  # all of them, so that they are equal


@dataclass(slots=True)
class Module:
    """What a pickled module holds beside its tensors: the settings and the classes, by their paths in it."""

    values: dict[Where, Value] = field(default_factory=dict)
    objects: dict[Where, str] = field(default_factory=dict)


@dataclass(slots=True)
class Side:
    """One of the checkpoints that are compared."""

    root: Node
    tensors: dict[Where, Tensor]
    state_dicts: list[StateDict]
    values: dict[Where, Value] = field(default_factory=dict)
    objects: dict[Where, str] = field(default_factory=dict)
    modules: dict[Where, Module] = field(default_factory=dict)
    containers: dict[Where, str] = field(default_factory=dict)
    texts: bool = False
    notes: list[str] = field(default_factory=list)


def open_side(checkpoint: Checkpoint, where: str | None = None, plain: Plain | None = None) -> Side:
    """Look at an open checkpoint, or at one place in it."""
    ties = restore_named_ties(checkpoint.root, checkpoint.metadata)
    place = place_in(checkpoint, where)
    tensors, notes = tensors_in(place, plain)
    side = Side(place.root, tensors, place.state_dicts, notes=notes)
    _collect(side)
    if checkpoint.container in ("safetensors", "sharded", "gguf", "onnx"):
        side.texts = True
        own = _OWN_METADATA | ties.keys()
        side.values |= {(key,): text for key, text in checkpoint.metadata.items() if key not in own}
    return side


def place_in(checkpoint: Checkpoint, where: str | None) -> Checkpoint:
    """A place in an open checkpoint as one of its own, little-endian."""
    chosen = checkpoint.root
    if where is not None and where != WHOLE:
        try:
            with naming(checkpoint.source):
                chosen = select_in(checkpoint, where)
        except NothingMatchedError as error:
            error.fix = error.fix or "ckpt inspect shows the paths that there are; '.' is the whole file."
            raise
    return replace(checkpoint, root=to_little_endian(chosen, checkpoint.byteorder))


def tensors_in(place: Checkpoint, plain: Plain | None) -> tuple[dict[Where, Tensor], list[str]]:
    """The tensors of a place by path; and notes that say which of them are not as they lie."""
    if plain is None or not any(map(names_quantised, place.state_dicts)):
        return {tensor.where: tensor for tensor in place.tensors}, []
    from ckpt_tools.edit.quantised.config import read_config
    from ckpt_tools.edit.quantised.dequantising import as_meant

    if place.has_modules:
        from ckpt_tools.edit.slimming import modules_as_state_dicts

        place.root = modules_as_state_dicts(place.locate())
    done = as_meant(place.locate(), read_config(place), parts=plain == "beside")
    for name in ("tensors", "state_dicts"):  # before the exchange
        vars(place).pop(name, None)
    counts = Counter(done.tensors.values())
    notes = [
        f"{scheme}: {count} tensors of {place.path} are taken as the numbers that their codes stand for."
        for scheme, count in counts.items()
    ]
    notes += [f"{place.path}, as it lies: {problem}" for problem in done.problems if done.tensors]
    return {tensor.where: replace(tensor, scheme=done.tensors.get(tensor.where, "")) for tensor in place.tensors}, notes


def _collect(side: Side) -> None:
    """Plain values and objects by their paths; what is in pickled modules apart."""
    seen: set[int] = set()
    for where, node in walk(side.root, stop=_is_closed):
        if is_module(node) and id(node) not in seen:
            seen.add(id(node))
            side.modules[where] = _module(node)
        if type(node) in _KINDS and not is_tensor(node):
            side.containers[where] = _KINDS[type(node)]
        if where or is_module(node):
            _add(where, node, side.values, side.objects)


def _module(node: Object) -> Module:
    found = Module()
    with contextlib.suppress(LimitError):  # modules that hold one another: the first ones are compared
        found.objects = {where: name for where, name in classes(node) if where}
        for where, setting in settings(node):
            for below, inner in walk(setting, stop=_is_closed):
                _add((*where, *below), inner, found.values, found.objects)
    return found


def _add(where: Where, node: Node, values: dict[Where, Value], objects: dict[Where, str]) -> None:
    """Add what a node is, if it is a value or an object; short rows of plain values are one value, and so is an empty dict."""
    value = _value(node) if type(node) is Object else node
    if is_tensor(node) or type(node) is Storage:
        return
    if type(node) is Global:
        objects[where] = str(node)
    elif type(node) is Object and value is None:
        objects[where] = node.name
    elif type(value) is ByteString:
        values[where] = value.data
    elif (type(value) is List or type(value) is tuple) and is_hollow(value):
        values[where] = tuple(value.items) if type(value) is List else value
    elif type(value) is Array or type(value) in PLAIN:
        values[where] = value
    elif type(value) is Dict and not value.items:
        values[where] = _EMPTY


def _is_closed(node: Node) -> bool:
    if type(node) in (List, tuple):
        return is_hollow(node)
    return is_tensor(node) or (type(node) is Object and (_value(node) is not None or is_module(node)))


def _value(node: Object) -> Value:
    """The plain value that an object stands for, an array among them; None for anything else."""
    entry = as_array(node)
    if entry is None or not isinstance(entry.storage.content, Literal):
        return as_value(node)
    return Array(entry.dtype.name, entry.shape, entry.stride, entry.storage.content.data)


def as_texts(values: dict[Where, Value]) -> dict[Where, str]:
    """Values as a safetensors header holds them: text, the rest as JSON. JSON in text is taken apart, path by path."""
    found: dict[Where, str] = {}
    for path, value in values.items():
        if type(value) is str:
            found.update(((path,), text) for path, text in _leaves(dotted(path), value))
        elif type(value) is not Dict:
            found[dotted(path),] = _text(value)
    return found


def _leaves(path: str, text: str) -> Iterator[tuple[str, str]]:
    try:
        stack: list[tuple[str, Any]] = [(path, load_json(text))] if text[:1] == "{" else []
    except (ValueError, LimitError):  # as a whole, it is compared all the same
        stack = []
    if not stack:
        yield path, text
    while stack:
        where, value = stack.pop()
        if type(value) is dict:
            stack.extend((f"{where}.{key}", item) for key, item in value.items())
        else:
            yield where, value if type(value) is str else _text(value)


def _text(value: Value) -> str:
    try:
        return json.dumps(value)
    except (TypeError, ValueError):  # bytes, an array, or an int of more digits than Python writes out
        return repr(value) if type(value) in (bytes, Array) else type(value).__name__


def check_effort(entries: Iterable[Entry]) -> None:
    """Refuse tensors that would take far longer to read than the file that they are in is large."""
    storages: dict[int, int] = {}
    views: dict[tuple[Any, ...], int] = {}
    for entry in entries:
        storages[id(entry.storage)] = entry.storage.nbytes
        start = 0 if isinstance(entry.storage.content, Range | Literal) else entry.offset * entry.dtype.itemsize
        views[view_of(entry)] = entry.nbytes + start  # what is inflated is inflated from its start
    claimed, there = sum(views.values()), sum(storages.values())
    if claimed > _MOST_READ * there + _SPARE_READ:
        raise LimitError(
            "The tensors claim far more bytes than the file holds.",
            why=f"Views of {claimed} bytes on storages of {there} bytes: a stride of 0 repeats a value any number of times.",
        )


def check_names(left: tuple[str, Collection[str]], right: tuple[str, Collection[str]], fix: str) -> None:
    """Refuse two checkpoints, each a path and its names, that do not have the same names."""
    sides = [(one[0], [name for name in one[1] if name not in other[1]]) for one, other in ((left, right), (right, left))]
    why = " ".join(f"Only {path} has {listed(list(map(repr, names)), 3)}." for path, names in sides if names)
    if why:
        raise ConvertError(f"{left[0]} and {right[0]} have different names.", why=why, fix=fix)
