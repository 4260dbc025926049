"""`ckpt convert`."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any, cast

import click

from ckpt_tools.cli.options import Once, quiet_option, show_progress, target_options, work_shared
from ckpt_tools.convert import convert as convert_checkpoint


@click.command()
@click.argument("source", metavar="IN", type=click.Path(path_type=Path))
@click.argument("target", metavar="OUT", type=click.Path(path_type=Path))
@click.option("--strip-module", is_flag=True, help="Remove leading 'module.', repeated ones too, in every state dict.")
@click.option("--add-module", is_flag=True, help="Put 'module.' before every name.")
@click.option("--unwrap", is_flag=True, help="Remove every known wrapper (module, _orig_mod, FSDP ...) in any order and depth.")
@click.option("--strip-prefix", cls=Once, metavar="P", help="Remove a leading literal prefix.")
@click.option("--add-prefix", cls=Once, metavar="P", help="Put a literal prefix before every name.")
@click.option("--rename", multiple=True, metavar="REGEX=REPLACEMENT", help=r"re.sub on names, in order; \1 works. Repeatable.")
@click.option("--keep", multiple=True, metavar="GLOB", help="Keep only tensors whose name matches. Repeatable.")
@click.option("--drop", multiple=True, metavar="GLOB", help="Drop what matches, by name or dotted path. Repeatable.")
@click.option(
    "--select", cls=Once, metavar="WHERE", help="One state dict or subtree (model, ema, netG) becomes the whole output."
)
@click.option("--map-location", cls=Once, metavar="SPEC", help="cpu, cuda, cuda:1, or cuda:0=cuda:1,cuda:7=cpu.")
@click.option("--dtype", cls=Once, type=click.Choice(["bf16", "fp16", "fp32", "fp64"]), help="Cast float tensors.")
@click.option("--dtype-only", multiple=True, metavar="GLOB", help="Cast only tensors whose name matches. Repeatable.")
@target_options
@click.option("--plan", cls=Once, metavar="PLAN.toml", help="Who is who, as ckpt match wrote it and a person edited it.")
@click.option(
    "--reinit",
    multiple=True,
    metavar="[GLOB=]SCHEME",
    help="Initial values for tensors that IN does not have: zeros, ones, normal:STD, trunc_normal:STD, uniform:A, "
    "xavier_uniform, xavier_normal, kaiming_uniform, kaiming_normal, orthogonal, target (what its constructor gives), default "
    "(PyTorch's own for the layer). Repeatable; of several globs the last that matches counts.",
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
    help="What happens to objects that are not plain data.",
)
@click.option(
    "--format",
    "format_",
    cls=Once,
    type=click.Choice(["pth", "pth-legacy", "safetensors", "dcp"]),
    help="Container of OUT; else by its extension. pth-legacy: for PyTorch before 1.6. dcp: a folder for distributed jobs.",
)
@click.option("--shard-size", cls=Once, metavar="SIZE", help="OUT is a folder of shards of at most 5GB, 500MiB ... each.")
@click.option("--overwrite", is_flag=True, help="Replace OUT if it exists.")
@click.option("--dry-run", is_flag=True, help="Report what would happen, write nothing.")
@click.option("--verify", is_flag=True, help="Check the CRC-32 of every record while copying.")
@click.option("--fsync", is_flag=True, help="Make a new OUT durable before returning (a replaced one always is).")
@quiet_option
@click.option("--json", "as_json", is_flag=True, help="The report as JSON.")
def convert(source: Path, target: Path, format_: str | None, quiet: bool, as_json: bool, on_mismatch: str | None,
            seed: int | None, **options: Any) -> None:  # fmt: skip
    """Write IN as OUT with other names, devices, dtypes, container. OUT is the whole new file or is left alone.

    \b
    ckpt convert ddp.pth plain.pth --strip-module
    ckpt convert train.pth weights.safetensors --select model --unwrap
    ckpt convert gpu.pth cpu.pth --map-location cpu --dtype bf16
    ckpt convert old.pth new.pth --like models:resnet --like-args '{"num_classes": 200}' --on-mismatch reinit --reinit default
    ckpt convert big.pth folder --shard-size 5GB
    ckpt convert folder merged.safetensors

    The steps come in this order: --select, --objects, --keep and --drop (by the names in IN), --strip-module, --unwrap,
    --strip-prefix, --rename (split at its last =), --add-prefix, --add-module, --like or --plan, --map-location, --dtype.

    IN may be a folder: of shards with their index, or of torch.distributed.checkpoint. With --shard-size the processes of
    torchrun --nproc-per-node N -m ckpt_tools convert ... share the shards among them.

    Exit code: 0 done, 2 usage, 3 refused, 130 interrupted.
    """
    preload = None if as_json or quiet else "ckpt_tools.render.converted"
    with work_shared(options["shard_size"]) as ranks, show_progress(quiet=quiet, preload=preload) as progress:
        report = convert_checkpoint(
            source, target, format=cast("Any", format_), on_mismatch=cast("Any", on_mismatch or "error"), seed=seed or 0,
            progress=progress, ranks=ranks, **options,
        )  # fmt: skip
    if ranks is not None and ranks.rank:
        return  # the first process reports for all
    if as_json:
        from ckpt_tools.render.json import line

        click.echo(line(report.to_json()))
    elif not quiet:
        from ckpt_tools.render.converted import print_converted
        from ckpt_tools.render.text import show

        show(partial(print_converted, report))
