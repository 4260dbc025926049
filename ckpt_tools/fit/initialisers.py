"""Initial values for tensors that a checkpoint does not have: which scheme, with which numbers, as contents that stream.

`torch.nn.init` draws each tensor with a seed of its own, made of the user's and the tensor's name.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Any, cast

from ckpt_tools.errors import ConvertError, NothingMatchedError, UsageError
from ckpt_tools.fit.targets import Target
from ckpt_tools.io.content import Computed
from ckpt_tools.matching.records import Param
from ckpt_tools.tree.dtypes import DTYPES, DType
from ckpt_tools.tree.globs import Globs
from ckpt_tools.values.numeric import one_thread, tensor_bytes, torch_dtype
from ckpt_tools.values.pytorch import need_torch, torch

_PLAIN = (
    "zeros", "ones", "xavier_uniform", "xavier_normal", "kaiming_uniform", "kaiming_normal", "orthogonal", "target", "default",
)  # fmt: skip
_WITH_NUMBER = {"normal": "STD", "trunc_normal": "STD", "uniform": "A"}
_BY_FAN = ("xavier_uniform", "xavier_normal", "kaiming_uniform", "kaiming_normal")
SCHEMES = (*_PLAIN, *(f"{name}:{number}" for name, number in _WITH_NUMBER.items()))
_CONSTANT = ("zeros", "ones", "constant")


@dataclass(frozen=True, slots=True)
class Scheme:
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
    if resolved.for_weights and resolved.kind != "target":  # biases, norms and slopes are no weights
        own = _NORMS.get(blank.own) if blank.layer in _NORMED else _by_name(blank)
        if blank.layer == "PReLU":
            resolved = _default(blank)
        elif own is not None and own.kind in ("zeros", "ones"):
            resolved = own
        else:
            resolved = replace(resolved, for_weights=False, zero_row=blank.padding)
    if resolved.kind == "target":
        return resolved
    if resolved.kind not in _CONSTANT and blank.dtype.family != "float":
        raise ConvertError(
            f"{blank.name!r} is {blank.dtype.name}; {resolved} gives numbers with fractions.",
            fix=f"Give it its own scheme: `reinit='{blank.name}=zeros'`.",
        )
    if resolved.kind in (*_BY_FAN, "orthogonal") and len(blank.shape) < 2:
        raise ConvertError(
            f"{blank.name!r} has {len(blank.shape)} dimensions; {resolved} needs 2.",
            fix=f"Give it its own scheme: `reinit='*.{blank.own}=zeros'`.",
        )
    if blank.dtype.family == "quantized" or not blank.dtype.in_torch or blank.dtype.packed > 1:
        raise ConvertError(f"{blank.name!r} is {blank.dtype.name}, which cannot be initialised.")
    need_torch("Initial values are drawn with it.")
    largest = resolved.number * {"normal": 9, "uniform": 1, "constant": 1}.get(resolved.kind, 0)
    if blank.dtype.family == "float" and largest > torch.finfo(torch_dtype(blank.dtype)).max:
        raise ConvertError(f"{blank.name!r}: {resolved} gives values that {blank.dtype.name} cannot hold.")
    return resolved


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
    found = _by_name(blank) if blank.layer is None else _BY_LAYER.get(blank.layer, {}).get(blank.own)
    if blank.layer == "PReLU" and blank.own == "weight" and blank.number is not None:
        found = Scheme("constant", blank.number)
    if found is _U or blank.layer in _RECURRENT:
        weight = blank.weight or blank.shape
        fan = blank.number or 0 if found is not _U else weight[1] if blank.layer == "Bilinear" else math.prod(weight[1:])
        return Scheme("uniform", 1.0 / math.sqrt(fan) if fan else 0.0)
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


# --- with which numbers


def draw(scheme: Scheme, blank: Blank, seed: int) -> torch.Tensor:
    """A tensor with its initial values; `scheme` is resolved."""
    dtype = torch_dtype(blank.dtype)
    # In float32 every 2**24th value of trunc_normal_ is one of the ends.
    wide = torch.float64 if dtype is torch.float64 or scheme.kind == "trunc_normal" else torch.float32
    values = torch.zeros(blank.shape, dtype=wide, device="cpu")
    if values.numel():  # a seed for each tensor, so that its values do not depend on which others are initialised
        own = hashlib.sha256(f"{seed} {blank.name}".encode("utf-8", "surrogatepass")).digest()[:7]
        with one_thread():
            _fill(values, scheme, torch.Generator(device="cpu").manual_seed(int.from_bytes(own)))
    if scheme.zero_row is not None:
        values[scheme.zero_row] = 0.0
    made = values.to(dtype)
    check_finite(made, blank.name)
    return made


def _fill(values: torch.Tensor, scheme: Scheme, generator: torch.Generator) -> None:
    constants = {"zeros": 0.0, "ones": 1.0, "constant": scheme.number}
    if scheme.kind in constants:
        values.fill_(constants[scheme.kind])
    elif scheme.kind == "normal":
        values.normal_(generator=generator).mul_(scheme.number)
    elif scheme.kind == "uniform":
        values.uniform_(-1.0, 1.0, generator=generator).mul_(scheme.number)
    elif scheme.kind != "trunc_normal":
        getattr(torch.nn.init, f"{scheme.kind}_")(values, generator=generator)
    elif scheme.number:
        torch.nn.init.trunc_normal_(values, std=scheme.number, generator=generator)


def content(scheme: Scheme, blank: Blank, seed: int) -> Computed:
    """The bytes of an initialised tensor, worked out while they are written; `scheme` is resolved."""
    need_torch("Initial values are drawn with it.")

    def work() -> Iterator[memoryview]:
        yield tensor_bytes(draw(scheme, blank, seed))

    return Computed(math.prod(blank.shape) * blank.dtype.itemsize, work)


def check_finite(values: torch.Tensor, name: str) -> None:
    """Raise ConvertError when a float tensor holds NaN or inf."""
    wide = values if values.itemsize > 1 or not values.is_floating_point() else values.float()  # fp8 has no isfinite
    if not bool(wide.isfinite().all()):
        raise ConvertError(f"{name!r}: an initial value is NaN or infinite.", fix="Choose another scheme or dtype.")
