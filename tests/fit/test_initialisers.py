"""Initial values: the formulas are torch.nn.init's, and one seed gives the same bytes everywhere, in any order."""

from __future__ import annotations

import hashlib
import math
import statistics
from collections.abc import Callable
from pathlib import Path
from typing import cast

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from ckpt_tools.errors import ConvertError, NothingMatchedError, UsageError
from ckpt_tools.fit.initialisers import (
    SCHEMES,
    Blank,
    Rules,
    blank_in,
    check_finite,
    content,
    parse_scheme,
    resolve,
)
from ckpt_tools.fit.options import FitOptions
from ckpt_tools.io.content import read
from ckpt_tools.tree.dtypes import DTYPES
from ckpt_tools.values import random_bits

ROOT = Path(__file__).parents[2]
FLOAT32 = DTYPES["float32"]
SHAPE = (200, 1024)


def made(scheme: str, blank: Blank, seed: int = 0) -> torch.Tensor:
    """An initialised tensor."""
    data = bytearray(read(content(resolve(parse_scheme(scheme), blank), blank, seed)))
    dtype = getattr(torch, blank.dtype.name)
    return torch.frombuffer(data, dtype=dtype).reshape(blank.shape) if data else torch.empty(blank.shape, dtype=dtype)


# What came out where this was written; any other machine, torch or number of threads must give the same.
DIGESTS = {
    "normal:0.02": "a585479c7807db30",
    "trunc_normal:1.5": "48afe9ee054df3f0",
    "uniform:0.1": "b0d3cf73291fe5c2",
    "xavier_uniform": "a03fbbea12294801",
    "xavier_normal": "7eb76b3e23781e7e",
    "kaiming_uniform": "7dbc844bab2f6d03",
    "kaiming_normal": "77869f7db0123ce1",
    "orthogonal": "e5a6b1c58ce78a5e",
}


@pytest.mark.parametrize("scheme", DIGESTS)
def test_one_seed_gives_the_same_bytes_everywhere(scheme: str) -> None:
    """The bytes of each scheme are pinned; another seed or name gives others."""
    blank = Blank("fc.weight", (40, 30, 3, 3), FLOAT32)
    data = read(content(resolve(parse_scheme(scheme), blank), blank, 7))
    assert hashlib.sha256(data).hexdigest()[:16] == DIGESTS[scheme]
    assert read(content(parse_scheme(scheme), blank, 8)) != data
    assert read(content(parse_scheme(scheme), Blank("fc2.weight", blank.shape, FLOAT32), 7)) != data


def test_every_scheme_is_told_and_compared() -> None:
    """In the help of --reinit and in the page's table; its numbers with torch's, its bytes with those of the day before."""
    page = (ROOT / "docs" / "loading.md").read_text()
    for scheme in SCHEMES:
        kind = scheme.partition(":")[0]
        assert scheme in FitOptions.options["reinit"].help
        assert f"`{scheme}`" in page
        if kind not in ("target", "default"):  # those are the constructor's and the layer's own
            assert kind in {name.partition(":")[0] for name in TORCH}
            assert kind in {name.partition(":")[0] for name in DIGESTS} or kind in ("zeros", "ones")


def test_threads_change_nothing() -> None:
    """The number of torch's threads is no part of the result."""
    blank = Blank("w", (256, 300), FLOAT32)
    before = torch.get_num_threads()
    results = []
    for threads in (1, 3):
        torch.set_num_threads(threads)
        results.append([made(scheme, blank) for scheme in ("normal:1", "orthogonal")])
    torch.set_num_threads(before)
    assert all(torch.equal(one, other) for one, other in zip(*results, strict=True))


@settings(max_examples=30)
@given(st.integers(0, 3 * random_bits.BLOCK), st.integers(0, random_bits.BLOCK + 9))
def test_any_range_is_a_part_of_the_whole(start: int, count: int) -> None:
    """Numbers can be drawn from anywhere in a stream: a tensor may be made row by row."""
    assert torch.equal(random_bits.uniform(3, "n", start, count), WHOLE[start : start + count])


WHOLE = random_bits.uniform(3, "n", 0, 5 * random_bits.BLOCK)


def test_the_normal_quantile() -> None:
    """Within a few last digits of Python's own, in the middle and in both tails."""
    ends = [2.0**-53, 1e-13, 1e-12, 1e-5, 0.07, 0.93, 1 - 2.0**-53]
    p = torch.cat([random_bits.uniform(0, "p", 0, 2000), torch.tensor(ends, dtype=torch.float64)])
    expected = torch.tensor([statistics.NormalDist().inv_cdf(float(value)) for value in p], dtype=torch.float64)
    assert torch.allclose(random_bits.quantile(p), expected, rtol=1e-14, atol=1e-15)
    assert random_bits.quantile(torch.tensor([2.0**-53]).double()).abs() < random_bits.LARGEST_NORMAL


TORCH = {
    "zeros": nn.init.zeros_,
    "ones": nn.init.ones_,
    "normal:0.3": lambda tensor: nn.init.normal_(tensor, std=0.3),
    "trunc_normal:1.7": lambda tensor: nn.init.trunc_normal_(tensor, std=1.7),
    "uniform:0.2": lambda tensor: nn.init.uniform_(tensor, -0.2, 0.2),
    "xavier_uniform": nn.init.xavier_uniform_,
    "xavier_normal": nn.init.xavier_normal_,
    "kaiming_uniform": nn.init.kaiming_uniform_,
    "kaiming_normal": nn.init.kaiming_normal_,
    "orthogonal": nn.init.orthogonal_,
}


def assert_alike(ours: torch.Tensor, theirs: torch.Tensor) -> None:
    """The same distribution, as far as mean, deviation and extremes tell."""
    spread = float(theirs.std()) if theirs.numel() > 1 else 0.0
    near = 6 * spread / math.sqrt(theirs.numel()) + 1e-9
    assert abs(float(ours.mean() - theirs.mean())) < 2 * near
    if theirs.numel() > 1:
        assert abs(float(ours.std()) - spread) < 2 * near
    assert float(ours.abs().max()) < float(theirs.abs().max()) * 1.4 + 1e-9


@pytest.mark.parametrize("shape", [SHAPE, (64, 32, 3, 3)], ids=str)
@pytest.mark.parametrize("scheme", TORCH)
def test_the_distributions_are_torchs(scheme: str, shape: tuple[int, ...]) -> None:
    """Mean, deviation and extremes are those of `torch.nn.init`, fans included."""
    torch.manual_seed(0)
    assert_alike(made(scheme, Blank("fc.weight", shape, FLOAT32)), TORCH[scheme](torch.empty(shape)))  # type: ignore[no-untyped-call]


@pytest.mark.parametrize("shape", [(7, 20), (20, 7), (6, 3, 2, 2), (1, 1)], ids=str)
def test_orthogonal_is_orthogonal(shape: tuple[int, ...]) -> None:
    """Rows, or columns where there are more rows, are orthonormal to rounding."""
    flat = made("orthogonal", Blank("w", shape, DTYPES["float64"])).flatten(1)
    product = flat @ flat.T if flat.shape[0] <= flat.shape[1] else flat.T @ flat
    assert torch.allclose(product, torch.eye(len(product)).double(), atol=1e-14)


def test_the_articles_head() -> None:
    """A head for 200 classes on 1024 features: normal weights of deviation 0.02, zero bias."""
    weight, bias = made("normal:0.02", Blank("fc.weight", SHAPE, FLOAT32)), made("zeros", Blank("fc.bias", (200,), FLOAT32))
    values = weight.double()
    assert abs(float(values.mean())) < 3 * 0.02 / math.sqrt(values.numel())
    assert abs(float(values.std()) - 0.02) < 3 * 0.02 / math.sqrt(2 * values.numel())
    inside = float((values.abs() < 0.02).double().mean())
    assert abs(inside - 0.682689) < 0.004
    kurtosis = float((values**4).mean() / (values**2).mean() ** 2)
    assert abs(kurtosis - 3) < 0.05
    assert abs(float((values[:, 1:] * values[:, :-1]).mean())) < 3 * 0.02**2 / math.sqrt(values.numel())
    assert not bias.any()


LAYERS: dict[str, Callable[[], nn.Module]] = {
    "linear": lambda: nn.Linear(60, 40),
    "conv": lambda: nn.Conv2d(16, 32, 3, groups=2),
    "transposed": lambda: nn.ConvTranspose1d(16, 32, 3),
    "bilinear": lambda: nn.Bilinear(12, 9, 20),
    "batch norm": lambda: nn.BatchNorm2d(8),
    "layer norm": lambda: nn.LayerNorm(8),
    "group norm": lambda: nn.GroupNorm(2, 8),
    "embedding": lambda: nn.Embedding(50, 16),
    "padded": lambda: nn.Embedding(50, 16, padding_idx=3),
    "lstm": lambda: nn.LSTM(12, 30),
    "projected": lambda: nn.LSTM(12, 60, proj_size=4),
    "gru cell": lambda: nn.GRUCell(12, 30),
    "prelu": lambda: nn.PReLU(4),
    "steep prelu": lambda: nn.PReLU(4, init=-0.5),
    "attention": lambda: nn.MultiheadAttention(32, 4),
}


@pytest.mark.parametrize("layer", LAYERS)
def test_default_is_the_layers_own_reset(layer: str) -> None:
    """Every parameter and buffer is distributed as the layer's constructor leaves it, constants exactly."""
    torch.manual_seed(0)
    fresh = LAYERS[layer]()
    for name, expected in fresh.state_dict().items():
        inner = fresh.get_submodule(name.rpartition(".")[0])
        blank = blank_in(inner, name, tuple(expected.shape), DTYPES[str(expected.dtype).removeprefix("torch.")])
        ours = made("default", blank).double()
        if bool((expected == expected.flatten()[0] if expected.numel() else expected).all()):
            assert torch.equal(ours, expected.double())
        else:
            assert_alike(ours, expected.double())
        if getattr(inner, "padding_idx", None) is not None:
            assert not ours[cast("int", inner.padding_idx)].any()


def test_default_without_a_module() -> None:
    """By name and dimensions: Kaiming for weights, ones for norms and variances, zeros for biases and counters."""
    shapes: dict[str, tuple[tuple[int, ...], str]] = {
        "bn.weight": ((4,), "ones"), "bn.bias": ((4,), "zeros"), "bn.running_mean": ((4,), "zeros"),
        "bn.running_var": ((4,), "ones"), "fc.weight": ((4, 3), "kaiming_uniform"),
        "rnn.weight_ih_l0": ((4, 3), "kaiming_uniform"),
        "rnn.bias_ih_l0": ((4,), "zeros"), "ln.gamma": ((4,), "ones"),
    }  # fmt: skip
    for name, (shape, expected) in shapes.items():
        assert str(resolve(parse_scheme("default"), Blank(name, shape, FLOAT32))) == expected
    counter = Blank("bn.num_batches_tracked", (), DTYPES["int64"])
    assert made("default", counter).item() == 0
    with pytest.raises(ConvertError, match="no rule for 'cls_token'"):
        resolve(parse_scheme("default"), Blank("cls_token", (1, 1, 8), FLOAT32))


class Own(nn.Linear):
    """A layer with a reset of its own."""

    def reset_parameters(self) -> None:
        nn.init.ones_(self.weight)


def test_a_reset_of_ones_own_is_not_pytorchs() -> None:
    """A derived layer counts as PyTorch's, unless it resets itself in another way."""

    class Derived(nn.Linear):
        """Nothing new."""

    assert blank_in(Derived(2, 2), "w", (2, 2), FLOAT32).layer == "Linear"
    assert blank_in(Own(2, 2), "w", (2, 2), FLOAT32).layer is None


@pytest.mark.parametrize(
    "text", ["", "normal", "normal:", "normal:x", "normal:-1", "normal:nan", "normal:inf", "zeros:1", "he"]
)
def test_no_scheme(text: str) -> None:
    """What is no scheme is a usage error that says what is."""
    with pytest.raises(UsageError):
        parse_scheme(text)


def test_rules() -> None:
    """One scheme for all, others by glob; the last that matches counts; two for all, or a glob for nothing, are refused."""
    rules = Rules(["normal:1", "*.bias=zeros", "fc.*=ones"])
    assert [str(rules.of(name)) for name in ("a.weight", "a.bias", "fc.bias")] == ["normal:1", "zeros", "ones"]
    rules.check_used()
    assert str(Rules({"a=b.*": "ones"}).of("a=b.c")) == "ones"
    assert not Rules(None)
    with pytest.raises(UsageError, match="another needs a GLOB"):
        Rules(["ones", "zeros"])
    unused = Rules("head.*=ones")
    with pytest.raises(NothingMatchedError, match=r"head\.\*"):
        unused.check_used()


@pytest.mark.parametrize(
    ("scheme", "blank", "message"),
    [
        ("normal:1", Blank("n", (3,), DTYPES["int64"]), "fractions"),
        ("kaiming_uniform", Blank("fc.bias", (3,), FLOAT32), "needs 2"),
        ("orthogonal", Blank("fc.bias", (3,), FLOAT32), "needs 2"),
        ("normal:1e5", Blank("w", (3,), DTYPES["float16"]), "cannot hold"),
        ("zeros", Blank("w", (3,), DTYPES["quint8"]), "cannot be initialised"),
    ],
)
def test_what_cannot_be_initialised(scheme: str, blank: Blank, message: str) -> None:
    """A scheme that does not go with a dtype or shape is refused by name before anything is written."""
    with pytest.raises(ConvertError, match=message):
        resolve(parse_scheme(scheme), blank)


@pytest.mark.parametrize("dtype", ["float64", "float16", "bfloat16", "float8_e4m3fn"])
def test_dtypes(dtype: str) -> None:
    """Numbers are drawn as float64 and rounded once."""
    blank = Blank("w", (3, 5), DTYPES[dtype])
    exact = made("normal:0.5", Blank("w", (3, 5), DTYPES["float64"]))
    assert torch.equal(made("normal:0.5", blank).double(), exact.to(getattr(torch, dtype)).double())


@pytest.mark.parametrize("shape", [(0, 4), (3, 0, 2), ()], ids=str)
def test_hollow_shapes(shape: tuple[int, ...]) -> None:
    """Tensors without elements, and scalars."""
    assert made("ones", Blank("w", shape, FLOAT32)).shape == shape


def test_nan_and_inf_are_found() -> None:
    """Initial values are checked, in every float type."""
    for dtype in (torch.float32, torch.float8_e5m2):
        with pytest.raises(ConvertError, match="'w': an initial value is NaN"):
            check_finite(torch.tensor([1.0, math.nan]).to(dtype), "w")
