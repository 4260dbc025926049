"""What loading a program of `torch.export` runs: texts that it evaluates, machine code that lies beside it.

Source: torch/_export/serde/serialize.py, `_parse_sym_expr`, which gives every `expr_str` of a model to `sympy.sympify`, which
evaluates it as Python; torch/export/pt2_archive/_package.py, `load_pt2`.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from ckpt_tools.formats.zip_directory import Record
from ckpt_tools.io.parsers import load_json
from ckpt_tools.pickling import verdict
from ckpt_tools.pickling.calls import Call
from ckpt_tools.tree.nodes import Global

# Of a record, in small letters: torch finds names without regard to case. A folder of the name of the file is around all.
_FORMAT = re.compile(r"[^/]*/archive_format")
_MODEL = re.compile(r"[^/]*/models/")
_OLD_MODEL = "serialized_exported_program.json"
_COMPILED = re.compile(r"(?:^|/)data/aotinductor/.*[^/](?<!\.json)$", re.DOTALL)
_SYMPIFY, _LOAD = Global("sympy", "sympify"), Global("torch._C._aoti", "AOTIModelPackageLoader")
# What sympy prints of sizes, and nothing that a function of Python's own could be reached by.
_TOKEN = re.compile(
    r"\s+|\d+(?:\.\d*)?(?:e[+-]?\d+)?|'-?[\w.+-]*'|\"-?[\w.+-]*\"|(?P<word>[A-Za-z_]\w*)(?P<call>\s*\()?|[-+*/%(),=<>!&|~]",
    re.ASCII,
)
_WORD = re.compile(r"[A-Z]\w*|[a-z]{1,4}\d+", re.ASCII)
_KNOWN = (
    "positive negative nonnegative nonpositive nonzero zero integer real extended_real finite infinite commutative even odd "
    "precision dps evaluate oo int_oo zoo nan pi and or not"
)
_CALLED = "floor ceiling sqrt log exp sin cos tan asin acos atan sinh cosh tanh abs sign min max"
_WORDS, _FUNCTIONS = frozenset(_KNOWN.split()), frozenset(_CALLED.split())


def calls(records: Sequence[Record], read: Callable[[Record], bytes]) -> Iterator[tuple[str, Call]]:
    """The records that are code for the machine; then texts of graphs that are not sizes as sympy prints them.

    torch.export.load asks for the format first; torch before 2.8 wrote zips of one model.
    """
    for record in records:
        if _COMPILED.search(record.name.lower()):
            yield record.name, _call(_LOAD, record.name)
    is_program = any(_FORMAT.fullmatch(record.name.lower()) for record in records)
    for record in records:
        if (is_program and _MODEL.match(record.name.lower())) or record.name.lower().endswith(_OLD_MODEL):
            pairs: list[tuple[str, Any]] = []
            load_json(read(record), pairs=pairs.extend)
            for key, text in pairs:
                if key == "expr_str" and type(text) is str and not is_size(text):
                    yield record.name, _call(_SYMPIFY, text)


def _call(function: Global, given: str) -> Call:
    return Call(verdict.call_text(function, (given,)), str(function), 0, "harmful")


def is_size(text: str) -> bool:
    """Whether a text is an expression of sizes: numbers, symbols and functions of sympy's, and nothing that leads elsewhere."""
    at, before = 0, ""
    while at < len(text):
        found = _TOKEN.match(text, at)
        if found is None:
            return False
        word, called = found["word"], found["call"]
        if word is not None and not _is_known(word, called is not None):
            return False
        if found[0] == "(" and before[-1:] in (")", "'", '"'):  # what a call has made is called
            return False
        before, at = found[0].strip() or before, found.end()
    return True


def _is_known(word: str, is_called: bool) -> bool:
    if "__" in word:
        return False
    if is_called:
        return word[0].isupper() or word in _FUNCTIONS
    return word in _WORDS or _WORD.fullmatch(word) is not None
