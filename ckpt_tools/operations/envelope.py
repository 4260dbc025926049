"""DSSE envelopes and Ed25519 keys. cryptography, an extra, does the arithmetic; it is imported when a key is used.

DSSE (Dead Simple Signing Envelope, v1) signs `DSSEv1 LENGTH TYPE LENGTH PAYLOAD`, so that no signature of one type of payload
is one of another: https://github.com/secure-systems-lab/dsse/blob/master/protocol.md
"""

from __future__ import annotations

import base64
import binascii
import hashlib
import json
import os
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ckpt_tools import limits
from ckpt_tools.errors import NotACheckpointError, SignatureError, missing
from ckpt_tools.formats.base import unique
from ckpt_tools.io.output import open_regular
from ckpt_tools.io.parsers import load_json

if TYPE_CHECKING:
    from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey, Ed25519PublicKey

PAYLOAD_TYPE = "application/vnd.in-toto+json"
_MOST_SIGNATURES = 100
_MAKE_KEYS = "openssl genpkey -algorithm ed25519 -out key.pem; openssl pkey -in key.pem -pubout -out key.pub"


def seal(payload: bytes, key_path: str | os.PathLike[str]) -> tuple[str, str]:
    """An envelope around a payload, as JSON text, and the id of the key."""
    key = _private_key(key_path)
    keyid = _keyid(key.public_key())
    signature = key.sign(_to_sign(PAYLOAD_TYPE, payload))
    made = {
        "payload": base64.b64encode(payload).decode(),
        "payloadType": PAYLOAD_TYPE,
        "signatures": [{"keyid": keyid, "sig": base64.b64encode(signature).decode()}],
    }
    return json.dumps(made, indent=1) + "\n", keyid


def open_sealed(path: str | os.PathLike[str], key_path: str | os.PathLike[str]) -> tuple[bytes, str]:
    """The payload of an envelope, once its signature is proved to be this key's, and the key's id."""
    key = _public_key(key_path)
    from cryptography.exceptions import InvalidSignature

    payload, kind, signatures = _parse(path)
    for signature in signatures:
        try:
            key.verify(signature, _to_sign(kind, payload))
        except InvalidSignature:
            continue
        if kind != PAYLOAD_TYPE:
            raise SignatureError(f"{path} signs something else than a checkpoint: {kind!r}.")
        return payload, _keyid(key)
    raise SignatureError(
        f"{path} is not signed by the key {key_path}.", why="No signature in it is valid for this key and these contents.",
        fix="It was changed, or another key has signed it.",
    )  # fmt: skip


def _parse(path: str | os.PathLike[str]) -> tuple[bytes, str, list[bytes]]:
    """Payload, its type, and the signatures; base64 of either alphabet, as DSSE says."""
    try:
        found: Any = load_json(_read(path, "a signature"), pairs=unique)
        payload, kind = _decoded(found["payload"]), found["payloadType"]
        signatures = [_decoded(row["sig"]) for row in found["signatures"]]
    except (ValueError, KeyError, TypeError, AttributeError, binascii.Error):
        raise SignatureError(f"{path} is not a signature.", why="A DSSE envelope as ckpt sign writes it is wanted.") from None
    if len(signatures) > _MOST_SIGNATURES:
        raise SignatureError(f"{path} is not a signature.", why=f"It has {len(signatures)}; {_MOST_SIGNATURES} are the most.")
    if not isinstance(kind, str) or not kind.isascii():
        raise SignatureError(f"{path} is not a signature.", why="Its payloadType is not plain text.")
    return payload, kind, signatures


def _decoded(text: str) -> bytes:
    return base64.b64decode(text.replace("-", "+").replace("_", "/"), validate=True)


def _to_sign(kind: str, payload: bytes) -> bytes:
    name = kind.encode()
    return b"DSSEv1 %d %s %d %s" % (len(name), name, len(payload), payload)


def _private_key(path: str | os.PathLike[str]) -> Ed25519PrivateKey:
    serialization, ed25519 = _cryptography()
    try:
        key = serialization.load_pem_private_key(_read(path, "a key"), password=None)
    except (ValueError, TypeError, _unsupported()) as error:  # TypeError: it is encrypted
        raise _bad_key(path, "private", str(error)) from None
    if not isinstance(key, ed25519.Ed25519PrivateKey):
        raise _bad_key(path, "private", f"It is a {type(key).__name__}.")
    found: Ed25519PrivateKey = key
    return found


def _public_key(path: str | os.PathLike[str]) -> Ed25519PublicKey:
    serialization, ed25519 = _cryptography()
    try:
        key = serialization.load_pem_public_key(_read(path, "a key"))
    except (ValueError, _unsupported()) as error:
        raise _bad_key(path, "public", str(error)) from None
    if not isinstance(key, ed25519.Ed25519PublicKey):
        raise _bad_key(path, "public", f"It is a {type(key).__name__}.")
    found: Ed25519PublicKey = key
    return found


def _cryptography() -> tuple[Any, Any]:
    try:
        from cryptography.hazmat.primitives import serialization
        from cryptography.hazmat.primitives.asymmetric import ed25519
    except ImportError:
        raise missing("cryptography", "cryptography", "Signatures are made and checked with it (the extra 'sign').") from None
    return serialization, ed25519


def _unsupported() -> type[Exception]:
    """What cryptography raises for keys of kinds that it does not know."""
    from cryptography.exceptions import UnsupportedAlgorithm

    return UnsupportedAlgorithm


def _bad_key(path: str | os.PathLike[str], kind: str, why: str) -> SignatureError:
    what = f"{path} is not an Ed25519 {kind} key in PEM, unencrypted."
    return SignatureError(what, why=why, fix=f"Make a pair: {_MAKE_KEYS}")


def _read(path: str | os.PathLike[str], what: str) -> bytes:
    """All of a file; a pipe or a device, which may have no end, is refused."""
    try:
        with open(open_regular(Path(path)), "rb") as file:
            limits.PICKLE_BYTES.check(os.fstat(file.fileno()).st_size, f"{path} is too large for {what}.")
            return file.read()
    except NotACheckpointError as error:
        raise SignatureError(error.what, why=error.why) from None
    except OSError as error:
        raise SignatureError(f"{path} cannot be read.", why=f"{error.strerror or error}.") from None


def _keyid(key: Ed25519PublicKey) -> str:
    """SHA-256 of the public key as DER (SubjectPublicKeyInfo)."""
    serialization, _ = _cryptography()
    form = serialization.PublicFormat.SubjectPublicKeyInfo
    return hashlib.sha256(key.public_bytes(serialization.Encoding.DER, form)).hexdigest()
