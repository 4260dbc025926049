"""Plans: what becomes of every tensor of a checkpoint, step by step. A plan applies exactly, or is refused.

Steps: `copy` (another name), `reshape`, `flatten` (the same numbers in the same order), `transpose` (a matrix, its two
dimensions exchanged), `permute` (any dimensions in another order), `split`, `unstack` (one tensor cut along one dimension),
`concat`, `stack` (several put together along one), `pad`, `crop` (a dimension made larger, smaller).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from math import prod
from typing import Literal, TypeAlias, get_args

from ckpt_tools.edit.renaming import rename_metadata
from ckpt_tools.errors import MatchError
from ckpt_tools.fit import rearranging
from ckpt_tools.fit.axes import Layout
from ckpt_tools.fit.forms import SEVERAL_NEW, SEVERAL_OLD, Form, Task, solve
from ckpt_tools.formats.contents import tensors_by_name
from ckpt_tools.matching import Matching
from ckpt_tools.matching.records import Shape
from ckpt_tools.tree.nodes import Dict, Entry, Node, Storage

StepName: TypeAlias = Literal[
    "copy", "reshape", "transpose", "split", "concat", "permute", "flatten", "stack", "unstack", "pad", "crop"
]
STEPS: tuple[str, ...] = get_args(StepName)


@dataclass(frozen=True, slots=True)
class PlanStep:
    """One step: tensors of the checkpoint become tensors of the target."""

    step: StepName
    old: tuple[str, ...]
    new: tuple[str, ...]
    old_shapes: tuple[Shape, ...]
    new_shapes: tuple[Shape, ...]
    reason: str = "edited"
    confidence: float = 1.0
    layout: Layout | None = None
    axes: str = ""


@dataclass(frozen=True, slots=True)
class Plan:
    """Steps in the order of the target, and the names that no step has."""

    steps: tuple[PlanStep, ...]
    drop: tuple[str, ...] = ()
    unexpected: tuple[str, ...] = ()
    missing: tuple[str, ...] = ()
    mismatched: tuple[tuple[str, str, Shape, Shape], ...] = ()
    ambiguous: tuple[tuple[str, tuple[str, ...], str], ...] = ()
    between: frozenset[str] = frozenset()

    @property
    def complete(self) -> bool:
        """Whether the steps fill the whole target, and every tensor of the checkpoint has its fate."""
        return not (self.unexpected or self.missing or self.mismatched or self.ambiguous)

    @property
    def renames(self) -> dict[str, str]:
        """Old name -> new name, for what goes by names (module paths, an optimizer's `param_names`); the first of several."""
        found: dict[str, str] = {}
        for step in self.steps:
            for old in step.old if step.new[0] not in self.between else ():
                found.setdefault(old, step.new[0])
        return found


def plan_of(matching: Matching) -> Plan:
    """The plan that a matching gives, its offers included: whoever writes a plan wants what it does written down."""
    rows: dict[str, PlanStep] = {}
    for row in matching.matched:
        layout = None
        if row.axes:
            layout, _ = solve("permute", Task(Form(row.axes), (row.source_shape,), 1, {}, f"permute to {row.new!r}"))
        shapes = (row.source_shape,), (row.target_shape,)
        rows[row.new] = PlanStep(row.step, (row.old,), (row.new,), *shapes, row.reason, row.confidence, layout, row.axes)
    for offer in matching.offers:
        rows[offer.new[0]] = PlanStep(
            offer.step, offer.old, offer.new, offer.source_shapes, offer.target_shapes, offer.reason, offer.confidence
        )
    missing, unexpected = matching.left_over
    ambiguous = {row.new: row for row in matching.ambiguous}
    return Plan(
        tuple(rows.values()), (), unexpected, tuple(name for name in missing if name not in ambiguous),
        tuple((row.old, row.new, row.source_shape, row.target_shape) for row in matching.mismatched),
        tuple((row.new, row.candidates, row.why) for row in ambiguous.values()),
    )  # fmt: skip


# --- checking


def check(plan: Plan) -> None:
    """Raise MatchError unless every step can be done, every new name is made once, and no name has two fates."""
    for step in plan.steps:
        _check_step(step)
    made = Counter(name for step in plan.steps for name in step.new)
    if twice := [name for name, count in made.items() if count > 1]:
        raise MatchError(f"The plan makes {twice[0]!r} twice.")
    used = {name for step in plan.steps for name in step.old}
    if both := [name for name in plan.drop if name in used]:
        raise MatchError(f"The plan drops {both[0]!r} and uses it.")
    resized, ambiguous = [row[:2] for row in plan.mismatched], [row[0] for row in plan.ambiguous]
    sides: dict[str, dict[str, Iterable[str]]] = {
        "new": {"a step": made, "mismatched": [new for _, new in resized], "ambiguous": ambiguous, "missing": plan.missing},
        "old": {
            "a step or mismatched": used | {old for old, _ in resized}, "drop": plan.drop, "unexpected": plan.unexpected,
        },
    }  # fmt: skip
    for side, fates in sides.items():
        seen: dict[str, str] = {}
        for fate, name in ((fate, name) for fate, names in fates.items() for name in names):
            if name in seen:
                why = f"It is under {seen[name]}, and under {fate}."
                raise MatchError(f"The plan has two fates for {side} {name!r}.", why=why, fix="Leave one in the plan.")
            seen[name] = fate


def _check_step(step: PlanStep) -> None:
    label = f"{step.step} to {step.new[0]!r}" if step.new else step.step
    old, new = step.old_shapes, step.new_shapes
    if len(step.old) != len(old) or len(step.new) != len(new):
        raise MatchError(f"{label}: one shape for each name is needed.")
    if (len(step.old) != 1 and step.step not in SEVERAL_OLD) or (len(step.new) != 1 and step.step not in SEVERAL_NEW):
        raise MatchError(f"{label}: it has {len(step.old)} old and {len(step.new)} new names.")
    if not step.old or not step.new or not all(step.new):
        raise MatchError(f"{label}: a name is missing.")
    if step.layout is not None:
        return
    if step.step in ("split", "concat"):
        (whole,), parts = (old, new) if step.step == "split" else (new, old)
        rest = {shape[1:] for shape in parts if shape}
        fits = bool(whole) and all(parts) and rest == {whole[1:]} and sum(shape[0] for shape in parts) == whole[0]
    elif step.step == "reshape":
        fits = prod(old[0]) == prod(new[0])
    else:
        fits = old == new if step.step == "copy" else len(old[0]) == 2 and old[0] == new[0][::-1]
    if not fits:
        texts = [", ".join(str(list(shape)) for shape in shapes) for shapes in (old, new)]
        raise MatchError(f"{label}: the shapes do not fit.", why=f"By {step.step}, {texts[0]} cannot become {texts[1]}.")


# --- applying


def apply(node: Dict, plan: Plan) -> None:
    """Make a state dict what the plan says: in place, tensors in the plan's order, `_metadata` moved along."""
    check(plan)
    entries = tensors_by_name(node)
    _check_fits(entries, plan)
    made: list[tuple[str, Node]] = []
    known: dict[str, Node] = dict(entries)
    for step in plan.steps:
        for name, entry in _done(step, known):
            if name in plan.between:  # made for another step alone
                known[name] = entry
            else:
                made.append((name, entry))
    made = list(_keyed(made, {id(entry.storage) for entry in entries.values() if type(entry) is Entry}))
    names = {new for new, _ in made}
    others = [(key, value) for key, value in node.items if type(key) is not str or key not in entries]
    if taken := [key for key, _ in others if type(key) is str and key in names]:
        raise MatchError(f"The plan makes {taken[0]!r}, which the checkpoint has as a value that is not a tensor.")
    node.items[:] = made + others
    rename_metadata(node, plan.renames)


def _check_fits(entries: Mapping[str, Node], plan: Plan) -> None:
    wanted = [
        pair for step in plan.steps for pair in zip(step.old, step.old_shapes, strict=True) if pair[0] not in plan.between
    ]
    wanted += [(old, shape) for old, _, shape, _ in plan.mismatched]
    known = {*(name for name, _ in wanted), *plan.drop, *plan.unexpected}
    candidates = {old for _, olds, _ in plan.ambiguous for old in olds}
    fix = "Make a plan for this checkpoint: ckpt match IN --like TARGET -o PLAN."
    if absent := [name for name in known if name not in entries]:
        raise MatchError(f"The plan names {absent[0]!r}, which the checkpoint does not have.", fix=fix)
    if extra := [name for name in entries if name not in known and name not in candidates]:
        raise MatchError(f"The checkpoint has {extra[0]!r}, which the plan does not name.", fix=fix)
    for name, shape in wanted:
        entry = entries[name]
        if type(entry) is Entry and entry.shape != shape:
            why = f"It is {list(entry.shape)}; the plan was made for {list(shape)}."
            raise MatchError(f"The checkpoint's {name!r} has another shape.", why=why, fix=fix)


def _keyed(made: Iterable[tuple[str, Node]], known: set[int]) -> Iterator[tuple[str, Node]]:
    """Every storage that a step made gets a key of its own; copies of one tensor that a step made stay tied."""
    keyed: dict[int, Storage] = {}
    for number, (name, entry) in enumerate(made):
        if type(entry) is Entry and id(entry.storage) not in known:
            old = entry.storage
            storage = keyed.setdefault(id(old), replace(old, key=f"{old.key}.{number}"))
            entry = replace(entry, storage=storage)
        yield name, entry


def _done(step: PlanStep, entries: Mapping[str, Node]) -> Iterator[tuple[str, Node]]:
    """The new tensors of one step."""
    if step.step == "copy":
        yield step.new[0], entries[step.old[0]]
        return
    olds = [entries[name] for name in step.old]
    plain = [entry for entry in olds if type(entry) is Entry]
    if len(plain) < len(olds):
        odd = next(name for name, entry in zip(step.old, olds, strict=True) if type(entry) is not Entry)
        raise MatchError(f"{odd!r} is a sparse, quantised, nested or meta tensor: it can be copied only.")
    one, several = (step.new_shapes, step.old_shapes) if step.step == "concat" else (step.old_shapes, step.new_shapes)
    order = (1, 0) if step.step == "transpose" else ()  # the others along the first dimension, as the shapes alone say
    layout = step.layout or Layout(one[0], order, sizes=tuple(shape[0] for shape in several if shape))
    if step.step in ("reshape", "flatten"):
        yield step.new[0], rearranging.reshaped(plain[0], step.new_shapes[0])
    elif step.step in ("transpose", "permute"):
        yield step.new[0], rearranging.rearranged(plain[0], layout, step.new_shapes[0])
    elif step.step in ("split", "unstack", "crop"):
        yield from zip(step.new, rearranging.cut(plain[0], layout, step.new_shapes), strict=True)
    else:
        yield step.new[0], rearranging.joined(plain, layout, step.new_shapes[0])
