"""Options as frozen dataclasses; what a caller gives for one is read by the type that is written beside it.

A new option is one field: the command line, the check of its value, the library's keyword and its docstring derive from it.
"""

from __future__ import annotations

import functools
import math
import operator
import os
import re
import reprlib
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from inspect import Parameter, signature
from typing import (
    TYPE_CHECKING,
    Any,
    ClassVar,
    Concatenate,
    ParamSpec,
    Protocol,
    Self,
    TypeAlias,
    TypeVar,
    Union,
    dataclass_transform,
    overload,
)

from ckpt_tools.errors import UsageError
from ckpt_tools.io.member_paths import AnyPath, File, as_path, is_open_file
from ckpt_tools.text import check_keywords
from ckpt_tools.tree.dtypes import cast_target

if TYPE_CHECKING:
    import torch

P = ParamSpec("P")
T = TypeVar("T")
R = TypeVar("R")
S = TypeVar("S")
R_co = TypeVar("R_co", covariant=True)
Record = TypeVar("Record", bound="Options")
Record_co = TypeVar("Record_co", bound="Options", covariant=True)

# --- the types of arguments

Renames: TypeAlias = str | Sequence[str | tuple[str, str]] | Mapping[str, str]
Metadata: TypeAlias = str | Sequence[str | tuple[str, str]] | Mapping[str, str]
Schemes: TypeAlias = str | Sequence[str] | Mapping[str, str]
Sizes: TypeAlias = str | Sequence[str] | Mapping[str, int]
Arguments: TypeAlias = str | Mapping[str, Any]
Adapters: TypeAlias = Union[
    str, "os.PathLike[str]", tuple[AnyPath, float], Mapping[str, float], Sequence[AnyPath | tuple[AnyPath, float]],
]  # fmt: skip
Dtypes: TypeAlias = Union[str, "torch.dtype", Sequence[str], Mapping[str, Union[str, "torch.dtype"]]]
Device: TypeAlias = Union[str, "torch.device"]
Location: TypeAlias = Union[str, "torch.device", Mapping[Device, Device], Mapping[str, str]]
Reader: TypeAlias = Callable[[str, Any], Any]


def _refused(name: str, value: Any, wanted: str) -> UsageError:
    try:
        shown = reprlib.repr(value)
    except Exception:  # the value's own __repr__
        shown = "..."
    return UsageError(f"`{name}` is {shown.replace('`', '')}, a {type(value).__name__}.", why=f"It takes {wanted}.")


def _text(name: str, value: Any) -> str:
    if not isinstance(value, str):
        raise _refused(name, value, "text")
    return value


def _path(name: str, value: Any, wanted: str = "a path: a str or a pathlib.Path") -> Any:
    """Not the empty text, which would be the current folder."""
    if not isinstance(value, str | os.PathLike) or not isinstance(text := os.fspath(value), str) or not text:
        raise _refused(name, value, wanted)
    return value


def _file(name: str, value: Any) -> Any:
    return as_path(value) if is_open_file(value) else _path(name, value, "a path (a str or a pathlib.Path), or an open file")


def _flag(name: str, value: Any) -> bool:
    """NumPy's too. A text such as "no" would be true."""
    if isinstance(value, bool) or (type(value).__name__ in ("bool", "bool_") and hasattr(value, "item")):
        return bool(value)
    raise _refused(name, value, "True or False")


def _whole(name: str, value: Any) -> int:
    try:
        number = operator.index(value)
    except TypeError:
        raise _refused(name, value, "a whole number") from None
    if isinstance(value, bool) or number < 0:
        raise _refused(name, value, "a whole number from 0 up")
    return number


def _number(name: str, value: Any) -> float:
    try:
        return float(value)
    except (TypeError, ValueError, OverflowError):
        raise _refused(name, value, "numbers") from None


def _call(name: str, value: Any) -> Any:
    if not callable(value):
        raise _refused(name, value, "a function")
    return value


def _mapping(name: str, value: Any) -> Any:
    if not isinstance(value, Mapping):
        raise _refused(name, value, "a mapping from names to tensors")
    return value


def _size(name: str, value: Any) -> Any:
    """A text such as "5GB", or a number of bytes, 5e9 too."""
    if isinstance(value, float) and value.is_integer():
        return int(value)
    return value if isinstance(value, str) else _whole(name, value)


def _listed(name: str, value: Any, wanted: str = "text, or a list of texts") -> list[Any]:
    """One or several; a mapping as its pairs."""
    if value is None:
        return []
    if isinstance(value, str | os.PathLike):
        return [value]
    if isinstance(value, bytes) or not isinstance(value, Iterable):
        raise _refused(name, value, wanted)
    try:
        return list(value.items() if isinstance(value, Mapping) else value)
    except TypeError:  # an array without dimensions
        raise _refused(name, value, wanted) from None


def _texts(name: str, value: Any) -> list[str]:
    return [_text(name, one) for one in _listed(name, value)]


def _paths(name: str, value: Any) -> list[Any]:
    return [_path(name, one) for one in _listed(name, value, "a list of paths")]


def _files(name: str, value: Any) -> list[Any]:
    if isinstance(value, str | os.PathLike | Mapping) or is_open_file(value):
        raise _refused(name, value, "a list of paths")
    return [_file(name, one) for one in _listed(name, value, "a list of paths")]


def _numbers(name: str, value: Any) -> list[float]:
    """Those of a text with commas, a list, range, array or tensor."""
    given = value.split(",") if isinstance(value, str) else _listed(name, value, "a list of numbers")
    return [_number(name, one) for one in given]


def _rules(name: str, value: Any) -> list[Any]:
    wanted = "'REGEX=REPLACEMENT', a list of them, or pairs"
    rules = [one if isinstance(one, str) else tuple(_listed(name, one, wanted)) for one in _listed(name, value, wanted)]
    if odd := [one for one in rules if not isinstance(one, str) and [*map(type, one)] != [str, str]]:
        raise _refused(name, odd[0], wanted)
    return rules


def _texts_by_key(name: str, value: Any) -> list[tuple[str, str]]:
    pairs = []
    for one in _rules(name, value):
        key, equals, text = one.partition("=") if isinstance(one, str) else (one[0], "=", one[1])
        if not key or not equals:
            raise UsageError(f"`{name}={one!r}` is not KEY=VALUE.")
        if any("\ud800" <= character <= "\udfff" for character in key + text):
            raise UsageError(f"`{name}`: the text of {key!r} is not Unicode.")
        pairs.append((key, text))
    return pairs


def _named_sizes(name: str, value: Any) -> dict[str, int]:
    sizes: dict[str, int] = {}
    said = value.items() if isinstance(value, Mapping) else [text.partition("=")[::2] for text in _texts(name, value)]
    for key, number in said:
        if isinstance(number, str) and not isinstance(value, Mapping) and re.fullmatch("[0-9]{1,12}", number):
            number = int(number)
        if not isinstance(key, str) or type(number) is not int or number < 1:
            raise UsageError(f"`{name}` takes NAME=N, N a whole number from 1 up.", why=f"{key!r} is {number!r}.")
        if key in sizes:
            raise UsageError(f"`{name}` says one name twice.")
        sizes[key] = number
    return sizes


def _schemes(name: str, value: Any) -> Any:
    if isinstance(value, Mapping):
        return {_text(name, glob): _text(name, scheme) for glob, scheme in value.items()}
    return _texts(name, value)


def _arguments(name: str, value: Any) -> Any:
    return {_text(name, key): one for key, one in value.items()} if isinstance(value, Mapping) else _text(name, value)


def _some_arguments(name: str, value: Any) -> Any:
    """Those of one callable or of several."""
    if isinstance(value, list | tuple):
        return [None if one is None else _arguments(name, one) for one in value]
    return _arguments(name, value)


def _adapters(name: str, value: Any) -> list[tuple[Any, float]]:
    """A path that is there is meant as it is."""
    wanted = "a path, a pair of path and weight, or a list of them"
    is_pair = isinstance(value, tuple) and len(value) == 2 and not isinstance(value[1], str | os.PathLike)
    adapters = []
    for one in [value] if is_pair else _listed(name, value, wanted):
        path, weight = one if isinstance(one, list | tuple) and len(one) == 2 else (one, 1.0)
        if isinstance(one, str) and "=" in one and not os.path.exists(one):
            path, _, weight = one.rpartition("=")
        if not path or not math.isfinite(number := _number(name, weight)):
            raise UsageError(f"`{name}={one!r}`: the weight is not a finite number, or the path is missing.")
        adapters.append((_path(name, path), number))
    return adapters


def _dtype(name: str, value: Any) -> str:
    """torch's own, or a word for one, as torch's name without `torch.`; other text as it is."""
    text = _text(name, str(value) if _is_torchs(value, "dtype") else value)
    return cast_target(text) or text.removeprefix("torch.")


def _dtypes(name: str, value: Any) -> dict[str, str]:
    """By globs, "" for all else."""
    found: dict[str, str] = {}
    for one in [value] if _is_torchs(value, "dtype") else _listed(name, value):
        text_glob, _, text = one.rpartition("=") if isinstance(one, str) else ("", "", one)
        glob, dtype = one if isinstance(one, tuple) and len(one) == 2 else (text_glob, text)
        if glob in found:
            what = f"{glob!r} is" if glob else "a type for all tensors is"
            raise UsageError(f"`{name}={one!r}`: {what} given twice.", fix="For some tensors another: `dtype='*.norm.*=fp32'`")
        found[_text(name, glob)] = _dtype(name, dtype)
    return found


def _location(name: str, value: Any) -> Any:
    if isinstance(value, Mapping):
        return {_device(name, tag): _device(name, target) for tag, target in value.items()}
    return None if value is None else _device(name, value)


def _device(name: str, value: Any) -> str:
    if not isinstance(value, str) and not _is_torchs(value, "device"):
        raise _refused(name, value, 'a device ("cpu", torch.device("cuda:1")), or a mapping from device to device')
    return str(value)


def _is_torchs(value: object, kind: str) -> bool:
    return type(value).__name__ == kind and type(value).__module__ == "torch"


def _as_it_is(_name: str, value: Any) -> Any:
    return value


_PATH = "str | os.PathLike[str]"
_READERS: dict[str, Reader] = {
    "bool": _flag, "int": _whole, "float": _number, "str": _text, "Format": _text, "str | int": _size,
    "torch.dtype | str": _dtype,
    **dict.fromkeys(("str | Sequence[str]", "Sequence[str]", "Collection[str]"), _texts),
    _PATH: _path, f"{_PATH} | Sequence[{_PATH}]": _paths, "File": _file, "Sequence[File]": _files,
    "Renames": _rules, "Metadata": _texts_by_key, "Schemes": _schemes, "Sizes": _named_sizes, "Sequence[float]": _numbers,
    "Arguments": _arguments, "Arguments | Sequence[Arguments | None]": _some_arguments, "Adapters": _adapters,
    "Dtypes": _dtypes, "Location": _location, "MapLocation": _location, "_StateDict": _mapping,
    **dict.fromkeys(("Progress", "Callable[[NotSigned], None]"), _call),
    **dict.fromkeys(("Any", "torch.nn.Module", "torch.nn.Module | Mapping[str, Any]"), _as_it_is),
}  # fmt: skip


def _reader(written: str, choices: Sequence[str] = ()) -> Reader:
    """How a value of a type is read; nothing else than None where None may be given."""
    plain = written.removesuffix(" | None")
    read = functools.partial(_choice, choices) if choices else _READERS[plain]
    return read if plain == written else lambda name, value: None if value is None else read(name, value)


def _choice(choices: Sequence[str], name: str, value: Any) -> str:
    """One of a few words, a dtype by any of its names."""
    wanted = _dtype(name, value)
    for choice in choices:
        if wanted in (choice, cast_target(choice)):
            return choice
    raise UsageError(f"`{name}={value!r}` is not one of {', '.join(choices)}.")


# --- options and records of them


@dataclass(slots=True)
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
    read: Reader = _as_it_is

    def words(self) -> str:
        """The sentence for callers of the library."""
        choices = f" One of {', '.join(map(repr, self.choices))}." if self.choices else ""
        return f"{self.help}{choices}{' ' if self.in_code else ''}{self.in_code}"


def option(help: str, **more: Any) -> Any:
    """The field of an option."""
    made = Option(help, **more)
    return field(default=made.default, metadata={"option": made})


flag = functools.partial(option, default=False)
several = functools.partial(option, default=(), many=True)


def as_in(record: type[Options], name: str, help: str = "") -> Any:
    """The option of another record, with a sentence of its own where `help` is given."""
    known = record.options[name]
    more = {place: getattr(known, place) for place in Option.__slots__ if place not in ("help", "heading", "type", "read")}
    return option(help or known.help, **more)


@dataclass_transform(kw_only_default=True, frozen_default=True)
def record(kind: type[T]) -> type[T]:
    """A frozen dataclass of options; it may be put together from others."""
    made: Any = dataclass(frozen=True, kw_only=True, repr=False, eq=False)(kind)
    made.options = {name: option for base in made.__bases__ for name, option in getattr(base, "options", {}).items()}
    for name, written in vars(kind).get("__annotations__", {}).items():
        option = made.options[name] = made.__dataclass_fields__[name].metadata["option"]
        option.type, option.read, option.heading = written, _reader(written, option.choices), made.heading
    return made  # type: ignore[no-any-return]


class Options:
    """The base of records of options."""

    heading: ClassVar[str] = "Options"
    options: ClassVar[dict[str, Option]] = {}

    def __post_init__(self) -> None:
        for name, option in self.options.items():
            if (value := getattr(self, name)) is not option.default:
                value = option.read(name, value)
                is_empty = isinstance(value, list | dict) and not value and option.type != "Any"
                object.__setattr__(self, name, option.default if is_empty else value)
        self.check()

    def __repr__(self) -> str:
        return f"{type(self).__name__}({', '.join(f'{name}={value!r}' for name, value in self.asked().items())})"

    def check(self) -> None:
        """Raise UsageError for options that contradict each other."""

    def asked(self) -> dict[str, Any]:
        """The options whose value is not the default, with their values."""
        values = ((name, getattr(self, name), option.default) for name, option in self.options.items())
        return {name: value for name, value, default in values
                if value is not default and (type(value) is not type(default) or value != default)}  # fmt: skip

    def given(self) -> list[str]:
        """The names of the options whose value is not the default."""
        return [*self.asked()]

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
    readers = {name: _reader(text) for name, text in written.items()}
    options: dict[str, Option] = record.options if record is not None else {}

    @functools.wraps(function)
    def call(*args: Any, **given: Any) -> Any:
        check_keywords(function.__name__, given, {*readers, *options})
        if record is not None and len(args) > len(positions):
            takes = f"takes {len(positions)} positional arguments, and has {len(args)}"
            raise TypeError(f"{function.__name__}() {takes}: options go by name")
        asked = {name: given.pop(name) for name in [*given] if name in options}
        own = [readers.get(name, _as_it_is)(name, value) for name, value in zip(positions, args, strict=False)]
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
