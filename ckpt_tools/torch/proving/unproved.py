"""Which tensors of the new model equal outputs do not prove: those with other numbers that the outputs do not depend on."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch
from torch.nn import functional
from torch.overrides import TorchFunctionMode

from ckpt_tools.operations.proved import Unproved
from ckpt_tools.torch.proving.outputs import walk
from ckpt_tools.torch.proving.running import called
from ckpt_tools.torch.proving.trial import Trial

Tensors = Mapping[str, torch.Tensor]


def unproved(trial: Trial, partners: Mapping[str, str]) -> list[Unproved]:
    """Tensors with other numbers than the old model's that no output has a gradient of; of embeddings, some of their rows."""
    old, new = map(tensors_of, trial.models)
    floats = {name: tensor for name, tensor in new.items() if tensor.is_floating_point()}
    others = {name: tensor for name, tensor in floats.items() if not _is_among(tensor, old.values())}
    reached = _reached(trial, others) if others else {}
    found = []
    for name, tensor in others.items():
        module = trial.models[1].get_submodule(name.rpartition(".")[0])
        if isinstance(module, torch.nn.Embedding | torch.nn.EmbeddingBag):
            missing = ~reached[name] & _differs(old.get(partners.get(name, name)), tensor)
        else:
            missing = ~reached[name].any()
        if missing.any():
            found.append(Unproved(name, int(reached[name].sum()), tensor.numel()))
    return found


def tensors_of(model: torch.nn.Module) -> dict[str, torch.Tensor]:
    """Parameters and buffers that a state dict holds, each once."""
    found: dict[int, tuple[str, torch.Tensor]] = {}
    for name, tensor in model.state_dict(keep_vars=True).items():
        if isinstance(tensor, torch.Tensor):
            found.setdefault(id(tensor), (name, tensor.detach()))
    return dict(found.values())


def _is_among(tensor: torch.Tensor, others: Iterable[torch.Tensor]) -> bool:
    """Whether one of these has the same numbers, in this or in the transposed order."""
    alike = [other for other in others if other.numel() == tensor.numel()]
    return any(
        torch.equal(other.reshape(-1), tensor.reshape(-1)) or (other.dim() == 2 and torch.equal(other.t(), tensor))
        for other in alike
    )


def _differs(old: torch.Tensor | None, new: torch.Tensor) -> torch.Tensor:
    """Which elements of an embedding are not the old one's; the old model takes no inputs for the rows beyond those."""
    differs = torch.ones(new.shape, dtype=torch.bool)
    if old is not None and old.dim() == 2 and old.shape[1] == new.shape[1]:
        rows = min(len(old), len(new))
        differs[:rows], differs[rows:] = old[:rows] != new[:rows], False
    return differs


def _reached(trial: Trial, others: Tensors) -> dict[str, torch.Tensor]:
    """Which elements have a gradient; where the model's code has none, no element has."""
    model, paths = trial.models[1], {new for _, new in trial.paired.pairs}
    found = {name: torch.zeros(tensor.shape, dtype=torch.bool) for name, tensor in others.items()}
    leaves = {name: tensor.clone().requires_grad_() for name, tensor in others.items()}
    generator = torch.Generator().manual_seed(trial.seed)

    def with_leaves(*given: torch.Tensor, **named: torch.Tensor) -> object:
        return torch.func.functional_call(model, leaves, given, named)

    for given in trial.sets:
        try:
            with torch.enable_grad(), _WrittenOut():
                made = called(with_leaves, given, trial.dtype, trial.seed)
            outputs = [tensor for path, tensor in walk(made) if path in paths and tensor.requires_grad]
            weights = [torch.randn(tensor.shape, generator=generator).to(tensor) for tensor in outputs]
            gradients = torch.autograd.grad(outputs, list(leaves.values()), weights, allow_unused=True) if outputs else ()
        except Exception:  # whatever the user's model raises: its code may write into what now has a gradient
            return found
        for name, gradient in zip(leaves, gradients, strict=False):
            if gradient is not None:
                found[name] |= gradient != 0
    return found


class _WrittenOut(TorchFunctionMode):
    """Norms by running statistics as their formula: torch has no derivative by those."""

    def __torch_function__(
        self, func: Any, types: Sequence[Any], args: Sequence[Any] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        named = kwargs or {}
        is_by_statistics = func is functional.batch_norm and not named["training"]
        is_by_statistics |= func is functional.instance_norm and not named["use_input_stats"]
        return _normed(*args, **named) if is_by_statistics else func(*args, **named)


def _normed(
    values: torch.Tensor, running_mean: torch.Tensor, running_var: torch.Tensor, weight: torch.Tensor | None,
    bias: torch.Tensor | None, eps: float, **_: Any,
) -> torch.Tensor:  # fmt: skip
    shape = (1, -1, *[1] * (values.dim() - 2))
    made = (values - running_mean.view(shape)) / (running_var.view(shape) + eps).sqrt()
    made = made if weight is None else made * weight.view(shape)
    return made if bias is None else made + bias.view(shape)
