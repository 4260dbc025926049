"""What Megatron-LM's names tell: how a tensor is cut, which layer and which expert of its rank it is."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from ckpt_tools.errors import PartError
from ckpt_tools.tree.nodes import Dict, Entry, Node
from ckpt_tools.tree.visit import walk

_LAYER = re.compile(r"((?:module\.)*(?:language_model\.)?(?:decoder|encoder|transformer)\.layers)\.(\d{1,6})\.(.+)")
_EXPERT = re.compile(r"(.*\.experts\.(?:local_experts\.|linear_fc[12]\.(?:weight|bias)))(\d{1,6})(\..+)?")
_GROUPED = re.compile(r".*\.experts\.weight[12]")
_COLUMNS = frozenset((
    "word_embeddings", "word_embeddings_for_head", "output_layer", "linear_qkv", "query_key_value", "linear_q", "linear_kv",
    "query", "key_value", "linear_q_proj", "linear_q_up_proj", "linear_kv_up_proj", "linear_fc1", "dense_h_to_4h",
))  # fmt: skip
_ROWS = frozenset(("linear_proj", "linear_fc2", "dense_4h_to_h"))
_GATED = {"linear_fc1": "linear_fc2", "dense_h_to_4h": "dense_4h_to_h"}
_WHOLE = re.compile(
    r"norm|router|position_embeddings|tokentype_embeddings|rotary_pos_emb|gate_weight|expert_bias", re.IGNORECASE
)


@dataclass(slots=True)
class Chunk:
    """The tensors of one virtual stage on one rank."""

    tensors: dict[str, Entry] = field(default_factory=dict)
    layers: dict[str, int] = field(default_factory=dict)
    experts: int = 0
    left_out: int = 0


def chunk_of(what: str, node: Node) -> Chunk:
    """The tensors below a model's state dict, nested or flat."""
    found = Chunk()
    layers: dict[str, set[int]] = {}
    experts: dict[str, set[int]] = {}
    for where, value in walk(node, stop=lambda part: type(part) is Entry) if type(node) is Dict else ():
        name = ".".join(map(str, where))
        if type(value) is not Entry or "_extra_state" in name:
            found.left_out += type(value) not in (Dict,) and "_extra_state" in name
            continue
        if name in found.tensors or _GROUPED.fullmatch(name):
            raise PartError(f"{what} has {name!r} twice, or as the matrix of all experts, which is not read.")
        found.tensors[name] = value
        if match := _LAYER.fullmatch(name):
            layers.setdefault(match[1], set()).add(int(match[2]))
        if match := _EXPERT.fullmatch(name):
            experts.setdefault(f"{match[1]}{match[3]}", set()).add(int(match[2]))
    for kind, numbers in (*layers.items(), *experts.items()):
        if max(numbers) + 1 != len(numbers):
            raise PartError(f"{what}: the numbers below {kind!r} have a gap.", why="Tensors are missing in it.")
    found.layers = {kind: len(numbers) for kind, numbers in layers.items()}
    counts = {len(numbers) for numbers in experts.values()}
    if len(counts) > 1 or not found.tensors:
        raise PartError(f"{what} holds no tensors, or different numbers of experts in its layers.")
    found.experts = counts.pop() if counts else 0
    return found


def with_offsets(chunk: Chunk, layers: Mapping[str, int], expert_rank: int, tied: bool) -> Iterator[tuple[str, Entry]]:
    """The tensors under their names in the whole model."""
    for name, entry in chunk.tensors.items():
        whole = name
        if match := _LAYER.fullmatch(whole):
            whole = f"{match[1]}.{int(match[2]) + layers.get(match[1], 0)}.{match[3]}"
        if match := _EXPERT.fullmatch(whole):
            whole = f"{match[1]}{int(match[2]) + expert_rank * chunk.experts}{match[3] or ''}"
        yield (_embedding(whole) if tied else whole), entry


def _embedding(name: str) -> str:
    """The embedding, for the name of its copy on the last stage."""
    head, _, last = name.rpartition("output_layer.weight")
    if not last and name.endswith("output_layer.weight"):
        return f"{head}embedding.word_embeddings.weight"
    head, _, last = name.rpartition("word_embeddings_for_head.weight")
    return f"{head}embedding.word_embeddings.weight" if not last and name.endswith("word_embeddings_for_head.weight") else name


def is_expert(name: str) -> bool:
    """Whether a tensor is one expert's, which one rank of expert parallelism has."""
    return _EXPERT.fullmatch(name) is not None


@dataclass(frozen=True, slots=True)
class Cut:
    """Along which dimension a tensor is cut, and of how many that are cut by themselves it consists."""

    axis: int
    pieces: int = 1


def axis_of(name: str, held: Sequence[Entry], other: Callable[[str], Entry | None], version: float) -> Cut | None:
    """How tensor parallelism cut a tensor; None where every rank has it whole."""
    plain = re.sub(r"((?:weight|bias))\d+$", r"\1", name)
    module, _, role = plain.rpartition(".")
    parent, _, kind = re.sub(r"\.local_experts\.\d+", "", module).rpartition(".")
    if _WHOLE.search(kind) or _WHOLE.search(role):
        return None
    if kind in _COLUMNS and role in ("weight", "bias"):
        if kind in _GATED:
            return Cut(0, 2 if _is_gated(name, held[0], kind, other) else 1)
        return Cut(0, 3 if kind == "query_key_value" and version < 1 else 1)
    if kind in _ROWS or (kind == "dense" and parent.endswith("attention")):
        return Cut(1) if role == "weight" else None
    raise PartError(f"Nothing says how {name!r} was cut: it is {list(held[0].shape)} on each of {len(held)} ranks.")


def _is_gated(name: str, part: Entry, kind: str, other: Callable[[str], Entry | None]) -> bool:
    """Whether the MLP's first matrix is two, a gate and the rest: it has twice the rows then that the second has columns."""
    second = other(re.sub(r"bias(\d*)$", r"weight\1", name).replace(kind, _GATED[kind]))
    rows, columns = part.shape[0] if part.shape else 0, second.shape[1] if second is not None and len(second.shape) == 2 else -1
    if rows not in (columns, 2 * columns):
        raise PartError(f"{name!r} has {rows} rows on a rank, and the matrix behind it {columns} columns: they do not fit.")
    return rows == 2 * columns
