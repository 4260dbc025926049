"""`ckpt convert`."""

from __future__ import annotations

import contextlib
import os
import re
import sys
from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from ckpt_tools.cli.help import LongHelp
from ckpt_tools.cli.options import (
    LOCATION,
    OUT,
    OUTPUT,
    given,
    once,
    one_out,
    options_of,
    out_option,
    print_failure,
    print_report,
    report_options,
    show_progress,
)
from ckpt_tools.errors import CkptError
from ckpt_tools.operations.convert.options import ConvertOptions, InPlaceOptions
from ckpt_tools.operations.convert.report import Converted
from ckpt_tools.operations.convert.run import convert_with

if TYPE_CHECKING:
    from ckpt_tools.io.ranks import Ranks


def one_of(value: str) -> tuple[int, int]:
    """K/N: one of N jobs."""
    found = re.fullmatch(r"(\d{1,9})/(\d{1,9})", value)
    if found is None or not 1 <= int(found[1]) <= int(found[2]):
        raise click.BadParameter(f"{value!r} is not K/N with K from 1 to N: 3/16.")
    return int(found[1]), int(found[2])


@click.command(cls=LongHelp, record=ConvertOptions, short_help="Rename, cast, move, change the format.")
@click.argument("source", metavar="IN", type=LOCATION)
@click.argument("target", metavar="[OUT]", type=OUT, required=False)
@click.argument("more", metavar="| IN... --to-dir DIR", nargs=-1, type=OUTPUT)
@options_of(ConvertOptions, objects={"envvar": "CKPT_OBJECTS"})
@out_option
@click.option("--in-place", is_flag=True, help="Replace IN; give no OUT.")
@once(
    "--to-dir", type=click.Path(path_type=Path, file_okay=False), metavar="DIR",
    help="Convert several IN, or every checkpoint of a folder, into DIR under their own names, with the extension of "
    "--format. If one fails, the others are still converted.",
)  # fmt: skip
@once(
    "--part", type=one_of, metavar="K/N", help="With --to-dir: convert the K-th of N shares of the files, as one of N jobs.",
)  # fmt: skip
@click.option("--skip-done", is_flag=True, help="With --to-dir: skip each IN whose OUT exists and is up to date.")
@report_options
def convert(
    source: Path, target: str | None, more: tuple[str, ...], output: str | None, in_place: bool, to_dir: Path | None,
    part: tuple[int, int] | None, skip_done: bool, quiet: bool, json: bool, **options: Any,
) -> None:  # fmt: skip
    """Convert IN to OUT: rename, cast, move, change the format. If it fails, OUT stays as it was.

    \b
    ckpt convert ddp.pth plain.pth --strip-module
    ckpt convert train.pth weights.safetensors --select model --unwrap
    ckpt convert gpu.pth cpu.pth --map-location cpu --dtype bf16
    ckpt convert huge.pth --in-place --strip-module
    ckpt convert old.pth new.pth --like models:resnet --like-args '{"num_classes": 200}' --on-mismatch reinit
    ckpt convert big.pth folder --shard-size 5GB
    ckpt convert folder merged.safetensors
    ckpt convert runs/*.pth --to-dir out --format safetensors

    The options are always applied in this order: select, objects, ema, slim, keep and drop (by the names in IN), dequantize,
    fold, lora, strip-module, unwrap, strip-prefix, rename (split at its last =), add-prefix, add-module, fill-from, tie, like
    or plan, map-location, dtype.

    IN may be a folder: shards with an index, torch.distributed.checkpoint, one file per rank. If OUT is a folder too,
    config.json and the tokenizer's files are copied; code never is.

    Plans that come with ckpt; each also works in reverse (llama-hf-to-meta):

    \b
    bert-hf-to-torch         llama-torchtitan-to-hf    vit-timm-to-torchvision
    gpt2-hf-to-nanogpt       llama-meta-to-torchtitan  vit-torchvision-to-hf
    llama-meta-to-hf         vit-timm-to-hf            vit-torchvision-to-hf5
    llama-megatron-to-hf     vit-timm-to-hf5

    torchrun --nproc-per-node N -m ckpt_tools convert ... shares the work among processes (--shard-size or --format dcp).

    Exit code: 0 success, 2 usage, 3 refused, 130 interrupted.
    """
    asked = _asked(options, in_place=in_place)
    if to_dir is not None:
        if in_place:
            raise click.UsageError("--to-dir does not go with --in-place.")
        if output is not None:
            raise click.UsageError("-o OUT does not go with --to-dir.")
        sources = [LOCATION.convert(value, None, None) for value in (source, target, *more) if value is not None]
        sys.exit(convert_many(sources, to_dir, asked, part or (1, 1), skip_done=skip_done, quiet=quiet, json=json))
    if part is not None or skip_done:
        raise click.UsageError(f"{'--part' if part is not None else '--skip-done'} needs --to-dir DIR.")
    if more:
        named = ", ".join((str(source), str(target), *map(str, more[:2]), *(["..."] if more[2:] else [])))
        raise click.UsageError(
            f"{2 + len(more)} paths were given ({named}), but IN and OUT are two. For several IN add --to-dir DIR. "
            "If one of them is the value of an option, quote it as one word: --rename 'OLD=NEW'."
        )
    target = one_out(target, output)
    if target is None and not in_place:
        raise click.UsageError("Missing OUT (or use --in-place).")
    folder = not in_place and ("shard_size" in asked or asked.get("format") == "dcp")
    with work_shared(folder=folder) as ranks, show_progress(quiet=quiet) as progress:
        if target is None or in_place:
            report = _edit_in_place(source, target, asked | {"progress": progress})
        else:
            report = convert_with(source, target, ConvertOptions(progress=progress, **asked), ranks)
    if ranks is None or not ranks.rank:  # the first process reports for all
        from ckpt_tools.render.converted import print_converted  # not before: the copying begins sooner

        print_report(report, print_converted, json=json, quiet=quiet)
    if ranks is not None and ranks.world > 1:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(0)  # now: threads of gloo that still run abort an interpreter that winds down


def _asked(options: dict[str, Any], *, in_place: bool) -> dict[str, Any]:
    """What was given; --objects from a variable is not meant for --in-place and --slim, which have no use for it."""
    asked = given(options)
    source = click.get_current_context().get_parameter_source("objects")
    if (in_place or asked.get("slim")) and source is click.core.ParameterSource.ENVIRONMENT:
        asked.pop("objects", None)
    return asked


def _edit_in_place(path: Path, target: str | None, asked: dict[str, Any]) -> Converted:
    from ckpt_tools.operations.convert.run import edit_in_place

    if target is not None:
        raise click.UsageError("--in-place replaces IN; give no OUT.")
    if other := [name for name in asked if name not in InPlaceOptions.options]:
        raise click.UsageError(f"--in-place does not go with --{other[0].replace('_', '-')}: it replaces IN.")
    return edit_in_place(path, **asked)


def convert_many(
    sources: Sequence[Path], folder: Path, asked: Mapping[str, Any], part: tuple[int, int],
    *, skip_done: bool, quiet: bool, json: bool,
) -> int:  # fmt: skip
    """Convert each that is for this job into the folder, and report; the exit code."""
    from ckpt_tools.operations.convert.run import convert_several, each_of, share_of, targets

    found = each_of(sources)
    sources, every = [source for source, _ in found], targets(found, folder, asked)
    pairs, done = share_of(list(zip(sources, every, strict=True)), part, skip_done=skip_done)
    sources, made = [source for source, _ in pairs], [target for _, target in pairs]
    results: list[Converted | CkptError] = []
    for source, result in zip(sources, convert_several(sources, made, asked), strict=True):
        results.append(result)
        if isinstance(result, CkptError):
            print_failure(source, result, json=json)
        elif json:
            from ckpt_tools.render.json import print_document

            print_document(result.to_json())
    if not json and not quiet:
        from ckpt_tools.render.converted import print_several
        from ckpt_tools.render.text import show

        show(partial(print_several, sources, made, results, passed=len(done), every=len(every)))
    return max((result.exit_code for result in results if isinstance(result, CkptError)), default=0)


@contextlib.contextmanager
def work_shared(*, folder: bool) -> Iterator[Ranks | None]:
    """The processes that torchrun started for a command whose output is a folder; None where one works alone."""
    if not folder or os.environ.get("WORLD_SIZE", "1") == "1":
        yield None
        return
    from ckpt_tools.io.ranks import launched

    with launched() as ranks:
        yield ranks
