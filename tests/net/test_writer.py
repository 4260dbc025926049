"""What is written: strides and views, `_metadata`, `param_names`, the places of tensors, storages beyond 4 GB."""

import os
import struct
import tempfile
import zipfile
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file
from torch import nn

import ckpt_tools
import ckpt_tools.torch
from tests.support.graphs import assert_same, element_bytes

BASE = torch.arange(60.0)
VIEWS = {
    "offset": BASE[7:19], "step": BASE[3:50:3], "turned": BASE.view(6, 10).t(), "inner": BASE.view(6, 10)[1:5, 2:9:2],
    "three": BASE.view(3, 4, 5).permute(2, 0, 1), "spread": BASE[2:5].expand(4, 3), "point": BASE[11], "none": BASE[4:4],
    "none-wide": torch.empty(0, 5), "overlap": BASE.as_strided((5, 4), (2, 1), 3), "last": BASE[59:],
    "bool": BASE.view(6, 10) > 20, "channels": torch.randn(2, 3, 4, 5).to(memory_format=torch.channels_last),
    "half": BASE.half()[1::2], "long": BASE.long()[5:9],
}  # fmt: skip
FORMATS: dict[str, Any] = {"out.pth": None, "old.pth": "pth-legacy", "out.safetensors": None, "dcp": "dcp"}


@pytest.mark.parametrize("name", VIEWS)
@pytest.mark.parametrize("cast", [None, "fp64"])
def test_views(name: str, cast: str | None, tmp_path: Path) -> None:
    """Values, shapes and strides of a view alone, of one with its base, and after a cast."""
    torch.save({"w": VIEWS[name], "x": BASE[:]}, tmp_path / "in.pth")
    source = torch.load(tmp_path / "in.pth")
    if cast:
        source = {key: value.double() if value.is_floating_point() else value for key, value in source.items()}
    for target, form in FORMATS.items():
        ckpt_tools.convert(tmp_path / "in.pth", tmp_path / target, dtype=cast, format=form)
        found = load_file(tmp_path / target) if target == "out.safetensors" else ckpt_tools.torch.load(tmp_path / target)
        for key, value in source.items():
            assert element_bytes(found[key]) == element_bytes(value), (target, key)
            assert (found[key].shape, found[key].dtype) == (value.shape, value.dtype)
    if not cast:
        assert_same(source, torch.load(tmp_path / "out.pth"))
        assert_same(source, torch.load(tmp_path / "old.pth"))


def test_places_are_aligned_and_in_order(tmp_path: Path) -> None:
    """Records lie at multiples of 64, as torch's; safetensors has no holes, ordered by name or not; `mmap` loads both."""
    torch.save({f"t{size}": torch.arange(float(size)) for size in (1, 0, 17, 3, 64, 5)}, tmp_path / "in.pth")
    ckpt_tools.convert(tmp_path / "in.pth", tmp_path / "out.pth")
    data = (tmp_path / "out.pth").read_bytes()
    with zipfile.ZipFile(tmp_path / "out.pth") as made:
        for row in made.infolist():
            name, extra = struct.unpack("<2H", data[row.header_offset + 26 : row.header_offset + 30])
            assert (row.header_offset + 30 + name + extra) % 64 == 0 or "/data/" not in row.filename
    ckpt_tools.convert(tmp_path / "out.pth", tmp_path / "out.safetensors")
    (length,) = struct.unpack("<Q", (tmp_path / "out.safetensors").read_bytes()[:8])
    assert length % 8 == 0
    with safe_open(tmp_path / "out.safetensors", "pt") as opened:
        assert sorted(opened.keys()) == ["t0", "t1", "t17", "t3", "t5", "t64"]
    found = torch.load(tmp_path / "out.pth", mmap=True)
    assert all(found[name].tolist() == list(map(float, range(int(name[1:])))) for name in found)


OPTIONS: dict[str, tuple[dict[str, Any], str]] = {
    "strip": ({"strip_module": True}, ""), "add": ({"add_prefix": "net."}, "net.module."),
    "rename": ({"rename": r"^module\.=body."}, "body."), "nothing": ({}, "module."),
}  # fmt: skip


@pytest.mark.parametrize("name", OPTIONS)
def test_metadata_follows_the_names(name: str, tmp_path: Path) -> None:
    """The versions of `_metadata` stand under the new names, so that `load_state_dict` finds them."""
    options, prefix = OPTIONS[name]
    model: Any = nn.DataParallel(nn.Sequential(nn.Conv2d(1, 2, 3), nn.BatchNorm2d(2)))
    torch.save(model.state_dict(), tmp_path / "in.pth")
    ckpt_tools.convert(tmp_path / "in.pth", tmp_path / "out.pth", **options)
    found: Any = torch.load(tmp_path / "out.pth")
    assert type(found).__name__ == "OrderedDict"
    assert found._metadata[f"{prefix}1"] == {"version": 2}
    assert all(row.startswith(prefix) or prefix.startswith(row) for row in found._metadata)
    ckpt_tools.convert(tmp_path / "out.pth", tmp_path / "out.safetensors")
    ckpt_tools.convert(tmp_path / "out.safetensors", tmp_path / "back.pth")
    back: Any = torch.load(tmp_path / "back.pth")
    assert back._metadata[f"{prefix}1"] == {"version": 2}


@pytest.mark.parametrize("container", ["pth", "pth-legacy"])
def test_param_names_follow_the_names(container: Any, tmp_path: Path) -> None:
    """A named optimizer's `param_names` are renamed with the model's; its state, by number, stays what it was."""
    model = nn.DataParallel(nn.Linear(2, 3))
    optimizer = torch.optim.Adam(model.named_parameters())
    for parameter in model.parameters():
        parameter.grad = torch.ones_like(parameter)
    optimizer.step()
    before: dict[str, Any] = {"model": model.state_dict(), "optimizer": optimizer.state_dict(), "epoch": 3}
    torch.save(before, tmp_path / "in.pth", _use_new_zipfile_serialization=container == "pth")
    report = ckpt_tools.convert(tmp_path / "in.pth", tmp_path / "out.pth", strip_module=True, format=container)
    found = torch.load(tmp_path / "out.pth")
    assert found["optimizer"]["param_groups"][0].pop("param_names") == ["weight", "bias"] == list(found["model"])
    assert report.optimizer_names == 2
    before["optimizer"]["param_groups"][0].pop("param_names")
    assert_same(before["optimizer"], found["optimizer"], storages=False)


SIZE = (4 << 30) + (64 << 20)


def test_over_4_gb() -> None:
    """A storage beyond 4 GB into a zip and out of it: zip64, places, and the numbers at its ends."""
    place = next((place for place in ("/dev/shm", tempfile.gettempdir()) if room(place) > 3 * SIZE), None)
    if place is None:
        pytest.skip("no room for two files of 4 GB")
    with tempfile.TemporaryDirectory(dir=place) as name:
        source, out, back = (Path(name, file) for file in ("in.safetensors", "out.pth", "back.safetensors"))
        big(source)
        ckpt_tools.convert(source, out, strip_module=True)
        source.unlink()
        assert SIZE in [row.file_size for row in zipfile.ZipFile(out).infolist()]
        assert [(row["name"], row["shape"]) for row in ckpt_tools.inspect(out).tensors] == [("big", [SIZE]), ("end", [5])]
        found = torch.load(out, mmap=True)
        assert (found["big"][:2].tolist(), found["big"][-2:].tolist(), found["end"].tolist()) == (
            [7, 0], [0, 9], [0, 1, 2, 3, 4],
        )  # fmt: skip
        del found
        ours = ckpt_tools.torch.load_state_dict(out)["big"]  # which is mapped
        assert (ours[:2].tolist(), ours[-2:].tolist()) == ([7, 0], [0, 9])
        del ours
        ckpt_tools.convert(out, back, drop="big")  # what lies behind 4 GB
        with safe_open(back, "pt") as opened:
            assert opened.get_tensor("end").tolist() == [0, 1, 2, 3, 4]


def room(folder: str) -> int:
    """Bytes that are free."""
    found = os.statvfs(folder) if os.path.isdir(folder) else None
    return found.f_bavail * found.f_frsize if found else 0


def big(path: Path) -> Path:
    """A safetensors file by hand: bytes with a 7 first and a 9 last, and five floats behind."""
    header = (
        f'{{"module.big":{{"dtype":"U8","shape":[{SIZE}],"data_offsets":[0,{SIZE}]}},'
        f'"module.end":{{"dtype":"F32","shape":[5],"data_offsets":[{SIZE},{SIZE + 20}]}}}}'
    ).encode()
    header += b" " * (-len(header) % 8)
    with open(path, "wb") as file:
        file.write(struct.pack("<Q", len(header)) + header + b"\x07")
        file.seek(8 + len(header) + SIZE - 1)
        file.write(b"\x09" + struct.pack("<5f", *range(5)))
    return path
