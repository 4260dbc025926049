"""An adapter: opened, and its tensors sorted by the modules that they change. Reads no tensor but the scalars called alpha."""

from __future__ import annotations

import math
import os
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from ckpt_tools.edit.casts import to_little_endian
from ckpt_tools.edit.lora.config import CONFIG, Config, check_kind, read_config
from ckpt_tools.edit.lora.names import Part, is_factor, read_name
from ckpt_tools.edit.selection import only_state_dict
from ckpt_tools.errors import ConvertError, MissingFileError, NotACheckpointError
from ckpt_tools.formats.checkpoint import Checkpoint
from ckpt_tools.formats.contents import tensors_by_name
from ckpt_tools.io.content import read
from ckpt_tools.io.parsers import load_json
from ckpt_tools.io.source import is_address
from ckpt_tools.parts.open import open_checkpoint, open_source
from ckpt_tools.text import listed, some
from ckpt_tools.tree.nodes import Entry, stored
from ckpt_tools.values.low_rank import Matrix
from ckpt_tools.values.numeric import exact, row_major

FILES = ("adapter_model.safetensors", "adapter_model.bin", "pytorch_lora_weights.safetensors", "pytorch_lora_weights.bin")
_HEADER = "lora_adapter_metadata"  # diffusers' text in a safetensors header: the configurations of all components
DTYPES = ("float32", "float16", "bfloat16", "float64")
_SCALARS = (*DTYPES, "int64", "int32", "int16", "uint8")
_Roles = dict[str, tuple[str, Entry]]


@dataclass(frozen=True, slots=True, eq=False)
class Change:
    module: str
    component: str
    flat: bool
    down: Matrix
    up: Matrix
    scale: float
    embedding: bool = False
    inner: bool = False
    magnitude: Matrix | None = None
    bias: Entry | None = None
    mid: Matrix | None = None
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
    path: Path
    config: Config
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
    if Path(path).suffix if is_address(path) else not os.path.isdir(path):
        return path
    folder = os.fspath(path).rstrip("/")
    for name in FILES:
        with suppress(MissingFileError):
            open_source(f"{folder}/{name}").close()
            return f"{folder}/{name}"
    found = [] if is_address(path) else [file for name in FILES for file in sorted(Path(folder).glob(f"*/{name}"))]
    fix = f"Name the folder that has one: {listed([file.parent for file in found])}." if found else ""
    raise NotACheckpointError(f"{path} is a folder without an adapter.", why=f"None of {', '.join(FILES)} is in it.", fix=fix)


def read_adapter(checkpoint: Checkpoint) -> Adapter:
    path = str(checkpoint.path)
    tensors = _tensors(checkpoint)
    parts = {name: read_name(name) for name in tensors}
    configs = _configs(checkpoint, [part.module for part in parts.values() if part.role == "down"])
    adapter = Adapter(checkpoint.path, configs.get("", Config()), tensors)
    modules: dict[tuple[str, str, int], tuple[Part, _Roles]] = {}
    for name, part in parts.items():
        if part.role is None:
            if is_factor(name):
                raise ConvertError(
                    f"{path}: {name!r} is not a part of a LoRA.",
                    why="LoHa, LoKr, OFT, VeRA and others change a module in another way, which is not merged here.",
                    fix="Merge the adapter where it was trained.",
                )
            adapter.saved[part.module] = tensors[name]
            continue
        _, roles = modules.setdefault((part.component, part.module, part.wrapped), (part, {}))
        if part.role in roles:
            raise ConvertError(f"{path} has two tensors for one part of {part.module!r}: {roles[part.role][0]!r} and {name!r}.")
        if part.role not in ("alpha", "base") and (dtype := tensors[name].dtype.name) not in DTYPES:
            raise ConvertError(f"{path}: {name!r} is {dtype}; an adapter is float32, float16, bfloat16 or float64.")
        roles[part.role] = name, tensors[name]
    grouped = {part.module for part, roles in modules.values() if "grouped_down" in roles}
    for part, roles in modules.values():
        if roles.keys() == {"base"}:  # of a module that is not changed: its own weight
            adapter.saved[f"{part.module}.weight"] = roles["base"][1]
            continue
        differences = [*_differences(part, roles, path)]
        adapter.differences += differences
        if not differences or roles.keys() - {"alpha"}:
            adapter.changes.append(_change(part, roles, _config_of(part, configs, roles, path), grouped, path))
    if not (adapter.changes or adapter.differences):
        raise ConvertError(
            f"{path} holds no LoRA: none of its {len(tensors)} tensors is called lora_A, lora_down or the like.",
            why=f"It has {some(list(tensors))}." if tensors else "",
        )
    return adapter


def _differences(part: Part, roles: _Roles, path: str) -> Iterator[Difference]:
    """What is added as it is to a module, taken out of its parts."""
    if "difference" in roles and "down" in roles:
        raise ConvertError(f"{path} has both low-rank matrices and a full difference for {part.module!r}.")
    if "difference" in roles:
        yield Difference(part.module, part.component, part.flat, "weight", roles.pop("difference")[1])
    if "bias_difference" in roles:
        yield Difference(part.module, part.component, part.flat, "bias", roles.pop("bias_difference")[1])


def _tensors(checkpoint: Checkpoint) -> dict[str, Entry]:
    checkpoint.locate()
    nodes = tensors_by_name(only_state_dict(to_little_endian(checkpoint.root, checkpoint.byteorder), str(checkpoint.path)))
    tensors = {name: node for name, node in nodes.items() if type(node) is Entry}
    if other := [name for name in nodes if name not in tensors]:
        raise ConvertError(f"{checkpoint.path}: {other[0]!r} is a sparse or quantised tensor, which an adapter cannot have.")
    return tensors


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


def _config_of(part: Part, configs: Mapping[str, Config], roles: _Roles, path: str) -> Config:
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
    return config or Config()


def _change(part: Part, roles: _Roles, config: Config, all_grouped: Collection[str], path: str) -> Change:
    kinds = [("grouped_down", "grouped_up"), ("embedding_down", "embedding_up"), ("down", "up")]
    kind = next((kind for kind in kinds if not roles.keys().isdisjoint(kind)), kinds[-1])
    down, up = map(roles.get, kind)
    if down is None or up is None:
        shown = listed([name for name, _ in roles.values()])
        raise ConvertError(f"{path} has one factor of {part.module!r} and not the other: {shown}.")
    rows = (("use_dora", config.dora, "magnitude", "magnitudes"), ("lora_bias", config.biases, "bias", "bias"))
    for key, said, role, what in rows:
        if said is not None and said is not (role in roles):
            raise ConvertError(
                f"{path}: {key} is {str(said).lower()} in {CONFIG}, and {part.module!r} has {'no' if said else 'its'} {what}.",
                why="One of the two is not whole, or of another adapter.",
            )
    if kind == kinds[0]:
        found = as_matrices(down[1], up[1])
        if found is None:
            raise ConvertError(
                f"{path}: {down[0]!r} {list(down[1].shape)} and {up[0]!r} {list(up[1].shape)} do not multiply.",
                why="One is [experts, in, rank], the other [experts, rank, out].",
            )
        module, (experts, _, rank) = part.module.rpartition(".")[0], down[1].shape
        parameters = [one for one in ("gate_up_proj", "down_proj") if f"{module}.{one}" in all_grouped]
        factors = (Matrix.of(part.module, found[0]), Matrix.of(part.module, found[1]))
        return Change(module, part.component, part.flat, *factors, _scale(part, roles, config, rank), config=config,
                      parameters=parameters, experts=experts, grouped=True)  # fmt: skip
    rank = _rank(down, up, roles.get("mid"), path)
    parameters = config.parameters_of(part.module)
    if config.rank is not None and not config.rank_pattern and not parameters and config.rank != rank:
        raise ConvertError(f"{path}: {down[0]!r} is of rank {rank}; {CONFIG} says {config.rank}.")
    name, magnitude = roles.get("magnitude", ("", None))
    if magnitude is not None and name.endswith(".dora_scale") and magnitude.shape[:1] == (1,) != magnitude.shape[1:2]:
        raise ConvertError(
            f"{path}: {name!r} is {list(magnitude.shape)}, a magnitude for each column, which is not merged here."
        )
    if part.wrapped > 1 and not parameters:
        raise ConvertError(
            f"{path}: {down[0]!r} is of a parameter, and target_parameters in {CONFIG} names none of {part.module!r}."
        )
    made = {role: Matrix.of(part.module, entry) for role, (_, entry) in roles.items() if role in (*kind, "magnitude", "mid")}
    bias, base = (roles.get(role, ("", None))[1] for role in ("bias", "base"))
    return Change(
        part.module, part.component, part.flat, made[kind[0]], made[kind[1]], _scale(part, roles, config, rank),
        kind == kinds[1], part.wrapped > 0, made.get("magnitude"), bias, made.get("mid"), base, config, parameters,
    )  # fmt: skip


def as_matrices(down: Entry, up: Entry) -> tuple[Entry, Entry] | None:
    """NeMo's factors [experts, in, rank] and [experts, rank, out], laid out as PEFT has those of a parameter."""
    if not down.numel or len(down.shape) != 3 or len(up.shape) != 3 or (down.shape[0], down.shape[2]) != up.shape[:2]:
        return None
    experts, into, rank = down.shape
    return _laid_out(down, (0, 2, 1), (experts * rank, into)), _laid_out(up, (2, 1, 0), (up.shape[2], rank * experts))


def _laid_out(entry: Entry, order: Sequence[int], shape: tuple[int, ...]) -> Entry:
    view = replace(entry, shape=tuple(entry.shape[at] for at in order), stride=tuple(entry.stride[at] for at in order))
    return stored(entry.storage.key, entry.dtype, shape, row_major(view), entry.storage.device)


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


def _scale(part: Part, roles: _Roles, config: Config, rank: int) -> float:
    if "alpha" in roles:
        return _scalar(*roles["alpha"]) / rank
    return 1.0 if config.alpha is None else config.scale(part.module, rank)


def _scalar(name: str, entry: Entry) -> float:
    readable = entry.numel == 1 and entry.dtype.name in _SCALARS
    value = float(exact(bytearray(read(row_major(entry))), entry.dtype)) if readable else math.inf
    if not math.isfinite(value):
        raise ConvertError(f"{name!r} is not one finite number, which alpha is.")
    return value
