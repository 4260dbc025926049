"""torch-export: what `torch.export.save` writes since 2.9 (`.pt2`), a graph with its weights. The graph is never kept.

    ROOT/archive_format                           "pt2"
    ROOT/data/weights/MODEL_weights_config.json   name -> {"path_name", "is_param", "use_pickle", "tensor_meta"}
    ROOT/data/weights/weight_N                    the bytes of a storage, or with "use_pickle" what torch.save made of a tensor
    ROOT/data/constants/, models/, sample_inputs/, extra/   belong to the graph

One model is a state dict, several are one state dict each under their names. What earlier versions wrote (MODEL.pt instead of
the table) is an archive of checkpoints. Source: torch/export/pt2_archive/_package.py, torch/_export/serde/schema.py.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any, TypeVar

from ckpt_tools.errors import TWO_FILES, DamagedFileError, TensorError
from ckpt_tools.formats import torch_zip
from ckpt_tools.formats.base import PROGRAMS, Keys, program, unique
from ckpt_tools.formats.checkpoint import Checkpoint
from ckpt_tools.formats.zip_bundle import Inflated, decode_archive
from ckpt_tools.formats.zip_directory import Directory, Record
from ckpt_tools.io.output import Source
from ckpt_tools.pickling.torch_objects import META, meta_tensor, parameter_of
from ckpt_tools.text import some
from ckpt_tools.tree.dtypes import DTYPES, DType
from ckpt_tools.tree.graphs import Graph, Operation, Value
from ckpt_tools.tree.nodes import Dict, Entry, Node, Storage, check

_WEIGHTS, _CONFIG = "/data/weights/", "_weights_config.json"
_STRIDED = 7  # of schema.Layout
_SCALAR_TYPES = {  # of schema.ScalarType
    1: "uint8", 2: "int8", 3: "int16", 4: "int32", 5: "int64", 6: "float16", 7: "float32", 8: "float64", 9: "complex32",
    10: "complex64", 11: "complex128", 12: "bool", 13: "bfloat16", 28: "uint16", 29: "float8_e4m3fn", 30: "float8_e5m2",
    31: "float8_e4m3fnuz", 32: "float8_e5m2fnuz", 33: "float8_e8m0fnu", 34: "uint32", 35: "uint64",
}  # fmt: skip


def sniff(names: set[str], folder: str) -> bool:
    start = folder + _WEIGHTS
    return f"{folder}/archive_format" in names and any(name.startswith(start) and name.endswith(_CONFIG) for name in names)


def decode(source: Source, directory: Directory, folder: str) -> Checkpoint:
    records = torch_zip.by_name(directory)
    start = folder + _WEIGHTS
    decoded = Checkpoint(
        "torch-export", Dict(), source, unusual=[PROGRAMS["torch-export"][1]], root_folder=folder, records=directory.records,
        has_checksums=any(record.crc for record in directory.records),
    )  # fmt: skip
    weights = _Weights(decoded, records, start)
    models = [name for name in records if name.startswith(start) and name.endswith(_CONFIG)]
    for name in models:
        if (older := f"{name.removesuffix(_CONFIG)}.pt") in records:
            raise DamagedFileError(
                f"The archive has {name!r}, and {older!r}, which torch.export.load would take.", why=TWO_FILES
            )
    state_dicts = [(name[len(start) : -len(_CONFIG)], weights.read(name)) for name in models]
    decoded.root = state_dicts[0][1] if len(state_dicts) == 1 else Dict(list(state_dicts))
    decoded.storage_bytes = sum(row.size for name, row in records.items() if name.startswith(start) and name not in models)
    constants = [row for name, row in records.items() if name.startswith(f"{folder}/data/constants/") and ".json" not in name]
    decoded.warnings.append(program("torch-export", f"the graph of {some([name for name, _ in state_dicts])}", constants))
    return decoded


class _Weights:
    """The weights of an archive; those on one record are tied, across models too."""

    def __init__(self, program: Checkpoint, records: Mapping[str, Record], start: str) -> None:
        self.program, self.records, self.start = program, records, start
        self.keys = Keys()
        self.storages: dict[str, Storage] = {}
        self.inflated = Inflated(program.source)
        self.unpickled: set[str] = set()
        self.byteorders: set[str] = set()
        self.grads: dict[str, bool] = {}
        self.on_meta: dict[str, DType | None] = {}

    def read(self, name: str) -> Dict:
        record = self.records[name]
        self.grads = {}
        with torch_zip.json_of(self.program.source, record, check=self.program.has_checksums, pairs=unique) as table:
            return Dict([(key, self._tensor(key, row)) for key, row in table["config"].items()])

    def _tensor(self, name: str, row: dict[str, Any]) -> Node:
        record = self.records.get(self.start + str(row["path_name"]))
        if record is None:
            raise DamagedFileError(
                f"The bytes of {name!r} are not in the file.", why=f"Its record would be {row['path_name']!r}."
            )
        if _exactly(bool, row["use_pickle"]):
            return self._unpickled(name, record)
        meta = row["tensor_meta"]
        dtype = DTYPES.get(_SCALAR_TYPES.get(meta["dtype"], ""))
        if dtype is None or meta["layout"] != _STRIDED:
            raise TensorError(f"{name!r} has the unknown dtype {meta['dtype']!r} or layout {meta['layout']!r}.")
        self._follow("little", name)  # torch.export.load takes the elements as they lie, whatever the record says
        shape, stride = (tuple(_exactly(int, size["as_int"]) for size in meta[field]) for field in ("sizes", "strides"))
        parameter, grad = _exactly(bool, row["is_param"]), _exactly(bool, meta["requires_grad"])
        on_meta = dtype if meta["device"]["type"] == META else None
        if self.on_meta.setdefault(record.name, on_meta) is not on_meta:  # for torch the first row on a record decides
            raise TensorError(f"The bytes of {name!r} are used on the meta device and on another, or there with two types.")
        if on_meta:
            made = meta_tensor(dtype, shape, stride, grad)
            return parameter_of(made, grad) if parameter else made
        storage = self.storages.get(record.name)
        if storage is None:
            device = meta["device"]["type"] + (
                "" if meta["device"]["index"] is None else f":{_exactly(int, meta['device']['index'])}"
            )
            content = torch_zip.record_content(self.program.source, record)
            storage = self.storages[record.name] = Storage(self.keys.next(), dtype, record.size, device, content)
        if storage.dtype is not dtype or storage.nbytes % dtype.itemsize:
            raise TensorError(f"The bytes of {name!r} are used with two types, or are not a whole number of elements.")
        base_grad = self.grads.setdefault(record.name, grad)  # a buffer has what the model's first row on its record says
        entry = Entry(
            storage, dtype, shape, stride, _exactly(int, meta["storage_offset"]["as_int"]),
            grad if parameter else base_grad, "parameter" if parameter else "tensor",
        )  # fmt: skip
        check(entry, repr(name))
        return entry

    def _unpickled(self, name: str, record: Record) -> Node:
        """What torch.save made of a tensor. Each has a record of its own: reading one for every row would take for ever."""
        program = self.program
        if record.name in self.unpickled:
            raise DamagedFileError(f"The record {record.name!r} holds a pickle, and is used for {name!r} and another weight.")
        self.unpickled.add(record.name)
        part = decode_archive(*self.inflated.place(record), record)
        self._follow(part.byteorder, name)
        program.merge(part, record.name)
        return self.keys.renew(part.root)

    def _follow(self, byteorder: str, name: str) -> None:
        """The file's tensors are of one byte order."""
        self.byteorders.add(byteorder)
        self.program.byteorder = byteorder
        if len(self.byteorders) > 1:
            raise DamagedFileError(f"The bytes of {name!r} are {byteorder}-endian, those of other weights are not.")


def _exactly(kind: type[_Kind], value: object) -> _Kind:
    if type(value) is not kind:
        raise TypeError(f"{value!r} is {'neither true nor false' if kind is bool else 'not a whole number'}")
    return value


_Kind = TypeVar("_Kind", bool, int)


# --- the graph, ROOT/models/NAME.json: ATen operations in order, values by name; `signature` says which are parameters

_MOST_DIMENSIONS = 64
_INTEGERS = frozenset((1, 2, 3, 4, 5, 12))  # of schema.ScalarType
_WEIGHT_KINDS = {"parameter": "parameter_name", "buffer": "buffer_name"}


def graph_in(decoded: Checkpoint) -> Graph | None:
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
    def __init__(self, sizes: dict[str, Any]) -> None:
        self.sizes = sizes
        self.values: dict[str, Value] = {}

    def read(self, module: dict[str, Any]) -> Graph:
        graph = Graph()
        for spec in module["signature"]["input_specs"]:
            ((kind, row),) = spec.items()
            if kind in _WEIGHT_KINDS:
                graph.weights[str(row[_WEIGHT_KINDS[kind]])] = self.value(row["arg"]["name"])
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
