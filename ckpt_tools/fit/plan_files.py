"""Plan files: TOML that a person can read, edit and replay. Read with `tomllib`, written here, checked with our own errors."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cache
from importlib.resources import files
from itertools import groupby, pairwise
from pathlib import Path
from typing import Any, cast

from ckpt_tools import limits
from ckpt_tools.errors import MatchError, NotACheckpointError
from ckpt_tools.fit.axes import Layout
from ckpt_tools.fit.fields import Fields, read_flag, read_name, read_names, read_number, read_shape
from ckpt_tools.fit.forms import FIELDS, SEVERAL_OLD, Task, solve
from ckpt_tools.fit.plans import STEPS, Plan, PlanStep, StepName, check
from ckpt_tools.fit.rows import PatternPlan, read_form, read_pattern_plan
from ckpt_tools.io.parsers import brief, load_toml
from ckpt_tools.io.source import open_regular
from ckpt_tools.io.writer import write_document
from ckpt_tools.matching.records import Shape
from ckpt_tools.text import did_you_mean, printable
from ckpt_tools.tree.output_names import check_document

# --- steps that differ in one number alone, as one


_PLACE, _INNER = "{i}", "{j}"  # of a plan that has numbers inside of numbers, as an earlier version wrote them
_NUMBER = re.compile(r"[0-9]+")
_RANGE = re.compile(r"(0|[1-9][0-9]{0,8})(?:-([1-9][0-9]{0,8}))?")
_MOST_NUMBERS = 100_000


@dataclass(frozen=True, slots=True)
class Row:
    """One table of a plan: a step, whose names have `{i}` for these numbers and `{j}` for the inner ones, if there are any."""

    step: PlanStep
    numbers: str = ""
    inner: str = ""


def fold(steps: Sequence[PlanStep]) -> list[Row]:
    """Rows that are these steps, in their order: layers that differ in their number alone are one."""
    layers = [list(group) for _, group in groupby(steps, key=_layer)]
    rows: list[Row] = []
    at = 0
    while at < len(layers):
        first, (_, number) = layers[at], _layer(layers[at][0])
        templates, numbers = [_template(step, number) for step in first], dict.fromkeys([number])
        at += 1
        while at < len(layers) and all(_PLACE in name for step in templates for name in (*step.old, *step.new)):
            _, other = _layer(layers[at][0])
            if other in numbers or [filled(step, other) for step in templates] != layers[at]:
                break
            numbers[other] = None
            at += 1
        text = _listed([int(one) for one in numbers]) if len(numbers) > 1 else ""
        if text and rows and rows[-1].numbers == text:  # numbers that are written alike are one sequence
            text = ",".join(numbers)
        rows += [Row(step, text) for step in (templates if text else first)]
    return rows


def _layer(step: PlanStep) -> tuple[str, str]:
    """What stands before the first number of a step's first new name, and the number; no number where one is not plain."""
    found = _NUMBER.search(step.new[0])
    is_plain = found is not None and len(found[0]) < 9 and found[0] == str(int(found[0]))
    return (step.new[0][: found.start()], found[0]) if found is not None and is_plain else ("", "")


def _template(step: PlanStep, number: str) -> PlanStep:
    """A step with `{i}` for a number in each of its names, where it stands first; as it is where one has braces."""
    names = (*step.old, *step.new)
    if not number or any("{" in name or "}" in name for name in names):
        return step
    place = re.compile(rf"(?<![0-9]){number}(?![0-9])")
    old, new = (tuple(place.sub(_PLACE, name, count=1) for name in names) for names in (step.old, step.new))
    return replace(step, old=old, new=new)


def filled(step: PlanStep, number: str, place: str = _PLACE) -> PlanStep:
    old, new = (tuple(name.replace(place, number) for name in names) for names in (step.old, step.new))
    return replace(step, old=old, new=new)


def unfold(rows: Sequence[Row]) -> list[PlanStep]:
    """The steps of rows; those side by side with the same numbers are done number by number."""
    found: list[PlanStep] = []
    for numbers, group in groupby(rows, key=lambda row: row.numbers):
        steps: list[PlanStep] = []
        for inner, some in groupby(group, key=lambda row: row.inner):
            steps += _counted([row.step for row in some], inner, _INNER, _MOST_STEPS - len(steps))
        found += _counted(steps, numbers, _PLACE, _MOST_STEPS - len(found))
    return found


def _counted(steps: list[PlanStep], text: str, place: str, most: int) -> list[PlanStep]:
    """The steps, once for each of the numbers; as they are without any."""
    if not text:
        return steps
    letter = place[1]
    if odd := next((name for step in steps for name in (*step.old, *step.new) if place not in name), None):
        raise MatchError(f"{odd!r} has no {place}, and its table has {letter} = {text[:40]!r}.")
    numbers: list[int] = []
    for part in text.split(","):
        match = _RANGE.fullmatch(part)
        first = int(match[1]) if match else 0
        last = int(match[2]) if match and match[2] else first
        if match is None or last < first or len(numbers) + last - first >= _MOST_NUMBERS:
            raise MatchError(
                f"{letter} = {text[:40]!r} is not a list of whole numbers.", fix=f'For example: {letter} = "0-11" or "0,2,4"'
            )
        numbers += range(first, last + 1)
    if len(set(numbers)) < len(numbers):
        raise MatchError(f"{letter} = {text[:40]!r} has a number twice.")
    if len(numbers) * len(steps) > most:
        raise MatchError("The plan has more steps than any model, its numbers written out.")
    return [filled(step, str(number), place) for number in numbers for step in steps]


def _listed(numbers: Sequence[int]) -> str:
    """Numbers as they are written: `0-11`, `0,2,4-6`."""
    starts = [0, *(at + 1 for at, (one, other) in enumerate(pairwise(numbers)) if other != one + 1), len(numbers)]
    runs = [numbers[start:end] for start, end in pairwise(starts)]
    return ",".join(f"{run[0]}-{run[-1]}" if len(run) > 1 else str(run[0]) for run in runs)


# --- writing


FORMAT = "ckpt-plan-1"
_HEAD = f"""\
# Matching plan, written by ckpt match: what becomes of every tensor. Edit it, then: ckpt convert IN OUT --plan THIS-FILE
# Steps: copy, reshape, transpose (two dimensions), split and concat (along the first dimension, in the order of the names);
# permute, flatten, stack, unstack, pad, crop, and plans for a family of models: docs/plans.md.
# A table with i = "0-11" is one for each number, which stands for {{i}} in its names.
format = "{FORMAT}"
"""
_MOST_STEPS = 500_000
_BY_SHAPES = ("copy", "reshape", "transpose", "split", "concat")  # of which the shapes alone can say all
_LISTS = (
    ("drop", "Tensors of the checkpoint that are left out."),
    ("unexpected", "Tensors of the checkpoint that no step has: give them one below, or move them to drop."),
    ("missing", "Tensors of the target that no step makes."),
)


def write_plan(plan: Plan, path: str | os.PathLike[str], *, overwrite: bool, inputs: Sequence[object]) -> None:
    """Write a plan: the whole new file, or nothing."""
    check_document(path, "a plan", ".toml", inputs)
    write_document(path, "".join(line + "\n" for line in _lines(plan)), overwrite=overwrite)


def _lines(plan: Plan) -> Iterator[str]:
    yield _HEAD
    for key, comment in _LISTS:
        names: tuple[str, ...] = getattr(plan, key)
        yield f"# {comment}"
        yield from (f"{key} = [", *(f"    {_toml(name)}," for name in names), "]") if names else (f"{key} = []",)
    for row in fold(plan.steps):
        yield "\n[[tensor]]"
        if row.numbers:
            yield f"i = {_toml(row.numbers)}"
        step, one_old, one_new = row.step, row.step.step != "concat", row.step.step != "split"
        yield f"old = {_toml(step.old[0] if one_old else step.old)}"
        yield f"new = {_toml(step.new[0] if one_new else step.new)}"
        yield from (f"step = {_toml(step.step)}", f"reason = {_toml(step.reason)}", f"confidence = {step.confidence}")
        if step.axes:
            yield f"axes = {_toml(step.axes)}"
        yield f"shape = {_toml(step.old_shapes[0] if one_old else step.old_shapes)}"
        if step.step != "copy":
            yield f"to = {_toml(step.new_shapes[0] if one_new else step.new_shapes)}"
    for old, new, before, after in plan.mismatched:
        yield "\n# Partners of different shapes: no step does this one."
        yield from ("[[mismatched]]", f"old = {_toml(old)}", f"new = {_toml(new)}")
        yield from (f"shape = {_toml(before)}", f"to = {_toml(after)}")
    for new, candidates, why in plan.ambiguous:
        yield "\n# Several candidates fit: choose one, and make a [[tensor]] of this entry."
        yield from ("[[ambiguous]]", f"new = {_toml(new)}", f"candidates = {_toml(candidates)}", f"why = {_toml(why)}")


def _toml(value: Any) -> str:
    """Text, a number, or a list of those as TOML. Everything but plain printable text is escaped."""
    if isinstance(value, tuple):
        return f"[{', '.join(map(_toml, value))}]"
    return f'"{"".join(map(_escaped, value))}"' if isinstance(value, str) else str(value)


def _escaped(character: str) -> str:
    code = ord(character)
    if 0xD800 <= code < 0xE000:
        raise MatchError(f"A name with a lone surrogate (\\u{code:04x}) cannot be written to a plan.")
    if character in '"\\':
        return f"\\{character}"
    return character if printable(character) == character else f"\\u{code:04x}" if code < 0x10000 else f"\\U{code:08x}"


# --- reading


_REVERSE = ":reverse"


def read_any_plan(path: str | os.PathLike[str]) -> Plan | PatternPlan:
    """Read a plan file of names or of patterns, or the plan that is shipped under this name."""
    text = os.fspath(path)
    reverse = text.endswith(_REVERSE) and not os.path.exists(text)
    text = text.removesuffix(_REVERSE) if reverse else text
    shipped, other = shipped_names(), _other_way(text) if "-to-" in text else ""
    name = next((name for name in (text, other) if name in shipped), None)
    try:
        document = load_toml(_text(Path(text)) if name is None else (_FOLDER / f"{name}.toml").read_text("utf-8"))
    except ValueError as error:
        raise MatchError(f"The plan {path} is not TOML.", why=f"{error}.") from None
    try:
        if document.get("format") != FORMAT:
            raise MatchError(f"It says format = {brief(document.get('format'))}; this version reads {FORMAT!r}.")
        if read_flag(document.get("patterns", False), "patterns"):
            patterns = read_pattern_plan(document, str(path))
            return patterns.reversed() if (name is not None and name == other) != reverse else patterns
        if reverse:
            raise MatchError("`:reverse` is for plans of patterns; this one names every tensor.")
        plan = _plan(document)
        check(plan)
    except MatchError as error:
        error.what = f"{path}: {error.what}"
        raise
    return plan


def _text(path: Path) -> str:
    try:
        fd = open_regular(path)
    except NotACheckpointError as error:  # missing, a folder, a pipe
        near = did_you_mean(str(path), (*shipped_names(), *map(_other_way, shipped_names()))) or error.fix
        raise MatchError(f"The plan {path} cannot be read.", why=error.why, fix=near) from None
    with open(fd, "rb") as file:
        limits.HEADER.check(os.fstat(fd).st_size, f"{path} is larger than any plan.")
        data = file.read()
    try:
        return data.decode("utf-8")
    except UnicodeDecodeError:
        raise MatchError(f"The plan {path} is not TOML.", why="It is not UTF-8.") from None


def _plan(document: dict[str, Any]) -> Plan:
    lists = [key for key, _ in _LISTS]
    fields = Fields(document, "the plan", ("format", "patterns", *lists, "tensor", "mismatched", "ambiguous"))
    rows = []
    for label, row in fields.tables("tensor"):
        for letter in "ij":
            if letter in row and not (isinstance(row[letter], str) and row[letter]):
                raise MatchError(f'{label}: {letter} = {brief(row[letter])} is not text such as "0-11".')
        if "j" in row and "i" not in row:
            raise MatchError(f"{label}: it has a j and no i.", fix="One number alone is i.")
        rows.append(Row(_step(row, label), row.get("i", ""), row.get("j", "")))
    mismatched, ambiguous = [], []
    for label, row in fields.tables("mismatched"):
        given = Fields(row, label, ("old", "new", "shape", "to"))
        shapes = given.read("shape", read_shape), given.read("to", read_shape)
        mismatched.append((given.read("old", read_name), given.read("new", read_name), *shapes))
    for label, row in fields.tables("ambiguous"):
        given = Fields(row, label, ("new", "candidates", "why"))
        said = given.read("candidates", read_names), given.read("why", read_name, "?")
        ambiguous.append((given.read("new", read_name), *said))
    drop, unexpected, missing = (read_names(document.get(key, []), key) for key in lists)
    return Plan(tuple(unfold(rows)), drop, unexpected, missing, tuple(mismatched), tuple(ambiguous))


def _step(row: dict[str, Any], label: str) -> PlanStep:
    step = row.get("step", "copy")
    if step not in STEPS:
        raise MatchError(f"{label}: step = {brief(step)} is not one of {', '.join(STEPS)}.")
    fields = Fields(row, label, ("i", "j", "old", "new", "step", "reason", "confidence", "shape", "to", *FIELDS[step]))
    old, new = fields.several("old", read_name), fields.several("new", read_name)
    old_shapes, new_shapes = fields.several("shape", read_shape), fields.several("to", read_shape, None)
    reason, confidence = fields.read("reason", read_name, "edited"), fields.read("confidence", read_number, 1.0)
    layout: Layout | None = None
    if step not in _BY_SHAPES or any(key in fields for key in FIELDS[step] if key != "to"):
        layout, new_shapes = _solved(fields, step, old_shapes, len(new), new_shapes)
    elif new_shapes is None:
        new_shapes = old_shapes if step == "copy" else fields.several("to", read_shape)
    return PlanStep(cast("StepName", step), old, new, old_shapes, new_shapes, reason, confidence, layout)


def _solved(
    fields: Fields, step: str, shapes: tuple[Shape, ...], parts: int, said: tuple[Shape, ...] | None
) -> tuple[Layout, tuple[Shape, ...]]:
    """The geometry of a step, and the shapes that it makes, which `to` may say too."""
    form = read_form(fields, step)
    if len(shapes) != 1 and step not in SEVERAL_OLD:
        raise MatchError(f"{fields.label}: a {step} has one shape.")
    layout, made = solve(step, Task(form, shapes, parts, {}, fields.label, uneven=True))
    if said not in (None, made):
        texts = [", ".join(str(list(shape)) for shape in shapes) for shapes in (made, said or ())]
        raise MatchError(f"{fields.label}: it makes {texts[0]}, not {texts[1]}.")
    return layout, made


_FOLDER = files("ckpt_tools.fit") / "families"


@cache
def shipped_names() -> tuple[str, ...]:
    """The names of the plans that are shipped, without those of the other way."""
    return tuple(sorted(item.name.removesuffix(".toml") for item in _FOLDER.iterdir() if item.name.endswith(".toml")))


def _other_way(name: str) -> str:
    """The name of a plan the other way round: `a-x-to-y` is `a-y-to-x`."""
    left, _, new = name.rpartition("-to-")
    family, _, old = left.rpartition("-")
    return f"{family}-{new}-to-{old}"
