"""Layers of Flax and Keras against those of torch, and two libraries against each other: right or refused, nothing guessed."""

import tempfile
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from torch import nn

import ckpt_tools
import ckpt_tools.torch
from ckpt_tools.errors import MatchError
from tests.support.flax import flax_file, keras_file
from tests.support.matching import reported, state_of
from tests.support.samples import FIXTURES

HERE = FIXTURES / "frameworks"
COUNTER = "*num_batches_tracked=zeros"


class Tiny(nn.Module):
    """The network of the samples, in torch: a convolution, a batch norm, a dense layer on what is flattened."""

    def __init__(self, channels: int, size: int, classes: int) -> None:
        super().__init__()
        self.first = nn.Conv2d(2, channels, 3)
        self.norm = nn.BatchNorm2d(channels, eps=1e-3)
        self.head = nn.Linear(size, classes)

    def forward(self, image: torch.Tensor) -> torch.Tensor:
        """The scores of an image [batch, channels, height, width]."""
        out: torch.Tensor = self.head(self.norm(self.first(image)).flatten(1))
        return out


def convolved(image: Any, kernel: Any) -> Any:
    """[height, width, inputs] by [height, width, inputs, outputs], without padding, as Flax and Keras say it."""
    windows = np.lib.stride_tricks.sliding_window_view(image, kernel.shape[:2], axis=(0, 1))
    return np.einsum("hwiyx,yxio->hwo", windows, kernel)


def keras_output(weights: dict[str, Any], image: Any) -> Any:
    """What Keras's layers give, by their definitions."""
    conv, norm, dense = (
        [weights[f"layers.{layer}.vars.{number}"] for number in range(count)]
        for layer, count in (("conv2d", 2), ("batch_normalization", 4), ("dense", 2))
    )
    hidden = convolved(image, conv[0]) + conv[1]
    hidden = (hidden - norm[2]) / np.sqrt(norm[3] + 1e-3) * norm[0] + norm[1]
    return hidden.reshape(-1) @ dense[0] + dense[1]


def test_keras_gives_the_same_outputs(tmp_path: Path) -> None:
    """With the flatten said in a plan, the network in torch gives what Keras's definitions give."""
    pytest.importorskip("h5py")
    target, source = Tiny(3, 48, 5), HERE / "tiny.weights.h5"
    report = ckpt_tools.match(source, like=target, match="structure", output=tmp_path / "plan.toml")
    (row,) = report.matching.ambiguous
    assert (row.new, row.candidates) == ("head.weight", ("layers.dense.vars.0",))
    assert "(height width 3) out -> out (3 height width)" in row.why
    assert not report.advice.extras  # no --drop of it
    assert not report.advice.questions  # no --pair, which would not settle it
    with pytest.raises(MatchError) as refused:
        ckpt_tools.convert(source, tmp_path / "out.pth", like=target, match="structure", reinit=COUNTER)
    assert "drop" not in str(refused.value)
    text = (tmp_path / "plan.toml").read_text()
    step = '\n[[tensor]]\nold = "layers.dense.vars.0"\nnew = "head.weight"\nstep = "permute"\nshape = [48, 5]\n'
    step += 'axes = "(4 width 3) out -> out (3 4 width)"\n'
    text = text[: text.index("\n# Several candidates")].replace('    "layers.dense.vars.0",\n', "") + step
    (tmp_path / "plan.toml").write_text(text)
    ckpt_tools.convert(source, tmp_path / "out.safetensors", like=target, plan=str(tmp_path / "plan.toml"), reinit=COUNTER)
    target.load_state_dict(load_file(tmp_path / "out.safetensors"))
    image = np.random.default_rng(0).standard_normal((6, 6, 2)).astype(np.float32)
    weights = {name: tensor.numpy() for name, tensor in ckpt_tools.torch.load(source).items()}
    with torch.no_grad():
        made = target.eval()(torch.from_numpy(image).permute(2, 0, 1)[None])[0]
    assert np.allclose(made.numpy(), keras_output(weights, image), atol=1e-5)


def test_flax_is_converted(tmp_path: Path) -> None:
    """`convert --like --match structure` turns the kernels by itself: the convolution gives the same outputs."""
    target = nn.Sequential(nn.Conv2d(2, 5, 3), nn.BatchNorm2d(5))
    source, out = HERE / "flax.msgpack", tmp_path / "out.safetensors"
    dropped = ["lr", "phase", "params.Dense_0.*"]
    ckpt_tools.convert(source, out, like=target, match="structure", drop=dropped, reinit=COUNTER)
    target.load_state_dict(load_file(out))
    weights = load_file(HERE / "flax.safetensors")
    image = np.random.default_rng(0).standard_normal((6, 6, 2)).astype(np.float32)
    with torch.no_grad():
        made = target[0](torch.from_numpy(image).permute(2, 0, 1)[None])[0].permute(1, 2, 0)
    wanted = convolved(image, weights["params.Conv_0.kernel"].numpy()) + weights["params.Conv_0.bias"].numpy()
    assert np.allclose(made.numpy(), wanted, atol=1e-5)
    assert torch.equal(target.state_dict()["1.running_var"], weights["batch_stats.BatchNorm_0.var"])
    model = nn.Sequential(nn.Conv2d(2, 5, 3), nn.BatchNorm2d(5))
    ckpt_tools.torch.load_into(model, source, match="structure", allow_unexpected=dropped)
    assert torch.equal(model.state_dict()["0.weight"], target.state_dict()["0.weight"])


def found(framework: str, source: Any, target: Any, match: str = "structure", **options: Any) -> Any:
    """What is matched of a file of Flax's or Keras's; the target is shapes or a module."""
    like = target if isinstance(target, nn.Module) else state_of(target)
    with tempfile.TemporaryDirectory() as folder:
        write, name = (flax_file, "in.msgpack") if framework == "flax" else (keras_file, "in.h5")
        path = write(Path(folder, name), state_of(source))
        return ckpt_tools.match(path, like=like, match=match, **options).matching  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("framework", "source", "target", "step", "axes"),
    [
        ("flax", {"params.fc.kernel": (4, 4), "params.fc.bias": (4,)}, (4, 4), "transpose", ""),
        ("flax", {"params.fc.kernel": (4, 7)}, (7, 4), "transpose", ""),
        ("flax", {"params.fc.kernel": (5, 4, 7)}, (7, 4, 5), "permute", "width inputs outputs -> outputs inputs width"),
        ("flax", {"params.fc.kernel": (3, 3, 1, 8)}, (8, 1, 3, 3), "permute",
         "height width inputs outputs -> outputs inputs height width"),
        ("flax", {"params.fc.Conv_0.kernel": (3, 3, 3, 3)}, (3, 3, 3, 3), "permute",
         "height width inputs outputs -> outputs inputs height width"),
        ("flax", {"params.fc.kernel": (2, 3, 5, 4, 7)}, (7, 4, 2, 3, 5), "permute",
         "depth height width inputs outputs -> outputs inputs depth height width"),
        ("flax", {"params.fc.embedding": (9, 4)}, (9, 4), "copy", ""),
        ("keras", {"fc.embedding.vars.0": (4, 4)}, (4, 4), "copy", ""),
        ("keras", {"fc.dense.vars.0": (4, 4)}, (4, 4), "transpose", ""),
        ("keras", {"fc.fc.kernel:0": (4, 7)}, (7, 4), "transpose", ""),
        ("keras", {"fc.conv2d_transpose.vars.0": (3, 3, 6, 4)}, (4, 6, 3, 3), "permute",
         "height width inputs outputs -> outputs inputs height width"),
        ("keras", {"fc.depthwise_conv2d.vars.0": (3, 5, 4, 2)}, (8, 1, 3, 5), "permute",
         "(1 height) width inputs multiplier -> (inputs multiplier) 1 height width"),
    ],
)  # fmt: skip
def test_kernels(framework: str, source: dict[str, tuple[int, ...]], target: tuple[int, ...], step: str, axes: str) -> None:
    """Each kind of kernel is turned as its framework keeps it, square or not."""
    wanted = {"fc.weight": target, **({"fc.bias": (4,)} if len(source) > 1 else {})}
    result = found(framework, source, wanted)
    assert (result.matched[0].new, result.matched[0].step, result.matched[0].axes) == ("fc.weight", step, axes)
    assert result.complete


@pytest.mark.parametrize(
    ("framework", "source", "target"),
    [
        ("flax", {"params.ConvTranspose_0.kernel": (3, 3, 4, 4)}, (4, 4, 3, 3)),
        ("flax", {"params.fc.kernel": (3, 3, 4, 4)}, (4, 4, 3, 3)),
        ("flax", {"params.upconv.kernel": (3, 3, 4, 4)}, (4, 4, 3, 3)),
        ("flax", {"params.fc.kernel": (4, 2, 8)}, (8, 8)),  # heads
        ("flax", {"params.fc.hi.kernel": (4, 4), "params.fc.ii.kernel": (4, 4)}, (16, 4)),  # an LSTM's
        ("keras", {"fc.layer.vars.0": (4, 4)}, (4, 4)),
        ("keras", {"fc.layer.vars.0": (3, 3, 4, 4)}, (4, 4, 3, 3)),
        ("flax", {"params.fc.kernel": (4, 7)}, (7, 5)),
    ],
)
def test_what_cannot_be_told(framework: str, source: dict[str, tuple[int, ...]], target: tuple[int, ...]) -> None:
    """A layer that the file does not tell, or of other sizes, is never matched."""
    assert not found(framework, source, {"fc.weight": target}).matched


def test_they_count() -> None:
    """Layers of one shape go in counting order, though the file sorts conv2d_10 before conv2d_2."""
    names = ["conv2d", *(f"conv2d_{number}" for number in range(1, 12))]
    source = {f"layers.{name}.vars.0": (3, 3, 4, 4) for name in sorted(names)}
    result = found("keras", source, {f"features.{number}.weight": (4, 4, 3, 3) for number in range(12)})
    assert [row.old for row in result.matched] == [f"layers.{name}.vars.0" for name in names]


def test_a_state_of_an_optimizer_is_no_layer() -> None:
    """What Flax keeps beside the parameters has their names and shapes, and is left over."""
    source = {"opt_state.0.mu.fc.kernel": (4, 4), "params.fc.kernel": (4, 4)}
    result = found("flax", source, {"head.weight": (4, 4)})
    assert [row.old for row in result.matched] == ["params.fc.kernel"]
    assert result.unexpected == ("opt_state.0.mu.fc.kernel",)


def test_a_layer_in_front_of_an_image() -> None:
    """A dense layer whose outputs become an image has them in another order, too."""
    source = {"params.a.kernel": (10, 64), "params.b.kernel": (3, 3, 4, 8)}
    result = found("flax", source, {"a.weight": (64, 10), "b.weight": (8, 4, 3, 3)})
    assert [row.new for row in result.ambiguous] == ["a.weight"]


def test_convert_refuses_a_flatten(tmp_path: Path) -> None:
    options: dict[str, Any] = {"like": Tiny(5, 20, 7), "match": "structure", "drop": ["lr", "phase"], "reinit": COUNTER}
    with pytest.raises(MatchError, match="flattened image"):
        ckpt_tools.convert(HERE / "flax.msgpack", tmp_path / "out.safetensors", **options)


def test_a_transposed_convolution_of_a_module() -> None:
    """A live target says what its layers are: Flax's transposed kernel is turned around by any name, Keras's is not."""
    rows: list[tuple[str, str, str]] = [
        ("flax", "params.layer1.kernel", "Conv2d"), ("keras", "a.conv2d_transpose.vars.0", "Conv"),
    ]  # fmt: skip
    for framework, name, fits in rows:
        for module in (nn.Conv2d, nn.ConvTranspose2d):
            target = nn.ModuleDict({"a": module(4, 4, 3, bias=False)})
            result = found(framework, {name: (3, 3, 4, 4)}, target)
            assert bool(result.matched) is module.__name__.startswith(fits)
            assert all("turned around" in row.why for row in result.ambiguous)


@pytest.mark.parametrize("framework", ["keras", "flax"])
def test_a_map_with_its_channels_last_is_no_map_of_torch(framework: str) -> None:
    """A dense layer behind a flatten of Keras or Flax has its numbers as height, width, channels: never a convolution's."""
    shapes = {"conv2d.kernel": (4, 4, 3, 6), "conv2d.bias": (6,), "dense.kernel": (96, 10), "dense.bias": (10,)}
    target = {"a.weight": (6, 3, 4, 4), "a.bias": (6,), "b.weight": (10, 6, 4, 4), "b.bias": (10,)}
    result = found(framework, shapes, target, allow_reshape=True)
    assert "b.weight" not in {row.new for row in result.matched}
    assert not result.complete_with_offers


@pytest.mark.parametrize("is_torch", [False, True], ids=["flax's own", "as torch has it"])
def test_a_kernel_of_flax_is_compared_as_torch_has_it(is_torch: bool) -> None:
    """A square matrix is transposed on its way to torch: once, and not at all where its numbers show that it was already."""
    kernel = torch.randn(8, 8, generator=torch.Generator().manual_seed(0))
    (row,) = found(
        "flax", {"params.dense.kernel": kernel}, {"fc.weight": kernel if is_torch else kernel.T.contiguous()}, "values"
    ).matched
    assert (row.reason, row.step) == ("values", "copy" if is_torch else "transpose")


# A file of `pairs/` is the truth about small configurations of timm (or BERT) and of transformers (or efficientnet_pytorch):
# numbers that were moved so gave equal outputs. `a = b: weight [4,3]` is a module, ` + ` joins the parts of a fused layer.
PAIRS = {path.stem: path for path in sorted((Path(__file__).parent / "pairs").glob("*.txt"))}
ASKED = {"focalnet": 1, "levit": 1, "mobilenet_v2": 1}  # questions; all others need none
Truth = set[tuple[tuple[str, ...], tuple[str, ...]]]


def shape_of(text: str) -> tuple[int, ...]:
    return tuple(int(size) for size in text.strip("[]").split(",") if size)


def read(path: Path) -> tuple[dict[str, tuple[int, ...]], dict[str, tuple[int, ...]], Truth]:
    sides: tuple[dict[str, tuple[int, ...]], dict[str, tuple[int, ...]]] = ({}, {})
    truth = set()
    for line in path.read_text(encoding="utf-8").splitlines():
        modules, _, leaves = line.partition(": ")
        for leaf in leaves.split(", ") if leaves else [""]:
            named = []
            for text, side in zip(modules.split(" = "), sides, strict=True):
                parts = (text if not leaf else f"{text}.{leaf}").split(" + ")
                made = {part.split()[0]: shape_of(part.split()[1]) for part in parts}
                side.update(made)
                named.append(tuple(made))
            truth.add((named[0], named[1]))
    return *sides, truth


def said(found: Any) -> Truth:
    """The partners that a matching has, offers too."""
    return {((row.old,), (row.new,)) for row in found.matched} | {(offer.old, offer.new) for offer in found.offers}


@pytest.mark.parametrize(
    ("name", "turned"), [(name, back) for name in PAIRS for back in (False, True) if not back or name not in ASKED]
)
def test_partners_are_true_and_few_answers_settle_the_rest(name: str, turned: bool) -> None:
    """Both ways: no partner is another's, and once the questions are answered nothing is left over."""
    olds, news, truth = read(PAIRS[name])
    if turned:
        olds, news, truth = news, olds, {(new, old) for old, new in truth}

    def answered(*pairs: str) -> Any:
        return reported(olds, news, allow_reshape=True, pair=pairs)

    found = answered()
    assert said(found.matching) <= truth
    assert len(found.advice.questions) == ASKED.get(name, 0)
    for question in found.advice.questions:  # at most one
        answers = (answered(question.answer(old)) for old in question.candidates)
        found = next(answer for answer in answers if said(answer.matching) <= truth)
    assert said(found.matching) == truth
