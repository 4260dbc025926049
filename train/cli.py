"""`python -m train`: the options of `Config`, and one call."""

import os
import sys
from collections.abc import Callable
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

import click
from click.core import ParameterSource

from ckpt_tools.errors import CkptError
from train.config import Config, spelled
from train.train import train

Command = Callable[..., int]


def options(command: Command) -> Command:
    """Gives a command the options of `Config`, with their defaults; what is true or false has a second name."""
    for each in reversed(fields(Config)):
        name = spelled(each.name) + (f"/--no-{spelled(each.name)[2:]}" if isinstance(each.default, bool) else "")
        about = {key: value for key, value in each.metadata.items() if key in ("help", "type", "metavar")}
        shown: dict[str, Any] = {"hidden": not about["help"], "show_default": each.default is not None}
        command = click.option(name, each.name, default=each.default, **about, **shown)(command)
    return command


SETTINGS = {
    "help_option_names": ["-h", "--help"],
    "max_content_width": 110,
    "token_normalize_func": lambda word: word.replace("_", "-"),  # --local_rank, as torch.distributed.launch spells it
}


@click.command(context_settings=SETTINGS)
@options
@click.pass_context
def command(ctx: click.Context, /, **options: Any) -> int:
    """Train one of four small networks, in one process, under DataParallel, DistributedDataParallel or FSDP2.

    \b
      python -m train --model mlp --out runs/mlp
      python -m train --model resnet18 --parallel dp
      torchrun --nproc-per-node 2 -m train --model lenet --parallel ddp --save wrapped
      torchrun --nproc-per-node 2 -m train --model lenet --parallel fsdp --save ranks
      python -m train --out runs/mlp --resume latest --epochs 20
      python -m train --evaluate runs/mlp/epoch_010.pth

    Each epoch ends with OUT/epoch_NNN.pth, or a folder OUT/epoch_NNN with --save ranks and dcp; then OUT/latest names it.
    Ctrl-C, SIGTERM and SIGHUP save after the step under way; a second Ctrl-C quits at once. A resumed run goes on exactly
    where that one stopped, with the options of that run; those given now come first, but for what decides the numbers
    (network, data, seed, batch size, learning rate ...). --resume auto is one command for the start and every restart.
    """
    given = frozenset(name for name in options if ctx.get_parameter_source(name) is ParameterSource.COMMANDLINE)
    config = Config(**options)
    if config.resume not in (None, "latest", "auto") and "out" not in given:
        config = replace(config, out=Path(str(config.resume)).parent)
    return train(config, given)


def main() -> None:
    """Runs the command; a user's mistake is one sentence, said by one process, and exit code 2; a full disk is 3."""
    try:
        code = command(prog_name="python -m train", standalone_mode=False)
    except click.ClickException as error:
        if os.environ.get("RANK", "0") == "0":
            error.show()
        code = 2
    except click.Abort:
        code = 130
    except CkptError as error:
        click.echo(f"Error: {error}", err=True)
        code = error.exit_code
    sys.exit(code)
