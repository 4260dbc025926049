"""`show`: the values of one tensor, exactly, by reading only what is needed; what inspect tells of shared bytes."""

import json
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import save_file

import ckpt_tools
from tests.support.samples import FIXTURES
from tests.support.servers import Server
from tests.support.terminal import run

ROWS = torch.arange(24.0).reshape(4, 6)
FLOATS = [torch.float64, torch.float32, torch.float16, torch.bfloat16, torch.float8_e4m3fn, torch.float8_e5m2,
          torch.float8_e4m3fnuz, torch.float8_e5m2fnuz, torch.float8_e8m0fnu]  # fmt: skip


def saved(path: Path, **tensors: torch.Tensor) -> Path:
    torch.save(tensors, path)
    return path


@pytest.mark.parametrize("dtype", FLOATS)
def test_floats_are_exact(tmp_path: Path, dtype: torch.dtype) -> None:
    """Every value is the tensor's own, and its text is read back as the same number of the dtype."""
    tensor = torch.tensor([0.1, -2.0, 1 / 3, 0.0, 448.0]).to(dtype)
    report = ckpt_tools.show(saved(tmp_path / "x.pth", w=tensor), "w")
    assert report.values == pytest.approx(tensor.to(torch.float64).tolist(), abs=0, nan_ok=True)
    again = torch.tensor([float(text) for text in report.texts], dtype=torch.float64).to(dtype)
    assert torch.equal(again.view(torch.uint8), tensor.view(torch.uint8))


INDEXES = ["0", "-1", "1:3", "::2", "1:3, 2", "..., -1", ":, :5", "1, ...", "3:1", "-2:, 1::3", "0, 5", "...", " 0 : 2 , 1 "]


@pytest.mark.parametrize("index", INDEXES)
@pytest.mark.parametrize("name", ["x.pth", "x.safetensors", "x.npy"])
def test_an_index_is_pythons(tmp_path: Path, index: str, name: str) -> None:
    """What an index names is what it names in NumPy; an array that is written has the same."""
    if name == "x.npy":
        np.save(tmp_path / name, ROWS.numpy())
    else:
        (torch.save if name == "x.pth" else save_file)({"w": ROWS}, tmp_path / name)
    tensor, wanted = "" if name == "x.npy" else "w", eval(f"array[{index}]", {"array": ROWS.numpy()})
    assert ckpt_tools.show(tmp_path / name, f"{tensor}[{index}]").values == wanted.tolist()
    ckpt_tools.show(tmp_path / name, tensor, index=index, output=tmp_path / "out.npy")
    made = np.load(tmp_path / "out.npy")
    assert (made.dtype, made.shape, made.tolist()) == (wanted.dtype, wanted.shape, wanted.tolist())


def test_only_what_is_needed_is_read(tmp_path: Path, server: Server) -> None:
    """Three rows of five of a large tensor cost a few bytes; a column of many rows as well."""
    big = torch.arange(1 << 20, dtype=torch.float32).reshape(8, -1)
    save_file({"w": big}, tmp_path / "x.safetensors")
    assert ckpt_tools.show(server.url("x.safetensors"), "w[0:3, :5]").values == big[:3, :5].tolist()
    assert ckpt_tools.show(server.url("x.safetensors"), "w[:, 7]").values == big[:, 7].tolist()
    assert server.sent < 1_500_000


@pytest.mark.parametrize("kind", ["dcp", "fsdp-tp", "tp", "fsdp2", "consolidated"])
def test_parts_of_many_ranks(kind: str) -> None:
    """A box of a tensor whose parts are cut by rows or columns is what it is in the whole."""
    folder = FIXTURES / "parts" / kind
    whole = torch.load(folder / "reference.pth")
    for name, tensor in [pair for pair in whole.items() if pair[1].ndim == 2]:
        assert ckpt_tools.show(folder, f"{name}[1:4, -3:]").values == tensor[1:4, -3:].tolist()


HELD = {torch.bfloat16: "float32", torch.float8_e5m2: "float32", torch.complex32: "complex64", torch.float16: "float16",
        torch.bool: "bool", torch.uint64: "uint64"}  # fmt: skip


@pytest.mark.filterwarnings("ignore:ComplexHalf")
@pytest.mark.parametrize(("dtype", "held"), HELD.items())
def test_arrays(tmp_path: Path, dtype: torch.dtype, held: str) -> None:
    """What NumPy has no type for is written in a wider one, exactly, and the page says so."""
    tensor = torch.tensor([[0.0, 1.0], [1.5, 3.0]]).to(dtype)
    path = saved(tmp_path / "x.pth", w=tensor)
    page = run("show", path, "w", "-o", tmp_path / "out.npy").stdout
    made = np.load(tmp_path / "out.npy")
    assert (str(made.dtype), made.shape) == (held, (2, 2))
    wide = tensor.to(torch.complex128 if dtype.is_complex else torch.float64).numpy()
    assert np.array_equal(made.astype(wide.dtype), wide)
    assert ("exactly: NumPy has no" in page) == (held != str(dtype).removeprefix("torch."))


def test_an_array_of_a_view_streams(tmp_path: Path) -> None:
    """A box of many rows is written in blocks; a transposed one in order too."""
    big = torch.arange(4000.0).reshape(40, 100)
    path = saved(tmp_path / "x.pth", w=big, t=big.t())
    for name, index, wanted in (("w", ":, ::7", big[:, ::7]), ("t", "3:, 1:", big.t()[3:, 1:]), ("w", "1:3", big[1:3])):
        ckpt_tools.show(path, name, index=index, output=tmp_path / "out.npy", overwrite=True)
        assert np.array_equal(np.load(tmp_path / "out.npy"), wanted.numpy())
        assert ckpt_tools.show(path, name, index=index, whole=True).values == wanted.tolist()


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
    torch.save(tensors, folder / "in.pth")
    return ckpt_tools.inspect(folder / "in.pth")


def elements(tensor: torch.Tensor) -> set[int]:
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
