"""What is left when only the weights are wanted: `--slim` keeps state dicts and plain values, `--ema` the averaged weights."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial

from ckpt_tools.edit.objects.losses import model_parts
from ckpt_tools.edit.renaming import rename_metadata
from ckpt_tools.errors import ConvertError, NothingMatchedError
from ckpt_tools.formats.contents import StateDict, find_state_dicts, is_optimizer, is_tensor
from ckpt_tools.io.content import Computed, Content, chunks
from ckpt_tools.text import dotted
from ckpt_tools.tree import exchange, nodes, visit
from ckpt_tools.tree.modules import is_module, module_state_dict
from ckpt_tools.tree.names import MODULE, strip_inner
from ckpt_tools.tree.nodes import Dict, Entry, List, Node, Pair, Storage, Where, contiguous_stride
from ckpt_tools.tree.visit import walk
from ckpt_tools.values.numeric import part, row_major, view_of

# --- --slim


def modules_as_state_dicts(root: Node) -> Node:
    """Exchange pickled modules for their state dicts; what else is an object is left for `plain.drop_unknown`."""
    return exchange.replace(root, lambda node: module_state_dict(node) if is_module(node) else node)


def slim(root: Node) -> tuple[Node, list[tuple[Where, str]]]:
    """Leave out optimizers, schedulers, scalers, random states and tensors that are in no state dict."""
    found = find_state_dicts(root)
    if not found:
        raise NothingMatchedError("There is no state dict to keep.", why="`slim` keeps mappings of names to tensors.")
    kept = {id(state_dict.node) for state_dict in found} | set(_parts(found))
    gone: list[tuple[Where, str]] = []
    root = _in_tuple((), root, kept, gone)
    for where, node in list(walk(root, stop=lambda node: is_tensor(node) or _training_state((), node) is not None)):
        if type(node) is Dict and not (where and _training_state((), node)):  # which is gone itself
            pairs = [(key, _in_tuple((*where, visit.component(key)), value, kept, gone)) for key, value in node.items]
            node.items[:] = [
                pair for pair in pairs if not _unwanted((*where, visit.component(pair[0])), pair[1], node, kept, gone)
            ]
        elif type(node) is List:
            rows = [_in_tuple((*where, index), row, kept, gone) for index, row in enumerate(node.items)]
            node.items[:] = [row for index, row in enumerate(rows) if not _unwanted((*where, index), row, node, kept, gone)]
    if type(root) is not Dict or id(root) not in kept:
        for node in reversed([node for _, node in walk(root, stop=is_tensor)]):  # without what is empty now, from the inside
            if type(node) is Dict:
                node.items[:] = [pair for pair in node.items if not _is_empty(pair[1])]
            elif type(node) is List:
                node.items[:] = [value for value in node.items if not _is_empty(value)]
    return root, gone


def _parts(found: Sequence[StateDict]) -> Iterator[int]:
    """The ids of the dicts, lists and tuples that are parts of state dicts: extra state, packed weights."""
    for state_dict in found:
        for _, value in model_parts(state_dict):
            inside = walk(value, stop=lambda node: is_tensor(node) or _training_state((), node) is not None)
            yield from (id(node) for _, node in inside if type(node) in (Dict, List, tuple))


def _in_tuple(where: Where, node: Node, kept: set[int], gone: list[tuple[Where, str]]) -> Node:
    """A tuple that holds state dicts, or dicts and lists with some, without the training state in it; else as it is."""
    if type(node) is not tuple or id(node) in kept or not any(type(part) in (Dict, List, tuple) for part in node):
        return node
    if not any(id(below) in kept for _, below in walk(node, stop=lambda below: id(below) in kept, plain=False)):
        return node
    parts = (_in_tuple((*where, index), part, kept, gone) for index, part in enumerate(node))
    return tuple(None if _unwanted((*where, index), part, node, kept, gone) else part for index, part in enumerate(parts))


def _unwanted(where: Where, value: Node, holder: Node, kept: set[int], gone: list[tuple[Where, str]]) -> bool:
    kind = _training_state(where, value)
    if kind is None and is_tensor(value) and id(holder) not in kept:
        kind = "a tensor outside state dicts"
    if kind is None and type(value) is tuple:  # which holds tensors, and no state dict that is kept
        inside = walk(value, stop=lambda node: id(node) in kept or is_tensor(node), plain=False)
        if {id(node) in kept for _, node in inside if id(node) in kept or is_tensor(node)} == {False}:
            kind = "tensors outside state dicts"
    if kind is not None:
        gone.append((where, kind))
    return kind is not None


_RNG = re.compile(r"(^|_)(rng|random)(_|$)|^(np|numpy|cuda|torch|python)_?(rng|random)", re.IGNORECASE)
_SCALER = frozenset(("scale", "growth_factor", "backoff_factor", "growth_interval", "_growth_tracker"))
_SCHEDULER = frozenset(("_step_count", "last_epoch"))


def _training_state(where: Where, node: Node) -> str | None:
    """What a part of a checkpoint is that only training needs; None for anything else."""
    if where and isinstance(where[-1], str) and _RNG.search(where[-1]) and type(node) not in (str, int, float, bool):
        return "random state"
    if type(node) is not Dict:
        return None
    if is_optimizer(node):
        return "optimizer"
    keys = {key for key, _ in node.items if type(key) is str}
    if keys >= _SCHEDULER or (keys >= {"base_lrs", "last_epoch"}):
        return "scheduler"
    return "gradient scaler" if keys >= _SCALER else None


def _is_empty(node: Node) -> bool:
    return (type(node) is Dict or type(node) is List) and not node.items


# --- --ema

# Keys under which averaged weights are kept as a state dict of their own: timm (state_dict_ema), fairseq and torchvision
# (model_ema, ema), Lightning callbacks (ema_state_dict), diffusers and others.
_EMA_KEYS = frozenset((
    "ema", "ema_model", "ema_state", "ema_state_dict", "ema_weights", "ema_params", "model_ema", "model_ema_state_dict",
    "ema_model_state_dict", "state_dict_ema", "net_ema", "params_ema", "netg_ema", "g_ema", "averaged_model", "swa_model",
    "swa_state_dict",
))  # fmt: skip
_LIT_EMA = "model_ema."  # LitEma of latent-diffusion: names without their dots, in the model's own state dict
_MMCV_EMA = "ema_"  # mmcv's EMAHook: buffers of the model, with underscores for dots
_COUNTERS = frozenset(("decay", "num_updates"))


def averaged(root: Node) -> tuple[Node, Where]:
    """The averaged weights of a checkpoint, as a state dict, and where they were."""
    found = list(_candidates(root))
    if not found:
        raise NothingMatchedError(
            "There are no averaged weights in the checkpoint.",
            why=f"Looked for {', '.join(sorted(_EMA_KEYS)[:6])} ... and for names that start with {_LIT_EMA!r}.",
            fix="Where they have another name: `select=WHERE`.",
        )
    if len(found) > 1:
        wheres = [dotted(where) for _, where in found]
        raise ConvertError(
            f"There are averaged weights in {len(found)} places: {', '.join(map(repr, wheres[:8]))}.",
            why="Which of them is meant is not clear.", fix=f"Choose: `select={wheres[0]!r}`.",
        )  # fmt: skip
    return found[0]


def _candidates(root: Node) -> Iterator[tuple[Dict, Where]]:
    """Every state dict of averaged weights; one inside another counts once."""
    taken: set[Where] = set()
    swapped = type(root) is Dict and "state_dict" in root and (  # which has the averages then, with the trained ones beside it
        ("averaging_state" in root and "current_model_state" in root) or _is_mmengines(root)
    )  # fmt: skip
    for state_dict in find_state_dicts(root):
        where = state_dict.where
        if any(where[:end] in taken for end in range(len(where) + 1)):
            continue
        names = state_dict.names
        named = any(isinstance(step, str) and step.lower() in _EMA_KEYS for step in where)
        if where == ("state_dict",) if swapped else named or _averaging(names):
            made = _as_plain_model(state_dict)
        elif any(name.startswith(_LIT_EMA) for name in names):
            made = _without_averages(state_dict, _LIT_EMA, "")
        elif has_mmcvs(names):
            made = _without_averages(state_dict, _MMCV_EMA, "_")
        else:
            continue
        taken.add(where)
        yield made, where


def _is_mmengines(root: Dict) -> bool:
    """Whether MMEngine's EMAHook saved a run, which exchanges the two; its averaging model has a buffer `steps`."""
    averages = root.get("ema_state_dict")
    names = set(averages.named) if type(averages) is Dict else set()
    counts = "steps" in names and all(name.startswith(MODULE) for name in names - {"steps"})
    return bool(names) and (counts or "message_hub" in root)


def _averaging(names: Sequence[str]) -> str:
    """What the names of the averaged model begin with in the state dict of what averages; nothing in any other."""
    found = set(names)
    lead = MODULE if found and all(name.startswith(MODULE) for name in found) else ""
    if f"{lead}n_averaged" in found and all(name.startswith(lead + MODULE) for name in found - {f"{lead}n_averaged"}):
        return lead + MODULE
    if f"{lead}initted" in found and any(name.startswith(f"{lead}ema_model.") for name in found):
        return f"{lead}ema_model."
    return ""


def _as_plain_model(state_dict: StateDict) -> Dict:
    """The averaged tensors by the names of the model, without what averages them and without wrappers around all of them."""
    node, lead = state_dict.node, _averaging(state_dict.names)
    renamed = {name: strip_inner(name[len(lead) :]) for name in node.named if name.startswith(lead)}
    tensors = [renamed[name] for name in state_dict.names if name in renamed]
    while tensors and all(name.startswith(MODULE) for name in tensors):
        tensors = [name.removeprefix(MODULE) for name in tensors]
        renamed = {old: new.removeprefix(MODULE) for old, new in renamed.items()}
    if all(old == new for old, new in renamed.items()):
        return node
    made = _with(node, [(renamed[key], value) for key, value in node.items if type(key) is str and key in renamed])
    rename_metadata(made, renamed)
    return made


def has_mmcvs(names: Sequence[str]) -> bool:
    """Whether buffers of mmcv's EMAHook are among the names: `ema_backbone_conv1_weight` of `backbone.conv1.weight`."""
    flat = {name.replace(".", "_") for name in names if "." in name}
    return any(name.startswith(_MMCV_EMA) and name.removeprefix(_MMCV_EMA) in flat for name in names)


def _without_averages(state_dict: StateDict, prefix: str, dot: str) -> Dict:
    items, flat = state_dict.node.items, _without_dots(state_dict, prefix, dot)
    values: dict[Node, Node] = {}
    for key, value in state_dict.node.named.items():
        if not key.startswith(prefix) or (short := key.removeprefix(prefix)) in _COUNTERS:
            continue
        whose = flat.get(short, flat.get(short.replace(".", dot), []))
        if len(whose) != 1:
            known = " or ".join(map(repr, whose)) or "nothing that is there"
            raise ConvertError(
                f"{key!r} is the average of {known}.", why="Averaged names without dots are matched to the model's names.",
                fix="Take them apart with `keep` and `rename`.",
            )  # fmt: skip
        values[whose[0]] = value
    trained = [(name, value) for name, value in items if type(name) is not str or not name.startswith(prefix)]
    return _with(state_dict.node, [(name, values.get(name, value)) for name, value in trained])


def _with(node: Dict, items: list[Pair]) -> Dict:
    made = Dict(items, ordered=node.ordered)
    made.attributes = node.attributes
    return made


def _without_dots(state_dict: StateDict, prefix: str, dot: str) -> dict[str, list[str]]:
    """The names of trained tensors by how LitEma and mmcv write them: without dots, the model's `model.` left out or not."""
    flat: dict[str, list[str]] = {}
    for name in state_dict.names:
        names = {name, name.removeprefix("model.")} if prefix == _LIT_EMA else {name}
        for own in () if name.startswith(prefix) else names:
            flat.setdefault(own.replace(".", dot), []).append(name)
    return flat


# --- storages cut down to what their tensors use: a view holds on to its whole storage, and torch.save writes all of it


@dataclass(slots=True)
class _Piece:
    """The bytes [start, end) of a storage, and the entries that view them."""

    start: int
    end: int
    entries: list[Entry]


def compact(root: Node, *, verify: bool = False) -> tuple[Node, int, int]:
    """Returns the root, of how many storages less is kept, and how many bytes less."""
    views: dict[int, list[Entry]] = {}
    pinned: set[int] = set()
    for node in visit.reachable(root):
        if type(node) is Entry:
            views.setdefault(id(node.storage), []).append(node)
        elif type(node) in nodes.CONTAINERS:
            pinned.update(id(below) for below in visit.parts(node) if type(below) is Storage)
    moved: dict[int, Entry] = {}
    count = saved = 0
    for entries in views.values():
        storage = entries[0].storage
        if id(storage) in pinned:
            continue
        made = dict(_cut(storage, entries, verify))
        if made:
            kept = {id(entry.storage): entry.storage.nbytes for entry in made.values()}
            moved.update(made)
            count, saved = count + 1, saved + storage.nbytes - sum(kept.values())
    if moved:
        root = exchange.replace(root, lambda node: moved.get(id(node), node) if type(node) is Entry else node)
    return root, count, saved


def _cut(storage: Storage, entries: list[Entry], verify: bool) -> Iterator[tuple[int, Entry]]:
    """The entries of a storage on smaller ones, by their old identity; nothing when nothing is saved."""
    if any(entry.dtype.bits % 8 or entry.dtype.itemsize != entries[0].dtype.itemsize for entry in entries):
        return
    pieces = _pieces(entries)
    contents = [_content(storage, piece) for piece in pieces]
    if sum(content.length for content in contents) >= storage.nbytes:
        return
    for index, (piece, content) in enumerate(zip(pieces, contents, strict=True)):
        if verify:
            content = Computed(content.length, partial(chunks, content), of=storage.content)
        key = storage.key if index == 0 else f"{storage.key}_{index}"
        own = Storage(key, storage.dtype, content.length, storage.device, content)
        for entry in piece.entries:
            if content.length < piece.end - piece.start:
                yield id(entry), replace(entry, storage=own, offset=0, stride=contiguous_stride(entry.shape))
            else:
                start = entry.offset - piece.start // entry.dtype.itemsize if entry.nbytes else 0
                yield id(entry), replace(entry, storage=own, offset=start)


def _content(storage: Storage, piece: _Piece) -> Content:
    """The bytes of a piece; of one view with gaps in it the elements alone are enough."""
    first, length = piece.entries[0], piece.end - piece.start
    lazy = any(one.extras is not None and one.extras.metadata is not None for one in piece.entries)
    if not lazy and len(set(map(view_of, piece.entries))) == 1 and first.nbytes < length:
        return row_major(first)
    return part(storage.content, piece.start, length)


def _pieces(entries: list[Entry]) -> list[_Piece]:
    """Entries together with those that they overlap, in order of their bytes; an empty one is at the start."""
    item = entries[0].dtype.itemsize
    spans = ((entry.offset * item, (entry.offset + entry.span) * item) if entry.nbytes else (0, 0) for entry in entries)
    pieces: list[_Piece] = []
    for (start, end), entry in sorted(zip(spans, entries, strict=True), key=lambda row: row[0]):
        last = pieces[-1] if pieces else None
        if last is not None and (start < last.end or start == end):
            last.end = max(last.end, end)
            last.entries.append(entry)
        else:
            pieces.append(_Piece(start, end, [entry]))
    return pieces
