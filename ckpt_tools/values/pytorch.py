"""Whether PyTorch is there, without importing it; where it is not, or is broken, one sentence says so."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from types import ModuleType
from typing import TYPE_CHECKING, Any

from ckpt_tools.errors import CkptError, MissingPackageError, missing

if TYPE_CHECKING:
    import torch as torch
else:

    class _Torch(ModuleType):
        """torch, imported when something of it is first asked for: most commands do not need it, and it takes seconds."""

        def __getattr__(self, name: str) -> Any:
            import torch

            return getattr(torch, name)

    torch = _Torch("torch")


@cache
def _is_installed() -> bool:
    from importlib.util import find_spec  # few commands ask

    try:
        found = find_spec("torch")
    except (ImportError, ValueError):
        return False
    return found is not None and found.origin is not None  # a folder that an uninstalled one left behind has none


def need_torch(why: str) -> None:
    """Say that PyTorch is missing before any work is done; it is imported later, by what works numbers out."""
    if not _is_installed():
        raise missing("PyTorch", "torch", why)


@contextmanager
def torch_told() -> Iterator[None]:
    """An import of torch that fails in the block, whatever it raises, is an error of ours."""
    try:
        yield
    except CkptError:
        raise
    except Exception as error:
        if not _failed_to_import(error):
            raise
        need_torch("")
        why = f"{type(error).__name__}: {error}".splitlines()[0]
        raise MissingPackageError("PyTorch is installed and cannot be imported.", why=why, fix="Install it anew.") from None


def _failed_to_import(error: Exception) -> bool:
    """Whether torch is not there, or an error came out of its own import, in another process too."""
    if isinstance(error, ImportError) and (error.name or "").partition(".")[0] == "torch":
        return True
    import re
    import traceback

    where = "".join(traceback.format_exception(error))
    return re.search(r"[/\\]torch[/\\][\w./\\]*\.py\", line \d+, in <module>", where) is not None
