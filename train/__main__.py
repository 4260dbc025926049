"""The command line: `python -m train`, and `torchrun --nproc-per-node N -m train --parallel ddp`."""

import os
import signal
import sys
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

import click
from click.core import ParameterSource

from ckpt_tools.errors import CkptError
from train.config import Config, spelled

SETTINGS = {
    "help_option_names": ["-h", "--help"],
    "max_content_width": 110,
    "token_normalize_func": lambda word: word.replace("_", "-"),  # --local_rank, as torch.distributed.launch spells it
}


def option(each: Any) -> click.Option:
    """An option of `Config`, with its default; what is true or false has a second name."""
    name = spelled(each.name) + (f"/--no-{spelled(each.name)[2:]}" if isinstance(each.default, bool) else "")
    about = {key: each.metadata[key] for key in ("help", "type", "multiple") if key in each.metadata}
    about |= {"hidden": "often" not in each.metadata, "show_default": each.default not in (None, ())}
    return click.Option([name, each.name], default=each.default, **about)


def show_all(ctx: click.Context, param: click.Parameter, value: bool) -> None:
    """Prints the help with every option, and ends."""
    if value:
        for each in ctx.command.params:
            each.hidden = False  # type: ignore[attr-defined]  # they are options
        click.echo(ctx.get_help())
        ctx.exit()


@click.command(context_settings=SETTINGS, params=[option(each) for each in fields(Config)])
@click.option("--help-all", is_flag=True, is_eager=True, expose_value=False, callback=show_all, help="Show every option.")
@click.pass_context
def command(ctx: click.Context, /, **options: Any) -> int:
    """Train a network: in one process, under DataParallel, DDP or FSDP2.

    \b
      python -m train --model mlp --out runs/mlp
      torchrun --nproc-per-node 2 -m train --model lenet --parallel ddp
      python -m train --out runs/mlp --resume latest --epochs 20
      python -m train --evaluate runs/mlp/epoch_010.pth

    OUT/epoch_NNN.pth is what a run goes on from, OUT/epoch_NNN.weights.pth the weights alone.
    """
    from train.train import measure, train  # takes a second, in which Ctrl-C would otherwise be a traceback

    given = frozenset(name for name in options if ctx.get_parameter_source(name) is ParameterSource.COMMANDLINE)
    config = Config(**options)
    if config.evaluate:
        return measure(config, config.evaluate, given)
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


if __name__ == "__main__":
    # Ctrl-C before the first step leaves at once: nothing is lost.
    signal.signal(signal.SIGINT, lambda number, frame: os._exit(128 + number))
    main()
