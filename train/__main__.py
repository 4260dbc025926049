"""`python -m train`, and `torchrun --nproc-per-node N -m train --parallel ddp`."""

from train.cli import main

main()
