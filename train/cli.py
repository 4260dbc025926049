"""`python -m train`: the options, each with the default of `Config`, and one call."""

import os
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import click
from click.core import ParameterSource

from ckpt_tools.errors import CkptError
from train.config import CHOICES, Config
from train.train import train

Command = Callable[..., int]


def option(*names: str, **settings: Any) -> Callable[[Command], Command]:
    """A click option whose default, shown in --help, is the one in `Config`."""
    field = names[0].split("/")[0].removeprefix("--").replace("-", "_")
    default = getattr(Config, field)
    if field in CHOICES:
        settings["type"] = click.Choice(CHOICES[field])
    return click.option(*names, field, default=default, show_default=default is not None, **settings)


COUNT = click.IntRange(min=1)
SAVE = (
    "Plain names; the wrapper's names (module.); the network pickled whole, which cannot be resumed; under fsdp a "
    "folder: a file for each rank, or torch.distributed.checkpoint's."
)
PARALLEL = "One device, DataParallel, DistributedDataParallel, FSDP2 (fully_shard)."
RESUME = "Go on from a checkpoint as its run would have; auto: from the newest in --out, or anew where there is none."
POSITIVE = click.FloatRange(min=0, min_open=True)


@click.command(context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 110})
@option("--model", help="The network.")
@option("--width", type=POSITIVE, help="Multiplies every inner channel count; 1 is the published network.")
@option("--hidden", type=COUNT, help="First linear layer of cnn: 8000 or 5000 as published.")
@option("--data", help="The images; all but digits and synthetic are read by torchvision.")
@option("--data-dir", type=click.Path(path_type=Path), help="Where the files of mnist, fashion-mnist, cifar10 are.")
@option("--shape", help="CHANNELSxHEIGHTxWIDTH of synthetic images.")
@option("--samples", type=click.IntRange(min=10), help="How many synthetic images; a fifth of them is for testing.")
@option("--out", type=click.Path(file_okay=False, path_type=Path), help="Folder for checkpoints and figures.")
@option("--epochs", type=click.IntRange(min=0), help="Epochs in all, earlier ones included; 0 saves fresh weights.")
@option("--batch-size", type=COUNT, help="Samples of one optimizer step, over all processes and devices.")
@option("--grad-accum", type=COUNT, help="Passes that one batch is cut into, to save memory.")
@option("--lr", type=POSITIVE, help="Learning rate of SGD.")
@option("--momentum", type=click.FloatRange(0, 1, max_open=True), help="Momentum of SGD.")
@option("--schedule", help="Of the learning rate; cosine ends at 0 after --epochs.")
@option("--scale-lr", is_flag=True, help="The linear rule: --lr is for a batch of 256, and grows with --batch-size.")
@option("--seed", type=click.IntRange(min=0), help="Of the weights and of the order of the images.")
@option("--parallel", help=PARALLEL)
@option("--device", metavar="auto|cpu|cuda|cuda:N", help="Where to train; under ddp and fsdp each process has its own GPU.")
@option("--device-ids", metavar="0,1,...", help="The GPUs of --parallel dp.  [default: all]")
@option("--local-rank", "--local_rank", type=int, hidden=True)  # torch.distributed.launch gives it, torchrun does not
@option("--sync-bn/--no-sync-bn", help="Under ddp on GPUs: batch statistics over all processes.")
@option("--find-unused-parameters/--no-find-unused-parameters", help="Under ddp: a pass may skip a part of the network.")
@option("--broadcast-buffers/--no-broadcast-buffers", help="Under ddp: rank 0's batch statistics for all before every pass.")
@option("--amp", help="Mixed precision; fp16 comes with a gradient scaler.")
@option("--compile/--no-compile", help="torch.compile the network.")
@option("--workers", type=click.IntRange(min=0), help="Processes that prepare batches.")
@option("--save", help=SAVE)
@option("--format", help="safetensors: the weights alone, which cannot be resumed.")
@option("--keep", type=COUNT, help="How many checkpoints stay.  [default: all]")
@option("--resume", metavar="PATH|latest|auto", help=RESUME)
@option("--read", help="Which processes read the file to resume from.")
@option("--evaluate", type=click.Path(path_type=Path), help="Measure a checkpoint of any mode on the test images; no training.")
@option("--log-every", type=click.IntRange(min=0), help="A line every so many steps, with seconds a step; 0: one an epoch.")
@option("--tensorboard/--no-tensorboard", help="Write TensorBoard events into --out.")
@click.pass_context
def command(ctx: click.Context, /, **options: Any) -> int:
    """Train one of four small networks, in one process, under DataParallel, DistributedDataParallel or FSDP2.

    \b
      python -m train --model mlp --out runs/mlp
      python -m train --model resnet18 --parallel dp
      torchrun --nproc-per-node 2 -m train --model lenet --parallel ddp --save wrapped
      torchrun --nproc-per-node 2 -m train --model lenet --parallel fsdp --save ranks
      python -m train --out runs/mlp --resume latest --epochs 20
      python -m train --model mlp --evaluate runs/mlp/epoch_010.pth

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
