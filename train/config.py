"""What a run is asked to do: a record of options, from which the command line is made; and what a resumed run may change."""

import importlib
import math
import operator
import re
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field, fields, replace
from pathlib import Path
from typing import Any

import click
from click import UsageError

NATURAL, COUNT = click.IntRange(min=0), click.IntRange(min=1)
POSITIVE = click.FloatRange(0, math.inf, min_open=True, max_open=True)
AMOUNT, SHARE = click.FloatRange(0, math.inf, max_open=True), click.FloatRange(0, 1, max_open=True)
PATH, FOLDER = click.Path(path_type=Path), click.Path(path_type=Path, file_okay=False)
USUAL = {"sgd": 0.05, "adamw": 0.001}  # the learning rate where none is named
CNN, CUSTOM, DDP = ("model", "cnn", "cnn-published"), ("data", "synthetic"), ("parallel", "ddp")
# What a run that goes on does with an option: as the command line has it every time (where the run is); the checkpoint's only
# in the same mode; another from now on where --change says so; the checkpoint's and no other, for a reason. All else is the
# checkpoint's where the command line does not name it.
PLACE, MODE, CHANGE, FREE = "place", "mode", "change", ""
NETWORK, IMAGES = "the weights are of that network", "the order of the images is part of the run"
STATE, NUMBERS = "the optimizer's state is of that", "the steps before were made with it"
SAVE = (
    "The training state: under plain names; the wrapper's names (module.); the network pickled whole, which cannot be resumed; "
    "under fsdp torch.distributed.checkpoint's folder."
)


class Matching(click.ParamType[str]):
    """Text of a form, of which `name` is an example."""

    def __init__(self, name: str, form: str) -> None:
        self.name, self.form = name, form

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> str:
        if not isinstance(value, str) or not re.fullmatch(self.form, value):
            self.fail(f"{value!r} is not {self.name}", param, ctx)
        return value


INTERVAL = Matching("500 (steps) or 10m (minutes)", r"[1-9]\d*m?")
SHAPE = Matching("CHANNELSxHEIGHTxWIDTH", r"[1-9]\d*(x[1-9]\d*){2}")


def option(default: Any, sentence: str, kind: Any = None, resumed: str = FREE, **more: Any) -> Any:
    """One option: its default, its sentence in --help, the values that it takes, and what a run that goes on does with it.

    A default "a|b|c" is the first of the words that there are. `often`: it is in the short --help. `under`: the option, and
    its values, that this one belongs to.
    """
    words = default.split("|") if isinstance(default, str) else [default]
    if len(words) > 1:
        own = "MODULE:CALLABLE" in words
        kind = Matching(default, "|".join([*words[:-1], r"[\w.]+:[\w.]+"])) if own else click.Choice(words)
    kind = click.types.convert_type(kind, words[0])
    return field(default=words[0], metadata={"help": sentence, "type": kind, "resumed": resumed, **more})


@dataclass(frozen=True)
class Config:
    """All options. `batch_size` is what one optimizer step sees over all processes and devices."""

    model: str = option("mlp|lenet|cnn|cnn-published|resnet18|MODULE:CALLABLE", "The network.", None, NETWORK, often=True)
    width: float = option(1.0, "Multiplies every inner channel count; 1 is the published network.", POSITIVE, NETWORK)
    hidden: int = option(8000, "First linear layer of cnn: 8000 or 5000 as published.", COUNT, NETWORK, under=CNN)
    classes: int = option(0, "Outputs of the network; 0: as many as the data set has classes.", NATURAL, NETWORK)
    data: str = option("digits|mnist|fashion-mnist|cifar10|synthetic|MODULE:CALLABLE", "The images.", None, IMAGES, often=True)
    data_dir: Path = option(Path("data"), "Where the files of mnist, fashion-mnist, cifar10 are.", PATH)
    shape: str = option("1x28x28", "CHANNELSxHEIGHTxWIDTH of synthetic images.", SHAPE, IMAGES, under=CUSTOM)
    samples: int = option(12_000, "How many synthetic images; a fifth tests.", click.IntRange(min=10), IMAGES, under=CUSTOM)
    out: Path = option(Path("runs"), "Folder for checkpoints and figures.", FOLDER, PLACE, often=True)
    epochs: int = option(10, "Epochs in all, earlier ones included; 0 saves fresh weights.", NATURAL, CHANGE, often=True)
    batch_size: int = option(32, "Samples of one step, over all processes and devices.", COUNT, CHANGE, often=True)
    grad_accum: int = option(1, "Passes that one batch is cut into, to save memory.", COUNT)
    optimizer: str = option("sgd|adamw", "What makes the steps.", None, STATE)
    lr: float = option(None, "Learning rate.  [default: 0.05; adamw 0.001]", POSITIVE, CHANGE, often=True)
    momentum: float = option(0.9, "Momentum of SGD.", SHARE, STATE)
    weight_decay: float = option(0.0, "Weight decay.", AMOUNT, CHANGE)
    clip_norm: float = option(0.0, "Largest norm of the gradient; 0: any.", AMOUNT, CHANGE)
    schedule: str = option("constant|cosine", "Of the learning rate; cosine ends at 0 after --epochs.", None, CHANGE)
    warmup: int = option(0, "Steps in which the learning rate grows to its full value.", NATURAL, CHANGE)
    ema: float = option(0.0, "Keep a moving average of the weights with this decay (0.999), saved as `ema`.", SHARE, STATE)
    seed: int = option(0, "Of the weights and of the order of the images.", NATURAL, IMAGES)
    parallel: str = option("single|dp|ddp|fsdp", "One device, DataParallel, DistributedDataParallel, FSDP2.", often=True)
    device: str = option("auto|cpu|cuda", "Under ddp and fsdp each process has a GPU of its own.", None, PLACE)
    local_rank: int = option(0, "What torch.distributed.launch says; torchrun does not.", None, PLACE)
    timeout: int = option(30, "Minutes after which a process stops waiting for the others.", COUNT, PLACE)
    sync_bn: bool = option(False, "Under ddp on GPUs: batch statistics over all processes.", None, MODE, under=DDP)
    find_unused_parameters: bool = option(False, "Under ddp: a pass may skip a part of the network.", None, MODE, under=DDP)
    amp: str = option("off|bf16|fp16", "Mixed precision; fp16 comes with a gradient scaler.", None, NUMBERS)
    compile: bool = option(False, "torch.compile the network.", None, MODE)
    workers: int = option(0, "Processes that prepare batches.", NATURAL)
    weights: str = option("plain|wrapped|none", "Beside it the weights alone: plain names, or those of the mode (module.).")
    save: str = option("unwrapped|wrapped|module|dcp", SAVE, None, MODE)
    save_every: str | None = option(None, "Save also after so many steps (500) or minutes (10m).", INTERVAL)
    keep: int | None = option(None, "How many checkpoints stay, beside the best.  [default: all]", COUNT)
    resume: str | None = option(None, "Go on from PATH, latest, or auto: latest or anew.", None, PLACE, often=True)
    change: tuple[str, ...] = option((), "With --resume: lr=0.01, or batch-size, epochs ...", None, PLACE, multiple=True)
    init_from: Path | None = option(None, "Start from the weights of any checkpoint that ckpt reads.", PATH, often=True)
    on_mismatch: str = option("error|reinit|overlap|skip", "With --init-from: a tensor of another shape, such as a new head.")
    evaluate: Path | None = option(None, "Measure a checkpoint of any mode on its run's test images.", PATH, PLACE)
    log_every: int = option(0, "A line every so many steps, with seconds a step; 0: one an epoch.", NATURAL)
    tensorboard: bool = option(False, "Write TensorBoard events into --out.")

    def __post_init__(self) -> None:
        object.__setattr__(self, "lr", self.lr or USUAL[self.optimizer])
        for each in fields(self):
            other, *values = each.metadata.get("under", ("", ""))
            strange = other and getattr(self, each.name) != each.default and getattr(self, other) not in values
            refuse(bool(strange), f"{spelled(each.name)} belongs to --{other} {values[0]}")
        mode, save, going_on = self.parallel, self.save, self.resume not in (None, "auto")
        refuse(save == "dcp" and mode != "fsdp", f"--save {save} belongs to --parallel fsdp")
        refuse(mode == "fsdp" and save in ("wrapped", "module"), f"--save {save}: FSDP2 has no wrapper around the network")
        refuse(self.compile and mode == "dp", "--compile does not go with --parallel dp: take ddp or single")
        alone = self.evaluate is None or (mode == "single" and self.resume is None)
        refuse(not alone, "--evaluate is for one process: leave --resume and --parallel out")
        refuse(bool(self.change) and self.resume is None, "--change belongs to --resume: a new run takes the option itself")
        refuse(self.on_mismatch != "error" and self.init_from is None, "--on-mismatch belongs to --init-from")
        both = self.init_from is not None and going_on
        refuse(both, "--init-from starts a run and --resume goes on with one: leave one of them out")

    def plain(self) -> dict[str, Any]:
        """As plain data, for the checkpoint and its JSON."""
        return {each.name: plain(getattr(self, each.name)) for each in fields(self)}


KINDS = {each.name: each.metadata["type"] for each in fields(Config)}
RULES = {each.name: each.metadata["resumed"] for each in fields(Config)}


def continued(config: Config, saved: Mapping[str, Any], given: frozenset[str]) -> Config:
    """This run with the options of the run that it resumes; `given` names those that the user spelled out.

    Raises UsageError where one of them contradicts the checkpoint: the rest of the run would not be the same run.
    """
    other_mode = "parallel" in given and config.parallel != saved.get("parallel")
    for name in sorted(given):
        own, theirs, rule = getattr(config, name), saved.get(name, getattr(Config, name)), RULES[name]
        more = name == "epochs" and saved["schedule"] != "cosine"  # a cosine ends at the last of them
        way = f"--change {name}={own} to go on with it" if rule == CHANGE else f"--init-from to start anew ({rule})"
        sentence = f"{spelled(name)} {own} contradicts the checkpoint, which was trained with {theirs}: leave it out"
        refuse(own != theirs and rule not in (PLACE, MODE, FREE) and not more, f"{sentence}, or say {way}")
    left = {PLACE, MODE} if other_mode else {PLACE}
    kept = [name for name, rule in RULES.items() if name in saved and name not in given and rule not in left]
    return replace(config, **{**taken(saved, kept), **dict(map(changed, config.change))})


def changed(change: str) -> tuple[str, Any]:
    """`lr=0.01` as an option and its value. Raises UsageError for one that cannot be another from now on, with the reason."""
    name, _, text = change.partition("=")
    name = name.strip().replace("-", "_")
    possible, rule = ", ".join(each for each in RULES if RULES[each] == CHANGE), RULES.get(name)
    refuse(rule is None or not text, f"--change {change}: write NAME=VALUE, where NAME is {possible}")
    refuse(rule in (PLACE, MODE, FREE), f"--change {change}: write {spelled(name)} {text}")
    refuse(rule != CHANGE, f"--change {name}: {rule}; --init-from starts a new run from the weights")
    with refusing(f"--change {change}", click.BadParameter):
        return name, KINDS[name].convert(text, None, None)


def measuring(config: Config, saved: Mapping[str, Any], given: frozenset[str]) -> Config:
    """For `--evaluate`: with the network and the images of the run that saved a checkpoint, but for what the user names."""
    groups = {"model": ["model", "width", "hidden", "classes"], "data": ["data", "data_dir", "shape", "samples"]}
    names = ["amp", *(name for head, group in groups.items() if head not in given for name in group)]
    return replace(config, **taken(saved, [name for name in names if name in saved and name not in given]))


def taken(values: Mapping[str, Any], names: Iterable[str]) -> dict[str, Any]:
    """What a checkpoint says of these options, as a Config has it.

    It is a file like any other, damaged or somebody's own. Raises UsageError for what no command line could have said, and
    for a MODULE:CALLABLE: a file imports nothing.
    """
    result: dict[str, Any] = {}
    for name in names:
        value = values[name]
        own: Any = math.nan  # equal to nothing
        with suppress(UsageError, TypeError, AttributeError, ArithmeticError):
            own = None if value is getattr(Config, name) is None else KINDS[name].convert(value, None, None)
        alike = plain(own) == value and isinstance(own, bool) == isinstance(value, bool)
        refuse(not alike, f"the checkpoint's config has {name} = {value!r}, which no run wrote")
        strange = name in ("model", "data") and ":" in value
        refuse(strange, f"the checkpoint was trained with {spelled(name)} {value}, which is imported only if you say it too")
        result[name] = own
    return result


def plain(value: Any) -> Any:
    """A value of a Config as plain data."""
    return str(value) if isinstance(value, Path) else list(value) if isinstance(value, tuple) else value


def spelled(name: str) -> str:
    """An option as the command line has it."""
    return f"--{name.replace('_', '-')}"


def called(option: str, spec: str) -> Any:
    """What the MODULE:CALLABLE that a user named returns. Raises UsageError where it cannot be imported, found or called."""
    module, _, name = spec.partition(":")
    with refusing(f"{option} {spec} cannot be used", Exception):
        return operator.attrgetter(name)(importlib.import_module(module))()


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
        said = " ".join(str(error).split())
        raise UsageError(f"{sentence}: {said if ' ' in said else f'{type(error).__name__} {said}'.strip()}") from error
