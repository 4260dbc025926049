"""A plan of patterns as it is read from its file: steps, values, prefixes; and the same plan the other way round."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import product
from typing import Any, TypeAlias

from ckpt_tools.errors import MatchError
from ckpt_tools.fit.forms import FIELDS, SEVERAL_NEW, SEVERAL_OLD, Form, names_in, read_arrow, read_side, size_of
from ckpt_tools.io.parsers import brief
from ckpt_tools.tree.nodes import MAX_DIMENSIONS, MAX_ELEMENTS

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
    if step.step == "reshape":
        raise MatchError(f"{step.label}: a reshape has no inverse.", fix="Say it as a permute: axes = '(a b) -> a b'.")
    if step.step in ("pad", "crop") and form.was is None:
        raise MatchError(f"{step.label}: the inverse of a {step.step} needs `was`, the size before it.")
    if step.step in ("pad", "crop"):
        return replace(form, size=form.was, was=form.size)
    if step.step == "permute" and form.axes is not None:
        before, _, after = form.axes.partition("->")
        return replace(form, axes=f"{after.strip()} -> {before.strip()}")
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


def read_form(fields: Fields, step: str) -> Form:
    """The fields that say how a step is done."""
    given = {key for key in FIELDS[step] if key in fields}
    found = {key: fields.read(key, read) for key, read in _FORM.items() if key in given}
    sizes = [*found.get("sizes", ()), *(text for text in found.get("to", ()) if text != "-1")]
    for text in (*sizes, found.get("size", "1"), found.get("was", "1")):
        size_of(text, {})
    axes = fields.read("axes", read_name) if "axes" in given else None
    if axes is not None:
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


# --- names: in `layers.{i}.attn.wq.weight` a placeholder is a whole number; `{part:weight|bias}` is one of these words


Binding: TypeAlias = tuple[tuple[str, str], ...]  # (placeholder, its digits), by placeholder
_PART = re.compile(r"\{\{|\}\}|\{([^{}]*)\}|[{}]")
_DIGITS = re.compile(r"[0-9]+")
_PLACEHOLDER = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")
_WORDS = re.compile(r"\{([A-Za-z_][A-Za-z0-9_]*):([^{}]*)\}")
_MOST_WORDS = 64  # ways to write out the words of one step
_MOST_DIGITS = 18
_MOST_WAYS = 16  # in which patterns of one text write down some numbers and leave others open: a name is looked up in each


@dataclass(frozen=True, slots=True)
class NamePattern:
    """A name with placeholders for whole numbers."""

    text: str
    pieces: tuple[str, ...]
    placeholders: tuple[str, ...]

    @classmethod
    def read(cls, text: str) -> NamePattern:
        pieces, placeholders, at = [""], [], 0
        for part in _PART.finditer(text):
            pieces[-1] += text[at : part.start()]
            at = part.end()
            if part[0] in ("{{", "}}"):
                pieces[-1] += part[0][0]
            elif part[1] is None or not _PLACEHOLDER.fullmatch(part[1]):
                why = "One is {i}, a whole number, or {part:weight|bias}; a brace itself is written twice."
                raise MatchError(f"{text!r}: {part[0]!r} is not a placeholder.", why=why)
            else:
                placeholders.append(part[1])
                pieces.append("")
        pieces[-1] += text[at:]
        _check_apart(text, pieces)
        return cls(text, tuple(pieces), tuple(placeholders))

    @property
    def key(self) -> str:
        """The name with `#` for every number, written or not."""
        return _DIGITS.sub("#", "0".join(self.pieces))

    @property
    def names(self) -> frozenset[str]:
        return frozenset(self.placeholders)

    def numbers(self) -> list[str]:
        """What stands at each `#` of the key: digits, or a placeholder in braces."""
        found: list[str] = []
        for piece, placeholder in zip(self.pieces, (*self.placeholders, None), strict=True):
            found += _DIGITS.findall(piece)
            found += [f"{{{placeholder}}}"] if placeholder is not None else []
        return found

    def fill(self, binding: Mapping[str, str]) -> str:
        """The name that has these numbers."""
        filled = [self.pieces[0]]
        for placeholder, piece in zip(self.placeholders, self.pieces[1:], strict=True):
            filled += (binding[placeholder], piece)
        return "".join(filled)


def _check_apart(text: str, pieces: list[str]) -> None:
    """What is a number must be told from the text: two that touch could be cut in several ways."""
    inner = (*((piece, "") for piece in pieces[1:-1]), (pieces[-1], " "))
    for number, (piece, end) in enumerate(inner if len(pieces) > 1 else ()):
        before = pieces[number]
        if (not piece and not end) or piece[:1].isdigit() or before[-1:].isdigit():
            raise MatchError(f"{text!r}: a placeholder touches a digit or another placeholder.")


def written_out(texts: Iterable[str], label: str) -> Iterator[dict[str, str]]:
    """For all words that placeholders in the texts may be: placeholder -> word, every combination."""
    words: dict[str, tuple[str, ...]] = {}
    for text in texts:
        for found in _WORDS.finditer(text):
            listed = tuple(found[2].split("|"))
            if words.setdefault(found[1], listed) != listed or len(set(listed)) < len(listed) or not all(listed):
                raise MatchError(f"{label}: {found[0]!r} must list each word once, and the same words everywhere.")
    count = 1
    for listed in words.values():
        count *= len(listed)
        if count > _MOST_WORDS:
            raise MatchError(f"{label}: its words can be written out in more than {_MOST_WORDS} ways.")
    for chosen in product(*words.values()):
        yield dict(zip(words, chosen, strict=True))


def with_words(text: str, chosen: Mapping[str, str]) -> str:
    """A text with words in the place of their placeholders."""

    def word(found: re.Match[str]) -> str:
        name = (found[1] or "").partition(":")[0]
        return chosen.get(name, found[0])

    return _PART.sub(word, text)


class Index:
    """Patterns by what a name looks like, each with what it stands for."""

    def __init__(self) -> None:
        # the key of a name -> the places of its numbers that a pattern writes down -> these numbers -> all numbers as the
        # pattern has them, and what it stands for
        self._by_key: dict[str, dict[tuple[int, ...], dict[tuple[str, ...], list[tuple[list[str], object]]]]] = {}

    def add(self, pattern: NamePattern, what: object) -> None:
        numbers = pattern.numbers()
        places = tuple(place for place, number in enumerate(numbers) if not number.startswith("{"))
        written = tuple(numbers[place] for place in places)
        by_places = self._by_key.setdefault(pattern.key, {})
        by_places.setdefault(places, {}).setdefault(written, []).append((numbers, what))
        if len(by_places) > _MOST_WAYS:
            raise MatchError(f"More than {_MOST_WAYS} patterns like {pattern.text!r} differ in which numbers they write down.")

    def find(self, name: str) -> list[tuple[Any, Binding]]:
        """What stands for a name, with the numbers in the place of its placeholders."""
        by_places = self._by_key.get(_DIGITS.sub("#", name))
        if by_places is None:
            return []
        numbers = _DIGITS.findall(name)
        found = []
        for places, by_numbers in by_places.items():
            for wanted, what in by_numbers.get(tuple(numbers[place] for place in places), ()):
                if (binding := _bound(wanted, numbers)) is not None:
                    found.append((what, binding))
        return found


def _bound(wanted: list[str], numbers: list[str]) -> Binding | None:
    """The numbers of a name by placeholder; None where one placeholder would be two numbers, or a number is too long."""
    bound: dict[str, str] = {}
    for number, place in zip(numbers, wanted, strict=True):
        if place.startswith("{") and (len(number) > _MOST_DIGITS or bound.setdefault(place[1:-1], number) != number):
            return None
    return tuple(sorted(bound.items()))


# --- the fields of a plan's tables, read one by one: what they may be, and the error that says which is not


_NEEDED: Any = object()


class Fields:
    """One table. A field that is not there is an error, or its default; `label` begins the errors."""

    def __init__(self, row: Any, label: str, known: Sequence[str]) -> None:
        if unknown := [key for key in read_table(row, label) if key not in known]:
            raise MatchError(f"{label}: {unknown[0]!r} is not a field.", why=f"Known are {', '.join(known)}.")
        self.row, self.label = row, label

    def __contains__(self, key: str) -> bool:
        return key in self.row

    def read(self, key: str, read: Reader, default: Any = _NEEDED) -> Any:
        if key not in self.row and default is not _NEEDED:
            return default
        return read(self.row.get(key), f"{self.label}: {key}")

    def several(self, key: str, read: Reader, default: Any = _NEEDED) -> tuple[Any, ...]:
        value = self.row.get(key)
        if isinstance(value, list) and value and (isinstance(value[0], list) or read is read_name):
            return tuple(read(item, f"{self.label}: {key}") for item in value)
        found = self.read(key, read, default)
        return found if key not in self.row and default is not _NEEDED else (found,)

    def tables(self, key: str) -> Iterator[tuple[str, dict[str, Any]]]:
        """The tables of a name, with a label for each."""
        rows = self.row.get(key, [])
        if not isinstance(rows, list) or not all(isinstance(row, dict) for row in rows):
            raise MatchError(f"{key!r} must be tables: [[{key}]].")
        yield from ((f"{key} {number}", row) for number, row in enumerate(rows, 1))


Reader: TypeAlias = Callable[[Any, str], Any]


def _reader(words: str, is_good: Callable[[Any], bool], make: Callable[[Any], Any] = lambda value: value) -> Reader:
    """What reads a field that must be what the words say, and makes something of it; the second argument begins the error."""

    def read(value: Any, label: str) -> Any:
        if not is_good(value):
            raise MatchError(f"{label} must be {words}, not {brief(value)}.")
        return make(value)

    return read


def _list_of(read: Reader, words: str, is_good: Callable[[list[Any]], bool] = lambda _: True) -> Reader:
    is_list = _reader(words, lambda value: isinstance(value, list) and is_good(value))
    return lambda value, label: tuple(read(item, label) for item in is_list(value, label))


def read_names(value: Any, label: str) -> tuple[str, ...]:
    """A list of names, each once."""
    names: tuple[str, ...] = _list_of(read_name, "a list of names")(value, label)
    if len(set(names)) < len(names):
        raise MatchError(f"{label} has a name twice.")
    return names


def read_size(value: Any, label: str) -> str:
    """A whole number, or a size by name, as text."""
    return str(value) if type(value) is int and -1 <= value <= MAX_ELEMENTS else str(read_name(value, label))


read_name = _reader("text", lambda value: isinstance(value, str) and value != "")
read_text = _reader("text", lambda value: isinstance(value, str))
read_flag = _reader("true or false", lambda value: isinstance(value, bool))
# a number of a size that is said somewhere
read_number = _reader("a number", lambda value: type(value) in (int, float) and abs(value) < 1e300, float)
read_dim = _reader("the number of a dimension", lambda value: type(value) is int and -MAX_DIMENSIONS <= value < MAX_DIMENSIONS)
read_sizes = _list_of(read_size, "a list of sizes", lambda value: 0 < len(value) <= MAX_DIMENSIONS)
read_table = _reader("a table", lambda value: isinstance(value, dict))
read_shape = _reader(
    "a list of sizes",
    lambda value: isinstance(value, list) and len(value) <= MAX_DIMENSIONS
    and all(type(size) is int and 0 <= size <= MAX_ELEMENTS for size in value),
    tuple,
)  # fmt: skip
_FORM = {"sizes": read_sizes, "to": read_sizes, "size": read_size, "was": read_size, "fill": read_number}
check_value = _reader("a whole number from 1 up", lambda value: type(value) is int and 0 < value < 1 << 40)
