"""`ckpt check --digest`, `--against` and `--values`: what the numbers of a checkpoint are, and what they say."""

from pathlib import Path

import torch
from torch import nn

from ckpt_tools import check
from tests.operations.test_check import codes


def test_digests_are_what_the_documentation_says(tmp_path: Path) -> None:
    """The digest of a known tensor, computed by hand from the documented recipe."""
    import hashlib

    path = tmp_path / "model.pth"
    values = torch.arange(6.0).reshape(2, 3)
    torch.save({"w.weight": values.T.contiguous().T}, path)  # strided in the file, row-major in the digest
    (digest,) = check(path, digest=True).digests
    assert digest.sha256 == hashlib.sha256(b"float32 [2,3]\n" + values.numpy().tobytes()).hexdigest()


def test_overlapping_tensors_cannot_take_for_ever(tmp_path: Path) -> None:
    """Ten thousand different views of 100 MB on one number would be a terabyte of hashing: they are said to be skipped."""
    path = tmp_path / "views.pth"
    one = torch.ones(1)
    torch.save({f"v{i}.weight": one.expand(25_000_000 + i) for i in range(100)}, path)
    report = check(path, digest=True)
    assert len(report.skipped) + len(report.digests) == 100
    assert len(report.digests) < 10
    assert "skipped" in [finding.code for finding in report.findings]


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
