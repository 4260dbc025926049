"""Inspect, convert, check and repair PyTorch checkpoints, executing nothing in them. Importing this imports no torch."""

import sys

# `python -m ckpt_tools`, as torchrun starts it too: the current folder may be a stranger's, and is on Python's path from
# the start. Until it is taken off nothing may be imported, `__future__` included.
if sys.argv[:1] == ["-m"] and not sys.flags.safe_path:
    _started = sys.orig_argv[-len(sys.argv)].removesuffix(".__main__")  # in -m ckpt_tools and -um ckpt_tools a word of its own
    if _started == __name__ or (_started[:1] == "-" and _started.endswith(f"m{__name__}")):
        sys.path[:1] = []

from typing import TYPE_CHECKING, Any

from ckpt_tools._version import __version__
from ckpt_tools.errors import CkptError

if TYPE_CHECKING:
    from ckpt_tools.formats.checkpoint import Checkpoint
    from ckpt_tools.operations.average import Averaged, average
    from ckpt_tools.operations.check.latest import latest_good
    from ckpt_tools.operations.check.report import Checked
    from ckpt_tools.operations.check.run import check
    from ckpt_tools.operations.compare.differences import diff
    from ckpt_tools.operations.compare.report import Difference
    from ckpt_tools.operations.compare.stats import Stats, stats
    from ckpt_tools.operations.convert.report import Converted
    from ckpt_tools.operations.convert.run import convert, edit_in_place
    from ckpt_tools.operations.explain import Explanation, explain
    from ckpt_tools.operations.extract_lora import Extracted, extract_lora
    from ckpt_tools.operations.inspect import Description, inspect
    from ckpt_tools.operations.match import Matched, match
    from ckpt_tools.operations.proved import Proved
    from ckpt_tools.operations.repair.mends import Repaired
    from ckpt_tools.operations.repair.run import repair
    from ckpt_tools.operations.scan import Scanned, scan
    from ckpt_tools.operations.show import Shown, show
    from ckpt_tools.operations.signing import Signed, Verified, sign, verify
    from ckpt_tools.parts.open import open_checkpoint
    from ckpt_tools.render.html import Reported, report
    from ckpt_tools.torch.into import load_into
    from ckpt_tools.torch.lazy import LazyFile, open  # noqa: A004 - called as ckpt_tools.open, like gzip.open
    from ckpt_tools.torch.loading import load_state_dict
    from ckpt_tools.torch.proving.prove import prove
    from ckpt_tools.torch.saving import save
    from ckpt_tools.torch.steps import Steps, steps

__all__ = [
    "Averaged", "Checked", "Checkpoint", "CkptError", "Converted", "Description", "Difference", "Explanation", "Extracted",
    "LazyFile", "Matched", "Proved", "Repaired", "Reported", "Scanned", "Shown", "Signed", "Stats", "Steps", "Verified",
    "__version__", "average", "check", "convert", "diff", "edit_in_place", "explain", "extract_lora", "inspect", "latest_good",
    "load_into", "load_state_dict", "match", "open", "open_checkpoint", "prove", "repair", "report", "save", "scan", "show",
    "sign", "stats", "steps", "verify",
]  # fmt: skip

_HOMES = {
    "Averaged": "operations.average", "Checked": "operations.check.report", "Checkpoint": "formats.checkpoint",
    "Converted": "operations.convert.report", "Description": "operations.inspect", "Difference": "operations.compare.report",
    "Extracted": "operations.extract_lora", "Explanation": "operations.explain", "Matched": "operations.match",
    "Proved": "operations.proved", "Repaired": "operations.repair.mends", "Reported": "render.html",
    "Scanned": "operations.scan", "Shown": "operations.show", "Signed": "operations.signing",
    "Stats": "operations.compare.stats", "Steps": "torch.steps", "Verified": "operations.signing",
    "average": "operations.average", "check": "operations.check.run", "convert": "operations.convert.run",
    "diff": "operations.compare.differences", "edit_in_place": "operations.convert.run",
    "extract_lora": "operations.extract_lora", "explain": "operations.explain", "inspect": "operations.inspect",
    "latest_good": "operations.check.latest", "LazyFile": "torch.lazy", "match": "operations.match", "open": "torch.lazy",
    "open_checkpoint": "parts.open", "prove": "torch.proving.prove", "repair": "operations.repair.run",
    "report": "render.html", "scan": "operations.scan", "show": "operations.show", "sign": "operations.signing",
    "stats": "operations.compare.stats", "steps": "torch.steps", "verify": "operations.signing",
}  # fmt: skip


_LOAD_CODE = ("load_into", "load_state_dict", "save")


class _LoadCode:
    # A function of `ckpt_tools.torch`, with its signature and its words; a call imports torch.

    def __init__(self, name: str) -> None:
        self.__name__ = name

    def __call__(self, *args: Any, **options: Any) -> Any:
        return self.__wrapped__(*args, **options)

    @property
    def __wrapped__(self) -> Any:
        import ckpt_tools.torch

        return getattr(ckpt_tools.torch, self.__name__)

    __doc__ = property(lambda self: self.__wrapped__.__doc__)


def __getattr__(name: str) -> Any:
    """Public names are imported when they are first used: `ckpt inspect` does not pay for `convert`."""
    if name in _LOAD_CODE:
        return globals().setdefault(name, _LoadCode(name))
    if name not in _HOMES:
        raise AttributeError(f"module 'ckpt_tools' has no attribute {name!r}")
    from importlib import import_module

    from ckpt_tools.values.pytorch import torch_told

    with torch_told():  # `prove` is load code
        return getattr(import_module(f"ckpt_tools.{_HOMES[name]}"), name)


def __dir__() -> list[str]:
    """What completion and help() show: also the names that are not imported yet."""
    return sorted({*globals(), *__all__})
