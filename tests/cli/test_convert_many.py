"""`ckpt convert IN... --to-dir DIR`: many inputs alike, one bad file stops no other."""

import json
import re
from pathlib import Path

import pytest
from safetensors.torch import load_file

from tests.cli.test_json_schemas import validator
from tests.support.commands import ckpt
from tests.support.samples import FIXTURES
from tests.support.terminal import run

DDP, SINGLE = FIXTURES / "ddp.pth", FIXTURES / "single.pth"


@pytest.fixture
def cut(tmp_path: Path) -> Path:
    path = tmp_path / "cut.pth"
    path.write_bytes(DDP.read_bytes()[:3000])
    return path


def test_one_bad_file_stops_no_other(tmp_path: Path, cut: Path) -> None:
    """The others are written as each alone would be, the table has a line for each, the exit code is the worst."""
    out = tmp_path / "deep" / "out"
    options = ["--to-dir", out, "--format", "safetensors", "--unwrap"]
    done = run("convert", DDP, cut, SINGLE, *options)
    assert done.exit_code == 3
    assert f"Error: {cut}: The zip directory" in done.stderr
    assert re.search(rf"^{re.escape(str(cut))} +refused$", done.stdout, re.M)
    assert re.search(rf"^{re.escape(str(DDP))} +{re.escape(str(out))}/ddp.safetensors +11 +11 ", done.stdout, re.M)
    assert re.search(r"^wrote 2 of 3 files, .*; 1 refused; --json shows the notes$", done.stdout, re.M)
    assert sorted(path.name for path in out.iterdir()) == ["ddp.safetensors", "single.safetensors"]
    ckpt("convert", DDP, tmp_path / "alone.safetensors", "--unwrap")
    assert (out / "ddp.safetensors").read_bytes() == (tmp_path / "alone.safetensors").read_bytes()
    assert set(load_file(out / "single.safetensors")) == set(load_file(out / "ddp.safetensors"))


def test_json_is_a_document_for_each(tmp_path: Path, cut: Path) -> None:
    """In the order of the inputs a report, or the error in its place, each as its schema has it."""
    result = run("convert", SINGLE, cut, DDP, "--to-dir", tmp_path / "out", "--json")
    documents = list(map(json.loads, result.stdout.splitlines()))
    for document, name in zip(documents, ("convert", "error", "convert"), strict=True):
        validator(name).validate(document)
    assert [document.get("source") or document["path"] for document in documents] == [str(SINGLE), str(cut), str(DDP)]
    assert result.exit_code == 3


@pytest.mark.parametrize("options", [[], ["--overwrite"]])
def test_two_inputs_of_one_name_are_refused_first(tmp_path: Path, options: list[str]) -> None:
    """Before anything is written, with both names; so is an output that is one of the inputs."""
    (tmp_path / "a").mkdir()
    for path in (tmp_path / "a" / "ddp.pth", tmp_path / "a" / "other.pth"):
        path.write_bytes(DDP.read_bytes())
    twice = ckpt("convert", SINGLE, DDP, tmp_path / "a" / "ddp.pth", "--to-dir", tmp_path / "out", *options, code=2)
    assert f"'{DDP}', '{tmp_path}/a/ddp.pth'" in twice.output
    assert not (tmp_path / "out").exists()
    same = ckpt("convert", SINGLE, tmp_path / "a" / "ddp.pth", "--to-dir", tmp_path / "a", *options, code=2)
    assert "is the input" in same.output
    assert not (tmp_path / "a" / "single.pth").exists()


def test_all_files_of_a_folder_are_taken(tmp_path: Path) -> None:
    """The folder in the place of one of its files is refused, with what is in it; `--to-dir` takes all."""
    (tmp_path / "a b").mkdir()
    for name in ("1.pth", "2.pth"):
        (tmp_path / "a b" / name).write_bytes(DDP.read_bytes())
    refused = ckpt("convert", tmp_path / "a b", tmp_path / "out.pth", code=3)
    assert "Name a checkpoint in it: 1.pth, 2.pth." in " ".join(refused.output.split())
    ckpt("convert", tmp_path / "a b", "--to-dir", tmp_path / "out")
    assert {path.name for path in (tmp_path / "out").iterdir()} == {"1.pth", "2.pth"}
