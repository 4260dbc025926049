"""What a run tells: a line an epoch, `metrics.jsonl`, `curves.png`, and TensorBoard events where they are asked for."""

import importlib
import json
import sys
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import click
from click import UsageError
from rich.progress import track
from torch import Tensor, nn

from train.checkpoint import whole, write_text
from train.config import Config, refuse, refusing
from train.parallel import World

Batch = tuple[Tensor, Tensor]
CURVES = ("epoch", "loss", "test_loss", "test_accuracy", "lr", "seconds")


def header(config: Config, world: World, network: nn.Module) -> str:
    """What trains where: network, parameters, ranks and devices, and how much of a batch each has."""
    share = config.batch_size // (world.size * len(world.devices))
    devices = ", ".join(str(device) for device in world.devices)
    where = f"{world.size} ranks, this one on {devices}" if world.size > 1 else devices
    rounding = "; on CUDA two runs may round differently" if world.device.type == "cuda" else ""
    size = f"{parameters(network):,} parameters"
    return f"{config.model}, {size}; {world.mode} on {where}; batches of {config.batch_size}, {share} on each{rounding}"


def parameters(network: nn.Module) -> int:
    """How many numbers are trained."""
    return sum(parameter.numel() for parameter in network.parameters())


class Log:
    """The records of one run, kept by rank 0; silent on the others."""

    def __init__(self, config: Config, world: World) -> None:
        self.config, self.world, self.path, self.board = config, world, config.out / "metrics.jsonl", None
        self.rows: list[dict[str, Any]] = []

    def __enter__(self) -> "Log":
        return self

    def begin(self, epoch: int) -> None:
        """Goes on after so many epochs: what an abandoned run wrote about later ones is dropped."""
        with self.world.together():
            self.rows = [row for row in read(self.path) if row["epoch"] <= epoch] if self.world.rank == 0 else []
            if self.config.tensorboard:
                with refusing("--tensorboard needs the package, pip install -e '.[tensorboard]'", ImportError):
                    board = importlib.import_module("torch.utils.tensorboard")
                if self.world.rank == 0:
                    self.board = board.SummaryWriter(str(self.config.out), purge_step=epoch + 1)

    def say(self, line: str) -> None:
        """Prints a line."""
        if self.world.rank == 0:
            click.echo(line)

    def shown(self, batches: Iterable[Batch], total: int) -> Iterable[Batch]:
        """The batches, with a bar on a terminal that goes away at the end."""
        hidden = self.world.rank > 0 or not sys.stdout.isatty()
        return batches if hidden else track(batches, "training", total=total, transient=True)

    def step(self, epoch: int, step: int, steps: int, loss: float, seconds: float) -> None:
        """The line of `--log-every`: the loss of the epoch so far, and what a step took."""
        count = f"epoch {epoch + 1:3d}/{self.config.epochs}  step {step}/{steps}"
        self.say(f"{count}  loss {loss:.4f}  {seconds:.3f} s a step")

    def add(self, row: dict[str, Any]) -> None:
        """Prints one epoch's figures and writes them down."""
        if self.world.rank > 0:
            return
        self.rows.append(row)
        self.say(
            f"epoch {row['epoch']:3d}/{self.config.epochs}  loss {row['loss']:.4f}  test accuracy {row['test_accuracy']:.2%}  "
            f"{row['seconds']:.1f} s  {row['samples_per_second']:.0f} samples/s"
        )
        write_text(self.path, "".join(json.dumps(each) + "\n" for each in self.rows))
        if self.board:
            for name in CURVES[1:-1]:
                self.board.add_scalar(name, row[name], row["epoch"])

    @property
    def best(self) -> int:
        """After which epoch the test accuracy was highest; the first of several; 0 before there is one."""
        rows = max(self.rows, key=lambda row: row["test_accuracy"], default={"epoch": 0})
        return int(rows["epoch"])

    def __exit__(self, failure: object, *_: object) -> None:
        """Closes the TensorBoard file; says what an epoch took and draws the curves, of a run that ended well."""
        if self.board:
            self.board.close()
        if self.rows and not failure:
            self.say(f"average {sum(row['seconds'] for row in self.rows) / len(self.rows):.1f} s an epoch")
            draw(self.rows, self.path.with_name("curves.png"))


def read(path: Path) -> list[dict[str, Any]]:
    """The rows of `metrics.jsonl`, none where there is no such file. Raises UsageError for a line that no run wrote."""
    rows = []
    for number, line in enumerate(path.read_bytes().splitlines() if path.is_file() else [], start=1):
        try:
            rows.append(json.loads(line))
            refuse(any(type(rows[-1][name]) not in (int, float) for name in CURVES), "")
        except (ValueError, LookupError, TypeError, UsageError) as error:
            raise UsageError(f"{path}, line {number}, is no line of metrics: mend it, or remove the file") from error
    return rows


def draw(rows: list[dict[str, Any]], path: Path) -> None:
    """A picture of loss and test accuracy over the epochs."""
    try:
        figures = importlib.import_module("matplotlib.figure")
    except ImportError:
        click.echo(f"no {path.name}: pip install matplotlib to have the curves drawn")
        return
    figure = figures.Figure(figsize=(7, 4), layout="constrained")
    left = figure.add_subplot(xlabel="epoch", ylabel="loss")
    left.xaxis.get_major_locator().set_params(integer=True)
    right = left.twinx()
    right.set_ylabel("test accuracy")
    epochs = [row["epoch"] for row in rows]
    left.plot(epochs, [row["loss"] for row in rows], color="tab:blue", label="loss")
    left.plot(epochs, [row["test_loss"] for row in rows], color="tab:blue", linestyle="--", label="test loss")
    right.plot(epochs, [row["test_accuracy"] for row in rows], color="tab:orange", label="test accuracy")
    figure.legend(loc="outside upper center", ncols=3)
    with whole(path) as file:
        figure.savefig(file, format="png", dpi=120)
