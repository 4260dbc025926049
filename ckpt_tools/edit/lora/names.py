"""What the names in an adapter say: which module a tensor is for, and which part of its low-rank change it is. Pure functions.

PEFT writes `base_model.model.MODULE.lora_A.weight` (peft/utils/save_and_load.py); diffusers the same below `unet.`, and before
PEFT `MODULE.lora.down.weight` or `MODULE.processor.to_q_lora.down.weight`; kohya's scripts `lora_unet_MODULE.lora_down.weight`,
with underscores for the module's dots (kohya-ss/sd-scripts, networks/lora.py).
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Literal, TypeAlias

Role: TypeAlias = Literal["base", "down", "up", "embedding_down", "embedding_up", "magnitude", "bias", "mid", "alpha"]

PEFT_PREFIX = "base_model.model."
# Behind `lora_A` a live model has the adapter's name, which `save_pretrained` leaves out.
_RULES: tuple[tuple[Role, str], ...] = (
    ("down", r"\.lora_A(?:\.[^.]+)?\.weight|\.lora_down\.weight|\.lora\.down\.weight|\.lora_linear_layer\.down\.weight"),
    ("up", r"\.lora_B(?:\.[^.]+)?\.weight|\.lora_up\.weight|\.lora\.up\.weight|\.lora_linear_layer\.up\.weight"),
    ("down", r"_lora\.down\.weight"),
    ("up", r"_lora\.up\.weight"),
    ("bias", r"\.lora_B(?:\.[^.]+)?\.bias"),
    ("embedding_down", r"\.lora_embedding_A(?:\.[^.]+)?"),
    ("embedding_up", r"\.lora_embedding_B(?:\.[^.]+)?"),
    ("magnitude", r"\.lora_magnitude_vector(?:\.[^.]+){0,2}|\.dora_scale"),
    ("mid", r"\.lora_mid\.weight"),
    ("alpha", r"\.alpha"),
    ("base", r"\.base_layer\.weight"),  # PEFT saves what an embedding was before its change beside the factors
)
_ROLES = tuple((role, re.compile(rule)) for role, rule in _RULES)
_FACTOR = re.compile(
    r"[._](?:lora_|lora\.|lora_linear_layer|hada_|lokr_|oft_|boft_|ia3_|vera_|glora|dyt_|diff_b?$|dora_scale|vblora|randlora|fourierft|hra_)"
)
_KOHYA = re.compile(r"(lora_unet|lora_te\d?|lora_transformer|lora_prior_unet|lora_prior_te|lycoris|lora)_(?=.)")
_COMPONENT = re.compile(r"(unet|text_encoder(?:_\d)?|transformer(?:_\d)?|prior|controlnet)\.(?=.)")
_WRAPPED = re.compile(r"(?:\.modules_to_save(?:\.[^.]+)?|\.base_layer|\.original_module)(?=\.)")
_PROCESSOR = re.compile(r"(.*)\.processor\.(to_[qkv]|to_out)")
_OLD_TEXT = {"to_q": "q_proj", "to_k": "k_proj", "to_v": "v_proj", "to_out": "out_proj"}


@dataclass(frozen=True, slots=True)
class Part:
    """One tensor of an adapter."""

    module: str
    role: Role | None
    component: str = ""
    flat: bool = False
    peft: bool = False
    wrapped: int = 0


def read_name(name: str) -> Part:
    for role, rule in _ROLES:
        if found := _at_end(rule, name):
            old = found.group().startswith("_lora")
            return _module(_processor(name[: found.start()]) if old else name[: found.start()], role)
    return _module(name, None)


def is_factor(name: str) -> bool:
    """Whether a name that has no role here is a part of some other kind of adapter, and no tensor of a model."""
    return _FACTOR.search(name) is not None


def _at_end(rule: re.Pattern[str], name: str) -> re.Match[str] | None:
    """Where the end of a name is what the rule says. Names end within a few parts: the rest is not searched."""
    tail = max(0, len(name) - 120)
    found = next((match for match in rule.finditer(name, tail) if match.end() == len(name)), None)
    return found if found is not None and found.start() else None


def _module(path: str, role: Role | None) -> Part:
    if path.startswith(PEFT_PREFIX):
        wrapped = 0 if role is None else path.count(".base_layer")
        return Part(_WRAPPED.sub("", f"{path[len(PEFT_PREFIX) :]}.")[:-1], role, peft=True, wrapped=wrapped)
    if "." not in path and role is not None and (kohya := _KOHYA.match(path)):
        return Part(path[kohya.end() :], role, kohya.group(1), flat=True)
    path = _WRAPPED.sub("", f"{path}.")[:-1]
    component = _COMPONENT.match(path)
    return Part(path, role, component.group(1) if component else "")


def _processor(path: str) -> str:
    """The module that diffusers' attention processors changed before PEFT: `attn.processor.to_out_lora` is `attn.to_out.0`."""
    parent, _, last = path.rpartition(".")
    if parent.endswith(".self_attn") and last in _OLD_TEXT:
        return f"{parent}.{_OLD_TEXT[last]}"
    found = _PROCESSOR.fullmatch(path)
    if found is None:
        return path
    return f"{found[1]}.to_out.0" if found[2] == "to_out" else f"{found[1]}.{found[2]}"
