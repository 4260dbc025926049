"""Programs: what `torch.jit.save` (torchscript) and, since 2.9, `torch.export.save` (torch-export, `.pt2`) write.

They are never run, nor kept by convert. A torchscript has the module in `data.pkl`, and in `code/` its classes, which say what
is a parameter or a buffer; it becomes the record of an `nn.Module`. Source: torch/csrc/jit/serialization/pickler.cpp,
import_source.cpp. Of a torch-export the weights are read:

    ROOT/archive_format                           "pt2"
    ROOT/data/weights/MODEL_weights_config.json   name -> {"path_name", "is_param", "use_pickle", "tensor_meta"}
    ROOT/data/weights/weight_N                    the bytes of a storage, or a pickle ("use_pickle", refused)

One model is a state dict, several are one state dict each under their names. Loading one evaluates texts in it: `scan` looks at
them. Source: torch/export/pt2_archive/_package.py, torch/_export/serde/schema.py, serialize.py.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from ckpt_tools import limits
from ckpt_tools.errors import TWO_FILES, CkptError, DamagedFileError, TensorError, UnsupportedContainerError
from ckpt_tools.formats import torch_zip
from ckpt_tools.formats.base import PROGRAMS, Warned, unique
from ckpt_tools.formats.checkpoint import Checkpoint
from ckpt_tools.formats.zip_directory import Directory, Record, read_record, record_content
from ckpt_tools.io.parsers import load_json
from ckpt_tools.io.source import Source
from ckpt_tools.pickling import verdict
from ckpt_tools.pickling.calls import Call
from ckpt_tools.pickling.torch_objects import META, Storages, on_meta
from ckpt_tools.text import some
from ckpt_tools.tree.dtypes import BY_STORAGE, DTYPES
from ckpt_tools.tree.modules import SAVED
from ckpt_tools.tree.nodes import Build, Dict, Entry, Global, List, Node, Object, Pair, Storage, check
from ckpt_tools.tree.visit import parts, reachable


def _warned(container: str, holds: str, constants: Sequence[Record]) -> Warned:
    code, called = PROGRAMS[container]
    found = f"{called}: {holds}"
    if constants:
        found += f", {len(constants)} constants of {sum(row.size for row in constants)} bytes"
    return Warned(code, found, "a state dict, which a model's own code loads")


# --- torchscript

_CLASS = re.compile(r"^class (\w++)(\(Module\)|\(\w++\))?:\n", re.MULTILINE)
_OTHER_HAND = re.compile(  # a class that is written otherwise, a string over several lines
    r"""^[^\S\n]*+class\b(?! \w++(?:\(\w++\))?:\n)|\"{3}|'{3}|\\\n""", re.MULTILINE
)
_LINE = re.compile(  # of those that a class begins with: a list of names; an attribute and its type; anything else
    r"[ ]{2}(?:__(parameters|buffers)__[ ]=[ ]\[((?:\"[^\"\\\n]*+\",[ ])*+)\]"
    r"""|(?:(\w++)[ ]:|__annotations__\["([^"\\\n]++)"\][ ]=)[ ]([\w., \[\]()]++)"""
    r"|\w++[ ]:[ ]Final\[[^=\n]++=[ ].*+|__annotations__[ ]=[ ]\[\]|__forward_(?:pre_)?hooks__[ ]=[ ]\[.*+|pass)\n"
)
_NO_METHOD = re.compile(r"^(?!    |  def \w++\(|\n|\Z)|\A    ", re.MULTILINE)  # a line that is neither one nor inside one
_OUTSIDE = re.compile(r"^\S++", re.MULTILINE)
_MODULE, _INTERFACE = "(Module)", "(ModuleInterface)"


@dataclass(slots=True, unsafe_hash=True)
class _Class:
    kind: str
    types: Mapping[str, str]
    parameters: frozenset[str]
    buffers: frozenset[str]
    computes: bool


_Declared = Mapping[str, _Class]


def decode_script(source: Source, directory: Directory, folder: str) -> Checkpoint:
    """Read a program's module tree; no tensor bytes, and the code only for the names of its parameters."""
    records = {record.name: record for record in directory.records}
    if f"{folder}/data.pkl" not in records:
        raise DamagedFileError("The TorchScript program has no data.pkl.", why="Its modules and parameters would be in there.")
    decoded = torch_zip.decode(source, directory, folder, storages_of=_Storages)
    decoded.byteorder = "little"  # torch.jit.load takes the elements as they lie, whatever the record says
    decoded.warnings += _as_modules(decoded.root, _declared(source, records, folder))
    decoded.container = "torchscript"
    decoded.warnings = [warned for warned in decoded.warnings if not warned.code.startswith("odd-")]
    files = [name for name in records if name.startswith(f"{folder}/code/") and name.endswith(".py")]
    constants = [row for name, row in records.items() if name.startswith(f"{folder}/constants/")]
    decoded.warnings.append(_warned("torchscript", f"{len(files)} code files", constants))
    return decoded


def _declared(source: Source, records: Mapping[str, Record], folder: str) -> _Declared:
    found: dict[str, _Class] = {}
    budget = limits.budget(source.size)
    for name, record in records.items():
        if not name.startswith(f"{folder}/code/") or not name.endswith(".py"):
            continue
        budget.take(limits.MEMORY, record.size, "The program's code is longer than that of any model.")
        text = read_record(source, record, check=False).decode("utf-8", "replace")
        module = name.removeprefix(f"{folder}/code/").removesuffix(".py").replace("/", ".")
        other_hand = DamagedFileError(f"{name!r} is not written as torch writes a program's code.", why=_OTHER_CODE)
        if _OTHER_HAND.search(text):
            raise other_hand
        for match in _CLASS.finditer(text):
            kind, called = _class(text, match, budget), f"{module}.{match[1]}"
            if kind is None or called in found:
                raise other_hand
            found[called] = kind
    return found


_NO_CLASS = _Class("", {}, frozenset(), frozenset(), computes=False)
_OTHER_CODE = "It says which attributes are parameters and buffers; only the form that `torch.jit.save` gives it is read."


def _class(text: str, start: re.Match[str], budget: limits.Budget) -> _Class | None:
    """What is said of a class that starts here; None where it is not written as torch writes it."""
    after = _OUTSIDE.search(text, start.end())
    end = after.start() if after else len(text)
    lists: dict[str, list[str]] = {}
    types: dict[str, str] = {}
    at, kind = start.end(), start[2] or ""
    budget.take(limits.NODES, 1, _TOO_MANY)
    while (line := _LINE.match(text, at, end)) is not None:
        at, name = line.end(), line[3] or line[4]
        if line[1] in lists or name in types:
            return None
        budget.take(limits.NODES, (line[2] or "").count('"') // 2 + bool(name), _TOO_MANY)
        if name:
            types[name] = line[5]
        elif line[1]:
            lists[line[1]] = line[2].split('"')[1::2]
    methods = text[at - 1 : end]
    if kind in ("", _MODULE) and (_NO_METHOD.search(methods[1:]) or (after and after[0] not in ("class", "def"))):
        return None
    computes = all(f"\n  def {name}(" in methods for name in ("__getstate__", "__setstate__"))
    return _Class(kind, types, frozenset(lists.get("parameters", ())), frozenset(lists.get("buffers", ())), computes)


def _class_of(node: Node, declared: _Declared) -> _Class:
    """What the code says of an object's class; one without a kind for anything else."""
    name = str(node.function) if type(node) is Object and type(node.function) is Global else ""
    if name.startswith("__torch__.") and not name.startswith("__torch__.torch.classes.") and name not in declared:
        raise DamagedFileError(f"The class {name!r} is not in the program's code.", why=_OTHER_CODE)
    return declared.get(name, _NO_CLASS)


_TOO_MANY = "The program declares more than a model of its size can hold."


def _as_modules(root: Node, declared: _Declared) -> list[Warned]:
    """Make modules of a program's objects, but of those that come to be by code: of these it is said."""
    computed: dict[str, None] = {}
    nodes = list(reachable(root))
    arguments = {id(node.args) for node in nodes if type(node) is Object}
    for node in nodes:  # a storage that is a value is a tensor to torch, of one dimension, and torch writes none such
        is_container = type(node) in (Dict, List, tuple) and id(node) not in arguments
        if is_container and any(type(part) is Storage for part in parts(node)):
            raise TensorError("The program has a storage where a value is expected.", why=TWO_FILES)
    for node in nodes:
        if type(node) is not Object:
            continue
        kind = _class_of(node, declared)
        if kind.computes:
            computed[node.name] = None
            node.steps[:] = [Build(Dict([*_tables().items(), (SAVED, node.state)]))]  # nothing that a state dict would hold
        elif kind.kind == _MODULE:
            _as_module(node, kind, declared)
    if not computed:
        return []
    found = f"the code of {some(list(computed))} makes its tensors when it is loaded; shown is what it makes them from"
    fix = "torch.jit.load runs that code: where you trust the file, save the state dict of what it returns."
    return [Warned("computed-tensors", found, "modules whose state is their attributes", fix=fix)]


def _as_module(node: Object, kind: _Class, declared: _Declared) -> None:
    """Sort the attributes of a program's module into the tables of an nn.Module, in the order of the code."""
    state, types = node.state, kind.types
    if type(state) is not Dict or len(node.steps) != 1:
        raise DamagedFileError(
            f"A module of the class {node.name!r} has no state, or not a dict of its attributes.", why=TWO_FILES
        )
    values = dict(state.items)
    for name in (*values, *types):
        if name not in values or name not in types:
            which = "state, and not in its code" if name in values else "code, and not in its state"
            raise DamagedFileError(f"{node.name!r} has the attribute {str(name)[:100]!r} in its {which}.", why=TWO_FILES)
    tables = _tables()
    others: list[Pair] = []
    for name, said in types.items():
        value = values[name]
        is_module = _class_of(value, declared).kind == _MODULE
        if is_module and declared.get(said, _NO_CLASS).kind not in (_MODULE, _INTERFACE):
            raise DamagedFileError(f"{node.name!r} has a module for {name!r}, which is {said!r} in its code.", why=TWO_FILES)
        items = tables["_modules"].items if is_module else others
        if name in kind.parameters:
            items = tables["_parameters"].items
        elif name in kind.buffers and said == "Tensor":  # torch passes over those that are optional
            items = tables["_buffers"].items
        items.append((name, value))
    node.steps[:] = [Build(Dict([*tables.items(), *others]))]


def _tables() -> dict[str, Dict]:
    return {"_parameters": Dict(), "_buffers": Dict(), "_modules": Dict()}


class _Storages(Storages):
    """The storages of a program: each dtype has a class of its own."""

    # C++ names classes of storages after dtypes for which Python has none
    kinds = BY_STORAGE | {
        f"{'ComplexHalf' if name == 'complex32' else name.capitalize().replace('Uint', 'UInt')}Storage": dtype
        for name, dtype in DTYPES.items()
        if not dtype.storage and dtype.in_torch
    }

    def storage(self, pid: Node) -> Storage:
        """PyTorch 1.2 and 1.3 wrote a None behind the five parts (pushLiteralTensor: view_metadata), which no loader reads."""
        return super().storage(pid[:5] if type(pid) is tuple and len(pid) == 6 and pid[5] is None else pid)


# --- torch-export

_WEIGHTS, _CONFIG = "/data/weights/", "_weights_config.json"
_STRIDED = 7  # of schema.Layout
_SCALAR_TYPES = {  # of schema.ScalarType
    1: "uint8", 2: "int8", 3: "int16", 4: "int32", 5: "int64", 6: "float16", 7: "float32", 8: "float64", 9: "complex32",
    10: "complex64", 11: "complex128", 12: "bool", 13: "bfloat16", 28: "uint16", 29: "float8_e4m3fn", 30: "float8_e5m2",
    31: "float8_e4m3fnuz", 32: "float8_e5m2fnuz", 33: "float8_e8m0fnu", 34: "uint32", 35: "uint64",
}  # fmt: skip


def is_exported(names: set[str], folder: str) -> bool:
    start = folder + _WEIGHTS
    return f"{folder}/archive_format" in names and any(name.startswith(start) and name.endswith(_CONFIG) for name in names)


def decode_exported(source: Source, directory: Directory, folder: str) -> Checkpoint:
    records = {record.name: record for record in directory.records}
    start = folder + _WEIGHTS
    # the byte order stays little: torch.export.load takes the elements as they lie, whatever the record says
    decoded = Checkpoint(
        "torch-export", Dict(), source, unusual=[PROGRAMS["torch-export"][1]], root_folder=folder, records=directory.records,
        has_checksums=any(record.crc for record in directory.records),
    )  # fmt: skip
    weights = _Weights(source, records, start)
    state_dicts: list[tuple[Node, Node]] = []
    for name, record in records.items():
        if not name.startswith(start):
            continue
        if not name.endswith(_CONFIG):
            decoded.storage_bytes += record.size
            continue
        model = name.removesuffix(_CONFIG)
        if f"{model}.pt" in records:
            what = f"The archive has {name!r}, and '{model}.pt', which torch.export.load would take."
            raise DamagedFileError(what, why=TWO_FILES)
        state_dicts.append((model[len(start) :], weights.read(record, check=decoded.has_checksums)))
    decoded.root = state_dicts[0][1] if len(state_dicts) == 1 else Dict(state_dicts)
    constants = [row for name, row in records.items() if name.startswith(f"{folder}/data/constants/") and ".json" not in name]
    called = some([str(name) for name, _ in state_dicts])
    decoded.warnings.append(_warned("torch-export", f"the graph of {called}", constants))
    return decoded


class _Weights:
    """The weights of an archive; those on one record are tied, across models too."""

    def __init__(self, source: Source, records: Mapping[str, Record], start: str) -> None:
        self.source, self.records, self.start = source, records, start
        self.storages: dict[str, Storage] = {}
        self.grads: dict[str, bool] = {}

    def read(self, record: Record, *, check: bool) -> Dict:
        self.grads = {}
        try:
            table = load_json(read_record(self.source, record, check=check), pairs=unique)
            return Dict([(key, self._tensor(key, row)) for key, row in table["config"].items()])
        except CkptError:
            raise
        except (ValueError, LookupError, TypeError, AttributeError, OverflowError) as error:
            raise DamagedFileError(f"{record.name} is malformed.", why=f"{type(error).__name__}: {error}"[:200]) from None

    def _tensor(self, name: str, row: dict[str, Any]) -> Entry:
        record = self.records.get(self.start + str(row["path_name"]))
        if record is None:
            why = f"Its record would be {row['path_name']!r}."
            raise DamagedFileError(f"The bytes of {name!r} are not in the file.", why=why)
        if _exactly(bool, row["use_pickle"]):
            fix = "Load it with torch.export.load, and save its state dict."
            raise UnsupportedContainerError(f"{name!r} is a pickle in the program, of a tensor of a class of its own.", fix=fix)
        meta = row["tensor_meta"]
        dtype = DTYPES.get(_SCALAR_TYPES.get(meta["dtype"], ""))
        if dtype is None or meta["layout"] != _STRIDED:
            raise TensorError(f"{name!r} has the unknown dtype {meta['dtype']!r} or layout {meta['layout']!r}.")
        shape, stride = (tuple(_exactly(int, size["as_int"]) for size in meta[field]) for field in ("sizes", "strides"))
        parameter, grad = _exactly(bool, row["is_param"]), _exactly(bool, meta["requires_grad"])
        device, index = _exactly(str, meta["device"]["type"]), meta["device"]["index"]
        if device == META:
            raise on_meta(name)
        storage = self.storages.get(record.name)
        if storage is None:
            tag = device if index is None else f"{device}:{_exactly(int, index)}"
            content = record_content(self.source, record)
            storage = self.storages[record.name] = Storage(str(len(self.storages)), dtype, record.size, tag, content)
        if storage.dtype is not dtype or storage.nbytes % dtype.itemsize:
            raise TensorError(f"The bytes of {name!r} are used with two types, or are not a whole number of elements.")
        base_grad = self.grads.setdefault(record.name, grad)  # a buffer has what the model's first row on its record says
        entry = Entry(
            storage, dtype, shape, stride, _exactly(int, meta["storage_offset"]["as_int"]),
            grad if parameter else base_grad, "parameter" if parameter else "tensor",
        )  # fmt: skip
        check(entry, repr(name))
        return entry


def _exactly(kind: type, value: object) -> Any:
    if type(value) is not kind:
        raise TypeError(f"{value!r} is not of the type {kind.__name__}")
    return value


# --- what loading one runs: texts that `_parse_sym_expr` gives to `sympy.sympify`, which evaluates them; machine code beside it

# Of a record, in small letters: torch finds names without regard to case. A folder of the name of the file is around all.
_FORMAT = re.compile(r"[^/]*/archive_format")
_MODEL = re.compile(r"[^/]*/models/")
_OLD_MODEL = "serialized_exported_program.json"
_COMPILED = re.compile(r"(?:^|/)data/aotinductor/.*[^/](?<!\.json)$", re.DOTALL)
_SYMPIFY, _LOAD = Global("sympy", "sympify"), Global("torch._C._aoti", "AOTIModelPackageLoader")
_FUNCTIONS = "floor|ceiling|sqrt|log|exp|sin|cos|tan|asin|acos|atan|sinh|cosh|tanh|abs|sign|min|max"
_WORDS = (
    "positive|negative|nonnegative|nonpositive|nonzero|zero|integer|real|extended_real|finite|infinite|commutative|even|odd|"
    "precision|dps|evaluate|oo|int_oo|zoo|nan|pi|and|or|not"
)
# What sympy prints of sizes, and nothing that a function of Python's own could be reached by: only functions are called.
_SIZE = re.compile(
    rf"""(?:\s|\d++(?:\.\d*+)?+(?:e[+-]?\d++)?+|'-?[\w.+-]*'|"-?[\w.+-]*"|[-+*/%(),=<>!&|~]
    |(?!\w*__)(?:[A-Z]\w*+|(?:{_FUNCTIONS})\b(?=\s*\()|(?:{_WORDS}|[a-z]{{1,4}}\d++)\b(?!\s*\()))*+""",
    re.ASCII | re.VERBOSE,
)
_CALLED_AGAIN = re.compile(r"[)'\"]\s*\(")  # what a call has made


def calls(records: Sequence[Record], read: Callable[[Record], bytes]) -> Iterator[tuple[str, Call]]:
    """The records that are code for the machine; then texts of graphs that are not sizes as sympy prints them."""
    for record in records:
        if _COMPILED.search(record.name.lower()):
            yield record.name, _call(_LOAD, record.name)
    is_program = any(_FORMAT.fullmatch(record.name.lower()) for record in records)
    for record in records:  # torch before 2.8 wrote zips of one model
        if (is_program and _MODEL.match(record.name.lower())) or record.name.lower().endswith(_OLD_MODEL):
            pairs: list[tuple[str, Any]] = []
            load_json(read(record), pairs=pairs.extend)
            for key, text in pairs:
                if key == "expr_str" and type(text) is str and not _is_size(text):
                    yield record.name, _call(_SYMPIFY, text)


def _call(function: Global, given: str) -> Call:
    return Call(verdict.call_text(function, (given,)), str(function), 0, "harmful")


def _is_size(text: str) -> bool:
    return _SIZE.fullmatch(text) is not None and _CALLED_AGAIN.search(text) is None
