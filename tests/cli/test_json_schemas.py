"""Every --json has its schema in docs/, and real documents follow it."""

import json
from pathlib import Path
from typing import Any

import click
import jsonschema
import pytest
import torch

import ckpt_tools
from tests.support.commands import main
from tests.support.samples import FIXTURES
from tests.support.schemas import DOCS, validator
from tests.support.terminal import run


def documents(*arguments: object) -> list[dict[str, Any]]:
    """What a command writes under --json, each document checked against the command's schema."""
    result = run(*arguments, "--json")
    assert result.exit_code in (0, 1), result.output
    found = [json.loads(line) for line in result.stdout.splitlines()]
    for document in found:
        validator(str(arguments[0])).validate(document)
    return found


def with_json() -> list[str]:
    context = click.Context(main)
    commands = {name: main.get_command(context, name) for name in main.list_commands(context)}
    return [name for name, command in commands.items() if any("--json" in found.opts for found in command.params)]  # type: ignore[union-attr]


@pytest.mark.parametrize("name", [*with_json(), "error"])
def test_every_document_has_a_schema(name: str) -> None:
    """Each command with --json has a valid schema in docs/, which docs/json.md links and its --help leads to."""
    jsonschema.Draft202012Validator.check_schema(validator(name).schema)
    page = (DOCS / "json.md").read_text()
    assert f"({name}.schema.json)" in page
    assert name == "error" or f"`ckpt {name} --json`" in page
    helped = run(name, "--help-all" if name == "convert" else "--help").output
    assert name == "error" or "docs/json.md" in helped.replace("\n", "")


def test_schemas_belong_to_something() -> None:
    assert {path.name.removesuffix(".schema.json") for path in DOCS.glob("*.schema.json")} == {*with_json(), "error"}


def test_folders_and_adapters(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What golden files have not: a configuration beside shards, an adapter that was extracted, other files."""
    monkeypatch.chdir(tmp_path)
    ckpt_tools.convert(FIXTURES / "single.pth", "folder", shard_size="8KB")
    Path("folder", "config.json").write_text("{}")
    Path("folder", "modeling.py").write_text("")
    (report,) = documents("convert", "folder", "again", "--shard-size", "8KB")
    assert (report["companions"], [name for name, _ in report["stayed"]]) == (["config.json"], ["modeling.py"])
    base = {"a.weight": torch.zeros(3, 4), "a.bias": torch.zeros(3), "norm.weight": torch.zeros(3), "scale": torch.zeros(1)}
    torch.save(base, "base.pth")
    torch.save({name: value + 1 for name, value in base.items()}, "tuned.pth")
    (report,) = documents("extract-lora", "base.pth", "tuned.pth", "adapter", "--rank", "1")
    assert (report["saved"], report["left"]) == (["norm"], ["scale"])
    for name in ("inspect", "check"):
        assert str(tmp_path / "again" / "config.json") in documents(name, tmp_path)[-1]["no_checkpoints"]
