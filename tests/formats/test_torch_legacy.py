"""torch-legacy: read as torch reads it, without its tensors; written so that torch, old and new, reads it."""

import struct
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import ckpt_tools
from tests.formats.test_oracle import assert_lists, described, loads_weights_only
from tests.hostile.pickles import BUILD, FALSE, ORDERED_DICT, dict_of, glob, sizes, tuple_of
from tests.support.graphs import assert_same, element_bytes, live_tensors, load_with_tags
from tests.support.legacy import floats, legacy, persistent, stream
from tests.support.samples import PTH, by_name, corpus

pytestmark = pytest.mark.filterwarnings("ignore:Detected pickle protocol:UserWarning")
pth_fixtures = pytest.mark.parametrize("path", PTH, ids=by_name)
legacy_corpus = pytest.mark.parametrize("row", corpus("torch-legacy"))


def resaved(path: Path, folder: Path) -> Path:
    """A fixture as torch saves it in the legacy format, device tags included."""
    loaded, tags = load_with_tags(path)
    target = folder / path.name
    tag = torch.serialization.location_tag
    try:
        torch.serialization.location_tag = lambda storage: tags.get(storage._cdata, "cpu")
        target.write_bytes(legacy(loaded))
    finally:
        torch.serialization.location_tag = tag
    if b"UntypedStorage" in target.read_bytes():
        with pytest.raises(AttributeError):
            torch.load(target)
        assert described(target)["weights_only"]["reasons"]
        pytest.skip("torch cannot load what it saved: an UntypedStorage in the legacy format")
    return target


# --- reading


@pth_fixtures
def test_lists_what_torch_loads(path: Path, tmp_path: Path) -> None:
    """Every fixture, saved by torch as legacy, is listed as torch loads it; the verdict on weights_only is torch's."""
    source = resaved(path, tmp_path)
    assert described(source)["container"] == "torch-legacy"
    assert_lists(source, *load_with_tags(source))
    assert described(source)["weights_only"]["loads"] is loads_weights_only(source)


@pth_fixtures
def test_comes_out_as_it_went_in(path: Path, tmp_path: Path) -> None:
    """legacy -> pth, and legacy -> legacy, load as the input does."""
    source = resaved(path, tmp_path)
    before = load_with_tags(source)[0]
    for target, kind in ((tmp_path / "out.pth", "pth"), (tmp_path / "out.old", "pth-legacy")):
        ckpt_tools.convert(source, target, objects="keep", format=kind)  # type: ignore[arg-type]
        assert_same(before, load_with_tags(target)[0])


@legacy_corpus
def test_lists_what_torch_loads_from_real_files(row: dict[str, Any], tmp_path: Path) -> None:
    """Real files are listed as torch loads them, and come out unchanged; made plain, weights_only takes every one."""
    target, plain = tmp_path / "out.pth", tmp_path / "plain.pth"
    ckpt_tools.convert(row["path"], target, objects="keep")
    ckpt_tools.convert(row["path"], plain, objects="plain")
    drop = {"storage", "where"}
    listed = [
        [{key: row[key] for key in row.keys() - drop} for row in described(path)["tensors"]] for path in (row["path"], target)
    ]
    assert listed[0] == listed[1]
    loaded = torch.load(plain, map_location="cpu", weights_only=True)
    assert sum(1 for _ in live_tensors(loaded)) == row["n_tensors"]
    if row["loads_weights_only"] is True:
        before, tags = load_with_tags(row["path"], weights_only=True)
        assert_lists(row["path"], before, tags)
        assert_same(before, torch.load(target, map_location="cpu", weights_only=True))


STATE = tuple_of(persistent(), b"K\0", sizes(2, 3), sizes(3, 1))
REDUCED = glob("torch._utils", "_rebuild_tensor") + STATE + b"R"
PARAMETER = glob("torch.nn.parameter", "Parameter")


def test_variable_of_the_first_versions(tmp_path: Path) -> None:
    """A Parameter of 0.1, whose tensor is in its state of five; torch reads it without weights_only."""
    path, target = tmp_path / "in.pth", tmp_path / "out.pth"
    made = PARAMETER + b")\x81" + tuple_of(REDUCED, b"N", ORDERED_DICT, FALSE, FALSE) + BUILD
    path.write_bytes(stream(dict_of(w=made), ("0", floats(0, 1, 2, 3, 4, 5))))
    before, tags = load_with_tags(path)
    assert_lists(path, before, tags)
    ckpt_tools.convert(path, target)
    assert torch.equal(before["w"], torch.load(target, weights_only=True)["w"])


def test_whole_model_with_its_source(tmp_path: Path) -> None:
    """A pickled model brings the source of its classes: that is said, and the model is listed as torch loads it."""
    path, target = tmp_path / "in.pth", tmp_path / "out.pth"
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(3, 2), nn.BatchNorm1d(2))
    path.write_bytes(legacy(model))
    found = described(path)
    assert "embedded-source" in [row["code"] for row in found["findings"]]
    ckpt_tools.convert(path, target, objects="keep")
    loaded = torch.load(target, weights_only=False)
    assert_same(model.state_dict(), loaded.state_dict())
    ckpt_tools.convert(path, tmp_path / "plain.pth", objects="plain")
    assert {key: element_bytes(value) for key, value in torch.load(tmp_path / "plain.pth", weights_only=True).items()} == {
        key: element_bytes(value) for key, value in model.state_dict().items()
    }


def test_big_endian_writer(tmp_path: Path) -> None:
    """Elements are little-endian whoever wrote them, as torch reads them; an old big-endian writer's counts are not."""
    path = tmp_path / "in.pth"
    data = legacy({"w": torch.arange(6.0)}).replace(b"little_endianq\x02\x88", b"little_endianq\x02\x89")
    assert b"little_endianq\x02\x89" in data
    path.write_bytes(data)
    ckpt_tools.convert(path, tmp_path / "out.pth")
    assert torch.equal(torch.load(path)["w"], torch.load(tmp_path / "out.pth")["w"])
    path.write_bytes(data.replace(struct.pack("<q", 6), struct.pack(">q", 6)))
    ckpt_tools.convert(path, tmp_path / "out.pth", overwrite=True)
    assert torch.equal(torch.load(tmp_path / "out.pth")["w"], torch.arange(6.0))


# --- writing


@pth_fixtures
def test_written_files_load(path: Path, tmp_path: Path) -> None:
    """pth -> legacy: torch loads the same graph with the same device tags."""
    target = tmp_path / "out.pth"
    report = ckpt_tools.convert(path, target, objects="keep", format="pth-legacy")
    assert report.container == "torch-legacy"
    (before, tags_before), (after, tags_after) = load_with_tags(path), load_with_tags(target)
    assert_same(before, after)
    for (_, one), (_, two) in zip(live_tensors(before), live_tensors(after), strict=True):
        assert tags_before[one.untyped_storage()._cdata] == tags_after[two.untyped_storage()._cdata]
