"""Initial values for tensors that a checkpoint does not have: which scheme, with which numbers, as contents that stream.

The formulas are `torch.nn.init`'s, the numbers come from `draws`: one seed gives the same bytes on every machine.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import TYPE_CHECKING, Any, cast

from ckpt_tools.errors import ConvertError, NothingMatchedError, UsageError
from ckpt_tools.fit.targets import Target
from ckpt_tools.io.content import Computed
from ckpt_tools.matching.records import Param
from ckpt_tools.tree.dtypes import DTYPES, DType
from ckpt_tools.tree.globs import Globs
from ckpt_tools.values import random_bits
from ckpt_tools.values.pytorch import need_torch

if TYPE_CHECKING:
    import torch

_PLAIN = (
    "zeros", "ones", "xavier_uniform", "xavier_normal", "kaiming_uniform", "kaiming_normal", "orthogonal", "target", "default",
)  # fmt: skip
_WITH_NUMBER = {"normal": "STD", "trunc_normal": "STD", "uniform": "A"}
_BY_FAN = ("xavier_uniform", "xavier_normal", "kaiming_uniform", "kaiming_normal")
SCHEMES = (*_PLAIN, *(f"{name}:{number}" for name, number in _WITH_NUMBER.items()))
_CUT = 2.0  # trunc_normal stays within -2 and 2, whatever STD is: torch.nn.init.trunc_normal_


@dataclass(frozen=True, slots=True)
class Scheme:
    """One way to initialise."""

    kind: str
    number: float = 0.0
    zero_row: int | None = None
    for_weights: bool = False

    def __str__(self) -> str:
        text = f"{self.kind}:{self.number:g}" if self.kind in _WITH_NUMBER or self.kind == "constant" else self.kind
        return text if self.zero_row is None else f"{text}, row {self.zero_row} zero"


@dataclass(frozen=True, slots=True)
class Blank:
    """A tensor to be initialised."""

    name: str
    shape: tuple[int, ...]
    dtype: DType
    layer: str | None = None
    weight: tuple[int, ...] | None = None
    padding: int | None = None
    number: float | None = None

    @property
    def own(self) -> str:
        """Its name within its layer."""
        return self.name.rpartition(".")[2]


# --- which scheme


def parse_scheme(text: str) -> Scheme:
    """A scheme as `--reinit` takes it."""
    kind, colon, number = text.partition(":")
    if kind in _PLAIN and not colon:
        return Scheme(kind)
    if kind in _WITH_NUMBER:
        try:
            value = float(number)
        except ValueError:
            value = -1.0
        if math.isfinite(value) and value >= 0:
            return Scheme(kind, value)
        raise UsageError(f"`reinit={text!r}`: {kind} takes a number from 0 up.", fix=f"For example: {kind}:0.02")
    raise UsageError(f"`reinit={text!r}` is not a scheme.", fix=f"Choose one of {', '.join(SCHEMES)}.")


class Rules:
    """`--reinit`: one scheme for all weights, others for the names that a glob matches; of several globs the last that does."""

    def __init__(self, rules: str | Sequence[str] | Mapping[str, str] | None) -> None:
        texts = [rules] if isinstance(rules, str) else rules or ()
        texts = [f"{glob}={scheme}" for glob, scheme in texts.items()] if isinstance(texts, Mapping) else texts
        self.everywhere: Scheme | None = None
        self.schemes: dict[str, Scheme] = {}
        for text in texts:
            glob, _, scheme = text.rpartition("=")
            if glob:
                self.schemes.pop(glob, None)
                self.schemes[glob] = parse_scheme(scheme)
            elif self.everywhere is not None or text.startswith("="):
                raise UsageError(f"`reinit={text!r}`: one scheme is for everything, and another needs a GLOB=.")
            else:
                self.everywhere = replace(parse_scheme(scheme), for_weights=True)
        self.globs = Globs(self.schemes)

    def __bool__(self) -> bool:
        return self.everywhere is not None or bool(self.globs)

    def of(self, name: str) -> Scheme | None:
        """The scheme for a name, or None."""
        hits = self.globs.matching(name)
        return self.schemes[hits[-1]] if hits else self.everywhere

    def check_used(self) -> None:
        """Raise NothingMatchedError when a glob has matched no tensor that was to be initialised."""
        for glob in self.globs.unused:
            raise NothingMatchedError(
                f"`reinit={glob!r}` matches no tensor that has to be initialised.",
                why="Tensors that the checkpoint has are kept.",
                fix="To initialise one anew, leave it out of the input first: `drop=GLOB`.",
            )


def resolve(scheme: Scheme, blank: Blank) -> Scheme:
    """The scheme that `default`, or one for all weights, means for a tensor; any other is itself, checked."""
    resolved = _default(blank) if scheme.kind == "default" else scheme
    if resolved.for_weights and resolved.kind != "target":
        resolved = _of_no_weight(blank) or replace(resolved, for_weights=False, zero_row=blank.padding)
    if resolved.kind == "target":
        return resolved
    if resolved.kind not in ("zeros", "ones", "constant") and blank.dtype.family != "float":
        raise ConvertError(
            f"{blank.name!r} is {blank.dtype.name}; {resolved} gives numbers with fractions.",
            fix=f"Give it a scheme of its own: `reinit='{blank.name}=zeros'`.",
        )
    if resolved.kind in (*_BY_FAN, "orthogonal") and len(blank.shape) < 2:
        raise ConvertError(
            f"{blank.name!r} has {len(blank.shape)} dimensions; {resolved} needs 2.",
            fix=f"Give it a scheme of its own: `reinit='*.{blank.own}=zeros'`.",
        )
    if blank.dtype.family == "quantized" or not blank.dtype.in_torch or blank.dtype.packed > 1:
        raise ConvertError(f"{blank.name!r} is {blank.dtype.name}, which cannot be initialised.")
    _check_bound(resolved, blank)
    return resolved


def _of_no_weight(blank: Blank) -> Scheme | None:
    """What biases, norms and slopes get where one scheme is for all weights; None for a weight."""
    if blank.layer in _NORMED:
        return _NORMS.get(blank.own)
    if blank.layer == "PReLU":
        return _default(blank)
    found = _by_name(blank)
    return found if found is not None and found.kind in ("zeros", "ones") else None


def _check_bound(scheme: Scheme, blank: Blank) -> None:
    need_torch("Initial values are drawn with it.")
    import torch

    from ckpt_tools.values.numeric import torch_dtype

    if blank.dtype.family == "float" and _bound(scheme, blank.shape) > torch.finfo(torch_dtype(blank.dtype)).max:
        raise ConvertError(f"{blank.name!r}: {scheme} gives values that {blank.dtype.name} cannot hold.")


# What torch.nn's layers do in reset_parameters (torch 2.13). U: uniform in +-1/sqrt(fan_in of `weight`).
_U = Scheme("by fan")
_NORMS = {"weight": Scheme("ones"), "bias": Scheme("zeros"), "running_mean": Scheme("zeros"), "running_var": Scheme("ones"),
          "num_batches_tracked": Scheme("zeros")}  # fmt: skip
_DENSE = ("Linear", "Bilinear", *(f"Conv{kind}{d}d" for kind in ("", "Transpose") for d in (1, 2, 3)))
_NORMED = (*(f"{kind}Norm{d}d" for kind in ("Batch", "Instance") for d in (1, 2, 3)), "SyncBatchNorm", "LayerNorm", "GroupNorm",
           "RMSNorm")  # fmt: skip
_ATTENTION = {
    **dict.fromkeys(("in_proj_weight", "q_proj_weight", "k_proj_weight", "v_proj_weight"), Scheme("xavier_uniform")),
    **dict.fromkeys(("bias_k", "bias_v"), Scheme("xavier_normal")), "in_proj_bias": Scheme("zeros"),
}  # fmt: skip
_BY_LAYER: dict[str, dict[str, Scheme]] = {
    **{layer: {"weight": _U, "bias": _U} for layer in _DENSE},
    **dict.fromkeys(_NORMED, _NORMS),
    **{layer: {"weight": Scheme("normal", 1.0)} for layer in ("Embedding", "EmbeddingBag")},
    "NonDynamicallyQuantizableLinear": {"weight": _U, "bias": Scheme("zeros")},
    "PReLU": {"weight": Scheme("constant", 0.25)},
    "MultiheadAttention": _ATTENTION,
}
_RECURRENT = ("LSTM", "GRU", "RNN", "LSTMCell", "GRUCell", "RNNCell")
_NUMBERED = (*_RECURRENT, "PReLU")
_LAYERS = frozenset((*_BY_LAYER, *_RECURRENT))


def blank_in(module: torch.nn.Module, name: str, shape: tuple[int, ...], dtype: DType) -> Blank:
    """A blank for a tensor of a live module, whose type says how PyTorch initialises it."""
    weight = module._parameters.get("weight")
    layer = _layer(cast("Any", type(module)))
    number: Any = getattr(module, "hidden_size" if layer in _RECURRENT else "init", None) if layer in _NUMBERED else None
    fan_of = None if weight is None else tuple(weight.shape)
    return Blank(name, shape, dtype, layer, fan_of, getattr(module, "padding_idx", None), number)


def blank_for(target: Target, param: Param) -> Blank:
    """A blank for a tensor of a target, whose layer tells where the target is a live module."""
    dtype = DTYPES[param.dtype or "float32"]
    try:
        module = None if target.module is None else target.module.get_submodule(param.name.rpartition(".")[0])
    except AttributeError:  # a state dict hook gave the tensor a name of its own
        module = None
    return Blank(param.name, param.shape, dtype) if module is None else blank_in(module, param.name, param.shape, dtype)


@lru_cache(maxsize=1024)
def _layer(kind: type) -> str | None:
    """The PyTorch layer that a type is, or is derived from without a reset of its own; None for any other."""
    for base in kind.__mro__:
        ours = base.__module__.startswith("torch.nn.modules")
        if ours and base.__name__ in _LAYERS:
            return base.__name__
        if not ours and {"reset_parameters", "_reset_parameters"} & vars(base).keys():
            return None
    return None


def _default(blank: Blank) -> Scheme:
    if blank.layer in _RECURRENT:
        return Scheme("uniform", _inverse_root(blank.number or 0))
    found: Scheme | None
    if blank.layer == "PReLU" and blank.own == "weight" and blank.number is not None:
        found = Scheme("constant", blank.number)
    elif blank.layer is not None:
        found = _BY_LAYER.get(blank.layer, {}).get(blank.own)
        if found is _U:
            weight = blank.weight or blank.shape
            return Scheme("uniform", _inverse_root(weight[1] if blank.layer == "Bilinear" else _fans(weight)[0]))
    else:
        found = _by_name(blank)
    if found is not None and blank.padding is not None:
        found = replace(found, zero_row=blank.padding)
    if found is None:
        what = f"{blank.name!r} of a {blank.layer}" if blank.layer else f"{blank.name!r}"
        raise ConvertError(f"`reinit='default'` has no rule for {what}.", fix=f"Say how: `reinit='{blank.name}=normal:0.02'`.")
    return found


def _by_name(blank: Blank) -> Scheme | None:
    """The rule where the kind of layer is not known: by the tensor's own name and its dimensions."""
    if blank.own in ("running_mean", "running_var", "num_batches_tracked"):
        return _NORMS[blank.own]
    if blank.own.startswith("bias") or blank.own.endswith("bias") or blank.own == "beta":
        return Scheme("zeros")
    if blank.own == "gamma" or (blank.own == "weight" and len(blank.shape) == 1):
        return Scheme("ones")
    if "weight" in blank.own and len(blank.shape) > 1:
        return Scheme("kaiming_uniform")
    return None


def _inverse_root(fan: float) -> float:
    return 1.0 / math.sqrt(fan) if fan else 0.0


def _fans(shape: tuple[int, ...]) -> tuple[int, int]:
    """fan_in and fan_out, as `torch.nn.init` counts them."""
    field_size = math.prod(shape[2:])
    return shape[1] * field_size, shape[0] * field_size


# --- with which numbers


def _simple(scheme: Scheme, shape: tuple[int, ...]) -> Scheme:
    """Schemes by fan as uniform or normal with their number (gain 1 for Xavier, sqrt(2) and fan_in for Kaiming, as torch)."""
    if scheme.kind not in _BY_FAN:
        return scheme
    fan_in, fan_out = _fans(shape)
    fan = (fan_in + fan_out) / 2 if scheme.kind.startswith("xavier") else fan_in / 2
    variance = 1.0 / fan if fan else 0.0
    if scheme.kind.endswith("uniform"):
        return Scheme("uniform", math.sqrt(3.0 * variance))
    return Scheme("normal", math.sqrt(variance))


def _bound(scheme: Scheme, shape: tuple[int, ...]) -> float:
    """No value can be larger than this."""
    simple = _simple(scheme, shape)
    return {
        "normal": random_bits.LARGEST_NORMAL * simple.number, "uniform": simple.number, "trunc_normal": _CUT,
        "orthogonal": 1.0, "zeros": 0.0, "ones": 1.0, "constant": simple.number,
    }[simple.kind]  # fmt: skip


def numbers(scheme: Scheme, blank: Blank, seed: int, start: int, count: int) -> torch.Tensor:
    """Elements `start` to `start + count` of an initialised tensor, row-major, as float64; `scheme` is resolved."""
    values = _values(scheme, blank, seed, start, count)
    if scheme.zero_row is not None:
        width = math.prod(blank.shape[1:])
        row = scheme.zero_row * width - start
        values[max(0, row) : max(0, row + width)] = 0.0
    return values


def _values(scheme: Scheme, blank: Blank, seed: int, start: int, count: int) -> torch.Tensor:
    import torch

    simple = _simple(scheme, blank.shape)
    if simple.kind == "uniform":
        return random_bits.uniform(seed, blank.name, start, count).mul_(2.0).sub_(1.0).mul_(simple.number)
    if simple.kind == "normal":
        return random_bits.normal(seed, blank.name, start, count).mul_(simple.number)
    if simple.kind == "trunc_normal":
        return _truncated(simple.number, random_bits.uniform(seed, blank.name, start, count))
    if simple.kind == "orthogonal":
        matrix = random_bits.orthogonal(seed, blank.name, blank.shape[0], math.prod(blank.shape[1:]))
        return matrix.reshape(-1)[start : start + count]
    value = {"zeros": 0.0, "ones": 1.0, "constant": simple.number}[simple.kind]
    return torch.full((count,), value, dtype=torch.float64, device="cpu")


def _truncated(std: float, u: torch.Tensor) -> torch.Tensor:
    """Normal numbers of this standard deviation, cut at -2 and 2, by the inverse of their distribution."""
    if not std:
        return u.zero_()
    # math.erfc may differ in the last digit from one C library to another: 2**-40 is far finer than any float32 result needs.
    below = round(math.erfc(_CUT / std / math.sqrt(2.0)) / 2 * 2**40) / 2**40
    return random_bits.quantile(u.mul_(1.0 - 2.0 * below).add_(below)).mul_(std).clamp_(-_CUT, _CUT)


def threads_for(scheme: Scheme) -> AbstractContextManager[None]:
    """One thread while values are drawn block by block; all of them for a scheme that works on a whole matrix."""
    from ckpt_tools.values.numeric import one_thread

    return nullcontext() if scheme.kind == "orthogonal" else one_thread()


def content(scheme: Scheme, blank: Blank, seed: int) -> Computed:
    """The bytes of an initialised tensor; worked out in chunks while they are written. `scheme` is resolved."""
    need_torch("Initial values are drawn with it.")
    count = math.prod(blank.shape)

    def work() -> Iterator[memoryview]:
        from ckpt_tools.values.numeric import torch_dtype

        step = count if scheme.kind == "orthogonal" else random_bits.BLOCK
        for start in range(0, count, step or 1):
            with threads_for(scheme):
                values = numbers(scheme, blank, seed, start, min(step, count - start))
                data = as_bytes(values, torch_dtype(blank.dtype), blank.name)
            yield data

    return Computed(count * blank.dtype.itemsize, work)


def as_bytes(values: torch.Tensor, dtype: torch.dtype, name: str) -> memoryview:
    """Numbers as bytes of a dtype; ConvertError when one of them is no longer finite."""
    import torch

    out = bytearray(values.numel() * dtype.itemsize)
    if out:
        typed = torch.frombuffer(out, dtype=dtype)
        typed.copy_(values.reshape(-1))
        check_finite(typed, name)
    return memoryview(out)


def check_finite(values: torch.Tensor, name: str) -> None:
    """Raise ConvertError when a float tensor holds NaN or inf."""
    wide = values if values.itemsize > 1 or not values.is_floating_point() else values.float()  # fp8 has no isfinite
    if not bool(wide.isfinite().all()):
        raise ConvertError(f"{name!r}: an initial value is NaN or infinite.", fix="Choose another scheme or dtype.")
