"""Tied tensors are the same elements; others on one storage only share it."""

import json
from pathlib import Path

import pytest
import torch

import ckpt_tools
from tests.support.terminal import run

BASE = torch.arange(24.0)
MATRIX = BASE.reshape(4, 6)
SAME = {
    "itself": (MATRIX, MATRIX), "transposed": (MATRIX, MATRIX.t()), "flat": (MATRIX, BASE),
    "other shape": (MATRIX, BASE.reshape(2, 12)), "a row": (MATRIX[1], BASE[6:12]), "a column": (MATRIX[:, 2], BASE[2::6]),
    "one element": (BASE[3], BASE[3:4].reshape(1, 1)), "two columns": (MATRIX[:, :2], MATRIX[:, :2].t()),
}  # fmt: skip
OTHER = {
    "halves": (BASE[:12], BASE[12:]), "overlap": (BASE[:12], BASE[6:18]), "a part": (BASE, BASE[:12]),
    "a column and a row": (MATRIX[:, 0], MATRIX[0, :4]), "repeated": (BASE[:1].expand(4), BASE[:4]),
    "steps of one span": (torch.as_strided(BASE, (2, 2), (3, 0)), BASE[:4]),
}  # fmt: skip


def described(folder: Path, tensors: dict[str, torch.Tensor]) -> ckpt_tools.Description:
    """What inspect tells of these."""
    torch.save(tensors, folder / "in.pth")
    return ckpt_tools.inspect(folder / "in.pth")


def elements(tensor: torch.Tensor) -> set[int]:
    """Where each of its elements is in memory."""
    start = tensor.storage_offset() * tensor.element_size()
    steps = [torch.arange(size) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True)]
    places = torch.zeros(())
    for step in steps:
        places = places.unsqueeze(-1) + step
    return {start + int(place) * tensor.element_size() for place in places.flatten()}  # type: ignore[misc]


@pytest.mark.parametrize("name", SAME)
def test_the_same_elements_are_tied(tmp_path: Path, name: str) -> None:
    """Whatever the shape and the order: what is written to one is written to both."""
    first, second = SAME[name]
    assert elements(first) == elements(second)
    found = described(tmp_path, {"a.w": first, "b.w": second})
    assert (found.tied, found.shared) == ([["a.w", "b.w"]], [])


@pytest.mark.parametrize("name", OTHER)
def test_other_elements_share_one_storage(tmp_path: Path, name: str) -> None:
    """Tensors on one storage that are not the same elements are not called tied."""
    first, second = OTHER[name]
    assert elements(first) != elements(second)
    found = described(tmp_path, {"a.w": first, "b.w": second})
    assert (found.tied, found.shared) == ([], [["a.w", "b.w"]])


def test_a_flat_buffer_with_a_tie_in_it(tmp_path: Path) -> None:
    """As ZeRO and FSDP keep parameters: one buffer, of which two names are the same part."""
    tensors = {"embed.weight": MATRIX[:2], "layer.weight": MATRIX[2:], "head.weight": MATRIX[:2], "own.weight": torch.ones(3)}
    found = described(tmp_path, tensors)
    assert found.tied == [["embed.weight", "head.weight"]]
    assert found.shared == [["embed.weight", "layer.weight", "head.weight"]]
    shown = run("inspect", tmp_path / "in.pth").stdout
    assert "tied         embed.weight, head.weight" in shown
    assert "one storage  embed.weight, layer.weight, head.weight" in shown
    found_json = json.loads(run("inspect", "--json", tmp_path / "in.pth").stdout)
    assert found_json["shared"] == found.shared


def test_separate_storages_are_no_group(tmp_path: Path) -> None:
    """Equal values are no tie, and neither are tensors without elements."""
    found = described(tmp_path, {"a.w": torch.ones(3), "b.w": torch.ones(3), "c.w": torch.empty(0), "d.w": torch.empty(0)})
    assert (found.tied, found.shared) == ([], [])
