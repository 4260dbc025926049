"""`--like` and `--plan` of a conversion: fit the state dict of a tree to a target, and carry along what goes by its names."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from functools import cache
from typing import cast

from ckpt_tools.edit import renaming
from ckpt_tools.edit.parametrized import fold_for
from ckpt_tools.edit.selection import only_state_dict
from ckpt_tools.errors import ConvertError, MatchError, UsageError
from ckpt_tools.fit.expanding import Expanded, expand
from ckpt_tools.fit.fit import Choices, Initialised, Wanted, fit, left_out
from ckpt_tools.fit.initialisers import Blank, Rules, blank_for, check_finite
from ckpt_tools.fit.options import FitOptions
from ckpt_tools.fit.partners import look_at
from ckpt_tools.fit.plan_files import read_any_plan
from ckpt_tools.fit.plans import Plan, plan_of
from ckpt_tools.fit.rows import PatternPlan
from ckpt_tools.fit.targets import Target, read_target, tensors_of
from ckpt_tools.fit.values import Config, Values
from ckpt_tools.formats.checkpoint import Checkpoint
from ckpt_tools.formats.contents import find_optimizers, is_tensor, tensors_by_name
from ckpt_tools.io.content import Content
from ckpt_tools.text import dotted
from ckpt_tools.tree.nodes import Dict, Entry, Node
from ckpt_tools.tree.parametrized import Parametrized
from ckpt_tools.values.numeric import live_content, row_major


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
