"""Why two partners give other numbers: their settings, their weights, what their own code does."""

from __future__ import annotations

import inspect
from collections.abc import Iterator, Mapping
from typing import Any

import torch

from ckpt_tools.text import listed
from ckpt_tools.torch.proving import comparing, relations
from ckpt_tools.torch.proving.recording import CallPair, ModuleCall, shown_calls

_SHOWN = 6
_ENDINGS = ("lu", "sigmoid", "tanh", "swish", "mish")
_PASSIVE = frozenset({"training", "inplace", "p", "track_running_stats"})  # nothing of these is seen when a model is evaluated


def settings(module: torch.nn.Module) -> dict[str, str]:
    """What a module was set to: its plain public attributes and functions, as text."""
    found = {}
    for name, value in vars(module).items():
        if name.startswith("_"):
            continue
        key = "eps" if "eps" in name.lower() else name
        if isinstance(value, bool | int | float | str) or value is None or type(value) is tuple:
            found[key] = repr(value)
        elif inspect.isroutine(value):
            found[key] = getattr(value, "__name__", repr(value))
    return found


def different_settings(old: torch.nn.Module, new: torch.nn.Module) -> dict[str, tuple[str, str]]:
    """Settings that both have, with other values."""
    left, right = settings(old), settings(new)
    shared = [name for name in left if name in right and name != "training"]
    return {name: (left[name], right[name]) for name in shared if left[name] != right[name]}


def _different_configs(old: torch.nn.Module, new: torch.nn.Module) -> dict[str, tuple[str, str]]:
    """What two modules that keep their model's configuration, as transformers' do, have there with other values."""
    configs = [getattr(module, "config", None) for module in (old, new)]
    left, right = (_plain(getattr(config, "__dict__", {}), "config.") for config in configs)
    found = {name: (left[name], right[name]) for name in left if name in right and left[name] != right[name]}
    return dict(list(found.items())[:_SHOWN])


def _plain(values: Mapping[str, Any], prefix: str, depth: int = 1) -> dict[str, str]:
    """The plain values in a configuration, and in its dicts, as text."""
    found = {}
    for key, value in values.items():
        if isinstance(value, bool | int | float | str) or value is None:
            found[f"{prefix}{key}"] = repr(value)
        elif isinstance(value, dict) and depth:
            found |= _plain(value, f"{prefix}{key}.", depth - 1)
    return found


class Reasons:
    """Looks for reasons in two models; `tolerance`: what counts as equal."""

    def __init__(self, old: torch.nn.Module, new: torch.nn.Module, pairs: Mapping[str, str], tolerance: float) -> None:
        self.old, self.new, self.pairs, self.tolerance = old, new, pairs, tolerance

    def of_modules(self, old: ModuleCall, new: ModuleCall) -> list[str]:
        """Of two modules that make other numbers of the same."""
        found = list(self._weights(old, new))
        kinds = type(old.module).__name__, type(new.module).__name__
        differ = different_settings(old.module, new.module) or _different_configs(old.module, new.module)
        for name, (left, right) in differ.items():
            if name not in _PASSIVE:
                found.append(f"{name} {left}, and {right} in the new one")
        if kinds[0] != kinds[1]:
            word = "activation" if _is_activation(old.module) and _is_activation(new.module) else "class"
            found.append(f"another {word}: {kinds[0]}, and {kinds[1]} in the new one")
        return found or list(self._of_numbers(old, new))

    def _of_numbers(self, old: ModuleCall, new: ModuleCall) -> Iterator[str]:
        """By what comes out alone."""
        for one, other, word in ((old, new, "new"), (new, old, "old")):
            if comparing.gives_back(other, self.tolerance) and not comparing.gives_back(one, self.tolerance):
                yield f"the {word} one gives back what it is given"
        for name, tensor in _own(old.module).items():
            if (sign := comparing.added(old.outputs, new.outputs, tensor, self.tolerance)) is not None:
                yield f"{name} is {'added once more' if sign > 0 else 'not added'} in the new one"
        yield from comparing.values(old.outputs, new.outputs, self.tolerance)

    def of_code(
        self,
        old: ModuleCall,
        new: ModuleCall,
        after: CallPair | None,
        before: CallPair | None,
    ) -> list[str]:
        """Of the code of two modules, between two calls in them."""
        begin = [call.outputs for call in after] if after else [old.inputs, new.inputs]
        end = [call.inputs for call in before] if before else [old.outputs, new.outputs]
        found = list(self._orders(old, new)) or list(comparing.activations(begin, end, self.tolerance))
        found = found or list(comparing.shortcut(old.inputs, end, self.tolerance))
        found = found or list(comparing.values(end[0], end[1], self.tolerance))
        return found + self.of_modules(ModuleCall("", old.module), ModuleCall("", new.module))

    def _orders(self, old: ModuleCall, new: ModuleCall) -> Iterator[str]:
        """In which order each calls what both have."""
        partners = set(self.pairs.values())
        left = [self.pairs[call.path] for call in shown_calls(old, self.pairs) if call.path in self.pairs]
        right = [call.path for call in shown_calls(new, partners) if call.path in partners]
        if left != right and sorted(left) == sorted(right):
            own = [listed([path.rpartition(".")[2] for path in order], _SHOWN) for order in (left, right)]
            yield f"modules are called in another order: {own[0]}; {own[1]} in the new one"

    def _weights(self, old: ModuleCall, new: ModuleCall) -> Iterator[str]:
        left, right = _own(old.module), _own(new.module)
        for name in left:
            if name in right and name != "num_batches_tracked":
                yield from self._weight(name, left[name], right[name])
        if len(left) == len(right) == 1 and left.keys() != right.keys():
            yield from self._weight(next(iter(left)), *left.values(), *right.values())

    def _weight(self, name: str, left: torch.Tensor, right: torch.Tensor) -> Iterator[str]:
        if relations.same(left, right, self.tolerance):
            return
        how = relations.relation(left, right, self.tolerance)
        if how is None and (other := self._elsewhere(right)) is not None:
            how = f"is the old model's {other}"
        yield f"{name} {how or 'has other numbers'}"

    def _elsewhere(self, value: torch.Tensor) -> str | None:
        for name, other in self.old.state_dict().items():
            if other.shape == value.shape and relations.same(other, value, self.tolerance):
                return name
        return None


def _own(module: torch.nn.Module) -> dict[str, torch.Tensor]:
    held = {**module._parameters, **module._buffers}
    return {name: tensor.detach() for name, tensor in held.items() if tensor is not None}


def _is_activation(module: torch.nn.Module) -> bool:
    kind = type(module)
    return "activation" in kind.__module__ or "act" in kind.__name__.lower() or kind.__name__.lower().endswith(_ENDINGS)
