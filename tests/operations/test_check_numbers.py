"""`ckpt check --digest`, `--against` and `--values`: what the numbers of a checkpoint are, and what they say."""

from pathlib import Path

import pytest
import torch
from torch import nn

from ckpt_tools import check
from ckpt_tools.errors import DigestError, OutputExistsError
from tests.operations.test_check import codes, saved
from tests.support.commands import ckpt
from tests.support.terminal import run


def test_digests_are_what_the_documentation_says(tmp_path: Path) -> None:
    """The digest of a known tensor, computed by hand from the documented recipe."""
    import hashlib

    path = tmp_path / "model.pth"
    values = torch.arange(6.0).reshape(2, 3)
    torch.save({"w.weight": values.T.contiguous().T}, path)  # strided in the file, row-major in the digest
    (digest,) = check(path, digest=True).digests
    assert digest.sha256 == hashlib.sha256(b"float32 [2,3]\n" + values.numpy().tobytes()).hexdigest()


def test_a_digest_file_goes_round(tmp_path: Path) -> None:
    """Digests written to a file verify the checkpoint later, and show a change, a loss and an addition."""
    path, digests = tmp_path / "model.pth", tmp_path / "model.digest"
    tensors = {"a.weight": torch.randn(3), "b.weight": torch.randn(3), "na\tme\n\u202e": torch.ones(1)}
    torch.save(tensors, path)
    ckpt("check", path, "--digest", "-o", digests)
    ckpt("check", path, "--against", digests)
    torch.save({"a.weight": tensors["a.weight"] + 1, "na\tme\n\u202e": torch.ones(1), "c.weight": torch.ones(1)}, path)
    report = check(path, against=digests)
    assert report.against is not None
    assert [finding.code for finding in report.findings] == ["different", "missing", "unexpected"]
    assert report.against.different == [(("a.weight",), "other bytes")]
    assert report.against.missing == [("b.weight",)]
    assert report.against.unexpected == [("c.weight",)]
    ckpt("check", path, "--against", digests, code=1)


def test_digest_files_are_not_overwritten(tmp_path: Path) -> None:
    """Like every output: --overwrite is needed."""
    path, digests = saved(tmp_path / "model.pth"), tmp_path / "digests"
    digests.write_text("precious")
    assert run("check", path, "--digest", "-o", digests).exit_code == OutputExistsError.exit_code
    assert digests.read_text() == "precious"
    ckpt("check", path, "--digest", "-o", digests, "--overwrite")
    ckpt("check", path, "-o", digests, code=2)
    ckpt("check", path, path, "--digest", "-o", digests, code=2)


@pytest.mark.parametrize(
    "line", ["x", "0\tfloat32\t[1]\t[]", *(f"{'0' * 64}\tfloat32\t{rest}" for rest in ("[-1]\t[]", "[1]\t{}", "1\t[]"))]
)
def test_damaged_digest_files(tmp_path: Path, line: str) -> None:
    """A line that is none is refused with its number; another version, and a file of bytes, too."""
    path, model = tmp_path / "digests", saved(tmp_path / "model.pth")
    for text, said in ((f"1: x\n{line}\n", "line 2"), ("2: x\n", "another version"), ("1: \xff", "digests")):
        path.write_bytes(b"# ckpt digest " + text.encode("latin-1"))
        with pytest.raises(DigestError, match=said):
            check(model, against=path)


def test_equal_matrices_are_told(tmp_path: Path) -> None:
    """A tied head that was saved twice; one that is tied still is nothing to tell."""
    path, table = tmp_path / "model.pth", torch.randn(30, 20)
    torch.save(
        {"embed.weight": table, "head.weight": table.clone(), "a.bias": torch.ones(500), "b.bias": torch.ones(500)}, path
    )
    assert codes(path, digest=True) == ["equal-tensors"]
    torch.save({"embed.weight": table, "head.weight": table}, path)
    assert codes(path, digest=True) == []


def test_overlapping_tensors_cannot_take_for_ever(tmp_path: Path) -> None:
    """Ten thousand different views of 100 MB on one number would be a terabyte of hashing: they are said to be skipped."""
    path = tmp_path / "views.pth"
    one = torch.ones(1)
    torch.save({f"v{i}.weight": one.expand(25_000_000 + i) for i in range(100)}, path)
    report = check(path, digest=True)
    assert len(report.skipped) + len(report.digests) == 100
    assert len(report.digests) < 5
    assert "skipped" in [finding.code for finding in report.findings]


@pytest.mark.parametrize("dtype", ["float64", "float32", "float16", "bfloat16", "float8_e5m2", "complex64"])
def test_values_are_counted(tmp_path: Path, dtype: str) -> None:
    """NaN and infinite values per tensor, as torch counts them."""
    values = torch.tensor([1.0, float("nan"), float("inf"), -float("inf"), 0.0, -0.0, 2.0]).to(getattr(torch, dtype))
    torch.save({"a.weight": values, "b.weight": torch.ones(3)}, tmp_path / "model.pth")
    (row,) = check(tmp_path / "model.pth", values=True).values
    assert (row["nan"], row["inf"], row["where"]) == (1, 2, ["a.weight"])


def test_float8_without_infinity(tmp_path: Path) -> None:
    """float8_e4m3fn has NaN (two bit patterns) and no infinity."""
    raw = torch.tensor([0x7F, 0xFF, 0x7E, 0x00], dtype=torch.uint8).view(torch.float8_e4m3fn)
    torch.save({"a.weight": raw}, tmp_path / "model.pth")
    (row,) = check(tmp_path / "model.pth", values=True).values
    assert (row["nan"], row["inf"]) == (2, 0)


def test_values_across_blocks(tmp_path: Path) -> None:
    """Elements that a block border cuts in two are counted once: a safetensors file may begin at any byte."""
    path, count = tmp_path / "model.safetensors", 1_100_000
    values = torch.zeros(count)
    values[::997] = float("nan")
    header = f'{{"a":{{"dtype":"F32","shape":[{count}],"data_offsets":[0,{4 * count}]}}}}'.encode()
    header += b" " * ((1 - len(header)) % 4)  # the bytes begin at an odd offset
    path.write_bytes(len(header).to_bytes(8, "little") + header + values.numpy().tobytes())
    (row,) = check(path, values=True).values
    assert row["nan"] == int(values.isnan().sum())


def test_what_values_say(tmp_path: Path) -> None:
    """Zeros, garbage and a fresh head are named; a trained head, zero biases and tiny moments are not."""
    torch.manual_seed(0)
    body, head = nn.Linear(64, 64), nn.Linear(64, 10)
    with torch.no_grad():
        body.weight.mul_(1.5)
    garbage = torch.randint(-(2**31), 2**31 - 1, (40, 40), dtype=torch.int32).view(torch.float32).nan_to_num(1.0, 1.0, 1.0)
    state = {
        "body.weight": body.weight, "body.bias": torch.zeros(64), "gone.weight": torch.zeros(8, 8), "lost.weight": garbage,
        "fc.weight": head.weight, "fc.bias": head.bias,
    }  # fmt: skip
    torch.save({name: tensor.detach().clone() for name, tensor in state.items()}, tmp_path / "model.pth")
    found = {
        (finding.code, finding.where[-1]) for finding in check(tmp_path / "model.pth", values=True).findings if finding.where
    }
    assert found == {("all-zero", "gone.weight"), ("uninitialised", "lost.weight"), ("fresh-head", "fc.weight")}
    with torch.no_grad():
        head.weight.add_(torch.randn_like(head.weight) * 0.02)
    torch.save({"fc.weight": head.weight.detach(), "fc.bias": head.bias.detach()}, tmp_path / "trained.pth")
    assert codes(tmp_path / "trained.pth", values=True) == []


def test_one_large_weight_is_no_fresh_head(tmp_path: Path) -> None:
    """Ten thousand normal numbers and one that no initialiser gives: the spread hardly tells, the largest does."""
    torch.manual_seed(0)
    state = {"classifier.weight": torch.randn(100, 100) * 0.02, "classifier.bias": torch.zeros(100)}
    torch.save(state, tmp_path / "fresh.pth")
    assert codes(tmp_path / "fresh.pth", values=True) == ["fresh-head"]
    state["classifier.weight"][3, 4] = 0.3
    torch.save(state, tmp_path / "trained.pth")
    assert codes(tmp_path / "trained.pth", values=True) == []
