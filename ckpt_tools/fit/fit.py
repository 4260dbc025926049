"""Fit a state dict to a target: what a matching leaves over gets the fate that the user chose, or is an error that lists it."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace

from ckpt_tools.errors import ConvertError, MatchError
from ckpt_tools.fit import plans
from ckpt_tools.fit.adapting import Adapted, adapt, is_convolution, overlap
from ckpt_tools.fit.initialisers import Blank, Rules, Scheme, content, resolve
from ckpt_tools.fit.options import OnMismatch
from ckpt_tools.fit.plans import Plan
from ckpt_tools.formats.contents import is_tensor, tensors_by_name
from ckpt_tools.io.content import Content
from ckpt_tools.matching.advice import Extra, extras
from ckpt_tools.matching.pairing import may_be_reshaped
from ckpt_tools.matching.records import Shape
from ckpt_tools.text import listed, shape_text
from ckpt_tools.tree.globs import Globs
from ckpt_tools.tree.names import between, module_paths
from ckpt_tools.tree.nodes import Dict, Entry, Node, stored
from ckpt_tools.tree.parametrized import is_part, part_of
from ckpt_tools.values.numeric import row_major, same_content, view_of


@dataclass(frozen=True, slots=True)
class Initialised:
    """A tensor, or a part of one, that got initial values: its name, the scheme, the seed, the shape that was filled."""

    name: str
    scheme: str
    seed: int
    shape: list[int]


@dataclass(frozen=True, slots=True)
class Wanted:
    """What the target wants."""

    names: Sequence[str]
    blank_of: Callable[[str], Blank]
    own: Callable[[str], Content] | None
    ties: Mapping[str, str]
    label: str


@dataclass(slots=True)
class Fitted:
    """What became of the tensors of a state dict that now fits."""

    tensors: dict[str, Node] = field(default_factory=dict)
    initialised: list[Initialised] = field(default_factory=list)
    kept_own: list[str] = field(default_factory=list)
    adapted: dict[str, str] = field(default_factory=dict)
    skipped: dict[str, tuple[Shape, Shape]] = field(default_factory=dict)
    missing: list[str] = field(default_factory=list)
    unexpected: list[str] = field(default_factory=list)


def fit(node: Dict, plan: Plan, wanted: Wanted, choices: Choices) -> Fitted:
    """Make a state dict what a plan says, in place, and give what the plan leaves over the fate that was chosen."""
    work = _Fitting(tensors_by_name(node), wanted, choices)
    work.check(plan)
    plans.apply(node, plan)
    for step in plan.steps:
        for number, name in enumerate(step.new if step.step != "copy" else ()):
            old = f"{' + '.join(map(shape_text, step.old_shapes[:8]))}{' + ...' if len(step.old) > 8 else ''}"
            shapes = f"{old} -> {shape_text(step.new_shapes[number])}"
            work.result.adapted[name] = f"{step.step} of {listed(step.old, 8)}, {shapes}"
    work.result.tensors.update(tensors_by_name(node))
    for old, new, _, after in plan.mismatched:
        work.resize(old, new, after)
    for name in plan.missing:
        work.initialise(name)
    work.check_ties()
    choices.reinit.check_used()
    tensors = work.result.tensors
    order = {name: number for number, name in enumerate(wanted.names or tensors)}
    work.result.tensors = {name: tensors[name] for name in sorted(tensors, key=lambda name: order.get(name, len(order)))}
    others = [(key, value) for key, value in node.items if not is_tensor(value)]
    node.items[:] = [*work.result.tensors.items(), *_moved(others, plan.renames)]
    return work.result


def left_out(plan: Plan, fitted: Fitted) -> list[str]:
    """The names of the checkpoint that the plan or a choice leaves out, or that are made anew."""
    not_copied = fitted.skipped.keys() | {row.name for row in fitted.initialised}
    return [*plan.drop, *fitted.unexpected, *(old for old, new, _, _ in plan.mismatched if new in not_copied)]


def _moved(others: list[tuple[Node, Node]], renames: Mapping[str, str]) -> list[tuple[Node, Node]]:
    """What is not a tensor; the extra state of a module goes where its tensors go."""
    paths = {key: key.rpartition(".")[0] for key, _ in others if type(key) is str and key.endswith("_extra_state")}
    moves = module_paths(renames, set(paths.values())) if paths else {}
    new = {key: f"{moves[path]}.{key.rpartition('.')[2]}".lstrip(".") for key, path in paths.items() if path in moves}
    return [(new.get(key, key) if type(key) is str else key, value) for key, value in others]


class _Fitting:
    def __init__(self, source: Mapping[str, Node], wanted: Wanted, choices: Choices) -> None:
        self.source, self.wanted, self.choices, self.seed = source, wanted, choices, choices.seed
        shapes = {name: wanted.blank_of(name).shape for name in wanted.names}
        convolutions = {name: shape for name, shape in shapes.items() if is_convolution(shape)}
        self.first, self.patches = next(iter(convolutions), ""), {shape[0] for shape in convolutions.values()}
        self.result = Fitted()
        self.made: dict[tuple[str, object], Node] = {}
        self.storages = NewStorages(source.values())

    def check(self, plan: Plan) -> None:
        """Sort what is left over into what a choice covers and what is an error."""
        choices, result = self.choices, self.result
        missing = [name for name in plan.missing if choices.reinit.of(name) is None]
        may_miss, may_be_unexpected = Globs(choices.allow_missing), Globs(choices.allow_unexpected)
        result.missing = [name for name in missing if may_miss.matching(name)]
        result.unexpected = [name for name in plan.unexpected if may_be_unexpected.matching(name)]
        missing, unexpected = _without(missing, result.missing), _without(plan.unexpected, result.unexpected)
        refused = [
            row for row in plan.mismatched if choices.on_mismatch == "error" and self.adapted(row[0], row[1], row[3]) is None
        ]
        if missing or unexpected or refused or plan.ambiguous:
            label, wanted = self.wanted.label, [*plan.missing, *(new for new, _, _ in plan.ambiguous)]
            spare = self.extras(_without(unexpected, {old for _, names, _ in plan.ambiguous for old in names}), wanted)
            raise _of_prefix(label, missing, unexpected, in_code=choices.in_code) or _left_over(
                label, missing, unexpected, refused, plan.ambiguous, spare, in_code=choices.in_code
            )

    def extras(self, unexpected: Sequence[str], missing: Sequence[str]) -> list[Extra]:
        """What the target has nothing like, where it is known what that wants."""
        if not unexpected or not self.wanted.names:
            return []
        shapes = {name: node.shape if type(node) is Entry else () for name, node in self.source.items()}
        return extras(unexpected, shapes, {name: self.wanted.blank_of(name).shape for name in missing})

    def resize(self, old: str, new: str, shape: Shape) -> None:
        entry, choice = self.source[old], self.choices.on_mismatch
        blank = self.blank(new, entry, shape)
        before = entry.shape if type(entry) is Entry else ()
        if (adapted := self.adapted(old, new, shape)) is not None:
            self.result.adapted[new] = adapted.what
            self.once(new, entry, lambda: self.storages.entry(adapted.content, blank, entry))
        elif choice == "skip":
            self.result.skipped[new] = (before, shape)
        elif choice == "reinit":
            self.initialise(new, entry, blank)
        else:
            self.once(new, entry, lambda: self.overlap(new, entry, blank))

    def adapted(self, old: str, new: str, shape: Shape) -> Adapted | None:
        """What a rule makes of a mismatch, where `adapt` is chosen."""
        entry = self.source.get(old)
        if type(entry) is not Entry or not self.choices.adapt:
            return None
        return adapt(new, entry, shape, first=new == self.first, patches=self.patches)

    def overlap(self, name: str, entry: Node, blank: Blank) -> Entry:
        """The part of a tensor that fits, and initial values."""
        plain = type(entry) is Entry and entry.dtype.in_torch and entry.dtype.packed == 1
        if type(entry) is not Entry or not plain or not blank.shape or len(blank.shape) != len(entry.shape):
            raise ConvertError(
                f"{name!r} cannot overlap: the checkpoint's has another number of dimensions, or is not a plain tensor.",
                fix="Initialise it (`on_mismatch='reinit'`), or leave it out (`on_mismatch='skip'`).",
            )
        kept = tuple(min(pair) for pair in zip(entry.shape, blank.shape, strict=True))
        scheme = self.scheme(name, blank) if kept != blank.shape else None
        if scheme is not None:
            if scheme.kind == "target":
                raise ConvertError(f"{name!r}: the rest of an overlap cannot be the target's own.", fix="Name another scheme.")
            self.result.initialised.append(Initialised(name, f"{scheme}, where nothing overlaps", self.seed, list(blank.shape)))
        made = overlap(entry, blank, kept, scheme, self.seed)
        self.result.adapted[name] = made.what
        return self.storages.entry(made.content, blank, entry)

    def initialise(self, name: str, like: Node = None, blank: Blank | None = None) -> None:
        if like is None and self.choices.reinit.of(name) is None:
            return  # allowed to be missing
        blank = blank or self.blank(name, like)
        scheme = self.scheme(name, blank, Scheme("default"))
        said = f"{scheme}{'' if self.choices.reinit.of(name) else ', by default'}"
        self.result.initialised.append(Initialised(name, said, self.seed, list(blank.shape)))
        if scheme.kind != "target":
            made: Content = content(scheme, blank, self.seed)
        elif self.wanted.own is not None:
            made, blank = self.wanted.own(name), self.blank(name, None)
        else:
            self.result.kept_own.append(name)
            return
        self.once(name, None, lambda: self.storages.entry(made, blank, like))

    def scheme(self, name: str, blank: Blank, unless: Scheme | None = None) -> Scheme:
        """The chosen scheme, resolved for this tensor; another one unless there is one."""
        scheme = self.choices.reinit.of(name) or unless
        if scheme is None:
            typed, in_code = f"`reinit='{name}=normal:0.02'`", f"reinit={{'{name}': 'normal:0.02'}}"
            raise MatchError(
                f"{name!r} needs initial values, and no initialiser was given.", why=f"Its shape is {shape_text(blank.shape)}.",
                fix=in_code if self.choices.in_code else typed,
            )  # fmt: skip
        return resolve(scheme, blank)

    def blank(self, name: str, like: Node, shape: Shape | None = None) -> Blank:
        """What is wanted under a name; in the dtype of the tensor that it replaces, and tied ones under their first name."""
        if name in self.wanted.ties:
            blank = replace(self.wanted.blank_of(name), name=self.wanted.ties[name])
        elif type(like) is Entry:
            blank = Blank(name, like.shape, like.dtype)
        else:
            raise MatchError(f"{name!r} is missing, and a plan does not describe it.", fix="Give `like=TARGET` too.")
        blank = blank if shape is None else replace(blank, shape=shape)
        return replace(blank, dtype=like.dtype) if type(like) is Entry else blank

    def check_ties(self) -> None:
        """One tensor of the target under two names takes one value."""
        for name, first in self.wanted.ties.items():
            one, other = self.result.tensors.get(first), self.result.tensors.get(name)
            if type(one) is not Entry or type(other) is not Entry or view_of(one) == view_of(other):
                continue
            if not same_content(row_major(one), row_major(other)):
                raise ConvertError(
                    f"{self.wanted.label}.",
                    why=f"{first!r} and {name!r} are one tensor in it, and two different ones in the checkpoint.",
                    fix="Untie them in the model, or choose one in the file: ckpt convert --drop.",
                )

    def once(self, name: str, entry: Node, make: Callable[[], Entry]) -> None:
        """A new tensor under a name; what is made for tied names is made once."""
        view = (id(entry.storage), entry.offset, entry.stride) if type(entry) is Entry else None
        key = (self.wanted.ties.get(name, name), view)
        if key not in self.made:
            self.made[key] = make()
        self.result.tensors[name] = self.made[key]


class NewStorages:
    """Storages for what is new, under keys that nothing has, on the device that most of the others have."""

    def __init__(self, nodes: Iterable[Node]) -> None:
        entries = [node for node in nodes if type(node) is Entry]
        self.prefix = "new"
        while any(entry.storage.key.startswith(self.prefix) for entry in entries):
            self.prefix += "_"
        devices = Counter(entry.storage.device for entry in entries)
        self.device = devices.most_common(1)[0][0] if devices else None
        self.count = 0

    def entry(self, made: Content, blank: Blank, like: Node) -> Entry:
        self.count += 1
        entry = stored(f"{self.prefix}{self.count}", blank.dtype, blank.shape, made, self.device)
        return replace(entry, requires_grad=like.requires_grad, kind=like.kind) if type(like) is Entry else entry


# --- what is left over


_MOST_GLOBS = 6  # in one message


def _left_over(
    label: str, missing: Sequence[str], unexpected: Sequence[str], mismatched: Sequence[tuple[str, str, Shape, Shape]],
    ambiguous: Sequence[tuple[str, tuple[str, ...], str]], spare: Sequence[Extra], *, in_code: bool,
) -> MatchError:  # fmt: skip
    """The error that lists all of it, with the choices that there are."""
    shapes = [f"{new} ({shape_text(before)}, wanted {shape_text(after)})" for _, new, before, after in mismatched]
    candidates = [f"{new} ({why}: {', '.join(names[:3])})" for new, names, why in ambiguous]
    groups = {"missing": missing, "unexpected": unexpected, "mismatched": shapes, "ambiguous": candidates}
    said = [f"{len(rows)} {word}: {listed(rows, 6)}." for word, rows in groups.items() if rows]
    advice = []
    names = (*missing, *unexpected, *(new for _, new, _, _ in mismatched))
    if any(map(part_of, names)):  # without one of the parts the others are other weights
        advice.append("weight norm, spectral norm and pruning keep a weight in parts, which are folded where all are there")
    elif any(map(is_part, unexpected)):
        advice.append("dequantise it first" if in_code else "`dequantize='bf16'` makes plain weights of quantised ones")
    else:
        allow = ", or `allow_missing=[GLOB, ...]`" if in_code else ""
        advice += [f"initialise missing ones with `reinit=SCHEME`{allow}"] * bool(missing)
        others = "or `adapt`" if in_code else "`adapt`, or a step of a `plan`"
        reshaped = [row for row in mismatched if may_be_reshaped(*row)]
        advice += ["for shapes that differ by sizes of 1 or a flatten use `allow_reshape`"] * bool(reshaped)
        other = len(mismatched) > len(reshaped)
        advice += [f"for other shapes use `on_mismatch=reinit, overlap or skip`, {others}"] * other
    if globs := [extra.glob for extra in spare[:_MOST_GLOBS]]:
        drops = [f"`allow_unexpected={globs!r}`"] if in_code else [f"`drop={glob!r}`" for glob in globs]
        advice.append(f"leave what is not in the target out with {' '.join(drops)}")
    left = len(unexpected) - sum(len(extra.names) for extra in spare)
    if ambiguous or (left and not any(map(is_part, unexpected))):
        partners = "`pair='OLD=NEW'`" if in_code else "`pair='OLD=NEW'` or `plan`"
        advice.append(f"name the partners with {partners}; `match='structure'` looks further")
    text = "; ".join(advice)
    why = " ".join([*said, *(f"{extra.text}." for extra in spare[:_MOST_GLOBS])])
    return MatchError(f"{label}.", why=why, fix=f"{text[:1].upper()}{text[1:]}.")


def _of_prefix(label: str, missing: Sequence[str], unexpected: Sequence[str], *, in_code: bool) -> MatchError | None:
    """The error where names of one side are those of the other behind a plain prefix: that is what to mend first."""
    taken, given = between(unexpected, missing), between(missing, unexpected)
    prefix = taken or given
    if prefix is None:
        return None
    longer = unexpected if taken is not None else missing
    sides = ("in the checkpoint", "yours") if taken is not None else ("of yours", "the checkpoint's")
    who = (
        f"Every name {sides[0]} is"
        if len(prefix.longer) == len(longer)
        else f"{len(prefix.longer)} of the names {sides[0]} are"
    )
    option = f"strip_prefix={prefix.text!r}" if taken is not None else f"add_prefix={prefix.text!r}"
    return MatchError(
        f"{label}.",
        why=f"{who} {prefix.text!r} plus {sides[1]}.",
        fix='match="names" takes a common prefix.' if in_code else f"Give `{option}` too.",
    )


def _without(names: Sequence[str], taken: Iterable[str]) -> list[str]:
    known = frozenset(taken)
    return [name for name in names if name not in known]


# --- what a user chose for tensors without a partner, or of another shape


@dataclass(slots=True)
class Choices:
    """What is to happen to tensors without a partner."""

    reinit: Rules
    on_mismatch: OnMismatch = "error"
    adapt: bool = False
    seed: int = 0
    allow_missing: Sequence[str] = ()
    allow_unexpected: Sequence[str] = ()
    in_code: bool = False
