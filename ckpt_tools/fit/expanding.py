"""A plan of patterns made one for a checkpoint: which step has which tensors, and what is missing."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from graphlib import CycleError, TopologicalSorter
from typing import cast

from ckpt_tools.errors import MatchError
from ckpt_tools.fit.axes import MissingSizesError
from ckpt_tools.fit.forms import Task, solve
from ckpt_tools.fit.patterns import Binding, Index, NamePattern
from ckpt_tools.fit.plans import Plan, PlanStep, StepName
from ckpt_tools.fit.rows import BETWEEN, PatternPlan, PatternStep
from ckpt_tools.fit.values import Values
from ckpt_tools.matching.records import Shape
from ckpt_tools.text import listed


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
