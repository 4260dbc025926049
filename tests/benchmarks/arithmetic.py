"""Jobs that compute: an adapter merged, quantised weights made plain, beside what their makers' own code does on the CPU."""

from __future__ import annotations

from pathlib import Path

from tests.benchmarks.rivals import Job, ckpt, installed, python, script

TITLES = {
    "lora": "A LoRA of rank 16 and its base, {:g} GB in bf16",
    "fp8": "FP8 with a scale for 128 x 128, {:g} GB in bf16",
    "nf4": "bitsandbytes' nf4, {:g} GB in bf16",
}
# Each maker writes what is converted, and of its first matrix what must come of it.
_START = """
import sys, json, torch
from pathlib import Path
from safetensors.torch import save_file
folder, gigabytes, size = Path(sys.argv[1]), float(sys.argv[2]), 4096
names = [f"layers.{i // 4}.{'qkvo'[i % 4]}_proj" for i in range(max(1, round(gigabytes * 1e9 / size / size / 2)))]
def expect(tensor):
    save_file({f"{names[0]}.weight": tensor}, folder / "expected.safetensors")
"""
_LORA = """
base = {f"{name}.weight": torch.randn(size, size).bfloat16() for name in names}
save_file(base, folder / "base.safetensors")
factors = {}
for name in names:
    factors[f"base_model.model.{name}.lora_A.weight"] = torch.randn(16, size) / 64
    factors[f"base_model.model.{name}.lora_B.weight"] = torch.randn(size, 16) / 64
(folder / "adapter").mkdir()
save_file(factors, folder / "adapter" / "adapter_model.safetensors")
config = {"peft_type": "LORA", "r": 16, "lora_alpha": 32, "target_modules": [f"{kind}_proj" for kind in "qkvo"]}
(folder / "adapter" / "adapter_config.json").write_text(json.dumps(config))
down, up = list(factors.values())[:2]
expect((base[f"{names[0]}.weight"] + (up @ down) * 2).bfloat16())
"""
_FP8 = """
found = {}
for name in names:
    found[f"{name}.weight"] = torch.randn(size, size).to(torch.float8_e4m3fn)
    found[f"{name}.weight_scale_inv"] = torch.rand(size // 128, size // 128) + 0.5
save_file(found, folder / "fp8.safetensors")
codes, scale = list(found.values())[:2]
expect((codes.float() * scale.repeat_interleave(128, 0).repeat_interleave(128, 1)).bfloat16())
"""
_NF4 = """
table = torch.tensor([
    -1.0, -0.6961928009986877, -0.5250730514526367, -0.39491748809814453, -0.28444138169288635, -0.18477343022823334,
    -0.09105003625154495, 0.0, 0.07958029955625534, 0.16093020141124725, 0.24611230194568634, 0.33791524171829224,
    0.44070982933044434, 0.5626170039176941, 0.7229568362236023, 1.0])
state = {"quant_type": "nf4", "blocksize": 64, "dtype": "bfloat16", "shape": [size, size]}
found = {}
for name in names:
    weight = f"{name}.weight"
    found[weight] = torch.randint(0, 256, (size * size // 2, 1), dtype=torch.uint8)
    found[f"{weight}.absmax"], found[f"{weight}.quant_map"] = torch.rand(size * size // 64), table.clone()
    found[f"{weight}.quant_state.bitsandbytes__nf4"] = torch.tensor(list(json.dumps(state).encode()), dtype=torch.uint8)
save_file(found, folder / "nf4.safetensors")
codes, absmax = list(found.values())[:2]
values = table[torch.stack((codes >> 4, codes & 15), -1).flatten().int()].view(-1, 64)
expect((values * absmax[:, None]).bfloat16().view(size, size))
"""
_MAKERS = {"lora": _LORA, "fp8": _FP8, "nf4": _NF4}
_IS_EXPECTED = """
import sys, torch
from pathlib import Path
from safetensors import safe_open
from safetensors.torch import load_file
((name, expected),) = load_file(Path(sys.argv[1]).parent / "expected.safetensors").items()
with safe_open(sys.argv[1], "pt") as file:
    assert torch.equal(file.get_tensor(name), expected)
    assert all(key.endswith(".weight") for key in file.keys())
"""

# The model is made on no device, and gets its weights from the file: transformers loads a model so.
_PEFT = """
import sys, torch
from pathlib import Path
from peft import PeftModel
from safetensors.torch import load_file, save_file
weights = load_file(sys.argv[1])
model = torch.nn.Module()
with torch.device("meta"):
    for name, weight in weights.items():
        *path, last = name.removesuffix(".weight").split(".")
        at = model
        for part in path:
            at = at._modules[part] if part in at._modules else at.register_module(part, torch.nn.Module()) or at._modules[part]
        at.register_module(last, torch.nn.Linear(*reversed(weight.shape), bias=False, dtype=weight.dtype))
model.load_state_dict(weights, assign=True)
del weights
merged = PeftModel.from_pretrained(model, str(Path(sys.argv[1]).parent / "adapter")).merge_and_unload()
save_file({name: weight.contiguous() for name, weight in merged.state_dict().items()}, sys.argv[2])
"""
# DeepSeek's own script (inference/fp8_cast_bf16.py) needs a GPU; this is what it does, one weight after the other.
_CAST = """
import sys, torch
from safetensors.torch import load_file, save_file
found, plain = load_file(sys.argv[1]), {}
for name, codes in found.items():
    if codes.dtype is torch.float8_e4m3fn:
        scale = found[f"{name}_scale_inv"].repeat_interleave(128, 0).repeat_interleave(128, 1)
        plain[name] = (codes.float() * scale[: codes.shape[0], : codes.shape[1]]).bfloat16()
    elif not name.endswith("_scale_inv"):
        plain[name] = codes
save_file(plain, sys.argv[2])
"""
_BITSANDBYTES = """
import sys, torch
from bitsandbytes.functional import QuantState, dequantize_4bit
from safetensors.torch import load_file, save_file
found, plain = load_file(sys.argv[1]), {}
for name in [name for name in found if name.endswith(".weight")]:
    parts = {key.removeprefix(f"{name}."): value for key, value in found.items() if key.startswith(f"{name}.")}
    plain[name] = dequantize_4bit(found[name], QuantState.from_dict(parts, device=torch.device("cpu")))
save_file(plain, sys.argv[2])
"""


def on(work: Path, kind: str, gigabytes: float) -> list[Job]:
    """The one job of an input, which is made, and beside it what must come of it."""
    python(_START + _MAKERS[kind], str(work), str(gigabytes))
    source = work / ("base.safetensors" if kind == "lora" else f"{kind}.safetensors")
    ours, theirs = work / "ours.safetensors", work / "theirs.safetensors"
    if kind == "lora":
        own = ckpt("convert", source, ours, "--lora", work / "adapter", output=ours)
        others = installed("peft", script("PEFT, merge_and_unload, save_file", _PEFT, source, theirs))
        return [Job("convert --lora", [own, *others], _IS_EXPECTED)]
    own = ckpt("convert", source, ours, "--dequantize", "bf16", output=ours)
    if kind == "nf4":
        others = installed("bitsandbytes", script("bitsandbytes, save_file", _BITSANDBYTES, source, theirs))
    else:
        others = [script("torch, save_file", _CAST, source, theirs)]
    return [Job("convert --dequantize", [own, *others], _IS_EXPECTED)]
