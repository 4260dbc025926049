"""What stays of a tree: one state dict of it, the tensors that globs keep or drop."""

from __future__ import annotations

import json
import shlex
from collections.abc import Collection, Iterable, Iterator, Sequence
from glob import escape
from typing import Any

from ckpt_tools.errors import ConvertError, NothingMatchedError
from ckpt_tools.formats.checkpoint import Checkpoint
from ckpt_tools.formats.contents import StateDict, find_optimizers, find_state_dicts, find_tensors, is_tensor
from ckpt_tools.io.parsers import load_json
from ckpt_tools.text import did_you_mean, dotted
from ckpt_tools.tree import nodes, visit
from ckpt_tools.tree.findings import mending
from ckpt_tools.tree.globs import Globs, meant_by
from ckpt_tools.tree.nodes import Dict, Entry, List, Node, Where
from ckpt_tools.tree.visit import walk

_NAMES = "ckpt inspect --all FILE lists the names."


def select(root: Node, path: str) -> Node:
    """The node at a dotted path, or at a path as JSON (`["nets", 0, "a.b"]`), which tells keys with dots in them apart."""
    found: dict[int, tuple[Where, Node]] = {}
    for where, node in _at(root, path):
        found.setdefault(id(node), (where, node))
    if len(found) > 1:
        wheres = [json.dumps(list(where)) for where, _ in found.values()]
        raise ConvertError(
            f"`select={path!r}` fits {len(found)} places: {', '.join(wheres[:5])}.", why="Some keys have dots in them.",
            fix=f"Give one as JSON: `select={wheres[0]!r}`.",
        )  # fmt: skip
    if not found:
        places = [dotted(where) for where, node in walk(root, stop=is_tensor) if where and type(node) in (Dict, List)]
        there = [dotted(state_dict.where) for state_dict in find_state_dicts(root) if state_dict.where][:5]
        why = did_you_mean(path, places) or (f"State dicts are at {', '.join(map(repr, there))}." if there else "")
        raise NothingMatchedError(f"`select={path!r}` matches nothing.", why=why)
    return next(iter(found.values()))[1]


def only_state_dict(root: Node, path: str) -> Dict:
    """The one state dict below a root; raises NothingMatchedError where there is none, or more than one."""
    found = find_state_dicts(root)
    if len(found) == 1:
        return found[0].node
    if not found:
        fix = "A pickled model gives its state dict with `objects='plain'`."
        raise NothingMatchedError(f"{path} has no state dict.", fix=fix)
    wheres = [dotted(state_dict.where) for state_dict in found]
    raise NothingMatchedError(
        f"{path} has {len(found)} state dicts: {', '.join(where or 'the root' for where in wheres)}.",
        fix=f"Choose one: `select={wheres[0] or wheres[1]!r}`.",
    )


def select_in(checkpoint: Checkpoint, path: str) -> Node:
    """The node at a path in a checkpoint's tree, or in what its container keeps beside the tree (`Checkpoint.others`)."""
    first, _, rest = path.partition(".")
    if (exact := _json_path(path)) is not None:
        first, rest = str(exact[0]) if exact else "", json.dumps(exact[1:]) if exact[1:] else ""
    others = checkpoint.others
    if first in others and next(_at(checkpoint.root, path), None) is None:
        return select(others[first](), rest) if rest else others[first]()
    try:
        return select(checkpoint.root, path)
    except NothingMatchedError as error:
        if not error.why and others:
            error.why = f"Beside the tree are {', '.join(map(repr, others))}."
        elif inside := _beginning_with(f"{path}.", find_state_dicts(checkpoint.root)):
            where, prefix = inside
            options = [f"--select {shlex.quote(where)}"] * bool(where)
            options += [f"--keep {shlex.quote(f'{escape(prefix)}*')}", f"--strip-prefix {shlex.quote(prefix)}"]
            error.why = f"Names of tensors begin with {prefix!r}; they are not in a dict of their own."
            error.fix = f"Those tensors alone: {mending('convert', str(checkpoint.path), ' '.join(options))}"
        elif not error.why and isinstance(checkpoint.root, Dict) and find_state_dicts(checkpoint.root):
            error.why = "The tensors are at the root: leave it out to take them all."
        raise


def _beginning_with(path: str, state_dicts: Iterable[StateDict]) -> tuple[str, str] | None:
    """The state dict, by its place, that has names below a path, and what of the path those names begin with."""
    for found in state_dicts:
        where = dotted(found.where)
        prefix = path.removeprefix(f"{where}.") if where else path
        if (prefix != path or not where) and any(name.startswith(prefix) for name in found.names):
            return where, prefix
    return None


def _at(root: Node, path: str) -> Iterator[tuple[Where, Node]]:
    """Every node at a path: a dotted one may be cut at its dots in several ways."""
    exact = _json_path(path)
    pending: list[tuple[Where, Node]] = [((), root)]
    while pending:
        where, node = pending.pop()
        if where == exact if exact is not None else dotted(where) == path:
            yield where, node
            if where:
                continue
        for key, child in () if is_tensor(node) else visit.children(node):
            below = (*where, key)
            if below == exact[: len(below)] if exact is not None else f"{path}.".startswith(f"{dotted(below)}."):
                pending.append((below, child))


def _json_path(text: str) -> Where | None:
    """A path written as a JSON list of texts and numbers; None for any other text."""
    try:
        steps = load_json(text) if text.startswith("[") else None
    except ValueError:
        return None
    return tuple(steps) if type(steps) is list and all(type(step) in (str, int) for step in steps) else None


def filter_tensors(root: Node, keep: Sequence[str], drop: Sequence[str], used: Collection[str] = ()) -> list[Where]:
    """Drop what `drop` names, and with `keep` every other tensor of a state dict; returns the paths that went."""
    globs = _Globs(keep, drop, used)
    names = {id(found.node): set(found.names) for found in find_state_dicts(root)}
    gone: dict[Where, None] = {}
    lost: dict[int, tuple[Where, Dict | List, list[int]]] = {}  # what each dict or list loses, and where it was met first
    inside: Where | None = None  # the walk goes depth first: what lies in a dropped place follows right behind it
    for where, node in walk(root, stop=is_tensor):
        if type(node) in nodes.CONTAINERS and where in gone:
            inside = where
        if type(node) is not Dict and type(node) is not List and type(node) is not tuple:
            continue
        paths = globs.unwanted(where, node, names.get(id(node), set()))
        if inside is not None and where[: len(inside)] == inside:
            continue
        gone.update(dict.fromkeys(paths.values()))
        if type(node) is not Dict and type(node) is not List:
            for path in paths.values():
                raise ConvertError(
                    f"`drop={dotted(path)!r}` is an element of a tuple, whose length its reader counts on.",
                    fix=f"Drop the whole: `drop={dotted(where)!r}`." if where else "Take what is wanted: `select=WHERE`.",
                )
        elif lost.setdefault(id(node), (where, node, list(paths)))[2] != list(paths):
            here, there = dotted(where), dotted(lost[id(node)][0])
            raise ConvertError(
                f"{here!r} is one and the same dict or list as {there!r}, and would lose other parts of it.",
                why="It is in the file once, under both paths.",
                fix=f"Drop one of them whole (`drop={here!r}`), or give globs that take the same from both.",
            )
    globs.check_used(name for own in names.values() for name in sorted(own))
    tensors: list[tuple[str, Node]] = []  # the dropped ones of state dicts that keep others
    for _, node, indices in lost.values():
        tensors += _without(node, set(indices), names.get(id(node), set()))
    if gone and next(find_tensors(root), None) is None:
        raise NothingMatchedError("No tensor would be left.", why="`keep` and `drop` leave out all of them.")
    _check_optimizers(root, tensors)
    return list(gone)


def _without(node: Dict | List, indices: set[int], own: set[str]) -> list[tuple[str, Node]]:
    """Take the items at these indices away; returns the tensors among them, where a state dict keeps others."""
    items: list[Any] = node.items
    gone = [item for index, item in enumerate(items) if index in indices]
    items[:] = [item for index, item in enumerate(items) if index not in indices]
    if type(node) is List or not any(key in own for key, _ in items):
        return []
    return [(str(key), value) for key, value in gone if key in own]


class _Globs:
    def __init__(self, keep: Sequence[str], drop: Sequence[str], used: Collection[str]) -> None:
        self.keep, self.drop = Globs(keep), Globs(drop)
        for glob in used:
            self.keep.unused.pop(glob, None)
            self.drop.unused.pop(glob, None)

    def unwanted(self, where: Where, node: Dict | List | tuple[Node, ...], own: set[str]) -> dict[int, Where]:
        """The items of a dict that are to go, or the elements of a list or tuple: index -> path. `own`: names of tensors."""
        if type(node) is not Dict:
            return self._elements(where, node)
        paths = {}
        for index, (key, _) in enumerate(node.items):
            path = (*where, visit.component(key))
            texts = [dotted(path), key] if key in own else [dotted(path)]
            unkept = key in own and bool(self.keep) and not self.keep.matching(*texts)
            if self.drop.matching(*texts) or unkept:
                paths[index] = path
        return paths

    def _elements(self, where: Where, node: Node) -> dict[int, Where]:
        prefix = dotted((*where, ""))
        wanted = {path for path in self.drop if path.startswith(prefix)}
        places = ((index, (*where, index)) for index, _ in enumerate(visit.children(node) if wanted else ()))
        paths = {index: path for index, path in places if dotted(path) in wanted}
        for path in paths.values():
            self.drop.unused.pop(dotted(path), None)
        return paths

    def check_used(self, names: Iterable[str]) -> None:
        unused = [("keep", glob) for glob in self.keep.unused] + [("drop", glob) for glob in self.drop.unused]
        for option, glob in unused:
            why = meant_by(glob, list(names), f"`{option}` uses the names in IN.")
            raise NothingMatchedError(f"`{option}={glob!r}` matches nothing.", why=why, fix=_NAMES)


def _check_optimizers(root: Node, dropped: Sequence[tuple[str, Node]]) -> None:
    """Refuse to drop a tensor while an optimizer stays whose state belongs to it by its place among the parameters."""
    for where, optimizer in find_optimizers(root) if dropped else ():
        if not any(type(key) is int for key, _ in optimizer.state.items):
            continue
        named = (group.get("param_names") for group in optimizer.groups.items if type(group) is Dict)
        names = {name for listed in named if type(listed) is List for name in listed.items}
        shapes = {tensor.node.shape for tensor in find_tensors(optimizer.state) if type(tensor.node) is Entry}
        for name, value in dropped:
            if name in names if names else type(value) is Entry and value.shape and value.shape in shapes:
                raise ConvertError(
                    f"{name!r} cannot be dropped alone: the state of the optimizer {dotted(where)!r} refers to it by place.",
                    why="All states after it would belong to other parameters.",
                    fix=f"Leave the optimizer out too: `drop={dotted(where)!r}`.",
                )
