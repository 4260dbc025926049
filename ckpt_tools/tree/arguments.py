"""What callers give becomes what the library takes: a value is read by the type that is written beside its name."""

from __future__ import annotations

import functools
import math
import operator
import os
import re
import reprlib
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, TypeAlias, Union

from ckpt_tools.errors import UsageError
from ckpt_tools.io.source import AnyPath, as_path, is_open_file
from ckpt_tools.tree.dtypes import cast_target

if TYPE_CHECKING:
    import torch

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


def _one(is_one: Callable[[Any], bool], wanted: str) -> Reader:
    """A value as it is, of one kind."""

    def read(name: str, value: Any) -> Any:
        if not is_one(value):
            raise _refused(name, value, wanted)
        return value

    return read


_text = _one(lambda value: isinstance(value, str), "text")
_call = _one(callable, "a function")
_mapping = _one(lambda value: isinstance(value, Mapping), "a mapping from names to tensors")


def _filled(name: str, value: Any) -> Any:
    if not _text(name, value):
        raise UsageError(f"`{name}` is empty.", why="Perhaps a variable is not set.")
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


def _number(name: str, value: Any, wanted: str = "numbers") -> float:
    try:
        return float(value)
    except (TypeError, ValueError, OverflowError):
        raise _refused(name, value, wanted) from None


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
    return [_number(name, one, "numbers, as in 0.5,0.3,0.2") for one in given]


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


def as_it_is(_name: str, value: Any) -> Any:
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
    **dict.fromkeys(("Any", "torch.nn.Module", "torch.nn.Module | Mapping[str, Any]"), as_it_is),
}  # fmt: skip


def reader(written: str, choices: Sequence[str] = ()) -> Reader:
    """How a value of a type is read; nothing else than None where None may be given."""
    plain = written.removesuffix(" | None")
    if choices:
        read: Reader = functools.partial(_choice, choices)
    else:  # what may be left out is not given as an empty text
        read = _filled if written == "str | None" else _READERS[plain]
    return read if plain == written else lambda name, value: None if value is None else read(name, value)


def _choice(choices: Sequence[str], name: str, value: Any) -> str:
    """One of a few words, a dtype by any of its names."""
    wanted = _dtype(name, value)
    for choice in choices:
        if wanted in (choice, cast_target(choice)):
            return choice
    raise UsageError(f"`{name}={value!r}` is not one of {', '.join(choices)}.")
