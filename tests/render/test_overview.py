"""`ckpt inspect FOLDER`: one table of the checkpoints in it, a line each."""

from __future__ import annotations

import re
import shutil
from pathlib import Path

import pytest
import torch

from tests.support.commands import ckpt
from tests.support.samples import FIXTURES
from tests.support.terminal import page, run


@pytest.fixture
def runs(tmp_path: Path) -> Path:
    """A folder of a run: two epochs, weights on a GPU, and notes."""
    (tmp_path / "runs" / "a").mkdir(parents=True)
    for epoch in (1, 2):
        model = {"module.fc.weight": torch.ones(3, 2), "module.fc.bias": torch.ones(3)}
        torch.save({"model": model, "epoch": epoch, "global_step": 100 * epoch}, tmp_path / "runs" / "a" / f"epoch_{epoch}.pth")
    (tmp_path / "runs" / "plain.pth").write_bytes((FIXTURES / "single.pth").read_bytes())
    (tmp_path / "runs" / "notes.txt").write_text("no checkpoint")
    return tmp_path / "runs"


def test_a_folder_is_a_table(runs: Path) -> None:
    """Each checkpoint is a line of file, container, tensors, size, verdict and step; nothing is left out unsaid."""
    result = ckpt("inspect", runs)
    assert re.search(r"^a/epoch_2\.pth +torch-zip +2 +[\d.]+ KiB +wrapper-prefix +epoch 2, step 200$", result.output, re.M)
    assert re.search(r"^plain\.pth +torch-zip +11 +5\.1 KiB +loads$", result.output, re.M)
    assert result.output.startswith(f"{runs}: 3 checkpoints, ")
    assert "ckpt inspect FILE shows one of them, --all every one" in result.output
    assert "1 file is not a checkpoint: notes.txt" in result.output
    assert "module.fc" not in result.output


def test_a_folder_with_one_checkpoint_is_its_page(runs: Path) -> None:
    """One checkpoint in a folder, or a folder that is one, has its page."""
    (runs / "plain.pth").unlink()
    (runs / "a" / "epoch_1.pth").unlink()
    assert "module.fc.{weight, bias}" in run("inspect", runs).output
    assert "state dict" in run("inspect", FIXTURES / "parts" / "fsdp2").output


def test_verdicts_name_what_stands_in_the_way(tmp_path: Path) -> None:
    """Codes of warnings, and of the device that the file was saved on; of a file that would run something, that first."""
    for name in ("cuda.pth", "single.pth", "whole_module.pth"):
        (tmp_path / name).write_bytes((FIXTURES / name).read_bytes())
    (tmp_path / "evil.pth").write_bytes(b"\x80\x02cposix\nsystem\nX\x02\x00\x00\x00id\x85R.")
    output = run("inspect", tmp_path).stdout
    assert re.search(r"^cuda\.pth .* wrapper-prefix, device-tags$", output, re.M)
    assert re.search(r"^whole_module\.pth .* weights-only-refused$", output, re.M)
    assert re.search(r"^evil\.pth .* dangerous\b", output, re.M)


def test_a_code_is_not_broken_on_a_terminal(tmp_path: Path) -> None:
    """On 80 columns each verdict's code stands whole in a line beside long names, several of them below each other."""
    for name in ("cuda", "whole_module", "namespace"):
        shutil.copy(FIXTURES / f"{name}.pth", tmp_path / f"a_name_that_takes_half_of_a_narrow_line_{name}.pth")
    made = {"module.w": torch.ones(2), "epoch": 100_000, "global_step": 10_000_000}
    torch.save(made, tmp_path / "epoch.pth")
    lines = page("inspect", tmp_path, width=80).splitlines()
    assert sum("weights-only-refused" in line for line in lines) == 2
    assert any(line.rstrip().endswith("wrapper-prefix,") for line in lines)
