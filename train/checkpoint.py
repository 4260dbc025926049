"""The folder of a run, whose checkpoints are whole or not there.

* `OUT/epoch_003.pth`: after three epochs; `OUT/epoch_003/`, a folder, with `--save dcp`
* `OUT/epoch_003_step_00010.pth`: in the middle of the fourth, after a signal or with `--save-every`
* `OUT/epoch_003.weights.pth`: the weights alone
* `OUT/latest`, `OUT/best`: the names of the newest, and of that with the highest test accuracy, written after them
* `OUT/.lock`: held while a run writes here
"""

import os
import re
import shutil
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from io import BytesIO, FileIO
from pathlib import Path
from typing import Any

import click
import torch
from click import UsageError
from torch import nn

import ckpt_tools
from ckpt_tools.errors import CkptError, OutputError
from ckpt_tools.io.output import output_errors, replacing
from ckpt_tools.torch import load, load_into, save, unwrap
from train import wrap
from train.config import Config, refuse, refusing
from train.parallel import World

PARTS = ("model", "optimizer", "scaler", "epoch", "step", "totals", "seconds", "config")
# Every run has written these; of the options that later ones have more, the default was what it did.
OPTIONS = {"model", "width", "data", "shape", "samples", "batch_size", "lr", "schedule", "seed", "amp", "epochs"}
NAME = re.compile(r"epoch_(\d{3,})(?:_step_(\d{5,}))?(?:\.pth)?")

# --- reading


def opened(config: Config, world: World) -> dict[str, Any] | None:
    """The checkpoint that the run goes on from, which rank 0 chooses; None for a new run."""
    with world.together():
        path = chosen(config) if world.rank == 0 else None
    path = world.gather(path)[0]
    with world.together():
        return read(path) if path else None


def chosen(config: Config) -> Path | None:
    """Which checkpoint that is; a new run needs a folder without any."""
    out, there = config.out, bool(checkpoints(config.out))
    if config.resume == "latest" or (config.resume == "auto" and there):
        return newest(out)
    if config.resume in (None, "auto"):
        refuse(there, f"{out} holds checkpoints: go on from them with --resume latest, or choose another --out")
        return None
    path = meant(Path(config.resume))
    other = there and path.parent.resolve() != out.resolve()
    refuse(other, f"{out} holds another run, and {path} is not of it: choose another --out")
    refuse(bool(damaged := damage(path)), damaged)
    return path


def newest(out: Path) -> Path:
    """The newest checkpoint in `out` that is whole: what `latest` names, or one before it, which is said."""
    found = checkpoints(out)[::-1]
    refuse(not found, f"--resume latest: there is no checkpoint in {out}; leave --resume out to start anew")
    named = next((path for path in found if path.name == pointed(out)), None)
    why = [] if named else [f"{out / 'latest'} names no checkpoint"]
    # What comes after `latest` is of a run that somebody went back from.
    for path in [named, *(path for path in found if order(path) < order(named))] if named else found:
        if not (damaged := damage(path)):
            if why:
                click.echo("; ".join([*why, f"going on from {path}"]), err=True)
            return path
        why.append(damaged)
    raise UsageError("; ".join(why))


def damage(path: Path) -> str:
    """What is wrong with a file that is cut, or whose bytes do not match their checksums; "" for a whole one."""
    found = [each.found for each in ckpt_tools.check(path).findings if each.code in ("damaged-record", "unreadable")]
    return f"cannot read {path}, which is damaged: {found[0]}" if found else ""


def read(path: Path) -> dict[str, Any]:
    """A checkpoint written by `write`, on the CPU: `load_state_dict` takes each tensor to its own device from there.

    Raises UsageError for one that holds less than a run needs to go on.
    """
    with refusing(f"cannot resume from {path}", CkptError):
        checkpoint = load(path, map_location="cpu")
    # A distributed checkpoint keeps nothing that is empty, and makes text of numbers that are keys.
    there = {"ema": {}, "metrics": [], "scaler": {}, **(checkpoint if isinstance(checkpoint, dict) else {})}
    config = there["config"] if isinstance(there.get("config"), dict) else {}
    missing = [part for part in PARTS if part not in there] or [f"config.{name}" for name in OPTIONS - config.keys()]
    resumable = "a run goes on from what --save unwrapped, wrapped or dcp writes"
    refuse(bool(missing), f"cannot resume from {path}: it has no {', '.join(missing[:3])}; {resumable}")
    state = {int(place): values for place, values in there["optimizer"].get("state", {}).items()}
    return {**there, "optimizer": {**there["optimizer"], "state": state}}


def put_into(run: Any, saved: dict[str, Any]) -> None:
    """A checkpoint of any mode into a Run: names are unwrapped, tensors go to this rank's device.

    Under fsdp the rank keeps its part of each. Raises UsageError where they do not fit the network, the data, or each other.
    """
    epoch, step, steps = saved["epoch"], saved["step"], len(run.train)
    halfway = run.config.batch_size != saved["config"]["batch_size"] and step != 0
    refuse(halfway, "--change batch_size: the checkpoint is in the middle of an epoch, which is cut into batches")
    possible = isinstance(epoch, int) and isinstance(step, int) and epoch >= 0 and 0 <= step < steps
    refuse(not possible, f"cannot resume: epoch {epoch}, step {step} is nowhere in epochs of {steps} steps of these images")
    wrong = (LookupError, TypeError, ValueError, AttributeError, RuntimeError)
    with refusing("cannot resume: the checkpoint does not fit its own config", *wrong):
        own, model = run.network.state_dict(), unwrap(saved["model"])
        run.network.load_state_dict({name: wrap.part(tensor, own.get(name)) for name, tensor in model.items()})
        run.optimizer.load_state_dict(saved["optimizer"])
        for weight, state in run.optimizer.state.items():
            state.update({name: wrap.part(value, weight) for name, value in state.items()})
        for group in run.optimizer.param_groups:
            group["weight_decay"] = run.config.weight_decay
        run.scaler.load_state_dict(saved["scaler"])
        for name, mean in run.average.items():
            mean.copy_(wrap.part(saved["ema"][name], mean))
        run.loss += saved["totals"][0]
        run.epoch, run.step, run.seconds = epoch, step, float(saved["seconds"])


def described(path: Path) -> tuple[str | None, dict[str, Any]]:
    """Which state dict of a checkpoint is the network, None for the only one; and the config of the run that wrote it.

    {} where no run of ours wrote it.
    """
    with refusing(f"cannot read {path}", CkptError):
        description = ckpt_tools.inspect(path)
    refuse(bool(damaged := damage(path)), damaged)
    where = "model" if ["model"] in [each["where"] for each in description.state_dicts] else None
    config = {name.removeprefix("config."): value for name, value in description.values.items() if name.startswith("config.")}
    return where, config if config.keys() >= OPTIONS else {}


def load_weights(network: nn.Module, path: Path, config: Config) -> str:
    """The weights of any checkpoint into `network`: what was loaded, renamed, made anew. UsageError where it does not fit."""
    where, _ = described(path := meant(path))
    with refusing(f"{path}, into {config.model}", CkptError):
        return str(load_into(network, path, select=where, on_mismatch=config.on_mismatch, seed=config.seed))


# --- writing


def write(run: Any, state: Mapping[str, Any], best: int) -> None:
    """Writes one checkpoint into `--out`, its weights, `latest`, `best` (of which epoch); removes what `--keep` leaves out.

    Every rank calls this; rank 0 writes, and the others where they have parts of the tensors. A process killed at any
    point leaves `latest` on the last whole checkpoint.
    """
    config, world, out = run.config, run.world, run.config.out
    name = f"epoch_{run.epoch:03d}" + (f"_step_{run.step:05d}" if run.step else "")
    path, beside = out / (name if config.save == "dcp" else f"{name}.pth"), out / f"{name}.weights.pth"
    rank_writes = world.rank == 0 or config.parallel == "fsdp"  # then `save` gathers all parts first
    for each in (path, beside, out / "latest", out / "best") if world.rank == 0 else ():
        if each.is_symlink():  # what is written goes here, and not over the checkpoint that a link leads to
            each.unlink()
    if config.save == "dcp":
        write_folder(state, path, world)
    elif config.save == "module" and world.rank == 0:
        torch.save(run.network, pickled := BytesIO())
        write_bytes(path, pickled.getvalue())
    elif config.save != "module" and rank_writes:
        save(state, path)
    if config.weights != "none" and rank_writes:
        save((run.model if config.weights == "wrapped" else run.network).state_dict(), beside)
    if world.rank == 0:
        write_bytes(out / "latest", f"{path.name}\n".encode())
        highest = path.with_name(path.name.replace(name, f"epoch_{best:03d}"))
        if best and highest.exists() and pointed(out, "best") != highest.name:
            write_bytes(out / "best", f"{highest.name}\n".encode())
        prune(path, config.keep)


def write_folder(state: Mapping[str, Any], path: Path, world: World) -> None:
    """Every rank's part, as any number of ranks loads it with `torch.distributed.checkpoint.load`; `.metadata` comes last."""
    import torch.distributed.checkpoint as dcp  # takes a second
    from torch.distributed.checkpoint.api import CheckpointException

    if world.rank == 0:
        for left in (each for each in path.parent.glob("epoch_*") if each.is_dir()):
            if left == path or {each.suffix for each in left.iterdir()} <= {".distcp", ".tmp"}:  # a run was killed in it
                remove(left)
    world.gather(None)
    try:
        dcp.save(dict(state), checkpoint_id=path, process_group=world.control)
    except CheckpointException as error:
        rank, (failure, _) = next(iter(error.failures.items()))
        raise OutputError(f"{path} cannot be written.", why=f"Rank {rank}: {failure}", fix="Is the disk full?") from error


def prune(written: Path, keep: int | None) -> None:
    """Removes all but the newest `keep` of `written`, which always stays, and those before it; never the best."""
    older = [each for each in checkpoints(written.parent) if order(each) < order(written)]
    for each in older[: max(0, len(older) + 1 - keep)] if keep else []:
        if each.name != pointed(written.parent, "best"):
            remove(each)
            each.with_name(f"{each.name.removesuffix('.pth')}.weights.pth").unlink(missing_ok=True)


def order(path: Path) -> tuple[int, int]:
    """Epoch and step of a checkpoint, from its name: the clock may have been turned, or the files copied."""
    form = NAME.fullmatch(path.name)
    return (int(form[1]), int(form[2] or 0)) if form else (-1, 0)


def checkpoints(folder: Path) -> list[Path]:
    """The checkpoints in `folder`, in the order of training."""
    found = (path for path in folder.glob("epoch_*") if NAME.fullmatch(path.name))
    found = (path for path in found if not path.is_dir() or path.is_symlink() or (path / ".metadata").exists())
    return sorted(found, key=lambda path: (order(path), path.name))


def pointed(folder: Path, pointer: str = "latest") -> str:
    """What `latest` or `best` says, "" where there is none; a link, as others have it, says where it leads."""
    path = folder / pointer
    if path.is_symlink():
        return os.readlink(path)
    return path.read_text(encoding="utf-8", errors="replace").strip() if path.is_file() else ""


def meant(path: Path) -> Path:
    """The checkpoint that a pointer names, for OUT (its newest), OUT/latest and OUT/best; any other path as it is."""
    out, pointer = (path.parent, path.name) if path.name in ("latest", "best") else (path, "latest")
    named = out / pointed(out, pointer)
    return named if NAME.fullmatch(named.name) else path


def remove(path: Path) -> None:
    """Removes a file, a folder with all in it, or a link, whose target stays."""
    shutil.rmtree(path) if path.is_dir() and not path.is_symlink() else path.unlink()


def write_bytes(path: Path, content: bytes) -> None:
    """A small file, whole or not at all. Raises OutputError where it cannot be written, as on a full disk."""
    with output_errors(path), replacing(path, overwrite=True, durable=True) as out, open(out.fd, "wb", closefd=False) as file:
        file.write(content)


# --- the lock


@contextmanager
def owned(folder: Path, world: World) -> Iterator[None]:
    """Makes `folder` and keeps it to this run: rank 0, the only one that prunes and points, holds the lock.

    A new folder in which nothing was written is gone again afterwards. Raises UsageError on every rank where it cannot be
    made, is read-only, or belongs to a run that is still alive.
    """
    new = world.rank == 0 and not folder.exists()
    with ExitStack() as stack:
        with world.together(), refusing(f"--out: cannot write into the folder {folder}", OSError):
            if world.rank == 0:
                folder.mkdir(parents=True, exist_ok=True)
                lock(stack.enter_context(open(folder / ".lock", "a+b", buffering=0)), folder)
        try:
            yield
        finally:
            if new and os.listdir(folder) == [".lock"]:
                shutil.rmtree(folder)


def lock(file: FileIO, folder: Path) -> None:
    """Locks `file` until this process closes it, ends or is killed; a loader's worker that outlives it does not keep it.

    Where the system or the disk has no locks, the run goes on without.
    """
    try:
        import fcntl

        fcntl.lockf(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except (BlockingIOError, PermissionError) as error:
        raise UsageError(f"another run writes into {folder}: wait for its end, or choose another --out") from error
    except (ImportError, OSError):
        pass
    for pointer in (folder / "latest", folder / "best"):
        short = pointer.is_symlink() or not pointer.exists() or (pointer.is_file() and pointer.stat().st_size < 256)
        refuse(not short, f"{pointer} is not the name of a checkpoint, as a run writes it there: move it away")
