"""Sign a checkpoint's tensors, and verify a checkpoint in any container against that signature."""

from __future__ import annotations

import os
import shlex
from dataclasses import asdict, dataclass
from typing import Any

from ckpt_tools.errors import ChecksumError, DamagedFileError, SignatureError
from ckpt_tools.formats.open import collector_paused, open_checkpoint
from ckpt_tools.io.content import Literal, Piece
from ckpt_tools.io.output import is_there, replacing
from ckpt_tools.io.writer import write
from ckpt_tools.operations.check import digests
from ckpt_tools.operations.check.digests import Compared, Digest
from ckpt_tools.operations.check.reading import read_checkpoint
from ckpt_tools.operations.signing.envelope import open_sealed, seal
from ckpt_tools.operations.signing.statement import digests_in, payload_of
from ckpt_tools.text import brief, dotted, listed, notebook
from ckpt_tools.tree.arguments import natural
from ckpt_tools.tree.output_names import check_document_name

SUFFIX = ".sig"


@dataclass(frozen=True, slots=True)
class Signed:
    """A signature that was written.

    Attributes:
        path: the checkpoint. signature: the file with the signature. keyid: SHA-256 of the public key.
        tensors: how many it covers.
    """

    path: str
    signature: str
    keyid: str
    tensors: int

    __repr__ = brief
    _repr_html_ = notebook

    def to_json(self) -> dict[str, Any]:
        """The report as plain data."""
        return asdict(self)


@dataclass(frozen=True, slots=True)
class Verified:
    """A checkpoint, compared with what was signed; true when all tensors of both are the same.

    Attributes:
        path: the checkpoint. signature: the file with the signature, which is valid. keyid: SHA-256 of the public key.
        signed: the name of what was signed. tensors: how many the signature covers. compared: which are equal, and which not.
    """

    path: str
    signature: str
    keyid: str
    signed: str
    tensors: int
    compared: Compared

    def __bool__(self) -> bool:
        return not (self.compared.different or self.compared.missing or self.compared.unexpected)

    __repr__ = brief
    _repr_html_ = notebook

    def to_json(self) -> dict[str, Any]:
        """The report as plain data; `verified` is the verdict."""
        return {"verified": bool(self), **asdict(self)}


@natural
def sign(
    path: str | os.PathLike[str], *, key: str | os.PathLike[str], output: str | os.PathLike[str] | None = None,
    overwrite: bool = False,
) -> Signed:  # fmt: skip
    """Sign the digests of all tensors of a checkpoint. The signature is valid for every container that holds the same tensors.

    Args:
        path: the checkpoint.
        key: an Ed25519 private key, as PEM (`openssl genpkey -algorithm ed25519`).
        output: the file for the signature; else the checkpoint's name with `.sig` behind it.
        overwrite: replace it if it exists.

    Raises:
        SignatureError: the key cannot be read; tensors of the checkpoint have no digest, or there are none.
        MissingPackageError: cryptography is not installed.
        OutputError: the signature exists, or cannot be written. CkptError: the checkpoint cannot be read, or is damaged.
    """
    target = _signature_of(path) if output is None else os.fspath(output)
    check_document_name(target, "a signature", SUFFIX)
    found = _digests(path, whole=True)
    if not found:
        raise SignatureError(f"{path} has no tensors, and nothing else is signed.")
    text, keyid = seal(payload_of(found, os.path.basename(os.path.normpath(path))), key)
    with replacing(target, overwrite=overwrite) as file:
        write([Piece(Literal(text.encode()))], file)
    return Signed(os.fspath(path), target, keyid, len(found))


@natural
def verify(
    path: str | os.PathLike[str], *, key: str | os.PathLike[str], signature: str | os.PathLike[str] | None = None
) -> Verified:
    """Compare the tensors of a checkpoint, in whatever container, with those that were signed.

    Args:
        path: the checkpoint.
        key: the Ed25519 public key, as PEM.
        signature: the file with the signature; else the checkpoint's name with `.sig` behind it.

    Returns:
        The report; true when every tensor is the one that was signed.

    Raises:
        SignatureError: the signature is not valid for this key, or cannot be read; tensors of the checkpoint have no digest.
        MissingPackageError: cryptography is not installed. CkptError: the checkpoint cannot be read, or is damaged.
    """
    place = _beside(path) if signature is None else os.fspath(signature)
    payload, keyid = open_sealed(place, key)
    name, signed = digests_in(payload, place)
    compared = digests.compare(_digests(path, whole=False), signed, place)
    return Verified(os.fspath(path), place, keyid, name, len(signed), compared)


def _beside(path: str | os.PathLike[str]) -> str:
    """The signature that lies beside a checkpoint. Raises SignatureError."""
    place = _signature_of(path)
    if not is_there(place):
        fix = "The signature of the file that it was made from is valid for it too: `signature=FILE.sig`."
        raise SignatureError(f"There is no signature {place}.", fix=fix)
    return place


def _signature_of(path: str | os.PathLike[str]) -> str:
    return os.path.normpath(path) + SUFFIX


def _digests(path: str | os.PathLike[str], *, whole: bool) -> list[Digest]:
    """The digests of all tensors. `whole`: refuse what a checksum shows to be damaged; else its tensors' digests tell."""
    with collector_paused(), open_checkpoint(path) as checkpoint:
        if half := [file.path for file in checkpoint.files if file.half_edited]:
            why = "It is read as it was before, and other programs do not read these bytes."
            fix = f"ckpt repair {shlex.quote(str(half[0]))}"
            raise DamagedFileError(f"{half[0]} is half edited: an edit in place was interrupted.", why=why, fix=fix)
        checkpoint.locate()
        read = read_checkpoint(checkpoint, digest=True)
    if whole and read.mismatches:
        fix = f"ckpt check {path} names what is damaged."
        raise ChecksumError(f"{path}: {len(read.mismatches)} records do not match their CRC-32.", fix=fix)
    if read.skipped:
        names = listed([dotted(where) or "(root)" for where in read.skipped])
        why = "A signature does not cover them."
        raise SignatureError(f"{path}: {len(read.skipped)} tensors have no digest: {names}.", why=why)
    return read.digests
