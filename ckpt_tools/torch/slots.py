"""Where a live model keeps its tensors: parameters and buffers by name, and what can be written into them."""

from __future__ import annotations

from dataclasses import dataclass, field

import torch

from ckpt_tools.errors import ConvertError, TensorError
from ckpt_tools.torch.copying import is_freed
from ckpt_tools.torch.gathering import is_dtensor, own_box
from ckpt_tools.tree.dtypes import DTYPES

Owner = tuple[torch.nn.Module, str]


@dataclass(slots=True)
class Slot:
    """One tensor of a model under one of its names."""

    name: str
    tensor: torch.Tensor
    module: torch.nn.Module
    owners: list[Owner] = field(default_factory=list)

    @property
    def shape(self) -> tuple[int, ...]:
        return tuple(self.tensor.shape)

    @property
    def dtype(self) -> str:
        return str(self.tensor.dtype).removeprefix("torch.")

    @property
    def place(self) -> object:
        """Equal for tensors that are the same elements in memory."""
        held = self.tensor._local_tensor if is_dtensor(self.tensor) else self.tensor  # type: ignore[attr-defined]
        if held.is_meta or not held.numel():
            return id(self.tensor)
        return held.data_ptr(), self.shape, held.stride()


@dataclass(slots=True)
class Slots:
    """All that a model's state dict has a place for."""

    tensors: dict[str, Slot] = field(default_factory=dict)
    extra_state: dict[str, torch.nn.Module] = field(default_factory=dict)
    meta_buffers: list[str] = field(default_factory=list)


def find_slots(model: torch.nn.Module) -> Slots:
    state_dict = model.state_dict(keep_vars=True)  # first: FSDP2 puts its parts in the place of parameters that are whole now
    owners, modules = _owners(model), dict(model.named_modules(remove_duplicate=False))
    # the module that holds what a state dict has below a path: inside a transparent wrapper, the wrapped one
    plain = {".".join(part for part in path.split(".") if part not in _TRANSPARENT): module for path, module in modules.items()}
    holders = {**modules, **plain}
    slots, unusual = Slots(), []
    for name, value in state_dict.items():
        path, _, own = name.rpartition(".")
        module = holders.get(path)
        if own == "_extra_state" and module is not None:
            slots.extra_state[name] = module
        elif module is None or not isinstance(value, torch.Tensor) or (id(module), own) not in owners.get(id(value), {}):
            what = "made when it is asked for" if isinstance(value, torch.Tensor) else f"a {type(value).__name__}"
            unusual.append(f"{name!r} ({what})")
        elif why := _unusual(value):
            unusual.append(f"{name!r} ({why})")
        else:
            held = [(holder, key) for (_, key), holder in owners[id(value)].items()]
            slots.tensors[name] = Slot(name, value, module, held)
    if unusual:
        raise ConvertError(
            f"The model has tensors that cannot be written into: {', '.join(unusual[:8])}{' ...' if len(unusual) > 8 else ''}.",
            fix="Its own way is left: model.load_state_dict(ckpt_tools.torch.load_state_dict(path)).",
        )
    slots.meta_buffers = [
        f"{path}.{own}" if path else own
        for path, module in modules.items()
        for own in sorted(module._non_persistent_buffers_set)
        if (buffer := module._buffers.get(own)) is not None and buffer.is_meta
    ]
    return slots


# Wrappers that take their own name out of the state dict, by a hook.
_TRANSPARENT = ("_checkpoint_wrapped_module", "_fsdp_wrapped_module")


def _owners(model: torch.nn.Module) -> dict[int, dict[tuple[int, str], torch.nn.Module]]:
    """id of a tensor -> (id of a module, own name) -> that module."""
    found: dict[int, dict[tuple[int, str], torch.nn.Module]] = {}
    for module in model.modules():
        for own, tensor in (*module._parameters.items(), *module._buffers.items()):
            if tensor is not None:
                found.setdefault(id(tensor), {})[id(module), own] = module
    return found


def _unusual(tensor: torch.Tensor) -> str:
    """Why nothing can be written into a tensor as it is, or the empty text."""
    if isinstance(tensor, torch.nn.UninitializedParameter | torch.nn.UninitializedBuffer):
        return "lazy, without a shape; run the model once first"
    if is_dtensor(tensor):
        try:
            own_box(tensor)
        except TensorError as error:
            return f"a DTensor {error.what}"
        return _unusual(tensor._local_tensor)  # type: ignore[attr-defined]
    if type(tensor) not in (torch.Tensor, torch.nn.Parameter):
        return f"a {type(tensor).__name__}"
    if type(tensor.data) is not torch.Tensor:
        return f"a {type(tensor.data).__name__}"
    if tensor.layout != torch.strided or tensor.is_quantized or str(tensor.dtype).removeprefix("torch.") not in DTYPES:
        return f"{'quantised' if tensor.is_quantized else tensor.layout} {tensor.dtype}"
    if is_freed(tensor):
        return "its memory has been freed"
    if any(step == 0 and size > 1 for size, step in zip(tensor.shape, tensor.stride(), strict=True)):
        return "expanded: several of its elements are one"
    if tensor.is_inference():
        return "made under torch.inference_mode"
    return ""
