"""What a user may ask of `convert`. A new option is one line here: the command line, the check of its value, the docstring and
the reference derive from it. IN and OUT are the two paths.
"""

from __future__ import annotations

import os
import re
from collections import Counter
from collections.abc import Sequence
from typing import Any, Literal, TypeAlias, cast

from ckpt_tools.errors import UsageError
from ckpt_tools.fit.options import FitOptions
from ckpt_tools.io.writer import Progress
from ckpt_tools.tree.arguments import Adapters, Dtypes, Location, Metadata, Renames
from ckpt_tools.tree.dtypes import CAST_TARGETS
from ckpt_tools.tree.options import Options, flag, option, record, several
from ckpt_tools.tree.output_names import FORMATS, Format

_ABOUT_INTEGERS = "Integers need scales beside them: `dtype='q8_0'` makes both, in a .gguf."
ObjectsPolicy: TypeAlias = Literal["keep", "plain", "drop"]


@record
class NameOptions(Options):
    """Other names."""

    heading = "Names"
    strip_module: bool = flag("Remove leading 'module.', repeated ones too, in every state dict.", common=True)
    add_module: bool = flag("Put 'module.' before every name.")
    unwrap: bool = flag("Remove every known wrapper (module, _orig_mod, FSDP ...), nested ones too.", common=True)
    strip_prefix: str | None = option("Remove this leading prefix, once.", metavar="P")
    add_prefix: str | None = option("Put this prefix before every name.", metavar="P")
    rename: Renames = several(
        r"Rename by a regular expression, in order (re.sub; \1 works).", metavar="REGEX=REPLACEMENT",
        in_code="`REGEX=REPLACEMENT`, a pair of the two, or several in a list or mapping.",
    )  # fmt: skip

    def check(self) -> None:
        """Raise UsageError for name options that contradict each other."""
        super().check()
        if self.strip_module and self.add_module:
            raise UsageError("`strip_module` does not go with `add_module`.")


@record
class Selection(Options):
    """Less than the whole."""

    heading = "What to keep"
    keep: str | Sequence[str] = several(
        "Keep only tensors whose name matches.", metavar="GLOB", completes="names", moves=True, common=True
    )
    drop: str | Sequence[str] = several(
        "Drop everything whose name or dotted path matches.", metavar="GLOB", completes="names", moves=True, common=True
    )
    select: str | None = option(
        "Write only this state dict or subtree (model, ema, netG).",
        metavar="WHERE",
        completes="places",
        moves=True,
        common=True,
    )
    slim: bool = flag(
        "Keep only state dicts and plain values: no optimizer, scheduler, random state, objects, unused bytes.",
        alias="--weights-only-content", moves=True,
    )  # fmt: skip
    ema: bool = flag("Write only the averaged weights (ema, model_ema, ema_state_dict ...).", moves=True)


@record
class ValueOptions(Options):
    """Adapters merged, other device tags, quantised weights and weights in parts made plain, other dtypes."""

    heading = "Values and devices"
    lora: Adapters = several(
        "Merge a LoRA adapter: its folder or file; =WEIGHT scales its effect.",
        metavar="ADAPTER[=WEIGHT]", moves=True,
        in_code="A path, a pair of path and weight, several, or a mapping from path to weight.",
    )  # fmt: skip
    map_location: Location | None = option(
        "Move tensors: cpu, cuda, cuda:1, or cuda:0=cuda:1,cuda:7=cpu.", metavar="SPEC", common=True,
        in_code="Or a mapping from device tag to device.",
    )  # fmt: skip
    dequantize: Literal["bf16", "fp16", "fp32"] | None = option(
        "Dequantise weights (FP8, bitsandbytes, GPTQ, AWQ, torchao, MLX and others)  [without a value: bf16]",
        choices=["bf16", "fp16", "fp32"], bare="bf16", moves=True,
    )  # fmt: skip
    fold: bool = flag("Fold weight norm, spectral norm and pruning into plain weights.", moves=True)
    dtype: Dtypes | None = several(
        "Cast float tensors to bf16, fp16, fp32, fp64, fp8_e4m3 or fp8_e5m2; with a glob only those whose name matches. q8_0: "
        "quantise the matrices of a GGUF.",
        default=None, metavar="[GLOB=]TYPE", moves=True, common=True,
        in_code="Or a torch.dtype, or a mapping from globs; the last glob that matches counts.",
    )  # fmt: skip

    def check(self) -> None:
        """Raise UsageError for a dtype that nothing is cast to."""
        super().check()
        for glob, name in self.cast_to.items():
            if name not in CAST_TARGETS.values() and (glob, name) != ("", "q8_0"):
                said = f"{glob}={name}" if glob else name
                fix = _ABOUT_INTEGERS if re.match(r"u?int\d|q\d", name, re.IGNORECASE) else ""
                raise UsageError(f"`dtype={said!r}` is not one of {', '.join(CAST_TARGETS)}.", fix=fix)

    @property
    def cast_to(self) -> dict[str, str]:
        """Glob -> dtype; "" for all that no glob matches."""
        return cast("dict[str, str]", self.dtype or {})

    @property
    def quantises(self) -> bool:
        """Whether matrices become Q8_0, as a GGUF has them."""
        return self.cast_to.get("") == "q8_0"


@record
class FillOptions(Options):
    """What IN lacks."""

    heading = "Target model"
    fill_from: str | os.PathLike[str] | None = option(
        "Take tensors that IN lacks from this checkpoint: OUT gets all of its names.", metavar="ORIGINAL", moves=True
    )
    tie: bool = flag("Tie the output head to the embedding if config.json says so and they are equal.", moves=True)


@record
class ObjectOptions(Options):
    """What is not plain data."""

    heading = "Objects"
    objects: ObjectsPolicy | None = option(
        "What to do with Python objects. plain: convert them to plain data; refused if a tensor would be lost.",
        choices=["keep", "plain", "drop"],
    )
    allow_dangerous: bool = flag("Keep dangerous objects: OUT is as dangerous as IN.")


@record
class MetadataOptions(Options):
    """The text in a safetensors header."""

    heading = "Output"
    set_metadata: Metadata = several(
        "Set metadata of a safetensors OUT or an index; KEY= removes KEY.",
        metavar="KEY=VALUE", in_code="`KEY=VALUE`, a pair of the two, or several in a list or mapping.",
    )  # fmt: skip

    def check(self) -> None:
        """Raise UsageError for a key that is set twice, or ckpt's own."""
        super().check()
        keys = [key for key, _ in self.metadata_texts]
        if repeated := [key for key, count in Counter(keys).items() if count > 1]:
            raise UsageError(f"`set_metadata` names the key {repeated[0]!r} twice.")
        if own := [key for key in keys if key.startswith("ckpt_tools.")]:
            raise UsageError(
                f"The metadata {own[0]!r} belongs to ckpt.", why="It records ties and modules; another text would be wrong."
            )

    @property
    def metadata_texts(self) -> list[tuple[str, str]]:
        """What is to be set, as its reader has made it."""
        return cast("list[tuple[str, str]]", self.set_metadata)


@record
class OutputOptions(Options):
    """What is written, and where nothing is."""

    heading = "Output"
    format: Format | None = option(
        "Format of OUT [by its name]. pth-legacy: for PyTorch before 1.6. dcp: a folder of torch.distributed.checkpoint.",
        choices=FORMATS,
        common=True,
    )
    under: str | None = option("Put the state dict under this key (params, state_dict, model).", metavar="KEY")
    shard_size: str | int | None = option(
        "Write a folder of shards, each of at most this size (5GB, 500MiB).", metavar="SIZE",
        in_code="Or a number of bytes.",
    )  # fmt: skip
    partial: bool = flag("If ranks or shards are missing: write the complete tensors and list the others.")
    overwrite: bool = flag("Replace OUT if it exists.", common=True)


@record
class DryRunOption(Options):
    """Nothing at all."""

    heading = "Output"
    dry_run: bool = flag("Report what would happen; write nothing.", common=True, alias="-n")


@record
class WriteOptions(Options):
    """How the bytes are written."""

    heading = "Output"
    no_verify: bool = flag("Do not check CRC-32 of tensors that are changed or written to another format.", moves=True)
    progress: Progress | None = option("Called with (bytes written, bytes in total).")


@record
class SaveOptions(OutputOptions, MetadataOptions, DryRunOption, WriteOptions):
    """All about the output."""


@record
class EditOptions(
    NameOptions, Selection, ValueOptions, FillOptions, FitOptions, ObjectOptions,
):  # fmt: skip
    """All that a conversion does to tensors."""


@record
class InPlaceOptions(EditOptions, MetadataOptions, DryRunOption, WriteOptions):
    """All that `edit_in_place` takes."""


@record
class ConvertOptions(EditOptions, SaveOptions):
    """All that `convert` takes."""

    def check(self) -> None:
        """Raise UsageError for options that do not go together."""
        super().check()
        if self.under is not None and (not self.under or self.shard_size is not None):
            why = "Shards are one flat state dict." if self.under else "The key is empty."
            raise UsageError(f"`under={self.under!r}` cannot be done.", why=why)
        if self.fill_from is not None and self.targeted:
            raise UsageError(
                "`fill_from` does not go with `like` or `plan`.",
                fix="Convert twice: first to the names, then fill what is missing.",
            )
        if self.tie and self.targeted:
            raise UsageError("`tie` does not go with `like` or `plan`: the target decides.")
        if self.slim and self.objects == "keep":
            raise UsageError("`slim` drops objects, so it does not go with `objects='keep'`.")
        if self.shard_size is not None and "total_size" in dict(self.metadata_texts):
            raise UsageError("`set_metadata`: an index of shards says the bytes of the tensors under 'total_size'.")
        if self.plan is not None and (
            named := [name for name in self.asked() if name in ("rename", "add_prefix", "add_module")]
        ):
            raise UsageError(f"`{named[0]}` does not go with `plan`, which says every name.")

    @property
    def adapters(self) -> list[tuple[str | os.PathLike[str], float]]:
        """The adapters of `lora`, each with its weight."""
        read: Any = self.lora
        return list(read)

    @property
    def moves_tensors(self) -> bool:
        """Whether the tensors do not stay where they lie in the input."""
        return self.targeted or any(self.options[name].moves for name in self.asked())
