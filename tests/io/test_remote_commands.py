"""Every command takes addresses: what it says of them is what it says of the same bytes on the disk."""

import gzip
import json
from pathlib import Path
from typing import Any

import pytest
import torch
from click.testing import Result

from ckpt_tools import average, check, convert, diff, edit_in_place, repair, stats
from ckpt_tools.errors import MissingFileError, OutputError, UnsupportedContainerError
from ckpt_tools.torch import load_into, load_state_dict
from tests.conftest import small_model
from tests.support.commands import ckpt
from tests.support.servers import Server
from tests.support.terminal import run

SIZE = 120  # a tensor of SIZE x SIZE: 58 kB


@pytest.fixture(params=["http", "memory"])
def far(request: pytest.FixtureRequest, server: Server, memory: Any, tmp_path: Path) -> str:
    """The address of what is put into tmp_path / "far", with a slash; two checkpoints, one of them wrapped, lie there."""
    torch.manual_seed(0)
    folder = tmp_path / "far"
    folder.mkdir()
    state = {f"l{i}.weight": torch.randn(SIZE, SIZE) for i in range(3)} | {"l0.bias": torch.ones(3)}
    torch.save(state, folder / "a.pth")
    torch.save({f"module.{name}": tensor + 1 for name, tensor in state.items()}, folder / "b.pth")
    data = bytearray((folder / "a.pth").read_bytes())
    data[len(data) // 2] ^= 255
    (folder / "flipped.pth").write_bytes(data)
    (folder / "model_1.pt").write_bytes((folder / "a.pth").read_bytes())  # a name like that of a rank's file
    (folder / "cut.pth").write_bytes(data[:-3000])
    convert(folder / "a.pth", folder / "shards", shard_size=10**5)
    if request.param == "http":
        return server.url("far/")
    memory.put(str(folder), "/far", recursive=True)
    return "memory://far/"


@pytest.mark.parametrize(
    "arguments",
    [
        ["check", "@a.pth"], ["inspect", "@model_1.pt"],
        ["check", "--values", "--digest", "@flipped.pth"], ["check", "@cut.pth"],
        ["check", "@shards/model.safetensors.index.json", "@b.pth"], ["check", "--against", "@a.pth", "@b.pth"],
        ["stats", "@a.pth"], ["stats", "@shards/model.safetensors.index.json"], ["diff", "@a.pth", "@b.pth"],
        ["diff", "--values", "@a.pth", "@shards/model.safetensors.index.json"], ["match", "@a.pth", "--like", "@b.pth"],
        ["inspect", "@a.pth", "@b.pth", "--jobs", "2"],
    ],
    ids=" ".join,
)  # fmt: skip
def test_the_same_is_said(far: str, arguments: list[str], tmp_path: Path) -> None:
    """The report of an address is that of the file, but for the path and the time."""
    if "--jobs" in arguments and far.startswith("memory"):
        pytest.skip("other processes have another memory")
    remote = run(*(argument.replace("@", far) for argument in arguments), "--json")
    local = run(*(argument.replace("@", f"{tmp_path}/far/") for argument in arguments), "--json")
    assert (remote.exit_code, remote.stderr) == (local.exit_code, local.stderr)
    assert documents(remote, far) == documents(local, f"{tmp_path}/far/")


def documents(result: Result, folder: str) -> list[Any]:
    """The JSON documents, without the folder and the seconds that they took."""
    made = []
    for line in result.stdout.splitlines():
        document = json.loads(line.replace(folder, "@"))
        document.pop("seconds", None)
        for row in document.get("findings", []):
            row["fix"] = row["fix"].replace("@", "")  # an address is mended into a file here
        made.append(document)
    assert made
    return made


def test_average_and_report(far: str, memory: Any, tmp_path: Path) -> None:
    """A mean is written to a file or, as convert does, to an address; a page of two addresses is written to a file."""
    average([f"{far}a.pth", f"{far}b.pth"], tmp_path / "mean.pth", unwrap=True)
    ckpt("average", f"{far}a.pth", f"{far}b.pth", "memory://out/mean.pth", "--unwrap")
    assert memory.cat("/out/mean.pth") == (tmp_path / "mean.pth").read_bytes()
    expected = load_state_dict(f"{far}a.pth")["l1.weight"] + 0.5
    assert torch.allclose(load_state_dict(tmp_path / "mean.pth")["l1.weight"], expected, atol=1e-6)
    ckpt("report", f"{far}a.pth", f"{far}b.pth", "-o", str(tmp_path / "page.html"), "--values")
    assert "<title>a.pth" in (tmp_path / "page.html").read_text()


def test_repair(far: str, server: Server, tmp_path: Path) -> None:
    """What is whole in a damaged file at an address is saved, as from the disk; what is packed is unpacked first."""
    for name in ("flipped.pth", "cut.pth"):
        remote = repair(f"{far}{name}", tmp_path / "one.pth", overwrite=True)
        local = repair(tmp_path / "far" / name, tmp_path / "two.pth", overwrite=True)
        assert (tmp_path / "one.pth").read_bytes() == (tmp_path / "two.pth").read_bytes()
        assert remote.saved == local.saved < remote.tensors
    (tmp_path / "a.pth.gz").write_bytes(gzip.compress(b"packed"))
    with pytest.raises(UnsupportedContainerError) as refused:
        repair(server.url("a.pth.gz"), tmp_path / "out.pth")
    assert "Unpack it first" in refused.value.fix


def test_loading(far: str, tmp_path: Path) -> None:
    expected = torch.load(tmp_path / "far" / "a.pth", weights_only=True)
    found = load_state_dict(f"{far}a.pth")
    assert all(torch.equal(found[name], tensor) for name, tensor in expected.items())
    model: Any = torch.nn.Module()
    for name in ("l0", "l1", "l2"):
        model.add_module(name, torch.nn.Linear(SIZE, SIZE, bias=False))
    model.l0.bias = torch.nn.Parameter(torch.zeros(3))
    assert load_into(model, f"{far}b.pth")
    assert torch.equal(model.l2.weight, expected["l2.weight"] + 1)


def test_what_goes_to_no_address(memory: Any, tmp_path: Path) -> None:
    """Pages, plans, digests and repaired files are written here only; nothing far away is edited in place."""
    torch.save(small_model().state_dict(), tmp_path / "a.pth")
    path = str(tmp_path / "a.pth")
    for arguments in (
        ["report", path, "-o", "memory://x/page.html"], ["repair", path, "memory://x/a.pth"],
        ["check", path, "--digest", "-o", "memory://x/a.digest"], ["match", path, "--like", path, "-o", "memory://x/plan.toml"],
    ):  # fmt: skip
        result = ckpt(*arguments, code=3)
        assert "memory://x/" in result.stderr
        assert "Write a local file, and copy it." in result.stderr
    assert not memory.store
    with pytest.raises(OutputError, match="not on this machine"):
        edit_in_place("memory://x/a.pth", add_module=True)


def test_what_is_not_there(server: Server, memory: Any) -> None:
    """A missing object is one sentence for every command, and check asks for it once."""
    for url in (server.url("none.pth"), "memory://none.pth"):
        asked = len(server.requests)
        assert check(url).verdict == "unreadable"
        assert len(server.requests) - asked <= 1
        with pytest.raises(MissingFileError):
            stats(url)
        with pytest.raises(MissingFileError):
            diff(url, url)


def test_only_what_is_needed_is_fetched(server: Server, tmp_path: Path) -> None:
    """match and a diff of structures fetch no tensors; stats, check and average fetch each byte about once."""
    torch.save({f"t{i}.w": torch.randn(1000, 1000) for i in range(4)}, tmp_path / "a.pth")
    size = (tmp_path / "a.pth").stat().st_size
    url = server.url("a.pth")
    for arguments, most in (
        (["match", url, "--like", str(tmp_path / "a.pth")], 0.05),
        (["diff", url, str(tmp_path / "a.pth"), "--no-contents"], 0.05), (["stats", url], 1.2), (["check", url], 1.2),
        (["diff", url, str(tmp_path / "a.pth")], 1.2),
        (["average", url, str(tmp_path / "a.pth"), str(tmp_path / "mean.pth")], 1.2),
    ):  # fmt: skip
        server.sent = 0
        ckpt(*arguments)
        assert server.sent < most * size, arguments
