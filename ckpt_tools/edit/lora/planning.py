"""Adapters merged into a state dict: what becomes of each of their tensors is planned, one adapter after the other.

The weights become computed contents, which are worked out while they are written.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

from ckpt_tools.edit.lora.adapter import Adapter, Change, Difference
from ckpt_tools.edit.lora.experts import Parameter, assigned
from ckpt_tools.edit.lora.partners import IN_PROJ, TIED, Base, Modules, Way
from ckpt_tools.edit.lora.shapes import Turned, fits, is_embedding, last_name, made_shape
from ckpt_tools.errors import ConvertError
from ckpt_tools.formats.contents import find_tensors, tensors_by_name
from ckpt_tools.io.content import Content, read
from ckpt_tools.tree import exchange
from ckpt_tools.tree.dtypes import DType
from ckpt_tools.tree.nodes import Dict, Entry, Node, stored
from ckpt_tools.values.low_rank import Addend, Delta, Matrix, merged, recast
from ckpt_tools.values.numeric import row_major, same_content, view_of
from ckpt_tools.values.pytorch import need_torch

_TWICE = (0, 21)  # the last PEFT of which it is known; see `Planning.add`
_OTHER_MODEL = "The adapter is for another model, or another size of it."


@dataclass(slots=True)
class Merged:
    """What one adapter did.

    Attributes:
        adapter: its path as it was given. weight: what its changes were multiplied with.
        ranks: rank -> how many modules have it. scales: those of the modules, the weight not counted, each once.
        modules: how many were changed. dora: how many of them with magnitudes. biases: how many biases were.
        differences: to how many weights and biases something was added as it is (`.diff`, `.diff_b`).
        saved: tensors of the base that were replaced by the adapter's own. added: those that the base did not have.
        twice: modules whose change PEFT adds twice, and so it was here.
    """

    adapter: str
    weight: float
    ranks: dict[int, int] = field(default_factory=dict)
    scales: list[float] = field(default_factory=list)
    modules: int = 0
    dora: int = 0
    biases: int = 0
    differences: int = 0
    saved: list[str] = field(default_factory=list)
    added: list[str] = field(default_factory=list)
    twice: list[str] = field(default_factory=list)


@dataclass(slots=True, eq=False)
class _Weight:
    """A weight or a bias of the base, and what becomes of it; `own` is what an adapter was trained on, if that is another."""

    name: str
    entry: Entry
    pieces: list[Delta | Addend] = field(default_factory=list)
    own: Entry | None = None
    own_by: str = ""


class Planning:
    """One adapter at work: `run` notes everything down in `plans`."""

    def __init__(self, plans: Merging, adapter: Adapter, given: str, weight: float) -> None:
        self.base, self.plans, self.adapter, self.given, self.weight = plans.base, plans, adapter, given, weight
        self.report = Merged(given, weight)
        self.turned = Turned(adapter, self.base.tensors)
        self.taken: dict[str, str] = {}  # a tensor of the base -> the module of the adapter that changes it
        self.read = functools.lru_cache(maxsize=4)(read)  # a factor of all experts, for one after the other

    def run(self) -> Merged:
        groups = [(row.component, row.flat) for row in self.adapter.changes]
        groups += [(row.component, row.flat) for row in self.adapter.differences]
        ways = [self.group(component, flat) for component, flat in dict.fromkeys(groups)]
        for path, entry in self.adapter.saved.items():
            self.save(path, entry, ways)
        self.check_saved()
        self.report.scales.sort()
        return self.report

    def group(self, component: str, flat: bool) -> Way:
        """The changes of one component; the way that led to their partners."""
        base, chains = self.base, dict[str, list[Change]]()
        changes = [row for row in self.adapter.changes if (row.component, row.flat) == (component, flat)]
        differences = [row for row in self.adapter.differences if (row.component, row.flat) == (component, flat)]
        for change in changes:
            chains.setdefault(change.module, []).append(change)
        whole = {row.module: row for row in differences}
        parameters = {name for change in changes for name in change.parameters}
        modules = Modules(base.modules.all | base.experts.modules(parameters)) if parameters else base.modules

        def may_be(path: str, module: str) -> bool:
            if module in base.quantised or (path in whole and path not in chains):
                return True
            is_plain = module in base.names and fits(chains[path][0], base.weight(module)) is not None
            return is_plain or bool(self.targeted(path, module, chains))

        tied = {path: name for path, (change, *_) in chains.items() if (name := base.tied_to(change))}
        wanted = [path for path in (*chains, *(path for path in whole if path not in chains)) if path not in tied]
        partners, way = modules.find(wanted, changes[0] if changes else differences[0], self.given, base.path, may_be)
        if way.strip and way.add:
            text = f"{self.given}: what it names below {way.strip!r} is what {base.path} has below {way.add!r}."
            self.plans.notes.append(("adapter-names", text))
        for module in partners.values():
            base.check_plain(module)
        partners |= tied
        plain = {path: chain[0] for path, chain in chains.items() if not self.targeted(path, partners[path], chains)}
        self.turned.learn((change, base.weight(partners[path])) for path, change in plain.items())
        for path, chain in chains.items():
            targets = self.targeted(path, partners[path], chains)
            if targets or len(chain) > 1:
                self.add_parameters(chain, targets)
            else:
                self.take(base.names[partners[path]], chain[0], is_tied=path in tied)
                self.add(chain[0], partners[path])
        for difference in differences:
            self.add_difference(difference, partners[difference.module])
        for path, module in tied.items():
            tie = f"it is tied to {base.names[module]!r}, which gets its change, as PEFT merges it."
            self.plans.notes.append(("tied-target", f"{base.path} has no {path!r}: {tie}"))
        return way

    def targeted(self, path: str, module: str, chains: Mapping[str, Sequence[Change]]) -> list[Parameter]:
        return [one for name in chains[path][0].parameters if (one := self.base.experts.find(module, name)) is not None]

    def add_parameters(self, changes: Sequence[Change], parameters: Sequence[Parameter]) -> None:
        if not changes[0].parameters:
            raise ConvertError(
                f"{self.given} has {len(changes)} changes of {changes[0].module!r}, one inside the other: not merged here.",
                fix="Merge it where it was trained: PEFT's merge_and_unload.",
            )
        for change, parameter, turned in assigned(changes, parameters, self.adapter, self.base.path):
            for name, first in parameter.pieces:
                self.base.check_plain(name.removesuffix(".weight"))
                self.take(name, change)
                delta = Delta(
                    change.down, change.up, change.scale * self.weight, turned=turned, narrow=True,
                    experts=change.experts if len(parameter.shape) == 3 else 0, first=first, read=self.read,
                )  # fmt: skip
                self.plans.change(name, self.given, delta)
            self.count(change)

    def take(self, name: str, change: Change | Difference, *, is_tied: bool = False) -> None:
        """Raise ConvertError where two modules of the adapter change one tensor, as those of twin components do."""
        own = f"{change.component}: {change.module}" if change.component else change.module
        if not is_tied and self.taken.setdefault(name, own) != own:
            raise ConvertError(
                f"{self.given} has changes of two modules for {name!r}: {self.taken[name]!r} and {own!r}.",
                why="Only one of them is of this base.",
                fix=f"Make adapters of one component each: `keep={change.component or 'NAME'}*`.",
            )

    def count(self, change: Change) -> None:
        self.report.modules += 1
        self.report.ranks[change.rank] = self.report.ranks.get(change.rank, 0) + 1
        self.report.scales += [change.scale] if change.scale not in self.report.scales else []

    def add(self, change: Change, module: str) -> None:
        name = self.base.names[module]
        entry, report = change.base or self.base.entry(name), self.report
        if fits(change, entry) is None:
            raise ConvertError(
                f"{self.given}: the factors of {change.module!r} make {made_shape(change)}; {name!r} is {list(entry.shape)}.",
                why=_OTHER_MODEL,
            )
        if change.magnitude is not None and change.magnitude.numel != (outputs := change.up.shape[0]):
            raise ConvertError(
                f"{self.given}: {change.module!r} has {change.magnitude.numel} magnitudes for {outputs} outputs."
            )
        if change.base is not None:
            self.check_replaces(name, change.base)
            self.plans.base_of(name, self.given, change.base)
        is_twice = change.inner and change.module.endswith("out_proj") and self.adapter.config.version <= _TWICE
        narrow = change.embedding or self.adapter.config.mica or name.endswith(IN_PROJ)
        for is_narrow in (True, False) if is_twice else (narrow,):
            delta = Delta(
                change.down, change.up, change.scale * self.weight, turned=self.turned.is_turned(change, entry),
                narrow=is_narrow, by_down=change.embedding or len(entry.shape) > 2, magnitude=change.magnitude, mid=change.mid,
            )  # fmt: skip
            self.plans.change(name, self.given, delta)
        report.twice += [module] if is_twice else []
        self.count(change)
        report.dora += change.magnitude is not None
        if change.bias is not None:
            self.add_whole(f"{module}.bias", f"the bias of {change.module!r}", change.bias, change.scale)
            report.biases += 1

    def add_whole(self, name: str, what: str, entry: Entry, scale: float) -> None:
        if name not in self.base.tensors:
            raise ConvertError(f"{self.given} has {what}, and {self.base.path} has no {name!r}.", why=_OTHER_MODEL)
        base = self.base.entry(name)
        if base.shape != entry.shape:
            raise ConvertError(
                f"{self.given}: {what} is {list(entry.shape)}; {name!r} is {list(base.shape)}.", why=_OTHER_MODEL
            )
        self.plans.change(name, self.given, Addend(Matrix.of(name, entry), scale * self.weight))

    def add_difference(self, difference: Difference, module: str) -> None:
        name = f"{module}.{difference.ending}"
        self.take(name, difference)
        self.add_whole(name, f"the difference of {difference.module!r}", difference.entry, 1.0)
        self.report.differences += 1

    def save(self, path: str, entry: Entry, ways: Sequence[Way]) -> None:
        """A tensor that the adapter holds whole: in the place of the base's, or beside them where PEFT would have made it."""
        base, config = self.base, self.adapter.config
        name = next((name for way in dict.fromkeys((Way(), *ways)) if (name := way(path)) in base.tensors), None)
        if name is not None:
            self.check_replaces(name, entry)
            self.report.saved.append(name)
            self.tell_head(name)
        else:
            name = next((found for way in ways if (found := way(path)) is not None), None)
            module = path.rpartition(".")[0]
            if name is None or not (config.saves(path) or (config.ties and last_name(module) in TIED)):
                raise ConvertError(
                    f"{self.given}: {path!r} has no partner in {base.path}, and is of no module that the adapter saves whole.",
                    why=_OTHER_MODEL,
                )
            self.report.added.append(name)
        if name in self.plans.own:
            raise ConvertError(f"Two adapters have a {name!r} of their own: {self.plans.own[name][0]} and {self.given}.")
        self.plans.own[name] = self.given, entry

    def check_saved(self) -> None:
        for module in self.adapter.config.modules_to_save:
            inside = f".{module}."
            held = any(inside in f".{name}" for name in (*self.report.saved, *self.report.added))
            if not held and (name := next((name for name in self.base.tensors if inside in f".{name}"), None)) is not None:
                raise ConvertError(
                    f"{self.given} should hold {module!r} whole (modules_to_save), and has no tensor of it.",
                    why=f"{name!r} would stay as it was before the training.",
                )

    def tell_head(self, name: str) -> None:
        """A file without a head leaves it to the loader to tie it, which then gets the adapter's embedding."""
        module = name.removesuffix(".weight")
        others = {last_name(one.removesuffix(".weight")) for one in (*self.base.names, *self.adapter.saved)}
        if is_embedding(module, self.base.tensors) and (others - {last_name(module)}).isdisjoint(TIED):
            text = "a head that the loader ties to it gets that too; PEFT would keep the old one."
            self.plans.notes.append(("tied-target", f"{name!r} is the adapter's own: {text}"))

    def check_replaces(self, name: str, entry: Entry) -> None:
        """A resized embedding has more rows, or fewer; all else is of one shape."""
        base = self.base.tensors[name]
        shape = base.shape if type(base) is Entry else None
        if shape is None or entry.shape[1:] != shape[1:] or len(entry.shape) != len(shape):
            has = "no plain tensor" if shape is None else list(shape)
            raise ConvertError(
                f"{self.given}: {name!r} is {list(entry.shape)}; in {self.base.path} it is {has}.", why=_OTHER_MODEL
            )


# --- all of them


class Merging:
    """The adapters that are merged into one state dict: planned one by one, then applied together."""

    def __init__(self, root: Node, node: Dict, path: str) -> None:
        need_torch("`lora` adds an adapter to the weights with it.")
        self.root, self.node = root, node
        self.base = Base(dict(tensors_by_name(node)), path)
        self.weights: dict[tuple[int, str], _Weight] = {}
        self.own: dict[str, tuple[str, Entry]] = {}
        self.changed: dict[str, str] = {}  # name -> the adapter that changed it last
        self.equal_bases: list[Node] = []
        self.notes: list[tuple[str, str]] = []

    @property
    def taken_in(self) -> list[Node]:
        """What is not written: the base's tensors in whose place the adapter's come, and the adapter's that are equal."""
        replaced = [node for name in self.own if (node := self.base.tensors.get(name)) is not None]
        return [*replaced, *(row.entry for row in self.weights.values() if row.own is not None), *self.equal_bases]

    def weight(self, name: str) -> _Weight:
        entry = self.base.entry(name)
        return self.weights.setdefault(view_of(entry), _Weight(name, entry))

    def change(self, name: str, given: str, piece: Delta | Addend) -> None:
        self.changed[name] = given
        self.weight(name).pieces.append(piece)

    def base_of(self, name: str, given: str, entry: Entry) -> None:
        """What the weight was before the change, by the adapter: the base's own, or it comes in its place, as PEFT loads it."""
        weight = self.weight(name)
        old = weight.entry
        is_same = old.shape == entry.shape and same_content(row_major(old), recast(Matrix.of(name, entry), old.dtype))
        self.equal_bases += [entry] * is_same
        if not weight.own_by:
            weight.own, weight.own_by = None if is_same else entry, given
            if not is_same:
                text = f"{given} contains the {name!r} that it was trained on, not that of {self.base.path}; that is written."
                self.notes.append(("adapters-base", text))
        elif given != weight.own_by and not (is_same and weight.own is None):
            raise ConvertError(f"{weight.own_by} and {given} were trained on different weights {name!r}, which both hold.")

    def apply(self) -> Node:
        if (name := next((name for name in self.own if name in self.changed), None)) is not None:
            raise ConvertError(f"{self.changed[name]} changes {name!r}, which {self.own[name][0]} holds whole.")
        self._check_alone()
        made = {key: _made(row, f"merged{number}") for number, (key, row) in enumerate(self.weights.items())}

        def swap(node: Node) -> Node:
            if type(node) is not Entry or (key := view_of(node)) not in made:
                return node
            return replace(made[key], kind=node.kind, requires_grad=node.requires_grad)

        root = exchange.replace(self.root, swap)
        self._put_own()
        return root

    def _put_own(self) -> None:
        """Exchange what the adapters hold whole, in the dtype of the base; what is new comes last."""
        tensors = tensors_by_name(self.node)
        like = next((node for node in tensors.values() if type(node) is Entry), None)
        new: dict[str, Entry] = {}
        for number, (name, (_, entry)) in enumerate(self.own.items()):
            base = tensors.get(name)
            both_floats = type(base) is Entry and {base.dtype.family, entry.dtype.family} == {"float"}
            dtype = base.dtype if type(base) is Entry and both_floats else entry.dtype
            content = recast(Matrix.of(name, entry), dtype)
            new[name] = _alone(base if type(base) is Entry else like or entry, f"own{number}", content, dtype, entry.shape)
        self.node.items[:] = [(key, new.pop(key, value) if type(key) is str else value) for key, value in self.node.items]
        self.node.items += new.items()

    def _check_alone(self) -> None:
        """Views that overlap what is changed, and are not it, would no longer be views of it."""
        changed: dict[int, list[_Weight]] = {}
        for weight in self.weights.values():
            changed.setdefault(id(weight.entry.storage), []).append(weight)
        for tensor in find_tensors(self.root):
            node = tensor.node
            if type(node) is not Entry:
                continue
            for weight in changed.get(id(node.storage), ()):
                entry = weight.entry
                apart = node.offset >= entry.offset + entry.span or entry.offset >= node.offset + node.span
                if not apart and view_of(node) != view_of(entry):
                    raise ConvertError(
                        f"{self.base.path}: {tensor.where[-1]!r} shares memory with {weight.name!r}, and is another tensor.",
                        why="One would be changed and not the other.",
                        fix="Convert the base to safetensors first, where each tensor has its own memory.",
                    )


def _made(weight: _Weight, key: str) -> Entry:
    entry = weight.entry
    if weight.own is not None:
        entry = _alone(entry, "", recast(Matrix.of(weight.name, weight.own), entry.dtype), entry.dtype, weight.own.shape)
    extras = replace(entry.extras, metadata=None) if entry.extras else None  # the conj and neg bits are worked in
    content = merged(Matrix.of(weight.name, entry), weight.pieces)
    return _alone(replace(entry, extras=extras), key, content, entry.dtype, entry.shape)


def _alone(like: Entry, key: str, content: Content, dtype: DType, shape: tuple[int, ...]) -> Entry:
    made = stored(key, dtype, shape, content, like.storage.device)
    return replace(made, requires_grad=like.requires_grad, kind=like.kind, extras=like.extras)
