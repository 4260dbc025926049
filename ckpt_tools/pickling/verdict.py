"""The verdict of a pickle by the names in it: whatever a pickle does has a name in it. docs/scan.md has the rules.

1. A name outside the lists needs code, one that does harm is dangerous, called or not. 2. To call what was computed is
dangerous. 3. A call of a name outside the lists needs code, if it is a class of a package that is not everywhere, else it is
dangerous. 4. An instance of a class of the standard library outside the lists is dangerous. 5. So is a change of a module, a
class or a function. A few makers are judged by what they are handed. names.toml has the lists.
"""

from __future__ import annotations

import re
import sys
import tomllib
from _compat_pickle import IMPORT_MAPPING
from collections.abc import Callable
from functools import lru_cache
from pkgutil import get_data
from typing import Any, Literal, TypeAlias

from ckpt_tools.pickling.torch_objects import LOAD_FROM_BYTES
from ckpt_tools.pickling.weights_only import ALLOWED, ALLOWED_NESTED, is_newer_dtype, named
from ckpt_tools.text import printable, shortened
from ckpt_tools.tree.nodes import PLAIN, ByteString, Dict, Entry, Global, List, Node, Object

# From harmless to harmful; "unknown" is to be treated as "harmful".
Rating: TypeAlias = Literal["harmless", "unknown", "harmful"]
_RATINGS: tuple[Rating, ...] = ("harmless", "unknown", "harmful")
_Given: TypeAlias = tuple[Node, ...]

# --- the lists

_LISTS: dict[str, Any] = tomllib.loads((get_data("ckpt_tools.pickling", "names.toml") or b"").decode())
_WORDS = {key: frozenset(text.split()) for key, text in _LISTS.items() if type(text) is str}
RECONSTRUCTOR, GETATTR = Global("copyreg", "_reconstructor"), Global("builtins", "getattr")
_DATA = ALLOWED | ALLOWED_NESTED | named(_LISTS["data"]) | named(_LISTS["shared"])
_SHARED = named(_LISTS["shared"]) | named("builtins:getattr,type operator:getitem _operator:getitem")
_HANDED = {name: how.split() for how, names in _LISTS["handed"].items() for name in named(names)}
_HARMFUL, _NAMED_FREELY = named(_LISTS["harmful"]), named(_LISTS["named_freely"])
_HARMFUL_MODULES = _WORDS["harmful_modules"] | _WORDS["harmful_classes"]
_LEAD_TO_HARM = (_HARMFUL_MODULES - _WORDS["leads_nowhere"]) | _WORDS["leads_to_harm"]
_STANDARD = frozenset(sys.stdlib_module_names) | IMPORT_MAPPING.keys() | _WORDS["standard"]
# Nearly all calls of a checkpoint: these make data of whatever they are given.
QUIET = _DATA - _HANDED.keys() - named("_codecs:encode functools:partial") - {LOAD_FROM_BYTES}

# --- the rules


def of_name(name: Global) -> Rating:
    """Rule 1: a name that is there, called or not. Of most modules that do harm only functions do so by being named."""
    if _runs_when_imported(name.module):
        return "harmful"
    if is_data(name) or name in _NAMED_FREELY or name.module.partition(".")[0] in _WORDS["named_freely_modules"]:
        return "harmless"
    is_told = name in _HARMFUL or not name.name[:1].isupper() or name.module == "subprocess" or _leads_to_harm(name)
    if is_told and _is_harmful(name):
        return "harmful"
    computes = name.module in _WORDS["computing"] and name.name.isidentifier()
    is_function = name.name.rpartition(".")[2].lstrip("_")[:1].islower()
    return "unknown" if is_function and _is_standard(name) and not computes else "harmless"


def of_call(function: Node, args: _Given) -> Rating:
    """Rules 2 and 3: `function(*args)`."""
    if type(function) is not Global:
        return "unknown"
    if function in _HANDED:
        handed = zip(_HANDED[function], args, strict=False)
        return max((_of_handed(how, part, args) for how, part in handed), key=_RATINGS.index, default="harmless")
    if function == GETATTR:
        return of_attribute(args)
    if function in _JUDGED:
        is_harmless, otherwise = _JUDGED[function]
        return "harmless" if is_harmless(args) else otherwise
    is_everywhere = _is_standard(function) or function.module.partition(".")[0] in _WORDS["everywhere"]
    may_be_called = _is_class(function.name) and (function.module in _WORDS["compiled"] or not is_everywhere)
    return _known(function) or ("harmless" if may_be_called else "unknown")


def of_instance(cls: Node) -> Rating:
    """Rule 4."""
    if type(cls) is not Global:
        return "unknown"
    return _known(cls) or ("unknown" if _is_standard(cls) else "harmless")


def of_change(target: Node, state: Node = None) -> Rating:
    """Rule 5: a state or items are set."""
    if type(target) is Global:
        return "harmful" if _is_harmful(target) else "unknown"
    if type(target) is not Object:
        return "harmless"
    made = made_of(target)
    if type(made) is Global and made in _SHARED and target.call != "none":
        return "unknown"  # a member of a class, a logger, a module out of `sys.modules`
    return _of_text(made, state)


def made_of(target: Object) -> Node:
    """What makes an object: of functions that make an instance of a class that they are given, the class."""
    makes = type(target.function) is Global and _HANDED.get(target.function, ("",))[0] == "new"
    return target.args[0] if makes and type(target.args) is tuple and target.args else target.function


# --- what is known of names


def is_data(name: Global) -> bool:
    if name in _DATA or is_newer_dtype(name):
        return True
    if name.module == "builtins":
        return name.name[:1].isupper() and name.name.isidentifier()
    return name.module == "numpy.dtypes" and name.name.isidentifier() and name.name.endswith("DType")


def _known(name: Global) -> Rating | None:
    return "harmless" if is_data(name) else "harmful" if _is_harmful(name) else None


@lru_cache(maxsize=1024)
def _is_harmful(name: Global) -> bool:
    """Whether to call this global is known to run code or programs, to open files or to connect."""
    if name in _DATA:
        return False
    parts = name.module.split(".", 4)  # the module and the packages that it is in, four of them at most
    is_within = any(".".join(parts[:count]) in _HARMFUL_MODULES for count in range(1, min(len(parts), 4) + 1))
    return is_within or name in _HARMFUL or _runs_when_imported(name.module) or _leads_to_harm(name)


def _leads_to_harm(name: Global) -> bool:
    """Whether a name leads into a module that another one has imported, or to the insides of a class."""
    *path, last = name.name.split(".", 16)
    if last in _LEAD_TO_HARM or "." in last or not all(map(_is_class, path)):
        return True
    is_inside = any(part.startswith("__") and part.endswith("__") and len(part) > 3 for part in (*path, last))
    return is_inside or (bool(path) and Global(path[-1], last) in _HARMFUL)


def _runs_when_imported(module: str) -> bool:
    """Whether to import a module, as naming anything in it does, runs a program: opens a window, runs tests of the folder."""
    return module in _WORDS["runs_when_imported"] or module.endswith(".__main__")


def _is_standard(name: Global) -> bool:
    package = name.module.partition(".")[0]
    is_private = package[:1] == "_" and package[1:2].isascii() and package[1:2].islower()  # of Python's own, in C
    return package in _STANDARD or (is_private and package not in _WORDS["everywhere"])


def _is_class(name: str) -> bool:
    return name.rpartition(".")[2].lstrip("_")[:1].isupper()


# --- what is judged by what it is handed


def _of_handed(how: str, part: Node, given: _Given) -> Rating:
    if how == "new":
        return of_instance(part)
    if how == "name" and type(part) is Object:  # an instance, which is kept
        return "harmless"
    if type(part) is not Global or _HANDED.get(part, ("",))[0] == "apply":
        return "unknown"
    if how != "apply":
        return of_call(part, ())
    args = given[2] if len(given) > 2 else ()  # and attributes are set on what it gives
    is_own = part in _SHARED or not part.module.startswith("torch")
    return "unknown" if is_own else of_call(part, args if type(args) is tuple else (args,))


def of_attribute(given: _Given) -> Rating:
    """`getattr`: of a name it is the dotted name; of an instance of a class of the user's a method."""
    owner, name = given if len(given) == 2 else (None, None)
    if type(name) is not str or name.startswith("__") or not name.isidentifier():
        return "harmful"
    if type(owner) is Global:
        return "harmful" if _is_harmful(owner) else of_name(Global(owner.module, f"{owner.name}.{name}"))
    if type(owner) is not Object or not (owner.call == "new" or owner.function == RECONSTRUCTOR):
        return "harmful"
    made = made_of(owner)
    is_own = type(made) is Global and not is_data(made) and of_instance(made) == "harmless"
    return "harmless" if is_own else "harmful"


def _is_codec(given: _Given) -> bool:
    """Whether text is encoded by a codec that is Python's own: another may be the user's."""
    return len(given) == 1 or (len(given) > 1 and given[1] in ("latin1", "latin-1", "utf-8", "utf8", "ascii"))


def _is_of_typing(given: _Given) -> bool:
    """`getitem(typing.List, int)`; with a dot in its name the first is another module's."""
    name = given[0] if len(given) == 2 else None
    return type(name) is Global and name.module == "typing" and name.name.isidentifier() and name.name[0].isupper()


_CONSTANTS = (None, *named("builtins:Ellipsis,NotImplemented"))
_OR = (*named("operator:or_ _operator:or_"),)
# What calls of these may be given, and what they are with any other arguments.
_JUDGED: dict[Global, tuple[Callable[[_Given], bool], Rating]] = {
    name: (is_harmless, otherwise)
    for names, is_harmless, otherwise in (
        ("_codecs:encode", _is_codec, _RATINGS[1]),
        ("functools:partial", lambda given: len(given) == 1, _RATINGS[1]),  # pickle writes its arguments as a state
        ("builtins:type", lambda given: len(given) == 1 and given[0] in _CONSTANTS, _RATINGS[2]),
        ("builtins:iter", lambda given: len(given) == 1, _RATINGS[2]),  # of two arguments it calls the first
        ("operator:itemgetter", lambda given: PLAIN.issuperset(map(type, given)), _RATINGS[2]),
        ("operator:getitem _operator:getitem", _is_of_typing, _RATINGS[2]),
        # `functools.reduce(or_, types)`: int | None
        ("functools:reduce _functools:reduce", lambda given: len(given) == 2 and given[0] in _OR, _RATINGS[2]),
    )
    for name in named(names)
}

# A distribution of scipy.stats runs the text under this name when its state is set; what it writes itself makes functions.
_PARSED, _PARSER = "scipy.stats", "_parse_arg_template"
_TAKES, _GIVES, _SHAPES = r"loc=0(?:, scale=1)?", r"loc, (?:scale|1)", r"((?:[A-Za-z_]\w*, ){0,32})"
_PARSER_TEXT = re.compile(
    rf"\ndef _parse_args\(self, {_SHAPES} {_TAKES}\):\n    return \(\1\), {_GIVES}\n"
    rf"\ndef _parse_args_rvs\(self, \1 {_TAKES}, size=None\):\n    return self._argcheck_rvs\(\1 {_GIVES}, size=size\)\n"
    rf"\ndef _parse_args_stats\(self, \1 {_TAKES}, moments='mv'\):\n    return \(\1\), {_GIVES}, moments\n",
    re.ASCII,
)


def _of_text(made: Node, state: Node) -> Rating:
    parts = [part for part in (state if type(state) is tuple else (state,)) if part is not None]
    pairs = [pair for part in parts if type(part) is Dict for pair in part.items]
    texts = [value for key, value in pairs if key == _PARSER]
    if texts:
        return "harmless" if all(type(text) is str and _PARSER_TEXT.fullmatch(text) for text in texts) else "harmful"
    is_plain = all(type(part) is Dict for part in parts) and all(type(key) is str for key, _ in pairs)
    return "unknown" if type(made) is Global and made.module.startswith(_PARSED) and not is_plain else "harmless"


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
    if type(node) is Dict:
        pairs = [f"{_text(key, depth)}: {_text(value, depth)}" for key, value in node.items[:_MOST_ITEMS]]
        return "{" + ", ".join(pairs) + (", ..." if len(node.items) > _MOST_ITEMS else "") + "}"
    return "<tensor>" if type(node) is Entry else f"<{type(node).__name__.lower()}>"


def _items(items: _Given | list[Node], depth: int) -> str:
    return ", ".join(_text(item, depth) for item in items[:_MOST_ITEMS]) + (", ..." if len(items) > _MOST_ITEMS else "")
