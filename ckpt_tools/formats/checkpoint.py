"""An open checkpoint: what was decoded of its files, and the lists of what is in it."""

from __future__ import annotations

from functools import cached_property
from pathlib import Path
from types import TracebackType
from typing import Self

from ckpt_tools import limits
from ckpt_tools.errors import LimitError
from ckpt_tools.formats.base import Decoded, Packed, Warned
from ckpt_tools.formats.contents import Modules, StateDict, Tensor, find_state_dicts, list_state_dicts, list_tensors
from ckpt_tools.io.output import Source
from ckpt_tools.io.sources import Files
from ckpt_tools.pickling.weights_only import ALLOWED
from ckpt_tools.tree.nodes import Node

_LISTED_COST = 16  # of a tensor that is listed, beside the length of its path


class Checkpoint:
    """An open checkpoint: its tree without tensor data, and the file that it came from.

    Use it in a `with` block, or call `close`; the file stays open for whoever wants the bytes.

    Attributes:
        path: the file; of a member of an archive with its name behind a `!`. file_bytes: the file's size in bytes.
        name: what the checkpoint's own file or folder is called, in whatever it lies.
        container: "torch-zip", "torch-legacy", "torchscript", "safetensors" ...: docs/containers.md has them all.
        root: the tree (see `ckpt_tools.tree.nodes`).
        decoded: everything that the container's reader found.
    """

    def __init__(self, decoded: Decoded) -> None:
        self.decoded = decoded
        self.packed: Packed | None = decoded.packed
        self.path: Path = decoded.source.path if self.packed is None else self.packed.path
        self.file_bytes: int = (decoded.source if self.packed is None else self.packed.source).size
        self.container: str = decoded.container
        self.root: Node = decoded.root
        self._modules = Modules()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.close()

    def close(self) -> None:
        """Close the file; the tree stays readable."""
        self.decoded.source.close()
        if self.packed is not None:
            self.packed.source.close()

    def let_go(self) -> None:
        """Free the tree: tensors that were listed stay, and their numbers take the memory that plain values took."""
        self.root = self.decoded.root = None
        self.__dict__.pop("state_dicts", None)

    @property
    def described(self) -> str:
        """The container, and what it lies in."""
        return self.container if self.packed is None else f"{self.container} inside {self.packed.kind}"

    @property
    def name(self) -> str:
        """What the file or folder of the checkpoint is called, in whatever it lies."""
        return self.path.name if self.packed is None else self.packed.member.rpartition("/")[2]

    def locate(self) -> Node:
        """Find the bytes of every tensor, where the container put that off; returns the root. Ask for it before writing."""
        if self.decoded.locate is not None:
            self.root = self.decoded.root = self.decoded.locate(self.root)
            self.decoded.locate = None
        return self.root

    @property
    def warnings(self) -> list[Warned]:
        """Oddities that did not keep the file from being read."""
        return self.decoded.warnings

    @property
    def files(self) -> list[Source]:
        """The files that it is read from; of a packed one the file that it lies in."""
        source = self.decoded.source if self.packed is None else self.packed.source
        return list(source.members.values()) if isinstance(source, Files) else [source]

    @property
    def refused_globals(self) -> list[str]:
        """The globals that `torch.load(weights_only=True)` would refuse."""
        return [str(name) for name in self.decoded.globals if name not in ALLOWED]

    @cached_property
    def tensors(self) -> list[Tensor]:
        """Every tensor with its path, in order; those of a pickled module under the names that its state dict would have.

        Raises:
            LimitError: many more than a file of this size can hold: one tensor under millions of names.
        """
        found, left = [], self._listed
        for tensor in list_tensors(self.root, self._modules):
            found.append(tensor)
            left -= _LISTED_COST + len(tensor.where)
            if left < 0:
                raise self._too_often("tensors", len(found))
        return found

    @cached_property
    def state_dicts(self) -> list[StateDict]:
        """Every state dict with its path, in order; a pickled module counts as the one that it would give."""
        found = list_state_dicts(self.root, self._modules) if self.has_modules else find_state_dicts(self.root)
        if sum(len(state_dict.node.items) for state_dict in found) > self._listed:
            raise self._too_often("modules", len(found))
        return found

    @property
    def has_modules(self) -> bool:
        """Whether it holds pickled modules."""
        _ = self.tensors  # whoever lists them meets every module
        return bool(self._modules.known)

    @property
    def _listed(self) -> int:
        """What all tensors that are listed may cost."""
        return _LISTED_COST * limits.NODES.most(max(self.file_bytes, self.decoded.source.size)) // limits.LISTED

    def _too_often(self, what: str, count: int) -> LimitError:
        return limits.NODES.error(f"{self.path} refers to its {what} too often: {count} times in {self.file_bytes} bytes.")
