"""A plan of patterns as it is read from its file: steps, values, prefixes; and the same plan the other way round."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

from ckpt_tools.errors import MatchError
from ckpt_tools.fit.axes import names_in, read_arrow, read_side, size_of
from ckpt_tools.fit.fields import (
    check_known,
    read_dim,
    read_flag,
    read_name,
    read_names,
    read_several,
    read_size,
    read_sizes,
    tables,
)
from ckpt_tools.fit.forms import FIELDS, SEVERAL_NEW, SEVERAL_OLD, Form
from ckpt_tools.fit.names import NamePattern, with_words, written_out
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
        steps = tuple(_reversed(step) for step in self.steps if not step.one_way)
        return replace(self, steps=steps, values=values, prefix_old=self.prefix_new, prefix_new=self.prefix_old)


_INVERSE = {"split": "concat", "concat": "split", "stack": "unstack", "unstack": "stack", "pad": "crop", "crop": "pad"}


def _reversed(step: PatternStep) -> PatternStep:
    tied = None if step.tied is None else replace(step.tied, old=step.tied.new, new=step.tied.old)
    inverse = _INVERSE.get(step.step, step.step)
    return replace(step, step=inverse, old=step.new, new=step.old, form=_inverse_form(step), tied=tied)


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
    document = dict(document)
    check_known(document, ("format", "patterns", "about", "prefix_old", "prefix_new", "numbered", "values", "drop", "tensor"),
                "the plan")  # fmt: skip
    dropped = [{"old": name, "step": "drop"} for name in read_names(document.get("drop", []), "drop")]
    rows = [*((f"tensor {number}", row) for number, row in tables(document, "tensor")), *(("drop", row) for row in dropped)]
    steps: list[PatternStep] = []
    for where, row in rows:
        steps += _steps(row, where)
        if len(steps) > _MOST_WRITTEN_OUT:
            raise MatchError(f"The plan has more than {_MOST_WRITTEN_OUT} steps, words written out.")
    values = document.get("values", {})
    if not isinstance(values, dict):
        raise MatchError("'values' must be a table: [values].")
    texts = {key: document.get(key, "") for key in ("about", "prefix_old", "prefix_new")}
    for key, text in texts.items():
        if not isinstance(text, str):
            raise MatchError(f"{key} must be text, not {brief(text)}.")
    return PatternPlan(label, texts["about"], tuple(steps), tuple(_value(name, row) for name, row in values.items()),
                       texts["prefix_old"], texts["prefix_new"], _numbered(document.get("numbered", {}), steps))  # fmt: skip


def _numbered(table: Any, steps: Iterable[PatternStep]) -> dict[str, tuple[str, ...]]:
    """Placeholders whose numbers are complete, with the keys that say how many there are."""
    if not isinstance(table, dict):
        raise MatchError("'numbered' must be a table: [numbered].")
    known = {name for step in steps for pattern in (*step.old, *step.new) for name in pattern.names}
    if unknown := next((name for name in table if name not in known), None):
        raise MatchError(f"numbered: no name of the plan has {{{unknown[:40]}}}.")
    return {name: tuple(read_names(keys, f"numbered.{name[:40]}")) for name, keys in table.items()}


def _value(name: str, row: Any) -> ValueRow:
    label = f"the value {name[:40]!r}"
    if not _VALUE_NAME.fullmatch(name):
        raise MatchError(f"{label} is not a name: letters, digits and _.")
    if not isinstance(row, dict):
        return ValueRow(name, check_value(row, label), (), None, None, None)
    check_known(row, ("config", "old", "new", "axes"), label)
    config = read_several(row["config"], read_name, f"{label}: config") if "config" in row else ()
    old, new = (NamePattern.read(read_name(row[key], f"{label}: {key}")) if key in row else None for key in ("old", "new"))
    if "axes" not in row:
        return ValueRow(name, None, config, None, None, None)
    axes = read_name(row["axes"], f"{label}: axes")
    if name not in {one for axis in read_side(axes).axes for one in names_in(axis)}:
        raise MatchError(f"{label}: it is not among the axes {axes!r}.")
    return ValueRow(name, None, config, old, new, axes)


def check_value(value: Any, label: str) -> int:
    """A size that a user, a plan or a config gives."""
    if type(value) is not int or not 0 < value < 1 << 40:
        raise MatchError(f"{label} must be a whole number from 1 up, not {brief(value)}.")
    return value


def _steps(row: dict[str, Any], where: str) -> Iterator[PatternStep]:
    """The steps of one table: one for every word that a placeholder may be."""
    step = row.get("step", "copy")
    if not isinstance(step, str) or step not in FIELDS:
        raise MatchError(f"{where}: step = {brief(step)} is not one of {', '.join(FIELDS)}.")
    check_known(row, ("old", "new", "step", "reason", "optional", "one_way", "tied", *FIELDS[step]), where)
    old, new = (read_several(row[key], read_name, f"{where}: {key}") if key in row else () for key in ("old", "new"))
    label = f"{where}, {step} of {', '.join(old) or ', '.join(new)}"
    form, tied = read_form(row, step, label), _tie(row.get("tied"), f"{label}: tied")
    reason, optional = read_name(row.get("reason", "plan"), f"{label}: reason"), row.get("optional", False)
    words = read_names(optional, f"{label}: optional") if isinstance(optional, list) else ()
    one_way = read_flag(row.get("one_way", False), f"{label}: one_way")
    if not isinstance(optional, list):
        read_flag(optional, f"{label}: optional")
    for chosen in written_out((*old, *new), label):
        olds, news = (tuple(NamePattern.read(with_words(text, chosen)) for text in texts) for texts in (old, new))
        may_miss = optional is True or not set(words).isdisjoint(chosen.values())
        made = PatternStep(step, olds, news, form, may_miss, tied, reason, label, one_way)
        _check_step(made)
        yield made


def _tie(value: Any, label: str) -> Tie | None:
    if value is None:
        return None
    if not isinstance(value, dict):
        raise MatchError(f"{label} must be a table: {{old = ..., new = ...}}.")
    check_known(value, ("old", "new", "config"), label)
    config = read_name(value["config"], f"{label}: config") if "config" in value else None
    return Tie(read_name(value.get("old"), f"{label}: old"), read_name(value.get("new"), f"{label}: new"), config)


def read_form(row: Mapping[str, Any], step: str, label: str) -> Form:
    """The fields that say how a step is done."""
    form = Form(axes=_axes(row.get("axes"), step, f"{label}: axes"))
    if "axis" in row:
        axis = row["axis"]
        form = replace(form, axis=axis if isinstance(axis, str) and axis else read_dim(axis, f"{label}: axis"))
    sizes, to = (read_sizes(row[key], f"{label}: {key}") if key in row else None for key in ("sizes", "to"))
    size, was = (read_size(row[key], f"{label}: {key}") if key in row else None for key in ("size", "was"))
    form = replace(form, sizes=sizes, to=to, size=size, was=was)
    for text in (*(form.sizes or ()), *(text for text in form.to or () if text != "-1"), form.size or "1", form.was or "1"):
        size_of(text, {})
    if "dims" in row:
        dims = row["dims"]
        if not isinstance(dims, list) or len(dims) != 2:
            raise MatchError(f"{label}: dims must be the first and the last dimension, not {brief(dims)}.")
        form = replace(form, dims=(read_dim(dims[0], f"{label}: dims"), read_dim(dims[1], f"{label}: dims")))
    fill = row.get("fill", 0)
    if type(fill) not in (int, float) or not abs(fill) < 1e300:
        raise MatchError(f"{label}: fill must be a number, not {brief(fill)}.")
    return replace(form, fill=float(fill))


def _axes(value: Any, step: str, label: str) -> str | tuple[int, ...] | None:
    if value is None:
        return None
    if isinstance(value, list) and step == "permute":
        return tuple(read_dim(dim, label) for dim in value)
    text = read_name(value, label)
    if step == "permute":
        read_arrow(text)
    else:
        read_side(text)
    return text


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
