"""What a run is asked to do: one frozen record of options, from which the command line is made."""

import importlib
import math
import operator
import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any

import click
from click import UsageError

NATURAL, COUNT = click.IntRange(min=0), click.IntRange(min=1)
POSITIVE = click.FloatRange(0, math.inf, min_open=True, max_open=True)
AMOUNT = click.FloatRange(0, math.inf, max_open=True)
SHARE = click.FloatRange(0, 1, max_open=True)
PATH, FOLDER = click.Path(path_type=Path), click.Path(path_type=Path, file_okay=False)
USUAL = {"sgd": 0.05, "adamw": 0.001}  # the learning rate where none is named
CNN, CUSTOM, DDP = ("model", "cnn", "cnn-published"), ("data", "synthetic"), ("parallel", "ddp")
SAVE = (
    "The training state: under plain names; the wrapper's names (module.); the network pickled whole, which cannot be resumed; "
    "under fsdp a folder: a file for each rank, or torch.distributed.checkpoint's."
)


class Named(click.Choice[str]):
    """One of some words, or MODULE:CALLABLE."""

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> str:
        own = isinstance(value, str) and re.fullmatch(r"[\w.]+:[\w.]+", value)
        return str(value) if own else super().convert(value, param, ctx)


class Interval(click.ParamType[str]):
    """A number of steps, or of minutes: 500, 10m."""

    name = "N|Nm"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> str:
        if not isinstance(value, str) or not re.fullmatch(r"[1-9]\d*m?", value):
            self.fail(f"{value} is neither a number of steps (500) nor of minutes (10m)", param, ctx)
        return value


def option(default: Any, sentence: str, kind: Any = None, **more: Any) -> Any:
    """One option: its default, its sentence in --help, and the values that it takes.

    A default "a|b|c" is the first of the words that there are. `often`: it is in the short --help. `under`: the option, and
    its values, that this one belongs to.
    """
    words = default.split("|") if isinstance(default, str) else [default]
    kind = click.Choice(words) if len(words) > 1 and kind is None else kind(words) if kind is Named else kind
    kind = click.types.convert_type(kind, words[0])
    return field(default=words[0], metadata={"help": sentence, "type": kind, **more})


@dataclass(frozen=True)
class Config:
    """All options. `batch_size` is what one optimizer step sees over all processes and devices."""

    model: str = option("mlp|lenet|cnn|cnn-published|resnet18", "The network; or MODULE:CALLABLE.", Named, often=True)
    width: float = option(1.0, "Multiplies every inner channel count; 1 is the published network.", POSITIVE)
    hidden: int = option(8000, "First linear layer of cnn: 8000 or 5000 as published.", COUNT, under=CNN)
    classes: int = option(0, "Outputs of the network; 0: as many as the data set has classes.", NATURAL)
    data: str = option(
        "digits|mnist|fashion-mnist|cifar10|synthetic", "The images; or MODULE:CALLABLE.", Named, often=True
    )  # fmt: skip
    data_dir: Path = option(Path("data"), "Where the files of mnist, fashion-mnist, cifar10 are.", PATH)
    shape: str = option("1x28x28", "CHANNELSxHEIGHTxWIDTH of synthetic images.", under=CUSTOM)
    samples: int = option(12_000, "How many synthetic images; a fifth is for testing.", click.IntRange(min=10), under=CUSTOM)
    out: Path = option(Path("runs"), "Folder for checkpoints and figures.", FOLDER, often=True)
    epochs: int = option(10, "Epochs in all, earlier ones included; 0 saves fresh weights.", NATURAL, often=True)
    batch_size: int = option(32, "Samples of one optimizer step, over all processes and devices.", COUNT, often=True)
    grad_accum: int = option(1, "Passes that one batch is cut into, to save memory.", COUNT)
    optimizer: str = option("sgd|adamw", "What makes the steps.", often=True)
    lr: float | None = option(None, "Learning rate.  [default: 0.05; adamw 0.001]", POSITIVE, often=True)
    momentum: float = option(0.9, "Momentum of SGD.", SHARE)
    weight_decay: float = option(0.0, "Weight decay.", AMOUNT)
    clip_norm: float = option(0.0, "Largest norm of the gradient; 0: any.", AMOUNT)
    schedule: str = option("constant|cosine", "Of the learning rate; cosine ends at 0 after --epochs.")
    warmup: int = option(0, "Steps in which the learning rate grows to its full value.", NATURAL)
    scale_lr: bool = option(False, "The linear rule: --lr is for a batch of 256, and grows with --batch-size.")
    ema: float = option(0.0, "Keep a moving average of the weights with this decay (0.999), saved as `ema`.", SHARE)
    seed: int = option(0, "Of the weights and of the order of the images.", NATURAL)
    parallel: str = option("single|dp|ddp|fsdp", "One device, DataParallel, DistributedDataParallel, FSDP2.", often=True)
    device: str = option("auto", "auto, cpu, cuda or cuda:N. Under ddp and fsdp each process has its own GPU.")
    device_ids: str | None = option(None, "The GPUs of --parallel dp: 0,1,...  [default: all]", under=("parallel", "dp"))
    local_rank: int = option(0, "What torch.distributed.launch says; torchrun does not.")
    timeout: int = option(30, "Minutes after which a process stops waiting for the others.", COUNT)
    stop_every: int = option(4, "Steps after which processes tell each other of signals.", COUNT)
    sync_bn: bool = option(False, "Under ddp on GPUs: batch statistics over all processes.", under=DDP)
    find_unused_parameters: bool = option(False, "Under ddp: a pass may skip a part of the network.", under=DDP)
    broadcast_buffers: bool = option(True, "Under ddp: rank 0's batch statistics for all before every pass.", under=DDP)
    amp: str = option("off|bf16|fp16", "Mixed precision; fp16 comes with a gradient scaler.")
    compile: bool = option(False, "torch.compile the network.")
    workers: int = option(0, "Processes that prepare batches.", NATURAL)
    weights: str = option("plain|wrapped|none", "Beside it the weights alone: plain names, or those of the mode (module.).")
    save: str = option("unwrapped|wrapped|module|ranks|dcp", SAVE)
    format: str = option("pth|safetensors", "safetensors: the weights alone, which cannot be resumed.")
    save_every: str | None = option(None, "Save also after so many steps (500) or minutes (10m).", Interval())
    keep: int | None = option(None, "How many checkpoints stay, beside the best.  [default: all]", COUNT)
    resume: str | None = option(
        None, "Go on from a checkpoint as its run would have; auto: from the newest in --out, or anew.", often=True,
        metavar="PATH|latest|auto",
    )  # fmt: skip
    change: tuple[str, ...] = option(
        (), "With --resume: lr=0.01, from now on. Also batch-size, schedule, epochs ...", multiple=True, metavar="NAME=VALUE"
    )
    init_from: Path | None = option(None, "Start from the weights of any checkpoint that ckpt reads.", PATH, often=True)
    on_mismatch: str = option("error|reinit|overlap|skip", "With --init-from: a tensor of another shape, such as a new head.")
    evaluate: Path | None = option(None, "Measure a checkpoint of any mode, in one process, on its run's test images.", PATH)
    log_every: int = option(0, "A line every so many steps, with seconds a step; 0: one an epoch.", NATURAL)
    tensorboard: bool = option(False, "Write TensorBoard events into --out.")

    def __post_init__(self) -> None:
        for each in fields(self):
            other, *values = each.metadata.get("under", ("", ""))
            strange = other and getattr(self, each.name) != each.default and getattr(self, other) not in values
            refuse(bool(strange), f"{spelled(each.name)} belongs to --{other} {values[0]}")
        mode, save, safetensors = self.parallel, self.save, self.format == "safetensors"
        refuse(self.parts and mode != "fsdp", f"--save {save} belongs to --parallel fsdp")
        refuse(self.parts and safetensors, f"--save {save} writes a folder: leave --format out")
        refuse(mode == "fsdp" and save in ("wrapped", "module"), f"--save {save}: FSDP2 has no wrapper around the network")
        refuse(safetensors and save == "module", "--format safetensors holds tensors alone: --save module needs --format pth")
        refuse(self.compile and mode == "dp", "--compile does not go with --parallel dp: take ddp or single")
        alone = mode == "single" and self.resume is None
        refuse(self.evaluate is not None and not alone, "--evaluate is for one process: leave --resume and --parallel out")
        refuse(bool(self.change) and self.resume is None, "--change belongs to --resume: a new run takes the option itself")
        refuse(self.on_mismatch != "error" and self.init_from is None, "--on-mismatch belongs to --init-from")
        both = self.init_from is not None and self.resume not in (None, "auto")
        refuse(both, "--init-from starts a run and --resume goes on with one: leave one of them out")

    @property
    def parts(self) -> bool:
        """Whether every rank writes its part of the tensors, into a folder, rather than the first one all of them."""
        return self.save in ("ranks", "dcp")

    @property
    def learning_rate(self) -> float:
        """`lr`, or the optimizer's usual one; with `--scale-lr` it is for a batch of 256, and grows with the batch."""
        rate = self.lr or USUAL[self.optimizer]
        return rate * self.batch_size / 256 if self.scale_lr else rate

    def plain(self) -> dict[str, Any]:
        """As plain data, for the checkpoint and its JSON."""
        return {each.name: plain(getattr(self, each.name)) for each in fields(self)}


def plain(value: Any) -> Any:
    """A value of a Config as plain data."""
    return str(value) if isinstance(value, Path) else list(value) if isinstance(value, tuple) else value


def spelled(name: str) -> str:
    """An option as the command line has it."""
    return f"--{name.replace('_', '-')}"


def taken(values: Mapping[str, Any], names: Iterator[str]) -> dict[str, Any]:
    """What a checkpoint says of these options, as a Config has it. Raises UsageError for what no command line could have said.

    The checkpoint is a file like any other, and may be damaged or somebody's own.
    """
    kinds = {each.name: each.metadata["type"] for each in fields(Config)}
    result = {}
    for name in names:
        value = values[name]
        try:
            own = None if value is getattr(Config, name) is None else kinds[name].convert(value, None, None)
        except (UsageError, TypeError, AttributeError, ArithmeticError):
            own = math.nan  # equal to nothing
        alike = plain(own) == value and isinstance(own, bool) == isinstance(value, bool)
        refuse(not alike, f"the checkpoint's config has {name} = {value!r}, which no run wrote")
        result[name] = own
    return result


def called(option: str, spec: str) -> Any:
    """What the MODULE:CALLABLE that a user named returns. Raises UsageError where it cannot be imported, found or called."""
    module, _, name = spec.partition(":")
    with refusing(f"{option} {spec} cannot be used", Exception):
        return operator.attrgetter(name)(importlib.import_module(module))()


def one_line(error: Exception) -> str:
    """What an error says, as a part of a sentence."""
    text = " ".join(str(error).split())
    return text if " " in text else f"{type(error).__name__} {text}".strip()


def refuse(wrong: bool, sentence: str) -> None:
    """Raises UsageError with `sentence` where something is wrong."""
    if wrong:
        raise UsageError(sentence)


@contextmanager
def refusing(sentence: str, *errors: type[Exception]) -> Iterator[None]:
    """Raises UsageError, `sentence` and what went wrong, for these errors inside."""
    try:
        yield
    except UsageError:
        raise
    except errors as error:
        raise UsageError(f"{sentence}: {one_line(error)}") from error
