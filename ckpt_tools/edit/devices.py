"""Device tags of storages: `map_location` as text, and storages exchanged."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import replace

from ckpt_tools.errors import UsageError
from ckpt_tools.tree import exchange
from ckpt_tools.tree.nodes import Entry, Node, Storage

# --- devices

_DEVICE = re.compile(r"(cpu|cuda|mps|xpu|hpu|npu|mtia|maia|xla|privateuseone)(:\d+)?")


def is_device(tag: str) -> bool:
    """Whether a device tag names a kind of device on which torch has values: any but `meta`."""
    return _DEVICE.fullmatch(tag) is not None


def parse_map_location(spec: str) -> Callable[[str], str]:
    """What `--map-location` does to a device tag: one device for all, or `from=to` pairs separated by commas."""
    pairs = [part.strip().partition("=") for part in spec.split(",")]
    for source, equals, target in pairs:
        for device in (source, target) if equals else (source,):
            if not is_device(device):
                raise UsageError(
                    f"`map_location={spec!r}`: {device!r} is not a device that holds values.",
                    fix="For example: cpu, cuda:1, cuda:0=cpu.",
                )
    if len(pairs) == 1 and not pairs[0][1]:
        return lambda tag: spec.strip()
    if not all(equals for _, equals, _ in pairs):
        raise UsageError(
            f"`map_location={spec!r}` mixes a single device with pairs.", fix="For example: cuda:0=cuda:1,cuda:7=cpu."
        )
    table = {_full(source): target for source, _, target in pairs}
    if len(table) != len(pairs):
        raise UsageError(f"`map_location={spec!r}` names a device twice.")
    return lambda tag: table.get(_full(tag), tag)


def _full(device: str) -> str:
    return "cuda:0" if device == "cuda" else device


def map_storages(root: Node, change: Callable[[Storage], Storage]) -> Node:
    """Exchange storages everywhere, each once; entries on one storage stay on one. Returns the root."""
    changed: dict[int, Storage] = {}

    def new(storage: Storage) -> Storage:
        if id(storage) not in changed:
            changed[id(storage)] = change(storage)
        return changed[id(storage)]

    def swap(node: Node) -> Node:
        if type(node) is Storage:
            return new(node)
        if type(node) is Entry and new(node.storage) is not node.storage:
            storage = new(node.storage)
            moved = storage.dtype is not node.storage.dtype and node.storage.dtype is not None
            return replace(node, storage=storage, dtype=storage.dtype if moved and storage.dtype else node.dtype)
        return node

    return exchange.replace(root, swap)


def map_devices(root: Node, change: Callable[[str], str]) -> tuple[Node, dict[str, int]]:
    """Rewrite device tags; returns the root, and how many storages went `from -> to`."""
    counts: dict[str, int] = {}

    def retag(storage: Storage) -> Storage:
        if storage.device is None or (target := change(storage.device)) == storage.device:
            return storage
        move = f"{storage.device} -> {target}"
        counts[move] = counts.get(move, 0) + 1
        return replace(storage, device=target)

    return map_storages(root, retag), counts
