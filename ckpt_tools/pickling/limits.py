"""How large and deep a pickle may be. One place; far above any real checkpoint."""

from __future__ import annotations

MAX_DEPTH = 10_000  # nesting; C pickle itself cannot write deeper
MAX_GLOBALS = 100_000  # different ones; a checkpoint names a few dozen
MAX_KEY_DEPTH = 100  # tuples in tuples as a dict key; hashing a deep one crashes C pickle and torch
MAX_KEY_PARTS = 4_000_000  # in all keys of all dicts, shared parts counted each time: Python hashes them each time
MAX_PICKLE = 1 << 30  # bytes of one pickle; a state dict of a million tensors takes 300 MB
SPARE_NODES = 100_000
BYTES_PER_NODE = 6  # a state dict makes a container for every 10 bytes; protocol 2 memoizes each, which takes 6
LONG_TEXT = 1024  # characters; using a longer one again costs a node for every BYTES_OF_SHARED_TEXT of them
BYTES_OF_SHARED_TEXT = 16


def node_budget(size: int) -> int:
    """How many containers a pickle of this many bytes may make."""
    return SPARE_NODES + size // BYTES_PER_NODE
