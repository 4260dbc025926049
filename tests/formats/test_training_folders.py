"""The folders of transformers' Trainer and accelerate, and Lightning's files: the first command that one would try is right."""

import json
import shutil
from pathlib import Path

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file

import ckpt_tools
from ckpt_tools.errors import NotACheckpointError
from ckpt_tools.torch import load_into, load_state_dict
from tests.support.commands import ckpt
from tests.support.rank_files import fsdp2, net, save_ranks

GENUINE = Path(__file__).parents[2] / "fixtures" / "training"
STEPS = {
    "fsdp-sharded/checkpoint-2": "fsdp-sharded/reference.pth", "fsdp-full/checkpoint-2": "fsdp-full/reference.pth",
    "save-state/state": "save-state/reference.pth", "trainer/checkpoint-4": "trainer/reference.pth",
    "trainer": "trainer/reference.pth",
}  # fmt: skip


def same(one: dict[str, torch.Tensor], reference: str) -> None:
    """The tensors are those of a reference."""
    other = torch.load(GENUINE / reference)
    assert one.keys() == other.keys()
    assert all(torch.equal(one[name], other[name]) for name in other)


@pytest.mark.parametrize(("folder", "reference"), STEPS.items())
def test_a_folder_is_its_model(tmp_path: Path, folder: str, reference: str) -> None:
    """Into one file, by one command; what else is in the folder is named. Nothing in it would have to be mended."""
    ckpt("check", GENUINE / folder)
    said = ckpt("convert", GENUINE / folder, tmp_path / "out.safetensors").stdout
    same(load_file(tmp_path / "out.safetensors"), reference)
    assert "also has the state of the training, which stays there: optimizer" in said
    ckpt("convert", GENUINE / folder, tmp_path / "out.pth")
    same(torch.load(tmp_path / "out.pth"), reference)
    same(load_state_dict(GENUINE / folder), reference)


@pytest.mark.parametrize(("folder", "reference"), STEPS.items())
def test_into_shards(tmp_path: Path, folder: str, reference: str) -> None:
    """The training's state comes along byte for byte where the tensors stay as they are, and is named where not."""
    report = ckpt_tools.convert(GENUINE / folder, tmp_path / "out", shard_size="1GB")
    same(load_state_dict(tmp_path / "out"), reference)
    step = GENUINE / ("trainer/checkpoint-4" if folder == "trainer" else folder)
    state = {path.name for path in step.iterdir() if path.name.startswith(("optimizer.", "scheduler", "r", "trainer_state"))}
    assert state
    assert state <= set(report.companions)
    assert all((tmp_path / "out" / name).read_bytes() == (step / name).read_bytes() for name in state)
    changed = ckpt_tools.convert(GENUINE / folder, tmp_path / "more", shard_size="1GB", add_prefix="x.")
    assert state <= {name for name, why in changed.stayed if why == "about the tensors as they were"}


def test_inspect_says_what_a_folder_is() -> None:
    """In one line, with the step and the command that takes the model."""
    said = {folder: ckpt("inspect", GENUINE / folder).stdout for folder in STEPS}
    assert "Trainer at step 2" in said["fsdp-sharded/checkpoint-2"]
    assert "Trainer at step 2" in said["fsdp-full/checkpoint-2"]
    assert "a state of accelerate" in said["save-state/state"]
    assert "a training run with 2 checkpoints, the newest checkpoint-4" in said["trainer"]
    assert all(f"ckpt convert {GENUINE / folder} model.safetensors" in text for folder, text in said.items())
    assert "step 4" in said["trainer/checkpoint-4"]


def test_local_ranks_of_fsdp(tmp_path: Path) -> None:
    """Under LOCAL_STATE_DICT every rank has a file of the model, and one of the optimizer."""
    for name in ("pytorch_model_fsdp_0_rank{rank}.bin", "optimizer_0_rank{rank}.bin"):
        save_ranks(tmp_path, fsdp2, 3, name=name)
    (tmp_path / "trainer_state.json").write_text('{"global_step": 500}')
    assert load_into(net(), tmp_path)
    (tmp_path / "pytorch_model_fsdp_0_rank1.bin").unlink()
    with pytest.raises(ckpt_tools.CkptError, match="rank"):
        ckpt_tools.convert(tmp_path, tmp_path / "out.pth")


@pytest.mark.parametrize("tag", ["global_step2", "pytorch_model"])
def test_deepspeed_of_a_trainer(tmp_path: Path, tag: str) -> None:
    """The folder that `latest` names, beside the trainer's state; accelerate calls it pytorch_model."""
    genuine = GENUINE.parent / "deepspeed" / "z1-fp32"
    shutil.copytree(genuine / "global_step2", tmp_path / "checkpoint-2" / tag)
    (tmp_path / "checkpoint-2" / "latest").write_text(tag)
    (tmp_path / "checkpoint-2" / "trainer_state.json").write_text('{"global_step": 2}')
    for place in (tmp_path / "checkpoint-2", tmp_path):
        ckpt("convert", place, tmp_path / "out.safetensors", "--overwrite")
        found, reference = load_file(tmp_path / "out.safetensors"), torch.load(genuine / "reference.pth")
        assert all(torch.equal(found[name], reference[name]) for name in found)
    torch.save({"step": 2}, tmp_path / "checkpoint-2" / "scheduler.pt")
    for place in (tmp_path / "checkpoint-2", tmp_path):
        said = ckpt("convert", place, tmp_path / "out.safetensors", "--overwrite").stdout
        assert "which stays there: scheduler.pt." in " ".join(said.split())
        shards = ckpt_tools.convert(place, tmp_path / "shards", shard_size="1GB", overwrite=True)
        assert shards.companions == ["scheduler.pt", "trainer_state.json"]
    assert "transformers' Trainer at step 2" in ckpt("inspect", tmp_path / "checkpoint-2").stdout


@pytest.fixture
def run(tmp_path: Path) -> Path:
    """A run of three checkpoints."""
    for step in (1, 2, 30):
        folder = tmp_path / "run" / f"checkpoint-{step}"
        folder.mkdir(parents=True)
        save_file({"w": torch.full((3,), float(step))}, folder / "model.safetensors")
        (folder / "trainer_state.json").write_text(json.dumps({"global_step": step}))
    return tmp_path / "run"


def test_the_newest_whole_checkpoint_of_a_run(run: Path, tmp_path: Path) -> None:
    """By its number; one that is cut, still being written or of another step is passed over, by name."""
    out = tmp_path / "out.safetensors"

    def taken() -> tuple[float, str]:
        said = ckpt("convert", run, out, "--overwrite").stdout
        return load_file(out)["w"][0].item(), said

    assert taken()[0] == 30
    assert "checkpoint-30" in taken()[1]
    (run / "checkpoint-30" / "trainer_state.json").unlink()
    assert taken()[0] == 2
    assert "checkpoint-30 is passed over. It has no trainer_state.json, which is written last" in taken()[1]
    weights = run / "checkpoint-2" / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-4])
    assert taken()[0] == 1
    assert "checkpoint-2 is passed over." in taken()[1]
    (run / "checkpoint-1" / "trainer_state.json").write_text('{"global_step": 7}')
    with pytest.raises(NotACheckpointError, match="none of them is whole") as caught:
        ckpt_tools.convert(run, out, overwrite=True)
    assert "checkpoint-1: Its trainer_state.json is of step 7." in str(caught.value)


def test_half_a_folder(tmp_path: Path) -> None:
    """A model that is missing, cut or there twice is refused by the folder's or file's name."""
    half = shutil.copytree(GENUINE / "fsdp-sharded" / "checkpoint-2", tmp_path / "checkpoint-2")
    (half / "pytorch_model_fsdp_0" / "__1_0.distcp").unlink()
    with pytest.raises(ckpt_tools.CkptError, match="__1_0"):
        ckpt_tools.convert(half, tmp_path / "out.pth")
    shutil.rmtree(half / "pytorch_model_fsdp_0")
    with pytest.raises(NotACheckpointError, match="checkpoint-2"):
        ckpt_tools.convert(half, tmp_path / "out.pth")
    two = shutil.copytree(GENUINE / "save-state" / "state", tmp_path / "state")
    shutil.copy(two / "model.safetensors", two / "model_1.safetensors")
    with pytest.raises(NotACheckpointError, match="state") as caught:
        ckpt_tools.convert(two, tmp_path / "out.pth")
    assert "model.safetensors, model_1.safetensors" in str(caught.value)


def test_a_state_that_runs_code_stays(tmp_path: Path) -> None:
    """An optimizer's file that is dangerous does not come along."""
    state = shutil.copytree(GENUINE / "save-state" / "state", tmp_path / "state")
    (state / "optimizer.bin").write_bytes(b"cos\nsystem\n(S'true'\ntR.")
    report = ckpt_tools.convert(state, tmp_path / "out", shard_size="1GB")
    assert "optimizer.bin" not in report.companions
    assert dict(report.stayed)["optimizer.bin"].startswith("ckpt scan calls it dangerous")


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
def test_the_way_back_into_a_distributed_checkpoint(tmp_path: Path) -> None:
    """accelerate looks for the state dict under 'model' in pytorch_model_fsdp_0."""
    pytest.importorskip("torch.distributed.checkpoint")
    folder = tmp_path / "checkpoint-2"
    folder.mkdir()
    reference = GENUINE / "fsdp-sharded" / "reference.pth"
    ckpt("convert", reference, folder / "pytorch_model_fsdp_0", "--format", "dcp", "--under", "model")
    from torch.distributed.checkpoint import FileSystemReader, load

    into = {"model": {name: torch.zeros_like(tensor) for name, tensor in torch.load(reference).items()}}
    load(into, storage_reader=FileSystemReader(folder / "pytorch_model_fsdp_0"), no_dist=True)
    same(into["model"], "fsdp-sharded/reference.pth")


def test_under_a_key(tmp_path: Path) -> None:
    """A bare state dict goes under a key; what is no bare state dict, or a format without places for it, is refused."""
    source = GENUINE / "save-state" / "reference.pth"
    ckpt("convert", source, tmp_path / "out.pth", "--under", "params")
    same(torch.load(tmp_path / "out.pth")["params"], "save-state/reference.pth")
    again = ckpt("convert", tmp_path / "out.pth", tmp_path / "more.pth", "--under", "params", code=2).stderr
    assert "'params'" in again
    assert "--select" in again
    ckpt("convert", tmp_path / "out.pth", tmp_path / "more.pth", "--select", "params", "--under", "state_dict")
    same(torch.load(tmp_path / "more.pth")["state_dict"], "save-state/reference.pth")
    for more in (["x.safetensors"], ["x", "--shard-size", "1MB"], ["x.gguf"]):
        ckpt("convert", source, tmp_path / more[0], *more[1:], "--under", "params", code=2)


def test_jobs_share_many_files(tmp_path: Path) -> None:
    """Each of N jobs does its own, and all of them all, with the bytes of one job; what is done already is passed over."""
    for number in range(5):
        torch.save({"module.w": torch.full((2,), float(number))}, tmp_path / f"{number}.pth")
    sources = sorted(tmp_path.glob("*.pth"))
    alone, shared = tmp_path / "alone", tmp_path / "shared"
    ckpt("convert", *sources, "--to-dir", alone, "--strip-module")
    for number in (1, 2, 3):
        ckpt("convert", *sources, "--to-dir", shared, "--strip-module", "--part", f"{number}/3")
    assert {path.name: path.read_bytes() for path in shared.iterdir()} == {
        path.name: path.read_bytes() for path in alone.iterdir()
    }
    assert "5 files were done before" in ckpt("convert", *sources, "--to-dir", shared, "--strip-module", "--skip-done").stdout
    (shared / "3.pth").unlink()
    assert "wrote 1 of 1 file" in ckpt("convert", *sources, "--to-dir", shared, "--strip-module", "--skip-done").stdout
    nested = tmp_path / "runs" / "a"
    nested.mkdir(parents=True)
    sources[0].rename(nested / "0.pth")
    sources[1].rename(tmp_path / "runs" / "1.pth")
    for number in (1, 2):
        ckpt("convert", tmp_path / "runs", "--to-dir", tmp_path / "below", "--strip-module", "--part", f"{number}/2")
    assert (tmp_path / "below" / "a" / "0.pth").read_bytes() == (alone / "0.pth").read_bytes()
    assert (tmp_path / "below" / "1.pth").read_bytes() == (alone / "1.pth").read_bytes()
    for wrong in ("0/3", "4/3", "3", "a/b"):
        ckpt("convert", *sources, "--to-dir", shared, "--part", wrong, code=2)
    ckpt("convert", sources[2], tmp_path / "out.pth", "--skip-done", code=2)


def test_a_run_of_lightning(tmp_path: Path) -> None:
    """inspect's first advice gives the network inside; its rows stay narrow; the settings are text beside it."""
    source = tmp_path / "last.ckpt"
    shutil.copy(GENUINE / "lightning" / "last.ckpt", source)
    rows = ckpt("inspect", source).stdout.partition("info [")[0].splitlines()
    assert max(map(len, rows[1:])) < 200
    (state_dict,) = ckpt_tools.inspect(source).state_dicts
    assert state_dict["where"] == ["state_dict"]
    finding = ckpt_tools.inspect(source).findings[0]
    assert "--select state_dict --keep 'net.*' --strip-prefix net." in finding.fix
    out = tmp_path / "out.safetensors"
    ckpt("convert", source, out, "--select", "state_dict", "--keep", "net.*", "--strip-prefix", "net.")
    whole = torch.load(GENUINE / "lightning" / "last-reference.pth")
    inner = {name.removeprefix("net."): tensor for name, tensor in whole.items() if name.startswith("net.")}
    found = load_file(out)
    assert found.keys() == inner.keys()
    assert all(torch.equal(found[name], inner[name]) for name in inner)
    with safe_open(out, "pt") as file:
        assert json.loads(file.metadata()["hyper_parameters"]) == {"lr": 0.1}


def test_averaged_weights_of_lightning(tmp_path: Path) -> None:
    """EMAWeightAveraging keeps them in state_dict."""
    ckpt("convert", GENUINE / "lightning" / "ema.ckpt", tmp_path / "out.pth", "--ema")
    saved = torch.load(GENUINE / "lightning" / "ema.ckpt", weights_only=False)
    assert all(torch.equal(tensor, saved["state_dict"][name]) for name, tensor in torch.load(tmp_path / "out.pth").items())


def test_ranks_of_a_run(tmp_path: Path) -> None:
    """A run whose newest checkpoint lacks a rank: the one before is taken."""
    for step, world in ((1, 2), (2, 3)):
        folder = tmp_path / "run" / f"checkpoint-{step}"
        save_ranks(folder, fsdp2, world)
    next((tmp_path / "run" / "checkpoint-2").glob("*rank*1*")).unlink()
    report = ckpt_tools.convert(tmp_path / "run", tmp_path / "out.pth")
    assert any("checkpoint-2 is passed over" in note.text for note in report.notes)
