"""ckpt prove: equal models are equal however they are written, and a planted fault is found in its layer, with its reason."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jsonschema
import pytest
import torch
from safetensors.torch import save_file
from torch import nn

import ckpt_tools
from ckpt_tools.errors import ConvertError, MatchError, UsageError
from tests.support.proving import Image, RenamedText, Text, trained
from tests.support.terminal import ROOT
from tests.support.terminal import run as ckpt

IMAGE, TEXT = "2x3x8x8", "2x8:50"


@pytest.fixture
def paths(tmp_path: Path) -> dict[type[nn.Module], Path]:
    found: dict[type[nn.Module], Path] = {}
    for kind in (Image, Text):
        found[kind] = tmp_path / f"{kind.__name__}.pth"
        torch.save(trained(kind()).state_dict(), found[kind])
    return found


def changed(path: Path, **edits: Callable[[torch.Tensor], torch.Tensor]) -> Path:
    """The file with some of its tensors changed; `__` in a keyword is a dot."""
    state = torch.load(path)
    for name, edit in edits.items():
        key = name.replace("__", ".")
        state[key] = edit(state[key]).contiguous()
    torch.save(state, path.with_name("changed.pth"))
    return path.with_name("changed.pth")


def swapped_halves(weight: torch.Tensor) -> torch.Tensor:
    """The rows of each head, as rotary embeddings that interleave want them."""
    return weight.unflatten(0, (4, 2, 2)).transpose(1, 2).reshape(weight.shape)


def norms_behind(model: Any) -> None:
    block = model.blocks[1]

    def forward(x: torch.Tensor) -> torch.Tensor:
        x = block.norm1(x + block.attn(x))
        return block.norm2(x + block.fc2(nn.functional.gelu(block.fc1(x))))

    block.forward = forward


class QuickGELU(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x * torch.sigmoid(1.702 * x)


def setting(**values: Any) -> Callable[[Any], None]:
    """Set attributes; `__` in a keyword is a dot."""

    def plant(model: Any) -> None:
        for name, value in values.items():
            *way, last = name.split("__")
            place = model.get_submodule(".".join(way))
            setattr(place, last, value)  # of a Sequential, by number, a module

    return plant


Fault = tuple[type[nn.Module], dict[str, Callable[[torch.Tensor], torch.Tensor]], Callable[[Any], None] | None, str, str]

# network, what is changed in its file, what in its code: the module that must be named, and a word of the reason
FAULTS: dict[str, Fault] = {
    "q permuted": (
        Text, {"blocks__1__attn__q_proj__weight": swapped_halves}, None, "blocks.1.attn.q_proj", "rows are in another",
    ),
    "eps": (Text, {}, setting(blocks__1__norm1__eps=1e-6), "blocks.1.norm1", "eps 1e-05, and 1e-06"),
    "momentum and eps": (Image, {}, setting(body__1__eps=1e-3, body__1__momentum=0.01), "body.1", "eps 1e-05, and 0.001"),
    "transposed square": (Image, {"mix__weight": torch.t}, None, "mix", "transposed (square)"),
    "another function": (Text, {}, setting(blocks__0__tanh=True), "blocks.0", "gelu, and gelu(tanh)"),
    "another module": (Image, {}, setting(stem__2=nn.LeakyReLU()), "stem.2", "ReLU, and LeakyReLU"),
    "padding": (
        Image, {}, setting(body__0__padding_mode="circular", body__0___reversed_padding_repeated_twice=[1] * 4), "body.0",
        "padding_mode 'zeros', and 'circular'",
    ),
    "order of positions": (Text, {}, setting(reversed=True), "", "reversed False, and True"),
    "rotary base": (Text, {}, setting(blocks__0__attn__base=10000.0), "blocks.0.attn", "base 100.0, and 10000.0"),
    "scale": (Text, {}, setting(blocks__1__attn__scale=1 / 16), "blocks.1.attn", "scale 0.5, and 0.0625"),
    "order of learned positions": (Text, {"positions": lambda value: value.flip(0)}, None, "", "positions rows are in another"),
    "channels of the image": (
        Image, {"stem__0__weight": lambda value: value.flip(1)}, None, "stem.0", "columns are in another",
    ),
    "a running variance": (Image, {"body__1__running_var": lambda value: value * 2}, None, "body.1", "running_var is 2 times"),
    "norms behind": (Text, {}, norms_behind, "blocks.1", "called in another order: norm1, attn, norm2, fc1, fc2; attn, norm1"),
    "an activation of its own": (Image, {}, setting(body__2=QuickGELU()), "body.2", "another activation: ReLU, and QuickGELU"),
    "a half": (
        Text,
        {"blocks__0__fc1__weight": lambda value: value.bfloat16().float()},
        None,
        "blocks.0.fc1",
        "is the old one, rounded to bfloat16",
    ),
    "one more": (Text, {"norm__weight": lambda value: value + 1}, None, "norm", "weight is the old one plus 1"),
    "zeros": (Text, {"head__bias": torch.zeros_like}, None, "head", "bias is 0 times the old one"),
    "dimensions": (
        Image, {"body__0__weight": lambda value: value.transpose(0, 1)}, None, "body.0", "is transposed (square)",
    ),
    "sign": (Text, {"head__bias": torch.neg}, None, "head", "bias is -1 times the old one"),
}  # fmt: skip


@pytest.mark.parametrize("name", FAULTS)
def test_planted_faults(name: str, paths: dict[type[nn.Module], Path]) -> None:
    """The module that is named is the one in which the fault was planted, and the reason is the fault."""
    kind, edits, plant, where, reason = FAULTS[name]

    def planted() -> nn.Module:
        model = kind()
        if plant is not None:
            plant(model)
        return model

    new = changed(paths[kind], **edits)
    report = ckpt_tools.prove(paths[kind], new, model=(kind, planted), inputs=IMAGE if kind is Image else TEXT)
    assert not report
    assert report.fault is not None
    assert (report.fault.where, any(reason in text for text in report.fault.reasons)) == (where, True), report.fault


def test_one_model_in_two_files(paths: dict[type[nn.Module], Path]) -> None:
    """The same numbers in another container give the same outputs, in float64."""
    save_file(torch.load(paths[Image]), paths[Image].with_name("i.safetensors"))
    report = ckpt_tools.prove(paths[Image], paths[Image].with_name("i.safetensors"), model=Image, inputs=[IMAGE])
    assert report
    assert (report.dtype, report.fault, report.settings) == ("float64", None, [])
    assert report.modules == len(list(Image().named_modules()))


def renamed(path: Path, *, plant: Callable[[Any], None] = lambda model: None) -> tuple[Path, nn.Module]:
    """The text network's file under the other writing's names, and that writing, with a fault or not."""
    names = {"tokens": "wte", "positions": "wpe", "blocks": "h", "norm1": "ln_1", "norm2": "ln_2", "norm": "ln_f"}
    names |= {"head": "lm_head", "attn": "attention", "fc1": "mlp.0", "fc2": "mlp.2"}
    state = {".".join(names.get(part, part) for part in name.split(".")): value for name, value in torch.load(path).items()}
    save_file(state, path.with_name("renamed.safetensors"))
    model = RenamedText()
    plant(model)
    return path.with_name("renamed.safetensors"), model


def test_another_writing_is_equal(paths: dict[type[nn.Module], Path]) -> None:
    """Other names, other modules around them, a function that became a module: equal, and the modules are paired."""
    new, model = renamed(paths[Text])
    report = ckpt_tools.prove(paths[Text], new, model=[Text, model], inputs=TEXT)
    assert report, report.fault
    assert report.calls > 20


@pytest.mark.parametrize(
    ("plant", "where", "new_where", "reason"),
    [
        (setting(h__1__mlp__1=nn.ReLU()), "blocks.1", "h.1", "another activation: gelu, and relu"),
        (setting(ln_f__eps=1e-3), "norm", "ln_f", "eps"),
    ],
    ids=["activation", "eps"],
)
def test_faults_in_another_writing(
    plant: Callable[[Any], None], where: str, new_where: str, reason: str, paths: dict[type[nn.Module], Path]
) -> None:
    new, model = renamed(paths[Text], plant=plant)
    fault = ckpt_tools.prove(paths[Text], new, model=[Text, model], inputs=TEXT).fault
    assert fault is not None
    assert (fault.where, fault.new_where) == (where, new_where)
    assert any(reason in text for text in fault.reasons), fault


def test_what_matters_in_training_only(paths: dict[type[nn.Module], Path]) -> None:
    """Another momentum changes no output: the models are equal, and the setting is told."""
    model = Image()
    model.body[1].momentum = 0.01  # type: ignore[assignment]
    report = ckpt_tools.prove(paths[Image], paths[Image], model=(Image, model), inputs=IMAGE)
    assert report
    assert [(row.where, row.name, row.old, row.new) for row in report.settings] == [("body.1", "momentum", "0.1", "0.01")]


def test_by_name_and_several(tmp_path: Path) -> None:
    """Inputs by name, integers and floats, one seed: the same numbers each time, others by another seed."""

    class Two(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.embed = nn.Embedding(10, 4)

        def forward(self, ids: torch.Tensor, *, scale: torch.Tensor) -> dict[str, torch.Tensor]:
            return {"last": self.embed(ids) * scale}

    torch.save(Two().state_dict(), tmp_path / "t.pth")
    path = tmp_path / "t.pth"
    first, again, other = (
        ckpt_tools.prove(path, path, model=Two, inputs=["3x2:10", "scale=4"], seed=seed) for seed in (1, 1, 2)
    )
    assert first
    assert first.input_digest == again.input_digest != other.input_digest


def raising() -> nn.Module:
    """The network with a layer that raises when it is called."""
    model = Image()
    model.mix.forward = lambda x: x[1 // 0]  # type: ignore[method-assign,assignment]
    return model


def test_refusals(paths: dict[type[nn.Module], Path]) -> None:
    """Inputs that cannot be read, a file that does not fit, a model that raises, none at all."""
    old = paths[Image]
    for new, model, inputs, error, message in (
        (old, Image, "3xx4", UsageError, "is not an input"), (old, Image, [], UsageError, "No `input`"),
        (paths[Text], Image, IMAGE, MatchError, "does not fit"), (old, [Image] * 3, IMAGE, UsageError, "One model for both"),
        (old, Image, "2x7", ConvertError, r"OLD raised RuntimeError when it ran, in stem\.0 \(Conv2d\)"),
        (old, [Image, raising()], IMAGE, ConvertError, r"NEW raised ZeroDivisionError when it ran, in mix \(Linear\)"),
    ):  # fmt: skip
        with pytest.raises(error, match=message):
            ckpt_tools.prove(old, new, model=model, inputs=inputs)


@pytest.mark.parametrize("runs", [0, 1001, 10**30])
def test_sets_of_inputs_are_bounded(paths: dict[type[nn.Module], Path], runs: int) -> None:
    """All of them are held in memory: a run of very many would not end. The command line says the same."""
    path = paths[Image]
    with pytest.raises(UsageError, match="from 1 to 1000"):
        ckpt_tools.prove(path, path, model=Image, inputs=IMAGE, runs=runs)
    refused = ckpt("prove", path, path, "--model", "m:f", "--input", IMAGE, "--runs", runs)
    assert (refused.exit_code, "range 1<=x<=1000" in refused.stderr) == (2, True)


def test_the_certificate(paths: dict[type[nn.Module], Path]) -> None:
    """Written where it is asked for alone: the report, and digests that do not depend on the container."""
    old = paths[Image]
    save_file(torch.load(old), old.with_name("i.safetensors"))
    before = sorted(old.parent.iterdir())
    place = old.with_name("proof.json")
    ckpt_tools.prove(old, old.with_name("i.safetensors"), model=Image, inputs=IMAGE)
    assert sorted(old.parent.iterdir()) == before
    ckpt_tools.prove(old, old.with_name("i.safetensors"), model=Image, inputs=IMAGE, certificate=place)
    document = json.loads(place.read_text())
    jsonschema.validate(document, json.loads((ROOT / "docs" / "prove.schema.json").read_text()))
    assert document["old"]["digest"] == document["new"]["digest"]
    assert len(document["old"]["digest"]) == 64
    assert document["equal"]
    with pytest.raises(FileExistsError):
        ckpt_tools.prove(old, old, model=Image, inputs=IMAGE, certificate=place)
