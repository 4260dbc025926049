"""Every --json has its schema in docs/, real documents follow it, and together they fill every field that it names."""

from __future__ import annotations

import functools
import itertools
import json
from pathlib import Path
from typing import Any

import click
import jsonschema
import pytest
import torch
from referencing import Registry, Resource
from torch import nn

from ckpt_tools import convert
from tests.support import attention, proving
from tests.support.commands import main
from tests.support.keys import write_keys
from tests.support.samples import FIXTURES, PTH, SAFETENSORS
from tests.support.terminal import ROOT, run

DOCS = ROOT / "docs"


@functools.cache
def validator(name: str) -> jsonschema.Draft202012Validator:
    """The schema of a command; a reference to another schema is found beside it."""
    schemas = {path.name: json.loads(path.read_text()) for path in DOCS.glob("*.schema.json")}
    registry: Registry[Any] = Registry().with_resources(
        (key, Resource.from_contents(schema)) for key, schema in schemas.items()
    )
    return jsonschema.Draft202012Validator(schemas[f"{name}.schema.json"], registry=registry)


def documents(*arguments: object) -> list[dict[str, Any]]:
    """What a command writes under --json, each document checked against the command's schema."""
    result = run(*arguments, "--json")
    assert result.exit_code in (0, 1), result.output
    found = [json.loads(line) for line in result.stdout.splitlines()]
    for document in found:
        validator(str(arguments[0])).validate(document)
    return found


def filled(found: list[dict[str, Any]]) -> set[str]:
    """The fields that say something in at least one of the documents."""
    return {name for document in found for name, value in document.items() if value not in (None, [], {}, "", 0, False)}


def fields(name: str) -> set[str]:
    """The fields of a command's document."""
    return set(validator(name).schema["required"])  # type: ignore[index]


@pytest.fixture(autouse=True)
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The commands write into the test's folder."""
    monkeypatch.chdir(tmp_path)


def with_json() -> list[str]:
    """The commands that have --json."""
    context = click.Context(main)
    commands = {name: main.get_command(context, name) for name in main.list_commands(context)}
    return [name for name, command in commands.items() if any("--json" in found.opts for found in command.params)]  # type: ignore[union-attr]


@pytest.mark.parametrize("name", [*with_json(), "error"])
def test_every_document_has_a_schema(name: str) -> None:
    """Each command with --json has a valid schema in docs/, which docs/json.md links and its --help leads to."""
    jsonschema.Draft202012Validator.check_schema(validator(name).schema)
    page = (DOCS / "json.md").read_text()
    assert f"({name}.schema.json)" in page
    assert name == "error" or f"# `ckpt {name} --json`" in page
    helped = run(name, "--help-all" if name == "convert" else "--help").output
    assert name == "error" or "docs/json.md" in helped.replace("\n", "")


def test_schemas_belong_to_something() -> None:
    """No schema in docs/ is left from a command that is gone."""
    assert {path.name.removesuffix(".schema.json") for path in DOCS.glob("*.schema.json")} == {*with_json(), "error"}


def save_odd() -> Path:
    """Floats that overflow and underflow in halves, views on a large storage, a device tag, an object, an optimizer."""
    big = torch.zeros(1000)
    model = {"module.a.weight": torch.tensor([1e30, 1e-30, 1.0]), "module.b.weight": big[:10]}
    optimizer = {"state": {}, "param_groups": [{"lr": 0.1, "params": [0, 1], "param_names": list(model)}]}
    torch.save({"model": model, "optimizer": optimizer, "best": Path("best.pth"), "seen": slice(1, 2)}, "odd.pth")
    return Path("odd.pth")


def from_a_folder() -> list[dict[str, Any]]:
    """A folder with a configuration and code beside its shards, converted into another."""
    convert(FIXTURES / "single.pth", "folder", shard_size="8KB")
    Path("folder", "config.json").write_text("{}")
    Path("folder", "modeling.py").write_text("")
    return documents("convert", "folder", "again", "--shard-size", "8KB")


def test_convert() -> None:
    """Renamed, cast, fitted, dropped, sharded, edited in place, as a dry run: every field is filled once."""
    odd = save_odd()
    torch.save(nn.Linear(3, 2).state_dict() | {"old": torch.ones(2)}, "linear.pth")
    torch.save(nn.Sequential(nn.Linear(3, 2), nn.Linear(4, 5)).state_dict(), "target.pth")
    torch.save({"0.weight": torch.ones(2, 3), "0.bias": torch.ones(2), "1.weight": torch.ones(5, 3)}, "source.pth")
    codes = torch.tensor([[1.0, float("nan")]]).to(torch.float8_e4m3fn)
    torch.save({"a.weight": codes, "a.weight_scale": torch.ones(1)}, "fp8.pth")
    fit = ("--like", "target.pth", "--reinit", "default", "--on-mismatch")
    found = [
        *documents("convert", odd, "a.pth", "--strip-module", "--dtype", "fp16", "--objects", "plain"),
        *documents("convert", odd, "b.pth", "--slim", "--dry-run"),
        *documents("convert", odd, "c.pth", "--drop", "optimizer", "--objects", "drop"),
        *documents("convert", FIXTURES / "tied.pth", "d.safetensors"),
        *documents("convert", FIXTURES / "cuda.pth", "e.pth", "--map-location", "cpu"),
        *documents("convert", FIXTURES / "single.pth", "shards", "--shard-size", "8KB"),
        *from_a_folder(),
        *documents("convert", FIXTURES / "single.pth", "old.pth", "--format", "pth-legacy"),
        *documents("convert", "source.pth", "f.pth", *fit, "reinit"),
        *documents("convert", "source.pth", "g.pth", *fit, "skip"),
        *documents("convert", "linear.pth", "--in-place", "--add-module"),
        *documents("convert", "fp8.pth", "h.pth", "--dequantize"),
        *documents("convert", odd, "fp8_again.pth", "--dtype", "fp8_e4m3", "--objects", "plain"),
        *documents("convert", FIXTURES / "lora" / "base.safetensors", "i.pth", "--lora", FIXTURES / "lora" / "saved"),
    ]
    assert filled(found) == fields("convert")
    fitted = [document["fitted"] for document in found if document["fitted"]]
    assert filled(fitted) >= {"target", "reasons", "initialised", "skipped"}
    assert filled(found[-1]["merged"]) >= {"adapter", "weight", "ranks", "scales", "modules", "saved"}


def test_average() -> None:
    """Means, integers that were kept, the largest and the first of them."""
    for number in (1, 2):
        counts = {"bn.num_batches_tracked": torch.tensor(number), "ids": torch.tensor([number]), "same": torch.tensor(7)}
        torch.save({"a.weight": torch.rand(3), **counts}, f"{number}.pth")
    found = documents("average", "1.pth", "2.pth", "mean.pth", "--weights", "3,1", "--integers", "first")
    assert filled(found) == fields("average")


def test_prove() -> None:
    """Equal and different ones, with a setting that differs, an unproved tensor, and with digests in a certificate."""
    torch.save(proving.Text().state_dict(), "text.pth")
    models = ("--model", f"{proving.__file__}:Text", "--model", f"{proving.__file__}:text_with_another_eps")
    found = documents("prove", "text.pth", "text.pth", *models, "--input", "1x4:50", "--certificate", "c.json", "--seed", 1)
    found += documents("prove", "text.pth", "text.pth", *models[:2], "--input", "1x4:50")
    for name in ("old.pth", "new.pth"):
        torch.save(torch.nn.ModuleDict({"fc": torch.nn.Linear(4, 4), "aux": torch.nn.Linear(4, 4)}).state_dict(), name)
    models = ("--model", f"{proving.__file__}:WithAux", "--model", f"{proving.__file__}:WithoutAux")
    torch.save(torch.load("old.pth") | {"aux.bias": torch.ones(4)}, "new.pth")
    found += documents("prove", "old.pth", "new.pth", *models, "--input", "3x4")
    assert filled(found) == fields("prove")


def test_extract_lora() -> None:
    """Factors, a norm that is held whole, a bias, a tensor that is left, and one that is equal."""
    base = {
        "a.weight": torch.zeros(3, 4),
        "a.bias": torch.zeros(3),
        "norm.weight": torch.zeros(3),
        "b.weight": torch.zeros(2, 2),
    }
    torch.save(base | {"scale": torch.zeros(1), "same": torch.ones(2)}, "base.pth")
    torch.save({name: value + 1 for name, value in base.items()} | {"scale": torch.ones(1), "same": torch.ones(2)}, "tuned.pth")
    found = documents("extract-lora", "base.pth", "tuned.pth", "adapter", "--rank", "1")
    found += documents("extract-lora", "base.pth", "tuned.pth", "other", "--rank", "1", "--only", "a.*", "--dry-run")
    assert filled(found) == fields("extract-lora")


def test_sign_and_verify() -> None:
    """What was signed is verified; what was changed, is gone or is new since is told."""
    pytest.importorskip("cryptography", reason="the extra `sign`")
    write_keys(Path(), "key")
    torch.save({"a.weight": torch.ones(2), "b.weight": torch.ones(3), "same.weight": torch.ones(4)}, "in.pth")
    signed = documents("sign", "in.pth", "--key", "key.pem")
    torch.save({"same.weight": torch.ones(4), "kind": slice(1)}, "code.pth")
    torch.save({"x": {"a.weight": torch.zeros(2), "c.weight": torch.ones(5), "same.weight": torch.ones(4)}}, "other.pth")
    found = [
        *documents("verify", "in.pth", "--key", "key.pub"),
        *documents("verify", "other.pth", "--key", "key.pub", "--signature", "in.pth.sig"),
        *documents("verify", "code.pth", "--key", "key.pub", "--signature", "in.pth.sig", "--tensors-only"),
    ]
    assert (filled(signed), filled(found)) == (fields("sign"), fields("verify"))
    assert filled([found[1]["compared"]]) == {"against", "equal", "renamed", "different", "missing", "unexpected"}


def test_stats() -> None:
    """All fixtures, whatever the dtype, and the corner cases: NaN, nothing, one value, a sparse tensor."""
    awq = FIXTURES / "quantised" / "awq.safetensors"
    odd = {"nan": torch.tensor([float("nan"), float("inf")]), "none": torch.ones(0), "one": torch.tensor(2.5)}
    torch.save(odd | {"sparse": torch.eye(2).to_sparse(), "huge": torch.tensor([-3e38, 3e38])}, "odd.pth")
    found = [document for path in ("odd.pth", *PTH, *SAFETENSORS, awq) for document in documents("stats", path)]
    assert filled(found) == fields("stats")
    assert any(row["reason"] for document in found for row in document["tensors"])


def test_show() -> None:
    """Values with an index, a scalar, complex ones, and an array that was written."""
    torch.save({"w": torch.arange(6.0).reshape(2, 3), "c": torch.tensor([1j]), "s": torch.tensor(float("nan"))}, "x.pth")
    calls = [("w[0:1, :2]",), ("c",), ("s",), ("w", "-o", "out.npy")]
    found = [document for call in calls for document in documents("show", "x.pth", *call)]
    assert filled(found) == fields("show")


def test_diff() -> None:
    """Two that differ in everything that is compared, and each fixture with its neighbour."""
    left = {"module.a": torch.ones(2), "module.b": torch.ones(3), "module.c": torch.ones(2), "module.gone": torch.ones(1)}
    right = {"a": torch.zeros(2), "b": torch.ones(4), "c": torch.ones(2).half(), "new": torch.eye(2).to_sparse()}
    torch.save({"net": left, "epoch": 1, "only": float("nan"), "kind": slice(1), "big": 1 << 70}, "left.pth")
    torch.save({"net": right, "epoch": [2], "kind": range(1), "text": "\ud800\x1b"}, "right.pth")
    found = [
        *documents("diff", "--values", "left.pth", "right.pth"),
        *documents("diff", FIXTURES / "cuda.pth", FIXTURES / "mixed_devices.pth"),
        *documents("diff", FIXTURES / "tied.pth", FIXTURES / "tied.safetensors"),
    ]
    for one, other in itertools.pairwise(PTH):
        found += documents("diff", one, other, "--values")
    assert filled(found) == fields("diff")
    assert any(row["gap"] for document in found for row in document["changed"])
    torch.save({"a": torch.eye(2).to_sparse()}, "one.pth")
    torch.save({"a": torch.eye(2).mul(2).to_sparse()}, "two.pth")
    (document,) = documents("diff", "--values", "one.pth", "two.pth")
    assert document["changed"][0]["reason"]


def test_match() -> None:
    """Matched by name and by structure, ambiguous, of another shape, fused, left over."""
    fused = {"qkv.weight": torch.ones(12, 4), "out.weight": torch.ones(4, 4), "ln.weight": torch.ones(4), "more": torch.ones(9)}
    split = {f"{part}.weight": torch.ones(4, 4) for part in ("q", "k", "v", "out")} | {"ln.weight": torch.ones(5)}
    torch.save({f"module.{name}": tensor for name, tensor in fused.items()}, "fused.pth")
    torch.save(split | {"absent": torch.ones(8, 2)}, "split.pth")
    torch.save({"module.a": torch.ones(2), "a": torch.ones(2)}, "twins.pth")
    torch.save({"_orig_mod.a": torch.ones(2)}, "one.pth")
    torch.save(attention.Old().state_dict(), "alpha.pth")
    found = [
        *documents("match", "fused.pth", "--like", "split.pth", "--match", "structure"),
        *documents("match", "split.pth", "--like", "fused.pth"),
        *documents("match", "twins.pth", "--like", "one.pth"),
        *documents("match", FIXTURES / "ddp.pth", "--like", FIXTURES / "single.pth"),
        *documents("match", "alpha.pth", "--like", f"{attention.__name__}:New", "--from", f"{attention.__name__}:Old"),
    ]
    assert filled(found) == fields("match")


def test_folders(tmp_path: Path) -> None:
    """A folder with files that are not checkpoints: its last line follows the schema too."""
    torch.save({"a": torch.ones(1)}, "a.pth")
    Path("notes.txt").write_text("none")
    for name in ("inspect", "check"):
        assert documents(name, tmp_path)[-1] == {"folder": str(tmp_path), "no_checkpoints": [str(tmp_path / "notes.txt")]}
