"""What is public has types, a docstring that names every argument and field, and an entry in the reference."""

import dataclasses
import importlib
import inspect
import pkgutil
import re
import typing
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

import ckpt_tools
import ckpt_tools.torch
from ckpt_tools import errors, limits

REFERENCE = (Path(__file__).parents[2] / "docs" / "reference" / "library.md").read_text()
ENTRIES = set(re.findall(r"^::: (\S+)$", REFERENCE, re.MULTILINE))


def modules() -> Iterator[Any]:
    """All modules of the package but the ones that run when they are imported."""
    for found in pkgutil.walk_packages(ckpt_tools.__path__, "ckpt_tools."):
        if not found.name.endswith("__main__"):
            yield importlib.import_module(found.name)


RECORDS = {
    name: value
    for module in modules()
    for name, value in vars(module).items()
    if dataclasses.is_dataclass(value) and isinstance(value, type)
}


def named() -> Iterator[tuple[str, Any]]:
    """The public names and what they are, errors and the call that raises limits included."""
    for package in (ckpt_tools, ckpt_tools.torch):
        yield from ((f"{package.__name__}.{name}", getattr(package, name)) for name in package.__all__)
    for name, value in vars(errors).items():
        if isinstance(value, type) and issubclass(value, errors.CkptError):
            yield f"errors.{name}", value
    yield "limits.raised", limits.raised


def in_type(hint: Any) -> Iterator[type]:
    """The records that a type is made of, but for options and open checkpoints."""
    if isinstance(hint, type) and dataclasses.is_dataclass(hint) and not hint.__name__.endswith(("Options", "Checkpoint")):
        yield hint
    for part in typing.get_args(hint):
        yield from in_type(part)


def reports() -> list[type]:
    """The public records, and the records that their fields hold."""
    found: dict[type, None] = {}
    left = [record for _, value in named() for record in in_type(value)]
    while left:
        record = left.pop()
        if record not in found and isinstance(record, type):
            found[record] = None
            known = vars(importlib.import_module(record.__module__))  # before what is imported for types only
            hints = typing.get_type_hints(record, localns={name: kind for name, kind in RECORDS.items() if name not in known})
            left += [inner for name, hint in hints.items() if not name.startswith("_") for inner in in_type(hint)]
    return list(found)


def methods(kind: type) -> Iterator[tuple[str, Any]]:
    """What a class of ours promises: its own functions and properties, and those of its bases here."""
    for base in kind.__mro__:
        if base.__module__.startswith("ckpt_tools"):
            for name, value in vars(base).items():
                if not name.startswith("_") and (inspect.isfunction(value) or isinstance(value, property | classmethod)):
                    yield f"{kind.__qualname__}.{name}", value


def calls() -> Iterator[Any]:
    """Every public function, method and property, as a test's parameter."""
    classes = [value for _, value in named() if isinstance(value, type)]
    found = {name: value for name, value in named() if inspect.isfunction(value)}
    for kind in dict.fromkeys([*classes, *reports()]):
        found |= methods(kind)
    for name, value in found.items():
        function = value.fget if isinstance(value, property) else getattr(value, "__func__", value)
        yield pytest.param(function, id=name)


@pytest.mark.parametrize("function", [*calls()])
def test_a_public_call_has_types_and_words(function: Callable[..., object]) -> None:
    """Each argument has a type and is named in the docstring; so has what comes back."""
    signature = inspect.signature(function)
    text = inspect.getdoc(function)
    assert text
    assert signature.return_annotation is not inspect.Signature.empty
    for argument in signature.parameters.values():
        if argument.name != "self":
            assert argument.annotation is not inspect.Parameter.empty, argument.name
            assert argument.kind is argument.VAR_KEYWORD or re.search(rf"\b{argument.name}\b", text), argument.name


@pytest.mark.parametrize("kind", [value for _, value in named() if isinstance(value, type)], ids=lambda kind: kind.__name__)
def test_a_public_class_has_words(kind: type) -> None:
    assert kind.__dict__.get("__doc__")
    assert not str(kind.__doc__).startswith(f"{kind.__name__}(")


@pytest.mark.parametrize("record", reports(), ids=lambda record: record.__qualname__)
def test_a_report_explains_its_fields(record: type) -> None:
    """Each field of a report, and of the records in it, is named in the class's docstring; the class has its entry."""
    for field in dataclasses.fields(record):
        assert field.name.startswith("_") or re.search(rf"\b{field.name}\b", record.__doc__ or ""), field.name
    assert f"{record.__module__}.{record.__qualname__}" in ENTRIES


def test_every_error_and_the_limits_are_in_the_reference() -> None:
    """Errors by their module, of which all are shown and drawn in its tree; limits by what raises them and their page."""
    assert {"ckpt_tools.errors", "ckpt_tools.limits.raised"} <= ENTRIES
    assert "(../limits.md)" in REFERENCE
    for name, value in named():
        if name.startswith("errors."):
            assert re.search(rf"─ {value.__name__} +\S|^{value.__name__} ", str(errors.__doc__), re.MULTILINE), name
    for limit in limits.LIMITS.values():
        assert limit.counts


def test_every_alias_has_its_type() -> None:
    """What is public and neither a function nor a class is text, or a type that is written out."""
    others = {
        name: value for name, value in named() if not (inspect.isroutine(inspect.unwrap(value)) or isinstance(value, type))
    }
    assert list(others) == [f"{ckpt_tools.__name__}.__version__", "ckpt_tools.torch.MapLocation"]
