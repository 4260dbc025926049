"""`ckpt average`, against means that torch works out."""

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from ckpt_tools import average
from ckpt_tools.errors import UsageError


def files(folder: Path, *states: Any) -> list[Path]:
    """Each state in a file of its own."""
    paths = [folder / f"{index}.pth" for index in range(len(states))]
    for path, state in zip(paths, states, strict=True):
        torch.save(state, path)
    return paths


def load(path: Path) -> Any:
    return torch.load(path, weights_only=True)


@pytest.mark.parametrize(
    "dtype", [torch.float64, torch.float32, torch.float16, torch.bfloat16, torch.float8_e5m2, torch.complex64]
)
def test_the_mean_is_rounded_once(tmp_path: Path, dtype: torch.dtype) -> None:
    """Every dtype: the float64 mean of the whole tensors, cast to the dtype, over several blocks."""
    torch.manual_seed(0)
    wide = torch.complex128 if dtype.is_complex else torch.float64
    tensors = [torch.randn(3, 100_001, dtype=wide).to(dtype) for _ in range(3)]
    paths = files(tmp_path, *({"a.w": tensor} for tensor in tensors))
    report = average(paths, tmp_path / "out.pth", weights=[2, 1, 1])
    assert report.weights == [0.5, 0.25, 0.25]
    expected = tensors[0].to(wide) * 0.5 + tensors[1].to(wide) * 0.25 + tensors[2].to(wide) * 0.25
    found = load(tmp_path / "out.pth")["a.w"]
    assert found.dtype == dtype
    assert torch.equal(found.to(wide), expected.to(dtype).to(wide))


def test_across_containers_layouts_and_dtypes(tmp_path: Path) -> None:
    """A strided half-precision tensor and a contiguous float32 one in safetensors have a mean, in float32."""
    one, other = torch.arange(6.0).reshape(2, 3), torch.ones(3, 2)
    torch.save({"a.w": one.t().half()}, tmp_path / "a.pth")
    save_file({"a.w": other}, tmp_path / "b.safetensors")
    average([tmp_path / "a.pth", tmp_path / "b.safetensors"], tmp_path / "out.safetensors")
    found = load_file(tmp_path / "out.safetensors")["a.w"]
    assert found.dtype == torch.float32
    assert torch.equal(found, (one.t() + 1) / 2)


@pytest.mark.parametrize("other", ["float8_e5m2", "float8_e4m3fnuz"])
def test_no_type_of_one_byte_holds_two_of_them(tmp_path: Path, other: str) -> None:
    """The mean of two kinds of float8 is float16, with the digits of both."""
    value = torch.tensor([1.125, 1.0])
    paths = files(tmp_path, {"a.w": value.to(torch.float8_e4m3fn)}, {"a.w": value.to(getattr(torch, other))})
    average(paths, tmp_path / "out.pth")
    found = load(tmp_path / "out.pth")["a.w"]
    assert found.dtype == torch.float16
    assert found.tolist() == [(1.125 + float(value.to(getattr(torch, other))[0].float())) / 2, 1.0]


def test_what_only_another_input_has(tmp_path: Path) -> None:
    """State dicts and tensors that the first input has none of are in no mean, and said."""
    more = {"model": {"w": torch.ones(1)}, "ema": {"w": torch.ones(1)}, "optimizer": {"m": [torch.ones(1)]}}
    paths = files(tmp_path, {"model": {"w": torch.zeros(1)}}, more)
    notes = [note.text for note in average(paths, tmp_path / "out.pth").output.notes]
    assert notes == [f"{paths[1]} has 2 more tensors, which are in no mean and left out: ema.w, optimizer.m.0."]
    assert load(tmp_path / "out.pth") == {"model": {"w": torch.tensor([0.5])}}


def test_ties_are_kept_where_all_have_them(tmp_path: Path) -> None:
    """Tied everywhere: tied in the mean. Tied in the first only: each name gets its own mean."""
    one, other, third = torch.ones(4), torch.zeros(4), torch.full((4,), 3.0)
    paths = files(tmp_path, {"a.w": one, "b.w": one}, {"a.w": other, "b.w": other}, {"a.w": other, "b.w": third})
    average(paths[:2], tmp_path / "tied.pth")
    tied = load(tmp_path / "tied.pth")
    assert tied["a.w"].data_ptr() == tied["b.w"].data_ptr()
    average([paths[0], paths[2]], tmp_path / "free.pth")
    free = load(tmp_path / "free.pth")
    assert (free["a.w"][0].item(), free["b.w"][0].item()) == (0.5, 2.0)


def test_tied_names_keep_what_they_are(tmp_path: Path) -> None:
    """A Parameter and a plain tensor on the same bytes are averaged once, stay tied, and stay a Parameter and a tensor."""
    states = []
    for value in (1.0, 3.0):
        weight = torch.full((2, 3), value)
        states.append({"a.w": torch.nn.Parameter(weight), "b.w": weight})
    average(files(tmp_path, *states), tmp_path / "out.pth")
    found = load(tmp_path / "out.pth")
    assert [type(tensor) for tensor in found.values()] == [torch.nn.Parameter, torch.Tensor]
    assert [tensor.requires_grad for tensor in found.values()] == [True, False]
    assert found["a.w"].data_ptr() == found["b.w"].data_ptr()
    assert torch.equal(found["b.w"], torch.full((2, 3), 2.0))


def test_conjugate_views_have_a_mean(tmp_path: Path) -> None:
    """The bit that torch applies on reading is worked into the mean, and not applied to it again."""
    one, other = torch.tensor([1 + 2j, 3 - 1j]), torch.tensor([3 + 4j, 1 + 5j])
    average(files(tmp_path, {"a.w": one.conj()}, {"a.w": other}), tmp_path / "out.pth")
    assert load(tmp_path / "out.pth")["a.w"].tolist() == ((one.conj() + other) / 2).tolist()


def test_names_of_any_input_are_unwrapped(tmp_path: Path) -> None:
    """The first input has no wrapper, the other has one: nothing is said of the first alone."""
    torch.save({"w": torch.zeros(2)}, tmp_path / "a.pth")
    torch.save({"module.w": torch.ones(2)}, tmp_path / "b.pth")
    report = average([tmp_path / "a.pth", tmp_path / "b.pth"], tmp_path / "out.pth", unwrap=True)
    assert torch.load(tmp_path / "out.pth", weights_only=True)["w"].tolist() == [0.5, 0.5]
    assert not report.output.notes


def test_values_that_differ_are_the_first_ones_and_told(tmp_path: Path) -> None:
    """Plain values are not averaged; those that are equal are not told."""
    paths = files(tmp_path, *({"model": {"a.w": torch.ones(1)}, "kept": 1, "config": {"epoch": epoch}} for epoch in (1, 7)))
    report = average(paths, tmp_path / "out.pth")
    assert load(tmp_path / "out.pth")["config"] == {"epoch": 1}
    notes = {note.code: note.text for note in report.output.notes}
    assert notes == {"values-from-first": f"Values that differ are those of {paths[0]}: config.epoch."}


@pytest.mark.parametrize("weights", [[1e308, 1e308], [float("inf"), float("-inf")], [float("nan"), 1.0]])
def test_weights_without_a_finite_sum_are_refused(tmp_path: Path, weights: list[float]) -> None:
    """Before anything is written."""
    with pytest.raises(UsageError, match="finite numbers"):
        average(files(tmp_path, *[{"a.w": torch.ones(1)}] * 2), tmp_path / "out.pth", weights=weights)
