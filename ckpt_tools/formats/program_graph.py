"""The graph in what `torch.export.save` writes: ROOT/models/NAME.json.

Nodes are ATen operations in order, values go by name, `signature` says which are parameters. Source:
torch/_export/serde/schema.py.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from ckpt_tools.formats import torch_zip
from ckpt_tools.formats.base import Decoded
from ckpt_tools.tree.graphs import Graph, Operation, Value

_MOST_DIMENSIONS = 64
_INTEGERS = frozenset((1, 2, 3, 4, 5, 12))  # of schema.ScalarType
_WEIGHTS = {"parameter": "parameter_name", "buffer": "buffer_name"}


def graph_in(decoded: Decoded) -> Graph | None:
    """What the only model of an exported program computes; None where there are several, and of anything else."""
    if decoded.container != "torch-export":
        return None
    start = f"{decoded.root_folder}/models/"
    names = [record for record in decoded.records or () if record.name.startswith(start) and record.name.endswith(".json")]
    if len(names) != 1:
        return None
    with torch_zip.json_of(decoded.source, names[0], check=decoded.has_checksums) as model:
        module = model["graph_module"]
        return _Reader(module["graph"]["tensor_values"]).read(module)


class _Reader:
    """The values of a graph by name, made when they are first met."""

    def __init__(self, sizes: dict[str, Any]) -> None:
        self.sizes = sizes
        self.values: dict[str, Value] = {}

    def read(self, module: dict[str, Any]) -> Graph:
        graph = Graph()
        for spec in module["signature"]["input_specs"]:
            ((kind, row),) = spec.items()
            if kind in _WEIGHTS:
                graph.weights[str(row[_WEIGHTS[kind]])] = self.value(row["arg"]["name"])
            elif kind == "user_input":
                graph.inputs += self.tensors(row["arg"])
        for name, value in self.values.items():
            value.integers = self.sizes[name]["dtype"] in _INTEGERS
        for node in module["graph"]["nodes"]:
            given = tuple(self.argument(row["arg"]) for row in node["inputs"])
            made = tuple(value for row in node["outputs"] for value in self.new(row))
            graph.operations.append(Operation(_name(node["target"]), given, made))
        for spec in module["signature"]["output_specs"]:
            if "user_output" in spec:
                graph.outputs += self.tensors(spec["user_output"]["arg"])
        return graph

    def value(self, name: str) -> Value:
        """A value that is there already, or an input."""
        found = self.values.get(name)
        if found is None:
            found = self.values[name] = Value(self.shape(name))
        return found

    def shape(self, name: str) -> tuple[int, ...] | None:
        row = self.sizes.get(name)
        if row is None or len(row["sizes"]) > _MOST_DIMENSIONS:
            return None
        sizes = [size.get("as_int") for size in row["sizes"]]
        return tuple(sizes) if all(type(size) is int and size >= 0 for size in sizes) else None

    def argument(self, row: dict[str, Any]) -> Any:
        ((kind, what),) = row.items()
        if kind == "as_tensor":
            return self.value(what["name"])
        if kind in ("as_tensors", "as_optional_tensors"):
            return list(self.tensors(row))
        if kind in ("as_int", "as_float", "as_string", "as_bool"):
            return what
        return list(what) if kind == "as_ints" else None

    def tensors(self, row: dict[str, Any]) -> Iterator[Value]:
        ((kind, what),) = row.items()
        if kind == "as_tensor":
            yield self.value(what["name"])
        elif kind == "as_tensors":
            yield from (self.value(each["name"]) for each in what)
        elif kind == "as_optional_tensors":
            for each in what:
                yield from self.tensors(each)

    def new(self, row: dict[str, Any]) -> Iterator[Value]:
        """The values that an operation makes; a name that is made again is another value."""
        ((kind, what),) = row.items()
        for each in [what] if kind == "as_tensor" else what if kind == "as_tensors" else ():
            self.values[each["name"]] = Value(self.shape(each["name"]))
            yield self.values[each["name"]]


def _name(target: str) -> str:
    """`torch.ops.aten.linear.default` is `linear`."""
    parts = target.split(".")
    return parts[3] if target.startswith("torch.ops.") and len(parts) > 3 else parts[-1]
