"""torch and safetensors are the oracles: what they load from a file, we list; what we write from it, they load."""

import json
import pickle
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open

import ckpt_tools
from tests.support.graphs import assert_same, element_bytes, live_tensors, load_with_tags
from tests.support.samples import PTH, SAFETENSORS, by_name, corpus

pth_fixtures = pytest.mark.parametrize("path", PTH, ids=by_name)
safetensors_fixtures = pytest.mark.parametrize("path", SAFETENSORS, ids=by_name)
zip_corpus = pytest.mark.parametrize("row", corpus("torch-zip"))
safetensors_corpus = pytest.mark.parametrize("row", corpus("safetensors"))
# torch says what it does not know about pickles of another protocol than its own.
pytestmark = pytest.mark.filterwarnings("ignore:Detected pickle protocol:UserWarning")


def described(path: Path) -> dict[str, Any]:
    """The JSON of inspect, through text and back."""
    result: dict[str, Any] = json.loads(json.dumps(ckpt_tools.inspect(path).to_json()))
    return result


def row_of(where: tuple[str | int, ...], tensor: torch.Tensor, tag: str) -> dict[str, Any]:
    """What inspect should say about a live tensor."""
    return {
        "where": list(where), "dtype": str(tensor.dtype).removeprefix("torch."), "shape": list(tensor.shape),
        "stride": list(tensor.stride()), "offset": tensor.storage_offset(), "device": tag,
        "bytes": tensor.numel() * tensor.element_size(), "requires_grad": tensor.requires_grad,
        "kind": "parameter" if isinstance(tensor, torch.nn.Parameter) else "tensor",
    }  # fmt: skip


def assert_lists(path: Path, loaded: Any, tags: dict[int, str]) -> None:
    """inspect lists exactly the tensors that torch loaded, in order, tied where they are tied."""
    # what a module hides from its state dict is listed by its path
    found = [row for row in described(path)["tensors"] if "_buffers" not in row["where"]]
    live = list(live_tensors(loaded))
    expected = [row_of(where, tensor, tag_of(tensor, tags)) for where, tensor in live]
    assert [{key: row[key] for key in expected[0]} for row in found] == expected if expected else found == []
    # torch gives every empty tensor a storage of its own
    pairs = {
        (tensor.untyped_storage()._cdata, row["storage"])
        for (_, tensor), row in zip(live, found, strict=True)
        if tensor.untyped_storage().nbytes()
    }
    assert len({cdata for cdata, _ in pairs}) == len({key for _, key in pairs}) == len(pairs)


def tag_of(tensor: torch.Tensor, tags: dict[int, str]) -> str:
    """The device tag of a tensor's storage; torch makes an empty one anew, without a tag, where torch-legacy names it again."""
    storage = tensor.untyped_storage()
    return tags[storage._cdata] if storage.nbytes() else tags.get(storage._cdata, "cpu")


def loads_weights_only(path: Path) -> bool:
    """Whether torch.load(weights_only=True) takes it, really tried."""
    try:
        torch.load(path, map_location="cpu", weights_only=True)
    except pickle.UnpicklingError:
        return False
    return True


# --- inspect


@pth_fixtures
def test_inspect_lists_what_torch_loads(path: Path) -> None:
    """Paths, dtypes, shapes, strides, offsets, device tags, requires_grad, kinds and ties are torch's."""
    loaded, tags = load_with_tags(path)
    assert_lists(path, loaded, tags)


@pytest.mark.parametrize("path", SAFETENSORS, ids=by_name)
def test_inspect_lists_what_safetensors_opens(path: Path) -> None:
    """Names, shapes, dtypes and metadata are those of safe_open."""
    assert_lists_safetensors(path)


@safetensors_corpus
def test_inspect_lists_what_safetensors_opens_in_real_files(row: dict[str, Any]) -> None:
    """Real safetensors files are listed as safe_open lists them."""
    assert_lists_safetensors(row["path"])


def assert_lists_safetensors(path: Path) -> None:
    """inspect agrees with safe_open."""
    found = described(path)
    with safe_open(path, "pt") as file:
        assert {row["where"][0] for row in found["tensors"]} == set(file.keys())
        assert found["metadata"] == (file.metadata() or {})
        for row in found["tensors"]:
            tensor = file.get_tensor(row["where"][0])
            assert {key: row[key] for key in ("shape", "dtype")} == {
                "shape": list(tensor.shape), "dtype": str(tensor.dtype).removeprefix("torch."),
            }  # fmt: skip
            assert row["device"] is None


@pth_fixtures
def test_weights_only_verdict(path: Path) -> None:
    """`weights_only.loads` is what torch.load(weights_only=True) does."""
    assert described(path)["weights_only"]["loads"] is loads_weights_only(path)


@zip_corpus
def test_weights_only_verdict_on_real_files(row: dict[str, Any]) -> None:
    """`weights_only.loads` is what torch does with real files."""
    if row["file"].endswith(".distcp"):
        pytest.skip("several zips in one file: not a torch-zip for torch either")
    assert described(row["path"])["weights_only"]["loads"] is loads_weights_only(row["path"])


# --- convert


@pth_fixtures
def test_convert_changes_nothing_unasked(path: Path, tmp_path: Path) -> None:
    """Without options torch loads the same graph: values, views, ties, Parameters, attributes, device tags."""
    target = tmp_path / "out.pth"
    ckpt_tools.convert(path, target, objects="keep")
    (before, tags_before), (after, tags_after) = load_with_tags(path), load_with_tags(target)
    assert_same(before, after)
    tensors = zip(live_tensors(before), live_tensors(after), strict=True)
    for (_, one), (_, two) in tensors:
        assert tags_before[one.untyped_storage()._cdata] == tags_after[two.untyped_storage()._cdata]


def test_a_parameter_on_a_lazy_view(tmp_path: Path) -> None:
    """A Parameter whose data is a conjugate or negative view is one as any other: listed, written back, and as safetensors."""
    wave = torch.complex(torch.arange(3.0), torch.ones(3))
    data = {"p.w": torch.nn.Parameter(wave.conj()), "n.w": torch.nn.Parameter(wave.clone().conj().imag, requires_grad=False)}
    source, target, flattened = tmp_path / "in.pth", tmp_path / "out.pth", tmp_path / "out.safetensors"
    torch.save(data, source)
    assert_lists(source, *load_with_tags(source))
    ckpt_tools.convert(source, target)
    assert_same(torch.load(source), torch.load(target))
    ckpt_tools.convert(source, flattened)
    with safe_open(flattened, "pt") as file:
        assert all(element_bytes(file.get_tensor(name)) == element_bytes(tensor) for name, tensor in data.items())


@zip_corpus
def test_convert_changes_nothing_in_real_files(row: dict[str, Any], tmp_path: Path) -> None:
    """A real torch-zip comes out as torch loads it; files that torch will not load must at least read back the same."""
    if row["file"].endswith(".distcp"):
        pytest.skip("not a torch-zip")
    target = tmp_path / "out.pth"
    ckpt_tools.convert(row["path"], target, objects="keep")
    before, after = described(row["path"]), described(target)
    assert before["tensors"] == after["tensors"]
    assert before["values"] == after["values"]
    assert before["objects"] == after["objects"]
    if row["loads_weights_only"] is True:
        assert_same(*(torch.load(path, map_location="cpu", weights_only=True) for path in (row["path"], target)))


@pth_fixtures
def test_plain_objects_load_with_weights_only(path: Path, tmp_path: Path) -> None:
    """With objects='plain' torch.load(weights_only=True) takes every fixture, and the tensors are the same."""
    target = tmp_path / "out.pth"
    ckpt_tools.convert(path, target, objects="plain")
    after = torch.load(target, map_location="cpu", weights_only=True)
    before = torch.load(path, map_location="cpu", weights_only=False)
    before = before.state_dict() if isinstance(before, torch.nn.Module) else before
    bits = [[element_bytes(tensor) for _, tensor in live_tensors(root)] for root in (before, after)]
    assert bits[0] == bits[1][: len(bits[0])]
    assert described(target)["weights_only"]["loads"] is True


def flat(path: Path) -> bool:
    """Whether a fixture holds one state dict and nothing that safetensors lacks."""
    found = described(path)
    codes = {row["dtype"] for row in found["tensors"]} & {"complex128"}
    whole_module = any(row["where"] == [] for row in found["objects"])
    return [row["where"] for row in found["state_dicts"]] == [[]] and not codes and not whole_module


@pytest.mark.parametrize("path", [path for path in PTH if flat(path)], ids=by_name)
def test_through_safetensors_and_back(path: Path, tmp_path: Path) -> None:
    """pth -> safetensors -> pth keeps names, order, bits, ties and `_metadata`; safetensors itself reads the middle."""
    middle, target = tmp_path / "middle.safetensors", tmp_path / "out.pth"
    ckpt_tools.convert(path, middle)
    ckpt_tools.convert(middle, target)
    before, after = (torch.load(file, map_location="cpu", weights_only=True) for file in (path, target))
    assert list(before) == list(after)
    assert getattr(before, "_metadata", None) == getattr(after, "_metadata", None)
    assert {name: element_bytes(tensor) for name, tensor in before.items()} == {
        name: element_bytes(tensor) for name, tensor in after.items()
    }
    assert [group for group in described(path)["tied"] if not is_views(before, group)] == described(target)["tied"]
    with safe_open(middle, "pt") as file:
        aliases = {name for group in described(target)["tied"] for name in group[1:]}
        assert set(file.keys()) == set(before) - aliases
        for name in file.keys():  # noqa: SIM118  safe_open has no __iter__
            assert element_bytes(file.get_tensor(name)) == element_bytes(before[name])


def is_views(tensors: dict[str, torch.Tensor], names: list[str]) -> bool:
    """Whether names share a storage without being one and the same view."""
    live = [tensors[name] for name in names]
    return len({(one.shape, one.stride(), one.storage_offset(), one.is_conj(), one.is_neg()) for one in live}) > 1


@safetensors_fixtures
def test_safetensors_to_pth(path: Path, tmp_path: Path) -> None:
    """safetensors -> pth holds what safetensors.torch loads."""
    target = tmp_path / "out.pth"
    ckpt_tools.convert(path, target)
    after = torch.load(target, weights_only=True)
    with safe_open(path, "pt") as file:
        for name in file.keys():  # noqa: SIM118
            assert element_bytes(file.get_tensor(name)) == element_bytes(after[name])


@safetensors_corpus
def test_safetensors_of_real_files_to_pth_and_back(row: dict[str, Any], tmp_path: Path) -> None:
    """A real safetensors file keeps its names and bits through a .pth and back, and its metadata by itself."""
    middle, target, copy = tmp_path / "middle.pth", tmp_path / "out.safetensors", tmp_path / "copy.safetensors"
    ckpt_tools.convert(row["path"], middle)
    ckpt_tools.convert(middle, target)
    ckpt_tools.convert(row["path"], copy)
    with safe_open(row["path"], "pt") as before, safe_open(target, "pt") as after:
        assert set(before.keys()) == set(after.keys())
        for name in before.keys():  # noqa: SIM118
            assert element_bytes(before.get_tensor(name)) == element_bytes(after.get_tensor(name))
    assert described(copy)["metadata"].items() >= described(row["path"])["metadata"].items()
