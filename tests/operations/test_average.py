"""`ckpt average`, against means that torch works out."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

import ckpt_tools.torch
from ckpt_tools import average
from ckpt_tools.errors import ConvertError
from tests.support.terminal import run


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


def test_buffers(tmp_path: Path) -> None:
    """Equal integers and bools stay, num_batches_tracked becomes the largest, others that differ need a word."""
    first = {"bn.num_batches_tracked": torch.tensor(7), "ids.w": torch.arange(3), "mask.w": torch.tensor([True, False])}
    other = {"bn.num_batches_tracked": torch.tensor(2**60 + 1), "ids.w": torch.arange(3), "mask.w": torch.tensor([True, False])}
    paths = files(tmp_path, first, other)
    report = average(paths, tmp_path / "out.pth")
    assert (report.largest, report.kept, report.averaged) == (["bn.num_batches_tracked"], 2, 0)
    assert load(tmp_path / "out.pth")["bn.num_batches_tracked"] == 2**60 + 1
    paths = files(tmp_path, first, other | {"ids.w": torch.tensor([5, 0, 2]), "mask.w": torch.tensor([False, True])})
    with pytest.raises(ConvertError, match="ids"):
        average(paths, tmp_path / "no.pth")
    assert not (tmp_path / "no.pth").exists()
    average(paths, tmp_path / "max.pth", integers="max")
    assert load(tmp_path / "max.pth")["ids.w"].tolist() == [5, 1, 2]
    assert load(tmp_path / "max.pth")["mask.w"].tolist() == [True, True]
    average(paths, tmp_path / "first.pth", integers="first")
    assert load(tmp_path / "first.pth")["ids.w"].tolist() == [0, 1, 2]


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


def test_everything_else_comes_from_the_first(tmp_path: Path) -> None:
    """Epoch and optimizer are the first file's, which the report says; --select takes the weights alone."""
    optimizer = {"state": {0: {"m": torch.ones(2)}}, "param_groups": []}
    states = [{"model": {"a.w": torch.full((2,), float(i))}, "optimizer": optimizer, "epoch": i} for i in range(2)]
    paths = files(tmp_path, *states)
    report = average(paths, tmp_path / "out.pth")
    found = load(tmp_path / "out.pth")
    assert (found["epoch"], found["model"]["a.w"].tolist()) == (0, [0.5, 0.5])
    assert [note.code for note in report.output.notes] == ["rest-from-first"]
    average(paths, tmp_path / "weights.pth", select="model")
    assert list(load(tmp_path / "weights.pth")) == ["a.w"]


@pytest.mark.parametrize(
    ("other", "words"),
    [
        ({"b.w": torch.ones(2)}, "different names"),
        ({"a.w": torch.ones(3)}, "two shapes"),
        ({"a.w": torch.arange(2)}, "kind of number"),
    ],
)
def test_what_has_no_mean_is_refused(tmp_path: Path, other: Any, words: str) -> None:
    """Names, shapes and kinds of numbers must agree; nothing is written otherwise."""
    paths = files(tmp_path, {"a.w": torch.ones(2)}, other)
    with pytest.raises(ConvertError, match=words):
        average(paths, tmp_path / "out.pth")
    assert not (tmp_path / "out.pth").exists()


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


def test_the_mean_as_a_distributed_checkpoint(tmp_path: Path) -> None:
    """format="dcp" writes a folder that holds the mean; a dry run writes none."""
    paths = files(tmp_path, {"a.w": torch.tensor([1.0, 2.0]), "n": 1}, {"a.w": torch.tensor([3.0, 6.0]), "n": 2})
    assert average(paths, tmp_path / "out", format="dcp", dry_run=True).averaged == 1
    assert not (tmp_path / "out").exists()
    report = average(paths, tmp_path / "out", format="dcp")
    assert (report.output.container, report.output.files) == ("dcp", 1)
    assert ckpt_tools.torch.load_state_dict(tmp_path / "out")["a.w"].tolist() == [2.0, 4.0]


def test_where_the_largest_spread_is(tmp_path: Path) -> None:
    """The tensor in which the files are furthest from their mean, by its length, over several blocks; none for equal files."""
    torch.manual_seed(0)
    base = torch.randn(100_001)
    states = [{"a.w": base + 0.01 * number, "b.w": base * (1 + 0.1 * number), "n.n": torch.tensor(3)} for number in range(3)]
    paths = files(tmp_path, *states)
    for name in ("out.pth", "out.safetensors"):
        report = average(paths, tmp_path / name)
        stack = torch.stack([state["b.w"].double() for state in states])
        mean = stack.mean(0)
        expected = float((stack - mean).square().sum(1).mean().sqrt() / mean.norm())
        assert report.spread == {"name": "b.w", "relative": pytest.approx(expected)}
    shown = run("average", *map(str, paths), tmp_path / "shown.pth").stdout
    assert "spread     largest in b.w: 7.42% of the mean's length" in shown
    assert average(paths, tmp_path / "none.pth", dry_run=True).spread is None
    same = run("average", paths[0], paths[0], tmp_path / "same.pth").stdout
    assert "\nspread" not in same
    odd = files(tmp_path, {"a.w": torch.zeros(2)}, {"a.w": torch.tensor([float("nan"), 1.0])})
    assert average(odd, tmp_path / "odd.pth").spread is None
