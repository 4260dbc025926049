"""Calls that no opcode of a pickle names: attributes that opcodes and data classes look up and call."""

from __future__ import annotations

import datetime
import functools
import http
import ipaddress
import pickle
import re
import zoneinfo
from collections import ChainMap, OrderedDict, defaultdict
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from ckpt_tools.operations.safety import Safety
from ckpt_tools.pickling import callables, calls, ratings
from ckpt_tools.pickling.weights_only import ALLOWED
from ckpt_tools.tree import visit
from ckpt_tools.tree.nodes import Build, Dict, Global, List, Node, Object
from tests.operations.test_safety import examined
from tests.support.containers import Net


def text(value: str) -> bytes:
    """A short text."""
    return b"\x8c" + bytes([len(value)]) + value.encode()


def name(path: str) -> bytes:
    """A global, `module:name`."""
    module, _, called = path.partition(":")
    return text(module) + text(called) + b"\x93"


def call(path: str, *args: bytes) -> bytes:
    """A call of a global."""
    return name(path) + b"(" + b"".join(args) + b"tR"


RUN = name("models:run")
PARTIAL = call("functools:partial", RUN, text("id"))
THING = name("models:Thing") + b")\x81"


def holding(attribute: str, cls: str = "types:SimpleNamespace", value: bytes = PARTIAL) -> bytes:
    """An instance with a function as an attribute."""
    return name(cls) + b")\x81}" + text(attribute) + value + b"sb"


ZONE = call("builtins:getattr", name("zoneinfo:ZoneInfo"), text("_unpickle"))
PAYLOAD = b"\x80\x04" + call("models:run", text("id")) + b"."
# Each of them calls `models.run("id")` with CPython 3.11 and torch 2.13, or changes what the program has.
SETS_RUN, APPENDS = RUN + b"sb", text("id") + b"a"
COMPUTED = call("builtins:str", text("append"))
HIDDEN = {
    "append under a text of Python 2": THING + b"}U\x06append" + SETS_RUN + APPENDS,
    "append in a computed state": THING + call("builtins:dict", b"](" + text("append") + RUN + b"\x86e") + b"b" + APPENDS,
    "append under a computed key": THING + b"}" + COMPUTED + SETS_RUN + APPENDS,
    "append through slots": THING + b"N}" + text("__dict__") + b"}" + text("append") + RUN + b"ss\x86b" + text("id") + b"a",
    "append of an OrderedDict": name("collections:OrderedDict") + b")R}" + COMPUTED + SETS_RUN + APPENDS,
    **{
        f"keys for {path}": call(path, holding("keys"))
        for path in ("builtins:dict", "collections:OrderedDict", "collections:Counter", "collections:UserDict")
    },
    "keys of an OrderedDict": call("builtins:dict", name("collections:OrderedDict") + b")R}" + text("keys") + SETS_RUN),
    "keys for a defaultdict": call("collections:defaultdict", b"N", holding("keys", "argparse:Namespace")),
    "keys for a base": call("copyreg:_reconstructor", name("models:Thing"), name("builtins:dict"), holding("keys")),
    "keys through an alias": call("builtins:dict", call("types:GenericAlias", holding("keys"), b")")),
    "replace for a UUID": call("uuid:UUID", holding("replace")),
    "__array__ for a number": call("numpy:float64", holding("__array__")),
    "__array__ in a list": call("numpy:float64", b"]" + holding("__array__") + b"a"),
    "detach for a Parameter": call("torch._utils:_rebuild_parameter", holding("detach"), b"\x88N"),
    "detach without a call": name("torch.nn.parameter:Parameter") + holding("detach") + b"\x85\x81",
    "items for a state": call("torch._utils:_rebuild_parameter_with_state", b"N\x88N", holding("items")),
    "a class of an instance": call("builtins:type", holding("x")) + b"N}" + text("__init__") + RUN + b"s\x86b",
    "a logger": call("logging:getLogger", text("x")) + b"}" + text("handle") + SETS_RUN,
    "a table of a class": call("builtins:getattr", name("models:Thing"), text("registry")) + text("a") + RUN + b"s",
    "a module of another": call("operator:getitem", name("typing:sys.modules"), text("os")) + b"}" + text("fspath") + SETS_RUN,
    "a function of another module": call("functools:partial", name("torch:serialization.os.system"), text("id")),
    "a function by getattr": call("functools:partial", call("builtins:getattr", name("torch:os"), text("system")), text("id")),
    "text that a class evaluates": name("sympy.functions.elementary.trigonometric:sin") + text("run()") + b"\x85\x81",
    "bytes that a class of torch loads": name("torch.utils.data.datapipes.datapipe:_MapDataPipeSerializationWrapper")
    + b")\x81" + text("x") + b"\x89\x86b",
    "a map of a program's table": call("collections:ChainMap", name("models:registry")) + text("a") + RUN + b"s",
    "a member of an enumeration": call("peft.utils.peft_types:TaskType", text("LORA")) + b"}" + text("lower") + SETS_RUN,
    "a member of a stranger's enumeration": call("models:Mode", text("id")),
    "a time zone's attributes": ZONE + text("Europe/Berlin") + b"K\x01\x86R}" + text("utcoffset") + SETS_RUN,
    "a time zone by a path": ZONE + text("../../models") + b"K\x01\x86R",
    "another method of a time zone": call("builtins:getattr", name("zoneinfo:ZoneInfo"), text("from_file")) + RUN + b"\x85R",
    "a time zone's maker for partial": call("functools:partial", ZONE, text("x")) + b")R",
    "a union of what is no type": call("functools:reduce", name("operator:or_"), name("models:PIPELINE") + RUN + b"\x86"),
    "a union by another operator": call("functools:reduce", name("operator:call"), RUN + name("builtins:int") + b"\x86"),
    "a union of types by a function": call("functools:reduce", RUN, name("builtins:int") + name("builtins:str") + b"\x86"),
    "an instance of a program by a library": call("sklearn.neighbors._kd_tree:newObj", name("subprocess:Popen")),
    "a function in a library's class": call("sklearn.tree._tree:Tree", b"K\x03", holding("__array__"), b"K\x01"),
    "a method by its name": call("operator:methodcaller", text("system"), text("id")),
    "a symbol, whose name sympy evaluates": call("sympy.core.symbol:Symbol", text("x")),
    "an empty instance with an __init__": call("models:Runner"),
    "bytes that a class loads": THING + b"C" + bytes([len(PAYLOAD)]) + PAYLOAD + b"\x89\x86b",
}  # fmt: skip


def verdict(tmp_path: Path, data: bytes) -> Safety:
    """The answer for a pickle of these opcodes."""
    return examined(tmp_path / "a.pkl", b"\x80\x04" + data + b".")


@pytest.mark.parametrize("case", HIDDEN)
def test_hidden_calls_are_dangerous(case: str, tmp_path: Path) -> None:
    """What an opcode or a data class would find by its name and call is a danger, though no opcode calls it."""
    assert verdict(tmp_path, HIDDEN[case]).verdict == "dangerous"


def test_too_much_to_look_at(tmp_path: Path) -> None:
    """A function behind more parts than are looked at is a danger too."""
    many = b"(" + b"".join(text(f"a{number}") + b"]" for number in range(2000)) + b"u"
    data = name("types:SimpleNamespace") + b")\x81}" + many + text("keys") + PARTIAL + b"sb"
    assert verdict(tmp_path, call("builtins:dict", data)).verdict == "dangerous"


def _honest() -> dict[str, Any]:
    """What people pickle that looks like it."""
    hooked = Net()
    hooked.register_forward_hook(hooked.extra_repr)  # type: ignore[arg-type]  # a bound method
    ordered: Any = OrderedDict(a=1)
    ordered.activation = torch.nn.functional.relu
    return {
        "a bound method as a hook": hooked,
        "an attribute of an OrderedDict": ordered,
        "lazy modules": torch.nn.Sequential(torch.nn.LazyLinear(2), torch.nn.LazyBatchNorm1d()),
        "factories": [defaultdict(functools.partial(Net)), functools.partial(torch.nn.functional.relu, inplace=True)],
        "functions in a namespace": SimpleNamespace(activation=torch.nn.functional.relu, cls=Net),
        "modules in a set": {Net()},
        "objects in an array": np.array([torch.nn.functional.relu, Net()], dtype=object),
        "records": np.rec.array([(1, 2.0)], dtype=[("a", "i4"), ("b", "f8")]),
    }


@pytest.mark.parametrize("protocol", [2, 4])
def test_honest_ones_are_not(protocol: int, tmp_path: Path) -> None:
    """Instances with functions as attributes, bound methods and factories are classes and data."""
    for case, value in _honest().items():
        safety = examined(tmp_path / "a.pkl", pickle.dumps(value, protocol))
        assert safety.verdict == "needs-code", (case, safety)


def _of_libraries() -> dict[str, tuple[Any, str]]:
    """What libraries' own objects are pickled as: calls of classes that are known to be data, or to make an instance."""
    from sklearn.ensemble import HistGradientBoostingClassifier, RandomForestClassifier
    from sklearn.linear_model import SGDClassifier
    from sklearn.neighbors import KNeighborsClassifier
    from sklearn.tree import DecisionTreeRegressor

    rows, classes = np.arange(24.0).reshape(12, 2), np.arange(12) % 2
    berlin = zoneinfo.ZoneInfo("Europe/Berlin")
    made = {
        "a time zone": berlin, "a time with one": datetime.datetime(2026, 1, 1, tzinfo=berlin), "a union": int | None,
        "an optional class": Net | None, "a status": http.HTTPStatus.OK, "flags": re.compile("a", re.IGNORECASE).flags,
        "maps": ChainMap({"a": 1}, {"b": 2}), "an address": ipaddress.ip_interface("10.0.0.1/8"),
        "an error": [ValueError("no"), OSError(2, "x")],
        "a generator": torch.Generator(), "a random state": [np.random.RandomState(0), np.random.default_rng(1)],
        "a tree": DecisionTreeRegressor().fit(rows, classes), "a forest": RandomForestClassifier(2).fit(rows, classes),
        "boosted trees": HistGradientBoostingClassifier(max_iter=2).fit(rows, classes),
        "neighbours": KNeighborsClassifier(algorithm="kd_tree").fit(rows, classes),
        "a line": SGDClassifier().fit(rows, classes),
        "neighbours by balls": KNeighborsClassifier(algorithm="ball_tree").fit(rows, classes),
    }  # fmt: skip
    return {case: (value, "plain" if case == "flags" else "needs-code") for case, value in made.items()}


@pytest.mark.parametrize("protocol", [2, 4])
def test_libraries_own_objects_are_not(protocol: int, tmp_path: Path) -> None:
    """Nothing of what they call does harm, whatever it is given."""
    pytest.importorskip("sklearn")
    for case, (value, verdict) in _of_libraries().items():
        safety = examined(tmp_path / "a.pkl", pickle.dumps(value, protocol))
        assert safety.verdict == verdict, (case, safety)


@pytest.mark.parametrize("protocol", [2, 4])
def test_a_long_history_is_examined(protocol: int, tmp_path: Path) -> None:
    """NumPy pickles each number as a call on one dtype: whoever logs a loss at every step saves thousands of them."""
    losses = [np.float64(step) / 7 for step in range(40_000)]
    assert examined(tmp_path / "a.pkl", pickle.dumps({"losses": losses}, protocol)).verdict == "needs-code"


@pytest.mark.parametrize("inside", [RUN, RUN + b"\x85", b"]" + RUN + b"a", b"}" + text("a") + RUN + b"s"])
def test_a_dtype_with_a_function_in_it(inside: bytes, tmp_path: Path) -> None:
    """Only one whose state is plain values is taken for a dtype."""
    dtype = call("numpy:dtype", text("f8")) + b"(K\x03" + text("<") + inside + b"tb"
    number = call("numpy.core.multiarray:scalar", dtype, b"C\x08" + bytes(8))
    assert verdict(tmp_path, number).verdict == "dangerous"


def _instance(cls: Global, args: tuple[Node, ...], states: list[Node]) -> Object:
    made = Object("reduce", cls, args)
    made.steps += [Build(state) for state in states]
    return made


GLOBALS = st.one_of(
    st.sampled_from(sorted(callables.QUIET | callables.OF_CLASS, key=str)),
    st.sampled_from([callables.ENCODE, Global("os", "system"), Global("models", "run"), Global("numpy", "ndarray")]),
)
PARTS: st.SearchStrategy[Node] = st.recursive(
    st.one_of(st.none(), st.integers(0, 3), st.sampled_from(["f8", "latin1", "rot13", "keys"]), st.just(bytes(8)), GLOBALS),
    lambda parts: st.one_of(
        st.lists(parts, max_size=3).map(tuple),
        st.lists(parts, max_size=2).map(List),
        st.lists(st.tuples(st.sampled_from(["keys", "append", "a"]), parts), max_size=2).map(lambda pairs: Dict([*pairs])),
        st.builds(
            _instance,
            GLOBALS.filter(lambda name: name not in ALLOWED),
            st.lists(parts, max_size=3).map(tuple),
            st.lists(parts, max_size=3),
        ),
    ),
    max_leaves=6,
)


@given(GLOBALS, st.lists(PARTS, max_size=4).map(tuple))
def test_what_is_not_looked_at_is_data(function: Global, args: tuple[Node, ...]) -> None:
    """A call that is passed over is rated as data, or a call in its arguments is dangerous, which was rated before."""
    if calls.is_quiet(function, args) and ratings.is_dangerous(ratings.of_call(function, args)):
        made = [node for node in visit.reachable(args) if type(node) is Object]
        rated = [ratings.of_call(node.function, node.args) for node in made]
        rated += [ratings.of_state(node, step.state) for node in made for step in node.steps if type(step) is Build]
        assert any(map(ratings.is_dangerous, rated))


@pytest.mark.parametrize("step", [b"K\x01a", b"h\x00b"])
def test_looking_is_bounded(step: bytes, tmp_path: Path) -> None:
    """One instance that is used again and again is not examined each time."""
    state = b"}(" + b"".join(text(f"a{number}") + b"]" for number in range(400)) + b"u\x94b"
    assert verdict(tmp_path, THING + state + step * 20_000).verdict in ("dangerous", "unexamined")
