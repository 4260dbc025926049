"""`ckpt average`, against means that torch works out."""

from pathlib import Path
from typing import Any

import pytest
import torch

from ckpt_tools import average
from ckpt_tools.errors import UsageError
from tests.support.files import load, save


def mean(folder: Path, *states: Any, **options: Any) -> tuple[Any, Any]:
    """What torch loads of the mean of these, each in a file of its own; and the report."""
    paths = [save(folder / f"{index}.pth", state) for index, state in enumerate(states)]
    report = average(paths, folder / "out.pth", **options)
    return load(folder / "out.pth"), report


@pytest.mark.parametrize(
    "dtype", [torch.float64, torch.float32, torch.float16, torch.bfloat16, torch.float8_e5m2, torch.complex64]
)
def test_the_mean_is_rounded_once(tmp_path: Path, dtype: torch.dtype) -> None:
    """Every dtype: the float64 mean of the whole tensors, cast to the dtype, over several blocks."""
    torch.manual_seed(0)
    wide = torch.complex128 if dtype.is_complex else torch.float64
    tensors = [torch.randn(3, 100_001, dtype=wide).to(dtype) for _ in range(3)]
    made, report = mean(tmp_path, *({"a.w": tensor} for tensor in tensors), weights=[2, 1, 1])
    assert report.weights == [0.5, 0.25, 0.25]
    expected = tensors[0].to(wide) * 0.5 + tensors[1].to(wide) * 0.25 + tensors[2].to(wide) * 0.25
    assert made["a.w"].dtype == dtype
    assert torch.equal(made["a.w"].to(wide), expected.to(dtype).to(wide))


def test_across_containers_layouts_and_dtypes(tmp_path: Path) -> None:
    """A strided half-precision tensor and a contiguous float32 one in safetensors have a mean, in float32."""
    one, other = torch.arange(6.0).reshape(2, 3), torch.ones(3, 2)
    paths = [save(tmp_path / "a.pth", {"a.w": one.t().half()}), save(tmp_path / "b.safetensors", {"a.w": other})]
    average(paths, tmp_path / "out.safetensors")
    found = load(tmp_path / "out.safetensors")["a.w"]
    assert found.dtype == torch.float32
    assert torch.equal(found, (one.t() + 1) / 2)


@pytest.mark.parametrize("other", [torch.float8_e5m2, torch.float8_e4m3fnuz])
def test_no_type_of_one_byte_holds_two_of_them(tmp_path: Path, other: torch.dtype) -> None:
    """The mean of two kinds of float8 is float16, with the digits of both."""
    value = torch.tensor([1.125, 1.0])
    found = mean(tmp_path, {"a.w": value.to(torch.float8_e4m3fn)}, {"a.w": value.to(other)})[0]["a.w"]
    assert found.dtype == torch.float16
    assert found.tolist() == [(1.125 + float(value.to(other)[0].float())) / 2, 1.0]


def test_what_is_in_no_mean_is_said(tmp_path: Path) -> None:
    """State dicts and tensors that the first input has none of; plain values that differ are the first ones."""
    more = {"model": {"w": torch.ones(1)}, "ema": {"w": torch.ones(1)}, "optimizer": {"m": [torch.ones(1)]}, "epoch": 7}
    made, report = mean(tmp_path, {"model": {"w": torch.zeros(1)}, "epoch": 1, "kept": 1}, more | {"kept": 1})
    assert made == {"model": {"w": torch.tensor([0.5])}, "epoch": 1, "kept": 1}
    assert sorted(note.text for note in report.output.notes) == [
        f"{tmp_path}/1.pth has 2 more tensors, which are in no mean and left out: ema.w, optimizer.m.0.",
        f"Values that differ are those of {tmp_path}/0.pth: epoch.",
    ]


def test_ties_are_kept_where_all_have_them(tmp_path: Path) -> None:
    """Tied everywhere: tied in the mean. Tied in the first only: each name gets its own mean."""
    one, other, third = torch.ones(4), torch.zeros(4), torch.full((4,), 3.0)
    tied, _ = mean(tmp_path, {"a.w": one, "b.w": one}, {"a.w": other, "b.w": other})
    assert tied["a.w"].data_ptr() == tied["b.w"].data_ptr()
    free, _ = mean(tmp_path, {"a.w": one, "b.w": one}, {"a.w": other, "b.w": third}, overwrite=True)
    assert (free["a.w"][0].item(), free["b.w"][0].item()) == (0.5, 2.0)


def test_tied_names_keep_what_they_are(tmp_path: Path) -> None:
    """A Parameter and a plain tensor on the same bytes are averaged once, stay tied, and stay a Parameter and a tensor."""
    weights = [torch.full((2, 3), value) for value in (1.0, 3.0)]
    found, _ = mean(tmp_path, *({"a.w": torch.nn.Parameter(weight), "b.w": weight} for weight in weights))
    assert [(type(tensor), tensor.requires_grad) for tensor in found.values()] == [
        (torch.nn.Parameter, True), (torch.Tensor, False),
    ]  # fmt: skip
    assert found["a.w"].data_ptr() == found["b.w"].data_ptr()
    assert torch.equal(found["b.w"], torch.full((2, 3), 2.0))


def test_conjugate_views_have_a_mean(tmp_path: Path) -> None:
    """The bit that torch applies on reading is worked into the mean, and not applied to it again."""
    one, other = torch.tensor([1 + 2j, 3 - 1j]), torch.tensor([3 + 4j, 1 + 5j])
    made, _ = mean(tmp_path, {"a.w": one.conj()}, {"a.w": other})
    assert made["a.w"].tolist() == ((one.conj() + other) / 2).tolist()


def test_names_of_any_input_are_unwrapped(tmp_path: Path) -> None:
    """The first input has no wrapper, the other has one: nothing is said of the first alone."""
    made, report = mean(tmp_path, {"w": torch.zeros(2)}, {"module.w": torch.ones(2)}, unwrap=True)
    assert made["w"].tolist() == [0.5, 0.5]
    assert not report.output.notes


@pytest.mark.parametrize("weights", [[1e308, 1e308], [float("inf"), float("-inf")], [float("nan"), 1.0]])
def test_weights_without_a_finite_sum_are_refused(tmp_path: Path, weights: list[float]) -> None:
    with pytest.raises(UsageError, match="finite numbers"):
        mean(tmp_path, *[{"a.w": torch.ones(1)}] * 2, weights=weights)
    assert not (tmp_path / "out.pth").exists()
