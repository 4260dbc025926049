"""Open a checkpoint: find its container by content, decode it, refuse what is something else."""

from __future__ import annotations

import contextlib
import gc
import os
import re
import shlex
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from types import TracebackType
from typing import NamedTuple, Self, TypeGuard

from ckpt_tools import limits
from ckpt_tools.errors import CkptError, DamagedFileError, LimitError, NotACheckpointError, ZipError
from ckpt_tools.formats.base import Decoded, Packed, Warned, is_tar, is_zip
from ckpt_tools.formats.polyglots import refuse_polyglot
from ckpt_tools.io.member_paths import archive_and_member
from ckpt_tools.io.output import Source, is_address
from ckpt_tools.io.sources import Files
from ckpt_tools.pickling.torch_objects import UnusualTensor, unusual_tensor
from ckpt_tools.pickling.weights_only import refused
from ckpt_tools.text import printable
from ckpt_tools.tree.arguments import natural
from ckpt_tools.tree.findings import getting_again
from ckpt_tools.tree.modules import is_module, module_state_dict, named_tensors
from ckpt_tools.tree.nodes import (
    CONTAINERS,
    Dict,
    Entry,
    List,
    Node,
    Object,
    Where,
)
from ckpt_tools.tree.visit import children, is_hollow, walk


def _decode_zip(source: Source) -> Decoded:
    """One archive, or several one after another."""
    from ckpt_tools.formats.zip import archives

    try:
        return archives.decode(source)
    except ZipError:
        from ckpt_tools.formats.zip import concatenated

        spans = concatenated.split(source)
        if not spans:
            raise
        return concatenated.decode(source, spans)


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
        self._modules = _Modules()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.close()

    def close(self) -> None:
        """Close the file; the tree stays readable."""
        self.decoded.source.close()
        if self.packed is not None:
            self.packed.source.close()

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
        source = self.decoded.source
        files = source.members.values() if isinstance(source, Files) else (source,)
        return [*self.decoded.warnings, *(warned for file in files for warned in journals_of(file))]

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
        found = list_state_dicts(self.root) if self.has_modules else find_state_dicts(self.root)
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
        return _LISTED_COST * limits.TENSORS.most(max(self.file_bytes, self.decoded.source.size))

    def _too_often(self, what: str, count: int) -> LimitError:
        return limits.TENSORS.error(f"{self.path} refers to its {what} too often: {count} times in {self.file_bytes} bytes.")


@dataclass(frozen=True, slots=True, eq=False)
class Tensor:
    """One tensor of a tree and where it is. `unusual` is set for one that is not a plain view on a storage."""

    where: Where
    node: Entry | Object
    unusual: UnusualTensor | None = None


@dataclass(frozen=True, slots=True, eq=False)
class StateDict:
    """A mapping name -> entry found in the tree."""

    where: Where
    node: Dict

    @property
    def names(self) -> list[str]:
        """The names of its tensors, in order."""
        return list(tensors_by_name(self.node))


@natural
def open_checkpoint(path: str | os.PathLike[str]) -> Checkpoint:
    """Open a checkpoint and decode its structure. Runs nothing, imports nothing, reads no tensor bytes.

    Args:
        path: a file, whose container is found by content, not by extension; the index of a sharded checkpoint; a folder
            that is one checkpoint; a tar or a compressed file with one in it, `model.tar!member` where there are several.

    Returns:
        The open checkpoint.

    Raises:
        NotACheckpointError: the file is missing, or something else. UnsupportedContainerError: a container that this
        version does not read. DamagedFileError, LimitError: the file breaks a promise of its format.
    """
    place, member = archive_and_member(path)
    source = open_source(place)
    try:
        with collector_paused(), naming(source):
            return Checkpoint(decode_folder(source) if isinstance(source, Files) else _decode(source, member))
    except BaseException:
        source.close()
        raise


def journals_of(source: Source) -> Iterator[Warned]:
    """What is to be said of the journals beside a file."""
    if source.half_edited:
        found = f"an edit in place of {source.path.name} was interrupted; it is read as it was before, through its journal"
        fix = f"ckpt repair {shlex.quote(str(source.path))}"
        yield Warned("half-edited", found, "a file that other programs can read", "problem", printable(fix))
    for stray in source.strays:
        found = f"{stray.place.name} is a journal that is not this file's: {stray.why}"
        fix = f"If no file was renamed or moved from here: rm {shlex.quote(str(stray.place))}"
        yield Warned("stray-journal", found, "none; it is left alone", fix=printable(fix))


def open_source(path: str | os.PathLike[str]) -> Source:
    """The source for a path: a file, the files of a folder, or something remote.

    Raises:
        NotACheckpointError, RemoteError: it cannot be read.
    """
    if is_address(path):
        from ckpt_tools.io.remote.source import open_remote

        return open_remote(os.fspath(path))
    if not os.path.isdir(path):
        return Source(path)
    from ckpt_tools.formats.folders import folder_of_files

    return Files(Path(path), folder_of_files(Path(path)))


@contextlib.contextmanager
def naming(source: Source) -> Iterator[None]:
    """Errors inside the block say which file they are about."""
    try:
        yield
    except CkptError as error:
        if str(source.path) not in error.what:
            error.what = f"{source.path}: {error.what}"
        if isinstance(error, DamagedFileError) and error.whole is not None:
            error.fix = error.fix or getting_again(str(source.path), error.whole)
        raise
    except (MemoryError, RecursionError) as error:
        raise limits.exhausted(error, str(source.path)) from None


def _decode(source: Source, member: str) -> Decoded:
    """Decode with the container that the first bytes name; an index of shards with what it names; what an archive holds."""
    head = source.read(0, min(HEAD, source.size))
    refuse_polyglot(source, head)
    if may_be_packed(head):
        from ckpt_tools.formats.packed import unpacking

        if unpacking.is_packed(source, head):
            readers = unpacking.Readers(
                _decode_content, decode_folder, begins_as_checkpoint, lambda decoded: count_tensors(decoded.root)
            )
            return unpacking.decode(source, head, member, readers)
    if member:
        raise NotACheckpointError(f"{source.path} is not an archive whose members are read by name.")
    if not head.lstrip().startswith(b"{"):
        return decode_file(source)
    from ckpt_tools.formats import sharded

    if not sharded.sniff(head, source):
        return decode_file(source)
    files = _files_beside(source)
    try:
        return sharded.decode(files.adopt(source), files, decode_file)
    except BaseException:
        files.close()
        raise


def _files_beside(index: Source) -> Files:
    if is_address(str(index.path)):
        from ckpt_tools.io.remote.source import RemoteSource, files_beside

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
    if layout.container == "shards":
        from ckpt_tools.formats.parts import loose_shards

        return loose_shards.decode(loose_shards.read(layout.names, files, decode_file, partial=partial), files)
    return sharded.decode(files.open(layout.names[0]), files, decode_file, partial=partial)


def decode_ranks(files: Files, name: str, names: Sequence[str], *, partial: bool = False) -> Decoded:
    """Decode the rank files that this one is one of; `names` are those there are. `partial`: what is whole of them."""
    from ckpt_tools.formats.parts.grouping import group_of
    from ckpt_tools.formats.parts.rank_files import decode

    group = group_of(name, names)
    assert group is not None, "callers have checked that it has a rank"
    return decode(group, files, decode_file, partial=partial)


def decode_zero(files: Files, names: Sequence[str], *, partial: bool = False) -> Decoded:
    """Decode the files of a DeepSpeed checkpoint; `names` are those there are. `partial`: what is whole of them."""
    from ckpt_tools.formats.parts.zero.folder import decode
    from ckpt_tools.formats.parts.zero.names import zero_files

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
    for sniff, decode in _containers():
        if sniff(head):
            return decode(source)
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
    from ckpt_tools.formats.packed.compressed import kind_of

    return kind_of(head) is not None or is_tar(head) or head[257:262] == b"ustar"


_Container = tuple[Callable[[bytes], bool], Callable[[Source], Decoded]]


def _containers() -> Iterator[_Container]:
    """Of one file each: whether it is one by its first bytes, and its reader. Imported one by one, as far as is needed."""
    yield is_zip, _decode_zip
    from ckpt_tools.formats import safetensors

    yield safetensors.sniff, safetensors.decode
    from ckpt_tools.formats import numpy_files, plain_pickle
    from ckpt_tools.formats.legacy import torch_legacy, torch_tar

    yield torch_legacy.sniff, torch_legacy.decode
    yield torch_tar.sniff, torch_tar.decode
    yield plain_pickle.sniff, plain_pickle.decode
    yield numpy_files.sniff, numpy_files.decode_npy


def begins_as_checkpoint(head: bytes) -> bool:
    """Whether a file that starts with these bytes is one of the containers of one file."""
    return any(sniff(head) for sniff, _ in _containers())


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


def is_tensor(node: Node) -> TypeGuard[Entry | Object]:
    """Whether a node is a tensor, plain or unusual."""
    return type(node) is Entry or (type(node) is Object and unusual_tensor(node) is not None)


def tensors_by_name(node: Dict) -> dict[str, Entry | Object]:
    """The tensors that are values of a dict themselves, plain and unusual."""
    return {name: value for name, value in node.items if type(name) is str and (type(value) is Entry or is_tensor(value))}


def find_tensors(root: Node) -> Iterator[Tensor]:
    """Every tensor below `root` with its path, in order."""
    for where, node in walk(root, stop=is_tensor, plain=False):
        if type(node) is Entry:
            yield Tensor(where, node)
        elif type(node) is Object and (unusual := unusual_tensor(node)) is not None:
            yield Tensor(where, node, unusual)


def tensors_outside(root: Node, state_dicts: Sequence[StateDict]) -> list[Tensor]:
    """The tensors below `root` that are not a direct part of one of these state dicts, in order."""
    inside = {state_dict.where for state_dict in state_dicts}
    return [tensor for tensor in find_tensors(root) if tensor.where[:-1] not in inside]


def count_tensors(root: Node) -> int:
    """How many tensors `find_tensors` finds."""
    return sum(1 for _, node in walk(root, stop=is_tensor, plain=False) if is_tensor(node))


class _Modules:
    """The pickled modules of a tree, each read once however often it is referred to."""

    def __init__(self) -> None:
        self.known: dict[int, Dict | None] = {}

    def state_dict(self, node: Node) -> Dict | None:
        """The names and values of a module; None for anything else, and for modules that hold one another for ever."""
        if not is_module(node):
            return None
        if id(node) not in self.known:
            try:
                self.known[id(node)] = Dict(list(named_tensors(node)), ordered=True)
            except LimitError:
                self.known[id(node)] = None
        return self.known[id(node)]

    def stop(self, node: Node) -> bool:
        """Whether a walk ends here."""
        return is_tensor(node) or self.state_dict(node) is not None


def list_tensors(root: Node, modules: _Modules) -> Iterator[Tensor]:
    """Every tensor; those of modules by name, then what else the module holds (hidden buffers, attributes) by its path.

    Afterwards `modules` knows every module that there is.
    """
    for where, node in walk(root, stop=modules.stop, plain=False):
        if type(node) is Entry:
            yield Tensor(where, node)
            continue
        state_dict = modules.state_dict(node)
        if state_dict is not None:
            named = tensors_by_name(state_dict)
            yield from (_tensor((*where, name), value) for name, value in named.items())
            shown = {id(value) for value in named.values()}
            rest = (tensor for tensor in find_tensors(node) if id(tensor.node) not in shown)
            yield from (Tensor((*where, *tensor.where), tensor.node, tensor.unusual) for tensor in rest)
        elif is_tensor(node):
            yield _tensor(where, node)


def _tensor(where: Where, node: Entry | Object) -> Tensor:
    return Tensor(where, node, unusual_tensor(node) if type(node) is Object else None)


def list_state_dicts(root: Node) -> list[StateDict]:
    """Every state dict below `root`, and what pickled modules would give: a Dict of its own, editing it edits no module."""
    found = {state_dict.where for state_dict in find_state_dicts(root)}
    modules, listed = _Modules(), []
    made: dict[int, Dict] = {}
    for where, node in walk(root, stop=modules.stop, plain=False):
        if type(node) is Dict and where in found:
            listed.append(StateDict(where, node))
        elif is_module(node) and modules.state_dict(node) is not None:
            if id(node) not in made:
                made[id(node)] = module_state_dict(node)
            if made[id(node)].items:
                listed.append(StateDict(where, made[id(node)]))
    return listed


def find_state_dicts(root: Node) -> list[StateDict]:
    """Every state dict below `root`, wherever it is.

    A dict is one when it maps text to tensors, and either a name has a dot in it, or at least half of its values are
    tensors and none of the others holds tensors; scores, which are single numbers, are not. Optimizer state (`state` and
    `param_groups`) is not one, nor is anything in it, nor what lies inside an object.
    """
    found = []
    holders = _Holders(root)
    for where, node in walk(root, stop=_closed, plain=False, entries=False):
        if type(node) is Dict and not is_optimizer(node) and _is_state_dict(node, holders) and not any(map(is_extra, where)):
            found.append(StateDict(where, node))
    return found


def _closed(node: Node) -> bool:
    return type(node) is Object or (type(node) is Dict and is_optimizer(node))


class Optimizer(NamedTuple):
    """What an optimizer's `state_dict()` gave."""

    state: Dict
    groups: List


def find_optimizers(root: Node) -> Iterator[tuple[Where, Optimizer]]:
    """Every optimizer with its path."""
    for where, node in walk(root, stop=is_tensor, plain=False, entries=False):
        if optimizer := as_optimizer(node):
            yield where, optimizer


def is_extra(key: object) -> bool:
    """Whether a key of a state dict is that of what `get_extra_state` gave; dicts of tensors in there are no state dicts."""
    return isinstance(key, str) and key.rpartition(".")[2] == "_extra_state"


def is_optimizer(node: Node) -> bool:
    """Whether a node is what `optimizer.state_dict()` gives."""
    return as_optimizer(node) is not None


def as_optimizer(node: Node) -> Optimizer | None:
    """The parts of what `optimizer.state_dict()` gives, where a node is that."""
    if type(node) is not Dict:
        return None
    groups, state = node.get("param_groups"), node.get("state")
    return Optimizer(state, groups) if type(groups) is List and type(state) is Dict else None


def _is_state_dict(node: Dict, holders: _Holders) -> bool:
    tensors = list(tensors_by_name(node))
    if not tensors or _are_scores(node, tensors):
        return False
    if any("." in name for name in tensors):
        return True
    others = [value for key, value in node.items if not is_tensor(value) and not is_extra(key)]
    return len(others) <= len(tensors) and not any(id(value) in holders.ids for value in others)


_NAME = re.compile(r"[\w.-]+")


def _are_scores(node: Dict, names: list[str]) -> bool:
    """Whether these are single numbers, under what is not a parameter's name, or among other values.

    Lightning's best_k_models has them by the paths of files, fairseq's meters beside counts.
    """
    values = [value for _, value in node.items if is_tensor(value)]
    if not all(type(value) is Entry and not value.shape for value in values):
        return False
    beside_others = len(values) < len(node.items) and not any("." in name for name in names)
    return beside_others or not all(map(_NAME.fullmatch, names))


class _Holders:
    """Which containers hold a tensor, however deep. Worked out once, when first asked: dicts in dicts would ask for each."""

    def __init__(self, root: Node) -> None:
        self.root = root

    @cached_property
    def ids(self) -> set[int]:
        """Their ids."""
        found: set[int] = set()
        seen = {id(self.root)}
        path = [id(self.root)]
        stack = [children(self.root)]
        while stack:
            for _, node in stack[-1]:
                if is_tensor(node) or id(node) in found:
                    _mark(path, found)
                elif type(node) in CONTAINERS and id(node) not in seen and not is_hollow(node):
                    seen.add(id(node))
                    path.append(id(node))
                    stack.append(children(node))
                    break
            else:
                stack.pop()
                path.pop()
        return found


def _mark(path: list[int], found: set[int]) -> None:
    """Add what is on the path, from its end; above one that is known all are."""
    for holder in reversed(path):
        if holder in found:
            return
        found.add(holder)
