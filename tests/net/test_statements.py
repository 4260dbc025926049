"""What is said of files that look like something else: a true sentence and the right exit code."""

import json
import pickle
import struct
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

import ckpt_tools
from ckpt_tools.errors import DamagedFileError
from tests.support.commands import ckpt


def text(*args: object, code: int) -> str:
    """What a command says, in one line."""
    return " ".join(ckpt(*args, code=code).output.split())


def test_files_of_ranks_of_two_kinds(tmp_path: Path) -> None:
    """A folder with files of ranks of two models has files of ranks."""
    for kind in ("pytorch_model_fsdp", "model_ema"):
        for rank in range(3):
            torch.save({"w": torch.ones(2)}, tmp_path / f"{kind}_0_rank{rank}.bin")
    said = text("convert", tmp_path, tmp_path / "out.pth", code=3)
    assert "not the files of all ranks of one model" in said
    assert "model_ema_0_rank0.bin" in said


def test_a_folder_of_folders_names_them(tmp_path: Path) -> None:
    """Checkpoints that are folders are named, and no file of a scheduler or of random states beside them."""
    torch.save({"w": torch.ones(2)}, tmp_path / "in.pth")
    (tmp_path / "all").mkdir()
    ckpt_tools.convert(tmp_path / "in.pth", tmp_path / "all" / "model_0", format="dcp")
    for name in ("scheduler.pt", "rng_state_0.pth", "optimizer_0_rank0.bin"):
        torch.save({"last_epoch": 1}, tmp_path / "all" / name)
    assert text("convert", tmp_path / "all", tmp_path / "out.pth", code=3).endswith("Name a checkpoint in it: model_0.")


def test_a_large_tensor_as_pickle_wrote_it(tmp_path: Path) -> None:
    """`pickle.dump` puts three megabytes into one text: one tensor, and no more objects than that."""
    with open(tmp_path / "in.pkl", "wb") as file:
        pickle.dump({"w": torch.zeros(790_000)}, file, 2)
    assert [row["name"] for row in ckpt_tools.inspect(tmp_path / "in.pkl").tensors] == ["w"]


def test_torchao_that_is_not_known(tmp_path: Path) -> None:
    """The file is whole, in a layout that is not known; without `--dequantize` it is converted as it is."""
    state = {
        "0._weight_qdata": torch.ones(4, 2, dtype=torch.uint8),
        "0._weight_scale": torch.ones(4, 1),
        "0.bias": torch.ones(4),
    }
    save_file(state, tmp_path / "ao.safetensors")
    said = text("convert", tmp_path / "ao.safetensors", tmp_path / "out.pth", "--dequantize", "fp32", code=3)
    assert "torchao has quantised" in said
    assert "not whole" not in said
    ckpt("convert", tmp_path / "ao.safetensors", tmp_path / "out.pth")
    assert set(torch.load(tmp_path / "out.pth")) == set(state)


def peft(*, whole: bool) -> dict[str, torch.Tensor]:
    """A module with an adapter, its own weight beside it or not."""
    start = "base_model.model.fc"
    state = {f"{start}.lora_A.default.weight": torch.ones(2, 4), f"{start}.lora_B.default.weight": torch.ones(4, 2)}
    return state | (
        {f"{start}.base_layer.weight": torch.ones(4, 4), "base_model.model.head.bias": torch.ones(3)} if whole else {}
    )


@pytest.mark.parametrize("whole", [True, False])
def test_a_whole_peft_model(whole: bool, tmp_path: Path) -> None:
    """A model that was saved with its adapter in it is a model; an adapter alone is none."""
    torch.save(peft(whole=whole), tmp_path / "in.pth")
    found = next(row.found for row in ckpt_tools.inspect(tmp_path / "in.pth").findings if row.code == "adapter")
    assert found.startswith("a PEFT model" if whole else "an adapter (LoRA), not a whole model")


def test_an_adapter_of_experts(tmp_path: Path) -> None:
    """Its rank is the configuration's, not that times the number of experts; each expert gets its change."""
    start, rank, experts = "base_model.model.mlp.experts", 2, 3
    state = {f"{start}.lora_A.weight": torch.ones(rank * experts, 4), f"{start}.lora_B.weight": torch.ones(5, rank * experts)}
    save_file(state, tmp_path / "adapter_model.safetensors")
    config = {"peft_type": "LORA", "r": rank, "lora_alpha": 3, "target_parameters": ["mlp.experts.down_proj"]}
    (tmp_path / "adapter_config.json").write_text(json.dumps(config))
    adapter = ckpt_tools.inspect(tmp_path / "adapter_model.safetensors").adapter
    assert adapter is not None
    assert adapter["ranks"] == {"2": 1}
    save_file({"mlp.experts.down_proj": torch.ones(3, 5, 4)}, tmp_path / "base.safetensors")
    ckpt_tools.convert(tmp_path / "base.safetensors", tmp_path / "out.pth", lora=tmp_path)
    assert torch.equal(torch.load(tmp_path / "out.pth")["mlp.experts.down_proj"], torch.full((3, 5, 4), 1 + rank * 3 / 2))


def test_a_saved_model_of_tensorflow(tmp_path: Path) -> None:
    """It begins as an ONNX model does, and is called none."""
    graph = b"\x0a\x0c\x12\x04tags\x22\x05serve"
    (tmp_path / "saved_model.pb").write_bytes(b"\x08\x01\x12" + bytes((len(graph),)) + graph)
    said = text("inspect", tmp_path / "saved_model.pb", code=3)
    assert "TensorFlow" in said
    assert "This is not an ONNX model" in said


def test_hdf5_of_others(tmp_path: Path) -> None:
    """An HDF5 file is Keras's where it has what Keras writes."""
    h5py = pytest.importorskip("h5py")
    for name, group in (("keras.h5", "layers/dense/vars/0"), ("hdf5.h5", "measured/x")):
        with h5py.File(tmp_path / name, "w") as file:
            file[group] = [1.0, 2.0]
        assert ckpt_tools.inspect(tmp_path / name).container == name.removesuffix(".h5")


@pytest.mark.parametrize("dtype", ["", "F31", None, 4])
def test_repair_saves_what_is_beside_an_unknown_dtype(dtype: object, tmp_path: Path) -> None:
    """One entry of a header says nothing that is known: it is lost, with its reason, and the others are saved."""
    header = {
        "a": {"dtype": "F32", "shape": [2], "data_offsets": [0, 8]},
        "bad": {"dtype": dtype, "shape": [2], "data_offsets": [8, 16]},
        "c": {"dtype": "F32", "shape": [1], "data_offsets": [16, 20]},
    }  # fmt: skip
    encoded = json.dumps(header).encode()
    (tmp_path / "in.safetensors").write_bytes(struct.pack("<Q", len(encoded)) + encoded + struct.pack("<5f", *range(5)))
    with pytest.raises(DamagedFileError):
        ckpt_tools.inspect(tmp_path / "in.safetensors")
    said = text("repair", tmp_path / "in.safetensors", tmp_path / "out.safetensors", code=1)
    assert "bad: Tensor 'bad' has the unknown dtype" in said
    found = load_file(tmp_path / "out.safetensors")
    assert {name: value.tolist() for name, value in found.items()} == {"a": [0, 1], "c": [4]}
