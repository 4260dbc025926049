"""The weight that torch computes of its parts: weight norm, spectral norm, pruning, orthogonal."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence

from ckpt_tools.errors import ConvertError
from ckpt_tools.io.content import Computed, read
from ckpt_tools.tree.nodes import Entry
from ckpt_tools.tree.parametrized import Parametrized, spectral_dims
from ckpt_tools.values.numeric import as_bytes, has_numbers, one_thread, row_major, torch_dtype
from ckpt_tools.values.pytorch import need_torch, torch

_CLEAR = 2  # times that vectors are nearer to one dimension's than to another's, where shapes do not tell which has the rows


def folded(weight: Parametrized, parts: Mapping[str, Entry]) -> Computed:
    """The bytes of the weight, as torch has it in `eval()`."""
    first = parts["v" if weight.kind == "weight norm" else "orig"]
    if first.dtype.family != "float" or not all(has_numbers(entry.dtype) for entry in parts.values()):
        raise ConvertError(f"{weight.name!r} is in parts of {first.dtype.name}; floats are folded.")

    def work() -> Iterator[memoryview]:
        need_torch("A weight in parts is worked out with it.")
        with one_thread():
            compute, order = _WORK[weight.kind]
            made = compute(*(_load(parts[role]) for role in order))
        yield as_bytes(made.reshape(-1), first.dtype)

    return Computed(first.nbytes, work, tuple(entry.storage.content for entry in parts.values()))


def _load(entry: Entry) -> torch.Tensor:
    data = bytearray(read(row_major(entry)))
    values = torch.frombuffer(data, dtype=torch_dtype(entry.dtype)) if data else torch.empty(0, dtype=torch_dtype(entry.dtype))
    return values.reshape(entry.shape).to(torch.float64 if values.dtype == torch.float64 else torch.float32)


def _weight_norm(norm: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    dims = [dim for dim in range(weight.ndim) if not norm.ndim or norm.shape[dim] == 1]
    length = weight.square().sum(dims, keepdim=bool(norm.ndim)).sqrt() if dims else weight.abs()
    return weight * (norm / length)


def _spectral_norm(weight: torch.Tensor, left: torch.Tensor, right: torch.Tensor) -> torch.Tensor:
    """Divided by its greatest singular value, which the vectors give. ConvTranspose has its rows in the second dimension."""
    found = []
    for dim in spectral_dims(tuple(weight.shape), tuple(left.shape), tuple(right.shape)):
        matrix = weight.movedim(dim, 0).flatten(1)
        size = left @ (matrix @ right)
        off = (matrix @ right / size - left).norm() + (matrix.T @ left / size - right).norm()  # of singular vectors nearly 0
        found.append((float(off), size))
        if weight.ndim == 2:
            break
    found.sort(key=lambda row: row[0])
    if len(found) > 1 and not _CLEAR * found[0][0] < found[1][0]:
        raise ConvertError("A spectral norm's vectors fit two dimensions of their weight.", fix="Fold it with its model.")
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
