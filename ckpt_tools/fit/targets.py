"""The target: the model that a checkpoint is to be fitted to, as names, shapes, dtypes and ties in order.

It comes from a checkpoint file, from `package.module:callable` (imported because the user asked for it), from a live module or
from a state dict. torch is imported inside functions, and for the last three only.
"""

from __future__ import annotations

import importlib.util
import os
import re
import shlex
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager, redirect_stdout
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, cast

from ckpt_tools.edit import renaming, selection
from ckpt_tools.edit.casts import to_little_endian
from ckpt_tools.edit.objects import plain
from ckpt_tools.errors import ConvertError, NothingMatchedError, UsageError
from ckpt_tools.formats.checkpoint import Checkpoint
from ckpt_tools.formats.contents import StateDict, find_state_dicts, tensors_by_name
from ckpt_tools.io.parsers import load_json
from ckpt_tools.matching.records import Framework, Param
from ckpt_tools.parts.open import open_whole
from ckpt_tools.pickling.torch_objects import unusual_tensor
from ckpt_tools.text import did_you_mean, dotted, printable
from ckpt_tools.tree.nodes import Dict, Entry, Node, as_dict
from ckpt_tools.values.pytorch import need_torch, torch


@dataclass(frozen=True, slots=True, eq=False)
class Target:
    label: str
    params: tuple[Param, ...]
    module: Any = None
    on_meta: bool = False
    build: Callable[[], Any] | None = None
    tensors: Mapping[str, Any] | None = None

    @property
    def names(self) -> tuple[str, ...]:
        return tuple(param.name for param in self.params)

    @property
    def ties(self) -> dict[str, str]:
        """Name -> the first of the names that are tied with it, itself included."""
        first: dict[object, str] = {}
        return {
            param.name: param.name if param.tie is None else first.setdefault(param.tie, param.name) for param in self.params
        }


_KERAS = "model.weights.h5"
_DOTTED = re.compile(r"[^\W\d]\w*+(?:\.[^\W\d]\w*+)*")


def read_target(spec: Any, *, args: str | Mapping[str, Any] | None = None) -> Target:
    """The target that a path, `package.module:callable`, module or state dict stands for."""
    if not isinstance(spec, (str, os.PathLike)):
        if args is not None:
            raise UsageError("Arguments for the target are for package.module:callable only.")
        return _from_live(spec, f"a {type(spec).__name__}")
    text = os.fspath(spec)
    module, _, attribute = text.rpartition(":")
    is_callable = _DOTTED.fullmatch(attribute) and (module.endswith(".py") or _DOTTED.fullmatch(module))
    if isinstance(spec, str) and is_callable and not Path(text).exists():
        return _from_callable(text, _keywords(args))
    if args is not None:
        raise UsageError("`like_args` are for package.module:callable.", why=f"{text!r} is taken for a file.")
    with open_whole(spec) as checkpoint:
        return Target(text, params_of(choose_state_dict(checkpoint, of_target=True).node))


# --- checkpoints


def choose_state_dict(checkpoint: Checkpoint, select: str | None = None, *, of_target: bool = False) -> StateDict:
    """The selected state dict of a checkpoint, or its only one, with its tied names. A pickled module gives its state dict."""
    chosen = _chosen(checkpoint, select, of_target=of_target)
    renaming.restore_named_ties(chosen.node, checkpoint.metadata)
    return chosen


def _chosen(checkpoint: Checkpoint, select: str | None, *, of_target: bool) -> StateDict:
    found, root = checkpoint.state_dicts, checkpoint.root
    if not found:
        root, _ = plain.make_plain(root)
        found = find_state_dicts(root)
    chosen = [state_dict for state_dict in found if dotted(state_dict.where) == select]
    if len(chosen) == 1:
        return chosen[0]
    if select is not None:
        node = selection.select_in(checkpoint, select) if root is checkpoint.root else selection.select(root, select)
        if type(node) is not Dict or not StateDict((), node).names:
            raise NothingMatchedError(f"{checkpoint.path}: {select!r} is not a state dict.")
        return StateDict((), node)
    if not found:
        raise NothingMatchedError(f"{checkpoint.path} holds no state dict.")
    if len(found) != 1:
        wheres = ", ".join(repr(dotted(state_dict.where)) for state_dict in found)
        first = dotted(found[0].where) or dotted(found[1].where)
        write = (
            f"Write one of them first: ckpt convert {shlex.quote(str(checkpoint.path))} TARGET --select {shlex.quote(first)}"
        )
        fix = printable(write) if of_target else "Choose one with `select=WHERE`."
        raise NothingMatchedError(f"{checkpoint.path} holds {len(found)} state dicts: {wheres}.", fix=fix)
    return found[0]


def framework_of(checkpoint: Checkpoint) -> Framework | None:
    """Whose layers a checkpoint has, where its container says so; a `.keras` is a bundle around Keras's weights."""
    if checkpoint.container == "flax":
        return "flax"
    in_bundle = checkpoint.container == "zip-bundle" and type(checkpoint.root) is Dict and _KERAS in checkpoint.root.named
    return "keras" if checkpoint.container == "keras" or in_bundle else None


def params_of(node: Dict) -> tuple[Param, ...]:
    return tuple(_param(name, value) for name, value in tensors_by_name(node).items())


def _param(name: str, node: Node) -> Param:
    if type(node) is Entry:
        tie = (id(node.storage), node.offset, node.shape, node.stride) if node.numel else None
        return Param(name, node.shape, node.dtype.name, tie)
    unusual = unusual_tensor(node)
    assert unusual is not None
    return Param(name, unusual.shape or (), unusual.dtype.name if unusual.dtype else None, kind=unusual.kind)


@contextmanager
def open_state_dict(path: str | os.PathLike[str]) -> Iterator[tuple[Checkpoint, Dict]]:
    """The only state dict of a checkpoint, whose bytes can be read."""
    with open_whole(path) as checkpoint:
        checkpoint.locate()
        chosen = choose_state_dict(checkpoint, of_target=True).node
        yield checkpoint, as_dict(to_little_endian(chosen, checkpoint.byteorder))


def tensors_of(target: Target, stack: ExitStack, *, seed: int | None = None) -> Mapping[str, Any]:
    """A target's tensors: of a checkpoint, of a live model, or of what the callable makes; by a seed, where one is given."""
    if target.tensors is None:
        return tensors_by_name(stack.enter_context(open_state_dict(target.label))[1])
    if target.build is None or (seed is None and not target.on_meta):
        return target.tensors
    with torch.random.fork_rng(devices=[], enabled=seed is not None):  # the seed's numbers are as stable as torch's are
        if seed is not None:
            torch.manual_seed(seed)
        made = target.build()
    tensors: Mapping[str, Any] = made if isinstance(made, Mapping) else made.state_dict()
    return tensors


# --- callables


def _keywords(args: str | Mapping[str, Any] | None) -> dict[str, Any]:
    example = """For example: `like_args={"num_classes": 200}`"""
    if isinstance(args, str):
        try:
            args = load_json(args)
        except ValueError as error:
            raise UsageError("`like_args` is not JSON.", why=f"{error}.", fix=example) from None
        if not isinstance(args, dict):
            raise UsageError("`like_args` is not a JSON object.", fix=example)
    return dict(args or {})


def _from_callable(spec: str, keywords: dict[str, Any]) -> Target:
    need_torch("A model that is named as code is built with it.")
    factory = _imported(spec)

    def build() -> Any:
        with redirect_stdout(sys.stderr):  # standard output is for the report
            return factory(**keywords)

    try:
        with torch.device("meta"):
            made = build()
    except (Exception, SystemExit):  # a constructor that computes with values cannot run on the meta device
        try:
            made = build()
        except (Exception, SystemExit) as error:
            raise ConvertError(
                f"The target {spec} raised {type(error).__name__} when it was called.", why=f"{error}",
                fix="The arguments of `like` go into `like_args` as a JSON object; or name a function that calls it with them.",
            ) from error  # fmt: skip
    return replace(_from_live(made, spec), build=build)


def _imported(spec: str) -> Callable[..., Any]:
    module_name, _, attribute = spec.rpartition(":")
    with _from_here(module_name):
        try:
            with redirect_stdout(sys.stderr):
                found: Any = _run_file(module_name) if module_name.endswith(".py") else importlib.import_module(module_name)
        except (Exception, SystemExit) as error:
            fix = "The current folder and what is installed here can be imported." if isinstance(error, ImportError) else ""
            if isinstance(error, SystemExit):  # a script that parses its arguments, or runs, when it is imported
                fix = """Put what it runs under: if __name__ == "__main__"."""
            raise ConvertError(
                f"The target {spec} cannot be imported.", why=f"{type(error).__name__}: {error}", fix=fix
            ) from error
    for part in attribute.split("."):
        if not hasattr(found, part):
            near = did_you_mean(part, (name for name in dir(found) if not name.startswith("_")))
            raise ConvertError(f"The target {spec} is not there: {module_name} has no {attribute!r}.", fix=near)
        found = getattr(found, part)
    if not callable(found):
        raise ConvertError(f"The target {spec} cannot be called; it is a {type(found).__name__}.")
    return cast("Callable[..., Any]", found)


@contextmanager
def _from_here(module: str) -> Iterator[None]:
    """The current folder last on Python's path, where the module is in it: an installed one may try to import what is not."""
    here, before = str(Path.cwd()), list(sys.path)
    sys.path[:] = [place for place in before if place not in ("", here)]
    package = module.partition(".")[0]
    try:
        found = importlib.util.find_spec(package) if package.isidentifier() and package not in sys.modules else None
        is_installed = package in sys.modules or (found is not None and found.origin is not None)  # not a folder without code
        if sys.path != before or not is_installed:
            sys.path.append(here)
        yield
    finally:
        sys.path[:] = before


def _run_file(path: str) -> Any:
    """A file as a module; what it imports may lie beside it."""
    place = Path(path).resolve()
    spec = importlib.util.spec_from_file_location(f"{place.stem} of --like", place)
    if spec is None or spec.loader is None or not place.is_file():
        raise ImportError(f"there is no file {path}")
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    sys.path.append(str(place.parent))
    try:
        spec.loader.exec_module(module)
    finally:
        sys.path.remove(str(place.parent))
    return module


# --- live modules and state dicts


def _from_live(made: Any, label: str) -> Target:
    if isinstance(made, torch.nn.Module):
        tensors = _tensors(made.state_dict(keep_vars=True))
        types = {name: type(module).__name__ for name, module in made.named_modules()}
        params = tuple(_live_param(name, value, types.get(name.rpartition(".")[0])) for name, value in tensors.items())
        on_meta = any(value.is_meta for value in tensors.values())
        return Target(label, params, made, on_meta, tensors=tensors)
    if isinstance(made, Mapping) and (tensors := _tensors(made)):
        return Target(label, tuple(_live_param(name, value) for name, value in tensors.items()), tensors=tensors)
    raise ConvertError(
        f"The target {label} gives a {type(made).__name__}.",
        why="A torch.nn.Module or a state dict (names to tensors) is wanted.",
    )


def _tensors(state_dict: Mapping[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in state_dict.items() if isinstance(name, str) and isinstance(value, torch.Tensor)}


def _live_param(name: str, value: Any, module: str | None = None) -> Param:
    if isinstance(value, torch.nn.UninitializedParameter | torch.nn.UninitializedBuffer):
        raise ConvertError(f"{name!r} of the target is lazy, without a shape.", fix="Run the model once before it is a target.")
    shape, dtype = tuple(value.shape), str(value.dtype).removeprefix("torch.")
    return Param(name, shape, dtype, _tie(value), module)


def _tie(value: Any) -> object:
    """Parameters that are tied are one object; other tensors are when they are the same view on one storage."""
    try:
        if value.is_meta or not value.numel():
            return id(value)
        return (value.untyped_storage().data_ptr(), value.storage_offset(), tuple(value.shape), value.stride())
    except (RuntimeError, NotImplementedError):  # a tensor without a storage: sparse, distributed
        return id(value)
