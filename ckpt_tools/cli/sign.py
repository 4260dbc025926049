"""`ckpt sign` and `ckpt verify`."""

from __future__ import annotations

import sys
from functools import partial
from pathlib import Path

import click

from ckpt_tools.cli.options import LOCATION, OUT_PATH, once, print_report, report_options, show_progress
from ckpt_tools.render.proved import print_not_signed, print_signed, print_verified
from ckpt_tools.render.text import show


@click.command(short_help="Sign the tensors of a checkpoint.")
@click.argument("path", metavar="FILE", type=LOCATION)
@once("--key", required=True, type=LOCATION, metavar="PRIVATE.pem", help="An Ed25519 private key.")
@once("--output", "-o", type=OUT_PATH, metavar="SIGNATURE", help="Write the signature here [FILE.sig].")
@click.option("--overwrite", is_flag=True, help="Replace the signature if it exists.")
@report_options
def sign(path: Path, key: Path, output: Path | None, overwrite: bool, quiet: bool, json: bool) -> None:
    """Sign the tensors of FILE. The signature stays valid in any format that has the same tensors.

    It covers only tensors: whatever else is in FILE is listed first.

    \b
    openssl genpkey -algorithm ed25519 -out key.pem
    openssl pkey -in key.pem -pubout -out key.pub
    ckpt sign model.pth --key key.pem
    ckpt convert model.pth model.safetensors && ckpt verify model.safetensors --key key.pub --signature model.pth.sig

    Needs cryptography: pip install cryptography.

    Exit code: 0 success, 2 usage, 3 refused.
    """
    from ckpt_tools.operations.signing import sign as sign_checkpoint

    before = None if quiet or json else lambda found: show(partial(print_not_signed, found))
    with show_progress(quiet=quiet):
        report = sign_checkpoint(path, key=key, output=output, overwrite=overwrite, before=before)
    print_report(report, print_signed, json=json, quiet=quiet)


@click.command(short_help="Check a signature.")
@click.argument("path", metavar="FILE", type=LOCATION)
@once("--key", required=True, type=LOCATION, metavar="PUBLIC.pem", help="The Ed25519 public key.")
@once("--signature", type=LOCATION, metavar="SIGNATURE", help="The signature [FILE.sig].")
@click.option("--tensors-only", is_flag=True, help="Check only the tensors; the file may still contain code.")
@report_options
def verify(path: Path, key: Path, signature: Path | None, tensors_only: bool, quiet: bool, json: bool) -> None:
    """Check a signature: are the tensors of FILE, in any format, those that were signed? Lists each that is not.

    A signature covers only tensors, so FILE must also be safe, as `ckpt scan` says.

    \b
    ckpt verify model.pth --key key.pub
    ckpt verify model.safetensors --key key.pub --signature model.pth.sig

    Exit code: 0 all tensors are as signed and FILE is safe, 1 they are not, it may run code, or a folder holds other weights
    too, 2 usage, 3 refused: the signature is not from this key, or a file cannot be read.
    """
    from ckpt_tools.operations.signing import verify as verify_checkpoint

    with show_progress(quiet=quiet):
        report = verify_checkpoint(path, key=key, signature=signature, tensors_only=tensors_only)
    print_report(report, print_verified, json=json, quiet=quiet)
    sys.exit(0 if report else 1)
