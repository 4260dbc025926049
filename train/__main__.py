"""`python -m train`, and `torchrun --nproc-per-node N -m train --parallel ddp`."""

import os
import signal


def main() -> None:
    """Runs the command line. Ctrl-C before the first step, while torch is imported even, leaves at once: nothing is lost."""
    signal.signal(signal.SIGINT, lambda number, frame: os._exit(128 + number))
    from train.cli import main as run  # takes a second, in which Ctrl-C would otherwise be a traceback

    run()


main()
