"""The change from a base to a tuned model as a LoRA adapter that PEFT reads, and what it leaves."""

from __future__ import annotations

import json
import math
import os
import re
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from typing import Any, Literal

from ckpt_tools.edit.casts import to_little_endian
from ckpt_tools.edit.checksums import leaving
from ckpt_tools.edit.lora.config import CONFIG
from ckpt_tools.edit.lora.extraction import Changed, Extraction
from ckpt_tools.edit.lora.names import PEFT_PREFIX
from ckpt_tools.edit.lora.shapes import is_embedding, last_name, turned_by_biases
from ckpt_tools.errors import NothingMatchedError, UsageError
from ckpt_tools.fit.targets import choose_state_dict
from ckpt_tools.formats import safetensors
from ckpt_tools.formats.checkpoint import Checkpoint
from ckpt_tools.formats.contents import tensors_by_name
from ckpt_tools.formats.single import collector_paused
from ckpt_tools.io.content import Content, Piece, total
from ckpt_tools.io.content import Literal as Bytes
from ckpt_tools.io.output import check_folder, replacing_folder
from ckpt_tools.io.source import File, as_path
from ckpt_tools.io.writer import Progress, write
from ckpt_tools.operations.compare.sides import check_names
from ckpt_tools.operations.convert.options import DryRunOption, OutputOptions, Selection, WriteOptions
from ckpt_tools.parts.open import open_whole
from ckpt_tools.text import Report, listed
from ckpt_tools.tree.dtypes import CAST_TARGETS, DTYPES, DType
from ckpt_tools.tree.globs import Globs
from ckpt_tools.tree.names import unwrap
from ckpt_tools.tree.nodes import Dict, Entry, Node, as_dict, stored
from ckpt_tools.tree.options import as_in, as_keywords, option, record, several
from ckpt_tools.tree.output_names import refuse_input
from ckpt_tools.values.low_rank import Factors, Matrix, difference, difference_norm, factors
from ckpt_tools.values.numeric import row_major
from ckpt_tools.values.pytorch import need_torch

_TENSORS = "adapter_model.safetensors"


@record
class ExtractOptions(DryRunOption):
    """All that `extract_lora` takes."""

    rank: int | None = option("Rank of the adapter's matrices, or the smaller side of a weight if that is less.", metavar="R")
    only: str | Sequence[str] = several("Only tensors whose name matches.", metavar="GLOB")
    dtype: Literal["fp32", "bf16", "fp16"] = option(
        "Dtype of the adapter's matrices [fp32].", choices=["fp32", "bf16", "fp16"], default="fp32"
    )
    select: str | None = as_in(Selection, "select", "The state dict or subtree of both to compare.")
    overwrite: bool = as_in(OutputOptions, "overwrite", "Replace the adapter in OUT.")
    progress: Progress | None = as_in(WriteOptions, "progress", "Called with (modules done, modules in all).")

    def check(self) -> None:
        """Raise UsageError without a rank."""
        super().check()
        if not self.rank:
            raise UsageError("`rank` is missing: a whole number from 1 up.", fix="For example: `rank=16`.")


@dataclass(frozen=True, slots=True)
class ExtractedModule:
    """One module of an extracted adapter.

    Attributes:
        name: its path. shape: its weight's. rank: of its factors.
        size: how large the change is (Frobenius norm). error: how much of that the factors leave, from 0 to 1.
    """

    name: str
    shape: list[int]
    rank: int
    size: float
    error: float


@dataclass(slots=True, repr=False)
class Extracted(Report):
    """The report of `extract_lora`.

    Attributes:
        base, tuned, target: the paths. rank: what was asked for. dry_run: whether nothing was written.
        modules: those that became factors. saved: modules that the adapter holds whole. why: the reason of each of them.
        biases: how many biases it changes.
        left: tensors that differ, and that the adapter has no place for; they count as error.
        unchanged: tensors that are equal.
        size, error: of all changes together, as of one module.
        bytes: of the adapter's tensors.
    """

    base: str
    tuned: str
    target: str
    rank: int
    dry_run: bool = False
    modules: list[ExtractedModule] = field(default_factory=list)
    saved: list[str] = field(default_factory=list)
    why: dict[str, str] = field(default_factory=dict)
    biases: int = 0
    left: list[str] = field(default_factory=list)
    unchanged: int = 0
    size: float = 0.0
    error: float = 0.0
    bytes: int = 0


@as_keywords(ExtractOptions)
def extract_lora(sources: Sequence[File], target: File, options: ExtractOptions) -> Extracted:
    """Write what changed from a base to a tuned model as a LoRA adapter, a folder that PEFT reads.

    Of every weight of a linear layer, an embedding or a convolution that differs the adapter has the best factors of the rank
    (the first singular vectors of the difference). Modules of other kinds that differ (norms) it holds whole.

    Args:
        sources: the base and the tuned model, two checkpoints of one model in any container. target: the folder to write.
        options: those of `ExtractOptions`, as keywords.

    Returns:
        The report, with the error that is left.

    Raises:
        ConvertError: names that disagree, values that are not finite. NothingMatchedError: nothing differs. CkptError: see
        `convert`.
    """
    if len(sources) != 2:
        raise UsageError("An adapter is extracted from two checkpoints: the base, and the tuned model.")
    need_torch("The matrices of an adapter are worked out with it.")
    paths, target = [as_path(source) for source in sources], as_path(target)
    report = Extracted(str(paths[0]), str(paths[1]), str(target), int(options.rank or 0), options.dry_run)
    refuse_input(target, sources)
    check_folder(target, overwrite=options.overwrite or options.dry_run)
    with ExitStack() as stack, collector_paused():
        checkpoints = [stack.enter_context(open_whole(path)) for path in paths]
        base, tuned = (_tensors(checkpoint, options.select) for checkpoint in checkpoints)
        fix = f"ckpt convert fits the names of one to the other: `like={report.base!r}`."
        if tuned.keys() <= base.keys():
            fix = f"ckpt convert TUNED OUT `fill_from={report.base!r}` gives it those."
        check_names((report.base, base), (report.tuned, tuned), fix)
        left = [leaving(Dict(list(side.items())), (), keeps=False) for side in (base, tuned)]
        adapter = _Adapter(base, _sorted(base, tuned, options, report), options, report)
        adapter.make()
        for side in left:
            side.check_rest()
        for checkpoint in checkpoints:
            checkpoint.source.check_unchanged()
        if not options.dry_run:
            _write(adapter, target, paths, options)
    return report


def _sorted(base: Mapping[str, Node], tuned: Mapping[str, Node], options: ExtractOptions, report: Extracted) -> Extraction:
    """What differs, by what becomes of it; at least one weight becomes factors."""
    only = Globs([options.only] if isinstance(options.only, str) else options.only) if options.only else None
    found = Extraction(base, tuned, only)
    for glob in only.unused if only is not None else ():
        raise NothingMatchedError(f"`only={glob!r}` matches no tensor that differs.")
    if not found.factored:
        what = listed(sorted([*found.saved, *(row.name for row in found.left)]))
        raise NothingMatchedError(
            f"{report.tuned} and {report.base} differ in no weight that could become an adapter.",
            why=f"What differs: {what}." if what else "All tensors are equal.",
        )
    return found


def _tensors(checkpoint: Checkpoint, select: str | None) -> dict[str, Node]:
    """The tensors of the one state dict, by their names without wrappers."""
    checkpoint.locate()
    checkpoint.root = to_little_endian(checkpoint.root, checkpoint.byteorder)
    found = tensors_by_name(as_dict(choose_state_dict(checkpoint, select).node))
    plain = {unwrap(name): node for name, node in found.items()}
    return dict(plain) if len(plain) == len(found) else dict(found)


class _Adapter:
    """The adapter that is made: its tensors by PEFT's names, and its configuration."""

    def __init__(self, base: Mapping[str, Node], sorted_: Extraction, options: ExtractOptions, report: Extracted) -> None:
        self.base, self.sorted, self.options, self.report = base, sorted_, options, report
        self.dtype = DTYPES[CAST_TARGETS[options.dtype]]
        self.turned = turned_by_biases(base)
        self.tensors: dict[str, tuple[Entry, Content]] = {}

    def make(self) -> None:
        report, found = self.report, self.sorted
        squares = [difference_norm(Matrix.of(row.name, row.base), Matrix.of(row.name, row.tuned)) ** 2 for row in found.left]
        left = sum(squares)
        for done, (module, row) in enumerate(found.factored.items(), 1):
            made = self.add(module, row)
            squares.append(made.size**2)
            left += made.error**2
            if self.options.progress is not None:
                self.options.progress(done, len(found.factored))
        for rows in (*found.saved.values(), found.biases.values()):
            squares += [_size(row) ** 2 for row in rows]
        for module, rows in found.saved.items():
            for row in rows:
                self.put(f"{PEFT_PREFIX}{row.name}", row.tuned.dtype, row.tuned.shape, row_major(row.tuned))
            report.saved.append(module)
            report.why[module] = found.why[module]
        for module, row in found.biases.items():
            change = difference(Matrix.of(row.name, row.base), Matrix.of(row.name, row.tuned))
            self.put(f"{PEFT_PREFIX}{module}.lora_B.bias", DTYPES["float32"], row.base.shape, change)
        report.biases, report.unchanged = len(found.biases), found.unchanged
        report.left = [row.name for row in found.left]
        report.size = math.sqrt(sum(squares))
        report.error = math.sqrt(left) / report.size if report.size else 0.0
        report.bytes = sum(content.length for _, content in self.tensors.values())

    def add(self, module: str, row: Changed) -> Factors:
        base, tuned = Matrix.of(row.name, row.base), Matrix.of(row.name, row.tuned)
        rank = min(self.report.rank, base.rows, base.columns)
        embedding = len(base.shape) == 2 and is_embedding(module, self.base)
        made = factors(base, tuned, rank, self.dtype, turned=embedding or self.is_turned(module, base.shape))
        ones = (1,) * (len(base.shape) - 2)
        outputs = made.up.length // (rank * self.dtype.itemsize)
        inputs = base.shape[1:] if ones else (made.down.length // (rank * self.dtype.itemsize),)
        first, second = ("lora_embedding_A", "lora_embedding_B") if embedding else ("lora_A.weight", "lora_B.weight")
        self.put(f"{PEFT_PREFIX}{module}.{first}", self.dtype, (rank, *inputs), made.down)
        self.put(f"{PEFT_PREFIX}{module}.{second}", self.dtype, (outputs, rank, *ones), made.up)
        error = made.error / made.size if made.size else 0.0
        self.report.modules.append(ExtractedModule(module, list(base.shape), rank, made.size, error))
        return made

    def is_turned(self, module: str, shape: Sequence[int]) -> bool:
        """Whether a linear layer is stored as [in, out]."""
        return len(shape) == 2 and self.turned.get(last_name(module)) == {True}

    def put(self, name: str, dtype: DType, shape: tuple[int, ...], content: Content) -> None:
        self.tensors[name] = stored(name, dtype, shape, content, None), content

    def config(self) -> dict[str, Any]:
        """adapter_config.json. The scale of each module is 1: alpha is its rank."""
        rank = self.report.rank
        other = {f"^{re.escape(row.name)}": row.rank for row in self.report.modules if row.rank != rank}
        is_turned = any(self.is_turned(row.name, row.shape) for row in self.report.modules)
        return {
            "peft_type": "LORA", "base_model_name_or_path": self.report.base, "task_type": None, "inference_mode": True,
            "r": rank, "lora_alpha": rank, "lora_dropout": 0.0, "bias": "none", "use_rslora": False, "use_dora": False,
            "lora_bias": bool(self.sorted.biases), "fan_in_fan_out": is_turned, "init_lora_weights": True,
            "target_modules": self.targets(), "modules_to_save": self.report.saved or None,
            "rank_pattern": other, "alpha_pattern": other,
        }  # fmt: skip

    def targets(self) -> list[str] | str:
        """The modules: by their last names where those name no other, as people write them; else by one expression."""
        modules = {row.name for row in self.report.modules}
        lasts = {last_name(module) for module in modules}
        others = {name.rpartition(".")[0] for name in self.base} - modules
        if any(last_name(module) in lasts for module in others):
            return "|".join(re.escape(module) for module in sorted(modules))
        return sorted(lasts)


def _size(row: Changed) -> float:
    """How far a tensor that is held whole has moved; one of another shape has no measure."""
    if row.base.shape != row.tuned.shape or "float" not in {row.base.dtype.family} & {row.tuned.dtype.family}:
        return 0.0
    return difference_norm(Matrix.of(row.name, row.base), Matrix.of(row.name, row.tuned))


def _write(adapter: _Adapter, target: str | os.PathLike[str], inputs: Sequence[Any], options: ExtractOptions) -> None:
    """The folder, whole or not at all."""
    stale = re.compile(r"adapter_model\.(safetensors|bin)|adapter_config\.json")
    text = (json.dumps(adapter.config(), indent=2) + "\n").encode()
    pieces = safetensors.lay_out(adapter.tensors, {"format": "pt"})
    with replacing_folder(target, last=CONFIG, stale=stale, overwrite=options.overwrite, inputs=tuple(inputs)) as staging:
        staging.check_space(total(pieces) + len(text))
        for name, made in ((_TENSORS, pieces), (CONFIG, [Piece(Bytes(text))])):
            with staging.output(name) as output:
                write(made, output)
