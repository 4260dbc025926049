"""The folder of a run: checkpoints that are whole or not there, and what a run may change when it goes on from one.

* `OUT/epoch_003.pth`: after three epochs; `OUT/epoch_003/`, a folder, with `--save ranks` and `--save dcp`
* `OUT/epoch_003_step_00010.pth`: in the middle of the fourth, after a signal or with `--save-every`
* `OUT/epoch_003.weights.pth`: the weights alone; `OUT/epoch_003.json`: what it is, readable without loading it
* `OUT/latest`, `OUT/best`: the names of the newest, and of that with the highest test accuracy, written after them
* `OUT/.lock`: held while a run writes here
"""

import json
import os
import random
import re
import shutil
import socket
import sys
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import fields, replace
from io import FileIO
from pathlib import Path
from typing import Any, BinaryIO

import click
import torch
from click import UsageError
from torch import nn

import ckpt_tools
from ckpt_tools.errors import CkptError, OutputError
from ckpt_tools.io.output import output_errors, replacing
from ckpt_tools.torch import load, load_into, unwrap
from ckpt_tools.torch import save as save_file
from train import wrap
from train.config import USUAL, Config, refuse, refusing, spelled, taken
from train.parallel import World

PARTS = ("model", "optimizer", "scheduler", "scaler", "epoch", "step", "totals", "seconds", "config", "rng")
NAME = re.compile(r"epoch_(\d{3,})(?:_step_(\d{5,}))?(?:\.pth|\.safetensors)?")

# --- what a resumed run takes from its checkpoint

NETWORK, IMAGES = ("model", "width", "hidden", "classes"), ("data", "data_dir", "shape", "samples")
# These may be others from now on, where --change says so.
CHANGEABLE = ("lr", "batch_size", "schedule", "epochs", "warmup", "weight_decay", "clip_norm")
# These decide the numbers that come out, and nothing else than the checkpoint's will do: for the rest, why not.
FIXED = {
    **dict.fromkeys(NETWORK, "the weights are of that network"),
    **dict.fromkeys(("data", "shape", "samples", "seed"), "the order of the images is part of the run"),
    **dict.fromkeys(("optimizer", "momentum", "ema"), "the optimizer's state is of that"),
    **dict.fromkeys(("amp", "scale_lr"), "the steps before were made with it"),
}
RECIPE = (*FIXED, *(name for name in CHANGEABLE if name != "epochs"))
# Every run has written these; of what later ones have more, the default was what it did.
WRITTEN = ("model", "width", "hidden", "data", "shape", "samples", "batch_size", "lr", "schedule", "seed", "amp", "epochs")
# Where a run is: of the command line every time. All others are the checkpoint's, where the command line does not say them.
PLACE = ("out", "device", "device_ids", "local_rank", "timeout", "resume", "change", "evaluate")
# What belongs to a mode: not kept by a run that goes on in another.
OF_MODE = ("sync_bn", "find_unused_parameters", "broadcast_buffers", "compile", "save")


def continued(config: Config, saved: Mapping[str, Any], given: frozenset[str]) -> Config:
    """This run with the options of the run that it resumes; `given` names those that the user spelled out.

    Raises UsageError where one of them contradicts the checkpoint: the rest of the run would not be the same run.
    """
    for name in RECIPE:
        own, theirs = getattr(config, name), saved.get(name, getattr(Config, name))
        sentence = f"{spelled(name)} {own} contradicts the checkpoint, which was trained with {theirs}: leave it out"
        refuse(name in given and own != theirs, f"{sentence}, or say {changing(name, own)}")
    other = "epochs" in given and saved["schedule"] == "cosine" and config.epochs != saved["epochs"]
    refuse(
        other, f"--epochs {config.epochs} would make another cosine of it: to stretch it, say --change epochs={config.epochs}"
    )
    refuse_imports(config, saved, ("model", "data"))
    moved = "parallel" in given and config.parallel != saved.get("parallel")
    chosen = given.union(PLACE, OF_MODE if moved else ())
    names = (each.name for each in fields(Config) if each.name not in chosen and each.name in saved)
    config = replace(config, **taken(saved, names))
    for change in config.change:
        config = changed(config, change)
    return config


def changing(name: str, value: object) -> str:
    """What to do for another value of an option."""
    if name in CHANGEABLE:
        return f"--change {name}={value} to go on with it"
    return f"--init-from to start a new run from the weights ({FIXED[name]})"


def changed(config: Config, change: str) -> Config:
    """With one option another from now on, `lr=0.01`. Raises UsageError for one that cannot be, with the reason."""
    name, _, text = change.partition("=")
    name, kinds = name.strip().replace("-", "_"), {each.name: each.metadata["type"] for each in fields(Config)}
    refuse(name not in kinds or not text, f"--change {change}: write NAME=VALUE, where NAME is {', '.join(CHANGEABLE)}")
    refuse(name in FIXED, f"--change {name}: {FIXED.get(name)}; --init-from starts a new run from them")
    refuse(name not in CHANGEABLE, f"--change {change}: write {spelled(name)} {text}")
    with refusing(f"--change {change}", click.BadParameter):
        return replace(config, **{name: kinds[name].convert(text, None, None)})


def changes(config: Config, saved: Mapping[str, Any]) -> list[str]:
    """A line for each option that goes on with another value."""
    saved = {**saved, "lr": saved["lr"] or USUAL[config.optimizer]}
    new = [(name, saved.get(name, getattr(Config, name)), getattr(config, name)) for name in CHANGEABLE]
    stretched = ": the cosine ends there" if config.schedule == "cosine" else ""
    return [
        f"changed: {name} {old} -> {now}{stretched if name == 'epochs' else ''}"
        for name, old, now in new
        if old != now and (name != "epochs" or stretched)
    ]


def refuse_imports(config: Config, saved: Mapping[str, Any], names: tuple[str, ...]) -> None:
    """Raises UsageError where a checkpoint names a MODULE:CALLABLE that the command line does not: a file imports nothing."""
    for name in names:
        theirs = saved.get(name)
        strange = isinstance(theirs, str) and ":" in theirs and getattr(config, name) != theirs
        refuse(strange, f"the checkpoint was trained with {spelled(name)} {theirs}, which is imported only if you say it too")


def measuring(config: Config, saved: Mapping[str, Any], given: frozenset[str]) -> Config:
    """For `--evaluate`: with the network and the images of the run that saved a checkpoint, but for what the user names."""
    groups = {"model": NETWORK, "data": IMAGES}
    refuse_imports(config, saved, tuple(name for name in groups if name not in given))
    kept = ["amp", *(name for head, group in groups.items() if head not in given for name in group)]
    return replace(config, **taken(saved, (name for name in kept if name not in given and name in saved)))


def put_into(run: Any, saved: dict[str, Any]) -> None:
    """A checkpoint of any mode into a Run: names are unwrapped, tensors go to this rank's device.

    Under fsdp the rank keeps its part of each. Raises UsageError where they do not fit the network, the data, or each other.
    """
    epoch, step, steps = saved["epoch"], saved["step"], len(run.train.batches)
    again = run.config.batch_size != saved["config"]["batch_size"]
    refuse(again and step != 0, "--change batch_size: the checkpoint is in the middle of an epoch, which is cut into batches")
    possible = isinstance(epoch, int) and isinstance(step, int) and epoch >= 0 and 0 <= step < steps
    refuse(not possible, f"cannot resume: epoch {epoch}, step {step} is nowhere in epochs of {steps} steps of these images")
    wrong = (LookupError, TypeError, ValueError, AttributeError, RuntimeError)
    with refusing("cannot resume: the checkpoint does not fit its own config", *wrong):
        saved = {"ema": {}, **saved, "model": unwrap(saved["model"])}
        saved = wrap.cut_as(saved, run.network) if run.world.mode == "fsdp" else saved
        run.network.load_state_dict(saved["model"])
        run.optimizer.load_state_dict(saved["optimizer"])
        run.scheduler.load_state_dict(saved["scheduler"])
        run.scaler.load_state_dict(saved["scaler"])
        for name, mean in run.average.weights.items():
            mean.copy_(saved["ema"][name])
        run.epoch, run.step, run.seconds = epoch, step, saved["seconds"]
        if run.world.rank == 0:
            run.loss += saved["totals"][0]  # others are of earlier runs
        if run.world.rank < len(saved["rng"]):  # a rank that the earlier run did not have keeps its fresh seed
            set_random_states(saved["rng"][run.world.rank], run.world.devices)
    if run.config.change:
        run.scheduler.last_epoch = epoch * steps if again else run.scheduler.last_epoch
        run.scheduler.base_lrs = [run.config.learning_rate] * len(run.optimizer.param_groups)
        rate = run.config.learning_rate * run.scheduler.lr_lambdas[0](run.scheduler.last_epoch)
        run.scheduler._last_lr = [rate] * len(run.optimizer.param_groups)
        for group in run.optimizer.param_groups:
            group |= {"initial_lr": run.config.learning_rate, "lr": rate, "weight_decay": run.config.weight_decay}


# --- reading


def opened(config: Config, world: World) -> dict[str, Any] | None:
    """The checkpoint that the run goes on from; None for a new run, which needs a folder without checkpoints.

    Rank 0 chooses and examines it; the others read what it chose.
    """
    with world.together():
        path, saved = chosen(config) if world.rank == 0 else (None, None)
    path = world.gather(path)[0]
    with world.together():
        return read(path) if world.rank > 0 and path else saved


def chosen(config: Config) -> tuple[Path | None, dict[str, Any] | None]:
    """Which checkpoint that is, and what is in it."""
    there = bool(checkpoints(config.out))
    if config.resume == "latest" or (config.resume == "auto" and there):
        return newest(config.out)
    if config.resume not in (None, "auto"):
        path = meant(Path(config.resume))
        elsewhere = not (config.out.exists() and path.parent.exists() and config.out.samefile(path.parent))
        theirs = there or (config.out / "metrics.jsonl").exists()
        refuse(elsewhere and theirs, f"{config.out} holds another run, and {path} is not of it: choose another --out")
        refuse(not path.exists(), f"--resume: there is no file {path}")
        refuse_damage(path, "resume from")
        return path, read(path)
    refuse(there, f"{config.out} holds checkpoints: go on from them with --resume latest, or choose another --out")
    return None, None


def newest(out: Path) -> tuple[Path, dict[str, Any]]:
    """The newest checkpoint in `out` that is whole: what `latest` names, or one before it, which is said.

    Raises UsageError, about the newest, where a run can go on from none.
    """
    found, refused = checkpoints(out)[::-1], []
    refuse(not found, f"--resume latest: there is no checkpoint in {out}; leave --resume out to start anew")
    named = next((path for path in found if path.name == pointed(out)), None)
    # What comes after `latest` is of a run that somebody went back from. All count where it names none.
    for path in found if named is None else [named, *(path for path in found if order(path) < order(named))]:
        try:
            refuse_damage(path, "resume from")
            saved = read(path)
        except UsageError as error:
            refused.append(error.message)
            continue
        if path is not named:
            click.echo("; ".join([*(refused or [f"{out / 'latest'} names no checkpoint"]), f"going on from {path}"]), err=True)
        return path, saved
    raise UsageError(refused[0])


def read(path: Path) -> dict[str, Any]:
    """A checkpoint written by `write`, on the CPU: `load_state_dict` takes each tensor to its own device from there.

    Raises UsageError for one that holds less than a run needs to go on.
    """
    with refusing(f"cannot resume from {path}", CkptError):
        checkpoint = load(path, map_location="cpu")
    there = checkpoint if isinstance(checkpoint, dict) else {}
    if path.is_dir():
        there = {"scaler": {}, **there}  # a dcp keeps nothing that is empty
    config = there["config"] if isinstance(there.get("config"), dict) else {}
    missing = [part for part in PARTS if part not in there]
    missing = missing or [f"config.{name}" for name in WRITTEN if name not in config]
    resumable = "a run goes on from what --format pth and --save unwrapped, wrapped, ranks or dcp write"
    refuse(bool(missing), f"cannot resume from {path}: it has no {', '.join(missing[:3])}; {resumable}")
    state = {int(place): values for place, values in there["optimizer"].get("state", {}).items()}  # a dcp makes text of them
    return {**there, "optimizer": {**there["optimizer"], "state": state}}


def refuse_damage(path: Path, purpose: str) -> None:
    """Raises UsageError where bytes of a checkpoint do not match their checksums: a flipped bit is a weight of 7e36."""
    damage = [each.found for each in ckpt_tools.check(path).findings if each.code == "damaged-record"]
    refuse(bool(damage), f"cannot {purpose} {path}, which is damaged: {''.join(damage[:1])}")


def described(path: Path) -> tuple[str | None, dict[str, Any]]:
    """Which state dict of a checkpoint is the network, None for the only one; and the config of the run that wrote it.

    That is in the checkpoint, or where it is weights alone in the JSON beside it; {} where no run of ours wrote it.
    """
    with refusing(f"cannot read {path}", CkptError):
        description = ckpt_tools.inspect(path)
    refuse_damage(path, "read")
    where = "model" if ["model"] in [each["where"] for each in description.state_dicts] else None
    values = {name.removeprefix("config."): value for name, value in description.values.items() if name.startswith("config.")}
    beside = path.with_name(f"{path.name.partition('.')[0]}.json")
    if not values and beside.is_file():
        with suppress(ValueError, LookupError, TypeError):
            facts = json.loads(beside.read_bytes())
            values = dict(facts["config"]) if path.name in (facts["file"], facts.get("weights")) else {}
    return where, values if {*WRITTEN} <= values.keys() else {}


def load_weights(network: nn.Module, config: Config) -> str:
    """`--init-from`: what was loaded, renamed and made anew. Raises UsageError where it does not fit."""
    path = meant(Path(str(config.init_from)))
    where, _ = described(path)
    with refusing(f"--init-from {path}", CkptError):
        how: Any = config.on_mismatch
        return str(load_into(network, path, select=where, on_mismatch=how, seed=config.seed))


def load_measured(network: nn.Module, path: Path, where: str | None, config: Config, *, named: bool) -> None:
    """`--evaluate`: the weights, all of them. `named`: the checkpoint says of which network they are."""
    try:
        load_into(network, path, select=where)
    except CkptError as error:
        tried = "" if named else f"\nIt does not say its network, which --model names: {config.model} was tried."
        raise UsageError(f"--evaluate {path}: {error}{tried}") from error


# --- writing


def write(
    checkpoint: Mapping[str, Any], network: nn.Module, weights: nn.Module | None, config: Config, world: World, best: int
) -> None:
    """Writes one checkpoint into `config.out`, its weights and JSON, `latest`, `best`; removes what `--keep` leaves out.

    Every rank calls this; rank 0 writes, and the others where they have parts of the tensors. A process killed at any
    point leaves `latest` on the last whole checkpoint.
    """
    path = config.out / stem(checkpoint["epoch"], checkpoint["step"])
    beside = path.with_name(f"{path.name}.weights.pth") if weights else None
    if config.parts:
        write_folder(checkpoint, path, config.save, world)
    else:
        path = path.with_name(f"{path.name}.{config.format}")
    if world.rank == 0 or world.mode == "fsdp":  # under fsdp `save_file` gathers the parts of all ranks, and rank 0 writes
        for each in (path, beside) if world.rank == 0 else ():
            cut_link(each)
        if config.save == "module":
            with whole(path) as file:
                torch.save(network, file)
        elif not config.parts:
            save_file(checkpoint["model"] if config.format == "safetensors" else checkpoint, path)
        if weights and beside:
            save_file(weights.state_dict(), beside)
    if world.rank == 0:
        publish(checkpoint, path, beside, config, best)


def write_folder(checkpoint: Mapping[str, Any], path: Path, kind: str, world: World) -> None:
    """A folder with the parts of every rank, a file each; it appears under its name when all of them are in it."""
    new, old = (path.with_name(f".{path.name}.{age}") for age in ("new", "old"))
    if world.rank == 0:
        for left in (*path.parent.glob(".epoch_*.new"), *path.parent.glob(".epoch_*.old")):  # by a run that was killed
            remove(left)
        new.mkdir()
    world.barrier()
    if kind == "dcp":
        save_dcp(checkpoint, new, world)
    else:
        with whole(new / f"model_world_size_{world.size}_rank_{world.rank}.pt") as file:
            torch.save(checkpoint, file)
    world.barrier()
    if world.rank == 0:
        if path.exists():
            path.rename(old)
        new.rename(path)
        if old.exists():
            remove(old)


def save_dcp(checkpoint: Mapping[str, Any], folder: Path, world: World) -> None:
    """Every rank's part, as any number of ranks loads it with `torch.distributed.checkpoint.load`."""
    import torch.distributed.checkpoint as dcp  # takes a second
    from torch.distributed.checkpoint.api import CheckpointException

    try:
        dcp.save(dict(checkpoint), checkpoint_id=folder, process_group=world.control)
    except CheckpointException as error:
        rank, (failure, _) = next(iter(error.failures.items()))
        raise OutputError(f"{folder} cannot be written.", why=f"Rank {rank}: {failure}", fix="Is the disk full?") from error


def publish(checkpoint: Mapping[str, Any], path: Path, weights: Path | None, config: Config, best: int) -> None:
    """The JSON of a checkpoint that is there, and the pointers; then older ones go."""
    facts = {name: checkpoint[name] for name in ("epoch", "step", "config", "torch")}
    names = {"file": path.name, **({"weights": weights.name} if weights else {})}
    write_text(path.with_suffix(".json"), json.dumps({**names, **facts}, indent=2) + "\n")
    write_pointer(config.out / "latest", path)
    highest = next((each for each in checkpoints(config.out) if order(each) == (best, 0)), None)
    if highest and best and pointed(config.out, "best") != highest.name:
        write_pointer(config.out / "best", highest)
    prune(path, config.keep)


def prune(written: Path, keep: int | None) -> None:
    """Removes all but the newest `keep` of `written`, which always stays, and those before it; never the best."""
    older = [each for each in checkpoints(written.parent) if order(each) < order(written)]
    for each in older[: max(0, len(older) + 1 - keep)] if keep else []:
        if each.name != pointed(written.parent, "best"):
            remove(each)
            for beside in (".json", ".weights.pth"):
                each.with_name(each.name.partition(".")[0] + beside).unlink(missing_ok=True)


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


def cut_link(path: Path | None) -> None:
    """Removes a link, so that what is written goes here, and not over the checkpoint that it leads to."""
    if path and path.is_symlink():
        path.unlink()


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


def write_pointer(pointer: Path, path: Path) -> None:
    """Makes `latest` or `best` name a checkpoint."""
    cut_link(pointer)
    write_text(pointer, path.name + "\n")


# --- the lock


@contextmanager
def owned(folder: Path, world: World) -> Iterator[None]:
    """Makes `folder` and keeps it to this run: rank 0, the only one that prunes and points, holds the lock.

    Raises UsageError on every rank where it cannot be made, is read-only, or belongs to a run that is still alive.
    """
    with ExitStack() as stack:
        with world.together():
            if world.rank == 0:
                stack.enter_context(locked(folder))
        yield


@contextmanager
def locked(folder: Path) -> Iterator[None]:
    """The lock of one process. A new folder in which nothing was written is gone again afterwards."""
    new = not folder.exists()
    with refusing(f"--out: cannot make the folder {folder}", OSError):
        folder.mkdir(parents=True, exist_ok=True)
    refuse(not os.access(folder, os.W_OK), f"--out: the folder {folder} is read-only")
    with output_errors(folder / ".lock"):
        descriptor = os.open(folder / ".lock", os.O_RDWR | os.O_CREAT, 0o666)
    with open(descriptor, "r+b", buffering=0) as file:
        lock(file, folder)
        for pointer in (folder / "latest", folder / "best"):
            short = pointer.is_symlink() or not pointer.exists() or (pointer.is_file() and pointer.stat().st_size < 256)
            refuse(not short, f"{pointer} is not the name of a checkpoint, as a run writes it there: move it away")
        try:
            yield
        finally:
            if new and os.listdir(folder) == [".lock"]:
                shutil.rmtree(folder)


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


# --- random states


def random_states(devices: tuple[torch.device, ...]) -> dict[str, Any]:
    """The state of every random generator of this process, as plain data and byte tensors."""
    # numpy comes only with the packages that read data; where nothing loaded it, nothing drew from it.
    numpy = sys.modules.get("numpy")
    kind, words, *rest = numpy.random.get_state() if numpy else (None, (), None)
    return {
        "python": random.getstate(),
        "numpy": [kind, [int(word) for word in words], *rest] if numpy else None,
        "torch": torch.get_rng_state(),
        "cuda": [torch.cuda.get_rng_state(device) for device in devices if device.type == "cuda"],
    }


def set_random_states(states: Mapping[str, Any], devices: tuple[torch.device, ...]) -> None:
    """Puts back what `random_states` took. States of devices that this process does not have are left out."""
    version, words, gauss = states["python"]
    random.setstate((version, tuple(words), gauss))
    numpy = sys.modules.get("numpy")
    if numpy and states["numpy"]:
        numpy.random.set_state(tuple(states["numpy"]))
    torch.set_rng_state(states["torch"])
    gpus = [device for device in devices if device.type == "cuda"]
    for device, state in zip(gpus, states.get("cuda", ()), strict=False):
        torch.cuda.set_rng_state(state, device)


def seed_everything(seed: int) -> None:
    """Seeds every generator that `random_states` keeps."""
    random.seed(seed)
    torch.manual_seed(seed)
    numpy = sys.modules.get("numpy")
    if numpy:
        numpy.random.seed(seed % 2**32)
