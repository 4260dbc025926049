"""What a run was asked to do: one frozen record, which makes the command line and is kept in every checkpoint."""

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, fields, replace
from functools import partial
from pathlib import Path
from typing import Any

import click
from click import UsageError

NATURAL, COUNT = click.IntRange(min=0), click.IntRange(min=1)
POSITIVE = click.FloatRange(0, math.inf, min_open=True, max_open=True)
PATH, FOLDER = click.Path(path_type=Path), click.Path(path_type=Path, file_okay=False)
NETWORK, IMAGES = ("model", "width", "hidden"), ("data", "data_dir", "shape", "samples")
SAVE = (
    "Plain names; the wrapper's names (module.); the network pickled whole, which cannot be resumed; under fsdp a folder: a "
    "file for each rank, or torch.distributed.checkpoint's."
)
RESUME = "Go on from a checkpoint as its run would have; auto: from the newest in --out, or anew where there is none."
DDP, CUSTOM, CNN = {"parallel": ("ddp",)}, {"data": ("synthetic",)}, {"model": ("cnn", "cnn-published")}


def option(default: Any, sentence: str = "", kind: Any = None, *, of: str = "", under: Any = (), **more: Any) -> Any:
    """One option: its default, its sentence in --help (hidden without one), and the values that it takes.

    A default "a|b|c" is the first of the words that there are. `under`: the option, and its values, that this one belongs to.
    """
    words = default.split("|") if isinstance(default, str) else ()
    kind = click.Choice(words) if len(words) > 1 else click.types.convert_type(kind, default)
    default = words[0] if words else default
    return field(default=default, metadata={"help": sentence, "type": kind, "of": of, "under": dict(under), **more})


# Decides the numbers that come out. A resumed run takes these from its checkpoint, and nothing else will do.
recipe = partial(option, of="recipe")
# Where a run is: of the command line every time. All others are the checkpoint's, where the command line does not say them.
place = partial(option, of="place")
# Of these, what belongs to a mode is not kept by a run that goes on in another.
of_mode = partial(option, of="mode")


@dataclass(frozen=True)
class Config:
    """The command line has these options and these defaults. `batch_size` is what one optimizer step sees over all ranks."""

    model: str = recipe("mlp|lenet|cnn|cnn-published|resnet18", "The network.")
    width: float = recipe(1.0, "Multiplies every inner channel count; 1 is the published network.", POSITIVE)
    hidden: int = recipe(8000, "First linear layer of cnn: 8000 or 5000 as published.", COUNT, under=CNN)
    data: str = recipe("digits|mnist|fashion-mnist|cifar10|synthetic", "The images; three of them through torchvision.")
    data_dir: Path = option(Path("data"), "Where the files of mnist, fashion-mnist, cifar10 are.", PATH)
    shape: str = recipe("1x28x28", "CHANNELSxHEIGHTxWIDTH of synthetic images.", under=CUSTOM)
    samples: int = recipe(12_000, "How many synthetic images; a fifth is for testing.", click.IntRange(min=10), under=CUSTOM)
    out: Path = place(Path("runs"), "Folder for checkpoints and figures.", FOLDER)
    epochs: int = option(10, "Epochs in all, earlier ones included; 0 saves fresh weights.", NATURAL)
    batch_size: int = recipe(32, "Samples of one optimizer step, over all processes and devices.", COUNT)
    grad_accum: int = option(1, "Passes that one batch is cut into, to save memory.", COUNT)
    lr: float = recipe(0.05, "Learning rate of SGD.", POSITIVE)
    momentum: float = recipe(0.9, "Momentum of SGD.", click.FloatRange(0, 1, max_open=True))
    schedule: str = recipe("constant|cosine", "Of the learning rate; cosine ends at 0 after --epochs.")
    scale_lr: bool = recipe(False, "The linear rule: --lr is for a batch of 256, and grows with --batch-size.")
    seed: int = recipe(0, "Of the weights and of the order of the images.", NATURAL)
    parallel: str = option("single|dp|ddp|fsdp", "One device, DataParallel, DistributedDataParallel, FSDP2 (fully_shard).")
    device: str = place("auto", "auto, cpu, cuda or cuda:N. Under ddp and fsdp each process has its own GPU.")
    device_ids: str | None = place(None, "The GPUs of --parallel dp: 0,1,...  [default: all]", under={"parallel": ("dp",)})
    local_rank: int = place(0)  # torch.distributed.launch gives it, torchrun does not
    sync_bn: bool = of_mode(False, "Under ddp on GPUs: batch statistics over all processes.", under=DDP)
    find_unused_parameters: bool = of_mode(False, "Under ddp: a pass may skip a part of the network.", under=DDP)
    broadcast_buffers: bool = of_mode(True, "Under ddp: rank 0's batch statistics for all before every pass.", under=DDP)
    amp: str = recipe("off|bf16|fp16", "Mixed precision; fp16 comes with a gradient scaler.")
    compile: bool = of_mode(False, "torch.compile the network.")
    workers: int = option(0, "Processes that prepare batches.", NATURAL)
    save: str = of_mode("unwrapped|wrapped|module|ranks|dcp", SAVE)
    format: str = option("pth|safetensors", "safetensors: the weights alone, which cannot be resumed.")
    keep: int | None = option(None, "How many checkpoints stay.  [default: all]", COUNT)
    resume: str | None = place(None, RESUME, metavar="PATH|latest|auto")
    read: str = place("rank0|all", "Which processes read the file to resume from.")
    evaluate: Path | None = place(None, "Measure a checkpoint of any mode, in one process, on its run's test images.", PATH)
    log_every: int = option(0, "A line every so many steps, with seconds a step; 0: one an epoch.", NATURAL)
    tensorboard: bool = option(False, "Write TensorBoard events into --out.")

    def __post_init__(self) -> None:
        for each in fields(self):
            for other, values in each.metadata["under"].items():
                strange = getattr(self, each.name) != each.default and getattr(self, other) not in values
                refuse(strange, f"{spelled(each.name)} belongs to --{other} {values[0]}")
        mode, save, safetensors = self.parallel, self.save, self.format == "safetensors"
        refuse(self.parts and mode != "fsdp", f"--save {save} belongs to --parallel fsdp")
        refuse(self.parts and safetensors, f"--save {save} writes a folder: leave --format out")
        refuse(mode == "fsdp" and save in ("wrapped", "module"), f"--save {save}: FSDP2 has no wrapper around the network")
        refuse(safetensors and save == "module", "--format safetensors holds tensors alone: --save module needs --format pth")
        refuse(self.compile and mode in ("dp", "fsdp"), f"--compile does not go with --parallel {mode}: take ddp or single")
        alone = mode == "single" and self.resume is None
        refuse(self.evaluate is not None and not alone, "--evaluate is for one process: leave --resume and --parallel out")

    @property
    def parts(self) -> bool:
        """Whether every rank writes its part of the tensors, into a folder, rather than the first one all of them."""
        return self.save in ("ranks", "dcp")

    @property
    def learning_rate(self) -> float:
        """`lr`; with `--scale-lr` it belongs to a batch of 256, and twice the batch takes twice the rate."""
        return self.lr * self.batch_size / 256 if self.scale_lr else self.lr

    def plain(self) -> dict[str, Any]:
        """As plain data, for the checkpoint and its JSON."""
        return {each.name: plain(getattr(self, each.name)) for each in fields(self)}

    def continued(self, saved: Mapping[str, Any], given: frozenset[str]) -> "Config":
        """This run with the options of the run that it resumes; `given` names those that the user spelled out.

        Raises UsageError where one of them contradicts the checkpoint: the rest of the run would not be the same run.
        """
        for name in named("recipe"):
            own, theirs = getattr(self, name), saved[name]
            sentence = f"{spelled(name)} {own} contradicts the checkpoint, which was trained with {theirs}: leave it out"
            refuse(name in given and own != theirs, sentence)
        moved = "parallel" in given and self.parallel != saved.get("parallel")
        chosen = given.union(named("place"), named("mode") if moved else ())
        return self.taking(saved, [each.name for each in fields(self) if each.name not in chosen])

    def measuring(self, saved: Mapping[str, Any], given: frozenset[str]) -> "Config":
        """With the network and the images of the run that saved a checkpoint, but for what the user names."""
        kept = ["amp", *(() if "model" in given else NETWORK), *(() if "data" in given else IMAGES)]
        return self.taking(saved, [name for name in kept if name not in given])

    def taking(self, saved: Mapping[str, Any], names: Iterable[str]) -> "Config":
        """With what a checkpoint says of these options. Raises UsageError for what no command line could have said.

        The checkpoint is a file like any other, and may be damaged or somebody's own.
        """
        kinds = {each.name: each.metadata["type"] for each in fields(self)}
        return replace(self, **{name: taken(name, kinds[name], saved[name]) for name in names if name in saved})


def named(of: str) -> tuple[str, ...]:
    """The options that belong to the recipe, the place or the mode."""
    return tuple(each.name for each in fields(Config) if each.metadata["of"] == of)


def spelled(name: str) -> str:
    """An option as the command line has it."""
    return f"--{name.replace('_', '-')}"


def plain(value: Any) -> Any:
    """A value of a Config as plain data."""
    return str(value) if isinstance(value, Path) else value


def taken(name: str, kind: Any, value: Any) -> Any:
    """The value of an option that a checkpoint has as plain data."""
    try:
        own = None if value is getattr(Config, name) is None else kind.convert(value, None, None)
    except (UsageError, TypeError, AttributeError, ArithmeticError):
        own = math.nan  # equal to nothing
    alike = plain(own) == value and isinstance(own, bool) == isinstance(value, bool)
    refuse(not alike, f"the checkpoint's config has {name} = {value!r}, which no run wrote")
    return own


def one_line(error: Exception) -> str:
    """What an error says, as a part of a sentence."""
    return " ".join(str(error).split())


def refuse(wrong: bool, sentence: str) -> None:
    """Raises UsageError with `sentence` where something is wrong."""
    if wrong:
        raise UsageError(sentence)
