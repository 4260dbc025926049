"""A folder of DeepSpeed ZeRO becomes one checkpoint, equal to what was cut, or an error names what does not fit."""

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

import ckpt_tools
from ckpt_tools.errors import NotACheckpointError, NothingMatchedError, PartError
from ckpt_tools.torch import load_state_dict
from tests.support.graphs import equal
from tests.support.samples import edit
from tests.support.zero_files import TAG, model_file, save_zero, trained

FIXTURES = Path(__file__).parents[2] / "fixtures" / "deepspeed"
MODEL, OPTIMIZER = "mp_rank_00_model_states.pt", "zero_pp_rank_{}_mp_rank_00_optim_states.pt"


@pytest.mark.parametrize("name", ["z1-fp32", "z3-bf16", "experts-z2-bf16", "pipeline-z1-bf16", "columns-z1-bf16"])
def test_genuine_folders(name: str) -> None:
    """What DeepSpeed saved, from the folder, the tag's folder and each file: the engine's weights, tied ones tied."""
    expected = torch.load(FIXTURES / name / "reference.pth", weights_only=True)
    tag = FIXTURES / name / TAG
    for path in (FIXTURES / name, tag, *tag.iterdir()):
        found = load_state_dict(path)
        assert {*found} == {*expected}
        assert all(equal({key: found[key]}, {key: expected[key].detach()}) for key in expected)
        if name in ("z1-fp32", "z3-bf16"):
            assert found["head.weight"].data_ptr() == found["emb.weight"].data_ptr()


@pytest.mark.parametrize(("name", "trained"), [("experts-z2-bf16", 10), ("pipeline-z1-bf16", 6), ("columns-z1-bf16", 6)])
def test_genuine_folders_that_are_cut_twice(name: str, trained: int, tmp_path: Path) -> None:
    """Experts, stages of a pipeline and AutoTP's columns and rows: the 16-bit weights, and the optimizer by names."""
    folder, expected = FIXTURES / name, torch.load(FIXTURES / name / "reference.pth", weights_only=True)
    module = load_state_dict(folder, select="module")
    assert {*module} == {*expected}
    assert all(torch.equal(module[key], value.to(module[key].dtype)) for key, value in expected.items())
    ckpt_tools.convert(folder, tmp_path / "optimizer.pth", select="optimizer")
    optimizer = torch.load(tmp_path / "optimizer.pth", weights_only=True)
    assert len(optimizer["state"]) == trained
    assert all(state["exp_avg_sq"].shape == expected[key].shape for key, state in optimizer["state"].items())
    assert {key for group in optimizer["param_groups"] for key in group["params"]} == {*optimizer["state"]}


@pytest.mark.parametrize(("padded", "aligned"), [(True, 0), (False, 8), (False, 2)])
def test_paddings_of_every_version(padded: bool, aligned: int, tmp_path: Path) -> None:
    """A filling behind the last weight that older versions keep, and one behind every parameter that newer ones tell."""
    for world in (1, 2, 3):
        save_zero(tmp_path / str(world), trained(), 2, world, padded=padded, aligned=aligned)
        assert equal(load_state_dict(tmp_path / str(world)), trained().whole)


def test_sub_groups_that_are_cut_elsewhere(tmp_path: Path) -> None:
    """Under stage 3 a rank's row may lie in more tensors than there are groups of names, and a weight in two of them."""
    tag = save_zero(tmp_path, trained(), 3, 2)
    for rank in range(2):
        edit(tag / OPTIMIZER.format(rank), lambda saved: saved["optimizer_state_dict"].update(
            fp32_flat_groups=list(torch.cat(saved["optimizer_state_dict"]["fp32_flat_groups"]).split(10))))  # fmt: skip
    assert equal(load_state_dict(tmp_path), trained().whole)


@pytest.mark.parametrize("stage", [1, 2, 3])
@pytest.mark.parametrize("world", [1, 2, 3, 5])
def test_weights_and_optimizer_of_every_stage(stage: int, world: int, tmp_path: Path) -> None:
    """The whole weights; `--select optimizer` is what torch's `get_optimizer_state_dict` gives: whole states by names."""
    model = trained()
    save_zero(tmp_path / "in", model, stage, world)
    assert equal(load_state_dict(tmp_path / "in"), model.whole)
    ckpt_tools.convert(tmp_path / "in", tmp_path / "optimizer.pth", select="optimizer")
    found = torch.load(tmp_path / "optimizer.pth", weights_only=True)
    for key in ("exp_avg", "exp_avg_sq"):
        for group in model.state(key):
            assert all(torch.equal(found["state"][name][key], value) for name, value in group.items())
    assert all(state["step"] == 2 for state in found["state"].values())
    assert found["param_groups"] == [
        {"lr": 0.1, "betas": (0.9, 0.999), "params": list(group)} for group in model.groups
    ]  # fmt: skip


def test_the_16_bit_weights(tmp_path: Path) -> None:
    """`--select module` is what the model file holds; stage 3 keeps none, which the error says."""
    save_zero(tmp_path / "two", trained(torch.bfloat16), 2, 2)
    expected = torch.load(tmp_path / "two" / TAG / MODEL, weights_only=True)["module"]
    for path in (tmp_path / "two", tmp_path / "two" / TAG / MODEL):
        ckpt_tools.convert(path, tmp_path / "out.safetensors", select="module", overwrite=True)
        assert equal(load_state_dict(tmp_path / "out.safetensors"), expected)
    assert equal(load_state_dict(tmp_path / "two", select="module"), expected)
    assert ckpt_tools.diff(tmp_path / "two", tmp_path / "out.safetensors", select="module=.").same
    with pytest.raises(NothingMatchedError) as missed:
        ckpt_tools.convert(tmp_path / "two", tmp_path / "out.pth", select="modle")
    assert missed.value.why == "Beside the tree are 'module', 'optimizer', 'training'."
    save_zero(tmp_path / "three", trained(torch.bfloat16), 3, 2)
    with pytest.raises(PartError, match="ZeRO 3 saves no 16-bit weights") as caught:
        ckpt_tools.convert(tmp_path / "three", tmp_path / "out.pth", select="module")
    assert "`dtype='bf16'`" in caught.value.fix


def test_training_moves_on(tmp_path: Path) -> None:
    """`--select training` has the model, the optimizer and what else was saved, and nothing about parts."""
    save_zero(tmp_path / "in", trained(), 2, 2)
    ckpt_tools.convert(tmp_path / "in", tmp_path / "out.pth", select="training")
    found = torch.load(tmp_path / "out.pth", weights_only=True)
    assert equal(found["model"], trained().whole)
    assert (found["epoch"], found["global_steps"]) == (3, 2)
    assert "param_shapes" not in found
    assert {*found["optimizer"]} == {"state", "param_groups"}


# --- which folder


def test_latest_names_the_folder(tmp_path: Path) -> None:
    """Of several steps the one that `latest` names; ranks are sorted by their numbers; the only step needs no `latest`."""
    save_zero(tmp_path / "in", trained(), 3, 11)
    assert equal(load_state_dict(tmp_path / "in"), trained().whole)
    (tmp_path / "in" / TAG).rename(tmp_path / "in" / "checkpoint")  # as Lightning calls it
    (tmp_path / "in" / "latest").write_text("checkpoint\n")
    assert equal(load_state_dict(tmp_path / "in"), trained().whole)
    save_zero(tmp_path / "old", trained(), 1, 2).rename(tmp_path / "in" / "global_step1")
    assert ckpt_tools.inspect(tmp_path / "in").tensors
    (tmp_path / "old" / "latest").unlink()
    (tmp_path / "in" / "global_step1").rename(tmp_path / "old" / "global_step1")
    assert equal(load_state_dict(tmp_path / "old"), trained().whole)


@pytest.mark.parametrize("tag", ["global_step9", "../other", "/etc", "", "global_step2/../global_step2"])
def test_latest_is_no_path(tag: str, tmp_path: Path) -> None:
    """`latest` is looked for among the folders that are there, and leads nowhere else."""
    save_zero(tmp_path / "in", trained(), 1, 2)
    save_zero(tmp_path / "other", trained(), 1, 2)
    (tmp_path / "in" / "latest").write_text(tag)
    with pytest.raises(NotACheckpointError, match="latest names the checkpoint"):
        ckpt_tools.inspect(tmp_path / "in")


def test_several_steps_without_latest(tmp_path: Path) -> None:
    """No step is guessed."""
    save_zero(tmp_path / "in", trained(), 1, 2)
    save_zero(tmp_path / "other", trained(), 1, 2).rename(tmp_path / "in" / "global_step10")
    (tmp_path / "in" / "latest").unlink()
    with pytest.raises(NotACheckpointError, match="several checkpoints, and no latest names one") as caught:
        ckpt_tools.inspect(tmp_path / "in")
    assert caught.value.fix.endswith("global_step10")


# --- what does not fit


def expect_refused(folder: Path, text: str) -> None:
    """The folder and each file of it are refused with this text before anything is written."""
    out = folder.parent / "out.pth"
    for path in (folder, *(folder / TAG).iterdir()):
        with pytest.raises(PartError, match=text):
            ckpt_tools.convert(path, out)
    assert not out.exists()
    assert ckpt_tools.check(folder).verdict == "unreadable"


@pytest.mark.parametrize(("stage", "spoil", "text"), [
    *((stage, lambda own: own.unlink(), r"1 of 3 parts is missing: zero_pp_rank_1_mp_rank_00_\*\.") for stage in (1, 3)),
    (1, lambda own: shutil.copy(own, own.with_name(f"bf16_{own.name}")), "are one part, under two names"),
    *((stage, lambda own, key=key, count=count: edit(own, lambda saved: saved["optimizer_state_dict"][key].__setitem__(
        0, torch.ones(count))), f"do not add up: rank 1 holds {count} elements of 'b.weight', 'emb.weight'")
        for stage, key in ((2, "single_partition_of_fp32_groups"), (3, "fp32_flat_groups")) for count in (7, 99)),
])  # fmt: skip
def test_a_rank_that_is_missing_doubled_or_of_another_size(
    stage: int, spoil: Callable[[Path], object], text: str, tmp_path: Path
) -> None:
    """The error names the rank, its elements and the weights that lie there; two files for one rank are no guess."""
    spoil(save_zero(tmp_path / "in", trained(), stage, 3) / OPTIMIZER.format(1))
    expect_refused(tmp_path / "in", text)


def test_a_part_of_another_job(tmp_path: Path) -> None:
    """A part of another number of ranks, a model file of one, files of another stage."""
    tag = save_zero(tmp_path / "in", trained(), 1, 2)
    other = save_zero(tmp_path / "other", trained(), 1, 3)
    own = (tag / OPTIMIZER.format(1)).read_bytes()
    (tag / OPTIMIZER.format(1)).write_bytes((other / OPTIMIZER.format(1)).read_bytes())
    expect_refused(tmp_path / "in", "do not have the same number of ranks")
    (tag / OPTIMIZER.format(1)).write_bytes(own)
    (tag / MODEL).write_bytes((other / MODEL).read_bytes())
    expect_refused(tmp_path / "in", "do not have the same number of ranks")
    three = save_zero(tmp_path / "three", trained(), 3, 2)
    (three / MODEL).write_bytes(own)
    expect_refused(tmp_path / "three", "are of different stages of ZeRO")


def test_a_part_of_another_step(tmp_path: Path) -> None:
    """The optimizer's counter of steps tells it, under stage 3 the model file's too; both ranks are named."""
    tag = save_zero(tmp_path / "two", trained(), 2, 3)
    new, inner = torch.tensor(1.0), "base_optimizer_state"
    edit(tag / OPTIMIZER.format(2), lambda saved: saved["optimizer_state_dict"][inner]["state"][1].update(step=new))
    expect_refused(tmp_path / "two", r"rank_0_.* and .*rank_2_.* do not have the same .*of the optimizer")
    tag = save_zero(tmp_path / "three", trained(), 3, 2)
    name = "zero_pp_rank_1_mp_rank_00_model_states.pt"
    edit(tag / name, lambda saved: saved.update(global_steps=1))
    expect_refused(tmp_path / "three", f"{name} do not have the same .global_steps")


@pytest.mark.parametrize(("name", "text"), [
    ("layer_0_expert_1_mp_rank_00_model_states.pt", "something else than an expert's tensors"),
    ("expp_rank_0_mp_rank_00_optim_states.pt", "of a save without ZeRO"),
    ("mp_rank_01_model_states.pt", "no file of the optimizer"),
    ("zero_pp_rank_0_mp_rank_01_optim_states.pt", "it has no part of the weights"),
])  # fmt: skip
def test_files_that_are_of_another_save(name: str, text: str, tmp_path: Path) -> None:
    """Files of experts and of other slices that do not belong to the rest are refused, and not left out."""
    tag = save_zero(tmp_path / "in", trained(), 1, 2)
    (tag / name).write_bytes((tag / MODEL).read_bytes())
    with pytest.raises(PartError, match=text):
        ckpt_tools.convert(tmp_path / "in", tmp_path / "out.pth")


def genuine(name: str, folder: Path) -> Path:
    """A copy of a genuine folder; returns the folder with the tag."""
    shutil.copytree(FIXTURES / name, folder)
    (folder / "reference.pth").unlink()
    return folder / TAG


@pytest.mark.parametrize(("name", "first", "second"), [
    ("columns-z1-bf16", "bf16_zero_pp_rank_0_mp_rank_00_optim_states.pt", "bf16_zero_pp_rank_0_mp_rank_01_optim_states.pt"),
    ("hop", "zero_pp_rank_0_mp_rank_00_optim_states.pt", "zero_pp_rank_1_mp_rank_00_optim_states.pt"),
    ("z1-fp32", "zero_pp_rank_1_mp_rank_00_optim_states.pt", "zero_pp_rank_0_mp_rank_00_optim_states.pt"),
    ("z3-bf16", "bf16_zero_pp_rank_0_mp_rank_00_optim_states.pt", "bf16_zero_pp_rank_1_mp_rank_00_optim_states.pt"),
    ("z3-bf16", "zero_pp_rank_1_mp_rank_00_model_states.pt", "zero_pp_rank_0_mp_rank_00_model_states.pt"),
])  # fmt: skip
def test_one_file_under_two_names(name: str, first: str, second: str, tmp_path: Path) -> None:
    """A rank's file that is a copy of another's is refused by every command that takes the tensors, also where sizes fit."""
    shutil.copytree(FIXTURES / name, tmp_path / "in")
    (tag,) = (tmp_path / "in").glob("global_step*")
    (tag / first).write_bytes((tag / second).read_bytes())
    with pytest.raises(PartError, match=r"hold the very same numbers|does not hold the weights that the model file has"):
        ckpt_tools.convert(tmp_path / "in", tmp_path / "out.pth")
    assert not (tmp_path / "out.pth").exists()


@pytest.mark.parametrize(("stage", "dtype"), [(1, torch.float32), (2, torch.bfloat16), (2, torch.float16)])
def test_rows_of_another_run(stage: int, dtype: torch.dtype, tmp_path: Path) -> None:
    """Weights of the same sizes and step that are not those of the model file are refused, and the file is named."""
    tag = save_zero(tmp_path / "in", trained(dtype), stage, 2)
    (path,) = tag.glob(f"*{OPTIMIZER.format(0)}")
    edit(path, lambda saved: [row.neg_() for row in saved["optimizer_state_dict"]["single_partition_of_fp32_groups"]])
    with pytest.raises(PartError, match=r"rank_0_mp_rank_00_optim_states\.pt does not hold the weights that the model"):
        ckpt_tools.convert(tmp_path / "in", tmp_path / "out.pth")
    assert ckpt_tools.check(tmp_path / "in").verdict == "findings"


def test_ranks_of_tensor_parallelism_that_changed_names(tmp_path: Path) -> None:
    """Their rows are of the same sizes: the 16-bit weights tell."""
    tag = genuine("columns-z1-bf16", tmp_path / "in")
    one, two = (tag / f"bf16_zero_pp_rank_0_mp_rank_0{rank}_optim_states.pt" for rank in (0, 1))
    first = one.read_bytes()
    one.write_bytes(two.read_bytes())
    two.write_bytes(first)
    with pytest.raises(PartError, match="does not hold the weights that the model file has"):
        ckpt_tools.convert(tmp_path / "in", tmp_path / "out.pth")


def test_an_expert_is_missing(tmp_path: Path) -> None:
    """As many as the model file says must be there; the model file alone is not whole without them."""
    tag = genuine("experts-z2-bf16", tmp_path / "in")
    (tag / "layer_0_expert_2_mp_rank_00_model_states.pt").unlink()
    expect_refused(tmp_path / "in", r"Experts are missing: layer_0_expert_2_\*")
    for path in tag.iterdir():
        if path.name != MODEL:
            path.unlink()
    with pytest.raises(PartError, match="the rest of which is in other files"):
        load_state_dict(tag / MODEL, select="module")


def test_a_stage_of_a_pipeline_is_missing(tmp_path: Path) -> None:
    """A slice that is not there is named; so is a layer's file, where the 16-bit weights are wanted."""
    tag = genuine("pipeline-z1-bf16", tmp_path / "in")
    (tag / "layer_01-model_states.pt").rename(tmp_path / "layer_01")
    expect_refused(tmp_path / "in", r"Layers have no file: layer_01-model_states\.pt")
    ckpt_tools.convert(tmp_path / "in", tmp_path / "some.pth", partial=True)
    assert torch.load(tmp_path / "some.pth", weights_only=True)["1.bias"].shape == (11,)
    for path in tag.glob("*mp_rank_01_*"):
        path.unlink()
    with pytest.raises(PartError, match=r"1 of 2 parts is missing: mp_rank_01_"):
        load_state_dict(tmp_path / "in")


@pytest.mark.parametrize(("info", "text"), [
    (None, "nothing says how they were cut"),
    ({"parameter_with_row_parallelism_patterns": ["(a+)+$"]}, r"by the pattern '\(a\+\)\+\$'"),
    ({"parameter_with_sub_params": [{"patterns": [r".*up_proj\.weight"], "shape": [2, 6, 8]}]}, "several matrices in one"),
])  # fmt: skip
def test_tensor_parallel_ranks_that_do_not_say_how_they_were_cut(info: Any, text: str, tmp_path: Path) -> None:
    """Without `universal_checkpoint_info` they are refused; a pattern that is not read, and a matrix of several, by name."""
    tag = genuine("columns-z1-bf16", tmp_path / "in")
    for rank in range(2):
        edit(tag / f"mp_rank_{rank:02d}_model_states.pt", lambda saved: saved.update(universal_checkpoint_info=info))
    expect_refused(tmp_path / "in", text)


def test_tensor_parallel_ranks_that_disagree(tmp_path: Path) -> None:
    """What all of them have whole is compared: a buffer, a norm; ranks and name are told."""
    tag = genuine("columns-z1-bf16", tmp_path / "in")
    edit(tag / "mp_rank_01_model_states.pt", lambda saved: saved["module"]["scale"].add_(1))
    for select in (None, "module"):
        with pytest.raises(PartError, match=r"mp_rank_00, mp_rank_01 hold different values for 'scale'"):
            ckpt_tools.convert(tmp_path / "in", tmp_path / "out.pth", select=select)
    assert "parts-disagree" in [row.code for row in ckpt_tools.check(tmp_path / "in").findings]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_without_zero(dtype: torch.dtype, tmp_path: Path) -> None:
    """Stage 0: the model file by itself has all weights, and the folder leads to it."""
    (tmp_path / "in" / TAG).mkdir(parents=True)
    (tmp_path / "in" / "latest").write_text(TAG)
    saved = model_file(trained(dtype), 1, 0, 2)
    torch.save(
        saved | {"param_shapes": None, "shared_params": None, "frozen_param_shapes": None}, tmp_path / "in" / TAG / MODEL
    )
    assert equal(load_state_dict(tmp_path / "in"), saved["module"])
    assert equal(load_state_dict(tmp_path / "in" / TAG / MODEL, select="module"), saved["module"])
    with pytest.raises(NothingMatchedError, match="optimizer"):
        ckpt_tools.convert(tmp_path / "in", tmp_path / "out.pth", select="optimizer")


def test_names_of_older_versions(tmp_path: Path) -> None:
    """No underscore in front of `optim_states`, and fp16's prefix."""
    for number, name in enumerate(
        ("zero_pp_rank_{}_mp_rank_00optim_states.pt", "fp16_zero_pp_rank_{}_mp_rank_00_optim_states.pt")
    ):
        folder = tmp_path / str(number)
        tag = save_zero(folder, trained(), 2, 2, padded=True)
        for rank in range(2):
            (tag / OPTIMIZER.format(rank)).rename(tag / name.format(rank))
        assert equal(load_state_dict(folder), trained().whole)


def test_buffers_that_ranks_count_by_themselves(tmp_path: Path) -> None:
    """The first rank's are taken, as DeepSpeed does, and that they differ is said."""
    tag = save_zero(tmp_path / "in", trained(), 3, 2)
    edit(tag / "zero_pp_rank_1_mp_rank_00_model_states.pt", lambda saved: saved["module"]["mean"].add_(1))
    report = ckpt_tools.convert(tmp_path / "in", tmp_path / "out.pth")
    notes = [note.text for note in report.notes if note.code == "parts-differ"]
    assert notes == ["The input: buffers differ between ranks, the first rank's are taken: 'mean'."]
    assert equal(load_state_dict(tmp_path / "in"), trained().whole)
