"""`--dtype`: every cast is torch's, bit for bit; what becomes infinite, zero or the largest number is counted."""

import itertools
import struct
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

import ckpt_tools
import ckpt_tools.torch
from tests.support.graphs import element_bytes

TYPES = {
    "fp16": torch.float16, "bf16": torch.bfloat16, "fp32": torch.float32, "fp64": torch.float64,
    "fp8_e4m3": torch.float8_e4m3fn, "fp8_e5m2": torch.float8_e5m2,
}  # fmt: skip
SPECIAL = [1e-45, 0.0, -0.0, float("inf"), -float("inf"), float("nan"), 1.0, -1.0, 1 / 3]


def edges(dtype: torch.dtype) -> list[float]:
    """Around every border of a type: its largest and smallest numbers, halves between neighbours, each a bit off."""
    found = []
    info = torch.finfo(dtype)
    for number in (info.max, info.tiny, info.smallest_normal, info.tiny * info.eps, info.eps, 1.0, 2.0):
        step = number * info.eps
        steps = (0.0, 0.5, 1.0, 1.5, 0.25, 0.75, 0.5 + 2**-20, 0.5 - 2**-20, -0.5, -0.25, -1.0)
        found += [number + step * part for part in steps]
    found += [info.tiny * info.eps * part for part in (0.25, 0.5, 0.75, 1.5, 2.5, 0.5 + 2**-20)]
    return [value for number in found for value in (number, -number) if number < 1e300]


def values(source: torch.dtype, target: torch.dtype) -> torch.Tensor:
    """Numbers of the source type that make rounding to the target visible."""
    numbers = torch.tensor([*SPECIAL, *edges(target), *edges(source)], dtype=torch.float64)
    return numbers.to(source)


@pytest.mark.parametrize(("source", "target"), list(itertools.permutations(TYPES, 2)))
def test_every_cast_is_torchs(source: str, target: str, tmp_path: Path) -> None:
    """Bits of every number, views and 0-d tensors included, in all containers; fp8 saturates, others overflow."""
    numbers = values(TYPES[source], TYPES[target])
    state = {"a": numbers, "view": torch.stack([numbers, numbers])[:, ::2].t(), "one": numbers[7].clone(), "none": numbers[:0]}
    torch.save(state, tmp_path / "in.pth")
    report = ckpt_tools.convert(tmp_path / "in.pth", tmp_path / "out.pth", dtype=target)
    ckpt_tools.convert(tmp_path / "in.pth", tmp_path / "out.safetensors", dtype=target)
    for found in (torch.load(tmp_path / "out.pth"), load_file(tmp_path / "out.safetensors")):
        for name, before in state.items():
            assert bits(found[name]) == bits(wanted(before, TYPES[target])), name
            assert (found[name].dtype, found[name].shape) == (TYPES[target], before.shape)
    lost, cast = numbers.double(), wanted(numbers, TYPES[target]).double()
    beyond = (lost.abs() > torch.finfo(TYPES[target]).max) & ~(cast.isinf() & lost.isinf())
    infinite, zero = cast.isinf() & lost.isfinite(), (cast == 0) & (lost != 0)
    assert report.saturated.get("a", 0) == (int(beyond.sum()) if target.startswith("fp8") else 0)
    assert report.overflowed.get("a", 0) == int(infinite.sum())
    assert report.underflowed.get("a", 0) == int(zero.sum())


def bits(tensor: torch.Tensor) -> bytes:
    """The elements; every NaN is one, since torch's own bits of it differ from loop to loop."""
    flat = tensor.double().reshape(-1)
    return element_bytes(tensor.reshape(-1)[~flat.isnan()]) + bytes(flat.isnan().tolist())


def wanted(tensor: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """torch's own cast; into fp8 what is beyond its largest number becomes that, and an infinity where there is none."""
    if dtype.itemsize > 1:
        return tensor.to(dtype)
    most = torch.finfo(dtype).max
    limited = torch.where(tensor.double().isfinite(), tensor.double().clamp(-most, most), tensor.double())
    return limited.float().to(dtype) if tensor.dtype != torch.float64 else limited.to(dtype)


HALVES = [  # fp32 bits, fp16 bits, bf16 bits: by hand, to the nearest and to the even one
    (0x3F800000, 0x3C00, 0x3F80), (0x3F801000, 0x3C00, 0x3F80), (0x3F803000, 0x3C02, 0x3F80), (0x3F801001, 0x3C01, 0x3F80),
    (0x3F808000, 0x3C04, 0x3F80), (0x3F818000, 0x3C0C, 0x3F82), (0x3F808001, 0x3C04, 0x3F81), (0x477FE000, 0x7BFF, 0x4780),
    (0x477FEFFF, 0x7BFF, 0x4780), (0x477FF000, 0x7C00, 0x4780), (0x33000000, 0x0000, 0x3300), (0x33000001, 0x0001, 0x3300),
    (0x33C00000, 0x0002, 0x33C0), (0x387FE000, 0x0400, 0x3880), (0x387FC000, 0x03FF, 0x3880), (0x80000001, 0x8000, 0x8000),
    (0x7F7FFFFF, 0x7C00, 0x7F80), (0x7F800000, 0x7C00, 0x7F80), (0xFF800000, 0xFC00, 0xFF80), (0x00010000, 0x0000, 0x0001),
]  # fmt: skip


@pytest.mark.parametrize(("target", "place"), [("fp16", 1), ("bf16", 2)])
def test_halves_by_hand(target: str, place: int, tmp_path: Path) -> None:
    """Ties go to the even neighbour, subnormals are kept, the first number beyond the largest is infinite."""
    bits = [row[0] for row in HALVES]
    tensor = torch.frombuffer(bytearray(struct.pack(f"<{len(bits)}I", *bits)), dtype=torch.float32)
    torch.save({"w": tensor}, tmp_path / "in.pth")
    ckpt_tools.convert(tmp_path / "in.pth", tmp_path / "out.pth", dtype=target)
    found = struct.unpack(f"<{len(bits)}H", element_bytes(torch.load(tmp_path / "out.pth")["w"]))
    assert [f"{value:04x}" for value in found] == [f"{row[place]:04x}" for row in HALVES]


def test_what_is_no_float_stays(tmp_path: Path) -> None:
    """Whole numbers, bools and complex numbers keep their type and bits; a loaded model's cast is the file's."""
    state = {"i": torch.arange(300), "b": torch.tensor([True, False]), "c": torch.tensor([1 + 2j]), "u": torch.arange(5).byte(),
             "w": torch.randn(50)}  # fmt: skip
    torch.save(state, tmp_path / "in.pth")
    ckpt_tools.convert(tmp_path / "in.pth", tmp_path / "out.pth", dtype="bf16")
    found = torch.load(tmp_path / "out.pth")
    assert all(torch.equal(found[name], state[name]) and found[name].dtype == state[name].dtype for name in "ibcu")
    assert torch.equal(found["w"], state["w"].bfloat16())
