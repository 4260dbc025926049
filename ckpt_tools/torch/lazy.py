"""`ckpt_tools.open`: the tensors of a checkpoint by name, each read when it is used."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import ExitStack
from typing import TYPE_CHECKING, Self

from ckpt_tools.edit.renaming import restore_named_ties
from ckpt_tools.errors import ConvertError, NothingMatchedError, UsageError
from ckpt_tools.formats.contents import Tensor
from ckpt_tools.io.source import File
from ckpt_tools.operations.compare.sides import place_in
from ckpt_tools.parts.open import open_whole
from ckpt_tools.text import did_you_mean, dotted
from ckpt_tools.tree.nodes import Entry
from ckpt_tools.tree.options import natural
from ckpt_tools.values.numeric import torch_dtype
from ckpt_tools.values.pytorch import need_torch

if TYPE_CHECKING:
    import torch

    from ckpt_tools.torch.building import MapLocation


class LazyFile(Mapping[str, "torch.Tensor"]):
    """An open checkpoint as a mapping from names to tensors. Names, shapes and dtypes are known before a tensor is read.

    `file[name]` is a live tensor. Of a file on this machine it is mapped into memory: its bytes are read when they are used,
    and what is written to it does not reach the file. What is compressed, small or elsewhere is read at once.
    """

    def __init__(self, path: File, select: str | None, map_location: MapLocation) -> None:
        self._stack = ExitStack()
        self._checkpoint = self._stack.enter_context(open_whole(path))
        restore_named_ties(self._checkpoint.root, self._checkpoint.metadata)
        self._tensors: dict[str, Tensor] = {}
        for tensor in place_in(self._checkpoint, select).tensors:
            if (name := dotted(tensor.where)) in self._tensors:
                raise ConvertError(
                    f"{self._checkpoint.path}: two tensors are called {name!r}.", fix="Open one: `select=WHERE`."
                )
            self._tensors[name] = tensor
        self._map_location = map_location
        self._is_closed = False

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Close the file; tensors that were taken out of it stay."""
        self._stack.close()
        self._is_closed = True

    def __iter__(self) -> Iterator[str]:
        return iter(self._tensors)

    def __len__(self) -> int:
        return len(self._tensors)

    def __contains__(self, name: object) -> bool:
        return name in self._tensors

    def __getitem__(self, name: str) -> torch.Tensor:
        need_torch("Live tensors are PyTorch's.")
        if self._is_closed:
            raise UsageError(f"{self._checkpoint.path} is closed.", fix="Take tensors out inside the `with` block.")
        from ckpt_tools.torch.building import Builder

        entry, checkpoint = self._entry(name), self._checkpoint
        located = entry if checkpoint.locator is None else checkpoint.locator(entry)
        made: torch.Tensor = Builder(self._checkpoint, self._map_location, mapped=True).build(located)
        checkpoint.source.check_unchanged()
        return made

    def shape(self, name: str) -> tuple[int, ...]:
        """The shape of the tensor `name`, which is not read."""
        return self._entry(name).shape

    def dtype(self, name: str) -> torch.dtype:
        """The dtype of the tensor `name`, which is not read."""
        return torch_dtype(self._entry(name).dtype)

    def metadata(self) -> dict[str, str]:
        """The texts of a safetensors or GGUF header; of any other container none."""
        return dict(self._checkpoint.metadata)

    def _entry(self, name: str) -> Entry:
        tensor = self._tensors.get(name)
        if tensor is None:
            fix = did_you_mean(str(name), self._tensors) or f"ckpt inspect --all {self._checkpoint.path} lists the names."
            raise NothingMatchedError(f"{self._checkpoint.path} has no tensor {name!r}.", fix=fix)
        if type(tensor.node) is not Entry:
            fix = "ckpt_tools.torch.load_state_dict gives it where it can, else torch.load."
            raise ConvertError(f"{name!r} is sparse, quantised, nested or of a class of its own.", fix=fix)
        return tensor.node


@natural
def open(path: File, *, select: str | None = None, map_location: MapLocation = "cpu") -> LazyFile:
    """Open a checkpoint as a mapping from names to tensors, of which each is read when it is used. Executes nothing in it.

    >>> with open("model.pth") as file:  # doctest: +SKIP
    ...     for name in file:
    ...         print(name, file.shape(name), file.dtype(name))
    ...     weight = file["fc.weight"]

    Args:
        path: a checkpoint in any container that ckpt reads.
        select: the dotted path of what is opened ("model", "ema"); names are those in it. Without it they are dotted paths.
        map_location: a device for the tensors, a mapping from device tag to device, or None for the file's own tags.

    Raises:
        NothingMatchedError: no such name, a KeyError too. ConvertError: a sparse or quantised tensor is asked for.
        CkptError: the file cannot be read, or is closed.
    """
    return LazyFile(path, select, map_location)
