"""A small training core: four networks, trained in one process, under DataParallel or under DistributedDataParallel.

Read `train.py` first, from top to bottom. `python -m train --help` lists the options.
"""
