"""Edits on a tree: names, selection, devices. Each edits in place and returns what it did; none touches a tensor's bytes."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from ckpt_tools.errors import ConvertError, UsageError
from ckpt_tools.formats.contents import StateDict, find_optimizers, is_tensor, split_flat
from ckpt_tools.tree.names import check_unique, move_metadata
from ckpt_tools.tree.nodes import Dict, Entry, List, Node

Rename = Callable[[str], str]


# --- names


@dataclass(slots=True, unsafe_hash=True)
class Renamed:
    """The names that changed in one state dict: old -> new, in order."""

    tensors: int
    changes: dict[str, str]


def rename_state_dict(state_dict: StateDict, rename: Rename) -> Renamed:
    """Give every name in a state dict its new name; `_metadata` goes with them, order is kept."""
    node = state_dict.node
    renamed = {key: rename(key) if _is_name(key, value) else key for key, value in node.items if type(key) is str}
    check_unique(renamed)
    if nameless := [old for old, new in renamed.items() if old and not new]:
        raise ConvertError(f"{nameless[0]!r} would be left without a name.", fix="Give it another with `rename`.")
    names = state_dict.names
    changes = {old: new for old, new in renamed.items() if old != new}
    if changes:
        node.items[:] = [(renamed[key] if type(key) is str else key, value) for key, value in node.items]
        rename_metadata(node, renamed)
    return Renamed(len(names), {name: changes[name] for name in names if name in changes})


def _is_name(key: str, value: Node) -> bool:
    """Whether a key of a state dict names part of the model; `epoch` beside the tensors does not."""
    return is_tensor(value) or key.endswith("_extra_state") or "." in key


def rename_metadata(node: Dict, renamed: Mapping[str, str]) -> None:
    if (metadata := node.metadata) is not None:
        rows = [(path, row) for path, row in metadata.items if type(path) is str]
        replace_metadata(node, metadata, list(move_metadata(renamed, rows, lambda: Dict([("version", 1)]))))


def replace_metadata(node: Dict, metadata: Dict, rows: Sequence[tuple[Node, Node]]) -> None:
    """Give a state dict other rows of `_metadata`. Another state dict may hold the same record, which stays as it is."""
    attributes, moved = node.attributes, Dict(list(rows), ordered=metadata.ordered)
    assert attributes is not None
    pairs = [(name, moved if value is metadata else value) for name, value in attributes.items]
    node.attributes = Dict(pairs, ordered=attributes.ordered)


def rename_optimizers(root: Node, rename: Rename) -> int:
    """Rename what every optimizer below `root` calls by name: `param_names`, and parameters and states keyed by name."""
    changed = 0
    done: set[int] = set()  # what was renamed before, under another path
    for _, optimizer in find_optimizers(root):
        if (flat := optimizer.flat) is not None and id(flat) not in done:
            done.add(id(flat))
            changed += _rename_keys(flat, lambda key: _in_flat(key, rename))
            continue
        groups = [group for group in optimizer.groups.items if type(group) is Dict]
        for node in (optimizer.state, *(group.get(key) for group in groups for key in ("param_names", "params"))):
            if id(node) in done or (type(node) is not List and node is not optimizer.state):
                continue
            done.add(id(node))
            if type(node) is Dict:
                changed += _rename_keys(node, rename)
            elif type(node) is List:
                new = [rename(name) if type(name) is str else name for name in node.items]
                changed += sum(old != name for old, name in zip(node.items, new, strict=True))
                node.items[:] = new
    return changed


def _rename_keys(node: Dict, rename: Rename) -> int:
    renamed = {key: rename(key) for key in node.named}
    check_unique(renamed)
    node.items[:] = [(renamed[key] if type(key) is str else key, value) for key, value in node.items]
    return sum(old != new for old, new in renamed.items())


def _in_flat(key: str, rename: Rename) -> str:
    kind, name, field = split_flat(key)
    return f"{kind}.{rename(name)}.{field}"


def parse_rename(text: str | tuple[str, str]) -> tuple[re.Pattern[str], str]:
    """`REGEX=REPLACEMENT`, split at the last `=` that leaves a regular expression before it; or the two as a pair."""
    pattern, separator, replacement = text.rpartition("=") if isinstance(text, str) else (text[0], "=", text[1])
    if not separator or not pattern:
        raise UsageError(f"`rename={text!r}` is not REGEX=REPLACEMENT.", fix=r"For example: `rename='^encoder\\.=backbone.'`")
    try:
        compiled = re.compile(pattern)
        re.sub(f"{pattern}|", replacement, "")  # matches nothing at least, so that the replacement is read
    except (re.error, IndexError) as error:
        raise UsageError(f"`rename={text!r}` is not a regular expression with its replacement.", why=f"{error}.") from None
    return compiled, replacement


def restore_named_ties(node: Node, metadata: Mapping[str, str]) -> dict[str, str]:
    """Put back the tied names that `safetensors.torch.save_model` left to the metadata:"""
    if type(node) is not Dict:
        return {}
    entries = {key: value for key, value in node.items if type(value) is Entry}
    ties = {name: kept for name, kept in metadata.items() if kept in entries and name not in entries and name != "format"}
    node.items.extend((name, entries[kept]) for name, kept in ties.items())
    return ties
