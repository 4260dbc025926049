"""The contracts of docs/*.schema.json."""

import functools
import json
from pathlib import Path
from typing import Any

import jsonschema
from referencing import Registry, Resource

DOCS = Path(__file__).parents[2] / "docs"


@functools.cache
def validator(name: str) -> jsonschema.Draft202012Validator:
    """The schema of a command, or "error"; schemas refer to each other by their `$id`."""
    schemas = [json.loads(path.read_text()) for path in DOCS.glob("*.schema.json")]
    registry: Registry[Any] = Registry().with_resources((each["$id"], Resource.from_contents(each)) for each in schemas)
    schema = json.loads((DOCS / f"{name}.schema.json").read_text())
    return jsonschema.Draft202012Validator(schema, registry=registry)


def hold(command: str, document: dict[str, Any]) -> None:
    """Fails where a document of `ckpt COMMAND --json` is not as its schema says."""
    validator("error" if "exit_code" in document and "what" in document else command).validate(document)
