"""Places in a tree that a test knows."""

from __future__ import annotations

from ckpt_tools.tree.nodes import Entry, Node, as_dict


def value_at(root: Node, *path: str) -> Node:
    """The node below these keys of dicts in dicts."""
    for key in path:
        root = as_dict(root).get(key)
    return root


def entry_at(root: Node, *path: str) -> Entry:
    """The tensor below these keys of dicts in dicts."""
    found = value_at(root, *path)
    assert type(found) is Entry
    return found
