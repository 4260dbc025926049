"""Open a checkpoint: find its container by content, decode it, refuse what is something else."""

from __future__ import annotations

import contextlib
import gc
import os
from collections.abc import Iterator, Sequence
from functools import cached_property
from pathlib import Path
from types import TracebackType
from typing import Self

from ckpt_tools import limits
from ckpt_tools.errors import CkptError, DamagedFileError, LimitError, NotACheckpointError, exhausted, out_of_memory
from ckpt_tools.formats.base import Decoded, Packed, Warned, is_tar, is_zip
from ckpt_tools.formats.contents import Modules, list_state_dicts, list_tensors

# whoever opens a checkpoint looks into it, too
from ckpt_tools.formats.contents import Optimizer as Optimizer
from ckpt_tools.formats.contents import StateDict as StateDict
from ckpt_tools.formats.contents import Tensor as Tensor
from ckpt_tools.formats.contents import as_optimizer as as_optimizer
from ckpt_tools.formats.contents import count_tensors as count_tensors
from ckpt_tools.formats.contents import find_optimizers as find_optimizers
from ckpt_tools.formats.contents import find_state_dicts as find_state_dicts
from ckpt_tools.formats.contents import find_tensors as find_tensors
from ckpt_tools.formats.contents import is_extra as is_extra
from ckpt_tools.formats.contents import is_optimizer as is_optimizer
from ckpt_tools.formats.contents import is_tensor as is_tensor
from ckpt_tools.formats.contents import names_quantised as names_quantised
from ckpt_tools.formats.contents import tensors_by_name as tensors_by_name
from ckpt_tools.formats.contents import tensors_outside as tensors_outside
from ckpt_tools.formats.polyglots import refuse_polyglot
from ckpt_tools.formats.registry import begins_as_checkpoint as begins_as_checkpoint
from ckpt_tools.formats.registry import containers
from ckpt_tools.io.member_paths import File, Handed, archive_and_member, as_path
from ckpt_tools.io.output import Source, is_address
from ckpt_tools.io.sources import Files, source_of
from ckpt_tools.pickling.weights_only import refused
from ckpt_tools.tree.findings import getting_again
from ckpt_tools.tree.nodes import Node
from ckpt_tools.tree.options import natural

HEAD = 4096
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
        return refused(self.decoded.globals)

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


@natural
def open_checkpoint(path: File) -> Checkpoint:
    """Open a checkpoint and decode its structure. Runs nothing, imports nothing, reads no tensor bytes.

    Args:
        path: a file, open or not, whose container is found by content, not by extension; the index of a sharded checkpoint;
            a folder that is one checkpoint; a tar or a compressed file with one in it, `model.tar!member` where there are
            several.

    Returns:
        The open checkpoint.

    Raises:
        NotACheckpointError: the file is missing, or something else. UnsupportedContainerError: a container that this
        version does not read. DamagedFileError, LimitError: the file breaks a promise of its format.
    """
    place, member = archive_and_member(as_path(path))
    source = open_source(place)
    try:
        with collector_paused(), naming(source):
            return Checkpoint(decode_folder(source) if isinstance(source, Files) else _decode(source, member))
    except BaseException:
        source.close()
        raise


def open_source(path: str | os.PathLike[str]) -> Source:
    """The source for a path: a file, the files of a folder, or something remote."""
    if isinstance(path, Handed):
        return source_of(path)
    if is_address(path):
        from ckpt_tools.io.remote import open_remote

        return _in_folder(open_remote(os.fspath(path)))
    if not os.path.isdir(path):
        return Source(path)
    from ckpt_tools.formats.folders import folder_of_files

    return _in_folder(Files(Path(path), folder_of_files(Path(path))))


def _in_folder(source: Source) -> Source:
    """Of the files of a folder the one with the weights, where that is how the folder of a model is laid out."""
    if not isinstance(source, Files):
        return source
    from ckpt_tools.formats.folders import weights_of

    name = weights_of(source.folder, source.names())
    return source if name is None else open_source(f"{source.folder}/{name}")


@contextlib.contextmanager
def naming(source: Source) -> Iterator[None]:
    """Errors inside the block say which file they are about."""
    try:
        with out_of_memory():
            yield
    except CkptError as error:
        if str(source.path) not in error.what:
            error.what = f"{source.path}: {error.what}"
        if isinstance(error, DamagedFileError) and error.whole is not None:
            error.fix = error.fix or getting_again(str(source.path), error.whole)
        if "ckpt repair" in error.fix and not isinstance(source, Files):
            error.fix = _without_repair(source, error.fix)
        raise
    except (MemoryError, RecursionError) as error:
        raise exhausted(error, str(source.path)) from None


def _without_repair(source: Source, fix: str) -> str:
    """The advice, where repair takes such a file."""
    from ckpt_tools.formats.zip_directory import is_mended

    with contextlib.suppress(CkptError):  # the disk failed
        return fix if is_mended(source) else "Get it again."
    return fix


def _decode(source: Source, member: str) -> Decoded:
    """Decode with the container that the first bytes name; an index of shards with what it names; what an archive holds."""
    head = source.read(0, min(HEAD, source.size))
    refuse_polyglot(source, head)
    if may_be_packed(head):
        from ckpt_tools.formats import packed

        if packed.is_packed(source, head):
            readers = packed.Readers(
                _decode_content, decode_folder, begins_as_checkpoint, lambda decoded: count_tensors(decoded.root)
            )
            return packed.decode(source, head, member, readers)
    if member:
        raise NotACheckpointError(f"{source.path} is not an archive whose members are read by name.")
    container = next((row for row in containers() if row.sniff(head)), None)
    if container is None or container.with_others is None:
        return decode_file(source)
    files = _files_beside(source)
    try:
        found = container.with_others(source, files, decode_file)
    except BaseException:
        files.close()
        raise
    return decode_file(source) if found is None else found


def _gguf_splits(files: Files, names: Sequence[str], *, partial: bool = False) -> Decoded:
    from ckpt_tools.formats.frameworks import gguf

    return gguf.decode_splits(names, files, decode_file, partial=partial)


def _files_beside(index: Source) -> Files:
    if is_address(str(index.path)):
        from ckpt_tools.io.remote import RemoteSource, files_beside

        assert isinstance(index, RemoteSource)
        return files_beside(index)
    return Files(index.path, index.path.parent)


def decode_folder(files: Files, *, partial: bool = False) -> Decoded:
    """Decode a folder with the layout that its files name. `partial`: what is whole of it, by the layouts that can tell."""
    from ckpt_tools.formats import dcp, folders, sharded

    layout = folders.layout(files.folder, files.names())
    if layout.container == "dcp":
        from ckpt_tools.formats.parts import torch_dist

        return torch_dist.complete(dcp.decode(files.open(layout.names[0]), files, partial=partial), files, decode_file)
    if layout.container == "dcp-safetensors":
        return dcp.decode_safetensors(layout.names, files)
    if layout.container == "rank-files":
        return decode_ranks(files, layout.names[0], layout.names, partial=partial)
    if layout.container == "consolidated":
        from ckpt_tools.formats.parts import consolidated

        return consolidated.decode(layout.names, files, decode_file, partial=partial)
    if layout.container == "deepspeed":
        return decode_zero(files, layout.names, partial=partial)
    if layout.container == "megatron":
        from ckpt_tools.formats.parts import megatron

        return megatron.decode(layout.names, files, decode_file)
    if layout.container == "items":
        from ckpt_tools.formats.parts import items

        return items.decode(files, decode_file, partial=partial)
    if layout.container == "shards" and layout.names[0].endswith(".gguf"):
        return _gguf_splits(files, layout.names, partial=partial)
    if layout.container == "shards":
        from ckpt_tools.formats.parts import loose_shards

        return loose_shards.decode(loose_shards.read(layout.names, files, decode_file, partial=partial), files)
    index, before = layout.names[0], folders.taken_before(layout.names[0], files.names())
    return sharded.decode(files.open(index), files, decode_file, partial=partial, before=before)


def decode_ranks(files: Files, name: str, names: Sequence[str], *, partial: bool = False) -> Decoded:
    """Decode the rank files that this one is one of; `names` are those there are. `partial`: what is whole of them."""
    from ckpt_tools.formats.parts.grouping import group_of
    from ckpt_tools.formats.parts.rank_files import decode

    group = group_of(name, names)
    assert group is not None, "callers have checked that it has a rank"
    return decode(group, files, decode_file, partial=partial)


def decode_zero(files: Files, names: Sequence[str], *, partial: bool = False) -> Decoded:
    """Decode the files of a DeepSpeed checkpoint; `names` are those there are. `partial`: what is whole of them."""
    from ckpt_tools.formats.parts.zero_folder import decode
    from ckpt_tools.formats.parts.zero_names import zero_files

    found = zero_files(names)
    assert found is not None, "callers have checked that there are some"
    return decode(found, files, decode_file, partial=partial)


def decode_file(source: Source) -> Decoded:
    """Decode one file that stands for itself."""
    with naming(source), limits.of_file(source.size):
        return _decode_content(source)


def _decode_content(source: Source) -> Decoded:
    """Decode one file, in the budget of whoever reads it."""
    head = source.read(0, min(HEAD, source.size))
    refuse_polyglot(source, head)
    for container in containers():
        if container.decode is not None and container.sniff(head):
            return container.decode(source)
    from ckpt_tools.formats import safetensors
    from ckpt_tools.formats.foreign import recognise, unknown

    if error := recognise(source, head):
        raise error
    if source.path.suffix.lower() == ".safetensors":  # damaged, and like nothing else: say what is wrong with its header
        return safetensors.decode(source)
    raise unknown(source, head)


def may_be_packed(head: bytes) -> bool:
    """Whether a file that starts so may be compressed, or a tar; what reads those is imported only then."""
    if is_zip(head):
        return False
    from ckpt_tools.formats.compressed import kind_of

    return kind_of(head) is not None or is_tar(head) or head[257:262] == b"ustar"


@contextlib.contextmanager
def collector_paused() -> Iterator[None]:
    """Python's cyclic garbage collector at rest: a large tree is all alive, and scanning it again and again costs a third."""
    running = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if running:
            gc.enable()
