"""What the names in an adapter say: which module a tensor is for, and which part of its low-rank change it is. Pure functions.

PEFT writes `base_model.model.MODULE.lora_A.weight` (peft/utils/save_and_load.py); diffusers the same below `unet.`, and before
PEFT `MODULE.lora.down.weight` or `MODULE.processor.to_q_lora.down.weight`; kohya's scripts `lora_unet_MODULE.lora_down.weight`,
with underscores for the module's dots (kohya-ss/sd-scripts, networks/lora.py).
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterator
from dataclasses import dataclass

PEFT_PREFIX = "base_model.model."
# Behind `lora_A` a live model has the adapter's name, which `save_pretrained` leaves out.
_RULES: tuple[tuple[str, str], ...] = (
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
    ("difference", r"\.diff"),  # ComfyUI's: what is added as it is
    ("bias_difference", r"\.diff_b"),
    ("grouped_down", r"\.lora_(?:gate_and_up|down)_A"),  # NeMo Automodel's, of all experts of a layer
    ("grouped_up", r"\.lora_(?:gate_and_up|down)_B"),
    ("base", r"\.base_layer\.weight"),  # PEFT saves what an embedding was before its change beside the factors
)
_ROLES = tuple((role, re.compile(rf"(?:{rule})\Z")) for role, rule in _RULES)
_FACTOR = re.compile(
    r"[._](?:lora_|lora\.|lora_linear_layer|hada_|lokr_|oft_|boft_|ia3_|vera_|glora|dyt_|dora_scale|vblora|randlora|fourierft|hra_)"
)
_KOHYA = re.compile(r"(lora_unet|lora_te\d?|lora_transformer|lora_prior_unet|lora_prior_te|lycoris|lora)_(?=.)")
_COMPONENT = re.compile(r"(unet|text_encoder(?:_\d)?|transformer(?:_\d)?|prior|controlnet)\.(?=.)")
_WRAPPED = re.compile(r"(?:\.modules_to_save(?:\.[^.]+)?|\.base_layer|\.original_module)(?=\.)")
_PROCESSOR = re.compile(r"(.*)\.processor\.(to_[qkv]|to_out)")
_OLD_TEXT = {"to_q": "q_proj", "to_k": "k_proj", "to_v": "v_proj", "to_out": "out_proj"}


@dataclass(frozen=True, slots=True)
class Part:
    module: str
    role: str | None
    component: str = ""
    flat: bool = False
    peft: bool = False
    wrapped: int = 0


def read_name(name: str) -> Part:
    tail = max(0, len(name) - 120)  # names end within a few parts: the rest is not searched
    for role, rule in _ROLES:
        if (found := rule.search(name, tail)) is not None and found.start():
            if role in ("grouped_down", "grouped_up"):
                return _module(f"{name[: found.start()]}.{'gate_up' if '_up_' in found.group() else 'down'}_proj", role)
            old = found.group().startswith("_lora")
            return _module(_processor(name[: found.start()]) if old else name[: found.start()], role)
    return _module(name, None)


def is_factor(name: str) -> bool:
    """Whether a name that has no role here is a part of some other kind of adapter, and no tensor of a model."""
    return _FACTOR.search(name) is not None


def _module(path: str, role: str | None) -> Part:
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
    return path if found is None else f"{found[1]}.{found[2]}{'.0' * (found[2] == 'to_out')}"


# Diffusers' names of a U-Net's modules, and Stability's: kohya's scripts use these for SDXL, and diffusers' for SD 1.5.
_BLOCKS = range(4)
_LAYOUTS = [
    *((f"down_blocks.{b}.resnets.{n}", f"input_blocks.{3 * b + n + 1}.0") for b in _BLOCKS for n in range(2)),
    *((f"down_blocks.{b}.attentions.{n}", f"input_blocks.{3 * b + n + 1}.1") for b in _BLOCKS for n in range(2)),
    *((f"down_blocks.{b}.downsamplers.0.conv", f"input_blocks.{3 * b + 3}.0.op") for b in _BLOCKS),
    *((f"up_blocks.{b}.resnets.{n}", f"output_blocks.{3 * b + n}.0") for b in _BLOCKS for n in range(3)),
    *((f"up_blocks.{b}.attentions.{n}", f"output_blocks.{3 * b + n}.1") for b in _BLOCKS for n in range(3)),
    *((f"up_blocks.{b}.upsamplers.0.conv", f"output_blocks.{3 * b + 2}.{n}.conv") for b in _BLOCKS for n in (1, 2)),
    ("mid_block.resnets.0", "middle_block.0"), ("mid_block.attentions.0", "middle_block.1"),
    ("mid_block.resnets.1", "middle_block.2"), ("conv_in", "input_blocks.0.0"), ("conv_out", "out.2"),
    ("conv_norm_out", "out.0"), ("time_embedding.linear_1", "time_embed.0"), ("time_embedding.linear_2", "time_embed.2"),
    ("add_embedding.linear_1", "label_emb.0.0"), ("add_embedding.linear_2", "label_emb.0.2"),
]  # fmt: skip
_IN_RESNETS = [
    ("norm1", "in_layers.0"), ("conv1", "in_layers.2"), ("time_emb_proj", "emb_layers.1"), ("norm2", "out_layers.0"),
    ("conv2", "out_layers.3"), ("conv_shortcut", "skip_connection"),
]  # fmt: skip
_UNET = ("model.diffusion_model.", "diffusion_model.", "unet.", "")


def in_other_layout(paths: Collection[str]) -> Iterator[tuple[str, str]]:
    """The modules of a U-Net with two layers a block, and what they are called in the other layout."""
    prefix = next(prefix for prefix in _UNET if not prefix or any(path.startswith(prefix) for path in paths))
    here = {path[len(prefix) :] for path in paths if path.startswith(prefix)}
    layouts, inner = _LAYOUTS, _IN_RESNETS
    if _is_stabilitys(here):
        layouts, inner = [(other, own) for own, other in layouts], [(other, own) for own, other in inner]
    elif not _is_diffusers(here):
        return
    in_resnets = dict(inner)
    for path in here:
        for own, other in layouts:
            if f"{path}.".startswith(f"{own}."):
                rest = path[len(own) + 1 :]
                yield prefix + path, ".".join(filter(None, (prefix + other, in_resnets.get(rest, rest))))


def _is_stabilitys(paths: Collection[str]) -> bool:
    """Whether a U-Net has two layers a block: its blocks are three numbers long, and the last of a block halves the size."""
    inputs, outputs = (
        {int(path.split(".")[1]) for path in paths if path.startswith(f"{kind}_blocks.")} for kind in ("input", "output")
    )
    halving = {number for number in inputs if f"input_blocks.{number}.0.op" in paths}
    end = 3 * len(halving) + 3
    return bool(halving) and halving == set(range(3, end, 3)) and inputs == outputs == set(range(end))


def _is_diffusers(paths: Collection[str]) -> bool:
    layers: dict[tuple[str, str], set[str]] = {}
    for path in paths:
        if found := re.match(r"(down|up)_blocks\.(\d{1,3})\.resnets\.(\d{1,3})\.", path):
            layers.setdefault((found[1], found[2]), set()).add(found[3])
    return bool(layers) and all(own == ({"0", "1"} if kind == "down" else {"0", "1", "2"}) for (kind, _), own in layers.items())
