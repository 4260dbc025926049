"""The graph in a TorchScript program, followed through its code without running it.

The code is Python's grammar, and made by torch: functions of assignments, calls and branches. Where a branch depends on numbers
both ways are followed; a loop's body is followed a few times. Code that cannot be followed gives no evidence; it is not an
error.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from ckpt_tools import limits
from ckpt_tools.formats import torch_zip
from ckpt_tools.formats.base import Decoded
from ckpt_tools.tree.graphs import Graph, Operation, Value
from ckpt_tools.tree.nodes import Build, Dict, Entry, Global, Object

_MOST_STEPS, _DEEPEST_CALL, _DEEPEST_NESTING, _MOST_TURNS = 1_000_000, 60, 100, 64
_TABLES = ("_parameters", "_buffers", "_modules")
_ITSELF = ("annotate", "unchecked_cast", "unwrap_optional", "int", "float", "bool")


class NotFollowedError(Exception):
    """Code that is written in a way that is not known here."""


@dataclass(frozen=True, slots=True)
class _Module:
    """A module: its record, and where it is in the program."""

    record: Object
    path: str


@dataclass(frozen=True, slots=True)
class _Name:
    """A dotted name that is not a variable: a function of torch's, or of the program's code."""

    text: str


def graph_in(decoded: Decoded) -> Graph | None:
    """What a program computes; None where its code cannot be followed."""
    if type(decoded.root) is not Object:
        return None
    try:
        return _Follower(_definitions(decoded)).follow(decoded.root)
    except (NotFollowedError, SyntaxError, ValueError, TypeError, LookupError, OverflowError, RecursionError, MemoryError):
        return None


def _definitions(decoded: Decoded) -> dict[str, ast.FunctionDef]:
    """The functions in the code by their dotted names, those of classes below their class."""
    found: dict[str, ast.FunctionDef] = {}
    start, budget = f"{decoded.root_folder}/code/", limits.budget(decoded.source.size)
    for record in decoded.records or ():
        if not record.name.startswith(start) or not record.name.endswith(".py"):
            continue
        budget.take(limits.MEMORY, record.size, "The program's code is longer than that of any model.")
        text = torch_zip.read_record(decoded.source, record, check=False).decode("utf-8", "replace")
        _check_nesting(text)
        module = record.name.removeprefix(start).removesuffix(".py").replace("/", ".")
        for statement in ast.parse(text).body:
            if isinstance(statement, ast.FunctionDef):
                found[f"{module}.{statement.name}"] = statement
            elif isinstance(statement, ast.ClassDef):
                methods = (method for method in statement.body if isinstance(method, ast.FunctionDef))
                found.update((f"{module}.{statement.name}.{method.name}", method) for method in methods)
    return found


def _check_nesting(text: str) -> None:
    """Python's parser works on the C stack."""
    depth = 0
    for letter in text:
        depth += (letter in "([{") - (letter in ")]}")
        if depth > _DEEPEST_NESTING:
            raise NotFollowedError


class _Follower:
    """Follows calls from the program's `forward`, and writes down what they do."""

    def __init__(self, functions: dict[str, ast.FunctionDef]) -> None:
        self.functions, self.graph = functions, Graph()
        self.weights: dict[str, Value] = {}
        self.made_by: dict[int, Operation] = {}
        self.attributes: dict[int, dict[str, Any]] = {}
        self.depth = self.steps = 0

    def follow(self, root: Object) -> Graph:
        """The whole program."""
        forward = self._method(_Module(root, ""), "forward")
        self.graph.inputs = [Value() for _ in forward.args.args[1:]]
        made = self._call(forward, [_Module(root, ""), *self.graph.inputs])
        self.graph.outputs = [value for value in _flat(made) if isinstance(value, Value)]
        self.graph.weights = self.weights
        if not self.graph.outputs:
            raise NotFollowedError
        return self.graph

    def _method(self, module: _Module, name: str) -> ast.FunctionDef:
        function = module.record.function
        found = self.functions.get(f"{function}.{name}") if type(function) is Global else None
        if found is None:
            raise NotFollowedError
        return found

    # --- statements

    def _call(self, function: ast.FunctionDef, given: Sequence[Any]) -> Any:
        if self.depth > _DEEPEST_CALL:
            raise NotFollowedError
        names = [argument.arg for argument in function.args.args]
        defaults = [self._constant(default) for default in function.args.defaults]
        values = [*given, *defaults[len(defaults) - (len(names) - len(given)) :]] if len(given) < len(names) else given
        self.depth += 1
        made = self._body(function.body, dict(zip(names, values, strict=False)))
        self.depth -= 1
        return made

    @staticmethod
    def _constant(node: ast.expr) -> Any:
        return node.value if isinstance(node, ast.Constant) else None

    def _body(self, body: Sequence[ast.stmt], scope: dict[str, Any]) -> Any:
        for statement in body:
            self._take(1)
            match statement:
                case ast.Return():
                    return None if statement.value is None else self._value(statement.value, scope)
                case ast.Assign(targets=[target]):
                    self._assign(target, self._value(statement.value, scope), scope)
                case ast.AnnAssign(value=ast.expr() as value):
                    self._assign(statement.target, self._value(value, scope), scope)
                case ast.Expr():
                    self._value(statement.value, scope)
                case ast.If():
                    self._branch(statement, scope)
                case ast.For() | ast.While():
                    self._turn(statement, scope)
                case ast.Pass() | ast.Assert():
                    pass
                case _:
                    raise NotFollowedError
        return None

    def _take(self, steps: int) -> None:
        """Do so much more work; no model's code takes more than a few thousand steps."""
        self.steps += steps
        if self.steps > _MOST_STEPS:
            raise NotFollowedError

    def _assign(self, target: ast.expr, value: Any, scope: dict[str, Any]) -> None:
        if isinstance(target, ast.Name):
            scope[target.id] = value
        elif isinstance(target, ast.Tuple):
            for each, part in zip(target.elts, self._parts(value, len(target.elts)), strict=True):
                self._assign(each, part, scope)
        else:
            raise NotFollowedError

    def _parts(self, value: Any, count: int) -> Sequence[Any]:
        """What is unpacked: a list, or what one operation made."""
        if isinstance(value, list):
            if len(value) != count:
                raise NotFollowedError
            return value
        operation = self.made_by.get(id(value))
        if operation is None:
            return [None] * count
        made = [Value() for _ in range(count)]
        self.graph.operations.append(Operation(operation.name, operation.given, tuple(made)))
        return made

    def _branch(self, statement: ast.If, scope: dict[str, Any]) -> None:
        """The branch that a constant chooses; else both, and what either made."""
        chosen = self._value(statement.test, scope)
        if isinstance(chosen, bool):
            self._body(statement.body if chosen else statement.orelse, scope)
            return
        scopes = []
        for body in (statement.body, statement.orelse):
            if not any(isinstance(inner, ast.Raise) for inner in body):
                self._take(len(scope))
                scopes.append(dict(scope))
                self._body(body, scopes[-1])
        for name in dict.fromkeys(name for one in scopes for name in one):
            scope[name] = self._either([one.get(name) for one in scopes])

    def _either(self, values: Sequence[Any]) -> Any:
        first = values[0]
        if all(value is first for value in values):
            return first
        tensors = tuple(value for value in values if isinstance(value, Value))
        return self._new("where", tensors) if tensors else None

    def _turn(self, statement: ast.For | ast.While, scope: dict[str, Any]) -> None:
        turns: Any = range(1)
        if isinstance(statement, ast.For):
            found = self._value(statement.iter, scope)
            turns = found if isinstance(found, range | list) and len(found) <= _MOST_TURNS else [None]
        for turn in turns:
            if isinstance(statement, ast.For):
                self._assign(statement.target, turn, scope)
            self._body(statement.body, scope)

    # --- expressions

    def _value(self, node: ast.expr, scope: dict[str, Any]) -> Any:
        match node:
            case ast.Constant():
                return node.value
            case ast.Name():
                return scope[node.id] if node.id in scope else _Name(node.id)
            case ast.List() | ast.Tuple():
                return self._list([self._value(each, scope) for each in node.elts])
            case ast.Attribute():
                return self._attribute(self._value(node.value, scope), node.attr)
            case ast.Call():
                return self._called(node, scope)
            case ast.Subscript():
                return self._item(self._value(node.value, scope), self._value(node.slice, scope))
            case ast.UnaryOp(op=ast.USub()):
                inner = self._value(node.operand, scope)
                return -inner if type(inner) in (int, float) else None
            case ast.UnaryOp(op=ast.Not()):
                inner = self._value(node.operand, scope)
                return not inner if isinstance(inner, bool) else None
        return None

    def _list(self, values: list[Any]) -> list[Any]:
        """A list, of lists of single values at most: what holds itself twice grows without end."""
        for value in values:
            self._take(1 + (len(value) if isinstance(value, list) else 0))
            if isinstance(value, list) and any(isinstance(inner, list) for inner in value):
                raise NotFollowedError
        return values

    def _attribute(self, value: Any, name: str) -> Any:
        if isinstance(value, _Name):
            return _Name(f"{value.text}.{name}")
        if not isinstance(value, _Module):
            return None
        if name == "training":
            return False
        known = self.attributes.get(id(value.record))
        if known is None:
            known = self.attributes[id(value.record)] = _attributes(value.record)
        found = known.get(name)
        path = f"{value.path}.{name}".removeprefix(".")
        if type(found) is Entry:
            return self.weights.setdefault(path, Value(found.shape))
        if type(found) is Object:
            return _Module(found, path)
        return found if found is None or isinstance(found, bool | int | float | str) else _Name(f"\0{path}")

    def _item(self, value: Any, key: Any) -> Any:
        if isinstance(value, list):
            return value[key] if type(key) is int and -len(value) <= key < len(value) else None
        return self._new("select", (value,)) if isinstance(value, Value) else None

    def _called(self, node: ast.Call, scope: dict[str, Any]) -> Any:
        given = [self._value(each, scope) for each in (*node.args, *(keyword.value for keyword in node.keywords))]
        if isinstance(node.func, ast.Attribute):
            owner = self._value(node.func.value, scope)
            if isinstance(owner, _Module):
                return self._call(self._method(owner, node.func.attr), [owner, *given])
        function = self._value(node.func, scope)
        if not isinstance(function, _Name):
            raise NotFollowedError
        return self._function(function.text, given)

    def _function(self, name: str, given: list[Any]) -> Any:
        if name in self.functions:
            return self._call(self.functions[name], given)
        if name == "getattr" and isinstance(given[1], str):
            return self._attribute(given[0], given[1])
        if name == "range" and all(type(each) is int for each in given) and given:
            return range(*given[:3])
        last = name.rpartition(".")[2]
        if last in _ITSELF:
            return given[-1]
        if last == "append" and isinstance(given[0], list):
            if isinstance(given[1], list):
                raise NotFollowedError
            given[0].append(given[1])
            return None
        if last in ("__is__", "__isnot__") and given[1] is None and isinstance(given[0], Value):
            return last == "__isnot__"
        self._list(given)
        tensors = [value for value in _flat(given) if isinstance(value, Value)]
        return self._new(last, tuple(given)) if tensors and name.startswith(("torch.", "ops.")) else None

    def _new(self, name: str, given: tuple[Any, ...]) -> Value:
        made = Value()
        operation = self.made_by[id(made)] = Operation(name, given, (made,))
        self.graph.operations.append(operation)
        return made


def _flat(value: Any) -> Iterator[Any]:
    if isinstance(value, list | tuple):
        for each in value:
            yield from _flat(each)
    else:
        yield value


def _attributes(record: Object) -> dict[str, Any]:
    """All attributes of a module: those in its tables, and the others."""
    states = [step.state for step in record.steps if isinstance(step, Build) and type(step.state) is Dict]
    found: dict[str, Any] = {}
    for name, value in (item for state in states for item in state.items):
        if name in _TABLES and type(value) is Dict:
            found.update((str(key), each) for key, each in value.items)
        else:
            found[str(name)] = value
    return found
