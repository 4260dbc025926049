"""Megatron-core's torch_dist: common.pt belongs to it, and `--select model` numbers the layers that are one tensor."""

import argparse
import json
import tarfile
from pathlib import Path

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.format_utils import dcp_to_torch_save

import ckpt_tools
from ckpt_tools.errors import NothingMatchedError, PartError
from ckpt_tools.torch import load_state_dict
from tests.support.samples import FIXTURES

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled", "ignore:TypedStorage is deprecated")
GENUINE = FIXTURES / "megatron" / "dist" / "iter_0000002"
State = dict[str, torch.Tensor]
LAYERS = 3


def stacked(dtype: torch.dtype = torch.float32) -> State:
    """A model of three layers under the names of a sharded state dict, with what else is in such a checkpoint."""
    torch.manual_seed(0)
    model = {
        "embedding.word_embeddings.weight": torch.randn(7, 4),
        "decoder.layers.mlp.linear_fc1.weight_w": torch.randn(LAYERS, 5, 4),
        "decoder.layers.mlp.linear_fc1.weight_v": torch.randn(LAYERS, 5, 4),
        "decoder.layers.mlp.linear_fc2.weight": torch.randn(LAYERS, 4, 5),
        "decoder.final_layernorm.weight": torch.randn(4),
        "optimizer.state.exp_avg.decoder.layers.mlp.linear_fc2.weight": torch.randn(LAYERS, 4, 5),
    }
    return {name: value.to(dtype) for name, value in model.items()}


def numbered(model: State) -> State:
    """The model's own state dict."""
    found = {"embedding.word_embeddings.weight": model["embedding.word_embeddings.weight"]}
    for number in range(LAYERS):
        halves = [model[f"decoder.layers.mlp.linear_fc1.weight_{half}"][number] for half in "wv"]
        found[f"decoder.layers.{number}.mlp.linear_fc1.weight"] = torch.cat(halves)
        found[f"decoder.layers.{number}.mlp.linear_fc2.weight"] = model["decoder.layers.mlp.linear_fc2.weight"][number]
    return found | {"decoder.final_layernorm.weight": model["decoder.final_layernorm.weight"]}


def save(folder: Path, model: State, **arguments: object) -> Path:
    """The folder as Megatron-core lays it out."""
    dcp.save(dict(model), storage_writer=dcp.FileSystemWriter(folder), no_dist=True)
    torch.save({"args": argparse.Namespace(**arguments), "iteration": 2}, folder / "common.pt")
    (folder / "metadata.json").write_text(json.dumps({"sharded_backend": "torch_dist"}))
    return folder


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_select_model_numbers_the_layers(dtype: torch.dtype, tmp_path: Path) -> None:
    """Layers under their numbers, in their order; the halves of a gated matrix as one; no optimizer."""
    model = stacked(dtype)
    folder = save(tmp_path / "in", model, num_layers=LAYERS)
    wanted = numbered(model)
    for loaded in (load_state_dict(folder, select="model"), _converted(folder, tmp_path / "out.pth")):
        assert list(loaded) == list(wanted)
        assert all(torch.equal(loaded[name], value) for name, value in wanted.items())


def _converted(folder: Path, out: Path) -> State:
    ckpt_tools.convert(folder, out, select="model")
    return dict(torch.load(out))


def test_without_it_the_tree_is_torchs(tmp_path: Path) -> None:
    """Nothing is numbered unasked: the tree has what torch's own reader has."""
    folder = save(tmp_path / "in", stacked(), num_layers=LAYERS)
    loaded = load_state_dict(folder)
    assert set(loaded) == set(stacked())
    assert "stacked-layers" in {row.code for row in ckpt_tools.inspect(folder).findings}


def test_common_is_shown(tmp_path: Path) -> None:
    """`inspect` shows args and the iteration; `common.pt` is no other checkpoint, and into a folder it stays."""
    folder = save(tmp_path / "in", stacked(), num_layers=LAYERS, hidden_size=4)
    values = ckpt_tools.inspect(folder).values
    assert (values["common.iteration"], values["common.args.hidden_size"]) == (2, 4)
    report = ckpt_tools.convert(folder, tmp_path / "out", shard_size="1KB", select="model")
    assert ("common.pt", "another checkpoint") in report.stayed
    assert not [note for note in ckpt_tools.convert(folder, tmp_path / "all.pth").notes if note.code == "others-beside"]


@pytest.mark.parametrize(
    ("arguments", "dropped", "text"),
    [
        ({"num_layers": 4}, "", "args say that there are 4 layers"),
        ({"num_layers": LAYERS}, "decoder.layers.mlp.linear_fc1.weight_w", "the other is missing"),
        ({"num_layers": LAYERS}, "decoder.layers.mlp.linear_fc1.weight_v", "the other is missing"),
    ],
)
def test_what_does_not_fit_is_refused(arguments: dict[str, int], dropped: str, text: str, tmp_path: Path) -> None:
    """Another number of layers, half a matrix: an error with the tensor's name."""
    model = stacked()
    model.pop(dropped, None)
    with pytest.raises(PartError, match=text):
        load_state_dict(save(tmp_path / "in", model, **arguments), select="model")


@pytest.mark.parametrize("layers", [None, "3", 0, 1 << 40])
def test_without_a_number_of_layers_nothing_is_numbered(layers: object, tmp_path: Path) -> None:
    """args that do not say how many layers there are leave the tensors as they are."""
    folder = save(tmp_path / "in", stacked(), num_layers=layers)
    with pytest.raises(NothingMatchedError):
        load_state_dict(folder, select="model")


def test_another_common_pt(tmp_path: Path) -> None:
    """A common.pt that is none of Megatron's, or damaged, changes nothing of the checkpoint beside it."""
    folder = save(tmp_path / "in", stacked(), num_layers=LAYERS)
    for data in (b"junk", (FIXTURES / "ddp.pth").read_bytes()):
        (folder / "common.pt").write_bytes(data)
        found = ckpt_tools.inspect(folder)
        assert (found.totals["tensors"], found.values) == (6, {})


def test_a_genuine_checkpoint(tmp_path: Path) -> None:
    """What Megatron-core 0.16 wrote: each numbered layer is the slice that torch's own reader gives."""
    dcp_to_torch_save(str(GENUINE), str(tmp_path / "whole.pth"))
    whole = torch.load(tmp_path / "whole.pth", weights_only=False)
    model = load_state_dict(GENUINE, select="model")
    assert ckpt_tools.inspect(GENUINE).values["common.args.num_layers"] == 2
    assert len(model) == 20
    for name, value in model.items():
        head, _, rest = name.partition(".layers.")
        number, _, inner = rest.partition(".")
        assert torch.equal(value, whole[f"{head}.layers.{inner}"][int(number)] if rest else whole[name]), name


def test_a_genuine_checkpoint_in_a_nemo(tmp_path: Path) -> None:
    """NeMo packs such a folder as model_weights/ beside its configuration: the same model comes out of the tar."""
    (tmp_path / "model_config.yaml").write_text("a: 1\n")
    with tarfile.open(tmp_path / "gpt.nemo", "w") as archive:
        archive.add(tmp_path / "model_config.yaml", "model_config.yaml")
        archive.add(GENUINE, "model_weights")
    packed = tmp_path / "gpt.nemo"
    assert ckpt_tools.inspect(packed).values["common.args.num_layers"] == 2
    loaded, wanted = load_state_dict(packed, select="model"), load_state_dict(GENUINE, select="model")
    assert list(loaded) == list(wanted)
    assert all(torch.equal(loaded[name], value) for name, value in wanted.items())
