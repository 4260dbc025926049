"""Options as frozen dataclasses: a field carries its sentence, what it takes, and how the command line shows it.

The command line's options, the checks, the docstrings and the reference derive from this: a new option is one field.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, fields, replace
from functools import wraps
from inspect import Parameter, Signature, signature
from os import PathLike
from typing import (
    TYPE_CHECKING,
    Any,
    ClassVar,
    Concatenate,
    ParamSpec,
    Protocol,
    Self,
    TypeVar,
    cast,
    dataclass_transform,
    overload,
)

from ckpt_tools.io.member_paths import File
from ckpt_tools.text import check_keywords
from ckpt_tools.tree import arguments
from ckpt_tools.tree.arguments import Reader

P = ParamSpec("P")
T = TypeVar("T")
Record = TypeVar("Record", bound="Options")
Record_co = TypeVar("Record_co", bound="Options", covariant=True)
R = TypeVar("R")
S = TypeVar("S")
S_contra = TypeVar("S_contra", contravariant=True)
R_co = TypeVar("R_co", covariant=True)


@dataclass(slots=True)
class Option:
    """One option."""

    default: Any
    read: Reader
    help: str
    kind: str = "text"
    in_code: str = ""
    metavar: str | None = None
    choices: Sequence[str] = ()
    alias: str = ""
    completes: str = ""
    moves: bool = False
    bare: str = ""
    common: bool = False
    heading: str = ""

    def value(self, name: str, given: Any) -> Any:
        """What a caller gave, read; the default where that is nothing."""
        value = given if given is self.default else self.read(name, given)
        empty = isinstance(value, list | dict) and not value and self.read is not arguments.read_anything
        return self.default if empty else value

    def is_given(self, value: Any) -> bool:
        """Whether a value is another than the default."""
        return value is not self.default if self.read is arguments.read_anything else bool(value != self.default)

    def words(self) -> str:
        """The sentence for callers of the library."""
        choices = f" One of {', '.join(map(repr, self.choices))}." if self.choices else ""
        return f"{self.help}{choices}{' ' if self.in_code else ''}{self.in_code}"


# --- the kinds of options


def _option(*args: Any, **more: Any) -> Any:
    """The field for an option; to a type checker a default of the field's type."""
    option = Option(*args, **more)
    return field(default=option.default, metadata={"option": option})


def flag(help: str, **more: Any) -> Any:
    """Yes or no."""
    return _option(False, arguments.read_flag, help, kind="flag", **more)


def text(help: str, **more: Any) -> Any:
    """One text."""
    return _option(None, arguments.read_optional(arguments.read_text), help, **more)


def texts(help: str, *, read: Reader = arguments.read_texts, default: Any = (), **more: Any) -> Any:
    """One text, or several."""
    return _option(default, read, help, kind="texts", **more)


def choice(help: str, choices: Sequence[str], *, default: str | None = None, **more: Any) -> Any:
    """One of a few words."""
    return _option(default, arguments.read_optional(arguments.read_choice(choices)), help, choices=choices, **more)


def dtype_choice(help: str, choices: Sequence[str], *, default: str | None = None, **more: Any) -> Any:
    """One of a few dtypes, by any of its names."""
    return _option(default, arguments.read_optional(arguments.read_dtype_choice(choices)), help, choices=choices, **more)


def whole(help: str, *, default: int | None = None, **more: Any) -> Any:
    """A whole number from 0 up."""
    read = arguments.read_whole if default is not None else arguments.read_optional(arguments.read_whole)
    return _option(default, read, help, kind="whole", **more)


def value(help: str, read: Reader, **more: Any) -> Any:
    """Something else that is read by `read`."""
    return _option(None, arguments.read_optional(read), help, **more)


def anything(help: str, **more: Any) -> Any:
    """A value that is not read before its use."""
    return _option(None, arguments.read_anything, help, **more)


def as_in(record: type[Options], name: str, help: str = "") -> Any:
    """The option of another record; where `help` is given, with a sentence of its own."""
    option = record.options[name]
    own = replace(option, help=help or option.help)
    return field(default=own.default, metadata={"option": own})


# --- records


@dataclass_transform(kw_only_default=True, frozen_default=True)
def record(kind: type[T]) -> type[T]:
    """A frozen dataclass of options; it may be put together from others."""
    made: Any = dataclass(frozen=True, kw_only=True, repr=False, eq=False)(kind)
    of_bases = [base.options for base in made.__bases__ if issubclass(base, Options)]
    made.options = {name: option for options in of_bases for name, option in options.items()}
    for row in fields(made):
        if row.name in vars(kind).get("__annotations__", {}):
            option = row.metadata["option"]
            option.heading = option.heading or made.heading
            made.options[row.name] = option
    return made  # type: ignore[no-any-return]


class Options:
    """The base of records of options."""

    heading: ClassVar[str] = "Options"
    options: ClassVar[dict[str, Option]] = {}

    def __post_init__(self) -> None:
        for name, option in self.options.items():
            object.__setattr__(self, name, option.value(name, getattr(self, name)))
        self.check()

    def __repr__(self) -> str:
        shown = ", ".join(f"{name}={getattr(self, name)!r}" for name in self.given())
        return f"{type(self).__name__}({shown})"

    def check(self) -> None:
        """Raise UsageError for options that contradict each other."""

    def given(self) -> list[str]:
        """The names of the options whose value is not the default."""
        return [name for name, option in self.options.items() if option.is_given(getattr(self, name))]

    def asked(self) -> dict[str, Any]:
        """The options whose value is not the default, with their values."""
        return {name: getattr(self, name) for name in self.given()}

    def replace(self, **changed: Any) -> Self:
        """The same options but for some."""
        return type(self)(**{**vars(self), **changed})


# --- functions that take the options of a record as keywords


if TYPE_CHECKING:
    StrPath = str | PathLike[str]


class _OnePath(Protocol[P, R_co]):
    def __call__(self, path: StrPath, *args: P.args, **options: P.kwargs) -> R_co: ...


class _PathsIntoOne(Protocol[P, R_co]):
    def __call__(self, sources: Sequence[File], target: File, *args: P.args, **options: P.kwargs) -> R_co: ...


class _OneFile(Protocol[P, R_co]):
    def __call__(self, path: File, *args: P.args, **options: P.kwargs) -> R_co: ...


class _TwoPaths(Protocol[P, R_co]):
    def __call__(self, source: File, target: File, *args: P.args, **options: P.kwargs) -> R_co: ...


class _IntoModel(Protocol[S_contra, P, R_co]):
    def __call__(self, model: S_contra, path: File, *args: P.args, **options: P.kwargs) -> R_co: ...


class _MethodKeywords(Protocol[P, Record_co]):
    """The same for methods."""

    @overload
    def __call__(self, method: Callable[[S, Record_co], R]) -> Callable[Concatenate[S, P], R]: ...
    @overload
    def __call__(self, method: Callable[[S, File, Record_co], R]) -> Callable[Concatenate[S, File, P], R]: ...


class _Keywords(Protocol[P, Record_co]):
    """What makes of a function that takes a record one that takes keywords."""

    @overload  # a path may be text, which is a sequence too; no function takes one for the other
    def __call__(self, function: Callable[[File, File, Record_co], R]) -> _TwoPaths[P, R]: ...  # type: ignore[overload-overlap]
    @overload
    def __call__(self, function: Callable[[Sequence[File], File, Record_co], R]) -> _PathsIntoOne[P, R]: ...
    @overload
    def __call__(self, function: Callable[[File, Record_co], R]) -> _OneFile[P, R]: ...
    @overload
    def __call__(self, function: Callable[[StrPath, Record_co], R]) -> _OnePath[P, R]: ...
    @overload
    def __call__(self, function: Callable[[S, File, Record_co], R]) -> _IntoModel[S, P, R]: ...


def as_keywords(record: Callable[P, Record]) -> _Keywords[P, Record]:
    """A function whose last argument, `options`, is a record takes the record's options as keywords instead."""
    kind: Any = record

    def decorate(function: Any) -> Any:
        own = [parameter.name for parameter in _own_parameters(function)]

        @wraps(function)
        def call(*paths: Any, **given: Any) -> Any:
            if len(paths) > len(own):
                raise TypeError(
                    f"{function.__name__}() takes {len(own)} positional arguments, and has {len(paths)}: options go by name"
                )
            check_keywords(function.__name__, given, {*kind.options, *own})
            options = kind(**{name: given.pop(name) for name in [*given] if name in kind.options})
            return function(*paths, **given, options=options)

        made: Any = call
        made.__doc__ = _OPTIONS.sub(lambda line: described(kind, line[1]), function.__doc__ or "")
        made.__signature__ = _signature(function, kind)
        return made

    return decorate


def as_keywords_of_method(record: Callable[P, Record]) -> _MethodKeywords[P, Record]:
    """`as_keywords` for a method."""
    made: Any = as_keywords(record)
    return cast("_MethodKeywords[P, Record]", made)


_OPTIONS = re.compile(r"^( +)options: .*$", re.MULTILINE)


def described(record: type[Options], indent: str) -> str:
    """The lines of a docstring that say what each option is."""
    return "\n".join(f"{indent}{name}: {option.words()}" for name, option in record.options.items())


def types(record: type[Options]) -> dict[str, str]:
    """The type of each option, as it is written."""
    written: Any = record
    return {row.name: str(row.type) for row in fields(written)}


def _signature(function: Callable[..., object], record: type[Options]) -> Signature:
    kinds = types(record)
    keywords = [Parameter(name, Parameter.KEYWORD_ONLY, default=option.default, annotation=kinds[name])
                for name, option in record.options.items()]  # fmt: skip
    return signature(function).replace(parameters=[*_own_parameters(function), *keywords])


def _own_parameters(function: Callable[..., object]) -> list[Parameter]:
    return [parameter for name, parameter in signature(function).parameters.items() if name != "options"]
