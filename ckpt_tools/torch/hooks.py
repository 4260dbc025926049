"""Loading by a model's own code: its `load_state_dict`, and the load hooks of its modules."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch

from ckpt_tools.errors import ConvertError, MatchError, UsageError
from ckpt_tools.io.source import File
from ckpt_tools.text import listed
from ckpt_tools.torch.gathering import is_dtensor
from ckpt_tools.torch.live_names import inside_wrappers, renamed_state_dict
from ckpt_tools.torch.loading import load_state_dict
from ckpt_tools.torch.report import LoadReport
from ckpt_tools.tree import names
from ckpt_tools.tree.globs import Globs

# Of torch itself, and needless here: batch counters are matched, and what wraps a model has its names removed.
_NEEDLESS = ("torch.nn.modules.", "torch.distributed.", "torch._dynamo.", "torch.jit.", "ckpt_tools.")


def load_hooks(model: torch.nn.Module) -> list[str]:
    """What of a model's own code `load_state_dict` would run, as text, each once: `Net._load_from_state_dict`."""
    inner, found = inside_wrappers(model), dict[str, None]()
    for module in inner.modules():
        kind = type(module)
        own: dict[str, Any] = {f"{kind.__name__}._load_from_state_dict": kind._load_from_state_dict}
        if module is inner:
            own = {f"{kind.__name__}.load_state_dict": kind.load_state_dict, **own}
        for when in ("pre", "post"):
            for hook in getattr(module, f"_load_state_dict_{when}_hooks").values():
                function = getattr(hook, "hook", hook)
                own[f"{kind.__name__}'s {when}-hook {getattr(function, '__name__', type(function).__name__)}"] = function
        for text, function in own.items():
            home = getattr(function, "__module__", None) or type(function).__module__
            if not home.startswith(_NEEDLESS):
                found[text] = None
    return list(found)


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
