"""Ranks of model parallelism, whose names tell how they were cut: Megatron-LM's folders mp_rank_TT_PPP_EEE, Meta's Llama.

Source: Megatron-LM's megatron/training/checkpointing.py, tools/checkpoint/loader_base.py; meta-llama/llama llama/model.py."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import product
from math import prod

from ckpt_tools.errors import PartError
from ckpt_tools.formats.base import Warned
from ckpt_tools.formats.checkpoint import Checkpoint
from ckpt_tools.formats.single import decode_file
from ckpt_tools.io.sources import Files
from ckpt_tools.parts.merge import Held, Merger, Rank, check_not_twice, merged
from ckpt_tools.parts.names import MP_RANK, by_rank, check_same, check_world
from ckpt_tools.parts.partition import arguments_of
from ckpt_tools.parts.sharded import renewed
from ckpt_tools.text import listed, some
from ckpt_tools.tree.nodes import Dict, Entry, Node
from ckpt_tools.tree.visit import walk
from ckpt_tools.values.boxes import Sizes

# --- what Megatron-LM's names tell

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
    """The tensors of a virtual stage on one rank; how many layers are below each prefix, and how many experts."""

    tensors: dict[str, Entry] = field(default_factory=dict)
    layers: dict[str, int] = field(default_factory=dict)
    experts: int = 0
    left_out: int = 0


def _chunk_of(what: str, node: Node) -> Chunk:
    found = Chunk()
    layers, experts = dict[str, set[int]](), dict[str, set[int]]()  # their numbers, below a prefix
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
    if gap := [prefix for prefix, numbers in (layers | experts).items() if max(numbers) + 1 != len(numbers)]:
        raise PartError(f"{what}: the numbers below {gap[0]!r} have a gap.", why="Tensors are missing in it.")
    counts = {len(numbers) for numbers in experts.values()}
    if len(counts) > 1 or not found.tensors:
        raise PartError(f"{what} holds no tensors, or different numbers of experts in its layers.")
    found.layers = {prefix: len(numbers) for prefix, numbers in layers.items()}
    found.experts = max(counts, default=0)
    return found


def _whole_name(name: str, layers: Mapping[str, int], experts: int, tied: bool) -> str:
    """What a tensor is called in the whole model, which has so many layers and experts before it."""
    if match := _LAYER.fullmatch(name):
        name = f"{match[1]}.{int(match[2]) + layers.get(match[1], 0)}.{match[3]}"
    if match := _EXPERT.fullmatch(name):
        name = f"{match[1]}{int(match[2]) + experts}{match[3] or ''}"
    for copy in ("output_layer.weight", "word_embeddings_for_head.weight") if tied else ():
        if name.endswith(copy):
            name = f"{name.removesuffix(copy)}embedding.word_embeddings.weight"
    return name


# --- Megatron-LM: the parts

_KINDS = ("tensor", "pipeline", "expert")
_SIZES = tuple(f"{kind}_model_parallel_size" for kind in _KINDS)
_LEFT_OUT = ("optimizer", "rng_state")  # cut as the ranks are, and of no use to another number of them
_OPTIMIZER = "distrib_optim.pt"
_AGREEING = (*_SIZES, "num_layers", "num_experts", "padded_vocab_size", "swiglu")
_MODEL = re.compile(r"model(\d{0,4})")
_MOST = 100_000

Place = tuple[int, int, int]  # which rank of tensor, pipeline and expert parallelism


@dataclass(slots=True)
class _Part:
    folder: str
    place: Place
    root: Dict
    arguments: Dict
    chunks: list[Chunk]


def decode_megatron(names: Sequence[str], files: Files) -> Checkpoint:
    merger, parts, decoded = Merger(), list[_Part](), [decode_file(files.open(name)) for name in sorted(names)]
    sizes: Place = (1, 1, 1)
    for name, part in zip(sorted(names), renewed(decoded, merger.keys), strict=True):
        root, folder = part.root, name.partition("/")[0]
        state = arguments_of(root) if type(root) is Dict else None
        if type(root) is not Dict or state is None:
            raise PartError(f"{name} carries no args, so that nothing says into how many parts the model was cut.")
        sizes = _sizes(folder, state) if not parts else sizes
        models = {int(match[1] or 0): key for key in root.named if (match := _MODEL.fullmatch(key))}
        if sorted(models) != [*range(len(models))] or not models:
            raise PartError(f"{name} holds no model, or its virtual stages are not counted from 0.")
        chunks = [_chunk_of(f"{name}: {models[number]}", root.get(models[number])) for number in range(len(models))]
        parts.append(_Part(folder, _place(folder, sizes), root, state, chunks))
    _check_agreeing(parts, sizes)
    merging = _Merging(parts, sizes, merger)
    made = merged("megatron", merging.run(), files, decoded, merger, also=lambda: check_not_twice(merging.cut))
    left = [key for key in _LEFT_OUT if any(key in part.root for part in parts)]
    left += [_OPTIMIZER] if any((part.source.path.parent / _OPTIMIZER).exists() for part in decoded) else []
    if left:
        made.warnings.append(Warned("left-out", f"{listed(left)}: cut as the ranks are, not merged"))
    if extra := sum(chunk.left_out for part in parts for chunk in part.chunks):
        made.warnings.append(Warned("left-out", f"{extra} values of the model that are not tensors (_extra_state): left out"))
    made.warnings += [Warned("padded-vocabulary", merging.padding, severity="info")] if merging.padding else []
    return made


def _sizes(folder: str, arguments: Dict) -> Place:
    found = [arguments.get(kind) for kind in _SIZES]
    sizes = [size for size in (1 if size is None else size for size in found) if type(size) is int and 1 <= size <= _MOST]
    if len(sizes) != len(found):
        raise PartError(f"The args in {folder} say an impossible number of ranks: {listed(found)}.")
    if sizes[2] > 1 and arguments.get("expert_tensor_parallel_size") not in (None, sizes[0]):
        raise PartError("The experts are cut into another number of tensor parallel ranks than the rest, which is not read.")
    groups = arguments.get("num_query_groups")
    if type(groups) is int and arguments.get("group_query_attention") is not False and groups % sizes[0]:
        raise PartError(f"{groups} query groups are on {sizes[0]} tensor parallel ranks, some on several, which is not read.")
    return sizes[0], sizes[1], sizes[2]


def _place(folder: str, sizes: Place) -> Place:
    """Which rank a folder is by its name: a stage is in it where there are several, a rank of experts likewise."""
    match = re.fullmatch(MP_RANK, folder)
    assert match is not None, "callers have checked that it is a rank's"
    numbers = [int(number) for number in match.groups() if number is not None]
    rest = iter(numbers[1:])
    place = numbers[0], next(rest, -1) if sizes[1] > 1 else 0, next(rest, -1) if sizes[2] > 1 else 0
    if next(rest, None) is not None or not all(0 <= at < size for at, size in zip(place, sizes, strict=True)):
        shown = " x ".join(f"{size} {kind}" for size, kind in zip(sizes, _KINDS, strict=True))
        raise PartError(f"The name {folder} does not fit the args of the job, which was {shown} parallel.")
    return place


def _folder(place: Sequence[int], sizes: Place) -> str:
    stage, experts = (f"_{at:03d}" if size > 1 else "" for at, size in zip(place[1:], sizes[1:], strict=True))
    return f"mp_rank_{place[0]:02d}{stage}{experts}"


def _check_agreeing(parts: Sequence[_Part], sizes: Place) -> None:
    """All ranks are there, of one job at one step, and each is the rank that its name says."""
    _, stages, experts = sizes
    there = by_rank(((part.place[0] * stages + part.place[1]) * experts + part.place[2], part.folder) for part in parts)
    check_world(there, prod(sizes), lambda at: _folder((at // experts // stages, at // experts % stages, at % experts), sizes))
    for kind in _AGREEING:
        check_same(kind, {part.folder: part.arguments.get(kind) for part in parts})
    for key in ("iteration", "checkpoint_version"):
        check_same(key, {part.folder: part.root.get(key) for part in parts})
    check_same("number of virtual stages", {part.folder: len(part.chunks) for part in parts})
    for part in parts:
        rank = part.arguments.get("rank")
        if type(rank) is int and rank % sizes[0] != part.place[0]:
            raise PartError(f"{part.folder} holds the part of rank {rank}, by its args.", why="Its name says another.")


# --- Megatron-LM: merging


class _Merging:
    """The tensors of all ranks on their way into one state dict."""

    def __init__(self, parts: Sequence[_Part], sizes: Place, merger: Merger) -> None:
        self.parts, self.sizes, self.merger = parts, sizes, merger
        self.first, self.arguments = parts[0].root, parts[0].arguments
        self.padding = ""
        self.held: dict[str, dict[Place, tuple[Rank, Entry]]] = {}
        self.cut: dict[str, list[Entry]] = {}

    def run(self) -> Node:
        """The merged tree: the first rank's, with the whole model in it, and args that say that it is one part."""
        self._hold()
        model = Dict([(name, self._merged(name, places)) for name, places in self.held.items()], ordered=True)
        self._check_vocabulary(model)
        items = list[tuple[Node, Node]]()
        for key, value in self.first.items:
            if type(key) is str and _MODEL.fullmatch(key):
                items += [("model", model)] if key in ("model", "model0") else []
            elif key not in _LEFT_OUT:
                items.append((key, value))
        rows = self.arguments.items
        rows[:] = [(key, 1 if key in _SIZES and value is not None else value) for key, value in rows]
        return Dict(items)

    def _hold(self) -> None:
        """Note of each name in the whole model who holds a part of it, in the order of the layers."""
        offsets: dict[str, int] = {}
        for virtual, stage in product(range(len(self.parts[0].chunks)), range(self.sizes[1])):
            members = [(part, part.chunks[virtual]) for part in self.parts if part.place[1] == stage]
            check_same("numbers of layers and experts", {part.folder: (own.layers, own.experts) for part, own in members})
            # the head of a later stage is a copy of the embedding, which is on the first
            tied = stage > 0 and self.arguments.get("untie_embeddings_and_output_weights") is False
            for part, chunk in members:
                for name, entry in chunk.tensors.items():
                    whole = _whole_name(name, offsets, part.place[2] * chunk.experts, tied)
                    self.held.setdefault(whole, {})[part.place] = (part.folder, entry)
            for prefix, count in members[0][1].layers.items():
                offsets[prefix] = offsets.get(prefix, 0) + count
        if len(offsets) > 1 and self.sizes[1] > 1:
            raise PartError(f"Layers of several kinds ({listed(list(offsets))}) in a pipeline are not read.")
        wanted = self.arguments.get("num_layers")
        if type(wanted) is int and len(offsets) == 1 and [*offsets.values()] != [wanted]:
            raise PartError(f"The ranks hold {next(iter(offsets.values()))} layers, and the args say {wanted}.")

    def _check_vocabulary(self, model: Dict) -> None:
        """The embedding has the rows that the args say; those beyond the tokenizer's are padding, and kept."""
        rows, real = self.arguments.get("padded_vocab_size"), self.arguments.get("vocab_size")
        for name, entry in model.named.items():
            if name.endswith("word_embeddings.weight") and type(rows) is int and type(entry) is Entry:
                if entry.shape[0] != rows:
                    raise PartError(f"{name!r} has {entry.shape[0]} rows, and the args say {rows} (padded_vocab_size).")
                if type(real) is int and real < rows:
                    self.padding = f"{rows - real} rows of the vocabulary are padding ({rows} for {real} tokens); they are kept"

    def _merged(self, name: str, held: Mapping[Place, tuple[Rank, Entry]]) -> Entry:
        # those together that cut one tensor among them: each of the tensor parallel ranks once
        stages = sorted({(stage, experts) for _, stage, experts in held})
        every = (
            stages if _EXPERT.fullmatch(name) else product(dict.fromkeys(stage for stage, _ in stages), range(self.sizes[2]))
        )
        if missing := [place for own in every for at in range(self.sizes[0]) if (place := (at, *own)) not in held]:
            folders = listed([_folder(place, self.sizes) for place in missing])
            raise PartError(f"{name!r} is not in {folders}, and is on other ranks.")
        groups: list[Held] = [[held[at, stage, experts] for at in range(self.sizes[0])] for stage, experts in stages]
        cut = self._cut_of(name, [entry for _, entry in groups[0]]) if self.sizes[0] > 1 else None
        if cut is not None:
            for folder, entry in groups[0]:  # what is cut alike elsewhere is there twice by right
                self.cut.setdefault(str(folder), []).append(entry)
            return self.merger.along(name, cut[0], groups, count=cut[1])
        return self.merger.replicated(name, [row for group in groups for row in group])

    def _cut_of(self, name: str, held: Sequence[Entry]) -> tuple[int, int] | None:
        """Along which dimension a tensor is cut, and of how many that are cut alone it is made; None if it is whole."""
        plain = re.sub(r"((?:weight|bias))\d+$", r"\1", name)
        module, _, role = plain.rpartition(".")
        parent, _, kind = re.sub(r"\.local_experts\.\d+", "", module).rpartition(".")
        if _WHOLE.search(kind) or _WHOLE.search(role):
            return None
        if kind in _COLUMNS and role in ("weight", "bias"):
            if kind in _GATED:
                return 0, 2 if self._is_gated(name, held[0], kind) else 1
            version = self.first.get("checkpoint_version")
            is_first = not isinstance(version, (int, float)) or version < 1
            return 0, 3 if kind == "query_key_value" and is_first else 1
        if kind in _ROWS or (kind == "dense" and parent.endswith("attention")):
            return (1, 1) if role == "weight" else None
        raise PartError(f"Nothing says how {name!r} was cut: {list(held[0].shape)} on each of {len(held)} ranks.")

    def _is_gated(self, name: str, part: Entry, kind: str) -> bool:
        """Whether the MLP's first matrix is two, a gate and the rest: with twice the rows that the second has columns."""
        other = re.sub(r"bias(\d*)$", r"weight\1", name).replace(kind, _GATED[kind])
        shape = next((entry.shape for _, entry in self.held.get(other, {}).values()), ())
        rows, columns = part.shape[0] if part.shape else 0, shape[1] if len(shape) == 2 else -1
        if rows not in (columns, 2 * columns):
            raise PartError(f"{name!r} has {rows} rows on a rank, and the matrix behind it {columns} columns: they do not fit.")
        return rows == 2 * columns


# --- Meta: consolidated.00.pth and so on, flat state dicts of the same names

_META_COLUMNS = frozenset(("wq", "wk", "wv", "w1", "w3", "output"))
_META_ROWS = frozenset(("wo", "w2"))
_FREQUENCIES = "rope.freqs"
_NORM, _ATTENTION = "norm.weight", "attention.wo.weight"


def decode_consolidated(names: Sequence[str], files: Files, *, partial: bool = False) -> Checkpoint:
    found = by_rank((int(name.split(".")[1]), name) for name in names)
    missing = check_world(found, max(found) + 1, "consolidated.{:02d}.pth".format, partial=partial)
    merger = Merger(partial=partial)
    parts = renewed((decode_file(files.open(found[rank])) for rank in sorted(found)), merger.keys)
    model = _Consolidated(parts, merger, missing)
    root = merger.leave_out(Dict([(name, model.merged(name)) for name in model.first], ordered=True))
    return merged("consolidated", root, files, parts, merger, model.missing, lambda: check_not_twice(model.cut))


class _Consolidated:
    """The tensors of all ranks on their way into one state dict. `width`: of the whole model."""

    def __init__(self, parts: Sequence[Checkpoint], merger: Merger, missing: list[str]) -> None:
        self.merger, self.missing, self.cut = merger, missing, dict[str, list[Entry]]()
        self.files: dict[str, dict[str, Entry]] = {}
        for part in parts:
            file, items = part.source.path.name, part.root.items if type(part.root) is Dict else [(None, None)]
            self.files[file] = {name: node for name, node in items if type(name) is str and type(node) is Entry}
            if len(self.files[file]) != len(items):
                raise PartError(f"{file} holds something else than one mapping of names to tensors.")
        self.first = next(iter(self.files.values()))
        every = dict.fromkeys(name for tensors in self.files.values() for name in tensors)
        for file, tensors in self.files.items():
            if lacking := [name for name in every if name not in tensors]:
                raise PartError(f"{file} does not have {some(lacking)}, which others have.")
        norm = self.first.get(_NORM)
        self.width = norm.shape[0] if norm is not None and len(norm.shape) == 1 else None
        self._check_count()

    def _check_count(self) -> None:
        """As many files are there as the model was cut into, by the matrices that tell it."""
        for name in (name for name in self.first if name.endswith(_ATTENTION)):
            held = sum(tensors[name].shape[-1] for tensors in self.files.values() if tensors[name].shape)
            whole = held if self.width is None else self.width
            if held == whole or not (len(self.files) > 1 or self.missing or (held and whole % held == 0)):
                continue
            if not self.merger.partial or held > whole:
                what = f"{name!r} is not whole: {held} of its {whole} columns are in {listed(list(self.files))}."
                raise PartError(what, fix="Get all consolidated.*.pth of one model.", rest=held < whole)
            self.missing = self.missing or ["those behind the last"]

    def merged(self, name: str) -> Entry:
        held: Held = [(file, tensors[name]) for file, tensors in self.files.items()]
        kind = name.rpartition(".")[0].rpartition(".")[2]
        is_whole = name == _FREQUENCIES or kind.endswith("norm") or (kind in _META_ROWS and not name.endswith(".weight"))
        if is_whole or (len(held) == 1 and not self.missing):
            return self.merger.replicated(name, held)
        if self.missing:
            self.merger.lost[name] = "cut among the ranks, of which some are missing"
            return held[0][1]
        for file, tensors in self.files.items():
            self.cut.setdefault(file, []).append(tensors[name])
        axis = 0 if kind in _META_COLUMNS else 1 if kind in _META_ROWS else self._by_width(name, kind, held[0][1].shape)
        return self.merger.along(name, axis, [held])

    def _by_width(self, name: str, kind: str, shape: Sizes) -> int:
        reached = [axis for axis, size in enumerate(shape) if size * len(self.files) == self.width]
        if len(reached) == 1:
            return reached[0]
        if kind == "tok_embeddings" and len(shape) == 2 and shape[1] == self.width:
            return 0
        raise PartError(f"Nothing says how {name!r} was cut: {list(shape)} on each of {len(self.files)} ranks.")
