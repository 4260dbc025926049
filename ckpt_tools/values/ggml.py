"""ggml's element types: number, elements and bytes of a block; what blocks mean is worked out by the library gguf.

Source: ggml's `ggml.h` and gguf-py's `constants.py` (`GGMLQuantizationType`, `GGML_QUANT_SIZES`).
"""

from __future__ import annotations

import types
from collections.abc import Iterator
from dataclasses import dataclass

from ckpt_tools.errors import ConvertError, missing
from ckpt_tools.io.content import Computed, Content, equal_chunks
from ckpt_tools.tree.dtypes import DTYPES, DType
from ckpt_tools.values.numeric import elementwise, numbers


@dataclass(frozen=True, slots=True)
class BlockType:
    """One type: its number in a file, its name, elements and bytes of a block, the dtype of plain numbers."""

    number: int
    name: str
    elements: int
    nbytes: int
    dtype: DType | None = None


def _plain(number: int, name: str, dtype: str) -> BlockType:
    return BlockType(number, name, 1, DTYPES[dtype].itemsize, DTYPES[dtype])


_ROWS = (
    _plain(0, "F32", "float32"), _plain(1, "F16", "float16"), _plain(30, "BF16", "bfloat16"), _plain(28, "F64", "float64"),
    _plain(24, "I8", "int8"), _plain(25, "I16", "int16"), _plain(26, "I32", "int32"), _plain(27, "I64", "int64"),
    BlockType(2, "Q4_0", 32, 18), BlockType(3, "Q4_1", 32, 20), BlockType(6, "Q5_0", 32, 22), BlockType(7, "Q5_1", 32, 24),
    BlockType(8, "Q8_0", 32, 34), BlockType(10, "Q2_K", 256, 84), BlockType(11, "Q3_K", 256, 110),
    BlockType(12, "Q4_K", 256, 144), BlockType(13, "Q5_K", 256, 176), BlockType(14, "Q6_K", 256, 210),
    BlockType(16, "IQ2_XXS", 256, 66), BlockType(17, "IQ2_XS", 256, 74), BlockType(18, "IQ3_XXS", 256, 98),
    BlockType(19, "IQ1_S", 256, 50), BlockType(20, "IQ4_NL", 32, 18), BlockType(21, "IQ3_S", 256, 110),
    BlockType(22, "IQ2_S", 256, 82), BlockType(23, "IQ4_XS", 256, 136), BlockType(29, "IQ1_M", 256, 56),
    BlockType(34, "TQ1_0", 256, 54), BlockType(35, "TQ2_0", 256, 66), BlockType(39, "MXFP4", 32, 17),
    BlockType(40, "NVFP4", 64, 36),
)  # fmt: skip
BY_NUMBER = {row.number: row for row in _ROWS}
BY_NAME = {row.name: row for row in _ROWS}
# Types that have been in ggml and are not in files of models, or of which no reference says what they mean.
UNREAD = {4: "Q4_2", 5: "Q4_3", 9: "Q8_1", 15: "Q8_K", 31: "Q4_0_4_4", 32: "Q4_0_4_8", 33: "Q4_0_8_8", 41: "Q1_0"}
Q8_0 = BY_NAME["Q8_0"]
_ELEMENTS = 1 << 17  # that are worked on at once


def numbers_of(content: Content, kind: BlockType) -> Content:
    """The float32 numbers of blocks, some thousand at a time."""

    def work(content: Content) -> Iterator[memoryview]:
        quants, numpy = _gguf("The numbers of quantised blocks are worked out with it.")
        for data in equal_chunks(content, _ELEMENTS // kind.elements * kind.nbytes):
            with numpy.errstate(all="ignore"):
                made = quants.dequantize(numpy.frombuffer(data, numpy.uint8).reshape(1, -1), kind.number)
            yield memoryview(made).cast("B")

    return elementwise(content, kind.nbytes, kind.elements * DTYPES["float32"].itemsize, work)


def quantised(content: Content, dtype: DType, name: str) -> Computed:
    quants, numpy = _gguf("`dtype='q8_0'` works blocks out with it.")

    def work() -> Iterator[bytes]:
        for values in numbers(content, dtype):
            with numpy.errstate(all="ignore"):
                made = quants.quantize(values.float().reshape(1, -1).numpy(), Q8_0.number)
            if not numpy.isfinite(made.reshape(-1, Q8_0.nbytes)[:, :2].copy().view(numpy.float16)).all():
                raise ConvertError(
                    f"{name!r} has values that Q8_0 cannot hold: not finite, or beyond 8 million.",
                    fix="Write float32: `dtype='fp32'`.",
                )
            yield made.tobytes()

    return Computed(content.length // dtype.itemsize // Q8_0.elements * Q8_0.nbytes, work, content)


def _gguf(why: str) -> tuple[types.ModuleType, types.ModuleType]:
    try:
        import numpy
        from gguf import quants
    except ImportError:
        raise missing("gguf", "gguf", why) from None
    return quants, numpy
