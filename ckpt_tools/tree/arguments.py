"""What callers of the library give: what is natural in Python becomes what the library takes, the rest is a UsageError.

An argument means the same in every public call, so one table says by name what it may be; an option in a record says it there.
"""

from __future__ import annotations

import functools
import math
import operator
import os
import reprlib
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, ParamSpec, TypeAlias, TypeVar, Union

from ckpt_tools.errors import UsageError
from ckpt_tools.io.member_paths import as_path, is_open_file
from ckpt_tools.text import check_keywords
from ckpt_tools.tree.dtypes import cast_target

if TYPE_CHECKING:
    import torch

P = ParamSpec("P")
R = TypeVar("R")
Reader = Callable[[str, Any], Any]
Renames: TypeAlias = str | Sequence[str | tuple[str, str]] | Mapping[str, str]
Metadata: TypeAlias = str | Sequence[str | tuple[str, str]] | Mapping[str, str]
Adapters: TypeAlias = Union[
    str, "os.PathLike[str]", "tuple[str | os.PathLike[str], float]", "Mapping[str, float]",
    "Sequence[str | os.PathLike[str] | tuple[str | os.PathLike[str], float]]",
]  # fmt: skip
Dtypes: TypeAlias = Union[str, "torch.dtype", Sequence[str], Mapping[str, Union[str, "torch.dtype"]]]
Device: TypeAlias = Union[str, "torch.device"]
Location: TypeAlias = Union[str, "torch.device", Mapping[Device, Device], Mapping[str, str]]


def natural(function: Callable[P, R]) -> Callable[P, R]:
    """A public function whose arguments are read by the table before it sees them; a default is left as it is."""
    code = function.__code__
    positions = code.co_varnames[: code.co_argcount]
    names = code.co_varnames[: code.co_argcount + code.co_kwonlyargcount]
    defaults = _defaults(function)

    @functools.wraps(function)
    def call(*args: P.args, **keywords: P.kwargs) -> R:
        check_keywords(function.__name__, keywords, names)
        if len(args) > len(positions) or not keywords.keys() <= _READERS.keys():
            return function(*args, **keywords)  # which raises the TypeError
        given: list[Any] = [_read(name, value, defaults) for name, value in zip(positions, args, strict=False)]
        named: dict[str, Any] = {name: _read(name, value, defaults) for name, value in keywords.items()}
        return function(*given, **named)

    return call


def _defaults(function: Callable[..., Any]) -> dict[str, Any]:
    code, given = function.__code__, function.__defaults__ or ()
    positions = code.co_varnames[: code.co_argcount]
    return dict(zip(positions[len(positions) - len(given) :], given, strict=True)) | (function.__kwdefaults__ or {})


def _read(name: str, value: Any, defaults: Mapping[str, Any]) -> Any:
    return value if name in defaults and value is defaults[name] else _READERS[name](name, value)


def _refused(name: str, value: Any, wanted: str) -> UsageError:
    """The one sentence for a value of a kind that an argument does not take."""
    try:
        shown = reprlib.repr(value)
    except Exception:  # the value's own __repr__
        shown = "..."
    return UsageError(f"`{name}` is {shown.replace('`', '')}, a {type(value).__name__}.", why=f"It takes {wanted}.")


def read_anything(_name: str, value: Any) -> Any:
    return value


def read_path(name: str, value: Any) -> Any:
    """A str or os.PathLike of one; not the empty text, which would be the current folder."""
    try:
        text = os.fspath(value)
    except TypeError:
        text = None
    if not isinstance(text, str) or not text:
        raise _refused(name, value, "a path: a str or a pathlib.Path")
    return value


def read_file(name: str, value: Any) -> Any:
    """A path, or an open file."""
    if is_open_file(value):
        return as_path(value)
    try:
        return read_path(name, value)
    except UsageError:
        raise _refused(name, value, "a path (a str or a pathlib.Path), or an open file") from None


def read_inputs(name: str, value: Any) -> list[Any]:
    """A list of paths and open files."""
    return [read_file(name, one) for one in _listed_paths(name, value)]


def read_paths(name: str, value: Any) -> list[Any]:
    return [read_path(name, one) for one in _listed_paths(name, value)]


def _listed_paths(name: str, value: Any) -> list[Any]:
    if isinstance(value, str | bytes | os.PathLike | Mapping) or is_open_file(value) or not isinstance(value, Iterable):
        raise _refused(name, value, "a list of paths")
    return read_items(name, value)


def read_files(name: str, value: Any) -> list[Any]:
    """One path, or any number of them."""
    return [read_path(name, value)] if isinstance(value, str | os.PathLike) else read_paths(name, value)


def read_optional(reader: Reader) -> Reader:
    return lambda name, value: None if value is None else reader(name, value)


def read_text(name: str, value: Any) -> str:
    if not isinstance(value, str):
        raise _refused(name, value, "text")
    return value


def read_choice(choices: Sequence[str]) -> Reader:
    """One of a few words."""

    def read(name: str, value: Any) -> str:
        if read_text(name, value) not in choices:
            raise UsageError(f"`{name}={value!r}` is not one of {', '.join(choices)}.")
        return str(value)

    return read


def read_texts(name: str, value: Any) -> list[str]:
    """One text, or any number of them."""
    if value is None:
        return []
    if isinstance(value, str):
        return [value]
    if isinstance(value, bytes | Mapping) or not isinstance(value, Iterable):
        raise _refused(name, value, "text, or a list of texts")
    return [read_text(name, one) for one in read_items(name, value)]


def read_items(name: str, value: Iterable[Any]) -> list[Any]:
    try:
        return list(value)
    except TypeError:  # an array without dimensions
        raise _refused(name, value, "a list") from None


def read_rules(name: str, value: Any) -> list[Any]:
    """`REGEX=REPLACEMENT` texts, pairs of the two, or a mapping."""
    if isinstance(value, Mapping):
        value = list(value.items())
    if value is None or isinstance(value, str):
        return read_texts(name, value)
    if isinstance(value, bytes) or not isinstance(value, Iterable):
        raise _refused(name, value, "'REGEX=REPLACEMENT', a list of them, or pairs")
    return [one if isinstance(one, str) else read_pair(name, one) for one in read_items(name, value)]


def read_named_numbers(name: str, value: Any) -> dict[str, int]:
    """`NAME=N` texts, or a mapping from names to whole numbers."""
    if not isinstance(value, Mapping):
        texts = read_texts(name, value)
        pairs = [text.partition("=") for text in texts]
        value = {key: int(number) if number.isascii() and number.isdigit() and len(number) < 13 else number
                 for key, _, number in pairs}  # fmt: skip
        if len(value) < len(texts):
            raise UsageError(f"`{name}` says one name twice.")
    for key, number in value.items():
        if not isinstance(key, str) or type(number) is not int or number < 1:
            raise UsageError(f"`{name}` takes NAME=N, N a whole number from 1 up.", why=f"{key!r} is {number!r}.")
    return dict(value)


def read_pair(name: str, value: Any) -> tuple[str, str]:
    if not isinstance(value, list | tuple) or len(value) != 2 or not all(isinstance(part, str) for part in value):
        raise _refused(name, value, "'REGEX=REPLACEMENT', a list of them, or pairs of texts")
    return value[0], value[1]


def read_texts_by_key(name: str, value: Any) -> list[tuple[str, str]]:
    """`KEY=VALUE` texts, pairs, or a mapping, as pairs."""
    pairs = [_key_and_text(name, one) for one in read_rules(name, value)]
    if odd := [key for key, text in pairs if any("\ud800" <= character <= "\udfff" for character in key + text)]:
        raise UsageError(f"`{name}`: the text of {odd[0]!r} is not Unicode.")
    return pairs


def _key_and_text(name: str, value: str | tuple[str, str]) -> tuple[str, str]:
    key, equals, text = value.partition("=") if isinstance(value, str) else (value[0], "=", value[1])
    if not key or not equals:
        raise UsageError(f"`{name}={value!r}` is not KEY=VALUE.")
    return key, text


def read_schemes(name: str, value: Any) -> Any:
    """One scheme, `GLOB=SCHEME` texts, or a mapping from globs."""
    if isinstance(value, Mapping):
        return {read_text(name, glob): read_text(name, scheme) for glob, scheme in value.items()}
    return read_texts(name, value)


def read_flag(name: str, value: Any) -> bool:
    """True or False; NumPy's too. A text such as "no" would be true."""
    if isinstance(value, bool):
        return value
    if type(value).__name__ in ("bool", "bool_") and hasattr(value, "item"):
        return bool(value)
    raise _refused(name, value, "True or False")


def read_whole(name: str, value: Any) -> int:
    """A whole number from 0 up; NumPy's too."""
    try:
        number = operator.index(value)
    except TypeError:
        raise _refused(name, value, "a whole number") from None
    if isinstance(value, bool) or number < 0:
        raise _refused(name, value, "a whole number from 0 up")
    return number


def read_size(name: str, value: Any) -> Any:
    """A text such as "5GB", or a number of bytes, 5e9 too."""
    if isinstance(value, float) and value.is_integer():
        return int(value)
    return value if isinstance(value, str) else read_whole(name, value)


def read_numbers(name: str, value: Any, reader: Reader) -> list[Any]:
    """The numbers of a list, range, array or tensor."""
    if isinstance(value, str | bytes | Mapping) or not (hasattr(value, "tolist") or isinstance(value, Iterable)):
        raise _refused(name, value, "a list of numbers")
    found = value.tolist() if hasattr(value, "tolist") else read_items(name, value)
    if not isinstance(found, list):
        raise _refused(name, value, "a list of numbers")
    return [reader(name, number) for number in found]


def read_weight(name: str, value: Any) -> float:
    try:
        return float(value)
    except (TypeError, ValueError, OverflowError):
        raise _refused(name, value, "numbers") from None


def read_weights(name: str, value: Any) -> list[float]:
    return read_numbers(name, value, read_weight)


def read_adapters(name: str, value: Any) -> list[tuple[Any, float]]:
    """`PATH` and `PATH=WEIGHT` texts, pairs of path and weight, or a mapping; a path that is there is meant as it is."""
    if isinstance(value, Mapping):
        value = list(value.items())
    if isinstance(value, str | os.PathLike) or (isinstance(value, tuple) and len(value) == 2 and not _is_path(value[1])):
        value = [value]
    if isinstance(value, bytes) or not isinstance(value, Iterable):
        raise _refused(name, value, "a path, a pair of path and weight, or a list of them")
    return [_read_adapter(name, one) for one in read_items(name, value)]


def _is_path(value: Any) -> bool:
    return isinstance(value, str | os.PathLike)


def _read_adapter(name: str, value: Any) -> tuple[Any, float]:
    if isinstance(value, list | tuple) and len(value) == 2:
        path, weight = value
    elif isinstance(value, str) and "=" in value and not os.path.exists(value):
        path, _, weight = value.rpartition("=")
    else:
        path, weight = value, 1.0
    number = read_weight(name, weight)
    if not path or not math.isfinite(number):
        raise UsageError(f"`{name}={value!r}`: the weight is not a finite number, or the path is missing.")
    return read_path(name, path), number


def read_dtype(name: str, value: Any) -> str:
    """torch's own dtype, or a word for one, as torch's name without `torch.`; other text as it is."""
    if type(value).__name__ == "dtype" and type(value).__module__ == "torch":
        value = str(value)
    text = read_text(name, value)
    return cast_target(text) or text.removeprefix("torch.")


def read_dtype_choice(choices: Sequence[str]) -> Reader:
    """One of a few words for dtypes, also by another word, or as torch's own dtype."""
    read = read_choice(choices)

    def read_one(name: str, value: Any) -> str:
        wanted = read_dtype(name, value)
        return next((choice for choice in choices if cast_target(choice) == wanted), None) or str(read(name, wanted))

    return read_one


def read_dtypes(name: str, value: Any) -> dict[str, str]:
    """A dtype, `GLOB=DTYPE` texts, or a mapping from globs; as one from globs, "" for all else."""
    if isinstance(value, Mapping):
        return {read_text(name, glob): read_dtype(name, one) for glob, one in value.items()}
    if isinstance(value, bytes) or not isinstance(value, Iterable) or isinstance(value, str):
        value = [value]
    found: dict[str, str] = {}
    for one in read_items(name, value):
        glob, _, dtype = one.rpartition("=") if isinstance(one, str) else ("", "", one)
        if glob in found:
            what = f"{glob!r} is" if glob else "a type for all tensors is"
            raise UsageError(f"`{name}={one!r}`: {what} given twice.", fix="For some tensors another: `dtype='*.norm.*=fp32'`")
        found[glob] = read_dtype(name, dtype)
    return found


def read_location(name: str, value: Any) -> Any:
    """A device, or a mapping from device tag to device."""
    if isinstance(value, Mapping):
        return {read_device(name, tag): read_device(name, target) for tag, target in value.items()}
    return read_device(name, value)


def read_device(name: str, value: Any) -> str:
    if type(value).__name__ == "device" and type(value).__module__ == "torch":
        return str(value)
    if not isinstance(value, str):
        raise _refused(name, value, 'a device ("cpu", torch.device("cuda:1")), or a mapping from device to device')
    return value


def read_call(name: str, value: Any) -> Any:
    if not callable(value):
        raise _refused(name, value, "a function")
    return value


def read_keywords(name: str, value: Any) -> Any:
    if isinstance(value, Mapping):
        return {read_text(name, key): one for key, one in value.items()}
    return read_text(name, value)


def read_some_keywords(name: str, value: Any) -> Any:
    """None, keyword arguments, or those of several callables."""
    if isinstance(value, list | tuple):
        return [None if one is None else read_keywords(name, one) for one in value]
    return None if value is None else read_keywords(name, value)


def read_state_dict(name: str, value: Any) -> Any:
    if not isinstance(value, Mapping):
        raise _refused(name, value, "a mapping from names to tensors")
    return value


# Of functions that take no record of options (`ckpt_tools.tree.options`).
_READERS: dict[str, Reader] = {
    **dict.fromkeys(("path", "source", "target", "left", "right"), read_file),
    **dict.fromkeys(("output", "old", "new", "key"), read_path),
    **dict.fromkeys(("certificate", "signature"), read_optional(read_path)),
    **dict.fromkeys(("against", "other"), read_optional(read_file)),
    "sources": read_inputs,
    "files": read_files,
    "tolerance": read_optional(read_weight),
    "model_args": read_some_keywords,
    **dict.fromkeys(
        ("unwrap", "overwrite", "dry_run", "keep_damaged", "tie_equal", "values", "digest", "contents",
         "mmap", "wrapped", "whole", "tensors_only"),
        read_flag,
    ),
    **dict.fromkeys(("select", "format", "filter", "device", "index"), read_optional(read_text)),
    **dict.fromkeys(("prefix", "name", "words"), read_text),
    **dict.fromkeys(("ignore", "allow", "inputs"), read_texts),
    "reinit": read_schemes,
    **dict.fromkeys(("seed", "jobs", "runs"), read_whole),
    "depth": read_optional(read_whole),
    "dtype": read_optional(read_dtype),
    "map_location": read_optional(read_location),
    **dict.fromkeys(("progress", "before"), read_optional(read_call)),
    "state_dict": read_state_dict,
    **dict.fromkeys(("like", "options", "model", "model_or_mapping"), read_anything),
}  # fmt: skip
