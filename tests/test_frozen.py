"""Frozen records are dataclasses in all that matters."""

import copy
import pickle
from dataclasses import asdict, field, replace

import pytest

from ckpt_tools.frozen import frozen, unique


@frozen
class Point:
    """Two numbers, and names."""

    x: int
    y: int = 0
    names: list[str] = field(default_factory=list)


@frozen
class Named(Point):
    """A point with one more field."""

    name: str = ""


@frozen
class One:
    """One field."""

    x: object


@unique
class Thing:
    """Equal to itself alone."""

    x: int


@frozen
class Short:
    """A record that says itself how it is shown."""

    x: int

    def __repr__(self) -> str:
        return "short"


def test_equal_by_their_fields() -> None:
    """Records are equal when all fields are and they are of one class."""
    assert Point(1) == Point(1, 0, [])
    assert Point(1) != Point(2)
    assert Point(1) != Named(1)
    others: list[object] = [Point(1), 1]
    assert One((1, 0, [])) not in others
    assert One(1) not in others


def test_hashed_by_their_fields() -> None:
    """Equal records are one key of a dict; a field that cannot be hashed is an error, as ever."""
    assert {One(1): "a"}[One(1)] == "a"
    assert len({One(1), One(2), One(1)}) == 2
    with pytest.raises(TypeError, match="unhashable"):
        hash(Point(1))


def test_unique_ones_are_equal_to_themselves_alone() -> None:
    """Two unique records with the same fields are two."""
    thing = Thing(1)
    assert thing == copy.copy([thing])[0]
    assert len({thing, Thing(1)}) == 2


def test_dataclasses_know_them() -> None:
    """`replace` and `asdict` work, a list is nobody else's, and there is no room for other attributes."""
    point = Point(1)
    assert replace(point, y=2) == Point(1, 2)
    assert asdict(Named(1, name="a")) == {"x": 1, "y": 0, "names": [], "name": "a"}
    assert point.names is not Point(1).names
    assert not hasattr(point, "__dict__")


def test_shown_with_their_fields() -> None:
    """The text of a record is the call that makes it, or what its class says."""
    assert repr(Named(1, name="a")) == "Named(x=1, y=0, names=[], name='a')"
    assert repr(Thing(2)) == "Thing(x=2)"
    assert repr(Short(1)) == "short"


def test_they_go_to_other_processes() -> None:
    """Records are pickled and copied."""
    assert pickle.loads(pickle.dumps(Point(1, 2, ["a"]))) == Point(1, 2, ["a"])
    assert copy.deepcopy(Point(1, 2, ["a"])) == Point(1, 2, ["a"])
