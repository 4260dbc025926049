"""`ckpt sign` and `ckpt verify`."""

from __future__ import annotations

import sys
from functools import partial
from pathlib import Path

import click

from ckpt_tools.cli.options import LOCATION, OUT_PATH, once, print_report, report_options
from ckpt_tools.cli.progress import show_progress
from ckpt_tools.render.proved import print_not_signed, print_signed, print_verified
from ckpt_tools.render.text import show


@click.command()
@click.argument("path", metavar="FILE", type=LOCATION)
@once("--key", required=True, type=LOCATION, metavar="PRIVATE.pem", help="An Ed25519 private key.")
@once("--output", "-o", type=OUT_PATH, metavar="SIGNATURE", help="Write the signature here [FILE.sig].")
@click.option("--overwrite", is_flag=True, help="Replace the signature if it exists.")
@report_options
def sign(path: Path, key: Path, output: Path | None, overwrite: bool, quiet: bool, json: bool) -> None:
    """Sign the digests of all tensors of FILE. The signature is valid in every container that holds the same tensors.

    It covers tensors alone: what else is in FILE is named before it is written.

    \b
    openssl genpkey -algorithm ed25519 -out key.pem
    openssl pkey -in key.pem -pubout -out key.pub
    ckpt sign model.pth --key key.pem
    ckpt convert model.pth model.safetensors && ckpt verify model.safetensors --key key.pub --signature model.pth.sig

    Needs cryptography (the extra `sign`): pip install cryptography.

    Exit code: 0 signed, 2 usage, 3 refused.
    """
    from ckpt_tools.operations.signing import sign as sign_checkpoint

    before = None if quiet or json else lambda found: show(partial(print_not_signed, found))
    with show_progress(quiet=quiet):
        report = sign_checkpoint(path, key=key, output=output, overwrite=overwrite, before=before)
    print_report(report, print_signed, json=json, quiet=quiet)


@click.command(short_help="Are the tensors of FILE those that were signed, and is it safe to load?")
@click.argument("path", metavar="FILE", type=LOCATION)
@once("--key", required=True, type=LOCATION, metavar="PUBLIC.pem", help="The Ed25519 public key.")
@once("--signature", type=LOCATION, metavar="SIGNATURE", help="What ckpt sign wrote [FILE.sig].")
@click.option("--tensors-only", is_flag=True, help="Compare the tensors alone: what else is in FILE may run code.")
@report_options
def verify(path: Path, key: Path, signature: Path | None, tensors_only: bool, quiet: bool, json: bool) -> None:
    """Are the tensors of FILE, in whatever container, those that were signed? Names each that is not.

    A signature covers tensors alone, so FILE, or every file of a folder, must also be plain, as `ckpt scan` says it.

    \b
    ckpt verify model.pth --key key.pub
    ckpt verify model.safetensors --key key.pub --signature model.pth.sig

    Exit code: 0 all of them and nothing in FILE can run, 1 some are not or FILE may run code, 2 usage, 3 refused: the
    signature is not this key's, or a file cannot be read.
    """
    from ckpt_tools.operations.signing import verify as verify_checkpoint

    with show_progress(quiet=quiet):
        report = verify_checkpoint(path, key=key, signature=signature, tensors_only=tensors_only)
    print_report(report, print_verified, json=json, quiet=quiet)
    sys.exit(0 if report else 1)
