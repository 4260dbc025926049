"""An adapter: opened, and its tensors sorted by the modules that they change. Reads no tensor but the scalars called alpha."""

from __future__ import annotations

import os
import struct
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from ckpt_tools.edit.casts import to_little_endian
from ckpt_tools.edit.lora.config import CONFIG, Config, check_kind, parse, read_config
from ckpt_tools.edit.lora.names import Part, Role, is_factor, read_name
from ckpt_tools.errors import ConvertError, MissingFileError, NotACheckpointError
from ckpt_tools.formats.checkpoint import Checkpoint
from ckpt_tools.formats.contents import find_state_dicts, tensors_by_name
from ckpt_tools.io.content import read
from ckpt_tools.io.output import is_address
from ckpt_tools.io.parsers import load_json
from ckpt_tools.parts.open import open_checkpoint, open_source
from ckpt_tools.text import listed, some
from ckpt_tools.tree.dtypes import DType
from ckpt_tools.tree.nodes import Entry, Node, as_dict
from ckpt_tools.values.numeric import row_major

FILES = ("adapter_model.safetensors", "adapter_model.bin", "pytorch_lora_weights.safetensors", "pytorch_lora_weights.bin")
_HEADER = "lora_adapter_metadata"  # diffusers' text in a safetensors header: the configurations of all components
_DTYPES = ("float32", "float16", "bfloat16", "float64")
_SCALARS = {"float64": "<d", "float32": "<f", "float16": "<e", "int64": "<q", "int32": "<i", "int16": "<h", "uint8": "<B"}


@dataclass(frozen=True, slots=True, eq=False)
class Change:
    """What an adapter does to one module."""

    module: str
    component: str
    flat: bool
    down: Entry
    up: Entry
    scale: float
    embedding: bool = False
    inner: bool = False
    magnitude: Entry | None = None
    bias: Entry | None = None
    mid: Entry | None = None
    base: Entry | None = None
    config: Config = field(default_factory=Config)
    parameters: Sequence[str] = ()  # of the module, which the factors may be for by `target_parameters`
    experts: int = 1
    grouped: bool = False  # NeMo's: [in, out] whatever the version, and it says its experts

    @property
    def rank(self) -> int:
        return self.down.shape[0] // self.experts


@dataclass(frozen=True, slots=True, eq=False)
class Difference:
    """What is added as it is to the weight or the bias of a module."""

    module: str
    component: str
    flat: bool
    ending: str
    entry: Entry


@dataclass(slots=True, eq=False)
class Adapter:
    """An adapter's tensors, sorted."""

    path: Path
    config: Config | None
    version: tuple[int, int] = (0, 0)
    tensors: Mapping[str, Entry] = field(default_factory=dict)
    changes: list[Change] = field(default_factory=list)
    differences: list[Difference] = field(default_factory=list)
    saved: dict[str, Entry] = field(default_factory=dict)


@contextmanager
def opened(path: str | os.PathLike[str]) -> Iterator[Adapter]:
    """An adapter, open while its tensors are read; that it has not changed is checked at the end."""
    with open_checkpoint(file_of(path)) as checkpoint:
        yield read_adapter(checkpoint)
        checkpoint.source.check_unchanged()


def file_of(path: str | os.PathLike[str]) -> str | os.PathLike[str]:
    """The file of an adapter's tensors, which may be named by its folder."""
    if is_address(path):
        return path if Path(path).suffix else _remote_file(os.fspath(path).rstrip("/"))
    if not os.path.isdir(path):
        return path
    for name in FILES:
        if os.path.isfile(found := Path(path) / name):
            return found
    raise _no_adapter(path)


def _remote_file(folder: str) -> str:
    for name in FILES:
        try:
            open_source(f"{folder}/{name}").close()
        except MissingFileError:
            continue
        return f"{folder}/{name}"
    raise _no_adapter(folder)


def _no_adapter(path: str | os.PathLike[str]) -> NotACheckpointError:
    return NotACheckpointError(f"{path} is a folder without an adapter.", why=f"None of {', '.join(FILES)} is in it.")


def read_adapter(checkpoint: Checkpoint) -> Adapter:
    path = str(checkpoint.path)
    tensors = _tensors(checkpoint)
    parts = {name: read_name(name) for name in tensors}
    configs = _configs(checkpoint, [part.module for part in parts.values() if part.role == "down"])
    config = configs.get("")
    adapter = Adapter(checkpoint.path, config, config.version if config is not None else (0, 0))
    adapter.tensors = {name: _entry(node, name, path) for name, node in tensors.items()}
    for name, part in parts.items():
        if part.role is None:
            _check_plain(name, path)
            adapter.saved[part.module] = _entry(tensors[name], name, path)
    flats = {(part.component, part.module, part.wrapped): part for part in parts.values()}
    for key, roles in _by_module(tensors, parts, path).items():
        if roles.keys() == {"base"}:  # of a module that is not changed: its own weight
            adapter.saved[f"{key[1]}.weight"] = roles["base"][1]
            continue
        if "grouped_down" in roles or "grouped_up" in roles:
            config = _config_of(flats[key], configs, roles, path)
            adapter.changes.append(_grouped(flats[key], roles, config, parts.values(), path))
            continue
        differences = [*_differences(flats[key], roles, path)]
        adapter.differences += differences
        if differences and roles.keys() <= {"alpha"}:
            continue
        adapter.changes.append(_change(flats[key], roles, _config_of(flats[key], configs, roles, path), path))
    _check_chains(adapter.changes, path)
    if not (adapter.changes or adapter.differences):
        raise ConvertError(
            f"{path} holds no LoRA: none of its {len(tensors)} tensors is called lora_A, lora_down or the like.",
            why=f"It has {some(list(tensors))}." if tensors else "",
        )
    return adapter


def _differences(part: Part, roles: dict[Role, tuple[str, Entry]], path: str) -> Iterator[Difference]:
    """What is added as it is to a module, taken out of its parts."""
    if "difference" in roles and "down" in roles:
        raise ConvertError(f"{path} has both low-rank matrices and a full difference for {part.module!r}.")
    endings: tuple[tuple[Role, str], ...] = (("difference", "weight"), ("bias_difference", "bias"))
    for role, ending in endings:
        if role in roles:
            name, entry = roles.pop(role)
            _check_float(name, entry, path)
            yield Difference(part.module, part.component, part.flat, ending, entry)


def _check_float(name: str, entry: Entry, path: str) -> None:
    if entry.dtype.name not in _DTYPES:
        raise ConvertError(f"{path}: {name!r} is {entry.dtype.name}; an adapter is float32, float16, bfloat16 or float64.")


def _by_module(
    tensors: Mapping[str, Node], parts: Mapping[str, Part], path: str
) -> dict[tuple[str, str, int], dict[Role, tuple[str, Entry]]]:
    modules: dict[tuple[str, str, int], dict[Role, tuple[str, Entry]]] = {}
    for name, part in parts.items():
        if part.role is None:
            continue
        roles = modules.setdefault((part.component, part.module, part.wrapped), {})
        if part.role in roles:
            raise ConvertError(f"{path} has two tensors for one part of {part.module!r}: {roles[part.role][0]!r} and {name!r}.")
        roles[part.role] = name, _entry(tensors[name], name, path)
    return modules


def _tensors(checkpoint: Checkpoint) -> dict[str, Node]:
    checkpoint.locate()
    root = to_little_endian(checkpoint.root, checkpoint.byteorder)
    found = find_state_dicts(root)
    if len(found) != 1:
        raise ConvertError(f"{checkpoint.path} holds {len(found)} state dicts; an adapter is one.")
    return dict(tensors_by_name(as_dict(found[0].node)))


def _entry(node: Node, name: str, path: str) -> Entry:
    if type(node) is not Entry:
        raise ConvertError(f"{path}: {name!r} is a sparse or quantised tensor, which an adapter cannot have.")
    return node


def _check_plain(name: str, path: str) -> None:
    if is_factor(name):
        raise ConvertError(
            f"{path}: {name!r} is not a part of a LoRA.",
            why="LoHa, LoKr, OFT, VeRA and others change a module in another way, which is not merged here.",
            fix="Merge the adapter where it was trained.",
        )


def _configs(checkpoint: Checkpoint, modules: list[str]) -> dict[str, Config]:
    """The configurations by component: PEFT's beside the file for all, or those in the header."""
    path = checkpoint.path
    said = read_config(path) if checkpoint.packed is None else None
    if said is not None:
        return {"": check_kind(said, str(path), modules)}
    header = checkpoint.metadata.get(_HEADER)
    if header is None:
        return {}
    try:
        told = load_json(header)
    except ValueError as error:
        raise ConvertError(f"{path}: {_HEADER} in its header is not JSON.", why=f"{error}.") from None
    by_component: dict[str, dict[str, Any]] = {}
    for key, value in told.items() if isinstance(told, dict) else ():
        component, _, field_name = key.rpartition(".")
        by_component.setdefault(component, {})[field_name] = value
    return {
        component: check_kind({"peft_type": "LORA", **values}, str(path), modules, among=len(by_component))
        for component, values in by_component.items()
        if "lora_alpha" in values
    }


def _config_of(part: Part, configs: Mapping[str, Config], roles: Mapping[Role, object], path: str) -> Config:
    """What is said of a module. Without a configuration `alpha` says the scale, and without that it is 1, as in diffusers."""
    config = configs.get("") or configs.get(part.component)
    if config is not None and config.alpha is not None:
        return config
    if (part.peft and "alpha" not in roles) or "grouped_down" in roles:
        raise ConvertError(
            f"{path} has no {CONFIG} beside it, so the scale of its changes is not known.",
            why="PEFT keeps lora_alpha there, not with the tensors.",
            fix=f"Put the adapter's {CONFIG} into the same folder.",
        )
    return config or parse({}, path)


def _change(part: Part, roles: dict[Role, tuple[str, Entry]], config: Config, path: str) -> Change:
    embedding = "embedding_down" in roles or "embedding_up" in roles
    down, up = (roles.get("embedding_down"), roles.get("embedding_up")) if embedding else (roles.get("down"), roles.get("up"))
    if down is None or up is None:
        shown = listed([name for name, _ in roles.values()])
        raise ConvertError(f"{path} has one factor of {part.module!r} and not the other: {shown}.")
    for name, entry in roles.values():
        if not name.endswith((".alpha", ".base_layer.weight")):
            _check_float(name, entry, path)
    rank = _rank(down, up, roles.get("mid"), path)
    parameters = config.parameters_of(part.module)
    if config.rank is not None and not config.rank_pattern and not parameters and config.rank != rank:
        raise ConvertError(f"{path}: {down[0]!r} is of rank {rank}; {CONFIG} says {config.rank}.")
    _check_whole(part, roles, config, path)
    magnitude = roles.get("magnitude")
    if (
        magnitude is not None
        and magnitude[0].endswith(".dora_scale")
        and magnitude[1].shape[:1] == (1,) != magnitude[1].shape[1:2]
    ):
        raise ConvertError(
            f"{path}: {magnitude[0]!r} is {list(magnitude[1].shape)}, a magnitude for each column, which is not merged here."
        )
    extra = {role: roles[role][1] for role in ("magnitude", "bias", "mid", "base") if role in roles}
    if part.wrapped > 1 and not parameters:
        raise ConvertError(
            f"{path}: {down[0]!r} is of a parameter, and target_parameters in {CONFIG} names none of {part.module!r}."
        )
    scale = _scale(part, roles, config, rank)
    return Change(
        part.module, part.component, part.flat, down[1], up[1], scale, embedding, part.wrapped > 0, extra.get("magnitude"),
        extra.get("bias"), extra.get("mid"), extra.get("base"), config, parameters,
    )  # fmt: skip


def _grouped(
    part: Part, roles: dict[Role, tuple[str, Entry]], config: Config, parts: Iterable[Part], path: str
) -> Change:  # fmt: skip
    """NeMo's factors [experts, in, rank] and [experts, rank, out], laid out as PEFT has those of a parameter."""
    module = part.module.rpartition(".")[0]
    (down, a), (up, b) = (roles.get(role, ("", None)) for role in ("grouped_down", "grouped_up"))
    if (
        a is None
        or b is None
        or not a.numel
        or len(a.shape) != 3
        or (a.shape[0], a.shape[2]) != b.shape[:2]
        or len(b.shape) != 3
    ):
        shapes = listed([f"{name!r} {list(entry.shape)}" for name, entry in roles.values()])
        raise ConvertError(
            f"{path}: the matrices of {part.module!r} do not multiply: {shapes}.",
            why="One is [experts, in, rank], the other [experts, rank, out].",
        )
    _check_float(down, a, path)
    _check_float(up, b, path)
    _check_whole(part, roles, config, path)
    experts, into, rank = a.shape
    beside = {one.module for one in parts if one.role == "grouped_down"}
    return Change(
        module, part.component, part.flat, _laid_out(a, (0, 2, 1), (experts * rank, into)),
        _laid_out(b, (2, 1, 0), (b.shape[2], rank * experts)), _scale(part, roles, config, rank), config=config,
        parameters=[one for one in ("gate_up_proj", "down_proj") if f"{module}.{one}" in beside], experts=experts,
        grouped=True,
    )  # fmt: skip


def _laid_out(entry: Entry, order: Sequence[int], shape: tuple[int, ...]) -> Entry:
    """A tensor with its dimensions in another order, as a matrix."""
    view = replace(entry, shape=tuple(entry.shape[at] for at in order), stride=tuple(entry.stride[at] for at in order))
    storage = replace(entry.storage, nbytes=entry.nbytes, content=row_major(view))
    return replace(entry, storage=storage, shape=shape, stride=(shape[1], 1), offset=0)


def _check_chains(changes: Sequence[Change], path: str) -> None:
    """Raise ConvertError for several changes of one module that are not of as many parameters."""
    for (_, module), count in Counter((change.component, change.module) for change in changes).items():
        if count > 1 and count > (named := max(len(change.parameters) for change in changes if change.module == module)):
            raise ConvertError(
                f"{path} has factors of {count} parameters of {module!r}; target_parameters in {CONFIG} names {named}."
            )


def _check_whole(part: Part, roles: Mapping[Role, object], config: Config, path: str) -> None:
    """Raise ConvertError for a module without what the configuration says of all, or with what it denies."""
    for key, said, role, what in (
        ("use_dora", config.dora, "magnitude", "magnitudes"),
        ("lora_bias", config.biases, "bias", "bias"),
    ):
        if said is not None and said is not (role in roles):
            raise ConvertError(
                f"{path}: {key} is {str(said).lower()} in {CONFIG}, and {part.module!r} has {'no' if said else 'its'} {what}.",
                why="One of the two is not whole, or of another adapter.",
            )


def _rank(down: tuple[str, Entry], up: tuple[str, Entry], mid: tuple[str, Entry] | None, path: str) -> int:
    shapes = f"{list(down[1].shape)} and {list(up[1].shape)}"
    if len(down[1].shape) < 2 or len(up[1].shape) < 2 or down[1].shape[0] != up[1].shape[1] or not down[1].shape[0]:
        raise ConvertError(
            f"{path}: {down[0]!r} and {up[0]!r} do not multiply: {shapes}.",
            why="One is [rank, in], the other [out, rank], and the rank is 1 or more. "
            "Factors without elements were saved by one process of many (ZeRO-3, FSDP).",
        )  # fmt: skip
    rank = down[1].shape[0]
    if any(size != 1 for size in up[1].shape[2:]):
        raise ConvertError(f"{path}: {up[0]!r} has a kernel, {list(up[1].shape)}; only the first factor may have one.")
    if mid is not None and mid[1].shape[:2] != (rank, rank):
        raise ConvertError(f"{path}: {mid[0]!r} is {list(mid[1].shape)}; between factors of rank {rank} it begins so.")
    return rank


def _scale(part: Part, roles: Mapping[Role, tuple[str, Entry]], config: Config, rank: int) -> float:
    if "alpha" in roles:
        name, entry = roles["alpha"]
        value = _scalar(entry, name)
        return value / rank
    return 1.0 if config.alpha is None else config.scale(part.module, rank)


def _scalar(entry: Entry, name: str) -> float:
    """The value of a tensor of one number, read without torch."""
    value = _number(read(row_major(entry)), entry.dtype) if entry.numel == 1 else None
    if value is None or not abs(value) < float("inf"):
        raise ConvertError(f"{name!r} is not one finite number, which alpha is.")
    return value


def _number(data: bytes, dtype: DType) -> float | None:
    if dtype.name == "bfloat16":
        return float(struct.unpack("<f", b"\0\0" + data)[0])
    code = _SCALARS.get(dtype.name)
    return None if code is None else float(struct.unpack(code, data)[0])
