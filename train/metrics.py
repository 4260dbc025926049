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
from torch import Tensor

from train.config import Config, refuse
from train.data import needed
from train.folder import whole, write_text

Batch = tuple[Tensor, Tensor]
CURVES = ("epoch", "loss", "test_loss", "test_accuracy", "lr", "seconds")


class Log:
    """The records of one run, kept by rank 0; `silent` on the others.

    `epoch` is where the run starts, `rows` what the file says: what an abandoned run wrote about later epochs is dropped.
    """

    def __init__(self, config: Config, epoch: int, rows: list[dict[str, Any]], *, silent: bool = False) -> None:
        self.path, self.epochs, self.silent = config.out / "metrics.jsonl", config.epochs, silent
        self.rows = [row for row in rows if row["epoch"] <= epoch]
        sentence = "--tensorboard needs the package: pip install -e '.[tensorboard]'"
        board = needed("torch.utils.tensorboard", sentence) if config.tensorboard else None
        self.board = board.SummaryWriter(str(config.out), purge_step=epoch + 1) if board and not silent else None

    def __enter__(self) -> "Log":
        return self

    def say(self, line: str) -> None:
        """Prints a line."""
        if not self.silent:
            click.echo(line)

    def shown(self, batches: Iterable[Batch], total: int) -> Iterable[Batch]:
        """The batches, with a bar on a terminal that goes away at the end."""
        hidden = self.silent or not sys.stdout.isatty()
        return track(batches, "training", total=total, transient=True, disable=hidden)

    def add(self, row: dict[str, Any]) -> None:
        """Prints one epoch's figures and writes them down."""
        if self.silent:
            return
        self.rows.append(row)
        self.say(
            f"epoch {row['epoch']:3d}/{self.epochs}  loss {row['loss']:.4f}  test accuracy {row['test_accuracy']:.2%}  "
            f"{row['seconds']:.1f} s  {row['samples_per_second']:.0f} samples/s"
        )
        write_text(self.path, "".join(json.dumps(each) + "\n" for each in self.rows))
        if self.board:
            for name in CURVES[1:-1]:
                self.board.add_scalar(name, row[name], row["epoch"])

    def __exit__(self, failure: object, *_: object) -> None:
        """Closes the TensorBoard file; says what an epoch took and draws the curves, of a run that ended well."""
        if self.board:
            self.board.close()
        if self.rows and not self.silent and not failure:
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
