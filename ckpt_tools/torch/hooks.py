"""Load hooks: code of a model's own that `load_state_dict` runs, and `load_into` when it is asked to."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch.nn.parallel import DataParallel, DistributedDataParallel

from ckpt_tools.errors import ConvertError, MatchError, UsageError
from ckpt_tools.io.member_paths import File
from ckpt_tools.text import listed
from ckpt_tools.torch.gathering import is_dtensor
from ckpt_tools.torch.live_names import renamed_state_dict
from ckpt_tools.torch.loading import load_state_dict
from ckpt_tools.torch.report import LoadReport
from ckpt_tools.tree import names
from ckpt_tools.tree.globs import Globs

# Of torch itself, and needless here: batch counters are matched, and what wraps a model has its names removed.
_NEEDLESS = ("torch.nn.modules.", "torch.distributed.", "torch._dynamo.", "torch.jit.", "ckpt_tools.")


def load_hooks(model: torch.nn.Module) -> list[str]:
    """What of a model's own code `load_state_dict` would run, as text, each once: `Net._load_from_state_dict`."""
    inner = inside_wrappers(model)
    found = dict.fromkeys([_override(inner, "load_state_dict")])
    for module in inner.modules():
        found |= dict.fromkeys([_override(module, "_load_from_state_dict"), *_registered(module)])
    return [text for text in found if text]


def _override(module: torch.nn.Module, method: str) -> str:
    """`Class.method` where a class has a method of its own in the place of torch's."""
    return f"{type(module).__name__}.{method}" if _counts(getattr(type(module), method)) else ""


def _registered(module: torch.nn.Module) -> Iterator[str]:
    """The hooks that were registered on a module."""
    for kind in ("pre", "post"):
        for hook in getattr(module, f"_load_state_dict_{kind}_hooks").values():
            function = getattr(hook, "hook", hook)
            if _counts(function):
                name = getattr(function, "__name__", type(function).__name__)
                yield f"{type(module).__name__}'s {kind}-hook {name}"


def _counts(function: Callable[..., Any]) -> bool:
    home = getattr(function, "__module__", None) or type(function).__module__
    return not home.startswith(_NEEDLESS)


def inside_wrappers(model: torch.nn.Module) -> torch.nn.Module:
    """The model that DataParallel, DistributedDataParallel and torch.compile were given."""
    while True:
        parallel = isinstance(model, DataParallel | DistributedDataParallel)
        inner = model.module if parallel else getattr(model, "_orig_mod", None)
        if not isinstance(inner, torch.nn.Module):
            return model
        model = inner


def load_with_hooks(
    model: torch.nn.Module, path: File, *, select: str | None, assign: bool, allow_missing: Sequence[str],
    allow_unexpected: Sequence[str],
) -> LoadReport:  # fmt: skip
    """Have the model's own `load_state_dict` load a file's tensors, under the model's names."""
    inner = inside_wrappers(model)
    before = inner.state_dict()
    _check_memory(before, assign=assign)
    state_dict = _in_names_of(inner, load_state_dict(path, select=select, unwrap=False))
    try:
        result = inner.load_state_dict(state_dict, strict=False, **({"assign": True} if assign else {}))
    except RuntimeError as error:
        raise MatchError(f"{path} does not fit the model.", why=f"Its load_state_dict says: {error}") from error
    except Exception as error:
        why = f"A load hook raised {type(error).__name__}: {error}"
        raise ConvertError(f"The model does not take {path}.", why=why) from error
    report = LoadReport(str(path))
    report.missing, report.unexpected = (list(getattr(result, f"{kind}_keys", ())) for kind in ("missing", "unexpected"))
    report.loaded = [name for name in inner.state_dict() if name not in set(report.missing)]
    report.notes = [f"load hooks that were run: {listed(load_hooks(model)) or 'none, the model has none'}"]
    _check_left_over(report, allow_missing, allow_unexpected)
    return report


def _check_memory(state_dict: Mapping[str, Any], *, assign: bool) -> None:
    tensors = [value for value in state_dict.values() if isinstance(value, torch.Tensor)]
    if any(map(is_dtensor, tensors)):
        raise UsageError(
            "`hooks=True` is for whole tensors, and the model has DTensors.", fix="Load before it is cut in parts."
        )
    if not assign and any(tensor.is_meta for tensor in tensors):
        raise UsageError("`hooks=True`: tensors on the meta device have no memory.", fix="Give `assign=True`.")


def _in_names_of(model: torch.nn.Module, state_dict: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """A file's tensors under the names of a model: the wrappers of the one go, the wrappers of the other come."""
    own = model.state_dict().keys()
    if len(own & state_dict.keys()) * 2 > len(own):
        return state_dict  # as they are
    homes = _module_paths(own)

    def named(name: str) -> str:
        name = names.unwrap(name)
        head = name.rpartition(".")[0]
        while head and head not in homes:
            head = head.rpartition(".")[0]
        rest = name[len(head) + 1 :] if head else name
        return f"{homes[head]}.{rest}" if homes.get(head) else rest

    return renamed_state_dict(state_dict, named)


def _module_paths(own: Iterable[str]) -> dict[str, str]:
    """Paths of modules without wrappers -> with those that the names of a state dict have: a hook may take some out of them."""
    found: dict[str, str] = {}
    for name in own:
        path = name.rpartition(".")[0]
        while path:  # of several the deepest, inside the wrapper
            found.setdefault(names.strip_inner(f"{path}.x")[:-2], path)
            path = path.rpartition(".")[0]
    return found


def _check_left_over(report: LoadReport, allow_missing: Sequence[str], allow_unexpected: Sequence[str]) -> None:
    left = {
        "missing": [name for name in report.missing if not Globs(allow_missing).matching(name)],
        "unexpected": [name for name in report.unexpected if not Globs(allow_unexpected).matching(name)],
    }
    if any(left.values()):
        raise MatchError(
            f"{report.path} does not fit the model.",
            why=" ".join(f"{len(rows)} {kind}: {listed(rows, 8)}." for kind, rows in left.items() if rows),
            fix="allow_missing=GLOBS, allow_unexpected=GLOBS. What fits has been loaded.",
        )
