"""Words for messages: lists, paths in a checkpoint, suggestions, and text from a file made safe to show."""

from __future__ import annotations

import re
import unicodedata
from collections.abc import Collection, Iterable, Sequence
from itertools import islice
from typing import Any

MAX_SHOWN = 5000


_NEAR, _NEAR_LENGTH = 2000, 200  # candidates looked at, and their length: comparing takes the product of two lengths


def did_you_mean(text: str, candidates: Iterable[str]) -> str:
    """`Did you mean 'model'?` with up to three candidates that are near, or nothing."""
    import difflib

    short = (name for name in candidates if 0 < len(name) <= _NEAR_LENGTH)
    found = difflib.get_close_matches(text[:_NEAR_LENGTH], list(islice(short, _NEAR)), n=3)
    return f"Did you mean {', '.join(map(repr, found))}?" if found else ""


# What others call it -> the arguments here, of which those that the function or command has are named.
_MEANT = {
    "strict": ("allow_missing", "allow_unexpected"), "ignore_mismatched_sizes": ("on_mismatch",),
    "device": ("map_location",), "device_map": ("map_location",), "location": ("map_location",), "cpu": ("map_location='cpu'",),
    "torch_dtype": ("dtype",), "precision": ("dtype",), "type": ("dtype",), "half": ("dtype='fp16'",),
    "fp16": ("dtype='fp16'",), "float16": ("dtype='fp16'",), "bf16": ("dtype='bf16'",), "bfloat16": ("dtype='bf16'",),
    "fp32": ("dtype='fp32'",), "quantize": ("dtype='q8_0'",), "dtype_only": ("dtype='GLOB=TYPE'",),
    "force": ("overwrite",), "exist_ok": ("overwrite",), "max_shard_size": ("shard_size",), "to": ("format",),
    "output_dir": ("to_dir",), "out_dir": ("to_dir",), "prefix": ("strip_prefix", "add_prefix"),
    "strip": ("strip_module", "strip_prefix"), "key": ("select",), "exclude": ("drop",), "include": ("keep",),
    "remove": ("drop",), "adapter": ("lora",), "base": ("lora",), "drop_metadata": ("set_metadata='KEY='",),
    "reverse": ("plan='PLAN:reverse'",), "to_device": ("map_location",), "cuda": ("map_location='cuda'",),
    "junit": ("format='junit'",), "sarif": ("format='sarif'",), "github": ("format='github'",), "nan": ("values",),
    "no_optimizer": ("slim",), "gpu": ("map_location='cuda'",), "merge_lora": ("lora",),
}  # fmt: skip
_SAID = {
    "weights_only": "Nothing that a file says is ever executed: leave it out.",
    "device": "Tensors go where the model has its own.",
    "verify": "`check` compares every CRC-32; what leaves its container is compared as ever.",
    "overwrite": "A file that is there is replaced.",
    "prove": "`ckpt_tools.torch.prove` runs both.",
}


def meant(name: str, known: Collection[str]) -> str:
    """`Here it is `overwrite`.`, or nothing: which of the known names somebody means who gives another."""
    names = (name,) if name in known else _MEANT.get(name, ())
    found = [f"`{other}`" for other in names if other.partition("=")[0] in known]
    return f"Here it is {' and '.join(found)}." if found else ""


def check_keywords(function: str, given: Iterable[str], known: Collection[str]) -> None:
    """Raise TypeError for a keyword that the function does not have, with the one that is meant."""
    for name in given:
        if name not in known:
            hint = meant(name, known) or _SAID.get(name) or did_you_mean(name, known)
            raise TypeError(f"{function}() got an unexpected keyword argument {name!r}. {hint}".rstrip(" "))


def did_you_mean_file(name: str, others: Iterable[str]) -> str:
    """`Did you mean 'model.pth'?` with up to three files whose names are near but for their extensions, or nothing."""
    import difflib

    stems: dict[str, list[str]] = {}
    for other in islice((other for other in others if len(other) <= _NEAR_LENGTH), _NEAR):
        stems.setdefault(_stem(other), []).append(other)
    near = difflib.get_close_matches(_stem(name)[:_NEAR_LENGTH], stems, cutoff=_NEAR_FILE)
    found = [other for stem in near for other in stems[stem]][:3]
    return f"Did you mean {', '.join(map(repr, found))}?" if found else ""


_NEAR_FILE = 0.7  # of two stems: one slip in a word of four letters


def _stem(name: str) -> str:
    return name.rpartition(".")[0] or name


def dotted(where: Sequence[str | int]) -> str:
    """A path in a tree as text: `model.ema`, `nets.0`; the root is the empty text."""
    return ".".join(map(str, where))


def some(names: Sequence[str]) -> str:
    """The first few of many names, quoted, for a message."""
    return listed([repr(name) for name in names[:5]], rest=len(names) - 5)


def listed(texts: Sequence[object], limit: int = 5, *, rest: int = 0) -> str:
    """The first few of many texts with commas between, and how many more there are; `rest` were left out before."""
    more = max(rest, 0) + max(len(texts) - limit, 0)
    return ", ".join(map(str, texts[:limit])) + (f" and {more} more" if more else "")


def shape_text(shape: Sequence[int] | None) -> str:
    """A shape as a table shows it."""
    return "?" if shape is None else "x".join(map(str, shape)) or "scalar"


def these_ranks(ranks: Sequence[object]) -> str:
    """The numbers of one or of several ranks."""
    return f"rank{'s' if len(ranks) != 1 else ''} {listed(ranks)}"


def shortened(text: str, limit: int) -> str:
    """A text of at most so many characters, cut at its end."""
    return text if len(text) <= limit else f"{text[: max(limit - 3, 0)]}..."


def printable(text: str) -> str:
    """Text from a file as it may go to a terminal or page: control, format and surrogate characters are escaped."""
    if len(text) > MAX_SHOWN:
        text = f"{text[:MAX_SHOWN]}... ({len(text)} characters)"
    if text.isascii() and text.isprintable():
        return text
    return "".join(_escape(character) for character in text)


def _escape(character: str) -> str:
    if unicodedata.category(character) in ("Cc", "Cf", "Cs", "Co", "Cn", "Zl", "Zp"):
        code = ord(character)
        return f"\\x{code:02x}" if code < 256 else f"\\u{code:04x}" if code < 65536 else f"\\U{code:08x}"
    return character


def natural(text: str) -> tuple[object, ...]:
    """A key that sorts numbers in a text by their value: `layers.2` before `layers.10`."""
    parts = _DIGITS.split(text)  # text and digits in turns; digits are compared by length first, since there may be thousands
    return tuple(part if index % 2 == 0 else (len(part.lstrip("0")), part.lstrip("0")) for index, part in enumerate(parts))


_DIGITS = re.compile(r"([0-9]+)")


class Report:
    """The base of reports, which are dataclasses: a short repr, a table for notebooks, and plain data."""

    __slots__ = ()

    def __repr__(self) -> str:
        """Short values as they are, of long texts and collections how much there is of them."""
        values = {name: getattr(self, name) for name in _fields(self)}
        return f"{type(self).__name__}({', '.join(f'{name}={_brief(value)}' for name, value in values.items() if value)})"

    def _repr_html_(self) -> str:
        """A row a field, longer ones folded. What comes from a file is escaped."""
        cells = []
        for name in _fields(self):
            if (value := getattr(self, name)) not in (None, "", [], {}, (), False):
                cells.append(f"<tr><th>{name}</th><td>{_cell(value)}</td></tr>")
        return f"<table><caption>{type(self).__name__}</caption>{''.join(cells)}</table>"

    def to_json(self) -> dict[str, Any]:
        """The report as plain data."""
        return {name: _as_data(getattr(self, name)) for name in _fields(self)}


def _as_data(value: Any) -> Any:
    """What a field holds as plain data: records become dicts, those with a `to_json` by that."""
    if isinstance(value, list | tuple):
        made = [_as_data(one) for one in value]
        return tuple(made) if isinstance(value, tuple) else made
    if hasattr(value, "to_json"):
        return value.to_json()
    names = _fields(value)
    return {name: _as_data(getattr(value, name)) for name in names} if names else value


def _fields(report: object) -> tuple[str, ...]:
    return tuple(getattr(type(report), "__dataclass_fields__", ()))


def _brief(value: object) -> str:
    if isinstance(value, list | tuple | dict | set):
        return f"<{len(value)}>"
    return shortened(repr(value), 100)


_NOTEBOOK_ROWS = 200


def _cell(value: object) -> str:
    """One value, or a table of several behind a triangle."""
    if not isinstance(value, list | tuple | dict | set) or len(value) < 2:
        return _escaped(value)
    rows: Iterable[object] = value.items() if isinstance(value, dict) else value
    lines = "".join(f"<tr>{''.join(map(_data, _columns(row)))}</tr>" for row in islice(rows, _NOTEBOOK_ROWS))
    more = f"<tr><td>... {len(value) - _NOTEBOOK_ROWS} more</td></tr>" if len(value) > _NOTEBOOK_ROWS else ""
    return f"<details><summary>{len(value)}</summary><table>{lines}{more}</table></details>"


def _columns(row: object) -> Iterable[object]:
    if isinstance(row, dict):
        return row.values()
    return row if isinstance(row, tuple) else [getattr(row, name) for name in _fields(row)] or [row]


def _data(value: object) -> str:
    return f"<td>{_escaped(value)}</td>"


def _escaped(value: object) -> str:
    from html import escape  # notebooks alone need it

    return escape(printable(shortened(value if isinstance(value, str) else repr(value), 300)))
