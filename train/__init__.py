"""A small training core: four networks, trained in one process, under DataParallel, DistributedDataParallel or FSDP2.

Read `train.py` first, from top to bottom. `python -m train --help` lists the options.
"""
