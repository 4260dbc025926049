"""Adapters merged into a state dict: what becomes of each of their tensors is planned, one adapter after the other.

The weights become computed contents, which are worked out while they are written.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace

from ckpt_tools.edit.lora.adapter import Adapter, Change, Difference
from ckpt_tools.edit.lora.experts import Experts, Parameter, assigned
from ckpt_tools.edit.lora.names import in_other_layout
from ckpt_tools.edit.lora.shapes import Turned, fits, is_embedding, last_name, made_shape
from ckpt_tools.errors import ConvertError
from ckpt_tools.formats.contents import find_tensors, tensors_by_name
from ckpt_tools.io.content import Content, read
from ckpt_tools.text import listed, some
from ckpt_tools.tree import exchange
from ckpt_tools.tree.dtypes import DType
from ckpt_tools.tree.names import unwrap
from ckpt_tools.tree.nodes import Dict, Entry, Node, Storage, contiguous_stride
from ckpt_tools.values.low_rank import Addend, Delta, Matrix, biased, merged, recast
from ckpt_tools.values.numeric import row_major, view_of
from ckpt_tools.values.pytorch import need_torch
from ckpt_tools.values.same_bytes import same_content

_WEIGHTS = ("weight", "in_proj_weight")  # the second is torch's MultiheadAttention's
_DTYPES = ("float32", "float16", "bfloat16", "float64")
# Beside a weight they say that it is quantised: bitsandbytes, fp8 with scales, compressed-tensors, GPTQ and AWQ
_QUANTISED = (
    "weight.absmax", "weight.quant_map", "SCB", "weight_scale", "weight_scale_inv", "scale_weight", "weight_packed", "qweight",
    "qzeros", "weight_zero_point", "gate_up_proj_blocks", "down_proj_blocks",
)  # fmt: skip
_TIED = ("lm_head", "embed_out", "output", "output_layer", "embed_tokens", "shared", "wte")  # heads and embeddings
_TWICE = (0, 21)  # the last PEFT of which it is known; see `Planning.add`


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


class Base:
    """The state dict that adapters are merged into: its tensors by name, its modules by path."""

    def __init__(self, tensors: Mapping[str, Node], path: str) -> None:
        self.tensors, self.path = tensors, path
        self.names: dict[str, str] = {}
        for ending in reversed(_WEIGHTS):
            self.names |= {name[: -len(ending) - 1]: name for name in tensors if name.endswith(f".{ending}")}
        self.quantised = _quantised(tensors)
        self.modules = Modules(self.names.keys() | self.quantised.keys())
        self.experts = Experts(tensors)

    def weight(self, module: str) -> Node:
        return self.tensors[self.names[module]]

    def tied_to(self, change: Change) -> str | None:
        """The embedding that a missing head is tied to: files leave out what is tied. None where none fits."""
        last = last_name(change.module)
        if last not in _TIED or any(last_name(module) == last for module in self.names):
            return None
        width = made_shape(change)[0] if change.embedding else made_shape(change)[-1]
        size = made_shape(change)[-1] if change.embedding else made_shape(change)[0]
        found = {}
        for module, name in self.names.items():
            node = self.tensors[name]
            fits_in = type(node) is Entry and node.shape[1:] == (width,) and (change.base is not None or node.shape[0] == size)
            if fits_in and type(node) is Entry and is_embedding(module, self.tensors):
                found[view_of(node)] = module
        return next(iter(found.values())) if len(found) == 1 else None

    def entry(self, name: str) -> Entry:
        node = self.tensors[name]
        if type(node) is Entry and node.dtype.name in _DTYPES:
            return node
        kind = node.dtype.name if type(node) is Entry else "no plain dense tensor"
        raise ConvertError(
            f"{self.path}: {name!r} is {kind}; an adapter is merged into float32, float16, bfloat16 or float64.",
            fix=MAKE_PLAIN if type(node) is Entry and node.dtype.bits <= 8 else "",
        )


MAKE_PLAIN = "`dequantize='bf16'` makes the base plain first."


class Planning:
    """One adapter at work: `run` notes everything down in `plans`."""

    def __init__(self, base: Base, plans: Merging, adapter: Adapter, given: str, weight: float) -> None:
        self.base, self.plans, self.adapter, self.given, self.weight = base, plans, adapter, given, weight
        self.report = Merged(given, weight)
        self.turned = Turned(adapter, base.tensors)
        self.scales: set[float] = set()
        self.taken: dict[str, str] = {}  # a tensor of the base -> the module of the adapter that changes it
        self.read = functools.lru_cache(maxsize=4)(read)  # a factor of all experts, for one after the other

    def run(self) -> Merged:
        """Find the partners of all tensors."""
        groups: dict[tuple[str, bool], list[Change]] = {}
        for change in self.adapter.changes:
            groups.setdefault((change.component, change.flat), []).append(change)
        ways = {key: self.group(changes) for key, changes in groups.items()}
        for difference in self.adapter.differences:
            self.add_difference(difference, ways.get((difference.component, difference.flat), Way()))
        for path, entry in self.adapter.saved.items():
            self.save(path, entry, [*ways.values()])
        self.check_saved()
        self.report.scales = sorted(self.scales)
        return self.report

    def group(self, changes: Sequence[Change]) -> Way:
        """The changes of one component; the way that led to their partners."""
        base, chains = self.base, _by_module(changes)
        parameters = {name for change in changes for name in change.parameters}
        modules = Modules(base.modules.all | base.experts.modules(parameters)) if parameters else base.modules

        def may_be(path: str, module: str) -> bool:
            return module in base.quantised or bool(self.targeted(path, module, chains)) or (
                module in base.names and fits(chains[path][0], base.weight(module)) is not None
            )  # fmt: skip

        tied = (
            {} if changes[0].flat else {path: name for path, (change, *_) in chains.items() if (name := base.tied_to(change))}
        )
        found = modules.find([path for path in chains if path not in tied], flat=changes[0].flat, fits=may_be)
        if found.way is None:
            raise _no_partners(self.given, base.path, changes, found)
        if found.way.strip and found.way.add:
            text = f"{self.given}: what it names below {found.way.strip!r} is what {base.path} has below {found.way.add!r}."
            self.plans.notes.append(("adapter-names", text))
        for module in found.partners.values():
            self.check_plain(module)
        partners = {**found.partners, **tied}
        plain = {path: chain[0] for path, chain in chains.items() if not self.targeted(path, partners[path], chains)}
        self.turned.learn((change, base.weight(partners[path])) for path, change in plain.items())
        for path, chain in chains.items():
            if path in plain:
                self.take(base.names[partners[path]], chain[0], is_tied=path in tied)
                self.add(chain[0], partners[path])
            else:
                self.add_parameters(chain, self.targeted(path, partners[path], chains))
        for path, module in tied.items():
            text = (
                f"{base.path} has no {path!r}: it is tied to {base.names[module]!r}, which gets its change, as PEFT merges it."
            )
            self.plans.notes.append(("tied-target", text))
        return found.way

    def targeted(self, path: str, module: str, chains: Mapping[str, Sequence[Change]]) -> list[Parameter]:
        """The parameters of a module of the base that `target_parameters` names."""
        return [one for name in chains[path][0].parameters if (one := self.base.experts.find(module, name)) is not None]

    def add_parameters(self, changes: Sequence[Change], parameters: Sequence[Parameter]) -> None:
        """The changes of the parameters of one module."""
        for change, parameter, turned in assigned(changes, parameters, self.adapter, self.base.path):
            down, up = _matrix(change.down, change), _matrix(change.up, change)
            for name, first in parameter.pieces:
                self.check_plain(name.removesuffix(".weight"))
                self.take(name, change)
                self.base.entry(name)
                delta = Delta(
                    down, up, change.scale * self.weight, turned=turned, narrow=True,
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
        self.scales.add(change.scale)

    def check_plain(self, module: str) -> None:
        if module in self.base.quantised:
            raise ConvertError(
                f"{self.base.path} is quantised: it has {self.base.quantised[module]!r}.",
                why="A sum rounded to so few bits would lose most of what an adapter adds.",
                fix=MAKE_PLAIN,
            )

    def add(self, change: Change, module: str) -> None:
        name = self.base.names[module]
        entry, report = change.base or self.base.entry(name), self.report
        if fits(change, entry) is None:
            raise ConvertError(
                f"{self.given}: the factors of {change.module!r} make {made_shape(change)}; {name!r} is {list(entry.shape)}.",
                why=_OTHER_MODEL,
            )
        outputs = change.up.shape[0]
        if change.magnitude is not None and change.magnitude.numel != outputs:
            raise ConvertError(
                f"{self.given}: {change.module!r} has {change.magnitude.numel} magnitudes for {outputs} outputs."
            )
        if change.base is not None:
            self.check_replaces(name, change.base)
            self.plans.base_of(name, self.given, change.base)
        is_twice = change.inner and change.module.endswith("out_proj") and self.adapter.version <= _TWICE
        mica = self.adapter.config is not None and self.adapter.config.mica
        narrow = change.embedding or mica or name.endswith(_WEIGHTS[1])
        for is_narrow in (True, False) if is_twice else (narrow,):
            self.plans.change(name, self.given, self.delta(change, entry, narrow=is_narrow))
        report.twice += [module] if is_twice else []
        self.count(change)
        report.dora += change.magnitude is not None
        if change.bias is not None:
            self.add_bias(change, change.bias, module)

    def delta(self, change: Change, entry: Entry, *, narrow: bool) -> Delta:
        return Delta(
            _matrix(change.down, change), _matrix(change.up, change), change.scale * self.weight,
            turned=self.turned.is_turned(change, entry), narrow=narrow, by_down=change.embedding or len(entry.shape) > 2,
            magnitude=None if change.magnitude is None else _matrix(change.magnitude, change),
            mid=None if change.mid is None else _matrix(change.mid, change),
        )  # fmt: skip

    def add_bias(self, change: Change, bias: Entry, module: str) -> None:
        name = f"{module}.bias"
        if name not in self.base.tensors:
            raise ConvertError(f"{self.given} changes the bias of {module!r}, and {self.base.path} has no {name!r}.")
        entry = self.base.entry(name)
        if entry.shape != bias.shape:
            raise ConvertError(
                f"{self.given}: the bias of {change.module!r} is {list(bias.shape)}; {name!r} is {list(entry.shape)}."
            )
        self.plans.add(name, self.given, Addend(_matrix(bias, change), change.scale * self.weight))
        self.report.biases += 1

    def add_difference(self, difference: Difference, way: Way) -> None:
        """What is added as it is to a weight or a bias."""
        modules, entry = self.base.modules, difference.entry
        known = (modules.flat if difference.flat else modules.paths).get(way(difference.module) or "", [])
        name = f"{known[0]}.{difference.ending}" if len(known) == 1 else ""
        if name not in self.base.tensors:
            raise ConvertError(
                f"{self.given}: the {difference.ending} of {difference.module!r} has no partner in {self.base.path}.",
                why=_OTHER_MODEL,
            )
        self.check_plain(known[0])
        self.take(name, difference)
        if self.base.entry(name).shape != entry.shape:
            raise ConvertError(
                f"{self.given}: the difference of {name!r} is {list(entry.shape)}; it is {list(self.base.entry(name).shape)}."
            )
        matrix = Matrix(difference.module, row_major(entry), entry.dtype, entry.shape)
        self.plans.add(name, self.given, Addend(matrix, self.weight))
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
            if name is None or config is None or not (config.saves(path) or (config.ties and last_name(module) in _TIED)):
                raise ConvertError(
                    f"{self.given}: {path!r} has no partner in {base.path}, and is of no module that the adapter saves whole.",
                    why=_OTHER_MODEL,
                )
            self.report.added.append(name)
        self.plans.put(name, self.given, entry)

    def check_saved(self) -> None:
        """Raise ConvertError for a module that the adapter should hold whole, and does not."""
        for module in self.adapter.config.modules_to_save if self.adapter.config is not None else ():
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
        if is_embedding(module, self.base.tensors) and not any(
            last_name(one) in _TIED
            for one in (*self.base.names, *(path.removesuffix(".weight") for path in self.adapter.saved))
            if last_name(one) != last_name(module)
        ):
            text = (
                f"{name!r} is the adapter's own: a head that the loader ties to it gets that too; PEFT would keep the old one."
            )
            self.plans.notes.append(("tied-target", text))

    def check_replaces(self, name: str, entry: Entry) -> None:
        """A resized embedding has more rows, or fewer; all else is of one shape."""
        base = self.base.tensors[name]
        shape = base.shape if type(base) is Entry else None
        if shape is None or entry.shape[1:] != shape[1:] or len(entry.shape) != len(shape):
            has = "no plain tensor" if shape is None else list(shape)
            raise ConvertError(
                f"{self.given}: {name!r} is {list(entry.shape)}; in {self.base.path} it is {has}.", why=_OTHER_MODEL
            )


_OTHER_MODEL = "The adapter is for another model, or another size of it."


def _by_module(changes: Sequence[Change]) -> dict[str, list[Change]]:
    found: dict[str, list[Change]] = {}
    for change in changes:
        found.setdefault(change.module, []).append(change)
    return found


def _matrix(entry: Entry, change: Change) -> Matrix:
    return Matrix(change.module, row_major(entry), entry.dtype, entry.shape)


def _quantised(tensors: Mapping[str, Node]) -> dict[str, str]:
    found = {}
    for name in tensors:
        for ending in _QUANTISED:
            if name.endswith(f".{ending}"):
                found[name[: -len(ending) - 1]] = name
    return found


def _no_partners(given: str, base: str, changes: Sequence[Change], found: Found) -> ConvertError:
    if found.several:
        places = listed([repr(way.add or "(the names as they are)") for way in found.several], 3)
        return ConvertError(
            f"{given}: its modules have several partners in {base}, below {places}.",
            fix="Choose one: `select=WHERE`, or `keep` and `drop` before.",
        )
    component, count = changes[0].component, len(_by_module(changes))
    fix = "ckpt inspect shows the names of both."
    if component and len(found.missing) == count:
        prefix = f"{component}_*" if changes[0].flat else f"{component}.*"
        fix = f"If {component} is another file, make adapters of one component each: `keep={prefix!r}` or `drop={prefix!r}`."
    return ConvertError(
        f"{given} changes {count} modules, and {len(found.missing)} of them are not in {base}: {some(found.missing)}.",
        why="Left out, they would be lost.", fix=fix,
    )  # fmt: skip


Fits = Callable[[str, str], bool]
_MOST_WAYS = 1000  # prefixes that are tried; a model has one


@dataclass(frozen=True, slots=True)
class Way:
    """What leads from an adapter's paths to those of a base: a prefix less, a prefix more."""

    strip: str = ""
    add: str = ""

    def __call__(self, path: str) -> str | None:
        """The path in the base; None where the adapter's does not begin so."""
        return self.add + path[len(self.strip) :] if path.startswith(self.strip) else None


@dataclass(frozen=True, slots=True)
class Found:
    """What was found."""

    partners: Mapping[str, str] = field(default_factory=dict)
    way: Way | None = None
    missing: Sequence[str] = ()
    several: Sequence[Way] = ()


class Modules:
    """The modules of a base, by their paths without wrappers; for an adapter with underscores for dots also by such."""

    def __init__(self, paths: Iterable[str]) -> None:
        self.all = set(paths)
        self.paths: dict[str, list[str]] = {}
        for path in self.all:
            self.paths.setdefault(unwrap(f"{path}.")[:-1], []).append(path)
        for path, own in list(self.paths.items()):  # transformers 5 writes Mixtral by its old names
            self.paths.setdefault(path.replace(".block_sparse_moe.", ".mlp."), own)
        self.flat: dict[str, list[str]] = {}
        for path, own in self.paths.items():
            self.flat.setdefault(path.replace(".", "_"), []).extend(own)
        for path, name in in_other_layout(self.paths):
            self.flat.setdefault(name.replace(".", "_"), []).extend(self.paths[path])

    def find(self, wanted: Sequence[str], *, flat: bool, fits: Fits) -> Found:
        """The partners of all paths by one way; exactly the same paths before any other way."""
        known = self.flat if flat else self.paths
        if not wanted:
            return Found(way=Way())
        separator = "_" if flat else "."
        ways = [Way(), *_ways(wanted[0], known, separator)][:_MOST_WAYS]
        whole = [way for way in ways if all(way(path) in known for path in wanted)]
        good = [way for way in whole if all(any(fits(path, base) for base in known[way(path) or ""]) for path in wanted)]
        if not whole:
            best = max(ways, key=lambda way: sum(way(path) in known for path in wanted))
            return Found(missing=[path for path in wanted if best(path) not in known])
        chosen = good or whole
        if len(chosen) > 1 and chosen[0] != Way():
            return Found(several=chosen)
        way = chosen[0]
        partners = {path: known[way(path) or ""] for path in wanted}
        if doubled := next((bases for bases in partners.values() if len(bases) > 1), None):
            return Found(several=[Way("", base) for base in doubled])
        return Found({path: bases[0] for path, bases in partners.items()}, way)


def _ways(path: str, known: Iterable[str], separator: str) -> list[Way]:
    """The ways from one path to all that end as it does: the longer the common end the earlier."""
    parts = path.split(separator)
    found: dict[Way, int] = {}
    for base in known:
        common = _common_end(parts, base.split(separator))
        if common and (separator == "." or common == len(parts)):  # of a part with underscores only the whole is meant
            end = len(separator.join(parts[-common:]))
            found[Way(path[: len(path) - end], base[: len(base) - end])] = common
    found.pop(Way(), None)
    return sorted(found, key=lambda way: -found[way])


def _common_end(one: Sequence[str], other: Sequence[str]) -> int:
    count = 0
    for left, right in zip(reversed(one), reversed(other), strict=False):
        if left != right:
            break
        count += 1
    return count


# --- all of them


class Merging:
    """The adapters that are merged into one state dict: planned one by one, then applied together."""

    def __init__(self, root: Node, node: Dict, path: str) -> None:
        self.root, self.node = root, node
        self.base = Base(dict(tensors_by_name(node)), path)
        self.entries: dict[tuple[int, str], tuple[str, Entry]] = {}
        self.deltas: dict[tuple[int, str], list[Delta]] = {}
        self.addends: dict[tuple[int, str], list[Addend]] = {}
        self.own: dict[str, tuple[str, Entry]] = {}
        self.based: dict[tuple[int, str], tuple[str, Entry | None]] = {}
        self.changed: dict[str, str] = {}  # name -> the adapter that changed it last
        self.equal_bases: list[Node] = []
        self.notes: list[tuple[str, str]] = []

    @property
    def taken_in(self) -> list[Node]:
        """What is not written: the base's tensors in whose place the adapter's come, and the adapter's that are equal."""
        replaced = [node for name in self.own if (node := self.base.tensors.get(name)) is not None]
        replaced += [self.entries[key][1] for key, (_, own) in self.based.items() if own is not None]
        return replaced + self.equal_bases

    def plan(self, adapter: Adapter, given: str, weight: float) -> Merged:
        return Planning(self.base, self, adapter, given, weight).run()

    def change(self, name: str, given: str, delta: Delta) -> None:
        self.changed[name] = given
        self.deltas.setdefault(self._key(name), []).append(delta)

    def base_of(self, name: str, given: str, entry: Entry) -> None:
        """What the weight was before the change, by the adapter: the base's own, or it comes in its place, as PEFT loads it."""
        old = self.base.entry(name)
        is_same = old.shape == entry.shape and same_content(row_major(old), _as_dtype(name, entry, old.dtype))
        new = None if is_same else entry
        self.equal_bases += [entry] * is_same
        key = self._key(name)
        before = self.based.setdefault(key, (given, new))
        if before[1] is not new and given != before[0]:
            raise ConvertError(f"{before[0]} and {given} were trained on different weights {name!r}, which both hold.")
        if new is not None and before[1] is new:
            text = f"{given} contains the {name!r} that it was trained on, not that of {self.base.path}; that one is written."
            self.notes.append(("adapters-base", text))

    def add(self, name: str, given: str, addend: Addend) -> None:
        self.changed[name] = given
        self.addends.setdefault(self._key(name), []).append(addend)

    def put(self, name: str, given: str, entry: Entry) -> None:
        """A tensor is exchanged for the adapter's own, or is new."""
        if name in self.own:
            raise ConvertError(f"Two adapters have a {name!r} of their own: {self.own[name][0]} and {given}.")
        self.own[name] = given, entry

    def _key(self, name: str) -> tuple[int, str]:
        entry = self.base.entry(name)
        key = view_of(entry)
        self.entries.setdefault(key, (name, entry))
        return key

    def apply(self) -> Node:
        """Put what was planned into the tree; returns its root."""
        need_torch("`lora` adds an adapter to the weights with it.")
        if (name := next((name for name in self.own if name in self.changed), None)) is not None:
            raise ConvertError(f"{self.changed[name]} changes {name!r}, which {self.own[name][0]} holds whole.")
        self._check_alone()
        made = {key: self._made(key, number) for number, key in enumerate(self.entries)}

        def swap(node: Node) -> Node:
            if type(node) is not Entry or (key := view_of(node)) not in made:
                return node
            return replace(made[key], kind=node.kind, requires_grad=node.requires_grad)

        root = exchange.replace(self.root, swap)
        self._put_own()
        return root

    def _made(self, key: tuple[int, str], number: int) -> Entry:
        name, entry = self.entries[key]
        if (own := self.based.get(key, ("", None))[1]) is not None:
            content = _as_dtype(name, own, entry.dtype)
            entry = _alone(entry, "", content, entry.dtype, own.shape)
        matrix = Matrix(name, row_major(entry), entry.dtype, entry.shape)
        if key in self.deltas and key in self.addends:
            raise ConvertError(f"{name!r} is changed by matrices and by a full difference: merge one adapter after the other.")
        content = merged(matrix, self.deltas[key]) if key in self.deltas else biased(matrix, self.addends[key])
        extras = replace(entry.extras, metadata=None) if entry.extras else None  # the conj and neg bits are worked in
        return _alone(replace(entry, extras=extras), f"merged{number}", content, entry.dtype, entry.shape)

    def _put_own(self) -> None:
        """Exchange what the adapters hold whole, in the dtype of the base; what is new comes last."""
        tensors = tensors_by_name(self.node)
        like = next((node for node in tensors.values() if type(node) is Entry), None)
        new: dict[str, Entry] = {}
        for number, (name, (_, entry)) in enumerate(self.own.items()):
            base = tensors.get(name)
            both_floats = type(base) is Entry and {base.dtype.family, entry.dtype.family} == {"float"}
            dtype = base.dtype if type(base) is Entry and both_floats else entry.dtype
            content = _as_dtype(name, entry, dtype)
            new[name] = _alone(base if type(base) is Entry else like or entry, f"own{number}", content, dtype, entry.shape)
        self.node.items[:] = [(key, new.pop(key, value) if type(key) is str else value) for key, value in self.node.items]
        self.node.items += new.items()

    def _check_alone(self) -> None:
        """Views that overlap what is changed, and are not it, would no longer be views of it."""
        changed: dict[int, list[tuple[str, Entry]]] = {}
        for name, entry in self.entries.values():
            changed.setdefault(id(entry.storage), []).append((name, entry))
        for tensor in find_tensors(self.root):
            node = tensor.node
            if type(node) is not Entry or id(node.storage) not in changed:
                continue
            for name, entry in changed[id(node.storage)]:
                apart = node.offset >= entry.offset + entry.span or entry.offset >= node.offset + node.span
                if not apart and view_of(node) != view_of(entry):
                    raise ConvertError(
                        f"{self.base.path}: {tensor.where[-1]!r} shares memory with {name!r}, and is not the same tensor.",
                        why="One would be changed and not the other.",
                        fix="Convert the base to safetensors first, where each tensor has its own memory.",
                    )


def _as_dtype(name: str, entry: Entry, dtype: DType) -> Content:
    return recast(Matrix(name, row_major(entry), entry.dtype, entry.shape), dtype)


def _alone(like: Entry, key: str, content: Content, dtype: DType, shape: tuple[int, ...]) -> Entry:
    """An entry like another, row-major on a storage of its own."""
    storage = Storage(key, dtype if dtype.storage else None, content.length, like.storage.device, content)
    return replace(like, storage=storage, dtype=dtype, shape=shape, stride=contiguous_stride(shape), offset=0)
