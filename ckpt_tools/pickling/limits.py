"""How large and deep a pickle may be. One place; far above any real checkpoint."""

from __future__ import annotations

MAX_DEPTH = 10_000  # nesting; C pickle itself cannot write deeper
MAX_KEY_DEPTH = 100  # tuples in tuples as a dict key; hashing a deep one crashes C pickle and torch
SPARE_NODES = 10_000
BYTES_PER_NODE = 4  # containers allowed per byte of pickle; a state dict makes one for every seven


def node_budget(size: int) -> int:
    """How many containers a pickle of this many bytes may make."""
    return SPARE_NODES + size // BYTES_PER_NODE
