"""Initial values: the formulas are torch.nn.init's, and one seed gives the same bytes, whatever else is initialised."""

import math
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import ckpt_tools
from ckpt_tools.errors import ConvertError
from tests.support.commands import ckpt


def initialised(like: Any, reinit: Any, **options: Any) -> dict[str, torch.Tensor]:
    """A target of which the checkpoint has `kept` alone."""
    with tempfile.TemporaryDirectory() as folder:
        torch.save({"kept": torch.ones(1)}, Path(folder, "in.pth"))
        if isinstance(like, nn.Module):
            like.register_buffer("kept", torch.ones(1))
        ckpt_tools.convert(Path(folder, "in.pth"), Path(folder, "out.pth"), like=like, reinit=reinit, **options)
        made: dict[str, torch.Tensor] = torch.load(Path(folder, "out.pth"), weights_only=True)
        return made


def made(
    scheme: str, shape: tuple[int, ...], dtype: torch.dtype = torch.float32, name: str = "fc.weight", seed: int = 0
) -> Any:
    like = {"kept": torch.ones(1), name: torch.empty(shape, dtype=dtype, device="meta")}
    return initialised(like, {name: scheme}, seed=seed)[name]


TORCH: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "zeros": nn.init.zeros_, "ones": nn.init.ones_, "normal:0.3": lambda tensor: nn.init.normal_(tensor, std=0.3),
    "trunc_normal:1.7": lambda tensor: nn.init.trunc_normal_(tensor, std=1.7),
    "uniform:0.2": lambda tensor: nn.init.uniform_(tensor, -0.2, 0.2), "xavier_uniform": nn.init.xavier_uniform_,
    "xavier_normal": nn.init.xavier_normal_, "kaiming_uniform": nn.init.kaiming_uniform_,
    "kaiming_normal": nn.init.kaiming_normal_, "orthogonal": nn.init.orthogonal_,
}  # fmt: skip


@pytest.mark.parametrize("scheme", [kind for kind in TORCH if kind not in ("zeros", "ones")])
def test_one_seed_gives_the_same_bytes(scheme: str) -> None:
    """Whatever else is initialised, and with any number of threads; another seed or name gives other bytes."""
    shape, before = (40, 30, 3, 3), torch.get_num_threads()
    like = {"kept": torch.ones(1), "a": torch.empty(5), "fc.weight": torch.empty(shape), "fc2.weight": torch.empty(shape)}
    torch.set_num_threads(3)
    beside = initialised(like, {"a": "normal:1", "*.weight": scheme}, seed=7)
    torch.set_num_threads(before)
    data = made(scheme, shape, seed=7)
    assert torch.equal(beside["fc.weight"], data)
    assert not torch.equal(beside["fc2.weight"], data)
    assert not torch.equal(made(scheme, shape, seed=8), data)


def test_every_scheme_is_told() -> None:
    page = (Path(__file__).parents[2] / "docs" / "loading.md").read_text()
    text = ckpt("convert", "--help-all").output
    for kind in (*TORCH, "target", "default"):
        assert kind.partition(":")[0] in text
        assert f"`{kind.partition(':')[0]}" in page


def assert_alike(ours: torch.Tensor, theirs: torch.Tensor) -> None:
    """The same distribution, as far as mean, deviation and extremes tell."""
    spread = float(theirs.std()) if theirs.numel() > 1 else 0.0
    near = 6 * spread / math.sqrt(theirs.numel()) + 1e-9
    assert abs(float(ours.mean() - theirs.mean())) < 2 * near
    if theirs.numel() > 1:
        assert abs(float(ours.std()) - spread) < 2 * near
    assert float(ours.abs().max()) < float(theirs.abs().max()) * 1.4 + 1e-9


@pytest.mark.parametrize("shape", [(60, 1024), (64, 32, 3, 3)], ids=str)
@pytest.mark.parametrize("scheme", TORCH)
def test_the_distributions_are_torchs(scheme: str, shape: tuple[int, ...]) -> None:
    """Mean, deviation and extremes are those of `torch.nn.init`, fans included."""
    torch.manual_seed(0)
    assert_alike(made(scheme, shape), TORCH[scheme](torch.empty(shape)))


@pytest.mark.parametrize("shape", [(7, 20), (20, 7), (6, 3, 2, 2), (1, 1)], ids=str)
def test_orthogonal_is_orthogonal(shape: tuple[int, ...]) -> None:
    """Rows, or columns where there are more rows, are orthonormal to rounding."""
    flat = made("orthogonal", shape, torch.float64).flatten(1)
    product = flat @ flat.T if flat.shape[0] <= flat.shape[1] else flat.T @ flat
    assert torch.allclose(product, torch.eye(len(product)).double(), atol=1e-14)


LAYERS: dict[str, Callable[[], nn.Module]] = {
    "linear": lambda: nn.Linear(60, 40), "conv": lambda: nn.Conv2d(16, 32, 3, groups=2),
    "transposed": lambda: nn.ConvTranspose1d(16, 32, 3), "bilinear": lambda: nn.Bilinear(12, 9, 20),
    "batch_norm": lambda: nn.BatchNorm2d(8), "layer_norm": lambda: nn.LayerNorm(8), "group_norm": lambda: nn.GroupNorm(2, 8),
    "embedding": lambda: nn.Embedding(50, 16), "padded": lambda: nn.Embedding(50, 16, padding_idx=3),
    "lstm": lambda: nn.LSTM(12, 30), "projected": lambda: nn.LSTM(12, 60, proj_size=4), "gru_cell": lambda: nn.GRUCell(12, 30),
    "prelu": lambda: nn.PReLU(4), "steep_prelu": lambda: nn.PReLU(4, init=-0.5),
    "attention": lambda: nn.MultiheadAttention(32, 4),
}  # fmt: skip


def test_default_is_the_layers_own_reset() -> None:
    """Every parameter and buffer is distributed as the layer's constructor leaves it, constants exactly."""
    torch.manual_seed(0)
    fresh = nn.ModuleDict({name: make() for name, make in LAYERS.items()})
    state = initialised(fresh, "default")
    for name, expected in fresh.state_dict().items():
        ours = state[name].double()
        if bool((expected == expected.flatten()[0]).all()):
            assert torch.equal(ours, expected.double()), name
        else:
            assert_alike(ours, expected.double())
    assert not state["padded.weight"][3].any()


def test_default_without_a_module() -> None:
    """By name and dimensions: Kaiming for weights, ones for norms and variances, zeros for biases and counters."""
    shapes: dict[str, tuple[int, ...]] = {
        "bn.weight": (4,), "bn.bias": (4,), "bn.running_mean": (4,), "bn.running_var": (4,), "fc.weight": (4, 3),
        "rnn.weight_ih_l0": (4, 3), "rnn.bias_ih_l0": (4,), "ln.gamma": (4,),
    }  # fmt: skip
    like = {"kept": torch.ones(1), **{name: torch.empty(shape) for name, shape in shapes.items()}}
    like["bn.num_batches_tracked"] = torch.tensor(7)
    state = initialised(like, "default")
    ones, drawn = {"bn.weight", "bn.running_var", "ln.gamma"}, {"fc.weight", "rnn.weight_ih_l0"}
    for name in state.keys() - {"kept"} - drawn:
        assert (state[name] == (name in ones)).all(), name
    for name in drawn:
        assert torch.equal(state[name], made("kaiming_uniform", (4, 3), name=name))
    with pytest.raises(ConvertError, match="no rule for 'cls_token'"):
        made("default", (1, 1, 8), name="cls_token")


class Own(nn.Linear):
    """A layer with a reset of its own."""

    def reset_parameters(self) -> None:
        nn.init.ones_(self.weight)


class Derived(nn.Linear):
    """Nothing new."""


def test_a_reset_of_ones_own_is_not_pytorchs() -> None:
    """A derived layer counts as PyTorch's, unless it resets itself in another way: then names decide."""
    state = initialised(nn.ModuleDict({"own": Own(60, 40), "derived": Derived(60, 40)}), "default")
    assert state["derived.bias"].any()
    assert not state["own.bias"].any()


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float8_e4m3fn])
def test_dtypes(dtype: torch.dtype) -> None:
    """Narrow numbers are those of float32, rounded; tensors without elements, and scalars, are made too."""
    wide = made("normal:0.5", (3, 5))
    assert torch.equal(made("normal:0.5", (3, 5), dtype).double(), wide.to(dtype).double())
    for shape in ((0, 4), (3, 0, 2), ()):
        assert made("ones", shape, dtype).shape == shape
