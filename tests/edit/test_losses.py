"""No command loses a tensor that nobody asked it to drop: written, left out by the word of the user, or refused by name."""

import functools
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_optimizer_state_dict

import ckpt_tools
import ckpt_tools.torch
from ckpt_tools import inspect
from ckpt_tools.errors import CkptError, ConvertError, NothingMatchedError, ObjectsError
from ckpt_tools.torch import load_into, load_state_dict
from tests.edit.test_objects_of_torch import Wrapped
from tests.support import classes
from tests.support.commands import ckpt
from tests.support.graphs import assert_same

pytestmark = [
    pytest.mark.filterwarnings("ignore:.*torch.ao.quantization.*"), pytest.mark.filterwarnings("ignore:.*torch.jit.*"),
    pytest.mark.filterwarnings("ignore:.*TypedStorage.*"), pytest.mark.filterwarnings("ignore:.*reduce_range.*"),
]  # fmt: skip


@functools.cache
def quantised() -> nn.Module:
    """Two layers of int8, as torch.ao makes them: a convolution with a state of its own, a linear layer with packed weights."""
    from torch.ao import quantization

    torch.manual_seed(0)
    model = nn.Sequential(quantization.QuantStub(), nn.Conv2d(1, 2, 3), nn.Flatten(), nn.Linear(8, 3)).eval()
    model.qconfig = quantization.get_default_qconfig("fbgemm")
    prepared = quantization.prepare(model)
    prepared(torch.ones(2, 1, 4, 4))
    made: nn.Module = quantization.convert(prepared)
    return made


def pickled(path: Path) -> Path:
    torch.save(quantised(), path)
    return path


def scripted(path: Path) -> Path:
    torch.jit.save(torch.jit.script(quantised()), str(path))
    return path


@pytest.mark.parametrize("save", [pickled, scripted])
@pytest.mark.parametrize("options", [{"objects": "plain"}, {"slim": True}, {"objects": "plain", "shard_size": 1}], ids=str)
def test_packed_weights_are_not_lost(tmp_path: Path, save: Callable[[Path], Path], options: dict[str, Any]) -> None:
    """Weights that a quantised convolution packs, in a program a linear layer too, are listed and refused."""
    path, count = save(tmp_path / "in.pt"), 2 if save is pickled else 4
    message = rf"{count} tensors of .* would be lost: _modules\.1\.<(state|saved)>\.10"
    with pytest.raises(ObjectsError, match=message) as caught:
        ckpt_tools.convert(path, tmp_path / "out", **{"format": "safetensors", **options})
    assert "drop" not in caught.value.fix
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("save", [pickled, scripted])
def test_lost_tensors_go_where_drop_names_them(tmp_path: Path, save: Callable[[Path], Path]) -> None:
    """--drop takes the paths that the error gives; the report lists each tensor that went."""
    path = save(tmp_path / "in.pt")
    drop, lost = (["_modules.1"], 2) if save is pickled else (["_modules.1", "*._packed_params"], 4)
    report = ckpt_tools.convert(path, tmp_path / "out.pth", objects="plain", drop=drop)
    assert report.tensors == (6 if save is pickled else 2)
    assert [why for where, why in report.dropped if where.startswith("_modules.")] == ["`drop`"] * lost
    with pytest.raises(CkptError, match="matches nothing"):
        ckpt_tools.convert(path, tmp_path / "two.pth", objects="plain", drop=["_modules.*", "absent"])


@pytest.mark.parametrize("call", [load_state_dict, lambda path: load_into(nn.Linear(8, 3), path)], ids=["state dict", "into"])
@pytest.mark.parametrize("whole", [True, False], ids=["module", "state dict"])
def test_load_code_gets_all_or_an_error(tmp_path: Path, call: Callable[[Path], Any], whole: bool) -> None:
    """What load code would miss of a quantised model, or of its state dict, is an error."""
    path = tmp_path / "in.pth"
    torch.save(quantised() if whole else quantised().state_dict(), path)
    with pytest.raises(ObjectsError, match=r"tensors of .*in\.pth would be missing: .*_packed_params"):
        call(path)


def test_an_average_gets_all_or_an_error(tmp_path: Path) -> None:
    """The mean of quantised models is not the mean of the few tensors that are no packed weights."""
    paths = [pickled(tmp_path / "a.pth"), pickled(tmp_path / "b.pth")]
    with pytest.raises(ObjectsError, match="2 tensors of"):
        ckpt_tools.average(paths, tmp_path / "mean.pth", objects="plain")


def test_slim_keeps_what_a_state_dict_holds_beside_tensors(tmp_path: Path) -> None:
    """Packed weights in a tuple and extra state with tensors are parts of a state dict, which --slim keeps."""
    data = {"a.weight": torch.ones(2), "b._packed": (torch.ones(3), None), "c._extra_state": {"scale": torch.ones(1)}}
    torch.save({"model": data, "optimizer": {"state": {}, "param_groups": []}}, tmp_path / "in.pth")
    report = ckpt_tools.convert(tmp_path / "in.pth", tmp_path / "out.pth", slim=True)
    assert_same(torch.load(tmp_path / "out.pth", weights_only=True), {"model": data})
    assert report.dropped == [("optimizer", "optimizer")]


def test_tensors_of_unknown_classes_are_not_lost(tmp_path: Path) -> None:
    """One that cannot be made without its class is no object to be left out with the others, and no dict of what it holds."""
    torch.save({"a.w": Wrapped(torch.ones(2)), "b.w": torch.ones(1), "callback": classes.Plain()}, tmp_path / "in.pth")
    with pytest.raises(ObjectsError, match=r"A tensor of .* would be lost: a\.w"):
        ckpt_tools.convert(tmp_path / "in.pth", tmp_path / "out.pth", slim=True)
    with pytest.raises(ObjectsError, match=r"A tensor of .* cannot be made without their class: a\.w"):
        load_state_dict(tmp_path / "in.pth")


class Anchored(nn.Module):
    """A module with a tensor that is neither parameter nor buffer, in an object's list."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(1, 1)
        self.anchors = [torch.ones(2)]


def test_attributes_of_modules_are_not_lost(tmp_path: Path) -> None:
    """A tensor that is an attribute of a module is in no state dict: refused until it is named; not asked of load code."""
    torch.save(Anchored(), tmp_path / "in.pth")
    with pytest.raises(ObjectsError, match=r"A tensor of .* would be lost: anchors\.0"):
        ckpt_tools.convert(tmp_path / "in.pth", tmp_path / "out.pth", objects="plain")
    with pytest.raises(ObjectsError, match=r"would be lost: anchors\.0") as caught:
        ckpt_tools.edit_in_place(tmp_path / "in.pth", strip_module=True, objects="plain")
    assert "drop" not in caught.value.fix  # which it refuses
    ckpt_tools.convert(tmp_path / "in.pth", tmp_path / "out.pth", objects="plain", drop="anchors")
    assert list(torch.load(tmp_path / "out.pth", weights_only=True)) == ["layer.weight", "layer.bias"]
    assert list(load_state_dict(tmp_path / "in.pth")) == ["layer.weight", "layer.bias"]


@pytest.mark.parametrize("options", [{"objects": "plain"}, {"slim": True}], ids=str)
def test_a_frozen_program_does_not_become_nothing(tmp_path: Path, options: dict[str, Any]) -> None:
    """torch.jit.freeze makes constants of the weights: there is no state dict to take out, and no empty file instead."""
    program = torch.jit.freeze(torch.jit.script(nn.Linear(2, 2).eval()))
    torch.jit.save(program, str(tmp_path / "in.pt"))
    with pytest.raises(NothingMatchedError, match=r"No tensor would be left|There is no state dict to keep"):
        ckpt_tools.convert(tmp_path / "in.pt", tmp_path / "out.pth", **options)
    assert not (tmp_path / "out.pth").exists()


@pytest.mark.parametrize("name", ["optimizer", "scheduler"])
@pytest.mark.parametrize("shard_size", [None, 1 << 20], ids=["file", "shards"])
def test_values_alone_are_no_safetensors(tmp_path: Path, name: str, shard_size: int | None) -> None:
    """The state of a scheduler, or of an optimizer without momentum, does not become a safetensors file without tensors."""
    optimizer = torch.optim.SGD([torch.ones(1, requires_grad=True)], lr=0.1)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1)
    both: dict[str, Any] = {"optimizer": optimizer, "scheduler": scheduler}
    torch.save(both[name].state_dict(), tmp_path / "in.pt")
    with pytest.raises(ConvertError, match="There is no tensor in the checkpoint"):
        ckpt_tools.convert(tmp_path / "in.pt", tmp_path / "out", format="safetensors", shard_size=shard_size)
    assert not (tmp_path / "out").exists()
    ckpt_tools.convert(tmp_path / "in.pt", tmp_path / "out.pth")


def with_attributes(path: Path, **attributes: Any) -> Path:
    """A state dict whose weight, and whose parameter, have Python attributes; torch saves these with them."""
    weight, parameter = torch.ones(3), nn.Parameter(torch.ones(2))
    for name, value in attributes.items():
        setattr(weight, name, value)
        setattr(parameter, name, value)
    torch.save({"w": weight, "p": parameter, "q": torch.ones(1)}, path)
    return path


@pytest.mark.parametrize("format", ["safetensors", "dcp", "shards"])
def test_attributes_of_tensors_without_a_place(tmp_path: Path, format: str) -> None:
    """Values that were set on tensors are told to be left out; tensors among them are refused, until objects are dropped."""
    how: dict[str, Any] = {"shard_size": 1 << 20} if format == "shards" else {"format": format}
    path, out = with_attributes(tmp_path / "in.pth", mask=torch.zeros(3), scale=2.5), tmp_path / "out"
    with pytest.raises(ConvertError, match=r"cannot store attributes of tensors, and 'w\.mask', 'p\.mask' contain tensors"):
        ckpt_tools.convert(path, out, **how)
    report = ckpt_tools.convert(path, out, objects="drop", **how)
    assert [where for where, _ in report.dropped] == ["w.mask", "w.scale", "p.mask", "p.scale"]
    values = with_attributes(tmp_path / "values.pth", scale=2.5)
    report = ckpt_tools.convert(values, tmp_path / "more", **how)
    assert [(where, "an attribute of a tensor" in why) for where, why in report.dropped] == [
        ("w.scale", True),
        ("p.scale", True),
    ]
    assert ckpt_tools.convert(path, tmp_path / "out.pth").dropped == []
    assert torch.load(tmp_path / "out.pth", weights_only=True)["w"].mask.tolist() == [0, 0, 0]


@pytest.mark.parametrize("options", [{"objects": "drop"}, {"slim": True}], ids=str)
def test_attributes_beside_an_object_are_told(tmp_path: Path, options: dict[str, Any]) -> None:
    """A tensor that loses an attribute of an unknown class loses the others with it, and the report says which."""
    path = with_attributes(tmp_path / "in.pth", mask=torch.zeros(3), owner=classes.Plain())
    report = ckpt_tools.convert(path, tmp_path / "out.pth", **options)
    assert [where for where, _ in report.dropped] == ["w.mask", "w.owner", "p.mask", "p.owner"]
    assert not vars(torch.load(tmp_path / "out.pth", weights_only=True)["w"])


def training() -> dict[str, Any]:
    """Ties, views on one storage, a sparse tensor, an optimizer, tensors outside state dicts."""
    whole = torch.randn(6, 4)
    weights = {"a.weight": whole[:3], "b.weight": whole[3:], "tied.weight": whole[:3], "s.weight": torch.eye(3).to_sparse()}
    state = {0: {"exp_avg": torch.ones(3, 4)}}
    optimizer = {"state": state, "param_groups": [{"params": [0, 1, 2, 3]}]}
    return {"model": weights, "optimizer": optimizer, "queue": torch.ones(2), "rows": (torch.zeros(1),), "epoch": 3}


OPTIONS: list[dict[str, Any]] = [
    {}, {"select": "model"}, {"drop": ["optimizer", "queue", "b.*"]}, {"keep": "a.*", "drop": "optimizer"},
    {"dtype": "bf16", "rename": "^a\\.=z."}, {"slim": True, "dtype": "fp16"}, {"map_location": "cuda"},
    {"objects": "plain", "add_prefix": "net."}, {"format": "pth-legacy"},
    {"drop": "s.*", "format": "dcp"},
    {"select": "model", "drop": "s.*", "format": "safetensors"}, {"select": "model", "drop": "s.*", "shard_size": "1KB"},
]  # fmt: skip


@pytest.mark.parametrize("options", OPTIONS, ids=str)
def test_honest_conversions_come_out_even(options: dict[str, Any], tmp_path: Path) -> None:
    """The number of tensors in the report is that of the output, whatever was asked for."""
    torch.save(training(), tmp_path / "in.pth")
    report = ckpt_tools.convert(tmp_path / "in.pth", tmp_path / "out", **{"format": "pth", **options})
    assert report.tensors == ckpt_tools.inspect(tmp_path / "out").totals["tensors"]


def test_renamed_names_are_tensors(tmp_path: Path) -> None:
    """Extra state that moves with its module is no tensor: two of two are renamed, never three."""
    state = {"module.a.weight": torch.ones(2, 2), "module.a.bias": torch.ones(2), "module.a._extra_state": {"k": 1}}
    torch.save({"model": state}, tmp_path / "in.pth")
    report = ckpt_tools.convert(tmp_path / "in.pth", tmp_path / "out.pth", strip_module=True)
    assert [(row.tensors, row.renamed) for row in report.state_dicts] == [(2, 2)]
    assert list(torch.load(tmp_path / "out.pth")["model"]) == ["a.weight", "a.bias", "a._extra_state"]
    assert "2 of 2" in ckpt("convert", tmp_path / "in.pth", tmp_path / "again.pth", "--strip-module").output


def test_a_module_of_one_number_and_extra_state(tmp_path: Path) -> None:
    """A single number beside what `get_extra_state` gave is a parameter, and no score; the extra state is said."""
    torch.save({"param": torch.tensor(3.0), "_extra_state": {"custom_key": 123}}, tmp_path / "in.pth")
    report = ckpt_tools.convert(tmp_path / "in.pth", tmp_path / "out.safetensors")
    assert {name: tensor.item() for name, tensor in load_file(tmp_path / "out.safetensors").items()} == {"param": 3.0}
    assert [note.code for note in report.notes] == ["extra-state"]


def test_load_into_says_what_lies_beside(tmp_path: Path) -> None:
    """Tensors of the file outside the state dict that is loaded are named."""
    model = torch.nn.Linear(3, 2)
    torch.save({"model": model.state_dict(), "queue": torch.ones(5)}, tmp_path / "in.pth")
    assert ckpt_tools.torch.load_into(model, tmp_path / "in.pth").notes == ["beside 'model', and not loaded: 'queue'"]
    torch.save(model.state_dict(), tmp_path / "alone.pth")
    assert not ckpt_tools.torch.load_into(model, tmp_path / "alone.pth").notes


STEPS = 1001  # which bfloat16 does not have


@pytest.fixture
def path(tmp_path: Path) -> Path:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 1))
    optimizer = torch.optim.AdamW(model.parameters())
    model(torch.ones(1, 2)).sum().backward()
    optimizer.step()
    for state in optimizer.state.values():
        state["step"].fill_(STEPS)
    flat = get_optimizer_state_dict(model, optimizer, options=StateDictOptions(flatten_optimizer_state_dict=True))
    torch.save({"model": model.state_dict(), "optimizer": flat}, tmp_path / "in.pth")
    return tmp_path / "in.pth"


def converted(path: Path, **options: Any) -> Any:
    ckpt_tools.convert(path, path.with_name("out.pth"), **options)
    return torch.load(path.with_name("out.pth"))


def test_it_is_no_state_dict(path: Path) -> None:
    """It is shown as an optimizer; load code takes the model; --slim leaves it out."""
    assert [row["where"] for row in inspect(path).state_dicts] == [["model"]]
    assert "optimizer: 12 states (step, exp_avg, exp_avg_sq)" in ckpt("inspect", path).output
    assert list(load_state_dict(path)) == ["0.weight", "0.bias", "1.weight", "1.bias"]
    assert ckpt_tools.convert(path, path.with_name("slim.pth"), slim=True).dropped == [("optimizer", "optimizer")]
    assert list(torch.load(path.with_name("slim.pth"))) == ["model"]


def test_steps_are_not_cast(path: Path, tmp_path: Path) -> None:
    """As those of any optimizer, from a folder of torch.distributed.checkpoint too."""
    ckpt_tools.convert(path, tmp_path / "folder", format="dcp")
    for source in (path, tmp_path / "folder"):
        ckpt_tools.convert(source, tmp_path / "out.pth", dtype="bf16", overwrite=True)
        state = torch.load(tmp_path / "out.pth")["optimizer"]
        assert state["state.0.weight.step"] == STEPS
        assert state["state.0.weight.exp_avg"].dtype == torch.bfloat16


def test_its_names_follow_the_model_s(path: Path) -> None:
    found = converted(path, rename=r"^0\.=enc.")
    assert list(found["model"]) == ["enc.weight", "enc.bias", "1.weight", "1.bias"]
    kept = list(torch.load(path)["optimizer"])
    assert list(found["optimizer"]) == [key.replace(".0.", ".enc.", 1) for key in kept]


def test_an_average_takes_the_first_file_s(path: Path, tmp_path: Path) -> None:
    other = torch.load(path)
    other["optimizer"] = {key: value * 3 for key, value in other["optimizer"].items() if isinstance(value, torch.Tensor)}
    torch.save(torch.load(path) | {"optimizer": torch.load(path)["optimizer"] | other["optimizer"]}, tmp_path / "other.pth")
    ckpt_tools.average([path, tmp_path / "other.pth"], tmp_path / "mean.pth")
    assert torch.load(tmp_path / "mean.pth")["optimizer"]["state.0.weight.step"] == STEPS
