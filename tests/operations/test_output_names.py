"""What an output's name says about its container; names that say something else, or two things, are refused."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

import ckpt_tools
from ckpt_tools.errors import UsageError
from ckpt_tools.torch import save
from tests.support.commands import ckpt
from tests.support.terminal import run


@pytest.fixture
def path(tmp_path: Path) -> Path:
    """A state dict."""
    torch.save({"a.weight": torch.ones(2)}, tmp_path / "in.pth")
    return tmp_path / "in.pth"


@pytest.mark.parametrize(
    ("name", "format"),
    [("a.SAFETENSORS", "safetensors"), ("best.pth.tar", "pth"), ("a.dat", "pth"), ("a.t7", "pth"), ("a.model", "pth"),
     ("a", "pth"), ("a.th", "pth"),
     ("resnet-1.5", "pth"), ("epoch=6-step=83.ckpt", "pth"), ("a.bin", "pth"), ("model.epoch10", "pth")],
)  # fmt: skip
def test_real_names(path: Path, tmp_path: Path, name: str, format: str) -> None:
    """The names that checkpoints have in real life, and names that mean nothing, say what they always said."""
    container = ckpt_tools.convert(path, tmp_path / name, dry_run=True).container
    assert container == {"pth": "torch-zip"}.get(format, format)


def test_the_format_decides(path: Path, tmp_path: Path) -> None:
    """--format is meant: any name will do."""
    ckpt_tools.convert(path, tmp_path / "a.gguf", format="pth")
    assert ckpt_tools.inspect(tmp_path / "a.gguf").container == "torch-zip"
    ckpt_tools.convert(path, tmp_path / "a.safetensor", format="safetensors")
    assert ckpt_tools.inspect(tmp_path / "a.safetensor").container == "safetensors"


@pytest.mark.parametrize("name", ["out", "llama-3.1-8B"])
@pytest.mark.parametrize("index", [False, True])
def test_a_folder_asks(path: Path, tmp_path: Path, name: str, index: bool) -> None:
    """A folder in, and out a name that a folder could have: asked, with both ways named; each of them works."""
    ckpt_tools.convert(path, tmp_path / "shards", shard_size="1KB")
    source = tmp_path / "shards" / "model.safetensors.index.json" if index else tmp_path / "shards"
    with pytest.raises(UsageError, match=f"Is .*{name} to be a file or a folder") as caught:
        ckpt_tools.convert(source, tmp_path / name)
    assert "`shard_size='5GB'`" in caught.value.fix
    with pytest.raises(UsageError, match="to be a file or a folder"):
        ckpt_tools.average([source, source], tmp_path / name)
    ckpt_tools.convert(source, tmp_path / name, shard_size="5GB")
    ckpt_tools.convert(source, tmp_path / "one", format="pth")
    ckpt_tools.convert(source, tmp_path / "two.pth")
    assert (tmp_path / name).is_dir()
    assert (tmp_path / "one").is_file()


@pytest.mark.parametrize("name", ["a.gguf", "a.safetensor", "a.th", "a.safetensors"])
def test_shards_need_a_folders_name(path: Path, tmp_path: Path, name: str) -> None:
    """--shard-size with what looks like a file's name is refused, also where the name is not a checkpoint's."""
    with pytest.raises(UsageError, match="looks like a file"):
        ckpt_tools.convert(path, tmp_path / name, shard_size="1GB")


@pytest.mark.parametrize(
    "arguments",
    [["report", "in.pth", "-o", "page.pth"], ["check", "--digest", "-o", "in.safetensors", "in.pth"],
     ["match", "in.pth", "--like", "in.pth", "-o", "plan.ckpt"]],
    ids=["report", "check", "match"],
)  # fmt: skip
def test_documents_are_not_called_checkpoints(path: Path, monkeypatch: pytest.MonkeyPatch, arguments: list[str]) -> None:
    """A page, digests, a plan: under the name of a checkpoint they are refused."""
    monkeypatch.chdir(path.parent)
    result: Any = run(*arguments)
    assert result.exit_code == 2
    assert "is a checkpoint's name" in result.stderr
    assert [file.name for file in path.parent.iterdir()] == ["in.pth"]


def test_names_of_copies(path: Path) -> None:
    """A copy's name says what the original's says, as does a name that is nothing but an extension."""
    for name in ("a.safetensors.bak", ".safetensors", "a.safetensors~", "A.SAFETENSORS.old"):
        assert ckpt_tools.convert(path, path.with_name(name), dry_run=True).container == "safetensors"
    with pytest.raises(UsageError, match="an ONNX model"):
        ckpt_tools.convert(path, path.with_name("a.onnx.bak"))


def test_a_folder_is_no_file(path: Path, tmp_path: Path) -> None:
    """A name that ends in a slash is a folder's, and no file is written under it."""
    for write in (
        lambda: ckpt_tools.convert(path, f"{tmp_path}/out/"),
        lambda: ckpt_tools.convert(path, f"{tmp_path}/out/", format="safetensors"),
        lambda: save({"a": torch.ones(1)}, f"{tmp_path}/out/"),
    ):
        with pytest.raises(UsageError, match="name of a folder"):
            write()
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("command", ["convert IN OUT/", "average IN IN OUT/", "repair IN OUT/"])
def test_what_was_typed_counts(path: Path, tmp_path: Path, command: str) -> None:
    """A slash behind OUT on the command line means a folder there too."""
    arguments = command.replace("IN", str(path)).replace("OUT", str(tmp_path / "out")).split()
    result = ckpt(*arguments, code=2)
    assert f"{tmp_path}/out/ is the name of a folder" in result.output
    assert not (tmp_path / "out").exists()
