"""Describe a checkpoint: everything `ckpt inspect` shows, as plain data."""

from __future__ import annotations

import contextlib
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import chain, islice
from math import prod
from typing import TYPE_CHECKING, Any, TypeAlias

from ckpt_tools import limits
from ckpt_tools.edit.objects.known import is_known
from ckpt_tools.edit.objects.values import as_value
from ckpt_tools.errors import LimitError, TensorError
from ckpt_tools.formats.checkpoint import Checkpoint
from ckpt_tools.formats.contents import Tensor, is_optimizer, is_tensor, names_quantised
from ckpt_tools.formats.single import collector_paused
from ckpt_tools.io.source import File
from ckpt_tools.operations.findings import Facts, findings
from ckpt_tools.operations.loaders import how_it_loads
from ckpt_tools.operations.safety import Safety, of_checkpoint
from ckpt_tools.parts.families import partition
from ckpt_tools.parts.open import open_checkpoint
from ckpt_tools.parts.partition import names_parts
from ckpt_tools.pickling.weights_only import ALLOWED
from ckpt_tools.text import Report, dotted
from ckpt_tools.tree.findings import Finding
from ckpt_tools.tree.modules import is_module, settings
from ckpt_tools.tree.names import wrappers_in
from ckpt_tools.tree.nodes import PLAIN, ByteString, Dict, Entry, Global, List, Node, Object, Storage, Where
from ckpt_tools.tree.options import natural
from ckpt_tools.tree.visit import reachable, walk

if TYPE_CHECKING:
    from ckpt_tools.parts.rank_parts import Part, PartReader


# --- which tensors of a checkpoint are tied, and which merely lie on one storage


_Elements = tuple[object, ...]


def find_sharing(checkpoint: Checkpoint) -> tuple[list[list[str]], list[list[str]]]:
    """Groups of names that are tied, and that share a storage: in one state dict as they are, across several as paths."""
    entries = [(tensor.where, tensor.node) for tensor in checkpoint.tensors if type(tensor.node) is Entry]
    if len({id(entry.storage) for _, entry in entries}) == len(entries):  # as in most files
        return [], []
    groups: dict[int, list[tuple[Where, Entry]]] = {}
    for where, entry in entries:
        if entry.nbytes:
            groups.setdefault(id(entry.storage), []).append((where, entry))
    state_dicts = {state_dict.where: frozenset(state_dict.names) for state_dict in checkpoint.state_dicts}
    tied, shared = list[list[str]](), list[list[str]]()
    for group in groups.values():
        if len(group) == 1:
            continue
        same: dict[_Elements, list[Where]] = {}
        for where, entry in group:
            same.setdefault(elements_of(entry), []).append(where)
        tied += [_names(wheres, state_dicts) for wheres in same.values() if len(wheres) > 1]
        if len(same) > 1:
            shared.append(_names([where for where, _ in group], state_dicts))
    return tied, shared


def elements_of(entry: Entry) -> _Elements:
    """What says which bytes of its storage a tensor is, in whatever order: equal for the same elements."""
    bits, dense = entry.dtype.bits, 1
    steps = sorted((stride, size) for stride, size in zip(entry.stride, entry.shape, strict=True) if size > 1)
    for stride, size in steps:
        if stride != dense:
            return entry.offset * bits, bits, tuple(steps)
        dense *= size
    return entry.offset * bits, entry.numel * bits  # a run of bytes, be it transposed or of another dtype


def _names(wheres: list[Where], state_dicts: dict[Where, frozenset[str]]) -> list[str]:
    inside = len({where[:-1] for where in wheres}) == 1 and wheres[0][:-1] in state_dicts
    return [str(where[-1]) if inside else dotted(where) for where in wheres]


MAX_VALUES = 1000
MAX_TEXT = 4096
_SHOWN_ITEMS = 32
_ENTRIES = frozenset((Entry,))
_ROW = frozenset((type(None), bool, int, float, str))


@dataclass(slots=True, unsafe_hash=True, repr=False)
class Description(Report):
    """What a checkpoint holds. The fields are the contract of `ckpt inspect --json`; docs/json.md says what is in each row.

    Attributes:
        path, container, file_bytes: as it was named; the file format; its size, of a folder that of its files.
        state_dicts: where each is, its tensors, parameters, bytes and wrappers.
        tensors: every tensor, in order. totals: counts and bytes of all of them.
        tied: groups of tensors that are the same elements. shared: groups on one storage that are not.
        values: plain values by dotted path. objects: what weights_only does not know, with its path.
        globals: all that the file names, as `module.name`.
        weights_only: what `torch.load(weights_only=True)` says. safety: what loading without it would run.
        metadata: the text in a safetensors header. findings: problems and facts, with the command that mends them.
        part: of one process's part of a model, whose and of how many; else None.
        packed: of a checkpoint in a compressed file or a tar, which kind that is and the member; else None.
        quantised: of quantised weights the schemes, with what plain ones would take; else None.
        adapter: of a low-rank adapter what it changes, and how; else None.
    """

    path: str
    container: str
    file_bytes: int
    state_dicts: list[dict[str, Any]]
    tensors: list[dict[str, Any]]
    totals: dict[str, Any]
    tied: list[list[str]]
    shared: list[list[str]]
    values: dict[str, Any]
    objects: list[dict[str, Any]]
    globals: list[str]
    weights_only: dict[str, Any]
    safety: Safety
    metadata: dict[str, str]
    findings: list[Finding]
    part: dict[str, Any] | None = None
    packed: dict[str, str] | None = None
    quantised: dict[str, Any] | None = None
    adapter: dict[str, Any] | None = None


@natural
def inspect(path: File) -> Description:
    """Describe the checkpoint at a path. Reads its structure, no tensor bytes; runs and imports nothing.

    Raises:
        CkptError: see `ckpt_tools.open_checkpoint`.
    """
    with collector_paused():
        with open_checkpoint(path) as checkpoint:
            found = describe(checkpoint)
        del checkpoint  # the tree is gone before the collector comes back, which would walk through it
    return found


def describe(checkpoint: Checkpoint) -> Description:
    """Describe an open checkpoint."""
    rows, facts = _gather(checkpoint)
    safety, loads, part, packed = facts.safety, facts.loads, facts.part, checkpoint.packed
    settings_too = _module_values(checkpoint.root) if checkpoint.has_modules else ()
    told = chain.from_iterable(_values(Dict([(name, node)])) for name, node in checkpoint.beside.items())
    values = dict(islice(chain(told, _values(checkpoint.root), settings_too), MAX_VALUES))
    return Description(
        str(checkpoint.path), checkpoint.container, checkpoint.file_bytes, facts.state_dicts, rows, facts.totals,
        *find_sharing(checkpoint), values, _objects(checkpoint),
        list(map(str, dict.fromkeys((*checkpoint.globals, *safety.names)))),
        {"loads": loads.weights_only, "refused": loads.refused, "reasons": loads.reasons, "call": loads.call}, safety,
        dict(checkpoint.metadata), list(findings(facts)),
        None if part is None else {name: getattr(part, name) for name in ("family", "rank", "world", "parts", "tensors")},
        None if packed is None else {"kind": packed.kind, "member": packed.member}, _quantised_row(checkpoint), facts.adapter,
    )  # fmt: skip


def find_findings(checkpoint: Checkpoint, safety: Safety | None = None) -> list[Finding]:
    """The findings of `describe` alone; `safety` where it is known."""
    return list(findings(_gather(checkpoint, safety)[1]))


def _gather(checkpoint: Checkpoint, safety: Safety | None = None) -> tuple[_Rows, Facts]:
    """A row for each tensor, and what findings are told from."""
    names = [(state_dict.where, state_dict.names) for state_dict in checkpoint.state_dicts]
    rows, state_dicts, totals = _measure(checkpoint, names)
    safety = of_checkpoint(checkpoint) if safety is None else safety
    loads = how_it_loads(checkpoint, safety.classes)
    adapter = None
    if any("lora" in name or name.startswith("base_model.model.") for _, own in names for name in own):
        from ckpt_tools.edit.lora.summary import summary

        adapter = summary(checkpoint)
    return rows, Facts(checkpoint, state_dicts, totals, safety, loads, partition(checkpoint), adapter)


def _quantised_row(checkpoint: Checkpoint) -> dict[str, Any] | None:
    """What is quantised; the shape of a few weights stands in a tensor of their own, of 16 bytes, which is read."""
    if checkpoint.encodings:
        from ckpt_tools.formats.frameworks import gguf

        return {"schemes": gguf.schemes(checkpoint), "problems": []}
    if not any(map(names_quantised, checkpoint.state_dicts)):
        return None
    from ckpt_tools.edit.quantised.finding import summary

    return summary(checkpoint)


_Rows: TypeAlias = list[dict[str, Any]]
_Names: TypeAlias = list[tuple[Where, list[str]]]  # where each state dict is, and the names in it


def _measure(checkpoint: Checkpoint, names: _Names) -> tuple[_Rows, _Rows, dict[str, Any]]:
    """A row for each tensor and each state dict; the totals."""
    inside = {where: frozenset(own) for where, own in names}
    reader = None
    if names_parts(checkpoint):
        from ckpt_tools.parts.rank_parts import PartReader

        reader = PartReader()
    rows = [_tensor_row(tensor, inside, reader) for tensor in checkpoint.tensors]
    state_dicts = _state_dicts(names, rows)
    totals = {
        "tensors": len(rows),
        "elements": _numbers(rows),
        "parameters": sum(row["parameters"] for row in state_dicts) if state_dicts else _numbers(rows),
        "bytes": sum(row["bytes"] for row in rows),
        "storage_bytes": checkpoint.storage_bytes,
        "dtypes": dict(Counter(row["dtype"] or "unknown" for row in rows)),
        "devices": dict(Counter(row["device"] for row in rows if row["device"] is not None)),
    }
    return rows, state_dicts, totals


def _tensor_row(tensor: Tensor, names: dict[Where, frozenset[str]], reader: PartReader | None) -> dict[str, Any]:
    where, node = tensor.where, tensor.node
    last = where[-1] if where else None
    name = last if isinstance(last, str) and last in names.get(where[:-1], ()) else None
    if type(node) is not Entry:
        return {"where": list(where), "name": name} | _of_unusual(tensor, node, reader)
    storage = node.storage
    return {  # one dict, at once: there may be 200,000
        "where": list(where), "name": name, "dtype": node.dtype.name, "shape": list(node.shape), "stride": list(node.stride),
        "offset": node.offset, "device": storage.device, "bytes": node.nbytes, "storage": storage.key,
        "requires_grad": node.requires_grad, "kind": node.kind,
    }  # fmt: skip


def _of_unusual(tensor: Tensor, node: Object, reader: PartReader | None) -> dict[str, Any]:
    """What there is to say of a tensor that is not a plain view on a storage."""
    unusual = tensor.unusual
    assert unusual is not None
    if reader is not None:
        with contextlib.suppress(TensorError):  # what cannot be placed is told by a finding
            if (part := reader.read(node)) is not None:
                return _of_part(part)
    storages = list({id(below): below for below in reachable(node) if type(below) is Storage}.values())
    return {
        "dtype": unusual.dtype.name if unusual.dtype else None,
        "shape": _list(unusual.shape), "stride": _list(unusual.stride), "offset": None,
        "device": "meta" if unusual.kind == "meta" else storages[0].device if storages else None,
        "bytes": sum(storage.nbytes for storage in storages), "storage": None, "requires_grad": None, "kind": unusual.kind,
    }  # fmt: skip


def _of_part(part: Part) -> dict[str, Any]:
    """The whole tensor, and which of its boxes are here."""
    entries = [box.entry for box in part.held]
    mesh = None if part.mesh is None else {"shape": list(part.mesh.shape), "names": list(part.mesh.names)}
    held = [{"offsets": list(box.offsets), "shape": list(box.sizes)} for box in part.held]
    placements = [str(place) for place in part.placements]
    return {
        "dtype": part.dtype.name, "shape": list(part.shape), "stride": None, "offset": None,
        "device": entries[0].storage.device if entries else None, "bytes": sum(entry.nbytes for entry in entries),
        "storage": None, "requires_grad": part.requires_grad, "kind": part.kind,
        "part": {"rank": part.rank, "world": part.world, "held": held, "mesh": mesh, "placements": placements},
    }  # fmt: skip


def _list(sizes: tuple[int, ...] | None) -> list[int] | None:
    return None if sizes is None else list(sizes)


def _numbers(rows: list[dict[str, Any]]) -> int:
    return sum([prod(row["shape"] or ()) for row in rows])


def _state_dicts(names: _Names, rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    below: dict[Where, list[dict[str, Any]]] = {}
    for row in rows:
        if row["name"] is not None:
            below.setdefault(tuple(row["where"][:-1]), []).append(row)
    return [
        {"where": list(where), "tensors": len(own := below.get(where, [])), "parameters": _numbers(own),
         "bytes": sum(row["bytes"] for row in own), "wrappers": list(wrappers_in(own_names))}
        for where, own_names in names
    ]  # fmt: skip


def _values(root: Node) -> Iterator[tuple[str, Any]]:
    """Plain values with their dotted paths; short lists whole. Of optimizers the learning rates, of unknown classes none."""
    for where, node in walk(root, stop=_holds_no_values):
        if type(node) is Dict:
            yield from ((dotted((*where, *path)), value_text(rate)) for path, rate in _rates(node))
            continue
        value = as_value(node) if type(node) is Object else node
        plain_value = _is_row(node) or type(value) not in (List, tuple, Object, Global, Storage, Entry)
        if where and plain_value and not (type(node) is Object and value is None):
            yield dotted(where), value_text(value)


def _rates(node: Dict) -> Iterator[tuple[Where, Node]]:
    """Of an optimizer the learning rate of each group that has another than the one before it."""
    groups, before = node.get("param_groups"), None
    for index, group in enumerate(groups.items if type(groups) is List and is_optimizer(node) else ()):
        rate = group.get("lr") if type(group) is Dict else None
        if type(rate) in (int, float) and rate != before:
            before = rate
            yield ("param_groups", index, "lr"), rate


def _module_values(root: Node) -> Iterator[tuple[str, Any]]:
    """The settings of pickled modules (`conv1.kernel_size`), under the names that their tensors have; each module once."""
    seen: set[int] = set()
    for where, node in walk(root, stop=lambda node: is_tensor(node) or is_module(node), plain=False):
        if is_module(node) and id(node) not in seen:
            seen.add(id(node))
            with contextlib.suppress(LimitError):  # modules that hold one another: the first names are shown
                for path, value in settings(node):
                    if _is_row(value) or type(value) in PLAIN:
                        yield dotted((*where, *path)), value_text(value)


def _holds_no_values(node: Node) -> bool:
    if type(node) is Object and type(node.function) is Global:
        return not is_known(node.function) or as_value(node) is not None or is_tensor(node) or "numpy" in node.function.module
    if type(node) is Dict:
        return _ENTRIES.issuperset(type(value) for _, value in node.items) or is_optimizer(node)
    return is_tensor(node) or _is_row(node)


def _is_row(node: Node) -> bool:
    """A list or tuple of plain values, shown whole."""
    if type(node) is not List and type(node) is not tuple:
        return False
    items = node.items if type(node) is List else node
    return _ROW.issuperset(map(type, items[:MAX_VALUES]))  # no longer row is shown


def value_text(node: Node) -> Any:
    """A plain value as JSON can say it: numbers too long for text, NaN and bytes become short descriptions."""
    if type(node) is List or type(node) is tuple:
        items = node.items if type(node) is List else node
        return [value_text(item) for item in items] if len(items) <= _SHOWN_ITEMS else f"list of {len(items)}"
    if node is None or type(node) is bool:
        return node
    if type(node) is int:
        return node if node.bit_length() <= 64 else f"int of {node.bit_length()} bits"
    if type(node) is float:
        return node if abs(node) < float("inf") else str(node)
    if type(node) is str:
        text = node.encode("utf-8", "backslashreplace").decode()
        return text if len(text) <= MAX_TEXT else f"{text[:MAX_TEXT]}... ({len(text)} characters)"
    data = node.data if type(node) is ByteString else node
    assert type(data) is bytes
    return f"{len(data)} bytes"


def _objects(checkpoint: Checkpoint) -> list[dict[str, Any]]:
    """Objects and globals that weights_only does not know, with their paths; a NumPy scalar counts as one."""
    if checkpoint.container in ("torch-zip", "torch-legacy") and not checkpoint.refused_globals:
        return []  # what their pickles do not name they do not hold
    found: list[dict[str, Any]] = []
    left = limits.NODES.most(checkpoint.file_bytes) // 4  # a path and a name each
    for where, node in walk(checkpoint.root, stop=lambda node: is_tensor(node) or as_value(node) is not None, plain=False):
        name = node.function if type(node) is Object else node
        if type(name) is Global and name not in ALLOWED:
            found.append({"where": list(where), "global": str(name)})
            if len(found) > left:
                raise limits.NODES.error(f"{checkpoint.path} refers to its objects too often: {len(found)} times.")
    return found
