"""A plan of patterns as it is read from its file: steps, values, prefixes; and the same plan the other way round."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

from ckpt_tools.errors import MatchError
from ckpt_tools.fit.axes import names_in, read_arrow, read_side, size_of
from ckpt_tools.fit.fields import (
    Fields,
    check_value,
    read_dim,
    read_dims,
    read_flag,
    read_name,
    read_names,
    read_number,
    read_size,
    read_sizes,
    read_table,
    read_text,
)
from ckpt_tools.fit.forms import FIELDS, SEVERAL_NEW, SEVERAL_OLD, Form
from ckpt_tools.fit.patterns import NamePattern, with_words, written_out
from ckpt_tools.io.parsers import brief

BETWEEN = "@"  # begins the name of what one step makes for another, and nothing else gets
_VALUE_NAME = re.compile(r"[A-Za-z][A-Za-z0-9_]*")
_MOST_WRITTEN_OUT = 20_000  # steps of a plan, words written out


@dataclass(frozen=True, slots=True)
class Tie:
    """Where a tensor is when it is left out because it is another one: names on both sides."""

    old: str
    new: str
    config: str | None = None


@dataclass(frozen=True, slots=True)
class PatternStep:
    """One step for all names that its patterns match."""

    step: str
    old: tuple[NamePattern, ...]
    new: tuple[NamePattern, ...]
    form: Form
    optional: bool
    tied: Tie | None
    reason: str
    label: str
    one_way: bool = False

    @property
    def gathers(self) -> str | None:
        """The placeholder of the old name that the new one lacks: all its numbers go into one tensor."""
        return next(iter(self.old[0].names - self.new[0].names), None) if self.old and self.new else None

    @property
    def spreads(self) -> str | None:
        """The placeholder of the new name that the old one lacks."""
        return next(iter(self.new[0].names - self.old[0].names), None) if self.old and self.new else None


@dataclass(frozen=True, slots=True)
class ValueRow:
    """A size by name, and where it may be said."""

    name: str
    number: int | None
    config: tuple[str, ...]
    old: NamePattern | None
    new: NamePattern | None
    axes: str | None


@dataclass(frozen=True, slots=True)
class PatternPlan:
    """A plan for a family of models."""

    label: str
    about: str
    steps: tuple[PatternStep, ...]
    values: tuple[ValueRow, ...]
    prefix_old: str
    prefix_new: str
    numbered: Mapping[str, tuple[str, ...]]

    def reversed(self) -> PatternPlan:
        """The plan from the other side to this one."""
        values = tuple(replace(row, old=row.new, new=row.old) for row in self.values)
        steps = tuple(
            replace(
                step, step=_INVERSE.get(step.step, step.step), old=step.new, new=step.old, form=_inverse_form(step),
                tied=None if step.tied is None else replace(step.tied, old=step.tied.new, new=step.tied.old),
            )
            for step in self.steps if not step.one_way
        )  # fmt: skip
        return replace(self, steps=steps, values=values, prefix_old=self.prefix_new, prefix_new=self.prefix_old)


_INVERSE = {"split": "concat", "concat": "split", "stack": "unstack", "unstack": "stack", "pad": "crop", "crop": "pad"}


def _inverse_form(step: PatternStep) -> Form:
    form = step.form
    if step.step in ("reshape", "flatten"):
        raise MatchError(f"{step.label}: a {step.step} has no inverse.", fix="Say it as a permute: axes = '(a b) -> a b'.")
    if step.step in ("pad", "crop") and form.was is None:
        raise MatchError(f"{step.label}: the inverse of a {step.step} needs `was`, the size before it.")
    if step.step in ("pad", "crop"):
        return replace(form, size=form.was, was=form.size)
    if step.step == "permute" and isinstance(form.axes, str):
        before, _, after = form.axes.partition("->")
        return replace(form, axes=f"{after.strip()} -> {before.strip()}")
    if step.step == "permute" and form.axes is not None:
        return replace(form, axes=tuple(form.axes.index(dim) for dim in range(len(form.axes))))  # type: ignore[arg-type]
    return form


# --- reading


def read_pattern_plan(document: Mapping[str, Any], label: str) -> PatternPlan:
    """What a document with `patterns = true` says."""
    fields = Fields(
        document, "the plan",
        ("format", "patterns", "about", "prefix_old", "prefix_new", "numbered", "values", "drop", "tensor"),
    )  # fmt: skip
    dropped = [("drop", {"old": name, "step": "drop"}) for name in fields.read("drop", read_names, ())]
    steps: list[PatternStep] = []
    for where, row in (*fields.tables("tensor"), *dropped):
        steps += _steps(row, where)
        if len(steps) > _MOST_WRITTEN_OUT:
            raise MatchError(f"The plan has more than {_MOST_WRITTEN_OUT} steps, words written out.")
    about, prefix_old, prefix_new = (fields.read(key, read_text, "") for key in ("about", "prefix_old", "prefix_new"))
    values, numbered = fields.read("values", read_table, {}), fields.read("numbered", read_table, {})
    known = {name for step in steps for pattern in (*step.old, *step.new) for name in pattern.names}
    if unknown := next((name for name in numbered if name not in known), None):
        raise MatchError(f"numbered: no name of the plan has {{{unknown[:40]}}}.")
    counted = {name: read_names(keys, f"numbered.{name[:40]}") for name, keys in numbered.items()}
    rows = tuple(_value(name, row) for name, row in values.items())
    return PatternPlan(label, about, tuple(steps), rows, prefix_old, prefix_new, counted)


def _value(name: str, row: Any) -> ValueRow:
    label = f"the value {name[:40]!r}"
    if not _VALUE_NAME.fullmatch(name):
        raise MatchError(f"{label} is not a name: letters, digits and _.")
    if not isinstance(row, dict):
        return ValueRow(name, check_value(row, label), (), None, None, None)
    fields = Fields(row, label, ("config", "old", "new", "axes"))
    config, axes = fields.several("config", read_name, ()), fields.read("axes", read_name, None)
    old, new = (
        None if (text := fields.read(key, read_name, None)) is None else NamePattern.read(text) for key in ("old", "new")
    )
    if axes is None:
        return ValueRow(name, None, config, None, None, None)
    if name not in {one for axis in read_side(axes).axes for one in names_in(axis)}:
        raise MatchError(f"{label}: it is not among the axes {axes!r}.")
    return ValueRow(name, None, config, old, new, axes)


def _steps(row: dict[str, Any], where: str) -> Iterator[PatternStep]:
    """The steps of one table: one for every word that a placeholder may be."""
    step = row.get("step", "copy")
    if not isinstance(step, str) or step not in FIELDS:
        raise MatchError(f"{where}: step = {brief(step)} is not one of {', '.join(FIELDS)}.")
    fields = Fields(row, where, ("old", "new", "step", "reason", "optional", "one_way", "tied", *FIELDS[step]))
    old, new = fields.several("old", read_name, ()), fields.several("new", read_name, ())
    fields.label = label = f"{where}, {step} of {', '.join(old) or ', '.join(new)}"
    form, reason = read_form(fields, step), fields.read("reason", read_name, "plan")
    tied = None
    if "tied" in fields:
        said = Fields(row["tied"], f"{label}: tied", ("old", "new", "config"))
        tied = Tie(said.read("old", read_name), said.read("new", read_name), said.read("config", read_name, None))
    one_way, words = fields.read("one_way", read_flag, False), row.get("optional", False)  # true, or the words that are
    optional = fields.read("optional", read_names if isinstance(words, list) else read_flag, False)
    for chosen in written_out((*old, *new), label):
        olds, news = (tuple(NamePattern.read(with_words(text, chosen)) for text in texts) for texts in (old, new))
        may_miss = optional if isinstance(optional, bool) else not set(optional).isdisjoint(chosen.values())
        made = PatternStep(step, olds, news, form, may_miss, tied, reason, label, one_way)
        _check_step(made)
        yield made


_FORM = {"sizes": read_sizes, "to": read_sizes, "size": read_size, "was": read_size, "dims": read_dims, "fill": read_number}


def read_form(fields: Fields, step: str) -> Form:
    """The fields that say how a step is done."""
    given = {key for key in FIELDS[step] if key in fields}
    found = {key: fields.read(key, read) for key, read in _FORM.items() if key in given}
    sizes = [*found.get("sizes", ()), *(text for text in found.get("to", ()) if text != "-1")]
    for text in (*sizes, found.get("size", "1"), found.get("was", "1")):
        size_of(text, {})
    axes: str | tuple[int, ...] | None = None
    if "axes" in given and step == "permute" and isinstance(fields.row["axes"], list):
        axes = tuple(read_dim(dim, f"{fields.label}: axes") for dim in fields.row["axes"])
    elif "axes" in given:
        axes = fields.read("axes", read_name)
        (read_arrow if step == "permute" else read_side)(axes)
    axis = fields.row["axis"] if "axis" in given else 0
    if not isinstance(axis, str) or not axis:
        axis = read_dim(axis, f"{fields.label}: axis")
    return Form(axes, axis, **found)


def _check_step(step: PatternStep) -> None:
    """Raise MatchError for numbers of names and placeholders that do not go together."""
    counts = (len(step.old), len(step.new))
    if step.step == "drop":
        if sum(counts) != 1:
            raise MatchError(f"{step.label}: a drop has one name, of the old side or of the new.")
        return
    if (counts[0] != 1 and step.step not in SEVERAL_OLD) or (counts[1] != 1 and step.step not in SEVERAL_NEW) or 0 in counts:
        raise MatchError(f"{step.label}: it has {counts[0]} old and {counts[1]} new names.")
    if step.tied is not None and (step.step != "copy" or step.old[0].names):
        raise MatchError(f"{step.label}: `tied` is for a copy of one tensor.")
    for side in (step.old, step.new):
        if any(pattern.names != side[0].names for pattern in side):
            raise MatchError(f"{step.label}: its names have different placeholders.")
    gathered, spread = step.old[0].names - step.new[0].names, step.new[0].names - step.old[0].names
    may_gather, may_spread = step.step in SEVERAL_OLD and counts[0] == 1, step.step == "unstack" and counts[1] == 1
    if len(gathered) > may_gather or len(spread) > may_spread:
        lone = min(gathered or spread)
        why = "A stack or a concat of one name gathers the numbers of one placeholder, an unstack spreads them."
        raise MatchError(f"{step.label}: the placeholder {{{lone}}} is on one side only.", why=why)
