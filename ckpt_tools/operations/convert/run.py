"""Convert a checkpoint: the call. What it does is in `conversion`, which is imported while the copying has begun."""

from __future__ import annotations

import os
import time
from contextlib import ExitStack
from typing import TYPE_CHECKING

from ckpt_tools.errors import UsageError
from ckpt_tools.io.attributes import Inputs
from ckpt_tools.io.cloning import Clone
from ckpt_tools.io.member_paths import File, as_path
from ckpt_tools.io.output import Output, is_address, output_target, replacing
from ckpt_tools.operations.convert.options import ConvertOptions
from ckpt_tools.operations.convert.report import Converted
from ckpt_tools.tree.options import as_keywords
from ckpt_tools.tree.output_names import Format, check_format, check_one_file, names_file, output_format

if TYPE_CHECKING:
    from ckpt_tools.formats.checkpoint import Checkpoint
    from ckpt_tools.io.ranks import Ranks


@as_keywords(ConvertOptions)
def convert(source: File, target: File, options: ConvertOptions) -> Converted:
    """Read `source`, edit it, write `target`: the whole new file, or nothing.

    The steps come in this order: select, objects, ema, slim, keep and drop (by the names in `source`), dequantize, fold, lora,
    names (strip_module, unwrap, strip_prefix, rename, add_prefix, add_module), fill_from, tie, the target (like, plan),
    devices, dtype.

    Args:
        source: the checkpoint to read, IN. target: the file to write, OUT.
        options: those of `ConvertOptions`, as keywords.

    Returns:
        The report.

    Raises:
        CkptError: see `ckpt_tools.errors`; nothing has been written then.
    """
    return convert_with(as_path(source), as_path(target), options)


def convert_with(
    source: str | os.PathLike[str],
    target: str | os.PathLike[str],
    options: ConvertOptions,
    ranks: Ranks | None = None,
    opened: Checkpoint | None = None,
) -> Converted:
    """`convert` with its options in their record; `ranks` share the work of a sharded output, `opened` is the source, open."""
    started = time.perf_counter()
    limit = None if options.shard_size is None else shard_limit(target, options.shard_size, options.format)
    kind = options.format or "safetensors" if limit is not None else output_format(target, options.format)
    to_folder = limit is not None or kind == "dcp"
    if not to_folder:
        check_one_file(source, target, options.format)
    filling = () if options.fill_from is None else (options.fill_from,)
    inputs = (source, *(path for path, _ in options.adapters), *filling)
    with ExitStack() as stack:
        output = None if to_folder else open_output(stack, target, inputs, options)  # a folder is opened by who writes it
        clone = None
        if output is not None and kind == "pth" and not options.moves_tensors and not is_address(target):
            clone = stack.enter_context(Clone(source, output))  # the tensors will stay where they lie in the input
        from ckpt_tools.operations.convert.conversion import run
        from ckpt_tools.operations.convert.edits import Edits

        edits = Edits(options, kind)
        if to_folder:
            from ckpt_tools.operations.convert.folder import FolderTarget, run_folder

            report = run_folder(source, FolderTarget(target, kind, options, inputs, ranks), edits, limit or 0)
        else:
            report = run(source, target, edits, output, clone, opened)
    report.seconds = time.perf_counter() - started
    return report


def open_output(stack: ExitStack, target: str | os.PathLike[str], inputs: Inputs, options: ConvertOptions) -> Output | None:
    """The file to write, until the stack ends, which gives it its name; None in a dry run."""
    if not is_address(target):
        if not options.dry_run:
            return stack.enter_context(replacing(target, overwrite=options.overwrite, inputs=inputs))
        output_target(target, overwrite=True)
    else:
        from ckpt_tools.io.remote import check_upload, uploading

        if not options.dry_run:
            return stack.enter_context(uploading(os.fspath(target), overwrite=options.overwrite))
        check_upload(os.fspath(target), overwrite=True)
    return None


def shard_limit(target: str | os.PathLike[str], shard_size: str | int, format: Format | None) -> int:
    """Bytes of tensors in a shard, from what --shard-size says."""
    from ckpt_tools.parts.sharded import parse_size

    check_format(format)
    if format in ("dcp", "pth-legacy", "gguf"):
        raise UsageError(f"`shard_size` is for safetensors and pth; {format} has no shards of that kind.")
    if names_file(target):
        raise UsageError(f"`shard_size` writes a folder; {target} looks like a file.", fix="Name a folder.")
    try:
        return parse_size(shard_size)
    except ValueError:
        raise UsageError(f"`shard_size={shard_size!r}` is not a size.", fix="For example: 5GB, 500MB, 2GiB.") from None
