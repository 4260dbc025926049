"""The page of `ckpt inspect` on large files: weights first, shared prefixes once, layers as ranges, optimizers in a line."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from tests.support.terminal import page, run


class Block(nn.Module):
    """One layer of a small network."""

    def __init__(self) -> None:
        super().__init__()
        self.query = nn.Linear(6, 6, bias=False)
        self.norm = nn.LayerNorm(6)


def trained(optimizer: type[torch.optim.Optimizer], **settings: Any) -> tuple[nn.Module, torch.optim.Optimizer]:
    """A network of twelve layers and its optimizer, after a step."""
    network = nn.ModuleDict({"layers": nn.ModuleList([Block() for _ in range(12)]), "head": nn.Linear(6, 3)})
    used = optimizer(network.parameters(), **settings)
    for parameter in network.parameters():
        parameter.grad = torch.ones_like(parameter)
    used.step()
    return network, used


@pytest.fixture
def training(tmp_path: Path) -> Path:
    """A checkpoint as a script under DDP saves it, its optimizer first, with averaged weights last."""
    network, adam = trained(torch.optim.AdamW, lr=0.1)
    weights = network.state_dict()
    saved = {"optimizer": adam.state_dict(), "model": {f"module.{name}": each for name, each in weights.items()}}
    torch.save({**saved, "epoch": 3, "ema": {name: each.clone() for name, each in weights.items()}}, tmp_path / "in.pth")
    return tmp_path / "in.pth"


def shown(path: Path, *options: str) -> str:
    """The page of a file."""
    return page("inspect", path, *options, width=200)


def test_weights_come_first_and_the_optimizer_is_a_line(training: Path) -> None:
    """The table begins with the model although the file begins with the optimizer, of which one line says what it keeps."""
    page = shown(training)
    assert page.index("layers.{0-11}.query.weight") < page.index("optimizer  ")
    assert "optimizer: like Adam, 114 states (step, exp_avg, exp_avg_sq), " in page
    assert "optimizer.state" not in page
    assert "--all opens it" in page


def test_layers_are_ranges_below_their_prefix(training: Path) -> None:
    """What all names begin with stands once, and repeated layers are one line with their number."""
    page = shown(training)
    assert page.count("model.module.") == 2  # the heading, and what the averaged weights are named as
    assert "\n  layers.{0-11}.query.weight" in page
    assert "12 x [6, 6]" in page
    assert "24 x [6]" in page


def test_a_second_copy_of_the_weights_is_a_line(training: Path) -> None:
    """A state dict whose tensors are named and shaped as an earlier one's is said to be so; one that is not is listed."""
    assert "ema.* (38 tensors, named and shaped as model.module.*)" in shown(training)
    saved = torch.load(training, weights_only=True)
    saved["ema"]["head.bias"] = torch.zeros(4)
    torch.save(saved, training)
    assert "\nema.\n" in shown(training)


@pytest.mark.parametrize("view", ["--all", "--flat", "--filter optimizer*", "--tree --all"])
def test_what_is_closed_can_be_opened(view: str, training: Path) -> None:
    """`--all`, `--flat`, `--tree` and a filter show the optimizer's tensors, and no line in their place."""
    page = shown(training, *view.split())
    assert "exp_avg_sq" in page
    assert "like Adam" not in page


def test_a_file_of_an_optimizer_alone_shows_its_states(tmp_path: Path) -> None:
    """Where there is nothing else, what the optimizer keeps is the table."""
    torch.save(trained(torch.optim.Adam)[1].state_dict(), tmp_path / "optimizer.pt")
    assert "state.{0-37}.{step, exp_avg, exp_avg_sq}" in shown(tmp_path / "optimizer.pt")


@pytest.mark.parametrize(
    ("optimizer", "settings", "like"),
    [
        (torch.optim.SGD, {"momentum": 0.9}, "like SGD with momentum, 38 states (momentum_buffer)"),
        (torch.optim.Adam, {"amsgrad": True}, "like Adam with amsgrad, 152 states"),
        (torch.optim.RMSprop, {}, "like RMSprop, 76 states (step, square_avg)"),
        (torch.optim.Adamax, {}, "optimizer: 114 states (step, exp_avg, exp_inf)"),
    ],
)
def test_optimizers_are_told_by_their_states(
    optimizer: type[torch.optim.Optimizer], settings: dict[str, float], like: str, tmp_path: Path
) -> None:
    """Whose words the states are is said where they are known, and else the words alone."""
    network, used = trained(optimizer, **settings)
    torch.save({"model": network.state_dict(), "optimizer": used.state_dict()}, tmp_path / "in.pth")
    assert like in shown(tmp_path / "in.pth")


def test_experts_in_layers_are_one_line(tmp_path: Path) -> None:
    """Names with two numbers are folded by both; a number that never changes does not hide the one that does."""
    experts = {f"model.layers.{i}.experts.{j}.w1.weight": torch.ones(4, 2) for i in range(3) for j in range(5)}
    blocks = {f"0.layers.{i}.proj.weight": torch.ones(2, 2) for i in range(3)}
    torch.save(experts | blocks, tmp_path / "in.pth")
    page = shown(tmp_path / "in.pth")
    assert "model.layers.{0-2}.experts.{0-4}.w1.weight  15 x [4, 2]" in page
    assert "0.layers.{0-2}.proj.weight                  3 x [2, 2]" in page


def test_padded_numbers_are_shown_as_they_are(tmp_path: Path) -> None:
    """`layer.00` ... fold as `layer.0` ... do, under names that exist; `x.1` and `x.01` are two."""
    padded = {f"layer.{i:02}.weight": torch.ones(3, 3) for i in (*range(12), 100)}
    mixed = {f"x.{number}.w": torch.ones(1) for number in ("01", "02", "1", "2", "12345678901")}
    torch.save(padded | mixed | {f"y.{i:03}.w": torch.ones(2) for i in (8, 9, 10)}, tmp_path / "in.pth")
    page = shown(tmp_path / "in.pth")
    for name in ("layer.{00-11,100}.weight  13 x [3, 3]", "x.{01-02}.w ", "x.{1-2}.w ", "x.12345678901.w ", "y.{008-010}.w "):
        assert name in page


def test_a_folded_name_is_no_wider_than_a_terminal_in_a_pipe(tmp_path: Path) -> None:
    """Of a module with very many leaves the first stand there, and how many more; `--all` has each whole name."""
    torch.save({f"block.weight_of_part_{i}": torch.ones(i % 3 + 1) for i in range(30)}, tmp_path / "in.pth")
    few = run("inspect", tmp_path / "in.pth").stdout
    table = few[few.index("\ntensor") :]
    assert "block.{weight_of_part_0, weight_of_part_1, weight_of_part_2, ... 27 more}" in table
    assert max(map(len, table.splitlines())) < 128
    assert "block.weight_of_part_29 " in run("inspect", "--all", tmp_path / "in.pth").stdout
