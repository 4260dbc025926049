"""`ckpt_tools.open`: one state dict of a checkpoint, read a tensor at a time. It imports torch for the tensors alone."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from functools import cached_property
from typing import TYPE_CHECKING, Self

from ckpt_tools.edit import casts
from ckpt_tools.errors import TensorError, UsageError
from ckpt_tools.fit.targets import choose_state_dict
from ckpt_tools.formats.checkpoint import Checkpoint
from ckpt_tools.formats.contents import tensors_by_name
from ckpt_tools.io.member_paths import File
from ckpt_tools.parts.open import open_whole
from ckpt_tools.tree.nodes import Entry, as_dict
from ckpt_tools.tree.options import natural
from ckpt_tools.values.pytorch import need_torch

if TYPE_CHECKING:
    import torch

    from ckpt_tools.torch.building import Builder


@natural
def open(path: File, *, select: str | None = None) -> LazyFile:
    """Open one state dict of a checkpoint, whose tensors are read as they are asked for, as with `safetensors.safe_open`.

    >>> with open("model.pth") as file:
    ...     print(file.shape("fc.weight"), file["fc.weight"].mean())  # doctest: +SKIP

    Executes nothing in the file. Names are those of the file.

    Args:
        path: a checkpoint in any container that ckpt reads.
        select: the dotted path of the state dict ("model", "ema"), where the checkpoint holds several.

    Raises:
        NothingMatchedError: no state dict there, or several and no `select`. CkptError: the file cannot be read.
    """
    checkpoint = open_whole(path)
    try:
        return LazyFile(checkpoint, select)
    except BaseException:
        checkpoint.close()
        raise


class LazyFile(Mapping[str, "torch.Tensor"]):
    """The tensors of a state dict by name. Close it, or use it in a `with`; tensors that it gave stay."""

    def __init__(self, checkpoint: Checkpoint, select: str | None) -> None:
        node = casts.to_little_endian(choose_state_dict(checkpoint, select).node, checkpoint.decoded.byteorder)
        self._nodes, self._checkpoint, self._is_open = tensors_by_name(as_dict(node)), checkpoint, True

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Close the file; names, shapes and dtypes can still be asked for."""
        self._is_open = False
        self._checkpoint.close()

    def __len__(self) -> int:
        return len(self._nodes)

    def __iter__(self) -> Iterator[str]:
        return iter(self._nodes)

    def __contains__(self, name: object) -> bool:
        return name in self._nodes

    def __getitem__(self, name: str) -> torch.Tensor:
        """The tensor, on the CPU. What is written to it does not reach the file."""
        node = self._nodes[name]
        if not self._is_open:
            raise UsageError(f"{self._checkpoint.path} is closed.")
        try:
            made: torch.Tensor = self._builder.build(node)
        finally:
            self._builder.made.clear()  # each tensor is read when it is asked for, and not kept
        self._checkpoint.decoded.source.check_unchanged()
        return made

    def shape(self, name: str) -> tuple[int, ...]:
        """The shape of a tensor `name`, which is not read."""
        return self._entry(name).shape

    def dtype(self, name: str) -> str:
        """torch's name of the dtype of a tensor `name` ("float32"), which is not read."""
        return self._entry(name).dtype.name

    def _entry(self, name: str) -> Entry:
        node = self._nodes[name]
        if type(node) is not Entry:
            raise TensorError(f"{name!r} is a sparse, quantised, nested or meta tensor, of which only torch knows the shape.")
        return node

    @cached_property
    def _builder(self) -> Builder:
        need_torch("Live tensors are PyTorch's.")
        from ckpt_tools.torch.building import Builder

        return Builder(self._checkpoint, "cpu", mapped=True)

    def __repr__(self) -> str:
        return f"LazyFile({str(self._checkpoint.path)!r}, {len(self)} tensors)"
