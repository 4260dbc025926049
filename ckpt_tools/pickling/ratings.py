"""What a call in a pickle may do: makes data, makes an instance of some class, or is to be treated as dangerous."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from itertools import chain, islice
from typing import Literal, TypeAlias, TypeGuard

from ckpt_tools.pickling import callables
from ckpt_tools.pickling.weights_only import ALLOWED
from ckpt_tools.text import printable
from ckpt_tools.tree.nodes import (
    PLAIN,
    Append,
    Build,
    ByteString,
    Dict,
    Entry,
    Global,
    List,
    Node,
    Object,
    SetItems,
    Step,
)
from ckpt_tools.tree.visit import parts

# From harmless to harmful; "unknown" is to be treated as "harmful". docs/scan.md has the table.
Rating: TypeAlias = Literal["data", "class", "unknown", "harmful"]
RATINGS: tuple[Rating, ...] = ("data", "class", "unknown", "harmful")
_DANGEROUS = RATINGS[2:]
_MOST_PARTS = 64  # of the arguments of one call that are examined
_MOST_DEPTH = 4
_MOST_HELD = 1024  # parts of what a call is given that are examined for a function
_MOST_STEPS = 16  # states and runs of items that are set one after another; honest objects have three
# What these were given was looked at when they were called: tensors.
_SEEN_WHEN_MADE = frozenset(name for name in ALLOWED if name.module.startswith("torch"))
_HOLDERS = frozenset((tuple, List, Dict, Object))
_BASES = frozenset(
    Global("builtins", name)
    for name in ("object", "dict", "list", "tuple", "set", "frozenset", "int", "float", "str", "bytes", "bytearray", "complex")
) | {Global("collections", name) for name in ("OrderedDict", "defaultdict", "Counter", "deque")}  # fmt: skip
# What the pickle machine of Python calls on an instance, if its `__dict__` has it: BUILD, APPENDS, ADDITEMS.
_MOST_HASHED = 4  # containers and instances in one another that a hash is taken of
_CALLED_ATTRIBUTES = frozenset(("__setstate__", "__class__", "append", "extend", "add"))


def is_dangerous(rating: Rating) -> bool:
    """Whether what is rated so is to be treated as dangerous."""
    return rating in _DANGEROUS


def worst(*ratings: Rating) -> Rating:
    """The worst of several."""
    return max(ratings, key=RATINGS.index, default="data")


def of_call(function: Node, args: Node) -> Rating:
    """`function(*args)`: REDUCE, INST, OBJ."""
    given = args if type(args) is tuple else (args,)
    if type(function) is not Global:
        return _of_made(function, given)
    name = callables.of_python3(function)
    special = _of_special(name, given)
    if special is not None:
        return special
    if callables.is_data(name):
        return worst(_of_references(given[:1]) if name in callables.HOLDS_CALLABLES else "data", _of_given(name, given))
    if name in callables.CONSTRUCTED:
        return worst("class", _of_given(name, given))
    return "harmful" if callables.is_harmful(name) else "unknown"


def _of_made(function: Node, given: tuple[Node, ...]) -> Rating:
    """A call of what a call has made: only a time zone is made so."""
    if _is_zone_maker(function) and given and type(given[0]) is str and callables.ZONE_NAME.fullmatch(given[0]):
        return "data" if all(type(arg) in (bool, int) for arg in given[1:]) else "unknown"
    return "harmful" if type(function) is Object and of_reference(function) == "harmful" else "unknown"


def _is_zone_maker(node: Node) -> bool:
    """Whether this is `getattr(ZoneInfo, "_unpickle")`."""
    if type(node) is not Object or node.call != "reduce" or node.function != callables.GETATTR:
        return False
    return node.args == (callables.ZONE, callables.ZONE_MAKER)


def _of_given(name: Global, given: tuple[Node, ...]) -> Rating:
    """What makes data may look up attributes of what it is given, and call them: `dict(x)` calls `x.keys()`."""
    if name == callables.DEFAULTDICT:
        given = given[1:]
    if _hashes_instances(name, given):
        return "unknown"
    return "unknown" if name not in callables.KEEPS and hands_over(given, name.module.startswith("numpy")) else "data"


def _of_special(name: Global, given: tuple[Node, ...]) -> Rating | None:
    """Of functions that make data of some arguments only; None for any other."""
    if name == callables.RECONSTRUCTOR:
        return _of_reconstructor(given)
    if name in callables.FROM_TYPE:
        return _of_rebuild(given)
    if name in callables.WITH_STATE:
        return worst(_of_given(name, given), *(of_state(None, state) for state in given[3:]))
    if name in callables.OF_CLASS:
        return worst(of_instance(given[0], given[1:]) if given else "unknown", _of_references(given[1:]))
    if name in callables.CALLING:
        return _of_called_arguments(given)
    return _of_harmless_use(name, given)


def _of_harmless_use(name: Global, given: tuple[Node, ...]) -> Rating | None:
    """Of functions that can do harm, those uses of them that pickles of data have."""
    if name == callables.ENCODE:
        return "data" if len(given) == 1 or encodes_text(given) else "unknown"
    if name == callables.GETATTR:
        return "data" if given == (callables.ZONE, callables.ZONE_MAKER) else "class" if _is_member(given) else None
    if name in callables.REDUCE:
        return _of_union(given)
    if name == callables.TYPE:
        return "data" if len(given) == 1 and (given[0] is None or given[0] in callables.CONSTANTS) else None
    if name == callables.PARTIAL and len(given) > 1:  # pickle writes its arguments as a state
        return worst("unknown", _of_references(given[:1]))
    if name == callables.ITEMGETTER:
        return "data" if given and all(type(arg) in PLAIN for arg in given) else None
    if name == callables.SIGNATURE:  # it asks its parameters for their names
        parameters = given[0] if given else ()
        return "data" if type(parameters) is tuple and all(map(_is_data_or_value, parameters)) else "unknown"
    if name == callables.ITER and len(given) == 1:
        return "data" if _is_data_or_value(given[0]) and (type(given[0]) is tuple or not hands_over(given)) else "unknown"
    if name in callables.GETITEM and _is_typing(given):  # it asks for attributes of what it is given, and hashes it
        return "unknown" if calls_when_hashed(given[1]) or _holds_function(given[1], _has_steps) else "data"
    return None


def _is_data_or_value(node: Node) -> bool:
    """Whether this is anything but an instance of a class outside the list."""
    return type(node) is not Object or _is_of_data(node)


def _of_union(given: tuple[Node, ...]) -> Rating | None:
    """`functools.reduce(or_, types)`, as `int | None` is pickled; None for anything else."""
    types = given[1] if len(given) == 2 else ()
    if type(given[0] if given else None) is not Global or given[0] not in callables.OR or type(types) is not tuple:
        return None
    return worst(*map(of_reference, types)) if types and all(map(_is_type, types)) else None


def _is_type(node: Node) -> bool:
    """Whether this is a class, as far as its name tells, or that of None."""
    if type(node) is Object:
        return node.function == callables.TYPE and node.args == (None,)
    if type(node) is not Global or callables.is_harmful(node):
        return False
    last = node.name.rpartition(".")[2].lstrip("_")
    return node.module == "builtins" or (last[:1].isupper() and not last.isupper())  # all capitals: a constant


def encodes_text(given: tuple[Node, ...]) -> bool:
    """Whether `_codecs.encode` is given a codec of text: another may be the user's."""
    return len(given) > 1 and type(given[1]) is str and given[1] in callables.TEXT_CODECS


def _of_reconstructor(given: tuple[Node, ...]) -> Rating:
    """`copyreg._reconstructor(class, base, state)` calls the base's `__new__` and `__init__` with the state."""
    if len(given) != 3:
        return "unknown"
    cls, base, state = given
    is_called = hands_over((state,)) or (type(base) is Global and _hashes_instances(callables.of_python3(base), (state,)))
    instance = worst(of_instance(cls, ()), "unknown" if is_called else "data")
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
    if type(function) is not Global or function in callables.FROM_TYPE or not function.module.startswith("torch"):
        return "unknown"
    if hands_over((state,)):
        return "unknown"
    return worst(of_call(function, args), of_instance(cls, ()), of_state(None, state))


def _is_member(given: Node) -> bool:
    """Whether getattr asks for a plain name of a class of the user's, or of an instance of one."""
    if type(given) is not tuple or len(given) != 2 or type(given[1]) is not str:
        return False
    owner, name = given[0], given[1]
    if name.startswith("__") or not name.isidentifier():
        return False
    if type(owner) is Object:
        return _is_instance(owner)
    if type(owner) is not Global:
        return False
    cls = callables.of_python3(owner)  # no module: `getattr(torch.os, "system")`
    return _is_class(cls) and not callables.is_standard(cls) and not callables.is_harmful(cls)


def _is_instance(node: Object) -> bool:
    """Whether an object is an instance of a class of the user's, made without a call."""
    if node.call == "new":
        return of_instance(node.function, ()) == "class"
    return node.function == callables.RECONSTRUCTOR and type(node.args) is tuple and _of_reconstructor(node.args) == "class"


def _is_typing(given: tuple[Node, ...]) -> bool:
    """Whether an item of a type is asked for: `typing.List[int]`."""
    return (
        len(given) == 2
        and type(given[0]) is Global
        and given[0].module == "typing"
        and given[0].name.isidentifier()  # with a dot it is another module's: `typing`, `sys.modules`
        and given[0].name[0].isupper()
    )


def _of_called_arguments(given: tuple[Node, ...]) -> Rating:
    """Of a function that calls what it is given: every global in the arguments is rated as a call."""
    found: Rating = "data"
    for node in _parts(given):
        if type(node) is Global:
            found = worst(found, of_call(node, ()))
        elif type(node) is Object and type(node.function) is Global and node.function in callables.MAKES_CALLABLES:
            found = worst(found, "unknown", of_reference(node))
    return found


def of_instance(cls: Node, args: tuple[Node, ...]) -> Rating:
    """`cls.__new__(cls, *args)`: NEWOBJ, which makes an instance without its `__init__`."""
    if type(cls) is Object and type(cls.function) is Global and cls.function == callables.GETATTR and _is_member(cls.args):
        return worst("class", _of_references(args))  # a class inside a class
    if type(cls) is not Global:
        return "unknown"
    name = callables.of_python3(cls)
    if callables.is_data(name):
        made = _of_harmless_use(name, args) if name == callables.PARTIAL else None
        return made or _of_given(name, (*args, *_keywords(args)))
    if callables.is_harmful(name):
        return "harmful"
    return "unknown" if callables.is_standard(name) else worst("class", _of_references(args))


def _keywords(args: tuple[Node, ...]) -> tuple[Node, ...]:
    """The values of the keyword arguments, which come last, of NEWOBJ_EX and of `copyreg.__newobj_ex__`."""
    return (tuple(value for _, value in args[-1].items[: _MOST_HELD + 1]),) if args and type(args[-1]) is Dict else ()


def of_state(target: Node, state: Node) -> Rating:
    """BUILD: sets a state. On a class or function it changes the program; some attributes are called by the next opcodes."""
    if type(target) is Global:
        return "harmful" if callables.is_harmful(callables.of_python3(target)) else "unknown"
    if is_shared(target) or is_armed(target) or _is_callable_state(state) or is_set(target):
        return "unknown"
    if type(target) is Object and (_takes_over(target, state) or _gives_text(target, state)):
        return "unknown"
    parts_of_it = state if type(state) is tuple else (state,)
    rating: Rating = "unknown" if _may_hide_source(target, parts_of_it) else "data"
    for key, value in (pair for part in parts_of_it if type(part) is Dict for pair in part.items):
        if _arms(key, value):
            return worst("unknown", of_reference(value))
        if key == callables.PARSER and not (type(value) is str and callables.PARSER_TEXT.fullmatch(value)):
            return "harmful"
    return rating


def _arms(key: Node, value: Node) -> bool:
    """Whether a value is a function under a name that the next opcode, or a method of its class, calls."""
    name = key.data.decode("latin-1") if type(key) is ByteString else key
    if type(name) is not str:
        return type(key) is Object and _is_called(value)  # a computed name
    return type(value) in (Global, Object) and (
        name in _CALLED_ATTRIBUTES or (name in callables.CALLED_METHODS and _is_called(value))
    )


def _is_callable_state(state: Node) -> bool:
    """Whether a state is an instance that has one or holds a function: who updates a `__dict__` from it looks up its `keys`."""
    given = state if type(state) is tuple and len(state) == 2 else (state,)
    return any(type(part) is Object and hands_over((part,)) for part in given)


def _gives_text(target: Object, state: Node) -> bool:
    """Whether a partial gets a text as a positional argument, and a function that may run it."""
    if made_of(target) != callables.PARTIAL:
        return False
    return type(state) is not tuple or len(state) < 2 or (_may_run(state[0]) and _holds_text(state[1]))


def _may_run(function: Node) -> bool:
    """Whether a function may do anything with a text: not known, and no class, instance or method of one."""
    if type(function) is Object and function.function == callables.GETATTR and type(function.args) is tuple:
        owner, last = (*function.args, None, None)[:2]
        function = owner
        if type(owner) is Global and type(last) is str:
            function = Global(owner.module, f"{owner.name}.{last}")
    if type(function) is Object:
        return function.call != "new" and _is_function(function)
    if type(function) is not Global or _is_class(function):
        return False
    name = callables.of_python3(function)
    return not callables.is_data(name) and not callables.computes(name)


def _holds_text(root: Node) -> bool:
    """Whether text or bytes are in arguments, or in what calls of data make of such."""
    stack, looked = [root], 0
    while stack:
        node = stack.pop()
        if type(node) in (str, bytes, ByteString):
            return True
        below = _made_of_text(node) if type(node) is Object else list(islice(parts(node), _MOST_HELD + 1))
        looked += len(below)
        if looked > _MOST_HELD:
            return True
        stack += below
    return False


def _made_of_text(node: Object) -> list[Node]:
    """The arguments of which data was made, but of tensors, numbers and instances."""
    name, args = node.function, node.args if type(node.args) is tuple else (node.args,)
    if type(name) is not Global or not callables.is_data(callables.of_python3(name)):
        return []
    if name in callables.SCALAR:
        dtype = args[0] if args else None
        given = dtype.args if type(dtype) is Object and type(dtype.args) is tuple else ()
        return [] if given and type(given[0]) is str and given[0][:1] in "?biufc" else list(args[1:])
    if name.module.startswith(("torch", "numpy")) and name not in callables.NUMPY_TEXT:
        return []
    return list(args)


def _may_hide_source(target: Node, state: tuple[Node, ...]) -> bool:
    """Whether what runs a text in its state is given one under a computed name, or as a computed dict."""
    made = made_of(target) if type(target) is Object else None
    if type(made) is not Global or not made.module.startswith(callables.PARSED):
        return False
    return any(
        part is not None and (type(part) is not Dict or any(type(key) is not str for key, _ in part.items)) for part in state
    )


def made_of(target: Object) -> Node:
    """What makes an object: of functions that make an instance of a class that they are given, the class."""
    function, args = target.function, target.args
    if type(function) is not Global or (function != callables.RECONSTRUCTOR and function not in callables.OF_CLASS):
        return function
    return args[0] if type(args) is tuple and args else function


def _takes_over(target: Object, state: Node) -> bool:
    """Whether a class of data is given a state that it may look up functions in; a dict it only keeps."""
    made = _maker(target)
    if type(made) is not Global or type(state) is Dict or not callables.is_data(made):
        return False
    if made in callables.KEEPS or made in callables.CALLING:
        return False
    if type(state) is not tuple:
        return hands_over((state,), made.module.startswith("numpy"))
    as_arrays = state if any(map(_may_have_fields, state[2:3])) else state[-1:] if made in callables.MASKED else ()
    return hands_over(state) or hands_over(as_arrays, in_lists=True, counts_states=False)


def _may_have_fields(dtype: Node) -> bool:
    """Whether what stands for a dtype may be one of records: a field of several elements is set from arrays."""
    if type(dtype) is not Object:
        return False
    given = [dtype.args, *(step.state if type(step) is Build else None for step in dtype.steps[:_MOST_STEPS])]
    parts = [part for whole in given for part in (whole[:_MOST_PARTS] if type(whole) is tuple else (whole,))]
    return any(type(part) not in PLAIN or (type(part) is str and "," in part) for part in parts)


def _maker(target: Object) -> Node:
    """What makes an object, and may take over its state and items; of copyreg's functions the class."""
    function = target.function
    return made_of(target) if type(function) is Global and function.module == "copyreg" else function


def of_items(target: Object, items: list[Node]) -> Rating:
    """Items for what a call of a known function made: an array or a tensor looks up functions in them."""
    made = _maker(target)
    if type(made) is not Global or not callables.is_data(name := callables.of_python3(made)) or name in callables.KEEPS_ITEMS:
        return "data"
    return "unknown" if hands_over(tuple(items), name.module.startswith("numpy")) else "data"


def is_shared(target: Node) -> bool:
    """Whether what a call has given belongs to the program: a member of a class, a logger, a module out of `sys.modules`."""
    if type(target) is not Object or target.call == "none":
        return False
    function = made_of(target)
    return callables.of_python3(function) in callables.SHARED if type(function) is Global else _is_zone_maker(function)


def is_armed(target: Node, is_item: bool = False) -> bool:
    """Whether a state was set that holds a function. Items come before states: what comes next may call it."""
    if type(target) is Object:
        states = _states_given(target) + tuple(step.state for step in target.steps[:_MOST_STEPS] if type(step) is Build)
        is_full = len(target.steps) > _MOST_STEPS
        return is_full or (bool(states) and _holds_function(states)) or (not is_item and _has_called_items(target))
    return type(target) is Dict and target.attributes is not None and _holds_function(target.attributes)


def is_set(target: Node) -> bool:
    """Whether an instance of a class outside the list has a state: to look up an attribute of it may run its `__getattr__`."""
    return _has_steps(target) and any(type(step) is Build for step in target.steps[:_MOST_STEPS])


def _has_steps(node: Node) -> TypeGuard[Object]:
    """Whether an instance of a class outside the list has a state or items, which its `__getattr__` may look at."""
    if type(node) is not Object or not node.steps:
        return False
    return (node.call == "new" or made_of(node) is not node.function) and not _is_of_data(node)


def _is_of_data(target: Object) -> bool:
    """Whether an object is made by what is in the list of data."""
    made = made_of(target)
    return type(made) is Global and callables.is_data(callables.of_python3(made))


def _has_called_items(target: Object) -> bool:
    """Whether a function, and no class, is among the items of an instance of a class that may look up attributes there."""
    if _is_of_data(target):
        return False
    items = [pair for step in target.steps[:_MOST_STEPS] if type(step) is SetItems for pair in step.pairs]
    return any(_is_called(value) for _, value in items)


def arms_items(target: Object, items: list[Node]) -> bool:
    """Whether items of an instance are functions under names that the next opcode calls, as its class may look them up."""
    return not _is_of_data(target) and any(map(_arms, items[::2], items[1::2]))


def _states_given(target: Object) -> tuple[Node, ...]:
    """The states among the arguments of what makes an object: hooks and attributes of a tensor."""
    function, args = target.function, target.args
    is_stateful = type(function) is Global and function in callables.STATEFUL
    return args[2:] if is_stateful and type(args) is tuple else ()


def _states_of(node: Node) -> tuple[Node, ...]:
    return _states_given(node) if type(node) is Object else ()


def hands_over(given: Node, in_lists: bool = False, counts_states: bool = True) -> bool:
    """Whether arguments are functions, instances that hold one, or such that have a state."""
    stack = list(given) if type(given) is tuple else [given]
    looked = 0
    while stack:
        node = stack.pop()
        looked += 1
        if type(node) is tuple or (in_lists and type(node) is List):
            below = _held(node)
            looked += len(below)
            if looked > _MOST_HELD:
                return True
            stack += below
        elif type(node) in (Global, Object):
            if (counts_states and _has_steps(node)) or _holds_function(node) or _holds_function(_states_of(node), _is_stray):
                return True
        elif is_armed(node):
            return True
    return False


def _is_function(node: Node) -> bool:
    if type(node) is Object:
        return type(node.function) is Global and callables.of_python3(node.function) in callables.MAKES_CALLABLES
    return type(node) is Global and not callables.is_data(callables.of_python3(node))


def _is_stray(node: Node) -> bool:
    """Whether this is a function and no class: tensors of a library's own have instances and members of enumerations."""
    if type(node) is Object:
        return node.function != callables.GETATTR and _is_function(node)
    return type(node) is Global and _is_function(node) and not _is_class(node)


def _is_called(node: Node) -> bool:
    """Whether this is a function, one with arguments or a method; no class, and no member of an enumeration."""
    if type(node) is Object and node.function == callables.GETATTR:
        owner, name = (*node.args, None, None)[:2] if type(node.args) is tuple else (None, None)
        return type(owner) is not Global or type(name) is not str or name[:1].islower()
    return _is_stray(node)


def _hashes_instances(name: Global, given: tuple[Node, ...]) -> bool:
    """Whether what makes a set or a dict is given an element or a key whose hash may call a function."""
    if name not in callables.HASHES and name not in callables.HASHES_KEYS:
        return False
    for arg in given[:_MOST_PARTS]:
        if type(arg) is Object and _holds_function(arg, _is_called):
            return True
        elements = _elements(arg)
        if any(map(calls_when_hashed, map(_first, elements) if name in callables.HASHES_KEYS else elements)):
            return True
    return False


def _elements(node: Node) -> Sequence[Node]:
    return node if type(node) is tuple else node.items if type(node) is List else ()


def _first(pair: Node) -> Node:
    """The first of a pair; a computed one as it is."""
    return next(iter(_elements(pair)), None) if type(pair) in (List, tuple) else pair


def _freely(count: int) -> None:
    """What has been paid for."""


def calls_when_hashed(key: Node, spend: Callable[[int], None] = _freely) -> bool:
    """Whether a key is an instance that holds a function, or a tuple with one: `__hash__` and `__eq__` may call it."""
    instances, tuples, looked = [], [key], 0
    while tuples:
        node = tuples.pop()
        if type(node) is Object and not _is_function(node) and not _is_union(node):
            instances.append(node)
        below = [part for part in _elements(node) if type(part) not in PLAIN]
        looked += len(below)
        if looked > _MOST_HELD:
            return True
        tuples += below
    return bool(instances) and _may_call_its_own(instances, spend)


def _is_union(node: Object) -> bool:
    """Whether this is `int | None`, whose hash goes by its types."""
    return type(node.function) is Global and node.function in callables.REDUCE


def _may_call_its_own(instances: Sequence[Node], spend: Callable[[int], None]) -> bool:
    """Whether a function is in instances or, a few levels down, in what they hold; or more than is looked at."""
    level = list(instances)
    for _ in range(_MOST_HASHED):
        level = [part for node in level if type(node) in _HOLDERS for part in _held(node) if type(part) not in PLAIN]
        spend(len(level))
        if len(level) > _MOST_HELD or any(map(_is_called, level)):
            return True
    return False


def _is_class(name: Global) -> bool:
    """Whether a name is one of a class, by its first letter."""
    return name.name.rpartition(".")[2].lstrip("_")[:1].isupper()


def _holds_function(root: Node, is_function: Callable[[Node], bool] = _is_function) -> bool:
    """Whether a global that is not data is in a node; so it is said of what has too many parts to look at."""
    stack, seen, looked = [root], set(), 0
    while stack:
        node = stack.pop()
        if is_function(node):
            return True
        if type(node) not in _HOLDERS or id(node) in seen:
            continue
        seen.add(id(node))
        below = _held(node)
        looked += len(below)
        if looked > _MOST_HELD:
            return True
        stack += below
    return False


def _held(node: Node) -> list[Node]:
    """What a node holds; of an object what it was made of and what was set later. Of many parts one more than are looked at."""
    if type(node) is not Object:
        return list(islice(parts(node), _MOST_HELD + 1))
    seen = type(node.function) is Global and node.function in _SEEN_WHEN_MADE  # else it may take for ever to hash
    later = chain.from_iterable(map(_given_later, node.steps))
    args = node.args if made_of(node) is node.function or type(node.args) is not tuple else node.args[1:]  # its class
    return [None if seen else args, node.kwargs, *islice(later, _MOST_HELD)]


def _given_later(step: Step) -> Iterable[Node]:
    if type(step) is Append:
        return step.items
    return chain.from_iterable(step.pairs) if type(step) is SetItems else (step.state,)


def of_reference(node: Node) -> Rating:
    """A global that is named and not called, or what a call makes of one."""
    if type(node) is Object:
        return worst(*(of_reference(part) for part in _parts((node,)) if type(part) is Global))
    if type(node) is not Global:
        return "data"
    name = callables.of_python3(node)
    if callables.is_data(name):
        return "data"
    if callables.is_harmful_to_name(name):
        return "harmful"
    return "unknown" if callables.is_function_of_python(name) else "class"


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
