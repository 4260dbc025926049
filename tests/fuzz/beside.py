"""What lies beside a checkpoint or around it: adapters, quantised weights, signatures, compressed tars."""

from __future__ import annotations

import base64
import bz2
import contextlib
import gzip
import io
import json
import lzma
import tarfile
import tempfile
from collections.abc import Callable
from functools import lru_cache
from pathlib import Path
from random import Random
from typing import Any

import torch

import ckpt_tools
from ckpt_tools.operations.signing import PAYLOAD_TYPE, seal
from ckpt_tools.parts.open import open_checkpoint
from tests.fuzz import headers, raw, tars
from tests.fuzz.guard import FindingError
from tests.fuzz.raw import text
from tests.support.keys import write_keys

_FIXTURES = Path(__file__).parents[2] / "fixtures"
_ADAPTERS = ("plain", "dora", "conv", "patterns", "embedding", "all-biases", "rslora")


def adapter(rng: Random, folder: Path) -> Callable[[], object]:
    """A low-rank adapter, merged into its base."""
    place = _FIXTURES / "lora" / rng.choice(_ADAPTERS)
    weights, config = ((place / name).read_bytes() for name in ("adapter_model.safetensors", "adapter_config.json"))
    if rng.random() < 0.6:
        config = headers.mutate_json(rng, config)
    else:
        weights = headers.mutate(rng, weights, weights)
    (folder / "adapter").mkdir()
    (folder / "adapter" / "adapter_model.safetensors").write_bytes(weights)
    (folder / "adapter" / "adapter_config.json").write_bytes(config)
    base, out = _FIXTURES / "lora" / "base.safetensors", folder / "out.safetensors"
    return rng.choice(
        (
            lambda: ckpt_tools.convert(base, out, lora=folder / "adapter"),
            lambda: ckpt_tools.inspect(folder / "adapter"),
            lambda: ckpt_tools.check(folder / "adapter" / "adapter_model.safetensors", values=True),
        )
    )


# --- quantised weights

_CONFIGS: dict[str, dict[str, Any]] = {
    "awq": {"quant_method": "awq", "bits": 4, "group_size": 32, "version": "gemm", "zero_point": True},
    "mxfp4": {"quant_method": "mxfp4", "modules_to_not_convert": ["model.norm"]},
    "gptq": {"quant_method": "gptq", "bits": 4, "group_size": 32, "checkpoint_format": "gptq", "desc_act": False},
    "bitsandbytes": {"quant_method": "bitsandbytes", "load_in_4bit": True, "bnb_4bit_quant_type": "nf4"},
}  # fmt: skip


def quantised(rng: Random, folder: Path) -> Callable[[], object]:
    """Packed codes and their scales, made plain or measured."""
    kind = rng.choice(list(_CONFIGS))
    weights = (_FIXTURES / "quantised" / f"{kind}.safetensors").read_bytes()
    config = json.dumps({"quantization_config": _CONFIGS[kind], "text_config": {}}).encode()
    if rng.random() < 0.4:
        config = headers.mutate_json(rng, config)
    else:
        weights = headers.mutate(rng, weights, weights)
    path = folder / "model.safetensors"
    path.write_bytes(weights)
    if rng.random() < 0.7:
        (folder / "config.json").write_bytes(config)
    return rng.choice(
        (
            lambda: ckpt_tools.convert(path, folder / "out.safetensors", dequantize=rng.choice(("bf16", "fp32"))),
            lambda: ckpt_tools.stats(path),
            lambda: ckpt_tools.inspect(path),
        )
    )


# --- signatures


@lru_cache(maxsize=1)
def signed() -> dict[str, bytes]:
    """A checkpoint, its signature, and the keys."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        torch.save({"a.weight": torch.ones(2, 3), "b.weight": torch.zeros(4)}, folder / "model.pth")
        private, _ = write_keys(folder, "key")
        ckpt_tools.sign(folder / "model.pth", key=private)
        return {path.name: path.read_bytes() for path in folder.iterdir()}


def signature(rng: Random, folder: Path) -> Callable[[], object]:
    """A signature, its statement or the checkpoint, changed; what verifies is what was signed."""
    files = dict(signed())
    pick = rng.random()
    envelope = json.loads(files["model.pth.sig"])
    payload = base64.b64decode(envelope["payload"])
    for name, data in files.items():
        (folder / name).write_bytes(data)
    if pick < 0.4:
        changed = (
            headers.mutate_json(rng, files["model.pth.sig"]) if pick < 0.3 else raw.mutate(rng, files["model.pth.sig"], payload)
        )
        (folder / "model.pth.sig").write_bytes(changed)
    elif pick < 0.6:
        (folder / "model.pth").write_bytes(raw.mutate(rng, files["model.pth"], payload))
    elif pick < 0.8:  # by the very key: whoever has it may say anything
        (folder / "model.pth.sig").write_text(seal(headers.mutate_json(rng, payload), folder / "key.pem")[0])
    else:
        envelope["payload"] = base64.b64encode(headers.mutate_json(rng, payload)).decode()
        envelope["payloadType"] = rng.choice((PAYLOAD_TYPE, text(rng)))
        (folder / "model.pth.sig").write_bytes(json.dumps(envelope).encode("utf-8", "surrogatepass"))
    return lambda: _verified(folder, payload, strict=not 0.6 <= pick < 0.8)


def _verified(folder: Path, payload: bytes, *, strict: bool) -> None:
    report = ckpt_tools.verify(folder / "model.pth", key=folder / "key.pub")
    if not (report and strict):
        return
    wanted = {tuple(row["path"]): row["digest"] for row in json.loads(payload)["predicate"]["resources"]}
    found = {tuple(row.where): row.sha256 for row in ckpt_tools.check(folder / "model.pth", digest=True).digests}
    if wanted != found:
        raise FindingError("a checkpoint is verified, and is not what was signed")


# --- compressed files and tars

_PACKERS: tuple[Callable[[bytes], bytes], ...] = (bytes, gzip.compress, bz2.compress, lzma.compress)


@lru_cache(maxsize=1)
def _tar() -> bytes:
    out = io.BytesIO()
    with tarfile.open(fileobj=out, mode="w") as archive:
        for name, place in (("run/model.pth", "ddp.pth"), ("run/model.safetensors", "single.safetensors")):
            archive.add(_FIXTURES / place, name)
        info = tarfile.TarInfo("run/config.json")
        info.size = 2
        archive.addfile(info, io.BytesIO(b"{}"))
    return out.getvalue()


def packed(rng: Random, folder: Path) -> Callable[[], object]:
    """A checkpoint in a tar, compressed: what is read is what Python's tarfile finds under the name."""
    pack, again, data = rng.choice(_PACKERS), rng.choice(_PACKERS), _tar()
    single = rng.random() < 0.2
    data = (_FIXTURES / "ddp.pth").read_bytes() if single else tars.mutate(rng, data, data) if rng.random() < 0.7 else data
    data = pack(data[: rng.randrange(len(data))]) + again(data) if rng.random() < 0.1 else pack(data)
    if single or rng.random() < 0.4:
        data = raw.mutate(rng, data, data)
    path = folder / "packed.tar.gz"
    path.write_bytes(data)
    member = rng.choice(("", "!run/model.pth", "!run/model.safetensors", "!run"))
    if rng.random() < 0.3:
        return lambda: ckpt_tools.convert(f"{path}{member}", folder / "out.pth", objects="plain")
    return lambda: _as_tarfile(f"{path}{member}")


def _as_tarfile(place: str) -> None:
    with contextlib.closing(open_checkpoint(place)) as checkpoint:
        found, source = checkpoint.packed, checkpoint.source
        if found is None or not found.member:
            return
        data = source.read(0, source.size)
    try:
        with tarfile.open(place.partition("!")[0]) as archive:
            file = archive.extractfile(found.member)
            theirs = None if file is None else file.read()
    except (OSError, tarfile.TarError, KeyError, EOFError, ValueError, lzma.LZMAError):
        return
    if theirs is not None and theirs != data:
        raise FindingError(f"{found.member} is read as something else than tarfile finds")
