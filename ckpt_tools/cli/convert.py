"""`ckpt convert`."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

import click

from ckpt_tools.cli.completion import complete_names, complete_places
from ckpt_tools.cli.options import (
    LOCATION,
    Once,
    end_process,
    quiet_option,
    show_progress,
    target_options,
    work_shared,
)
from ckpt_tools.operations.convert.run import convert as convert_checkpoint

if TYPE_CHECKING:
    from ckpt_tools.operations.convert.report import Converted


@click.command()
@click.argument("source", metavar="IN", type=LOCATION)
@click.argument("target", metavar="[OUT]", type=LOCATION, required=False)
@click.option("--strip-module", is_flag=True, help="Remove leading 'module.', repeated ones too, in every state dict.")
@click.option("--add-module", is_flag=True, help="Put 'module.' before every name.")
@click.option("--unwrap", is_flag=True, help="Remove every known wrapper (module, _orig_mod, FSDP ...) in any order and depth.")
@click.option("--strip-prefix", cls=Once, metavar="P", help="Remove a leading literal prefix.")
@click.option("--add-prefix", cls=Once, metavar="P", help="Put a literal prefix before every name.")
@click.option("--rename", multiple=True, metavar="REGEX=REPLACEMENT", help=r"re.sub on names, in order; \1 works. Repeatable.")
@click.option(
    "--keep",
    multiple=True,
    metavar="GLOB",
    shell_complete=complete_names,
    help="Keep only tensors whose name matches. Repeatable.",
)
@click.option(
    "--drop",
    multiple=True,
    metavar="GLOB",
    shell_complete=complete_names,
    help="Drop what matches, by name or dotted path. Repeatable.",
)
@click.option(
    "--select",
    cls=Once,
    metavar="WHERE",
    shell_complete=complete_places,
    help="One state dict or subtree (model, ema, netG) becomes the whole output.",
)
@click.option("--map-location", cls=Once, metavar="SPEC", help="cpu, cuda, cuda:1, or cuda:0=cuda:1,cuda:7=cpu.")
@click.option("--dtype", cls=Once, type=click.Choice(["bf16", "fp16", "fp32", "fp64"]), help="Cast float tensors.")
@click.option(
    "--dtype-only",
    multiple=True,
    metavar="GLOB",
    shell_complete=complete_names,
    help="Cast only tensors whose name matches. Repeatable.",
)
@target_options(
    stages=["exact+wrappers", "names", "structure", "position"],
    finding="How partners are found: by name without wrappers (the default); also by a common prefix or suffix; also by "
    "shape, order and names of layers; or zipped in order.",
)
@click.option("--plan", cls=Once, metavar="PLAN.toml", help="Match plan (TOML) that ckpt match wrote; it names the partners.")
@click.option(
    "--reinit",
    multiple=True,
    metavar="[GLOB=]SCHEME",
    help="Initial values for tensors that IN does not have: zeros, ones, normal:STD, trunc_normal:STD, uniform:A, "
    "xavier_uniform, xavier_normal, kaiming_uniform, kaiming_normal, orthogonal, target (what its constructor gives), default "
    "(PyTorch's own for the layer). Without GLOB it is for weights: biases get zeros, norms ones. Repeatable; of several "
    "globs the last that matches counts.",
)
@click.option(
    "--on-mismatch",
    cls=Once,
    type=click.Choice(["error", "reinit", "overlap", "skip"]),
    help="A tensor of another shape: refused, initialised anew, kept where both have rows and columns, or left out.",
)
@click.option(
    "--rows", multiple=True, metavar="[GLOB=]N,N,...", help="With overlap: which rows of IN, in this order. Repeatable."
)
@click.option("--adapt", is_flag=True, help="Fit a first convolution to other channels, position embeddings to another grid.")
@click.option("--seed", cls=Once, type=int, metavar="N", help="For initial values: one seed, the same bytes everywhere [0].")
@click.option(
    "--objects",
    cls=Once,
    type=click.Choice(["keep", "plain", "drop"]),
    help="What happens to objects that are not plain data. plain: a tensor that would be lost with one is an error.",
)
@click.option(
    "--slim",
    "--weights-only-content",
    "slim",
    is_flag=True,
    help="State dicts and plain values alone: no optimizer, scheduler, random state, objects; storages as large as needed.",
)
@click.option("--ema", is_flag=True, help="The averaged weights (ema, model_ema, ema_state_dict ...) become the whole output.")
@click.option(
    "--format",
    "format_",
    cls=Once,
    type=click.Choice(["pth", "pth-legacy", "safetensors", "dcp"]),
    help="Container of OUT; else by its name. pth-legacy: for PyTorch before 1.6. dcp: a folder for distributed jobs.",
)
@click.option("--shard-size", cls=Once, metavar="SIZE", help="OUT is a folder of shards of at most 5GB, 500MiB ... each.")
@click.option("--only-weights", is_flag=True, help="From folder to folder: leave config.json, tokenizer files and the like.")
@click.option("--partial", is_flag=True, help="Of the files of ranks: write what is whole, leave out and list the rest.")
@click.option("--overwrite", is_flag=True, help="Replace OUT if it exists.")
@click.option("--dry-run", is_flag=True, help="Report what would happen, write nothing.")
@click.option("--verify", is_flag=True, help="Check the CRC-32 of every record while copying.")
@click.option("--in-place", is_flag=True, help="Edit names and device tags in IN itself; no OUT. A kill leaves old or new.")
@click.option(
    "--reserve", cls=Once, type=click.IntRange(0, 64 << 20), metavar="BYTES", help="Room in a safetensors header.  [4096]"
)
@click.option("--compact", is_flag=True, help="Leave no gaps, at the price of moving every tensor.")
@click.option("--fsync", is_flag=True, help="Make a new OUT durable before returning (a replaced one always is).")
@quiet_option
@click.option("--json", "as_json", is_flag=True, help="The report as JSON; see docs/json.md.")
def convert(
    source: Path, target: Path | None, format_: str | None, in_place: bool, quiet: bool, as_json: bool, on_mismatch: str | None,
    seed: int | None, **options: Any,
) -> None:  # fmt: skip
    """Write IN as OUT with other names, devices, dtypes, container. OUT is the whole new file or is left alone.

    \b
    ckpt convert ddp.pth plain.pth --strip-module
    ckpt convert train.pth weights.safetensors --select model --unwrap
    ckpt convert gpu.pth cpu.pth --map-location cpu --dtype bf16
    ckpt convert huge.pth --in-place --strip-module
    ckpt convert old.pth new.pth --like models:resnet --like-args '{"num_classes": 200}' --on-mismatch reinit --reinit default
    ckpt convert train.ckpt weights.pth --slim
    ckpt convert big.pth folder --shard-size 5GB
    ckpt convert folder merged.safetensors

    The steps come in this order: --select, --objects, --ema, --slim, --keep and --drop (by the names in IN), --strip-module,
    --unwrap, --strip-prefix, --rename (split at its last =), --add-prefix, --add-module, --like or --plan, --map-location,
    --dtype.

    IN may be a folder: of shards with their index, of torch.distributed.checkpoint, of a file for each rank. Where OUT is a
    folder too, what is no weights comes along: config.json, the tokenizer's files; never code.

    With --shard-size or --format dcp the processes of torchrun --nproc-per-node N -m ckpt_tools convert ... share the work.

    Exit code: 0 done, 2 usage, 3 refused, 130 interrupted.
    """
    if in_place:
        report = _edit_in_place(source, target, {"format": format_, "on_mismatch": on_mismatch, "seed": seed, **options})
        _report(report, quiet=quiet, as_json=as_json)
        return
    if target is None:
        raise click.UsageError("Missing argument 'OUT'; --in-place does without.")
    preload = None if as_json or quiet else "ckpt_tools.render.converted"
    folder = options["shard_size"] is not None or format_ == "dcp"
    with work_shared(folder=folder) as ranks, show_progress(quiet=quiet, preload=preload) as progress:
        report = convert_checkpoint(
            source, target, format=cast("Any", format_), on_mismatch=cast("Any", on_mismatch or "error"), seed=seed or 0,
            progress=progress, ranks=ranks, **options,
        )  # fmt: skip
    if ranks is None or not ranks.rank:  # the first process reports for all
        _report(report, quiet=quiet, as_json=as_json)
    if ranks is not None and ranks.world > 1:
        end_process()


def _report(report: Converted, *, quiet: bool, as_json: bool) -> None:
    if as_json:
        from ckpt_tools.render.json import print_document

        print_document(report.to_json())
    elif not quiet:
        from ckpt_tools.render.converted import show_converted

        show_converted(report)


_IN_PLACE = (
    "strip_module", "add_module", "unwrap", "strip_prefix", "add_prefix", "rename", "map_location", "objects", "dry_run",
)  # fmt: skip


def _edit_in_place(path: Path, target: Path | None, options: dict[str, Any]) -> Converted:
    from ckpt_tools.operations.convert.in_place import edit_in_place

    if target is not None:
        raise click.UsageError("--in-place edits IN itself; leave OUT away.")
    if other := [name for name, value in options.items() if value and name not in _IN_PLACE]:
        raise click.UsageError(
            f"--in-place does not go with --{other[0].replace('_', '-')}: it leaves the tensors where they are."
        )
    return edit_in_place(path, **{name: options[name] for name in _IN_PLACE})
