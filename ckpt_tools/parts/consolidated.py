"""consolidated: Meta's Llama, a flat state dict for each rank; names and `params.json` tell how it was cut.

Source: meta-llama/llama `llama/model.py`, transformers' `models/llama/convert_llama_weights_to_hf.py`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from ckpt_tools import limits
from ckpt_tools.errors import DamagedFileError, PartError
from ckpt_tools.formats.base import Keys
from ckpt_tools.formats.checkpoint import Checkpoint
from ckpt_tools.formats.single import decode_file
from ckpt_tools.io.output import Source
from ckpt_tools.io.parsers import load_json
from ckpt_tools.io.sources import Files
from ckpt_tools.parts.merge import Merger, along, by_rank, check_not_twice, check_world, merged
from ckpt_tools.parts.sharded import partly, renewed
from ckpt_tools.text import some, these_ranks
from ckpt_tools.tree.nodes import Dict, Entry
from ckpt_tools.values.boxes import Sizes

CONTAINER = "consolidated"
_COLUMNS = frozenset(("wq", "wk", "wv", "w1", "w3", "output"))
_ROWS = frozenset(("wo", "w2"))
_FREQUENCIES = "rope.freqs"
_NAME = "consolidated.{:02d}.pth"
_NORM, _ATTENTION = "norm.weight", "attention.wo.weight"


def decode(names: Sequence[str], files: Files, *, partial: bool = False) -> Checkpoint:
    found = by_rank((int(name.split(".")[1]), name) for name in names)
    world = max(found) + 1
    missing = check_world(f"{names[-1]} is one of {world} parts at least", found, world, partial=partial)
    keys, ranks = Keys(), sorted(found)
    parts = renewed((decode_file(files.open(found[rank])) for rank in ranks), keys)
    merger = Merger(keys, partial=partial)
    model = _Model(dict(zip(ranks, map(_flat, parts), strict=True)), files, merger, [_NAME.format(rank) for rank in missing])
    root = Dict([(name, model.merged(name)) for name in model.first], ordered=True)
    made = merged(CONTAINER, merger.leave_out(root), files, parts, merger, model.check_not_twice)
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


class _Model:
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
        is_whole = name == _FREQUENCIES or kind.endswith("norm") or (kind in _ROWS and not name.endswith(".weight"))
        if is_whole or (len(held) == 1 and not self.missing):
            return self.merger.replicated(name, held)
        if self.missing:
            self.merger.lost[name] = "cut among the ranks, of which some are missing"
            return held[0][1]
        for rank, entry in held:
            self.cut.setdefault(rank, []).append(entry)
        axis = 0 if kind in _COLUMNS else 1 if kind in _ROWS else self._by_width(name, kind, held[0][1].shape)
        return along(self.merger, name, axis, [held])

    def _by_width(self, name: str, kind: str, shape: Sizes) -> int:
        reached = [axis for axis, size in enumerate(shape) if size * len(self.ranks) == self.width]
        if len(reached) == 1:
            return reached[0]
        if kind == "tok_embeddings" and len(shape) == 2 and shape[1] == self.width:
            return 0
        what = f"Nothing says where {name!r} was cut: it is {list(shape)} on each of {len(self.ranks)} ranks."
        raise PartError(what, fix="" if self.width is not None else "params.json tells the width: put it beside the files.")
