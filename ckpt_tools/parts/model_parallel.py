"""Ranks of model parallelism, whose names tell how they were cut: Megatron-LM's folders mp_rank_TT_PPP_EEE, Meta's Llama.

Source: Megatron-LM's megatron/training/checkpointing.py, tools/checkpoint/loader_base.py; meta-llama/llama llama/model.py."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import islice, product
from math import prod

from ckpt_tools import limits
from ckpt_tools.errors import DamagedFileError, PartError
from ckpt_tools.formats.base import Keys, Warned
from ckpt_tools.formats.checkpoint import Checkpoint
from ckpt_tools.formats.single import decode_file
from ckpt_tools.io.output import Source
from ckpt_tools.io.parsers import load_json
from ckpt_tools.io.sources import Files
from ckpt_tools.parts.merge import Held, Merger, along, by_rank, check_not_twice, check_same, check_world, merged
from ckpt_tools.parts.names import MP_RANK
from ckpt_tools.parts.sharded import partly, renewed
from ckpt_tools.text import listed, some, these_ranks
from ckpt_tools.tree.modules import attributes
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
_LEFT_OUT = ("optimizer", "rng_state")  # cut as the ranks are, and of no use to another number of them
_OPTIMIZER = "distrib_optim.pt"
_AGREEING = (*(f"{kind}_model_parallel_size" for kind in _KINDS), "num_layers", "num_experts", "padded_vocab_size", "swiglu")
_MODEL = re.compile(r"model(\d{0,4})")
_MOST = 100_000

Place = tuple[int, int, int]  # which rank of tensor, pipeline and expert parallelism


@dataclass(slots=True)
class _Part:
    folder: str
    place: Place
    decoded: Checkpoint
    root: Dict
    arguments: Dict
    chunks: list[Chunk]


def decode_megatron(names: Sequence[str], files: Files) -> Checkpoint:
    keys, parts = Keys(), list[_Part]()
    sizes: Place = (1, 1, 1)
    for name in sorted(names):
        decoded = decode_file(files.open(name))
        root = keys.renew(decoded.root)
        arguments = root.get("args") if type(root) is Dict else None
        state = arguments if type(arguments) is Dict else attributes(arguments)
        if type(root) is not Dict or state is None:
            raise PartError(f"{name} carries no args, so that nothing says into how many parts the model was cut.")
        folder = name.partition("/")[0]
        sizes = _sizes(folder, state) if not parts else sizes
        parts.append(_Part(folder, _place(folder, sizes), decoded, root, state, _chunks(name, root)))
    _check_world(sizes, parts)
    _check_agreeing(parts)
    merging = _Merging(parts, sizes, keys)
    made = merged("megatron", merging.run(), files, [part.decoded for part in parts], merging.merger)
    left = [key for key in _LEFT_OUT if any(key in part.root for part in parts)]
    left += [_OPTIMIZER] if any((part.decoded.source.path.parent / _OPTIMIZER).exists() for part in parts) else []
    if left:
        made.warnings.append(Warned("left-out", f"{listed(left)}: cut as the ranks are, not merged"))
    if extra := sum(chunk.left_out for part in parts for chunk in part.chunks):
        text = f"{extra} values of the model that are not tensors (_extra_state): left out"
        made.warnings.append(Warned("left-out", text))
    made.warnings += [Warned("padded-vocabulary", merging.padding, severity="info")] if merging.padding else []
    return made


def _sizes(folder: str, arguments: Dict) -> Place:
    found = [arguments.get(f"{kind}_model_parallel_size") for kind in _KINDS]
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
    if len(numbers) != 1 + (sizes[1] > 1) + (sizes[2] > 1):
        shown = " x ".join(f"{size} {kind}" for size, kind in zip(sizes, _KINDS, strict=True))
        raise PartError(f"The name {folder} does not fit the args of the job, which was {shown} parallel.")
    rest = iter(numbers[1:])
    return numbers[0], next(rest) if sizes[1] > 1 else 0, next(rest) if sizes[2] > 1 else 0


def _folder(place: Sequence[int], sizes: Place) -> str:
    stage, experts = (f"_{at:03d}" if size > 1 else "" for at, size in zip(place[1:], sizes[1:], strict=True))
    return f"mp_rank_{place[0]:02d}{stage}{experts}"


def _chunks(name: str, root: Dict) -> list[Chunk]:
    """The tensors of a rank: of each of its virtual stages, in order."""
    found = {int(match[1] or 0): key for key in root.named if (match := _MODEL.fullmatch(key))}
    if sorted(found) != [*range(len(found))] or not found:
        raise PartError(f"{name} holds no model, or its virtual stages are not counted from 0.")
    return [_chunk_of(f"{name}: {found[number]}", root.get(found[number])) for number in sorted(found)]


def _check_world(sizes: Place, parts: Sequence[_Part]) -> None:
    places, world = by_rank((part.place, part.folder) for part in parts), prod(sizes)
    if beyond := [part.folder for part in parts if any(at >= size for at, size in zip(part.place, sizes, strict=True))]:
        raise PartError(f"{some(beyond)} are beyond the {world} ranks that the args of the job say.")
    if missing := list(islice((place for place in product(*map(range, sizes)) if place not in places), 5)):
        shown = listed([_folder(place, sizes) for place in missing], rest=world - len(places) - len(missing))
        raise PartError(f"{shown}: missing. {len(places)} of {world} parts are there.", fix="Get the others too.")


def _check_agreeing(parts: Sequence[_Part]) -> None:
    """All are of one job at one step, and each is the rank that its name says."""
    for kind in _AGREEING:
        check_same(kind, {part.folder: part.arguments.get(kind) for part in parts})
    for key in ("iteration", "checkpoint_version"):
        check_same(key, {part.folder: part.root.get(key) for part in parts})
    check_same("number of virtual stages", {part.folder: len(part.chunks) for part in parts})
    for part in parts:
        rank, size = part.arguments.get("rank"), parts[0].arguments.get("tensor_model_parallel_size")
        if type(rank) is int and type(size) is int and rank % size != part.place[0]:
            raise PartError(f"{part.folder} holds the part of rank {rank}, by its args.", why="Its name says another.")


# --- Megatron-LM: merging


class _Merging:
    """The tensors of all ranks on their way into one state dict."""

    def __init__(self, parts: Sequence[_Part], sizes: Place, keys: Keys) -> None:
        self.parts, self.sizes = parts, sizes
        self.merger = Merger(keys, {number: part.folder for number, part in enumerate(parts)})
        self.first, self.arguments = parts[0].root, parts[0].arguments
        self.padding = ""
        self.held: dict[str, dict[Place, tuple[int, Entry]]] = {}

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
        sizes = [f"{kind}_model_parallel_size" for kind in _KINDS]
        rows = self.arguments.items
        rows[:] = [(key, 1 if key in sizes and value is not None else value) for key, value in rows]
        return Dict(items)

    def _hold(self) -> None:
        """Note of each name in the whole model who holds a part of it, in the order of the layers."""
        offsets: dict[str, int] = {}
        for virtual, stage in product(range(len(self.parts[0].chunks)), range(self.sizes[1])):
            members = [(number, part, part.chunks[virtual]) for number, part in enumerate(self.parts) if part.place[1] == stage]
            check_same("numbers of layers and experts", {part.folder: (own.layers, own.experts) for _, part, own in members})
            # the head of a later stage is a copy of the embedding, which is on the first
            tied = stage > 0 and self.arguments.get("untie_embeddings_and_output_weights") is False
            for number, part, chunk in members:
                for name, entry in chunk.tensors.items():
                    whole = _whole_name(name, offsets, part.place[2] * chunk.experts, tied)
                    self.held.setdefault(whole, {})[part.place] = (number, entry)
            for prefix, count in members[0][2].layers.items():
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

    def _merged(self, name: str, held: Mapping[Place, tuple[int, Entry]]) -> Entry:
        groups = self._groups(name, held)
        cut = self._cut_of(name, [entry for _, entry in groups[0]]) if self.sizes[0] > 1 else None
        if cut is not None:
            return along(self.merger, name, cut[0], groups, count=cut[1])
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
        raise PartError(f"Nothing says how {name!r} was cut: it is {list(held[0].shape)} on each of {len(held)} ranks.")

    def _is_gated(self, name: str, part: Entry, kind: str) -> bool:
        """Whether the MLP's first matrix is two, a gate and the rest: with twice the rows that the second has columns."""
        other = re.sub(r"bias(\d*)$", r"weight\1", name).replace(kind, _GATED[kind])
        _, second = next(iter(self.held.get(other, {}).values()), (0, None))
        rows, columns = (
            part.shape[0] if part.shape else 0,
            second.shape[1] if second is not None and len(second.shape) == 2 else -1,
        )
        if rows not in (columns, 2 * columns):
            raise PartError(f"{name!r} has {rows} rows on a rank, and the matrix behind it {columns} columns: they do not fit.")
        return rows == 2 * columns

    def _groups(self, name: str, held: Mapping[Place, tuple[int, Entry]]) -> list[Held]:
        """What the ranks hold, those together that cut one tensor among them: each of the tensor parallel ranks once."""
        stages = sorted({(stage, experts) for _, stage, experts in held})
        wanted = [(stage, experts) for stage in dict.fromkeys(stage for stage, _ in stages) for experts in range(self.sizes[2])]
        for stage, experts in stages if _EXPERT.fullmatch(name) else wanted:
            if missing := [place for at in range(self.sizes[0]) if (place := (at, stage, experts)) not in held]:
                folders = listed([_folder(place, self.sizes) for place in missing])
                raise PartError(f"{name!r} is not in {folders}, and is on other ranks.")
        return [[held[at, stage, experts] for at in range(self.sizes[0])] for stage, experts in stages]


# --- Meta: consolidated.00.pth and so on, flat state dicts of the same names; params.json may tell the width

_META_COLUMNS = frozenset(("wq", "wk", "wv", "w1", "w3", "output"))
_META_ROWS = frozenset(("wo", "w2"))
_FREQUENCIES = "rope.freqs"
_NAME = "consolidated.{:02d}.pth"
_NORM, _ATTENTION = "norm.weight", "attention.wo.weight"


def decode_consolidated(names: Sequence[str], files: Files, *, partial: bool = False) -> Checkpoint:
    found = by_rank((int(name.split(".")[1]), name) for name in names)
    world = max(found) + 1
    missing = check_world(f"{names[-1]} is one of {world} parts at least", found, world, partial=partial)
    keys, ranks = Keys(), sorted(found)
    parts = renewed((decode_file(files.open(found[rank])) for rank in ranks), keys)
    merger = Merger(keys, partial=partial)
    model = _Consolidated(
        dict(zip(ranks, map(_flat, parts), strict=True)), files, merger, [_NAME.format(rank) for rank in missing]
    )
    root = Dict([(name, model.merged(name)) for name in model.first], ordered=True)
    made = merged("consolidated", merger.leave_out(root), files, parts, merger, model.check_not_twice)
    made.warnings += [partly("files of ranks are", model.missing)] if model.missing else []
    return made


def _flat(part: Checkpoint) -> dict[str, Entry]:
    items = part.root.items if type(part.root) is Dict else [(None, None)]
    entries = {name: node for name, node in items if type(name) is str and type(node) is Entry}
    if len(entries) != len(items):
        raise PartError(f"{part.source.path.name} holds something else than one mapping of names to tensors.")
    return entries


def _read_params(source: Source) -> dict[str, int]:
    limits.HEADER.check(source.size, f"params.json has {source.size} bytes.")
    try:
        content = load_json(source.read(0, source.size))
    except ValueError as error:
        raise DamagedFileError(f"{source.path} is not JSON.", why=f"{error}.") from None
    rows = content if isinstance(content, dict) else {}
    found = {key: rows[key] for key in ("dim", "n_heads", "head_dim") if rows.get(key) is not None}
    if any(type(value) is not int or not 0 < value < 1 << 40 for value in found.values()):
        raise DamagedFileError(f"{source.path} has a dimension that is not a number, or impossible.")
    return found


class _Consolidated:
    """The tensors of all ranks on their way into one state dict. `width`: of the whole model."""

    def __init__(self, ranks: Mapping[int, Mapping[str, Entry]], files: Files, merger: Merger, missing: list[str]) -> None:
        self.ranks, self.merger, self.missing = ranks, merger, missing
        self.first = next(iter(ranks.values()))
        self.cut: dict[int, list[Entry]] = {}
        every = dict.fromkeys(name for tensors in ranks.values() for name in tensors)
        for rank, tensors in ranks.items():
            if missing := [name for name in every if name not in tensors]:
                raise PartError(f"Rank {rank} does not have {some(missing)}, which others have.")
        norm = self.first.get(_NORM)
        length = norm.shape[0] if norm is not None and len(norm.shape) == 1 else None
        said = _read_params(files.open("params.json")) if "params.json" in files.names() else {}
        self.width = said.get("dim", length)
        if self.width is not None and length not in (None, self.width):
            raise PartError(f"params.json says dim {self.width}, and {_NORM!r} has {length} elements.")
        self._check_heads(said["n_heads"] * said["head_dim"] if {"n_heads", "head_dim"} <= set(said) else self.width)

    def _check_heads(self, heads: int | None) -> None:
        """As many files are there as the model was cut into, by the matrices that tell it."""
        for name in (name for name in self.first if name.endswith(_ATTENTION)):
            held = sum(tensors[name].shape[-1] for tensors in self.ranks.values() if tensors[name].shape)
            whole = held if self.width is None or heads is None else heads
            if held == whole or not (len(self.ranks) > 1 or self.missing or (held and whole % held == 0)):
                continue
            if not self.merger.partial or held > whole:
                what = f"{name!r} is not whole: {held} of its {whole} columns are on {these_ranks(list(self.ranks))}."
                raise PartError(what, fix="Get all consolidated.*.pth of one model.", rest=held < whole)
            self.missing = self.missing or ["those behind the last"]

    def check_not_twice(self) -> None:
        check_not_twice(self.cut, _NAME.format)

    def merged(self, name: str) -> Entry:
        held = [(rank, tensors[name]) for rank, tensors in self.ranks.items()]
        kind = name.rpartition(".")[0].rpartition(".")[2]
        is_whole = name == _FREQUENCIES or kind.endswith("norm") or (kind in _META_ROWS and not name.endswith(".weight"))
        if is_whole or (len(held) == 1 and not self.missing):
            return self.merger.replicated(name, held)
        if self.missing:
            self.merger.lost[name] = "cut among the ranks, of which some are missing"
            return held[0][1]
        for rank, entry in held:
            self.cut.setdefault(rank, []).append(entry)
        axis = 0 if kind in _META_COLUMNS else 1 if kind in _META_ROWS else self._by_width(name, kind, held[0][1].shape)
        return along(self.merger, name, axis, [held])

    def _by_width(self, name: str, kind: str, shape: Sizes) -> int:
        reached = [axis for axis, size in enumerate(shape) if size * len(self.ranks) == self.width]
        if len(reached) == 1:
            return reached[0]
        if kind == "tok_embeddings" and len(shape) == 2 and shape[1] == self.width:
            return 0
        what = f"Nothing says where {name!r} was cut: it is {list(shape)} on each of {len(self.ranks)} ranks."
        raise PartError(what, fix="" if self.width is not None else "params.json tells the width: put it beside the files.")
