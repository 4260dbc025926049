"""Every dtype that torch 2.13 and safetensors 0.8 know, one row each.

Sources: `torch.storage._dtype_to_storage_type_map`, `torch.storage._new_dtypes` (those are saved on an UntypedStorage with
`_rebuild_tensor_v3`), and the table in the safetensors README.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from functools import cache
from typing import Literal

Family = Literal["float", "int", "bool", "complex", "quantized", "bits"]


@dataclass(slots=True, eq=False, repr=False)
class DType:
    """One element type."""

    name: str
    bits: int
    family: Family
    storage: str | None = None
    safetensors: str | None = None
    packed: int = 1
    in_torch: bool = True

    @property
    def itemsize(self) -> int:
        """Bytes of one element (0 for a sub-byte safetensors type that torch lacks)."""
        return self.bits // 8

    @property
    def swap_width(self) -> int:
        """Bytes that are reversed together between byte orders."""
        return self.itemsize // 2 if self.family == "complex" else self.itemsize


_ROWS = (
    DType("float64", 64, "float", "DoubleStorage", "F64"),
    DType("float32", 32, "float", "FloatStorage", "F32"),
    DType("float16", 16, "float", "HalfStorage", "F16"),
    DType("bfloat16", 16, "float", "BFloat16Storage", "BF16"),
    DType("float8_e4m3fn", 8, "float", None, "F8_E4M3"),
    DType("float8_e5m2", 8, "float", None, "F8_E5M2"),
    DType("float8_e4m3fnuz", 8, "float", None, "F8_E4M3FNUZ"),
    DType("float8_e5m2fnuz", 8, "float", None, "F8_E5M2FNUZ"),
    DType("float8_e8m0fnu", 8, "float", None, "F8_E8M0"),
    DType("float4_e2m1fn_x2", 8, "float", None, "F4", packed=2),
    DType("f6_e2m3", 6, "float", None, "F6_E2M3", in_torch=False),
    DType("f6_e3m2", 6, "float", None, "F6_E3M2", in_torch=False),
    DType("int64", 64, "int", "LongStorage", "I64"),
    DType("int32", 32, "int", "IntStorage", "I32"),
    DType("int16", 16, "int", "ShortStorage", "I16"),
    DType("int8", 8, "int", "CharStorage", "I8"),
    DType("uint8", 8, "int", "ByteStorage", "U8"),
    DType("uint16", 16, "int", None, "U16"),
    DType("uint32", 32, "int", None, "U32"),
    DType("uint64", 64, "int", None, "U64"),
    DType("bool", 8, "bool", "BoolStorage", "BOOL"),
    DType("complex64", 64, "complex", "ComplexFloatStorage", "C64"),
    DType("complex128", 128, "complex", "ComplexDoubleStorage"),
    DType("complex32", 32, "complex"),
    DType("qint8", 8, "quantized", "QInt8Storage"),
    DType("qint32", 32, "quantized", "QInt32Storage"),
    DType("quint8", 8, "quantized", "QUInt8Storage"),
    DType("quint4x2", 8, "quantized", "QUInt4x2Storage"),
    DType("quint2x4", 8, "quantized", "QUInt2x4Storage"),
    DType("bits8", 8, "bits"),
    DType("bits16", 16, "bits"),
    DType("bits1x8", 8, "bits"),
    DType("bits2x4", 8, "bits"),
    DType("bits4x2", 8, "bits"),
    *(DType(f"uint{bits}", 8, "int") for bits in range(1, 8)),
    *(DType(f"int{bits}", 8, "int") for bits in range(1, 8)),
)

DTYPES = {row.name: row for row in _ROWS}


@cache
def newer_dtype(name: str) -> DType | None:
    """The dtype of a PyTorch newer than this table, by the bits in its name, bcomplex32; its bytes are copied, never read."""
    bits = re.fullmatch(r"[bqsu]{0,2}(?:float|int|complex|bits)(?:(8|16|32|64|128|256)|[1-7](?=_))\w*", name, re.ASCII)
    return None if bits is None or name in DTYPES else DType(name, int(bits[1] or 8), "bits")


BY_STORAGE = {row.storage: row for row in _ROWS if row.storage}
BY_SAFETENSORS = {row.safetensors: row for row in _ROWS if row.safetensors}
UINT8 = DTYPES["uint8"]
# NumPy's codes without byte order: b1, i8, u2, f4, c16 ...; it has neither bfloat16 nor float8.
_NUMPY_NAMES = (
    "int8", "int16", "int32", "int64", "uint8", "uint16", "uint32", "uint64", "float16", "float32", "float64", "complex64",
    "complex128",
)  # fmt: skip
BY_NUMPY = {"b1": DTYPES["bool"]} | {f"{name[0]}{DTYPES[name].itemsize}": DTYPES[name] for name in _NUMPY_NAMES}

# What floats are cast to, by the words that --help has.
CAST_TARGETS = {
    "bf16": "bfloat16", "fp16": "float16", "fp32": "float32", "fp64": "float64",
    "fp8_e4m3": "float8_e4m3fn", "fp8_e5m2": "float8_e5m2",
}  # fmt: skip
# The words that people have for them besides: torch's own, safetensors', GGUF's, those of configurations.
_WORDS = {name: name for name in CAST_TARGETS.values()} | CAST_TARGETS | {
    "half": "float16", "float": "float32", "single": "float32", "double": "float64", "bfloat": "bfloat16",
    "f16": "float16", "f32": "float32", "f64": "float64",
    "e4m3": "float8_e4m3fn", "e4m3fn": "float8_e4m3fn", "fp8_e4m3fn": "float8_e4m3fn", "f8_e4m3": "float8_e4m3fn",
    "float8_e4m3": "float8_e4m3fn", "e5m2": "float8_e5m2", "f8_e5m2": "float8_e5m2",
}  # fmt: skip


def cast_target(word: str) -> str | None:
    """torch's name of the type that a word means; None for what floats are not cast to."""
    return _WORDS.get(word.lower().removeprefix("torch."))
