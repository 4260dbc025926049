"""Convert a checkpoint: the call. What it does is in `conversion`, which is imported while the copying has begun."""

from __future__ import annotations

import os
import time
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from typing import TYPE_CHECKING, Any, Literal, TypeAlias

from ckpt_tools.errors import UsageError
from ckpt_tools.io.attributes import Inputs
from ckpt_tools.io.cloning import Clone
from ckpt_tools.io.output import (
    Output,
    is_address,
    output_target,
    replacing,
)
from ckpt_tools.tree.arguments import Location, Renames, natural
from ckpt_tools.tree.output_names import (
    Format,
    check_format,
    check_one_file,
    names_file,
    output_format,
)

if TYPE_CHECKING:
    import torch

    from ckpt_tools.fit.choices import OnMismatch, RowChoice
    from ckpt_tools.fit.retarget import Retargeting
    from ckpt_tools.io.ranks import Ranks
    from ckpt_tools.io.writer import Progress
    from ckpt_tools.matching import Stages
    from ckpt_tools.operations.convert.report import Converted

ObjectsPolicy: TypeAlias = Literal["keep", "plain", "drop"]


@natural
def convert(
    source: str | os.PathLike[str],
    target: str | os.PathLike[str],
    *,
    strip_module: bool = False,
    add_module: bool = False,
    unwrap: bool = False,
    strip_prefix: str | None = None,
    add_prefix: str | None = None,
    rename: Renames = (),
    keep: str | Sequence[str] = (),
    drop: str | Sequence[str] = (),
    select: str | None = None,
    map_location: Location | None = None,
    dtype: str | torch.dtype | None = None,
    dtype_only: str | Sequence[str] = (),
    objects: ObjectsPolicy | None = None,
    slim: bool = False,
    ema: bool = False,
    like: Any = None,
    like_args: str | Mapping[str, Any] | None = None,
    like_select: str | None = None,
    match: Stages | None = None,
    plan: str | os.PathLike[str] | None = None,
    allow_reshape: bool = False,
    reinit: str | Sequence[str] | Mapping[str, str] | None = None,
    on_mismatch: OnMismatch = "error",
    rows: RowChoice | Sequence[str] = None,
    adapt: bool = False,
    seed: int = 0,
    format: Format | None = None,
    overwrite: bool = False,
    dry_run: bool = False,
    verify: bool = False,
    reserve: int | None = None,
    compact: bool = False,
    fsync: bool = False,
    shard_size: str | int | None = None,
    only_weights: bool = False,
    partial: bool = False,
    ranks: Ranks | None = None,
    progress: Progress | None = None,
) -> Converted:
    """Read `source`, edit it, write `target`: the whole new file, or nothing.

    The steps come in this order: select, objects, ema, slim, keep and drop (by the names in `source`), names (strip_module,
    unwrap, strip_prefix, rename, add_prefix, add_module), the target (like, plan), devices, dtype.

    Args:
        source: the checkpoint to read. target: the file to write.
        strip_module: remove leading `module.`, repeated ones too, in every state dict. add_module: put one before every name.
        unwrap: remove every known wrapper, in any order and depth.
        strip_prefix, add_prefix: any literal prefix.
        rename: `REGEX=REPLACEMENT`, a pair of the two, or several in a list or mapping; applied in order with `re.sub`.
        keep, drop: globs on tensor names or dotted paths.
        select: the dotted path of a state dict or subtree that becomes the whole output.
        map_location: one device for all storages, or `from=to` pairs separated by commas, or a mapping of them.
        dtype: cast float tensors: bf16, fp16, fp32, fp64, or a torch.dtype. dtype_only: globs that say which.
        objects: what happens to objects that are not plain data; without it a file that has some is refused.
        slim: keep state dicts and plain values alone, on storages no larger than they need be.
        ema: the averaged weights become the whole output.
        like: the target that the state dict is fitted to: a checkpoint, "package.module:callable" (imported and called), an
            `nn.Module` or a state dict. like_args: keyword arguments of the callable, as a mapping or JSON text.
            like_select: the dotted path of the state dict, where the target holds several.
        match: how partners are found: "exact+wrappers" (also when None), "names", "structure" or "position".
        plan: a plan file that names the partners instead. allow_reshape: take partners whose shapes differ by sizes of 1.
        reinit: a scheme for weights that the checkpoint does not have (biases get zeros, norms ones), `GLOB=SCHEME` texts, or a
            mapping of them, which are literal.
        on_mismatch: for a tensor of another shape: "error"; "reinit"; "overlap" keeps what fits and initialises the rest;
            "skip" leaves it out.
        rows: with "overlap": which rows of the checkpoint's tensors, in which order; for one name by a mapping from globs.
        adapt: fit a first convolution to other input channels, and position embeddings to another grid.
        seed: for initial values; one seed gives the same bytes on every machine.
        format: "pth", "pth-legacy" (what PyTorch before 1.6 reads), "safetensors" or "dcp" (a folder for
            `torch.distributed.checkpoint`); else by the target's extension, see `ckpt_tools.tree.output_names`.
        shard_size: the target is a folder of shards of at most so many bytes of tensors each ("5GB", "500MiB", a number),
            with their index; in safetensors unless `format` says "pth".
        only_weights: from a folder into a folder: leave configuration and tokenizer files, which come along else.
        partial: of the files of ranks: leave out what is not whole (a rank is missing, ranks disagree), and list it.
        ranks: the processes that share the work of a sharded output (`ckpt_tools.io.ranks.launched`).
        overwrite: replace an existing target. dry_run: only report. verify: check CRC-32s while copying.
        reserve: bytes of room in a safetensors header for longer names, 4096 unless told, so that an edit in place fits.
        compact: leave no gaps, not even where keeping them would spare moving the tensors.
        fsync: make a new file durable before returning (a replaced one always is).
        progress: called with (bytes written, bytes in total).

    Returns:
        The report.

    Raises:
        CkptError: see `ckpt_tools.errors`; nothing has been written then.
    """
    started = time.perf_counter()
    limit = None if shard_size is None else shard_limit(target, shard_size, format)
    kind = format or "safetensors" if limit is not None else output_format(target, format)
    to_folder = limit is not None or kind == "dcp"
    if not to_folder:
        check_one_file(source, target, format)
    with ExitStack() as stack:
        output = None
        if not to_folder:  # which is looked at by whoever writes it
            output = open_output(stack, target, (source,), overwrite=overwrite, durable=fsync, dry_run=dry_run)
        targeted = like is not None or plan is not None
        moving = keep or drop or select or dtype or verify or compact or targeted or slim or ema
        clone = None
        if output is not None and kind == "pth" and not moving and not is_address(target):
            clone = stack.enter_context(Clone(source, output))  # the tensors will stay where they lie in the input
        from ckpt_tools.operations.convert.conversion import Edits, run
        from ckpt_tools.operations.convert.names import Names

        names = Names(
            strip_module=strip_module, add_module=add_module, unwrap=unwrap, strip_prefix=strip_prefix,
            add_prefix=add_prefix, rename=rename,
        )  # fmt: skip
        edits = Edits(
            names, kind, keep=keep, drop=drop, select=select, map_location=map_location, dtype=dtype, dtype_only=dtype_only,
            objects=objects, slim=slim, ema=ema, verify=verify, reserve=reserve, compact=compact, partial=partial,
            retargeting=_retargeting(
                like, like_args, match, plan, allow_reshape, reinit, on_mismatch, rows, adapt, seed, like_select
            ),
        )  # fmt: skip
        stack.enter_context(edits.stack)
        if to_folder:
            from ckpt_tools.io.ranks import Ranks
            from ckpt_tools.operations.convert.folder import FolderTarget, run_folder

            place = FolderTarget(
                target,
                kind,
                overwrite=overwrite,
                durable=fsync,
                dry_run=dry_run,
                inputs=(source,),
                only_weights=only_weights,
                ranks=ranks if ranks is not None else Ranks(),
            )
            report = run_folder(source, place, edits, limit or 0, progress)
        else:
            report = run(source, target, edits, output, clone, progress)
    report.seconds = time.perf_counter() - started
    return report


def _retargeting(like: Any, like_args: Any, *options: Any) -> Retargeting | None:
    """The options about a target, checked; what does the work is imported where one of them is given."""
    if like is None and not like_args and not any(option for option in options if option != "error"):
        return None
    from ckpt_tools.fit.retarget import Retargeting

    return Retargeting(like, like_args, *options) or None


def open_output(
    stack: ExitStack, target: str | os.PathLike[str], inputs: Inputs, *, overwrite: bool, durable: bool, dry_run: bool
) -> Output | None:
    """The file to write, until the stack ends, which gives it its name; None in a dry run. It may be read by those who may
    read its inputs. What writes to an address is imported for it only.

    Raises:
        OutputError: it cannot be written, or is there already.
    """
    if not is_address(target):
        if not dry_run:
            return stack.enter_context(replacing(target, overwrite=overwrite, durable=durable, inputs=inputs))
        output_target(target, overwrite=True)
    else:
        from ckpt_tools.io.uploads import check_upload, uploading

        if not dry_run:
            return stack.enter_context(uploading(os.fspath(target), overwrite=overwrite))
        check_upload(os.fspath(target), overwrite=True)
    return None


def shard_limit(target: str | os.PathLike[str], shard_size: str | int, format: Format | None) -> int:
    """Bytes of tensors in a shard, from what --shard-size says.

    Raises:
        UsageError: no size, a format that has no shards, or a target that looks like a file.
    """
    from ckpt_tools.formats.sharded import parse_size

    check_format(format)
    if format in ("dcp", "pth-legacy"):
        raise UsageError(f"`shard_size` is for safetensors and pth; {format} has no shards of that kind.")
    if names_file(target):
        raise UsageError(f"`shard_size` writes a folder; {target} looks like a file.", fix="Name a folder.")
    try:
        return parse_size(shard_size)
    except ValueError:
        raise UsageError(f"`shard_size={shard_size!r}` is not a size.", fix="For example: 5GB, 500MB, 2GiB.") from None
