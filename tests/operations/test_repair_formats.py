"""`ckpt repair` of safetensors files and of torch-legacy, and of what is whole and does not load: names, counters, ties."""

import struct
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from ckpt_tools import repair
from ckpt_tools.errors import RepairError
from tests.operations.test_repair import Tensors, equal, repaired
from tests.support.files import save

Whole = tuple[bytes, Tensors, str]


@pytest.fixture(params=["safetensors", "legacy"])
def whole(request: pytest.FixtureRequest, tmp_path: Path) -> Whole:
    """The bytes of a file, its 20 tensors, two of them views on one storage in torch-legacy, and its suffix."""
    tensors = {f"layer{i}.weight": torch.randn(30, 20) for i in range(18)}
    if request.param == "safetensors":
        tensors |= {f"layer{i}.weight": torch.randn(30, 20) for i in (18, 19)}
        path = save(tmp_path / "model.safetensors", tensors, metadata={"format": "pt", "epoch": "3"})
    else:
        table = torch.randn(30, 20)
        tensors |= {"a.weight": table[:10], "b.weight": table[5:]}
        path = save(tmp_path / "model.pth", tensors, _use_new_zipfile_serialization=False)
    return path.read_bytes(), tensors, path.suffix


@pytest.mark.parametrize("share", [0.3, 0.5, 0.77, 0.9, 0.999])
def test_what_lies_before_a_cut_is_saved(whole: Whole, tmp_path: Path, share: float) -> None:
    """Storages lie one behind another: every tensor that ends before the cut is saved."""
    data, tensors, suffix = whole
    cut = data[: int(len(data) * share)]
    bytes_of = {name: tensor.untyped_storage() for name, tensor in tensors.items()}
    report, found = repaired(cut, tmp_path, suffix=suffix)
    assert set(found) == {name for name, storage in bytes_of.items() if bytes(storage) in cut}
    assert equal(found, tensors)
    assert report.exit_code == 1
    _, kept = repaired(cut, tmp_path, suffix=suffix, keep_damaged=True)
    assert len(kept) == 20
    assert equal({name: kept[name] for name in found}, tensors)


@pytest.mark.parametrize(
    ("before", "behind"),
    [(b"", b"x" * 1000), (b"HTTP/1.1 200 OK\r\n\r\n", b""), (b"{" * 9, b"}"), (b"\x80\x02", b"xyz"), (b"", b"x")],
)
def test_garbage_around(whole: Whole, tmp_path: Path, before: bytes, behind: bytes) -> None:
    """Bytes that do not belong to the file are left out; of those behind it nothing proves that they were added there."""
    data, tensors, suffix = whole
    report, found = repaired(before + data + behind, tmp_path, suffix=suffix)
    assert (report.exit_code, len(found), equal(found, tensors)) == (1 if behind else 0, 20, True)
    assert suffix == ".pth" or ("unproved-places" in dict(report.notes)) is bool(behind)


def test_bytes_amid_a_file_are_not_all_saved(whole: Whole, tmp_path: Path) -> None:
    """Bytes that were put in between move those behind them: exit code 0 is not said."""
    data, tensors, suffix = whole
    report, found = repaired(data[:-300] + b"\0" * 16 + data[-300:], tmp_path, suffix=suffix)
    assert not equal(found, tensors)
    assert report.exit_code == 1


def test_text_mode_safetensors(tmp_path: Path) -> None:
    tensors = {"a.weight": torch.arange(10_000, dtype=torch.int32)}
    data = save(tmp_path / "model.safetensors", tensors, metadata={"format": "pt"}).read_bytes()
    assert equal(repaired(data.replace(b"\n", b"\r\n"), tmp_path, suffix=".safetensors")[1], tensors)


@pytest.mark.parametrize("damaged", [b'"dtype":"X32"', b'"dtypf":"F32"'])
def test_an_empty_tensor_whose_description_is_damaged_is_missing(tmp_path: Path, damaged: bytes) -> None:
    tensors = {"a": torch.ones(3), "empty": torch.zeros(0, 4)}
    data = save(tmp_path / "model.safetensors", tensors, metadata={"format": "pt"}).read_bytes()
    damage = data.replace(b'"empty":{"dtype":"F32"', b'"empty":{' + damaged)
    report, found = repaired(damage, tmp_path, suffix=".safetensors")
    assert (report.exit_code, [row.where for row in report.missing], list(found)) == (1, [["empty"]], ["a"])


def test_safetensors_headers_are_written_anew(tmp_path: Path) -> None:
    header = b'{"a":{"dtype":"F32","shape":[1],"data_offsets":[0,4]}}'
    data = len(header).to_bytes(8, "little") + header + struct.pack("<f", 2.5)
    report, found = repaired(data, tmp_path, suffix=".safetensors")
    assert [row.code for row in report.mended] == ["no-format", "unaligned"]
    assert found["a"].item() == 2.5


DAMAGED = {
    "name": (b"torch._utils\n", b"torch._utilr\n", "names 'torch._utilr._rebuild_tensor_v2', where 'torch._utils._rebuild"),
    "module": (b"ctorch._utils\n", b"ch._utils\n", "'h._utils._rebuild_tensor_v2', where 'torch._utils._rebuild_tensor_v2'"),
    "function": (b"\n_rebuild_tensor_v2\n", b"\n_reb_tensor_v2\n", "it names storages, and makes no tensor of them"),
    "device": (b"X\3\0\0\0cpu", b"X\3\0\0\0cpt", "lies on 'cpt', which is not a device"),
    "number": (b"X\3\0\0\0cpu", b"X\6\0\0\0cuda:x", "lies on 'cuda:x', which is not a device"),
}


@pytest.mark.parametrize("damage", DAMAGED)
def test_damage_in_a_legacy_pickle_is_not_written_as_whole(tmp_path: Path, damage: str) -> None:
    """What torch would refuse in the output comes of damage: there is no output, but with keep_damaged."""
    old, new, said = DAMAGED[damage]
    torch.save({"w": torch.arange(3)}, tmp_path / "in.pth", _use_new_zipfile_serialization=False)
    whole = (tmp_path / "in.pth").read_bytes()
    assert old in whole
    (tmp_path / "in.pth").write_bytes(whole.replace(old, new, 1))
    with pytest.raises(RepairError) as caught:
        repair(tmp_path / "in.pth", tmp_path / "out.pth")
    assert said in str(caught.value)
    assert not (tmp_path / "out.pth").exists()
    assert repair(tmp_path / "in.pth", tmp_path / "out.pth", keep_damaged=True).exit_code == 1


def test_missing_counters(tmp_path: Path) -> None:
    """A strict load_state_dict asks for num_batches_tracked; afterwards it has them. Only batch norms of version 2 get one."""
    network = nn.Sequential(nn.Conv2d(1, 2, 1), nn.BatchNorm2d(2))
    state = network.state_dict()
    del state["1.num_batches_tracked"]
    torch.save(state, tmp_path / "model.pth")
    with pytest.raises(RuntimeError, match="num_batches_tracked"):
        network.load_state_dict(torch.load(tmp_path / "model.pth"))
    report = repair(tmp_path / "model.pth", tmp_path / "out.pth")
    assert [row.code for row in report.mended] == ["num-batches-tracked"]
    after = torch.load(tmp_path / "out.pth")
    network.load_state_dict(after)
    assert after["1.num_batches_tracked"].dtype == torch.int64
    state._metadata["1"]["version"] = 3  # type: ignore[attr-defined]
    torch.save(state, tmp_path / "frozen.pth")
    assert not repair(tmp_path / "frozen.pth", tmp_path / "out2.pth").mended


PREFIXES: list[tuple[list[str], list[tuple[str, bool]], list[str]]] = [
    # DataParallel around DataParallel, or a script's mistake
    (["module.module.fc.weight", "module.module.fc.bias"], [("double-prefix", False)], ["fc.weight", "fc.bias"]),
    (["module.fc.weight"], [], ["module.fc.weight"]),
    # on half of a module's tensors it is a mistake; in front of a module of its own it may be the model's
    (["module.fc.weight", "fc.bias"], [("mixed-prefix", False)], ["fc.weight", "fc.bias"]),
    (["module.fc.weight", "head.bias"], [("mixed-prefix", True)], ["module.fc.weight", "head.bias"]),
    (["module.a.w", "a.b", "a.w"], [("mixed-prefix", True)], ["module.a.w", "a.b", "a.w"]),
    (["_orig_mod.a.w", "b.w"], [("mixed-prefix", False)], ["a.w", "b.w"]),
]


@pytest.mark.parametrize(("names", "mended", "after"), PREFIXES)
def test_prefixes(names: list[str], mended: list[tuple[str, bool]], after: list[str], tmp_path: Path) -> None:
    save(tmp_path / "in.pth", {name: torch.full((1,), float(number)) for number, name in enumerate(names)})
    report = repair(tmp_path / "in.pth", tmp_path / "out.pth")
    assert [(row.code, row.left) for row in report.mended] == mended
    assert list(torch.load(tmp_path / "out.pth")) == after


def test_a_lost_counter_is_lost(tmp_path: Path) -> None:
    """num_batches_tracked that the damage took is missing, and not said to have been lacking; 0 is not its value."""
    counter = torch.tensor(1234567)
    state = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4)).state_dict() | {"1.num_batches_tracked": counter}
    data = save(tmp_path / "in.pth", state).read_bytes()
    at = data.index(counter.numpy().tobytes())
    (tmp_path / "in.pth").write_bytes(data[:at] + b"\xff\xff\xff\xff" + data[at + 4 :])
    report = repair(tmp_path / "in.pth", tmp_path / "out.pth")
    assert (report.exit_code, [row.where for row in report.missing]) == (1, [["1.num_batches_tracked"]])
    assert "num-batches-tracked" not in {row.code for row in report.mended}
    assert "1.num_batches_tracked" not in torch.load(tmp_path / "out.pth")


@pytest.mark.parametrize("wrapped", [True, False])
def test_stale_metadata(tmp_path: Path, wrapped: bool) -> None:
    """A script renamed the tensors and left `_metadata` behind: the versions reach their modules again."""
    network = nn.Sequential(nn.Conv2d(1, 2, 1), nn.BatchNorm2d(2))
    state = (nn.DataParallel(network) if wrapped else network).state_dict()
    for name in list(state):
        new = name.removeprefix("module.") if wrapped else f"module.{name}"
        state[new] = state.pop(name)
    torch.save(state, tmp_path / "model.pth")
    report = repair(tmp_path / "model.pth", tmp_path / "out.pth")
    assert [row.code for row in report.mended] == ["stale-metadata"]
    after = torch.load(tmp_path / "out.pth")._metadata
    assert after["1" if wrapped else "module.1"] == {"version": 2}
    assert not repair(tmp_path / "out.pth", tmp_path / "again.pth").mended


def test_stale_metadata_that_another_state_dict_shares(tmp_path: Path) -> None:
    """`clean._metadata = wrapped._metadata`: the rows of the clean one are mended, those of the wrapped one stay."""
    wrapped: Any = nn.DataParallel(nn.Sequential(nn.Linear(1, 1), nn.BatchNorm1d(1))).state_dict()
    clean = type(wrapped)((name.removeprefix("module."), tensor) for name, tensor in wrapped.items())
    clean._metadata = wrapped._metadata
    torch.save({"wrapped": wrapped, "clean": clean}, tmp_path / "in.pth")
    assert [row.where for row in repair(tmp_path / "in.pth", tmp_path / "out.pth").mended] == [["clean"]]
    loaded = torch.load(tmp_path / "out.pth")
    assert loaded["wrapped"]._metadata == wrapped._metadata
    assert list(loaded["clean"]._metadata) == ["", "0", "1"]


def test_ties_only_when_asked(tmp_path: Path) -> None:
    """Equal matrices share their bytes only with --tie-equal; vectors and zeros never do."""
    table = torch.randn(40, 8)
    tensors = {
        "embed.weight": table, "head.weight": table.clone(), "a.bias": torch.ones(8), "b.bias": torch.ones(8),
        "c.weight": torch.zeros(4, 4), "d.weight": torch.zeros(4, 4),
    }  # fmt: skip
    torch.save(tensors, tmp_path / "model.pth")
    assert not repair(tmp_path / "model.pth", tmp_path / "out.pth").mended
    report = repair(tmp_path / "model.pth", tmp_path / "tied.pth", tie_equal=True)
    assert [row.code for row in report.mended] == ["tied"]
    after = torch.load(tmp_path / "tied.pth")
    assert after["embed.weight"].data_ptr() == after["head.weight"].data_ptr()
    assert after["a.bias"].data_ptr() != after["b.bias"].data_ptr()
    assert after["c.weight"].data_ptr() != after["d.weight"].data_ptr()
    assert equal(after, tensors)
