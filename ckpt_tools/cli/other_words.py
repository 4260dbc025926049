"""Words of other programs for what is called otherwise here, and suggestions for those that were mistyped."""

from __future__ import annotations

import os
from collections.abc import Iterable

import click

from ckpt_tools.text import did_you_mean, did_you_mean_file

_NEAR = 0.75  # of two options: --half is not --help
_SHOWN = 3

# Options that are no more, and have no other name.
_GONE = (
    "--verify", "--reserve", "--compact", "--fsync", "--rows", "--only-weights", "--like-select", "--from-args", "--prove",
    "--prove-model", "--jobs",
)  # fmt: skip
COMMANDS = {
    "merge": "ckpt convert BASE OUT --lora ADAPTER, or ckpt convert FOLDER OUT",
    "merge-lora": "ckpt convert BASE OUT --lora ADAPTER",
    "strip": "ckpt convert IN OUT --unwrap",
    "rename": "ckpt convert IN OUT --rename '^old=new'",
    "prune": "ckpt convert IN OUT --drop 'GLOB', or --slim",
    "quantize": "ckpt convert IN OUT.gguf --dtype q8_0, or --dtype fp8_e4m3",
    "dequantize": "ckpt convert IN OUT --dequantize",
    "split": "ckpt convert IN FOLDER --shard-size 5GB",
    "shard": "ckpt convert IN FOLDER --shard-size 5GB",
    "extract": "ckpt convert IN OUT --select WHERE",
    "list": "ckpt inspect PATH", "ls": "ckpt inspect PATH", "info": "ckpt inspect PATH",
    "print": "ckpt inspect PATH", "keys": "ckpt inspect --all PATH",
    "validate": "ckpt check PATH", "test": "ckpt check PATH",
    "compare": "ckpt diff A B", "fix": "ckpt repair IN OUT", "recover": "ckpt repair IN OUT",
    "version": "ckpt --version",
}  # fmt: skip
OPTIONS = {
    "--force": "--overwrite", "--half": "--dtype fp16", "--fp16": "--dtype fp16", "--bf16": "--dtype bf16",
    "--bfloat16": "--dtype bf16", "--float16": "--dtype fp16", "--fp32": "--dtype fp32", "--cpu": "--map-location cpu",
    "--device": "--map-location", "--key": "--select", "--exclude": "--drop", "--include": "--keep",
    "--remove": "--drop", "--prefix": "--add-prefix", "--strip": "--strip-prefix",
    "--adapter": "--lora", "--max-shard-size": "--shard-size", "--output-dir": "--to-dir", "--out-dir": "--to-dir",
    "--type": "--dtype", "--precision": "--dtype", "--to": "--format", "--base": "--lora",
    "--quantize": "--dtype q8_0", "--dtype-only": "--dtype GLOB=TYPE", "--drop-metadata": "--set-metadata KEY=",
    "--reverse": "--plan PLAN:reverse",
}  # fmt: skip


def about_command(word: str, commands: Iterable[str]) -> str:
    """What somebody means who gives a word that is neither a command nor a file."""
    if word in COMMANDS:
        return f"Here it is {COMMANDS[word]}."
    return did_you_mean(word, commands) or did_you_mean_file(word, _files_here(word))


def correct(error: click.NoSuchOption) -> click.NoSuchOption:
    """The error with the option of this command that is meant: by its meaning, else by its letters."""
    import difflib

    known = [name for param in (error.ctx.command.params if error.ctx is not None else []) for name in param.opts]
    word, other = error.option_name.replace("_", "-"), OPTIONS.get(error.option_name, "")
    if other.partition(" ")[0] in known:
        meant = [other]
    elif word in known:
        meant = [word]
    else:
        meant = difflib.get_close_matches(word, known, _SHOWN, _NEAR)
    if word in _GONE and word not in known:
        gone = f"{word} is no more: docs/renamed.md says what to do instead."
        return click.NoSuchOption(error.option_name, gone, ctx=error.ctx)
    told = f" Did you mean {', '.join(map(repr, meant))}?" if meant else ""
    return click.NoSuchOption(error.option_name, f"No such option {error.option_name!r}.{told}", ctx=error.ctx)


def _files_here(word: str) -> list[str]:
    try:
        return sorted(os.listdir(os.path.dirname(word) or "."))
    except OSError:
        return []
