"""`ckpt convert IN... --to-dir DIR`: many inputs alike, one bad file stops no other."""

from __future__ import annotations

import gzip
import json
import re
import subprocess
import sys
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
    """A file that was cut off."""
    path = tmp_path / "cut.pth"
    path.write_bytes(DDP.read_bytes()[:3000])
    return path


@pytest.mark.parametrize("jobs", [1, 3])
def test_one_bad_file_stops_no_other(tmp_path: Path, cut: Path, jobs: int) -> None:
    """The others are written as each alone would be, the table has a line for each, the exit code is the worst."""
    out = tmp_path / "deep" / "out"
    options = ["--to-dir", out, "--format", "safetensors", "--unwrap", "--jobs", jobs]
    command = [sys.executable, "-m", "ckpt_tools", "convert", DDP, cut, SINGLE, *options]
    done = subprocess.run(list(map(str, command)), capture_output=True, text=True)
    assert done.returncode == 3
    assert f"Error: {cut}: The zip directory" in done.stderr
    assert re.search(rf"^{re.escape(str(cut))} +refused$", done.stdout, re.M)
    assert re.search(rf"^{re.escape(str(DDP))} +{re.escape(str(out))}/ddp.safetensors +11 +11 ", done.stdout, re.M)
    assert re.search(r"^wrote 2 of 3 files, .*; 1 refused$", done.stdout, re.M)
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


def test_all_done_is_zero(tmp_path: Path) -> None:
    """Where nothing failed the exit code says so, and --quiet prints nothing; a dry run writes nothing."""
    dry = run("convert", SINGLE, DDP, "--to-dir", tmp_path / "out", "--dry-run")
    assert "would write 2 of 2 files" in dry.output
    assert not (tmp_path / "out").exists()
    done = run("convert", SINGLE, DDP, "--to-dir", tmp_path / "out", "--quiet")
    assert (done.exit_code, done.output) == (0, "")
    again = run("convert", SINGLE, "--to-dir", tmp_path / "out")
    assert (again.exit_code, "--overwrite" in again.output) == (3, True)
    ckpt("convert", SINGLE, "--to-dir", tmp_path / "out", "--overwrite")


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


@pytest.mark.parametrize(
    ("options", "names"),
    [
        ([], {"a.ckpt", "b.pth", "c.bin"}), (["--format", "safetensors"], {"a.safetensors", "b.safetensors", "c.safetensors"}),
        (["--format", "pth-legacy"], {"a.pth", "b.pth", "c.pth"}), (["--shard-size", "5GB"], {"a", "b", "c"}),
    ],
)  # fmt: skip
def test_names_of_outputs(options: list[str], names: set[str], tmp_path: Path) -> None:
    """An output has its input's name, with the extension of the format; of what is packed `.pth`."""
    files = [tmp_path / name for name in ("a.ckpt", "b.tar.gz", "c.bin")]
    for file in files:
        file.write_bytes(gzip.compress(SINGLE.read_bytes()) if file.suffix == ".gz" else SINGLE.read_bytes())
    ckpt("convert", *files, "--to-dir", tmp_path / "out", *options)
    assert {path.name for path in (tmp_path / "out").iterdir()} == names


def test_the_folder_cannot_be_made(tmp_path: Path) -> None:
    """A file where the folder should be is one error, before the first input is read."""
    (tmp_path / "out").write_text("")
    result = ckpt("convert", SINGLE, "--to-dir", tmp_path / "out" / "below", code=3)
    assert result.output.count("Error: ") == 1


def test_a_folder_of_files_is_told_how_all_are_taken(tmp_path: Path) -> None:
    """The folder in the place of its files is refused, with the command that takes them."""
    (tmp_path / "a b").mkdir()
    for name in ("1.pth", "2.pth"):
        (tmp_path / "a b" / name).write_bytes(DDP.read_bytes())
    refused = ckpt("convert", tmp_path / "a b", "--to-dir", tmp_path / "out", code=3)
    assert f"ckpt convert '{tmp_path}/a b'/*.pth --to-dir DIR takes all of them." in " ".join(refused.output.split())
