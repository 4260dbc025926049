"""Plan files: TOML that a person can read, edit and replay. Read with `tomllib`, written here, checked with our own errors."""

from __future__ import annotations

import os
import re
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache
from importlib.resources import files
from itertools import groupby, pairwise
from pathlib import Path
from typing import Any, cast

from ckpt_tools import limits
from ckpt_tools.errors import MatchError, NotACheckpointError
from ckpt_tools.fit.fields import check_known, read_flag, read_name, read_names, read_several, read_shape, tables
from ckpt_tools.fit.forms import FIELDS, SEVERAL_OLD, Task, solve
from ckpt_tools.fit.layout import Layout
from ckpt_tools.fit.plans import STEPS, Plan, PlanStep, StepName, check
from ckpt_tools.fit.rows import PatternPlan, read_form, read_pattern_plan
from ckpt_tools.io.content import Literal, Piece
from ckpt_tools.io.output import open_regular, replacing
from ckpt_tools.io.parsers import brief, load_toml
from ckpt_tools.io.writer import write
from ckpt_tools.matching.records import Shape
from ckpt_tools.text import did_you_mean, printable
from ckpt_tools.tree.output_names import check_document_name

# --- steps that differ in one number alone, as one


PLACE, INNER = "{i}", "{j}"
_NUMBER = re.compile(r"[0-9]+")
_RANGE = re.compile(r"(0|[1-9][0-9]{0,8})(?:-([1-9][0-9]{0,8}))?")
_FEWEST_SAVED = 2
_LONGEST = 4096  # steps of one sequence, which are looked at again from each of them
_MOST_NUMBERS = 100_000


@dataclass(frozen=True, slots=True)
class Row:
    """One table of a plan: a step, whose names have `{i}` for these numbers and `{j}` for the inner ones, if there are any."""

    step: PlanStep
    numbers: str = ""
    inner: str = ""


def fold(steps: Sequence[PlanStep], place: str = PLACE) -> list[Row]:
    """The fewest rows that are these steps, in their order, with `place` for the number that they differ in."""
    places = _by_template(steps)
    rows: list[Row] = []
    at = 0
    while at < len(steps):
        best = max((_run(steps, at, other, place) for other in _repeats(steps, at, places)), key=_saved, default=None)
        if best is None or _saved(best) < _FEWEST_SAVED:
            rows.append(Row(steps[at]))
            at += 1
            continue
        templates, numbers = best
        text = _listed(numbers)
        if rows and rows[-1].numbers == text:  # a sequence of its own: numbers that are written alike are one sequence
            text = ",".join(map(str, numbers))
        inner = fold(templates, INNER) if place == PLACE else map(Row, templates)
        rows += [Row(row.step, text, row.numbers) for row in inner]
        at += len(templates) * len(numbers)
    return rows


_Run = tuple[list[PlanStep], list[int]]


def _saved(run: _Run) -> int:
    return len(run[0]) * (len(run[1]) - 1)


def _by_template(steps: Sequence[PlanStep]) -> Mapping[tuple[str, str], list[int]]:
    """What stands before and behind each number of a step's first new name -> the steps, the last first."""
    found: dict[tuple[str, str], list[int]] = defaultdict(list)
    for number in range(len(steps) - 1, -1, -1):
        for key in _around(steps[number]):
            found[key].append(number)
    return found


def _around(step: PlanStep) -> Iterator[tuple[str, str]]:
    name = step.new[0]
    for found in _NUMBER.finditer(name):
        yield name[: found.start()], name[found.end() :]


def _repeats(steps: Sequence[PlanStep], at: int, places: Mapping[tuple[str, str], list[int]]) -> Iterator[int]:
    """The next step that is this one but for a number."""
    for key in _around(steps[at]):
        row = places[key]
        while row and row[-1] <= at:
            row.pop()
        if row and row[-1] - at <= _LONGEST:
            yield row[-1]


def _run(steps: Sequence[PlanStep], at: int, other: int, place: str) -> _Run:
    """The sequence that begins here, with all numbers under which it comes back."""
    length = other - at
    pair = _numbers(steps[at].new[0], steps[other].new[0])
    pairs = list(zip(steps[at:other], steps[other : other + length], strict=False))
    if pair is None or len(pairs) < length:
        return [], [0]
    found: list[PlanStep] = []
    for one, two in pairs:
        if (template := _template(one, two, pair, place)) is None:
            return [], [0]
        found.append(template)
    numbers = [int(text) for text in pair]
    while (number := _next(steps, at + len(numbers) * length, found, place)) is not None and number not in numbers:
        numbers.append(number)
    return found, numbers


def _numbers(one: str, other: str) -> tuple[str, str] | None:
    """The one number in which two names differ, as it is in both."""
    pairs = {pair for pair in zip(_NUMBER.findall(one), _NUMBER.findall(other), strict=False) if pair[0] != pair[1]}
    plain = len(pairs) == 1 and all(text == str(int(text)) and len(text) < 9 for text in next(iter(pairs)))
    return next(iter(pairs)) if plain else None


def _template(one: PlanStep, other: PlanStep, pair: tuple[str, str], place: str) -> PlanStep | None:
    """A step with `place` for the number in which it differs from another; None where they differ otherwise."""
    if replace(one, old=other.old, new=other.new) != other:
        return None
    sides: list[tuple[str, ...]] = []
    for mine, theirs in ((one.old, other.old), (one.new, other.new)):
        names = [_name(*row, pair, place) for row in zip(mine, theirs, strict=False)]
        if len(mine) != len(theirs) or any(name is None or place not in name for name in names):
            return None
        sides.append(tuple(name for name in names if name is not None))
    return replace(one, old=sides[0], new=sides[1])


def _name(one: str, other: str, pair: tuple[str, str], place: str) -> str | None:
    bare = one if place == PLACE else one.replace(PLACE, "")
    if "{" in bare or "}" in bare or _NUMBER.sub("#", one) != _NUMBER.sub("#", other):
        return None
    numbers = [*zip(_NUMBER.findall(one), _NUMBER.findall(other), strict=True)]
    if any(mine != theirs and (mine, theirs) != pair for mine, theirs in numbers):
        return None
    texts = iter([mine if mine == theirs else place for mine, theirs in numbers])
    return _NUMBER.sub(lambda _: next(texts), one)


def _next(steps: Sequence[PlanStep], at: int, templates: Sequence[PlanStep], place: str) -> int | None:
    """The number under which the sequence comes once more, right here."""
    if at + len(templates) > len(steps):
        return None
    before, _, _ = templates[0].new[0].partition(place)
    found = _NUMBER.match(steps[at].new[0], len(before))
    if found is None or len(found[0]) > 9 or found[0] != str(int(found[0])):
        return None
    same = all(filled(template, found[0], place) == steps[at + behind] for behind, template in enumerate(templates))
    return int(found[0]) if same else None


def filled(step: PlanStep, number: str, place: str = PLACE) -> PlanStep:
    """A step with a number in its place, that of `{i}` or `{j}`."""
    old, new = (tuple(name.replace(place, number) for name in names) for names in (step.old, step.new))
    return replace(step, old=old, new=new)


def unfold(rows: Sequence[Row], most: int) -> list[PlanStep]:
    """The steps of rows; those side by side with the same numbers are done number by number."""
    found: list[PlanStep] = []
    for numbers, group in groupby(rows, key=lambda row: row.numbers):
        steps: list[PlanStep] = []
        for inner, some in groupby(group, key=lambda row: row.inner):
            steps += _counted([row.step for row in some], inner, INNER, most - len(steps))
        found += _counted(steps, numbers, PLACE, most - len(found))
    return found


def _counted(steps: list[PlanStep], numbers: str, place: str, most: int) -> list[PlanStep]:
    """The steps, once for each of the numbers; as they are without any."""
    if not numbers:
        return steps
    letter = place.strip("{}")
    if odd := next((name for step in steps for name in (*step.old, *step.new) if place not in name), None):
        raise MatchError(f"{odd!r} has no {place}, and its table has {letter} = {numbers[:40]!r}.")
    counted = _read(numbers, letter)
    if len(counted) * len(steps) > most:
        raise MatchError("The plan has more steps than any model, its numbers written out.")
    return [filled(step, str(number), place) for number in counted for step in steps]


def _listed(numbers: Sequence[int]) -> str:
    """Numbers as they are written: `0-11`, `0,2,4-6`."""
    starts = [0, *(at + 1 for at, (one, other) in enumerate(pairwise(numbers)) if other != one + 1), len(numbers)]
    runs = [numbers[start:end] for start, end in pairwise(starts)]
    return ",".join(f"{run[0]}-{run[-1]}" if len(run) > 1 else str(run[0]) for run in runs)


def _read(text: str, letter: str) -> list[int]:
    found: list[int] = []
    for part in text.split(","):
        match = _RANGE.fullmatch(part)
        first = int(match[1]) if match else 0
        last = int(match[2]) if match and match[2] else first
        if match is None or last < first or len(found) + last - first >= _MOST_NUMBERS:
            raise MatchError(
                f"{letter} = {text[:40]!r} is not a list of whole numbers.", fix=f'For example: {letter} = "0-11" or "0,2,4"'
            )
        found += range(first, last + 1)
    if len(set(found)) < len(found):
        raise MatchError(f"{letter} = {text[:40]!r} has a number twice.")
    return found


FORMAT = "ckpt-plan-1"
_HEAD = f"""\
# Matching plan, written by ckpt match: what becomes of every tensor. Edit it, then: ckpt convert IN OUT --plan THIS-FILE
# Steps: copy, reshape, transpose (two dimensions), split and concat (along the first dimension, in the order of the names);
# permute, flatten, stack, unstack, pad, crop, and plans for a family of models: docs/plans.md.
# A table with i = "0-11" is one for each number, which stands for {{i}} in its names; j for {{j}} likewise.
format = "{FORMAT}"
"""
_MOST_STEPS = 500_000
_BY_SHAPES = ("copy", "reshape", "transpose", "split", "concat")  # of which the shapes alone can say all
_LISTS = (
    ("drop", "Tensors of the checkpoint that are left out."),
    ("unexpected", "Tensors of the checkpoint that no step has: give them one below, or move them to drop."),
    ("missing", "Tensors of the target that no step makes."),
)


# --- writing


def write_plan(plan: Plan, path: str | os.PathLike[str], *, overwrite: bool = False) -> None:
    """Write a plan: the whole new file, or nothing."""
    check_document_name(path, "a plan", ".toml")
    data = "".join(line + "\n" for line in _lines(plan)).encode()
    with replacing(path, overwrite=overwrite) as output:
        write([Piece(Literal(data))], output)


def _lines(plan: Plan) -> Iterator[str]:
    yield _HEAD
    for key, comment in _LISTS:
        names: tuple[str, ...] = getattr(plan, key)
        yield f"# {comment}"
        if names:
            yield f"{key} = ["
            yield from (f"    {_toml(name)}," for name in names)
            yield "]"
        else:
            yield f"{key} = []"
    for row in fold(plan.steps):
        yield "\n[[tensor]]"
        if row.numbers:
            yield f"i = {_toml(row.numbers)}"
        if row.inner:
            yield f"j = {_toml(row.inner)}"
        yield from _step_lines(row.step)
    for old, new, before, after in plan.mismatched:
        yield "\n# Partners of different shapes: no step does this one."
        yield from ("[[mismatched]]", f"old = {_toml(old)}", f"new = {_toml(new)}")
        yield from (f"shape = {_toml(before)}", f"to = {_toml(after)}")
    for new, candidates, why in plan.ambiguous:
        yield "\n# Several candidates fit: choose one, and make a [[tensor]] of this entry."
        yield from ("[[ambiguous]]", f"new = {_toml(new)}", f"candidates = {_toml(candidates)}", f"why = {_toml(why)}")


def _step_lines(step: PlanStep) -> Iterator[str]:
    yield f"old = {_toml(step.old if step.step == 'concat' else step.old[0])}"
    yield f"new = {_toml(step.new if step.step == 'split' else step.new[0])}"
    yield f"step = {_toml(step.step)}"
    yield f"reason = {_toml(step.reason)}"
    yield f"confidence = {step.confidence}"
    if step.axes:
        yield f"axes = {_toml(step.axes)}"
    yield f"shape = {_toml(step.old_shapes if step.step == 'concat' else step.old_shapes[0])}"
    if step.step != "copy":
        yield f"to = {_toml(step.new_shapes if step.step == 'split' else step.new_shapes[0])}"


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
    found = find_shipped(text)
    try:
        document = load_toml(_text(Path(text)) if found is None else shipped_text(found[0]))
    except ValueError as error:
        raise MatchError(f"The plan {path} is not TOML.", why=f"{error}.") from None
    try:
        if document.get("format") != FORMAT:
            raise MatchError(f"It says format = {brief(document.get('format'))}; this version reads {FORMAT!r}.")
        if read_flag(document.get("patterns", False), "patterns"):
            patterns = read_pattern_plan(document, str(path))
            return patterns.reversed() if (found is not None and found[1]) != reverse else patterns
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
        near = did_you_mean(str(path), all_shipped()) or error.fix
        raise MatchError(f"The plan {path} cannot be read.", why=error.why, fix=near) from None
    with open(fd, "rb") as file:
        limits.HEADER.check(os.fstat(fd).st_size, f"{path} is larger than any plan.")
        data = file.read()
    try:
        return data.decode("utf-8")
    except UnicodeDecodeError:
        raise MatchError(f"The plan {path} is not TOML.", why="It is not UTF-8.") from None


def _plan(document: dict[str, Any]) -> Plan:
    check_known(
        document, ("format", "patterns", "drop", "unexpected", "missing", "tensor", "mismatched", "ambiguous"), "the plan"
    )
    drop, unexpected, missing = (read_names(document.get(key, []), key) for key, _ in _LISTS)
    return Plan(
        tuple(_steps(document)),
        mismatched=tuple(_mismatched(row, f"mismatched {number}") for number, row in tables(document, "mismatched")),
        ambiguous=tuple(_ambiguous(row, f"ambiguous {number}") for number, row in tables(document, "ambiguous")),
        drop=drop,
        unexpected=unexpected,
        missing=missing,
    )


def _steps(document: dict[str, Any]) -> list[PlanStep]:
    rows = []
    for number, row in tables(document, "tensor"):
        for letter in "ij":
            if letter in row and not (isinstance(row[letter], str) and row[letter]):
                raise MatchError(f'tensor {number}: {letter} = {brief(row[letter])} is not text such as "0-11".')
        if "j" in row and "i" not in row:
            raise MatchError(f"tensor {number}: it has a j and no i.", fix="One number alone is i.")
        rows.append(Row(_step(row, f"tensor {number}"), row.get("i", ""), row.get("j", "")))
    return unfold(rows, _MOST_STEPS)


def _step(row: dict[str, Any], label: str) -> PlanStep:
    step = row.get("step", "copy")
    if step not in STEPS:
        raise MatchError(f"{label}: step = {brief(step)} is not one of {', '.join(STEPS)}.")
    check_known(row, ("i", "j", "old", "new", "step", "reason", "confidence", "shape", "to", *FIELDS[step]), label)
    old, new = (read_several(row.get(key), read_name, f"{label}: {key}") for key in ("old", "new"))
    old_shapes = read_several(row.get("shape"), read_shape, f"{label}: shape")
    confidence, reason = row.get("confidence", 1.0), read_name(row.get("reason", "edited"), f"{label}: reason")
    if type(confidence) not in (int, float) or not -1e9 < confidence < 1e9:
        raise MatchError(f"{label}: confidence = {brief(confidence)} is not a number.")
    layout: Layout | None = None
    if step in _BY_SHAPES and not any(key in row for key in FIELDS[step] if key != "to"):
        same = step == "copy" and "to" not in row
        new_shapes = old_shapes if same else read_several(row.get("to"), read_shape, f"{label}: to")
    else:
        layout, new_shapes = _solved(row, step, old_shapes, len(new), label)
    return PlanStep(cast("StepName", step), old, new, old_shapes, new_shapes, reason, float(confidence), layout)


def _solved(
    row: dict[str, Any], step: str, shapes: tuple[Shape, ...], parts: int, label: str
) -> tuple[Layout, tuple[Shape, ...]]:
    """The geometry of a step, and the shapes that it makes, which `to` may say too."""
    form = read_form({key: value for key, value in row.items() if key in FIELDS[step]}, step, label)
    if len(shapes) != 1 and step not in SEVERAL_OLD:
        raise MatchError(f"{label}: a {step} has one shape.")
    layout, made = solve(step, Task(form, shapes, parts, {}, label, uneven=True))
    if "to" in row and (said := read_several(row["to"], read_shape, f"{label}: to")) != made:
        texts = [", ".join(str(list(shape)) for shape in shapes) for shapes in (made, said)]
        raise MatchError(f"{label}: it makes {texts[0]}, not {texts[1]}.")
    return layout, made


def _mismatched(row: dict[str, Any], label: str) -> tuple[str, str, Shape, Shape]:
    check_known(row, ("old", "new", "shape", "to"), label)
    names = (read_name(row.get(key), f"{label}: {key}") for key in ("old", "new"))
    shapes = (read_shape(row.get(key), f"{label}: {key}") for key in ("shape", "to"))
    return (*names, *shapes)  # type: ignore[return-value]


def _ambiguous(row: dict[str, Any], label: str) -> tuple[str, tuple[str, ...], str]:
    check_known(row, ("new", "candidates", "why"), label)
    new, why = read_name(row.get("new"), f"{label}: new"), read_name(row.get("why", "?"), f"{label}: why")
    return new, read_names(row.get("candidates"), f"{label}: candidates"), why


_HERE = "ckpt_tools.fit"


@cache
def shipped_names() -> tuple[str, ...]:
    """The names of the plans that are shipped, without those of the other way."""
    folder = files(_HERE) / "families"
    return tuple(sorted(item.name.removesuffix(".toml") for item in folder.iterdir() if item.name.endswith(".toml")))


def other_way(name: str) -> str:
    """The name of a plan the other way round: `a-x-to-y` is `a-y-to-x`."""
    left, _, new = name.rpartition("-to-")
    family, _, old = left.rpartition("-")
    return f"{family}-{new}-to-{old}"


def all_shipped() -> tuple[str, ...]:
    """The names of the plans that are shipped, in both ways."""
    return *shipped_names(), *map(other_way, shipped_names())


def find_shipped(name: str) -> tuple[str, bool] | None:
    """The shipped plan of a name, and whether it is to be read the other way round; None where none has this name."""
    if name in shipped_names():
        return name, False
    if "-to-" in name and (other := other_way(name)) in shipped_names():
        return other, True
    return None


def shipped_text(name: str) -> str:
    """The text of a shipped plan."""
    return (files(_HERE) / "families" / f"{name}.toml").read_text("utf-8")
