"""What a run was asked to do: one frozen record, made from the command line and kept in every checkpoint."""

import math
from collections.abc import Mapping
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any

from click import UsageError

# What decides the numbers that come out. A resumed run takes these from its checkpoint, and nothing else will do.
RECIPE = (
    *("model", "width", "hidden", "data", "shape", "samples", "seed"),
    *("batch_size", "lr", "momentum", "scale_lr", "schedule", "amp"),
)
# Where a run is: of the command line every time. All others are the checkpoint's, where the command line does not say them.
PLACE = ("out", "resume", "read", "device", "device_ids", "local_rank", "evaluate")
# Of these, what belongs to a mode is not kept by a run that goes on in another.
OF_MODE = ("sync_bn", "find_unused_parameters", "broadcast_buffers", "save", "compile")
CHOICES = {
    "model": ("mlp", "lenet", "cnn", "resnet18"),
    "data": ("digits", "mnist", "fashion-mnist", "cifar10", "synthetic"),
    "schedule": ("constant", "cosine"),
    "parallel": ("single", "dp", "ddp", "fsdp"),
    "amp": ("off", "bf16", "fp16"),
    "save": ("unwrapped", "wrapped", "module", "ranks", "dcp"),
    "format": ("pth", "safetensors"),
    "read": ("rank0", "all"),
}
LEAST = {"batch_size": 1, "grad_accum": 1, "samples": 10, "hidden": 1, "keep": 1}  # of any other number: 0


@dataclass(frozen=True)
class Config:
    """The defaults here are the command line's. `batch_size` is global: what one optimizer step sees over all ranks."""

    model: str = "mlp"
    width: float = 1.0
    hidden: int = 8000
    data: str = "digits"
    data_dir: Path = Path("data")
    shape: str = "1x28x28"
    samples: int = 12_000
    epochs: int = 10
    batch_size: int = 32
    grad_accum: int = 1
    lr: float = 0.05
    momentum: float = 0.9
    schedule: str = "constant"
    scale_lr: bool = False
    seed: int = 0
    parallel: str = "single"
    device: str = "auto"
    device_ids: str | None = None
    local_rank: int = 0
    sync_bn: bool = False
    find_unused_parameters: bool = False
    broadcast_buffers: bool = True
    amp: str = "off"
    compile: bool = False
    workers: int = 0
    out: Path = Path("runs")
    save: str = "unwrapped"
    format: str = "pth"
    keep: int | None = None
    resume: str | None = None
    read: str = "rank0"
    evaluate: Path | None = None
    log_every: int = 0
    tensorboard: bool = False

    def __post_init__(self) -> None:
        refuse(self.hidden != Config.hidden and self.model != "cnn", "--hidden belongs to --model cnn")
        custom = (self.shape, self.samples) != (Config.shape, Config.samples)
        refuse(custom and self.data != "synthetic", "--shape and --samples belong to --data synthetic")
        refuse(self.device_ids is not None and self.parallel != "dp", "--device-ids belongs to --parallel dp")
        for name in ("sync_bn", "find_unused_parameters", "broadcast_buffers"):
            chosen = getattr(self, name) != getattr(Config, name)
            refuse(chosen and self.parallel != "ddp", f"--{name.replace('_', '-')} belongs to --parallel ddp")
        refuse(self.evaluate is not None and self.resume is not None, "--evaluate measures one checkpoint: leave --resume out")
        refuse(
            self.compile and self.parallel == "dp",
            "--compile does not go through DataParallel's threads: take --parallel ddp",
        )
        refuse(
            self.format == "safetensors" and self.save == "module",
            "--format safetensors holds tensors alone: --save module needs --format pth",
        )
        if self.parallel == "fsdp":
            refuse(self.save in ("wrapped", "module"), f"FSDP2 has no wrapper, and --save {self.save} no meaning under it")
            refuse(self.compile, "--compile is for --parallel single and ddp")
        refuse(self.parts and self.parallel != "fsdp", f"--save {self.save} belongs to --parallel fsdp")
        refuse(self.parts and self.format == "safetensors", f"--save {self.save} writes a folder: leave --format out")

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
        values = {field.name: getattr(self, field.name) for field in fields(self)}
        return {name: str(value) if isinstance(value, Path) else value for name, value in values.items()}

    def continued(self, saved: Mapping[str, Any], given: frozenset[str]) -> "Config":
        """This run with the recipe of the run that it resumes; `given` names the options that the user spelled out.

        Raises UsageError where one of them contradicts the checkpoint: the rest of the run would not be the same run.
        """
        for name in RECIPE:
            refuse(
                name in given and getattr(self, name) != saved[name],
                f"--{name.replace('_', '-')} {getattr(self, name)} contradicts the checkpoint, which was trained with "
                f"{saved[name]}: leave it out, or start a new run without --resume",
            )
        moved = "parallel" in given and self.parallel != saved.get("parallel")
        chosen = given.union(PLACE, OF_MODE if moved else ())
        kept = {name: saved[name] for name in (field.name for field in fields(self)) if name in saved and name not in chosen}
        for name, value in kept.items():
            refuse(not possible(name, value), f"cannot resume: the checkpoint's config has {name} = {value!r}")
        return replace(self, **kept | ({"data_dir": Path(kept["data_dir"])} if "data_dir" in kept else {}))


def possible(name: str, value: object) -> bool:
    """Whether a checkpoint may say so of an option: it is a file like any other, and may be damaged or somebody's own."""
    default = getattr(Config, name)
    if name in CHOICES:
        return value in CHOICES[name]
    if isinstance(default, str | Path | bool):
        return isinstance(value, bool if isinstance(default, bool) else str)
    if isinstance(value, int | float) and not isinstance(value, bool):
        return (isinstance(value, int) or isinstance(default, float)) and LEAST.get(name, 0) <= value < math.inf
    return value is None and default is None


def refuse(wrong: bool, sentence: str) -> None:
    """Raises UsageError with `sentence` where something is wrong."""
    if wrong:
        raise UsageError(sentence)
