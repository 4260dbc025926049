"""Weights that are in parts made one tensor each: what `torch.nn.utils.parametrize.remove_parametrizations` does to a model.

They are worked out as torch does it in `eval()`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace

from ckpt_tools.edit.renaming import replace_metadata
from ckpt_tools.errors import ConvertError, NothingMatchedError
from ckpt_tools.formats.contents import find_state_dicts, tensors_by_name
from ckpt_tools.io.content import Computed, read
from ckpt_tools.text import some
from ckpt_tools.tree.names import unwrap
from ckpt_tools.tree.nodes import Dict, Entry, Node, stored
from ckpt_tools.tree.parametrized import Parametrized, parametrized, part_of, spectral_dims
from ckpt_tools.values.numeric import as_bytes, exact, has_numbers, one_thread, row_major, view_of
from ckpt_tools.values.pytorch import need_torch, torch

# Times that vectors are nearer to one dimension's than to another's, where shapes do not tell which has the rows; vectors that
# no step of training has touched yet are near to none, which are 1 off or more.
_CLEAR = 2


def find(node: Dict) -> list[Parametrized]:
    """The weights in parts; the kind of one with a second parametrization, which only `_metadata` tells, is not known."""
    rows = parametrized({name: value.shape for name, value in tensors_by_name(node).items() if type(value) is Entry})
    paths = node.metadata.named if node.metadata is not None else {}
    for row in rows:
        module, _, last = row.name.rpartition(".")
        if ".".join(filter(None, (module, "parametrizations", last, "1"))) in paths:
            row.kind = ""
    return rows


def fold_all(root: Node) -> list[Parametrized]:
    nodes = {id(state_dict.node): state_dict.node for state_dict in find_state_dicts(root)}.values()
    found = [(node, find(node)) for node in nodes]
    rows = [row for _, each in found for row in each]
    if not rows:
        raise NothingMatchedError(
            "There is no weight in parts.", why="`fold` looks for weight norm, spectral norm, pruning and orthogonal weights."
        )
    if (unknown := next((row for row in rows if not row.kind), None)) is not None:
        parts = ", ".join(map(repr, unknown.parts.values()))
        raise ConvertError(f"{unknown.name!r} is in parts by a parametrization that is not known: {parts}.",
                           fix="Fold it with its model: torch.nn.utils.parametrize.remove_parametrizations.")  # fmt: skip
    need_torch("`fold` works weights out with it.")
    return [row for node, _ in found for row in _fold(node, lambda row: bool(row.kind))]


def fold_for(node: Dict, wanted: Iterable[str]) -> list[Parametrized]:
    """Fold the weights that a target has whole, by its names; all of them where the target has none in parts."""
    names = set(map(unwrap, wanted))
    in_parts = any(map(part_of, names))
    return _fold(node, lambda row: bool(row.kind) and (not in_parts or unwrap(row.name) in names))


def told_fold(rows: Sequence[Parametrized]) -> list[tuple[str, str]]:
    kinds: dict[str, list[str]] = {}
    for row in rows:
        kinds.setdefault(row.kind, []).append(row.name)
    notes = []
    for kind, names in kinds.items():
        text = f"{kind.capitalize()} is folded into {len(names)} plain weight{'s' * (len(names) != 1)}: {some(names)}."
        if kind == "orthogonal":
            text += " The map is not in the file: torch's default was taken (matrix_exp of square weights, else householder)."
        notes.append(("folded", text))
    return notes


def _fold(node: Dict, is_wanted: Callable[[Parametrized], bool]) -> list[Parametrized]:
    """Fold weights, and then those of which they are a part: a `weight_v` may be pruned itself."""
    rows = [row for row in find(node) if is_wanted(row)]
    if not rows:
        return []
    tensors = tensors_by_name(node)
    made: dict[tuple[object, ...], Entry] = {}
    first: dict[Node, tuple[str, Entry]] = {}
    for row in rows:
        parts = {role: entry for role, name in row.parts.items() if type(entry := tensors[name]) is Entry}
        key = (row.kind, *(view_of(entry) for entry in parts.values()))
        if key not in made:
            made[key] = _folded(row, parts, f"folded{len(made)}")
        first[next(key for key, _ in node.items if key in row.parts.values())] = (row.name, made[key])
    gone = {name for row in rows for name in row.parts.values()}
    node.items[:] = [first.get(key, (key, value)) for key, value in node.items if key in first or key not in gone]
    if (metadata := node.metadata) is not None:  # without the rows of parametrizations that are no more
        left = tuple(key for key, _ in node.items if type(key) is str and "parametrizations." in key)
        kept = [
            (path, row) for path, row in metadata.items
            if type(path) is not str or "parametrizations" not in path.split(".") or any(k.startswith(f"{path}.") for k in left)
        ]  # fmt: skip
        replace_metadata(node, metadata, kept)
    return [*rows, *_fold(node, is_wanted)]


def _folded(weight: Parametrized, parts: Mapping[str, Entry], key: str) -> Entry:
    compute, order = _WORK[weight.kind]
    like = parts["v" if weight.kind == "weight norm" else "orig"]
    if like.dtype.family != "float" or not all(has_numbers(entry.dtype) for entry in parts.values()):
        raise ConvertError(f"{weight.name!r} is in parts of {like.dtype.name}; floats are folded.")

    def work() -> Iterator[memoryview]:
        need_torch("A weight in parts is worked out with it.")
        with one_thread():
            made = compute(*(_load(parts[role]) for role in order))
        yield as_bytes(made.reshape(-1), like.dtype)

    content = Computed(like.nbytes, work, tuple(entry.storage.content for entry in parts.values()))
    made = stored(key, like.dtype, like.shape, content, like.storage.device)
    return replace(made, requires_grad=like.requires_grad, kind=like.kind)


def _load(entry: Entry) -> torch.Tensor:
    values = exact(bytearray(read(row_major(entry))), entry.dtype).reshape(entry.shape)
    return values.to(torch.float64 if entry.dtype.name == "float64" else torch.float32)


def _weight_norm(norm: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    dims = [dim for dim in range(weight.ndim) if not norm.ndim or norm.shape[dim] == 1]
    length = weight.square().sum(dims, keepdim=bool(norm.ndim)).sqrt() if dims else weight.abs()
    return weight * (norm / length)


def _spectral_norm(weight: torch.Tensor, left: torch.Tensor, right: torch.Tensor) -> torch.Tensor:
    """Divided by its greatest singular value, which the vectors give. ConvTranspose has its rows in the second dimension."""
    found = []
    for dim in spectral_dims(tuple(weight.shape), tuple(left.shape), tuple(right.shape)):
        matrix = weight.movedim(dim, 0).reshape(weight.shape[dim], -1)
        size = left @ (matrix @ right)
        off = (matrix @ right / size - left).norm() + (matrix.T @ left / size - right).norm()  # of singular vectors nearly 0
        found.append((float(off), size))
        if weight.ndim == 2:
            break
    found.sort(key=lambda row: row[0])
    if len(found) > 1 and not _CLEAR * found[0][0] < min(found[1][0], _CLEAR):
        raise ConvertError(
            "The shapes of a spectral norm fit two dimensions of its weight, and its vectors do not tell which.",
            fix="Fold it with its model.",
        )
    return weight / found[0][1]


def _orthogonal(weight: torch.Tensor, base: torch.Tensor) -> torch.Tensor:
    """By the map that torch takes where none is named: a matrix exponential of square ones, else Householder's reflections."""
    turned = weight.shape[0] < weight.shape[1]
    rows = weight.T if turned else weight
    if weight.shape[0] == weight.shape[1]:
        lower = rows.tril()
        made = torch.matrix_exp(lower - lower.T)
    else:
        lower = rows.tril(diagonal=-1)
        made = torch.linalg.householder_product(lower, 2.0 / (1.0 + lower.square().sum(dim=-2)))
        made = made * rows.diagonal().int().unsqueeze(-2)
    made = base @ made
    return made.T if turned else made


# How a weight is worked out, and of which parts
_WORK: dict[str, tuple[Callable[..., torch.Tensor], Sequence[str]]] = {
    "weight norm": (_weight_norm, "gv"),
    "spectral norm": (_spectral_norm, ("orig", "u", "v")),
    "orthogonal": (_orthogonal, ("orig", "base")),
    "pruning": (lambda weight, mask: mask.to(weight.dtype) * weight, ("orig", "mask")),
}
