"""The verdict of a pickle by the names in it: whatever a pickle does has a name in it. docs/scan.md has the five rules.

There are three lists: what weights_only takes is plain (weights_only.py); names.toml has what makes data, which needs code,
and what does harm.
"""

from __future__ import annotations

import re
import sys
import tomllib
from _compat_pickle import IMPORT_MAPPING
from collections.abc import Callable
from functools import lru_cache
from pkgutil import get_data
from typing import Any, TypeAlias

from ckpt_tools.pickling.machine import RECONSTRUCTOR
from ckpt_tools.pickling.torch_objects import LOAD_FROM_BYTES
from ckpt_tools.pickling.weights_only import ALLOWED, ALLOWED_NESTED, is_newer_dtype, named
from ckpt_tools.text import printable, shortened
from ckpt_tools.tree.nodes import PLAIN, ByteString, Dict, Global, List, Node, Object, as_dict

_Given: TypeAlias = tuple[Node, ...]

# --- the lists

_LISTS: dict[str, Any] = tomllib.loads((get_data("ckpt_tools.pickling", "names.toml") or b"").decode())
_WORDS = {key: frozenset(text.split()) for key, text in _LISTS.items() if type(text) is str}
GETATTR = Global("builtins", "getattr")
_DATA = ALLOWED | ALLOWED_NESTED | named(_LISTS["data"]) | named(_LISTS["shared"])
_SHARED = named(_LISTS["shared"]) | named("builtins:getattr,type operator:getitem _operator:getitem")
_HANDED = {name: how.split() for how, names in _LISTS["handed"].items() for name in named(names)}
_HARMFUL, _NAMED_FREELY = named(_LISTS["harmful"]), named(_LISTS["named_freely"])
_HARMFUL_MODULES = _WORDS["harmful_modules"] | _WORDS["harmful_classes"]
_LEAD_TO_HARM = (_HARMFUL_MODULES - _WORDS["leads_nowhere"]) | _WORDS["leads_to_harm"]
_STANDARD = frozenset(sys.stdlib_module_names) | IMPORT_MAPPING.keys() | _WORDS["standard"]


def is_data(name: Global) -> bool:
    is_error = name.module == "builtins" and name.name[:1].isupper() and name.name.isidentifier()
    return name in _DATA or is_error or is_newer_dtype(name) or (name.module == "numpy.dtypes" and name.name.endswith("DType"))


@lru_cache(maxsize=1024)
def does_harm(name: Global) -> bool:
    """Whether to call this global is known to run code or programs, to open files or to connect."""
    if name in _DATA:
        return False
    parts = name.module.split(".", 4)  # the module and the packages that it is in, four of them at most
    is_within = any(".".join(parts[:count]) in _HARMFUL_MODULES for count in range(1, min(len(parts), 4) + 1))
    return is_within or name in _HARMFUL or name.module.endswith(".__main__") or _leads_to_harm(name)


def _leads_to_harm(name: Global) -> bool:
    """Whether a name leads into a module that another one has imported, or to the insides of a class."""
    *path, last = name.name.split(".", 16)
    is_inside = any(part.startswith("__") and part.endswith("__") and len(part) > 3 for part in (*path, last))
    return is_inside or last in _LEAD_TO_HARM or "." in last or not all(map(_is_class, path))


def _is_class(name: str) -> bool:
    last = name.rpartition(".")[2]
    return last.lstrip("_")[:1].isupper() or last in _WORDS["classes"]


def _is_standard(name: Global) -> bool:
    return name.module.partition(".")[0] in _STANDARD


# --- the rules: whether something that a pickle does is a danger


def by_name(name: Global) -> bool:
    """Rule 1: of a name that is there, called or not."""
    if is_data(name) or name in _NAMED_FREELY or name.module in _WORDS["named_freely_modules"]:
        return False
    owner, _, last = name.name.rpartition(".")
    if name.module == "builtins" and is_data(Global("builtins", owner)) and not last.startswith("__"):
        return False  # a method of text or numbers: str.split
    computes = name.module in _WORDS["computing"] and name.name.isidentifier()
    is_function = name.name.rpartition(".")[2].lstrip("_")[:1].islower()
    return does_harm(name) or (is_function and _is_standard(name) and not computes)


def by_call(function: Node, args: _Given) -> bool:
    """Rules 2 and 3: of `function(*args)`."""
    if type(function) is not Global:
        return True
    if function in _HANDED:
        return any(_by_handed(how, part, args) for how, part in zip(_HANDED[function], args, strict=False))
    if function in _JUDGED:
        return not _JUDGED[function](args)
    is_everywhere = _is_standard(function) or function.module.partition(".")[0] in _WORDS["everywhere"]
    may_be_called = _is_class(function.name) and (function.module in _WORDS["making"] or not is_everywhere)
    return not is_data(function) and (does_harm(function) or not may_be_called)


def by_instance(cls: Node) -> bool:
    """Rule 4: of an instance that is made without a call."""
    return type(cls) is not Global or (not is_data(cls) and (does_harm(cls) or _is_standard(cls)))


def by_change(target: Node, state: Node = None) -> bool:
    """Rule 5: of a state or items that are set."""
    if type(target) is not Object:
        return type(target) is Global
    made = made_of(target)
    if type(made) is Global and made in _SHARED and target.call != "none":
        return True  # a member of a class, a logger, a module out of `sys.modules`
    return _sets_code(made, state)


def made_of(target: Object) -> Node:
    """What makes an object: of functions that make an instance of a class that they are given, the class."""
    makes = type(target.function) is Global and _HANDED.get(target.function, ("",))[0] == "new"
    return target.args[0] if makes and type(target.args) is tuple and target.args else target.function


# --- what is judged by what it is handed


def _by_handed(how: str, part: Node, given: _Given) -> bool:
    if how == "new":
        return by_instance(part)
    if type(part) is not Global:
        return how != "name" or (type(part) is not Object and part not in _GENERATORS)  # an instance is kept
    if how != "apply":
        return by_call(part, ())
    args = given[2] if len(given) > 2 else ()  # and attributes are set on what it gives
    is_own = part in _SHARED or not part.module.startswith("torch")
    return is_own or by_call(part, args if type(args) is tuple else (args,))


def _is_member(given: _Given) -> bool:
    """`getattr`: of a name it is the dotted name; of an instance of a class of the user's a method."""
    owner, name = given if len(given) == 2 else (None, None)
    if type(name) is not str or name.startswith("__") or not name.isidentifier():
        return False
    if type(owner) is Global:
        return not by_name(Global(owner.module, f"{owner.name}.{name}"))
    if type(owner) is not Object or not (owner.call == "new" or owner.function == RECONSTRUCTOR):
        return False
    made = made_of(owner)
    return type(made) is Global and not is_data(made) and not by_instance(made)


def _is_codec(given: _Given) -> bool:
    """Whether text is encoded by a codec that is Python's own: another may be the user's."""
    return len(given) == 1 or (len(given) > 1 and given[1] in ("latin1", "latin-1", "utf-8", "utf8", "ascii"))


def _is_type(given: _Given) -> bool:
    """`getitem(typing.List, int)`, or of a class that may be called; `typing.sys` is another module."""
    name = given[0] if len(given) == 2 else None
    is_of_typing = type(name) is Global and name.module == "typing" and name.name.isidentifier() and name.name[0].isupper()
    return is_of_typing or (type(name) is Global and not by_call(name, ()))


_GENERATORS = ("MT19937", "PCG64", "PCG64DXSM", "Philox", "SFC64")  # by their names, as NumPy wrote them before 1.24
_CONSTANTS = (None, *named("builtins:Ellipsis,NotImplemented"))
_OR = named("operator:or_ _operator:or_")
# What calls of these have to be given.
_JUDGED: dict[Global, Callable[[_Given], bool]] = {
    name: is_harmless
    for names, is_harmless in (
        ("builtins:getattr", _is_member),
        ("_codecs:encode", _is_codec),
        (f"{LOAD_FROM_BYTES.module}:{LOAD_FROM_BYTES.name}", lambda given: [*map(type, given)] == [bytes]),  # read as pickles
        ("functools:partial", lambda given: len(given) == 1),  # pickle writes its arguments as a state
        ("builtins:type", lambda given: len(given) == 1 and given[0] in _CONSTANTS),
        ("builtins:iter", lambda given: len(given) == 1),  # of two arguments it calls the first
        ("operator:itemgetter", lambda given: PLAIN.issuperset(map(type, given))),
        ("operator:getitem _operator:getitem", _is_type),
        # `functools.reduce(or_, types)`: int | None
        ("functools:reduce _functools:reduce", lambda given: len(given) == 2 and type(given[0]) is Global and given[0] in _OR),
    )
    for name in named(names)
}
# Nearly all calls of a checkpoint: these make data of whatever they are given.
QUIET = _DATA - _HANDED.keys() - _JUDGED.keys()

# A distribution of scipy.stats runs the text under this name when its state is set; what it writes itself makes functions.
_PARSER, _SHAPES = "_parse_arg_template", r"((?:[A-Za-z_]\w*, ){0,32})"
_TAKES, _GIVES = r"loc=0(?:, scale=1)?", r"loc, (?:scale|1)"
_PARSER_TEXT = re.compile(
    rf"\ndef _parse_args\(self, {_SHAPES} {_TAKES}\):\n    return \(\1\), {_GIVES}\n"
    rf"\ndef _parse_args_rvs\(self, \1 {_TAKES}, size=None\):\n    return self._argcheck_rvs\(\1 {_GIVES}, size=size\)\n"
    rf"\ndef _parse_args_stats\(self, \1 {_TAKES}, moments='mv'\):\n    return \(\1\), {_GIVES}, moments\n",
    re.ASCII,
)


def _sets_code(made: Node, state: Node) -> bool:
    parts = [part for part in (state if type(state) is tuple else (state,)) if part is not None]
    pairs = [pair for part in parts if type(part) is Dict for pair in part.items]
    texts = [value for key, value in pairs if key == _PARSER]
    is_plain = all(type(part) is Dict for part in parts) and all(type(key) is str for key, _ in pairs)
    is_computed = type(made) is Global and made.module.startswith("scipy.stats") and not is_plain
    return is_computed or not all(type(text) is str and _PARSER_TEXT.fullmatch(text) for text in texts)


# --- as text

_MOST_TEXT, _MOST_ITEMS, _MOST_DEPTH = 200, 8, 4


def call_text(function: Node, args: _Given) -> str:
    """A call as Python would write it, its literal arguments as decoded, escaped and cut: `posix.system('id')`."""
    return shortened(f"{function_text(function)}({_items(args, 0)})", 4 * _MOST_TEXT)


def function_text(function: Node) -> str:
    return _text(function, 0) if type(function) is Global else f"({_text(function, _MOST_DEPTH - 2)})"


def _text(node: Node, depth: int) -> str:
    node = node.data if type(node) is ByteString else node
    if type(node) is str or type(node) is bytes:
        shown, kind = printable(repr(node[:_MOST_TEXT])), "characters" if type(node) is str else "bytes"
        return shown + (f"... ({len(node)} {kind})" if len(node) > _MOST_TEXT else "")
    if type(node) is int and node.bit_length() > 128:
        return f"<int of {node.bit_length()} bits>"
    if type(node) is Global:
        return shortened(printable(str(node)), _MOST_TEXT)
    if type(node) in PLAIN:
        return repr(node)
    if depth == _MOST_DEPTH:
        return "..."
    depth += 1
    if type(node) is Object:
        return f"{_text(node.function, depth)}({_items(node.args if type(node.args) is tuple else (node.args,), depth)})"
    if type(node) is tuple:
        return f"({_items(node, depth)}{',' if len(node) == 1 else ''})"
    if type(node) is List:
        return f"[{_items(node.items, depth)}]"
    pairs = [f"{_text(key, depth)}: {_text(value, depth)}" for key, value in as_dict(node).items[:_MOST_ITEMS]]
    return "{" + ", ".join(pairs) + (", ..." if len(as_dict(node).items) > _MOST_ITEMS else "") + "}"


def _items(items: _Given | list[Node], depth: int) -> str:
    return ", ".join(_text(item, depth) for item in items[:_MOST_ITEMS]) + (", ..." if len(items) > _MOST_ITEMS else "")
