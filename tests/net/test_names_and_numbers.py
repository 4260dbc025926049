"""Names and numbers that came out wrong once, with exit code 0."""

import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp

import ckpt_tools
import ckpt_tools.torch
from ckpt_tools.errors import ConvertError
from tests.support.commands import ckpt


def test_a_prefix_goes_once_and_comes_back(tmp_path: Path) -> None:
    """`model.model.layers.0.w` loses one `model.`; --add-prefix and then --strip-prefix give the file again."""
    names = ["model.model.layers.0.w", "model.model.norm.weight", "model.lm_head.weight", "model.module.module.w"]
    old = {name: torch.full((2,), float(number)) for number, name in enumerate(names)}
    torch.save(old, tmp_path / "lit.pth")
    ckpt("convert", tmp_path / "lit.pth", tmp_path / "without.pth", "--strip-prefix", "model.")
    ckpt("convert", tmp_path / "without.pth", tmp_path / "again.pth", "--add-prefix", "model.")
    ckpt("convert", tmp_path / "without.pth", tmp_path / "plain.pth", "--strip-module")
    without, again = torch.load(tmp_path / "without.pth"), torch.load(tmp_path / "again.pth")
    assert list(without) == [name.removeprefix("model.") for name in names]
    assert list(again) == names
    assert all(torch.equal(again[name], old[name]) for name in names)
    assert list(torch.load(tmp_path / "plain.pth"))[-1] == "w", "wrappers are no names of a model: all of them go"


def averaged(folder: Path, *states: object, **options: Any) -> dict[str, torch.Tensor]:
    """The mean of these state dicts."""
    paths = [folder / f"{number}.pth" for number in range(len(states))]
    for path, state in zip(paths, states, strict=True):
        torch.save(state, path)
    ckpt_tools.average(paths, folder / "mean.pth", overwrite=True, **options)
    found: dict[str, torch.Tensor] = torch.load(folder / "mean.pth")
    return found


def test_a_mean_is_as_wide_as_its_files(tmp_path: Path) -> None:
    """No value wraps or overflows because the first file has a narrower dtype; where the mean itself is beyond, it is said."""
    narrow = {"i.w": torch.tensor([-3], dtype=torch.int8), "f.w": torch.tensor([1.0]).half()}
    narrow["b.num_batches_tracked"] = torch.tensor(1, dtype=torch.int32)
    wide = {"i.w": torch.tensor([300]), "f.w": torch.tensor([1e6]), "b.num_batches_tracked": torch.tensor(2**40)}
    found = averaged(tmp_path, narrow, wide, integers="max")
    assert [found[name].item() for name in wide] == [300, 500000.5, 2**40]
    mixed = averaged(
        tmp_path,
        {"a.w": torch.ones(1).half(), "u.w": torch.ones(1, dtype=torch.uint8)},
        {"a.w": torch.ones(1).bfloat16(), "u.w": -torch.ones(1, dtype=torch.int8)},
        integers="max",
    )
    assert (mixed["a.w"].dtype, mixed["u.w"].dtype) == (torch.float32, torch.int16)
    far = ckpt_tools.average([tmp_path / "0.pth", tmp_path / "1.pth"], tmp_path / "far.pth", weights=[2, -1], integers="first")
    assert "overflowed" not in [note.code for note in far.output.notes]
    torch.save({"a.w": torch.tensor([60000.0]).half()}, tmp_path / "a.pth")
    torch.save({"a.w": torch.tensor([-60000.0]).half()}, tmp_path / "b.pth")
    far = ckpt_tools.average([tmp_path / "a.pth", tmp_path / "b.pth"], tmp_path / "sum.pth", weights=[2, -1])
    assert ["a.w" in note.text for note in far.output.notes if note.code == "overflowed"] == [True]


def test_the_mean_of_equal_files_is_equal(tmp_path: Path) -> None:
    """To the last bit, NaN and the infinities among them."""
    torch.manual_seed(0)
    value = torch.cat([torch.randn(100_000, dtype=torch.float64), torch.tensor([float("inf"), float("nan"), 1.7e308])])
    for count in (2, 3, 7):
        assert torch.equal(averaged(tmp_path, *[{"a.w": value}] * count)["a.w"].nan_to_num(), value.nan_to_num())


def test_a_mean_of_other_state_dicts_is_refused(tmp_path: Path) -> None:
    """`ema` of one file is not paired with `model` of another, though that has no other."""
    model, ema = {"a.w": torch.zeros(2)}, {"a.w": torch.ones(2)}
    for first, other in (({"model": model, "ema": ema}, {"model": model}), ({"ema": ema}, {"model": model})):
        with pytest.raises(ConvertError, match="no state dict at ema"):
            averaged(tmp_path, first, other)
    assert averaged(tmp_path, model, {"model": ema})["a.w"].tolist() == [0.5, 0.5]


@pytest.mark.parametrize(
    ("left", "right"),
    [
        ({"x": {1: 2}}, {"x": {"1": 2}}), ({"p.q": 2}, {"p": {"q": 2}}), ({"x": {}}, {}), ({"x": []}, {"x": ()}),
        ({"x": [1, 2]}, {"x": (1, 2)}), ({"x": [{"a": 1}]}, {"x": ({"a": 1},)}), ({"x": {}}, {"x": []}),
        ({"x": 1}, {"x": True}), ({"x": 1}, {"x": 1.0}),
        ({"x": {0: {"y": 1}}}, {"x": [{"y": 1}]}), ({1: torch.ones(2)}, {"1": torch.ones(2)}),
        ({"p.q": torch.ones(2)}, {"p": {"q": torch.ones(2)}}), ({"x": None}, {}), ({"x": b"1"}, {"x": "1"}),
    ],
)  # fmt: skip
def test_what_is_not_the_same_differs(tmp_path: Path, left: dict[Any, Any], right: dict[Any, Any]) -> None:
    """Paths are compared as they are, empty containers are values, and each kind of container is one of its own."""
    for name, value in (("left", left), ("right", right)):
        torch.save({"w": {"a.w": torch.ones(1)}} | value, tmp_path / f"{name}.pth")
    ckpt("diff", tmp_path / "left.pth", tmp_path / "right.pth", code=1)
    ckpt("diff", tmp_path / "left.pth", tmp_path / "left.pth")
    ckpt("diff", tmp_path / "right.pth", tmp_path / "right.pth")


@pytest.mark.parametrize("dtype", [torch.int64, torch.uint64])
def test_how_far_large_whole_numbers_are_apart(tmp_path: Path, dtype: torch.dtype) -> None:
    """Those beyond 2**53 too, which float64 takes for equal."""
    left = torch.tensor([2**53, 2**62, 7, -(2**63) if dtype.is_signed else 0]).to(dtype)
    right = torch.tensor([2**53 + 1, 2**62, 7, 2**63 - 1]).to(dtype)
    for name, value in (("left", left), ("right", right)):
        torch.save({"a.w": value[:3], "b.w": value[3:]}, tmp_path / f"{name}.pth")
    near, far = ckpt_tools.diff(tmp_path / "left.pth", tmp_path / "right.pth", values=True).changed
    assert near.gap is not None
    assert far.gap is not None
    assert (near.gap["changed"], near.gap["max_abs"]) == (1, 1.0)
    assert far.gap["max_abs"] == pytest.approx(2.0**64 if dtype.is_signed else 2.0**63)


def test_an_optimizer_comes_back_from_a_distributed_checkpoint(tmp_path: Path) -> None:
    """Its moments are found again under the whole numbers of its parameters; states that no group names are refused."""
    model = torch.nn.Linear(3, 2)
    optimizer = torch.optim.Adam(model.parameters())
    model(torch.ones(1, 3)).sum().backward()
    optimizer.step()
    run: dict[str, Any] = {"model": model.state_dict(), "optimizer": optimizer.state_dict(), "scores": {1: 0.5}}
    torch.save(run, tmp_path / "run.pth")
    report = ckpt_tools.convert(tmp_path / "run.pth", tmp_path / "folder", format="dcp")
    assert [note.code for note in report.notes][:2] == ["keys-text", "optimizer-keys"]
    ckpt_tools.convert(tmp_path / "folder", tmp_path / "again.pth")
    with warnings.catch_warnings(action="ignore"):  # of no process group
        dcp.save({"optimizer": optimizer.state_dict()}, checkpoint_id=tmp_path / "torch")
    ckpt_tools.convert(tmp_path / "torch", tmp_path / "torch.pth")
    for path in (tmp_path / "again.pth", tmp_path / "torch.pth"):
        found = torch.load(path)["optimizer"]["state"]
        assert list(found) == [0, 1]
        assert torch.equal(found[0]["exp_avg"], optimizer.state_dict()["state"][0]["exp_avg"])
    run["optimizer"]["param_groups"][0]["params"] = [7, 8]
    torch.save(run, tmp_path / "odd.pth")
    with pytest.raises(ConvertError, match="whole numbers"):
        ckpt_tools.convert(tmp_path / "odd.pth", tmp_path / "odd", format="dcp")


@pytest.mark.parametrize(
    ("call", "words"),
    [
        ("torch.load_into(None, 'x.pth', strict=False)", "Here it is `allow_missing` and"),
        ("convert('x.pth', 'out.pth', device='cpu')", "Here it is `map_location`"),
        ("torch.load('x.pth', weights_only=True)", "ever executed: leave it out"),
        ("torch.load('x.pth', map_locaton='cpu')", "Did you mean 'map_location'"),
    ],
)
def test_keywords_of_other_libraries(call: str, words: str) -> None:
    """A keyword that a function does not have names the one that is meant, or why there is none."""
    with pytest.raises(TypeError, match=words):
        eval(f"ckpt_tools.{call}")
