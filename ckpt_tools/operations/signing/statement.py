"""The in-toto statement about a checkpoint: its tensors with their digests, laid out as OpenSSF's model signing does files.

The predicate has `resources` (name, algorithm, digest, sorted by name) and `serialization`, as in
https://github.com/sigstore/model-transparency; a resource is a tensor here, with its dtype, shape and path, and the type of the
predicate is another one, since what reads that would look for files.
"""

from __future__ import annotations

import json
import string
from collections.abc import Sequence
from typing import Any

from ckpt_tools.errors import SignatureError
from ckpt_tools.formats.base import unique
from ckpt_tools.io.parsers import load_json
from ckpt_tools.operations.check.digests import Digest, of_all
from ckpt_tools.text import dotted

_STATEMENT = "https://in-toto.io/Statement/v1"
PREDICATE_TYPE = "ckpt-tools:tensor-digests/v1"
_KINDS = (_STATEMENT, PREDICATE_TYPE)
_METHOD = {"method": "tensors", "hash_type": "sha256"}


def payload_of(digests: Sequence[Digest], name: str) -> bytes:
    """The statement about a checkpoint of this name."""
    rows = sorted(digests, key=lambda digest: dotted(digest.where))
    statement = {
        "_type": _STATEMENT,
        "subject": [{"name": name, "digest": {"sha256": of_all(digests)}}],
        "predicateType": PREDICATE_TYPE,
        "predicate": {"resources": [_resource(digest) for digest in rows], "serialization": _METHOD},
    }
    return json.dumps(statement, separators=(",", ":")).encode()


def _resource(digest: Digest) -> dict[str, Any]:
    return {
        "name": dotted(digest.where), "algorithm": "sha256", "digest": digest.sha256, "dtype": digest.dtype,
        "shape": list(digest.shape), "path": list(digest.where),
    }  # fmt: skip


def digests_in(payload: bytes, label: str) -> tuple[str, list[Digest]]:
    """The name of what a statement is about, and the digests in it.

    Raises:
        SignatureError: it is a statement of another kind.
    """
    try:
        statement: Any = load_json(payload, pairs=unique)
        kinds, resources = (statement["_type"], statement["predicateType"]), statement["predicate"]["resources"]
        found = [] if kinds != _KINDS else [_digest(row) for row in resources]
        ((name, subject),) = [(row["name"], row["digest"]["sha256"]) for row in statement["subject"]]
    except (ValueError, KeyError, TypeError):
        raise SignatureError(f"{label} signs a statement that cannot be read.") from None
    if kinds != _KINDS:
        raise SignatureError(f"{label} signs a statement of another kind: {kinds[1]!r}.", why=f"{PREDICATE_TYPE} is wanted.")
    if len({digest.where for digest in found}) != len(found) or subject != of_all(found) or not found:
        raise SignatureError(f"{label} signs a statement that contradicts itself.", why="Its tensors are not its subject's.")
    return str(name), found


def _digest(row: Any) -> Digest:
    sha256, shape, where = row["digest"], row["shape"], row["path"]
    right = isinstance(sha256, str) and len(sha256) == 64 and set(sha256) <= set(string.hexdigits)
    right = right and row["algorithm"] == "sha256" and isinstance(row["dtype"], str) and isinstance(shape, list)
    right = right and all(type(size) is int and size >= 0 for size in shape) and isinstance(where, list)
    if not right or not all(type(part) in (str, int) for part in where):
        raise ValueError
    return Digest(tuple(where), row["dtype"], tuple(shape), sha256.lower())
