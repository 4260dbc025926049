"""What is read, copied and written many at a time is what each by itself gives: torch's own reading is the measure."""

from __future__ import annotations

import collections
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

import ckpt_tools
import ckpt_tools.torch
from tests.support import classes
from tests.support.graphs import assert_same

DTYPES = (torch.float32, torch.bfloat16, torch.int64, torch.bool, torch.float8_e5m2)


def many_tensors(count: int) -> dict[str, object]:
    """More objects than 256, shapes of 0 to 6 dimensions, views, ties and Parameters."""
    base = torch.arange(720.0)
    shapes = [(), (3,), (300, 2), (2, 3, 4), (70000, 1), (1, 2, 3, 4), (1, 2, 1, 2, 1), (1, 2, 1, 2, 1, 2), (0, 3)]
    tensors: dict[str, object] = {}
    for index in range(count):
        tensor = torch.zeros(shapes[index % len(shapes)], dtype=DTYPES[index % len(DTYPES)])
        tensors[f"layer.{index}.weight"] = nn.Parameter(tensor, requires_grad=False) if index % 7 == 0 else tensor
        tensors[f"layer.{index}.view"] = base[index : index + 20 : 2].view(2, 5).t()
        tensors[f"layer.{index}.grad"] = torch.ones(index % 5 + 1, requires_grad=True)
    return tensors


def test_many_tensors_of_every_kind(tmp_path: Path) -> None:
    """Loaded, and converted and loaded by torch, they are what torch loads from the original."""
    torch.save(many_tensors(120), tmp_path / "in.pth")
    expected = torch.load(tmp_path / "in.pth")
    assert_same(expected, ckpt_tools.torch.load(tmp_path / "in.pth"))
    ckpt_tools.convert(tmp_path / "in.pth", tmp_path / "out.pth")
    assert_same(expected, torch.load(tmp_path / "out.pth"))


SHARED = "x" * 65
BUILDERS: list[Any] = [
    lambda: 1, lambda: 1.5, lambda: 2**600, lambda: "text", lambda: SHARED, lambda: b"bytes", list, dict, tuple,
    lambda: (1, None, True), lambda: (1.5, -1, 300, 2**40), lambda: ("text", SHARED), lambda: (b"bytes",), lambda: [1, 2, "a"],
    lambda: [(), [{}]], lambda: (((((((1,),),),),),),), lambda: tuple(range(300)), lambda: [(index,) for index in range(20)],
    lambda: [*range(20), torch.ones(1)], lambda: {index: index for index in range(20)}, lambda: {(1, 2): 1},
    lambda: {"a": (1, 2)}, lambda: collections.OrderedDict(a=1), lambda: torch.ones(1), lambda: ([{"w": torch.ones(1)}],),
    classes.Plain, lambda: [classes.Label("a")],
]  # fmt: skip
ROWS: dict[str, Any] = {"list": list, "tuple": tuple, "dict": lambda items: dict(enumerate(items)), "deque": collections.deque}


def test_rows_of_small_values(tmp_path: Path) -> None:
    """A row of the same few values again and again, with others here and there, and some of them twice."""
    numbers = st.integers(0, len(BUILDERS) - 1)

    @settings(max_examples=60)
    @given(
        st.lists(numbers, min_size=1, max_size=3), st.sampled_from([3, 20, 255, 256, 257, 600]),
        st.dictionaries(st.integers(0, 599), numbers, max_size=3), st.sampled_from(sorted(ROWS)),
    )  # fmt: skip
    def check(again: list[int], length: int, odd: dict[int, int], kind: str) -> None:
        items = [BUILDERS[odd.get(index, again[index % len(again)])]() for index in range(length)]
        torch.save({"row": ROWS[kind]([*items, items[0], items[-1]])}, tmp_path / "in.pth")
        ckpt_tools.convert(tmp_path / "in.pth", tmp_path / "out.pth", objects="keep", overwrite=True)
        before, after = (torch.load(tmp_path / name, weights_only=False) for name in ("in.pth", "out.pth"))
        assert_same(before, after)
        assert ckpt_tools.check(tmp_path / "out.pth").verdict in ("healthy", "findings")

    check()


@pytest.mark.parametrize(
    "options", [{"strip_module": True}, {"add_prefix": "a.long.prefix." * 9}, {"map_location": "cuda:1"}, {"drop": "*.3.*"}, {}]
)
def test_a_file_of_forty_megabytes(options: dict[str, Any], tmp_path: Path) -> None:
    """Large enough that a copy of the file runs ahead: whatever changes around the tensors, their numbers are the file's."""
    model = {f"module.layer.{index}.weight": torch.full((1250, 1000), float(index)) for index in range(8)}
    torch.save({"model": model, "epoch": 1}, tmp_path / "in.pth")
    ckpt_tools.convert(tmp_path / "in.pth", tmp_path / "out.pth", **options)
    loaded = torch.load(tmp_path / "out.pth", map_location="cpu")["model"]
    kept = [index for index in range(8) if "drop" not in options or index != 3]
    assert [int(tensor[-1, -1]) for tensor in loaded.values()] == kept
    assert all(bool((tensor == tensor[0, 0]).all()) for tensor in loaded.values())
    assert not [row for row in ckpt_tools.check(tmp_path / "out.pth").findings if row.severity == "problem"]
