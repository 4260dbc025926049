"""Which tensors of the new model are proved: they are the old one's, or the outputs depend on them."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

import torch

from ckpt_tools.operations.proved import Unproved
from ckpt_tools.torch.proving.inputs import Given, run_alone, seeded
from ckpt_tools.torch.proving.precision import Precision, computing_in
from ckpt_tools.torch.proving.recording import Named, walk

Tensors = Mapping[str, torch.Tensor]


class Reach:
    """Looks for tensors that the outputs do not depend on."""

    def __init__(self, model: torch.nn.Module, sets: Sequence[Given], precision: Precision, seed: int, paths: set[str]) -> None:
        self.model, self.sets, self.precision, self.seed, self.paths = model, sets, precision, seed, paths

    def unproved(self, old: Tensors, partners: Mapping[str, str]) -> list[Unproved]:
        """Tensors with other numbers than the old model's, on which nothing depends; embeddings of which some rows are so."""
        others = {name: tensor for name, tensor in tensors_of(self.model).items()
                  if tensor.is_floating_point() and not _is_among(tensor, old)}  # fmt: skip
        if not others:
            return []
        reached = self._by_gradients(others)
        silent = [name for name in others if not reached[name].any()]
        for name in self._by_changes(silent, others):
            reached[name].fill_(True)
        found = (self._row(name, tensor, reached[name], old.get(partners.get(name, name))) for name, tensor in others.items())
        return [row for row in found if row is not None]

    def _row(self, name: str, tensor: torch.Tensor, reached: torch.Tensor, old: torch.Tensor | None) -> Unproved | None:
        open_elements = ~reached
        module = self.model.get_submodule(name.rpartition(".")[0])
        if isinstance(module, torch.nn.Embedding | torch.nn.EmbeddingBag) and old is not None and old.dim() == 2:
            rows = min(len(old), len(tensor))  # those beyond are for inputs that the old model does not take
            open_elements[rows:] = False
            if old.shape[1] == tensor.shape[1]:
                open_elements[:rows] &= old[:rows] != tensor[:rows]
        elif reached.any():
            return None
        return Unproved(name, int(reached.sum()), tensor.numel()) if open_elements.any() else None

    def _by_gradients(self, others: Tensors) -> dict[str, torch.Tensor]:
        """Which elements have a gradient; where the model's code has none, no element has."""
        found = {name: torch.zeros(tensor.shape, dtype=torch.bool) for name, tensor in others.items()}
        leaves = {name: tensor.detach().clone().requires_grad_() for name, tensor in others.items()}
        for given in self.sets:
            try:
                gradients = self._gradients(leaves, given)
            except Exception:  # whatever the user's model raises: its code may write into what now has a gradient
                return found
            for name, gradient in zip(leaves, gradients, strict=True):
                if gradient is not None:
                    found[name] |= gradient != 0
        return found

    def _gradients(self, leaves: Tensors, given: Given) -> Sequence[torch.Tensor | None]:
        own = given.to(self.precision.dtype)
        with torch.enable_grad(), seeded(self.seed), computing_in(self.precision):
            made = torch.func.functional_call(self.model, dict(leaves), own.by_position, own.by_name)
            found = [tensor for path, tensor in walk(made) if path in self.paths and tensor.requires_grad]
            weights = [torch.randn_like(tensor) for tensor in found]
            if not found:
                return [None] * len(leaves)
            return torch.autograd.grad(found, list(leaves.values()), weights, allow_unused=True)

    def _by_changes(self, names: Sequence[str], others: Tensors) -> Iterator[str]:
        """Those whose tensors change an output when they are changed; all are tried at once, then halves of them."""
        if not names or not self._changes([others[name] for name in names]):
            return
        if len(names) == 1:
            yield names[0]
            return
        middle = len(names) // 2
        for half in (names[:middle], names[middle:]):
            yield from self._by_changes(half, others)

    def _changes(self, tensors: Sequence[torch.Tensor]) -> bool:
        before = self._outputs()
        kept = [tensor.detach().clone() for tensor in tensors]
        try:
            for tensor in tensors:
                tensor.data.mul_(1.25).add_(torch.linspace(0.01, 0.1, tensor.numel()).reshape(tensor.shape))
            after = self._outputs()
        except Exception:  # whatever the user's model raises: it looks at the numbers
            return True
        finally:
            for tensor, values in zip(tensors, kept, strict=True):
                tensor.data.copy_(values)
        runs = list(zip(before, after, strict=True))
        return any(not torch.equal(left[path], right[path]) for left, right in runs for path in self.paths)

    def _outputs(self) -> list[Named]:
        return [run_alone(self.model, given, self.precision, self.seed) for given in self.sets]


def tensors_of(model: torch.nn.Module) -> dict[str, torch.Tensor]:
    """Parameters and buffers that a state dict holds, each once."""
    found: dict[int, tuple[str, torch.Tensor]] = {}
    for name, tensor in model.state_dict(keep_vars=True).items():
        if isinstance(tensor, torch.Tensor):
            found.setdefault(id(tensor), (name, tensor))
    return dict(found.values())


def _is_among(tensor: torch.Tensor, others: Tensors) -> bool:
    """Whether one of these has the same numbers, in this or in the transposed order."""
    alike = [other for other in others.values() if other.numel() == tensor.numel()]
    return any(_same(other, tensor) or (other.dim() == 2 and _same(other.t(), tensor)) for other in alike)


def _same(left: torch.Tensor, right: torch.Tensor) -> bool:
    """Row-major; the first numbers decide, mostly."""
    few = [value[:1] if value.dim() > 1 else value for value in (left, right)]
    first = [value.reshape(-1)[:64] for value in few]
    room = min(map(len, first))
    return torch.equal(first[0][:room], first[1][:room]) and torch.equal(left.reshape(-1), right.reshape(-1))
