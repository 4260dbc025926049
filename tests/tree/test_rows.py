"""Rows of small containers are looked at together: what is found, exchanged and written is what each by itself gives."""

from __future__ import annotations

import pickle
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from typing import TypeAlias
from unittest import mock

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ckpt_tools.io.content import Literal
from ckpt_tools.pickling import checks, survey, writer
from ckpt_tools.pickling.opcodes.encoding import integer, integers
from ckpt_tools.pickling.reader import Machine
from ckpt_tools.tree import exchange, visit
from ckpt_tools.tree.dtypes import DTYPES
from ckpt_tools.tree.nodes import (
    PLAIN,
    Build,
    Dict,
    Entry,
    Global,
    List,
    Node,
    Object,
    Storage,
    Where,
)

FLOAT = DTYPES["float32"]
LONG_TEXT = "x" * 65
BUILDERS: list[Callable[[], Node]] = [
    lambda: 1,
    lambda: "text",
    lambda: "x" * 65,
    lambda: b"bytes",
    lambda: 2**600,
    lambda: LONG_TEXT,
    List,
    Dict,
    tuple,
    lambda: (1, None, True),
    lambda: (1.5, -1, 300, 2**40),
    lambda: ("text", LONG_TEXT),
    lambda: ("text", "of its own"),
    lambda: (b"bytes",),
    lambda: (2**600,),
    lambda: List([1, 2, "text"]),
    lambda: List([b"bytes"]),
    lambda: List([(), List([Dict()])]),
    lambda: (((((((1,),),),),),),),
    lambda: tuple(range(300)),
    lambda: tuple(range(20)),
    lambda: List([(index,) for index in range(20)]),
    lambda: (*range(20), b"bytes"),
    lambda: List([*range(20), _entry()]),
    lambda: Dict([(index, index) for index in range(20)]),
    lambda: Dict([("a", 1), (2, None)]),
    lambda: Dict([("a", 1), ("a", 2)]),
    lambda: Dict([("a", 1)], ordered=True),
    lambda: Dict([((1, 2), 1)]),
    lambda: Dict([("a", (1, 2))]),
    lambda: _with_attributes(Dict()),
    lambda: _entry(),
    lambda: List([_entry()]),
    lambda: (1, _entry()),
    lambda: (List([Dict([("w", _entry())])]),),
    lambda: Global("m", "C"),
    lambda: Object("reduce", Global("m", "C"), (1,)),
    lambda: List([Object("reduce", Global("m", "C"), (List([b"bytes"]),))]),
    lambda: Object("reduce", Global("numpy", "scalar"), (_dtype(("<", None, -1)), b"12345678")),
    lambda: Object("reduce", Global("numpy", "scalar"), (_dtype(("<", _entry(), -1)), b"12345678")),
    lambda: _dtype(Dict([("w", _entry())])),
    lambda: Object("reduce", Global("m", "C"), (Global("m", "D"), Object("new", Global("m", "C"), (_entry(),)))),
    lambda: Object("new", Object("reduce", Global("m", "C"), (_entry(),)), ()),
    lambda: Object("new", Global("m", "C"), (), Dict([("w", _entry())])),
    lambda: Object("reduce", Global("torch._utils", "_rebuild_sparse_tensor"), (1,)),
]


def _entry() -> Entry:
    return Entry(Storage("0", FLOAT, 4, "cpu", Literal(bytes(4))), FLOAT, (1,), (1,), 0)


def _dtype(state: Node) -> Object:
    made = Object("reduce", Global("numpy", "dtype"), ("f8", False, True))
    made.steps.append(Build(state))
    return made


def _with_attributes(node: Dict) -> Dict:
    node.attributes = Dict([("a", _entry())])
    return node


Recipe: TypeAlias = tuple[list[int], int, dict[int, int], list[int]]


@st.composite
def recipes(draw: st.DrawFn) -> Recipe:
    """Which builders come again and again, how many items there are, what else stands at a few places, and which come twice."""
    numbers = st.integers(0, len(BUILDERS) - 1)
    length = draw(st.sampled_from([3, 9, 20, 255, 256, 257, 600]))
    odd = draw(st.dictionaries(st.integers(0, length - 1), numbers, max_size=3))
    return draw(st.lists(numbers, min_size=1, max_size=3)), length, odd, draw(st.lists(st.integers(0, length - 1), max_size=2))


def built(recipe: Recipe, kind: str) -> Node:
    """A row of a recipe, as a list, a tuple, the values of a dict or what is appended to an object."""
    again, length, odd, twice = recipe
    items = [BUILDERS[odd.get(index, again[index % len(again)])]() for index in range(length)]
    items += [items[index] for index in twice]
    if kind == "tuple":
        return tuple(items)
    if kind == "dict":
        return Dict(list(enumerate(items)))
    if kind == "object":
        made = Object("reduce", Global("collections", "deque"), ())
        made.append(items)
        return made
    return List(items)


def one_by_one() -> ExitStack:
    """In here every item is looked at by itself."""
    stack = ExitStack()
    stack.enter_context(mock.patch.object(visit, "_are_barren", return_value=False))
    for module in (survey, writer):
        stack.enter_context(mock.patch.object(module, "leaves", return_value=[]))
    return stack


def both(work: Callable[[], object]) -> None:
    """Assert that something gives the same both ways."""
    together = work()
    with one_by_one():
        assert work() == together


rows = given(recipes(), st.sampled_from(["list", "tuple", "dict", "object"]))


@rows
def test_a_walk_finds_the_same(recipe: Recipe, kind: str) -> None:
    """Tensors, objects and bytes have the paths that looking at each container gives them."""
    root = built(recipe, kind)

    def found(values: frozenset[type]) -> list[tuple[Where, int]]:
        wanted = values | {Entry, Object, Global}
        return [(where, id(node)) for where, node in visit.walk(root, plain=False, values=values) if type(node) in wanted]

    both(lambda: found(frozenset()))
    both(lambda: found(frozenset((bytes,))))
    assert {where for where, _ in found(frozenset((bytes,)))} == {
        where for where, node in visit.walk(root) if type(node) in (bytes, Entry, Object, Global)
    }


@rows
def test_a_walk_past_bare_objects_finds_the_same_tensors(recipe: Recipe, kind: str) -> None:
    """What it leaves out holds plain values and globals only, and is not torch's own."""
    root = built(recipe, kind)

    def found(*, bare: bool) -> list[tuple[Where, int]]:
        return [(where, id(node)) for where, node in visit.walk(root, plain=False, bare=bare) if _may_be_tensor(node)]

    def reached(*, bare: bool) -> set[int]:
        return {id(node) for node in visit.reachable(root, bare=bare) if _may_be_tensor(node)}

    both(lambda: found(bare=False))
    assert found(bare=False) == found(bare=True)
    assert reached(bare=False) == reached(bare=True)


def _may_be_tensor(node: Node) -> bool:
    return type(node) is Entry or (type(node) is Object and node.name.startswith("torch"))


def test_bare_objects_are_passed_over() -> None:
    """The quick way is taken for what it was made for: numbers of NumPy, and objects without a state."""
    number = Object(
        "reduce", Global("numpy.core.multiarray", "scalar"), (_dtype((3, "<", None, None, None, -1, -1, 0)), bytes(8))
    )
    root = List([number, Object("new", Global("m", "C"), ()), _entry(), List([number])])
    assert [where for where, _ in visit.walk(root, plain=False, bare=False)] == [(), (2,), (3,)]
    assert number not in list(visit.reachable(root, bare=False))


@rows
def test_the_same_can_be_reached(recipe: Recipe, kind: str) -> None:
    """Every tensor, object and dict with items is met, inside of attributes too."""
    root = built(recipe, kind)

    def met() -> set[int]:
        return {id(node) for node in visit.reachable(root) if type(node) not in (List, tuple) and not _is_empty(node)}

    def records() -> set[int]:
        return {id(node) for node in visit.reachable(root, dicts=False) if type(node) not in visit.ROWS}

    both(met)
    both(records)
    assert records() <= met()


def _is_empty(node: Node) -> bool:
    return type(node) is Dict and not node.items and node.attributes is None


@rows
def test_the_same_is_written(recipe: Recipe, kind: str) -> None:
    """The pickle is the same byte for byte; what is shared is known."""
    root = built(recipe, kind)
    both(lambda: (survey.Survey(root).seen, survey.Survey(root).shared, writer.write_pickle(root)))


@pytest.mark.parametrize("index", range(len(BUILDERS)))
def test_a_row_of_one_kind_is_written_the_same(index: int) -> None:
    """Also where one of its items comes again, far from where it was."""
    root = built(([index], 600, {}, [0]), "list")
    both(lambda: (survey.Survey(root).seen, survey.Survey(root).shared, writer.write_pickle(root)))


@rows
def test_the_same_is_exchanged(recipe: Recipe, kind: str) -> None:
    """Records and bytes are exchanged wherever they are."""

    def swap(node: Node) -> Node | exchange.Drop:
        return exchange.DROP if type(node) is Object and node.name == "m.C" else 7 if type(node) in (Entry, bytes) else node

    def edited() -> bytes:
        return writer.write_pickle(exchange.replace(built(recipe, kind), swap, values=frozenset((bytes,))))

    both(edited)


@rows
def test_the_same_is_validated(recipe: Recipe, kind: str) -> None:
    """Keys that are set twice are found and merged."""

    def merged() -> tuple[list[str], bytes]:
        root = built(recipe, kind)
        return checks.validate(root), writer.write_pickle(root)

    both(merged)


@given(st.lists(st.one_of(st.integers(0, 255), st.integers(0, 255), st.integers()), max_size=20))
def test_whole_numbers_are_written_the_same(numbers: list[int]) -> None:
    """Those of one byte are written together."""
    assert integers(numbers) == b"".join(map(integer, numbers))


@given(st.lists(st.sampled_from([None, True, False, (), 0, 255, 256, -1, 2**31 - 1, 1.5, "text"])), st.booleans())
def test_values_are_read_as_they_were_written(values: list[object], flat: bool) -> None:
    """A few constants or numbers of one kind in a row are read together."""
    row = values if flat else [tuple(values)] * 2
    data = pickle.dumps(row, 2)
    read = Machine(data, {}, lambda pid: None).load()
    assert type(read) is List
    assert read.items == row
    assert list(map(type, read.items)) == list(map(type, row))


def test_a_row_needs_no_look_at_each() -> None:
    """The quick way is taken for what it was made for: crowds of small containers."""
    crowds: Iterator[Callable[[], Node]] = iter((List, Dict, lambda: (1,), lambda: List([()]), lambda: List([1, "text"])))
    for build in crowds:
        ((_, barren),) = visit.chunks([build() for _ in range(200)], PLAIN, set())
        assert {List, Dict, tuple} <= barren
