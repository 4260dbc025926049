"""Where rows run: a folder with fixtures, keys, inputs of plans and a server."""

import json
import os
import threading
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import torch
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from cryptography.hazmat.primitives.serialization import Encoding, NoEncryption, PrivateFormat, PublicFormat
from safetensors.torch import save_file
from torch import nn

import ckpt_tools
import ckpt_tools.torch
from fixtures.make import network
from tests.golden import inputs
from tests.golden.running import command, workplace
from tests.support.matching import reported
from tests.support.samples import FIXTURES
from tests.support.servers import Server


@contextmanager
def prepared(folder: Path) -> Iterator[dict[str, Any]]:
    """A workplace with keys, a signature, inputs of the shipped plans and a server; the names that Python rows may use."""
    with workplace(folder), Server(FIXTURES) as server:
        threading.Thread(target=server.serve_forever, args=(0.01,), daemon=True).start()
        key = Ed25519PrivateKey.from_private_bytes(bytes(32))
        Path("key.pem").write_bytes(key.private_bytes(Encoding.PEM, PrivateFormat.PKCS8, NoEncryption()))
        Path("public.pem").write_bytes(key.public_key().public_bytes(Encoding.PEM, PublicFormat.SubjectPublicKeyInfo))
        ckpt_tools.sign("fixtures/single.pth", key="key.pem", output="single.sig")
        with warnings.catch_warnings():
            inputs.make(Path("made"))
        yield {
            "server": server.url("")[7:-1], "network": network, "guarded_load": guarded_load, "guarded_miss": guarded_miss,
            "run": typed, "tried": tried, "found": found, "fates": fates, "adapter": adapter, "trainings": trainings,
            "beside": beside, "nn": nn, "np": np, "save_file": save_file,
            "load": ckpt_tools.torch.load, "trained": trained, "held": held,
        }  # fmt: skip
        server.shutdown()


def typed(line: str) -> int:
    """A command of a row that has made its input itself: it prints what it prints; the exit code."""
    return command(f"ckpt {line}")


def tried(call: Callable[..., Any], *args: Any, **options: Any) -> Any:
    """What a call gives, or its error: the row goes on."""
    try:
        return call(*args, **options)
    except ckpt_tools.CkptError as error:
        return f"{type(error).__name__}: {error}"


def found(path: str, **options: Any) -> list[str]:
    """The codes of what `check` finds."""
    return [row.code for row in ckpt_tools.check(path, **options).findings]


def trained(optimizer: type[torch.optim.Optimizer], **settings: Any) -> tuple[nn.Module, torch.optim.Optimizer]:
    """A network of twelve layers and its optimizer, after a step."""
    layers = [nn.ModuleDict({"query": nn.Linear(6, 6, bias=False), "norm": nn.LayerNorm(6)}) for _ in range(12)]
    model = nn.ModuleDict({"layers": nn.ModuleList(layers), "head": nn.Linear(6, 3)})
    used = optimizer(model.parameters(), **settings)
    for parameter in model.parameters():
        parameter.grad = torch.ones_like(parameter)
    used.step()
    return model, used


def held(attribute: str, **others: nn.Module) -> nn.Module:
    """A small model as an attribute of another, beside others; of none it is the model itself."""
    torch.manual_seed(0)
    inner = nn.Sequential(nn.Linear(3, 4), nn.ReLU(), nn.Linear(4, 2))
    return nn.ModuleDict({attribute: inner, **others}) if attribute else inner


def fates(old: Any, new: Any, match: str | None = "exact+wrappers", **options: Any) -> list[Any]:
    """What becomes of every name of two sides: names of one shape, shapes by name, or modules."""
    one, other = (dict.fromkeys(side, (2,)) if isinstance(side, list) else side for side in (old, new))
    try:
        report = reported(one, other, match, **options)
    except ckpt_tools.CkptError as error:
        return [f"{type(error).__name__}: {error}"]
    found, advice = report.matching, report.advice
    told = {
        "matched": [(row.old, row.new, row.reason, row.step) for row in found.matched], "missing": found.missing,
        "unexpected": found.unexpected, "ambiguous": [(row.new, row.candidates, row.why) for row in found.ambiguous],
        "mismatched": [(row.old, row.new, row.source_shape, row.target_shape) for row in found.mismatched],
        "offers": [(row.step, row.old, row.new) for row in found.offers],
        "extras": [(row.glob, len(row.names)) for row in advice.extras],
        "questions": [(row.new, row.candidates) for row in advice.questions],
    }  # fmt: skip
    return [f"{name}: {rows}" for name, rows in told.items() if rows]


def adapter(tensors: dict[str, torch.Tensor], folder: str = "adapter", **config: object) -> str:
    """An adapter of PEFT's: its folder."""
    Path(folder).mkdir(exist_ok=True)
    save_file({f"base_model.model.{name}": value for name, value in tensors.items()}, f"{folder}/adapter_model.safetensors")
    Path(folder, "adapter_config.json").write_text(json.dumps({"peft_type": "LORA", "r": 2, "lora_alpha": 2, **config}))
    return folder


def trainings(folder: str, **facts: dict[str, Any]) -> None:
    """Training checkpoints by name, with their facts beside the weights, written at times of their own."""
    for name, given in facts.items():
        path, time, value = Path(folder, name), given.pop("time", 0), given.pop("value", 1.0)
        path.parent.mkdir(parents=True, exist_ok=True)
        torch.save({"model": {"module.a.weight": torch.full((64, 4), value)}, **given}, path)
        os.utime(path, (10**9 + time,) * 2)


def beside() -> str:
    """A folder of two shards, and what Hugging Face's libraries put beside them."""
    ckpt_tools.convert("fixtures/single.pth", "in", shard_size="4KB")
    for name in ("LICENSE", "config.json", "generation_config.json", "merges.txt", "tokenizer.model", "vocab.txt"):
        Path("in", name).write_text('{"torch_dtype": "float32"}' if name == "config.json" else "{}")
    return "in"


def guarded_load() -> str:
    """What a guard says where all is loaded."""
    with ckpt_tools.torch.guard(model := network()) as seen:
        ckpt_tools.torch.load_into(model, "fixtures/ddp.pth")
    return str(seen)


def guarded_miss() -> str:
    """What a guard says of a model that got one layer only."""
    with ckpt_tools.torch.guard(model := network()) as seen:
        nn.Module.load_state_dict(model, {"fc1.bias": torch.zeros(8)}, strict=False)
    return str(seen)
