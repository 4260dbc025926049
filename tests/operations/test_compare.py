"""`ckpt diff` and `ckpt stats`, against torch's own numbers."""

from __future__ import annotations

import math
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import save_file
from torch import nn

from ckpt_tools import convert, diff, stats
from ckpt_tools.errors import LimitError, NothingMatchedError
from tests.support.commands import ckpt
from tests.support.samples import FIXTURES, PTH, SAFETENSORS
from tests.support.terminal import run


def save(path: Path, **tensors: torch.Tensor) -> Path:
    """A state dict in a file, by the extension."""
    if path.suffix == ".safetensors":
        save_file(tensors, path)
    else:
        torch.save(tensors, path)
    return path


# --- diff


def test_a_file_is_the_same_as_itself() -> None:
    """Every fixture, whatever it holds, compares equal with itself."""
    for path in (*PTH, *SAFETENSORS):
        report = diff(path, path, values=True)
        assert report.same, report.summary
        assert report.tensors["equal"] == report.tensors["compared"] > 0


def test_every_kind_of_difference(tmp_path: Path) -> None:
    """Added, removed, renamed, shape, dtype, value and numbers, each in its place."""
    ones = torch.ones(2, 3)
    left = {"module.a.w": ones, "module.b.w": ones, "module.c.w": ones, "module.gone.w": torch.ones(7), "module.d.w": ones}
    right = {"a.w": ones, "b.w": torch.ones(3, 2), "c.w": ones.double(), "fresh.w": torch.ones(9), "d.w": ones * 2}
    torch.save({"model": left, "epoch": 1, "lr": 0.1}, tmp_path / "a.pth")
    torch.save({"model": right, "epoch": 2, "seed": 7}, tmp_path / "b.pth")
    report = diff(tmp_path / "a.pth", tmp_path / "b.pth", values=True)
    assert not report.same
    assert [row.where for row in report.removed] == ["model.module.gone.w"]
    assert [row.where for row in report.added] == ["model.fresh.w"]
    assert len(report.renamed) == 4
    assert [(row.left, row.right) for row in report.shapes] == [([2, 3], [3, 2])]
    assert [(row.left, row.right) for row in report.dtypes] == [("float32", "float64")]
    assert {(row.where, row.kind) for row in report.values} == {("epoch", "changed"), ("lr", "removed"), ("seed", "added")}
    gaps = {row.where: row.gap for row in report.changed}
    assert gaps["model.module.c.w"] is not None  # another dtype, the same numbers
    assert gaps["model.module.c.w"]["changed"] == 0
    assert gaps["model.module.d.w"] is not None
    assert gaps["model.module.d.w"]["max_abs"] == 1.0
    assert gaps["model.module.d.w"]["max_rel"] == 0.5


def test_values_and_metadata_agree(tmp_path: Path) -> None:
    """Text in a safetensors header equals the plain value that convert made it from; another text does not."""
    torch.save({"model": {"a.w": torch.ones(2)}, "epoch": 3, "cfg": {"lr": 0.1, "name": "x"}}, tmp_path / "a.pth")
    convert(tmp_path / "a.pth", tmp_path / "a.safetensors")
    report = diff(tmp_path / "a.pth", tmp_path / "a.safetensors")
    assert not report.values
    assert report.summary == "The only difference is the path of the state dict: model -> (root)."
    save_file({"a.w": torch.ones(2)}, tmp_path / "b.safetensors", metadata={"epoch": "4"})
    report = diff(tmp_path / "a.safetensors", tmp_path / "b.safetensors")
    assert {(row.where, row.kind) for row in report.values} == {("epoch", "changed"), ("cfg", "removed")}


def test_names_that_structure_pairs(tmp_path: Path) -> None:
    """A model whose author renamed its modules is compared tensor by tensor."""
    shapes = [(4, 3), (5, 4), (6, 5)]
    for name, part in (("a.pth", "conv"), ("b.pth", "layer")):
        torch.save({f"{part}{i}.weight": torch.ones(shape) for i, shape in enumerate(shapes)}, tmp_path / name)
    report = diff(tmp_path / "a.pth", tmp_path / "b.pth")
    assert [row.reason for row in report.renamed] == ["structure"] * 3
    assert report.summary == "They differ: 3 names changed."


def test_pickled_models(tmp_path: Path) -> None:
    """Wrappers, classes and settings of whole models are seen; what every module has by itself is none of it."""
    for name, model in (("a", nn.Linear(2, 2)), ("b", nn.Linear(2, 2, bias=False).eval()), ("c", nn.Bilinear(2, 2, 2))):
        model.weight.data.fill_(1)
        torch.save({"net": nn.Sequential(model), "lr": 1}, tmp_path / f"{name}.pth")
    report = diff(tmp_path / "a.pth", tmp_path / "b.pth")
    assert [row.where for row in report.removed] == ["net.0.bias"]
    assert not report.values
    assert not report.objects
    report = diff(tmp_path / "a.pth", tmp_path / "c.pth")
    assert {(row.where, row.kind) for row in report.values} == {
        ("net.0.in_features", "removed"), ("net.0.in1_features", "added"), ("net.0.in2_features", "added"),
    }  # fmt: skip
    (changed,) = report.objects
    assert (changed.where, changed.kind, changed.left, changed.right) == (
        "net.0", "changed", "torch.nn.modules.linear.Linear", "torch.nn.modules.linear.Bilinear",
    )  # fmt: skip
    torch.save({"net": nn.DataParallel(nn.Sequential(nn.Linear(2, 2))).state_dict(), "lr": 1}, tmp_path / "d.pth")
    report = diff(tmp_path / "a.pth", tmp_path / "d.pth")
    assert [row.reason for row in report.renamed] == ["wrapper"] * 2
    assert [(row.where, row.kind, row.left) for row in report.objects] == [
        ("net", "removed", "torch.nn.modules.container.Sequential")
    ]


def test_pickled_arrays(tmp_path: Path) -> None:
    """A NumPy array among the values is one value: its dtype, shape and bytes."""
    for name, array in (("a", [1.0, 2.0]), ("b", [1.0, 3.0]), ("c", [[1.0, 2.0]])):
        torch.save({"a.w": torch.ones(1), "mean": np.array(array)}, tmp_path / f"{name}.pth")
    assert diff(tmp_path / "a.pth", tmp_path / "a.pth").same
    for other in ("b", "c"):
        report = diff(tmp_path / "a.pth", tmp_path / f"{other}.pth")
        assert [row.where for row in report.values] == ["mean"]
    assert report.summary == "The only difference is mean: array 2 float64 -> array 1x2 float64."


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


def test_nan_and_infinity(tmp_path: Path) -> None:
    """NaN against NaN is equal; NaN against a number is a change that no difference measures; -0.0 differs in bits only."""
    nan, inf = math.nan, math.inf
    a = save(tmp_path / "a.pth", **{"x.w": torch.tensor([nan, nan, inf, 1.0, 0.0]), "z.w": torch.tensor([0.0])})
    b = save(tmp_path / "b.pth", **{"x.w": torch.tensor([nan, 2.0, -inf, 1.5, 0.0]), "z.w": torch.tensor([-0.0])})
    gaps = [row.gap or {} for row in diff(a, b, values=True).changed]
    assert [(gap["changed"], gap["nonfinite"], gap["max_abs"]) for gap in gaps] == [(3, 2, 0.5), (0, 0, 0.0)]


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


@pytest.mark.parametrize(
    ("sort", "order"),
    [
        ("file", "abc"), ("name", "abc"), ("size", "bca"), ("max-abs", "cba"), ("l2", "acb"), ("cosine", "abc"),
        ("changed", "cab"),
    ],
)  # fmt: skip
def test_diff_sorted(tmp_path: Path, sort: str, order: str) -> None:
    """What is furthest apart comes first; where that is not known last."""
    left = {"a.w": torch.tensor([1.0, 1.0]), "b.w": torch.full((5,), 100.0), "c.w": torch.tensor([100.0, 100.0, 100.0])}
    right = {"a.w": torch.tensor([1.0, 0.0]), "b.w": torch.full((5,), 100.0), "c.w": torch.tensor([103.0, 102.0, 102.0])}
    right["b.w"][0] = 102.0
    save(tmp_path / "a.pth", **left)
    save(tmp_path / "b.pth", **right)
    output = ckpt("diff", "--values", "--sort", sort, tmp_path / "a.pth", tmp_path / "b.pth", code=1).output
    assert "".join(re.findall(r"^([abc])\.w ", output, re.MULTILINE)) == order
    without = run("diff", "--sort", sort, tmp_path / "a.pth", tmp_path / "b.pth")
    assert (without.exit_code, "needs --values" in without.output) == (
        (1, False) if sort in ("file", "name", "size") else (2, True)
    )


def test_diff_filtered(tmp_path: Path) -> None:
    """Only tensors that match on either side are compared; values are not; the sentence says so; a glob in vain is an error."""
    torch.save({"model": {"module.a.w": torch.ones(2), "module.b.w": torch.ones(3)}, "epoch": 1}, tmp_path / "a.pth")
    torch.save({"model": {"a.w": torch.ones(2), "b.w": torch.zeros(3), "c.w": torch.ones(1)}, "epoch": 2}, tmp_path / "b.pth")
    report = diff(tmp_path / "a.pth", tmp_path / "b.pth", filter="a.*")
    assert [(row.left, row.right) for row in report.renamed] == [("model.module.a.w", "model.a.w")]
    assert (report.changed, report.added, report.values) == ([], [], [])
    assert report.summary == "Of the tensors that match 'a.*': the only difference is the prefix `module.`."
    assert "Values and objects were not compared." in report.notes
    assert [row.where for row in diff(tmp_path / "a.pth", tmp_path / "b.pth", filter="*c.w").added] == ["model.c.w"]
    same = diff(tmp_path / "a.pth", tmp_path / "a.pth", filter="module.b.*")
    assert same.summary.endswith("they are the same: names, shapes, dtypes, and every byte of the tensors.")
    with pytest.raises(NothingMatchedError, match="matches no tensor of either"):
        diff(tmp_path / "a.pth", tmp_path / "b.pth", filter="module.a")


def test_stats_sorted_by_what_is_not_finite(tmp_path: Path) -> None:
    """`--sort nan` shows the worst first, NaN and infinities together; `--sort min` the largest magnitude."""
    nan, inf = float("nan"), float("inf")
    odd, worse = torch.tensor([1.0, 2.0, nan]), torch.tensor([nan, inf, -5.0])
    save(tmp_path / "a.pth", **{"a.w": odd, "b.w": torch.ones(3), "c.w": worse})
    for sort, order in (("nan", "cab"), ("min", "cab"), ("file", "abc")):
        output = ckpt("stats", "--sort", sort, tmp_path / "a.pth").output
        assert "".join(re.findall(r"^([abc])\.w ", output, re.MULTILINE)) == order


def test_equal_files_need_no_torch() -> None:
    """Bytes are compared without importing torch, with --values too as long as they are equal."""
    code = "import sys; from ckpt_tools import diff; assert diff(*sys.argv[1:], values=True).renamed; "
    files = [str(FIXTURES / name) for name in ("ddp.pth", "single.pth")]
    done = subprocess.run(
        [sys.executable, "-c", code + "print('torch' in sys.modules)", *files], capture_output=True, text=True
    )
    assert done.stdout == "False\n", done.stderr


def test_one_number_that_claims_to_be_many(tmp_path: Path) -> None:
    """A stride of 0 makes a tensor of any size out of nothing: refused, not read for hours."""
    base = torch.zeros(1)
    torch.save({"a.w": base.expand(1 << 40)}, tmp_path / "a.pth")
    with pytest.raises(LimitError, match="far more bytes"):
        diff(tmp_path / "a.pth", tmp_path / "a.pth")
    with pytest.raises(LimitError, match="far more bytes"):
        stats(tmp_path / "a.pth")


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


def test_float4(tmp_path: Path) -> None:
    """float4 is two numbers in a byte, the low half first."""
    pairs = torch.tensor([0x20, 0xF1], dtype=torch.uint8).view(torch.float4_e2m1fn_x2)
    save_file({"a.w": pairs}, tmp_path / "a.safetensors")
    (row,) = stats(tmp_path / "a.safetensors").tensors
    assert (row.numbers or {})["max"] == 1.0
    assert (row.numbers or {})["min"] == -6.0
    assert (row.numbers or {})["elements"] == 4


def test_unusual_tensors(tmp_path: Path) -> None:
    """A sparse tensor has no numbers here, is equal to itself, and differs from another."""
    one, other = (
        torch.sparse_coo_tensor(torch.tensor([[0, 2]]), torch.tensor([1.0, value]), (4,), check_invariants=True)
        for value in (2.0, 3.0)
    )
    for name, tensor in (("a.pth", one), ("b.pth", other)):
        torch.save({"s.w": tensor, "d.w": torch.ones(2)}, tmp_path / name)
    report: Any = stats(tmp_path / "a.pth")
    assert [row.reason for row in report.tensors] == ["sparse", ""]
    assert report.total["unmeasured"] == 1
    assert diff(tmp_path / "a.pth", tmp_path / "a.pth").same
    (change,) = diff(tmp_path / "a.pth", tmp_path / "b.pth", values=True).changed
    assert change.reason == "sparse: bytes compared only"


def test_conjugate_views_are_their_numbers(tmp_path: Path) -> None:
    """A tensor that torch conjugates on reading equals one whose numbers are conjugated already."""
    tensor = torch.randn(3, 4, dtype=torch.complex64)
    torch.save({"a.w": tensor.conj()}, tmp_path / "lazy.pth")
    torch.save({"a.w": tensor.conj().resolve_conj()}, tmp_path / "done.pth")
    assert diff(tmp_path / "lazy.pth", tmp_path / "done.pth").same
    torch.save({"a.w": tensor}, tmp_path / "other.pth")
    assert not diff(tmp_path / "lazy.pth", tmp_path / "other.pth").same
