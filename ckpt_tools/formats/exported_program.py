"""torch-export: what `torch.export.save` writes since 2.9 (`.pt2`), a graph, which is not read, with its weights.

    ROOT/archive_format                           "pt2"
    ROOT/data/weights/MODEL_weights_config.json   name -> {"path_name", "is_param", "use_pickle", "tensor_meta"}
    ROOT/data/weights/weight_N                    the bytes of a storage, or a pickle ("use_pickle", refused)

One model is a state dict, several are one state dict each under their names. Loading one evaluates texts in it: `scan` looks at
them. Source: torch/export/pt2_archive/_package.py, torch/_export/serde/schema.py, serialize.py.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from ckpt_tools.errors import TWO_FILES, CkptError, DamagedFileError, TensorError, UnsupportedContainerError
from ckpt_tools.formats import torch_zip
from ckpt_tools.formats.base import PROGRAMS, program, unique
from ckpt_tools.formats.checkpoint import Checkpoint
from ckpt_tools.formats.zip_directory import Directory, Record, read_record, record_content
from ckpt_tools.io.output import Source
from ckpt_tools.io.parsers import load_json
from ckpt_tools.pickling import verdict
from ckpt_tools.pickling.calls import Call
from ckpt_tools.pickling.torch_objects import META, on_meta
from ckpt_tools.text import some
from ckpt_tools.tree.dtypes import DTYPES
from ckpt_tools.tree.nodes import Dict, Entry, Global, Node, Storage, check

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
    decoded.warnings.append(program("torch-export", f"the graph of {called}", constants))
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
