"""The verdict of a pickle by the names in it: whatever a pickle does has a name in it. docs/scan.md has the rules.

1. A name outside the lists needs code, one that does harm is dangerous, called or not. 2. To call what was computed is
dangerous. 3. A call of a name outside the lists needs code, if it is a class of a package that is not everywhere, else it is
dangerous. 4. An instance of a class of the standard library outside the lists is dangerous. 5. So is a change of a module, a
class or a function. A few makers are judged by what they are handed.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import TypeAlias

from ckpt_tools.pickling import callables
from ckpt_tools.pickling.callables import GETATTR, Rating, of_python3
from ckpt_tools.text import printable
from ckpt_tools.tree.nodes import PLAIN, ByteString, Dict, Entry, Global, List, Node, Object

_RATINGS: tuple[Rating, ...] = ("harmless", "unknown", "harmful")
_Given: TypeAlias = tuple[Node, ...]


def of_call(function: Node, args: _Given) -> Rating:
    """Rules 2 and 3: `function(*args)`."""
    if type(function) is Object and function.function == GETATTR and (inner := _class_within(function.args)):
        function = inner
    if type(function) is not Global:
        return "harmless" if _is_zone_maker(function) and PLAIN.issuperset(map(type, args)) else "unknown"
    name = of_python3(function)
    if name in callables.HANDED:
        ratings = [_of_handed(how, part, args) for how, part in zip(callables.HANDED[name], args, strict=False)]
        return max(ratings, key=_RATINGS.index, default="harmless")
    if name == GETATTR:
        return _of_attribute(args)
    if name in _JUDGED:
        is_harmless, otherwise = _JUDGED[name]
        return "harmless" if is_harmless(args) else otherwise
    if callables.is_data(name):
        return "harmless"
    if callables.is_harmful(name):
        return "harmful"
    return "harmless" if callables.may_be_called(name) else "unknown"


def of_instance(cls: Node) -> Rating:
    """Rule 4: an instance of a class, made without its `__init__`."""
    if type(cls) is Object and cls.function == GETATTR and type(cls.args) is tuple:  # a class inside a class
        return _of_attribute(cls.args)
    if type(cls) is not Global:
        return "unknown"
    name = of_python3(cls)
    if callables.is_data(name):
        return "harmless"
    if callables.is_harmful(name):
        return "harmful"
    return "unknown" if callables.is_standard(name) else "harmless"


def of_change(target: Node, state: Node = None) -> Rating:
    """Rule 5: a state or items are set."""
    if type(target) is Global:
        return "harmful" if callables.is_harmful(of_python3(target)) else "unknown"
    if type(target) is not Object:
        return "harmless"
    made = made_of(target)
    is_shared = of_python3(made) in callables.SHARED if type(made) is Global else _is_zone_maker(made)
    if is_shared and target.call != "none":  # a member of a class, a logger, a module out of `sys.modules`
        return "unknown"
    return "harmless" if state is None else _of_text(made, state)


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
    """The text in the state of a distribution of scipy.stats."""
    parts = [part for part in (state if type(state) is tuple else (state,)) if part is not None]
    pairs = [pair for part in parts if type(part) is Dict for pair in part.items]
    texts = [value for key, value in pairs if key == _PARSER]
    if texts:
        is_known = all(type(text) is str and _PARSER_TEXT.fullmatch(text) for text in texts)
        return "harmless" if is_known else "harmful"
    is_plain = all(type(part) is Dict for part in parts) and all(type(key) is str for key, _ in pairs)
    return "unknown" if type(made) is Global and made.module.startswith(_PARSED) and not is_plain else "harmless"


# --- what is judged by its arguments


def _of_handed(how: str, part: Node, given: _Given) -> Rating:
    """What a maker calls, or makes an instance of."""
    if how == "new":
        return of_instance(part)
    if how == "name" and type(part) is Object:  # an instance, which is kept
        return "harmless"
    if type(part) is not Global or callables.HANDED.get(part, ("",))[0] == "apply":
        return "unknown"
    if how == "apply" and (part in callables.SHARED or not part.module.startswith("torch")):
        return "unknown"  # attributes are set on what it gives
    args = given[2] if how == "apply" and len(given) > 2 else ()
    return of_call(part, args if type(args) is tuple else (args,))


def _class_within(given: Node) -> Global | None:
    """The class inside a class that getattr gives."""
    owner, name = given if type(given) is tuple and len(given) == 2 else (None, None)
    if type(owner) is not Global or type(name) is not str or not name.isidentifier():
        return None
    inner = Global(owner.module, f"{owner.name}.{name}")
    return inner if callables.is_class(owner.name) and callables.is_class(inner.name) else None


_ZONE = (Global("zoneinfo", "ZoneInfo"), "_unpickle")  # reads the rules of a time zone by its name


def _of_attribute(given: _Given) -> Rating:
    """`getattr`: of a name it is the dotted name; of an instance of a class of the user's a method."""
    if given == _ZONE:
        return "harmless"
    owner, name = given if len(given) == 2 else (None, None)
    if type(name) is not str or name.startswith("__") or not name.isidentifier():
        return "harmful"
    if type(owner) is Global:
        is_harmful = callables.is_harmful(of_python3(owner))
        return "harmful" if is_harmful else callables.of_name(Global(owner.module, f"{owner.name}.{name}"))
    if type(owner) is not Object or not (owner.call == "new" or owner.function == callables.RECONSTRUCTOR):
        return "harmful"
    made = made_of(owner)
    is_own = not (type(made) is Global and callables.is_data(of_python3(made))) and of_instance(made) == "harmless"
    return "harmless" if is_own else "harmful"


def _is_zone_maker(node: Node) -> bool:
    """Whether this is `getattr(ZoneInfo, "_unpickle")`, as time zones are pickled."""
    return type(node) is Object and node.call == "reduce" and node.function == GETATTR and node.args == _ZONE


_TEXT_CODECS = frozenset(("latin1", "latin-1", "utf-8", "utf8", "ascii"))  # another may be the user's
_CONSTANTS = frozenset(Global("builtins", name) for name in ("Ellipsis", "NotImplemented"))
_OR = frozenset((Global("operator", "or_"), Global("_operator", "or_")))


def _is_of_typing(given: _Given) -> bool:
    """`getitem(typing.List, int)`; with a dot in its name the first is another module's."""
    name = given[0] if len(given) == 2 else None
    return type(name) is Global and name.module == "typing" and name.name.isidentifier() and name.name[0].isupper()


# What calls of these may be given, and what they are with any other arguments.
_JUDGED: dict[Global, tuple[Callable[[_Given], bool], Rating]] = {
    callables.ENCODE: (
        lambda given: len(given) == 1 or (len(given) > 1 and type(given[1]) is str and given[1] in _TEXT_CODECS), "unknown",
    ),
    callables.PARTIAL: (lambda given: len(given) == 1, "unknown"),  # pickle writes its arguments as a state
    Global("builtins", "type"): (lambda given: len(given) == 1 and (given[0] is None or given[0] in _CONSTANTS), "harmful"),
    Global("builtins", "iter"): (lambda given: len(given) == 1, "harmful"),  # of two arguments it calls the first
    Global("operator", "itemgetter"): (lambda given: PLAIN.issuperset(map(type, given)), "harmful"),
    **{Global(module, "getitem"): (_is_of_typing, "harmful") for module in ("operator", "_operator")},
    # `functools.reduce(or_, types)`: int | None
    **{
        Global(module, "reduce"): (lambda given: len(given) == 2 and type(given[0]) is Global and given[0] in _OR, "harmful")
        for module in ("functools", "_functools")
    },
}  # fmt: skip


def made_of(target: Object) -> Node:
    """What makes an object: of functions that make an instance of a class that they are given, the class."""
    function, args = target.function, target.args
    if type(function) is not Global or callables.HANDED.get(function, ("",))[0] != "new":
        return function
    return args[0] if type(args) is tuple and args else function


# --- as text


_MOST_TEXT, _MOST_ITEMS, _MOST_DEPTH = 200, 8, 4


def call_text(function: Node, args: Node) -> str:
    """A call as Python would write it, its literal arguments as decoded, escaped and cut: `posix.system('id')`."""
    return _cut(f"{function_text(function)}({_items(args if type(args) is tuple else (args,))})", 4 * _MOST_TEXT)


def function_text(function: Node) -> str:
    if type(function) is Global:
        return _cut(printable(str(function)), _MOST_TEXT)
    if type(function) is Object:
        return f"({_text(function, _MOST_DEPTH - 2)})"
    return f"a {type(function).__name__}"


def _text(node: Node, depth: int = 0) -> str:
    if type(node) is ByteString:
        node = node.data
    if type(node) is str or type(node) is bytes:
        shown, kind = printable(repr(node[:_MOST_TEXT])), "characters" if type(node) is str else "bytes"
        return shown + (f"... ({len(node)} {kind})" if len(node) > _MOST_TEXT else "")
    if type(node) is int:
        return str(node) if node.bit_length() <= 128 else f"<int of {node.bit_length()} bits>"
    if type(node) in PLAIN:
        return repr(node)
    if type(node) is Global:
        return function_text(node)
    if depth == _MOST_DEPTH:
        return "..."
    return _container_text(node, depth + 1)


def _container_text(node: Node, depth: int) -> str:
    if type(node) is Object:
        function = function_text(node.function) if type(node.function) is Global else _text(node.function, depth)
        return f"{function}({_items(node.args if type(node.args) is tuple else (node.args,), depth)})"
    if type(node) is tuple:
        return f"({_items(node, depth)}{',' if len(node) == 1 else ''})"
    if type(node) is List:
        return f"[{_items(node.items, depth)}]"
    if type(node) is Dict:
        pairs = [f"{_text(key, depth)}: {_text(value, depth)}" for key, value in node.items[:_MOST_ITEMS]]
        return "{" + ", ".join(pairs) + (", ..." if len(node.items) > _MOST_ITEMS else "") + "}"
    return "<tensor>" if type(node) is Entry else f"<{type(node).__name__.lower()}>"


def _items(items: tuple[Node, ...] | list[Node], depth: int = 0) -> str:
    return ", ".join(_text(item, depth) for item in items[:_MOST_ITEMS]) + (", ..." if len(items) > _MOST_ITEMS else "")


def _cut(text: str, most: int) -> str:
    return text if len(text) <= most else f"{text[:most]}..."
