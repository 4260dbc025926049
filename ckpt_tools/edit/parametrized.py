"""Weights that are in parts made one tensor each: what `torch.nn.utils.parametrize.remove_parametrizations` does to a model."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace

from ckpt_tools.edit.renaming import replace_metadata
from ckpt_tools.errors import ConvertError, NothingMatchedError
from ckpt_tools.formats.contents import find_state_dicts, tensors_by_name
from ckpt_tools.text import some
from ckpt_tools.tree.names import unwrap
from ckpt_tools.tree.nodes import Dict, Entry, Node, Storage, contiguous_stride
from ckpt_tools.tree.parametrized import Parametrized, parametrized, part_of
from ckpt_tools.values.numeric import view_of
from ckpt_tools.values.parametrized import folded
from ckpt_tools.values.pytorch import need_torch


def find(node: Dict) -> list[Parametrized]:
    return parametrized({name: value.shape for name, value in tensors_by_name(node).items() if type(value) is Entry})


def fold_all(root: Node) -> list[Parametrized]:
    nodes = {id(state_dict.node): state_dict.node for state_dict in find_state_dicts(root)}
    found = {key: find(node) for key, node in nodes.items()}
    rows = [row for each in found.values() for row in each]
    if not rows:
        raise NothingMatchedError(
            "There is no weight in parts.", why="`fold` looks for weight norm, spectral norm, pruning and orthogonal weights."
        )
    if (unknown := next((row for row in rows if not row.kind), None)) is not None:
        parts = ", ".join(map(repr, unknown.parts.values()))
        raise ConvertError(f"{unknown.name!r} is in parts by a parametrization that is not known: {parts}.",
                           fix="Fold it with its model: torch.nn.utils.parametrize.remove_parametrizations.")  # fmt: skip
    need_torch("`fold` works weights out with it.")
    for key, each in found.items():
        _fold(nodes[key], each)
    return rows


def fold_for(node: Dict, wanted: Iterable[str]) -> list[Parametrized]:
    """Fold the weights that a target has whole, by its names; all of them where the target has none in parts."""
    rows = [row for row in find(node) if row.kind]
    if not rows:
        return []
    names = set(map(unwrap, wanted))
    in_parts = any(map(part_of, names))
    rows = [row for row in rows if not in_parts or unwrap(row.name) in names]
    _fold(node, rows)
    return rows


def told_fold(rows: Sequence[Parametrized]) -> list[tuple[str, str]]:
    kinds: dict[str, list[str]] = {}
    for row in rows:
        kinds.setdefault(row.kind, []).append(row.name)
    notes = []
    for kind, names in kinds.items():
        text = f"{kind.capitalize()} is folded into {len(names)} plain weight{'s' * (len(names) != 1)}: {some(names)}."
        if kind == "orthogonal":
            text += " The map is not in the file: torch's default was taken (matrix_exp of square weights, else householder)."
        notes.append(("folded", text))
    return notes


def _fold(node: Dict, rows: Sequence[Parametrized]) -> None:
    if not rows:
        return
    tensors = tensors_by_name(node)
    made: dict[tuple[object, ...], Entry] = {}
    first: dict[Node, tuple[str, Entry]] = {}
    for row in rows:
        parts = {role: entry for role, name in row.parts.items() if type(entry := tensors[name]) is Entry}
        key = (row.kind, *(view_of(entry) for entry in parts.values()))
        if key not in made:
            content, like = folded(row, parts), parts["v" if row.kind == "weight norm" else "orig"]
            storage = Storage(f"folded{len(made)}", like.storage.dtype, content.length, like.storage.device, content)
            made[key] = replace(like, storage=storage, stride=contiguous_stride(like.shape), offset=0, extras=None)
        first[next(key for key, _ in node.items if key in row.parts.values())] = (row.name, made[key])
    gone = {name for row in rows for name in row.parts.values()}
    node.items[:] = [first.get(key, (key, value)) for key, value in node.items if key in first or key not in gone]
    metadata = node.attributes.get("_metadata") if node.attributes is not None else None
    if type(metadata) is Dict:  # without the rows of parametrizations that are no more
        left = tuple(key for key, _ in node.items if type(key) is str and "parametrizations." in key)
        kept = [
            (path, row) for path, row in metadata.items
            if type(path) is not str or "parametrizations" not in path.split(".") or any(k.startswith(f"{path}.") for k in left)
        ]  # fmt: skip
        replace_metadata(node, metadata, kept)
