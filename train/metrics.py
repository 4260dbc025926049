"""What a run tells: a line an epoch, `metrics.jsonl`, `curves.png`, and TensorBoard events where they are asked for."""

import importlib
import json
from io import BytesIO
from pathlib import Path
from typing import Any

import click
from torch import nn

from train.checkpoint import write_bytes
from train.config import Config, refusing
from train.parallel import World


def header(config: Config, world: World, network: nn.Module) -> str:
    """What trains where: network, parameters, ranks and devices, and how much of a batch each has."""
    share = config.batch_size // (world.size * len(world.devices))
    where = f"{world.size} ranks, this one on " * (world.size > 1) + ", ".join(map(str, world.devices))
    rounding = "; on CUDA two runs may round differently" if world.device.type == "cuda" else ""
    size = f"{parameters(network):,} parameters"
    return f"{config.model}, {size}; {config.parallel} on {where}; batches of {config.batch_size}, {share} on each{rounding}"


def parameters(network: nn.Module) -> int:
    """How many numbers are trained."""
    return sum(parameter.numel() for parameter in network.parameters())


class Log:
    """What rank 0 says and writes; the others keep the rows, of which every checkpoint has those before it."""

    def __init__(self, config: Config, world: World) -> None:
        self.config, self.path, self.speaks = config, config.out / "metrics.jsonl", world.rank == 0
        self.rows: list[dict[str, Any]] = []
        self.board: Any = None
        if config.tensorboard:
            with refusing("--tensorboard needs the package, pip install -e '.[tensorboard]'", ImportError):
                self.events = importlib.import_module("torch.utils.tensorboard")

    def say(self, line: str) -> None:
        """Prints a line."""
        if self.speaks:
            click.echo(line)

    def add(self, row: dict[str, Any]) -> None:
        """Prints one epoch's figures and writes them down, after those of the epochs before."""
        self.rows.append(row)
        figures = "loss {loss:.4f}  test accuracy {test_accuracy:.2%}  {seconds:.1f} s  {samples_per_second:.0f} samples/s"
        self.say(f"epoch {row['epoch']:3d}/{self.config.epochs}  {figures.format(**row)}")
        if self.speaks:
            write_bytes(self.path, "".join(json.dumps(each) + "\n" for each in self.rows).encode())
        if self.speaks and self.config.tensorboard:
            self.board = self.board or self.events.SummaryWriter(str(self.config.out), purge_step=row["epoch"])
            for name in ("loss", "test_loss", "test_accuracy", "lr"):
                self.board.add_scalar(name, row[name], row["epoch"])

    def end(self) -> None:
        """Says what an epoch took, draws the curves, closes TensorBoard's file."""
        if self.rows and self.speaks:
            self.say(f"average {sum(row['seconds'] for row in self.rows) / len(self.rows):.1f} s an epoch")
            draw(self.rows, self.path.with_name("curves.png"))
        if self.board:
            self.board.close()


def draw(rows: list[dict[str, Any]], path: Path) -> None:
    """A picture of loss and test accuracy over the epochs."""
    try:
        figures = importlib.import_module("matplotlib.figure")
    except ImportError:
        click.echo(f"no {path.name}: pip install matplotlib to have the curves drawn")
        return
    figure = figures.Figure(layout="constrained")
    for place, names in ((211, ("loss", "test_loss")), (212, ("test_accuracy",))):
        axes = figure.add_subplot(place, xlabel="epoch")
        for name in names:
            axes.plot([row["epoch"] for row in rows], [row[name] for row in rows], label=name)
        axes.legend()
    figure.savefig(picture := BytesIO(), format="png", dpi=120)
    write_bytes(path, picture.getvalue())
