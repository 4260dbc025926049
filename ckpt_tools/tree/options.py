"""Options as fields of records that stay as they are made, and the library's functions that take them as keywords.

A new option is one field: the command line, the check of its value, the library's keyword and its docstring derive from it.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Callable, Sequence
from dataclasses import FrozenInstanceError, dataclass
from inspect import Parameter, signature
from typing import Any, ClassVar, Concatenate, ParamSpec, Protocol, Self, TypeVar, dataclass_transform, overload

from ckpt_tools.io.source import File
from ckpt_tools.text import check_keywords
from ckpt_tools.tree.arguments import Reader, as_it_is, reader

P = ParamSpec("P")
T = TypeVar("T")
R = TypeVar("R")
S = TypeVar("S")
R_co = TypeVar("R_co", covariant=True)
Record = TypeVar("Record", bound="Options")
Record_co = TypeVar("Record_co", bound="Options", covariant=True)


@dataclass(slots=True, eq=False, repr=False)
class Option:
    """One option."""

    help: str
    default: Any = None
    choices: Sequence[str] = ()
    many: bool = False
    in_code: str = ""
    metavar: str | None = None
    alias: str = ""
    completes: str = ""
    moves: bool = False
    bare: str = ""
    common: bool = False
    heading: str = ""
    type: str = ""
    read: Reader = as_it_is

    def words(self) -> str:
        """The sentence for callers of the library."""
        choices = f" One of {', '.join(map(repr, self.choices))}." if self.choices else ""
        return f"{self.help}{choices}{' ' if self.in_code else ''}{self.in_code}"


def option(help: str, **more: Any) -> Any:
    """The field of an option."""
    return Option(help, **more)


flag = functools.partial(option, default=False)
several = functools.partial(option, default=(), many=True)


def as_in(record: type[Options], name: str, help: str = "") -> Any:
    """The option of another record, with a sentence of its own where `help` is given."""
    known = record.options[name]
    more = {place: getattr(known, place) for place in Option.__slots__ if place not in ("help", "heading", "type", "read")}
    return option(help or known.help, **more)


@dataclass_transform(kw_only_default=True, frozen_default=True)
def record(kind: type[T]) -> type[T]:
    """A record of options, which may be put together from others. (A dataclass of forty fields takes 3 ms at each start.)"""
    made: Any = kind
    made.options = {name: option for base in made.__bases__ for name, option in getattr(base, "options", {}).items()}
    for name, written in vars(kind).get("__annotations__", {}).items():
        if isinstance(option := vars(kind).get(name), Option):
            made.options[name] = option
            option.type, option.read, option.heading = written, reader(written, option.choices), made.heading
            setattr(kind, name, option.default)
    return made  # type: ignore[no-any-return]


class Options:
    """The base of records of options."""

    heading: ClassVar[str] = "Options"
    options: ClassVar[dict[str, Option]] = {}

    def __init__(self, **given: Any) -> None:
        for name, value in given.items():
            if (option := self.options.get(name)) is None:
                raise TypeError(f"{type(self).__name__}() has no option {name!r}")
            if value is not option.default:
                value = option.read(name, value)
                is_empty = isinstance(value, list | dict) and not value and option.type != "Any"
                vars(self)[name] = option.default if is_empty else value
        self.check()

    def __setattr__(self, name: str, value: Any) -> None:
        raise FrozenInstanceError(f"cannot assign to field {name!r}")

    def __repr__(self) -> str:
        return f"{type(self).__name__}({', '.join(f'{name}={value!r}' for name, value in self.asked().items())})"

    def check(self) -> None:
        """Raise UsageError for options that contradict each other."""

    def asked(self) -> dict[str, Any]:
        """The options whose value is not the default, with their values."""
        values = ((name, getattr(self, name), option.default) for name, option in self.options.items())
        return {name: value for name, value, default in values
                if value is not default and (type(value) is not type(default) or value != default)}  # fmt: skip

    def replace(self, **changed: Any) -> Self:
        """The same options but for some."""
        return type(self)(**{**vars(self), **changed})


# --- functions of the library


class _TwoPaths(Protocol[P, R_co]):
    def __call__(self, source: File, target: File, *args: P.args, **options: P.kwargs) -> R_co: ...


class _PathsIntoOne(Protocol[P, R_co]):
    def __call__(self, sources: Sequence[File], target: File, *args: P.args, **options: P.kwargs) -> R_co: ...


class _Keywords(Protocol[P, Record_co]):
    """What makes of a function that takes a record one that takes keywords."""

    @overload  # a path may be text, which is a sequence too; no function takes one for the other
    def __call__(self, function: Callable[[File, File, Record_co], R]) -> _TwoPaths[P, R]: ...  # type: ignore[overload-overlap]
    @overload
    def __call__(self, function: Callable[[Sequence[File], File, Record_co], R]) -> _PathsIntoOne[P, R]: ...
    @overload
    def __call__(self, function: Callable[[S, File, Record_co], R]) -> Callable[Concatenate[S, File, P], R]: ...
    @overload
    def __call__(self, function: Callable[[S, Record_co], R]) -> Callable[Concatenate[S, P], R]: ...


def as_keywords(record: Callable[P, Record]) -> _Keywords[P, Record]:
    """A function whose last argument, `options`, is a record takes the record's options as keywords instead."""
    made: Any = functools.partial(_reading, record)
    return made  # type: ignore[no-any-return]


def natural(function: Callable[P, R]) -> Callable[P, R]:
    """A public function whose arguments are read by their types before it sees them."""
    return _reading(None, function)  # type: ignore[no-any-return]


def _reading(record: Any, function: Any) -> Any:
    code = function.__code__
    positions = [name for name in code.co_varnames[: code.co_argcount] if name != "options"]
    written = {name: text for name, text in function.__annotations__.items() if name not in ("return", "options")}
    readers = {name: reader(text) for name, text in written.items()}
    options: dict[str, Option] = record.options if record is not None else {}

    @functools.wraps(function)
    def call(*args: Any, **given: Any) -> Any:
        check_keywords(function.__name__, given, {*readers, *options})
        if record is not None and len(args) > len(positions):
            takes = f"takes {len(positions)} positional arguments, and has {len(args)}"
            raise TypeError(f"{function.__name__}() {takes}: options go by name")
        asked = {name: given.pop(name) for name in [*given] if name in options}
        own = [readers.get(name, as_it_is)(name, value) for name, value in zip(positions, args, strict=False)]
        named = {name: readers[name](name, value) for name, value in given.items()}
        more = {"options": record(**asked)} if record is not None else {}
        return function(*own, *args[len(own) :], **named, **more)

    if record is not None:
        kept = [row for name, row in signature(function).parameters.items() if name != "options"]
        keywords = [Parameter(name, Parameter.KEYWORD_ONLY, default=option.default, annotation=option.type)
                    for name, option in options.items()]  # fmt: skip
        made: Any = call
        made.__signature__ = signature(function).replace(parameters=[*kept, *keywords])
        made.__doc__ = _OPTIONS.sub(lambda line: described(record, line[1]), function.__doc__ or "")
    return call


_OPTIONS = re.compile(r"^( +)options: .*$", re.MULTILINE)


def described(record: type[Options], indent: str) -> str:
    """The lines of a docstring that say what each option is."""
    return "\n".join(f"{indent}{name}: {option.words()}" for name, option in record.options.items())
