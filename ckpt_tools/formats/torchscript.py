"""torchscript: what `torch.jit.save` writes, a program with its parameters. The program is never run, nor kept by convert.

`data.pkl` has the module, `code/` its classes, which say what is a parameter or a buffer. It becomes the record of an
`nn.Module`. Source: torch/csrc/jit/serialization/pickler.cpp, import_source.cpp.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass

from ckpt_tools import limits
from ckpt_tools.errors import TWO_FILES, DamagedFileError, TensorError, UnsupportedContainerError
from ckpt_tools.formats import torch_zip
from ckpt_tools.formats.base import Warned, program
from ckpt_tools.formats.checkpoint import Checkpoint
from ckpt_tools.formats.zip_directory import Directory, Record, read_record
from ckpt_tools.io.output import Source
from ckpt_tools.pickling.torch_objects import Storages
from ckpt_tools.text import some
from ckpt_tools.tree.dtypes import BY_STORAGE, DTYPES
from ckpt_tools.tree.modules import SAVED
from ckpt_tools.tree.nodes import Build, Dict, Global, List, Node, Object, Pair, Storage
from ckpt_tools.tree.visit import parts, reachable

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


def decode(source: Source, directory: Directory, folder: str) -> Checkpoint:
    """Read a program's module tree; no tensor bytes, and the code only for the names of its parameters."""
    records = torch_zip.by_name(directory)
    if f"{folder}/model.json" in records:
        raise UnsupportedContainerError(
            "This is a TorchScript program of PyTorch 1.0 or 1.1 (model.json), which is not read.",
            fix="Load it with torch.jit.load of PyTorch 1.4, and save the state dict of what that gives.",
        )
    if f"{folder}/data.pkl" not in records:
        raise DamagedFileError("The TorchScript program has no data.pkl.", why="Its modules and parameters would be in there.")
    decoded = torch_zip.decode(source, directory, folder, storages_of=_Storages)
    decoded.byteorder = "little"  # torch.jit.load takes the elements as they lie, whatever the record says
    decoded.warnings += _as_modules(decoded.root, _declared(source, records, folder))
    decoded.container = "torchscript"
    decoded.warnings = [warned for warned in decoded.warnings if not warned.code.startswith("odd-")]
    files = [name for name in records if name.startswith(f"{folder}/code/") and name.endswith(".py")]
    constants = [row for name, row in records.items() if name.startswith(f"{folder}/constants/")]
    decoded.warnings.append(program("torchscript", f"{len(files)} code files", constants))
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
