"""The verdict of a pickle by the names in it: whatever a pickle does has a name in it. docs/scan.md has the rules.

1. A name outside the lists needs code, one that does harm is dangerous, called or not. 2. To call what was computed is
dangerous. 3. A call of a name outside the lists needs code, if it is a class of a package that is not everywhere, else it is
dangerous. 4. An instance of a class of the standard library outside the lists is dangerous. 5. So is a change of a module, a
class or a function. A few makers are judged by what they are handed.
"""

from __future__ import annotations

from typing import Literal, TypeAlias

from ckpt_tools.pickling import callables
from ckpt_tools.pickling.callables import of_python3
from ckpt_tools.text import printable
from ckpt_tools.tree.nodes import PLAIN, ByteString, Dict, Entry, Global, List, Node, Object

# From harmless to harmful; "unknown" is to be treated as "harmful". docs/scan.md has the table.
Rating: TypeAlias = Literal["data", "class", "unknown", "harmful"]
RATINGS: tuple[Rating, ...] = ("data", "class", "unknown", "harmful")
_Given: TypeAlias = tuple[Node, ...]


def is_dangerous(rating: Rating) -> bool:
    """Whether what is rated so is to be treated as dangerous."""
    return rating in RATINGS[2:]


def worst(*ratings: Rating) -> Rating:
    """The worst of several."""
    return max(ratings, key=RATINGS.index, default="data")


def of_reference(name: Global) -> Rating:
    """Rule 1: a name that is there, called or not."""
    name = of_python3(name)
    if callables.is_data(name):
        return "data"
    if callables.is_harmful_to_name(name):
        return "harmful"
    return "unknown" if callables.is_function_of_python(name) else "class"


def of_call(function: Node, args: _Given) -> Rating:
    """Rules 2 and 3: `function(*args)`."""
    if type(function) is Object and function.function == callables.GETATTR and (inner := _class_within(function.args)):
        function = inner
    if type(function) is not Global:
        return "data" if _is_zone_maker(function) and PLAIN.issuperset(map(type, args)) else "unknown"
    name = of_python3(function)
    special = _of_special(name, args)
    if special is not None:
        return special
    if callables.is_data(name):
        return "data"
    if name in callables.CONSTRUCTED:
        return "class"
    if callables.is_harmful(name):
        return "harmful"
    return "class" if callables.is_class(name) and not callables.is_everywhere(name) else "unknown"


def of_instance(cls: Node) -> Rating:
    """Rule 4: an instance of a class, made without its `__init__`."""
    if type(cls) is Object and cls.function == callables.GETATTR and type(cls.args) is tuple:  # a class inside a class
        return worst("class", _of_attribute(cls.args))
    if type(cls) is not Global:
        return "unknown"
    name = of_python3(cls)
    if callables.is_data(name):
        return "data"
    if callables.is_harmful(name):
        return "harmful"
    return "unknown" if callables.is_standard(name) else "class"


def of_change(target: Node, state: Node = None) -> Rating:
    """Rule 5: a state or items are set."""
    if type(target) is Global:
        return "harmful" if callables.is_harmful(of_python3(target)) else "unknown"
    if _is_shared(target):
        return "unknown"
    return _of_source(target, state) if type(target) is Object and state is not None else "data"


def _of_source(target: Object, state: Node) -> Rating:
    """What a distribution of scipy.stats is given: it runs a text of its state."""
    parts = [part for part in (state if type(state) is tuple else (state,)) if part is not None]
    keys = [key for part in parts if type(part) is Dict for key, _ in part.items]
    if callables.PARSER in keys:
        given = [value for part in parts if type(part) is Dict for key, value in part.items if key == callables.PARSER]
        is_known = all(type(text) is str and callables.PARSER_TEXT.fullmatch(text) for text in given)
        return "data" if is_known else "harmful"
    made = made_of(target)
    is_parsed = type(made) is Global and made.module.startswith(callables.PARSED)
    is_plain = all(type(part) is Dict for part in parts) and all(type(key) is str for key in keys)
    return "unknown" if is_parsed and not is_plain else "data"


def _is_shared(target: Node) -> bool:
    """Whether what a call has given belongs to the program: a member of a class, a logger, a module out of `sys.modules`."""
    if type(target) is not Object or target.call == "none":
        return False
    made = made_of(target)
    return of_python3(made) in callables.SHARED if type(made) is Global else _is_zone_maker(made)


def _of_special(name: Global, given: _Given) -> Rating | None:
    """Of functions that are judged by what they are given; None for any other."""
    if name in callables.HANDED:
        return worst(*(_of_handed(how, part, given) for how, part in zip(callables.HANDED[name], given, strict=False)))
    if name == callables.GETATTR:
        return _of_attribute(given)
    if name == callables.ENCODE:
        return "data" if len(given) == 1 or encodes_text(given) else "unknown"
    if name in callables.REDUCE:  # `functools.reduce(or_, types)`: int | None
        return "class" if len(given) == 2 and type(given[0]) is Global and given[0] in callables.OR else "harmful"
    if name == callables.TYPE:
        return "data" if len(given) == 1 and (given[0] is None or given[0] in callables.CONSTANTS) else "harmful"
    if name == callables.PARTIAL:  # pickle writes its arguments as a state
        return "data" if len(given) == 1 else "unknown"
    if name == callables.ITEMGETTER:
        return "data" if PLAIN.issuperset(map(type, given)) else "harmful"
    if name == callables.ITER:
        return "data" if len(given) == 1 else "harmful"
    if name in callables.GETITEM:  # typing.List[int]
        return "data" if len(given) == 2 and _is_typing(given[0]) else "harmful"
    return None


def _of_handed(how: str, part: Node, given: _Given) -> Rating:
    """What a maker calls, or makes an instance of."""
    if how == "new":
        return of_instance(part)
    if how == "name" and type(part) is Object:  # an instance, which is kept
        return "data"
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
    return inner if callables.is_class(owner) and callables.is_class(inner) else None


def _of_attribute(given: _Given) -> Rating:
    """`getattr`: of a name it is the dotted name; of an instance of a class of the user's a method."""
    if given == (callables.ZONE, callables.ZONE_MAKER):
        return "data"
    owner, name = given if len(given) == 2 else (None, None)
    if type(name) is not str or name.startswith("__") or not name.isidentifier():
        return "harmful"
    if type(owner) is Global:
        is_harmful = callables.is_harmful(of_python3(owner))
        return "harmful" if is_harmful else of_reference(Global(owner.module, f"{owner.name}.{name}"))
    if type(owner) is not Object or not (owner.call == "new" or owner.function == callables.RECONSTRUCTOR):
        return "harmful"
    return "class" if of_instance(made_of(owner)) == "class" else "harmful"


def _is_zone_maker(node: Node) -> bool:
    """Whether this is `getattr(ZoneInfo, "_unpickle")`, as time zones are pickled."""
    if type(node) is not Object or node.call != "reduce" or node.function != callables.GETATTR:
        return False
    return node.args == (callables.ZONE, callables.ZONE_MAKER)


def _is_typing(node: Node) -> bool:
    """Whether this is a type of `typing`; with a dot in its name it is another module's."""
    return type(node) is Global and node.module == "typing" and node.name.isidentifier() and node.name[0].isupper()


def encodes_text(given: _Given) -> bool:
    """Whether `_codecs.encode` is given a codec of text: another may be the user's."""
    return len(given) > 1 and type(given[1]) is str and given[1] in callables.TEXT_CODECS


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
    given = args if type(args) is tuple else (args,)
    shown = ", ".join(_text(arg) for arg in given[:_MOST_ITEMS]) + (", ..." if len(given) > _MOST_ITEMS else "")
    return _cut(f"{function_text(function)}({shown})", 4 * _MOST_TEXT)


def function_text(function: Node) -> str:
    """What is called, as text."""
    if type(function) is Global:
        return _cut(printable(str(function)), _MOST_TEXT)
    if type(function) is Object:
        return f"({_text(function, _MOST_DEPTH - 2)})"
    return f"a {type(function).__name__}"


def _text(node: Node, depth: int = 0) -> str:
    if type(node) is str:
        return _quoted(node)
    if type(node) is ByteString:
        node = node.data
    if type(node) is bytes:
        data: bytes = node
        return repr(data[:_MOST_TEXT]) + (f"... ({len(data)} bytes)" if len(data) > _MOST_TEXT else "")
    if type(node) is int:
        return str(node) if node.bit_length() <= 128 else f"<int of {node.bit_length()} bits>"
    if node is None or type(node) in (bool, float):
        return repr(node)
    if type(node) is Global:
        return function_text(node)
    if depth == _MOST_DEPTH:
        return "..."
    return _container_text(node, depth + 1)


def _container_text(node: Node, depth: int) -> str:
    if type(node) is Object:
        args = node.args if type(node.args) is tuple else (node.args,)
        function = function_text(node.function) if type(node.function) is Global else _text(node.function, depth)
        return f"{function}({_items(args, depth)})"
    if type(node) is tuple:
        return f"({_items(node, depth)}{',' if len(node) == 1 else ''})"
    if type(node) is List:
        return f"[{_items(node.items, depth)}]"
    if type(node) is Dict:
        pairs = [f"{_text(key, depth)}: {_text(value, depth)}" for key, value in node.items[:_MOST_ITEMS]]
        return "{" + ", ".join(pairs) + (", ..." if len(node.items) > _MOST_ITEMS else "") + "}"
    return "<tensor>" if type(node) is Entry else f"<{type(node).__name__.lower()}>"


def _items(items: tuple[Node, ...] | list[Node], depth: int) -> str:
    return ", ".join(_text(item, depth) for item in items[:_MOST_ITEMS]) + (", ..." if len(items) > _MOST_ITEMS else "")


def _quoted(text: str) -> str:
    """Text as a Python literal, without a character that a terminal would obey."""
    shown = printable(repr(text[:_MOST_TEXT]))
    return shown + (f"... ({len(text)} characters)" if len(text) > _MOST_TEXT else "")


def _cut(text: str, most: int) -> str:
    return text if len(text) <= most else f"{text[:most]}..."
