"""`ckpt convert IN... --to-dir DIR`: many inputs alike, one bad file stops no other."""

import json
from pathlib import Path

import pytest

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


def test_json_is_a_document_for_each(tmp_path: Path, cut: Path) -> None:
    """In the order of the inputs a report, or the error in its place, each as its schema has it."""
    result = run("convert", SINGLE, cut, DDP, "--to-dir", tmp_path / "out", "--json")
    documents = list(map(json.loads, result.stdout.splitlines()))
    for document, name in zip(documents, ("convert", "error", "convert"), strict=True):
        validator(name).validate(document)
    assert [document.get("source") or document["path"] for document in documents] == [str(SINGLE), str(cut), str(DDP)]
    assert result.exit_code == 3


def test_a_folder_of_files_is_told_how_all_are_taken(tmp_path: Path) -> None:
    """The folder in the place of one of its files is refused, with the command that takes them."""
    (tmp_path / "a b").mkdir()
    for name in ("1.pth", "2.pth"):
        (tmp_path / "a b" / name).write_bytes(DDP.read_bytes())
    refused = ckpt("convert", tmp_path / "a b", tmp_path / "out.pth", code=3)
    assert f"ckpt convert '{tmp_path}/a b' --to-dir DIR takes all of them." in " ".join(refused.output.split())
    ckpt("convert", tmp_path / "a b", "--to-dir", tmp_path / "out")
    assert {path.name for path in (tmp_path / "out").iterdir()} == {"1.pth", "2.pth"}
