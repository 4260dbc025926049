"""Which checkpoint of a training run is the last good one: the newest below a folder that is whole, finite and loads."""

from __future__ import annotations

import contextlib
import os
import re
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TypeAlias

from ckpt_tools.errors import CkptError, NotACheckpointError
from ckpt_tools.formats.contents import StateDict, is_tensor
from ckpt_tools.formats.single import collector_paused
from ckpt_tools.io.source import is_address, is_there, missing
from ckpt_tools.io.writer import Progress
from ckpt_tools.operations.check.report import Checked
from ckpt_tools.operations.check.run import Wanted, check_many
from ckpt_tools.operations.in_folders import find_checkpoints
from ckpt_tools.parts.open import open_checkpoint
from ckpt_tools.parts.training import trainer_state
from ckpt_tools.tree.findings import Finding
from ckpt_tools.tree.nodes import Dict, Entry, Node
from ckpt_tools.tree.options import natural

# How writers call a file that is not finished: torch's and Lightning's own, rsync's, browsers', Hugging Face's.
_UNFINISHED = (".tmp", ".temp", ".part", ".partial", ".incomplete", ".crdownload", ".download", ".writing")
# How they call the folder of one: transformers' `tmp-checkpoint-500`, Orbax's `500.orbax-checkpoint-tmp-3`.
_STAGING = re.compile(r"tmp-.+|.+[-_.]te?mp|.+\.orbax-checkpoint-tmp.*", re.IGNORECASE)
_FAILING = frozenset(("partition", "no-index", "alone"))  # warnings that say: this is not the whole checkpoint


Step: TypeAlias = tuple[float, float]  # the epoch and the step
_UNSAID: Step = -1, -1  # so that what says it is later than what does not


@dataclass(frozen=True, slots=True, order=True)
class _Candidate:
    """A checkpoint that may be the one: how far the training was, and the newest time of its files."""

    step: Step
    time: int
    path: Path
    readable: bool


@dataclass(frozen=True, slots=True)
class LatestGood:
    """The last good checkpoint, and what is newer and not good."""

    report: Checked | None
    passed_over: list[Checked]
    unfinished: list[Path]

    @property
    def path(self) -> Path | None:
        return None if self.report is None else Path(self.report.path)


@natural
def latest_good(
    path: str | os.PathLike[str], *, ignore: Collection[str] = (), device: str | None = None, progress: Progress | None = None
) -> Path | None:
    """Find the last good checkpoint below a folder: the newest that `check(..., values=True)` has no problem with.

    The newest is the one with the highest epoch, then step, that it says itself (else trainer_state.json beside it, else its
    name); of equals, and of those that say none, the one that was written last. What is still being written is not taken,
    nor what holds no weights (an optimizer's file), nor one process's part of a model.

    Args:
        path: the folder.
        ignore: codes of findings that do not count.
        device: what the machine has that will load it; see `check`.
        progress: called with (bytes read, bytes in total) for each checkpoint that is read.

    Returns:
        The file or folder; None where none is good.

    Raises:
        CkptError: the folder cannot be read. UsageError: no finding has a code that is to be ignored.
    """
    ignore = (ignore,) if isinstance(ignore, str) else ignore
    return find_latest_good([Path(path)], Wanted(values=True, ignore=ignore, device=device), progress).path


def find_latest_good(paths: Sequence[Path], wanted: Wanted, progress: Progress | None = None) -> LatestGood:
    """The last good checkpoint of several folders and files; see `latest_good`. The newest is read first, and few are."""
    unfinished: list[Path] = []
    candidates = sorted(_candidates(paths, unfinished), reverse=True)
    passed_over: list[Checked] = []
    for number, candidate in enumerate(candidates):
        before = _state(candidate.path)
        (report,) = check_many([candidate.path], wanted, progress=progress)
        if _state(candidate.path) != before:
            unfinished.append(candidate.path)
        elif report.container is not None and not failures(report):
            rest = [one for one in candidates[number + 1 :] if not one.readable and one.time > candidate.time]
            return LatestGood(report, [*passed_over, *check_many([one.path for one in rest], wanted)], unfinished)
        else:
            passed_over.append(report)
    return LatestGood(None, passed_over, unfinished)


def failures(report: Checked) -> list[Finding]:
    """The findings for which a checkpoint is not a good one: problems, and that it is only a part."""
    return [finding for finding in report.findings if finding.severity == "problem" or finding.code in _FAILING]


def _candidates(paths: Sequence[Path], unfinished: list[Path]) -> Iterator[_Candidate]:
    for path, names in dict(_below(paths)).items():
        unready = any(name.lower().endswith(_UNFINISHED) or _STAGING.fullmatch(name) for name in names)
        if unready or path.name.startswith("."):
            unfinished.append(path)
            continue
        step: Step | None
        try:
            with collector_paused(), open_checkpoint(path) as checkpoint:
                # What is said in the tree, in the header's text, or in what lies beside it
                told = (step_in(checkpoint.root), step_in_texts(checkpoint.metadata), *map(step_in, checkpoint.beside.values()))
                step = _first_known(told) if any(map(_holds_weights, checkpoint.state_dicts)) else None
            readable = True
        except CkptError:
            step, readable = _UNSAID, False
        if step is not None:
            written = max((time for _, _, _, time in _state(path)), default=0)
            yield _Candidate(step if step != _UNSAID else _step_around(path), written, path, readable)


def _below(paths: Sequence[Path]) -> Iterator[tuple[Path, tuple[str, ...]]]:
    """Every checkpoint, with the names that are below the path that was given."""
    for path in paths:
        if is_address(path):
            raise NotACheckpointError(f"{path} is an address.", why="The last good checkpoint is looked for in folders here.")
        if not is_there(path):
            raise missing(path)
        if os.path.isdir(path):
            content = find_checkpoints(path)
            if content.unlisted:  # where the last one may be
                raise NotACheckpointError(f"{content.unlisted[0]} cannot be read.", why="The folder cannot be listed.")
            yield from ((found, found.relative_to(path).parts) for found in content.checkpoints)
        else:
            yield path, (path.name,)


def _holds_weights(state_dict: StateDict) -> bool:
    """Whether it has any tensor but the states of random generators, which are rows of uint8."""
    tensors = (node for _, node in state_dict.node.items if is_tensor(node))
    return any(type(node) is not Entry or node.dtype.name != "uint8" or len(node.shape) != 1 for node in tensors)


def _step_around(path: Path) -> Step:
    """What the Trainer's state beside it says, its name, or its folder's."""
    folder = path if path.is_dir() else path.parent
    if found := trainer_state(folder):
        return step_in_texts(found)
    return _first_known((step_in_name(path.name), step_in_name(path.absolute().parent.name)))


def _first_known(steps: Iterable[Step]) -> Step:
    return next((step for step in steps if step != _UNSAID), _UNSAID)


def _state(path: Path) -> list[tuple[str, int, int, int]]:
    """What changes while the files of a checkpoint are written."""
    found, below = [], [os.path.join(folder, name) for folder, _, names in os.walk(path) for name in names]
    for name in below if path.is_dir() else [str(path)]:
        with contextlib.suppress(OSError):
            stat = os.stat(name)
            found.append((name, stat.st_ino, stat.st_size, stat.st_mtime_ns))
    return sorted(found)


# What frameworks call them: PyTorch's examples, Lightning, DeepSpeed, Megatron-LM, timm, nanoGPT, fairseq.
_EPOCHS = ("epoch", "epochs", "current_epoch")
_WITHIN = "common"  # where Megatron-core keeps them
_STEPS = (
    "global_step", "global_steps", "step", "steps", "iteration", "iter", "iter_num", "num_updates", f"{_WITHIN}.iteration",
)  # fmt: skip
_NAME = re.compile(r"(epoch|global_step|iteration|iter|step|checkpoint|ckpt)[-_=]?(\d{1,18})(?!\d)", re.IGNORECASE)


def step_in(root: Node) -> Step:
    """What the dict at the top of a checkpoint says, or the one below it where Megatron-core keeps it."""
    if type(root) is not Dict:
        return _UNSAID
    found, inner = _said(root.named), root.get(_WITHIN)
    return _said(inner.named) if found == _UNSAID and type(inner) is Dict else found


def step_in_texts(texts: Mapping[str, object]) -> Step:
    """What a mapping of plain values says, which may be numbers as text: a safetensors header, a JSON file."""
    return _said({name: _as_number(value) for name, value in texts.items()})


def step_in_name(name: str) -> Step:
    """What the name of a file or a folder says: `epoch_012.pth`, `checkpoint-500`, `global_step100`."""
    found = {word.lower() == "epoch": int(digits) for word, digits in _NAME.findall(name)}
    return found.get(True, -1), found.get(False, -1)


def _said(values: Mapping[str, object]) -> Step:
    def first(names: Sequence[str]) -> float:
        for value in map(values.get, names):
            if (type(value) is int or type(value) is float) and 0 <= value < 1 << 63:
                return value
        return -1

    return first(_EPOCHS), first(_STEPS)


def _as_number(value: object) -> object:
    if not isinstance(value, str):
        return value
    try:
        return float(value) if not value.isdecimal() or len(value) > 18 else int(value)
    except ValueError:
        return value
