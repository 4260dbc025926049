"""The folder of a run: what lies in it, in the order of training, and the lock that keeps a second run out.

* `DIR/epoch_003.pth`: after three epochs; `DIR/epoch_003/`, a folder, with `--save ranks` and `--save dcp`
* `DIR/epoch_003_step_00010.pth`: stopped by a signal, ten steps into the fourth
* `DIR/epoch_003.json`: what the checkpoint is, readable without loading it
* `DIR/latest`: the name of the newest, written after it
* `DIR/.lock`: held while a run writes here
"""

import os
import re
import shutil
import socket
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from io import FileIO
from pathlib import Path
from typing import BinaryIO

from click import UsageError

from ckpt_tools.io.output import output_errors, replacing
from train.config import refuse
from train.parallel import World

NAME = re.compile(r"epoch_(\d{3,})(?:_step_(\d{5,}))?(?:\.pth|\.safetensors)?")


def stem(epoch: int, step: int) -> str:
    """`epoch_003`, or `epoch_003_step_00010` in the middle of the fourth."""
    return f"epoch_{epoch:03d}" + (f"_step_{step:05d}" if step else "")


def order(path: Path) -> tuple[int, int]:
    """Epoch and step of a checkpoint, from its name: the clock may have been turned, or the files copied."""
    form = NAME.fullmatch(path.name)
    return (int(form[1]), int(form[2] or 0)) if form else (-1, 0)


def checkpoints(folder: Path) -> list[Path]:
    """The checkpoints in `folder`, in the order of training."""
    found = [path for path in folder.glob("epoch_*") if NAME.fullmatch(path.name)]
    return sorted(found, key=lambda path: (order(path), path.name))


def newest_first(folder: Path) -> list[Path]:
    """The checkpoints that a run may go on from: what `latest` names, then those before it.

    All of them where `latest` names none. What comes after it is of a run that somebody went back from.
    """
    found = checkpoints(folder)[::-1]
    named = next((path for path in found if path.name == pointed(folder)), None)
    return found if named is None else [named, *(path for path in found if order(path) < order(named))]


def pointed(folder: Path) -> str:
    """What `latest` says, "" where there is none; a link, as others have it, says where it leads."""
    pointer = folder / "latest"
    if pointer.is_symlink():
        return os.readlink(pointer)
    return pointer.read_text(encoding="utf-8", errors="replace").strip() if pointer.is_file() else ""


def meant(path: Path) -> Path:
    """The checkpoint that `latest` names, for OUT and OUT/latest; any other path as it is."""
    out = path.parent if path.name == "latest" else path
    named = out / pointed(out)
    return named if NAME.fullmatch(named.name) else path


def prune(written: Path, keep: int | None) -> None:
    """Removes all but the newest `keep` of `written`, which always stays, and the checkpoints before it; with their JSON."""
    older = [path for path in checkpoints(written.parent) if order(path) < order(written)]
    for path in older[: max(0, len(older) + 1 - keep)] if keep else []:
        remove(path)
        path.with_suffix(".json").unlink(missing_ok=True)


def remove(path: Path) -> None:
    """Removes a file, a folder with all in it, or a link, whose target stays."""
    shutil.rmtree(path) if path.is_dir() and not path.is_symlink() else path.unlink()


def cut_link(path: Path) -> None:
    """Removes a link, so that what is written goes here, and not over the checkpoint that it leads to."""
    if path.is_symlink():
        path.unlink()


def refuse_another_run(resumed: Path, out: Path) -> None:
    """Raises UsageError where a checkpoint of one folder would go on among the files of another run."""
    elsewhere = not (out.exists() and resumed.parent.exists() and out.samefile(resumed.parent))
    theirs = bool(checkpoints(out)) or (out / "metrics.jsonl").exists()
    refuse(elsewhere and theirs, f"{out} holds another run, and {resumed} is not of it: choose another --out")


@contextmanager
def whole(path: Path) -> Iterator[BinaryIO]:
    """A file that is under its name when all of it is on the disk. Raises OutputError where it cannot be, as on a full disk."""
    with output_errors(path), replacing(path, overwrite=True, durable=True) as output:
        try:
            with open(output.fd, "wb", closefd=False) as file:
                yield file
        except RuntimeError as error:  # torch.save hides what the system said behind an error of its own
            if isinstance(error.__context__, OSError):
                raise error.__context__ from None
            raise


def write_text(path: Path, text: str) -> None:
    """Writes a small text file, whole or not at all."""
    with whole(path) as file:
        file.write(text.encode())


@contextmanager
def owned(folder: Path, world: World) -> Iterator[None]:
    """Makes `folder` and keeps it to this run: rank 0, the only one that prunes and points, holds the lock.

    Raises UsageError on every rank where it cannot be made, is read-only, or belongs to a run that is still alive.
    """
    with ExitStack() as stack:
        world.from_first(lambda: stack.enter_context(locked(folder)))
        yield


@contextmanager
def locked(folder: Path) -> Iterator[None]:
    """The lock of one process. A new folder in which nothing was written is gone again afterwards."""
    new = not folder.exists()
    make(folder)
    with output_errors(folder / ".lock"):
        descriptor = os.open(folder / ".lock", os.O_RDWR | os.O_CREAT, 0o666)
    with open(descriptor, "r+b", buffering=0) as file:
        lock(file, folder)
        pointer = folder / "latest"
        short = pointer.is_symlink() or not pointer.exists() or (pointer.is_file() and pointer.stat().st_size < 256)
        refuse(not short, f"{pointer} is not the name of a checkpoint, as a run writes it there: move it away")
        try:
            yield
        finally:
            if new and os.listdir(folder) == [".lock"]:
                shutil.rmtree(folder)


def make(folder: Path) -> None:
    """Makes `folder`, before the work rather than after it. Raises UsageError where nothing can be written into it."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise UsageError(f"--out: cannot make the folder {folder}: {error.strerror}") from error
    refuse(not os.access(folder, os.W_OK), f"--out: the folder {folder} is read-only")


def lock(file: FileIO, folder: Path) -> None:
    """Locks `file` until it is closed or this process is gone. Raises UsageError where another process has it.

    A lock of `lockf` is the process's own: a loader's worker that outlives it does not keep it. Where the system or the disk
    has no locks, the run goes on without.
    """
    try:
        import fcntl

        fcntl.lockf(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except (BlockingIOError, PermissionError) as error:
        file.seek(0)
        holder = file.readline().decode()
        raise UsageError(f"another run writes into {folder}: {holder}; wait for its end, or choose another --out") from error
    except (ImportError, OSError):
        return
    with suppress(OSError):  # a disk so full that it does not take the name
        file.truncate(0)
        file.write(f"process {os.getpid()} on {socket.gethostname()}".encode())
