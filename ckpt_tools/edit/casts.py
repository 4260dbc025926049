"""Storages exchanged: casts, byte order, device tags. The bytes are worked out while writing."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TypeAlias

from ckpt_tools.errors import ConvertError, NothingMatchedError, TensorError, UsageError
from ckpt_tools.formats.contents import find_optimizers, find_state_dicts, find_tensors, names_quantised
from ckpt_tools.pickling.torch_objects import is_device, unusual_tensor
from ckpt_tools.text import dotted
from ckpt_tools.tree import exchange
from ckpt_tools.tree.dtypes import DType
from ckpt_tools.tree.globs import Globs
from ckpt_tools.tree.nodes import Dict, Entry, Node, Storage
from ckpt_tools.tree.visit import reachable
from ckpt_tools.values.numeric import CastCount, cast, swapped
from ckpt_tools.values.pytorch import need_torch


@dataclass(slots=True)
class Casting:
    """What is cast: tensors by "from -> to", and per storage its path and the count of what that loses; what stays."""

    moves: dict[str, int] = field(default_factory=dict)
    counts: list[tuple[str, CastCount]] = field(default_factory=list)
    steps: int = 0
    parts: int = 0
    unusual: list[str] = field(default_factory=list)

    def lost(self) -> Lost:
        """What was lost, by dotted path; to be asked once the bytes are written."""
        lost: Lost = ({}, {}, {}, {})
        for name, count in self.counts:
            for sums, number in zip(lost, (count.overflowed, count.underflowed, count.saturated, count.nan), strict=True):
                if number:
                    sums[name] = sums.get(name, 0) + number
        return lost


# Finite values that became infinite, values that became zero, that became the largest of their dtype, that are NaN.
Lost: TypeAlias = tuple[dict[str, int], dict[str, int], dict[str, int], dict[str, int]]


def cast_floats(root: Node, target: DType | None, by_glob: Mapping[str, DType]) -> tuple[Node, Casting]:
    """Cast every float tensor to `target`, and those that a glob names to its; ties, views and everything else stay."""
    users: dict[int, list[_View]] = {}
    prefixes = {state_dict.where for state_dict in find_state_dicts(root)}
    unusual: list[str] = []
    for tensor in find_tensors(root):
        if type(tensor.node) is not Entry:
            found = unusual_tensor(tensor.node)
            unusual += [dotted(tensor.where)] if found and found.dtype and found.dtype.family == "float" else []
        else:
            name = str(tensor.where[-1]) if tensor.where[:-1] in prefixes else ""
            users.setdefault(id(tensor.node.storage), []).append((dotted(tensor.where), name, tensor.node))
    steps, parts = _steps(root), _parts(root)
    targets = _targets(users, target, steps | parts, by_glob)
    casting = Casting(steps=len(steps - targets.keys()), parts=len(parts - targets.keys()), unusual=unusual)
    made = {
        storage: _cast_storage(users[storage], kind, casting)
        for storage, kind in targets.items()
        if any(entry.dtype is not kind for _, _, entry in users[storage])
    }

    def swap(node: Node) -> Node:
        if type(node) is Storage:
            return made.get(id(node), node)
        if type(node) is Entry and id(node.storage) in made:
            return replace(node, storage=made[id(node.storage)], dtype=targets[id(node.storage)])
        return node

    return exchange.replace(root, swap), casting


_View: TypeAlias = tuple[str, str, Entry]  # path, name in its state dict, entry


def _cast_storage(views: Sequence[_View], target: DType, casting: Casting) -> Storage:
    path, _, first = views[0]
    before, storage = first.dtype, first.storage
    if any(entry.dtype is not before for _, _, entry in views):
        raise ConvertError(f"{path!r} shares its storage with a tensor of another dtype; it cannot be cast.")
    if before.packed > 1 or not before.in_torch:
        raise ConvertError(f"{path!r} is {before.name}, which torch cannot cast.", fix="Name others: `dtype='GLOB=TYPE'`.")
    if target.itemsize == 1 and any("neg" in entry.lazy_bits for _, _, entry in views):
        raise ConvertError(f"{path!r} is a negated view, and torch cannot negate {target.name}.")
    move = f"{before.name} -> {target.name}"
    casting.moves[move] = casting.moves.get(move, 0) + len(views)
    need_torch("`dtype` casts tensors with it.")
    count = CastCount()
    casting.counts.append((path, count))
    content = cast(storage.content, before, target, count)
    return replace(storage, dtype=target if target.storage else None, nbytes=content.length, content=content)


def _steps(root: Node) -> set[int]:
    states = (state for _, optimizer in find_optimizers(root) for _, state in optimizer.state.items)
    steps = (state.get("step") for state in states if type(state) is Dict)
    return {id(step.storage) for step in steps if type(step) is Entry and step.dtype.family == "float"}


def _parts(root: Node) -> set[int]:
    suspects = {id(found.node): found.node for found in find_state_dicts(root) if names_quantised(found)}
    if not suspects:
        return set()
    from ckpt_tools.edit.quantised.finding import find

    tensors = [tensor for node in suspects.values() for tensor in find(node).quantised.values()]
    return {id(part.entry.storage) for tensor in tensors for part in tensor.parts if part.entry.dtype.family == "float"}


def _targets(
    users: Mapping[int, list[_View]], target: DType | None, spared: Collection[int], by_glob: Mapping[str, DType]
) -> dict[int, DType]:
    """What each storage is cast to: what a glob says of its tensors, else `target`, but for `spared` ones."""
    globs, targets = Globs(by_glob), dict[int, DType]()
    for storage, views in users.items():
        found: dict[str, DType | None] = {}
        for path, name, entry in views:
            if entry.dtype.family == "float":
                hits = globs.matching(path, *filter(None, (name,)))
                found[path] = by_glob[hits[-1]] if hits else None if storage in spared else target
        kinds = set(found.values())
        if len(kinds) > 1:
            names = ", ".join(map(repr, found))
            raise ConvertError(f"{names} share one storage, and `dtype` differs.", fix="Match all of them or none.")
        if kinds and (kind := kinds.pop()) is not None:
            targets[storage] = kind
    for glob in sorted(globs.unused):
        fix = "ckpt inspect --all FILE lists the names and dtypes."
        raise NothingMatchedError(f"`dtype={glob!r}` matches no float tensor.", fix=fix)
    return targets


def to_little_endian(root: Node, byteorder: str) -> Node:
    """The storages of a big-endian file, to be swapped while writing; anything else as it is."""
    if byteorder == "little":
        return root
    widths: dict[int, set[int]] = {}
    for node in reachable(root):
        if type(node) is Entry:
            widths.setdefault(id(node.storage), set()).add(node.dtype.swap_width)

    def change(storage: Storage) -> Storage:
        if widths.get(id(storage), set()) - {storage.swap_width}:
            raise TensorError(
                f"The big-endian storage {storage.key!r} is viewed with elements of another size than its own.",
                why="PyTorch swaps the bytes of a storage by its own, so numbers depend on which machine reads them.",
            )
        return replace(storage, content=swapped(storage.content, storage.swap_width))

    return map_storages(root, change)


# --- devices


def has_values(tag: str) -> bool:
    """Whether a device tag names a device on which torch has values: any but `meta`."""
    return is_device(tag) and tag.partition(":")[0] != "meta"


def parse_map_location(spec: str) -> Callable[[str], str]:
    """What `--map-location` does to a device tag: one device for all, or `from=to` pairs separated by commas."""
    pairs = [part.strip().partition("=") for part in spec.split(",")]
    for source, equals, target in pairs:
        for device in (source, target) if equals else (source,):
            if not has_values(device):
                what = f"`map_location={spec!r}`: {device!r} is not a device."
                raise UsageError(what, fix="For example: cpu, cuda:1, cuda:0=cpu.")
        if (kind := (target or source).partition(":")[0]) in _NOT_RESTORED:
            raise UsageError(
                f"`map_location={spec!r}`: torch.load restores nothing to {kind}.", fix="For example: cpu, cuda:1."
            )
    pairs = [(_of_cpu(source), equals, _of_cpu(target)) for source, equals, target in pairs]
    if len(pairs) == 1 and not pairs[0][1]:
        return lambda tag: pairs[0][0]
    if not all(equals for _, equals, _ in pairs):
        what = f"`map_location={spec!r}` mixes a single device with pairs."
        raise UsageError(what, fix="For example: cuda:0=cuda:1,cuda:7=cpu.")
    table = {_full(source): target for source, _, target in pairs}
    if len(table) != len(pairs):
        raise UsageError(f"`map_location={spec!r}` names a device twice.")
    return lambda tag: table.get(_full(tag), tag)


# What torch names as a device, and no `torch.serialization.register_package` of torch or a backend brings anything to.
_NOT_RESTORED = ("mkldnn", "opengl", "opencl", "ideep", "hip", "ve", "fpga", "maia", "ort", "lazy", "vulkan", "ipu")


def _of_cpu(device: str) -> str:
    return "cpu" if device.startswith("cpu:") else device


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
        if type(node) is Entry and (storage := new(node.storage)) is not node.storage:
            return replace(node, storage=storage)
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
