"""Names of live state dicts, without wrappers or with them."""

from __future__ import annotations

import collections
from collections.abc import Callable, Mapping
from typing import Any, TypeVar

import torch

from ckpt_tools.tree import names
from ckpt_tools.tree.options import natural

_StateDict = TypeVar("_StateDict", bound=Mapping[str, Any])


@natural
def strip_prefix(state_dict: _StateDict, prefix: str = "module.") -> _StateDict:
    """A state dict of the same kind without a leading prefix, taken once; order and `_metadata` are kept.

    Args:
        state_dict: of a model; it is left as it is. prefix: what is removed.

    Raises:
        ConvertError: two tensors would get one name.
    """
    return renamed_state_dict(state_dict, lambda name: names.strip_prefix(name, prefix))


@natural
def add_prefix(state_dict: _StateDict, prefix: str = "module.") -> _StateDict:
    """A state dict of the same kind with a prefix before every name; order and `_metadata` are kept.

    Args:
        state_dict: of a model; it is left as it is. prefix: what is added.
    """
    return renamed_state_dict(state_dict, lambda name: prefix + name)


@natural
def unwrap(state_dict: _StateDict) -> _StateDict:
    """A state dict of the same kind without the wrappers of DP, DDP, compile, FSDP1 and activation checkpointing.

    Args:
        state_dict: of a model; it is left as it is.

    Raises:
        ConvertError: two tensors would get one name.
    """
    return renamed_state_dict(state_dict, names.unwrap)


def renamed_state_dict(state_dict: _StateDict, rename: Callable[[str], str]) -> _StateDict:
    metadata = getattr(state_dict, "_metadata", None)
    renamed = {key: rename(key) if _is_name(key, value) else key for key, value in state_dict.items()}
    names.check_unique(renamed)
    kind = type(state_dict) if isinstance(state_dict, dict) else dict
    result: Any = kind() if kind is not collections.defaultdict else {}
    result.update((renamed[key], value) for key, value in state_dict.items())
    if metadata is not None:
        result._metadata = type(metadata)(names.move_metadata(renamed, list(metadata.items()), lambda: {"version": 1}))
    return result  # type: ignore[no-any-return]


def _is_name(key: Any, value: Any) -> bool:
    """Whether a key names part of the model, as `ckpt convert` has it; an epoch beside the tensors does not."""
    return isinstance(key, str) and (isinstance(value, torch.Tensor) or key.endswith("_extra_state") or "." in key)
