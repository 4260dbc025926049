"""What each process of a job of `ranks` does: one run after another, since starting a process takes longer than training.

Run by tests.support.job: ranks_job.py PLANS. A plan is [options, rank, step]: that rank sends itself SIGTERM after so many
steps; rank -1 is nobody. A rank that waits for another for minutes says where, and ends.
"""

import faulthandler
import json
import os
import signal
import sys
import warnings
from collections.abc import Callable
from itertools import count
from typing import Any

from train import metrics
from train import train as loop
from train.__main__ import command

warnings.simplefilter("error")
faulthandler.dump_traceback_later(200, exit=True)
metrics.draw = lambda rows, path: None
step = loop.train_step


def stopping(rank: int, after: int) -> Callable[..., None]:
    """A step of training; that rank sends itself SIGTERM in the one of this number."""
    numbers = count(1)

    def numbered(*arguments: Any) -> None:
        if next(numbers) == after and int(os.environ["RANK"]) == rank:
            os.kill(os.getpid(), signal.SIGTERM)
        step(*arguments)

    return numbered


for number, (options, rank, after) in enumerate(json.loads(sys.argv[1])):
    os.environ["TORCHELASTIC_RESTART_COUNT"] = str(number)
    loop.train_step = stopping(rank, after)
    code = command(["--parallel", "ddp", *options], standalone_mode=False)
    assert code == (0 if rank < 0 else 128 + signal.SIGTERM), code
