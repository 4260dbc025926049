"""Folders of torch.distributed.checkpoint: read without executing them, written so that jobs of any size load them."""

import json
import pickle
import pickletools
import shutil
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import save_file
from torch.distributed.checkpoint.filesystem import SerializationFormat, _StorageInfo
from torch.distributed.checkpoint.format_utils import dcp_to_torch_save
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorProperties,
    TensorStorageMetadata,
)

from ckpt_tools import CkptError, check, convert, inspect, scan
from ckpt_tools.errors import ConvertError, DamagedFileError, LimitError, OutputError

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled")


def saved(folder: Path, state: dict[str, Any], **options: Any) -> Path:
    """A folder that torch's own writer made, in one process."""
    dcp.save(state, storage_writer=dcp.FileSystemWriter(folder, **options), no_dist=True)
    return folder


@pytest.fixture(scope="module")
def written(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Tensors of several kinds in nested dicts and lists, and values."""
    state = {
        "model": {"a.w": torch.arange(6.0).view(2, 3), "b": torch.ones(3, dtype=torch.bfloat16), "t": torch.ones(4, 2).t(),
                  "e": torch.empty(0, 3), "s": torch.tensor(5)},
        "epoch": 3, "list": [torch.ones(2), {"q": torch.zeros(1)}], "row": [1, 2], "where": None,
    }  # fmt: skip
    return saved(tmp_path_factory.mktemp("dcp") / "theirs", state)


@pytest.fixture
def folder(written: Path, tmp_path: Path) -> Path:
    """A copy, to be changed."""
    return Path(shutil.copytree(written, tmp_path / "theirs"))


def test_what_torch_saved_is_listed_and_converted(folder: Path, tmp_path: Path) -> None:
    """Names, nesting, values and bits are those that torch's own conversion gives."""
    found = inspect(folder)
    assert (found.container, found.values["epoch"], found.values["row"]) == ("dcp", 3, [1, 2])
    assert not found.objects
    assert not found.weights_only["loads"]  # torch.load takes no folder
    convert(folder, tmp_path / "ours.pth")
    ours = torch.load(tmp_path / "ours.pth", weights_only=True)
    dcp_to_torch_save(folder, tmp_path / "torch.pth")
    torchs = torch.load(tmp_path / "torch.pth", weights_only=True)
    assert ours.keys() == torchs.keys()
    assert ours["list"][1]["q"].shape == (1,)
    assert (ours["epoch"], ours["row"], ours["where"]) == (3, [1, 2], None)
    for name, tensor in torchs["model"].items():
        assert ours["model"][name].dtype == tensor.dtype
        assert torch.equal(ours["model"][name], tensor)


def test_safetensors_variants(tmp_path: Path) -> None:
    """HuggingFaceStorageWriter, distributed or not, and FileSystemWriter with safetensors inside."""
    state = {"a.w": torch.arange(6.0).view(2, 3), "b": torch.ones(3, dtype=torch.int16)}
    for name, writer in {
        "plain": dcp.HuggingFaceStorageWriter(str(tmp_path / "plain")),
        "distributed": dcp.HuggingFaceStorageWriter(str(tmp_path / "distributed"), save_distributed=True),
        "inside": dcp.FileSystemWriter(tmp_path / "inside", serialization_format=SerializationFormat.SAFETENSORS),
    }.items():
        dcp.save(dict(state), storage_writer=writer, no_dist=True)
        convert(tmp_path / name, tmp_path / f"{name}.pth")
        back = torch.load(tmp_path / f"{name}.pth", weights_only=True)
        assert {key: tensor.tolist() for key, tensor in back.items()} == {key: tensor.tolist() for key, tensor in state.items()}


@st.composite
def tilings(draw: st.DrawFn) -> tuple[tuple[int, ...], list[tuple[tuple[int, ...], tuple[int, ...]]]]:
    """A shape and a grid of boxes that covers it."""
    shape = tuple(draw(st.lists(st.integers(1, 6), min_size=1, max_size=3)))
    boxes: list[tuple[tuple[int, ...], tuple[int, ...]]] = [((), ())]
    for size in shape:
        cuts = sorted({0, size, *draw(st.lists(st.integers(0, size), max_size=2))})
        spans = [(at, end - at) for at, end in pairwise(cuts)]
        boxes = [((*at, start), (*sizes, length)) for at, sizes in boxes for start, length in spans]
    return shape, draw(st.permutations(boxes))


@settings(max_examples=25, deadline=None)
@given(tiling=tilings(), data=st.data())
def test_any_grid_of_parts_in_safetensors(tiling: Any, data: st.DataObject, tmp_path_factory: pytest.TempPathFactory) -> None:
    """Files of several ranks that say where their parts lie: whatever the grid, the tensor comes out; not with a part twice."""
    shape, boxes = tiling
    whole = torch.arange(torch.Size(shape).numel(), dtype=torch.int16).view(shape)
    folder = tmp_path_factory.mktemp("grid")
    for rank, (at, sizes) in enumerate(boxes, 1):
        part = whole[tuple(slice(a, a + b) for a, b in zip(at, sizes, strict=True))].contiguous()
        info = {"DCP_SHARDING_INFO": json.dumps({"w": {"saved_offsets": at}}), "DCP_VERSION": "1.0"}
        save_file({"w": part}, folder / f"shard-{rank:05}-model-00001-of-00001.safetensors", info)
    convert(folder, folder / "one.pth")
    assert torch.equal(torch.load(folder / "one.pth", weights_only=True)["w"], whole)
    if part.numel():
        name = f"shard-{data.draw(st.integers(1, len(boxes))):05}-model-00001-of-00001.safetensors"
        shutil.copy(folder / name, folder / f"shard-{len(boxes) + 1:05}-model-00001-of-00001.safetensors")
        with pytest.raises(CkptError):
            convert(folder, folder / "two.pth")


# --- writing


def test_ties_numbers_as_keys_and_loops(tmp_path: Path) -> None:
    """A tie is stored once and comes back; keys that are not text become text, with a note; what cannot be said is refused."""
    weight = torch.randn(100)
    optimizer = {"state": {0: {"exp": torch.ones(1)}}, "param_groups": [{"lr": 0.1, "params": [0]}]}
    torch.save({"m": {"a": weight, "b": weight}, "opt": optimizer, "empty": {}}, tmp_path / "in.pth")
    report = convert(tmp_path / "in.pth", tmp_path / "out", format="dcp")
    assert [note.code for note in report.notes] == ["optimizer-keys"]
    assert (tmp_path / "out" / "__0_0.distcp").stat().st_size < 6 * 1024
    assert inspect(tmp_path / "out").tied == [["a", "b"]]
    back = tmp_path / "back.pth"
    convert(tmp_path / "out", back)
    loaded = torch.load(back, weights_only=True)
    assert (loaded["empty"], loaded["opt"]["param_groups"]) == ({}, optimizer["param_groups"])
    for bad, error in (
        ({"a": {"b": weight}, "a.b": weight}, ConvertError),
        ([weight], ConvertError),
        ({"a": weight, "s": torch.eye(2).to_sparse()}, ConvertError),
    ):
        torch.save(bad, tmp_path / "bad.pth")
        with pytest.raises(error):
            convert(tmp_path / "bad.pth", tmp_path / "no", format="dcp")
    loop: dict[str, Any] = {"w.w": weight, "inner": {}}
    loop["inner"]["again"] = loop["inner"]
    torch.save(loop, tmp_path / "loop.pth")
    with pytest.raises(ConvertError, match="contains itself"):
        convert(tmp_path / "loop.pth", tmp_path / "no", format="dcp")
    assert not (tmp_path / "no").exists()


# --- chunks


def test_tied_names_have_their_own_gradients(tmp_path: Path) -> None:
    """Two names on one place, of which one requires a gradient: both are what they were, and tied."""
    weight = torch.ones(3).requires_grad_()
    torch.save({"a.w": weight, "b.w": weight.detach()}, tmp_path / "in.pth")
    convert(tmp_path / "in.pth", tmp_path / "out", format="dcp")
    found = inspect(tmp_path / "out")
    assert {row["name"]: row["requires_grad"] for row in found.tensors} == {"a.w": True, "b.w": False}
    assert found.tied == [["a.w", "b.w"]]


def test_an_impossible_folder_is_an_error_of_ours(tmp_path: Path) -> None:
    """A name that no system takes is refused as for a file."""
    torch.save({"a.w": torch.ones(3)}, tmp_path / "in.pth")
    for options in ({"format": "dcp"}, {"shard_size": "1MB"}):
        with pytest.raises(OutputError, match="cannot be written"):
            convert(tmp_path / "in.pth", f"{tmp_path}/a\0b", **options)  # type: ignore[arg-type]


def test_keys_of_every_kind_become_text(tmp_path: Path) -> None:
    """As torch's own writer names them; a number that no text should spell out is described."""
    one = torch.ones(1)
    torch.save({"a.w": one, (1, "b"): one + 1, 1 << 20_000: one + 2, 2.5: one + 3, None: one + 4}, tmp_path / "in.pth")
    convert(tmp_path / "in.pth", tmp_path / "out", format="dcp")
    names = ["a.w", "(1, 'b')", "<int of 20001 bits>", "2.5", "None"]
    assert sorted(row["name"] for row in inspect(tmp_path / "out").tensors) == sorted(names)


def test_dicts_that_are_shared_again_and_again(tmp_path: Path) -> None:
    """What a distributed checkpoint would hold 2**30 times is refused; two names for one state dict are not."""
    state_dict = {f"{index}.w": torch.ones(1) for index in range(30)}
    torch.save({"model": state_dict, "best": state_dict}, tmp_path / "in.pth")
    assert convert(tmp_path / "in.pth", tmp_path / "out", format="dcp").tensors == 60
    laughs: dict[str, Any] = {"w": torch.ones(1)}
    for _ in range(30):
        laughs = {"a": laughs, "b": laughs}
    torch.save(laughs, tmp_path / "laughs.pth")
    with pytest.raises(LimitError, match="refers to its dicts too often"):
        convert(tmp_path / "laughs.pth", tmp_path / "no", format="dcp")
    assert not (tmp_path / "no").exists()


# --- damaged and hostile


def rewrite(folder: Path, change: Any) -> Path:
    """The folder with its metadata changed."""
    path = folder / ".metadata"
    metadata: Metadata = pickle.loads(path.read_bytes())
    path.write_bytes(pickle.dumps(change(metadata) or metadata))
    return folder


def _place(metadata: Metadata, **fields: Any) -> None:
    info = next(info for index, info in metadata.storage_data.items() if index.fqn == "model.a.w")
    for name, value in fields.items():
        setattr(info, name, value)


def _tensor_of(metadata: Metadata, name: str) -> TensorStorageMetadata:
    found = metadata.state_dict_metadata[name]
    assert isinstance(found, TensorStorageMetadata)
    return found


def _rename(metadata: Metadata, name: str, *path: str | int) -> None:
    """A value under another path, and under the name that torch makes of it."""
    new = ".".join(map(str, path))
    metadata.state_dict_metadata[new] = metadata.state_dict_metadata.pop(name)
    metadata.storage_data[MetadataIndex(new)] = metadata.storage_data.pop(MetadataIndex(name))
    metadata.planner_data[new] = path


def _swap(metadata: Metadata, one: str, other: str) -> None:
    paths = metadata.planner_data
    paths[one], paths[other] = paths[other], paths[one]


CHANGES: dict[str, tuple[Any, str]] = {
    "outside": (lambda m: _place(m, relative_path="../secret"), "not a name inside its folder"),
    "no file": (lambda m: _place(m, relative_path="__9_0.distcp"), "__9_0.distcp"),
    "past the end": (lambda m: _place(m, offset=10**9), "are referred to|archive|belongs"),
    "compressed": (lambda m: _place(m, transform_descriptors=["zstd"]), "transformed"),
    "no place": (lambda m: m.storage_data.pop(MetadataIndex("model.a.w", [0, 0])) and None, "does not say where the chunk"),
    "no value": (lambda m: m.storage_data.pop(MetadataIndex("epoch")) and None, "does not say where the value"),
    "hole": (lambda m: setattr(_tensor_of(m, "model.a.w"), "size", torch.Size([3, 3])), "hold 6 elements"),
    "negative": (lambda m: setattr(_tensor_of(m, "model.a.w"), "size", (2, -3)), "impossible size"),
    "huge": (lambda m: setattr(_tensor_of(m, "model.a.w"), "size", (2**40, 2**40)), "impossible size"),
    "other dtype": (
        lambda m: setattr(_tensor_of(m, "model.a.w").properties, "dtype", torch.int32),
        r"not what \.metadata says",
    ),
    "outside box": (
        lambda m: _tensor_of(m, "model.a.w").chunks.append(ChunkStorageMetadata(torch.Size([0, 0]), torch.Size([9, 9]))),
        r"not what \.metadata says",
    ),
    "two things": (lambda m: _rename(m, "epoch", "model"), "puts two things"),
    "swapped": (lambda m: _swap(m, "model.b", "model.a.w"), "under the path of another name"),
    "another path": (lambda m: m.planner_data.update({"epoch": ("where",)}), "under the path of another name"),
    "long list": (lambda m: m.planner_data.update({"epoch": ("x", 10**12)}), "path that cannot be read"),
    "no paths": (lambda m: m.planner_data.update({"epoch": 3}), "path that cannot be read"),
    "not metadata": (lambda m: {"a": 1}, "a Metadata is expected"),
    "list": (lambda m: [m], "a Metadata is expected"),
    "sparse": (lambda m: setattr(_tensor_of(m, "model.a.w").properties, "layout", torch.sparse_coo), "a sparse tensor"),
    "no storage": (lambda m: setattr(m, "storage_data", None), "no storage_data"),
}  # fmt: skip


@pytest.mark.parametrize("name", CHANGES)
def test_metadata_that_lies(folder: Path, tmp_path: Path, name: str) -> None:
    """Places outside the folder or the file, holes, other dtypes, impossible sizes: each its own sentence."""
    change, message = CHANGES[name]
    rewrite(folder, change)
    with pytest.raises(CkptError, match=message):
        convert(folder, tmp_path / "out.pth")
    assert not (tmp_path / "out.pth").exists()
    assert check(folder).verdict != "healthy"


def test_metadata_that_is_set_twice(folder: Path) -> None:
    """Python keeps of the first state what the second does not name: here the paths, without which all names are flat."""
    path = folder / ".metadata"
    data = pickletools.optimize(pickle.dumps(pickle.loads(path.read_bytes()), 2))
    metadata = pickle.loads(data)
    second = pickle.dumps({"state_dict_metadata": metadata.state_dict_metadata, "storage_data": metadata.storage_data}, 2)
    path.write_bytes(data[:-1] + second[2:-1] + b"b.")
    assert pickle.loads(path.read_bytes()).planner_data
    with pytest.raises(DamagedFileError, match="a Metadata that is given attributes more than once"):
        inspect(folder)


def test_what_metadata_calls_is_listed_and_never_called(folder: Path) -> None:
    """A global that torch's metadata does not have is shown, as in any pickle."""

    class Evil:
        def __reduce__(self) -> Any:
            return print, ("called",)

    rewrite(folder, lambda metadata: setattr(metadata, "storage_meta", Evil()))
    found = inspect(folder)
    assert "builtins.print" in found.globals
    assert not found.weights_only["loads"]


def test_many_gaps_in_a_list_are_refused(folder: Path) -> None:
    """Lists of a million holes cost memory for nothing."""

    def change(metadata: Metadata) -> None:
        for name in ("epoch", "row", "where"):
            _rename(metadata, name, f"{name}s", 999_999)

    rewrite(folder, change)
    with pytest.raises(LimitError):
        inspect(folder)


def test_a_cut_metadata(folder: Path) -> None:
    """Cut anywhere, .metadata is refused as the damaged pickle that it is."""
    whole = (folder / ".metadata").read_bytes()
    for end in range(0, len(whole), 97):
        (folder / ".metadata").write_bytes(whole[:end])
        with pytest.raises((DamagedFileError, CkptError)):
            inspect(folder)


def test_values_with_tensors_inside(tmp_path: Path) -> None:
    """A tuple of tensors is a value to torch: an archive with storages of its own, whose keys do not clash."""
    saved(tmp_path / "in", {"pair": (torch.ones(2), torch.zeros(3)), "other": (torch.full((2,), 5.0),), "w.w": torch.ones(1)})
    convert(tmp_path / "in", tmp_path / "out.pth")
    back = torch.load(tmp_path / "out.pth", weights_only=True)
    assert [part.tolist() for part in (*back["pair"], *back["other"])] == [[1, 1], [0, 0, 0], [5, 5]]


@pytest.mark.parametrize("stop", [KeyboardInterrupt, SystemExit])
def test_ctrl_c_while_torch_writes(stop: type[BaseException], tmp_path: Path) -> None:
    """torch's writer takes it for a failure of the writing; it comes out as what it was, and nothing is left."""
    torch.save({"a.w": torch.ones(1000)}, tmp_path / "in.pth")

    def progress(done: int, total: int) -> None:
        raise stop

    with pytest.raises(stop):
        convert(tmp_path / "in.pth", tmp_path / "out", format="dcp", progress=progress)
    assert [path.name for path in tmp_path.iterdir()] == ["in.pth"]


def test_as_many_chunks_as_many_ranks_make(tmp_path: Path) -> None:
    """What a chunk takes of torch's `.metadata` is paid for by its bytes, for all who read it."""
    world, metadata = 64, Metadata({}, storage_data={})
    for name in (f"layers.{index}.weight" for index in range(20)):
        places = [torch.Size([rank * 2, 0]) for rank in range(world)]
        chunks = [ChunkStorageMetadata(place, torch.Size([2, 8])) for place in places]
        properties = TensorProperties(dtype=torch.bfloat16)
        metadata.state_dict_metadata[name] = TensorStorageMetadata(properties, torch.Size([2 * world, 8]), chunks)
        for rank, place in enumerate(places):
            metadata.storage_data[MetadataIndex(name, place)] = _StorageInfo(f"__{rank}_0.distcp", 0, 1000)
    (tmp_path / ".metadata").write_bytes(pickle.dumps(metadata))
    for rank in range(world):
        (tmp_path / f"__{rank}_0.distcp").write_bytes(bytes(2000))
    report = inspect(tmp_path)
    assert (report.totals["tensors"], report.safety.verdict) == (20, "needs-code")
    assert {found.verdict for found in scan(tmp_path) if found.path.endswith(".metadata")} == {"needs-code"}
