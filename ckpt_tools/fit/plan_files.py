"""Plan files: TOML that a person can read, edit and replay. Read with `tomllib`, written here, checked with our own errors."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, cast

from ckpt_tools import limits
from ckpt_tools.errors import MatchPlanError, NotACheckpointError
from ckpt_tools.fit.plans import (
    STEPS,
    Plan,
    PlanStep,
    StepName,
    check,
)
from ckpt_tools.io.content import Literal, Piece
from ckpt_tools.io.output import open_regular, replacing
from ckpt_tools.io.parsers import brief, load_toml
from ckpt_tools.io.writer import write
from ckpt_tools.matching.records import Shape
from ckpt_tools.text import printable
from ckpt_tools.tree.nodes import MAX_DIMENSIONS, MAX_ELEMENTS
from ckpt_tools.tree.output_names import check_document_name

FORMAT = "ckpt-plan-1"
_HEAD = f"""\
# Matching plan, written by ckpt match: what becomes of every tensor. Edit it, then: ckpt convert IN OUT --plan THIS-FILE
# Steps: copy, reshape, transpose (two dimensions), split and concat (along the first dimension, in the order of the names).
format = "{FORMAT}"
"""
_LISTS = (
    ("drop", "Tensors of the checkpoint that are left out."),
    ("unexpected", "Tensors of the checkpoint that no step has: give them one below, or move them to drop."),
    ("missing", "Tensors of the target that no step makes."),
)


# --- writing


def write_plan(plan: Plan, path: str | os.PathLike[str], *, overwrite: bool = False) -> None:
    """Write a plan: the whole new file, or nothing.

    Raises:
        MatchPlanError: a name that TOML cannot hold. OutputError: the file cannot be written. UsageError: a checkpoint's name.
    """
    check_document_name(path, "a plan", ".toml")
    data = "".join(line + "\n" for line in _lines(plan)).encode()
    with replacing(path, overwrite=overwrite) as output:
        write([Piece(Literal(data))], output, None, None)


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
    for step in plan.steps:
        yield "\n[[tensor]]"
        yield from _step_lines(step)
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
        raise MatchPlanError(f"A name with a lone surrogate (\\u{code:04x}) cannot be written to a plan.")
    if character in '"\\':
        return f"\\{character}"
    return character if printable(character) == character else f"\\u{code:04x}" if code < 0x10000 else f"\\U{code:08x}"


# --- reading


def read_plan(path: str | os.PathLike[str]) -> Plan:
    """Read a plan file and check that its steps can be done.

    Raises:
        MatchPlanError: it cannot be read, is not TOML, has unknown or wrong fields, or steps that cannot be done.
    """
    try:
        document = load_toml(_text(Path(path)))
    except ValueError as error:
        raise MatchPlanError(f"The plan {path} is not TOML.", why=f"{error}.") from None
    try:
        plan = _plan(document)
        check(plan)
    except MatchPlanError as error:
        error.what = f"{path}: {error.what}"
        raise
    return plan


def _text(path: Path) -> str:
    try:
        fd = open_regular(path)
    except NotACheckpointError as error:  # missing, a folder, a pipe
        raise MatchPlanError(f"The plan {path} cannot be read.", why=error.why, fix=error.fix) from None
    with open(fd, "rb") as file:
        limits.PICKLE_BYTES.check(os.fstat(fd).st_size, f"{path} is larger than any plan.")
        data = file.read()
    try:
        return data.decode("utf-8")
    except UnicodeDecodeError:
        raise MatchPlanError(f"The plan {path} is not TOML.", why="It is not UTF-8.") from None


def _plan(document: dict[str, Any]) -> Plan:
    _known(document, ("format", "drop", "unexpected", "missing", "tensor", "mismatched", "ambiguous"), "the plan")
    if document.get("format") != FORMAT:
        raise MatchPlanError(f"It says format = {brief(document.get('format'))}; this version reads {FORMAT!r}.")
    lists = {key: _names(document.get(key, []), key) for key, _ in _LISTS}
    return Plan(
        tuple(_step(row, f"tensor {number}") for number, row in _rows(document, "tensor")),
        mismatched=tuple(_mismatched(row, f"mismatched {number}") for number, row in _rows(document, "mismatched")),
        ambiguous=tuple(_ambiguous(row, f"ambiguous {number}") for number, row in _rows(document, "ambiguous")),
        **lists,
    )


def _rows(document: dict[str, Any], key: str) -> Iterator[tuple[int, dict[str, Any]]]:
    rows = document.get(key, [])
    if not isinstance(rows, list) or not all(isinstance(row, dict) for row in rows):
        raise MatchPlanError(f"{key!r} must be tables: [[{key}]].")
    yield from enumerate(rows, 1)


def _step(row: dict[str, Any], label: str) -> PlanStep:
    _known(row, ("old", "new", "step", "reason", "confidence", "shape", "to"), label)
    step = row.get("step", "copy")
    if step not in STEPS:
        raise MatchPlanError(f"{label}: step = {brief(step)} is not one of {', '.join(STEPS)}.")
    old, new = (_several(row.get(key), _name, f"{label}: {key}") for key in ("old", "new"))
    old_shapes = _several(row.get("shape"), _shape, f"{label}: shape")
    new_shapes = old_shapes if step == "copy" and "to" not in row else _several(row.get("to"), _shape, f"{label}: to")
    confidence, reason = row.get("confidence", 1.0), row.get("reason", "edited")
    if type(confidence) not in (int, float) or not -1e9 < confidence < 1e9:
        raise MatchPlanError(f"{label}: confidence = {brief(confidence)} is not a number.")
    return PlanStep(
        cast("StepName", step), old, new, old_shapes, new_shapes, _name(reason, f"{label}: reason"), float(confidence)
    )


def _mismatched(row: dict[str, Any], label: str) -> tuple[str, str, Shape, Shape]:
    _known(row, ("old", "new", "shape", "to"), label)
    names = (_name(row.get(key), f"{label}: {key}") for key in ("old", "new"))
    shapes = (_shape(row.get(key), f"{label}: {key}") for key in ("shape", "to"))
    return (*names, *shapes)  # type: ignore[return-value]


def _ambiguous(row: dict[str, Any], label: str) -> tuple[str, tuple[str, ...], str]:
    _known(row, ("new", "candidates", "why"), label)
    new, why = _name(row.get("new"), f"{label}: new"), _name(row.get("why", "?"), f"{label}: why")
    return new, _names(row.get("candidates"), f"{label}: candidates"), why


def _known(row: dict[str, Any], keys: tuple[str, ...], label: str) -> None:
    if unknown := [key for key in row if key not in keys]:
        raise MatchPlanError(f"{label}: {unknown[0]!r} is not a field.", why=f"Known are {', '.join(keys)}.")


def _name(value: Any, label: str) -> str:
    if not isinstance(value, str) or not value:
        raise MatchPlanError(f"{label} must be text, not {brief(value)}.")
    return value


def _names(value: Any, label: str) -> tuple[str, ...]:
    if not isinstance(value, list):
        raise MatchPlanError(f"{label} must be a list of names.")
    names = tuple(_name(name, label) for name in value)
    if len(set(names)) < len(names):
        raise MatchPlanError(f"{label} has a name twice.")
    return names


def _shape(value: Any, label: str) -> Shape:
    good = isinstance(value, list) and len(value) <= MAX_DIMENSIONS and all(type(size) is int for size in value)
    if not good or not all(0 <= size <= MAX_ELEMENTS for size in value):
        raise MatchPlanError(f"{label} must be a list of sizes, not {brief(value)}.")
    return tuple(value)


def _several(value: Any, read: Callable[[Any, str], Any], label: str) -> tuple[Any, ...]:
    """One, or a list of several where a step has several."""
    nested = isinstance(value, list) and value and (isinstance(value[0], list) or read is _name)
    return tuple(read(item, label) for item in value) if nested else (read(value, label),)
