"""`ckpt diff` and `ckpt stats`, against torch's own numbers."""

import math
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import save_file

from ckpt_tools import diff, stats
from tests.support.commands import ckpt
from tests.support.samples import FIXTURES, PTH, SAFETENSORS


def save(path: Path, **tensors: torch.Tensor) -> Path:
    if path.suffix == ".safetensors":
        save_file(tensors, path)
    else:
        torch.save(tensors, path)
    return path


# --- diff


def test_a_file_is_the_same_as_itself() -> None:
    for path in (*PTH, *SAFETENSORS):
        report = diff(path, path, values=True)
        assert report.same, report.summary
        assert report.tensors["equal"] == report.tensors["compared"] > 0


@pytest.mark.parametrize(
    "dtype", [torch.float64, torch.bfloat16, torch.float8_e4m3fn, torch.complex64, torch.int16, torch.bool]
)
def test_strided_against_contiguous(tmp_path: Path, dtype: torch.dtype) -> None:
    """A transposed view and its contiguous copy are the same numbers, in whatever dtype; one changed number is found."""
    base = torch.arange(12).reshape(3, 4).to(torch.float32).to(dtype)
    torch.save({"a.w": base.t()}, tmp_path / "a.pth")
    torch.save({"a.w": base.t().contiguous()}, tmp_path / "b.pth")
    assert diff(tmp_path / "a.pth", tmp_path / "b.pth").same
    other = base.t().clone(memory_format=torch.contiguous_format)
    other[1, 1] = other[0, 0]
    torch.save({"a.w": other}, tmp_path / "c.pth")
    report = diff(tmp_path / "a.pth", tmp_path / "c.pth", values=True)
    assert (report.changed[0].gap or {}).get("changed") == 1


def test_what_lies_between_strided_elements_does_not_count(tmp_path: Path) -> None:
    """Views of one layout are the same although the bytes that they skip differ."""
    one, other = torch.zeros(4, 4), torch.zeros(4, 4)
    other[:, 2:] = 5
    torch.save({"a.w": one[:, :2]}, tmp_path / "a.pth")
    torch.save({"a.w": other[:, :2]}, tmp_path / "b.pth")
    assert diff(tmp_path / "a.pth", tmp_path / "b.pth").same


def test_gap_is_torchs(tmp_path: Path) -> None:
    """The largest differences and the cosine are what torch gives for the whole tensors, over many blocks."""
    torch.manual_seed(0)
    one, other = torch.randn(3, 100_001), torch.randn(3, 100_001)
    other[0] = one[0]
    gap = diff(save(tmp_path / "a.pth", **{"a.w": one}), save(tmp_path / "b.safetensors", **{"a.w": other}), values=True)
    found = gap.changed[0].gap or {}
    wide, wide_other = one.double().flatten(), other.double().flatten()
    assert found["max_abs"] == float((wide - wide_other).abs().max())
    assert found["cosine"] == pytest.approx(float(torch.cosine_similarity(wide, wide_other, dim=0)))
    assert found["changed_fraction"] == pytest.approx(2 / 3)


def test_the_same_numbers_in_another_dtype_are_no_different_numbers(tmp_path: Path) -> None:
    """A cast that loses nothing is told as a dtype; integers that became floats are told in full."""
    tensors = {"w": torch.randn(4, 4).bfloat16(), "count": torch.arange(3)}
    torch.save(tensors, tmp_path / "old.pth")
    torch.save({name: tensor.float() for name, tensor in tensors.items()}, tmp_path / "new.pth")
    report = diff(tmp_path / "old.pth", tmp_path / "new.pth", values=True)
    assert ([row.where for row in report.dtypes], [row.where for row in report.changed]) == (["w", "count"], ["count"])
    assert not report.same


def test_one_distance_of_all(tmp_path: Path) -> None:
    """Relative L2 and cosine of all tensors as one vector: equal ones count, tied ones once, NaN is left out and told."""
    torch.manual_seed(0)
    same, one = torch.randn(50), torch.randn(70_000)
    other = one + 0.1 * torch.randn(70_000)
    left = {"a.same": same, "b.w": one, "c.tied": one, "d.odd": torch.tensor([1.0, float("nan")]), "e.same": same.clone()}
    right = {"a.same": same, "b.w": other, "c.tied": other, "d.odd": torch.tensor([1.0, 2.0]), "e.same": same.clone()}
    for state in (left, right):
        state["c.tied"] = state["b.w"]
    report = diff(save(tmp_path / "a.pth", **left), save(tmp_path / "b.pth", **right), values=True)
    whole, whole_other = (torch.cat([same, same, values, torch.ones(1)]).double() for values in (one, other))
    assert report.distance == {
        "tensors": 4, "elements": 70_102, "nonfinite": 1,
        "relative_l2": pytest.approx(float((whole - whole_other).norm() / whole.norm())),
        "cosine": pytest.approx(float(torch.cosine_similarity(whole, whole_other, dim=0))),
    }  # fmt: skip
    output = ckpt("diff", "--values", tmp_path / "a.pth", tmp_path / "b.pth", code=1).output
    assert re.search(r"distance +relative L2 0\.\d+, cosine 0\.995\d+, over 4 tensors, 70,102 values, 1 place with", output)
    assert diff(tmp_path / "a.pth", tmp_path / "b.pth").distance is None


def test_equal_files_need_no_torch() -> None:
    """Bytes are compared without importing torch, with --values too as long as they are equal."""
    code = "import sys; from ckpt_tools import diff; assert diff(*sys.argv[1:], values=True).renamed; "
    files = [str(FIXTURES / name) for name in ("ddp.pth", "single.pth")]
    done = subprocess.run(
        [sys.executable, "-c", code + "print('torch' in sys.modules)", *files], capture_output=True, text=True
    )
    assert done.stdout == "False\n", done.stderr


# --- stats


def test_numbers_are_torchs(tmp_path: Path) -> None:
    """Whatever the values are, the moments are those of torch, NaN and infinities left out and counted."""
    values = st.lists(st.floats(width=32) | st.sampled_from([0.0, -0.0, 1e30, math.nan, math.inf]), max_size=40)

    @settings(max_examples=50)
    @given(values)
    def check(given: list[float]) -> None:
        torch.save({"w": torch.tensor(given, dtype=torch.float64)}, tmp_path / "in.pth")
        found: Any = stats(tmp_path / "in.pth").tensors[0].numbers
        finite = torch.tensor([value for value in given if math.isfinite(value)], dtype=torch.float64)
        counts = (sum(map(math.isnan, given)), sum(map(math.isinf, given)), int((finite == 0).sum()))
        assert (found["nan"], found["inf"], found["zeros"]) == counts
        if len(finite):
            scale = 1e-12 * float(finite.abs().max())
            assert found["mean"] == pytest.approx(float(finite.mean()), rel=1e-9, abs=scale)
            assert (found["min"], found["max"]) == (float(finite.min()), float(finite.max()))
        if len(finite) > 1:
            assert found["std"] == pytest.approx(float(finite.std()), rel=1e-9, abs=scale)

    check()


def test_stats_of_many_blocks(tmp_path: Path) -> None:
    """A tensor of several blocks, strided, gives torch's mean, std and histogram."""
    torch.manual_seed(1)
    whole = torch.randn(3, 300_000) + 1e4  # far from zero: naive sums of squares would lose the spread
    torch.save({"a.w": whole.t()}, tmp_path / "a.pth")
    (row,) = stats(tmp_path / "a.pth").tensors
    wide = whole.double()
    assert row.numbers is not None
    assert row.numbers["std"] == pytest.approx(float(wide.std()), rel=1e-9)
    assert row.histogram == wide.flatten().histc(16, float(wide.min()), float(wide.max())).int().tolist()


def test_conjugate_views_are_their_numbers(tmp_path: Path) -> None:
    """A tensor that torch conjugates on reading equals one whose numbers are conjugated already."""
    tensor = torch.randn(3, 4, dtype=torch.complex64)
    torch.save({"a.w": tensor.conj()}, tmp_path / "lazy.pth")
    torch.save({"a.w": tensor.conj().resolve_conj()}, tmp_path / "done.pth")
    assert diff(tmp_path / "lazy.pth", tmp_path / "done.pth").same
    torch.save({"a.w": tensor}, tmp_path / "other.pth")
    assert not diff(tmp_path / "lazy.pth", tmp_path / "other.pth").same
