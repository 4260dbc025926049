"""`python -m tests.faults`: every job with every fault. Exit code 1 when something was torn.

A process with all of ckpt_tools imported is forked for each run, so that hundreds of runs take a minute.
"""

from __future__ import annotations

import argparse
import sys

from tests.faults import system_calls
from tests.faults.jobs import AHEAD, JOBS
from tests.faults.runs import Rig, TornError, rigs
from tests.support.commands import import_all


def main() -> int:
    """Run, report, count."""
    options = _options()
    import_all()
    runs = torn = 0
    jobs = [job for job in (JOBS if options.every > 1 else (*JOBS, AHEAD)) if options.only in job.name]
    for rig in rigs(jobs):
        mine = 0
        for number, fault in enumerate(rig.faults()):
            if (number + runs) % options.every:
                continue
            mine += 1
            try:
                rig.run(fault)
            except TornError as error:
                torn += 1
                print(error, flush=True)
        runs += mine
        if options.every == 1 and rig.job.arguments and system_calls.available():
            made, broken = _below_python(rig)
            runs, torn = runs + made, torn + broken
        print(f"{rig.job.name}: {mine} runs, {sum(rig.calls.values())} calls", flush=True)
    print(f"{runs} runs, {torn} torn")
    return 1 if torn else 0


def _below_python(rig: Rig) -> tuple[int, int]:
    """How many runs under strace, and how many of them tore something."""
    made = torn = 0
    for fault, code, told in system_calls.run_all(rig):
        made += 1
        try:
            rig.judge(fault, code, told)
        except TornError as error:
            torn += 1
            print(f"strace: {error}", flush=True)
    print(f"{rig.job.name}: {made} runs under strace", flush=True)
    return made, torn


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m tests.faults", description=__doc__)
    parser.add_argument("--every", type=int, default=1, help="only every n-th fault (1)")
    parser.add_argument("--only", default="", help="only the jobs with this in their name")
    return parser.parse_args()


if __name__ == "__main__":
    sys.exit(main())
