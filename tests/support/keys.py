"""Pairs of keys for signatures."""

from pathlib import Path
from typing import Any


def write_keys(folder: Path, name: str, key: Any = None) -> tuple[Path, Path]:
    """A private and a public key, as openssl writes them."""
    from cryptography.hazmat.primitives import serialization  # an extra: tests that need it skip without
    from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

    key = key or Ed25519PrivateKey.generate()
    private, public = folder / f"{name}.pem", folder / f"{name}.pub"
    plain = serialization.NoEncryption()
    private.write_bytes(key.private_bytes(serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, plain))
    form = serialization.PublicFormat.SubjectPublicKeyInfo
    public.write_bytes(key.public_key().public_bytes(serialization.Encoding.PEM, form))
    return private, public
