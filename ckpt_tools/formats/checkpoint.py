"""An open checkpoint: what was decoded of its files, and the lists of what is in it."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from types import TracebackType
from typing import Self

from ckpt_tools import limits
from ckpt_tools.errors import DamagedFileError, LimitError
from ckpt_tools.formats.base import Warned, repeated
from ckpt_tools.formats.contents import Modules, StateDict, Tensor, find_state_dicts, list_state_dicts, list_tensors
from ckpt_tools.formats.zip_directory import Record
from ckpt_tools.io.source import Source
from ckpt_tools.io.sources import Files
from ckpt_tools.pickling.weights_only import ALLOWED
from ckpt_tools.tree.nodes import Dict, Entry, Global, Node


@dataclass(slots=True, eq=False, repr=False)
class Packed:
    """What a checkpoint lies in: the file, what that inflates to, the other files there."""

    kind: str
    member: str
    source: Source
    whole: Source
    path: Path
    folder: Files | None = None


_LISTED_COST = 16  # of a tensor that is listed, beside the length of its path


@dataclass(eq=False, repr=False)
class Checkpoint:
    """An open checkpoint: its tree without tensor data, and the file that it came from.

    Use it in a `with` block, or call `close`; the file stays open for whoever wants the bytes.

    Attributes:
        container: "torch-zip", "torch-legacy", "torchscript", "safetensors" ...: docs/containers.md has them all.
        root: the tree (see `ckpt_tools.tree.nodes`). source: what its bytes are read from; the files of a folder are one.
        globals: what its pickles name. unusual: what `torch.load(weights_only=True)` refuses beside those.
        warnings: oddities that did not keep the file from being read. metadata: texts beside the tensors.
        dead_bytes: counts the bytes that nothing refers to. misplaced: what is not where it should be.
        locator: finds the bytes of every tensor, where the container put that off.
        others: other trees that can be made of it, by name. beside: values that belong to it, outside the tree.
        lost: names of what could not be read, and why. examined: globals of the files whose pickles have all been read.
    """

    container: str
    root: Node
    source: Source
    globals: list[Global] = field(default_factory=list)
    unusual: list[str] = field(default_factory=list)
    metadata: Mapping[str, str] = field(default_factory=dict)
    warnings: list[Warned] = field(default_factory=list)
    storage_bytes: int = 0
    byteorder: str = "little"
    has_checksums: bool = False
    root_folder: str = "archive"
    records: Sequence[Record] = ()
    dead_bytes: Callable[[], int] | None = None
    lost: Mapping[str, str] = field(default_factory=dict)
    locator: Callable[[Node], Node] | None = None
    misplaced: Callable[[], Iterator[str]] | None = None
    others: Mapping[str, Callable[[], Node]] = field(default_factory=dict)
    beside: Mapping[str, Node] = field(default_factory=dict)
    packed: Packed | None = None
    encodings: Mapping[str, str] = field(default_factory=dict)
    examined: Mapping[Source, Sequence[Global]] = field(default_factory=dict)
    _modules: Modules = field(default_factory=Modules, init=False)

    @property
    def path(self) -> Path:
        """The file; of a member of an archive with its name behind a `!`."""
        return self.source.path if self.packed is None else self.packed.path

    @property
    def file_bytes(self) -> int:
        """The file's size in bytes."""
        return (self.source if self.packed is None else self.packed.source).size

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.close()

    def close(self) -> None:
        """Close the file; the tree stays readable."""
        self.source.close()
        if self.packed is not None:
            self.packed.source.close()

    def let_go(self) -> None:
        """Free the tree: tensors that were listed stay, and their numbers take the memory that plain values took."""
        self.root = None
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
        if self.locator is not None:
            self.root, self.locator = self.locator(self.root), None
        return self.root

    @property
    def files(self) -> list[Source]:
        """The files that it is read from; of a packed one the file that it lies in."""
        source = self.source if self.packed is None else self.packed.source
        return list(source.members.values()) if isinstance(source, Files) else [source]

    @property
    def refused_globals(self) -> list[str]:
        """The globals that `torch.load(weights_only=True)` would refuse."""
        return [str(name) for name in self.globals if name not in ALLOWED]

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
        return _LISTED_COST * limits.NODES.most(max(self.file_bytes, self.source.size)) // limits.LISTED

    def _too_often(self, what: str, count: int) -> LimitError:
        return limits.NODES.error(f"{self.path} refers to its {what} too often: {count} times in {self.file_bytes} bytes.")

    @property
    def is_examined(self) -> bool:
        """Whether its reader has seen every pickle of the file, and none names a class: there is nothing else to be rated."""
        return self.container in _READ_WHOLE and ALLOWED.issuperset(self.globals) and not self._may_hide

    @property
    def _may_hide(self) -> bool:
        """Whether the file has what its reader did not read as it is: a record, a text, a call of what a call made."""
        if any(use.startswith("call of") for use in self.unusual) or any(row.code in _MORE_BYTES for row in self.warnings):
            return True
        if any(len(text) >= _MAY_BE_PICKLE for text in self.metadata.values()):
            return True
        storages, known = f"{self.root_folder}/data/", {f"{self.root_folder}/{name}" for name in _RECORDS}
        return not known.issuperset([row.name for row in self.records if row.is_array or not row.name.startswith(storages)])

    def merge(self, parts: Iterable[tuple[str, Checkpoint]]) -> None:
        """Take over what was read of parts of this checkpoint's file, each under its name."""
        globals_, unusual, byteorders = dict.fromkeys(self.globals), dict.fromkeys(self.unusual), set[str]()
        for name, part in parts:
            globals_ |= dict.fromkeys(part.globals)
            unusual |= dict.fromkeys(part.unusual)
            self.warnings += [replace(warned, found=f"{warned.found} in {name}") for warned in part.warnings]
            self.storage_bytes += part.storage_bytes
            self.has_checksums &= part.has_checksums or part.container != "torch-zip"  # others have none to be trusted
            self.byteorder = part.byteorder
            byteorders.add(part.byteorder)
        self.globals, self.unusual = [*globals_], [*unusual]
        if len(byteorders) > 1:
            what = "The members of the archive are of both byte orders."
            raise DamagedFileError(what, fix="Unpack it and convert them one by one.")


# The containers of which nothing but what their reader has read is a pickle.
_READ_WHOLE = frozenset(("torch-zip", "torch-legacy", "safetensors", "gguf", "onnx", "flax"))
_MAY_BE_PICKLE = 16  # characters of metadata that could be one in base64
# Readers say so of what they did not read, or of what lies behind the end of what they read.
_MORE_BYTES = frozenset(("trailing-bytes", "trailing-pickle-bytes"))
_RECORDS = ("data.pkl", "version", "byteorder", ".data/serialization_id", ".format_version", ".storage_alignment")


def state_dict(container: str, source: Source, items: Sequence[tuple[str, Node]]) -> Checkpoint:
    """The checkpoint of a file that holds one state dict and nothing else."""
    if (twice := repeated(items)) is not None:
        raise DamagedFileError(f"Two tensors of the file would be called {twice!r}.", why="A name in it may have a dot.")
    made = Checkpoint(container, Dict([*items], ordered=True), source)
    made.storage_bytes = sum(node.storage.nbytes for _, node in items if type(node) is Entry)
    return made
