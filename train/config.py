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
USUAL = {"sgd": 0.05, "adamw": 0.001}  # the learning rate where none is named
CUSTOM, DDP = ("data", "synthetic"), ("parallel", "ddp")
# What a run that goes on does with an option: as the command line has it every time (where the run is); the checkpoint's only
# in the same mode; another from now on where --change says so; the checkpoint's and no other, for a reason. All else is the
# checkpoint's where the command line does not name it.
PLACE, MODE, CHANGE, FREE = "place", "mode", "change", ""
NETWORK, IMAGES = "the weights are of that network", "the order of the images is part of the run"
STATE, NUMBERS = "the optimizer's state is of that", "the steps before were made with it"


class Matching(click.ParamType[str]):
    """Text of a form."""

    def __init__(self, name: str, form: str, said: str) -> None:
        self.name, self.form, self.said = name, form, said

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> str:
        if not isinstance(value, str) or not re.fullmatch(self.form, value):
            self.fail(f"{value!r} is not {self.said}", param, ctx)
        return value


MODELS, SETS = "mlp, lenet, cnn, cnn-published, resnet18", "digits, mnist, fashion-mnist, cifar10, synthetic"
MODEL, DATA = (Matching("NAME", f"{words.replace(', ', '|')}|[\\w.]+:[\\w.]+", f"one of {words}") for words in (MODELS, SETS))
INTERVAL = Matching("N|Nm", r"[1-9]\d*m?", "500 (steps) or 10m (minutes)")
SHAPE = Matching("CxHxW", r"[1-9]\d*(x[1-9]\d*){2}", "CHANNELSxHEIGHTxWIDTH")


def option(default: Any, sentence: str, kind: Any = None, resumed: str = FREE, **more: Any) -> Any:
    """One option: its default, its sentence in --help, the values that it takes, and what a run that goes on does with it.

    A default "a|b|c" is the first of the words that there are. `often`: it is in the short --help. `under`: the option, and
    its values, that this one belongs to.
    """
    words = default.split("|") if isinstance(default, str) else [default]
    kind = click.Choice(words) if len(words) > 1 else click.types.convert_type(kind, default)
    return field(default=words[0], metadata={"help": sentence, "type": kind, "resumed": resumed, **more})


@dataclass(frozen=True)
class Config:
    """All options. `batch_size` is what one optimizer step sees over all processes and devices."""

    model: str = option("mlp", f"{MODELS}; or MODULE:CALLABLE.", MODEL, NETWORK, often=True)
    width: float = option(1.0, "Multiplies every inner channel count; 1 is the published network.", POSITIVE, NETWORK)
    classes: int = option(0, "Outputs of the network; 0: as many as the data set has classes.", NATURAL, NETWORK)
    data: str = option("digits", f"{SETS}; or MODULE:CALLABLE.", DATA, IMAGES, often=True)
    data_dir: Path = option(Path("data"), "Where the files of mnist, fashion-mnist, cifar10 are.", Path)
    shape: str = option("1x28x28", "CHANNELSxHEIGHTxWIDTH of synthetic images.", SHAPE, IMAGES, under=CUSTOM)
    samples: int = option(12_000, "How many synthetic images; a fifth tests.", click.IntRange(min=10), IMAGES, under=CUSTOM)
    out: Path = option(Path("runs"), "Folder for checkpoints.", Path, PLACE, often=True)
    epochs: int = option(10, "Epochs in all, earlier ones included.", NATURAL, CHANGE, often=True)
    batch_size: int = option(32, "Samples of one step, over all devices.", COUNT, CHANGE, often=True)
    grad_accum: int = option(1, "Passes that one batch is cut into, to save memory.", COUNT)
    optimizer: str = option("sgd|adamw", "What makes the steps.", None, STATE)
    lr: float = option(None, "Learning rate; 0.05, adamw 0.001.", POSITIVE, CHANGE, often=True)
    momentum: float = option(0.9, "Momentum of SGD.", SHARE, STATE)
    weight_decay: float = option(0.0, "Weight decay.", AMOUNT, CHANGE)
    clip_norm: float = option(0.0, "Largest norm of the gradient; 0: any.", AMOUNT, CHANGE)
    schedule: str = option("constant|cosine", "Of the learning rate; cosine ends at 0 after --epochs.", None, CHANGE)
    warmup: int = option(0, "Steps in which the learning rate grows to its full value.", NATURAL, CHANGE)
    ema: float = option(0.0, "Keep a moving average of the weights with this decay (0.999), saved as `ema`.", SHARE, STATE)
    seed: int = option(0, "Of the weights and of the order of the images.", NATURAL, IMAGES)
    parallel: str = option("single|dp|ddp|fsdp", "DataParallel, DDP, FSDP2.", often=True)
    device: str = option("auto|cpu|cuda", "Under ddp and fsdp each process has a GPU of its own.", None, PLACE)
    local_rank: int = option(0, "What torch.distributed.launch says; torchrun does not.", None, PLACE)
    sync_bn: bool = option(False, "Under ddp on GPUs: batch statistics over all processes.", None, MODE, under=DDP)
    find_unused_parameters: bool = option(False, "Under ddp: a pass may skip a part of the network.", None, MODE, under=DDP)
    amp: str = option("off|bf16|fp16", "Mixed precision; fp16 comes with a gradient scaler.", None, NUMBERS)
    compile: bool = option(False, "torch.compile the network.", None, MODE)
    workers: int = option(0, "Processes that prepare batches.", NATURAL)
    weights: str = option("plain|wrapped|none", "Beside it the weights alone: plain names, or those of the mode (module.).")
    save: str = option("unwrapped|wrapped|module|dcp", "Its names; or the network pickled; fsdp: a folder.", None, MODE)
    save_every: str | None = option(None, "Save also after so many steps (500) or minutes (10m).", INTERVAL)
    keep: int | None = option(None, "How many checkpoints stay, beside the best.  [default: all]", COUNT)
    resume: str | None = option(None, "PATH, latest, or auto: latest, if any.", None, PLACE, often=True)
    change: tuple[str, ...] = option((), "lr=0.01: another, from now on.", None, PLACE, multiple=True, under=["resume"])
    init_from: Path | None = option(None, "Weights of any checkpoint to start from.", Path, often=True)
    on_mismatch: Any = option("error|reinit|overlap|skip", "Tensors of other shapes: a new head.", under=["init_from"])
    evaluate: Path | None = option(None, "Measure a checkpoint of any mode on its run's test images.", Path, PLACE)
    log_every: int = option(0, "A line every so many steps, with seconds a step; 0: one an epoch.", NATURAL)
    tensorboard: bool = option(False, "Write TensorBoard events into --out.")

    def __post_init__(self) -> None:
        object.__setattr__(self, "lr", self.lr or USUAL[self.optimizer])
        for each in fields(self):
            other, *values = each.metadata.get("under", [each.name])
            fits = getattr(self, other) in values if values else getattr(self, other) is not None
            sentence = f"{spelled(each.name)} belongs to {' '.join([spelled(other), *values[:1]])}"
            refuse(getattr(self, each.name) != each.default and not fits, sentence)
        mode, save, start = self.parallel, self.save, self.init_from or self.evaluate
        refuse(save == "dcp" and mode != "fsdp", f"--save {save} belongs to --parallel fsdp")
        refuse(mode == "fsdp" and save in ("wrapped", "module"), f"--save {save}: FSDP2 has no wrapper around the network")
        refuse(self.compile and mode == "dp", "--compile does not go with --parallel dp: take ddp or single")
        both = start is not None and self.resume not in (None, "auto")
        refuse(both, "--resume goes on with a run: leave --init-from and --evaluate out")

    def plain(self) -> dict[str, Any]:
        """As plain data, for the checkpoint."""
        return {each.name: plain(getattr(self, each.name)) for each in fields(self)}


KINDS = {each.name: each.metadata["type"] for each in fields(Config)}
RULES = {each.name: each.metadata["resumed"] for each in fields(Config)}


def continued(config: Config, saved: Mapping[str, Any], given: frozenset[str]) -> Config:
    """This run with the options of the run that it resumes; `given` names those that the user spelled out.

    Raises UsageError where one of them contradicts the checkpoint: the rest of the run would not be the same run.
    """
    for name in sorted(given):
        own, theirs, rule = getattr(config, name), saved.get(name, getattr(Config, name)), RULES[name]
        more = name == "epochs" and saved["schedule"] != "cosine"  # a cosine ends at the last of them
        way = f"--change {name}={own} to go on with it" if rule == CHANGE else f"--init-from to start anew ({rule})"
        sentence = f"{spelled(name)} {own} contradicts the checkpoint, which was trained with {theirs}: leave it out"
        refuse(own != theirs and rule not in (PLACE, MODE, FREE) and not more, f"{sentence}, or say {way}")
    left = {PLACE, MODE} if "parallel" in given and config.parallel != saved.get("parallel") else {PLACE}
    kept = [name for name, rule in RULES.items() if name in saved and name not in given and rule not in left]
    return replace(config, **{**taken(saved, kept), **dict(map(changed, config.change))})


def changed(change: str) -> tuple[str, Any]:
    """`lr=0.01` as an option and its value. Raises UsageError for one that cannot be another from now on, with the reason."""
    name, _, text = change.partition("=")
    name = name.strip().replace("-", "_")
    possible, rule = ", ".join(each for each in RULES if RULES[each] == CHANGE), RULES.get(name)
    refuse(rule in (NETWORK, IMAGES, STATE, NUMBERS), f"--change {change}: {rule}; --init-from starts anew from the weights")
    refuse(rule != CHANGE or not text, f"--change {change}: write NAME=VALUE, where NAME is {possible}")
    with refusing(f"--change {change}", click.BadParameter):
        return name, KINDS[name].convert(text, None, None)


def measuring(config: Config, saved: Mapping[str, Any], given: frozenset[str]) -> Config:
    """For `--evaluate`: with the network and the images of the run that saved a checkpoint, but for what the user names."""
    groups = {"model": ["model", "width", "classes"], "data": ["data", "data_dir", "shape", "samples"]}
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
