"""What a call in a pickle may do: makes data, makes an instance of some class, or is to be treated as dangerous."""

from __future__ import annotations

from typing import Literal, TypeAlias

from ckpt_tools.pickling import callables
from ckpt_tools.text import printable
from ckpt_tools.tree.nodes import (
    ByteString,
    Dict,
    Entry,
    Global,
    List,
    Node,
    Object,
)

# From harmless to harmful; "unknown" is to be treated as "harmful". docs/scan.md has the table.
Rating: TypeAlias = Literal["data", "class", "unknown", "harmful"]
RATINGS: tuple[Rating, ...] = ("data", "class", "unknown", "harmful")
_DANGEROUS = RATINGS[2:]
_MOST_PARTS = 64  # of the arguments of one call that are looked through
_MOST_DEPTH = 4
_BASES = frozenset(
    Global("builtins", name)
    for name in ("object", "dict", "list", "tuple", "set", "frozenset", "int", "float", "str", "bytes", "bytearray", "complex")
) | {Global("collections", name) for name in ("OrderedDict", "defaultdict", "Counter", "deque")}  # fmt: skip
# What the pickle machine of Python calls on an instance, if its `__dict__` has it: BUILD, APPENDS, ADDITEMS.
_CALLED_ATTRIBUTES = frozenset(("__setstate__", "__class__", "append", "extend", "add"))


def is_dangerous(rating: Rating) -> bool:
    """Whether what is rated so is to be treated as dangerous."""
    return rating in _DANGEROUS


def worst(*ratings: Rating) -> Rating:
    """The worst of several."""
    return max(ratings, key=RATINGS.index, default="data")


def of_call(function: Node, args: Node) -> Rating:
    """`function(*args)`: REDUCE, INST, OBJ."""
    if type(function) is not Global:
        return "harmful" if type(function) is Object and of_reference(function) == "harmful" else "unknown"
    name = callables.of_python3(function)
    given = args if type(args) is tuple else (args,)
    special = _of_special(name, given)
    if special is not None:
        return special
    if callables.is_data(name):
        return _of_references(given[:1]) if name in callables.HOLDS_CALLABLES else "data"
    return "harmful" if callables.is_harmful(name) else "unknown"


def _of_special(name: Global, given: tuple[Node, ...]) -> Rating | None:
    """Of functions that make data of some arguments only; None for any other."""
    if name == callables.RECONSTRUCTOR:
        return _of_reconstructor(given)
    if name in callables.FROM_TYPE:
        return _of_rebuild(given)
    if name in callables.OF_CLASS:
        return worst(of_instance(given[0], ()) if given else "unknown", _of_references(given[1:]))
    if name in callables.CALLING:
        return _of_called_arguments(given)
    return _of_harmless_use(name, given)


def _of_harmless_use(name: Global, given: tuple[Node, ...]) -> Rating | None:
    """Of functions that can do harm, those uses of them that pickles of data have."""
    if name == callables.ENCODE:
        return "data" if len(given) == 1 or _is_text_codec(given[1]) else "unknown"
    if name == callables.GETATTR and _is_member(given):
        return "class"
    harmless = (name in callables.OF_ONE and len(given) == 1) or (name in callables.GETITEM and _is_typing(given))
    return "data" if harmless else None


def _is_text_codec(codec: Node) -> bool:
    return type(codec) is str and codec in callables.TEXT_CODECS


def _of_reconstructor(given: tuple[Node, ...]) -> Rating:
    """`copyreg._reconstructor(class, base, state)` calls the base's `__new__` and `__init__` with the state."""
    if len(given) != 3:
        return "unknown"
    cls, base, state = given
    instance = of_instance(cls, ())
    return (
        instance
        if type(base) is Global and callables.of_python3(base) in _BASES
        else worst(instance, of_call(base, (state,)), "unknown")
    )


def _of_rebuild(given: tuple[Node, ...]) -> Rating:
    """torch's `_rebuild_from_type_v2(function, class, arguments, state)`: the function is called, a state is set."""
    if len(given) != 4:
        return "unknown"
    function, cls, args, state = given
    if type(function) is not Global or function in callables.FROM_TYPE:
        return "unknown"
    return worst(of_call(function, args), of_instance(cls, ()), of_state(None, state))


def _is_member(given: Node) -> bool:
    """Whether getattr has a class of the user's and a plain name: how Python 3.11 pickles members of enumerations."""
    if (
        type(given) is not tuple
        or len(given) != 2
        or type(given[0]) is not Global
        or type(given[1]) is not str
        or given[1].startswith("_")
    ):
        return False
    name = callables.of_python3(given[0])
    return not callables.is_standard(name) and not callables.is_harmful(name) and given[1].isidentifier()


def _is_typing(given: tuple[Node, ...]) -> bool:
    """Whether an item of a type is asked for: `typing.List[int]`."""
    return len(given) == 2 and type(given[0]) is Global and given[0].module == "typing"


def _of_called_arguments(given: tuple[Node, ...]) -> Rating:
    """Of a function that calls what it is given: every global in the arguments is rated as a call or a class."""
    found: Rating = "data"
    for node in _parts(given):
        if type(node) is Global:
            found = worst(found, of_instance(node, ()) if node.name[:1].isupper() else of_call(node, ()))
        elif type(node) is Object and type(node.function) is Global and node.function in callables.MAKES_CALLABLES:
            found = worst(found, "unknown", of_reference(node))
    return found


def of_instance(cls: Node, args: Node) -> Rating:
    """`cls.__new__(cls, *args)`: NEWOBJ, which makes an instance without its `__init__`."""
    if type(cls) is Object and type(cls.function) is Global and cls.function == callables.GETATTR and _is_member(cls.args):
        return worst("class", _of_references(args))  # a class inside a class
    if type(cls) is not Global:
        return "unknown"
    name = callables.of_python3(cls)
    if callables.is_data(name):
        return "data"
    if callables.is_harmful(name):
        return "harmful"
    return "unknown" if callables.is_standard(name) else worst("class", _of_references(args))


def of_state(target: Node, state: Node) -> Rating:
    """BUILD: sets a state. On a class or function it changes the program; some attributes are called by the next opcodes."""
    if type(target) is Global:
        return "harmful" if callables.is_harmful(callables.of_python3(target)) else "unknown"
    for part in state if type(state) is tuple else (state,):
        if type(part) is Dict:
            for key, value in part.items:
                if type(key) is str and key in _CALLED_ATTRIBUTES and type(value) in (Global, Object):
                    return worst("unknown", of_reference(value))
    return "data"


def of_reference(node: Node) -> Rating:
    """A global that is named and not called, or what a call makes of one."""
    if type(node) is Object:
        return worst(*(of_reference(part) for part in _parts((node,)) if type(part) is Global))
    if type(node) is not Global:
        return "data"
    name = callables.of_python3(node)
    if callables.is_data(name):
        return "data"
    return "harmful" if callables.is_harmful_to_name(name) else "class"


def _of_references(args: Node) -> Rating:
    return worst(*(of_reference(part) for part in _parts(args) if type(part) is Global))


def _parts(root: Node) -> list[Node]:
    """The globals and objects in arguments, in their first parts."""
    found, level = [], [root]
    for _ in range(_MOST_DEPTH):
        below: list[Node] = []
        for node in level:
            if type(node) in (Global, Object):
                found.append(node)
            below += _below(node)
            if len(below) > _MOST_PARTS:
                break
        level = below[:_MOST_PARTS]
    return found


def _below(node: Node) -> list[Node]:
    if type(node) is tuple:
        return list(node[:_MOST_PARTS])
    if type(node) is List:
        return node.items[:_MOST_PARTS]
    if type(node) is Dict:
        return [part for pair in node.items[: _MOST_PARTS // 2] for part in pair]
    if type(node) is Object:
        return [node.function, *(node.args[:_MOST_PARTS] if type(node.args) is tuple else (node.args,))]
    return []


# --- as text


_MOST_TEXT, _MOST_ITEMS = 200, 8


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
