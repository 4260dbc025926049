"""Distributed tensors of a live model: gathered where a model is saved, filled by each rank where one is loaded."""

from __future__ import annotations

import os
import zlib
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch

from ckpt_tools.errors import PartError, TensorError, UsageError
from ckpt_tools.parts.rank_parts import Placement, Sizes


def is_dtensor(value: object) -> bool:
    """Whether a value is a DTensor; nothing of torch.distributed is imported to see that."""
    return isinstance(value, torch.Tensor) and type(value).__name__ == "DTensor" and hasattr(value, "_local_tensor")


def has_parts(data: Any) -> bool:
    """Whether there are tensors in a mapping of which this process holds a part."""
    found = False
    for value in leaves(data):
        found = found or is_dtensor(value)
        if isinstance(value, torch.Tensor) and type(value).__name__ == "ShardedTensor":  # FSDP1 makes them
            raise PartError(
                "The state dict holds ShardedTensors: this process's parts of the tensors.",
                fix="Take the whole one: with FSDP.state_dict_type(model, StateDictType.FULL_STATE_DICT): model.state_dict()",
            )
    return found


def leaves(data: Any) -> Iterator[Any]:
    """What there is in mappings, lists and tuples at any depth, in no order; each of these once."""
    stack, seen = [data], set[int]()
    while stack:
        value = stack.pop()
        if not isinstance(value, Mapping | list | tuple):
            yield value
        elif id(value) not in seen:
            seen.add(id(value))
            stack.extend(value.values() if isinstance(value, Mapping) else value)


def write_gathered(data: Mapping[str, Any], path: str | os.PathLike[str], write: Callable[[Any], None]) -> None:
    """Gather the parts of all processes, and let the first of those that name this path write it. Every process calls this."""
    import torch.distributed as dist

    from ckpt_tools.io.ranks import Ranks

    ranks = Ranks(dist.get_rank(), dist.get_world_size())
    shown = repr([(name, tuple(getattr(value, "shape", ()))) for name, value in data.items()])
    own = (os.path.abspath(path), zlib.crc32(shown.encode("utf-8", "replace")))
    everyone = ranks.agree(lambda: own)
    if len({digest for place, digest in everyone if place == own[0]}) > 1:
        raise UsageError(f"The processes of the job hold different tensors for {path}.", fix="Give each stage its own path.")
    writer = [place for place, _ in everyone].index(own[0])
    whole = _Gathering(keep=writer == ranks.rank).value(data)
    ranks.agree(lambda: write(whole) if writer == ranks.rank else None)


class _Gathering:
    """Exchanges distributed tensors for whole ones on the CPU, each once; processes that do not write keep none of them."""

    def __init__(self, *, keep: bool) -> None:
        self.keep = keep
        self.whole: dict[Any, torch.Tensor] = {}

    def value(self, value: Any) -> Any:
        if is_dtensor(value):
            return self.tensor(value)
        if isinstance(value, Mapping):
            made: Any = type(value)() if type(value).__name__ in ("dict", "OrderedDict") else {}
            made.update((key, self.value(item)) for key, item in value.items())
            if (metadata := getattr(value, "_metadata", None)) is not None:
                made._metadata = metadata
            return made
        if type(value) in (list, tuple):
            return type(value)(map(self.value, value))
        return value

    def tensor(self, tensor: Any) -> torch.Tensor:
        local = tensor._local_tensor
        view = (local.untyped_storage()._cdata, local.storage_offset(), local.shape, local.stride(), tensor.shape)
        # an empty part says nothing of ties, and every process must gather as often as the others
        key = view if local.numel() else id(tensor)
        whole = tensor.detach().full_tensor()
        if not self.keep:
            return torch.empty(0)
        return self.whole.setdefault(key, whole.cpu())


# --- loading


def own_box(tensor: Any) -> tuple[Sizes, Sizes] | None:
    """Where this rank's part of a DTensor lies in the whole, and its sizes; None for a rank that is not in its mesh."""
    from ckpt_tools.parts.rank_parts import box_at

    coordinate = tensor.device_mesh.get_coordinate()
    if coordinate is None:
        return None
    placements = [_placement(place) for place in tensor.placements]
    box = box_at(tuple(tensor.shape), tuple(tensor.device_mesh.shape), placements, tuple(coordinate))
    if any(place.kind == "partial" for place in placements) or box[1] != tuple(tensor._local_tensor.shape):
        raise TensorError(f"cut as {', '.join(map(str, tensor.placements))}")
    return box


def _placement(place: Any) -> Placement:
    from ckpt_tools.parts.rank_parts import Placement

    name = type(place).__name__
    if name in ("Shard", "_StridedShard"):
        return Placement("shard" if name == "Shard" else "strided", place.dim, getattr(place, "split_factor", 1))
    return Placement("replicate" if name == "Replicate" else "partial")
