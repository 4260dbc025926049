"""`show`: the values of one tensor, exactly, of every dtype and container; only what is needed is read."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import save_file

import ckpt_tools
from ckpt_tools.errors import NothingMatchedError, ValuesError
from tests.support.samples import FIXTURES
from tests.support.servers import Server
from tests.support.terminal import run

ROWS = torch.arange(24.0).reshape(4, 6)
FLOATS = [torch.float64, torch.float32, torch.float16, torch.bfloat16, torch.float8_e4m3fn, torch.float8_e5m2,
          torch.float8_e4m3fnuz, torch.float8_e5m2fnuz, torch.float8_e8m0fnu]  # fmt: skip
INTS = [torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8, torch.uint16, torch.uint32, torch.uint64]


def saved(path: Path, **tensors: torch.Tensor) -> Path:
    """A file of torch's own."""
    torch.save(tensors, path)
    return path


@pytest.mark.parametrize("dtype", FLOATS)
def test_floats_are_exact(tmp_path: Path, dtype: torch.dtype) -> None:
    """Every value is the tensor's own, and its text is read back as the same number of the dtype."""
    tensor = torch.tensor([0.1, -2.0, 1 / 3, 0.0, 448.0]).to(dtype)
    report = ckpt_tools.show(saved(tmp_path / "x.pth", w=tensor), "w")
    assert report.values == pytest.approx(tensor.to(torch.float64).tolist(), abs=0, nan_ok=True)
    again = torch.tensor([float(text) for text in report.texts], dtype=torch.float64).to(dtype)
    assert torch.equal(again.view(torch.uint8), tensor.view(torch.uint8))


@pytest.mark.parametrize("dtype", INTS)
def test_integers_are_exact(tmp_path: Path, dtype: torch.dtype) -> None:
    """The largest and the smallest of each are shown to the last digit."""
    ends = [torch.iinfo(dtype).min, torch.iinfo(dtype).max]
    report = ckpt_tools.show(saved(tmp_path / "x.pth", w=torch.tensor(ends, dtype=dtype)), "w")
    assert (report.values, report.texts) == (ends, [str(end) for end in ends])


@pytest.mark.parametrize(
    ("tensor", "values"),
    [
        (torch.tensor([True, False]), [True, False]), (torch.tensor([1 + 2j, -0.5j]), [1 + 2j, -0.5j]),
        (torch.tensor([1 + 2j], dtype=torch.complex128).conj(), [1 - 2j]), (torch.tensor(2.5), 2.5), (torch.ones(0), []),
        (torch.ones(2, 0), [[], []]), (ROWS.t()[1:3, ::2], ROWS.t()[1:3, ::2].tolist()),
        (torch.tensor(1.0).expand(3, 2), [[1.0, 1.0]] * 3),
    ],
)  # fmt: skip
def test_other_kinds(tmp_path: Path, tensor: torch.Tensor, values: Any) -> None:
    """Booleans, complex ones, scalars, empty ones, views."""
    assert ckpt_tools.show(saved(tmp_path / "x.pth", w=tensor), "w").values == values


def test_float4(tmp_path: Path) -> None:
    """Two in a byte are two numbers, the low half first; in an array too."""
    save_file({"w": torch.tensor([[0x21, 0xF7]], dtype=torch.uint8).view(torch.float4_e2m1fn_x2)}, tmp_path / "x.safetensors")
    assert ckpt_tools.show(tmp_path / "x.safetensors", "w").values == [[0.5, 1.0, 6.0, -6.0]]
    assert ckpt_tools.show(tmp_path / "x.safetensors", "w[0, 1]").values == [6.0, -6.0]
    ckpt_tools.show(tmp_path / "x.safetensors", "w[0, 1]", output=tmp_path / "x.npy")
    assert np.load(tmp_path / "x.npy").tolist() == [6.0, -6.0]


INDEXES = ["0", "-1", "1:3", "::2", "1:3, 2", "..., -1", ":, :5", "1, ...", "3:1", "-2:, 1::3", "0, 5", "...", " 0 : 2 , 1 "]


@pytest.mark.parametrize("index", INDEXES)
@pytest.mark.parametrize("container", ["pth", "safetensors", "npy"])
def test_an_index_is_pythons(tmp_path: Path, index: str, container: str) -> None:
    """What an index names is what it names in NumPy; an array that is written has the same."""
    path = tmp_path / f"x.{container}"
    if container == "npy":
        np.save(path, ROWS.numpy())
    else:
        (torch.save if container == "pth" else save_file)({"w": ROWS}, path)
    name = "(root)" if container == "npy" else "w"
    wanted = eval(f"array[{index}]", {"array": ROWS.numpy()})
    if container != "npy":
        assert ckpt_tools.show(path, f"{name}[{index}]").values == wanted.tolist()
        ckpt_tools.show(path, name, index=index, output=tmp_path / "out.npy")
        made = np.load(tmp_path / "out.npy")
        assert (made.dtype, made.shape, made.tolist()) == (wanted.dtype, wanted.shape, wanted.tolist())


def test_large_tensors_show_their_ends(tmp_path: Path) -> None:
    """Of more than 1,000 values the first and last three of every dimension, with their places; all of them when asked."""
    big = torch.arange(40 * 50, dtype=torch.float32).reshape(40, 50)
    path = saved(tmp_path / "x.pth", w=big)
    report = ckpt_tools.show(path, "w[:, 1:]")
    assert report.axes == [[0, 1, 2, 37, 38, 39], [1, 2, 3, 47, 48, 49]]
    assert report.values == big[report.axes[0]][:, report.axes[1]].tolist()
    assert ckpt_tools.show(path, "w", whole=True).values == big.tolist()
    page = run("show", path, "w").stdout.splitlines()
    assert page[:4] == [f"w of {path}", "dtype  float32", "shape  40x50", ""]
    assert page[4] == "[[   0.0,    1.0,    2.0, ...,   47.0,   48.0,   49.0],"
    assert (page[7], page[-1]) == (" ...,", " [1950.0, 1951.0, 1952.0, ..., 1997.0, 1998.0, 1999.0]]")


def test_only_what_is_needed_is_read(tmp_path: Path, server: Server) -> None:
    """Three rows of five of a large tensor cost a few bytes; a column of many rows as well."""
    big = torch.arange(1 << 20, dtype=torch.float32).reshape(8, -1)
    save_file({"w": big}, tmp_path / "x.safetensors")
    assert ckpt_tools.show(server.url("x.safetensors"), "w[0:3, :5]").values == big[:3, :5].tolist()
    assert ckpt_tools.show(server.url("x.safetensors"), "w[:, 7]").values == big[:, 7].tolist()
    assert server.sent < 1_500_000


@pytest.mark.parametrize("kind", ["dcp", "fsdp-tp", "tp", "fsdp2", "consolidated"])
def test_parts_of_many_ranks(kind: str) -> None:
    """A box of a tensor whose parts are cut by rows or columns is what it is in the whole."""
    folder = FIXTURES / "parts" / kind
    whole = torch.load(folder / "reference.pth")
    for name, tensor in [pair for pair in whole.items() if pair[1].ndim == 2]:
        assert ckpt_tools.show(folder, f"{name}[1:4, -3:]").values == tensor[1:4, -3:].tolist()


HELD = {torch.bfloat16: "float32", torch.float8_e5m2: "float32", torch.complex32: "complex64", torch.float16: "float16",
        torch.bool: "bool", torch.uint64: "uint64"}  # fmt: skip


@pytest.mark.filterwarnings("ignore:ComplexHalf")
@pytest.mark.parametrize(("dtype", "held"), HELD.items())
def test_arrays(tmp_path: Path, dtype: torch.dtype, held: str) -> None:
    """What NumPy has no type for is written in a wider one, exactly, and the page says so."""
    tensor = torch.tensor([[0.0, 1.0], [1.5, 3.0]]).to(dtype)
    path = saved(tmp_path / "x.pth", w=tensor)
    page = run("show", path, "w", "-o", tmp_path / "out.npy").stdout
    made = np.load(tmp_path / "out.npy")
    assert (str(made.dtype), made.shape) == (held, (2, 2))
    wide = tensor.to(torch.complex128 if dtype.is_complex else torch.float64).numpy()
    assert np.array_equal(made.astype(wide.dtype), wide)
    assert ("exactly: NumPy has no" in page) == (held != str(dtype).removeprefix("torch."))


def test_an_array_of_a_view_streams(tmp_path: Path) -> None:
    """A box of many rows is written in blocks; a transposed one in order too."""
    big = torch.arange(4000.0).reshape(40, 100)
    path = saved(tmp_path / "x.pth", w=big, t=big.t())
    for name, index, wanted in (("w", ":, ::7", big[:, ::7]), ("t", "3:, 1:", big.t()[3:, 1:]), ("w", "1:3", big[1:3])):
        ckpt_tools.show(path, name, index=index, output=tmp_path / "out.npy", overwrite=True)
        assert np.array_equal(np.load(tmp_path / "out.npy"), wanted.numpy())
        assert ckpt_tools.show(path, name, index=index, whole=True).values == wanted.tolist()


def test_names(tmp_path: Path) -> None:
    """By name, by path, where several have it; brackets in a name; the nearest for a slip; a value is none."""
    model = {"a.weight": ROWS, "odd[0]": torch.ones(1)}
    torch.save({"model": model, "ema": {"a.weight": ROWS + 1}, "epoch": 3}, tmp_path / "x.pth")
    path = tmp_path / "x.pth"
    assert ckpt_tools.show(path, "ema.a.weight[0, 0]").values == 1.0
    assert ckpt_tools.show(path, "a.weight[0, 0]", select="model").values == 0.0
    assert ckpt_tools.show(path, "odd[0]").values == [1.0]
    assert ckpt_tools.show(path, "odd[0][0]").values == 1.0
    with pytest.raises(NothingMatchedError, match=r"2 tensors are called 'a\.weight': model\.a\.weight, ema\.a\.weight"):
        ckpt_tools.show(path, "a.weight")
    with pytest.raises(NothingMatchedError, match=r"no tensor 'a.wieght'.\nDid you mean 'a.weight'"):
        ckpt_tools.show(path, "a.wieght[0]")
    with pytest.raises(NothingMatchedError, match="It is a value"):
        ckpt_tools.show(path, "epoch")


@pytest.mark.parametrize(
    ("tensor", "why"),
    [
        (torch.eye(3).to_sparse(), "It is sparse"),
        (torch.empty(3, device="meta"), "saved on the meta device"),
        (torch.ones(2).to(torch.float8_e4m3fn).view(torch.uint8).view(torch.bits8), "no numbers"),
    ],
)  # fmt: skip
def test_what_has_no_values(tmp_path: Path, tensor: torch.Tensor, why: str) -> None:
    """Sparse tensors, and those without bytes or numbers, say what they are."""
    with pytest.raises(ValuesError, match=why):
        ckpt_tools.show(saved(tmp_path / "x.pth", w=tensor), "w")


def test_a_stride_of_zero_is_no_bomb(tmp_path: Path) -> None:
    """A tensor that claims terabytes of one number shows its ends; writing it is refused."""
    path = saved(tmp_path / "x.pth", w=torch.zeros(1).expand(1 << 40, 3))
    assert ckpt_tools.show(path, "w").values == [[0.0] * 3] * 6
    with pytest.raises(ckpt_tools.CkptError, match="claim far more bytes"):
        ckpt_tools.show(path, "w", output=tmp_path / "out.npy")


def test_json_has_what_json_has_not(tmp_path: Path) -> None:
    """What is not finite is text, a complex number a pair."""
    path = saved(tmp_path / "x.pth", w=torch.tensor([float("nan"), float("-inf"), 1.0]), c=torch.tensor([1 + 2j]))
    assert json.loads(run("show", path, "w", "--json").stdout)["values"] == ["nan", "-inf", 1.0]
    assert json.loads(run("show", path, "c", "--json").stdout)["values"] == [[1.0, 2.0]]


def test_pages_of_more_dimensions(tmp_path: Path) -> None:
    """Blocks of three dimensions have a blank line between, a scalar stands alone."""
    path = saved(tmp_path / "x.pth", w=torch.arange(8).reshape(2, 2, 2), s=torch.tensor(7))
    assert run("show", path, "w").stdout.splitlines()[4:] == ["[[[0, 1],", "  [2, 3]],", "", " [[4, 5],", "  [6, 7]]]"]
    assert run("show", path, "w[1, :, 0]").stdout.splitlines()[3:] == ["index  [1, :, 0], 2", "", "[4, 6]"]
    assert run("show", path, "s").stdout.splitlines()[3:] == ["", "7"]
