"""Checkpoints in several files with an index: read as one, written as the ecosystem writes them."""

import json
import os
from collections import OrderedDict
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file

from ckpt_tools import CkptError, convert, inspect, open_checkpoint
from ckpt_tools.errors import (
    ChangedFileError,
    DamagedFileError,
    MissingFileError,
    NotACheckpointError,
    OutputError,
    OutputExistsError,
    UsageError,
)
from tests.support.graphs import element_bytes

Tensors = dict[str, torch.Tensor]


def write_shards(folder: Path, shards: dict[str, Tensors], weight_map: dict[str, str] | None = None, **metadata: Any) -> Path:
    """Shards and an index as Hugging Face's libraries lay them out, written by safetensors and torch."""
    folder.mkdir(exist_ok=True)
    for file, tensors in shards.items():
        if file.endswith(".safetensors"):
            save_file(tensors, folder / file, {"format": "pt"})
        else:
            torch.save(tensors, folder / file)
    found = {name: file for file, tensors in shards.items() for name in tensors}
    index = folder / ("model.safetensors.index.json" if next(iter(shards)).endswith("s") else "pytorch_model.bin.index.json")
    content = {"metadata": {"total_size": 1, **metadata}, "weight_map": found if weight_map is None else weight_map}
    index.write_text(json.dumps(content, indent=2, sort_keys=True))
    return folder


ONE, TWO = "model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors"


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Two safetensors shards."""
    return write_shards(tmp_path / "two", {ONE: {"a.w": torch.ones(4, 3)}, TWO: {"b.w": torch.zeros(2), "b.b": torch.ones(1)}})


def same(path: Path, expected: Tensors) -> Tensors:
    """Load with torch and compare names, order, dtypes, shapes and bits."""
    got: Tensors = torch.load(path, weights_only=True)
    assert list(got) == list(expected)
    for name, tensor in expected.items():
        assert (got[name].dtype, got[name].shape) == (tensor.dtype, tensor.shape)
        assert element_bytes(got[name]) == element_bytes(tensor), name
    return got


# --- reading


def test_checkpoints_beside_the_shards_are_told(folder: Path, tmp_path: Path) -> None:
    """The state of an optimizer beside the shards is not in the output, and a note says so."""
    assert "others-beside" not in [note.code for note in convert(folder, tmp_path / "one.pth").notes]
    torch.save({"state": {}, "param_groups": []}, folder / "optimizer.pt")
    (folder / "config.json").write_text("{}")
    notes = [note.text for note in convert(folder, tmp_path / "two.pth").notes if note.code == "others-beside"]
    assert notes == [f"{folder} also has other checkpoints, which were not converted: optimizer.pt."]


def test_torch_shards_with_checksums(tmp_path: Path) -> None:
    """Shards that torch.save wrote are merged with their views, and a way out knows the records of each file apart."""
    base = torch.arange(6.0)
    shards = {
        "pytorch_model-00001-of-00002.bin": {"b": base, "a": base[2:4]},
        "pytorch_model-00002-of-00002.bin": {"c": base + 1},
    }
    write_shards(tmp_path / "in", shards)
    convert(tmp_path / "in", tmp_path / "out.pth")
    got = same(tmp_path / "out.pth", {"b": base, "a": base[2:4], "c": base + 1})
    assert got["a"].untyped_storage().data_ptr() == got["b"].untyped_storage().data_ptr()
    with open(tmp_path / "in" / "pytorch_model-00002-of-00002.bin", "r+b") as file:
        data = file.read()
        file.seek(data.index((base + 1).numpy().tobytes()))
        file.write(b"\1")
    with pytest.raises(CkptError, match="CRC-32"):
        convert(tmp_path / "in", tmp_path / "other.safetensors")


@pytest.mark.parametrize(
    ("weight_map", "message"),
    [
        ({"a.w": ONE, "b.w": TWO, "b.b": TWO, "c": TWO}, "'c' is in no shard; .*index.json says model-00002"),
        ({"a.w": TWO, "b.w": TWO, "b.b": ONE}, "'a.w' is in model-00001.*index.json says model-00002"),
        ({"a.w": ONE, "b.w": TWO}, "holds 'b.b', which .*index.json does not list"),
        ({"a.w": ONE, "b.w": "../x.safetensors"}, "names the file '../x.safetensors', which is not a name inside"),
        ({"a.w": "/etc/passwd"}, "names the file '/etc/passwd'"), ({"a.w": "C:\\x"}, "which is not a name inside"),
        ({"a.w": "", "b.w": TWO}, "which is not a name inside"), ({"a.w": 3}, "no weight_map of names to files"),
        ({"a.w": "\ud800"}, "surrogates not allowed"),
    ],
)  # fmt: skip
def test_an_index_that_does_not_fit(folder: Path, weight_map: dict[str, str], message: str) -> None:
    """A tensor missing, in the wrong shard or not listed, and names that lead out of the folder, are named errors."""
    index = folder / "model.safetensors.index.json"
    index.write_text(json.dumps({"weight_map": weight_map}))
    with pytest.raises(DamagedFileError, match=message):
        open_checkpoint(folder)


@pytest.mark.parametrize(("text", "message"), [
    ('{"weight_map": {"a": "x", "a": "y"}}', "'a' is there twice"), ('{"weight_map": ', "cannot be read as JSON"),
    ('{"weight_map": {"a": "list.bin"}}', r"list\.bin is not a shard"),
])  # fmt: skip
def test_an_index_that_is_none(folder: Path, text: str, message: str) -> None:
    """JSON that is none, keys twice, a file that is no state dict."""
    torch.save([torch.ones(1)], folder / "list.bin")
    (folder / "model.safetensors.index.json").write_text(text)
    with pytest.raises(DamagedFileError, match=message):
        open_checkpoint(folder / "model.safetensors.index.json")


def test_other_ways_to_be_broken(folder: Path, tmp_path: Path) -> None:
    """A missing shard, a tensor in two, a plain folder, two indexes: each has its sentence."""
    index = folder / "model.safetensors.index.json"
    (folder / "other.safetensors.index.json").write_bytes(index.read_bytes())
    with pytest.raises(NotACheckpointError, match="several checkpoints"):
        open_checkpoint(folder)
    (folder / "other.safetensors.index.json").rename(folder / "tf_model.h5.index.json")  # TensorFlow's, beside torch's
    open_checkpoint(folder).close()
    (folder / ONE).rename(folder / "away")
    with pytest.raises(MissingFileError, match="00001-of-00002") as caught:
        open_checkpoint(folder)
    assert caught.value.why == "There is no such file."
    assert "names it: get the missing file again" in caught.value.fix
    (tmp_path / "empty").mkdir()
    with pytest.raises(NotACheckpointError, match="is a directory, and not a checkpoint"):
        open_checkpoint(tmp_path / "empty")
    shards = {ONE: {"a": torch.ones(1), "c": torch.ones(1)}, TWO: {"a": torch.zeros(1), "b": torch.ones(1)}}
    with pytest.raises(DamagedFileError, match=r"'a' is in two shards, .*00001-of.* and .*00002-of"):
        open_checkpoint(write_shards(tmp_path / "x", shards))


def test_many_more_shards_than_files_may_be_open(tmp_path: Path) -> None:
    """All are read; a shard that is exchanged meanwhile is seen."""
    files = {f"s{i:03}.safetensors": {f"t{i}": torch.full((2,), float(i))} for i in range(150)}
    write_shards(tmp_path / "many", files)
    convert(tmp_path / "many", tmp_path / "one.safetensors")
    assert all(value[0] == int(name[1:]) for name, value in load_file(tmp_path / "one.safetensors").items())

    def progress(done: int, total: int) -> None:
        save_file({"t149": torch.ones(3)}, tmp_path / "many" / "s149.safetensors")

    with pytest.raises(ChangedFileError, match="s149"):
        convert(tmp_path / "many", tmp_path / "two.safetensors", progress=progress)
    assert not (tmp_path / "two.safetensors").exists()


# --- writing


def weights() -> Tensors:
    """A tie, a view, a scalar, an empty tensor, bf16; not in alphabetical order."""
    base = torch.randn(20, 10)
    return OrderedDict(
        {"z.w": base, "a.t": base.t(), "m.s": torch.tensor(3), "k.b": torch.randn(70).bfloat16(), "b.tied": base,
         "y.e": torch.empty(0, 3)}
    )  # fmt: skip


@pytest.mark.parametrize("format_", ["safetensors", "pth"])
def test_shards_as_the_ecosystem_writes_them(tmp_path: Path, format_: Any) -> None:
    """Names, index, total size; every name, tied ones too, is in its file; the way back gives names, order, bits."""
    source = weights()
    torch.save(source, tmp_path / "in.pth")
    report = convert(tmp_path / "in.pth", tmp_path / "out", shard_size=900, format=format_)
    stem, suffix = ("model", ".safetensors") if format_ == "safetensors" else ("pytorch_model", ".bin")
    index = json.loads((tmp_path / "out" / f"{stem}{suffix}.index.json").read_text())
    files = sorted({*index["weight_map"].values()})
    assert files == [f"{stem}-{i:05}-of-{len(files):05}{suffix}" for i in range(1, len(files) + 1)]
    assert sorted(os.listdir(tmp_path / "out")) == sorted([*files, f"{stem}{suffix}.index.json"])
    assert report.files == len(files) > 1
    held: Tensors = {}
    for file in files:
        path = tmp_path / "out" / file
        held |= load_file(path) if format_ == "safetensors" else torch.load(path, weights_only=True)
    assert held.keys() == index["weight_map"].keys() == source.keys()
    sizes = {tensor.data_ptr(): tensor.nbytes for tensor in held.values()}
    assert index["metadata"]["total_size"] == sum(sizes.values())
    convert(tmp_path / "out", tmp_path / "back.pth")
    back = same(tmp_path / "back.pth", source)
    assert (back["z.w"].data_ptr() == back["b.tied"].data_ptr()) == (format_ == "pth")
    assert ("ties-separated" in [note.code for note in report.notes]) == (format_ == "safetensors")


def test_values_and_module_versions_go_into_the_index(tmp_path: Path) -> None:
    """What lies beside the tensors stands in the index as text; the state dict's _metadata comes back."""
    model = torch.nn.Sequential(torch.nn.BatchNorm1d(3))
    torch.save({"model": model.state_dict(), "epoch": 7}, tmp_path / "in.pth")
    convert(tmp_path / "in.pth", tmp_path / "out", shard_size="1MB")
    found = inspect(tmp_path / "out")
    assert found.metadata["epoch"] == "7"
    convert(tmp_path / "out", tmp_path / "back.pth")
    assert torch.load(tmp_path / "back.pth", weights_only=True)._metadata["0"]["version"] == 2


def test_the_folder_is_new_whole_or_as_it_was(folder: Path, tmp_path: Path) -> None:
    """Without --overwrite a folder with content is refused; a conversion that fails leaves nothing behind."""
    torch.save(weights(), tmp_path / "in.pth")
    before = {path.name: path.read_bytes() for path in folder.iterdir()}
    with pytest.raises(OutputExistsError, match="not empty"):
        convert(tmp_path / "in.pth", folder, shard_size="1MB")

    def progress(done: int, total: int) -> None:
        raise KeyboardInterrupt

    for target in (folder, tmp_path / "new"):
        with pytest.raises(KeyboardInterrupt):
            convert(tmp_path / "in.pth", target, shard_size=900, overwrite=True, progress=progress)
    assert {path.name: path.read_bytes() for path in folder.iterdir()} == before
    assert sorted(os.listdir(tmp_path)) == ["in.pth", "two"]


@pytest.mark.skipif(os.name == "nt", reason="folders cannot be locked there")
def test_folders_that_killed_processes_left_are_removed(folder: Path, tmp_path: Path) -> None:
    """A temporary folder that nobody locks goes; one whose writer lives stays."""
    import fcntl

    dead, alive = (tmp_path / f".out.{digit * 12}.ckpt-tmp" for digit in "0a")
    for path in (dead, alive):
        path.mkdir()
        (path / "model-00001-of-00001.safetensors").write_text("")
    fd = os.open(alive, os.O_RDONLY)
    try:
        fcntl.flock(fd, fcntl.LOCK_EX)
        convert(folder, tmp_path / "out", shard_size="1MB")
    finally:
        os.close(fd)
    assert (dead.exists(), alive.exists()) == (False, True)


def test_the_text_of_the_index_counts(folder: Path) -> None:
    """Where the index and a shard say different things beside the tensors, the index is right; the rest of both is kept."""
    save_file({"a.w": torch.ones(4, 3)}, folder / ONE, {"format": "pt", "note": "shard", "author": "shard"})
    save_file({"b.w": torch.zeros(2), "b.b": torch.ones(1)}, folder / TWO, {"format": "pt", "note": "other"})
    index = folder / "model.safetensors.index.json"
    content = json.loads(index.read_text())
    content["metadata"]["note"] = "index"
    index.write_text(json.dumps(content))
    assert inspect(folder).metadata == {"note": "index", "format": "pt", "author": "shard"}


def test_overwriting_removes_what_the_new_one_lacks(folder: Path, tmp_path: Path) -> None:
    """--overwrite replaces the checkpoint, shards of the old one go, other files stay; also from the folder itself."""
    (folder / "config.json").write_text("{}")
    convert(folder, folder, shard_size="1MB", overwrite=True, add_prefix="p.")
    assert sorted(os.listdir(folder)) == ["config.json", "model-00001-of-00001.safetensors", "model.safetensors.index.json"]
    assert {row["name"] for row in inspect(folder).tensors} == {"p.a.w", "p.b.w", "p.b.b"}
    with pytest.raises(OutputError, match="checkpoint of another kind"):
        convert(folder, folder, shard_size="1MB", format="pth", overwrite=True)
    (folder / "model.safetensors.index.json").unlink()  # shards beside a whole model's file would be two checkpoints
    whole = (folder / "model-00001-of-00001.safetensors").rename(folder / "model.safetensors")
    with pytest.raises(OutputError, match=r"checkpoint of another kind \(model.safetensors\)"):
        convert(whole, folder, shard_size="1MB", overwrite=True)


def test_dry_run_and_usage(folder: Path, tmp_path: Path) -> None:
    """A dry run writes nothing and knows the size; sizes and targets that make no sense are refused as usage."""
    report = convert(folder, tmp_path / "out", shard_size=20, dry_run=True)
    assert (report.files, (tmp_path / "out").exists()) == (2, False)
    done = convert(folder, tmp_path / "out", shard_size=20)
    assert report.bytes == done.bytes == sum(path.stat().st_size for path in (tmp_path / "out").iterdir())
    for size, target in (("5 apples", "x"), ("-1", "x"), ("0", "x"), ("5GB", "x.pth"), ("nan", "x"), ("9e99", "x")):
        with pytest.raises(UsageError):
            convert(folder, tmp_path / target, shard_size=size)
    with pytest.raises(UsageError):
        convert(folder, tmp_path / "x", shard_size="5GB", format="dcp")
    (tmp_path / "file").write_text("")
    with pytest.raises(OutputError, match="is a file"):
        convert(folder, tmp_path / "file", shard_size="5GB")


@pytest.mark.parametrize(("size", "files"), [("1GB", 1), ("1.5 kb", 3), ("1.5KiB", 2), ("1536", 2), (1535, 3), ("1B", 4)])
def test_sizes(size: Any, files: int, tmp_path: Path) -> None:
    """KB counts in thousands, as Hugging Face does; KiB in 1024s. A shard is above the limit where one tensor alone is."""
    torch.save({f"a.{n}": torch.zeros(elements) for n, elements in enumerate((256, 128, 128, 256))}, tmp_path / "in.pth")
    assert convert(tmp_path / "in.pth", tmp_path / "out", shard_size=size, dry_run=True).files == files


DTYPES = [torch.float32, torch.bfloat16, torch.int64, torch.bool, torch.uint8, torch.complex64]


@st.composite
def state_dicts(draw: st.DrawFn) -> Tensors:
    """A few tensors: dtypes, shapes with 0 and none, transposed ones, slices, ties."""
    found: Tensors = OrderedDict()
    names = draw(st.permutations(["a.w", "b.w", "c.w", "d.x", "e"]))
    for name in names[: draw(st.integers(1, 5))]:
        kind = draw(st.sampled_from(["new", "tie", "view"]))
        known = list(found.values())
        if kind == "new" or not known:
            shape = draw(st.lists(st.integers(0, 4), max_size=3))
            tensor = (torch.randn(shape) * 100).to(draw(st.sampled_from(DTYPES)))
            found[name] = tensor.transpose(0, -1) if draw(st.booleans()) and tensor.dim() > 1 else tensor
        else:
            other = draw(st.sampled_from(known))
            found[name] = other if kind == "tie" or not other.dim() else other[: max(1, other.shape[0] // 2)]
    return found


@settings(max_examples=25, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(source=state_dicts())
def test_round_trip_through_every_container(source: Tensors, tmp_path_factory: pytest.TempPathFactory) -> None:
    """pth -> legacy -> safetensors -> torch shards -> dcp -> pth gives back all, ties too; shards all but ties."""
    folder = tmp_path_factory.mktemp("chain")
    steps: list[tuple[str, dict[str, Any]]] = [
        ("0.pth", {}), ("old.pth", {"format": "pth-legacy"}), ("1.safetensors", {}),
        ("3", {"shard_size": 40, "format": "pth"}), ("4", {"format": "dcp"}), ("5.pth", {}),
        ("6", {"shard_size": 40}), ("7.pth", {}),
    ]  # fmt: skip
    torch.save(source, folder / "0.pth")
    for (before, _), (after, options) in pairwise(steps):
        convert(folder / before, folder / after, **options)
    same(folder / "7.pth", source)
    back = same(folder / "5.pth", source)
    for one, first in source.items():
        for other, second in source.items():
            if first is second and first.numel():
                assert back[one].data_ptr() == back[other].data_ptr()


def test_a_value_that_the_index_has_otherwise(tmp_path: Path) -> None:
    """A value in a shard and another text of that name in the index: neither overwrites the other."""
    shard = {"a.w": torch.ones(2), "epoch": 8}
    folder = write_shards(tmp_path / "one", {"pytorch_model-00001-of-00001.bin": shard}, epoch="7")  # type: ignore[dict-item]
    with pytest.raises(CkptError, match="'epoch' would overwrite metadata"):
        convert(folder, tmp_path / "out.safetensors")
    convert(folder, tmp_path / "out.safetensors", drop=["epoch"])
    assert inspect(tmp_path / "out.safetensors").metadata == {"epoch": "7", "format": "pt"}


@pytest.mark.parametrize(
    ("index", "whole", "said"),
    [
        ("model.safetensors.index.json", "model.safetensors", "beside its shards"),
        ("pytorch_model.bin.index.json", "model.safetensors", "beside its shards"),
        ("pytorch_model.bin.index.json", "pytorch_model.bin", "beside its shards"),
        ("model.safetensors.index.json", "pytorch_model.bin", ""),
        ("", "model.safetensors", "holds several checkpoints"),
    ],
)
def test_one_file_beside_an_index(index: str, whole: str, said: str, tmp_path: Path) -> None:
    """transformers takes a whole `model.safetensors` before an index, whatever is in it; it may be the index's only shard."""
    torch.save({"w": torch.zeros(1)}, tmp_path / "consolidated.00.pth")
    save_file({"w": torch.ones(1)}, tmp_path / "shard.safetensors")
    if index:
        (tmp_path / "consolidated.00.pth").unlink()
        (tmp_path / index).write_text(json.dumps({"weight_map": {"w": "shard.safetensors"}}))
    assert inspect(tmp_path).tensors[0]["shape"] == [1]
    save_file({"w": torch.zeros(2)}, tmp_path / "model.safetensors")
    (tmp_path / "model.safetensors").rename(tmp_path / whole)
    if not said:
        assert inspect(tmp_path).tensors[0]["shape"] == [1]
        return
    with pytest.raises(NotACheckpointError, match=said):
        inspect(tmp_path)
    if index:
        assert inspect(tmp_path / index).tensors[0]["shape"] == [1]
        (tmp_path / index).write_text(json.dumps({"weight_map": {"w": whole}}))
        assert inspect(tmp_path).tensors[0]["shape"] == [2]
