"""`--like` and `--plan` of a conversion: fit the state dict of a tree to a target, and carry along what goes by its names."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from functools import cache
from graphlib import CycleError, TopologicalSorter
from typing import cast

from ckpt_tools.edit import renaming
from ckpt_tools.edit.parametrized import fold_for
from ckpt_tools.edit.selection import only_state_dict
from ckpt_tools.errors import ConvertError, MatchError, UsageError
from ckpt_tools.fit.fit import Choices, Initialised, Wanted, fit, left_out
from ckpt_tools.fit.forms import MissingSizesError, Task, solve
from ckpt_tools.fit.initialisers import Blank, Rules, blank_for, check_finite
from ckpt_tools.fit.options import FitOptions
from ckpt_tools.fit.partners import look_at
from ckpt_tools.fit.plan_files import read_any_plan
from ckpt_tools.fit.plans import Plan, PlanStep, StepName, plan_of
from ckpt_tools.fit.rows import BETWEEN, Binding, Index, NamePattern, PatternPlan, PatternStep
from ckpt_tools.fit.targets import Target, read_target, tensors_of
from ckpt_tools.fit.values import Config, Values
from ckpt_tools.formats.checkpoint import Checkpoint
from ckpt_tools.formats.contents import find_optimizers, is_tensor, tensors_by_name
from ckpt_tools.io.content import Content
from ckpt_tools.matching.records import Shape
from ckpt_tools.text import dotted, listed
from ckpt_tools.tree.nodes import Dict, Entry, Node
from ckpt_tools.tree.parametrized import Parametrized
from ckpt_tools.values.numeric import live_content, row_major

# --- a plan of patterns for one checkpoint


@dataclass(slots=True)
class Expanded:
    plan: Plan
    dropped: dict[str, str]
    values: dict[str, str]


def expand(plan: PatternPlan, shapes: Mapping[str, Shape], values: Values, others: Iterable[str] = ()) -> Expanded:
    """Make the plan for a checkpoint with these tensors; `others` names the values beside them, which a step may drop."""
    work = _Expansion(plan, shapes, values)
    stripped: dict[str, Shape] = {}
    for name, shape in shapes.items():
        plain = name.removeprefix(plan.prefix_old)
        stripped.setdefault(plain, shape)
        if name.startswith(BETWEEN) or not work.claim(name, plain):
            work.unclaimed.append(name)
    values.settle(plan, stripped)
    work.check_complete()
    for number in _ordered(plan.steps):
        work.do(number)
    steps = sorted(work.steps, key=lambda made: made[0])  # in the checkpoint's order, and stable: what is needed comes first
    between = frozenset(name for name in work.shapes if name not in shapes)
    made = Plan(tuple(step for _, step in steps), drop=tuple(work.dropped), between=between)
    for name in others:
        for (number, _), _ in work.index.find(name.removeprefix(plan.prefix_old)):
            if plan.steps[number].step == "drop":
                work.dropped[name] = plan.steps[number].reason
    return Expanded(made, work.dropped, values.told())


class _Expansion:
    def __init__(self, plan: PatternPlan, shapes: Mapping[str, Shape], values: Values) -> None:
        self.plan, self.values, self.shapes = plan, values, dict(shapes)
        self.positions = {name: at for at, name in enumerate(shapes)}
        self.claims = [[dict[Binding, str]() for _ in step.old] for step in plan.steps]
        self.unclaimed: list[str] = []
        self.steps: list[tuple[int, PlanStep]] = []
        self.dropped: dict[str, str] = {}
        self.index = Index()  # without the prefix that names may have
        for number, step in enumerate(plan.steps):
            for place, pattern in enumerate(step.old):
                self.index.add(NamePattern.read(pattern.text.removeprefix(plan.prefix_old)), (number, place))

    # --- who gets which tensor

    def claim(self, name: str, plain: str) -> bool:
        """Give a tensor to the step that names it; False where none does."""
        hits = self.index.find(plain)
        if len(hits) > 1:
            labels = [self.plan.steps[number].label for (number, _), _ in hits[:2]]
            raise MatchError(f"Two steps of the plan claim {name!r}.", why=f"{labels[0]}; {labels[1]}.")
        for (number, place), binding in hits:
            other = self.claims[number][place].setdefault(binding, name)
            if other != name:
                raise MatchError(f"The checkpoint has {other!r} and {name!r}, which are one name to the plan.",
                                     why=f"Its names may begin with {self.plan.prefix_old!r}, or not.")  # fmt: skip
        return bool(hits)

    def check_complete(self) -> None:
        """Raise MatchError unless every pattern has its tensors and every tensor its step."""
        lacking = [
            step.old[0].text
            for step, claims in zip(self.plan.steps, self.claims, strict=True)
            if step.old and not (step.optional or any(claims) or self._tied(step))
            if not any(pattern.text.startswith(BETWEEN) for pattern in step.old)
        ]
        why = []
        if lacking:
            why.append(f"{len(lacking)} of its patterns match nothing: {listed(lacking, 3)}.")
        if self.unclaimed:
            why.append(f"{len(self.unclaimed)} tensors are not named in it: {listed(self.unclaimed, 6)}.")
        if not why:
            why += self._gaps() or self._missing_numbers()
        if why:
            raise MatchError(
                f"The checkpoint is not what the plan {self.plan.label} is for.", why=" ".join(why),
                fix="Leave out what does not belong there (`select`, `drop`), or give it a step in a plan of your own.",
            )  # fmt: skip

    def _tied(self, step: PatternStep) -> str | None:
        """The tensor that stands for one without a name of its own."""
        if step.tied is None:
            return None
        prefix, old = self.plan.prefix_old, step.tied.old
        names = (old, f"{prefix}{old}", old.removeprefix(prefix))
        return next((name for name in names if name in self.shapes or name.startswith(BETWEEN)), None)

    def _gaps(self) -> list[str]:
        """A layer that lacks what the others have."""
        alike: dict[frozenset[str], dict[Binding, str]] = defaultdict(dict)
        rows = [
            (pattern, claimed)
            for step, claims in zip(self.plan.steps, self.claims, strict=True)
            for pattern, claimed in zip(step.old, claims, strict=True)
            if not step.optional and not pattern.text.startswith(BETWEEN) and (claimed or step.tied is None)
        ]
        for pattern, claimed in rows:
            for binding, name in claimed.items():
                alike[pattern.names].setdefault(binding, name)
        for pattern, claimed in rows:
            if lacking := [row for row in alike[pattern.names].items() if row[0] not in claimed]:
                binding, other = lacking[0]
                return [f"It has {other!r}, and no {pattern.fill(dict(binding))!r}."]
        return []

    def _missing_numbers(self) -> list[str]:
        """A number that no tensor has: a whole layer that is not there."""
        for placeholder, keys in self.plan.numbered.items():
            bindings = (dict(binding) for claims in self.claims for claimed in claims for binding in claimed)
            found = {int(binding[placeholder]) for binding in bindings if placeholder in binding}
            said = self.values.config.find(keys)
            count = max(len(found), said[0] if said is not None else 0)
            lacking = next((number for number in range(count) if number not in found), None)
            if lacking is not None:
                who = f", and {said[1]} is {said[0]}" if said is not None else ""
                return [f"It has tensors of {len(found)} layers, none of them with the number {lacking}{who}."]
            if said is not None and len(found) > said[0]:
                return [f"It has {len(found)} layers, and {said[1]} is {said[0]}."]
        return []

    # --- one step after the other

    def do(self, number: int) -> None:
        step, claims = self.plan.steps[number], self.claims[number]
        if not step.old:
            return
        if step.step == "drop":
            self.dropped.update(dict.fromkeys(claims[0].values(), step.reason))
        elif any(claims):
            for binding, olds in _gathered(step, claims[0]) if step.gathers is not None else _beside(step, claims):
                self._add(step, olds, binding)
        elif (name := self._tied(step)) is not None and step.tied is not None:
            if step.tied.config is not None and self.values.config.says(step.tied.config, False):
                said = f"{self.values.config.label} says {step.tied.config} = false"
                raise MatchError(f"The checkpoint has no {step.old[0].text!r}, and {said}.")
            shape = self.shapes[name]
            made = PlanStep("copy", (name,), (step.new[0].fill({}),), (shape,), (shape,), "tied")
            self.steps.append((self.positions[name], made))

    def _add(self, step: PatternStep, olds: list[str], binding: dict[str, str]) -> None:
        shapes = [self.shapes[name] for name in olds]
        parts = None if step.spreads is not None else len(step.new)
        task = Task(step.form, shapes, parts, self.values.sizes, f"{step.step} of {', '.join(olds[:3])}")
        try:
            layout, made = solve(step.step, task)
        except MissingSizesError as error:
            raise self.values.missing(error, self.plan) from None
        except MatchError as error:
            told = ", ".join(f"{name} = {said}" for name, said in self.values.told().items())
            error.why = error.why or (f"The sizes are {told}." if told else "")
            raise
        news = [pattern.fill(binding) for pattern in step.new if step.spreads is None]
        if step.spreads is not None:
            news = [step.new[0].fill({**binding, step.spreads: str(at)}) for at in range(len(made))]
        position = max(self.positions[name] for name in olds)
        plain = PlanStep(cast("StepName", step.step), tuple(olds), tuple(news), tuple(shapes), made, step.reason, 1.0, layout)
        self.steps.append((position, plain))
        for name, shape in zip(news, made, strict=True):
            if not name.startswith(BETWEEN):
                continue
            if name in self.shapes:
                raise MatchError(f"The plan makes {name!r} twice.")
            self.shapes[name], self.positions[name] = shape, position
            if not self.claim(name, name):
                raise MatchError(
                    f"The plan makes {name!r}, and no step takes it.", why=f"Names with {BETWEEN} are not written."
                )


def _beside(step: PatternStep, claims: Sequence[dict[Binding, str]]) -> Iterator[tuple[dict[str, str], list[str]]]:
    """The tensors that belong together, and the numbers that they have in common."""
    for binding in dict.fromkeys(binding for claimed in claims for binding in claimed):
        names = [claimed.get(binding) for claimed in claims]
        olds = [name for name in names if name is not None]
        if len(olds) < len(names):
            lacking = step.old[names.index(None)].fill(dict(binding))
            raise MatchError(f"{step.label}: there is {olds[0]!r}, and no {lacking!r}.")
        yield dict(binding), olds


def _gathered(step: PatternStep, claimed: Mapping[Binding, str]) -> Iterator[tuple[dict[str, str], list[str]]]:
    """For every tensor that is put together its parts, in the order of their numbers."""
    groups: dict[Binding, dict[int, str]] = defaultdict(dict)
    for binding, name in claimed.items():
        number = int(dict(binding)[cast("str", step.gathers)])
        rest = tuple(pair for pair in binding if pair[0] != step.gathers)
        if other := groups[rest].get(number):
            raise MatchError(f"{step.label}: {other!r} and {name!r} have one number.")
        groups[rest][number] = name
    for rest, parts in groups.items():
        lacking = next((number for number in range(len(parts)) if number not in parts), None)
        if lacking is not None:
            raise MatchError(f"{step.label}: there are {len(parts)} parts, and none has the number {lacking}.")
        yield dict(rest), [parts[number] for number in range(len(parts))]


def _ordered(steps: Sequence[PatternStep]) -> list[int]:
    """The steps in an order in which what one makes for another is made first."""
    makers = {
        pattern.key: number
        for number, step in enumerate(steps)
        for pattern in step.new
        if pattern.text.startswith(BETWEEN)
    }  # fmt: skip
    needs: dict[int, set[int]] = {}
    for number, step in enumerate(steps):
        tied = () if step.tied is None else (NamePattern.read(step.tied.old),)
        wanted = [pattern for pattern in (*step.old, *tied) if pattern.text.startswith(BETWEEN)]
        if lone := next((pattern for pattern in wanted if pattern.key not in makers), None):
            raise MatchError(f"{step.label}: no step makes {lone.text!r}.")
        needs[number] = {makers[pattern.key] for pattern in wanted}
    try:
        return list(TopologicalSorter(needs).static_order())
    except CycleError as error:
        raise MatchError(f"Steps of the plan wait for each other: {steps[error.args[1][0]].label}.") from None


# --- the target


@dataclass(slots=True)
class FittedTo:
    """What a conversion did to fit a target.

    Attributes:
        target: what the user called it, or the plan.
        reasons: how many tensors were matched by each reason.
        renamed: (old name, new name, reason), where they differ.
        initialised: what got initial values. adapted: name -> what was done to fit another shape.
        skipped: name -> (shape in the checkpoint, in the target); left out of the output.
        dropped: name -> why the plan leaves it out. values: sizes that the plan calls by name, and who says them.
    """

    target: str
    reasons: dict[str, int] = field(default_factory=dict)
    renamed: list[tuple[str, str, str]] = field(default_factory=list)
    initialised: list[Initialised] = field(default_factory=list)
    adapted: dict[str, str] = field(default_factory=dict)
    skipped: dict[str, tuple[tuple[int, ...], tuple[int, ...]]] = field(default_factory=dict)
    dropped: dict[str, str] = field(default_factory=dict)
    values: dict[str, str] = field(default_factory=dict)


class Retargeting:
    """The options that name a target, checked."""

    def __init__(self, options: FitOptions) -> None:
        self.options = options
        self.choices = Choices(Rules(options.reinit), options.on_mismatch, options.adapt, options.seed)
        self.folded: list[Parametrized] = []
        self.left_out: list[str] = []  # names of the checkpoint that a choice or the plan leaves out, or that are made anew

    def apply(self, root: Node, path: str, stack: ExitStack, whole: Checkpoint | None = None) -> tuple[FittedTo, int]:
        """Fit the only state dict below `root`, in place; `stack` holds what must stay open until the bytes are written."""
        node = only_state_dict(root, path)
        options = self.options
        target = None if options.like is None else read_target(options.like, args=options.like_args)
        config = Config.beside(path, None if whole is None else whole.root)
        if target is not None:
            self.folded = fold_for(node, target.names)
        expanded = self._plan(node, target, config, whole)
        plan = expanded.plan
        label = f"{path} does not fit {target.label}" if target is not None else f"{options.plan} leaves tensors over"
        fitted = fit(node, plan, _wanted(target, label, self.choices.seed, stack), self.choices)
        names = {**plan.renames, **{old: new for old, new, _, _ in plan.mismatched}}
        renamed = renaming.rename_optimizers(root, lambda name: names.get(name, name))
        reasons = Counter(step.reason for step in plan.steps for _ in step.new)
        moved = [(old, new, step.reason) for step in plan.steps for old in step.old for new in step.new if old != new]
        moved += [(old, new, "another shape") for old, new, _, _ in plan.mismatched if old != new and new in fitted.adapted]
        report = FittedTo(
            target.label if target is not None else str(options.plan), dict(reasons), moved, fitted.initialised,
            fitted.adapted, fitted.skipped, expanded.dropped, expanded.values,
        )  # fmt: skip
        self.left_out = left_out(plan, fitted)
        return report, renamed

    def _plan(self, node: Dict, target: Target | None, config: Config, whole: Checkpoint | None) -> Expanded:
        if self.options.plan is not None:
            expanded = self._read(node, config)
            return expanded if target is None else replace(expanded, plan=_for_target(expanded.plan, target))
        assert target is not None
        options = self.options
        sides = look_at(node, whole, target, options)
        matching = sides.match(options, options.stages or "exact+wrappers", allow_reshape=options.allow_reshape)
        return Expanded(plan_of(replace(matching, offers=())), {}, {})  # fused and split tensors: only a plan does those

    def _read(self, node: Dict, config: Config) -> Expanded:
        options = self.options
        plan, values = read_any_plan(cast("str", options.plan)), cast("Mapping[str, int]", options.plan_value or {})
        if not isinstance(plan, PatternPlan):
            self.folded += fold_for(node, [*(name for step in plan.steps for name in step.old), *plan.drop])
            if values:
                raise UsageError(f"`plan_value` is for plans of patterns; {options.plan} names every tensor.")
            return Expanded(plan, dict.fromkeys(plan.drop, "the plan drops it"), {})
        shapes = {name: tensor.shape if type(tensor) is Entry else () for name, tensor in tensors_by_name(node).items()}
        others = [key for key, _ in node.items if type(key) is str and key not in shapes]
        expanded = expand(plan, shapes, Values(values, config), others)
        node.items[:] = [(key, value) for key, value in node.items if key in shapes or key not in expanded.dropped]
        return expanded


def _for_target(plan: Plan, target: Target) -> Plan:
    """A plan that must make exactly what the target wants; names of the target that it does not know are missing."""
    wanted = {param.name: param.shape for param in target.params}
    made = {
        new: shape
        for step in plan.steps
        for new, shape in zip(step.new, step.new_shapes, strict=True)
        if new not in plan.between
    }
    made.update((new, after) for _, new, _, after in plan.mismatched)
    for name, shape in made.items():
        if wanted.get(name) != shape:
            has = f"wants {list(wanted[name])}" if name in wanted else "has no such name"
            raise MatchError(f"The plan makes {name!r} {list(shape)}; {target.label} {has}.",
                                 fix="Make a plan for this target: ckpt match IN --like TARGET -o PLAN.")  # fmt: skip
    doubtful = {new for new, _, _ in plan.ambiguous}
    return replace(plan, missing=tuple(name for name in wanted if name not in made and name not in doubtful))


def note_optimizer(root: Node, fitted: FittedTo) -> str:
    """The sentence for optimizer state that belongs to tensors which are no longer what they were; or the empty text."""
    if not (fitted.initialised or fitted.adapted or fitted.skipped):
        return ""
    path = next((dotted(where) for where, _ in find_optimizers(root)), None)
    return "" if path is None else f"The state in {path} belongs to the old tensors; leave it out: `drop={path!r}`"


# --- what the target wants


def _wanted(target: Target | None, label: str, seed: int, stack: ExitStack) -> Wanted:
    if target is None:
        return Wanted((), dict[str, Blank]().__getitem__, None, {}, label)  # without a target no name's shape is asked for
    params = {param.name: param for param in target.params}
    tensors = cache(lambda: tensors_of(target, stack, seed=seed))

    def own(name: str) -> Content:
        value = tensors()[name]
        if type(value) is Entry:
            return row_major(value)
        if is_tensor(value) or value.is_meta or hasattr(value, "full_tensor"):  # a DTensor's values are on many processes
            raise ConvertError(f"{name!r} has no values in {target.label}.", fix='Choose another scheme than "target".')
        check_finite(value.detach(), name)
        return live_content(value)

    return Wanted(target.names, lambda name: blank_for(target, params[name]), own, target.ties, label)
