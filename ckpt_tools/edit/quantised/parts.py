"""The tensors of a state dict by the plain weight that they are part of: names alone."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from ckpt_tools.edit.quantised.config import Config
from ckpt_tools.errors import ConvertError
from ckpt_tools.io.content import read
from ckpt_tools.io.parsers import load_json
from ckpt_tools.tree.dtypes import DTYPES
from ckpt_tools.tree.nodes import Entry
from ckpt_tools.values.numeric import row_major
from ckpt_tools.values.quantised import MakeRows, Numbers

_SMALL = 1 << 16  # bytes of a tensor that says something about others, in JSON or numbers


@dataclass(frozen=True, slots=True, eq=False)
class Part:
    """A tensor that is part of a quantised one: its name, the entry, and of an object's parts what the object calls it."""

    name: str
    entry: Entry
    attribute: str = ""

    @property
    def shape(self) -> tuple[int, ...]:
        return self.entry.shape

    @property
    def dtype(self) -> str:
        return self.entry.dtype.name

    def numbers(self, dtype: str = "", *, exponents: bool = False) -> Numbers:
        """Its elements, row-major; or its bytes as those of another dtype."""
        return Numbers(row_major(self.entry), DTYPES[dtype or self.dtype], exponents=exponents)

    def small(self) -> bytes:
        if self.entry.nbytes > _SMALL:
            raise ConvertError(f"{self.name!r} has {self.entry.nbytes} bytes.", why=f"Of its kind at most {_SMALL} are read.")
        return read(row_major(self.entry))

    def __str__(self) -> str:
        of = f" ({self.attribute})" if self.attribute else ""
        return f"{self.name!r}{of} is {self.dtype} {list(self.shape)}"


Roles = Mapping[str, Part]


@dataclass(frozen=True, slots=True, eq=False)
class Plain:
    """What a quantised tensor means: the shape, and what works the numbers out, a new one each time."""

    shape: tuple[int, ...]
    make: MakeRows
    detail: str = ""  # of the scheme, where only config.json tells


@dataclass(frozen=True, slots=True, eq=False)
class Quantised:
    name: str
    scheme: str
    parts: tuple[Part, ...]
    elements: int | None
    settle: Callable[[Config], Plain]
    bias: tuple[str, Entry] | None = None  # which lies in the same object


# How the name of a part ends, and its role: behind the name of the weight, and behind that of its module
_OF_WEIGHT = {
    "_scale_inv": "scale", "_scale": "scale", "_scale_2": "scale_2", "_global_scale": "global_scale",
    "_zero_point": "zero_point", "_packed": "packed", "_shape": "shape", "_g_idx": "column_groups", ".absmax": "absmax",
    ".quant_map": "quant_map", ".nested_absmax": "nested_absmax", ".nested_quant_map": "nested_quant_map",
    ".quant_state.bitsandbytes__nf4": "nf4", ".quant_state.bitsandbytes__fp4": "fp4", "_format": "format", "._data": "quanto",
    "._data._data": "quanto_packed", "._scale": "quanto_scale", "._shift": "quanto_shift", "_blocks": "blocks",
    "_scales": "block_scales", ".blocks": "blocks",
}  # fmt: skip
_OF_MODULE = {
    ".scale_weight": "scale", ".scale": "scale", ".SCB": "SCB", ".qweight": "qweight", ".qzeros": "qzeros",
    ".scales": "scales", ".bias": "bias", ".comfy_quant": "comfy", ".biases": "biases", ".g_idx": "g_idx",
    ".input_scale": "input", ".scale_input": "input", ".input_zero_point": "input", ".input_global_scale": "input",
}  # fmt: skip
_ENDING = re.compile(f"(.*?)({'|'.join(map(re.escape, sorted((*_OF_WEIGHT, *_OF_MODULE), key=len, reverse=True)))})", re.DOTALL)
_TORCHAO = re.compile(r"((?:.*\.)?)_(\w+?)_(act_\w+|qdata|scale|zero_point)", re.DOTALL)


def by_plain_name(entries: Mapping[str, Entry]) -> dict[str, dict[str, list[Part]]]:
    """Plain name -> role -> the tensors that have it; every tensor is also the "weight" of its own name."""
    found: dict[str, dict[str, list[Part]]] = {}
    for name, entry in entries.items():
        part = Part(name, entry)
        for plain, role in roles_of(name):
            found.setdefault(plain, {}).setdefault(role, []).append(part)
    return found


def roles_of(name: str) -> Iterable[tuple[str, str]]:
    """What a tensor of this name may be: the plain name, and the role."""
    yield name, "weight"
    if flat := _TORCHAO.fullmatch(name):
        yield f"{flat[1]}{flat[2]}", f"ao_{flat[3]}"
    match = _ENDING.fullmatch(name) or _ENDING.fullmatch(f".{name}")
    if match is None:
        return
    stem, ending = match.groups()  # without a stem the module is the root
    if ending in _OF_WEIGHT:
        yield stem, _OF_WEIGHT[ending]
    else:
        yield f"{stem}.weight" if stem else "weight", _OF_MODULE[ending]
    if ending == ".scales":  # of the tensor `mlp1_weight.blocks` too, as OpenAI names them
        yield stem, "block_scales"


def said_in(name: str, data: bytes) -> dict[str, Any]:
    try:
        found = load_json(data)
    except ValueError:
        found = None
    if not isinstance(found, dict):
        raise ConvertError(f"{name!r} says how weights are quantised, and is not JSON.")
    return found


def mismatch(one: Part, other: Part, wanted: str = "") -> ConvertError:
    return ConvertError(f"{one}, and {other}: they do not fit each other.", why=wanted)
