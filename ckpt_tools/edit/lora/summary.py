"""What an adapter is, told by its names, shapes and configuration; no tensor is read."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable
from contextlib import suppress
from typing import Any

from ckpt_tools.edit.lora.adapter import as_matrices
from ckpt_tools.edit.lora.config import CONFIG, Config, check_kind, parse, read_config
from ckpt_tools.edit.lora.names import PEFT_PREFIX, Part, is_factor, read_name
from ckpt_tools.errors import CkptError
from ckpt_tools.formats.checkpoint import Checkpoint
from ckpt_tools.formats.contents import tensors_by_name
from ckpt_tools.tree.nodes import Entry

_NUMBERED = re.compile(r".*_\d+_(?=.)")  # of a name with underscores for dots: what comes before the last words
_KINDS = {"LORA": "LoRA", "LOHA": "LoHa", "LOKR": "LoKr", "ADALORA": "AdaLoRA", "VERA": "VeRA"}


def summary(checkpoint: Checkpoint) -> dict[str, Any] | None:
    """What an adapter is; None for a checkpoint that is not one."""
    if len(checkpoint.state_dicts) != 1:
        return None
    tensors = tensors_by_name(checkpoint.state_dicts[0].node)
    parts = {name: read_name(name) for name in tensors}
    modules: dict[tuple[str, str, int], dict[str, Entry]] = {}
    for name, part in parts.items():
        if part.role is not None and type(entry := tensors[name]) is Entry:
            modules.setdefault((part.component, part.module, part.wrapped), {})[part.role] = entry
    found = {key: pair for key, roles in modules.items() if (pair := _pair(roles)) is not None}
    pairs = list(found.values())
    alone = [name for name, part in parts.items() if part.role is None]
    if not pairs and not (alone and all(name.startswith(PEFT_PREFIX) for name in tensors) and any(map(is_factor, alone))):
        return None
    kind, config, problem = _said(checkpoint, list(parts.values()))
    if kind == "LoRA" and any("magnitude" in roles for roles in modules.values()):
        kind = "DoRA"
    rows: dict[str, list[int]] = {}
    for (_, module, _), (down, _) in found.items():
        rows.setdefault(module, []).append(down.shape[0])
    ranks = [
        modules[key]["grouped_down"].shape[2] if "grouped_down" in modules[key]
        else _rank(config, key[1], down.shape[0], rows[key[1]], problem) for key, (down, _) in found.items()
    ]  # fmt: skip
    experts = sorted({down.shape[0] // rank for (down, _), rank in zip(pairs, ranks, strict=True)} - {1})
    elements = [
        up.shape[0] * (down.numel // down.shape[0]) * (down.shape[0] // rank)
        for (down, up), rank in zip(pairs, ranks, strict=True)
    ]
    return {
        "kind": kind, "names": _whose(parts.values()), "modules": len(pairs), "targets": _targets(parts.values()),
        "ranks": {str(rank): count for rank, count in sorted(Counter(ranks).items())},
        "experts": experts, "alpha": config.alpha, "rslora": config.rslora, "elements": sum(elements),
        "delta_bytes": sum(count * up.dtype.itemsize for count, (_, up) in zip(elements, pairs, strict=True)),
        "saved": [parts[name].module for name in alone if not is_factor(name)], "base": config.base, "problem": problem,
    }  # fmt: skip


def _rank(config: Config, module: str, rows: int, beside: list[int], problem: str | None) -> int:
    """The rank of a pair of factors: one of a parameter has the rows of all experts, as many as those beside it."""
    said = {config.rank_of(f"{module}.{name}") for name in config.parameters_of(module)} if problem is None else set()
    experts = [{one // rank for rank in said if rank and one % rank == 0} for one in beside]
    common = set.intersection(*experts)
    return rows // common.pop() if len(common) == 1 else rows


def _pair(roles: dict[str, Entry]) -> tuple[Entry, Entry] | None:
    if "grouped_down" in roles and "grouped_up" in roles:
        return as_matrices(roles["grouped_down"], roles["grouped_up"])
    down, up = roles.get("down", roles.get("embedding_down")), roles.get("up", roles.get("embedding_up"))
    if down is None or up is None or min(len(down.shape), len(up.shape)) < 2:
        return None
    return (down, up) if down.shape[0] == up.shape[1] > 0 else None


def _said(checkpoint: Checkpoint, parts: list[Part]) -> tuple[str, Config, str | None]:
    """The kind of adapter, what its configuration says, and why it cannot be merged, if that is so."""
    path, kind, config = checkpoint.path, "LoRA", Config()
    if checkpoint.packed is not None:
        return kind, config, None
    try:
        said = read_config(path)
        if said is None:
            missing = _whose(parts) == "PEFT" and not any(part.role == "alpha" for part in parts)
            problem = f"the scale of its changes is in its {CONFIG}, which is not beside it" if missing else None
            return kind, config, problem
        peft = str(said.get("peft_type"))[:40]
        kind = _KINDS.get(peft, peft)
        with suppress(CkptError):
            config = parse(said, str(path))
        return kind, check_kind(said, str(path), [part.module for part in parts if part.role == "down"]), None
    except CkptError as error:
        return kind, config, error.what


def _whose(parts: Iterable[Part]) -> str:
    found = Counter("PEFT" if part.peft else "kohya" if part.flat else "diffusers" for part in parts if part.role is not None)
    return found.most_common(1)[0][0] if found else "PEFT"


def _targets(parts: Iterable[Part]) -> dict[str, int]:
    last = ("up", "embedding_up", "grouped_up")
    modules = dict.fromkeys((part.component, part.module, part.flat) for part in parts if part.role in last)
    names = (_NUMBERED.sub("", module) if flat else module.rpartition(".")[2] for _, module, flat in modules)
    return dict(Counter(names))
