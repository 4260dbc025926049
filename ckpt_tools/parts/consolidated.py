"""consolidated: Meta's layout of Llama, a file for each rank of model parallelism.

    consolidated.00.pth, consolidated.01.pth ...    MUST  flat state dicts of the same names, a run of most tensors in each
    params.json                                     MAY   {"dim": 4096, "n_heads": 32, ...}

The files do not say where they were cut. The names do: columns (`wq wk wv w1 w3 output`) are cut along dimension 0, rows
(`wo w2`) along dimension 1, norms and `rope.freqs` are whole in all. Llama 1 and 2 cut `tok_embeddings` along dimension 1,
Llama 3 along 0: the dimension in which `dim` is reached decides; so it does for a name that is not known. `dim` is also the
length of `norm.weight`.

Source: meta-llama/llama `llama/model.py` (ColumnParallelLinear, RowParallelLinear, ParallelEmbedding), transformers'
`models/llama/convert_llama_weights_to_hf.py`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from ckpt_tools import limits
from ckpt_tools.errors import DamagedFileError, PartError
from ckpt_tools.formats.base import Decoded, Keys
from ckpt_tools.formats.single import decode_file
from ckpt_tools.io.output import Source
from ckpt_tools.io.parsers import load_json
from ckpt_tools.io.sources import Files
from ckpt_tools.parts.evidence import check_not_twice
from ckpt_tools.parts.merge import Held, Merger, along
from ckpt_tools.parts.names import CONSOLIDATED
from ckpt_tools.parts.sharded import joined, partly
from ckpt_tools.text import some, these_ranks
from ckpt_tools.tree.nodes import Dict, Entry, Node

CONTAINER = "consolidated"
_COLUMNS = frozenset(("wq", "wk", "wv", "w1", "w3", "output"))
_ROWS = frozenset(("wo", "w2"))
_FREQUENCIES = "rope.freqs"
_NORM, _ATTENTION = "norm.weight", "attention.wo.weight"


@dataclass(frozen=True, slots=True)
class Params:
    """What `params.json` or the tensors say of the whole model: its width, and that of all heads together."""

    dim: int
    heads: int


def decode(names: Sequence[str], files: Files, *, partial: bool = False) -> Decoded:
    """Read the structure of every rank's file and put the tensors together; no tensor bytes."""
    ranks, missing = _ranks(names, partial=partial)
    parts = [decode_file(files.open(name)) for name in ranks]
    keys = Keys()
    for part in parts:
        part.root = keys.renew(part.root)
    roots = [_flat(part) for part in parts]
    merging = _Merging(roots, _params(files, roots[0]), keys)
    if partial and not missing and not merging.has_all_heads:
        missing = ["those behind the last"]
    made = joined(CONTAINER, merging.run() if not missing else merging.run_partial(), files, parts, {})
    if missing:
        made.lost = merging.lost
        made.warnings.append(partly("files of ranks are", missing))
    made.has_checksums = False  # those of the ranks' records are not looked at
    made.locate = merging.locate
    return made


def _ranks(names: Sequence[str], *, partial: bool) -> tuple[list[str], list[str]]:
    """The files by rank, every rank once, and those that are missing."""
    found: dict[int, str] = {}
    for name in names:
        match = CONSOLIDATED.fullmatch(name)
        assert match is not None, "callers have checked that it is one"
        if int(match[1]) in found:
            raise PartError(f"{found[int(match[1])]} and {name} are one rank's.", fix="Remove one of the two.")
        found[int(match[1])] = name
    missing = [rank for rank in range(max(found) + 1) if rank not in found]
    if missing and not partial:
        raise PartError(
            f"{names[-1]} is one of {max(found) + 1} parts at least; missing: {these_ranks(missing)}.",
            fix="Get the others too: a model needs the parts of all ranks.", rest=True,
        )  # fmt: skip
    return [found[rank] for rank in sorted(found)], [f"consolidated.{rank:02d}.pth" for rank in missing]


def _flat(part: Decoded) -> dict[str, Entry]:
    root = part.root if type(part.root) is Dict else Dict()
    entries = {name: node for name, node in root.items if type(name) is str and type(node) is Entry}
    if type(part.root) is not Dict or len(entries) != len(root.items):
        raise PartError(f"{part.source.path.name} holds something else than one mapping of names to tensors.")
    return entries


def _params(files: Files, tensors: Mapping[str, Entry]) -> Params | None:
    """What is known of the whole model; None where nothing is."""
    norm = tensors.get(_NORM)
    length = norm.shape[0] if norm is not None and len(norm.shape) == 1 else None
    said = _read_params(files.open("params.json")) if "params.json" in files.names() else {}
    dim = said.get("dim", length)
    if dim is None:
        return None
    if length not in (None, dim):
        raise PartError(f"params.json says dim {dim}, and {_NORM!r} has {length} elements.", why="It is another model's.")
    heads, size = said.get("n_heads"), said.get("head_dim")
    return Params(dim, heads * size if heads is not None and size is not None else dim)


def _read_params(source: Source) -> dict[str, int]:
    """The numbers that count."""
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


class _Merging:
    """The tensors of all ranks on their way into one state dict."""

    def __init__(self, roots: Sequence[Mapping[str, Entry]], params: Params | None, keys: Keys) -> None:
        self.roots, self.params = roots, params
        self.merger = Merger(keys)
        self.lost: list[tuple[str, str]] = []
        self.cut: dict[int, list[Entry]] = {}

    def run(self) -> Node:
        """The merged state dict, in the first rank's order."""
        self._check_names()
        for name in self.roots[0]:
            if name.endswith(_ATTENTION):
                self._check_world(name)
        return Dict([(name, self._merged(name)) for name in self.roots[0]], ordered=True)

    def run_partial(self) -> Node:
        """What every rank has whole, by its name: norms, frequencies, biases of rows."""
        self._check_names()
        whole = [name for name in self.roots[0] if self._is_whole(name)]
        why = "cut among the ranks, of which some are missing"
        self.lost = [(name, why) for name in self.roots[0] if not self._is_whole(name)]
        if not whole:
            raise PartError(f"No tensor is whole in these files: {self.lost[0][0]!r} is {why}.")
        held = {name: [(rank, tensors[name]) for rank, tensors in enumerate(self.roots)] for name in whole}
        return Dict([(name, self.merger.replicated(name, held[name])) for name in whole], ordered=True)

    @property
    def has_all_heads(self) -> bool:
        """Whether the files are as many as the model was cut into, by the matrices that tell it."""
        try:
            for name in self.roots[0]:
                if name.endswith(_ATTENTION) and all(name in tensors for tensors in self.roots):
                    self._check_world(name)
        except PartError:
            return False
        return True

    def locate(self, root: Node) -> Node:
        """Compare what several ranks hold; the bytes are where they are."""
        self.merger.check_replicas()
        check_not_twice(self.cut, lambda rank: f"consolidated.{rank:02d}.pth")
        return root

    def _check_names(self) -> None:
        every = dict.fromkeys(name for tensors in self.roots for name in tensors)
        for rank, tensors in enumerate(self.roots):
            if missing := [name for name in every if name not in tensors]:
                raise PartError(f"Rank {rank} does not have {some(missing)}.", why="The files of other ranks have it.")

    def _check_world(self, name: str) -> None:
        """As many files as the model was cut into: all heads must be there."""
        held = sum(tensors[name].shape[-1] for tensors in self.roots if tensors[name].shape)
        whole = self.params.heads if self.params is not None else held
        if held != whole and (len(self.roots) > 1 or (held and whole % held == 0)):
            raise PartError(
                f"{name!r} is not whole: {held} of its {whole} columns are on {these_ranks(range(len(self.roots)))}.",
                why="A part is missing, or is of another model.", fix="Get all consolidated.*.pth of one model.", rest=True,
            )  # fmt: skip

    def _merged(self, name: str) -> Entry:
        held = [(rank, tensors[name]) for rank, tensors in enumerate(self.roots)]
        axis = self._axis(name, held) if len(held) > 1 else None
        if axis is None:
            return self.merger.replicated(name, held)
        for rank, entry in held:
            self.cut.setdefault(rank, []).append(entry)
        return along(self.merger, name, axis, [held])

    def _axis(self, name: str, held: Held) -> int | None:
        """The dimension along which a tensor was cut; None where every rank has it whole."""
        kind = name.rpartition(".")[0].rpartition(".")[2]
        if self._is_whole(name):
            return None
        if kind in _COLUMNS or kind in _ROWS:
            return 0 if kind in _COLUMNS else 1
        return self._by_width(name, held, is_embedding=kind == "tok_embeddings")

    def _is_whole(self, name: str) -> bool:
        """Whether every rank has a tensor whole, by its name."""
        module, _, role = name.rpartition(".")
        kind = module.rpartition(".")[2]
        return name == _FREQUENCIES or kind.endswith("norm") or (kind in _ROWS and role != "weight")

    def _by_width(self, name: str, held: Held, *, is_embedding: bool) -> int:
        """The dimension in which the model's width is reached."""
        shape, dim = held[0][1].shape, self.params.dim if self.params is not None else -1
        reached = [axis for axis, size in enumerate(shape) if size * len(held) == dim]
        if len(reached) == 1:
            return reached[0]
        if is_embedding and len(shape) == 2 and shape[1] == dim:
            return 0
        raise PartError(
            f"Nothing says where {name!r} was cut: it is {list(shape)} on each of {len(held)} ranks.",
            why="Neither is its name known, nor does one dimension reach the model's width.",
            fix="" if self.params is not None else "params.json tells the width: put it beside the files.",
        )
