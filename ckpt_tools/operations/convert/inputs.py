"""The input of a conversion: opened, and what is odd about it told before anything is edited."""

from __future__ import annotations

import os

from ckpt_tools.edit import renaming
from ckpt_tools.errors import MissingFileError, PartError
from ckpt_tools.formats.checkpoint import Checkpoint
from ckpt_tools.io.sources import Files
from ckpt_tools.operations.convert.options import ConvertOptions
from ckpt_tools.operations.convert.report import Converted, Note
from ckpt_tools.parts.open import open_whole
from ckpt_tools.parts.training import is_state, is_training
from ckpt_tools.text import listed
from ckpt_tools.tree.findings import may_be_of_several


def open_input(source: str | os.PathLike[str], options: ConvertOptions) -> Checkpoint:
    """Open what is to be converted."""
    try:
        return open_whole(source, partial=options.partial)
    except (PartError, MissingFileError) as error:
        if (isinstance(error, MissingFileError) or error.rest) and not options.partial:
            from ckpt_tools.parts.open import partial_at

            if partial_at(source) is not None:
                error.fix = f"{error.fix} `partial=True` writes what is whole and lists the rest.".lstrip()
        raise


def begin(checkpoint: Checkpoint, report: Converted, options: ConvertOptions, kind: str) -> dict[str, str]:
    """Find the bytes, tell what is odd about the input, tie what its metadata says is tied; the ties."""
    checkpoint.locate()
    told = [warned for warned in checkpoint.warnings if options.select is None or warned.code != "beside-the-weights"]
    report.notes += [Note(warned.code, f"The input: {warned.found}.") for warned in told]
    # That the input is one file of several, and how all of them are named
    if may_be_of_several(checkpoint.path.name):
        from ckpt_tools.operations.in_folders import alone

        if (found := alone(checkpoint)) is not None:
            report.note(found.code, f"The input is {found.found}. {found.fix}")
    _note_beside(checkpoint, report, into_folder=kind == "dcp" or bool(options.shard_size))
    ties = renaming.restore_named_ties(checkpoint.root, checkpoint.metadata)
    if ties:
        names = ", ".join(f"{name} = {kept}" for name, kept in ties.items())
        report.note("ties-restored", f"Tied names put back from the metadata: {names}.")
    return ties


def _note_beside(checkpoint: Checkpoint, report: Converted, *, into_folder: bool) -> None:
    """A folder is one checkpoint; others in it, the state of an optimizer for example, are not converted with it."""
    if not os.path.isdir(report.source):
        return
    from ckpt_tools.operations.in_folders import find_checkpoints

    source = checkpoint.source
    folder = source.path if source.path.is_dir() else source.path.parent  # of a run that of the step which is read
    own = {folder, source.folder if isinstance(source, Files) else source.path}  # of several steps, that which is read
    names = [str(path.relative_to(folder)) for path in find_checkpoints(folder).checkpoints if path not in own]
    state = [name for name in names if is_state(name)] if is_training(folder) else []
    if state and not into_folder:  # where it comes along, or stays by name
        report.note("training-state", f"{folder} also has the state of the training, which stays there: {listed(state)}.")
    if others := [name for name in names if name not in state]:
        report.note("others-beside", f"{folder} also has other checkpoints, which were not converted: {listed(others)}.")
