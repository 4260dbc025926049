"""Sign a checkpoint's tensors, and verify a checkpoint in any container against that signature."""

from __future__ import annotations

import base64
import binascii
import hashlib
import json
import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ckpt_tools import limits
from ckpt_tools.errors import ChecksumError, CkptError, NotACheckpointError, SignatureError, missing
from ckpt_tools.formats.base import unique
from ckpt_tools.formats.checkpoint import Checkpoint
from ckpt_tools.formats.single import collector_paused
from ckpt_tools.io.parsers import load_json
from ckpt_tools.io.source import is_there, open_regular
from ckpt_tools.io.writer import write_document
from ckpt_tools.operations.check import digests
from ckpt_tools.operations.check.digests import Compared, Digest, of_all
from ckpt_tools.operations.check.reading import read_checkpoint
from ckpt_tools.operations.inspect import describe
from ckpt_tools.operations.safety import Safety, of_checkpoint
from ckpt_tools.operations.scan import Scanned, files_of, scan_files
from ckpt_tools.parts.open import open_checkpoint
from ckpt_tools.parts.training import is_state
from ckpt_tools.text import Report, dotted, listed
from ckpt_tools.tree.options import natural
from ckpt_tools.tree.output_names import check_document

# --- dSSE envelopes and Ed25519 keys


PAYLOAD_TYPE = "application/vnd.in-toto+json"
_MOST_SIGNATURES = 100
_MAKE_KEYS = "openssl genpkey -algorithm ed25519 -out key.pem; openssl pkey -in key.pem -pubout -out key.pub"


def seal(payload: bytes, key_path: str | os.PathLike[str]) -> tuple[str, str]:
    """An envelope around a payload, as JSON text, and the id of the key."""
    key, keyid = _key(key_path, "private")
    signature = key.sign(_to_sign(PAYLOAD_TYPE, payload))
    made = {
        "payload": base64.b64encode(payload).decode(),
        "payloadType": PAYLOAD_TYPE,
        "signatures": [{"keyid": keyid, "sig": base64.b64encode(signature).decode()}],
    }
    return json.dumps(made, indent=1) + "\n", keyid


def open_sealed(path: str | os.PathLike[str], key_path: str | os.PathLike[str]) -> tuple[bytes, str]:
    """The payload of an envelope, once its signature is proved to be this key's, and the key's id."""
    key, keyid = _key(key_path, "public")
    from cryptography.exceptions import InvalidSignature

    payload, kind, signatures = _parse(path)
    for signature in signatures:
        try:
            key.verify(signature, _to_sign(kind, payload))
        except InvalidSignature:
            continue
        if kind != PAYLOAD_TYPE:
            raise SignatureError(f"{path} signs something else than a checkpoint: {kind!r}.")
        return payload, keyid
    raise SignatureError(
        f"{path} is not signed by the key {key_path}.", why="No signature in it is valid for this key and these contents.",
        fix="It was changed, or another key has signed it.",
    )  # fmt: skip


def _parse(path: str | os.PathLike[str]) -> tuple[bytes, str, list[bytes]]:
    """Payload, its type, and the signatures; base64 of either alphabet, as DSSE says."""
    try:
        found: Any = load_json(_envelope_read(path, "a signature"), pairs=unique)
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


def _key(path: str | os.PathLike[str], kind: str) -> tuple[Any, str]:
    """The Ed25519 key in a file, "private" or "public"; and SHA-256 of the public key as DER (SubjectPublicKeyInfo)."""
    try:
        from cryptography.exceptions import UnsupportedAlgorithm
        from cryptography.hazmat.primitives import serialization
        from cryptography.hazmat.primitives.asymmetric import ed25519
    except ImportError:
        raise missing("cryptography", "cryptography", "Signatures are made and checked with it (the extra 'sign').") from None
    data, is_private = _envelope_read(path, "a key"), kind == "private"
    try:
        key = serialization.load_pem_private_key(data, None) if is_private else serialization.load_pem_public_key(data)
        why = f"It is a {type(key).__name__}."
    except (ValueError, TypeError, UnsupportedAlgorithm) as error:  # TypeError: it is encrypted
        key, why = None, str(error)
    if not isinstance(key, ed25519.Ed25519PrivateKey if is_private else ed25519.Ed25519PublicKey):
        what = f"{path} is not an Ed25519 {kind} key in PEM, unencrypted."
        raise SignatureError(what, why=why, fix=f"Make a pair: {_MAKE_KEYS}")
    public: Any = key.public_key() if isinstance(key, ed25519.Ed25519PrivateKey) else key
    form = serialization.PublicFormat.SubjectPublicKeyInfo
    return key, hashlib.sha256(public.public_bytes(serialization.Encoding.DER, form)).hexdigest()


def _envelope_read(path: str | os.PathLike[str], what: str) -> bytes:
    """All of a file; a pipe or a device, which may have no end, is refused."""
    try:
        with open(open_regular(Path(path)), "rb") as file:
            limits.HEADER.check(os.fstat(file.fileno()).st_size, f"{path} is too large for {what}.")
            return file.read()
    except NotACheckpointError as error:
        raise SignatureError(error.what, why=error.why) from None
    except OSError as error:
        raise SignatureError(f"{path} cannot be read.", why=f"{error.strerror or error}.") from None


SUFFIX = ".sig"


@dataclass(frozen=True, slots=True)
class NotSigned:
    """What is in a checkpoint, or loads with it, and no signature covers.

    Attributes:
        values: the names of plain values, as `inspect` has them. metadata: the keys of a safetensors file's own.
        files: those of a folder that hold none of its tensors. not_plain: what `verify` will not pass (see `Verified`).
    """

    values: list[str]
    metadata: list[str]
    files: list[str]
    not_plain: list[Scanned]


@dataclass(frozen=True, slots=True, repr=False)
class Signed(Report):
    """A signature that was written.

    Attributes:
        path: the checkpoint. signature: the file with the signature. keyid: SHA-256 of the public key.
        tensors: how many it covers. not_signed: what it does not cover.
    """

    path: str
    signature: str
    keyid: str
    tensors: int
    not_signed: NotSigned


@dataclass(frozen=True, slots=True, repr=False)
class Verified(Report):
    """A checkpoint, compared with what was signed; true when all tensors of both are the same and nothing in it can run.

    Attributes:
        path: the checkpoint. signature: the file with the signature, which is valid. keyid: SHA-256 of the public key.
        signed: the name of what was signed. tensors: how many the signature covers. compared: which are equal, and which not.
        not_plain: the file, or each file of a folder, that is dangerous, needs code (other than torch's own of a distributed
            checkpoint) or could not be examined.
        beside: of a folder the files that hold other tensors, which a program may take instead; training state apart.
        tensors_only: whether the signed tensors alone decide.
    """

    path: str
    signature: str
    keyid: str
    signed: str
    tensors: int
    compared: Compared
    not_plain: list[Scanned]
    beside: list[str]
    tensors_only: bool

    @property
    def same_tensors(self) -> bool:
        """Whether the tensors are those that were signed, and no others."""
        return not (self.compared.different or self.compared.missing or self.compared.unexpected)

    def __bool__(self) -> bool:
        return self.same_tensors and (self.tensors_only or not (self.not_plain or self.beside))

    def to_json(self) -> dict[str, Any]:
        """The report as plain data; `verified` is the verdict."""
        return {"verified": bool(self), **Report.to_json(self)}


@natural
def sign(
    path: str | os.PathLike[str], *, key: str | os.PathLike[str], output: str | os.PathLike[str] | None = None,
    overwrite: bool = False, before: Callable[[NotSigned], None] | None = None,
) -> Signed:  # fmt: skip
    """Sign the digests of all tensors of a checkpoint. The signature is valid for every container that holds the same tensors.

    Args:
        path: the checkpoint.
        key: an Ed25519 private key, as PEM (`openssl genpkey -algorithm ed25519`).
        output: the file for the signature; else the checkpoint's name with `.sig` behind it.
        overwrite: replace it if it exists.
        before: is given what the signature will not cover, before it is written.

    Raises:
        SignatureError: the key cannot be read; tensors of the checkpoint have no digest, or there are none.
        MissingPackageError: cryptography is not installed.
        OutputError: the signature exists, or cannot be written. CkptError: the checkpoint cannot be read, or is damaged.
    """
    target = _signature_of(path) if output is None else os.fspath(output)
    check_document(target, "a signature", SUFFIX, (path, key))
    with collector_paused(), open_checkpoint(path) as checkpoint:
        not_signed = _not_signed(path, target, checkpoint)
        found = _digests(checkpoint, whole=True)
    if not found:
        raise SignatureError(f"{path} has no tensors, and nothing else is signed.")
    if before is not None:
        before(not_signed)
    text, keyid = seal(payload_of(found, os.path.basename(_named(path))), key)
    write_document(target, text, overwrite=overwrite)
    return Signed(os.fspath(path), target, keyid, len(found), not_signed)


@natural
def verify(
    path: str | os.PathLike[str], *, key: str | os.PathLike[str], signature: str | os.PathLike[str] | None = None,
    tensors_only: bool = False,
) -> Verified:  # fmt: skip
    """Compare the tensors of a checkpoint, in whatever container, with those that were signed, and examine what else is in it.

    A signature covers tensors. What loads with them could run code: of a file all of it is examined, of a folder every file.

    Args:
        path: the checkpoint.
        key: the Ed25519 public key, as PEM.
        signature: the file with the signature; else the checkpoint's name with `.sig` behind it.
        tensors_only: whatever else is in it does not count.

    Returns:
        The report; true when every tensor is the one that was signed and, without `tensors_only`, all files are plain
        (docs/scan.md) or hold nothing to run.

    Raises:
        SignatureError: the signature is not valid for this key, or cannot be read; tensors of the checkpoint have no digest.
        MissingPackageError: cryptography is not installed. CkptError: the checkpoint cannot be read, or is damaged.
    """
    place = _signature_of(path) if signature is None else os.fspath(signature)
    if signature is None and not is_there(place):
        fix = "The signature of the file that it was made from is valid for it too: `signature=FILE.sig`."
        raise SignatureError(f"There is no signature {place}.", fix=fix)
    payload, keyid = open_sealed(place, key)
    name, signed = digests_in(payload, place)
    with collector_paused(), open_checkpoint(path) as checkpoint:
        not_plain = _not_plain(path, checkpoint)
        beside = [file for file in _others(path, place, checkpoint) if _has_weights(file)]
        found = _digests(checkpoint, whole=False)
    compared = digests.compare(found, signed, place)
    return Verified(os.fspath(path), place, keyid, name, len(signed), compared, not_plain, beside, tensors_only)


def _not_plain(path: str | os.PathLike[str], checkpoint: Checkpoint) -> list[Scanned]:
    """What may run code: of a folder every file counts, whoever loads it."""
    if os.path.isdir(path):
        found = list(scan_files(list(files_of([path]))))
    else:
        found = [Scanned(os.fspath(path), checkpoint.file_bytes, of_checkpoint(checkpoint))]
    return [report for report in found if report.verdict not in ("plain", "nothing") and not _is_of_torch(report.safety)]


def _is_of_torch(safety: Safety) -> bool:
    """Whether a file needs no code but torch's own records of a distributed checkpoint: chunks, placements, paths."""
    if safety.verdict != "needs-code" or safety.program:
        return False
    return all(name.startswith(("torch.distributed.", "pathlib.")) for name in safety.classes)


def _not_signed(path: str | os.PathLike[str], signature: str, checkpoint: Checkpoint) -> NotSigned:
    described, not_plain = describe(checkpoint), _not_plain(path, checkpoint)
    return NotSigned(list(described.values), list(described.metadata), _others(path, signature, checkpoint), not_plain)


def _others(path: str | os.PathLike[str], signature: str, checkpoint: Checkpoint) -> list[str]:
    """The files of a folder that hold none of the checkpoint's tensors."""
    own = {file.path for file in checkpoint.files} | {Path(signature)}
    return [str(file) for file in files_of([path]) if Path(file) not in own] if os.path.isdir(path) else []


def _has_weights(path: str) -> bool:
    """Whether a file holds tensors, and is not a training's state; of one that cannot be read that is not known."""
    if any(map(is_state, Path(path).parts[-2:])):  # accelerate has folders of it
        return False
    try:
        with open_checkpoint(path) as checkpoint:
            return bool(checkpoint.tensors)
    except NotACheckpointError:
        return False
    except CkptError:
        return True


def _signature_of(path: str | os.PathLike[str]) -> str:
    return _named(path) + SUFFIX


def _named(path: str | os.PathLike[str]) -> str:
    """A path that ends in a name: of `.` and `..` the folder's own."""
    text = os.path.normpath(path)
    return os.path.abspath(text) if os.path.basename(text) in (".", "..") else text


def _digests(checkpoint: Checkpoint, *, whole: bool) -> list[Digest]:
    """The digests of all tensors. `whole`: refuse what a checksum shows to be damaged."""
    checkpoint.locate()
    path, read = checkpoint.path, read_checkpoint(checkpoint, digest=True)
    if whole and read.mismatches:
        fix = f"ckpt check {path} names what is damaged."
        raise ChecksumError(f"{path}: {len(read.mismatches)} records do not match their CRC-32.", fix=fix)
    if read.skipped:
        names = listed([dotted(where) or "(root)" for where in read.skipped])
        why = "A signature does not cover them."
        raise SignatureError(f"{path}: {len(read.skipped)} tensors have no digest: {names}.", why=why)
    return read.digests


_STATEMENT = "https://in-toto.io/Statement/v1"
PREDICATE_TYPE = "ckpt-tools:tensor-digests/v1"
_KINDS = (_STATEMENT, PREDICATE_TYPE)
_METHOD = {"method": "tensors", "hash_type": "sha256"}


def payload_of(found: Sequence[Digest], name: str) -> bytes:
    """The statement about a checkpoint of this name."""
    resources = [
        {"name": dotted(digest.where), "algorithm": "sha256", "digest": digest.sha256, "dtype": digest.dtype,
         "shape": list(digest.shape), "path": list(digest.where)}
        for digest in sorted(found, key=lambda digest: dotted(digest.where))
    ]  # fmt: skip
    statement = {
        "_type": _STATEMENT, "subject": [{"name": name, "digest": {"sha256": of_all(found)}}],
        "predicateType": PREDICATE_TYPE, "predicate": {"resources": resources, "serialization": _METHOD},
    }  # fmt: skip
    return json.dumps(statement, separators=(",", ":")).encode()


def digests_in(payload: bytes, label: str) -> tuple[str, list[Digest]]:
    """The name of what a statement is about, and the digests in it."""
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
    if row["algorithm"] != "sha256":
        raise ValueError
    return digests.checked(row["digest"], row["dtype"], row["shape"], row["path"])
