"""Checkpoints: written whole or not there, read back whole or refused; and the random states in them."""

import json
import random
import sys
from collections.abc import Callable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch
from click import UsageError
from torch import nn

import ckpt_tools
from ckpt_tools.errors import CkptError
from ckpt_tools.torch import load, save
from train import folder
from train.config import Config, named, one_line, refuse
from train.parallel import World

PARTS = ("model", "optimizer", "scheduler", "scaler", "epoch", "step", "totals", "seconds", "config", "rng")


def write(checkpoint: Mapping[str, Any], model: nn.Module, config: Config, world: World) -> None:
    """Writes one checkpoint into `config.out`, then its JSON, then `latest`; then removes what `--keep` is done with.

    Every rank calls this; rank 0 writes, and the others where they have parts of the tensors. A process killed at any
    point leaves `latest` on the last whole checkpoint.
    """
    path = config.out / folder.stem(checkpoint["epoch"], checkpoint["step"])
    if config.parts:
        write_folder(checkpoint, path, config.save, world)
    else:
        path = path.with_name(f"{path.name}.{config.format}")
        write_file(checkpoint, model, path, config, world)
    if world.rank == 0:
        publish(checkpoint, path, config)


def write_file(checkpoint: Mapping[str, Any], model: nn.Module, path: Path, config: Config, world: World) -> None:
    """One file with all of it. `--save module` and `--format safetensors` keep weights alone, which cannot be resumed."""
    if world.rank > 0 and world.mode != "fsdp":  # under fsdp `save` gathers the parts of all ranks, and rank 0 writes
        return
    if world.rank == 0:
        folder.cut_link(path)
    if config.save == "module":
        with folder.whole(path) as file:
            torch.save(model, file)
    else:
        save(checkpoint["model"] if config.format == "safetensors" else checkpoint, path)


def write_folder(checkpoint: Mapping[str, Any], path: Path, kind: str, world: World) -> None:
    """A folder with the parts of every rank, a file each; it appears under its name when all of them are in it."""
    new, old = (path.with_name(f".{path.name}.{age}") for age in ("new", "old"))
    if world.rank == 0:
        for left in (*path.parent.glob(".epoch_*.new"), *path.parent.glob(".epoch_*.old")):  # by a run that was killed
            folder.remove(left)
        new.mkdir()
    world.barrier()
    if kind == "dcp":
        from train import fsdp

        fsdp.save_dcp(checkpoint, new, world)
    else:
        with folder.whole(new / f"model_world_size_{world.size}_rank_{world.rank}.pt") as file:
            torch.save(checkpoint, file)
    world.barrier()
    if world.rank == 0:
        if path.exists():
            path.rename(old)
        new.rename(path)
        if old.exists():
            folder.remove(old)


def publish(checkpoint: Mapping[str, Any], path: Path, config: Config) -> None:
    """The JSON of a checkpoint that is there, and `latest`."""
    facts = {name: checkpoint[name] for name in ("epoch", "step", "config", "torch")}
    folder.write_text(path.with_suffix(".json"), json.dumps({"file": path.name, **facts}, indent=2) + "\n")
    folder.cut_link(config.out / "latest")
    folder.write_text(config.out / "latest", path.name + "\n")
    folder.prune(path, config.keep)


def newest(out: Path, say: Callable[[str], None]) -> dict[str, Any]:
    """The newest checkpoint in `out` that is whole: what `latest` names, or one before it, which is said.

    Raises UsageError, about the newest, where a run can go on from none.
    """
    found, refused = folder.newest_first(out), []
    refuse(not found, f"--resume latest: there is no checkpoint in {out}; leave --resume out to start anew")
    for path in found:
        try:
            checkpoint = read(path)
        except UsageError as error:
            refused.append(error.message)
            continue
        if path.name != folder.pointed(out):
            say("; ".join([*refused, *([] if refused else [f"{out / 'latest'} names no checkpoint"]), f"going on from {path}"]))
        return checkpoint
    raise UsageError(refused[0])


def read(path: Path) -> dict[str, Any]:
    """A checkpoint written by `write`, on the CPU: `load_state_dict` takes each tensor to its own device from there.

    Raises UsageError for a damaged file, and for one that holds less than a run needs to go on.
    """
    refuse(not path.exists(), f"--resume: there is no file {path}")
    refuse_damage(path, "resume from")
    try:
        checkpoint = load(path, map_location="cpu")
    except CkptError as error:
        raise UsageError(f"cannot resume from {path}: {one_line(error)}") from error
    if isinstance(checkpoint, dict) and path.is_dir():
        checkpoint = {"scaler": {}, **checkpoint}  # a dcp keeps nothing that is empty
    there = checkpoint if isinstance(checkpoint, dict) else {}
    config = there["config"] if isinstance(there.get("config"), dict) else {}
    missing = [part for part in PARTS if part not in there]
    missing = missing or [f"config.{name}" for name in (*named("recipe"), "epochs") if name not in config]
    resumable = "a run goes on from what --format pth and --save unwrapped, wrapped, ranks or dcp write"
    refuse(bool(missing), f"cannot resume from {path}: it has no {', '.join(missing[:3])}; {resumable}")
    return {**checkpoint, "optimizer": by_place(checkpoint["optimizer"])}


def refuse_damage(path: Path, purpose: str) -> None:
    """Raises UsageError where bytes of a checkpoint do not match their checksums: a flipped bit is a weight of 7e36."""
    damage = [each.found for each in ckpt_tools.check(path).findings if each.code == "damaged-record"]
    refuse(bool(damage), f"cannot {purpose} {path}, which is damaged: {''.join(damage[:1])}")


def described(path: Path) -> tuple[str | None, dict[str, Any]]:
    """Which state dict of a checkpoint is the network, None for the only one; and the config of the run that wrote it.

    That is in the checkpoint, or where it is weights alone in the JSON beside it; {} where no run of ours wrote it.
    """
    try:
        description = ckpt_tools.inspect(path)
    except CkptError as error:
        raise UsageError(f"cannot read {path}: {one_line(error)}") from error
    refuse_damage(path, "measure")
    where = "model" if ["model"] in [each["where"] for each in description.state_dicts] else None
    values = {name.removeprefix("config."): value for name, value in description.values.items() if name.startswith("config.")}
    beside = path.with_suffix(".json")
    if not values and beside.is_file():
        with suppress(ValueError, LookupError, TypeError):
            facts = json.loads(beside.read_bytes())
            values = dict(facts["config"]) if facts["file"] == path.name else {}
    return where, values if {*named("recipe")} <= values.keys() else {}


def by_place(optimizer: Mapping[str, Any]) -> dict[str, Any]:
    """An optimizer's state under the places of its parameters, of which a dcp makes text."""
    return {**optimizer, "state": {int(place): values for place, values in optimizer.get("state", {}).items()}}


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
