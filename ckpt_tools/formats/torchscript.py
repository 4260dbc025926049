"""torchscript: what `torch.jit.save` writes, a program with its parameters. The program is never run, nor kept by convert.

    since 1.2   ROOT/data.pkl          the module as a pickle: `__torch__` classes whose state is a dict of attributes
                ROOT/data/KEY          one record a storage
                ROOT/code/**.py        the classes; `__parameters__` and `__buffers__` say which attributes are which
                ROOT/constants.pkl     constants of the code, their bytes under ROOT/constants/
    1.0, 1.1    ROOT/model.json        modules, parameters and tensors as JSON (protobuf's), bytes under ROOT/tensors/
                ROOT/attributes.pkl    attributes of other types (1.1)

Both become the record of an `nn.Module` (`_parameters`, `_buffers`, `_modules`), so that whatever reads a pickled module
reads a program too. Source: torch/csrc/jit/serialization/pickler.cpp, import_source.cpp and import_legacy.cpp; caffe2's
torch.proto.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from ckpt_tools import limits
from ckpt_tools.errors import CkptError, TensorError, ZipError
from ckpt_tools.formats import torch_zip
from ckpt_tools.formats.base import PROGRAMS, Decoded, Warned, unique
from ckpt_tools.formats.zip.directory import Directory, Record
from ckpt_tools.io.output import Source
from ckpt_tools.io.parsers import load_json
from ckpt_tools.tree.dtypes import DTYPES
from ckpt_tools.tree.nodes import (
    Build,
    Dict,
    Entry,
    Global,
    Node,
    Object,
    Storage,
    check,
    contiguous_stride,
)
from ckpt_tools.tree.visit import reachable

_CLASS = re.compile(r"^class (\w++)(\(Module\)|\(\w++\))?:\n", re.MULTILINE)
_OTHER_HAND = re.compile(  # a class that is written otherwise, a string over several lines
    r"""^[^\S\n]*+class\b(?! \w++(?:\(\w++\))?:\n)|\"{3}|'{3}|\\\n""", re.MULTILINE
)
_DECLARED = re.compile(r"  __(parameters|buffers)__ = \[(.*+)\n")
_QUOTED = re.compile(r'"([^"\\]*+(?:\\.[^"\\]*+)*+)(?:"|\\?\Z)')  # one that does not end goes up to the end of the line
_Declared = Mapping[str, tuple[frozenset[str], frozenset[str]] | None]  # None: not a module


def sniff(names: set[str], folder: str) -> bool:
    """Whether a zip with these records is a program."""
    return f"{folder}/constants.pkl" in names or f"{folder}/model.json" in names


def decode(source: Source, directory: Directory, folder: str) -> Decoded:
    """Read a program's module tree; no tensor bytes, and the code only for the names of its parameters.

    Raises:
        ZipError, PickleError, TensorError: the file breaks a promise.
    """
    records = torch_zip.by_name(directory)
    if f"{folder}/model.json" in records:
        decoded = _decode_json(source, directory, folder, records)
    elif f"{folder}/data.pkl" in records:
        decoded = torch_zip.decode(source, directory, folder)
        decoded.byteorder = "little"  # torch.jit.load takes the elements as they lie, whatever the record says
        declared = _declared(source, records, folder)
        for node in list(reachable(decoded.root)):
            if type(node) is Object and (names := _names_of(node, declared)) is not None:
                _as_module(node, *names, declared)
    else:
        raise ZipError("The TorchScript program has no data.pkl.", why="Its modules and parameters would be in there.")
    decoded.container = "torchscript"
    decoded.warnings = [warned for warned in decoded.warnings if not warned.code.startswith("odd-")]
    decoded.warnings.append(_program(records, folder))
    return decoded


def _program(records: Mapping[str, Record], folder: str) -> Warned:
    """What a state dict of the program leaves behind."""
    files = [name for name in records if name.startswith(f"{folder}/code/") and name.endswith(".py")]
    constants = [row for name, row in records.items() if name.startswith(f"{folder}/constants/")]
    code, name = PROGRAMS["torchscript"]
    found = f"{name}: {len(files)} code files"
    if constants:
        found += f", {len(constants)} constants of {sum(row.size for row in constants)} bytes"
    return Warned(code, found, "a state dict, which a model's own code loads")


# --- since 1.2


def _declared(source: Source, records: Mapping[str, Record], folder: str) -> _Declared:
    """For each class in the code that is a module's, the names of its parameters and of its buffers.

    torch reads more than it writes: other spaces, comments, long strings. Only what it writes is read here; other code could
    hide a class, or show one that is only text.
    """
    found: dict[str, tuple[frozenset[str], frozenset[str]] | None] = {}
    budget = limits.budget(source.size)
    for name, record in records.items():
        if not name.startswith(f"{folder}/code/") or not name.endswith(".py"):
            continue
        budget.take(limits.TEXT_BYTES, record.size, "The program's code is longer than that of any model.")
        text = torch_zip.read_record(source, record, check=False).decode("utf-8", "replace")
        module = name.removeprefix(f"{folder}/code/").removesuffix(".py").replace("/", ".")
        lines = text.count("__parameters__") + text.count("__buffers__")
        for match in _CLASS.finditer(text):
            lists = _names_behind(text, match.end(), budget)
            lines -= len(lists)
            lines += f"{module}.{match[1]}" in found  # a second one of this name
            names = (frozenset(lists.get("parameters", ())), frozenset(lists.get("buffers", ())))
            found[f"{module}.{match[1]}"] = names if match[2] == "(Module)" else None
        if lines or _OTHER_HAND.search(text) is not None:
            raise ZipError(f"{name!r} is not written as torch writes a program's code.", why=_OTHER_CODE)
    return found


def _names_behind(text: str, at: int, budget: limits.Budget) -> dict[str, list[str]]:
    """The lists of names that a class begins with, each on a line of its own."""
    lists: dict[str, list[str]] = {}
    budget.make(1, _TOO_MANY)
    while (line := _DECLARED.match(text, at)) is not None and line[2].endswith("]") and line[1] not in lists:
        budget.make(line[2].count('"') // 2, _TOO_MANY)
        lists[line[1]] = _QUOTED.findall(line[2])
        at = line.end()
    return lists


_OTHER_CODE = "It says which attributes are parameters and buffers; only the form that `torch.jit.save` gives it is read."


def _names_of(node: Object, declared: _Declared) -> tuple[frozenset[str], frozenset[str]] | None:
    """The parameters and buffers of a module; None for another object."""
    name = str(node.function) if type(node.function) is Global else ""
    if name.startswith("__torch__.") and not name.startswith("__torch__.torch.classes.") and name not in declared:
        raise ZipError(f"The class {name!r} is not in the program's code.", why=_OTHER_CODE)
    return declared.get(name)


_TOO_MANY = "The program declares more than a model of its size can hold."


def _as_module(node: Object, parameters: frozenset[str], buffers: frozenset[str], declared: _Declared) -> None:
    """Sort the attributes of a program's module into the tables of an nn.Module, in their order."""
    state = node.state
    if type(state) is not Dict:
        return
    tables: dict[str, list[tuple[Node, Node]]] = {"_parameters": [], "_buffers": [], "_modules": []}
    others = []
    for name, value in state.items:
        if name in parameters or name in buffers:
            tables["_parameters" if name in parameters else "_buffers"].append((name, value))
        elif type(value) is Object and _names_of(value, declared) is not None:
            tables["_modules"].append((name, value))
        else:
            others.append((name, value))
    node.steps[:] = [Build(Dict([*((table, Dict(pairs)) for table, pairs in tables.items()), *others]))]


# --- 1.0 and 1.1

_DATA_TYPES = {
    "FLOAT": "float32", "DOUBLE": "float64", "FLOAT16": "float16", "INT8": "int8", "UINT8": "uint8", "INT16": "int16",
    "INT32": "int32", "INT64": "int64", "BOOL": "bool", "BYTE": "uint8", "BFLOAT16": "bfloat16",
}  # fmt: skip


def _decode_json(source: Source, directory: Directory, folder: str, records: Mapping[str, Record]) -> Decoded:
    record = records[f"{folder}/model.json"]
    torch_zip.check_text(source, record)
    try:
        model = load_json(torch_zip.read_record(source, record, check=False), pairs=unique)
        tensors = _JsonTensors(source, records, folder, model.get("tensors", []))
        root = _json_module(model["mainModule"], tensors, 0)
    except CkptError:
        raise
    except (ValueError, LookupError, TypeError, AttributeError, OverflowError) as error:
        raise ZipError("The program's model.json is malformed.", why=f"{type(error).__name__}: {error}"[:200]) from None
    size = sum(row.size for name, row in records.items() if name.startswith(f"{folder}/tensors/"))
    checksums = any(row.crc for row in directory.records)
    return Decoded(
        "torchscript", root, source, [_SCRIPT_MODULE], storage_bytes=size, has_checksums=checksums, root_folder=folder,
        records=directory.records,
    )  # fmt: skip


_SCRIPT_MODULE = Global("torch.jit", "ScriptModule")


class _JsonTensors:
    """The tensors of a model.json; those on one record are tied."""

    def __init__(self, source: Source, records: Mapping[str, Record], folder: str, rows: list[dict[str, Any]]) -> None:
        self.source, self.records, self.folder, self.rows = source, records, folder, rows
        self.storages: dict[str, Storage] = {}
        self.budget = limits.budget(source.size)

    def entry(self, number: int, *, parameter: bool) -> Entry:
        """The tensor with this number."""
        if number < 0:
            raise IndexError(f"tensor {number}")
        row = self.rows[number]
        dtype = DTYPES.get(_DATA_TYPES.get(row["dataType"], ""))
        if dtype is None:
            raise TensorError(f"A tensor has the unknown type {str(row['dataType'])[:40]!r}.")
        self.budget.make(1 + len(row.get("dims", [])) // 8, _TOO_MANY)  # any number of parameters may be on one row
        shape = tuple(int(size) for size in row.get("dims", []))
        stride = tuple(int(step) for step in row.get("strides", contiguous_stride(shape)))
        storage = self.storage(row["data"]["key"], dtype.name, str(row.get("device", "cpu")))
        grad = parameter and bool(row.get("requiresGrad", False))
        entry = Entry(storage, dtype, shape, stride, int(row.get("offset", 0)), grad, "parameter" if parameter else "tensor")
        check(entry)
        return entry

    def storage(self, key: str, dtype: str, device: str) -> Storage:
        record = self.records.get(f"{self.folder}/{key}")
        if record is None:
            raise ZipError(f"The storage {key!r} is not in the file.", why="model.json refers to it.")
        known = self.storages.get(key)
        if known is None:
            if record.size % DTYPES[dtype].itemsize:
                raise ZipError(f"The storage {key!r} has {record.size} bytes, which are not whole elements of {dtype}.")
            content = torch_zip.record_content(self.source, record)
            known = self.storages[key] = Storage(key.rpartition("/")[2], DTYPES[dtype], record.size, device, content)
        if known.dtype is not DTYPES[dtype]:
            raise TensorError(f"Storage {key!r} is used with two types.")
        return known


_CONTAINERS_OF_A_MODULE = 16  # its tables, the objects in them, and their rows in every report


def _json_module(row: dict[str, Any], tensors: _JsonTensors, depth: int) -> Object:
    limits.JSON_DEPTH.check(depth, "The program nests its modules too deep.")
    tensors.budget.make(_CONTAINERS_OF_A_MODULE, "The program has more modules than one of its size can hold.")
    parameters, buffers = Dict(), Dict()
    for parameter in row.get("parameters", []):
        is_buffer = bool(parameter.get("isBuffer", False))
        entry = tensors.entry(int(parameter["tensorId"]), parameter=not is_buffer)
        (buffers if is_buffer else parameters).items.append((str(parameter["name"]), entry))
    modules = Dict([(str(child["name"]), _json_module(child, tensors, depth + 1)) for child in row.get("submodules", [])])
    module = Object("new", _SCRIPT_MODULE, ())
    module.steps.append(Build(Dict([("_parameters", parameters), ("_buffers", buffers), ("_modules", modules)])))
    return module
