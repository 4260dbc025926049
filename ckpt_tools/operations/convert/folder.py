"""A conversion whose output is a folder: shards with an index, or a distributed checkpoint; by one process or by several."""

from __future__ import annotations

import os
import re
import zlib
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from itertools import chain
from typing import TYPE_CHECKING

from ckpt_tools.edit import flatten
from ckpt_tools.edit.checksums import Leaving
from ckpt_tools.edit.flatten import Flat
from ckpt_tools.errors import CkptError, OutputError
from ckpt_tools.formats import safetensors, zip_writer
from ckpt_tools.formats.checkpoint import Checkpoint
from ckpt_tools.formats.contents import tensors_by_name
from ckpt_tools.formats.single import collector_paused
from ckpt_tools.io.content import Literal, Piece, total
from ckpt_tools.io.output import Staging, check_folder, output_error, output_errors, replacing_folder
from ckpt_tools.io.ranks import Ranks
from ckpt_tools.io.source import is_address
from ckpt_tools.io.temporaries import Inputs
from ckpt_tools.io.writer import Progress, write
from ckpt_tools.operations.convert import companions
from ckpt_tools.operations.convert.companions import Companions, say_plain
from ckpt_tools.operations.convert.conversion import records_leaving, report_flat, report_lost
from ckpt_tools.operations.convert.edits import Edited, Edits
from ckpt_tools.operations.convert.inputs import open_input
from ckpt_tools.operations.convert.options import ConvertOptions
from ckpt_tools.operations.convert.report import Converted
from ckpt_tools.parts import sharded
from ckpt_tools.parts.names import ONE_FILE
from ckpt_tools.tree.nodes import Dict, Node
from ckpt_tools.values.pytorch import need_torch

if TYPE_CHECKING:
    from torch.distributed.checkpoint.api import CheckpointException

    from ckpt_tools.operations.convert.dcp import Items


_STALE = {
    "safetensors": r"model-\d{5}-of-\d{5}\.safetensors|model\.safetensors\.index\.json",
    "pth": r"pytorch_model-\d{5}-of-\d{5}\.bin|pytorch_model\.bin\.index\.json",
    "dcp": r"__\d+_\d+\.distcp|\.metadata",
}


class FolderTarget:
    """The output folder of a conversion and how it is written."""

    def __init__(
        self, path: str | os.PathLike[str], kind: str, options: ConvertOptions, inputs: Inputs = (),
        ranks: Ranks | None = None, *, durable: bool = False,
    ) -> None:  # fmt: skip
        self.path, self.kind, self.options, self.inputs = path, kind, options, tuple(inputs)
        self.ranks, self.durable = ranks if ranks is not None else Ranks(), durable

    def check(self) -> None:
        """What can be refused before the input is read."""
        if self.kind == "dcp":
            need_torch("A distributed checkpoint is written by PyTorch's own writer.")
        overwrite, names = self.options.overwrite or self.options.dry_run, list[str]()
        if is_address(self.path):
            from ckpt_tools.io import remote

            remote.check_new_folder(os.fspath(self.path))
        elif (target := check_folder(self.path, overwrite=overwrite)).is_dir():
            with output_errors(target):
                names = os.listdir(target)
        others = "|".join(rule for kind, rule in _STALE.items() if kind != self.kind)
        found = sorted(name for name in names if name in ONE_FILE or re.fullmatch(others, name))
        if found:
            raise OutputError(
                f"{self.path} holds a checkpoint of another kind ({found[0]}).",
                why="A folder with two checkpoints is read as either.", fix="Name another folder, or remove those files first.",
            )  # fmt: skip

    def companions(self, checkpoint: Checkpoint, report: Converted) -> Companions:
        """The files beside the weights that come along, told in the report."""
        changed = bool(report.dropped or report.fitted or report.merged or report.dequantised)
        changed = changed or any(row.renamed for row in report.state_dicts)
        found = companions.find(checkpoint, report.source, self.path, changed=changed)
        if report.dequantised:
            say_plain(found, report)
        report.companions, report.stayed = list(found.names), list(found.stayed)
        if (report.casts or report.dequantised) and "config.json" in found.taken:
            text = "config.json is copied as it is: a dtype in it is that of the input, not of the cast tensors."
            report.note("config-dtype", text)
        return found

    def staged(self, stack: ExitStack, last: str) -> Staging:
        """Where the files go until all are there, made by the first process and known to all."""

        def enter() -> Staging | None:
            if self.ranks.rank:
                return None
            rule, overwrite = re.compile(_STALE[self.kind]), self.options.overwrite
            if is_address(self.path):
                from ckpt_tools.io import remote

                return stack.enter_context(remote.uploading_folder(os.fspath(self.path), last=last))
            return stack.enter_context(replacing_folder(
                self.path, last=last, stale=rule, overwrite=overwrite, durable=self.durable, inputs=self.inputs,
            ))  # fmt: skip

        staging = self.ranks.agree(enter)[0]
        assert staging is not None
        self.ranks.agree(lambda: staging.check_seen(self.ranks.rank))
        return staging


def run_folder(source: str | os.PathLike[str], target: FolderTarget, edits: Edits, limit: int) -> Converted:
    """Read, plan and write a folder."""
    target.check()
    report = Converted(str(source), str(target.path), "dcp" if target.kind == "dcp" else "sharded", target.options.dry_run)
    with ExitStack() as stack, open_input(source, edits.options) as checkpoint:
        if target.kind == "dcp":
            run_dcp(checkpoint, target, edits, report, stack)
        else:
            _run_shards(checkpoint, target, edits, limit, report, stack)
    return report


def _run_shards(
    checkpoint: Checkpoint, target: FolderTarget, edits: Edits, limit: int, report: Converted, inputs: ExitStack
) -> None:
    ranks = target.ranks

    def plan() -> tuple[Edited, Shards, Leaving, Companions]:
        with collector_paused():
            edited = edits.apply(checkpoint, report, inputs)
            shards, leaving = _shards(edited.root, checkpoint, edits, limit, report)
        return edited, shards, leaving, target.companions(checkpoint, report)

    edited, shards, leaving, beside = ranks.make_same(plan, lambda made: zlib.crc32(made[1].index))
    report.files = len(shards.files)
    report.bytes = sum(total(pieces) for _, pieces in shards.files) + len(shards.index)
    if target.options.dry_run:
        return
    with ExitStack() as stack:
        staging = target.staged(stack, shards.index_name)
        ranks.agree(lambda: _write_own(shards, staging, report.bytes + beside.bytes, ranks, edits.options.progress))
        ranks.agree(lambda: leaving.check_rest(ranks.rank, ranks.world))
        ranks.agree(lambda: companions.copy(beside, staging) if ranks.rank == 0 else None)
        ranks.agree(checkpoint.source.check_unchanged)
        report_lost(edited.casting, report, ranks)
        if ranks.rank == 0:
            _check_there(shards, staging)
            with staging.output(shards.index_name) as output:
                write([Piece(Literal(shards.index))], output)
    ranks.agree(lambda: None)  # the folder is in its place before any process says that it is done


def _shards(root: Node, checkpoint: Checkpoint, edits: Edits, limit: int, report: Converted) -> tuple[Shards, Leaving]:
    shards = (_safetensors_shards if edits.kind == "safetensors" else _torch_shards)(root, limit, checkpoint, edits)
    report_flat(shards.flat, report)
    leaving = records_leaving(root, chain.from_iterable(pieces for _, pieces in shards.files), checkpoint, edits)
    shards.files[:] = [(name, leaving.pieces(file)) for name, file in shards.files]
    return shards, leaving


def _write_own(shards: Shards, staging: Staging, size: int, ranks: Ranks, progress: Progress | None) -> None:
    """The shards of this process, each by the one loop."""
    staging.check_space(size // ranks.world)
    own = shards.files[ranks.rank :: ranks.world]
    whole, before = sum(total(pieces) for _, pieces in own), 0
    for name, pieces in own:
        with staging.output(name) as output:
            before += write(pieces, output, None if progress is None else partial(_shifted, progress, before, whole))


def _shifted(progress: Progress, before: int, whole: int, done: int, _: int) -> None:
    progress(before + done, whole)


def _check_there(shards: Shards, staging: Staging) -> None:
    """Every shard is there and whole, as the first process sees it, before the index says so."""
    sizes = staging.sizes()
    for name, pieces in shards.files:
        if sizes.get(name) != total(pieces):
            raise OutputError(
                f"The shard {name} is not whole in {staging.target}.", why="The file system lost what a process wrote."
            )


def run_dcp(checkpoint: Checkpoint, target: FolderTarget, edits: Edits, report: Converted, inputs: ExitStack) -> None:
    """Plan and write a distributed checkpoint; `target.check` has been asked. `inputs` stays open until that is done."""
    from ckpt_tools.operations.convert.dcp import collect

    ranks = target.ranks

    def plan() -> tuple[Edited, Items, Companions]:
        with collector_paused():
            edited = edits.apply(checkpoint, report, inputs)
            items = collect(edited.root, checkpoint.file_bytes)
        return edited, items, target.companions(checkpoint, report)

    def checksum(made: tuple[Edited, Items, Companions]) -> int:
        return zlib.crc32(repr([(item.name, item.nbytes) for item in made[1].items]).encode())

    edited, found, beside = ranks.make_same(plan, checksum)
    leaving = records_leaving(edited.root, (), checkpoint, edits)
    _note_dcp(found, report)
    report.aliases = dict(found.aliases)
    written = [item for item in found.items if item.name not in found.aliases]
    report.bytes = sum(item.nbytes for item in written)
    if target.options.dry_run:
        return
    with ExitStack() as stack:
        staging = target.staged(stack, ".metadata")
        ranks.agree(lambda: staging.check_space((report.bytes + beside.bytes) // ranks.world))
        _save(found, staging, ranks, edits.options.progress)
        ranks.agree(lambda: leaving.check_rest(ranks.rank, ranks.world))
        ranks.agree(lambda: companions.copy(beside, staging) if ranks.rank == 0 else None)
        ranks.agree(checkpoint.source.check_unchanged)
        report_lost(edited.casting, report, ranks)
        sizes = {name: size for name, size in ranks.agree(staging.sizes)[0].items() if name not in beside.taken}
        report.files = sum(name != ".metadata" for name in sizes)
        report.bytes = sum(sizes.values())
    ranks.agree(lambda: None)  # the folder is in its place before any process says that it is done


def write_dcp(root: Node, path: str | os.PathLike[str]) -> None:
    """Write a tree as a distributed checkpoint, in the place of one that is there; durable."""
    target = FolderTarget(path, "dcp", ConvertOptions(overwrite=True), durable=True)
    target.check()
    from ckpt_tools.operations.convert.dcp import collect

    found = collect(root)
    with ExitStack() as stack:
        staging = target.staged(stack, ".metadata")
        staging.check_space(sum(item.nbytes for item in found.items))
        _save(found, staging, target.ranks, None)


def _note_dcp(found: Items, report: Converted) -> None:
    if others := found.text_keys - found.states:
        text = f"{others} keys that are not text became text, as torch.distributed.checkpoint makes them."
        report.note("keys-text", text)
    if found.states:
        text = f"{found.states} optimizer states lie under text, as torch has it; ckpt reads them under whole numbers again."
        report.note("optimizer-keys", text)
    if found.attributes:
        text = "A distributed checkpoint cannot store the _metadata of state dicts (module versions); it is left out."
        report.note("state-dict-metadata", text)


def _save(found: Items, staging: Staging, ranks: Ranks, progress: Progress | None) -> None:
    from torch.distributed.checkpoint.api import CheckpointException

    from ckpt_tools.operations.convert.dcp import save

    try:
        with ranks.connected():
            save(found, staging, ranks, progress)
    except CkptError:  # some of ours are an OSError too
        raise
    except OSError as error:
        raise output_error(staging.target, error) from None
    except CheckpointException as error:
        raise _own_error(error, staging, ranks) from None


def _own_error(error: CheckpointException, staging: Staging, ranks: Ranks) -> BaseException:
    """What failed inside torch's writer, in this process or another: our own error where it was ours, else what it says."""
    rank, (found, _) = min(error.failures.items())
    failure = _began_with(found)
    if isinstance(failure, KeyboardInterrupt | SystemExit):  # torch takes Ctrl-C and SIGTERM for failures of the writing
        return failure
    if isinstance(failure, OSError) and not isinstance(failure, CkptError):
        failure = output_error(staging.target, failure)
    elif not isinstance(failure, CkptError):
        failure = OutputError(f"{staging.target} cannot be written.", why=f"torch.distributed.checkpoint: {failure}")
    return ranks.blamed(rank, failure)


def _began_with(failure: BaseException) -> BaseException:
    """What a failure began with: where a write fails, torch closes its archive with an error about missing bytes."""
    at: BaseException | None = failure
    while at is not None and not isinstance(at, CkptError | OSError | KeyboardInterrupt | SystemExit):
        at = at.__cause__ or at.__context__
    return failure if at is None else at


@dataclass(frozen=True, slots=True)
class Shards:
    """The files in order, the index's name and text, and what became of ties and values (as when one file is written)."""

    files: list[tuple[str, list[Piece]]]
    index_name: str
    index: bytes
    flat: Flat


def _safetensors_shards(root: Node, limit: int, checkpoint: Checkpoint, edits: Edits) -> Shards:
    """Lay a tree out in safetensors shards of at most `limit` bytes of tensors each."""
    objects, texts = edits.options.objects, edits.texts
    flat = flatten.flatten(root, objects=objects, metadata=checkpoint.metadata, texts=texts, shards=True)
    shards = sharded.split([(name, content.length) for name, (_, content) in flat.tensors.items()], limit)
    names, files = sharded.SAFETENSORS, []
    weight_map: dict[str, str] = {}
    said = {key: flat.metadata[key] for key in ("format", *dict(texts)) if key in flat.metadata}
    for number, shard in enumerate(shards):
        file = names.shard(number + 1, len(shards))
        files.append((file, safetensors.lay_out({name: flat.tensors[name] for name in shard}, said)))
        weight_map |= dict.fromkeys(shard, file)
    total = sum(content.length for _, content in flat.tensors.values())
    return Shards(files, names.index, sharded.index_text(weight_map, total, _index_metadata(flat)), flat)


def _torch_shards(root: Node, limit: int, checkpoint: Checkpoint, edits: Edits) -> Shards:
    """Lay a tree out in torch-zip shards; tensors that share a storage stay together, as views on it."""
    objects, metadata = edits.options.objects, checkpoint.metadata
    state_dict, flat = flatten.one_state_dict(root, objects=objects, metadata=metadata, holder="A sharded checkpoint")
    flatten.set_texts(flat.metadata, edits.texts)
    items: list[tuple[str, Node]] = [*tensors_by_name(state_dict.node).items()]
    groups = sharded.storage_groups(items)
    names, homes = sharded.TORCH, dict[str, str]()
    shards = sharded.split([(str(number), size) for number, (_, size) in enumerate(groups)], limit)
    for number, shard in enumerate(shards):
        homes |= {name: names.shard(number + 1, len(shards)) for group in shard for name in groups[int(group)][0]}
    trees: dict[str, Dict] = {file: Dict(ordered=True) for file in homes.values()} or {names.shard(1, 1): Dict(ordered=True)}
    for name, node in items:
        trees[homes[name]].items.append((name, node))
    files = [(file, zip_writer.lay_out(tree, trust_crc=checkpoint.has_checksums)) for file, tree in trees.items()]
    weight_map = {name: homes[name] for name, _ in items}
    total = sum(size for _, size in groups)
    return Shards(files, names.index, sharded.index_text(weight_map, total, _index_metadata(flat)), flat)


def _index_metadata(flat: Flat) -> dict[str, str]:
    """What the index says beside the map: values of the checkpoint as text. `format` stands in each shard."""
    return {key: text for key, text in flat.metadata.items() if (key, text) != ("format", "pt")}
