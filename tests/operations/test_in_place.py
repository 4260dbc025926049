"""Edits in place: what they refuse, and links; files that are no weights go with the weights into another folder."""

import json
import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file
from torch.distributed import checkpoint as dcp

import ckpt_tools
from ckpt_tools.errors import ChangedFileError, ConvertError
from tests.support.commands import ckpt
from tests.support.rank_files import fsdp2, save_ranks

FIXTURES = Path(__file__).parents[2] / "fixtures"


def weights(count: int = 12) -> dict[str, torch.Tensor]:
    made = {f"module.layer.{index}.weight": torch.full((30, 40), float(index)) for index in range(count)}
    made["module.head.weight"] = made["module.layer.0.weight"]
    made["module.view.weight"] = torch.arange(100.0)[10:90:2]
    return made


@pytest.fixture
def pth(tmp_path: Path) -> Path:
    path = tmp_path / "model.pth"
    torch.save({"model": weights(), "epoch": 3}, path)
    return path


@pytest.mark.parametrize("options", [["out.pth"], ["--shard-size", "1GB"], ["--overwrite"], ["--format", "pth"]])
def test_what_does_not_go_in_place(pth: Path, options: list[str], tmp_path: Path) -> None:
    """An OUT, and options about one, are refused before anything is read."""
    old = pth.read_bytes()
    ckpt("convert", pth, "--in-place", "--strip-module", *options, code=2)
    assert pth.read_bytes() == old


def test_links_are_followed(pth: Path, tmp_path: Path) -> None:
    link = tmp_path / "link.pth"
    link.symlink_to(pth)
    ckpt_tools.edit_in_place(link, strip_module=True)
    assert link.is_symlink()
    assert "layer.0.weight" in torch.load(pth)["model"]


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
def test_a_part_of_a_distributed_checkpoint(tmp_path: Path) -> None:
    """Found by an attack: torch found no archive any more where .metadata says that it lies, and check found nothing."""
    folder, link = tmp_path / "saved", tmp_path / "link.pth"
    dcp.save({"module.a": torch.ones(10)}, checkpoint_id=folder, no_dist=True)
    part = folder / "__0_0.distcp"
    link.symlink_to(part)
    old = part.read_bytes()
    assert ckpt_tools.check(folder, ignore=["wrapper-prefix"]).verdict == "healthy"
    for path in (part, link):
        with pytest.raises(ConvertError, match=r"ckpt convert \S*saved OUT"):
            ckpt_tools.edit_in_place(path, map_location="cuda")
    assert part.read_bytes() == old
    for changed in (old[:-100], old[:-22] + b"x" * 22, b"PK\3\4", b""):
        part.write_bytes(changed)
        report = ckpt_tools.check(folder)
        assert report.exit_code
        assert report.container is None or "misplaced-chunk" in {row.code for row in report.findings}
    part.write_bytes(old)
    part.rename(tmp_path / "alone.distcp")
    ckpt_tools.edit_in_place(tmp_path / "alone.distcp", map_location="cuda")


@pytest.mark.parametrize("part", [
    "parts/fsdp2/model_world_size_4_rank_1.pt", "parts/consolidated/consolidated.01.pth",
    "megatron/tp3/iter_0000002/mp_rank_01/model_optim_rng.pt", "frameworks/types.gguf",
])  # fmt: skip
def test_what_is_refused(part: str, tmp_path: Path) -> None:
    """A rank's part would become the whole model, and the blocks of a GGUF floats."""
    shutil.copytree(FIXTURES / part.rpartition("/")[0], tmp_path / "in")
    path = tmp_path / "in" / part.rpartition("/")[2]
    old = path.read_bytes()
    with pytest.raises(ConvertError):
        ckpt_tools.edit_in_place(path, add_prefix="q.")
    assert path.read_bytes() == old


def test_a_file_that_is_replaced_meanwhile_stays(pth: Path) -> None:
    """Another program put a newer file in its place: that is not overwritten."""

    def progress(done: int, total: int) -> None:
        if done == total:
            torch.save({"newer": torch.ones(2)}, pth.with_name("new"))
            pth.with_name("new").replace(pth)

    with pytest.raises(ChangedFileError, match="was replaced"):
        ckpt_tools.edit_in_place(pth, strip_module=True, progress=progress)
    assert list(torch.load(pth)) == ["newer"]


CONFIG = b'{"architectures": ["Net"], "torch_dtype": "float32"}\n'
TAKEN = {
    "LICENSE": b"Apache-2.0\n", "chat_template.jinja": b"{{ messages }}", "config.json": CONFIG,
    "generation_config.json": b"{}", "merges.txt": b"#version: 0.2\n", "tokenizer.model": b"\n\x0e\n\x05<unk>\x15\0\0\0\0",
    "tokenizer_config.json": b"{ }", "vocab.txt": b"",
}  # fmt: skip


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Two shards by safetensors with their index, and what Hugging Face's libraries put beside them."""
    path = tmp_path / "in"
    path.mkdir()
    names = ["model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors"]
    save_file({"a": torch.ones(3)}, path / names[0])
    save_file({"b": torch.zeros(2)}, path / names[1])
    (path / "model.safetensors.index.json").write_text(
        json.dumps({"metadata": {}, "weight_map": {"a": names[0], "b": names[1]}})
    )
    for name, content in TAKEN.items():
        (path / name).write_bytes(content)
    return path


@pytest.mark.parametrize("options", [{"shard_size": "1KB"}, {"shard_size": 1, "format": "pth"}, {"format": "dcp"}])
def test_they_come_along(folder: Path, tmp_path: Path, options: dict[str, str]) -> None:
    """Configuration, tokenizer and licence arrive byte for byte in every kind of folder; only they are called companions."""
    report = ckpt_tools.convert(folder, tmp_path / "out", **options)  # type: ignore[arg-type]
    assert report.companions == sorted(TAKEN)
    assert report.stayed == []
    assert {name: (tmp_path / "out" / name).read_bytes() for name in TAKEN} == TAKEN
    assert ckpt_tools.diff(folder, tmp_path / "out").same
    own = [path for path in (tmp_path / "out").iterdir() if path.name not in TAKEN]
    assert len(own) == report.files + 1  # and the index


def test_links_of_a_cache(folder: Path, tmp_path: Path) -> None:
    """Hugging Face's cache keeps a model's files in blobs/ and links to them: those come along; others stay."""
    model = tmp_path / "models--owner--name"
    (model / "blobs").mkdir(parents=True)
    (model / "snapshots").mkdir()
    snapshot = model / "snapshots" / "c0ffee"
    folder.rename(snapshot)
    for number, path in enumerate(sorted(snapshot.iterdir())):
        path.rename(model / "blobs" / str(number))
        path.symlink_to(f"../../blobs/{number}")
    (tmp_path / "secret.json").write_text("secret")
    (snapshot / "special_tokens_map.json").symlink_to(tmp_path / "secret.json")
    (snapshot / "added_tokens.json").symlink_to("../../blobs/none")
    report = ckpt_tools.convert(snapshot, tmp_path / "out", shard_size="1KB")
    assert report.companions == sorted(TAKEN)
    assert {name: (tmp_path / "out" / name).read_bytes() for name in TAKEN} == TAKEN
    assert not any((tmp_path / "out" / name).is_symlink() for name in TAKEN)
    assert dict(report.stayed) == {"special_tokens_map.json": "a link", "added_tokens.json": "a link"}


def test_verls_folder(tmp_path: Path) -> None:
    """From `huggingface/` beside the files of the ranks into the output itself; what tells of the parts stays."""
    folder = tmp_path / "actor"
    save_ranks(folder, fsdp2, 2)
    (folder / "fsdp_config.json").write_text('{"FSDP_version": 2, "world_size": 2}')
    inner = folder / "huggingface"
    inner.mkdir()
    (inner / "config.json").write_bytes(CONFIG)
    (inner / "tokenizer.json").write_bytes(b"{}")
    (inner / "modeling.py").write_bytes(b"")
    save_file({"w": torch.ones(1)}, inner / "model.safetensors")
    for place, name in ((folder, "whole"), (folder / "model_world_size_2_rank_1.pt", "by-one")):
        report = ckpt_tools.convert(place, tmp_path / name, shard_size="1GB")
        assert report.companions == ["huggingface/config.json", "huggingface/tokenizer.json"]
        assert dict(report.stayed) == {
            "fsdp_config.json": "about the parts", "huggingface/model.safetensors": "another checkpoint",
            "huggingface/modeling.py": "code",
        }  # fmt: skip
        assert (tmp_path / name / "config.json").read_bytes() == CONFIG
        assert not (tmp_path / name / "huggingface").exists()


def test_the_folders_own_file_is_taken_before_the_inner_one(tmp_path: Path) -> None:
    """A config.json in both places: that beside the ranks comes along, the other stays and is said.

    What the input keeps to its owner the output does too, also from the inner folder.
    """
    save_ranks(tmp_path / "in", fsdp2, 1)
    (tmp_path / "in" / "huggingface").mkdir()
    for name, content in (("huggingface/config.json", b"{}"), ("config.json", CONFIG)):
        (tmp_path / "in" / name).write_bytes(content)
        (tmp_path / "in" / name).chmod(0o600)
        report = ckpt_tools.convert(tmp_path / "in", tmp_path / "out", format="dcp", overwrite=True)
        assert (tmp_path / "out" / "config.json").read_bytes() == content
        assert (tmp_path / "out" / "config.json").stat().st_mode & 0o777 == 0o600
    assert report.stayed == [("huggingface/config.json", "config.json is there already")]


def test_a_folder_that_is_there(folder: Path, tmp_path: Path) -> None:
    """With `overwrite` they replace those of the checkpoint that was there; what else is there stays."""
    out = tmp_path / "out"
    out.mkdir()
    (out / "config.json").write_bytes(b"old")
    (out / "mine.txt").write_bytes(b"mine")
    ckpt_tools.convert(folder, out, shard_size="1KB", overwrite=True)
    assert (out / "config.json").read_bytes() == CONFIG
    assert (out / "mine.txt").read_bytes() == b"mine"
